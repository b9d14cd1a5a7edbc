package behaviour

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// gatedUpstream is an upstream whose responses have the status that their path says, once as many
// requests are in progress as it waits for.
type gatedUpstream struct {
	waits   atomic.Int64
	arrived atomic.Int64
	left    atomic.Int64 // whose clients left while they waited
}

func (g *gatedUpstream) serve(w http.ResponseWriter, r *http.Request) {
	g.arrived.Add(1)
	for g.arrived.Load() < g.waits.Load() && r.Context().Err() == nil {
		time.Sleep(time.Millisecond)
	}
	if r.Context().Err() != nil {
		g.left.Add(1)
	}
	status, _ := strconv.Atoi(r.URL.Path[1:])
	w.WriteHeader(status)
}

// closed makes it wait for n requests more.
func (g *gatedUpstream) closed(n int64) { g.waits.Store(g.arrived.Load() + n) }

// remaining returns how many units remain by the header fields of a request that does not
// count, or minus the whole hours of its wait if it is denied.
func remaining(t *testing.T, target string) int {
	t.Helper()
	status, header := sitetest.Ask(t.Context(), target+"/200")
	field := "X-RateLimit-Remaining"
	if status == http.StatusTooManyRequests {
		field = "Retry-After"
	}
	n, err := strconv.Atoi(header.Get(field))
	if err != nil {
		t.Fatalf("status %d, %s: %v", status, field, err)
	}
	if status == http.StatusTooManyRequests {
		return -(n + 3599) / 3600
	}
	return n
}

// TestHoldOff guards that with hold off parallel requests do not deny each other, however
// many they are, on all instances together; that what counts is charged exactly, also above
// the size; and that a request counts whose client has hung up.
func TestHoldOff(t *testing.T) {
	g := new(gatedUpstream)
	site := "rate_limit scans {\nkey all\nsize 20\ndrip_rate 1h\ncount status 404\nhold off\n}\nreverse_proxy " + sitetest.NewUpstream(t, g.serve)
	eachNode(t, site, func(t *testing.T, urls []string) {
		g.closed(0)
		at := func(what string, want int) {
			t.Helper()
			sitetest.Eventually(t, fmt.Sprintf("%s: %d remain", what, want), func() bool { return remaining(t, urls[0]) == want })
		}
		together := func(n, status int) {
			t.Helper()
			g.closed(int64(n))
			redistest.Together(t, n, func(i int) {
				if got, _ := sitetest.Ask(t.Context(), fmt.Sprint(urls[i%len(urls)], "/", status)); got != status {
					t.Errorf("one of %d got %d, want %d", n, got, status)
				}
			})
		}
		together(60, 200)
		at("none of them counts", 20)
		together(7, 404)
		at("all of them count", 13)
		g.closed(2)
		ctx, cancel := context.WithCancel(t.Context())
		before := g.left.Load()
		var left sync.WaitGroup
		left.Go(func() { _, _ = sitetest.Ask(ctx, urls[0]+"/200") })
		sitetest.Eventually(t, "in progress", func() bool { return g.arrived.Load() == g.waits.Load()-1 })
		cancel()
		left.Wait()
		sitetest.Eventually(t, "left", func() bool { return g.left.Load() > before })
		g.closed(0)
		at("who hangs up counts", 12)
		together(30, 404) // 38 units, which takes 19 drips
		at("above the size", -19)
		if status, _ := sitetest.Ask(t.Context(), urls[len(urls)-1]+"/404"); status != http.StatusTooManyRequests {
			t.Errorf("a full bucket: got %d", status)
		}
		at("a denied request does not count", -19)
	})
}

// TestHoldOffThroughOutage guards that what a request is charged is neither lost nor charged
// twice if Redis is down or silent when that is known, or comes back without its data.
func TestHoldOffThroughOutage(t *testing.T) {
	t.Parallel()
	g := new(gatedUpstream)
	server := redistest.Start(t)
	s := sitetest.StartConfig(t, sitetest.Config{
		Global: sitetest.RedisGlobal(server.Addr, "timeout 200ms"),
		Site:   "rate_limit scans {\nkey all\nsize 20\ndrip_rate 1h\ncount status 404\nhold off\n}\nreverse_proxy " + sitetest.NewUpstream(t, g.serve),
	})
	sitetest.Eventually(t, "connected", func() bool { return server.InfoNumber(t, "clients", "connected_clients") > 1 })
	// inProgress has n requests admitted, then does something, and then has them answered.
	inProgress := func(n int64, do func()) {
		t.Helper()
		g.closed(n + 1)
		var clients sync.WaitGroup
		for range n {
			clients.Go(func() {
				if status, _ := sitetest.Ask(t.Context(), s.URL("/404")); status != http.StatusNotFound {
					t.Errorf("got %d", status)
				}
			})
		}
		sitetest.Eventually(t, "in progress", func() bool { return g.arrived.Load() == g.waits.Load()-1 })
		do()
		g.closed(0)
		clients.Wait()
	}
	at := func(what string, want int) {
		t.Helper()
		sitetest.Eventually(t, fmt.Sprintf("%s: %d remain", what, want), func() bool { return remaining(t, s.URL("")) == want })
	}
	inProgress(3, func() {})
	at("charged", 17)
	inProgress(2, func() {
		redistest.Done(t, server.Client().Do(t.Context(), "CLIENT", "PAUSE", 500, "ALL"))
	})
	time.Sleep(time.Second)
	for range 3 {
		at("silent", 15)
	}
	inProgress(4, server.Kill)
	at("down", 11)
	server.Restart(t)
	for range 10 {
		at("back without its data", 11)
		time.Sleep(20 * time.Millisecond)
	}
}

// TestCostOfNothing guards requests that cost nothing, as written or as a placeholder says:
// they are told what is left, charge nothing and always pass. A value that is no cost is
// refused, whatever is left.
func TestCostOfNothing(t *testing.T) {
	eachNode(t, "rate_limit {\nlimit a {\nkey all\nsize 3\ndrip_rate 1h\ncost {query.cost}\n}\nlimit b {\nkey all\nsize 3\ndrip_rate 1h\ncost 0\n}\n}\nrespond ok", func(t *testing.T, urls []string) {
		for i, tc := range []struct {
			cost, remaining string
			status          int
		}{
			{"0", "3", 200}, {"2", "1", 200}, {"0", "1", 200}, {"2", "1", 429}, {"0", "1", 200}, {"1", "0", 200}, {"0", "0", 200}, {"1", "0", 429}, {"-1", "", 400},
			{"", "", 400}, {"x", "", 400}, {"9007199254740993", "", 400}, {"99999999999999999999", "", 400}, {"4", "0", 429}, {"0", "0", 200},
		} {
			status, header := sitetest.Ask(t.Context(), urls[i%len(urls)]+"/?cost="+tc.cost)
			if got := header.Get("X-RateLimit-Remaining"); status != tc.status || got != tc.remaining {
				t.Errorf("request %d, which costs %s: got %d, %q remain, want %d and %q", i, tc.cost, status, got, tc.status, tc.remaining)
			}
		}
	})
}

// TestViewsCostNothing guards that a request which costs nothing passes, shows what is left and
// changes nothing, whatever else its limit has: costs that are known later, which its own limit
// of the same name need not have, requests in progress, others that wait for their place, an
// interval, denied requests that count and room to be above the size. A ban still denies it,
// and it begins none.
func TestViewsCostNothing(t *testing.T) {
	var open atomic.Pointer[chan struct{}]
	var arrived atomic.Int64
	upstream := sitetest.NewUpstream(t, func(_ http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/slow" {
			arrived.Add(1)
			<-*open.Load()
		}
	})
	site := `
		@view path /view
		rate_limit {
			key {query.key}
			match {
				not vars {query.view} yes
			}
			limit tokens {
				match vars {query.limit} tokens
				size 10
				drip_rate 1h
				cost 4
				actual_cost {http.response.header.X-Tokens}
			}
			limit places {
				match vars {query.limit} places
				concurrency 2
				cost {query.cost}
				max_delay 5s
			}
			limit interval {
				match vars {query.limit} interval
				max 10
				duration 10h
				min_interval 1h
				cost {query.cost}
			}
			limit alone {
				match vars {query.limit} alone
				min_interval 1h
				cost {query.cost}
			}
			limit banned {
				match vars {query.limit} banned
				size 1
				drip_rate 1h
				ban 1h
				cost {query.cost}
			}
		}
		rate_limit {
			limit denied {
				key {query.key}
				match vars {query.limit} denied
				size 2
				drip_rate 1h
				count_denied
				soft 1
				cost {query.cost}
			}
		}
		rate_limit {
			match vars {query.view} yes
			limit tokens {
				key {query.key}
				size 10
				drip_rate 1h
				cost 0
			}
		}
		header X-Tokens {query.tokens}
		reverse_proxy ` + upstream
	eachNode(t, site, func(t *testing.T, urls []string) {
		n := 0
		run := func(limit string, steps ...string) {
			t.Helper()
			for i, step := range steps {
				query, want, _ := strings.Cut(step, " => ")
				url := urls[n%len(urls)]
				n++
				get := func() string {
					status, header := sitetest.Ask(t.Context(), url+"/?key="+limit+"&limit="+limit+"&"+query)
					return fmt.Sprint(status, " ", header.Get("X-RateLimit-Remaining"))
				}
				if limit == "tokens" { // which are charged soon after the response
					sitetest.Eventually(t, fmt.Sprintf("%s: request %d, %s: %q", limit, i, query, want), func() bool { return get() == want || query[0] != 'v' })
					continue
				}
				if got := get(); got != want {
					t.Errorf("%s: request %d, %s: got %q, want %q", limit, i, query, got, want)
				}
			}
		}
		run("tokens", "view=yes => 200 10", "tokens=6 => 200 6", "view=yes&tokens=9 => 200 4", "tokens=9 => 200 0", "view=yes => 200 0", "view=yes => 200 0")
		if status, _ := sitetest.Ask(t.Context(), urls[0]+"/?key=tokens&limit=tokens&tokens=1"); status != http.StatusTooManyRequests {
			t.Errorf("tokens that are spent: got %d", status)
		}
		run("interval", "cost=0 => 200 1", "cost=2 => 200 0", "cost=0 => 200 0", "cost=1 => 429 0", "cost=0 => 200 0")
		run("alone", "cost=0 => 200 1", "cost=2 => 200 0", "cost=0 => 200 0", "cost=1 => 429 0", "cost=0 => 200 0")
		run("denied", "cost=3 => 200 0", "cost=0 => 200 0", "cost=1 => 429 0", "cost=0 => 200 0")
		run("banned", "cost=1 => 200 0", "cost=0 => 200 0", "cost=0 => 200 0", "cost=1 => 429 0", "cost=0 => 429 0")
		opens, before := make(chan struct{}), arrived.Load()
		open.Store(&opens)
		var slow sync.WaitGroup
		for i := range 3 { // of which one waits
			slow.Go(func() {
				if status, _ := sitetest.Ask(t.Context(), urls[i%len(urls)]+"/slow?key=places&limit=places&cost=1"); status != http.StatusOK {
					t.Errorf("a place: got %d", status)
				}
			})
		}
		sitetest.Eventually(t, "two are in progress", func() bool { return arrived.Load()-before == 2 })
		run("places", "cost=0 => 200 0", "cost=0 => 200 0", "cost=0 => 200 0")
		close(opens)
		slow.Wait()
		sitetest.Eventually(t, "all places are free", func() bool {
			_, header := sitetest.Ask(t.Context(), urls[0]+"/?key=places&limit=places&cost=0")
			return header.Get("X-RateLimit-Remaining") == "2"
		})
	})
}

// TestHoldOffChargesOnce guards that each request which an upstream had is charged once, and
// others are not, except that of those answered with 499 nobody knows, while clients reset their streams, configurations are loaded, the buckets
// move to other keys and stores, and Redis is silent, loses its connections, its scripts or all.
func TestHoldOffChargesOnce(t *testing.T) {
	const size, clients = 100_000, 20
	var had, gone, answered, canceled atomic.Int64
	var leave [clients]atomic.Value // has the client reset its stream
	upstream := sitetest.NewUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		had.Add(1)
		if i, err := strconv.Atoi(r.Header.Get("Leave")); err == nil {
			leave[i].Load().(context.CancelFunc)()
		}
		time.Sleep(time.Duration(rand.IntN(20)) * ms)
		w.WriteHeader(http.StatusNotFound)
	})
	server := redistest.Start(t)
	at := func(redis string) sitetest.Config {
		return sitetest.Config{
			Global: redis + "\nservers {\nprotocols h1 h2c\n}",
			Site:   fmt.Sprintf("rate_limit scans {\nkey all\nsize %d\ndrip_rate 1h\ncount status 404\nhold off\n}\nreverse_proxy %s", size, upstream),
		}
	}
	redis := sitetest.RedisGlobal(server.Addr, "timeout 200ms")
	s := sitetest.StartConfig(t, at(redis))
	sitetest.Eventually(t, "connected", func() bool { return server.InfoNumber(t, "clients", "connected_clients") > 1 })
	s.UseHTTP2()
	var target atomic.Value
	target.Store(s.URL("/"))
	ctx, stop := context.WithCancel(t.Context())
	var all sync.WaitGroup
	for i := range clients {
		all.Go(func() {
			for ctx.Err() == nil {
				patient, cancel := context.WithTimeout(t.Context(), sitetest.Patience)
				leave[i].Store(cancel)
				req, err := http.NewRequestWithContext(patient, http.MethodGet, target.Load().(string), nil)
				if err != nil {
					t.Error(err)
					return
				}
				if rand.IntN(3) == 0 {
					req.Header.Set("Leave", strconv.Itoa(i))
				}
				if res, err := s.Client.Do(req); err != nil {
					gone.Add(1)
				} else {
					res.Body.Close()
					answered.Add(1)
					if res.StatusCode == 499 {
						canceled.Add(1)
					}
				}
				cancel()
			}
		})
	}
	load := func(c sitetest.Config) {
		t.Helper()
		s.Reload(c)
		target.Store(s.URL("/"))
		time.Sleep(50 * ms)
	}
	do := func(args ...any) {
		t.Helper()
		redistest.Done(t, server.Client().Do(t.Context(), args...))
		time.Sleep(50 * ms)
	}
	time.Sleep(50 * ms)
	for range 5 {
		do("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
		do("SCRIPT", "FLUSH")
	}
	load(at(redis))
	load(at(sitetest.RedisGlobal(server.Addr, "timeout 200ms", "key_prefix other")))
	do("CLIENT", "PAUSE", 500, "ALL")
	time.Sleep(600 * ms)
	load(at(""))
	load(at(redis))
	server.Kill()
	time.Sleep(200 * ms)
	server.Restart(t)
	time.Sleep(200 * ms)
	stop()
	all.Wait()
	if answered.Load() < 100 || gone.Load() < 20 {
		t.Errorf("%d requests were answered and %d given up: the test covers too little", answered.Load(), gone.Load())
	}
	s.Client.CloseIdleConnections()
	least := had.Load()
	sitetest.Eventually(t, fmt.Sprintf("%d are charged", least), func() bool {
		charged := int64(size - remaining(t, s.URL("")))
		least++ // by this request
		return charged >= least-1 && charged <= least-1+canceled.Load()
	})
}
