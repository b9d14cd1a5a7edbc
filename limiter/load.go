package limiter

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
)

// ErrNotSaved is wrapped by the errors of [Memory.Load] that say that what it has read is not
// what a [Memory.Save] of the same [SavedFormat] has written: another file, or a damaged one.
var ErrNotSaved = errors.New("not saved buckets")

// Load reads what [Memory.Save] has written, into a Memory that has not been used yet and is
// not used meanwhile. The time that has passed since then, by the time of day, drips; if the
// clock was set back, none has passed. After an error the Memory is as it was.
func (m *Memory) Load(r io.Reader) (Saved, error) {
	head := make([]byte, savedHead)
	if _, err := io.ReadFull(r, head); err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		return Saved{}, err
	}
	l := loader{b: head}
	switch magic, format := string(l.take(len(savedMagic))), l.get32(); {
	case magic != savedMagic:
		return Saved{}, fmt.Errorf("%w, but something else", ErrNotSaved)
	case format != SavedFormat:
		return Saved{}, fmt.Errorf("%w of format %d, but of %d", ErrNotSaved, SavedFormat, format)
	}
	body, err := readPieces(r, crc32.Checksum(head, castagnoli))
	if err != nil {
		return Saved{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.directory.Load().all) > 0 {
		return Saved{}, errors.New("the memory is in use")
	}
	l.rest(body, m)
	// All goes into a Memory of its own first: a checksum may be right by chance.
	n := NewMemoryWithClock(m.clock)
	n.seed, n.key = m.seed, sipKeyOf(head[savedHead-16:])
	buckets := 0
	for l.take(1)[0] == 1 && !l.bad {
		buckets += n.load(&l)
	}
	if l.bad || len(l.b) > 0 {
		return Saved{}, fmt.Errorf("%w, although the checksum is right", ErrNotSaved)
	}
	m.key, m.made = n.key, n.made
	m.held.Store(n.held.Load())
	m.kept.Store(n.kept.Load())
	m.shared.Store(n.shared.Load())
	m.savedAt.Store(l.now)
	m.savedClear.Store(l.clear)
	m.directory.Store(n.directory.Load())
	return Saved{buckets, l.at}, nil
}

var errDamaged = fmt.Errorf("%w: the checksum is wrong", ErrNotSaved)

// readPieces reads what is in pieces behind a head with a checksum, as far as they are right.
func readPieces(r io.Reader, sum uint32) (all []byte, err error) {
	for {
		length, err := read32(r)
		if err != nil || length > savedPiece {
			return nil, cmp.Or(err, errDamaged)
		}
		begin := len(all)
		all = append(all, make([]byte, length)...)
		if _, err := io.ReadFull(r, all[begin:]); err != nil {
			return nil, damaged(err)
		}
		sum = crc32.Update(sum, castagnoli, all[begin:])
		if want, err := read32(r); err != nil || sum != want {
			return nil, cmp.Or(err, errDamaged)
		}
		if length > 0 {
			continue
		}
		switch n, err := r.Read(make([]byte, 1)); {
		case n > 0:
			return nil, errDamaged
		case err != nil && !errors.Is(err, io.EOF):
			return nil, err
		}
		return all, nil
	}
}

// read32 reads a number.
func read32(r io.Reader) (uint32, error) {
	var b [4]byte
	_, err := io.ReadFull(r, b[:])
	return binary.LittleEndian.Uint32(b[:]), damaged(err)
}

// damaged returns errDamaged in place of an error that says that what is read ends too early.
func damaged(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return errDamaged
	}
	return err
}

// loader reads what a saver has written.
type loader struct {
	b   []byte // what is left to read
	bad bool   // whether something is missing or can't be

	at     time.Time // when it was saved
	end    int64     // the time when Save ended, on the clock of what is read
	now    int64     // on the clock of the Memory
	clear  int64     // when the last bucket will have drained, on that clock
	behind int64     // what that clock is ahead of the other one; what has passed since counts as passed on both
}

// take returns the next n bytes, or zeros if there are not as many.
func (l *loader) take(n int) (b []byte) {
	if len(l.b) < n {
		l.bad, l.b = true, nil
		return make([]byte, min(n, 8))
	}
	b, l.b = l.b[:n], l.b[n:]
	return b
}

func (l *loader) get32() uint32 { return binary.LittleEndian.Uint32(l.take(4)) }
func (l *loader) get64() int64  { return int64(binary.LittleEndian.Uint64(l.take(8))) }

// count reads how many elements follow, each of at least size bytes, or 0 if that can't be.
func (l *loader) count(size int) int {
	n := l.get32()
	if uint64(n) > uint64(len(l.b)/size) { // not negative
		l.bad = true
		return 0
	}
	return int(n)
}

// rest goes on with what is behind the head, and ends with a checksum. It reads the times first.
func (l *loader) rest(b []byte, m *Memory) {
	tail := loader{b: b[max(len(b)-savedTail, 0):]}
	end, unix := tail.get64(), tail.get64()
	l.b, l.bad = b[:max(len(b)-savedTail, 0)], tail.bad || end < 0 || end > bucket.Horizon || unix < 0 || unix > 1<<60
	l.at, l.end, l.now = time.UnixMicro(unix), end, m.clock().Microseconds()
	passed := min(max(m.unix(l.now)-unix, 0), 4*bucket.Horizon)
	l.behind = l.now - passed - end
}

// load reads the buckets of a limit, and returns how many have not drained.
func (m *Memory) load(l *loader) (buckets int) {
	id, limit, maxKeys, keeps := l.limit()
	if d := m.directory.Load(); l.bad || d.partitions[id] != nil || len(d.all) > 3*maxPartitions {
		l.bad = true
		return 0
	}
	p := m.newPartition(id)
	if p.id != id {
		l.bad = true
		return 0
	}
	if id.rate != otherNames {
		p.usage.agree(maxKeys, keeps)
	}
	for n := l.count(savedBucket); n > 0 && !l.bad; n = l.count(savedBucket) {
		at := location{partition: p}
		for i := range n {
			at = location{hash: uint64(l.get64()), partition: p}
			at.table = &p.tables[at.hash%tables]
			if i == 0 && at.table.used == 0 {
				at.table.rebuild(n, l.now) // they come in the order of a table, which is slow to fill one that grows
			}
			left, rest := l.get64(), l.get64()
			l.bad = l.bad || left <= 0 || left > bucket.Horizon || rest < 0 || rest >= limit.RestEnd()
			if p.entries != nil {
				at.entries = l.entryLog(p, limit)
			}
			if l.bad {
				return 0
			}
			clear := left + l.behind
			if at.entries != nil {
				at.entries.Trim(l.now)
			}
			if clear > l.now && (at.entries == nil || at.entries.Total > 0) {
				m.put(&at, bucket.Level{Clear: clear, Rest: rest}, l.now)
				buckets++
				l.clear = max(l.clear, clear)
			}
		}
		if at.table.used < n { // no room for those that have drained meanwhile
			at.table.rebuild(at.table.used, l.now)
		}
	}
	return buckets
}

// limit reads which limit the buckets are of that follow, and how many its Name may have.
func (l *loader) limit() (id limitID, limit *bucket.Limit, maxKeys int, keeps bool) {
	if id.name = string(l.take(l.count(1))); l.bad {
		return id, nil, 0, false
	}
	id.rate, id.dripSize, id.phase, id.cold = time.Duration(l.get64()), l.get64(), time.Duration(l.get64()), l.get32()
	is := l.take(4)
	id.algorithm, id.aligned, id.shared, keeps = bucket.Algorithm(is[0]), is[1] == 1, is[2] == 1, is[3] == 1
	most := l.get64()
	of := id.bucket().Limit
	of.Size = 1 // one that any limit may have
	limit = of.of()
	if id.rate == otherShapes || id.rate == otherNames {
		l.bad = l.bad || id != id.other(id.rate)
		limit = bucket.Widest()
	} else {
		l.bad = l.bad || limit.Check() != nil
	}
	l.bad = l.bad || most < 0 || most > 1<<31-1
	return id, limit, int(most), keeps
}

// entryLog reads the log of a bucket of p, whose limit is given, if it has one.
func (l *loader) entryLog(p *partition, limit *bucket.Limit) *bucket.EntryLog {
	n := l.count(8)
	if n == 0 || l.bad {
		return nil
	}
	rate, base := l.get64(), l.get64()
	if base < -2*bucket.Horizon || base > l.end || !p.mixed() && rate != limit.Rate() {
		l.bad = true
		return nil
	}
	entries := make([]uint64, n)
	for i := range entries {
		entries[i] = uint64(l.get64())
	}
	g := bucket.LoadEntryLog(rate, base+l.behind, entries, l.end+l.behind)
	l.bad = l.bad || g == nil
	return g
}
