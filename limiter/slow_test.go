package limiter

import (
	"container/heap"
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/racetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// slow is one process whose server replies late, on a virtual clock. The script and
// the fallback are the real ones.
type slow struct {
	t           *testing.T
	v           *clockedRedis
	random      *rand.Rand
	events      agenda
	bucket      Bucket
	least, most time.Duration // how late replies are
	timeout     time.Duration
	admitted    []charge
	wasted      []charge
	here        int // number of requests decided in the process
}

func newSlow(t *testing.T, v *clockedRedis, l Limit, least, most time.Duration) *slow {
	v.flush(t)
	v.at(t, v.now-v.now%3600e6+3600e6)
	s := &slow{
		t: t, v: v, random: rand.New(rand.NewPCG(1, 2)), least: least, most: most, timeout: 50 * time.Millisecond,
		bucket: Bucket{Name: "b", Key: "k", Limit: l, Cost: 1},
	}
	v.fallback = newFallback(NewMemoryWithClock(func() time.Duration { return time.Duration(v.now) * time.Microsecond }), s.timeout, "")
	return s
}

// after schedules something to happen some time later.
func (s *slow) after(d time.Duration, do func()) { s.events.at(s.v.now+d.Microseconds(), do) }

// flood has some clients take single units for a while, each again 2 ms after its
// last request was decided.
func (s *slow) flood(clients int, d time.Duration) {
	until := s.v.now + d.Microseconds()
	for range clients {
		s.after(time.Duration(s.random.Int64N(int64(2*time.Millisecond))), func() { s.call(until) })
	}
	for len(s.events.all) > 0 && !s.t.Failed() {
		e := heap.Pop(&s.events).(event)
		s.v.now = e.when // the server's clock is set when it is called
		e.do()
	}
}

// call sends a request, and decides it in the process if the reply does not come in
// time.
func (s *slow) call(until int64) {
	if s.v.now >= until {
		return
	}
	req := Request{Buckets: []Bucket{s.bucket}}
	q := s.v.query(req, byte(AccountingAtomic))
	s.v.fallback.send(nil, callsOf(q))
	done := false
	decided := func(o outcome, at int64) {
		if done = true; !o.denied {
			s.admitted = append(s.admitted, charge{at: at, units: 1})
		}
		s.after(2*time.Millisecond, func() { s.call(until) })
	}
	s.after(100*time.Microsecond, func() {
		at := s.v.now
		s.v.at(s.t, at)
		o := s.v.evaluate(s.t, req, q)
		s.after(s.least+time.Duration(s.random.Int64N(int64(s.most-s.least)+1)), func() {
			if !done {
				s.v.fallback.answered(q, []outcome{o})
				decided(o, at)
			} else if !o.denied {
				s.wasted = append(s.wasted, charge{at: at, units: 1})
			}
		})
	})
	s.after(s.timeout, func() {
		if !done {
			s.here++
			decided(s.v.fallback.decide(req, nil, false, q)[0], s.v.now)
		}
	})
}

// TestLateReplies guards what one process admits in a flood while about half of the
// server's replies come too late, and the process decides those requests: never more
// than the limit, in a window of the clock neither; and not so few that levels which
// are reported again and again can have been added to by their delay. A request that the
// server has counted although its reply came too late takes room too, so it is fewer
// than if replies were in time.
func TestLateReplies(t *testing.T) {
	if testing.Short() {
		t.Skip(longTest)
	}
	racetest.SingleGoroutine(t)
	const size = 20
	epoch := time.Unix(0, 0)
	server := redistest.Start(t)
	for _, tc := range []struct {
		name  string
		limit Limit
	}{
		{"windows of the clock, 200 ms", ClockWindow(size, 200*time.Millisecond, epoch)},
		{"windows of the clock, 2 s", ClockWindow(size, 2*time.Second, epoch)},
		{"windows, 500 ms", FixedWindow(size, 500*time.Millisecond)},
		{"windows, 2 s", FixedWindow(size, 2*time.Second)},
		{"sliding window, 2 s", SlidingWindow(size, 2*time.Second)},
		{"sliding log, 500 ms", SlidingLog(size, 500*time.Millisecond)},
		{"sliding log, 2 s", SlidingLog(size, 2*time.Second)},
		{"leaky bucket, 10 a second", Limit{Size: size, DripInterval: 100 * time.Millisecond, DripSize: 1}},
		{"leaky bucket, 20 in 3 s", Limit{Size: size, DripInterval: 3 * time.Second, DripSize: size}},
		{"leaky bucket, 10 in 1 s", Limit{Size: size, DripInterval: time.Second, DripSize: 10}},
		{"one at a time", Limit{Size: 1, DripInterval: 500 * time.Millisecond, DripSize: 1}},
	} {
		for _, late := range [][2]time.Duration{{0, 80 * time.Millisecond}, {40 * time.Millisecond, 60 * time.Millisecond}} {
			t.Run(fmt.Sprintf("%s,late=%v", tc.name, late), func(t *testing.T) {
				l := tc.limit
				s := newSlow(t, newClockedRedis(t, server, "rl:"), l, late[0], late[1])
				const d = 12 * time.Second
				s.flood(8, d)
				windows := map[int64]int{}
				for _, a := range s.admitted {
					if l.Aligned && l.Algorithm != bucket.Log {
						windows[a.at/l.of().Rate()]++
					}
				}
				for _, n := range windows {
					if n > size {
						t.Errorf("%d admitted in one window", n)
					}
				}
				checkUnits(t, l, s.admitted, s.wasted, false)
				intime := int64(d/l.DripInterval) * min(l.DripSize, l.Size) // if replies were in time
				t.Logf("%d admitted of %d", len(s.admitted), intime)
				if n := int64(len(s.admitted)); n < intime*2/5 || s.here < 500 {
					t.Errorf("%d admitted of %d, and %d requests decided here", n, intime, s.here)
				}
			})
		}
	}
}

// TestSlowRedis guards the same through a real Redis whose replies are late, on real
// clocks: no window of the clock, and no time of a window in a log, has more than it
// may, and none of them is left empty.
func TestSlowRedis(t *testing.T) {
	const size, width, windows = 20, time.Second, 4
	server := redistest.Start(t)
	for _, tc := range []struct {
		name         string
		limit        Limit
		late, jitter time.Duration
	}{
		{"windows of the clock", ClockWindow(size, width, time.Unix(0, 0)), 0, 80 * time.Millisecond},
		{"a log", SlidingLog(size, width), 40 * time.Millisecond, 20 * time.Millisecond},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			proxy := redistest.StartProxy(t, server.Addr)
			r := newTestRedis(t, server, func(opt *RedisOptions) {
				opt.Addresses, opt.KeyPrefix = []string{proxy.Addr}, tc.name+":"
				opt.Fallback, opt.Timeout = NewMemory(), 50*time.Millisecond
			})
			b := Bucket{Name: "b", Key: "k", Limit: tc.limit, Cost: 1}
			other := b
			other.Key = "other"
			decide(t, r, AccountingAtomic, other)
			proxy.Delay(tc.late, tc.jitter)
			type admission struct{ asked, reported int64 } // when, in µs
			var mu sync.Mutex
			var all []admission
			var clients sync.WaitGroup
			until := time.Now().Add(windows * width)
			for range 8 {
				clients.Go(func() {
					for time.Now().Before(until) {
						asked := time.Now().UnixMicro()
						d, err := r.Take(context.Background(), Request{Buckets: []Bucket{b}}, nil)
						if err != nil {
							t.Error(err)
							return
						}
						if reported := time.Now().UnixMicro(); !d[0].Denied {
							mu.Lock()
							all = append(all, admission{asked, reported})
							mu.Unlock()
						}
						time.Sleep(2 * time.Millisecond)
					}
				})
			}
			clients.Wait()
			strictly := func(from int64) (n int) { // admitted within a window that begins then
				for _, a := range all {
					if a.asked >= from && a.reported < from+width.Microseconds() {
						n++
					}
				}
				return n
			}
			for _, a := range all {
				from := a.asked
				if tc.limit.Algorithm != bucket.Log {
					from -= from % width.Microseconds()
				}
				if n := strictly(from); n > size {
					t.Fatalf("%d admitted in one window, want at most %d", n, size)
				}
			}
			if len(all) < windows*size/10 { // some half are; fewer where this machine is late itself
				t.Errorf("%d admitted of %d", len(all), windows*size)
			}
		})
	}
}
