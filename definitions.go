package ratelimit

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"

	"go.uber.org/zap"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// definitions records the limits of a config, to find those that share a path by
// mistake or contradict each other.
type definitions struct {
	named    map[string]definition          // in the whole config, by path
	bounds   map[string][3]setting          // likewise, by the name of the bucket in stores
	counters map[string]*telemetry.Counters // in the whole config, by path
	tops     map[topID]*topList             // in the whole config
	bans     map[string]*banList            // likewise, by the name of the bucket in stores
	waiting  map[string]*waiters            // likewise
	warned   map[string]bool                // options in the whole config that have no effect

	maxKeys int // for all limits together
}

// definition is what all limits of one path must have in common.
type definition struct {
	options []setting
	policy  *policy
}

// newDefinitions returns the definitions of a config without limits.
func newDefinitions() *definitions {
	return &definitions{
		warned:   make(map[string]bool),
		named:    make(map[string]definition),
		bounds:   make(map[string][3]setting),
		counters: make(map[string]*telemetry.Counters),
		tops:     make(map[topID]*topList),
		bans:     make(map[string]*banList),
		waiting:  make(map[string]*waiters),
		maxKeys:  limiter.DefaultMaxKeys,
	}
}

// countersOf returns the counters of a path.
func (d *definitions) countersOf(path string) *telemetry.Counters {
	c := d.counters[path]
	if c == nil {
		c = process.Counters(path)
		d.counters[path] = c
	}
	return c
}

// topOf returns the list of the keys that ask most at b's limit, or nil if it does
// not track them.
func (d *definitions) topOf(b *bucket) *topList {
	if b.limit.trackTop == 0 {
		return nil
	}
	id := topID{b.name, b.limit.trackTop}
	if d.tops[id] == nil {
		d.tops[id] = topListOf(id)
	}
	return d.tops[id]
}

// bansOf returns the list of the keys that l has banned, or nil if it bans none.
func (d *definitions) bansOf(l *Limit) *banList {
	if l.bans == nil {
		return nil
	}
	name := l.buckets[0].name
	if d.bans[name] == nil {
		d.bans[name] = banListOf(name)
	}
	return d.bans[name]
}

// waitingAt returns the count of requests that wait at l, or nil if none may.
func (d *definitions) waitingAt(l *Limit) *waiters {
	if l.maxDelay == 0 {
		return nil
	}
	name := l.buckets[0].name
	if d.waiting[name] == nil {
		d.waiting[name] = waitersOf(name)
	}
	return d.waiting[name]
}

// release releases the counters of all paths, the lists of keys, and what counts requests
// that wait.
func (d *definitions) release() {
	for name, w := range d.waiting {
		w.release()
		delete(d.waiting, name)
	}
	for name, bans := range d.bans {
		bans.release()
		delete(d.bans, name)
	}
	for id, top := range d.tops {
		top.release()
		delete(d.tops, id)
	}
	for path, c := range d.counters {
		c.Release()
		delete(d.counters, path)
	}
}

// add adds the buckets of l. Limits of the same name share their buckets
// wherever they are, so their options must agree. Those of limits without a name
// need not: these share buckets if key and numbers are equal.
func (d *definitions) add(l *Limit) error {
	l.banList, l.waiting = d.bansOf(l), d.waitingAt(l)
	for _, b := range l.buckets {
		b.policy = &policy{
			Policy:   outcome.Policy{Path: b.path, Title: b.path, Status: l.statusCode, Concurrency: l.Concurrency != ""},
			counters: d.countersOf(b.path), zone: l.zone,
		}
		if l.zone != nil {
			b.policy.Title = l.zone.Name
		}
		if err := d.addBounds(b); err != nil {
			return err
		}
		b.policy.top = d.topOf(b)
		if l.Name == "" {
			continue
		}
		options := []setting{
			{"key", l.key.String()},
			{"ipv4_prefix", fmt.Sprint(l.key.prefixes.IPv4)}, {"ipv6_prefix", fmt.Sprint(l.key.prefixes.IPv6)},
			{"algorithm", string(l.algorithm)},
			{b.size.Option, b.size.String()}, {b.rate.Option, b.rate.String()}, {b.drip.Option, b.drip.String()},
			{"factor", b.factor.String()},
			{"window_start", cmp.Or(l.WindowStart, windowStartClock)}, {"period", l.Period},
			{"warm_up", b.warmUp.String()}, {"cold_factor", b.cold.String()},
			{"count_denied", strconv.FormatBool(l.CountDenied)},
			{"soft", strconv.FormatInt(l.soft, 10)}, {"max_delay", l.maxDelay.String()}, {"max_waiting", strconv.FormatInt(l.maxWaiting, 10)}, {"status", strconv.Itoa(l.statusCode)},
			{"count", l.countText()}, {"actual_cost", l.ActualCost}, {"dry_run", strconv.FormatBool(l.dryRun)},
			{"ban", fmt.Sprint(l.banDurations)}, {"ban_after", fmt.Sprint(l.banAfter())},
			{"borrow", l.Borrow}, {"pool", strconv.FormatBool(l.Pool)},
		}
		earlier, found := d.named[b.path]
		if !found {
			d.named[b.path] = definition{options, b.policy}
			continue
		}
		for i, o := range options {
			if o == earlier.options[i] {
				continue
			}
			if l.zone == nil || earlier.policy.zone == nil {
				return disagreement(b, o, earlier.options[i])
			}
			l.logger.Warn("zones of one name have different options; they count together as far as their keys and windows are equal",
				zap.String("zone", l.zone.Name), zap.String("option", o.option))
			break
		}
		b.policy = earlier.policy
	}
	return nil
}

// addBounds adds max_keys, when_full and track_top of b's limit. A store bounds all
// buckets of one name together, and their keys are tracked together, so limits whose
// buckets have the same name must agree in these, even if the limits have no name
// themselves.
func (d *definitions) addBounds(b *bucket) error {
	options := [3]setting{
		{"max_keys", fmt.Sprint(b.limit.maxKeysOf(d.maxKeys))},
		{"when_full", cmp.Or(b.limit.WhenFull, whenFullForget)},
		{"track_top", fmt.Sprint(b.limit.trackTop)},
	}
	earlier, found := d.bounds[b.name]
	if !found {
		d.bounds[b.name] = options
		return nil
	}
	for i, o := range options {
		if o != earlier[i] {
			return disagreement(b, o, earlier[i])
		}
	}
	return nil
}

// disagreement returns the error for an option of b's limit that differs from an
// earlier one.
func disagreement(b *bucket, got, earlier setting) error {
	return fmt.Errorf("%s: got %q here and %q in another limit of path %q, but limits of one path share their buckets, so these must match, or one needs another name",
		got.option, got.text, earlier.text, b.path)
}

// logSharedBuckets logs which limits without a name, or within one, stand on several
// sites and share their buckets there, as their keys and numbers are equal.
func (a *App) logSharedBuckets() {
	stand := a.sites()
	shared := make(map[string][]string) // the sites, by the name of the buckets
	for b := range a.limits() {
		at, known := stand[b.handler]
		if !known || !b.unnamed() || b.off || b.bucket != b.limit.buckets[0] {
			continue
		}
		if name := at.String(); !slices.Contains(shared[b.name], name) {
			shared[b.name] = append(shared[b.name], name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(shared)) {
		if sites := shared[name]; len(sites) > 1 {
			slices.Sort(sites)
			a.logger.Info("limits without a name, or within one, on several sites have equal keys and numbers, so they share their buckets; "+
				"unless that is meant, give each a name", zap.String("limit", pathOfBuckets(name)), zap.Strings("sites", sites))
		}
	}
}
