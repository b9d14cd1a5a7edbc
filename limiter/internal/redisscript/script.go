package redisscript

import (
	"context"
	"crypto/sha1"
	"encoding/binary"
	"encoding/hex"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"
)

// Script is a Lua script that follows the package's protocol.
type Script struct {
	// Reports whether the reply to a call shows that the server accepts writes.
	Wrote func(*Call) bool

	// An Arg that makes the script write back the value of one key unchanged, so
	// that the reply shows whether the server accepts writes.
	ProbeArg string

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

	// Whether to wait for an answer until the deadline, because nobody else
	// decides. Other calls give up if they have not been sent after half of the
	// timeout.
	Patient bool

	// The owner of the call, for hooks.
	Owner any

	// The reply, once there is one: as many integers as Replies, or none if the
	// server has sent another number. It is valid until the call is reused.
	Reply []int64

	// Called with the outcome of a submitted call: nil if there is a reply. It
	// must not block.
	Done func(error)

	pending // while it waits for a batch

	args []any    // reused by the next call
	self [1]*Call // the call as a batch
}

// Reset makes the call ready for reuse. It keeps its memory.
func (c *Call) Reset() {
	c.Reply, c.Done, c.Patient = nil, nil, false
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

// batch returns c as a batch of one.
func (c *Call) batch() []*Call {
	c.self[0] = c
	return c.self[:]
}

// firstKey is the index of the first key among a command's arguments, after the
// command, the script and the number of keys.
const firstKey = 3

// appendArguments appends the command that runs the script for all calls to
// args[:0]. The first two arguments are left for the caller to fill in.
func appendArguments(args []any, batch ...*Call) []any {
	n := 0
	for _, c := range batch {
		n += len(c.Keys)
	}
	args = append(slices.Grow(args[:0], firstKey+n+1), nil, nil, n)
	for _, c := range batch {
		for i := range c.Keys {
			args = append(args, &c.Keys[i])
		}
	}
	for len(batch) > 0 {
		n := 1
		for n < len(batch) && batch[n].Arg == batch[0].Arg {
			n++
		}
		args = append(args, batch[0].run(n))
		batch = batch[n:]
	}
	return args
}

// run returns the argument for a run of n calls like c.
func (c *Call) run(n int) any {
	if n == 1 {
		return &c.Arg
	}
	run := []byte(c.Arg)
	binary.BigEndian.PutUint16(run, uint16(n)) //nolint:gosec // at most maxBatchKeys
	return run
}

// command is one EVALSHA or EVAL. It may change something, so it must never be
// sent twice.
type command struct{ *redis.IntSliceCmd }

// NoRetry tells the client never to send the command again.
func (command) NoRetry() bool { return true }

// send runs the script for one call and returns its reply: by EVALSHA or, with
// whole, by EVAL with the source. With asking, the server answers even for a slot
// that is still being moved to it.
func (s *Script) send(ctx context.Context, conn *redis.Conn, c *Call, whole, asking bool) ([]int64, error) {
	c.args = appendArguments(c.args, c)
	c.args[0], c.args[1] = "evalsha", &s.sha
	if whole {
		c.args[0], c.args[1] = "eval", &s.source
	}
	cmd := command{redis.NewIntSliceCmd(ctx, c.args...)}
	if !asking {
		_ = conn.Process(ctx, cmd) // the command has the error too
		return cmd.Result()
	}
	ask := redis.NewStatusCmd(ctx, "asking")
	_, _ = conn.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		_ = pipe.Process(ctx, ask)
		return pipe.Process(ctx, cmd)
	})
	if err := ask.Err(); err != nil {
		return nil, err // so the command was redirected
	}
	return cmd.Result()
}

// probe runs a call that changes nothing, and reports whether it shows that the
// server accepts writes.
func (s *Script) probe(ctx context.Context, conn *redis.Conn, key string, asking bool) (wrote bool, err error) {
	c := &Call{Keys: []string{key}, Arg: s.ProbeArg}
	c.Reply, err = s.send(ctx, conn, c, false, asking)
	if redis.HasErrorPrefix(err, "NOSCRIPT") {
		c.Reply, err = s.send(ctx, conn, c, true, asking)
	}
	return err == nil && s.Wrote(c), err
}

// load makes the script known to a server. It returns the ID that the server has
// given the connection, and whether the server did not know the script yet: both
// show whether the server has restarted. It asks by EVALSHA_RO, which is used for
// nothing else, so that servers count these commands apart. A user without
// permission for that learns what is missing with the first call.
func (s *Script) load(ctx context.Context, conn *redis.Conn) (id int64, unknown bool, err error) {
	var known *redis.Cmd
	hello := redis.NewCmd(ctx, "hello")
	_, failed := conn.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		// Everybody who has logged in may send this one.
		_ = pipe.Process(ctx, hello)
		known = pipe.EvalShaRO(ctx, s.sha, nil)
		return nil
	})
	if err := hello.Err(); err != nil {
		return 0, false, err
	}
	if failed != nil && known.Err() == nil { // neither was sent
		return 0, false, failed
	}
	reply, _ := hello.Slice()
	for i := 0; i+1 < len(reply); i += 2 {
		if reply[i] == "id" {
			id, _ = reply[i+1].(int64)
		}
	}
	if redis.HasErrorPrefix(known.Err(), "NOSCRIPT") {
		_ = conn.Eval(ctx, s.source, nil).Err() // an error shows when the script is used
		return id, true, nil
	}
	return id, false, nil
}

// invocation is one run of the script on a server, for several calls.
type invocation struct {
	batch []*Call
	reply []int64
	err   error
}

// invocations splits a batch into invocations: in a cluster one for each slot.
func invocations(batch []*Call, slots bool) []*invocation {
	if !slots {
		return []*invocation{{batch: batch}}
	}
	slices.SortStableFunc(batch, func(a, b *Call) int { return strings.Compare(a.slot(), b.slot()) })
	var all []*invocation
	for i, c := range batch {
		if i == 0 || c.slot() != batch[i-1].slot() {
			all = append(all, new(invocation))
		}
		last := all[len(all)-1]
		last.batch = append(last.batch, c)
	}
	return all
}

// sendAll sends invocations. With whole, the first carries the whole script,
// because the server does not know it.
func (s *Script) sendAll(ctx context.Context, conn *redis.Conn, all []*invocation, whole bool) {
	sent := make([]command, len(all))
	_, _ = conn.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		for i, in := range all {
			args := appendArguments(nil, in.batch...)
			args[0], args[1] = "evalsha", s.sha
			if whole && i == 0 {
				args[0], args[1] = "eval", s.source
			}
			sent[i] = command{redis.NewIntSliceCmd(ctx, args...)}
			_ = pipe.Process(ctx, sent[i])
		}
		return nil
	})
	for i, in := range all {
		in.reply, in.err = sent[i].Result()
	}
}

// unknown returns the invocations that failed because the server did not know the
// script.
func unknown(all []*invocation) (again []*invocation) {
	for _, in := range all {
		if in.err != nil && redis.HasErrorPrefix(in.err, "NOSCRIPT") {
			again = append(again, in)
		}
	}
	return again
}

// split gives each call its part of the reply, and reports whether any of them has
// written. If the reply has the wrong length for the batch, it gives them nothing.
func (s *Script) split(in *invocation) (wrote bool) {
	n := 0
	for _, c := range in.batch {
		n += c.Replies
	}
	if n != len(in.reply) {
		return false
	}
	reply := in.reply
	for _, c := range in.batch {
		c.Reply, reply = reply[:c.Replies], reply[c.Replies:]
		wrote = wrote || s.Wrote(c)
	}
	return wrote
}
