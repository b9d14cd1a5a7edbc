package behaviour

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// TestLightClientBesideScript guards, through a running Caddy, that a client with one request at a
// time gets a fair part of one slot, or of a rate, beside a script that has many waiting, and that
// none of its requests is denied, also if fewer may wait than the script has; with fair_by off it
// waits behind all of them, or is denied.
func TestLightClientBesideScript(t *testing.T) {
	const slot, rate = "concurrency 1\nmax_delay 1m\n", "rate 20/s\nsize 1\nmax_delay 2s\n"
	for _, tc := range []struct {
		name, store, options string
		script               int
		min, max             int // requests of the script that are served for each ten of the light client
		denied, displaced    bool
	}{
		{"beside 20", "memory", slot, 20, 8, 25, false, false},
		{"beside 30 with Redis", "redis", slot, 30, 8, 25, false, false},
		{"few may wait", "memory", slot + "max_waiting 15\n", 30, 8, 25, false, true},
		{"in order", "memory", slot + "fair_by off\n", 20, 100, 1000, false, false},
		{"few may wait in order", "memory", slot + "max_waiting 15\nfair_by off\n", 30, 0, 1e6, true, false},
		{"a rate", "redis", rate, 50, 8, 25, false, true},
		{"a rate, few may wait", "redis", rate + "max_waiting 15\n", 30, 8, 25, false, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			const hold, requests = 5 * time.Millisecond, 10
			addr := sitetest.NewUpstream(t, func(http.ResponseWriter, *http.Request) { time.Sleep(hold) })
			options := tc.options
			if !strings.Contains(options, "fair_by") {
				options += "fair_by {query.user}\n"
			}
			c := sitetest.Config{Site: "rate_limit x {\nkey all\n" + options + "}\nreverse_proxy " + addr}
			if tc.store == "redis" {
				c.Global = sitetest.RedisGlobal(redistest.Start(t).Addr, sitetest.LongTimeout)
			}
			s := sitetest.StartConfig(t, c)
			var served, stop atomic.Int64
			var all sync.WaitGroup
			for range tc.script {
				all.Go(func() {
					for stop.Load() == 0 {
						if s.Get("/?user=script").StatusCode == 200 {
							served.Add(1)
						} else {
							time.Sleep(hold)
						}
					}
				})
			}
			sitetest.Eventually(t, "the script waits", func() bool { return s.BucketAt("x").Limit.Waiting.State().Longest >= 13 })
			before, denied := served.Load(), 0
			for range requests {
				if got := s.Get("/?user=light"); got.StatusCode != 200 {
					denied++
				}
			}
			others := int(served.Load() - before)
			stop.Store(1)
			all.Wait()
			if (denied > 0) != tc.denied || others < tc.min || others > tc.max {
				t.Errorf("%d of the script were served for %d of the light client, of which %d were denied; want %d to %d, any denied: %t",
					others, requests, denied, tc.min, tc.max, tc.denied)
			}
			displaced := collected(t, s.Process)[`displaced_total{limit="x"}`]
			if (displaced != "0") != tc.displaced {
				t.Errorf("%s were displaced, want any: %t", displaced, tc.displaced)
			}
			if n := fmt.Sprint(collected(t, s.Process)[`waiting{limit="x"}`], collected(t, s.Process)[`waiting_clients{limit="x"}`]); n != "00" {
				t.Errorf("waiting and waiting_clients are %s at the end", n)
			}
		})
	}
}

// TestSlowClientHasHalf guards, through a running Caddy, that a client whose requests do not end
// has no more than half of the slots while another client waits, in both stores and with the load.
func TestSlowClientHasHalf(t *testing.T) {
	for name, limit := range map[string]string{
		"memory": "concurrency 4\n",
		"redis":  "concurrency 4\n",
		"auto":   "concurrency auto {\nlatency 1m\nmin 4\nmax 4\n}\n",
	} {
		t.Run(name, func(t *testing.T) {
			type client struct {
				inProgress atomic.Int64
				end        chan struct{} // one of them
			}
			slow, quick := &client{end: make(chan struct{})}, &client{end: make(chan struct{})}
			clients := map[string]*client{"slow": slow, "quick": quick}
			addr := sitetest.NewUpstream(t, func(_ http.ResponseWriter, r *http.Request) {
				c := clients[r.URL.Query().Get("user")]
				c.inProgress.Add(1)
				<-c.end
				c.inProgress.Add(-1)
			})
			c := sitetest.Config{Site: "rate_limit x {\nkey all\nmax_delay 10m\nfair_by {query.user}\n" + limit + "}\nreverse_proxy " + addr}
			if name == "redis" {
				c.Global = sitetest.RedisGlobal(redistest.Start(t).Addr, sitetest.LongTimeout)
			}
			s := sitetest.StartConfig(t, c)
			var all sync.WaitGroup
			defer all.Wait()
			defer close(slow.end)
			defer close(quick.end)
			send := func(client string, requests int) {
				for range requests {
					all.Go(func() {
						if got := s.Get("/?user=" + client); got.StatusCode != 200 {
							t.Errorf("%s: status %d", client, got.StatusCode)
						}
					})
				}
			}
			left := 0 // waiting
			settled := func(when string) (ofSlow int64) {
				t.Helper()
				sitetest.Eventually(t, fmt.Sprintf("%s: 4 in progress, and %d waiting", when, left), func() bool {
					ofSlow = slow.inProgress.Load()
					return ofSlow+quick.inProgress.Load() == 4 && s.BucketAt("x").Limit.Waiting.State().Requests == left
				})
				return ofSlow
			}
			send("slow", 20)
			left = 16
			settled("slow requests alone")
			send("quick", 40)
			left += 40
			settled("quick ones wait")
			const steps = 20
			more := 0 // how often the slow client got more than half
			for range steps {
				ends := quick
				if n := slow.inProgress.Load(); n > 2 {
					ends = slow
				}
				ends.end <- struct{}{}
				left--
				if now := settled("one has ended"); ends == quick && now > 2 {
					more++
				}
			}
			// The poll of a client may find what was freed for another one.
			if ofSlow := slow.inProgress.Load(); more > 2 || ofSlow < 1 || ofSlow > 3 {
				t.Errorf("the slow client has %d of 4 slots at the end, and had more than half %d times", ofSlow, more)
			}
		})
	}
}
