package redisscript

import (
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// testBreaker is a breaker on a clock that the test sets.
type testBreaker struct {
	breaker
	events
	t   testing.TB
	now time.Time
}

func newTestBreaker(t testing.TB) *testBreaker {
	g := &testBreaker{t: t, now: time.Unix(1_790_000_000, 0)}
	g.breaker = newBreaker("redis.test:6379", g.events.report)
	g.breaker.now = func() time.Time { return g.now }
	return g
}

// fail makes n calls fail for the given reason.
func (g *testBreaker) fail(n int, reason string) (opened bool) {
	for range n {
		known, ok := replies[strings.ToUpper(reason)]
		if !ok {
			known = ServerError{reason: reason, counts: reason != "pool"}
		}
		opened = g.failure(&known)
	}
	return opened
}

// check checks whether the breaker is open, and the events since the last call.
func (g *testBreaker) check(open bool, events ...string) {
	g.t.Helper()
	probe, err := g.allow()
	if probe {
		g.endProbe()
		g.t.Error("a probe is let through")
	} else if open != (err == nil) {
		g.t.Errorf("let through: %t, error %v", err == nil, err)
	}
	if got := g.take(); !slices.Equal(got, events) {
		g.t.Errorf("reported %q, want %q", got, events)
	}
}

// probe moves the clock to the next probe and checks that it is allowed.
func (g *testBreaker) probe() {
	g.t.Helper()
	g.now = g.now.Add(probeEvery * 6 / 5)
	if probe, err := g.allow(); !probe || err != nil {
		g.t.Fatalf("probe %t, error %v", probe, err)
	}
}

// TestBreakerOpens guards what opens a breaker: a number of failures in a row that
// do not come by chance, but no failure that says nothing about the next call.
func TestBreakerOpens(t *testing.T) {
	t.Run("five in a row", func(t *testing.T) {
		g := newTestBreaker(t)
		if g.fail(4, "timeout") {
			t.Error("down by the fourth failure")
		}
		g.check(true)
		if !g.fail(1, "refused") {
			t.Error("not opened by the fifth failure")
		}
		if g.fail(3, "timeout") {
			t.Error("down again while it is")
		}
		g.check(false, "down refused")
		if _, err := g.allow(); failureOf(t, err).reason != "timeout" {
			t.Errorf("error %v, want the last", err)
		}
	})
	t.Run("one that lasts", func(t *testing.T) {
		for _, reason := range []string{"noauth", "wrongpass", "noperm"} {
			g := newTestBreaker(t)
			if !g.fail(1, reason) {
				t.Errorf("not opened by %s", reason)
			}
			g.check(false, "down "+reason)
		}
	})
	t.Run("a right that some calls lack", func(t *testing.T) {
		g := newTestBreaker(t)
		g.success(true)
		if g.fail(4, "noperm") {
			t.Error("down, though the server takes other calls")
		}
		g.check(true)
	})
	t.Run("a success between", func(t *testing.T) {
		g := newTestBreaker(t)
		for n := range 10 {
			g.fail(4, "timeout")
			g.success(false)
			want := []string{"error timeout"}
			if n > 0 {
				want = nil
			}
			g.check(true, want...)
		}
	})
	t.Run("uncounted", func(t *testing.T) {
		g := newTestBreaker(t)
		g.fail(4, "timeout")
		g.fail(100, "clusterdown")
		g.fail(100, "pool")
		g.fail(100, "moved")
		g.check(true, "error clusterdown", "error pool", "error moved")
		if !g.fail(1, "timeout") {
			t.Error("not opened by the fifth failure that counts")
		}
		g.check(false, "down timeout")
	})
}

// TestBreakerProbes guards how a server that is down is probed: by one call at a
// time, not more often than probeEvery, and not in step with other processes.
func TestBreakerProbes(t *testing.T) {
	g := newTestBreaker(t)
	g.fail(5, "timeout")
	var gaps []time.Duration
	last := g.now
	for range 40_000 {
		g.now = g.now.Add(time.Millisecond)
		probe, err := g.allow()
		if probe != (err == nil) {
			t.Fatalf("probe %t, error %v", probe, err)
		}
		if !probe {
			continue
		}
		if again, err := g.allow(); again || err == nil {
			t.Fatalf("two probes at once: probe %t, error %v", again, err)
		}
		gaps = append(gaps, g.now.Sub(last))
		last = g.now
		g.fail(1, "timeout")
		g.endProbe()
	}
	slices.Sort(gaps)
	least, most := gaps[0], gaps[len(gaps)-1]
	if least < probeEvery*4/5 || most > probeEvery*6/5+time.Millisecond {
		t.Errorf("%v to %v between probes", least, most)
	}
	if most-least < probeEvery/5 {
		t.Errorf("%v to %v between probes: in step", least, most)
	}

	// However long a probe takes, it is the only one.
	g.probe()
	g.take()
	for range 100 {
		g.now = g.now.Add(time.Second)
		g.check(false)
	}
	g.endProbe()
	g.probe()
	g.endProbe()

	// There is a new connection: the next probe is due at once.
	g.probeNow()
	if probe, err := g.allow(); !probe || err != nil {
		t.Errorf("with a new connection: probe %t, error %v", probe, err)
	}
	g.probeNow()
	if probe, err := g.allow(); probe || err == nil {
		t.Errorf("two probes at once: probe %t, error %v", probe, err)
	}
	g.endProbe()
}

// TestBreakerCloses guards that the first success ends an outage, whichever call
// it is, and that each outage is reported once when it starts and once when it
// ends.
func TestBreakerCloses(t *testing.T) {
	g := newTestBreaker(t)
	for n := range 3 {
		g.fail(5, "timeout")
		g.fail(20, "refused")
		want := []string{"down timeout", "reason refused"}
		if n > 0 { // less than a minute later
			want = want[:1]
		}
		g.check(false, want...)
		g.now = g.now.Add(7 * time.Second)
		if n < 2 {
			g.probe()
			g.success(false)
			g.endProbe()
		} else {
			g.success(false) // it was in flight when the server went down
		}
		back := g.all[0]
		down := 7 * time.Second
		if n < 2 {
			down += probeEvery * 6 / 5
		}
		if back.Downtime != down || back.Server != "redis.test:6379" || back.Reason != "" || back.Err != nil {
			t.Errorf("reported %+v, want %v", back, down)
		}
		g.check(true, "recovered")
		if g.fail(4, "timeout") {
			t.Error("down by the fourth failure after an outage")
		}
		g.check(true)
		g.success(false)
		g.take()
		g.check(true)
	}
}

// TestBreakerDoesNotHoldOffReplicas tests a name that keeps leading to a replica, as
// sentinels may give it out for some seconds of a failover: however often that
// happens, the server is probed as often as any other.
func TestBreakerDoesNotHoldOffReplicas(t *testing.T) {
	g := newTestBreaker(t)
	for range 10 {
		g.fail(openAfter, "readonly")
		g.check(false, "down readonly")
		g.probe()
		g.success(true)
		g.endProbe()
		g.check(true, "recovered")
	}
}

// TestBreakerWaitsForWrite guards outages of a server that still answers reads: a
// reply that has written nothing does not end them, nor does a single one that
// has.
func TestBreakerWaitsForWrite(t *testing.T) {
	for _, reason := range []string{"oom", "misconf", "noreplicas", "readonly"} {
		t.Run(reason, func(t *testing.T) {
			g := newTestBreaker(t)
			for range 4 {
				g.fail(1, reason)
				g.success(false)
			}
			g.check(true)
			g.fail(1, reason)
			g.check(false, "down "+reason)
			g.success(false)
			g.check(false)
			g.probe()
			g.success(false)
			g.endProbe()
			g.check(false)
			proofs := provingWrites
			if reason == "readonly" { // after a failover it is another server
				proofs = 1
			} else {
				g.success(true) // it was in flight when the server went down
				g.check(false)
			}
			g.probe()
			for n := range proofs {
				if n > 0 { // the next probe is due at once
					if probe, err := g.allow(); !probe || err != nil {
						t.Fatalf("probe %t, error %v", probe, err)
					}
				}
				g.success(true)
				g.endProbe()
			}
			g.check(true, "recovered")

			g.fail(4, reason)
			g.success(true)
			g.check(true, "error "+reason)
		})
	}
}

// TestBreakerReportsReasons guards that it is reported why a server stays down, if that
// changes: once it has lasted, at most once a minute, and not each time that a server has
// one reason and then the other.
func TestBreakerReportsReasons(t *testing.T) {
	type step struct {
		n      int
		reason string
		after  time.Duration
		report string
	}
	for name, steps := range map[string][]step{
		"another reason":  {{4, "tls", 0, ""}, {1, "tls", 0, "reason tls"}, {1000, "tls", time.Hour, ""}},
		"the same reason": {{1000, "refused", 0, ""}, {1000, "refused", time.Hour, ""}},
		"one that ends":   {{4, "busy", 0, ""}, {1, "refused", 0, ""}, {4, "busy", 0, ""}, {1, "refused", 0, ""}},
		"back again":      {{5, "tls", 0, "reason tls"}, {100, "refused", 59 * time.Second, ""}, {1, "refused", time.Second, "reason refused"}},
		"many":            {{5, "tls", 0, "reason tls"}, {5, "busy", time.Second, ""}, {5, "oom", time.Second, ""}, {5, "loading", time.Minute, "reason loading"}},
	} {
		t.Run(name, func(t *testing.T) {
			g := newTestBreaker(t)
			g.fail(openAfter, "refused")
			g.check(false, "down refused")
			for i, s := range steps {
				g.now = g.now.Add(s.after)
				g.fail(s.n, s.reason)
				var want []string
				if s.report != "" {
					want = []string{s.report}
				}
				if got := g.take(); !slices.Equal(got, want) {
					t.Errorf("step %d: reported %q, want %q", i, got, want)
				}
			}
		})
	}
}

// TestBreakerReportsErrorsOncePerMinute guards that single failures are reported
// at most once a minute for each reason, however many there are.
func TestBreakerReportsErrorsOncePerMinute(t *testing.T) {
	g := newTestBreaker(t)
	began := g.now
	reported := map[string][]time.Duration{}
	for range 4 * 60 {
		g.fail(50, "pool")
		g.fail(4, "timeout")
		g.success(true)
		for _, event := range g.take() {
			reported[event] = append(reported[event], g.now.Sub(began))
		}
		g.now = g.now.Add(time.Second)
	}
	want := []time.Duration{0, time.Minute, 2 * time.Minute, 3 * time.Minute}
	for _, event := range []string{"error pool", "error timeout"} {
		if !slices.Equal(reported[event], want) {
			t.Errorf("%s reported at %v, want %v", event, reported[event], want)
		}
	}
	if len(reported) != 2 {
		t.Errorf("reported %v", reported)
	}
}

// TestBreakerConcurrently sends random failures and successes of many concurrent
// calls to a breaker: it reports one outage after the other.
func TestBreakerConcurrently(t *testing.T) {
	var seen events
	var ms atomic.Int64
	g := newBreaker("redis.test:6379", seen.report)
	g.now = func() time.Time { return time.UnixMilli(ms.Add(1)) }
	redistest.Together(t, 16, func(i int) {
		random := rand.New(rand.NewPCG(7, uint64(i)))
		timeout, oom := ServerError{reason: "timeout", counts: true}, replies["OOM"]
		for range 3000 {
			probe, err := g.allow()
			switch n := random.IntN(20); {
			case err != nil && n < 19:
			case n < 12:
				g.failure(&timeout)
			case n < 14:
				g.failure(&oom)
			case n < 15:
				g.probeNow()
			default:
				g.success(n%2 == 0)
			}
			if probe {
				g.endProbe()
			}
		}
	})
	for range provingWrites {
		ms.Add(2 * maxHold.Milliseconds())
		probe, _ := g.allow()
		g.success(true)
		if probe {
			g.endProbe()
		}
	}
	if probe, err := g.allow(); probe || err != nil {
		t.Errorf("after successes: probe %t, error %v", probe, err)
	}
	down, outages := false, 0
	for _, ev := range seen.all {
		if ev.Kind == EventError || ev.Kind == EventReason {
			continue
		}
		if (ev.Kind == EventDown) == down {
			t.Fatalf("reported %s, down %t", eventWords(ev), down)
		}
		if down = ev.Kind == EventDown; down {
			outages++
		}
	}
	if down || outages < 10 {
		t.Errorf("%d outages, down %t in the end", outages, down)
	}
}

// TestBreakerNeedsProofsInARow guards that after a failure between probes that
// write, a server that was out of memory has to prove again that it accepts
// writes.
func TestBreakerNeedsProofsInARow(t *testing.T) {
	g := newTestBreaker(t)
	g.fail(openAfter, "oom")
	g.check(false, "down oom")
	for range 3 {
		g.probe()
		for range provingWrites - 1 {
			g.success(true)
			g.endProbe()
			if probe, err := g.allow(); !probe {
				t.Fatalf("no further probe: %v", err)
			}
		}
		g.fail(1, "oom")
		g.endProbe()
		g.check(false)
	}
}

// TestBreakerBacksOffFlappingServer guards for how long a server that accepts
// writes only briefly is not probed: twice as long each time, up to a maximum, and
// as at first once it was healthy for long. A new connection does not shorten that
// time.
func TestBreakerBacksOffFlappingServer(t *testing.T) {
	g := newTestBreaker(t)
	down := func(reason string) (held time.Duration) {
		t.Helper()
		g.fail(openAfter, reason)
		g.check(false, "down "+reason)
		g.probeNow()
		since := g.now
		for {
			if probe, _ := g.allow(); probe {
				break
			}
			if g.now = g.now.Add(time.Millisecond); g.now.Sub(since) > time.Minute {
				t.Fatal("no probe")
			}
		}
		for n := range provingWrites {
			if n > 0 {
				g.allow()
			}
			g.success(true)
			g.endProbe()
		}
		g.check(true, "recovered")
		return g.now.Sub(since)
	}
	check := func(held, want time.Duration) {
		t.Helper()
		if held < want*4/5 || held > want*6/5+time.Millisecond {
			t.Errorf("not asked for %v, want %v", held, want)
		}
	}
	for range 2 {
		check(down("oom"), 0) // a connection has just been made
		for want := 2 * probeEvery; want <= 2*maxHold; want *= 2 {
			g.now = g.now.Add(time.Second)
			check(down("oom"), min(want, maxHold))
			check(down("timeout"), 0)
		}
		g.now = g.now.Add(flapsWithin)
	}
}

// TestBreakerReportsFewFlaps guards the events for a server that accepts one write
// in two for ten minutes: one down and one recovered for each time that it is not
// probed, which is a few a minute.
func TestBreakerReportsFewFlaps(t *testing.T) {
	g := newTestBreaker(t)
	random := rand.New(rand.NewPCG(1, 2))
	began := g.now
	for ; g.now.Sub(began) < 10*time.Minute; g.now = g.now.Add(10 * time.Millisecond) {
		probe, err := g.allow()
		if err != nil {
			continue
		}
		switch random.IntN(4) {
		case 0: // denied
			g.success(false)
		case 1:
			g.success(true)
		default:
			g.fail(1, "oom")
		}
		if probe {
			g.endProbe()
		}
	}
	downs := 0
	for _, what := range g.take() {
		if what == "down oom" {
			downs++
		}
	}
	if downs < 5 || downs > 5+int(10*time.Minute/(maxHold*4/5)) {
		t.Errorf("down %d times in ten minutes", downs)
	}
}
