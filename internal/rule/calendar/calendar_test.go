package calendar

import (
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/testseed"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Guards which windows calendar periods make: whole ones of the zone, with days of
// 23 and 25 hours, midnights that do not exist, and dates that do not.
func TestPeriods(t *testing.T) {
	tests := []struct {
		period, now, start, end string // times in UTC
	}{
		{"minute", "2026-11-22T10:20:30Z", "2026-11-22T10:20:00Z", "2026-11-22T10:21:00Z"},
		{"hour", "2026-11-22T10:20:30Z", "2026-11-22T10:00:00Z", "2026-11-22T11:00:00Z"},
		{"day", "2026-11-22T10:20:30Z", "2026-11-22T00:00:00Z", "2026-11-23T00:00:00Z"},
		{"day", "2026-11-22T00:00:00Z", "2026-11-22T00:00:00Z", "2026-11-23T00:00:00Z"},
		{"day", "2026-11-21T23:59:59.999999Z", "2026-11-21T00:00:00Z", "2026-11-22T00:00:00Z"},
		{"week", "2026-11-22T10:20:30Z", "2026-11-16T00:00:00Z", "2026-11-23T00:00:00Z"}, // a Sunday
		{"week", "2026-11-23T00:00:00Z", "2026-11-23T00:00:00Z", "2026-11-30T00:00:00Z"},
		{"month", "2026-02-28T23:00:00Z", "2026-02-01T00:00:00Z", "2026-03-01T00:00:00Z"},
		{"month", "2026-12-31T23:00:00Z", "2026-12-01T00:00:00Z", "2027-01-01T00:00:00Z"},
		{"month", "2028-02-29T23:00:00Z", "2028-02-01T00:00:00Z", "2028-03-01T00:00:00Z"},
		{"year", "2026-11-22T10:20:30Z", "2026-01-01T00:00:00Z", "2027-01-01T00:00:00Z"},
		{"day", "1969-12-31T10:00:00Z", "1969-12-31T00:00:00Z", "1970-01-01T00:00:00Z"},

		{"hour Asia/Kolkata", "2026-11-22T10:20:30Z", "2026-11-22T09:30:00Z", "2026-11-22T10:30:00Z"},
		{"day Asia/Kolkata", "2026-11-22T18:29:59Z", "2026-11-21T18:30:00Z", "2026-11-22T18:30:00Z"},
		{"day America/New_York", "2026-11-22T04:59:59Z", "2026-11-21T05:00:00Z", "2026-11-22T05:00:00Z"},
		{"year Pacific/Kiritimati", "2026-12-31T10:00:00Z", "2026-12-31T10:00:00Z", "2027-12-31T10:00:00Z"},

		// 23 and 25 hours.
		{"day Europe/Berlin", "2026-03-29T12:00:00Z", "2026-03-28T23:00:00Z", "2026-03-29T22:00:00Z"},
		{"day Europe/Berlin", "2026-10-25T12:00:00Z", "2026-10-24T22:00:00Z", "2026-10-25T23:00:00Z"},
		{"week Europe/Berlin", "2026-10-25T12:00:00Z", "2026-10-18T22:00:00Z", "2026-10-25T23:00:00Z"},
		{"month Europe/Berlin", "2026-10-25T12:00:00Z", "2026-09-30T22:00:00Z", "2026-10-31T23:00:00Z"},
		// The hour from 2 to 3 comes twice, and each is an hour.
		{"hour Europe/Berlin", "2026-10-25T00:30:00Z", "2026-10-25T00:00:00Z", "2026-10-25T01:00:00Z"},
		{"hour Europe/Berlin", "2026-10-25T01:30:00Z", "2026-10-25T01:00:00Z", "2026-10-25T02:00:00Z"},
		// Clocks are set by half an hour: from 2:00 to 1:30, and from 2:00 to 2:30.
		{"hour Australia/Lord_Howe", "2026-04-04T14:50:00Z", "2026-04-04T14:00:00Z", "2026-04-04T15:00:00Z"},
		{"hour Australia/Lord_Howe", "2026-04-04T15:10:00Z", "2026-04-04T15:00:00Z", "2026-04-04T15:30:00Z"},
		{"hour Australia/Lord_Howe", "2026-10-03T15:40:00Z", "2026-10-03T15:30:00Z", "2026-10-03T16:00:00Z"},
		// There is no midnight: clocks are set from 0:00 to 1:00.
		{"day America/Santiago", "2026-09-06T12:00:00Z", "2026-09-06T04:00:00Z", "2026-09-07T03:00:00Z"},
		{"day America/Santiago", "2026-09-06T03:59:59Z", "2026-09-05T04:00:00Z", "2026-09-06T04:00:00Z"},
		// Midnight comes twice: clocks are set from 0:00 to 23:00.
		{"day America/Santiago", "2026-04-05T02:30:00Z", "2026-04-04T03:00:00Z", "2026-04-05T04:00:00Z"},
		{"day America/Santiago", "2026-04-05T03:30:00Z", "2026-04-04T03:00:00Z", "2026-04-05T04:00:00Z"},
		// Clocks were set from 0:01 to 23:01 of the day before, which had ended.
		{"day America/St_Johns", "2006-10-29T02:30:30Z", "2006-10-29T02:30:00Z", "2006-10-30T03:30:00Z"},
		{"day America/St_Johns", "2006-10-29T03:00:00Z", "2006-10-29T02:30:00Z", "2006-10-30T03:30:00Z"},
		// There was no 30 December.
		{"day Pacific/Apia", "2011-12-30T09:59:59Z", "2011-12-29T10:00:00Z", "2011-12-30T10:00:00Z"},
		{"day Pacific/Apia", "2011-12-30T10:00:00Z", "2011-12-30T10:00:00Z", "2011-12-31T10:00:00Z"},
	}
	for _, tc := range tests {
		t.Run(tc.period+" "+tc.now, func(t *testing.T) {
			p, want := Parse(tc.period)
			if want != "" {
				t.Fatal(want)
			}
			s := p.at(parseTime(t, tc.now))
			if !s.start.Equal(parseTime(t, tc.start)) || !s.end.Equal(parseTime(t, tc.end)) {
				t.Errorf("got %v to %v, want %s to %s", s.start.UTC(), s.end.UTC(), tc.start, tc.end)
			}
			got := p.Limit(3, parseTime(t, tc.now))
			if want := limiter.ClockWindow(3, s.end.Sub(s.start), s.start); got != want || got.Validate() != nil {
				t.Errorf("got %+v, want %+v", got, want)
			}
			if s.end.Sub(s.start) > p.Longest() {
				t.Errorf("it lasts %v, longer than %v", s.end.Sub(s.start), p.Longest())
			}
		})
	}
}

func parseTime(t *testing.T, text string) time.Time {
	t.Helper()
	at, err := time.Parse(time.RFC3339Nano, text)
	if err != nil {
		t.Fatal(err)
	}
	return at
}

// Guards that in any zone and at any time the instances of a period follow each
// other without gaps or overlaps, contain the time that they are asked for, and
// begin when clocks first show their date.
func TestPeriodsHaveNoGaps(t *testing.T) {
	zones := []string{
		"UTC", "Europe/Berlin", "America/New_York", "America/St_Johns", "America/Santiago", "America/Sao_Paulo",
		"Australia/Lord_Howe", "Asia/Kolkata", "Asia/Tehran", "Asia/Gaza", "Africa/Cairo", "Pacific/Apia",
		"Pacific/Kiritimati", "Antarctica/Troll", "America/Havana", "Asia/Manila",
	}
	from, until := time.Date(1990, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(2060, 1, 1, 0, 0, 0, 0, time.UTC)
	testseed.Check(t, 1, func(t *rapid.T) {
		unit := rapid.SampledFrom([]string{"minute", "hour", "day", "week", "month", "year"}).Draw(t, "unit")
		p, want := Parse(unit + " " + rapid.SampledFrom(zones).Draw(t, "zone"))
		if want != "" {
			t.Fatal(want)
		}
		now := from.Add(time.Duration(rapid.Int64Range(0, int64(until.Sub(from))).Draw(t, "now")))
		if rapid.Bool().Draw(t, "when clocks are set") {
			if _, next := now.In(p.location).ZoneBounds(); !next.IsZero() {
				now = next.Add(time.Duration(rapid.Int64Range(-int64(26*time.Hour), int64(26*time.Hour)).Draw(t, "off by")))
			}
		}
		s := p.at(now)
		if now.Before(s.start) || !now.Before(s.end) {
			t.Fatalf("%v is not from %v to %v", now, s.start, s.end)
		}
		for _, same := range []time.Time{s.start, s.end.Add(-1)} {
			if other := p.at(same); !other.start.Equal(s.start) || !other.end.Equal(s.end) {
				t.Fatalf("at %v: %v to %v, at %v: %v to %v", now, s.start, s.end, same, other.start, other.end)
			}
		}
		if next := p.at(s.end); !next.start.Equal(s.end) {
			t.Fatalf("%v to %v, and then from %v", s.start, s.end, next.start)
		}
		if unit == "minute" || unit == "hour" {
			return
		}
		// Clocks never showed this date before, whatever they showed.
		date := func(at time.Time) string { return at.In(p.location).Format(time.DateOnly) }
		for before := s.start.Add(-1); s.start.Sub(before) < 27*time.Hour; before = before.Add(-7 * time.Minute) {
			if date(before) >= date(s.start) {
				t.Fatalf("begins at %v, but it was %s at %v already", s.start, date(before), before)
			}
		}
	})
}

// Guards the last day of leap years, for which Time.ZoneBounds may name a moment that
// has passed.
func TestPeriodsOnLastDayOfLeapYears(t *testing.T) {
	for _, year := range []int{2028, 2040, 2088} {
		for _, zone := range []string{"UTC", "Europe/Berlin", "America/St_Johns", "Asia/Gaza", "Australia/Lord_Howe"} {
			for unit, longest := range longestPeriods {
				p, _ := Parse(unit + " " + zone)
				for now := time.Date(year, time.December, 29, 0, 0, 0, 0, time.UTC); now.Day() > 3; now = now.Add(17 * time.Minute) {
					s := p.at(now)
					length := s.end.Sub(s.start)
					if now.Before(s.start) || !now.Before(s.end) || length > longest || length < longest*9/10 && unit != "month" && unit != "year" {
						t.Fatalf("%s: %v is in the instance from %v to %v", p, now, s.start, s.end)
					}
				}
			}
		}
	}
}
