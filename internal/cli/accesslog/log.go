package accesslog

import (
	"cmp"
	"container/heap"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync/atomic"
	"time"
)

// Requests are put in order within a window: one that arrived longer before others
// that were logged before it is not used. Windows are as long as Window, but have
// at most maxPending requests.
const (
	Window     = 5 * time.Minute
	maxPending = 50_000
)

// Log reads one or several logs as one, in the order in which requests arrived.
type Log struct {
	unopened []*source // the one that begins first is the first
	open     []*source
	pending  queue
	counts   [reasons]int64
	bytes    atomic.Int64
	size     int64
	exact    bool
	problems []string
	notes    []string
	stopped  chan struct{} // closed by Stop

	numbered int64 // requests that got a number
	newest   int64 // when the latest request so far ended
	returned int64 // when the request that was returned last arrived

	// The numbers of pending requests by the second, of logs that have no more
	// exact times, and the second whose requests are being returned.
	inSecond map[int64]int64
	spread   struct{ second, index, of int64 }
}

// Open opens logs. The name "-" is standard input. Logs may be compressed by
// gzip or zstd. They may overlap in time, and be named in any order.
func Open(names []string, format Format) (*Log, error) {
	l := &Log{exact: true, stopped: make(chan struct{}), inSecond: make(map[int64]int64)}
	for i, name := range names {
		if name == "-" && slices.Contains(names[:i], "-") {
			return nil, errors.New("logs: standard input is given twice; use it once")
		}
		s, err := newSource(name, format, &l.bytes)
		if err != nil {
			return nil, err
		}
		l.unopened = append(l.unopened, s)
	}
	l.dropCopies()
	for _, s := range l.unopened {
		l.size += s.size
		l.exact = l.exact && (s.dialect.exact || s.dialect.format == Auto)
		if s.wrapper != noWrapper {
			l.notes = append(l.notes, fmt.Sprintf("%s: the lines were taken out of %v.", s.name, s.wrapper))
		}
	}
	slices.SortStableFunc(l.unopened, func(a, b *source) int { return cmp.Compare(a.first, b.first) })
	l.bytes.Store(0)
	return l, nil
}

// dropCopies leaves out logs that are copies of others, such as the compressed ones of
// files that are given too.
func (l *Log) dropCopies() {
	kept := make([]*source, 0, len(l.unopened))
	for _, s := range slices.SortedStableFunc(slices.Values(l.unopened), compareCopies) {
		if i := slices.IndexFunc(kept, s.isCopyOf); i >= 0 {
			l.notes = append(l.notes, fmt.Sprintf("%s was left out, because it has the requests of %s, which was given too.", s.name, kept[i].name))
			s.close()
			continue
		}
		kept = append(kept, s)
	}
	l.unopened = slices.DeleteFunc(l.unopened, func(s *source) bool { return !slices.Contains(kept, s) })
	for _, s := range kept {
		s.begins = nil
	}
}

// Close stops reading.
func (l *Log) Close() {
	for _, s := range l.open {
		close(s.stop)
	}
	l.open = nil
}

// Stop ends all logs, so that Next waits for none: it returns what was read of them,
// and then io.EOF. Stop must be called at most once.
func (l *Log) Stop() { close(l.stopped) }

// Exact reports whether the times of all logs are more exact than a second.
func (l *Log) Exact() bool { return l.exact }

// Problems returns what was wrong with logs as a whole, one sentence each.
func (l *Log) Problems() []string { return l.problems }

// Notes returns what to know about how the logs were read, one sentence each.
func (l *Log) Notes() []string { return l.notes }

// Progress returns how many bytes were read, and how many there are; 0 if that is
// unknown, as with standard input. It may be called while Next is.
func (l *Log) Progress() (read, size int64) { return l.bytes.Load(), l.size }

// Counts returns the number of lines so far that were read, that were used, and
// that were not, by the reason.
func (l *Log) Counts() (lines, used int64, skipped map[Reason]int64) {
	skipped = make(map[Reason]int64)
	for reason, n := range l.counts {
		lines += n
		if r := Reason(reason); r != Used && n > 0 {
			skipped[r] = n
		}
	}
	return lines, l.counts[Used], skipped
}

// Next returns the next request, or io.EOF.
func (l *Log) Next() (*Entry, error) {
	for {
		if n := len(l.pending); n == maxPending || n > 0 && l.pending[0].Arrival <= l.newest-int64(Window) {
			return l.pop(), nil
		}
		e := l.read()
		if e == nil {
			if len(l.pending) == 0 {
				return nil, io.EOF
			}
			return l.pop(), nil
		}
		if e.Arrival < l.returned {
			l.counts[Used]--
			l.counts[Late]++
			continue
		}
		l.newest = max(l.newest, e.End)
		if !e.exact {
			l.inSecond[e.Arrival]++
		}
		l.numbered++
		e.number = l.numbered
		heap.Push(&l.pending, e)
	}
}

// pop returns the pending request that arrived first.
func (l *Log) pop() *Entry {
	e := heap.Pop(&l.pending).(*Entry)
	l.returned = e.Arrival
	if !e.exact {
		if l.spread.second != e.Arrival {
			l.spread.second, l.spread.index, l.spread.of = e.Arrival, 0, l.inSecond[e.Arrival]
		}
		e.Spread = e.Arrival + min(l.spread.index*int64(second)/l.spread.of, int64(second)-1)
		l.spread.index++
		if l.inSecond[e.Arrival]--; l.inSecond[e.Arrival] == 0 {
			delete(l.inSecond, e.Arrival)
		}
	}
	return e
}

// read returns the request of the open logs that ended first, or nil if there are
// no more. It opens a log when the others have reached where it begins.
func (l *Log) read() *Entry {
	for {
		var next *Entry
		var from *source
		for i := 0; i < len(l.open); i++ {
			s := l.open[i]
			e, err := s.head(&l.counts, l.stopped)
			if err != nil {
				l.problems = append(l.problems, err.Error())
			}
			if e == nil {
				l.open = slices.Delete(l.open, i, i+1)
				i--
			} else if next == nil || e.End < next.End {
				next, from = e, s
			}
		}
		if len(l.unopened) > 0 && (next == nil || l.unopened[0].first <= next.End) {
			s := l.unopened[0]
			l.unopened = l.unopened[1:]
			if err := s.start(); err != nil {
				l.problems = append(l.problems, err.Error())
			} else {
				l.open = append(l.open, s)
			}
			continue
		}
		if next != nil {
			from.used++
		}
		return next
	}
}

// queue is a heap of requests by arrival and, if that is equal, in the order in
// which they were added.
type queue []*Entry

func (q queue) Len() int      { return len(q) }
func (q queue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *queue) Push(x any)   { *q = append(*q, x.(*Entry)) }

func (q queue) Less(i, j int) bool {
	return cmp.Or(cmp.Compare(q[i].Arrival, q[j].Arrival), cmp.Compare(q[i].number, q[j].number)) < 0
}

func (q *queue) Pop() any {
	last := len(*q) - 1
	e := (*q)[last]
	(*q)[last] = nil
	*q = (*q)[:last]
	return e
}
