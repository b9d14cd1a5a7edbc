package ratelimit

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Guards what each form of an address stands for.
func TestParseAddress(t *testing.T) {
	tests := []struct {
		address string
		want    limiter.RedisOptions
	}{
		{"localhost:6379", limiter.RedisOptions{Network: "tcp", Address: "localhost:6379"}},
		{"192.0.2.1:7000", limiter.RedisOptions{Network: "tcp", Address: "192.0.2.1:7000"}},
		{"[::1]:6379", limiter.RedisOptions{Network: "tcp", Address: "[::1]:6379"}},
		{"[fe80::1%eth0]:6379", limiter.RedisOptions{Network: "tcp", Address: "[fe80::1%eth0]:6379"}},
		{"redis.example.com:1", limiter.RedisOptions{Network: "tcp", Address: "redis.example.com:1"}},
		{"a:65535", limiter.RedisOptions{Network: "tcp", Address: "a:65535"}},
		{"/run/redis.sock", limiter.RedisOptions{Network: "unix", Address: "/run/redis.sock"}},
		{"/run/redis 1:2.sock", limiter.RedisOptions{Network: "unix", Address: "/run/redis 1:2.sock"}},
		{"redis://a", limiter.RedisOptions{Network: "tcp", Address: "a:6379"}},
		{"redis://a/", limiter.RedisOptions{Network: "tcp", Address: "a:6379"}},
		{"redis://a:7000", limiter.RedisOptions{Network: "tcp", Address: "a:7000"}},
		{"redis://a:7000/3", limiter.RedisOptions{Network: "tcp", Address: "a:7000", DB: 3}},
		{"redis://[::1]:7000", limiter.RedisOptions{Network: "tcp", Address: "[::1]:7000"}},
		{"redis://u@a:7000", limiter.RedisOptions{Network: "tcp", Address: "a:7000", Username: "u"}},
		{"redis://:p@a:7000", limiter.RedisOptions{Network: "tcp", Address: "a:7000", Password: "p"}},
		{
			"redis://u:p@a:7000/15",
			limiter.RedisOptions{Network: "tcp", Address: "a:7000", Username: "u", Password: "p", DB: 15},
		},
		{
			"redis://u%3A:p%40%2F%25@a:7000",
			limiter.RedisOptions{Network: "tcp", Address: "a:7000", Username: "u:", Password: "p@/%"},
		},
		{"unix:///run/redis.sock", limiter.RedisOptions{Network: "unix", Address: "/run/redis.sock"}},
		{
			"unix://u:p@/run/redis.sock",
			limiter.RedisOptions{Network: "unix", Address: "/run/redis.sock", Username: "u", Password: "p"},
		},
		{
			"unix://:p@/run/redis.sock",
			limiter.RedisOptions{Network: "unix", Address: "/run/redis.sock", Password: "p"},
		},
	}
	for _, tc := range tests {
		t.Run(tc.address, func(t *testing.T) {
			if got, err := parseAddress(caddy.NewReplacer(), tc.address); err != nil || got != tc.want {
				t.Errorf("got %+v, %v\nwant %+v", got, err, tc.want)
			}
		})
	}
}

// Guards that an address which is none is refused, and shown without what may
// be its password.
func TestParseAddressErrors(t *testing.T) {
	const want = `want host:port, the path of a unix socket, or a redis:// or unix:// URL`
	tests := []struct{ address, shown string }{
		{"", ""},
		{"a", "a"},
		{"a:", "a:"},
		{":6379", ":6379"},
		{":", ":"},
		{"a:b", "a:b"},
		{"a:-1", "a:-1"},
		{"a:+1", "a:+1"},
		{"a:0", "a:0"},
		{"a:65536", "a:65536"},
		{"a:1:2", "a:1:2"},
		{"::1:6379", "::1:6379"},
		{"[::1]", "[::1]"},
		{"a:6379/1", "a:6379/1"},
		{"./redis.sock", "./redis.sock"},
		{"a:6379 ", "a:6379 "},
		{"a\nb", "a\nb"},
		{"://", "://"},
		{"http://a:6379", "http://a:6379"},
		{"tcp://a:6379", "tcp://a:6379"},
		{"rediss://a:6379", "rediss://a:6379"}, // not without TLS in its place
		{"redis://a:b", "redis://…"},
		{"redis://u:canary", "redis://…"},
		{"redis://:canary/0", "redis://…"},
		{"redis://a:0", "redis://a:0"},
		{"redis://a:65536", "redis://a:65536"},
		{"redis://a/b", "redis://a/b"},
		{"redis://a/1/2", "redis://a/1/2"},
		{"redis://a/-1", "redis://a/-1"},
		{"redis://a?password=canary", "redis://a?…"},
		{"redis://a#1", "redis://a#1"},
		{"redis://:canary@a:b", "redis://…@a:b"},
		{"redis://u:canary@a:b", "redis://…@a:b"},
		{"redis://u:can@ary@a:b", "redis://…@a:b"},
		{"redis://u:can/ary@a:6379", "redis://…@a:6379"},
		{"redis://u:can?ary@a:6379", "redis://…@a:6379"},
		{"redis://u:can#ary@a:6379", "redis://…@a:6379"},
		{"redis://u:can%zzary@a:6379", "redis://…@a:6379"},
		{"http://u:canary@a:6379", "http://…@a:6379"},
		{"unix://u:canary@", "unix://…@"},
		{"unix://a/run/redis.sock", "unix://a/run/redis.sock"},
		{"unix://u:12/canary@/run/redis.sock", "unix://…@/run/redis.sock"},
	}
	for _, tc := range tests {
		t.Run(tc.address, func(t *testing.T) {
			got, err := parseAddress(caddy.NewReplacer(), tc.address)
			if err == nil {
				t.Fatalf("got %+v, want an error", got)
			}
			if want := fmt.Sprintf("address: got %q, %s", tc.shown, want); err.Error() != want {
				t.Errorf("got error %q\nwant %q", err, want)
			}
		})
	}
}

// Guards how an address and the options beside it make one, and the defaults.
func TestRedisOptions(t *testing.T) {
	t.Setenv("RATE_LIMIT_TEST_HOST", "example")
	t.Setenv("RATE_LIMIT_TEST_USER", "limiter")
	t.Setenv("RATE_LIMIT_TEST_PASSWORD", "s3cret {env.RATE_LIMIT_TEST_USER}")
	t.Setenv("RATE_LIMIT_TEST_URL", "redis://u:p@a:7000/2")
	file := filepath.Join(t.TempDir(), "password")
	if err := os.WriteFile(file, []byte("in a file\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	defaults := limiter.RedisOptions{
		Network: "tcp", Address: "a:1", KeyPrefix: "rl:", Timeout: 50 * time.Millisecond,
	}
	with := func(change func(*limiter.RedisOptions)) limiter.RedisOptions {
		opt := defaults
		change(&opt)
		return opt
	}
	tests := []struct {
		name  string
		redis Redis
		want  limiter.RedisOptions
	}{
		{"defaults", Redis{Addresses: []string{"a:1"}}, defaults},
		{
			"all options",
			Redis{
				Addresses: []string{"/s"}, Username: "u", Password: "p", DB: 3,
				KeyPrefix: "x", Timeout: 1e9, PoolSize: 4,
			},
			limiter.RedisOptions{
				Network: "unix", Address: "/s", Username: "u", Password: "p", DB: 3,
				KeyPrefix: "x", Timeout: time.Second, PoolSize: 4,
			},
		},
		{
			"least timeout",
			Redis{Addresses: []string{"a:1"}, Timeout: 1e6},
			with(func(opt *limiter.RedisOptions) { opt.Timeout = time.Millisecond }),
		},
		{
			"password beside the address's user",
			Redis{Addresses: []string{"redis://u@a:1"}, Password: "p"},
			with(func(opt *limiter.RedisOptions) { opt.Username, opt.Password = "u", "p" }),
		},
		{
			"the same database twice",
			Redis{Addresses: []string{"redis://a:1/3"}, DB: 3},
			with(func(opt *limiter.RedisOptions) { opt.DB = 3 }),
		},
		{
			"placeholders in all texts",
			Redis{
				Addresses: []string{"{env.RATE_LIMIT_TEST_HOST}:1"},
				Username:  "{env.RATE_LIMIT_TEST_USER}",
				Password:  "{env.RATE_LIMIT_TEST_PASSWORD}",
			},
			with(func(opt *limiter.RedisOptions) {
				opt.Address, opt.Username = "example:1", "limiter"
				opt.Password = "s3cret {env.RATE_LIMIT_TEST_USER}" // no placeholder is replaced twice
			}),
		},
		{
			"file",
			Redis{Addresses: []string{"a:1"}, Password: "{file." + file + "}"},
			with(func(opt *limiter.RedisOptions) { opt.Password = "in a file" }),
		},
		{
			"address that is a placeholder",
			Redis{Addresses: []string{"{env.RATE_LIMIT_TEST_URL}"}},
			with(func(opt *limiter.RedisOptions) {
				opt.Address, opt.Username, opt.Password, opt.DB = "a:7000", "u", "p", 2
			}),
		},
		{
			"placeholder in the password of a URL",
			Redis{Addresses: []string{"redis://u:x@{env.RATE_LIMIT_TEST_PASSWORD}@a:1"}},
			with(func(opt *limiter.RedisOptions) {
				opt.Username, opt.Password = "u", "x@s3cret {env.RATE_LIMIT_TEST_USER}"
			}),
		},
		{
			"escaped braces",
			Redis{Addresses: []string{"a:1"}, Password: `\{p\}`},
			with(func(opt *limiter.RedisOptions) { opt.Password = "{p}" }),
		},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			if got, err := tc.redis.options(caddy.NewReplacer()); err != nil || got != tc.want {
				t.Errorf("got %+v, %v\nwant %+v", got, err, tc.want)
			}
		})
	}
}

// Guards that options which contradict each other, are out of range or hold a
// placeholder without a value are refused by name, and that no error tells
// what a placeholder stands for or a password is.
func TestRedisOptionsErrors(t *testing.T) {
	const canary = "canary"
	t.Setenv("RATE_LIMIT_TEST_SECRET", canary)
	t.Setenv("RATE_LIMIT_TEST_EMPTY", "")
	t.Setenv("RATE_LIMIT_TEST_URL", "redis://u:"+canary+"@a:b")
	t.Setenv("RATE_LIMIT_TEST_BRACES", "{"+canary+"}")
	dir := t.TempDir()
	empty := filepath.Join(dir, "empty")
	if err := os.WriteFile(empty, []byte("\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	const wantAddress = `want host:port, the path of a unix socket, or a redis:// or unix:// URL`
	const inTwo = `got one in the address too, want it in one place`
	tests := []struct {
		name  string
		redis Redis
		want  string
	}{
		{"no address", Redis{}, `addresses: got 0, want exactly one`},
		{"two addresses", Redis{Addresses: []string{"a:1", canary}}, `addresses: got 2, want exactly one`},
		{
			"user twice",
			Redis{Addresses: []string{"redis://canary@a:1"}, Username: canary},
			`username: ` + inTwo,
		},
		{
			"password twice",
			Redis{Addresses: []string{"redis://:canary@a:1"}, Password: canary},
			`password: ` + inTwo,
		},
		{
			"two databases",
			Redis{Addresses: []string{"redis://:canary@a:1/2"}, DB: 3},
			`db: got "3", want none, or 2 as in the address`,
		},
		{
			"negative database",
			Redis{Addresses: []string{"a:1"}, DB: -1},
			`db: got "-1", want the number of a database, from 0`,
		},
		{
			"braces in prefix",
			Redis{Addresses: []string{"a:1"}, KeyPrefix: "{a}"},
			`key_prefix: got "{a}", want text without braces`,
		},
		{
			"short timeout",
			Redis{Addresses: []string{"a:1"}, Timeout: 999_999},
			`timeout: got "999.999µs", want at least 1ms`,
		},
		{
			"negative timeout",
			Redis{Addresses: []string{"a:1"}, Timeout: -1e9},
			`timeout: got "-1s", want at least 1ms`,
		},
		{
			"negative pool",
			Redis{Addresses: []string{"a:1"}, PoolSize: -1},
			`pool_size: got "-1", want at least 1`,
		},

		{
			"empty variable in password",
			Redis{Addresses: []string{"a:1"}, Password: canary + "{env.RATE_LIMIT_TEST_EMPTY}"},
			`password: evaluated placeholder {env.RATE_LIMIT_TEST_EMPTY} is empty`,
		},
		{
			"unset variable in username",
			Redis{Addresses: []string{"a:1"}, Username: "{env.RATE_LIMIT_TEST_UNSET}"},
			`username: evaluated placeholder {env.RATE_LIMIT_TEST_UNSET} is empty`,
		},
		{
			"unset variable in address", Redis{Addresses: []string{"{env.RATE_LIMIT_TEST_UNSET}:6379"}},
			`address: evaluated placeholder {env.RATE_LIMIT_TEST_UNSET} is empty`,
		},
		{
			"empty variable in a URL's password",
			Redis{Addresses: []string{"redis://:{env.RATE_LIMIT_TEST_EMPTY}@a:1"}},
			`address: evaluated placeholder {env.RATE_LIMIT_TEST_EMPTY} is empty`,
		},
		{
			"unset variable in a URL's host",
			Redis{Addresses: []string{"redis://:canary@{env.RATE_LIMIT_TEST_UNSET}:1"}},
			`address: evaluated placeholder {env.RATE_LIMIT_TEST_UNSET} is empty`,
		},
		{
			"empty file", Redis{Addresses: []string{"a:1"}, Password: "{file." + empty + "}"},
			`password: evaluated placeholder {file.` + empty + `} is empty`,
		},
		{
			"no file", Redis{Addresses: []string{"a:1"}, Password: "{file." + dir + "/none}"},
			`password: evaluated placeholder {file.` + dir + `/none} is empty`,
		},
		{
			"unknown placeholder", Redis{Addresses: []string{"a:1"}, Password: "{http.request.host}"},
			`password: unrecognized placeholder {http.request.host}`,
		},
		{
			"secret in a bad address", Redis{Addresses: []string{"{env.RATE_LIMIT_TEST_SECRET}"}},
			`address: got "{env.RATE_LIMIT_TEST_SECRET}", ` + wantAddress,
		},
		{
			"secret in a bad URL", Redis{Addresses: []string{"redis://:{env.RATE_LIMIT_TEST_SECRET}@a:b"}},
			`address: got "redis://…@a:b", ` + wantAddress,
		},
		{
			"bad URL from a variable", Redis{Addresses: []string{"{env.RATE_LIMIT_TEST_URL}"}},
			`address: got "{env.RATE_LIMIT_TEST_URL}", ` + wantAddress,
		},
		{
			"braces from a variable", Redis{Addresses: []string{"{env.RATE_LIMIT_TEST_BRACES}"}},
			`address: got "{env.RATE_LIMIT_TEST_BRACES}", ` + wantAddress,
		},
		{
			"password in a bad URL", Redis{Addresses: []string{"redis://u:canary@a:b"}},
			`address: got "redis://…@a:b", ` + wantAddress,
		},
		{
			"password in a URL without its scheme", Redis{Addresses: []string{"u:canary@a:6379"}},
			`address: got "…@a:6379", ` + wantAddress,
		},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			got, err := tc.redis.options(caddy.NewReplacer())
			if err == nil {
				t.Fatalf("got %+v, want an error", got)
			}
			if err.Error() != tc.want {
				t.Errorf("got error %q\nwant %q", err, tc.want)
			}
			if strings.Contains(err.Error(), canary) {
				t.Errorf("error %q shows the secret", err)
			}
		})
	}
}

// Guards that a secret in a URL, whatever characters it has, is the password or
// an error, and never sends us or what we log to another host or socket.
func TestSecretInURL(t *testing.T) {
	for _, secret := range []string{
		"canary", "12/canary", "12?canary", "12#canary", "12:canary", "12@canary", "@canary", "12#x@canary",
		"[canary", "canary]", "can ary", "canary%zz", "12/0#canary", "canary:12/", "//canary",
	} {
		t.Setenv("RATE_LIMIT_TEST_SECRET", secret)
		for address, want := range map[string]string{
			"redis://:{env.RATE_LIMIT_TEST_SECRET}@a:1":  "a:1",
			"redis://u:{env.RATE_LIMIT_TEST_SECRET}@a:1": "a:1",
			"unix://:{env.RATE_LIMIT_TEST_SECRET}@/run":  "/run",
			"unix://u:{env.RATE_LIMIT_TEST_SECRET}@/run": "/run",
		} {
			got, err := parseAddress(caddy.NewReplacer(), address)
			switch {
			case err != nil && strings.Contains(err.Error(), "canary"):
				t.Errorf("%s with %q: error %q shows the secret", address, secret, err)
			case err == nil && (got.Address != want || got.Password != secret):
				t.Errorf("%s with %q: got %+v, want address %s and that password", address, secret, got, want)
			}
		}
	}
}

// Guards that what Caddy keeps of a configuration, shows at its admin endpoint
// and saves has the placeholders and not what they stand for.
func TestSecretsAreNotStored(t *testing.T) {
	t.Setenv("RATE_LIMIT_TEST_SECRET", "canary")
	for _, config := range []string{
		`{"redis":{"addresses":["a:1"],"username":"{env.RATE_LIMIT_TEST_SECRET}"}}`,
		`{"redis":{"addresses":["a:1"],"password":"{env.RATE_LIMIT_TEST_SECRET}"}}`,
		`{"redis":{"addresses":["redis://:{env.RATE_LIMIT_TEST_SECRET}@a:1"]}}`,
	} {
		app := new(App)
		if err := caddy.StrictUnmarshalJSON([]byte(config), app); err != nil {
			t.Fatal(err)
		}
		if err := app.Provision(caddy.Context{}); err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := app.Cleanup(); err != nil {
				t.Error(err)
			}
		}()
		if got, err := json.Marshal(app); err != nil || string(got) != config {
			t.Errorf("got %s, %v\nwant %s", got, err, config)
		}
	}

	const src = `{
	rate_limit {
		redis redis.invalid:6379 {
			password {env.RATE_LIMIT_TEST_SECRET}
		}
	}
}
:8080 {
	respond ok
}
`
	config, err := adaptCaddyfile(src)
	if err != nil || strings.Contains(string(config), "canary") ||
		!strings.Contains(string(config), `"password":"{env.RATE_LIMIT_TEST_SECRET}"`) {
		t.Errorf("adapted to %s, %v", config, err)
	}
}

// Guards that a configuration lets go of its store however far it got: after
// validation, and when it or another module of it is refused.
func TestStoreIsReleased(t *testing.T) {
	handler := func(limit string) string {
		const app = `{"apps":{"rate_limit":{"redis":{"addresses":["released.invalid:1"]}},`
		config := string(configOf(`"handler":"rate_limit","limits":[` + limit + `]`))
		return strings.Replace(config, `{"apps":{`, app, 1)
	}
	opt, err := (&Redis{Addresses: []string{"released.invalid:1"}}).options(caddy.NewReplacer())
	if err != nil {
		t.Fatal(err)
	}
	for name, config := range map[string]string{
		"valid":           handler(`{"size":1}`),
		"a bad limit":     handler(`{"size":0}`),
		"a later bad one": handler(`{"size":1},{"size":1}`),
		"a bad app":       `{"apps":{"rate_limit":{"redis":{"addresses":["released.invalid:1"],"db":-1}}}}`,
	} {
		t.Run(name, func(t *testing.T) {
			err := validateConfig([]byte(config))
			if (err == nil) != (name == "valid") {
				t.Fatalf("got error %v", err)
			}
			if n, found := stores.References(opt); found {
				t.Errorf("the store still has %d references", n)
			}
		})
	}
}

// Guards that equal settings are one store, however they are written, so that
// connections are shared and survive reloads, and that others are not.
func TestStoreIsShared(t *testing.T) {
	t.Setenv("RATE_LIMIT_TEST_SECRET", "canary")
	provision := func(config string) *App {
		app := new(App)
		if err := caddy.StrictUnmarshalJSON([]byte(config), app); err != nil {
			t.Fatal(err)
		}
		if err := app.Provision(caddy.Context{}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := app.Cleanup(); err != nil {
				t.Error(err)
			}
		})
		return app
	}
	first := provision(`{"redis":{"addresses":["a:1"],"password":"canary","db":2}}`)
	for config, shared := range map[string]bool{
		`{"redis":{"addresses":["redis://:canary@a:1/2"]}}`:                                true,
		`{"redis":{"addresses":["a:1"],"password":"{env.RATE_LIMIT_TEST_SECRET}","db":2}}`: true,
		`{"redis":{"addresses":["a:1"],"password":"canary","db":2,"timeout":"50ms"}}`:      true,
		`{"redis":{"addresses":["a:1"],"password":"canary","db":2,"timeout":"60ms"}}`:      false,
		`{"redis":{"addresses":["a:1"],"password":"canary","db":2,"key_prefix":"x"}}`:      false,
		`{"redis":{"addresses":["a:1"],"password":"canary","db":2,"pool_size":1}}`:         false,
		`{"redis":{"addresses":["a:1"],"password":"canary"}}`:                              false,
		`{"redis":{"addresses":["a:1"],"password":"other","db":2}}`:                        false,
		`{"redis":{"addresses":["b:1"],"password":"canary","db":2}}`:                       false,
		`{}`: false,
	} {
		if app := provision(config); (app.store == first.store) != shared {
			t.Errorf("%s: shares the store = %t, want %t", config, !shared, shared)
		}
	}
}
