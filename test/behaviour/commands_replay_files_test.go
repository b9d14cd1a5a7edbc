package behaviour

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/filetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/racetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// replaySite has a limit that most of replayLog's clients do not reach.
const replaySite = "example.com {\nrate_limit api {\nsize 3\ndrip_rate 1s\n}\nrespond ok\n}\n"

// replayLog is a log with two clients, one of which asks too often and would drive
// the terminal.
func replayLog(t testing.TB) string {
	return logFile(t, logLine(0, "192.0.2.1", "/"), strings.Repeat(logLine(ms, "192.0.2.2\x1b[2J", "/x"), 5), "{}\n")
}

// TestReplayCommand guards what the command prints as a table and as JSON, for one
// config and for two, and that keys are shown only on request, escaped.
func TestReplayCommand(t *testing.T) {
	t.Parallel()
	config, log := sitetest.ConfigFile(t, replaySite), replayLog(t)
	const table = `6 of 7 lines used, from 2023-11-14 22:13:20 to 2023-11-14 22:13:20
1 not used: not a line of an access log

LIMIT  SIZE  REQUESTS  ADMITTED  DENIED  SPARED   SHARE  KEYS  KEYS DENIED  SIZE FOR 0.1 %
api       3         6         4       2       0  33.3 %     2            1               5
`
	sitetest.RunCommand(t, "replay", "--config", config, "--utc", log).Want(t, 0, table)
	sitetest.RunCommand(t, "replay", "--config", config, "--utc", "--show-keys", log).Want(t, 0, table+`
LIMIT  DENIED  REQUESTS  KEY
api         2         5  "192.0.2.2\x1b[2J"
api         0         1  192.0.2.1
`)

	one := sitetest.RunCommand(t, "replay", "--config", config, "--json", "--target", "50%", log)
	var answer map[string]any
	if err := json.Unmarshal([]byte(one.Out), &answer); err != nil || one.Status != 0 {
		t.Fatalf("%v: %+v", err, one)
	}
	delete(answer, "from")
	delete(answer, "to")
	text, _ := json.Marshal(answer)
	const want = `{"limits":[{"admitted":4,"algorithm":"leaky_bucket","denied":2,"keys":2,"keys_denied":1,"limit":"api","requests":6,"size":3,"size_for_target":1,"spared":0}],` +
		`"lines":7,"skipped":{"not a line of an access log":1},"used":6}`
	if string(text) != want {
		t.Errorf("got  %s\nwant %s", text, want)
	}

	const hostile, escaped = "/%C2%9B2J%E2%80%AE%00", `"/\u009b2j\u202e\u0000"`
	byPath := sitetest.ConfigFile(t, strings.Replace(replaySite, "size 3", "key {path}\nsize 3", 1))
	shown := sitetest.RunCommand(t, "replay", "--config", byPath, "--json", "--show-keys", logFile(t, logLine(0, "192.0.2.1", hostile)))
	if strings.ContainsAny(shown.Out, "\u009b\u202e") || !strings.Contains(shown.Out, escaped) || shown.Status != 0 {
		t.Errorf("got %+v, want a key %s", shown, escaped)
	}

	other := sitetest.ConfigFile(t, strings.Replace(replaySite, "size 3", "size 5", 1))
	two := sitetest.RunCommand(t, "replay", "--config", config, "--compare", other, "--json", log)
	var both struct {
		Configs []struct {
			Config string
			Limits []struct{ Denied int64 }
		}
		Limits any
	}
	if err := json.Unmarshal([]byte(two.Out), &both); err != nil || both.Limits != nil || len(both.Configs) != 2 ||
		both.Configs[0].Limits[0].Denied != 2 || both.Configs[1].Limits[0].Denied != 0 {
		t.Errorf("got %v, %s", err, two.Out)
	}
}

// TestReplayAlgorithms guards that the sizes that keys need are those of each
// algorithm: four requests before the end of a minute and four after it need 4 units
// of a bucket or a minute of the clock, 8 of a window that began with the first, and
// 7 of a sliding one, where 3 of the first are left.
func TestReplayAlgorithms(t *testing.T) {
	t.Parallel()
	config := sitetest.ConfigFile(t, `example.com {
	rate_limit {
		accounting each
		limit leaky {
			rate 5/40s
		}
		limit token {
			algorithm token_bucket
			size 5
			drip_rate 8s
		}
		limit clock {
			algorithm fixed_window
			size 5
			window 1m
		}
		limit first {
			algorithm fixed_window
			size 5
			window 1m
			window_start first
		}
		limit period {
			algorithm fixed_window
			size 5
			period minute
		}
		limit slides {
			algorithm sliding_window
			size 5
			window 1m
		}
	}
	respond ok
}
`)
	log := logFile(t, strings.Repeat(logLine(0, "192.0.2.1", "/"), 4), strings.Repeat(logLine(45*time.Second, "192.0.2.1", "/"), 4))
	sitetest.RunCommand(t, "replay", "--config", config, "--utc", log).Want(t, 0, `8 of 8 lines used, from 2023-11-14 22:13:20 to 2023-11-14 22:14:05

LIMIT   SIZE  REQUESTS  ADMITTED  DENIED  SPARED   SHARE  KEYS  KEYS DENIED  SIZE FOR 0.1 %
leaky      5         8         5       0       3     0 %     1            0               4
token      5         8         5       0       3     0 %     1            0               4
clock      5         8         5       0       3     0 %     1            0               4
first      5         8         5       3       0  37.5 %     1            1               8
period     5         8         5       0       3     0 %     1            0               4
slides     5         8         5       2       1    25 %     1            1               7
Spared: the limit had room, but another one denied.
`)
	file := filepath.Join(sitetest.TempDir(t), "report.html")
	r := sitetest.RunCommand(t, "replay", "--config", config, "--html", file, "--json", log)
	var answer map[string]any
	if err := json.Unmarshal([]byte(r.Out), &answer); err != nil {
		t.Fatalf("%v: %+v", err, r)
	}
	sitetest.WantJSON(t, answer["limits"], `[
		{"limit": "leaky", "algorithm": "leaky_bucket", "size_for_target": 4, "spared": 3}, {"limit": "token", "algorithm": "token_bucket", "size_for_target": 4},
		{"limit": "clock", "algorithm": "fixed_window", "size_for_target": 4}, {"limit": "first", "algorithm": "fixed_window", "size_for_target": 8},
		{"limit": "period", "algorithm": "fixed_window", "size_for_target": 4}, {"limit": "slides", "algorithm": "sliding_window", "size_for_target": 7, "spared": 1}]`)
	page := filetest.Read(t, file)
	for _, numbers := range []string{
		"leaky_bucket, size 5, drips 1 each 8s", "token_bucket, size 5, refills 1 each 8s", "fixed_window, size 5, window 1m<",
		"fixed_window, size 5, window 1m from the first request", "fixed_window, size 5, each minute", "sliding_window, size 5, window 1m",
	} {
		if !strings.Contains(string(page), numbers) {
			t.Errorf("the report lacks %q", numbers)
		}
	}
}

// TestReplayNoSize guards that no size is proposed if none would do, and that this is
// said.
func TestReplayNoSize(t *testing.T) {
	t.Parallel()
	config := sitetest.ConfigFile(t, "example.com {\nrate_limit api {\nalgorithm sliding_window\nsize 5\nwindow 1m\ncost {query.cost}\n}\nrespond ok\n}\n")
	log := logFile(t, logLine(0, "192.0.2.1", "/?cost=1"), logLine(ms, "192.0.2.2", "/?cost=16777216"))
	sitetest.RunCommand(t, "replay", "--config", config, "--utc", log).Want(t, 0, `2 of 2 lines used, from 2023-11-14 22:13:20 to 2023-11-14 22:13:20

LIMIT  SIZE  REQUESTS  ADMITTED  DENIED  SPARED  SHARE  KEYS  KEYS DENIED  SIZE FOR 0.1 %
api       5         2         1       1       0   50 %     2            1            none
api: No size that a limit can have would have been enough for 1 of the keys.
`)
	var answer map[string]any
	r := sitetest.RunCommand(t, "replay", "--config", config, "--json", log)
	if err := json.Unmarshal([]byte(r.Out), &answer); err != nil {
		t.Fatalf("%v: %+v", err, r)
	}
	sitetest.WantJSON(t, answer["limits"], `[{"limit": "api", "size": 5, "size_for_target": null}]`)
}

// TestReplayHTML guards that a report is written, which only the user may read and
// which has keys only on request.
func TestReplayHTML(t *testing.T) {
	t.Parallel()
	config, log, file := sitetest.ConfigFile(t, replaySite), replayLog(t), filepath.Join(sitetest.TempDir(t), "report.html")
	if r := sitetest.RunCommand(t, "replay", "--config", config, "--html", file, log); r.Status != 0 {
		t.Fatalf("%+v", r)
	}
	page, err := os.ReadFile(file)
	if err != nil || !strings.Contains(string(page), "</html>") || strings.Contains(string(page), "192.0.2.2") {
		t.Errorf("%v, %d bytes; keys shown: %v", err, len(page), strings.Contains(string(page), "192.0.2.2"))
	}
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("got %v, %v", info.Mode(), err)
	}
}

// TestReplayOverwrites guards that a report takes the place of nothing but another report
// or an empty file, and never of what the replay reads.
func TestReplayOverwrites(t *testing.T) {
	t.Parallel()
	config, log := sitetest.ConfigFile(t, replaySite), replayLog(t)
	dir := sitetest.TempDir(t)
	write := func(name, text string) string { return sitetest.WriteFile(t, dir, name, text) }
	link := filepath.Join(dir, "link.html")
	if err := os.Symlink(log, link); err != nil {
		t.Fatal(err)
	}
	old := filepath.Join(dir, "old.html")
	if r := sitetest.RunCommand(t, "replay", "--config", config, "--html", old, log); r.Status != 0 {
		t.Fatalf("%+v", r)
	}
	text := filetest.Read(t, old)
	const other, input = "is not a report of a replay; use a new file", "is read as a config or a log; use another file"
	for _, tc := range []struct{ name, file, want string }{
		{"the log", log, input},
		{"a link to the log", link, input},
		{"the config", config, input},
		{"notes", write("notes.html", "<!DOCTYPE html>\n<title>Notes</title>\n"), other},
		{"a short file", write("short", "x"), other},
		{"another log", write("other.log", logLine(0, "192.0.2.1", "/")), other},
		{"an older report", write("older.html", string(text)+strings.Repeat("x", 1000)), ""},
		{"an empty file", write("empty.html", ""), ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			before := filetest.Read(t, tc.file)
			r := sitetest.RunCommand(t, "replay", "--config", config, "--html", tc.file, log)
			after := filetest.Read(t, tc.file)
			if tc.want != "" {
				if r.Status != 1 || !strings.Contains(r.Errors, tc.want) || string(after) != string(before) {
					t.Errorf("got %+v, the file has %d bytes, had %d", r, len(after), len(before))
				}
				return
			}
			if r.Status != 0 || !strings.HasSuffix(strings.TrimSpace(string(after)), "</html>") {
				t.Errorf("got %+v, the file has %d bytes", r, len(after))
			}
		})
	}
	if r := sitetest.RunCommand(t, "replay", "--config", config, "--html", old, log, old); r.Status != 1 || !strings.Contains(r.Errors, input) {
		t.Errorf("a report that is given as a log: got %+v", r)
	}
}

// TestReplayRefuses guards that bad input is an error of one line, which names what
// is wrong, and that what could not be replayed at all is one too.
func TestReplayRefuses(t *testing.T) {
	t.Parallel()
	config, log := sitetest.ConfigFile(t, replaySite), replayLog(t)
	for _, tc := range []struct {
		name string
		args []string
		want string
	}{
		{"no log", []string{"--config", config}, "requires at least 1 arg"},
		{"no config", []string{log}, "config: none given, and there is no Caddyfile in the current directory; use --config with a file"},
		{"missing config", []string{"--config", "missing", log}, "missing: no such file"},
		{"bad config", []string{"--config", log, log}, "not valid JSON"},
		{"missing log", []string{"--config", config, "missing"}, "missing: no such file"},
		{"directory", []string{"--config", config, sitetest.TempDir(t)}, "it is a directory; use a file"},
		{"bad format", []string{"--config", config, "--format", "xml", log}, `format: "xml" is not valid; use auto, json, common or combined`},
		{"bad target", []string{"--config", config, "--target", "120%", log}, `target: "120%" is not valid; use a share from 0 to less than 1`},
		{"bad report", []string{"--config", config, "--html", "missing/x.html", log}, "html: open missing/x.html: no such file"},
		{"standard input twice", []string{"--config", config, "-", "-"}, "logs: standard input is given twice; use it once"},
		{"nothing used", []string{"--config", config, "--format", "combined", log}, "no line of the logs could be replayed"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := sitetest.RunCommand(t, append([]string{"replay"}, tc.args...)...)
			if lines := strings.Count(r.Errors, "\n"); r.Status != 1 || lines != 1 || !strings.Contains(r.Errors, tc.want) {
				t.Errorf("got status %d, errors %q, want %q", r.Status, r.Errors, tc.want)
			}
		})
	}
}

// TestReplayAdvisesLeases guards when a replay says what a lease would spare: of a limit with
// Redis that is exact and could be leased, if most requests follow others of their key
// closely, in logs with exact times.
func TestReplayAdvisesLeases(t *testing.T) {
	t.Parallel()
	var hot, cold strings.Builder
	for i := range 200 {
		hot.WriteString(logLine(time.Duration(i)*ms, "192.0.2.1", "/"))
		cold.WriteString(logLine(time.Duration(i)*20*ms, "192.0.2.1", "/"))
	}
	const redis, limit = "{\nrate_limit {\nredis 127.0.0.1:1\n}\n}\n", "rate_limit api {\nsize 1000\n%s\n}\n"
	site := func(options string) string {
		return "example.com {\n" + strings.Replace(limit, "%s", options, 1) + "respond ok\n}\n"
	}
	// In each of the eight periods of 25 ms, two requests ask Redis.
	const advice = "api: Most of its requests follow others of their key closely: with consistency lease 100ms, one Caddy would decide about 184 of the 200 that pass without asking Redis."
	for _, tc := range []struct {
		name, config, log string
		want              bool
	}{
		{"a hot key", redis + site(""), hot.String(), true},
		{"keys that are cold", redis + site(""), cold.String(), false},
		{"no Redis", site(""), hot.String(), false},
		{"leased already", redis + site("consistency lease 1s"), hot.String(), false},
		{"has to be exact", redis + site("count_denied"), hot.String(), false},
		{"another limit has to be exact", redis + site("limit in {\nsize 1000\ncount_denied\n}"), hot.String(), false},
	} {
		out := sitetest.RunCommand(t, "replay", "--config", sitetest.ConfigFile(t, tc.config), logFile(t, tc.log)).Out
		if got := strings.Contains(out, advice); got != tc.want {
			t.Errorf("%s: advice %t, want %t:\n%s", tc.name, got, tc.want, out)
		}
	}
}

// TestReplayAdvisesLatency guards when a replay says that the latency of a limit which follows
// the load may be too low: if enough requests that met it were answered, in more than a third
// of that on average.
func TestReplayAdvisesLatency(t *testing.T) {
	t.Parallel()
	const advice = "Its requests took 200ms on average. Its latency, 500ms, should be at least three times what is usual until responses begin: 600ms, unless"
	lines := func(n int, path string, a logged) (all string) {
		for i := range n {
			all += answeredLine(time.Duration(i)*ms, "192.0.2.1", path, a)
		}
		return all
	}
	for _, tc := range []struct {
		name, log string
		want      bool
	}{
		{"slow", lines(30, "/up", logged{took: 200 * ms, status: 200}), true},
		{"slow, and others fast", lines(30, "/up", logged{took: 200 * ms, status: 200}) + lines(300, "/", logged{status: 200}), true},
		{"slow, and failures fast", lines(30, "/up", logged{took: 200 * ms, status: 200}) + lines(300, "/up", logged{status: 503}), true},
		{"fast enough", lines(30, "/up", logged{took: 166 * ms, status: 200}), false},
		{"few", lines(29, "/up", logged{took: 200 * ms, status: 200}), false},
		{"turned away", lines(30, "/up", logged{took: 200 * ms, status: 429}), false},
		{"no durations", strings.Repeat(commonLine(20, "192.0.2.1", "/up"), 30), false},
	} {
		config := sitetest.ConfigFile(t, "example.com {\nrate_limit /up up {\nconcurrency auto\n}\nrespond ok\n}\n")
		out := sitetest.RunCommand(t, "replay", "--config", config, logFile(t, tc.log)).Out
		if got := strings.Contains(out, advice); got != tc.want || strings.Contains(out, "latency") != tc.want {
			t.Errorf("%s: advice %t, want %t:\n%s", tc.name, got, tc.want, out)
		}
	}
}

// TestReplayOfSpeeds guards that replay says that a log does not tell what a speed does.
func TestReplayOfSpeeds(t *testing.T) {
	t.Parallel()
	config := sitetest.ConfigFile(t, "example.com {\nrate_limit slow {\nspeed 1MB/s\n}\nrespond ok\n}\n")
	out := sitetest.RunCommand(t, "replay", "--config", config, logFile(t, commonLine(20, "192.0.2.1", "/"))).Out
	if !strings.Contains(out, "Limit slow paces responses, and denies no request") || strings.Contains(out, "no limits") {
		t.Error(out)
	}
}

// TestReplayClients guards that the virtual host of a line is not taken for its client, and
// that a log without clients that can be told apart says so first, or is refused.
func TestReplayClients(t *testing.T) {
	racetest.SingleGoroutine(t)
	t.Parallel()
	const n = 200
	lines := func(fields string) string {
		var b strings.Builder
		for i := range n {
			// Two a second, and each client asks twice.
			fmt.Fprintf(&b, strings.ReplaceAll(fields, "CLIENT", fmt.Sprintf("192.0.2.%d", i/2))+` [14/Nov/2023:22:%02d:%02d +0000] "GET / HTTP/1.1" 200 1 "-" "-"`+"\n", i/120, i/2%60)
		}
		return b.String()
	}
	ofCaddy := func(client string) (all string) {
		for i := range n {
			all += logLine(time.Duration(i)*500*ms, client, "/")
		}
		return all
	}
	const different = "" // the first line is that of used lines
	for _, tc := range []struct {
		name, log, first string
		keys             int
	}{
		{"addresses", lines("CLIENT - -"), different, 100},
		{"virtual hosts", lines("example.com:443 CLIENT - -"), different, 100},
		{"lists", lines("CLIENT, 10.0.0.1 - -"), "200 requests have a list of addresses for their client in the log. The first was taken", 100},
		{"a proxy", lines("10.0.0.1 - -"), "All 200 requests have the same client in the log, 10.0.0.1: if that is a proxy,", 1},
		{"a proxy, of Caddy", ofCaddy("10.0.0.1"), "All 200 requests have the same client in the log, 10.0.0.1: if that is a proxy,", 1},
		{"a proxy with virtual hosts", lines("example.com:443 10.0.0.1 - -"), "All 200 requests have the same client in the log, 10.0.0.1", 1},
		{"dashes", lines("- - -"), "The log has no address of a client, so", 1},
		{"names", lines("www.example.com - -"), "The log has no address of a client, but names such as www.example.com:", 1},
		{"a masked address", ofCaddy("REDACTED"), "The log has no address of a client, but names such as REDACTED:", 1},
	} {
		config := sitetest.ConfigFile(t, replaySite)
		got := sitetest.RunCommand(t, "replay", "--config", config, "--host", "example.com", logFile(t, tc.log))
		first := tc.first
		if first == different {
			first = "200 of 200 lines used"
		}
		var answer struct {
			Notes  []string
			Limits []struct{ Keys int }
		}
		asJSON := sitetest.RunCommand(t, "replay", "--json", "--config", config, "--host", "example.com", logFile(t, tc.log))
		err := json.Unmarshal([]byte(asJSON.Out), &answer)
		if err != nil || got.Status != 0 || !strings.HasPrefix(got.Out, first) || len(answer.Limits) != 1 || answer.Limits[0].Keys != tc.keys {
			t.Errorf("%s: %v: got\n%s\nwant first %q, and %d keys", tc.name, err, got.Out, first, tc.keys)
		}
		if tc.first != different && (len(answer.Notes) == 0 || !strings.HasPrefix(answer.Notes[0], tc.first)) {
			t.Errorf("%s: notes %q", tc.name, answer.Notes)
		}
	}
	got := sitetest.RunCommand(t, "replay", "--config", sitetest.ConfigFile(t, replaySite), logFile(t, lines("CLIENT 10.0.0.1 - -")))
	if got.Status != 1 || got.Out != "" || strings.Count(got.Errors, "\n") != 1 || !strings.Contains(got.Errors, `lines begin with "192.0.2.0 10.0.0.1 - -", of which several may be the client's address; use`) {
		t.Errorf("with two addresses: got %+v", got)
	}
}
