// Package offline loads a config without starting it, finds out which limits a request
// would meet, and has the commands explain and check, which tell it.
package offline

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/adminapi"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/placeholder"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Module is what the root package lends, which has Caddy's modules and can't be imported
// from here.
type Module interface {
	// Name is the name of the handler and of the app.
	Name() string

	// Handler returns h as a handler of limits; false if it is another module's.
	Handler(h caddyhttp.MiddlewareHandler) (Handler, bool)

	// MaxKeys returns the option max_keys of the provisioned app.
	MaxKeys(app caddy.App) int

	// Redis reads the option redis of the app.
	Redis(config json.RawMessage) (Redis, error)
}

// Redis returns the options of a config's Redis, or an error if they are invalid.
type Redis func(caddy.Context) (limiter.RedisOptions, error)

// Handler is a provisioned handler of limits.
type Handler interface {
	Limits() []*Limit // in the order in which requests meet them
	OnError() string

	// Evaluate finds out which buckets r has to pass if it arrives at the given time,
	// or now if that is zero. With an error, the request is rejected, and has the
	// buckets that were found before. The Evaluation must be released before the
	// next one.
	Evaluate(r *http.Request, at time.Time) (Evaluation, error)
}

// Evaluation is what one request has to pass at one handler.
type Evaluation interface {
	Buckets() []limiter.Bucket
	Limit(i int) *Limit             // of a bucket
	Numbers(i int) adminapi.Numbers // of a bucket, for this request
	Drop(i int)                     // removes a bucket

	// Banned reports, after Decide, whether the limit of a bucket bans the key, and
	// whether this request began that.
	Banned(i int) (banned, began bool)

	// Above reports, after Decide, whether the request filled a bucket above the size of
	// its limit, and how long it has to wait for it.
	Above(i int) (over bool, delay time.Duration)

	// Decide has a store decide, as the handler does. Afterwards there are only the
	// buckets of which there is a decision.
	Decide(ctx context.Context, store limiter.Store) ([]limiter.Decision, error)

	// Held returns, after Decide, what the request holds of a bucket until its outcome
	// is known, or nil if it is charged at once.
	Held(i int) Held

	Release()
}

// Held is what a request holds of one bucket, or would hold if it had not been denied.
type Held interface {
	// Charge returns what the request is charged by its response, and whether the
	// response tells: if not, the estimated cost is charged. It must be called before the
	// next request is evaluated.
	Charge(r *Response) (charge int64, known bool)

	// Settle charges so much instead of what is held, once.
	Settle(charge int64)
}

// Response is the response to a request.
type Response struct {
	Status  int         // 0 if there is none
	Unknown bool        // there is none since the client has left: the next handlers had the request
	Header  http.Header // which placeholders show as well, see Run.SetResponse
	Bytes   int64       // of its body; -1 if unknown
}

// Limit describes a bucket of a limit, as it is configured. A limit around others may
// have none itself: it then has a path and matchers only.
type Limit struct {
	Path    string
	Bucket  string // its name in stores; a bucket of a client's address has another one
	Unnamed bool   // whether it or one around it has no name
	Off     bool
	DryRun  bool
	Numbers adminapi.Numbers
	Key     placeholder.Key

	Size      int64  // in force; 0 if it depends on the request
	Written   int64  // the option, which Factor divides; 0 likewise
	Factor    uint64 // in millionths; 0 if it depends on the request
	Above     int64  // what the bucket may hold above its size; 0 if that depends on the request
	HasSize   bool   // whether it admits more if its size is larger
	HasWindow bool
	Leasable  bool // whether it could have consistency lease
	Dynamic   []Dynamic

	Settlement Settlement

	Matchers caddyhttp.MatcherSets
	Around   []*Limit // the outermost first
}

// Dynamic is an option whose value depends on the request.
type Dynamic struct {
	Option, Template string
	Identity         bool // each value has buckets of its own
}

// Settlement is how requests are charged that hold units of a limit until their outcome is
// known.
type Settlement struct {
	InProgress   bool   // not at all, as only requests in progress count
	Counts       bool   // whether only some responses count
	CountsHeader bool   // whether header fields decide which
	ActualCost   string // the option
}

// ReadsHeader reports whether it takes header fields of the response.
func (s *Settlement) ReadsHeader() bool {
	return s.CountsHeader || strings.Contains(s.ActualCost, "{")
}

// failed returns the matchers of l, or of the outermost limit around it, that do not
// match r, or nil if all match.
func (l *Limit) failed(r *http.Request) (caddyhttp.MatcherSets, error) {
	for _, outer := range l.Around {
		if matches, err := outer.Matchers.AnyMatchWithError(r); err != nil || !matches {
			return outer.Matchers, err
		}
	}
	if matches, err := l.Matchers.AnyMatchWithError(r); err != nil || !matches {
		return l.Matchers, err
	}
	return nil, nil
}

// always reports whether all requests that reach the handler meet l.
func (l *Limit) always() bool {
	for _, outer := range l.Around {
		if len(outer.Matchers) > 0 {
			return false
		}
	}
	return len(l.Matchers) == 0
}
