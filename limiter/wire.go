package limiter

import (
	"encoding/binary"
	"fmt"
	"math"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter/internal/redisscript"
)

// newScript returns a script with the given source, which replies as core.lua
// does.
func newScript(source string) *redisscript.Script {
	s := redisscript.NewScript(source)
	probe := query{what: whatProbe, buckets: []bucketQuery{{limit: bucket.Limit{Size: 1, DripInterval: time.Microsecond, DripSize: 1}}}}
	s.ProbeArg, s.ProbeReplies = string(probe.appendGroup(nil)), probe.replies()
	s.Wrote = func(c *redisscript.Call) bool {
		if q, ok := c.Owner.(*query); ok {
			return q.wrote()
		}
		return len(c.Reply) == s.ProbeReplies && c.Reply[0] > 0 // otherwise there was nothing to write
	}
	return s
}

// appendGroup appends q as core.lua reads it: a run of one group.
func (q *query) appendGroup(b []byte) []byte {
	reports := q.reports()
	b = binary.BigEndian.AppendUint16(b, 1)
	b = binary.BigEndian.AppendUint16(b, uint16(len(q.buckets))) // at most maxBuckets
	b = append(b, q.what, bit(reports))
	for i := range q.buckets {
		p := &q.buckets[i]
		size, rate, drip, phase := p.limit.Doubles(p.cost)
		b = append(b, byte(p.limit.Algorithm), bit(p.limit.CountDenied)|bit(p.dryRun)<<1|bit(p.held != nil)<<2, p.role())
		b = appendDoubles(b, size, rate, drip, phase, float64(p.cost))
		if reports {
			b = appendDoubles(b, float64(p.local.Clear), float64(p.local.Rest), float64(p.local.inFlight))
			b = append(b, bit(p.local.dirty == own)|bit(p.local.dirty == clean)<<1)
		}
		if q.what == whatLease {
			b = appendDoubles(b, float64(q.ahead), float64(q.least))
		}
		h := p.held
		if h == nil {
			continue
		}
		b = appendDoubles(b, float64(h.process), float64(h.number))
		if q.what == whatSettle || q.what == whatRenew {
			b = appendDoubles(b, float64(h.receipt), float64(h.ended), float64(h.charged), float64(h.known))
		}
		if q.what == whatRenew {
			b = appendDoubles(b, float64(h.before.number), float64(h.before.receipt), float64(h.beforeCharged))
		}
	}
	return b
}

// The roles of buckets besides the number of those that one watches, see decide.lua.
const (
	roleBorrows = 254
	rolePool    = 255
)

// role returns what p is to the other buckets of its group.
func (p *bucketQuery) role() byte {
	switch {
	case p.borrows:
		return roleBorrows
	case p.pool:
		return rolePool
	}
	return p.watches
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

// outcomes appends the outcomes in core.lua's reply to q to dst, and reports whether any
// key held something that is not a bucket.
func (q *query) outcomes(dst []outcome) (outcomes []outcome, corrupt bool, err error) {
	if len(q.Reply) != q.replies() {
		return dst, false, fmt.Errorf("reply of %d numbers to a request of %d buckets", len(q.Reply), len(q.buckets))
	}
	each := 0
	for i := range q.buckets {
		each += q.replyCount(i)
	}
	outcomes = dst
	reply, logs := q.Reply[:each], q.Reply[each:]
	var pools lending
	for i := range q.buckets {
		limit := &q.buckets[i].limit
		left, rest := reply[0], reply[1]
		foreign := left < 0
		if foreign {
			left, corrupt = -1-left, true
		}
		denied, blocked := rest < 0, false
		if denied {
			rest = -1 - rest
			if blocked = rest >= bucket.Horizon; blocked {
				rest -= bucket.Horizon
			}
		}
		if left < 0 || left > bucket.Horizon || rest >= limit.RestEnd() || left == 0 && rest > 0 {
			return dst, false, fmt.Errorf("reply of %d, %d is no bucket", reply[0], reply[1])
		}
		outcomes = append(outcomes, outcome{Ahead: bucket.Ahead{Clear: left, Rest: rest}, denied: denied, blocked: blocked, foreign: foreign, by: DecidedByRedis})
		o := &outcomes[len(outcomes)-1]
		if q.what <= byte(AccountingEach) {
			_, o.unused = pools.next(q.buckets[i].borrows, q.buckets[i].pool, !denied)
		}
		if n := q.replyCount(i); n == 4 {
			if o.held, o.receipt = reply[2], reply[3]; o.held < 0 || o.held > bucket.Horizon || o.receipt < -1 || o.receipt > 1<<53 {
				return dst, false, fmt.Errorf("reply of %d, %d reports of no units held", o.held, o.receipt)
			}
			reply = reply[4:]
		} else {
			reply = reply[2:]
		}
		if limit.KeepsEntries() {
			v := &bucket.EntriesLevel{Units: logs[0], Clear: logs[1], Again: logs[2], One: logs[3]}
			logs = logs[entriesReplies:]
			if least, most := min(v.Units, v.Clear, v.Again, v.One), max(v.Units, v.Clear, v.Again, v.One); least < 0 || most > bucket.Horizon {
				return dst, false, fmt.Errorf("reply of %d, %d, %d, %d is no log", v.Units, v.Clear, v.Again, v.One)
			}
			o.entries = v
		}
	}
	return outcomes, corrupt, nil
}

// encode makes q's Arg.
func (q *query) encode() {
	q.group = q.appendGroup(q.group[:0])
	q.Arg = text(q.group)
}
