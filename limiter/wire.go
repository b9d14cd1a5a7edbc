package limiter

import (
	_ "embed"
	"encoding/binary"
	"fmt"
	"math"
	"strings"
	"sync"
	"time"
	"unsafe"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter/internal/redisscript"
)

var (
	//go:embed take.lua
	takeLua string
	//go:embed sliding.lua
	slidingLua string
	//go:embed log.lua
	logLua string
	//go:embed warm.lua
	warmLua string

	// takeSource is the source of the script that decides requests on the servers:
	// take.lua with the files that it names.
	takeSource = strings.NewReplacer(
		"--@ sliding.lua\n", slidingLua, "--@ log.lua\n", logLua, "--@ warm.lua\n", warmLua,
	).Replace(takeLua)
	takeScript = newScript(takeSource)
)

// newScript returns a script with the given source, which replies as take.lua
// does.
func newScript(source string) *redisscript.Script {
	s := redisscript.NewScript(source)
	nothing := Request{Buckets: []Bucket{{
		Limit: Limit{Size: 1, DripInterval: time.Microsecond, DripSize: MaxUnits},
	}}}
	s.ProbeArg, s.ProbeReplies = string(nothing.appendGroup(nil, whatRelease)), 2
	s.Wrote = func(c *redisscript.Call) bool {
		if c.Arg == s.ProbeArg {
			return len(c.Reply) == 2 && c.Reply[0] > 0 // otherwise there was nothing to write
		}
		return wrote(c)
	}
	return s
}

// query is a request in the form that is sent to a server: one group of take.lua,
// in an invocation of its own or in a batch with others.
type query struct {
	redisscript.Call        // its Arg is the group for take.lua, including the levels that the fallback adds
	plain            string // the group without those levels, as a run of one group
	logs             int    // how many of its buckets are logs

	// State of the fallback, guarded by its lock.
	buckets         []tracked
	server          *redisscript.Server // the server that it was last sent to
	order           uint64              // its number among all queries sent
	counted         bool                // whether it counts as in flight
	abandoned       bool                // whether it was given up, and no longer counts
	holdsUnits      bool                // whether a server holds its units
	countsRelease   bool                // whether its request, when its units are released, counts as a denied one
	serverRestarted bool                // whether a server has restarted since it was sent
	next, prev      *query

	// Backs the keys and the group. The next query that reuses q overwrites them.
	text []byte
	ends []int // where each key ends in it
}

// queries is a pool of queries, which keep their memory.
var queries = sync.Pool{New: func() any {
	q := new(query)
	q.Owner = q
	return q
}}

// What take.lua can do with a request's buckets, besides the values of Accounting.
const (
	whatHold    = 2
	whatCommit  = 3
	whatRelease = 4
	whatRemove  = 5 // see removals
	whatPeek    = 6
	whatReset   = 7
	whatOthers  = 128 // added if not all are leaky buckets
)

// query returns a query about req.
func (k keys) query(req Request, what byte) *query {
	q := queries.Get().(*query)

	text := q.text[:0]
	q.ends = q.ends[:0]
	var slot []byte // the part of the last name that buckets of one key have in common
	for i := range req.Buckets {
		b, from := &req.Buckets[i], len(text)
		if i > 0 && b.sameKey(&req.Buckets[i-1]) {
			text = append(text, slot...)
		} else {
			text = k.appendSlot(text, b)
		}
		slot = text[from:]
		text = b.appendRest(text)
		q.ends = append(q.ends, len(text))
	}
	q.text = req.appendGroup(text, what)
	all, from := unsafe.String(unsafe.SliceData(q.text), len(q.text)), 0
	q.Keys = q.Keys[:0]
	for _, to := range q.ends {
		q.Keys = append(q.Keys, all[from:to])
		from = to
	}
	q.plain = all[from:]
	q.Arg = q.plain
	q.logs = req.logs()
	q.Replies = q.repliesTo(q.what())
	return q
}

// The layout of a group, see take.lua.
const (
	groupHead    = 5     // bytes before the first bucket
	whatIndex    = 4     // index among them of what to do
	groupNumbers = 4 * 8 // bytes of a bucket's numbers, which its flags follow

	// Flags of a bucket.
	flagTold    = 2
	flagDue     = 4
	flagOwn     = 8
	flagAligned = 16
	flagOther   = 32 // times the Algorithm
	flagCount   = 128
)

// split splits what remains of a group whose next bucket has been told no level:
// into the bucket's numbers, its flags, its phase if it has one, the time until
// which its units are held if they are to be settled, and the rest of the group.
func split(group string) (numbers string, flags byte, phase, due, rest string) {
	numbers, flags, rest = group[:groupNumbers], group[groupNumbers], group[groupNumbers+1:]
	if flags&flagAligned != 0 {
		phase, rest = rest[:8], rest[8:]
	}
	if flags&flagDue != 0 {
		due, rest = rest[:8], rest[8:]
	}
	return numbers, flags, phase, due, rest
}

// what returns what q asks take.lua to do.
func (q *query) what() byte { return q.plain[whatIndex] &^ whatOthers }

// repliesTo returns the number of integers in the reply to q.
func (q *query) repliesTo(what byte) int {
	if what == whatRemove {
		return 0
	}
	return repliesEach(tellsHeld(what))*len(q.Keys) + logReplies*q.logs
}

// repliesEach returns the number of integers in the reply to a group that there are
// for each bucket, besides the logReplies that follow for each log. With held, the
// reply includes the held units.
func repliesEach(held bool) int {
	if held {
		return 4
	}
	return 2
}

// logReplies is the number of integers in a reply that are a logLevel.
const logReplies = 4

// logs returns the number of req's buckets that are logs.
func (req Request) logs() (n int) {
	for i := range req.Buckets {
		if req.Buckets[i].Limit.logs() {
			n++
		}
	}
	return n
}

// tellsHeld reports whether the reply to a group says what is held.
func tellsHeld(what byte) bool { return what == whatHold || what == whatPeek || what == whatReset }

// settle turns q, whose units are held, into the query that settles them.
func (q *query) settle(what byte, held []outcome) {
	group := append([]byte(nil), q.plain[:groupHead]...)
	group[whatIndex] = what | group[whatIndex]&whatOthers
	rest := q.plain[groupHead:]
	for i := range held {
		numbers, flags, phase, _, after := split(rest)
		group = append(group, numbers...)
		if what != whatRelease || !q.countsRelease {
			flags &^= flagCount
		}
		group = append(group, flags|flagDue)
		group = append(group, phase...)
		group = appendNumbers(group, held[i].till)
		rest = after
	}
	q.plain = string(group)
	q.Arg = q.plain
	q.Replies = q.repliesTo(what)
}

// tell adds levels to q's group, see fallback.toldFor.
func (q *query) tell(levels []toldLevel) {
	if levels == nil {
		return
	}
	group := append(make([]byte, 0, len(q.plain)+32*len(levels)), q.plain[:groupHead]...)
	rest := q.plain[groupHead:]
	for _, level := range levels {
		numbers, flags, phase, due, after := split(rest)
		switch level.dirty {
		case clean:
		case unsure, behind:
			flags |= flagTold
		case own:
			flags |= flagTold | flagOwn
		}
		group = append(group, numbers...)
		group = append(group, flags)
		group = append(group, phase...)
		if level.dirty != clean {
			group = appendNumbers(group, level.clear, level.rest, level.with.clear, level.with.rest)
		}
		group = append(group, due...)
		rest = after
	}
	q.Arg = string(group)
}

// release returns q to the pool. Nothing may still refer to it or to its text.
func (q *query) release() {
	q.Reset()
	queries.Put(q)
}

// appendGroup appends the group for req, as a run of one group.
func (req Request) appendGroup(b []byte, what byte) []byte {
	start := len(b)
	b = binary.BigEndian.AppendUint16(b, 1)
	b = binary.BigEndian.AppendUint16(b, uint16(len(req.Buckets))) //nolint:gosec // no configuration has 65 536 limits
	b = append(b, what)
	for i := range req.Buckets {
		bucket := &req.Buckets[i]
		rate, drip, phase := bucket.Limit.doubles()
		b = appendNumbers(b, float64(bucket.Limit.Size), rate, drip, float64(bucket.Cost))
		flags := byte(bucket.Limit.Algorithm) * flagOther
		if flags > 0 {
			b[start+whatIndex] |= whatOthers
		}
		if bucket.Limit.CountDenied {
			flags |= flagCount
		}
		if !bucket.Limit.Aligned {
			b = append(b, flags)
			continue
		}
		b = append(b, flags|flagAligned)
		b = appendNumbers(b, phase)
	}
	return b
}

// appendNumbers appends numbers as Lua's doubles, which are exact up to 2^53.
func appendNumbers[T int64 | float64](b []byte, numbers ...T) []byte {
	for _, n := range numbers {
		b = binary.BigEndian.AppendUint64(b, math.Float64bits(float64(n)))
	}
	return b
}

// outcomes appends the outcomes in take.lua's reply about req to dst, and reports
// whether any key held something that is not a bucket. With held, the reply
// includes the held units.
func (req Request) outcomes(reply []int64, held bool, dst []outcome) (outcomes []outcome, corrupt bool, err error) {
	each := repliesEach(held)
	if len(reply) != each*len(req.Buckets)+logReplies*req.logs() {
		return dst, false, fmt.Errorf("reply of %d numbers to a request of %d buckets", len(reply), len(req.Buckets))
	}
	outcomes = dst
	logs := reply[each*len(req.Buckets):]
	for i := range req.Buckets {
		reply := reply[each*i:]
		left, rest := reply[0], reply[1]
		foreign := left < 0
		if foreign {
			left, corrupt = -1-left, true
		}
		denied, blocked := rest < 0, false
		if denied {
			rest = -1 - rest
			if blocked = rest >= horizon; blocked {
				rest -= horizon
			}
		}
		if left < 0 || left > horizon || rest >= req.Buckets[i].Limit.restEnd() || left == 0 && rest > 0 {
			return dst, false, fmt.Errorf("reply of %d, %d is no bucket", reply[0], reply[1])
		}
		outcomes = append(outcomes, outcome{ahead: ahead{left, rest}, denied: denied, blocked: blocked, foreign: foreign, by: DecidedByRedis})
		if held {
			o := &outcomes[len(outcomes)-1]
			if o.held, o.till = reply[2], reply[3]; o.held < 0 || o.held > horizon || o.till < 0 || o.till > 1<<53 {
				return dst, false, fmt.Errorf("reply of %d, %d tells of no units held", o.held, o.till)
			}
		}
		if req.Buckets[i].Limit.logs() {
			v := &logLevel{units: logs[0], clear: logs[1], again: logs[2], one: logs[3]}
			logs = logs[logReplies:]
			if least, most := min(v.units, v.clear, v.again, v.one), max(v.units, v.clear, v.again, v.one); least < 0 || most > horizon {
				return dst, false, fmt.Errorf("reply of %d, %d, %d, %d is no log", v.units, v.clear, v.again, v.one)
			}
			outcomes[len(outcomes)-1].log = v
		}
	}
	return outcomes, corrupt, nil
}

// wrote reports whether take.lua's reply shows that it has written: that is so if
// no bucket denied.
func wrote(c *redisscript.Call) bool {
	if len(c.Reply) == 0 || c.Arg[whatIndex]&^whatOthers > whatHold {
		return false
	}
	each := repliesEach(tellsHeld(c.Arg[whatIndex] &^ whatOthers))
	for i := range c.Keys {
		if c.Reply[each*i+1] < 0 {
			return false
		}
	}
	return true
}
