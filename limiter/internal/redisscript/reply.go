package redisscript

import (
	"bufio"
	"errors"
	"io"
	"math"
	"strings"

	"github.com/redis/go-redis/v9"
)

// replyReader reads the replies to invocations from a connection.
type replyReader struct{ in *bufio.Reader }

// maxLine is the maximum length of a line in a reply, in bytes.
const maxLine = 16 << 10

func newReplyReader(conn io.Reader) *replyReader {
	return &replyReader{bufio.NewReaderSize(conn, maxLine)}
}

// await waits until something comes that is not a push message, which is skipped.
func (r *replyReader) await() error {
	for {
		first, err := r.in.Peek(1)
		if err != nil {
			return err
		}
		if first[0] != '>' {
			return nil
		}
		if err := r.skipPush(); err != nil {
			return err
		}
	}
}

// skipPush skips a push message.
func (r *replyReader) skipPush() error {
	var scan replyScanner
	for {
		b, err := r.in.Peek(1)
		if err != nil {
			return err
		}
		if err := scan.scan(b); err != nil {
			return err
		}
		_, _ = r.in.Discard(1)
		if scan.idle() {
			return nil
		}
	}
}

// reply reads the reply to an invocation into the Replies of its calls, and returns
// the server's error if that is one. If the reply has the wrong number of integers,
// the calls get nothing.
func (r *replyReader) reply(in *invocation) (failure, err error) {
	if in.asking {
		if failure, err = r.asked(); err != nil {
			return nil, err
		}
	}
	line, err := r.line()
	switch {
	case err != nil:
		return nil, err
	case line[0] == '-':
		if failure == nil { // otherwise that is why
			failure = replyError(line[1:])
		}
		return failure, nil
	case line[0] != '*':
		return nil, errReplyMalformed
	}
	n, err := parseInt(line[1:])
	if err != nil {
		return nil, err
	}
	switch {
	case n < -1: // which is null
		return nil, errReplyMalformed
	case n > maxElements:
		return nil, errReplyTooLarge
	}
	want := 0
	for _, c := range in.calls {
		want += c.Replies
	}
	if n != int64(want) {
		for range n {
			if _, err := r.integer(); err != nil {
				return nil, err
			}
		}
		return nil, nil
	}
	for _, c := range in.calls {
		c.numbers = c.numbers[:0]
		for range c.Replies {
			n, err := r.integer()
			if err != nil {
				return nil, err
			}
			c.numbers = append(c.numbers, n)
		}
	}
	for _, c := range in.calls {
		c.Reply = c.numbers
	}
	return nil, nil
}

// asked reads the reply to ASKING, and returns the server's error if that is one. It
// waits for the next reply.
func (r *replyReader) asked() (failure, err error) {
	line, err := r.line()
	switch {
	case err != nil:
		return nil, err
	case line[0] == '-':
		failure = replyError(line[1:])
	case line[0] != '+':
		return nil, errReplyMalformed
	}
	return failure, r.await()
}

// integer reads an integer.
func (r *replyReader) integer() (int64, error) {
	line, err := r.line()
	if err != nil {
		return 0, err
	}
	if line[0] != ':' {
		return 0, errReplyMalformed
	}
	return parseInt(line[1:])
}

// line reads a line, without its end. It has at least one byte.
func (r *replyReader) line() ([]byte, error) {
	line, err := r.in.ReadSlice('\n')
	switch {
	case errors.Is(err, bufio.ErrBufferFull):
		return nil, errReplyTooLarge
	case err != nil:
		return nil, err
	case len(line) < 3 || line[len(line)-2] != '\r':
		return nil, errReplyMalformed
	}
	return line[:len(line)-2], nil
}

// parseInt parses an integer of 64 bits.
func parseInt(text []byte) (int64, error) {
	digits, most := text, uint64(math.MaxInt64)
	negative := len(digits) > 0 && digits[0] == '-'
	if negative {
		digits, most = digits[1:], most+1
	}
	if len(digits) == 0 || len(digits) > 19 {
		return 0, errReplyMalformed
	}
	n := uint64(0)
	for _, c := range digits {
		if c < '0' || c > '9' {
			return 0, errReplyMalformed
		}
		n = n*10 + uint64(c-'0')
	}
	if n > most {
		return 0, errReplyMalformed
	}
	if negative {
		return -int64(n), nil // it wraps to the least integer
	}
	return int64(n), nil // it fits
}

// replyError is an error that a server has replied.
type replyError string

func (e replyError) Error() string { return string(e) }

// RedisError implements redis.Error.
func (replyError) RedisError() {}

var _ redis.Error = replyError("")

// hasCode reports whether err is a server's reply that begins with the given word.
func hasCode(err error, code string) bool {
	reply, ok := err.(replyError) // as it was read
	return ok && strings.HasPrefix(string(reply), code+" ")
}

// redirection returns the address to which a reply redirects a call, and whether
// only for this once, with ASKING. It is empty if err is no redirection.
func redirection(err error) (addr string, asking bool) {
	var reply redis.Error
	if !errors.As(err, &reply) {
		return "", false
	}
	words := strings.Fields(reply.Error()) // such as MOVED 3999 127.0.0.1:6381
	if len(words) != 3 || words[0] != "MOVED" && words[0] != "ASK" {
		return "", false
	}
	return words[2], words[0] == "ASK"
}
