package ratelimit

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/textproto"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/redistest"
)

const (
	ms = time.Millisecond
	µs = time.Microsecond
)

// TestDripByDrip guards what this module is for: a full bucket denies until the
// very microsecond at which a unit has dripped out, and the fields tell when.
func TestDripByDrip(t *testing.T) {
	s := startSite(t, `
		rate_limit {
			size 2
			drip_rate 1500ms
		}
		respond "admitted"
	`)
	s.run(
		step{want: "200 limit=2 remaining=1 clear=1.500", body: "admitted"},
		step{want: "200 limit=2 remaining=0 clear=3.000", body: "admitted"},
		step{want: "429 limit=2 remaining=0 clear=3.000 reset=1.500 retry-after=2"},
		step{want: "429 limit=2 remaining=0 clear=3.000 reset=1.500 retry-after=2"},
		step{after: 500 * ms, want: "429 limit=2 remaining=0 clear=2.500 reset=1.000 retry-after=1"},
		step{after: 1000*ms - µs, want: "429 limit=2 remaining=0 clear=1.501 reset=0.001 retry-after=1"},
		step{after: µs, want: "200 limit=2 remaining=0 clear=3.000", body: "admitted"},
		step{after: 1500*ms - µs, want: "429 limit=2 remaining=0 clear=1.501 reset=0.001 retry-after=1"},
		step{after: µs, want: "200 limit=2 remaining=0 clear=3.000"},
		// Idle time is not banked: a bucket runs empty and no further.
		step{after: time.Hour, want: "200 limit=2 remaining=1 clear=1.500"},
		step{want: "200 limit=2 remaining=0 clear=3.000"},
		step{want: "429 limit=2 remaining=0 clear=3.000 reset=1.500 retry-after=2"},
	)
}

// TestDripSize guards that each drip takes drip_size units at once, also where
// the last is short, and that the wait for a dear request is exact.
func TestDripSize(t *testing.T) {
	s := startSite(t, `
		rate_limit {
			size 5
			drip_rate 1s
			drip_size 2
			cost {header.X-Cost}
		}
		respond "admitted"
	`)
	cost := func(n string) []string { return []string{"X-Cost: " + n} }
	s.run(
		step{header: cost("5"), want: "200 limit=5 remaining=0 clear=3.000"},
		step{header: cost("1"), want: "429 limit=5 remaining=0 clear=3.000 reset=1.000 retry-after=1"},
		step{header: cost("3"), want: "429 limit=5 remaining=0 clear=3.000 reset=2.000 retry-after=2"},
		step{after: time.Second - µs, header: cost("1"),
			want: "429 limit=5 remaining=0 clear=2.001 reset=0.001 retry-after=1"},
		step{after: µs, header: cost("1"), want: "200 limit=5 remaining=1 clear=2.000"},
		step{header: cost("2"), want: "429 limit=5 remaining=1 clear=2.000 reset=1.000 retry-after=1"},
		step{header: cost("1"), want: "200 limit=5 remaining=0 clear=3.000"},
	)
}

// TestMatcherOfDirective guards that requests which the directive's matcher
// leaves out are neither counted nor told of a limit.
func TestMatcherOfDirective(t *testing.T) {
	s := startSite(t, `
		@post method POST
		rate_limit @post {
			size 1
		}
		respond "admitted"
	`)
	s.run(times(3, step{want: "200", body: "admitted"})...)
	s.run(
		step{method: "POST", want: "200 limit=1 remaining=0 clear=1.000"},
		step{method: "POST", want: "429 limit=1 remaining=0 clear=1.000 reset=1.000 retry-after=1"},
		step{want: "200", body: "admitted"},
	)
}

// TestNoLimitApplies guards that a request which meets no bucket passes as if
// the directive were not there, and needs no Redis.
func TestNoLimitApplies(t *testing.T) {
	s := startConfig(t, config{
		global: redisGlobal("127.0.0.1:1"),
		site: `
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
				headers x-ratelimit ratelimit
				on_error deny
			}
			respond "admitted"
		`,
	})
	s.run(
		step{header: []string{"X-Factor: 0"}, want: "200", body: "admitted"},
		step{header: []string{"X-Factor: 1"}, want: "503 retry-after=1"},
	)
}

// tree is a limit with limits within, as the tests below have it.
const tree = `
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
		%s
	}
	respond "{http.rate_limit.limit}"
`

// TestTree guards that a limit within another applies only where that one
// does, and that a request is charged to all that apply.
func TestTree(t *testing.T) {
	s := startSite(t, fmt.Sprintf(tree, "headers ratelimit"))
	const (
		all    = `"all";q=10;w=10`
		api    = `"all/api";q=4;w=4`
		writes = `"all/api/writes";q=2;w=2`
		free   = `"all/api-free";q=9;w=9`
	)
	s.run(
		step{path: "/", body: "all/api-free",
			want: `200 policy=` + all + `, ` + free + ` ratelimit="all";r=9;t=9, "all/api-free";r=8;t=8`},
		// A method alone does not reach the innermost limit.
		step{path: "/", method: "POST",
			want: `200 policy=` + all + `, ` + free + ` ratelimit="all";r=8;t=8, "all/api-free";r=7;t=7`},
		step{path: "/api/x", body: "all/api",
			want: `200 policy=` + all + `, ` + api + ` ratelimit="all";r=7;t=7, "all/api";r=3;t=3`},
		step{path: "/api/x", method: "PUT", body: "all/api/writes",
			want: `200 policy=` + all + `, ` + api + `, ` + writes +
				` ratelimit="all";r=6;t=6, "all/api";r=2;t=2, "all/api/writes";r=1;t=1`},
	)
}

// TestMatchForms guards that a limit's matcher may be a named one, a path,
// matchers in a line or in a block, and * for all requests.
func TestMatchForms(t *testing.T) {
	s := startSite(t, `
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
			headers ratelimit
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
		policy := s.send(tc.method, tc.path).Header.Get("RateLimit-Policy")
		if got := strings.Join(applied.FindAllString(policy, -1), " "); got != tc.want {
			t.Errorf("%s %s: limits %s apply, want %s", tc.method, tc.path, got, tc.want)
		}
	}
}

// TestAtomicAccounting guards that a denied request uses up no limit anywhere:
// neither above the one that denies nor within it nor beside it.
func TestAtomicAccounting(t *testing.T) {
	s := startSite(t, `
		rate_limit all {
			size 10
			limit api {
				match /api
				size 2
				limit deep {
					size 7
				}
			}
			headers ratelimit
		}
		respond "admitted"
	`)
	const policies = `policy="all";q=10;w=10, "all/api";q=2;w=2, "all/api/deep";q=7;w=7 `
	s.run(
		step{path: "/api", want: `200 ` + policies +
			`ratelimit="all";r=9;t=9, "all/api";r=1;t=1, "all/api/deep";r=6;t=6`},
		step{path: "/api", want: `200 ` + policies +
			`ratelimit="all";r=8;t=8, "all/api";r=0;t=1, "all/api/deep";r=5;t=5`},
	)
	s.run(times(5, step{path: "/api", want: `429 retry-after=1 ` + policies +
		`ratelimit="all";r=8, "all/api";r=0;t=1, "all/api/deep";r=5`})...)
	s.run(step{path: "/", want: `200 policy="all";q=10;w=10 ratelimit="all";r=7;t=7`})
}

// TestEachAccounting guards the other way to account, by the table of its
// source: whoever keeps asking for what is full uses up what is not.
func TestEachAccounting(t *testing.T) {
	s := startSite(t, `
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
		s.run(step{path: "/trade", want: fmt.Sprintf("200 limit=6 remaining=%d clear=%d.000", 6-n, 2*n)})
	}
	for n := 7; n <= 15; n++ {
		s.run(step{path: "/trade",
			want: fmt.Sprintf("429 limit=6 remaining=0 clear=%d.000 reset=1.500 retry-after=2", 2*n)})
	}
	s.run(
		// What this one is charged fills the user's bucket: the wait is for both.
		step{path: "/trade", want: "429 limit=6 remaining=0 clear=32.000 reset=2.000 retry-after=2"},
		step{path: "/trade", want: "429 limit=6 remaining=0 clear=32.000 reset=2.000 retry-after=2"},
		step{path: "/trade", want: "429 limit=6 remaining=0 clear=32.000 reset=2.000 retry-after=2"},
		step{want: "429 limit=16 remaining=0 clear=32.000 reset=2.000 retry-after=2"},
	)
}

// TestSitesShare guards that limits of one name and equal numbers share their
// buckets on all sites, and others do not.
func TestSitesShare(t *testing.T) {
	const limits = `
		rate_limit /named api {
			size 2
		}
		rate_limit /unnamed {
			size %d
		}
		respond "admitted"
	`
	s := startConfig(t, config{
		site:  fmt.Sprintf(limits, 5),
		sites: "http://other.test:{port} {\nlog\n" + fmt.Sprintf(limits, 6) + "\n}",
	})
	other := func(path, want string) step {
		return step{path: path, header: []string{"Host: other.test"}, want: want}
	}
	s.run(
		step{path: "/named", want: "200 limit=2 remaining=1 clear=1.000"},
		other("/named", "200 limit=2 remaining=0 clear=2.000"),
		step{path: "/named", want: "429 limit=2 remaining=0 clear=2.000 reset=1.000 retry-after=1"},
		step{path: "/unnamed", want: "200 limit=5 remaining=4 clear=1.000"},
		other("/unnamed", "200 limit=6 remaining=5 clear=1.000"),
	)
}

// TestConcurrentRequests guards that of a flood exactly a bucketful gets through,
// whatever else its requests come to at the same time.
func TestConcurrentRequests(t *testing.T) {
	const requests, size = 300, 50
	s := startSite(t, fmt.Sprintf(`
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
	s.client.Transport.(*http.Transport).MaxConnsPerHost = 20
	var admitted, denied, bad atomic.Int64
	var wg sync.WaitGroup
	for i := range requests {
		wg.Go(func() {
			path := []string{"/", "/bad"}[i%2]
			res, err := s.client.Get(s.url(path))
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

// TestLegacyLimit guards the limits told by max, duration and min_interval:
// bursts of max, that many per duration on average, and between any two
// requests at least the interval.
func TestLegacyLimit(t *testing.T) {
	t.Run("max and duration", func(t *testing.T) {
		s := startSite(t, `
			rate_limit {
				max 3
				duration 10s
			}
			respond "admitted"
		`)
		// 10 s / 3, rounded up to a whole microsecond: never more than max on average.
		s.run(
			step{want: "200 limit=3 remaining=2 clear=3.334"},
			step{want: "200 limit=3 remaining=1 clear=6.667"},
			step{want: "200 limit=3 remaining=0 clear=10.001"},
			step{want: "429 limit=3 remaining=0 clear=10.001 reset=3.334 retry-after=4"},
			step{after: 3_333_333 * µs, want: "429 limit=3 remaining=0 clear=6.667 reset=0.001 retry-after=1"},
			step{after: µs, want: "200 limit=3 remaining=0 clear=10.001"},
		)
	})
	t.Run("min_interval", func(t *testing.T) {
		s := startSite(t, `
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
		s.run(
			step{want: "200 limit=1 remaining=0 clear=2.000"},
			step{want: "429 limit=1 remaining=0 clear=2.000 reset=0.500 retry-after=1",
				body: "login/min_interval"},
			step{after: 500*ms - µs, want: "429 limit=1 remaining=0 clear=1.501 reset=0.001 retry-after=1"},
			step{after: µs, want: "200 limit=1 remaining=0 clear=3.500"},
			// Those that came too early used up none of the 3.
			step{after: 500 * ms, want: "200 limit=1 remaining=0 clear=5.000"},
			step{after: 500 * ms, want: "429 limit=3 remaining=0 clear=4.500 reset=0.500 retry-after=1",
				body: "login"},
			step{after: 500 * ms, want: "200 limit=1 remaining=0 clear=6.000"},
		)
	})
	t.Run("cost and factor apply to the burst alone", func(t *testing.T) {
		s := startSite(t, `
			rate_limit {
				max 2
				duration 2s
				min_interval 1s
				cost 2
				factor 0.5
			}
			respond "admitted"
		`)
		s.run(
			step{want: "200 limit=1 remaining=0 clear=2.000"},
			step{want: "429 limit=1 remaining=0 clear=2.000 reset=1.000 retry-after=1"},
			step{after: time.Second, want: "200 limit=1 remaining=0 clear=3.000"},
			step{after: time.Second, want: "200 limit=1 remaining=0 clear=4.000"},
			step{after: time.Second, want: "429 limit=1 remaining=1 clear=3.000 reset=1.000 retry-after=1"},
		)
	})
}

// TestErrorRoutesShapeDenials guards that handle_errors makes the body of a 429
// and our fields survive it, and that the error's text says what to do.
func TestErrorRoutesShapeDenials(t *testing.T) {
	s := startSite(t, `
		rate_limit logins {
			size 2
			drip_rate 90s
			cost {header.X-Cost}
		}
		handle_errors 429 {
			header Content-Type text/plain
			respond "{err.status_code} {err.status_text}: {err.message} ({http.rate_limit.exceeded.name})"
		}
		respond "admitted"
	`)
	a := s.get("/", "X-Cost: 2")
	if got, want := a.String(), "200 limit=2 remaining=0 clear=180.000"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	s.run(
		step{header: []string{"X-Cost: 1"},
			want: "429 limit=2 remaining=0 clear=180.000 reset=90.000 retry-after=90",
			body: "429 Too Many Requests: rate limit logins exceeded: retry after 90 s (logins)"},
		step{header: []string{"X-Cost: 3"},
			want: "429 limit=2 remaining=0 clear=180.000",
			body: "429 Too Many Requests: rate limit logins exceeded: " +
				"the request costs more than the limit holds (logins)"},
	)
	if got := s.get("/", "X-Cost: 1").Header.Get("Content-Type"); got != "text/plain" {
		t.Errorf("a denial has Content-Type %q", got)
	}
}

// TestBareDenial guards what clients get where nobody shapes it: status and
// fields and no body.
func TestBareDenial(t *testing.T) {
	s := startSite(t, `
		rate_limit {
			size 1
		}
		respond "admitted"
	`)
	s.get("/")
	for _, method := range []string{"GET", "HEAD", "POST", "OPTIONS"} {
		a := s.send(method, "/")
		if got, want := a.String(), "429 limit=1 remaining=0 clear=1.000 reset=1.000 retry-after=1"; got != want {
			t.Errorf("%s: got %s, want %s", method, got, want)
		}
		if a.body != "" || a.Header.Get("Content-Type") != "" {
			t.Errorf("%s: got body %q of type %q, want none", method, a.body, a.Header.Get("Content-Type"))
		}
	}
}

// newUpstream starts a server for Caddy to proxy to and returns its host:port.
func newUpstream(t testing.TB, h http.HandlerFunc) string {
	upstream := httptest.NewServer(h)
	t.Cleanup(upstream.Close)
	return upstream.Listener.Addr().String()
}

// TestPlaceholdersInConfig guards that what was decided can be used wherever
// Caddy takes placeholders: in later handlers, in error routes, in the access
// log.
func TestPlaceholdersInConfig(t *testing.T) {
	s := startSite(t, `
		log_append limit {http.rate_limit.limit}
		log_append remaining {http.rate_limit.remaining}
		log_append denied {http.rate_limit.denied}
		route {
			rate_limit all {
				size 3
				drip_rate 2s
				limit dear {
					match /dear
					size 2
					cost {header.X-Cost}
				}
			}
			header X-Left {http.rate_limit.remaining}
			respond <<TEXT
				limit {http.rate_limit.limit} size {http.rate_limit.size} remaining {http.rate_limit.remaining}
				clear {http.rate_limit.clear} retry {http.rate_limit.retry_after}
				denied {http.rate_limit.denied} exceeded {http.rate_limit.exceeded.name}
				TEXT
		}
		handle_errors {
			header X-Error-Left {http.rate_limit.remaining}
			header X-Error "{err.message}"
			respond <<TEXT
				limit {http.rate_limit.limit} size {http.rate_limit.size} remaining {http.rate_limit.remaining}
				clear {http.rate_limit.clear} retry {http.rate_limit.retry_after}
				denied {http.rate_limit.denied} exceeded {http.rate_limit.exceeded.name}
				TEXT
		}
	`)
	for i, tc := range []struct{ path, cost, body, left, errorLeft, logged string }{
		{"/dear", "1", "limit all/dear size 2 remaining 1\nclear 2.000 retry 0\ndenied false exceeded ",
			"1", "", "all/dear 1 false"},
		{"/", "", "limit all size 3 remaining 1\nclear 4.000 retry 0\ndenied false exceeded ",
			"1", "", "all 1 false"},
		{"/dear", "2", "limit all/dear size 2 remaining 1\nclear 4.000 retry 1\ndenied true exceeded all/dear",
			"", "1", "all/dear 1 true"},
		{"/dear", "3", "limit all/dear size 2 remaining 1\nclear 4.000 retry \ndenied true exceeded all/dear",
			"", "1", "all/dear 1 true"},
	} {
		a := s.get(tc.path, "X-Cost: "+tc.cost)
		if a.body != tc.body {
			t.Errorf("request %d:\n got %q\nwant %q", i+1, a.body, tc.body)
		}
		if got := a.Header.Get("X-Left"); got != tc.left {
			t.Errorf("request %d: a later handler sees remaining %q, want %q", i+1, got, tc.left)
		}
		text := a.Header.Get("X-Error")
		if a.StatusCode == 429 && !strings.Contains(text, "limit all/dear exceeded") {
			t.Errorf("request %d: an error route sees error %q", i+1, text)
		}
		if got := a.Header.Get("X-Error-Left"); got != tc.errorLeft {
			t.Errorf("request %d: an error route sees remaining %q, want %q", i+1, got, tc.errorLeft)
		}
		e := s.lastAccess()
		if got := fmt.Sprint(e["limit"], " ", e["remaining"], " ", e["denied"]); got != tc.logged {
			t.Errorf("request %d: the access log says %s, want %s", i+1, got, tc.logged)
		}
	}
}

// TestPlaceholdersWithoutLimit guards that where no limit applied nothing is
// known: no values are left over from other requests.
func TestPlaceholdersWithoutLimit(t *testing.T) {
	s := startSite(t, `
		log_append limit {http.rate_limit.limit}
		rate_limit /limited {
			size 1
		}
		respond "admitted"
	`)
	for path, want := range map[string]any{"/limited": "default", "/": nil} {
		s.get(path)
		if got := s.lastAccess()["limit"]; got != want {
			t.Errorf("%s: limit is %v in the access log, want %v", path, got, want)
		}
	}
}

// TestUpstreamFields guards that fields of ours which an upstream sends too do
// not stand twice in the response, and that nothing else of it is lost.
func TestUpstreamFields(t *testing.T) {
	upstream := newUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		for name, value := range map[string]string{
			"X-RateLimit-Limit":     "5000",
			"X-RateLimit-Remaining": "4999",
			"X-RateLimit-Clear":     "1.5",
			"X-RateLimit-Reset":     "1795259336", // on denial ours; now it would not go with the others
			"RateLimit-Policy":      `"up";q=5000;w=60`,
			"RateLimit":             `"up";r=4999;t=1`,
			"X-RateLimit-Resource":  "core",
		} {
			w.Header().Set(name, value)
		}
		if r.URL.Path == "/busy" {
			w.Header().Set("Retry-After", "120")
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		io.WriteString(w, "upstream")
	})
	site := `
		@limited not path /free
		rate_limit @limited {
			size 9
			headers %s
		}
		reverse_proxy ` + upstream

	t.Run("both families", func(t *testing.T) {
		s := startSite(t, fmt.Sprintf(site, "x-ratelimit ratelimit"))
		s.run(
			step{body: "upstream",
				want: `200 limit=9 remaining=8 clear=1.000 policy="default";q=9;w=9 ratelimit="default";r=8;t=8`},
			// When the upstream wants clients to wait it is not for us to change.
			step{path: "/busy", body: "upstream", want: `503 limit=9 remaining=7 clear=2.000 retry-after=120 ` +
				`policy="default";q=9;w=9 ratelimit="default";r=7;t=7`},
		)
		if got := s.get("/").Header.Values("X-RateLimit-Resource"); !slices.Equal(got, []string{"core"}) {
			t.Errorf("a field of the upstream's own is %q", got)
		}
	})
	t.Run("one family", func(t *testing.T) {
		s := startSite(t, fmt.Sprintf(site, "x-ratelimit"))
		s.run(step{want: `200 limit=9 remaining=8 clear=1.000 ` +
			`policy="up";q=5000;w=60 ratelimit="up";r=4999;t=1`})
	})
	t.Run("no limit applies", func(t *testing.T) {
		s := startSite(t, fmt.Sprintf(site, "x-ratelimit"))
		s.run(step{path: "/free", want: `200 limit=5000 remaining=4999 clear=1.5 reset=1795259336 ` +
			`policy="up";q=5000;w=60 ratelimit="up";r=4999;t=1`})
	})
	t.Run("off", func(t *testing.T) {
		s := startSite(t, fmt.Sprintf(site, "off"))
		s.run(step{want: `200 limit=5000 remaining=4999 clear=1.5 reset=1795259336 ` +
			`policy="up";q=5000;w=60 ratelimit="up";r=4999;t=1`})
	})
}

// TestHeadersOption guards which fields each word brings, and that no setting
// hides from a denied client how long to wait.
func TestHeadersOption(t *testing.T) {
	for _, tc := range []struct{ headers, admitted, denied string }{
		{"", "200 limit=1 remaining=0 clear=1.000",
			"429 limit=1 remaining=0 clear=1.000 reset=1.000 retry-after=1"},
		{"headers x-ratelimit", "200 limit=1 remaining=0 clear=1.000",
			"429 limit=1 remaining=0 clear=1.000 reset=1.000 retry-after=1"},
		{"headers ratelimit", `200 policy="default";q=1;w=1 ratelimit="default";r=0;t=1`,
			`429 retry-after=1 policy="default";q=1;w=1 ratelimit="default";r=0;t=1`},
		{"headers ratelimit x-ratelimit",
			`200 limit=1 remaining=0 clear=1.000 policy="default";q=1;w=1 ratelimit="default";r=0;t=1`,
			`429 limit=1 remaining=0 clear=1.000 reset=1.000 retry-after=1 ` +
				`policy="default";q=1;w=1 ratelimit="default";r=0;t=1`},
		{"headers off", "200", "429 retry-after=1"},
	} {
		t.Run(tc.headers, func(t *testing.T) {
			s := startSite(t, `
				rate_limit {
					size 1
					`+tc.headers+`
				}
				respond "admitted"
			`)
			s.run(step{want: tc.admitted, body: "admitted"}, step{want: tc.denied})
		})
	}
}

// TestHeaderDirective guards that whoever configures a header directive has the
// last word on our fields: they are not restored when removed or replaced.
func TestHeaderDirective(t *testing.T) {
	upstream := newUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-RateLimit-Limit", "5000")
	})
	for _, tc := range []struct{ name, routes, want string }{
		{"removed outside", `
			header -X-RateLimit-Limit
			rate_limit {
				size 2
			}
			respond "admitted"`, "200 remaining=1 clear=1.000"},
		{"all removed outside", `
			header -X-RateLimit-*
			rate_limit {
				size 2
			}
			reverse_proxy ` + upstream, "200"},
		{"replaced outside, when the response is written", `
			header >X-RateLimit-Limit mine
			rate_limit {
				size 2
			}
			reverse_proxy ` + upstream, "200 limit=mine remaining=1 clear=1.000"},
		{"removed inside", `
			rate_limit {
				size 2
			}
			header -X-RateLimit-Limit
			respond "admitted"`, "200 remaining=1 clear=1.000"},
		{"replaced inside", `
			rate_limit {
				size 2
			}
			header X-RateLimit-Limit mine
			respond "admitted"`, "200 limit=mine remaining=1 clear=1.000"},
		{"changed inside", `
			rate_limit {
				size 2
			}
			header X-RateLimit-Limit 2 two
			reverse_proxy ` + upstream, "200 limit=two remaining=1 clear=1.000"},
		// What stood there before is as an upstream's.
		{"set outside, at once", `
			header X-RateLimit-Limit mine
			rate_limit {
				size 2
			}
			respond "admitted"`, "200 limit=2 remaining=1 clear=1.000"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := startSite(t, "route {"+tc.routes+"\n}")
			s.run(step{want: tc.want})
		})
	}
}

// TestSeveralHandlers guards that several rate_limit directives on one request
// all count, make one set of fields, and that the first to deny spares the
// others.
func TestSeveralHandlers(t *testing.T) {
	s := startSite(t, `
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
					headers ratelimit
				}
				respond "{http.rate_limit.limit}"
			}
			respond "{http.rate_limit.limit}"
		}
	`)
	const policy = `policy="inner";q=3;w=10800 `
	s.run(
		step{path: "/api/x", body: "outer",
			want: `200 limit=3 remaining=2 clear=60.000 ` + policy + `ratelimit="inner";r=2;t=7200`},
		step{path: "/", body: "outer", want: `200 limit=3 remaining=1 clear=120.000`},
		step{path: "/api/x", body: "outer",
			want: `200 limit=3 remaining=0 clear=180.000 ` + policy + `ratelimit="inner";r=1;t=3600`},
		step{path: "/api/x", want: `429 limit=3 remaining=0 clear=180.000 reset=60.000 retry-after=60`},
		step{path: "/api/x", after: time.Minute,
			want: `200 limit=3 remaining=0 clear=180.000 ` + policy + `ratelimit="inner";r=0;t=3540`},
		// What the inner one denies the outer one has counted.
		step{path: "/api/x", after: time.Minute,
			want: `429 limit=3 remaining=0 clear=180.000 retry-after=3480 ` + policy + `ratelimit="inner";r=0;t=3480`},
		step{path: "/", want: `429 limit=3 remaining=0 clear=180.000 reset=60.000 retry-after=60`},
	)
}

// TestInnerHandlerDenies guards what a response carries when a request passes
// one handler and is denied by the next.
func TestInnerHandlerDenies(t *testing.T) {
	s := startSite(t, `
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
	s.run(
		step{want: "200 limit=1 remaining=0 clear=60.000", body: "admitted"},
		step{want: "429 limit=1 remaining=0 clear=120.000 reset=30.000 retry-after=30",
			body: "rate limit inner exceeded: retry after 30 s, inner"},
	)
}

// TestLimitWithinErrorRoutes guards that limits work there too, such as one on
// failed logins, and keep their fields clean of an upstream's.
func TestLimitWithinErrorRoutes(t *testing.T) {
	upstream := newUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-RateLimit-Limit", "5000")
		io.WriteString(w, "error page")
	})
	s := startSite(t, `
		rate_limit all {
			size 10
			drip_rate 1m
		}
		error 401
		handle_errors 401 {
			rate_limit failures {
				size 1
				drip_rate 30s
			}
			reverse_proxy `+upstream+`
		}
	`)
	s.run(
		step{want: "200 limit=1 remaining=0 clear=60.000", body: "error page"},
		step{after: 30 * time.Second, want: "200 limit=1 remaining=0 clear=90.000", body: "error page"},
	)
}

// TestServerSentEvents guards that events of an upstream come through at once:
// the second is only sent when the first has arrived.
func TestServerSentEvents(t *testing.T) {
	for _, tc := range []struct{ name, contentType, proxy string }{
		{"by content type", "text/event-stream", "reverse_proxy %s"},
		{"by flush_interval", "text/plain", "reverse_proxy %s {\nflush_interval -1\n}"},
		{"every millisecond", "text/plain", "reverse_proxy %s {\nflush_interval 1ms\n}"},
		{"through encode", "text/event-stream", "encode gzip\nreverse_proxy %s"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			arrived := make(chan struct{})
			upstream := newUpstream(t, func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Content-Type", tc.contentType)
				w.Header().Set("X-RateLimit-Limit", "5000")
				for i := range 3 {
					fmt.Fprintf(w, "data: %d\n\n", i)
					w.(http.Flusher).Flush()
					select {
					case <-arrived:
					case <-r.Context().Done():
						return
					}
				}
			})
			s := startSite(t, "rate_limit {\nsize 9\n}\n"+fmt.Sprintf(tc.proxy, upstream))
			res, err := s.client.Get(s.url("/"))
			if err != nil {
				t.Fatal(err)
			}
			defer res.Body.Close()
			if got, want := fieldsIn(res.Header), "limit=9 remaining=8 clear=1.000"; got != want {
				t.Errorf("got %s, want %s", got, want)
			}
			body := bufio.NewReader(res.Body)
			for i := range 3 {
				event, err := body.ReadString('\n')
				if want := fmt.Sprintf("data: %d\n", i); event != want || err != nil {
					t.Fatalf("got event %q, %v, want %q", event, err, want)
				}
				body.ReadString('\n')
				arrived <- struct{}{}
			}
			if rest, err := io.ReadAll(body); len(rest) > 0 || err != nil {
				t.Errorf("after the events: %q, %v", rest, err)
			}
		})
	}
}

// TestFiles guards that files come through whole, in part, not at all where
// the client has them, and that each such answer has the fields.
func TestFiles(t *testing.T) {
	dir := t.TempDir()
	content := make([]byte, 3<<20)
	random := rand.NewChaCha8([32]byte{})
	random.Read(content)
	if err := os.WriteFile(filepath.Join(dir, "file"), content, 0o644); err != nil {
		t.Fatal(err)
	}
	s := startSite(t, `
		root `+dir+`
		rate_limit {
			size 9
			drip_rate 1h
		}
		file_server
	`)
	a := s.get("/file")
	if got, want := a.String(), "200 limit=9 remaining=8 clear=3600.000"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if a.body != string(content) {
		t.Errorf("the file of %d bytes came through as %d others", len(content), len(a.body))
	}
	etag := a.Header.Get("Etag")
	s.run(
		step{path: "/file", header: []string{"Range: bytes=1000-1003"},
			want: "206 limit=9 remaining=7 clear=7200.000", body: string(content[1000:1004])},
		step{path: "/file", header: []string{"If-None-Match: " + etag},
			want: "304 limit=9 remaining=6 clear=10800.000"},
		step{path: "/none", want: "404 limit=9 remaining=5 clear=14400.000"},
		step{path: "/file", method: "HEAD", want: "200 limit=9 remaining=4 clear=18000.000"},
	)
	if length := s.send("HEAD", "/file").ContentLength; length != int64(len(content)) {
		t.Errorf("HEAD tells of %d bytes, want %d", length, len(content))
	}
}

// TestEncode guards that responses are still compressed, whether encode stands
// before or behind.
func TestEncode(t *testing.T) {
	text := strings.Repeat("text ", 1000)
	upstream := newUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/plain")
		w.Header().Set("X-RateLimit-Limit", "5000")
		io.WriteString(w, text)
	})
	const limit = "rate_limit {\nsize 2\n}\n"
	for name, order := range map[string]string{
		"before": "encode gzip\n" + limit,
		"behind": limit + "encode gzip\n",
	} {
		t.Run(name, func(t *testing.T) {
			s := startSite(t, "route {\n"+order+"reverse_proxy "+upstream+"\n}")
			a := s.get("/", "Accept-Encoding: gzip")
			if got, want := a.String(), "200 limit=2 remaining=1 clear=1.000"; got != want {
				t.Errorf("got %s, want %s", got, want)
			}
			if got := a.Header.Get("Content-Encoding"); got != "gzip" {
				t.Fatalf("Content-Encoding is %q", got)
			}
			zipped, err := gzip.NewReader(strings.NewReader(a.body))
			if err != nil {
				t.Fatal(err)
			}
			if plain, err := io.ReadAll(zipped); string(plain) != text || err != nil {
				t.Errorf("%d bytes came through as %d others, %v", len(text), len(plain), err)
			}
			// The denial has no body to compress.
			s.get("/")
			a = s.get("/", "Accept-Encoding: gzip")
			if got, want := a.String(), "429 limit=2 remaining=0 clear=2.000 reset=1.000 retry-after=1"; got != want {
				t.Errorf("got %s, want %s", got, want)
			}
			if a.body != "" || a.Header.Get("Content-Encoding") != "" {
				t.Errorf("a denial has body %q of encoding %q", a.body, a.Header.Get("Content-Encoding"))
			}
		})
	}
}

// TestUpgrade guards that connections can be handed over, as to WebSocket, and
// that the 101 has the fields, those of the upstream dropped.
func TestUpgrade(t *testing.T) {
	upstream := newWebSocket(t)
	s := startSite(t, "rate_limit {\nsize 2\n}\nrespond /plain admitted\nreverse_proxy "+upstream)
	conn, err := net.Dial("tcp", s.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(patience))
	fmt.Fprintf(conn, "GET / HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n", s.addr)
	r := bufio.NewReader(conn)
	res, err := http.ReadResponse(r, nil)
	if err != nil {
		t.Fatal(err)
	}
	a := answer{Response: res}
	if got, want := a.String(), "101 limit=2 remaining=1 clear=1.000"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	for _, text := range []string{"one\n", "two\n"} {
		io.WriteString(conn, text)
		if echo, err := r.ReadString('\n'); echo != text || err != nil {
			t.Fatalf("%q came back as %q, %v", text, echo, err)
		}
	}
	// An upgraded connection has been charged once, and a full bucket takes no more.
	s.run(
		step{path: "/plain", want: "200 limit=2 remaining=0 clear=2.000", body: "admitted"},
		step{header: []string{"Connection: Upgrade", "Upgrade: echo"},
			want: "429 limit=2 remaining=0 clear=2.000 reset=1.000 retry-after=1"},
	)
}

// TestEarlyHints guards that informational responses pass, and that the final
// one behind them still has clean fields.
func TestEarlyHints(t *testing.T) {
	upstream := newUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-RateLimit-Limit", "5000")
		w.Header().Set("Link", "</style.css>; rel=preload")
		w.WriteHeader(http.StatusEarlyHints)
		io.WriteString(w, "upstream")
	})
	s := startSite(t, "rate_limit {\nsize 2\n}\nreverse_proxy "+upstream)
	var hints []string
	ctx := httptrace.WithClientTrace(context.Background(), &httptrace.ClientTrace{
		Got1xxResponse: func(code int, header textproto.MIMEHeader) error {
			hints = append(hints, fmt.Sprint(code, " ", header.Get("Link")))
			return nil
		},
	})
	req, err := http.NewRequestWithContext(ctx, "GET", s.url("/"), nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := s.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if want := []string{"103 </style.css>; rel=preload"}; !slices.Equal(hints, want) {
		t.Errorf("got hints %q, want %q", hints, want)
	}
	if got, want := (answer{Response: res}).String(), "200 limit=2 remaining=1 clear=1.000"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// TestTrailers guards that trailer fields pass, announced or not.
func TestTrailers(t *testing.T) {
	upstream := newUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Trailer", "X-Announced")
		io.WriteString(w, "upstream")
		w.Header().Set("X-Announced", "yes")
		w.Header().Set(http.TrailerPrefix+"X-Sudden", "yes")
	})
	s := startSite(t, "rate_limit {\nsize 2\n}\nreverse_proxy "+upstream)
	a := s.get("/")
	if got, want := a.String(), "200 limit=2 remaining=1 clear=1.000"; got != want || a.body != "upstream" {
		t.Errorf("got %s %q, want %s", got, a.body, want)
	}
	for _, name := range []string{"X-Announced", "X-Sudden"} {
		if a.Trailer.Get(name) != "yes" {
			t.Errorf("trailer %s is lost: %v", name, a.Trailer)
		}
	}
}

// TestHTTP2 guards that requests are limited and told so on HTTP/2 too.
func TestHTTP2(t *testing.T) {
	s := startConfig(t, config{
		global: "servers {\nprotocols h1 h2c\n}",
		site:   "rate_limit {\nsize 1\n}\nrespond admitted",
	})
	transport := s.client.Transport.(*http.Transport)
	transport.Protocols = new(http.Protocols)
	transport.Protocols.SetUnencryptedHTTP2(true)
	s.run(
		step{want: "200 limit=1 remaining=0 clear=1.000", body: "admitted"},
		step{want: "429 limit=1 remaining=0 clear=1.000 reset=1.000 retry-after=1"},
	)
	if a := s.get("/"); a.ProtoMajor != 2 {
		t.Errorf("this was %s", a.Proto)
	}
}

// TestKeys guards whose bucket a request meets.
func TestKeys(t *testing.T) {
	const site = `
		rate_limit {
			key %s
			size 9
		}
		respond "admitted"
	`
	for _, tc := range []struct {
		key      string
		requests []string // header fields of each, separated by "; "
		want     string   // how much each leaves of the 9
	}{
		{"{header.X-Key}", []string{"X-Key: a", "X-Key: a", "X-Key: b", "X-Key: A"}, "8 7 8 8"},
		// Without the field it is the client's address, apart from other keys.
		{"{header.X-Key}", []string{"X-Key: 127.0.0.1", "", "", "X-Key: 127.0.0.1", "X-Key: "}, "8 8 7 7 6"},
		// A field sent twice is as one with both values.
		{"{header.X-Key}", []string{"X-Key: a", "X-Key: a; X-Key: b", "X-Key: a,b", "X-Key: a"}, "8 8 7 7"},
		{"{header.X-Key}{header.X-More}", []string{"X-Key: a; X-More: bc", "X-Key: ab; X-More: c"}, "8 8"},
		{"{header.X-Key}{header.X-More}", []string{"X-Key: a", "X-More: a", "X-Key: a", ""}, "8 8 7 8"},
		{"user-{header.X-Key}", []string{"X-Key: a", "", "X-Key: a"}, "8 8 7"},
		{"everyone", []string{"", "X-Key: a", "X-Forwarded-For: 1.2.3.4"}, "8 7 6"},
		// An address is normalised wherever it comes from.
		{"{header.X-Key}", []string{"X-Key: 1.2.3.4", "X-Key: ::ffff:1.2.3.4", "X-Key: ::FFFF:102:304"}, "8 7 6"},
		{"{header.X-Key}", []string{
			"X-Key: 2001:db8::1", "X-Key: 2001:db8:0:0:8::2", "X-Key: 2001:db8:0:1::1",
		}, "8 7 8"},
		{"{client_ip}", []string{
			"X-Forwarded-For: 1.2.3.4", "X-Forwarded-For: ::ffff:1.2.3.4", "X-Forwarded-For: 1.2.3.5", "",
		}, "8 7 8 8"},
		{"{client_ip}", []string{
			"X-Forwarded-For: 2001:db8::1", "X-Forwarded-For: 2001:db8::ffff:ffff:ffff:ffff",
			"X-Forwarded-For: 2001:db8:0:1::1", "X-Forwarded-For: 2001:db8::1%eth0",
		}, "8 7 8 6"},
		{"{client_ip} {header.X-Key}", []string{
			"X-Forwarded-For: 2001:db8::1; X-Key: a", "X-Forwarded-For: 2001:db8::2; X-Key: a",
			"X-Forwarded-For: 2001:db8::2; X-Key: b",
		}, "8 7 8"},
		{"{remote_host}", []string{"X-Forwarded-For: 1.2.3.4", "X-Forwarded-For: 1.2.3.5"}, "8 7"},
		// A request without a key is still told by its prefix.
		{"{header.X-Key}", []string{"X-Forwarded-For: 2001:db8::1", "X-Forwarded-For: 2001:db8::2"}, "8 7"},
		{"{header.X-Key}\nipv6_prefix 128", []string{
			"X-Key: 2001:db8::1", "X-Key: 2001:DB8:0::1%eth0", "X-Key: 2001:db8::2",
		}, "8 7 8"},
		{"{client_ip}\nipv4_prefix 24\nipv6_prefix 48", []string{
			"X-Forwarded-For: 1.2.3.4", "X-Forwarded-For: 1.2.3.5", "X-Forwarded-For: 1.2.4.4",
			"X-Forwarded-For: 2001:db8:0:1::1", "X-Forwarded-For: 2001:db8:0:2::1",
			"X-Forwarded-For: 2001:db8:1::1",
		}, "8 7 8 8 7 8"},
	} {
		t.Run(tc.key, func(t *testing.T) {
			s := startConfig(t, config{
				global: "servers {\ntrusted_proxies static 127.0.0.1/32\n}",
				site:   fmt.Sprintf(site, quoted(tc.key)),
			})
			var left []string
			for _, header := range tc.requests {
				var fields []string
				if header != "" {
					fields = strings.Split(header, "; ")
				}
				left = append(left, s.get("/", fields...).Header.Get("X-RateLimit-Remaining"))
			}
			if got := strings.Join(left, " "); got != tc.want {
				t.Errorf("requests %q leave %s, want %s", tc.requests, got, tc.want)
			}
		})
	}
}

// quoted returns a value of the Caddyfile, in quotes if it has spaces, and the
// lines behind it as they are.
func quoted(text string) string {
	value, rest, _ := strings.Cut(text, "\n")
	return fmt.Sprintf("%q\n%s", value, rest)
}

// TestAddressNotTrusted guards that clients can't choose their bucket by a
// field that only proxies may send.
func TestAddressNotTrusted(t *testing.T) {
	s := startSite(t, `
		rate_limit {
			size 1
		}
		respond "admitted"
	`)
	s.run(
		step{header: []string{"X-Forwarded-For: 1.2.3.4"}, want: "200 limit=1 remaining=0 clear=1.000"},
		step{header: []string{"X-Forwarded-For: 1.2.3.5"},
			want: "429 limit=1 remaining=0 clear=1.000 reset=1.000 retry-after=1"},
	)
}

// TestMissingKeyIsReported guards that whoever runs the server learns, once for
// each limit, that requests come without a key.
func TestMissingKeyIsReported(t *testing.T) {
	s := startSite(t, `
		rate_limit by-key {
			key {header.X-Key}
			size 9
			limit deeper {
				size 8
			}
		}
		respond "{http.rate_limit.limit}"
	`)
	s.get("/", "X-Key: a")
	if warnings := s.log("warn", ownLogger); len(warnings) > 0 {
		t.Errorf("with a key: %v", warnings)
	}
	for range 3 {
		// Clients learn nothing of it.
		if a := s.get("/"); a.body != "by-key/deeper" {
			t.Errorf("the limit is called %q", a.body)
		}
	}
	var got []string
	for _, e := range s.log("warn", ownLogger) {
		got = append(got, fmt.Sprint(e["limit"], " ", e["key"]))
	}
	want := []string{"by-key {http.request.header.X-Key}", "by-key/deeper {http.request.header.X-Key}"}
	if !slices.Equal(got, want) {
		t.Errorf("got warnings of %q, want %q", got, want)
	}
}

// TestErrorsTellClientsLittle guards that error routes which show an error's
// text tell clients neither where Redis is nor what the configuration says.
func TestErrorsTellClientsLittle(t *testing.T) {
	addr := redistest.FreeAddr(t)
	s := startConfig(t, config{global: redisGlobal(addr, slowly), site: `
		rate_limit {
			size 1
			cost {header.X-Cost}
			on_error deny
		}
		handle_errors {
			respond "{err.message}"
		}
		respond "admitted"
	`})
	for cost, status := range map[string]int{"1": 503, "canary": 400} {
		a := s.get("/", "X-Cost: "+cost)
		if want := "rate limits can't be checked for this request"; a.StatusCode != status || a.body != want {
			t.Errorf("cost %s: got %d %q, want %d %q", cost, a.StatusCode, a.body, status, want)
		}
	}
	if lines := s.log("error", ownLogger); len(lines) != 1 {
		t.Errorf("got %v, want one line in the log, on the cost", lines)
	}
}

// TestDenialsAreNotLogged guards that whoever is denied can't fill the log, and
// that nothing in it tells whose bucket a request met.
func TestDenialsAreNotLogged(t *testing.T) {
	const canary = "canary-5fd4a1"
	for name, site := range map[string]string{
		"directly":             "",
		"through error routes": "handle_errors {\nrespond {err.message}\n}",
	} {
		t.Run(name, func(t *testing.T) {
			s := startSite(t, `
				rate_limit {
					key {header.X-Key}
					size 1
					limit never {
						match /never
						size {header.X-Size}
						cost 2
					}
				}
				respond "admitted"
				`+site)
			for range 5 {
				s.get("/", "X-Key: "+canary)
				s.get("/never", "X-Key: "+canary, "X-Size: 1")
			}
			if got := s.get("/", "X-Key: "+canary).StatusCode; got != 429 {
				t.Fatalf("status %d, want a denial", got)
			}
			for _, e := range s.entries() {
				logger, _ := e["logger"].(string)
				ours := strings.HasPrefix(logger, ownLogger) || strings.HasPrefix(logger, errorLogger)
				if ours && e["level"] != "debug" {
					t.Errorf("a denial is logged: %v", e)
				}
				if strings.Contains(e.text(), canary) {
					t.Errorf("a key is in the log: %s", e.text())
				}
			}
		})
	}
}

// TestDynamicNumbers guards that numbers may come from each request, and where
// size, cost and factor do the fields tell those in force.
func TestDynamicNumbers(t *testing.T) {
	s := startSite(t, `
		vars /premium size 20
		vars /free size 2
		rate_limit {
			limit plan {
				match not header X-Factor *
				size {vars.size}
				cost {header.X-Cost}
				drip_rate {header.X-Rate}
				drip_size {header.X-Drip}
			}
			limit tuned {
				match header X-Factor *
				size 7
				factor {header.X-Factor}
				limit within {
					size 100
				}
			}
		}
		respond "admitted"
	`)
	plan := func(cost, rate, drip string) []string {
		return []string{"X-Cost: " + cost, "X-Rate: " + rate, "X-Drip: " + drip}
	}
	factor := func(x string) []string { return []string{"X-Factor: " + x} }
	s.run(
		step{path: "/premium", header: plan("5", "1s", "1"), want: "200 limit=20 remaining=15 clear=5.000"},
		// The size alone is of this moment: it is the same bucket.
		step{path: "/free", header: plan("1", "1s", "1"),
			want: "429 limit=2 remaining=0 clear=5.000 reset=4.000 retry-after=4"},
		step{path: "/premium", header: plan("1", "1s", "1"), want: "200 limit=20 remaining=14 clear=6.000"},
		// Other drips are another bucket.
		step{path: "/premium", header: plan("3", "500ms", "2"), want: "200 limit=20 remaining=17 clear=1.000"},
		step{path: "/premium", header: plan("20", "2m", "20"), want: "200 limit=20 remaining=0 clear=120.000"},
		step{path: "/free", header: plan("3", "1s", "3"), want: "429 limit=2 remaining=2 clear=0.000"},

		step{header: factor("2"), want: "200 limit=4 remaining=3 clear=1.000"},
		step{header: factor("0.5"), want: "200 limit=14 remaining=12 clear=2.000"},
		step{header: factor("100"), want: "429 limit=1 remaining=0 clear=2.000 reset=2.000 retry-after=2"},
		// The bucket is off, those within are not.
		step{header: factor("0"), want: "200 limit=100 remaining=97 clear=3.000"},
		step{header: factor("0.000"), want: "200 limit=100 remaining=96 clear=4.000"},
	)
}

// TestBadDynamicNumbers guards that a request which makes a number unusable is
// never let through, whoever chose it: its own cost is its fault, other numbers
// are not.
func TestBadDynamicNumbers(t *testing.T) {
	s := startSite(t, `
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
		}
		respond "admitted"
	`)
	numbers := []string{
		"", "0", "-1", "+1", "1.5", "1e3", "0x10", "x", "1_000", "1 000", "1,000", "١", "NaN", "Inf",
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
		"/drip-rate": {500, []string{"", "0", "0s", "-1s", "1", "x", "100ns", "1500ns", "9999999h", "1s 1s"}, "7s"},
		"/factor": {500, []string{
			"", "-1", "+1", "1.", ".5", "1e3", "x", "1.0000001", "0.0000000", "NaN", "99999999999999999",
		}, "0.7"},
		"/unknown": {500, []string{"1"}, ""},
	} {
		for _, number := range tc.bad {
			a := s.get(path, "X-Number: "+number)
			if a.StatusCode != tc.status || a.body != "" {
				t.Errorf("%s with %.40q: got %d %q, want %d and nothing",
					path, number, a.StatusCode, a.body, tc.status)
			}
			if got := fieldsIn(a.Header); got != "" {
				t.Errorf("%s with %.40q: got fields %s", path, number, got)
			}
		}
		if tc.good != "" {
			if a := s.get(path, "X-Number: "+tc.good); a.StatusCode != 200 || a.body != "admitted" {
				t.Errorf("%s with %q: got %d %q", path, tc.good, a.StatusCode, a.body)
			}
		}
	}
}

// TestBadNumbersChargeNothing guards that a request refused for one limit's
// number has used up no other.
func TestBadNumbersChargeNothing(t *testing.T) {
	s := startSite(t, `
		rate_limit all {
			size 3
			accounting each
			limit costly {
				size 100
				cost {header.X-Cost}
			}
		}
		respond "admitted"
	`)
	s.run(times(5, step{want: "400"})...)
	s.run(step{header: []string{"X-Cost: 1"}, want: "200 limit=3 remaining=2 clear=1.000"})
}

// TestBadNumbersAreReported guards that the log says so, clearly, but at most
// once a minute for a limit: clients may send such requests as they like.
func TestBadNumbersAreReported(t *testing.T) {
	for name, errors := range map[string]string{
		"written directly":     "",
		"through error routes": "handle_errors {\nrespond {err.message}\n}",
	} {
		t.Run(name, func(t *testing.T) {
			s := startSite(t, `
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
				}
				respond "admitted"
				`+errors)
			for range 3 {
				s.get("/one", "X-Size: lots")
				s.get("/two", "X-Cost: 0")
			}
			var got []string
			for _, e := range s.log("error", ownLogger) {
				got = append(got, fmt.Sprint(e["limit"], ": ", e["error"]))
			}
			want := []string{
				`one: size: got "lots", want a whole number from 1 to 562949953421312 from {http.request.header.X-Size}`,
				`two: cost: got "0", want a whole number from 1 to 562949953421312 from {http.request.header.X-Cost}`,
			}
			if !slices.Equal(got, want) {
				t.Errorf("got %q, want %q", got, want)
			}
			if more := s.log("error", errorLogger); len(more) > 0 {
				t.Errorf("Caddy reports it again: %v", more)
			}
		})
	}
}

// TestNeverAdmitted guards what a request gets that costs more than the bucket
// holds: a denial that does not invite to retry, and no charge.
func TestNeverAdmitted(t *testing.T) {
	s := startSite(t, `
		rate_limit {
			size 3
			cost {header.X-Cost}
			headers x-ratelimit ratelimit
		}
		respond "admitted"
	`)
	s.run(
		step{header: []string{"X-Cost: 4"},
			want: `429 limit=3 remaining=3 clear=0.000 policy="default";q=3;qu="units";w=3 ratelimit="default";r=3`},
		step{header: []string{"X-Cost: 562949953421312"},
			want: `429 limit=3 remaining=3 clear=0.000 policy="default";q=3;qu="units";w=3 ratelimit="default";r=3`},
		step{header: []string{"X-Cost: 3"},
			want: `200 limit=3 remaining=0 clear=3.000 policy="default";q=3;qu="units";w=3 ratelimit="default";r=0;t=1`},
	)
}

// TestEarlyData guards that before a handshake is complete no address counts:
// such a request could be anybody's replay. It is told to come again, and
// nobody is charged.
func TestEarlyData(t *testing.T) {
	for _, tc := range []struct {
		key    string
		header string
		want   string
	}{
		{"{client_ip}", "", "425"},
		{"{remote_host}", "", "425"},
		{"{http.request.remote}", "", "425"},
		{"{http.request.remote.host/24}", "", "425"},
		{"{header.X-Key}-{client_ip}", "a", "425"},
		{"{header.X-Key}", "", "425"},
		{"{header.X-Key}", "a", "200 limit=3 remaining=2 clear=1.000"},
		{"everyone", "", "200 limit=3 remaining=2 clear=1.000"},
	} {
		t.Run(tc.key, func(t *testing.T) {
			s := startSite(t, `
				rate_limit {
					limit all {
						key all
						size 5
					}
					limit one {
						key `+tc.key+`
						size 3
					}
				}
				handle_errors {
					respond "{err.message}"
				}
				respond "admitted"
			`)
			send := func(complete bool) answer {
				r := httptest.NewRequest("GET", "https://"+s.addr+"/", nil)
				r.TLS = &tls.ConnectionState{HandshakeComplete: complete}
				if tc.header != "" {
					r.Header.Set("X-Key", tc.header)
				}
				w := httptest.NewRecorder()
				activeServer(t).ServeHTTP(w, received(r))
				return answer{w.Result(), w.Body.String()}
			}
			early := send(false)
			if early.String() != tc.want {
				t.Errorf("got %s, want %s", early, tc.want)
			}
			if tc.want != "425" {
				return
			}
			if !strings.Contains(early.body, "handshake") {
				t.Errorf("the error says %q", early.body)
			}
			if got, want := send(true).String(), "200 limit=3 remaining=2 clear=1.000"; got != want {
				t.Errorf("when it comes again: got %s, want %s", got, want)
			}
		})
	}
}

// TestMatcherErrors guards that an error of a matcher is not taken for an answer:
// that of remote_ip, before a handshake is complete, is a 425 of its own.
func TestMatcherErrors(t *testing.T) {
	s := startSite(t, `
		rate_limit {
			key everyone
			match remote_ip 192.0.2.0/24
			size 3
		}
		respond "admitted"
	`)
	for complete, want := range map[bool]string{false: "425", true: "200 limit=3 remaining=2 clear=1.000"} {
		r := httptest.NewRequest("GET", "https://"+s.addr+"/", nil)
		r.TLS = &tls.ConnectionState{HandshakeComplete: complete}
		w := httptest.NewRecorder()
		activeServer(t).ServeHTTP(w, received(r))
		if got := (answer{w.Result(), w.Body.String()}).String(); got != want {
			t.Errorf("handshake complete %t: got %s, want %s", complete, got, want)
		}
	}
}

// received returns r as if it had come over a connection.
func received(r *http.Request) *http.Request {
	return r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, &net.TCPAddr{}))
}

// activeServer returns the HTTP server of the config that Caddy runs.
func activeServer(t testing.TB) *caddyhttp.Server {
	t.Helper()
	app, err := caddy.ActiveContext().AppIfConfigured("http")
	if err != nil {
		t.Fatal(err)
	}
	return app.(*caddyhttp.App).Servers["srv0"]
}

// TestReloadKeepsLevels guards that a new config goes on with the buckets of the
// old one, except those whose numbers it changes, and that a rejected one
// changes nothing.
func TestReloadKeepsLevels(t *testing.T) {
	site := func(size, more string) config {
		return config{site: `
			rate_limit {
				drip_rate 1h
				size ` + size + `
				` + more + `
			}
			respond "admitted"
		`}
	}
	s := startConfig(t, site("2", ""))
	load := func(c config) {
		t.Helper()
		if err := s.load(c); err != nil {
			t.Fatal(err)
		}
	}
	s.run(
		step{want: "200 limit=2 remaining=1 clear=3600.000"},
		step{want: "200 limit=2 remaining=0 clear=7200.000"},
	)
	full := step{want: "429 limit=2 remaining=0 clear=7200.000 reset=3600.000 retry-after=3600"}

	// The same again, and what is no part of a bucket's identity.
	for range 5 {
		load(site("2", ""))
		s.run(full)
	}
	load(site("2", "match not path /x"))
	s.run(full)
	load(site("2", "headers off"))
	s.run(step{want: "429 retry-after=3600"})
	load(config{site: `
		respond /other "other"
		rate_limit {
			drip_rate 1h
			size 2
			limit deeper {
				size 1
			}
		}
		respond "admitted"
	`})
	s.run(full)

	// What is rejected fails in different places: before the store is taken,
	// after, in a module of somebody else's, and when all is provisioned.
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	before := s.addr
	for name, c := range map[string]config{
		"secret that is not there": {
			global: redisGlobal("{env.RATELIMIT_TEST_UNSET}:6379"), site: site("2", "").site,
		},
		"cost above the size": site("2", "cost 3"),
		"bad matcher behind":  {site: site("2", "").site + "\n@bad path_regexp [\nrespond @bad x"},
		"port that is taken":  {site: site("2", "").site, sites: "http://" + taken.Addr().String() + " {\n}"},
	} {
		if err := s.load(c); err == nil {
			t.Fatalf("%s: the config was accepted", name)
		}
		s.run(full)
	}
	if s.addr != before {
		t.Errorf("after a rejected config the site moved from %s to %s", before, s.addr)
	}
	if n, _ := stores.References("memory"); n != 1 {
		t.Errorf("the store is in use %d times, by one config", n)
	}

	// Other numbers, and back: nothing was forgotten.
	load(site("3", ""))
	s.run(step{want: "200 limit=3 remaining=2 clear=3600.000"})
	load(site("2", ""))
	s.run(full)
}

// TestReloadWithoutLimits guards that buckets last as long as some config uses
// them and for keepTime after, and no longer.
func TestReloadWithoutLimits(t *testing.T) {
	original := keepTime
	t.Cleanup(func() { keepTime = original })
	c := config{site: "rate_limit {\nsize 1\n}\nrespond admitted"}
	s := startConfig(t, c)
	s.run(step{want: "200 limit=1 remaining=0 clear=1.000"})
	for _, keepTime = range []time.Duration{time.Hour, 0} {
		if err := s.load(config{site: "respond admitted"}); err != nil {
			t.Fatal(err)
		}
		if n, used := stores.References("memory"); used {
			t.Errorf("the store is in use %d times, by no config", n)
		}
		s.run(step{want: "200"})
		want := "429 limit=1 remaining=0 clear=1.000 reset=1.000 retry-after=1"
		if keepTime == 0 {
			eventually(t, "a store that is let go of", func() bool { return kept.Load() == nil })
			want = "200 limit=1 remaining=0 clear=1.000"
		}
		if err := s.load(c); err != nil {
			t.Fatal(err)
		}
		s.run(step{want: want})
	}
}

// slowly gives requests time, for tests of other things than timeouts.
const slowly = "timeout 10s"

// redisGlobal returns the global option for a Redis server at addr.
func redisGlobal(addr string, options ...string) string {
	return "rate_limit {\nredis " + addr + " {\n" + strings.Join(options, "\n") + "\n}\n}"
}

// TestRedis guards that buckets in Redis work as those in the process do, by
// whatever way it is reached, and that what logs in is found nowhere else.
func TestRedis(t *testing.T) {
	const secret = "s3cret-canary-81c6"
	server := redistest.Start(t, "--requirepass", secret)
	file := filepath.Join(tempDir(t), "password")
	if err := os.WriteFile(file, []byte(secret+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("RATELIMIT_TEST_PASSWORD", secret)
	t.Setenv("RATELIMIT_TEST_ADDRESS", server.Addr)

	for _, tc := range []struct{ name, global string }{
		{"tcp", redisGlobal(server.Addr, slowly, "password {env.RATELIMIT_TEST_PASSWORD}")},
		{"unix socket", redisGlobal(server.Socket, slowly, "password {file."+file+"}")},
		{"user and database", redisGlobal("{env.RATELIMIT_TEST_ADDRESS}", slowly, "db 1",
			"username default", "password {env.RATELIMIT_TEST_PASSWORD}")},
		{"url", redisGlobal("redis://:{env.RATELIMIT_TEST_PASSWORD}@"+server.Addr+"/2", slowly)},
		{"unix url", redisGlobal("unix://default:{env.RATELIMIT_TEST_PASSWORD}@"+server.Socket, slowly, "db 3")},
	} {
		t.Run(tc.name, func(t *testing.T) {
			admin := filepath.Join(tempDir(t), "admin")
			c := config{global: tc.global, admin: "unix/" + admin, site: `
				rate_limit ` + strings.ReplaceAll(tc.name, " ", "-") + ` {
					size 2
					drip_rate 1h
					headers x-ratelimit ratelimit
				}
				handle_errors {
					respond "{err.message}"
				}
				respond "admitted"
			`}
			s := startConfig(t, c)
			for _, want := range []string{"200 2 1", "200 2 0", "429 2 0", "429 2 0"} {
				a := s.get("/")
				got := fmt.Sprint(a.StatusCode, " ", a.Header.Get("X-RateLimit-Limit"), " ",
					a.Header.Get("X-RateLimit-Remaining"))
				if got != want {
					t.Errorf("got %s, want %s: %s", got, want, a.body)
				}
			}
			// The server's clock runs: what it says is only known roughly.
			a := s.get("/")
			if after := number(a.Header.Get("Retry-After")); after < 3500 || after > 3600 {
				t.Errorf("Retry-After is %d", after)
			}
			if clear := number(a.Header.Get("X-RateLimit-Clear")); clear < 7100 || clear > 7200 {
				t.Errorf("X-RateLimit-Clear is %d", clear)
			}
			if err := s.load(c); err != nil {
				t.Fatal(err)
			}
			if a := s.get("/"); a.StatusCode != 429 {
				t.Errorf("after a reload: %s", a)
			}
			app, err := caddy.ActiveContext().AppIfConfigured("rate_limit")
			if err != nil {
				t.Fatal(err)
			}
			if held := fmt.Sprintf("%+v", *app.(*App).Redis); strings.Contains(held, secret) {
				t.Errorf("the password is held resolved: %s", held)
			}

			shown := getUnix(t, admin, "/config/")
			if !strings.Contains(shown, `"redis"`) {
				t.Errorf("the config is shown as %s", shown)
			}
			log, err := os.ReadFile(s.logPath)
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains(shown, secret) || bytes.Contains(log, []byte(secret)) {
				t.Error("the password is in the config or the log")
			}
		})
	}
}

// getUnix returns what a server on a unix socket has under path.
func getUnix(t testing.TB, socket, path string) string {
	t.Helper()
	client := &http.Client{Timeout: patience, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		},
	}}
	res, err := client.Get("http://127.0.0.1" + path)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil || res.StatusCode != 200 {
		t.Fatalf("%s: status %d, %v", path, res.StatusCode, err)
	}
	return string(body)
}

// TestRedisKeys guards what stands in the database: keys with the prefix, of
// the limit's path and numbers and a digest, and nothing that a client sent.
func TestRedisKeys(t *testing.T) {
	server := redistest.Start(t)
	s := startConfig(t, config{
		global: redisGlobal(server.Addr, slowly, "db 5", "key_prefix shop:limits:"),
		site: `
			rate_limit api {
				key {header.X-Key}
				size 10
				drip_rate 1h
				limit writes {
					size {header.X-Size}
					drip_rate 36s
					drip_size 2
				}
			}
			respond "admitted"
		`,
	})
	long := strings.Repeat("canary", 1000)
	for _, key := range []string{"canary", "{canary}", "canary:*", "a\tcanary", "", long} {
		if a := s.get("/", "X-Key: "+key, "X-Size: 7"); a.StatusCode != 200 {
			t.Fatalf("key %.20q: %s", key, a)
		}
	}
	client := server.Client().Conn()
	defer client.Close()
	if err := client.Select(t.Context(), 5).Err(); err != nil {
		t.Fatal(err)
	}
	keys, err := client.Keys(t.Context(), "*").Result()
	if err != nil {
		t.Fatal(err)
	}
	form := regexp.MustCompile(`^shop:limits:\{[A-Za-z0-9_-]{22}\}:` +
		`api(/writes)?(@client_ip)?:[0-9a-z]*\.[0-9a-z]+\.[0-9a-z]+$`)
	slots := make(map[string]bool)
	for _, key := range keys {
		if !form.MatchString(key) {
			t.Errorf("key %q", key)
		}
		_, rest, _ := strings.Cut(key, "{")
		slot, _, _ := strings.Cut(rest, "}")
		slots[slot] = true
		// Redis counts in milliseconds, rounded up.
		if ttl := client.PTTL(t.Context(), key).Val(); ttl <= 0 || ttl > time.Hour+2*ms {
			t.Errorf("key %q expires in %v", key, ttl)
		}
	}
	if len(keys) != 12 || len(slots) != 6 {
		t.Errorf("got %d keys of %d digests, want 12 of 6: %q", len(keys), len(slots), keys)
	}
	if n := server.Client().DBSize(t.Context()).Val(); n != 0 {
		t.Errorf("%d keys are in another database", n)
	}
}

// TestProcessesShareRedis guards the point of it all: however many Caddys stand
// before one Redis, a flood of requests gets exactly one bucketful through.
func TestProcessesShareRedis(t *testing.T) {
	const processes, requests, size = 2, 400, 100
	server := redistest.Start(t)
	c := config{
		global: redisGlobal(server.Addr, slowly),
		site:   fmt.Sprintf("rate_limit {\nsize %d\ndrip_rate 1h\n}\nrespond admitted", size),
	}
	var addrs []string
	for range processes {
		addrs = append(addrs, startProcess(t, c))
	}
	client := &http.Client{Timeout: patience, Transport: &http.Transport{MaxConnsPerHost: 25}}
	defer client.CloseIdleConnections()

	var answers [600]atomic.Int64 // by status
	var wg sync.WaitGroup
	for i := range requests {
		wg.Go(func() {
			res, err := client.Get("http://" + addrs[i%processes])
			if err != nil {
				t.Error(err)
				return
			}
			res.Body.Close()
			answers[res.StatusCode].Add(1)
		})
	}
	wg.Wait()
	admitted, denied := answers[200].Load(), answers[429].Load()
	if admitted != size || denied != requests-size {
		t.Errorf("of %d requests %d were admitted and %d denied, want %d and %d",
			requests, admitted, denied, size, requests-size)
	}
}

// TestRedisFails guards that a Redis which does not answer costs a request at
// most the timeout, that with on_error deny it is refused and not let through,
// and that the log says once what is wrong and where.
func TestRedisFails(t *testing.T) {
	const short, longer, margin = 200 * ms, 2 * time.Second, 3 * time.Second
	paused := redistest.Start(t)
	paused.Process.Signal(syscall.SIGSTOP)
	locked := redistest.Start(t, "--requirepass", "s3cret")
	full := redistest.Start(t, "--maxmemory", "1")

	hole, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { hole.Close() })

	late := `^redis at ADDR did not answer within 200ms: `
	for _, tc := range []struct {
		name, addr, password string
		timeout              time.Duration
		log                  string
	}{
		{"paused", paused.Addr, "x", short, late},
		{"accepts and never answers", hole.Addr().String(), "x", short, late},
		{"refuses connections", "127.0.0.1:1", "x", longer, `^redis at ADDR .*connection refused$`},
		{"refuses the password", locked.Addr, "canary-5fd4", longer, `^redis at ADDR .*: WRONGPASS`},
		{"has no memory left", full.Addr, "", longer, `^redis at ADDR .*: OOM$`},
		{"has no such socket", "/nonexistent/redis.sock", "", longer, `^redis at ADDR .*no such file`},
	} {
		for name, errors := range map[string]string{
			"": "", ", with error routes": "handle_errors {\nrespond {err.status_code}\n}",
		} {
			t.Run(tc.name+name, func(t *testing.T) {
				options := []string{"timeout " + tc.timeout.String()}
				if tc.password != "" {
					options = append(options, "password "+tc.password)
				}
				s := startConfig(t, config{
					global: redisGlobal(tc.addr, options...),
					site:   "rate_limit {\nsize 9\non_error deny\n}\n" + errors + "\nrespond admitted",
				})
				const requests = 7
				for range requests {
					start := time.Now()
					a := s.get("/")
					if took := time.Since(start); took > short+margin {
						t.Errorf("it took %v", took)
					}
					if a.StatusCode != 503 || a.body == "admitted" {
						t.Errorf("got %s %q", a, a.body)
					}
				}
				want := regexp.MustCompile(strings.Replace(tc.log, "ADDR", regexp.QuoteMeta(tc.addr), 1))
				reports := s.log("error", "rate_limit")
				for end := time.Now().Add(3 * time.Second); len(reports) == 0 && time.Now().Before(end); {
					time.Sleep(10 * ms) // a server that is silent may for a while only be far away
					reports = s.log("error", "rate_limit")
				}
				for _, e := range reports {
					if text, _ := e["error"].(string); !want.MatchString(text) {
						t.Errorf("the log says %q, want %s", text, want)
					}
					if strings.Contains(e.text(), "canary") {
						t.Errorf("the password is in the log: %s", e.text())
					}
				}
				if len(reports) != 1 {
					t.Errorf("%d reports of %d requests", len(reports), requests)
				}
				if more := append(s.log("error", ownLogger), s.log("error", errorLogger)...); len(more) > 0 {
					t.Errorf("it is reported again: %v", more)
				}
			})
		}
	}
}

// TestTimeoutIsOfAll guards that the timeout bounds all of a request's waiting
// for Redis: several steps that are each in time are not.
func TestTimeoutIsOfAll(t *testing.T) {
	const timeout, delay = 400 * ms, 300 * ms
	server := redistest.Start(t)
	proxy, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { proxy.Close() })
	go func() {
		for {
			client, err := proxy.Accept()
			if err != nil {
				return
			}
			behind, err := net.Dial("tcp", server.Addr)
			if err != nil {
				client.Close()
				continue
			}
			go func() {
				defer behind.Close()
				io.Copy(behind, client)
			}()
			go func() {
				defer client.Close()
				reply := make([]byte, 4096)
				for {
					n, err := behind.Read(reply)
					if err != nil {
						return
					}
					<-time.After(delay)
					client.Write(reply[:n])
				}
			}()
		}
	}()
	s := startConfig(t, config{
		global: redisGlobal(proxy.Addr().String(), "timeout "+timeout.String()),
		site:   "rate_limit {\nsize 9\non_error deny\n}\nrespond admitted",
	})
	// The greeting takes one delay, the script at least another.
	if a := s.get("/"); a.StatusCode != 503 {
		t.Errorf("got %s", a)
	}
}

// TestRedisComesBack guards that after an outage limits work again by
// themselves.
func TestRedisComesBack(t *testing.T) {
	for _, tc := range []struct {
		name string
		stop func(*redistest.Server)
		cont func(*redistest.Server, testing.TB)
	}{
		{
			"paused",
			func(r *redistest.Server) { r.Process.Signal(syscall.SIGSTOP) },
			func(r *redistest.Server, _ testing.TB) { r.Process.Signal(syscall.SIGCONT) },
		},
		{"killed", (*redistest.Server).Kill, (*redistest.Server).Restart},
	} {
		t.Run(tc.name, func(t *testing.T) {
			server := redistest.Start(t)
			s := startConfig(t, config{
				global: redisGlobal(server.Addr, "timeout 250ms"),
				site:   "rate_limit {\nsize 1000\non_error deny\n}\nrespond admitted",
			})
			eventually(t, "the first answer", func() bool { return s.get("/").StatusCode == 200 })
			tc.stop(server)
			if a := s.get("/"); a.StatusCode != 503 {
				t.Errorf("while it is away: %s", a)
			}
			tc.cont(server, t)
			eventually(t, "answers again", func() bool { return s.get("/").StatusCode == 200 })
		})
	}
}

// TestReloadSharesConnections guards that configs with equal settings use the
// same connections, and that nothing is left open when none needs them.
func TestReloadSharesConnections(t *testing.T) {
	original := drainTime
	drainTime = ms
	t.Cleanup(func() { drainTime = original })
	server := redistest.Start(t)
	info := func(section, name string) (n int64) {
		t.Helper()
		text, err := server.Client().Info(t.Context(), section).Result()
		if err != nil {
			t.Fatal(err)
		}
		_, value, _ := strings.Cut(text, name+":")
		return number(value)
	}
	c := config{
		global: redisGlobal(server.Addr, slowly),
		site:   "rate_limit {\nsize 90\n}\nrespond admitted",
	}
	s := startConfig(t, c)
	// Held, so that the garbage collector does not close connections instead.
	var held []any
	defer runtime.KeepAlive(&held)
	stores.Range(func(key, store any) bool {
		if key != memoryKey {
			held = append(held, store)
		}
		return true
	})
	s.get("/")
	before := info("stats", "total_connections_received")
	for range 5 {
		if err := s.load(c); err != nil {
			t.Fatal(err)
		}
		s.get("/")
	}
	if n := info("stats", "total_connections_received") - before; n > 0 {
		t.Errorf("five reloads made %d new connections", n)
	}

	// Another timeout makes other settings; the limits stay.
	c.global = redisGlobal(server.Addr, "timeout 11s")
	if err := s.load(c); err != nil {
		t.Fatal(err)
	}
	if len(held) != 1 {
		t.Errorf("one config used %d stores", len(held))
	}
	if a := s.get("/"); number(a.Header.Get("X-RateLimit-Remaining")) > 85 {
		t.Errorf("with another timeout the limits start afresh: %s", a)
	}
	if err := s.load(config{site: "respond admitted"}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "all connections closed but that of the test", func() bool {
		return info("clients", "connected_clients") == 1
	})
}

// TestCancelledRequestCounts guards that a client which goes away early, or whose
// request has a deadline, is charged all the same, and is no failure of Redis.
func TestCancelledRequestCounts(t *testing.T) {
	server := redistest.Start(t)
	s := startConfig(t, config{
		global: redisGlobal(server.Addr, slowly),
		site:   "rate_limit {\nsize 9\ndrip_rate 1h\n}\nrespond admitted",
	})
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	late, cancel := context.WithDeadline(t.Context(), time.Now().Add(-time.Second))
	defer cancel()
	for _, ctx := range []context.Context{cancelled, late} {
		r := httptest.NewRequestWithContext(ctx, "GET", s.url("/"), nil)
		r.RemoteAddr = "127.0.0.1:1"
		activeServer(t).ServeHTTP(httptest.NewRecorder(), received(r))
	}
	if a := s.get("/"); a.Header.Get("X-RateLimit-Remaining") != "6" {
		t.Errorf("after two such requests of 9: %s", a)
	}
	if reports := s.log("error", ownLogger); len(reports) > 0 {
		t.Errorf("cancelled requests are reported: %v", reports)
	}
}
