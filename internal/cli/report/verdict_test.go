package report_test

import (
	"strings"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/report"
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

// TestVerdictOnKeys guards that keys which ask for more than drips out are distinguished from
// those that come in bursts, however far above the size they are.
func TestVerdictOnKeys(t *testing.T) {
	const rate, burst = "raise the drip rate rather than the size", "Most of them came in bursts: a size of "
	for _, tc := range []struct {
		name          string
		lasting, peak int64
		windows       bool
		says          string
	}{
		{"evenly, a little above", 20, 15, false, rate},
		{"evenly, far above", 20, 5000, false, rate},
		{"bursts", 0, 15, false, burst + "15 would"},
		{"huge bursts", 0, 5000, false, burst + "5"},
		{"half of them in bursts", 10, 15, false, burst},
		{"windows", 20, 15, true, "A size of 15 would"},
	} {
		l := limit(time.Date(2026, 3, 29, 0, 30, 0, 0, time.UTC), time.Minute, 60, 100, 5)
		l.Size, l.Keys, l.KeysDenied, l.KeysLasting, l.Windows = 10, 100, 20, tc.lasting, tc.windows
		l.Peaks = []report.Peak{{Units: 3, Keys: 80}, {Units: tc.peak, Keys: 20}}
		page := write(t, wrap(time.Unix(0, 0), time.Unix(60, 0), l))
		for _, text := range []string{rate, burst} {
			if got, want := strings.Contains(page, text), strings.HasPrefix(tc.says, text); got != want {
				t.Errorf("%s: has %q: %t, want %t", tc.name, text, got, want)
			}
		}
		if text := strings.ReplaceAll(page, "\u00a0", ""); !strings.Contains(text, tc.says) {
			t.Errorf("%s: lacks %q", tc.name, tc.says)
		}
	}
}

// TestIsReport guards that reports are distinguished from other files by their beginning.
func TestIsReport(t *testing.T) {
	page := write(t, wrap(time.Unix(0, 0), time.Unix(60, 0)))
	for text, want := range map[string]bool{
		page[:report.Recognized]:               true,
		page[:100]:                             false,
		"":                                     false,
		"<!DOCTYPE html>\n<title>Home</title>": false,
		"notes\n<title>Rate limits, replayed: 2026": false,
	} {
		if got := report.IsReport([]byte(text)); got != want {
			t.Errorf("%.60q: got %t", text, got)
		}
	}
}
