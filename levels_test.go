package ratelimit

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

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
		if err := client.FlushAll(t.Context()).Err(); err != nil {
			t.Fatal(err)
		}
	}},
}

// TestDeletedKeysStayDeleted guards that a bucket which an operator deletes in
// Redis, and which is asked for after that, does not come back with the next
// outage, neither in this process nor in Redis.
func TestDeletedKeysStayDeleted(t *testing.T) {
	for _, limit := range []string{"size 10\ndrip_rate 1h", "size 10\ndrip_rate 1h\ndrip_size 3"} {
		for _, deletion := range deletions {
			t.Run(deletion.name+"/"+limit, func(t *testing.T) {
				server := redistest.Start(t)
				s := startConfig(t, config{
					global: redisGlobal(server.Addr, "timeout 1s"),
					site:   "rate_limit {\n" + limit + "\n}\nrespond admitted",
				})
				for s.get("/").Header.Get("X-RateLimit-Remaining") != "1" {
				}
				deletion.del(t, server.Client())
				if a := s.get("/"); a.Header.Get("X-RateLimit-Remaining") != "9" {
					t.Errorf("after the deletion: %s", a)
				}
				server.Pause(t)
				if a := s.get("/"); a.StatusCode != 200 || number(a.Header.Get("X-RateLimit-Remaining")) < 8 {
					t.Errorf("in the outage: %s", a)
				}
				server.Resume(t)
				// Redis may have been late to charge the request before too.
				if a := s.get("/"); a.StatusCode != 200 || number(a.Header.Get("X-RateLimit-Remaining")) < 6 {
					t.Errorf("after it: %s", a)
				}
			})
		}
	}
}

// TestLevelsSurviveStoreChange guards that limits stay when a reload moves the buckets: from
// memory to Redis, to another Redis, database, prefix or secret, and back.
func TestLevelsSurviveStoreChange(t *testing.T) {
	a, b := startUsed(t), startUsed(t)
	const site = "rate_limit {\nsize 10\ndrip_rate 1h\nkey all\n}\nrespond admitted"
	none := config{site: site}
	in := func(server *redistest.Server, options ...string) config {
		return config{site: site, global: redisGlobal(server.Addr, append(options, "timeout 9s")...)}
	}
	for _, tc := range []struct {
		name    string
		configs []config
		moves   int // how many of the reloads the log says something about
	}{
		{"memory to Redis", []config{none, in(a)}, 1},
		{"Redis to Redis", []config{in(a), in(b)}, 1},
		{"another database", []config{in(a), in(a, "db 1")}, 1},
		{"another prefix", []config{in(a), in(a, "key_prefix other:")}, 1},
		{"another secret", []config{in(a), in(a, "key_secret other")}, 1},
		{"Redis to memory", []config{in(a), none}, 1},
		{"by way of memory", []config{in(a), none, in(a), none, in(b)}, 4},
		{"there and back", []config{in(a), in(b), in(a)}, 2},
		{"nowhere", []config{in(a), in(a), {site: site, global: redisGlobal(a.Addr, slowly)}}, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for _, server := range []*redistest.Server{a, b} {
				if err := server.Client().FlushAll(t.Context()).Err(); err != nil {
					t.Fatal(err)
				}
			}
			s := startConfig(t, tc.configs[0])
			for n, c := range tc.configs {
				if n > 0 {
					if err := s.load(c); err != nil {
						t.Fatal(err)
					}
				}
				// Two in each, as long as there is room.
				for i := range 2 {
					want := fmt.Sprint("200 ", 9-2*n-i)
					if a := s.get("/"); fmt.Sprint(a.StatusCode, " ", a.Header.Get("X-RateLimit-Remaining")) != want {
						t.Errorf("request %d in configuration %d: %s, want %s", i+1, n+1, a, want)
					}
				}
			}
			if lines := s.log("info", "rate_limit"); len(lines) != tc.moves {
				t.Errorf("%d lines about it, want %d: %v", len(lines), tc.moves, lines)
			}
		})
	}
}

// TestLevelsWithNumbersFromEnvironment guards that a number is the same for a
// bucket whether it is written or comes from a placeholder that is resolved when
// the configuration is loaded.
func TestLevelsWithNumbersFromEnvironment(t *testing.T) {
	t.Setenv("RATELIMIT_TEST_SIZE", "10")
	t.Setenv("RATELIMIT_TEST_RATE", "1h")
	redis := redisGlobal(startUsed(t).Addr, slowly)
	for name, global := range map[string]string{"memory": "", "redis": redis} {
		t.Run(name, func(t *testing.T) {
			site := func(size, rate string) config {
				return config{global: global, site: "rate_limit {\nsize " + size + "\ndrip_rate " + rate + "\nkey all\n}\nrespond admitted"}
			}
			s := startConfig(t, site("10", "1h"))
			s.get("/")
			if err := s.load(site("{env.RATELIMIT_TEST_SIZE}", "{env.RATELIMIT_TEST_RATE}")); err != nil {
				t.Fatal(err)
			}
			if a := s.get("/"); a.Header.Get("X-RateLimit-Remaining") != "8" {
				t.Errorf("the second of 10: %s", a)
			}
		})
	}
}

// TestLevelsWithDynamicSize guards that a size which comes from a placeholder
// of requests can be changed without that limits start afresh, and that instances
// whose sizes differ share them: each denies by its own size.
func TestLevelsWithDynamicSize(t *testing.T) {
	redis := redisGlobal(startUsed(t).Addr, slowly)
	for name, global := range map[string]string{"memory": "", "redis": redis} {
		t.Run(name, func(t *testing.T) {
			site := func(size string) config {
				return config{global: global, site: "vars bucket " + size +
					"\nrate_limit {\nsize {vars.bucket}\ndrip_rate 1h\nkey all\n}\nrespond admitted"}
			}
			s := startConfig(t, site("2"))
			for _, st := range []struct{ size, want string }{
				{"2", "200 1"}, {"2", "200 0"}, {"2", "429 0"},
				{"3", "200 0"}, {"2", "429 0"}, {"3", "429 0"}, {"4", "200 0"},
			} {
				if err := s.load(site(st.size)); err != nil {
					t.Fatal(err)
				}
				if a := s.get("/"); fmt.Sprint(a.StatusCode, " ", a.Header.Get("X-RateLimit-Remaining")) != st.want {
					t.Errorf("with size %s: %s, want %s", st.size, a, st.want)
				}
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
			c := config{site: site}
			if tc.before {
				c.global = redisGlobal(startUsed(t).Addr, slowly)
			}
			var nodes []*process
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
			c.global = redisGlobal(startUsed(t).Addr, slowly)
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
	r, err := limiter.NewRedis(limiter.RedisOptions{Addresses: []string{server.Addr}, Timeout: patience})
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

// process is a Caddy in a process of its own that can be reloaded.
type process struct {
	t           *testing.T
	addr, admin string
	client      *http.Client
}

// startAdmin starts a Caddy with c in a process of its own.
func startAdmin(t *testing.T, c config) *process {
	t.Helper()
	c.admin = redistest.FreeAddr(t)
	return &process{t, startProcess(t, c), c.admin, &http.Client{Transport: freshConnections("")}}
}

// load has the process run c.
func (p *process) load(c config) {
	p.t.Helper()
	c.admin = p.admin
	res, err := p.client.Post("http://"+p.admin+"/load", "application/json",
		bytes.NewReader(c.json(p.t, p.addr, filepath.Join(tempDir(p.t), "log"))))
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
func (p *process) status() int {
	p.t.Helper()
	res, err := p.client.Get("http://" + p.addr + "/")
	if err != nil {
		p.t.Fatal(err)
	}
	res.Body.Close()
	return res.StatusCode
}
