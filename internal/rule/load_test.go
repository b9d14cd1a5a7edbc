package rule

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/adaptive"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome"
)

// TestAnswers guards what counts as an answer of an upstream: no failure, which may be fast
// because nothing was done, and no response of another handler where an upstream has answered
// before.
func TestAnswers(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name    string
		status  int
		proxied bool  // this response
		before  bool  // an earlier one
		failed  error // by which error routes within were invoked
		want    bool
	}{
		{"handler", 200, false, false, nil, true},
		{"upstream", 200, true, false, nil, true},
		{"upstream again", 404, true, true, nil, true},
		{"upgrade", 101, true, true, nil, true},
		{"handler beside an upstream", 200, false, true, nil, false},
		{"upstream is full", 429, true, true, nil, false},
		{"client has left", 499, false, true, nil, false},
		{"upstream fails", 500, true, true, nil, false},
		{"upstream is down", 502, false, false, nil, false},
		{"page of an error route", 200, true, true, errors.New("failed"), false},
	} {
		repl := caddy.NewReplacer()
		if tc.proxied {
			repl.Set(latencyPlaceholder, time.Millisecond)
		}
		if tc.failed != nil {
			repl.Set("http.error", tc.failed)
		}
		r := httptest.NewRequest(http.MethodGet, "/", http.NoBody)
		s := settler{request: r.WithContext(context.WithValue(r.Context(), caddy.ReplacerCtxKey, repl))}
		l := new(Load)
		l.proxied.Store(tc.before)
		if got := s.answers(l, tc.status); got != tc.want {
			t.Errorf("%s: %t, want %t", tc.name, got, tc.want)
		}
		if l.proxied.Load() != (tc.before || tc.proxied) {
			t.Errorf("%s: it does not know whether there is an upstream", tc.name)
		}
	}
}

// TestPlaceOfClient guards for how long a place counts among those of its client: as long as it
// takes room, which is neither while the client's body is awaited nor after two latencies.
func TestPlaceOfClient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const latency = 100 * time.Millisecond
		o := adaptive.Options{Latency: latency, Min: 4, Max: 4}
		l := &Limit{Waiting: &Waiters{Queues: NewQueues()}, MaxDelay: time.Second, Load: &Load{Options: o, Controllers: adaptive.NewControllers(o)}}
		has := func(when string, want int64) {
			t.Helper()
			synctest.Wait()
			l.Waiting.mu.Lock()
			defer l.Waiting.mu.Unlock()
			own, all := (&Entry{Bucket: &Bucket{Limit: l}}).queue(0).slots("")
			if got := l.Waiting.slots; got[own] != want || got[all] != want {
				t.Errorf("%s: %v, want %d", when, got, want)
			}
		}
		send := func() (*place, *http.Request, *io.PipeWriter) {
			body, writer := io.Pipe()
			q := &Request{http: httptest.NewRequest(http.MethodPost, "/", body)}
			p, room := q.acquire(&Entry{Bucket: &Bucket{Limit: l}}, adaptive.Normal, new(outcome.Outcome))
			if !room {
				t.Fatal("no room")
			}
			q.watchBody([]Holding{{place: p}})
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
		for _, p := range []*place{hangs, uploads, quick} {
			p.release(true)
		}
		has("none", 0)
		time.Sleep(10 * latency)
		has("long after", 0)
	})
}

// TestSlowAtMin guards that one line reports an upstream that is slower than the latency with
// as few requests as there may be, with both numbers.
func TestSlowAtMin(t *testing.T) {
	t.Parallel()
	core, logs := observer.New(zap.WarnLevel)
	l := &Limit{Path: "up", Load: &Load{Options: adaptive.Options{Latency: 500 * time.Millisecond, Min: 4, Max: 1000}}}
	l.Reporter.Logger, l.Reporter.Limit = zap.New(core), l.Path
	now := time.Now().Add(-time.Minute)
	c := adaptive.New(l.Load.Options, now)
	var open []*place
	for range 30 { // each takes two seconds, and two a second are turned away
		now = now.Add(2 * time.Second)
		for _, p := range open {
			p.releaseAt(now, true)
		}
		open = open[:0]
		for range 25 {
			if p := (&place{limit: l}); c.Acquire(&p.slot, &adaptive.Request{Class: adaptive.Normal}, now) {
				open = append(open, p)
			}
		}
	}
	if v := c.State(now).Verdict; v != adaptive.Slow {
		t.Errorf("the verdict is %v", v)
	}
	if logs.Len() != 1 {
		t.Fatalf("%d lines, want 1", logs.Len())
	}
	fields := logs.All()[0].ContextMap()
	if fields["limit"] != "up" || fields["latency"] != 500*time.Millisecond || fields["mean"] == "no answers" {
		t.Errorf("the line has %v", fields)
	}
}
