package behaviour

import (
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

func init() {
	caddy.RegisterModule(new(holder))
	httpcaddyfile.RegisterHandlerDirective("test_holder",
		func(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
			parsed, err := httpcaddyfile.ParseSegmentAsSubroute(h)
			if err != nil {
				return nil, err
			}
			return &holder{parsed.(*caddyhttp.Subroute).Routes}, nil
		})
}

// holder is a handler with routes in it that nothing else knows of, as plugins
// may have.
type holder struct {
	Routes caddyhttp.RouteList `json:"routes"`
}

func (*holder) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.test_holder", New: func() caddy.Module { return new(holder) }}
}

func (h *holder) Provision(ctx caddy.Context) error { return h.Routes.Provision(ctx) }

func (h *holder) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	return h.Routes.Compile(next).ServeHTTP(w, r)
}

// failures is a limit on failed logins, as a directive, as a handler in JSON and
// as a named route.
const (
	failures      = "rate_limit failures {\nsize 1\ndrip_rate 30s\n}\n"
	failuresJSON  = `{"handler": "rate_limit", "limits": [{"name": "failures", "size": 1, "drip_rate": "30s"}]}`
	failuresRoute = "\n&(failures) {\n" + failures + "}\n"
)

// TestDenialWithinErrorRoutes guards that a limit in error routes, as against
// those who keep failing to log in, answers 429 and not the status of the first
// error, wherever it is in them, and that this is no error of Caddy's; and
// that its fields and those of limits before it are kept clean of an upstream's.
func TestDenialWithinErrorRoutes(t *testing.T) {
	t.Parallel()
	upstream := sitetest.NewUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-RateLimit-Limit", "5000")
		io.WriteString(w, "error page")
	})
	const (
		failing = `{"handle": [{"handler": "error", "status_code": "401"}]}`
		page    = `{"handler": "static_response", "status_code": "401", "body": "error page"}`

		page401 = "respond \"error page\" 401\n"
		invoked = "invoke failures\n" + page401
		before  = "rate_limit all {\nsize 10\ndrip_rate 1m\n}\n"
	)
	on401 := func(routes string) string { return "error 401\nhandle_errors 401 {\n" + routes + "}\n" }
	for name, c := range map[string]sitetest.Config{
		"of the server": {Site: on401(failures + page401)},
		"of the server, behind another and before an upstream": {Site: before + on401(
			failures+"reverse_proxy "+upstream+" {\nreplace_status 401\n}\n")},
		"of a subroute": {Routes: `[{"handle": [{"handler": "subroute", "routes": [` + failing + `],
			"errors": {"routes": [{"handle": [` + failuresJSON + `, ` + page + `]}]}}]}]`},
		"in a named route": {Site: on401(invoked), Sites: failuresRoute},
		"in a named route that another invokes": {
			Site:  on401("invoke outer\n" + page401),
			Sites: failuresRoute + "&(outer) {\ninvoke failures\n}",
		},
		"in a named route that is invoked elsewhere too": {
			Site: "route /elsewhere {\ninvoke failures\n}\n" + on401(invoked), Sites: failuresRoute,
		},
		"in a named route that error routes of a subroute invoke too": {
			Site: on401(invoked),
			Routes: `[
				{"match": [{"path": ["/elsewhere"]}], "handle": [{"handler": "subroute", "routes": [` + failing + `],
					"errors": {"routes": [{"handle": [{"handler": "invoke", "name": "failures"}]}]}}]},
				` + failing + `]`,
			Sites: "http://other.test:{port} {\ninvoke failures\n}" + failuresRoute,
		},
		"of a proxy's handle_response": {Site: on401(
			"reverse_proxy " + upstream + " {\n@any status 2xx\nhandle_response @any {\n" + failures + page401 + "}\n}\n")},
		"in routes of another plugin": {Site: on401("route {\ntest_holder {\n" + failures + page401 + "}\n}\n")},
		"of a subroute, with routes of another plugin": {Routes: `[{"handle": [{"handler": "subroute",
			"routes": [` + failing + `],
			"errors": {"routes": [{"handle": [{"handler": "test_holder", "routes": [
				{"handle": [` + failuresJSON + `, ` + page + `]}]}]}]}}]}]`},
	} {
		t.Run(name, func(t *testing.T) {
			s := sitetest.StartConfig(t, c)
			clear := []string{"30.000", "30.000", "30.000"}
			if strings.HasPrefix(c.Site, before) {
				clear = []string{"60.000", "120.000", "150.000"}
			}
			s.Run(
				sitetest.Step{Want: "401 limit=1 remaining=0 clear=" + clear[0], Text: "error page"},
				sitetest.Step{Want: "429 limit=1 remaining=0 clear=" + clear[1] + " reset=30.000 retry-after=30"},
				sitetest.Step{After: 30 * time.Second, Want: "401 limit=1 remaining=0 clear=" + clear[2], Text: "error page"},
			)
			for _, e := range s.Log("error", sitetest.ErrorLogger) {
				t.Errorf("a denial is logged: %v", e)
			}
		})
	}
}

// TestErrorRoutesOfOtherSites guards that error routes of one site change
// nothing for another, also where both are of one server: what is done to the
// 429 of a site without error routes is done whether its neighbour has some or
// not.
func TestErrorRoutesOfOtherSites(t *testing.T) {
	t.Parallel()
	const site = `
		route {
			header -X-RateLimit-Clear
			header >X-Deferred yes
			intercept {
				@denied status 429
				handle_response @denied {
					respond "intercepted" 429
				}
			}
			rate_limit {
				size 1
			}
			respond "admitted"
		}
	`
	for name, sites := range map[string]string{
		"alone":                "",
		"beside a site":        "http://other.test:{port} {\nrespond other\n}",
		"beside error routes":  "http://other.test:{port} {\nhandle_errors {\nrespond {err.message}\n}\n}",
		"beside those of path": "http://127.0.0.1:{port}/other {\nhandle_errors {\nrespond {err.message}\n}\n}",
		"beside some for 4xx":  "http://*.other.test:{port} {\nhandle_errors 4xx {\nrespond {err.message}\n}\n}",
	} {
		t.Run(name, func(t *testing.T) {
			s := sitetest.StartConfig(t, sitetest.Config{Site: site, Sites: sites})
			s.Run(
				sitetest.Step{Want: "200 limit=1 remaining=0", Text: "admitted"},
				sitetest.Step{Want: "429 limit=1 remaining=0 reset=1.000 retry-after=1", Text: "intercepted"},
			)
			if got := s.Get("/").Header.Get("X-Deferred"); got != "yes" {
				t.Errorf("a deferred field is %q on a denial", got)
			}
		})
	}
}

// TestErrorRoutesOfOtherStatuses guards that error routes for other statuses change nothing for
// a denial, which gets its line of text, and that those for its own handle it.
func TestErrorRoutesOfOtherStatuses(t *testing.T) {
	t.Parallel()
	const limit, text = "rate_limit a {\nsize 1\ndrip_rate 1h\n}\nrespond ok\n", "Too many requests. Retry after 3600 s.\n"
	page := func(codes string) string { return "handle_errors " + codes + " {\nrespond page\n}\n" }
	for name, tc := range map[string]struct{ site, sites, want string }{
		"none":              {limit, "", text},
		"another":           {limit + page("404"), "", text},
		"others":            {limit + page("404 500 5xx") + page("3xx"), "", text},
		"its own":           {limit + page("429"), "", "page"},
		"its class":         {limit + page("500 4xx"), "", "page"},
		"one of several":    {limit + page("404") + page("429 503"), "", "page"},
		"all":               {limit + page("404") + page(""), "", "page"},
		"those of a host":   {"respond other", "http://localhost:{port} {\n" + limit + page("404") + "}", text},
		"its own of a host": {"respond other", "http://localhost:{port} {\n" + limit + page("404 429") + "}", "page"},
	} {
		t.Run(name, func(t *testing.T) {
			s := sitetest.StartConfig(t, sitetest.Config{Site: tc.site, Sites: tc.sites})
			var host []string
			if tc.sites != "" {
				host = []string{"Host: localhost"}
			}
			s.Get("/", host...)
			if got := s.Get("/", host...); got.StatusCode != 429 || got.Text != tc.want {
				t.Errorf("got %s %q, want 429 %q", got, got.Text, tc.want)
			}
		})
	}
}

// TestErrorRoutesOfRewrittenPath guards that a denial gets to the error routes
// of its site by the path that was asked for, as Caddy goes by that, though it
// was rewritten.
func TestErrorRoutesOfRewrittenPath(t *testing.T) {
	t.Parallel()
	s := sitetest.StartConfig(t, sitetest.Config{
		Site: "respond elsewhere",
		Sites: `
			http://127.0.0.1:{port}/shop/* {
				rewrite * /rewritten
				rate_limit {
					size 1
				}
				respond "admitted"
				handle_errors {
					respond "{err.message}"
				}
			}
		`,
	})
	s.Run(
		sitetest.Step{Path: "/shop/a", Want: "200 limit=1 remaining=0 clear=1.000", Text: "admitted"},
		sitetest.Step{Path: "/shop/a", Want: "429 limit=1 remaining=0 clear=1.000 reset=1.000 retry-after=1",
			Text: "rate limit default exceeded: retry after 1 s"},
	)
}

// TestHeaderDirectiveOnDenials guards what the documentation says of header and
// intercept on a 429: what is around the limit acts on it where no error
// route can see it; otherwise Caddy leaves only what is in the error route.
func TestHeaderDirectiveOnDenials(t *testing.T) {
	t.Parallel()
	const (
		outside = "header -X-RateLimit-Clear\n"
		shaped  = "handle_errors {\nrespond shaped\n}\n"
		all     = "429 limit=1 remaining=0 clear=1.000 reset=1.000 retry-after=1"
		less    = "429 limit=1 remaining=0 reset=1.000 retry-after=1"
	)
	for _, tc := range []struct{ name, outside, errors, want, body string }{
		{"nothing", "", "", all, sitetest.PlainDenial},
		{"outside", outside, "", less, sitetest.PlainDenial},
		{"outside, with error routes", outside, shaped, all, "shaped"},
		{"in error routes", "", "handle_errors {\n" + outside + "respond shaped\n}", less, "shaped"},
		{"in error routes that answer nothing", "", "handle_errors {\n" + outside + "}", less, ""},
		{"in error routes for others", outside, "handle_errors 5xx {\n" + outside + "}", less, sitetest.PlainDenial},
		{"replaced in error routes", "", "handle_errors {\nheader >X-RateLimit-Clear many\nrespond shaped\n}",
			"429 limit=1 remaining=0 clear=many reset=1.000 retry-after=1", "shaped"},
		{"intercepted", "intercept {\nreplace_status 503\n}\n", "", "503" + all[3:], sitetest.PlainDenial},
		{"intercepted, with error routes", "intercept {\nreplace_status 503\n}\n", shaped, all, "shaped"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := sitetest.Start(t, "route {\n"+tc.outside+"rate_limit {\nsize 1\n}\nrespond admitted\n}\n"+tc.errors)
			s.Get("/")
			a := s.Get("/")
			if a.String() != tc.want || a.Text != tc.body {
				t.Errorf("got %s %q, want %s %q", a, a.Text, tc.want, tc.body)
			}
		})
	}
	t.Run("in Caddy's order", func(t *testing.T) {
		s := sitetest.Start(t, "intercept {\nreplace_status 503\n}\nrate_limit {\nsize 1\n}\nheader >X-RateLimit-Clear many\nrespond admitted")
		s.Run(
			sitetest.Step{Want: "503 limit=1 remaining=0 clear=many"},
			sitetest.Step{Want: "429 limit=1 remaining=0 clear=many reset=1.000 retry-after=1"},
		)
	})
}

// TestClientsCannotFillTheLog guards that whatever refuses a request, and wherever
// the limit is, clients bring about a line a minute at most, and that no line
// of ours, nor any above DEBUG, has a header field of theirs. What Caddy itself
// says at DEBUG of errors and proxies, and in its access log, has.
func TestClientsCannotFillTheLog(t *testing.T) {
	t.Parallel()
	const canary = "canary-5fd4a1"
	upstream := sitetest.NewUpstream(t, func(w http.ResponseWriter, r *http.Request) {})
	limits := func(name string) string {
		return `
			rate_limit ` + name + ` {
				key {header.X-Api-Key}
				on_error deny
				limit number {
					match query number=*
					size {query.number}
				}
				limit matching {
					match expression ` + "`{http.request.uri.query.n} == '' || int({http.request.uri.query.n}) > 0`" + `
					size 2
				}
				limit plain {
					match query plain=*
					size 2
				}
			}
		`
	}
	named := "&(limited) {" + limits("named") + "}"
	json := func(routes string) string {
		return fmt.Sprintf(routes, `{"handler": "rate_limit", "on_error": "deny",
		"limits": [{"name": "named", "key": "{http.request.header.X-Api-Key}", "limits": [
			{"name": "number", "match": [{"query": {"number": ["*"]}}], "size": "{http.request.uri.query.number}"},
			{"name": "matching", "size": 2,
				"match": [{"expression": "{http.request.uri.query.n} == '' || int({http.request.uri.query.n}) > 0"}]},
			{"name": "plain", "match": [{"query": {"plain": ["*"]}}], "size": 2}]}]}`)
	}
	for _, tc := range []struct {
		name   string
		config sitetest.Config
	}{
		{"in a site", sitetest.Config{Site: limits("x")}},
		{"in a named route", sitetest.Config{Site: "invoke limited", Sites: named}},
		{"in handle_response", sitetest.Config{Site: "reverse_proxy " + upstream +
			" {\n@any status 2xx\nhandle_response @any {" + limits("x") + "\n}\n}"}},
		{"behind intercept", sitetest.Config{Site: "intercept {\nhandle_response {" + limits("x") + "\n}\n}\nrespond 200"}},
		{"in error routes", sitetest.Config{Site: "error 404\nhandle_errors {" + limits("x") + "\nrespond 404\n}"}},
		{"in a named route in error routes", sitetest.Config{
			Site: "error 404\nhandle_errors {\ninvoke limited\nrespond 404\n}", Sites: named}},
		{"with error routes", sitetest.Config{Site: limits("x") + "handle_errors {\nrespond {err.message}\n}"}},
		{"with error routes for others", sitetest.Config{Site: limits("x") + "handle_errors 404 {\nrespond {err.message}\n}"}},
		{"with error routes of another site", sitetest.Config{Site: limits("x"),
			Sites: "http://other.test:{port} {\nhandle_errors {\nrespond {err.message}\n}\n}"}},
		{"beside a subroute that has error routes", sitetest.Config{Routes: json(
			`[{"match": [{"path": ["/other"]}], "handle": [{"handler": "subroute", "routes": [], "errors": {"routes": [
				{"handle": [{"handler": "static_response"}]}]}}]},
			{"handle": [%s]}]`)}},
		{"in routes of another plugin", sitetest.Config{Routes: json(
			`[{"handle": [{"handler": "test_holder", "routes": [{"handle": [%s]}]}]}]`)}},
		{"in routes of another plugin, beside error routes", sitetest.Config{Routes: json(
			`[{"match": [{"path": ["/other"]}], "handle": [{"handler": "subroute", "routes": [], "errors": {"routes": [
				{"handle": [{"handler": "static_response"}]}]}}]},
			{"handle": [{"handler": "test_holder", "routes": [{"handle": [%s]}]}]}]`)}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tc.config.Global = sitetest.RedisGlobal(redistest.FreeAddr(t), sitetest.LongTimeout)
			s := sitetest.StartConfig(t, tc.config)
			for range 10 {
				for path, want := range map[string]int{
					"/?number=many": 500, "/?number=2&plain=1": 503, "/?n=x&plain=1": 500,
				} {
					if a := s.Get(path, "X-Api-Key: "+canary, "Cookie: "+canary); a.StatusCode != want {
						t.Fatalf("%s: got %s, want %d", path, a, want)
					}
				}
			}
			lines := map[string]int{}
			for _, e := range s.Entries() {
				if e["msg"] == "handled request" || e["msg"] == "evaluating expression" { // Caddy's own
					continue
				}
				if e["level"] == "error" || e["level"] == "warn" {
					// With the server: one of the config before may be found down only now.
					lines[fmt.Sprint(e["logger"], ": ", e["msg"], " ", e["server"])]++
				}
				if e["level"] != "debug" && strings.Contains(fmt.Sprint(e), canary) ||
					e.Is("debug", sitetest.OwnLogger) && strings.Contains(fmt.Sprint(e), canary) {
					t.Errorf("a header field is in the log: %v", e)
				}
			}
			for line, n := range lines {
				if n > 1 {
					t.Errorf("%d times in the log: %s", n, line)
				}
			}
		})
	}
}

// TestErrorPlaceholders guards that error routes make the body of an answer, that
// our fields survive it, and that the routes find all that they find in errors of
// Caddy's own: a text that says what to do, an id for each, and where it comes from.
func TestErrorPlaceholders(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, `
		rate_limit {
			limit one {
				match /one
				size 1
				drip_rate 90s
			}
			limit never {
				match /never
				size {header.X-Size}
				cost 2
			}
			limit costly {
				match /costly
				size 9
				cost {header.X-Cost}
			}
		}
		handle_errors 429 {
			header Content-Type text/plain
			respond "{err.status_code} {err.status_text}: {err.message} ({http.rate_limit.exceeded.name}) {err.id} {err.trace}"
		}
		handle_errors {
			header Content-Type text/plain
			respond "{err.status_code} {err.status_text}: {err.message} {err.id} {err.trace}"
		}
		respond "admitted"
	`)
	s.Get("/one")
	ids := map[string]bool{}
	for path, want := range map[string]struct{ fields, text string }{
		"/one": {
			"429 limit=1 remaining=0 clear=90.000 reset=90.000 retry-after=90",
			"429 Too Many Requests: rate limit one exceeded: retry after 90 s (one)",
		},
		"/never": {
			"429 limit=1 remaining=1 clear=0.000",
			"429 Too Many Requests: rate limit never exceeded: the request costs more than the limit holds (never)",
		},
		"/costly": {"400", "400 Bad Request: rate limits can't be checked for this request"},
	} {
		pattern := regexp.MustCompile(`^` + regexp.QuoteMeta(want.text) +
			` ([a-z0-9]{9}) \S+\.\(\*Handler\)\.\w+ \(\w+\.go:\d+\)$`)
		for range 2 {
			a := s.Get(path, "X-Size: 1")
			found := pattern.FindStringSubmatch(a.Text)
			if found == nil {
				t.Fatalf("%s: got %q, want %s", path, a.Text, pattern)
			}
			ids[found[1]] = true
			if kind := a.Header.Get("Content-Type"); a.String() != want.fields || kind != "text/plain" {
				t.Errorf("%s: got %s of type %q, want %s of type text/plain", path, a, kind, want.fields)
			}
		}
	}
	if len(ids) != 6 {
		t.Errorf("6 errors have %d ids", len(ids))
	}
	for _, e := range s.Log("debug", sitetest.ErrorLogger) {
		if id, _ := e["err_id"].(string); !ids[id] {
			t.Errorf("a line in the log has another id: %v", e)
		}
	}
}

// TestDenialsReachErrorRoutes guards that a denial is an error wherever an error
// route might shape it, and written directly, which costs less, where none
// could.
func TestDenialsReachErrorRoutes(t *testing.T) {
	t.Parallel()
	const (
		limit    = `{"handler": "rate_limit", "limits": [{"size": 1}]}`
		admitted = `{"handler": "static_response", "body": "admitted"}`
		shaped   = `{"routes": [{"handle": [{"handler": "static_response", "body": "{http.error.message}"}]}]}`
		text     = "rate limit default exceeded: retry after 1 s"
	)
	upstream := sitetest.NewUpstream(t, func(w http.ResponseWriter, r *http.Request) {})
	proxy := fmt.Sprintf(`{"handler": "reverse_proxy", "upstreams": [{"dial": %q}],
		"handle_response": [{"routes": [{"handle": [%s, %s]}]}]}`, upstream, limit, admitted)

	for _, tc := range []struct {
		name     string
		config   sitetest.Config
		returned bool
		body     string
	}{
		{
			name:   "no error routes",
			config: sitetest.Config{Site: "rate_limit {\nsize 1\n}\nrespond admitted"},
		},
		{
			name: "in blocks, without error routes",
			config: sitetest.Config{Site: `
				route {
					handle / {
						rate_limit {
							size 1
						}
						respond "admitted"
					}
				}
			`},
		},
		{
			name: "error routes of the server",
			config: sitetest.Config{Site: `
				rate_limit {
					size 1
				}
				handle_errors {
					respond "{err.message}"
				}
				respond "admitted"
			`},
			returned: true, body: text,
		},
		{
			name: "error routes of the server, for others than 429",
			config: sitetest.Config{Site: `
				rate_limit {
					size 1
				}
				handle_errors 5xx {
					respond "{err.message}"
				}
				respond "admitted"
			`},
		},
		{
			name: "error routes of another site of the server",
			config: sitetest.Config{
				Site: "rate_limit {\nsize 1\n}\nrespond admitted",
				Sites: `
				http://other.test:{port} {
					handle_errors {
						respond "{err.message}"
					}
				}
			`},
		},
		{
			name: "error routes of a site for all hosts",
			config: sitetest.Config{
				Site: "rate_limit {\nsize 1\n}\nrespond admitted",
				Sites: `
				http://:{port} {
					handle_errors {
						respond "{err.message}"
					}
				}
			`},
			returned: true, body: text,
		},
		{
			name: "error routes of another server",
			config: sitetest.Config{
				Site: "rate_limit {\nsize 1\n}\nrespond admitted",
				Sites: `
				http://other.test:0 {
					handle_errors {
						respond "{err.message}"
					}
				}
			`},
		},
		{
			name: "error routes of the subroute it is in",
			config: sitetest.Config{Routes: `[{"handle": [{"handler": "subroute",
				"routes": [{"handle": [` + limit + `, ` + admitted + `]}], "errors": ` + shaped + `}]}]`},
			returned: true, body: text,
		},
		{
			name: "error routes of a subroute further out",
			config: sitetest.Config{Routes: `[{"handle": [{"handler": "subroute", "routes": [{"handle": [
				{"handler": "subroute", "routes": [{"handle": [` + limit + `, ` + admitted + `]}]}
				]}], "errors": ` + shaped + `}]}]`},
			returned: true, body: text,
		},
		{
			name: "error routes of a subroute beside it",
			config: sitetest.Config{Routes: `[
				{"match": [{"path": ["/other"]}], "handle": [{"handler": "subroute", "errors": ` + shaped + `}]},
				{"handle": [` + limit + `, ` + admitted + `]}]`},
			returned: true,
		},
		{
			name: "error routes of a subroute beside it, behind which nothing comes",
			config: sitetest.Config{Routes: `[
				{"match": [{"path": ["/other"]}], "handle": [{"handler": "subroute", "routes": [], "errors": ` + shaped + `}],
					"terminal": true},
				{"handle": [` + limit + `, ` + admitted + `]}]`},
		},
		{
			name: "a named route, without error routes",
			config: sitetest.Config{Site: "invoke limited\nrespond admitted", Sites: `
				&(limited) {
					rate_limit {
						size 1
					}
				}
			`},
		},
		{
			name: "a named route, and error routes of the server",
			config: sitetest.Config{Site: `
				invoke limited
				respond "admitted"
				handle_errors {
					respond "{err.message}"
				}
			`, Sites: `
				&(limited) {
					rate_limit {
						size 1
					}
				}
			`},
			returned: true, body: text,
		},
		{
			name:   "routes that handle a proxy's response, without error routes",
			config: sitetest.Config{Routes: `[{"handle": [` + proxy + `]}]`},
		},
		{
			name: "routes for intercepted responses, without error routes",
			config: sitetest.Config{Site: `
				route {
					intercept {
						handle_response {
							rate_limit {
								size 1
							}
							respond "admitted"
						}
					}
					respond 200
				}
			`},
		},
		{
			name: "behind a subroute that has error routes",
			config: sitetest.Config{Routes: `[
				{"handle": [{"handler": "subroute", "routes": [{"handle": [{"handler": "vars"}]}], "errors": ` + shaped + `}]},
				{"handle": [` + limit + `, ` + admitted + `]}]`},
			returned: true, body: text,
		},
		{
			name: "in front of a subroute that has error routes",
			config: sitetest.Config{Routes: `[
				{"handle": [` + limit + `]},
				{"handle": [{"handler": "subroute", "routes": [{"handle": [` + admitted + `]}], "errors": ` + shaped + `}]}]`},
		},
		{
			name: "a subroute whose error routes are none",
			config: sitetest.Config{Routes: `[{"handle": [
				{"handler": "subroute", "routes": [{"handle": [` + limit + `]}], "errors": {}}, ` + admitted + `]}]`},
		},
		{
			name: "a named route that a subroute with error routes invokes",
			config: sitetest.Config{
				Site: "invoke limited",
				Routes: `[{"handle": [{"handler": "subroute", "errors": ` + shaped + `,
					"routes": [{"handle": [{"handler": "invoke", "name": "limited"}, ` + admitted + `]}]}]}]`,
				Sites: "&(limited) {\nrate_limit {\nsize 1\n}\n}",
			},
			returned: true, body: text,
		},
		{
			name:     "routes of another plugin, which may do anything with errors",
			config:   sitetest.Config{Routes: `[{"handle": [{"handler": "test_holder", "routes": [{"handle": [` + limit + `, ` + admitted + `]}]}]}]`},
			returned: true,
		},
		{
			name: "routes that handle a proxy's response within a subroute with error routes",
			config: sitetest.Config{Routes: `[{"handle": [{"handler": "subroute",
				"routes": [{"handle": [` + proxy + `]}], "errors": ` + shaped + `}]}]`},
			returned: true, body: text,
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := sitetest.StartConfig(t, tc.config)
			s.Run(sitetest.Step{Want: "200 limit=1 remaining=0 clear=1.000", Text: "admitted"})
			methods := []string{"GET", "HEAD", "POST", "OPTIONS"}
			for _, method := range methods {
				a, body := s.Send(method, "/"), tc.body
				if !tc.returned {
					body = sitetest.PlainDenial
				}
				if method == "HEAD" {
					body = ""
				}
				if want := "429 limit=1 remaining=0 clear=1.000 reset=1.000 retry-after=1"; a.String() != want || a.Text != body {
					t.Errorf("%s: got %s and body %q, want %s and %q", method, a, a.Text, want, body)
				}
				if kind := a.Header.Get("Content-Type"); !tc.returned && kind != "" && kind != "text/plain; charset=utf-8" {
					t.Errorf("%s: got content of type %q, want plain text", method, kind)
				}
			}
			var written int
			for _, e := range s.Log("debug", sitetest.OwnLogger) {
				if e["msg"] == "request rejected" && e["status"] == 429.0 {
					written++
				}
			}
			if want := map[bool]int{true: 0, false: len(methods)}[tc.returned]; written != want {
				t.Errorf("%d of %d denials were written directly, want %d", written, len(methods), want)
			}
		})
	}
}

// TestErrorsRevealLittleToClients guards that error routes which show an error's
// text tell clients neither where Redis is nor what the configuration says.
func TestErrorsRevealLittleToClients(t *testing.T) {
	t.Parallel()
	addr := redistest.FreeAddr(t)
	s := sitetest.StartConfig(t, sitetest.Config{Global: sitetest.RedisGlobal(addr, sitetest.LongTimeout), Site: `
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
		a := s.Get("/", "X-Cost: "+cost)
		if want := "rate limits can't be checked for this request"; a.StatusCode != status || a.Text != want {
			t.Errorf("cost %s: got %d %q, want %d %q", cost, a.StatusCode, a.Text, status, want)
		}
	}
	if lines := s.Log("error", sitetest.OwnLogger); len(lines) != 1 {
		t.Errorf("got %v, want one line in the log, on the cost", lines)
	}
}

// TestDenialsAreNotLogged guards that denied clients can't flood the log, and
// that nothing in it tells whose bucket a request met.
func TestDenialsAreNotLogged(t *testing.T) {
	t.Parallel()
	const canary = "canary-5fd4a1"
	for name, site := range map[string]string{
		"directly":             "",
		"through error routes": "handle_errors {\nrespond {err.message}\n}",
	} {
		t.Run(name, func(t *testing.T) {
			s := sitetest.Start(t, `
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
				s.Get("/", "X-Key: "+canary)
				s.Get("/never", "X-Key: "+canary, "X-Size: 1")
			}
			if got := s.Get("/", "X-Key: "+canary).StatusCode; got != 429 {
				t.Fatalf("status %d, want a denial", got)
			}
			for _, e := range s.Entries() {
				logger, _ := e["logger"].(string)
				ours := strings.HasPrefix(logger, sitetest.OwnLogger) || strings.HasPrefix(logger, sitetest.ErrorLogger)
				if ours && e["level"] != "debug" {
					t.Errorf("a denial is logged: %v", e)
				}
				if strings.Contains(e.Text(), canary) {
					t.Errorf("a key is in the log: %s", e.Text())
				}
			}
		})
	}
}
