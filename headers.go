package ratelimit

import (
	"fmt"
	"net/http"
	"net/textproto"
	"slices"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// families is a set of header field families.
type families uint8

const (
	xRateLimit families = 1 << iota // X-RateLimit-*
	ietf                            // RateLimit-Policy and RateLimit
)

// newFamilies reads the words of the headers option.
func newFamilies(words []string) (families, error) {
	if len(words) == 0 {
		return xRateLimit, nil
	}
	var set families
	for i, word := range words {
		if slices.Contains(words[:i], word) {
			return 0, fmt.Errorf("headers: got %q twice, want it once", word)
		}
		switch word {
		case "x-ratelimit":
			set |= xRateLimit
		case "ratelimit":
			set |= ietf
		case "off":
			if len(words) > 1 {
				return 0, badOption("headers", strings.Join(words, " "), "off alone, or x-ratelimit, ratelimit or both")
			}
		default:
			return 0, badOption("headers", word, "x-ratelimit, ratelimit or both, or off")
		}
	}
	return set, nil
}

// The fields, in the order of their values in fields. The names are as Go's
// http.Header keeps them.
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

// fields are the values of our header fields; those that are empty are not
// set.
type fields [fieldCount]string

// set sets the fields in h. They are not copied: what others change there in
// place is ours from then on.
func (f *fields) set(h http.Header) {
	for i, v := range f {
		if v != "" {
			h[fieldNames[i]] = f[i : i+1 : i+1]
		}
	}
}

// unset removes from h the fields that were set before.
func (f *fields) unset(h http.Header) {
	for i, v := range f {
		if v != "" {
			delete(h, fieldNames[i])
		}
	}
}

// keep drops from h the values that were added behind ours, as a proxy adds
// those of an upstream, and an upstream's X-RateLimit-Reset if we have none: it
// would not go with our other fields. A field of ours that was removed or
// replaced meanwhile is left as it is.
func (f *fields) keep(h http.Header) {
	for i, v := range f {
		if v == "" {
			continue
		}
		if values := h[fieldNames[i]]; len(values) > 1 && values[0] == v {
			h[fieldNames[i]] = values[:1]
		}
	}
	if f.own(fieldReset) && f[fieldReset] == "" {
		delete(h, fieldNames[fieldReset])
	}
}

// own reports whether no other values than ours may stand in a field.
func (f *fields) own(field int) bool {
	return f[field] != "" || field == fieldReset && f[fieldLimit] != ""
}

// ownName is own of a field by its name.
func (f *fields) ownName(name string) bool {
	i := slices.Index(fieldNames[:], textproto.CanonicalMIMEHeaderKey(strings.TrimSpace(name)))
	return i >= 0 && f.own(i)
}

// unannounce drops our fields from those that h announces as trailers: what
// would come there is an upstream's.
func (f *fields) unannounce(h http.Header) {
	announced, ok := h["Trailer"]
	if !ok {
		return
	}
	rest := make([]string, 0, len(announced))
	for _, names := range announced {
		for name := range strings.SplitSeq(names, ",") {
			if !f.ownName(name) {
				rest = append(rest, strings.TrimSpace(name))
			}
		}
	}
	if delete(h, "Trailer"); len(rest) > 0 {
		h["Trailer"] = []string{strings.Join(rest, ", ")}
	}
}

// dropTrailers drops our fields from the trailers in h that were not announced.
func (f *fields) dropTrailers(h http.Header) {
	for key := range h {
		if name, ok := strings.CutPrefix(key, http.TrailerPrefix); ok && f.ownName(name) {
			delete(h, key)
		}
	}
}

// describe makes f the fields of a request on which items were decided, each
// shown in its families; sum is what they come to. The values are parts of text,
// which is appended to; nobody may change it any more.
func (f *fields) describe(items []item, sum limiter.Summary, text []byte) {
	var ends [fieldCount]int
	end := func(i int) { ends[i] = len(text) }

	shown, ok := sum, true
	if !allShown(items, xRateLimit) {
		shown, ok = summarize(items, xRateLimit)
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
		text = appendWholeSeconds(text, sum.RetryAfter)
		end(fieldRetryAfter)
	}
	text = appendPolicies(text, items)
	end(fieldPolicy)
	text = appendLimits(text, items, sum.Denied)
	end(fieldRateLimit)

	// Bytes that nobody changes are as good as a string: this saves the copy.
	all, from := unsafe.String(unsafe.SliceData(text), len(text)), 0
	for i, to := range ends {
		f[i] = ""
		if to > from {
			f[i], from = all[from:to], to
		}
	}
}

// appendPolicies appends the value of RateLimit-Policy, as appendLimits does
// that of RateLimit. The two are as draft-ietf-httpapi-ratelimit-headers-11 has
// them: structured fields with an item for each limit. A policy's quota q is the
// size, its window w the time in which a full bucket drains. Its unit qu is
// requests unless said otherwise; the draft has no word for units of our kind.
func appendPolicies(b []byte, items []item) []byte {
	start := len(b)
	for i := range items {
		it := &items[i]
		if it.families&ietf == 0 {
			continue
		}
		b = appendItem(b, len(b) == start, it)
		b = appendParameter(b, ";q=", it.limit.Size)
		if it.units {
			b = append(b, `;qu="units"`...)
		}
		b = appendParameter(b, ";w=", ceilSeconds(it.limit.DrainTime()))
	}
	return b
}

// appendLimits appends the value of RateLimit. What is available, r, is meant
// for the time t in which it will have been dripped again: so clients that
// spread r over t keep to the rate. With nothing available t is the time until
// something is; on denial only the limits without room for the same request have
// a t, so that none is later than Retry-After.
func appendLimits(b []byte, items []item, denied bool) []byte {
	start := len(b)
	for i := range items {
		it := &items[i]
		if it.families&ietf == 0 {
			continue
		}
		b = appendItem(b, len(b) == start, it)
		b = appendParameter(b, ";r=", it.decision.Remaining)
		switch d := &it.decision; {
		case d.Never:
		case denied && d.RetryAfter > 0:
			b = appendParameter(b, ";t=", ceilSeconds(d.RetryAfter))
		case denied:
		case d.Remaining > 0:
			b = appendParameter(b, ";t=", ceilSeconds(it.limit.DripTime(d.Remaining)))
		default:
			b = appendParameter(b, ";t=", ceilSeconds(d.Clear-it.limit.DrainTime()+it.limit.DripInterval))
		}
	}
	return b
}

// appendItem appends a policy's name as a structured field string, behind a
// comma unless it is the first. The characters of a path need no escaping, and it
// has no '#'.
func appendItem(b []byte, first bool, it *item) []byte {
	if !first {
		b = append(b, ", "...)
	}
	b = append(b, '"')
	b = append(b, it.path...)
	if it.earlier > 0 {
		b = strconv.AppendInt(append(b, '#'), int64(it.earlier)+1, 10)
	}
	return append(b, '"')
}

func appendParameter(b []byte, name string, n int64) []byte {
	return strconv.AppendInt(append(b, name...), n, 10)
}

// appendSeconds appends d in seconds with three decimals, rounded up.
func appendSeconds(b []byte, d time.Duration) []byte {
	ms := int64((d + time.Millisecond - 1) / time.Millisecond)
	b = strconv.AppendInt(b, ms/1000, 10)
	return append(b, '.', byte('0'+ms/100%10), byte('0'+ms/10%10), byte('0'+ms%10))
}

// seconds returns d in seconds with three decimals, rounded up.
func seconds(d time.Duration) string { return string(appendSeconds(nil, d)) }

// appendWholeSeconds appends d in whole seconds, rounded up, at least 1.
func appendWholeSeconds(b []byte, d time.Duration) []byte {
	return strconv.AppendInt(b, max(ceilSeconds(d), 1), 10)
}

// wholeSeconds returns d in whole seconds, rounded up, at least 1.
func wholeSeconds(d time.Duration) string {
	var few [20]byte
	return string(appendWholeSeconds(few[:0], d))
}

// ceilSeconds returns d in whole seconds, rounded up.
func ceilSeconds(d time.Duration) int64 {
	return int64((d + time.Second - 1) / time.Second)
}
