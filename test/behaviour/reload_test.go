package behaviour

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome/fieldstest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/state"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/caddytest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// TestReloadKeepsLevels guards that a new config goes on with the buckets of the
// old one, in memory and in Redis, also if it changes their size, by whatever
// option, and except those whose other numbers it changes.
func TestReloadKeepsLevels(t *testing.T) {
	t.Setenv("RATELIMIT_TEST_SIZE", "10")
	t.Setenv("RATELIMIT_TEST_RATE", "1h")
	server := startUsed(t)
	timeFields := regexp.MustCompile(` (clear|reset|retry-after)=\S+`) // the clock of Redis goes on
	type reload struct{ numbers, want string }
	for _, tc := range []struct {
		name, site string // %s is the numbers
		reloads    []reload
	}{
		{"what is no part of a bucket", "rate_limit {\nkey all\ndrip_rate 1h\n%s\n}", []reload{
			{"size 2", "200 limit=2 remaining=1 clear=3600.000"},
			{"size 2", "200 limit=2 remaining=0 clear=7200.000"},
			{"size 2", "429 limit=2 remaining=0 clear=7200.000 reset=3600.000 retry-after=3600"},
			{"size 2\nmatch not path /x", "429 limit=2 remaining=0 clear=7200.000 reset=3600.000 retry-after=3600"},
			{"size 2\nheaders off", "429 retry-after=3600"},
			{"size 2\nlimit deeper {\nsize 1\n}", "429 limit=2 remaining=0 clear=7200.000 reset=3600.000 retry-after=3600"},
			{"size 2", "429 limit=2 remaining=0 clear=7200.000 reset=3600.000 retry-after=3600"},
		}},
		{"size of a limit without a name", "rate_limit {\nkey all\ndrip_rate 1h\n%s\n}", []reload{
			{"size 2", "200 limit=2 remaining=1 clear=3600.000"},
			{"size 2", "200 limit=2 remaining=0 clear=7200.000"},
			{"size 3", "200 limit=3 remaining=0 clear=10800.000"},
			{"size 1", "429 limit=1 remaining=0 clear=10800.000 reset=10800.000 retry-after=10800"},
		}},
		{"size of a named limit", "vars size 4\nrate_limit api {\nkey all\n%s\n}", []reload{
			{"size 2\ndrip_rate 1h", "200 limit=2 remaining=1 clear=3600.000"},
			{"size 2\ndrip_rate 1h", "200 limit=2 remaining=0 clear=7200.000"},
			{"size 2\ndrip_rate 1h", "429 limit=2 remaining=0 clear=7200.000 reset=3600.000 retry-after=3600"},
			{"size 3\ndrip_rate 1h", "200 limit=3 remaining=0 clear=10800.000"},
			{"size 1\ndrip_rate 1h", "429 limit=1 remaining=0 clear=10800.000 reset=10800.000 retry-after=10800"},
			{"size 8\nfactor 2\ndrip_rate 1h", "200 limit=4 remaining=0 clear=14400.000"},
			{"size {vars.size}\ndrip_rate 1h", "429 limit=4 remaining=0 clear=14400.000 reset=3600.000 retry-after=3600"},
			{"max 6\nduration 6h", "200 limit=6 remaining=1 clear=18000.000"},
			{"size 2\ndrip_rate 2h", "200 limit=2 remaining=1 clear=7200.000"}, // which is another bucket
			{"size 2\ndrip_rate 1h\ndrip_size 2", "200 limit=2 remaining=1 clear=3600.000"},
		}},
		{"numbers from the environment", "rate_limit {\nkey all\n%s\n}", []reload{
			{"size 10\ndrip_rate 1h", "200 limit=10 remaining=9 clear=3600.000"},
			{"size {env.RATELIMIT_TEST_SIZE}\ndrip_rate {env.RATELIMIT_TEST_RATE}", "200 limit=10 remaining=8 clear=7200.000"},
		}},
		// Instances whose sizes differ share buckets: each denies by its own size.
		{"size of each request", "vars bucket %s\nrate_limit {\nkey all\nsize {vars.bucket}\ndrip_rate 1h\n}", []reload{
			{"2", "200 limit=2 remaining=1 clear=3600.000"},
			{"2", "200 limit=2 remaining=0 clear=7200.000"},
			{"2", "429 limit=2 remaining=0 clear=7200.000 reset=3600.000 retry-after=3600"},
			{"3", "200 limit=3 remaining=0 clear=10800.000"},
			{"2", "429 limit=2 remaining=0 clear=10800.000 reset=7200.000 retry-after=7200"},
			{"3", "429 limit=3 remaining=0 clear=10800.000 reset=3600.000 retry-after=3600"},
			{"4", "200 limit=4 remaining=0 clear=14400.000"},
		}},
		{"events of a zone", "rate_limit {\nzone a {\nwindow 1h\nevents %s\n}\n}", []reload{
			{"2", "200"},
			{"2", "200"},
			{"2", "429 retry-after=3600"},
			{"3", "200"},
			{"3", "429 retry-after=3600"},
			{"2", "429 retry-after=3600"},
		}},
	} {
		for store, global := range map[string]string{"memory": "", "Redis": sitetest.RedisGlobal(server.Addr, sitetest.LongTimeout)} {
			t.Run(tc.name+" in "+store, func(t *testing.T) {
				redistest.Done(t, server.Client().FlushAll(t.Context()))
				s := sitetest.StartConfig(t, sitetest.Config{Global: global})
				for i, r := range tc.reloads {
					c := sitetest.Config{Global: global, Site: strings.Replace(tc.site, "%s", r.numbers, 1) + "\nrespond admitted"}
					s.Reload(c)
					got, want := s.Get("/").String(), r.want
					if store == "Redis" {
						got, want = timeFields.ReplaceAllString(got, ""), timeFields.ReplaceAllString(want, "")
					}
					if got != want {
						t.Errorf("request %d, with %q:\n got %s\nwant %s", i+1, r.numbers, got, want)
					}
				}
			})
		}
	}
}

// TestRejectedConfigChangesNothing guards that the buckets stay where a config is
// rejected, wherever it fails.
func TestRejectedConfigChangesNothing(t *testing.T) {
	t.Parallel()
	const site = "rate_limit {\nsize 2\ndrip_rate 1h\n}\nrespond admitted"
	s := sitetest.Start(t, site)
	s.Run(
		sitetest.Step{Want: "200 limit=2 remaining=1 clear=3600.000"},
		sitetest.Step{Want: "200 limit=2 remaining=0 clear=7200.000"},
	)
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	before := s.Addr
	for name, c := range map[string]sitetest.Config{
		"before the store is taken":      {Global: sitetest.RedisGlobal("{env.RATELIMIT_TEST_UNSET}:6379"), Site: site},
		"after it is taken":              {Site: "rate_limit {\nsize 2\ndrip_rate 1h\ncost {env.RATELIMIT_TEST_UNSET}\n}\nrespond admitted"},
		"in a module of somebody else's": {Site: site + "\n@bad path_regexp [\nrespond @bad x"},
		"when all is provisioned":        {Site: site, Sites: "http://" + taken.Addr().String() + " {\n}"},
	} {
		if err := s.Load(c); err == nil {
			t.Fatalf("%s: the config was accepted", name)
		}
		s.Run(sitetest.Step{Want: "429 limit=2 remaining=0 clear=7200.000 reset=3600.000 retry-after=3600"})
	}
	if s.Addr != before {
		t.Errorf("after a rejected config the site moved from %s to %s", before, s.Addr)
	}
	if n, _ := sitetest.StoresInUse(s.Process); n != 1 {
		t.Errorf("the store is in use %d times, by one config", n)
	}
}

// TestReloadSharesConnections guards that configs with equal settings use the
// same connections, and that nothing is left open when none needs them.
func TestReloadSharesConnections(t *testing.T) {
	t.Parallel()
	p := sitetest.NewProcess(telemetry.Options{})
	p.RedisCloseDelay = ms
	server := redistest.Start(t)
	info := func(section, name string) (n int64) {
		t.Helper()
		text, err := server.Client().Info(t.Context(), section).Result()
		if err != nil {
			t.Fatal(err)
		}
		_, value, _ := strings.Cut(text, name+":")
		return fieldstest.Number(value)
	}
	c := sitetest.Config{
		Process: p,
		Global:  sitetest.RedisGlobal(server.Addr, sitetest.LongTimeout),
		Site:    "rate_limit {\nsize 90\n}\nrespond admitted",
	}
	s := sitetest.StartConfig(t, c)
	// Held, so that the garbage collector does not close connections instead.
	var held []any
	defer runtime.KeepAlive(&held)
	s.Process.Stores.Range(func(_, store any) bool {
		if store, ok := store.(*state.Redis); ok {
			held = append(held, store)
		}
		return true
	})
	s.Get("/")
	before := info("stats", "total_connections_received")
	for range 5 {
		s.Reload(c)
		s.Get("/")
	}
	if n := info("stats", "total_connections_received") - before; n > 0 {
		t.Errorf("five reloads made %d new connections", n)
	}

	// Another timeout makes other settings; the limits stay.
	c.Global = sitetest.RedisGlobal(server.Addr, "timeout 11s")
	s.Reload(c)
	if len(held) != 1 {
		t.Errorf("one config used %d stores", len(held))
	}
	if a := s.Get("/"); fieldstest.Number(a.Header.Get("X-RateLimit-Remaining")) > 85 {
		t.Errorf("with another timeout the limits start afresh: %s", a)
	}
	s.Reload(sitetest.Config{Site: "respond admitted"})
	sitetest.Eventually(t, "all connections closed but that of the test", func() bool {
		return info("clients", "connected_clients") == 1
	})
}

// deletions are ways in which an operator deletes buckets.
var deletions = []struct {
	name string
	del  func(t *testing.T, client *redis.Client)
}{
	{"DEL", func(t *testing.T, client *redis.Client) {
		t.Helper()
		keys, err := client.Keys(t.Context(), "rl:*").Result()
		if err == nil {
			err = client.Del(t.Context(), keys...).Err()
		}
		if err != nil {
			t.Fatal(err)
		}
	}},
	{"FLUSHALL", func(t *testing.T, client *redis.Client) {
		t.Helper()
		redistest.Done(t, client.FlushAll(t.Context()))
	}},
}

// TestDeletedKeysStayDeleted guards that a bucket which an operator deletes in
// Redis, and which is requested after that, does not come back with the next
// outage, neither in this process nor in Redis.
func TestDeletedKeysStayDeleted(t *testing.T) {
	t.Parallel()
	for _, limit := range []string{"size 10\ndrip_rate 1h", "size 10\ndrip_rate 1h\ndrip_size 3"} {
		for _, deletion := range deletions {
			t.Run(deletion.name+"/"+limit, func(t *testing.T) {
				server := redistest.Start(t)
				s := sitetest.StartConfig(t, sitetest.Config{
					Global: sitetest.RedisGlobal(server.Addr, "timeout 1s"),
					Site:   "rate_limit {\n" + limit + "\n}\nrespond admitted",
				})
				for s.Get("/").Header.Get("X-RateLimit-Remaining") != "1" {
				}
				deletion.del(t, server.Client())
				if a := s.Get("/"); a.Header.Get("X-RateLimit-Remaining") != "9" {
					t.Errorf("after the deletion: %s", a)
				}
				server.Pause(t)
				if a := s.Get("/"); a.StatusCode != 200 || fieldstest.Number(a.Header.Get("X-RateLimit-Remaining")) < 8 {
					t.Errorf("in the outage: %s", a)
				}
				server.Resume(t)
				// Redis may have been late to charge the request before too.
				if a := s.Get("/"); a.StatusCode != 200 || fieldstest.Number(a.Header.Get("X-RateLimit-Remaining")) < 6 {
					t.Errorf("after it: %s", a)
				}
			})
		}
	}
}

// TestLevelsSurviveStoreChange guards that limits stay when a reload moves the buckets: from
// memory to Redis, to another Redis, database, prefix or secret, and back.
func TestLevelsSurviveStoreChange(t *testing.T) {
	t.Parallel()
	a, b := startUsed(t), startUsed(t)
	const site = "rate_limit {\nsize 10\ndrip_rate 1h\nkey all\n}\nrespond admitted"
	none := sitetest.Config{Site: site}
	in := func(server *redistest.Server, options ...string) sitetest.Config {
		return sitetest.Config{Site: site, Global: sitetest.RedisGlobal(server.Addr, append(options, "timeout 9s")...)}
	}
	for _, tc := range []struct {
		name    string
		configs []sitetest.Config
		moves   int // how many of the reloads the log says something about
	}{
		{"memory to Redis", []sitetest.Config{none, in(a)}, 1},
		{"Redis to Redis", []sitetest.Config{in(a), in(b)}, 1},
		{"another database", []sitetest.Config{in(a), in(a, "db 1")}, 1},
		{"another prefix", []sitetest.Config{in(a), in(a, "key_prefix other:")}, 1},
		{"another secret", []sitetest.Config{in(a), in(a, "key_secret other")}, 1},
		{"Redis to memory", []sitetest.Config{in(a), none}, 1},
		{"by way of memory", []sitetest.Config{in(a), none, in(a), none, in(b)}, 4},
		{"there and back", []sitetest.Config{in(a), in(b), in(a)}, 2},
		{"nowhere", []sitetest.Config{in(a), in(a), {Site: site, Global: sitetest.RedisGlobal(a.Addr, sitetest.LongTimeout)}}, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for _, server := range []*redistest.Server{a, b} {
				redistest.Done(t, server.Client().FlushAll(t.Context()))
			}
			s := sitetest.StartConfig(t, tc.configs[0])
			for n, c := range tc.configs {
				if n > 0 {
					s.Reload(c)
				}
				// Two in each, as long as there is room.
				for i := range 2 {
					want := fmt.Sprint("200 ", 9-2*n-i)
					if a := s.Get("/"); fmt.Sprint(a.StatusCode, " ", a.Header.Get("X-RateLimit-Remaining")) != want {
						t.Errorf("request %d in configuration %d: %s, want %s", i+1, n+1, a, want)
					}
				}
			}
			if lines := s.Log("info", "rate_limit"); len(lines) != tc.moves {
				t.Errorf("%d lines about it, want %d: %v", len(lines), tc.moves, lines)
			}
		})
	}
}

// TestSharedLevelsSurviveStoreChange guards that limits which three instances share stay when
// all of them are reloaded, one after the other, to use another Redis; and that
// what each of them has decided alone does not start afresh in a Redis.
func TestSharedLevelsSurviveStoreChange(t *testing.T) {
	const site = "rate_limit {\nsize 10\ndrip_rate 1h\nkey all\n}\nrespond admitted"
	for _, tc := range []struct {
		name   string
		before bool // whether a Redis kept the buckets
		want   int  // how many are admitted before
	}{
		{"from memory", false, 30},
		{"from another Redis", true, 10},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := sitetest.Config{Site: site}
			if tc.before {
				c.Global = sitetest.RedisGlobal(startUsed(t).Addr, sitetest.LongTimeout)
			}
			var nodes []*reloadable
			for range 3 {
				nodes = append(nodes, startAdmin(t, c))
			}
			admitted := func() (n int) {
				for range 12 {
					for _, p := range nodes {
						if p.status() == 200 {
							n++
						}
					}
				}
				return n
			}
			if n := admitted(); n != tc.want {
				t.Fatalf("%d admitted before, want %d", n, tc.want)
			}
			c.Global = sitetest.RedisGlobal(startUsed(t).Addr, sitetest.LongTimeout)
			for i, p := range nodes {
				p.load(c)
				if p.status() != 429 {
					t.Errorf("node %d admits after its reload", i+1)
				}
			}
			if n := admitted(); n != 0 {
				t.Errorf("%d more admitted after the reloads", n)
			}
		})
	}
}

// startUsed starts a Redis that others use already: it has the script.
func startUsed(t *testing.T) *redistest.Server {
	t.Helper()
	server := redistest.Start(t)
	r, err := limiter.NewRedis(limiter.RedisOptions{Addresses: []string{server.Addr}, Timeout: sitetest.Patience})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	_, err = r.Take(t.Context(), limiter.Request{Buckets: []limiter.Bucket{{
		Name: "other", Limit: limiter.Limit{Size: 1, DripInterval: time.Millisecond, DripSize: 1}, Cost: 1,
	}}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return server
}

// reloadable is a Caddy in a process of its own that can be reloaded.
type reloadable struct {
	t           *testing.T
	addr, admin string
	client      *http.Client
}

// startAdmin starts a Caddy with c in a process of its own.
func startAdmin(t *testing.T, c sitetest.Config) *reloadable {
	t.Helper()
	c.Admin = redistest.FreeAddr(t)
	return &reloadable{t, sitetest.StartProcess(t, c), c.Admin, &http.Client{Transport: caddytest.FreshConnections("")}}
}

// load has the process run c.
func (p *reloadable) load(c sitetest.Config) {
	p.t.Helper()
	c.Admin = p.admin
	res, err := p.client.Post("http://"+p.admin+"/load", "application/json",
		bytes.NewReader(c.JSON(p.t, p.addr, filepath.Join(sitetest.TempDir(p.t), "log"))))
	if err != nil {
		p.t.Fatal(err)
	}
	defer res.Body.Close()
	if res.StatusCode != 200 {
		text, _ := io.ReadAll(res.Body)
		p.t.Fatalf("reloading: %s: %s", res.Status, text)
	}
}

// status sends a request and returns its status.
func (p *reloadable) status() int {
	p.t.Helper()
	res, err := p.client.Get("http://" + p.addr + "/")
	if err != nil {
		p.t.Fatal(err)
	}
	res.Body.Close()
	return res.StatusCode
}
