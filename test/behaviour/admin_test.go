package behaviour

import (
	"bufio"
	"crypto"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/admin/adminjson"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/caddytest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/configtest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/filetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// adminSite is a site with limits of several kinds.
const adminSite = `
	rate_limit api {
		key {header.User}
		size 5
		drip_rate 10s
		factor 0.5
		match path /api/*
		track_top 100
		limit search {
			match path /api/search
			size 2
			drip_rate 1m
			cost 2
			when_full share
		}
	}
	rate_limit /old* old {
		max 2
		duration 10s
		min_interval 5s
		ipv4_prefix 24
	}
	rate_limit /pair pair {
		key {header.User}-{client_ip}
		size 3
		drip_rate 1h
		track_top 10
	}
	rate_limit /dynamic dynamic {
		size {http.request.header.Size}
		max_delay 5s
		max_waiting 7
		status 403
	}
	rate_limit /drips drips {
		size 5
		drip_rate {http.request.header.Rate}
	}
	rate_limit /size dripsize {
		size 5
		drip_size {http.request.header.Drip}
	}
	rate_limit /off off {
		size 5
		factor 0
	}
	rate_limit /all all {
		key everyone
		size 5
	}
	rate_limit /user user {
		key user-{header.User}
		size 5
	}
	rate_limit /one {
		size 7
	}
	rate_limit /two {
		key {header.User}
		size 8
	}
	respond admitted
`

// TestAdminStatusAndLimits guards that both show what the running config has and
// outcomes of requests.
func TestAdminStatusAndLimits(t *testing.T) {
	s, a := sitetest.StartWithAdmin(t, sitetest.Config{Site: adminSite})
	for range 2 {
		s.Get("/api/search", "User: u")
	}
	s.Get("/api/x", "User: u")
	status := a.Ask("GET", "status", "")
	sitetest.WantJSON(t, status, `{"configured": true, "store": "memory", "on_error": "fallback", "servers": [],
		"memory": {"buckets": 2, "max_keys": 1000000}}`)
	limits := status["limits"].([]any)
	sitetest.WantJSON(t, limits[11], `{"path": "api", "admitted": 2, "denied": 0, "spared": 1, "near": 0, "units": 2, "by": {"memory": 3, "redis": 0}}`)
	sitetest.WantJSON(t, limits[12], `{"path": "api/search", "admitted": 1, "denied": 1, "spared": 0, "near": 0, "units": 2}`)
	var paths []string
	for _, l := range limits {
		paths = append(paths, l.(map[string]any)["path"].(string))
	}
	if got, want := strings.Join(paths, " "), "dynamic drips pair dripsize user all off old old/min_interval default default-2 api api/search"; got != want {
		t.Errorf("got limits %s, want %s", got, want)
	}

	limits = a.Ask("GET", "limits", "")["limits"].([]any)
	for i, want := range []string{
		`{"path": "dynamic", "handler": 0, "size": "{http.request.header.Size}", "drip_rate": 1, "max_delay": 5, "max_waiting": 7, "status": 403}`,
		`{"path": "drips", "handler": 1, "drip_rate": "{http.request.header.Rate}"}`,
		`{"path": "pair", "handler": 2, "key": "{http.request.header.User}-{http.vars.client_ip}"}`,
		`{"path": "dripsize", "drip_size": "{http.request.header.Drip}"}`,
		`{"path": "user", "key": "user-{http.request.header.User}"}`,
		`{"path": "all", "key": "everyone"}`,
		`{"path": "off", "off": true, "size": 0}`,
		`{"path": "old", "handler": 7, "size": 2, "drip_rate": 5, "ipv4_prefix": 24}`,
		`{"path": "old/min_interval", "handler": 7, "size": 1, "drip_rate": 5}`,
		`{"path": "default", "size": 7}`,
		`{"path": "default-2", "name": "default-2", "size": 8, "route_matches": [[{"path": ["/two"]}]]}`,
		`{"path": "api", "handler": 10, "server": "srv0", "hosts": ["127.0.0.1"], "algorithm": "leaky_bucket", "size": 10, "drip_rate": 10,
			"drip_size": 1, "cost": 1, "key": "{http.request.header.User}", "ipv4_prefix": 32, "ipv6_prefix": 64,
			"match": [{"path": ["/api/*"]}], "max_keys": 500000, "when_full": "forget", "track_top": 100, "status": 429,
			"accounting": "atomic", "on_error": "fallback", "buckets": 1, "admitted": 2, "denied": 0, "spared": 1}`,
		`{"path": "api/search", "parent": "api", "parent_matches": [[{"path": ["/api/*"]}]], "size": 2, "cost": 2, "when_full": "share"}`,
	} {
		sitetest.WantJSON(t, limits[i], want)
	}
}

// TestAdminWithoutLimits guards that the API says so when the running config has no
// limits.
func TestAdminWithoutLimits(t *testing.T) {
	_, a := sitetest.StartWithAdmin(t, sitetest.Config{Site: "respond admitted"})
	sitetest.WantJSON(t, a.Ask("GET", "status", ""), `{"configured": false, "servers": [], "limits": []}`)
	sitetest.WantJSON(t, a.Ask("GET", "limits", ""), `{"limits": []}`)
	for _, path := range []string{"peek", "reset"} {
		if status, text := a.Send("POST", path, `{"limit": "api", "key": "k"}`); status != http.StatusNotFound {
			t.Errorf("%s: got %d %s", path, status, text)
		}
	}
	if status, text := a.Send("GET", "top", ""); status != http.StatusNotFound {
		t.Errorf("top: got %d %s", status, text)
	}
}

// TestAdminBadRequests guards that each mistake is answered by the status and one
// line that says what would be right, and that no key gets into the log.
func TestAdminBadRequests(t *testing.T) {
	const secret = "s3cret"
	s, a := sitetest.StartWithAdmin(t, sitetest.Config{Unnamed: true, Site: adminSite})
	post := func(body string) [3]string { return [3]string{"POST", "peek", body} }
	const body = `an object such as {"limit": "api", "key": "203.0.113.7"}, or {"address": "203.0.113.7"} for all limits`
	const replaced = `key: U+FFFD stands for what is not UTF-8, so it is unknown which key is meant; use it quoted as top and bans show it, such as "\xff", or "\ufffd" for U+FFFD itself`
	const unquoted = `key: a double quote begins it, but no quoted text; use a key that begins with one quoted as top and bans show it, such as "\"a\""`
	for _, c := range []struct {
		request [3]string
		status  int
		want    string
	}{
		{[3]string{"GET", "", ""}, 404, "unknown endpoint; use /rate_limit/status, /rate_limit/limits, /rate_limit/peek, /rate_limit/reset, /rate_limit/ban, /rate_limit/unban, /rate_limit/bans or /rate_limit/top"},
		{[3]string{"GET", "nothing", ""}, 404, "unknown endpoint; use /rate_limit/status, /rate_limit/limits, /rate_limit/peek, /rate_limit/reset, /rate_limit/ban, /rate_limit/unban, /rate_limit/bans or /rate_limit/top"},
		{[3]string{"POST", "bann", "{}"}, 404, "unknown endpoint; use /rate_limit/status, /rate_limit/limits, /rate_limit/peek, /rate_limit/reset, /rate_limit/ban, /rate_limit/unban, /rate_limit/bans or /rate_limit/top"},
		{[3]string{"POST", "status", ""}, 405, `method: "POST" is not valid; use GET`},
		{[3]string{"DELETE", "limits", ""}, 405, `method: "DELETE" is not valid; use GET`},
		{[3]string{"GET", "peek", ""}, 405, `method: "GET" is not valid; use POST`},
		{[3]string{"GET", "reset", ""}, 405, `method: "GET" is not valid; use POST`},
		{[3]string{"PUT", "top", ""}, 405, `method: "PUT" is not valid; use GET`},

		{post(""), 400, "body: none given; use " + body},
		{post("{"), 400, "body: malformed JSON; use " + body},
		{post(`{"limit": "api", "key": "` + secret + `"`), 400, "body: malformed JSON; use " + body},
		{post(`{"limit": "api", "key": "` + secret + `"} {}`), 400, "body: malformed JSON; use " + body},
		{post(`"` + secret + `"`), 400, "body: not valid; use " + body},
		{post(`[]`), 400, "body: not valid; use " + body},
		{post(`null`), 400, "body: not valid; use " + body},
		{post("{\"limit\": \"api\", \"key\": \"\xff" + secret + "\"}"), 400, "body: not UTF-8; use " + body},
		{post(`{"limit": "api", "key": "` + strings.Repeat("x", 64<<10) + `"}`), 413, "body: too large; use at most 65536 bytes"},
		{post(`{}`), 400, "body: neither limit, key nor address given; use " + body},
		{post(`{"address": "` + secret + `"}`), 400, `address: not valid; use an IP address or a prefix, such as "203.0.113.7", or "" for all that have none`},
		{post(`{"limit": 1}`), 400, `limit: not valid; use the path of a limit as text, such as "api" or "api/search"`},
		{post(`{"limit": ""}`), 400, `limit: not valid; use the path of a limit as text, such as "api" or "api/search"`},
		{post(`{"limit": null}`), 400, `limit: not valid; use the path of a limit as text, such as "api" or "api/search"`},
		{post(`{"` + secret + `": "api"}`), 400, "body: unknown field; use limit, key or address"},
		{post(`{"limit": "api", "key": "a", "key": "` + secret + `"}`), 400, "key: given twice; use it once"},
		{post(`{"limit": "api", "limit": "api", "key": "` + secret + `"}`), 400, "limit: given twice; use it once"},
		{post(`{"address": "192.0.2.1", "\u0061ddress": "192.0.2.1"}`), 400, "address: given twice; use it once"},
		{post(`{"Limit": "api", "key": "` + secret + `"}`), 400, "limit: not in lower case; use lower case"},
		{post(`{"limit": "api", "key": "a", "KEY": "` + secret + `"}`), 400, "key: not in lower case; use lower case"},
		{post(`{"limit": "api", "\u212aey": "` + secret + `"}`), 400, "key: not in lower case; use lower case"},
		{[3]string{"POST", "reset", `{"limit": "api", "key": "a", "key": "b"}`}, 400, "key: given twice; use it once"},
		{[3]string{"POST", "unban", `{"limit": "api", "key": "a", "key": "b"}`}, 400, "key: given twice; use it once"},
		{[3]string{"POST", "ban", `{"limit": "api", "key": "a", "duration": "1s", "duration": "6000d"}`}, 400, "duration: given twice; use it once"},
		{[3]string{"POST", "ban", `{"limit": "api", "key": "a", "Duration": "1s"}`}, 400, "duration: not in lower case; use lower case"},
		{post(`{"limit": "api", "key": 7}`), 400, "key: not valid; use a text, or an array of texts, one for each placeholder in the limit's key"},
		{post(`{"limit": "api", "key": null}`), 400, "key: not valid; use a text, or an array of texts, one for each placeholder in the limit's key"},
		{post(`{"limit": "api", "key": ["` + secret + `", 7]}`), 400, "key: not valid; use a text, or an array of texts, one for each placeholder in the limit's key"},
		{post(`{"limit": "api", "key": "\ud800` + secret + `"}`), 400, replaced},
		{post(`{"limit": "api", "key": "\ufffd` + secret + `"}`), 400, replaced},
		{post(`{"limit": "api", "key": "` + secret + "\ufffd" + `"}`), 400, replaced},
		{post(`{"limit": "pair", "key": ["` + secret + `", "\ufffd"]}`), 400, replaced},
		{[3]string{"POST", "reset", `{"limit": "api", "key": "\ufffd"}`}, 400, replaced},
		{post(`{"limit": "api", "key": "\"` + secret + `"}`), 400, unquoted},
		{post(`{"limit": "pair", "key": ["\"a\"b", "` + secret + `"]}`), 400, unquoted},
		{post(`{"limit": "api", "address": 7}`), 400, `address: not valid; use the address of a client as text, such as "203.0.113.7", or "" for all that have none`},
		{post(`{"limit": "api", "address": null}`), 400, `address: not valid; use the address of a client as text, such as "203.0.113.7", or "" for all that have none`},
		{post(`{"limit": "api", "key": "` + secret + `", "address": "` + secret + `"}`), 400, "address: can't be combined with limit and key; use one of key and address"},

		{post(`{"limit": "` + secret + `", "key": "api"}`), 404, "limit: the running config has no such limit; use all, api, api/search, default, drips, dripsize, dynamic, off, old, old/min_interval, pair or user"},
		{post(`{"limit": "default", "key": "` + secret + `"}`), 409, "limit: several limits without a name have this path, with other keys or numbers; use default#1 or default#2, or give the limits names"},
		{post(`{"limit": "off", "key": "203.0.113.7"}`), 400, "limit: its factor is 0, so it has no buckets"},
		{post(`{"limit": "drips", "key": "203.0.113.7"}`), 400, "limit: its drip_rate depends on the request, and each value has its own buckets, so a key does not identify one"},
		{post(`{"limit": "dripsize", "key": "203.0.113.7"}`), 400, "limit: its drip_size depends on the request, and each value has its own buckets, so a key does not identify one"},
		{post(`{"limit": "api"}`), 400, "key: none given; use a text that {http.request.header.User} can expand to"},
		{post(`{"limit": "api", "key": ""}`), 400, "key: empty; use address instead, as a request without a key has the bucket of its client's address"},
		{post(`{"limit": "api", "key": []}`), 400, "key: 0 values given; use 1, one for each placeholder in {http.request.header.User}"},
		{post(`{"limit": "api", "key": ["a", "` + secret + `"]}`), 400, "key: 2 values given; use 1, one for each placeholder in {http.request.header.User}"},
		{post(`{"limit": "pair", "key": "` + secret + `"}`), 400, "key: 1 values given; use 2, one for each placeholder in {http.request.header.User}-{http.vars.client_ip}"},
		{post(`{"limit": "pair", "key": ["a", "` + secret + `"]}`), 400, "key: not valid; use an IP address for {http.vars.client_ip}, or a prefix of 32 bits of IPv4 or 64 of IPv6"},
		{post(`{"limit": "pair", "key": ["", ""]}`), 400, "key: empty; use address instead, as a request without a key has the bucket of its client's address"},
		{post(`{"limit": "all", "key": "` + secret + `"}`), 400, "key: not valid; use everyone, the only key of this limit, or none"},
		{post(`{"limit": "all", "address": "203.0.113.7"}`), 400, "address: not valid here; use none, as all requests have the key everyone"},
		{post(`{"limit": "user", "key": "` + secret + `"}`), 400, "key: not valid; use a text that user-{http.request.header.User} can expand to"},
		{post(`{"limit": "old", "key": "` + secret + `"}`), 400, "key: not valid; use an IP address for {http.vars.client_ip}, or a prefix of 24 bits of IPv4 or 64 of IPv6"},
		{post(`{"limit": "old", "address": "203.0.113.7"}`), 400, "address: not valid here; use key, which is an address in this limit"},
		{post(`{"limit": "api", "address": "` + secret + `"}`), 400, "address: not valid; use an IP address, or a prefix of 32 bits of IPv4 or 64 of IPv6"},
		{[3]string{"POST", "reset", `{"limit": "api", "address": "` + secret + `"}`}, 400, "address: not valid; use an IP address, or a prefix of 32 bits of IPv4 or 64 of IPv6"},
		{[3]string{"POST", "peek?limit=api", `{"limit": "api"}`}, 400, "query: not valid here; use a body with " + body},

		{[3]string{"GET", "top", ""}, 400, "limit: several limits track their keys; use api, api/search or pair"},
		{[3]string{"GET", "top?limit=", ""}, 400, "limit: several limits track their keys; use api or pair"},
		{[3]string{"GET", "top?limit=old", ""}, 400, "limit: it does not track its keys; use one with track_top, such as track_top 100"},
		{[3]string{"GET", "top?limit=nothing", ""}, 404, "limit: the running config has no such limit; use all, api, api/search, default, drips, dripsize, dynamic, off, old, old/min_interval, pair or user"},
		{[3]string{"GET", "top?limit=api&limit=pair", ""}, 400, "limit: given 2 times; use it once"},
		{[3]string{"GET", "top?limit=api&n=0", ""}, 400, "n: not valid; use a whole number from 1 to 10000"},
		{[3]string{"GET", "top?limit=api&n=10001", ""}, 400, "n: not valid; use a whole number from 1 to 10000"},
		{[3]string{"GET", "top?limit=api&n=-1", ""}, 400, "n: not valid; use a whole number from 1 to 10000"},
		{[3]string{"GET", "top?limit=api&by=size", ""}, 400, "by: not valid; use requests or denied"},
		{[3]string{"GET", "top?limit=api&watch=1", ""}, 400, "watch: not valid; use a duration from 100ms to 8s, such as 1s"},
		{[3]string{"GET", "top?limit=api&watch=1h", ""}, 400, "watch: not valid; use a duration from 100ms to 8s, such as 1s"},
		{[3]string{"GET", "top?limit=api&watch=1ms", ""}, 400, "watch: not valid; use a duration from 100ms to 8s, such as 1s"},
		{[3]string{"GET", "top?limit=api&size=1", ""}, 400, "query: unknown parameter; use limit, n, by or watch"},
		{[3]string{"GET", "top?limit=%zz", ""}, 400, "query: malformed; use limit, n, by and watch"},
	} {
		if c.request[1] == "top" {
			c.want = strings.Replace(c.want, "api, api/search or pair", "api or pair", 1)
		}
		status, text := a.Send(c.request[0], c.request[1], c.request[2])
		var answer struct{ Error string }
		if err := json.Unmarshal([]byte(text), &answer); err != nil {
			t.Errorf("%.80q: got %d %s", c.request, status, text)
			continue
		}
		if status != c.status || answer.Error != c.want {
			t.Errorf("%.80q:\n got %d %s\nwant %d %s", c.request, status, answer.Error, c.status, c.want)
		}
	}
	a.Ask("POST", "peek", `{"limit": "api", "key": "`+secret+`"}`)
	a.Ask("POST", "reset", `{"limit": "api", "key": "`+secret+`"}`)
	wantNotLogged(t, s, secret)
}

// wantNotLogged checks that a text is nowhere in the log.
func wantNotLogged(t *testing.T, s *sitetest.Site, text string) {
	t.Helper()
	log := filetest.Read(t, s.LogPath)
	if len(log) == 0 || strings.Contains(string(log), text) {
		t.Errorf("%d bytes of log, which contain %q: %t", len(log), text, strings.Contains(string(log), text))
	}
}

// TestAdminPeekAndReset guards that a bucket of this process is found by the key
// that is typed, shown as it is, and emptied, and others are not.
func TestAdminPeekAndReset(t *testing.T) {
	for _, c := range []struct {
		name, path string
		header     []string
		body       string
		peek       string // what is in the bucket of two requests
		again      string // what a third request is answered after a reset
	}{
		{
			"a header", "/api/x", []string{"User: u"}, `{"limit": "api", "key": "u"}`,
			`{"limit": "api", "from": "memory", "size": 10, "level": 2, "remaining": 8, "held": 0, "empties_in": 20, "retry_after": 0}`,
			"200 limit=10 remaining=9 clear=10.000",
		},
		{
			"an array of one", "/api/x", []string{"User: u"}, `{"limit": "api", "key": ["u"]}`,
			`{"level": 2}`, "200 limit=10 remaining=9 clear=10.000",
		},
		{
			"no key", "/api/x", nil, `{"limit": "api", "address": "127.0.0.1"}`,
			`{"level": 2}`, "200 limit=10 remaining=9 clear=10.000",
		},
		{
			"an address", "/old", nil, `{"limit": "old", "key": "127.0.0.9"}`,
			`{"size": 2, "level": 1, "remaining": 1, "empties_in": 5}`, "429 limit=1 remaining=0 clear=5.000 reset=5.000 retry-after=5",
		},
		{
			"min_interval", "/old", nil, `{"limit": "old/min_interval", "key": "127.0.0.0/24"}`,
			`{"size": 1, "level": 1, "remaining": 0, "empties_in": 5, "retry_after": 5}`, "200 limit=1 remaining=0 clear=10.000",
		},
		{
			"several placeholders", "/pair", []string{"User: u"}, `{"limit": "pair", "key": ["u", "::ffff:127.0.0.1"]}`,
			`{"size": 3, "level": 2}`, "200 limit=3 remaining=2 clear=3600.000",
		},
		{
			"one value of several", "/pair", nil, `{"limit": "pair", "key": ["", "127.0.0.1"]}`,
			`{"size": 3, "level": 2}`, "200 limit=3 remaining=2 clear=3600.000",
		},
		{
			"a dynamic size", "/dynamic", []string{"Size: 9"}, `{"limit": "dynamic", "key": "127.0.0.1"}`,
			`{"size": null, "remaining": null, "retry_after": null, "level": 2, "empties_in": 2}`, "200 limit=9 remaining=8 clear=1.000",
		},
		{
			"no placeholder", "/all", nil, `{"limit": "all"}`,
			`{"level": 2}`, "200 limit=5 remaining=4 clear=1.000",
		},
		{
			"text beside the placeholder", "/user", []string{"User: u"}, `{"limit": "user", "key": "user-u"}`,
			`{"level": 2}`, "200 limit=5 remaining=4 clear=1.000",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, a := sitetest.StartWithAdmin(t, sitetest.Config{Site: adminSite})
			for range 2 {
				s.Get(c.path, c.header...)
			}
			for range 2 { // the second is as the first
				sitetest.WantJSON(t, a.Ask("POST", "peek", c.body), c.peek)
			}
			sitetest.WantJSON(t, a.Ask("POST", "reset", c.body), c.peek)
			sitetest.WantJSON(t, a.Ask("POST", "peek", c.body), `{"level": 0, "empties_in": 0}`)
			sitetest.WantJSON(t, a.Ask("POST", "reset", c.body), `{"level": 0, "empties_in": 0}`)
			s.Run(sitetest.Step{Path: c.path, Header: c.header, Want: c.again})
		})
	}
}

// TestAdminAllLimits guards that a client's buckets, or those of a key, are found at
// all limits whose key can be made from what is given, that the others are named with
// the reason, and that a reset empties what was found and nothing that others share.
func TestAdminAllLimits(t *testing.T) {
	const needs = "it needs a value for each placeholder of its key: "
	const (
		api    = `{"limit": "api", "key": "u", "level": 1}`
		pair   = `{"limit": "pair", "key": "u,127.0.0.1", "level": 1}`
		old    = `{"limit": "old", "key": "127.0.0.0/24", "size": 2, "level": 1}`
		minInt = `{"limit": "old/min_interval", "key": "127.0.0.0/24", "level": 1, "remaining": 0}`
		all    = `{"limit": "all", "key": "everyone", "level": 1}`
		one    = `{"limit": "default", "key": "127.0.0.1", "size": 7, "level": 1}`
		two    = `{"limit": "default-2", "key": "u", "size": 8, "level": 1}`
		noUser = `{"limit": "user", "address": "127.0.0.1", "level": 1}`
	)
	for _, tc := range []struct {
		name, body string
		asked      int
		holds      []string
		not        map[string]string // some that were not asked, and why
	}{
		{
			"a client", `{"address": "::ffff:127.0.0.1"}`, 10, []string{all, old, minInt, one, noUser},
			map[string]string{
				"api": needs + "{http.request.header.User}", "pair": needs + "{http.request.header.User}",
				"default-2": needs + "{http.request.header.User}", "off": "limit: its factor is 0, so it has no buckets",
				"drips": "limit: its drip_rate depends on the request, and each value has its own buckets, so a key does not identify one",
			},
		},
		{
			"a client and a key", `{"address": "127.0.0.1", "key": "u"}`, 13, []string{api, pair, all, old, minInt, one, two, noUser},
			map[string]string{"user": "key: not valid; use a text that user-{http.request.header.User} can expand to"},
		},
		{
			"a key", `{"key": "u"}`, 4, []string{api, all, two},
			map[string]string{
				"pair": needs + "{http.request.header.User} {http.vars.client_ip}",
				"old":  "key: not valid; use an IP address for {http.vars.client_ip}, or a prefix of 24 bits of IPv4 or 64 of IPv6",
			},
		},
		{"values", `{"key": ["u", "127.0.0.1"]}`, 2, []string{pair, all}, map[string]string{"api": needs + "{http.request.header.User}"}},
		{"a stranger", `{"address": "192.0.2.7"}`, 10, []string{all}, nil},
		{"clients without an address", `{"address": ""}`, 10, []string{all}, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s, a := sitetest.StartWithAdmin(t, sitetest.Config{Site: adminSite})
			for _, path := range []string{"/api/x", "/old", "/pair", "/all", "/one", "/two"} {
				s.Get(path, "User: u")
			}
			s.Get("/user")
			check := func(answer map[string]any, asked int, holds []string) {
				t.Helper()
				if answer["checked"] != float64(asked) {
					t.Errorf("%v buckets were looked at, want %d", answer["checked"], asked)
				}
				buckets := answer["buckets"].([]any)
				if len(buckets) != len(holds) {
					t.Errorf("got %d buckets, want %d: %v", len(buckets), len(holds), buckets)
				}
				for _, want := range holds {
					if !slices.ContainsFunc(buckets, func(b any) bool {
						var wanted any
						_ = json.Unmarshal([]byte(want), &wanted)
						_, ok := sitetest.Contains(b, wanted)
						return ok
					}) {
						t.Errorf("no bucket is %s: %v", want, buckets)
					}
				}
			}
			answer := a.Ask("POST", "peek", tc.body)
			check(answer, tc.asked, tc.holds)
			for limit, why := range tc.not {
				if !slices.ContainsFunc(answer["skipped"].([]any), func(n any) bool {
					return n.(map[string]any)["limit"] == limit && n.(map[string]any)["why"] == why
				}) {
					t.Errorf("%s: not as %q: %v", limit, why, answer["skipped"])
				}
			}
			own := slices.DeleteFunc(slices.Clone(tc.holds), func(h string) bool { return h == all })
			answer = a.Ask("POST", "reset", tc.body)
			check(answer, tc.asked-1, own)
			if text := fmt.Sprint(answer["skipped"]); !strings.Contains(text, "all requests share its bucket; to empty that, name the limit") {
				t.Errorf("reset says %s", text)
			}
			check(a.Ask("POST", "peek", tc.body), tc.asked, []string{all})
			wantNotLogged(t, s, "192.0.2.7")
		})
	}
}

// TestAdminLimitsWithoutName guards that each of several limits without a name can be
// asked by the number that it has in header fields.
func TestAdminLimitsWithoutName(t *testing.T) {
	const unnamed = "route {\nrate_limit {\nsize 5\nheaders ratelimit-11\n}\nrate_limit {\nsize 9\nheaders ratelimit-11\n}\n}\nrespond ok"
	s, a := sitetest.StartWithAdmin(t, sitetest.Config{Site: unnamed, Unnamed: true})
	if got, want := s.Get("/").Header.Get("RateLimit"), `"default";r=4;t=4, "default#2";r=8;t=8`; got != want {
		t.Fatalf("RateLimit: got %s, want %s", got, want)
	}
	sitetest.WantJSON(t, a.Ask("GET", "limits", "")["limits"], `[{"path": "default", "name": "default", "size": 5}, {"path": "default", "name": "default#2", "size": 9}]`)
	for limit, size := range map[string]int{"default#1": 5, "default#2": 9} {
		sitetest.WantJSON(t, a.Ask("POST", "peek", `{"limit": "`+limit+`", "key": "127.0.0.1"}`), fmt.Sprintf(`{"limit": %q, "size": %d, "level": 1}`, strings.TrimSuffix(limit, "#1"), size))
	}
	if status, text := a.Send("POST", "reset", `{"limit": "default#3", "key": "127.0.0.1"}`); status != http.StatusNotFound {
		t.Errorf("default#3: got %d %s", status, text)
	}
}

// TestAdminAlgorithms guards that limits shows the numbers of each algorithm, and
// that peek and reset find its buckets, in this process and in Redis: a client that
// was denied is let in after a reset.
func TestAdminAlgorithms(t *testing.T) {
	// A day would end during the test now and then.
	site := "rate_limit {" + strings.Replace(configtest.AlgorithmLimits, "day Asia/Tokyo", "year Asia/Tokyo", 1) + "\n}\nrespond admitted"
	for store, global := range map[string]string{
		"memory": "",
		"redis":  sitetest.RedisGlobal(redistest.Start(t).Addr, sitetest.LongTimeout),
	} {
		t.Run(store, func(t *testing.T) {
			s, a := sitetest.StartWithAdmin(t, sitetest.Config{Global: global, Site: site})
			sitetest.WantJSON(t, a.Ask("GET", "limits", "")["limits"], `[
				{"path": "leaky", "algorithm": "leaky_bucket", "size": 3, "drip_rate": 3600, "drip_size": 1, "window": null, "window_start": null, "period": null},
				{"path": "token", "algorithm": "token_bucket", "size": 3, "drip_rate": 3600, "drip_size": 1, "window": null, "window_start": null, "period": null},
				{"path": "clock", "algorithm": "fixed_window", "size": 3, "drip_rate": null, "drip_size": null, "window": 31536000, "window_start": "clock", "period": null},
				{"path": "first", "algorithm": "fixed_window", "size": 3, "drip_rate": null, "drip_size": null, "window": 3600, "window_start": "first", "period": null},
				{"path": "period", "algorithm": "fixed_window", "size": 3, "drip_rate": null, "drip_size": null, "window": null, "window_start": null, "period": "year Asia/Tokyo"},
				{"path": "slides", "algorithm": "sliding_window", "size": 3, "drip_rate": null, "drip_size": null, "window": 31536000, "window_start": null, "period": null}]`)
			for range 3 {
				if got := s.Get("/"); got.StatusCode != http.StatusOK {
					t.Fatalf("got %s", got)
				}
			}
			denied := s.Get("/")
			if denied.StatusCode != http.StatusTooManyRequests {
				t.Fatalf("the fourth request got %s", denied)
			}
			paths := []string{"leaky", "token", "clock", "first", "period", "slides"}
			body := func(path string) string { return `{"limit": "` + path + `", "key": "127.0.0.1"}` }
			for _, path := range paths {
				for range 2 {
					got := a.Ask("POST", "peek", body(path))
					sitetest.WantJSON(t, got, `{"from": "`+store+`", "limit": "`+path+`", "size": 3, "level": 3, "remaining": 0, "held": 0}`)
					if got["empties_in"].(float64) <= 0 || got["retry_after"].(float64) <= 0 {
						t.Errorf("%s: full, but got %v", path, got)
					}
				}
			}
			for i, path := range paths {
				if i > 0 { // the others still deny
					if got := s.Get("/"); got.StatusCode != http.StatusTooManyRequests {
						t.Errorf("before the reset of %s: got %s", path, got)
					}
				}
				sitetest.WantJSON(t, a.Ask("POST", "reset", body(path)), `{"level": 3, "remaining": 0}`)
				sitetest.WantJSON(t, a.Ask("POST", "peek", body(path)), `{"level": 0, "remaining": 3, "empties_in": 0, "retry_after": 0}`)
			}
			if got := s.Get("/"); got.StatusCode != http.StatusOK {
				t.Errorf("after all resets: got %s", got)
			}
			for _, path := range paths {
				sitetest.WantJSON(t, a.Ask("POST", "peek", body(path)), `{"level": 1, "remaining": 2, "retry_after": 0}`)
			}
		})
	}
}

// TestAdminTop guards that the keys that ask most are listed as they can be given to
// peek, over reloads, and that nothing is kept of limits that do not track them.
func TestAdminTop(t *testing.T) {
	c := sitetest.Config{Site: adminSite}
	s, a := sitetest.StartWithAdmin(t, c)
	for range 12 {
		s.Get("/api/x", "User: busy")
	}
	s.Get("/api/x", "User: calm\" <é")
	s.Get("/api/x")
	for range 4 {
		s.Get("/pair", "User: u")
	}
	s.Get("/old")
	check := func() {
		t.Helper()
		sitetest.WantJSON(t, a.Ask("GET", "top?limit=api", ""), `{"limit": "api", "by": "requests", "requests": 14, "denied": 2, "entries": [
			{"key": "busy", "requests": 12, "denied": 2, "error": 0},
			{"address": "127.0.0.1", "key": null, "requests": 1, "denied": 0},
			{"key": "calm\" <é", "requests": 1, "denied": 0}]}`)
		sitetest.WantJSON(t, a.Ask("GET", "top?limit=api&by=denied&n=5", ""), `{"by": "denied", "entries": [{"key": "busy", "requests": 12, "denied": 2}]}`)
		sitetest.WantJSON(t, a.Ask("GET", "top?limit=pair", ""), `{"entries": [{"key": "u,127.0.0.1", "requests": 4, "denied": 1}]}`)
	}
	check()
	c.Admin = a.Addr
	s.Reload(c)
	check()
	if n := s.Process.Tops.Len(); n != 2 {
		t.Errorf("%d limits keep keys, want 2", n)
	}
	s.Reload(sitetest.Config{Admin: a.Addr, Site: strings.ReplaceAll(adminSite, "track_top", "#")})
	if n := s.Process.Tops.Len(); n > 0 {
		t.Errorf("keys of %d limits are kept without track_top", n)
	}
}

// TestAdminTopNotUTF8 guards that top marks the keys that are not UTF-8 and quotes them,
// those of several placeholders too, and that no others are marked: not those with U+FFFD,
// nor those that were cut within a character.
func TestAdminTopNotUTF8(t *testing.T) {
	s, a := sitetest.StartWithAdmin(t, sitetest.Config{Site: `
		rate_limit one {
			key {query.k}
			size 5
			track_top 10
		}
		rate_limit two {
			key {query.k}{query.l}
			size 5
			track_top 10
		}
		respond admitted`})
	long := strings.Repeat("%C3%A9", 200) // of 400 bytes
	for i, query := range []string{"k=%ff", "k=%ef%bf%bd&l=a", "k=a&l=%ff", "k=x" + long + "&l=b"} {
		for range 4 - i {
			s.Get("/?" + query)
		}
	}
	type entry struct {
		Key       string
		Truncated bool
		NotUTF8   bool `json:"not_utf8"`
	}
	list := func(limit string) (list []string) {
		_, text := a.Send("GET", "top?limit="+limit, "")
		var answer struct{ Entries []entry }
		if err := json.Unmarshal([]byte(text), &answer); err != nil {
			t.Fatal(err)
		}
		for _, e := range answer.Entries {
			if e.Truncated {
				e.Key = "truncated"
			}
			list = append(list, fmt.Sprintf("[%+q] %t", e.Key, e.NotUTF8))
		}
		return list
	}
	if got, want := fmt.Sprint(list("one")), `[["\"\\xff\""] true ["\"\\ufffd\""] false ["a"] false ["truncated"] false]`; got != want {
		t.Errorf("one placeholder: got %s, want %s", got, want)
	}
	if got, want := fmt.Sprint(list("two")), `[["\"\\xff,\""] true ["\"\\ufffd,a\""] false ["\"a,\\xff\""] true ["truncated"] false]`; got != want {
		t.Errorf("two placeholders: got %s, want %s", got, want)
	}
	r := sitetest.RunCommand(t, "top", "--address", a.Addr, "--limit", "one", "--by", "requests")
	if r.Status != 0 || strings.Count(r.Out, "(not UTF-8)") != 1 || !strings.Contains(r.Out, "\"\\xff\" (not UTF-8)\n") {
		t.Errorf("top: got %+v", r)
	}
}

// TestAdminTopStream guards that a stream goes on line by line, shows what is new,
// and ends when a config is loaded or the client leaves.
func TestAdminTopStream(t *testing.T) {
	c := sitetest.Config{Site: adminSite}
	s, a := sitetest.StartWithAdmin(t, c)
	c.Admin = a.Addr
	open := func() *http.Response {
		t.Helper()
		res, err := a.Client.Get("http://" + a.Addr + "/rate_limit/top?limit=api&watch=100ms")
		if err != nil {
			t.Fatal(err)
		}
		return res
	}
	res := open()
	defer res.Body.Close()
	lines := bufio.NewScanner(res.Body)
	next := func() (answer struct{ Requests int }) {
		t.Helper()
		if !lines.Scan() {
			t.Fatalf("the stream ended: %v", lines.Err())
		}
		if err := json.Unmarshal(lines.Bytes(), &answer); err != nil {
			t.Fatal(err)
		}
		return answer
	}
	if got := next().Requests; got != 0 {
		t.Errorf("at first there were %d requests", got)
	}
	s.Get("/api/x", "User: u")
	sitetest.Eventually(t, "the request in the stream", func() bool { return next().Requests == 1 })
	if err := s.Load(sitetest.Config{Site: "rate_limit {\nsize {env.RATE_LIMIT_TEST_UNSET}\n}", Admin: a.Addr}); err == nil {
		t.Fatal("a bad config was accepted")
	}
	next() // of the config that still runs
	start := time.Now()
	s.Reload(c)
	for lines.Scan() {
	}
	if lines.Err() != nil || time.Since(start) > adminjson.WatchTime/2 {
		t.Errorf("after a reload the stream ended in %v: %v", time.Since(start), lines.Err())
	}
	res = open()
	res.Body.Close() // the client leaves
}

// TestAdminAfterFailedReload guards that the API goes on to show the running config
// when another one was rejected, wherever it failed.
func TestAdminAfterFailedReload(t *testing.T) {
	s, a := sitetest.StartWithAdmin(t, sitetest.Config{Site: "rate_limit good {\nsize 5\ndrip_rate 1h\n}\nrespond admitted"})
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	s.Get("/")
	for name, c := range map[string]sitetest.Config{
		"bad option":         {Site: "rate_limit bad {\nsize 1\ncost {env.RATE_LIMIT_TEST_UNSET}\n}"},
		"bad matcher behind": {Site: "rate_limit bad {\nsize 1\n}\n@bad path_regexp [\nrespond @bad x"},
		"port that is taken": {Site: "rate_limit bad {\nsize 1\n}", Sites: "http://" + taken.Addr().String() + " {\n}"},
	} {
		c.Admin = a.Addr
		if err := s.Load(c); err == nil {
			t.Fatalf("%s: the config was accepted", name)
		}
		sitetest.WantJSON(t, a.Ask("GET", "status", ""), `{"configured": true, "limits": [{"path": "good", "admitted": 1}]}`)
		sitetest.WantJSON(t, a.Ask("GET", "limits", ""), `{"limits": [{"path": "good", "server": "srv0"}]}`)
		sitetest.WantJSON(t, a.Ask("POST", "peek", `{"limit": "good", "key": "127.0.0.1"}`), `{"level": 1}`)
	}
}

// TestAdminOnUnixSocket guards that the API does not depend on how it is reached.
func TestAdminOnUnixSocket(t *testing.T) {
	socket := filepath.Join(sitetest.TempDir(t), "admin")
	s := sitetest.StartConfig(t, sitetest.Config{Site: adminSite, Admin: "unix/" + socket})
	a := sitetest.NewAdmin(t, "caddy")
	a.Client.Transport = caddytest.FreshConnections(socket)
	s.Get("/old")
	sitetest.WantJSON(t, a.Ask("POST", "reset", `{"limit": "old", "key": "127.0.0.1"}`), `{"level": 1}`)
	sitetest.WantJSON(t, a.Ask("GET", "status", ""), `{"store": "memory"}`)
}

// TestAdminEnforcesOrigin guards that Caddy's checks of the origin apply to the API
// too: a page in a browser must not empty buckets.
func TestAdminEnforcesOrigin(t *testing.T) {
	_, a := sitetest.StartWithAdmin(t, sitetest.Config{Site: adminSite, Admin: "{addr} {\nenforce_origin\n}"})
	for origin, want := range map[string]int{"": 403, "http://evil.example": 403, "http://" + a.Addr: 200} {
		a.Header = http.Header{}
		if origin != "" {
			a.Header.Set("Origin", origin)
		}
		if status, text := a.Send("POST", "reset", `{"limit": "old", "key": "127.0.0.1"}`); status != want {
			t.Errorf("origin %q: got %d %s, want %d", origin, status, text, want)
		}
	}
}

// TestAdminUnderLoad guards that all endpoints answer while requests are decided and
// configs are loaded.
func TestAdminUnderLoad(t *testing.T) {
	c := sitetest.Config{Site: adminSite}
	s, a := sitetest.StartWithAdmin(t, c)
	c.Admin = a.Addr
	stop := make(chan struct{})
	var wg sync.WaitGroup
	site := s.Addr
	for range 2 {
		wg.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				req, _ := http.NewRequest("GET", "http://"+site+"/api/search", nil)
				req.Header.Set("User", fmt.Sprint(i%150))
				if res, err := http.DefaultClient.Do(req); err == nil { // the site moves when it is loaded again
					res.Body.Close()
				}
			}
		})
	}
	ask := func(rounds int) {
		for range rounds {
			a.Ask("GET", "status", "")
			a.Ask("GET", "limits", "")
			a.Ask("GET", "top?limit=api&by=denied", "")
			a.Ask("POST", "peek", `{"limit": "api/search", "key": "7"}`)
			a.Ask("POST", "reset", `{"limit": "api", "key": "7"}`)
		}
	}
	ask(20)
	for range 3 {
		s.Reload(c)
		ask(3)
	}
	close(stop)
	wg.Wait()
}

// TestAdminRemote guards that the API is served by the remote admin endpoint too,
// where a client can be allowed to read and not to change.
func TestAdminRemote(t *testing.T) {
	c := sitetest.Config{Site: adminSite, Global: "skip_install_trust"}
	s, local := sitetest.StartWithAdmin(t, c)
	c.Admin = local.Addr
	certificate, key := newClientCertificate(t)
	remote := redistest.FreeAddr(t)

	var root map[string]any
	if err := json.Unmarshal(c.JSON(t, redistest.FreeAddr(t), s.LogPath), &root); err != nil {
		t.Fatal(err)
	}
	settings := root["admin"].(map[string]any)
	settings["identity"] = map[string]any{
		"identifiers": []string{"localhost"},
		"issuers":     []any{map[string]any{"module": "internal"}},
	}
	settings["remote"] = map[string]any{
		"listen": remote,
		"access_control": []any{map[string]any{
			"public_keys": []string{base64.StdEncoding.EncodeToString(certificate)},
			"permissions": []any{map[string]any{"paths": []string{"/rate_limit"}, "methods": []string{"GET"}}},
		}},
	}
	text, err := json.Marshal(root)
	if err != nil {
		t.Fatal(err)
	}
	if err := caddy.Load(text, true); err != nil {
		t.Fatal(err)
	}
	a := sitetest.NewAdmin(t, remote)
	a.Scheme = "https"
	a.Client.Transport = &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{
		ServerName:         "localhost",
		InsecureSkipVerify: true, // the certificate of the server is not what is tested
		Certificates:       []tls.Certificate{{Certificate: [][]byte{certificate}, PrivateKey: key}},
	}}
	sitetest.Eventually(t, "a certificate of the remote endpoint", func() bool {
		res, err := a.Client.Get("https://" + remote + "/rate_limit/status")
		if err != nil {
			return false
		}
		res.Body.Close()
		return res.StatusCode == http.StatusOK
	})
	sitetest.WantJSON(t, a.Ask("GET", "limits", "")["limits"].([]any)[0], `{"path": "dynamic"}`)
	const body = `{"limit": "old", "key": "127.0.0.1"}`
	if status, answer := a.Send("POST", "reset", body); status != http.StatusForbidden {
		t.Errorf("a client that may only read: got %d %s", status, answer)
	}
	sitetest.WantJSON(t, local.Ask("POST", "reset", body), `{"level": 0}`)
}

// newClientCertificate returns a certificate that signs itself, and its key.
func newClientCertificate(t *testing.T) (certificate []byte, key crypto.PrivateKey) {
	t.Helper()
	public, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true,
		KeyUsage:    x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	if certificate, err = x509.CreateCertificate(rand.Reader, template, template, public, private); err != nil {
		t.Fatal(err)
	}
	return certificate, private
}
