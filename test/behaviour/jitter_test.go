package behaviour

import (
	"fmt"
	"strings"
	"testing"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// TestJitterSlots guards that clients which one bucket denies together are told one time each, a drip
// apart, in Memory and in Redis, by the first handler and behind one that admits; that each bucket has
// times of its own; and that all that tells of the wait has the same one.
func TestJitterSlots(t *testing.T) {
	const options = "key {header.Key}\nsize 1\ndrip_rate 25s\njitter slots\nheaders x-ratelimit ratelimit-11\nlog\n"
	for name, global := range map[string]string{"memory": "", "Redis": sitetest.RedisGlobal(redistest.Start(t).Addr, sitetest.LongTimeout)} {
		t.Run(name, func(t *testing.T) {
			s := sitetest.StartConfig(t, sitetest.Config{Global: global, Site: "route {\nrate_limit wide 100/s\nrate_limit tight {\n" + options + "}\nrespond ok\n}\n" +
				"handle_errors {\nrespond `{err.message}, {http.rate_limit.retry_after}`\n}"})
			for _, key := range []string{"a", "b"} {
				s.Get("/", "Key: "+key)
				for i, want := range []int{25, 50, 75, 25} {
					a := s.Get("/", "Key: "+key)
					if got := a.Header.Get("Retry-After"); got != fmt.Sprint(want) {
						t.Fatalf("denial %d of %s: Retry-After %s, want %d", i+1, key, got, want)
					}
					if want := fmt.Sprintf("rate limit tight exceeded: retry after %d s, %[1]d", want); a.Text != want {
						t.Errorf("got body %q, want %q", a.Text, want)
					}
					if got := a.Header.Get("RateLimit"); !strings.HasSuffix(got, fmt.Sprintf(`"tight";r=0;t=%d`, want)) {
						t.Errorf("got RateLimit %s, want t=%d", got, want)
					}
					logged := s.LastAccess()["rate_limit"].(map[string]any)["retry_after"].(float64)
					if logged > float64(want) || logged <= float64(want-25) {
						t.Errorf("the access log has %v, want %d", logged, want)
					}
				}
			}
		})
	}
}
