// Package outcome is what the handlers that a request passes have decided on it, and how that
// is reported: header fields, placeholders, the access log and the request's span.
package outcome

import (
	"bytes"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome/fieldtext"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Outcome is what all rate_limit handlers decided on one request. It is empty until
// a store has decided.
//
// It has room for what most requests need, so that a single allocation suffices
// for them.
type Outcome struct {
	entries []Entry
	fields  fields
	writer  Writer
	Waited  time.Duration        // for Redis, so far
	Delayed time.Duration        // until there was room, so far
	at      int64                // when the last handler began to decide, in µs since 1970
	result  telemetry.Checked    // the outcome of the request so far
	counted telemetry.CheckedSet // what it was counted as
	opened  bool                 // whether a handler is going to count it
	logged  bool                 // whether the access log shows it
	traced  bool                 // whether the request has a span
	stripe  uint8                // of counters
	inline  [1]Entry
	text    [40]byte // backs the fields that the first handler sets
}

// Policy is what responses show of a limit besides its numbers.
type Policy struct {
	Path        string // of the limit
	Title       string // its path, or the name of the zone that it was
	Status      int    // of denials
	Concurrency bool   // whether it counts requests in progress
	Unit        string // of its quota, if that is registered and not requests: see appendPolicies
}

// Entry is what one bucket decided on a request, and how to show it.
type Entry struct {
	*Policy
	Name     string        // of the bucket in the store
	Limit    limiter.Limit // as the store has it: its size includes what may be above that of the decision
	Cost     int64         // of the request or, if it is Charged, what it was charged
	Families Families      // of header fields that show it
	Charged  bool          // whether the request was charged, by now
	Over     bool          // whether the request filled the bucket above its size
	Banned   bool          // whether the limit bans the key
	ordinal  uint16        // how many other limits of the same path are listed before
	Decision limiter.Decision
}

// variable is the variable of the request that holds its outcome.
const variable = "rate_limit.outcome"

// tracedVariable is a variable that Caddy sets in requests that it traces.
const tracedVariable = "trace_id"

// Of returns the outcome of a request, a new one if there is none yet. stripe chooses
// the counters in which it is counted.
func Of(r *http.Request, repl *caddy.Replacer, stripe uint32) *Outcome {
	vars := r.Context().Value(caddyhttp.VarsCtxKey).(map[string]any)
	_, traced := vars[tracedVariable]
	if o, ok := vars[variable].(*Outcome); ok {
		o.traced = traced
		return o
	}
	o := &Outcome{stripe: uint8(stripe & 0xff), traced: traced}
	o.entries = o.inline[:0]
	vars[variable] = o
	repl.Map(o.placeholder)
	return o
}

// SetResult notes the outcome of the request at one more handler. It was denied if any
// limit did so.
func (o *Outcome) SetResult(result telemetry.Checked) {
	if o.result != telemetry.CheckedDenied {
		o.result = result
	}
}

// Enter reports whether the calling handler is the outermost of those that a request
// passes, which counts the request when it ends: by then the handlers within it have
// decided too. There may be no outcome.
func (o *Outcome) Enter() (outermost bool) {
	if o == nil || o.opened {
		return false
	}
	o.opened = true
	return true
}

// Count counts the request, unless a handler that has ended did so already and
// nothing else has become of it since, in an error route.
func (o *Outcome) Count(in *telemetry.Process) {
	o.opened = false
	if o.counted.Add(o.result) {
		in.CountRequest(uint32(o.stripe), o.result)
	}
}

// Grow makes room for n entries more, whose times count from at on: before the store decided. It
// returns the index of the next one.
func (o *Outcome) Grow(n int, at time.Time) (next int) {
	if n > 0 {
		o.at = at.UnixMicro()
	}
	o.entries = slices.Grow(o.entries, n)
	return len(o.entries)
}

// Append adds what was decided on one bucket, and returns its index.
func (o *Outcome) Append(e Entry) (i int) {
	if e.Decision.DryRun || e.Decision.Pool {
		e.Families = 0
	}
	if e.Concurrency {
		e.Decision.Clear = 0 // when it is clear is up to the requests in progress
	}
	o.entries = append(o.entries, e)
	return len(o.entries) - 1
}

// Show updates the header fields by what one handler decided: the entries from index before on. It
// returns the entry of these that decided, nil if there is none, and the reported wait, for all
// limits that were asked so far: 0 unless the request was denied and a wait helps. longer returns the
// wait to report instead of one that would do, of the entry that denied the request; it may be nil.
func (o *Outcome) Show(before int, longer func(*Entry, time.Duration) time.Duration, h http.Header) (decider *Entry, wait time.Duration) {
	if before == len(o.entries) {
		return nil, 0
	}
	own, _ := summarize(o.entries[before:], 0)
	if own.Denied {
		o.SetResult(telemetry.CheckedDenied)
	}
	all, text := own, o.text[:0]
	if before > 0 {
		all, _ = summarize(o.entries, 0)
		text = nil // strings of earlier fields point into o.text
		o.fields.remove(h)
		numberDuplicates(o.entries, before)
	}
	if all.Denied && len(o.entries) > 1 {
		for i := range o.entries {
			if e := &o.entries[i]; i >= before || e.Decision.RetryAfter == 0 { // or it was reported before
				e.extendRetryAfter()
			}
		}
		all, _ = summarize(o.entries, 0)
	}
	if longer != nil && own.Denied && all.RetryAfter > 0 {
		e := &o.entries[before+own.Deciding]
		e.Decision.RetryAfter = longer(e, all.RetryAfter)
		all.RetryAfter = e.Decision.RetryAfter
	}
	o.fields.render(o.entries, all, o.at, text)
	o.fields.set(h)
	return &o.entries[before+own.Deciding], all.RetryAfter
}

// Charge notes that the i-th entry was charged so many units, if any.
func (o *Outcome) Charge(i int, units int64) {
	if e := &o.entries[i]; units > 0 {
		e.Cost, e.Charged = units, true
	}
}

// numberDuplicates makes the names in the IETF fields unique, given that entries
// from index from on are new. A limit that was charged several times, by several
// handlers or one that was invoked twice, is listed once. Different limits of one
// path, such as those without a name, are numbered.
func numberDuplicates(entries []Entry, from int) {
	for j := from; j < len(entries); j++ {
		entries[j].listAfter(entries[:j])
	}
}

// Titles returns the names that the IETF fields of a response would have for entries if it
// listed them all. There may be many.
func Titles(entries []Entry) []string {
	type identity struct {
		path, name string
		limit      limiter.Limit
	}
	titles := make([]string, len(entries))
	ordinals, next := make(map[identity]uint16, len(entries)), make(map[string]uint16)
	for i := range entries {
		e := &entries[i]
		of := identity{e.Path, e.Name, e.Limit}
		ordinal, known := ordinals[of]
		if !known {
			ordinal = next[e.Path]
			ordinals[of], next[e.Path] = ordinal, ordinal+1
		}
		e.ordinal = ordinal
		titles[i] = string(e.appendTo(nil))
	}
	return titles
}

// placeholder returns the value of a placeholder of this module.
func (o *Outcome) placeholder(name string) (any, bool) {
	name, ours := strings.CutPrefix(name, "http.rate_limit.")
	if !ours {
		return nil, false
	}
	if name == "delayed" { // also if all that was decided is that there was a place
		return seconds(o.Delayed), true
	}
	if len(o.entries) == 0 {
		return nil, false
	}
	for i := range marks {
		if name == marks[i].name {
			return o.marked(marks[i].is), true
		}
	}
	sum, decided := summarize(o.entries, 0)
	if !decided {
		return nil, false
	}
	decider := &o.entries[sum.Deciding]
	switch name {
	case "limit":
		return decider.Path, true
	case "size":
		return decider.Decision.Size, true
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
		return fieldtext.WholeSeconds(sum.RetryAfter), true
	case "reset":
		return fieldtext.CeilSeconds(resetIn(o.entries, sum, o.at)), true
	case "reset_at":
		return timeIn(o.at, resetIn(o.entries, sum, o.at)), true
	case "denied":
		return sum.Denied, true
	case "exceeded.name":
		if !sum.Denied {
			return "", true
		}
		return decider.Title, true
	case "by":
		return decider.Decision.By.String(), true
	case "violated_policies":
		return o.violated(), true
	}
	return nil, false
}

// violated returns the names of all limits that denied the request, as RateLimit-Policy has
// them, as a JSON array. Names need no escaping, see appendName.
func (o *Outcome) violated() string {
	names := []byte{'['}
	for i := range o.entries {
		e := &o.entries[i]
		if d := &e.Decision; !d.Denied || d.DryRun || d.Pool {
			continue
		}
		name := append(e.appendTo([]byte{'"'}), '"')
		switch {
		case bytes.Contains(names, name):
		case len(names) > 1:
			names = append(append(names, ", "...), name...)
		default:
			names = append(names, name...)
		}
	}
	return string(append(names, ']'))
}

// resetIn returns, given a summary of entries, over what time from at on, in µs since 1970, to
// spend the units that the deciding one has left or, if the request was denied, its wait. It is
// 0 if that is up to requests in progress, and without a quota.
func resetIn(entries []Entry, sum limiter.Summary, at int64) time.Duration {
	e := &entries[sum.Deciding]
	switch {
	case sum.Denied && !sum.Never:
		return sum.RetryAfter
	case e.Concurrency, e.Decision.Size == 0:
		return 0
	}
	return e.Limit.SpendTime(&e.Decision, time.UnixMicro(at))
}

// timeIn returns the time d after at, which is in µs since 1970, in seconds, rounded up.
func timeIn(at int64, d time.Duration) int64 {
	const second = int64(time.Second / time.Microsecond)
	return (at + fieldtext.Ceil(d, time.Microsecond) + second - 1) / second
}

// marks are what may be said of a limit besides its decision. Each is told by the path of
// the first limit that it is true of, as a placeholder and in the access log.
var marks = [...]struct {
	name string
	is   func(*Entry) bool
}{
	{"over", func(e *Entry) bool { return e.Over && !e.Decision.DryRun }},
	{"banned", func(e *Entry) bool { return e.Banned && !e.Decision.DryRun }},
	{"borrowed", func(e *Entry) bool { return e.Decision.Borrowed && !e.Decision.Pool && !e.Decision.DryRun }},
	{"dry_run", func(e *Entry) bool { return e.Decision.DryRun && e.Decision.Denied }},
}

// marked returns the path of the first limit that a mark is true of, or "".
func (o *Outcome) marked(is func(*Entry) bool) string {
	for i := range o.entries {
		if is(&o.entries[i]) {
			return o.entries[i].Path
		}
	}
	return ""
}

// Wrap returns a writer that keeps values of others out of our fields. It returns
// w if w has such a writer already or there are no fields.
func (o *Outcome) Wrap(w http.ResponseWriter) http.ResponseWriter {
	if o.fields.values == ([fieldCount]string{}) {
		return w
	}
	rw := &o.writer
	if rw.ResponseWriter != nil { // in use, but not necessarily in w
		if isWrapped(w) {
			return w
		}
		rw = new(Writer)
	}
	rw.outcome, rw.ResponseWriter = o, w
	return rw
}

// extendRetryAfter sets RetryAfter, also of a bucket that was charged for a request that
// another one denied: the time until it has room for the same request again, since
// it would deny clients that retry earlier. All that tells of it reads it here.
func (e *Entry) extendRetryAfter() {
	b := limiter.Bucket{Limit: e.Limit, Cost: e.Cost}
	e.Decision.RetryAfter = b.RoomIn(&e.Decision)
}

// listAfter numbers e after others of its path. If one of them is of the same
// limit, only the one that decides of the two stays listed.
func (e *Entry) listAfter(others []Entry) {
	for i := range others {
		other := &others[i]
		switch {
		case e.Families&other.Families&IETF == 0 || e.Path != other.Path:
		case e.Name != other.Name || e.Limit != other.Limit:
			e.ordinal = max(e.ordinal, other.ordinal+1)
		case other.decidesBefore(e):
			e.Families &^= IETF
			return
		default:
			e.ordinal = other.ordinal
			other.Families &^= IETF
			return
		}
	}
}

// decidesBefore reports whether e, and not other, would decide if the request had no others.
func (e *Entry) decidesBefore(other *Entry) bool {
	pair := [...]*Entry{other, e}
	return limiter.SummarizeFunc(2, func(i int) (*limiter.Decision, int64) {
		return &pair[i].Decision, pair[i].Cost
	}).Deciding == 1
}

// summarize returns the summary of the entries shown in a family, or of all
// entries if it is 0. It returns false if there are none but dry runs.
func summarize(entries []Entry, family Families) (sum limiter.Summary, decided bool) {
	sum = limiter.SummarizeFunc(len(entries), func(i int) (*limiter.Decision, int64) {
		e := &entries[i]
		if e.Families&family != family {
			return nil, 0
		}
		decided = decided || !e.Decision.DryRun
		return &e.Decision, e.Cost
	})
	return sum, decided
}

// allShown reports whether all entries are shown in a family.
func allShown(entries []Entry, family Families) bool {
	for i := range entries {
		if entries[i].Families&family == 0 {
			return false
		}
	}
	return true
}
