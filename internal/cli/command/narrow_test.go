package command

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/admin/adminjson"
)

// TestFitsNarrowTerminals guards that what status and limits print fits into 80 columns, with
// Redis and all counts of policies, and that every number is still there.
func TestFitsNarrowTerminals(t *testing.T) {
	const counts = `"admitted": 123456789, "denied": 23456789, "spared": 3456789, "would_deny": 456789, "over_size": 56789, "delayed": 6789, "bans": 789, "borrowed": 89`
	var status adminjson.Status
	var limits adminjson.Limits
	for into, answer := range map[any]string{
		&status: `{"configured": true, "version": "v1.2.3-0.20261126093958-389cfa0a1b2c", "store": "redis", "on_error": "fallback", "rates_over": 60,
			"memory": {"buckets": 123456, "max_keys": 1000000},
			"requests": {"admitted": 1234567890, "denied": 234567890, "undecided": 34567890, "refused": 4567890, "early_data": 567890},
			"servers": [{"address": "redis.example.com:6379", "state": "down", "down": 125, "reason": "connection refused",
				"connections": {"in_use": 1, "idle": 0}, "calls": 987654321, "requests": 1987654321}],
			"limits": [{"path": "api/search", ` + counts + `, "by": {"fallback": 234567}, "rates": {"admitted": 12345.67, "denied": 2345.67, "fallback": 345.67}}]}`,
		&limits: `{"limits": [{"name": "api/search", "path": "api/search", "algorithm": "leaky_bucket", "size": 1000, "drip_rate": 3.6, "drip_size": 1, "cost": 1,
			"key": "{http.request.header.X-Tenant}{http.request.header.X-Region}", "hosts": ["example.com"], "server": "srv0",
			"match": [{"header": {"X-Tenant": ["*"], "X-Region": ["eu", "us"]}, "method": ["POST", "PUT"]}], "buckets": 123456, ` + counts + `}]}`,
	} {
		if err := json.Unmarshal([]byte(answer), into); err != nil {
			t.Fatal(err)
		}
	}
	for _, tc := range []struct {
		name  string
		print func(io.Writer) error
		want  []string // lines, ignoring spaces
	}{
		{"status", func(w io.Writer) error { return printStatus(w, &status) }, []string{
			"SERVER redis.example.com:6379", "STATE down for 2m5s: connection refused", "REQUESTS 1987654321",
			"LIMIT api/search", "ADMITTED 123456789", "SPARED 3456789", "DENIED/S 2345.7", "BORROWED 89", "FALLBACK 234567",
		}},
		{"limits", func(w io.Writer) error { return printLimits(w, &limits) }, []string{
			"LIMIT api/search", "ALGORITHM leaky_bucket", "SIZE 1000", "RATE OR WINDOW 1 each 3.6s", "SITE example.com", "BUCKETS 123456", "DENIED 23456789", "BANS 789",
		}},
	} {
		t.Setenv("COLUMNS", "80")
		var out bytes.Buffer
		if err := tc.print(&out); err != nil && !errors.Is(err, ErrProblems) {
			t.Fatal(err)
		}
		lines := make(map[string]bool)
		for line := range strings.Lines(out.String()) {
			if n := utf8.RuneCountInString(line); n > len("\n")+80 {
				t.Errorf("%s: got a line of %d: %s", tc.name, n, line)
			}
			lines[strings.Join(strings.Fields(line), " ")] = true
		}
		for _, want := range tc.want {
			if !lines[want] {
				t.Errorf("%s: got\n%s\nwant the line %q", tc.name, out.String(), want)
			}
		}
	}
}
