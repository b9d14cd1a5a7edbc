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
	// redirected returns the server that err, which another returned, says to
	// ask instead, and whether to ask it for a slot that it does not have yet;
	// nil if it says nothing like that.
	redirected(err error) (next *server, asking bool)
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

		// The context of a request bounds whatever it waits for, these what is
		// done outside of requests.
		ContextTimeoutEnabled: true,
		DialTimeout:           connectWithin,
		ReadTimeout:           max(2*time.Second, opt.Timeout),
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

func newSingle(opt RedisOptions) *single {
	name := strings.Join(opt.Addresses, ", ")
	var client *redis.Client
	if opt.MasterName == "" {
		client = redis.NewClient(opt.client().Simple())
	} else {
		name = opt.MasterName + " of the sentinels at " + name
		client = redis.NewFailoverClient(opt.client().Failover())
	}
	return &single{newServer(name, client, opt, func() {})}
}

func (s *single) one() bool                                   { return true }
func (s *single) of(context.Context, string) (*server, error) { return s.server, nil }
func (s *single) redirected(error) (*server, bool)            { return nil, false }
func (s *single) connect()                                    { s.server.connect(false) }
func (s *single) close() error                                { return s.server.client.Close() }

// cluster is the servers of a Redis cluster. The client knows which of them has
// which slots; what is sent to them goes past it, for it has no guard and no
// connections that are ready.
type cluster struct {
	client *redis.ClusterClient
	opt    RedisOptions

	// While it is not yet known which servers there are, the cluster is guarded
	// like a server.
	guard   guard
	known   chan struct{} // closed once it is known
	failed  signal        // it could not be learnt
	loading atomic.Bool

	mu      sync.RWMutex
	servers map[string]*server // by address
}

func newCluster(opt RedisOptions) *cluster {
	c := &cluster{
		opt:     opt,
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
	client := redis.NewClient(opt)
	s := newServer(opt.Addr, client, c.opt, func() { c.client.ReloadState(context.Background()) })
	c.mu.Lock()
	defer c.mu.Unlock()
	c.servers[opt.Addr] = s
	return client
}

// at returns the server with the given address, nil if it is not known.
func (c *cluster) at(addr string) *server {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.servers[addr]
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
	failed := c.failed.next()
	c.connect()
	if probe {
		c.guard.leave()
		return newFailure(c.guard.server, c.opt.Timeout, errConnecting)
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

// connect learns which servers there are.
func (c *cluster) connect() {
	if !c.loading.CompareAndSwap(false, true) {
		return
	}
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), connectWithin)
		defer cancel()
		_, err := c.client.MasterForKey(ctx, "")
		if err == nil {
			close(c.known) // and no other load is begun
			c.guard.success(true)
			return
		}
		f := newFailure(c.guard.server, connectWithin, err)
		c.guard.failure(f)
		c.loading.Store(false)
		c.failed.raise(f)
	}()
}

func (c *cluster) redirected(err error) (next *server, asking bool) {
	if addr, ok := redis.IsMovedError(err); ok {
		c.client.ReloadState(context.Background())
		return c.at(addr), false
	}
	if addr, ok := redis.IsAskError(err); ok {
		return c.at(addr), true
	}
	return nil, false
}

func (c *cluster) close() error { return c.client.Close() }
