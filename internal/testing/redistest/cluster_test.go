package redistest

import (
	"context"
	"fmt"
	"testing"

	"github.com/redis/go-redis/v9"
)

// TestCluster guards that each node has its share of the slots, what clients see
// during a migration, that all nodes agree on the slot's owner afterwards, and
// that a restarted node has the same role.
func TestCluster(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	c := StartCluster(t, 3)
	for slot, n := range map[int]int{0: 0, 5460: 0, 5461: 1, 10921: 1, 10922: 2, 16383: 2} {
		if c.Owner(t, slot) != c.Nodes[n] {
			t.Errorf("slot %d is not at node %d", slot, n)
		}
	}

	slot := c.Slot(t, "{k}")
	from := c.Owner(t, slot)
	to := c.Nodes[0]
	if to == from {
		to = c.Nodes[1]
	}
	get := func(s *Server, key, want string) {
		t.Helper()
		got, err := s.Client().Get(ctx, key).Result()
		if err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("%s: got %q, want %q", key, got, want)
		}
	}
	for _, key := range []string{"{k}1", "{k}2"} {
		if err := from.Client().Set(ctx, key, "v", 0).Err(); err != nil {
			t.Fatal(err)
		}
	}
	redirect := fmt.Sprintf("ASK %d %s", slot, to.Addr)

	c.BeginMove(t, slot, to)
	get(from, "{k}1", "v")
	get(from, "{k}none", redirect)
	get(to, "{k}1", fmt.Sprintf("MOVED %d %s", slot, from.Addr))

	c.MoveKeys(t, slot, to, "{k}1")
	get(from, "{k}1", redirect)
	get(from, "{k}2", "v")

	c.MoveKeys(t, slot, to)
	get(from, "{k}2", redirect)

	c.EndMove(t, slot, to)
	get(from, "{k}2", fmt.Sprintf("MOVED %d %s", slot, to.Addr))
	get(to, "{k}2", "v")
	if c.Owner(t, slot) != to {
		t.Error("the slot is not where it was moved to")
	}

	to.Kill()
	if c.Owner(t, slot) != to {
		t.Error("the slots of a node that is down have gone elsewhere")
	}
	to.Restart(t)
	c.WaitOK(t)
	if c.Owner(t, slot) != to {
		t.Error("the slots of a node that was restarted have gone elsewhere")
	}
	get(to, "{k}2", "redis: nil")
}

// TestClusterRemove guards that a node leaves, or is replaced by its replica,
// without data loss, and that the others no longer know it.
func TestClusterRemove(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	c := StartCluster(t, 3)
	slot := c.Slot(t, "{k}")
	gone := c.Owner(t, slot)
	if err := gone.Client().Set(ctx, "{k}", "v", 0).Err(); err != nil {
		t.Fatal(err)
	}
	c.Remove(t, gone)
	if len(c.Nodes) != 2 {
		t.Errorf("got %d nodes, want 2", len(c.Nodes))
	}
	if got := c.Owner(t, slot).Client().Get(ctx, "{k}").Val(); got != "v" {
		t.Errorf("got %q, want %q", got, "v")
	}
	gone = c.Owner(t, slot)
	c.Replace(t, gone)
	if owner := c.Owner(t, slot); owner == gone || len(c.Nodes) != 2 {
		t.Errorf("got %d nodes and slot %d at %s, which was replaced", len(c.Nodes), slot, owner.Addr)
	} else if got := owner.Client().Get(ctx, "{k}").Val(); got != "v" {
		t.Errorf("got %q of the replica, want %q", got, "v")
	}
	gone = c.Nodes[0]
	gone.Kill()
	c.Remove(t, gone)
	if owner := c.Owner(t, slot); len(c.Nodes) != 1 || owner != c.Nodes[0] {
		t.Errorf("got %d nodes and slot %d at %s, want all at one", len(c.Nodes), slot, owner.Addr)
	}
}

// TestClusterVariants guards that a cluster with a password and one with TLS
// form, serve clients and move slots, and that args are passed on.
func TestClusterVariants(t *testing.T) {
	t.Parallel()
	a := NewAuthority(t)
	cert, key := a.Issue(t, "client")
	for _, tc := range []struct {
		name    string
		start   func(t *testing.T, args ...string) *Cluster
		options redis.ClusterOptions
	}{
		{"password", func(t *testing.T, args ...string) *Cluster {
			return StartCluster(t, 3, append(args, "--requirepass", "s3cret")...)
		}, redis.ClusterOptions{Password: "s3cret"}},
		{"tls", func(t *testing.T, args ...string) *Cluster {
			return StartClusterTLS(t, a, true, 3, args...)
		}, redis.ClusterOptions{TLSConfig: tlsConfig(t, a.Pool(), cert, key)}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			ctx := context.Background()
			c := tc.start(t, "--cluster-require-full-coverage", "no")
			got, err := c.Nodes[2].Client().ConfigGet(ctx, "cluster-require-full-coverage").Result()
			if err != nil || got["cluster-require-full-coverage"] != "no" {
				t.Errorf("got %v, %v", got, err)
			}

			options := tc.options
			options.Addrs = c.Addrs()
			client := redis.NewClusterClient(&options)
			t.Cleanup(func() { client.Close() })
			slot, keys := c.Slot(t, "{k}"), make([]string, 25) // several batches
			for n := range keys {
				keys[n] = fmt.Sprint("{k}", n)
				if err := client.Set(ctx, keys[n], "v", 0).Err(); err != nil {
					t.Fatal(err)
				}
			}
			for _, node := range c.Nodes {
				if node != c.Owner(t, slot) {
					c.MoveSlot(t, slot, node)
				}
			}
			if n, err := client.Exists(ctx, keys...).Result(); n != 25 || err != nil {
				t.Errorf("%d keys are there, %v", n, err)
			}
		})
	}
}

// TestForgottenNodesMeetAgain guards that nodes come to know each other when one of two
// has given up the first handshake: it forgets the other one, which still knows it.
func TestForgottenNodesMeetAgain(t *testing.T) {
	t.Parallel()
	c := StartCluster(t, 2)
	do(t, c.Nodes[0], "cluster", "forget", c.ids[c.Nodes[1]])
	if _, err := c.view(c.Nodes[0]); err == nil {
		t.Fatal("nothing was forgotten: the test proves nothing")
	}
	c.introduce(t, c.Nodes)
	c.WaitOK(t)
}
