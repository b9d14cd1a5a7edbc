package limiter

import (
	"math/bits"
	"sync"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
)

// table is an open-addressing hash table with linear probing.
type table struct {
	mu      sync.Mutex
	used    int
	slots   []slot
	digests []keyDigest // as many as slots, or nil
}

// slot holds one bucket. A clear time of 0 marks a free slot; no bucket has it,
// because a bucket is stored only after something was put into it. The rest r of
// a dirty bucket is stored as -1 - r, minus 2^50 for each step from unsure to its
// dirtiness.
type slot struct {
	hash uint64
	bucket.Level
}

// keyDigest is the digest of whose bucket it is, as in the name of its Redis key.
// It is zero if no server was queried about the bucket.
type keyDigest [16]byte

// dirtiness says whether the other store, whose fallback this one is, may know
// less of a bucket than this one does.
type dirtiness int8

const (
	clean  dirtiness = iota
	unsure           // the other store may have lost what it knew
	behind           // something was admitted here that the other store does not know
	own              // besides, it may drip at other times there: it was found empty here, or the store is another
)

// encodeRest encodes the rest of a level and a dirtiness as one number.
func encodeRest(rest int64, dirty dirtiness) int64 {
	if dirty == clean {
		return rest
	}
	return -1 - rest - int64(dirty-unsure)<<50
}

// decodeRest is the inverse of encodeRest.
func decodeRest(rest int64) (int64, dirtiness) {
	if rest >= 0 {
		return rest, clean
	}
	rest = -1 - rest
	return rest & (1<<50 - 1), unsure + dirtiness(rest>>50)
}

// stored returns the level of the bucket in s.
func (s *slot) stored() bucket.Level {
	rest, _ := decodeRest(s.Rest)
	return bucket.Level{Clear: s.Clear, Rest: rest}
}

// get returns the level of the bucket with the given hash, zero if there is none,
// and its dirtiness.
func (t *table) get(hash uint64) (s bucket.Level, dirty dirtiness) {
	if t.used == 0 {
		return bucket.Level{}, clean
	}
	s = t.slots[t.find(hash)].Level
	s.Rest, dirty = decodeRest(s.Rest)
	return s, dirty
}

// has reports whether t has a bucket with the given hash.
func (t *table) has(hash uint64) bool { return t.used > 0 && t.slots[t.find(hash)].Clear != 0 }

// cleanSlot returns the slot of the bucket with the given hash, or nil if there is none
// or it is dirty.
func (t *table) cleanSlot(hash uint64) *slot {
	if t.used == 0 {
		return nil
	}
	s := &t.slots[t.find(hash)]
	if s.Clear == 0 || s.Rest < 0 {
		return nil
	}
	return s
}

// put stores a bucket. It returns by how much the number of buckets has grown, and
// whether this one is new.
func (t *table) put(hash uint64, s bucket.Level, dirty dirtiness, now int64) (more int, entered bool) {
	s.Rest = encodeRest(s.Rest, dirty)
	i := -1
	if len(t.slots) > 0 {
		i = t.find(hash)
	}
	if i < 0 || t.slots[i].Clear == 0 {
		if t.used >= len(t.slots)*7/8 {
			more = -t.rebuild(t.live(now)+1, now)
			i = t.find(hash)
		}
		t.used++
		more++
		entered = true
	}
	t.slots[i] = slot{hash: hash, Level: s}
	return more, entered
}

// digest returns where the digest of the bucket with the given hash is, which must be in t.
func (t *table) digest(hash uint64) *keyDigest {
	if len(t.digests) != len(t.slots) {
		t.digests = make([]keyDigest, len(t.slots))
	}
	return &t.digests[t.find(hash)]
}

// remove removes the bucket in the i-th slot and returns its digest. Buckets
// behind it that would no longer be found move up.
func (t *table) remove(i int) (digest keyDigest) {
	if t.digests != nil {
		digest = t.digests[i]
	}
	for j := i; ; {
		if j++; j == len(t.slots) {
			j = 0
		}
		if t.slots[j].Clear == 0 {
			break
		}
		home := t.home(t.slots[j].hash)
		if i < j && (i < home && home <= j) || j < i && (i < home || home <= j) {
			continue // its home is behind the free slot
		}
		t.slots[i] = t.slots[j]
		if t.digests != nil {
			t.digests[i] = t.digests[j]
		}
		i = j
	}
	t.slots[i] = slot{}
	if t.digests != nil {
		t.digests[i] = keyDigest{}
	}
	t.used--
	return digest
}

// emptiest looks at up to n buckets from the i-th slot on, and returns how many it
// saw. If one of them is emptier than best, or best is still zero, it is copied to
// best. It skips the bucket with hash except.
func (t *table) emptiest(i, n int, except uint64, order *emptiness, best *slot) (seen int) {
	for range t.slots {
		if s := &t.slots[i]; s.Clear != 0 && s.hash != except {
			if best.Clear == 0 || order.less(s, best) {
				*best = *s
			}
			if seen++; seen == n {
				break
			}
		}
		if i++; i == len(t.slots) {
			i = 0
		}
	}
	return seen
}

// home returns the index of the preferred slot for the given hash.
func (t *table) home(hash uint64) int {
	home, _ := bits.Mul64(hash, uint64(len(t.slots)))
	return int(home) // less than len(t.slots)
}

// find returns the index of the slot that holds the bucket with the given hash, or
// of the free slot where it belongs. At least one slot must be free.
func (t *table) find(hash uint64) int {
	i := t.home(hash)
	for t.slots[i].Clear != 0 && t.slots[i].hash != hash {
		if i++; i == len(t.slots) {
			i = 0
		}
	}
	return i
}

// live returns the number of buckets in t that have not drained.
func (t *table) live(now int64) int {
	n := 0
	for i := range t.slots {
		if t.slots[i].Clear > now {
			n++
		}
	}
	return n
}

// rebuild removes drained buckets and makes room for n buckets plus half as many
// again. It returns how many buckets it removed.
func (t *table) rebuild(n int, now int64) int {
	slots, digests, before := t.slots, t.digests, t.used
	t.slots, t.digests, t.used = nil, nil, 0
	if n == 0 {
		return before
	}
	t.slots = make([]slot, n+n/2+4)
	if digests != nil {
		t.digests = make([]keyDigest, len(t.slots))
	}
	for i, s := range slots {
		if s.Clear > now {
			j := t.find(s.hash)
			t.slots[j] = s
			if digests != nil {
				t.digests[j] = digests[i]
			}
			t.used++
		}
	}
	return before - t.used
}

// tableMark is what all buckets of a table have in common. The lock of the table guards it.
type tableMark struct {
	epoch uint64 // for which the dirtiness in the table holds, see Memory.epoch
	alone uint16 // how often the Memory has decided on one of them alone, while servers led: modulo 2^16, as a word more in each query is slower
}

// emptiness is an order of the buckets in one partition, emptiest first.
type emptiness struct {
	limit *Limit // how they drip; nil if they drip one unit at a time, or if that is unknown
	now   int64
}

// less reports whether the bucket in a is emptier than that in b: it holds fewer
// units or, with equally many, drains sooner. Buckets that drip one unit at a time
// hold fewer if they drain sooner.
func (e *emptiness) less(a, b *slot) bool {
	if e.limit == nil {
		return a.Clear < b.Clear
	}
	x, y := e.limit.of().Units(a.stored(), e.now), e.limit.of().Units(b.stored(), e.now)
	return x < y || x == y && a.Clear < b.Clear
}
