package outcome

import (
	"context"
	"net/http"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// Observe shows the outcome so far in the span of the request, and if log is true in the
// access log. That is written at the end of the request and then shows the outcome of
// all handlers, even of those that do not log it.
//
// Caddy's tracing marks requests with a span by a variable. To look for
// one in the context would take longer, as every value in it is asked.
func (o *Outcome) Observe(ctx context.Context, log bool) {
	if log && !o.logged {
		if extra, ok := ctx.Value(caddyhttp.ExtraLogFieldsCtxKey).(*caddyhttp.ExtraLogFields); ok {
			extra.Set(zap.Object("rate_limit", logged{o}))
			o.logged = true
		}
	}
	if !o.traced {
		return
	}
	if span := trace.SpanFromContext(ctx); span.IsRecording() {
		span.SetAttributes(o.attributes()...)
	}
}

// attributes returns the attributes of the request's span. The status of the span
// is no substitute: it is 200 for denials that error routes handle.
func (o *Outcome) attributes() []attribute.KeyValue {
	sum, decided := summarize(o.entries, 0)
	attributes := append(make([]attribute.KeyValue, 0, 4),
		attribute.String("caddy.rate_limit.result", o.result.String()))
	if !decided {
		return attributes
	}
	decider := &o.entries[sum.Deciding]
	return append(attributes,
		attribute.String("caddy.rate_limit.limit", decider.Path),
		attribute.String("caddy.rate_limit.by", decider.Decision.By.String()),
		attribute.Int64("caddy.rate_limit.remaining", sum.Remaining))
}

// pacedVariable is the variable of the request that holds for how long its response waited.
const pacedVariable = "rate_limit.paced"

// LogPaced has the access log show that the response to r waited for so long, in addition.
func (o *Outcome) LogPaced(r *http.Request, waited time.Duration) {
	extra, ok := r.Context().Value(caddyhttp.ExtraLogFieldsCtxKey).(*caddyhttp.ExtraLogFields)
	if !ok || !o.logged || waited == 0 {
		return
	}
	before, _ := caddyhttp.GetVar(r.Context(), pacedVariable).(time.Duration)
	caddyhttp.SetVar(r.Context(), pacedVariable, before+waited)
	extra.Set(zap.Object("rate_limit", paced{logged{o}, before + waited}))
}

// paced is an outcome of a response that was paced as the access log shows it.
type paced struct {
	logged
	waited time.Duration
}

// MarshalLogObject implements zapcore.ObjectMarshaler.
func (p paced) MarshalLogObject(enc zapcore.ObjectEncoder) error {
	enc.AddDuration("paced", p.waited)
	return p.logged.MarshalLogObject(enc)
}

// logged is an outcome as the access log shows it.
type logged struct{ *Outcome }

// MarshalLogObject implements zapcore.ObjectMarshaler.
func (l logged) MarshalLogObject(enc zapcore.ObjectEncoder) error {
	sum, decided := summarize(l.entries, 0)
	enc.AddString("result", l.result.String())
	if decided {
		decider := &l.entries[sum.Deciding]
		enc.AddString("limit", decider.Path)
		enc.AddString("by", decider.Decision.By.String())
		enc.AddInt64("remaining", sum.Remaining)
		if sum.Denied && !sum.Never {
			enc.AddDuration("retry_after", sum.RetryAfter)
		}
	}
	for i := range marks {
		if path := l.marked(marks[i].is); path != "" {
			enc.AddString(marks[i].name, path)
		}
	}
	if units := charges(l.entries); slices.ContainsFunc(units, func(e Entry) bool { return e.Charged }) {
		if err := enc.AddObject("units", units); err != nil {
			return err
		}
	}
	if l.Waited > 0 {
		enc.AddDuration("waited", l.Waited)
	}
	if l.Delayed > 0 {
		enc.AddDuration("delayed", l.Delayed)
	}
	return nil
}

// charges are what a request was charged, as the access log shows it: by the paths of limits.
type charges []Entry

// MarshalLogObject implements zapcore.ObjectMarshaler.
func (c charges) MarshalLogObject(enc zapcore.ObjectEncoder) error {
	for i := range c {
		same := func(e Entry) bool { return e.Charged && e.Path == c[i].Path }
		if !c[i].Charged || slices.ContainsFunc(c[:i], same) {
			continue
		}
		var units int64
		for j := i; j < len(c); j++ {
			if same(c[j]) {
				units += c[j].Cost
			}
		}
		enc.AddInt64(c[i].Path, units)
	}
	return nil
}
