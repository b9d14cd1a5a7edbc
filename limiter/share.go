package limiter

import "github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"

// If no bucket may be evicted (see Bucket.ShareKey), keys that find their limit
// full share buckets. Shared buckets are kept apart from buckets of keys and do not
// count towards MaxKeys. Their number is capped too: when there are too many
// ShareKeys, the remaining ones share one bucket.

// shareBuckets appends the buckets to dst, replacing those that have to be shared.
// A level that is carried over from a shared bucket to a key's own is marked dirty
// as given.
func (m *Memory) shareBuckets(buckets []Bucket, as dirtiness, dst []Bucket) []Bucket {
	changed := append(dst, buckets...)
	for i := range changed {
		b := &changed[i]
		if b.ShareKey == "" {
			continue
		}
		m.share(b, as)
		for j := range i {
			// A request must not name one bucket twice.
			if a := &changed[j]; b.shared && a.sameKey(b) && a.limitID() == b.limitID() {
				b.Key += "\x00"
			}
		}
	}
	return changed
}

// share replaces b by the shared bucket of its ShareKey if b does not exist and
// there is no room for it. If there is room, b starts at the level of the shared
// bucket.
func (m *Memory) share(b *Bucket, as dirtiness) {
	p := m.location(b)
	u := p.partition.usage
	if p.partition.id.rate != otherNames {
		u.agree(b.MaxKeys, true)
	}
	if u.shared.Load() == 0 && !m.full(u) {
		return
	}
	if m.lock(&p); p.table.has(p.hash) {
		p.table.mu.Unlock()
		return
	}
	p.table.mu.Unlock()

	now := m.clock().Microseconds()
	full := m.full(u)
	for table, n := p.hash, 0; full && n < 3; table, n = anyTable(), n+1 {
		// One sample may hit a table that many buckets have already left.
		full = !m.forget(p.partition, table, p.hash, now, true)
	}
	common, s := m.common(b, u)
	if full {
		u.onShared.Add(1)
		*b = common
		return
	}
	if s.Clear <= now {
		return
	}
	m.lock(&p)
	if !p.table.has(p.hash) {
		p.dirty = as
		m.put(&p, s, now)
	}
	p.table.mu.Unlock()
}

// common returns the bucket that b's key shares with all other keys of its
// ShareKey, and its level.
func (m *Memory) common(b *Bucket, u *usage) (Bucket, bucket.Level) {
	common := *b
	common.shared, common.Key, common.ShareKey = true, b.ShareKey, ""
	s, known := m.stored(&common)
	if !known && u.shared.Load() >= max(m.room(u)/8, minShared) {
		common.Key = ""
		s, _ = m.stored(&common)
	}
	return common, s
}

// sharedBy returns the bucket whose level counts for b's key because it has no
// bucket of its own, and whether there is one: that which the key has to share, or
// that whose level its own will start at. It changes nothing.
func (m *Memory) sharedBy(b Bucket) (Bucket, bool) {
	part := m.directory.Load().partition(b.limitID())
	if b.ShareKey == "" || part == nil || part.usage.shared.Load() == 0 && !m.full(part.usage) {
		return b, false
	}
	if _, known := m.stored(&b); known {
		return b, false
	}
	common, s := m.common(&b, part.usage)
	if !m.full(part.usage) && s.Clear <= m.clock().Microseconds() {
		return b, false
	}
	return common, true
}
