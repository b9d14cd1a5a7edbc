package ratelimit

import (
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

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

// set sets the fields in h in place of those that were set before. What h has
// then lies in shown, not in f, since others may change it there.
func (f *fields) set(h http.Header, before, shown *fields) {
	*shown = *f
	for i, v := range f {
		switch {
		case v != "":
			h[fieldNames[i]] = shown[i : i+1 : i+1]
		case before[i] != "":
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
	if f[fieldLimit] != "" && f[fieldReset] == "" {
		delete(h, fieldNames[fieldReset])
	}
}

// item is what one bucket decided on a request, and how to show it.
type item struct {
	path     string
	limit    limiter.Limit
	families families
	decision limiter.Decision
}

// newFields returns the fields of a request on which items were decided, each
// shown in its families.
func newFields(items []item) fields {
	// All values are made in one piece, of which each is a part.
	var few [128]byte
	text := few[:0]
	var ends [fieldCount]int
	end := func(i int) { ends[i] = len(text) }

	if sum, ok := summarize(items, xRateLimit); ok {
		text = strconv.AppendInt(text, sum.Size, 10)
		end(fieldLimit)
		text = strconv.AppendInt(text, sum.Remaining, 10)
		end(fieldRemaining)
		text = appendSeconds(text, sum.Clear)
		end(fieldClear)
		if sum.Denied && !sum.Never {
			text = appendSeconds(text, sum.Retry)
			end(fieldReset)
		}
	}
	if sum, ok := summarize(items, 0); ok && sum.Denied && !sum.Never {
		text = appendWholeSeconds(text, sum.Retry)
		end(fieldRetryAfter)
	}
	all, from := string(text), 0
	var f fields
	for i, to := range ends {
		if to > from {
			f[i], from = all[from:to], to
		}
	}
	f[fieldPolicy], f[fieldRateLimit] = ietfFields(items)
	return f
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

// ietfFields returns the values of RateLimit-Policy and RateLimit, as
// draft-ietf-httpapi-ratelimit-headers-11 has them: structured fields with an
// item for each limit. A policy's quota q is the size, its window w the time in
// which a full bucket drains. What is available, r, is meant for the time t in
// which it will have been dripped again: so clients that spread r over t keep
// to the rate. With nothing available t is the time until something is; on
// denial only the limits that deny have a t, so that none is later than
// Retry-After.
func ietfFields(items []item) (policy, rateLimit string) {
	denied := false
	for i := range items {
		denied = denied || items[i].decision.Denied
	}
	var p, l []byte
	for i := range items {
		it := &items[i]
		if it.families&ietf == 0 {
			continue
		}
		if len(p) > 0 {
			p, l = append(p, ", "...), append(l, ", "...)
		}
		p = appendItem(p, it.path)
		p = appendParameter(p, ";q=", it.limit.Size)
		p = appendParameter(p, ";w=", ceilSeconds(it.limit.DrainTime()))

		l = appendItem(l, it.path)
		l = appendParameter(l, ";r=", it.decision.Remaining)
		switch d := &it.decision; {
		case d.Never:
		case d.Denied:
			l = appendParameter(l, ";t=", ceilSeconds(d.Retry))
		case denied:
		case d.Remaining > 0:
			l = appendParameter(l, ";t=", ceilSeconds(it.limit.DripTime(d.Remaining)))
		default:
			l = appendParameter(l, ";t=", ceilSeconds(d.Clear-it.limit.DrainTime()+it.limit.DripRate))
		}
	}
	return string(p), string(l)
}

// appendItem appends a policy's name as a structured field string. The
// characters of a path need no escaping.
func appendItem(b []byte, path string) []byte {
	b = append(b, '"')
	b = append(b, path...)
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
func wholeSeconds(d time.Duration) string { return string(appendWholeSeconds(nil, d)) }

// ceilSeconds returns d in whole seconds, rounded up.
func ceilSeconds(d time.Duration) int64 {
	return int64((d + time.Second - 1) / time.Second)
}
