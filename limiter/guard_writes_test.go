package limiter

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/redistest"
)

// TestGuardProofsInARow tests that a failure between probes that write has a
// server without memory prove anew that it takes writes.
func TestGuardProofsInARow(t *testing.T) {
	g := newGuarded(t)
	g.fail(lostAfter, "oom")
	g.check(false, "lost oom")
	for range 3 {
		g.probe()
		for range provenBy - 1 {
			g.success(true)
			g.leave()
			if probe, err := g.enter(); !probe {
				t.Fatalf("no further probe: %v", err)
			}
		}
		g.fail(1, "oom")
		g.leave()
		g.check(false)
	}
}

// TestGuardHoldsOff tests the time for which a server is not asked that takes
// writes for moments only: twice as long each time, up to a most, and as at first
// once it was well for long. A connection that is made meanwhile changes nothing.
func TestGuardHoldsOff(t *testing.T) {
	g := newGuarded(t)
	lose := func(reason string) (held time.Duration) {
		t.Helper()
		g.fail(lostAfter, reason)
		g.check(false, "lost "+reason)
		g.soon()
		lost := g.now
		for {
			if probe, _ := g.enter(); probe {
				break
			}
			if g.now = g.now.Add(time.Millisecond); g.now.Sub(lost) > time.Minute {
				t.Fatal("no probe")
			}
		}
		for n := range provenBy {
			if n > 0 {
				g.enter()
			}
			g.success(true)
			g.leave()
		}
		g.check(true, "back")
		return g.now.Sub(lost)
	}
	check := func(held, want time.Duration) {
		t.Helper()
		if held < want*4/5 || held > want*6/5+time.Millisecond {
			t.Errorf("not asked for %v, want %v", held, want)
		}
	}
	for range 2 {
		check(lose("oom"), 0) // a connection has just been made
		for want := 2 * probeEvery; want <= 2*longestHold; want *= 2 {
			g.now = g.now.Add(time.Second)
			check(lose("oom"), min(want, longestHold))
			check(lose("timeout"), 0)
		}
		g.now = g.now.Add(quietFor)
	}
}

// TestGuardReportsFlapping tests what an operator reads of a server that takes one
// write in two for ten minutes: one loss and one return for each time that it is
// not asked, which comes to a few a minute.
func TestGuardReportsFlapping(t *testing.T) {
	g := newGuarded(t)
	random := rand.New(rand.NewPCG(1, 2))
	began := g.now
	for ; g.now.Sub(began) < 10*time.Minute; g.now = g.now.Add(10 * time.Millisecond) {
		probe, err := g.enter()
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
			g.leave()
		}
	}
	lost := 0
	for _, what := range g.take() {
		if what == "lost oom" {
			lost++
		}
	}
	if lost < 5 || lost > 5+int(10*time.Minute/(longestHold*4/5)) {
		t.Errorf("lost %d times in ten minutes", lost)
	}
}

// TestOutOfMemory tests a server that has no memory left and gets a little now
// and then, as keys expire: most writes fail, some go through, and all that is
// denied is still answered. It is not lost and back at each of these, and is back
// for good soon after there is memory again.
func TestOutOfMemory(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t, "--maxmemory-policy", "noeviction", "--maxmemory-clients", "0")
	var seen events
	r := newTestRedis(t, server, func(opt *RedisOptions) {
		opt.Report, opt.Fallback = seen.report, NewMemory(nil)
	})
	forgetDenials(r)
	full := Bucket{Name: "full", Key: "k", Limit: Limit{1, time.Hour, 1}, Cost: 1}
	mustTake(t, r, Request{Buckets: []Bucket{full}})
	ctx := context.Background()
	client := server.Client()
	memory := func(spare int64) {
		t.Helper()
		used := infoNumber(t, server, "memory", "used_memory")
		if err := client.ConfigSet(ctx, "maxmemory", fmt.Sprint(max(used+spare, 1))).Err(); err != nil {
			t.Fatal(err)
		}
	}
	filler := strings.Repeat("x", 2000)
	fills, ask := 0, int64(0)
	began := time.Now()
	for time.Since(began) < 6*time.Second {
		memory(-50_000)
		for range 30 {
			ask++
			mustTake(t, r, Request{Buckets: []Bucket{numbered(ask)}})
			mustTake(t, r, Request{Buckets: []Bucket{full}})
		}
		memory(200_000) // drained a little
		for range 30 {
			ask++
			mustTake(t, r, Request{Buckets: []Bucket{numbered(ask)}})
			if client.Set(ctx, fmt.Sprint("filler", fills), filler, 0).Err() == nil {
				fills++
			}
		}
		time.Sleep(10 * time.Millisecond)
	}
	got := seen.take()
	lost := 0
	for _, what := range got {
		if what == "lost oom" {
			lost++
		}
	}
	t.Logf("reported %q, %d fillers", got, fills)
	// At first for 0.25 s, then 0.5, 1, 2 and 4, less a fifth.
	if lost < 1 || lost > 5 {
		t.Errorf("lost %d times in 6 s", lost)
	}
	if fills == 0 {
		t.Error("there never was any memory")
	}
	if err := client.ConfigSet(ctx, "maxmemory", "0").Err(); err != nil {
		t.Fatal(err)
	}
	waitFor(t, 12*time.Second, func() error {
		ask++
		mustTake(t, r, Request{Buckets: []Bucket{numbered(ask)}})
		if guardOf(r).isLost() {
			return fmt.Errorf("still lost")
		}
		return nil
	})
	if got := seen.take(); len(got) > 0 && !slices.Equal(got, []string{"back"}) {
		t.Errorf("reported %q when there was memory again", got)
	}
}
