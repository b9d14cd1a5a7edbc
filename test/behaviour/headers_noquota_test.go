package behaviour

import (
	"cmp"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome/fieldstest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// TestPlansWithoutAQuota guards that a size of 0 from a placeholder is a plan and no mistake, whatever
// the limit is: its requests get 429 without a Retry-After, as no wait would help, and nothing in the
// log, and use up nothing of what other plans share with them.
func TestPlansWithoutAQuota(t *testing.T) {
	t.Parallel()
	const (
		denied    = "429 limit=0 remaining=0 retry-after="
		two       = "200 limit=2 remaining=1 retry-after="
		free      = "200 limit=0 remaining=0 retry-after="
		unlimited = "200 limit= remaining= retry-after="
		hourly    = "size {header.Plan}\ndrip_rate 1h\n"
	)
	limit := func(name, options string) string { return "limit " + name + " {\nkey all\n" + options + "\n}\n" }
	outer := func(block, within string) string { return block + limit("outer", "size 3\ndrip_rate 1h\n"+within) }
	for _, tc := range []struct {
		name, block string
		none        [2]string // what two requests get whose plan is 0; denied unless set
		some        string    // what the next one gets, whose plan is 2; two unless set
	}{
		{name: "leaky bucket", block: limit("a", hourly)},
		{name: "token bucket", block: limit("a", hourly+"algorithm token_bucket")},
		{name: "fixed window", block: limit("a", "size {header.Plan}\nalgorithm fixed_window\nwindow 1h\nwindow_start first")},
		{name: "period", block: limit("a", "size {header.Plan}\nalgorithm fixed_window\nperiod year")},
		{name: "sliding window", block: limit("a", "size {header.Plan}\nalgorithm sliding_window\nwindow 1h")},
		{name: "sliding log", block: limit("a", "size {header.Plan}\nalgorithm sliding_log\nwindow 1h")},
		{name: "size of a rate", block: limit("a", "rate 1/h\nsize {header.Plan}")},
		{name: "drips", block: limit("a", "size 2\ndrip_rate 1h\ndrip_size {header.Plan}")},
		{name: "size and drips", block: limit("a", hourly+"drip_size {header.Plan}")},
		{name: "factor", block: limit("a", hourly+"factor 0.5"), some: "200 limit=4 remaining=3 retry-after="},
		{name: "in progress", block: limit("a", "concurrency {header.Plan}")},
		{name: "places to wait for", block: limit("a", "concurrency {header.Plan}\nmax_delay 10s")},
		{name: "delayed", block: limit("a", hourly+"max_delay 2h")},
		{name: "bodies", block: limit("a", hourly+"cost body")},
		{name: "responses", block: limit("a", hourly+"actual_cost {http.response.header.X-Cost}")},
		{name: "some responses", block: limit("a", hourly+"count status 200")},
		{name: "some responses, known late", block: limit("a", hourly+"count status 200\nhold off"), some: "200 limit=2 remaining=2 retry-after="},
		{name: "denied count", block: limit("a", hourly+"count_denied")},
		{name: "leases", block: limit("a", hourly+"consistency lease 100ms")},
		{name: "eventual", block: limit("a", hourly+"consistency eventual 100ms")},
		{name: "banned", block: limit("a", hourly+"ban 1h"), some: "429 limit=2 remaining=0 retry-after=3600"},
		{
			name: "above the size", block: limit("a", hourly+"soft 1"), // which is what soft says
			none: [2]string{free, "429 limit=0 remaining=0 retry-after=3600"}, some: "200 limit=2 remaining=0 retry-after=",
		},
		{name: "dry run", block: limit("a", hourly+"dry_run"), none: [2]string{unlimited, unlimited}, some: unlimited},
		{name: "free", block: limit("a", hourly+"cost 0"), none: [2]string{free, free}, some: "200 limit=2 remaining=2 retry-after="},
		{name: "within another", block: outer("", limit("a", hourly))},
		{name: "around another", block: limit("a", hourly+limit("inner", "size 3\ndrip_rate 1h"))},
		{name: "beside a waiting room", block: outer(limit("a", hourly), "max_delay 2h")},
		{
			name: "borrows", block: limit("a", hourly+"borrow spare") + limit("spare", "size 1\ndrip_rate 1h\npool"),
			none: [2]string{free, "429 limit=0 remaining=0 retry-after=3600"},
		},
		{
			name: "lends", block: limit("a", "size 1\ndrip_rate 1h\nborrow spare") + limit("spare", hourly+"pool"),
			none: [2]string{"200 limit=1 remaining=0 retry-after=", "429 limit=1 remaining=0 retry-after=3600"}, some: "200 limit=1 remaining=0 retry-after=",
		},
		{name: "after a larger plan", block: limit("b", "match header Plan 0\nsize 3\ndrip_rate 1h") + limit("a", hourly)},
		{name: "of GitHub", block: "headers github\n" + limit("a", hourly)},
	} {
		for store, global := range map[string]string{"memory": "", "Redis": "redis"} {
			t.Run(tc.name+"/"+store, func(t *testing.T) {
				if global != "" {
					global = sitetest.RedisGlobal(redistest.Start(t).Addr, sitetest.LongTimeout)
				}
				s := sitetest.StartConfig(t, sitetest.Config{Global: global, Site: "rate_limit {\n" + tc.block + "}\nrespond ok"})
				plans := []string{"0", "0", "2"}
				for i, want := range []string{cmp.Or(tc.none[0], denied), cmp.Or(tc.none[1], denied), cmp.Or(tc.some, two)} {
					a := s.Send("POST", "/", "Plan: "+plans[i])
					h := a.Header
					if got := fmt.Sprintf("%d limit=%s remaining=%s retry-after=%s", a.StatusCode,
						h.Get("X-RateLimit-Limit"), h.Get("X-RateLimit-Remaining"), h.Get("Retry-After")); got != want {
						t.Errorf("request %d: got %s, want %s", i+1, got, want)
					}
				}
				if lines := s.Log("error", sitetest.OwnLogger); len(lines) > 0 {
					t.Errorf("logged %v", lines)
				}
			})
		}
	}
}

// TestWhatIsToldWithoutAQuota guards that nothing tells clients or operators of a time after which a
// plan without a quota would have one, and that what costs nothing is no denial.
func TestWhatIsToldWithoutAQuota(t *testing.T) {
	t.Parallel()
	site := func(options string) string {
		return "rate_limit {\nlog\nheaders x-ratelimit ratelimit-11\nlimit a {\nkey all\nsize {header.Plan}\ndrip_rate 1h\ncost {header.Cost}\n" + options + "\n}\n}\n"
	}
	const text = "denied={http.rate_limit.denied} size={http.rate_limit.size} remaining={http.rate_limit.remaining} " +
		"retry_after={http.rate_limit.retry_after} reset={http.rate_limit.reset} dry_run={http.rate_limit.dry_run}"
	s := sitetest.Start(t, "log\nhandle /plain {\n"+site("")+"}\nhandle /dry {\n"+strings.Replace(site("dry_run"), "limit a", "limit b", 1)+"}\n"+
		"handle /github {\n"+strings.Replace(strings.Replace(site(""), "limit a", "limit c", 1), "x-ratelimit ratelimit-11", "github", 1)+"}\n"+
		"respond `"+text+"`\nhandle_errors {\nrespond `"+text+"`\n}")
	plan := func(cost string) []string { return []string{"Plan: 0", "Cost: " + cost} }
	s.Run(
		sitetest.Step{
			Path: "/plain", Header: plan("1"), Want: `429 limit=0 remaining=0 clear=0.000 policy="a";q=0;w=0 ratelimit="a";r=0`,
			Text: "denied=true size=0 remaining=0 retry_after= reset=0 dry_run=",
		},
		sitetest.Step{
			Path: "/plain", Header: plan("0"), Want: `200 limit=0 remaining=0 clear=0.000 policy="a";q=0;w=0 ratelimit="a";r=0`,
			Text: "denied=false size=0 remaining=0 retry_after=0 reset=0 dry_run=",
		},
		sitetest.Step{
			Path: "/dry", Header: plan("1"), Want: `200`,
			Text: strings.Replace(text, "{http.rate_limit.dry_run}", "b", 1), // nothing decided
		},
	)
	before := time.Now().Unix()
	a := s.Get("/github", plan("1")...)
	if got, reset := fieldstest.In(a.Header), a.Header.Get("X-RateLimit-Reset"); got != "limit=0 remaining=0 used=0 reset="+reset || int64(field(t, reset)) > time.Now().Unix()+1 || int64(field(t, reset)) < before {
		t.Errorf("got %s, want nothing but a reset now", got)
	}
	if got := fmt.Sprint(s.LastAccess()["rate_limit"]); got != "map[by:memory limit:c remaining:0 result:denied]" {
		t.Errorf("the access log has %s", got)
	}
}
