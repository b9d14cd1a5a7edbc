package behaviour

import (
	"net/http"
	"strconv"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// Guards what clients see of fixed windows: the fields tell of the window, the
// denial holds until it ends, and the next one begins at a multiple of its length or
// with the first request. A block may mix algorithms.
func TestWindowsOfSite(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, `
		rate_limit /clock minute {
			algorithm fixed_window
			size 2
			window 1m
			headers x-ratelimit ratelimit-11
		}
		rate_limit /first first {
			algorithm fixed_window
			size 1
			window 1m
			window_start first
			headers ratelimit-11
		}
		rate_limit /both both {
			algorithm fixed_window
			size 2
			window 1m
			headers ratelimit-11
			limit burst {
				size 1
				drip_rate 10s
			}
		}
		respond admitted
	`)
	s.Run(
		sitetest.Step{Path: "/clock", After: 15 * time.Second, Want: `200 limit=2 remaining=1 clear=45.000 policy="minute";q=2;w=60 ratelimit="minute";r=1;t=45`},
		sitetest.Step{Path: "/clock", After: 15 * time.Second, Want: `200 limit=2 remaining=0 clear=30.000 policy="minute";q=2;w=60 ratelimit="minute";r=0;t=30`},
		sitetest.Step{
			Path: "/clock", After: 29999 * ms,
			Want: `429 limit=2 remaining=0 clear=0.001 reset=0.001 retry-after=1 policy="minute";q=2;w=60 ratelimit="minute";r=0;t=1`,
		},
		sitetest.Step{Path: "/clock", After: ms, Want: `200 limit=2 remaining=1 clear=60.000 policy="minute";q=2;w=60 ratelimit="minute";r=1;t=60`},
		sitetest.Step{Path: "/first", After: 45 * time.Second, Want: `200 policy="first";q=1;w=60 ratelimit="first";r=0;t=60`},
		sitetest.Step{Path: "/first", After: 20 * time.Second, Want: `429 retry-after=40 policy="first";q=1;w=60 ratelimit="first";r=0;t=40`},
		sitetest.Step{Path: "/first", After: 40 * time.Second, Want: `200 policy="first";q=1;w=60 ratelimit="first";r=0;t=60`},
		sitetest.Step{Path: "/both", Want: `200 policy="both";q=2;w=60, "both/burst";q=1;w=10 ratelimit="both";r=1;t=15, "both/burst";r=0;t=10`},
		sitetest.Step{Path: "/both", Want: `429 retry-after=10 policy="both";q=2;w=60, "both/burst";q=1;w=10 ratelimit="both";r=1, "both/burst";r=0;t=10`},
		sitetest.Step{Path: "/both", After: 15 * time.Second, Want: `200 policy="both";q=2;w=60, "both/burst";q=1;w=10 ratelimit="both";r=1;t=60, "both/burst";r=0;t=10`},
	)
}

// Guards what clients see of sliding windows: the last window counts less and less,
// the denial holds until exactly then, and the fields tell of the window.
func TestSlidingWindowsOfSite(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, `
		rate_limit minute {
			algorithm sliding_window
			size 2
			window 1m
			headers x-ratelimit ratelimit-11
		}
		respond admitted
	`)
	const policy = ` policy="minute";q=2;w=60 ratelimit="minute"`
	s.Run(
		sitetest.Step{After: 15 * time.Second, Want: `200 limit=2 remaining=1 clear=105.000` + policy + `;r=1;t=45`},
		// Two at the end of the window count as two for half a minute, as one to its end.
		sitetest.Step{After: 15 * time.Second, Want: `200 limit=2 remaining=0 clear=90.000` + policy + `;r=0;t=31`},
		sitetest.Step{Want: `429 limit=2 remaining=0 clear=90.000 reset=30.001 retry-after=31` + policy + `;r=0;t=31`},
		sitetest.Step{After: 30 * time.Second, Want: `429 limit=2 remaining=0 clear=60.000 reset=0.001 retry-after=1` + policy + `;r=0;t=1`},
		sitetest.Step{After: ms, Want: `200 limit=2 remaining=0 clear=119.999` + policy + `;r=0;t=30`},
		sitetest.Step{After: 30 * time.Second, Want: `200 limit=2 remaining=0 clear=89.999` + policy + `;r=0;t=30`},
	)
}

// Guards what clients see of logs: each request leaves exactly a window after it came,
// the denial holds until then, and the fields tell of that.
func TestSlidingLogsOfSite(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, `
		rate_limit /log minute {
			algorithm sliding_log
			size 2
			window 1m
			headers x-ratelimit ratelimit-11
		}
		rate_limit /both both {
			algorithm sliding_log
			size 2
			window 1m
			headers ratelimit-11
			limit burst {
				size 1
				drip_rate 10s
			}
		}
		respond admitted
	`)
	const policy = ` policy="minute";q=2;w=60 ratelimit="minute"`
	s.Run(
		sitetest.Step{Path: "/log", After: 15 * time.Second, Want: `200 limit=2 remaining=1 clear=60.000` + policy + `;r=1;t=60`},
		sitetest.Step{Path: "/log", After: 40 * time.Second, Want: `200 limit=2 remaining=0 clear=60.000` + policy + `;r=0;t=20`},
		sitetest.Step{Path: "/log", Want: `429 limit=2 remaining=0 clear=60.000 reset=20.000 retry-after=20` + policy + `;r=0;t=20`},
		sitetest.Step{Path: "/log", After: 19999 * ms, Want: `429 limit=2 remaining=0 clear=40.001 reset=0.001 retry-after=1` + policy + `;r=0;t=1`},
		sitetest.Step{Path: "/log", After: ms, Want: `200 limit=2 remaining=0 clear=60.000` + policy + `;r=0;t=40`},
		sitetest.Step{Path: "/log", After: 40 * time.Second, Want: `200 limit=2 remaining=0 clear=60.000` + policy + `;r=0;t=20`},
		sitetest.Step{Path: "/both", Want: `200 policy="both";q=2;w=60, "both/burst";q=1;w=10 ratelimit="both";r=1;t=60, "both/burst";r=0;t=10`},
		sitetest.Step{Path: "/both", Want: `429 retry-after=10 policy="both";q=2;w=60, "both/burst";q=1;w=10 ratelimit="both";r=1, "both/burst";r=0;t=10`},
		sitetest.Step{Path: "/both", After: 15 * time.Second, Want: `200 policy="both";q=2;w=60, "both/burst";q=1;w=10 ratelimit="both";r=0;t=45, "both/burst";r=0;t=10`},
	)
}

// Guards what clients see of a limit that warms up: each request is admitted exactly
// when the wait after the last one is over, the waits shrink to those of the rate, and
// the fields tell of the rate and of the next free moment. One that costs several
// units makes the next wait for all of them.
func TestWarmUpOfSite(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, `
		rate_limit two {
			algorithm warm_up
			rate 2/1s
			warm_up 4s
			headers x-ratelimit ratelimit-11
			cost {header.X-Cost}
		}
		respond admitted
	`)
	const policy = ` policy="two";q=2;w=1 ratelimit="two"`
	one, two := []string{"X-Cost: 1"}, []string{"X-Cost: 2"}
	s.Run(
		sitetest.Step{Header: one, Want: `200 limit=2 remaining=0 clear=1.875` + policy + `;r=0;t=2`},
		sitetest.Step{Header: one, After: 1374 * ms, Want: `429 limit=2 remaining=0 clear=0.501 reset=0.001 retry-after=1` + policy + `;r=0;t=1`},
		sitetest.Step{Header: one, After: ms, Want: `200 limit=2 remaining=0 clear=2.125` + policy + `;r=0;t=2`},
		sitetest.Step{Header: one, After: 1125 * ms, Want: `200 limit=2 remaining=0 clear=2.375` + policy + `;r=0;t=1`},
		sitetest.Step{Header: one, After: 875 * ms, Want: `200 limit=2 remaining=0 clear=2.625` + policy + `;r=0;t=1`},
		sitetest.Step{Header: two, After: 625 * ms, Want: `200 limit=2 remaining=0 clear=4.000` + policy + `;r=0;t=1`},
		sitetest.Step{Header: one, After: 1000 * ms, Want: `200 limit=2 remaining=0 clear=4.000` + policy + `;r=0;t=1`},
		sitetest.Step{Header: one, After: 4000 * ms, Want: `200 limit=2 remaining=0 clear=1.875` + policy + `;r=0;t=2`},
	)
}

// Guards count_denied in each algorithm: a client that keeps asking stays denied for
// longer than one that waits is, and is admitted once it waits as long as it was told.
// The fields tell of what is left after counting. With min_interval, its bucket counts
// too. Of several limits of a request, those with room count a denial by another.
func TestCountDenied(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, `
		rate_limit /bucket bucket {
			size 3
			drip_rate 10s
			count_denied
		}
		rate_limit /fixed fixed {
			algorithm fixed_window
			size 1
			window 1m
			count_denied
		}
		rate_limit /sliding sliding {
			algorithm sliding_window
			size 1
			window 10s
			count_denied
		}
		rate_limit /warm warm {
			algorithm warm_up
			rate 1/10s
			warm_up 1m
			count_denied
		}
		rate_limit /interval interval {
			max 6
			duration 60s
			min_interval 5s
			count_denied
		}
		rate_limit /both both {
			size 3
			drip_rate 10s
			count_denied
			limit one {
				size 1
				drip_rate 10s
			}
		}
		respond admitted
	`)
	minute := func() { s.Clock.Advance(time.Minute - s.Clock.Now()%time.Minute) }
	s.Run(
		sitetest.Step{Path: "/bucket", Want: `200 limit=3 remaining=2 clear=10.000`},
		sitetest.Step{Path: "/bucket", Want: `200 limit=3 remaining=1 clear=20.000`},
		sitetest.Step{Path: "/bucket", Want: `200 limit=3 remaining=0 clear=30.000`},
		sitetest.Step{Path: "/bucket", After: 10*time.Second - ms, Want: `429 limit=3 remaining=0 clear=30.000 reset=10.000 retry-after=10`},
		sitetest.Step{Path: "/bucket", After: 10*time.Second - ms, Want: `429 limit=3 remaining=0 clear=30.000 reset=10.000 retry-after=10`},
		sitetest.Step{Path: "/bucket", After: 10 * time.Second, Want: `200 limit=3 remaining=0 clear=30.000`},
	)
	minute()
	s.Run(
		sitetest.Step{Path: "/fixed", Want: `200 limit=1 remaining=0 clear=60.000`},
		sitetest.Step{Path: "/fixed", After: 59 * time.Second, Want: `429 limit=1 remaining=0 clear=1.000 reset=1.000 retry-after=1`},
		sitetest.Step{Path: "/fixed", After: time.Second, Want: `200 limit=1 remaining=0 clear=60.000`},
	)
	minute()
	s.Run(
		sitetest.Step{Path: "/both", Want: `200 limit=1 remaining=0 clear=10.000`},
		sitetest.Step{Path: "/both", After: time.Second, Want: `429 limit=1 remaining=0 clear=19.000 reset=9.000 retry-after=9`},
		sitetest.Step{Path: "/both", After: time.Second, Want: `429 limit=1 remaining=0 clear=28.000 reset=8.000 retry-after=8`},
		sitetest.Step{Path: "/both", After: 4 * time.Second, Want: `429 limit=3 remaining=0 clear=30.000 reset=10.000 retry-after=10`},
	)
	for _, path := range []string{"/bucket", "/sliding", "/warm", "/interval"} {
		s.Clock.Advance(10 * time.Minute)
		minute()
		for s.Send("GET", path).StatusCode == http.StatusOK { // until it is full
		}
		var last sitetest.Answer
		for range 100 {
			s.Clock.Advance(950 * ms)
			if last = s.Send("GET", path); last.StatusCode != http.StatusTooManyRequests {
				t.Fatalf("%s: a client that keeps asking: %s", path, last)
			}
		}
		wait, err := strconv.Atoi(last.Header.Get("Retry-After"))
		if err != nil {
			t.Fatalf("%s: %s", path, last)
		}
		s.Clock.Advance(time.Duration(wait) * time.Second)
		if a := s.Send("GET", path); a.StatusCode != http.StatusOK {
			t.Errorf("%s: after waiting %d s: %s", path, wait, a)
		}
	}
}
