package behaviour

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/adaptive"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// loadOf returns what the limit of a path that follows the load does now.
func loadOf(s *sitetest.Site, path string) adaptive.State {
	return s.BucketAt(path).Limit.Load.Controllers.State(time.Now())
}

// blocking returns an upstream that answers requests for /slow when they are released.
func blocking(t testing.TB) (upstream string, arrived <-chan struct{}, release func()) {
	in, out := make(chan struct{}), make(chan struct{})
	upstream = sitetest.NewUpstream(t, func(_ http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/slow" {
			in <- struct{}{}
			<-out
		}
	})
	release = sync.OnceFunc(func() { close(out) })
	t.Cleanup(release)
	return upstream, in, release
}

// TestAuto guards what becomes of a request that a limit turns away which follows the load: 503,
// a time to retry, placeholders for error routes; that it was charged by the other limits of the
// block, and is told of by the access log, metrics, status and peek, and is none in progress.
func TestAuto(t *testing.T) {
	upstream, arrived, release := blocking(t)
	s, a := sitetest.StartWithAdmin(t, sitetest.Config{Site: `
		rate_limit {
			log
			limit up {
				concurrency auto {
					latency 1s
					min 1
					max 1
					low path /bots
				}
			}
			limit quota {
				size 9
				drip_rate 1h
			}
		}
		reverse_proxy ` + upstream + `
		handle_errors 503 {
			respond "{http.rate_limit.by} {http.rate_limit.limit} {http.rate_limit.denied}" 503
		}`})
	if got := s.Get("/"); got.StatusCode != 200 || got.Header.Get("X-RateLimit-Remaining") != "8" {
		t.Errorf("got %s, want it admitted, with what is left of the other limit", got)
	}
	var slow sync.WaitGroup
	slow.Go(func() { s.Get("/slow") })
	<-arrived
	for i := range 3 {
		got := s.Get([]string{"/", "/", "/bots"}[i])
		wait, _ := strconv.Atoi(got.Header.Get("Retry-After"))
		if got.StatusCode != 503 || got.Text != "load up true" || wait < 1 || wait > 4 || got.Header.Get("X-RateLimit-Limit") != "9" {
			t.Errorf("got %s %q, want status 503, by load, and a time to retry", got, got.Text)
		}
	}
	logged, _ := s.LastAccess()["rate_limit"].(map[string]any)
	if logged["result"] != "denied" || logged["by"] != "load" || logged["limit"] != "up" || logged["retry_after"] == nil {
		t.Errorf("the access log has %v", logged)
	}
	wantSamples(t, collected(t, s.Process), map[string]string{
		`load_limit{limit="up"}`: "1", `load_in_progress{limit="up"}`: "1", `load_uncounted{limit="up",why="overdue"}`: "0", `load_uncounted{limit="up",why="body"}`: "0", `load_latency_seconds{limit="up"}`: "1",
		`load_shed_total{class="high",limit="up"}`: "0", `load_shed_total{class="normal",limit="up"}`: "2", `load_shed_total{class="low",limit="up"}`: "1",
		`decisions_total{by="load",limit="up",result="admitted"}`: "2", `decisions_total{by="load",limit="up",result="denied"}`: "3",
		`decisions_total{by="memory",limit="quota",result="admitted"}`: "5",
	})
	if metrics := collected(t, s.Process); metrics[`decisions_total{by="memory",limit="up",result="admitted"}`] != "" || metrics[`decisions_total{by="load",limit="quota",result="admitted"}`] != "" {
		t.Error("metrics have deciders that never decide on a limit")
	}
	sitetest.WantJSON(t, a.Ask("GET", "status", "")["load"].([]any)[0],
		`{"path": "up", "keys": 1, "limit": 1, "in_progress": 1, "uncounted": {"overdue": 0, "body": 0}, "latency": 1, "shed": {"high": 0, "normal": 2, "low": 1}}`)
	if out := sitetest.RunCommand(t, "status", "--address", a.Addr).Out; !strings.Contains(out, "ALLOWED  IN PROGRESS") || !strings.Contains(out, "no answers") {
		t.Errorf("status has no table of load, without answers:\n%s", out)
	}
	sitetest.WantJSON(t, a.Ask("POST", "peek", `{"limit": "up"}`), `{"limit": "up", "size": 1, "level": 1, "remaining": 0, "in_progress": true}`)
	if status, body := a.Send("POST", "reset", `{"limit": "up"}`); status != 400 || !strings.Contains(body, "it follows the load") {
		t.Errorf("reset: %d %s", status, body)
	}
	release()
	slow.Wait()
	if n := loadOf(s, "up").InProgress; n != 0 {
		t.Errorf("%d in progress at the end", n)
	}
	if got := s.Get("/"); got.StatusCode != 200 {
		t.Errorf("got %s when nothing is in progress", got)
	}
}

// TestAutoBesideOthers guards that a request which another limit denies takes no place, and
// that one that is turned away settles what it holds of others.
func TestAutoBesideOthers(t *testing.T) {
	t.Parallel()
	upstream, arrived, release := blocking(t)
	s := sitetest.Start(t, `
		rate_limit {
			limit up {
				key {query.tenant}
				concurrency auto {
					min 1
					max 1
				}
			}
			limit inflight {
				key all
				concurrency 2
			}
		}
		reverse_proxy `+upstream)
	var slow sync.WaitGroup
	slow.Go(func() { s.Get("/slow?tenant=a") })
	<-arrived
	for range 3 {
		if got := s.Get("/?tenant=a"); got.StatusCode != 503 || got.Text != "Too busy. Retry after "+got.Header.Get("Retry-After")+" s.\n" {
			t.Errorf("got %s %q beside a request of the same tenant", got, got.Text)
		}
	}
	if held := levelOf(t, s, "inflight", "all").Held; held != 1 {
		t.Errorf("%d units are held, want 1: those that were turned away have let go", held)
	}
	slow.Go(func() { s.Get("/slow?tenant=b") })
	<-arrived
	if got := s.Get("/?tenant=c"); got.StatusCode != 429 {
		t.Errorf("got %s, want 429 by the other limit", got)
	}
	if load := loadOf(s, "up"); load.InProgress != 2 || load.Keys != 2 {
		t.Errorf("%+v, want the two that the upstream has", load)
	}
	release()
	slow.Wait()
}

// TestAutoWithoutRedis guards that a limit which follows the load is asked, and its place freed,
// where on_error admits a request on which Redis has not decided.
func TestAutoWithoutRedis(t *testing.T) {
	t.Parallel()
	upstream, arrived, release := blocking(t)
	s := sitetest.StartConfig(t, sitetest.Config{
		Global: sitetest.RedisGlobal(redistest.FreeAddr(t), "timeout 10ms"),
		Site:   "rate_limit {\non_error allow\nlimit api {\nkey all\nrate 1/h\n}\nlimit up {\nconcurrency auto {\nmin 1\nmax 1\n}\n}\n}\nreverse_proxy " + upstream,
	})
	for range 2 {
		if got := s.Get("/"); got.StatusCode != 200 {
			t.Errorf("got %s, want it admitted without Redis", got)
		}
	}
	var slow sync.WaitGroup
	slow.Go(func() { s.Get("/slow") })
	<-arrived
	if got := s.Get("/"); got.StatusCode != 503 || loadOf(s, "up").Shed[adaptive.Normal] != 1 {
		t.Errorf("got %s, want it shed", got)
	}
	release()
	slow.Wait()
	if load := loadOf(s, "up"); load.InProgress != 0 {
		t.Errorf("%+v, want none in progress", load)
	}
}

// TestAutoDryRun guards that a dry run denies nothing, and shows what it would have shed.
func TestAutoDryRun(t *testing.T) {
	t.Parallel()
	upstream, arrived, release := blocking(t)
	s := sitetest.Start(t, "rate_limit up {\nconcurrency auto {\nmin 1\nmax 1\n}\ndry_run\n}\nheader >X-Dry {http.rate_limit.dry_run}\nreverse_proxy "+upstream)
	var slow sync.WaitGroup
	slow.Go(func() { s.Get("/slow") })
	<-arrived
	if got := s.Get("/"); got.StatusCode != 200 || got.Header.Get("X-Dry") != "up" || got.Header.Get("Retry-After") != "" {
		t.Errorf("got %s, want it admitted, and marked as one that would be denied", got)
	}
	if load := loadOf(s, "up"); load.Shed[adaptive.Normal] != 1 || load.InProgress != 1 {
		t.Errorf("%+v, want one that would have been shed", load)
	}
	release()
	slow.Wait()
}

// TestAutoClasses guards that matchers say how important a request is, high before low.
func TestAutoClasses(t *testing.T) {
	t.Parallel()
	upstream, arrived, release := blocking(t)
	s := sitetest.Start(t, "rate_limit up {\nconcurrency auto {\nmin 1\nmax 1\nhigh path /checkout* /both\nlow header User-Agent *bot*\n}\n}\nreverse_proxy "+upstream)
	var slow sync.WaitGroup
	slow.Go(func() { s.Get("/slow") })
	<-arrived
	s.Get("/checkout/1")
	s.Get("/both", "User-Agent: a bot")
	s.Get("/", "User-Agent: a bot")
	if got, want := loadOf(s, "up").Shed, [...]uint64{2, 0, 1}; got != want {
		t.Errorf("shed by class %v, want %v", got, want)
	}
	release()
	slow.Wait()
}

// TestAutoLeaves guards that requests leave when their responses begin, so that websockets and
// events are none in progress, also until body, and that none is forgotten, whatever comes of it.
func TestAutoLeaves(t *testing.T) {
	t.Parallel()
	body := make(chan struct{})
	upstream := sitetest.NewUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/up":
			upgrade(t, w, r)
		case "/events", "/body":
			if r.URL.Path == "/events" {
				w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
			}
			fmt.Fprint(w, "data: 1\n\n")
			_ = http.NewResponseController(w).Flush()
			end := body
			if r.URL.Path == "/events" {
				end = nil
			}
			select {
			case <-r.Context().Done():
			case <-end:
			}
		case "/break":
			w.Header().Set("Content-Length", "9")
			w.WriteHeader(200)
			_ = http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		case "/abort":
			panic(http.ErrAbortHandler)
		case "/leave":
			<-r.Context().Done()
		case "/500":
			w.WriteHeader(500)
		}
	})
	for _, until := range []string{"header", "body"} {
		s := sitetest.Start(t, "rate_limit up-"+until+" {\nconcurrency auto {\nuntil "+until+"\n}\n}\n"+
			"handle /panic {\nroute {\ntest_silent panic\n}\n}\nhandle /hijack {\nroute {\ntest_silent hijack\n}\n}\nhandle /nothing {\nerror 404\n}\nhandle /dead {\nreverse_proxy localhost:1\n}\n"+
			"handle {\nreverse_proxy "+upstream+" {\nflush_interval -1\n}\n}")
		none := func(what string) {
			t.Helper()
			sitetest.Eventually(t, what+" until "+until+" is in progress no more", func() bool { return loadOf(s, "up-"+until).InProgress == 0 })
		}
		conn, err := net.Dial("tcp", s.Addr)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		fmt.Fprintf(conn, "GET /up HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n", s.Addr)
		if res, err := http.ReadResponse(bufio.NewReader(conn), nil); err != nil || res.StatusCode != http.StatusSwitchingProtocols {
			t.Fatalf("%v, %v", res, err)
		}
		none("an upgraded connection")

		ctx, cancel := context.WithCancel(t.Context())
		t.Cleanup(cancel)
		begin := func(path string) io.ReadCloser {
			req, _ := http.NewRequestWithContext(ctx, http.MethodGet, s.URL(path), http.NoBody)
			res, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			return res.Body
		}
		defer begin("/events").Close()
		none("a stream of events")
		sending := begin("/body")
		if until == "body" {
			if n := loadOf(s, "up-body").InProgress; n != 1 {
				t.Errorf("%d in progress while the body is sent, want 1", n)
			}
			body <- struct{}{}
			_, _ = io.ReadAll(sending)
		}
		none("a body")
		sending.Close()
		for _, path := range []string{"/", "/break", "/abort", "/500", "/panic", "/hijack", "/nothing", "/dead"} {
			sitetest.Ask(ctx, s.URL(path))
			none(path)
		}
		ctx, cancel = context.WithTimeout(t.Context(), 50*time.Millisecond)
		sitetest.Ask(ctx, s.URL("/leave"))
		cancel()
		none("a request whose client left")
	}
}

// TestAutoStaysThroughReloads guards that a limit knows after a reload what it did before, and
// starts anew with other options.
func TestAutoStaysThroughReloads(t *testing.T) {
	t.Parallel()
	upstream, arrived, release := blocking(t)
	c := sitetest.Config{Site: "rate_limit up {\nconcurrency auto {\nmin 1\nmax 1\n}\n}\nreverse_proxy " + upstream + " {\nstream_close_delay 1h\n}"}
	s := sitetest.StartConfig(t, c)
	var slow sync.WaitGroup
	slow.Go(func() { s.Get("/slow") })
	<-arrived
	s.Reload(c)
	if load := loadOf(s, "up"); load.InProgress != 1 {
		t.Errorf("%+v after a reload, want 1 in progress", load)
	}
	c.Site = strings.Replace(c.Site, "max 1", "max 2", 1)
	s.Reload(c)
	if load := loadOf(s, "up"); load.InProgress != 0 || load.Limit != 2 {
		t.Errorf("%+v with other options, want none in progress and a limit of 2", load)
	}
	release()
	slow.Wait()
	if n := s.Process.Loads.Len(); n != 1 {
		t.Errorf("%d controllers are kept, want those of the config", n)
	}
}

// TestShedEvents guards that what is shed emits an event of its own, once a second at most, and
// none of denials, which a handler may act on.
func TestShedEvents(t *testing.T) {
	subscribe(t)
	p, move := clockedProcess(0)
	upstream, arrived, release := blocking(t)
	s := sitetest.StartConfig(t, sitetest.Config{Process: p, Global: listening("a"), Site: "rate_limit up {\nconcurrency auto {\nmin 1\nmax 1\n}\n}\nreverse_proxy " + upstream})
	var slow sync.WaitGroup
	slow.Go(func() { s.Get("/slow") })
	<-arrived
	s.Get("/")
	s.Get("/")
	move(time.Second)
	if e := waitForEvents(t, telemetry.EventShed, 1)[0]; e.data["limit"] != "up" || e.data["count"] != uint64(2) {
		t.Errorf("got %v, want 2 at up", e)
	}
	s.Get("/")
	move(time.Second)
	if e := waitForEvents(t, telemetry.EventShed, 2)[1]; e.data["count"] != uint64(1) {
		t.Errorf("got %v, want 1", e)
	}
	if others := heardEvents(telemetry.EventExceeded); len(others) > 0 {
		t.Errorf("got %v", others)
	}
	release()
	slow.Wait()
}

// TestAutoIsExplained guards that explain, limits and check know a limit that follows the load.
func TestAutoIsExplained(t *testing.T) {
	t.Parallel()
	file := sitetest.ConfigFile(t, "http://localhost:8080 {\nrate_limit up {\nconcurrency auto {\nlatency 250ms\nhigh path /a\n}\n}\nrespond ok\n}\n")
	out := sitetest.RunCommand(t, "explain", "--config", file, "http://localhost:8080/").Out
	for _, want := range []string{"concurrency", "1000", "in progress", `auto latency 250ms min 4 until header high [{"path":["/a"]}]`} {
		if !strings.Contains(out, want) {
			t.Errorf("explain has no %q:\n%s", want, out)
		}
	}
	if out := sitetest.RunCommand(t, "check", file).Out; !strings.Contains(out, "No problems found.") {
		t.Errorf("check: %s", out)
	}
}
