package behaviour

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome/fieldstest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// TestDynamicNumbers guards that numbers may come from each request, that where
// size, cost and factor do the fields tell those in force, that a factor of 0
// switches off its own bucket and no other, and that where a factor has no value, or a size
// beside a rate, the limit is what it is without it.
func TestDynamicNumbers(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, `
		vars /premium size 20
		vars /free size 2
		rate_limit {
			limit plan {
				match path /premium /free
				size {vars.size}
				cost {header.X-Cost}
				drip_rate {header.X-Rate}
				drip_size {header.X-Drip}
			}
			limit tuned {
				match /tuned
				size 7
				factor {header.X-Factor}
				limit within {
					size 100
				}
			}
			limit all {
				match /all
				size {header.X-Size}
				cost {header.X-Cost}
				drip_rate {header.X-Rate}
				drip_size {header.X-Drip}
				factor {header.X-Factor}
			}
			limit burst {
				match /burst
				rate 3/s
				size {header.X-Size}
				factor {header.X-Factor}
			}
			limit off {
				match /off
				size 1
				factor 0
				limit within {
					size 50
				}
			}
			limit legacy {
				match /legacy
				max 5
				duration 1s
				min_interval 10s
				factor 0.0
			}
		}
		handle_errors {
			respond "{http.rate_limit.exceeded.name}"
		}
		respond "admitted"
	`)
	plan := func(cost, rate, drip string) []string {
		return []string{"X-Cost: " + cost, "X-Rate: " + rate, "X-Drip: " + drip}
	}
	factor := func(x string) []string { return []string{"X-Factor: " + x} }
	s.Run(
		sitetest.Step{Path: "/premium", Header: plan("5", "1s", "1"), Want: "200 limit=20 remaining=15 clear=5.000"},
		// The size alone is of this moment: it is the same bucket.
		sitetest.Step{Path: "/free", Header: plan("1", "1s", "1"),
			Want: "429 limit=2 remaining=0 clear=5.000 reset=4.000 retry-after=4"},
		sitetest.Step{Path: "/premium", Header: plan("1", "1s", "1"), Want: "200 limit=20 remaining=14 clear=6.000"},
		// Other drips are another bucket.
		sitetest.Step{Path: "/premium", Header: plan("3", "500ms", "2"), Want: "200 limit=20 remaining=17 clear=1.000"},
		sitetest.Step{Path: "/premium", Header: plan("20", "2m", "20"), Want: "200 limit=20 remaining=0 clear=120.000"},
		sitetest.Step{Path: "/free", Header: plan("3", "1s", "3"), Want: "429 limit=2 remaining=2 clear=0.000"},

		sitetest.Step{Path: "/tuned", Header: factor("2"), Want: "200 limit=4 remaining=3 clear=1.000"},
		sitetest.Step{Path: "/tuned", Header: factor("0.5"), Want: "200 limit=14 remaining=12 clear=2.000"},
		sitetest.Step{Path: "/tuned", Header: factor("100"), Want: "429 limit=1 remaining=0 clear=2.000 reset=2.000 retry-after=2"},
		sitetest.Step{Path: "/tuned", Want: "200 limit=7 remaining=4 clear=3.000"},
		sitetest.Step{Path: "/tuned", Header: factor(" "), Want: "200 limit=7 remaining=3 clear=4.000"},
		sitetest.Step{Path: "/burst", Header: []string{"X-Size: 20"}, Want: "200 limit=20 remaining=19 clear=0.334"},
		sitetest.Step{Path: "/burst", Want: "200 limit=3 remaining=1 clear=0.667"},
		sitetest.Step{Path: "/burst", Header: factor("0.5"), Want: "200 limit=6 remaining=3 clear=1.001"},
		// The bucket is off, those within are not.
		sitetest.Step{Path: "/tuned", Header: factor("0"), Want: "200 limit=100 remaining=95 clear=5.000"},
		sitetest.Step{Path: "/tuned", Header: factor("0.000"), Want: "200 limit=100 remaining=94 clear=6.000"},

		sitetest.Step{Path: "/all", Header: append(plan("4", "2m", "3"), "X-Size: 10", "X-Factor: 0.5"),
			Want: "200 limit=20 remaining=16 clear=240.000"},
		sitetest.Step{Path: "/off", Want: "200 limit=50 remaining=49 clear=1.000"},
		sitetest.Step{Path: "/legacy", Want: "200 limit=1 remaining=0 clear=10.000"},
		sitetest.Step{Path: "/legacy", Want: "429 limit=1 remaining=0 clear=10.000 reset=10.000 retry-after=10",
			Text: "legacy/min_interval"},
	)
}

// TestBadDynamicNumbers guards that a request which makes a number unusable is
// never let through, whoever chose it: its own cost is its fault, other numbers
// are not.
func TestBadDynamicNumbers(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, `
		rate_limit {
			key everyone
			limit cost {
				match /cost
				size 100
				cost {header.X-Number}
			}
			limit size {
				match /size
				size {header.X-Number}
			}
			limit drip-size {
				match /drip-size
				size 100
				drip_size {header.X-Number}
			}
			limit drip-rate {
				match /drip-rate
				size 100
				drip_rate {header.X-Number}
			}
			limit factor {
				match /factor
				size 100
				factor {header.X-Number}
			}
			limit unknown {
				match /unknown
				size {http.no.such.placeholder}
			}
			limit nested {
				match /nested
				size 100
				limit a {
					size 100
					cost {header.X-Number}
				}
				limit b {
					size 100
				}
			}
		}
		respond "admitted"
	`)
	numbers := []string{
		"", "-1", "+1", "1.5", "1e3", "0x10", "x", "1_000", "1 000", "1,000", "١", "NaN", "Inf",
		"562949953421313", "9223372036854775808", "18446744073709551617", strings.Repeat("9", 1000),
	}
	for path, tc := range map[string]struct {
		status int
		bad    []string
		good   string
	}{
		"/cost":      {400, numbers, "7"},
		"/size":      {500, numbers, "7"},
		"/drip-size": {500, numbers, "7"},
		"/drip-rate": {500, []string{"", "0", "0s", "-1s", "1", "x", "100ns", "1500ns", "18000d", "9999999h", "1s 1s"}, "7s"},
		"/factor": {500, []string{
			"-1", "+1", "1.", ".5", "1e3", "x", "1.0000001", "0.0000000", "NaN", "99999999999999999",
		}, "0.7"},
		"/unknown": {500, []string{"1"}, ""},
		"/nested":  {400, numbers, "7"},
	} {
		for _, number := range tc.bad {
			a := s.Get(path, "X-Number: "+number)
			if a.StatusCode != tc.status || a.Text != "" {
				t.Errorf("%s with %.40q: got %d %q, want %d and nothing",
					path, number, a.StatusCode, a.Text, tc.status)
			}
			if got := fieldstest.In(a.Header); got != "" {
				t.Errorf("%s with %.40q: got fields %s", path, number, got)
			}
		}
		if tc.good != "" {
			if a := s.Get(path, "X-Number: "+tc.good); a.StatusCode != 200 || a.Text != "admitted" {
				t.Errorf("%s with %q: got %d %q", path, tc.good, a.StatusCode, a.Text)
			}
		}
	}
}

// TestBadNumbersChargeNothing guards that a request refused for one limit's
// number has used up no other.
func TestBadNumbersChargeNothing(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, `
		rate_limit all {
			size 3
			accounting each
			limit costly {
				size 100
				cost {header.X-Cost}
				limit within {
					size 2
				}
			}
			headers ratelimit-11
		}
		respond "admitted"
	`)
	s.Run(sitetest.Times(5, sitetest.Step{Want: "400"})...)
	s.Run(sitetest.Step{Header: []string{"X-Cost: 1"},
		Want: `200 policy="all";q=3;w=3, "all/costly";q=100;w=100, "all/costly/within";q=2;w=2` +
			` ratelimit="all";r=2;t=2, "all/costly";r=99;t=99, "all/costly/within";r=1;t=1`})
}

// TestBadNumbersAreReported guards that the log says so, clearly, but at most
// once a minute for a limit: clients may send such requests as they like.
func TestBadNumbersAreReported(t *testing.T) {
	t.Parallel()
	for name, errors := range map[string]string{
		"written directly":     "",
		"through error routes": "handle_errors {\nrespond {err.message}\n}",
	} {
		t.Run(name, func(t *testing.T) {
			s := sitetest.Start(t, `
				rate_limit {
					limit one {
						match /one
						size {header.X-Size}
					}
					limit two {
						match /two
						size 9
						cost {header.X-Cost}
					}
					limit three {
						match /three
						algorithm sliding_log
						size {header.X-Size}
						window {header.X-Window}
					}
					limit four {
						match /four
						algorithm sliding_window
						size 5
						window {header.X-Window}
					}
					limit five {
						match /five
						size 10
						drip_rate {header.X-Rate}
					}
					limit six {
						match /six
						size 10
						drip_size {header.X-Drip}
					}
					limit seven {
						match /seven
						size 10
						factor {header.X-Factor}
					}
					limit eight {
						match /eight
						size {header.X-Size}
						drip_rate {header.X-Rate}
						drip_size {header.X-Drip}
					}
					limit nine {
						match /nine
						size 10
						limit within {
							size 10
							cost {header.X-Cost}
						}
					}
				}
				respond "admitted"
				`+errors)
			for range 3 {
				s.Get("/one", "X-Size: lots")
				s.Get("/two", "X-Cost: -1")
				s.Get("/three", "X-Size: 10001", "X-Window: 1m")
				s.Get("/four", "X-Window: 5000d")
				s.Get("/five", "X-Rate: 5")
				s.Get("/six", "X-Drip: -1")
				s.Get("/seven", "X-Factor: -1")
				s.Get("/eight", "X-Size: 10", "X-Rate: 18000d", "X-Drip: 1")
				s.Get("/nine")
			}
			var got []string
			for _, e := range s.Log("error", sitetest.OwnLogger) {
				got = append(got, fmt.Sprint(e["limit"], ": ", e["error"]))
			}
			const wantUnits = `is not valid; use a whole number`
			want := []string{
				`one: size: text of 4 bytes from {http.request.header.X-Size} ` + wantUnits,
				`two: cost: "-1" from {http.request.header.X-Cost} is not valid; use a whole number`,
				`three: size: "10001" from {http.request.header.X-Size} is not valid; use at most 10000 with algorithm sliding_log`,
				`four: window: "5000d" from {http.request.header.X-Window} is not valid; use at most 11 years with algorithm sliding_window`,
				`five: drip_rate: "5" from {http.request.header.X-Rate} is not valid; use a duration of at least 1µs, such as 500ms, 1s or 1h`,
				`six: drip_size: "-1" from {http.request.header.X-Drip} ` + wantUnits,
				`seven: factor: "-1" from {http.request.header.X-Factor} is not valid; use a decimal from 0 with at most 6 digits after the point, such as 0.5 or 2`,
				`eight: size 10, drip rate 432000h0m0s, drip size 1: a full bucket and one drip more must drain within 35 years`,
				`nine/within: cost: "" from {http.request.header.X-Cost} is not valid; use a whole number`,
			}
			if !slices.Equal(got, want) {
				t.Errorf("got %q, want %q", got, want)
			}
			if more := s.Log("error", sitetest.ErrorLogger); len(more) > 0 {
				t.Errorf("Caddy reports it again: %v", more)
			}
		})
	}
}
