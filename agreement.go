package ratelimit

import (
	"cmp"
	"fmt"
	"strconv"
	"sync/atomic"

	"go.uber.org/zap"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/toplist"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// agreement is what the limits of a config that share buckets have to agree in, and what they
// share besides.
type agreement struct {
	named  map[string]agreed            // by path
	bounds map[string][3]option.Setting // by the name of the bucket in stores
	warned map[string]bool              // options that have no effect

	counters map[string]*telemetry.Counters // by path
	tops     used[topID, *toplist.List]
	bans     used[string, *rule.BanList] // by the name of the bucket in stores
	waiting  used[string, *atomic.Int64] // likewise

	maxKeys int // for all limits together
}

// agreed is what all limits of one path have in common.
type agreed struct {
	options []option.Setting
	written *Limit // the first of them
	policy  *rule.Policy
	zone    bool // whether the first of them was a zone
}

// newAgreement returns that of a config without limits.
func newAgreement() *agreement {
	return &agreement{
		named:    make(map[string]agreed),
		bounds:   make(map[string][3]option.Setting),
		warned:   make(map[string]bool),
		counters: make(map[string]*telemetry.Counters),
		tops:     process.tops.use(),
		bans:     process.bans.use(),
		waiting:  process.waiting.use(),
		maxKeys:  limiter.DefaultMaxKeys,
	}
}

// countersOf returns the counters of a path.
func (a *agreement) countersOf(path string) *telemetry.Counters {
	c := a.counters[path]
	if c == nil {
		c = process.Counters(path)
		a.counters[path] = c
	}
	return c
}

// release releases what the limits share.
func (a *agreement) release() {
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
func (a *agreement) add(d *draft) error {
	l := d.rule
	if l.Bans != nil {
		l.Bans.List = a.bans.get(l.Buckets[0].Name)
	}
	if l.Waiting != nil {
		l.Waiting.Count = a.waiting.get(l.Buckets[0].Name)
	}
	for _, b := range l.Buckets {
		b.Policy = &rule.Policy{
			Policy:   outcome.Policy{Path: b.Path, Title: b.Path, Status: l.Status, Concurrency: l.Settlement.InProgress},
			Counters: a.countersOf(b.Path),
		}
		if l.Zone != nil {
			b.Policy.Title = l.Zone.Name
		}
		if err := a.addBounds(b); err != nil {
			return err
		}
		if l.TrackTop > 0 {
			b.Policy.Top = a.tops.get(topID{b.Name, l.TrackTop})
		}
		if !l.Named {
			continue
		}
		options := d.settings(b)
		earlier, found := a.named[b.Path]
		if !found {
			a.named[b.Path] = agreed{options, d.Limit, b.Policy, l.Zone != nil}
			continue
		}
		for i, o := range options {
			if o == earlier.options[i] {
				continue
			}
			if l.Zone == nil || !earlier.zone {
				if first := earlier.written; rateSets(o.Option, d.Limit, first) {
					return disagreement(b, option.Setting{Option: "rate", Text: string(d.Rate)}, option.Setting{Text: string(first.Rate)})
				}
				return disagreement(b, o, earlier.options[i])
			}
			l.Reporter.Logger.Warn("zones of one name have different options; they count together as far as their keys and windows are equal",
				zap.String("zone", l.Zone.Name), zap.String("option", o.Option))
			break
		}
		b.Policy = earlier.policy
	}
	return nil
}

// settings returns the options in which limits have to agree that have a bucket of the same
// path as b.
func (d *draft) settings(b *rule.Bucket) []option.Setting {
	l := d.rule
	var durations, after string
	if l.Bans != nil {
		durations, after = fmt.Sprint(l.Bans.Durations), fmt.Sprint(l.Bans.After())
	}
	most := int64(defaultMaxWaiting)
	if l.Waiting != nil {
		most = l.Waiting.Most
	}
	return []option.Setting{
		{Option: "key", Text: l.Key.String()},
		{Option: "ipv4_prefix", Text: fmt.Sprint(l.Key.Prefixes.IPv4)},
		{Option: "ipv6_prefix", Text: fmt.Sprint(l.Key.Prefixes.IPv6)},
		{Option: "algorithm", Text: string(l.Algorithm)},
		{Option: b.Size.Option, Text: b.Size.String()},
		{Option: b.Rate.Option, Text: b.Rate.String()},
		{Option: b.Drip.Option, Text: b.Drip.String()},
		{Option: "factor", Text: b.Factor.String()},
		{Option: "window_start", Text: d.startOfWindows()},
		{Option: "period", Text: d.Period},
		{Option: "warm_up", Text: b.WarmUp.String()},
		{Option: "cold_factor", Text: b.Cold.String()},
		{Option: "count_denied", Text: strconv.FormatBool(l.CountDenied)},
		{Option: "soft", Text: strconv.FormatInt(l.Soft, 10)},
		{Option: "max_delay", Text: l.MaxDelay.String()},
		{Option: "max_waiting", Text: strconv.FormatInt(most, 10)},
		{Option: "status", Text: strconv.Itoa(l.Status)},
		{Option: "count", Text: d.countText()},
		{Option: "actual_cost", Text: d.ActualCost},
		{Option: "hold", Text: cmp.Or(d.Hold, "on")},
		{Option: "dry_run", Text: strconv.FormatBool(l.DryRun)},
		{Option: "ban", Text: durations},
		{Option: "ban_after", Text: after},
		{Option: "borrow", Text: d.Borrow},
		{Option: "pool", Text: strconv.FormatBool(l.Pool)},
	}
}

// addBounds adds max_keys, when_full and track_top of b's limit. A store bounds all
// buckets of one name together, and their keys are tracked together, so limits whose
// buckets have the same name must agree in these, even if the limits have no name
// themselves.
func (a *agreement) addBounds(b *rule.Bucket) error {
	options := [3]option.Setting{
		{Option: "max_keys", Text: fmt.Sprint(b.Limit.MaxKeysOf(a.maxKeys))},
		{Option: "when_full", Text: b.Limit.WhenFull()},
		{Option: "track_top", Text: fmt.Sprint(b.Limit.TrackTop)},
	}
	earlier, found := a.bounds[b.Name]
	if !found {
		a.bounds[b.Name] = options
		return nil
	}
	for i, o := range options {
		if o != earlier[i] {
			return disagreement(b, o, earlier[i])
		}
	}
	return nil
}

// rateSets reports whether two limits have different rates, which set an option of theirs.
func rateSets(name string, l, other *Limit) bool {
	if l.Rate == "" || other.Rate == "" || l.Rate == other.Rate {
		return false
	}
	return name == "drip_rate" || name == "drip_size" || name == "size" && l.Size == "" && other.Size == ""
}

// disagreement returns the error for an option of b's limit that differs from an
// earlier one.
func disagreement(b *rule.Bucket, got, earlier option.Setting) error {
	return fmt.Errorf("%s: got %q here and %q in another limit of the name %q, but limits of one name share their buckets: write the same, or give one another name",
		got.Option, got.Text, earlier.Text, b.Path)
}
