package limiter

import (
	"embed"
	"encoding/binary"
	"fmt"
	"math"
	"regexp"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter/internal/redisscript"
)

//go:embed *.lua
var luaFiles embed.FS

var (
	// takeSource is the source of the script that decides requests on the servers:
	// core.lua with the algorithms, which are in files of their own.
	takeSource = compose("core.lua")
	takeScript = newScript(takeSource)
)

// inserted is a line of a Lua file that stands for another file.
var inserted = regexp.MustCompile(`(?m)^ *--@ (\w+\.lua)$`)

// compose returns a Lua file with those that it names.
func compose(name string) string {
	text, err := luaFiles.ReadFile(name)
	if err != nil {
		panic(err)
	}
	return inserted.ReplaceAllStringFunc(string(text), func(line string) string {
		return compose(inserted.FindStringSubmatch(line)[1])
	})
}

// newScript returns a script with the given source, which replies as core.lua
// does.
func newScript(source string) *redisscript.Script {
	s := redisscript.NewScript(source)
	probe := query{what: whatRelease, buckets: []asked{{limit: Limit{Size: 1, DripInterval: time.Microsecond, DripSize: 1}}}}
	s.ProbeArg, s.ProbeReplies = string(probe.appendGroup(nil)), repliesEach(whatRelease)
	s.Wrote = func(c *redisscript.Call) bool {
		if q, ok := c.Owner.(*query); ok {
			return q.wrote()
		}
		return len(c.Reply) == s.ProbeReplies && c.Reply[0] > 0 // otherwise there was nothing to write
	}
	return s
}

// What core.lua can do with a request's buckets, besides the values of Accounting.
const (
	whatHold    = 2
	whatCommit  = 3
	whatRelease = 4
	whatRemove  = 5 // see removals
	whatPeek    = 6
	whatReset   = 7
)

// appendGroup appends q as core.lua reads it: a run of one group.
func (q *query) appendGroup(b []byte) []byte {
	tells := q.tells()
	b = binary.BigEndian.AppendUint16(b, 1)
	b = binary.BigEndian.AppendUint16(b, uint16(len(q.buckets))) //nolint:gosec // at most MaxBuckets
	b = append(b, q.what, bit(tells))
	for i := range q.buckets {
		p := &q.buckets[i]
		rate, drip, phase := p.limit.doubles()
		b = append(b, byte(p.limit.Algorithm), bit(p.limit.CountDenied && (q.what != whatRelease || q.countsRelease)))
		b = appendDoubles(b, float64(p.limit.Size), rate, drip, phase, float64(p.cost))
		if tells {
			b = appendDoubles(b, float64(p.told.clear), float64(p.told.rest), float64(p.told.inFlight))
			b = append(b, bit(p.told.dirty == own))
		}
		if q.settles() {
			b = appendDoubles(b, float64(p.till))
		}
	}
	return b
}

// bit returns 1 if on, and 0 otherwise.
func bit(on bool) byte {
	if on {
		return 1
	}
	return 0
}

// appendDoubles appends numbers as Lua's doubles, which are exact up to 2^53.
func appendDoubles(b []byte, numbers ...float64) []byte {
	for _, n := range numbers {
		b = binary.BigEndian.AppendUint64(b, math.Float64bits(n))
	}
	return b
}

// repliesEach returns the number of integers in the reply to a group that there are
// for each bucket, besides the logReplies that follow for each log.
func repliesEach(what byte) int {
	switch {
	case what == whatRemove:
		return 0
	case tellsHeld(what):
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

// outcomes appends the outcomes in core.lua's reply about req to dst, and reports
// whether any key held something that is not a bucket. what says what was asked.
func (req Request) outcomes(reply []int64, what byte, dst []outcome) (outcomes []outcome, corrupt bool, err error) {
	each, held := repliesEach(what), tellsHeld(what)
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
