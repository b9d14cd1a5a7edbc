package redisscript

import (
	"bytes"
	"context"
	"errors"
	"net"

	"github.com/redis/go-redis/v9"
)

// The client makes room for whatever a reply claims to hold: of an array that
// says it has 400 million elements it takes gigabytes, and of arrays in arrays so
// much stack that the process dies. So all that servers and sentinels say is
// followed before the client sees it.

const (
	// maxElements is how many elements a reply may have, those of arrays in it
	// included. A call about as many buckets as a request may have is replied to
	// with 4·65 535, and CLUSTER SLOTS, if each slot is a range by itself, with
	// some 27·16 384.
	maxElements = 1 << 19

	// maxBulk is how many bytes a string in a reply may have, and maxReply the
	// whole reply. The longest are of CLUSTER SLOTS, as above 5 MB of short ones.
	maxBulk  = 1 << 20
	maxReply = 16 << 20

	// maxDepth is how deep arrays may lie in each other. Those of CLUSTER SLOTS
	// have a depth of 4.
	maxDepth = 16

	// maxAttributes is how many attributes a reply may have, though none was ever
	// asked for.
	maxAttributes = 64
)

var (
	// errReplyTooLarge is the failure of a server with a reply that is beyond
	// these bounds.
	errReplyTooLarge = errors.New("a reply claims to be larger than any that was asked for")

	// errReplyMalformed is the failure of a server with what is no reply.
	errReplyMalformed = errors.New("what came is no reply")
)

// boundedConn is a network connection on which no reply passes the bounds.
type boundedConn struct {
	net.Conn
	replies replyScanner
	err     error // why it was closed
}

// Read closes the connection with the first reply that is out of bounds.
func (c *boundedConn) Read(b []byte) (int, error) {
	if c.err != nil {
		return 0, c.err
	}
	n, err := c.Conn.Read(b)
	if c.err = c.replies.scan(b[:n]); c.err != nil {
		_ = c.Conn.Close()
		return 0, c.err
	}
	return n, err
}

// boundedDialer returns a dialer whose connections are bounded.
func boundedDialer(dial func(context.Context, string, string) (net.Conn, error)) redis.DialHook {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return &boundedConn{Conn: conn}, nil
	}
}

// replyScanner follows a stream of replies, of RESP2 and RESP3, in pieces of any
// size. It takes for a reply all that the client does, and for out of bounds what
// the client would keep in memory, or on its stack, before it has read it.
type replyScanner struct {
	state    scanState
	kind     byte // of the element whose length is being read
	n        int  // that length as far as it is known
	signed   bool
	negative bool
	digits   int
	skip     int // bytes of a string that are still to come, with its end

	depth int
	left  [maxDepth]int // elements that are still to come, of each array around
	attr  int           // the depth of the attribute that it is in; 0 if it is in none

	// Of the reply so far.
	elements, attributes, bytes int
}

type scanState uint8

const (
	atType   scanState = iota // an element begins
	inLine                    // up to the end of a line
	inLength                  // in the line that tells a length
	atEnd                     // behind the \r of that line
	inBulk                    // within a string
)

// scan follows what has come. After an error it must not be called again.
func (s *replyScanner) scan(b []byte) error {
	s.bytes += len(b)
	for i := 0; i < len(b); {
		switch s.state {
		case atType:
			s.kind = b[i]
			i++
			switch s.kind {
			case ':', '+', '-', '_', ',', '#', '(':
				i = s.line(b, i)
			case '$', '!', '=', '*', '~', '>', '%', '|':
				s.state, s.n, s.signed, s.negative, s.digits = inLength, 0, false, false, 0
			default:
				return errReplyMalformed
			}
		case inLine:
			i = s.line(b, i)
		case inLength:
			for ; i < len(b) && s.state == inLength; i++ {
				if err := s.length(b[i]); err != nil {
					return err
				}
			}
		case atEnd:
			if b[i] != '\n' {
				return errReplyMalformed
			}
			i++
			if err := s.begin(len(b) - i); err != nil {
				return err
			}
		case inBulk:
			n := min(s.skip, len(b)-i)
			i += n
			if s.skip -= n; s.skip == 0 {
				s.done(len(b) - i)
			}
		}
	}
	if s.bytes > maxReply {
		return errReplyTooLarge
	}
	return nil
}

// line follows b from i on to the end of a line, and returns where that is.
func (s *replyScanner) line(b []byte, i int) int {
	n := bytes.IndexByte(b[i:], '\n')
	if n < 0 {
		s.state = inLine
		return len(b)
	}
	i += n + 1
	if last := s.depth - 1; last >= 0 && s.left[last] > 1 {
		s.left[last]-- // as done would
		s.state = atType
	} else {
		s.done(len(b) - i)
	}
	return i
}

// length reads one byte of a length.
func (s *replyScanner) length(c byte) error {
	switch {
	case c >= '0' && c <= '9':
		s.digits++
		if s.n = s.n*10 + int(c-'0'); s.n > maxReply {
			return errReplyTooLarge
		}
	case c == '\r' && s.digits > 0:
		s.state = atEnd
	case (c == '-' || c == '+') && !s.signed && s.digits == 0:
		s.signed, s.negative = true, c == '-'
	default:
		return errReplyMalformed
	}
	return nil
}

// begin begins an element whose length is known; rest is how much has come behind
// that.
func (s *replyScanner) begin(rest int) error {
	if s.negative && s.n > 1 {
		return errReplyMalformed
	}
	none := s.negative && s.n == 1
	switch s.kind {
	case '$', '!', '=':
		if s.n > maxBulk {
			return errReplyTooLarge
		}
		if none {
			s.done(rest)
			return nil
		}
		s.state, s.skip = inBulk, s.n+len("\r\n")
		return nil
	case '%', '|':
		s.n *= 2
	}
	if none {
		s.n = 0
	}
	if s.elements += s.n; s.elements > maxElements {
		return errReplyTooLarge
	}
	if s.kind == '|' {
		// It stands before an element, and is none. The client does not take one
		// within another for that.
		if s.attributes++; s.attributes > maxAttributes || s.attr > 0 {
			return errReplyTooLarge
		}
		if s.state = atType; s.n == 0 {
			return nil
		}
		s.attr = s.depth + 1
	}
	if s.n == 0 {
		s.done(rest)
		return nil
	}
	if s.depth == maxDepth {
		return errReplyTooLarge
	}
	s.left[s.depth] = s.n
	s.depth++
	s.state = atType
	return nil
}

// done ends an element, and all arrays of which it is the last; rest is how much
// has come behind it.
func (s *replyScanner) done(rest int) {
	s.state = atType
	for s.depth > 0 {
		if s.left[s.depth-1]--; s.left[s.depth-1] > 0 {
			return
		}
		s.depth--
		if s.attr == s.depth+1 {
			s.attr = 0
			return
		}
	}
	s.elements, s.attributes, s.bytes = 0, 0, rest
}
