package limiter

import (
	"context"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// TestAddressSwitchesBetweenServers guards that one process admits nothing extra
// when its address sometimes belongs to one server and sometimes to another,
// neither of which knows of requests to the other: a DNS name or load balancer
// that points elsewhere for a while, or two masters after a split.
func TestAddressSwitchesBetweenServers(t *testing.T) {
	const size, first, second = 10, 4, 3
	for name, connections := range map[string]int{
		"the first has made fewer connections": 0,
		"the first has made more connections":  20,
	} {
		t.Run(name, func(t *testing.T) {
			a, b := redistest.Start(t), redistest.Start(t)
			proxy := redistest.StartProxy(t, a.Addr)
			// For both, so that not even a missing script distinguishes them.
			for _, s := range []*redistest.Server{a, b} {
				other := hourly(size)
				other.Key = "other"
				decide(t, newTestRedis(t, s, nil), AccountingAtomic, other)
			}
			for range connections {
				redistest.Done(t, a.Client().Conn().Ping(t.Context()))
			}
			r := newTestRedis(t, a, func(opt *RedisOptions) {
				opt.Addresses = []string{proxy.Addr}
				opt.Fallback = NewMemory()
			})
			admitted := 0
			call := func(requests int) {
				for range requests {
					d, err := r.Take(context.Background(), Request{Buckets: []Bucket{hourly(size)}}, nil)
					if err != nil {
						t.Fatal(err)
					}
					if !d[0].Denied {
						admitted++
					}
				}
			}
			to := func(s *redistest.Server) {
				proxy.Retarget(s.Addr)
				for range 20 { // connections that are just being made, too
					proxy.CloseAll()
					time.Sleep(time.Millisecond)
				}
			}
			call(first)
			to(b)
			call(second)
			to(a)
			call(2 * size)
			if admitted != size {
				t.Errorf("admitted %d, want %d", admitted, size)
			}
		})
	}
}

// TestStoppedClock guards that a process whose clock stood still for a while, such
// as on a suspended machine, admits nothing extra, and that after an answer from
// Redis its levels are Redis's again, not those from before.
func TestStoppedClock(t *testing.T) {
	server := redistest.Start(t)
	r := newTestRedis(t, server, func(opt *RedisOptions) {
		opt.Fallback, opt.Timeout = NewMemoryWithClock(frozen), 500*time.Millisecond
	})
	b := Bucket{Name: "b", Key: "k", Limit: Limit{Size: 10, DripInterval: 100 * time.Millisecond, DripSize: 1}, Cost: 1}
	call := func(requests int) (admitted int) {
		for range requests {
			if !decide(t, r, AccountingAtomic, b)[0].Denied {
				admitted++
			}
		}
		return admitted
	}
	if got := call(10); got != 10 {
		t.Fatalf("admitted %d, want 10", got)
	}
	time.Sleep(1100 * time.Millisecond) // Redis's clock goes on, and the bucket is empty
	d := decide(t, r, AccountingAtomic, b)[0]
	if d.Denied || d.Remaining != 9 {
		t.Errorf("after the stop: denied %v, remaining %d, want 9", d.Denied, d.Remaining)
	}
	server.Kill()
	if got := call(20); got != 9 {
		t.Errorf("admitted %d by the process, want 9", got)
	}
}
