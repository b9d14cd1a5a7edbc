package telemetry

import (
	"time"

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
	counts map[string]Summary // by path
}

// Summary is the outcomes of requests at the limits of one path, in a few numbers.
type Summary struct {
	Admitted, Denied, Spared uint64
	Fallback                 uint64 // of all decisions, those made by this process instead of Redis
}

// Summary returns t in a few numbers.
func (t *Totals) Summary() Summary {
	by := t.All()
	return Summary{t.Of(Admitted, Near), t.Of(Denied, Banned, Shed), t.Of(Spared), by[limiter.DecidedByFallback]}
}

// sample takes a sample.
func (r *rates) sample(now time.Time, of *refpool.Pool[string, *Counters]) {
	s := sample{now, make(map[string]Summary)}
	for path, c := range of.All() {
		totals := c.Totals()
		s.counts[path] = totals.Summary()
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
func (s Summary) minus(before Summary) Summary {
	if s.Admitted < before.Admitted || s.Denied < before.Denied || s.Spared < before.Spared || s.Fallback < before.Fallback {
		return s
	}
	return Summary{
		s.Admitted - before.Admitted, s.Denied - before.Denied, s.Spared - before.Spared, s.Fallback - before.Fallback,
	}
}

// Counts is what the limits of a path have counted since the first config that had it.
type Counts struct {
	Path string
	Totals
	Policies Policies // the options of these limits in the newest config

	Rates map[string]float64 // of the Summary, recently, by name: requests per second; nil from Results
}

// Counts returns what the limits of each of the counters have counted, and their rates
// over the last seconds, of which it returns how many. Samples from before a pause
// without limits are not taken for recent.
func (p *Process) Counts(of []*Counters) (all []Counts, over time.Duration) {
	now := p.opt.Now()
	p.mu.Lock()
	before, over := p.rates.since(now, 2*samples*sampleEvery)
	p.mu.Unlock()
	all = make([]Counts, 0, len(of))
	for _, c := range of {
		counts := p.Results(c)
		counts.Rates = counts.Summary().minus(before.counts[c.Path]).rates(over)
		all = append(all, counts)
	}
	return all, over
}

// Results returns what the limits of the counters' path have counted, without rates.
func (p *Process) Results(c *Counters) Counts {
	counts := Counts{Path: c.Path, Totals: c.Totals()}
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.configs) > 0 {
		counts.Policies = p.configs[len(p.configs)-1].limits[c.Path].Policies
	}
	return counts
}

// rates returns how much s is per second of some time, or none if there was no time.
func (s Summary) rates(over time.Duration) map[string]float64 {
	rate := func(n uint64) float64 {
		if over == 0 {
			return 0
		}
		return float64(int64(float64(n)/over.Seconds()*1000)) / 1000
	}
	return map[string]float64{"admitted": rate(s.Admitted), "denied": rate(s.Denied), "spared": rate(s.Spared), "fallback": rate(s.Fallback)}
}
