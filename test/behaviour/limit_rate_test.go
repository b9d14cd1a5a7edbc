package behaviour

import (
	"fmt"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// Guards the bound that the documents have of a rate: behind a full burst, up to
// 2n − 1 units are admitted within one duration, size and n − 1 with another size, and
// how to have n at most.
func TestRateWithinItsDuration(t *testing.T) {
	t.Parallel()
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
			s := sitetest.Start(t, "rate_limit {\n"+tc.block+"\n}\nrespond admitted")
			admitted, end := 0, s.Clock.Now()+tc.within
			for s.Clock.Now() < end {
				a := s.Get("/")
				if a.StatusCode == 200 {
					admitted++
					continue
				}
				wait, err := time.ParseDuration(a.Header.Get("X-RateLimit-Reset") + "s")
				if err != nil {
					t.Fatal(err)
				}
				s.Clock.Advance(wait)
			}
			if admitted != tc.want {
				t.Errorf("%d admitted within %v, want %d", admitted, tc.within, tc.want)
			}
		})
	}
}

// Guards what clients meet at a rate, and that it is what they would meet if the
// limit were defined by its drips: same fields, same bucket.
func TestRateEqualsDrips(t *testing.T) {
	t.Parallel()
	rate, drips := "rate 60/1s\nsize 4", "size 4\ndrip_rate 50ms\ndrip_size 3"
	for _, tc := range []struct{ first, second string }{{rate, rate}, {rate, drips}, {drips, rate}} {
		site := func(limit string) string {
			return "rate_limit api {\nheaders x-ratelimit ratelimit-11\n" + limit + "\n}\nrespond admitted"
		}
		t.Run(fmt.Sprintf("%q and %q", tc.first, tc.second), func(t *testing.T) {
			s := sitetest.StartConfig(t, sitetest.Config{
				Site:  site(tc.first),
				Sites: "http://other.test:{port} {\n" + site(tc.second) + "\n}",
			})
			other := []string{"Host: other.test"}
			s.Run(
				sitetest.Step{Want: `200 limit=4 remaining=3 clear=0.050 policy="api";q=4;w=1 ratelimit="api";r=3;t=1`},
				sitetest.Step{Header: other, Want: `200 limit=4 remaining=2 clear=0.050 policy="api";q=4;w=1 ratelimit="api";r=2;t=1`},
				sitetest.Step{Want: `200 limit=4 remaining=1 clear=0.050 policy="api";q=4;w=1 ratelimit="api";r=1;t=1`},
				sitetest.Step{Header: other, Want: `200 limit=4 remaining=0 clear=0.100 policy="api";q=4;w=1 ratelimit="api";r=0;t=1`},
				sitetest.Step{Header: other, Want: `429 limit=4 remaining=0 clear=0.100 reset=0.050 retry-after=1 ` +
					`policy="api";q=4;w=1 ratelimit="api";r=0;t=1`},
				sitetest.Step{After: 50*ms - µs, Want: `429 limit=4 remaining=0 clear=0.051 reset=0.001 retry-after=1 ` +
					`policy="api";q=4;w=1 ratelimit="api";r=0;t=1`},
				sitetest.Step{After: µs, Want: `200 limit=4 remaining=2 clear=0.050 policy="api";q=4;w=1 ratelimit="api";r=2;t=1`},
			)
		})
	}
}

// Guards that a client at a rate is admitted n times each duration and not more,
// for long, behind the burst of n.
func TestRateOfRequests(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, "rate_limit {\nrate 7/1s\n}\nrespond admitted")
	start, admitted := s.Clock.Now(), 0
	for range 400 {
		a := s.Get("/")
		if a.StatusCode == 200 {
			admitted++
			continue
		}
		wait, err := time.ParseDuration(a.Header.Get("X-RateLimit-Reset") + "s")
		if err != nil {
			t.Fatal(err)
		}
		s.Clock.Advance(wait)
	}
	passed := (s.Clock.Now() - start).Seconds()
	// The field is rounded up to a millisecond, which loses up to 0.7 %.
	if most := 7 + 7*passed; float64(admitted) > most || float64(admitted) < 7+7*passed*0.993-1 || passed < 20 {
		t.Errorf("%d admitted in %.3f s, want %.1f", admitted, passed, most)
	}
}

// Guards that a plan's small size does not slow its rate down, nor tell buckets
// apart: what drips is the same for every size.
func TestRateWithSizeOfRequest(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, "rate_limit {\nrate 60/1s\nsize {header.X-Size}\n}\nrespond admitted")
	s.Run(
		sitetest.Step{Header: []string{"X-Size: 1"}, Want: "200 limit=1 remaining=0 clear=0.017"},
		sitetest.Step{Header: []string{"X-Size: 1"}, Want: "429 limit=1 remaining=0 clear=0.017 reset=0.017 retry-after=1"},
		sitetest.Step{Header: []string{"X-Size: 3"}, Want: "200 limit=3 remaining=1 clear=0.034"},
		sitetest.Step{After: 16_667 * µs, Header: []string{"X-Size: 2"}, Want: "200 limit=2 remaining=0 clear=0.034"},
	)
}

// Guards that a limit in one line limits as one in a block does: each client address unless
// there is a key, also if a block has the rest.
func TestLimitInOneLine(t *testing.T) {
	t.Parallel()
	alice, bob := []string{"X-Api-Key: alice"}, []string{"X-Api-Key: bob"}
	for _, tc := range []struct {
		directive string
		steps     []sitetest.Step
	}{
		{"rate_limit 2/m", []sitetest.Step{
			{Header: alice, Want: "200 limit=2 remaining=1 clear=30.000"},
			{Header: bob, Want: "200 limit=2 remaining=0 clear=60.000"},
			{Header: alice, Want: "429 limit=2 remaining=0 clear=60.000 reset=30.000 retry-after=30"},
			{After: 30 * time.Second, Want: "200 limit=2 remaining=0 clear=60.000"},
		}},
		{"rate_limit {header.X-Api-Key} 1 per minute", []sitetest.Step{
			{Header: alice, Want: "200 limit=1 remaining=0 clear=60.000"},
			{Header: alice, Want: "429 limit=1 remaining=0 clear=60.000 reset=60.000 retry-after=60"},
			{Header: bob, Want: "200 limit=1 remaining=0 clear=60.000"},
		}},
		{"rate_limit /a 60r/min api {\nsize 1\n}", []sitetest.Step{
			{Path: "/a", Want: "200 limit=1 remaining=0 clear=1.000"},
			{Path: "/a", Want: "429 limit=1 remaining=0 clear=1.000 reset=1.000 retry-after=1"},
			{Path: "/b", Want: "200"},
		}},
	} {
		t.Run(tc.directive, func(t *testing.T) {
			sitetest.Start(t, tc.directive+"\nrespond admitted").Run(tc.steps...)
		})
	}
}
