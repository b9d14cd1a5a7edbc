package ratelimit

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/redistest"
)

// numbers are the options that take a number or a duration: how each stands in
// a Caddyfile and in JSON, % being its value, what would be right, and which of
// absurd are.
var numbers = []struct {
	option    string
	caddyfile string
	json      string // of the app if it begins with "app", else of a limit
	want      string
	accepted  string
}{
	{"size", inLimit("size %; drip_rate 1us"), `{"size":%,"drip_rate":"1us"}`, wantUnits + wantHolder, units},
	{"drip_size", inLimit("size 5; drip_size %"), `{"size":5,"drip_size":%}`, wantUnits + wantHolder, units},
	{
		"cost", inLimit("size {query.n}; cost %; drip_rate 1us"), `{"size":"{a}","cost":%,"drip_rate":"1us"}`,
		wantUnits + wantHolder, units,
	},
	{
		"factor", inLimit("size 5; factor %"), `{"size":5,"factor":%}`,
		wantFactor + wantHolder, units + " 0 0.001 0.5 1.0 1.5 18446744073709.55",
	},
	{"max", inLimit("max %; duration 1d"), `{"max":%,"duration":"1d"}`, wantUnits, units},
	{"ipv4_prefix", inLimit("size 5; ipv4_prefix %"), `{"size":5,"ipv4_prefix":%}`, wantBits4, ""},
	{"ipv6_prefix", inLimit("size 5; ipv6_prefix %"), `{"size":5,"ipv6_prefix":%}`, wantBits6, ""},
	{"drip_rate", inLimit("size 5; drip_rate %"), `{"size":5,"drip_rate":%}`, wantInterval + wantHolder, "1h"},
	{"duration", inLimit("max 5; duration %"), `{"max":5,"duration":%}`, wantInterval, "1h"},
	{
		"min_interval", inLimit("max 5; duration 1s; min_interval %"),
		`{"max":5,"duration":"1s","min_interval":%}`, wantInterval, "1h",
	},
	{
		"window", inLimit("algorithm fixed_window; size 1; window %"),
		`{"algorithm":"fixed_window","size":1,"window":%}`, wantInterval + wantHolder, "1h",
	},
	{"db", inApp("redis a:1 {; db %; }"), `app{"redis":{"addresses":["a:1"],"db":%}}`, wantDatabase, "0"},
	{"timeout", inApp("redis a:1 {; timeout %; }"), `app{"redis":{"addresses":["a:1"],"timeout":%}}`, wantTimeout, "1.0000001s"},
	{"max_keys", inLimit("size 5; max_keys %"), `{"size":5,"max_keys":%}`, wantKeys, ""},
	{"max_keys", inApp("memory {; max_keys %; }"), `app{"memory":{"max_keys":%}}`, wantKeys, ""},
}

const (
	wantDatabase = `want the number of a database, from 0 to 65535`
	wantTimeout  = `want a duration from 1ms to 1m, such as 50ms`
	wantKeys     = `want a whole number from 1 to 1000000000`

	// units are those of absurd that a number of units may be.
	units = "2147483647 2147483648 3000000000"
)

// absurd are values that no number and no duration can have, but for those that
// an option lists.
var absurd = []string{
	"0", "-1", "-0", "+5", "2147483647", "2147483648", "3000000000", "562949953421313", "9223372036854775807",
	"9223372036854775808", "18446744073709551616", "99999999999999999999999999", "1e30", "1e3", "1E3", "1e-3", "5e-1",
	"1e999", "0x1", "0x10", "0b1", "1_000", "1,000", "1/2", "1,5", "5%", "50%", "/24", "5x", "٣",
	"1.0", "1.5", "-0.5", "0.0000001", "0.1234567", "1.0000000", "1.00000000000000000000001", ".5", "1.", ".",
	"1.2.3", "1.-5", "1.+5", "1_0.5", "18446744073709.551616",
	" 5", "5 ", "five", "NaN", "Inf", "true", "{5", "5}", "{1s",
	"0s", "-1s", "-0s", "999ns", "1500ns", "1.0000001s", "9999999h", "100000000h", "9999999999999h",
	"9999999999999999999999h", strings.Repeat("9", 50) + "d", "1h", "1 s", "1e3s", "s", "1y", "1w", "second",
}

// Guards every number and duration of every option against values that can't be
// meant, from a Caddyfile and from JSON: each is refused in one line that has the
// option, what it got as it was written and what would be right, and none panics.
func TestOutOfRangeNumbers(t *testing.T) {
	for _, n := range numbers {
		ofApp := strings.HasPrefix(n.json, "app")
		prefix := `limit "default": `
		if ofApp {
			prefix = n.json[len(`app{"`):strings.Index(n.json, `":{`)] + ": "
		}
		_, line, _ := strings.Cut(n.caddyfile, "\n")
		line, _, _ = strings.Cut(line, "%")
		for _, text := range absurd {
			check := func(where, prefix, shown, line string, validate func() error) {
				t.Run(fmt.Sprintf("%s %s in %s", n.option, text, where), func(t *testing.T) {
					want := fmt.Sprintf("%s%s: got %q, %s%s", prefix, n.option, shown, n.want, line)
					if slices.Contains(strings.Fields(n.accepted), shown) {
						want = ""
					}
					wantError(t, validate(), want)
				})
			}
			inCaddyfile := strings.Replace(prefix, "default", "api", 1)
			if ofApp {
				inCaddyfile = ""
			}
			check("a Caddyfile", inCaddyfile, text, fmt.Sprint(", at Caddyfile:", strings.Count(line, "\n")+2), func() error {
				return validateCaddyfile(strings.ReplaceAll(n.caddyfile, "%", fmt.Sprintf("%q", text)))
			})
			quoted, _ := json.Marshal(text)
			check("a JSON string", prefix, text, "", func() error { return validateOption(n.json, string(quoted)) })

			// A duration that is a number is in nanoseconds.
			duration := strings.Contains(n.accepted, "1h") || n.option == "timeout"
			var decoded any
			if duration || json.Unmarshal([]byte(text), &decoded) != nil || strings.TrimSpace(text) != text {
				continue
			}
			shown := text
			if !ofApp { // Caddy stores a handler as it writes numbers
				again, _ := json.Marshal(decoded)
				shown = string(again)
			}
			if strings.ContainsAny(text, ".eE") == strings.ContainsAny(shown, ".e") {
				check("JSON", prefix, shown, "", func() error { return validateOption(n.json, text) })
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
		`redis a:1 {; timeout 1ms; db 0; }`,
		`redis a:1 {; timeout 1m; db 65535; }`,
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
		`redis ` + strings.Join(addresses, " "):    `redis: addresses: got 129, want at most 128, the others are discovered`,
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
			if _, err := openStore(a, "test", open); err == nil || !strings.Contains(err.Error(), "as the test wants it") {
				t.Errorf("got error %v", err)
			}
			if len(a.storeKeys) > 0 {
				t.Errorf("the app has taken %v", a.storeKeys)
			}
			done := make(chan struct{})
			go func() {
				defer close(done)
				store, err := openStore(a, "test", func() (sharedMemory, error) { return use(process.newMemory()), nil })
				if err != nil || store.Memory == nil {
					t.Errorf("afterwards got %v, %v", store, err)
				}
				process.stores.Range(func(any, any) bool { return true })
				if err := a.releaseStores(); err != nil {
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
func TestLoadAfterOutOfRangeNumbers(t *testing.T) {
	const site = "rate_limit {\nsize 9\n}\nrespond admitted"
	s := startConfig(t, config{site: site})
	for _, size := range []string{"2147483647", "3000000000", "1000000000"} {
		bad := config{site: site, global: "rate_limit {\nredis 127.0.0.1:1 {\ndb " + size + "\n}\n}"}
		_, err := adaptCaddyfile(string(bad.caddyfile(s.addr, s.logPath)))
		if err == nil || !strings.Contains(err.Error(), `db: got "`+size+`"`) {
			t.Errorf("got error %v", err)
		}
		var root map[string]any
		if err := json.Unmarshal(config{site: site}.json(t, s.addr, s.logPath), &root); err != nil {
			t.Fatal(err)
		}
		root["apps"].(map[string]any)["rate_limit"] = map[string]any{
			"redis": map[string]any{"addresses": []string{"127.0.0.1:1"}, "db": json.Number(size)},
		}
		text, err := json.Marshal(root)
		if err != nil {
			t.Fatal(err)
		}
		if err := caddy.Load(text, true); err == nil || !strings.Contains(err.Error(), `db: got "`+size+`"`) {
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

// Guards that a unix socket can be written as Caddy writes it elsewhere, and that
// limits are then kept there.
func TestUnixNetworkAddress(t *testing.T) {
	redis := redistest.Start(t)
	s := startConfig(t, config{
		global: redisGlobal("unix/"+redis.Socket, slowly),
		site:   "rate_limit {\nsize 2\ndrip_rate 1h\n}\nrespond admitted",
	})
	for _, want := range []int{200, 200, 429} {
		if a := s.get("/"); a.StatusCode != want {
			t.Errorf("got %s, want %d", a, want)
		}
	}
	if keys, err := redis.Client().Keys(t.Context(), "*").Result(); err != nil || len(keys) != 1 {
		t.Errorf("Redis has keys %q, %v, want one", keys, err)
	}
}

// Guards that placeholders in all options on TLS are resolved: otherwise no
// certificate would be found, or one would have a wrong name.
func TestTLSPlaceholders(t *testing.T) {
	authority := redistest.NewAuthority(t)
	cert, key := authority.Issue(t, "redis.test")
	redis := redistest.StartTLS(t, authority, true, "--tls-cert-file", cert, "--tls-key-file", key)
	cert, key = authority.Issue(t, "client")
	for name, value := range map[string]string{
		"NAME": "redis.test", "CERT": cert, "KEY": key, "CA": authority.CAFile,
	} {
		t.Setenv("RATE_LIMIT_TEST_"+name, value)
	}
	s := startConfig(t, config{
		global: redisGlobal(redis.Addr, slowly,
			"tls_server_name {env.RATE_LIMIT_TEST_NAME}",
			"tls_client_auth {env.RATE_LIMIT_TEST_CERT} {env.RATE_LIMIT_TEST_KEY}",
			"tls_trust_pool file {env.RATE_LIMIT_TEST_CA}"),
		site: "rate_limit {\nsize 2\ndrip_rate 1h\non_error deny\n}\nrespond admitted",
	})
	if a := s.get("/"); a.StatusCode != 200 {
		t.Errorf("got %s, log %v", a, s.log("error", "rate_limit"))
	}
	if keys, err := redis.Client().Keys(t.Context(), "*").Result(); err != nil || len(keys) != 1 {
		t.Errorf("Redis has keys %q, %v, want one", keys, err)
	}

	for option, want := range map[string]string{
		"tls_server_name {env.RATE_LIMIT_TEST_UNSET}": `redis: tls: server_name: ` +
			`evaluated placeholder {env.RATE_LIMIT_TEST_UNSET} is empty`,
		"tls_server_name {http.request.host}": `redis: tls: server_name: got a placeholder that is unknown here, ` +
			`want {env.*}, {file.*} or {system.*}, or \{ and \} for braces`,
	} {
		wantError(t, validateCaddyfile(inApp("redis a:1 {; "+option+"; }")), want)
	}
}

// Guards that stores are distinguished by the resolved TLS options, not by
// how they are written.
func TestTLSPlaceholdersTellStoresApart(t *testing.T) {
	const app = `{"redis":{"addresses":["a:1"],"tls":{"server_name":"{env.RATE_LIMIT_TEST_NAME}"}}}`
	t.Setenv("RATE_LIMIT_TEST_NAME", "x")
	first := provisionApp(t, app)
	if provisionApp(t, `{"redis":{"addresses":["a:1"],"tls":{"server_name":"x"}}}`).redis != first.redis {
		t.Error("a name and a placeholder for it make two stores")
	}
	t.Setenv("RATE_LIMIT_TEST_NAME", "y")
	if provisionApp(t, app).redis == first.redis {
		t.Error("a placeholder for another name makes the same store")
	}
}

// Guards that what is the same for all requests is resolved when the
// configuration is loaded, in every number, and that what can't be right is then
// refused: it would be an error for each request.
func TestNumbersFromEnvironment(t *testing.T) {
	file := filepath.Join(tempDir(t), "n")
	if err := os.WriteFile(file, []byte("canary\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, value := range map[string]string{
		"N": "3", "D": "1h", "BAD": "three", "BRACES": "{query.n}", "POOL": "4", "EMPTY": "",
	} {
		t.Setenv("RATE_LIMIT_TEST_"+name, value)
	}
	env := func(text string) string { return strings.ReplaceAll(text, "$", "env.RATE_LIMIT_TEST_") }

	s := startConfig(t, config{
		global: env("rate_limit {\nmemory {\nmax_keys {$N}\n}\n}"),
		site: env("rate_limit /max {\nmax {$N}\nduration {$D}\nmin_interval 1{$N}ms\n}\n" +
			"rate_limit /size {\nsize {$N}\ndrip_rate {$D}\ndrip_size {$N}\ncost {$N}\nfactor 1{query.f}\n" +
			"ipv4_prefix {$N}\nipv6_prefix {$N}\n}\nrespond admitted"),
	})
	s.run(
		step{path: "/size", want: "200 limit=3 remaining=0 clear=3600.000"},
		step{path: "/size", want: "429 limit=3 remaining=0 clear=3600.000 reset=3600.000 retry-after=3600"},
		step{path: "/max", want: "200 limit=1 remaining=0 clear=1200.000"},
	)
	if n := newestApp().maxKeys; n != 3 {
		t.Errorf("max_keys is %d", n)
	}

	limit := func(text string) string { return `limit "api": ` + text }
	for block, want := range map[string]string{
		"size {$UNSET}":              limit("size: got {$UNSET}, which is empty, want a value"),
		"size {$EMPTY}":              limit("size: got {$EMPTY}, which is empty, want a value"),
		"size {$BAD}":                limit(`size: got "three", ` + wantUnits + ` from {$BAD}`),
		"size 1{$BAD}":               limit(`size: got "1three", ` + wantUnits + ` from 1{$BAD}`),
		"size {$BRACES}":             limit("size: got {$BRACES}, whose value has braces, want one without"),
		"size {file." + file + "}":   limit(`size: got "{file.` + file + `}", want the file to contain a whole number`),
		"size 5; ipv4_prefix {$BAD}": limit(`ipv4_prefix: got "three", ` + wantBits4 + ` from {$BAD}`),
		"max {$BAD}; duration 1s":    limit(`max: got "three", ` + wantUnits + ` from {$BAD}`),
	} {
		err := validateCaddyfile(env(inLimit(block)))
		if err == nil || !strings.Contains(err.Error(), env(want)) {
			t.Errorf("%s: got error %v\nwant %s", block, err, env(want))
		}
		if err != nil && strings.Contains(err.Error(), "canary") {
			t.Errorf("%s: error %v shows what the file holds", block, err)
		}
	}
	wantError(t, validateCaddyfile(env(inApp("redis a:1 {; db {$N}; timeout {$POOL}ms; }"))), "")
	wantError(t, validateCaddyfile(env(inApp("redis a:1 {; db {$BAD}; }"))),
		env(`redis: db: got "three", want the number of a database, from 0 to 65535 from {$BAD}`))
}

// Guards that a URL without a host does not make the client send its password to
// this machine, where a variable is unset.
func TestURLNeedsHost(t *testing.T) {
	s := startConfig(t, config{site: "respond ok"})
	t.Setenv("RATE_LIMIT_TEST_PW", "canary")
	for _, address := range []string{
		"redis://:{env.RATE_LIMIT_TEST_PW}@{$RATE_LIMIT_TEST_UNSET}:6379", "redis://", "redis:///",
		"redis://:canary@", "rediss://:canary@/1",
	} {
		err := s.load(config{global: redisGlobal(address), site: "respond ok"})
		if err == nil || !strings.Contains(err.Error(), wantAddress) || strings.Contains(err.Error(), "canary") {
			t.Errorf("%s: got error %v", address, err)
		}
	}
}

// Guards that no line of the log, of any level, has the user or password,
// whatever a server or sentinel replies: even if it is all that it replies.
func TestLogHasNoSecret(t *testing.T) {
	const user, password = "canary-user", "canary-pass"
	for _, reply := range []string{
		"-NOPERM User " + user + " has no permissions to run the 'evalsha' command",
		"-WRONGPASS " + user + " " + password, "-NOAUTH " + password, "-OOM " + password, "-LOADING " + password,
		"-ERR " + user + " " + password, "-ERR unknown command '" + password + "'", "-" + password, "-",
		"-READONLY " + user, "-BUSY " + password, "-TRYAGAIN " + password, "-CLUSTERDOWN " + password,
		"+" + user, ":" + password, "$" + password, "*" + password, "!5", password, "tls: " + password,
	} {
		for _, kind := range []string{"", "cluster", "master_name m\nsentinel_username " + user + "\nsentinel_password " + password} {
			addr := replyServer(t, reply)
			s := startConfig(t, config{
				global: redisGlobal(addr, "username "+user, "password "+password, kind),
				site:   "rate_limit {\nsize 1000\non_error deny\n}\nhandle_errors {\nrespond \"{err.message}\"\n}\nrespond ok",
			})
			for range 8 {
				if a := s.get("/"); strings.Contains(a.body, "canary") {
					t.Errorf("%q: the answer has it: %s", reply, a.body)
				}
			}
			eventually(t, "a line about Redis: "+reply+kind, func() bool {
				s.get("/")
				return len(append(s.log("error", "rate_limit"), s.log("warn", "rate_limit")...)) > 0
			})
			for _, e := range s.entries() {
				if text, _ := json.Marshal(e); strings.Contains(string(text), "canary") {
					t.Errorf("%q %q: the log has %s", kind, reply, text)
				}
			}
			if err := s.load(config{site: "respond ok"}); err != nil {
				t.Fatal(err)
			}
			if err := caddy.Stop(); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// replyServer runs a server that replies the same to every command.
func replyServer(t *testing.T, reply string) (addr string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				for lines := bufio.NewScanner(conn); lines.Scan(); {
					if strings.HasPrefix(lines.Text(), "*") {
						if _, err := io.WriteString(conn, reply+"\r\n"); err != nil {
							return
						}
					}
				}
			}()
		}
	}()
	return l.Addr().String()
}

// Guards that a password in the wrong place of a Caddyfile is not shown by the
// error that says so.
func TestMisplacedSecrets(t *testing.T) {
	for _, src := range []string{
		"{\nrate_limit redis://:canary@a:1\n}\n:8080 {\n}\n",
		inApp("redis://u:canary@a:1"),
		inApp("memory redis://:canary@a:1"),
		inApp("redis a:1 {; redis://:canary@b:2; }"),
		inApp("redis a:1 {; username u password canary; }"),
		inApp("redis a:1 {; password canary canary; }"),
		inApp("redis a:1 {; db 1 password canary; }"),
		inApp("redis a:1 {; sentinel_username u canary; }"),
		inApp("redis a:1 {; password canary {; x; }; }"),
		inApp("redis u:canary@a:1"),
		inApp("redis canary@a:1"),
		inApp("redis unix/u:canary@/run/redis.sock"),
		inApp("redis redis://:can{ary}@a:1/x"),
		inApp("redis a:1 {; password a{canary}b; }"),
		inApp("redis redis://:canary@a:1 {; password canary; }"),
		inApp("redis redis://:canary@a:1 redis://:canary@a:1"),
		inApp("redis redis://:canary@a:1/99999999999999999999"),
		inApp("redis redis://:canary@a:1/65536"),
		inApp("redis a:1 {; db redis://:canary@h/2; }"),
		inApp("redis redis://:canary@h:6379,g:6379"),
		":8080 {\nrate_limit redis redis://u:canary@h\n}\n",
		":8080 {\nrate_limit redis://u:canary@h\n}\n",
		inLimit("redis://u:canary@h"),
	} {
		switch err := validateCaddyfile(src); {
		case err == nil:
			t.Errorf("%s: got no error", src)
		case strings.Contains(err.Error(), "canary") || strings.Contains(err.Error(), "{ary}"):
			t.Errorf("%s: error %q shows it", src, err)
		}
	}
}
