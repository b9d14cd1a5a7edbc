package docs

import (
	"bytes"
	"cmp"
	"context"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/doctest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// clientPrograms has, for each language of docs/clients.md, how its example becomes a program
// that sends a request for $URL, and how that is run.
var clientPrograms = map[string]struct {
	run                 []string // the file follows
	file, before, after string
}{
	"bash":       {[]string{"bash"}, "ask.sh", "", ""},
	"python":     {[]string{"python3"}, "ask.py", "", "\nimport os\nask(os.environ['URL'])\n"},
	"javascript": {[]string{"node"}, "ask.js", "", "\nask(process.env.URL).then((response) => process.exit(response.ok ? 0 : 1));\n"},
	"go": {
		[]string{"go", "run"}, "ask.go", "package main\n\nimport (\n\"log\"\n\"math/rand\"\n\"net/http\"\n\"os\"\n\"strconv\"\n\"time\"\n)\n\n",
		"\nfunc main() {\nres, err := ask(os.Getenv(\"URL\"))\nif err != nil || res.StatusCode != 200 {\nlog.Fatal(res, err)\n}\n}\n",
	},
}

// goCache is where go keeps what it has compiled. TestMain moves the home directory, where it
// is by default.
var goCache = func() string {
	dir, _ := os.UserCacheDir()
	return cmp.Or(os.Getenv("GOCACHE"), filepath.Join(dir, "go-build"))
}()

// TestClientExamples guards the examples of docs/clients.md against a limit that has room for
// one request a second: each program is denied once, waits for as long as it is told, and is
// admitted. Those in Python and JavaScript are skipped where there is no interpreter.
func TestClientExamples(t *testing.T) {
	target, err := url.Parse("http://" + sitetest.StartProcess(t, sitetest.Config{Site: "rate_limit {\nkey {path}\nrate 1/s\n}\nrespond ok"}))
	if err != nil {
		t.Fatal(err)
	}
	examples := 0
	for _, b := range doctest.Blocks(t, "docs/clients.md") {
		p, ok := clientPrograms[b.Language]
		if !ok {
			t.Errorf("%s: no test runs %q", b.Place, b.Language)
			continue
		}
		examples++
		t.Run(b.Language, func(t *testing.T) {
			if _, err := exec.LookPath(p.run[0]); err != nil && (p.run[0] == "python3" || p.run[0] == "node") {
				t.Skipf("there is no %s", p.run[0])
			}
			file := filepath.Join(t.TempDir(), p.file)
			if err := os.WriteFile(file, []byte(p.before+b.Code+p.after), 0o600); err != nil {
				t.Fatal(err)
			}

			// What the program meets. The first of its requests finds the bucket full.
			var mu sync.Mutex
			var statuses []string
			var denied, wait time.Duration
			start := time.Now()
			proxy := httputil.NewSingleHostReverseProxy(target)
			proxy.ModifyResponse = func(res *http.Response) error {
				mu.Lock()
				defer mu.Unlock()
				statuses = append(statuses, strconv.Itoa(res.StatusCode))
				now := time.Since(start)
				if res.StatusCode == http.StatusOK {
					wait = now - denied
				}
				denied = now
				return nil
			}
			front := sitetest.NewUpstream(t, func(w http.ResponseWriter, r *http.Request) {
				mu.Lock()
				first := len(statuses) == 0
				mu.Unlock()
				if first {
					if status, _ := sitetest.Ask(r.Context(), target.JoinPath(r.URL.Path).String()); status != http.StatusOK {
						t.Errorf("filling the bucket: got %d", status)
					}
				}
				proxy.ServeHTTP(w, r)
			})
			ctx, cancel := context.WithTimeout(t.Context(), 10*sitetest.Patience) // go may have to compile all of net/http
			defer cancel()
			cmd := exec.CommandContext(ctx, p.run[0], append(p.run[1:], file)...)
			cmd.Env = append(os.Environ(), "URL=http://"+front+"/"+b.Language, "GOCACHE="+goCache)
			var out bytes.Buffer
			cmd.Stdout, cmd.Stderr = &out, &out
			if err := cmd.Run(); err != nil {
				t.Errorf("%v: %s", err, out.String())
			}
			if got := strings.Join(statuses, " "); got != "429 200" || wait < time.Second {
				t.Errorf("got %s, the last after %v", got, wait)
			}
		})
	}
	if examples != len(clientPrograms) {
		t.Errorf("found %d examples, want %d", examples, len(clientPrograms))
	}
}
