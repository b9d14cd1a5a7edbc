// Package httplimit limits the requests that a net/http server accepts.
//
//	limit, err := httplimit.New(httplimit.Options{
//		Store:  limiter.NewMemory(),
//		Limits: []httplimit.Limit{{Name: "api", Limit: limiter.PerSecond(10)}},
//	})
//	if err != nil {
//		log.Fatal(err)
//	}
//	log.Fatal(http.ListenAndServe(":8080", limit(mux)))
//
// Each client address may send ten requests a second. Others are denied with status 429 (Too
// Many Requests) and a Retry-After field. All responses say what is left, in the fields
// RateLimit-Policy and RateLimit of draft-ietf-httpapi-ratelimit-headers-11:
//
//	RateLimit-Policy: "api";q=10;w=1
//	RateLimit: "api";r=9;t=1
//
// Behind a proxy, all requests come from its address. [Address] says how to trust it.
package httplimit

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome/fieldtext"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Options describe what [New] returns. Store and Limits are required.
type Options struct {
	// The Store that keeps the buckets. A [limiter.Redis] should have a Fallback: without
	// one, requests get status 503 (Service Unavailable) while its server does not answer.
	Store limiter.Store

	// The limits that each request has to pass. It is charged one unit of all of them, or
	// nothing if any of them denies it.
	Limits []Limit

	// Responds to requests that are denied, if not nil, with any status. The header fields
	// are set already, and so is Cache-Control: no-store.
	Denied http.Handler
}

// Limit is one limit on requests.
type Limit struct {
	// What is limited, such as "login", in printable ASCII without quotes and backslashes,
	// as clients see it; empty means "default". Limits in one Store that have the
	// same Name and Limit share their buckets.
	Name string

	// The limit of each key. One made by [limiter.Concurrency] counts requests in progress,
	// until the handler returns; one made by [limiter.BanAfter] can't be used here.
	Limit limiter.Limit

	// Returns whose request it is, such as an account. All requests with the same key share
	// a bucket, also those with an empty one. Nil means Address().
	Key func(*http.Request) string
}

// New returns a function that wraps a handler in the limits. Handlers that it wraps share
// their buckets. To exempt requests, route them past it.
//
// An error says which option is not valid.
func New(opt Options) (func(http.Handler) http.Handler, error) {
	m := middleware{store: opt.Store, denied: opt.Denied}
	switch {
	case opt.Store == nil:
		return nil, errors.New("httplimit: Store is nil: use limiter.NewMemory or limiter.NewRedis")
	case len(opt.Limits) == 0:
		return nil, errors.New("httplimit: Limits is empty: give at least one")
	}
	for _, l := range opt.Limits {
		if l.Name == "" {
			l.Name = "default"
		}
		if l.Key == nil {
			l.Key = Address()
		}
		if strings.ContainsFunc(l.Name, func(c rune) bool { return c < ' ' || c > '~' || c == '"' || c == '\\' }) {
			return nil, fmt.Errorf("httplimit: limit %q: use a name in printable ASCII, without quotes and backslashes", l.Name)
		}
		inProgress := (*bucket.Limit)(&l.Limit).CountsHeld()
		m.limits, m.inProgress = append(m.limits, l), append(m.inProgress, inProgress)
		m.holds = m.holds || inProgress
	}
	// What no store could decide is an error here, and not of each request.
	if _, _, err := m.take(context.Background(), limiter.NewMemory(), m.buckets(func(Limit) string { return "" })); err != nil {
		return nil, fmt.Errorf("httplimit: %w", err)
	}
	return m.wrap, nil
}

// middleware is what New returns, except for the handler.
type middleware struct {
	store      limiter.Store
	limits     []Limit
	inProgress []bool // whether each counts requests in progress
	holds      bool   // whether any does
	denied     http.Handler
}

// wrap returns next with the limits.
func (m *middleware) wrap(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		at := time.Now()
		buckets := m.buckets(func(l Limit) string { return l.Key(r) })
		decisions, done, err := m.take(r.Context(), m.store, buckets)
		if err != nil {
			w.Header().Set("Cache-Control", "no-store")
			http.Error(w, "The rate limiter is unavailable.", http.StatusServiceUnavailable)
			return
		}
		defer done()
		sum := limiter.Summarize(buckets, decisions)
		m.setFields(w.Header(), decisions, sum.Denied, at)
		if !sum.Denied {
			next.ServeHTTP(w, r)
			return
		}
		retry := fieldtext.WholeSeconds(sum.RetryAfter)
		w.Header().Set("Retry-After", retry)
		w.Header().Set("Cache-Control", "no-store")
		if m.denied != nil {
			m.denied.ServeHTTP(w, r)
			return
		}
		http.Error(w, "Too many requests. Retry after "+retry+" s.", http.StatusTooManyRequests)
	})
}

// buckets returns the buckets of one request.
func (m *middleware) buckets(key func(Limit) string) []limiter.Bucket {
	buckets := make([]limiter.Bucket, len(m.limits))
	for i, l := range m.limits {
		buckets[i] = limiter.Bucket{Name: l.Name, Key: key(l), Limit: l.Limit, Cost: 1, Hold: m.inProgress[i]}
	}
	return buckets
}

// take decides one request. done ends it: it is no longer in progress.
func (m *middleware) take(ctx context.Context, store limiter.Store, buckets []limiter.Bucket) (decisions []limiter.Decision, done func(), err error) {
	var held *limiter.Held
	if m.holds {
		held = new(limiter.Held)
	}
	decisions, err = store.Take(ctx, limiter.Request{Buckets: buckets, Held: held}, make([]limiter.Decision, 0, len(buckets)))
	return decisions, func() {
		for i, is := range m.inProgress {
			if is {
				held.Settle(i, 0)
			}
		}
	}, err
}

// setFields adds the fields that describe the limits, as they were decided at a time, to h. They
// are lists, so the members of another middleware stay.
func (m *middleware) setFields(h http.Header, decisions []limiter.Decision, denied bool, at time.Time) {
	var policies, limits []byte
	for i := range decisions {
		l, d, unit := &m.limits[i], &decisions[i], ""
		if m.inProgress[i] {
			unit = fieldtext.ConcurrentRequests
		}
		if i > 0 {
			policies, limits = append(policies, ", "...), append(limits, ", "...)
		}
		policies = fieldtext.AppendPolicy(append(append(append(policies, '"'), l.Name...), '"'), &l.Limit, d, unit)
		limits = fieldtext.AppendLimit(append(append(append(limits, '"'), l.Name...), '"'), &l.Limit, d, denied, unit, at)
	}
	h.Add("Ratelimit-Policy", string(policies))
	h.Add("Ratelimit", string(limits))
}
