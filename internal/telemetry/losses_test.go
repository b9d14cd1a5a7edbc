package telemetry

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// lossesTest is a process whose configs have stores with servers in states that the test sets.
type lossesTest struct {
	*Process
	now    time.Time
	logs   *observer.ObservedLogs
	stores map[string]*limiter.Redis
	states map[*limiter.Redis][]limiter.ServerStats
}

func newLossesTest() *lossesTest {
	l := &lossesTest{now: time.Unix(1000, 0), stores: make(map[string]*limiter.Redis), states: make(map[*limiter.Redis][]limiter.ServerStats)}
	l.Process = New(Options{Now: func() time.Time { return l.now }})
	l.ServerStats = func(store *limiter.Redis) []limiter.ServerStats { return l.states[store] }
	return l
}

// store returns the store of a name.
func (l *lossesTest) store(name string) *limiter.Redis {
	if l.stores[name] == nil {
		l.stores[name] = new(limiter.Redis)
	}
	return l.stores[name]
}

// are sets the state of the servers of a store.
func (l *lossesTest) are(store, state string, servers ...string) {
	var all []limiter.ServerStats
	for _, server := range servers {
		s := limiter.ServerStats{Address: server, State: state, Breaker: "closed"}
		if state == limiter.ServerDown {
			s.Breaker, s.Reason, s.Err, s.DownSince = "open", "refused", errors.New("no"), l.now
		}
		all = append(all, s)
	}
	l.states[l.store(store)] = all
}

// use replaces the config by one with a store; "" is one without Redis, and "none" no config.
func (l *lossesTest) use(store string) {
	core, logs := observer.New(zap.DebugLevel)
	c := &running{Config: &Config{Logger: zap.New(core)}}
	if store != "" {
		c.Redis = l.store(store)
	}
	l.logs, l.configs = logs, []*running{c}
	if store == "none" {
		l.configs = nil
	}
	l.follow()
}

// is has a store report a server.
func (l *lossesTest) is(store string, kind limiter.EventKind, server, reason string) {
	e := limiter.Event{Server: server, Kind: kind, Reason: reason}
	if reason != "" {
		e.Err = errors.New("no")
	}
	l.Redis(l.store(store), e)
}

// told returns what was logged and emitted since the last call.
func (l *lossesTest) told() (told []string) {
	for _, line := range l.logs.TakeAll() {
		fields := line.ContextMap()
		text := fmt.Sprint(line.Message, ": ", fields["server"])
		if down, ok := fields["down"]; ok {
			text += fmt.Sprint(" after ", down)
		}
		told = append(told, text)
	}
	for len(l.events.queue) > 0 {
		e := <-l.events.queue
		told = append(told, fmt.Sprint(e.name, " ", e.data["server"]))
	}
	return told
}

// TestLossesOutliveStores guards that the loss of a server is reported once, and its return once,
// whichever stores a reload opens and closes meanwhile: each with a line and an event; and that
// a store says nothing once another one is in use.
func TestLossesOutliveStores(t *testing.T) {
	const (
		lost   = "redis unavailable, applying on_error: "
		still  = "redis still unavailable: "
		back   = "redis recovered: "
		unused = "redis server that was unavailable is no longer used: "
	)
	for name, tc := range map[string]struct {
		then func(l *lossesTest) // after the first store has lost a:1
		want []string
	}{
		"the store finds it again": {func(l *lossesTest) {
			l.is("first", limiter.EventRecovered, "a:1", "")
		}, []string{back + "a:1 after 1m0s", "rate_limit_redis_back a:1"}},
		"a reload mends it": {func(l *lossesTest) {
			l.are("second", limiter.ServerConnecting, "a:1")
			l.use("second")
			l.lookForReturns() // not yet
			l.are("second", limiter.ServerUp, "a:1")
			l.now = l.now.Add(time.Minute)
			l.lookForReturns()
			l.lookForReturns()
		}, []string{back + "a:1 after 2m0s", "rate_limit_redis_back a:1"}},
		"a reload does not mend it, another does": {func(l *lossesTest) {
			l.are("second", limiter.ServerConnecting, "a:1")
			l.use("second")
			l.is("second", limiter.EventDown, "a:1", "wrongpass")
			l.are("third", limiter.ServerUp, "a:1")
			second := l.logs
			l.use("third")
			l.lookForReturns()
			if got := second.Len(); got != 1 {
				panic(fmt.Sprint("the config that does not mend it logs ", second.All()))
			}
		}, []string{back + "a:1 after 1m0s", "rate_limit_redis_back a:1"}},
		"a reload does not mend it, but time does": {func(l *lossesTest) {
			l.are("second", limiter.ServerConnecting, "a:1")
			l.use("second")
			l.is("second", limiter.EventDown, "a:1", "wrongpass")
			l.is("second", limiter.EventRecovered, "a:1", "")
		}, []string{still + "a:1 after 1m0s", back + "a:1 after 1m0s", "rate_limit_redis_back a:1"}},
		"another server": {func(l *lossesTest) {
			l.are("second", limiter.ServerConnecting, "b:1")
			l.use("second")
			l.is("first", limiter.EventReason, "a:1", "timeout")
			l.is("first", limiter.EventError, "a:1", "closed")
			l.is("first", limiter.EventRecovered, "a:1", "")
		}, []string{unused + "a:1 after 1m0s", "rate_limit_redis_back a:1"}},
		"no Redis": {func(l *lossesTest) { l.use("") }, []string{unused + "a:1 after 1m0s", "rate_limit_redis_back a:1"}},
		"a cluster, whose servers are then known": {func(l *lossesTest) {
			l.are("second", limiter.ServerConnecting, "a:1")
			l.use("second")
			l.are("second", limiter.ServerUp, "b:1", "b:2")
			l.lookForReturns()
		}, []string{back + "a:1 after 1m0s", "rate_limit_redis_back a:1"}},
		"a cluster, of which it is a server that is still down": {func(l *lossesTest) {
			l.are("second", limiter.ServerConnecting, "a:1, b:1")
			l.states[l.store("second")][0].Cluster = true
			l.use("second")
			l.lookForReturns()
			l.are("second", limiter.ServerConnecting, "a:1", "b:1")
			l.lookForReturns()
			l.is("second", limiter.EventDown, "a:1", "refused")
			l.lookForReturns()
			l.is("second", limiter.EventRecovered, "a:1", "")
		}, []string{still + "a:1 after 1m0s", back + "a:1 after 1m0s", "rate_limit_redis_back a:1"}},
		"a cluster, of which it is a server that is up": {func(l *lossesTest) {
			l.are("second", limiter.ServerConnecting, "b:1")
			l.states[l.store("second")][0].Cluster = true
			l.use("second")
			l.are("second", limiter.ServerUp, "a:1", "b:1")
			l.lookForReturns()
		}, []string{back + "a:1 after 1m0s", "rate_limit_redis_back a:1"}},
		"a cluster, of which it is none": {func(l *lossesTest) {
			l.are("second", limiter.ServerConnecting, "b:1")
			l.states[l.store("second")][0].Cluster = true
			l.use("second")
			l.lookForReturns()
			l.are("second", limiter.ServerUp, "b:1", "c:1")
			l.lookForReturns()
		}, []string{unused + "a:1 after 1m0s", "rate_limit_redis_back a:1"}},
		"no config": {func(l *lossesTest) {
			l.use("none")
			l.is("first", limiter.EventRecovered, "a:1", "")
			l.are("second", limiter.ServerUp, "a:1")
			l.use("second")
			l.lookForReturns()
		}, nil},
		"a reload that fails after it has found it": {func(l *lossesTest) {
			l.are("first", limiter.ServerDown, "a:1")
			l.are("second", limiter.ServerUp, "a:1")
			l.use("second")
			l.lookForReturns()
			_ = l.told()
			l.use("first")
		}, []string{lost + "a:1", "rate_limit_redis_lost a:1"}},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLossesTest()
			l.are("first", limiter.ServerConnecting, "a:1")
			l.use("first")
			l.is("second", limiter.EventDown, "a:1", "refused") // of no config
			l.is("first", limiter.EventDown, "a:1", "refused")
			if got, want := l.told(), []string{lost + "a:1", "rate_limit_redis_lost a:1"}; !slices.Equal(got, want) {
				t.Fatalf("at first it told %q, want %q", got, want)
			}
			l.now = l.now.Add(time.Minute)
			tc.then(l)
			if got := l.told(); !slices.Equal(got, tc.want) {
				t.Errorf("told %q, want %q", got, tc.want)
			}
		})
	}
}

// TestLossBeforeStart guards that a server which was lost before the config has started, by
// requests that came first, is reported with its error.
func TestLossBeforeStart(t *testing.T) {
	l := newLossesTest()
	l.are("first", limiter.ServerDown, "a:1")
	l.is("first", limiter.EventDown, "a:1", "refused")
	l.use("first")
	all := l.logs.All()
	if len(all) != 1 || all[0].ContextMap()["error"] != "no" || all[0].ContextMap()["reason"] != "refused" {
		t.Errorf("logged %v", all)
	}
}
