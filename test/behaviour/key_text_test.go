package behaviour

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/url"
	"os"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/racetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/testseed"
)

// TestAnyKeyIsNamedAsShown guards that operators can name each key that clients can send, by
// the text by which bans, top and peek show it: they can look at it, lift its ban, ban it and
// reset it, and no other key has that text. With Redis too, and by the command line, which
// asks no store by itself.
func TestAnyKeyIsNamedAsShown(t *testing.T) {
	keys := []string{"a", "\xff", "\xfe", "\ufffd", `"\xff"`, `"`, `"a"`, `"a`, `\xff`, "%ff", "é\xc3", "a,\xff", "\x00", "a\nb", "\x1b[2J\u202e", "\xed\xa0\x80"}
	byCommand := len(keys)
	if racetest.Enabled {
		byCommand = 1 // each one is several processes
	}
	random := rand.New(rand.NewPCG(testseed.Base(), 0))
	for range 100 {
		key := make([]byte, 1+random.IntN(12))
		for i := range key {
			key[i] = "\"\\,a\xff\xc3\xa9\xef\xbf\xbd\xf0'`x%\x00\x7f"[random.IntN(16)]
		}
		keys = append(keys, string(key))
	}
	for name, global := range map[string]func() string{
		"memory": func() string { return "" },
		"redis":  func() string { return sitetest.RedisGlobal(redistest.Start(t).Addr, sitetest.LongTimeout) },
	} {
		t.Run(name, func(t *testing.T) {
			s, a := sitetest.StartWithAdmin(t, sitetest.Config{Global: global(), Site: `
				rate_limit login {
					key {query.k}
					size 1
					drip_rate 1h
					ban 1h
					track_top 1000
				}
				respond admitted`})
			of := make(map[string]string) // keys by their text
			for i, key := range keys {
				path := "/?k=" + url.QueryEscape(key)
				wantStatus := func(after string, want int) {
					t.Helper()
					if got := s.Get(path).StatusCode; got != want {
						t.Errorf("%q: %s, a request is answered with %d, want %d", key, after, got, want)
					}
				}
				s.Get(path)
				s.Get(path)
				var listed struct {
					Bans []struct {
						Key     string
						NotUTF8 bool `json:"not_utf8"`
					}
				}
				_, answer := a.Send("GET", "bans", "")
				if err := json.Unmarshal([]byte(answer), &listed); err != nil || len(listed.Bans) != 1 || listed.Bans[0].NotUTF8 == utf8.ValidString(key) {
					t.Fatalf("%q: got %s, %v", key, answer, err)
				}
				text := listed.Bans[0].Key
				if other, ok := of[text]; ok && other != key {
					t.Errorf("%q and %q are both shown as %s", key, other, text)
				}
				of[text] = key

				asked := map[string]any{"limit": "login", "key": text}
				body := func() string {
					raw, err := json.Marshal(asked)
					if err != nil {
						t.Fatal(err)
					}
					return string(raw)
				}
				peeked := a.Ask("POST", "peek", body())
				if sitetest.WantJSON(t, peeked, `{"level": 1}`); peeked["key"] != text || peeked["banned"] == nil {
					t.Errorf("%q: peek shows %v", key, peeked)
				}
				if a.Ask("POST", "unban", body())["left"] == 0. {
					t.Errorf("%q: there was no ban to lift", key)
				}
				if answer := a.Ask("GET", "bans", ""); len(answer["bans"].([]any)) != 0 {
					t.Errorf("%q: after unban there are %v", key, answer)
				}
				asked["key"] = []string{text}
				a.Ask("POST", "reset", body())
				wantStatus("after unban and reset", 200)
				a.Ask("POST", "reset", body())
				asked["duration"] = "2h"
				a.Ask("POST", "ban", body())
				wantStatus("after a ban", 429)
				if i >= byCommand || name == "redis" {
					a.Ask("POST", "reset", `{"limit": "login", "key": `+quotedJSON(t, text)+`}`)
					continue
				}
				r := sitetest.RunCommand(t, "bans", "--address", a.Addr)
				row, _, _ := strings.Cut(strings.TrimPrefix(strings.Split(r.Out, "\n")[1], "login  "), "  ")
				shown, marked := strings.CutSuffix(row, " (not UTF-8)")
				if marked == utf8.ValidString(key) {
					t.Errorf("%q: bans prints %s", key, row)
				}
				typed := shown
				if i%2 == 1 && !strings.Contains(key, "\x00") && !strings.HasPrefix(key, `"`) && !strings.Contains(key, "\ufffd") {
					typed = key // as a shell passes it on
				}
				if r := sitetest.RunCommand(t, "unban", "--address", a.Addr, "login", typed); r.Status != 0 || !strings.HasPrefix(r.Out, "The ban of "+row+" at limit login is lifted") {
					t.Errorf("%q: unban %s: got %+v", key, typed, r)
				}
				sitetest.RunCommand(t, "reset", "--yes", "--address", a.Addr, "login", shown)
				wantStatus("after the commands unban and reset", 200)
			}
			var top struct{ Entries []struct{ Key string } }
			_, answer := a.Send("GET", "top?n=1000", "")
			if err := json.Unmarshal([]byte(answer), &top); err != nil || len(top.Entries) != len(of) {
				t.Errorf("top lists %d keys, want %d: %v", len(top.Entries), len(of), err)
			}
			for _, e := range top.Entries {
				if _, ok := of[e.Key]; !ok {
					t.Errorf("top shows %q, and bans did not", e.Key)
				}
			}
		})
	}
}

// quotedJSON returns text as JSON.
func quotedJSON(t *testing.T, text string) string {
	t.Helper()
	raw, err := json.Marshal(text)
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}

// TestKeysOfAnyBytesInReports guards that replay and explain show such keys in the same text,
// in tables, as JSON and in HTML.
func TestKeysOfAnyBytesInReports(t *testing.T) {
	t.Parallel()
	config := sitetest.ConfigFile(t, ":80 {\nrate_limit api {\nkey {query.k}\nsize 1\n}\n}\n")
	log := logFile(t, logLine(0, "192.0.2.1", "/?k=%ff")+logLine(0, "192.0.2.1", "/?k=%ff"))
	html := fmt.Sprint(sitetest.TempDir(t), "/report.html")
	r := sitetest.RunCommand(t, "replay", "-c", config, "--show-keys", "--html", html, log)
	page, err := os.ReadFile(html)
	if err != nil || !strings.Contains(r.Out, `"\xff"`) || !strings.Contains(string(page), `&#34;\xff&#34;`) {
		t.Errorf("replay: got %+v, %v", r, err)
	}
	const inJSON = `"key": "\"\\xff\""`
	if r := sitetest.RunCommand(t, "replay", "-c", config, "--show-keys", "--json", log); !strings.Contains(r.Out, inJSON) {
		t.Errorf("replay --json: got %+v", r)
	}
	if r := sitetest.RunCommand(t, "explain", "-c", config, "http://localhost/?k=%ff"); !strings.Contains(r.Out, `"\xff"`) {
		t.Errorf("explain: got %+v", r)
	}
	if r := sitetest.RunCommand(t, "explain", "-c", config, "--json", "http://localhost/?k=%ff"); !strings.Contains(r.Out, inJSON) {
		t.Errorf("explain --json: got %+v", r)
	}
}
