package behaviour

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// TestMatcherOfDirective guards that requests which the directive's matcher
// leaves out are neither counted nor told of a limit.
func TestMatcherOfDirective(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, `
		@post method POST
		rate_limit @post {
			size 1
		}
		respond "admitted"
	`)
	s.Run(sitetest.Times(3, sitetest.Step{Want: "200", Text: "admitted"})...)
	s.Run(
		sitetest.Step{Method: "POST", Want: "200 limit=1 remaining=0 clear=1.000"},
		sitetest.Step{Method: "POST", Want: "429 limit=1 remaining=0 clear=1.000 reset=1.000 retry-after=1"},
		sitetest.Step{Want: "200", Text: "admitted"},
	)
}

// TestNoLimitApplies guards that a request which meets no bucket passes as if
// the directive were not there, and needs no Redis.
func TestNoLimitApplies(t *testing.T) {
	t.Parallel()
	s := sitetest.StartConfig(t, sitetest.Config{
		Global: sitetest.RedisGlobal("127.0.0.1:1"),
		Site: `
			rate_limit {
				limit posts {
					match method POST
					size 1
				}
				limit off {
					size 1
					factor 0
				}
				limit off-for-some {
					size 1
					factor {header.X-Factor}
				}
				headers x-ratelimit ratelimit-11
				on_error deny
			}
			respond "admitted"
		`,
	})
	s.Run(
		sitetest.Step{Header: []string{"X-Factor: 0"}, Want: "200", Text: "admitted"},
		sitetest.Step{Header: []string{"X-Factor: 1"}, Want: "503 retry-after=1"},
	)
}

// TestConcurrentRequests guards that of a flood exactly a bucketful gets through,
// whatever else its requests come to at the same time.
func TestConcurrentRequests(t *testing.T) {
	t.Parallel()
	const requests, size = 300, 50
	s := sitetest.Start(t, fmt.Sprintf(`
		rate_limit {
			key {header.X-Key}
			size %d
			limit costly {
				match /bad
				size 9
				cost {header.X-Cost}
			}
		}
		handle_errors 4xx {
			respond "{err.message} {http.rate_limit.remaining}"
		}
		respond "{http.rate_limit.remaining}"
	`, size))
	s.Client.Transport.(*http.Transport).MaxConnsPerHost = 20
	var admitted, denied, bad atomic.Int64
	var wg sync.WaitGroup
	for i := range requests {
		wg.Go(func() {
			path := []string{"/", "/bad"}[i%2]
			res, err := s.Client.Get(s.URL(path))
			if err != nil {
				t.Error(err)
				return
			}
			res.Body.Close()
			switch res.StatusCode {
			case 200:
				admitted.Add(1)
			case 429:
				denied.Add(1)
			case 400:
				bad.Add(1)
			}
		})
	}
	wg.Wait()
	if admitted.Load() != size || denied.Load() != requests/2-size || bad.Load() != requests/2 {
		t.Errorf("%d admitted, %d denied, %d bad; want %d, %d, %d",
			admitted.Load(), denied.Load(), bad.Load(), size, requests/2-size, requests/2)
	}
}

// TestSeveralHandlers guards that several rate_limit directives on one request
// all count, make one set of fields, and that the first to deny spares the
// others.
func TestSeveralHandlers(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, `
		route {
			rate_limit outer {
				size 3
				drip_rate 1m
			}
			encode gzip
			handle /api/* {
				rate_limit inner {
					size 3
					drip_rate 1h
					headers ratelimit-11
				}
				respond "{http.rate_limit.limit}"
			}
			respond "{http.rate_limit.limit}"
		}
	`)
	const policy = `policy="inner";q=3;w=10800 `
	s.Run(
		sitetest.Step{Path: "/api/x", Text: "inner", // of two with as many left, the one that takes longer
			Want: `200 limit=3 remaining=2 clear=60.000 ` + policy + `ratelimit="inner";r=2;t=7200`},
		sitetest.Step{Path: "/", Text: "outer", Want: `200 limit=3 remaining=1 clear=120.000`},
		sitetest.Step{Path: "/api/x", Text: "outer",
			Want: `200 limit=3 remaining=0 clear=180.000 ` + policy + `ratelimit="inner";r=1;t=3600`},
		sitetest.Step{Path: "/api/x", Want: `429 limit=3 remaining=0 clear=180.000 reset=60.000 retry-after=60`},
		sitetest.Step{Path: "/api/x", After: time.Minute,
			Want: `200 limit=3 remaining=0 clear=180.000 ` + policy + `ratelimit="inner";r=0;t=3540`},
		// What the inner one denies the outer one has counted.
		sitetest.Step{Path: "/api/x", After: time.Minute,
			Want: `429 limit=3 remaining=0 clear=180.000 retry-after=3480 ` + policy + `ratelimit="inner";r=0;t=3480`},
		sitetest.Step{Path: "/", Want: `429 limit=3 remaining=0 clear=180.000 reset=60.000 retry-after=60`},
	)
}

// TestInnerHandlerDenies guards what a response carries when a request passes
// one handler and is denied by the next.
func TestInnerHandlerDenies(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, `
		route {
			rate_limit outer {
				size 10
				drip_rate 1m
			}
			rate_limit inner {
				size 1
				drip_rate 30s
			}
			respond "admitted"
		}
		handle_errors {
			respond "{err.message}, {http.rate_limit.exceeded.name}"
		}
	`)
	s.Run(
		sitetest.Step{Want: "200 limit=1 remaining=0 clear=60.000", Text: "admitted"},
		sitetest.Step{Want: "429 limit=1 remaining=0 clear=120.000 reset=30.000 retry-after=30",
			Text: "rate limit inner exceeded: retry after 30 s, inner"},
	)
}

// Guards what on_error makes of requests while Redis is lost, for the app and
// for a handler, and that the log has it once, not for each request.
func TestOnError(t *testing.T) {
	t.Parallel()
	const (
		first   = "200 limit=2 remaining=1 clear=1.000"
		second  = "200 limit=2 remaining=0 clear=2.000"
		third   = "429 limit=2 remaining=0 clear=2.000 reset=1.000 retry-after=1"
		refused = "503 retry-after=1"
	)
	limits := []string{first, second, third, third, third, third, third, third}
	all := func(want string) []string { return []string{want, want, want, want, want, want, want, want} }
	for _, tc := range []struct {
		name, app, handler string
		want               []string
	}{
		{"by default", "", "", limits},
		{"fallback", "on_error fallback", "", limits},
		{"fallback of the handler", "on_error deny", "on_error fallback", limits},
		{"allow", "on_error allow", "", all("200")},
		{"allow of the handler", "", "on_error allow", all("200")},
		{"deny", "on_error deny", "", all(refused)},
		{"deny of the handler", "on_error allow", "on_error deny", all(refused)},
	} {
		for name, routes := range map[string]string{
			"": "", ", with error routes": "handle_errors {\nrespond \"{err.status_code} {err.message}\"\n}",
		} {
			t.Run(tc.name+name, func(t *testing.T) {
				s := sitetest.StartConfig(t, sitetest.Config{
					Global: "rate_limit {\nredis 127.0.0.1:1 {\ntimeout 5s\npassword canary-5fd4\n}\n" + tc.app + "\n}",
					Site:   "rate_limit {\nsize 2\n" + tc.handler + "\n}\n" + routes + "\nrespond admitted",
				})
				for _, want := range tc.want {
					body := "admitted"
					switch {
					case want[:3] == "200":
					case routes == "":
						body = ""
					case want[:3] == "503":
						body = "503 rate limits can't be checked for this request"
					default:
						body = "429 rate limit default exceeded: retry after 1 s"
					}
					s.Run(sitetest.Step{Want: want, Text: body})
				}
				if own := append(s.Log("error", sitetest.OwnLogger), s.Log("warn", sitetest.OwnLogger)...); len(own) > 0 {
					t.Errorf("the handler reports it: %v", own)
				}
				sitetest.Eventually(t, "a line that Redis is lost", func() bool { return len(s.Log("error", "rate_limit")) > 0 })
				lost := s.Log("error", "rate_limit")
				if len(lost) != 1 || lost[0]["server"] != "127.0.0.1:1" || lost[0]["reason"] == "" {
					t.Errorf("got %v, want one line that Redis is lost", lost)
				}
				for _, e := range s.Entries() {
					if strings.Contains(e.Text(), "canary") {
						t.Errorf("the password is in the log: %s", e.Text())
					}
				}
			})
		}
	}
}
