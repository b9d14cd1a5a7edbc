package limiter

import (
	"encoding/binary"
	"hash/crc32"
	"io"
	"slices"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
)

// What Save writes, in little-endian order. Times are in µs.
//
//	"rlbucket", the format (4 bytes), the key of the hashes of buckets (16)
//	pieces of what follows: the length (4), so many bytes, the CRC-32C of all bytes so far (4)
//	the last piece, which has no bytes
//
// In the pieces:
//
//	for each limit that has buckets:
//	    1 (1 byte), the limit, see saver.limit
//	    for each of its tables that has some: their number (4), and for each bucket
//	        its hash (8), the time left until it has drained (8), the rest (8)
//	        if the limit keeps logs: the number of entries (4) and, if that is not 0,
//	            the window (8), the time that entries count from (8), the entries (8 each)
//	    0 (4)
//	0 (1)
//	how long Save took (8), the time of day at its end (8)
//
// Who reads it ends at the first piece that is damaged, however long a file is. Times left and those of logs count from when Save began.
const (
	savedMagic  = "rlbucket"
	savedHead   = len(savedMagic) + 4 + 16
	savedPiece  = 1 << 16 // the longest
	savedTail   = 8 + 8
	savedBucket = 8 + 8 + 8
)

// SavedFormat is the number of the format in which [Memory.Save] writes: the only one that
// [Memory.Load] reads.
const SavedFormat = 1

// Saved is what Save has written, or Load has read.
type Saved struct {
	Buckets int       // their number, without those that have drained
	At      time.Time // when they were saved
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Save writes all buckets to w, for another process to [Memory.Load]. It may be called at any
// time. What is charged meanwhile may be missing, and so are the units that requests hold (see
// [Limiter.Hold]). Of the keys it writes hashes, and the key of that hash: who reads them can
// find out whether a key that they guess has a bucket.
func (m *Memory) Save(w io.Writer) (Saved, error) {
	s := saver{w: w, begun: m.clock().Microseconds()}
	m.savedAt.Store(s.begun)
	s.buf = append(s.buf, savedMagic...)
	s.put32(SavedFormat)
	s.put64(int64(m.key[0]))
	s.put64(int64(m.key[1]))
	s.head()
	buckets := 0
	for _, p := range m.directory.Load().all { // in this order, they are made anew as they are
		buckets += s.partition(p)
	}
	m.savedClear.Store(s.begun + s.left)
	end := m.clock().Microseconds()
	unix := m.unix(end)
	s.buf = append(s.buf, 0)
	s.put64(end - s.begun)
	s.put64(unix)
	s.flush()
	s.piece(nil)
	return Saved{buckets, time.UnixMicro(unix)}, s.err
}

// Unsaved returns the time until all buckets have drained, and those that were saved or loaded
// last, if any request was decided or any bucket reset since then, and otherwise 0. If it is
// short, little would be lost with this process, and nothing that was reset would come back.
func (m *Memory) Unsaved() (lasts time.Duration) {
	if m.sweptAt.Load()+sweepEvery < m.savedAt.Load() {
		return 0
	}
	now := m.clock().Microseconds()
	lasts = time.Duration(max(m.savedClear.Load()-now, 0)) * time.Microsecond
	for _, p := range m.directory.Load().all {
		for i := range p.tables {
			t := &p.tables[i]
			t.mu.Lock()
			for j := range t.slots {
				lasts = max(lasts, time.Duration(t.slots[j].Clear-now)*time.Microsecond)
			}
			t.mu.Unlock()
		}
	}
	return lasts
}

// saver writes a Memory.
type saver struct {
	w     io.Writer
	err   error
	sum   uint32 // of what was written
	begun int64
	left  int64 // the longest of the times left
	buf   []byte
}

func (s *saver) put32(v uint32) { s.buf = binary.LittleEndian.AppendUint32(s.buf, v) }
func (s *saver) put64(v int64)  { s.buf = binary.LittleEndian.AppendUint64(s.buf, uint64(v)) }

// head writes what is in the buffer as it is.
func (s *saver) head() {
	s.sum = crc32.Checksum(s.buf, castagnoli)
	s.write(s.buf)
	s.buf = s.buf[:0]
}

// flush writes what is in the buffer, in pieces.
func (s *saver) flush() {
	for piece := range slices.Chunk(s.buf, savedPiece) {
		s.piece(piece)
	}
	s.buf = s.buf[:0]
}

// piece writes a piece.
func (s *saver) piece(b []byte) {
	s.sum = crc32.Update(s.sum, castagnoli, b)
	s.write(binary.LittleEndian.AppendUint32(nil, uint32(len(b)))) // at most savedPiece
	s.write(b)
	s.write(binary.LittleEndian.AppendUint32(nil, s.sum))
}

// write writes b, unless an earlier write has failed.
func (s *saver) write(b []byte) {
	if s.err == nil {
		_, s.err = s.w.Write(b)
	}
}

// partition adds the buckets of p that have not drained, and returns how many there are.
func (s *saver) partition(p *partition) (buckets int) {
	const enough = 1 << 16
	begin := len(s.buf)
	s.buf = append(s.buf, 1)
	s.limit(p)
	for i := range p.tables {
		buckets += s.table(p, i)
		if buckets > 0 && len(s.buf) > enough {
			s.flush()
		}
	}
	if buckets == 0 {
		s.buf = s.buf[:begin]
		return 0
	}
	s.put32(0)
	return buckets
}

// limit adds which limit p is of, and how many buckets its Name may have.
func (s *saver) limit(p *partition) {
	id := &p.id
	s.put32(uint32(len(id.name))) // far less
	s.buf = append(s.buf, id.name...)
	s.put64(int64(id.rate))
	s.put64(id.dripSize)
	s.put64(int64(id.phase))
	s.put32(id.cold)
	s.buf = append(s.buf, byte(id.algorithm), asByte(id.aligned), asByte(id.shared), asByte(p.usage.keeps.Load()))
	s.put64(p.usage.maxKeys.Load())
}

func asByte(is bool) byte {
	if is {
		return 1
	}
	return 0
}

// table adds the buckets of a table of p.
func (s *saver) table(p *partition, i int) (buckets int) {
	t, begin := &p.tables[i], len(s.buf)
	s.put32(0)
	t.mu.Lock()
	for j := range t.slots {
		hash, level := t.slots[j].hash, t.slots[j].stored()
		left := level.Clear - s.begun
		if left <= 0 || left > bucket.Horizon {
			continue
		}
		var entries *bucket.EntryLog
		if p.entries != nil {
			entries = p.entries[i][hash]
		}
		if entries != nil && entries.Summary != level {
			entries = nil // it counts no longer
		}
		if entries != nil {
			if entries.Trim(s.begun); entries.Total == 0 {
				continue // from the summary, units would be made anew that have left
			}
		}
		buckets++
		s.left = max(s.left, left)
		s.put64(int64(hash))
		s.put64(left)
		s.put64(level.Rest)
		if p.entries != nil {
			s.entryLog(entries)
		}
	}
	t.mu.Unlock()
	if buckets == 0 {
		s.buf = s.buf[:begin]
		return 0
	}
	binary.LittleEndian.PutUint32(s.buf[begin:], uint32(buckets)) // far less
	return buckets
}

// entryLog adds the log of a bucket, or that it has none.
func (s *saver) entryLog(g *bucket.EntryLog) {
	if g == nil {
		s.put32(0)
		return
	}
	rate, base, entries := g.Saved()
	s.put32(uint32(len(entries))) // a few thousand
	s.put64(rate)
	s.put64(base - s.begun)
	for _, e := range entries {
		s.put64(int64(e))
	}
}
