package redistest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	slots = 16384

	// stableWithin is how long servers may take until they agree. By default they
	// wait for seconds, and a busy host slows them down.
	stableWithin = 90 * time.Second
)

// Cluster is a Redis Cluster of masters without replicas, each with its share of
// the slots, in the order of Nodes. A node that is restarted is empty, but still
// the same node with the same slots.
type Cluster struct {
	Nodes []*Server

	ids      map[*Server]string
	buses    map[*Server]string // the port at which nodes talk to each other
	replicas int                // how many nodes there are besides Nodes
	password string
	start    func(testing.TB) *Server // starts another node, which knows no others
}

// StartCluster runs a cluster until the test ends, and returns when all nodes
// report that it is ready. args are passed to each node. They override the
// defaults, for instance "--cluster-node-timeout", "500" instead of 1000.
func StartCluster(t testing.TB, masters int, args ...string) *Cluster {
	t.Helper()
	return startCluster(t, masters, nil, args)
}

// StartClusterTLS runs a cluster as StartCluster does, with nodes that accept only
// TLS and use it among themselves as well. See StartTLS for their certificates.
func StartClusterTLS(
	t testing.TB, a *Authority, clientCerts bool, masters int, args ...string,
) *Cluster {
	t.Helper()
	return startCluster(t, masters, append(tlsOptions(t, a, clientCerts), "--tls-cluster", "yes"), args)
}

// startCluster runs a cluster, with TLS if there are options for that.
func startCluster(t testing.TB, masters int, tls, args []string) *Cluster {
	t.Helper()
	port := "--port"
	if tls != nil {
		port = "--tls-port"
	}
	c := &Cluster{ids: make(map[*Server]string), buses: make(map[*Server]string), password: redisPassword(args)}
	c.start = func(t testing.TB) *Server {
		t.Helper()
		var bus string
		node := start(t, "", c.password, func(_, own string) []string {
			bus = freePort(t)
			// A master that gives its last slot away must stay a master.
			options := []string{
				port, own, "--cluster-enabled", "yes", "--cluster-port", bus,
				"--cluster-config-file", "nodes.conf", "--cluster-announce-ip", "127.0.0.1",
				"--cluster-node-timeout", "1000", "--cluster-allow-replica-migration", "no",
				"--masterauth", c.password, "--repl-diskless-sync-delay", "0",
			}
			return slices.Concat(options, tls, args)
		})
		id, err := node.client.ClusterMyID(context.Background()).Result()
		if err != nil {
			t.Fatal(err)
		}
		c.ids[node], c.buses[node] = id, bus
		return node
	}
	for n := range masters {
		node := c.start(t)
		// Otherwise all have the same epoch, and take time to sort that out.
		do(t, node, "cluster", "set-config-epoch", n+1)
		do(t, node, "cluster", "addslotsrange", n*slots/masters, (n+1)*slots/masters-1)
		c.Nodes = append(c.Nodes, node)
	}
	c.introduce(t, c.Nodes)
	c.WaitOK(t)
	return c
}

// introduce makes each of the nodes meet each other, which is quicker than waiting for
// gossip, until all know all: of two nodes, one gives up a handshake that takes longer
// than the node timeout, and does not begin another when the other one had no need to.
func (c *Cluster) introduce(t testing.TB, nodes []*Server) {
	t.Helper()
	WaitFor(t, stableWithin, func() error {
		var unknown error
		for n, node := range nodes {
			known, err := node.client.ClusterNodes(context.Background()).Result()
			if err != nil {
				return err
			}
			for _, other := range nodes {
				if !strings.Contains(known, c.ids[other]) {
					host, port := hostPort(t, other)
					do(t, node, "cluster", "meet", host, port, c.buses[other])
					unknown = fmt.Errorf("node %d does not know %s", n, other.Addr)
				}
			}
		}
		return unknown
	})
}

// Addrs returns the addresses of the nodes.
func (c *Cluster) Addrs() []string { return addrs(c.Nodes) }

// Slot returns the slot of a key.
func (c *Cluster) Slot(t testing.TB, key string) int {
	t.Helper()
	slot, err := running(t, c.Nodes).client.ClusterKeySlot(context.Background(), key).Result()
	if err != nil {
		t.Fatal(err)
	}
	return int(slot)
}

// Owner returns the node that has the slot, as the nodes see it.
func (c *Cluster) Owner(t testing.TB, slot int) *Server {
	t.Helper()
	//nolint:staticcheck // clients use it to find slots
	ranges, err := running(t, c.Nodes).client.ClusterSlots(context.Background()).Result()
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range ranges {
		if slot < r.Start || r.End < slot {
			continue
		}
		for _, node := range c.Nodes {
			if node.Addr == r.Nodes[0].Addr {
				return node
			}
		}
	}
	t.Fatalf("no node has slot %d: %v", slot, ranges)
	return nil
}

// MoveSlot moves a slot with its keys to a node while clients continue, and
// returns when all nodes know.
func (c *Cluster) MoveSlot(t testing.TB, slot int, to *Server) {
	t.Helper()
	c.BeginMove(t, slot, to)
	c.MoveKeys(t, slot, to)
	c.EndMove(t, slot, to)
}

// BeginMove is the first step of MoveSlot. From then on the slot's owner answers
// ASK for a key of the slot that it does not have, and the other node accepts
// commands for the slot after ASKING.
func (c *Cluster) BeginMove(t testing.TB, slot int, to *Server) {
	t.Helper()
	from := c.Owner(t, slot)
	if from == to {
		t.Fatalf("slot %d is there already", slot)
	}
	do(t, to, "cluster", "setslot", slot, "importing", c.ids[from])
	do(t, from, "cluster", "setslot", slot, "migrating", c.ids[to])
}

// MoveKeys is the second step of MoveSlot. It moves the given keys, or all keys of
// the slot if none are given.
func (c *Cluster) MoveKeys(t testing.TB, slot int, to *Server, keys ...string) {
	t.Helper()
	ctx := context.Background()
	from := c.Owner(t, slot)
	all := len(keys) == 0
	for {
		if all {
			var err error
			if keys, err = from.client.ClusterGetKeysInSlot(ctx, slot, 10).Result(); err != nil {
				t.Fatal(err)
			}
		}
		if len(keys) == 0 {
			return
		}
		host, port := hostPort(t, to)
		args := []any{"migrate", host, port, "", 0, 5000}
		if c.password != "" {
			args = append(args, "auth", c.password)
		}
		args = append(args, "keys")
		for _, key := range keys {
			args = append(args, key)
		}
		do(t, from, args...)
		if !all {
			return
		}
	}
}

// EndMove is the last step of MoveSlot: it hands the slot over and returns when
// all nodes know. The old owner refuses while it still has keys of the slot.
func (c *Cluster) EndMove(t testing.TB, slot int, to *Server) {
	t.Helper()
	from := c.Owner(t, slot)
	// The new owner first: until it has the slot, none may send clients to it.
	do(t, to, "cluster", "setslot", slot, "node", c.ids[to])
	do(t, from, "cluster", "setslot", slot, "node", c.ids[to])
	for _, node := range c.Nodes {
		if node != to && node != from {
			do(t, node, "cluster", "setslot", slot, "node", c.ids[to])
		}
	}
	c.WaitOK(t)
}

// Remove moves a node's slots with their keys to another node, makes the others
// forget it and kills it. It returns when they agree. Nothing may be written to
// its slots meanwhile. If the node was killed before, its keys are lost.
func (c *Cluster) Remove(t testing.TB, node *Server) {
	t.Helper()
	ctx := context.Background()
	i := slices.Index(c.Nodes, node)
	heir := c.Nodes[(i+1)%len(c.Nodes)]
	informed := []*Server{heir} // first
	if node.running() {
		informed = append(informed, node) // before those that only learn of it by gossip
		keys, err := node.client.Keys(ctx, "*").Result()
		if err != nil {
			t.Fatal(err)
		}
		for _, key := range keys {
			if slot := c.Slot(t, key); c.Owner(t, slot) == node {
				c.MoveSlot(t, slot, heir)
			}
		}
	}
	for _, s := range c.Nodes {
		if s != heir && s != node {
			informed = append(informed, s)
		}
	}
	ranges, err := heir.client.ClusterSlots(ctx).Result() //nolint:staticcheck // as above
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range informed {
		pipe := s.client.Pipeline()
		for _, r := range ranges {
			for slot := r.Start; slot <= r.End && r.Nodes[0].Addr == node.Addr; slot++ {
				pipe.Do(ctx, "cluster", "setslot", slot, "node", c.ids[heir])
			}
		}
		if _, err := pipe.Exec(ctx); err != nil {
			t.Fatal(err)
		}
	}
	if node.running() {
		c.WaitOK(t)
	}
	c.Nodes = slices.Delete(slices.Clone(c.Nodes), i, i+1)
	c.forget(t, node)
}

// Replace starts a replica of a node, fails over to it, makes the others forget
// the node and kills it. It returns when they agree.
func (c *Cluster) Replace(t testing.TB, node *Server) {
	t.Helper()
	replica := c.AddReplica(t, node)
	c.FailOver(t, replica)
	c.Nodes = slices.Clone(c.Nodes)
	c.Nodes[slices.Index(c.Nodes, node)] = replica
	c.replicas--
	c.forget(t, node)
}

// AddReplica starts a replica of a node, and returns it when it has the node's data.
// It is not among the Nodes, even after it has become a master.
func (c *Cluster) AddReplica(t testing.TB, node *Server) *Server {
	t.Helper()
	replica := c.start(t)
	c.introduce(t, append(slices.Clone(c.Nodes), replica))
	c.replicas++
	WaitFor(t, stableWithin, func() error {
		return replica.client.Do(context.Background(), "cluster", "replicate", c.ids[node]).Err()
	})
	WaitFor(t, stableWithin, func() error { return replicationHas(replica, "master_link_status:up") })
	return replica
}

// FailOver makes a replica the master in place of its own, which becomes its replica,
// and returns when both know. Nothing is lost.
func (c *Cluster) FailOver(t testing.TB, replica *Server) {
	t.Helper()
	WaitFor(t, stableWithin, func() error {
		if replicationHas(replica, "role:master") == nil {
			return nil
		}
		if err := replica.client.Do(context.Background(), "cluster", "failover").Err(); err != nil {
			return err
		}
		time.Sleep(100 * time.Millisecond)
		return replicationHas(replica, "role:master")
	})
	WaitFor(t, stableWithin, func() error { return replicationHas(replica, "connected_slaves:1", "state=online") })
}

// TakeOver makes a replica the master in place of its own, which is dead. It loses
// what it did not get from that one. It returns when all running Nodes know.
func (c *Cluster) TakeOver(t testing.TB, replica *Server) {
	t.Helper()
	do(t, replica, "cluster", "failover", "takeover")
	WaitFor(t, stableWithin, func() error {
		for _, node := range c.Nodes {
			if !node.running() {
				continue
			}
			nodes, err := node.client.ClusterNodes(context.Background()).Result()
			if err != nil {
				return err
			}
			for line := range strings.Lines(nodes) {
				// The id, the address and the flags; slots come ninth.
				if fields := strings.Fields(line); fields[0] == c.ids[replica] && len(fields) < 9 {
					return fmt.Errorf("%s has no slots by the reckoning of %s", replica.Addr, node.Addr)
				}
			}
		}
		return nil
	})
}

// forget makes all nodes forget one that has left, and kills it.
func (c *Cluster) forget(t testing.TB, node *Server) {
	t.Helper()
	node.Kill() // first, so that it can't make itself known again
	for _, s := range c.Nodes {
		do(t, s, "cluster", "forget", c.ids[node])
	}
	c.WaitOK(t)
}

// WaitOK returns when all nodes reach each other, report that the cluster is ok
// and agree on the owners of the slots.
func (c *Cluster) WaitOK(t testing.TB) {
	t.Helper()
	WaitFor(t, stableWithin, func() error {
		var agreed string
		for n, node := range c.Nodes {
			view, err := c.view(node)
			if err != nil {
				return fmt.Errorf("node %d: %w", n, err)
			}
			if agreed == "" {
				agreed = view
			}
			if view != agreed {
				return fmt.Errorf("node %d sees %s and not %s", n, view, agreed)
			}
		}
		return nil
	})
}

// view returns the owners of the slots as a node sees them.
func (c *Cluster) view(node *Server) (string, error) {
	if !node.running() {
		return "", errors.New("is not running")
	}
	ctx := context.Background()
	info, err := node.client.ClusterInfo(ctx).Result()
	if err != nil {
		return "", err
	}
	for _, line := range []string{
		"cluster_state:ok", fmt.Sprint("cluster_slots_ok:", slots),
		fmt.Sprint("cluster_known_nodes:", len(c.Nodes)+c.replicas),
	} {
		if !strings.Contains(info, line+"\r\n") {
			return "", fmt.Errorf("no %s in %q", line, info)
		}
	}
	ranges, err := node.client.ClusterSlots(ctx).Result() //nolint:staticcheck // as above
	if err != nil {
		return "", err
	}
	slices.SortFunc(ranges, func(a, b redis.ClusterSlot) int { return a.Start - b.Start })
	var view strings.Builder
	for _, r := range ranges {
		fmt.Fprintf(&view, "%d-%d %s;", r.Start, r.End, r.Nodes[0].Addr)
	}
	return view.String(), nil
}

// do runs a command on a server.
func do(t testing.TB, s *Server, args ...any) {
	t.Helper()
	if err := s.client.Do(context.Background(), args...).Err(); err != nil {
		t.Fatalf("%v at %s: %v", args, s.Addr, err)
	}
}

// running returns the first of the servers that is running.
func running(t testing.TB, servers []*Server) *Server {
	t.Helper()
	for _, s := range servers {
		if s.running() {
			return s
		}
	}
	t.Fatal("no server is running")
	return nil
}

func addrs(servers []*Server) []string {
	all := make([]string, len(servers))
	for n, s := range servers {
		all[n] = s.Addr
	}
	return all
}

func hostPort(t testing.TB, s *Server) (host, port string) {
	t.Helper()
	host, port, err := net.SplitHostPort(s.Addr)
	if err != nil {
		t.Fatal(err)
	}
	return host, port
}
