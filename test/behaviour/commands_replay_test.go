package behaviour

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/accesslog"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/offline"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/replay"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/report"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/configtest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/filetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// logLine is a line of Caddy's access log for a request that arrived some time
// after midnight.
func logLine(at time.Duration, client, uri string, header ...string) string {
	return answeredLine(at, client, uri, logged{took: 250 * ms, status: 200}, header...)
}

// logged is the response to a request, as a log has it.
type logged struct {
	took         time.Duration
	status, size int
	header       string // as a member of an object in JSON; empty if there is none
}

// answeredLine is a line of Caddy's access log for a request that got an answer.
func answeredLine(at time.Duration, client, uri string, a logged, header ...string) string {
	headers := make(map[string][]string)
	for _, h := range header {
		name, value, _ := strings.Cut(h, ": ")
		headers[name] = append(headers[name], value)
	}
	quoted := func(v any) string {
		text, _ := json.Marshal(v)
		return string(text)
	}
	return fmt.Sprintf(`{"level":"info","ts":%.6f,"logger":"http.log.access.log0","msg":"handled request",`+
		`"request":{"remote_ip":"192.0.2.250","remote_port":"40000","client_ip":%s,"proto":"HTTP/1.1","method":"GET",`+
		`"host":"example.com","uri":%s,"headers":%s},"bytes_read":0,"user_id":"","duration":%v,"size":%d,"status":%d,"resp_headers":{%s}}`+"\n",
		1.7e9+(at+a.took).Seconds(), quoted(client), quoted(uri), quoted(headers), a.took.Seconds(), a.size, a.status, a.header)
}

// onHost is n lines for another host.
func onHost(host string, n int) string {
	quoted, _ := json.Marshal(host)
	return strings.Repeat(strings.Replace(logLine(time.Second, "192.0.2.1", "/"), `"example.com"`, string(quoted), 1), n)
}

// headerless is lines of a log from which a filter removed the header fields.
func headerless(lines string) string {
	return strings.ReplaceAll(lines, `,"headers":{}`, "")
}

// inDocker is lines as Docker writes them.
func inDocker(lines string) string {
	var text strings.Builder
	for line := range strings.Lines(lines) {
		quoted, _ := json.Marshal(line)
		fmt.Fprintf(&text, "{\"log\":%s,\"stream\":\"stdout\",\"time\":\"2023-11-14T22:13:20Z\"}\n", quoted)
	}
	return text.String()
}

// combinedLine is a line of the combined log format.
func combinedLine(agent string) string {
	return strings.TrimSuffix(commonLine(20, "192.0.2.1", "/"), "\n") + ` "-" "` + agent + "\"\n"
}

// commonLine is a line of the common log format.
func commonLine(second int, client, uri string) string {
	return fmt.Sprintf("%s - - [14/Nov/2023:22:13:%02d +0000] \"GET %s HTTP/1.1\" 200 1\n", client, second, uri)
}

// logFile writes a log.
func logFile(t testing.TB, lines ...string) string {
	t.Helper()
	name := filepath.Join(sitetest.TempDir(t), "access.log")
	filetest.Write(t, name, []byte(strings.Join(lines, "")))
	return name
}

// replayed returns the report on a log, by the limits of sites with the given
// directives.
func replayed(t testing.TB, log string, opt replay.Options, configs ...string) *report.Report {
	t.Helper()
	dry := make([]*offline.Config, len(configs))
	for i, text := range configs {
		dry[i] = configtest.LoadDry(t, text)
	}
	l, err := accesslog.Open([]string{log}, accesslog.Auto)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	opt.Location = time.UTC
	s := replay.NewSession(l, dry, opt)
	s.Run(t.Context())
	return s.Report([]string{log})
}

// denials describes what limits did, such as "a 3=2+1 of 2" for three requests of
// two keys, of which one was denied.
func denials(c *report.Config) string {
	var text []string
	for i := range c.Limits {
		l := &c.Limits[i]
		denied := fmt.Sprint(l.Denied)
		if l.DeniedAtMost != l.Denied {
			denied += fmt.Sprint("-", l.DeniedAtMost)
		}
		text = append(text, fmt.Sprintf("%s %d=%d+%s of %d", l.Path, l.Requests, l.Admitted, denied, l.Keys))
	}
	return strings.Join(text, ", ")
}

// TestReplay guards what limits would have done with the requests of a log, on the
// log's clock, with the matchers, keys and numbers of the config.
func TestReplay(t *testing.T) {
	t.Parallel()
	const two = "example.com {\nrate_limit a {\nsize 2\ndrip_rate 1s\n}\n}\n"
	every := func(interval time.Duration, n int) string {
		var lines strings.Builder
		for i := range n {
			lines.WriteString(logLine(time.Duration(i)*interval, "192.0.2.1", "/"))
		}
		return lines.String()
	}
	// The log begins at 22:13:20 UTC, and goes on after midnight.
	days := func(option string) string {
		return "example.com {\nrate_limit a {\nalgorithm fixed_window\nsize 3\n" + option + "\n}\n}\n"
	}
	twoDays := every(ms, 4) + strings.Repeat(logLine(107*time.Minute, "192.0.2.1", "/"), 4)
	for _, tc := range []struct {
		name, config, log string
		want              string
		notes             string // in a note on a limit or on the whole
	}{
		{"burst", two, every(ms, 5), "a 5=2+3 of 1", ""},
		{"as fast as it drips", two, every(time.Second, 5), "a 5=5+0 of 1", ""},
		{"twice as fast", two, every(500*ms, 6), "a 6=4+2 of 1", ""},
		{"of each client", two, every(ms, 3) + logLine(3*ms, "192.0.2.2", "/"), "a 4=3+1 of 2", ""},
		{"not in order", two, logLine(2*time.Second, "192.0.2.1", "/") + every(ms, 2), "a 3=3+0 of 1", ""},
		{"days of windows by the clock", days("window 24h"), twoDays, "a 8=6+2 of 1", ""},
		{"a day since the first request", days("window 24h\nwindow_start first"), twoDays, "a 8=3+5 of 1", ""},
		{"days of the calendar", days("period day"), twoDays, "a 8=6+2 of 1", ""},
		{"one day in another zone", days("period day America/New_York"), twoDays, "a 8=3+5 of 1", ""},
		{"another host", strings.Replace(two, "example.com", "other.example", 1), every(ms, 1), "a 0=0+0 of 0",
			"No request was for a site of the config.\n1 request was for a host that no site of the config has: example.com."},
		{
			"a site without limits", two + "other.example {\nrespond ok\n}\n", every(ms, 2) + onHost("other.example", 1) + onHost("*.x.example", 1), "a 2=2+0 of 1",
			"1 request was for a host that no site of the config has: *.x.example.",
		},
		{
			"sites with wildcards and other names", strings.Replace(two, "example.com", "example.com, *.B.example, bücher.example", 1),
			every(ms, 1) + onHost("a.b.example:8443", 1) + onHost("xn--bcher-kva.example", 1), "a 3=3+0 of 1", "",
		},
		{
			"many other hosts", two, every(ms, 1) + onHost("h", 1) + onHost("i\u001b[2J", 1) + onHost("h", 1) + onHost("j", 1) + onHost("k", 1), "a 1=1+0 of 1",
			`5 requests were for hosts that no site of the config has, such as h "i\x1b[2J" j.`,
		},
		{
			"no headers", "example.com {\nrate_limit a {\nsize 1\nkey {header.X-Key}\n}\nrate_limit b {\nsize 2\n}\n}\n",
			headerless(every(ms, 3)) + logLine(0, "192.0.2.1", "/", "X-Key: x"), "a 1=1+0 of 1, b 4=2+2 of 1",
			"3 requests were left out, because the log does not have X-Key, which the key needs",
		},
		{
			"no headers for a matcher", "example.com {\nrate_limit a {\nsize 1\nmatch header X-Key *\n}\n}\n", headerless(every(ms, 3)), "a 0=0+0 of 0",
			"3 requests have no header fields in the log: matchers and numbers of the config that read them found none.",
		},
		{
			"a field of bodies", "example.com {\nrate_limit a {\nsize 1\nkey {http.rate_limit.field.email}\n}\nrate_limit b {\nsize 2\n}\n}\n", every(ms, 3), "a 0=0+0 of 0, b 3=2+1 of 1",
			"3 requests were left out, because no log has their bodies, and the key needs {http.rate_limit.field.email}.",
		},
		{"no headers for nothing", two, headerless(every(ms, 1)), "a 1=1+0 of 1", ""},
		{
			"few headers", "example.com {\nroute {\nrate_limit a {\nsize 1\nkey {header.X-Key}{header.User-Agent}\n}\nrate_limit b {\nsize 1\nkey {header.User-Agent}\n}\n}\n}\n",
			combinedLine("agent") + combinedLine("agent") + combinedLine("other"), "a 0=0+0 of 0, b 3=2+1 of 2",
			"3 requests were left out, because the log does not have X-Key, User-Agent, which",
		},
		{
			"few headers for a placeholder", "example.com {\nroute {\nmap {header.X-Plan} {cost} {\ndefault 1\n}\nrate_limit a {\nsize 1\ncost {cost}\n}\n}\n}\n",
			combinedLine("agent"), "a 1=1+0 of 1",
			"1 request has no header fields but Referer and User-Agent in the log: matchers and numbers of the config that read others found none.",
		},
		{
			"a header that a filter removed", "example.com {\nrate_limit a {\nsize 1\nkey {header.X-Key}\n}\n}\n", every(ms, 3), "a 3=1+2 of 1",
			"No request had a value for the key {http.request.header.X-Key}",
		},
		{
			"a header that some lack", "example.com {\nrate_limit a {\nsize 1\nkey {header.X-Key}\n}\n}\n", every(ms, 3) + logLine(0, "192.0.2.1", "/", "X-Key: x"), "a 4=2+2 of 2", "",
		},
		{
			"no addresses", two, strings.ReplaceAll(strings.ReplaceAll(every(ms, 3), `"client_ip":"192.0.2.1",`, ""), `"remote_ip":"192.0.2.250",`, ""), "a 3=2+1 of 1",
			"3 requests have no address of their client in the log: they count as one client.",
		},
		{
			"in Docker's JSON", two, inDocker(every(ms, 3)), "a 3=2+1 of 1", "the lines were taken out of the JSON of Docker's log files.",
		},
		{
			"matchers, nested limits and header keys",
			"example.com {\nrate_limit /api/* {\nlimit a {\nrate 5/1s\nkey {header.X-Key}\nlimit b {\nmatch query q=*\nsize 1\n}\n}\n}\n}\n",
			logLine(0, "192.0.2.1", "/", "X-Key: x") + logLine(0, "192.0.2.1", "/api/x", "X-Key: x") +
				strings.Repeat(logLine(0, "192.0.2.1", "/api/x?q=1", "X-Key: y"), 3),
			"a 4=2+0 of 2, a/b 3=1+2 of 1", "",
		},
		{
			"a denied request does not reach later handlers",
			"example.com {\nroute {\nrate_limit a {\nsize 1\n}\nrate_limit b {\nsize 9\n}\n}\n}\n",
			every(ms, 3), "a 3=1+2 of 1, b 1=1+0 of 1", "",
		},
		{
			"values that handlers set",
			"example.com {\nroute {\nmap {path} {size} {\n/big 5\ndefault 1\n}\nrate_limit a {\nsize {size}\n}\n}\n}\n",
			strings.Repeat(logLine(0, "192.0.2.1", "/big"), 4) + strings.Repeat(logLine(0, "192.0.2.2", "/x"), 4), "a 8=5+3 of 2", "",
		},
		{
			"rewritten requests are seen anew each time",
			"example.com {\nroute {\nuri strip_prefix /v1\nrequest_header -X-Key\nrate_limit /api a {\nsize 9\nkey {header.X-Key}{path}\n}\n}\n}\n",
			strings.Repeat(logLine(0, "192.0.2.1", "/v1/api", "X-Key: x"), 2) + logLine(0, "192.0.2.1", "/api", "X-Key: y"), "a 3=3+0 of 1", "",
		},
		{
			"option.Redacted",
			"example.com {\nrate_limit a {\nsize 1\nkey {cookie.session}\n}\nrate_limit b {\nsize 1\nkey {header.Authorization}\n}\n}\n",
			strings.Repeat(logLine(0, "192.0.2.1", "/", "Cookie: REDACTED"), 2) + logLine(0, "192.0.2.1", "/"),
			"a 1=0+0 of 1, b 3=1+2 of 1", "2 requests were left out, because the log redacts Cookie",
		},
		{
			"a value that is none", "example.com {\nrate_limit a {\nsize 5\ncost {header.X-Cost}\n}\n}\n",
			logLine(0, "192.0.2.1", "/", "X-Cost: x") + logLine(0, "192.0.2.1", "/", "X-Cost: 3"), "a 1=1+0 of 1",
			"1 request was rejected, because a matcher or a value",
		},
		{
			"a value that is none behind another limit",
			"example.com {\nroute {\nrate_limit a {\nsize 5\n}\nrate_limit b {\nsize 5\ncost {header.X-Cost}\n}\n}\n}\n",
			logLine(0, "192.0.2.1", "/", "X-Cost: x") + logLine(0, "192.0.2.1", "/", "X-Cost: 3"), "a 2=1+0 of 1, b 1=1+0 of 1",
			"1 request was rejected, because a matcher or a value",
		},
		{
			"more than it can hold", "{\nrate_limit {\nmemory {\nmax_keys 10\n}\n}\n}\n" + strings.Replace(two, "1s", "1h", 1),
			clients(100), "a 100=100+0 of 100", "max_keys, 5, was too small: ",
		},
		{
			"Redis is not used", "{\nrate_limit {\nredis localhost:1\n}\n}\n" + two, every(ms, 3), "a 3=2+1 of 1", "Redis is not used",
		},
		{
			"whole seconds", two, strings.Repeat(commonLine(20, "192.0.2.1", "/"), 4) + commonLine(21, "192.0.2.1", "/"),
			"a 5=3+2 of 1", "may be too high",
		},
		{
			"whole seconds with bounds", strings.Replace(two, "1s", "100ms", 1), strings.Repeat(commonLine(20, "192.0.2.1", "/"), 4),
			"a 4=4+0-2 of 1", "may be too high",
		},
		{
			"no host", strings.Replace(two, "example.com", "a.example, b.example", 1), commonLine(20, "192.0.2.1", "/"),
			"a 0=0+0 of 0", "name one with --host",
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := replayed(t, logFile(t, tc.log), replay.Options{}, tc.config)
			if got := denials(&r.Configs[0]); got != tc.want {
				t.Errorf("got %s, want %s", got, tc.want)
			}
			notes := slices.Clone(r.Notes)
			for _, l := range r.Configs[0].Limits {
				notes = append(notes, l.Unusual...)
			}
			if text := strings.Join(notes, "\n"); !strings.Contains(text, tc.notes) || (tc.notes == "") != (text == "") {
				t.Errorf("got notes %q, want %q", notes, tc.notes)
			}
		})
	}
}

// TestReplayInterruptedInPipe guards that a replay that waits for a log ends when it is
// interrupted, with the results so far.
func TestReplayInterruptedInPipe(t *testing.T) {
	t.Parallel()
	if runtime.GOOS == "windows" {
		t.Skip("pipes have no names here")
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	go func() { // enough for the replay to begin with, and no end
		for i := range 2000 {
			fmt.Fprint(w, logLine(time.Duration(i)*time.Second, "192.0.2.1", "/"))
		}
	}()
	l, err := accesslog.Open([]string{fmt.Sprintf("/dev/fd/%d", r.Fd())}, accesslog.Auto)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	s := replay.NewSession(l, []*offline.Config{configtest.LoadDry(t, replaySite)}, replay.Options{Location: time.UTC})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		s.Run(ctx)
	}()
	sitetest.Eventually(t, "the replay has begun", func() bool { return s.Used() >= 1024 })
	cancel()
	select {
	case <-ended:
	case <-time.After(sitetest.Patience):
		t.Fatal("it goes on")
	}
	if report := s.Report(nil); !s.Interrupted() || report.Used < 1024 || report.Used != report.Configs[0].Requests {
		t.Errorf("interrupted %t, used %d, want that of %d", s.Interrupted(), report.Used, report.Configs[0].Requests)
	}
}

// clients has a line of each of n clients.
func clients(n int) string {
	var lines strings.Builder
	for i := range n {
		lines.WriteString(logLine(time.Duration(i)*ms, fmt.Sprintf("192.0.%d.%d", i>>8, i&255), "/"))
	}
	return lines.String()
}

// TestReplayDecidesAsCaddy guards that replaying the access log that Caddy wrote
// decides on each request as Caddy did.
func TestReplayDecidesAsCaddy(t *testing.T) {
	t.Parallel()
	const limits = `
		map {path} {cost} {
			/dear 3
			default 1
		}
		@api path /api/*
		route {
			rate_limit {
				accounting each
				limit replay_site {
					size 60
					drip_rate 1h
					cost {cost}
					limit tenant {
						match header X-Tenant *
						key {header.X-Tenant}
						size 12
						drip_rate 1h
					}
				}
			}
			rate_limit {
				limit replay_spare {
					key all
					size 10
					drip_rate 1h
					pool
				}
				limit replay_own {
					key {header.X-Tenant}
					size 15
					drip_rate 1h
					borrow replay_spare
				}
			}
			uri /v1/* strip_prefix /v1
			rate_limit @api replay_api {
				size 15
				drip_rate 1h
				key {path}
			}
			rate_limit {
				zone replay_narrow {
					match {
						header X-Tenant *
					}
					events 8
					window 1000h
				}
				zone replay_wide {
					key {path}
					events 12
					window 1000h
				}
			}
			respond ok
		}
	`
	s := sitetest.Start(t, limits)
	random := rand.New(rand.NewPCG(1, 2))
	status := make(map[string]int64)
	for range 150 {
		path := []string{"/", "/dear", "/api/a", "/api/b?q=%20x", "/v1/api/a", "/caf%C3%A9"}[random.IntN(6)]
		var header []string
		if random.IntN(2) == 0 {
			header = append(header, fmt.Sprintf(`X-Tenant: "t%d"`, random.IntN(3)))
		}
		status[s.Get(path, header...).Status]++
	}
	decidesAsCaddy(t, s, limits, status, "replay_site", "replay_site/tenant", "replay_spare", "replay_own", "replay_api", "replay_wide", "replay_narrow")
}

// decidesAsCaddy checks that a replay of the log of s, whose site has the given limits,
// decides as Caddy did, which has counted at these paths and sent responses with these
// statuses.
func decidesAsCaddy(t *testing.T, s *sitetest.Site, limits string, status map[string]int64, paths ...string) {
	t.Helper()
	s.Entries() // all are logged
	var want []string
	for _, path := range paths {
		refs := s.Process.Counters.NewRefs()
		n := refs.Get(path).Totals()
		refs.Release()
		denied := n.Of(telemetry.Denied, telemetry.Banned)
		all := denied + n.Of(telemetry.Admitted, telemetry.Near, telemetry.Spared)
		want = append(want, fmt.Sprintf("%s %d denied %d", path, all, denied))
	}

	r := replayed(t, s.LogPath, replay.Options{}, "http://"+s.Addr+" {\n"+limits+"\n}\n")
	c := &r.Configs[0]
	var got []string
	for _, l := range c.Limits {
		got = append(got, fmt.Sprintf("%s %d denied %d", l.Path, l.Requests, l.Denied))
	}
	const denied = "429 Too Many Requests"
	if passed := c.Requests - status[denied]; !slices.Equal(got, want) || c.Admitted != passed || c.Denied != status[denied] || c.Denied == 0 {
		t.Errorf("got  %q, admitted %d, denied %d\nwant %q, %v", got, c.Admitted, c.Denied, want, status)
	}
}

// TestReplayChargesAsCaddy guards that limits which charge by the response decide in a
// replay of Caddy's log as they did in Caddy.
func TestReplayChargesAsCaddy(t *testing.T) {
	t.Parallel()
	const limits = `
		route {
			rate_limit {
				limit replay_login {
					key {query.user}
					size 9
					drip_rate 1h
					count status 401 403
					ban 1h
				}
				limit replay_bytes {
					key {query.user}
					size 500
					drip_rate 1h
					cost 50
					actual_cost bytes
				}
				limit replay_tokens {
					key {query.user}
					size 80
					drip_rate 1h
					cost 3
					actual_cost {http.response.header.X-Tokens}
					count status 2xx
				}
				limit replay_progress {
					key all
					concurrency 1
				}
			}
			respond /wrong 401
			header /tokens X-Tokens 12
			respond /tokens "0123456789"
			respond "01234567890123456789012345678901234567890123456789012345678901234567890123456789"
		}
	`
	s := sitetest.Start(t, limits)
	random := rand.New(rand.NewPCG(9, 10))
	status := make(map[string]int64)
	for range 300 {
		path := []string{"/", "/wrong", "/tokens"}[random.IntN(3)]
		status[s.Get(fmt.Sprintf("%s?user=%d", path, random.IntN(9))).Status]++
	}
	decidesAsCaddy(t, s, limits, status, "replay_login", "replay_bytes", "replay_tokens", "replay_progress")
}

// TestReplayChargesByResponse guards that requests hold units until they end, and are
// charged by their response, as far as a log tells either; and what it says if not.
func TestReplayChargesByResponse(t *testing.T) {
	t.Parallel()
	limit := func(options string) string {
		return "example.com {\nrate_limit a {\ndrip_rate 1h\n" + strings.ReplaceAll(options, "; ", "\n") + "\n}\n}\n"
	}
	inProgress := func(n string) string { return "example.com {\nrate_limit a {\nconcurrency " + n + "\n}\n}\n" }
	// Requests that follow each other every second, unless they take longer.
	answers := func(all ...logged) string {
		var lines strings.Builder
		for i, a := range all {
			lines.WriteString(answeredLine(time.Duration(i)*time.Second, "192.0.2.1", "/", a))
		}
		return lines.String()
	}
	right, wrong := logged{took: 100 * ms, status: 200}, logged{took: 100 * ms, status: 401}
	denied, slow := logged{took: ms, status: 429}, logged{took: 2500 * ms, status: 200}
	sized := func(n int) logged { return logged{took: 100 * ms, status: 200, size: n} }
	costs := func(n int) logged {
		return logged{took: 100 * ms, status: 200, header: fmt.Sprintf(`"X-Cost":["%d"]`, n)}
	}
	grpc := func(status string) logged {
		return logged{took: 100 * ms, status: 200, header: fmt.Sprintf(`"Content-Type":["application/grpc"],"Trailer:Grpc-Status":[%q]`, status)}
	}
	logins := answers(right, right, right, wrong, right, wrong, right, wrong)
	without := func(member, lines string) string {
		return strings.ReplaceAll(lines, fmt.Sprintf("%q:", member), `"other":`)
	}
	said := func(units, lines string) string {
		return strings.ReplaceAll(lines, `"resp_headers"`, `"rate_limit":{"result":"admitted","units":`+units+`},"resp_headers"`)
	}
	for _, tc := range []struct {
		name, config, log string
		want              string
		notes             string
	}{
		{"tokens", limit("size 10; cost 2; actual_cost tokens"), said(`{"a":5}`, answers(right, right, right)), "a 3=2+1 of 1", ""},
		{"numbers of a body", limit("size 10; cost 2; actual_cost json usage.x*2"), said(`{"b":1,"a":9}`, answers(right, right)), "a 2=1+1 of 1", ""},
		{"tokens of errors", limit("size 4; cost 2; actual_cost tokens"), answers(wrong, wrong, wrong), "a 3=3+0 of 1", ""},
		{"tokens of errors that say it", limit("size 4; cost 2; actual_cost tokens"), said(`{"a":4}`, answers(wrong, wrong)), "a 2=1+1 of 1", ""},
		{
			"tokens of a log without", limit("size 4; cost 2; actual_cost tokens"), said(`{"b":1}`, answers(right, right, right)), "a 3=2+1 of 1",
			"2 requests cost what was estimated, because the log does not say what they cost.",
		},
		{"time", limit("size 1000; actual_cost duration"), answers(slow, right, right, right, right), "a 5=3+2 of 1", ""},
		{
			"time of a log without", limit("size 2; actual_cost duration"), without("duration", answers(slow, right, right)), "a 3=2+1 of 1",
			"2 requests cost what was estimated",
		},
		{"count", limit("size 2; count status 401"), logins, "a 8=6+2 of 1", ""},
		{"clear", limit("size 2; count status 401; clear status 2xx"), answers(wrong, right, wrong, right, wrong, wrong, right), "a 7=6+1 of 1", ""},
		{"clear by a field", limit("size 2; count status 401; clear header X-Cost 5"), answers(wrong, right, wrong, costs(5)), "a 4=3+1 of 1", ""},
		{
			"clear by a field of a log without", limit("size 2; count status 401; clear header X-Cost 5"), without("resp_headers", answers(wrong, costs(5), wrong, right)), "a 4=3+1 of 1",
			"3 requests may have cleared it, and the log does not have the header fields of their responses.",
		},
		{"count in parallel", limit("size 2; count status 401"), answers(slow, slow, slow, right), "a 4=3+1 of 1", ""},
		{"count a field", limit("size 1; count header X-Cost 5"), answers(right, costs(4), costs(5), right), "a 4=3+1 of 1", ""},
		{"count a trailer", limit("size 2; count header Grpc-Status 8"), answers(grpc("0"), grpc("8"), right, grpc("8"), grpc("0")), "a 5=4+1 of 1", ""},
		{
			"count a field of a log without", limit("size 1; count header X-Cost 5"), without("resp_headers", answers(costs(5), costs(5))), "a 2=2+0 of 1",
			"2 requests did not count, because the log does not have the header fields of their responses.",
		},
		{
			"count what was denied", limit("size 1; count status 4xx"), answers(denied, denied, wrong, denied), "a 4=3+1 of 1",
			"2 requests passed that were denied with 429 in the log, or have no status there: their outcome is unknown, and they did not count.",
		},
		{"count clients that have left", limit("size 1; count status 401"), answers(logged{took: ms, status: 499}, wrong, right), "a 3=1+2 of 1", ""},
		{"a field for clients that have left", limit("size 1; count header X-Cost 5"), answers(logged{took: ms, status: 499}, right), "a 2=1+1 of 1", ""},
		{"right logins are not banned", limit("size 2; count status 401; ban 10m"), answers(slices.Repeat([]logged{right}, 20)...), "a 20=20+0 of 1", ""},
		{
			"count and ban", limit("size 2; drip_size 9; count status 401; ban 2h"), logins + answeredLine(61*time.Minute, "192.0.2.1", "/", right), "a 9=6+3 of 1",
			"It placed 1 ban, which alone denied 2 of the requests.",
		},
		{"bytes", limit("size 1000; cost 100; actual_cost bytes"), answers(sized(400), sized(400), sized(400), sized(0)), "a 4=3+1 of 1", ""},
		{"bytes of no body", limit("size 1000; cost 100; actual_cost bytes"), answers(slices.Repeat([]logged{sized(0)}, 20)...), "a 20=20+0 of 1", ""},
		{
			"bytes of a log without", limit("size 1000; cost 500; actual_cost bytes"), without("size", answers(sized(1), sized(1), sized(1))), "a 3=2+1 of 1",
			"2 requests cost what was estimated, because the log does not say what they cost.",
		},
		{
			"bytes of what was denied", limit("size 1000; cost 500; actual_cost bytes"), answers(denied, sized(500), sized(1)), "a 3=2+1 of 1",
			"1 requests passed that were denied with 429 in the log, or have no status there: their outcome is unknown, and they cost what was estimated.",
		},
		{"a field of the response", limit("size 10; actual_cost {http.response.header.x-cost}"), answers(costs(5), costs(0), costs(5), costs(0)), "a 4=3+1 of 1", ""},
		{"a field of the upstream", limit("size 10; actual_cost {http.reverse_proxy.header.X-Cost}"), answers(costs(5), costs(0), costs(5), costs(0)), "a 4=3+1 of 1", ""},
		{
			"a field of another response", limit("size 11; actual_cost {http.response.header.X-Cost}"),
			answers(costs(9)) + without("resp_headers", answeredLine(time.Second, "192.0.2.1", "/", right)) + answeredLine(2*time.Second, "192.0.2.1", "/", right), "a 3=3+0 of 1",
			"2 requests cost what was estimated",
		},
		{
			"a field that some lack", limit("size 3; actual_cost {http.response.header.X-Cost}"), answers(costs(2), right, costs(0)), "a 3=2+1 of 1",
			"1 requests cost what was estimated, because the log does not say what they cost.",
		},
		{"in progress", inProgress("2"), answers(slow, slow, slow, slow, right, right), "a 6=5+1 of 1", ""},
		{"until the end", inProgress("1"), logLine(0, "192.0.2.1", "/") + logLine(250*ms, "192.0.2.1", "/") + logLine(499*ms, "192.0.2.1", "/"), "a 3=2+1 of 1", ""},
		{
			"in progress for long", inProgress("1"), answers(logged{took: 4 * time.Minute, status: 200}) + answeredLine(239*time.Second, "192.0.2.1", "/", right) +
				answeredLine(241*time.Second, "192.0.2.1", "/", right), "a 3=2+1 of 1", "",
		},
		{
			"in progress for an unknown time", inProgress("1"), without("duration", answers(slow, slow)), "a 2=2+0 of 1",
			"2 requests ended at once, because the log does not say how long they took.",
		},
		{
			"whole seconds", limit("size 2; count status 401"), strings.ReplaceAll(strings.Repeat(commonLine(20, "192.0.2.1", "/"), 3), " 200 ", " 401 "), "a 3=2+1 of 1",
			"2 requests ended at once",
		},
		{
			"bytes of a common log", limit("size 1; actual_cost bytes"), strings.Repeat(strings.Replace(commonLine(20, "192.0.2.1", "/"), " 1\n", " -\n", 1), 3), "a 3=3+0 of 1",
			"3 requests ended at once",
		},
		{
			"a request that a later limit denies is in progress no more",
			"example.com {\nroute {\nrate_limit a {\nconcurrency 2\n}\nrate_limit b {\nsize 1\ndrip_rate 1h\n}\n}\n}\n",
			answers(slow, slow, slow, slow), "a 4=1+0 of 1, b 4=1+3 of 1", "",
		},
		{
			"a pool of requests in progress",
			"example.com {\nrate_limit {\nlimit spare {\nkey all\nconcurrency 1\npool\n}\nlimit a {\nsize 1\ndrip_rate 1h\nborrow spare\n}\n}\n}\n",
			answers(slow, slow, slow, slow, slow), "spare 2=2+0 of 1, a 5=3+2 of 1", "It had no room for 2 requests, which its pool had.",
		},
		{"a dry run", limit("size 1; dry_run"), answers(right, right, right), "a 3=3+2 of 1", "It is a dry run: requests that it denied here would have passed."},
		{"above the size", limit("size 1; soft 2"), answers(right, right, right, right), "a 4=3+1 of 1", "2 requests passed above its size, by soft."},
		{
			"delayed", "example.com {\nrate_limit a {\nsize 1\ndrip_rate 2s\nmax_delay 4s\n}\n}\n", answers(slices.Repeat([]logged{right}, 6)...), "a 6=5+1 of 1",
			"max_delay delayed 4 requests, by at most 4s.",
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := replayed(t, logFile(t, tc.log), replay.Options{}, tc.config).Configs[0]
			if got := denials(&c); got != tc.want {
				t.Errorf("got %s, want %s", got, tc.want)
			}
			var notes []string
			for _, l := range c.Limits {
				notes = append(notes, l.Unusual...)
			}
			if text := strings.Join(notes, "\n"); !strings.Contains(text, tc.notes) || (tc.notes == "") != (text == "") {
				t.Errorf("got notes %q, want %q", notes, tc.notes)
			}
		})
	}
}

// TestReplaySizesInProgress guards that the size which is said to be enough holds what
// requests in progress hold and what they cost in the end: with it none is denied, and with
// one less some is.
func TestReplaySizesInProgress(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(7, 8))
	var lines strings.Builder
	for i := range 200 {
		lines.WriteString(answeredLine(time.Duration(i)*100*ms, "192.0.2.1", "/", logged{
			took: time.Duration(random.IntN(2000)) * ms, status: []int{200, 401}[random.IntN(2)], size: random.IntN(50),
		}))
	}
	log := logFile(t, lines.String())
	for _, options := range []string{
		"concurrency %d", "size %d\ndrip_rate 1s\ncount status 401", "size %d\ndrip_rate 100ms\ncost 3\nactual_cost bytes", "algorithm fixed_window\nsize %d\nwindow 5s\ncount status 401",
	} {
		of := func(size int64) *report.Limit {
			config := "example.com {\nrate_limit a {\n" + fmt.Sprintf(options, size) + "\n}\n}\n"
			return &replayed(t, log, replay.Options{}, config).Configs[0].Limits[0]
		}
		size := of(10_000).Top[0].Peak
		if least := of(size - 1); of(size).Denied != 0 || least.Denied == 0 || least.Top[0].Peak != size {
			t.Errorf("%s: needs %d, denies %d with that, with one less %d, and needs %d then",
				options, size, of(size).Denied, least.Denied, least.Top[0].Peak)
		}
	}
}

// TestReplayReport guards what a report has besides the counts of limits.
func TestReplayReport(t *testing.T) {
	t.Parallel()
	log := logFile(t, strings.Repeat(logLine(0, "192.0.2.1", "/a"), 5), logLine(0, "192.0.2.2", "/b"),
		strings.Repeat(logLine(2*time.Hour, "192.0.2.2", "/b"), 3), "{}\n")
	config := "example.com {\nrate_limit a {\nsize 2\ndrip_rate 1s\n}\n}\n"
	r := replayed(t, log, replay.Options{ShowKeys: true}, config, strings.Replace(config, "size 2", "size 9", 1))
	if got := denials(&r.Configs[0]) + "; " + denials(&r.Configs[1]); got != "a 9=5+4 of 2; a 9=9+0 of 2" {
		t.Errorf("got %s", got)
	}
	l := &r.Configs[0].Limits[0]
	got := fmt.Sprint(l.Peaks, l.Top, l.ByPath, l.ByHour[22], l.ByHour[0], l.Slot, len(l.Times), r.Used, l.KeysDenied)
	const want = "[{3 1} {5 1}] [{192.0.2.1 {5 3} 5} {192.0.2.2 {4 1} 3}] [{/a {5 3}} {/b {4 1}}] {6 3} {3 1} 1m0s 121 9 2"
	if got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if hidden := replayed(t, log, replay.Options{}, config).Configs[0].Limits[0].Top; hidden[0].Text != "" {
		t.Errorf("keys are shown: %v", hidden)
	}
}

// TestReplayBursts guards that keys which evenly send more than drips out are reported
// from those that come in bursts, whether their requests are denied or not.
func TestReplayBursts(t *testing.T) {
	t.Parallel()
	config := "example.com {\nrate_limit a {\nrate 60/1m\n}\n}\n"
	key := 0
	asks := func(every, from time.Duration, n int) string {
		key++
		var lines strings.Builder
		for i := range n {
			lines.WriteString(logLine(from+time.Duration(i)*every, fmt.Sprintf("192.0.2.%d", key), "/"))
		}
		return lines.String()
	}
	for _, tc := range []struct {
		name, log string
		over      int64
		lasting   int64
	}{
		{"twice the rate", asks(500*ms, 0, 1000), 1, 1},
		{"a little more than the rate", asks(950*ms, 0, 2000), 1, 1},
		{"as fast as the rate", asks(time.Second, 0, 1000), 0, 0},
		{"ten times the rate", asks(100*ms, 0, 1000), 1, 1},
		{"a burst", asks(10*ms, 0, 1000), 1, 0},
		{"a burst after requests at ease", func() string {
			log := asks(2*time.Second, 0, 100)
			key--
			return log + asks(10*ms, 210*time.Second, 100)
		}(), 1, 0},
		{"some of each", asks(500*ms, 0, 200) + asks(500*ms, 0, 200) + asks(10*ms, 0, 200) + asks(time.Second, 0, 200), 3, 2},
	} {
		l := &replayed(t, logFile(t, tc.log), replay.Options{}, config).Configs[0].Limits[0]
		over := int64(0)
		for _, p := range l.Peaks {
			if p.Units > l.Size {
				over += p.Keys
			}
		}
		if over != tc.over || l.KeysLasting != tc.lasting {
			t.Errorf("%s: %d keys above the size, %d of them lasting, want %d and %d", tc.name, over, l.KeysLasting, tc.over, tc.lasting)
		}
	}
}

// TestReplayFactor guards that sizes are those to write as the option size, which factor
// divides: with the one that is said to be enough nothing is denied, and with one less
// something is.
func TestReplayFactor(t *testing.T) {
	t.Parallel()
	const requests = 40
	log := logFile(t, strings.Repeat(logLine(0, "192.0.2.1", "/"), requests))
	for _, factor := range []string{"0.3", "0.5", "1", "1.7", "2", "3"} {
		of := func(size int64) *report.Limit {
			config := fmt.Sprintf("example.com {\nrate_limit a {\nsize %d\ndrip_rate 1s\nfactor %s\n}\n}\n", size, factor)
			return &replayed(t, log, replay.Options{}, config).Configs[0].Limits[0]
		}
		l := of(5)
		size := l.SizeFor(0)
		if l.Size != 5 || l.Denied == 0 || l.Top[0].Peak != size || of(size).Denied != 0 || size > 1 && of(size-1).Denied == 0 {
			t.Errorf("factor %s: of size %d needs %d, a key needs %d, denies %d with that, with one less %d",
				factor, l.Size, size, l.Top[0].Peak, of(size).Denied, of(size-1).Denied)
		}
		if divides := factor != "1"; strings.Contains(l.Numbers, "size 5 / "+factor) != divides {
			t.Errorf("factor %s: the numbers are %s", factor, l.Numbers)
		}
	}
	varies := "example.com {\nrate_limit a {\nsize 5\ndrip_rate 1s\nfactor {query.f}\n}\n}\n"
	l := &replayed(t, logFile(t, logLine(0, "192.0.2.1", "/?f=2"), logLine(ms, "192.0.2.1", "/?f=1")), replay.Options{}, varies).Configs[0].Limits[0]
	if l.SizeFor(0) != 2 || len(l.Unusual) != 1 || !strings.Contains(l.Unusual[0], "after the division by factor") {
		t.Errorf("a factor that varies: needs %d, %q", l.SizeFor(0), l.Unusual)
	}
}

// TestReplayInterrupted guards that the results so far are given, and marked.
func TestReplayInterrupted(t *testing.T) {
	t.Parallel()
	l, err := accesslog.Open([]string{logFile(t, clients(5000))}, accesslog.Auto)
	if err != nil {
		t.Fatal(err)
	}
	s := replay.NewSession(l, []*offline.Config{configtest.LoadDry(t, "example.com {\nrate_limit a {\nsize 2\n}\n}\n")}, replay.Options{Location: time.UTC})
	s.Run(&doneAfter{t.Context(), 3})
	l.Close()
	r := s.Report(nil)
	if got := denials(&r.Configs[0]); got != "a 3072=3072+0 of 3072" || r.Used != 3072 || r.Lines != 3072 || !s.Interrupted() ||
		!slices.ContainsFunc(r.Notes, func(note string) bool { return strings.Contains(note, "first 3,072 requests") }) {
		t.Errorf("got %s of %d lines, notes %q", got, r.Lines, r.Notes)
	}
}

// BenchmarkReplay measures a whole replay, with two limits.
func BenchmarkReplay(b *testing.B) {
	var text strings.Builder
	random := rand.New(rand.NewPCG(5, 6))
	for i := range b.N {
		text.WriteString(logLine(time.Duration(i)*ms, fmt.Sprintf("192.0.%d.%d", random.IntN(16), random.IntN(256)), "/api/items?page=2",
			"User-Agent: Mozilla/5.0 (X11; Linux x86_64; rv:143.0) Gecko/20100101 Firefox/143.0", "Accept: text/html", "Accept-Language: de"))
	}
	log := logFile(b, text.String())
	config := configtest.LoadDry(b, "example.com {\nrate_limit {\nlimit a {\nsize 40\ndrip_rate 100ms\n}\nlimit b {\nmatch path /api/*\nrate 5/1s\n}\n}\n}\n")
	b.SetBytes(int64(text.Len() / b.N))
	b.ResetTimer()
	l, err := accesslog.Open([]string{log}, accesslog.Auto)
	if err != nil {
		b.Fatal(err)
	}
	s := replay.NewSession(l, []*offline.Config{config}, replay.Options{Location: time.UTC})
	s.Run(b.Context())
	if got := s.Used(); got != int64(b.N) {
		b.Fatalf("%d requests, want %d", got, b.N)
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "lines/s")
}

// doneAfter is a context that is done after a few calls.
type doneAfter struct {
	context.Context
	times int
}

// Err implements context.Context.
func (d *doneAfter) Err() error {
	if d.times--; d.times < 0 {
		return context.Canceled
	}
	return nil
}
