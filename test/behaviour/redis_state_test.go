package behaviour

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/filetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// oneLimit is a site whose responses say who decided.
const oneLimit = "rate_limit {\nsize 1000\ndrip_rate 1h\n}\nrespond {http.rate_limit.by}"

// redisState returns the state of the only Redis server, as status and as the metric have it.
func redisState(t *testing.T, a *sitetest.Admin, addr string) (state, up string) {
	t.Helper()
	servers := a.Ask("GET", "status", "")["servers"].([]any)
	if len(servers) != 1 {
		t.Fatalf("got servers %v", servers)
	}
	return servers[0].(map[string]any)["state"].(string), scrape(t, a.Addr)[`redis_up{server="`+addr+`"}`]
}

// TestWrongRedisSettings guards that settings which can't work are one ERROR line at load,
// before any request, that says which option to look at; and that it is not repeated.
func TestWrongRedisSettings(t *testing.T) {
	good, other := redistest.NewAuthority(t), redistest.NewAuthority(t)
	locked, rights, rest := redistest.Start(t, "--requirepass", "s3cret"), redistest.Start(t), redistest.Start(t)
	rights.SetUser(t, "+get", "+set", "+time", "+eval")
	rest.SetUser(t, "+get", "+set", "+time", "+evalsha")
	login := []string{"username limiter", "password pass"}
	for _, tc := range []struct {
		name, addr, reason, option string
		options                    []string
	}{
		{"no password", locked.Addr, "noauth", "password", nil},
		{"wrong password", locked.Addr, "wrongpass", "password", []string{"password wrong"}},
		{"no EVALSHA", rights.Addr, "noperm", "permissions", login},
		{"no EVAL", rest.Addr, "noperm", "permissions", login},
		// Not a name that a server is asked for.
		{"unknown host", strings.Repeat("a", 64) + ".test:6379", "dns", "address", nil},
		{"other authority", redistest.StartTLS(t, good, false).Addr, "tls", "tls_trust_pool", []string{"tls_trust_pool file " + other.CAFile}},
		{"no TLS", rights.Addr, "tls", "tls", []string{"tls_trust_pool file " + good.CAFile}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := sitetest.StartConfig(t, sitetest.Config{Global: sitetest.RedisGlobal(tc.addr, tc.options...), Site: oneLimit})
			lines := func() (all []sitetest.Entry) {
				for _, e := range s.Log("error", "rate_limit") {
					if e["server"] == tc.addr {
						all = append(all, e)
					}
				}
				return all
			}
			sitetest.Eventually(t, "a line", func() bool { return len(lines()) > 0 })
			time.Sleep(time.Second)
			all := lines()
			option, _ := all[0]["look_at"].(string)
			if len(all) != 1 || all[0]["reason"] != tc.reason || !strings.Contains(option, tc.option) {
				t.Errorf("got %v, want one line, %s, look at %s", all, tc.reason, tc.option)
			}
			if n := s.Log("info", "rate_limit"); len(n) > 0 {
				t.Errorf("it is said to have recovered: %v", n)
			}
		})
	}
}

// TestRightsWithinScript guards that a right which only the script needs is reported with the
// first request that lacks it.
func TestRightsWithinScript(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	server.SetUser(t, "+evalsha", "+eval", "+get", "+time")
	s := sitetest.StartConfig(t, sitetest.Config{Global: sitetest.RedisGlobal(server.Addr, sitetest.LongTimeout, "username limiter", "password pass"), Site: oneLimit})
	s.Get("/")
	sitetest.Eventually(t, "a line", func() bool {
		lines := s.Log("error", "rate_limit")
		return len(lines) == 1 && lines[0]["reason"] == "noperm"
	})
}

// TestReloadMendsRedis guards that the log and the events tell of the return of a Redis that a
// reload has mended, with the time since it was lost, and that they say nothing of the old
// settings from then on.
func TestReloadMendsRedis(t *testing.T) {
	server, cluster := redistest.Start(t, "--requirepass", "right"), redistest.StartCluster(t, 1, "--requirepass", "right")
	refused := redistest.FreeAddr(t)
	for name, tc := range map[string]struct{ bad, good, server, back string }{
		"password": {
			sitetest.RedisGlobal(server.Addr, "password wrong"), sitetest.RedisGlobal(server.Addr, "password right"), server.Addr, "redis recovered",
		},
		"password of a cluster": {
			sitetest.RedisGlobal(cluster.Nodes[0].Addr, "cluster", "password wrong"),
			sitetest.RedisGlobal(cluster.Nodes[0].Addr, "cluster", "password right"), cluster.Nodes[0].Addr, "redis recovered",
		},
		"address": {
			sitetest.RedisGlobal(refused), sitetest.RedisGlobal(server.Addr, "password right"), refused, "redis server that was unavailable is no longer used",
		},
		"no Redis": {sitetest.RedisGlobal(refused), "", refused, "redis server that was unavailable is no longer used"},
	} {
		t.Run(name, func(t *testing.T) {
			subscribe(t)
			s := sitetest.StartConfig(t, sitetest.Config{Global: listening("a") + tc.bad, Site: oneLimit})
			s.Get("/")
			lost := waitForEvents(t, telemetry.EventRedisLost, 1)
			s.Reload(sitetest.Config{Global: listening("a") + tc.good, Site: oneLimit})
			loaded := time.Now()
			back := waitForEvents(t, telemetry.EventRedisBack, 1)
			if len(lost) != 1 || lost[0].data["server"] != tc.server || len(back) != 1 || back[0].data["server"] != tc.server || back[0].data["down"].(float64) <= 0 {
				t.Errorf("got events %v and %v", lost, back)
			}
			sitetest.Eventually(t, "a line that tells of the return", func() bool {
				return slices.ContainsFunc(s.Log("info", "rate_limit"), func(e sitetest.Entry) bool { return e["msg"] == tc.back && e["server"] == tc.server })
			})
			errors := len(s.Log("error", "rate_limit"))
			time.Sleep(time.Until(loaded.Add(4 * time.Second))) // the old store is still open
			if got := s.Log("error", "rate_limit"); len(got) != errors {
				t.Errorf("after the reload it logs %v", got)
			}
			if n := len(heardEvents(telemetry.EventRedisLost)) + len(heardEvents(telemetry.EventRedisBack)); n != 2 {
				t.Errorf("%d events", n)
			}
		})
	}
}

// TestPasswordInFile guards that a password in a file is read for each connection, so that
// it may change while Caddy runs, without a reload, and that a reload keeps the connections;
// and that a file which is gone is one line, which names it.
func TestPasswordInFile(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	file := filepath.Join(t.TempDir(), "token")
	rotate := func(password string) {
		t.Helper()
		redistest.Done(t, server.Client().Do(t.Context(), "ACL", "SETUSER", "limiter", "reset", "on", ">"+password, "~rl:*", "+@all"))
		filetest.Write(t, file, []byte(password+"\n"))
	}
	disconnect := func() {
		t.Helper()
		redistest.Done(t, server.Client().Do(t.Context(), "CLIENT", "KILL", "USER", "limiter"))
	}
	for name, global := range map[string]string{
		"option": sitetest.RedisGlobal(server.Addr, "username limiter", "password {file."+file+"}"),
		"URL":    sitetest.RedisGlobal("redis://limiter:{file." + file + "}@" + server.Addr),
	} {
		t.Run(name, func(t *testing.T) {
			rotate("pass@word/1")
			s := sitetest.StartConfig(t, sitetest.Config{Global: global, Site: oneLimit})
			byRedis := func(when string) {
				t.Helper()
				sitetest.Eventually(t, "a decision by Redis "+when, func() bool { return s.Get("/").Text == "redis" })
			}
			byRedis("at first")
			store := s.Process.Newest().Redis
			rotate("{second}")
			byRedis("on a connection that there is")
			s.Reload(sitetest.Config{Global: global, Site: oneLimit + "\nheader X y"})
			if s.Process.Newest().Redis != store {
				t.Error("a reload after the password has changed made new connections")
			}
			disconnect()
			byRedis("after the password has changed")
			if got := s.Log("error", ""); len(got) > 0 {
				t.Errorf("logged %v", got)
			}

			if err := os.Remove(file); err != nil {
				t.Fatal(err)
			}
			disconnect()
			sitetest.Eventually(t, "a line about the file", func() bool {
				s.Get("/")
				return slices.ContainsFunc(s.Log("error", "rate_limit"), func(e sitetest.Entry) bool {
					text := fmt.Sprint(e["error"])
					return e["reason"] == "credentials" && e["look_at"] == "username and password" &&
						strings.Contains(text, "can't be logged in to: open "+file) && !strings.Contains(text, "second")
				})
			})
			time.Sleep(time.Second)
			if n := len(s.Log("error", "")); n > 2 { // the connection was lost, perhaps
				t.Errorf("%d lines while the file is missing: %v", n, s.Log("error", ""))
			}
			rotate("third")
			byRedis("when it is back")
		})
	}
}

// TestRedisStateWhileIdle guards that a Caddy without requests notices that Redis is gone,
// silent or back, and that it takes neither a Redis without calls for one that is down.
func TestRedisStateWhileIdle(t *testing.T) {
	server := redistest.Start(t)
	_, a := sitetest.StartWithAdmin(t, sitetest.Config{Global: sitetest.RedisGlobal(server.Addr), Site: oneLimit})
	await := func(state, up, when string) {
		t.Helper()
		sitetest.Eventually(t, state+" "+when, func() bool {
			gotState, gotUp := redisState(t, a, server.Addr)
			return gotState == state && gotUp == up
		})
	}
	await("up", "1", "at first")
	for end := time.Now().Add(11 * time.Second); time.Now().Before(end); time.Sleep(100 * ms) {
		if state, up := redisState(t, a, server.Addr); state != "up" || up != "1" {
			t.Fatalf("idle: %s, redis_up %s", state, up)
		}
	}
	server.Kill()
	await("down", "0", "after it was killed")
	server.Restart(t)
	await("up", "1", "after a restart")
	server.Pause(t)
	await("down", "0", "while it is paused")
	server.Resume(t)
	await("up", "1", "when it goes on")
}

// TestConnectingIsNotUp guards that a Redis which has never answered does not count as up.
func TestConnectingIsNotUp(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { silent.Close() })
	addr := silent.Addr().String()
	_, a := sitetest.StartWithAdmin(t, sitetest.Config{Global: sitetest.RedisGlobal(addr), Site: oneLimit})
	seen := make(map[string]bool)
	sitetest.Eventually(t, "it to be down", func() bool {
		state, up := redisState(t, a, addr)
		seen[state] = true
		if state == "up" || up != "0" {
			t.Errorf("got %s, redis_up %s", state, up)
		}
		return state == "down"
	})
	if !seen["connecting"] {
		t.Errorf("got %v", seen)
	}
}

// TestTimedFirstRequestsAreDecidedByRedis guards that a config waits for Redis, so that a server
// far away decides the first request too, also one that a reload names; but no longer than
// connectWait for one that does not answer, and not for one that is known.
func TestTimedFirstRequestsAreDecidedByRedis(t *testing.T) {
	far := func() string {
		proxy := redistest.StartProxy(t, redistest.Start(t).Addr)
		proxy.Delay(60 * ms) // three times to connect, once for a request
		return proxy.Addr
	}
	first, second := sitetest.Config{Global: sitetest.RedisGlobal(far(), "timeout 120ms"), Site: oneLimit}, sitetest.Config{Global: sitetest.RedisGlobal(far(), "timeout 120ms"), Site: oneLimit}
	s := sitetest.StartConfig(t, first)
	if a := s.Get("/"); a.Text != "redis" {
		t.Errorf("the first request was decided by %s", a.Text)
	}
	s.Reload(second)
	if a := s.Get("/"); a.Text != "redis" {
		t.Errorf("the first request after a reload was decided by %s", a.Text)
	}

	hole := redistest.StartProxy(t, redistest.Start(t).Addr)
	hole.BlackHole()
	load := func(c sitetest.Config) time.Duration {
		t.Helper()
		start := time.Now()
		s.Reload(c)
		return time.Since(start)
	}
	const wait = 250 * ms // for the first connection
	silent := sitetest.Config{Global: sitetest.RedisGlobal(hole.Addr), Site: oneLimit}
	if took := load(silent); took < wait || took > wait+2*time.Second {
		t.Errorf("a config whose Redis does not answer took %v", took)
	}
	if took := load(sitetest.Config{Global: silent.Global, Site: "header X y\n" + oneLimit}); took >= wait {
		t.Errorf("a config whose Redis is known took %v", took)
	}
}

// TestClusterWithoutOption guards that a server of a cluster which is given without the option
// cluster is told with the first requests, by a line that says so: with one limit another server
// has the key, and with two it refuses keys of several slots.
func TestClusterWithoutOption(t *testing.T) {
	t.Parallel()
	servers := redistest.StartCluster(t, 3).Addrs() // one each, as lines about a server are not repeated
	for i, tc := range []struct{ name, site string }{
		{"one limit", "rate_limit a {\nkey {query}\nsize 9\ndrip_rate 1h\n}\nrespond ok"},
		{"two limits", "rate_limit {\nlimit a {\nkey {query}\nsize 9\ndrip_rate 1h\n}\nlimit b {\nkey all\nsize 99\ndrip_rate 1h\n}\n}\nrespond ok"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := sitetest.StartConfig(t, sitetest.Config{Global: sitetest.RedisGlobal(servers[i], sitetest.LongTimeout), Site: tc.site})
			for n := range 20 { // of some keys it has the slot
				if a := s.Get("/?" + strconv.Itoa(n)); a.StatusCode != 200 {
					t.Fatalf("got %s, want what this Caddy decides", a)
				}
			}
			sitetest.Eventually(t, "a line", func() bool {
				for _, e := range append(s.Log("error", "rate_limit"), s.Log("warn", "rate_limit")...) {
					if e["reason"] == "moved" && e["look_at"] == "cluster" && strings.Contains(e["error"].(string), "add the option cluster") {
						return true
					}
				}
				return false
			})
		})
	}
}
