package limiter

import (
	"strings"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter/internal/redisscript"
)

// With [Eventual], this process decides by the level that it has last heard and what it
// has admitted since. It reports that to the server at intervals, which charges it,
// whether there is room or not, and tells the level in return. So units that are to be
// reported are like those of requests in flight: the next request has to fit beside them.
//
// If it is not known whether a report has arrived, or none can be sent, its units are
// added to the level that this process knows, like those of any request without an answer,
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

// reports is what one store has to report. The fallback's lock guards it.
type reports struct {
	store   *Redis
	of      map[uint64]*report // by the hash of the bucket in the fallback's memory
	queue   []*report          // those that are due at some time
	next    int64              // when the first of them is, as far as run knows
	swept   int64              // when idle ones were last removed
	running bool
	wake    chan struct{} // for run
}

// report is what is to be reported of one bucket. Times are in µs, on the store's clock.
type report struct {
	bucket Bucket
	units  int64  // that have not been sent
	due    int64  // when they are to be sent, or 0
	sent   int64  // the units in flight
	query  *query // that they are in; nil if there is none
	heard  int64  // when the server last told the level, or failed to
}

// decide decides req by what is known here, and appends to w.outcomes.
func (rs *reports) decide(req Request, now int64, w *scratch) []outcome {
	f, dst := rs.store.fallback, w.outcomes
	f.mu.Lock()
	defer f.mu.Unlock()
	for i := range req.Buckets {
		b := &req.Buckets[i]
		partition, hash := f.memory.locate(b)
		partition.sized(b.Limit.Size)
		w.inFlight = append(w.inFlight, rs.inFlight(hash, b.Limit.Size))
	}
	before := len(dst)
	dst = f.memory.take(w, req, dst, &standIn{inFlight: w.inFlight, late: f.timeout, peek: true})
	denied := req.denied(dst[before:])
	for i := range req.Buckets {
		b, o, hash := &req.Buckets[i], &dst[before+i], w.places[i].hash
		o.by, o.blocked = DecidedByReport, false
		switch {
		case o.denied:
			rs.refresh(b, hash, now)
		case !denied || req.Accounting == AccountingEach:
			var at moment // any will do, if drips are not aligned to the time
			if b.Limit.Aligned {
				at.unix = time.Now().UnixMicro()
			}
			o.ahead = b.Limit.atLeast(o.after(at.now), b.Cost, at).ahead(at.now)
			rs.add(b, hash, now)
		}
	}
	return dst
}

// inFlight returns the units of a bucket that its server does not know of or has not
// answered for, at most most.
func (rs *reports) inFlight(hash uint64, most int64) (units int64) {
	f, own := rs.store.fallback, int32(0)
	p := rs.of[hash]
	if p != nil {
		units = p.sent
		if p.query != nil && p.query.counted {
			own = 1
		}
	}
	if f.marks[hash%marks] > own { // of other buckets, or of requests that a server decides
		units = max(units, f.units(hash, most, ""))
	}
	if p != nil {
		units += p.units
	}
	return min(units, most)
}

// report returns the report of b.
func (rs *reports) report(b *Bucket, hash uint64, now int64) *report {
	p := rs.of[hash]
	if p == nil {
		p = &report{bucket: *b, heard: now}
		p.bucket.Name, p.bucket.Key = strings.Clone(b.Name), strings.Clone(b.Key)
		if rs.of == nil {
			rs.of = make(map[uint64]*report)
		}
		rs.of[hash] = p
	}
	return p
}

// add adds a request on b to what is reported.
func (rs *reports) add(b *Bucket, hash uint64, now int64) {
	p := rs.report(b, hash, now)
	p.units += b.Cost
	if p.due == 0 {
		rs.enqueue(p, now+b.Consistency.reports().Microseconds())
	}
	if p.query == nil && p.due > now && (p.units >= b.Limit.Size/reportShare || len(rs.queue) >= reportKeys) {
		p.due = now
		rs.wakeBy(now)
	}
}

// refresh asks the server for the level of b, which is full here, if it has told none for
// long.
func (rs *reports) refresh(b *Bucket, hash uint64, now int64) {
	p := rs.report(b, hash, now)
	if p.due == 0 && p.query == nil && now-p.heard >= refreshAfter.Microseconds() {
		rs.enqueue(p, now)
	}
}

// enqueue has p sent at some time.
func (rs *reports) enqueue(p *report, due int64) {
	p.due = due
	rs.queue = append(rs.queue, p)
	rs.wakeBy(due)
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
		wait, more := rs.sendDue()
		if !more {
			return
		}
		timer.Reset(wait)
	}
}

// flush has all that has not been reported sent now. It does not wait for that.
func (rs *reports) flush() {
	f := rs.store.fallback
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(rs.queue) == 0 {
		return
	}
	now := rs.store.clock().Microseconds()
	for _, p := range rs.queue {
		p.due = min(p.due, now)
	}
	rs.wakeBy(now)
}

// sendDue sends what is due, and returns when to do so again, unless nothing is left.
func (rs *reports) sendDue() (wait time.Duration, more bool) {
	f, now := rs.store.fallback, rs.store.clock().Microseconds()
	f.mu.Lock()
	due := make([]*report, 0, len(rs.queue))
	all, waiting := len(rs.queue) >= reportKeys || rs.store.closed.Load(), rs.queue[:0]
	rs.next = now + refreshAfter.Microseconds()
	for _, p := range rs.queue {
		if p.query != nil || !all && p.due > now {
			waiting = append(waiting, p)
			if p.query == nil { // otherwise its answer wakes run
				rs.next = min(rs.next, p.due)
			}
			continue
		}
		p.query = rs.store.query(Request{Buckets: []Bucket{p.bucket}}, whatReport)
		p.query.buckets[0].cost = p.units
		p.sent, p.units, p.due = p.units, 0, 0
		due = append(due, p)
	}
	clear(rs.queue[len(waiting):])
	rs.queue = waiting
	rs.sweep(now)
	more = len(rs.of) > 0 && !rs.store.closed.Load()
	rs.running = more
	wait = time.Duration(rs.next-now) * time.Microsecond
	f.mu.Unlock()
	for _, p := range due {
		rs.send(p, p.query)
	}
	return wait, more
}

// send sends q, which reports p.
func (rs *reports) send(p *report, q *query) {
	q.Done = func(err error) { rs.answered(p, q, err) }
	end := redisscript.Deadline{At: time.Now().Add(rs.store.timeout)}
	if err := rs.store.client.Submit(end, &q.Call); err != nil {
		rs.answered(p, q, err)
	}
}

// answered records the answer to q, which has reported p.
func (rs *reports) answered(p *report, q *query, err error) {
	r := rs.store
	var outcomes []outcome
	if err == nil {
		outcomes, _, err = q.outcomes(nil)
	}
	switch {
	case err == nil:
		r.answered(q, outcomes)
	case p.sent > 0:
		r.fallback.charge(q)
	default:
		r.fallback.drop(q)
	}
	f := r.fallback
	f.mu.Lock()
	defer f.mu.Unlock()
	now := r.clock().Microseconds()
	p.query, p.sent, p.heard = nil, 0, now
	if p.due != 0 {
		rs.wakeBy(min(p.due, now))
	}
}

// sweep removes reports of buckets about which nobody has asked lately.
func (rs *reports) sweep(now int64) {
	if now-rs.swept < refreshAfter.Microseconds() && len(rs.of) < 2*len(rs.queue)+reportKeys {
		return
	}
	rs.swept = now
	for hash, p := range rs.of {
		if p.query == nil && p.due == 0 && now-p.heard >= refreshAfter.Microseconds()/2 {
			delete(rs.of, hash)
		}
	}
}

// close sends what is left, and waits for the answers for no longer than a request would.
func (rs *reports) close() {
	f := rs.store.fallback
	if f == nil {
		return
	}
	rs.sendDue()
	for end := time.Now().Add(rs.store.timeout); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if !rs.inProgress() {
			return
		}
	}
}

// inProgress reports whether any report has not been answered, or waits for that to be sent.
func (rs *reports) inProgress() bool {
	f := rs.store.fallback
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, p := range rs.of {
		if p.query != nil || p.due != 0 {
			return true
		}
	}
	return false
}

// forget forgets what is to be reported of b, which has been emptied.
func (rs *reports) forget(b *Bucket) {
	f := rs.store.fallback
	if f == nil || b.Consistency.reports() == 0 {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if p := rs.of[f.memory.hash(b)]; p != nil {
		p.units = 0
	}
}

// unreported returns how many units of b the server may not know of. The fallback's lock
// must be held.
func (rs *reports) unreported(b *Bucket) int64 {
	if p := rs.of[rs.store.fallback.memory.hash(b)]; p != nil {
		return p.units + p.sent
	}
	return 0
}
