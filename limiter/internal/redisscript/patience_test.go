package redisscript

import (
	"testing"
	"time"
)

// TestPatience is the specification of how long a call waits beyond its time, after
// what it has found when that was over and after. All times are in ms from when it
// began to wait; it may take 50.
func TestPatience(t *testing.T) {
	const unsent, nothing = -1, -1
	type look struct {
		at     int
		sent   int // or unsent
		unread int // when the reader last went on, although there was more; or nothing
	}
	for _, tc := range []struct {
		name  string
		lag   int // how late batches were since it began
		looks []look
		until int // when it is given up
	}{
		{"a slow server", 0, []look{{50, 10, nothing}}, 50},
		{"a call that waits for others", 0, []look{{50, unsent, nothing}}, 50},
		{"sent just when its time was over", 0, []look{{51, 50, nothing}}, 50},
		{"a late batch", 30, []look{{50, 45, nothing}}, 80},
		{"sent after its time", 0, []look{{50, unsent, nothing}, {75, 70, nothing}}, 120},
		{"something to read, once", 0, []look{{50, 10, 49}}, 50},
		{"something to read, and then something else", 0, []look{{50, 10, 49}, {56, 10, 55}}, 50},
		{"the same to read twice", 0, []look{{50, 10, 20}, {56, 10, 20}}, 106},
		{"and read at last", 0, []look{{50, 10, 20}, {56, 10, 20}, {62, 10, nothing}}, 112},
		{"and nothing after that", 0, []look{{50, 10, 20}, {56, 10, 20}, {62, 10, nothing}, {80, 10, nothing}}, 112},
	} {
		t.Run(tc.name, func(t *testing.T) {
			at := func(ms int) time.Time {
				if ms < 0 {
					return time.Time{}
				}
				return start.Add(time.Duration(ms) * time.Millisecond)
			}
			p := patience{began: at(0), end: at(50), kept: at(0), lag: time.Hour}
			for _, l := range tc.looks {
				p.looked(at(l.at), at(l.sent), l.unread != nothing, at(l.unread))
			}
			now := at(tc.looks[len(tc.looks)-1].at)
			got := now.Add(p.rest(now, time.Hour+time.Duration(tc.lag)*time.Millisecond)).Sub(start)
			if want := time.Duration(tc.until) * time.Millisecond; got != want {
				t.Errorf("given up at %v, want %v", got, want)
			}
		})
	}
}
