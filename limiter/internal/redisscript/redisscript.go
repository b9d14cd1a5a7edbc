// Package redisscript runs one Lua script on Redis for many callers at once: on a
// single server, one that sentinels know, or a cluster.
//
// A Call names some keys and says, in a few bytes, what the script is to do with
// them; the script answers with integers. Concurrent calls to a server are
// batched. A call is sent once and never again, since it may have changed
// something, and nobody waits for it longer than the timeout. A server that fails
// is left alone by a circuit breaker, except for a probe now and then.
//
// # Protocol
//
// The script is run with the keys of one or more calls as KEYS, call after call,
// and with one ARGV for each run of consecutive calls whose Arg is equal: their
// Arg, of which the first two bytes tell how many they are, as a big-endian
// integer. It replies with one list of integers: those of all calls, in order.
// Without ARGV it replies with an empty list. In a cluster all keys of one
// invocation lie in one slot.
package redisscript

import (
	"context"
	"crypto/tls"
	"errors"
	"runtime"
	"time"

	"github.com/redis/go-redis/v9"
)

// Options say which Redis to use, and how to reach it.
type Options struct {
	// The host:port of servers, or the path of one's unix socket. One is the
	// server itself. Several are servers of a cluster. With MasterName they are
	// sentinels.
	Addresses []string

	// Whether a single address is that of a cluster's server.
	Cluster bool

	// The name by which sentinels know the server.
	MasterName string

	// The credentials for the sentinels, and for the servers.
	SentinelUsername, SentinelPassword string
	Username, Password                 string

	// The number of the database.
	DB int

	// How to speak TLS; nil means not at all.
	TLS *tls.Config

	// The longest that a call may wait for its answer, everything included.
	// Connections are made outside of it.
	Timeout time.Duration

	// The most connections for calls to each server; 0 means ten for each CPU.
	PoolSize int

	// Is told what an operator should know, if not nil. Events are reported one
	// after the other, and no call waits for it.
	Report func(Event)
}

// poolSize returns the most connections for calls to a server.
func (opt *Options) poolSize() int {
	if opt.PoolSize == 0 {
		return 10 * runtime.GOMAXPROCS(0)
	}
	return opt.PoolSize
}

// Hooks are called while calls are on their way. They must not wait.
type Hooks struct {
	// Calls are about to be sent to a server. Their Arg may still be changed.
	Sending func(*Server, []*Call)

	// The server may have lost its data: it has restarted, or is another one.
	Restarted func(*Server)

	// There is an answer to a call for which nobody waits any more.
	Late func(*Server, *Call)
}

// Client runs a script.
type Client struct {
	topology topology
	events   *eventQueue
}

// Open returns a client that runs the script. It does not connect yet.
func Open(opt Options, script *Script, hooks Hooks) *Client {
	c := &Client{events: newEventQueue(opt.Report)}
	opt.Report = c.events.add
	if opt.MasterName == "" && (opt.Cluster || len(opt.Addresses) > 1) {
		c.topology = newCluster(opt, script, hooks)
	} else {
		c.topology = newSingle(opt, script, hooks)
	}
	return c
}

// Connect begins to connect, so that the first call need not wait for it.
func (c *Client) Connect() { c.topology.connect() }

// Close closes all connections. Later calls fail.
func (c *Client) Close() error {
	c.events.close()
	return c.topology.close()
}

// OneServer reports whether all keys lie on one server, and so may be in one call.
func (c *Client) OneServer() bool { return c.topology.one() }

// Do runs the script for a call, batched with others, and returns the server that
// has answered. It returns when the deadline of ctx has passed at the latest, and
// ignores cancellation; see WithDeadline. After an error the call may still be on
// its way, unless NotRun says that it is not.
func (c *Client) Do(ctx context.Context, call *Call) (*Server, error) {
	return c.follow(ctx, call, (*Server).do)
}

// DoAlone is Do without batching.
func (c *Client) DoAlone(ctx context.Context, call *Call) (*Server, error) {
	return c.follow(ctx, call, func(s *Server, ctx context.Context, call *Call) error {
		return s.doAlone(ctx, call, false)
	})
}

// Submit has the script run for a call, batched with others, on the server that has
// its keys, and the outcome told to its Done. It waits for nothing but, at first, to
// learn which server that is. An error means that the call was not submitted: the
// server is down.
func (c *Client) Submit(ctx context.Context, call *Call) error {
	s, err := c.topology.of(ctx, call.Keys[0])
	if err != nil {
		return err
	}
	if err := s.breaker.openError(); err != nil {
		return err
	}
	s.Submit(call)
	return nil
}

// follow runs a call on the server that has its keys, and then on those to which
// it is redirected.
func (c *Client) follow(ctx context.Context, call *Call, do func(*Server, context.Context, *Call) error) (*Server, error) {
	const maxRedirects = 3
	s, err := c.topology.of(ctx, call.Keys[0])
	if err != nil {
		return nil, err
	}
	err = do(s, ctx, call)
	for range maxRedirects {
		next, asking := c.topology.redirected(s, err)
		if next == nil {
			break
		}
		if s = next; asking { // which is said of a single invocation
			err = s.doAlone(ctx, call, true)
		} else {
			err = do(s, ctx, call)
		}
	}
	if f, ok := err.(*ServerError); ok && f.reason == "moved" { //nolint:errorlint // what do returns
		s.breaker.reportError(f)
	}
	return s, err
}

// NotRun reports whether err, which Do or a call's Done got, says that the script
// was certainly not run for the call.
func NotRun(err error) bool {
	if errors.Is(err, errNoConnection) {
		return true // as batches tell it, in which nobody waits for what it means
	}
	f, ok := err.(*ServerError) //nolint:errorlint // as servers return it
	return ok && f.notRun
}

// MovingSlot reports whether err says that the keys of a call are on two servers,
// as their slot is on its way from one to the other.
func MovingSlot(err error) bool { return redis.IsTryAgainError(err) }
