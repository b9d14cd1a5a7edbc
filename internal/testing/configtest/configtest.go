// Package configtest loads configs as Caddy and its commands do, for tests, which have to import
// the modules in them.
package configtest

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/check"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/offline"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/compile"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/state"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
)

// Adapt returns the JSON that a Caddyfile stands for. A warning, such
// as that it is not formatted, is an error.
func Adapt(src string) ([]byte, error) {
	options := map[string]any{"filename": "Caddyfile"}
	out, warnings, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(src), options)
	if err == nil && len(warnings) > 0 {
		err = fmt.Errorf("warnings: %v", warnings)
	}
	return out, err
}

// Validate loads a configuration as `caddy validate` does, without admin endpoint
// and logs. The command check has to refuse what that refuses, and nothing else. What can't be
// meant as it is, of which both would warn, is an error here: no example has it. Caddy
// can't validate two at once, so tests of what may be accepted do not run in parallel.
func Validate(config []byte) error {
	err := ValidateAsCaddy(config)
	d, refused := offline.New(config)
	if refused == nil {
		if refused = d.Validate(); refused == nil && err == nil {
			for _, a := range check.Advice(d) {
				if a.Kind.IsCertain() {
					err = errors.Join(err, fmt.Errorf("%s: %s %s", a.About(), a.Problem, a.Remedy))
					refused = err
				}
			}
		}
		d.Close()
	}
	if (err == nil) != (refused == nil) {
		return fmt.Errorf("caddy validate says: %w; check says: %w", err, refused)
	}
	return err
}

// ValidateAsCaddy is Validate without the command check.
func ValidateAsCaddy(config []byte) error {
	var cfg caddy.Config
	if err := caddy.StrictUnmarshalJSON(config, &cfg); err != nil {
		return err
	}
	cfg.Admin = &caddy.AdminConfig{Disabled: true}
	cfg.Logging = &caddy.Logging{Logs: map[string]*caddy.CustomLog{
		"default": {BaseLog: caddy.BaseLog{WriterRaw: json.RawMessage(`{"output":"discard"}`)}},
	}}
	return caddy.Validate(&cfg)
}

// ValidateCaddyfile adapts a Caddyfile, formatted or not, and validates what
// it stands for.
func ValidateCaddyfile(src string) error {
	options := map[string]any{"filename": "Caddyfile"}
	config, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(src), options)
	if err != nil {
		return err
	}
	return Validate(config)
}

// WithHandler returns a configuration with one handler.
func WithHandler(handler string) []byte {
	return []byte(`{"apps":{"http":{"servers":{"srv":{"listen":[":8080"],` +
		`"routes":[{"handle":[{` + handler + `}]}]}}}}}`)
}

// Lines makes a Caddyfile of text that stands in one line.
func Lines(text string) string { return strings.ReplaceAll(text, "; ", "\n") }

// InLimit returns a Caddyfile with a limit.
func InLimit(block string) string {
	return ":8080 {\nrate_limit api {\n" + Lines(block) + "\n}\n}\n"
}

// InApp returns a Caddyfile with the global option.
func InApp(block string) string {
	return "{\nrate_limit {\n" + Lines(block) + "\n}\n}\n:8080 {\nrespond ok\n}\n"
}

// Wrapping is what Caddy puts in front of our errors.
var Wrapping = regexp.MustCompile(`^.*(parsing caddyfile tokens for 'rate_limit'|` +
	`(provision|decoding module config:) (http\.handlers\.)?rate_limit): `)

// WantError checks an error: behind what Caddy puts in front of it, it is
// exactly the one line that is wanted, nothing if it is to be accepted.
func WantError(t *testing.T, err error, want string) {
	t.Helper()
	got := ""
	if err != nil {
		got = Wrapping.ReplaceAllLiteralString(err.Error(), "")
	}
	if got != want {
		t.Errorf("\n got error %q\nwant error %q", got, want)
	}
	if strings.Contains(got, "\n") {
		t.Errorf("error %q has several lines, want one", got)
	}
}

// CheckStoredAgain checks that all that is ours in a configuration has a field
// in our types, and is the same when it is written from them. It returns how
// many modules of ours there are.
func CheckStoredAgain(t *testing.T, config []byte) (found int) {
	t.Helper()
	var all map[string]any
	if err := json.Unmarshal(config, &all); err != nil {
		t.Fatal(err)
	}
	eachModule(all, func(id string, raw map[string]any) {
		found++
		registered, err := caddy.GetModule(id)
		if err != nil {
			t.Fatal(err)
		}
		module := registered.New()
		text, err := json.Marshal(raw)
		if err != nil {
			t.Fatal(err)
		}
		if err := caddy.StrictUnmarshalJSON(text, module); err != nil {
			t.Errorf("%s: %v", text, err)
		}
		stored, err := json.Marshal(module)
		if err != nil {
			t.Fatal(err)
		}
		var again map[string]any
		if err := json.Unmarshal(stored, &again); err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(again, raw) {
			t.Errorf("stored again got\n%s\nwant\n%s", stored, text)
		}
	})
	return found
}

// eachModule calls check for each module of ours in a configuration.
func eachModule(value any, check func(id string, raw map[string]any)) {
	switch value := value.(type) {
	case []any:
		for _, v := range value {
			eachModule(v, check)
		}
	case map[string]any:
		if value["handler"] == "rate_limit" {
			delete(value, "handler") // Caddy's own
			check("http.handlers.rate_limit", value)
			return
		}
		for name, v := range value {
			if app, ok := v.(map[string]any); ok && name == "rate_limit" {
				check("rate_limit", app)
				continue
			}
			eachModule(v, check)
		}
	}
}

// ReadyLimit returns a limit that is ready for requests, and what it logs.
func ReadyLimit(t testing.TB, l *config.Limit) (*rule.Limit, *observer.ObservedLogs) {
	t.Helper()
	ctx, cancel := caddy.NewContext(caddy.Context{Context: t.Context()})
	t.Cleanup(cancel)
	s, err := compile.NewShared(new(config.App), state.New(telemetry.Options{}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Release)
	c, err := compile.New(&config.Block{Limits: []*config.Limit{l}}, option.OnLoad)
	if err != nil {
		t.Fatal(err)
	}
	limits, err := c.Load(ctx, s)
	if err != nil {
		t.Fatal(err)
	}
	core, logs := observer.New(zapcore.DebugLevel)
	setLogger(limits[0], zap.New(core))
	return limits[0], logs
}

func setLogger(l *rule.Limit, logger *zap.Logger) {
	l.Reporter.Logger = logger
	for _, child := range l.Within {
		setLogger(child, logger)
	}
}
