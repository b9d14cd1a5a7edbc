package ratelimit

import (
	"sync"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// recentSamples is the number of samples to keep. One is taken every watchEvery, so
// the oldest is about ten seconds old.
const recentSamples = 6

// recentCounts tells the rates of the last ten seconds.
var recentCounts countSamples

// countSamples holds the last samples of the counts of all limits.
type countSamples struct {
	mu      sync.Mutex
	samples []countSample // the oldest first
}

// countSample is the counts of all limits at one time.
type countSample struct {
	at     time.Time
	counts map[string]limitCounts // by path
}

// limitCounts counts what became of requests at the limits of one path.
type limitCounts struct {
	admitted, denied, spared uint64
	fallback                 uint64 // of all of these, those that this process decided instead of Redis
}

// countsOf returns the counts of t.
func countsOf(t *limitTotals) limitCounts {
	by := t.by(countedAdmitted, countedNear, countedDenied, countedSpared)
	return limitCounts{
		t.of(countedAdmitted, countedNear), t.of(countedDenied), t.of(countedSpared), by[limiter.DecidedByFallback],
	}
}

// sample takes a sample.
func (s *countSamples) sample(now time.Time) {
	counts := make(map[string]limitCounts)
	limitCounters.Range(func(path, c any) bool {
		totals := c.(*counters).totals()
		counts[path.(string)] = countsOf(&totals)
		return true
	})
	s.mu.Lock()
	defer s.mu.Unlock()
	s.samples = append(s.samples, countSample{now, counts})
	if len(s.samples) > recentSamples {
		s.samples = append(s.samples[:0], s.samples[1:]...)
	}
}

// since returns the oldest sample, and how old it is. That is zero if there is none
// yet. Samples from before a pause without limits are not counted.
func (s *countSamples) since(now time.Time) (countSample, time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, sample := range s.samples {
		if age := now.Sub(sample.at); age <= 2*recentSamples*watchEvery {
			return sample, age
		}
	}
	return countSample{}, 0
}

// minus returns how much the counts have grown since before. Counts that have
// started again since, because no config had the limit for a while, have grown from
// zero.
func (c limitCounts) minus(before limitCounts) limitCounts {
	if c.admitted < before.admitted || c.denied < before.denied || c.spared < before.spared || c.fallback < before.fallback {
		return c
	}
	return limitCounts{
		c.admitted - before.admitted, c.denied - before.denied, c.spared - before.spared, c.fallback - before.fallback,
	}
}
