// Package reporttest has a report to test with and to look at.
package reporttest

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/report"
)

// Sample returns the report of an invented day: readers who load pages, programs
// that use an API, a few of them for far too much, and somebody who guesses
// passwords in the afternoon. It is the same each time. Keys are shown, and are
// addresses and names reserved for documentation.
func Sample() *report.Report {
	start := time.Date(2026, 11, 20, 0, 0, 0, 0, time.UTC)
	d := day{start: start, random: rand.New(rand.NewPCG(1, 2))} //nolint:gosec // it invents, and must be the same each time
	site := d.replay("example.com/site", 60, time.Second, d.readers())
	api := d.replay("example.com/api", 40, 500*time.Millisecond, d.programs())
	login := d.replay("example.com/login", 5, time.Minute, d.logins())
	limits := []report.Limit{site, api, login}

	c := report.Config{Name: "Caddyfile", Limits: limits}
	for _, l := range limits {
		c.Requests += l.Requests
		c.Admitted += l.Admitted
		c.Denied += l.Denied
	}
	return &report.Report{
		Version:   "v1.2.0",
		Generated: start.Add(33*time.Hour + 12*time.Minute),
		Logs:      []string{"access.log", "access-2026-11-20T11-30-00.000-size.log.gz"},
		From:      start.Add(1300 * time.Millisecond),
		To:        start.Add(24*time.Hour - 400*time.Millisecond),
		Lines:     c.Requests + 1204 + 37,
		Used:      c.Requests,
		Skipped: []report.Skipped{
			{Reason: "not an access log entry", Lines: 1204},
			{Reason: "the line is not complete", Lines: 37},
		},
		Notes:   []string{"The handler request_body was left out: it does not change which limits apply."},
		Configs: []report.Config{c},
	}
}

// day invents requests.
type day struct {
	start  time.Time
	random *rand.Rand
}

// request is one request.
type request struct {
	at        time.Duration
	key, path string
}

// hour returns a time of the day that is likelier by day than at night.
func (d *day) hour() time.Duration {
	for {
		h := 24 * d.random.Float64()
		if d.random.Float64() < 0.12+0.88*math.Pow(math.Sin(math.Pi*math.Mod(h+19, 24)/24), 2) {
			return time.Duration(h * float64(time.Hour))
		}
	}
}

// burst returns requests for paths one after the other.
func (d *day) burst(key string, from time.Duration, n int, every time.Duration, paths ...string) []request {
	all := make([]request, 0, n)
	for i := range n {
		from += time.Duration(d.random.ExpFloat64() * float64(every))
		if from >= 24*time.Hour {
			break
		}
		all = append(all, request{from, key, paths[i%len(paths)]})
	}
	return all
}

// size returns a number that is mostly near the median, and rarely far above it.
func (d *day) size(median, spread float64) int {
	return 1 + int(median*math.Exp(spread*d.random.NormFloat64()))
}

// readers load pages.
func (d *day) readers() []request {
	var all []request
	for i := range 9000 {
		key := fmt.Sprintf("198.51.%d.%d", 100+i/250%100, i%250)
		from := d.hour()
		for range d.size(1, .8) {
			all = append(all, d.burst(key, from, d.size(9, .65), 120*time.Millisecond, "/", "/style.css", "/logo.svg", "/news")...)
			from += time.Duration(d.size(90, 1)) * time.Second
		}
	}
	// One copies the whole site.
	return append(all, d.burst("203.0.113.7", 3*time.Hour+10*time.Minute, 15000, 300*time.Millisecond, "/archive", "/news", "/search")...)
}

// programs use the API.
func (d *day) programs() []request {
	var all []request
	for i := range 700 {
		key := fmt.Sprintf("customer-%03d", i)
		for range d.size(12, .8) {
			all = append(all, d.burst(key, d.hour(), d.size(8, .9), 60*time.Millisecond, "/api/items", "/api/orders", "/api/search")...)
		}
	}
	for i, hours := range []int{9, 13, 17} {
		all = append(all, d.burst(fmt.Sprintf("customer-9%02d", i), time.Duration(hours)*time.Hour, 9000-i*2600, 180*time.Millisecond, "/api/search", "/api/search", "/api/export")...)
	}
	return all
}

// logins are few, except when passwords are guessed.
func (d *day) logins() []request {
	var all []request
	for i := range 2600 {
		all = append(all, d.burst(fmt.Sprintf("192.0.2.%d, user %04d", i%250, i), d.hour(), d.size(.9, .5), 8*time.Second, "/login")...)
	}
	for i := range 14 {
		all = append(all, d.burst(fmt.Sprintf("203.0.113.%d", 40+i), 15*time.Hour+time.Duration(i)*time.Minute, 900, 4*time.Second, "/login")...)
	}
	return all
}

// client is what is known of a key.
type client struct {
	report.Key
	at, held, would, since time.Duration
	lasts                  bool
}

// replay decides the requests.
func (d *day) replay(path string, size int64, drip time.Duration, requests []request) report.Limit {
	slices.SortStableFunc(requests, func(a, b request) int { return cmp.Compare(a.at, b.at) })
	const slots = 288
	l := report.Limit{
		Path: path, Algorithm: "leaky_bucket", Numbers: fmt.Sprintf("size %d, drips 1 each %v", size, drip), Size: size,
		Slot: 24 * time.Hour / slots, HourIn: "UTC",
	}
	for i := range slots {
		l.Times = append(l.Times, report.Slot{Start: d.start.Add(time.Duration(i) * l.Slot)})
	}
	clients := make(map[string]*client)
	paths := make(map[string]*report.Breakdown)
	for _, r := range requests {
		c := clients[r.key]
		if c == nil {
			c = &client{Key: report.Key{Text: r.key}}
			clients[r.key] = c
		}
		p := paths[r.path]
		if p == nil {
			p = &report.Breakdown{Path: r.path}
			paths[r.path] = p
		}
		c.held = max(0, c.held-(r.at-c.at))
		if c.would = max(0, c.would-(r.at-c.at)); c.would == 0 {
			c.since = r.at
		}
		c.would += drip
		c.at = r.at
		if peak := int64((c.would + drip - 1) / drip); peak > c.Peak {
			c.Peak, c.lasts = peak, 2*(r.at-c.since) > time.Duration(size)*drip
		}
		slot, hour := &l.Times[r.at/l.Slot], &l.ByHour[r.at/time.Hour]
		l.Requests++
		c.Requests++
		p.Requests++
		hour.Requests++
		if c.held+drip <= time.Duration(size)*drip {
			c.held += drip
			l.Admitted++
			slot.Admitted++
			continue
		}
		l.Denied++
		slot.Denied++
		c.Denied++
		p.Denied++
		hour.Denied++
	}
	l.DeniedAtMost = l.Denied
	l.Keys = int64(len(clients))

	peaks := make(map[int64]int64)
	for _, c := range clients {
		peaks[c.Peak]++
		if c.Denied > 0 {
			l.KeysDenied++
		}
		if c.Peak > size && c.lasts {
			l.KeysLasting++
		}
		l.Top = append(l.Top, c.Key)
	}
	for units, keys := range peaks {
		l.Peaks = append(l.Peaks, report.Peak{Units: units, Keys: keys})
	}
	slices.SortFunc(l.Peaks, func(a, b report.Peak) int { return cmp.Compare(a.Units, b.Units) })
	slices.SortFunc(l.Top, func(a, b report.Key) int {
		return cmp.Or(cmp.Compare(b.Denied, a.Denied), cmp.Compare(b.Requests, a.Requests), cmp.Compare(a.Text, b.Text))
	})
	l.Top = l.Top[:min(10, len(l.Top))]
	for _, p := range paths {
		l.ByPath = append(l.ByPath, *p)
	}
	slices.SortFunc(l.ByPath, func(a, b report.Breakdown) int {
		return cmp.Or(cmp.Compare(b.Denied, a.Denied), cmp.Compare(a.Path, b.Path))
	})
	return l
}
