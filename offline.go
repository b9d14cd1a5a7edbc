package ratelimit

import (
	"context"
	"encoding/json"
	"net/http"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/adminapi"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/offline"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// offlineModule lends this module to the commands that read config files.
type offlineModule struct{}

// Name implements offline.Module.
func (offlineModule) Name() string { return ownName }

// MaxKeys implements offline.Module.
func (offlineModule) MaxKeys(app caddy.App) int { return app.(*App).maxKeys }

// Redis implements offline.Module.
func (offlineModule) Redis(config json.RawMessage) (offline.Redis, error) {
	rd := new(Redis)
	if err := caddy.StrictUnmarshalJSON(config, rd); err != nil {
		return nil, err
	}
	return func(ctx caddy.Context) (limiter.RedisOptions, error) {
		opt, _, err := rd.options(ctx)
		return opt, err
	}, nil
}

// Handler implements offline.Module.
func (offlineModule) Handler(h caddyhttp.MiddlewareHandler) (offline.Handler, bool) {
	own, ok := h.(*Handler)
	if !ok {
		return nil, false
	}
	o := &offlineHandler{handler: own}
	groups := make(map[*Limit]*offline.Limit)
	eachBucket(own.Limits, placedBucket{}, func(b placedBucket) bool {
		l := b.describeOffline()
		for _, outer := range b.around {
			if groups[outer] == nil {
				groups[outer] = &offline.Limit{Path: outer.path, Matchers: outer.matchers}
			}
			l.Around = append(l.Around, groups[outer])
		}
		o.limits = append(o.limits, l)
		b.offline = l
		return true
	})
	return o, true
}

// describeOffline returns what the commands see of b, without the limits around it.
func (b placedBucket) describeOffline() *offline.Limit {
	l := &offline.Limit{
		Path: b.path, Bucket: b.name, Unnamed: b.unnamed(), Off: b.off, DryRun: b.limit.dryRun,
		Numbers: b.shown(), Key: b.limit.key.shown(), Matchers: b.limit.matchers,
		HasSize: b.limit.algorithm.hasSize(), HasWindow: b.limit.algorithm.hasWindow(),
		Factor:   uint64(b.factor.constant),
		Leasable: b.limit.exactReason() == "" && b.exactReason(limiter.Lease(time.Second)) == "",
	}
	if count := b.limit.Count; b.holds {
		l.Settlement = offline.Settlement{
			InProgress: b.limit.Concurrency != "", Counts: count != nil, CountsHeader: count != nil && len(count.Headers) > 0,
			ActualCost: b.limit.ActualCost,
		}
	}
	if !b.rate.isDynamic() && !b.drip.isDynamic() {
		numbers := b.storedLimit(time.Now())
		l.Above = b.above(&numbers, b.usualCost()).units()
	}
	if !b.sizeIsDynamic() {
		l.Size, _, _ = b.effectiveSize(nil) // validated before
		if l.Written = b.size.constant; l.Written != l.Size {
			l.Numbers.Size = b.size.String() + " / " + b.factor.String()
		}
	}
	for _, o := range []offline.Dynamic{
		{Option: b.rate.option, Template: b.rate.template, Identity: true},
		{Option: b.drip.option, Template: b.drip.template, Identity: true},
		{Option: b.size.option, Template: b.size.template},
		{Option: "factor", Template: b.factor.template},
	} {
		if o.Template != "" {
			l.Dynamic = append(l.Dynamic, o)
		}
	}
	return l
}

// offlineHandler is a handler as the commands see it, which evaluate one request at a
// time.
type offlineHandler struct {
	handler *Handler
	limits  []*offline.Limit
	*evaluation
}

// Limits implements offline.Handler.
func (o *offlineHandler) Limits() []*offline.Limit { return o.limits }

// OnError implements offline.Handler.
func (o *offlineHandler) OnError() string { return string(o.handler.onError) }

// Evaluate implements offline.Handler.
func (o *offlineHandler) Evaluate(r *http.Request, at time.Time) (offline.Evaluation, error) {
	o.evaluation = evaluationOf(r)
	o.now = at
	return o, o.add(o.handler.Limits)
}

// Release implements offline.Evaluation.
func (o *offlineHandler) Release() { o.release() }

// Buckets implements offline.Evaluation.
func (o *offlineHandler) Buckets() []limiter.Bucket { return o.buckets }

// Limit implements offline.Evaluation.
func (o *offlineHandler) Limit(i int) *offline.Limit { return o.of[i].offline }

// Numbers implements offline.Evaluation.
func (o *offlineHandler) Numbers(i int) adminapi.Numbers {
	limit := o.buckets[i].Limit
	limit.Size -= o.of[i].above.units()
	return o.of[i].shownFor(&limit)
}

// Banned implements offline.Evaluation.
func (o *offlineHandler) Banned(i int) (banned, began bool) {
	return o.of[i].banned > 0, o.of[i].began
}

// Above implements offline.Evaluation.
func (o *offlineHandler) Above(i int) (over bool, delay time.Duration) {
	return o.of[i].over, o.of[i].delay
}

// Drop implements offline.Evaluation.
func (o *offlineHandler) Drop(i int) {
	o.buckets = slices.Delete(o.buckets, i, i+1)
	o.of = slices.Delete(o.of, i, i+1)
}

// Decide implements offline.Evaluation.
func (o *offlineHandler) Decide(ctx context.Context, store limiter.Store) ([]limiter.Decision, error) {
	a := o.handler.accounting
	err := o.ask(a, func() error { return o.take(ctx, store, limiter.Request{Accounting: a.inStore()}) })
	if err == nil {
		o.lower()
	}
	if err != nil || o.firstDenied() >= 0 {
		o.settleUnpassed()
	}
	return o.decisions, err
}

// Held implements offline.Evaluation.
func (o *offlineHandler) Held(i int) offline.Held {
	if !o.buckets[i].Hold {
		return nil
	}
	h := &offlineHeld{holding{bucket: o.of[i].bucket, cost: o.buckets[i].Cost}, o.request}
	if j := slices.IndexFunc(o.holdings, func(own holding) bool { return own.bucket == h.bucket }); j >= 0 {
		h.holding = o.holdings[j]
	}
	return h
}

// offlineHeld is what a request holds of a bucket, or nothing if that was denied.
type offlineHeld struct {
	holding
	request *http.Request
}

// Charge implements offline.Held.
func (h *offlineHeld) Charge(r *offline.Response) (charge int64, known bool) {
	switch {
	case r.Unknown:
	case r.Status == 0:
		return h.unpassed(), true
	default:
		if charge, decided := h.byHeader(r.Status, r.Header); decided {
			return charge, true
		}
		if h.bucket.limit.ActualCost == actualBytes && r.Bytes < 0 {
			return h.cost, false
		}
	}
	charge, _, known = h.byEnd(h.request, r.Status, r.Bytes)
	return charge, known
}

// Settle implements offline.Held.
func (h *offlineHeld) Settle(charge int64) { h.settle(charge) }
