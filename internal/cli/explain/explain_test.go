package explain_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/configtest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// explainedConfig has limits in several places.
const explainedConfig = `{
	servers {
		trusted_proxies static 198.51.100.0/24
	}
}
example.com {
	rate_limit {
		limit api {
			match path /api/*
			rate 100/1m
			key {header.X-Api-Key}
			limit search {
				match path /api/search
				rate 10/1m
				cost {query.pages}
			}
		}
		limit all {
			rate 1000/1m
		}
		limit off {
			size 1
			factor 0
		}
	}
	handle /admin/* {
		rate_limit admin {
			size 5
			drip_rate 2s
			drip_size 3
			key {client_ip}{http.auth.user.id}
		}
	}
	handle {
		rate_limit other {
			rate 1/1s
		}
		respond ok
	}
}`

// explained is what a program reads of what explain prints as JSON.
type explained struct {
	Limits []explainedLimit
}

// explainedLimit is a limit that the request meets.
type explainedLimit struct {
	Limit, Key string
	Cost       int64
}

// TestExplain guards what explain says of a request: the limits that it meets,
// and why it does not meet the others.
func TestExplain(t *testing.T) {
	t.Parallel()
	file := sitetest.ConfigFile(t, explainedConfig)
	for _, tc := range []struct {
		name string
		args []string
		want string
	}{
		{"key by header", []string{"-H", "X-Api-Key: abc", "https://example.com/api/x"}, `GET https://example.com/api/x from 192.0.2.1, handled by srv0

LIMIT  KEY        COST  ALGORITHM     SIZE  RATE OR WINDOW
api    abc           1  leaky_bucket   100  1 each 600ms
all    192.0.2.1     1  leaky_bucket  1000  1 each 60ms
other  192.0.2.1     1  leaky_bucket     1  1 each 1s

NOT APPLIED  REASON
api/search   its matcher does not match: path ["/api/search"]
off          it is off: its factor is 0
admin        its route does not match: path ["/admin/*"]
`},
		{"no key, and a cost", []string{"POST", "https://example.com/api/search?pages=3"}, `POST https://example.com/api/search?pages=3 from 192.0.2.1, handled by srv0

LIMIT       KEY                 COST  ALGORITHM     SIZE  RATE OR WINDOW
api         192.0.2.1 (no key)     1  leaky_bucket   100  1 each 600ms
api/search  192.0.2.1 (no key)     3  leaky_bucket    10  1 each 6s
all         192.0.2.1              1  leaky_bucket  1000  1 each 60ms
other       192.0.2.1              1  leaky_bucket     1  1 each 1s

NOT APPLIED  REASON
off          it is off: its factor is 0
admin        its route does not match: path ["/admin/*"]
`},
		{"a proxied user", []string{"--client-ip", "198.51.100.1", "-H", "X-Forwarded-For: 203.0.113.7", "--user", "bob", "https://example.com/admin/"}, `GET https://example.com/admin/ from 198.51.100.1, handled by srv0

LIMIT  KEY              COST  ALGORITHM     SIZE  RATE OR WINDOW
all    203.0.113.7         1  leaky_bucket  1000  1 each 60ms
admin  203.0.113.7,bob     1  leaky_bucket     5  3 each 2s

NOT APPLIED  REASON
api          its matcher does not match: path ["/api/*"]
api/search   its matcher does not match: path ["/api/*"]
off          it is off: its factor is 0
other        another handle block was chosen
`},
		{"a bad cost", []string{"https://example.com/api/search?pages=-1"}, `GET https://example.com/api/search?pages=-1 from 192.0.2.1, handled by srv0

LIMIT  KEY                 COST  ALGORITHM     SIZE  RATE OR WINDOW
api    192.0.2.1 (no key)     1  leaky_bucket   100  1 each 600ms

The request is rejected with status 400: limit "api/search": cost: "-1" from {http.request.uri.query.pages} is not valid; use a whole number

NOT APPLIED  REASON
admin        the request is rejected before
other        the request is rejected before
`},
		{"plain HTTP", []string{"http://example.com/"}, `GET http://example.com/ from 192.0.2.1, handled by srv0

No server of the config listens at that address; srv0 listens at :443, for HTTPS. Caddy redirects plain HTTP to it by default, before any limit.
`},
		{"another host", []string{"https://example.org/"}, `GET https://example.org/ from 192.0.2.1, handled by srv0

No limit applies to this request.

NOT APPLIED  REASON
api          its route does not match: host ["example.com"]
api/search   its route does not match: host ["example.com"]
all          its route does not match: host ["example.com"]
off          its route does not match: host ["example.com"]
admin        its route does not match: host ["example.com"]
other        its route does not match: host ["example.com"]
`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			args := append([]string{"explain", "--config", file}, tc.args...)
			sitetest.RunCommand(t, args...).Want(t, 0, tc.want)
			r := sitetest.RunCommand(t, append(args, "--json")...)
			var e explained
			if err := json.Unmarshal([]byte(r.Out), &e); err != nil || r.Status != 0 {
				t.Errorf("with --json: %v, %+v", err, r)
			}
			met := strings.Count(tc.want, " each ")
			if len(e.Limits) != met {
				t.Errorf("with --json: got %d limits, want %d", len(e.Limits), met)
			}
		})
	}
}

// TestExplainAgreesWithCaddy guards that a request meets those limits of a running
// Caddy, at those costs, that explain says.
func TestExplainAgreesWithCaddy(t *testing.T) {
	site := `
	@write method POST
	rate_limit {
		limit all {
			size 100
			drip_rate 1h
			limit write {
				match method POST
				size 50
				drip_rate 1h
				cost 7
			}
		}
		limit key {
			match header X-Key *
			key {header.X-Key}
			size 20
			drip_rate 1h
		}
	}
	handle_path /v1/* {
		rate_limit /users/* users {
			size 10
			drip_rate 1h
			key {path}
		}
		respond ok
	}
	handle {
		request_header X-Other {path}
		rate_limit @write other {
			size 5
			drip_rate 1h
		}
		respond ok
	}`
	s, a := sitetest.StartWithAdmin(t, sitetest.Config{Site: site})
	file := sitetest.ConfigFile(t, "http://"+s.Addr+" {\n"+site+"\n}\n")
	for _, tc := range []struct{ method, path, header string }{
		{"GET", "/", "X-None: 1"},
		{"POST", "/", "X-Key: k1"},
		{"GET", "/v1/users/7", "X-Key: k2"},
		{"POST", "/v1/users/8", "X-None: 1"},
		{"GET", "/v1/other", "X-None: 1"},
	} {
		r := sitetest.RunCommand(t, "explain", "--config", file, "--json", "--client-ip", "127.0.0.1", "-H", tc.header, tc.method, s.URL(tc.path))
		var e explained
		if err := json.Unmarshal([]byte(r.Out), &e); err != nil {
			t.Fatalf("%v: %+v", err, r)
		}
		level := func(l explainedLimit) float64 {
			body, err := json.Marshal(map[string]any{"limit": l.Limit, "key": l.Key})
			if err != nil {
				t.Fatal(err)
			}
			return a.Ask("POST", "peek", string(body))["level"].(float64)
		}
		counts := func() map[string]float64 {
			counts := make(map[string]float64)
			for _, l := range a.Ask("GET", "limits", "")["limits"].([]any) {
				l := l.(map[string]any)
				counts[l["path"].(string)] = l["admitted"].(float64)
			}
			return counts
		}
		before, admitted := make([]float64, len(e.Limits)), counts()
		for i, l := range e.Limits {
			before[i] = level(l)
		}
		s.Send(tc.method, tc.path, tc.header)
		for i, l := range e.Limits {
			if got := level(l) - before[i]; got != float64(l.Cost) {
				t.Errorf("%s %s: limit %s, key %q: got %v, want %d", tc.method, tc.path, l.Limit, l.Key, got, l.Cost)
			}
			admitted[l.Limit]++
		}
		for path, n := range counts() {
			if n != admitted[path] {
				t.Errorf("%s %s: limit %s: got %v admitted, want %v", tc.method, tc.path, path, n, admitted[path])
			}
		}
	}
}

// TestExplainAlgorithms guards that explain shows each algorithm's numbers.
func TestExplainAlgorithms(t *testing.T) {
	t.Parallel()
	file := sitetest.ConfigFile(t, "http://:8080 {\nrate_limit {"+configtest.AlgorithmLimits+"\n}\n}")
	sitetest.RunCommand(t, "explain", "-c", file, "http://localhost:8080/").Want(t, 0, `GET http://localhost:8080/ from 192.0.2.1, handled by srv0

LIMIT   KEY        COST  ALGORITHM       SIZE  RATE OR WINDOW
leaky   192.0.2.1     1  leaky_bucket       3  1 each 1h
token   192.0.2.1     1  token_bucket       3  1 each 1h
clock   192.0.2.1     1  fixed_window       3  365d
first   192.0.2.1     1  fixed_window       3  1h from the first request
period  192.0.2.1     1  fixed_window       3  day Asia/Tokyo
slides  192.0.2.1     1  sliding_window     3  365d
`)
	r := sitetest.RunCommand(t, "explain", "-c", file, "--json", "http://localhost:8080/")
	var answer map[string]any
	if err := json.Unmarshal([]byte(r.Out), &answer); err != nil {
		t.Fatalf("%v: %+v", err, r)
	}
	sitetest.WantJSON(t, answer["limits"], `[
		{"limit": "leaky", "algorithm": "leaky_bucket", "size": 3, "drip_rate": 3600, "drip_size": 1, "window": null, "period": null},
		{"limit": "token", "algorithm": "token_bucket", "size": 3, "drip_rate": 3600, "drip_size": 1, "window": null, "period": null},
		{"limit": "clock", "algorithm": "fixed_window", "size": 3, "drip_rate": null, "drip_size": null, "window": 31536000, "period": null},
		{"limit": "first", "algorithm": "fixed_window", "size": 3, "drip_rate": null, "drip_size": null, "window": 3600, "period": null},
		{"limit": "period", "algorithm": "fixed_window", "size": 3, "drip_rate": null, "drip_size": null, "window": 86400, "period": "day Asia/Tokyo"},
		{"limit": "slides", "algorithm": "sliding_window", "size": 3, "drip_rate": null, "drip_size": null, "window": 31536000, "window_start": null, "period": null}]`)
}

// TestExplainConnections guards that explain lists the limits of the connection first, as such.
func TestExplainConnections(t *testing.T) {
	t.Parallel()
	file := sitetest.ConfigFile(t, `{
	servers {
		listener_wrappers {
			rate_limit {
				limit open {
					concurrency 100
				}
				limit direct {
					rate 20/s
					match not remote_ip 192.0.2.0/24
				}
				banned login
			}
			tls
		}
	}
}
example.com {
	rate_limit login 5/m {
		ban 10m
	}
}`)
	sitetest.RunCommand(t, "explain", "--config", file, "https://example.com/").Want(t, 0, `GET https://example.com/ from 192.0.2.1, handled by srv0

LIMIT              KEY        COST  ALGORITHM     SIZE  RATE OR WINDOW  OPTIONS
open (connection)  192.0.2.1     1  concurrency    100  in progress
login              192.0.2.1     1  leaky_bucket     5  1 each 12s      ban 10m

NOT APPLIED  REASON
direct       its matcher does not match: not
`)
	if out := sitetest.RunCommand(t, "explain", "--json", "--config", file, "https://example.com/").Out; !strings.Contains(out, `"connection": true`) {
		t.Errorf("as JSON: %s", out)
	}
}
