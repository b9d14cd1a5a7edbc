package behaviour

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// decisionInLog returns what the access log shows of the last request's limits.
func decisionInLog(t testing.TB, s *sitetest.Site) string {
	t.Helper()
	shown, ok := s.LastAccess()["rate_limit"]
	if !ok {
		return ""
	}
	text, err := json.Marshal(shown)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// TestAccessLog guards what the option log adds to the access log: nothing without
// it or for requests without a limit; the tightest of several handlers, once; why
// there was no decision; and never the key.
func TestAccessLog(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, `
		@all path /api* /two*
		rate_limit @all api {
			key {query.k}
			size 2
			drip_rate 1m
			cost {query.cost}
			log
		}
		@two path /two*
		rate_limit @two tight {
			key all
			size 1
			drip_rate 90s
		}
		@off path /off
		rate_limit @off off {
			size 1
		}
		respond admitted
	`)
	for _, tc := range []struct{ path, want string }{
		{"/", ``},
		{"/off", ``},
		{"/api?cost=1&k=secret-1", `{"by":"memory","limit":"api","remaining":1,"result":"admitted","units":{"api":1}}`},
		{"/two?cost=1&k=secret-1", `{"by":"memory","limit":"tight","remaining":0,"result":"admitted","units":{"api":1,"tight":1}}`},
		{"/two?cost=1&k=secret-2", `{"by":"memory","limit":"tight","remaining":0,"result":"denied","retry_after":90,"units":{"api":1}}`},
		{"/api?cost=1&k=secret-1", `{"by":"memory","limit":"api","remaining":0,"result":"denied","retry_after":60}`},
		{"/api?cost=3&k=secret-3", `{"by":"memory","limit":"api","remaining":2,"result":"denied"}`},
		{"/api?cost=x&k=secret-1", `{"result":"refused"}`},
	} {
		s.Get(tc.path)
		if got := decisionInLog(t, s); got != tc.want {
			t.Errorf("%s: got %s, want %s", tc.path, got, tc.want)
		}
	}
	for _, e := range s.Entries() {
		if strings.Contains(e.Text(), "secret-") {
			t.Errorf("the log has a key: %v", e)
		}
	}
}

// TestLimitThatBindsIsShown guards that all that is said of a request is of one limit, where
// units differ: the one that allows the fewest more such requests or, if it was denied, the one
// that denied it. Places are shown only where they are what is short.
func TestLimitThatBindsIsShown(t *testing.T) {
	spans := sitetest.CollectSpans(t)
	limits := func(headers string) string {
		return `
			key {query.k}
			log
			headers ` + headers + `
			limit volume {
				size 1000000
				drip_rate 5m
				cost {query.cost}
			}
			limit parallel {
				concurrency 5
			}`
	}
	const shown = `"{http.rate_limit.limit} {http.rate_limit.size} {http.rate_limit.remaining}"`
	s := sitetest.Start(t, `
		tracing
		header >seen `+shown+`
		rate_limit /x {`+limits("x-ratelimit")+`
		}
		rate_limit /github {`+limits("github")+`
		}
		respond admitted
		handle_errors {
			header seen `+shown+`
			respond {http.rate_limit.exceeded.name}
		}
	`)
	for _, tc := range []struct {
		path, cost        string
		status            int
		limit             string
		size, remaining   string
		remainingOfGitHub string // if it is another one
	}{
		{"/x", "300000", 200, "volume", "1000000", "700000", ""},
		{"/x", "300000", 200, "volume", "1000000", "400000", ""},
		{"/x", "1", 200, "parallel", "5", "4", ""},
		{"/x", "0", 200, "parallel", "5", "4", ""},
		{"/x", "300000", 200, "volume", "1000000", "99999", ""},
		{"/x", "300000", 429, "volume", "1000000", "99999", ""},
		{"/x", "1000001", 429, "volume", "1000000", "99999", ""},
		{"/github", "300000", 200, "volume", "1000000", "700000", ""},
		{"/github", "1", 200, "parallel", "5", "4", ""},
		{"/github", "700000", 429, "volume", "1000000", "699999", "0"},
	} {
		name := tc.path + " " + tc.cost
		a := s.Get(tc.path + "?k=" + tc.path[1:] + "&cost=" + tc.cost)
		if a.StatusCode != tc.status || tc.status == 429 && a.Text != tc.limit {
			t.Errorf("%s: got %d %q, want %d", name, a.StatusCode, a.Text, tc.status)
		}
		if got, want := a.Header.Get("Seen"), tc.limit+" "+tc.size+" "+tc.remaining; got != want {
			t.Errorf("%s: placeholders are %q, want %q", name, got, want)
		}
		fields := a.Header.Get("X-RateLimit-Limit") + " " + a.Header.Get("X-RateLimit-Remaining")
		if want := tc.size + " " + cmp.Or(tc.remainingOfGitHub, tc.remaining); fields != want {
			t.Errorf("%s: header fields are %q, want %q", name, fields, want)
		}
		logged := s.LastAccess()["rate_limit"].(map[string]any)
		if got, want := fmt.Sprintf("%v %.0f", logged["limit"], logged["remaining"]), tc.limit+" "+tc.remaining; got != want {
			t.Errorf("%s: the access log has %q, want %q", name, got, want)
		}
		select {
		case span := <-spans:
			if _, value, _ := strings.Cut(span, "caddy.rate_limit.limit"); !strings.Contains(value[:min(len(value), 20)], tc.limit) {
				t.Errorf("%s: the span has %q, want %s", name, value, tc.limit)
			}
		case <-time.After(sitetest.Patience):
			t.Fatalf("%s: no span", name)
		}
	}
}

// TestUnitsInAccessLog guards that the access log says what each limit was charged in the end:
// by the response where that decides, by the limits before the one that denied, and nothing by
// others.
func TestUnitsInAccessLog(t *testing.T) {
	t.Parallel()
	limit := func(name, options string) string { return "limit " + name + " {\ndrip_rate 1h\n" + options + "\n}\n" }
	var site strings.Builder
	for _, block := range []struct{ path, options string }{
		{"plain", limit("plain", "size 6\ncost 3")},
		{"count", limit("count", "size 9\ncost 2\ncount status 401")},
		{"off", limit("off", "size 9\ncount status 401\nhold off")},
		{"bytes", limit("bytes", "size 1000\nactual_cost bytes")},
		{"actual", limit("actual", "size 99\ncost 5\nactual_cost {query.actual}")},
		{"atomic", limit("one", "size 9") + limit("other", "size 1")},
		{"each", "accounting each\n" + limit("wide", "size 9") + limit("tight", "size 1")},
		{"dry", limit("dry", "size 1\ndry_run")},
		{"lent", limit("borrows", "size 1\nborrow spare") + limit("spare", "size 5\npool")},
		{"open", "limit open {\nconcurrency 5\n}\n"},
		{"two", limit("outer", "size 99\nactual_cost {query.actual}")},
		{"two", limit("inner", "size 1")},
	} {
		site.WriteString("rate_limit /" + block.path + " {\nkey all\nlog\n" + block.options + "}\n")
	}
	s := sitetest.Start(t, site.String()+"@failed query status=401\nrespond @failed failed 401\nrespond admitted")
	for _, tc := range []struct{ path, want string }{
		{"/plain", `{"plain":3}`}, {"/plain", `{"plain":3}`}, {"/plain", `null`},
		{"/count", `null`}, {"/count?status=401", `{"count":2}`},
		{"/off", `null`}, {"/off?status=401", `{"off":1}`},
		{"/bytes", `{"bytes":8}`},
		{"/actual?actual=7", `{"actual":7}`}, {"/actual?actual=0", `null`}, {"/actual?actual=x", `{"actual":5}`},

		{"/atomic", `{"one":1,"other":1}`}, {"/atomic", `null`},
		{"/each", `{"tight":1,"wide":1}`}, {"/each", `{"wide":1}`},
		{"/dry", `{"dry":1}`}, {"/dry", `null`},
		{"/lent", `{"borrows":1}`}, {"/lent", `{"spare":1}`},
		{"/open", `null`},
		{"/two?actual=7", `{"inner":1,"outer":7}`}, {"/two?actual=7", `{"outer":7}`},
	} {
		s.Get(tc.path)
		shown := s.LastAccess()["rate_limit"].(map[string]any)
		if got, err := json.Marshal(shown["units"]); err != nil || string(got) != tc.want {
			t.Errorf("%s: got %s, %v, want %s", tc.path, got, err, tc.want)
		}
	}
}

// TestDeciderIsShown guards that the access log, the placeholder by and the line of
// a denial at DEBUG say what decided, in the course of an outage of Redis.
func TestDeciderIsShown(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t)
	s := sitetest.StartConfig(t, sitetest.Config{Global: sitetest.RedisGlobal(redis.Addr), Site: `
		header >by {http.rate_limit.by}
		rate_limit api {
			key all
			size 1
			drip_rate 1h
			log
		}
		respond admitted
	`})
	tell := func() string {
		a := s.Get("/")
		access := s.LastAccess()
		shown := access["rate_limit"].(map[string]any)
		if _, ok := shown["waited"].(float64); !ok {
			t.Errorf("the access log does not say how long the request waited: %v", shown)
		}
		if shown["by"] != a.Header.Get("by") {
			t.Errorf("the access log says %v, the placeholder %q", shown["by"], a.Header.Get("by"))
		}
		return shown["result"].(string) + " " + shown["by"].(string)
	}
	if got := tell(); got != "admitted redis" {
		t.Errorf("got %s", got)
	}
	denied := map[string]bool{}
	sitetest.Eventually(t, "denials by Redis and by what this process remembers", func() bool {
		denied[tell()] = true
		return denied["denied remembered"]
	})
	redis.Kill()
	sitetest.Eventually(t, "a denial by the fallback", func() bool {
		denied[tell()] = true
		return denied["denied fallback"]
	})
	lines := make(map[string]bool)
	for _, e := range s.Log("debug", sitetest.OwnLogger) {
		if e["msg"] == "request rejected" && e["limit"] == "api" {
			lines["denied "+e["by"].(string)] = true
		}
	}
	for by := range denied {
		if !lines[by] {
			t.Errorf("no line at DEBUG says %s: %v", by, lines)
		}
	}
}

// TestAccessLogWithoutDecision guards that the access log has requests that
// passed or failed because Redis was unavailable.
func TestAccessLogWithoutDecision(t *testing.T) {
	t.Parallel()
	for onError, status := range map[string]int{"allow": http.StatusOK, "deny": http.StatusServiceUnavailable} {
		t.Run(onError, func(t *testing.T) {
			s := sitetest.StartConfig(t, sitetest.Config{
				Global: sitetest.RedisGlobal(redistest.FreeAddr(t)),
				Site:   "rate_limit api {\nsize 1\non_error " + onError + "\nlog\n}\nrespond admitted",
			})
			if got := s.Get("/"); got.StatusCode != status {
				t.Errorf("got %s", got)
			}
			shown := s.LastAccess()["rate_limit"].(map[string]any)
			if shown["result"] != "undecided" || shown["limit"] != nil {
				t.Errorf("got %v", shown)
			}
		})
	}
}

// TestSpanAttributes guards that spans tell what was decided, without a key.
func TestSpanAttributes(t *testing.T) {
	spans := sitetest.CollectSpans(t)
	s := sitetest.Start(t, `
		tracing {
			span site
		}
		rate_limit tight {
			key secret-key
			size 1
			cost {query.cost}
		}
		respond admitted
		handle_errors {
			respond denied
		}
	`)
	for _, tc := range []struct {
		path string
		want []string
	}{
		{"/?cost=1", []string{"result", "admitted", "limit", "tight", "by", "memory", "remaining"}},
		{"/?cost=1", []string{"result", "denied", "limit", "tight", "by", "memory", "remaining"}},
		{"/?cost=x", []string{"result", "refused"}},
	} {
		s.Get(tc.path)
		select {
		case span := <-spans:
			rest := span
			for i, want := range tc.want {
				if i%2 == 0 {
					want = "caddy.rate_limit." + want
				}
				_, after, found := strings.Cut(rest, want)
				if !found {
					t.Errorf("%s: the span lacks %s: %q", tc.path, want, span)
				}
				rest = after
			}
			if strings.Contains(span, "secret-key") {
				t.Errorf("%s: the span has the key: %q", tc.path, span)
			}
			if tc.want[1] == "refused" && strings.Contains(span, "rate_limit.limit") {
				t.Errorf("%s: the span has a limit: %q", tc.path, span)
			}
		case <-time.After(sitetest.Patience):
			t.Fatalf("%s: no span", tc.path)
		}
	}
}
