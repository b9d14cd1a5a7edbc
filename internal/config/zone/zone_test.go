package zone

import (
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestCompare guards the order in which zones are checked: by how much they admit in a
// time, and alike ones by their names.
func TestCompare(t *testing.T) {
	zones := []Zone{
		{"none", 0, time.Second},
		{"b", 60, time.Minute},
		{"hour", 100, time.Hour},
		{"second", 10, time.Second},
		{"a", 1, time.Second},
	}
	slices.SortFunc(zones, Compare)
	var got []string
	for _, z := range zones {
		got = append(got, z.Name)
	}
	if want := []string{"second", "a", "b", "hour", "none"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestLimitName guards that every zone gets a valid name of its own, and keeps a valid
// one.
func TestLimitName(t *testing.T) {
	valid := regexp.MustCompile(`^[A-Za-z0-9_.-]{1,64}$`)
	long := strings.Repeat("a", 64)
	zones := []string{"a", "A_.-9", long, long + "a", long + "b", "", " ", "sign in", "sign-in", "sign/in", "ü", "\x00", "x@y"}
	used := make(map[string]string)
	for _, zone := range zones {
		name := LimitName(zone)
		if !valid.MatchString(name) {
			t.Errorf("%q becomes %q", zone, name)
		}
		if other, taken := used[name]; taken {
			t.Errorf("%q and %q become %q", zone, other, name)
		}
		if used[name] = zone; valid.MatchString(zone) && name != zone {
			t.Errorf("%q becomes %q", zone, name)
		}
	}
}

// TestAlgorithmOf guards that a zone has the algorithm of zones, unless it has more
// events than a log holds.
func TestAlgorithmOf(t *testing.T) {
	for events, want := range map[int64]string{0: slidingLog, 1: slidingLog, MostLogged: slidingLog, MostLogged + 1: slidingWindow} {
		if got := AlgorithmOf(events); got != want {
			t.Errorf("%d events: got %s, want %s", events, got, want)
		}
	}
}

// TestParse guards which numbers and windows zones may have: all that a limit can.
func TestParse(t *testing.T) {
	for text, ok := range map[string]bool{
		"1": true, "+3": true, "003": true, "16777215": true, "0": false, "16777216": false, "-1": false, "0x10": false, "1_0": false, "": false,
	} {
		if n, want := ParseEvents(text, 1); (want == "") != ok || (n > 0) != ok {
			t.Errorf("%q events: got %d, %q", text, n, want)
		}
	}
	if n, want := ParseEvents("0", 0); n != 0 || want != "" {
		t.Errorf("no events: got %d, %q", n, want)
	}
	for text, ok := range map[string]bool{
		"1m": true, "+1m": true, "1.5d": true, "1µs": true, "4000d": true, "": false, "60": false, "0s": false, "-1m": false,
		"1500ns": false, "4400d": false, "36500d": false,
	} {
		if d, want := ParseWindow(text); (want == "") != ok || (d > 0) != ok {
			t.Errorf("%q: got %v, %q", text, d, want)
		}
	}
}
