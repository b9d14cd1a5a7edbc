package ratelimit

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2/caddyconfig"
	_ "github.com/caddyserver/caddy/v2/modules/standard"
)

// Guards what a Caddyfile means: each file in testdata holds a Caddyfile, a
// line of dashes and what `caddy adapt --pretty` prints for it. That is also
// checked to survive being loaded and stored again, and to be valid, without
// the Redis servers that it names.
func TestAdapt(t *testing.T) {
	const separator = "\n----------\n"
	files, err := filepath.Glob("testdata/*.caddyfiletest")
	if err != nil || len(files) == 0 {
		t.Fatalf("found no files: %v", err)
	}
	t.Setenv("REDIS_PASSWORD", "secret")
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".caddyfiletest"), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			src, want, found := strings.Cut(string(text), separator)
			if !found {
				t.Fatalf("%s has no line of dashes", file)
			}
			config, err := adaptCaddyfile(src + "\n")
			if err != nil {
				t.Fatal(err)
			}
			var got bytes.Buffer
			if err := json.Indent(&got, config, "", "\t"); err != nil {
				t.Fatal(err)
			}
			if got.WriteByte('\n'); got.String() != want {
				t.Errorf("got\n%s\nwant\n%s", got.String(), want)
			}
			if checkStoredAgain(t, config) == 0 {
				t.Error("the configuration has nothing of ours")
			}
			if err := validateConfig(config); err != nil {
				t.Error(err)
			}
		})
	}
}

// Guards that Caddy can be validated, and so deployed, while there is no Redis:
// not even a connection is tried.
func TestValidateNeedsNoRedis(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	if err := validateCaddyfile(inApp("redis " + listener.Addr().String())); err != nil {
		t.Fatal(err)
	}
	_ = listener.(*net.TCPListener).SetDeadline(time.Now())
	if conn, err := listener.Accept(); err == nil {
		conn.Close()
		t.Error("validating connected to Redis")
	}
}

// twoLimits is the error for a path that stands twice in one handler.
func twoLimits(path string) string {
	return fmt.Sprintf("path %q: two limits of one handler have it, give each a name", path)
}

// Guards that an error in a limit is reported in one line that names the
// option, what it got and what would be right.
func TestLimitErrors(t *testing.T) {
	long := strings.Repeat("x", 65)
	tests := []struct{ block, want string }{
		// Single options.
		{`speed 5`, `speed: got an unknown option, ` + wantOption + `, at Caddyfile:3`},
		{`distributed`, `distributed: only valid with zones, as it is an option of mholt/caddy-ratelimit, at Caddyfile:3`},
		{`size 5 6`, `size: got "5 6", want one value, at Caddyfile:3`},
		{`key a b`, `key: got "a b", want one value, at Caddyfile:3`},
		{`key a {; b; }`, `key: got a block, want it in one line, at Caddyfile:4`},
		{`ipv4_prefix 33`, `limit "api": ipv4_prefix: got "33", ` + wantBits4},
		{`ipv4_prefix -8`, `limit "api": ipv4_prefix: got "-8", ` + wantBits4},
		{`size 1; ipv4_prefix 2e1`, `limit "api": ipv4_prefix: got "2e1", ` + wantBits4},
		{
			`ipv4_prefix {query.bits}`,
			`limit "api": ipv4_prefix: got "{http.request.uri.query.bits}", ` + wantBits4,
		},
		{`ipv6_prefix 129`, `limit "api": ipv6_prefix: got "129", ` + wantBits6},
		{`ipv6_prefix 64.5`, `limit "api": ipv6_prefix: got "64.5", ` + wantBits6},
		{
			`key ` + strings.Repeat("{", 102),
			`limit "api": key: got "` + strings.Repeat("{", 64) + `…", want text or placeholders, ` +
				`such as {client_ip}, or a word for one bucket for all: too many unclosed placeholders`,
		},

		// Options that do not go together.
		{``, `limit "api": ` + limitsNothing},
		{`key {client_ip}`, `limit "api": ` + limitsNothing},
		{`limit a {; }`, `limit "api/a": ` + limitsNothing},
		{`size 1; limit a`, `limit "api/a": ` + limitsNothing},
		{`limit a {; limit b {; key x; }; }`, `limit "api/a/b": ` + limitsNothing},
		{`drip_rate 2s; limit a {; size 1; }`, `limit "api": drip_rate: got "2s", want a size with it`},
		{`drip_size 2; limit a {; size 1; }`, `limit "api": drip_size: got "2", want a size with it`},
		{`cost 2; limit a {; size 1; }`, `limit "api": cost: got "2", want a size with it`},
		{`factor 0; limit a {; size 1; }`, `limit "api": factor: got "0", want a size with it`},
		{`size 10; max 5; duration 1s`, `limit "api": size: got "10" together with max, ` + wantEither},
		{`max 5; duration 1s; drip_rate 2s`, `limit "api": drip_rate: got "2s" together with max, ` + wantEither},
		{`duration 1s; drip_size 2`, `limit "api": drip_size: got "2" together with duration, ` + wantEither},
		{`size 10; min_interval 1s`, `limit "api": size: got "10" together with min_interval, ` + wantEither},
		{`max 5`, `limit "api": max: got "5" without duration, ` + wantBoth},
		{`duration 1s`, `limit "api": duration: got "1s" without max, ` + wantBoth},
		{`min_interval 1s`, `limit "api": min_interval: got "1s" without max, ` + wantBoth},
		{`max 5; min_interval 1s`, `limit "api": max: got "5" without duration, ` + wantBoth},

		// Numbers that do not go together.
		{`size 10; cost 11`, `limit "api": cost: got "11", want at most the size, 10`},
		{`size 10; cost 6; factor 2`, `limit "api": cost: got "6", want at most the size, 5`},
		{`size 10; cost 2; factor 11`, `limit "api": cost: got "2", want at most the size, 1`},
		{`max 10; duration 1s; cost 11`, `limit "api": cost: got "11", want at most the size, 10`},
		{`max 10; duration 1s; cost 4; factor 3.5`, `limit "api": cost: got "4", want at most the size, 3`},
		{
			`max 1001; duration 1ms`,
			`limit "api": max: got "1001", want at most one for each microsecond of the duration, 1000`,
		},
		{`size 562949953421312; factor 0.999999`, `limit "api": factor: got "0.999999", ` + wantSize},
		{`size 562949954; factor 0.000001`, `limit "api": factor: got "0.000001", ` + wantSize},
		{
			`max 1; duration 18000d`,
			`limit "api": duration: got "18000d", want less: ` + wantDrain,
		},
		{`size 5; drip_rate 106751d`, `limit "api": size 5, drip rate 2562024h0m0s, drip size 1: ` + wantDrain},
		{`max 5; duration 106751d`, `limit "api": duration: got "106751d", want less: ` + wantDrain},
		{`max 5; duration 1s; min_interval 106751d`, `limit "api": min_interval: got "106751d", want less: ` + wantDrain},
		{
			`max 1; duration 6000d; factor 0.1`,
			`limit "api": duration: got "6000d", want less: ` + wantDrain,
		},
		{
			`max 5; duration 1s; min_interval 18000d`,
			`limit "api": min_interval: got "18000d", want less: ` + wantDrain,
		},
		{
			`key {query.a; size 1`,
			`limit "api": key: got "{query.a", want each placeholder with both of its braces, and others as \{ and \}`,
		},
		{`size {query.a}{; drip_rate 1s`, `limit "api": size: got "{http.request.uri.query.a}{", want each placeholder with both of its braces`},
		{
			`size {env.RATE_LIMIT_TEST_UNSET}`,
			`limit "api": size: got {env.RATE_LIMIT_TEST_UNSET}, which is empty, want a value`,
		},
		{`size 1; drip_rate 18000d`, `limit "api": size 1, drip rate 432000h0m0s, drip size 1: ` + wantDrain},
		{
			`size {query.n}; drip_rate 400000h`,
			`limit "api": size 1, drip rate 400000h0m0s, drip size 1: ` + wantDrain,
		},
		{
			`size 5; drip_rate 400000h; drip_size {query.n}`,
			`limit "api": size 5, drip rate 400000h0m0s, drip size 562949953421312: ` + wantDrain,
		},
		{`headers`, `headers: got nothing, want x-ratelimit, ratelimit-11 or both, or off, at Caddyfile:3`},
		{`size 1; headers x-ratelimit x-ratelimit`, `headers: duplicate "x-ratelimit"`},
		{
			`size 562949953421312; cost {query.n}`,
			`limit "api": size 562949953421312, drip rate 1s, drip size 1: ` + wantDrain,
		},
		{
			`size 400000; drip_rate 1h; factor 0.5`,
			`limit "api": size 800000, drip rate 1h0m0s, drip size 1: ` + wantDrain,
		},

		// Names.
		{
			`limit {; size 1; }`,
			`limit: got "", want one name and a block: limit <name> { ... }, at Caddyfile:3`,
		},
		{
			`limit a b {; size 1; }`,
			`limit: got "a b", want one name and a block: limit <name> { ... }, at Caddyfile:3`,
		},
		{
			`limit @a b {; size 1; }`,
			`limit: got "@a b", want one name and a block: limit <name> { ... }, at Caddyfile:3`,
		},
		{`limit "a b" {; size 1; }`, `limit "a b": name: got "a b", ` + wantName},
		{`limit /a {; size 1; }`, `limit "/a": name: got "/a", ` + wantName},
		{`limit ü {; size 1; }`, `limit "ü": name: got "ü", ` + wantName},
		{
			`limit ` + long + ` {; size 1; }`,
			`limit "` + long + `": name: got "` + long[:64] + `…", ` + wantName,
		},
		{
			`limit {query.a} {; size 1; }`,
			`limit "{http.request.uri.query.a}": name: got "{http.request.uri.query.a}", ` + wantName,
		},

		// Two limits of one path.
		{`limit a {; size 1; }; limit a {; size 1; }`, `limit "api/a": ` + twoLimits("api/a")},
		{
			`max 5; duration 1s; min_interval 1s; limit min_interval {; size 1; }`,
			`limit "api/min_interval": ` + twoLimits("api/min_interval"),
		},
		{
			`limit a {; limit min_interval {; size 1; }; }; ` +
				`limit a {; max 5; duration 1s; min_interval 1s; }`,
			`limit "api/a": ` + twoLimits("api/a/min_interval"),
		},

		// What is of the whole handler.
		{
			`size 1; limit a {; size 1; accounting each; }`,
			`accounting: not allowed in limit "a"` + wantOutside + `, at Caddyfile:6`,
		},
		{
			`size 1; limit a {; size 1; headers off; }`,
			`headers: not allowed in limit "a"` + wantOutside + `, at Caddyfile:6`,
		},
		{`size 1; accounting both`, `accounting: got "both", want atomic, each or in_order`},
		{`size 1; accounting atomic each`, `accounting: got "atomic each", want one value, at Caddyfile:4`},
		{
			`size 1; headers off x-ratelimit`,
			`headers: got "off x-ratelimit", want off alone, or x-ratelimit, ratelimit-11 or both`,
		},
		{
			`size 1; headers ratelimit off`,
			`headers: got "ratelimit off", want off alone, or x-ratelimit, ratelimit-11 or both`,
		},
		{`size 1; headers on`, `headers: got "on", want x-ratelimit, ratelimit-11 or both, or off`},
		{
			`size 1; headers ratelimit draft`,
			`headers: got "draft", want x-ratelimit, ratelimit-11 or both, or off`,
		},
		{
			`size 1; headers X-RateLimit`,
			`headers: got "X-RateLimit", want x-ratelimit, ratelimit-11 or both, or off`,
		},
		{
			`size 1; limit a {; size 1; on_error deny; }`,
			`on_error: not allowed in limit "a"` + wantOutside + `, at Caddyfile:6`,
		},
		{`size 1; limit a {; size 1; log; }`, `log: not allowed in limit "a"` + wantOutside + `, at Caddyfile:6`},
		{`size 1; log`, ``},
		{`size 1; log on`, `log: got "on", want no argument, at Caddyfile:4`},
		{`size 1; log {; x; }`, `log: got a block, want it in one line, at Caddyfile:5`},

		{`size 1; on_error refuse`, `on_error: got "refuse", ` + wantPolicy},
		{`size 1; on_error {query.a}`, `on_error: got "{http.request.uri.query.a}", ` + wantPolicy},
		{`size 1; on_error allow deny`, `on_error: got "allow deny", want one value, at Caddyfile:4`},
		{`size 1; on_error allow {; x; }`, `on_error: got a block, want it in one line, at Caddyfile:5`},
		{`size 1; headers off {; on; }`, `headers: got a block, want it in one line, at Caddyfile:5`},

		// Matchers.
		{`size 1; match`, `match: got nothing, want @name, /path or matchers, at Caddyfile:4`},
		{`size 1; match {; }`, `match: got nothing, want @name, /path or matchers, at Caddyfile:5`},
		{`size 1; match @nope`, `unrecognized matcher name: @nope, at Caddyfile:4`},
		{
			`size 1; match nope a`,
			`getting matcher module 'nope': module not registered: http.matchers.nope, at Caddyfile:4`,
		},
		{
			`size 1; match /a /b`,
			`match: got "/b" after a matcher, want one matcher, or several in a block, at Caddyfile:4`,
		},
		{
			`size 1; match * /b`,
			`match: got "/b" after a matcher, want one matcher, or several in a block, at Caddyfile:4`,
		},
	}
	for _, tc := range tests {
		t.Run(tc.block, func(t *testing.T) {
			wantCaddyfileError(t, inLimit(tc.block), tc.want)
		})
	}
}

// Guards the edges of what is accepted.
func TestLimitsAccepted(t *testing.T) {
	tests := []string{
		`size 1`,
		`size 562949953421312; drip_rate 1us`,
		`size 562949953421312; drip_size 562949953421312; drip_rate 6515d`,
		`size 562949953; factor 0.000001; drip_rate 1us`,
		`size 10; factor 18446744073709.551615`,
		`size 10; factor 0`,
		`size 10; factor 0.000000; cost 11`,
		`size 10; factor 2; cost 5`,
		`size 10; factor 11; cost 1`,
		`size 10; factor 00.50`,
		`size 007; cost 7`,
		`size {query.n}; cost 1000`,
		`size 10; cost {query.n}`,
		`size 1{query.n}{query.m}`,
		`size 1; drip_rate 1us`,
		`size 1; drip_rate 1.5ms`,
		`size 1; drip_rate 1d12h`,
		`size 1; drip_rate {query.rate}`,
		`max 1000; duration 1ms`,
		`max 7; duration 1s; min_interval 1h; cost 7`,
		`size 1; ipv4_prefix 1; ipv6_prefix 1`,
		`size 1; ipv4_prefix 32; ipv6_prefix 128`,
		`size 1; match *`,
		`size 1; headers ratelimit x-ratelimit`,
		`limit a {; size 1; }; limit b {; limit a {; size 1; }; }`,
		`limit ` + strings.Repeat("x", 64) + ` {; size 1; }`,
		`limit AZaz09_.- {; size 1; }`,
	}
	for _, block := range tests {
		t.Run(block, func(t *testing.T) { wantCaddyfileError(t, inLimit(block), "") })
	}
}

// Guards that no option is given twice: which one counts would be a guess.
func TestDuplicateOptions(t *testing.T) {
	limit := []string{
		`key a`, `size 1`, `drip_rate 1s`, `drip_size 1`, `cost 1`, `factor 1`, `max 1`, `duration 1s`,
		`min_interval 1s`, `ipv4_prefix 24`, `ipv6_prefix 48`, `max_keys 1`, `when_full share`, `match /a`, `match *`,
		`accounting each`, `headers off`, `on_error deny`, `log`, `jitter 0.5`,
	}
	for _, option := range limit {
		name, _, _ := strings.Cut(option, " ")
		t.Run(option, func(t *testing.T) {
			err := validateCaddyfile(inLimit(option + "; " + option))
			wantError(t, err, "duplicate option: "+name+", at Caddyfile:4")
		})
	}
	redis := []string{
		`username u`, `password p`, `db 1`, `cluster`, `master_name m`, `sentinel_username u`,
		`sentinel_password p`, `tls`, `tls_client_auth a b`, `tls_server_name n`, `tls_trust_pool system`,
		`tls_insecure_skip_verify`, `key_prefix p`, `key_secret s`, `timeout 1s`,
	}
	for _, option := range redis {
		name, _, _ := strings.Cut(option, " ")
		t.Run("redis "+option, func(t *testing.T) {
			err := validateCaddyfile(inApp("redis localhost:6379 {; " + option + "; " + option + "; }"))
			wantError(t, err, "duplicate option: "+name+", at Caddyfile:5")
		})
	}
}

// Guards the options of the app in the same way.
func TestDuplicateGlobalOptions(t *testing.T) {
	for block, want := range map[string]string{
		`redis a:1; redis b:2`:                `duplicate option: redis, at Caddyfile:4`,
		`on_error deny; on_error deny`:        `duplicate option: on_error, at Caddyfile:4`,
		`memory; memory`:                      `duplicate option: memory, at Caddyfile:4`,
		`memory {; max_keys 1; max_keys 1; }`: `duplicate option: max_keys, at Caddyfile:5`,
	} {
		t.Run(block, func(t *testing.T) { wantCaddyfileError(t, inApp(block), want) })
	}
}

// Guards that no option is given without a value, or with an empty one, which
// an unset {$VARIABLE} leaves behind.
func TestOptionsNeedValues(t *testing.T) {
	limit := []string{
		"key", "algorithm", "size", "drip_rate", "drip_size", "window", "window_start", "warm_up", "cold_factor", "cost", "factor", "max", "duration", "min_interval",
		"ipv4_prefix", "ipv6_prefix", "max_keys", "when_full", "accounting", "on_error",
	}
	for _, option := range limit {
		for _, empty := range []string{``, ` ""`, ` {$RATE_LIMIT_TEST_UNSET}`} {
			t.Run(option+empty, func(t *testing.T) {
				err := validateCaddyfile(inLimit(option + empty))
				wantError(t, err, option+`: got "", want one value, at Caddyfile:3`)
			})
		}
	}
	redis := []string{
		"username", "password", "db", "master_name", "sentinel_username", "sentinel_password",
		"tls_server_name", "key_prefix", "key_secret", "timeout",
	}
	for _, option := range redis {
		for _, empty := range []string{``, ` ""`, ` {$RATE_LIMIT_TEST_UNSET}`} {
			t.Run("redis "+option+empty, func(t *testing.T) {
				err := validateCaddyfile(inApp("redis localhost:6379 {; " + option + empty + "; }"))
				wantError(t, err, option+`: got "", want one value, at Caddyfile:4`)
			})
		}
	}
}

// Guards what stands beside a directive: its matcher, its name, and the
// one-line syntax of another plugin, for which the error shows the syntax of this one.
func TestDirectiveErrors(t *testing.T) {
	const inBlock = `want at most a name, and options in a block with a line for each: `
	tests := []struct{ directives, want string }{
		{`rate_limit`, `limit "default": ` + limitsNothing},
		{`rate_limit {; }`, `limit "default": ` + limitsNothing},
		{`rate_limit api`, `limit "api": ` + limitsNothing},
		{`rate_limit /api/* api`, `limit "api": ` + limitsNothing},
		{`rate_limit a.b_c-D9 {; size 1; }`, ``},
		{`rate_limit a/b {; size 1; }`, `limit "a/b": name: got "a/b", ` + wantName},
		{`rate_limit /a /b {; size 1; }`, `limit "/b": name: got "/b", ` + wantName},
		{`rate_limit "a b" {; size 1; }`, `limit "a b": name: got "a b", ` + wantName},
		{"rate_limit \"a\nb\" {; size 1; }", `limit "a\nb": name: got "a\nb", ` + wantName},
		{
			`rate_limit {query.id} {; size 1; }`,
			`limit "{http.request.uri.query.id}": name: got "{http.request.uri.query.id}", ` + wantName,
		},
		{
			`@a path /a; rate_limit {; size 1; match @a /b; }`,
			`match: got "/b" after a matcher, want one matcher, or several in a block, at Caddyfile:5`,
		},
		{`rate_limit a b {; size 1; }`, `rate_limit: got "a b", ` + inBlock + `"rate 10/s", at Caddyfile:2`},
		{`rate_limit {client_ip} b`, `rate_limit: got "{http.vars.client_ip} b", ` + inBlock + `"key {http.vars.client_ip}" and "rate 10/s", at Caddyfile:2`},
		{
			`rate_limit api /api/*`,
			`rate_limit: got "api /api/*", want the matcher before the name, at Caddyfile:2`,
		},
		{
			`rate_limit {query.id} 2r/m`,
			`rate_limit: got "{http.request.uri.query.id} 2r/m", ` +
				inBlock + `"key {http.request.uri.query.id}", "algorithm sliding_window", "size 2" and "window 1m", at Caddyfile:2`,
		},
		{
			`@x path /x; rate_limit @x {remote_host} 2r/s 100000 503`,
			`rate_limit: got "{http.request.remote.host} 2r/s 100000 503", ` +
				inBlock + `"key {http.request.remote.host}", "algorithm sliding_window", "size 2" and "window 1s", at Caddyfile:3`,
		},
		{
			`rate_limit {remote.ip} 100r/m`,
			`rate_limit: got "{remote.ip} 100r/m", ` +
				inBlock + `"key {client_ip}", "algorithm sliding_window", "size 100" and "window 1m", at Caddyfile:2`,
		},
		{`rate_limit 10/s`, `rate_limit: got "10/s", ` + inBlock + `"rate 10/s", at Caddyfile:2`},
		{`rate_limit a 10/s {; }`, `rate_limit: got "a 10/s", ` + inBlock + `"rate 10/s", at Caddyfile:2`},
		{`rate_limit {query.id} 10/s`, `rate_limit: got "{http.request.uri.query.id} 10/s", ` + inBlock + `"key {http.request.uri.query.id}" and "rate 10/s", at Caddyfile:2`},
		{`rate_limit size 10`, `rate_limit: got "size 10", ` + inBlock + `"size 10", at Caddyfile:2`},
		{`rate_limit size=10`, `rate_limit: got "size=10", ` + inBlock + `"size 10", at Caddyfile:2`},
		{`rate_limit rate 5/m size 2`, `rate_limit: got "rate 5/m size 2", ` + inBlock + `"rate 5/m" and "size 2", at Caddyfile:2`},
		{`rate_limit path=/x {; size 1; }`, `rate_limit: got "path=/x", ` + inBlock + `"match path /x", at Caddyfile:2`},
		{`rate_limit path /x {; size 1; }`, `rate_limit: got "path /x", ` + inBlock + `"match path /x", at Caddyfile:2`},
		{`rate_limit not /x {; size 1; }`, `rate_limit: got "not /x", ` + inBlock + `"match not path /x", at Caddyfile:2`},
		{`rate_limit {size 10}`, `rate_limit: got "{size 10}", want a block, with ` + ownLine + `, at Caddyfile:2`},
		{`rate_limit {; size 10 }; respond ok`, `size: got "10 }", want one value, and ` + ownLine + `, at Caddyfile:3`},
		{"rate_limit {\nsize 10;\tdrip_rate 1s\n}", `size: got "10; drip_rate 1s", want one value, and ` + ownLine + `, at Caddyfile:3`},
		{
			`rate_limit {; zone a {; key {remote_host}; events 5; window 1m; }; }`,
			"",
		},
	}
	for _, tc := range tests {
		t.Run(tc.directives, func(t *testing.T) {
			wantCaddyfileError(t, inSite(tc.directives), tc.want)
		})
	}
}

// Guards that each error in a limit has the line of the option that it is about or, if
// it is about none, of the limit, wherever that is nested.
func TestLinesOfErrors(t *testing.T) {
	t.Parallel()
	for block, line := range map[string]int{
		`size 5; cost 6`:                                    4,
		`cost 6; size 5`:                                    3,
		`size 5; limit a {; cost 2; size 1; }`:              5,
		`limit a {; size 1; }; limit b {; size x; }; key c`: 7,
		`limit a {; limit b {; size 1; factor x; }; }`:      6,
		`max 5; min_interval 1s`:                            3,
		`min_interval 1s; max 5; duration 1s; size 4`:       6,
		`rate 5/1s; match /a; drip_rate 1s`:                 5,
		`rate 5/1s; key {a`:                                 4,
		`key {env.A}; ipv4_prefix 33; size 1`:               4,
		`ipv4_prefix {env.A}; ipv6_prefix 64; size x`:       2, // only when it is loaded
		`size {env.A}; cost x`:                              4,
		`rate {env.A}; limit a {; size x; }`:                5,
		`size 1; accounting some`:                           4,
		`on_error never; size 1`:                            3,
		`size 1; headers off ratelimit`:                     4,
		`size 1; jitter x`:                                  4,
		`size 1; zone a {; key x; events 5; window 1m; }`:   4,
		`zone a {; key x; events 5; window 1m; }; size 1`:   3,
		`size 1; log_key; on_error deny`:                    4,
		`size 1; limit a/b {; size 1; }`:                    4,
		`size 1; limit a {; }`:                              4,
		`limit a {; size 1; }; limit a {; size 1; }`:        6,
		`key a`:                    2,
		`size 1; drip_rate 18000d`: 2,
	} {
		t.Run(block, func(t *testing.T) {
			_, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(inLimit(block)), map[string]any{"filename": "Caddyfile"})
			if want := fmt.Sprintf(", at Caddyfile:%d", line); line > 2 && (err == nil || !strings.HasSuffix(err.Error(), want)) {
				t.Errorf("got error %v, want one%s", err, want)
			}
		})
	}
	_, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte("(few) {\n\trate_limit {\n\t\tsize {args[0]}\n\t}\n}\n:8080 {\n\timport few 0\n}\n"),
		map[string]any{"filename": "Caddyfile"})
	if err == nil || !strings.HasSuffix(err.Error(), ", at Caddyfile:3 import chain ['Caddyfile:7 (import few)']") {
		t.Errorf("in a snippet: got error %v", err)
	}
}

// Guards that what has no value until a configuration is loaded does not keep a
// Caddyfile from being adapted elsewhere.
func TestPlaceholdersAreAdapted(t *testing.T) {
	t.Parallel()
	for _, block := range []string{
		`size {env.A}`, `size 5; cost {env.A}`, `rate {env.A}`, `rate {env.A}/1s; size 3; cost 2`, `rate 999/1s; size {env.A}`,
		`max {env.A}; duration {env.B}; min_interval {file.c}`, `size 5; ipv4_prefix {env.A}; limit a {; size 1; }`,
		`size 5; max_keys {system.a}`, `size 5; track_top {env.A}`, `size 5; jitter {env.A}`, `size 5; factor {env.A}`,
		`algorithm fixed_window; size 5; window {env.A}`, `algorithm fixed_window; size 5; period {env.A}`,
		`algorithm warm_up; rate 10/s; warm_up {env.A}; cold_factor {env.B}`, `algorithm sliding_log; size {env.A}; window {env.B}`,
	} {
		if _, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(inLimit(block)), nil); err != nil {
			t.Errorf("%s: %v", block, err)
		}
	}
}

// Guards that near misses, and what other limiters call an option, are told the one
// that is meant, in each block.
func TestMeantOptions(t *testing.T) {
	t.Parallel()
	for src, want := range map[string]string{
		inLimit(`burst 5`):                              `burst: got an unknown option (did you mean size?), want one of key, `,
		inLimit(`sise 5`):                               `sise: got an unknown option (did you mean size?), want one of key, `,
		inLimit(`size: 5`):                              `size:: got an unknown option (did you mean size?), `,
		inLimit(`Size=5`):                               `Size=5: got an unknown option (did you mean size?), `,
		inLimit(`events 5`):                             `events: got an unknown option (did you mean max?), `,
		inLimit(`requests 5`):                           `requests: got an unknown option (did you mean max?), `,
		inLimit(`interval 1s`):                          `interval: got an unknown option (did you mean duration?), `,
		inLimit(`drip-rate 1s`):                         `drip-rate: got an unknown option (did you mean drip_rate?), `,
		inLimit(`driprate 1s`):                          `driprate: got an unknown option (did you mean drip_rate?), `,
		inLimit(`header off`):                           `header: got an unknown option (did you mean headers?), `,
		inLimit(`mathc /a`):                             `mathc: got an unknown option (did you mean match?), `,
		inLimit(`not /x`):                               `not: got an unknown option (did you mean match not path /x?), `,
		inLimit(`not method GET`):                       `not: got an unknown option (did you mean match not method GET?), `,
		inLimit(`path /x /y`):                           `path: got an unknown option (did you mean match path /x /y?), `,
		inLimit(`@api path /x`):                         `@api: got an unknown option (did you mean match path /x?), `,
		inLimit(`@api`):                                 `@api: got an unknown option (did you mean match @api?), `,
		inLimit(`size 5; match not /x /y`):              `match: got "not /x /y", want match not path /x /y, at Caddyfile:4`,
		inLimit(`size 5; match path=/x`):                `match: got "path=/x", want match path /x, at Caddyfile:4`,
		inLimit(`size 5; limit a {; sizes 1; }`):        `sizes: got an unknown option (did you mean size?), `,
		inLimit(`size 5; limit a {; accountin each; }`): `accountin: got an unknown option, want one of key, `,
		inLimit(`speed 5`):                              `speed: got an unknown option, want one of key, `,
		inLimit(`zone a {; requests 5; window 1m; }`):   `requests: got an unknown option (did you mean events?), `,
		inLimit(`zone a {; events 5; duration 1m; }`):   `duration: got an unknown option (did you mean window?), `,
		inApp(`reddis a:1`):                             `reddis: got an unknown option (did you mean redis?), want one of redis, `,
		inApp(`redis a:1 {; keyprefix 5; }`):            `keyprefix: got an unknown option (did you mean key_prefix?), `,
		inApp(`memory {; max_key 5; }`):                 `max_key: got an unknown option (did you mean max_keys?), want max_keys, `,
	} {
		t.Run(src, func(t *testing.T) {
			_, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(src), nil)
			if err == nil {
				t.Fatal("got no error")
			}
			got := wrapping.ReplaceAllLiteralString(err.Error(), "")
			if want, _ = strings.CutSuffix(want, ", at Caddyfile:4"); !strings.HasPrefix(got, want) {
				t.Errorf("\n got error %q\nwant error %q", got, want)
			}
		})
	}
}

// Guards the lists of options in errors: each is known where it is listed.
func TestListedOptions(t *testing.T) {
	t.Parallel()
	for _, option := range slices.Concat(limitOptions, handlerOptions) {
		_, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(inLimit(option+" a b c")), nil)
		if err == nil || strings.Contains(err.Error(), "unknown option") {
			t.Errorf("%s: %v", option, err)
		}
	}
}

// Guards that limits of one name, which share their buckets, do not differ in
// what makes a bucket: on one site or on several, and however they are
// nested. Those without a name may.
func TestLimitsOfOnePath(t *testing.T) {
	tests := []struct{ name, a, b, want string }{
		{
			"key",
			`x {; size 1; }`,
			`x {; size 1; key {query.a}; }`,
			disagree("x", "key", "{http.request.uri.query.a}", "{http.vars.client_ip}"),
		},
		{
			"ipv4_prefix",
			`x {; size 1; }`,
			`x {; size 1; ipv4_prefix 24; }`,
			disagree("x", "ipv4_prefix", "24", "32"),
		},
		{
			"ipv6_prefix",
			`x {; size 1; }`,
			`x {; size 1; ipv6_prefix 48; }`,
			disagree("x", "ipv6_prefix", "48", "64"),
		},
		{"size", `x {; size 1; }`, `x {; size 2; }`, disagree("x", "size", "2", "1")},
		{
			"drip_rate",
			`x {; size 1; }`,
			`x {; size 1; drip_rate 2s; }`,
			disagree("x", "drip_rate", "2s", "1s"),
		},
		{"drip_size", `x {; size 1; }`, `x {; size 1; drip_size 2; }`, disagree("x", "drip_size", "2", "1")},
		{"factor", `x {; size 4; }`, `x {; size 4; factor 0.5; }`, disagree("x", "factor", "0.5", "1")},
		{
			"factor that comes to the same size",
			`x {; size 4; }`, `x {; size 8; factor 2; }`, disagree("x", "size", "8", "4"),
		},
		{"off", `x {; size 1; }`, `x {; size 1; factor 0; }`, disagree("x", "factor", "0", "1")},
		{
			"placeholder and number",
			`x {; size {query.a}; }`, `x {; size 5; }`,
			disagree("x", "size", "5", "{http.request.uri.query.a}"),
		},
		{
			"two placeholders",
			`x {; size 5; drip_rate {query.a}; }`, `x {; size 5; drip_rate {query.b}; }`,
			disagree("x", "drip_rate", "{http.request.uri.query.b}", "{http.request.uri.query.a}"),
		},
		{
			"of the default name",
			`default {; size 1; }`, `default {; size 2; }`, disagree("default", "size", "2", "1"),
		},
		{
			"in a group",
			`g {; limit x {; size 1; }; }`, `g {; limit x {; size 2; }; }`, disagree("g/x", "size", "2", "1"),
		},
		{
			"in groups without names",
			`{; limit x {; size 1; }; }`, `{; limit x {; size 2; }; }`, disagree("x", "size", "2", "1"),
		},
		{
			"in limits without names, which may differ themselves",
			`{; size 1; limit x {; size 1; }; }`, `{; size 2; limit x {; size 2; }; }`,
			disagree("default/x", "size", "2", "1"),
		},
		{
			"by the key of the group",
			`g {; limit x {; size 1; }; }`, `g {; key {query.a}; limit x {; size 1; }; }`,
			disagree("g/x", "key", "{http.request.uri.query.a}", "{http.vars.client_ip}"),
		},
		{"equal", `x {; size 1; }`, `x {; size 1; }`, ""},
		{
			"equal but for defaults written out",
			`x {; size 1; }`,
			`x {; size 1; key {client_ip}; drip_rate 1s; drip_size 1; factor 1; ` +
				`ipv4_prefix 32; ipv6_prefix 64; }`,
			"",
		},
		{
			"equal but for how numbers are written",
			`x {; size 10; factor 2; }`,
			`x {; size 010; drip_rate 1000ms; factor 2.00; }`,
			"",
		},
		{"legacy and equal", `x {; max 5; duration 5s; }`, `x {; size 5; }`, ""},
		{"cost", `x {; size 5; }`, `x {; size 5; cost 2; }`, ""},
		{"match", `x {; size 5; }`, `x {; size 5; match method POST; }`, ""},
		{"accounting and headers", `x {; size 5; }`, `x {; size 5; accounting each; headers off; }`, ""},
		{
			"without names",
			`{; size 1; }`,
			`{; size 2; drip_rate 3s; drip_size 4; key a; factor 2; ipv4_prefix 8; }`,
			"",
		},
		{"without and with the default name", `{; size 1; }`, `default {; size 2; }`, ""},
		{"groups", `g {; key a; limit x {; size 1; }; }`, `g {; key b; limit y {; size 2; }; }`, ""},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			oneSite := inSite("rate_limit /a " + tc.a + "; rate_limit /b " + tc.b)
			wantError(t, validateCaddyfile(oneSite), tc.want)
			another := strings.Replace(inSite("rate_limit "+tc.b), "8080", "8081", 1)
			err := validateCaddyfile(inSite("rate_limit "+tc.a) + another)
			if (err != nil) != (tc.want != "") {
				t.Errorf("on two servers got error %v, want %q", err, tc.want)
			}
		})
	}
}

// Guards that an error in the global option is reported in one line that names
// the option, what it got and what would be right.
func TestGlobalOptionErrors(t *testing.T) {
	const wantRedis = `want one of username, password, db, cluster, master_name, sentinel_username, ` +
		`sentinel_password, tls, tls_client_auth, tls_server_name, tls_trust_pool, tls_insecure_skip_verify, ` +
		`key_prefix, key_secret, timeout`
	const wantCertificate = `want the files of a certificate and its key, or the name of one to automate`
	tests := []struct{ block, want string }{
		{`storage x`, `storage: got an unknown option, want one of redis, memory, on_error, consistency, metrics, at Caddyfile:3`},
		{`size 10`, `size: got an unknown option, want one of redis, memory, on_error, consistency, metrics, at Caddyfile:3`},
		{`redis`, `redis: got no address, want redis <address>..., such as localhost:6379, at Caddyfile:3`},
		{
			`redis {; db 1; }`,
			`redis: got no address, want redis <address>..., such as localhost:6379, at Caddyfile:3`,
		},
		{
			`redis {$RATE_LIMIT_TEST_UNSET}`,
			`redis: got no address, want redis <address>..., such as localhost:6379, at Caddyfile:3`,
		},
		{`redis a`, `redis: address: got "a", ` + wantAddress},
		{`redis ""`, `redis: address: got "", ` + wantAddress},
		{`redis {query.a}`, `redis: address: got "{query.a}", ` +
			`want an address whose placeholders are {env.*}, {file.*} or {system.*}`},
		{`redis a:1 {; address b:2; }`, `address: got an unknown option, ` + wantRedis + `, at Caddyfile:4`},
		{`redis a:1 {; sentinel; }`, `sentinel: got an unknown option, ` + wantRedis + `, at Caddyfile:4`},
		{`redis a:1 {; tls_curves x; }`, `tls_curves: got an unknown option, ` + wantRedis + `, at Caddyfile:4`},
		{`redis a:1 {; cluster yes; }`, `cluster: got "yes", want no argument, at Caddyfile:4`},
		{`redis a:1 {; cluster {; x; }; }`, `cluster: got a block, want it in one line, at Caddyfile:5`},
		{`redis a:1 {; db 1 {; x; }; }`, `db: got a block, want it in one line, at Caddyfile:5`},
		{`redis a:1 {; tls internal; }`, `tls: got "internal", want no argument, at Caddyfile:4`},
		{
			`redis a:1 {; tls_insecure_skip_verify off; }`,
			`tls_insecure_skip_verify: got "off", want no argument, at Caddyfile:4`,
		},
		{`redis a:1 {; tls_server_name a b; }`, `tls_server_name: got "a b", want one value, at Caddyfile:4`},
		{`redis a:1 {; tls_client_auth; }`, `tls_client_auth: got "", ` + wantCertificate + `, at Caddyfile:4`},
		{
			`redis a:1 {; tls_client_auth a ""; }`,
			`tls_client_auth: got "a ", ` + wantCertificate + `, at Caddyfile:4`,
		},
		{
			`redis a:1 {; tls_client_auth a b c; }`,
			`tls_client_auth: got "a b c", ` + wantCertificate + `, at Caddyfile:4`,
		},
		{
			`redis a:1 {; tls_client_auth /nonexistent/c /nonexistent/k; }`,
			`redis: tls: loading client certificate key pair: open /nonexistent/c: no such file or directory`,
		},
		{
			`redis a:1 {; tls_trust_pool; }`,
			`tls_trust_pool: got nothing, want a module, such as file <path>, at Caddyfile:4`,
		},
		{
			`redis a:1 {; tls_trust_pool nope; }`,
			`getting module named 'tls.ca_pool.source.nope': ` +
				`module not registered: tls.ca_pool.source.nope, at Caddyfile:4`,
		},
		{`redis a:1 {; tls_trust_pool file; }`, `no certificates specified, at Caddyfile:4`},
		{
			`redis a:1 {; tls_trust_pool file {; nope; }; }`,
			`unrecognized directive: nope, at Caddyfile:5`,
		},
		{
			`redis a:1 {; tls_trust_pool file /nonexistent/ca; }`,
			`redis: tls: failed to load ca module: loading module 'file': provision tls.ca_pool.source.file: ` +
				`reading /nonexistent/ca: open /nonexistent/ca: no such file or directory`,
		},
		{`redis /s {; tls; }`, `redis: tls: not supported with a unix socket, only with host:port or such a URL`},
		{`redis a:1 b:1 {; db 1; }`, `redis: db: got "1", want none with a cluster, which has only 0`},
		{
			`redis a:1 {; sentinel_password my secret; }`,
			`sentinel_password: got 2 words, want one, in quotes if there are spaces in it, at Caddyfile:4`,
		},
		{
			`redis a:1 {; key_secret my secret; }`,
			`key_secret: got 2 words, want one, in quotes if there are spaces in it, at Caddyfile:4`,
		},
		{
			`redis a:1 {; password my secret; }`,
			`password: got 2 words, want one, in quotes if there are spaces in it, at Caddyfile:4`,
		},
		{`redis a:1 {; username a b; }`, `username: got 2 words, want one, in quotes if there are spaces in it, at Caddyfile:4`},
		{`redis a:1 {; db 1e1; }`, `db: got "1e1", want the number of a database, from 0 to 65535, at Caddyfile:4`},
		{
			`redis a:1 {; db {env.RATE_LIMIT_TEST_UNSET}; }`,
			`redis: db: got {env.RATE_LIMIT_TEST_UNSET}, which is empty, want a value`,
		},
		{`redis redis://a:1/2 {; db 1; }`, `redis: db: got "1", want none, or 2 as in the address`},
		{`redis a:1 {; key_prefix {x}; }`, `redis: key_prefix: got "{x}", want text without braces of at most 128 bytes`},
		{`redis a:1 {; timeout 50; }`, `timeout: got "50", want a duration from 1ms to 1m, such as 50ms, at Caddyfile:4`},
		{`redis a:1 {; timeout 999us; }`, `timeout: got "999us", want a duration from 1ms to 1m, such as 50ms, at Caddyfile:4`},
		{`memory 5`, `memory: got "5", want a block, at Caddyfile:3`},
		{`memory {; size 5; }`, `size: got an unknown option, want max_keys, at Caddyfile:4`},
		{`memory {; max_keys; }`, `max_keys: got "", want one value, at Caddyfile:4`},
		{`memory {; max_keys 1e6; }`, `max_keys: got "1e6", want a whole number from 1 to 1000000000, at Caddyfile:4`},
		{`memory {; max_keys 1 2; }`, `max_keys: got "1 2", want one value, at Caddyfile:4`},
		{`memory {; max_keys 1 {; x; }; }`, `max_keys: got a block, want it in one line, at Caddyfile:5`},
		{`on_error`, `on_error: got "", want one value, at Caddyfile:3`},
		{`on_error retry`, `on_error: got "retry", ` + wantPolicy},
		{`on_error Deny`, `on_error: got "Deny", ` + wantPolicy},
		{`on_error {env.HOME}`, `on_error: got "{env.HOME}", ` + wantPolicy},
		{`on_error allow deny`, `on_error: got "allow deny", want one value, at Caddyfile:3`},
		{`on_error allow {; x; }`, `on_error: got a block, want it in one line, at Caddyfile:4`},
		{`on_error allow`, ``},
		{`memory; on_error fallback`, ``},
		{`memory {; max_keys 1; }; on_error deny; redis a:1`, ``},
		{`redis a:1 {; cluster; tls; }`, ``},
		{`redis rediss://a {; tls_server_name b; tls_trust_pool system; }`, ``},
		{`redis a:1`, ``},
		{`redis a:1 {; }`, ``},
		{`redis a:1 {; timeout 1ms; db 0; key_prefix x; }`, ``},
	}
	for _, tc := range tests {
		t.Run(tc.block, func(t *testing.T) {
			wantCaddyfileError(t, inApp(tc.block), tc.want)
		})
	}

	const site = "\n:8080 {\nrespond ok\n}\n"
	for options, want := range map[string]string{
		"rate_limit a:1":                         `rate_limit: got "a:1", want a block, at Caddyfile:2`,
		"rate_limit {; }; rate_limit {; }":       `duplicate global option: rate_limit, at Caddyfile:4`,
		"rate_limit; rate_limit {; redis a:1; }": `duplicate global option: rate_limit, at Caddyfile:3`,
	} {
		t.Run(options, func(t *testing.T) {
			wantCaddyfileError(t, "{\n"+inLines(options)+"\n}"+site, want)
		})
	}
}

// Guards that errors stay one line, whatever is quoted in a Caddyfile.
func TestErrorsAreOneLine(t *testing.T) {
	for name, src := range map[string]string{
		"option of a limit":  inLimit("size 1; \"a\nb\" c"),
		"value of an option": inLimit("size \"1\n2\""),
		"two values":         inLimit("size \"1\n\" 2"),
		"name":               inLimit("size 1; limit \"a\nb\" {; size 1; }"),
		"name beside others": inSite("rate_limit \"a\nb\" c"),
		"key":                inSite("rate_limit /a x {; size 1; }; rate_limit x {; key \"\n\"; size 1; }"),
		"family of fields":   inLimit("size 1; headers \"a\nb\""),
		"option of the app":  inApp("\"a\nb\" c"),
		"option of redis":    inApp("redis a:1 {; \"a\nb\" c; }"),
		"address":            inApp("redis \"a\nb\""),
		"policy":             inApp("on_error \"a\nb\""),
		"option of memory":   inApp("memory {; \"a\nb\" c; }"),
		"client certificate": inApp("redis a:1 {; tls_client_auth \"a\nb\" c d; }"),
		"key prefix":         inApp("redis a:1 {; key_prefix \"\n{\"; }"),
	} {
		t.Run(name, func(t *testing.T) {
			if err := validateCaddyfile(src); err == nil {
				t.Error("got no error, want one")
			} else if strings.Contains(err.Error(), "\n") {
				t.Errorf("got %q, want one line", err)
			}
		})
	}
}

// Guards configurations written as JSON: every limit is complete, numbers are
// numbers or strings that hold one, nothing unknown is passed over.
func TestJSONErrors(t *testing.T) {
	tests := []struct{ handler, want string }{
		{`"limits":[{"size":5}]`, ``},
		{`"limits":[{"size":"5","cost":"2","factor":"0.5","ipv4_prefix":"24"}]`, ``},
		{`"limits":[{"max":"5","duration":60000000000,"min_interval":1000}]`, ``},
		{`"limits":[{"size":5,"drip_rate":1000}]`, ``},
		{`"limits":[{"size":5,"drip_rate":null,"cost":null,"key":"","match":null}]`, ``},
		{`"limits":[{"limits":[{"name":"a","size":5}]}]`, ``},
		{
			`"limits":[{"size":"{a}","drip_rate":"{a}","drip_size":"{a}",` +
				`"cost":"{a}","factor":"{a}","key":"{a}"}]`,
			``,
		},

		{`"limit":[{"size":5}]`, `json: unknown field "limit"`},
		{`"limits":[{"size":5,"burst":5}]`, `json: unknown field "burst"`},
		{
			`"limits":[{"size":5,"limits":[{"name":"a","size":5,"headers":["off"]}]}]`,
			`json: unknown field "headers"`,
		},
		{`"accounting":"each"`, `limits: got none, want at least one`},
		{`"limits":null`, `limits: got none, want at least one`},
		{`"limits":[]`, `limits: got none, want at least one`},
		{`"limits":[null]`, `limits: limit 0 is null`},
		{`"limits":[{"size":5},null]`, `limits: limit 1 is null`},
		{`"limits":[{"limits":[{"name":"a","size":1},null]}]`, `limit "default": limit 1 within it is null`},
		{`"limits":[{}]`, `limit "default": ` + limitsNothing},
		{`"limits":[{"limits":[]}]`, `limit "default": ` + limitsNothing},
		{`"limits":[{"limits":[{"size":5}]}]`, `limit "": nested limits need a name`},
		{`"limits":[{"name":"{a}","size":5}]`, `limit "{a}": name: got "{a}", ` + wantName},
		{`"limits":[{"size":5},{"size":6}]`, `limit "default": ` + twoLimits("default")},
		{`"limits":[{"size":5},{"name":"default","size":5}]`, `limit "default": ` + twoLimits("default")},
		{`"limits":[{"name":"a","size":5},{"name":"a","size":5}]`, `limit "a": ` + twoLimits("a")},
		{
			`"limits":[{"limits":[{"name":"a","size":5}]},{"limits":[{"name":"a","size":5}]}]`,
			`limit "a": ` + twoLimits("a"),
		},

		{`"limits":[{"size":[5]}]`, `limit "default": size: got "[5]", ` + wantUnits + wantHolder},
		{`"limits":[{"size":{}}]`, `limit "default": size: got "{}", ` + wantUnits + wantHolder},
		{`"limits":[{"size":{"n":5}}]`, `limit "default": size: got "{\"n\":5}", ` + wantUnits + wantHolder},
		{`"limits":[{"size":"\\{a}"}]`, `limit "default": size: got "\\{a}", ` + wantUnits + wantHolder},
		{
			`"limits":[{"size":5,"drip_size":{"n":5}}]`,
			`limit "default": drip_size: got "{\"n\":5}", ` + wantUnits + wantHolder,
		},
		{
			`"limits":[{"size":5,"cost":{"n":5}}]`,
			`limit "default": cost: got "{\"n\":5}", ` + wantUnits + wantHolder,
		},
		{
			`"limits":[{"size":5,"factor":false}]`,
			`limit "default": factor: got "false", ` + wantFactor + wantHolder,
		},
		{
			`"limits":[{"size":5,"factor":{"n":5}}]`,
			`limit "default": factor: got "{\"n\":5}", ` + wantFactor + wantHolder,
		},
		{
			`"limits":[{"size":5,"drip_rate":5}]`,
			`limit "default": drip_rate: got "5ns", ` + wantInterval + wantHolder,
		},
		{
			`"limits":[{"size":5,"drip_rate":1500}]`,
			`limit "default": drip_rate: got "1500ns", ` + wantInterval + wantHolder,
		},
		{
			`"limits":[{"size":5,"drip_rate":-1000}]`,
			`limit "default": drip_rate: got "-1000ns", ` + wantInterval + wantHolder,
		},
		{
			`"limits":[{"size":5,"drip_rate":true}]`,
			`limit "default": drip_rate: got "true", ` + wantInterval + wantHolder,
		},
		{
			`"limits":[{"size":5,"drip_rate":{"n":5}}]`,
			`limit "default": drip_rate: got "{\"n\":5}", ` + wantInterval + wantHolder,
		},
		{`"limits":[{"max":5,"duration":true}]`, `limit "default": duration: got "true", ` + wantInterval},
		{`"limits":[{"max":"{a}","duration":"1s"}]`, `limit "default": max: got "{a}", ` + wantUnits},
		{`"limits":[{"max":5,"duration":"{a}"}]`, `limit "default": duration: got "{a}", ` + wantInterval},
		{
			`"limits":[{"max":5,"duration":"1s","min_interval":"{a}"}]`,
			`limit "default": min_interval: got "{a}", ` + wantInterval,
		},
		{
			`"limits":[{"size":5,"ipv4_prefix":"{a}"}]`,
			`limit "default": ipv4_prefix: got "{a}", ` + wantBits4,
		},
		{
			`"limits":[{"size":5,"ipv6_prefix":false}]`,
			`limit "default": ipv6_prefix: got "false", ` + wantBits6,
		},
		{
			`"limits":[{"size":5,"key":"a\u0000b"}]`,
			`limit "default": key: got "a\x00b", want text or placeholders, such as {client_ip}, ` +
				`or a word for one bucket for all`,
		},
		{`"limits":[{"size":5}],"on_error":"deny"`, ``},
		{`"limits":[{"size":5}],"on_error":"{a}"`, `on_error: got "{a}", ` + wantPolicy},
		{
			`"limits":[{"size":5,"limits":[{"name":"a","size":5,"on_error":"deny"}]}]`,
			`json: unknown field "on_error"`,
		},
		{`"limits":[{"size":5}],"accounting":"{a}"`, `accounting: got "{a}", want atomic, each or in_order`},
		{`"limits":[{"size":5}],"headers":"off"`, ``},
		{`"limits":[{"size":5}],"headers":null`, ``},
		{`"limits":[{"size":5}],"headers":5`, `headers: got "5", want x-ratelimit, ratelimit-11 or both, or off`},
		{
			`"limits":[{"size":5}],"headers":["{a}"]`,
			`headers: got "{a}", want x-ratelimit, ratelimit-11 or both, or off`,
		},
	}
	for _, tc := range tests {
		t.Run(tc.handler, func(t *testing.T) {
			wantError(t, validateConfig(configOf(`"handler":"rate_limit",`+tc.handler)), tc.want)
		})
	}
}

// Guards the app's JSON in the same way.
func TestJSONAppErrors(t *testing.T) {
	tests := []struct{ app, want string }{
		{`{}`, ``},
		{`{"redis":null}`, ``},
		{`{"redis":{"addresses":["a:1"]}}`, ``},
		{`{"redis":{"addresses":["a:1"],"timeout":1000000,"db":0}}`, ``},
		{`{"redis":{"addresses":["a:1"],"timeout":"1ms"}}`, ``},
		{`{"redis":{"addresses":["a:1"],"timeout":60000000000,"db":"3"}}`, ``},
		{`{"redis":{"addresses":"a:1","timeout":null}}`, ``},
		{
			`{"redis":{"addresses":["a:1"],"timeout":0}}`,
			`redis: timeout: got "0ns", want a duration from 1ms to 1m, such as 50ms`,
		},
		{
			`{"redis":{"addresses":["a:1"],"timeout":60000000001}}`,
			`redis: timeout: got "60000000001ns", want a duration from 1ms to 1m, such as 50ms`,
		},
		{`{"redis":{"addresses":5}}`, `redis: address: got "5", ` + wantAddress},
		{`{"limits":[]}`, `json: unknown field "limits"`},
		{`{"redis":{"address":"a:1"}}`, `json: unknown field "address"`},
		{`{"redis":{}}`, `redis: addresses: got none, want at least one`},
		{`{"redis":{"addresses":null}}`, `redis: addresses: got none, want at least one`},
		{`{"redis":{"addresses":[]}}`, `redis: addresses: got none, want at least one`},
		{`{"redis":{"addresses":["a:1","b:2"]}}`, ``},
		{`{"redis":{"addresses":["a:1"],"cluster":true,"tls":{}}}`, ``},
		{`{"redis":{"addresses":["a:1"],"master_name":"m","sentinel_username":"u","sentinel_password":"p"}}`, ``},
		{`{"redis":{"addresses":["rediss://a"],"tls":{"ca":{"provider":"system"}},"key_secret":"s"}}`, ``},
		{`{"memory":{"max_keys":1},"on_error":"deny"}`, ``},
		{`{"memory":{"max_keys":null},"on_error":""}`, ``},
		{`{"memory":{},"on_error":"allow"}`, ``},
		{`{"memory":{"keys":1}}`, `json: unknown field "keys"`},
		{`{"on_error":"retry"}`, `on_error: got "retry", ` + wantPolicy},
		{
			`{"redis":{"addresses":["a:1"],"tls":true}}`,
			`json: cannot unmarshal bool into Go struct field Redis.redis.tls of type reverseproxy.TLSConfig`,
		},
		{`{"redis":{"addresses":["a:1"],"tls":{"verify":false}}}`, `json: unknown field "verify"`},
		{
			`{"redis":{"addresses":["a:1"],"tls":{"renegotiation":"x"}}}`,
			`redis: tls: invalid TLS renegotiation level: x`,
		},
		{
			`{"redis":{"addresses":["a:1"],"timeout":999999}}`,
			`redis: timeout: got "999999ns", want a duration from 1ms to 1m, such as 50ms`,
		},
		{
			`{"redis":{"addresses":["a:1"],"timeout":-1000000000}}`,
			`redis: timeout: got "-1000000000ns", want a duration from 1ms to 1m, such as 50ms`,
		},
		{
			`{"redis":{"addresses":["a:1"],"key_prefix":"{env.HOME}"}}`,
			`redis: key_prefix: got "{env.HOME}", want text without braces of at most 128 bytes`,
		},
		{
			`{"redis":{"addresses":["a:1"],"key_prefix":"a}"}}`,
			`redis: key_prefix: got "a}", want text without braces of at most 128 bytes`,
		},
	}
	for _, tc := range tests {
		t.Run(tc.app, func(t *testing.T) {
			wantError(t, validateConfig([]byte(`{"apps":{"rate_limit":`+tc.app+`}}`)), tc.want)
		})
	}
}

// Guards the parser against any text: it does not panic, and what it accepts
// is JSON that our types take.
func FuzzCaddyfile(f *testing.F) {
	files, err := filepath.Glob("testdata/*.caddyfiletest")
	if err != nil || len(files) == 0 {
		f.Fatalf("found no files: %v", err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		src, _, _ := strings.Cut(string(text), "\n----------\n")
		if _, block, found := strings.Cut(src, "rate_limit"); found {
			f.Add(block)
		}
	}
	for _, block := range []string{
		"", "{", "}", "{\n", "{\n}", "{\n}\n}", "{\nsize", "{\nsize {\n}\n}", "{\nlimit\n}",
		"{\nlimit a {\nlimit b {\n", "@a b c {\n}", "{\nmatch {\n}\n}", "{\nmatch @a\n}",
		"{\nmatch * {\n}\n}", "{\nmatch `{`\n}", "{\nkey <<A\nb\nA\n}", "{\nredis a {\ndb 1\n}\n}",
		"{\nredis a {\ntls_trust_pool file a {\npem_file b\n}\ntls\n}\nmemory {\nmax_keys 1\n}\n}",
		"{\nheaders\n}", "{\nimport x\n}", "{\nsize 1e999\n}", "\"\x00\" {\nsize \"\xff\"\n}",
	} {
		f.Add(block)
	}
	f.Fuzz(func(t *testing.T, block string) {
		if strings.Contains(block, "import") || strings.Contains(block, "{$") {
			return // they depend on what is around
		}
		for _, src := range []string{
			":8080 {\n@a path /a\nrate_limit " + block + "\n}\n",
			"{\nrate_limit " + block + "\n}\n:8080 {\nrespond ok\n}\n",
		} {
			config, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(src), nil)
			if err != nil {
				continue
			}
			checkStoredAgain(t, config)
		}
	})
}

// disagree returns the error for limits of one path that differ in an option.
func disagree(path, option, got, earlier string) string {
	return fmt.Sprintf(`limit %q: %s: got %q here and %q in another limit of path %q, but limits of one path share `+
		`their buckets, so these must match, or one needs another name`, path, option, got, earlier, path)
}
