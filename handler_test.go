package ratelimit_test

// What the module promises, each through a running Caddy with a Caddyfile as users write it. The
// clock of limits in the process moves only as a test says. More is in test/behaviour, and
// docs/internals/promises.md has all guarantees with their tests.

import (
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	_ "github.com/seed-387a6c65/caddy-ratelimit"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

func TestMain(m *testing.M) { sitetest.Main(m) }

// TestLimit guards what the module is for: what does not fit the bucket is denied with 429 before
// the next handler runs, and the response says when it will fit, to the microsecond and rounded
// up to seconds. A denied request changes nothing, and idle time is not banked.
func TestLimit(t *testing.T) {
	var passed atomic.Int64
	upstream := sitetest.NewUpstream(t, func(http.ResponseWriter, *http.Request) { passed.Add(1) })
	s := sitetest.Start(t, "rate_limit {\nrate 2/s\nsize 3\n}\nreverse_proxy "+upstream)
	const denied = "429 limit=3 remaining=0 clear=1.500 reset=0.500 retry-after=1"
	s.Run(
		sitetest.Step{Want: "200 limit=3 remaining=2 clear=0.500"},
		sitetest.Step{Want: "200 limit=3 remaining=1 clear=1.000"},
		sitetest.Step{Want: "200 limit=3 remaining=0 clear=1.500"},
		sitetest.Step{Want: denied},
		sitetest.Step{Want: denied},
		sitetest.Step{After: 500*time.Millisecond - time.Microsecond, Want: "429 limit=3 remaining=0 clear=1.001 reset=0.001 retry-after=1"},
		sitetest.Step{After: time.Microsecond, Want: "200 limit=3 remaining=0 clear=1.500"},
		sitetest.Step{After: time.Hour, Want: "200 limit=3 remaining=2 clear=0.500"},
	)
	if n := passed.Load(); n != 5 {
		t.Errorf("%d requests reached the upstream, want 5", n)
	}
}

// TestAlgorithms guards what each algorithm admits of two requests at once each half minute,
// where the limit is two a minute.
func TestAlgorithms(t *testing.T) {
	for options, want := range map[string]string{
		"rate 2/m": "200 200, 200 429, 200 429, 200 429",
		"algorithm fixed_window\nsize 2\nwindow 1m":   "200 200, 429 429, 200 200, 429 429",
		"algorithm sliding_log\nsize 2\nwindow 1m":    "200 200, 429 429, 200 200, 429 429",
		"algorithm sliding_window\nsize 2\nwindow 1m": "200 200, 429 429, 429 429, 200 429",
	} {
		t.Run(options, func(t *testing.T) {
			s := sitetest.Start(t, "rate_limit {\n"+options+"\n}\nrespond ok")
			s.Clock.Advance(time.Minute - s.Clock.Now()%time.Minute) // windows begin at whole minutes
			got := ""
			for i := range 8 {
				switch {
				case i > 0 && i%2 == 0:
					s.Clock.Advance(30 * time.Second)
					got += ", "
				case i > 0:
					got += " "
				}
				got += s.Get("/").String()[:3]
			}
			if got != want {
				t.Errorf("got %s, want %s", got, want)
			}
		})
	}
}

// TestKeys guards that each key has a bucket of its own: the client's address, unless the limit
// says what else.
func TestKeys(t *testing.T) {
	s := sitetest.Start(t, `
		rate_limit /address {
			rate 1/m
		}
		rate_limit /api {
			key {header.Api-Key}
			rate 1/m
		}
		rate_limit /all {
			key static
			rate 1/m
		}
		respond ok`)
	const admitted, denied = "200 limit=1 remaining=0 clear=60.000", "429 limit=1 remaining=0 clear=60.000 reset=60.000 retry-after=60"
	acme := []string{"Api-Key: acme"}
	s.Run(
		sitetest.Step{Path: "/address", Want: admitted},
		sitetest.Step{Path: "/address", Want: denied},
		sitetest.Step{Path: "/api", Header: acme, Want: admitted},
		sitetest.Step{Path: "/api", Header: acme, Want: denied},
		sitetest.Step{Path: "/api", Header: []string{"Api-Key: umbrella"}, Want: admitted},
		sitetest.Step{Path: "/all", Want: admitted},
		sitetest.Step{Path: "/elsewhere", Want: "200"},
	)
	s.From("127.0.0.2")
	s.Run(
		sitetest.Step{Path: "/address", Want: admitted},
		sitetest.Step{Path: "/api", Header: acme, Want: denied},
		sitetest.Step{Path: "/all", Want: denied},
	)
}

// TestSeveralLimits guards that a request has to pass all limits that apply to it, and that one
// which any of them denies is charged to none. The fields are those of the tightest.
func TestSeveralLimits(t *testing.T) {
	s := sitetest.Start(t, `
		rate_limit {
			limit user {
				key {header.User}
				rate 1/m
			}
			limit site {
				key static
				rate 2/h
			}
			limit login {
				match path /login
				rate 1/h
			}
		}
		respond ok
		handle_errors 429 {
			respond {http.rate_limit.exceeded.name}
		}`)
	ann, bob, eve := []string{"User: ann"}, []string{"User: bob"}, []string{"User: eve"}
	s.Run(
		sitetest.Step{Header: ann, Want: "200 limit=1 remaining=0 clear=1800.000", Text: "ok"},
		sitetest.Step{Header: ann, Want: "429 limit=1 remaining=0 clear=1800.000 reset=60.000 retry-after=60", Text: "user"},
		sitetest.Step{Header: bob, Path: "/login", Want: "200 limit=1 remaining=0 clear=3600.000", Text: "ok"},
		sitetest.Step{Header: eve, Want: "429 limit=2 remaining=0 clear=3600.000 reset=1800.000 retry-after=1800", Text: "site"},
		sitetest.Step{Header: eve, Path: "/login", Want: "429 limit=1 remaining=0 clear=3600.000 reset=3600.000 retry-after=3600", Text: "login"},
		sitetest.Step{After: 30 * time.Minute, Header: eve, Want: "200 limit=1 remaining=0 clear=3600.000", Text: "ok"}, // was never charged
	)
}

// TestFields guards which fields tell clients of their limit.
func TestFields(t *testing.T) {
	for families, want := range map[string]string{
		"x-ratelimit":  "200 limit=5 remaining=4 clear=12.000",
		"ratelimit-11": `200 policy="api";q=5;w=60 ratelimit="api";r=4;t=48`,
		"off":          "200",
	} {
		t.Run(families, func(t *testing.T) {
			s := sitetest.Start(t, "rate_limit api {\nrate 5/m\nheaders "+families+"\n}\nrespond ok")
			s.Run(sitetest.Step{Want: want})
		})
	}
}

// TestDenial guards that a denial is a line of text which no cache keeps, and an error that
// error routes can make a page of.
func TestDenial(t *testing.T) {
	const site = "rate_limit 1/s\nrespond ok"
	for name, tc := range map[string]struct{ errorRoutes, want string }{
		"plain": {"", sitetest.PlainDenial},
		"page":  {"\nhandle_errors 429 {\nrespond \"<h1>Back in {http.rate_limit.retry_after} s</h1>\"\n}", "<h1>Back in 1 s</h1>"},
	} {
		t.Run(name, func(t *testing.T) {
			s := sitetest.Start(t, site+tc.errorRoutes)
			s.Get("/")
			if a := s.Get("/"); a.StatusCode != 429 || a.Text != tc.want || a.Header.Get("Cache-Control") != "no-store" {
				t.Errorf("got %s %q with %v, want %q", a, a.Text, a.Header, tc.want)
			}
		})
	}
}

// TestPolicies guards what else a limit can do with a request, or count, in one row for each.
func TestPolicies(t *testing.T) {
	for _, tc := range []struct {
		name, site string
		steps      []sitetest.Step
	}{
		{"only responses with a status count", "rate_limit {\nrate 1/m\ncount status 401\n}\nrespond /bad 401\nrespond ok", []sitetest.Step{
			{Path: "/good", Want: "200 limit=1 remaining=0 clear=60.000"}, {Path: "/good", Want: "200 limit=1 remaining=0 clear=60.000"},
			{Path: "/bad", Want: "401 limit=1 remaining=0 clear=60.000"}, {Path: "/good", Want: "429 limit=1 remaining=0 clear=60.000 reset=60.000 retry-after=60"},
		}},
		{"a cost of each request", "rate_limit {\nrate 5/m\ncost {header.Cost}\n}\nrespond ok", []sitetest.Step{
			{Header: []string{"Cost: 3"}, Want: "200 limit=5 remaining=2 clear=36.000"},
			{Header: []string{"Cost: 3"}, Want: "429 limit=5 remaining=2 clear=36.000 reset=12.000 retry-after=12"},
			{Header: []string{"Cost: 2"}, Want: "200 limit=5 remaining=0 clear=60.000"},
		}},
		{"a dry run denies nothing", "rate_limit new {\nrate 1/m\ndry_run\n}\nrespond \"over: {http.rate_limit.dry_run}\"", []sitetest.Step{
			{Want: "200", Text: "over: "}, {Want: "200", Text: "over: new"},
		}},
		{"who goes on is banned", "rate_limit {\nrate 1/s\nban 1h\n}\nrespond ok", []sitetest.Step{
			{Want: "200 limit=1 remaining=0 clear=1.000"},
			{Want: "429 limit=1 remaining=0 clear=3600.000 reset=3600.000 retry-after=3600"},
			{After: time.Minute, Want: "429 limit=1 remaining=0 clear=3540.000 reset=3540.000 retry-after=3540"},
			{After: time.Hour, Want: "200 limit=1 remaining=0 clear=1.000"},
		}},
	} {
		t.Run(tc.name, func(t *testing.T) { sitetest.Start(t, tc.site).Run(tc.steps...) })
	}
}

// TestConcurrency guards that no more requests of a key are in progress than the limit says, and
// that each makes room when it ends.
func TestConcurrency(t *testing.T) {
	arrived, end := make(chan struct{}), make(chan struct{})
	upstream := sitetest.NewUpstream(t, func(_ http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/slow" {
			arrived <- struct{}{}
			<-end
		}
	})
	s := sitetest.Start(t, "rate_limit {\nconcurrency 2\n}\nreverse_proxy "+upstream)
	var slow sync.WaitGroup
	for range 2 {
		slow.Go(func() { s.Get("/slow") })
		<-arrived
	}
	if a := s.Get("/"); a.StatusCode != 429 {
		t.Errorf("a third request got %s", a)
	}
	close(end)
	slow.Wait()
	sitetest.Eventually(t, "room for another", func() bool { return s.Get("/").StatusCode == 200 })
}

// TestReload guards that a reload empties no bucket, also one that changes the limit.
func TestReload(t *testing.T) {
	s := sitetest.Start(t, "rate_limit api {\nrate 2/h\n}\nrespond before")
	s.Run(sitetest.Step{Want: "200 limit=2 remaining=1 clear=1800.000", Text: "before"})
	if err := s.Load(sitetest.Config{Site: "rate_limit api {\nrate 2/h\nsize 3\n}\nrespond after"}); err != nil {
		t.Fatal(err)
	}
	s.Run(
		sitetest.Step{Want: "200 limit=3 remaining=1 clear=3600.000", Text: "after"},
		sitetest.Step{Want: "200 limit=3 remaining=0 clear=5400.000", Text: "after"},
		sitetest.Step{Want: "429 limit=3 remaining=0 clear=5400.000 reset=1800.000 retry-after=1800"},
	)
}

// TestSimultaneousRequests guards that exactly as many are admitted as the limit says, in the
// process and by several Caddys that share a Redis.
func TestSimultaneousRequests(t *testing.T) {
	const size, requests = 50, 200
	for name, c := range map[string]sitetest.Config{
		"in memory": {},
		"in Redis":  {Global: sitetest.RedisGlobal(redistest.Start(t).Addr, sitetest.LongTimeout)},
	} {
		t.Run(name, func(t *testing.T) {
			c.Site = "rate_limit {\nkey static\nsize 50\ndrip_rate 1h\n}\nrespond {http.rate_limit.by}"
			urls := []string{sitetest.StartConfig(t, c).URL("/")}
			if c.Global != "" {
				urls = append(urls, "http://"+sitetest.StartProcess(t, c)+"/")
			}
			var admitted, denied atomic.Int64
			redistest.Together(t, requests, func(i int) {
				res, err := http.Get(urls[i%len(urls)])
				if err != nil {
					t.Error(err)
					return
				}
				defer res.Body.Close()
				switch res.StatusCode {
				case 200:
					admitted.Add(1)
				case 429:
					denied.Add(1)
				}
			})
			if admitted.Load() != size || denied.Load() != requests-size {
				t.Errorf("%d admitted, %d denied; want %d, %d", admitted.Load(), denied.Load(), size, requests-size)
			}
		})
	}
}

// TestWithoutRedis guards that a Redis that is away fails no request by default: this Caddy
// decides on its own, from what it knows. A limit can also admit or deny all then.
func TestWithoutRedis(t *testing.T) {
	for onError, want := range map[string][]sitetest.Step{
		"fallback": {
			{Want: "200 limit=2 remaining=0 clear=7200.000", Text: "fallback"},
			{Want: "429 limit=2 remaining=0 clear=7200.000 reset=3600.000 retry-after=3600"},
		},
		"allow": {{Want: "200"}, {Want: "200"}},
		"deny":  {{Want: "503 retry-after=1"}, {Want: "503 retry-after=1"}},
	} {
		t.Run(onError, func(t *testing.T) {
			proxy := redistest.StartProxy(t, redistest.Start(t).Addr)
			s := sitetest.StartConfig(t, sitetest.Config{
				Global: sitetest.RedisGlobal(proxy.Addr, sitetest.LongTimeout),
				Site:   "rate_limit {\nsize 2\ndrip_rate 1h\non_error " + onError + "\n}\nrespond {http.rate_limit.by}",
			})
			if a := s.Get("/"); a.StatusCode != 200 || a.Text != "redis" {
				t.Fatalf("got %s, decided by %q", a, a.Text)
			}
			proxy.Refuse()
			s.Run(want...)
		})
	}
}
