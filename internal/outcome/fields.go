package outcome

import (
	"net/http"
	"net/textproto"
	"slices"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome/fieldtext"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Families is a set of families of header fields.
type Families uint8

// The families of header fields. All fields whose names begin alike are of one family, also
// those that only others set.
const (
	XRateLimit Families = 1 << iota // X-RateLimit-*
	IETF                            // RateLimit and RateLimit-*: ours are RateLimit-Policy and RateLimit, of draft 11

	// GitHub makes X-RateLimit-* those that GitHub sends. Of several handlers that show the
	// family, the first decides.
	GitHub
)

// familyOf returns the family of a field, given its canonical name, or 0.
func familyOf(name string) Families {
	const x, ietf = "X-Ratelimit-", "Ratelimit"
	switch {
	case strings.HasPrefix(name, x):
		return XRateLimit
	case strings.HasPrefix(name, ietf) && (len(name) == len(ietf) || name[len(ietf)] == '-'):
		return IETF
	}
	return 0
}

// The fields, in the order of their values in fields. The names are in the
// canonical form of http.Header.
const (
	fieldLimit = iota
	fieldRemaining
	fieldClear // of GitHub's fields fieldNameUsed
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

// fieldNameUsed is the name of the field that GitHub has in place of X-RateLimit-Clear.
const fieldNameUsed = "X-Ratelimit-Used"

// fields are our header fields.
type fields struct {
	values [fieldCount]string // empty ones are not set
	github bool               // whether X-RateLimit-* are GitHub's: Used in place of Clear
}

// name returns the name of a field.
func (f *fields) name(i int) string {
	if i == fieldClear && f.github {
		return fieldNameUsed
	}
	return fieldNames[i]
}

// set sets the fields in h. They are not copied: if others modify a value in h in
// place, it changes here too.
func (f *fields) set(h http.Header) {
	for i, v := range f.values {
		if v != "" {
			h[f.name(i)] = f.values[i : i+1 : i+1]
		}
	}
}

// remove removes from h the fields that were set before.
func (f *fields) remove(h http.Header) {
	for i, v := range f.values {
		if v != "" {
			delete(h, f.name(i))
		}
	}
}

// families returns the families that have fields.
func (f *fields) families() (set Families) {
	if f.values[fieldLimit] != "" {
		set |= XRateLimit
	}
	if f.values[fieldPolicy] != "" {
		set |= IETF
	}
	return set
}

// value returns our value of the field of that name, or "".
func (f *fields) value(name string) string {
	for i := range f.values {
		if f.name(i) == name {
			return f.values[i]
		}
	}
	return ""
}

// dropForeign removes from h what others, such as a proxy, added to our families, and to fields
// of ours that are of no family. A field of ours that was removed or replaced meanwhile is left
// alone.
func (f *fields) dropForeign(h http.Header) {
	ours := f.families()
	for name, values := range h {
		family := familyOf(name)
		if family == 0 && len(values) < 2 {
			continue
		}
		switch own := f.value(name); {
		case own == "" && family&ours != 0:
			delete(h, name)
		case own != "" && len(values) > 0 && values[0] == own:
			h[name] = values[:1]
		}
	}
}

// owns reports whether a field may only have our value, given its name.
func (f *fields) owns(name string) bool {
	name = textproto.CanonicalMIMEHeaderKey(strings.TrimSpace(name))
	return familyOf(name)&f.families() != 0 || name == fieldNames[fieldRetryAfter] && f.values[fieldRetryAfter] != ""
}

// dropAnnounced removes from the trailers that h announces those that are ours: their
// values would be an upstream's.
func (f *fields) dropAnnounced(h http.Header) {
	announced, ok := h["Trailer"]
	if !ok {
		return
	}
	rest := make([]string, 0, len(announced))
	for _, names := range announced {
		for name := range strings.SplitSeq(names, ",") {
			if !f.owns(name) {
				rest = append(rest, strings.TrimSpace(name))
			}
		}
	}
	if delete(h, "Trailer"); len(rest) > 0 {
		h["Trailer"] = []string{strings.Join(rest, ", ")}
	}
}

// dropTrailers removes those that are ours from the trailers in h that were not announced.
func (f *fields) dropTrailers(h http.Header) {
	for key := range h {
		if name, ok := strings.CutPrefix(key, http.TrailerPrefix); ok && f.owns(name) {
			delete(h, key)
		}
	}
}

// render sets f to the fields of a request with the given entries, each shown in
// its families; sum is the summary of all, and at when they began to be decided, in µs since
// 1970. The values are substrings of what is appended to text, so the caller must not modify
// it any more.
func (f *fields) render(results []Entry, sum limiter.Summary, at int64, text []byte) {
	var ends [fieldCount]int
	end := func(i int) { ends[i] = len(text) }

	f.github = ofGitHub(results)
	shown, ok := sum, true
	if !allShown(results, XRateLimit) {
		shown, ok = summarize(results, XRateLimit)
	}
	if ok {
		if f.github && shown.Denied && !shown.Never {
			shown.Remaining = 0 // or its clients do not take a denial for one
		}
		text = strconv.AppendInt(text, shown.Size, 10)
		end(fieldLimit)
		text = strconv.AppendInt(text, shown.Remaining, 10)
		end(fieldRemaining)
		if f.github {
			text = strconv.AppendInt(text, shown.Size-shown.Remaining, 10)
			end(fieldClear)
			text = strconv.AppendInt(text, timeIn(at, resetIn(results, shown, at)), 10)
			end(fieldReset)
		} else {
			text = appendSeconds(text, shown.Clear)
			end(fieldClear)
			if shown.Denied && !shown.Never {
				text = appendSeconds(text, shown.RetryAfter)
				end(fieldReset)
			}
		}
	}
	if sum.Denied && !sum.Never {
		text = fieldtext.AppendWholeSeconds(text, sum.RetryAfter)
		end(fieldRetryAfter)
	}
	text = appendPolicies(text, results)
	end(fieldPolicy)
	text = appendLimits(text, results, sum.Denied, at)
	end(fieldRateLimit)

	// The bytes are never modified again, so the copy can be saved.
	all, from := unsafe.String(unsafe.SliceData(text), len(text)), 0
	for i, to := range ends {
		f.values[i] = ""
		if to > from {
			f.values[i], from = all[from:to], to
		}
	}
}

// ofGitHub reports whether the first of the results that are shown as X-RateLimit-* wants
// those of GitHub. So all responses to a client have the same fields, also those that the
// first handler denies.
func ofGitHub(results []Entry) bool {
	i := slices.IndexFunc(results, func(e Entry) bool { return e.Families&XRateLimit != 0 })
	return i >= 0 && results[i].Families&GitHub != 0
}

// appendPolicies appends the value of RateLimit-Policy: a structured field with an item for
// each limit.
func appendPolicies(b []byte, results []Entry) []byte {
	start := len(b)
	for i := range results {
		if e := &results[i]; e.Families&IETF != 0 {
			b = fieldtext.AppendPolicy(appendName(b, len(b) == start, e), &e.Limit, &e.Decision, e.Unit)
		}
	}
	return b
}

// appendLimits appends the value of RateLimit.
func appendLimits(b []byte, results []Entry, denied bool, at int64) []byte {
	start := len(b)
	for i := range results {
		if e := &results[i]; e.Families&IETF != 0 {
			b = fieldtext.AppendLimit(appendName(b, len(b) == start, e), &e.Limit, &e.Decision, denied, e.Unit, time.UnixMicro(at))
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

// appendSeconds appends d in seconds with three decimals, rounded up.
func appendSeconds(b []byte, d time.Duration) []byte {
	ms := fieldtext.Ceil(d, time.Millisecond)
	b = strconv.AppendInt(b, ms/1000, 10)
	return append(b, '.', byte('0'+ms/100%10), byte('0'+ms/10%10), byte('0'+ms%10))
}

// seconds returns d in seconds with three decimals, rounded up.
func seconds(d time.Duration) string { return string(appendSeconds(nil, d)) }
