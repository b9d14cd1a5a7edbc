// Package logqueue writes log lines in the background. A log may be a pipe that nothing
// reads, and then writing to it blocks; a request must not.
package logqueue

import (
	"errors"
	"os"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// Max is the maximum number of lines that wait to be written, besides the one that is being
// written.
const Max = 256

// droppedField is the field of a line that has the number of lines that were dropped since
// the last one that was written.
const droppedField = "lines_dropped"

// Queue writes the lines of its loggers one after the other, in the order in which they
// were logged, on a goroutine that runs as long as any wait. If too many wait, a line of
// the lowest level among them is dropped, the oldest first: many lines about requests do
// not displace one about Redis. The zero value is an empty queue.
type Queue struct {
	mu      sync.Mutex
	waiting []*zapcore.CheckedEntry
	dropped int           // since a line was last written
	written chan struct{} // closed when no line waits; nil if none does
}

// Logger returns a logger that writes what log would write, without waiting for that.
// Whether a line is written, its time and its fields are settled when it is logged.
func (q *Queue) Logger(log *zap.Logger) *zap.Logger {
	return log.WithOptions(zap.WrapCore(func(c zapcore.Core) zapcore.Core { return &core{c, q} }))
}

// Flush waits until no line waits to be written, but no longer than patience. It reports
// whether that is so.
func (q *Queue) Flush(patience time.Duration) bool {
	q.mu.Lock()
	written := q.written
	q.mu.Unlock()
	if written == nil {
		return true
	}
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-written:
		return true
	case <-timer.C:
		return false
	}
}

// add queues a line. It does not block.
func (q *Queue) add(line *zapcore.CheckedEntry) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.waiting = append(q.waiting, line)
	if len(q.waiting) > Max {
		lowest := 0
		for i, other := range q.waiting {
			if other.Level < q.waiting[lowest].Level {
				lowest = i
			}
		}
		q.waiting = slices.Delete(q.waiting, lowest, lowest+1)
		q.dropped++
	}
	if q.written == nil {
		q.written = make(chan struct{})
		go q.write()
	}
}

// write writes lines until none waits.
func (q *Queue) write() {
	for {
		line, dropped := q.next()
		switch {
		case line == nil:
			return
		case dropped > 0:
			line.Write(zap.Int(droppedField, dropped))
		default:
			line.Write()
		}
	}
}

// next returns the next line, or nil if none waits, and how many were dropped.
func (q *Queue) next() (line *zapcore.CheckedEntry, dropped int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.waiting) == 0 {
		close(q.written)
		q.waiting, q.written = nil, nil
		return nil, 0
	}
	line, dropped = q.waiting[0], q.dropped
	q.waiting, q.dropped = slices.Delete(q.waiting, 0, 1), 0
	return line, dropped
}

// core queues the lines that another core would write.
type core struct {
	zapcore.Core
	queue *Queue
}

// With implements zapcore.Core.
func (c *core) With(fields []zapcore.Field) zapcore.Core { return &core{c.Core.With(fields), c.queue} }

// Check implements zapcore.Core.
func (c *core) Check(e zapcore.Entry, checked *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if !c.Enabled(e.Level) {
		return checked
	}
	return checked.AddCore(e, c)
}

// Write implements zapcore.Core. The fields may be of things that change after the request,
// so they are encoded here. Filters and samplers decide here as well.
func (c *core) Write(e zapcore.Entry, fields []zapcore.Field) error {
	if line := c.Core.With(fields).Check(e, nil); line != nil {
		line.ErrorOutput = errorOutput
		c.queue.add(line)
	}
	return nil
}

// Sync implements zapcore.Core: it waits for the lines that are queued, but not for long.
func (c *core) Sync() error {
	if !c.queue.Flush(syncWait) {
		return errors.New("lines of the log still wait to be written")
	}
	return nil
}

// syncWait is how long Sync waits.
const syncWait = time.Second

// errorOutput gets the errors of writing, as with other loggers.
var errorOutput = zapcore.Lock(os.Stderr)
