package ratelimit

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Guards what each form of an address stands for.
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
		{"redis://u:p@a:7000/15", address{formRedis, "a:7000", "u", "p", 15}},
		{"redis://u%3A:p%40%2F%25@a:7000", address{formRedis, "a:7000", "u:", "p@/%", 0}},
		{"rediss://a", address{form: formRediss, server: "a:1234"}},
		{"rediss://[::1]:7000", address{form: formRediss, server: "[::1]:7000"}},
		{"rediss://u:p@a:7000/15", address{formRediss, "a:7000", "u", "p", 15}},
		{"unix:///run/redis.sock", address{form: formUnix, server: "/run/redis.sock"}},
		{"unix://u:p@/run/redis.sock", address{formUnix, "/run/redis.sock", "u", "p", 0}},
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

// Guards that an address which is none is refused, and shown without what may
// be its password.
func TestParseAddressErrors(t *testing.T) {
	t.Parallel()
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
			if want := fmt.Sprintf("address: got %q, %s", tc.shown, wantAddress); err.Error() != want {
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
			if got, _, err := tc.redis.options(caddy.Context{}); err != nil || !reflect.DeepEqual(got, tc.want) {
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
	const wantKnown = `got a placeholder that is unknown here, want {env.*}, {file.*} or {system.*}, ` +
		`or \{ and \} for braces`
	const inTwo = `also set in the address, set it once`
	const onSocket = `not supported with a unix socket, only with host:port or such a URL`
	const ofSentinel = `want a sentinel's without user, password and database, which are options of their own`
	tests := []struct {
		name  string
		redis Redis
		want  string
	}{
		{"no address", Redis{}, `addresses: got none, want at least one`},
		{"a second bad address", Redis{Addresses: []string{"a:1", "b"}}, `address: got "b", ` + wantAddress},
		{
			"an address twice",
			Redis{Addresses: []string{"a:1", "b:1", "a:1"}},
			`addresses: got "a:1", want each server once`,
		},
		{
			"an address twice, with other passwords",
			Redis{Addresses: []string{"redis://:canary@a", "redis://u:canary@a:6379"}},
			`addresses: got "redis://…@a:6379", want each server once`,
		},
		{
			"an address twice, by a placeholder",
			Redis{Addresses: []string{"canary:1", "{env.RATE_LIMIT_TEST_SECRET}:1"}},
			`addresses: got "{env.RATE_LIMIT_TEST_SECRET}:1", want each server once`,
		},
		{
			"with and without TLS",
			Redis{Addresses: []string{"rediss://a", "redis://b"}},
			`addresses: got redis:// together with rediss://, want one form`,
		},
		{
			"host and URL",
			Redis{Addresses: []string{"a:1", "rediss://b"}},
			`addresses: got rediss:// together with host:port, want one form`,
		},
		{
			"host and socket",
			Redis{Addresses: []string{"a:1", "/s"}},
			`addresses: got a unix socket together with host:port, want one form`,
		},
		{
			"two sockets",
			Redis{Addresses: []string{"/s", "unix:///t"}},
			`addresses: got 2 unix sockets, want one alone`,
		},
		{"socket of a cluster", Redis{Addresses: []string{"/s"}, Cluster: true}, `cluster: ` + onSocket},
		{
			"socket of a sentinel",
			Redis{Addresses: []string{"unix:///s"}, MasterName: "m"},
			`master_name: ` + onSocket,
		},
		{
			"socket and TLS",
			Redis{Addresses: []string{"/s"}, TLS: new(reverseproxy.TLSConfig)},
			`tls: ` + onSocket,
		},
		{
			"URL without TLS and TLS",
			Redis{Addresses: []string{"redis://a"}, TLS: new(reverseproxy.TLSConfig)},
			`tls: got it with a redis:// URL, want rediss:// or host:port`,
		},
		{
			"two users",
			Redis{Addresses: []string{"redis://canary@a", "redis://u@b"}},
			`username: got several in the addresses, want one`,
		},
		{
			"two passwords",
			Redis{Addresses: []string{"redis://:canary@a", "redis://:p@b"}},
			`password: got several in the addresses, want one`,
		},
		{
			"database of a cluster",
			Redis{Addresses: []string{"a:1"}, Cluster: true, DB: "2"},
			`db: got "2", want none with a cluster, which has only 0`,
		},
		{
			"database of several addresses",
			Redis{Addresses: []string{"redis://a", "redis://b/2"}},
			`db: got "2", want none with a cluster, which has only 0`,
		},
		{
			"cluster and sentinels",
			Redis{Addresses: []string{"a:1"}, Cluster: true, MasterName: "m"},
			`cluster: cannot be combined with master_name`,
		},
		{
			"sentinels' user alone",
			Redis{Addresses: []string{"a:1"}, SentinelUsername: canary},
			`sentinel_username: got it without master_name, want both or username`,
		},
		{
			"sentinels' password alone",
			Redis{Addresses: []string{"a:1", "b:1"}, SentinelPassword: canary},
			`sentinel_password: got it without master_name, want both or password`,
		},
		{
			"password in a sentinel's address",
			Redis{Addresses: []string{"redis://:canary@a"}, MasterName: "m"},
			`address: got "redis://…@a", ` + ofSentinel,
		},
		{
			"database in a sentinel's address",
			Redis{Addresses: []string{"redis://a/2"}, MasterName: "m"},
			`address: got "redis://a/2", ` + ofSentinel,
		},
		{
			"certificate without a key",
			Redis{Addresses: []string{"a:1"}, TLS: &reverseproxy.TLSConfig{ClientCertificateFile: "x"}},
			`tls: client_certificate_file specified without client_certificate_key_file`,
		},
		{
			"no such certificate",
			Redis{Addresses: []string{"a:1"}, TLS: &reverseproxy.TLSConfig{
				ClientCertificateFile: "/nonexistent/x", ClientCertificateKeyFile: "/nonexistent/y",
			}},
			`tls: loading client certificate key pair: open /nonexistent/x: no such file or directory`,
		},
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
			Redis{Addresses: []string{"redis://:canary@a:1/2"}, DB: "3"},
			`db: got "3", want none, or 2 as in the address`,
		},
		{
			"negative database",
			Redis{Addresses: []string{"a:1"}, DB: "-1"},
			`db: got "-1", want the number of a database, from 0 to 65535`,
		},
		{
			"braces in prefix",
			Redis{Addresses: []string{"a:1"}, KeyPrefix: "{a}"},
			`key_prefix: got "{a}", want text without braces of at most 128 bytes`,
		},
		{
			"short timeout",
			Redis{Addresses: []string{"a:1"}, Timeout: "999999ns"},
			`timeout: got "999999ns", want a duration from 1ms to 1m, such as 50ms`,
		},
		{
			"negative timeout",
			Redis{Addresses: []string{"a:1"}, Timeout: "-1s"},
			`timeout: got "-1s", want a duration from 1ms to 1m, such as 50ms`,
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
			"unset variable in the sentinels' password",
			Redis{Addresses: []string{"a:1"}, MasterName: "m", SentinelPassword: "{env.RATE_LIMIT_TEST_UNSET}"},
			`sentinel_password: evaluated placeholder {env.RATE_LIMIT_TEST_UNSET} is empty`,
		},
		{
			"unset variable in the master's name",
			Redis{Addresses: []string{"a:1"}, MasterName: "{env.RATE_LIMIT_TEST_UNSET}"},
			`master_name: evaluated placeholder {env.RATE_LIMIT_TEST_UNSET} is empty`,
		},
		{
			"unset variable in the secret",
			Redis{Addresses: []string{"a:1"}, KeySecret: "{env.RATE_LIMIT_TEST_UNSET}"},
			`key_secret: evaluated placeholder {env.RATE_LIMIT_TEST_UNSET} is empty`,
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
			"braces in a password",
			Redis{Addresses: []string{"a:1"}, Password: "a{canary}"},
			`password: ` + wantKnown,
		},
		{
			"braces in a URL's password",
			Redis{Addresses: []string{"redis://:{canary}@a:1"}},
			`address: got "redis://…@a:1", want an address whose placeholders are {env.*}, {file.*} or {system.*}`,
		},
		{
			"unset variable in a URL's host, without a port",
			Redis{Addresses: []string{"redis://:canary@"}},
			`address: got "redis://…@", ` + wantAddress,
		},
		{
			"unknown placeholder", Redis{Addresses: []string{"a:1"}, Password: "{http.request.host}"},
			`password: ` + wantKnown,
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
			got, _, err := tc.redis.options(caddy.Context{})
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

// Guards that what Caddy keeps of a configuration, shows at its admin endpoint
// and saves has the placeholders and not what they stand for.
func TestSecretsAreNotStored(t *testing.T) {
	t.Setenv("RATE_LIMIT_TEST_SECRET", "canary")
	for _, config := range []string{
		`{"redis":{"addresses":["a:1"],"username":"{env.RATE_LIMIT_TEST_SECRET}"}}`,
		`{"redis":{"addresses":["a:1"],"password":"{env.RATE_LIMIT_TEST_SECRET}"}}`,
		`{"redis":{"addresses":["redis://:{env.RATE_LIMIT_TEST_SECRET}@a:1"]}}`,
		`{"redis":{"addresses":["{env.RATE_LIMIT_TEST_SECRET}:1"]}}`,
		`{"redis":{"addresses":["a:1"],"master_name":"{env.RATE_LIMIT_TEST_SECRET}"}}`,
		`{"redis":{"addresses":["a:1"],"master_name":"m","sentinel_username":"{env.RATE_LIMIT_TEST_SECRET}"}}`,
		`{"redis":{"addresses":["a:1"],"master_name":"m","sentinel_password":"{env.RATE_LIMIT_TEST_SECRET}"}}`,
		`{"redis":{"addresses":["a:1"],"key_secret":"{env.RATE_LIMIT_TEST_SECRET}"}}`,
	} {
		app := new(App)
		if err := caddy.StrictUnmarshalJSON([]byte(config), app); err != nil {
			t.Fatal(err)
		}
		if err := app.Provision(newContext(t)); err != nil {
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
