package limiter

import (
	"errors"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter/internal/redisscript"
)

// Tests whose names begin with TestTimed measure how long something takes. They may fail next to
// other load, so they are run by themselves: go test -run '^TestTimed' -parallel 1.

func TestMain(m *testing.M) {
	logging.Disable() // it would log each failed connection
	os.Exit(m.Run())
}

// longTest is why a test is skipped by go test -short.
const longTest = "takes long: make check runs it"

// manyFailures is more than enough failures in a row to open a breaker.
const manyFailures = 10

// events collects reported events.
type events struct {
	mu  sync.Mutex
	all []Event
}

func (e *events) report(ev Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.all = append(e.all, ev)
}

// take returns the events since its last call, in words such as "down oom",
// "recovered" and "error pool".
func (e *events) take() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	var words []string
	for _, ev := range e.all {
		kind := map[EventKind]string{EventDown: "down", EventRecovered: "recovered", EventError: "error", EventReplaced: "replaced", EventReason: "reason"}[ev.Kind]
		words = append(words, strings.TrimSpace(kind+" "+ev.Reason))
	}
	e.all = nil
	return words
}

// check checks the events since the last call. Reports are asynchronous, so it
// waits a moment for them.
func (e *events) check(t testing.TB, want ...string) {
	t.Helper()
	var got []string
	for deadline := time.Now().Add(2 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		if got = append(got, e.take()...); len(got) >= len(want) && len(got) > 0 || time.Now().After(deadline) {
			break
		}
		if len(want) == 0 && time.Until(deadline) < 2*time.Second-20*time.Millisecond {
			break
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("reported %q, want %q", got, want)
	}
}

// reasonOf returns the reason of an error as one word.
func reasonOf(t testing.TB, err error) string {
	t.Helper()
	var f *redisscript.ServerError
	if !errors.As(err, &f) {
		t.Fatalf("error %v tells of no failure", err)
	}
	return f.Reason()
}

// callsOf returns the calls of queries.
func callsOf(queries ...*query) []*redisscript.Call {
	var calls []*redisscript.Call
	for _, q := range queries {
		q.Owner = q
		calls = append(calls, &q.Call)
	}
	return calls
}

// filled returns how many of the keys hold something: one that was removed may exist
// for another millisecond, with an empty value.
func filled(t testing.TB, server *redistest.Server, keys ...string) (n int) {
	t.Helper()
	for _, key := range keys {
		value, err := server.Client().Get(t.Context(), key).Result()
		if !errors.Is(err, redis.Nil) && (err != nil || value != "") {
			n++
		}
	}
	return n
}

// inTime returns a context with plenty of time for a call.
func inTime() redisscript.Deadline { return redisscript.Deadline{At: time.Now().Add(10 * time.Second)} }

// clockAt returns a clock that has stopped at the given time, in µs.
func clockAt(now int64) func() time.Duration {
	return func() time.Duration { return time.Duration(now) * time.Microsecond }
}
