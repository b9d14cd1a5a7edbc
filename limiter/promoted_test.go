package limiter

import (
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// promotedSize is the size of the buckets whose server changes its role, and
// promotedKeys is how many there are.
const promotedSize, promotedKeys = 10, 40

// promoted is one process with some buckets whose server changes its role.
type promoted struct {
	*Redis
	buckets  []Bucket
	admitted []int
}

// newPromoted returns a process with buckets of the given keys.
func newPromoted(r *Redis, keys func(Bucket) bool) *promoted {
	p := &promoted{Redis: r, admitted: make([]int, promotedKeys)}
	for n := 0; len(p.buckets) < promotedKeys; n++ {
		b := hourly(promotedSize)
		b.Key = fmt.Sprint(n)
		if keys(b) {
			p.buckets = append(p.buckets, b)
		}
	}
	return p
}

// call queries all buckets at once, that many times.
func (p *promoted) call(t *testing.T, requests int) {
	t.Helper()
	redistest.Together(t, promotedKeys, func(i int) {
		for range requests {
			if !decide(t, p.Redis, AccountingAtomic, p.buckets[i])[0].Denied {
				p.admitted[i]++
			}
		}
	})
}

// other decides a request about a bucket that is none of them, and returns who has.
func (p *promoted) other(t *testing.T) Decider {
	t.Helper()
	b := p.buckets[0]
	b.Name, b.Limit.Size = "other", 10_000
	return mustTake(t, p.Redis, Request{Buckets: []Bucket{b}})[0].By
}

// decides waits until a server decides requests.
func (p *promoted) decides(t *testing.T, server *redistest.Server) {
	t.Helper()
	redistest.WaitFor(t, 20*time.Second, func() error {
		before := server.CommandStat(t, "evalsha")
		by := p.other(t)
		if after := server.CommandStat(t, "evalsha"); by != DecidedByRedis || after == before {
			return fmt.Errorf("decided by %v, and %d calls", by, after-before)
		}
		return nil
	})
}

// check checks that each bucket has admitted what it holds.
func (p *promoted) check(t *testing.T) {
	t.Helper()
	for i, n := range p.admitted {
		if n != promotedSize {
			t.Errorf("key %s: admitted %d, want %d", p.buckets[i].Key, n, promotedSize)
		}
	}
}

// cutOff stops a replica, and ends its connection to its master: what that one still
// sends could be read later.
func cutOff(t *testing.T, replica, master *redistest.Server) {
	t.Helper()
	replica.Pause(t)
	redistest.Done(t, master.Client().ClientKillByFilter(t.Context(), "TYPE", "replica"))
}

// TestClusterMasterAgain guards that one process admits nothing extra when a master
// loses its role to a replica and gets it back without what the replica was charged
// meanwhile. The process has connections to it from before, which are open all the
// time.
func TestClusterMasterAgain(t *testing.T) {
	if testing.Short() {
		t.Skip(longTest)
	}
	t.Parallel()
	nodes := redistest.StartCluster(t, 3)
	master := nodes.Nodes[0]
	replica := nodes.AddReplica(t, master)
	r := newTestCluster(t, nodes, func(opt *RedisOptions) { opt.Fallback = NewMemory() })
	p := newPromoted(r, func(b Bucket) bool { return nodes.Owner(t, nodes.Slot(t, r.keys.of(&b))) == master })
	p.decides(t, master)
	p.call(t, 4)
	nodes.FailOver(t, replica)
	p.decides(t, replica)
	cutOff(t, master, replica)
	p.call(t, 3)
	replica.Kill()
	master.Resume(t)
	nodes.TakeOver(t, master)
	p.decides(t, master)
	p.call(t, 2*promotedSize)
	p.check(t)
}

// TestSentinelMasterAgain guards the same with sentinels.
func TestSentinelMasterAgain(t *testing.T) {
	if testing.Short() {
		t.Skip(longTest)
	}
	t.Parallel()
	sentinel := redistest.StartSentinel(t)
	r := newTestRedis(t, sentinel.Master, func(opt *RedisOptions) {
		opt.Addresses, opt.MasterName = sentinel.SentinelAddrs(), redistest.MasterName
		opt.Fallback, opt.Timeout = NewMemory(), time.Second
	})
	p := newPromoted(r, func(Bucket) bool { return true })
	p.decides(t, sentinel.Master)
	p.call(t, 4)
	sentinel.Failover(t)
	p.decides(t, sentinel.Replica)
	cutOff(t, sentinel.Master, sentinel.Replica)
	p.call(t, 3)
	sentinel.Replica.Kill()
	sentinel.Master.Resume(t)
	sentinel.WaitMasterNot(t, sentinel.Replica.Addr)
	p.decides(t, sentinel.Master)
	p.call(t, 2*promotedSize)
	p.check(t)
}

// TestAddressFollowsMaster guards that one process admits nothing extra when its
// address leads to another master without a connection being closed, first to one that
// lacks the last charges, and then back to the one from before, which lacks those that
// followed: a name or a load balancer that a managed Redis moves.
func TestAddressFollowsMaster(t *testing.T) {
	t.Parallel()
	for _, connections := range []int{0, 50} {
		t.Run(fmt.Sprintf("%d connections made before", connections), func(t *testing.T) {
			first, second := redistest.Start(t, "--repl-diskless-sync-delay", "0"), redistest.Start(t, "--repl-diskless-sync-delay", "0")
			role := func(s *redistest.Server, master string) {
				t.Helper()
				host, port, found := strings.Cut(master, ":")
				if !found {
					host, port = "no", "one"
				}
				redistest.Done(t, s.Client().Do(t.Context(), "replicaof", host, port))
				if !found {
					return
				}
				redistest.WaitFor(t, 20*time.Second, func() error {
					if info := s.Client().Info(t.Context(), "replication").Val(); !strings.Contains(info, "master_link_status:up") {
						return fmt.Errorf("not up: %q", info)
					}
					return nil
				})
			}
			role(second, first.Addr)
			proxy := redistest.StartProxy(t, first.Addr)
			r := newTestRedis(t, first, func(opt *RedisOptions) {
				opt.Addresses, opt.Fallback = []string{proxy.Addr}, NewMemory()
			})
			for range connections { // IDs of connections do not tell that it is another server
				conn, err := net.Dial("tcp", second.Addr)
				if err != nil {
					t.Fatal(err)
				}
				_ = conn.Close()
			}
			p := newPromoted(r, func(Bucket) bool { return true })
			p.call(t, 2)
			role(second, "no one") // which loses what follows
			p.call(t, 2)
			proxy.Retarget(second.Addr)
			role(first, second.Addr)
			p.other(t) // which alone meets the replica
			p.call(t, 1)
			role(first, "no one") // which loses what follows
			p.call(t, 2)
			proxy.Retarget(first.Addr)
			role(second, first.Addr)
			p.other(t)
			p.call(t, 2*promotedSize)
			p.check(t)
		})
	}
}
