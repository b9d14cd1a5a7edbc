package redisscript

import (
	"bytes"
	"context"
	"errors"
	"net"

	"github.com/redis/go-redis/v9"
)

// The client allocates whatever a reply claims to hold: gigabytes for an array
// that says it has 400 million elements, and for deeply nested arrays so much
// stack that the process dies. So everything that servers and sentinels send is
// checked before the client sees it.

const (
	// maxElements is the maximum number of elements in a reply, including the ones of
	// nested arrays. A call about as many buckets as a request may have gets a
	// reply of 4·65,535 elements; CLUSTER SLOTS, if each slot is a range by
	// itself, some 27·16,384.
	maxElements = 1 << 19

	// maxBulk is the maximum length of a string in a reply, in bytes, and maxReply
	// the one of the whole reply. The longest replies are to CLUSTER SLOTS: 5
	// MB of short strings in the case above.
	maxBulk  = 1 << 20
	maxReply = 16 << 20

	// maxDepth is the maximum depth of nested arrays. Those of CLUSTER SLOTS have
	// a depth of 4.
	maxDepth = 16

	// maxAttributes is the maximum number of attributes in a reply, though the
	// client never requests any.
	maxAttributes = 64
)

var (
	// errReplyTooLarge is the error for a reply that exceeds these bounds.
	errReplyTooLarge = errors.New("a reply claims to be larger than any that was asked for")

	// errReplyMalformed is the error for data that is not a reply.
	errReplyMalformed = errors.New("malformed reply")
)

// boundedConn is a network connection that lets no reply exceed the bounds.
type boundedConn struct {
	net.Conn
	replies replyScanner
	err     error // why it was closed
}

// Read closes the connection at the first reply that is out of bounds.
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

// bounds is a hook that bounds the replies on a client's own connections.
type bounds struct{ hook }

func (bounds) DialHook(next redis.DialHook) redis.DialHook { return boundedDialer(next) }

// boundedDialer wraps dial to return bounded connections.
func boundedDialer(dial dialFunc) redis.DialHook {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return &boundedConn{Conn: conn}, nil
	}
}

// replyScanner parses a stream of replies, RESP2 and RESP3, in chunks of any size.
// It accepts all replies that the client does, except those for which the client
// would allocate too much memory, or stack, before it has read them.
type replyScanner struct {
	state    scanState
	kind     byte // of the element whose length is being read
	n        int  // that length as read so far
	signed   bool
	negative bool
	digits   int
	skip     int // bytes of a string still to come, including its end

	depth int
	left  [maxDepth]int // elements still to come in each enclosing array
	attr  int           // the depth of the attribute being read; 0 if none

	// Totals of the reply so far.
	elements, attributes, bytes int
}

type scanState uint8

const (
	atType   scanState = iota // at the start of an element
	inLine                    // in a line whose content does not matter
	inLength                  // in a line with a length
	atEnd                     // after the \r of that line
	inBulk                    // in a string
)

// scan parses the next chunk. After an error it must not be called again.
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

// line skips to the end of a line in b, from i on, and returns the index after it.
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

// begin begins an element whose length is known; rest is the number of bytes after
// that length.
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
		// An attribute precedes an element and is not one itself. The client does
		// not recognize one within another.
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

// done ends an element, and all arrays of which it is the last; rest is the number
// of bytes after it.
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

// idle reports whether what was parsed is a whole number of replies.
func (s *replyScanner) idle() bool { return s.state == atType && s.depth == 0 && s.attr == 0 }
