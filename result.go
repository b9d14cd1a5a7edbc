package ratelimit

import (
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// result is what all rate_limit handlers decided on one request. It is empty until
// a store has decided.
//
// It has room for what most requests need, so that a single allocation suffices
// for them.
type result struct {
	buckets []bucketResult
	fields  fields
	writer  responseWriter
	waited  time.Duration        // for Redis, so far
	delayed time.Duration        // until there was room, so far
	what    telemetry.Checked    // the outcome of the request so far
	counted telemetry.CheckedSet // what it was counted as
	opened  bool                 // whether a handler is going to count it
	logged  bool                 // whether the access log shows the result
	traced  bool                 // whether the request has a span
	stripe  uint8                // of counters
	inline  [1]bucketResult
	text    [56]byte // backs the fields that the first handler sets
}

// resultVar is the variable of the request that holds its result.
const resultVar = "rate_limit.result"

// tracedVar is a variable that Caddy sets in requests that it traces.
const tracedVar = "trace_id"

// resultOf returns the result of the request, a new one if there is none yet.
func resultOf(eval *evaluation) *result {
	vars := eval.request.Context().Value(caddyhttp.VarsCtxKey).(map[string]any)
	_, traced := vars[tracedVar]
	if res, ok := vars[resultVar].(*result); ok {
		res.traced = traced
		return res
	}
	res := &result{stripe: uint8(eval.stripe & 0xff), traced: traced}
	res.buckets = res.inline[:0]
	vars[resultVar] = res
	eval.replacer.Map(res.placeholder)
	return res
}

// become notes the outcome of the request at one more handler. It was denied if any
// limit did so.
func (res *result) become(what telemetry.Checked) {
	if res.what != telemetry.CheckedDenied {
		res.what = what
	}
}

// open reports whether the calling handler is the outermost of those that a request
// passes, which counts the request when it ends: by then the handlers within it have
// decided too. There may be no result.
func (res *result) open() (outermost bool) {
	if res == nil || res.opened {
		return false
	}
	res.opened = true
	return true
}

// count counts the request, unless a handler that has ended did so already and
// nothing else has become of it since, in an error route.
func (res *result) count() {
	res.opened = false
	if res.counted.Add(res.what) {
		process.CountRequest(uint32(res.stripe), res.what)
	}
}

// add adds the decisions of eval and updates the header fields. It returns the
// result of the deciding bucket of eval, and how long to wait for all buckets.
func (res *result) add(eval *evaluation, show families, h http.Header) (decider *bucketResult, wait time.Duration) {
	before := len(res.buckets)
	res.buckets = slices.Grow(res.buckets, len(eval.decisions))
	for i := range eval.decisions {
		d, show := &eval.decisions[i], show
		if d.DryRun || d.Pool {
			show = 0
		}
		if eval.of[i].policy.concurrency {
			d.Clear = 0 // when it is clear is up to the requests in progress
		}
		res.buckets = append(res.buckets, bucketResult{
			policy:   eval.of[i].policy,
			name:     eval.buckets[i].Name,
			limit:    eval.buckets[i].Limit,
			over:     eval.of[i].over,
			banned:   eval.of[i].banned > 0,
			cost:     eval.buckets[i].Cost,
			families: show,
			decision: *d,
		})
	}
	own := limiter.Summarize(eval.decisions)
	if own.Denied {
		res.become(telemetry.CheckedDenied)
	}
	all, text := own, res.text[:0]
	if before > 0 {
		all, _ = summarize(res.buckets, 0)
		text = nil // strings of earlier fields point into res.text
		res.fields.remove(h)
		res.numberDuplicates(before)
	}
	if all.Denied && len(res.buckets) > 1 {
		for i := range res.buckets {
			res.buckets[i].extendRetryAfter()
		}
		all, _ = summarize(res.buckets, 0)
	}
	res.fields.render(res.buckets, all, text)
	res.fields.set(h)
	return &res.buckets[before+own.Deciding], all.RetryAfter
}

// numberDuplicates makes the names in the IETF fields unique, given that results
// from index from on are new. A limit that was charged several times, by several
// handlers or one that was invoked twice, is listed once. Different limits of one
// path, such as those without a name, are numbered.
func (res *result) numberDuplicates(from int) {
	for j := from; j < len(res.buckets); j++ {
		res.buckets[j].listAfter(res.buckets[:j])
	}
}

// placeholder returns the value of a placeholder of this module.
func (res *result) placeholder(name string) (any, bool) {
	name, ours := strings.CutPrefix(name, "http.rate_limit.")
	if !ours {
		return nil, false
	}
	sum, decided := summarize(res.buckets, 0)
	switch {
	case len(res.buckets) == 0:
		return nil, false
	case name == "banned":
		return res.bannedPath(), true
	case name == "borrowed":
		return res.borrowedPath(), true
	case name == "dry_run":
		return res.dryRunPath(), true
	case name == "over":
		return res.overPath(), true
	case name == "delayed":
		return seconds(res.delayed), true
	}
	if !decided {
		return nil, false
	}
	decider := &res.buckets[sum.Deciding]
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
		return decider.title(), true
	case "by":
		return decider.decision.By.String(), true
	}
	return nil, false
}

// overPath returns the path of the first limit above whose size the request is, or "".
func (res *result) overPath() string {
	for i := range res.buckets {
		if br := &res.buckets[i]; br.over && !br.decision.DryRun {
			return br.path
		}
	}
	return ""
}

// bannedPath returns the path of the first limit that bans the key of the request, or "".
func (res *result) bannedPath() string {
	for i := range res.buckets {
		if br := &res.buckets[i]; br.banned && !br.decision.DryRun {
			return br.path
		}
	}
	return ""
}

// borrowedPath returns the path of the first limit that has borrowed for the request, or "".
func (res *result) borrowedPath() string {
	for i := range res.buckets {
		if d := &res.buckets[i].decision; d.Borrowed && !d.Pool && !d.DryRun {
			return res.buckets[i].path
		}
	}
	return ""
}

// dryRunPath returns the path of the first dry run that would have denied the request,
// or "".
func (res *result) dryRunPath() string {
	for i := range res.buckets {
		if d := &res.buckets[i].decision; d.DryRun && d.Denied {
			return res.buckets[i].path
		}
	}
	return ""
}

// wrap returns a writer that keeps values of others out of our fields. It returns
// w if w has such a writer already or there are no fields.
func (res *result) wrap(w http.ResponseWriter) http.ResponseWriter {
	if res.fields == (fields{}) {
		return w
	}
	rw := &res.writer
	if rw.ResponseWriter != nil { // in use, but not necessarily in w
		if isWrapped(w) {
			return w
		}
		rw = new(responseWriter)
	}
	rw.result, rw.ResponseWriter = res, w
	return rw
}

// bucketResult is what one bucket decided on a request, and how to show it.
type bucketResult struct {
	*policy
	name     string        // of the bucket in the store
	limit    limiter.Limit // as the store has it: its size includes what may be above that of the decision
	cost     int64
	families families
	over     bool   // whether the request filled the bucket above its size
	banned   bool   // whether the limit bans the key
	ordinal  uint16 // how many other limits of the same path are listed before
	decision limiter.Decision
}

// tighter reports whether br leaves less room than other.
func (br *bucketResult) tighter(other *bucketResult) bool {
	d, o := &br.decision, &other.decision
	if d.Denied != o.Denied {
		return d.Denied
	}
	return d.Remaining < o.Remaining
}

// extendRetryAfter sets RetryAfter of a bucket that was charged for a request that
// another one denied: the time until it has room for the same request again, since
// it would deny clients that retry earlier.
func (br *bucketResult) extendRetryAfter() {
	b := limiter.Bucket{Limit: br.limit, Cost: br.cost}
	br.decision.RetryAfter = b.Wait(&br.decision)
}

// listAfter numbers br after others of its path. If one of them is of the same
// limit, only the one with less room stays listed.
func (br *bucketResult) listAfter(others []bucketResult) {
	for i := range others {
		other := &others[i]
		switch {
		case br.families&other.families&ietf == 0 || br.path != other.path:
		case br.name != other.name || br.limit != other.limit:
			br.ordinal = max(br.ordinal, other.ordinal+1)
		case other.tighter(br):
			br.families &^= ietf
			return
		default:
			br.ordinal = other.ordinal
			other.families &^= ietf
			return
		}
	}
}

// summarize returns the summary of the results shown in a family, or of all
// results if it is 0. It returns false if there are none.
func summarize(results []bucketResult, family families) (limiter.Summary, bool) {
	var few [8]limiter.Decision
	decisions, decided := few[:0], false
	for i := range results {
		if results[i].families&family == family {
			decisions = append(decisions, results[i].decision)
			decided = decided || !results[i].decision.DryRun
		}
	}
	if !decided {
		return limiter.Summary{}, false
	}
	return limiter.Summarize(decisions), true
}

// allShown reports whether all results are shown in a family.
func allShown(results []bucketResult, family families) bool {
	for i := range results {
		if results[i].families&family == 0 {
			return false
		}
	}
	return true
}
