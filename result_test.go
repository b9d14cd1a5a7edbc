package ratelimit

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// visit is what one rate_limit handler decided on a request.
type visit struct {
	show      families
	paths     []string
	decisions []limiter.Decision
}

// resultOfVisits returns the result of a request that several handlers saw, its
// replacer, and the fields that they set.
func resultOfVisits(visits ...visit) (*result, *caddy.Replacer, http.Header) {
	repl := caddy.NewReplacer()
	r := httptest.NewRequest("GET", "/", nil)
	r = caddyhttp.PrepareRequest(r, repl, httptest.NewRecorder(), new(caddyhttp.Server))
	h := make(http.Header)
	var res *result
	for _, v := range visits {
		c := evaluation{request: r, replacer: repl, decisions: v.decisions}
		for i, d := range v.decisions {
			c.buckets = append(c.buckets, limiter.Bucket{Name: v.paths[i], Limit: limitOf(d.Size)})
			c.of = append(c.of, configured{bucket: &bucket{policy: &policy{path: v.paths[i]}}})
		}
		res = resultOf(&c)
		res.add(&c, v.show, h)
	}
	return res, repl, h
}

var (
	roomy = limiter.Decision{Size: 100, Remaining: 90, Clear: 10 * time.Second}
	tight = limiter.Decision{Size: 5, Remaining: 1, Clear: 4 * time.Second}
	full  = limiter.Decision{Denied: true, Size: 8, Clear: 8 * time.Second, RetryAfter: 900 * time.Millisecond}
	never = limiter.Decision{Denied: true, Never: true, Size: 3, Remaining: 3}
)

// TestNeverAdmittedOutranksRetry guards that a request which one handler denies
// for a while and a later one, in an error route, never admits is not told to
// wait.
func TestNeverAdmittedOutranksRetry(t *testing.T) {
	t.Parallel()
	_, _, h := resultOfVisits(
		visit{xRateLimit, []string{"full"}, []limiter.Decision{full}},
		visit{xRateLimit, []string{"never"}, []limiter.Decision{never}},
	)
	if got, want := fieldsIn(h), "limit=8 remaining=0 clear=8.000"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// TestResultsMerge guards that several handlers on one request make one
// answer: the tightest limit shows, whichever handler it is in.
func TestResultsMerge(t *testing.T) {
	t.Parallel()
	one := func(path string, d limiter.Decision, show families) visit {
		return visit{show, []string{path}, []limiter.Decision{d}}
	}
	for _, tc := range []struct {
		name   string
		visits []visit
		want   string
	}{
		{
			"the tightest shows if it comes last",
			[]visit{one("roomy", roomy, xRateLimit), one("tight", tight, xRateLimit)},
			`limit=5 remaining=1 clear=10.000`,
		},
		{
			"the tightest shows if it comes first",
			[]visit{one("tight", tight, xRateLimit), one("roomy", roomy, xRateLimit)},
			`limit=5 remaining=1 clear=10.000`,
		},
		{
			"a denial shows after what was admitted",
			[]visit{one("tight", tight, xRateLimit), one("full", full, xRateLimit)},
			`limit=8 remaining=0 clear=8.000 reset=0.900 retry-after=1`,
		},
		{
			"what error routes admit does not hide the denial",
			[]visit{one("full", full, xRateLimit), one("roomy", roomy, xRateLimit)},
			`limit=8 remaining=0 clear=10.000 reset=0.900 retry-after=1`,
		},
		{
			"all limits of all handlers are listed",
			[]visit{
				{ietf, []string{"a", "a/b"}, []limiter.Decision{roomy, tight}},
				one("c", roomy, ietf),
			},
			`policy="a";q=100;w=100, "a/b";q=5;w=5, "c";q=100;w=100 ` +
				`ratelimit="a";r=90;t=90, "a/b";r=1;t=1, "c";r=90;t=90`,
		},
		{
			"each handler's limits show in its own families",
			[]visit{one("x", roomy, xRateLimit), one("i", tight, ietf)},
			`limit=100 remaining=90 clear=10.000 policy="i";q=5;w=5 ratelimit="i";r=1;t=1`,
		},
		{
			"headers off hides only that handler's limits",
			[]visit{one("off", tight, 0), one("x", roomy, xRateLimit)},
			`limit=100 remaining=90 clear=10.000`,
		},
		{
			"headers off does not hide how long to wait",
			[]visit{one("x", roomy, xRateLimit), one("off", full, 0)},
			`limit=100 remaining=90 clear=10.000 retry-after=1`,
		},
		{
			"headers off everywhere",
			[]visit{one("off", tight, 0), one("off2", roomy, 0)},
			``,
		},
	} {
		_, _, h := resultOfVisits(tc.visits...)
		if got := fieldsIn(h); got != tc.want {
			t.Errorf("%s:\n got %s\nwant %s", tc.name, got, tc.want)
		}
	}
}

// TestFieldValuesAreNotOverwritten guards that a later handler does not change
// the values of an earlier one where somebody has kept them: the memory they are
// in is not used again.
func TestFieldValuesAreNotOverwritten(t *testing.T) {
	t.Parallel()
	kept := make(map[string]string)
	h := make(http.Header)
	repl := caddy.NewReplacer()
	r := httptest.NewRequest("GET", "/", nil)
	r = caddyhttp.PrepareRequest(r, repl, httptest.NewRecorder(), new(caddyhttp.Server))
	for _, d := range []limiter.Decision{roomy, tight, full} {
		c := evaluation{
			request: r, replacer: repl, of: []configured{{bucket: &bucket{policy: &policy{path: "a"}}}},
			buckets: []limiter.Bucket{{Limit: limitOf(d.Size)}}, decisions: []limiter.Decision{d},
		}
		resultOf(&c).add(&c, xRateLimit|ietf, h)
		for _, values := range h {
			kept[values[0]] = strings.Clone(values[0])
		}
	}
	for got, want := range kept {
		if got != want {
			t.Errorf("%q became %q", want, got)
		}
	}
}

// TestHandlersShareOneResult guards that all handlers of a request share one
// result, and requests share none.
func TestHandlersShareOneResult(t *testing.T) {
	t.Parallel()
	v := visit{xRateLimit, []string{"a"}, []limiter.Decision{roomy}}
	res, _, _ := resultOfVisits(v, v, v)
	if len(res.buckets) != 3 {
		t.Errorf("the result of three handlers has %d limits", len(res.buckets))
	}
	if other, _, _ := resultOfVisits(v); other == res || len(other.buckets) != 1 {
		t.Errorf("another request's result has %d limits", len(other.buckets))
	}
}

// TestPlaceholders guards the value of every placeholder, for each way that a
// request can be decided.
func TestPlaceholders(t *testing.T) {
	t.Parallel()
	names := []string{"limit", "size", "remaining", "clear", "retry_after", "denied", "exceeded.name"}
	for _, tc := range []struct {
		name      string
		decisions []limiter.Decision // of limits a, b and so on
		want      []string
	}{
		{"admitted", []limiter.Decision{roomy, tight}, []string{"b", "5", "1", "10.000", "0", "false", ""}},
		{"equal room", []limiter.Decision{tight, tight}, []string{"a", "5", "1", "4.000", "0", "false", ""}},
		{"denied", []limiter.Decision{tight, full}, []string{"b", "8", "0", "8.000", "1", "true", "b"}},
		{"never", []limiter.Decision{never}, []string{"a", "3", "3", "0.000", "", "true", "a"}},
		{"never and denied", []limiter.Decision{full, never}, []string{"b", "3", "0", "8.000", "", "true", "b"}},
	} {
		paths := []string{"a", "b"}[:len(tc.decisions)]
		_, repl, _ := resultOfVisits(visit{0, paths, tc.decisions}) // headers off hides nothing here
		for i, name := range names {
			got, known := repl.GetString("http.rate_limit." + name)
			if !known || got != tc.want[i] {
				t.Errorf("%s: {http.rate_limit.%s} is %q, known %t; want %q",
					tc.name, name, got, known, tc.want[i])
			}
		}
		for _, name := range []string{"http.rate_limit", "http.rate_limit.", "http.rate_limit.limits"} {
			if got, known := repl.Get(name); known {
				t.Errorf("%s: {%s} is %q, want it unknown", tc.name, name, got)
			}
		}
	}
}

// TestPlaceholdersOfSeveralHandlers guards that later handlers show in the
// placeholders too, though the first one made them known.
func TestPlaceholdersOfSeveralHandlers(t *testing.T) {
	t.Parallel()
	_, repl, _ := resultOfVisits(
		visit{xRateLimit, []string{"roomy"}, []limiter.Decision{roomy}},
		visit{xRateLimit, []string{"full"}, []limiter.Decision{full}},
	)
	const all = "{http.rate_limit.limit} {http.rate_limit.remaining} {http.rate_limit.denied}"
	if got, want := repl.ReplaceAll(all, "?"), "full 0 true"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// TestPlaceholdersInConfig guards that what was decided can be used wherever
// Caddy takes placeholders: in later handlers, in error routes, in the access
// log.
func TestPlaceholdersInConfig(t *testing.T) {
	s := startSite(t, `
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
		a := s.get(tc.path, "X-Cost: "+tc.cost)
		if a.body != tc.body {
			t.Errorf("request %d:\n got %q\nwant %q", i+1, a.body, tc.body)
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
		e := s.lastAccess()
		if got := fmt.Sprint(e["limit"], " ", e["remaining"], " ", e["denied"]); got != tc.logged {
			t.Errorf("request %d: the access log says %s, want %s", i+1, got, tc.logged)
		}
	}
}

// TestPlaceholdersWithoutLimit guards that where no limit applied nothing is
// known: no values are left over from other requests.
func TestPlaceholdersWithoutLimit(t *testing.T) {
	s := startSite(t, `
		log_append limit {http.rate_limit.limit}
		rate_limit /limited {
			size 1
		}
		respond "admitted"
	`)
	for path, want := range map[string]any{"/limited": "default", "/": nil} {
		s.get(path)
		if got := s.lastAccess()["limit"]; got != want {
			t.Errorf("%s: limit is %v in the access log, want %v", path, got, want)
		}
	}
}
