package check_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2/caddyconfig"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/advice"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/check"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/configtest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/filetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// dryLimit is a rate_limit block for a limit with a name.
func dryLimit(name string, options ...string) string {
	return "rate_limit " + name + " {\nrate 5/1s\n" + strings.Join(options, "\n") + "\n}\n"
}

// basicAuth is a directive that authenticates.
const basicAuth = "basic_auth {\nbob $2a$14$Zkx19XLiW6VYouLHR5NmfOFU0z2GTNmpkT/5qqR7hx4IjWJPDhjvG\n}\n"

// TestCheck guards which configs get which advice, and that others get none.
func TestCheck(t *testing.T) {
	const site = "http://:8080 {\n"
	for _, tc := range []struct {
		name, config string
		want         []string // the beginning of each piece of advice
	}{
		{"nothing wrong", site + dryLimit("a") + "}", nil},
		{"no limits", site + "respond ok\n}", nil},
		{"key by header", site + dryLimit("a", "key {header.X-Key}") + "}",
			[]string{"limit a: Its key has {http.request.header.X-Key}, which clients can set to anything"}},
		{"key by address and path", site + dryLimit("a", "key {client_ip}{path}") + "}",
			[]string{"limit a: Its key has {http.request.uri.path}, which clients can set to anything, so they can get a fresh bucket"}},
		{"key by host, which is not case-sensitive", site + dryLimit("a", "key {host}") + "}",
			[]string{"limit a: Its key has {http.request.host}, which clients can set to anything, so they can get a fresh bucket"}},
		{"key by part of the host", site + dryLimit("a", "key {labels.0}") + "}",
			[]string{"limit a: Its key has {http.request.host.labels.0}, which clients can set to anything"}},
		{"key by header, bounded by host only", site + "rate_limit {\nlimit a {\nrate 5/1s\nkey {header.X-Key}\n}\nlimit b {\nrate 50/1s\nkey {host}\n}\n}\n}",
			[]string{"limit a: Its key has", "limit b: Its key has"}},
		{"key by header, bounded", site + "rate_limit {\nlimit a {\nrate 5/1s\nkey {header.X-Key}\n}\nlimit b {\nrate 50/1s\n}\n}\n}", nil},
		{"key by header, bounded in another block", site + "route {\n" + dryLimit("b") + dryLimit("a", "key {header.X-Key}") + "}\n}", nil},
		{"key by header, bounded elsewhere only", site + "handle /x {\n" + dryLimit("b") + "}\nhandle {\n" + dryLimit("a", "key {header.X-Key}") + "}\n}",
			[]string{"limit a: Its key has"}},
		{"key by header, bounded for some only", site + "rate_limit {\nlimit a {\nrate 5/1s\nkey {header.X-Key}\n}\nlimit b {\nmatch method POST\nrate 50/1s\n}\n}\n}",
			[]string{"limit a: Its key has"}},
		{"key by user", site + "route {\n" + basicAuth + dryLimit("a", "key {http.auth.user.id}") + "}\n}", nil},
		{"key by user, subroutes", site + "route {\nroute {\n" + basicAuth + "}\nhandle {\n" + dryLimit("a", "key {http.auth.user.id}") + "}\n}\n}", nil},
		{"key by user, of another handle block", site + "handle /x {\n" + basicAuth + "}\nhandle {\n" + dryLimit("a", "key {http.auth.user.id}") + "}\n}",
			[]string{"limit a: Its key has {http.auth.user.id}, and no authentication comes before it"}},
		{"key by user, in Caddy's order", site + basicAuth + dryLimit("a", "key {http.auth.user.id}") + "}",
			[]string{"limit a: Its key has {http.auth.user.id}, which basic_auth sets after this limit"}},
		{"key by connection", site + dryLimit("a", "key {remote}") + "}",
			[]string{"limit a: Its key has {http.request.remote}, which has the client's port"}},
		{"key by port", site + dryLimit("a", "key {client_ip}:{remote_port}") + "}",
			[]string{"limit a: Its key has {http.request.remote.port}, which has the client's port"}},
		{"key by request", site + dryLimit("a", "key {uuid}") + "}",
			[]string{"limit a: Its key has {http.request.uuid}, which is different for each request"}},
		{"key by time", site + dryLimit("a", "key {client_ip}{time.now.unix}{http.request.duration}") + "}",
			[]string{"limit a: Its key has {time.now.unix}, which changes", "limit a: Its key has {http.request.duration}, which changes"}},
		{"key by year", site + dryLimit("a", "key {client_ip}{time.now.year}") + "}", nil},
		{"key that Caddy lacks", site + dryLimit("a", "key {http.request.remote_ip}") + "}",
			[]string{"limit a: Its key has {http.request.remote_ip}, which is not one of Caddy's placeholders"}},
		{"key without braces", site + dryLimit("a", "key client_ip") + "}",
			[]string{`limit a: Its key is the text "client_ip", not a placeholder`}},
		{"key of another server without braces", site + dryLimit("a", "key $binary_remote_addr") + "}",
			[]string{`limit a: Its key is the text "$binary_remote_addr", not a placeholder`}},
		{"one bucket for all", site + dryLimit("a", "key all") + "}", nil},
		{"one ban for all", site + dryLimit("a", "key all\nban 1h") + "}", []string{"limit a: It bans its key, which all requests share"}},
		{"one ban for each", site + dryLimit("a", "key {client_ip}\nban 1h") + "}", nil},
		{"key of a zone", site + "rate_limit {\nzone a {\nkey {remote_ip}\nevents 5\nwindow 1m\n}\n}\n}",
			[]string{"limit a: Its key has {remote_ip}, which is not one of Caddy's placeholders"}},
		{"zone without a key", site + "rate_limit {\nzone a {\nevents 5\nwindow 1m\n}\n}\n}", nil},
		{"key by header, bounded by what nobody shares", site + "rate_limit {\nlimit a {\nrate 5/1s\nkey {header.X-Key}\n}\nlimit b {\nrate 50/1s\nkey {remote}\n}\n}\n}",
			[]string{"limit b: Its key has {http.request.remote}", "limit a: Its key has {http.request.header.X-Key}, which clients can"}},
		{"drips by header", site + "rate_limit a {\nsize 5\ndrip_rate {header.X-Rate}\n}\n}",
			[]string{"limit a: Its drip_rate has {http.request.header.X-Rate}, which clients can set to anything: each of its values"}},
		{"size by header", site + "rate_limit a {\nsize {header.X-Size}\n}\n}",
			[]string{"limit a: Its size has {http.request.header.X-Size}, which clients can set to anything: so they choose"}},
		{"window by header", site + "rate_limit a {\nalgorithm fixed_window\nsize 5\nwindow {header.X-W}\n}\n}",
			[]string{"limit a: Its window has {http.request.header.X-W}, which clients can set to anything: each of its values"}},
		{"window's size by header", site + "rate_limit a {\nalgorithm fixed_window\nsize {header.X-S}\nperiod day\n}\n}",
			[]string{"limit a: Its size has {http.request.header.X-S}, which"}},
		{"tokens by header", site + "rate_limit a {\nalgorithm token_bucket\nsize {header.X-C}\ndrip_rate {header.X-R}\ndrip_size {header.X-S}\n}\n}",
			[]string{
				"limit a: Its drip_rate has {http.request.header.X-R}, which",
				"limit a: Its drip_size has {http.request.header.X-S}, which",
				"limit a: Its size has {http.request.header.X-C}, which clients can set to anything: so they choose",
			}},
		{"factor by header", site + "rate_limit a {\nsize 5\nfactor {header.X-F}\n}\n}",
			[]string{"limit a: Its factor has {http.request.header.X-F}, which clients can set to anything: so they choose"}},
		{"key by header, bounded by what clients choose", site + "rate_limit {\nlimit a {\nrate 5/1s\nkey {header.X-Key}\n}\nlimit b {\nsize {header.X-Size}\n}\n}\n}",
			[]string{"limit b: Its size has", "limit a: Its key has"}},
		{"key by header, bounded at a rate that clients choose", site + "rate_limit {\nlimit a {\nrate 5/1s\nkey {header.X-Key}\n}\nlimit b {\nsize 5\ndrip_rate {header.X-Rate}\n}\n}\n}",
			[]string{"limit b: Its drip_rate has", "limit a: Its key has"}},
		{"size by variable", site + "vars size 5\nrate_limit a {\nsize {vars.size}\n}\n}", nil},
		{"size 1 for all", site + "rate_limit a {\nsize 1\n}\n}",
			[]string{"limit a: It applies to all requests of the site, and its bucket holds a single one"}},
		{"max_delay that is a moment too short", site + "rate_limit a {\nrate 3/s\nmax_delay 666ms\n}\n}", []string{"limit a: Its max_delay, 666ms, is slightly too short for one more request to wait."}},
		{"max_delay that is long enough", site + "rate_limit a {\nrate 3/s\nmax_delay 667ms\n}\nrate_limit b {\nrate 3/s\nmax_delay 1s\n}\nrate_limit c {\nrate 1000/s\nmax_delay 1s\n}\nrate_limit d {\nrate 3/s\nmax_delay 600ms\n}\n}", nil},
		{"size 1 for some", site + "rate_limit /login* a {\nsize 1\n}\n}", nil},
		{"size 1 that failures take up only", site + "rate_limit a {\nsize 1\ncount status 401\nhold off\n}\n}", nil},
		{"size 1 whose requests wait", site + "rate_limit a {\nsize 1\nmax_delay 5s\n}\n}", nil},
		{"concurrency 1 whose requests wait", site + "rate_limit a {\nconcurrency 1\nmax_delay 5s\n}\n}", nil},
		{"concurrency 1", site + "rate_limit a {\nconcurrency 1\n}\n}", []string{"limit a: It applies to all requests of the site, and its bucket holds a single one"}},
		{"size 1 and more with soft", site + "rate_limit a {\nsize 1\nsoft 50\n}\n}", nil},
		{"size 1 that only counts", site + "rate_limit a {\nsize 1\ndry_run\n}\n}", nil},
		{"size 1 in a handle block", site + "handle /login {\nrate_limit a {\nsize 1\n}\n}\n}", nil},
		{"address of the proxy", "{\nservers {\ntrusted_proxies static private_ranges\ntrusted_proxies_strict\n}\n}\n" + site + dryLimit("a", "key {remote_host}") + "}",
			[]string{"limit a: Its key is the address of the connection, and the server has trusted proxies"}},
		{"addresses of connections exempted", "{\nservers {\ntrusted_proxies static private_ranges\ntrusted_proxies_strict\n}\n}\n" + site + "@limited not remote_ip private_ranges\n" +
			"rate_limit @limited a 3/m\nrate_limit b {\nmatch not remote_ip 10.0.0.1\nsize 5\n}\n}",
			[]string{"limit a: A matcher with not remote_ip exempts", "limit b: A matcher with not remote_ip exempts"}},
		{"addresses of clients exempted", "{\nservers {\ntrusted_proxies static private_ranges\ntrusted_proxies_strict\n}\n}\n" + site + "rate_limit a {\nmatch not client_ip 10.0.0.1\nsize 5\n}\n}", nil},
		{"behind a proxy that is not trusted", "http://localhost:8080 {\nbind 127.0.0.1\n" + dryLimit("a") + "}",
			[]string{"server srv0: It only listens on this host, and has no trusted proxies"}},
		{"behind a trusted proxy", "{\nservers {\ntrusted_proxies static private_ranges\ntrusted_proxies_strict\n}\n}\nhttp://localhost:8080 {\nbind 127.0.0.1\n" + dryLimit("a") + "}", nil},
		{"equal and without a name", "http://:8080 {\nhandle /a {\nrate_limit {\nrate 5/1s\n}\n}\nhandle /b {\nrate_limit {\nrate 5/1s\n}\n}\n}", nil},
		{"equal within those without a name", "http://:8080 {\nhandle /a {\nrate_limit {\nrate 5/1s\nlimit in {\nmatch method POST\nrate 3/1s\n}\n}\n}\nhandle /b {\nrate_limit {\nrate 6/1s\nlimit in {\nmatch method POST\nrate 3/1s\n}\n}\n}\n}", nil},
		{"not shared", "http://:8080 {\nhandle /a {\nrate_limit {\nrate 5/1s\n}\n}\nhandle /b {\nrate_limit {\nrate 6/1s\n}\n}\n}", nil},
		{"unreachable", site + "route {\nrespond ok\n" + dryLimit("a") + "}\n}",
			[]string{"limit a: No request reaches it: the respond directive before it answers each one."}},
		{"on_error deny", "{\nrate_limit {\nredis 127.0.0.1:1\non_error deny\n}\n}\n" + site + dryLimit("a") + "}",
			[]string{"server srv0: With on_error deny, clients get status 503"}},
		{"on_error deny without redis", "{\nrate_limit {\non_error deny\n}\n}\n" + site + dryLimit("a") + "}", nil},
		{"open redis", "{\nrate_limit {\nredis redis.example.com:6379\n}\n}\n" + site + dryLimit("a") + "}",
			[]string{"redis: It is used without a password"}},
		{"redis with a password", "{\nrate_limit {\nredis redis.example.com:6379 {\npassword secret\n}\n}\n}\n" + site + dryLimit("a") + "}", nil},
		{"lease of a larger limit without redis", site + "rate_limit a {\nsize 100\nconsistency lease 100ms\n}\n}",
			[]string{"limit a: Its consistency, lease 100ms, has no effect without redis"}},
		{"lease", "{\nrate_limit {\nredis 127.0.0.1:1\n}\n}\n" + site + "rate_limit a {\nsize 100\nconsistency lease 100ms\n}\n}", nil},
		{"child under a tighter parent", site + "rate_limit p {\nsize 6\ndrip_rate 1500ms\nlimit c {\nsize 16\ndrip_rate 1s\n}\n}\n}",
			[]string{"limit p/c: It denies no client that limit p does not deny"}},
		{"tighter sibling", site + "rate_limit {\nlimit a {\nrate 100/s\n}\nlimit b {\nrate 10/s\n}\n}\n}", []string{"limit a: It denies no client that limit b does not deny"}},
		{"tighter sibling for all", site + "rate_limit {\nlimit api {\nrate 100/10s\n}\nlimit auth {\nrate 5/60s\n}\n}\n}", []string{"limit api: It denies no client that limit auth does not deny"}},
		{"tighter zone", site + "rate_limit {\nzone api {\nkey {client_ip}\nevents 100\nwindow 10s\n}\nzone auth {\nkey {client_ip}\nevents 5\nwindow 60s\n}\n}\n}",
			[]string{"limit api: It denies no client that limit auth does not deny"}},
		{"equal siblings", site + "rate_limit {\nlimit a {\nrate 10/s\n}\nlimit b {\nrate 10/s\n}\n}\n}", []string{"limit b: It denies no client that limit a does not deny"}},
		{"tighter limit of all", site + "rate_limit {\nlimit a {\nrate 100/s\n}\nlimit b {\nkey all\nrate 10/s\n}\n}\n}", []string{"limit a: It denies no client that limit b does not deny"}},
		{"tighter limit of some", site + "rate_limit {\nlimit a {\nrate 100/s\n}\nlimit b {\nmatch method POST\nrate 10/s\n}\n}\n}", nil},
		{"tighter limit of all for some", site + "rate_limit {\nlimit a {\nmatch method POST\nrate 100/s\n}\nlimit b {\nrate 10/s\n}\n}\n}", []string{"limit a: It denies no client that limit b does not deny"}},
		{"tighter limit of a user", site + "route {\n" + basicAuth + "rate_limit {\nlimit a {\nrate 100/s\n}\nlimit b {\nkey {http.auth.user.id}\nrate 10/s\n}\n}\n}\n}", nil},
		{"tighter limit of a network", site + "rate_limit {\nlimit a {\nrate 100/s\n}\nlimit b {\nipv4_prefix 24\nrate 10/s\n}\n}\n}", nil},
		{"burst and rate", site + "rate_limit {\nlimit a {\nsize 10\ndrip_rate 100ms\n}\nlimit b {\nsize 100\ndrip_rate 1s\n}\n}\n}", nil},
		{"windows of two lengths", site + "rate_limit {\nlimit a {\nalgorithm fixed_window\nsize 10\nwindow 1s\n}\nlimit b {\nalgorithm fixed_window\nsize 100\nwindow 1m\n}\n}\n}", nil},
		{"windows that never fill", site + "rate_limit {\nlimit a {\nalgorithm fixed_window\nsize 10\nwindow 1s\n}\nlimit b {\nalgorithm fixed_window\nsize 600\nwindow 1m\n}\n}\n}", []string{"limit b: It denies no client"}},
		{"tighter limit that only counts", site + "rate_limit {\nlimit a {\nrate 100/s\n}\nlimit b {\nrate 10/s\ndry_run\n}\n}\n}", nil},
		{"tighter limit of failures", site + "rate_limit {\nlimit a {\nrate 100/s\n}\nlimit b {\nrate 10/s\ncount status 404\n}\n}\n}", nil},
		{"tighter limit that has requests wait", site + "rate_limit {\nlimit a {\nrate 100/s\n}\nlimit b {\nrate 10/s\nmax_delay 1s\n}\n}\n}", nil},
		{"limit that costs more", site + "rate_limit {\nlimit a {\nrate 100/s\ncost 20\n}\nlimit b {\nrate 10/s\n}\n}\n}", nil},
		{"limit that counts denials", site + "rate_limit {\nlimit a {\nrate 100/s\ncount_denied\n}\nlimit b {\nrate 10/s\n}\n}\n}", nil},
		{"requests in progress", site + "rate_limit {\nlimit a {\nconcurrency 100\n}\nlimit b {\nrate 10/s\n}\n}\n}", nil},
		{"path with both forms", site + "rate_limit a {\nmatch path /login /login/\nsize 5\n}\n}", nil},
		{"path with a wildcard", site + "rate_limit a {\nmatch path /login* /a/* /A /b/\nsize 5\n}\n}", nil},
		{"path of the root and of files", site + "rate_limit a {\nmatch path / /feed.xml *login {vars.path}\nsize 5\n}\n}", nil},
		{"path that is exempt", site + "rate_limit a {\nmatch not path /health\nsize 5\n}\n}", nil},
		{"path of a handle block", site + "handle /login {\nrate_limit a {\nsize 5\n}\n}\n}", nil},
		{"path whose other form is redirected", site + "redir /login/ /login\nroute {\nredir /login/ /login\nrate_limit a {\nmatch path /login\nsize 5\n}\n}\n}", nil},
		{"key by map to constants", site + "map {header.X-Plan} {plan} {\npaid paid\n~^(a|b)$ $1\ndefault free\n}\n" + dryLimit("a", "key {plan}") + "}", nil},
		{"key by map", site + "map {header.X-Plan} {plan} {\n~^x(.*)$ $1\ndefault free\n}\n" + dryLimit("a", "key {plan}") + "}",
			[]string{"limit a: Its key has {plan}, which is made from {http.request.header.X-Plan}, which clients can set to anything"}},
		{"key by the default of map", site + "map {host} {plan} {\na.com a\ndefault {cookie.id}\n}\n" + dryLimit("a", "key {plan}") + "}",
			[]string{"limit a: Its key has {plan}, which is made from {http.request.cookie.id}, which"}},
		{"key by vars of map", site + "map {path} {part} {\n~/(.*) $1\n}\nvars part {part}\n" + dryLimit("a", "key {vars.part}") + "}",
			[]string{"limit a: Its key has {http.vars.part}, which is made from {http.request.uri.path}, which"}},
		{"key by vars that another takes the place of", site + "route {\nvars id {cookie.id}\nvars id {client_ip}\n" + dryLimit("a", "key {vars.id}") + "}\n}", nil},
		{"key by vars for some", site + "route {\nvars id {client_ip}\nvars /a* id {cookie.id}\n" + dryLimit("a", "key {vars.id}") + "}\n}",
			[]string{"limit a: Its key has {http.vars.id}, which is made from {http.request.cookie.id}, which"}},
		{"key by a field that is made from a cookie", site + "route {\nvars id {cookie.id}\nrequest_header X-Id {vars.id}\n" + dryLimit("a", "key {header.X-Id}") + "}\n}",
			[]string{"limit a: Its key has {http.request.header.X-Id}, which is made from {http.request.cookie.id}, which"}},
		{"key by header, bounded by what is chosen", site + "vars id {cookie.id}\nrate_limit {\nlimit a {\nrate 5/1s\nkey {header.X-Key}\n}\nlimit b {\nrate 50/1s\nkey {vars.id}\n}\n}\n}",
			[]string{"limit a: Its key has", "limit b: Its key has"}},
		{"size by a variable that clients choose", site + "vars size {query.size}\nrate_limit a {\nsize {vars.size}\n}\n}",
			[]string{"limit a: Its size has {http.request.uri.query.size}, which clients can set to anything"}},
		{"size by map to constants", site + "map {header.X-Plan} {size} {\npaid 50\ndefault 5\n}\nrate_limit a {\nsize {size}\n}\n}", nil},
		{"off", site + "rate_limit a {\nsize 1\nfactor 0\nkey {header.X-Key}\n}\n}", nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			d := configtest.LoadDry(t, tc.config)
			if err := d.Validate(); err != nil {
				t.Fatal(err)
			}
			found := check.Advice(d)
			if !slices.EqualFunc(found, tc.want, func(got advice.Advice, want string) bool {
				return strings.HasPrefix(got.About()+": "+got.Problem, want) && got.Remedy != ""
			}) {
				t.Errorf("got %+v, want %q", found, tc.want)
			}
		})
	}
}

// TestCheckSharedInJSON guards that limits which a config in JSON does not name, and which
// are equal, are reported to share their buckets.
func TestCheckSharedInJSON(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ first, second, want string }{
		{"rate 5/1s", "rate 5/1s", "warning: limit default: Several limits without a name, or nested in one without a name, have equal keys and numbers"},
		{"rate 5/1s\nlimit in {\nmatch method POST\nrate 3/1s\n}", "rate 6/1s\nlimit in {\nmatch method POST\nrate 3/1s\n}", "warning: limit default/in: Several limits without a name, or nested in one without a name, have equal keys and numbers"},
		{"rate 5/1s", "rate 6/1s", "No problems found."},
	} {
		text, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte("http://:8080 {\nhandle /a {\nrate_limit {\n"+tc.first+"\n}\n}\nhandle /b {\nrate_limit {\n"+tc.second+"\n}\n}\n}\n"), nil)
		if err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(sitetest.TempDir(t), "caddy.json")
		filetest.Write(t, file, sitetest.GivenNames.ReplaceAllLiteral(text, nil))
		r := sitetest.RunCommand(t, "check", "--config", file)
		if !strings.HasPrefix(strings.Join(strings.Fields(r.Out), " "), tc.want) {
			t.Errorf("%s and %s: got %+v, want %s", tc.first, tc.second, r, tc.want)
		}
	}
}

// TestCheckCommand guards what the command prints and its exit status.
func TestCheckCommand(t *testing.T) {
	t.Parallel()
	file := sitetest.ConfigFile(t, "http://:8080 {\n"+dryLimit("a", "key {header.X-Key}")+"}")
	const want = `warning: limit a: Its key has {http.request.header.X-Key}, which clients can set
  to anything, so they can get a fresh bucket for each request. Use a key that
  they can't choose, such as {client_ip} or, behind authentication,
  {http.auth.user.id}, or add a limit by {client_ip} to the block, with a rate
  that several honest clients share. [key_chosen]

1 warning.
`
	sitetest.RunCommand(t, "check", "--config", file).Want(t, 3, want)
	r := sitetest.RunCommand(t, "check", "--config", file, "--json")
	var c struct{ Advice []any }
	if err := json.Unmarshal([]byte(r.Out), &c); err != nil || r.Status != 3 || len(c.Advice) != 1 {
		t.Errorf("with --json: %v, %+v", err, r)
	}
	sitetest.RunCommand(t, "check", "--config", file, "--redis", "--json")
	sitetest.RunCommand(t, "check", "--config", sitetest.ConfigFile(t, "http://:8080 {\n"+dryLimit("a")+"}"), "--redis").Want(t, 0, ""+
		"No problems found.\nNote: The config has no Redis to check.\n")
}

// TestCheckTellsMistakesFromWarnings guards the exit status, by which CI may let pass what may be
// meant, and that advice which the config says is meant is not given: in its block, beside zones, and
// in the global option for what is in no block.
func TestCheckTellsMistakesFromWarnings(t *testing.T) {
	t.Parallel()
	const (
		mistake = "rate_limit a {\nrate 5/1s\nmatch method GET,POST\n%s}\n"
		warning = "rate_limit b {\nrate 5/1s\nmatch path /login\n%s}\n"
		zone    = "rate_limit {\nzone z {\nkey {header.X-Key}\nevents 5\nwindow 1m\n}\n%s}\n"
	)
	for _, tc := range []struct {
		global, limits string
		status         int
		end            string
	}{
		{"", fmt.Sprintf(mistake, "") + fmt.Sprintf(warning, ""), 2, "1 mistake, 1 warning."},
		{"", fmt.Sprintf(mistake, "ignore_advice unmatched\n") + fmt.Sprintf(warning, ""), 3, "1 warning."},
		{"", fmt.Sprintf(mistake, "ignore_advice path_form\n") + fmt.Sprintf(warning, "ignore_advice unmatched\n"), 2, "1 mistake, 1 warning."},
		{"", fmt.Sprintf(mistake, "ignore_advice path_form unmatched\n") + fmt.Sprintf(warning, "ignore_advice path_form\n"), 0, "No problems found."},
		{"ignore_advice path_form unmatched", fmt.Sprintf(mistake, "") + fmt.Sprintf(warning, ""), 0, "No problems found."},
		{"", fmt.Sprintf(zone, ""), 3, "1 warning."},
		{"", fmt.Sprintf(zone, "ignore_advice key_chosen\n"), 0, "No problems found."},
		{"redis redis.example.com\non_error deny", fmt.Sprintf(mistake, "ignore_advice unmatched\n"), 3, "2 warnings."},
		{"redis redis.example.com\non_error deny\nignore_advice redis_open unavailable", fmt.Sprintf(mistake, "ignore_advice unmatched\n"), 0, "No problems found."},
	} {
		text := "{\nrate_limit {\n" + tc.global + "\n}\n}\nhttp://:8080 {\n" + tc.limits + "reverse_proxy 127.0.0.1:1\n}"
		r := sitetest.RunCommand(t, "check", "--config", sitetest.ConfigFile(t, text))
		if r.Status != tc.status || !strings.HasSuffix(r.Out, tc.end+"\n") {
			t.Errorf("%s\ngot %+v, want status %d and %s", text, r, tc.status, tc.end)
		}
	}
}

// TestCheckAsksWhoAnswers guards that a path has no other form where what answers behind the limit is
// known to send that elsewhere, and that one where an application may answer has.
func TestCheckAsksWhoAnswers(t *testing.T) {
	t.Parallel()
	const limit, app = "rate_limit a {\nrate 5/1s\nmatch path /callback\n}\n", "reverse_proxy 127.0.0.1:1\n"
	for _, tc := range []struct {
		site string
		want bool
	}{
		{app, true},
		{"respond ok", true},
		{"handle /callback* {\n" + app + "}\nrespond 404", true},
		{"handle /callback {\nrespond ok\n}\nhandle {\n" + app + "}", true},
		{"@post method POST\nrespond @post 404\n" + app, true},
		{"handle_path /callback* {\n" + app + "}", true},
		{"try_files {path} /index.php\n" + app, true},
		{"handle /callback {\n" + app + "}\nhandle {\nrespond 404\n}", false},
		{"handle /callback {\n" + app + "}\nhandle {\nerror 404\n}", false},
		{"handle /callback {\n" + app + "}\nhandle {\nabort\n}", false},
		{"@api path /callback /token\nreverse_proxy @api 127.0.0.1:1\nfile_server", false},
		{"redir /callback/ /callback\n" + app, false},
		{"handle /callback/ {\nredir * /callback\n}\nhandle {\n" + app + "}", false},
		{"@not not path /callback\nrespond @not 404\n" + app, true}, // behind a matcher of not, which is not known to take all
		{"@others {\nnot path /callback/\n}\nreverse_proxy @others 127.0.0.1:1\nfile_server", false},
		{"file_server", false},
	} {
		d := configtest.LoadDry(t, "http://:8080 {\nroute {\n"+limit+tc.site+"\n}\n}")
		if err := d.Validate(); err != nil {
			t.Fatal(err)
		}
		if found := check.Advice(d); len(found) > 1 || (len(found) == 1 && found[0].Kind == advice.PathForm) != tc.want {
			t.Errorf("%s\ngot %+v, want advice on its path: %v", tc.site, found, tc.want)
		}
	}
}

// TestCheckNotes guards that check says what it did not look at.
func TestCheckNotes(t *testing.T) {
	t.Parallel()
	const limits = "http://:8080 {\nrate_limit a {\nrate 5/1s\n}\n"
	for _, tc := range []struct{ config, note string }{
		{"http://:8080 {\nrespond ok\n}", "The config has no limits."},
		{
			"{\nservers {\nlistener_wrappers {\nrate_limit 20/s\ntls\n}\n}\n}\nexample.com {\nrespond ok\n}",
			"Server srv0 speaks HTTP/3, which has no connections that limits in listener_wrappers see.",
		},
		{limits + "handle_errors {\n" + dryLimit("b") + "}\n}", "Server srv0: limits in error routes are left out."},
	} {
		for _, flags := range [][]string{nil, {"--redis"}} {
			want := "No problems found.\nNote: " + tc.note + "\n"
			if flags != nil {
				want += "Note: The config has no Redis to check.\n"
			}
			sitetest.RunCommand(t, append([]string{"check", "--config", sitetest.ConfigFile(t, tc.config)}, flags...)...).Want(t, 0, want)
		}
	}
}

// TestCheckRefuses guards that what Caddy would not load is one line and status 1, also
// where it is in no route that leads to a limit. That check refuses all that caddy validate
// refuses is seen by validateConfig, in each test of an option.
func TestCheckRefuses(t *testing.T) {
	t.Parallel()
	const site = "http://:8080 {\nrate_limit a {\nrate 5/1s\n}\n"
	for _, tc := range []struct{ name, config, want string }{
		{"port of redis", "{\nrate_limit {\nredis 127.0.0.1:99999\n}\n}\n" + site + "}", `redis: address: "127.0.0.1:99999" is not valid; use a host, host:port`},
		{"timeout of redis", "{\nrate_limit {\nredis 127.0.0.1:6379 {\ntimeout 5h\n}\n}\n}\n" + site + "}", `timeout: "5h" is not valid; use a duration from 1ms to 1m`},
		{"forms of addresses", "{\nrate_limit {\nredis redis://127.0.0.1:1 rediss://127.0.0.1:2\n}\n}\n" + site + "}",
			"redis: addresses: rediss:// can't be combined with redis://; use one form"},
		{"password that is not there", "{\nrate_limit {\nredis 127.0.0.1:6379 {\npassword {env.NO_SUCH_PASSWORD}\n}\n}\n}\n" + site + "}",
			"redis: password: {env.NO_SUCH_PASSWORD} is empty; give it a value"},
		{"limit in error routes", site + "handle_errors {\nrate_limit b {\nsize 0\n}\n}\n}", `limit "b": size: "0"`},
		{"level of a log", "{\nlog {\nlevel NOPE\n}\n}\n" + site + "}", `setting up default log: unrecognized log level: nope`},
		{"writer of a log", site + "log {\noutput net nope:1-2-3\n}\n}", `setting up custom log "log0": loading log writer module`},
		{"format of a log", site + "log {\nformat filter {\nuri regexp [[ x\n}\n}\n}", "loading log encoder module"},
		{"another handler", site + "reverse_proxy {\nto localhost:1\nlb_policy header \"\"\n}\n}", "header"},
	} {
		for _, flags := range [][]string{nil, {"--redis"}} {
			got := sitetest.RunCommand(t, append([]string{"check", "--config", sitetest.ConfigFile(t, tc.config)}, flags...)...)
			if got.Status != 1 || got.Out != "" || strings.Count(got.Errors, "\n") != 1 || !strings.Contains(got.Errors, tc.want) {
				t.Errorf("%s: got %+v, want status 1 and %q", tc.name, got, tc.want)
			}
		}
	}
}

// TestCheckCreatesNoLogs guards that check, which others than Caddy's user may run, does
// not create the files of logs.
func TestCheckCreatesNoLogs(t *testing.T) {
	t.Parallel()
	dir := sitetest.TempDir(t)
	log := "log {\noutput file " + dir + "/%s.log\n}\n"
	config := "{\n" + fmt.Sprintf(log, "global") + "}\nhttp://:8080 {\n" + fmt.Sprintf(log, "site") + dryLimit("a") + "}"
	sitetest.RunCommand(t, "check", "--config", sitetest.ConfigFile(t, config)).Want(t, 0, "No problems found.\n")
	if files, err := os.ReadDir(dir); err != nil || len(files) > 0 {
		t.Errorf("it created %v, error %v", files, err)
	}
}

// TestCheckCallsRedis guards the advice on how a real Redis is set up.
func TestCheckCallsRedis(t *testing.T) {
	for _, tc := range []struct {
		name string
		args []string
		want string
	}{
		{"defaults", nil, "No problems found.\n"},
		{"recommended", []string{"--maxmemory", "100mb", "--maxmemory-policy", "volatile-lru"}, "No problems found.\n"},
		{"noeviction", []string{"--maxmemory", "100mb", "--maxmemory-policy", "noeviction"}, "it refuses all writes"},
		{"random", []string{"--maxmemory", "100mb", "--maxmemory-policy", "allkeys-random"}, "forgets buckets that are in use"},
		{"nearly full", []string{"--maxmemory", "500kb", "--maxmemory-policy", "volatile-lru"}, "% of its memory"},
		{"password", []string{"--requirepass", "secret"}, " wants a password: NOAUTH. Correct username and password."},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := redistest.Start(t, tc.args...)
			file := sitetest.ConfigFile(t, "{\n"+sitetest.RedisGlobal(r.Addr)+"\n}\nhttp://:8080 {\n"+dryLimit("a")+"}")
			got := sitetest.RunCommand(t, "check", "--config", file, "--redis")
			status := 2
			if tc.want == "No problems found.\n" {
				status = 0
			}
			if !strings.Contains(strings.ReplaceAll(got.Out, "\n  ", " "), tc.want) || got.Errors != "" || got.Status != status {
				t.Errorf("got %+v, want %q", got, tc.want)
			}
		})
	}
	gone := redistest.FreeAddr(t)
	got := sitetest.RunCommand(t, "check", "--redis", "--config", sitetest.ConfigFile(t, "{\n"+sitetest.RedisGlobal(gone)+"\n}\nhttp://:8080 {\n"+dryLimit("a")+"}"))
	if text := strings.ReplaceAll(got.Out, "\n  ", " "); got.Status != 2 || !strings.Contains(text, "\n1 mistake.\n") ||
		!strings.HasPrefix(text, "mistake: redis: It was not checked: redis at "+gone+" can't be connected to: dial tcp "+gone+": connect: connection refused. Run this") {
		t.Errorf("with a Redis that is gone: got %+v", got)
	}
}

// TestCheckNamesWhatIsWrong guards that check says which option is wrong where Redis can't be
// used with the config, in the words of the log, whatever the keys that it tries.
func TestCheckNamesWhatIsWrong(t *testing.T) {
	authority := redistest.NewAuthority(t)
	plain, secure := redistest.Start(t), redistest.StartTLS(t, authority, false)
	sentinel, cluster := redistest.StartSentinel(t), redistest.StartCluster(t, 3)
	trust := "tls_trust_pool file " + authority.CAFile
	redistest.Done(t, plain.Client().Do(t.Context(), "ACL", "SETUSER", "others", "on", ">right", "~other:*", "+@all"))
	noInfo := redistest.StartFront(t, cluster.Nodes[0], func(command []string) string {
		if command[0] == "info" {
			return "NOPERM User limiter has no permissions to run the 'info' command"
		}
		return ""
	})
	for name, tc := range map[string]struct {
		addr    string
		options []string
		want    []string
	}{
		"cluster":               {cluster.Nodes[0].Addr, nil, []string{"It is a server of a cluster, which has only a part of the keys. Add the option cluster."}},
		"cluster, without INFO": {noInfo, nil, []string{"It is a server of a cluster, which has only a part of the keys. Add the option cluster."}},
		"TLS to a plain port":   {plain.Addr, []string{trust}, []string{"can't be connected to by TLS: tls: the server answers without TLS. Correct the address,"}},
		"plain to TLS":          {secure.Addr, nil, []string{"If the server wants TLS, add tls."}},
		"another name":          {secure.Addr, []string{trust, "tls_server_name redis.test"}, []string{"certificate is valid for", "not redis.test", "tls_server_name"}},
		"master_name": {sentinel.Sentinels[0].Addr, []string{"master_name nobody"}, []string{
			"redis at nobody of the sentinels at ", "is not known to them: no server has this master_name. Correct master_name: it is the name after",
		}},
		"a sentinel": {sentinel.Sentinels[0].Addr, nil, []string{"It is a sentinel, and not a server. Add master_name,"}},
		"master_name of no sentinel": {plain.Addr, []string{"master_name mymaster"}, []string{
			"With master_name, give the addresses of sentinels, whose port is not the port of the server.",
		}},
		"cluster of a single server": {plain.Addr, []string{"cluster"}, []string{"If it is a single server, give its address alone, without the option cluster."}},
		"no such database":           {plain.Addr, []string{"db 999"}, []string{"has no database of this number", "Correct db:"}},
		"no right to the keys":       {plain.Addr, []string{"username others", "password right"}, []string{"NOPERM. Give the user the permissions that", "and the keys ~rl:*."}},
		"wrong password":             {plain.Addr, []string{"username nobody", "password wrong"}, []string{"does not accept the user or password: WRONGPASS. Correct username and password."}},
	} {
		t.Run(name, func(t *testing.T) {
			for range 3 {
				got := sitetest.RunCommand(t, "check", "--redis", "--config", sitetest.ConfigFile(t, "{\n"+sitetest.RedisGlobal(tc.addr, tc.options...)+"\n}\nhttp://:8080 {\n"+dryLimit("a")+"}"))
				text := strings.ReplaceAll(got.Out, "\n  ", " ")
				for _, want := range tc.want {
					if !strings.Contains(text, want) {
						t.Errorf("got %s, want %q", text, want)
					}
				}
				if got.Status != 2 || !strings.Contains(text, "\n1 mistake.\n") || strings.Contains(text, `\n`) {
					t.Errorf("got status %d, and %s", got.Status, text)
				}
			}
		})
	}
}

// TestCheckNamesServers guards that check names each server that it has called once, in order, by
// what the config knows it by.
func TestCheckNamesServers(t *testing.T) {
	sentinel, cluster := redistest.StartSentinel(t), redistest.StartCluster(t, 3)
	for name, tc := range map[string]struct {
		global  string
		servers []string
	}{
		"cluster":   {sitetest.RedisGlobal(cluster.Nodes[0].Addr, "cluster"), cluster.Addrs()},
		"sentinels": {sitetest.RedisGlobal(sentinel.Sentinels[0].Addr, "master_name "+redistest.MasterName), []string{redistest.MasterName}},
	} {
		want := ""
		for _, server := range slices.Sorted(slices.Values(tc.servers)) {
			want += "Note: The server at " + server + " is Redis VERSION.\n"
		}
		for range 5 {
			got := sitetest.RunCommand(t, "check", "--redis", "--config", sitetest.ConfigFile(t, "{\n"+tc.global+"\n}\nhttp://:8080 {\n"+dryLimit("a")+"}"))
			if text := regexp.MustCompile(`is \w+ [0-9.]+\n`).ReplaceAllString(got.Out+got.Errors, "is Redis VERSION.\n"); !strings.Contains(text, want) {
				t.Errorf("%s: got %s, want %s", name, text, want)
			}
		}
	}
}

// TestCheckTriesRedis guards that check says what the server is, whether it can decide
// requests, and what it lacks if not; and that it leaves nothing there.
func TestCheckTriesRedis(t *testing.T) {
	server := redistest.Start(t)
	for lacks, want := range map[string]string{
		"":          "No problems found.",
		"info":      "No problems found.",
		"evalsha":   "A request could not be decided: redis at %s can't be used: it lacks EVALSHA:",
		"eval":      "it lacks EVAL:",
		"cluster":   "No problems found.",
		"something": "The server at %s is Redis ",
	} {
		redistest.Done(t, server.Client().ScriptFlush(t.Context()))
		addr := redistest.StartFront(t, server, func(command []string) string {
			if command[0] == lacks {
				return "ERR unknown command '" + lacks + "', with args beginning with: "
			}
			return ""
		})
		got := sitetest.RunCommand(t, "check", "--redis", "--config", sitetest.ConfigFile(t, "{\n"+sitetest.RedisGlobal(addr)+"\n}\nhttp://:8080 {\n"+dryLimit("a")+"}"))
		if want = strings.ReplaceAll(want, "%s", addr); !strings.Contains(strings.ReplaceAll(got.Out, "\n  ", " "), want) {
			t.Errorf("without %q: %+v, want %q", lacks, got, want)
		}
		redistest.WaitFor(t, 5*time.Second, func() error {
			if n := server.Client().DBSize(t.Context()).Val(); n > 0 {
				return fmt.Errorf("%d keys are left", n)
			}
			return nil
		})
	}
}

// TestCheckTriesRights guards that check names the commands that the user of Redis may not
// call and the limits need, those of a sliding log only if the config has one, and EVAL also
// where the script is there already.
func TestCheckTriesRights(t *testing.T) {
	base := []string{"+evalsha", "+eval", "+get", "+set", "+time"}
	logs := []string{"+getrange", "+setrange", "+strlen", "+pexpireat"}
	const log = "limit log {\nmatch method POST\nalgorithm sliding_log\nsize 5\nwindow 1m\n}"
	for _, tc := range []struct {
		name    string
		rights  []string
		options string
		want    string
	}{
		{"no log", base, "", "No problems found.\n"},
		{"no right for logs", base, log, "may not call GETRANGE, SETRANGE, STRLEN, PEXPIREAT, which the limits need. Give the user +getrange +setrange +strlen +pexpireat."},
		{"one of them", append(slices.Clone(base), logs[1:]...), log, "may not call GETRANGE, which"},
		{"no EVAL", slices.Delete(slices.Clone(base), 1, 2), "", "may not call EVAL, which"},
		{"no EVALSHA and no GET", []string{"+eval", "+set", "+time"}, "", "may not call EVALSHA, GET, which"},
		{"all rights", append(slices.Clone(base), logs...), log, "No problems found.\n"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			server := redistest.Start(t)
			server.SetUser(t, append(slices.Clone(base), logs...)...)
			global := "{\n" + sitetest.RedisGlobal(server.Addr, "username limiter", "password pass") + "\n}\n"
			sitetest.RunCommand(t, "check", "--redis", "--config", sitetest.ConfigFile(t, global+"http://:8080 {\n"+dryLimit("a", tc.options)+"}")) // the script is there from now on
			server.SetUser(t, tc.rights...)
			file := sitetest.ConfigFile(t, "{\n"+sitetest.RedisGlobal(server.Addr, "username limiter", "password pass")+"\n}\nhttp://:8080 {\n"+dryLimit("a", tc.options)+"}")
			got := sitetest.RunCommand(t, "check", "--config", file, "--redis")
			if !strings.Contains(strings.ReplaceAll(got.Out, "\n  ", " "), tc.want) {
				t.Errorf("got %+v, want %q", got, tc.want)
			}
		})
	}
}

// TestUnusableRedis guards that a server which lacks a command is one line in the log,
// which names the command.
func TestUnusableRedis(t *testing.T) {
	addr := redistest.StartFront(t, redistest.Start(t), func(command []string) string {
		if command[0] == "evalsha" {
			return "ERR unknown command 'evalsha', with args beginning with: "
		}
		return ""
	})
	s := sitetest.StartConfig(t, sitetest.Config{Global: sitetest.RedisGlobal(addr), Site: "rate_limit {\nsize 1000\n}\nrespond ok"})
	for range 20 {
		if a := s.Get("/"); a.StatusCode != 200 {
			t.Errorf("%+v", a)
		}
	}
	var lines []sitetest.Entry
	redistest.WaitFor(t, 5*time.Second, func() error {
		if lines = s.Log("error", "rate_limit"); len(lines) == 0 {
			return errors.New("no line")
		}
		return nil
	})
	if text := fmt.Sprint(lines); len(lines) != 1 || !strings.Contains(text, "it lacks EVALSHA") {
		t.Errorf("logged %s", text)
	}
}
