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
	var slot, other Slot
	if !busy.Acquire(&slot, &Request{Class: Normal}, now) || busy.Acquire(new(Slot), &Request{Class: Normal}, now) {
		t.Fatal("want room for one request")
	}
	busy.Shed(Normal)
	if !all.Of("other", now).Acquire(&other, &Request{Class: Normal}, now) {
		t.Error("a request of one key takes the room of another")
	}
	other.Release(now, true)
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
	if s := all.State(now); s.Keys != 2 || s.Overdue != 1 || s.Shed[Normal] != 1 {
		t.Errorf("%+v after a minute, want 2 keys, 1 request overdue, 1 shed", s)
	}
	if all.Of("busy", now) != busy || all.Of("beyond", now) != own {
		t.Error("a key that is in use has another controller")
	}
	slot.Release(now, true)
	now = now.Add(idle)
	all.Of("another", now)
	if s := all.State(now); s.Keys != 1 || s.InProgress != 0 || s.Shed[Normal] != 1 {
		t.Errorf("%+v after another minute, want 1 key, nothing in progress, 1 shed", s)
	}
}

// TestKeysBeyond guards what is shown of a key that shares a controller, and that the time at
// the least limit of one key does not hide that of another.
func TestKeysBeyond(t *testing.T) {
	now := time.Now()
	all := NewControllers(Options{Latency: time.Millisecond, Min: 1, Max: 1})
	for i := range maxKeys {
		all.Of(fmt.Sprint(i), now)
	}
	all.Of("beyond", now).Acquire(new(Slot), &Request{Class: Normal}, now)
	if s := all.Peek("further", now); s.InProgress != 1 {
		t.Errorf("%+v, want the one in progress of all further keys", s)
	}
	for _, key := range []string{"1", "2"} {
		for range 2 {
			all.Of(key, now).Acquire(new(Slot), &Request{Class: Normal}, now)
		}
	}
	now = now.Add(lastWindow)
	if s := all.State(now); s.AtMin != 2*lastWindow {
		t.Errorf("%v at the least limit, want %v of each of two keys", s.AtMin, lastWindow)
	}
}

// TestQueueIsDemand guards that the limit grows where requests wait in a line instead of asking,
// as it does where they are turned away.
func TestQueueIsDemand(t *testing.T) {
	grown := func(demand func(c *Controller, now time.Time)) int {
		now := time.Now()
		c := New(Options{Latency: 100 * time.Millisecond, Min: 1, Max: 1000}, now)
		for range 200 {
			var slots [20]Slot
			for i := range slots {
				c.Acquire(&slots[i], &Request{Class: High}, now)
			}
			demand(c, now)
			now = now.Add(20 * time.Millisecond)
			for i := range slots {
				slots[i].Release(now, true)
			}
		}
		return c.State(now).Limit
	}
	idle := grown(func(*Controller, time.Time) {})
	queued := grown(func(c *Controller, now time.Time) { c.Queue(High, now) })
	if queued <= idle {
		t.Errorf("the limit is %d with a queue, and %d without", queued, idle)
	}
}

// TestDryRun guards that a dry run has all requests in progress, and counts those that it
// would have turned away.
func TestDryRun(t *testing.T) {
	now := time.Now()
	c := New(Options{Latency: time.Second, Min: 1, Max: 1}, now)
	if !c.Acquire(new(Slot), &Request{Class: Low, DryRun: true}, now) || c.Acquire(new(Slot), &Request{Class: Low, DryRun: true}, now) {
		t.Error("want room for one request")
	}
	c.Shed(Low)
	if s := c.State(now); s.InProgress != 2 || s.Shed[Low] != 1 {
		t.Errorf("%+v, want 2 in progress and 1 that would have been shed", s)
	}
}
