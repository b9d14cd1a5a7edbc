package redistest

import (
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// WaitFor calls the function until it returns nil, and fails the test with its
// last error if that takes too long.
func WaitFor(t testing.TB, within time.Duration, f func() error) {
	t.Helper()
	for deadline := time.Now().Add(within); ; time.Sleep(5 * time.Millisecond) {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("still after %v: %v", within, err)
		}
	}
}

// Together calls do in n goroutines at once, and waits for all.
func Together(t testing.TB, n int, do func(i int)) {
	t.Helper()
	var ready, done sync.WaitGroup
	start, finished := make(chan struct{}), make(chan struct{})
	ready.Add(n)
	for i := range n {
		done.Go(func() {
			ready.Done()
			<-start
			do(i)
		})
	}
	ready.Wait()
	close(start)
	go func() {
		done.Wait()
		close(finished)
	}()
	select {
	case <-finished:
	case <-time.After(time.Minute):
		buf := make([]byte, 1<<20)
		t.Fatalf("goroutines still busy after a minute:\n%s", buf[:runtime.Stack(buf, true)])
	}
}

// Done ends the test, which may be one of rapid's, if a command has failed.
func Done(t interface {
	Helper()
	Fatal(values ...any)
}, c redis.Cmder) {
	t.Helper()
	if err := c.Err(); err != nil {
		t.Fatal(err)
	}
}
