package outcome

import (
	"net/http"
	"net/textproto"
	"slices"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Families is a set of families of header fields.
type Families uint8

// The families of header fields.
const (
	XRateLimit Families = 1 << iota // X-RateLimit-*
	IETF                            // RateLimit-Policy and RateLimit, of draft 11
)

// The fields, in the order of their values in fields. The names are in the
// canonical form of http.Header.
const (
	fieldLimit = iota
	fieldRemaining
	fieldClear
	fieldReset
	fieldRetryAfter
	fieldPolicy
	fieldRateLimit
	fieldCount
)

var fieldNames = [fieldCount]string{
	fieldLimit:      "X-Ratelimit-Limit",
	fieldRemaining:  "X-Ratelimit-Remaining",
	fieldClear:      "X-Ratelimit-Clear",
	fieldReset:      "X-Ratelimit-Reset",
	fieldRetryAfter: "Retry-After",
	fieldPolicy:     "Ratelimit-Policy",
	fieldRateLimit:  "Ratelimit",
}

// fields are the values of our header fields. Empty ones are not set.
type fields [fieldCount]string

// set sets the fields in h. They are not copied: if others modify a value in h in
// place, it changes here too.
func (f *fields) set(h http.Header) {
	for i, v := range f {
		if v != "" {
			h[fieldNames[i]] = f[i : i+1 : i+1]
		}
	}
}

// remove removes from h the fields that were set before.
func (f *fields) remove(h http.Header) {
	for i, v := range f {
		if v != "" {
			delete(h, fieldNames[i])
		}
	}
}

// dropForeign removes from h the values that were added after ours, as a proxy adds
// those of an upstream. It also removes an upstream's X-RateLimit-Reset if we have
// none, as it would contradict our other fields. A field of ours that was removed
// or replaced meanwhile is left alone.
func (f *fields) dropForeign(h http.Header) {
	for i, v := range f {
		if v == "" {
			continue
		}
		if values := h[fieldNames[i]]; len(values) > 1 && values[0] == v {
			h[fieldNames[i]] = values[:1]
		}
	}
	if f.owns(fieldReset) && f[fieldReset] == "" {
		delete(h, fieldNames[fieldReset])
	}
}

// owns reports whether a field may only have our value.
func (f *fields) owns(field int) bool {
	return f[field] != "" || field == fieldReset && f[fieldLimit] != ""
}

// ownsName is like owns, for the name of a field.
func (f *fields) ownsName(name string) bool {
	i := slices.Index(fieldNames[:], textproto.CanonicalMIMEHeaderKey(strings.TrimSpace(name)))
	return i >= 0 && f.owns(i)
}

// dropAnnounced removes our fields from the trailers that h announces: their values
// would be an upstream's.
func (f *fields) dropAnnounced(h http.Header) {
	announced, ok := h["Trailer"]
	if !ok {
		return
	}
	rest := make([]string, 0, len(announced))
	for _, names := range announced {
		for name := range strings.SplitSeq(names, ",") {
			if !f.ownsName(name) {
				rest = append(rest, strings.TrimSpace(name))
			}
		}
	}
	if delete(h, "Trailer"); len(rest) > 0 {
		h["Trailer"] = []string{strings.Join(rest, ", ")}
	}
}

// dropTrailers removes our fields from the trailers in h that were not announced.
func (f *fields) dropTrailers(h http.Header) {
	for key := range h {
		if name, ok := strings.CutPrefix(key, http.TrailerPrefix); ok && f.ownsName(name) {
			delete(h, key)
		}
	}
}

// render sets f to the fields of a request with the given results, each shown in
// its families; sum is the summary of all. The values are substrings of what is
// appended to text, so the caller must not modify it any more.
func (f *fields) render(results []Entry, sum limiter.Summary, text []byte) {
	var ends [fieldCount]int
	end := func(i int) { ends[i] = len(text) }

	shown, ok := sum, true
	if !allShown(results, XRateLimit) {
		shown, ok = summarize(results, XRateLimit)
	}
	if ok {
		text = strconv.AppendInt(text, shown.Size, 10)
		end(fieldLimit)
		text = strconv.AppendInt(text, shown.Remaining, 10)
		end(fieldRemaining)
		text = appendSeconds(text, shown.Clear)
		end(fieldClear)
		if shown.Denied && !shown.Never {
			text = appendSeconds(text, shown.RetryAfter)
			end(fieldReset)
		}
	}
	if sum.Denied && !sum.Never {
		text = AppendWholeSeconds(text, sum.RetryAfter)
		end(fieldRetryAfter)
	}
	text = appendPolicies(text, results)
	end(fieldPolicy)
	text = appendLimits(text, results, sum.Denied)
	end(fieldRateLimit)

	// The bytes are never modified again, so the copy can be saved.
	all, from := unsafe.String(unsafe.SliceData(text), len(text)), 0
	for i, to := range ends {
		f[i] = ""
		if to > from {
			f[i], from = all[from:to], to
		}
	}
}

// appendPolicies appends the value of RateLimit-Policy. Like RateLimit, it follows
// draft-IETF-httpapi-ratelimit-headers-11: a structured field with an item for each
// limit. The quota q is the size, the window w the time in which a full bucket
// drains, or the length of a window that slides, or the time of a rate that warms up.
// There is no unit qu, even where requests cost other than one: only registered ones
// are allowed, and none of them is a unit of this kind. A limit on requests in progress
// has a registered one, and no window.
func appendPolicies(b []byte, results []Entry) []byte {
	start := len(b)
	for i := range results {
		e := &results[i]
		if e.Families&IETF == 0 {
			continue
		}
		b = appendName(b, len(b) == start, e)
		limit := e.Limit
		limit.Size = e.Decision.Size
		b = appendParameter(b, ";q=", limit.Size)
		if e.Concurrency {
			b = append(b, `;qu="concurrent-requests"`...)
			continue
		}
		b = appendParameter(b, ";w=", ceilSeconds(limit.DripTime(limit.Size)))
	}
	return b
}

// appendLimits appends the value of RateLimit. Clients that spread the available units r
// over the time t keep to the rate, see [limiter.Limit.SpendTime]. On denial, only limits
// without room for the same request have a t, so that none exceeds Retry-After.
func appendLimits(b []byte, results []Entry, denied bool) []byte {
	start := len(b)
	for i := range results {
		e := &results[i]
		if e.Families&IETF == 0 {
			continue
		}
		b = appendName(b, len(b) == start, e)
		b = appendParameter(b, ";r=", e.Decision.Remaining)
		switch d := &e.Decision; {
		case d.Never:
		case denied && d.RetryAfter > 0:
			b = appendParameter(b, ";t=", ceilSeconds(d.RetryAfter))
		case denied, e.Concurrency:
		default:
			b = appendParameter(b, ";t=", ceilSeconds(e.Limit.SpendTime(d)))
		}
	}
	return b
}

// appendName appends the name of a policy as a structured field string, after a
// comma unless it is the first. The characters of a path need no escaping, and a
// path has no '#'.
func appendName(b []byte, first bool, e *Entry) []byte {
	if !first {
		b = append(b, ", "...)
	}
	return append(e.appendTo(append(b, '"')), '"')
}

// appendTo appends the name by which e's limit is listed: its path and, if others of
// that path stand before it, its number, such as default#2.
func (e *Entry) appendTo(b []byte) []byte {
	b = append(b, e.Path...)
	if e.ordinal > 0 {
		b = strconv.AppendInt(append(b, '#'), int64(e.ordinal)+1, 10)
	}
	return b
}

func appendParameter(b []byte, name string, n int64) []byte {
	return strconv.AppendInt(append(b, name...), n, 10)
}

// appendSeconds appends d in seconds with three decimals, rounded up.
func appendSeconds(b []byte, d time.Duration) []byte {
	ms := ceil(d, time.Millisecond)
	b = strconv.AppendInt(b, ms/1000, 10)
	return append(b, '.', byte('0'+ms/100%10), byte('0'+ms/10%10), byte('0'+ms%10))
}

// seconds returns d in seconds with three decimals, rounded up.
func seconds(d time.Duration) string { return string(appendSeconds(nil, d)) }

// AppendWholeSeconds appends d in whole seconds, rounded up, at least 1.
func AppendWholeSeconds(b []byte, d time.Duration) []byte {
	return strconv.AppendInt(b, max(ceilSeconds(d), 1), 10)
}

// WholeSeconds returns d in whole seconds, rounded up, at least 1.
func WholeSeconds(d time.Duration) string {
	var few [20]byte
	return string(AppendWholeSeconds(few[:0], d))
}

// ceilSeconds returns d in whole seconds, rounded up.
func ceilSeconds(d time.Duration) int64 { return ceil(d, time.Second) }

// ceil returns how often unit is in d, rounded up. With a large share of jitter, d may be as
// long as any.
func ceil(d, unit time.Duration) int64 {
	n := int64(d / unit)
	if d%unit > 0 {
		n++
	}
	return n
}
