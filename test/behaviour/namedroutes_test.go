package behaviour

import (
	"fmt"
	"strings"
	"testing"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// TestNamedRoutes guards what docs/directive.md says of named routes: Caddy keeps only the
// first of the handlers in one if none has a matcher, and all of them in a route.
func TestNamedRoutes(t *testing.T) {
	t.Parallel()
	const handlers = "rate_limit {\nkey %s\nsize 1\n}\nrate_limit {\nsize 5\n}\nrespond limited\n"
	for _, tc := range []struct{ name, route, want string }{
		{"merged", handlers, ""},
		{"in a route", "route {\n" + handlers + "}\n", "limited"},
	} {
		s := sitetest.StartConfig(t, sitetest.Config{Sites: "&(shared) {\n" + fmt.Sprintf(tc.route, t.Name()+strings.Fields(tc.name)[0]) + "}\n", Site: "invoke shared"})
		if a := s.Get("/"); a.StatusCode != 200 || a.Text != tc.want {
			t.Errorf("%s: got %+v, want the body %q", tc.name, a, tc.want)
		}
		if a := s.Get("/"); a.StatusCode != 429 {
			t.Errorf("%s: the first limit is gone: got %+v", tc.name, a)
		}
	}
}
