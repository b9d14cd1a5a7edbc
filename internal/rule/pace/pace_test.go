package pace

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// speed is a limit with a speed, and what was sent by it.
type speed struct {
	limit *Limit
	store limiter.Store
	numbers
	start time.Time

	mu   sync.Mutex
	sent []sentBytes
}

// numbers are a speed in bytes a second, and a size.
type numbers struct{ rate, size int64 }

// sentBytes are bytes that were sent together.
type sentBytes struct {
	client string
	at     time.Duration
	n      int64
}

// newSpeed returns a limit with a speed.
func newSpeed(t *testing.T, store limiter.Store, name string, of numbers) *speed {
	t.Helper()
	rate := option.Rate{Units: of.rate, Each: time.Second}
	numbers, err := rate.Limit(of.size)
	numbers = numbers.Smooth()
	if err != nil {
		t.Fatal(err)
	}
	l := &Limit{Speed: NewSpeed(), Counters: new(telemetry.Counters)}
	l.Bucket, l.AddressName = limiter.Bucket{Name: name, Limit: limiter.Limit(numbers)}, name+"@"
	if !l.SetPieces(rate) {
		t.Fatal("the size is too small")
	}
	return &speed{limit: l, store: store, numbers: of, start: time.Now()}
}

// pacedBy returns a response to a client that is paced by limits.
func pacedBy(ctx context.Context, client string, by ...*speed) *Response {
	p := New(ctx, by[0].store)
	for _, s := range by {
		p.Add(s.limit, s.limit.Bucket, client)
	}
	return p
}

// send sends n bytes as a response to a client, in writes of at most so many.
func (s *speed) send(p *Response, n, atOnce int) (sent int, err error) {
	for sent < n && err == nil {
		var m int
		m, err = p.write(make([]byte, min(atOnce, n-sent)), func(b []byte) (int, error) {
			s.note(p.limits[0].waiter.client, len(b))
			return len(b), nil
		})
		sent += m
	}
	return sent, err
}

// note notes that bytes are sent to a client.
func (s *speed) note(client string, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sent = append(s.sent, sentBytes{client, time.Since(s.start), int64(n)})
}

// check checks that what was sent kept to the bound, in any time, and that no less than a share of it was
// sent until some time, from the start.
func (s *speed) check(t *testing.T, until time.Duration, share float64) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	var sum, early int64
	level, last := int64(0), time.Duration(0) // in byte-seconds / 1e6, exactly
	perMicrosecond := func(d time.Duration) int64 { return d.Microseconds() * s.rate }
	for i, e := range s.sent {
		level = max(level-perMicrosecond(e.at)+perMicrosecond(last), 0) + e.n*1e6
		if last = e.at; level > (s.size+s.limit.Bucket.Limit.DripSize-1)*1e6 {
			t.Fatalf("%d bytes at %v, the %dth, are %d above size and speed", e.n, e.at, i, level/1e6-s.size)
		}
		if sum += e.n; e.at <= until {
			early += e.n
		}
	}
	if bound := float64(s.size) + until.Seconds()*float64(s.rate); float64(early) < share*bound {
		t.Errorf("%d bytes in %v, want %.2f of %.0f", early, until, share, bound)
	}
	if n := s.limit.Speed.State().Requests; n != 0 {
		t.Errorf("%d responses wait at the end", n)
	}
}

// of returns how many bytes were sent to a client until some time.
func (s *speed) of(client string, until time.Duration) (n int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.sent {
		if e.client == client && e.at <= until {
			n += e.n
		}
	}
	return n
}

// TestSpeedKeepsBound guards that all responses of a key together are sent no more than size and speed allow
// in any time, to the byte, and hardly less, whatever they are written in, and while others come and leave.
func TestSpeedKeepsBound(t *testing.T) {
	for _, of := range []numbers{{1000, LeastSize}, {100_000, 50_000}, {333_333, LeastSize}, {5_000_000, 1_000_000}, {2_000_000, 20_000_000}, {1_000_000_000, 100_000}} {
		for _, responses := range []int{1, 5, 40} {
			t.Run(fmt.Sprintf("%d of %v", responses, of), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					const length = 20 * time.Second
					s := newSpeed(t, limiter.NewMemory(), "s", of)
					rnd := rand.New(rand.NewPCG(uint64(responses), uint64(of.rate)))
					ctx, cancel := context.WithTimeout(t.Context(), length)
					defer cancel()
					var all sync.WaitGroup
					most := int(of.size + 25*of.rate)
					if of.rate > 1e8 {
						most = int(of.rate / 20) // or it takes long
					}
					for range responses {
						atOnce := 1 + rnd.IntN(100_000)
						if of.rate > 1e8 {
							atOnce = 100_000
						}
						all.Go(func() { _, _ = s.send(pacedBy(ctx, "", s), most/responses+1, atOnce) })
					}
					for i := range 20 { // others that leave
						wait := time.Duration(rnd.Int64N(int64(length / 2)))
						all.Go(func() {
							time.Sleep(wait)
							ctx, cancel := context.WithTimeout(ctx, time.Duration(i)*10*time.Millisecond)
							defer cancel()
							_, _ = s.send(pacedBy(ctx, "", s), most, 5000)
						})
					}
					all.Wait()
					share := 0.98
					if of.rate > 1e8 {
						share = 0
					} else if of.rate < 10_000 {
						share = 0.9 // a piece is much of it
					}
					s.check(t, length-time.Millisecond, share)
				})
			})
		}
	}
}

// TestSpeedsOfSeveralLimits guards that a response keeps to all of its limits.
func TestSpeedsOfSeveralLimits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := limiter.NewMemory()
		everyone := newSpeed(t, store, "everyone", numbers{1_000_000, 100_000})
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		var own []*speed
		var all sync.WaitGroup
		for i := range 4 {
			s := newSpeed(t, store, fmt.Sprint("client", i), numbers{400_000, 50_000})
			own = append(own, s)
			for range 3 {
				all.Go(func() {
					p := pacedBy(ctx, fmt.Sprint(i), s, everyone)
					for {
						if _, err := p.write(make([]byte, 10_000), func(b []byte) (int, error) {
							s.note("", len(b))
							everyone.note("", len(b))
							return len(b), nil
						}); err != nil {
							return
						}
					}
				})
			}
		}
		all.Wait()
		everyone.check(t, 10*time.Second-time.Millisecond, 0.98)
		for _, s := range own {
			if n := s.of("", 10*time.Second); n < 2_400_000 || n > 2_700_000 {
				t.Errorf("a client of four got %d bytes of 10100000", n)
			}
		}
	})
}

// TestSpeedIsShared guards that clients get as many bytes, however many responses each has, in whatever
// pieces, and however short they are; and that a client that takes less gets it at once.
func TestSpeedIsShared(t *testing.T) {
	of := numbers{1_000_000, 200_000}
	for _, tc := range []struct {
		name     string
		others   int  // responses of the other client
		atOnce   int  // bytes that it writes at once
		short    int  // length of its responses; 0 if they do not end
		own      int  // bytes that the client writes at once
		off      bool // whether clients take no turns
		min, max float64
	}{
		{"one each", 1, 50_000, 0, 50_000, false, 0.47, 0.53},
		{"beside 20", 20, 50_000, 0, 50_000, false, 0.47, 0.53},
		{"in small writes beside 20", 20, 50_000, 0, 500, false, 0.44, 0.53},
		{"beside small writes", 20, 100, 0, 50_000, false, 0.47, 0.56},
		{"beside short responses", 1, 16_000, 16_000, 50_000, false, 0.47, 0.6},
		{"beside many short responses", 20, 5_000, 5_000, 50_000, false, 0.47, 0.6},
		{"first come, first served", 20, 50_000, 0, 50_000, true, 0.03, 0.08},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newSpeed(t, limiter.NewMemory(), "s", of)
				ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
				defer cancel()
				client := func(name string) string {
					if tc.off {
						return ""
					}
					return name
				}
				var all sync.WaitGroup
				var own int64
				all.Go(func() {
					p := pacedBy(ctx, client("a"), s)
					for ctx.Err() == nil {
						n, _ := s.send(p, 1<<20, tc.own)
						own += int64(n)
						time.Sleep(10 * time.Microsecond) // until the next handler has read more
					}
				})
				for range tc.others {
					all.Go(func() {
						for ctx.Err() == nil {
							length := tc.short
							if length == 0 {
								length = 1 << 30
							}
							_, _ = s.send(pacedBy(ctx, client("b"), s), length, tc.atOnce)
							time.Sleep(10 * time.Microsecond)
						}
					})
				}
				all.Wait()
				share := float64(own) / (float64(of.size) + 20*float64(of.rate))
				if share < tc.min || share > tc.max {
					t.Errorf("the client got %.3f of all, want %v to %v", share, tc.min, tc.max)
				}
				s.check(t, 20*time.Second-time.Millisecond, 0.97)
			})
		})
	}
	t.Run("takes less", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := newSpeed(t, limiter.NewMemory(), "s", of)
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			var all sync.WaitGroup
			for range 20 {
				all.Go(func() { _, _ = s.send(pacedBy(ctx, "b", s), 1<<30, 50_000) })
			}
			time.Sleep(time.Second)
			for range 50 {
				start := time.Now()
				_, _ = s.send(pacedBy(ctx, "a", s), 2000, 2000)
				if took := time.Since(start); took > 15*time.Millisecond {
					t.Errorf("2000 bytes took %v beside 20 downloads", took)
				}
				time.Sleep(100 * time.Millisecond)
			}
			cancel()
			all.Wait()
		})
	})
}

// TestSpeedLeaves guards that a response ends its wait when its client leaves, which keeps no other from
// its turn, and is not written any more.
func TestSpeedLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSpeed(t, limiter.NewMemory(), "s", numbers{10_000, 20_000})
		ctx, leave := context.WithCancel(t.Context())
		var all sync.WaitGroup
		for range 100 {
			all.Go(func() {
				p := pacedBy(ctx, "", s)
				if _, err := s.send(p, 1<<20, 5000); !errors.Is(err, context.Canceled) {
					t.Errorf("got %v", err)
				}
				if n, err := s.send(p, 1, 1); n > 0 || err == nil {
					t.Error("it is written on")
				}
			})
		}
		time.Sleep(3 * time.Second)
		start := time.Now()
		leave()
		all.Wait()
		if took := time.Since(start); took > 0 {
			t.Errorf("it took %v until they had left", took)
		}
		if _, err := s.send(pacedBy(t.Context(), "", s), 2000, 2000); err != nil || time.Since(start) > 300*time.Millisecond {
			t.Errorf("got %v after %v", err, time.Since(start))
		}
		s.check(t, 3*time.Second, 0.9)
	})
}

// TestSpeedTurnAsClientLeaves guards that a response has only one turn by being let go in the moment in which its
// client leaves.
func TestSpeedTurnAsClientLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSpeed(t, limiter.NewMemory(), "s", numbers{20_000, 20_000})
		_, _ = s.send(pacedBy(t.Context(), "", s), 20_000, 20_000)
		var other sync.WaitGroup
		other.Go(func() { _, _ = s.send(pacedBy(t.Context(), "other", s), 100_000, 2000) })
		left, leave := context.WithCancel(t.Context())
		leave()
		for range 100 {
			time.Sleep(time.Duration(50+rand.IntN(45)) * time.Millisecond) // there is room for less than the other waits for
			p := pacedBy(left, "", s)
			for range 5 {
				_, _ = s.send(p, 100, 100)
			}
		}
		other.Wait()
		s.check(t, time.Second, 0)
	})
}

// TestPieces guards how many bytes are charged at once.
func TestPieces(t *testing.T) {
	var got [][2]int64
	for _, of := range []numbers{{1, LeastSize - 1}, {1, LeastSize}, {100_000, 50_000}, {100_000, 1 << 40}, {1e6, 1e6}, {20e6, 20e6}, {1 << 49, 1 << 49}, {1 << 49, 20_000}} {
		n := Numbers{Bucket: limiter.Bucket{Limit: limiter.Limit{Size: of.size}}}
		if !n.SetPieces(option.Rate{Units: of.rate, Each: time.Second}) {
			n.Most, n.Least = 0, 0
		}
		got = append(got, [2]int64{n.Most, n.Least})
	}
	if want := [][2]int64{{0, 0}, {2048, 2048}, {6250, 2048}, {10_000, 2048}, {65_536, 2048}, {65_536, 20_000}, {65_536, 65_536}, {2500, 2500}}; !slices.Equal(got, want) {
		t.Errorf("got %d, want %d", got, want)
	}
}

// TestWaitingChargesNothing guards that a response which waits for one limit, and leaves, has cost those who
// share another with it nothing, and that what is charged to each bucket is what is sent, to the byte.
func TestWaitingChargesNothing(t *testing.T) {
	for _, first := range []bool{false, true} {
		t.Run(fmt.Sprint("shared first: ", first), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := limiter.NewMemory()
				everyone := newSpeed(t, store, "everyone", numbers{1_000_000, 100_000})
				slow := newSpeed(t, store, "slow", numbers{20_000, 20_000})
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				defer cancel()
				var all sync.WaitGroup
				note := func(b []byte) (int, error) {
					everyone.note("", len(b))
					return len(b), nil
				}
				for i := range 10 {
					all.Go(func() {
						p := pacedBy(ctx, fmt.Sprint(i), everyone)
						for {
							if _, err := p.write(make([]byte, 50_000), note); err != nil {
								return
							}
						}
					})
				}
				for range 100 {
					all.Go(func() {
						for ctx.Err() == nil {
							one, leave := context.WithTimeout(ctx, 300*time.Millisecond)
							by := []*speed{slow, everyone}
							if first {
								by = []*speed{everyone, slow}
							}
							_, _ = pacedBy(one, "slow", by...).write(make([]byte, 1<<20), func(b []byte) (int, error) {
								slow.note("", len(b))
								return note(b)
							})
							leave()
						}
					})
				}
				all.Wait()
				everyone.check(t, 10*time.Second-time.Millisecond, 0.98)
				slow.check(t, 10*time.Second-time.Millisecond, 0.8) // each has only the rest of its 300 ms
				for _, s := range []*speed{everyone, slow} {
					if sent, charged := s.of("", time.Hour), int64(s.limit.Counters.Totals().Tallies[telemetry.Units]); sent != charged {
						t.Errorf("%s: %d bytes were sent, and %d charged", s.limit.Bucket.Name, sent, charged)
					}
				}
			})
		})
	}
}

// TestNewNumbersHold guards that a response which has begun keeps to numbers that come into force, from its
// next piece on: also to those of a bucket of another name, and to a dry run.
func TestNewNumbersHold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := limiter.NewMemory()
		s := newSpeed(t, store, "s", numbers{100_000, 20_000})
		s.limit.Use()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var all sync.WaitGroup
		for range 5 {
			all.Go(func() { _, _ = s.send(pacedBy(ctx, "", s), 1<<23, 50_000) })
		}
		per := func(d time.Duration) int64 {
			before := s.of("", time.Hour)
			time.Sleep(d)
			return s.of("", time.Hour) - before
		}
		within := func(what string, got int64, least, most float64) {
			t.Helper()
			if float64(got) < least || float64(got) > most {
				t.Errorf("%s: %d bytes, want %.0f to %.0f", what, got, least, most)
			}
		}
		time.Sleep(time.Second)
		within("at first", per(10*time.Second), 980_000, 1_020_000)
		slower := newSpeed(t, store, "s", numbers{10_000, 20_000})
		slower.limit.Speed = s.limit.Speed
		slower.limit.Use()
		time.Sleep(time.Second)
		within("slower", per(20*time.Second), 190_000, 210_000)
		within("of a new response", func() int64 {
			n, _ := slower.send(pacedBy(ctx, "", slower), 2_000, 2_000)
			return int64(n)
		}(), 2_000, 2_000)
		free := newSpeed(t, store, "s", numbers{10_000, 20_000})
		free.limit.Speed, free.limit.Bucket.DryRun = s.limit.Speed, true
		free.limit.Use()
		all.Wait() // until all is sent
	})
}

// TestTurns guards, with random responses at random limits, that each gets all that it sends, in order, that no
// bucket is charged more than it admits or less than is sent, and that none waits for longer than all that was
// before it took.
func TestTurns(t *testing.T) {
	for seed := range uint64(40) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				rnd := rand.New(rand.NewPCG(seed, 58))
				store := limiter.NewMemory()
				limits := make([]*speed, 1+rnd.IntN(4))
				for i := range limits {
					limits[i] = newSpeed(t, store, fmt.Sprint("limit ", i), numbers{50_000 + rnd.Int64N(500_000), LeastSize + rnd.Int64N(200_000)})
				}
				var all sync.WaitGroup
				var sum atomic.Int64
				for i := range 1 + rnd.IntN(30) {
					by := slices.Clone(limits)
					rnd.Shuffle(len(by), func(i, j int) { by[i], by[j] = by[j], by[i] })
					by = by[:1+rnd.IntN(len(by))]
					client, length, atOnce := fmt.Sprint(rnd.IntN(1+i)), 1+rnd.IntN(200_000), 1+rnd.IntN(80_000)
					starts, leaves := time.Duration(rnd.Int64N(int64(5*time.Second))), time.Duration(-1)
					if rnd.IntN(3) == 0 {
						leaves = time.Duration(rnd.Int64N(int64(5 * time.Second)))
					}
					sum.Add(int64(length))
					all.Go(func() {
						time.Sleep(starts)
						ctx := t.Context()
						if leaves >= 0 {
							one, cancel := context.WithTimeout(ctx, leaves)
							defer cancel()
							ctx = one
						}
						p := pacedBy(ctx, client, by...)
						defer p.end()
						var sent []byte
						content := make([]byte, length)
						for i := range content {
							content[i] = byte(i / 7)
						}
						for rest := content; len(rest) > 0; {
							n, err := p.write(rest[:min(atOnce, len(rest))], func(b []byte) (int, error) {
								for _, s := range by {
									s.note(client, len(b))
								}
								sent = append(sent, b...)
								return len(b), nil
							})
							if rest = rest[n:]; err != nil {
								if leaves < 0 || !errors.Is(err, context.Canceled) {
									t.Error(err)
								}
								break
							}
						}
						if leaves < 0 && len(sent) != length || string(sent) != string(content[:len(sent)]) {
							t.Errorf("sent %d of %d bytes, or others", len(sent), length)
						}
					})
				}
				start := time.Now()
				all.Wait()
				slowest := slices.MinFunc(limits, func(a, b *speed) int { return int(a.rate - b.rate) })
				if took, most := time.Since(start), 6*time.Second+time.Duration(float64(sum.Load())/float64(slowest.rate)*float64(time.Second)); took > most {
					t.Errorf("it took %v, want %v at most", took, most)
				}
				for _, s := range limits {
					s.check(t, 0, 0)
					if sent, charged := s.all(), int64(s.limit.Counters.Totals().Tallies[telemetry.Units]); sent != charged {
						t.Errorf("%d bytes were sent, and %d charged", sent, charged)
					}
					if n := len(s.limit.Speed.queues); n > 0 {
						t.Errorf("%d queues are left", n)
					}
				}
			})
		})
	}
}

// all returns how many bytes were sent to all clients.
func (s *speed) all() (n int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.sent {
		n += e.n
	}
	return n
}

// TestStateCounts guards that what waits is counted as long as it does, by clients.
func TestStateCounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSpeed(t, limiter.NewMemory(), "s", numbers{2_000, LeastSize})
		ctx, leave := context.WithCancel(t.Context())
		var all sync.WaitGroup
		for _, client := range []string{"a", "a", "a", "b"} {
			all.Go(func() { _, _ = s.send(pacedBy(ctx, client, s), 1<<20, 50_000) })
		}
		synctest.Wait()
		if got, want := s.limit.Speed.State(), (telemetry.Waiting{Requests: 4, Clients: 2, Longest: 3}); got != want {
			t.Errorf("got %+v, want %+v", got, want)
		}
		leave()
		all.Wait()
		if got := s.limit.Speed.State(); got != (telemetry.Waiting{}) {
			t.Errorf("got %+v, want none", got)
		}
	})
}

// TestConnections guards what is sent over a connection that a handler has taken over: it is paced, a short
// message goes beside a write that waits and is charged then, a long one goes after it, and closing the
// connection ends all waits.
func TestConnections(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSpeed(t, limiter.NewMemory(), "s", numbers{10_000, 20_000})
		client, server := net.Pipe()
		var got atomic.Int64
		var all sync.WaitGroup
		all.Go(func() {
			buffer := make([]byte, 4096)
			for {
				n, err := client.Read(buffer)
				if got.Add(int64(n)); err != nil {
					return
				}
			}
		})
		p := pacedBy(t.Context(), "", s)
		c := &conn{Conn: server, response: p}
		all.Go(func() {
			if _, err := c.Write(make([]byte, 1_000_000)); err == nil {
				t.Error("all was sent")
			}
		})
		time.Sleep(10 * time.Second)
		before := got.Load()
		if n, err := c.Write(make([]byte, 100)); n != 100 || err != nil || got.Load() != before+100 {
			t.Errorf("of a short message %d bytes were sent, %v", n, err)
		}
		late := make(chan error, 1)
		all.Go(func() {
			_, err := c.Write(make([]byte, 1000))
			late <- err
		})
		time.Sleep(10 * time.Second)
		if n := got.Load(); n > 220_200 || n < 210_000 {
			t.Errorf("%d bytes were sent in 20 s", n)
		}
		c.Close()
		if err := <-late; err == nil {
			t.Error("the long message was sent")
		}
		all.Wait()
		if n := len(s.limit.Speed.queues); n > 0 {
			t.Errorf("%d queues are left", n)
		}
	})
}
