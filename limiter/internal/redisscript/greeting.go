package redisscript

import (
	"cmp"
	"context"
	"errors"
	"net"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	// connectWithin is the time limit for making a connection: dialing, TLS
	// handshake and login. No call waits for that longer than its own timeout.
	connectWithin = 5 * time.Second

	// slowToConnect is how long a connection may take before the server counts as
	// failing.
	slowToConnect = time.Second
)

// greeter makes connections to a server. go-redis knows how: by TLS, by a unix
// socket, by sentinels, and with which credentials. It must make no others with
// this client.
type greeter struct {
	client *redis.Client
	script *Script

	// The socket that was read from last: after a greeting, the one that was
	// greeted.
	latest atomic.Pointer[socket]
}

func newGreeter(client *redis.Client, script *Script) *greeter {
	g := &greeter{client: client, script: script}
	client.AddHook(refusals{})
	client.AddHook(sockets{greeter: g})
	return g
}

// greet makes a connection. It must not be called concurrently.
func (g *greeter) greet(ctx context.Context) (*connection, error) {
	var refused error
	conn := g.client.EphemeralConn()
	if err := g.script.load(context.WithValue(ctx, refusedKey{}, &refused), conn); err != nil {
		_ = conn.Close()
		if reply := redis.Error(nil); !errors.As(err, &reply) {
			err = cmp.Or(refused, err)
		}
		return nil, err
	}
	s := g.latest.Swap(nil)
	s.greeted.Store(true)
	if err := s.SetDeadline(time.Time{}); err != nil {
		_ = conn.Close()
		return nil, err
	}
	c := &connection{Conn: s.Conn, release: conn.Close, made: time.Now(), trip: s.trip}
	if c.raw, c.plain = rawConn(s.Conn); c.raw != nil {
		c.before, _ = received(c.raw) // all of it was read, or what comes next is unasked
	}
	c.heardAt.Store(int64(time.Since(start)))
	return c, nil
}

// maxLogins is how many calls for credentials may run. Some may never return, and may each keep
// a thread.
const maxLogins = 64

// credentials marks the errors of a function that returns credentials, which may be nil. It
// gives up on a call that goes on after its context: a server is connected to by one
// goroutine at a time, so a file that can't be read, or a request without an answer, would
// keep it down for good.
func credentials(get func(context.Context) (string, string, error)) func(context.Context) (string, string, error) {
	if get == nil {
		return nil
	}
	type login struct {
		username, password string
		err                error
	}
	running := make(chan struct{}, maxLogins)
	return func(ctx context.Context) (username, password string, err error) {
		ctx, cancel := context.WithTimeout(ctx, connectWithin)
		defer cancel()
		logins := make(chan login, 1)
		select {
		case running <- struct{}{}:
			go func() {
				defer func() { <-running }()
				username, password, err := get(ctx)
				if err != nil {
					err = credentialsError{err}
				}
				logins <- login{username, password, err}
			}()
		case <-ctx.Done():
		}
		select {
		case got := <-logins:
			return got.username, got.password, got.err
		case <-ctx.Done():
			return "", "", credentialsError{ctx.Err()}
		}
	}
}

// socket is a connection while it is greeted. Everything that comes is checked
// before go-redis sees it.
type socket struct {
	boundedConn
	greeter *greeter
	greeted atomic.Bool

	wrote time.Time     // when something was last sent
	trip  time.Duration // how long its answer took
}

// Read reads what has come.
func (s *socket) Read(b []byte) (int, error) {
	n, err := s.boundedConn.Read(b)
	if !s.greeted.Load() {
		s.trip = time.Since(s.wrote)
		s.greeter.latest.Store(s)
	}
	return n, err
}

// Write sends b.
func (s *socket) Write(b []byte) (int, error) {
	s.wrote = time.Now()
	return s.boundedConn.Write(b)
}

// sockets is a hook that makes connections sockets.
type sockets struct {
	hook
	greeter *greeter
}

func (h sockets) DialHook(next redis.DialHook) redis.DialHook {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := next(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		if bounded, ok := conn.(*boundedConn); ok {
			conn = bounded.Conn
		}
		return &socket{boundedConn: boundedConn{Conn: conn}, greeter: h.greeter}, nil
	}
}

// rawConn returns the socket behind a connection, or nil if there is none. plain is
// false if TLS is between.
func rawConn(conn net.Conn) (raw syscall.RawConn, plain bool) {
	tls, ok := conn.(interface{ NetConn() net.Conn })
	if plain = !ok; ok {
		conn = tls.NetConn()
	}
	var s syscall.Conn
	switch conn := conn.(type) { // others may have a socket, and read something else than comes there
	case *net.TCPConn:
		s = conn
	case *net.UnixConn:
		s = conn
	default:
		return nil, plain
	}
	raw, err := s.SyscallConn()
	if err != nil {
		return nil, plain
	}
	return raw, plain
}

// refusedKey is the key of a context value that receives the server's reply to the
// first command on a connection if that was an error. The client itself goes on
// after such a reply, in case the server is an old one, and then only reports that
// the connection was closed.
type refusedKey struct{}

// refusals is a hook that catches these errors.
type refusals struct{ hook }

func (refusals) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if refused, ok := ctx.Value(refusedKey{}).(*error); ok && *refused == nil {
			if reply := redis.Error(nil); errors.As(err, &reply) {
				*refused = err
			}
		}
		return err
	}
}

// hook is a hook of go-redis that changes nothing, for others to embed.
type hook struct{}

func (hook) DialHook(next redis.DialHook) redis.DialHook          { return next }
func (hook) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }
func (hook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}
