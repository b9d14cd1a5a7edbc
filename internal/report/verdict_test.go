package report_test

import (
	"testing"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/report"
)

// TestSizeFor guards which size is proposed.
func TestSizeFor(t *testing.T) {
	l := report.Limit{Peaks: []report.Peak{{Units: 1, Keys: 90}, {Units: 5, Keys: 9}, {Units: 100, Keys: 1}}}
	for share, want := range map[float64]int64{0: 100, 0.009: 100, 0.01: 5, 0.09: 5, 0.1: 1, 0.99: 1} {
		if got := l.SizeFor(share); got != want {
			t.Errorf("for %v of keys: got %d, want %d", share, got, want)
		}
	}
	if got := (&report.Limit{}).SizeFor(0.1); got != 0 {
		t.Errorf("without keys: got %d", got)
	}
}
