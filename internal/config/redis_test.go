package config

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/filetest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Guards what each form of an address means.
func TestParseAddress(t *testing.T) {
	t.Parallel()
	wd, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		address string
		want    address
	}{
		{"localhost:6379", address{form: formHostPort, server: "localhost:6379"}},
		{"192.0.2.1:7000", address{form: formHostPort, server: "192.0.2.1:7000"}},
		{"[::1]:6379", address{form: formHostPort, server: "[::1]:6379"}},
		{"[fe80::1%eth0]:6379", address{form: formHostPort, server: "[fe80::1%eth0]:6379"}},
		{"redis.example.com:1", address{form: formHostPort, server: "redis.example.com:1"}},
		{"a:65535", address{form: formHostPort, server: "a:65535"}},
		{"localhost", address{form: formHostPort, server: "localhost:1234"}},
		{"192.0.2.1", address{form: formHostPort, server: "192.0.2.1:1234"}},
		{"[::1]", address{form: formHostPort, server: "[::1]:1234"}},
		{"/run/redis.sock", address{form: formUnix, server: "/run/redis.sock"}},
		{"/run/redis 1:2.sock", address{form: formUnix, server: "/run/redis 1:2.sock"}},
		{"unix//run/redis.sock", address{form: formUnix, server: "/run/redis.sock"}},
		{"unix/redis.sock", address{form: formUnix, server: filepath.Join(wd, "redis.sock")}},
		{"redis://a", address{form: formRedis, server: "a:1234"}},
		{"redis://a/", address{form: formRedis, server: "a:1234"}},
		{"redis://[::1]", address{form: formRedis, server: "[::1]:1234"}},
		{"redis://a:7000", address{form: formRedis, server: "a:7000"}},
		{"redis://a:7000/3", address{form: formRedis, server: "a:7000", db: 3}},
		{"redis://[::1]:7000", address{form: formRedis, server: "[::1]:7000"}},
		{"redis://u@a:7000", address{form: formRedis, server: "a:7000", username: "u"}},
		{"redis://:p@a:7000", address{form: formRedis, server: "a:7000", password: "p"}},
		{"redis://u:p@a:7000/15", address{form: formRedis, server: "a:7000", username: "u", password: "p", db: 15}},
		{"redis://u%3A:p%40%2F%25@a:7000", address{form: formRedis, server: "a:7000", username: "u:", password: "p@/%", db: 0}},
		{"rediss://a", address{form: formRediss, server: "a:1234"}},
		{"rediss://[::1]:7000", address{form: formRediss, server: "[::1]:7000"}},
		{"rediss://u:p@a:7000/15", address{form: formRediss, server: "a:7000", username: "u", password: "p", db: 15}},
		{"unix:///run/redis.sock", address{form: formUnix, server: "/run/redis.sock"}},
		{"unix://u:p@/run/redis.sock", address{form: formUnix, server: "/run/redis.sock", username: "u", password: "p", db: 0}},
		{"unix://:p@/run/redis.sock", address{form: formUnix, server: "/run/redis.sock", password: "p"}},
	}
	for _, tc := range tests {
		t.Run(tc.address, func(t *testing.T) {
			if got, err := parseAddress(caddy.NewReplacer(), tc.address, "1234"); err != nil || got != tc.want {
				t.Errorf("got %+v, %v\nwant %+v", got, err, tc.want)
			}
		})
	}
}

// wantAddress is what errors say of an address.
const wantAddress = `is not valid; use a host, host:port, the path of a unix socket, or a redis://, rediss:// or unix:// URL`

// Guards that an address which is none is refused, and shown without what may
// be its password.
func TestParseAddressErrors(t *testing.T) {
	t.Parallel()
	tests := []struct{ address, shown string }{
		{"", ""},
		{"6379", "6379"},
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
		{"::1", "::1"},
		{"a:6379/1", "a:6379/1"},
		{"./redis.sock", "./redis.sock"},
		{"a:6379 ", "a:6379 "},
		{"a\nb", "a\nb"},
		{"://", "://"},
		{"http://a:6379", "http://a:6379"},
		{"tcp://a:6379", "tcp://a:6379"},
		{"rediss://a:b", "rediss://…"},
		{"rediss://a:0", "rediss://a:0"},
		{"rediss://a/b", "rediss://a/b"},
		{"rediss://a?skip_verify=1", "rediss://a?…"},
		{"rediss://u:canary@a:b", "rediss://…@a:b"},
		{"redis+tls://a:6379", "redis+tls://a:6379"},
		{"redis://", "redis://"},
		{"redis:///", "redis:///"},
		{"redis:///1", "redis:///1"},
		{"redis://:6379", "redis://:6379"},
		{"redis://:canary@", "redis://…@"},
		{"redis://:canary@/0", "redis://…@/0"},
		{"redis://:canary@:6379", "redis://…@:6379"},
		{"rediss://u:canary@:6379/1", "rediss://…@:6379/1"},
		{"canary@a:6379", "…@a:6379"},
		{"a{b:6379", "a{b:6379"},
		{"tcp/a:6379", "tcp/a:6379"},
		{"unix/", "unix/"},
		{"unix/@abstract", "…@abstract"},
		{"unix//run/redis.sock|0200", "unix//run/redis.sock|0200"},
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
			got, err := parseAddress(caddy.NewReplacer(), tc.address, "1234")
			if err == nil {
				t.Fatalf("got %+v, want an error", got)
			}
			want := strings.Replace(fmt.Sprintf("address: %q %s", tc.shown, wantAddress), `"" is not valid`, "nothing given", 1)
			if err.Error() != want {
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
	filetest.Write(t, file, []byte("in a file\n"))
	with := func(change func(*limiter.RedisOptions)) limiter.RedisOptions {
		opt := limiter.RedisOptions{Addresses: []string{"a:1"}, KeyPrefix: "rl:", Timeout: 50 * time.Millisecond}
		change(&opt)
		return opt
	}
	tests := []struct {
		name  string
		redis Redis
		want  limiter.RedisOptions
	}{
		{"defaults", Redis{Addresses: []string{"a:1"}}, with(func(*limiter.RedisOptions) {})},
		{
			"all options of a server",
			Redis{
				Addresses: []string{"/s"}, Username: "u", Password: "p", DB: "3",
				KeyPrefix: "x", KeySecret: "k", Timeout: "1s",
			},
			limiter.RedisOptions{
				Addresses: []string{"/s"}, Username: "u", Password: "p", DB: 3,
				KeyPrefix: "x", KeySecret: "k", Timeout: time.Second,
			},
		},
		{
			"all options of sentinels",
			Redis{
				Addresses: []string{"a:1", "b:1"}, MasterName: "m", SentinelUsername: "su", SentinelPassword: "sp",
				Username: "u", Password: "p", DB: "3",
			},
			with(func(opt *limiter.RedisOptions) {
				opt.Addresses, opt.MasterName = []string{"a:1", "b:1"}, "m"
				opt.SentinelUsername, opt.SentinelPassword = "su", "sp"
				opt.Username, opt.Password, opt.DB = "u", "p", 3
			}),
		},
		{
			"one sentinel, by a URL",
			Redis{Addresses: []string{"redis://a"}, MasterName: "m"},
			with(func(opt *limiter.RedisOptions) { opt.Addresses, opt.MasterName = []string{"a:26379"}, "m" }),
		},
		{
			"sentinels without ports",
			Redis{Addresses: []string{"a", "b:1"}, MasterName: "m"},
			with(func(opt *limiter.RedisOptions) { opt.Addresses, opt.MasterName = []string{"a:26379", "b:1"}, "m" }),
		},
		{
			"a cluster without ports",
			Redis{Addresses: []string{"a", "b:1"}},
			with(func(opt *limiter.RedisOptions) { opt.Addresses, opt.Cluster = []string{"a:6379", "b:1"}, true }),
		},
		{
			"seed of a cluster",
			Redis{Addresses: []string{"a:1"}, Cluster: true},
			with(func(opt *limiter.RedisOptions) { opt.Cluster = true }),
		},
		{
			"several servers",
			Redis{Addresses: []string{"a:1", "b:1", "a:2"}},
			with(func(opt *limiter.RedisOptions) { opt.Addresses, opt.Cluster = []string{"a:1", "b:1", "a:2"}, true }),
		},
		{
			"several servers, some with the user and password",
			Redis{Addresses: []string{"redis://a", "redis://u@b", "redis://:p@c", "redis://u:p@d/0"}},
			with(func(opt *limiter.RedisOptions) {
				opt.Addresses, opt.Cluster = []string{"a:6379", "b:6379", "c:6379", "d:6379"}, true
				opt.Username, opt.Password = "u", "p"
			}),
		},
		{
			"least timeout",
			Redis{Addresses: []string{"a:1"}, Timeout: "1ms"},
			with(func(opt *limiter.RedisOptions) { opt.Timeout = time.Millisecond }),
		},
		{
			"password beside the address's user",
			Redis{Addresses: []string{"redis://u@a:1"}, Password: "p"},
			with(func(opt *limiter.RedisOptions) { opt.Username, opt.Password = "u", "p" }),
		},
		{
			"the same database twice",
			Redis{Addresses: []string{"redis://a:1/3"}, DB: "3"},
			with(func(opt *limiter.RedisOptions) { opt.DB = 3 }),
		},
		{
			"placeholders in all texts",
			Redis{
				Addresses:        []string{"{env.RATE_LIMIT_TEST_HOST}:1"},
				Username:         "{env.RATE_LIMIT_TEST_USER}",
				Password:         "{env.RATE_LIMIT_TEST_PASSWORD}",
				MasterName:       "m{env.RATE_LIMIT_TEST_USER}",
				SentinelUsername: "su{env.RATE_LIMIT_TEST_USER}",
				SentinelPassword: "sp{env.RATE_LIMIT_TEST_USER}",
				KeySecret:        "k{env.RATE_LIMIT_TEST_USER}",
			},
			with(func(opt *limiter.RedisOptions) {
				opt.Addresses, opt.Username = []string{"example:1"}, "limiter"
				opt.Password = "s3cret {env.RATE_LIMIT_TEST_USER}" // no placeholder is replaced twice
				opt.MasterName, opt.KeySecret = "mlimiter", "klimiter"
				opt.SentinelUsername, opt.SentinelPassword = "sulimiter", "splimiter"
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
				opt.Addresses, opt.Username, opt.Password, opt.DB = []string{"a:7000"}, "u", "p", 2
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
			if got, _, err := tc.redis.Options(caddy.Context{}); err != nil || !reflect.DeepEqual(got, tc.want) {
				t.Errorf("got %+v, %v\nwant %+v", got, err, tc.want)
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
			"rediss://:{env.RATE_LIMIT_TEST_SECRET}@a:1": "a:1",
			"unix://:{env.RATE_LIMIT_TEST_SECRET}@/run":  "/run",
			"unix://u:{env.RATE_LIMIT_TEST_SECRET}@/run": "/run",
		} {
			got, err := parseAddress(caddy.NewReplacer(), address, "6379")
			switch {
			case err != nil && strings.Contains(err.Error(), "canary"):
				t.Errorf("%s with %q: error %q shows the secret", address, secret, err)
			case err == nil && (got.server != want || got.password != secret):
				t.Errorf("%s with %q: got %+v, want address %s and that password", address, secret, got, want)
			}
		}
	}
}
