package behaviour

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2/caddyconfig"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome/fieldstest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/configtest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// consistencies returns the consistency in force of each bucket of a Caddyfile, by path.
func consistencies(t *testing.T, caddyfile string) map[string]string {
	t.Helper()
	found := make(map[string]string)
	for _, s := range configtest.LoadDry(t, caddyfile).Servers {
		for _, l := range s.Limits() {
			found[l.Path] = l.Options().Consistency
		}
	}
	return found
}

// TestConsistencyIsInherited guards that limits have the consistency of those around them, or
// else the app's, unless they say something else or have to be exact.
func TestConsistencyIsInherited(t *testing.T) {
	t.Parallel()
	const app = "{\nrate_limit {\nconsistency eventual 1s\n}\n}\n"
	for block, want := range map[string]map[string]string{
		`size 100`: {"api": "eventual 1s"},
		`size 100; consistency exact; limit a {; size 50; }; limit b {; size 50; consistency lease 1s; }`: {
			"api": "", "api/a": "", "api/b": "lease 1s",
		},
		`size 100; consistency lease 100ms; limit a {; size 50; limit b {; size 9; }; }; limit c {; size 50; consistency exact; }`: {
			"api": "lease 100ms", "api/a": "lease 100ms", "api/a/b": "lease 100ms", "api/c": "",
		},
		// A group has no bucket of its own, and hands it on.
		`consistency lease 100ms; limit a {; size 50; }`: {"api/a": "lease 100ms"},
		// These have to be exact, and limits within them need not be.
		`consistency lease 100ms
			limit small {; size 7; limit in {; size 8; }; }
			limit dear {; size 50; cost 7; }
			limit log {; algorithm sliding_log; size 50; window 1m; }
			limit warm {; algorithm warm_up; rate 50/s; warm_up 1m; }
			limit progress {; concurrency 50; }
			limit count {; size 50; count status 401; }
			limit actual {; size 50; actual_cost bytes; }
			limit off {; size 50; count status 404; hold off; }
			limit denied {; size 50; count_denied; }
			limit ban {; size 50; ban 1m; }
			limit delay {; size 50; max_delay 1s; }
			limit own {; size 50; borrow spare; }
			limit spare {; size 50; pool; }
			limit interval {; max 50; duration 1m; min_interval 1s; }
			limit fits {; size {query.n}; soft 5; }`: {
			"api/small": "", "api/small/in": "lease 100ms", "api/dear": "", "api/log": "", "api/warm": "", "api/progress": "", "api/count": "",
			"api/actual": "", "api/off": "", "api/denied": "", "api/ban": "", "api/delay": "", "api/own": "", "api/spare": "", "api/interval": "", "api/interval/min_interval": "",
			"api/fits": "lease 100ms",
		},
		`limit drips {; size 9; drip_size 10; }; limit small {; size 1; }; limit interval {; max 50; duration 1m; min_interval 1s; }`: {
			"api/drips": "", "api/small": "eventual 1s", "api/interval": "eventual 1s", "api/interval/min_interval": "eventual 1s",
		},
	} {
		if got := consistencies(t, app+configtest.InLimit(block)); !maps.Equal(got, want) {
			t.Errorf("%s:\n got %v\nwant %v", block, got, want)
		}
	}
}

// TestConsistencyInJSON guards what a Caddyfile means.
func TestConsistencyInJSON(t *testing.T) {
	t.Parallel()
	config, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte("{\nrate_limit {\nconsistency lease 1s\n}\n}\n"+
		configtest.InLimit(`size 100; consistency eventual {env.NOT_SET_YET}; limit a {; size 50; consistency exact; }`)), nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`"rate_limit":{"consistency":"lease 1s"}`, `"consistency":"eventual {env.NOT_SET_YET}"`, `"consistency":"exact"`} {
		if !strings.Contains(string(config), want) {
			t.Errorf("got %s, want %s in it", config, want)
		}
	}
	if found := configtest.CheckStoredAgain(t, config); found != 2 {
		t.Errorf("found %d modules, want 2", found)
	}
}

// decider is a site that shows who has decided a request of each user.
func decider(options string) string {
	return "rate_limit api {\nkey {header.User}\n" + options + "\nlog\n}\nheader >X-By {http.rate_limit.by}\nrespond ok"
}

// asked counts requests, by who has decided and how.
type asked map[string]int

// askAs sends so many requests of a user, one after the other, with a pause after each.
func askAs(t testing.TB, s *sitetest.Site, n int, user string, pause time.Duration) asked {
	t.Helper()
	found := make(asked)
	for range n {
		a := s.Get("/", "User: "+user)
		found[fmt.Sprint(a.Header.Get("X-By"), " ", a.StatusCode)]++
		time.Sleep(pause)
	}
	return found
}

// TestLease guards that a key with many requests is decided by leases, all but its first
// requests, and that others ask Redis; that the access log, metrics, peek and limits tell; and
// that a reload keeps leases.
func TestLease(t *testing.T) {
	server := redistest.Start(t)
	// A minute, so that a busy machine finds what was leased at the end.
	c := sitetest.Config{Global: sitetest.RedisGlobal(server.Addr, sitetest.LongTimeout), Site: decider("size 100000\ndrip_rate 1h\nconsistency lease 1m")}
	s, a := sitetest.StartWithAdmin(t, c)
	calls := server.CommandStat(t, "evalsha")
	if got := askAs(t, s, 1, "rare", 0); got["redis 200"] != 1 {
		t.Errorf("a key that is asked for once: got %v", got)
	}
	got := askAs(t, s, 1000, "often", 0)
	if got["lease 200"] < 900 || got["lease 200"]+got["redis 200"] != 1000 {
		t.Errorf("a key with many requests: got %v", got)
	}
	if calls = server.CommandStat(t, "evalsha") - calls; calls > 100 {
		t.Errorf("%d calls for 1001 requests", calls)
	}
	if e := s.LastAccess(); fmt.Sprint(e["rate_limit"].(map[string]any)["by"]) != "lease" {
		t.Errorf("access log: %v", e["rate_limit"])
	}
	var peeked struct {
		Level, Remaining int64
		Consistency      string
		Node             struct{ Leased, Unreported int64 }
	}
	_, text := a.Send("POST", "peek", `{"limit": "api", "key": "often"}`)
	if err := json.Unmarshal([]byte(text), &peeked); err != nil {
		t.Fatal(err)
	}
	if peeked.Consistency != "lease 1m0s" || peeked.Node.Leased == 0 || peeked.Level != 1000+peeked.Node.Leased || peeked.Node.Unreported != 0 {
		t.Errorf("peek: %s", text)
	}
	metrics := collected(t, s.Process)
	granted, used := fieldstest.Number(metrics[`lease_units_total{limit="api",result="granted"}`]), fieldstest.Number(metrics[`lease_units_total{limit="api",result="used"}`])
	if used != int64(got["lease 200"]) || granted != used+peeked.Node.Leased {
		t.Errorf("metrics: %d granted and %d used, peek: %d left, clients: %v", granted, used, peeked.Node.Leased, got)
	}
	wantSamples(t, metrics, map[string]string{
		`decisions_total{by="lease",limit="api",result="admitted"}`:    fmt.Sprint(got["lease 200"]),
		`decisions_total{by="lease",limit="api",result="denied"}`:      "0",
		`decisions_total{by="eventual",limit="api",result="admitted"}`: "",
	})
	sitetest.WantJSON(t, a.Ask("GET", "limits", ""), `{"limits": [{"path": "api", "consistency": "lease 1m0s"}]}`)

	c.Site, c.Admin = "rate_limit /other other {\nsize 100\n}\n"+c.Site, a.Addr
	s.Reload(c)
	if got := askAs(t, s, int(min(peeked.Node.Leased, 5)), "often", 0); got["lease 200"] != 5 {
		t.Errorf("after a reload: got %v", got)
	}
	wantSamples(t, collected(t, s.Process), map[string]string{`lease_units_total{limit="other",result="granted"}`: ""})

	out := sitetest.RunCommand(t, "peek", "api", "often", "--address", a.Addr).Out
	if !strings.Contains(out, " leased\n") {
		t.Errorf("the command peek: %s", out)
	}
	out = sitetest.RunCommand(t, "reset", "api", "often", "--yes", "--address", a.Addr).Out
	if !strings.HasSuffix(out, "Other instances may still use units that they have leased, for at most 2m0s.\n") {
		t.Errorf("the command reset: %s", out)
	}
	sitetest.WantJSON(t, a.Ask("POST", "peek", `{"limit": "api", "key": "often"}`), `{"level": 0, "node": {"level": 0, "leased": null}}`)
}

// TestLeaseInFields guards what header fields tell of a key that is hammered: there remains
// never more than there is, and less and less, and a denial comes only when nothing does.
func TestLeaseInFields(t *testing.T) {
	t.Parallel()
	const size = 300
	s := sitetest.StartConfig(t, sitetest.Config{
		Global: sitetest.RedisGlobal(redistest.Start(t).Addr, sitetest.LongTimeout),
		Site:   decider(fmt.Sprintf("size %d\ndrip_rate 1h\nconsistency lease 1m", size)),
	})
	admitted, last := 0, size
	for range size + 20 {
		a := s.Get("/", "User: u")
		remaining, err := strconv.Atoi(a.Header.Get("X-RateLimit-Remaining"))
		if err != nil || a.Header.Get("X-RateLimit-Limit") != strconv.Itoa(size) {
			t.Fatalf("got %s", a)
		}
		if a.StatusCode == http.StatusOK {
			admitted++
		}
		switch {
		case remaining > size-admitted:
			t.Errorf("%d of %d are used and %d remain: %s", admitted, size, remaining, a)
		case remaining > last:
			t.Errorf("%d remain after %d: %s", remaining, last, a)
		case a.StatusCode == http.StatusOK && remaining < size-admitted-size/4:
			t.Errorf("%d of %d are used and only %d remain: %s", admitted, size, remaining, a)
		case a.StatusCode != http.StatusOK && (remaining > 0 || a.Header.Get("Retry-After") == ""):
			t.Errorf("got %s", a)
		}
		if clear, err := strconv.ParseFloat(a.Header.Get("X-RateLimit-Clear"), 64); err != nil || clear > 3600*size || clear < 3600*float64(admitted)-60 {
			t.Errorf("%d are used, each for an hour: %s", admitted, a)
		}
		last = remaining
	}
	if admitted > size || admitted < size-5 {
		t.Errorf("admitted %d of %d", admitted, size)
	}
}

// TestLeaseOfColdKeys guards that a key with few requests, for the time of its lease,
// always asks Redis.
func TestLeaseOfColdKeys(t *testing.T) {
	t.Parallel()
	s := sitetest.StartConfig(t, sitetest.Config{
		Global: sitetest.RedisGlobal(redistest.Start(t).Addr, sitetest.LongTimeout), Site: decider("size 1000\ndrip_rate 1h\nconsistency lease 1ms"),
	})
	if got := askAs(t, s, 50, "u", 3*ms); got["redis 200"] != 50 {
		t.Errorf("got %v", got)
	}
}

// TestConsistencyOfBlocks guards that a block is decided by this process if all limits that a
// request meets in it allow that, and otherwise by Redis.
func TestConsistencyOfBlocks(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	for options, want := range map[string]string{
		"consistency lease 1m\nlimit in {\nsize 500\ndrip_rate 1h\n}":                                    "lease",
		"consistency eventual 100ms\nlimit in {\nsize 500\ndrip_rate 1h\n}":                              "eventual",
		"consistency lease 1m\nlimit in {\nsize 500\ndrip_rate 1h\nconsistency exact\n}":                 "redis",
		"consistency lease 1m\nlimit in {\nsize 500\ndrip_rate 1s\nmax_delay 1s\n}":                      "redis",
		"consistency lease 1m\nlimit in {\nsize 500\ndrip_rate 1h\nconsistency eventual 100ms\n}":        "redis",
		"consistency lease 1m\nlimit in {\nmatch path /in\nsize 500\ndrip_rate 1h\nconsistency exact\n}": "lease",
		"accounting each\nconsistency lease 1m\nlimit in {\nsize 500\ndrip_rate 1h\n}":                   "lease",
	} {
		t.Run(options, func(t *testing.T) {
			redistest.Done(t, server.Client().FlushAll(t.Context()))
			s := sitetest.StartConfig(t, sitetest.Config{Global: sitetest.RedisGlobal(server.Addr, sitetest.LongTimeout), Site: decider("size 1000\ndrip_rate 1h\n" + options)})
			got := askAs(t, s, 100, "u", 0)
			if got[want+" 200"] < 80 || got["redis 200"]+got["lease 200"]+got["eventual 200"] != 100 {
				t.Errorf("got %v, want %s", got, want)
			}
		})
	}
}

// TestConsistencyInMemory guards that the option has no effect without Redis.
func TestConsistencyInMemory(t *testing.T) {
	t.Parallel()
	for _, consistency := range []string{"lease 1m", "eventual 1s"} {
		s := sitetest.Start(t, decider("size 10\ndrip_rate 1h\nconsistency "+consistency))
		if got := askAs(t, s, 12, "u", 0); got["memory 200"] != 10 || got["memory 429"] != 2 {
			t.Errorf("%s: got %v", consistency, got)
		}
		wantSamples(t, collected(t, s.Process), map[string]string{
			`decisions_total{by="lease",limit="api",result="admitted"}`:    "",
			`decisions_total{by="eventual",limit="api",result="admitted"}`: "",
			`lease_units_total{limit="api",result="granted"}`:              "",
		})
		s.Stop()
	}
}

// TestEventual guards that no request asks Redis, that other nodes hear of what was admitted,
// by a second Caddy, that peek shows what is not reported yet, and that a reload forgets none
// of it.
func TestEventual(t *testing.T) {
	server := redistest.Start(t)
	c := sitetest.Config{Global: sitetest.RedisGlobal(server.Addr, sitetest.LongTimeout), Site: decider("size 10\ndrip_rate 1h\nconsistency eventual 300ms")}
	s, a := sitetest.StartWithAdmin(t, c)
	other := startAdmin(t, sitetest.Config{Global: c.Global, Site: c.Site})
	const body = `{"limit": "api", "key": "u"}`
	if got := askAs(t, s, 10, "u", 0); got["eventual 200"] != 10 {
		t.Errorf("got %v", got)
	}
	if got := askAs(t, s, 3, "u", 0); got["eventual 429"] != 3 {
		t.Errorf("beyond the size: got %v", got)
	}
	wantSamples(t, collected(t, s.Process), map[string]string{
		`decisions_total{by="eventual",limit="api",result="admitted"}`: "10",
		`decisions_total{by="eventual",limit="api",result="denied"}`:   "3",
		`decisions_total{by="lease",limit="api",result="admitted"}`:    "",
		`lease_units_total{limit="api",result="granted"}`:              "",
	})
	sitetest.Eventually(t, "a report", func() bool { return a.Ask("POST", "peek", body)["level"].(float64) == 10 })

	// The other one admits a bucketful until it hears, which all of them then wait for.
	began, admitted := time.Now(), 0
	sitetest.Eventually(t, "the other node to hear of it", func() bool {
		status := other.asks("u")
		if status == 200 {
			admitted++
		}
		return status == 429
	})
	if took := time.Since(began); took > 5*time.Second { // the interval, and what a busy machine takes
		t.Errorf("it heard after %v", took)
	}
	if admitted > 10 {
		t.Errorf("the other node admitted %d", admitted)
	}
	sitetest.Eventually(t, "its report", func() bool { return a.Ask("POST", "peek", body)["level"].(float64) == float64(10+admitted) })

	// What is not reported is shown, and outlives a reload.
	const later = `{"limit": "api", "key": "v"}`
	c.Site, c.Admin = strings.Replace(c.Site, "eventual 300ms", "eventual 3s", 1), a.Addr
	s.Reload(c)
	askAs(t, s, 1, "v", 0) // a tenth of the size is reported at once
	sitetest.Eventually(t, "a report", func() bool { return a.Ask("POST", "peek", later)["level"].(float64) == 1 })
	sitetest.WantJSON(t, a.Ask("POST", "peek", later), `{"level": 1, "consistency": "eventual 3s", "node": {"level": 1, "unreported": null}}`)
}

// TestUnreported guards that what this process has not reported yet is shown by peek, counts
// in this process, and is reported after a reload.
func TestUnreported(t *testing.T) {
	c := sitetest.Config{
		Global: sitetest.RedisGlobal(redistest.Start(t).Addr, sitetest.LongTimeout), Site: decider("size 1000\ndrip_rate 1h\nconsistency eventual 1m"),
	}
	s, a := sitetest.StartWithAdmin(t, c)
	const body = `{"limit": "api", "key": "u"}`
	askAs(t, s, 50, "u", 0)
	sitetest.WantJSON(t, a.Ask("POST", "peek", body), `{"level": 0, "node": {"unreported": 50}}`)
	out := sitetest.RunCommand(t, "peek", "api", "u", "--address", a.Addr).Out
	if !strings.Contains(out, "50 not reported yet\n") {
		t.Errorf("the command peek: %s", out)
	}
	c.Admin = a.Addr
	s.Reload(c)
	sitetest.Eventually(t, "what was not reported to be", func() bool { return a.Ask("POST", "peek", body)["level"].(float64) == 50 })
	if got := s.Get("/", "User: u").Header.Get("X-RateLimit-Remaining"); got != "949" {
		t.Errorf("after a reload %s remain, want 949", got)
	}
	askAs(t, s, 99, "u", 0) // a tenth of the size is reported at once
	sitetest.Eventually(t, "a report", func() bool { return a.Ask("POST", "peek", body)["level"].(float64) == 150 })
	sitetest.WantJSON(t, a.Ask("POST", "reset", body), `{"level": 150}`)
	if got := s.Get("/", "User: u").Header.Get("X-RateLimit-Remaining"); got != "999" {
		t.Errorf("after a reset %s remain, want 999", got)
	}
}

// TestStoppedProcessReports guards that a Caddy that is stopped reports what is left.
func TestStoppedProcessReports(t *testing.T) {
	server := redistest.Start(t)
	c := sitetest.Config{Global: sitetest.RedisGlobal(server.Addr, sitetest.LongTimeout), Site: decider("size 100\ndrip_rate 1h\nconsistency eventual 1m")}
	_, a := sitetest.StartWithAdmin(t, c)
	const body = `{"limit": "api", "key": "u"}`
	level := func() float64 { return a.Ask("POST", "peek", body)["level"].(float64) }

	c.Admin = redistest.FreeAddr(t)
	addr := sitetest.StartProcess(t, c)
	for range 5 {
		req, err := http.NewRequest("GET", "http://"+addr, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("User", "u")
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
	}
	if got := level(); got != 0 {
		t.Errorf("%v reported at once", got)
	}
	resp, err := http.Post("http://"+c.Admin+"/stop", "", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	sitetest.Eventually(t, "a report at the end", func() bool { return level() == 5 })
}

// TestConsistencyInOutages guards that in an outage leases are used up before on_error says
// what happens, and that an eventual limit never waits, whatever on_error says, when Redis is
// stopped and when it is killed.
func TestConsistencyInOutages(t *testing.T) {
	for _, stopped := range []bool{true, false} {
		t.Run(fmt.Sprintf("stopped %t", stopped), func(t *testing.T) {
			server := redistest.Start(t)
			s := sitetest.StartConfig(t, sitetest.Config{
				Global: sitetest.RedisGlobal(server.Addr, "timeout 1s"),
				Site: `@lease header Kind lease
					rate_limit @lease lease {
						key {header.User}
						size 100000
						drip_rate 1h
						consistency lease 1m
						on_error deny
					}
					@eventual header Kind eventual
					rate_limit @eventual eventual {
						key {header.User}
						size 100
						drip_rate 1h
						consistency eventual 10ms
						on_error deny
					}
					header >X-By {http.rate_limit.by}
					respond ok`,
			})
			ask := func(kind string) (string, time.Duration) {
				began := time.Now()
				a := s.Get("/", "User: u", "Kind: "+kind)
				return fmt.Sprint(a.Header.Get("X-By"), " ", a.StatusCode), time.Since(began)
			}
			for range 200 {
				ask("lease")
			}
			sitetest.Eventually(t, "a lease", func() bool { got, _ := ask("lease"); return got == "lease 200" })
			ask("eventual")
			if stopped {
				server.Pause(t)
			} else {
				server.Kill()
			}
			leased, denied := 0, false
			for range 500 {
				got, took := ask("lease")
				switch {
				case got == "lease 200" && !denied:
					leased++
					if took > 500*ms {
						t.Errorf("a leased unit was used after %v", took)
					}
				case strings.HasSuffix(got, " 503"): // no limit has decided
					denied = true
				default:
					t.Fatalf("after %d leased units: got %s", leased, got)
				}
				if denied {
					break
				}
			}
			if leased == 0 || !denied {
				t.Errorf("%d leased units were used, then denied: %t", leased, denied)
			}
			admitted := 0
			for range 120 {
				got, took := ask("eventual")
				if got == "eventual 200" {
					admitted++
				} else if got != "eventual 429" {
					t.Fatalf("got %s", got)
				}
				if took > 500*ms {
					t.Errorf("an eventual decision took %v", took)
				}
			}
			if admitted != 99 {
				t.Errorf("admitted %d, want 99", admitted)
			}
			if stopped {
				server.Resume(t)
			} else {
				server.Restart(t)
			}
			sitetest.Eventually(t, "Redis to decide again", func() bool { got, _ := ask("lease"); return strings.HasSuffix(got, " 200") })
			if got, _ := ask("eventual"); got != "eventual 429" {
				t.Errorf("after the outage: got %s", got)
			}
		})
	}
}

// TestDecisionsHereDoNotWait guards that what this process decides by itself is not in the
// histogram of waits for Redis.
func TestDecisionsHereDoNotWait(t *testing.T) {
	t.Parallel()
	s := sitetest.StartConfig(t, sitetest.Config{
		Global: sitetest.RedisGlobal(redistest.Start(t).Addr, sitetest.LongTimeout), Site: decider("size 1000\ndrip_rate 1h\nconsistency eventual 1s"),
	})
	before := collected(t, s.Process)["redis_wait_seconds_count"]
	askAs(t, s, 5, "u", 0)
	if after := collected(t, s.Process)["redis_wait_seconds_count"]; after != before {
		t.Errorf("%s waits before, %s after", before, after)
	}
}

// Guards that what was not reported yet counts after a reload, whatever it changes.
func TestReloadReports(t *testing.T) {
	server := redistest.Start(t)
	const eventual = "size 100\ndrip_rate 1h\nconsistency eventual 1m"
	for name, after := range map[string]sitetest.Config{
		"another timeout": {Global: sitetest.RedisGlobal(server.Addr, "timeout 9s"), Site: decider(eventual)},
		"exact":           {Global: sitetest.RedisGlobal(server.Addr, sitetest.LongTimeout), Site: decider("size 100\ndrip_rate 1h")},
		"lease":           {Global: sitetest.RedisGlobal(server.Addr, sitetest.LongTimeout), Site: decider("size 100\ndrip_rate 1h\nconsistency lease 1s")},
		"without Redis":   {Site: decider("size 100\ndrip_rate 1h")},
	} {
		t.Run(name, func(t *testing.T) {
			redistest.Done(t, server.Client().FlushAll(t.Context()))
			s := sitetest.StartConfig(t, sitetest.Config{Global: sitetest.RedisGlobal(server.Addr, sitetest.LongTimeout), Site: decider(eventual)})
			askAs(t, s, 1, "other", 0) // connects
			admitted := askAs(t, s, 59, "u", 0)["eventual 200"]
			before := server.CommandStat(t, "evalsha")
			s.Reload(after)
			sitetest.Eventually(t, "a report", func() bool { return server.CommandStat(t, "evalsha") > before })
			more := func() {
				for by, n := range askAs(t, s, 50, "u", 0) {
					if strings.HasSuffix(by, " 200") {
						admitted += n
					}
				}
			}
			for began := time.Now(); admitted < 100 && time.Since(began) < 2*time.Second; time.Sleep(100 * time.Millisecond) {
				more() // not all at once beside the last report
			}
			if more(); admitted > 100 || admitted < 60 { // some of the last report may count twice
				t.Errorf("admitted %d, want 100", admitted)
			}
		})
	}
}
