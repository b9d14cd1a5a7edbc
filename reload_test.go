package ratelimit

import (
	"net"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/redistest"
)

// TestReloadKeepsLevels guards that a new config goes on with the buckets of the
// old one, except those whose numbers it changes, and that a rejected one
// changes nothing.
func TestReloadKeepsLevels(t *testing.T) {
	site := func(size, more string) config {
		return config{site: `
			rate_limit {
				drip_rate 1h
				size ` + size + `
				` + more + `
			}
			respond "admitted"
		`}
	}
	s := startConfig(t, site("2", ""))
	load := func(c config) {
		t.Helper()
		if err := s.load(c); err != nil {
			t.Fatal(err)
		}
	}
	s.run(
		step{want: "200 limit=2 remaining=1 clear=3600.000"},
		step{want: "200 limit=2 remaining=0 clear=7200.000"},
	)
	full := step{want: "429 limit=2 remaining=0 clear=7200.000 reset=3600.000 retry-after=3600"}

	// The same again, and what is no part of a bucket's identity.
	for range 5 {
		load(site("2", ""))
		s.run(full)
	}
	load(site("2", "match not path /x"))
	s.run(full)
	load(site("2", "headers off"))
	s.run(step{want: "429 retry-after=3600"})
	load(config{site: `
		respond /other "other"
		rate_limit {
			drip_rate 1h
			size 2
			limit deeper {
				size 1
			}
		}
		respond "admitted"
	`})
	s.run(full)

	// What is rejected fails in different places: before the store is taken,
	// after, in a module of somebody else's, and when all is provisioned.
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	before := s.addr
	for name, c := range map[string]config{
		"secret that is not there": {
			global: redisGlobal("{env.RATELIMIT_TEST_UNSET}:6379"), site: site("2", "").site,
		},
		"cost that is not there": site("2", "cost {env.RATELIMIT_TEST_UNSET}"),
		"bad matcher behind":     {site: site("2", "").site + "\n@bad path_regexp [\nrespond @bad x"},
		"port that is taken":     {site: site("2", "").site, sites: "http://" + taken.Addr().String() + " {\n}"},
	} {
		if err := s.load(c); err == nil {
			t.Fatalf("%s: the config was accepted", name)
		}
		s.run(full)
	}
	if s.addr != before {
		t.Errorf("after a rejected config the site moved from %s to %s", before, s.addr)
	}
	if n, _ := stores.References("memory"); n != 1 {
		t.Errorf("the store is in use %d times, by one config", n)
	}

	// Other numbers, and back: nothing was forgotten.
	load(site("3", ""))
	s.run(step{want: "200 limit=3 remaining=2 clear=3600.000"})
	load(site("2", ""))
	s.run(full)
}

// TestReloadWithoutLimits guards that buckets last as long as some config uses
// them and for keepTime after, and no longer.
func TestReloadWithoutLimits(t *testing.T) {
	original := idleMemoryTime
	t.Cleanup(func() { idleMemoryTime = original })
	c := config{site: "rate_limit {\nsize 1\n}\nrespond admitted"}
	s := startConfig(t, c)
	s.run(step{want: "200 limit=1 remaining=0 clear=1.000"})
	for _, idleMemoryTime = range []time.Duration{time.Hour, 0} {
		if err := s.load(config{site: "respond admitted"}); err != nil {
			t.Fatal(err)
		}
		if n, used := stores.References("memory"); used {
			t.Errorf("the store is in use %d times, by no config", n)
		}
		s.run(step{want: "200"})
		want := "429 limit=1 remaining=0 clear=1.000 reset=1.000 retry-after=1"
		if idleMemoryTime == 0 {
			eventually(t, "the store to be released", func() bool { return idleMemory.Load() == nil })
			want = "200 limit=1 remaining=0 clear=1.000"
		}
		if err := s.load(c); err != nil {
			t.Fatal(err)
		}
		s.run(step{want: want})
	}
}

// TestReloadSharesConnections guards that configs with equal settings use the
// same connections, and that nothing is left open when none needs them.
func TestReloadSharesConnections(t *testing.T) {
	setRedisCloseDelay(t, ms)
	server := redistest.Start(t)
	info := func(section, name string) (n int64) {
		t.Helper()
		text, err := server.Client().Info(t.Context(), section).Result()
		if err != nil {
			t.Fatal(err)
		}
		_, value, _ := strings.Cut(text, name+":")
		return number(value)
	}
	c := config{
		global: redisGlobal(server.Addr, slowly),
		site:   "rate_limit {\nsize 90\n}\nrespond admitted",
	}
	s := startConfig(t, c)
	// Held, so that the garbage collector does not close connections instead.
	var held []any
	defer runtime.KeepAlive(&held)
	stores.Range(func(key, store any) bool {
		if key != memoryKey {
			held = append(held, store)
		}
		return true
	})
	s.get("/")
	before := info("stats", "total_connections_received")
	for range 5 {
		if err := s.load(c); err != nil {
			t.Fatal(err)
		}
		s.get("/")
	}
	if n := info("stats", "total_connections_received") - before; n > 0 {
		t.Errorf("five reloads made %d new connections", n)
	}

	// Another timeout makes other settings; the limits stay.
	c.global = redisGlobal(server.Addr, "timeout 11s")
	if err := s.load(c); err != nil {
		t.Fatal(err)
	}
	if len(held) != 1 {
		t.Errorf("one config used %d stores", len(held))
	}
	if a := s.get("/"); number(a.Header.Get("X-RateLimit-Remaining")) > 85 {
		t.Errorf("with another timeout the limits start afresh: %s", a)
	}
	if err := s.load(config{site: "respond admitted"}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "all connections closed but that of the test", func() bool {
		return info("clients", "connected_clients") == 1
	})
}
