package ratelimit

import (
	"io"
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

// wrapped reports whether a writer of ours is in w.
func wrapped(w http.ResponseWriter) bool {
	for {
		if _, ok := w.(*responseWriter); ok {
			return true
		}
		wrapper, ok := w.(interface{ Unwrap() http.ResponseWriter })
		if !ok {
			return false
		}
		w = wrapper.Unwrap()
	}
}

// responseWriter puts our fields in order just before the header is written.
// Whatever else can be done with the writer underneath, such as hijacking its
// connection, is found through Unwrap.
type responseWriter struct {
	caddyhttp.ResponseWriterWrapper
	record *record
	done   bool
}

// finish puts our fields in order, once.
func (rw *responseWriter) finish() {
	if !rw.done {
		rw.done = true
		h := rw.Header()
		rw.record.fields.keep(h)
		rw.record.fields.unannounce(h)
	}
}

// end is called when everything is written but the trailers. Those that were not
// announced have joined the header meanwhile.
func (rw *responseWriter) end() {
	rw.record.fields.dropTrailers(rw.Header())
}

// WriteHeader implements http.ResponseWriter. Informational responses are not
// the final one, though our fields stand alone there too; only switching
// protocols is.
func (rw *responseWriter) WriteHeader(status int) {
	if status >= 200 || status == http.StatusSwitchingProtocols {
		rw.finish()
	} else {
		rw.record.fields.keep(rw.Header())
	}
	rw.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (rw *responseWriter) Write(b []byte) (int, error) {
	rw.finish()
	return rw.ResponseWriter.Write(b)
}

// ReadFrom implements io.ReaderFrom, by which files are sent without copying.
func (rw *responseWriter) ReadFrom(r io.Reader) (int64, error) {
	rw.finish()
	return rw.ResponseWriterWrapper.ReadFrom(r)
}

// FlushError flushes what was written, for http.ResponseController.
func (rw *responseWriter) FlushError() error {
	rw.finish()
	return http.NewResponseController(rw.ResponseWriter).Flush()
}

// Interface guards
var (
	_ http.ResponseWriter = (*responseWriter)(nil)
	_ http.Pusher         = (*responseWriter)(nil)
	_ io.ReaderFrom       = (*responseWriter)(nil)
)
