package rule

import (
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/adaptive"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/settle"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/wait"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
)

// TestPlaceOfClient guards for how long a place counts among those of its client: as long as it
// takes room, which is neither while the client's body is awaited nor after two latencies.
func TestPlaceOfClient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const latency = 100 * time.Millisecond
		o := adaptive.Options{Latency: latency, Min: 4, Max: 4}
		l := &Limit{Waiting: &Waiters{Queues: wait.New()}, MaxDelay: time.Second, Load: &settle.Load{Options: o, Controllers: adaptive.NewControllers(o)}}
		has := func(when string, want int64) {
			t.Helper()
			synctest.Wait()
			if own, all := l.Waiting.Has((&Entry{Bucket: &Bucket{Limit: l}}).queue(0), ""); own != want || all != want {
				t.Errorf("%s: %d of %d, want %d", when, own, all, want)
			}
		}
		send := func() (*settle.Place, *http.Request, *io.PipeWriter) {
			body, writer := io.Pipe()
			q := &Request{http: httptest.NewRequest(http.MethodPost, "/", body), how: How{Outcome: new(outcome.Outcome)}}
			q.loads = []Entry{{Bucket: &Bucket{Limit: l, Policy: &Policy{Counters: new(telemetry.Counters)}}}}
			if err := q.acquire(); err != nil || len(q.holdings) != 1 {
				t.Fatal("no room")
			}
			p := q.holdings[0].Place
			return p, q.http, writer
		}
		hangs, _, _ := send()
		has("in progress", 1)
		time.Sleep(latency)
		uploads, r, writer := send()
		has("two", 2)
		time.Sleep(latency)
		has("one hangs", 1)
		var read sync.WaitGroup
		read.Go(func() { _, _ = r.Body.Read(make([]byte, 1)) })
		has("the other one's body is awaited", 0)
		time.Sleep(10 * latency)
		_, _ = writer.Write(make([]byte, 1))
		read.Wait()
		has("the body has come", 1)
		time.Sleep(latency - time.Millisecond)
		has("soon it has been in progress for long", 1)
		time.Sleep(time.Millisecond)
		has("that hangs too", 0)
		quick, _, _ := send()
		has("another one", 1)
		for _, p := range []*settle.Place{hangs, uploads, quick} {
			p.Release(true)
		}
		has("none", 0)
		time.Sleep(10 * latency)
		has("long after", 0)
	})
}
