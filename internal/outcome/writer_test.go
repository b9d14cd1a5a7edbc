package outcome

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome/fieldstest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// countWriters returns how many writers of ours lie in w.
func countWriters(w http.ResponseWriter) int {
	n := 0
	for w != nil {
		if _, ok := w.(*Writer); ok {
			n++
		}
		u, ok := w.(interface{ Unwrap() http.ResponseWriter })
		if !ok {
			break
		}
		w = u.Unwrap()
	}
	return n
}

// TestResponseWriterIsWrappedOnce guards that a request's writer is wrapped by
// the first handler that sets fields, and by no other while that writer is in
// use.
func TestResponseWriterIsWrappedOnce(t *testing.T) {
	t.Parallel()
	shown, _, _ := outcomeOfVisits(visit{XRateLimit, []string{"a"}, []limiter.Decision{roomy}})
	hidden, _, _ := outcomeOfVisits(visit{0, []string{"a"}, []limiter.Decision{roomy}})
	raw := httptest.NewRecorder()

	if w := hidden.Wrap(raw); w != http.ResponseWriter(raw) {
		t.Errorf("without fields the writer became a %T", w)
	}
	w := shown.Wrap(raw)
	if n := countWriters(w); n != 1 {
		t.Fatalf("wrapped %d times, want once", n)
	}
	if again := shown.Wrap(w); again != w {
		t.Errorf("wrapped again, into a %T", again)
	}
	between := &caddyhttp.ResponseWriterWrapper{
		ResponseWriter: &caddyhttp.ResponseWriterWrapper{ResponseWriter: w},
	}
	if again := shown.Wrap(between); again != http.ResponseWriter(between) {
		t.Errorf("wrapped again although ours lies under another, into a %T", again)
	}
	// Error routes get the server's own writer, without what was around it.
	other := &caddyhttp.ResponseWriterWrapper{ResponseWriter: raw}
	if n := countWriters(shown.Wrap(other)); n != 1 {
		t.Errorf("with the raw writer back, wrapped %d times, want once", n)
	}
}

// spy is a writer at the bottom that notes what it is called with, and the fields as
// they stood at that moment.
type spy struct {
	header http.Header
	events []string
}

func (s *spy) note(what string) { s.events = append(s.events, what+" "+fieldstest.In(s.header)) }

func (s *spy) Header() http.Header { return s.header }

func (s *spy) WriteHeader(status int) { s.note(http.StatusText(status)) }

func (s *spy) Write(b []byte) (int, error) {
	s.note("Write")
	return len(b), nil
}

func (s *spy) ReadFrom(r io.Reader) (int64, error) {
	s.note("ReadFrom")
	return io.Copy(io.Discard, r)
}

func (s *spy) FlushError() error {
	s.note("Flush")
	return nil
}

func (s *spy) Push(target string, _ *http.PushOptions) error {
	s.note("Push")
	return nil
}

// TestWriter guards that values added behind ours are gone before anything of
// the final response is written, by whatever way that begins, and that all
// ways lead to the writer underneath: files are not copied through memory,
// flushes are not lost.
func TestWriter(t *testing.T) {
	t.Parallel()
	copyFrom := func(w http.ResponseWriter) {
		// Hidden, so that io.Copy does not take a short cut at the source.
		if _, err := io.Copy(w, struct{ io.Reader }{strings.NewReader("text")}); err != nil {
			t.Error(err)
		}
	}
	flush := func(w http.ResponseWriter) {
		if err := http.NewResponseController(w).Flush(); err != nil {
			t.Error(err)
		}
	}
	for _, tc := range []struct {
		name string
		do   func(http.ResponseWriter)
		want []string
	}{
		{"status 200", func(w http.ResponseWriter) { w.WriteHeader(200) }, []string{"OK limit=5"}},
		{"status 304", func(w http.ResponseWriter) { w.WriteHeader(304) }, []string{"Not Modified limit=5"}},
		{"status 404", func(w http.ResponseWriter) { w.WriteHeader(404) }, []string{"Not Found limit=5"}},
		{"status 101", func(w http.ResponseWriter) { w.WriteHeader(101) }, []string{"Switching Protocols limit=5"}},
		{"Write", func(w http.ResponseWriter) { w.Write([]byte("text")) }, []string{"Write limit=5"}},
		{"ReadFrom", copyFrom, []string{"ReadFrom limit=5"}},
		{"Flush", flush, []string{"Flush limit=5"}},
		{
			"103 is not the final response, but has one limit too",
			func(w http.ResponseWriter) {
				w.WriteHeader(103)
				w.WriteHeader(200)
			},
			[]string{"Early Hints limit=5", "OK limit=5"},
		},
		{
			"what comes after the header is left alone, such as trailers",
			func(w http.ResponseWriter) {
				w.WriteHeader(200)
				w.Header().Add("X-RateLimit-Limit", "101")
				w.Write(nil)
				flush(w)
				copyFrom(w)
			},
			[]string{"OK limit=5", "Write limit=5|101", "Flush limit=5|101", "ReadFrom limit=5|101"},
		},
		{
			"Push",
			func(w http.ResponseWriter) { w.(http.Pusher).Push("/", nil) },
			[]string{"Push limit=5|100"},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			bottom := &spy{header: http.Header{"X-Ratelimit-Limit": {"5", "100"}}}
			rec := &Outcome{fields: fields{values: [fieldCount]string{fieldLimit: "5"}}}
			tc.do(rec.Wrap(bottom))
			if !reflect.DeepEqual(bottom.events, tc.want) {
				t.Errorf("the writer underneath got %q, want %q", bottom.events, tc.want)
			}
		})
	}
}

// TestWriterOverPlainWriter guards that bodies also reach a writer that can do
// nothing special.
func TestWriterOverPlainWriter(t *testing.T) {
	t.Parallel()
	bottom := httptest.NewRecorder()
	rec := &Outcome{fields: fields{values: [fieldCount]string{fieldLimit: "5"}}}
	w := rec.Wrap(struct{ http.ResponseWriter }{bottom})
	if n, err := io.Copy(w, bytes.NewReader(make([]byte, 100_000))); n != 100_000 || err != nil {
		t.Errorf("copied %d, %v", n, err)
	}
	if bottom.Body.Len() != 100_000 {
		t.Errorf("%d bytes came through", bottom.Body.Len())
	}
	if err := w.(http.Pusher).Push("/", nil); err == nil {
		t.Error("a push over a writer that can't succeeded")
	}
}
