// Package toplist finds the keys with the most requests, and those that are denied
// most often, in bounded memory.
//
// It counts by the Space-Saving algorithm (Metwally, Agrawal and El Abbadi 2005): n
// counters, each for one key. A key that has none takes over the smallest counter,
// and may have been counted as often as that says. So no count is too low, and it is
// too high by at most total/n. Any key that came more often than that has a counter.
package toplist

import (
	"cmp"
	"fmt"
	"hash/maphash"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/key/keytext"
)

// Window is how long a generation of counts lasts. A list covers the current one
// and the one before, so that it shows the last one to two minutes.
const Window = time.Minute

// MaxCounters is how many counters a list may have.
const MaxCounters = 10_000

// maxText is the most bytes of a key that a list keeps. Clients may send much
// longer ones.
const maxText = 256

// Key is a key that is counted.
type Key struct {
	Text string

	// Whether Text is the client's address, in place of a key that the request
	// does not have.
	Address bool

	// Whether Text is only the beginning of the key, and a digest of all of it.
	Cut bool
}

// List counts requests by key. Its methods are safe for concurrent use.
type List struct {
	n     int
	clock func() time.Duration
	seed  maphash.Seed

	mu          sync.Mutex
	start       time.Duration // of now
	now, before generation
}

// generation counts the requests of one Window.
type generation struct{ requests, denied summary }

// New returns a list with n counters for requests and as many for denials. clock
// returns the time since some fixed moment and must never go back; nil means the
// system's monotonic clock.
func New(n int, clock func() time.Duration) *List {
	if clock == nil {
		start := time.Now()
		clock = func() time.Duration { return time.Since(start) }
	}
	return &List{n: n, clock: clock, seed: maphash.MakeSeed(), start: clock(), now: newGeneration(), before: newGeneration()}
}

// Record counts a request. It keeps a copy of the text if it keeps the key.
func (l *List) Record(text string, address, denied bool) {
	k := Key{Text: text, Address: address}
	if len(text) > maxText {
		k.Text, k.Cut = fmt.Sprintf("%s…%016x", keytext.Cut(text, maxText), maphash.String(l.seed, text)), true
	}
	l.mu.Lock()
	l.rotate()
	l.now.requests.add(k, l.n)
	if denied {
		l.now.denied.add(k, l.n)
	}
	l.mu.Unlock()
}

// rotate starts a new generation if it is time.
func (l *List) rotate() {
	age := l.clock() - l.start
	if age < Window {
		return
	}
	l.now, l.before = l.before, l.now
	l.now.reset()
	if age >= 2*Window {
		l.before.reset()
	}
	l.start += age.Truncate(Window)
}

// By is what a Top is sorted by.
type By uint8

const (
	ByRequests By = iota
	ByDenied
)

// Top is the keys with the highest counts.
type Top struct {
	// The time that the counts cover.
	Window time.Duration

	// All requests in that time, and those that were denied.
	Requests, Denied uint64

	// The keys, the highest count first.
	Entries []Entry
}

// Entry is a key and its counts. The one that the Top is sorted by is never too
// low, and at most Error too high. The other one is never too high.
type Entry struct {
	Key
	Requests, Denied uint64
	Error            uint64
}

// Top returns at most n keys.
func (l *List) Top(by By, n int) Top {
	l.mu.Lock()
	l.rotate()
	window := l.clock() - l.start
	now, before := l.now.clone(), l.before.clone()
	if before.requests.total > 0 {
		window += Window
	}
	l.mu.Unlock()

	for _, s := range []*summary{&now.requests, &now.denied, &before.requests, &before.denied} {
		s.reindex()
	}
	requests, denied := l.merge(&now.requests, &before.requests), l.merge(&now.denied, &before.denied)
	top := Top{Window: window, Requests: requests.total, Denied: denied.total}
	of, other := &requests, &denied
	if by == ByDenied {
		of, other = other, of
	}
	slices.SortFunc(of.counters, func(a, b counter) int {
		return cmp.Or(cmp.Compare(b.count, a.count), cmp.Compare(a.error, b.error), strings.Compare(a.key.Text, b.key.Text))
	})
	for _, c := range of.counters[:min(n, len(of.counters))] {
		e := Entry{Key: c.key, Requests: c.count, Error: c.error}
		least := other.least(c.key)
		if e.Denied = least; by == ByDenied {
			e.Requests, e.Denied = max(least, c.count-c.error), c.count
		}
		top.Entries = append(top.Entries, e)
	}
	return top
}

// merge returns the counts of two summaries together, see Agarwal et al., Mergeable
// Summaries (2012).
func (l *List) merge(a, b *summary) summary {
	merged := summary{total: a.total + b.total, index: make(map[Key]int)}
	addAll := func(from, other *summary) {
		for _, c := range from.counters {
			if _, done := merged.index[c.key]; done {
				continue
			}
			count, err := other.estimate(c.key, l.n)
			merged.index[c.key] = len(merged.counters)
			merged.counters = append(merged.counters, counter{c.key, c.count + count, c.error + err})
		}
	}
	addAll(a, b)
	addAll(b, a)
	return merged
}

// newGeneration returns a generation without counts.
func newGeneration() generation {
	return generation{requests: summary{index: make(map[Key]int)}, denied: summary{index: make(map[Key]int)}}
}

// reset forgets all counts.
func (g *generation) reset() {
	g.requests.reset()
	g.denied.reset()
}

// clone returns a copy, see summary.clone.
func (g *generation) clone() generation {
	return generation{requests: g.requests.clone(), denied: g.denied.clone()}
}

// summary is the counters of the keys with the highest counts.
type summary struct {
	total    uint64
	counters []counter   // a heap, the smallest count first
	index    map[Key]int // where each key is in counters
}

// counter counts one key.
type counter struct {
	key   Key
	count uint64
	error uint64 // by how much count may be too high
}

// add counts k, given the maximum number of counters.
func (s *summary) add(k Key, most int) {
	s.total++
	i, known := s.index[k]
	switch {
	case known:
		s.counters[i].count++
	case len(s.counters) < most:
		k.Text = strings.Clone(k.Text) // it may be part of a large request
		i = len(s.counters)
		s.counters = append(s.counters, counter{key: k, count: 1})
		for parent := (i - 1) / 2; i > 0 && s.counters[parent].count > 1; parent = (i - 1) / 2 {
			s.counters[i] = s.counters[parent]
			s.index[s.counters[i].key] = i
			i = parent
		}
		s.counters[i] = counter{key: k, count: 1}
		s.index[k] = i
		return
	default:
		k.Text = strings.Clone(k.Text)
		least := &s.counters[0]
		delete(s.index, least.key)
		*least = counter{key: k, count: least.count + 1, error: least.count}
		s.index[k] = 0
		i = 0
	}
	s.sink(i)
}

// sink moves the counter at i down the heap, after its count has grown.
func (s *summary) sink(i int) {
	c, from := s.counters[i], i
	for {
		child := 2*i + 1
		if child >= len(s.counters) {
			break
		}
		if right := child + 1; right < len(s.counters) && s.counters[right].count < s.counters[child].count {
			child = right
		}
		if s.counters[child].count >= c.count {
			break
		}
		s.counters[i] = s.counters[child]
		s.index[s.counters[i].key] = i
		i = child
	}
	if i != from {
		s.counters[i] = c
		s.index[c.key] = i
	}
}

// estimate returns the count of k and by how much it may be too high, given the
// maximum number of counters.
func (s *summary) estimate(k Key, most int) (count, err uint64) {
	if i, ok := s.index[k]; ok {
		return s.counters[i].count, s.counters[i].error
	}
	if len(s.counters) < most {
		return 0, 0
	}
	return s.counters[0].count, s.counters[0].count
}

// least returns how often k came at least.
func (s *summary) least(k Key) uint64 {
	i, ok := s.index[k]
	if !ok {
		return 0
	}
	return s.counters[i].count - s.counters[i].error
}

// reset forgets all counts, and keeps the memory.
func (s *summary) reset() {
	clear(s.index)
	clear(s.counters) // drop the keys
	s.total, s.counters = 0, s.counters[:0]
}

// reindex makes the index of a clone.
func (s *summary) reindex() {
	s.index = make(map[Key]int, len(s.counters))
	for i := range s.counters {
		s.index[s.counters[i].key] = i
	}
}

// clone returns a copy without its index, which takes longer to copy: the list is
// locked meanwhile.
func (s *summary) clone() summary {
	return summary{total: s.total, counters: slices.Clone(s.counters)}
}
