// Command mholt measures the limiter inside of mholt/caddy-ratelimit, in turns with
// x/time/rate, and prints what it found as JSON. It is a program of its own, without
// the module of the same name that it is compared with.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
	"time"
	_ "unsafe" // for go:linkname

	_ "github.com/mholt/caddy-ratelimit"
	"golang.org/x/time/rate"
)

// What its handler calls for each request, which it does not export.
type (
	limiters struct{}
	ring     struct{}
)

//go:linkname newLimiters github.com/mholt/caddy-ratelimit.newRateLimiterMap
func newLimiters() *limiters

//go:linkname ringOf github.com/mholt/caddy-ratelimit.(*rateLimitersMap).getOrInsert
func ringOf(of *limiters, key string, events int, window time.Duration) *ring

//go:linkname when github.com/mholt/caddy-ratelimit.(*ringBufferRateLimiter).When
func when(r *ring) time.Duration

// found is what is printed: the medians of all turns.
type found struct {
	Nanoseconds float64 // of a decision
	Ratio       float64 // of its time to that of x/time/rate
	Bytes       float64 // that the heap has grown by for each key
}

func main() {
	keys := flag.Int("keys", 1000, "how many keys there are")
	size := flag.Int("size", 100, "how many events an hour there may be")
	half := flag.Int("before", 50, "how many events of each key there are before")
	turns := flag.Int("turns", 20, "how many turns there are")
	calls := flag.Int("calls", 1000, "how many decisions there are in each")
	flag.Parse()

	names := make([]string, *keys)
	for i := range names {
		names[i] = fmt.Sprintf("10.%d.%d.%d", i>>16, i>>8&255, i&255)
	}
	key := func(i int) string { return names[uint32(i)*2654435761%uint32(len(names))] }

	before := heap()
	all := newLimiters()
	ask := func(key string) {
		if wait := when(ringOf(all, key, *size, time.Hour)); wait != 0 {
			fmt.Fprintf(os.Stderr, "%s was denied for %v\n", key, wait)
			os.Exit(1)
		}
	}
	for range *half {
		for _, name := range names {
			ask(name)
		}
	}
	f := found{Bytes: float64(heap()-before) / float64(len(names))}

	var mu sync.Mutex
	buckets := make(map[string]*rate.Limiter)
	askPeer := func(key string) {
		mu.Lock()
		l, ok := buckets[key]
		if !ok {
			l = rate.NewLimiter(rate.Every(time.Millisecond), 1<<40)
			buckets[key] = l
		}
		mu.Unlock()
		l.Allow()
	}
	for _, name := range names {
		askPeer(name)
	}

	times, ratios := make([]float64, 0, *turns), make([]float64, 0, *turns)
	for turn := range *turns {
		took := func(ask func(string)) float64 {
			start := time.Now()
			for i := range *calls {
				ask(key(turn**calls + i))
			}
			return float64(time.Since(start)) / float64(*calls)
		}
		own, peer := took(ask), took(askPeer)
		times, ratios = append(times, own), append(ratios, own/peer)
	}
	slices.Sort(times)
	slices.Sort(ratios)
	f.Nanoseconds, f.Ratio = times[*turns/2], ratios[*turns/2]
	if err := json.NewEncoder(os.Stdout).Encode(f); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// heap returns the bytes in use.
func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
