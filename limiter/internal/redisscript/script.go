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

// Script is a Lua script that keeps to the package's protocol.
type Script struct {
	// Whether the reply to a call shows that the server takes writes.
	Wrote func(*Call) bool

	// What tells the script to write what one key holds once more, so that the
	// reply shows whether the server takes writes.
	ProbeArg string

	source, sha string
}

// NewScript returns the script of the given source.
func NewScript(source string) *Script {
	sum := sha1.Sum([]byte(source))
	return &Script{source: source, sha: hex.EncodeToString(sum[:])}
}

// Call is something to do for the script. The zero value of what is not exported
// is ready to use; a call may be used again after Reset.
type Call struct {
	// The keys, at least one. In a cluster they lie in one slot.
	Keys []string

	// What to do with them; see the package's protocol. It begins with the bytes
	// 0 and 1: one call.
	Arg string

	// How many integers the script replies.
	Replies int

	// Whether to wait for an answer as long as there is time, since nobody else
	// decides. Other calls give up when half of the timeout is over and they have
	// not been sent.
	Patient bool

	// What the call belongs to, for hooks.
	Owner any

	// The reply, once there is one: as many integers as Replies, or none if the server
	// has sent another number. It is valid until the call is used again.
	Reply []int64

	// What became of a call that was submitted: nil if there is a reply. It must
	// not wait.
	Done func(error)

	pending // while it waits to be taken along

	args []any    // used again by the next call
	self [1]*Call // the call as a batch
}

// Reset makes the call ready to be used again. It keeps its memory.
func (c *Call) Reset() {
	c.Reply, c.Done, c.Patient = nil, nil, false
}

// slot returns what says in which slot of a cluster the keys lie: the text in the
// first braces, or the whole key.
func (c *Call) slot() string {
	key := c.Keys[0]
	if from := strings.IndexByte(key, '{'); from >= 0 {
		if n := strings.IndexByte(key[from+1:], '}'); n > 0 {
			return key[from+1 : from+1+n]
		}
	}
	return key
}

// batch returns c as a batch of its own.
func (c *Call) batch() []*Call {
	c.self[0] = c
	return c.self[:]
}

// firstKey is where among a command's arguments the first key stands, behind the
// command, the script and the number of keys.
const firstKey = 3

// appendArguments appends the command that runs the script for all calls to what
// is left of args. Its first two words are left to be filled in.
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

// NoRetry tells the client not to send the command again, whatever happens.
func (command) NoRetry() bool { return true }

// send runs the script for one call and returns what it replies: by its digest or,
// with whole, in full. With asking the server answers also for a slot that is only
// on its way to it.
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
		return nil, err // and the command was redirected for that
	}
	return cmd.Result()
}

// probe reports whether the server has shown to take writes, by a call that
// changes nothing.
func (s *Script) probe(ctx context.Context, conn *redis.Conn, key string, asking bool) (wrote bool, err error) {
	c := &Call{Keys: []string{key}, Arg: s.ProbeArg}
	c.Reply, err = s.send(ctx, conn, c, false, asking)
	if redis.HasErrorPrefix(err, "NOSCRIPT") {
		c.Reply, err = s.send(ctx, conn, c, true, asking)
	}
	return err == nil && s.Wrote(c), err
}

// load makes the script known to a server. It returns the number that the server
// has given the connection, and whether it did not know the script before: both
// tell of servers that have restarted. It asks by EVALSHA_RO, which is used for
// nothing else, so that servers count these apart. A user who may not use that
// finds out what is missing with the first call.
func (s *Script) load(ctx context.Context, conn *redis.Conn) (id int64, unknown bool, err error) {
	var known *redis.Cmd
	hello := redis.NewCmd(ctx, "hello")
	_, failed := conn.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		// This one is allowed to everybody who has logged in.
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
		_ = conn.Eval(ctx, s.source, nil).Err() // what is wrong shows when it is used
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

// invocations returns those that a batch takes: in a cluster one for each slot.
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

// sendAll sends invocations; the first with the whole script, if the server does
// not know it.
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

// unknown returns those invocations whose server did not know the script.
func unknown(all []*invocation) (again []*invocation) {
	for _, in := range all {
		if in.err != nil && redis.HasErrorPrefix(in.err, "NOSCRIPT") {
			again = append(again, in)
		}
	}
	return again
}

// split gives each call its part of the reply, and reports whether any of them has
// shown to write. They get nothing if the reply is not one to all of them.
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
