package ratelimit

import (
	"fmt"
	"math/rand/v2"
	"strings"
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
				{want: `200 limit=1 remaining=0 clear=7200.000 policy="day";q=4;qu="units";w=14400, "day/burst";q=1;w=1 ` +
					`ratelimit="day";r=2;t=7200, "day/burst";r=0;t=1`},
				{want: `429 limit=1 remaining=0 clear=14400.000 reset=7200.000 retry-after=7200 ` +
					`policy="day";q=4;qu="units";w=14400, "day/burst";q=1;w=1 ` +
					`ratelimit="day";r=0;t=7200, "day/burst";r=0;t=1`},
				{after: 2 * time.Hour,
					want: `200 limit=1 remaining=0 clear=14400.000 policy="day";q=4;qu="units";w=14400, "day/burst";q=1;w=1 ` +
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

// Guards that nobody fills another's bucket where two limits without a name have
// equal numbers: values of different keys mean different things, even if they
// are the same text, and so does a key that is missing.
func TestUnnamedLimitsWithOtherKeysAreApart(t *testing.T) {
	tests := []struct {
		name  string
		limit string // of the site; the one beside it has the default key
	}{
		{"another key", "{\nkey {header.X-Api-Key}\nsize %s\n}"},
		{"the default name", "default {\nkey {header.X-Api-Key}\nsize %s\n}"},
		{"text around the address", "{\nkey {client_ip}{header.X-Api-Key}\nsize %s\n}"},
		{"a limit within, called as the interval's bucket", `{
			size 9
			limit min_interval {
				key {header.X-Api-Key}
				size %s
			}
		}`},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			s := startConfig(t, config{
				global: "servers {\ntrusted_proxies static 127.0.0.1/32\n}",
				site:   "rate_limit " + fmt.Sprintf(tc.limit, "1") + "\nrespond admitted",
				sites: `http://default.test:{port} {
					rate_limit {
						max 1
						duration 1s
						min_interval 1s
					}
					respond admitted
				}
				http://other.test:{port} {
					rate_limit {
						key {query.k}
						size 1
					}
					respond admitted
				}`,
			})
			const full = "429 limit=1 remaining=0 clear=1.000 reset=1.000 retry-after=1"
			const first = "200 limit=1 remaining=0 clear=1.000"
			attack := []string{"X-Api-Key: 192.0.2.1"}
			victim := []string{"Host: default.test", "X-Forwarded-For: 192.0.2.1"}
			s.run(
				step{header: attack, want: first},
				step{header: attack, want: full},
				step{header: victim, want: first},
				step{header: victim, want: full},
				step{header: append(victim, "Host: other.test"), path: "/?k=192.0.2.1", want: first},
				step{header: append(victim, "Host: other.test"), want: first},
				step{header: append(victim, "Host: other.test"), want: full},
			)
		})
	}
}

// Guards that limits without a name still share their buckets, on all sites,
// where key and numbers are the same.
func TestUnnamedLimitsWithOneKeyShare(t *testing.T) {
	for _, key := range []string{"{client_ip}", "{header.X-Api-Key}", "all"} {
		t.Run(key, func(t *testing.T) {
			site := "rate_limit {\nkey " + key + "\nsize 1\n}\nrespond admitted"
			s := startConfig(t, config{site: site, sites: "http://other.test:{port} {\n" + site + "\n}"})
			s.run(
				step{header: []string{"X-Api-Key: a"}, want: "200 limit=1 remaining=0 clear=1.000"},
				step{header: []string{"X-Api-Key: a", "Host: other.test"},
					want: "429 limit=1 remaining=0 clear=1.000 reset=1.000 retry-after=1"},
			)
		})
	}
}

// Guards that one wait is enough for any limits in any blocks: a client that
// comes again when told to is admitted, unless a block denies it that the request
// did not reach before.
func TestOneWaitIsEnough(t *testing.T) {
	for seed := range uint64(30) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			random := rand.New(rand.NewPCG(1, seed))
			among := func(words ...string) string { return words[random.IntN(len(words))] }
			limit := func() string {
				return fmt.Sprintf("size %d\ndrip_rate %dms\ndrip_size %d\ncost {vars.cost}\n",
					4+random.IntN(6), 1+random.IntN(3000), 1+random.IntN(4))
			}
			var site strings.Builder
			fmt.Fprint(&site, "vars cost {header.X-Cost}\nroute {\n")
			blocks := 1 + random.IntN(3)
			for i := range blocks {
				fmt.Fprintf(&site, "rate_limit b%d {\naccounting %s\n%s", i, among("atomic", "each"), limit())
				for j := range random.IntN(3) {
					fmt.Fprintf(&site, "limit l%d {\n%s}\n", j, limit())
				}
				fmt.Fprint(&site, "}\n")
			}
			fmt.Fprint(&site, "respond admitted\n}\nhandle_errors {\nrespond {http.rate_limit.exceeded.name}\n}\n")
			s := startSite(t, site.String())

			const admitted = "admitted"
			block := func(a answer) string {
				name, _, _ := strings.Cut(a.body, "/")
				return name
			}
			denials := 0
			for range 100 {
				s.clock.advance(time.Duration(random.IntN(1000)) * time.Millisecond)
				cost := "X-Cost: " + among("1", "2", "3", "4")
				a := s.get("/", cost)
				for block(a) != admitted {
					denials++
					wait, err := time.ParseDuration(a.Header.Get("X-RateLimit-Reset") + "s")
					if err != nil {
						t.Fatal(err)
					}
					s.clock.advance(wait)
					again := s.get("/", cost)
					if block(again) != admitted && block(again) <= block(a) {
						t.Fatalf("%s\n%s by %s, and after that time %s by %s", site.String(), a, a.body, again, again.body)
					}
					a = again
				}
			}
			if denials == 0 {
				t.Error("nothing was denied")
			}
		})
	}
}
