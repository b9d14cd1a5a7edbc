package behaviour

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// failingApp is an app that does not start.
type failingApp struct{}

func (failingApp) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "rate_limit_test_failing", New: func() caddy.Module { return new(failingApp) }}
}

func (failingApp) Start() error { return errors.New("as the test wants it") }

func (failingApp) Stop() error { return nil }

func init() { caddy.RegisterModule(failingApp{}) }

// Guards that a configuration which is rejected, be it when it is loaded or
// when an app of it does not start, leaves max_keys, the stores and the log as
// they were, and that one which is accepted does not.
func TestRejectedConfigLeavesSettings(t *testing.T) {
	const few = "rate_limit {\nmemory {\nmax_keys 10\n}\n}"
	const many = "rate_limit {\nmemory {\nmax_keys 1000000\n}\n}"
	site := "rate_limit {\nsize 9\n}\nrespond admitted"
	s := sitetest.StartConfig(t, sitetest.Config{Global: few, Site: site})
	keys := 0
	bounded := func() bool {
		t.Helper()
		store, _ := theApp(t, s)
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
	store, logger := theApp(t, s)

	validated := provisionApp(t, s.Process, `{"memory":{"max_keys":1000000}}`)
	if !bounded() {
		t.Error("max_keys of a configuration that was not started is in force")
	}
	cleanUp(t, validated)

	rejected := sitetest.Config{Global: many, Site: site}
	for n := range 10 { // apps start in any order
		var root map[string]any
		if err := json.Unmarshal(rejected.JSON(t, redistest.FreeAddr(t), s.LogPath), &root); err != nil {
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
		if memory, redis := sitetest.StoresInUse(s.Process); memory != 1 || redis != 0 {
			t.Errorf("%d references to the store in the process, %d stores in Redis", memory, redis)
		}
		if now, nowLogger := theApp(t, s); now != store || nowLogger != logger {
			t.Error("another app is in force")
		}
	}
	if !bounded() {
		t.Error("max_keys of a rejected configuration is in force")
	}
	s.Reload(sitetest.Config{Global: many, Site: site})
	if bounded() {
		t.Error("max_keys of the new configuration is not in force")
	}
	s.Reload(sitetest.Config{Site: site})
	if bounded() {
		t.Error("the default of max_keys is not in force")
	}
	if now, _ := theApp(t, s); now != store {
		t.Error("a reload made a new store")
	}
}

// theApp returns the store in the process and the logger of the newest app that
// runs.
func theApp(t *testing.T, s *sitetest.Site) (*limiter.Memory, *zap.Logger) {
	t.Helper()
	app := s.Process.Newest()
	if app == nil {
		t.Fatal("no app runs")
	}
	return app.Memory, app.Logger
}

// Guards what is logged about a Redis server, and that it is the log of the
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
			limiter.Event{Server: "a:1", Kind: limiter.EventReason, Reason: "tls", Err: errors.New("no"), Downtime: time.Minute},
			zap.ErrorLevel,
			"redis still unavailable",
			map[string]any{
				"server": "a:1", "reason": "tls", "error": "no", "down": time.Minute,
				"look_at": "tls, tls_server_name, tls_trust_pool and tls_client_auth",
			},
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
			"redis failed for individual requests, applying on_error",
			map[string]any{"server": "a:1", "reason": "timeout", "error": "late"},
		},
		{
			limiter.Event{Server: "a:1", Kind: limiter.EventDown, Reason: "refused", Err: errors.New("again")},
			zap.ErrorLevel,
			"redis unavailable, applying on_error",
			map[string]any{"server": "a:1", "reason": "refused", "error": "again"},
		},
		{
			limiter.Event{Server: "a:1", Kind: limiter.EventReplaced, Downtime: time.Minute},
			zap.InfoLevel,
			"redis server replaced by others of its cluster",
			map[string]any{"server": "a:1", "down": time.Minute},
		},
	}
	p, _ := clockedProcess(0)
	var logs []*observer.ObservedLogs
	var configs []*telemetry.Config
	for range 2 {
		core, observed := observer.New(zap.DebugLevel)
		c := provisionApp(t, p, `{}`).Compiled()
		c.Logger = zap.New(core)
		p.Add(c)
		configs, logs = append(configs, c), append(logs, observed)
	}
	for _, tc := range tests {
		p.Redis(nil, tc.event)
		got := logs[1].TakeAll()
		if len(got) != 1 || got[0].Level != tc.level || got[0].Message != tc.text ||
			!reflect.DeepEqual(got[0].ContextMap(), tc.fields) {
			t.Errorf("got %+v, want %s %q %v", got, tc.level, tc.text, tc.fields)
		}
	}
	p.Redis(nil, tests[3].event) // of a store that a reload has made
	if logs[1].Len() > 0 {
		t.Errorf("an error is logged twice in a minute: %v", logs[1].TakeAll())
	}
	if logs[0].Len() > 0 {
		t.Errorf("the log of the old configuration says %v", logs[0].All())
	}
	p.Remove(configs[1])
	p.Redis(nil, tests[0].event)
	if logs[0].Len() != 1 || logs[1].Len() != 0 {
		t.Errorf("after the new configuration ended the logs say %v and %v", logs[0].All(), logs[1].All())
	}
	p.Remove(configs[0])
	p.Redis(nil, tests[0].event) // which no one needs to know any more
}
