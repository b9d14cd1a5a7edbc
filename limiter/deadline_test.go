package limiter

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// TestPassedDeadline guards that a request with no time left to ask Redis is
// decided without it, and that this is not a failure of Redis.
func TestPassedDeadline(t *testing.T) {
	server := redistest.Start(t)
	var events []Event
	r := newTestRedis(t, server, func(opt *RedisOptions) {
		opt.Report = func(e Event) { events = append(events, e) }
	})
	req := Request{Buckets: []Bucket{hourly(100)}}
	take := func(ctx context.Context) error {
		_, err := r.Take(ctx, req, nil)
		return err
	}
	if err := take(t.Context()); err != nil {
		t.Fatal(err)
	}
	asked := redistest.CommandCounter{Server: server}
	asked.Since(t, "evalsha")
	passed, cancel := context.WithDeadline(t.Context(), time.Now().Add(-time.Second))
	defer cancel()
	for range 20 {
		if err := take(passed); !errors.Is(err, ErrUnavailable) {
			t.Fatalf("got %v, want ErrUnavailable", err)
		}
	}
	asked.Check(t, "evalsha", 0)
	if err := take(t.Context()); err != nil {
		t.Errorf("a request that has time got %v", err)
	}
	asked.Check(t, "evalsha", 1)
	if len(events) > 0 {
		t.Errorf("got events %v, want none", events)
	}
}
