package adaptive

import (
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// upstream answers requests first come, first served, with some workers, and knows nothing of
// clients that have left.
type upstream struct {
	workers chan struct{}
	service func(*rand.Rand) time.Duration
	mu      sync.Mutex
	rng     *rand.Rand
	until   time.Time     // it stands still
	stood   time.Duration // for which it has stood still, once that is past
}

func newUpstream(workers int, service func(*rand.Rand) time.Duration) *upstream {
	u := &upstream{workers: make(chan struct{}, 1000), service: service, rng: rand.New(rand.NewPCG(1, 2))}
	u.add(workers)
	return u
}

func (u *upstream) add(workers int) {
	for range workers {
		u.workers <- struct{}{}
	}
}

func (u *upstream) remove(workers int) {
	for range workers {
		<-u.workers
	}
}

// pause has it stand still for some time, with all that it is at.
func (u *upstream) pause(d time.Duration) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.until, u.stood = time.Now().Add(d), u.stood+d
}

// work returns when a worker has worked for some time, pauses apart.
func (u *upstream) work(d time.Duration) {
	u.mu.Lock()
	end := time.Now().Add(max(0, time.Until(u.until)) + d - u.stood) // by a clock that stands still too
	for left := time.Until(end.Add(u.stood)); left > 0; left = time.Until(end.Add(u.stood)) {
		u.mu.Unlock()
		time.Sleep(left)
		u.mu.Lock()
	}
	u.mu.Unlock()
}

func (u *upstream) draw(of func(*rand.Rand) time.Duration) time.Duration {
	u.mu.Lock()
	defer u.mu.Unlock()
	return of(u.rng)
}

// answer returns when the upstream has answered a request, or ctx is done. In that case
// the upstream still works on it.
func (u *upstream) answer(ctx context.Context) (answered bool) {
	done := make(chan struct{})
	go func() {
		<-u.workers
		u.work(u.draw(u.service))
		u.workers <- struct{}{}
		close(done)
	}()
	select {
	case <-done:
		return true
	case <-ctx.Done():
		return false
	}
}

func exponential(mean time.Duration) func(*rand.Rand) time.Duration {
	return func(rng *rand.Rand) time.Duration { return time.Duration(rng.ExpFloat64() * float64(mean)) }
}

// tally is what became of the requests of some time.
type tally struct {
	offered, shed, good float64
	took                []time.Duration
	byClass             [Classes]struct{ offered, good float64 }
}

func (t *tally) p50() time.Duration {
	slices.Sort(t.took)
	return t.took[len(t.took)/2]
}

const patience = time.Second // of clients

// send sends requests at a mean rate a second for some time, each to one of the controllers,
// and returns what became of them.
func (u *upstream) send(rate float64, during time.Duration, controllers []*Controller, class func(*rand.Rand) Class) *tally {
	var all tally
	var mu sync.Mutex
	var open sync.WaitGroup
	for end := time.Now().Add(during); ; {
		time.Sleep(u.draw(exponential(time.Duration(float64(time.Second) / rate))))
		if !time.Now().Before(end) {
			break
		}
		u.mu.Lock()
		c, of := controllers[u.rng.IntN(len(controllers))], Normal
		if class != nil {
			of = class(u.rng)
		}
		u.mu.Unlock()
		open.Go(func() {
			start := time.Now()
			admitted, answered := c.Admit(of, false, start), false
			if admitted {
				ctx, cancel := context.WithTimeout(context.Background(), patience)
				answered = u.answer(ctx)
				cancel()
				c.Finish(start, time.Now(), answered)
			}
			mu.Lock()
			defer mu.Unlock()
			all.offered++
			all.byClass[of].offered++
			switch {
			case !admitted:
				all.shed++
			case answered:
				all.good++
				all.byClass[of].good++
				fallthrough
			default:
				all.took = append(all.took, time.Since(start))
			}
		})
	}
	open.Wait()
	return &all
}

func controllers(n int) []*Controller {
	o := Options{Latency: 500 * time.Millisecond, Min: 4, Max: 1000}
	all := make([]*Controller, n)
	for i := range all {
		all[i] = New(o, time.Now())
	}
	return all
}

// TestOverload guards that an upstream that gets five times what it can do still does nearly
// all it can, in time, and soon after it began, whether one proxy or several stand before it.
func TestOverload(t *testing.T) {
	for _, tc := range []struct {
		name    string
		proxies int
	}{
		{"one proxy", 1},
		{"ten proxies", 10},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const workers, capacity = 10, 200
				u, all := newUpstream(workers, exponential(50*time.Millisecond)), controllers(tc.proxies)
				u.send(0.5*capacity, 30*time.Second, all, nil)
				u.send(5*capacity, 5*time.Second, all, nil)
				got := u.send(5*capacity, 60*time.Second, all, nil)
				if goodput := got.good / 60 / capacity; goodput < 0.95 {
					t.Errorf("answered in time: %.2f of what the upstream can do, want 0.95", goodput)
				}
				if p50 := got.p50(); p50 < 300*time.Millisecond || p50 > 600*time.Millisecond {
					t.Errorf("median %v, want some 500ms", p50)
				}
			})
		})
	}
}

// TestEnoughRoom guards that nothing is turned away as long as the upstream keeps up, even
// if it stands still now and then, or requests come in bursts.
func TestEnoughRoom(t *testing.T) {
	t.Run("80 % of what it can do", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			u, all := newUpstream(10, exponential(50*time.Millisecond)), controllers(1)
			if got := u.send(0.8*200, 5*time.Minute, all, nil); got.shed > 0.001*got.offered {
				t.Errorf("%v of %v turned away", got.shed, got.offered)
			}
		})
	})
	t.Run("with pauses", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			u, all := newUpstream(10, exponential(50*time.Millisecond)), controllers(1)
			go func() {
				for range 59 {
					time.Sleep(5 * time.Second)
					u.pause(300 * time.Millisecond)
				}
			}()
			got := u.send(0.8*200, 5*time.Minute, all, nil)
			if got.shed > 0.002*got.offered {
				t.Errorf("%v of %v turned away", got.shed, got.offered)
			}
		})
	})
	t.Run("few in bursts", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			u, c := newUpstream(10, exponential(50*time.Millisecond)), controllers(1)[0]
			for range 100 {
				var open sync.WaitGroup
				for range 15 {
					open.Go(func() {
						start := time.Now()
						if !c.Admit(Normal, false, start) {
							t.Error("turned away")
							return
						}
						finish(c, start, u.answer(t.Context()))
					})
				}
				open.Wait()
				time.Sleep(3 * time.Second)
			}
		})
	})
}

// TestRecovery guards that a controller follows an upstream that becomes slower, hangs, and
// comes back.
func TestRecovery(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		u, all := newUpstream(10, exponential(50*time.Millisecond)), controllers(1)
		rate := func(want float64, what string, during time.Duration, of float64) {
			t.Helper()
			if got := u.send(400, during, all, nil).good / during.Seconds(); got < want*of {
				t.Errorf("%s: %.0f a second are answered in time, want %.0f", what, got, want*of)
			}
		}
		u.send(400, 10*time.Second, all, nil)
		rate(200, "before", 20*time.Second, 0.95)
		u.remove(5)
		u.send(400, 5*time.Second, all, nil)
		rate(100, "with half of the workers", 20*time.Second, 0.95)
		u.add(5)
		u.send(400, 5*time.Second, all, nil)
		rate(200, "with all of them again", 20*time.Second, 0.95)
		u.pause(time.Minute)
		u.send(400, time.Minute, all, nil)
		if s := all[0].State(time.Now()); s.Limit != 4 || s.AtMin == 0 {
			t.Errorf("hung for a minute: %+v, want a limit of 4", s)
		}
		u.send(400, 10*time.Second, all, nil)
		rate(200, "after that", 20*time.Second, 0.9)
	})
}

// TestUseless guards that it is told, once, that an upstream is slower than the latency
// however few requests it gets, and never of one that is only overloaded.
func TestUseless(t *testing.T) {
	for _, tc := range []struct {
		name    string
		service time.Duration
		load    float64 // a second
		want    int
	}{
		{"slower by itself", 2 * time.Second, 20, 1},
		{"slower by itself, and hardly used", 2 * time.Second, 1, 0},
		{"overloaded", 50 * time.Millisecond, 1000, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				u, c := newUpstream(10, exponential(tc.service)), controllers(1)[0]
				var told atomic.Int64
				var open sync.WaitGroup
				for end := time.Now().Add(2 * time.Minute); time.Now().Before(end); {
					time.Sleep(time.Duration(float64(time.Second) / tc.load))
					open.Go(func() {
						if start := time.Now(); c.Admit(Normal, false, start) && finish(c, start, u.answer(t.Context())) {
							told.Add(1)
						}
					})
				}
				open.Wait()
				if got := told.Load(); got != int64(tc.want) {
					t.Errorf("told %d times, want %d", got, tc.want)
				}
			})
		})
	}
}

// TestFailures guards that fast failures are no answers: the limit does not grow by them, nor
// by an upstream that fails all.
func TestFailures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		u, c := newUpstream(10, exponential(50*time.Millisecond)), controllers(1)[0]
		var open sync.WaitGroup
		most := 0
		for i := range 60_000 {
			time.Sleep(time.Millisecond)
			open.Go(func() {
				start := time.Now()
				if !c.Admit(Normal, false, start) {
					return
				}
				if i%2 == 0 {
					time.Sleep(time.Millisecond)
					c.Finish(start, time.Now(), false)
					return
				}
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				finish(c, start, u.answer(ctx))
			})
			if i > 10_000 {
				most = max(most, c.State(time.Now()).Limit)
			}
		}
		open.Wait()
		if most > 210 { // 101 are right, and half of those that come are failures
			t.Errorf("limit %d, want at most 210", most)
		}
		if s := c.State(time.Now()); s.InProgress != 0 {
			t.Errorf("%d in progress, want none", s.InProgress)
		}
	})
}

// TestClasses guards that in an overload the important requests pass, and that the least
// important ones alone have nearly all the room.
func TestClasses(t *testing.T) {
	mixed := func(rng *rand.Rand) Class {
		switch x := rng.Float64(); {
		case x < 0.2:
			return High
		case x < 0.8:
			return Normal
		}
		return Low
	}
	for _, tc := range []struct {
		name  string
		load  float64
		class func(*rand.Rand) Class
		of    Class
		want  float64
	}{
		{"high at twice the load", 2, mixed, High, 0.97},
		{"high at four times the load", 4, mixed, High, 0.9},
		{"low alone", 0.9, func(*rand.Rand) Class { return Low }, Low, 0.99},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				u, all := newUpstream(10, exponential(50*time.Millisecond)), controllers(1)
				u.send(tc.load*200, 20*time.Second, all, tc.class)
				got := u.send(tc.load*200, time.Minute, all, tc.class).byClass[tc.of]
				if share := got.good / got.offered; share < tc.want {
					t.Errorf("%.3f are answered in time, want %v", share, tc.want)
				}
			})
		})
	}
}

// BenchmarkAdmitAndFinish is what a request pays.
func BenchmarkAdmitAndFinish(b *testing.B) {
	c := New(Options{Latency: time.Second, Min: 4, Max: 1000}, time.Now())
	for b.Loop() {
		now := time.Now()
		if c.Admit(Normal, false, now) {
			c.Finish(now, time.Now(), true)
		}
	}
}

// finish is Finish at the time at which it is called, and not when its arguments are.
func finish(c *Controller, admitted time.Time, answered bool) bool {
	return c.Finish(admitted, time.Now(), answered)
}

// TestSlowFailures guards that the limit goes down within seconds where all clients give up
// before they are answered: it must not wait for answers then.
func TestSlowFailures(t *testing.T) {
	now := time.Now()
	c := New(Options{Latency: 500 * time.Millisecond, Min: 4, Max: 1000}, now)
	for range initial {
		c.Admit(High, false, now)
	}
	for range initial {
		c.Finish(now, now.Add(patience), false)
	}
	if s := c.State(now.Add(longWindow)); s.Limit >= initial || s.Verdict != Slow {
		t.Errorf("%+v after two seconds, want a limit below %d", s, initial)
	}
}
