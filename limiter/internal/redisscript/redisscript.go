// Package redisscript runs one Lua script on Redis for many concurrent callers: on
// a single server, on one that sentinels know, or on a cluster.
//
// A Call names some keys and says, in a few bytes, what the script is to do with
// them; the script replies with integers. Concurrent calls to a server are
// batched. A call is sent again only if the script has certainly not run, because it may
// have changed something, and no caller waits longer than the timeout. When a server keeps
// failing, a circuit breaker rejects calls to it, except for occasional probes.
//
// # Protocol
//
// The script is run with the keys of one or more calls as KEYS, call after call,
// and with one ARGV for each run of consecutive calls whose Arg is equal: that
// Arg, with the number of calls in the run as its first two bytes, a big-endian
// integer. It replies with one list of integers: the replies to all calls, in order.
// Without ARGV it replies with an empty list. In a cluster, all keys of one
// invocation are in one slot.
package redisscript

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"time"
)

// Options describe the Redis to use and how to reach it.
type Options struct {
	// The host:port of each server, or the path of a unix socket. One address is
	// the server's own. Several belong to cluster servers. With
	// MasterName they belong to sentinels.
	Addresses []string

	// Whether a single address belongs to a cluster server.
	Cluster bool

	// The name by which the sentinels know the server.
	MasterName string

	// The credentials for the sentinels, and for the servers.
	SentinelUsername, SentinelPassword string
	Username, Password                 string

	// Returns the credentials for the servers, for each connection; nil means that they
	// are Username and Password.
	Credentials func(ctx context.Context) (username, password string, err error)

	// The number of the database.
	DB int

	// The TLS configuration; nil means no TLS.
	TLS *tls.Config

	// Makes connections, those to sentinels too, if not nil. TLS is added to them.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)

	// The longest that a call may wait for its answer, in total. Connections are
	// made in the background and may take longer.
	Timeout time.Duration

	// Called with each event that an operator should know about, if not nil. Calls
	// are made one at a time, and callers of the script do not wait for them.
	Report func(Event)
}

// Hooks are called while calls are in flight. They must not block.
type Hooks struct {
	// Called before calls are sent to a server. Their Arg may still be changed.
	Sending func(*Server, []*Call)

	// Called with the outcome of a call, as its Done would be, before Do returns it: its caller
	// may come to that after later calls have been answered. It is also called if the caller has
	// given up before.
	Answered func(c *Call, err error, inTime bool)

	// Called when the server may have lost its data: it has restarted, or is
	// another one.
	Restarted func(*Server)
}

// Client runs a script on Redis.
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

// Connect starts connecting in the background, so that the first call need not
// wait for a connection.
func (c *Client) Connect() { c.topology.connect() }

// Close closes all connections. Later calls fail.
func (c *Client) Close() error {
	c.events.close()
	return c.topology.close()
}

// OneServer reports whether all keys are on one server, so that one call may have
// any of them.
func (c *Client) OneServer() bool { return c.topology.one() }

// maxRedirects is how many redirections a call follows.
const maxRedirects = 3

// Do runs the script for a call, batched with others, and returns the server that
// has answered. It returns by the deadline, unless this process is too busy to
// send the call or to read the answer by then. After an error the call may still be in
// flight, unless NotRun reports that it is not.
func (c *Client) Do(end Deadline, call *Call) (*Server, error) {
	s, err := c.topology.of(end, call.Keys[0])
	if err != nil {
		return nil, err
	}
	err = s.do(end, call, false)
	for range maxRedirects {
		next, asking := c.topology.redirected(s, err)
		if next == nil {
			break
		}
		s = next
		err = s.do(end, call, asking)
	}
	if f, ok := err.(*ServerError); ok && f.reason == "moved" { // what do returns
		s.breaker.reportError(f)
	}
	return s, err
}

// Submit runs the script for a call, batched with others, on the server that has
// its keys, and passes the outcome to its Done. It does not wait, except at first
// to learn which server that is. An error means that the call was not submitted,
// because the server is down.
func (c *Client) Submit(end Deadline, call *Call) error {
	s, err := c.topology.of(end, call.Keys[0])
	if err != nil {
		return err
	}
	if !c.topology.one() {
		c.followLater(s, call, maxRedirects)
	}
	return s.offer(call, false, false)
}

// followLater has a call, which is about to be submitted to a server, follow redirections
// before its Done gets the outcome. Otherwise what is only submitted would not be run for
// as long as its slot is being moved, which may be hours.
func (c *Client) followLater(s *Server, call *Call, redirects int) {
	done := call.Done
	call.Done = func(err error) {
		call.Done = done
		next, asking := c.topology.redirected(s, err)
		alone := asking // an ASK is for a single invocation
		if MovingSlot(err) && !call.alone {
			next, alone = s, true // other keys of the batch are on another server already
		}
		if next == nil || redirects == 0 {
			done(err)
			return
		}
		c.followLater(next, call, redirects-1)
		if err := next.offer(call, alone, asking); err != nil {
			call.Done = done
			done(err)
		}
	}
}

// NotRun reports whether err, from Do or a call's Done, says that the script was
// certainly not run for the call.
func NotRun(err error) bool {
	f, ok := err.(*ServerError) // as servers return it
	return ok && f.notRun
}

// MovingSlot reports whether err says that the keys of a call are on two servers,
// because their slot is being moved from one to the other.
func MovingSlot(err error) bool {
	if err == nil {
		return false // as most often, without memory for what errors.As finds
	}
	var reply replyError
	return errors.As(err, &reply) && hasCode(reply, "TRYAGAIN")
}

// Elsewhere reports whether err says that another server of a cluster has the keys, or
// some of them.
func Elsewhere(err error) bool {
	f, ok := err.(*ServerError) // as servers return it
	return ok && f.elsewhere
}
