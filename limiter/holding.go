package limiter

import "github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"

// hold has h settle what p's bucket, the i-th of req, now holds.
func (m *Memory) hold(req Request, i int, p *location) {
	h := &heldHere{m, p.partition, req.Buckets[i]}
	h.in.holds.Add(h.Cost)
	m.holding.add(p.hash, h.Cost)
	req.Held.hold(i, req.Buckets, h)
}

// heldHere is a bucket of which a request holds its cost in a Memory.
type heldHere struct {
	memory *Memory
	in     *partition
	Bucket
}

// settle implements holder.
func (h *heldHere) settle(charge int64) {
	h.memory.settleHeld(h.Bucket, charge)
	h.in.holds.Add(-h.Cost)
}

// chargeLater implements charger.
func (m *Memory) chargeLater(b Bucket, n int64) {
	if b.ShareKey != "" {
		m.share(&b, clean)
	}
	m.settleHeld(b, n)
}

// settleHeld releases what is held of b, its cost, and charges that much instead.
func (m *Memory) settleHeld(b Bucket, charge int64) {
	p := m.location(&b)
	m.lock(&p)
	now := m.clock().Microseconds()
	m.holding.add(p.hash, -b.Cost)
	if charge == 0 {
		p.table.mu.Unlock()
		return
	}
	m.look(&p, &b, now)
	if b.Limit.of().KeepsEntries() {
		m.openEntries(&p, &b, now)
	}
	m.decidesAlone(&p)
	b.Cost = min(charge, max(b.Cost, 2*b.Limit.Size-p.units(&b, now)))
	if p.entries != nil {
		b.Cost = min(b.Cost, bucket.MaxLogUnits)
		b.Limit.Size += b.Cost // or it would drop its oldest units
		m.settleEntries(&p, &b, now)
	} else {
		m.settle(&p, &b, now, true)
	}
	p.table.mu.Unlock()
	if p.entered {
		m.makeRoom(&p, b.MaxKeys, b.keeps(), now)
	}
	m.sweep(now)
}

// units returns how many units p's bucket has.
func (p *location) units(b *Bucket, now int64) int64 {
	if p.entries != nil {
		return int64(p.entries.Total)
	}
	return b.Limit.of().Units(p.level, now)
}
