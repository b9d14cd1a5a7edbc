package limiter

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// startPair starts a server and a replica that follows it.
func startPair(t *testing.T) (master, replica *redistest.Server) {
	t.Helper()
	master, replica = redistest.Start(t, "--repl-diskless-sync-delay", "0"), redistest.Start(t)
	host, port, _ := strings.Cut(master.Addr, ":")
	redistest.Done(t, replica.Client().Do(t.Context(), "replicaof", host, port))
	redistest.WaitFor(t, 20*time.Second, func() error {
		if info := replica.Client().Info(t.Context(), "replication").Val(); !strings.Contains(info, "master_link_status:up") {
			return fmt.Errorf("not up: %q", info)
		}
		return nil
	})
	return master, replica
}

// promote has a replica follow no other any more.
func promote(t *testing.T, replica *redistest.Server) {
	t.Helper()
	redistest.Done(t, replica.Client().Do(t.Context(), "replicaof", "no", "one"))
}

// TestSettledOnceAfterFailover guards what has been settled in a server whose replica, which takes
// over, lacks that: it holds nothing a moment later, and charges it once.
func TestSettledOnceAfterFailover(t *testing.T) {
	t.Parallel()
	for _, charge := range []int64{0, 13} {
		t.Run(fmt.Sprint("charged ", charge), func(t *testing.T) {
			t.Parallel()
			master, replica := startPair(t)
			p := redistest.StartProxy(t, master.Addr)
			r := newRedis(RedisOptions{Addresses: []string{p.Addr}, Timeout: time.Second, Fallback: NewMemory(), KeyPrefix: "rl:"}, takeScript)
			t.Cleanup(func() { _ = r.Close() })
			b := hourly(1000)
			b.Cost = 5
			h := beginThere(t, r, b)
			if n, err := master.Client().Wait(t.Context(), 1, 10*time.Second).Result(); n != 1 || err != nil {
				t.Fatal(n, err)
			}
			promote(t, replica) // which loses what follows
			h.held.Settle(0, charge)
			redistest.WaitFor(t, 10*time.Second, func() error { // until nothing is left of it here
				r.ledger.lock()
				defer r.ledger.unlock()
				if n := len(r.ledger.all); n > 0 {
					return fmt.Errorf("%d accounts", n)
				}
				return nil
			})
			p.Retarget(replica.Addr)
			p.CloseAll()
			b.Cost = 1
			settled(t, b, charge, 0, r)
		})
	}
}

// TestSettledOnceWhileRepliesAreLate guards requests of which the answers come just in time or too
// late, and that end as their connection breaks, or as a replica takes over: each is charged once.
func TestSettledOnceWhileRepliesAreLate(t *testing.T) {
	t.Parallel()
	rounds := 30
	if testing.Short() {
		rounds = 3
	}
	for round := range rounds {
		for _, failover := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d, failover %t", round, failover), func(t *testing.T) {
				t.Parallel()
				master, replica := startPair(t)
				p := redistest.StartProxy(t, master.Addr)
				r := newRedis(RedisOptions{Addresses: []string{p.Addr}, Timeout: 50 * time.Millisecond, Fallback: NewMemory(), KeyPrefix: "rl:"}, takeScript)
				t.Cleanup(func() { _ = r.Close() })
				buckets := make([]Bucket, 3)
				for i := range buckets {
					buckets[i] = hourly(1000)
					buckets[i].Key = fmt.Sprint(i)
				}
				beginThere(t, r, buckets[0]).held.Settle(0, 0)
				p.Delay(30*time.Millisecond, 40*time.Millisecond)
				all := func(lasts time.Duration, charge int64) *sync.WaitGroup {
					var running sync.WaitGroup
					for _, b := range buckets {
						running.Go(func() {
							b.Cost = 5
							_, h := begin(t, r, b)
							time.Sleep(lasts)
							h.held.Settle(0, charge)
						})
					}
					return &running
				}
				all(80*time.Millisecond, 13).Wait()
				time.Sleep(10*time.Millisecond + rand.N(20*time.Millisecond))
				if failover {
					promote(t, replica)
					p.Retarget(replica.Addr)
				}
				p.CloseAll()
				time.Sleep(15 * time.Millisecond)
				all(120*time.Millisecond, 8).Wait()
				p.Pass()
				for _, b := range buckets {
					settled(t, b, 21, 0, r)
				}
			})
		}
	}
}
