package field

import (
	"io"
	"net/http"
	"slices"
	"sync"
	"time"
)

const (
	// firstRead is how much is read before there is space for more: a client that only announces a long
	// body takes no more memory.
	firstRead = 4 << 10

	// beginTime is how long a body of unknown length may take to come. Its client may wait for an answer to
	// what it has sent before it sends the rest.
	beginTime = 5 * time.Second
)

// Body is a body that is read before its request is passed on, and put back in front of what has not
// come yet.
type Body struct {
	rest  io.ReadCloser
	known bool  // whether its length is
	most  int64 // to read, less if it ends before that

	mu      sync.Mutex
	more    sync.Cond // broadcasts that there is more in buf, or that reading has ended
	buf     []byte    // what was read, and not passed on yet
	begun   bool      // whether any of it was passed on
	whole   bool      // whether all of the body was read
	err     error     // that ended reading
	reading bool      // whether reading goes on, in another goroutine if the request does
	stop    bool      // whether it ends after the next read
}

// begin reads r's body, up to a length, in place of which r gets a Body. It waits for a body of known
// length as long as any handler would, and no longer than beginTime for others: clients that have an
// answer to what they have sent so far do not wait for it in vain.
func begin(r *http.Request, most int64) *Body {
	b := &Body{rest: r.Body, known: r.ContentLength >= 0, most: most + 1, reading: true}
	b.more.L = &b.mu
	r.Body = b
	if b.known {
		b.most = r.ContentLength
		b.read()
		return b
	}
	done := make(chan struct{})
	go func() {
		b.read()
		close(done)
	}()
	timer := time.NewTimer(beginTime)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
		b.mu.Lock()
		b.stop = true
		b.mu.Unlock()
	}
	return b
}

// read reads until there is enough. It ends at the latest when the request is over, as its body ends then.
func (b *Body) read() {
	for b.readOnce() {
	}
}

// readOnce reads more, and reports whether to go on.
func (b *Body) readOnce() bool {
	b.mu.Lock()
	if len(b.buf) == cap(b.buf) {
		b.buf = slices.Grow(b.buf, b.room())
	}
	space := b.buf[len(b.buf):min(int64(cap(b.buf)), b.most)]
	b.mu.Unlock()
	n, err := b.rest.Read(space)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.buf = b.buf[:len(b.buf)+n]
	enough := int64(len(b.buf)) == b.most
	b.whole = err == io.EOF && (b.known || !enough) || b.known && enough //nolint:errorlint // as bodies return it
	b.err = err
	b.reading = err == nil && !enough && !b.stop
	b.more.Broadcast()
	return b.reading
}

// room returns for how much more to make space. A body of known length gets all of it once the beginning
// has come.
func (b *Body) room() int {
	more := b.most - int64(len(b.buf))
	if len(b.buf) == 0 || !b.known {
		more = min(more, max(int64(len(b.buf)), firstRead))
	}
	return int(more)
}

// all returns the whole body and, if it broke off, why. It is not whole either if it is too long, if it has
// not come in time, or once any of it was passed on.
func (b *Body) all() (text []byte, whole bool, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.whole && !b.begun && b.err != io.EOF { //nolint:errorlint // as bodies return it
		err = b.err
	}
	return b.buf, b.whole && !b.begun, err
}

// ReadWhole reports whether all of a request's body was read, so that its connection has nothing more of it.
func ReadWhole(body io.ReadCloser) bool {
	b, ours := body.(*Body)
	if !ours {
		return false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.whole
}

// Read implements io.Reader.
func (b *Body) Read(p []byte) (int, error) {
	b.mu.Lock()
	b.begun = true
	for len(b.buf) == 0 && b.reading {
		b.more.Wait()
	}
	n, err := copy(p, b.buf), b.err
	if b.buf = b.buf[n:]; len(b.buf) == 0 && !b.reading {
		b.buf = nil
	}
	b.mu.Unlock()
	switch {
	case n > 0:
		return n, nil
	case err != nil:
		return 0, err
	}
	return b.rest.Read(p)
}

// Close implements io.Closer.
func (b *Body) Close() error { return b.rest.Close() }
