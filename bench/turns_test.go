// Package bench measures the stores of package limiter. See README.md.
package bench

import (
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// turns is into how many pieces the calls of a benchmark are cut. After each
// the baselines have theirs, so that whatever else the machine does meanwhile
// slows all of them, and hardly moves the ratios.
const turns = 20

// task returns what one caller calls over and over. Callers run at the same
// time and share nothing that the task doesn't make them share; i numbers the
// calls of all of them.
type task func() func(i int)

// comparison is a benchmark of a task beside baselines.
type comparison struct {
	task      task
	baselines []baseline

	// How many callers there are at once.
	callers int

	// Whether decisions a second are told, and their ratios, in place of the
	// ratios of times.
	rates bool

	// How many decisions a call makes, if it is more than one.
	decisions int

	// Whose CPU time is measured too, and how much it has used so far. Optional.
	whose string
	used  func() time.Duration
}

// baseline is a task that the measured one is compared with.
type baseline struct {
	name string
	task task
}

// cost is what some calls took.
type cost struct{ wall, cpu time.Duration }

// run calls the task b.N times, in turns with as many calls of each baseline.
// The benchmark's own figures are those of the task. It also reports how many
// times as long as each baseline the task took, as x-<baseline>, or how many
// times as many decisions a second it made, as of-<baseline>. Where CPU time is
// measured it reports that of each decision, and how many times that of each
// baseline it is, as x-<baseline>-cpu.
func (c comparison) run(b *testing.B) {
	b.ReportAllocs()
	b.StopTimer()
	b.ResetTimer()

	calls := c.spread(c.task)
	others := make([][]func(int), len(c.baselines))
	wall, cpu := make([][]float64, len(c.baselines)), make([][]float64, len(c.baselines))
	for j, base := range c.baselines {
		others[j] = c.spread(base.task)
	}

	var total cost
	for done := 0; done < b.N; {
		n := min(b.N-done, (b.N+turns-1)/turns)
		own := c.measure(func() {
			b.StartTimer()
			call(calls, done, n)
			b.StopTimer()
		})
		total.wall += own.wall
		total.cpu += own.cpu
		for j := range others {
			other := c.measure(func() { call(others[j], done, n) })
			wall[j] = append(wall[j], float64(own.wall)/float64(other.wall))
			cpu[j] = append(cpu[j], float64(own.cpu)/float64(other.cpu))
		}
		done += n
	}

	decisions := float64(b.N * max(c.decisions, 1))
	if c.rates {
		b.ReportMetric(decisions/total.wall.Seconds(), "decisions/s")
	}
	for j, base := range c.baselines {
		if c.rates {
			b.ReportMetric(1/median(wall[j]), "of-"+base.name)
		} else {
			b.ReportMetric(median(wall[j]), "x-"+base.name)
		}
		if c.used != nil {
			b.ReportMetric(median(cpu[j]), "x-"+base.name+"-cpu")
		}
	}
	if c.used != nil {
		b.ReportMetric(total.cpu.Seconds()*1e6/decisions, c.whose+"-µs/decision")
	}
}

// spread returns what each caller calls.
func (c comparison) spread(t task) []func(int) {
	calls := make([]func(int), c.callers)
	for i := range calls {
		calls[i] = t()
	}
	return calls
}

// measure returns what do takes.
func (c comparison) measure(do func()) cost {
	var before, after time.Duration
	if c.used != nil {
		before = c.used()
	}
	start := time.Now()
	do()
	wall := time.Since(start)
	if c.used != nil {
		after = c.used()
	}
	return cost{wall, after - before}
}

// call makes n calls, numbered from first, each caller at once. Callers take
// several at a time: in process a call is not dearer than taking its number.
func call(callers []func(i int), first, n int) {
	if len(callers) == 1 {
		for i := range n {
			callers[0](first + i)
		}
		return
	}
	several := n/(len(callers)*16) + 1
	var taken atomic.Int64
	var wg sync.WaitGroup
	for _, do := range callers {
		wg.Go(func() {
			for {
				end := int(taken.Add(int64(several)))
				for i := end - several; i < min(end, n); i++ {
					do(first + i)
				}
				if end >= n {
					return
				}
			}
		})
	}
	wg.Wait()
}

// median returns the median of at least one figure.
func median(figures []float64) float64 {
	slices.Sort(figures)
	return (figures[(len(figures)-1)/2] + figures[len(figures)/2]) / 2
}
