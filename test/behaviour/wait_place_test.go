package behaviour

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// turns is an upstream that has requests in progress until they are to end.
type turns struct {
	addr    string
	arrived chan string   // their queries
	end     chan struct{} // one value for each
}

// newTurns starts it.
func newTurns(t testing.TB) *turns {
	u := &turns{arrived: make(chan string, 100), end: make(chan struct{})}
	u.addr = sitetest.NewUpstream(t, func(_ http.ResponseWriter, r *http.Request) {
		u.arrived <- r.URL.RawQuery
		<-u.end
	})
	t.Cleanup(func() { close(u.end) })
	return u
}

// placeLimits are limits with one place, for which requests wait.
var placeLimits = map[string]string{
	"concurrency": "rate_limit x {\nkey all\nconcurrency 1\nmax_delay %s\nmax_waiting 3\n}\n",
	"auto":        "rate_limit x {\nconcurrency auto {\nmin 1\nmax 1\n}\nmax_delay %s\nmax_waiting 3\n}\n",
}

// TestWaitForPlace guards that requests which find no place wait for one in the order in which
// they came, in the process and with Redis; that those beyond max_waiting are denied; and what
// is told of those that waited.
func TestWaitForPlace(t *testing.T) {
	for _, tc := range []struct{ limit, store, status string }{
		{"concurrency", "memory", "429"}, {"concurrency", "redis", "429"}, {"auto", "memory", "503"},
	} {
		t.Run(tc.limit+" in "+tc.store, func(t *testing.T) {
			u := newTurns(t)
			c := sitetest.Config{Site: fmt.Sprintf(placeLimits[tc.limit], "10s") + "header >X-Delayed {http.rate_limit.delayed}\nreverse_proxy " + u.addr}
			if tc.store == "redis" {
				c.Global = sitetest.RedisGlobal(redistest.Start(t).Addr, sitetest.LongTimeout)
			}
			s := sitetest.StartConfig(t, c)
			answers := make(chan sitetest.Answer, 4)
			for n := range 4 {
				go func() { answers <- s.Get(fmt.Sprintf("/?%d", n)) }()
				if n == 0 {
					<-u.arrived
					continue
				}
				sitetest.Eventually(t, "a request waits", func() bool { return waitingAt(s, "x") == int64(n) })
			}
			start := time.Now()
			got := s.Get("/")
			if got.Header.Get("Retry-After") == "" || !strings.HasPrefix(got.Status, tc.status) || time.Since(start) > 5*time.Second {
				t.Errorf("where no more may wait: %s after %v, want %s", got, time.Since(start), tc.status)
			}
			for n := range 4 {
				u.end <- struct{}{}
				if got := <-answers; got.StatusCode != 200 || (got.Header.Get("X-Delayed") > "0.000") != (n > 0) {
					t.Errorf("%d: %s, delayed %q", n, got, got.Header.Get("X-Delayed"))
				}
				if n < 3 {
					if next := <-u.arrived; next != fmt.Sprint(n+1) {
						t.Errorf("%s is next, want %d", next, n+1)
					}
				}
			}
			if got := collected(t, s.Process)[`delayed_total{limit="x"}`]; got != "3" {
				t.Errorf("%s were delayed, want 3", got)
			}
			if n := waitingAt(s, "x"); n != 0 {
				t.Errorf("%d wait", n)
			}
		})
	}
}

// TestLeaveLine guards that a request which waits for a place ends when its time is over, and
// when its client leaves, also one that has sent a body: it is logged with 499, not passed on,
// and the next one has its turn.
func TestLeaveLine(t *testing.T) {
	for name, limit := range placeLimits {
		t.Run(name, func(t *testing.T) {
			u := newTurns(t)
			s := startLeavingSite(t, "rate_limit {\nlimit x {\n"+strings.TrimPrefix(fmt.Sprintf(limit, "1m"), "rate_limit x {\n")+
				"}\nreverse_proxy "+u.addr)
			first := make(chan sitetest.Answer, 1)
			go func() { first <- s.Get("/?first") }()
			<-u.arrived
			for how, leaver := range map[string]leaver{
				"body":    overHTTP1(false, "POST %s HTTP/1.1\r\nHost: HOST\r\nContent-Length: 5\r\n\r\nhello", func(c net.Conn) { c.Close() }),
				"no body": overHTTP1(false, "GET %s HTTP/1.1\r\nHost: HOST\r\n\r\n", func(c net.Conn) { c.Close() }),
			} {
				leave, left := make(chan struct{}), make(chan int)
				go func() { left <- leaver(s, "/?leaves", leave) }()
				sitetest.Eventually(t, how+" waits", func() bool { return waitingAt(s.Site, "x") == 1 })
				close(leave)
				<-left
				sitetest.Eventually(t, how+" leaves", func() bool { return waitingAt(s.Site, "x") == 0 })
			}
			next := make(chan sitetest.Answer, 1)
			go func() { next <- s.Get("/?next") }()
			sitetest.Eventually(t, "the next one waits", func() bool { return waitingAt(s.Site, "x") == 1 })
			u.end <- struct{}{}
			if q := <-u.arrived; q != "next" {
				t.Errorf("%s was passed on", q)
			}
			u.end <- struct{}{}
			for _, c := range []chan sitetest.Answer{first, next} {
				if a := <-c; a.StatusCode != 200 {
					t.Errorf("got %s", a)
				}
			}
		})
	}
}

// TestWaitTooLong guards that a request is denied that has found no place within max_delay.
func TestWaitTooLong(t *testing.T) {
	t.Parallel()
	for name, limit := range placeLimits {
		t.Run(name, func(t *testing.T) {
			u := newTurns(t)
			s := sitetest.Start(t, fmt.Sprintf(limit, "50ms")+"reverse_proxy "+u.addr)
			var open sync.WaitGroup
			open.Go(func() { s.Get("/") })
			<-u.arrived
			want := map[string]int{"concurrency": 429, "auto": 503}[name]
			if a := s.Get("/"); a.StatusCode != want || a.Header.Get("Retry-After") == "" {
				t.Errorf("got %s, want %d", a, want)
			}
			u.end <- struct{}{}
			open.Wait()
			if a := collected(t, s.Process)[`delayed_total{limit="x"}`]; a != "0" {
				t.Errorf("%s were delayed, want none: it was denied", a)
			}
		})
	}
}

// TestPlaceElsewhere guards that a request gets a place which another instance has freed.
func TestPlaceElsewhere(t *testing.T) {
	u := newTurns(t)
	c := sitetest.Config{Global: sitetest.RedisGlobal(redistest.Start(t).Addr, sitetest.LongTimeout), Site: fmt.Sprintf(placeLimits["concurrency"], "1m") + "reverse_proxy " + u.addr}
	s := sitetest.StartConfig(t, c)
	c.Admin = "localhost:0"
	other := "http://" + sitetest.StartProcess(t, c)
	var open sync.WaitGroup
	open.Go(func() { sitetest.Ask(context.Background(), other+"/?other") })
	<-u.arrived
	got := make(chan sitetest.Answer, 1)
	go func() { got <- s.Get("/?own") }()
	sitetest.Eventually(t, "it waits", func() bool { return waitingAt(s, "x") == 1 })
	u.end <- struct{}{}
	open.Wait()
	if q := <-u.arrived; q != "own" {
		t.Errorf("%s arrived", q)
	}
	u.end <- struct{}{}
	if a := <-got; a.StatusCode != 200 {
		t.Errorf("got %s", a)
	}
}

// TestInstancesShareSlots guards that of two instances whose clients wait for the same slot, each
// gets it again and again, although one that frees it knows only of its own clients.
func TestInstancesShareSlots(t *testing.T) {
	const most, least = 3000, 30 // without sharing, one instance would have almost all
	upstream := sitetest.NewUpstream(t, func(http.ResponseWriter, *http.Request) { time.Sleep(20 * time.Millisecond) })
	c := sitetest.Config{
		Global: sitetest.RedisGlobal(redistest.Start(t).Addr, sitetest.LongTimeout),
		Site:   "rate_limit x {\nkey all\nconcurrency 1\nmax_delay 1m\n}\nreverse_proxy " + upstream,
	}
	s := sitetest.StartConfig(t, c)
	c.Admin = "localhost:0"
	urls := [...]string{s.URL("/"), "http://" + sitetest.StartProcess(t, c) + "/"}
	var served [len(urls)]atomic.Int64
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var open sync.WaitGroup
	for i, url := range urls {
		for range 3 {
			open.Go(func() {
				for ctx.Err() == nil {
					if status, _ := sitetest.Ask(ctx, url); status != http.StatusOK {
						continue
					}
					own, other := served[i].Add(1), served[1-i].Load()
					if min(own, other) >= least || own+other >= most {
						stop()
					}
				}
			})
		}
	}
	open.Wait()
	for i := range served {
		if n := served[i].Load(); n < least {
			t.Errorf("instance %d served %d of %d, want %d or more", i, n, most, least)
		}
	}
}

// TestNoUseToWait guards that a request is denied at once which would not be admitted in the
// end either: one that costs more than the limit holds, also behind others that wait, and one
// for which another limit has no room.
func TestNoUseToWait(t *testing.T) {
	u := newTurns(t)
	s := sitetest.Start(t, "rate_limit {\nlimit x {\nkey all\nconcurrency 2\ncost {query.cost}\nmax_delay 1m\n}\nlimit other {\nmatch query other=*\nkey all\nsize 1\ndrip_rate 1h\n}\n}\nreverse_proxy "+u.addr)
	denied := func(when string) {
		t.Helper()
		start := time.Now()
		if a := s.Get("/?cost=3"); a.StatusCode != 429 || a.Header.Get("Retry-After") != "" || time.Since(start) > 10*time.Second {
			t.Errorf("%s: %s after %v, want a denial without a time to retry", when, a, time.Since(start))
		}
	}
	denied("idle")
	var open sync.WaitGroup
	open.Go(func() { s.Get("/?cost=2&other=1") })
	<-u.arrived
	open.Go(func() { s.Get("/?cost=2") })
	sitetest.Eventually(t, "a request waits", func() bool { return waitingAt(s, "x") == 1 })
	denied("behind one that waits")
	u.end <- struct{}{}
	<-u.arrived
	if a := s.Get("/?cost=2&other=1"); a.StatusCode != 429 || a.Header.Get("Retry-After") != "3600" {
		t.Errorf("without room at another limit: %s", a)
	}
	u.end <- struct{}{}
	open.Wait()
}

// TestMorePlacesAfterReload guards that requests which wait while a reload allows more of them
// get the new places, however many come.
func TestMorePlacesAfterReload(t *testing.T) {
	t.Parallel()
	u := newTurns(t)
	c := sitetest.Config{Site: fmt.Sprintf(placeLimits["concurrency"], "1s") + "reverse_proxy " + u.addr}
	c.Site = strings.Replace(c.Site, "max_waiting 3", "max_waiting 100", 1)
	s := sitetest.StartConfig(t, c)
	var url atomic.Value // another one after the reload
	url.Store(s.URL("/"))
	ctx, stop := context.WithCancel(t.Context())
	var open sync.WaitGroup
	come := func() { open.Go(func() { sitetest.Ask(ctx, url.Load().(string)) }) }
	come()
	<-u.arrived
	open.Go(func() {
		for ctx.Err() == nil {
			come()
			time.Sleep(20 * time.Millisecond)
		}
	})
	time.Sleep(1500 * time.Millisecond) // so that those before leave without a place
	c.Site = strings.Replace(c.Site, "concurrency 1", "concurrency 4", 1)
	s.Reload(c)
	url.Store(s.URL("/"))
	for range 3 {
		select {
		case <-u.arrived:
		case <-time.After(sitetest.Patience):
			t.Fatal("no request got a new place")
		}
	}
	stop()
	for range 4 {
		u.end <- struct{}{}
	}
	open.Wait()
}
