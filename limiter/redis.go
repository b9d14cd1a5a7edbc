package limiter

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter/internal/redisscript"
)

// Redis is a Store that keeps its buckets in Redis servers, so that any number of
// processes share them. A request is decided by one call of a script, on the
// server's clock. Concurrent requests are batched. Once a bucket is full, the
// server is not queried about it again before its next drip.
//
// In a cluster, all buckets of one key are in one slot. A request with several
// keys takes one call for each of them, all in parallel. These calls hold the
// units until all have been answered.
type Redis struct {
	servers
	leases  leases
	reports reports
}

var _ Keeper = (*Redis)(nil)

// NewRedis returns a store in the given Redis. It does not connect yet (see
// [Redis.Connect]), and succeeds even if no server is running. It returns the
// error of [RedisOptions.Validate] if opt is not valid.
func NewRedis(opt RedisOptions) (*Redis, error) {
	if err := opt.Validate(); err != nil {
		return nil, err
	}
	opt.Timeout = cmp.Or(opt.Timeout, RedisDefaultTimeout)
	return newRedis(opt, takeScript), nil
}

// newRedis returns a store that uses the given script.
func newRedis(opt RedisOptions, script *redisscript.Script) *Redis {
	r := newRedisWithoutClient(opt)
	r.client = redisscript.Open(opt.forScripts(), script, redisscript.Hooks{
		Sending:   r.sending,
		Answered:  r.heard,
		Restarted: r.restarted,
	})
	return r
}

// newRedisWithoutClient returns a store that needs a client.
func newRedisWithoutClient(opt RedisOptions) *Redis {
	r := &Redis{
		servers: servers{
			keys:      newKeys(opt.KeyPrefix, opt.KeySecret),
			timeout:   opt.Timeout,
			location:  opt.location(),
			clock:     newClock(),
			denyCache: newDenyCache(denySlots),
		},
	}
	r.ledger.store, r.leases.store, r.reports.store = &r.servers, &r.servers, &r.servers
	r.ledger.process = rand.Int64N(1 << 53) //nolint:gosec // not a secret
	if opt.Fallback != nil {
		r.fallback = newFallback(opt.Fallback, opt.Timeout, r.location)
		r.fallback.removals.send = r.remove
	}
	return r
}

// SharesBuckets reports whether, as far as their options show, r and other keep
// their buckets in the same servers and under the same keys.
func (r *Redis) SharesBuckets(other *Redis) bool { return r.location == other.location }

// Connect connects, so that the first request need not wait for that. It returns when
// each server has answered or has failed, or when ctx is over, and does not give up then.
func (r *Redis) Connect(ctx context.Context) {
	r.client.Connect()
	unknown := func(s redisscript.Stats) bool { return s.State == ServerConnecting && len(s.Failures) == 0 }
	for slices.ContainsFunc(r.client.Stats(), unknown) {
		select {
		case <-ctx.Done():
			return
		case <-time.After(time.Millisecond):
		}
	}
}

// Flush reports what this process has admitted by [Eventual] and not reported yet, without
// waiting for that: for callers that go on with another store, or without Eventual.
func (r *Redis) Flush() { r.reports.flush() }

// Close closes all connections. Later requests are decided as if the servers did
// not answer. What requests in progress hold is charged by the servers, as if the process
// had crashed, unless another Redis has been made with the same Fallback since: then it is
// released, and counts in this process until they end.
func (r *Redis) Close() error {
	r.closed.Store(true)
	r.reports.close()
	r.ledger.close()
	r.fallback.close()
	return r.client.Close()
}

// ErrUnavailable is returned, wrapped, by Take when a server is unavailable.
var ErrUnavailable = errors.New("no decision")

// Take implements Store. It waits no longer than the store's timeout and the
// deadline of ctx. After that the fallback decides or, if there is none, Take
// returns an error that wraps [ErrUnavailable]. A request whose context is
// cancelled is decided anyway: abandoning it would cost the connection and
// leave open whether it was charged. Values of ctx are ignored.
func (r *Redis) Take(ctx context.Context, req Request, dst []Decision) ([]Decision, error) {
	if err := req.prepare(); err != nil {
		return dst, err
	}
	from := len(dst)
	dst, err := r.take(ctx, req, dst)
	if err == nil {
		req.deferCharges(dst[from:], r)
	}
	return dst, err
}

// take is Take of a request that is prepared. Nothing is charged later yet.
func (r *Redis) take(ctx context.Context, req Request, dst []Decision) ([]Decision, error) {
	if len(req.Buckets) == 0 {
		return dst, nil
	}
	if r.fallback == nil {
		if err := req.validateWithoutFallback(); err != nil {
			return dst, err
		}
	}
	w := scratches.Get().(*scratch)
	defer w.release()
	if r.fallback != nil && req.mayShare() {
		w.buckets = r.fallback.memory.shareBuckets(req.Buckets, behind, w.buckets)
		req.Buckets = w.buckets
	}
	sent := r.clock()
	if req.local() {
		var decided bool
		if w.outcomes, decided = r.decideLocally(req, sent.Microseconds(), w); decided {
			return req.decisions(w.outcomes, dst), nil
		}
	}
	var remembered bool
	if w.outcomes, remembered = r.denyCache.decide(req, sent.Microseconds(), w.outcomes); remembered {
		if req.leased() {
			r.leases.note(req, w.outcomes, sent.Microseconds())
		}
		return req.decisions(w.outcomes, dst), nil
	}
	holds := req.Held != nil && req.holds()
	if holds {
		req = r.reserve(req, w)
	}
	end, now := r.deadline(ctx)
	var err error
	switch {
	case !now.Before(end.At):
		w.outcomes, err = r.tooLate(req, w.outcomes)
	case !r.client.OneServer() && req.severalKeys():
		w.outcomes, err = r.decideSplit(end, req, Request.byKey)
	default:
		w.outcomes, err = r.decide(end, req, w.outcomes)
	}
	if err != nil {
		r.hand(req, nil)
		return dst, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	if !anyHere(w.outcomes) {
		r.denyCache.remember(req, w.outcomes, sent.Microseconds(), r.clock)
		r.leases.heard(req, w.outcomes)
	}
	if holds {
		r.hand(req, w.outcomes)
	}
	req.includeHeld(w.outcomes)
	return req.decisions(w.outcomes, dst), nil
}

// tooLate decides a request whose deadline leaves no time to query a server.
func (r *Redis) tooLate(req Request, dst []outcome) ([]outcome, error) {
	if r.fallback == nil || req.NoFallback {
		return dst, errLate
	}
	return r.fallback.decide(req, dst, false), nil
}

// anyHere reports whether this process decided on any bucket.
func anyHere(outcomes []outcome) bool {
	for i := range outcomes {
		if outcomes[i].by == DecidedByFallback {
			return true
		}
	}
	return false
}

// decide decides a request whose buckets are on one server: there, or in this
// process if that server is unavailable. It appends to dst.
func (r *Redis) decide(end redisscript.Deadline, req Request, dst []outcome) ([]outcome, error) {
	q := r.query(req, byte(req.Accounting))
	_, outcomes, err := r.call(end, q, dst)
	switch {
	case err == nil:
		q.release()
		return outcomes, nil
	case len(req.Buckets) > 1 && redisscript.MovingSlot(err):
		// The slot is being moved to another server, and has buckets on both.
		r.fallback.drop(q)
		outcomes, err = r.decideSplit(end, req, Request.byBucket)
		return append(dst, outcomes...), err
	case r.fallback == nil || req.NoFallback:
		r.fallback.drop(q)
		return dst, err
	}
	return r.fallback.decide(req, dst, false, q), nil
}

// chargeLater implements charger. It does not wait.
func (r *Redis) chargeLater(b Bucket, n int64) {
	b.Cost = n
	if r.fallback != nil {
		r.reports.charge(b)
		return
	}
	q := r.query(Request{Buckets: []Bucket{b}}, whatSettle)
	q.Done = func(error) {}
	_ = r.client.Submit(redisscript.Deadline{At: time.Now().Add(r.timeout)}, &q.Call)
}

// validateWithoutFallback returns an error if req can't be decided by a Redis that has no
// Fallback.
func (req *Request) validateWithoutFallback() error {
	for i := range req.Buckets {
		if b := &req.Buckets[i]; b.Consistency.IsEventual() {
			return fmt.Errorf("bucket %q: %v: a Redis without a Fallback knows nothing to decide by: set RedisOptions.Fallback, or use a Lease", b.Name, b.Consistency)
		}
	}
	return nil
}

// decideLocally decides req in this process, and reports whether it could. It appends to
// w.outcomes.
func (r *Redis) decideLocally(req Request, now int64, w *scratch) (outcomes []outcome, decided bool) {
	eventual := 0
	for i := range req.Buckets {
		if req.Buckets[i].Consistency.reports() > 0 {
			eventual++
		}
	}
	switch {
	case eventual == 0:
		return r.leases.decide(req, now, w.outcomes)
	case eventual == len(req.Buckets):
		return r.reports.decide(req, now, w), true
	}
	return w.outcomes, false
}

// Leases returns the outcome of the units that this process has leased, by Bucket.Name.
func (r *Redis) Leases() []LeaseUsage {
	ls := &r.leases
	ls.mu.Lock()
	defer ls.mu.Unlock()
	usage := make([]LeaseUsage, 0, len(ls.usage))
	for name, c := range ls.usage {
		usage = append(usage, LeaseUsage{name, c.granted.Load(), c.used.Load()})
	}
	slices.SortFunc(usage, func(a, b LeaseUsage) int { return cmp.Compare(a.Name, b.Name) })
	return usage
}

// Stats returns the state of each server, sorted by address: of a cluster, of each
// master, or one entry for all servers until they are known. It does not wait for
// any. The counters of a server are gone once it has left its cluster.
func (r *Redis) Stats() []ServerStats {
	servers := r.client.Stats()
	all := make([]ServerStats, len(servers))
	for i, s := range servers {
		all[i] = ServerStats(s)
	}
	return all
}
