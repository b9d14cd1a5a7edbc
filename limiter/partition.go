package limiter

import (
	"math/bits"
	"sync/atomic"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
)

// A Memory keeps the buckets of each limit in tables of their own, a partition, so
// that no limit takes another's room. Buckets are counted and capped for each
// Name; several limits with different drips may have the same Name.

const (
	// tables is the number of tables in a partition: enough that with a million
	// buckets one table is rebuilt within some tens of microseconds.
	tables = 256

	// maxPartitions is the maximum number of partitions, and maxShapes of the partitions of
	// one Name. Further limits share one partition per Name; when there are too
	// many Names, they all share one.
	maxPartitions = 4096
	maxShapes     = 64

	// sweepEvery is the minimum time, in µs, between two sweeps. sweepSteps of
	// them sweep every table once: in ten seconds.
	sweepSteps = 1024
	sweepEvery = 10_000_000 / sweepSteps
)

// The drip rates that mark partitions for limits that have none of their own.
const (
	otherShapes = -1 // for limits of one Name
	otherNames  = -2
)

// limitID identifies a limit, and so a partition.
type limitID struct {
	name      string
	rate      time.Duration
	dripSize  int64
	aligned   bool
	algorithm bucket.Algorithm
	cold      uint32 // the cold factor
	phase     time.Duration
	shared    bool // whether these are shared buckets
}

// limitID returns the identity of b's limit.
func (b *Bucket) limitID() limitID {
	l := &b.Limit
	return limitID{
		name: b.Name, rate: l.DripInterval, dripSize: l.DripSize, aligned: l.Aligned, algorithm: l.Algorithm, cold: l.ColdFactor,
		phase: l.Phase, shared: b.shared,
	}
}

// bucket returns a bucket of the limit, without a key.
func (id limitID) bucket() Bucket {
	return Bucket{
		Name: id.name,
		Limit: Limit{
			DripInterval: id.rate, DripSize: id.dripSize, Aligned: id.aligned, Algorithm: id.algorithm, ColdFactor: id.cold,
			Phase: id.phase,
		},
		shared: id.shared,
	}
}

// partition holds the buckets of one limit, or of several that have no partition
// of their own.
type partition struct {
	tables  [tables]table // first, so that each fills a cache line of its own
	id      limitID
	limit   Limit  // of buckets with that id, without a Size
	order   uint64 // unique; tables are locked in this order
	salt    uint64 // the hash of id, by which it is found
	keySalt uint64 // that which the hashes of its buckets include, unless it is mixed
	usage   *usage
	entries []map[uint64]*bucket.EntryLog // of each table, by the hash of the bucket; nil if there can be none. See logs.go
	dead    bool                          // no longer in the directory; guarded by the lock of each table
	idle    bool                          // whether it was empty at the last sweep; guarded by Memory.mu
	marks   [tables]tableMark

	largest atomic.Int64 // the largest Size that a fallback has met
	holds   atomic.Int64 // units that are held of its buckets; it stays in the directory while there are any

	_    [64]byte // what is above is only read
	held atomic.Int64
}

// mixed reports whether p holds buckets of several limits.
func (p *partition) mixed() bool { return p.id.rate < 0 }

// sized records the Size of one of p's buckets.
func (p *partition) sized(size int64) {
	for {
		if n := p.largest.Load(); size <= n || p.largest.CompareAndSwap(n, size) {
			return
		}
	}
}

// usage holds the counters for all limits of one Name.
type usage struct {
	name    string
	maxKeys atomic.Int64 // as set by buckets, 0 if they leave it open
	keeps   atomic.Bool  // whether nothing is evicted
	entries atomic.Bool  // whether there were buckets with entries, which take more room
	parts   atomic.Int32 // number of partitions

	_         [64]byte // what is above is only read
	held      atomic.Int64
	shared    atomic.Int64 // shared buckets, not included in held
	forgotten atomic.Uint64
	onShared  atomic.Uint64 // requests decided on a shared bucket
}

// agree records a bucket's options for its limit.
func (u *usage) agree(maxKeys int, keeps bool) {
	if n := int64(maxKeys); u.maxKeys.Load() != n {
		u.maxKeys.Store(n)
	}
	if u.keeps.Load() != keeps {
		u.keeps.Store(keeps)
	}
}

// directory finds partitions. It is immutable: changes replace it.
type directory struct {
	partitions map[limitID]*partition
	bySalt     []*partition // the same by salt: a hash table with linear probing
	all        []*partition
	usages     map[string]*usage
	others     *usage // for all limits that have no partition for their Name
}

// newDirectory returns a directory of the given partitions and usages.
func newDirectory(all []*partition, usages map[string]*usage, others *usage) *directory {
	d := &directory{map[limitID]*partition{}, nil, all, usages, others}
	d.bySalt = make([]*partition, 2<<bits.Len(uint(len(all))))
	for _, p := range all {
		d.partitions[p.id] = p
		i := p.salt
		for d.bySalt[i%uint64(len(d.bySalt))] != nil {
			i++
		}
		d.bySalt[i%uint64(len(d.bySalt))] = p
	}
	return d
}

// partition returns the partition of a limit, or nil if there is none.
func (d *directory) partition(id limitID) *partition {
	if p := d.partitions[id]; p != nil {
		return p
	}
	for _, rate := range [...]time.Duration{otherShapes, otherNames} {
		if p := d.partitions[id.other(rate)]; p != nil {
			return p
		}
	}
	return nil
}

// other returns the identity of the partition that limits like id share if they
// have none of their own.
func (id limitID) other(rate time.Duration) limitID {
	if rate == otherNames {
		id.name = ""
	}
	return limitID{name: id.name, rate: rate, shared: id.shared}
}

// location is where one bucket of a request is, and what was found there.
type location struct {
	hash      uint64
	partition *partition
	table     *table
	level     bucket.Level
	inFlight  int64 // units that another store may still admit, or that are held

	dirty   dirtiness // whether another store may know less than this one
	unsure  bool      // whether a denial makes the bucket dirty
	found   bool      // whether it holds something
	fits    bool
	blocked bool // whether it lacks room only because of units in flight
	skipped bool // whether a bucket that watches it has no room, or it is a pool of which nothing is borrowed
	entered bool // whether the bucket is new

	made    bool             // whether the entries were made again, from the summary
	entries *bucket.EntryLog // of a bucket that has a log, which decides; otherwise nil
	claimed int64            // next to a log: what is in flight, and what other keys of the request will have added
}
