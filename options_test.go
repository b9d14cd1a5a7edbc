package ratelimit

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
)

// numbers are the options that take a number or a duration: how each stands in
// a Caddyfile and in JSON, % being its value, and which of absurd are fine.
var numbers = []struct {
	option    string
	caddyfile string
	json      string // of the app if it begins with "app", else of a limit
	accepted  string
}{
	{"size", inLimit("size %; drip_rate 1us"), `{"size":%,"drip_rate":"1us"}`, units},
	{"drip_size", inLimit("size 5; drip_size %"), `{"size":5,"drip_size":%}`, units},
	{"cost", inLimit("size {query.n}; cost %; drip_rate 1us"), `{"size":"{a}","cost":%,"drip_rate":"1us"}`, units},
	{
		"factor", inLimit("size 5; factor %"), `{"size":5,"factor":%}`,
		units + " 0 1.5",
	},
	{"max", inLimit("max %; duration 1d"), `{"max":%,"duration":"1d"}`, units},
	{"ipv4_prefix", inLimit("size 5; ipv4_prefix %"), `{"size":5,"ipv4_prefix":%}`, ""},
	{"ipv6_prefix", inLimit("size 5; ipv6_prefix %"), `{"size":5,"ipv6_prefix":%}`, ""},
	{"drip_rate", inLimit("size 5; drip_rate %"), `{"size":5,"drip_rate":%}`, "1h"},
	{"duration", inLimit("max 5; duration %"), `{"max":5,"duration":%}`, "1h"},
	{
		"min_interval", inLimit("max 5; duration 1s; min_interval %"),
		`{"max":5,"duration":"1s","min_interval":%}`, "1h",
	},
	{"db", inApp("redis a:1 {; db %; }"), `app{"redis":{"addresses":["a:1"],"db":%}}`, "0"},
	{"pool_size", inApp("redis a:1 {; pool_size %; }"), `app{"redis":{"addresses":["a:1"],"pool_size":%}}`, ""},
	{
		"pool_size", inApp("redis a:1 {; cluster; pool_size %; }"),
		`app{"redis":{"addresses":["a:1"],"cluster":true,"pool_size":%}}`, "",
	},
	{"timeout", inApp("redis a:1 {; timeout %; }"), `app{"redis":{"addresses":["a:1"],"timeout":%}}`, ""},
	{"max_keys", inApp("memory {; max_keys %; }"), `app{"memory":{"max_keys":%}}`, ""},
}

// units are those of absurd that a number of units may be.
const units = "2147483647 2147483648 3000000000"

// absurd are values that no number and no duration can have, but for those that
// an option lists.
var absurd = []string{
	"0", "-1", "2147483647", "2147483648", "3000000000", "9223372036854775807", "9223372036854775808",
	"18446744073709551616", "1e30", "1e3", "1.5", " 5", "5 ", "five", "NaN", "true",
	"0s", "-1s", "-0s", "999ns", "100000000h", "9999999999999h", "106751d", "1h", "1 s",
}

// Guards every number and duration of every option against values that can't be
// meant, from a Caddyfile and from JSON: each is refused in one line that has the
// option, what it got and what would be right, and none panics.
func TestAbsurdNumbers(t *testing.T) {
	for _, n := range numbers {
		for _, text := range absurd {
			want := n.option + `: got "`
			if slices.Contains(strings.Fields(n.accepted), text) {
				want = ""
			}
			check := func(where string, validate func() error) {
				t.Run(fmt.Sprintf("%s %s in %s", n.option, text, where), func(t *testing.T) {
					err := func() (err error) {
						defer func() {
							if p := recover(); p != nil {
								err = fmt.Errorf("panic: %v", p)
							}
						}()
						return validate()
					}()
					switch {
					case want == "" && err != nil:
						t.Errorf("got error %q, want none", err)
					case want == "":
					case err == nil:
						t.Error("got no error")
					case strings.Contains(err.Error(), "\n"):
						t.Errorf("got error %q, want one line", err)
					case strings.HasSuffix(err.Error(), wantDrain) && !strings.Contains(err.Error(), "panic"):
					case !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), `", want `):
						t.Errorf("got error %q, want %s…, want …", err, want)
					}
				})
			}
			check("a Caddyfile", func() error {
				return validateCaddyfile(strings.ReplaceAll(n.caddyfile, "%", fmt.Sprintf("%q", text)))
			})
			quoted, _ := json.Marshal(text)
			check("a JSON string", func() error { return validateOption(n.json, string(quoted)) })
			// A duration that is a number is in nanoseconds, and what Caddy stores
			// of a handler is 1000 where it was given 1e3.
			duration := strings.Contains(n.accepted, "1h") || n.option == "timeout"
			if json.Valid([]byte(text)) && strings.TrimSpace(text) == text && text != "1e3" && !duration {
				check("JSON", func() error { return validateOption(n.json, text) })
			}
		}
	}
}

// validateOption validates JSON of the app or of a limit, % being a value.
func validateOption(template, value string) error {
	text := strings.ReplaceAll(template, "%", value)
	if app, found := strings.CutPrefix(text, "app"); found {
		return validateConfig([]byte(`{"apps":{"rate_limit":` + app + `}}`))
	}
	return validateConfig(configOf(`"handler":"rate_limit","limits":[` + text + `]`))
}

// Guards the edges of what the app's numbers may be.
func TestAppNumbersAccepted(t *testing.T) {
	for _, block := range []string{
		`redis a:1 {; pool_size 1; timeout 1ms; db 0; }`,
		`redis a:1 {; pool_size 4096; timeout 1m; db 65535; }`,
		`redis a:1 b:1 {; pool_size 4096; }`,
		`redis a:1 {; key_prefix ` + strings.Repeat("x", 128) + `; }`,
		`redis a:1 {; key_secret ` + strings.Repeat("x", 65536) + `; }`,
		`memory {; max_keys 1; }`,
		`memory {; max_keys 1000000000; }`,
	} {
		if err := validateCaddyfile(inApp(block)); err != nil {
			t.Errorf("%.100s: %v", block, err)
		}
	}
}

// Guards that texts and lists which are longer than anything they could stand
// for are refused, and that a secret is not shown by it.
func TestLongOptions(t *testing.T) {
	long := strings.Repeat("canary", 20_000)
	addresses := make([]string, 129)
	for i := range addresses {
		addresses[i] = fmt.Sprintf("a:%d", i+1)
	}
	for block, want := range map[string]string{
		`redis a:1 {; key_prefix ` + strings.Repeat("x", 129) + `; }`: `redis: key_prefix: got "` +
			strings.Repeat("x", 64) + `…", want text without braces of at most 128 bytes`,
		`redis a:1 {; username ` + long + `; }`:    `redis: username: got 120000 bytes, want at most 65536`,
		`redis a:1 {; password ` + long + `; }`:    `redis: password: got 120000 bytes, want at most 65536`,
		`redis a:1 {; key_secret ` + long + `; }`:  `redis: key_secret: got 120000 bytes, want at most 65536`,
		`redis a:1 {; master_name ` + long + `; }`: `redis: master_name: got 120000 bytes, want at most 65536`,
		`redis ` + strings.Join(addresses, " "):    `redis: addresses: got 129, want at most 128, which know the others`,
		`redis /` + strings.Repeat("x", 108): `redis: address: got "/` + strings.Repeat("x", 63) +
			`…", ` + wantAddress,
		`redis ` + strings.Repeat("x", 254) + `:1`: `redis: address: got "` + strings.Repeat("x", 64) +
			`…", ` + wantAddress,
	} {
		wantError(t, validateCaddyfile(inApp(block)), want)
	}
}

// Guards that a store which can't be made, even by a panic, leaves the pool of
// stores as it was: the next configuration gets what it asks for.
func TestFailedStoreLeavesPool(t *testing.T) {
	for name, open := range map[string]func() (sharedMemory, error){
		"panic": func() (sharedMemory, error) { panic("as the test wants it") },
		"error": func() (sharedMemory, error) { return sharedMemory{}, errors.New("as the test wants it") },
	} {
		t.Run(name, func(t *testing.T) {
			a := new(App)
			if _, err := take(a, "test", open); err == nil || !strings.Contains(err.Error(), "as the test wants it") {
				t.Errorf("got error %v", err)
			}
			if len(a.taken) > 0 {
				t.Errorf("the app has taken %v", a.taken)
			}
			done := make(chan struct{})
			go func() {
				defer close(done)
				store, err := take(a, "test", func() (sharedMemory, error) { return sharedMemory{newMemory()}, nil })
				if err != nil || store.Memory == nil {
					t.Errorf("afterwards got %v, %v", store, err)
				}
				stores.Range(func(any, any) bool { return true })
				if err := a.release(); err != nil {
					t.Error(err)
				}
			}()
			select {
			case <-done:
			case <-time.After(patience):
				t.Fatal("the pool is locked")
			}
		})
	}
}

// Guards that a running Caddy goes on, and takes the next configuration, after
// it was given numbers that it can't have.
func TestLoadAfterAbsurdNumbers(t *testing.T) {
	const site = "rate_limit {\nsize 9\n}\nrespond admitted"
	s := startConfig(t, config{site: site})
	for _, size := range []string{"2147483647", "3000000000", "1000000000"} {
		bad := config{site: site, global: "rate_limit {\nredis 127.0.0.1:1 {\npool_size " + size + "\n}\n}"}
		_, err := adaptCaddyfile(string(bad.caddyfile(s.addr, s.logPath)))
		if err == nil || !strings.Contains(err.Error(), `pool_size: got "`+size+`"`) {
			t.Errorf("got error %v", err)
		}
		var root map[string]any
		if err := json.Unmarshal(config{site: site}.json(t, s.addr, s.logPath), &root); err != nil {
			t.Fatal(err)
		}
		root["apps"].(map[string]any)["rate_limit"] = map[string]any{
			"redis": map[string]any{"addresses": []string{"127.0.0.1:1"}, "pool_size": json.Number(size)},
		}
		text, err := json.Marshal(root)
		if err != nil {
			t.Fatal(err)
		}
		if err := caddy.Load(text, true); err == nil || !strings.Contains(err.Error(), `pool_size: got "`+size+`"`) {
			t.Errorf("got error %v", err)
		}
		if a := s.get("/"); a.StatusCode != 200 {
			t.Errorf("after a bad configuration got %s", a)
		}
		if err := s.load(config{site: site}); err != nil {
			t.Errorf("the next configuration: %v", err)
		}
	}
}
