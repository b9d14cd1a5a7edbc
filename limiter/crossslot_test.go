package limiter

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// TestFloodOfOneKey guards limits with several keys in a cluster while one client
// floods them: the limit shared by all clients loses only what that client is
// admitted, for any number of callers and whichever limit comes first.
func TestFloodOfOneKey(t *testing.T) {
	if testing.Short() {
		t.Skip(longTest)
	}
	t.Parallel()
	nodes := redistest.StartCluster(t, 3)
	for _, callers := range []int{1, 16, 512} {
		for _, drip := range []time.Duration{100 * time.Millisecond, time.Hour} {
			t.Run(fmt.Sprintf("callers=%d,drip=%v", callers, drip), func(t *testing.T) {
				r := newTestCluster(t, nodes, func(opt *RedisOptions) { opt.Timeout = 5 * time.Second })
				client := onNode(t, r, nodes, nodes.Nodes[0], Bucket{Name: "ip", Limit: Limit{Size: 10, DripInterval: drip, DripSize: 1}, Cost: 1})
				everybody := onNode(t, r, nodes, nodes.Nodes[1], Bucket{Name: "everybody", Limit: Limit{Size: 5000, DripInterval: time.Hour, DripSize: 1}, Cost: 1})
				var admitted atomic.Int64
				end := time.Now().Add(time.Second)
				redistest.Together(t, callers, func(g int) {
					req := Request{Buckets: []Bucket{client, everybody}}
					if g%2 == 0 {
						slices.Reverse(req.Buckets)
					}
					for time.Now().Before(end) {
						d, err := r.Take(context.Background(), req, nil)
						if err != nil {
							t.Error(err)
						} else if !Denied(d) {
							admitted.Add(1)
						}
					}
				})
				if got, want := storedUnits(t, r, nodes.Nodes[1], everybody), admitted.Load(); got != want {
					t.Errorf("%d admitted, and the shared limit has lost %d", want, got)
				}
			})
		}
	}
}
