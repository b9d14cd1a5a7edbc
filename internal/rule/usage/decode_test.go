package usage

import (
	"bufio"
	"bytes"
	"io"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/andybalholm/brotli"
	"github.com/klauspost/compress/flate"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zlib"
	"github.com/klauspost/compress/zstd"
)

// encode returns body as real encoders write it, flushed now and then.
func encode(t testing.TB, encoding string, body []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	type writer interface {
		io.WriteCloser
		Flush() error
	}
	var w writer
	switch encoding {
	case "gzip", "x-gzip":
		w = gzip.NewWriter(&b)
	case "deflate":
		w = zlib.NewWriter(&b)
	case "raw deflate":
		w, _ = flate.NewWriter(&b, 6)
	case "br":
		w = brotli.NewWriterLevel(&b, 4)
	case "zstd":
		w, _ = zstd.NewWriter(&b, zstd.WithEncoderConcurrency(1))
	}
	for part := range bytes.Lines(body) {
		if _, err := w.Write(part); err != nil {
			t.Fatal(err)
		}
		if len(part) < 100 {
			_ = w.Flush()
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// stream is a body of events, whose last one has the number.
var stream = []byte(strings.Repeat("data: {\"choices\":[{\"delta\":{\"content\":\"some words\"}}],\"usage\":null}\n\n", 200) +
	"data: {\"choices\":[],\"usage\":{\"total_tokens\":77}}\n\ndata: [DONE]\n\n")

// TestEncodings guards that compressed bodies are read like others, in pieces of any size, and
// that those which can't be are known as such.
func TestEncodings(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		header string
		body   []byte
		found  bool
	}{
		{"gzip", encode(t, "gzip", stream), true},
		{"GZip ", encode(t, "gzip", stream), true},
		{"x-gzip", encode(t, "gzip", stream), true},
		{"deflate", encode(t, "deflate", stream), true},
		{"deflate", encode(t, "raw deflate", stream), true},
		{"br", encode(t, "br", stream), true},
		{"zstd", encode(t, "zstd", stream), true},
		{"identity", stream, true},
		{"gzip, br", stream, false},
		{"compress", stream, false},
		{"gzip", stream, false}, // it is not
		{"zstd", stream, false},
		{"br", stream, false},
		{"deflate", []byte("{"), false},
	} {
		for _, size := range []int{1, 7, 100, 4096, 1 << 20} {
			units, found, b := read(costOf(t, Tokens), http.Header{"Content-Encoding": {tc.header}}, tc.body, size)
			if found != tc.found || found && units != 77 || b.Whole() != tc.found {
				t.Errorf("%s in pieces of %d: got %d, %t, whole %t", tc.header, size, units, found, b.Whole())
			}
			if want := int64(len(tc.body)) / bytesPerToken; !found && b.Estimate(0) < want {
				t.Errorf("%s: the estimate is %d, want %d at least", tc.header, b.Estimate(0), want)
			}
		}
		if len(tc.body) > 100 && tc.found && tc.header != "identity" {
			cut := tc.body[:len(tc.body)-20]
			if _, _, b := read(costOf(t, Tokens), http.Header{"Content-Encoding": {tc.header}}, cut, 100); b.Whole() {
				t.Errorf("%s: a body that breaks off is whole", tc.header)
			}
		}
	}
	if _, _, b := read(costOf(t, Tokens), http.Header{"Content-Encoding": {"gzip"}}, nil, 1); !b.Whole() {
		t.Error("an empty body is not whole")
	}
}

// TestBombs guards that little is decoded of a body that becomes far more than it was, or that
// asks for much memory, and that it ends.
func TestBombs(t *testing.T) {
	zeros := append([]byte(`{"a":"`), bytes.Repeat([]byte("x"), 16<<20)...)
	for _, encoding := range []string{"gzip", "deflate", "br", "zstd"} {
		sent := encode(t, encoding, zeros)
		began := time.Now()
		_, _, b := read(costOf(t, Tokens), http.Header{"Content-Encoding": {encoding}}, sent, 1000)
		if most := int64(minText + maxRatio*len(sent) + 4096); b.size > most {
			t.Errorf("%s: of %d bytes %d were decoded, want at most %d", encoding, len(sent), b.size, most)
		}
		t.Logf("%s: of %d bytes %d were decoded in %v", encoding, len(sent), b.size, time.Since(began))
	}
	var wide bytes.Buffer
	w := brotli.NewWriterOptions(&wide, brotli.WriterOptions{Quality: 5, LGWin: 24})
	w.Write(stream)
	w.Close()
	var far bytes.Buffer
	z, err := zstd.NewWriter(&far, zstd.WithWindowSize(16<<20), zstd.WithSingleSegment(false))
	if err != nil {
		t.Fatal(err)
	}
	z.Write(bytes.Repeat(stream, 1000))
	z.Close()
	for encoding, body := range map[string][]byte{"br": wide.Bytes(), "zstd": far.Bytes()} {
		if _, found, b := read(costOf(t, Tokens), http.Header{"Content-Encoding": {encoding}}, body, 1000); found || b.Whole() {
			t.Errorf("%s with a large window was decoded", encoding)
		}
	}
}

// TestDecoderPanics guards that a decoder which panics ends no more than what it decodes.
func TestDecoderPanics(t *testing.T) {
	decoders["panics"] = func(r *bufio.Reader) (io.Reader, error) {
		return readerFunc(func([]byte) (int, error) {
			if _, err := r.Discard(10); err != nil {
				return 0, err
			}
			panic("broken")
		}), nil
	}
	defer delete(decoders, "panics")
	if _, found, b := read(costOf(t, Tokens), http.Header{"Content-Encoding": {"panics"}}, stream, 100); found || b.Whole() {
		t.Error("a body was read by a decoder that panics")
	}
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// TestMemory guards what a thousand bodies take that are in the middle, and that nothing of
// them stays once they end.
func TestMemory(t *testing.T) {
	cost := costOf(t, Tokens)
	before := runtime.NumGoroutine()
	for _, tc := range []struct {
		encoding   string
		most       uint64 // bytes of each
		goroutines int
	}{{"", 2000, 0}, {"gzip", 80_000, 1}, {"br", 1_500_000, 1}, {"zstd", 3_200_000, 1}} {
		n := 1000
		if tc.most > 1_000_000 {
			n = 100
		}
		half := stream
		if tc.encoding != "" {
			half = encode(t, tc.encoding, stream)
		}
		half = half[:len(half)/2]
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		from := m.HeapAlloc
		bodies := make([]*Body, n)
		for i := range bodies {
			bodies[i] = cost.Plan().NewBody(http.Header{"Content-Encoding": {tc.encoding}})
			bodies[i].Write(half)
		}
		running := runtime.NumGoroutine() - before
		runtime.GC()
		runtime.ReadMemStats(&m)
		each := (max(m.HeapAlloc, from) - from) / uint64(n)
		if t.Logf("%q: %d bytes and %d goroutines for %d", tc.encoding, each, running, n); each > tc.most || running > tc.goroutines*n {
			t.Errorf("%q: each takes %d bytes, and %d goroutines run", tc.encoding, each, running)
		}
		for _, b := range bodies {
			b.End()
		}
	}
	for range 100 {
		if runtime.NumGoroutine() <= before {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Errorf("%d goroutines are left of %d", runtime.NumGoroutine(), before)
}
