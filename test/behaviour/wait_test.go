package behaviour

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// TestSoft guards, against a model, that requests above the size pass up to soft units,
// are marked, and that fields tell of the size alone.
func TestSoft(t *testing.T) {
	t.Parallel()
	for name, options := range map[string]string{
		"leaky bucket":   "drip_rate 1s\n",
		"fixed window":   "algorithm fixed_window\nwindow 10s\n",
		"sliding log":    "algorithm sliding_log\nwindow 10s\n",
		"sliding window": "algorithm sliding_window\nwindow 10s\n",
	} {
		t.Run(name, func(t *testing.T) {
			const size, soft = 5, 3
			site := func(option string) string {
				return "rate_limit a {\nkey all\ncost {query.cost}\n" + options + option + "\n}\n" +
					"header >X-Over {http.rate_limit.over}\nrespond admitted"
			}
			s := sitetest.Start(t, "handle /soft {\n"+site(fmt.Sprintf("size %d\nsoft %d", size, soft))+"\n}\n"+
				"handle /hard {\n"+strings.Replace(site(fmt.Sprintf("size %d", size+soft)), "rate_limit a", "rate_limit b", 1)+"\n}")
			random := rand.New(rand.NewPCG(1, 2))
			marked := 0
			for i := range 300 {
				cost := 1 + random.IntN(4)
				got, model := s.Get(fmt.Sprint("/soft?cost=", cost)), s.Get(fmt.Sprint("/hard?cost=", cost))
				level := size + soft - field(t, model.Header.Get("X-RateLimit-Remaining"))
				over := ""
				if model.StatusCode == 200 && level > size {
					over = "a"
					marked++
				}
				want := fmt.Sprint(model.StatusCode, size, max(size-level, 0), over, model.Header.Get("Retry-After"), model.Header.Get("X-RateLimit-Clear"))
				if is := fmt.Sprint(got.StatusCode, field(t, got.Header.Get("X-RateLimit-Limit")), field(t, got.Header.Get("X-RateLimit-Remaining")),
					got.Header.Get("X-Over"), got.Header.Get("Retry-After"), got.Header.Get("X-RateLimit-Clear")); is != want {
					t.Fatalf("request %d, cost %d: got %s, want %s", i, cost, is, want)
				}
				s.Clock.Advance(time.Duration(random.IntN(2000)) * ms)
			}
			if marked < 20 {
				t.Errorf("only %d requests are above the size", marked)
			}
			if n := collected(t, s.Process)[`over_size_total{limit="a"}`]; n != fmt.Sprint(marked) {
				t.Errorf("the metric has %s, want %d", n, marked)
			}
		})
	}
}

// field returns the number in a field.
func field(t *testing.T, text string) (n int) {
	t.Helper()
	if _, err := fmt.Sscan(text, &n); err != nil {
		t.Fatalf("%q: %v", text, err)
	}
	return n
}

// passed is a request that was admitted: how long after the first it was answered, and how
// long it says that it waited.
type passed struct{ after, waited time.Duration }

// sendTogether sends n requests at once, to all nodes in turn, whose answers say how long they
// waited. It calls denied for each that is denied, and returns the others in the order of
// their answers.
func sendTogether(t *testing.T, all []*reloadable, n int, denied func(res *http.Response, after time.Duration)) (admitted []passed) {
	t.Helper()
	var mu sync.Mutex
	start := time.Now()
	redistest.Together(t, n, func(i int) {
		res, err := http.Get("http://" + all[i%len(all)].addr + "/")
		if err != nil {
			t.Error(err)
			return
		}
		defer res.Body.Close()
		var seconds float64
		_, _ = fmt.Fscan(res.Body, &seconds)
		mu.Lock()
		defer mu.Unlock()
		switch after := time.Since(start); res.StatusCode {
		case http.StatusOK:
			admitted = append(admitted, passed{after, time.Duration(seconds * float64(time.Second))})
		case http.StatusTooManyRequests:
			denied(res, after)
		default:
			t.Errorf("got %s", res.Status)
		}
	})
	slices.SortFunc(admitted, func(a, b passed) int { return int(a.after - b.after) })
	return admitted
}

// TestMaxDelay guards that requests of three instances wait for room instead of being
// denied: what passes does so no earlier than one a drip, none waits longer than
// max_delay, all that may wait do, and others are denied at once.
func TestMaxDelay(t *testing.T) {
	const size, drip, waiting = 5, 20 * time.Millisecond, 200
	server := redistest.Start(t)
	all, _ := nodes(t, 3, sitetest.Config{
		Admin: "localhost:0", Global: sitetest.RedisGlobal(server.Addr, sitetest.LongTimeout),
		Site: fmt.Sprintf("rate_limit api {\nkey all\nsize %d\ndrip_rate %v\nmax_delay %v\n}\nrespond {http.rate_limit.delayed}", size, drip, waiting*drip),
	})
	denied, last := 0, time.Duration(0) // and when the last one was
	admitted := sendTogether(t, all, 300, func(_ *http.Response, after time.Duration) {
		denied, last = denied+1, max(last, after)
		if after > waiting*drip*3/4 {
			t.Errorf("a request was denied after %v", after)
		}
	})
	if n, drips := len(admitted), int(last/drip)+1; n < size+waiting || n > size+waiting+drips {
		t.Errorf("%d requests passed and %d did not, want %d to pass, and at most %d for drips meanwhile", n, denied, size+waiting, drips)
	}
	for i, p := range admitted {
		if earliest := time.Duration(i-size) * drip; p.after < earliest {
			t.Errorf("request %d passed after %v, which is %v too early", i+1, p.after, earliest-p.after)
		}
		if p.waited > waiting*drip+sitetest.Patience/10 {
			t.Errorf("request %d waited %v", i+1, p.waited)
		}
	}
}

// TestMaxDelayInOrder guards that requests which come one after the other, each at another
// instance, pass in that order: none takes the place of one before it. They come while
// others wait, each when Redis has decided on the one before it.
func TestMaxDelayInOrder(t *testing.T) {
	const size, drip, requests = 2, 40 * time.Millisecond, 40
	server := redistest.Start(t)
	all, _ := nodes(t, 3, sitetest.Config{
		Admin: "localhost:0", Global: sitetest.RedisGlobal(server.Addr, sitetest.LongTimeout),
		Site: fmt.Sprintf("rate_limit api {\nkey {header.User}\nsize %d\ndrip_rate %v\nmax_delay 1m\n}\nrespond admitted", size, drip),
	})
	for _, n := range all {
		n.asks("first") // which comes with the script
	}
	start := time.Now()
	var passing sync.WaitGroup
	for i := range requests {
		before := server.CommandStat(t, "evalsha")
		passing.Go(func() {
			status, after := all[i%len(all)].asks("k"), time.Since(start)
			// As many requests as came before this one have taken the drips before its own.
			if earliest := time.Duration(i-size+1) * drip; status != http.StatusOK || after < earliest {
				t.Errorf("request %d got %d after %v, which is %v too early", i+1, status, after, earliest-after)
			}
		})
		sitetest.Eventually(t, "Redis decides", func() bool { return server.CommandStat(t, "evalsha") > before })
	}
	passing.Wait()
	if took, all := time.Since(start), time.Duration(requests-size)*drip; took > all+sitetest.Patience/2 {
		t.Errorf("the last one passed after %v, want %v", took, all)
	}
}

// TestMaxDelayOfCosts guards that max_delay passes no request which costs more than the size,
// and none together with others that take more than the size at a moment, whose cost, size or
// drips are those of the request: such a request is denied at once, and charged nothing.
func TestMaxDelayOfCosts(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, "rate_limit a {\nkey all\nsize {query.size}\ndrip_rate 1h\ndrip_size {query.drip}\ncost {query.cost}\nmax_delay 100h\nmax_waiting 1\n}\nrespond admitted")
	for _, tc := range []struct {
		query string
		want  int
	}{
		{"size=3&drip=1&cost=13", 429},
		{"size=3&drip=1&cost=3", 200},
		{"size=3&drip=1&cost=4", 429},
		{"size=1&drip=50&cost=1", 200},
		{"size=1&drip=50&cost=1", 429}, // fifty would pass with the next drip
		{"size=4&drip=3&cost=3", 200},
		{"size=4&drip=3&cost=3", 429}, // and here five
	} {
		got := s.Get("/?" + tc.query)
		if got.StatusCode != tc.want {
			t.Errorf("%s: got %d, want %d", tc.query, got.StatusCode, tc.want)
		}
	}
}

// TestMinIntervalDoesNotWait guards that a request which is too early for min_interval is denied at
// once, also if the limit has max_delay: requests wait only for room in the other bucket.
func TestMinIntervalDoesNotWait(t *testing.T) {
	t.Parallel()
	for _, options := range []string{"min_interval 1h", "max 10\nduration 1m\nmin_interval 6s\nmax_delay 10s", "max 10\nduration 1m\nmin_interval 1h"} {
		s := sitetest.Start(t, "rate_limit x {\nkey all\n"+options+"\n}\nrespond admitted")
		for i, want := range []int{200, 429, 429} {
			if got := s.Get("/").StatusCode; got != want {
				t.Errorf("%q, request %d: got %d, want %d", options, i, got, want)
			}
		}
	}
}

// TestMaxDelayWarmUp guards that requests of three instances wait for a limit that warms
// up: what passes does so no earlier than it would from cold if each came once it is free,
// none waits longer than max_delay, all that may wait do, and others are denied at once.
func TestMaxDelayWarmUp(t *testing.T) {
	const requests, delay = 90, 1500 * time.Millisecond
	now := time.Duration(0)
	memory := limiter.NewMemoryWithClock(func() time.Duration { return now })
	var earliest []time.Duration
	for len(earliest) < requests {
		b := limiter.Bucket{Name: "b", Limit: limiter.WarmingUp(50, time.Second, time.Second), Cost: 1}
		d, err := memory.Take(t.Context(), limiter.Request{Buckets: []limiter.Bucket{b}}, nil)
		if err != nil || d[0].Denied {
			t.Fatal(d, err)
		}
		earliest = append(earliest, now)
		now += b.RoomIn(&d[0])
	}
	may := 0 // wait, or pass at once
	for earliest[may] <= delay {
		may++
	}
	if warm := int(delay / (20 * time.Millisecond)); may > warm*3/4 {
		t.Fatalf("%d requests in %v is no slow start, a warm limit has %d", may, delay, warm)
	}

	server := redistest.Start(t)
	all, _ := nodes(t, 3, sitetest.Config{
		Admin: "localhost:0", Global: sitetest.RedisGlobal(server.Addr, sitetest.LongTimeout),
		Site: fmt.Sprintf("rate_limit api {\nkey all\nalgorithm warm_up\nrate 50/s\nwarm_up 1s\nmax_delay %v\n}\nrespond {http.rate_limit.delayed}", delay),
	})
	denied := 0
	admitted := sendTogether(t, all, requests, func(res *http.Response, after time.Duration) {
		if denied++; res.Header.Get("Retry-After") != "1" || res.Header.Get("X-RateLimit-Remaining") != "0" {
			t.Errorf("denied with %v", res.Header)
		}
		if after > delay*3/4 {
			t.Errorf("a request was denied after %v", after)
		}
	})
	if n := len(admitted); n < may || n > may+10 { // some pass while requests come
		t.Errorf("%d requests passed and %d did not, want some %d to pass", n, denied, may)
	}
	for i, p := range admitted {
		if p.after < earliest[i] {
			t.Errorf("request %d passed after %v, which is %v too early", i+1, p.after, earliest[i]-p.after)
		}
		if p.waited > delay+sitetest.Patience/10 {
			t.Errorf("request %d waited %v", i+1, p.waited)
		}
	}
}

// TestMaxWaiting guards that no more requests wait than may, that those which leave stay
// charged and make room for others to wait, and that a denied request does not count as
// one that waits.
func TestMaxWaiting(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, "rate_limit a {\nkey all\nsize 1\ndrip_rate 1h\nmax_delay 10h\nmax_waiting 3\n}\nrespond admitted")
	if a := s.Get("/"); a.StatusCode != 200 {
		t.Fatalf("got %s", a)
	}
	leave := make(chan struct{})
	var waiting sync.WaitGroup
	ask := func() {
		waiting.Go(func() {
			req, err := http.NewRequest("GET", s.URL("/"), nil)
			if err != nil {
				t.Error(err)
				return
			}
			cancelled := make(chan struct{})
			req.Cancel = cancelled //nolint:staticcheck // the simplest
			go func() { <-leave; close(cancelled) }()
			if res, err := s.Client.Do(req); err == nil {
				res.Body.Close()
				t.Errorf("got %s, want to wait", res.Status)
			}
		})
	}
	l := s.Handlers()[0].Compiled().Limits[0]
	for n := range 3 {
		ask()
		sitetest.Eventually(t, "a request waits", func() bool { return l.Waiting.Len() == int64(n+1) })
	}
	for range 5 {
		if a := s.Get("/"); a.StatusCode != 429 || a.Header.Get("X-RateLimit-Remaining") != "0" {
			t.Errorf("got %s, want a denial", a)
		}
	}
	close(leave)
	waiting.Wait()
	sitetest.Eventually(t, "none waits", func() bool { return l.Waiting.Len() == 0 })
	leave = make(chan struct{})
	ask()
	sitetest.Eventually(t, "another may wait", func() bool { return l.Waiting.Len() == 1 })
	close(leave)
	waiting.Wait()
	if n := collected(t, s.Process)[`delayed_total{limit="a"}`]; n != "4" {
		t.Errorf("%s requests were delayed, want 4", n)
	}
	s.Requests.Add(4)
	left := 0
	for _, e := range s.Entries() {
		if e["msg"] == "handled request" && e["status"] == 499.0 {
			left++
		}
	}
	if left != 4 {
		t.Errorf("%d requests are logged with status 499, want 4", left)
	}
}

// TestMaxWaitingOnAllSites guards that all limits of one name share what may wait, on
// whatever site they are, and also with those of a config that has been replaced; and that
// nothing is kept of limits for which none may wait any more.
func TestMaxWaitingOnAllSites(t *testing.T) {
	t.Parallel()
	const limit = "rate_limit shared {\nkey all\nsize 1\ndrip_rate 1h\nmax_delay 10h\nmax_waiting 3\n}\n"
	c := sitetest.Config{Site: "handle /a {\n" + limit + "respond a\n}\nhandle /b {\n" + limit + "respond b\n}\n"}
	s := sitetest.StartConfig(t, c)
	s.Get("/a")
	ctx, leave := context.WithCancel(t.Context())
	var requests sync.WaitGroup
	waits := func(n int64) bool { return s.Handlers()[0].Compiled().Limits[0].Waiting.Len() == n }
	for n, path := range []string{"/a", "/b", "/a"} {
		if n == 2 {
			s.Reload(c)
		}
		target := s.URL(path)
		requests.Go(func() {
			if status, _ := sitetest.Ask(ctx, target); status != 0 {
				t.Errorf("got %d, want to wait", status)
			}
		})
		sitetest.Eventually(t, "a request waits", func() bool { return waits(int64(n + 1)) })
	}
	for _, path := range []string{"/a", "/b"} {
		if a := s.Get(path); a.StatusCode != 429 {
			t.Errorf("%s: got %s, want a denial", path, a)
		}
	}
	leave()
	requests.Wait()
	sitetest.Eventually(t, "none waits", func() bool { return waits(0) })
	c.Site = strings.ReplaceAll(strings.ReplaceAll(c.Site, "max_delay 10h", ""), "max_waiting 3", "")
	s.Reload(c)
	if n := s.Process.Waiting.Len(); n > 0 {
		t.Errorf("%d counts are kept for a config without waiting requests", n)
	}
}

// TestDryRunAbove guards that a dry run neither delays requests nor marks those above its
// size, but counts them.
func TestDryRunAbove(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, "rate_limit {\nlog\nlimit slow {\nkey all\nsize 1\ndrip_rate 1h\nmax_delay 2h\ndry_run\n}\n"+
		"limit high {\nkey all\nsize 1\ndrip_rate 1h\nsoft 3\ndry_run\n}\n}\n"+
		"respond \"{http.rate_limit.over},{http.rate_limit.dry_run}\"")
	for i, want := range []string{",", ",", ",", ",slow", ",slow"} { // what the latter deny is charged to neither
		if a := s.Get("/"); a.String() != "200" || a.Text != want {
			t.Errorf("request %d: got %s %q, want 200 %q", i, a, a.Text, want)
		}
	}
	logged, _ := s.LastAccess()["rate_limit"].(map[string]any)
	if logged["over"] != nil || logged["delayed"] != nil {
		t.Errorf("the access log has %v", logged)
	}
	metrics := collected(t, s.Process)
	for series, want := range map[string]string{`delayed_total{limit="slow"}`: "2", `over_size_total{limit="high"}`: "3"} {
		if metrics[series] != want {
			t.Errorf("%s is %s, want %s", series, metrics[series], want)
		}
	}
}

// TestDenialStatus guards the status of denials, with and without error routes: that of
// the limit with the longest wait.
func TestDenialStatus(t *testing.T) {
	t.Parallel()
	const limits = "rate_limit {\nbody off\nlimit a {\nkey all\nsize 1\ndrip_rate 1m\nstatus 403\n}\nlimit b {\nkey all\nsize 1\ndrip_rate {query.drip}\nstatus 503\n}\n}\nrespond admitted\n"
	for name, errors := range map[string]string{
		"written directly":     "",
		"through error routes": "handle_errors {\nrespond {err.status_code} {err.status_code}\n}",
	} {
		t.Run(name, func(t *testing.T) {
			s := sitetest.Start(t, limits+errors)
			s.Get("/?drip=1h")
			if a := s.Get("/?drip=1h"); a.StatusCode != 503 || a.Header.Get("Retry-After") != "3600" {
				t.Errorf("got %s %q, want 503", a, a.Text)
			}
			if a := s.Get("/?drip=1s"); a.StatusCode != 403 || a.Header.Get("Retry-After") != "60" || errors == "" && a.Text != "" {
				t.Errorf("got %s %q, want 403", a, a.Text)
			}
		})
	}
}
