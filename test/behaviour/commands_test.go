package behaviour

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/admin/adminjson"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/caddytest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/filetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/racetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// cliSite has limits of several kinds.
const cliSite = `
	rate_limit {
		limit api {
			size 5
			drip_rate 10s
			track_top 10
			limit search {
				match path /search
				size 2
				drip_rate 10s
			}
		}
		limit tenant {
			match header X-Tenant *
			key {header.X-Tenant}{header.X-Region}
			size 3
		}
	}
	respond ok`

// requestCounts returns the numbers of requests that status shows.
func requestCounts(t *testing.T, status sitetest.Output) (counts [5]int) {
	t.Helper()
	_, line, _ := strings.Cut(status.Out, "Requests: ")
	const format = "%d admitted, %d denied, %d undecided, %d refused, %d in early data.\n"
	if _, err := fmt.Sscanf(line, format, &counts[0], &counts[1], &counts[2], &counts[3], &counts[4]); err != nil {
		t.Fatalf("status: got %d\n%s\n%v", status.Status, status.Out, err)
	}
	return counts
}

// TestCommandsQueryCaddy guards what the commands show of a running Caddy, and that
// reset empties a bucket.
func TestCommandsQueryCaddy(t *testing.T) {
	s, a := sitetest.StartWithAdmin(t, sitetest.Config{Site: cliSite})
	address := "--address=" + a.Addr
	before := requestCounts(t, sitetest.RunCommand(t, "status", address))
	for range 3 {
		s.Get("/search")
	}
	s.Get("/", "X-Tenant: acme", "X-Region: eu")

	sitetest.RunCommand(t, "peek", address, "api", "127.0.0.1").Want(t, 0, ""+
		"limit        api\n"+
		"in           memory\n"+
		"level        3 of 5\n"+
		"remaining    2\n"+
		"empties in   30s\n")
	sitetest.RunCommand(t, "peek", address, "api/search", "127.0.0.1").Want(t, 0, ""+
		"limit        api/search\n"+
		"in           memory\n"+
		"level        2 of 2\n"+
		"remaining    0\n"+
		"retry after  10s\n"+
		"empties in   20s\n")
	sitetest.RunCommand(t, "peek", address, "tenant", "acme", "eu").Want(t, 0, ""+
		"limit        tenant\n"+
		"in           memory\n"+
		"level        1 of 3\n"+
		"remaining    2\n"+
		"empties in   1s\n")
	if r := sitetest.RunCommand(t, "peek", address, "tenant", "--client-ip", "192.0.2.9", "--json"); r.Status != 0 || !strings.Contains(r.Out, `"level": 0`) {
		t.Errorf("peek of a client without key: %+v", r)
	}

	sitetest.RunCommand(t, "limits", address).Want(t, 0, ""+
		"LIMIT       ALGORITHM     SIZE  RATE OR WINDOW  COST  KEY                                                           SITE       MATCH                      BUCKETS  ADMITTED  DENIED\n"+
		"api         leaky_bucket     5  1 each 10s         1  {http.vars.client_ip}                                         127.0.0.1  -                                1         3       0\n"+
		"api/search  leaky_bucket     2  1 each 10s         1  {http.vars.client_ip}                                         127.0.0.1  path /search                     1         2       1\n"+
		"tenant      leaky_bucket     3  1 each 1s          1  {http.request.header.X-Tenant}{http.request.header.X-Region}  127.0.0.1  header {\"X-Tenant\":[\"*\"]}        1         1       0\n")
	status := sitetest.RunCommand(t, "status", address)
	for _, want := range []string{
		"Buckets are kept in memory; this process has 3 of at most 1000000.\n",
		"\nLIMIT       ADMITTED  DENIED  SPARED  ADMITTED/S  DENIED/S\n",
		"\napi/search         2       1       0 ",
	} {
		if !strings.Contains(status.Out, want) || status.Status != 0 {
			t.Errorf("status: got %d\n%s\nwant %q in it", status.Status, status.Out, want)
		}
	}
	// Requests of earlier tests are in these counts too.
	var counts [5]int
	for i, n := range requestCounts(t, status) {
		counts[i] = n - before[i]
	}
	if want := [5]int{3, 1, 0, 0, 0}; counts != want {
		t.Errorf("status: %v requests admitted, denied, undecided, refused and in early data, want %v", counts, want)
	}
	if top := sitetest.RunCommand(t, "top", address, "--by", "requests"); top.Status != 0 || !strings.Contains(top.Out, "       4      0  127.0.0.1\n") {
		t.Errorf("top: got %d\n%s%s", top.Status, top.Out, top.Errors)
	}

	reset := sitetest.RunCommand(t, "reset", address, "api", "127.0.0.1", "--yes")
	reset.Want(t, 0, ""+
		"The bucket is empty now. Before:\n"+
		"limit        api\n"+
		"in           memory\n"+
		"level        3 of 5\n"+
		"remaining    2\n"+
		"empties in   30s\n")
	if r := sitetest.RunCommand(t, "peek", address, "api", "127.0.0.1"); !strings.Contains(r.Out, "level        0 of 5\n") {
		t.Errorf("after reset: %+v", r)
	}
	for _, args := range [][]string{{"status"}, {"limits"}, {"peek", "api", "192.0.2.1"}, {"top"}} {
		r := sitetest.RunCommand(t, append(args, address, "--json")...)
		if !json.Valid([]byte(r.Out)) || r.Status != 0 || r.Errors != "" {
			t.Errorf("%q with --json: got %+v", args, r)
		}
	}
}

// TestCommandsQueryAllLimits guards that one command shows why a client is denied, with
// the limits that it could not ask, and that another lets the client in.
func TestCommandsQueryAllLimits(t *testing.T) {
	s, a := sitetest.StartWithAdmin(t, sitetest.Config{Site: cliSite})
	address := "--address=" + a.Addr
	for range 3 {
		s.Get("/search")
	}
	const not = "" +
		"SKIPPED  WHY\n" +
		"tenant   it needs a value for each placeholder of its key: {http.request.header.X-Tenant} {http.request.header.X-Region}\n"
	const buckets = "" +
		"LIMIT       KEY        LEVEL   REMAINING  RETRY AFTER  EMPTIES IN\n" +
		"api         127.0.0.1  2 of 5          3  0s           20s\n" +
		"api/search  127.0.0.1  2 of 2          0  10s          20s\n\n" + not
	sitetest.RunCommand(t, "peek", address, "--client-ip", "127.0.0.1").Want(t, 0, buckets)
	s.Get("/", "X-Tenant: acme", "X-Region: eu")
	sitetest.RunCommand(t, "peek", address, "--key", "acme", "--key", "eu").Want(t, 0, ""+
		"LIMIT   KEY      LEVEL   REMAINING  RETRY AFTER  EMPTIES IN\n"+
		"tenant  acme,eu  1 of 3          2  0s           1s\n\n"+
		"SKIPPED     WHY\n"+
		"api         it needs a value for each placeholder of its key: {http.vars.client_ip}\n"+
		"api/search  it needs a value for each placeholder of its key: {http.vars.client_ip}\n")
	sitetest.RunCommand(t, "reset", address, "--client-ip", "127.0.0.1", "--yes").Want(t, 0,
		"These buckets are empty now. Before:\n"+strings.Replace(buckets, "2 of 5          3  0s           20s", "3 of 5          2  0s           30s", 1))
	sitetest.RunCommand(t, "peek", address, "--client-ip", "127.0.0.1").Want(t, 0, "None of the 3 buckets of client 127.0.0.1 holds anything.\n\n"+not)
	if r := sitetest.RunCommand(t, "peek", address, "--key", "acme"); r.Status != 1 || !strings.Contains(r.Out, "SKIPPED") || r.Errors != "Error: no limit has a bucket for what was given\n" {
		t.Errorf("a key of no limit: %+v", r)
	}
	if got := s.Get("/search"); got.StatusCode != http.StatusOK {
		t.Errorf("after reset: %s", got)
	}
}

// TestResetWithoutRedis guards that while Redis is down a reset empties what this
// Caddy has, says so and exits with status 2, and that the client is let in.
func TestResetWithoutRedis(t *testing.T) {
	redis := redistest.Start(t)
	s, a := sitetest.StartWithAdmin(t, sitetest.Config{Global: sitetest.RedisGlobal(redis.Addr, sitetest.LongTimeout), Site: hourly})
	sitetest.Eventually(t, "Redis to decide", func() bool {
		s.Get("/", "User: u")
		return strings.Contains(sitetest.RunCommand(t, "peek", "--address", a.Addr, "api", "u").Out, "level        3 of 3\n")
	})
	redis.Kill()
	denied := func(when string, want bool) {
		t.Helper()
		if got := s.Get("/", "User: u"); (got.StatusCode == http.StatusTooManyRequests) != want {
			t.Errorf("%s: got %s", when, got)
		}
	}
	denied("with a full bucket", true)
	peek := sitetest.RunCommand(t, "peek", "--address", a.Addr, "--key", "u")
	if want := "LIMIT  KEY  LEVEL   REMAINING  RETRY AFTER"; peek.Status != 2 || !strings.HasPrefix(peek.Out, want) || !strings.Contains(peek.Out, "api    u    3 of 3          0  ") {
		t.Errorf("peek: %+v", peek)
	}
	for _, which := range [][]string{{"api", "u"}, {"--key", "u"}} {
		r := sitetest.RunCommand(t, append([]string{"reset", "--yes", "--address", a.Addr}, which...)...)
		if r.Status != 2 || !strings.Contains(r.Out, " empty now in this Caddy alone. Before:\n") ||
			!strings.HasPrefix(r.Errors, "Error: redis unavailable: ") || !strings.HasSuffix(r.Errors, "; this is what the Caddy at "+a.Addr+" has\n") {
			t.Errorf("%q: %+v", which, r)
		}
		for range 3 {
			denied("after a reset", false)
		}
		denied("after three requests", true)
	}
}

// TestStatusOfLostRedis guards that status says that Redis is down, and exits
// with status 2.
func TestStatusOfLostRedis(t *testing.T) {
	nobody := redistest.FreeAddr(t)
	s, a := sitetest.StartWithAdmin(t, sitetest.Config{Global: sitetest.RedisGlobal(nobody), Site: cliSite})
	sitetest.Eventually(t, "redis to be found unavailable", func() bool {
		s.Get("/")
		return strings.Contains(sitetest.RunCommand(t, "status", "--address", a.Addr).Out, "  down for ")
	})
	for want, args := range map[string][]string{"  down for ": {"status"}, `"state": "down"`: {"status", "--json"}} {
		r := sitetest.RunCommand(t, append(args, "--address", a.Addr)...)
		if r.Status != 2 || r.Errors != "" || !strings.Contains(r.Out, want) {
			t.Errorf("got %+v", r)
		}
	}
	// Some requests were decided here, for want of Redis.
	r := sitetest.RunCommand(t, "status", "--address", a.Addr)
	if !regexp.MustCompile(`(?m)^LIMIT +ADMITTED +DENIED +SPARED +ADMITTED/S +DENIED/S +FALLBACK +FALLBACK/S\napi +\d+ +\d+ +0 +[\d.]+ +[\d.]+ +[1-9]\d* +[\d.]+$`).MatchString(r.Out) {
		t.Errorf("status: got %s", r.Out)
	}
	r = sitetest.RunCommand(t, "peek", "--address", a.Addr, "api", "127.0.0.1")
	const unavailable = "Error: redis unavailable: "
	if r.Status != 2 || !strings.HasPrefix(r.Out, "limit        api\nin           this Caddy, as Redis does not answer\nlevel        ") ||
		!strings.HasPrefix(r.Errors, unavailable) || strings.Count(r.Errors, "\n") != 1 {
		t.Errorf("peek: got %+v", r)
	}
	r = sitetest.RunCommand(t, "reset", "--address", a.Addr, "api", "127.0.0.1", "--yes", "--json")
	var answer adminjson.Level
	if err := json.Unmarshal([]byte(r.Out), &answer); err != nil || r.Status != 2 || answer.Level == 0 || answer.From != "node" ||
		!strings.HasPrefix(r.Errors, unavailable) || strings.Count(r.Errors, "\n") != 1 {
		t.Errorf("reset --json: got %+v, %v", r, err)
	}
	r = sitetest.RunCommand(t, "status", "--address", a.Addr)
	if want := "\nWhile a server is not up, on_error applies to its requests: fallback, unless their handler sets another.\n"; !strings.Contains(r.Out, want) {
		t.Errorf("status: got %s", r.Out)
	}
}

// TestHelp guards that help is a command of its own, as it is of caddy, and that it shows what
// --help does.
func TestHelp(t *testing.T) {
	t.Parallel()
	for _, about := range []string{"", "peek"} {
		args := strings.Fields(about)
		want := sitetest.RunCommand(t, append(args, "--help")...)
		if got := sitetest.RunCommand(t, append([]string{"help"}, args...)...); got != want || got.Status != 0 || got.Out == "" {
			t.Errorf("help %s: got %+v, want %+v", about, got, want)
		}
	}
}

// TestCommandsRefuseBadInput guards the one line that a command says to input that
// it can't use, and exit status 1.
func TestCommandsRefuseBadInput(t *testing.T) {
	racetest.SingleGoroutine(t)
	_, a := sitetest.StartWithAdmin(t, sitetest.Config{Site: cliSite})
	address := "--address=" + a.Addr
	nobody := redistest.FreeAddr(t)
	off := sitetest.ConfigFile(t, "{\nadmin off\n}\n:8080 {\n}\n")
	bad := sitetest.ConfigFile(t, ":8080 {\nrate_limit {\nsize none\n}\n}\n")
	good := sitetest.ConfigFile(t, ":8080 {\n"+cliSite+"\n}\n")
	garbage := filepath.Join(sitetest.TempDir(t), "config.json")
	filetest.Write(t, garbage, []byte("no JSON"))
	other := httptest.NewServer(http.NotFoundHandler())
	defer other.Close()
	otherAddr := other.Listener.Addr().String()
	for _, tc := range []struct {
		args []string
		want string
	}{
		{[]string{"help", "levels"}, `unknown command "levels"; use one of `},
		{[]string{"levels"}, `unknown command "levels"; use one of `},
		{[]string{"stat"}, `unknown command "stat"; did you mean status?`},
		{[]string{"chekc"}, `unknown command "chekc"; did you mean check?`},
		{[]string{"ban", address, "tenant", "192.0.2.1"}, `DURATION: "192.0.2.1" is not valid; use a duration behind LIMIT and KEY, such as 10m`},
		{[]string{"ban", address, "tenant"}, `too few arguments; use ban LIMIT KEY... DURATION`},
		{[]string{"unban", address}, `too few arguments; use unban LIMIT KEY...`},
		{[]string{"status", "now"}, `unknown command "now" for "caddy rate-limit status"`},
		{[]string{"status", "--where", "x"}, "unknown flag: --where"},
		{[]string{"status", "--address", nobody}, "cannot reach the admin endpoint at " + nobody + ": connection refused; use --address or --config to name another"},
		{[]string{"status", "--address", "unix//nonexistent/socket"}, "cannot reach the admin endpoint at unix//nonexistent/socket: no such file or directory; use --address or --config to name another"},
		{[]string{"status", "--address", "localhost:1-9"}, `address: "localhost:1-9" is not valid; use one such as localhost:2019 or unix//run/caddy.sock`},
		{[]string{"status", "--address", "foo bar"}, `address: "foo bar" is not valid; use one such as localhost:2019 or unix//run/caddy.sock`},
		{[]string{"status", "--address", "foo bar:2019"}, `address: "foo bar:2019" is not valid; use one such as localhost:2019 or unix//run/caddy.sock`},
		{[]string{"peek", address, "tenant", "a", "\ufffd"}, "key: U+FFFD stands for what is not UTF-8"},
		{[]string{"peek", address, "--key", `"a`}, "key: a double quote begins it, but no quoted text; use "},
		{[]string{"status", "--address", otherAddr}, "the Caddy at " + otherAddr + " has no endpoint for rate limits: it runs without this module, or with an older version"},
		{[]string{"status", "--config", off}, off + ": the admin endpoint is off, and commands need it"},
		{[]string{"status", "--config", "/nonexistent"}, "reading the config: open /nonexistent: no such file or directory"},
		{[]string{"status", "--config", garbage}, garbage + ": not valid JSON; if it is in another format, name it with --adapter, such as --adapter caddyfile"},
		{[]string{"status", "--config", garbage, "--adapter", "toml"}, `adapter: "toml" is not valid; use one that this Caddy has, such as caddyfile`},
		{[]string{"status", "--adapter", "caddyfile"}, "adapter: needs a config file; use --config"},
		{[]string{"peek", address}, "LIMIT: none given; use one, or --client-ip or --key for all limits"},
		{[]string{"reset", address, "--yes"}, "LIMIT: none given; use one, or --client-ip or --key for all limits"},
		{[]string{"peek", address, "", "acme"}, "LIMIT: empty; use one that the command limits lists, or none for all"},
		{[]string{"peek", address, "tenant", "acme", "--key", "eu"}, "key: KEY can't be combined with --key; use one of them"},
		{[]string{"peek", address, "tenant", "acme", "--client-ip", "192.0.2.1"}, "address: can't be combined with limit and key; use one of key and address"},
		{[]string{"peek", address, "--client-ip", "me"}, "address: not valid; use an IP address or a prefix, such as "},
		{[]string{"peek", address, "none", "x"}, "limit: the running config has no such limit; use api, api/search or tenant"},
		{[]string{"peek", address, "tenant", "acme"}, "key: 1 values given; use 2, one for each placeholder in "},
		{[]string{"peek", address, "api", "nobody"}, "key: not valid; use an IP address for {http.vars.client_ip}, or a prefix of 32 bits of IPv4 or 64 of IPv6"},
		{[]string{"reset", address, "api", "127.0.0.1"}, "the input is not a terminal: add --yes to skip the confirmation"},
		{[]string{"top", address, "--limit", "tenant"}, "limit: it does not track its keys; use one with track_top, such as track_top 100"},
		{[]string{"top", address, "-n", "0"}, "n: not valid; use "},
		{[]string{"top", address, "--by", "name"}, "by: not valid; use requests or denied"},
		{[]string{"explain"}, "accepts between 1 and 3 arg(s), received 0"},
		{[]string{"explain", "http://localhost:8080/"}, "config: none given, and there is no Caddyfile in the current directory; use --config with a file"},
		{[]string{"explain", "-c", good, "/path"}, `URL: "/path" is not valid; use one such as https://example.com/search?q=x`},
		{[]string{"explain", "-c", good, "ftp://localhost"}, `URL: "ftp://localhost" is not valid; use one such as https://example.com/search?q=x`},
		{[]string{"explain", "-c", good, "A B", "http://localhost:8080/"}, `METHOD: "A B" is not valid; use one such as GET or POST`},
		{[]string{"explain", "-c", good, "-H", "nothing", "http://localhost:8080/"}, `header: "nothing" is not valid; use a field such as 'X-Api-Key: abc'`},
		{[]string{"explain", "-c", good, "-H", "A: b\nC: d", "http://localhost:8080/"}, `header: "A: b\nC: d" is not valid; use a field such as 'X-Api-Key: abc'`},
		{[]string{"explain", "-c", good, "--client-ip", "me", "http://localhost:8080/"}, `client-ip: "me" is not valid; use an IP address`},
		{[]string{"explain", "-c", bad, "http://localhost:8080/"}, `size: "none" is not valid; use a whole number`},
		{[]string{"check", "-c", bad}, `size: "none" is not valid; use a whole number`},
		{[]string{"check", "-c", garbage}, garbage + ": not valid JSON"},
	} {
		r := sitetest.RunCommand(t, tc.args...)
		if r.Status != 1 || r.Out != "" || !strings.HasPrefix(r.Errors, "Error: ") || strings.Count(r.Errors, "\n") != 1 || !strings.Contains(r.Errors, tc.want) {
			t.Errorf("%q: got status %d, %q, %q\nwant 1 and the line %q", tc.args, r.Status, r.Out, r.Errors, tc.want)
		}
	}
}

// TestCommandsFindCaddyfile guards that commands which read a config take the Caddyfile of
// the current directory if they are given none, and that those which can take one as an
// argument, too.
func TestCommandsFindCaddyfile(t *testing.T) {
	t.Parallel()
	file, log := sitetest.ConfigFile(t, strings.Replace(replaySite, "example.com", "http://:8080", 1)), replayLog(t)
	here, elsewhere := filepath.Dir(file), sitetest.TempDir(t)
	for _, tc := range []struct {
		name string
		dir  string
		args []string
		want string
	}{
		{"check", here, []string{"check"}, "No problems found."},
		{"explain", here, []string{"explain", "http://localhost:8080/"}, "\napi "},
		{"explain with a method", here, []string{"explain", "POST", "http://localhost:8080/"}, "\napi "},
		{"explain with a body", here, []string{"explain", "--data", "email=Alice@Example.com", "http://localhost:8080/"}, "POST http://localhost:8080/"},
		{"replay", here, []string{"replay", log}, "\napi "},
		{"check FILE", elsewhere, []string{"check", file}, "No problems found."},
		{"explain FILE", elsewhere, []string{"explain", file, "http://localhost:8080/"}, "\napi "},
		{"explain FILE with a method", elsewhere, []string{"explain", file, "POST", "http://localhost:8080/"}, "\napi "},
		{"explain --config", elsewhere, []string{"explain", "--config", file, "post", "http://localhost:8080/"}, "post http://localhost:8080/"},
		{"check, without one", elsewhere, []string{"check"}, ""},
		{"explain, without one", elsewhere, []string{"explain", "http://localhost:8080/"}, ""},
		{"replay, without one", elsewhere, []string{"replay", log}, ""},
	} {
		got := sitetest.RunCommandIn(t, tc.dir, tc.args...)
		if tc.want == "" {
			got.Want(t, 1, "Error: config: none given, and there is no Caddyfile in the current directory; use --config with a file\n")
		} else if got.Status != 0 || !strings.Contains(got.Out, tc.want) {
			t.Errorf("%s: got %+v, want %q", tc.name, got, tc.want)
		}
	}
	sitetest.RunCommandIn(t, here, "check", "--config", file, "Other").Want(t, 1,
		"Error: config: \"Other\" can't be combined with --config \""+file+"\"; use one of them\n")
}

// TestCommandsEscapeKeys guards that keys, which clients choose, are escaped: they
// could drive the operator's terminal.
func TestCommandsEscapeKeys(t *testing.T) {
	s, a := sitetest.StartWithAdmin(t, sitetest.Config{Site: "rate_limit api {\nsize 5\nkey {query.k}\ntrack_top 5\n}\nrespond ok"})
	s.Get("/?k=%1b%5b2J%e2%80%ae")
	for _, args := range [][]string{{"top", "--by", "requests"}, {"top", "--by", "requests", "--json"}} {
		r := sitetest.RunCommand(t, append(args, "--address", a.Addr)...)
		if r.Status != 0 || strings.ContainsAny(r.Out, "\x1b\u202e") || !strings.Contains(r.Out, `\u202e`) {
			t.Errorf("%q: got %q", args, r.Out)
		}
	}
}

// TestCommandsComplete guards that limits are completed by asking the server.
func TestCommandsComplete(t *testing.T) {
	_, a := sitetest.StartWithAdmin(t, sitetest.Config{Site: cliSite, Sites: "http://127.0.0.1:" + freePort(t) + " {\n" + cliSite + "\n}"})
	for _, args := range [][]string{{"peek", ""}, {"reset", ""}, {"top", "--limit", ""}} {
		want := "api\napi/search\ntenant\n:4\n"
		if args[0] == "top" {
			want = "api\n:4\n" // the only one with track_top
		}
		line := append([]string{"__complete", "rate-limit", args[0], "--address", a.Addr}, args[1:]...)
		out, err := caddytest.Command(t.Context(), line...).Output()
		if err != nil || !strings.HasPrefix(string(out), want) {
			t.Errorf("%q: got %q, %v", line, out, err)
		}
	}
}

// freePort returns a port without a listener.
func freePort(t testing.TB) string {
	_, port, err := net.SplitHostPort(redistest.FreeAddr(t))
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// TestLimitsOfSeveralSites guards that limits shows a limit of several sites once,
// with all of them, and that the counts of limits that share a path stand once.
func TestLimitsOfSeveralSites(t *testing.T) {
	site := `
	rate_limit api {
		size 5
	}
	rate_limit /one {
		size 7
	}
	rate_limit /two {
		size 8
	}
	respond ok`
	port := freePort(t)
	s, a := sitetest.StartWithAdmin(t, sitetest.Config{Unnamed: true, Site: site, Sites: "http://a.localhost:" + port + " {\nbind 127.0.0.1\n" + site + "\n}"})
	s.Get("/one")
	sitetest.RunCommand(t, "limits", "--address", a.Addr).Want(t, 0, ""+
		"LIMIT      ALGORITHM     SIZE  RATE OR WINDOW  COST  KEY                    SITE                    MATCH      BUCKETS  ADMITTED  DENIED\n"+
		"default    leaky_bucket     7  1 each 1s          1  {http.vars.client_ip}  127.0.0.1, a.localhost  path /one        1         1       0\n"+
		"default#2  leaky_bucket     8  1 each 1s          1  {http.vars.client_ip}  127.0.0.1, a.localhost  path /two        0\n"+
		"api        leaky_bucket     5  1 each 1s          1  {http.vars.client_ip}  127.0.0.1, a.localhost  -                1         1       0\n"+
		"Counts of requests are totals for all limits with the same path, shown in its first row.\n")
}

// TestLimitsShowMatchers guards that limits shows all that a request must match for a
// limit to apply: of its routes, of the limits around it and of its own.
func TestLimitsShowMatchers(t *testing.T) {
	_, a := sitetest.StartWithAdmin(t, sitetest.Config{Site: `
	@api {
		path /api/* /v2/*
		not method GET HEAD
	}
	@either {
		not {
			path /x
			host other.test
		}
		not path /y
	}
	handle /app/* {
		rate_limit @api outer {
			match method POST
			limit inner {
				match {
					path_regexp ^/api/[0-9]
					protocol https
				}
				size 5
			}
		}
		rate_limit @either two {
			size 5
		}
	}
	respond ok`})
	r := sitetest.RunCommand(t, "limits", "--address", a.Addr)
	for _, want := range []string{
		"  path /app/*; not (method GET HEAD) and path /api/* /v2/*; method POST; path_regexp {\"pattern\":\"^/api/[0-9]\"} and protocol \"https\"  ",
		"  path /app/*; not (host other.test and path /x or path /y)  ",
	} {
		if !strings.Contains(r.Out, want) {
			t.Errorf("got %s%s\nwant in it %s", r.Out, r.Errors, want)
		}
	}
}

// TestCommandsFailOnFullDisks guards that a command whose output can't be written
// exits with status 1.
func TestCommandsFailOnFullDisks(t *testing.T) {
	_, a := sitetest.StartWithAdmin(t, sitetest.Config{Site: cliSite})
	file, log := sitetest.ConfigFile(t, "http://:8080 {\n"+cliSite+"\n}"), logFile(t, logLine(0, "192.0.2.1", "/"))
	for _, args := range [][]string{
		{"status", "--address", a.Addr},
		{"limits", "--address", a.Addr},
		{"limits", "--address", a.Addr, "--json"},
		{"peek", "--address", a.Addr, "api", "192.0.2.1"},
		{"reset", "--address", a.Addr, "api", "192.0.2.1", "--yes"},
		{"top", "--address", a.Addr, "--limit", "api"},
		{"explain", "--config", file, "http://localhost:8080/"},
		{"check", "--config", file}, // which also has advice
		{"replay", "--config", file, log},
		{"replay", "--config", file, log, "--json"},
	} {
		full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		var errs bytes.Buffer
		cmd := caddytest.Command(t.Context(), append([]string{"rate-limit"}, args...)...)
		cmd.Stdout, cmd.Stderr = full, &errs
		_ = cmd.Run()
		full.Close()
		if status := cmd.ProcessState.ExitCode(); status != 1 || !strings.Contains(errs.String(), "no space left on device\n") || strings.Count(errs.String(), "\n") != 1 {
			t.Errorf("%q: got status %d, %q", args, status, errs.String())
		}
	}
}

// TestPeekOfFullConcurrency guards that nobody is told a time at which requests in progress
// end, in memory and in Redis: it is not known.
func TestPeekOfFullConcurrency(t *testing.T) {
	for name, global := range map[string]func() string{
		"memory": func() string { return "" },
		"redis":  func() string { return sitetest.RedisGlobal(redistest.Start(t).Addr, sitetest.LongTimeout) },
	} {
		t.Run(name, func(t *testing.T) {
			arrived, done := make(chan struct{}, 2), make(chan struct{})
			upstream := sitetest.NewUpstream(t, func(http.ResponseWriter, *http.Request) {
				arrived <- struct{}{}
				<-done
			})
			s, a := sitetest.StartWithAdmin(t, sitetest.Config{Global: global(), Site: "rate_limit inflight {\nkey all\nconcurrency 2\n}\nreverse_proxy " + upstream})
			peek := func() map[string]any { return a.Ask("POST", "peek", `{"limit": "inflight"}`) }
			ended := make(chan struct{})
			for range 2 {
				go func() {
					_, _ = sitetest.Ask(context.WithoutCancel(t.Context()), s.URL("/"))
					ended <- struct{}{}
				}()
				<-arrived
			}
			got := peek()
			sitetest.WantJSON(t, got, `{"remaining": 0, "held": 2, "empties_in": 0, "in_progress": true, "retry_after": null}`)
			r := sitetest.RunCommand(t, "peek", "--address", a.Addr, "inflight")
			if !strings.Contains(r.Out, "\nretry after  a request in progress ends\n") || strings.Contains(r.Out, "µs") {
				t.Errorf("peek: got %+v", r)
			}
			close(done)
			<-ended
			<-ended
			sitetest.Eventually(t, "the end of the requests", func() bool { return peek()["held"] == 0. })
			sitetest.WantJSON(t, peek(), `{"remaining": 2, "in_progress": null, "retry_after": 0}`)
		})
	}
}
