package ratelimit

import (
	"bytes"
	"crypto/tls"
	"fmt"
	"reflect"
	"runtime/pprof"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Guards max_keys and when_full of a limit: what is wrong is told in one line
// that has the option, what it got and what would be right.
func TestFullLimitOptions(t *testing.T) {
	const wantMaxKeys = `want a whole number from 1 to 1000000000`
	t.Setenv("RATE_LIMIT_TEST_KEYS", "1000001")
	limit := func(text string) string { return `limit "api": ` + text }
	for block, want := range map[string]string{
		`size 5; max_keys 1`:                                                ``,
		`size 5; max_keys 1000000; when_full share`:                         ``,
		`max 5; duration 1s; min_interval 1s; max_keys 1; when_full forget`: ``,
		`size 5; limit a {; size 1; max_keys 2; when_full share; }`:         ``,

		`size 5; max_keys 0`:          limit(`max_keys: got "0", ` + wantMaxKeys),
		`size 5; max_keys -1`:         limit(`max_keys: got "-1", ` + wantMaxKeys),
		`size 5; max_keys 1e6`:        limit(`max_keys: got "1e6", ` + wantMaxKeys),
		`size 5; max_keys 1000000001`: limit(`max_keys: got "1000000001", ` + wantMaxKeys),
		`size 5; max_keys {query.n}`:  limit(`max_keys: got "{http.request.uri.query.n}", ` + wantMaxKeys),
		`size 5; max_keys 1000001`:    limit(`max_keys: got "1000001", want at most that of memory in the global option, 1000000`),
		`size 5; max_keys {env.RATE_LIMIT_TEST_KEYS}`: limit(
			`max_keys: got "{env.RATE_LIMIT_TEST_KEYS}", want at most that of memory in the global option, 1000000`),
		`size 5; when_full deny`:       limit(`when_full: got "deny", want forget or share`),
		`size 5; when_full Share`:      limit(`when_full: got "Share", want forget or share`),
		`size 5; when_full {query.n}`:  limit(`when_full: got "{http.request.uri.query.n}", want forget or share`),
		`size 5; when_full share deny`: `when_full: got "share deny", want one value, at Caddyfile:4`,

		`max_keys 5; limit a {; size 1; }`:       limit(`max_keys: got "5", want a size beside it`),
		`when_full share; limit a {; size 1; }`:  limit(`when_full: got "share", want a size beside it`),
		`when_full forget; limit a {; size 1; }`: limit(`when_full: got "forget", want a size beside it`),
	} {
		t.Run(block, func(t *testing.T) { wantError(t, validateCaddyfile(inLimit(block)), want) })
	}
	for handler, want := range map[string]string{
		`"limits":[{"size":5,"max_keys":5,"when_full":"share"}]`: ``,
		`"limits":[{"size":5,"max_keys":"5","when_full":""}]`:    ``,
		`"limits":[{"size":5,"max_keys":0}]`:                     `limit "default": max_keys: got "0", ` + wantMaxKeys,
		`"limits":[{"size":5,"max_keys":true}]`:                  `limit "default": max_keys: got "true", ` + wantMaxKeys,
		`"limits":[{"size":5,"when_full":"x"}]`:                  `limit "default": when_full: got "x", want forget or share`,
		`"limits":[{"max_keys":5,"limits":[{"name":"a","size":1}]}]`: `limit "default": max_keys: got "5", ` +
			`want a size beside it`,
	} {
		t.Run(handler, func(t *testing.T) {
			wantError(t, validateConfig(configOf(`"handler":"rate_limit",`+handler)), want)
		})
	}

	const few = "{\nrate_limit {\nmemory {\nmax_keys 10\n}\n}\n}\n"
	wantError(t, validateCaddyfile(few+inLimit(`size 5; max_keys 10`)), "")
	wantError(t, validateCaddyfile(few+inLimit(`size 5; max_keys 11`)),
		limit(`max_keys: got "11", want at most that of memory in the global option, 10`))
}

// Guards that limits which share their buckets agree in how many there may be
// and in what becomes of others, with a name or without, and that others need not.
func TestFullLimitsOfOnePath(t *testing.T) {
	disagree := func(path, option, got, earlier string) string {
		return fmt.Sprintf(`limit %q: %s: got %q here and %q in another limit of path %q, want them equal, `+
			`since limits of one path share their buckets, or another name`, path, option, got, earlier, path)
	}
	for _, tc := range []struct{ name, a, b, want string }{
		{"max_keys", `x {; size 1; }`, `x {; size 1; max_keys 5; }`, disagree("x", "max_keys", "5", "500000")},
		{"when_full", `x {; size 1; when_full share; }`, `x {; size 1; }`, disagree("x", "when_full", "forget", "share")},
		{
			"without names",
			`{; size 1; max_keys 5; }`, `{; size 1; max_keys 6; }`, disagree("default", "max_keys", "6", "5"),
		},
		{
			"min_interval",
			`{; max 1; duration 1s; }`, `{; max 1; duration 1s; when_full share; }`,
			disagree("default", "when_full", "share", "forget"),
		},
		{
			"equal but for defaults written out",
			`x {; size 1; }`, `x {; size 1; max_keys 500000; when_full forget; }`, "",
		},
		{"without names, of other keys", `{; size 1; max_keys 5; }`, `{; size 1; key a; }`, ""},
		{"without names, of other cost", `{; size 2; }`, `{; size 2; cost 2; }`, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			wantError(t, validateCaddyfile(inSite("rate_limit /a "+tc.a+"; rate_limit /b "+tc.b)), tc.want)
		})
	}
}

// Guards what a store is told of a limit's room: of each of its buckets, not of
// those within, and whatever depends on the request.
func TestBucketsOfFullLimits(t *testing.T) {
	within := []*Limit{{Name: "a", Size: "1"}, {Name: "b", Size: "1", MaxKeys: "7", WhenFull: "share"}}
	for _, tc := range []struct {
		limit *Limit
		want  string // by name, max_keys and share key
	}{
		{&Limit{Size: "1"}, "default 0 []"},
		{&Limit{Size: "1", MaxKeys: "5"}, "default 5 []"},
		{&Limit{Size: "1", WhenFull: "forget"}, "default 0 []"},
		{&Limit{Size: "1", WhenFull: "share"}, "default 0 [192.0.0.0/16]"},
		{&Limit{Size: "{n}", MaxKeys: "5", WhenFull: "share"}, "default 5 [192.0.0.0/16]"},
		{
			&Limit{Max: "1", Duration: "1s", MinInterval: "1s", MaxKeys: "5", WhenFull: "share"},
			"default 5 [192.0.0.0/16], default/min_interval 5 [192.0.0.0/16]",
		},
		{
			&Limit{Name: "x", Size: "1", MaxKeys: "5", WhenFull: "share", Limits: within},
			"x 5 [192.0.0.0/16], x/a 0 [], x/b 7 [192.0.0.0/16]",
		},
		{&Limit{Name: "x", Key: "all", Size: "1", WhenFull: "share"}, "x 0 [192.0.0.0/16]"},
	} {
		l, _ := readyLimit(t, tc.limit)
		c := newCheck()
		setClient(c, "192.0.2.1")
		c.replacer.Set("n", "3")
		if err := l.apply(c); err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, b := range c.buckets {
			name, _, _ := strings.Cut(b.Name, "@") // without the digest of an unnamed limit
			got = append(got, fmt.Sprintf("%s %d [%s]", name, b.MaxKeys, b.ShareKey))
		}
		if got := strings.Join(got, ", "); got != tc.want {
			t.Errorf("got %s, want %s", got, tc.want)
		}
	}
}

// setClient gives a request a client's address.
func setClient(c *check, address string) {
	caddyhttp.SetVar(c.request.Context(), caddyhttp.ClientIPVarKey, address)
}

// Guards by which network keys share buckets: that of the client's address,
// which counts as in keys, so that nobody has more of them by writing it in
// another way.
func TestNetworkOfClients(t *testing.T) {
	for address, want := range map[string]string{
		"203.0.113.7":          "203.0.0.0/16",
		"203.0.255.255":        "203.0.0.0/16",
		"203.1.0.0":            "203.1.0.0/16",
		"::ffff:203.0.113.7":   "203.0.0.0/16",
		"2002:cb00:7107::1":    "203.0.0.0/16",
		"64:ff9b::203.0.113.7": "203.0.0.0/16",
		"2001:db8:1:2::3":      "2001:db8::/32",
		"2001:db8:ffff::":      "2001:db8::/32",
		"2001:db9::":           "2001:db9::/32",
		"fe80::1%eth0":         "fe80::/32",
		"fe80::2%eth1":         "fe80::/32",
		"@":                    "none",
		"":                     "none",
		"203.0.113.7:80":       "none",
	} {
		c := newCheck()
		setClient(c, address)
		if got := c.clientNetwork(); got != want {
			t.Errorf("%q: got %q, want %q", address, got, want)
		}
		// Nothing has proven the address yet.
		c = newCheck()
		setClient(c, address)
		if c.request.TLS = new(tls.ConnectionState); c.clientNetwork() != noNetwork {
			t.Errorf("%q in early data: got %q, want %q", address, c.clientNetwork(), noNetwork)
		}
	}
	c := newCheck()
	caddyhttp.SetVar(c.request.Context(), caddyhttp.ClientIPVarKey, nil)
	if got := c.clientNetwork(); got != noNetwork {
		t.Errorf("without an address: got %q, want %q", got, noNetwork)
	}
}

// usage is a limit that has forgotten and shared so often.
func usage(name string, forgotten, shared uint64) limiter.LimitUsage {
	return limiter.LimitUsage{Name: name, Buckets: 9, MaxKeys: 10, Forgotten: forgotten, Shared: shared}
}

// Guards that a limit which forgets or shares is logged at once, then once a
// minute, each time with what became since, and not any more when that is over.
func TestFullLimitsAreDueOnceAMinute(t *testing.T) {
	var log fullLimitLog
	log.reset()
	now := time.Now()
	for i, tc := range []struct {
		after  time.Duration
		usages []limiter.LimitUsage
		want   string // path, forgotten and shared of what is due
	}{
		{0, []limiter.LimitUsage{usage("a", 0, 0)}, "[]"},
		{0, []limiter.LimitUsage{usage("a", 3, 0)}, "[a 3 0]"},
		{time.Second, []limiter.LimitUsage{usage("a", 5, 0)}, "[]"},
		{time.Second, []limiter.LimitUsage{usage("a", 6, 0), usage("b", 0, 2)}, "[b 0 2]"},
		{58*time.Second - 1, []limiter.LimitUsage{usage("a", 6, 0), usage("b", 0, 2)}, "[]"},
		{1, []limiter.LimitUsage{usage("a", 6, 0), usage("b", 0, 2)}, "[a 3 0]"},
		{time.Hour, []limiter.LimitUsage{usage("a", 6, 0), usage("b", 0, 2)}, "[]"},
		{0, []limiter.LimitUsage{usage("a", 7, 0), usage("b", 1, 3)}, "[a 1 0] [b 1 1]"},
		// Limits without a name, and clients without a key of their own, have
		// buckets of other names.
		{time.Hour, []limiter.LimitUsage{
			usage("default", 1, 0), usage("default@1xyz", 10, 0), usage("default@1xyz@client_ip", 100, 0),
			usage("x/min_interval", 4, 0),
		}, "[default 111 0] [x/min_interval 4 0]"},
	} {
		now = now.Add(tc.after)
		var got []string
		for _, limit := range log.due(now, tc.usages) {
			got = append(got, fmt.Sprint([]any{limit.path, limit.forgotten, limit.shared}))
		}
		if got == nil {
			got = []string{"[]"}
		}
		if got := strings.Join(got, " "); got != tc.want {
			t.Errorf("step %d: got %s, want %s", i+1, got, tc.want)
		}
	}
	log.reset()
	if got := log.due(now, []limiter.LimitUsage{usage("a", 2, 0)}); len(got) != 1 || got[0].forgotten != 2 {
		t.Errorf("of a new store got %+v", got)
	}
}

// Guards what the log says of a limit that is full.
func TestFullLimitLog(t *testing.T) {
	const remedy = "; unless this is a flood, raise max_keys of the limit, and of memory if need be, " +
		"to the new keys a second times the seconds that a bucket takes to drain"
	for message, limit := range map[string]fullLimit{
		"limit full: the emptiest buckets are forgotten for those of new keys": {
			path: "api", forgotten: 3, maxKeys: 10,
		},
		"limit full: new keys share a bucket with others of their network": {
			path: "api", shared: 3, maxKeys: 10,
		},
	} {
		core, logs := observer.New(zap.DebugLevel)
		limit.log(zap.New(core))
		want := map[string]any{
			"limit": "api", "forgotten": limit.forgotten, "shared": limit.shared, "max_keys": int64(10),
		}
		got := logs.TakeAll()
		if len(got) != 1 || got[0].Level != zap.WarnLevel || got[0].Message != message+remedy ||
			!reflect.DeepEqual(got[0].ContextMap(), want) {
			t.Errorf("got %+v, want %s", got, message+remedy)
		}
	}
}

// Guards that a running Caddy logs, soon and once, that a limit is full, in the log
// of the configuration that was loaded last, and that what looks for it is one
// goroutine however many reloads there are, none without limits.
func TestFullLimitsAreLogged(t *testing.T) {
	originalEvery, originalUsages := watchEvery, limitUsages
	t.Cleanup(func() { watchEvery, limitUsages = originalEvery, originalUsages })
	var forgotten, looked atomic.Uint64
	watchEvery = time.Millisecond
	limitUsages = func(*limiter.Memory) []limiter.LimitUsage {
		looked.Add(1)
		return []limiter.LimitUsage{usage("api", forgotten.Load(), 0)}
	}
	lookTwice := func() { // the second time begins after the first
		t.Helper()
		n := looked.Load()
		eventually(t, "another look", func() bool { return looked.Load() >= n+2 })
	}
	const few = "rate_limit {\nmemory {\nmax_keys 10\n}\n}"
	s := startConfig(t, config{global: few, site: "rate_limit api {\nsize 9\n}\nrespond admitted"})
	full := func() (lines []entry) {
		for _, e := range s.log("warn", "rate_limit") {
			if strings.HasPrefix(fmt.Sprint(e["msg"]), "limit full: ") {
				lines = append(lines, e)
			}
		}
		return lines
	}
	lookTwice()
	if got := full(); len(got) > 0 {
		t.Errorf("before anything was forgotten: %v", got)
	}
	for n := range 3 {
		if err := s.load(config{global: few, site: fmt.Sprintf("rate_limit api {\nsize %d\n}\nrespond admitted", n+1)}); err != nil {
			t.Fatal(err)
		}
		if got := watchers(t); got != 1 {
			t.Errorf("%d goroutines after reload %d, want 1", got, n+1)
		}
	}
	// The log of the last one alone.
	s.logPath += ".2"
	if err := s.load(config{global: few, site: "rate_limit api {\nsize 9\n}\nrespond admitted"}); err != nil {
		t.Fatal(err)
	}
	forgotten.Store(5)
	eventually(t, "a line", func() bool { return len(full()) > 0 })
	forgotten.Store(8)
	lookTwice()
	if got := full(); len(got) != 1 || got[0]["limit"] != "api" || got[0]["forgotten"] != 5.0 {
		t.Errorf("got %v, want one line of limit api that forgot 5", got)
	}
	if err := s.load(config{site: "respond admitted"}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the end of the goroutine", func() bool { return watchers(t) == 0 })
}

// watchers returns how many goroutines look for full limits.
func watchers(t *testing.T) int {
	t.Helper()
	var stacks bytes.Buffer
	if err := pprof.Lookup("goroutine").WriteTo(&stacks, 2); err != nil {
		t.Fatal(err)
	}
	return strings.Count(stacks.String(), "caddy-ratelimit.(*App).enter in goroutine")
}

// Guards that a configuration which does not start leaves that to the one before.
func TestRejectedConfigWatchesNothing(t *testing.T) {
	app := provisionApp(t, `{}`)
	cleanUp(t, app) // was never started
	eventually(t, "no goroutine, as no app was started", func() bool { return watchers(t) == 0 })
	first, second := provisionApp(t, `{}`), provisionApp(t, `{}`)
	for _, app := range []*App{first, second} {
		if err := app.Start(); err != nil {
			t.Fatal(err)
		}
	}
	cleanUp(t, second)
	if got := watchers(t); got != 1 {
		t.Errorf("%d goroutines after the second app ended, want 1", got)
	}
	cleanUp(t, first)
	eventually(t, "the end of the goroutine", func() bool { return watchers(t) == 0 })
}

// Guards that the log warns where drips are read from what clients send, and only
// there: each value has a bucket of its own, so that they choose a fresh one.
func TestDripsThatClientsChoose(t *testing.T) {
	for block, want := range map[string]string{
		`size 5; drip_rate {header.X-Rate}`:       "drip_rate {http.request.header.X-Rate}",
		`size 5; drip_rate {query.rate}ms`:        "drip_rate {http.request.uri.query.rate}",
		`size 5; drip_size {cookie.n}`:            "drip_size {http.request.cookie.n}",
		`size 5; drip_size {path.0}`:              "drip_size {http.request.uri.path.0}",
		`size 5; drip_size {file.base}`:           "drip_size {http.request.uri.path.file.base}",
		`size 5; drip_size {http.request.body}`:   "drip_size {http.request.body}",
		`size 5; drip_size {http.request.form.n}`: "drip_size {http.request.form.n}",
		`size 5; drip_size {labels.0}`:            "drip_size {http.request.host.labels.0}",
		`size 5; drip_size {re.a.1}`:              "drip_size {http.regexp.a.1}",
		`size 5; drip_size {file_match.relative}`: "drip_size {http.matchers.file.relative}",
		`size 5; drip_rate {remote_port}ms`:       "drip_rate {http.request.remote.port}",
		`size 5; drip_rate {vars.a}{query.b}`:     "drip_rate {http.request.uri.query.b}",
		`size 5; drip_rate {query.a}; drip_size {query.b}`: "drip_rate {http.request.uri.query.a}, " +
			"drip_size {http.request.uri.query.b}",

		`size {query.n}`:                                              "",
		`size 5; cost {query.n}`:                                      "",
		`size 5; factor {query.n}`:                                    "",
		`key {query.n}; size 5; drip_rate 5s`:                         "",
		`size 5; drip_rate {vars.rate}`:                               "",
		`size 5; drip_rate {http.auth.user.rate}`:                     "",
		`size 5; drip_rate {plan_rate}`:                               "",
		`size 5; drip_size {env.RATE_LIMIT_TEST_N}`:                   "",
		`size 5; drip_size {http.request.tls.client.san.dns_names.0}`: "",
		`size 5; drip_rate {query.a}; factor 0`:                       "",
	} {
		t.Run(block, func(t *testing.T) {
			t.Setenv("RATE_LIMIT_TEST_N", "5")
			s := startConfig(t, config{site: "rate_limit api {\n" + inLines(block) + "\n}\nrespond admitted"})
			var got []string
			for _, e := range s.log("warn", ownLogger) {
				if e["limit"] != "api" {
					t.Errorf("got %v, want it of limit api", e)
				}
				got = append(got, fmt.Sprint(e["option"], " ", e["placeholder"]))
			}
			if got := strings.Join(got, ", "); got != want {
				t.Errorf("got %q, want %q", got, want)
			}
		})
	}
}

// Guards that a store which was used again is kept for the whole time when that
// is over, though the time that it was kept before ends meanwhile.
func TestStoreIsKeptAgain(t *testing.T) {
	original := keepTime
	t.Cleanup(func() {
		keepTime = original
		kept.Store(nil)
	})
	kept.Store(nil)
	app := provisionApp(t, `{}`)
	for _, keepTime = range []time.Duration{20 * time.Millisecond, time.Hour} {
		before := app.memory
		cleanUp(t, app)
		if keepTime == time.Hour {
			time.Sleep(50 * time.Millisecond) // nothing is to happen
		}
		app = provisionApp(t, `{}`)
		if app.memory != before && keepTime == time.Hour {
			t.Error("got another store")
		}
		if kept.Load() != nil {
			t.Error("a store that is in use is kept besides")
		}
	}
}

// Guards that limits stay, in the process and with a Redis that can't be reached,
// where a configuration without them was loaded in between.
func TestLimitsOutliveConfigWithoutThem(t *testing.T) {
	for name, global := range map[string]string{"memory": "", "redis": redisGlobal("127.0.0.1:1", slowly)} {
		t.Run(name, func(t *testing.T) {
			c := config{global: global, site: "rate_limit {\nsize 2\ndrip_rate 1h\n}\nrespond admitted"}
			s := startConfig(t, c)
			for _, want := range []int{200, 200, 429, 429} {
				if a := s.get("/"); a.StatusCode != want {
					t.Errorf("got %s, want %d", a, want)
				}
				if err := s.load(config{site: "respond admitted"}); err != nil {
					t.Fatal(err)
				}
				if err := s.load(c); err != nil {
					t.Fatal(err)
				}
			}
			if err := caddy.Stop(); err != nil { // and all of Caddy
				t.Fatal(err)
			}
			if err := s.load(c); err != nil {
				t.Fatal(err)
			}
			if a := s.get("/"); a.StatusCode != 429 {
				t.Errorf("after a stop got %s", a)
			}
		})
	}
}
