package behaviour

import (
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"runtime/pprof"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	ratelimit "github.com/seed-387a6c65/caddy-ratelimit"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/state"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/configtest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/filetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Guards that a configuration releases its stores however far it got: after
// validation, and when it or another module of it is refused.
func TestStoreIsReleased(t *testing.T) {
	handler := func(limit string) string {
		const app = `{"apps":{"rate_limit":{"redis":{"addresses":["released.invalid:1"]}},`
		config := string(configtest.WithHandler(`"handler":"rate_limit","limits":[` + limit + `]`))
		return strings.Replace(config, `{"apps":{`, app, 1)
	}
	for name, config := range map[string]string{
		"valid":           handler(`{"size":1}`),
		"a bad limit":     handler(`{"size":0}`),
		"a later bad one": handler(`{"size":1},{"size":1}`),
		"a bad app":       `{"apps":{"rate_limit":{"redis":{"addresses":["released.invalid:1"],"db":-1}}}}`,
		"a bad policy":    `{"apps":{"rate_limit":{"on_error":"x"}}}`,
	} {
		t.Run(name, func(t *testing.T) {
			err := configtest.Validate([]byte(config))
			if (err == nil) != (name == "valid") {
				t.Fatalf("got error %v", err)
			}
			if memory, redis := sitetest.StoresInUse(state.Default); memory != 0 || redis != 0 {
				t.Errorf("%d references to the store in the process, %d stores in Redis", memory, redis)
			}
		})
	}
}

// Guards that Cleanup releases only what its app has opened, however far
// Provision got, and once.
func TestCleanupAfterFailedProvision(t *testing.T) {
	p := sitetest.NewProcess(telemetry.Options{})
	other := provisionApp(t, p, `{"redis":{"addresses":["a:1"]}}`)
	for _, config := range []string{
		`{"on_error":"x","redis":{"addresses":["a:1"]}}`,
		`{"memory":{"max_keys":-1},"redis":{"addresses":["a:1"]}}`,
		`{"redis":{"addresses":["a:1"],"db":-1}}`,
		`{"redis":{"addresses":["a:1"],"tls":{"renegotiation":"x"}}}`,
	} {
		app := new(ratelimit.App)
		if err := caddy.StrictUnmarshalJSON([]byte(config), app); err != nil {
			t.Fatal(err)
		}
		if err := provision(t, p, app); err == nil {
			t.Fatalf("%s: got no error", config)
		}
		cleanUp(t, app)
		cleanUp(t, app)
		if memory, redis := sitetest.StoresInUse(p); memory != 1 || redis != 1 {
			t.Errorf("%s: %d references to the store in the process, %d stores in Redis", config, memory, redis)
		}
	}
	if again := provisionApp(t, p, `{"redis":{"addresses":["a:1"]}}`); again.Compiled().Redis != other.Compiled().Redis {
		t.Error("the Redis store was released")
	}
}

// Guards that equal settings are one store, however they are written, so that
// connections are shared and survive reloads, and that others are not.
func TestStoreIsShared(t *testing.T) {
	t.Setenv("RATE_LIMIT_TEST_SECRET", "canary")
	file := filepath.Join(t.TempDir(), "token")
	filetest.Write(t, file, []byte("canary"))
	groups := [][]string{ // of what is the same
		{ // whatever it is at the time
			`{"redis":{"addresses":["a:1"],"password":"{file.` + file + `}","db":2}}`,
			`{"redis":{"addresses":["a:1"],"password":"{file.` + file + `}","db":2},"on_error":"deny"}`,
		},
		{`{"redis":{"addresses":["redis://:{file.` + file + `}@a:1/2"]}}`},
		{
			`{"redis":{"addresses":["a:1"],"password":"canary","db":2}}`,
			`{"redis":{"addresses":["redis://:canary@a:1/2"]}}`,
			`{"redis":{"addresses":["a:1"],"password":"{env.RATE_LIMIT_TEST_SECRET}","db":2}}`,
			`{"redis":{"addresses":["a:1"],"password":"canary","db":2,"timeout":"50ms"},"on_error":"deny"}`,
			`{"redis":{"addresses":["a:1"],"password":"canary","db":2},"memory":{"max_keys":5}}`,
			`{"redis":{"addresses":["a:1"],"password":"canary","db":2}}`,
		},
		{`{"redis":{"addresses":["a:1"],"password":"canary","db":2,"timeout":"60ms"}}`},
		{`{"redis":{"addresses":["a:1"],"password":"canary","db":2,"key_prefix":"x"}}`},
		{`{"redis":{"addresses":["a:1"],"password":"canary","db":2,"key_secret":"x"}}`},
		{
			`{"redis":{"addresses":["a:1"],"password":"canary","db":2,"tls":{}}}`,
			`{"redis":{"addresses":["rediss://:canary@a:1/2"]}}`,
		},
		{`{"redis":{"addresses":["a:1"],"password":"canary","db":2,"tls":{"server_name":"a"}}}`},
		{`{"redis":{"addresses":["a:1"],"password":"canary","db":2,"tls":{"server_name":"b"}}}`},
		{`{"redis":{"addresses":["a:1"],"password":"canary","db":2,"tls":{"insecure_skip_verify":true}}}`},
		{`{"redis":{"addresses":["a:1"],"password":"canary","db":2,"tls":{"curves":["x25519"]}}}`},
		{
			`{"redis":{"addresses":["a:1"],"password":"canary","db":2,"tls":{"ca":{"provider":"system"}}}}`,
			`{"redis":{"addresses":["rediss://:canary@a:1/2"],"tls":{"ca":{"provider":"system"}}}}`,
		},
		{`{"redis":{"addresses":["a:1"],"password":"canary"}}`},
		{`{"redis":{"addresses":["a:1"],"password":"other","db":2}}`},
		{`{"redis":{"addresses":["a:1"],"username":"canary","db":2}}`},
		{`{"redis":{"addresses":["b:1"],"password":"canary","db":2}}`},
		{`{"redis":{"addresses":["a:1"]}}`},
		{`{"redis":{"addresses":["a:1"],"cluster":true}}`},
		{
			`{"redis":{"addresses":["a:1","b:1"]}}`,
			`{"redis":{"addresses":["b:1","a:1"],"cluster":true}}`,
			`{"redis":{"addresses":["redis://a:1","redis://b:1"]}}`,
		},
		{`{"redis":{"addresses":["a:1","b:1"],"master_name":"m"}}`},
		{`{"redis":{"addresses":["a:1","b:1"],"master_name":"n"}}`},
		{`{"redis":{"addresses":["a:1","b:1"],"master_name":"m","sentinel_username":"x"}}`},
		{`{"redis":{"addresses":["a:1","b:1"],"master_name":"m","sentinel_password":"x"}}`},
		{`{}`, `{"memory":{"max_keys":5},"on_error":"allow"}`},
	}
	p := sitetest.NewProcess(telemetry.Options{})
	seen := make(map[limiter.Store]string)
	for _, group := range groups {
		first := provisionApp(t, p, group[0])
		if other, found := seen[storeOf(first)]; found {
			t.Errorf("%s and %s share a store", group[0], other)
		}
		seen[storeOf(first)] = group[0]
		for _, config := range group[1:] {
			if storeOf(provisionApp(t, p, config)) != storeOf(first) {
				t.Errorf("%s and %s do not share a store", group[0], config)
			}
		}
		if first.Compiled().Memory != storeOf(provisionApp(t, p, `{}`)) {
			t.Errorf("%s does not fall back on the store in the process", group[0])
		}
	}
}

// Guards that an unused store is closed for good, but not
// while requests of the last configuration may still be on their way to it.
func TestReleasedRedisStaysOpen(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	config := `{"redis":{"addresses":["` + server.Addr + `"],"timeout":"30s"}}`
	take := func(store limiter.Store) error {
		_, err := store.Take(t.Context(), limiter.Request{
			Buckets: []limiter.Bucket{{
				Name: "a", Limit: limiter.Limit{Size: 1000, DripInterval: time.Millisecond, DripSize: 1000}, Cost: 1,
			}},
			NoFallback: true,
		}, nil)
		return err
	}

	p := sitetest.NewProcess(telemetry.Options{})
	p.RedisCloseDelay = time.Hour
	app := provisionApp(t, p, config)
	first := app.Compiled().Redis
	cleanUp(t, app)
	if err := take(first); err != nil {
		t.Errorf("right after the last app released it: %v", err)
	}
	if err := first.Close(); err != nil {
		t.Error(err)
	}

	p.RedisCloseDelay = ms
	app = provisionApp(t, p, config)
	if app.Compiled().Redis == first {
		t.Fatal("a store that is to be closed is used again")
	}
	second := app.Compiled().Redis
	if err := take(second); err != nil {
		t.Error(err)
	}
	cleanUp(t, app)
	sitetest.Eventually(t, "a closed store", func() bool { return errors.Is(take(second), limiter.ErrUnavailable) })
	sitetest.Eventually(t, "all connections closed", func() bool {
		text, err := server.Client().Info(t.Context(), "clients").Result()
		return err == nil && strings.Contains(text, "connected_clients:1\r\n") // the test's
	})
}

// Guards that limits stay when Redis comes into the configuration, as long as
// it can't be reached, and when it leaves it.
func TestMemoryOutlivesRedis(t *testing.T) {
	t.Parallel()
	site := "rate_limit {\nsize 3\ndrip_rate 1h\n}\nrespond admitted"
	lost := sitetest.Config{Global: sitetest.RedisGlobal("127.0.0.1:1", sitetest.LongTimeout), Site: site}
	s := sitetest.StartConfig(t, sitetest.Config{Site: site})
	for i, c := range []sitetest.Config{{Site: site}, lost, {Site: site}} {
		s.Reload(c)
		want := fmt.Sprint(2 - i)
		if a := s.Get("/"); a.StatusCode != 200 || a.Header.Get("X-RateLimit-Remaining") != want {
			t.Errorf("configuration %d: %s, want %s remaining", i+1, a, want)
		}
	}
	if a := s.Get("/"); a.StatusCode != 429 {
		t.Errorf("got %s", a)
	}
}

// gate is a handler at which requests wait until it opens.
type gate struct{}

var gates struct{ reached, open chan struct{} }

func (gate) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.rate_limit_test_gate", New: func() caddy.Module { return new(gate) }}
}

func (gate) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	gates.reached <- struct{}{}
	<-gates.open
	return next.ServeHTTP(w, r)
}

func init() { caddy.RegisterModule(gate{}) }

// Guards that a request which is under way while Redis's settings change finds
// its store open, however long it takes to come to its next handler, and that the
// store is closed after it.
func TestStoreOutlivesRequests(t *testing.T) {
	p := sitetest.NewProcess(telemetry.Options{})
	p.RedisCloseDelay = ms
	redis := redistest.Start(t)
	limits := func(name string) string {
		return `{"handle":[{"handler":"rate_limit","on_error":"deny","limits":[{"name":"` + name + `","size":9,"drip_rate":"1h"}]}]}`
	}
	gates.reached, gates.open = make(chan struct{}), make(chan struct{})
	s := sitetest.StartConfig(t, sitetest.Config{
		Process: p,
		Global:  sitetest.RedisGlobal(redis.Addr, "timeout 5s"),
		Routes: `[` + limits("first") + `,{"handle":[{"handler":"rate_limit_test_gate"}]},` + limits("second") +
			`,{"handle":[{"handler":"static_response","body":"admitted"}]}]`,
	})
	var old *state.Redis
	s.Process.Stores.Range(func(_, store any) bool {
		if store, ok := store.(*state.Redis); ok {
			old = store
		}
		return true
	})
	type result struct {
		status int
		err    error
	}
	results := make(chan result, 1)
	url := s.URL("/")
	go func() {
		res, err := http.Get(url)
		if err != nil {
			results <- result{err: err}
			return
		}
		_ = res.Body.Close()
		results <- result{status: res.StatusCode}
	}()
	<-gates.reached
	s.Reload(sitetest.Config{Global: sitetest.RedisGlobal(redis.Addr, "timeout 6s"), Site: "respond admitted"})
	time.Sleep(50 * s.Process.RedisCloseDelay) // nothing is to happen
	close(gates.open)
	if got := <-results; got.err != nil || got.status != 200 {
		t.Errorf("a request that was under way: status %d, error %v", got.status, got.err)
	}
	sitetest.Eventually(t, "a closed store", func() bool {
		_, err := old.Take(t.Context(), limiter.Request{
			Buckets:    []limiter.Bucket{{Name: "a", Limit: limiter.Limit{Size: 1000, DripInterval: time.Millisecond, DripSize: 1000}, Cost: 1}},
			NoFallback: true,
		}, nil)
		return errors.Is(err, limiter.ErrUnavailable)
	})
}

// Guards that a store which was used again is kept for the whole time when that
// is over, though the time that it was kept before ends meanwhile.
func TestIdleMemoryIsKeptAgain(t *testing.T) {
	t.Parallel()
	p := sitetest.NewProcess(telemetry.Options{})
	app := provisionApp(t, p, `{}`)
	for _, p.IdleMemoryTime = range []time.Duration{20 * time.Millisecond, time.Hour} {
		before := app.Compiled().Memory
		cleanUp(t, app)
		if p.IdleMemoryTime == time.Hour {
			time.Sleep(50 * time.Millisecond) // nothing is to happen
		}
		app = provisionApp(t, p, `{}`)
		if app.Compiled().Memory != before && p.IdleMemoryTime == time.Hour {
			t.Error("got another store")
		}
		if p.IdleMemory.Load() != nil {
			t.Error("a store that is in use is kept besides")
		}
	}
}

// Guards that limits stay, in the process and with a Redis that can't be reached,
// where a configuration without them was loaded in between, for IdleMemoryTime
// and no longer.
func TestLimitsOutliveConfigWithoutThem(t *testing.T) {
	t.Parallel()
	for name, global := range map[string]string{"memory": "rate_limit {\nmemory {\npersist off\n}\n}", "redis": sitetest.RedisGlobal("127.0.0.1:1", sitetest.LongTimeout)} {
		t.Run(name, func(t *testing.T) {
			c := sitetest.Config{Global: global, Site: "rate_limit {\nsize 2\ndrip_rate 1h\n}\nrespond admitted"}
			s := sitetest.StartConfig(t, c)
			original := s.Process.IdleMemoryTime
			for i, want := range []int{200, 200, 429, 429, 200} {
				if a := s.Get("/"); a.StatusCode != want {
					t.Errorf("got %s, want %d", a, want)
				}
				over := i == 3 // the time that the store is kept
				if over {
					s.Process.IdleMemoryTime = 0
				}
				s.Reload(sitetest.Config{Site: "respond admitted"})
				if n, _ := sitetest.StoresInUse(s.Process); n > 0 {
					t.Errorf("the store is in use %d times, by no config", n)
				}
				s.Run(sitetest.Step{Want: "200"})
				if over {
					sitetest.Eventually(t, "the store to be released", func() bool { return s.Process.IdleMemory.Load() == nil })
					s.Process.IdleMemoryTime = original
				}
				s.Reload(c)
			}
			s.Get("/")
			s.Stop() // and all of Caddy
			s.Reload(c)
			if a := s.Get("/"); a.StatusCode != 429 {
				t.Errorf("after a stop got %s", a)
			}
		})
	}
}

// TestMemoryIsSwept guards that drained buckets leave the memory of a Caddy that gets no
// more requests, also after reloads, and that no goroutine stays behind for a config that
// has ended.
func TestMemoryIsSwept(t *testing.T) {
	p := sitetest.NewProcess(telemetry.Options{})
	p.SweepInterval = time.Millisecond
	sweepers := func() int {
		var stacks strings.Builder
		_ = pprof.Lookup("goroutine").WriteTo(&stacks, 2)
		return strings.Count(stacks.String(), "state.(*Process).sweep.func")
	}
	sitetest.Eventually(t, "those of earlier tests to end", func() bool { return sweepers() == 0 })
	site := "rate_limit swept {\nkey {http.request.header.X-Key}\nsize 1\ndrip_rate 1m\n}\nrespond admitted"
	s := sitetest.StartConfig(t, sitetest.Config{Process: p, Site: site})
	for range 3 {
		for key := range 100 {
			s.Get("/", fmt.Sprint("X-Key: ", key))
		}
		memory := s.Process.Newest().Memory
		if got := memory.Len(); got != 100 {
			t.Fatalf("%d buckets of 100 keys", got)
		}
		s.Clock.Advance(time.Minute)
		sitetest.Eventually(t, "drained buckets to be removed", func() bool { s.Clock.Advance(time.Second); return memory.Len() == 0 })
		s.Reload(sitetest.Config{Site: site + "\nheader X-Reload again"})
	}
	sitetest.Eventually(t, "one goroutine to sweep", func() bool { return sweepers() == 1 })
	s.Reload(sitetest.Config{Site: "respond unlimited"})
	sitetest.Eventually(t, "the goroutine to end", func() bool { return sweepers() == 0 })
}
