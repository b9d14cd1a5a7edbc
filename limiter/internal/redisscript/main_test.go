package redisscript

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// longTest is why a test is skipped by go test -short.
const longTest = "takes long: make check runs it"

func TestMain(m *testing.M) {
	logging.Disable() // it would log each failed connection
	os.Exit(m.Run())
}

// counting is the source of the script that tests run. Each key is a counter: a
// call adds a number to each of its keys, unless one of them would exceed its
// limit. The reply has for each key its count n, or -1 - n if it would exceed its
// limit.
const counting = `
if #ARGV == 0 then
  return {}
end
local reply, first = {}, 0
for _, run in ipairs(ARGV) do
  local calls, keys, at = struct.unpack('>HH', run)
  for _ = 1, calls do
    local fits, before, pos = true, {}, at
    for i = 1, keys do
      local add, limit
      add, limit, pos = struct.unpack('>II', run, pos)
      before[i] = tonumber(redis.call('GET', KEYS[first + i]) or 0)
      fits = fits and before[i] + add <= limit
    end
    pos = at
    for i = 1, keys do
      local add, limit
      add, limit, pos = struct.unpack('>II', run, pos)
      local value = before[i]
      if fits then
        value = value + add
        redis.call('SET', KEYS[first + i], value)
      elseif limit == 0 and redis.call('EXISTS', KEYS[first + i]) == 1 then
        redis.call('SET', KEYS[first + i], value) -- a probe
      end
      reply[#reply + 1] = fits and value or -1 - value
    end
    first = first + keys
  end
end
return reply
`

// newCounting returns a Script with the given source, which counts.
func newCounting(source string) *Script {
	s := NewScript(source)
	s.ProbeArg, s.ProbeReplies = argOf(counter{add: 1}), 1
	s.Wrote = func(c *Call) bool {
		if c.Arg == s.ProbeArg {
			return len(c.Reply) == 1 && c.Reply[0] < -1 // otherwise there was nothing to write
		}
		return len(c.Reply) > 0 && c.Reply[0] >= 0
	}
	return s
}

// counter is a key that counts, and what a call adds to it.
type counter struct {
	key   string
	add   int64
	limit int64
}

// upTo returns a counter to which one call adds 1, up to a limit.
func upTo(limit int64) counter { return counter{key: "rl:{k}", add: 1, limit: limit} }

// numbered returns the n-th of many counters that never reach their limit.
func numbered(n int64) counter {
	return counter{key: fmt.Sprintf("rl:{%d}", n), add: 1, limit: 1 << 30}
}

// argOf returns the Arg of a call on some counters.
func argOf(counters ...counter) string {
	arg := binary.BigEndian.AppendUint16([]byte{0, 1}, uint16(len(counters)))
	for _, c := range counters {
		arg = binary.BigEndian.AppendUint32(arg, uint32(c.add))
		arg = binary.BigEndian.AppendUint32(arg, uint32(c.limit))
	}
	return string(arg)
}

// callOf returns a call on some counters.
func callOf(counters ...counter) *Call {
	c := &Call{Arg: argOf(counters...), Replies: len(counters)}
	for _, counter := range counters {
		c.Keys = append(c.Keys, counter.key)
	}
	return c
}

// counted is the result of a call for one counter.
type counted struct {
	n      int64 // its count
	denied bool  // whether nothing was added
}

// testClient is a client whose script counts.
type testClient struct {
	*Client
	timeout time.Duration
	hooks   Hooks
}

// newTestClient returns a client of the given server with plenty of time; change
// may change its options.
func newTestClient(t testing.TB, server *redistest.Server, change func(*Options)) *testClient {
	t.Helper()
	return newHookedClient(t, server, newCounting(counting), Hooks{}, change)
}

// newHookedClient is newTestClient with another script and hooks; nil hooks do
// nothing.
func newHookedClient(t testing.TB, server *redistest.Server, script *Script, hooks Hooks, change func(*Options)) *testClient {
	t.Helper()
	opt := Options{Timeout: 10 * time.Second}
	if server != nil {
		opt.Addresses = []string{server.Addr}
	}
	if change != nil {
		change(&opt)
	}
	if hooks.Sending == nil {
		hooks.Sending = func(*Server, []*Call) {}
	}
	if hooks.Answered == nil {
		hooks.Answered = func(*Call, error, bool) {}
	}
	if hooks.Restarted == nil {
		hooks.Restarted = func(*Server) {}
	}
	c := &testClient{Client: Open(opt, script, hooks), timeout: opt.Timeout, hooks: hooks}
	eventQueues.Store(c.events, nil)
	t.Cleanup(func() {
		c.Close()
		eventQueues.Delete(c.events)
	})
	return c
}

// server returns the one server of c.
func (c *testClient) server() *Server { return c.topology.(*single).server }

// count makes a call on some counters.
func (c *testClient) count(ctx context.Context, counters ...counter) ([]counted, error) {
	call := callOf(counters...)
	end, shortened := time.Now().Add(c.timeout), false
	if sooner, ok := ctx.Deadline(); ok && sooner.Before(end) {
		end, shortened = sooner, true
	}
	if _, err := c.Do(Deadline{end, shortened}, call); err != nil {
		return nil, err
	}
	if len(call.Reply) != len(counters) {
		return nil, fmt.Errorf("reply %d to %d counters", call.Reply, len(counters))
	}
	var all []counted
	for _, n := range call.Reply {
		if n < 0 {
			all = append(all, counted{-1 - n, true})
		} else {
			all = append(all, counted{n, false})
		}
	}
	return all, nil
}

// mustCount makes a call that must be answered.
func mustCount(t testing.TB, c *testClient, counters ...counter) []counted {
	t.Helper()
	all, err := c.count(t.Context(), counters...)
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// stored returns the count of a key as stored on a server.
func stored(t testing.TB, server *redistest.Server, key string) int64 {
	t.Helper()
	n, err := server.Client().Get(t.Context(), key).Int64()
	if err != nil && !errors.Is(err, redis.Nil) {
		t.Fatal(err)
	}
	return n
}

// eventQueues are the event queues of the test clients.
var eventQueues sync.Map

// allReported waits until all events have been reported.
func allReported() {
	eventQueues.Range(func(q, _ any) bool {
		for running := true; running; time.Sleep(time.Microsecond) {
			q := q.(*eventQueue)
			q.mu.Lock()
			running = q.running
			q.mu.Unlock()
		}
		return true
	})
}

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
	allReported()
	e.mu.Lock()
	defer e.mu.Unlock()
	var words []string
	for _, ev := range e.all {
		words = append(words, eventWords(ev))
	}
	e.all = nil
	return words
}

// eventWords returns an event in words.
func eventWords(ev Event) string {
	kind := map[EventKind]string{
		EventDown: "down", EventRecovered: "recovered", EventError: "error", EventReplaced: "replaced", EventReason: "reason",
	}[ev.Kind]
	return strings.TrimSpace(kind + " " + ev.Reason)
}

// connected waits until there is a connection to a server and nothing is in flight
// on it.
func connected(t testing.TB, s *Server) {
	t.Helper()
	s.connect(false)
	redistest.WaitFor(t, 5*time.Second, func() error {
		s.pipeline.mu.Lock()
		defer s.pipeline.mu.Unlock()
		if p := s.pipeline; !p.lostAt.IsZero() || p.writing || p.conn.batches > 0 {
			return errors.New("no connection at rest")
		}
		return nil
	})
}

// hold keeps calls to a server from being sent, until release is called: as if a
// goroutine that is about to send them were late.
func hold(t testing.TB, s *Server) (release func()) {
	t.Helper()
	connected(t, s)
	s.pipeline.mu.Lock()
	defer s.pipeline.mu.Unlock()
	s.pipeline.writing, s.pipeline.due = true, time.Now()
	return func() { go s.pipeline.sendAll() }
}

// waitingAt returns the number of calls that have not been sent to a server.
func waitingAt(s *Server) int {
	s.pipeline.mu.Lock()
	defer s.pipeline.mu.Unlock()
	return len(s.pipeline.open)
}

// gather has n calls wait for being sent to a server, does meanwhile, lets the
// calls go, and returns when all are done.
func gather(t testing.TB, s *Server, n int, take func(i int), meanwhile ...func()) {
	t.Helper()
	release := hold(t, s)
	var all sync.WaitGroup
	defer all.Wait()
	defer release()
	for i := range n {
		all.Go(func() { take(i) })
	}
	redistest.WaitFor(t, 4*time.Second, func() error {
		if waiting := waitingAt(s); waiting < n {
			return fmt.Errorf("%d of %d calls wait", waiting, n)
		}
		return nil
	})
	for _, do := range meanwhile {
		do()
	}
}

// checkError checks that an error is one line that contains each of the given
// strings.
func checkError(t testing.TB, err error, says ...string) {
	t.Helper()
	if err == nil {
		t.Error("no error")
		return
	}
	text := err.Error()
	if strings.ContainsAny(text, "\r\n") || !strings.HasPrefix(text, "redis at ") {
		t.Errorf("error %q, want one line about the Redis", text)
	}
	for _, word := range says {
		if !strings.Contains(text, word) {
			t.Errorf("error %q does not say %q", text, word)
		}
	}
}

// setUser makes a user with the documented permissions, and more.
func setUser(t testing.TB, server *redistest.Server, more ...string) {
	t.Helper()
	server.SetUser(t, append([]string{"+evalsha", "+eval", "+get", "+set", "+exists"}, more...)...)
}

// pick returns one of some values.
func pick[T any](random *rand.Rand, values ...T) T { return values[random.IntN(len(values))] }
