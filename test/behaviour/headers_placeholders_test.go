package behaviour

import (
	"fmt"
	"strings"
	"testing"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// TestPlaceholdersInConfig guards that what was decided can be used wherever
// Caddy takes placeholders: in later handlers, in error routes, in the access
// log.
func TestPlaceholdersInConfig(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, `
		log_append limit {http.rate_limit.limit}
		log_append remaining {http.rate_limit.remaining}
		log_append denied {http.rate_limit.denied}
		route {
			rate_limit all {
				size 3
				drip_rate 2s
				limit costly {
					match /costly
					size 2
					cost {header.X-Cost}
				}
			}
			header X-Left {http.rate_limit.remaining}
			respond <<TEXT
				limit {http.rate_limit.limit} size {http.rate_limit.size} remaining {http.rate_limit.remaining}
				clear {http.rate_limit.clear} retry {http.rate_limit.retry_after}
				denied {http.rate_limit.denied} exceeded {http.rate_limit.exceeded.name}
				TEXT
		}
		handle_errors {
			header X-Error-Left {http.rate_limit.remaining}
			header X-Error "{err.message}"
			respond <<TEXT
				limit {http.rate_limit.limit} size {http.rate_limit.size} remaining {http.rate_limit.remaining}
				clear {http.rate_limit.clear} retry {http.rate_limit.retry_after}
				denied {http.rate_limit.denied} exceeded {http.rate_limit.exceeded.name}
				TEXT
		}
	`)
	for i, tc := range []struct{ path, cost, body, left, errorLeft, logged string }{
		{"/costly", "1", "limit all/costly size 2 remaining 1\nclear 2.000 retry 0\ndenied false exceeded ",
			"1", "", "all/costly 1 false"},
		{"/", "", "limit all size 3 remaining 1\nclear 4.000 retry 0\ndenied false exceeded ",
			"1", "", "all 1 false"},
		{"/costly", "2", "limit all/costly size 2 remaining 1\nclear 4.000 retry 1\ndenied true exceeded all/costly",
			"", "1", "all/costly 1 true"},
		{"/costly", "3", "limit all/costly size 2 remaining 1\nclear 4.000 retry \ndenied true exceeded all/costly",
			"", "1", "all/costly 1 true"},
	} {
		a := s.Get(tc.path, "X-Cost: "+tc.cost)
		if a.Text != tc.body {
			t.Errorf("request %d:\n got %q\nwant %q", i+1, a.Text, tc.body)
		}
		if got := a.Header.Get("X-Left"); got != tc.left {
			t.Errorf("request %d: a later handler sees remaining %q, want %q", i+1, got, tc.left)
		}
		text := a.Header.Get("X-Error")
		if a.StatusCode == 429 && !strings.Contains(text, "limit all/costly exceeded") {
			t.Errorf("request %d: an error route sees error %q", i+1, text)
		}
		if got := a.Header.Get("X-Error-Left"); got != tc.errorLeft {
			t.Errorf("request %d: an error route sees remaining %q, want %q", i+1, got, tc.errorLeft)
		}
		e := s.LastAccess()
		if got := fmt.Sprint(e["limit"], " ", e["remaining"], " ", e["denied"]); got != tc.logged {
			t.Errorf("request %d: the access log says %s, want %s", i+1, got, tc.logged)
		}
	}
}

// TestPlaceholdersWithoutLimit guards that where no limit applied nothing is
// known: no values are left over from other requests.
func TestPlaceholdersWithoutLimit(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, `
		log_append limit {http.rate_limit.limit}
		rate_limit /limited {
			size 1
		}
		respond "admitted"
	`)
	for path, want := range map[string]any{"/limited": "default", "/": nil} {
		s.Get(path)
		if got := s.LastAccess()["limit"]; got != want {
			t.Errorf("%s: limit is %v in the access log, want %v", path, got, want)
		}
	}
}
