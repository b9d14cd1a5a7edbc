package ratelimit

import (
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// storesInUse returns how many references there are to stores in the process, and to
// all in Redis.
func storesInUse() (memory, redis int) {
	stores.Range(func(key, _ any) bool {
		// References would wait for Range.
		if key == memoryKey {
			memory++
		} else {
			redis++
		}
		return true
	})
	if memory > 0 {
		memory, _ = stores.References(memoryKey)
	}
	return memory, redis
}

// newTestRequest returns a request as Caddy passes it on, outside of a server.
func newTestRequest(t *testing.T) (*httptest.ResponseRecorder, *http.Request) {
	r := httptest.NewRequestWithContext(t.Context(), "GET", "/", nil)
	return httptest.NewRecorder(), r
}

// Guards that a configuration lets go of its stores however far it got: after
// validation, and when it or another module of it is refused.
func TestStoreIsReleased(t *testing.T) {
	handler := func(limit string) string {
		const app = `{"apps":{"rate_limit":{"redis":{"addresses":["released.invalid:1"]}},`
		config := string(configOf(`"handler":"rate_limit","limits":[` + limit + `]`))
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
			err := validateConfig([]byte(config))
			if (err == nil) != (name == "valid") {
				t.Fatalf("got error %v", err)
			}
			if memory, redis := storesInUse(); memory != 0 || redis != 0 {
				t.Errorf("%d references to the store in the process, %d stores in Redis", memory, redis)
			}
		})
	}
}

// Guards that Cleanup lets go only of what its app has taken, however far
// Provision got, and once.
func TestCleanupAfterFailedProvision(t *testing.T) {
	other := provisionApp(t, `{"redis":{"addresses":["a:1"]}}`)
	for _, config := range []string{
		`{"on_error":"x","redis":{"addresses":["a:1"]}}`,
		`{"memory":{"max_keys":-1},"redis":{"addresses":["a:1"]}}`,
		`{"redis":{"addresses":["a:1"],"db":-1}}`,
		`{"redis":{"addresses":["a:1"],"tls":{"renegotiation":"x"}}}`,
	} {
		app := new(App)
		if err := caddy.StrictUnmarshalJSON([]byte(config), app); err != nil {
			t.Fatal(err)
		}
		if err := app.Provision(caddy.Context{}); err == nil {
			t.Fatalf("%s: got no error", config)
		}
		cleanUp(t, app)
		cleanUp(t, app)
		if memory, redis := storesInUse(); memory != 1 || redis != 1 {
			t.Errorf("%s: %d references to the store in the process, %d stores in Redis", config, memory, redis)
		}
	}
	if again := provisionApp(t, `{"redis":{"addresses":["a:1"]}}`); again.redis != other.redis {
		t.Error("the store in Redis was let go of")
	}
}

// Guards that equal settings are one store, however they are written, so that
// connections are shared and survive reloads, and that others are not.
func TestStoreIsShared(t *testing.T) {
	t.Setenv("RATE_LIMIT_TEST_SECRET", "canary")
	groups := [][]string{ // of what is the same
		{
			`{"redis":{"addresses":["a:1"],"password":"canary","db":2}}`,
			`{"redis":{"addresses":["redis://:canary@a:1/2"]}}`,
			`{"redis":{"addresses":["a:1"],"password":"{env.RATE_LIMIT_TEST_SECRET}","db":2}}`,
			`{"redis":{"addresses":["a:1"],"password":"canary","db":2,"timeout":"50ms"},"on_error":"deny"}`,
			`{"redis":{"addresses":["a:1"],"password":"canary","db":2},"memory":{"max_keys":5}}`,
		},
		{`{"redis":{"addresses":["a:1"],"password":"canary","db":2,"timeout":"60ms"}}`},
		{`{"redis":{"addresses":["a:1"],"password":"canary","db":2,"key_prefix":"x"}}`},
		{`{"redis":{"addresses":["a:1"],"password":"canary","db":2,"key_secret":"x"}}`},
		{`{"redis":{"addresses":["a:1"],"password":"canary","db":2,"pool_size":1}}`},
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
	seen := make(map[limiter.Store]string)
	for _, group := range groups {
		first := provisionApp(t, group[0])
		if other, found := seen[first.store]; found {
			t.Errorf("%s and %s share a store", group[0], other)
		}
		seen[first.store] = group[0]
		for _, config := range group[1:] {
			if provisionApp(t, config).store != first.store {
				t.Errorf("%s and %s do not share a store", group[0], config)
			}
		}
		if first.memory != provisionApp(t, `{}`).store {
			t.Errorf("%s does not fall back on the store in the process", group[0])
		}
	}
}

// Guards that a store's key tells all of its options apart, also those of a
// later day, and keeps no secret.
func TestStoreKeyCoversAllOptions(t *testing.T) {
	var plain limiter.RedisOptions
	keys := map[redisKey]string{newRedisKey(plain, nil): "no option"}
	fields := reflect.TypeFor[limiter.RedisOptions]()
	for i := range fields.NumField() {
		name := fields.Field(i).Name
		if name == "Fallback" || name == "Report" {
			continue // they are the same for all
		}
		opt := plain
		switch field := reflect.ValueOf(&opt).Elem().Field(i).Addr().Interface().(type) {
		case *string:
			*field = "canary"
		case *bool:
			*field = true
		case *int:
			*field = 1
		case *time.Duration:
			*field = 1
		case *[]string:
			*field = []string{"canary"}
		case **tls.Config:
			*field = new(tls.Config)
		default:
			t.Fatalf("%s: no value for a %T", name, field)
		}
		key := newRedisKey(opt, nil)
		if other, found := keys[key]; found {
			t.Errorf("%s and %s make the same key", name, other)
		}
		keys[key] = name
		if text := fmt.Sprintf("%+v %q", key, key.digest[:]); strings.Contains(text, "canary") {
			t.Errorf("%s: the key is %s", name, text)
		}
	}

	// Where one text ends and the next begins counts, and bytes that are no
	// characters.
	for name, opt := range map[string]limiter.RedisOptions{
		"ab, c": {Username: "ab", Password: "c"}, "a, bc": {Username: "a", Password: "bc"},
		"quoted": {Username: `a" "b`}, "a, b": {Username: "a", Password: "b"},
		"ff": {Password: "\xff"}, "fe": {Password: "\xfe"},
		"one address": {Addresses: []string{"a b"}}, "two": {Addresses: []string{"a", "b"}},
	} {
		key := newRedisKey(opt, nil)
		if other, found := keys[key]; found {
			t.Errorf("%s and %s make the same key", name, other)
		}
		keys[key] = name
	}
}

// Guards that a store which nobody uses any more is closed for good, but not
// while requests of the last configuration may still be on their way to it.
func TestStoreDrains(t *testing.T) {
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

	setDrainTime(t, time.Hour)
	app := provisionApp(t, config)
	first := app.redis
	cleanUp(t, app)
	if err := take(first); err != nil {
		t.Errorf("right after the last app let go of it: %v", err)
	}
	if err := first.Close(); err != nil {
		t.Error(err)
	}

	setDrainTime(t, ms)
	app = provisionApp(t, config)
	if app.redis == first {
		t.Fatal("a store that is to be closed is used again")
	}
	second := app.redis
	if err := take(second); err != nil {
		t.Error(err)
	}
	cleanUp(t, app)
	eventually(t, "a closed store", func() bool { return errors.Is(take(second), limiter.ErrUnavailable) })
	eventually(t, "all connections closed", func() bool {
		text, err := server.Client().Info(t.Context(), "clients").Result()
		return err == nil && strings.Contains(text, "connected_clients:1\r\n") // the test's
	})
}

// failingApp is an app that does not start.
type failingApp struct{}

func (failingApp) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "rate_limit_test_failing", New: func() caddy.Module { return new(failingApp) }}
}
func (failingApp) Start() error { return errors.New("as the test wants it") }
func (failingApp) Stop() error  { return nil }

func init() { caddy.RegisterModule(failingApp{}) }

// Guards that a configuration which is rejected, be it when it is loaded or
// when an app of it does not start, leaves max_keys, the stores and the log as
// they were, and that one which is accepted does not.
func TestRejectedConfigLeavesSettings(t *testing.T) {
	const few = "rate_limit {\nmemory {\nmax_keys 10\n}\n}"
	const many = "rate_limit {\nmemory {\nmax_keys 1000000\n}\n}"
	site := "rate_limit {\nsize 9\n}\nrespond admitted"
	s := startConfig(t, config{global: few, site: site})
	keys := 0
	bounded := func() bool {
		t.Helper()
		store, _ := theApp(t)
		const n = 3000 // more than share buckets of one limit
		before := store.Len()
		for range n {
			keys++
			req := limiter.Request{Buckets: []limiter.Bucket{{
				Name: "a", Key: fmt.Sprint(keys), Cost: 1,
				Limit: limiter.Limit{Size: 9, DripInterval: time.Hour, DripSize: 1},
			}}}
			if _, err := store.Take(t.Context(), req, nil); err != nil {
				t.Fatal(err)
			}
		}
		return store.Len()-before < n
	}
	if !bounded() {
		t.Fatal("max_keys of the first configuration is not in force")
	}
	store, logger := theApp(t)

	validated := provisionApp(t, `{"memory":{"max_keys":1000000}}`)
	if !bounded() {
		t.Error("max_keys of a configuration that was not started is in force")
	}
	cleanUp(t, validated)

	rejected := config{global: many, site: site}
	for n := range 10 { // apps start in any order
		var root map[string]any
		if err := json.Unmarshal(rejected.json(t, redistest.FreeAddr(t), s.logPath), &root); err != nil {
			t.Fatal(err)
		}
		if n%2 == 0 {
			root["apps"].(map[string]any)["rate_limit_test_failing"] = map[string]any{}
		} else {
			root["apps"].(map[string]any)["rate_limit"].(map[string]any)["on_error"] = "x"
		}
		text, err := json.Marshal(root)
		if err != nil {
			t.Fatal(err)
		}
		if err := caddy.Load(text, true); err == nil {
			t.Fatal("the configuration was not rejected")
		}
		if memory, redis := storesInUse(); memory != 1 || redis != 0 {
			t.Errorf("%d references to the store in the process, %d stores in Redis", memory, redis)
		}
		if now, nowLogger := theApp(t); now != store || nowLogger != logger {
			t.Error("another app is in force")
		}
	}
	if !bounded() {
		t.Error("max_keys of a rejected configuration is in force")
	}
	if err := s.load(config{global: many, site: site}); err != nil {
		t.Fatal(err)
	}
	if bounded() {
		t.Error("max_keys of the new configuration is not in force")
	}
	if err := s.load(config{site: site}); err != nil {
		t.Fatal(err)
	}
	if bounded() {
		t.Error("the default of max_keys is not in force")
	}
	if now, _ := theApp(t); now != store {
		t.Error("a reload made a new store")
	}
}

// theApp returns the store in the process and the logger of the only app that
// runs.
func theApp(t *testing.T) (*limiter.Memory, *zap.Logger) {
	t.Helper()
	running.Lock()
	defer running.Unlock()
	if len(running.apps) != 1 {
		t.Fatalf("%d apps run, want one", len(running.apps))
	}
	return running.apps[0].memory, running.apps[0].logger
}

// Guards that limits stay when Redis comes into the configuration, as long as
// it can't be reached, and when it leaves it.
func TestMemoryOutlivesRedis(t *testing.T) {
	site := "rate_limit {\nsize 3\ndrip_rate 1h\n}\nrespond admitted"
	lost := config{global: redisGlobal("127.0.0.1:1", slowly), site: site}
	s := startConfig(t, config{site: site})
	for i, c := range []config{{site: site}, lost, {site: site}} {
		if err := s.load(c); err != nil {
			t.Fatal(err)
		}
		want := fmt.Sprint(2 - i)
		if a := s.get("/"); a.StatusCode != 200 || a.Header.Get("X-RateLimit-Remaining") != want {
			t.Errorf("configuration %d: %s, want %s remaining", i+1, a, want)
		}
	}
	if a := s.get("/"); a.StatusCode != 429 {
		t.Errorf("got %s", a)
	}
}

// Guards what on_error makes of requests while Redis is lost, for the app and
// for a handler, and that the log tells of it once, not for each request.
func TestOnError(t *testing.T) {
	const (
		first   = "200 limit=2 remaining=1 clear=1.000"
		second  = "200 limit=2 remaining=0 clear=2.000"
		third   = "429 limit=2 remaining=0 clear=2.000 reset=1.000 retry-after=1"
		refused = "503 retry-after=1"
	)
	limits := []string{first, second, third, third, third, third, third, third}
	all := func(want string) []string { return []string{want, want, want, want, want, want, want, want} }
	for _, tc := range []struct {
		name, app, handler string
		want               []string
	}{
		{"by default", "", "", limits},
		{"fallback", "on_error fallback", "", limits},
		{"fallback of the handler", "on_error deny", "on_error fallback", limits},
		{"allow", "on_error allow", "", all("200")},
		{"allow of the handler", "", "on_error allow", all("200")},
		{"deny", "on_error deny", "", all(refused)},
		{"deny of the handler", "on_error allow", "on_error deny", all(refused)},
	} {
		for name, routes := range map[string]string{
			"": "", ", with error routes": "handle_errors {\nrespond \"{err.status_code} {err.message}\"\n}",
		} {
			t.Run(tc.name+name, func(t *testing.T) {
				s := startConfig(t, config{
					global: "rate_limit {\nredis 127.0.0.1:1 {\ntimeout 5s\npassword canary-5fd4\n}\n" + tc.app + "\n}",
					site:   "rate_limit {\nsize 2\n" + tc.handler + "\n}\n" + routes + "\nrespond admitted",
				})
				for _, want := range tc.want {
					body := "admitted"
					switch {
					case want[:3] == "200":
					case routes == "":
						body = ""
					case want[:3] == "503":
						body = "503 rate limits can't be checked for this request"
					default:
						body = "429 rate limit default exceeded: retry after 1 s"
					}
					s.run(step{want: want, body: body})
				}
				if own := append(s.log("error", ownLogger), s.log("warn", ownLogger)...); len(own) > 0 {
					t.Errorf("the handler reports it: %v", own)
				}
				eventually(t, "a line that Redis is lost", func() bool { return len(s.log("error", "rate_limit")) > 0 })
				lost := s.log("error", "rate_limit")
				if len(lost) != 1 || lost[0]["server"] != "127.0.0.1:1" || lost[0]["reason"] == "" {
					t.Errorf("got %v, want one line that Redis is lost", lost)
				}
				for _, e := range s.entries() {
					if strings.Contains(e.text(), "canary") {
						t.Errorf("the password is in the log: %s", e.text())
					}
				}
			})
		}
	}
}

// Guards that an error which is not the store's fault is a 500 and reported,
// whatever on_error says.
func TestUnexpectedStoreErrorIs500(t *testing.T) {
	for _, policy := range []onError{onErrorFallback, onErrorAllow, onErrorDeny} {
		core, logs := observer.New(zap.DebugLevel)
		h := &Handler{onError: policy, logger: zap.New(core)}
		w, r := newTestRequest(t)
		err := h.undecided(w, r, nil, errors.New("malformed"))
		if err == nil || !strings.Contains(err.Error(), "HTTP 500") {
			t.Errorf("%s: got error %v, want a 500", policy, err)
		}
		if retry := w.Header().Get("Retry-After"); retry != "" {
			t.Errorf("%s: got Retry-After %s, though it is no help", policy, retry)
		}
		if logs.FilterLevelExact(zap.ErrorLevel).Len() != 1 {
			t.Errorf("%s: the log says %v", policy, logs.All())
		}
	}
}

// Guards what the log says of a Redis server, and that it is the log of the
// newest configuration.
func TestRedisEventsAreLogged(t *testing.T) {
	tests := []struct {
		event  limiter.Event
		level  zapcore.Level
		text   string
		fields map[string]any
	}{
		{
			limiter.Event{Server: "a:1", Kind: limiter.EventDown, Reason: "refused", Err: errors.New("no")},
			zap.ErrorLevel,
			"redis unavailable, applying on_error",
			map[string]any{"server": "a:1", "reason": "refused", "error": "no"},
		},
		{
			limiter.Event{Server: "a:1", Kind: limiter.EventRecovered, Downtime: time.Minute},
			zap.InfoLevel,
			"redis recovered",
			map[string]any{"server": "a:1", "down": time.Minute},
		},
		{
			limiter.Event{Server: "a:1", Kind: limiter.EventError, Reason: "timeout", Err: errors.New("late")},
			zap.WarnLevel,
			"redis failed on single requests, applying on_error to them",
			map[string]any{"server": "a:1", "reason": "timeout", "error": "late"},
		},
		{
			limiter.Event{Server: "a:1", Kind: limiter.EventReplaced, Downtime: time.Minute},
			zap.InfoLevel,
			"redis server replaced by others of its cluster",
			map[string]any{"server": "a:1", "down": time.Minute},
		},
	}
	lapses.last = nil // of another run
	var logs []*observer.ObservedLogs
	var apps []*App
	for range 2 {
		core, observed := observer.New(zap.DebugLevel)
		app := provisionApp(t, `{}`)
		app.logger = zap.New(core)
		if err := app.Start(); err != nil {
			t.Fatal(err)
		}
		apps, logs = append(apps, app), append(logs, observed)
	}
	for _, tc := range tests {
		report(tc.event)
		got := logs[1].TakeAll()
		if len(got) != 1 || got[0].Level != tc.level || got[0].Message != tc.text ||
			!reflect.DeepEqual(got[0].ContextMap(), tc.fields) {
			t.Errorf("got %+v, want %s %q %v", got, tc.level, tc.text, tc.fields)
		}
	}
	report(tests[2].event) // of a store that a reload has made
	if logs[1].Len() > 0 {
		t.Errorf("a lapse is logged twice in a minute: %v", logs[1].TakeAll())
	}
	if logs[0].Len() > 0 {
		t.Errorf("the log of the old configuration says %v", logs[0].All())
	}
	cleanUp(t, apps[1])
	report(tests[0].event)
	if logs[0].Len() != 1 || logs[1].Len() != 0 {
		t.Errorf("after the new configuration ended the logs say %v and %v", logs[0].All(), logs[1].All())
	}
	cleanUp(t, apps[0])
	report(tests[0].event) // Caddy's own log
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
	setDrainTime(t, ms)
	redis := redistest.Start(t)
	limits := func(name string) string {
		return `{"handle":[{"handler":"rate_limit","on_error":"deny","limits":[{"name":"` + name + `","size":9,"drip_rate":"1h"}]}]}`
	}
	gates.reached, gates.open = make(chan struct{}), make(chan struct{})
	s := startConfig(t, config{
		global: redisGlobal(redis.Addr, "timeout 5s"),
		routes: `[` + limits("first") + `,{"handle":[{"handler":"rate_limit_test_gate"}]},` + limits("second") +
			`,{"handle":[{"handler":"static_response","body":"admitted"}]}]`,
	})
	var old *sharedRedis
	stores.Range(func(_, store any) bool {
		if store, ok := store.(*sharedRedis); ok {
			old = store
		}
		return true
	})
	type result struct {
		status int
		err    error
	}
	results := make(chan result, 1)
	url := s.url("/")
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
	if err := s.load(config{global: redisGlobal(redis.Addr, "timeout 6s"), site: "respond admitted"}); err != nil {
		t.Fatal(err)
	}
	time.Sleep(50 * drainTime) // nothing is to happen
	close(gates.open)
	if got := <-results; got.err != nil || got.status != 200 {
		t.Errorf("a request that was under way: status %d, error %v", got.status, got.err)
	}
	eventually(t, "a closed store", func() bool {
		_, err := old.Take(t.Context(), limiter.Request{
			Buckets:    []limiter.Bucket{{Name: "a", Limit: limiter.Limit{Size: 1000, DripInterval: time.Millisecond, DripSize: 1000}, Cost: 1}},
			NoFallback: true,
		}, nil)
		return errors.Is(err, limiter.ErrUnavailable)
	})
}
