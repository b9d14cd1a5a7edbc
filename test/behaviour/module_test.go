package behaviour

import (
	"slices"
	"testing"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// TestDirectiveOrder guards where Caddy puts the directive: behind what rewrites requests, and
// before each name of the directive that checks passwords, so that wrong ones count.
func TestDirectiveOrder(t *testing.T) {
	t.Parallel()
	for _, auth := range []string{"basic_auth", "basicauth"} {
		t.Run(auth, func(t *testing.T) {
			s := sitetest.StartConfig(t, sitetest.Config{Site: auth + " {\nadmin " + rightHash + "\n}\nrespond in\n" +
				"rate_limit {\nmatch path /rewritten\nsize 3\ndrip_rate 1h\ncount status 401\n}\n" +
				"rewrite / /rewritten"})
			var got []int
			for range 5 {
				status, _ := sitetest.Ask(t.Context(), withPassword("http://"+s.Addr, "wrong"))
				got = append(got, status)
			}
			if want := []int{401, 401, 401, 429, 429}; !slices.Equal(got, want) {
				t.Errorf("got %d, want %d", got, want)
			}
		})
	}
}
