package redisscript

import (
	"context"
	"crypto/sha1"
	"encoding/binary"
	"encoding/hex"
	"slices"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"
)

// Script is a Lua script that follows the package's protocol.
type Script struct {
	// Reports whether the reply to a call shows that the server accepts writes.
	Wrote func(*Call) bool

	// An Arg that makes the script write back the value of one key unchanged, so
	// that the reply shows whether the server accepts writes, and the number of
	// integers in that reply.
	ProbeArg     string
	ProbeReplies int

	source, sha string
}

// NewScript returns a script with the given source.
func NewScript(source string) *Script {
	sum := sha1.Sum([]byte(source))
	return &Script{source: source, sha: hex.EncodeToString(sum[:])}
}

// Call is one task for the script. Its unexported fields need no initialization. A
// Call may be reused after Reset.
type Call struct {
	// The keys, at least one. In a cluster they are all in one slot.
	Keys []string

	// What to do with the keys; see the package's protocol. It begins with the
	// bytes 0 and 1: one call.
	Arg string

	// The number of integers that the script replies.
	Replies int

	// The owner of the call, for hooks.
	Owner any

	// The reply, once there is one: as many integers as Replies, or none if the
	// server has sent another number. It is valid until the call is reused.
	Reply []int64

	// Called with the outcome of a submitted call: nil if there is a reply. It
	// must not block.
	Done func(error)

	pending // while it waits
}

// Reset makes the call ready for reuse. It keeps its memory.
func (c *Call) Reset() {
	c.Reply, c.Done = nil, nil
}

// slot returns the part of the keys that determines their cluster slot: the text
// in the first braces, or the whole key.
func (c *Call) slot() string {
	key := c.Keys[0]
	if from := strings.IndexByte(key, '{'); from >= 0 {
		if n := strings.IndexByte(key[from+1:], '}'); n > 0 {
			return key[from+1 : from+1+n]
		}
	}
	return key
}

// appendTo appends the command that runs the script for in to b, as RESP.
func (s *Script) appendTo(b []byte, in *invocation) []byte {
	keys, runs := 0, 0
	for i, c := range in.calls {
		keys += len(c.Keys)
		if i == 0 || c.Arg != in.calls[i-1].Arg {
			runs++
		}
	}
	if in.asking {
		b = append(b, "*1\r\n$6\r\nASKING\r\n"...)
	}
	b = appendHead(b, '*', 3+keys+runs)
	if in.whole {
		b = appendBulk(b, "EVAL")
		b = appendBulk(b, s.source)
	} else {
		b = appendBulk(b, "EVALSHA")
		b = appendBulk(b, s.sha)
	}
	var few [20]byte
	b = appendBulk(b, string(strconv.AppendInt(few[:0], int64(keys), 10)))
	for _, c := range in.calls {
		for _, key := range c.Keys {
			b = appendBulk(b, key)
		}
	}
	for rest := in.calls; len(rest) > 0; {
		n := 1
		for n < len(rest) && rest[n].Arg == rest[0].Arg {
			n++
		}
		b = appendBulk(b, rest[0].Arg)
		run := b[len(b)-len("\r\n")-len(rest[0].Arg):]
		binary.BigEndian.PutUint16(run, uint16(n)) // at most maxBatchKeys
		rest = rest[n:]
	}
	return b
}

// appendHead appends the line that begins an element of a given kind and length.
func appendHead(b []byte, kind byte, n int) []byte {
	b = append(b, kind)
	b = strconv.AppendInt(b, int64(n), 10)
	return append(b, "\r\n"...)
}

// appendBulk appends a string.
func appendBulk(b []byte, text string) []byte {
	b = appendHead(b, '$', len(text))
	b = append(b, text...)
	return append(b, "\r\n"...)
}

// load makes the script known to a server, by the first commands on a connection, and
// finds out whether the user may run it. It uses EVALSHA_RO, which is used for nothing
// else, so that servers count these commands apart, or by EVALSHA where that is refused. A
// server that runs no script without keys learns the script with the first call.
func (s *Script) load(ctx context.Context, conn *redis.Conn) error {
	var known *redis.Cmd
	hello := redis.NewCmd(ctx, "hello") // which everybody who has logged in may send
	_, failed := conn.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		_ = pipe.Process(ctx, hello)
		known = pipe.EvalShaRO(ctx, s.sha, nil)
		return nil
	})
	if err := hello.Err(); err != nil && !refusesCommand(err) {
		return err
	}
	if failed != nil && hello.Err() == nil && known.Err() == nil {
		return failed // neither was sent
	}
	err := known.Err()
	if refusesCommand(err) {
		err = conn.EvalSha(ctx, s.sha, nil).Err()
	}
	if redis.HasErrorPrefix(err, "NOSCRIPT") {
		err = conn.Eval(ctx, s.source, nil).Err()
	}
	if redis.HasErrorPrefix(err, "NOPERM") {
		return err
	}
	return nil // another error shows when the script is used
}

// appendInvocations splits calls into invocations, in a cluster one for each slot, and
// appends them to dst.
func appendInvocations(dst []*invocation, calls []*Call, slots bool) []*invocation {
	if slots {
		slices.SortStableFunc(calls, func(a, b *Call) int { return strings.Compare(a.slot(), b.slot()) })
	}
	from := 0
	for i, c := range calls {
		last := i == len(calls)-1
		if last || c.alone || calls[i+1].alone || slots && c.slot() != calls[i+1].slot() {
			dst = append(dst, &invocation{calls: calls[from : i+1 : i+1], asking: c.asking})
			from = i + 1
		}
	}
	return dst
}
