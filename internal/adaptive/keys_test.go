package adaptive

import (
	"fmt"
	"testing"
	"time"
)

// TestKeys guards that each key has a controller of its own, up to as many as there may be;
// that a flood of keys shares one and does not touch the others; and that those are forgotten
// that are idle, with what they counted kept, but none with a request in progress.
func TestKeys(t *testing.T) {
	now := time.Now()
	all := NewControllers(Options{Latency: time.Second, Min: 1, Max: 1})
	busy := all.Of("busy", now)
	if !busy.Admit(Normal, false, now) || busy.Admit(Normal, false, now) {
		t.Fatal("want room for one request")
	}
	busy.Shed(Normal)
	if !all.Of("other", now).Admit(Normal, false, now) {
		t.Error("a request of one key takes the room of another")
	}
	all.Of("other", now).Finish(now, now, true)
	for i := range maxKeys {
		all.Of(fmt.Sprint(i), now)
	}
	if all.Of("beyond", now) != all.Of("further", now) || all.Of("beyond", now) == busy {
		t.Error("keys beyond the maximum do not share a controller")
	}
	if s := all.State(now); s.Keys != maxKeys || s.InProgress != 1 || s.Shed[Normal] != 1 {
		t.Errorf("%+v, want %d keys, 1 request in progress, 1 shed", s, maxKeys)
	}
	now = now.Add(idle)
	own := all.Of("beyond", now)
	if s := all.State(now); s.Keys != 2 || s.InProgress != 1 || s.Shed[Normal] != 1 {
		t.Errorf("%+v after a minute, want 2 keys, 1 request in progress, 1 shed", s)
	}
	if all.Of("busy", now) != busy || all.Of("beyond", now) != own {
		t.Error("a key that is in use has another controller")
	}
	busy.Finish(now, now, true)
	now = now.Add(idle)
	all.Of("another", now)
	if s := all.State(now); s.Keys != 1 || s.InProgress != 0 || s.Shed[Normal] != 1 {
		t.Errorf("%+v after another minute, want 1 key, nothing in progress, 1 shed", s)
	}
}

// TestDryRun guards that a dry run has all requests in progress, and counts those that it
// would have turned away.
func TestDryRun(t *testing.T) {
	now := time.Now()
	c := New(Options{Latency: time.Second, Min: 1, Max: 1}, now)
	if !c.Admit(Low, true, now) || c.Admit(Low, true, now) {
		t.Error("want room for one request")
	}
	c.Shed(Low)
	if s := c.State(now); s.InProgress != 2 || s.Shed[Low] != 1 {
		t.Errorf("%+v, want 2 in progress and 1 that would have been shed", s)
	}
}
