package pace

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Response is a response that is paced.
type Response struct {
	ctx    context.Context // of its request
	store  limiter.Store
	limits []limited
	in     int       // the index of the limit for which it waits
	ready  chan turn // when it need not wait there any more; nil until it has to

	asked   []limiter.Bucket // of the limits, in order
	answers []limiter.Decision

	closed chan struct{} // when its connection is closed, which ctx does not tell; nil if it tells
	left   error         // once its client has left while it waited
	waited atomic.Int64  // so far, in ns

	beforeWait func() (after func(), err error)
}

// limited is a response at one of its limits.
type limited struct {
	*Limit
	numbers *Numbers // by which it is sent
	own     bool     // whether the key is its own, and not the client's address
	waits   bool     // whether it has ever waited there, or would have without dry_run
	queue   *queue
	at      bucketKey // the bucket of the queue
	waiter  waiter
}

// New returns a response that is not paced yet, to the request with the given context.
func New(ctx context.Context, store limiter.Store) *Response {
	return &Response{ctx: ctx, store: store, beforeWait: func() (func(), error) { return func() {}, nil }}
}

// Add adds a limit by which the response is paced, with its bucket there, and the client by which it takes
// turns. It is called before anything of the response is sent.
func (p *Response) Add(l *Limit, bucket limiter.Bucket, client string) {
	own := bucket.Name != l.AddressName
	p.asked = append(p.asked, bucket)
	p.limits = append(p.limits, limited{Limit: l, own: own, waiter: waiter{client: client, index: -1}})
}

// Waited returns how long the response has waited so far.
func (p *Response) Waited() time.Duration { return time.Duration(p.waited.Load()) }

// refresh has the response keep to the numbers in force. It must not wait.
func (p *Response) refresh() {
	for i := range p.limits {
		l, b := &p.limits[i], &p.asked[i]
		inForce := l.Speed.inForce.Load()
		if inForce == nil {
			inForce = &l.Numbers
		}
		if inForce == l.numbers {
			continue
		}
		l.leave()
		l.numbers = inForce
		key, share := b.Key, b.ShareKey
		*b = inForce.Bucket
		if b.Key, b.ShareKey = key, share; !l.own {
			b.Name = inForce.AddressName
		}
		l.at = bucketKey{b.Name, b.Key, b.Limit.DripInterval, b.Limit.DripSize}
		l.queue, l.waiter.entered = l.Speed.enter(l.at), false
	}
}

// leave leaves the queue of a limit for good.
func (l *limited) leave() {
	if l.queue != nil {
		l.Speed.leave(l.at, l.queue)
		l.queue, l.numbers = nil, nil
	}
}

// end notes that nothing more is sent.
func (p *Response) end() {
	for i := range p.limits {
		p.limits[i].leave()
	}
}

// await waits until as many bytes as it returns may be sent, at most so many, and charges them.
func (p *Response) await(most int) (n int, err error) {
	if p.left != nil { // and the next handlers write on
		return 0, p.left
	}
	p.refresh()
	bytes, full := int64(most), charged
	for i := range p.limits {
		l := &p.limits[i]
		others := l.queue.length.Load()
		if others > 0 && full == charged && !l.numbers.Bucket.DryRun {
			full = turn(i)
		}
		bytes = min(bytes, max(l.numbers.Most/(1+others), l.numbers.Least))
	}
	wait := time.Duration(0)
	if full == charged {
		full, wait = p.charge(bytes)
	}
	if full != charged {
		err = p.wait(full, bytes, wait)
	}
	return int(bytes), err
}

// charge charges n bytes to all limits, or nothing and returns the one that has no room for longest, and
// for how long.
func (p *Response) charge(n int64) (full turn, wait time.Duration) {
	for i := range p.asked {
		p.asked[i].Cost = n
	}
	var err error
	full = charged
	p.answers, err = p.store.Take(context.Background(), limiter.Request{Buckets: p.asked}, p.answers[:0])
	if err != nil {
		return charged, 0 // what can't be decided has none wait
	}
	for i := range p.answers {
		l, d := &p.limits[i], &p.answers[i]
		if d.Denied && !l.waits {
			l.waits = true
			l.Counters.Add(0, telemetry.Delayed, 1)
		}
		if d.Denied && !d.DryRun && d.RetryAfter >= wait {
			full, wait = turn(i), max(d.RetryAfter, time.Microsecond)
		}
	}
	if full == charged {
		for i := range p.answers {
			if !p.answers[i].Denied {
				p.limits[i].Counters.Add(0, telemetry.Units, n)
			}
		}
	}
	return full, wait
}

// wait has n bytes wait, in the queue of the full limit, and then of others that turn out to be, until they
// are charged.
func (p *Response) wait(full turn, n int64, wait time.Duration) error {
	start := time.Now()
	after, err := p.beforeWait()
	if err != nil {
		return err
	}
	defer func() {
		after()
		p.waited.Add(int64(time.Since(start)))
	}()
	if p.ready == nil {
		p.ready = make(chan turn, 1)
	}
	for full != charged {
		l := &p.limits[full]
		p.in, l.waiter.response = int(full), p
		l.queue.join(&l.waiter, n, l.numbers.Most, wait)
		wait = 0
		select {
		case full = <-p.ready:
			continue
		case <-p.ctx.Done():
		case <-p.closed:
		}
		if l.queue.remove(&l.waiter) {
			for i := range p.limits {
				p.limits[i].queue.forget(&p.limits[i].waiter)
			}
			p.left = fmt.Errorf("the client has left while the response waited for the speed of limit %q: %w", l.numbers.Bucket.Name, context.Canceled)
			return p.left
		}
		full = <-p.ready
	}
	for i := range p.limits { // it has had its turn at all of them
		l := &p.limits[i]
		l.queue.count(&l.waiter, n, l.numbers.Most)
	}
	return nil
}
