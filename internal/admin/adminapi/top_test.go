package adminapi

import (
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry/toplist"
)

// TestTopWhileCaddyStops guards that a client which watches the keys gets one answer while Caddy stops: it has
// no config then, as here, but its admin API still answers.
func TestTopWhileCaddyStops(t *testing.T) {
	b := &rule.Bucket{Path: "api", Policy: &rule.Policy{Top: toplist.New(1, func() time.Duration { return 0 })}}
	w := httptest.NewRecorder()
	if err := stream(w, httptest.NewRequest("GET", "/rate_limit/top", nil), b, topQuery{n: 1, watch: time.Hour}); err != nil {
		t.Fatal(err)
	}
	if got := w.Body.String(); strings.Count(got, "\n") != 1 || !strings.Contains(got, `"limit":"api"`) {
		t.Errorf("got %q, want one line", got)
	}
}
