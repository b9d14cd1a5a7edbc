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
// time gets a fair part of one slot beside a script that has many waiting, and that none of its
// requests is denied, also if fewer may wait than the script has; with fair_by off it waits behind
// all of them, or is denied.
func TestLightClientBesideScript(t *testing.T) {
	for _, tc := range []struct {
		name, store, options string
		script               int
		min, max             int // requests of the script that are served for each ten of the light client
		denied               bool
	}{
		{"beside 20", "memory", "", 20, 8, 25, false},
		{"beside 30 with Redis", "redis", "", 30, 8, 25, false},
		{"few may wait", "memory", "max_waiting 15\n", 30, 8, 25, false},
		{"in order", "memory", "fair_by off\n", 20, 100, 1000, false},
		{"few may wait in order", "memory", "max_waiting 15\nfair_by off\n", 30, 0, 1e6, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			const hold, requests = 5 * time.Millisecond, 10
			addr := sitetest.NewUpstream(t, func(http.ResponseWriter, *http.Request) { time.Sleep(hold) })
			options := tc.options
			if !strings.Contains(options, "fair_by") {
				options += "fair_by {query.user}\n"
			}
			c := sitetest.Config{Site: "rate_limit x {\nkey all\nconcurrency 1\nmax_delay 1m\n" + options + "}\nreverse_proxy " + addr}
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
			sitetest.Eventually(t, "the script waits", func() bool { return waitingAt(t, "x") >= int64(min(tc.script-1, 15)) })
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
			displaced := collected(t)[`displaced_total{limit="x"}`]
			if tc.denied || tc.script < 30 || tc.store == "redis" {
				if displaced != "0" {
					t.Errorf("%s were displaced", displaced)
				}
			} else if displaced == "0" {
				t.Error("none was displaced")
			}
			if n := fmt.Sprint(collected(t)[`waiting{limit="x"}`], collected(t)[`waiting_clients{limit="x"}`]); n != "00" {
				t.Errorf("waiting and waiting_clients are %s at the end", n)
			}
		})
	}
}
