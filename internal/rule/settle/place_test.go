package settle

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/adaptive"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/faults"
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

// TestSlowAtMin guards that one line reports an upstream that is slower than the latency with
// as few requests as there may be, with both numbers.
func TestSlowAtMin(t *testing.T) {
	t.Parallel()
	core, logs := observer.New(zap.WarnLevel)
	l := &Load{Options: adaptive.Options{Latency: 500 * time.Millisecond, Min: 4, Max: 1000}, Reporter: &faults.Reporter{Logger: zap.New(core), Limit: "up"}}
	now := time.Now().Add(-time.Minute)
	c := adaptive.New(l.Options, now)
	var open []*Place
	for range 30 { // each takes two seconds, and two a second are turned away
		now = now.Add(2 * time.Second)
		for _, p := range open {
			p.releaseAt(now, true)
		}
		open = open[:0]
		for range 25 {
			if p := (&Place{Load: l}); c.Acquire(&p.Slot, &adaptive.Request{Class: adaptive.Normal}, now) {
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
