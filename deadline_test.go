package ratelimit

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/redistest"
)

// TestTimeoutCoversAllBlocks guards that the timeout bounds what a request waits
// for Redis in all blocks that it passes, and not in each.
func TestTimeoutCoversAllBlocks(t *testing.T) {
	const timeout = time.Second
	server := redistest.Start(t)
	var blocks strings.Builder
	for i := range 4 {
		fmt.Fprintf(&blocks, "rate_limit block%d {\nsize 9\ndrip_rate 1h\n}\n", i)
	}
	s := startConfig(t, config{
		global: redisGlobal(server.Addr, "timeout "+timeout.String()),
		site:   blocks.String() + "respond admitted",
	})
	s.run(step{want: "200 limit=9 remaining=8 clear=3600.000"})
	server.Pause(t)
	start := time.Now()
	s.run(step{want: "200 limit=9 remaining=7 clear=7200.000"})
	if took := time.Since(start); took > timeout+timeout/4 {
		t.Errorf("a request that passes four blocks waited %v, want %v at most", took, timeout)
	}
}

// TestTimeoutCountsOnlyWaitingForRedis guards that only the waiting for Redis
// counts: a request that took long elsewhere, between one block and the next, is
// decided by Redis.
func TestTimeoutCountsOnlyWaitingForRedis(t *testing.T) {
	const timeout = 250 * ms
	server := redistest.Start(t)
	upstream := newUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		<-time.After(2 * timeout)
		io.WriteString(w, "upstream")
	})
	s := startConfig(t, config{
		global: redisGlobal(server.Addr, "timeout "+timeout.String()),
		site: `
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
	s.run(step{want: "200 limit=5 remaining=4 clear=3600.000", body: "upstream"})
}

// TestTimeoutCoversAllSteps guards that the timeout bounds all of a request's
// waiting for Redis: several steps that are each in time are not.
func TestTimeoutCoversAllSteps(t *testing.T) {
	const timeout, delay = 400 * ms, 300 * ms
	server := redistest.Start(t)
	proxy := redistest.StartProxy(t, server.Addr)
	proxy.Delay(delay)
	s := startConfig(t, config{
		global: redisGlobal(proxy.Addr, "timeout "+timeout.String()),
		site:   "rate_limit {\nsize 9\non_error deny\n}\nrespond admitted",
	})
	// The greeting takes one delay, the script at least another.
	if a := s.get("/"); a.StatusCode != 503 {
		t.Errorf("got %s", a)
	}
}
