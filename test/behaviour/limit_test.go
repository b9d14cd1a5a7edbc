package behaviour

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/configtest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// Guards that a denied client which waits for Retry-After is admitted:
// the wait is that of every bucket that has no room for the same request once
// this one is charged, not only of those that denied it.
func TestRetryTimeCoversAllBuckets(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name  string
		site  string
		steps []sitetest.Step
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
			[]sitetest.Step{
				{Want: "200 limit=1 remaining=0 clear=3600.000", Text: "burst"},
				{Want: "429 limit=1 remaining=0 clear=7200.000 reset=3600.000 retry-after=3600",
					Text: "burst burst 3600: rate limit burst exceeded: retry after 3600 s"},
				{After: time.Hour - time.Microsecond,
					Want: "429 limit=2 remaining=0 clear=3600.001 reset=0.001 retry-after=1",
					Text: "day day 1: rate limit day exceeded: retry after 1 s"},
				{After: time.Microsecond, Want: "200 limit=1 remaining=0 clear=7200.000", Text: "burst"},
			},
		},
		{
			"each was charged by itself",
			`rate_limit day {
				size 4
				drip_rate 1h
				cost 2
				accounting each
				headers x-ratelimit ratelimit-11
				limit burst {
					size 1
				}
			}
			respond "{http.rate_limit.limit}"`,
			[]sitetest.Step{
				{Want: `200 limit=1 remaining=0 clear=7200.000 policy="day";q=4;w=14400, "day/burst";q=1;w=1 ` +
					`ratelimit="day";r=2;t=7200, "day/burst";r=0;t=1`},
				{Want: `429 limit=1 remaining=0 clear=14400.000 reset=7200.000 retry-after=7200 ` +
					`policy="day";q=4;w=14400, "day/burst";q=1;w=1 ` +
					`ratelimit="day";r=0;t=7200, "day/burst";r=0;t=1`},
				{After: 2 * time.Hour,
					Want: `200 limit=1 remaining=0 clear=14400.000 policy="day";q=4;w=14400, "day/burst";q=1;w=1 ` +
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
			[]sitetest.Step{
				{Want: "200 limit=1 remaining=0 clear=3600.000"},
				{Want: "429 limit=1 remaining=0 clear=7200.000 reset=1.000 retry-after=1"},
				{After: time.Second, Want: "200 limit=1 remaining=0 clear=10799.000"},
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
			[]sitetest.Step{
				{Want: "200 limit=1 remaining=0 clear=3600.000"},
				{Want: "429 limit=1 remaining=0 clear=3600.000 reset=1.000 retry-after=1"},
				{After: time.Second, Want: "200 limit=1 remaining=0 clear=7199.000"},
			},
		},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			sitetest.Start(t, tc.site).Run(tc.steps...)
		})
	}
}

// Guards that nobody fills another's bucket where two limits without a name have
// equal numbers: values of different keys mean different things, even if they
// are the same text, and so does a key that is missing.
func TestUnnamedLimitsWithOtherKeysAreApart(t *testing.T) {
	t.Parallel()
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
		for _, unnamed := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, unnamed %t", tc.name, unnamed), func(t *testing.T) {
				s := sitetest.StartConfig(t, sitetest.Config{
					Unnamed: unnamed && !strings.HasPrefix(tc.limit, "default"),
					Global:  "servers {\ntrusted_proxies static 127.0.0.1/32\n}",
					Site:    "rate_limit " + fmt.Sprintf(tc.limit, "1") + "\nrespond admitted",
					Sites: `http://default.test:{port} {
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
				s.Run(
					sitetest.Step{Header: attack, Want: first},
					sitetest.Step{Header: attack, Want: full},
					sitetest.Step{Header: victim, Want: first},
					sitetest.Step{Header: victim, Want: full},
					sitetest.Step{Header: append(victim, "Host: other.test"), Path: "/?k=192.0.2.1", Want: first},
					sitetest.Step{Header: append(victim, "Host: other.test"), Want: first},
					sitetest.Step{Header: append(victim, "Host: other.test"), Want: full},
				)
			})
		}
	}
}

// TestLimitsWithoutNameBelongToTheirPlace guards that each limit without a name in a
// Caddyfile has buckets and a name of its own, by the order in which they stand there,
// however equal they are, and that one place has one limit.
func TestLimitsWithoutNameBelongToTheirPlace(t *testing.T) {
	const block = "rate_limit {\nsize 9\nheaders ratelimit-11\n}\n"
	for _, tc := range []struct {
		name, site, sites string
		want              []string // of requests for /, /x and the other sites; "" if they meet none
		snippet           string
	}{
		{"blocks of a site", "route /x {\n" + block + "respond ok\n}\nroute / {\n" + block + "respond ok\n}",
			"http://other.test:{port} {\n" + block + "respond ok\n}", []string{`"default-2";r=8;t=8`, `"default";r=8;t=8`, `"default-3";r=8;t=8`}, ""},
		{"lines", "rate_limit / 9/s\nrate_limit /x 9/s\nrespond ok", "http://other.test:{port} {\nrate_limit 9/s\nrespond ok\n}",
			[]string{"default 8", "default-2 8", "default-3 8"}, ""},
		{"a snippet on two sites", "import limited", "http://other.test:{port} {\nimport limited\n}",
			[]string{`"default";r=8;t=8`, `"default";r=7;t=7`, `"default-2";r=8;t=8`}, block + "respond ok"},
		{"a snippet twice in a site", "import limited /\nimport limited /x\nrespond ok",
			"http://other.test:{port} {\nimport limited *\nrespond ok\n}",
			[]string{"default 8", "default-2 8", "default-3 8"}, "rate_limit {args[0]} 9/s"},
		{"a block of several sites", "respond ok", "http://other.test:{port}, http://third.test:{port} {\nrate_limit 9/s\nrespond ok\n}",
			[]string{"", "", "default 8", "default 7"}, ""},
		{"error routes", "error / 500\nrate_limit 9/s\nrespond ok\nhandle_errors {\nrate_limit 7/s\nrespond ok\n}",
			"http://other.test:{port} {\nrate_limit 9/s\nrespond ok\n}", []string{"default-2 6", "default 7", "default-3 8"}, ""},
		{"responses of an upstream", "rate_limit /x 7/s\nreverse_proxy http://{$UPSTREAM} {\nhandle_response {\nrate_limit 9/s\nrespond ok\n}\n}",
			"http://other.test:{port} {\nrate_limit 9/s\nrespond ok\n}", []string{"default-2 8", "default 6", "default-3 8"}, ""},
		{"a named route beside sites", "rate_limit /x 9/s\nrespond ok", "&(limited) {\nrate_limit 9/s\n}\nhttp://other.test:{port} {\ninvoke limited\nrespond ok\n}",
			[]string{"", "default-2 8", "default 8"}, ""},
		{"a named route on two sites", "invoke limited\nrespond ok", "&(limited) {\nrate_limit 9/s\n}\nhttp://other.test:{port} {\ninvoke limited\nrespond ok\n}",
			[]string{"default 8", "default 7", "default 6"}, ""},
		{"names of one's own are left out", "rate_limit / default-2 9/s\nrate_limit /x 9/s\nrespond ok",
			"http://other.test:{port} {\nrate_limit 9/s\nrespond ok\n}", []string{"default-2 8", "default 8", "default-3 8"}, ""},
		{"names of named routes are left out", "rate_limit / 9/s\nrate_limit /x 9/s\nrespond ok",
			"&(limited) {\nrate_limit default-2 9/s\n}\nhttp://other.test:{port} {\ninvoke limited\nrespond ok\n}", []string{"default 8", "default-3 8", "default-2 8"}, ""},
		{"names of zones are left out", "rate_limit / {\nheaders ratelimit-11\nzone default {\nevents 9\nwindow 1m\n}\n}\nrate_limit /x 9/s\nrespond ok",
			"http://other.test:{port} {\nrate_limit 9/s\nrespond ok\n}", []string{`"default";r=8;t=60`, "default-2 8", "default-3 8"}, ""},
		{"groups need no name", "rate_limit {\nlimit a {\nrate 9/s\nmatch path /\n}\n}\nrate_limit /x 9/s\nrespond ok",
			"http://other.test:{port} {\nrate_limit 9/s\nrespond ok\n}", []string{"a 8", "default 8", "default-2 8"}, ""},
		{"limits within them", "rate_limit / {\nlimit in {\nsize 8\n}\nsize 9\n}\nrate_limit /x {\nsize 9\nlimit in {\nsize 8\n}\n}\nrespond ok",
			"http://other.test:{port} {\nrate_limit {\nsize 9\nlimit in {\nsize 8\n}\n}\nrespond ok\n}", []string{"default/in 7", "default-2/in 7", "default-3/in 7"}, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Setenv("UPSTREAM", sitetest.NewUpstream(t, func(http.ResponseWriter, *http.Request) {}))
			show := func(site string) string {
				return strings.ReplaceAll(site, "respond ok", "respond \"{http.rate_limit.limit} {http.rate_limit.remaining}\"")
			}
			c := sitetest.Config{Site: show(tc.site), Sites: show(tc.sites)}
			if tc.snippet != "" { // behind the global options
				c.Global = "}\n(limited) {\n" + show(tc.snippet)
			}
			s := sitetest.StartConfig(t, c)
			for i, want := range tc.want {
				a := s.Get([]string{"/", "/x", "/y", "/y"}[i], "Host: "+[]string{s.Addr, s.Addr, "other.test", "third.test"}[i])
				got := a.Header.Get("RateLimit")
				if got == "" {
					got = strings.TrimSpace(a.Text)
				}
				if got = strings.TrimPrefix(got, "{http.rate_limit.limit} {http.rate_limit.remaining}"); got != want {
					t.Errorf("request %d: got %q, want %q", i+1, got, want)
				}
			}
		})
	}
}

// TestUnnamedLimitsOfOtherSizesAreApart guards that limits without a name, as in JSON, on
// several sites, which have their key and drips in common but not the size, do not
// fill each other's buckets; and that those of the same size in force share one.
func TestUnnamedLimitsOfOtherSizesAreApart(t *testing.T) {
	t.Setenv("RATELIMIT_TEST_SIZE", "3")
	for _, key := range []string{"{client_ip}", "{header.X-Api-Key}", "all"} {
		for _, tc := range []struct {
			first, second string // their sizes
			shared        bool
		}{
			{"size 3", "size 4", false},
			{"size 3", "size 3\nfactor 3", false},
			{"size 3", "size {vars.three}", false},
			{"size {vars.three}", "size {vars.four}", false},
			{"size {vars.three}", "size {vars.three}\nfactor 2", false},
			{"size 3", "size 3", true},
			{"size 3", "size 6\nfactor 2", true},
			{"size 3", "max 3\nduration 3s", true},
			{"size 3", "size {env.RATELIMIT_TEST_SIZE}", true},
			{"size {vars.three}", "size {vars.three}", true},
		} {
			t.Run(fmt.Sprintf("%s,%q,%q", key, tc.first, tc.second), func(t *testing.T) {
				site := func(size string) string {
					return "vars three 3\nvars four 4\nrate_limit {\nkey " + key + "\n" + size + "\n}\nrespond admitted"
				}
				s := sitetest.StartConfig(t, sitetest.Config{Unnamed: true, Site: site(tc.first), Sites: "http://other.test:{port} {\n" + site(tc.second) + "\n}"})
				for range 3 {
					if a := s.Get("/", "X-Api-Key: a"); a.StatusCode != 200 {
						t.Fatal(a)
					}
				}
				want := 200
				if tc.shared {
					want = 429
				}
				if a := s.Get("/", "X-Api-Key: a", "Host: other.test"); a.StatusCode != want {
					t.Errorf("the other site answers %d, want %d", a.StatusCode, want)
				}
			})
		}
	}
}

// Guards that one wait is enough for any limits in any blocks: a client that
// comes again when told to is admitted, unless a block denies it that the request
// did not reach before.
func TestClientAdmittedAfterOneWait(t *testing.T) {
	t.Parallel()
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
			s := sitetest.Start(t, site.String())

			const admitted = "admitted"
			block := func(a sitetest.Answer) string {
				name, _, _ := strings.Cut(a.Text, "/")
				return name
			}
			denials := 0
			for range 100 {
				s.Clock.Advance(time.Duration(random.IntN(1000)) * time.Millisecond)
				cost := "X-Cost: " + among("1", "2", "3", "4")
				a := s.Get("/", cost)
				for block(a) != admitted {
					denials++
					wait, err := time.ParseDuration(a.Header.Get("X-RateLimit-Reset") + "s")
					if err != nil {
						t.Fatal(err)
					}
					s.Clock.Advance(wait)
					again := s.Get("/", cost)
					if block(again) != admitted && block(again) <= block(a) {
						t.Fatalf("%s\n%s by %s, and after that time %s by %s", site.String(), a, a.Text, again, again.Text)
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

// TestDripSize guards that each drip takes drip_size units at once, also where
// the last is short, and that the wait for an expensive request is exact.
func TestDripSize(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, `
		rate_limit {
			size 5
			drip_rate 1s
			drip_size 2
			cost {header.X-Cost}
		}
		respond "admitted"
	`)
	cost := func(n string) []string { return []string{"X-Cost: " + n} }
	s.Run(
		sitetest.Step{Header: cost("5"), Want: "200 limit=5 remaining=0 clear=3.000"},
		sitetest.Step{Header: cost("1"), Want: "429 limit=5 remaining=0 clear=3.000 reset=1.000 retry-after=1"},
		sitetest.Step{Header: cost("3"), Want: "429 limit=5 remaining=0 clear=3.000 reset=2.000 retry-after=2"},
		sitetest.Step{After: time.Second - µs, Header: cost("1"),
			Want: "429 limit=5 remaining=0 clear=2.001 reset=0.001 retry-after=1"},
		sitetest.Step{After: µs, Header: cost("1"), Want: "200 limit=5 remaining=1 clear=2.000"},
		sitetest.Step{Header: cost("2"), Want: "429 limit=5 remaining=1 clear=2.000 reset=1.000 retry-after=1"},
		sitetest.Step{Header: cost("1"), Want: "200 limit=5 remaining=0 clear=3.000"},
	)
}

// TestNestedLimits guards that a limit within another applies only where that one
// does, and that a request is charged to all that apply.
func TestNestedLimits(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, `
		rate_limit all {
			size 10
			limit api {
				match /api/*
				size 4
				limit writes {
					match {
						method POST PUT
					}
					size 2
				}
			}
			limit api-free {
				match {
					not path /api/*
				}
				size 9
			}
			headers ratelimit-11
		}
		respond "{http.rate_limit.limit}"
	`)
	const (
		all    = `"all";q=10;w=10`
		api    = `"all/api";q=4;w=4`
		writes = `"all/api/writes";q=2;w=2`
		free   = `"all/api-free";q=9;w=9`
	)
	s.Run(
		sitetest.Step{Path: "/", Text: "all/api-free",
			Want: `200 policy=` + all + `, ` + free + ` ratelimit="all";r=9;t=9, "all/api-free";r=8;t=8`},
		// A method alone does not reach the innermost limit.
		sitetest.Step{Path: "/", Method: "POST",
			Want: `200 policy=` + all + `, ` + free + ` ratelimit="all";r=8;t=8, "all/api-free";r=7;t=7`},
		sitetest.Step{Path: "/api/x", Text: "all/api",
			Want: `200 policy=` + all + `, ` + api + ` ratelimit="all";r=7;t=7, "all/api";r=3;t=3`},
		sitetest.Step{Path: "/api/x", Method: "PUT", Text: "all/api/writes",
			Want: `200 policy=` + all + `, ` + api + `, ` + writes +
				` ratelimit="all";r=6;t=6, "all/api";r=2;t=2, "all/api/writes";r=1;t=1`},
	)
}

// TestMatchForms guards that a limit's matcher may be a named one, a path,
// matchers in a line or in a block, and * for all requests.
func TestMatchForms(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, `
		@get method GET
		rate_limit {
			limit named {
				match @get
				size 90
			}
			limit path {
				match /a*
				size 80
			}
			limit line {
				match method GET
				size 70
			}
			limit block {
				match {
					path /ab*
					method GET
				}
				size 60
			}
			limit any {
				match *
				size 50
			}
			headers ratelimit-11
		}
		respond "admitted"
	`)
	applied := regexp.MustCompile(`"[^"]*"`)
	for _, tc := range []struct{ method, path, want string }{
		{"GET", "/ab", `"named" "path" "line" "block" "any"`},
		{"GET", "/ac", `"named" "path" "line" "any"`},
		{"POST", "/ab", `"path" "any"`},
		{"POST", "/", `"any"`},
	} {
		policy := s.Send(tc.method, tc.path).Header.Get("RateLimit-Policy")
		if got := strings.Join(applied.FindAllString(policy, -1), " "); got != tc.want {
			t.Errorf("%s %s: limits %s apply, want %s", tc.method, tc.path, got, tc.want)
		}
	}
}

// TestAtomicAccounting guards that a denied request uses up no limit anywhere:
// neither above the one that denies nor within it nor beside it.
func TestAtomicAccounting(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, `
		rate_limit all {
			size 10
			limit api {
				match /api
				size 2
				limit deep {
					size 7
				}
			}
			headers ratelimit-11
		}
		respond "admitted"
	`)
	const policies = `policy="all";q=10;w=10, "all/api";q=2;w=2, "all/api/deep";q=7;w=7 `
	s.Run(
		sitetest.Step{Path: "/api", Want: `200 ` + policies +
			`ratelimit="all";r=9;t=9, "all/api";r=1;t=1, "all/api/deep";r=6;t=6`},
		sitetest.Step{Path: "/api", Want: `200 ` + policies +
			`ratelimit="all";r=8;t=8, "all/api";r=0;t=1, "all/api/deep";r=5;t=5`},
	)
	s.Run(sitetest.Times(5, sitetest.Step{Path: "/api", Want: `429 retry-after=1 ` + policies +
		`ratelimit="all";r=8, "all/api";r=0;t=1, "all/api/deep";r=5`})...)
	s.Run(sitetest.Step{Path: "/", Want: `200 policy="all";q=10;w=10 ratelimit="all";r=7;t=7`})
}

// TestEachAccounting guards the other way to account, by the table of its
// source: a client that keeps retrying a full limit uses up the others.
func TestEachAccounting(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, `
		rate_limit user {
			size 16
			drip_rate 2s
			accounting each
			limit trade {
				match /trade
				size 6
				drip_rate 1500ms
			}
		}
		respond "admitted"
	`)
	for n := 1; n <= 6; n++ {
		s.Run(sitetest.Step{Path: "/trade", Want: fmt.Sprintf("200 limit=6 remaining=%d clear=%d.000", 6-n, 2*n)})
	}
	for n := 7; n <= 15; n++ {
		s.Run(sitetest.Step{Path: "/trade",
			Want: fmt.Sprintf("429 limit=6 remaining=0 clear=%d.000 reset=1.500 retry-after=2", 2*n)})
	}
	s.Run(
		// What this one is charged fills the user's bucket: the wait is for both.
		sitetest.Step{Path: "/trade", Want: "429 limit=6 remaining=0 clear=32.000 reset=2.000 retry-after=2"},
		// Now the user's bucket denies too, for longer.
		sitetest.Step{Path: "/trade", Want: "429 limit=16 remaining=0 clear=32.000 reset=2.000 retry-after=2"},
		sitetest.Step{Path: "/trade", Want: "429 limit=16 remaining=0 clear=32.000 reset=2.000 retry-after=2"},
		sitetest.Step{Want: "429 limit=16 remaining=0 clear=32.000 reset=2.000 retry-after=2"},
	)
}

// TestLegacyLimit guards the limits defined by max, duration and min_interval:
// bursts of max, that many per duration on average, and between any two
// requests at least the interval.
func TestLegacyLimit(t *testing.T) {
	t.Parallel()
	t.Run("max and duration", func(t *testing.T) {
		s := sitetest.Start(t, `
			rate_limit {
				max 3
				duration 10s
			}
			respond "admitted"
		`)
		// 10 s / 3, rounded up to a whole microsecond: never more than max on average.
		s.Run(
			sitetest.Step{Want: "200 limit=3 remaining=2 clear=3.334"},
			sitetest.Step{Want: "200 limit=3 remaining=1 clear=6.667"},
			sitetest.Step{Want: "200 limit=3 remaining=0 clear=10.001"},
			sitetest.Step{Want: "429 limit=3 remaining=0 clear=10.001 reset=3.334 retry-after=4"},
			sitetest.Step{After: 3_333_333 * µs, Want: "429 limit=3 remaining=0 clear=6.667 reset=0.001 retry-after=1"},
			sitetest.Step{After: µs, Want: "200 limit=3 remaining=0 clear=10.001"},
		)
	})
	t.Run("intervals rounded up", func(t *testing.T) {
		s := sitetest.Start(t, `
			rate_limit {
				limit even {
					match /60
					max 60
					duration 1m
					cost {header.X-Cost}
				}
				limit rounded {
					match /7
					max 7
					duration 1s
					cost {header.X-Cost}
				}
				limit slightly-longer {
					match /3
					max 3
					duration 4us
					cost {header.X-Cost}
				}
				limit fastest {
					match /1000
					max 1000
					duration 1ms
					cost {header.X-Cost}
				}
			}
			respond "admitted"
		`)
		for max, interval := range map[string]time.Duration{
			"60": time.Second, "7": 142_858 * µs, "3": 2 * µs, "1000": µs,
		} {
			for _, tc := range []struct {
				after  time.Duration
				cost   string
				status int
			}{
				{0, max, 200}, {interval - µs, "1", 429}, {µs, "1", 200}, {0, "1", 429},
			} {
				s.Clock.Advance(tc.after)
				if a := s.Get("/"+max, "X-Cost: "+tc.cost); a.StatusCode != tc.status {
					t.Errorf("max %s, %v later: got %s, want %d", max, tc.after, a, tc.status)
				}
			}
		}
	})
	t.Run("min_interval", func(t *testing.T) {
		s := sitetest.Start(t, `
			rate_limit login {
				max 3
				duration 6s
				min_interval 500ms
			}
			handle_errors {
				respond "{http.rate_limit.exceeded.name}"
			}
			respond "admitted"
		`)
		s.Run(
			sitetest.Step{Want: "200 limit=1 remaining=0 clear=2.000"},
			sitetest.Step{Want: "429 limit=1 remaining=0 clear=2.000 reset=0.500 retry-after=1",
				Text: "login/min_interval"},
			sitetest.Step{After: 500*ms - µs, Want: "429 limit=1 remaining=0 clear=1.501 reset=0.001 retry-after=1"},
			sitetest.Step{After: µs, Want: "200 limit=1 remaining=0 clear=3.500"},
			// Those that came too early used up none of the 3.
			sitetest.Step{After: 500 * ms, Want: "200 limit=1 remaining=0 clear=5.000"},
			sitetest.Step{After: 500 * ms, Want: "429 limit=3 remaining=0 clear=4.500 reset=0.500 retry-after=1",
				Text: "login"},
			sitetest.Step{After: 500 * ms, Want: "200 limit=1 remaining=0 clear=6.000"},
		)
	})
	t.Run("cost and factor apply to the burst alone", func(t *testing.T) {
		s := sitetest.Start(t, `
			rate_limit {
				max 2
				duration 2s
				min_interval 1s
				cost 2
				factor 0.5
			}
			respond "admitted"
		`)
		s.Run(
			sitetest.Step{Want: "200 limit=1 remaining=0 clear=2.000"},
			sitetest.Step{Want: "429 limit=1 remaining=0 clear=2.000 reset=1.000 retry-after=1"},
			sitetest.Step{After: time.Second, Want: "200 limit=1 remaining=0 clear=3.000"},
			sitetest.Step{After: time.Second, Want: "200 limit=1 remaining=0 clear=4.000"},
			sitetest.Step{After: time.Second, Want: "429 limit=4 remaining=1 clear=3.000 reset=1.000 retry-after=1"},
		)
	})
}

// TestNeverAdmitted guards what a request gets that costs more than the bucket
// holds: a denial that does not invite to retry, and no charge.
func TestNeverAdmitted(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, `
		rate_limit {
			size 3
			cost {header.X-Cost}
			headers x-ratelimit ratelimit-11
		}
		respond "admitted"
	`)
	s.Run(
		sitetest.Step{Header: []string{"X-Cost: 4"},
			Want: `429 limit=3 remaining=3 clear=0.000 policy="default";q=3;w=3 ratelimit="default";r=3`},
		sitetest.Step{Header: []string{"X-Cost: 562949953421312"},
			Want: `429 limit=3 remaining=3 clear=0.000 policy="default";q=3;w=3 ratelimit="default";r=3`},
		sitetest.Step{Header: []string{"X-Cost: 3"},
			Want: `200 limit=3 remaining=0 clear=3.000 policy="default";q=3;w=3 ratelimit="default";r=0;t=1`},
	)
}

// TestSitesShareBuckets guards that limits of one name and equal numbers share
// their buckets on all sites, and others do not.
func TestSitesShareBuckets(t *testing.T) {
	t.Parallel()
	const limits = `
		rate_limit /named api {
			size 2
		}
		rate_limit /unnamed {
			size %d
		}
		respond "admitted"
	`
	s := sitetest.StartConfig(t, sitetest.Config{
		Site:  fmt.Sprintf(limits, 5),
		Sites: "http://other.test:{port} {\nlog\n" + fmt.Sprintf(limits, 6) + "\n}",
	})
	other := func(path, want string) sitetest.Step {
		return sitetest.Step{Path: path, Header: []string{"Host: other.test"}, Want: want}
	}
	s.Run(
		sitetest.Step{Path: "/named", Want: "200 limit=2 remaining=1 clear=1.000"},
		other("/named", "200 limit=2 remaining=0 clear=2.000"),
		sitetest.Step{Path: "/named", Want: "429 limit=2 remaining=0 clear=2.000 reset=1.000 retry-after=1"},
		sitetest.Step{Path: "/unnamed", Want: "200 limit=5 remaining=4 clear=1.000"},
		other("/unnamed", "200 limit=6 remaining=5 clear=1.000"),
	)
}

// Guards that the log warns where drips are read from what clients send, and only
// there: each value has a bucket of its own, so that they choose a fresh one.
func TestClientControlledDrips(t *testing.T) {
	for block, want := range map[string]string{
		`size 5; drip_rate {header.X-Rate}`:                "drip_rate {http.request.header.X-Rate}",
		`size 5; drip_rate {query.rate}ms`:                 "drip_rate {http.request.uri.query.rate}",
		`size 5; drip_size {cookie.n}`:                     "drip_size {http.request.cookie.n}",
		`size 5; drip_size {path.0}`:                       "drip_size {http.request.uri.path.0}",
		`size 5; drip_size {file.base}`:                    "drip_size {http.request.uri.path.file.base}",
		`size 5; drip_size {http.request.body}`:            "drip_size {http.request.body}",
		`size 5; drip_size {http.request.form.n}`:          "drip_size {http.request.form.n}",
		`size 5; drip_size {labels.0}`:                     "drip_size {http.request.host.labels.0}",
		`size 5; drip_size {re.a.1}`:                       "drip_size {http.regexp.a.1}",
		`size 5; drip_size {file_match.relative}`:          "drip_size {http.matchers.file.relative}",
		`size 5; drip_rate {remote_port}ms`:                "drip_rate {http.request.remote.port}",
		`size 5; drip_rate {vars.a}{query.b}`:              "drip_rate {http.request.uri.query.b}",
		`size 5; drip_rate {query.a}; drip_size {query.b}`: "drip_rate {http.request.uri.query.a}", // a line for each limit

		`size {query.n}`:                                              "",
		`size 5; cost {query.n}`:                                      "",
		`size 5; factor {query.n}`:                                    "",
		`key {query.n}; size 5; drip_rate 5s`:                         "",
		`size 5; drip_rate {vars.rate}`:                               "",
		`size 5; drip_rate {http.auth.user.rate}`:                     "",
		`size 5; drip_size {env.RATE_LIMIT_TEST_N}`:                   "",
		`size 5; drip_size {http.request.tls.client.san.dns_names.0}`: "",
		`size 5; drip_rate {query.a}; factor 0`:                       "",
	} {
		t.Run(block, func(t *testing.T) {
			t.Setenv("RATE_LIMIT_TEST_N", "5")
			s := sitetest.StartConfig(t, sitetest.Config{Site: "rate_limit api {\n" + configtest.Lines(block) + "\n}\nrespond admitted"})
			var got []string
			for _, e := range s.Log("warn", "rate_limit") {
				if e["limit"] != "api" {
					t.Errorf("got %v, want it of limit api", e)
				}
				problem, _, _ := strings.Cut(fmt.Sprint(e["problem"]), ", which clients can set to anything: each of its values")
				got = append(got, strings.Replace(strings.TrimPrefix(problem, "Its "), " has", "", 1))
			}
			if got := strings.Join(got, ", "); got != want {
				t.Errorf("got %q, want %q", got, want)
			}
		})
	}
}
