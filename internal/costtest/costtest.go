// Package costtest lets tests find out that code has become slower, on a machine that
// is busy with other things too.
//
// Times of a shared machine say nothing. What repeats within some two percent is this:
// a task and a hash of 260 bytes take turns in one process, in slices of a tenth
// of a millisecond and in random order, and the fastest tenth of the slices of each
// counts. What disturbs a slice then disturbs few of them, and a processor that is
// slower for a while is so for all tasks. The time of a task is told in hashes. A shorter
// hash would not do: where the linker puts the loop around it changes it by six percent.
package costtest

import (
	"hash/maphash"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

const (
	slice    = 100 * time.Microsecond
	rounds   = 2000 // slices of each task in one measurement
	attempts = 3    // measurements of a task that seems to have become slower

	// By how much a task may exceed its ceiling. The hash, locks, clocks and memory of
	// other processors have other proportions: there only gross faults are certain.
	tolerance      = 1.10
	toleranceOther = 2
	alike          = 1.15 // how far proportions may be from those below
)

// proportion is what a lock and a clock reading take, in hashes, where the ceilings
// were measured.
const proportion = 1.79

// Task is something to measure.
type Task struct {
	Name    string
	Run     func()
	Without func()  // what Run does besides; nil if nothing. Its time is subtracted.
	Ceiling float64 // in hashes
}

// Check fails the test for each task that takes more hashes than its ceiling.
func Check(t *testing.T, tasks []Task) {
	t.Helper()
	for attempt := 1; len(tasks) > 0; attempt++ {
		times, here := measure(tasks)
		allowed := tolerance
		if here > proportion*alike || here < proportion/alike {
			allowed = toleranceOther
		}
		t.Logf("a lock and a clock reading take %.2f hashes here, %.2f where the ceilings were measured", here, proportion)
		var slow []Task
		for i, task := range tasks {
			t.Logf("%s: %.2f hashes, ceiling %.2f", task.Name, times[i], task.Ceiling)
			if times[i] <= task.Ceiling*allowed {
				continue
			}
			if slow = append(slow, task); attempt == attempts {
				t.Errorf("%s takes %.2f hashes, %.0f%% above its ceiling of %.2f",
					task.Name, times[i], 100*(times[i]/task.Ceiling-1), task.Ceiling)
			}
		}
		if attempt == attempts {
			return
		}
		tasks = slow
	}
}

// measure returns the time of each task, and of a lock and a clock reading, in hashes.
func measure(tasks []Task) (times []float64, proportion float64) {
	seed, start, text := maphash.MakeSeed(), time.Now(), strings.Repeat("203.0.113.77 ", 20)
	var mu sync.Mutex
	runs := []func(){
		func() { runtime.KeepAlive(maphash.String(seed, text)) },
		func() { mu.Lock(); runtime.KeepAlive(time.Since(start)); mu.Unlock() }, //nolint:staticcheck // that is the task
	}
	for _, task := range tasks {
		runs = append(runs, task.Run)
		if task.Without != nil {
			runs = append(runs, task.Without)
		}
	}
	fastest := fastestTenth(runs)
	hash, next := fastest[0], fastest[2:]
	for _, task := range tasks {
		took := next[0]
		if next = next[1:]; task.Without != nil {
			took -= next[0]
			next = next[1:]
		}
		times = append(times, took/hash)
	}
	return times, fastest[1] / hash
}

// fastestTenth returns for each of runs the time of a call, in ns, that only a tenth
// of its slices stay below.
func fastestTenth(runs []func()) []float64 {
	calls, order, took := make([]int, len(runs)), make([]int, len(runs)), make([][]float64, len(runs))
	for i, run := range runs {
		calls[i], order[i] = callsPerSlice(run), i
	}
	for range rounds {
		rand.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
		for _, i := range order {
			run, start := runs[i], time.Now()
			for range calls[i] {
				run()
			}
			took[i] = append(took[i], float64(time.Since(start))/float64(calls[i]))
		}
	}
	fastest := make([]float64, len(runs))
	for i := range took {
		slices.Sort(took[i])
		fastest[i] = took[i][rounds/10]
	}
	return fastest
}

// callsPerSlice returns how often run can be called in a slice.
func callsPerSlice(run func()) int {
	for calls := 1; ; calls *= 2 {
		best := time.Hour
		for range 10 {
			start := time.Now()
			for range calls {
				run()
			}
			best = min(best, time.Since(start))
		}
		if best > slice/2 {
			return max(1, int(slice*time.Duration(calls)/best))
		}
	}
}

// Bytes returns the bytes that a call of run allocates, beyond those of a call of
// without. A pool of memory that the garbage collector empties meanwhile only makes
// some measurements larger.
func Bytes(run, without func()) int {
	allocated := func(run func()) uint64 {
		const calls, times = 100, 50
		least := ^uint64(0)
		for range times {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			for range calls {
				run()
			}
			runtime.ReadMemStats(&after)
			least = min(least, (after.TotalAlloc-before.TotalAlloc)/calls)
		}
		return least
	}
	return int(allocated(run)) - int(allocated(without))
}
