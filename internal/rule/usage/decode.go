package usage

import (
	"bufio"
	"errors"
	"io"
	"net/http"
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

// unzstd decodes zstd.
func unzstd(r *bufio.Reader) (io.Reader, error) {
	head, _ := r.Peek(zstd.HeaderMaxSize) // or what there is
	var first zstd.Header
	if err := first.Decode(head); err != nil {
		return nil, err
	}
	z := new(unzstder)
	if z.wide = first.WindowSize > narrowWindow; z.wide && (wide.Add(1) > maxWide || first.WindowSize > maxWindow) {
		_ = z.Close()
		return nil, errWindow
	}
	var err error
	z.Decoder, err = zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true),
		zstd.WithDecoderMaxWindow(max(first.WindowSize, narrowWindow)))
	return z, err
}

// wide is how many decoders have a window larger than narrowWindow.
var wide atomic.Int32

// unzstder is a decoder of zstd.
type unzstder struct {
	*zstd.Decoder
	wide bool
}

// Close frees what it takes.
func (z *unzstder) Close() error {
	if z.Decoder != nil {
		z.Decoder.Close()
	}
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

// encodingOf returns the encoding of a body, or "" if it has none.
func encodingOf(h http.Header) string {
	encoding := strings.ToLower(strings.TrimSpace(strings.Join(h["Content-Encoding"], ",")))
	if encoding == "identity" {
		return ""
	}
	return encoding
}

// decode reads from r until it ends, or the text is longer than any, and notes whether all was
// read. It runs concurrently with what writes the body, since decoders wait for what they read.
func (b *Body) decode(r *io.PipeReader, open func(*bufio.Reader) (io.Reader, error)) {
	defer close(b.decoded)
	defer r.Close()                  // what is written from now on is ignored
	defer func() { _ = recover() }() // a decoder that panics must not end the process
	decoder, err := open(bufio.NewReader(r))
	if err != nil {
		b.whole = b.received.Load() == 0 // an empty body has no encoding
		return
	}
	if c, ok := decoder.(io.Closer); ok {
		defer c.Close()
	}
	text := make([]byte, 4096)
	for length := int64(0); length <= minText+maxRatio*b.received.Load(); {
		n, err := decoder.Read(text)
		b.read(text[:n])
		if err != nil {
			b.whole = err == io.EOF //nolint:errorlint // as readers return it
			return
		}
		length += int64(n)
	}
}
