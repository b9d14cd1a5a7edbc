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

// unzstd decodes zstd.
func unzstd(r *bufio.Reader) (io.Reader, error) {
	z, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(maxWindow))
	return &unzstder{Decoder: z, frame: frame{r: r, ended: true}}, err
}

// wide is how many decoders have had a window larger than narrowWindow.
var wide atomic.Int32

// unzstder is a decoder of zstd. It gives the decoder one frame after the other, as each has a
// window of its own.
type unzstder struct {
	*zstd.Decoder
	frame frame
	wide  bool // whether it is among those
}

// Read implements io.Reader.
func (z *unzstder) Read(p []byte) (n int, err error) {
	for n == 0 && err == nil {
		if z.frame.ended {
			if err = z.next(); err != nil {
				return 0, err
			}
			continue
		}
		if n, err = z.Decoder.Read(p); err == io.EOF && z.frame.ended { //nolint:errorlint // as readers return it
			err = nil
		}
	}
	return n, err
}

// next goes on to the next frame, or skips one that is meant to be.
func (z *unzstder) next() error {
	head, err := z.frame.r.Peek(zstd.HeaderMaxSize) // or what there is
	if len(head) == 0 {
		return err
	}
	var h zstd.Header
	if err := h.Decode(head); err != nil {
		return err
	}
	if h.Skippable {
		_, err := io.CopyN(io.Discard, z.frame.r, int64(h.HeaderSize)+int64(h.SkippableSize))
		return noEOF(err)
	}
	window := h.WindowSize
	if h.SingleSegment {
		window = h.FrameContentSize
	}
	if window > maxWindow {
		return errWindow
	}
	if window > narrowWindow && !z.wide {
		if z.wide = true; wide.Add(1) > maxWide {
			return errWindow
		}
	}
	z.frame = frame{r: z.frame.r, left: h.HeaderSize, sum: h.HasCheckSum}
	return z.Reset(&z.frame)
}

// Close frees what it takes.
func (z *unzstder) Close() error {
	z.Decoder.Close()
	if z.wide {
		wide.Add(-1)
	}
	return nil
}

// frame reads a frame of zstd (RFC 8878, section 3.1.1), and ends where that ends.
type frame struct {
	r     *bufio.Reader
	left  int  // of the header, or of a block
	sum   bool // whether there is a checksum behind the last block
	last  bool // whether the last block was begun
	ended bool
}

// Read implements io.Reader.
func (f *frame) Read(p []byte) (int, error) {
	if f.left == 0 && f.last {
		f.ended = true
		return 0, io.EOF
	}
	if f.left == 0 {
		head, err := f.r.Peek(3)
		if err != nil {
			return 0, noEOF(err)
		}
		bits := int(head[0]) | int(head[1])<<8 | int(head[2])<<16
		if f.left, f.last = 3+bits>>3, bits&1 == 1; bits>>1&3 == 1 {
			f.left = 3 + 1 // a byte, which is repeated
		}
		if f.last && f.sum {
			f.left += 4
		}
	}
	n, err := f.r.Read(p[:min(len(p), f.left)])
	f.left -= n
	return n, noEOF(err)
}

// noEOF returns err, or io.ErrUnexpectedEOF if what was read has ended too early.
func noEOF(err error) error {
	if err == io.EOF { //nolint:errorlint // as readers return it
		return io.ErrUnexpectedEOF
	}
	return err
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

// codingsOf returns how a body is encoded, by one coding after the other. One that changes nothing
// is none.
func codingsOf(h http.Header) (codings []string) {
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
			b.whole = err == io.EOF //nolint:errorlint // as readers return it
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
