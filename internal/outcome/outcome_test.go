package outcome

import (
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome/fieldstest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome/fieldtext"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// visit is what one rate_limit handler decided on a request.
type visit struct {
	show      Families
	paths     []string
	decisions []limiter.Decision
}

// outcomeOfVisits returns the outcome of a request that several handlers saw, its
// replacer, and the fields that they set.
func outcomeOfVisits(visits ...visit) (*Outcome, *caddy.Replacer, http.Header) {
	repl := caddy.NewReplacer()
	r := httptest.NewRequest("GET", "/", nil)
	r = caddyhttp.PrepareRequest(r, repl, httptest.NewRecorder(), new(caddyhttp.Server))
	h := make(http.Header)
	var res *Outcome
	for _, v := range visits {
		res = Of(r, repl, 0)
		add(res, len(v.decisions), func(i int) Entry {
			d := v.decisions[i]
			return Entry{Policy: policyOf(v.paths[i]), Name: v.paths[i], Limit: limitOf(d.Size), Decision: d}
		}, v.show, h)
	}
	return res, repl, h
}

// add adds what was decided on n buckets, as one handler does.
func add(o *Outcome, n int, of func(i int) Entry, show Families, h http.Header) (decider *Entry, wait time.Duration) {
	return addAt(o, n, of, show, time.Time{}, nil, h)
}

// addAt is add at some time, with what makes the wait of a denial longer.
func addAt(o *Outcome, n int, of func(i int) Entry, show Families, at time.Time, longer func(*Entry, time.Duration) time.Duration, h http.Header) (decider *Entry, wait time.Duration) {
	before := o.Grow(n, at)
	for i := range n {
		e := of(i)
		e.Families = show
		o.Append(e)
	}
	return o.Show(before, longer, h)
}

var (
	roomy           = limiter.Decision{Size: 100, Remaining: 90, Clear: 10 * time.Second}
	tight           = limiter.Decision{Size: 5, Remaining: 1, Clear: 4 * time.Second}
	tightForMinutes = limiter.Decision{Size: 5, Remaining: 1, Clear: 4 * time.Minute}
	full            = limiter.Decision{Denied: true, Size: 8, Clear: 8 * time.Second, RetryAfter: 900 * time.Millisecond}
	never           = limiter.Decision{Denied: true, Never: true, Size: 3, Remaining: 3}
)

// TestNeverAdmittedOutranksRetry guards that a request which one handler denies
// for a while and a later one, in an error route, never admits is not told to
// wait.
func TestNeverAdmittedOutranksRetry(t *testing.T) {
	t.Parallel()
	_, _, h := outcomeOfVisits(
		visit{XRateLimit, []string{"full"}, []limiter.Decision{full}},
		visit{XRateLimit, []string{"never"}, []limiter.Decision{never}},
	)
	if got, want := fieldstest.In(h), "limit=3 remaining=3 clear=8.000"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// TestResultsMerge guards that several handlers on one request make one
// answer: the tightest limit shows, whichever handler it is in.
func TestResultsMerge(t *testing.T) {
	t.Parallel()
	one := func(path string, d limiter.Decision, show Families) visit {
		return visit{show, []string{path}, []limiter.Decision{d}}
	}
	for _, tc := range []struct {
		name   string
		visits []visit
		want   string
	}{
		{
			"the tightest shows if it comes last",
			[]visit{one("roomy", roomy, XRateLimit), one("tight", tight, XRateLimit)},
			`limit=5 remaining=1 clear=10.000`,
		},
		{
			"the tightest shows if it comes first",
			[]visit{one("tight", tight, XRateLimit), one("roomy", roomy, XRateLimit)},
			`limit=5 remaining=1 clear=10.000`,
		},
		{
			"a denial shows after what was admitted",
			[]visit{one("tight", tight, XRateLimit), one("full", full, XRateLimit)},
			`limit=8 remaining=0 clear=8.000 reset=0.900 retry-after=1`,
		},
		{
			"what error routes admit does not hide the denial",
			[]visit{one("full", full, XRateLimit), one("roomy", roomy, XRateLimit)},
			`limit=8 remaining=0 clear=10.000 reset=0.900 retry-after=1`,
		},
		{
			"all limits of all handlers are listed",
			[]visit{
				{IETF, []string{"a", "a/b"}, []limiter.Decision{roomy, tight}},
				one("c", roomy, IETF),
			},
			`policy="a";q=100;w=100, "a/b";q=5;w=5, "c";q=100;w=100 ` +
				`ratelimit="a";r=90;t=90, "a/b";r=1;t=1, "c";r=90;t=90`,
		},
		{
			"each handler's limits show in its own families",
			[]visit{one("x", roomy, XRateLimit), one("i", tight, IETF)},
			`limit=100 remaining=90 clear=10.000 policy="i";q=5;w=5 ratelimit="i";r=1;t=1`,
		},
		{
			"headers off hides only that handler's limits",
			[]visit{one("off", tight, 0), one("x", roomy, XRateLimit)},
			`limit=100 remaining=90 clear=10.000`,
		},
		{
			"headers off does not hide how long to wait",
			[]visit{one("x", roomy, XRateLimit), one("off", full, 0)},
			`limit=100 remaining=90 clear=10.000 retry-after=1`,
		},
		{
			"headers off everywhere",
			[]visit{one("off", tight, 0), one("off2", roomy, 0)},
			``,
		},
	} {
		_, _, h := outcomeOfVisits(tc.visits...)
		if got := fieldstest.In(h); got != tc.want {
			t.Errorf("%s:\n got %s\nwant %s", tc.name, got, tc.want)
		}
	}
}

// TestJitterOfSeveralHandlers guards that the wait which a handler has told stays what it
// is, and that one of several blocks with jitter makes the wait for all of them longer.
func TestJitterOfSeveralHandlers(t *testing.T) {
	t.Parallel()
	const longest = `retry-after=9223372037`
	used := limiter.Decision{Size: 1, Clear: time.Second}
	for _, tc := range []struct {
		name      string
		decisions []limiter.Decision // of the handlers, and the jitter of each
		jitter    []bool
		want      string
	}{
		{"none", []limiter.Decision{full}, []bool{false}, `retry-after=1`},
		{"of the block that denies", []limiter.Decision{full}, []bool{true}, longest},
		{"of a block that admits", []limiter.Decision{roomy, full}, []bool{true, false}, `retry-after=1`},
		{"behind a block that took the last room", []limiter.Decision{used, full}, []bool{false, true}, longest},
		{"then one in an error route", []limiter.Decision{full, full}, []bool{false, true}, longest},
		{"then one in an error route that admits", []limiter.Decision{full, roomy}, []bool{false, true}, `retry-after=1`},
		{"none that helps", []limiter.Decision{never}, []bool{true}, ``},
	} {
		repl, h := caddy.NewReplacer(), make(http.Header)
		r := caddyhttp.PrepareRequest(httptest.NewRequest("GET", "/", nil), repl, httptest.NewRecorder(), new(caddyhttp.Server))
		var wait time.Duration
		for i, d := range tc.decisions {
			var longer func(*Entry, time.Duration) time.Duration
			if tc.jitter[i] {
				longer = forEver
			}
			_, wait = addAt(Of(r, repl, 0), 1, func(int) Entry {
				return Entry{Policy: policyOf("a"), Limit: limitOf(d.Size), Cost: 1, Decision: d}
			}, 0, time.Time{}, longer, h)
		}
		if got := fieldstest.In(h); got != tc.want || got != "" && !strings.HasSuffix(got, "="+fieldtext.WholeSeconds(wait)) {
			t.Errorf("%s: got %s and a wait of %v, want %s", tc.name, got, wait, tc.want)
		}
	}
}

// forEver makes any wait the longest there is.
func forEver(*Entry, time.Duration) time.Duration { return math.MaxInt64 }

// TestReset guards the time that {http.rate_limit.reset} and reset_at tell: both the same
// one, rounded up, of the limit that decides, and none that is out of range.
func TestReset(t *testing.T) {
	t.Parallel()
	at := time.Unix(1_800_000_000, int64(300*time.Millisecond))
	const years = 35 * 365 * 24 * time.Hour
	slow := limiter.Limit{Size: 1, DripInterval: years, DripSize: 1}
	window, clock := limiter.FixedWindow(10, time.Minute), limiter.ClockWindow(10, 24*time.Hour, time.Time{})
	for _, tc := range []struct {
		name    string
		entries []Entry
		longer  func(*Entry, time.Duration) time.Duration
		want    string
	}{
		{"time to spend what remains", []Entry{{Limit: limitOf(100), Decision: roomy}}, nil, "90 1800000091"},
		{"none left", []Entry{{Limit: limitOf(5), Decision: limiter.Decision{Size: 5, Clear: 4200 * time.Millisecond}}}, nil, "1 1800000001"},
		{"a window ends on the second", []Entry{{Limit: window, Decision: limiter.Decision{Size: 10, Remaining: 4, Clear: 1700 * time.Millisecond}}}, nil, "2 1800000002"},
		{"an empty window by the clock", []Entry{{Limit: clock, Decision: limiter.Decision{Size: 10, Remaining: 10}}}, nil, "57600 1800057600"},
		{"the least room", []Entry{{Limit: limitOf(100), Decision: roomy}, {Limit: limitOf(5), Decision: tight}}, nil, "1 1800000002"},
		{"equal room, the one that takes longer", []Entry{{Limit: limitOf(5), Decision: tight}, {Limit: limitOf(5, time.Minute), Decision: tightForMinutes}}, nil, "60 1800000061"},
		{"denied", []Entry{{Limit: limitOf(8), Decision: full}}, nil, "1 1800000002"},
		{"never", []Entry{{Limit: limitOf(3), Decision: never}}, nil, "3 1800000004"},
		{"requests in progress", []Entry{{Policy: &Policy{Concurrency: true}, Limit: limitOf(5), Decision: tight}}, nil, "0 1800000001"},
		{"decades", []Entry{{Limit: slow, Decision: limiter.Decision{Size: 1, Clear: years}}}, nil, "1103760000 2903760001"},
		{"longer than any time", []Entry{{Limit: slow, Decision: limiter.Decision{Denied: true, Size: 1, Clear: years, RetryAfter: years}}}, forEver, "9223372037 11023372038"},
	} {
		repl := caddy.NewReplacer()
		r := caddyhttp.PrepareRequest(httptest.NewRequest("GET", "/", nil), repl, httptest.NewRecorder(), new(caddyhttp.Server))
		addAt(Of(r, repl, 0), len(tc.entries), func(i int) Entry {
			e := tc.entries[i]
			if e.Policy == nil {
				e.Policy = policyOf("a")
			}
			return e
		}, 0, at, tc.longer, make(http.Header))
		if got := repl.ReplaceAll("{http.rate_limit.reset} {http.rate_limit.reset_at}", "?"); got != tc.want {
			t.Errorf("%s: got %s, want %s", tc.name, got, tc.want)
		}
	}
}

// TestViolatedPolicies guards that the placeholder has all limits that denied, once each and by
// the names that RateLimit-Policy has, as an array that is valid in JSON.
func TestViolatedPolicies(t *testing.T) {
	t.Parallel()
	entry := func(path, name string, families Families, d limiter.Decision) Entry {
		return Entry{Policy: policyOf(path), Name: name, Families: families, Limit: limitOf(8), Decision: d}
	}
	dry, pool := full, full
	dry.DryRun, pool.Pool, pool.Denied = true, true, false
	for _, tc := range []struct {
		want    string
		entries []Entry
	}{
		{`[]`, []Entry{entry("a", "a", 0, roomy)}},
		{`[]`, []Entry{entry("a", "a", 0, roomy), entry("b", "b", 0, dry), entry("c", "c", 0, pool)}},
		{`["b"]`, []Entry{entry("a", "a", 0, roomy), entry("b", "b", 0, full)}},
		{`["a/b", "c"]`, []Entry{entry("a/b", "a", 0, full), entry("b", "b", 0, dry), entry("c", "c", 0, never)}},
		{`["b", "ab"]`, []Entry{entry("b", "b", 0, full), entry("ab", "ab", 0, full), entry("b", "b", 0, full)}},
		{`["default", "default#2"]`, []Entry{entry("default", "x", IETF, full), entry("default", "y", IETF, full)}},
	} {
		repl := caddy.NewReplacer()
		r := caddyhttp.PrepareRequest(httptest.NewRequest("GET", "/", nil), repl, httptest.NewRecorder(), new(caddyhttp.Server))
		for i := range tc.entries { // of a handler each
			add(Of(r, repl, 0), 1, func(int) Entry { return tc.entries[i] }, tc.entries[i].Families, make(http.Header))
		}
		if got := repl.ReplaceAll("{http.rate_limit.violated_policies}", "?"); got != tc.want {
			t.Errorf("got %s, want %s", got, tc.want)
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
		add(Of(r, repl, 0), 1, func(int) Entry {
			return Entry{Policy: policyOf("a"), Limit: limitOf(d.Size), Decision: d}
		}, XRateLimit|IETF, h)
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

// TestHandlersShareOneOutcome guards that all handlers of a request share one
// outcome, and requests share none.
func TestHandlersShareOneOutcome(t *testing.T) {
	t.Parallel()
	v := visit{XRateLimit, []string{"a"}, []limiter.Decision{roomy}}
	res, _, _ := outcomeOfVisits(v, v, v)
	if len(res.entries) != 3 {
		t.Errorf("the result of three handlers has %d limits", len(res.entries))
	}
	if other, _, _ := outcomeOfVisits(v); other == res || len(other.entries) != 1 {
		t.Errorf("another request's result has %d limits", len(other.entries))
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
		{"never and denied", []limiter.Decision{full, never}, []string{"b", "3", "3", "8.000", "", "true", "b"}},
	} {
		paths := []string{"a", "b"}[:len(tc.decisions)]
		_, repl, _ := outcomeOfVisits(visit{0, paths, tc.decisions}) // headers off hides nothing here
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
	_, repl, _ := outcomeOfVisits(
		visit{XRateLimit, []string{"roomy"}, []limiter.Decision{roomy}},
		visit{XRateLimit, []string{"full"}, []limiter.Decision{full}},
	)
	const all = "{http.rate_limit.limit} {http.rate_limit.remaining} {http.rate_limit.denied}"
	if got, want := repl.ReplaceAll(all, "?"), "full 0 true"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}
