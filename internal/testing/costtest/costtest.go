// Package costtest guards what code costs: sizes, allocations and time, in tests that
// pass on a busy machine too.
//
// Times of a shared machine say little. What repeats best is this: a task and a hash of
// 260 bytes take turns in one process, in slices of a tenth of a millisecond and in
// random order, and the fastest tenth of the slices of each counts. The time of a task
// is measured in hashes. That repeats within some percent in one process, but differs by a
// third from one machine to the next, even between two of one kind: so a test only
// fails when a task takes twice as long as it should.
package costtest

import (
	"hash/maphash"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
)

const (
	slice    = 100 * time.Microsecond
	rounds   = 2000 // slices of each task in one measurement
	attempts = 3    // measurements of a task that seems to have become slower

	tolerance = 2 // how often its ceiling a task may take
)

// Task is something to measure.
type Task struct {
	Name    string
	Run     func()
	Without func()  // what Run does besides; nil if nothing. Its time is subtracted.
	Ceiling float64 // in hashes
}

// Check logs how many hashes each task takes, and fails the test for each that takes
// twice its ceiling.
func Check(t *testing.T, tasks []Task) {
	t.Helper()
	for attempt := 1; len(tasks) > 0; attempt++ {
		times := measure(tasks)
		var slow []Task
		for i, task := range tasks {
			t.Logf("%s: %.2f hashes, ceiling %.2f", task.Name, times[i], task.Ceiling)
			if times[i] <= task.Ceiling*tolerance {
				continue
			}
			if slow = append(slow, task); attempt == attempts {
				t.Errorf("%s takes %.2f hashes, far above its ceiling of %.2f", task.Name, times[i], task.Ceiling)
			}
		}
		if attempt == attempts {
			return
		}
		tasks = slow
	}
}

// measure returns the time of each task in hashes.
func measure(tasks []Task) (times []float64) {
	seed, text := maphash.MakeSeed(), strings.Repeat("203.0.113.77 ", 20)
	runs := []func(){func() { runtime.KeepAlive(maphash.String(seed, text)) }}
	for _, task := range tasks {
		runs = append(runs, task.Run)
		if task.Without != nil {
			runs = append(runs, task.Without)
		}
	}
	fastest := fastestTenth(runs)
	hash, next := fastest[0], fastest[1:]
	for _, task := range tasks {
		took := next[0]
		if next = next[1:]; task.Without != nil {
			took -= next[0]
			next = next[1:]
		}
		times = append(times, took/hash)
	}
	return times
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

// Sizes fails the test for each type that is larger than its ceiling.
func Sizes(t *testing.T, sizes []Size) {
	t.Helper()
	for _, s := range sizes {
		if s.Size > s.Ceiling {
			t.Errorf("%s has %d bytes, the ceiling is %d: %s", s.Of, s.Size, s.Ceiling, s.Why)
		}
	}
}

// Size is the size of a type, in bytes.
type Size struct {
	Of            string
	Size, Ceiling uintptr
	Why           string // why it matters
}

// Bytes returns the bytes that a call of run allocates, beyond a call of
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
