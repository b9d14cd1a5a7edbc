package pace

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// TestWhatIsRemembered guards what a queue knows of the clients that had turns: all that are ahead of the others, or
// behind by less than the credit, and few more, so that the memory does not grow with those that ever came.
func TestWhatIsRemembered(t *testing.T) {
	q := &queue{last: make(map[string]int64), most: leastClients}
	for i := range int64(10_000) {
		q.now = i * 100
		q.note(fmt.Sprint(i), q.now+50, 1000)
	}
	if n := len(q.last); n > 100 {
		t.Errorf("%d clients are known", n)
	}
	for i := range int64(9) {
		if _, ok := q.last[fmt.Sprint(9999-i)]; !ok {
			t.Errorf("a client is forgotten that was served %d ago", 100*i-50)
		}
	}
}

// TestTurnsElsewhere guards that a client's bytes count in the queue of a bucket that had room for them, while they
// waited for another, if others wait there; and that a response which is let go or leaves takes a new place then.
func TestTurnsElsewhere(t *testing.T) {
	q := &queue{last: map[string]int64{"a": 500}, most: leastClients, now: 400}
	w := &waiter{client: "a", index: -1}
	q.length.Store(1)
	q.count(w, 100, 50)
	w.bytes, w.entered = 30, true // and now its place is known
	q.count(w, 30, 50)
	if got, want := q.last, map[string]int64{"a": 600}; !maps.Equal(got, want) || w.entered {
		t.Errorf("got %v, want %v", got, want)
	}
	w.entered = true
	q.forget(w)
	if got, want := q.last, map[string]int64{"a": 570}; !maps.Equal(got, want) || w.entered {
		t.Errorf("got %v after it has left, want %v", got, want)
	}
	q.length.Store(0)
	w.entered = true
	if q.count(w, 100, 50); w.entered {
		t.Error("its place is kept where nobody waits")
	}
	if q.remove(w) {
		t.Error("what does not wait is removed")
	}
}

// TestFirstLeaves guards that the next one has its turn as soon as there is room for it when the first leaves, and
// that a response which is alone then is sent in long pieces again.
func TestFirstLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSpeed(t, limiter.NewMemory(), "s", numbers{1000, LeastSize})
		_, _ = s.send(pacedBy(t.Context(), "", s), LeastSize, LeastSize)
		var all sync.WaitGroup
		ctx, leave := context.WithCancel(t.Context())
		all.Go(func() { _, _ = s.send(pacedBy(ctx, "a", s), 2000, 2000) })
		synctest.Wait()
		start := time.Now()
		all.Go(func() { // behind it
			p := pacedBy(t.Context(), "a", s)
			_, _ = s.send(p, 300, 300)
			if took := time.Since(start); took != 500*time.Millisecond {
				t.Errorf("the next one waited %v, want as long as the first", took)
			}
			if n := p.limits[0].queue.length.Load(); n != 0 {
				t.Errorf("%d responses are said to wait", n)
			}
		})
		time.Sleep(500 * time.Millisecond)
		leave()
		all.Wait()
	})
}

// TestAbsence guards that a client which took less than its share has no more than the others later.
func TestAbsence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSpeed(t, limiter.NewMemory(), "s", numbers{100_000, LeastSize})
		ctx, cancel := context.WithTimeout(t.Context(), 12*time.Second)
		defer cancel()
		var all sync.WaitGroup
		for range 3 {
			all.Go(func() { _, _ = s.send(pacedBy(ctx, "b", s), 1<<30, 50_000) })
		}
		time.Sleep(time.Second)
		_, _ = s.send(pacedBy(ctx, "a", s), 5000, 5000)
		time.Sleep(9 * time.Second)
		before := s.of("b", time.Hour)
		all.Go(func() { _, _ = s.send(pacedBy(ctx, "a", s), 1<<30, 50_000) })
		time.Sleep(time.Second)
		if got := s.of("b", time.Hour) - before; got < 40_000 || got > 60_000 {
			t.Errorf("the others got %d bytes of 100000", got)
		}
		cancel()
		all.Wait()
	})
}

// TestPiecesOfMany guards that pieces are short while many wait, so that all have turns soon.
func TestPiecesOfMany(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSpeed(t, limiter.NewMemory(), "s", numbers{1_000_000, 200_000})
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		var all sync.WaitGroup
		for range 20 {
			all.Go(func() { _, _ = s.send(pacedBy(ctx, "", s), 1<<30, 50_000) })
		}
		all.Wait()
		for _, e := range s.sent {
			if e.at > time.Second && e.n > 2*leastPiece {
				t.Fatalf("a piece has %d bytes while 19 others wait", e.n)
			}
		}
	})
}
