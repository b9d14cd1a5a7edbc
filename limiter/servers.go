package limiter

import (
	"context"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// servers knows which server has which keys.
type servers interface {
	// one reports whether all keys lie on one server.
	one() bool
	// of returns the server that has a key.
	of(ctx context.Context, key string) (*server, error)
	// redirected returns the server that err, which the given one returned, says
	// to ask instead, and whether to ask it for a slot that it does not have yet;
	// nil if it says nothing like that.
	redirected(from *server, err error) (next *server, asking bool)
	// connect begins to connect.
	connect()
	close() error
}

// poolSize returns the most connections for requests to a server.
func (opt *RedisOptions) poolSize() int {
	if opt.PoolSize == 0 {
		return 10 * runtime.GOMAXPROCS(0)
	}
	return opt.PoolSize
}

// client returns the options of the client, of which there is one for each kind
// of deployment.
func (opt *RedisOptions) client() *redis.UniversalOptions {
	return &redis.UniversalOptions{
		Addrs:            opt.Addresses,
		MasterName:       opt.MasterName,
		SentinelUsername: opt.SentinelUsername,
		SentinelPassword: opt.SentinelPassword,
		Username:         opt.Username,
		Password:         opt.Password,
		DB:               opt.DB,
		TLSConfig:        opt.TLS,

		// Two more than requests may hold: the client itself asks a cluster
		// about its slots.
		PoolSize: opt.poolSize() + 2,

		// A script that charges must run at most once, whatever becomes of its
		// answer.
		MaxRetries: -1,

		// The context of a request bounds whatever it waits for. These are for
		// what is done outside of requests, such as to ask one sentinel, or one
		// server of a cluster, after the other.
		ContextTimeoutEnabled: true,
		DialTimeout:           connectWithin / time.Duration(len(opt.Addresses)+1),
		ReadTimeout:           max(time.Second, opt.Timeout),
		DialerRetries:         1,

		// One round trip to greet instead of up to four, and no pool beside
		// ours.
		Protocol:                 2,
		DisableIdentity:          true,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
		PipelinePoolSize:         -1,
	}
}

// single is one server, found by its address or by asking sentinels.
type single struct{ server *server }

func newSingle(opt RedisOptions, tell listener) *single {
	name := strings.Join(opt.Addresses, ", ")
	var client *redis.Client
	if opt.MasterName == "" {
		client = redis.NewClient(opt.client().Simple())
	} else {
		name = opt.MasterName + " of the sentinels at " + name
		failover := opt.client().Failover()
		// Those to sentinels are made by nothing else.
		failover.Dialer = boundedDialer(redis.NewDialer(&redis.Options{
			DialTimeout: failover.DialTimeout, TLSConfig: failover.TLSConfig,
		}))
		client = redis.NewFailoverClient(failover)
	}
	return &single{newServer(name, client, &opt, tell, func() {})}
}

func (s *single) one() bool                                   { return true }
func (s *single) of(context.Context, string) (*server, error) { return s.server, nil }
func (s *single) redirected(*server, error) (*server, bool)   { return nil, false }
func (s *single) connect()                                    { s.server.connect(false) }
func (s *single) close() error                                { return s.server.close() }

// cluster is the servers of a Redis cluster. The client knows which of them has
// which slots; what is sent to them goes past it, for it has no guard and no
// connections that are ready.
type cluster struct {
	client *redis.ClusterClient
	opt    RedisOptions
	tell   listener
	done   chan struct{} // closed when the cluster is no longer used
	closed sync.Once

	// While it is not yet known which servers there are, the cluster is guarded
	// like a server.
	guard   guard
	known   chan struct{} // closed once it is known
	failed  signal        // it could not be learnt
	loading atomic.Bool

	mu      sync.RWMutex
	servers map[string]*server // by address
	like    *redis.Options     // those of any of them; nil as long as there is none
}

func newCluster(opt RedisOptions, tell listener) *cluster {
	c := &cluster{
		opt:     opt,
		tell:    tell,
		done:    make(chan struct{}),
		guard:   newGuard(strings.Join(opt.Addresses, ", "), opt.Report),
		known:   make(chan struct{}),
		servers: make(map[string]*server),
	}
	clients := opt.client().Cluster()
	clients.NewClient = c.newClient
	clients.DisableRoutingPolicies = true // which would ask for all commands
	c.client = redis.NewClusterClient(clients)
	return c
}

// newClient makes the client of one server in the cluster.
func (c *cluster) newClient(opt *redis.Options) *redis.Client {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.like == nil {
		like := *opt
		c.like = &like
	}
	before := c.servers[opt.Addr]
	if before != nil && !before.known {
		before.known = true
		return before.client
	}
	s := c.add(opt)
	s.known = true
	if before != nil {
		_ = before.close() // as the client has its connections
	}
	return s.client
}

// add adds a server. The lock must be held.
func (c *cluster) add(opt *redis.Options) *server {
	client := redis.NewClient(opt)
	client.AddHook(endpoints{opt.Addr})
	s := newServer(opt.Addr, client, &c.opt, c.tell, func() { c.client.ReloadState(context.Background()) })
	s.slots = true
	c.servers[opt.Addr] = s
	return s
}

// at returns the server with an address. One that has no slot yet is known to
// nobody before it is named as the one that gets some.
func (c *cluster) at(addr string) *server {
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
		opt.Addr, opt.Dialer = addr, nil
		s = c.add(&opt)
	}
	return s
}

func (c *cluster) one() bool { return false }

func (c *cluster) of(ctx context.Context, key string) (*server, error) {
	select {
	case <-c.known:
	default:
		if err := c.wait(ctx); err != nil {
			return nil, err
		}
	}
	client, err := c.client.MasterForKey(ctx, key)
	if err != nil {
		return nil, newFailure(c.guard.server, c.opt.Timeout, err)
	}
	return c.at(client.Options().Addr), nil
}

// wait waits until the cluster's servers are known.
func (c *cluster) wait(ctx context.Context) error {
	probe, err := c.guard.enter()
	if err != nil {
		return err
	}
	ctx, cancel := timed(ctx)
	defer cancel()
	failed := c.failed.next()
	c.connect()
	if probe {
		c.guard.leave()
		return newFailure(c.guard.server, c.opt.Timeout, errNotConnected)
	}
	select {
	case <-c.known:
		return nil
	case <-failed:
		return c.failed.last()
	case <-ctx.Done():
	}
	f := newFailure(c.guard.server, c.opt.Timeout, errConnecting)
	c.guard.failure(f)
	return f
}

// connect learns which servers there are, and connects to them.
func (c *cluster) connect() {
	if !c.loading.CompareAndSwap(false, true) {
		return
	}
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), connectWithin)
		defer cancel()
		err := c.client.ForEachMaster(ctx, func(_ context.Context, client *redis.Client) error {
			c.at(client.Options().Addr).connect(false)
			return nil
		})
		if err == nil {
			close(c.known) // and this is never begun again
			c.guard.success(true)
			go c.prune()
			return
		}
		f := newFailure(c.guard.server, 0, err)
		c.guard.failure(f)
		c.loading.Store(false)
		c.failed.raise(f)
	}()
}

// pruneEvery is how often it is seen whether servers have left the cluster.
const pruneEvery = 2 * time.Second

// prune lets go of servers that have left the cluster: of those that the client
// has not known any more twice in a row, and that nobody has asked meanwhile. One
// that is only about to get a slot is asked.
func (c *cluster) prune() {
	missing := make(map[*server]int)
	for {
		select {
		case <-c.done:
			return
		case <-time.After(pruneEvery):
		}
		missing = c.leave(missing)
	}
}

// leave lets go of the servers that are missing still, and returns those that
// are missing now, with how often they have been asked.
func (c *cluster) leave(missing map[*server]int) map[*server]int {
	var mu sync.Mutex
	members, masters := make(map[string]bool), make(map[string]bool)
	err := c.client.ForEachMaster(context.Background(), func(_ context.Context, client *redis.Client) error {
		mu.Lock()
		defer mu.Unlock()
		masters[client.Options().Addr] = true
		return nil
	})
	if err != nil {
		return make(map[*server]int) // nobody knows
	}
	err = c.client.ForEachShard(context.Background(), func(_ context.Context, client *redis.Client) error {
		mu.Lock()
		defer mu.Unlock()
		members[client.Options().Addr] = true
		return nil
	})
	now := make(map[*server]int)
	if err != nil {
		return now // nobody knows
	}
	c.mu.RLock()
	for addr, s := range c.servers {
		if !masters[addr] {
			s.guard.replaced()
		}
		if !members[addr] {
			now[s] = 0
		}
	}
	c.mu.RUnlock()
	for s := range now {
		asked := s.asked()
		if before, still := missing[s]; !still || asked != before {
			now[s] = asked
			continue
		}
		delete(now, s)
		c.mu.Lock()
		delete(c.servers, s.guard.server)
		c.mu.Unlock()
		s.guard.silence()
		_ = s.close()
	}
	return now
}

func (c *cluster) redirected(from *server, err error) (next *server, asking bool) {
	if addr, ok := redis.IsMovedError(err); ok {
		c.client.ReloadState(context.Background())
		return c.at(endpoints{from.client.Options().Addr}.fill(addr)), false
	}
	if addr, ok := redis.IsAskError(err); ok {
		return c.at(endpoints{from.client.Options().Addr}.fill(addr)), true
	}
	return nil, false
}

func (c *cluster) close() error {
	c.closed.Do(func() { close(c.done) })
	c.guard.silence()
	c.mu.RLock()
	for _, s := range c.servers {
		s.guard.silence()
	}
	c.mu.RUnlock()
	err := c.client.Close()
	c.mu.RLock()
	defer c.mu.RUnlock()
	for _, s := range c.servers {
		_ = s.close() // the client has closed those it knows
	}
	return err
}
