package behaviour

import (
	"bytes"
	"fmt"
	"runtime/pprof"
	"slices"
	"strings"
	"testing"
	"time"

	ratelimit "github.com/seed-387a6c65/caddy-ratelimit"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/configtest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// Guards what clients see of a limit that is full: with forget a new key gets a
// bucket in place of another, with share it shares one with its network, whatever
// the key is. No other limit is touched, and the log has each once.
func TestNewKeysOfFullLimits(t *testing.T) {
	t.Parallel()
	p, move := clockedProcess(0)
	limit := func(options string) string { return " {\nsize 2\ndrip_rate 1h\n" + configtest.Lines(options) + "\n}\n" }
	s := sitetest.StartConfig(t, sitetest.Config{
		Process: p, Global: "servers {\ntrusted_proxies static 127.0.0.1/32\n}",
		Site: "rate_limit /forget forgets" + limit("max_keys 1") +
			"rate_limit /share shares" + limit("max_keys 1; when_full share") +
			"rate_limit /key keys" + limit("key {header.X-Api-Key}; max_keys 1; when_full share") +
			"rate_limit /other" + limit("") + "respond admitted",
	})
	const first, second = "200 limit=2 remaining=1 clear=3600.000", "200 limit=2 remaining=0 clear=7200.000"
	const full = "429 limit=2 remaining=0 clear=7200.000 reset=3600.000 retry-after=3600"
	from := func(path, address, want string, header ...string) sitetest.Step {
		return sitetest.Step{Path: path, Header: append(header, "X-Forwarded-For: "+address), Want: want}
	}
	s.Run(
		from("/forget", "203.0.113.1", first),
		from("/forget", "203.0.113.1", second),
		from("/forget", "203.0.113.2", first),
		from("/forget", "203.0.113.1", first),

		from("/share", "203.0.113.1", first),
		from("/share", "203.0.113.2", first),
		from("/share", "203.0.200.3", second),
		from("/share", "203.0.113.2", full),
		from("/share", "2002:cb00:7107::1", full),
		from("/share", "203.1.113.2", first),
		from("/share", "2001:db8:1::1", first),
		from("/share", "2001:db8:ffff::1", second),
		from("/share", "2001:db8:2::1", full),
		from("/share", "2001:db9::1", first),
		from("/share", "203.0.113.1", second),

		from("/key", "203.0.113.1", first, "X-Api-Key: a"),
		from("/key", "203.0.113.1", first, "X-Api-Key: b"),
		from("/key", "203.0.113.2", second, "X-Api-Key: c"),
		from("/key", "203.0.113.2", full, "X-Api-Key: d"),
		from("/key", "203.1.113.2", first, "X-Api-Key: e"),
		from("/key", "203.1.113.2", second, "X-Api-Key: a"),

		from("/other", "203.0.113.1", first),
		from("/other", "203.0.113.2", first),
		from("/other", "203.0.113.1", second),
	)
	logged := func() (got []string) {
		for _, e := range s.Log("warn", "rate_limit") {
			if strings.HasPrefix(fmt.Sprint(e["msg"]), "limit full: ") {
				got = append(got, fmt.Sprint(e["limit"], " ", e["max_keys"]))
			}
		}
		return got
	}
	move(time.Minute)
	sitetest.Eventually(t, "a line of each limit", func() bool { return len(logged()) >= 3 })
	got := logged()
	slices.Sort(got)
	if got := strings.Join(got, ", "); got != "forgets 1, keys 1, shares 1" {
		t.Errorf("the log tells of %s", got)
	}
}

// TestFullMemoryIsLogged guards that the line about a limit whose buckets are
// forgotten names the bound that is reached: if the process holds as many as it
// may, that of memory, not that of the limit.
func TestFullMemoryIsLogged(t *testing.T) {
	t.Parallel()
	p, move := clockedProcess(0)
	s := sitetest.StartConfig(t, sitetest.Config{Process: p, Global: "rate_limit {\nmemory {\nmax_keys 30\n}\n}", Site: `
		rate_limit a {
			key {query.k}
			size 9
			drip_rate 1h
			max_keys 25
			limit b {
				size 9
				drip_rate 1h
				max_keys 25
			}
		}
		respond admitted
	`})
	for k := range 20 {
		s.Get(fmt.Sprint("/?k=", k))
	}
	move(time.Minute)
	sitetest.Eventually(t, "a line", func() bool {
		for _, e := range s.Log("warn", "rate_limit") {
			if msg := fmt.Sprint(e["msg"]); strings.Contains(msg, " full: ") {
				if !strings.HasPrefix(msg, "memory full: ") || e["max_keys"] != 30.0 {
					t.Fatalf("got %v", e)
				}
				return true
			}
		}
		return false
	})
}

// Guards that a running Caddy logs, soon and once, that a limit is full, in the log
// of the configuration that was loaded last, and that what looks for it is one
// goroutine however many reloads there are, none without limits.
func TestFullLimitsAreLogged(t *testing.T) {
	p, move := clockedProcess(0)
	const few = "rate_limit {\nmemory {\nmax_keys 10\n}\n}"
	site := func(size int) string {
		return fmt.Sprintf("rate_limit api {\nkey {query.k}\nsize %d\ndrip_rate 1h\nmax_keys 1\n}\nrespond admitted", size)
	}
	s := sitetest.StartConfig(t, sitetest.Config{Process: p, Global: few, Site: site(9)})
	key := 0
	forget := func(n int) { // asks for so many keys, each of which has another forgotten
		for range n {
			key++
			s.Get(fmt.Sprint("/?k=", key))
		}
	}
	full := func() (lines []sitetest.Entry) {
		for _, e := range s.Log("warn", "rate_limit") {
			if strings.HasPrefix(fmt.Sprint(e["msg"]), "limit full: ") {
				lines = append(lines, e)
			}
		}
		return lines
	}
	forget(1) // the first finds room
	move(time.Minute)
	if got := full(); len(got) > 0 {
		t.Errorf("before anything was forgotten: %v", got)
	}
	for n := range 3 {
		s.Reload(sitetest.Config{Global: few, Site: site(n + 1)})
		sitetest.Eventually(t, "one goroutine", func() bool { return watchers(t) == 1 })
	}
	// The log of the last one alone.
	s.LogPath += ".2"
	s.Requests.Store(0)
	s.Reload(sitetest.Config{Global: few, Site: site(9)})
	forget(5)
	move(time.Minute)
	sitetest.Eventually(t, "a line", func() bool { return len(full()) > 0 })
	forget(3)
	move(2 * time.Second)
	if got := full(); len(got) != 1 || got[0]["limit"] != "api" || got[0]["forgotten"] != 5.0 {
		t.Errorf("got %v, want one line of limit api that forgot 5", got)
	}
	s.Reload(sitetest.Config{Site: "respond admitted"})
	sitetest.Eventually(t, "the end of the goroutine", func() bool { return watchers(t) == 0 })
}

// watchers returns how many goroutines look for full limits.
func watchers(t *testing.T) int {
	t.Helper()
	var stacks bytes.Buffer
	if err := pprof.Lookup("goroutine").WriteTo(&stacks, 2); err != nil {
		t.Fatal(err)
	}
	return strings.Count(stacks.String(), "telemetry.(*Process).look(")
}

// Guards that a configuration which does not start leaves that to the one before.
func TestRejectedConfigStartsNoWatcher(t *testing.T) {
	p := sitetest.NewProcess(telemetry.Options{})
	app := provisionApp(t, p, `{}`)
	cleanUp(t, app) // was never started
	sitetest.Eventually(t, "no goroutine, as no app was started", func() bool { return watchers(t) == 0 })
	first, second := provisionApp(t, p, `{}`), provisionApp(t, p, `{}`)
	for _, app := range []*ratelimit.App{first, second} {
		if err := app.Start(); err != nil {
			t.Fatal(err)
		}
	}
	cleanUp(t, second)
	sitetest.Eventually(t, "one goroutine", func() bool { return watchers(t) == 1 })
	cleanUp(t, first)
	sitetest.Eventually(t, "the end of the goroutine", func() bool { return watchers(t) == 0 })
}
