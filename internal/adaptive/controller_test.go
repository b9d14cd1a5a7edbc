package adaptive

import (
	"strconv"
	"testing"
	"time"
)

var options = Options{Latency: 500 * time.Millisecond, Min: 4, Max: 1000}

// TestUseless guards that it is reported, once, that an upstream is slower than the latency
// however few requests it gets, and never of one that is only overloaded.
func TestUseless(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name    string
		service time.Duration
		load    int // a second
		want    int
	}{
		{"slower by itself", 800 * time.Millisecond, 20, 1},
		{"slower than requests count for", 3 * time.Second, 20, 1},
		{"slower by itself, and hardly used", 2 * time.Second, 1, 0},
		{"overloaded", 0, 1000, 0},
	} {
		now := time.Now()
		c, reports := New(options, now), 0
		var busy []*Slot
		var due []time.Time
		for i := range 120 * tc.load {
			for now = now.Add(time.Second / time.Duration(tc.load)); len(busy) > 0 && !due[0].After(now); busy, due = busy[1:], due[1:] {
				if busy[0].Release(due[0], true) {
					reports++
				}
			}
			end := now.Add(tc.service)
			if tc.service == 0 { // 200 a second
				if end = now.Add(5 * time.Millisecond); len(due) > 0 {
					end = due[len(due)-1].Add(5 * time.Millisecond)
				}
			}
			if s := new(Slot); c.Acquire(s, &Request{Class: Normal}, now) {
				busy, due = append(busy, s), append(due, end)
			}
			_ = i
		}
		if reports != tc.want {
			t.Errorf("%s: reported %d times, want %d", tc.name, reports, tc.want)
		}
	}
}

// TestFailures guards that fast failures are no answers: the limit does not grow by them.
func TestFailures(t *testing.T) {
	t.Parallel()
	now := time.Now()
	c := New(options, now)
	for range 60_000 {
		var s Slot
		if c.Acquire(&s, &Request{Class: Normal}, now); s.next == nil {
			t.Fatal("turned away")
		}
		now = now.Add(time.Millisecond)
		s.Release(now, false)
	}
	if s := c.State(now); s.Limit > 2*Initial || s.Mean != 0 || s.InProgress != 0 {
		t.Errorf("%+v, want no mean, and none in progress", s)
	}
}

// TestSlowFailures guards that the limit goes down within seconds where all clients give up
// before they are answered: it must not wait for answers then.
func TestSlowFailures(t *testing.T) {
	t.Parallel()
	now := time.Now()
	c := New(options, now)
	var slots [Initial]Slot
	for i := range slots {
		c.Acquire(&slots[i], &Request{Class: High}, now)
	}
	for i := range slots {
		slots[i].Release(now.Add(time.Second), false)
	}
	if s := c.State(now.Add(longWindow)); s.Limit >= Initial || s.Verdict != Slow {
		t.Errorf("%+v after two seconds, want a limit below %d", s, Initial)
	}
}

// TestOverdue guards that a request which takes longer than two latencies counts no more, but is
// shown, and that it is an answer when it comes.
func TestOverdue(t *testing.T) {
	t.Parallel()
	now := time.Now()
	c := New(options, now)
	var slots [3]Slot
	for i := range slots {
		c.Acquire(&slots[i], &Request{Class: Normal}, now.Add(time.Duration(i)*time.Second))
	}
	now = now.Add(2500 * time.Millisecond)
	if s := c.State(now); s.InProgress != 1 || s.Overdue != 2 || s.Oldest != 2500*time.Millisecond {
		t.Errorf("%+v, want one of three to count", s)
	}
	for i := range slots {
		slots[i].Release(now, true)
	}
	if s := c.State(now); s.InProgress != 0 || s.Overdue != 0 || s.Oldest != 0 || c.all.answers != 3 {
		t.Errorf("%+v with %d answers, want none in progress, and three", s, c.all.answers)
	}
	if took, least, most := c.all.area, 2500*time.Millisecond, 2600*time.Millisecond; took < least || took > most {
		t.Errorf("they count for %v, want 1 s, 1 s and 0.5 s", took)
	}
}

// TestLate guards that requests which are late are no overload while others are answered quickly, unless
// their clients leave.
func TestLate(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name   string
		quick  time.Duration // one answer a second
		lost   bool          // the late ones, in place of answers after three seconds
		slower bool
	}{
		{"quick answers beside", 50 * time.Millisecond, false, false},
		{"no quick answers beside", 400 * time.Millisecond, false, true},
		{"quick answers beside, clients leave", 50 * time.Millisecond, true, true},
	} {
		now := time.Now()
		c := New(options, now)
		var late []*Slot
		for i := range 20 {
			if i >= 3 {
				for _, s := range late[:5] {
					s.Release(now, !tc.lost)
				}
				late = late[5:]
			}
			var quick Slot
			for range 5 {
				s := new(Slot)
				c.Acquire(s, &Request{Class: Normal, DryRun: true}, now)
				late = append(late, s)
			}
			c.Acquire(&quick, &Request{Class: Normal, DryRun: true}, now)
			quick.Release(now.Add(tc.quick), true)
			now = now.Add(time.Second)
		}
		if s := c.State(now); s.Limit < Initial != tc.slower {
			t.Errorf("%s: %+v, want a limit below %d: %t", tc.name, s, Initial, tc.slower)
		}
	}
}

// TestRouteThatTakesLonger guards that a route is limited alone if its requests take several times as
// long as before, and that it is not if they only begin and end together.
func TestRouteThatTakesLonger(t *testing.T) {
	t.Parallel()
	const clients = 60
	for _, tc := range []struct {
		name        string
		first, then time.Duration // that its requests take, and after a minute
		apart       bool          // whether each of its clients' takes another time, so much on average
		limited     bool
	}{
		{"together", 3500 * time.Millisecond, 3500 * time.Millisecond, false, false},
		{"apart", 3500 * time.Millisecond, 3500 * time.Millisecond, true, false},
		{"longer", time.Second, 10 * time.Second, true, true},
	} {
		start, news, quick := time.Now(), Route{"GET", "news"}, Route{"GET", "quick"}
		for quick.number() == news.number() {
			quick.Segment += "er"
		}
		c, limited := New(options, start), false
		var open [clients]Slot
		var due [clients]time.Time
		for i := range due {
			due[i] = start.Add(time.Second * time.Duration(i) / clients)
		}
		for now := start; now.Before(start.Add(2 * time.Minute)); now = now.Add(20 * time.Millisecond) {
			takes := tc.first
			if now.Sub(start) > time.Minute {
				takes = tc.then
			}
			for i := range due {
				if due[i].After(now) {
					continue
				}
				if open[i].next != nil {
					open[i].Release(now, true)
				}
				c.Acquire(&open[i], &Request{Class: Normal, Route: news, DryRun: true}, now)
				if due[i] = due[i].Add(takes); tc.apart {
					due[i] = due[i].Add(takes * time.Duration(i-clients/2) / clients)
				}
			}
			var s Slot
			c.Acquire(&s, &Request{Class: Normal, Route: quick, DryRun: true}, now)
			s.Release(now.Add(time.Millisecond), true)
			limited = limited || len(c.State(now).Routes) > 0
		}
		if limited != tc.limited {
			t.Errorf("%s: limited: %t, want %t", tc.name, limited, tc.limited)
		}
	}
}

// TestPlaceBeyondLimit guards that a route with none in progress has room for one beyond the limit,
// which others would have taken, but not beyond a quarter more, nor beyond the most that there may be.
func TestPlaceBeyondLimit(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		max  int
		want int // of other routes, with two requests each
	}{
		{"a quarter more", 1000, Initial / 4},
		{"the most that there may be", Initial + 2, 2},
		{"none more", Initial, 0},
	} {
		o, now := options, time.Now()
		o.Max = tc.max
		c := New(o, now)
		for c.Acquire(new(Slot), &Request{Class: Normal}, now) {
		}
		got, seen := 0, map[uint64]bool{Route{}.number(): true}
		for i := range 1000 {
			r := Route{Segment: strconv.Itoa(i)}
			if seen[r.number()] {
				continue
			}
			seen[r.number()] = true
			for range 2 {
				if c.Acquire(new(Slot), &Request{Class: Normal, Route: r}, now) {
					got++
				}
			}
		}
		if got != tc.want || c.State(now).InProgress != Initial+tc.want {
			t.Errorf("%s: %d in progress, %d of other routes, want %d", tc.name, c.State(now).InProgress, got, tc.want)
		}
	}
}

// TestWaitForClient guards that a request takes no room while its client sends it, as often as the
// upstream waits for that, and that this is not the time of the upstream; but that it is if the
// upstream answers meanwhile, as it did not wait then.
func TestWaitForClient(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name               string
		released, answered bool // while its client sends
		want               time.Duration
	}{
		{"sent, then answered", false, true, 100 * time.Millisecond},
		{"sent, then failed", false, false, 0},
		{"answered meanwhile", true, true, time.Second},
		{"client leaves meanwhile", true, false, 0},
	} {
		now := time.Now()
		c := New(options, now)
		pass := func(d time.Duration) { now = now.Add(d); c.State(now) }
		var s Slot
		c.Acquire(&s, &Request{Class: Normal}, now)
		for range 9 {
			pass(10 * time.Millisecond)
			if !s.Wait(now) {
				t.Errorf("%s: no room while its client sends", tc.name)
			}
			pass(100 * time.Millisecond)
			if state := c.State(now); state.Waiting != 1 || state.InProgress+state.Overdue != 0 {
				t.Errorf("%s: %+v, want one that waits for its client", tc.name, state)
			}
			s.Resume(now)
			if state := c.State(now); state.Waiting != 0 || state.InProgress != 1 {
				t.Errorf("%s: %+v, want one in progress", tc.name, state)
			}
		}
		pass(10 * time.Millisecond)
		if tc.released {
			s.Wait(now)
			pass(3 * time.Second)
		}
		s.Release(now, tc.answered)
		s.Wait(now) // its body may still be read
		s.Resume(now)
		if state := c.State(now); state.InProgress+state.Overdue+state.Waiting != 0 {
			t.Errorf("%s: %+v at the end", tc.name, state)
		}
		if got := c.all.area; got < tc.want || got > tc.want+time.Millisecond {
			t.Errorf("%s: the upstream had %v, want %v", tc.name, got, tc.want)
		}
	}
}

// TestShareRecovers guards that the least important requests get room again soon after an
// overload, also if there are few; and that normal ones have all of it where none is more important.
func TestShareRecovers(t *testing.T) {
	t.Parallel()
	now := time.Now()
	o := options
	o.High = true
	c := New(o, now)
	for range 100 { // ten seconds in which half of the important requests are turned away
		for range 2 * Initial {
			if s := new(Slot); c.Acquire(s, &Request{Class: High}, now) {
				defer s.Release(now, true)
			}
		}
		now = now.Add(100 * time.Millisecond)
	}
	if c.Acquire(new(Slot), &Request{Class: Low}, now) {
		t.Error("there is room for the least important requests in an overload")
	}
	now = now.Add(5 * time.Second)
	c.State(now)
	if now = now.Add(5 * time.Second); !c.Acquire(new(Slot), &Request{Class: Low}, now) {
		t.Error("there is no room for them ten seconds after it")
	}
	for _, high := range []bool{false, true} {
		o.High = high
		c, room := New(o, now), 0
		for c.Acquire(new(Slot), &Request{Class: Normal}, now) {
			room++
		}
		if want := map[bool]int{false: Initial, true: 0.9 * Initial}[high]; room != want {
			t.Errorf("normal requests have room for %d, want %d", room, want)
		}
	}
}

// BenchmarkAcquireAndRelease is what a request pays.
func BenchmarkAcquireAndRelease(b *testing.B) {
	c, now := New(Options{Latency: time.Second, Min: 4, Max: 1000}, time.Now()), time.Now()
	var s Slot // a part of what a request has anyway
	for b.Loop() {
		now = now.Add(time.Microsecond) // the clock is read for other things too
		if c.Acquire(&s, &Request{Class: Normal}, now) {
			s.Release(now, true)
		}
	}
}
