package ratelimit

import (
	"testing"
	"time"
)

// Guards that a denied client which waits as long as it is told is admitted:
// the wait is that of every bucket that has no room for the same request once
// this one is charged, not only of those that denied it.
func TestWaitIsOfAllBuckets(t *testing.T) {
	tests := []struct {
		name  string
		site  string
		steps []step
	}{
		{
			"an earlier block was charged",
			`route {
				rate_limit day {
					size 2
					drip_rate 1h
				}
				rate_limit burst {
					size 1
				}
				respond "{http.rate_limit.limit}"
			}
			handle_errors {
				respond "{http.rate_limit.limit} {http.rate_limit.exceeded.name} {http.rate_limit.retry_after}: {err.message}"
			}`,
			[]step{
				{want: "200 limit=1 remaining=0 clear=3600.000", body: "burst"},
				{want: "429 limit=1 remaining=0 clear=7200.000 reset=3600.000 retry-after=3600",
					body: "burst burst 3600: rate limit burst exceeded: retry after 3600 s"},
				{after: time.Hour - time.Microsecond,
					want: "429 limit=2 remaining=0 clear=3600.001 reset=0.001 retry-after=1",
					body: "day day 1: rate limit day exceeded: retry after 1 s"},
				{after: time.Microsecond, want: "200 limit=1 remaining=0 clear=7200.000", body: "burst"},
			},
		},
		{
			"each was charged by itself",
			`rate_limit day {
				size 4
				drip_rate 1h
				cost 2
				accounting each
				headers x-ratelimit ratelimit
				limit burst {
					size 1
				}
			}
			respond "{http.rate_limit.limit}"`,
			[]step{
				{want: `200 limit=1 remaining=0 clear=7200.000 policy="day";q=4;w=14400, "day/burst";q=1;w=1 ` +
					`ratelimit="day";r=2;t=7200, "day/burst";r=0;t=1`},
				{want: `429 limit=1 remaining=0 clear=14400.000 reset=7200.000 retry-after=7200 ` +
					`policy="day";q=4;w=14400, "day/burst";q=1;w=1 ` +
					`ratelimit="day";r=0;t=7200, "day/burst";r=0;t=1`},
				{after: 2 * time.Hour,
					want: `200 limit=1 remaining=0 clear=14400.000 policy="day";q=4;w=14400, "day/burst";q=1;w=1 ` +
						`ratelimit="day";r=0;t=3600, "day/burst";r=0;t=1`},
			},
		},
		{
			"an earlier block still has room",
			`route {
				rate_limit day {
					size 3
					drip_rate 1h
				}
				rate_limit burst {
					size 1
				}
				respond admitted
			}`,
			[]step{
				{want: "200 limit=1 remaining=0 clear=3600.000"},
				{want: "429 limit=1 remaining=0 clear=7200.000 reset=1.000 retry-after=1"},
				{after: time.Second, want: "200 limit=1 remaining=0 clear=10799.000"},
			},
		},
		{
			"what is charged to none does not count",
			`rate_limit day {
				size 2
				drip_rate 1h
				limit burst {
					size 1
				}
			}
			respond admitted`,
			[]step{
				{want: "200 limit=1 remaining=0 clear=3600.000"},
				{want: "429 limit=1 remaining=0 clear=3600.000 reset=1.000 retry-after=1"},
				{after: time.Second, want: "200 limit=1 remaining=0 clear=7199.000"},
			},
		},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			startSite(t, tc.site).run(tc.steps...)
		})
	}
}
