package rule

import (
	"iter"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Handler is a handler of limits: what its requests have to pass.
type Handler struct {
	Limits     []*Limit
	Accounting Accounting
	OnError    OnError
	Families   outcome.Families
	Jitter     *Jitter // nil if waits are as short as they may be
	Log        bool    // whether the access log shows outcomes

	Store    limiter.Store
	Memory   limiter.Store // of this process, which counts what is sent
	Timeout  time.Duration // of Redis; 0 without
	Process  *telemetry.Process
	Logger   *zap.Logger
	reported telemetry.Throttle // of errors

	IgnoredAdvice []string // the kinds of advice that are not reported of it
}

// Module is a handler of Caddy that has limits. It is a type of the root package, which can't
// be imported from here.
type Module interface {
	caddyhttp.MiddlewareHandler

	// Compiled returns what the module has been compiled to. It is empty until it is
	// provisioned.
	Compiled() *Handler
}

// Accounting is what to charge when some limits have room for a request and others
// do not.
type Accounting string

// The ways of accounting.
const (
	Atomic  Accounting = "atomic"   // nothing
	Each    Accounting = "each"     // every limit that has room
	InOrder Accounting = "in_order" // the limits before the first that denies, as in mholt/caddy-ratelimit: only for zones
)

// ParseAccounting parses the option accounting.
var ParseAccounting = option.OneOf(Atomic, Each)

// OnError is how to handle a request on which Redis does not decide.
type OnError string

// The ways to do so.
const (
	OnErrorFallback OnError = "fallback" // this process decides
	OnErrorAllow    OnError = "allow"    // the request passes
	OnErrorDeny     OnError = "deny"     // it is rejected with 503
)

// ParseOnError parses the option on_error.
var ParseOnError = option.OneOf(OnErrorFallback, OnErrorAllow, OnErrorDeny)

// LocatedBucket is a bucket, and the limits around its own.
type LocatedBucket struct {
	*Bucket
	Around []*Limit // the outermost first
}

// Unnamed reports whether the limit of p or one around it has no name.
func (p LocatedBucket) Unnamed() bool {
	return p.Limit.Unnamed() || slices.ContainsFunc(p.Around, (*Limit).Unnamed)
}

// Buckets returns the buckets of limits and of those within them, in the order in which
// requests meet them.
func Buckets(limits []*Limit) iter.Seq[LocatedBucket] {
	return func(yield func(LocatedBucket) bool) { eachBucket(limits, nil, yield) }
}

// eachBucket yields the buckets of limits that are nested in others, until yield returns false.
func eachBucket(limits, around []*Limit, yield func(LocatedBucket) bool) bool {
	for _, l := range limits {
		for _, b := range l.Buckets {
			if !yield(LocatedBucket{b, around}) {
				return false
			}
		}
		if !eachBucket(l.Within, append(slices.Clip(around), l), yield) {
			return false
		}
	}
	return true
}
