package telemetry

import (
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/admin/adminjson"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry/refpool"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

const (
	// sampleEvery is how often a sample is taken for the rates.
	sampleEvery = 2 * time.Second

	// samples is the number of samples to keep. The oldest is about ten seconds old.
	samples = 6
)

// rates holds the last samples of the counts of all limits, the oldest first.
type rates []sample

// sample is the counts of all limits at one time.
type sample struct {
	at     time.Time
	counts map[string]counts // by path
}

// counts are the outcomes of requests at the limits of one path.
type counts struct {
	admitted, denied, spared uint64
	fallback                 uint64 // of all decisions, those made by this process instead of Redis
}

// counts returns the counts of t.
func (t *Totals) counts() counts {
	by := t.all()
	return counts{t.Of(Admitted, Near), t.Of(Denied, Banned, Shed), t.Of(Spared), by[limiter.DecidedByFallback]}
}

// sample takes a sample.
func (r *rates) sample(now time.Time, of *refpool.Pool[string, *Counters]) {
	s := sample{now, make(map[string]counts)}
	for path, c := range of.All() {
		totals := c.Totals()
		s.counts[path] = totals.counts()
	}
	if *r = append(*r, s); len(*r) > samples {
		*r = append((*r)[:0], (*r)[1:]...)
	}
}

// since returns the oldest sample that is not older than most, and how old it is. That
// is zero if there is none.
func (r rates) since(now time.Time, most time.Duration) (sample, time.Duration) {
	for _, s := range r {
		if age := now.Sub(s.at); age <= most {
			return s, age
		}
	}
	return sample{}, 0
}

// minus returns how much the counts have grown since before. Counts that have
// started again since, because no config had the limit for a while, have grown from
// zero.
func (c counts) minus(before counts) counts {
	if c.admitted < before.admitted || c.denied < before.denied || c.spared < before.spared || c.fallback < before.fallback {
		return c
	}
	return counts{
		c.admitted - before.admitted, c.denied - before.denied, c.spared - before.spared, c.fallback - before.fallback,
	}
}

// Counts returns what the limits of each of the counters have counted, and their rates
// over the last seconds, of which it returns how many. Samples from before a pause
// without limits are not taken for recent.
func (p *Process) Counts(of []*Counters) (all []adminjson.Counts, over time.Duration) {
	now := p.opt.Now()
	p.mu.Lock()
	before, over := p.rates.since(now, 2*samples*sampleEvery)
	p.mu.Unlock()
	all = make([]adminjson.Counts, 0, len(of))
	for _, c := range of {
		all = append(all, c.answer(p.policiesOf(c.Path), before.counts[c.Path], over))
	}
	return all, over
}

// Results returns the outcomes of requests at the limits of the counters' path.
func (p *Process) Results(c *Counters) adminjson.Results {
	totals := c.Totals()
	return totals.results(p.policiesOf(c.Path))
}

// results returns t for limits with the given options.
func (t *Totals) results(options Policies) adminjson.Results {
	now := t.counts()
	results := adminjson.Results{Admitted: now.admitted, Denied: now.denied, Spared: now.spared}
	for _, count := range policyCounts {
		if options.has(count.option) {
			n := count.of(t)
			*count.shown(&results.PolicyCounts) = &n
		}
	}
	return results
}

// policiesOf returns the options of the limits of a path in the newest config.
func (p *Process) policiesOf(path string) Policies {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.configs) == 0 {
		return 0
	}
	return p.configs[len(p.configs)-1].limits[path].Policies
}

// answer returns the counts of c, of limits with the given options, and its rates since they
// were others.
func (c *Counters) answer(options Policies, before counts, since time.Duration) adminjson.Counts {
	totals := c.Totals()
	now := totals.counts()
	answer := adminjson.Counts{
		Path: c.Path, Results: totals.results(options),
		Near: totals.Of(Near), Units: totals.Units,
		By: make(map[string]uint64, deciders), Rates: make(map[string]float64),
	}
	for by, n := range totals.all() {
		answer.By[limiter.Decider(by).String()] = n
	}
	grown := now.minus(before)
	for name, n := range map[string]uint64{
		"admitted": grown.admitted, "denied": grown.denied, "spared": grown.spared, "fallback": grown.fallback,
	} {
		if answer.Rates[name] = 0; since > 0 {
			answer.Rates[name] = float64(int64(float64(n)/since.Seconds()*1000)) / 1000
		}
	}
	return answer
}
