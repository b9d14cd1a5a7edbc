package limiter

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// TestDeniedRequestsNeverChargeReportedLevels guards that levels sent to a server
// that may have lost them never include the charges of denied requests, whether
// denied by another full bucket or for their cost. What was admitted just when the
// server lost its scripts may count twice.
func TestDeniedRequestsNeverChargeReportedLevels(t *testing.T) {
	t.Parallel()
	for _, callers := range []int{16, 128} {
		t.Run(fmt.Sprintf("another bucket,callers=%d", callers), func(t *testing.T) {
			server := redistest.Start(t)
			r := newTestRedis(t, server, func(opt *RedisOptions) {
				opt.Timeout, opt.Fallback = 2*time.Second, NewMemory()
			})
			client, everybody := hourly(5), hourly(10_000)
			everybody.Name = "everybody"
			req := Request{Buckets: []Bucket{client, everybody}}
			var admitted atomic.Int64
			stop := make(chan struct{})
			var all sync.WaitGroup
			for range callers {
				all.Go(func() {
					for {
						select {
						case <-stop:
							return
						default:
						}
						forgetOnce(r)
						d, err := r.Take(context.Background(), req, nil)
						if err != nil {
							t.Error(err)
							return
						}
						if !Denied(d) {
							admitted.Add(1)
						}
					}
				})
			}
			for range 8 {
				time.Sleep(50 * time.Millisecond)
				if err := server.Client().ScriptFlush(t.Context()).Err(); err != nil {
					t.Error(err)
				}
			}
			close(stop)
			all.Wait()
			if used := unitsIn(t, r, everybody); used < admitted.Load() || used > 2*admitted.Load() {
				t.Errorf("%d admitted, and the shared limit has lost %d", admitted.Load(), used)
			}
		})
		t.Run(fmt.Sprintf("its cost,callers=%d", callers), func(t *testing.T) {
			server := redistest.Start(t)
			r := newTestRedis(t, server, func(opt *RedisOptions) {
				opt.Timeout, opt.Fallback = 2*time.Second, NewMemory()
			})
			b := hourly(100)
			b.Cost = 60
			var admitted atomic.Int64
			for range 5 {
				redistest.Together(t, callers, func(int) {
					d, err := r.Take(context.Background(), Request{Buckets: []Bucket{b}}, nil)
					if err != nil {
						t.Error(err)
					} else if !d[0].Denied {
						admitted.Add(b.Cost)
					}
				})
				if err := server.Client().ScriptFlush(t.Context()).Err(); err != nil {
					t.Error(err)
				}
			}
			if used := unitsIn(t, r, b); used < admitted.Load() || used > 2*admitted.Load() {
				t.Errorf("%d units admitted, and the bucket holds %d", admitted.Load(), used)
			}
		})
	}
}

// forgetOnce clears the deny cache, so that the server is called next.
func forgetOnce(r *Redis) { r.denyCache.latest.Store(0) }

// TestTimedStalledServerOfCluster guards requests with several keys and no fallback
// while one server of a cluster stalls now and then: no caller hangs, and neither
// does closing the store.
func TestTimedStalledServerOfCluster(t *testing.T) {
	if testing.Short() {
		t.Skip(longTest)
	}
	t.Parallel()
	nodes := redistest.StartCluster(t, 3)
	for _, fallback := range []*Memory{nil, NewMemory()} {
		r := newTestCluster(t, nodes, func(opt *RedisOptions) { opt.Timeout, opt.Fallback = 50*time.Millisecond, fallback })
		r.Connect(t.Context())
		redistest.WaitFor(t, 5*time.Second, func() error {
			_, err := r.Take(context.Background(), Request{Buckets: []Bucket{hourly(5)}}, nil)
			return err
		})
		var longest, decided atomic.Int64
		end := time.Now().Add(2 * time.Second)
		stalls := make(chan struct{})
		go func() {
			defer close(stalls)
			for time.Now().Before(end) {
				nodes.Nodes[0].Pause(t)
				time.Sleep(60 * time.Millisecond)
				nodes.Nodes[0].Resume(t)
				time.Sleep(100 * time.Millisecond)
			}
		}()
		redistest.Together(t, 64, func(g int) {
			for i := 0; time.Now().Before(end); i++ {
				req := Request{}
				for j := range 3 {
					b := hourly(100_000)
					b.Key = fmt.Sprint(g, i%50, j)
					req.Buckets = append(req.Buckets, b)
				}
				began := time.Now()
				if _, err := r.Take(context.Background(), req, nil); err == nil {
					decided.Add(1)
				}
				for took := int64(time.Since(began)); took > longest.Load(); {
					longest.Store(took)
				}
			}
		})
		<-stalls
		t.Logf("%d decided, longest wait %v", decided.Load(), time.Duration(longest.Load()))
		if took := time.Duration(longest.Load()); took > time.Second {
			t.Errorf("a request took %v", took)
		}
		if decided.Load() == 0 {
			t.Error("no request was decided")
		}
		closed := make(chan struct{})
		go func() {
			defer close(closed)
			_ = r.Close()
		}()
		select {
		case <-closed:
		case <-time.After(10 * time.Second):
			t.Fatal("the store can't be closed")
		}
	}
}
