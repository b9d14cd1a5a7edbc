package ratelimit

import (
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// record is what all rate_limit handlers decided on one request; nothing as long
// as no store has decided.
//
// It has room for what most requests need, so that they make do with this one
// piece of memory.
type record struct {
	items  []item
	fields fields
	writer responseWriter
	waited time.Duration // for Redis
	few    [1]item
	text   [64]byte // of the fields that the first handler sets
}

// recordVar is the request's variable that holds its record.
const recordVar = "rate_limit.record"

// recordOf returns the record of the request, a new one if there is none yet.
func recordOf(c *check) *record {
	vars := c.request.Context().Value(caddyhttp.VarsCtxKey).(map[string]any)
	if rec, ok := vars[recordVar].(*record); ok {
		return rec
	}
	rec := new(record)
	rec.items = rec.few[:0]
	vars[recordVar] = rec
	c.replacer.Map(rec.placeholder)
	return rec
}

// add adds what the buckets of c decided, sets the fields anew, and returns the
// one that decided among those of c, and how long to wait for all.
func (rec *record) add(c *check, show families, h http.Header) (decider *item, wait time.Duration) {
	earlier := len(rec.items)
	rec.items = slices.Grow(rec.items, len(c.decisions))
	for i, d := range c.decisions {
		rec.items = append(rec.items, item{
			policy:   c.policies[i],
			name:     c.buckets[i].Name,
			limit:    c.buckets[i].Limit,
			cost:     c.buckets[i].Cost,
			families: show,
			decision: d,
		})
	}
	own := limiter.Summarize(c.decisions)
	all, text := own, rec.text[:0]
	if earlier > 0 {
		all, _ = summarize(rec.items, 0)
		text = nil // others have strings of rec.text
		rec.fields.unset(h)
		rec.list(earlier)
	}
	if all.Denied && len(rec.items) > 1 {
		for i := range rec.items {
			rec.items[i].await()
		}
		all, _ = summarize(rec.items, 0)
	}
	rec.fields.describe(rec.items, all, text)
	rec.fields.set(h)
	return &rec.items[earlier+own.Deciding], all.RetryAfter
}

// list makes the names in the IETF fields unique when the items from the given
// index on have joined: one member tells of a limit that several handlers, or one
// that was invoked twice, have charged, and limits that only share their path, as
// all without a name do, are numbered.
func (rec *record) list(from int) {
	for j := from; j < len(rec.items); j++ {
		rec.items[j].listBehind(rec.items[:j])
	}
}

// placeholder returns the value of one of our placeholders.
func (rec *record) placeholder(name string) (any, bool) {
	name, ours := strings.CutPrefix(name, "http.rate_limit.")
	if !ours {
		return nil, false
	}
	sum, decided := summarize(rec.items, 0)
	if !decided {
		return nil, false
	}
	decider := &rec.items[sum.Deciding]
	switch name {
	case "limit":
		return decider.path, true
	case "size":
		return decider.decision.Size, true
	case "remaining":
		return sum.Remaining, true
	case "clear":
		return seconds(sum.Clear), true
	case "retry_after":
		switch {
		case sum.Never:
			return "", true
		case !sum.Denied:
			return "0", true
		}
		return wholeSeconds(sum.RetryAfter), true
	case "denied":
		return sum.Denied, true
	case "exceeded.name":
		if !sum.Denied {
			return "", true
		}
		return decider.path, true
	}
	return nil, false
}

// wrap returns a writer that keeps our fields free of values that others add to
// them, or w if there is one in it already or there is nothing to keep.
func (rec *record) wrap(w http.ResponseWriter) http.ResponseWriter {
	if rec.fields == (fields{}) {
		return w
	}
	rw := &rec.writer
	if rw.ResponseWriter != nil { // in use, maybe where it can't be seen from here
		if wrapped(w) {
			return w
		}
		rw = new(responseWriter)
	}
	rw.record, rw.ResponseWriter = rec, w
	return rw
}

// item is what one bucket decided on a request, and how to show it.
type item struct {
	*policy
	name     string // of the bucket in the store
	limit    limiter.Limit
	cost     int64
	families families
	earlier  uint16 // how many other limits of its path were listed before
	decision limiter.Decision
}

// tighter reports whether it leaves less room than other does.
func (it *item) tighter(other *item) bool {
	d, o := &it.decision, &other.decision
	if d.Denied != o.Denied {
		return d.Denied
	}
	return d.Remaining < o.Remaining
}

// await makes RetryAfter, of a bucket that was charged for a request which another
// denies, the time until it has room for that request again: clients that come
// earlier are denied by it.
func (it *item) await() {
	b := limiter.Bucket{Limit: it.limit, Cost: it.cost}
	it.decision.RetryAfter = b.Wait(&it.decision)
}

// listBehind lists it behind others, or one of them if that is of the same limit
// and leaves less room.
func (it *item) listBehind(others []item) {
	for i := range others {
		other := &others[i]
		switch {
		case it.families&other.families&ietf == 0 || it.path != other.path:
		case it.name != other.name || it.limit != other.limit:
			it.earlier = max(it.earlier, other.earlier+1)
		case other.tighter(it):
			it.families &^= ietf
			return
		default:
			it.earlier = other.earlier
			other.families &^= ietf
			return
		}
	}
}

// summarize returns the summary of the items that are shown in a family, 0
// meaning any, and whether there are such items.
func summarize(items []item, family families) (limiter.Summary, bool) {
	var few [8]limiter.Decision
	decisions := few[:0]
	for i := range items {
		if items[i].families&family == family {
			decisions = append(decisions, items[i].decision)
		}
	}
	if len(decisions) == 0 {
		return limiter.Summary{}, false
	}
	return limiter.Summarize(decisions), true
}

// allShown reports whether all items are shown in a family.
func allShown(items []item, family families) bool {
	for i := range items {
		if items[i].families&family == 0 {
			return false
		}
	}
	return true
}
