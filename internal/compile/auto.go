package compile

import (
	"cmp"
	"net/http"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/key"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/settle"
)

// everyone is the key by which all requests share one controller.
const everyone = "all"

// The defaults of Auto.
const (
	defaultLatency = "500ms"
	defaultMin     = "4"
	defaultMax     = 1000

	maxInProgress = 1_000_000
)

// setLoad sets how the limit follows the load. By default it has one key for all requests, and
// another status.
func (l *LimitBuilder) setLoad() error {
	if l.Concurrency != config.ConcurrencyAuto {
		if l.Auto != nil {
			return option.Needs("auto", "", "concurrency auto")
		}
		return nil
	}
	a := cmp.Or(l.Auto, new(config.Auto))
	load := &settle.Load{Reporter: &l.rule.Reporter}
	load.Options.Latency = read(&l.reader, "latency", cmp.Or(a.Latency, defaultLatency), parseLatency)
	load.Options.Min = read(&l.reader, "min", cmp.Or(a.Min, defaultMin), option.Integer(1, maxInProgress))
	load.Options.Max = max(defaultMax, load.Options.Min)
	if a.Max != "" {
		if load.Options.Max = read(&l.reader, "max", a.Max, option.Integer(1, maxInProgress)); load.Options.Max < load.Options.Min {
			return option.Bad("max", string(a.Max), "at least "+string(cmp.Or(a.Min, defaultMin))+", the value of min")
		}
	}
	load.UntilBody = readConstant(&l.reader, "until", a.Until, option.Is("body", "header", "body"))
	load.Options.High = a.HighRaw != nil
	if l.Key == "" {
		var err error
		if l.rule.Key, err = key.Parse("key", everyone, l.rule.Key.Prefixes); err != nil {
			return err
		}
	}
	if l.Status == "" {
		l.rule.Status = http.StatusServiceUnavailable
	}
	l.rule.Settlement, l.rule.Load = settle.Terms{}, load
	l.rule.Auto = &rule.Auto{
		Latency: option.Seconds(load.Options.Latency), Min: load.Options.Min, Until: cmp.Or(a.Until, "header"), High: a.HighRaw, Low: a.LowRaw,
	}
	return nil
}

// parseLatency parses the latency option.
func parseLatency(text string) (d time.Duration, use string) {
	d, err := caddy.ParseDuration(text)
	if err != nil || d < time.Millisecond || d > time.Minute {
		return 0, "a duration from 1ms to 1m, such as 500ms"
	}
	return d, ""
}

// setClasses loads the matchers of the requests that are more or less important.
func (l *LimitBuilder) setClasses(ctx caddy.Context) error {
	if l.Auto == nil {
		return nil
	}
	for _, of := range []struct {
		name, field string
		raw         caddyhttp.RawMatcherSets
		into        *caddyhttp.MatcherSets
	}{
		{"high", "HighRaw", l.Auto.HighRaw, &l.rule.Load.High}, {"low", "LowRaw", l.Auto.LowRaw, &l.rule.Load.Low},
	} {
		if of.raw == nil {
			continue
		}
		sets, err := ctx.LoadModule(l.Auto, of.field)
		if err != nil {
			return option.Errorf(of.name, "%v", matcherError(err))
		}
		if err := of.into.FromInterface(sets); err != nil {
			return err
		}
	}
	return nil
}
