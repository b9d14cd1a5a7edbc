package ratelimit

import (
	"cmp"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/adminapi"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Rate is `<n>/<duration>`: n units per duration, evenly, such as `10/s`, `1000/h` or
// `5/12h`.
type Rate string

// UnmarshalJSON accepts any JSON value as text. It is validated with the option.
func (r *Rate) UnmarshalJSON(b []byte) error {
	text, err := scalar(b)
	*r = Rate(text)
	return err
}

// rate is a number of units per duration.
type rate struct {
	units int64
	each  time.Duration
}

// String returns the rate as it is configured.
func (r rate) String() string {
	return fmt.Sprintf("%d/%s", r.units, adminapi.Interval(adminapi.Seconds(r.each)))
}

// unitOfRate matches a duration of a rate that is a number of one unit, or the unit
// alone. Each unit has its own first letter.
var unitOfRate = regexp.MustCompile(`^([0-9]*)([smhd]|(?:second|minute|hour|day)s?)$`)

// parseRate parses a rate.
func parseRate(text string) (rate, string) {
	n, each, _ := strings.Cut(text, "/")
	units, wrongUnits := parseUnits(n)
	if m := unitOfRate.FindStringSubmatch(each); m != nil {
		each = cmp.Or(m[1], "1") + m[2][:1]
	}
	interval, wrongInterval := parseInterval(each)
	if wrongUnits != "" || wrongInterval != "" {
		return rate{}, fmt.Sprintf("<n>/<duration>, such as 10/s, 60/minute, 1000/h or 5/12h: a whole number from 1 to %d, "+
			"and s, m, h, d, second, minute, hour, day or a duration of whole microseconds", int64(limiter.MaxUnits))
	}
	return rate{units, interval}, ""
}

// limit returns the limit of the given size; 0 means that the size depends on the
// request. The drip must not depend on it: it is then a single unit, which fits in
// any size, if that results in the exact rate.
func (r rate) limit(size int64) (limiter.Limit, error) {
	if size > 0 {
		return limiter.NewLimit(r.units, r.each, size)
	}
	if l, err := limiter.NewLimit(r.units, r.each, 1); err == nil {
		return l, nil
	}
	return limiter.NewLimit(r.units, r.each, r.units)
}
