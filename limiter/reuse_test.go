package limiter

import (
	"errors"
	"net"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/redistest"
)

// pooled returns the questions that the next requests would use, and takes them
// away.
func pooled() map[*question]bool {
	all := make(map[*question]bool)
	for {
		q := questions.Get().(*question)
		if q.script == nil {
			return all // a new one: there are no more
		}
		all[q] = true
	}
}

// TestQuestionsInUse tests that no request uses a question again that a queue, or
// an answer which comes too late, may still touch: neither one that was withdrawn
// or given up, nor one that settles units. One that was answered is used again.
func TestQuestionsInUse(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1)) // all see one pool
	node := redistest.Start(t)
	p := redistest.StartProxy(t, node.Addr)
	r, s := newQueued(t, node, func(opt *RedisOptions) {
		opt.Addresses, opt.Fallback, opt.Timeout = []string{p.Addr}, NewMemory(nil), 100*time.Millisecond
	})
	req := Request{Buckets: []Bucket{hourly(1000)}}
	pooled()
	again := 0
	for range 20 {
		mustTake(t, r, req)
		again += len(pooled())
	}
	if again == 0 {
		t.Error("no question is used again, so the test shows nothing")
	}

	// Withdrawn from the queue.
	conn := hold(t, s)
	var waits *question
	done := make(chan struct{})
	go func() {
		defer close(done)
		mustTake(t, r, req)
	}()
	waitFor(t, time.Second, func() error {
		s.queue.mu.Lock()
		defer s.queue.mu.Unlock()
		if len(s.queue.waiting) == 0 {
			return errors.New("nothing waits")
		}
		waits = s.queue.waiting[0]
		return nil
	})
	<-done
	if pooled()[waits] {
		t.Error("one that was withdrawn is used again")
	}

	// Given up on its way: it is sent, and answered when nobody waits any more.
	s.queue.mu.Lock()
	s.queue.carried = crowd // so that it does not go by itself
	s.queue.mu.Unlock()
	late := make(chan *question, 1)
	tell := s.tell.late
	s.tell.late = func(from *server, q *question) {
		tell(from, q)
		late <- q
	}
	s.put(conn)
	p.Delay(r.timeout * 3 / 2)
	s.timeout = time.Second // of the connection
	mustTake(t, r, req)
	after := pooled()
	select {
	case q := <-late:
		if after[q] || pooled()[q] {
			t.Error("one that was given up is used again")
		}
	case <-time.After(5 * time.Second):
		t.Error("there was no late answer")
	}
	p.Pass()
	atRest(t, s)

	for _, what := range []byte{whatCommit, whatRelease} {
		q := r.question(req, whatHold)
		_, held, err := r.ask(within(5*time.Second), req, q, nil)
		if err != nil {
			t.Fatal(err)
		}
		r.fallback.answered(q, held, true)
		r.settleOn(s, q, what, held)
		key := r.keys.of(&req.Buckets[0])
		waitFor(t, 5*time.Second, func() error { return unsettled(t, node, key) })
		atRest(t, s)
		if pooled()[q] {
			t.Errorf("one that settles, %d, is used again", what)
		}
	}
}

// TestSenderDoesNotSpin tests what a sender does for requests that wait while there
// is no connection: it tries now and then, and does not keep a CPU busy.
func TestSenderDoesNotSpin(t *testing.T) {
	t.Parallel()
	hangs := tcpServer(t, func(c *net.TCPConn) {
		defer c.Close()
		_, _ = c.Read(make([]byte, 4096))
		_ = c.SetReadDeadline(time.Now().Add(3 * time.Second))
		_, _ = c.Read(make([]byte, 1))
	})
	refuses, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	refuses.Close()
	server := redistest.Start(t)
	for _, tc := range []struct {
		name, addr string
		inUse      bool
	}{
		{"connections take long", hangs, false},
		{"connections are refused", refuses.Addr().String(), false},
		{"all connections are in use", server.Addr, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			r, s := newQueued(t, server, func(opt *RedisOptions) {
				opt.Addresses, opt.Timeout = []string{tc.addr}, 20*time.Millisecond
			})
			var looks atomic.Int64 // at the clock, several in each attempt
			clock := s.clock
			s.clock = func() time.Duration {
				looks.Add(1)
				return clock()
			}
			if tc.inUse {
				defer s.put(hold(t, s))
			} else {
				r.Connect()
				time.Sleep(2 * r.timeout) // so long that nobody waits for it
			}
			looks.Store(0)
			q := r.question(Request{Buckets: []Bucket{hourly(10)}}, whatRelease)
			s.queue.mu.Lock()
			q.settled = func(error) {}
			s.enqueue(q) // which nobody withdraws
			s.queue.mu.Unlock()
			const whole = 400 * time.Millisecond
			time.Sleep(whole)
			if n := looks.Load(); n > 6*int64(whole/patience) {
				t.Errorf("the clock was looked at %d times", n)
			}
			_ = r.Close()
		})
	}
}
