package ratelimit

import (
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
)

// observe shows the result of the request so far in the access log and in its
// span. The log is written at the end of the request and then shows the result of
// all handlers, even of those without the option.
//
// Caddy's tracing tells that there is a span by a variable of the request. To look for
// one in the context would take longer, as every value in it is asked.
func (h *Handler) observe(res *result, eval *evaluation) {
	if !res.traced && (!h.Log || res.logged) {
		return
	}
	ctx := eval.request.Context()
	if h.Log && !res.logged {
		if extra, ok := ctx.Value(caddyhttp.ExtraLogFieldsCtxKey).(*caddyhttp.ExtraLogFields); ok {
			extra.Set(zap.Object("rate_limit", loggedResult{res}))
			res.logged = true
		}
	}
	if !res.traced {
		return
	}
	if span := trace.SpanFromContext(ctx); span.IsRecording() {
		span.SetAttributes(res.attributes()...)
	}
}

// noteUndecided notes why a handler did not decide on the request.
func (h *Handler) noteUndecided(res *result, eval *evaluation, why telemetry.Checked) {
	res.become(why)
	h.observe(res, eval)
}

// attributes returns the attributes of the request's span. The status of the span
// is no substitute: it is 200 for denials that error routes handle.
func (res *result) attributes() []attribute.KeyValue {
	sum, decided := summarize(res.buckets, 0)
	attributes := append(make([]attribute.KeyValue, 0, 4),
		attribute.String("caddy.rate_limit.result", res.what.String()))
	if !decided {
		return attributes
	}
	decider := &res.buckets[sum.Deciding]
	return append(attributes,
		attribute.String("caddy.rate_limit.limit", decider.path),
		attribute.String("caddy.rate_limit.by", decider.decision.By.String()),
		attribute.Int64("caddy.rate_limit.remaining", sum.Remaining))
}

// loggedResult is a result as the access log shows it.
type loggedResult struct{ *result }

// MarshalLogObject implements zapcore.ObjectMarshaler.
func (l loggedResult) MarshalLogObject(enc zapcore.ObjectEncoder) error {
	sum, decided := summarize(l.buckets, 0)
	enc.AddString("result", l.what.String())
	if decided {
		decider := &l.buckets[sum.Deciding]
		enc.AddString("limit", decider.path)
		enc.AddString("by", decider.decision.By.String())
		enc.AddInt64("remaining", sum.Remaining)
		if sum.Denied && !sum.Never {
			enc.AddDuration("retry_after", sum.RetryAfter)
		}
	}
	if over := l.overPath(); over != "" {
		enc.AddString("over", over)
	}
	if banned := l.bannedPath(); banned != "" {
		enc.AddString("banned", banned)
	}
	if borrowed := l.borrowedPath(); borrowed != "" {
		enc.AddString("borrowed", borrowed)
	}
	if dry := l.dryRunPath(); dry != "" {
		enc.AddString("dry_run", dry)
	}
	if l.waited > 0 {
		enc.AddDuration("waited", l.waited)
	}
	if l.delayed > 0 {
		enc.AddDuration("delayed", l.delayed)
	}
	return nil
}
