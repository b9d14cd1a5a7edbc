package behaviour

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	ratelimit "github.com/seed-387a6c65/caddy-ratelimit"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome/fieldstest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/caddytest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/filetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// TestWaysToReachRedis guards that buckets in Redis work as those in the process
// do, by whatever way it is reached, and that what logs in is found nowhere
// else.
func TestWaysToReachRedis(t *testing.T) {
	const secret = "s3cret-canary-81c6"
	server := redistest.Start(t, "--requirepass", secret)
	file := filepath.Join(sitetest.TempDir(t), "password")
	filetest.Write(t, file, []byte(secret+"\n"))
	t.Setenv("RATELIMIT_TEST_PASSWORD", secret)
	t.Setenv("RATELIMIT_TEST_ADDRESS", server.Addr)

	for _, tc := range []struct{ name, global string }{
		{"tcp", sitetest.RedisGlobal(server.Addr, sitetest.LongTimeout, "password {env.RATELIMIT_TEST_PASSWORD}")},
		{"unix socket", sitetest.RedisGlobal(server.Socket, sitetest.LongTimeout, "password {file."+file+"}")},
		{"user and database", sitetest.RedisGlobal("{env.RATELIMIT_TEST_ADDRESS}", sitetest.LongTimeout, "db 1",
			"username default", "password {env.RATELIMIT_TEST_PASSWORD}")},
		{"url", sitetest.RedisGlobal("redis://:{env.RATELIMIT_TEST_PASSWORD}@"+server.Addr+"/2", sitetest.LongTimeout)},
		{"unix url", sitetest.RedisGlobal("unix://default:{env.RATELIMIT_TEST_PASSWORD}@"+server.Socket, sitetest.LongTimeout, "db 3")},
	} {
		t.Run(tc.name, func(t *testing.T) {
			admin := filepath.Join(sitetest.TempDir(t), "admin")
			c := sitetest.Config{Global: tc.global, Admin: "unix/" + admin, Site: `
				rate_limit ` + strings.ReplaceAll(tc.name, " ", "-") + ` {
					size 2
					drip_rate 1h
					headers x-ratelimit ratelimit-11
				}
				handle_errors {
					respond "{err.message}"
				}
				respond "admitted"
			`}
			s := sitetest.StartConfig(t, c)
			for _, want := range []string{"200 2 1", "200 2 0", "429 2 0", "429 2 0"} {
				a := s.Get("/")
				got := fmt.Sprint(a.StatusCode, " ", a.Header.Get("X-RateLimit-Limit"), " ",
					a.Header.Get("X-RateLimit-Remaining"))
				if got != want {
					t.Errorf("got %s, want %s: %s", got, want, a.Text)
				}
			}
			// The server's clock runs: what it says is only known roughly.
			a := s.Get("/")
			if after := fieldstest.Number(a.Header.Get("Retry-After")); after < 3500 || after > 3600 {
				t.Errorf("Retry-After is %d", after)
			}
			if clear := fieldstest.Number(a.Header.Get("X-RateLimit-Clear")); clear < 7100 || clear > 7200 {
				t.Errorf("X-RateLimit-Clear is %d", clear)
			}
			s.Reload(c)
			if a := s.Get("/"); a.StatusCode != 429 {
				t.Errorf("after a reload: %s", a)
			}
			app, err := s.Context().AppIfConfigured("rate_limit")
			if err != nil {
				t.Fatal(err)
			}
			if held := fmt.Sprintf("%+v", *app.(*ratelimit.App).Redis); strings.Contains(held, secret) {
				t.Errorf("the password is held resolved: %s", held)
			}

			shown := getUnix(t, admin, "/config/")
			if !strings.Contains(shown, `"redis"`) {
				t.Errorf("the config is shown as %s", shown)
			}
			log := filetest.Read(t, s.LogPath)
			if strings.Contains(shown, secret) || bytes.Contains(log, []byte(secret)) {
				t.Error("the password is in the config or the log")
			}
		})
	}
}

// getUnix returns what a server on a unix socket has under path.
func getUnix(t testing.TB, socket, path string) string {
	t.Helper()
	client := &http.Client{Timeout: sitetest.Patience, Transport: caddytest.FreshConnections(socket)}
	res, err := client.Get("http://127.0.0.1" + path)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil || res.StatusCode != 200 {
		t.Fatalf("%s: status %d, %v", path, res.StatusCode, err)
	}
	return string(body)
}

// TestRedisKeys guards what is in the database: keys with the prefix, of
// the limit's path and numbers and a digest, and nothing that a client sent.
func TestRedisKeys(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	s := sitetest.StartConfig(t, sitetest.Config{
		Global: sitetest.RedisGlobal(server.Addr, sitetest.LongTimeout, "db 5", "key_prefix shop:limits:"),
		Site: `
			rate_limit api {
				key {header.X-Key}
				size 10
				drip_rate 1h
				limit writes {
					size {header.X-Size}
					drip_rate 36s
					drip_size 2
				}
			}
			respond "admitted"
		`,
	})
	long := strings.Repeat("canary", 1000)
	for _, key := range []string{"canary", "{canary}", "canary:*", "a\tcanary", "", long} {
		if a := s.Get("/", "X-Key: "+key, "X-Size: 7"); a.StatusCode != 200 {
			t.Fatalf("key %.20q: %s", key, a)
		}
	}
	client := server.Client().Conn()
	defer client.Close()
	redistest.Done(t, client.Select(t.Context(), 5))
	keys, err := client.Keys(t.Context(), "*").Result()
	if err != nil {
		t.Fatal(err)
	}
	form := regexp.MustCompile(`^shop:limits:\{[A-Za-z0-9_-]{22}\}:` +
		`api(/writes)?(@client_ip)?:[0-9a-z]+\.[0-9a-z]+$`)
	slots := make(map[string]bool)
	for _, key := range keys {
		if !form.MatchString(key) {
			t.Errorf("key %q", key)
		}
		_, rest, _ := strings.Cut(key, "{")
		slot, _, _ := strings.Cut(rest, "}")
		slots[slot] = true
		// Redis counts in milliseconds, rounded up.
		if ttl := client.PTTL(t.Context(), key).Val(); ttl <= 0 || ttl > time.Hour+2*ms {
			t.Errorf("key %q expires in %v", key, ttl)
		}
	}
	if len(keys) != 12 || len(slots) != 6 {
		t.Errorf("got %d keys of %d digests, want 12 of 6: %q", len(keys), len(slots), keys)
	}
	if n := server.Client().DBSize(t.Context()).Val(); n != 0 {
		t.Errorf("%d keys are in another database", n)
	}
}

// TestProcessesShareRedis guards the point of it all: however many instances stand
// before one Redis, a flood of requests gets exactly one bucketful through.
func TestProcessesShareRedis(t *testing.T) {
	t.Parallel()
	const processes, requests, size = 2, 400, 100
	server := redistest.Start(t)
	c := sitetest.Config{
		Global: sitetest.RedisGlobal(server.Addr, sitetest.LongTimeout),
		Site:   fmt.Sprintf("rate_limit {\nsize %d\ndrip_rate 1h\n}\nrespond admitted", size),
	}
	var addrs []string
	for range processes {
		addrs = append(addrs, sitetest.StartProcess(t, c))
	}
	client := &http.Client{Timeout: sitetest.Patience, Transport: &http.Transport{MaxConnsPerHost: 25}}
	defer client.CloseIdleConnections()

	var answers [600]atomic.Int64 // by status
	var wg sync.WaitGroup
	for i := range requests {
		wg.Go(func() {
			res, err := client.Get("http://" + addrs[i%processes])
			if err != nil {
				t.Error(err)
				return
			}
			res.Body.Close()
			answers[res.StatusCode].Add(1)
		})
	}
	wg.Wait()
	admitted, denied := answers[200].Load(), answers[429].Load()
	if admitted != size || denied != requests-size {
		t.Errorf("of %d requests %d were admitted and %d denied, want %d and %d",
			requests, admitted, denied, size, requests-size)
	}
}

// TestRedisFails guards that a Redis which does not answer costs a request at
// most the timeout, that with on_error deny it is refused and not let through,
// and that the error is logged once, with its place.
func TestRedisFails(t *testing.T) {
	const short, longer, margin = 200 * ms, 2 * time.Second, 3 * time.Second
	paused := redistest.Start(t)
	paused.Process.Signal(syscall.SIGSTOP)
	locked := redistest.Start(t, "--requirepass", "s3cret")
	full := redistest.Start(t, "--maxmemory", "1")

	hole, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { hole.Close() })

	late := `^redis at ADDR did not answer within 200ms: `
	for _, tc := range []struct {
		name, addr, password string
		timeout              time.Duration
		log                  string
	}{
		{"paused", paused.Addr, "x", short, late},
		{"accepts and never answers", hole.Addr().String(), "x", short, late},
		{"refuses connections", "127.0.0.1:1", "x", longer, `^redis at ADDR .*connection refused$`},
		{"refuses the password", locked.Addr, "canary-5fd4", longer, `^redis at ADDR .*: WRONGPASS`},
		{"has no memory left", full.Addr, "", longer, `^redis at ADDR .*: OOM$`},
		{"has no such socket", "/nonexistent/redis.sock", "", longer, `^redis at ADDR .*no such file`},
	} {
		for name, errors := range map[string]string{
			"": "", ", with error routes": "handle_errors {\nrespond {err.status_code}\n}",
		} {
			t.Run(tc.name+name, func(t *testing.T) {
				options := []string{"timeout " + tc.timeout.String()}
				if tc.password != "" {
					options = append(options, "password "+tc.password)
				}
				s := sitetest.StartConfig(t, sitetest.Config{
					Global: sitetest.RedisGlobal(tc.addr, options...),
					Site:   "rate_limit {\nsize 9\non_error deny\n}\n" + errors + "\nrespond admitted",
				})
				const requests = 7
				for range requests {
					start := time.Now()
					a := s.Get("/")
					if took := time.Since(start); took > short+margin {
						t.Errorf("it took %v", took)
					}
					if a.StatusCode != 503 || a.Text == "admitted" {
						t.Errorf("got %s %q", a, a.Text)
					}
				}
				want := regexp.MustCompile(strings.Replace(tc.log, "ADDR", regexp.QuoteMeta(tc.addr), 1))
				var reports []sitetest.Entry
				sitetest.Eventually(t, "a report", func() bool { // a silent server may for a while only be far away
					reports = slices.DeleteFunc(s.Log("error", "rate_limit"), func(e sitetest.Entry) bool {
						return e["server"] != tc.addr // of the test before
					})
					return len(reports) > 0
				})
				for _, e := range reports {
					if text, _ := e["error"].(string); !want.MatchString(text) {
						t.Errorf("the log says %q, want %s", text, want)
					}
					if strings.Contains(e.Text(), "canary") {
						t.Errorf("the password is in the log: %s", e.Text())
					}
				}
				if len(reports) != 1 {
					t.Errorf("%d reports of %d requests", len(reports), requests)
				}
				if more := append(s.Log("error", sitetest.OwnLogger), s.Log("error", sitetest.ErrorLogger)...); len(more) > 0 {
					t.Errorf("it is reported again: %v", more)
				}
			})
		}
	}
}

// TestRedisRecovers guards that after an outage limits work again by
// themselves.
func TestRedisRecovers(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		stop func(*redistest.Server)
		cont func(*redistest.Server, testing.TB)
	}{
		{
			"paused",
			func(r *redistest.Server) { r.Process.Signal(syscall.SIGSTOP) },
			func(r *redistest.Server, _ testing.TB) { r.Process.Signal(syscall.SIGCONT) },
		},
		{"killed", (*redistest.Server).Kill, (*redistest.Server).Restart},
	} {
		t.Run(tc.name, func(t *testing.T) {
			server := redistest.Start(t)
			s := sitetest.StartConfig(t, sitetest.Config{
				Global: sitetest.RedisGlobal(server.Addr, "timeout 250ms"),
				Site:   "rate_limit {\nsize 1000\non_error deny\n}\nrespond admitted",
			})
			sitetest.Eventually(t, "the first answer", func() bool { return s.Get("/").StatusCode == 200 })
			tc.stop(server)
			if a := s.Get("/"); a.StatusCode != 503 {
				t.Errorf("while it is away: %s", a)
			}
			tc.cont(server, t)
			sitetest.Eventually(t, "answers again", func() bool { return s.Get("/").StatusCode == 200 })
		})
	}
}

// TestCancelledRequestsAreCharged guards that a client which goes away early, or
// whose request has a deadline, is charged anyway, and is no failure of
// Redis.
func TestCancelledRequestsAreCharged(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	s := sitetest.StartConfig(t, sitetest.Config{
		Global: sitetest.RedisGlobal(server.Addr, sitetest.LongTimeout),
		Site:   "rate_limit {\nsize 9\ndrip_rate 1h\n}\nrespond admitted",
	})
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	late, cancel := context.WithDeadline(t.Context(), time.Now().Add(-time.Second))
	defer cancel()
	for _, ctx := range []context.Context{cancelled, late} {
		r := httptest.NewRequestWithContext(ctx, "GET", s.URL("/"), nil)
		r.RemoteAddr = "127.0.0.1:1"
		s.Server().ServeHTTP(httptest.NewRecorder(), sitetest.Received(r))
	}
	if a := s.Get("/"); a.Header.Get("X-RateLimit-Remaining") != "6" {
		t.Errorf("after two such requests of 9: %s", a)
	}
	if reports := s.Log("error", sitetest.OwnLogger); len(reports) > 0 {
		t.Errorf("cancelled requests are reported: %v", reports)
	}
}

// TestTimeoutCoversAllBlocks guards that the timeout bounds what a request waits
// for Redis in all blocks that it passes, and not in each.
func TestTimeoutCoversAllBlocks(t *testing.T) {
	const timeout = time.Second
	server := redistest.Start(t)
	var blocks strings.Builder
	for i := range 4 {
		fmt.Fprintf(&blocks, "rate_limit block%d {\nsize 9\ndrip_rate 1h\n}\n", i)
	}
	s := sitetest.StartConfig(t, sitetest.Config{
		Global: sitetest.RedisGlobal(server.Addr, "timeout "+timeout.String()),
		Site:   blocks.String() + "respond admitted",
	})
	s.Run(sitetest.Step{Want: "200 limit=9 remaining=8 clear=3600.000"})
	server.Pause(t)
	start := time.Now()
	s.Run(sitetest.Step{Want: "200 limit=9 remaining=7 clear=7200.000"})
	if took := time.Since(start); took > timeout+timeout/4 {
		t.Errorf("a request that passes four blocks waited %v, want %v at most", took, timeout)
	}
}

// TestTimeoutCountsOnlyWaitingForRedis guards that only the waiting for Redis
// counts: a request that took long elsewhere, between one block and the next, is
// decided by Redis.
func TestTimeoutCountsOnlyWaitingForRedis(t *testing.T) {
	t.Parallel()
	const timeout = 250 * ms
	server := redistest.Start(t)
	upstream := sitetest.NewUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		<-time.After(2 * timeout)
		io.WriteString(w, "upstream")
	})
	s := sitetest.StartConfig(t, sitetest.Config{
		Global: sitetest.RedisGlobal(server.Addr, "timeout "+timeout.String()),
		Site: `
			rate_limit before {
				size 9
				drip_rate 1h
				on_error deny
			}
			reverse_proxy ` + upstream + ` {
				@ok status 200
				handle_response @ok {
					rate_limit behind {
						size 5
						drip_rate 1h
						on_error deny
					}
					copy_response
				}
			}
		`,
	})
	s.Run(sitetest.Step{Want: "200 limit=5 remaining=4 clear=3600.000", Text: "upstream"})
}

// TestTimeoutCoversAllSteps guards that the timeout bounds all of a request's
// waiting for Redis: several steps that are each in time are not.
func TestTimeoutCoversAllSteps(t *testing.T) {
	t.Parallel()
	const timeout, delay = 400 * ms, 300 * ms
	server := redistest.Start(t)
	proxy := redistest.StartProxy(t, server.Addr)
	proxy.Delay(delay)
	s := sitetest.StartConfig(t, sitetest.Config{
		Global: sitetest.RedisGlobal(proxy.Addr, "timeout "+timeout.String()),
		Site:   "rate_limit {\nsize 9\non_error deny\n}\nrespond admitted",
	})
	// The greeting takes one delay, the script at least another.
	if a := s.Get("/"); a.StatusCode != 503 {
		t.Errorf("got %s", a)
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
			s := sitetest.StartConfig(t, sitetest.Config{
				Global: sitetest.RedisGlobal(addr, "username "+user, "password "+password, kind),
				Site:   "rate_limit {\nsize 1000\non_error deny\n}\nhandle_errors {\nrespond \"{err.message}\"\n}\nrespond ok",
			})
			for range 8 {
				if a := s.Get("/"); strings.Contains(a.Text, "canary") {
					t.Errorf("%q: the answer has it: %s", reply, a.Text)
				}
			}
			sitetest.Eventually(t, "a line about Redis: "+reply+kind, func() bool {
				s.Get("/")
				return len(append(s.Log("error", "rate_limit"), s.Log("warn", "rate_limit")...)) > 0
			})
			for _, e := range s.Entries() {
				if text, _ := json.Marshal(e); strings.Contains(string(text), "canary") {
					t.Errorf("%q %q: the log has %s", kind, reply, text)
				}
			}
			s.Reload(sitetest.Config{Site: "respond ok"})
			s.Stop()
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
