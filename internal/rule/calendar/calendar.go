// Package calendar has periods of the calendar in a time zone, as windows of limits.
package calendar

import (
	"strings"
	"sync/atomic"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Period is a unit of the calendar in a time zone, such as a month in Berlin. Its
// instances follow each other without gaps.
type Period struct {
	unit     string
	location *time.Location
	current  atomic.Pointer[span] // the instance that was asked for last
}

// span is one instance of a period: from start to just before end.
type span struct{ start, end time.Time }

// longestPeriods are the units of periods and the longest that one lasts.
var longestPeriods = map[string]time.Duration{
	"minute": time.Minute,
	"hour":   time.Hour,
	"day":    25 * time.Hour,
	"week":   7*24*time.Hour + time.Hour,
	"month":  31*24*time.Hour + time.Hour,
	"year":   366 * 24 * time.Hour,
}

// Parse parses a period, such as "month Europe/Berlin". If the text is no period, it returns what would be one.
func Parse(text string) (*Period, string) {
	const use = "minute, hour, day, week, month or year, and after it a time zone such as Europe/Berlin, or none for UTC"
	unit, zone, _ := strings.Cut(text, " ")
	if longestPeriods[unit] == 0 {
		return nil, use
	}
	p := &Period{unit: unit, location: time.UTC}
	if zone = strings.TrimSpace(zone); zone != "" {
		var err error
		// "Local" would depend on the machine, and differ between Caddy instances.
		if p.location, err = time.LoadLocation(zone); err != nil || p.location == time.Local {
			return nil, use
		}
	}
	return p, ""
}

// String returns the period as it is written in a configuration.
func (p *Period) String() string {
	if p.location == time.UTC {
		return p.unit
	}
	return p.unit + " " + p.location.String()
}

// Longest returns the longest time that an instance lasts.
func (p *Period) Longest() time.Duration { return longestPeriods[p.unit] }

// Limit returns the limit of the given size for the instance at now. Its window
// begins and ends with the instance, and these moments, not the name of the zone,
// are part of the bucket's identity: processes whose zone data differ use different
// buckets while they disagree.
func (p *Period) Limit(size int64, now time.Time) limiter.Limit {
	s := p.current.Load()
	if s == nil || now.Before(s.start) || !now.Before(s.end) {
		s = p.at(now)
		p.current.Store(s)
	}
	return limiter.ClockWindow(size, s.end.Sub(s.start), s.start)
}

// at returns the instance at now.
func (p *Period) at(now time.Time) *span {
	local := now.In(p.location)
	switch p.unit {
	case "minute":
		return within(local, time.Minute)
	case "hour":
		return within(local, time.Hour)
	}
	year, month, day := local.Date()
	var next func(n int) time.Time // the beginning of the n-th instance after this one
	switch p.unit {
	case "day":
		next = func(n int) time.Time { return p.begin(year, month, day+n) }
	case "week": // from Monday
		day -= (int(local.Weekday()) + 6) % 7
		next = func(n int) time.Time { return p.begin(year, month, day+7*n) }
	case "month":
		next = func(n int) time.Time { return p.begin(year, month+time.Month(n), 1) }
	default:
		next = func(n int) time.Time { return p.begin(year+n, time.January, 1) }
	}
	n := 0
	for !now.Before(next(n + 1)) {
		n++ // the clocks were set back from the next date to this one
	}
	return &span{next(n), next(n + 1)}
}

// within returns the minute or hour of local time that t is in. One in which clocks
// are set ends then, and another begins.
func within(t time.Time, unit time.Duration) *span {
	_, offset := t.Zone()
	shift := time.Duration(offset) * time.Second
	start := t.UTC().Add(shift).Truncate(unit).Add(-shift)
	s := &span{start, start.Add(unit)}
	from, until := offsetBounds(t)
	if s.start.Before(from) {
		s.start = from
	}
	if !until.IsZero() && s.end.After(until) {
		s.end = until
	}
	return s
}

// begin returns when a local date begins: the first instant at which clocks show
// it, or a later date if there is no such date. Not every date begins at midnight,
// because clocks may be set then.
func (p *Period) begin(year int, month time.Month, day int) time.Time {
	midnight := time.Date(year, month, day, 0, 0, 0, 0, time.UTC)
	t := midnight.Add(-26 * time.Hour).In(p.location) // no zone is that far from UTC
	for {
		from, until := offsetBounds(t)
		_, offset := t.Zone()
		begin := midnight.Add(-time.Duration(offset) * time.Second)
		if begin.Before(from) {
			begin = from
		}
		if until.IsZero() || begin.Before(until) {
			return begin
		}
		t = until
	}
}

// offsetBounds returns since when, and until when, clocks have had the offset from
// UTC that they have at t; until is zero if that is for ever. Unlike what
// Time.ZoneBounds returns it is always after t: on the last day of leap years, that
// may be a moment before, at which no clock is set.
func offsetBounds(t time.Time) (from, until time.Time) {
	_, offset := t.Zone()
	at := t
	for from, until = t.ZoneBounds(); !until.IsZero(); _, until = at.ZoneBounds() {
		if !until.After(at) {
			until = at.Add(24 * time.Hour)
		}
		if _, after := until.Zone(); after != offset {
			return from, until
		}
		at = until
	}
	return from, until
}
