package behaviour

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"golang.org/x/net/http2"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome/fieldstest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/caddytest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/filetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// eachNode calls do for a site in the process and for one on three instances with Redis,
// with the addresses of its instances.
func eachNode(t *testing.T, site string, do func(t *testing.T, urls []string)) {
	t.Run("memory", func(t *testing.T) {
		s := sitetest.Start(t, site)
		do(t, []string{s.URL("")})
	})
	t.Run("redis", func(t *testing.T) {
		server := redistest.Start(t)
		all, _ := nodes(t, 3, sitetest.Config{Admin: "localhost:0", Global: sitetest.RedisGlobal(server.Addr, sitetest.LongTimeout), Site: site})
		var urls []string
		for _, n := range all {
			urls = append(urls, "http://"+n.addr)
		}
		do(t, urls)
	})
}

// TestCountGuesses guards a login that counts wrong passwords: of any number of parallel
// guesses no more than the limit reach the password check, whichever instance they use,
// and right passwords are never counted.
func TestCountGuesses(t *testing.T) {
	const size, guessers = 5, 64
	site := "rate_limit login {\nkey all\nsize 5\ndrip_rate 1h\ncount status 401\nstatus 403\n}\n" +
		"basic_auth {\nadmin HASH\n}\nrespond in"
	site = strings.Replace(site, "HASH", rightHash, 1)
	eachNode(t, site, func(t *testing.T, urls []string) {
		for i := range 20 {
			if status, _ := sitetest.Ask(t.Context(), withPassword(urls[i%len(urls)], "right")); status != 200 {
				t.Fatalf("a right password got %d", status)
			}
		}
		var wrong, denied atomic.Int64
		redistest.Together(t, guessers, func(i int) {
			for range 3 {
				switch status, h := sitetest.Ask(t.Context(), withPassword(urls[i%len(urls)], "wrong")); status {
				case 401:
					wrong.Add(1)
				case 403:
					denied.Add(1)
					if h.Get("Retry-After") == "" {
						t.Error("a denial without Retry-After")
					}
				default:
					t.Errorf("got %d", status)
				}
			}
		})
		if n := wrong.Load(); n != size || denied.Load() != 3*guessers-size {
			t.Errorf("%d guesses were checked and %d denied, want %d", n, denied.Load(), size)
		}
		if status, _ := sitetest.Ask(t.Context(), withPassword(urls[0], "right")); status != 403 {
			t.Errorf("a full limit lets a right password in: %d", status)
		}
	})
}

// TestCountNotStatus guards that only responses without the given statuses count, alone and beside
// others that say which do.
func TestCountNotStatus(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, "rate_limit /a* a {\nkey all\nsize 2\ndrip_rate 1h\ncount not status 304 4xx\n}\n"+
		"rate_limit /b* b {\nkey all\nsize 1\ndrip_rate 1h\ncount {\nstatus 4xx\nnot status 404\nheader X-Failed *\n}\n}\n"+
		"header X-Failed yes\nrespond /a/304 304\nrespond /a/404 404\nrespond /b/404 404\nrespond /b/403 403\nrespond ok")
	for _, step := range []struct {
		path string
		want int
	}{
		{"/a/304", 304}, {"/a/404", 404}, {"/a/304", 304}, {"/a", 200}, {"/a/304", 304}, {"/a", 200}, {"/a/304", 429},
		{"/b/404", 404}, {"/b", 200}, {"/b/404", 404}, {"/b/403", 403}, {"/b/404", 429},
	} {
		if a := s.Get(step.path); a.StatusCode != step.want {
			t.Errorf("%s: got %s, want %d", step.path, a, step.want)
		}
	}
}

// TestCountGuessesInAnyTime guards that wrong passwords are bounded in any time, not only
// from an empty bucket: during an attack on a limit that drips, in no time more of them are
// checked than fit into the bucket and drip then. Right passwords of others, beside the
// attack, are never denied nor counted.
func TestCountGuessesInAnyTime(t *testing.T) {
	const size, drip, guessers, lasts = 5, 40 * time.Millisecond, 32, 1500 * time.Millisecond
	site := fmt.Sprintf("rate_limit login {\nkey {header.From}\nsize %d\ndrip_rate %v\ncount status 401\nstatus 403\n}\n"+
		"basic_auth {\nadmin %s\n}\nrespond in", size, drip, rightHash)
	server := redistest.Start(t)
	for name, c := range map[string]sitetest.Config{"memory": {Site: site}, "redis": {Site: site, Global: sitetest.RedisGlobal(server.Addr, sitetest.LongTimeout)}} {
		t.Run(name, func(t *testing.T) {
			instances := 1
			if c.Global != "" {
				instances = 3
			}
			c.Admin = "localhost:0"
			all, admins := nodes(t, instances, c)
			target := func(i int, password string) string {
				return withPassword("http://"+all[i%len(all)].addr, password)
			}
			var mu sync.Mutex
			var checked [][2]time.Time // when each guess was sent and answered that was checked
			start, right := time.Now(), 0
			redistest.Together(t, guessers+1, func(i int) {
				for n := i; time.Since(start) < lasts; n++ {
					if i == guessers {
						if status, _ := sitetest.Ask(t.Context(), target(n, "right"), "From", "user"); status != 200 {
							t.Errorf("a right password got %d beside an attack", status)
						}
						right++
						continue
					}
					sent := time.Now()
					switch status, _ := sitetest.Ask(t.Context(), target(n, "wrong"), "From", "attacker"); status {
					case 401:
						mu.Lock()
						checked = append(checked, [2]time.Time{sent, time.Now()})
						mu.Unlock()
					case 403:
					default:
						t.Errorf("a wrong password got %d", status)
					}
				}
			})
			slices.SortFunc(checked, func(a, b [2]time.Time) int { return a[0].Compare(b[0]) })
			for i, first := range checked {
				last := first[1]
				for j, c := range checked[i:] {
					if c[1].After(last) {
						last = c[1]
					}
					if most := size + int(last.Sub(first[0])/drip); j+1 > most {
						t.Fatalf("%d guesses were checked within %v, want at most %d", j+1, last.Sub(first[0]), most)
					}
				}
			}
			if len(checked) < 2*size || right < 2*size {
				t.Errorf("%d guesses were checked and %d right passwords: the test covers too little", len(checked), right)
			}
			sitetest.Eventually(t, "nothing is held", func() bool {
				l := admins[0].Ask("POST", "peek", `{"limit": "login", "key": "user"}`)
				if l["level"] != 0.0 {
					t.Fatalf("right passwords were counted: %v", l)
				}
				return l["held"] == nil || l["held"] == 0.0
			})
			t.Logf("%d guesses were checked, beside %d right passwords", len(checked), right)
		})
	}
}

// rightHash is the hash of the password "right".
const rightHash = "$2a$04$eIj3nMBjziSiROPpQD51BeY6zjTcsJK5WczYA0P/oORVWQUJ51m0q"

// withPassword returns a URL with the credentials of the user admin.
func withPassword(target, password string) string {
	u, _ := url.Parse(target)
	u.User, u.Path = url.UserPassword("admin", password), "/"
	return u.String()
}

// TestCountByResponse guards which responses are charged: by their status and fields,
// also those of later handlers' errors; and that a request counts whose response is not
// known, as its client left or the upstream broke off, but not one that no upstream had.
func TestCountByResponse(t *testing.T) {
	t.Parallel()
	upstream := sitetest.NewUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/abort":
			panic(http.ErrAbortHandler)
		case "/leave":
			<-r.Context().Done()
		case "/failed":
			w.Header().Set("X-Failed", "yes")
		case "/hints":
			w.WriteHeader(http.StatusEarlyHints)
			w.WriteHeader(http.StatusUnauthorized)
		case "/empty":
			w.WriteHeader(http.StatusUnauthorized)
		case "/cut":
			w.Header().Set("Content-Length", "100")
			w.WriteHeader(http.StatusUnauthorized)
			fmt.Fprint(w, "part")
			_ = http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		}
	})
	s := sitetest.Start(t, "rate_limit a {\nkey all\nsize 100\ndrip_rate 1h\ncount status 401 499 5xx\n}\n"+
		"rate_limit b {\nkey all\nsize 100\ndrip_rate 1h\ncount header X-Failed *\n}\n"+
		"error /error 503\nrespond /direct 401\nrespond /other 200\nrespond /canceled 499\nabort /aborted\nhandle_path /none* {\n}\n"+
		"reverse_proxy /unreachable "+redistest.FreeAddr(t)+"\n"+
		"reverse_proxy "+upstream)
	counted := func() (n [2]int) {
		for i, name := range []string{"a", "b"} {
			sitetest.Eventually(t, "nothing is held", func() bool { return level(t, s, name).Held == 0 })
			n[i] = int(level(t, s, name).Units)
		}
		return n
	}
	last := counted()
	for _, tc := range []struct {
		path string
		want [2]int
	}{
		{"/other", [2]int{}}, {"/direct", [2]int{1}}, {"/error", [2]int{1}}, {"/failed", [2]int{0, 1}}, {"/empty", [2]int{1}},
		{"/hints", [2]int{1}}, {"/cut", [2]int{1}}, {"/none", [2]int{}},
		{"/unreachable", [2]int{1}},                                                                                 // a proxy's 502
		{"/abort", [2]int{1, 1}}, {"/aborted", [2]int{1, 1}}, {"/leave", [2]int{1, 1}}, {"/canceled", [2]int{1, 1}}, // nobody knows
	} {
		ctx, cancel := context.WithCancel(t.Context())
		if tc.path == "/leave" {
			time.AfterFunc(50*time.Millisecond, cancel)
		}
		status, _ := sitetest.Ask(ctx, s.URL(tc.path))
		cancel()
		now := counted()
		if got := [2]int{now[0] - last[0], now[1] - last[1]}; got != tc.want {
			t.Errorf("%s, status %d: charged %d, want %d", tc.path, status, got, tc.want)
		}
		last = now
	}
}

// unauthorizing is a handler that rejects a login when its client has closed its side of
// the connection.
type unauthorizing struct{}

func (unauthorizing) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.test_unauthorizing", New: func() caddy.Module { return new(unauthorizing) }}
}

func (unauthorizing) ServeHTTP(_ http.ResponseWriter, r *http.Request, _ caddyhttp.Handler) error {
	<-r.Context().Done()
	return caddyhttp.Error(http.StatusUnauthorized, errors.New("wrong password"))
}

func init() {
	caddy.RegisterModule(unauthorizing{})
	httpcaddyfile.RegisterHandlerDirective("test_unauthorizing", func(httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
		return unauthorizing{}, nil
	})
}

// TestCountHalfClosed guards that guesses count whose clients close their side of the
// connection at once, before the limit is asked or after: they get the response anyway.
func TestCountHalfClosed(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, "route {\ntest_silent /before* pass\nrate_limit login {\nkey {path}\nsize 2\ndrip_rate 1h\ncount status 401 5xx\n}\n"+
		"test_unauthorizing /after\nrespond /before401 401\nrespond /before500 500\nrespond /beforetext no 500\nerror /beforeerror 500\n}")
	for path, counted := range map[string]int{"/after": 401, "/before401": 401, "/before500": 500, "/beforetext": 500, "/beforeerror": 500} {
		for i, want := range []int{counted, counted, 429} {
			conn, err := net.Dial("tcp", s.Addr)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: %s\r\n\r\n", path, s.Addr)
			if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
				t.Fatal(err)
			}
			res, err := http.ReadResponse(bufio.NewReader(conn), nil)
			if err != nil {
				t.Fatal(err)
			}
			res.Body.Close()
			if res.StatusCode != want {
				t.Errorf("%s: guess %d got %d, want %d", path, i, res.StatusCode, want)
			}
			sitetest.Eventually(t, "nothing is held", func() bool { return levelOf(t, s, "login", path).Held == 0 })
		}
	}
}

// level returns the level of the bucket with the key "all" of a limit.
func level(t *testing.T, s *sitetest.Site, limit string) (l struct{ Units, Held int64 }) {
	t.Helper()
	return levelOf(t, s, limit, "all")
}

// levelOf returns the level of the bucket with the given key of a limit.
func levelOf(t *testing.T, s *sitetest.Site, limit, key string) (l struct{ Units, Held int64 }) {
	t.Helper()
	b := s.BucketAt(limit)
	at := *b.Constant
	at.Name, at.Key = b.Name, key
	got, err := s.Process.Newest().Memory.Peek(context.Background(), at)
	if err != nil {
		t.Fatal(err)
	}
	l.Units, l.Held = got.Units, got.Held
	return l
}

// TestConcurrency guards that no more requests of a key are in progress at one time than
// the limit says, on all instances together, whatever ends them, and that nothing stays
// held.
func TestConcurrency(t *testing.T) {
	const size = 5
	var running, most atomic.Int64
	upstream := sitetest.NewUpstream(t, func(_ http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/leave" { // it goes on here when Caddy's request has ended
			time.Sleep(10 * time.Millisecond)
			return
		}
		n := running.Add(1)
		for last := most.Load(); n > last && !most.CompareAndSwap(last, n); last = most.Load() {
		}
		time.Sleep(10 * time.Millisecond)
		running.Add(-1)
		if r.URL.Path == "/abort" {
			panic(http.ErrAbortHandler)
		}
	})
	site := fmt.Sprintf("rate_limit inflight {\nkey all\nconcurrency %d\n}\nreverse_proxy %s", size, upstream)
	fields := sitetest.Start(t, strings.Replace(site, "concurrency", "headers x-ratelimit ratelimit-11\nconcurrency", 1)).Get("/")
	if want := `200 limit=5 remaining=4 clear=0.000 policy="inflight";q=5;qu="concurrent-requests" ratelimit="inflight";r=4`; fields.String() != want {
		t.Errorf("got %s, want %s", fields, want)
	}
	eachNode(t, site, func(t *testing.T, urls []string) {
		most.Store(0)
		var passed, denied atomic.Int64
		redistest.Together(t, 40, func(i int) {
			for n := range 10 {
				path := []string{"/", "/", "/abort", "/leave"}[n%4]
				ctx, cancel := context.WithCancel(t.Context())
				if path == "/leave" {
					time.AfterFunc(5*time.Millisecond, cancel)
				}
				switch status, h := sitetest.Ask(ctx, urls[i%len(urls)]+path); status {
				case 429:
					denied.Add(1)
					if h.Get("Retry-After") != "1" || h.Get("X-RateLimit-Limit") != "5" {
						t.Errorf("denied with %v", fieldstest.In(h))
					}
				default:
					passed.Add(1)
				}
				cancel()
			}
		})
		if n := most.Load(); n > size || n < 2 || passed.Load() < size || denied.Load() < size {
			t.Errorf("%d were in progress at once, want at most %d; %d passed, %d did not", n, size, passed.Load(), denied.Load())
		}
		sitetest.Eventually(t, "all may pass again", func() bool {
			status := 0
			for range size {
				status, _ = sitetest.Ask(t.Context(), urls[0]+"/")
			}
			return status == 200
		})
	})
}

// TestConcurrentZone guards zones of requests in progress, as proposed for
// mholt/caddy-ratelimit.
func TestConcurrentZone(t *testing.T) {
	t.Parallel()
	arrived, release := make(chan struct{}), make(chan struct{})
	upstream := sitetest.NewUpstream(t, func(_ http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/slow" {
			arrived <- struct{}{}
			<-release
		}
	})
	s := sitetest.Start(t, "rate_limit {\nzone inflight {\nkey static\nmax_concurrent 2\n}\nzone all {\nkey static\nevents 100\nwindow 1m\n}\n}\n"+
		"reverse_proxy "+upstream)
	var running sync.WaitGroup
	for range 2 {
		running.Go(func() { sitetest.Ask(t.Context(), s.URL("/slow")) })
		<-arrived
	}
	if status, h := sitetest.Ask(t.Context(), s.URL("/")); status != 429 || h.Get("Retry-After") != "1" {
		t.Errorf("a third got %d, %v", status, fieldstest.In(h))
	}
	close(release)
	running.Wait()
	sitetest.Eventually(t, "none is", func() bool { status, _ := sitetest.Ask(t.Context(), s.URL("/")); return status == 200 })
}

// TestDeniedRequestsHoldNothing guards that a request holds nothing which a later limit
// has denied, however buckets are charged.
func TestDeniedRequestsHoldNothing(t *testing.T) {
	t.Parallel()
	for _, accounting := range []string{"atomic", "each"} {
		s := sitetest.Start(t, "rate_limit {\naccounting "+accounting+"\nlimit inflight_"+accounting+" {\nkey all\nconcurrency 3\n}\n"+
			"limit tokens_"+accounting+" {\nkey all\nsize 100\ndrip_rate 1h\ncost 2\nactual_cost bytes\n}\n"+
			"limit last_"+accounting+" {\nkey all\nsize 1\ndrip_rate 1h\ncount_denied\n}\n}\nrespond 12345")
		for i := range 9 {
			want := 429
			if i == 0 {
				want = 200
			}
			if status, _ := sitetest.Ask(t.Context(), s.URL("/")); status != want {
				t.Fatalf("%s: request %d got %d", accounting, i, status)
			}
		}
		for _, name := range []string{"inflight", "tokens"} {
			if l := level(t, s, name+"_"+accounting); l.Held != 0 || name == "tokens" && l.Units != 5 {
				t.Errorf("%s: %s has %+v, want 5", accounting, name, l)
			}
		}
	}
}

// TestConcurrencyOfUpgrades guards that an upgraded connection is in progress until it is
// closed.
func TestConcurrencyOfUpgrades(t *testing.T) {
	t.Parallel()
	upstream := sitetest.NewUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") != "" {
			upgrade(t, w, r)
		}
	})
	s := sitetest.Start(t, "rate_limit inflight {\nkey all\nconcurrency 2\n}\nreverse_proxy "+upstream)
	open := func() net.Conn {
		conn, err := net.Dial("tcp", s.Addr)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		fmt.Fprintf(conn, "GET /up HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n", s.Addr)
		res, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil || res.StatusCode != http.StatusSwitchingProtocols {
			t.Fatalf("%v, %v", res, err)
		}
		return conn
	}
	first, _ := open(), open()
	if status, _ := sitetest.Ask(t.Context(), s.URL("/")); status != 429 {
		t.Errorf("got %d beside two upgraded connections", status)
	}
	first.Close()
	sitetest.Eventually(t, "a closed connection is not in progress", func() bool { return level(t, s, "inflight").Held == 1 })
	if status, _ := sitetest.Ask(t.Context(), s.URL("/")); status != 200 {
		t.Errorf("got %d beside one upgraded connection", status)
	}
}

// TestActualCost guards what requests are charged whose cost is known at their end.
func TestActualCost(t *testing.T) {
	t.Parallel()
	upstream := sitetest.NewUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		if cost := r.URL.Query().Get("cost"); cost != "" {
			w.Header().Set("X-Cost", cost)
		}
		if r.URL.Path == "/file" {
			_, _ = io.WriteString(w, strings.Repeat("x", 3000))
		}
		if r.URL.Path == "/fail" {
			w.WriteHeader(500)
		}
	})
	s := sitetest.Start(t, "rate_limit tokens {\nkey all\nsize 10000\ndrip_rate 1h\ncost 50\nactual_cost {http.response.header.X-Cost}\n}\n"+
		"rate_limit bytes {\nkey all\nsize 100000\ndrip_rate 1h\nactual_cost bytes\n}\n"+
		"rate_limit good {\nkey all\nsize 10000\ndrip_rate 1h\ncost 50\nactual_cost {http.response.header.X-Cost}\ncount status 2xx\n}\n"+
		"reverse_proxy "+upstream)
	var last [3]int64
	for _, tc := range []struct {
		path string
		want [3]int64
	}{
		{"/?cost=7", [3]int64{7, 0, 7}},
		{"/?cost=0", [3]int64{0, 0, 0}},
		{"/file?cost=120", [3]int64{120, 3000, 120}}, // more than was estimated
		{"/fail?cost=9", [3]int64{9, 0, 0}},
		{"/", [3]int64{50, 0, 50}},
		{"/?cost=much", [3]int64{50, 0, 50}},
		{"/?cost=-3", [3]int64{50, 0, 50}},
		{"/?cost=1000000", [3]int64{20000 - 286, 0, 20000 - 277}}, // a debt of the size at most
	} {
		status, _ := sitetest.Ask(t.Context(), s.URL(tc.path))
		var got [3]int64
		for i, name := range []string{"tokens", "bytes", "good"} {
			sitetest.Eventually(t, "nothing is held", func() bool { return level(t, s, name).Held == 0 })
			n := level(t, s, name).Units
			got[i], last[i] = n-last[i], n
		}
		if got != tc.want {
			t.Errorf("%s, status %d: charged %d, want %d", tc.path, status, got, tc.want)
		}
	}
	if status, _ := sitetest.Ask(t.Context(), s.URL("/")); status != 429 {
		t.Errorf("got %d in debt", status)
	}
	if warnings := s.Log("warn", sitetest.OwnLogger); len(warnings) == 0 || !strings.Contains(warnings[0].Text(), "actual cost") {
		t.Errorf("got warnings %v", warnings)
	}
}

// TestBytesUpAndDown guards that with a cost of body and an actual cost of bytes a request is
// charged both, as they were sent, whatever becomes of it; and that others have to fit
// beside what is uploaded.
func TestBytesUpAndDown(t *testing.T) {
	upstream := sitetest.NewUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		n, _ := strconv.Atoi(r.URL.Query().Get("down"))
		_, _ = io.WriteString(w, strings.Repeat("x", n))
	})
	const numbers = "key all\nsize 100000\ndrip_rate 1h\n"
	site := "rate_limit bytes {\nmatch not path /left\n" + numbers + "cost body\nactual_cost bytes\n}\n" +
		"rate_limit /left bytes {\n" + numbers + "cost 0\n}\nreverse_proxy " + upstream
	eachNode(t, site, func(t *testing.T, urls []string) {
		left := int64(100_000)
		for i, tc := range []struct {
			method   string
			up, down int64
			status   int
		}{
			{"POST", 60_000, 1573, 200}, {"GET", 0, 0, 200}, {"GET", 0, 1000, 200}, {"PUT", 7, 0, 200}, {"HEAD", 0, 500, 200},
			{"POST", 40_000, 0, 429}, {"POST", 1, 50_000, 200}, {"GET", 0, 1, 429},
		} {
			req, err := http.NewRequestWithContext(t.Context(), tc.method, fmt.Sprintf("%s/?down=%d", urls[i%len(urls)], tc.down), strings.NewReader(strings.Repeat("y", int(tc.up))))
			if err != nil {
				t.Fatal(err)
			}
			res, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			_, _ = io.Copy(io.Discard, res.Body)
			res.Body.Close()
			if res.StatusCode != tc.status {
				t.Errorf("%s of %d and %d: got %d, want %d", tc.method, tc.up, tc.down, res.StatusCode, tc.status)
			}
			if tc.method == "HEAD" {
				tc.down = 0
			}
			if res.StatusCode == http.StatusOK {
				left -= tc.up + tc.down
			}
			sitetest.Eventually(t, fmt.Sprintf("%s of %d and %d leaves %d", tc.method, tc.up, tc.down, left), func() bool {
				_, header := sitetest.Ask(t.Context(), urls[(i+1)%len(urls)]+"/left")
				return header.Get("X-RateLimit-Remaining") == strconv.FormatInt(max(left, 0), 10)
			})
		}
	})
}

// TestHugeActualCost guards that a cost is what it says, however large: one that no number
// can hold is the largest, not the estimate. White space around it does not count.
func TestHugeActualCost(t *testing.T) {
	t.Parallel()
	for cost, want := range map[string]int64{
		"562949953421313":                200, // a debt of the size at most
		"9223372036854775807":            200,
		"9223372036854775808":            200,
		"1" + strings.Repeat("0", 1000):  200,
		"+18446744073709551617":          200,
		"-9223372036854775809":           5,
		"9223372036854775808.5":          5,
		"1e30":                           5,
		" 7":                             7,
		strings.Repeat("0", 1000) + "8 ": 8,
	} {
		t.Run(fmt.Sprintf("%.40q", cost), func(t *testing.T) {
			s := sitetest.Start(t, "route {\nrate_limit tokens {\nkey all\nsize 100\ndrip_rate 1h\ncost 5\nactual_cost {http.response.header.X-Cost}\n}\n"+
				"header X-Cost {query.cost}\nrespond ok\n}")
			s.Get("/?cost=" + url.QueryEscape(cost))
			if got := level(t, s, "tokens"); got.Units != want || got.Held != 0 {
				t.Errorf("got %+v, want %d units", got, want)
			}
		})
	}
}

// TestActualCostOfHead guards that what a handler writes in response to a HEAD request costs
// nothing, since it is not sent.
func TestActualCostOfHead(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, "rate_limit bytes {\nkey all\nsize 100\ndrip_rate 1h\nactual_cost bytes\n}\nrespond 12345")
	for i, method := range []string{"GET", "HEAD", "OPTIONS"} {
		s.Send(method, "/")
		if got, want := level(t, s, "bytes"), []int64{5, 5, 10}[i]; got.Units != want || got.Held != 0 {
			t.Errorf("after %s: got %+v, want %d units", method, got, want)
		}
	}
}

// TestActualCostOfResetStreams guards that bytes that are sent over HTTP/2 count when the client
// takes all but the last one, and then resets the stream.
func TestActualCostOfResetStreams(t *testing.T) {
	t.Parallel()
	const length = 128_000 // so that the last of what is written at once is not small
	body := strings.Repeat("x", length)
	dir := t.TempDir()
	filetest.Write(t, dir+"/file", []byte(body))
	upstream := sitetest.NewUpstream(t, func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, body) })
	s := sitetest.StartConfig(t, sitetest.Config{
		Global: "servers {\nprotocols h1 h2c\n}",
		Site: "rate_limit bytes {\nkey {path}\nsize 1000000\ndrip_rate 5m\nactual_cost bytes\n}\n" +
			"root " + dir + "\nfile_server /file\nreverse_proxy /proxy " + upstream + "\n" +
			"respond /text " + body + "\nrespond /nothing text 204",
	})
	for path, want := range map[string]int64{"/file": length, "/proxy": length, "/text": length, "/nothing": 0} {
		stream := openStream(t, s.Addr, "GET", path, nil, true, http2.Setting{ID: http2.SettingInitialWindowSize, Val: length - 1})
		for read, ended := 0, false; read < length-1 && !ended; {
			frame, err := stream.ReadFrame()
			if err != nil {
				t.Fatal(err)
			}
			if data, ok := frame.(*http2.DataFrame); ok {
				read += len(data.Data())
			}
			ended = frame.Header().StreamID == 1 && frame.Header().Flags.Has(http2.FlagDataEndStream)
		}
		stream.WriteRSTStream(1, http2.ErrCodeCancel)
		sitetest.Eventually(t, "nothing is held", func() bool { return levelOf(t, s, "bytes", path).Held == 0 })
		if got := levelOf(t, s, "bytes", path).Units; got != want {
			t.Errorf("%s: %d were charged, want %d", path, got, want)
		}
	}
}

// TestCostOfBody guards that a request's cost may be the length of its body.
func TestCostOfBody(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, "rate_limit upload {\nkey all\nsize 1000\ndrip_rate 1h\ncost body\n}\nrespond ok")
	for _, tc := range []struct {
		body   io.Reader
		status int
		left   string
	}{
		{strings.NewReader(strings.Repeat("x", 300)), 200, "700"},
		{http.NoBody, 200, "699"},
		{io.MultiReader(strings.NewReader("of unknown length")), 411, ""},
		{strings.NewReader(strings.Repeat("x", 700)), 429, "699"},
		{strings.NewReader(strings.Repeat("x", 699)), 200, "0"},
	} {
		res, err := s.Client.Post(s.URL("/"), "text/plain", tc.body)
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		if left := res.Header.Get("X-RateLimit-Remaining"); res.StatusCode != tc.status || left != tc.left {
			t.Errorf("got %d with %s left, want %d with %s", res.StatusCode, left, tc.status, tc.left)
		}
	}
}

// TestDryRun guards that a dry run denies nothing and is shown where it should be: by a
// placeholder, the access log and metrics, not in header fields.
func TestDryRun(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, "rate_limit {\nlog\nheaders x-ratelimit ratelimit-11\nlimit real {\nkey all\nsize 5\ndrip_rate 1h\n}\n"+
		"limit candidate {\nkey all\nsize 2\ndrip_rate 1h\ndry_run\n}\n}\n"+
		"header >X-Dry {http.rate_limit.dry_run}\nrespond ok")
	for i := range 7 {
		a := s.Get("/")
		status, dry := 200, ""
		if i >= 5 {
			status = 429
		}
		if i >= 2 {
			dry = "candidate"
		}
		if a.StatusCode != status || status == 200 && a.Header.Get("X-Dry") != dry || a.Header.Get("X-RateLimit-Limit") != "5" ||
			strings.Contains(fieldstest.In(a.Header), "candidate") {
			t.Errorf("request %d: got %s, dry run %q, want %d and %q", i, a, a.Header.Get("X-Dry"), status, dry)
		}
	}
	logged, _ := s.LastAccess()["rate_limit"].(map[string]any)
	if logged["dry_run"] != "candidate" || logged["limit"] != "real" {
		t.Errorf("the access log has %v", logged)
	}
	metrics := collected(t, s.Process)
	for series, want := range map[string]string{
		`decisions_total{by="memory",limit="candidate",result="would_deny"}`: "5",
		`decisions_total{by="memory",limit="candidate",result="denied"}`:     "0",
		`decisions_total{by="memory",limit="candidate",result="admitted"}`:   "2",
		`decisions_total{by="memory",limit="real",result="denied"}`:          "2",
		`units_total{limit="candidate"}`:                                     "2",
	} {
		if metrics[series] != want {
			t.Errorf("%s is %s, want %s", series, metrics[series], want)
		}
	}
}

// TestDryRunAlone guards a block that is a dry run as a whole: requests pass as without
// it.
func TestDryRunAlone(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, "rate_limit {\ndry_run\nlimit candidate {\nkey all\nsize 1\ndrip_rate 1h\n}\n}\n"+
		"respond \"{http.rate_limit.dry_run}.\"")
	for i := range 3 {
		want := "candidate."
		if i == 0 {
			want = "."
		}
		if a := s.Get("/"); a.String() != "200" || a.Text != want {
			t.Errorf("got %s %q, want 200 %q", a, a.Text, want)
		}
	}
}

// TestUncountedCosts guards that nothing is logged of the actual cost of a request whose
// response does not count, and so need not tell it.
func TestUncountedCosts(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, "route {\nrate_limit costs {\nsize 9\nactual_cost {http.response.header.X-Cost}\ncount status 2xx\n}\n"+
		"respond /missing 404\nrespond ok\n}")
	const message = "the actual cost of a request is not a whole number, so its estimated cost is charged"
	warned := func() (n int) {
		for _, e := range s.Entries() {
			if e["msg"] == message {
				n++
			}
		}
		return n
	}
	if s.Get("/missing"); warned() != 0 {
		t.Error("the cost of a response that does not count is missed")
	}
	if s.Get("/"); warned() != 1 {
		t.Error("the cost of a response that counts is not missed")
	}
}

// TestCountSeesTheHandlersFields guards which header fields count sees: those that reach the
// limit, after header_down of reverse_proxy, and before the directive header.
func TestCountSeesTheHandlersFields(t *testing.T) {
	t.Parallel()
	upstream := sitetest.NewUpstream(t, func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("X-Failed", "1") })
	for _, tc := range []struct {
		site   string
		denied bool // whether the second request is, as the first one counted
	}{
		{"reverse_proxy " + upstream, true},
		{"reverse_proxy " + upstream + " {\nheader_down -X-Failed\n}", false},
		{"header -X-Failed\nreverse_proxy " + upstream, true},
		{"respond ok", false},
		{"reverse_proxy " + strings.Replace(upstream, "http://", "", 1) + " {\nheader_down X-Other 1\n}", true},
	} {
		t.Run("", func(t *testing.T) {
			s := sitetest.Start(t, "rate_limit login {\nkey all\nsize 1\ndrip_rate 1h\ncount header X-Failed *\n}\n"+tc.site)
			s.Get("/")
			if got := s.Get("/").StatusCode; (got == 429) != tc.denied {
				t.Errorf("%s: the second request got %d", tc.site, got)
			}
		})
	}
}

// TestSettlementsSurvivePause guards requests that end while a healthy Redis takes no writes
// for a moment: longer than requests wait for it, so the connection is given up with all that
// was under way. A moment after it answers again, what has ended takes no room any more, and is
// not charged unless its response says so.
func TestSettlementsSurvivePause(t *testing.T) {
	t.Parallel()
	upstream := sitetest.NewUpstream(t, func(w http.ResponseWriter, _ *http.Request) {
		time.Sleep(30 * time.Millisecond)
		w.Header().Set("X-Cost", "0")
	})
	for name, block := range map[string]string{
		"concurrency": "concurrency 10",
		"count":       "algorithm fixed_window\nsize 10\nwindow 1h\ncount status 401",
		"actual_cost": "algorithm fixed_window\nsize 10\nwindow 1h\nactual_cost {http.response.header.X-Cost}",
	} {
		t.Run(name, func(t *testing.T) {
			server := redistest.Start(t)
			s := sitetest.StartConfig(t, sitetest.Config{Global: sitetest.RedisGlobal(server.Addr, "timeout 200ms"), Site: "rate_limit {\nlimit a {\nkey static\n" + block + "\n}\n}\nreverse_proxy " + upstream})
			sitetest.Eventually(t, "connected", func() bool { return server.InfoNumber(t, "clients", "connected_clients") > 1 })
			var stop atomic.Bool
			var paused, answers, denied, late atomic.Int64 // paused: until when nobody is to be denied any more, in Unix ns
			var clients sync.WaitGroup
			for range 7 {
				clients.Go(func() {
					for !stop.Load() {
						began := time.Now().UnixNano()
						status, _ := sitetest.Ask(t.Context(), s.URL(""))
						switch from := paused.Load(); {
						case status != http.StatusTooManyRequests:
							answers.Add(1)
						case from > 0 && began > from:
							late.Add(1)
						default:
							denied.Add(1)
							time.Sleep(5 * time.Millisecond)
						}
					}
				})
			}
			time.Sleep(500 * time.Millisecond)
			for range 3 {
				paused.Store(0)
				redistest.Done(t, server.Client().Do(t.Context(), "CLIENT", "PAUSE", 300, "WRITE"))
				paused.Store(time.Now().Add(800 * time.Millisecond).UnixNano())
				time.Sleep(2 * time.Second)
			}
			stop.Store(true)
			clients.Wait()
			t.Logf("%d passed, %d denied within half a second of a pause, %d later", answers.Load(), denied.Load(), late.Load())
			if late.Load() > answers.Load()/100 || answers.Load() < 200 { // calls of a busy machine may time out without a pause
				t.Errorf("%d passed, %d denied later than half a second after a pause, want hardly any", answers.Load(), late.Load())
			}
		})
	}
}

// TestCountDeniedWithCount guards that a denied request counts with both options, though it
// has no response of the handler.
func TestCountDeniedWithCount(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, "rate_limit login {\nkey all\nsize 1\ndrip_rate 1m\ncount_denied\ncount status 401\n}\nrespond /no 401\nrespond ok")
	for _, tc := range []struct {
		path string
		wait time.Duration // before
		want int
	}{
		{"/", 0, 200}, {"/", 0, 200}, // which do not count
		{"/no", 0, 401},
		{"/", 50 * time.Second, 429}, // which counts
		{"/", 50 * time.Second, 429}, // so this is too early
		{"/", 61 * time.Second, 200},
	} {
		s.Clock.Advance(tc.wait)
		if got := s.Get(tc.path).StatusCode; got != tc.want {
			t.Errorf("%v later %s: got %d, want %d", tc.wait, tc.path, got, tc.want)
		}
	}
}

// TestHeldUnitsFollowStore guards requests in progress while a reload moves the buckets to
// another store: this instance leaves room for them wherever the buckets are, and gives it back.
// The other instances learn once what they are charged in the end.
func TestHeldUnitsFollowStore(t *testing.T) {
	one, two := redistest.Start(t), redistest.Start(t)
	for _, tc := range []struct{ name, from, to string }{
		{"another prefix", sitetest.RedisGlobal(one.Addr, sitetest.LongTimeout, "key_prefix a:"), sitetest.RedisGlobal(one.Addr, sitetest.LongTimeout, "key_prefix b:")},
		{"another server", sitetest.RedisGlobal(one.Addr, sitetest.LongTimeout, "key_prefix c:"), sitetest.RedisGlobal(two.Addr, sitetest.LongTimeout, "key_prefix c:")},
		{"from memory", "", sitetest.RedisGlobal(one.Addr, sitetest.LongTimeout, "key_prefix d:")},
	} {
		t.Run(tc.name, func(t *testing.T) {
			release, arrived := make(chan struct{}), make(chan struct{}, 9)
			upstream := sitetest.NewUpstream(t, func(w http.ResponseWriter, r *http.Request) {
				switch r.URL.Path {
				case "/slow":
					arrived <- struct{}{}
					<-release
					fallthrough
				case "/missing":
					http.NotFound(w, r)
				}
			})
			site := "rate_limit {\nlimit a {\nkey static\nconcurrency 2\n}\nlimit b {\nkey static\nsize 3\ndrip_rate 1h\ncount status 404\n}\n}\n" +
				"reverse_proxy " + upstream
			s := sitetest.StartConfig(t, sitetest.Config{Global: tc.from, Site: site})
			other := "http://" + sitetest.StartProcess(t, sitetest.Config{Admin: "localhost:0", Global: tc.to, Site: site})
			var running sync.WaitGroup
			for range 2 {
				running.Go(func() { sitetest.Ask(context.Background(), s.URL("/slow")) })
				<-arrived
			}
			client := http.Client{Transport: caddytest.FreshConnections("")}
			status := func(target string) int {
				res, err := client.Get(target)
				if err != nil {
					t.Fatal(err)
				}
				res.Body.Close()
				return res.StatusCode
			}
			load := func(global string) {
				s.Reload(sitetest.Config{Global: global, Site: site})
			}
			load(tc.to)
			if got := status(s.URL("")); got != http.StatusTooManyRequests {
				t.Errorf("this instance answers %d", got)
			}
			load("") // in the process
			if got := status(s.URL("")); got != http.StatusTooManyRequests {
				t.Errorf("in the process it answers %d", got)
			}
			load(tc.to)
			if got := status(s.URL("")); got != http.StatusTooManyRequests {
				t.Errorf("back there it answers %d", got)
			}
			if got := status(other); got != http.StatusOK {
				t.Errorf("the other instance answers %d", got)
			}
			close(release)
			running.Wait()
			sitetest.Eventually(t, "room", func() bool { return status(other) == http.StatusOK && status(s.URL("")) == http.StatusOK })
			// Both are charged, once.
			if got := status(s.URL("/missing")); got != http.StatusNotFound {
				t.Errorf("the third that counts is answered %d", got)
			}
			sitetest.Eventually(t, "no room for a fourth", func() bool {
				return status(other) == http.StatusTooManyRequests && status(s.URL("")) == http.StatusTooManyRequests
			})
		})
	}
}
