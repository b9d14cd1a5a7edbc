package ratelimit

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// TestCounted guards what a decision is counted as: one that leaves a bucket at
// least 80 % full is near its limit, however small the bucket is, unless any request
// does so to an empty one; and units are those that were charged.
func TestCounted(t *testing.T) {
	admitted := func(size, remaining int64) limiter.Decision {
		return limiter.Decision{Size: size, Remaining: remaining, By: limiter.DecidedByRedis}
	}
	full := limiter.Decision{Denied: true, Size: 10, By: limiter.DecidedByCache}
	tests := []struct {
		name            string
		decision        limiter.Decision
		denied, charged bool
		want            counted
		cost            int64 // 1 if it is 0
		warmUp          bool
	}{
		{"79 % full", admitted(100, 21), false, true, countedAdmitted, 7, false},
		{"80 % full", admitted(100, 20), false, true, countedNear, 7, false},
		{"full", admitted(100, 0), false, true, countedNear, 7, false},
		{"one of one", admitted(1, 0), false, true, countedAdmitted, 0, false},
		{"two of two", admitted(2, 0), false, true, countedNear, 0, false},
		{"three of four", admitted(4, 1), false, true, countedAdmitted, 0, false},
		{"four of five", admitted(5, 1), false, true, countedNear, 0, false},
		{"three of five", admitted(5, 2), false, true, countedAdmitted, 0, false},
		{"four of five at once", admitted(5, 1), false, true, countedAdmitted, 4, false},
		{"five of five, three at once", admitted(5, 0), false, true, countedNear, 3, false},
		{"all that a warm-up admits", admitted(10, 0), false, true, countedAdmitted, 0, true},
		{"largest", admitted(limiter.MaxUnits, limiter.MaxUnits/5+1), false, true, countedAdmitted, 7, false},
		{"denied", full, true, false, countedDenied, 7, false},
		{"denied by another limit", admitted(100, 0), true, false, countedSpared, 7, false},
		{"denied by another limit, but charged", admitted(100, 0), true, true, countedSpared, 7, false},
	}
	for _, tc := range tests {
		var c counters
		b := limiter.Bucket{Limit: limiter.Limit{Size: tc.decision.Size}, Cost: max(tc.cost, 1)}
		if tc.warmUp {
			b.Limit.Algorithm = limiter.WarmUp
		}
		c.count(3, &b, &tc.decision, tc.denied, tc.charged)
		var want limitTotals
		want.decisions[tc.want][tc.decision.By] = 1
		if tc.charged {
			want.units = uint64(b.Cost)
		}
		if got := c.totals(); got != want {
			t.Errorf("%s: got %v, want %v", tc.name, got, want)
		}
	}
}

// TestDecidersAreCounted guards that there is a counter for everything that may
// decide: counting another would panic on a request.
func TestDecidersAreCounted(t *testing.T) {
	names := make(map[string]bool)
	for by := range limiter.Decider(deciders) {
		names[by.String()] = true
	}
	if len(names) != deciders {
		t.Errorf("%d deciders are called %v", deciders, names)
	}
	if name := limiter.Decider(deciders).String(); !names[name] {
		t.Errorf("decider %q has no counter", name)
	}
}

// TestEveryStripeIsCounted guards that nothing is lost when many requests are
// counted at once, whatever stripes they count in.
func TestEveryStripeIsCounted(t *testing.T) {
	const callers, each = 16, 1000
	var c counters
	before := checkedTotal(checkedEarlyData)
	redistest.Together(t, callers, func(i int) {
		b, d := limiter.Bucket{Cost: 2}, limiter.Decision{Size: 10, Remaining: 9}
		for range each {
			c.count(uint32(i), &b, &d, false, true)
			countChecked(uint32(i), checkedEarlyData)
		}
	})
	totals := c.totals()
	if n := totals.of(countedAdmitted); n != callers*each || totals.units != 2*n {
		t.Errorf("got %d admitted and %d units, want %d and %d", n, totals.units, callers*each, 2*callers*each)
	}
	if n := checkedTotal(checkedEarlyData) - before; n != callers*each {
		t.Errorf("got %d refusals of early data, want %d", n, callers*each)
	}
}

// TestRequestsAreCountedOnce guards that a request is counted once, however many
// handlers it passes and however it ends, as what became of it in the end.
func TestRequestsAreCountedOnce(t *testing.T) {
	const first, second = "rate_limit a {\nrate 100/1h\n}\n", "rate_limit b {\nkey {query.b}\nrate 1/1h\ncost {query.cost}\n}\n"
	cut := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "10")
		_, _ = w.Write([]byte("cut")) // the connection is closed then, and Caddy's handlers panic
	}))
	defer cut.Close()
	nobody := redistest.FreeAddr(t)
	undecided := "rate_limit {\nredis " + nobody + "\non_error allow\n}"
	for _, tc := range []struct {
		name, global, site string
		paths              string // of requests, one after the other
		want               [checkedKinds]uint64
	}{
		{"one handler", "", first + "respond ok", "/ /", counts(2, checkedAdmitted)},
		{"two handlers", "", "route {\n" + first + second + "respond ok\n}", "/?b=1&cost=1 /?b=2&cost=1", counts(2, checkedAdmitted)},
		{"denied by the second", "", "route {\n" + first + second + "respond ok\n}", "/?b=1&cost=1 /?b=1&cost=1", [checkedKinds]uint64{1, 1}},
		{"refused by the second", "", "route {\n" + first + second + "respond ok\n}", "/?b=1&cost=x", counts(1, checkedRefused)},
		{"undecided by both", undecided, first + "route {\n" + second + "respond ok\n}", "/?b=1&cost=1", counts(1, checkedUndecided)},
		{"an error after it", "", first + "error 404\nhandle_errors {\nrespond 404\n}", "/", counts(1, checkedAdmitted)},
		{"a denial in error routes", "", first + "error 404\nhandle_errors {\n" + second + "respond 404\n}", "/?b=1&cost=1 /?b=1&cost=1", [checkedKinds]uint64{2, 1}},
		{"a denial, and a limit in error routes", "", second + "handle_errors {\n" + first + "respond 429\n}", "/?b=1&cost=1 /?b=1&cost=1", [checkedKinds]uint64{1, 1}},
		{"a proxy that gives up", "", first + "reverse_proxy " + strings.TrimPrefix(cut.URL, "http://"), "/", counts(1, checkedAdmitted)},
		{"no limit", "", "rate_limit /other {\nrate 1/1h\n}\nrespond ok", "/", [checkedKinds]uint64{}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := startConfig(t, config{global: tc.global, site: tc.site})
			var before, got [checkedKinds]uint64
			for what := range checkedKinds {
				before[what] = checkedTotal(what)
			}
			for path := range strings.FieldsSeq(tc.paths) {
				if res, err := http.Get(s.url(path)); err == nil {
					_, _ = io.Copy(io.Discard, res.Body)
					res.Body.Close()
				}
			}
			redistest.WaitFor(t, patience, func() error { // a response may arrive before its request has ended
				for what := range checkedKinds {
					got[what] = checkedTotal(what) - before[what]
				}
				if got != tc.want {
					return fmt.Errorf("admitted, denied, undecided, refused, early data: got %v, want %v", got, tc.want)
				}
				return nil
			})
		})
	}
}

// counts returns the counts of n requests of which one thing became.
func counts(n uint64, what checked) (all [checkedKinds]uint64) {
	all[what] = n
	return all
}

// TestRefusedAs guards which errors count as early data.
func TestRefusedAs(t *testing.T) {
	for err, want := range map[error]checked{
		errEarlyData: checkedEarlyData,
		refusal{http.StatusBadRequest, errors.New("x")}: checkedRefused,
		errors.New("of a matcher"):                      checkedRefused,
	} {
		if got := refusedAs(err); got != want {
			t.Errorf("%v is counted as %v, want %v", err, got, want)
		}
	}
}

// TestStripesAreApart guards that no two stripes have a cache line in common: cores
// that count in different stripes would slow each other.
func TestStripesAreApart(t *testing.T) {
	const line = 64
	var s [2]stripe
	if gap := uintptr(unsafe.Pointer(&s[1].decisions)) - uintptr(unsafe.Pointer(&s[0].units)) - unsafe.Sizeof(s[0].units); gap < line {
		t.Errorf("%d bytes are between the counters of two stripes", gap)
	}
}

// BenchmarkCount counts on one limit from all cores: each in the stripe of its
// evaluation, and all in the same one.
func BenchmarkCount(b *testing.B) {
	limited, d := limiter.Bucket{Cost: 1}, limiter.Decision{Size: 10, Remaining: 9}
	for _, one := range []bool{false, true} {
		name := "stripes"
		if one {
			name = "one"
		}
		b.Run(name, func(b *testing.B) {
			var c counters
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					e := evaluations.Get().(*evaluation)
					on := e.stripe
					if one {
						on = 0
					}
					c.count(on, &limited, &d, false, true)
					countChecked(on, checkedAdmitted)
					evaluations.Put(e)
				}
			})
		})
	}
}

// BenchmarkObserve observes how long a request waited for Redis.
func BenchmarkObserve(b *testing.B) {
	decisions := []limiter.Decision{{By: limiter.DecidedByRedis}}
	b.RunParallel(func(pb *testing.PB) {
		for n := 0; pb.Next(); n++ {
			observeRedisWait(350_000+(17_011*time.Duration(n))%200_000, decisions)
		}
	})
}
