package zone

import (
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestCompare guards the order in which zones are asked: by how much they admit in a
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
