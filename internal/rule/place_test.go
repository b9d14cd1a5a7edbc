package rule

import (
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/adaptive"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/key"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/clientip"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/settle"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/wait"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
)

// TestPlaceOfClient guards for how long a place counts among those of its client: as long as it
// takes room, which is neither while the client's body is awaited nor after two latencies; and that
// one that waits has a slot in the moment when it takes none any more.
func TestPlaceOfClient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := adaptive.Options{Latency: 100 * time.Millisecond, Min: 2, Max: 2}
		half := o.Counted() / 2
		l := &Limit{Waiting: &Waiters{Queues: wait.New()}, Options: Options{MaxDelay: option.Seconds(time.Second), MaxWaiting: 1}, Load: &settle.Load{Options: o, Controllers: adaptive.NewControllers(o)}}
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
		start := time.Now()
		time.Sleep(half)
		uploads, r, writer := send()
		has("two", 2)
		waits, _, _ := send()
		if waited := time.Since(start); waited != 2*half {
			t.Errorf("one that waits has a slot after %v, want %v", waited, 2*half)
		}
		has("one hangs", 2)
		waits.Release(true)
		has("another one is answered", 1)
		var read sync.WaitGroup
		read.Go(func() { _, _ = r.Body.Read(make([]byte, 1)) })
		has("the other one's body is awaited", 0)
		time.Sleep(10 * half)
		_, _ = writer.Write(make([]byte, 1))
		read.Wait()
		has("the body has come", 1)
		time.Sleep(half - time.Millisecond)
		has("soon it has been in progress for long", 1)
		time.Sleep(time.Millisecond)
		has("that hangs too", 0)
		quick, _, _ := send()
		has("another one", 1)
		for _, p := range []*settle.Place{hangs, uploads, quick} {
			p.Release(true)
		}
		has("none", 0)
		time.Sleep(10 * half)
		has("long after", 0)
	})
}

// TestClientIsFoundOnce guards that what fair_by says is found once for a request, which may take a
// signature to verify, although both who waits and who has a slot need it.
func TestClientIsFoundOnce(t *testing.T) {
	t.Parallel()
	found := 0
	q := &Request{http: httptest.NewRequest(http.MethodGet, "/", http.NoBody), replacer: caddy.NewEmptyReplacer()}
	q.replacer.Map(func(key string) (any, bool) {
		found++
		return "a", key == "client"
	})
	l := &Limit{}
	l.Turns, _ = key.Parse("fair_by", "{client}", clientip.Prefixes{})
	e := &Entry{Bucket: &Bucket{Limit: l}}
	for range 3 {
		if client := q.fairBy(e); client == "" || found != 1 {
			t.Errorf("the client is %q, found %d times", client, found)
		}
	}
}
