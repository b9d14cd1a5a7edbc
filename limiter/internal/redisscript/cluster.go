package redisscript

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// cluster is the servers of a Redis cluster. go-redis's ClusterClient knows which
// of them has which slots. Calls bypass it, because it has no breaker and no ready
// connections.
type cluster struct {
	client *redis.ClusterClient
	opt    Options
	script *Script
	hooks  Hooks
	done   chan struct{} // closed when the cluster is no longer used
	closed sync.Once

	// Until the servers are known, the cluster has a breaker like a
	// server.
	breaker breaker
	known   chan struct{} // closed once it is known
	failed  signal        // raised when the servers could not be learnt
	loading atomic.Bool
	keeper  sync.Once // starts keep

	mu      sync.RWMutex
	masters map[string]bool    // the IDs of the servers that have slots
	servers map[string]*Server // by address
	like    *redis.Options     // the options of any server; nil until there is one
}

func newCluster(opt Options, script *Script, hooks Hooks) *cluster {
	c := &cluster{
		opt:     opt,
		script:  script,
		hooks:   hooks,
		done:    make(chan struct{}),
		breaker: newBreaker(strings.Join(opt.Addresses, ", "), opt.Report),
		known:   make(chan struct{}),
		servers: make(map[string]*Server),
	}
	clients := opt.client().Cluster()
	clients.NewClient = c.newClient
	clients.DisableRoutingPolicies = true // they would request the list of all commands
	c.client = redis.NewClusterClient(clients)
	return c
}

// newClient makes a client with which the ClusterClient reads the cluster's slots.
func (c *cluster) newClient(opt *redis.Options) *redis.Client {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.like == nil {
		like := *opt
		c.like = &like
	}
	client := redis.NewClient(opt)
	client.AddHook(bounds{})
	client.AddHook(endpoints{addr: opt.Addr, learn: c.learn})
	return client
}

// learn records a reply about which servers have slots, before it is used. What
// becomes a master may lack what the last one received, even if it has been one
// before: if others have slots than before, all servers count as restarted.
func (c *cluster) learn(slots []redis.ClusterSlot) {
	masters := make(map[string]bool)
	for _, r := range slots {
		if len(r.Nodes) > 0 {
			masters[r.Nodes[0].ID] = true
		}
	}
	c.mu.Lock()
	var all []*Server
	if c.masters != nil && !maps.Equal(masters, c.masters) {
		all = slices.Collect(maps.Values(c.servers))
	}
	c.masters = masters
	c.mu.Unlock()
	for _, s := range all {
		s.restarted()
	}
}

// at returns the server with the given address.
func (c *cluster) at(addr string) *Server {
	c.mu.RLock()
	s := c.servers[addr]
	c.mu.RUnlock()
	if s != nil {
		return s
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if s = c.servers[addr]; s == nil && c.like != nil {
		opt := *c.like
		opt.Addr = addr
		s = newServer(addr, redis.NewClient(&opt), &c.opt, c.script, c.hooks, true,
			func() { c.client.ReloadState(context.Background()) })
		c.servers[addr] = s
	}
	return s
}

func (c *cluster) one() bool { return false }

func (c *cluster) of(end Deadline, key string) (*Server, error) {
	select {
	case <-c.known:
	default:
		if err := c.wait(end); err != nil {
			return nil, err
		}
	}
	client, err := c.client.MasterForKey(end.context(), key)
	if err != nil {
		return nil, newFailure(c.breaker.server, c.opt.Timeout, err)
	}
	return c.at(client.Options().Addr), nil
}

// wait waits until the cluster's servers are known.
func (c *cluster) wait(end Deadline) error {
	probe, err := c.breaker.allow()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithDeadline(context.Background(), end.At)
	defer cancel()
	failed := c.failed.next()
	c.connect()
	if probe {
		c.breaker.endProbe()
		return newFailure(c.breaker.server, c.opt.Timeout, errNotConnected)
	}
	select {
	case <-c.known:
		return nil
	case <-failed:
		return c.failed.why()
	case <-ctx.Done():
	}
	f := newFailure(c.breaker.server, c.opt.Timeout, errConnecting)
	c.breaker.failure(f)
	return f
}

// connect starts learning which servers there are, and connecting to them.
func (c *cluster) connect() {
	c.keeper.Do(func() { go c.keep() })
	c.learnServers()
}

// keep learns which servers there are, in the background, until they are known, and then
// which have left.
func (c *cluster) keep() {
	for {
		select {
		case <-c.done:
			return
		case <-c.known:
			c.prune()
			return
		case <-time.After(jittered(probeEvery)):
			c.learnServers()
		}
	}
}

// learnServers starts learning which servers there are, unless somebody does.
func (c *cluster) learnServers() {
	if !c.loading.CompareAndSwap(false, true) {
		return
	}
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), connectWithin)
		defer cancel()
		err := c.client.ForEachMaster(ctx, func(_ context.Context, client *redis.Client) error {
			s := c.at(client.Options().Addr)
			s.master.Store(true)
			s.connect(false)
			return nil
		})
		if err == nil {
			close(c.known) // and learnServers never gets here again
			c.breaker.success(true)
			return
		}
		f := newConnectFailure(c.breaker.server, err)
		c.breaker.failure(f)
		c.loading.Store(false)
		c.failed.raise(f)
	}()
}

// pruneEvery is the time between two checks whether servers have left the cluster.
const pruneEvery = 2 * time.Second

// prune removes servers that have left the cluster: those that the ClusterClient
// did not know in two checks in a row, and that got no calls in between. A server
// that is only about to get a slot does get calls.
func (c *cluster) prune() {
	missing := make(map[*Server]int64)
	for {
		select {
		case <-c.done:
			return
		case <-time.After(pruneEvery):
		}
		missing = c.leave(missing)
	}
}

// leave removes the servers that are still missing. It returns those that are
// missing now, with the number of calls each has had.
func (c *cluster) leave(missing map[*Server]int64) map[*Server]int64 {
	var mu sync.Mutex
	members, masters := make(map[string]bool), make(map[string]bool)
	err := c.client.ForEachMaster(context.Background(), func(_ context.Context, client *redis.Client) error {
		mu.Lock()
		defer mu.Unlock()
		masters[client.Options().Addr] = true
		return nil
	})
	if err != nil {
		return make(map[*Server]int64) // unknown
	}
	err = c.client.ForEachShard(context.Background(), func(_ context.Context, client *redis.Client) error {
		mu.Lock()
		defer mu.Unlock()
		members[client.Options().Addr] = true
		return nil
	})
	now := make(map[*Server]int64)
	if err != nil {
		return now // unknown
	}
	c.mu.RLock()
	for addr, s := range c.servers {
		s.master.Store(masters[addr])
		if !masters[addr] {
			s.breaker.replaced()
			s.pipeline.stop(errDropped) // if it is a master again, it may lack what it did not get meanwhile
		}
		if !members[addr] {
			now[s] = 0
		}
	}
	c.mu.RUnlock()
	for s := range now {
		asked := s.calls.Load()
		if before, still := missing[s]; !still || asked != before {
			now[s] = asked
			continue
		}
		delete(now, s)
		c.mu.Lock()
		delete(c.servers, s.breaker.server)
		c.mu.Unlock()
		_ = s.close()
	}
	return now
}

// stats returns the state of each server that has slots.
func (c *cluster) stats() []Stats {
	select {
	case <-c.known:
	default:
		all := c.breaker.stats()
		all.Cluster = true
		return []Stats{all}
	}
	c.mu.RLock()
	defer c.mu.RUnlock()
	var all []Stats
	for _, s := range c.servers {
		if s.master.Load() {
			all = append(all, s.stats())
		}
	}
	return all
}

func (c *cluster) redirected(from *Server, err error) (next *Server, asking bool) {
	addr, asking := redirection(err)
	if addr == "" {
		return nil, false
	}
	next = c.at(endpoints{addr: from.breaker.server}.fill(addr))
	if !asking {
		c.client.ReloadState(context.Background())
		if next != nil && !next.master.Swap(true) {
			next.restarted() // as the next reply about slots will show
		}
	}
	return next, asking
}

func (c *cluster) close() error {
	c.closed.Do(func() { close(c.done) })
	c.breaker.mute()
	c.mu.RLock()
	for _, s := range c.servers {
		s.breaker.mute()
	}
	c.mu.RUnlock()
	err := c.client.Close()
	c.mu.RLock()
	defer c.mu.RUnlock()
	for _, s := range c.servers {
		_ = s.close()
	}
	return err
}

// signal reports a failure to all goroutines that wait for something.
type signal struct {
	mu     sync.Mutex
	raised chan struct{} // closed with the next failure; nil if none waits
	last   *ServerError
}

// next returns a channel that is closed with the next failure.
func (s *signal) next() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.raised == nil {
		s.raised = make(chan struct{})
	}
	return s.raised
}

// why returns the last failure.
func (s *signal) why() *ServerError {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.last
}

// raise reports a failure.
func (s *signal) raise(f *ServerError) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last = f
	if s.raised != nil {
		close(s.raised)
		s.raised = nil
	}
}
