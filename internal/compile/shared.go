package compile

import (
	"cmp"
	"fmt"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/adaptive"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/advice"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/pace"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/wait"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/state"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/state/persist"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry/refpool"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry/toplist"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Shared is what the limits of a config that share buckets have to agree in, and what they
// share besides.
type Shared struct {
	named  NamedLimits     // by path
	bounds NamedLimits     // by the name of the bucket in stores
	warned map[string]bool // options that have no effect

	counters refpool.Refs[string, *telemetry.Counters] // by path
	tops     refpool.Refs[state.TopID, *toplist.List]
	bans     refpool.Refs[string, *rule.BanList] // by the name of the bucket in stores
	waiting  refpool.Refs[string, *wait.Queues]  // the same
	speeds   refpool.Refs[string, *pace.Speed]   // the same
	loads    refpool.Refs[state.LoadID, *adaptive.Controllers]

	AppSettings
	counted *telemetry.Process
	app     *config.App
}

// AppSettings are the options of the app, except redis.
type AppSettings struct {
	MaxKeys     int    // for all limits together
	Persist     string // the path of the file for the buckets in this process; empty if there is none
	OnError     rule.OnError
	Metrics     bool
	consistency limiter.Consistency // by default
}

// NewAppSettings reads the options of the app. defaultPath is the file for buckets by default.
func NewAppSettings(app *config.App, resolve option.Resolver, defaultPath string) (AppSettings, error) {
	r := reader{resolve: resolve}
	memory := cmp.Or(app.Memory, new(config.Memory))
	s := AppSettings{
		OnError:     readConstant(&r, "on_error", cmp.Or(app.OnError, string(rule.OnErrorFallback)), rule.ParseOnError),
		Metrics:     readConstant(&r, "metrics", cmp.Or(app.Metrics, "on"), parseMetrics),
		consistency: read(&r, "consistency", app.Consistency, parseConsistency),
		Persist:     defaultPath,
	}
	wrong := advice.ParseIgnored(app.IgnoreAdvice)
	if err := cmp.Or(r.err, wrong); err != nil {
		return s, err
	}
	s.MaxKeys = cmp.Or(read(&r, "max_keys", memory.MaxKeys, ParseMaxKeys), limiter.DefaultMaxKeys)
	if memory.Persist != "" {
		s.Persist = read(&r, "persist", memory.Persist, persist.ParsePath)
	}
	if r.err != nil {
		return s, fmt.Errorf("memory: %w", r.err)
	}
	return s, nil
}

// Location tells where an option of a limit is written, or the limit if it does not have it, for
// errors: " at Caddyfile:7".
type Location func(option string) string

// NewShared returns the Shared of a config without limits, of a process, and reads the options of its
// app.
func NewShared(app *config.App, process *state.Process) (s *Shared, err error) {
	s = &Shared{
		named:    make(NamedLimits),
		bounds:   make(NamedLimits),
		warned:   make(map[string]bool),
		counters: process.Counters.NewRefs(),
		tops:     process.Tops.NewRefs(),
		bans:     process.Bans.NewRefs(),
		waiting:  process.Waiting.NewRefs(),
		speeds:   process.Speeds.NewRefs(),
		loads:    process.Loads.NewRefs(),
		counted:  process.Process,
		app:      app,
	}
	s.AppSettings, err = NewAppSettings(app, option.OnLoad, persist.DefaultPath(process.DataDir()))
	return s, err
}

// ParseMaxKeys reads a number of buckets.
var ParseMaxKeys = option.Integer(1, 1_000_000_000)

// parseMetrics parses the metrics option.
var parseMetrics = option.Is("on", "on", "off")

// Release releases what the limits share.
func (a *Shared) Release() {
	a.loads.Release()
	a.speeds.Release()
	a.waiting.Release()
	a.bans.Release()
	a.tops.Release()
	a.counters.Release()
}

// add adds the buckets of l. Limits of the same name share their buckets
// wherever they are, so their options must agree. Those of limits without a name, as JSON
// may have them, need not: these share buckets if key and numbers are equal.
func (a *Shared) add(l *LimitBuilder) error {
	r := l.rule
	if r.Bans != nil {
		r.Bans.List, r.Bans.Events = a.bans.Get(r.Buckets[0].Name), a.counted
	}
	if r.Waiting != nil {
		r.Waiting.Queues = a.waiting.Get(r.Buckets[0].Name)
	}
	if r.Load != nil {
		r.Load.Controllers = a.loads.Get(state.LoadID{Name: r.Buckets[0].Name, Options: r.Load.Options})
	}
	for _, b := range r.Buckets {
		b.Policy = &rule.Policy{
			Policy:   outcome.Policy{Path: b.Path, Title: b.Path, Status: r.Status, Concurrency: r.Settlement.InProgress, Unit: b.QuotaUnit()},
			Counters: a.counters.Get(b.Path),
		}
		if r.Pace != nil {
			r.Pace.Bucket, r.Pace.AddressName = *b.Constant, b.AddressName
			r.Pace.Bucket.Name, r.Pace.Bucket.DryRun, r.Pace.Bucket.MaxKeys = b.Name, r.DryRun, r.MaxKeys
			r.Pace.Speed, r.Pace.Counters = a.speeds.Get(b.Name), b.Policy.Counters
		}
		if r.Zone != nil {
			b.Policy.Title = r.Zone.Name
		}
		if _, err := a.bounds.add(b.Name, l, b, a.boundsOf(r), l.Location); err != nil {
			return err
		}
		if r.TrackTop > 0 {
			b.Policy.Top = a.tops.Get(state.TopID{Name: b.Name, N: r.TrackTop})
		}
		if !r.Named {
			continue
		}
		first, err := a.named.add(b.Path, l, b, l.sharedOptions(b), l.Location)
		if err != nil && (r.Zone == nil || first.bucket.Limit.Zone == nil) {
			return err
		}
		b.Policy = first.policy
	}
	return nil
}

// boundsOf returns the options of l that limits share whose buckets have one name in stores, even if the
// limits have no name: a store bounds all buckets of a name together, and their keys are tracked together.
func (a *Shared) boundsOf(l *rule.Limit) []option.Setting {
	return []option.Setting{
		{Option: "max_keys", Text: fmt.Sprint(l.MaxKeysOf(a.MaxKeys))},
		{Option: "when_full", Text: l.WhenFull()},
		{Option: "track_top", Text: fmt.Sprint(l.TrackTop)},
	}
}
