package behaviour

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/replay"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome/fieldstest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// bans is a limit of one request that bans for a minute, then for ten.
const bans = "key {header.User}\nsize 1\ndrip_rate 1s\nban 1m 10m\n"

// TestBan guards what a client sees of bans: each is as long as its option says, all
// fields tell when it ends, requests do not make it longer, and it is forgotten in time.
func TestBan(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, "rate_limit login {\n"+bans+"status 403\n}\n"+
		`respond "banned={http.rate_limit.banned}"`+"\nhandle_errors {\nrespond `{err.status_code} banned={http.rate_limit.banned} limit={http.rate_limit.limit}`\n}")
	const (
		free = "200 limit=1 remaining=0 clear=1.000"
		in   = "403 limit=1 remaining=0 clear=%d.000 reset=%[1]d.000 retry-after=%[1]d"
	)
	denied := func(seconds int) string { return fmt.Sprintf(in, seconds) }
	user := []string{"User: a"}
	s.Run(
		sitetest.Step{Header: user, Want: free, Text: "banned="},
		sitetest.Step{Header: user, Want: denied(60), Text: "403 banned=login limit=login"},
		sitetest.Step{After: 30 * time.Second, Header: user, Want: denied(30), Text: "403 banned=login limit=login"},
		sitetest.Step{After: 29 * time.Second, Header: user, Want: denied(1)},
		sitetest.Step{Header: []string{"User: b"}, Want: free},
		sitetest.Step{After: time.Second, Header: user, Want: free, Text: "banned="},
		sitetest.Step{Header: user, Want: denied(600)},
		sitetest.Step{After: 10 * time.Minute, Header: user, Want: free},
		sitetest.Step{Header: user, Want: denied(600)}, // the last is repeated
		sitetest.Step{After: 19*time.Minute + 59*time.Second, Header: user, Want: free},
		sitetest.Step{Header: user, Want: denied(600)}, // and remembered for as long as it takes
		sitetest.Step{After: 20 * time.Minute, Header: user, Want: free},
		sitetest.Step{Header: user, Want: denied(60)},
	)
}

// TestBanInFields guards that the fields of the IETF's draft tell when a ban ends.
func TestBanInFields(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, "rate_limit login {\n"+bans+"headers ratelimit-11\n}\nrespond free")
	s.Run(
		sitetest.Step{Want: `200 policy="login";q=1;w=1 ratelimit="login";r=0;t=1`},
		sitetest.Step{Want: `429 retry-after=60 policy="login";q=1;w=1 ratelimit="login";r=0;t=60`},
		sitetest.Step{After: 10 * time.Second, Want: `429 retry-after=50 policy="login";q=1;w=1 ratelimit="login";r=0;t=50`},
	)
}

// TestBanAfter guards that a ban begins with as many denials as ban_after says.
func TestBanAfter(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, "rate_limit login {\n"+bans+"ban_after 3\n}\nrespond free")
	const short = "429 limit=1 remaining=0 clear=1.000 reset=1.000 retry-after=1"
	s.Run(
		sitetest.Step{Want: "200 limit=1 remaining=0 clear=1.000"},
		sitetest.Step{Want: short},
		sitetest.Step{Want: short},
		sitetest.Step{Want: "429 limit=1 remaining=0 clear=60.000 reset=60.000 retry-after=60"},
	)
}

// TestBanWith guards bans together with what else a limit and a block may have: which
// requests begin them, that what they deny is charged nowhere, and that dry runs deny
// nothing. Of each case, requests of a path are sent in turn, and one more after the ban.
func TestBanWith(t *testing.T) {
	t.Parallel()
	const (
		limit  = "limit a {\nsize 1\ndrip_rate 1s\nban 1m\n}\n"
		behind = "limit b {\nsize 1\ndrip_rate 1h\nban 1h\n}\n"
		first  = "limit c {\nsize 2\ndrip_rate 1h\n}\n"
	)
	for name, tc := range map[string]struct {
		site string
		want string // the status and Retry-After of each request, and then {http.rate_limit.banned}
	}{
		"count":        {"rate_limit x {\nsize 2\ndrip_rate 1s\ncount status 401\nban 1m\n}\nrespond 401", "401 401 429/60/x 429/60/x +60s 401 401 429/60/x"},
		"actual cost":  {"rate_limit x {\nsize 2\ndrip_rate 1s\nactual_cost {http.response.header.Cost}\nban 1m\n}\nheader Cost 2\nrespond ok", "200 429/60/x 429/60/x +60s 200 429/60/x"},
		"min_interval": {"rate_limit x {\nmax 100\nduration 1m\nmin_interval 1s\nban 1m\n}\nrespond ok", "200 429/60/x 429/60/x +59s 429/1/x +1s 200 +1s 200"},
		"soft":         {"rate_limit x {\nsize 1\nsoft 1\ndrip_rate 1s\nban 1m\n}\nrespond ok", "200 200 429/60/x +60s 200 200 429/60/x"},
		"warm_up":      {"rate_limit x {\nalgorithm warm_up\nrate 1/s\nwarm_up 10s\nban 1m\n}\nrespond ok", "200 429/60/x +60s 200"},
		"sliding_log":  {"rate_limit x {\nalgorithm sliding_log\nsize 1\nwindow 1s\nban 1m\n}\nrespond ok", "200 429/60/x 429/60/x +60s 200 429/60/x"},
		"dry run":      {"rate_limit x {\nsize 1\ndrip_rate 1s\nban 1m\ndry_run\n}\nrespond ok", "200 200 200"},
		"nested":       {"rate_limit x {\nsize 10\ndrip_rate 1h\n" + limit + "}\nrespond ok", "200 429/60/x/a 429/60/x/a +60s 200"},
		"no name":      {"rate_limit {\nsize 1\ndrip_rate 1s\nban 1m\n}\nrespond ok", "200 429/60/default 429/60/default +60s 200"},
		// The ban of the second block is met first: its limit is full when the first's is.
		"two blocks": {"route {\nrate_limit x {\nsize 10\ndrip_rate 1h\n}\nrate_limit y {\nsize 1\ndrip_rate 1s\nban 1m\n}\nrespond ok\n}", "200 429/60/y 429/60/y +60s 200"},
		// Two requests are charged to c, and two more are denied by a's ban: with atomic
		// they are charged nowhere, with each to all but a.
		"atomic": {"rate_limit x {\n" + first + limit + "}\nrespond ok", "200 429/60/x/a 429/60/x/a +60s 200 +60s 429/3480/"},
		"each":   {"rate_limit x {\naccounting each\n" + first + limit + "}\nrespond ok", "200 429/3600/x/a 429/3600/x/a +60s 429/3540/"},
		// While a is banned, it is not charged either, or the next ban would begin at once.
		"each, alone": {"rate_limit x {\naccounting each\n" + limit + "}\nrespond ok", "200 429/60/x/a +59s 429/1/x/a +1s 200"},
		"each, two":   {"rate_limit x {\naccounting each\n" + limit + "limit d {\nsize 100\n}\n}\nrespond ok", "200 429/60/x/a +59s 429/1/x/a +1s 200"},
	} {
		for _, redis := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, redis %t", name, redis), func(t *testing.T) {
				c := sitetest.Config{Site: strings.Replace(tc.site, "respond", "header X-Banned {http.rate_limit.banned}\nrespond", 1) +
					"\nhandle_errors {\nheader X-Banned {http.rate_limit.banned}\nrespond {err.status_code}\n}"}
				if redis {
					c.Global = sitetest.RedisGlobal(redistest.Start(t).Addr, sitetest.LongTimeout)
				}
				s := sitetest.StartConfig(t, c)
				for i, want := range strings.Fields(tc.want) {
					if after, ok := strings.CutPrefix(want, "+"); ok {
						if redis {
							break // whose clock can't be moved
						}
						d, err := time.ParseDuration(after)
						if err != nil {
							t.Fatal(err)
						}
						s.Clock.Advance(d)
						continue
					}
					a := s.Get("/")
					got := fmt.Sprint(a.StatusCode)
					if a.StatusCode == 429 {
						got += "/" + a.Header.Get("Retry-After") + "/" + a.Header.Get("X-Banned")
					}
					if got != want {
						t.Errorf("request %d of %q: got %s", i+1, tc.want, got)
					}
				}
			})
		}
	}
}

// TestBanInDryRun guards that the ban of a dry run shows nowhere but where dry runs do, and
// that the admin API lists it as one.
func TestBanInDryRun(t *testing.T) {
	s, a := sitetest.StartWithAdmin(t, sitetest.Config{Site: "rate_limit login {\n" + bans + "dry_run\n}\n" +
		`respond "dry_run={http.rate_limit.dry_run} banned={http.rate_limit.banned}"`})
	user := []string{"User: a"}
	s.Run(
		sitetest.Step{Header: user, Want: "200", Text: "dry_run= banned="},
		sitetest.Step{Header: user, Want: "200", Text: "dry_run=login banned="},
		sitetest.Step{After: 59 * time.Second, Header: user, Want: "200", Text: "dry_run=login banned="},
		sitetest.Step{Header: user, Want: "200", Text: "dry_run=login banned="},
	)
	sitetest.WantJSON(t, a.Ask("GET", "bans", ""), `{"bans": [{"limit": "login", "key": "a", "left": 1, "dry_run": true}]}`)
	s.Run(sitetest.Step{After: time.Second, Header: user, Want: "200", Text: "dry_run= banned="})
	sitetest.WantJSON(t, a.Ask("GET", "bans", ""), `{"bans": []}`)
}

// TestBanIsObserved guards what operators see of bans: the field of the access log, metrics
// of those that have begun and of the requests that they deny, and an event, which has the
// key only if the limit tracks keys.
func TestBanIsObserved(t *testing.T) {
	subscribe(t)
	s, a := sitetest.StartWithAdmin(t, sitetest.Config{
		Global: strings.Replace(listening("a"), "events {", "events {\non "+telemetry.EventBanned+" test_subscriber a", 1),
		Site: "rate_limit login {\n" + bans + "track_top 10\n}\n" +
			"rate_limit other {\nkey {header.Other}\nsize 1\nban 1h\nlog\n}\nrespond ok",
	})
	for range 4 {
		s.Get("/", "User: a")
	}
	s.Get("/", "User: b", "Other: b")
	s.Get("/", "User: c", "Other: b")
	if e := s.LastAccess(); fmt.Sprint(e["rate_limit"].(map[string]any)["banned"]) != "other" {
		t.Errorf("access log: %v", e["rate_limit"])
	}
	wantSamples(t, collected(t, s.Process), map[string]string{
		`bans_total{limit="login"}`:                                  "1",
		`bans_total{limit="other"}`:                                  "1",
		`decisions_total{by="memory",limit="login",result="denied"}`: "1",
		`decisions_total{by="memory",limit="login",result="banned"}`: "2",
		`decisions_total{by="memory",limit="other",result="denied"}`: "1",
		`decisions_total{by="memory",limit="other",result="banned"}`: "0",
	})
	var got []string
	for _, e := range waitForEvents(t, telemetry.EventBanned, 2) {
		text, err := json.Marshal(e.data)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, string(text))
	}
	slices.Sort(got)
	if want := []string{`{"duration":3600,"limit":"other"}`, `{"duration":60,"key":"a","limit":"login"}`}; !slices.Equal(got, want) {
		t.Errorf("events %q, want %q", got, want)
	}
	sitetest.WantJSON(t, byName(t, a.Ask("GET", "status", ""))["login"], `{"denied": 3}`)
}

// TestBanOnReload guards that a reload keeps bans, also one that changes the numbers of the
// limit, and the list of them; and that they end when the limit does not ban any more.
func TestBanOnReload(t *testing.T) {
	site := func(options string) string {
		return "rate_limit login {\nkey {header.User}\n" + options + "\n}\nrespond free"
	}
	c := sitetest.Config{Site: site("size 1\ndrip_rate 1s\nban 1m 10m")}
	s, a := sitetest.StartWithAdmin(t, c)
	c.Admin = a.Addr
	load := func(options string) {
		t.Helper()
		c.Site = site(options)
		s.Reload(c)
	}
	s.Get("/", "User: a")
	s.Get("/", "User: a")
	s.Clock.Advance(10 * time.Second)
	load("size 5\ndrip_rate 2s\nban 1m 10m\nban_after 2\ncount status 401")
	s.Run(sitetest.Step{Header: []string{"User: a"}, Want: "429 limit=5 remaining=0 clear=50.000 reset=50.000 retry-after=50"})
	sitetest.WantJSON(t, a.Ask("GET", "bans", ""), `{"bans": [{"limit": "login", "key": "a", "left": 50}]}`)
	load("size 5\ndrip_rate 2s")
	s.Run(sitetest.Step{Header: []string{"User: a"}, Want: "200 limit=5 remaining=4 clear=2.000"})
	sitetest.WantJSON(t, a.Ask("GET", "bans", ""), `{"bans": []}`)
	if n := s.Process.Bans.Len(); n > 0 {
		t.Errorf("%d lists of bans are kept for a config that does not ban", n)
	}
}

// TestBanSurvivesStoreChange guards that a ban goes on when buckets move from the process to
// Redis, where others find it, and back.
func TestBanSurvivesStoreChange(t *testing.T) {
	server := redistest.Start(t)
	memory := sitetest.Config{Site: "rate_limit login {\nkey {header.User}\nsize 1\ndrip_rate 100ms\nban 1h\n}\nrespond free"}
	redis := memory
	redis.Global = sitetest.RedisGlobal(server.Addr, sitetest.LongTimeout)
	p, other := startAdmin(t, memory), startAdmin(t, redis)
	sitetest.Eventually(t, "a ban", func() bool {
		p.asks("a")
		return p.asks("a") == 429
	})
	for _, c := range []sitetest.Config{redis, memory, redis} {
		p.load(c)
		for range 3 {
			if status := p.asks("a"); status != 429 {
				t.Errorf("got %d", status)
			}
		}
	}
	if status := other.asks("a"); status != 429 {
		t.Errorf("another instance: got %d", status)
	}
}

// TestAdminBans guards that the admin API lists bans, places and lifts them, that peek shows
// them and reset lifts them, of keys and of clients without one.
func TestAdminBans(t *testing.T) {
	s, a := sitetest.StartWithAdmin(t, sitetest.Config{Site: "rate_limit login {\n" + bans + "}\nrate_limit drips {\nkey {header.Other}\nsize 1\ndrip_rate {header.Drip}\nban 1h\n}\nrespond free"})
	user, nobody := []string{"User: a", "Drip: 1h"}, []string{"Drip: 1h"}
	const key, address = `{"limit": "login", "key": "a"}`, `{"limit": "login", "address": "127.0.0.1"}`
	ban := func(of, duration string) map[string]any {
		t.Helper()
		return a.Ask("POST", "ban", strings.Replace(of, "}", `, "duration": "`+duration+`"}`, 1))
	}
	sitetest.WantJSON(t, a.Ask("POST", "unban", key), `{"limit": "login", "key": "a", "left": 0}`)
	sitetest.WantJSON(t, ban(key, "2h"), `{"limit": "login", "key": "a", "left": 7200}`)
	sitetest.WantJSON(t, ban(key, "1m"), `{"left": 7200}`) // which it does not shorten
	sitetest.WantJSON(t, ban(address, "1d"), `{"limit": "login", "address": "127.0.0.1", "left": 86400}`)
	sitetest.WantJSON(t, ban(`{"limit": "drips", "key": "x"}`, "10m"), `{"limit": "drips", "left": 600}`) // whatever it drips
	if got := s.Get("/", user...).Header.Get("Retry-After"); got != "7200" {
		t.Errorf("a key that is banned may retry after %s", got)
	}
	if got := s.Get("/", nobody...).Header.Get("Retry-After"); got != "86400" {
		t.Errorf("a client without key that is banned may retry after %s", got)
	}
	if got := s.Get("/", "User: b", "Other: x", "Drip: 1m").Header.Get("Retry-After"); got != "600" {
		t.Errorf("a key with another drip rate may retry after %s", got)
	}
	s.Clock.Advance(100 * time.Second)
	sitetest.WantJSON(t, a.Ask("GET", "bans", ""), `{"bans": [
		{"limit": "login", "address": "127.0.0.1", "left": 86300}, {"limit": "login", "key": "a", "left": 7100}, {"limit": "drips", "key": "x", "left": 500}]}`)
	sitetest.WantJSON(t, a.Ask("GET", "bans?limit=drips", ""), `{"bans": [{"limit": "drips", "key": "x", "left": 500}]}`)
	sitetest.WantJSON(t, a.Ask("POST", "peek", key), `{"level": 0, "remaining": 0, "banned": 7100, "retry_after": 7100}`)
	sitetest.WantJSON(t, a.Ask("POST", "peek", `{"key": "a"}`), `{"checked": 1, "buckets": [{"limit": "login", "banned": 7100}]}`)
	sitetest.WantJSON(t, a.Ask("POST", "unban", key), `{"left": 7100}`)
	sitetest.WantJSON(t, a.Ask("POST", "unban", key), `{"left": 0}`)
	sitetest.WantJSON(t, a.Ask("POST", "peek", key), `{"remaining": 1, "retry_after": 0}`)
	sitetest.WantJSON(t, a.Ask("POST", "reset", address), `{"banned": 86300}`)
	s.Run(sitetest.Step{Header: append(user, "Other: y"), Want: "200 limit=1 remaining=0 clear=3600.000"})
	sitetest.WantJSON(t, a.Ask("GET", "bans", ""), `{"bans": [{"limit": "drips", "key": "x"}]}`)
	for _, l := range a.Ask("GET", "limits", "")["limits"].([]any) {
		if l.(map[string]any)["path"] == "login" {
			sitetest.WantJSON(t, l, `{"ban": [60, 600], "ban_after": 1}`)
		}
	}
	ban(`{"limit": "login", "key": "s3cret"}`, "1h")
	a.Ask("POST", "unban", `{"limit": "login", "key": "s3cret"}`)
	wantNotLogged(t, s, "s3cret")
}

// TestAdminBadBans guards that each mistake is answered by one line that says what would be
// right.
func TestAdminBadBans(t *testing.T) {
	_, a := sitetest.StartWithAdmin(t, sitetest.Config{Site: "rate_limit login {\n" + bans + "}\nrate_limit other {\nsize 1\n}\nrespond free"})
	const such = `an object such as {"limit": "login", "key": "203.0.113.7", "duration": "10m"}`
	const duration = `duration: not valid; use a text from "1s" to "6000d", such as "10m"`
	const bare = `limit: none given; use the path of a limit with ban, such as "login"`
	for _, tc := range []struct {
		method, path, body string
		status             int
		want               string
	}{
		{"GET", "ban", "", 405, `method: "GET" is not valid; use POST`},
		{"GET", "unban", "", 405, `method: "GET" is not valid; use POST`},
		{"POST", "bans", "", 405, `method: "POST" is not valid; use GET`},
		{"POST", "ban", "", 400, "body: none given; use " + such},
		{"POST", "ban", "[]", 400, "body: not valid; use " + such},
		{"POST", "ban", `{"limit": "login", "key": "a"}`, 400, duration},
		{"POST", "ban", `{"limit": "login", "key": "a", "duration": null}`, 400, duration},
		{"POST", "ban", `{"limit": "login", "key": "a", "duration": 60}`, 400, duration},
		{"POST", "ban", `{"limit": "login", "key": "a", "duration": "-1h"}`, 400, duration},
		{"POST", "ban", `{"limit": "login", "key": "a", "duration": "1ms"}`, 400, duration},
		{"POST", "ban", `{"limit": "login", "key": "a", "duration": "6001d"}`, 400, duration},
		{"POST", "ban", `{"limit": "login", "key": "a", "duration": "1h", "why": "x"}`, 400, "body: unknown field; use limit, key, address or duration"},
		{"POST", "ban", `{"key": "a", "duration": "1h"}`, 400, bare},
		{"POST", "unban", `{"key": "a"}`, 400, bare},
		{"POST", "ban", `{"limit": "login", "duration": "1h"}`, 400, "key: none given; use a text that {http.request.header.User} can expand to"},
		{"POST", "ban", `{"limit": "other", "key": "192.0.2.1", "duration": "1h"}`, 400, "limit: it does not ban; use one with ban, such as ban 10m"},
		{"POST", "unban", `{"limit": "other", "key": "192.0.2.1"}`, 400, "limit: it does not ban; use one with ban, such as ban 10m"},
		{"GET", "bans?limit=other", "", 400, "limit: it does not ban; use one with ban, such as ban 10m"},
		{"GET", "bans?limit=none", "", 404, "limit: the running config has no such limit; use login or other"},
		{"GET", "bans?n=1", "", 400, "query: not valid; use at most a limit, such as ?limit=login"},
		{"GET", "bans?limit=login&limit=other", "", 400, "query: not valid; use at most a limit, such as ?limit=login"},
	} {
		status, text := a.Send(tc.method, tc.path, tc.body)
		var answer struct{ Error string }
		if err := json.Unmarshal([]byte(text), &answer); err != nil || status != tc.status || answer.Error != tc.want {
			t.Errorf("%s %s %s:\n got %d %s\nwant %d %s", tc.method, tc.path, tc.body, status, text, tc.status, tc.want)
		}
	}
}

// TestBanOnSeveralNodes guards that a ban that one instance begins, or an operator places on
// one, holds on all at once, that all list it that have met it, that it survives a reload, an
// outage and the loss of Redis's data, and that lifting it on one lifts it on all.
func TestBanOnSeveralNodes(t *testing.T) {
	server := redistest.Start(t)
	c := sitetest.Config{Global: sitetest.RedisGlobal(server.Addr, sitetest.LongTimeout), Site: "rate_limit login {\nkey {header.User}\nsize 2\ndrip_rate 10ms\nban 1h\n}\nrespond free"}
	all, admins := nodes(t, 3, c)
	banned := func(user string) {
		t.Helper()
		for i, node := range all {
			if status := node.asks(user); status != 429 {
				t.Errorf("%s: node %d answers %d", user, i, status)
			}
		}
	}
	for i, node := range all { // to connect
		node.asks(fmt.Sprint("user ", i))
	}
	sitetest.Eventually(t, "a ban", func() bool { return all[0].asks("a") == 429 })
	time.Sleep(30 * time.Millisecond) // the bucket itself has room again
	banned("a")
	for _, a := range admins {
		sitetest.WantJSON(t, a.Ask("POST", "peek", `{"limit": "login", "key": "a"}`), `{"from": "redis", "node": {"remembered": true}}`)
		bans := a.Ask("GET", "bans", "")["bans"].([]any)
		sitetest.WantJSON(t, bans, `[{"limit": "login", "key": "a"}]`)
		if left := bans[0].(map[string]any)["left"].(float64); left < 3500 || left > 3600 {
			t.Errorf("banned for %v", left)
		}
	}

	admins[1].Ask("POST", "ban", `{"limit": "login", "key": "b", "duration": "2h"}`)
	banned("b")
	all[2].load(c)
	banned("a")
	sitetest.WantJSON(t, admins[2].Ask("GET", "bans", ""), `{"bans": [{"key": "b"}, {"key": "a"}]}`)
	admins[2].Ask("POST", "unban", `{"limit": "login", "key": "b"}`)
	free := func(user string) bool {
		return !slices.ContainsFunc(all, func(node *reloadable) bool {
			time.Sleep(20 * time.Millisecond)
			return node.asks(user) != 200
		})
	}
	sitetest.Eventually(t, "b to be let in", func() bool { return free("b") })
	sitetest.WantJSON(t, admins[2].Ask("GET", "bans", ""), `{"bans": [{"key": "a"}]}`)

	server.Kill()
	banned("a")
	if status, text := admins[0].Send("POST", "ban", `{"limit": "login", "key": "c", "duration": "1h"}`); status != http.StatusServiceUnavailable || !strings.Contains(text, "redis unavailable: ") || !strings.Contains(text, `"left":3`) {
		t.Errorf("ban without Redis: got %d %s", status, text)
	}
	if status := all[0].asks("c"); status != 429 {
		t.Errorf("a key that was banned without Redis gets %d", status)
	}
	if status, text := admins[1].Send("GET", "bans", ""); status != http.StatusServiceUnavailable || !strings.Contains(text, `"key":"a"`) {
		t.Errorf("bans without Redis: got %d %s", status, text)
	}
	server.Restart(t)
	sitetest.Eventually(t, "Redis to be used again", func() bool {
		for i, node := range all {
			node.asks("another")
			if status, _ := admins[i].Send("POST", "peek", `{"limit": "login", "key": "a"}`); status != 200 {
				return false
			}
		}
		return true
	})
	banned("a")
	banned("c")

	sitetest.Eventually(t, "a to be let in", func() bool { // each instance may tell Redis once more what it had lost
		admins[2].Ask("POST", "reset", `{"limit": "login", "key": "a"}`)
		return free("a")
	})
	c.Site = strings.Replace(c.Site, "ban 1h", "", 1)
	all[0].load(c)
	if status := all[0].asks("c"); status != 200 {
		t.Errorf("without the option: got %d", status)
	}
}

// TestBanAtOnce guards that of any number of parallel guesses, on three instances, no more
// than the limit are checked before the key is banned, and none after.
func TestBanAtOnce(t *testing.T) {
	site := "rate_limit login {\nkey all\nsize 3\ndrip_rate 1ms\ncount status 401\nban 1h\n}\nrespond 401"
	eachNode(t, site, func(t *testing.T, urls []string) {
		sitetest.Eventually(t, "a ban", func() bool {
			redistest.Together(t, 32, func(i int) { sitetest.Ask(t.Context(), urls[i%len(urls)]) })
			_, h := sitetest.Ask(t.Context(), urls[0])
			return fieldstest.Number(h.Get("Retry-After")) > 60
		})
		redistest.Together(t, 32, func(i int) {
			if status, h := sitetest.Ask(t.Context(), urls[i%len(urls)]); status != 429 || fieldstest.Number(h.Get("Retry-After")) < 3000 {
				t.Errorf("during the ban: got %d, retry after %s", status, h.Get("Retry-After"))
			}
		})
	})
}

// TestBanOffline guards that explain shows which limits ban, and that replay decides with
// bans and says what they did.
func TestBanOffline(t *testing.T) {
	t.Parallel()
	const text = "http://example.com {\nrate_limit login {\nsize 1\ndrip_rate 1s\nban 1m 1h\nban_after 2\n}\nrate_limit other {\nsize 9\n}\n}\n"
	sitetest.RunCommand(t, "explain", "--config", sitetest.ConfigFile(t, text), "http://example.com/").Want(t, 0, `GET http://example.com/ from 192.0.2.1, handled by srv0

LIMIT  KEY        COST  ALGORITHM     SIZE  RATE OR WINDOW  OPTIONS
login  192.0.2.1     1  leaky_bucket     1  1 each 1s       ban 1m 1h, ban_after 2
other  192.0.2.1     1  leaky_bucket     9  1 each 1s
`)
	var log strings.Builder
	for _, at := range []int64{0, 1, 2, 30_000, 60_001, 60_002, 60_003, 60_004, 200_000} {
		log.WriteString(logLine(time.Duration(at)*ms, "192.0.2.1", "/"))
	}
	r := replayed(t, logFile(t, log.String()), replay.Options{}, strings.Replace(text, "http://", "", 1))
	l := r.Configs[0].Limits[0]
	if l.Admitted != 2 || l.Denied != 7 || !strings.Contains(l.Numbers, ", ban 1m 1h, ban_after 2") ||
		!slices.Contains(l.Unusual, "It placed 2 bans, which alone denied 3 of the requests.") {
		t.Errorf("got %+v", l)
	}
}

// TestBanCommands guards what the commands about bans print.
func TestBanCommands(t *testing.T) {
	s, a := sitetest.StartWithAdmin(t, sitetest.Config{Site: "rate_limit login {\n" + bans + "match not path /free\n}\nrate_limit {\nsize 9\n}\nrespond free"})
	address := "--address=" + a.Addr
	sitetest.RunCommand(t, "bans", address).Want(t, 0, "No key is banned, as far as this Caddy knows.\n")
	s.Get("/", "User: a")
	s.Get("/", "User: a")
	sitetest.RunCommand(t, "ban", address, "login", "b\x1b", "2h").Want(t, 0, "Banned \"b\\x1b\" at limit login for 2h0m0s.\n")
	sitetest.RunCommand(t, "ban", address, "login", "--client-ip", "192.0.2.1", "90s").Want(t, 0, "Banned 192.0.2.1 (no key) at limit login for 1m30s.\n")
	sitetest.RunCommand(t, "bans", address).Want(t, 0, ""+
		"LIMIT  KEY                 BANNED FOR  SITE       MATCH\n"+
		"login  \"b\\x1b\"             2h0m0s      127.0.0.1  not (path /free)\n"+
		"login  192.0.2.1 (no key)  1m30s       127.0.0.1  not (path /free)\n"+
		"login  a                   1m0s        127.0.0.1  not (path /free)\n")
	if a := s.Get("/free", "User: a"); a.StatusCode != 200 {
		t.Errorf("a request that the limit does not match: %s", a)
	}
	sitetest.RunCommand(t, "peek", address, "login", "a").Want(t, 0, ""+
		"limit        login\n"+
		"options      ban 1m 10m\n"+
		"in           memory\n"+
		"level        1 of 1\n"+
		"remaining    0\n"+
		"banned for   1m0s\n"+
		"retry after  1m0s\n"+
		"empties in   1s\n")
	sitetest.RunCommand(t, "unban", address, "login", "a").Want(t, 0, "The ban of a at limit login is lifted. It would have lasted for 1m0s. Its bucket stays as it is; reset empties it too.\n")
	sitetest.RunCommand(t, "unban", address, "login", "a").Want(t, 0, "There is no ban of a at limit login.\n")
	sitetest.RunCommand(t, "ban", address, "default", "192.0.2.1", "1h").Want(t, 1, "Error: limit: it does not ban; use one with ban, such as ban 10m\n")
	sitetest.RunCommand(t, "ban", address, "login", "a").Want(t, 1, "Error: DURATION: \"a\" is not valid; use a duration behind LIMIT and KEY, such as 10m\n")
	sitetest.RunCommand(t, "bans", address, "no such").Want(t, 1, "Error: limit: the running config has no such limit; use default or login\n")
	for _, args := range [][]string{{"bans", "login"}, {"ban", "login", "c", "1h"}, {"unban", "login", "c"}} {
		if r := sitetest.RunCommand(t, append(args, address, "--json")...); !json.Valid([]byte(r.Out)) || r.Status != 0 || r.Errors != "" {
			t.Errorf("%q with --json: got %+v", args, r)
		}
	}
	if r := sitetest.RunCommand(t, "limits", address); !strings.Contains(r.Out, "  ban 1m 10m  ") {
		t.Errorf("limits: %s", r.Out)
	}
}
