package limiter

import (
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter/internal/redisscript"
)

// What this process has charged on its own is reported to the server, which charges it whether
// there is room or not, and returns the level. With [Eventual], that is what the process has
// admitted by the level that it has last heard, at intervals; of a request that held nothing,
// what it was charged in the end, at once. Units that are to be reported are like the units of
// requests in flight: the next request has to fit next to them, wherever it is decided. One
// query gathers them while the last is in flight, and counts as in flight too, although it is
// sent later: until then servers count it as in flight, see fallback.
//
// If it is not known whether a report has arrived, or none can be sent, its units are
// added to the level that this process knows, like the units of any request without an answer,
// see fallback.

const (
	// reportKeys is the number of buckets with something to report that is sent at once,
	// and reportShare the share of a size.
	reportKeys  = 1000
	reportShare = 10

	// refreshAfter is how long a full bucket may go without a word from the server, which
	// may have been emptied.
	refreshAfter = time.Second
)

// decide decides req by what is known here, and appends to w.outcomes.
func (rs *reports) decide(req Request, now int64, w *scratch) []outcome {
	f, dst := rs.store.fallback, w.outcomes
	f.mu.Lock()
	defer f.mu.Unlock()
	f.findInFlight(req, w)
	before := len(dst)
	dst = f.memory.take(w, req, dst, &standIn{late: f.timeout, peek: true})
	denied := req.denied(dst[before:])
	for i := range req.Buckets {
		b, o, hash := &req.Buckets[i], &dst[before+i], w.locations[i].hash
		o.by, o.blocked = DecidedByEventual, false
		switch {
		case o.denied:
			rs.refresh(b, hash, now)
		case !denied || req.Accounting == AccountingEach:
			var at bucket.Moment // any will do, if drips are not aligned to the time
			if b.Limit.Aligned {
				at.Unix = time.Now().UnixMicro()
			}
			o.Ahead = b.Limit.of().AtLeast(o.After(at.Now), b.Cost, at).Ahead(at.Now)
			rs.add(b, hash, now)
		}
	}
	return dst
}

// charge has what a request was charged in the end reported, before any later query.
func (rs *reports) charge(b Bucket) {
	f := rs.store.fallback
	if b.ShareKey != "" {
		f.memory.share(&b, behind)
	}
	f.mu.Lock()
	partition, hash := f.memory.locate(&b)
	partition.sized(b.Limit.Size)
	rs.add(&b, hash, rs.store.clock().Microseconds())
	f.mu.Unlock()
	rs.sendDue()
}

// report returns the report of a bucket.
func (rs *reports) report(hash uint64, now int64) *report {
	p := rs.of[hash]
	if p == nil {
		p = &report{heard: now}
		if rs.of == nil {
			rs.of = make(map[uint64]*report)
		}
		rs.of[hash] = p
	}
	return p
}

// add adds a request on b to what is reported.
func (rs *reports) add(b *Bucket, hash uint64, now int64) {
	p := rs.report(hash, now)
	if p.next == nil {
		rs.enqueue(p, b, now+b.Consistency.reports().Microseconds())
		if b.Consistency.IsEventual() {
			rs.wakeBy(p.due)
		}
	}
	units := min(p.next.buckets[0].cost+b.Cost, MaxUnits)
	rs.store.fallback.costs(p.next, units)
	for _, x := range rs.store.fallback.resets {
		if x.hash == hash {
			x.gathered = min(x.gathered+b.Cost, MaxUnits)
		}
	}
	if p.sent == nil && p.due > now && (units >= b.Limit.Size/reportShare || len(rs.queue) >= reportKeys) {
		p.due = now
		rs.wakeBy(now)
	}
}

// refresh reads from the server the level of b, which is full here, if it has reported none for
// long.
func (rs *reports) refresh(b *Bucket, hash uint64, now int64) {
	p := rs.report(hash, now)
	if p.next == nil && p.sent == nil && now-p.heard >= refreshAfter.Microseconds() {
		rs.enqueue(p, b, now)
		rs.wakeBy(now)
	}
}

// enqueue begins a report of b, which is to be sent at some time.
func (rs *reports) enqueue(p *report, b *Bucket, due int64) {
	what := byte(whatReport)
	if b.later { // it may cost more than there ever is room for
		what = whatSettle
	}
	q := rs.store.query(Request{Buckets: []Bucket{*b}}, what)
	q.stage, q.server, q.buckets[0].cost = gathering, nil, 0
	rs.store.fallback.link(q)
	p.next, p.due = q, due
	rs.queue = append(rs.queue, p)
}

// wakeBy has run look at the queue by some time.
func (rs *reports) wakeBy(due int64) {
	if !rs.running {
		rs.running, rs.next = true, due
		if rs.wake == nil {
			rs.wake = make(chan struct{}, 1)
		}
		go rs.run()
		return
	}
	if due < rs.next {
		rs.next = due
		select {
		case rs.wake <- struct{}{}:
		default:
		}
	}
}

// run sends what is due until nothing is left.
func (rs *reports) run() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-rs.wake:
		case <-timer.C:
		}
		rs.sendDue()
		rs.store.fallback.mu.Lock()
		rs.running = len(rs.of) > 0 && !rs.store.closed.Load()
		more, wait := rs.running, rs.next-rs.store.clock().Microseconds()
		rs.store.fallback.mu.Unlock()
		if !more {
			return
		}
		timer.Reset(time.Duration(wait) * time.Microsecond)
	}
}

// flush has all that has not been reported sent now. It does not wait for that.
func (rs *reports) flush() {
	f := rs.store.fallback
	if f == nil {
		return
	}
	f.mu.Lock()
	for _, p := range rs.queue {
		p.due = min(p.due, rs.store.clock().Microseconds())
	}
	f.mu.Unlock()
	rs.sendDue()
}

// sendDue sends what is due.
func (rs *reports) sendDue() {
	f, now := rs.store.fallback, rs.store.clock().Microseconds()
	f.mu.Lock()
	due := make([]*report, 0, len(rs.queue))
	all, waiting := len(rs.queue) >= reportKeys || rs.store.closed.Load(), rs.queue[:0]
	rs.next = now + refreshAfter.Microseconds()
	for _, p := range rs.queue {
		if p.sent != nil || !all && p.due > now {
			waiting = append(waiting, p)
			if p.sent == nil { // otherwise its answer wakes run
				rs.next = min(rs.next, p.due)
			}
			continue
		}
		p.sent, p.next = p.next, nil
		due = append(due, p)
	}
	clear(rs.queue[len(waiting):])
	rs.queue = waiting
	rs.sweep(now)
	f.mu.Unlock()
	for _, p := range due {
		rs.send(p, p.sent)
	}
}

// send sends q, which reports p.
func (rs *reports) send(p *report, q *query) {
	q.Done = func(err error) { rs.answered(p, q, err) }
	end := redisscript.Deadline{At: time.Now().Add(rs.store.timeout)}
	if err := rs.store.client.Submit(end, &q.Call); err != nil {
		rs.answered(p, q, err)
	}
}

// answered records the answer to q, which has reported p. If there is none, the level here has
// what it reports.
func (rs *reports) answered(p *report, q *query, err error) {
	r, f := rs.store, rs.store.fallback
	var outcomes []outcome
	if err == nil {
		outcomes, _, err = q.outcomes(nil)
	}
	switch {
	case err == nil:
		r.answered(q, outcomes)
	case q.buckets[0].cost > 0:
		f.charge(q)
	default:
		f.drop(q)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	now := r.clock().Microseconds()
	switch p.sent, p.heard = nil, now; {
	case p.next != nil:
		rs.wakeBy(min(p.due, now))
	case q.what != whatReport: // no decision depends on when it was heard
		delete(rs.of, q.buckets[0].hash)
	}
}

// close has all that is to be reported sent, and waits for the answers for no longer than a
// request would. The store is closed.
func (rs *reports) close() {
	if rs.store.fallback == nil {
		return
	}
	rs.sendDue()
	for end := time.Now().Add(rs.store.timeout); rs.inProgress() && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
}

// sweep removes reports of buckets about which it has had no requests lately.
func (rs *reports) sweep(now int64) {
	if now-rs.swept < refreshAfter.Microseconds() && len(rs.of) < 2*len(rs.queue)+reportKeys {
		return
	}
	rs.swept = now
	for hash, p := range rs.of {
		if p.sent == nil && p.next == nil && now-p.heard >= refreshAfter.Microseconds()/2 {
			delete(rs.of, hash)
		}
	}
}

// inProgress reports whether any report has not been answered, or waits for that to be sent.
func (rs *reports) inProgress() bool {
	rs.store.fallback.mu.Lock()
	defer rs.store.fallback.mu.Unlock()
	for _, p := range rs.of {
		if p.sent != nil || p.next != nil {
			return true
		}
	}
	return false
}

// forget forgets what is to be reported of b, which has been emptied, except for what was
// admitted since x was sent, if it is not nil.
func (rs *reports) forget(b *Bucket, x *emptying) {
	f := rs.store.fallback
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if p := rs.of[f.memory.hash(b)]; p != nil && p.next != nil {
		since := int64(0)
		if x != nil {
			since = min(x.gathered, p.next.buckets[0].cost)
		}
		f.costs(p.next, since)
	}
}

// unreported returns how many units of b the server may not know of. The fallback's lock
// must be held.
func (rs *reports) unreported(b *Bucket) (n int64) {
	p := rs.of[rs.store.fallback.memory.hash(b)]
	if p == nil {
		return 0
	}
	for _, q := range []*query{p.next, p.sent} {
		if q != nil {
			n += q.buckets[0].cost
		}
	}
	return n
}
