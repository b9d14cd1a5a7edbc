package bench

import (
	"context"
	"fmt"
	"net/http"
	"path/filepath"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/state"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/state/persist"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// BenchmarkSaving sends 2 000 requests a second through a Caddy that has a million buckets, in turns
// of half a second: while they are saved to a file again and again, and while they are not. x-none is
// the ratio of the times within which 99 of 100 are answered.
func BenchmarkSaving(b *testing.B) {
	const perTurn, every = 1000, 500 * time.Microsecond
	addr := startCaddy(b, "rate_limit {\nalgorithm fixed_window\nsize 1000000000\nperiod month\n}\nrespond ok")
	memory := state.Default.Newest().Memory
	memory.SetMaxKeys(4_000_000)
	for i := range 1_000_000 {
		bucket := limiter.Bucket{Name: "other", Key: fmt.Sprint(i), Limit: limiter.FixedWindow(5, 24*time.Hour), Cost: 1}
		if _, err := memory.Take(context.Background(), limiter.Request{Buckets: []limiter.Bucket{bucket}}, nil); err != nil {
			b.Fatal(err)
		}
	}
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 256}}
	turn := func() time.Duration { return slowest(b, client, "http://"+addr, perTurn, every) }
	dir := b.TempDir()
	paths, next := map[bool]string{false: filepath.Join(dir, "a"), true: filepath.Join(dir, "b")}, false
	opt := persist.Options{Path: paths[next], Logger: caddy.Log()}
	file := persist.New(memory, func() bool { return false })
	file.Use(opt)
	saving := func(do func() time.Duration) (took time.Duration, saves int) {
		end, ended := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(ended)
			for {
				select {
				case <-end:
					return
				default:
				}
				next = !next // another file is written at once
				opt.Path = paths[next]
				file.Use(opt)
				if file.Tick(); file.Saved().IsZero() {
					wrong(b, "not saved")
					return
				}
				saves++
			}
		}()
		took = do()
		close(end)
		<-ended
		return took, saves
	}
	var ratios, with, without []float64
	saves := 0
	for b.Loop() {
		none := turn()
		while, n := saving(turn)
		ratios, with, without, saves = append(ratios, float64(while)/float64(none)), append(with, float64(while)), append(without, float64(none)), saves+n
	}
	b.ReportMetric(median(ratios), "x-none")
	b.ReportMetric(median(with)/1e6, "p99-ms")
	b.ReportMetric(median(without)/1e6, "none-p99-ms")
	b.ReportMetric(float64(saves)/float64(b.N), "saves/op")
}
