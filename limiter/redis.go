package limiter

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"sync"
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

	// The most time that Take waits for an answer, everything included. It must
	// be positive. Connections are made outside of it.
	Timeout time.Duration

	// The most connections for requests to each server; 0 means ten for each
	// CPU.
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
// the server's clock.
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
}

// NewRedis returns a store in the given Redis. It does not connect yet.
func NewRedis(opt RedisOptions) *Redis {
	r := &Redis{
		keys:     keys{prefix: opt.KeyPrefix, secret: []byte(opt.KeySecret)},
		timeout:  opt.Timeout,
		fallback: opt.Fallback,
		script:   takeScript,
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

// Take implements Store. It waits at most the store's timeout. When ctx is
// cancelled meanwhile the request is decided all the same: abandoning it would
// cost the connection and leave open whether it was charged.
func (r *Redis) Take(ctx context.Context, req Request, dst []Decision) ([]Decision, error) {
	if err := req.validate(); err != nil {
		return dst, err
	}
	if len(req.Buckets) == 0 {
		return dst, nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.timeout)
	defer cancel()

	var few [8]outcome
	var outcomes []outcome
	var err error
	if r.servers.one() || !req.severalKeys() {
		outcomes, err = r.decide(ctx, req, few[:0])
	} else {
		outcomes, err = r.decideApart(ctx, req, req.byKey())
	}
	if err != nil {
		return dst, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	return req.decisions(outcomes, dst), nil
}

// decide decides a request whose buckets lie together: on their server, or in
// this process if that can't be asked. It appends to dst.
func (r *Redis) decide(ctx context.Context, req Request, dst []outcome) ([]outcome, error) {
	var owed []state
	if r.fallback != nil {
		owed = r.fallback.owed(req.Buckets)
	}
	outcomes, err := r.ask(ctx, req, owed, dst)
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
	srv, reply, err := r.call(ctx, r.script, r.keys.takeArguments(req, owed))
	if err != nil {
		return dst, err
	}
	outcomes, corrupt, err := req.outcomes(reply, dst)
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
	const hops = 3
	srv, err := r.servers.of(ctx, args[firstKey].(string))
	if err != nil {
		return nil, nil, err
	}
	asking := false
	for hop := 0; ; hop++ {
		reply, err := srv.run(ctx, s, args, asking)
		next, ask := r.servers.redirected(err)
		if next == nil || hop == hops {
			if f, ok := err.(*failure); ok && f.reason == "moved" { //nolint:errorlint // what run returns
				srv.guard.lapse(f)
			}
			return srv, reply, err
		}
		srv, asking = next, ask
	}
}

// part is some of a request's buckets that are decided together.
type part struct {
	Request
	indexes []int // where its buckets stand in the whole request
}

// severalKeys reports whether the buckets are of more than one key.
func (req Request) severalKeys() bool {
	for i := range req.Buckets {
		if req.Buckets[i].Key != req.Buckets[0].Key {
			return true
		}
	}
	return false
}

// byKey parts the request into one for each key.
func (req Request) byKey() []part {
	var parts []part
next:
	for i, b := range req.Buckets {
		for j := range parts {
			if parts[j].Buckets[0].Key == b.Key {
				parts[j].add(b, i)
				continue next
			}
		}
		parts = append(parts, req.part(b, i))
	}
	return parts
}

// byBucket parts the request into one for each bucket.
func (req Request) byBucket() []part {
	parts := make([]part, len(req.Buckets))
	for i, b := range req.Buckets {
		parts[i] = req.part(b, i)
	}
	return parts
}

// part returns a part of the request that has one bucket.
func (req Request) part(b Bucket, index int) part {
	p := part{Request: req}
	p.Buckets = nil
	p.add(b, index)
	return p
}

// add adds a bucket to the part.
func (p *part) add(b Bucket, index int) {
	p.Buckets = append(p.Buckets, b)
	p.indexes = append(p.indexes, index)
}

// decideApart decides the parts of req side by side. If then the request is
// denied, or undecided, what some of them charged is given back.
func (r *Redis) decideApart(ctx context.Context, req Request, parts []part) ([]outcome, error) {
	outcomes := make([]outcome, len(req.Buckets))
	errs := make([]error, len(parts))
	var wg sync.WaitGroup
	for i, p := range parts {
		wg.Go(func() {
			decided, err := r.decide(ctx, p.Request, nil)
			for j, o := range decided {
				outcomes[p.indexes[j]] = o
			}
			errs[i] = err
		})
	}
	wg.Wait()

	err := errors.Join(errs...)
	denied := false
	for i := range outcomes {
		denied = denied || outcomes[i].denied
	}
	if err == nil && (!denied || req.Accounting == Each) {
		return outcomes, nil
	}
	var charged []int
	for i, p := range parts {
		if errs[i] == nil && !anyDenied(outcomes, p.indexes) {
			charged = append(charged, p.indexes...)
		}
	}
	r.giveBack(ctx, req, outcomes, charged)
	return outcomes, err
}

// anyDenied reports whether one of the outcomes at indexes is a denial.
func anyDenied(outcomes []outcome, indexes []int) bool {
	for _, i := range indexes {
		if outcomes[i].denied {
			return true
		}
	}
	return false
}

// giveBack takes what the buckets at the given indexes were charged out of them
// again. It waits for that until ctx ends; what is still under way then goes on
// for as long again. Units that can't be given back stay charged.
func (r *Redis) giveBack(ctx context.Context, req Request, outcomes []outcome, indexes []int) {
	var wg sync.WaitGroup
	for _, i := range indexes {
		b, o := &req.Buckets[i], &outcomes[i]
		o.state = b.Limit.remove(o.state, 0, b.Cost)
		if r.fallback != nil {
			r.fallback.giveBack(b, o.here)
		}
		if o.here {
			continue
		}
		args := r.keys.giveBackArguments(b)
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.timeout)
			defer cancel()
			_, _, _ = r.call(ctx, giveBackScript, args)
		})
	}
	done := make(chan struct{})
	go func() {
		wg.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-ctx.Done():
	}
}
