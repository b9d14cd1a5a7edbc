package limiter

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter/internal/redisscript"
)

// settled waits until the servers of the stores, whose requests have all ended, hold nothing of
// b, and checks that it has been charged that many units, and at most that many more a moment later.
func settled(t *testing.T, b Bucket, want, more int64, stores ...*Redis) {
	t.Helper()
	var l Level
	look := func() (err error) {
		for _, r := range stores {
			h := beginThere(t, r, b) // reports what is known here
			h.held.Settle(0, 0)
		}
		if l, err = stores[0].Peek(t.Context(), b); err == nil && (l.Units < want || l.Held > 0) {
			err = fmt.Errorf("%+v, want %d units", l, want)
		}
		return err
	}
	redistest.WaitFor(t, 10*time.Second, look)
	time.Sleep(2 * resendEvery)
	if _ = look(); l.Units > want+more {
		t.Errorf("%+v, want %d units", l, want)
	}
}

// TestSettledOnce guards that what requests are charged in the end is charged once, whatever
// becomes of the call that says so: it does not arrive, its answer is lost or late, and others
// are decided meanwhile, here or by the server.
func TestSettledOnce(t *testing.T) {
	t.Parallel()
	const size = 30
	limits := map[string]Limit{
		"bucket": {Size: size, DripInterval: time.Hour, DripSize: 1}, "window": FixedWindow(size, 10*time.Hour),
		"sliding": SlidingWindow(size, 10*time.Hour), "log": SlidingLog(size, 10*time.Hour),
	}
	for _, tc := range []struct {
		name  string
		fault func(t *testing.T, server *redistest.Server, p *redistest.Proxy)
		lasts time.Duration

		disorder bool // the server may run plain requests of a connection that is closed after those of the next
	}{
		{"answers are cut", func(_ *testing.T, _ *redistest.Server, p *redistest.Proxy) { p.CutReplies("evalsha") }, 50 * time.Millisecond, false},
		{"answers are late", func(_ *testing.T, _ *redistest.Server, p *redistest.Proxy) { p.Delay(700 * time.Millisecond) }, 300 * time.Millisecond, false},
		{"answers are late, but in time", func(_ *testing.T, _ *redistest.Server, p *redistest.Proxy) { p.Delay(30 * time.Millisecond) }, 50 * time.Millisecond, false},
		{"calls are lost", func(_ *testing.T, _ *redistest.Server, p *redistest.Proxy) { p.BlackHole() }, 300 * time.Millisecond, false},
		{"a short pause", func(t *testing.T, server *redistest.Server, _ *redistest.Proxy) { pauseFor(t, server, 60, "ALL") }, 0, true},
		{"a pause", func(t *testing.T, server *redistest.Server, _ *redistest.Proxy) { pauseFor(t, server, 250, "ALL") }, 0, true},
		{"a pause of writes", func(t *testing.T, server *redistest.Server, _ *redistest.Proxy) { pauseFor(t, server, 250, "WRITE") }, 0, true},
		{"the script is evicted", func(t *testing.T, server *redistest.Server, _ *redistest.Proxy) {
			redistest.Done(t, server.Client().ScriptFlush(t.Context()))
		}, 0, false},
		{"connections are killed", func(t *testing.T, server *redistest.Server, _ *redistest.Proxy) {
			redistest.Done(t, server.Client().Do(t.Context(), "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"))
		}, 0, false},
	} {
		for name, limit := range limits {
			for _, of := range []struct{ end, stay, others int }{{1, 0, 0}, {1, 0, 2}, {1, 1, 0}, {3, 0, 0}, {3, 1, 0}, {3, 0, 2}, {3, 1, 2}} {
				if name != "bucket" && of.others == 0 {
					continue
				}
				t.Run(fmt.Sprintf("%s, %s, %+v", tc.name, name, of), func(t *testing.T) {
					t.Parallel()
					server := redistest.Start(t)
					p := redistest.StartProxy(t, server.Addr)
					r := newRedis(RedisOptions{Addresses: []string{p.Addr}, Timeout: 100 * time.Millisecond, Fallback: NewMemory(), KeyPrefix: "rl:"}, takeScript)
					t.Cleanup(func() { _ = r.Close() })
					b := Bucket{Name: "b", Key: "k", Limit: limit, Cost: 1}
					var running []inProgress
					for range of.end + of.stay {
						running = append(running, beginThere(t, r, b))
					}
					tc.fault(t, server, p)
					for _, h := range running[of.stay:] {
						h.held.Settle(0, 1)
					}
					want := int64(of.end)
					for range of.others { // one that holds its cost, and one that is charged at once
						d, h := begin(t, r, b)
						h.held.Settle(0, 1)
						plain := mustTake(t, r, Request{Buckets: []Bucket{b}})[0]
						if want += 2; d.Denied || plain.Denied {
							t.Errorf("denied: %+v, %+v", d, plain)
						}
					}
					time.Sleep(tc.lasts)
					p.Pass()
					for _, h := range running[:of.stay] {
						time.Sleep(3 * resendEvery)
						h.held.Settle(0, 0)
					}
					twice := int64(0)
					if tc.disorder {
						twice = int64(of.others)
					}
					settled(t, b, want, twice, r)
				})
			}
		}
	}
}

// pauseFor has a server wait for that many milliseconds before it goes on with commands.
func pauseFor(t *testing.T, server *redistest.Server, ms int, what string) {
	t.Helper()
	redistest.Done(t, server.Client().Do(t.Context(), "CLIENT", "PAUSE", ms, what))
}

// TestSettledWithOtherNodes guards that what a node could not tell for a while is added to
// what others were charged meanwhile, and is not taken for the same units.
func TestSettledWithOtherNodes(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	p := redistest.StartProxy(t, server.Addr)
	node := func(addr string) *Redis {
		r := newRedis(RedisOptions{Addresses: []string{addr}, Timeout: 200 * time.Millisecond, Fallback: NewMemory(), KeyPrefix: "rl:"}, takeScript)
		t.Cleanup(func() { _ = r.Close() })
		return r
	}
	cut, other, b := node(p.Addr), node(server.Addr), hourly(100)
	var running []inProgress
	for range 3 {
		running = append(running, beginThere(t, cut, b))
	}
	p.BlackHole()
	for _, h := range running {
		h.held.Settle(0, 1)
	}
	for range 5 {
		h := beginThere(t, other, b)
		h.held.Settle(0, 1)
	}
	p.Pass() // before the server would count as down
	p.CloseAll()
	settled(t, b, 8, 0, other, cut)
}

// TestSettledOnceThroughMoves guards requests whose buckets move to other stores while they are
// in progress, or while what they were charged is on its way: the last store has it once.
func TestSettledOnceThroughMoves(t *testing.T) {
	t.Parallel()
	type stores struct {
		open func(location string) (*Redis, *redistest.Proxy)
		call func(r *Redis) *Held // that counts nothing, unless it is settled otherwise
	}
	for _, tc := range []struct {
		name string
		want int64
		run  func(s stores) (last *Redis)
	}{
		{"and back, while the charge is on its way", 1, func(s stores) *Redis {
			a, _ := s.open("a:")
			c, slow := s.open("c:")
			h := s.call(a)
			s.call(c).Settle(0, 0)
			time.Sleep(resendEvery)
			slow.Delay(400 * time.Millisecond)
			h.Settle(0, 1)
			time.Sleep(resendEvery / 2)
			a2, _ := s.open("a:")
			s.call(a2).Settle(0, 0)
			return a2
		}},
		{"and back, while the charge of the place between is on its way", 1, func(s stores) *Redis {
			a, _ := s.open("a:")
			c, slow := s.open("c:")
			s.call(a).Settle(0, 0)
			h := s.call(c)
			slow.Delay(400 * time.Millisecond)
			h.Settle(0, 1)
			time.Sleep(resendEvery / 2)
			a2, _ := s.open("a:")
			s.call(a2).Settle(0, 0)
			c2, _ := s.open("c:")
			s.call(c2).Settle(0, 0)
			return c2
		}},
		{"and back, while the charge is lost on its way", 1, func(s stores) *Redis {
			a, cut := s.open("a:")
			h := s.call(a)
			cut.BlackHole()
			h.Settle(0, 1)
			time.Sleep(resendEvery / 2)
			for _, location := range []string{"c:", "a:"} {
				r, _ := s.open(location)
				s.call(r).Settle(0, 0)
				a = r
			}
			cut.Pass()
			cut.CloseAll()
			time.Sleep(3 * resendEvery)
			return a
		}},
		{"to the same place, and the old store is closed", 1, func(s stores) *Redis {
			a, _ := s.open("a:")
			h := s.call(a)
			a2, _ := s.open("a:")
			s.call(a2).Settle(0, 0)
			_ = a.Close()
			s.call(a2).Settle(0, 0)
			h.Settle(0, 1)
			return a2
		}},
		{"to the same place, and it does not count", 0, func(s stores) *Redis {
			a, _ := s.open("a:")
			h := s.call(a)
			a2, _ := s.open("a:")
			_ = a.Close()
			h.Settle(0, 0)
			return a2
		}},
		{"to another place, and the old store is closed", 1, func(s stores) *Redis {
			a, _ := s.open("a:")
			h := s.call(a)
			c, _ := s.open("c:")
			_ = a.Close()
			h.Settle(0, 1)
			return c
		}},
		{"to another place, and costs more in the end", 5, func(s stores) *Redis {
			a, _ := s.open("a:")
			h := s.call(a)
			c, _ := s.open("c:")
			s.call(c).Settle(0, 2)
			h.Settle(0, 3)
			return c
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			m, server, b := NewMemory(), redistest.Start(t), hourly(100)
			last := tc.run(stores{
				func(location string) (*Redis, *redistest.Proxy) {
					p := redistest.StartProxy(t, server.Addr)
					r := newRedis(RedisOptions{Addresses: []string{p.Addr}, Timeout: 2 * time.Second, Fallback: m, KeyPrefix: location}, takeScript)
					r.location, r.fallback.location = location, location // however it is reached
					t.Cleanup(func() { _ = r.Close() })
					r.Connect(t.Context())
					return r, p
				},
				func(r *Redis) *Held {
					_, h := begin(t, r, b)
					return h.held
				},
			})
			settled(t, b, tc.want, 0, last)
		})
	}
}

// withStuckClient returns a store with a Memory whose calls wait in the client, and whose reports
// the test sends.
func withStuckClient(m *Memory) (*Redis, *stuckClient) {
	client := new(stuckClient)
	r := newRedisWithoutClient(RedisOptions{KeyPrefix: "rl:", Timeout: time.Second, Fallback: m})
	r.client, r.reports.running = client, true
	return r, client
}

// answerWith answers q, about b, by a level of that many units.
func answerWith(t *testing.T, r *Redis, q *query, b Bucket, units int64) {
	t.Helper()
	l := b.Limit.of().Complete()
	s := l.Add(bucket.Level{}, units, bucket.Moment{})
	q.Reply = make([]int64, q.replies()) // nothing is held
	q.Reply[0], q.Reply[1] = s.Clear, s.Rest
	outcomes, _, err := q.outcomes(nil)
	if err != nil {
		t.Fatal(err)
	}
	r.answered(q, outcomes)
}

// TestChargeWhileAnswerIsFollowed guards a Memory that charges as a Store of its own, as for a
// request of the configuration before, while an answer to another store arrives: both charges
// count, in whatever order they get the lock.
func TestChargeWhileAnswerIsFollowed(t *testing.T) {
	for _, dirty := range []bool{false, true} {
		for _, answerFirst := range []bool{false, true} {
			t.Run(fmt.Sprintf("dirty %t, answer first %t", dirty, answerFirst), func(t *testing.T) {
				m := NewMemory()
				r, client := withStuckClient(m)
				b, one := hourly(100), hourly(100)
				b.Cost = 0
				for range 5 {
					if _, err := m.Take(context.Background(), Request{Buckets: []Bucket{one}}, nil); err != nil {
						t.Fatal(err)
					}
				}
				look := func() *query {
					q := r.query(Request{Buckets: []Bucket{b}}, byte(AccountingAtomic))
					r.sending(nil, callsOf(q))
					return q
				}
				if !dirty { // the server knows all
					answerWith(t, r, look(), b, 5)
				}
				q, want, says := (*query)(nil), int64(6), int64(5)
				if dirty {
					r.chargeLater(b, 1)
					q = client.waiting[0].Owner.(*query)
					r.sending(nil, callsOf(q))
					want, says = 7, 6
				} else {
					q = look()
				}
				p := m.location(&b)
				m.lock(&p) // as another request has it for a moment
				steps := []func(){func() { m.chargeLater(b, 1) }, func() { answerWith(t, r, q, b, says) }}
				if answerFirst {
					steps[0], steps[1] = steps[1], steps[0]
				}
				done := make(chan struct{})
				for _, step := range steps {
					go func() { step(); done <- struct{}{} }()
					time.Sleep(10 * time.Millisecond) // it waits for the lock, in this order as a rule
				}
				p.table.mu.Unlock()
				for range steps {
					<-done
				}
				if l, err := m.Peek(context.Background(), b); err != nil || l.Units != want {
					t.Errorf("%+v, %v, want %d units", l, err, want)
				}
			})
		}
	}
}

// TestRestartHoldsNoTable guards that what follows from a broken connection takes no longer
// with more buckets: all are marked, and none is looked at.
func TestRestartHoldsNoTable(t *testing.T) {
	m, b := NewMemory(), hourly(100)
	f := newFallback(m, 0, "")
	f.send(nil, []*redisscript.Call{})
	follow(m, &b, bucket.Ahead{Clear: time.Hour.Microseconds()})
	p := m.location(&b)
	m.lock(&p)
	f.restarted(nil) // would wait for ever
	p.table.mu.Unlock()
	if reported := dirtyLevels(m, []Bucket{b}); len(reported) != 1 || reported[0].dirty != own {
		t.Errorf("%+v is reported", reported)
	}
}

// TestLapseWhileAsleep guards requests that go on after their machine has slept for longer than
// what they hold stays: they were charged for that, and are charged what they cost beyond it.
func TestLapseWhileAsleep(t *testing.T) {
	t.Parallel()
	for _, charge := range []int64{0, 1, 3} {
		v := newClockedRedis(t, redistest.Start(t), "rl:")
		v.fallback = newFallback(NewMemory(), 50*time.Millisecond, "")
		awake, c, began := time.Duration(0), new(clock), v.now
		v.clock = func() time.Duration { return c.show(awake, time.Duration(v.now-began)*time.Microsecond) }
		b := hourly(100)
		var running []inProgress
		const requests = 10
		for range requests {
			running = append(running, beginThere(t, v.Redis, b))
		}
		v.advance(t, 4*lapse)
		awake = renewEvery + time.Second
		v.ledger.tick()
		heldNow(t, v, b) // it has been answered
		for _, h := range running {
			h.held.Settle(0, charge)
		}
		redistest.WaitFor(t, 5*time.Second, func() error {
			v.ledger.tick()
			if l := peek(t, v.Redis, b); l.Held != 0 {
				return fmt.Errorf("%+v", l)
			}
			return nil
		})
		if l, want := peek(t, v.Redis, b), requests*max(charge, 1); l.Units != want {
			t.Errorf("%+v, want %d units", l, want)
		}
	}
}

// TestClockGoesOnAsleep guards a clock that never goes back, goes on while the monotonic one
// stands, and ignores small corrections of the time of day.
func TestClockGoesOnAsleep(t *testing.T) {
	c, last := new(clock), time.Duration(0)
	for _, tc := range []struct{ monotonic, wall, want time.Duration }{
		{time.Second, time.Second, time.Second},
		{2 * time.Second, 2*time.Second + 900*time.Millisecond, 2 * time.Second},
		{3 * time.Second, time.Minute, time.Minute},
		{4 * time.Second, time.Second, time.Minute + time.Second}, // set back
		{5 * time.Second, time.Hour, time.Hour},
		{6 * time.Second, 6 * time.Second, time.Hour + time.Second},
	} {
		if got := c.show(tc.monotonic, tc.wall); got != tc.want || got < last {
			t.Errorf("%v, and %v of the day: %v, want %v", tc.monotonic, tc.wall, got, tc.want)
		} else {
			last = got
		}
	}
}

// TestHugeCharges guards that the sum of charges that are far above the size of a bucket
// leaves a bucket that is full, with a debt of its size, and not one that the script can't read.
func TestHugeCharges(t *testing.T) {
	for _, size := range []int64{100, MaxUnits / 2} {
		t.Run(strconv.FormatInt(size, 10), func(t *testing.T) {
			r := newTestRedis(t, redistest.Start(t), func(opt *RedisOptions) { opt.Fallback = NewMemory() })
			b := Bucket{Name: "b", Key: "k", Limit: Limit{Size: size, DripInterval: time.Second, DripSize: max(size/3600, 1)}, Cost: 1}
			var running []inProgress
			for range 40 {
				running = append(running, beginThere(t, r, b))
			}
			for _, h := range running[1:] {
				h.held.Settle(0, math.MaxInt64)
			}
			redistest.WaitFor(t, 5*time.Second, func() error {
				if l, err := r.Peek(t.Context(), b); err != nil || l.Units < size {
					return fmt.Errorf("%d of %d units, error %v", l.Units, size, err)
				}
				return nil
			})
			if d, _ := begin(t, r, b); !d.Denied {
				t.Errorf("admitted: %+v", d)
			}
			running[0].held.Settle(0, 0)
		})
	}
}

// TestHugeCostsOfDenied guards that a request of a cost that no bucket holds, which is denied
// while a renewal counts what it requests, leaves totals that go on counting.
func TestHugeCostsOfDenied(t *testing.T) {
	r, _ := withStuckClient(NewMemory())
	b := hourly(3)
	b.Hold, b.Cost = true, math.MaxInt64
	req := r.reserve(Request{Buckets: []Bucket{b}, Held: new(Held)}, new(scratch))
	r.sending(nil, callsOf(r.query(req, byte(AccountingAtomic))))
	k := req.Held.reservations[0]
	r.ledger.lock()
	k.account.renew()
	r.ledger.unlock()
	r.ledger.refused(k)
	if got := k.account.totals; got.ended > 3 {
		t.Errorf("%+v, want no more than the bucket holds", got)
	}
}
