package behaviour

import (
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/zone"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome/fieldstest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/configtest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// TestPublishedZones guards that the examples in the README of mholt/caddy-ratelimit
// load, also once they are formatted or adapted, and limit as they say there.
func TestPublishedZones(t *testing.T) {
	const block = `rate_limit {
		distributed
		zone static_example {
			match {
				method GET
			}
			key    static
			events 100
			window 1m
		}
		zone dynamic_example {
			key    {remote_host}
			events 2
			window 5s
		}
		log_key
	}
	`
	const routes = `[{"handle": [
		{
			"handler": "rate_limit",
			"rate_limits": {
				"static_example": {"match": [{"method": ["GET"]}], "key": "static", "window": "1m", "max_events": 100},
				"dynamic_example": {"key": "{http.request.remote.host}", "window": "5s", "max_events": 2}
			},
			"distributed": {},
			"log_key": true
		},
		{"handler": "static_response", "body": "I'm behind the rate limiter!"}
	]}]`
	if err := configtest.ValidateCaddyfile(":80 {\n" + block + "respond ok\n}"); err != nil {
		t.Error(err)
	}
	for name, c := range map[string]sitetest.Config{"Caddyfile": {Site: block + `respond "I'm behind the rate limiter!"`}, "JSON": {Routes: routes}} {
		t.Run(name, func(t *testing.T) {
			s := sitetest.StartConfig(t, c)
			s.Run(
				sitetest.Step{Want: "200", Text: "I'm behind the rate limiter!"},
				sitetest.Step{Want: "200"},
				sitetest.Step{Want: "429 retry-after=5"},
			)
			s.From("127.0.0.2")
			s.Run(append(sitetest.Times(2, sitetest.Step{Want: "200"}), sitetest.Step{Want: "429 retry-after=5"})...)
		})
	}
}

// TestTestedZones guards that the configs of the tests of mholt/caddy-ratelimit
// decide here as they are tested there: so many events in a window, the time to wait,
// matchers, and counts of each zone and key.
func TestTestedZones(t *testing.T) {
	t.Parallel()
	zone1 := `"zone1": {"match": [{"method": ["GET"]}], "key": %q, "window": "60s", "max_events": 10}`
	routes := func(zones, more string) sitetest.Config {
		return sitetest.Config{Routes: `[{"handle": [{"handler": "rate_limit", "rate_limits": {` + zones + `}` + more + `},
			{"handler": "static_response", "status_code": 200}]}]`}
	}
	caddyfile := sitetest.Config{Site: `rate_limit {
		zone zone1 {
			match {
				method GET
			}
			key static
			window 60s
			events 10
		}
	}
	respond 200`}
	single := fmt.Sprintf(zone1, "static")
	for name, c := range map[string]sitetest.Config{
		"JSON": routes(single, ""), "Caddyfile": caddyfile,
		"distributed": routes(single, `, "distributed": {"write_interval": "3600s", "read_interval": "3600s", "purge_age": "7200s"}`),
	} {
		t.Run(name, func(t *testing.T) {
			s := sitetest.StartConfig(t, c)
			s.Run(sitetest.Times(10, sitetest.Step{Want: "200"})...)
			s.Run(
				sitetest.Step{Want: "429 retry-after=60"},
				sitetest.Step{Method: "POST", Want: "200"},
				sitetest.Step{After: 30 * time.Second, Want: "429 retry-after=30"},
				sitetest.Step{After: 30 * time.Second, Want: "200"},
			)
		})
	}
	t.Run("distinct zones and keys", func(t *testing.T) {
		get := fmt.Sprintf(zone1, "{http.request.orig_uri.path}")
		remove := strings.NewReplacer("zone1", "zone2", "GET", "DELETE").Replace(get)
		s := sitetest.StartConfig(t, routes(get+","+remove, ""))
		for _, method := range []string{"GET", "DELETE"} {
			for _, path := range []string{"/path1", "/path2"} {
				s.Run(sitetest.Times(10, sitetest.Step{Method: method, Path: path, Want: "200"})...)
				s.Run(sitetest.Step{Method: method, Path: path, Want: "429 retry-after=60"})
			}
		}
	})
}

// TestZonePrefixes guards which keys share a count, as mholt/caddy-ratelimit tests it,
// and where it differs: an address counts whatever the way it is written.
func TestZonePrefixes(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		prefixes string
		a, b     string
		share    bool
	}{
		{"ipv6_prefix 64", "2001:db8:1234:5678:9abc:def0:1234:5678", "2001:db8:1234:5678:ffff:ffff:ffff:ffff", true},
		{"ipv6_prefix 64", "2001:db8:1234:5678::1", "2001:db8:1234:5679::1", false},
		{"ipv6_prefix 48", "2001:db8:1234:5678::1", "2001:db8:1234::", true},
		{"ipv6_prefix 128", "2001:db8:1234:5678::1", "2001:db8:1234:5678::2", false},
		{"ipv4_prefix 24", "192.168.1.100", "192.168.1.1", true},
		{"ipv4_prefix 8", "10.0.0.50", "10.9.9.9", true},
		{"ipv4_prefix 32", "172.16.5.4", "172.16.5.5", false},
		{"ipv4_prefix 24\nipv6_prefix 64", "2001:db8::1", "2001:db8::2", true},
		{"ipv4_prefix 24\nipv6_prefix 64", "192.168.1.100", "192.168.2.100", false},
		{"ipv6_prefix 64", "192.168.1.100", "192.168.1.101", false},
		{"ipv4_prefix 24", "2001:db8::1", "2001:db8::2", false},
		{"", "2001:db8::1", "2001:db8::2", false},
		{"", "192.168.1.100", "192.168.1.101", false},
		{"ipv4_prefix 0\nipv6_prefix 0", "2001:db8::1", "2001:db8::2", false},
		{"ipv6_prefix 64", "static", "static2", false},
		{"ipv6_prefix 64", "", "", true},

		// These differ.
		{"", "2001:db8::1", "2001:DB8:0::1", true},
		{"", "192.168.1.1", "::ffff:192.168.1.1", true},
		{"", "192.0.2.1", "2002:c000:201::1", true},
	} {
		t.Run(fmt.Sprint(strings.ReplaceAll(tc.prefixes, "\n", " "), " ", tc.a, " ", tc.b), func(t *testing.T) {
			s := sitetest.Start(t, "rate_limit {\nzone a {\nkey {header.X-Address}\n"+tc.prefixes+"\nevents 1\nwindow 1h\n}\n}\nrespond ok")
			s.Get("/", "X-Address: "+tc.a)
			if denied := s.Get("/", "X-Address: "+tc.b).StatusCode == 429; denied != tc.share {
				t.Errorf("they share a count: %t, want %t", denied, tc.share)
			}
		})
	}
}

// TestZoneOrder guards the rule for several zones: those that admit most in a time are
// asked first; those before the one that denies stay charged, and those behind it are
// not asked. The name of that zone is in a placeholder and in the log. Zones
// lose the rule with accounting atomic.
func TestZoneOrder(t *testing.T) {
	t.Parallel()
	const zones = `
		zone slow {
			events 3
			window 1h
		}
		zone tight {
			match {
				method GET
			}
			events 2
			window 10s
		}
		zone wide {
			events 4
			window 2s
		}`
	const rest = `
		respond ok
		handle_errors {
			respond "{err.status_code} {http.rate_limit.exceeded.name} {http.rate_limit.denied}"
		}`
	inOrder := []sitetest.Step{
		{Want: "200"},
		{Want: "200"},
		{Want: "429 retry-after=10", Text: "429 tight true"},
		{Want: "429 retry-after=10", Text: "429 tight true"},
		{Want: "429 retry-after=2", Text: "429 wide true"},
		{After: 4 * time.Second, Method: "POST", Want: "200"}, // slow has only counted two so far
		{Method: "POST", Want: "429 retry-after=3596", Text: "429 slow true"},
	}
	atomic := []sitetest.Step{
		{Want: "200"},
		{Want: "200"},
		{Want: "429 retry-after=10", Text: "429 tight true"},
		{Want: "429 retry-after=10", Text: "429 tight true"},
		{Want: "429 retry-after=10", Text: "429 tight true"},
	}
	for _, tc := range []struct {
		name, block string
		steps       []sitetest.Step
	}{
		{"zones", zones, inOrder},
		{"zones, atomic", zones + "\naccounting atomic", atomic},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := sitetest.Start(t, "rate_limit {"+tc.block+"\n}"+rest)
			s.Run(tc.steps...)
		})
	}
}

// theirs is a model of mholt/caddy-ratelimit, after what it documents: zones in
// their order, and for each the times at which it has admitted a key's requests. A
// time of one window ends now and does not include its beginning.
type theirs struct {
	zones []modelZone
	times map[string][]time.Duration
}

// modelZone is a zone of the model.
type modelZone struct {
	name    string
	events  int
	window  time.Duration
	applies func(r modelRequest) bool
	key     func(r modelRequest) string
}

// modelRequest is a request of which the model knows.
type modelRequest struct{ method, user, address string }

// admits returns the name of the zone that denies r at now, or "".
func (m *theirs) admits(r modelRequest, now time.Duration) string {
	for _, z := range m.zones {
		if !z.applies(r) {
			continue
		}
		key := z.name + " " + z.key(r)
		m.times[key] = slices.DeleteFunc(m.times[key], func(at time.Duration) bool { return at <= now-z.window })
		if len(m.times[key]) >= z.events {
			return z.name
		}
		m.times[key] = append(m.times[key], now)
	}
	return ""
}

// TestZonesDecideAsTheirs guards that zones admit and deny what a model of mholt/caddy-ratelimit
// does, and that the same zone denies, over thousands of random requests.
func TestZonesDecideAsTheirs(t *testing.T) {
	t.Parallel()
	const zones = `rate_limit {
		zone all {
			key static
			events 40
			window 30s
		}
		zone address {
			key {remote_host}
			events 12
			window 10s
		}
		zone writes {
			match {
				method POST
			}
			match {
				header X-Write *
			}
			key {header.X-User}-{remote_host}
			events 2
			window 8s
		}
		zone user {
			key {header.X-User}
			events 6
			window 30s
		}
	}
	`
	all := func(modelRequest) bool { return true }
	model := []modelZone{ // 1.33, 1.2, 0.25 and 0.2 a second
		{"all", 40, 30 * time.Second, all, func(modelRequest) string { return "" }},
		{"address", 12, 10 * time.Second, all, func(r modelRequest) string { return r.address }},
		{"writes", 2, 8 * time.Second, func(r modelRequest) bool { return r.method == "POST" },
			func(r modelRequest) string { return r.user + "-" + r.address }},
		{"user", 6, 30 * time.Second, all, func(r modelRequest) string { return r.user }},
	}
	s := sitetest.Start(t, zones+"respond ok\nhandle_errors {\nrespond {http.rate_limit.exceeded.name}\n}")
	m := &theirs{zones: model, times: make(map[string][]time.Duration)}
	random := rand.New(rand.NewPCG(1, 2))
	denied := make(map[string]int)
	for i := range 5000 {
		if random.IntN(4) == 0 {
			most := []time.Duration{ms, time.Second, 3 * time.Second, 40 * time.Second}[random.IntN(4)]
			s.Clock.Advance(time.Duration(random.Int64N(int64(most))).Truncate(µs) + µs)
		}
		r := modelRequest{
			method:  []string{"GET", "POST"}[random.IntN(2)],
			user:    []string{"a", "b", "c"}[random.IntN(3)],
			address: []string{"127.0.0.1", "127.0.0.2"}[i/50%2],
		}
		if i%50 == 0 {
			s.From(r.address)
		}
		a := s.Send(r.method, "/", "X-User: "+r.user)
		want := m.admits(r, s.Clock.Now())
		denied[want]++
		if got := strings.TrimPrefix(a.Text, "ok"); got != want || (a.StatusCode == 429) != (want != "") {
			t.Fatalf("request %d at %v, %+v: got %d %q, want it to be denied by %q", i+1, s.Clock.Now(), r, a.StatusCode, got, want)
		}
	}
	for _, z := range model {
		if denied[z.name] < 50 {
			t.Errorf("zone %s has denied %d requests; the test says little", z.name, denied[z.name])
		}
	}
	t.Log(denied)
}

// TestZoneAtOneWindow guards a difference: a request that comes exactly one window
// after the oldest is admitted and counted. There it is admitted too, by rounding, but
// not counted.
func TestZoneAtOneWindow(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, "rate_limit {\nzone a {\nevents 1\nwindow 10s\n}\n}\nrespond ok")
	s.Run(
		sitetest.Step{Want: "200"},
		sitetest.Step{After: 10*time.Second - µs, Want: "429 retry-after=1"},
		sitetest.Step{After: µs, Want: "200"},
		sitetest.Step{After: µs, Want: "429 retry-after=10"},
	)
}

// TestZoneKeyMayBeEmpty guards that requests without a value for a zone's key share one
// count, as they do there, while those of a limit count by their client's address.
func TestZoneKeyMayBeEmpty(t *testing.T) {
	t.Parallel()
	const limit = "key {header.X-User}{header.X-App}\nsize 1\ndrip_rate 1h\n"
	for _, tc := range []struct {
		name, block string
		shared      bool
	}{
		{"zone", "zone a {\nkey {header.X-User}\nevents 1\nwindow 1h\n}", true},
		{"zone with two placeholders", "zone a {\nkey {header.X-User}{header.X-App}\nevents 1\nwindow 1h\n}", true},
		{"zone without a key", "zone a {\nevents 1\nwindow 1h\n}", true},
		{"zone with an empty key", "zone a {\nkey \"\"\nevents 1\nwindow 1h\n}", true},
		{"limit", limit, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := sitetest.Start(t, "rate_limit {\n"+tc.block+"\n}\nrespond ok")
			if a := s.Get("/"); a.StatusCode != 200 {
				t.Errorf("got %s", a)
			}
			s.From("127.0.0.2")
			if a := s.Get("/"); (a.StatusCode == 429) != tc.shared {
				t.Errorf("got %s, shared %t", a, tc.shared)
			}
		})
	}
}

// TestZoneWithoutEvents guards that a zone in JSON without max_events, or with 0, denies
// each request that it applies to. There it loads too, but each such request panics.
func TestZoneWithoutEvents(t *testing.T) {
	t.Parallel()
	for name, events := range map[string]string{"0": `, "max_events": 0`, "missing": ""} {
		t.Run(name, func(t *testing.T) {
			s := sitetest.StartConfig(t, sitetest.Config{Routes: `[{"handle": [
				{"handler": "rate_limit", "rate_limits": {"none": {"match": [{"path": ["/none"]}], "window": "1m"` + events + `},
					"some": {"window": "1m", "max_events": 2}}},
				{"handler": "static_response", "body": "ok"}
			]}]`})
			s.Run(
				sitetest.Step{Path: "/none", Want: "429"}, // and counted by the other zone, which comes before
				sitetest.Step{Want: "200"},
				sitetest.Step{Want: "429 retry-after=60"},
			)
			warned := slices.ContainsFunc(s.Log("warn", "rate_limit"), func(e sitetest.Entry) bool { return strings.Contains(e.Text(), "admits no request") })
			if !warned {
				t.Error("there is no warning")
			}
		})
	}
}

// TestZoneNames guards that a zone may be called anything, and that its own name is in
// the placeholder and the log.
func TestZoneNames(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"a", "sign in", "sign-in", "api/v1", "ü", "x@client_ip", "{", strings.Repeat("long", 40)} {
		t.Run(name, func(t *testing.T) {
			s := sitetest.Start(t, "rate_limit {\nzone `"+name+"` {\nevents 1\nwindow 1h\n}\nzone other {\nevents 1\nwindow 1m\n}\nheaders ratelimit-11\n}\n"+
				"respond ok\nhandle_errors {\nrespond {http.rate_limit.exceeded.name}\n}")
			s.Get("/")
			s.Clock.Advance(5 * time.Minute)
			a := s.Get("/")
			if a.StatusCode != 429 || a.Text != name {
				t.Errorf("got %s %q", a, a.Text)
			}
			if _, err := fieldstest.ParseList(strings.Join(a.Header["Ratelimit"], ",")); err != nil {
				t.Error(err)
			}
			if lines := s.Log("info", sitetest.OwnLogger); len(lines) != 1 || lines[0]["zone"] != name {
				t.Errorf("logged %v", lines)
			}
		})
	}
}

// TestZoneLog guards the line that is logged for a denied request: the zone, the wait
// that the client is told, its address, and with log_key the key. Without error routes
// the response is empty.
func TestZoneLog(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		options string
		key     any
	}{
		{"key {header.X-User}", nil},
		{"key {header.X-User}\n}\nlog_key\njitter 0.5\nzone b {\nevents 100\nwindow 1h", "alice"},
		{"key {header.X-User}/{remote_host}\n}\nlog_key\nzone b {\nevents 100\nwindow 1h", "alice/127.0.0.1"},
		{"}\nlog_key\nzone b {\nevents 100\nwindow 1h", ""},
	} {
		t.Run(tc.options, func(t *testing.T) {
			s := sitetest.Start(t, "rate_limit {\nzone a {\nevents 1\nwindow 100s\n"+tc.options+"\n}\n}\nrespond ok")
			s.Get("/", "X-User: alice")
			a := s.Get("/", "X-User: alice")
			if a.StatusCode != 429 || !strings.HasPrefix(a.Text, "Too many requests. Retry after 1") {
				t.Errorf("got %s %q", a, a.Text)
			}
			lines := s.Log("info", sitetest.OwnLogger)
			if len(lines) != 1 {
				t.Fatalf("logged %v", lines)
			}
			e := lines[0]
			told, _ := strconv.ParseFloat(a.Header.Get("Retry-After"), 64)
			wait, _ := e["wait"].(float64)
			if e["msg"] != "rate limit exceeded" || e["zone"] != "a" || e["remote_ip"] != "127.0.0.1" || e["key"] != tc.key ||
				wait > told || wait <= told-1 {
				t.Errorf("logged %s, told to wait %v s", e.Text(), told)
			}
		})
	}
}

// TestJitterOfZones guards that the wait of a denial is longer by a random share up to the one
// that is given, and that everything has the same wait: fields, placeholder, message and access
// log. It is the fraction that it is in mholt/caddy-ratelimit, also above 1, which may be meant as
// a percentage.
func TestJitterOfZones(t *testing.T) {
	t.Parallel()
	const zone = "zone a {\nevents 1\nwindow 100s\n}"
	for _, tc := range []struct {
		jitter  string
		longest int64
		warned  string
	}{
		{"0.5", 150, ""},
		{"10", 1100, "for up to 10 %, write jitter 0.1"},
	} {
		t.Run(tc.jitter, func(t *testing.T) {
			s := sitetest.Start(t, "rate_limit {\n"+zone+"\nheaders x-ratelimit ratelimit-11\njitter "+tc.jitter+"\nlog\n}\nrespond ok\n"+
				"handle_errors {\nrespond `{err.message}, {http.rate_limit.retry_after}`\n}")
			if warned := s.Log("warn", sitetest.OwnLogger); (len(warned) > 0) != (tc.warned != "") || len(warned) > 0 && warned[0]["instead"] != tc.warned {
				t.Errorf("warned of %v", warned)
			}
			s.Get("/")
			waits := make(map[int64]bool)
			for range 30 {
				a := s.Get("/")
				wait := fieldstest.Number(a.Header.Get("Retry-After"))
				if waits[wait] = true; wait < 100 || wait > tc.longest+1 {
					t.Fatalf("got %s", a)
				}
				if want := fmt.Sprintf("rate limit a exceeded: retry after %d s, %[1]d", wait); a.Text != want {
					t.Fatalf("got body %q, want %q", a.Text, want)
				}
				logged := s.LastAccess()["rate_limit"].(map[string]any)["retry_after"].(float64)
				if got := a.Header.Get("X-RateLimit-Reset"); got != fmt.Sprintf("%.3f", math.Ceil(logged*1000)/1000) || int64(math.Ceil(logged)) != wait {
					t.Fatalf("got X-RateLimit-Reset %s, Retry-After %d, and %v in the access log", got, wait, logged)
				}
				if got := a.Header.Get("RateLimit"); !strings.HasSuffix(got, fmt.Sprintf(";r=0;t=%d", wait)) {
					t.Fatalf("got RateLimit %s, want t=%d", got, wait)
				}
			}
			if len(waits) < 10 {
				t.Errorf("got only %d different waits", len(waits))
			}
			if longest := slices.Max(slices.Collect(maps.Keys(waits))); longest < (100+tc.longest)/2 {
				t.Errorf("the longest wait was %d s, want up to %d", longest, tc.longest)
			}
		})
	}
}

// TestReplacedOptions guards that what has no effect here is accepted with one WARN for
// each option in a config that says what takes its place, and without if that is in place.
func TestReplacedOptions(t *testing.T) {
	t.Parallel()
	const zones = `rate_limit {
		zone a {
			events 1
			window 1h
		}
		distributed {
			read_interval 1s
			write_interval 1s
			purge_age 1d
		}
		storage no_such_module {
			password secret-canary
		}
		sweep_interval 30s
		disable_metrics
	}
	`
	server := redistest.Start(t)
	for _, tc := range []struct {
		name, global string
		want         []string
	}{
		{"nothing in place", "", []string{"distributed", "storage", "sweep_interval", "disable_metrics"}},
		{"redis", sitetest.RedisGlobal(server.Addr, sitetest.LongTimeout), []string{"sweep_interval", "disable_metrics"}},
		{"metrics off", "rate_limit {\nmetrics off\n}", []string{"distributed", "storage", "sweep_interval"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := sitetest.StartConfig(t, sitetest.Config{Global: tc.global, Site: "route {\n" + zones + zones + "respond ok\n}"})
			var got []string
			for _, e := range s.Log("warn", sitetest.OwnLogger) {
				got = append(got, fmt.Sprint(e["option"]))
				if e["msg"] != "this option of mholt/caddy-ratelimit has no effect" || e["instead"] == "" {
					t.Errorf("logged %s", e.Text())
				}
			}
			if !slices.Equal(got, tc.want) {
				t.Errorf("warned of %q, want %q", got, tc.want)
			}
		})
	}
}

// TestZonesOfOneName guards that zones of one name count together in all handlers, as
// they do there, and that a WARN says if their options differ.
func TestZonesOfOneName(t *testing.T) {
	t.Parallel()
	zoneOf := func(options string) string {
		return "rate_limit {\nzone a {\nkey {header.X-User}\nwindow 1h\n" + options + "\n}\n}\n"
	}
	for _, tc := range []struct {
		name, other string
		warned      bool
	}{{"alike", "events 2", false}, {"different", "events 3", true}} {
		t.Run(tc.name, func(t *testing.T) {
			s := sitetest.Start(t, "handle /a {\n"+zoneOf("events 2")+"respond ok\n}\nhandle {\n"+zoneOf(tc.other)+"respond ok\n}")
			s.Run(
				sitetest.Step{Path: "/a", Want: "200"},
				sitetest.Step{Path: "/b", Want: "200"},
				sitetest.Step{Path: "/a", Want: "429 retry-after=3600"},
			)
			if warned := strings.Contains(fmt.Sprint(s.Log("warn", "rate_limit")), "Zones of this name have different events"); warned != tc.warned {
				t.Errorf("warned: %t, want %t", warned, tc.warned)
			}
		})
	}
}

// TestZonesInRedis guards that all instances that use one Redis count together, in the order
// of zones, and that Redis holds no key of a client.
func TestZonesInRedis(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	c := sitetest.Config{Global: sitetest.RedisGlobal(server.Addr, sitetest.LongTimeout), Site: `
		rate_limit {
			zone wide {
				key {header.X-User}
				events 4
				window 100s
			}
			zone narrow {
				key {header.X-User}-{path}
				events 2
				window 1h
			}
			distributed
		}
		respond ok
		handle_errors {
			respond {http.rate_limit.exceeded.name}
		}
	`}
	s := sitetest.StartConfig(t, c)
	addresses := []string{s.Addr, sitetest.StartProcess(t, c)}
	var got []string
	for i := range 6 {
		s.Addr = addresses[i%2]
		got = append(got, s.Get("/", "X-User: canary").Text)
	}
	// The third and the fourth are counted by the zone before the one that denies them.
	if want := []string{"ok", "ok", "narrow", "narrow", "wide", "wide"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	keys, err := server.Client().Keys(t.Context(), "*").Result()
	if err != nil || len(keys) != 2 || strings.Contains(strings.Join(keys, " "), "canary") {
		t.Errorf("got keys %q, %v", keys, err)
	}
}

// TestZoneDifferences guards the rest of what docs/migration.md says to differ.
func TestZoneDifferences(t *testing.T) {
	zones := func(text string) string { return "rate_limit {\n" + text + "\n}\nrespond ok\n" }
	t.Run("Retry-After covers all zones that were asked", func(t *testing.T) {
		s := sitetest.Start(t, zones("zone a {\nevents 3\nwindow 1m\n}\nzone b {\nevents 1\nwindow 30s\n}")+
			"handle_errors {\nrespond \"{http.rate_limit.exceeded.name}: {err.message}\"\n}")
		s.Run(
			sitetest.Step{Want: "200"},
			sitetest.Step{After: time.Second, Want: "429 retry-after=29", Text: "b: rate limit b exceeded: retry after 29" + " s"},
			sitetest.Step{After: time.Second, Want: "429 retry-after=58"}, // a has room then, b earlier
		)
	})
	t.Run("a new window starts afresh", func(t *testing.T) {
		s := sitetest.Start(t, zones("zone a {\nevents 1\nwindow 1h\n}"))
		s.Run(sitetest.Step{Want: "200"}, sitetest.Step{Want: "429 retry-after=3600"})
		s.Reload(sitetest.Config{Site: zones("zone a {\nevents 1\nwindow 2h\n}")})
		s.Run(sitetest.Step{Want: "200"})
	})
	t.Run("several placeholders", func(t *testing.T) {
		s := sitetest.Start(t, zones("zone a {\nkey {query.a}{query.b}\nevents 1\nwindow 1h\n}"))
		s.Run(sitetest.Step{Path: "/?a=ab&b=c", Want: "200"}, sitetest.Step{Path: "/?a=a&b=bc", Want: "200"})
	})
	t.Run("a placeholder of a Caddyfile in JSON", func(t *testing.T) {
		s := sitetest.StartConfig(t, sitetest.Config{Routes: `[{"handle": [
			{"handler": "rate_limit", "rate_limits": {"a": {"key": "{remote_host}", "window": "1h", "max_events": 1}}},
			{"handler": "static_response"}
		]}]`})
		s.Run(sitetest.Step{Want: "200"})
		s.From("127.0.0.2")
		s.Run(sitetest.Step{Want: "200"})
	})
	t.Run("the zone of an IPv6 address", func(t *testing.T) {
		s := sitetest.Start(t, zones("zone a {\nkey {header.X-Address}\nevents 1\nwindow 1h\n}"))
		s.Run(
			sitetest.Step{Header: []string{"X-Address: fe80::1%a"}, Want: "200"},
			sitetest.Step{Header: []string{"X-Address: fe80::1%b"}, Want: "429 retry-after=3600"},
		)
	})
	t.Run("early data", func(t *testing.T) {
		s := sitetest.Start(t, zones("zone a {\nkey {remote_host}\nevents 1\nwindow 1h\n}"))
		if a := getOverTLS(t, s, false, ""); a.StatusCode != 425 {
			t.Errorf("got %s", a)
		}
	})
	t.Run("a request that Caddy makes", func(t *testing.T) {
		s := sitetest.Start(t, zones("zone a {\nevents 1\nwindow 1h\n}"))
		for range 2 {
			w := httptest.NewRecorder()
			s.Server().ServeHTTP(w, httptest.NewRequest("GET", "http://"+s.Addr+"/", nil))
			if w.Code != 200 {
				t.Errorf("got %d", w.Code)
			}
		}
	})
	t.Run("a matcher that fails", func(t *testing.T) {
		s := sitetest.Start(t, zones("zone a {\nmatch {\nremote_ip 127.0.0.1\n}\nevents 1\nwindow 1h\n}"))
		if a := getOverTLS(t, s, false, ""); a.StatusCode != 425 {
			t.Errorf("got %s", a)
		}
	})
	t.Run("more keys than there is room for", func(t *testing.T) {
		s := sitetest.StartConfig(t, sitetest.Config{
			Global: "rate_limit {\nmemory {\nmax_keys 200\n}\n}",
			Site:   zones("zone a {\nkey {query}\nevents 1\nwindow 1h\n}"),
		})
		for i := range 2000 {
			s.Run(sitetest.Step{Path: fmt.Sprint("/?", i), Want: "200"})
		}
		if held := heldBuckets(s); held > 100 {
			t.Errorf("there are %d keys", held)
		}
	})
	t.Run("more events than a log holds", func(t *testing.T) {
		s := sitetest.Start(t, zones(fmt.Sprintf("zone a {\nevents %d\nwindow 1h\n}", zone.MostLogged+1)))
		s.Run(sitetest.Step{Want: "200"})
		if warned := len(s.Log("warn", sitetest.OwnLogger)) > 0; !warned {
			t.Errorf("warned: %t", warned)
		}
	})
}

// heldBuckets returns how many buckets there are in the process.
func heldBuckets(s *sitetest.Site) int { return s.Process.Newest().Memory.Len() }

// TestZonesWrittenAsLimitsKeepCounts guards that a limit of the name of a zone, written
// as docs/migration.md says, goes on with its counts.
func TestZonesWrittenAsLimitsKeepCounts(t *testing.T) {
	for zone, limit := range map[string]string{
		"key {remote_host}":       "key {remote_host}\nipv6_prefix 128",
		"key {remote_host}{path}": "key {remote_host}{path}\nipv6_prefix 128",
		"key static":              "key static",
		`key ""`:                  "key all",
		"":                        "key all",
	} {
		t.Run(zone, func(t *testing.T) {
			s := sitetest.Start(t, "rate_limit {\nzone a {\n"+zone+"\nevents 2\nwindow 1h\n}\n}\nrespond ok")
			s.Run(sitetest.Times(2, sitetest.Step{Want: "200"})...)
			limits := "rate_limit {\nheaders off\nlimit a {\n" + limit + "\nalgorithm sliding_log\nsize 2\nwindow 1h\n}\n}\nrespond ok"
			s.Reload(sitetest.Config{Site: limits})
			s.Run(sitetest.Step{Want: "429 retry-after=3600"})
		})
	}
}
