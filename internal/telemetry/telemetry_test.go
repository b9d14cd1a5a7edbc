package telemetry

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// TestRates guards that the rates are for the last seconds, and not of the
// whole time.
func TestRates(t *testing.T) {
	p := New(Options{})
	refs := p.Counters.NewRefs()
	defer refs.Release()
	c := refs.Get("rates")
	var s rates
	const most = 2 * samples * sampleEvery
	start := time.Now()
	if _, age := s.since(start, most); age != 0 {
		t.Errorf("without samples they are %v old", age)
	}
	admit := func(n uint64) { c.stripes[0].decisions[Admitted][0].Add(n) }
	for i := range 20 {
		s.sample(start.Add(time.Duration(i)*sampleEvery), p.Counters)
		admit(uint64(i))
	}
	end := start.Add(20 * sampleEvery)
	before, age := s.since(end, most)
	if want := samples * sampleEvery; age != want {
		t.Errorf("the oldest sample is %v old, want %v", age, want)
	}
	totals := c.Totals()
	got := totals.Summary()
	rate := got.minus(before.counts[c.Path]).rates(age)["admitted"]
	if want := float64(14+15+16+17+18+19) / age.Seconds(); rate != want || got.Admitted != 190 {
		t.Errorf("%v a second of %d, want %v", rate, got.Admitted, want)
	}
	if _, age := s.since(end.Add(time.Hour), most); age != 0 {
		t.Errorf("after a pause the samples are %v old", age)
	}
	again := Summary{Admitted: 3}.minus(Summary{Admitted: 10})
	if again.Admitted != 3 {
		t.Errorf("counts that have started again have grown by %d", again.Admitted)
	}
}

// TestLimitsOfOnePathAreOne guards that what is counted for one of the limits without a
// name, which share a path, is shown whichever of them is the last.
func TestLimitsOfOnePathAreOne(t *testing.T) {
	c := &Counters{Path: "default"}
	for option := DryRun; option <= Eventual; option <<= 1 {
		for _, limits := range [][]Limit{{{Counters: c, Policies: option}, {Counters: c}}, {{Counters: c}, {Counters: c, Policies: option}}} {
			if got := byPath(limits)["default"].Policies; got != option {
				t.Errorf("got options %b, want %b", got, option)
			}
		}
	}
}

// usage is a limit that has forgotten and shared so often.
func usage(name string, forgotten, shared uint64) limiter.LimitUsage {
	return limiter.LimitUsage{Name: name, Buckets: 10, MaxKeys: 10, Forgotten: forgotten, Shared: shared}
}

// TestFullLimitsAreLoggedOnceAMinute guards that a limit which forgets or shares is logged at once, then once a
// minute, each time with what became since, and not any more when that is over;
// and that the line says what happens to new keys, and how to avoid it.
func TestFullLimitsAreLoggedOnceAMinute(t *testing.T) {
	const (
		seconds  = "(new keys per second) × (seconds to drain)"
		ofLimit  = "; unless this is a flood, raise max_keys to " + seconds
		ofMemory = "; unless this is a flood, raise max_keys to the sum over all limits of " + seconds

		evicts       = "limit full: new keys evict the emptiest buckets" + ofLimit
		shares       = "limit full: new keys share a bucket with others of their network" + ofLimit
		memoryEvicts = "memory full: new keys evict the emptiest buckets" + ofMemory
		memoryShares = "memory full: new keys share a bucket with others of their network" + ofMemory
	)
	inMemory := func(u limiter.LimitUsage) limiter.LimitUsage {
		u.Buckets = u.MaxKeys - 1 // the limit itself has room
		return u
	}
	const newStore = -1 // in place of a time
	var log fullLimits
	log.reset()
	now := time.Now()
	for i, tc := range []struct {
		after  time.Duration
		usages []limiter.LimitUsage
		want   []string // limit, forgotten and shared, and the message, of each line
	}{
		{0, []limiter.LimitUsage{usage("a", 0, 0)}, nil},
		{0, []limiter.LimitUsage{usage("a", 3, 0)}, []string{"a 3 0 " + evicts}},
		{time.Second, []limiter.LimitUsage{usage("a", 5, 0)}, nil},
		{time.Second, []limiter.LimitUsage{usage("a", 6, 0), usage("b", 0, 2)}, []string{"b 0 2 " + shares}},
		{58*time.Second - 1, []limiter.LimitUsage{usage("a", 6, 0), usage("b", 0, 2)}, nil},
		{1, []limiter.LimitUsage{usage("a", 6, 0), usage("b", 0, 2)}, []string{"a 3 0 " + evicts}},
		{time.Hour, []limiter.LimitUsage{usage("a", 6, 0), usage("b", 0, 2)}, nil},
		{0, []limiter.LimitUsage{usage("a", 7, 0), usage("b", 1, 3)}, []string{"a 1 0 " + evicts, "b 1 1 " + shares}},
		// Limits without a name, and clients without a key of their own, have
		// buckets of other names.
		{time.Hour, []limiter.LimitUsage{
			usage("default", 1, 0), usage("default@1xyz", 10, 0), usage("default@1xyz@client_ip", 100, 0),
			usage("x/min_interval", 4, 0),
		}, []string{"default 111 0 " + evicts, "x/min_interval 4 0 " + evicts}},
		{time.Hour, []limiter.LimitUsage{inMemory(usage("a", 9, 0)), inMemory(usage("b", 1, 6))},
			[]string{"a 2 0 " + memoryEvicts, "b 0 3 " + memoryShares}},
		// That of a new store has forgotten less.
		{newStore, []limiter.LimitUsage{usage("a", 2, 0)}, []string{"a 2 0 " + evicts}},
	} {
		if tc.after == newStore {
			log.reset()
		} else {
			now = now.Add(tc.after)
		}
		core, logs := observer.New(zap.DebugLevel)
		for _, limit := range log.due(now, tc.usages) {
			limit.log(zap.New(core))
		}
		var got []string
		for _, e := range logs.TakeAll() {
			fields := e.ContextMap()
			got = append(got, fmt.Sprint(fields["limit"], " ", fields["forgotten"], " ", fields["shared"], " ", e.Message))
			if e.Level != zap.WarnLevel || fields["max_keys"] != int64(10) || len(fields) != 4 {
				t.Errorf("step %d: got a line of level %s with %v", i+1, e.Level, fields)
			}
		}
		if !slices.Equal(got, tc.want) {
			t.Errorf("step %d:\n got %q\nwant %q", i+1, got, tc.want)
		}
	}
}

// TestThrottle guards that one message a minute passes.
func TestThrottle(t *testing.T) {
	var throttle Throttle
	for at, want := range []bool{0: true, 1: false, 59: false, 60: true, 119: false, 120: true} {
		if got := throttle.allow(time.Duration(at)*time.Second, time.Minute); got != want {
			t.Errorf("after %d s: got %t", at, got)
		}
	}
}

// TestManyBans guards that many bans at once neither wait for handlers of events nor take
// the place of other events.
func TestManyBans(t *testing.T) {
	p := New(Options{})
	for range 10 * MaxWaitingEvents {
		p.Banned("login", time.Minute, nil)
	}
	if n, dropped := len(p.events.queue), p.events.dropped.Load(); n != MaxWaitingEvents/2 || dropped != 10*MaxWaitingEvents-int64(n) {
		t.Errorf("%d events wait and %d are dropped", n, dropped)
	}
}
