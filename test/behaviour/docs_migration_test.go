package behaviour

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome/fieldstest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/configtest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/doctest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/filetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// migrationSection returns a section of docs/migration.md, by its heading, and the first
// Caddyfile in it.
func migrationSection(t *testing.T, heading string) (text, site string) {
	t.Helper()
	page := filetest.Read(t, "docs/migration.md")
	_, text, _ = strings.Cut(string(page), "\n## "+heading+"\n")
	text, _, _ = strings.Cut(text, "\n## ")
	for _, b := range doctest.Fenced.FindAllStringSubmatch(text, -1) {
		if b[2] == "caddyfile" {
			return text, b[3]
		}
	}
	t.Fatalf("docs/migration.md has no Caddyfile under %q", heading)
	return "", ""
}

// nginxRequests is how limit_req of nginx 1.22 decides requests of one key: it counts, in
// thousandths of a request, by how much they exceed the rate.
type nginxRequests struct {
	perSecond, burst, delay int64 // the rate and what is exempt from delays, in thousandths too
	excess, last            int64 // at the time of the last request admitted, in ms
	used                    bool
}

// ask decides a request at a time in ms, and returns for how many it is delayed.
func (n *nginxRequests) ask(now int64) (delay int64, admitted bool) {
	excess := int64(0)
	if n.used {
		excess = max(n.excess-n.perSecond*(now-n.last)/1000+1000, 0)
	}
	if excess > n.burst {
		return 0, false
	}
	n.excess, n.last, n.used = excess, now, true
	return max(excess-n.delay, 0) * 1000 / n.perSecond, true
}

// TestNginxEquivalents guards the table of limit_req in docs/migration.md: what each row
// has on either side admits and delays the same requests of random traces, to the
// millisecond.
func TestNginxEquivalents(t *testing.T) {
	t.Parallel()
	text, _ := migrationSection(t, "From nginx")
	rows := regexp.MustCompile("(?m)^\\| `limit_req zone=api(.*);` \\| (.*) \\|$").FindAllStringSubmatch(text, -1)
	if len(rows) != 4 {
		t.Errorf("found %d rows, want 4", len(rows))
	}
	for _, row := range rows {
		t.Run(row[1], func(t *testing.T) {
			options := strings.NewReplacer("`", "", ", ", "\n").Replace(row[2])
			adapted, err := configtest.Adapt(":8080\n\nrate_limit {\n\tdrip_rate 100ms\n\t" + strings.ReplaceAll(options, "\n", "\n\t") + "\n}\n")
			if err != nil {
				t.Fatal(err)
			}
			var found struct {
				Apps struct {
					HTTP struct {
						Servers map[string]struct {
							Routes []struct {
								Handle []struct{ Limits []*config.Limit }
							}
						}
					}
				}
			}
			if err := json.Unmarshal(adapted, &found); err != nil {
				t.Fatal(err)
			}
			l, _ := configtest.ReadyLimit(t, found.Apps.HTTP.Servers["srv0"].Routes[0].Handle[0].Limits[0])

			random := rand.New(rand.NewPCG(1, 2))
			denied, delayed := 0, 0
			for range 50 {
				nginx := nginxRequests{perSecond: 10_000}
				_, _ = fmt.Sscanf(row[1]+" ", " burst=%d", &nginx.burst)
				if _, set, found := strings.Cut(row[1], "delay="); found {
					_, _ = fmt.Sscan(set, &nginx.delay)
				} else if strings.Contains(row[1], "nodelay") {
					nginx.delay = nginx.burst
				}
				nginx.burst *= 1000
				nginx.delay *= 1000
				now := int64(0)
				memory := limiter.NewMemoryWithClock(func() time.Duration { return time.Duration(now) * time.Millisecond })
				for range 200 {
					now += random.Int64N(1 + random.Int64N(400))
					q, err := rule.Evaluate(sitetest.NewRequest().Request, []*rule.Limit{l}, time.Time{})
					if err != nil {
						t.Fatal(err)
					}
					if err := q.Decide(memory, rule.How{}); err != nil {
						t.Fatal(err)
					}
					got, admitted := q.Entries()[0].Delay, !q.Entries()[0].Decision.Denied
					q.Release()
					wait, want := nginx.ask(now)
					if admitted != want || admitted && got != time.Duration(wait)*time.Millisecond {
						t.Fatalf("after %d ms got %t after %v, nginx has %t after %d ms", now, admitted, got, want, wait)
					}
					if !want {
						denied++
					} else if wait > 0 {
						delayed++
					}
				}
			}
			if waits := strings.Contains(options, "max_delay"); denied < 100 || delayed < 100 == waits {
				t.Errorf("%d of 10000 requests were denied and %d delayed", denied, delayed)
			}
		})
	}
}

// TestNginxExample guards the example for nginx in docs/migration.md with a burst. nginx
// answers nine requests at once with three that pass, three that wait for 100, 200 and
// 300 ms, and three with status 503.
func TestNginxExample(t *testing.T) {
	_, site := migrationSection(t, "From nginx")
	s := sitetest.Start(t, site+"respond ok")
	var mu sync.Mutex
	var passed []time.Duration
	rejected := 0
	start := time.Now()
	redistest.Together(t, 9, func(int) {
		status, _ := sitetest.Ask(t.Context(), s.URL("/api/"))
		mu.Lock()
		defer mu.Unlock()
		switch status {
		case http.StatusOK:
			passed = append(passed, time.Since(start))
		case http.StatusServiceUnavailable:
			rejected++
		default:
			t.Errorf("got status %d", status)
		}
	})
	slices.Sort(passed)
	if len(passed) != 6 || rejected != 3 {
		t.Fatalf("%d passed and %d were rejected, want 6 and 3", len(passed), rejected)
	}
	for i, after := range passed {
		if earliest := time.Duration(i-2) * 100 * time.Millisecond; after < earliest {
			t.Errorf("request %d passed after %v, want at least %v", i+1, after, earliest)
		}
	}
	if a := s.Get("/"); a.String() != "200" {
		t.Errorf("another path got %s", a)
	}
}

// TestRedisCellReplies guards the table of calls in docs/internals/edge-cases.md: the fields
// that docs/migration.md names have the numbers of redis-cell's reply.
func TestRedisCellReplies(t *testing.T) {
	t.Parallel()
	_, site := migrationSection(t, "From redis-cell")
	page := filetest.Read(t, "docs/internals/edge-cases.md")
	s := sitetest.Start(t, site+"respond ok")
	rows := regexp.MustCompile(`(?m)^\| ([\d.]+s) \| (\d+) \| ([^|]+) \|$`).FindAllStringSubmatch(string(page), -1)
	if len(rows) != 9 {
		t.Errorf("found %d calls, want 9", len(rows))
	}
	var before time.Duration
	for _, row := range rows {
		at, err := time.ParseDuration(row[1])
		if err != nil {
			t.Fatal(err)
		}
		s.Clock.Advance(at - before)
		before = at
		a := s.Get("/", "X-User: user123", "X-Units: "+row[2])
		limited, wait := 0, "−1"
		if a.StatusCode == http.StatusTooManyRequests {
			limited = 1
		}
		if after := a.Header.Get("Retry-After"); after != "" {
			wait = after
		}
		seconds, part, _ := strings.Cut(a.Header.Get("X-RateLimit-Clear"), ".")
		reset := fieldstest.Number(seconds)
		if fieldstest.Number(part) > 0 {
			reset++
		}
		got := fmt.Sprintf("%d, %s, %s, %s, %d", limited, a.Header.Get("X-RateLimit-Limit"), a.Header.Get("X-RateLimit-Remaining"), wait, reset)
		if got != row[3] {
			t.Errorf("at %s, a quantity of %s: got %s, want %s", row[1], row[2], got, row[3])
		}
	}
}
