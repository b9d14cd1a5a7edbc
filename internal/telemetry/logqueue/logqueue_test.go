package logqueue

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// output is where lines are written to, while it is read: once that is closed.
type output struct {
	read chan struct{}
	text strings.Builder
}

// Write implements io.Writer.
func (o *output) Write(b []byte) (int, error) {
	<-o.read
	return o.text.Write(b)
}

// Sync implements zapcore.WriteSyncer.
func (*output) Sync() error { return nil }

// newCore returns a core that writes level, name, message and fields of lines to o.
func newCore(o *output, level zapcore.Level) zapcore.Core {
	return zapcore.NewCore(zapcore.NewConsoleEncoder(zapcore.EncoderConfig{
		MessageKey: "msg", LevelKey: "level", NameKey: "logger", ConsoleSeparator: " ",
		EncodeLevel: zapcore.LowercaseLevelEncoder,
	}), o, level)
}

// Guards what is written of lines that were logged while nothing read the log: in order, as
// the filters of the log say, with the fields as they were then; and which lines are dropped
// if there are too many.
func TestLinesWait(t *testing.T) {
	t.Parallel()
	many := func(n int, log func(string, ...zap.Field)) {
		for i := range n {
			log(fmt.Sprint(i))
		}
	}
	tests := map[string]struct {
		log   func(*zap.Logger)
		want  []string // the first lines; of those between, the test says nothing
		last  string
		lines int
	}{
		"order": {
			func(l *zap.Logger) {
				l.Named("a").With(zap.Int("n", 1)).Warn("one", zap.String("of", "a"))
				l.Named("b").Info("two")
				l.Named("a").Error("three")
			},
			[]string{`warn x.a one {"n": 1, "of": "a"}`, `info x.b two`, `error x.a three`}, `error x.a three`, 3,
		},
		"levels": {
			func(l *zap.Logger) {
				l.Debug("hidden")
				l.Info("shown")
			},
			[]string{`info x shown`}, `info x shown`, 1,
		},
		"fields": {
			func(l *zap.Logger) {
				text := []string{"before"}
				l.Info("changed", zap.Stringer("text", (*changing)(&text[0])))
				text[0] = "after"
			},
			[]string{`info x changed {"text": "before"}`}, `info x changed {"text": "before"}`, 1,
		},
		"the oldest of the lowest level are dropped": {
			func(l *zap.Logger) {
				l.Error("first")
				many(Max+9, l.Info)
				l.Warn("last")
			},
			[]string{`error x first {"lines_dropped": 11}`, `info x 11`}, `warn x last`, Max,
		},
		"lines of a lower level than all others are dropped": {
			func(l *zap.Logger) {
				many(Max, l.Error)
				l.Info("dropped")
				l.Error("last")
			},
			[]string{`error x 1 {"lines_dropped": 2}`}, `error x last`, Max,
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				o := output{read: make(chan struct{})}
				var q Queue
				log := q.Logger(zap.New(newCore(&o, zap.InfoLevel)).Named("x"))
				log.Error("is being written")
				synctest.Wait()
				tc.log(log)
				close(o.read)
				if !q.Flush(time.Second) {
					t.Fatal("lines are not written")
				}
				got := strings.Split(strings.TrimSpace(o.text.String()), "\n")[1:]
				if len(got) != tc.lines || got[len(got)-1] != tc.last {
					t.Fatalf("got %d lines, the last %q, want %d, %q", len(got), got[len(got)-1], tc.lines, tc.last)
				}
				for i, want := range tc.want {
					if got[i] != want {
						t.Errorf("line %d: got %s, want %s", i, got[i], want)
					}
				}
			})
		})
	}
}

// changing is text that changes after it was logged.
type changing string

// String implements fmt.Stringer.
func (c *changing) String() string { return string(*c) }

// Guards that a sampler decides on lines when they are logged, each once.
func TestSampling(t *testing.T) {
	t.Parallel()
	o := output{read: make(chan struct{})}
	close(o.read)
	var q Queue
	log := q.Logger(zap.New(zapcore.NewSamplerWithOptions(newCore(&o, zap.InfoLevel), time.Hour, 3, 4)))
	for range 11 {
		log.Info("again", zap.Int("n", 1))
	}
	q.Flush(time.Minute)
	if got := strings.Count(o.text.String(), "again"); got != 5 { // 1, 2, 3, 7, 11
		t.Errorf("got %d lines, want 5", got)
	}
}

// Guards that flushing a log that nothing reads takes no longer than documented.
func TestFlushEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		o := output{read: make(chan struct{})}
		var q Queue
		log := q.Logger(zap.New(newCore(&o, zap.InfoLevel)))
		if !q.Flush(0) {
			t.Error("an empty queue is not flushed")
		}
		log.Info("waits")
		begun := time.Now()
		if q.Flush(time.Second) || time.Since(begun) != time.Second {
			t.Errorf("a flush ended after %v, want false after 1s", time.Since(begun))
		}
		close(o.read)
		if !q.Flush(time.Second) {
			t.Error("the log is read, and not flushed")
		}
	})
}
