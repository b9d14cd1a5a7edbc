package behaviour

import (
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// TestRequestsAreCountedOnce guards that a request is counted once, however many
// handlers it passes and however it ends, by its outcome in the end.
func TestRequestsAreCountedOnce(t *testing.T) {
	t.Parallel()
	const first, second = "rate_limit a {\nrate 100/1h\n}\n", "rate_limit b {\nkey {query.b}\nrate 1/1h\ncost {query.cost}\n}\n"
	cut := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "10")
		_, _ = w.Write([]byte("cut")) // the connection is closed then, and Caddy's handlers panic
	}))
	defer cut.Close()
	nobody := redistest.FreeAddr(t)
	undecided := "rate_limit {\nredis " + nobody + "\non_error allow\n}"
	for _, tc := range []struct {
		name, global, site string
		paths              string // of requests, one after the other
		want               counts
	}{
		{"one handler", "", first + "respond ok", "/ /", counts{telemetry.CheckedAdmitted: 2}},
		{"two handlers", "", "route {\n" + first + second + "respond ok\n}", "/?b=1&cost=1 /?b=2&cost=1", counts{telemetry.CheckedAdmitted: 2}},
		{"denied by the second", "", "route {\n" + first + second + "respond ok\n}", "/?b=1&cost=1 /?b=1&cost=1", counts{telemetry.CheckedAdmitted: 1, telemetry.CheckedDenied: 1}},
		{"refused by the second", "", "route {\n" + first + second + "respond ok\n}", "/?b=1&cost=x", counts{telemetry.CheckedRefused: 1}},
		{"refused by a class", "", "rate_limit up {\nconcurrency auto {\nhigh expression int({query.b})>0\n}\n}\nrespond ok", "/?b=1 /?b=x", counts{telemetry.CheckedAdmitted: 1, telemetry.CheckedRefused: 1}},
		{"undecided by both", undecided, first + "route {\n" + second + "respond ok\n}", "/?b=1&cost=1", counts{telemetry.CheckedUndecided: 1}},
		{"an error after it", "", first + "error 404\nhandle_errors {\nrespond 404\n}", "/", counts{telemetry.CheckedAdmitted: 1}},
		{"a denial in error routes", "", first + "error 404\nhandle_errors {\n" + second + "respond 404\n}", "/?b=1&cost=1 /?b=1&cost=1", counts{telemetry.CheckedAdmitted: 2, telemetry.CheckedDenied: 1}},
		{"a denial, and a limit in error routes", "", second + "handle_errors {\n" + first + "respond 429\n}", "/?b=1&cost=1 /?b=1&cost=1", counts{telemetry.CheckedAdmitted: 1, telemetry.CheckedDenied: 1}},
		{"a proxy that gives up", "", first + "reverse_proxy " + strings.TrimPrefix(cut.URL, "http://"), "/", counts{telemetry.CheckedAdmitted: 1}},
		{"no limit", "", "rate_limit /other {\nrate 1/1h\n}\nrespond ok", "/", counts{}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := sitetest.StartConfig(t, sitetest.Config{Global: tc.global, Site: tc.site})
			for path := range strings.FieldsSeq(tc.paths) {
				if res, err := http.Get(s.URL(path)); err == nil {
					_, _ = io.Copy(io.Discard, res.Body)
					res.Body.Close()
				}
			}
			redistest.WaitFor(t, sitetest.Patience, func() error { // a response may arrive before its request has ended
				got := s.Process.Requests()
				maps.DeleteFunc(got, func(_ telemetry.Checked, n uint64) bool { return n == 0 })
				if !maps.Equal(got, tc.want) {
					return fmt.Errorf("got %v, want %v", got, tc.want)
				}
				return nil
			})
		})
	}
}

// counts is how many requests became what.
type counts = map[telemetry.Checked]uint64
