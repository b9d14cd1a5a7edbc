package ratelimit

import (
	"fmt"
	"net/http"
	"sync"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// check collects what one request has to pass.
type check struct {
	request   *http.Request
	replacer  *caddy.Replacer
	buckets   []limiter.Bucket
	policies  []*policy // of the buckets
	decisions []limiter.Decision

	// The fixed key expanded last: most limits of a request have it in common.
	key     *key
	keyText string
	keyOwn  bool

	network string // that the client's address is in, once it was needed
}

// checks are those that no request uses, with the memory of their slices.
var checks = sync.Pool{New: func() any { return new(check) }}

// checkOf returns the check of a request, to be released when it is done.
func checkOf(r *http.Request) *check {
	c := checks.Get().(*check)
	c.request = r
	c.replacer = r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	return c
}

// release lets another request use the check.
func (c *check) release() {
	clear(c.buckets) // of what clients sent
	*c = check{buckets: c.buckets[:0], policies: c.policies[:0], decisions: c.decisions[:0]}
	checks.Put(c)
}

// keyOf returns the key of the request for b, and whether it has one or the
// client's address stands in.
func (c *check) keyOf(b *bucket) (text string, own bool, err error) {
	k := b.limit.key
	if c.key == k {
		return c.keyText, c.keyOwn, nil
	}
	text, own, err = k.expand(c.request, c.replacer)
	if err == nil && !own {
		text, err = k.client(c.request)
	}
	if err == nil && k.fixed {
		c.key, c.keyText, c.keyOwn = k, text, own
	}
	return text, own, err
}

// clientNetwork returns the network that the client's address is in.
func (c *check) clientNetwork() string {
	if c.network == "" {
		c.network = networkOf(c.request)
	}
	return c.network
}

// badValue returns the refusal of a request for which a placeholder made no
// usable value; none if there is no error.
func (c *check) badValue(b *bucket, status int, err error) error {
	if err == nil {
		return nil
	}
	b.limit.reportBadValue(err)
	return refusal{status: status, err: fmt.Errorf("limit %q: %w", b.path, err)}
}
