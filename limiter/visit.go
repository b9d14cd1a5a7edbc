package limiter

import (
	"context"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
)

// Ban bans b's key for d, unless it is banned for longer already, as if its first ban had
// begun. b's Limit is made by [BanAfter].
func (m *Memory) Ban(_ context.Context, b Bucket, d time.Duration) error {
	b, s, err := b.banned(d)
	if err == nil {
		m.raise(&b, s, clean)
		m.sweep(m.clock().Microseconds())
	}
	return err
}

// Peek returns the level of b's bucket. It changes nothing. While b's key has to
// share a bucket, see Bucket.ShareKey, that one is looked at. It never waits and ignores
// the context.
func (m *Memory) Peek(_ context.Context, b Bucket) (Level, error) {
	b, err := b.prepared()
	if err != nil {
		return Level{}, err
	}
	if shared, ok := m.sharedBy(b); ok {
		b = shared
	}
	s, v := m.levelOf(&b)
	return b.inspected(s, v, m.holding.of(m.hash(&b))), nil
}

// Reset empties b's bucket and returns what it held, as Peek does. While b's key
// has to share a bucket, that one is emptied too. Requests in progress still hold what
// they held. It never waits and ignores the context.
func (m *Memory) Reset(_ context.Context, b Bucket) (Level, error) {
	b, err := b.prepared()
	if err != nil {
		return Level{}, err
	}
	s, v := m.empty(&b)
	if shared, ok := m.sharedBy(b); ok {
		b = shared
		s, v = m.empty(&b)
	}
	m.sweep(m.clock().Microseconds())
	return b.inspected(s, v, m.holding.of(m.hash(&b))), nil
}

// levelOf returns the level of b's bucket.
func (m *Memory) levelOf(b *Bucket) (bucket.Ahead, *bucket.EntriesLevel) {
	return m.visit(b, func(*location, int64) {})
}

// empty empties b's bucket and returns what it held.
func (m *Memory) empty(b *Bucket) (bucket.Ahead, *bucket.EntriesLevel) {
	return m.visit(b, m.emptyAt)
}

// emptyAt empties the bucket at p, which exists, and whose table is locked.
func (m *Memory) emptyAt(p *location, now int64) {
	p.table.slots[p.table.find(p.hash)].Level = bucket.Level{Clear: max(now, 1)} // as if it had drained just now
	m.dropEntries(p.partition, p.hash)
}

// drain empties the bucket at p, if there is one.
func (m *Memory) drain(p *location) {
	m.lock(p)
	defer p.table.mu.Unlock()
	if p.table.has(p.hash) {
		m.emptyAt(p, m.clock().Microseconds())
	}
}

// visit returns the level of b's bucket, and the one of its log if it has one. If the
// bucket exists, visit calls do with its location, whose table is locked. It makes no
// partition for a limit that has none.
func (m *Memory) visit(b *Bucket, do func(p *location, now int64)) (bucket.Ahead, *bucket.EntriesLevel) {
	part := m.directory.Load().partition(b.limitID())
	if part == nil {
		return bucket.Ahead{}, nil
	}
	hash := m.hash(b)
	p := location{hash: hash, partition: part, table: &part.tables[hash%tables]}
	m.lock(&p)
	defer p.table.mu.Unlock()
	if !p.table.has(hash) {
		return bucket.Ahead{}, nil
	}
	now := m.clock().Microseconds()
	m.look(&p, b, now)
	var v *bucket.EntriesLevel
	if b.Limit.of().KeepsEntries() && p.partition.entries != nil {
		m.openEntries(&p, b, now)
		v = p.entries.Level(b.Limit.of(), b.need(), m.holding.of(hash), now)
	}
	do(&p, now)
	return p.level.Ahead(now), v
}
