package ratelimit

import (
	"cmp"
	"fmt"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/adaptive"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry/toplist"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// shared is what the limits of a config that share buckets have to agree in, and what they
// share besides.
type shared struct {
	named  agreedNames
	bounds map[string]agreedBounds // by the name of the bucket in stores
	warned map[string]bool         // options that have no effect

	counters map[string]*telemetry.Counters // by path
	tops     used[topID, *toplist.List]
	bans     used[string, *rule.BanList] // by the name of the bucket in stores
	waiting  used[string, *rule.Lines]   // likewise
	loads    used[loadID, *adaptive.Controllers]

	maxKeys     int // for all limits together
	onError     rule.OnError
	consistency limiter.Consistency // by default
	metrics     bool
	app         *AppConfig
}

// location tells where an option of a limit is written, or the limit if it does not have it, for
// errors: " at Caddyfile:7".
type location func(option string) string

// agreedBounds are what the bounds of all limits are whose buckets have one name.
type agreedBounds struct {
	options [3]option.Setting
	place   location // of the first of them
}

// newShared returns that of a config without limits, and reads the options of its app.
func newShared(app *AppConfig) (s *shared, err error) {
	s = &shared{
		named:    make(agreedNames),
		bounds:   make(map[string]agreedBounds),
		warned:   make(map[string]bool),
		counters: make(map[string]*telemetry.Counters),
		tops:     process.tops.use(),
		bans:     process.bans.use(),
		waiting:  process.waiting.use(),
		loads:    process.loads.use(),
		maxKeys:  limiter.DefaultMaxKeys,
		app:      app,
	}
	if s.onError, err = option.ParseConstant("on_error", cmp.Or(app.OnError, string(rule.OnErrorFallback)), rule.ParseOnError); err != nil {
		return nil, err
	}
	if s.consistency, err = option.Parse(option.OnLoad, "consistency", cmp.Or(app.Consistency, "exact"), parseConsistency); err != nil {
		return nil, err
	}
	if s.metrics, err = option.ParseConstant("metrics", cmp.Or(app.Metrics, "on"), parseMetrics); err != nil {
		return nil, err
	}
	if app.Memory != nil && app.Memory.MaxKeys != "" {
		if s.maxKeys, err = option.Parse(option.OnLoad, "max_keys", string(app.Memory.MaxKeys), parseMaxKeys); err != nil {
			return nil, fmt.Errorf("memory: %w", err)
		}
	}
	return s, nil
}

// parseMaxKeys reads a number of buckets.
var parseMaxKeys = option.Integer(1, 1_000_000_000)

// parseMetrics parses the metrics option.
func parseMetrics(text string) (on bool, use string) {
	switch text {
	case "on", "off":
		return text == "on", ""
	}
	return false, "on or off"
}

// countersOf returns the counters of a path.
func (a *shared) countersOf(path string) *telemetry.Counters {
	c := a.counters[path]
	if c == nil {
		c = process.Counters(path)
		a.counters[path] = c
	}
	return c
}

// release releases what the limits share.
func (a *shared) release() {
	a.loads.release()
	a.waiting.release()
	a.bans.release()
	a.tops.release()
	for path, c := range a.counters {
		c.Release()
		delete(a.counters, path)
	}
}

// add adds the buckets of d. Limits of the same name share their buckets
// wherever they are, so their options must agree. Those of limits without a name, as JSON
// may have them, need not: these share buckets if key and numbers are equal.
func (a *shared) add(d *draft) error {
	l := d.rule
	if l.Bans != nil {
		l.Bans.List = a.bans.get(l.Buckets[0].Name)
	}
	if l.Waiting != nil {
		l.Waiting.Lines = a.waiting.get(l.Buckets[0].Name)
	}
	if l.Load != nil {
		l.Load.Controllers = a.loads.get(loadID{l.Buckets[0].Name, l.Load.Options})
	}
	for _, b := range l.Buckets {
		b.Policy = &rule.Policy{
			Policy:   outcome.Policy{Path: b.Path, Title: b.Path, Status: l.Status, Concurrency: l.Settlement.InProgress, Unit: b.QuotaUnit()},
			Counters: a.countersOf(b.Path),
		}
		if l.Zone != nil {
			b.Policy.Title = l.Zone.Name
		}
		if err := a.addBounds(d, b); err != nil {
			return err
		}
		if l.TrackTop > 0 {
			b.Policy.Top = a.tops.get(topID{b.Name, l.TrackTop})
		}
		if !l.Named {
			continue
		}
		first, err := a.named.add(d, b, d.location)
		if err != nil && (l.Zone == nil || first.bucket.Limit.Zone == nil) {
			return err
		}
		b.Policy = first.bucket.Policy
	}
	return nil
}

// addBounds adds max_keys, when_full and track_top of b's limit. A store bounds all
// buckets of one name together, and their keys are tracked together, so limits whose
// buckets have the same name must agree in these, even if the limits have no name
// themselves.
func (a *shared) addBounds(d *draft, b *rule.Bucket) error {
	options := [3]option.Setting{
		{Option: "max_keys", Text: fmt.Sprint(b.Limit.MaxKeysOf(a.maxKeys))},
		{Option: "when_full", Text: b.Limit.WhenFull()},
		{Option: "track_top", Text: fmt.Sprint(b.Limit.TrackTop)},
	}
	earlier, found := a.bounds[b.Name]
	if !found {
		a.bounds[b.Name] = agreedBounds{options, d.location}
		return nil
	}
	for i, o := range options {
		if o != earlier.options[i] {
			return disagreement(b.Path, o, earlier.options[i], earlier.place)
		}
	}
	return nil
}
