package redisscript

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// TestEventsInOrder guards that events are reported in order, and that of too many
// the oldest are dropped and counted.
func TestEventsInOrder(t *testing.T) {
	for _, n := range []int{1, maxQueuedEvents, maxQueuedEvents + 1, 3 * maxQueuedEvents} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			begun, resume := make(chan struct{}), make(chan struct{})
			reported := make(chan Event, 4*maxQueuedEvents)
			r := newEventQueue(func(e Event) {
				if e.Server == "0" {
					close(begun)
					<-resume
				}
				reported <- e
			})
			r.add(Event{Server: "0"})
			<-begun
			for i := range n {
				r.add(Event{Server: fmt.Sprint(i + 1)})
			}
			close(resume)
			<-reported
			dropped := max(n-maxQueuedEvents, 0)
			for i := dropped; i < n; i++ {
				want := Event{Server: fmt.Sprint(i + 1)}
				if i == dropped {
					want.Dropped = dropped
				}
				if got := <-reported; got != want {
					t.Errorf("reported %+v, want %+v", got, want)
				}
			}
		})
	}
}

// TestBlockedReport guards that calls return in time, and the client closes at
// once, while a report never returns.
func TestBlockedReport(t *testing.T) {
	server := redistest.Start(t)
	stuck := make(chan struct{})
	resume := sync.OnceFunc(func() { close(stuck) })
	var calls events
	r := newTestClient(t, server, func(opt *Options) {
		opt.Report = func(e Event) {
			calls.report(e)
			<-stuck
		}
	})
	t.Cleanup(resume)
	mustCount(t, r, upTo(100_000))
	server.Kill()
	var took struct {
		sync.Mutex
		all []time.Duration
	}
	call := func() {
		var asks sync.WaitGroup
		for range 16 {
			asks.Go(func() {
				for range 5 {
					began := time.Now()
					_, _ = r.count(context.Background(), upTo(100_000)) // may fail, but not hang
					took.Lock()
					took.all = append(took.all, time.Since(began))
					took.Unlock()
				}
			})
		}
		all := make(chan struct{})
		go func() { asks.Wait(); close(all) }()
		select {
		case <-all:
		case <-time.After(10 * time.Second):
			t.Fatal("requests wait for the report")
		}
	}
	call()
	server.Restart(t)
	call()
	if longest := slices.Max(took.all); longest > r.timeout+time.Second {
		t.Errorf("a request took %v", longest)
	}
	closed := make(chan error, 1)
	go func() { closed <- r.Close() }()
	select {
	case err := <-closed:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("Close waits for the report")
	}
	resume()
	redistest.WaitFor(t, 5*time.Second, func() error {
		r.events.mu.Lock()
		defer r.events.mu.Unlock()
		if r.events.running || len(r.events.queue) > 0 {
			return fmt.Errorf("there is still something to report")
		}
		return nil
	})
	if got := calls.take(); len(got) != 1 {
		t.Errorf("reported %q, want the first only", got)
	}
}
