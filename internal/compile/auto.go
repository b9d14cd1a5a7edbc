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
func (d *LimitBuilder) setLoad() (err error) {
	if d.Concurrency != config.ConcurrencyAuto {
		if d.Auto != nil {
			return option.Needs("auto", "", "concurrency auto")
		}
		return nil
	}
	a := cmp.Or(d.Auto, new(config.Auto))
	load := new(rule.Load)
	if load.Options.Latency, err = option.Parse(d.resolve, "latency", cmp.Or(string(a.Latency), defaultLatency), parseLatency); err != nil {
		return err
	}
	if load.Options.Min, err = option.Parse(d.resolve, "min", cmp.Or(string(a.Min), defaultMin), option.Integer(1, maxInProgress)); err != nil {
		return err
	}
	load.Options.Max = max(defaultMax, load.Options.Min)
	if a.Max != "" {
		if load.Options.Max, err = option.Parse(d.resolve, "max", string(a.Max), option.Integer(1, maxInProgress)); err != nil {
			return err
		}
		if load.Options.Max < load.Options.Min {
			return option.Bad("max", string(a.Max), "at least "+cmp.Or(string(a.Min), defaultMin)+", the value of min")
		}
	}
	if load.UntilBody, err = option.ParseConstant("until", cmp.Or(a.Until, "header"), option.Is("body", "header", "body")); err != nil {
		return err
	}
	load.Options.High, load.HighRaw, load.LowRaw = a.HighRaw != nil, a.HighRaw, a.LowRaw
	if d.Key == "" {
		if d.rule.Key, err = key.Parse("key", everyone, d.rule.Key.Prefixes); err != nil {
			return err
		}
	}
	if d.Status == "" {
		d.rule.Status = http.StatusServiceUnavailable
	}
	d.rule.Settlement, d.rule.Load = rule.Settlement{}, load
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
func (d *LimitBuilder) setClasses(ctx caddy.Context) error {
	if d.Auto == nil {
		return nil
	}
	for _, of := range []struct {
		name, field string
		raw         caddyhttp.RawMatcherSets
		into        *caddyhttp.MatcherSets
	}{
		{"high", "HighRaw", d.Auto.HighRaw, &d.rule.Load.High}, {"low", "LowRaw", d.Auto.LowRaw, &d.rule.Load.Low},
	} {
		if of.raw == nil {
			continue
		}
		sets, err := ctx.LoadModule(d.Auto, of.field)
		if err != nil {
			return option.Errorf(of.name, "%v", err)
		}
		if err := of.into.FromInterface(sets); err != nil {
			return err
		}
	}
	return nil
}
