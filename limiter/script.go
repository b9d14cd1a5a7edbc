package limiter

import (
	"context"
	"crypto/hmac"
	"crypto/sha1"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

//go:embed take.lua
var takeSource string

// takeScript runs on the servers.
var takeScript = newScript(takeSource)

// script is a Lua script, and the name by which servers know it once they have
// run it.
type script struct{ source, sha string }

func newScript(source string) *script {
	sum := sha1.Sum([]byte(source))
	return &script{source, hex.EncodeToString(sum[:])}
}

// firstKey is where among a call's arguments the first key stands, behind the
// command, the script and the number of keys.
const firstKey = 3

// scriptCall is one call of a script. It may charge, so it must never be sent
// twice.
type scriptCall struct{ *redis.IntSliceCmd }

// NoRetry tells the client not to send the call again, whatever happens.
func (scriptCall) NoRetry() bool { return true }

// send sends one call and returns what it replies: by the script's name or, with
// whole, in full. With asking it is also served for a slot that is only on its
// way to the server.
func (s *script) send(ctx context.Context, conn *redis.Conn, q *question, whole, asking bool) ([]int64, error) {
	q.args = appendArguments(q.args, q)
	q.args[0], q.args[1] = "evalsha", &s.sha
	if whole {
		q.args[0], q.args[1] = "eval", &s.source
	}
	call := scriptCall{redis.NewIntSliceCmd(ctx, q.args...)}
	if !asking {
		_ = conn.Process(ctx, call) // the call has the error too
		return call.Result()
	}
	ask := redis.NewStatusCmd(ctx, "asking")
	_, _ = conn.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		_ = pipe.Process(ctx, ask)
		return pipe.Process(ctx, call)
	})
	if err := ask.Err(); err != nil {
		return nil, err // and the call was sent elsewhere for that
	}
	return call.Result()
}

// probe sends a call that changes nothing, but shows whether the server takes
// writes.
func (s *script) probe(ctx context.Context, conn *redis.Conn, key string, asking bool) ([]int64, error) {
	nothing := Request{Buckets: []Bucket{{
		Limit: Limit{Size: 1, DripRate: time.Microsecond, DripSize: MaxUnits}, SizeVaries: true,
	}}}
	q := &question{keys: []string{key}, group: string(nothing.appendGroup(nil, whatRelease))}
	reply, err := s.send(ctx, conn, q, false, asking)
	if redis.HasErrorPrefix(err, "NOSCRIPT") {
		reply, err = s.send(ctx, conn, q, true, asking)
	}
	return reply, err
}

// load has a server know the script. It returns the number that the server has
// given the connection, and whether it did not know the script before: both tell
// of servers that have restarted. It is asked by a command that no decision is
// made with, so that servers count these apart. A user who may not use that finds
// out what is missing with the first decision.
func (s *script) load(ctx context.Context, conn *redis.Conn) (id int64, unknown bool, err error) {
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

// call is a call of take.lua for several requests.
type call struct {
	batch []*question
	reply []int64
	err   error
}

// sendAll sends the calls; the first with the whole script, if the server does
// not know it.
func (s *script) sendAll(ctx context.Context, conn *redis.Conn, calls []*call, whole bool) {
	sent := make([]scriptCall, len(calls))
	_, _ = conn.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		for i, c := range calls {
			args := appendArguments(nil, c.batch...)
			args[0], args[1] = "evalsha", s.sha
			if whole && i == 0 {
				args[0], args[1] = "eval", s.source
			}
			sent[i] = scriptCall{redis.NewIntSliceCmd(ctx, args...)}
			_ = pipe.Process(ctx, sent[i])
		}
		return nil
	})
	for i, c := range calls {
		c.reply, c.err = sent[i].Result()
	}
}

// unknown returns those calls whose server did not know the script.
func unknown(calls []*call) (again []*call) {
	for _, c := range calls {
		if c.err != nil && redis.HasErrorPrefix(c.err, "NOSCRIPT") {
			again = append(again, c)
		}
	}
	return again
}

// split gives each request its part of the reply, and reports whether any of them
// has shown to write. They get nothing if the reply is not one to all of them.
func (c *call) split() (wrote bool) {
	n := 0
	for _, q := range c.batch {
		n += q.replies()
	}
	if n != len(c.reply) {
		return false
	}
	reply := c.reply
	for _, q := range c.batch {
		n := q.replies()
		q.reply, reply = reply[:n], reply[n:]
		wrote = wrote || q.wrote(q.reply)
	}
	return wrote
}

// keys names the buckets in a server.
type keys struct {
	prefix string
	secret []byte
}

// of returns the name under which b is kept: the prefix, in braces a digest of
// whose bucket it is, what it limits, and the numbers that must not mix, in base
// 36. The braces put all buckets of one key value into one slot of a cluster.
func (k keys) of(b *Bucket) string { return string(b.appendRest(k.appendSlot(nil, b))) }

// appendSlot appends to name what the names of all buckets of b's key begin with.
// Those that keys share have the other half of the digest, so that no key has the
// same.
func (k keys) appendSlot(name []byte, b *Bucket) []byte {
	var digest [sha256.Size]byte
	if len(k.secret) == 0 {
		digest = sha256.Sum256([]byte(b.Key))
	} else {
		mac := hmac.New(sha256.New, k.secret)
		mac.Write([]byte(b.Key))
		mac.Sum(digest[:0])
	}
	if b.shared {
		return k.appendDigest(name, keyDigest(digest[16:]))
	}
	return k.appendDigest(name, keyDigest(digest[:16]))
}

// appendDigest appends to name what it begins with.
func (k keys) appendDigest(name []byte, digest keyDigest) []byte {
	name = append(name, k.prefix...)
	name = append(name, '{')
	name = base64.RawURLEncoding.AppendEncode(name, digest[:])
	return append(name, '}')
}

// digestOf returns the digest in the name of a bucket.
func digestOf(name string) (digest keyDigest) {
	from := strings.IndexByte(name, '{') + 1
	var text [22]byte
	copy(text[:], name[from:])
	_, _ = base64.RawURLEncoding.Decode(digest[:], text[:]) // names are made here
	return digest
}

// appendRest appends to name what tells b from other buckets of its key.
func (b *Bucket) appendRest(name []byte) []byte {
	name = append(name, ':')
	name = append(name, b.Name...)
	name = append(name, ':')
	if !b.SizeVaries {
		name = strconv.AppendInt(name, b.Limit.Size, 36)
	}
	name = append(name, '.')
	name = strconv.AppendInt(name, b.Limit.rate(), 36)
	name = append(name, '.')
	return strconv.AppendInt(name, b.Limit.DripSize, 36)
}

// question is a request as a server is asked about it: a group of take.lua's, in
// a call of its own or together with others.
type question struct {
	script *script
	keys   []string // of its buckets
	plain  string   // what take.lua is told, as a run of one group
	group  string   // the same with what the fallback knows

	reply []int64
	err   error

	// Whether to wait for an answer as long as there is time, since nobody else
	// decides.
	patient bool
	// Is told that there is an answer, or what has failed, if no goroutine waits
	// for it.
	settled func(error)

	waiting // to be taken along with others

	// What the fallback knows of it, guarded by its lock.
	pending    []pending
	server     *server // to which it was sent last
	order      uint64  // how many had been sent when it was, it included
	linked     bool    // whether it is in flight
	gone       bool    // whether it no longer counts, and nobody waits for it
	holds      bool    // whether a server has held its units
	lost       bool    // whether a server has restarted since it was sent
	next, prev *question

	// What is used again by the next question.
	text []byte
	args []any
	self [1]*question
}

// questions are those that are no longer in use, with their memory.
var questions = sync.Pool{New: func() any { return new(question) }}

// What take.lua can do with a request's buckets besides what Accounting says.
const (
	whatHold    = 2
	whatCommit  = 3
	whatRelease = 4
	whatRemove  = 5 // see removals
)

// question returns the question whether a server admits req.
func (k keys) question(s *script, req Request, what byte) *question {
	q := questions.Get().(*question)
	q.script = s

	// All text is made in one piece, of which each is a part.
	var few [8]int
	ends, text := few[:0], q.text[:0]
	var slot []byte // what the last name begins with; most share the key
	for i := range req.Buckets {
		b, from := &req.Buckets[i], len(text)
		if i > 0 && b.sameKey(&req.Buckets[i-1]) {
			text = append(text, slot...)
		} else {
			text = k.appendSlot(text, b)
		}
		slot = text[from:]
		text = b.appendRest(text)
		ends = append(ends, len(text))
	}
	q.text = req.appendGroup(text, what)
	all, from := string(q.text), 0
	q.keys = q.keys[:0]
	for _, to := range ends {
		q.keys = append(q.keys, all[from:to])
		from = to
	}
	q.plain = all[from:]
	q.group = q.plain
	return q
}

// What a group consists of, see take.lua.
const (
	groupHead    = 5     // bytes before the first bucket
	whatIndex    = 4     // where among them is what to do
	groupNumbers = 4 * 8 // bytes of a bucket's numbers, before its flags
)

// what returns what q asks to do.
func (q *question) what() byte { return q.plain[whatIndex] }

// replies returns how many numbers reply to q.
func (q *question) replies() int {
	switch q.what() {
	case whatHold:
		return 4 * len(q.keys)
	case whatRemove:
		return 0
	}
	return 2 * len(q.keys)
}

// settle makes q, of which units are held, the question to settle them.
func (q *question) settle(what byte, held []outcome) {
	group := append([]byte(nil), q.plain[:groupHead]...)
	group[whatIndex] = what
	rest := q.plain[groupHead:]
	for i := range held {
		group = append(group, rest[:groupNumbers]...)
		group = append(group, rest[groupNumbers]+4)
		group = appendNumbers(group, held[i].till)
		rest = rest[groupNumbers+1:]
	}
	q.plain = string(group)
	q.group = q.plain
}

// tell adds levels to what take.lua is told of q's buckets, see fallback.known.
func (q *question) tell(levels []known) {
	if levels == nil {
		return
	}
	group := append(make([]byte, 0, len(q.plain)+32*len(levels)), q.plain[:groupHead]...)
	rest := q.plain[groupHead:]
	for _, level := range levels {
		flags, after := rest[groupNumbers], groupNumbers+1
		group = append(group, rest[:groupNumbers]...)
		switch level.dirty {
		case clean:
			group = append(group, flags)
		case unsure:
			group = append(group, flags+2)
		case ahead:
			group = append(group, flags+2+8)
		}
		if level.dirty != clean {
			group = appendNumbers(group, level.clear, level.slack, level.with.clear, level.with.slack)
		}
		if flags >= 4 {
			group = append(group, rest[after:after+8]...)
			after += 8
		}
		rest = rest[after:]
	}
	q.group = string(group)
}

// slot returns the part of q's keys that says in which slot of a cluster they
// lie.
func (q *question) slot() string { return q.keys[0][:strings.IndexByte(q.keys[0], '}')] }

// alone returns q as a batch of its own.
func (q *question) alone() []*question {
	q.self[0] = q
	return q.self[:]
}

// release lets another request use q.
func (q *question) release() {
	q.reply, q.settled, q.patient = nil, nil, false
	questions.Put(q)
}

// appendGroup appends what take.lua is told of req, as a run of one group.
func (req Request) appendGroup(b []byte, what byte) []byte {
	b = binary.BigEndian.AppendUint16(b, 1)
	b = binary.BigEndian.AppendUint16(b, uint16(len(req.Buckets))) //nolint:gosec // no configuration has 65 536 limits
	b = append(b, what)
	for i := range req.Buckets {
		bucket := &req.Buckets[i]
		b = appendNumbers(b, bucket.Limit.Size, bucket.Limit.rate(), bucket.Limit.DripSize, bucket.Cost)
		b = append(b, flagOf(bucket.SizeVaries))
	}
	return b
}

// appendNumbers appends numbers as the doubles that Lua has, which are exact up
// to 2^53.
func appendNumbers(b []byte, numbers ...int64) []byte {
	for _, n := range numbers {
		b = binary.BigEndian.AppendUint64(b, math.Float64bits(float64(n)))
	}
	return b
}

// appendArguments appends the call that asks all of the questions, see take.lua,
// to what is left of args. The command and the script, its first two words, are
// left to be filled in.
func appendArguments(args []any, batch ...*question) []any {
	n := 0
	for _, q := range batch {
		n += len(q.keys)
	}
	args = append(slices.Grow(args[:0], firstKey+n+1), nil, nil, n)
	for _, q := range batch {
		for i := range q.keys {
			args = append(args, &q.keys[i])
		}
	}
	for len(batch) > 0 {
		n := 1
		for n < len(batch) && batch[n].group == batch[0].group {
			n++
		}
		args = append(args, batch[0].run(n))
		batch = batch[n:]
	}
	return args
}

// run returns what take.lua is told of n questions like q.
func (q *question) run(n int) any {
	if n == 1 {
		return &q.group
	}
	run := []byte(q.group)
	binary.BigEndian.PutUint16(run, uint16(n)) //nolint:gosec // at most fullCall
	return run
}

// flagOf returns how a script is told a truth.
func flagOf(b bool) byte {
	if b {
		return 1
	}
	return 0
}

// outcomes appends what take.lua replied about req to dst, and reports whether
// a key held something that was no bucket. With held the reply tells of units
// that are held.
func (req Request) outcomes(reply []int64, held bool, dst []outcome) (outcomes []outcome, corrupt bool, err error) {
	each := 2
	if held {
		each = 4
	}
	if len(reply) != each*len(req.Buckets) {
		return dst, false, fmt.Errorf("reply of %d numbers to a request of %d buckets", len(reply), len(req.Buckets))
	}
	outcomes = dst
	for i := range req.Buckets {
		reply := reply[each*i:]
		ahead, slack := reply[0], reply[1]
		foreign := ahead < 0
		if foreign {
			ahead, corrupt = -1-ahead, true
		}
		denied, blocked := slack < 0, false
		if denied {
			slack = -1 - slack
			if blocked = slack >= horizon; blocked {
				slack -= horizon
			}
		}
		if ahead < 0 || ahead > horizon || slack >= req.Buckets[i].Limit.DripSize || ahead == 0 && slack > 0 {
			return dst, false, fmt.Errorf("reply of %d, %d is no bucket", reply[0], reply[1])
		}
		outcomes = append(outcomes, outcome{state: state{clear: ahead, slack: slack}, denied: denied, blocked: blocked, foreign: foreign})
		if held {
			o := &outcomes[len(outcomes)-1]
			if o.held, o.till = reply[2], reply[3]; o.held < 0 || o.held > MaxUnits || o.till < 0 || o.till > 1<<53 {
				return dst, false, fmt.Errorf("reply of %d, %d tells of no units held", o.held, o.till)
			}
		}
	}
	return outcomes, corrupt, nil
}

// wrote reports whether what take.lua replied to q shows that it has written:
// then no bucket denied.
func (q *question) wrote(reply []int64) bool {
	if len(reply) == 0 || q.what() > whatHold {
		return false
	}
	for i := 1; i < len(reply); i += len(reply) / len(q.keys) {
		if reply[i] < 0 {
			return false
		}
	}
	return true
}
