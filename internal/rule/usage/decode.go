package usage

import (
	"bufio"
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/andybalholm/brotli"
	"github.com/klauspost/compress/flate"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zlib"
	"github.com/klauspost/compress/zstd"
)

const (
	// maxWindow is how much of the decoded text a zstd decoder may keep to refer to: as much as
	// encoders of HTTP may have it keep (RFC 9659, section 3). It takes that memory as it begins, so
	// no more than maxWide may have more than narrowWindow at once. Caddy's encoder has 128 KiB.
	maxWindow    = 8 << 20
	narrowWindow = 512 << 10
	maxWide      = 32

	// A text that is this many times longer than what was sent is not read.
	maxRatio = 1000
	minText  = 1 << 20 // which any body may decode to

	maxCodings = 3 // of a body; hardly any has more than one
)

// decoders are the encodings of bodies that can be read. They use no goroutines.
var decoders = map[string]func(*bufio.Reader) (io.Reader, error){
	"gzip":    func(r *bufio.Reader) (io.Reader, error) { return gzip.NewReader(r) },
	"x-gzip":  func(r *bufio.Reader) (io.Reader, error) { return gzip.NewReader(r) },
	"deflate": inflate,
	"br":      unbrotli,
	"zstd":    unzstd,
}

// inflate decodes what is called deflate: zlib's format, or, from some servers, what is in it.
func inflate(r *bufio.Reader) (io.Reader, error) {
	head, err := r.Peek(2)
	if err != nil {
		return nil, err
	}
	if head[0]&0x0f == 8 && (int(head[0])<<8|int(head[1]))%31 == 0 {
		return zlib.NewReader(r)
	}
	return flate.NewReader(r), nil
}

var errWindow = errors.New("the window is too large")

// unzstd decodes zstd, with no larger window than that of the first frame needs.
func unzstd(r *bufio.Reader) (io.Reader, error) {
	head, err := r.Peek(zstd.HeaderMaxSize) // or what there is
	if len(head) == 0 {
		return nil, err
	}
	var h zstd.Header
	z := new(unzstder)
	most := uint64(narrowWindow)
	if h.Decode(head) != nil || h.Skippable || window(&h) > narrowWindow {
		if most, z.wide = maxWindow, true; wide.Add(1) > maxWide {
			wide.Add(-1)
			return nil, errWindow
		}
	}
	z.Decoder, err = zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(most))
	return z, err
}

// window returns how much of its text a frame may refer to.
func window(h *zstd.Header) uint64 {
	if h.SingleSegment {
		return h.FrameContentSize
	}
	return h.WindowSize
}

// wide is how many decoders may have a window larger than narrowWindow.
var wide atomic.Int32

// unzstder is a decoder of zstd.
type unzstder struct {
	*zstd.Decoder
	wide bool // whether it is among those
}

// Close frees what it takes.
func (z *unzstder) Close() error {
	z.Decoder.Close()
	if z.wide {
		wide.Add(-1)
	}
	return nil
}

// unbrotli decodes brotli with a window of at most 4 MiB, which the first byte tells (RFC 7932,
// section 9.1): the largest that servers use.
func unbrotli(r *bufio.Reader) (io.Reader, error) {
	head, err := r.Peek(1)
	if err != nil {
		return nil, err
	}
	if bits := head[0] >> 1 & 7; head[0]&1 == 1 && bits > 22-17 {
		return nil, errWindow
	}
	return brotli.NewReader(r), nil
}

// contentCodings returns how a body is encoded, by one coding after the other. One that changes nothing
// is none.
func contentCodings(h http.Header) (codings []string) {
	for coding := range strings.SplitSeq(strings.ToLower(strings.Join(h["Content-Encoding"], ",")), ",") {
		if coding = strings.TrimSpace(coding); coding != "" && coding != "identity" {
			codings = append(codings, coding)
		}
	}
	return codings
}

// canDecode reports whether a body that is encoded by codings can be read.
func canDecode(codings []string) bool {
	return len(codings) <= maxCodings && !slices.ContainsFunc(codings, func(c string) bool { return decoders[c] == nil })
}

// decode reads from r until it ends, or the text is longer than any, and notes whether all was
// read. It runs concurrently with what writes the body, since decoders wait for what they read.
func (b *Body) decode(r *io.PipeReader, codings []string) {
	defer close(b.decoded)
	defer r.Close()                  // what is written from now on is ignored
	defer func() { _ = recover() }() // a decoder that panics must not end the process
	in := io.Reader(r)
	for _, coding := range slices.Backward(codings) { // the last one was applied last
		decoder, err := decoders[coding](bufio.NewReader(in))
		if err != nil {
			b.whole = b.received.Load() == 0 // an empty body has no encoding
			return
		}
		if c, ok := decoder.(io.Closer); ok {
			defer c.Close()
		}
		in = &bounded{decoder, &b.received, 0}
	}
	text := make([]byte, 4096)
	for {
		n, err := in.Read(text)
		b.read(text[:n])
		if err != nil {
			b.whole = err == io.EOF // as readers return it
			return
		}
	}
}

var errRatio = errors.New("the text is too long for what was sent")

// bounded reads what a decoder makes of what was received, unless that is far more.
type bounded struct {
	decoder  io.Reader
	received *atomic.Int64
	length   int64 // of what was read
}

// Read implements io.Reader.
func (b *bounded) Read(p []byte) (int, error) {
	if b.length > minText+maxRatio*b.received.Load() {
		return 0, errRatio
	}
	n, err := b.decoder.Read(p)
	b.length += int64(n)
	return n, err
}
