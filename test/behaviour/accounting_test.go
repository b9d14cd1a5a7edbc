package behaviour

import (
	"testing"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// TestCountDeniedInOrder guards that limits which are checked in order count a denied
// request once, up to the one that denies it and including that, and not behind it.
func TestCountDeniedInOrder(t *testing.T) {
	const (
		before = "limit before {\nsize 100\ndrip_rate 1h\ncount_denied\n}\n"
		denies = "limit denies {\nalgorithm sliding_log\nsize 2\nwindow 1h\ncount_denied\n}\n"
		behind = "limit behind {\nsize 50\ndrip_rate 1h\ncount_denied\n}\n"
	)
	block := func(path, limits string) string {
		return "handle " + path + " {\nrate_limit x {\nkey all\naccounting in_order\n" + limits + "}\nrespond admitted\n}\n"
	}
	site := block("/all", before+denies+behind) + block("/before", before) + block("/denies", denies) + block("/behind", behind)
	for name, global := range map[string]string{
		"memory": "", "Redis": sitetest.RedisGlobal(redistest.Start(t).Addr, "timeout 1s"),
	} {
		t.Run(name, func(t *testing.T) {
			s := sitetest.StartConfig(t, sitetest.Config{Global: global, Site: site})
			for i, want := range []int{200, 200, 429, 429, 429} {
				if a := s.Get("/all"); a.StatusCode != want {
					t.Fatalf("request %d: %s, want %d", i, a, want)
				}
			}
			for path, want := range map[string]string{"/before": "94", "/behind": "47"} {
				if got := s.Get(path).Header.Get("X-RateLimit-Remaining"); got != want {
					t.Errorf("%s: room for %s after this request, want %s", path, got, want)
				}
			}
			if a := s.Get("/denies"); a.StatusCode != 429 {
				t.Errorf("/denies: %s", a)
			}
		})
	}
}
