package directive_test

import (
	"bytes"
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2/caddyconfig"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/configtest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/filetest"
)

// Guards what a Caddyfile means: each file in testdata holds a Caddyfile, a
// line of dashes and what `caddy adapt --pretty` prints for it. That is also
// checked to survive being loaded and stored again, and to be valid, without
// the Redis servers that it names.
func TestAdapt(t *testing.T) {
	const separator = "\n----------\n"
	files, err := filepath.Glob("internal/directive/testdata/*.caddyfiletest")
	if err != nil || len(files) == 0 {
		t.Fatalf("found no files: %v", err)
	}
	t.Setenv("REDIS_PASSWORD", "secret")
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".caddyfiletest"), func(t *testing.T) {
			text := filetest.Read(t, file)
			src, want, found := strings.Cut(string(text), separator)
			if !found {
				t.Fatalf("%s has no line of dashes", file)
			}
			config, err := configtest.Adapt(src + "\n")
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
			if configtest.CheckStoredAgain(t, config) == 0 {
				t.Error("the configuration has nothing of ours")
			}
			if err := configtest.Validate(config); err != nil {
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
	if err := configtest.ValidateCaddyfile(configtest.InApp("redis " + listener.Addr().String())); err != nil {
		t.Fatal(err)
	}
	_ = listener.(*net.TCPListener).SetDeadline(time.Now())
	if conn, err := listener.Accept(); err == nil {
		conn.Close()
		t.Error("validating connected to Redis")
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
		if _, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(configtest.InLimit(block)), nil); err != nil {
			t.Errorf("%s: %v", block, err)
		}
	}
}

// Guards the parser against any text: it does not panic, and what it accepts
// is JSON that our types take.
func FuzzCaddyfile(f *testing.F) {
	files, err := filepath.Glob("internal/directive/testdata/*.caddyfiletest")
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
			configtest.CheckStoredAgain(t, config)
		}
	})
}
