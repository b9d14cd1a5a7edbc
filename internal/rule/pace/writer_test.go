package pace

import (
	"context"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// events is a response that notes what is done to it, and when.
type events struct {
	http.ResponseWriter
	start time.Time
	all   []string
	bytes int
}

// note notes that something is done.
func (e *events) note(what string) {
	e.all = append(e.all, what+" "+time.Since(e.start).Truncate(100*time.Millisecond).String())
}

// Write implements http.ResponseWriter.
func (e *events) Write(b []byte) (int, error) {
	e.note("write")
	e.bytes += len(b)
	return len(b), nil
}

// FlushError implements flushing for http.ResponseController.
func (e *events) FlushError() error {
	e.note("flush")
	return nil
}

// TestFlushes guards when what was written before a wait is sent, and the header: before the first wait if its
// length and type are known, after a second of it if the type is, and never twice.
func TestFlushes(t *testing.T) {
	piece := func(w http.ResponseWriter) { _, _ = w.Write(make([]byte, 2000)) }
	for _, tc := range []struct {
		name   string
		header http.Header
		serve  func(w http.ResponseWriter)
		want   string // of a bucket that is empty, and gets 1 kB a second
	}{
		{"length and type", http.Header{"Content-Type": {"x/y"}, "Content-Length": {"2000"}}, piece, "flush 0s, write 2s"},
		{"no type on purpose", http.Header{"Content-Type": nil, "Content-Length": {"2000"}}, piece, "flush 0s, write 2s"},
		{"type", http.Header{"Content-Type": {"x/y"}}, piece, "flush 1s, write 2s"},
		{"length", http.Header{"Content-Length": {"2000"}}, piece, "write 2s"},
		{"nothing", http.Header{}, piece, "write 2s"},
		{"what was written", http.Header{}, func(w http.ResponseWriter) { piece(w); piece(w) }, "write 2s, flush 2s, write 4s"},
		{"what was flushed", http.Header{}, func(w http.ResponseWriter) {
			piece(w)
			_ = http.NewResponseController(w).Flush()
			piece(w)
		}, "write 2s, flush 2s, write 4s"},
		{"no body", http.Header{"Content-Length": {"2000"}}, func(w http.ResponseWriter) {
			w.WriteHeader(http.StatusNotModified)
			piece(w)
		}, "write 0s"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newSpeed(t, limiter.NewMemory(), "s", numbers{1000, LeastSize})
				_, _ = s.send(pacedBy(t.Context(), "", s), LeastSize, LeastSize)
				e := &events{ResponseWriter: httptest.NewRecorder(), start: time.Now()}
				maps.Copy(e.Header(), tc.header)
				r := httptest.NewRequest(http.MethodGet, "/", nil)
				pause := func() func() { return func() {} }
				_ = pacedBy(r.Context(), "", s).Serve(e, r, nil, pause, func(w http.ResponseWriter) error {
					tc.serve(w)
					return nil
				})
				if got := strings.Join(e.all, ", "); got != tc.want {
					t.Errorf("got %s, want %s", got, tc.want)
				}
			})
		})
	}
}

// TestFilesArePaced guards that a file is sent in pieces, each of which is read when it may be sent, and no more
// than was asked for.
func TestFilesArePaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		name := filepath.Join(t.TempDir(), "file")
		if err := os.WriteFile(name, make([]byte, 30_000), 0o600); err != nil {
			t.Fatal(err)
		}
		f, err := os.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		s := newSpeed(t, limiter.NewMemory(), "s", numbers{10_000, LeastSize})
		e := &events{ResponseWriter: httptest.NewRecorder(), start: time.Now()}
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		_ = pacedBy(r.Context(), "", s).Serve(e, r, nil, func() func() { return func() {} }, func(w http.ResponseWriter) error {
			for _, tc := range [][2]int64{{0, 0}, {20_000, 20_000}, {15_000, 10_000}, {5, 0}} {
				if sent, err := io.CopyN(w, f, tc[0]); sent != tc[1] || (err == nil) != (tc[0] == tc[1]) {
					t.Errorf("sent %d of %d bytes, %v", sent, tc[0], err)
				}
			}
			return nil
		})
		if took := time.Since(e.start); e.bytes != 30_000 || took < 1300*time.Millisecond || took > 1600*time.Millisecond {
			t.Errorf("sent %d bytes in %v", e.bytes, took)
		}
	})
}

// TestWrittenByTwo guards a response that two write: few bytes in all go beside a write that waits, what is
// longer goes after it, whole, and all is charged; and that a response which ends while one of them waits, as its
// handlers have returned, leaves its queue and is written no more.
func TestWrittenByTwo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSpeed(t, limiter.NewMemory(), "s", numbers{1000, LeastSize})
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		p := pacedBy(ctx, "", s)
		_, _ = s.send(p, LeastSize, LeastSize)
		var sent []string
		var all sync.WaitGroup
		write := func(name string, n int) (err error) {
			_, err = p.write(make([]byte, n), func(b []byte) (int, error) {
				s.note("", len(b))
				sent = append(sent, name)
				return len(b), nil
			})
			return err
		}
		all.Go(func() { _ = write("first", 4000) })
		synctest.Wait()
		for range 5 {
			all.Go(func() { _ = write("short", 100) })
			synctest.Wait()
		}
		p.sending.Lock()
		if want := []string{"short", "short"}; !slices.Equal(sent, want) {
			t.Errorf("%q went beside, want %q", sent, want)
		}
		p.sending.Unlock()
		all.Go(func() { _ = write("long", 4000) })
		all.Wait()
		if charged := int64(s.limit.Counters.Totals().Tallies[telemetry.Units]); p.aside.Load() != 0 || charged != s.all() {
			t.Errorf("%d bytes were charged of %d, and %d are to be", charged, s.all(), p.aside.Load())
		}
		start, before := time.Now(), len(sent)
		_ = write("last", 100)
		if took := time.Since(start); took > 200*time.Millisecond || len(sent) != before+1 {
			t.Errorf("the last write took %v", took)
		}
		for i, name := range sent[2:] { // those that waited have been let in at any time, one at once
			if i > 0 && name == "first" && sent[i+1] != "first" {
				t.Errorf("got %q", sent)
			}
		}
		if took, want := time.Since(s.start), 8600*time.Millisecond; took < want {
			t.Errorf("8600 bytes took %v, want %v at least", took, want)
		}

		late := make(chan error, 1)
		go func() { late <- write("late", 1<<20) }()
		synctest.Wait()
		p.end()
		if err := <-late; err == nil {
			t.Error("a response that has ended is written")
		}
		if n := len(s.limit.Speed.queues); n > 0 {
			t.Errorf("%d queues are left", n)
		}
		if err := write("later", 1); err == nil {
			t.Error("a response that has ended is written")
		}
	})
}
