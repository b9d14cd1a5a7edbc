package limiter

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"
)

// RedisOptions says which Redis keeps the buckets, and how to reach it.
type RedisOptions struct {
	// The host:port of servers, or the path of one's unix socket. One is the
	// server itself. Several are servers of a cluster, which know the others.
	// With MasterName they are sentinels.
	Addresses []string

	// Whether a single address is that of a cluster's server.
	Cluster bool

	// The name by which sentinels know the server. They are asked for its
	// address whenever a connection is made.
	MasterName string

	// The user and password to log in to the sentinels with, if any.
	SentinelUsername, SentinelPassword string

	// The user and password to log in with, if any.
	Username, Password string

	// The number of the database. A cluster has only 0.
	DB int

	// How to speak TLS, to sentinels too; nil means not at all.
	TLS *tls.Config

	// What the name of every key begins with. It must not contain braces.
	KeyPrefix string

	// A secret to hash keys with, so that nobody who sees the server's keys can
	// find out whose they are by trying. Empty means a plain digest.
	KeySecret string

	// The most time that Take waits for an answer, everything included, from
	// RedisMinTimeout to RedisMaxTimeout. Connections are made outside of it.
	Timeout time.Duration

	// The most connections for requests to each server, up to RedisMaxPoolSize;
	// 0 means ten for each CPU.
	PoolSize int

	// Decides while a server can't be asked. It follows the levels that the
	// servers report, and so goes on where they stopped; when they are back they
	// go on where it stopped. With nil, Take returns an error instead.
	Fallback *Memory

	// Is told what an operator should know, if not nil. It must return soon and
	// not use the store, and may be called from several goroutines at once.
	Report func(Event)
}

// Redis is a Store that keeps its buckets in Redis servers, so that any number
// of processes share them. A request is decided by one call of a script, on
// the server's clock. Requests that wait for it travel together, and of those that
// are denied only the first of a drip is asked for.
//
// In a cluster all buckets of one key lie in one slot. A request with several
// keys is decided by a call for each of them, side by side; if one denies, what
// the others charged is given back.
type Redis struct {
	keys     keys
	timeout  time.Duration
	fallback *Memory
	servers  servers
	script   *script // that decides
	denials  *denials
	clock    func() time.Duration // for denials; it never goes back
}

// NewRedis returns a store in the given Redis. It does not connect yet. Options
// that are not valid, see RedisOptions.Validate, make a store that may fail on
// every request; a PoolSize that is out of range counts as the nearest that is
// not.
func NewRedis(opt RedisOptions) *Redis {
	opt.PoolSize = min(max(opt.PoolSize, 0), RedisMaxPoolSize)
	start := time.Now()
	r := &Redis{
		keys:     keys{prefix: opt.KeyPrefix, secret: []byte(opt.KeySecret)},
		timeout:  opt.Timeout,
		fallback: opt.Fallback,
		script:   takeScript,
		denials:  newDenials(denialSlots),
		clock:    func() time.Duration { return time.Since(start) },
	}
	if opt.MasterName == "" && (opt.Cluster || len(opt.Addresses) > 1) {
		r.servers = newCluster(opt)
	} else {
		r.servers = newSingle(opt)
	}
	return r
}

// Connect begins to connect, so that the first request need not wait for it.
func (r *Redis) Connect() { r.servers.connect() }

// Close closes all connections. Later calls are decided as if the servers did
// not answer.
func (r *Redis) Close() error { return r.servers.close() }

// ErrUnavailable is returned, wrapped, by Take if a server can't be asked.
var ErrUnavailable = errors.New("no decision")

// Take implements Store. It waits at most the store's timeout. A request whose
// context is cancelled meanwhile is decided all the same: abandoning it would
// cost the connection and leave open whether it was charged.
func (r *Redis) Take(_ context.Context, req Request, dst []Decision) ([]Decision, error) {
	if err := req.validate(); err != nil {
		return dst, err
	}
	if len(req.Buckets) == 0 {
		return dst, nil
	}
	var few [8]outcome
	apart := !r.servers.one() && req.severalKeys()
	if !apart {
		if outcomes, ok := r.denials.decide(req, r.clock().Microseconds(), few[:0]); ok {
			return req.decisions(outcomes, dst), nil
		}
	}
	ctx := within(r.timeout)
	var outcomes []outcome
	var err error
	if apart {
		outcomes, err = r.decideApart(ctx, req, req.byKey())
	} else {
		outcomes, err = r.decide(ctx, req, true, few[:0])
	}
	if err != nil {
		return dst, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	return req.decisions(outcomes, dst), nil
}

// decide decides a request whose buckets lie together: on their server, or in
// this process if that can't be asked. It appends to dst. That is final unless
// what the request is charged may be given back.
func (r *Redis) decide(ctx context.Context, req Request, final bool, dst []outcome) ([]outcome, error) {
	sent := r.clock()
	var owed []state
	if r.fallback != nil {
		owed = r.fallback.owed(req.Buckets)
	}
	outcomes, err := r.ask(ctx, req, owed, dst)
	if err == nil {
		r.denials.remember(req, outcomes[len(dst):], final, sent.Microseconds(), r.clock().Microseconds())
	}
	switch {
	case err == nil && r.fallback != nil:
		for i, o := range outcomes[len(dst):] {
			r.fallback.mirror(&req.Buckets[i], o.state, owed != nil && owed[i] != state{})
		}
		return outcomes, nil
	case err == nil:
		return outcomes, nil
	case redis.IsTryAgainError(err) && len(req.Buckets) > 1:
		// The slot is on its way to another server, and has buckets on both.
		outcomes, err = r.decideApart(ctx, req, req.byBucket())
		return append(dst, outcomes...), err
	case r.fallback == nil || req.NoFallback:
		return dst, err
	}
	before := len(dst)
	dst = r.fallback.take(req, dst, true)
	for i := range dst[before:] {
		dst[before+i].here = true
	}
	return dst, nil
}

// ask has req decided by the server on which its buckets lie. They are at least
// at the levels that are owed, if any are.
func (r *Redis) ask(ctx context.Context, req Request, owed []state, dst []outcome) ([]outcome, error) {
	q := r.keys.question(r.script, req, owed)
	srv, reply, err := r.follow(ctx, q.keys[0], func(srv *server, asking bool) ([]int64, error) {
		if asking { // which is said of one call
			return srv.run(ctx, q.script, appendArguments(nil, q), asking)
		}
		return srv.take(ctx, q)
	})
	if err != nil { // after which q may still be on its way
		return dst, err
	}
	outcomes, corrupt, err := req.outcomes(reply, dst)
	q.release()
	if err == nil && corrupt {
		srv.guard.lapse(srv.failure(errCorrupt))
	}
	if err != nil {
		f := srv.failure(fmt.Errorf("%w: %w", errCorrupt, err))
		srv.guard.lapse(f)
		return dst, f
	}
	return outcomes, nil
}

// call runs a script on the server that has the first key in args.
func (r *Redis) call(ctx context.Context, s *script, args []any) (*server, []int64, error) {
	return r.follow(ctx, args[firstKey].(string), func(srv *server, asking bool) ([]int64, error) {
		return srv.run(ctx, s, args, asking)
	})
}

// follow asks the server that has a key, and then those to which it is sent on.
func (r *Redis) follow(ctx context.Context, key string, ask func(_ *server, asking bool) ([]int64, error)) (*server, []int64, error) {
	const hops = 3
	srv, err := r.servers.of(ctx, key)
	if err != nil {
		return nil, nil, err
	}
	asking := false
	for hop := 0; ; hop++ {
		reply, err := ask(srv, asking)
		next, asks := r.servers.redirected(err)
		if next == nil || hop == hops {
			if f, ok := err.(*failure); ok && f.reason == "moved" { //nolint:errorlint // what run returns
				srv.guard.lapse(f)
			}
			return srv, reply, err
		}
		srv, asking = next, asks
	}
}
