package accesslog

import (
	"bufio"
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
)

const (
	chunkSize = 256 << 10
	maxLine   = 1 << 20 // longer lines are skipped
	maxWindow = 64 << 20
	compared  = 16 << 10 // bytes of each log, to find copies
)

// source is one log.
type source struct {
	name    string
	size    int64         // of the file
	bytes   *atomic.Int64 // that were read of all logs
	info    os.FileInfo   // nil if it is no file
	closers []func()
	wrapper wrapper
	dialect dialect
	first   int64 // when its first request ended

	compressed bool
	begins     []byte // its first lines, as far as copies are found by them

	// What was read already of a log that can be read only once.
	once      bool // as it is no file
	reader    *reader
	sample    []byte
	sampleErr error

	results chan chan *batch
	stop    chan struct{} // closed to end the goroutine that reads
	batch   *batch        // that is being used
	used    int           // of its entries
}

// batch is what a chunk of a log has.
type batch struct {
	entries []*Entry
	counts  [reasons]int64
	err     error // that ended the log; nil if there is more, io.EOF at its end
}

// reader reads the chunks of a log.
type reader struct {
	in      io.Reader
	rest    []byte // the start of a line whose end was not read yet
	skips   bool   // whether what comes next belongs to a line that is too long
	tooLong int64
	lines   unwrapper
}

// next returns the next lines, whole ones, without what surrounds them. With an
// error, they are the last.
func (r *reader) next() ([]byte, error) {
	chunk, err := r.chunk()
	return r.lines.unwrap(chunk, err != nil), err
}

// chunk returns the next lines, whole ones, as they are. With an error, they are the
// last.
func (r *reader) chunk() ([]byte, error) {
	for {
		buf := append(make([]byte, 0, len(r.rest)+chunkSize), r.rest...)
		r.rest = r.rest[:0]
		var err error
		for end := len(buf) + chunkSize; len(buf) < end && err == nil; {
			var n int
			n, err = r.in.Read(buf[len(buf):end])
			buf = buf[:len(buf)+n]
		}
		if r.skips {
			i := bytes.IndexByte(buf, '\n')
			if i < 0 && err == nil {
				continue
			}
			buf, r.skips = buf[i+1:], i < 0
			if r.skips {
				buf = nil
			}
		}
		if err != nil {
			return buf, err
		}
		end := bytes.LastIndexByte(buf, '\n') + 1
		if len(buf)-end > maxLine {
			r.tooLong++
			r.skips = true
		} else {
			r.rest = append(r.rest, buf[end:]...)
		}
		if end > 0 {
			return buf[:end], nil
		}
	}
}

// counting counts the bytes that are read.
type counting struct {
	io.Reader
	bytes *atomic.Int64
}

// Read implements io.Reader.
func (c counting) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	c.bytes.Add(int64(n))
	return n, err
}

// decompressed returns what in has, decompressed if it is compressed.
func (s *source) decompressed(in io.Reader) (io.Reader, error) {
	buffered := bufio.NewReaderSize(in, 64<<10)
	magic, _ := buffered.Peek(4)
	switch {
	case bytes.HasPrefix(magic, []byte{0x1f, 0x8b}):
		z, err := gzip.NewReader(buffered)
		if err != nil {
			return nil, err
		}
		s.compressed = true
		return z, nil
	case bytes.Equal(magic, []byte{0x28, 0xb5, 0x2f, 0xfd}):
		z, err := zstd.NewReader(buffered, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow))
		if err != nil {
			return nil, err
		}
		s.compressed = true
		s.closers = append(s.closers, z.Close)
		return z, nil
	}
	return buffered, nil
}

// withoutMark returns what in has, without a byte order mark.
func withoutMark(in io.Reader) io.Reader {
	buffered := bufio.NewReader(in)
	if start, _ := buffered.Peek(len(byteOrderMark)); string(start) == byteOrderMark {
		_, _ = buffered.Discard(len(byteOrderMark)) // it is there
	}
	return buffered
}

// byteOrderMark is what editors and shells of Windows begin UTF-8 with.
const byteOrderMark = "\ufeff"

// newSource looks at the first lines of a log.
func newSource(name string, format Format, bytes *atomic.Int64) (*source, error) {
	s := &source{name: name, bytes: bytes, first: math.MaxInt64}
	r, err := s.open(name)
	if err != nil {
		return nil, err
	}
	s.sample, s.sampleErr = r.chunk()
	s.wrapper = detectWrapper(s.sample)
	r.lines.wrapper = s.wrapper
	s.sample = r.lines.unwrap(s.sample, s.sampleErr != nil)
	s.begins = slices.Clone(s.sample[:min(len(s.sample), compared)])
	s.dialect = detect(s.sample[:min(len(s.sample), chunkSize)], format)
	b := s.dialect.parseLines(s.sample[:min(len(s.sample), chunkSize)])
	if len(b.entries) > 0 {
		s.first = b.entries[0].End
	}
	if err := s.dialect.refusal(s.sample[:min(len(s.sample), chunkSize)], &b.counts); err != nil {
		s.close()
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if s.once {
		s.reader = r
		return s, nil
	}
	s.close()
	s.sample, s.sampleErr = nil, nil
	return s, nil
}

// open opens the file; "-" is standard input. Bytes that are read count only if
// they are from a file, and are not read again.
func (s *source) open(name string) (*reader, error) {
	var in io.Reader = os.Stdin
	if s.once = name == "-"; !s.once {
		f, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		if info, err := f.Stat(); err == nil {
			s.info = info
			if info.IsDir() {
				_ = f.Close()
				return nil, fmt.Errorf("open %s: it is a directory; use a file", name)
			}
			s.size, s.once = info.Size(), !info.Mode().IsRegular()
		}
		s.closers = append(s.closers, func() { _ = f.Close() })
		if in = f; !s.once {
			in = counting{f, s.bytes}
		}
	}
	in, err := s.decompressed(in)
	if err != nil {
		s.close()
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return &reader{in: withoutMark(in), lines: unwrapper{wrapper: s.wrapper}}, nil
}

// isCopyOf reports whether s has the same requests as another log, from the first on: as
// it is the same file, or one is the other compressed. Times in whole seconds do not
// distinguish the logs of several nodes, so the names have to.
func (s *source) isCopyOf(other *source) bool {
	if s.info != nil && other.info != nil && os.SameFile(s.info, other.info) {
		return true
	}
	n := min(len(s.begins), len(other.begins))
	return n > 0 && bytes.Equal(s.begins[:n], other.begins[:n]) &&
		(s.dialect.exact && other.dialect.exact || uncompressedName(s.name) == uncompressedName(other.name))
}

// uncompressedName returns the name that a file had before it was compressed.
func uncompressedName(name string) string {
	name = filepath.Clean(name)
	for _, suffix := range []string{".gz", ".zst"} {
		if before, ok := strings.CutSuffix(name, suffix); ok {
			return before
		}
	}
	return name
}

// compareCopies orders copies of a log: one that has more, or is easier to read, comes
// first.
func compareCopies(a, b *source) int {
	plain := func(s *source) int {
		if s.compressed {
			return 0
		}
		return 1
	}
	return cmp.Or(cmp.Compare(len(b.begins), len(a.begins)), cmp.Compare(plain(b), plain(a)), cmp.Compare(b.size, a.size))
}

// close closes the file.
func (s *source) close() {
	for _, f := range slices.Backward(s.closers) {
		f()
	}
	s.closers = nil
}

// start starts reading the log.
func (s *source) start() error {
	r := s.reader
	if r == nil {
		var err error
		if r, err = s.open(s.name); err != nil {
			return err
		}
		s.sample, s.sampleErr = r.next()
	}
	s.results, s.stop = make(chan chan *batch, runtime.GOMAXPROCS(0)+1), make(chan struct{})
	go s.read(s.sample, s.sampleErr, r)
	s.sample = nil
	return nil
}

// read reads the log and has its chunks parsed, several at a time.
func (s *source) read(chunk []byte, err error, r *reader) {
	defer close(s.results)
	defer s.close()
	for tooLong := int64(0); ; chunk, err = r.next() {
		result := make(chan *batch, 1)
		select {
		case s.results <- result:
		case <-s.stop:
			return
		}
		go func(chunk []byte, err error, skipped int64) {
			b := s.dialect.parseLines(chunk)
			b.counts[TooLong] += skipped
			b.err = err
			result <- b
		}(chunk, err, r.tooLong-tooLong)
		if tooLong = r.tooLong; err != nil {
			return
		}
	}
}

// parseLines parses lines.
func (d *dialect) parseLines(lines []byte) *batch {
	b := &batch{entries: make([]*Entry, 0, len(lines)/512+1)}
	var clock clfClock
	for line := range bytes.Lines(lines) {
		line = trimLine(line)
		if len(line) == 0 {
			continue
		}
		if len(line) > maxLine {
			b.counts[TooLong]++
			continue
		}
		e := new(Entry)
		reason := d.parse(line, e, &clock)
		if b.counts[reason]++; reason == Used {
			b.entries = append(b.entries, e)
		}
	}
	return b
}

// head returns the next entry of the log, or nil at its end or once stopped is closed,
// with an error if it did not end properly.
func (s *source) head(counts *[reasons]int64, stopped <-chan struct{}) (*Entry, error) {
	for s.batch == nil || s.used == len(s.batch.entries) {
		if s.batch != nil && s.batch.err != nil {
			if errors.Is(s.batch.err, io.EOF) {
				return nil, nil
			}
			return nil, fmt.Errorf("%s: %w", s.name, s.batch.err)
		}
		select {
		case result := <-s.results:
			s.batch, s.used = <-result, 0
		case <-stopped:
			close(s.stop)
			return nil, nil
		}
		for reason, n := range s.batch.counts {
			counts[reason] += n
		}
	}
	return s.batch.entries[s.used], nil
}
