package pace

import (
	"context"
	"fmt"
	"net"
	"sync"
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

	writing  chan struct{} // has room for the one who writes, and may wait
	sending  sync.Mutex    // held while something is sent, also beside that
	aside    atomic.Int64  // bytes that were sent beside that, and are to be charged
	closed   chan struct{} // when nothing more is to be sent
	hijacked bool          // whether its connection was taken over, and goes on when handlers have returned
	left     error         // once nothing more can be; guarded by writing
	waited   atomic.Int64  // so far, in ns

	beforeWait func() (after func(), err error)
	whileWait  func() (hasLeft bool) // each second; nil if there is nothing to do
	look       *time.Timer           // for that; nil until it waits
}

// mostAside is how many bytes may be sent of an upgraded connection beside a write that waits: a message that
// it is about to be closed, as a control frame of a websocket.
const mostAside = 256

// lookEvery is how often a response that waits does what is to be done meanwhile.
const lookEvery = time.Second

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
	return &Response{
		ctx: ctx, store: store, beforeWait: func() (func(), error) { return func() {}, nil },
		writing: make(chan struct{}, 1), closed: make(chan struct{}),
	}
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

// end ends the response, once. It does not wait for who still writes.
func (p *Response) end() {
	close(p.closed)
	p.leaveAll()
}

// leaveAll leaves the queues of all limits for good, unless another one writes, who does so then.
func (p *Response) leaveAll() {
	select {
	case p.writing <- struct{}{}:
	default:
		return
	}
	for i := range p.limits {
		p.limits[i].leave()
	}
	p.left = net.ErrClosed
	<-p.writing
}

// claim waits until n bytes may be written, though not yet at their speed. They go beside what another one
// writes if they are few: Caddy writes that an upgraded connection is about to be closed, and waits for it.
func (p *Response) claim(n int) (aside bool, err error) {
	select {
	case p.writing <- struct{}{}:
		return false, nil
	default:
	}
	if p.aside.Add(int64(n)) <= mostAside {
		return true, nil
	}
	p.aside.Add(-int64(n))
	select {
	case p.writing <- struct{}{}:
		return false, nil
	case <-p.closed:
		return false, net.ErrClosed
	}
}

// release has others write.
func (p *Response) release() {
	<-p.writing
	select {
	case <-p.closed:
		p.leaveAll()
	default:
	}
}

// write has b written in pieces. It may be called while another call waits.
func (p *Response) write(b []byte, write func([]byte) (int, error)) (written int, err error) {
	send := func(b []byte) (int, error) {
		p.sending.Lock()
		defer p.sending.Unlock()
		return write(b)
	}
	aside, err := p.claim(len(b))
	if aside {
		return send(b)
	}
	if err != nil {
		return 0, err
	}
	defer p.release()
	for aside := int(p.aside.Swap(0)); aside > 0; {
		n, err := p.await(aside)
		if err != nil {
			return 0, err
		}
		aside -= n
	}
	for len(b) > 0 {
		n, err := p.await(len(b))
		if err != nil {
			return written, err
		}
		sent, err := send(b[:n])
		if written += sent; err != nil {
			return written, err
		}
		b = b[n:]
	}
	return written, nil
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
		ready, ok := p.untilReady()
		if ok {
			full = ready
			continue
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

// untilReady waits until the response need not wait where it does, or nothing more can be sent.
func (p *Response) untilReady() (ready turn, ok bool) {
	var look <-chan time.Time
	if p.whileWait != nil {
		if p.look == nil {
			p.look = time.NewTimer(lookEvery)
		}
		p.look.Reset(lookEvery)
		defer p.look.Stop()
		look = p.look.C
	}
	for {
		select {
		case ready = <-p.ready:
			return ready, true
		case <-p.ctx.Done():
			return 0, false
		case <-p.closed:
			return 0, false
		case <-look:
			if p.whileWait() {
				return 0, false
			}
			p.look.Reset(lookEvery)
		}
	}
}
