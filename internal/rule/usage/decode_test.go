package usage

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/andybalholm/brotli"
	"github.com/klauspost/compress/flate"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zlib"
	"github.com/klauspost/compress/zstd"
)

// encoder is what compresses a body.
type encoder interface {
	io.WriteCloser
	Flush() error
}

// newEncoder returns an encoder that writes to b.
func newEncoder(encoding string, b *bytes.Buffer) (w encoder) {
	switch encoding {
	case "gzip", "x-gzip":
		w = gzip.NewWriter(b)
	case "deflate":
		w = zlib.NewWriter(b)
	case "raw deflate":
		w, _ = flate.NewWriter(b, 6)
	case "br":
		w = brotli.NewWriterLevel(b, 4)
	case "zstd":
		w, _ = zstd.NewWriter(b, zstd.WithEncoderConcurrency(1))
	}
	return w
}

// encodeAndFlush returns body as it is sent before more of it comes.
func encodeAndFlush(t testing.TB, encoding string, body []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	w := newEncoder(encoding, &b)
	_, err := w.Write(body)
	if err = errors.Join(err, w.Flush()); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// encode returns body as real encoders write it, flushed now and then.
func encode(t testing.TB, encoding string, body []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	w := newEncoder(encoding, &b)
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
		{"gzip, identity", encode(t, "gzip", stream), true},
		{" ,, Identity\t,x-gzip,", encode(t, "gzip", stream), true},
		{"identity, identity", stream, true},
		{"gzip, br", encode(t, "br", encode(t, "gzip", stream)), true},
		{"br, deflate,zstd", encode(t, "zstd", encode(t, "deflate", encode(t, "br", stream))), true},
		{"gzip, gzip, gzip, gzip", stream, false},
		{"gzip, br", encode(t, "gzip", stream), false},
		{"gzip, compress", encode(t, "gzip", stream), false},
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
		if len(tc.body) > 100 && tc.found && !bytes.Equal(tc.body, stream) {
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

// frameOf returns a frame of zstd with a window of some size.
func frameOf(t testing.TB, body []byte, window int, options ...zstd.EOption) []byte {
	t.Helper()
	var b bytes.Buffer
	z, err := zstd.NewWriter(&b, append(options, zstd.WithEncoderConcurrency(1), zstd.WithWindowSize(window))...)
	if err != nil {
		t.Fatal(err)
	}
	half := len(body) / 2
	_, _ = z.Write(body[:half])
	_ = z.Flush() // or a frame that ends soon has a small window
	_, _ = z.Write(body[half:])
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// TestFrames guards that a body is read whatever the frames of zstd of which it is made, as far as
// encoders of HTTP may write them: each may have a window, at most a narrow one if the first has
// one, or be one to skip.
func TestFrames(t *testing.T) {
	skip := func(length int) []byte {
		return append([]byte{0x5a, 0x2a, 0x4d, 0x18, byte(length), byte(length >> 8), 0, 0}, make([]byte, length)...)
	}
	segments, _ := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithSingleSegment(true))
	whole := func(body []byte) []byte { return segments.EncodeAll(body, nil) }
	begin, end := stream[:len(stream)/2], stream[len(stream)/2:]
	text := make([]byte, 3<<20) // too much for a narrow window, and not to be compressed
	for i, x := 0, uint32(1); i < len(text); i++ {
		x = x*1664525 + 1013904223
		text[i] = 'a' + byte(x>>28)
	}
	large := slices.Concat([]byte("data: {\"a\":\""), text, []byte("\"}\n\n"), stream)
	var bytewise []byte
	for i := bytes.LastIndex(stream[:len(stream)-300], []byte("data:")); i < len(stream); i++ {
		bytewise = append(bytewise, whole(stream[i:i+1])...)
	}
	for name, tc := range map[string]struct {
		body  []byte
		found bool
	}{
		"a small window, then a large one": {slices.Concat(frameOf(t, begin, 1<<10), frameOf(t, end, maxWindow)), false},
		"two small windows":                {slices.Concat(frameOf(t, begin, 1<<10), frameOf(t, end, narrowWindow)), true},
		"a large window, then a small one": {slices.Concat(frameOf(t, begin, maxWindow), frameOf(t, end, 1<<10)), true},
		"the end in the second frame":      {slices.Concat(frameOf(t, large[:len(large)-len(stream)], maxWindow), frameOf(t, stream, 1<<10)), true},
		"no checksums":                     {slices.Concat(frameOf(t, begin, maxWindow, zstd.WithEncoderCRC(false)), frameOf(t, end, 1<<10, zstd.WithEncoderCRC(false))), true},
		"frames to skip":                   {slices.Concat(skip(0), frameOf(t, begin, 1<<10), skip(70), skip(0xffff), frameOf(t, end, 1<<20), skip(1)), true},
		"empty frames":                     {slices.Concat(whole(nil), frameOf(t, nil, 1<<10), whole(begin), frameOf(t, nil, 1<<10), whole(end), whole(nil)), true},
		"a frame for each byte":            {bytewise, true},
		"a large segment":                  {whole(large), true},
		"repeated bytes":                   {slices.Concat(whole(bytes.Repeat([]byte("\n"), 1<<20)), whole(stream)), true},
		"a window that is too large":       {slices.Concat(frameOf(t, begin, 1<<10), frameOf(t, end, maxWindow<<1)), false},
		"a segment that is too large":      {slices.Concat(whole(begin), whole(slices.Concat(text, text, text))), false},
		"something else behind":            {slices.Concat(whole(stream), []byte("x")), false},
		"a frame to skip that breaks off":  {slices.Concat(whole(stream), skip(100)[:50]), false},
		"nothing but one to skip":          {skip(10), true},
	} {
		for _, size := range []int{1, 7, 4096, 1 << 20} {
			if size < 100 && len(tc.body) > 1<<20 {
				continue
			}
			units, found, b := read(costOf(t, Tokens), http.Header{"Content-Encoding": {"zstd"}}, tc.body, size)
			if b.Whole() != tc.found || tc.found && name != "nothing but one to skip" && (!found || units != 77) {
				t.Errorf("%s in pieces of %d: got %d, %t, whole %t", name, size, units, found, b.Whole())
			}
		}
	}
	if n := wide.Load(); n != 0 {
		t.Errorf("%d decoders have a wide window", n)
	}
}

// TestWideFramesAreFew guards that no more decoders than maxWide have a large window at once.
func TestWideFramesAreFew(t *testing.T) {
	body := frameOf(t, stream, maxWindow)
	cost := costOf(t, Tokens)
	for i := range maxWide + 1 {
		b := cost.Plan().NewBody(http.Header{"Content-Encoding": {"zstd"}})
		b.Write(body)
		defer func() {
			if b.End(); b.Whole() != (i < maxWide) {
				t.Errorf("body %d is whole: %t", i, b.Whole())
			}
		}()
		for began := time.Now(); i < maxWide && wide.Load() <= int32(i) && time.Since(began) < 10*time.Second; {
			time.Sleep(time.Millisecond) // until it has come to the frame
		}
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
	inner := bytes.Repeat([]byte{0, 0, 0, 255, 255}, 4<<20) // blocks of deflate without text
	_, _, b := read(costOf(t, Tokens), http.Header{"Content-Encoding": {"deflate, zstd"}}, encode(t, "zstd", inner), 1000)
	if b.Whole() || b.size > 0 {
		t.Error("what is within has no bound")
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

// FuzzEncoded guards that bodies which are encoded in any way, or damaged, are read the same in pieces
// of any size and without harm, and that of zstd all frames are read as by its decoder.
func FuzzEncoded(f *testing.F) {
	encodings := []string{"gzip", "deflate", "br", "zstd", "gzip, zstd", "br, deflate"}
	few := stream[len(stream)-200:]
	for i, encoding := range encodings {
		body := few
		for coding := range strings.SplitSeq(encoding, ", ") {
			body = encode(f, coding, body)
		}
		f.Add(uint8(i), body, uint8(i))
	}
	f.Add(uint8(3), slices.Concat(encode(f, "zstd", few), []byte("\x50\x2a\x4d\x18\x01\x00\x00\x00x"), encode(f, "zstd", few)), uint8(9))
	cost := costOf(f, Tokens)
	f.Fuzz(func(t *testing.T, encoding uint8, body []byte, size uint8) {
		h := http.Header{"Content-Encoding": {encodings[int(encoding)%len(encodings)]}}
		want, wantFound, atOnce := read(cost, h, body, len(body)+1)
		got, found, pieces := read(cost, h, body, int(size)+1)
		if atOnce.size > minText { // where a bomb ends depends on the pieces
			return
		}
		if got != want || found != wantFound || atOnce.Whole() != pieces.Whole() || atOnce.SaysEnd() != pieces.SaysEnd() {
			t.Fatalf("in pieces of %d: got %d, %t, whole %t, and %d, %t, whole %t at once", int(size)+1, got, found, pieces.Whole(), want, wantFound, atOnce.Whole())
		}
		if h.Get("Content-Encoding") != "zstd" {
			return
		}
		r, err := zstd.NewReader(bytes.NewReader(body), zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(maxWindow))
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		n, err := io.Copy(io.Discard, io.LimitReader(r, minText))
		if n < minText && (atOnce.Whole() != (err == nil) || err == nil && atOnce.size != n) {
			t.Errorf("%x: read %d, whole %t; a decoder reads %d, %v", body, atOnce.size, atOnce.Whole(), n, err)
		}
	})
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
