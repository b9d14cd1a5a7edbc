package operation

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// startNginx runs an nginx until the test ends, with a configuration of which the
// directives of servers and those that they need are given, and returns the address at
// which it serves the files of its directory.
func startNginx(t testing.TB, config string) string {
	t.Helper()
	addr := redistest.FreeAddr(t)
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "api"), 0o700); err != nil {
		t.Fatal(err)
	}
	writeAt(t, filepath.Join(dir, "api", "page"), "ok")
	config = strings.Replace(config, "server {", fmt.Sprintf("server {\n\tlisten %s;\n\troot %s;", addr, dir), 1)
	for _, of := range []string{"client_body", "proxy", "fastcgi", "uwsgi", "scgi"} {
		config = fmt.Sprintf("%s_temp_path %s;\n", of, dir) + config
	}
	file := filepath.Join(dir, "nginx.conf")
	writeAt(t, file, fmt.Sprintf("daemon off;\nmaster_process off;\npid %s/pid;\nevents {}\nhttp {\naccess_log off;\n%s}\n", dir, config))
	output := new(bytes.Buffer)
	cmd := exec.Command(program(t, "nginx"), "-p", dir, "-e", "stderr", "-c", file)
	cmd.Stdout, cmd.Stderr = output, output
	exited, err := redistest.Run(cmd)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-exited
	})
	redistest.WaitFor(t, patience, func() error {
		select {
		case <-exited:
			t.Fatalf("nginx exited: %v\n%s\n%s", cmd.ProcessState, output, config)
		default:
		}
		conn, err := net.Dial("tcp", addr)
		if err == nil {
			err = conn.Close()
		}
		return err
	})
	return addr
}

// codeBlock returns the first code block of a language in a section of a document.
func codeBlock(t testing.TB, document, heading, language string) string {
	t.Helper()
	_, section, _ := strings.Cut(read(t, root, document), "\n## "+heading+"\n")
	section, _, _ = strings.Cut(section, "\n## ")
	_, code, _ := strings.Cut(section, "```"+language+"\n")
	code, _, found := strings.Cut(code, "```")
	if !found {
		t.Fatalf("%s has no %s under %q", document, language, heading)
	}
	return code
}

// replaceOne replaces the only occurrence of a part.
func replaceOne(t testing.TB, text, part, by string) string {
	t.Helper()
	if strings.Count(text, part) != 1 {
		t.Fatalf("%q is there %d times, want once:\n%s", part, strings.Count(text, part), text)
	}
	return strings.Replace(text, part, by, 1)
}

// outcomes are how many of some requests passed at once, passed later and were rejected.
type outcomes struct{ quick, late, rejected int }

// burst sends n requests at once and as many after a while, and returns what came of them.
// If this machine was too slow for that to be certain, ok is false.
func burst(t *testing.T, url string, n int, apart time.Duration) (o outcomes, ok bool) {
	const late = 50 * time.Millisecond
	type answer struct {
		status int
		took   time.Duration
	}
	answers := make([]answer, 2*n)
	start := time.Now()
	redistest.Together(t, 2*n, func(i int) {
		from := start
		if i >= n {
			from = start.Add(apart)
			time.Sleep(time.Until(from)) // the limits are on real time
		}
		status, _ := fetch(t, url)
		answers[i] = answer{status, time.Since(from)}
	})
	slowest := time.Duration(0)
	for _, a := range answers {
		switch {
		case a.status == http.StatusServiceUnavailable:
			o.rejected++
		case a.status != http.StatusOK:
			t.Errorf("got status %d", a.status)
		case a.took >= late:
			o.late++
			continue
		default:
			o.quick++
		}
		slowest = max(slowest, a.took)
	}
	return o, slowest < late-10*time.Millisecond
}

// TestNginxLimits guards the table of limit_req in docs/migration.md on a real nginx: of
// requests that come at once it admits, delays and rejects as many as Caddy with what
// stands beside it.
func TestNginxLimits(t *testing.T) {
	config := codeBlock(t, "docs/migration.md", "From nginx", "nginx")
	rows := regexp.MustCompile("(?m)^\\| `(limit_req zone=api.*;)` \\| (.*) \\|$").FindAllStringSubmatch(read(t, root, "docs/migration.md"), -1)
	if len(rows) != 4 {
		t.Errorf("found %d rows, want 4", len(rows))
	}
	for _, row := range rows {
		t.Run(row[1], func(t *testing.T) {
			conf := replaceOne(t, config, "limit_req zone=api burst=5 delay=2;", row[1])
			nginx := startNginx(t, replaceOne(t, conf, "limit_conn open 20;", ""))
			options := strings.NewReplacer("`", "", ", ", "\n\t\t").Replace(row[2])
			n := startNode(t, func(n *node) string {
				return fmt.Sprintf("http://%s {\n\trate_limit {\n\t\tdrip_rate 100ms\n\t\tstatus 503\n\t\t%s\n\t}\n\trespond ok\n}\n", n.site, options)
			})
			of := func(addr string) outcomes {
				for range 10 {
					if o, ok := burst(t, "http://"+addr+"/api/page", 12, 250*time.Millisecond); ok {
						return o
					}
					time.Sleep(time.Second) // until nothing is left of it
				}
				t.Fatal("this machine is too slow for requests at once")
				return outcomes{}
			}
			got, want := of(n.site), of(nginx)
			if got != want || want.rejected == 0 || want.late == 0 == strings.Contains(options, "max_delay") {
				t.Errorf("got %+v, nginx %+v", got, want)
			}
		})
	}
}

// TestNginxConnections guards the row of limit_conn in docs/migration.md: nginx and
// `concurrency` let as many requests be in progress.
func TestNginxConnections(t *testing.T) {
	const most = 20
	for _, server := range []string{"nginx", "Caddy"} {
		t.Run(server, func(t *testing.T) {
			reached, release := make(chan struct{}), make(chan struct{})
			upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				reached <- struct{}{}
				<-release
				_, _ = io.WriteString(w, "ok")
			}))
			defer upstream.Close()
			var addr string
			if server == "nginx" {
				conf := codeBlock(t, "docs/migration.md", "From nginx", "nginx")
				addr = startNginx(t, replaceOne(t, conf, "limit_req zone=api burst=5 delay=2;", "proxy_pass "+upstream.URL+";"))
			} else {
				site := codeBlock(t, "docs/migration.md", "From nginx", "caddyfile")
				_, rest, _ := strings.Cut(site, "limit api {")
				_, rest, _ = strings.Cut(rest, "}")
				head, _, _ := strings.Cut(site, "limit api {")
				addr = startNode(t, func(n *node) string {
					return fmt.Sprintf("http://%s {\n%s%s\treverse_proxy %s\n}\n", n.site, head, rest, upstream.URL)
				}).site
			}
			statuses := make(chan int)
			for range most {
				go func() {
					status, _ := fetch(t, "http://"+addr+"/api/")
					statuses <- status
				}()
			}
			for range most {
				<-reached
			}
			if status, _ := fetch(t, "http://"+addr+"/api/"); status != http.StatusServiceUnavailable {
				t.Errorf("beyond %d in progress: status %d", most, status)
			}
			close(release)
			for range most {
				if status := <-statuses; status != http.StatusOK {
					t.Errorf("in progress: status %d", status)
				}
			}
			go func() { <-reached }()
			redistest.WaitFor(t, patience, func() error { // its end may be noticed a little later
				if status, _ := fetch(t, "http://"+addr+"/api/"); status != http.StatusOK {
					return fmt.Errorf("when none is in progress: status %d", status)
				}
				return nil
			})
		})
	}
}

// TestNginxCallsService guards the recipe by which nginx asks a Caddy that decides.
func TestNginxCallsService(t *testing.T) {
	const heading = "Limits for other proxies"
	upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, "upstream "+r.URL.String())
	}))
	defer upstream.Close()
	nginxAsking := func(service string) string {
		conf := codeBlock(t, "deploy/recipes.md", heading, "nginx")
		conf = replaceOne(t, conf, "http://localhost:9000", upstream.URL)
		return startNginx(t, "server {\n"+replaceOne(t, conf, "10.0.0.9:9100", service)+"}\n")
	}
	n := startNode(t, func(n *node) string {
		config := replaceOne(t, codeBlock(t, "deploy/recipes.md", heading, "caddyfile"), "10.0.0.10", "127.0.0.1")
		config = strings.ReplaceAll(config, "\t\tsize ", "\t\tstatus 403\n\t\tsize ")
		return replaceOne(t, config, ":9100 {", "http://"+n.site+" {")
	})
	site := "http://" + nginxAsking(n.site)
	for i := range 7 {
		res, err := http.Get(site + "/search?q=x")
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(res.Body)
		res.Body.Close()
		got, want := fmt.Sprint(res.StatusCode, " ", res.Header.Get("Retry-After"), " ", string(body)), "200  upstream /search?q=x"
		if i >= 5 {
			got, want = fmt.Sprint(res.StatusCode, " ", res.Header.Get("Retry-After")), "429 1"
		}
		if got != want {
			t.Errorf("search %d: got %q, want %q", i+1, got, want)
		}
	}
	if status, body := fetch(t, site+"/other"); status != http.StatusOK || body != "upstream /other" {
		t.Errorf("another page: got %d %q", status, body)
	}
	if status, _ := fetch(t, "http://"+nginxAsking(redistest.FreeAddr(t))+"/other"); status != http.StatusInternalServerError {
		t.Errorf("without the service: got status %d, want 500", status)
	}
}
