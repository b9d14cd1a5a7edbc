// Package fieldtext is the text of header fields that tell of rate limits: the items of
// RateLimit-Policy and RateLimit (draft-ietf-httpapi-ratelimit-headers-11), and times in seconds.
package fieldtext

import (
	"strconv"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// ConcurrentRequests is the registered quota unit of limits on requests in progress.
const ConcurrentRequests = "concurrent-requests"

// AppendPolicy appends the parameters of an item of RateLimit-Policy, after its name: the quota
// q is the size of d, which was decided for a limit like l but for its size; the window w is the
// time in which a full bucket drains, or the length of a window that slides, or the time of a
// rate that warms up. unit is the quota unit qu, or "". Only registered ones are allowed.
// Requests in progress have no window.
func AppendPolicy(b []byte, l *limiter.Limit, d *limiter.Decision, unit string) []byte {
	b = appendParameter(b, ";q=", d.Size)
	if unit != "" {
		b = append(append(append(b, `;qu="`...), unit...), '"')
	}
	if unit == ConcurrentRequests {
		return b
	}
	if l.Size != d.Size { // which most are not, and a copy is garbage
		sized := *l
		sized.Size = d.Size
		l = &sized
	}
	return appendParameter(b, ";w=", CeilSeconds((*bucket.Limit)(l).DripTime(l.Size)))
}

// AppendLimit appends the parameters of an item of RateLimit, after its name. Clients that
// spread the available units r over the time t keep to the rate, see [limiter.Limit.SpendTime].
// denied says whether the request was, by any limit. Then only limits without room for the
// same request have a t, so that none exceeds Retry-After. at is the time of the decision.
func AppendLimit(b []byte, l *limiter.Limit, d *limiter.Decision, denied bool, unit string, at time.Time) []byte {
	b = appendParameter(b, ";r=", d.Remaining)
	switch {
	case d.Never, d.Size == 0:
	case denied && d.RetryAfter > 0:
		b = appendParameter(b, ";t=", CeilSeconds(d.RetryAfter))
	case denied, unit == ConcurrentRequests:
	default:
		b = appendParameter(b, ";t=", CeilSeconds(l.SpendTime(d, at)))
	}
	return b
}

func appendParameter(b []byte, name string, n int64) []byte {
	return strconv.AppendInt(append(b, name...), n, 10)
}

// AppendWholeSeconds appends d in whole seconds, rounded up, at least 1: as in Retry-After,
// where a retry that is too early would be denied again.
func AppendWholeSeconds(b []byte, d time.Duration) []byte {
	return strconv.AppendInt(b, max(CeilSeconds(d), 1), 10)
}

// WholeSeconds returns d in whole seconds, rounded up, at least 1.
func WholeSeconds(d time.Duration) string {
	var few [20]byte
	return string(AppendWholeSeconds(few[:0], d))
}

// CeilSeconds returns d in whole seconds, rounded up.
func CeilSeconds(d time.Duration) int64 { return Ceil(d, time.Second) }

// Ceil returns how often unit is in d, rounded up. With a large share of jitter, d may be as
// long as any.
func Ceil(d, unit time.Duration) int64 {
	n := int64(d / unit)
	if d%unit > 0 {
		n++
	}
	return n
}
