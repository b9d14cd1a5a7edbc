package offline_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/offline"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/state"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/configtest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// dryRequestTo returns a GET request for a URL.
func dryRequestTo(url string, header ...string) *http.Request {
	r := httptest.NewRequest("GET", url, http.NoBody)
	r.URL.Scheme, r.URL.Host = "", ""
	for _, h := range header {
		name, value, _ := strings.Cut(h, ": ")
		r.Header.Add(name, value)
	}
	return r
}

// met returns the limits and keys that a request meets, such as "api=192.0.2.1".
func met(t testing.TB, d *offline.Config, r *http.Request) string {
	t.Helper()
	s, _ := d.ServerOf(r.Host, r.TLS != nil)
	var met []string
	_, err := s.Serve(offline.Request{Request: r}, func(h *offline.Handler, r *http.Request) bool {
		q, err := rule.Evaluate(r, h.Limits, time.Now())
		defer q.Release()
		for _, e := range q.Entries() {
			met = append(met, e.Path+"="+e.Query.Key)
		}
		if err != nil {
			met = append(met, fmt.Sprintf("error: %v", err))
		}
		return err == nil
	})
	if err != nil {
		met = append(met, fmt.Sprintf("error: %v", err))
	}
	return strings.Join(met, " ")
}

// dryLimit is a rate_limit block for a limit with a name.
func dryLimit(name string, options ...string) string {
	return "rate_limit " + name + " {\nrate 5/1s\n" + strings.Join(options, "\n") + "\n}\n"
}

// TestOfflineMeetsLimits guards that a request meets the limits in a config that is not started
// that it would meet in a running Caddy, with the same keys: routes, groups and
// matchers decide, and handlers that change requests have run.
func TestOfflineMeetsLimits(t *testing.T) {
	for _, tc := range []struct {
		name, site, url string
		header          []string
		want            string
	}{
		{"plain", dryLimit("a"), "/", nil, "a=192.0.2.1"},
		{"path matcher", "rate_limit /api/* a {\nrate 5/1s\n}\n", "/api/x", nil, "a=192.0.2.1"},
		{"path matcher of another path", "rate_limit /api/* a {\nrate 5/1s\n}\n", "/", nil, ""},
		{"header", dryLimit("a", "key {header.X-Key}"), "/", []string{"X-Key: k"}, "a=k"},
		{"header that is set before", "route {\nrequest_header X-Key k\n" + dryLimit("a", "key {header.X-Key}") + "}\n", "/", nil, "a=k"},
		{"header that is removed before", "route {\nrequest_header -X-Key\n" + dryLimit("a", "key {header.X-Key}") + "}\n", "/", []string{"X-Key: k"}, "a=192.0.2.1"},
		{"variable", "vars tier gold\n" + dryLimit("a", "key {vars.tier}"), "/", nil, "a=gold"},
		{"map", "map {path} {tier} {\n/gold 1\ndefault 2\n}\n" + dryLimit("a", "key {tier}"), "/gold", nil, "a=1"},
		{"two blocks", "route {\n" + dryLimit("a") + dryLimit("b") + "}\n", "/", nil, "a=192.0.2.1 b=192.0.2.1"},
		{"handle, first", "handle /x {\n" + dryLimit("a") + "}\nhandle {\n" + dryLimit("b") + "}\n", "/x", nil, "a=192.0.2.1"},
		{"handle, other", "handle /x {\n" + dryLimit("a") + "}\nhandle {\n" + dryLimit("b") + "}\n", "/y", nil, "b=192.0.2.1"},
		{"handle without limits", "handle /x {\nrespond ok\n}\nhandle {\n" + dryLimit("b") + "}\n", "/x", nil, ""},
		{"handle_path", "handle_path /x/* {\n" + dryLimit("a", "key {path}") + "}\n", "/x/y", nil, "a=/y"},
		{"rewrite before", "route {\nrewrite /x /y\nrate_limit /y a {\nrate 5/1s\n}\n}\n", "/x", nil, "a=192.0.2.1"},
		{"redirect before", "route {\nredir /x /y\n" + dryLimit("a") + "}\n", "/x", nil, ""},
		{"redirect of another path", "route {\nredir /x /y\n" + dryLimit("a") + "}\n", "/y", nil, "a=192.0.2.1"},
		{"proxy before", "route {\nreverse_proxy /x localhost:1\n" + dryLimit("a") + "}\n", "/x", nil, ""},
		{"authentication before", "route {\nbasic_auth {\nbob $2a$14$Zkx19XLiW6VYouLHR5NmfOFU0z2GTNmpkT/5qqR7hx4IjWJPDhjvG\n}\n" + dryLimit("a") + "}\n", "/", nil, "a=192.0.2.1"},
		{"proxied header", dryLimit("a"), "/", []string{"X-Forwarded-For: 203.0.113.7"}, "a=192.0.2.1"},
		{"named matcher", "@m header X-A b\nrate_limit @m a {\nrate 5/1s\n}\n", "/", []string{"X-A: b"}, "a=192.0.2.1"},
		{"regexp capture", "@m path_regexp id ^/u/(.*)$\nrate_limit @m a {\nrate 5/1s\nkey {re.id.1}\n}\n", "/u/7", nil, "a=7"},
		{"invoke", "invoke shared\n", "/", nil, "shared=192.0.2.1"},
		{"bad cost", dryLimit("a", "cost {header.X-Cost}"), "/", []string{"X-Cost: none"}, `error: limit "a": cost: text of 4 bytes from {http.request.header.X-Cost} is not valid; use a whole number`},
		{"original method", dryLimit("a", "key {http.request.orig_method}"), "/", nil, "a=GET"},
		{"local address", dryLimit("a", "key {http.request.local.port}"), "/", nil, "a=8080"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			d := configtest.LoadDry(t, "&(shared) {\n"+dryLimit("shared")+"}\nhttp://:8080 {\n"+tc.site+"}\n")
			if got := met(t, d, dryRequestTo("http://example.com:8080"+tc.url, tc.header...)); got != tc.want {
				t.Errorf("met %q, want %q", got, tc.want)
			}
		})
	}
}

// TestOfflineRefuses guards that a config in JSON that Caddy would not load is an
// error where it may have been meant to hold limits, and not one without them.
func TestOfflineRefuses(t *testing.T) {
	const limit = `{"handler": "rate_limit", "limits": [{"size": 5}]}`
	for _, tc := range []struct{ config, want string }{
		{`{"app": {}}`, `decoding the config: json: unknown field "app"`},
		{`{"apps": {"http": {"server": {}}}}`, `decoding the http app: json: unknown field "server"`},
		{`{"apps": {"http": {"servers": {"a": {"route": [{"handle": [` + limit + `]}]}}}}}`, `decoding the http app: json: unknown field "route"`},
		{`{"apps": {"http": {"servers": {"a": {"routes": [{"handle": ` + limit + `}]}}}}}`, `decoding the http app: json: cannot unmarshal object`},
		{`{"apps": {"http": {"servers": {"a": {"routes": [{"handle": [{"handler": "subroute", "routes": [{"handle": ` + limit + `}]}]}]}}}}}`,
			`server "a": decoding a subroute: json: cannot unmarshal object`},
		{`{"apps": {"http": {"servers": {"a": {"named_routes": {"b": {"handle": [{"handler": "subroute", "rout": []}]}}}}}}}`,
			`server "a": decoding a subroute: json: unknown field "rout"`},
	} {
		d, err := offline.New([]byte(tc.config))
		if err == nil {
			d.Close()
		}
		if err == nil || !strings.HasPrefix(err.Error(), tc.want) {
			t.Errorf("%s: got error %v, want %s", tc.config, err, tc.want)
		}
		if err := configtest.Validate([]byte(tc.config)); err == nil {
			t.Errorf("%s: Caddy loads it", tc.config)
		}
	}
}

// TestOfflineRefusesLoops guards that named routes which invoke themselves, also through others, are an
// error, wherever the limits are: no request would come to an end.
func TestOfflineRefusesLoops(t *testing.T) {
	const limit, invoke = `{"handler": "rate_limit", "limits": [{"size": 5}]}`, `{"handler": "invoke", "name": %q}`
	for _, tc := range []struct{ first, second string }{
		{fmt.Sprintf(invoke, "a"), limit},
		{limit + "," + fmt.Sprintf(invoke, "b"), fmt.Sprintf(invoke, "a")},
		{`{"handler": "subroute", "routes": [{"handle": [` + fmt.Sprintf(invoke, "b") + `]}]}`, fmt.Sprintf(invoke, "a") + "," + limit},
	} {
		config := fmt.Sprintf(`{"apps": {"http": {"servers": {"s": {"named_routes": {"a": {"handle": [%s]}, "b": {"handle": [%s]}}}}}}}`, tc.first, tc.second)
		d, err := offline.New([]byte(config))
		if err == nil {
			d.Close()
		}
		if err == nil || !strings.HasSuffix(err.Error(), "invokes itself") {
			t.Errorf("%s: got error %v", config, err)
		}
	}
}

// provisioned is how often Caddy has provisioned the handler test_provisioned.
var provisioned atomic.Int32

// provisionedHandler counts that it is provisioned, and passes requests on.
type provisionedHandler struct{}

// CaddyModule returns the Caddy module information.
func (provisionedHandler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.test_provisioned", New: func() caddy.Module { return new(provisionedHandler) }}
}

// Provision implements caddy.Provisioner.
func (provisionedHandler) Provision(caddy.Context) error { provisioned.Add(1); return nil }

// ServeHTTP implements caddyhttp.MiddlewareHandler.
func (provisionedHandler) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	return next.ServeHTTP(w, r)
}

func init() {
	caddy.RegisterModule(provisionedHandler{})
	httpcaddyfile.RegisterHandlerDirective("test_provisioned", func(httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
		return provisionedHandler{}, nil
	})
}

// TestOfflineRunsNothing guards that loading a config does nothing that running
// it would: no log file, no module of another kind, no Redis.
func TestOfflineRunsNothing(t *testing.T) {
	log := filepath.Join(sitetest.TempDir(t), "access.log")
	d := configtest.LoadDry(t, `{
		log {
			output file `+log+`
		}
		storage file_system /nonexistent
		rate_limit {
			redis 192.0.2.1:6379
		}
	}
	http://:8080 {
		log {
			output file `+log+`.2
		}
		`+dryLimit("a")+`
		route {
			test_provisioned
			reverse_proxy 192.0.2.1:80 {
				health_uri /
			}
		}
	}`)
	if got := met(t, d, dryRequestTo("http://example.com:8080/")); got != "a=192.0.2.1" {
		t.Errorf("met %q", got)
	}
	for _, name := range []string{log, log + ".2"} {
		if _, err := os.Stat(name); err == nil {
			t.Errorf("%s was made", name)
		}
	}
	if _, redis := sitetest.StoresInUse(state.Default); redis > 0 {
		t.Error("it opened a Redis")
	}
	if n := provisioned.Load(); n != 0 {
		t.Errorf("another handler was provisioned %d times", n)
	}
}

// TestOfflineWarns guards that it is said what was left out, if it may matter.
func TestOfflineWarns(t *testing.T) {
	for _, tc := range []struct {
		name, site string
		want       []string
	}{
		{"nothing", "encode\n" + dryLimit("a") + "reverse_proxy localhost:1\n", nil},
		{"authentication", "route {\nbasic_auth {\nbob $2a$14$Zkx19XLiW6VYouLHR5NmfOFU0z2GTNmpkT/5qqR7hx4IjWJPDhjvG\n}\n" + dryLimit("a") + "}\n",
			[]string{"Server srv0: the handler authentication is not run; it is assumed to pass all requests on, as they are."}},
		{"authentication after", "route {\n" + dryLimit("a") + "basic_auth {\nbob $2a$14$Zkx19XLiW6VYouLHR5NmfOFU0z2GTNmpkT/5qqR7hx4IjWJPDhjvG\n}\n}\n", nil},
		{"error routes", dryLimit("a") + "handle_errors {\n" + dryLimit("b") + "}\n",
			[]string{"Server srv0: limits in error routes are left out."}},
		{"unreachable", "route {\nrespond ok\n" + dryLimit("a") + "}\n",
			[]string{"Server srv0: limits after the handler static_response are left out, since it passes no request on."}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if got := configtest.LoadDry(t, "http://:8080 {\n"+tc.site+"}\n").Warnings; !slices.Equal(got, tc.want) {
				t.Errorf("got %q, want %q", got, tc.want)
			}
		})
	}
}

// TestOfflineFindsServer guards which server of several a request goes to.
func TestOfflineFindsServer(t *testing.T) {
	d := configtest.LoadDry(t, `
		example.com {
			`+dryLimit("https")+`
		}
		http://plain.example.com {
			`+dryLimit("http")+`
		}
		http://:8080 {
			`+dryLimit("port")+`
		}
		http://alt.example.com:8081 {
			`+dryLimit("alt")+`
		}
		*.wild.example.com:8443 {
			`+dryLimit("wild")+`
		}`)
	for _, tc := range []struct {
		host  string
		tls   bool
		want  string
		exact bool
	}{
		{"example.com", true, "https", true},
		{"EXAMPLE.com:443", true, "https", true},
		{"example.com", false, "https", false},
		{"plain.example.com", false, "http", true},
		{"other.example.com:8080", false, "port", true},
		{"alt.example.com:8081", false, "alt", true},
		{"a.wild.example.com:8443", true, "wild", true},
		{"a.wild.example.com", true, "wild", false},
		{"[::1]:8080", false, "port", true},
	} {
		s, exact := d.ServerOf(tc.host, tc.tls)
		if got := s.Limits()[0].Path; got != tc.want || exact != tc.exact {
			t.Errorf("%s, tls=%t: got %s, exact=%t, want %s, %t", tc.host, tc.tls, got, exact, tc.want, tc.exact)
		}
	}
}

// BenchmarkOffline measures what one request of a replay costs, without the log.
func BenchmarkOffline(b *testing.B) {
	d := configtest.LoadDry(b, `http://example.com {
		encode
		handle /static/* {
			file_server
		}
		handle {
			rate_limit {
				limit api {
					match path /api/*
					rate 100/1m
				}
				limit all {
					rate 1000/1m
				}
			}
			reverse_proxy localhost:1
		}
	}`)
	s, _ := d.ServerOf("example.com", false)
	n := 0
	req := dryRequestTo("http://example.com/api/x?y=z")
	for b.Loop() {
		_, err := s.Serve(offline.Request{Request: req, ClientIP: "192.0.2.1"}, func(h *offline.Handler, r *http.Request) bool {
			q, err := rule.Evaluate(r, h.Limits, time.Now())
			defer q.Release()
			n += len(q.Entries())
			return err == nil
		})
		if err != nil {
			b.Fatal(err)
		}
	}
	if n < 2*b.N {
		b.Fatalf("met %d limits", n)
	}
}
