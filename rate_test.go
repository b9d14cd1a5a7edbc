package ratelimit

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

const (
	wantRate = `want <n>/<duration>, such as 10/s, 60/minute, 1000/h or 5/12h: a whole number from 1 to 562949953421312, ` +
		`and s, m, h, d, second, minute, hour, day or a duration of whole microseconds`
	wantOneForm = `want either rate and size, or size, drip_rate and drip_size, or max, duration and min_interval`
)

// Guards what limit a rate makes, through the whole configuration.
func TestRates(t *testing.T) {
	t.Setenv("RATE", "60/1s")
	t.Setenv("UNITS", "60")
	const µs = time.Microsecond
	tests := []struct {
		limit Limit
		want  limiter.Limit
	}{
		{Limit{Rate: "60/1s"}, limiter.Limit{Size: 60, DripInterval: 50_000 * µs, DripSize: 3}},
		{Limit{Rate: "1/1s"}, limiter.Limit{Size: 1, DripInterval: time.Second, DripSize: 1}},
		{Limit{Rate: "7/1s"}, limiter.Limit{Size: 7, DripInterval: 142_858 * µs, DripSize: 1}},
		{Limit{Rate: "10/1m"}, limiter.Limit{Size: 10, DripInterval: 6 * time.Second, DripSize: 1}},
		{Limit{Rate: "1000/1h"}, limiter.Limit{Size: 1000, DripInterval: 3600 * time.Millisecond, DripSize: 1}},
		{Limit{Rate: "3/1d"}, limiter.Limit{Size: 3, DripInterval: 8 * time.Hour, DripSize: 1}},
		{Limit{Rate: "3/1d12h"}, limiter.Limit{Size: 3, DripInterval: 12 * time.Hour, DripSize: 1}},
		{Limit{Rate: "1000000/1s"}, limiter.Limit{Size: 1_000_000, DripInterval: µs, DripSize: 1}},
		{Limit{Rate: "5000000/1s"}, limiter.Limit{Size: 5_000_000, DripInterval: µs, DripSize: 5}},
		{Limit{Rate: "999/1s"}, limiter.Limit{Size: 999, DripInterval: 10_011 * µs, DripSize: 10}},
		{Limit{Rate: "562949953421312/1us"}, limiter.Limit{Size: 1 << 49, DripInterval: µs, DripSize: 1 << 49}},
		{Limit{Rate: "{env.RATE}"}, limiter.Limit{Size: 60, DripInterval: 50_000 * µs, DripSize: 3}},
		{Limit{Rate: "{env.UNITS}/1m"}, limiter.Limit{Size: 60, DripInterval: time.Second, DripSize: 1}},
		{Limit{Rate: "60/1s", Size: "10"}, limiter.Limit{Size: 10, DripInterval: 50_000 * µs, DripSize: 3}},
		{Limit{Rate: "60/1s", Size: "2"}, limiter.Limit{Size: 2, DripInterval: 16_667 * µs, DripSize: 1}},
		{Limit{Rate: "60/1s", Factor: "0.5"}, limiter.Limit{Size: 120, DripInterval: 50_000 * µs, DripSize: 3}},
		{Limit{Rate: "60/1s", Factor: "30"}, limiter.Limit{Size: 2, DripInterval: 16_667 * µs, DripSize: 1}},
		// The drip is determined before the size is known.
		{Limit{Rate: "60/1s", Size: "{n}"}, limiter.Limit{Size: 4, DripInterval: 16_667 * µs, DripSize: 1}},
		{Limit{Rate: "999/1s", Size: "{n}"}, limiter.Limit{Size: 4, DripInterval: 10_011 * µs, DripSize: 10}},
		{Limit{Rate: "60/1s", Factor: "{n}"}, limiter.Limit{Size: 15, DripInterval: 16_667 * µs, DripSize: 1}},
	}
	for i := range tests {
		tc := &tests[i]
		t.Run(fmt.Sprintf("%s size %s factor %s", tc.limit.Rate, tc.limit.Size, tc.limit.Factor), func(t *testing.T) {
			l, _ := readyLimit(t, &tc.limit)
			r := newSiteRequest()
			r.replacer.Set("n", 4)
			got, err := r.asks(l)
			if err != nil {
				t.Fatal(err)
			}
			if len(got) != 1 || got[0].Limit != tc.want || !strings.HasPrefix(got[0].Name, "default@") || got[0].Cost != 1 {
				t.Errorf("got %+v, want %+v", got, tc.want)
			}
		})
	}
}

// Guards that a unit may stand for one of it and may be written out, and that all
// ways to write a duration are the same rate.
func TestRateUnits(t *testing.T) {
	t.Parallel()
	for duration, texts := range map[time.Duration][]string{
		time.Second:      {"s", "1s", "second", "1second", "1seconds", "1000ms"},
		time.Minute:      {"m", "1m", "minute", "1minute", "60s", "60seconds"},
		time.Hour:        {"h", "1h", "hour", "1hour", "60minutes"},
		24 * time.Hour:   {"d", "1d", "day", "1day", "24h", "24hours"},
		30 * time.Minute: {"30m", "30minutes", "0.5h"},
		7 * 24 * 3600e9:  {"7d", "7days", "007day"},
	} {
		for _, text := range texts {
			l, _ := readyLimit(t, &Limit{Rate: Rate("10/" + text)})
			want, err := limiter.NewLimit(10, duration, 10)
			if got := l.Buckets[0].Constant; err != nil || got == nil || got.Limit != want {
				t.Errorf("10/%s: got %+v, want %+v, error %v", text, got, want, err)
			}
		}
	}
}

// Guards the bound that the documents have of a rate: behind a full burst, up to
// 2n − 1 units are admitted within one duration, size and n − 1 with another size, and
// how to have n at most.
func TestRateWithinItsDuration(t *testing.T) {
	for _, tc := range []struct {
		block  string
		within time.Duration
		want   int
	}{
		{"rate 10/m", time.Minute, 19},
		{"rate 5/day", 24 * time.Hour, 9},
		{"rate 60/s", time.Second, 117}, // drips of 3 units
		{"rate 10/m\nsize 3", time.Minute, 12},
		{"rate 10/m\nsize 1", time.Minute, 10},
		{"algorithm sliding_log\nsize 10\nwindow 1m", time.Minute, 10},
	} {
		t.Run(tc.block, func(t *testing.T) {
			s := startSite(t, "rate_limit {\n"+tc.block+"\n}\nrespond admitted")
			admitted, end := 0, s.clock.read()+tc.within
			for s.clock.read() < end {
				a := s.get("/")
				if a.StatusCode == 200 {
					admitted++
					continue
				}
				wait, err := time.ParseDuration(a.Header.Get("X-RateLimit-Reset") + "s")
				if err != nil {
					t.Fatal(err)
				}
				s.clock.advance(wait)
			}
			if admitted != tc.want {
				t.Errorf("%d admitted within %v, want %d", admitted, tc.within, tc.want)
			}
		})
	}
}

// Guards what a rate may be in a Caddyfile: all that can't be meant is refused
// in one line that has what it got and what would be right.
func TestRateErrors(t *testing.T) {
	const drain = `: a full bucket and one drip more must drain within 35 years`
	t.Setenv("BAD", "60")
	tests := []struct{ block, want string }{
		{`rate 1/1s`, ``},
		{`rate 999/1s; size 10; cost 10`, ``},
		{`rate 9/9.01ms; size 9`, ``},
		{`rate 9/9.009ms; size 9`, ``},
		{`rate 60/1s; factor 0`, ``},
		{`rate 999/1s; size 1; factor 0`, ``},
		{`rate 5/1d; limit a {; rate 1/1h; }`, ``},

		{`rate`, `rate: got "", want one value, at Caddyfile:3`},
		{`rate 60 1s`, `limit "api": rate: got "60 1s", ` + wantRate + `, at Caddyfile:3`},
		{`rate 10 per second`, `limit "api": rate: got "10 per second", ` + wantRate + `, at Caddyfile:3`},
		{`rate 10 / s`, `limit "api": rate: got "10 / s", ` + wantRate + `, at Caddyfile:3`},
		{`rate 60/1s; rate 60/1s`, `duplicate option: rate, at Caddyfile:4`},
		{
			`rate 999/1s; size 9`, `limit "api": rate: got "999/1s", want another rate or size: ` +
				`size 9: must be at least 10 for a rate of 999/1s; the nearest rates for it are 9/9.01ms and 9/9.009ms`,
		},
		{
			`rate 999/1s; size 90; factor 10`, `limit "api": rate: got "999/1s", want another rate or size: ` +
				`size 9: must be at least 10 for a rate of 999/1s; the nearest rates for it are 9/9.01ms and 9/9.009ms`,
		},
		{
			`rate 1/18000d`, `limit "api": rate: got "1/18000d", want another rate or size: ` +
				`rate of 1/432000h0m0s: must be for at most 35 years`,
		},
		{
			`rate 1/7000d`, `limit "api": rate: got "1/7000d", want another rate or size: ` +
				`size 1, drip rate 168000h0m0s, drip size 1` + drain,
		},
		{`rate 5/1s; cost 6`, `limit "api": cost: got "6", want at most the size, 5`},
		{`rate 5/1s; size 0`, `limit "api": size: got "0", ` + wantUnits + wantHolder},
		{`rate 5/1s; factor -1`, `limit "api": factor: got "-1", ` + wantFactor + wantHolder},
		{`rate 562949953421312/1s; factor 0.5`, `limit "api": factor: got "0.5", ` + wantSize},

		{`rate 5/1s; drip_rate 1s`, `limit "api": drip_rate: got "1s" together with rate, ` + wantOneForm},
		{`drip_size 2; rate 5/1s`, `limit "api": drip_size: got "2" together with rate, ` + wantOneForm},
		{`rate 5/1s; max 5`, `limit "api": max: got "5" together with rate, ` + wantOneForm},
		{`rate 5/1s; duration 1s`, `limit "api": duration: got "1s" together with rate, ` + wantOneForm},
		{`rate 5/1s; min_interval 1s`, `limit "api": min_interval: got "1s" together with rate, ` + wantOneForm},
		{`rate 5/1s; max 5; duration 1s`, `limit "api": max: got "5" together with rate, ` + wantOneForm},

		{`rate {env.BAD}`, `limit "api": rate: got "60", ` + wantRate + ` from {env.BAD}`},
		{`rate {env.UNSET_RATE}`, `limit "api": rate: got {env.UNSET_RATE}, which is empty, want a value`},
		{`rate {query.n}/1s`, `limit "api": rate: got "{http.request.uri.query.n}/1s", ` + wantRate},
	}
	for _, text := range []string{
		"60", "0/1s", "-1/1s", "+5/1s", "1.5/1s", "1e3/1s", "562949953421313/1s", "99999999999999999999/1s", "/1s", "1/",
		"/", "1", "10/min", "10/sec", "10r/s", "10/S", "10/mss", "10/ms", "10/month", "10/week", "10/1.5hour", "10/-1hour", "10 / s", "10/ s", "10/hours1", "10 per hour", "10/0s", "10/0day", "10/99999999999day", "5/60", "1/0s", "1/-1s", "1/999ns", "1/1500ns", "1/1s/1", "1//1s",
		"1 / 1s", " 1/1s", "1/1s ", "1/1w", "1/1y", "1/9999999h", "1s/1", "ten/1s", "NaN/1s", "1/1s,2/1m", "٣/1s",
	} {
		tests = append(tests, struct{ block, want string }{
			fmt.Sprintf("rate %q", text), fmt.Sprintf(`limit "api": rate: got %q, `, text) + wantRate,
		})
	}
	for _, tc := range tests {
		t.Run(tc.block, func(t *testing.T) { wantCaddyfileError(t, inLimit(tc.block), tc.want) })
	}
}

// Guards the same in JSON, where other things may stand in a rate's place.
func TestRateErrorsInJSON(t *testing.T) {
	for _, tc := range []struct{ json, want string }{
		{`"60/1s"`, ``},
		{`null`, `limit "default": ` + limitsNothing},
		{`""`, `limit "default": ` + limitsNothing},
		{`60`, `limit "default": rate: got "60", ` + wantRate},
		{`{"n":60}`, `limit "default": rate: got "{\"n\":60}", ` + wantRate},
		{`["60/1s"]`, `limit "default": rate: got "[\"60/1s\"]", ` + wantRate},
		{`true`, `limit "default": rate: got "true", ` + wantRate},
	} {
		t.Run(tc.json, func(t *testing.T) {
			wantError(t, validateConfig(configOf(`"handler":"rate_limit","limits":[{"rate":`+tc.json+`}]`)), tc.want)
		})
	}
}

// Guards what clients meet at a rate, and that it is what they would meet if the
// limit were defined by its drips: same fields, same bucket.
func TestRateEqualsDrips(t *testing.T) {
	rate, drips := "rate 60/1s\nsize 4", "size 4\ndrip_rate 50ms\ndrip_size 3"
	for _, tc := range []struct{ first, second string }{{rate, rate}, {rate, drips}, {drips, rate}} {
		site := func(limit string) string {
			return "rate_limit api {\nheaders x-ratelimit ratelimit\n" + limit + "\n}\nrespond admitted"
		}
		t.Run(fmt.Sprintf("%q and %q", tc.first, tc.second), func(t *testing.T) {
			s := startConfig(t, config{
				site:  site(tc.first),
				sites: "http://other.test:{port} {\n" + site(tc.second) + "\n}",
			})
			other := []string{"Host: other.test"}
			s.run(
				step{want: `200 limit=4 remaining=3 clear=0.050 policy="api";q=4;w=1 ratelimit="api";r=3;t=1`},
				step{header: other, want: `200 limit=4 remaining=2 clear=0.050 policy="api";q=4;w=1 ratelimit="api";r=2;t=1`},
				step{want: `200 limit=4 remaining=1 clear=0.050 policy="api";q=4;w=1 ratelimit="api";r=1;t=1`},
				step{header: other, want: `200 limit=4 remaining=0 clear=0.100 policy="api";q=4;w=1 ratelimit="api";r=0;t=1`},
				step{header: other, want: `429 limit=4 remaining=0 clear=0.100 reset=0.050 retry-after=1 ` +
					`policy="api";q=4;w=1 ratelimit="api";r=0;t=1`},
				step{after: 50*ms - µs, want: `429 limit=4 remaining=0 clear=0.051 reset=0.001 retry-after=1 ` +
					`policy="api";q=4;w=1 ratelimit="api";r=0;t=1`},
				step{after: µs, want: `200 limit=4 remaining=2 clear=0.050 policy="api";q=4;w=1 ratelimit="api";r=2;t=1`},
			)
		})
	}
}

// Guards that a client at a rate is admitted n times each duration and not more,
// for long, behind the burst of n.
func TestRateOfRequests(t *testing.T) {
	s := startSite(t, "rate_limit {\nrate 7/1s\n}\nrespond admitted")
	start, admitted := s.clock.read(), 0
	for range 400 {
		a := s.get("/")
		if a.StatusCode == 200 {
			admitted++
			continue
		}
		wait, err := time.ParseDuration(a.Header.Get("X-RateLimit-Reset") + "s")
		if err != nil {
			t.Fatal(err)
		}
		s.clock.advance(wait)
	}
	passed := (s.clock.read() - start).Seconds()
	// The field is rounded up to a millisecond, which loses up to 0.7 %.
	if most := 7 + 7*passed; float64(admitted) > most || float64(admitted) < 7+7*passed*0.993-1 || passed < 20 {
		t.Errorf("%d admitted in %.3f s, want %.1f", admitted, passed, most)
	}
}

// Guards that a plan's small size does not slow its rate down, nor tell buckets
// apart: what drips is the same for every size.
func TestRateWithSizeOfRequest(t *testing.T) {
	s := startSite(t, "rate_limit {\nrate 60/1s\nsize {header.X-Size}\n}\nrespond admitted")
	s.run(
		step{header: []string{"X-Size: 1"}, want: "200 limit=1 remaining=0 clear=0.017"},
		step{header: []string{"X-Size: 1"}, want: "429 limit=1 remaining=0 clear=0.017 reset=0.017 retry-after=1"},
		step{header: []string{"X-Size: 3"}, want: "200 limit=3 remaining=1 clear=0.034"},
		step{after: 16_667 * µs, header: []string{"X-Size: 2"}, want: "200 limit=2 remaining=0 clear=0.034"},
	)
}

// Guards that limits of one name agree, however they are written.
func TestRatesOfOneName(t *testing.T) {
	for second, want := range map[string]string{
		"rate 60/1s":                              "",
		"size 60\ndrip_rate 50ms\ndrip_size 3":    "",
		"rate 120/2s\nsize 60":                    "",
		"rate 60/s":                               "",
		"rate 60/second":                          "",
		"rate 60/1m":                              "drip_rate: got ",
		"size 60\ndrip_rate 16667us\ndrip_size 1": "drip_rate: got ",
	} {
		t.Run(second, func(t *testing.T) {
			err := validateCaddyfile(fmt.Sprintf(
				":8080 {\nrate_limit a {\nrate 60/1s\n}\n}\n:8081 {\nrate_limit a {\n%s\n}\n}\n", second))
			if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
				t.Errorf("got %v, want %q", err, want)
			}
		})
	}
}
