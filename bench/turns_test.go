// Package bench measures the stores of package limiter. See README.md.
package bench

import (
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// turns is the number of pieces into which the calls of a benchmark are cut. After
// each piece the baselines have theirs, so that other load on the machine slows
// all of them and hardly changes the ratios.
const turns = 20

// task returns the function that one caller calls repeatedly. Callers run
// concurrently and share nothing unless the task makes them; i numbers the calls
// of all of them.
type task func() func(i int)

// comparison is a benchmark of a task with baselines.
type comparison struct {
	task      task
	baselines []baseline

	// The number of concurrent callers.
	callers int

	// Whether to report decisions per second and their ratios instead of ratios of
	// times.
	rates bool

	// The number of decisions in a call, if more than one.
	decisions int

	// Returns the CPU time used so far by a process that is measured too.
	// Optional.
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

// run calls the task b.N times, in turns with as many calls of each baseline. The
// benchmark's own figures are those of the task. It also reports the ratio of its
// time to that of each baseline, as x-<baseline>, or the ratio of decisions per
// second, as of-<baseline>. If CPU time is measured, it reports that of each
// decision, and its ratio to that of each baseline, as x-<baseline>-cpu.
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

// spread returns the function that each caller calls.
func (c comparison) spread(t task) []func(int) {
	calls := make([]func(int), c.callers)
	for i := range calls {
		calls[i] = t()
	}
	return calls
}

// measure returns the cost of do.
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

// call makes n calls, numbered from first, with all callers at once. Callers take
// several numbers at a time: an in-process call costs no more than taking its
// number.
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
