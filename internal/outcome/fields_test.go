package outcome

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"net/http"
	"net/textproto"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome/fieldstest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome/fieldtext"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/testseed"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// TestSeconds guards that times are shown exactly to the millisecond and never
// too short: a client that waits as long as the fields say is admitted.
func TestSeconds(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		d           time.Duration
		millis      string
		whole       string
		wholeOrZero int64
	}{
		{0, "0.000", "1", 0},
		{1, "0.001", "1", 1},
		{time.Microsecond, "0.001", "1", 1},
		{999 * time.Microsecond, "0.001", "1", 1},
		{time.Millisecond, "0.001", "1", 1},
		{1001 * time.Microsecond, "0.002", "1", 1},
		{999 * time.Millisecond, "0.999", "1", 1},
		{999_001 * time.Microsecond, "1.000", "1", 1},
		{time.Second, "1.000", "1", 1},
		{time.Second + 1, "1.001", "2", 2},
		{time.Second + time.Microsecond, "1.001", "2", 2},
		{1500 * time.Millisecond, "1.500", "2", 2},
		{1999_999 * time.Microsecond, "2.000", "2", 2},
		{61*time.Second + 10*time.Millisecond, "61.010", "62", 62},
		{(1 << 50) * time.Microsecond, "1125899906.843", "1125899907", 1125899907},
		{(1<<50 - 1) * time.Microsecond, "1125899906.843", "1125899907", 1125899907},
		{math.MaxInt64, "9223372036.855", "9223372037", 9223372037}, // with jitter 1e300
	} {
		if got := seconds(tc.d); got != tc.millis {
			t.Errorf("seconds(%v) = %q, want %q", tc.d, got, tc.millis)
		}
		if got := fieldtext.WholeSeconds(tc.d); got != tc.whole {
			t.Errorf("WholeSeconds(%v) = %q, want %q", tc.d, got, tc.whole)
		}
		if got := fieldtext.CeilSeconds(tc.d); got != tc.wholeOrZero {
			t.Errorf("ceilSeconds(%v) = %d, want %d", tc.d, got, tc.wholeOrZero)
		}
	}
}

// TestFieldNames guards that our fields are found under the names that users
// write: Go's http.Header only finds canonical ones.
func TestFieldNames(t *testing.T) {
	t.Parallel()
	want := []string{
		"X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Clear", "X-RateLimit-Reset",
		"Retry-After", "RateLimit-Policy", "RateLimit",
	}
	for i, name := range fieldNames {
		if canonical := textproto.CanonicalMIMEHeaderKey(want[i]); name != canonical {
			t.Errorf("field %d is called %q, want %q", i, name, canonical)
		}
	}
	if canonical := textproto.CanonicalMIMEHeaderKey("X-RateLimit-Used"); fieldNameUsed != canonical {
		t.Errorf("a field is called %q, want %q", fieldNameUsed, canonical)
	}
}

// fieldsTests are what the buckets of one request decided and the fields that
// tell of it, as fieldsIn has them.
var fieldsTests = []struct {
	name  string
	items []Entry
	want  string
}{
	{
		"admitted with room",
		[]Entry{{Policy: policyOf("a"), Limit: limitOf(10), Families: XRateLimit | IETF,
			Decision: limiter.Decision{Size: 10, Remaining: 7, Clear: 2500 * time.Millisecond}}},
		`limit=10 remaining=7 clear=2.500 policy="a";q=10;w=10 ratelimit="a";r=7;t=7`,
	},
	{
		"admitted with none left: t is the wait for the next drip",
		[]Entry{{Policy: policyOf("a"), Limit: limitOf(10), Families: XRateLimit | IETF,
			Decision: limiter.Decision{Size: 10, Remaining: 0, Clear: 9200 * time.Millisecond}}},
		`limit=10 remaining=0 clear=9.200 policy="a";q=10;w=10 ratelimit="a";r=0;t=1`,
	},
	{
		"admitted with none left of slow drips",
		[]Entry{{Policy: policyOf("a"), Limit: limitOf(2, time.Hour), Families: XRateLimit | IETF,
			Decision: limiter.Decision{Size: 2, Remaining: 0, Clear: 2*time.Hour - time.Minute}}},
		`limit=2 remaining=0 clear=7140.000 policy="a";q=2;w=7200 ratelimit="a";r=0;t=3540`,
	},
	{
		"denied: no room, and one time to wait in three fields",
		[]Entry{{Policy: policyOf("a"), Limit: limitOf(10), Families: XRateLimit | IETF, Decision: limiter.Decision{
			Denied: true, Size: 10, Clear: 10 * time.Second, RetryAfter: 1000_001 * time.Microsecond}}},
		`limit=10 remaining=0 clear=10.000 reset=1.001 retry-after=2 ` +
			`policy="a";q=10;w=10 ratelimit="a";r=0;t=2`,
	},
	{
		"denied with room for cheaper requests",
		[]Entry{{Policy: policyOf("a"), Limit: limitOf(10), Families: XRateLimit | IETF, Decision: limiter.Decision{
			Denied: true, Size: 10, Remaining: 4, Clear: 6 * time.Second, RetryAfter: time.Microsecond}}},
		`limit=10 remaining=4 clear=6.000 reset=0.001 retry-after=1 ` +
			`policy="a";q=10;w=10 ratelimit="a";r=4;t=1`,
	},
	{
		"never admitted: nothing tells to wait",
		[]Entry{{Policy: policyOf("a"), Limit: limitOf(3), Families: XRateLimit | IETF,
			Decision: limiter.Decision{Denied: true, Never: true, Size: 3, Remaining: 3}}},
		`limit=3 remaining=3 clear=0.000 policy="a";q=3;w=3 ratelimit="a";r=3`,
	},
	{
		"several admit: the least room shows, and the longest time to clear",
		[]Entry{
			{Policy: policyOf("a"), Limit: limitOf(100, time.Minute), Families: XRateLimit | IETF,
				Decision: limiter.Decision{Size: 100, Remaining: 50, Clear: 50 * time.Minute}},
			{Policy: policyOf("a/b"), Limit: limitOf(5), Families: XRateLimit | IETF,
				Decision: limiter.Decision{Size: 5, Remaining: 2, Clear: 3 * time.Second}},
		},
		`limit=5 remaining=2 clear=3000.000 ` +
			`policy="a";q=100;w=6000, "a/b";q=5;w=5 ratelimit="a";r=50;t=3000, "a/b";r=2;t=2`,
	},
	{
		"one of several denies: only it tells to wait",
		[]Entry{
			{Policy: policyOf("a"), Limit: limitOf(100, time.Minute), Families: XRateLimit | IETF,
				Decision: limiter.Decision{Size: 100, Remaining: 50, Clear: 50 * time.Minute}},
			{Policy: policyOf("a/b"), Limit: limitOf(5), Families: XRateLimit | IETF,
				Decision: limiter.Decision{
					Denied: true, Size: 5, Clear: 5 * time.Second, RetryAfter: 700 * time.Millisecond}},
		},
		`limit=5 remaining=0 clear=3000.000 reset=0.700 retry-after=1 ` +
			`policy="a";q=100;w=6000, "a/b";q=5;w=5 ratelimit="a";r=50, "a/b";r=0;t=1`,
	},
	{
		"one denies and another is charged its last: both tell to wait, and the longer wait counts",
		[]Entry{
			{Policy: policyOf("a"), Limit: limitOf(100, time.Minute), Families: XRateLimit | IETF, Decision: limiter.Decision{
				Size: 100, Remaining: 0, Clear: 100 * time.Minute, RetryAfter: time.Minute}},
			{Policy: policyOf("a/b"), Limit: limitOf(5), Families: XRateLimit | IETF,
				Decision: limiter.Decision{
					Denied: true, Size: 5, Clear: 5 * time.Second, RetryAfter: 700 * time.Millisecond}},
		},
		`limit=5 remaining=0 clear=6000.000 reset=60.000 retry-after=60 ` +
			`policy="a";q=100;w=6000, "a/b";q=5;w=5 ratelimit="a";r=0;t=60, "a/b";r=0;t=1`,
	},
	{
		"several deny: the longest wait counts",
		[]Entry{
			{Policy: policyOf("a"), Limit: limitOf(8, 3*time.Second), Families: XRateLimit | IETF,
				Decision: limiter.Decision{
					Denied: true, Size: 8, Clear: 24 * time.Second, RetryAfter: 2100 * time.Millisecond}},
			{Policy: policyOf("b"), Limit: limitOf(9), Families: XRateLimit | IETF,
				Decision: limiter.Decision{Denied: true, Size: 9, Clear: 9 * time.Second, RetryAfter: 400 * time.Millisecond}},
		},
		`limit=8 remaining=0 clear=24.000 reset=2.100 retry-after=3 ` +
			`policy="a";q=8;w=24, "b";q=9;w=9 ratelimit="a";r=0;t=3, "b";r=0;t=1`,
	},
	{
		"never admitted by one outranks the wait for another",
		[]Entry{
			{Policy: policyOf("a"), Limit: limitOf(8), Families: XRateLimit | IETF,
				Decision: limiter.Decision{Denied: true, Size: 8, Clear: 8 * time.Second, RetryAfter: 2 * time.Second}},
			{Policy: policyOf("b"), Limit: limitOf(3), Families: XRateLimit | IETF,
				Decision: limiter.Decision{Denied: true, Never: true, Size: 3, Remaining: 3}},
		},
		`limit=3 remaining=3 clear=8.000 ` +
			`policy="a";q=8;w=8, "b";q=3;w=3 ratelimit="a";r=0;t=2, "b";r=3`,
	},
	{
		"equally little room: the smaller size shows",
		[]Entry{
			{Policy: policyOf("a"), Limit: limitOf(9), Families: XRateLimit, Decision: limiter.Decision{Size: 9, Remaining: 3}},
			{Policy: policyOf("b"), Limit: limitOf(7), Families: XRateLimit, Decision: limiter.Decision{Size: 7, Remaining: 3}},
			{Policy: policyOf("c"), Limit: limitOf(8), Families: XRateLimit, Decision: limiter.Decision{Size: 8, Remaining: 3}},
		},
		`limit=7 remaining=3 clear=0.000`,
	},
	{
		"drip_size does not divide size: the last drip counts in full",
		[]Entry{{Policy: policyOf("a"), Limit: limitOf(10, 3), Families: IETF,
			Decision: limiter.Decision{Size: 10, Remaining: 7, Clear: time.Second}}},
		`policy="a";q=10;w=4 ratelimit="a";r=7;t=3`,
	},
	{
		"windows below a second are rounded up: w must not be 0",
		[]Entry{{Policy: policyOf("a"), Limit: limitOf(2, time.Millisecond), Families: XRateLimit | IETF,
			Decision: limiter.Decision{Size: 2, Remaining: 1, Clear: time.Millisecond}}},
		`limit=2 remaining=1 clear=0.001 policy="a";q=2;w=1 ratelimit="a";r=1;t=1`,
	},
	{
		"the largest numbers",
		[]Entry{{Policy: policyOf("a"), Limit: limitOf(limiter.MaxUnits, time.Microsecond), Families: XRateLimit | IETF,
			Decision: limiter.Decision{
				Size: limiter.MaxUnits, Remaining: limiter.MaxUnits - 1, Clear: time.Microsecond}}},
		`limit=562949953421312 remaining=562949953421311 clear=0.001 ` +
			`policy="a";q=562949953421312;w=562949954 ratelimit="a";r=562949953421311;t=562949954`,
	},
	{
		"several limits, one of them in both families",
		[]Entry{
			{Policy: policyOf("a"), Limit: limitOf(10), Families: XRateLimit | IETF,
				Decision: limiter.Decision{Size: 10, Remaining: 7, Clear: 2500 * time.Millisecond}},
			{Policy: policyOf("b"), Limit: limitOf(9), Families: IETF,
				Decision: limiter.Decision{Size: 9, Remaining: 8, Clear: time.Second}},
		},
		`limit=10 remaining=7 clear=2.500 policy="a";q=10;w=10, "b";q=9;w=9 ratelimit="a";r=7;t=7, "b";r=8;t=8`,
	},
	{
		"headers off: still a denial tells to wait",
		[]Entry{{Policy: policyOf("a"), Limit: limitOf(1), Decision: limiter.Decision{
			Denied: true, Size: 1, Clear: time.Second, RetryAfter: time.Second}}},
		`retry-after=1`,
	},
	{"headers off, admitted", []Entry{{Policy: policyOf("a"), Limit: limitOf(1), Decision: limiter.Decision{Size: 1}}}, ``},
	{
		"each limit shows in its own families; all count for the wait",
		[]Entry{
			{Policy: policyOf("x"), Limit: limitOf(4), Families: XRateLimit,
				Decision: limiter.Decision{Size: 4, Remaining: 3, Clear: time.Second}},
			{Policy: policyOf("i"), Limit: limitOf(5), Families: IETF,
				Decision: limiter.Decision{Size: 5, Remaining: 2, Clear: 3 * time.Second}},
			{Policy: policyOf("o"), Limit: limitOf(1, time.Minute), Decision: limiter.Decision{
				Denied: true, Size: 1, Clear: time.Minute, RetryAfter: time.Minute}},
		},
		`limit=4 remaining=3 clear=1.000 retry-after=60 policy="i";q=5;w=5 ratelimit="i";r=2`,
	},
	{
		"as GitHub has them: what is used, and a time",
		[]Entry{{Policy: policyOf("a"), Limit: limitOf(10), Families: XRateLimit | GitHub,
			Decision: limiter.Decision{Size: 10, Remaining: 7, Clear: 2500 * time.Millisecond}}},
		`limit=10 remaining=7 used=3 reset=1800000008`,
	},
	{
		"as GitHub has them: denied, of which clients know only if nothing remains",
		[]Entry{{Policy: policyOf("a"), Limit: limitOf(10), Families: XRateLimit | GitHub, Decision: limiter.Decision{
			Denied: true, Size: 10, Remaining: 4, Clear: 6 * time.Second, RetryAfter: 1600 * time.Millisecond}}},
		`limit=10 remaining=0 used=10 reset=1800000002 retry-after=2`,
	},
	{
		"as GitHub has them: never admitted",
		[]Entry{{Policy: policyOf("a"), Limit: limitOf(3), Families: XRateLimit | GitHub,
			Decision: limiter.Decision{Denied: true, Never: true, Size: 3, Remaining: 3}}},
		`limit=3 remaining=3 used=0 reset=1800000004`,
	},
	{
		"as GitHub has them: of the limits that are shown so, and not of those without room elsewhere",
		[]Entry{
			{Policy: policyOf("i"), Limit: limitOf(5, time.Hour), Families: IETF,
				Decision: limiter.Decision{Size: 5, Clear: 5 * time.Hour}},
			{Policy: policyOf("x"), Limit: limitOf(4), Families: XRateLimit | GitHub,
				Decision: limiter.Decision{Size: 4, Clear: 4 * time.Second}},
		},
		`limit=4 remaining=0 used=4 reset=1800000002 policy="i";q=5;w=18000 ratelimit="i";r=0;t=3600`,
	},
	{
		"as GitHub has them, by the second: the first decides",
		[]Entry{
			{Policy: policyOf("a"), Limit: limitOf(9), Families: XRateLimit, Decision: limiter.Decision{Size: 9, Remaining: 3}},
			{Policy: policyOf("b"), Limit: limitOf(9), Families: XRateLimit | GitHub, Decision: limiter.Decision{Size: 9, Remaining: 3}},
		},
		`limit=9 remaining=3 clear=0.000`,
	},
	{
		"one family only shows its own denials",
		[]Entry{
			{Policy: policyOf("i"), Limit: limitOf(1, time.Minute), Families: IETF, Decision: limiter.Decision{
				Denied: true, Size: 1, Clear: time.Minute, RetryAfter: time.Minute}},
			{Policy: policyOf("x"), Limit: limitOf(4), Families: XRateLimit,
				Decision: limiter.Decision{Denied: true, Size: 4, Clear: 4 * time.Second, RetryAfter: time.Second}},
		},
		`limit=4 remaining=0 clear=4.000 reset=1.000 retry-after=60 policy="i";q=1;w=60 ratelimit="i";r=0;t=60`,
	},
}

// decidedAt is when the requests of fieldsOf are decided, in µs since 1970.
const decidedAt = 1_800_000_000_300_000

// fieldsOf returns the fields of a request with the given results.
func fieldsOf(items []Entry) fields {
	var f fields
	sum, _ := summarize(items, 0)
	f.render(items, sum, decidedAt, nil)
	return f
}

// TestFields guards every field of every family: when it is set and to what.
func TestFields(t *testing.T) {
	t.Parallel()
	for _, tc := range fieldsTests {
		h := make(http.Header)
		f := fieldsOf(tc.items)
		f.set(h)
		if got := fieldstest.In(h); got != tc.want {
			t.Errorf("%s:\n got %s\nwant %s", tc.name, got, tc.want)
		}
		if slices.ContainsFunc(tc.items, func(it Entry) bool { return it.Limit.Size > mostParsed }) {
			continue
		}
		if err := checkStructured(tc.items, f); err != nil {
			t.Errorf("%s: %v", tc.name, err)
		}
	}
}

// mostParsed is the largest integer that the parser takes where a parameter
// follows. Structured fields have one digit more, but httpsfv before v1.1.2
// counts what comes behind it.
const mostParsed = 99_999_999_999_999

// checkStructured returns an error unless the IETF fields are structured fields
// of the kind that draft-IETF-httpapi-ratelimit-headers-11 wants, and true.
func checkStructured(items []Entry, f fields) error {
	all, _ := summarize(items, 0)
	items = slices.DeleteFunc(slices.Clone(items), func(it Entry) bool { return it.Families&IETF == 0 })
	policies, err := fieldstest.ParseList(f.values[fieldPolicy])
	if err != nil {
		return fmt.Errorf("RateLimit-Policy: %s: %w", f.values[fieldPolicy], err)
	}
	limits, err := fieldstest.ParseList(f.values[fieldRateLimit])
	if err != nil {
		return fmt.Errorf("RateLimit: %s: %w", f.values[fieldRateLimit], err)
	}
	if len(policies) != len(items) || len(limits) != len(items) {
		return fmt.Errorf("%d limits, but %d policies and %d items", len(items), len(policies), len(limits))
	}
	for i, it := range items {
		p, l := policies[i], limits[i]
		q, w, r := p.Parameters["q"], p.Parameters["w"], l.Parameters["r"]
		t, hasT := l.Parameters["t"]
		wantsT := !it.Decision.Never && (!all.Denied || it.Decision.RetryAfter > 0)
		switch {
		case p.Name != it.Path || l.Name != it.Path:
			return fmt.Errorf("limit %q is called %q and %q", it.Path, p.Name, l.Name)
		case p.Names != "q w" || l.Names != "r" && l.Names != "r t":
			return fmt.Errorf("limit %q: parameters %q and %q", it.Path, p.Names, l.Names)
		case q != it.Limit.Size:
			return fmt.Errorf("limit %q: q=%d, size %d", it.Path, q, it.Limit.Size)
		case w < 1 || time.Duration(w)*time.Second < bucket.Limit(it.Limit).DrainTime():
			return fmt.Errorf("limit %q: w=%d, drains in %v", it.Path, w, bucket.Limit(it.Limit).DrainTime())
		case r < 0 || r > q:
			return fmt.Errorf("limit %q: r=%d, q=%d", it.Path, r, q)
		case hasT && (t < 1 || t > w):
			return fmt.Errorf("limit %q: t=%d, w=%d", it.Path, t, w)
		case hasT != wantsT:
			return fmt.Errorf("limit %q: whether it has a t is %t, want %t", it.Path, hasT, wantsT)
		case f.values[fieldRetryAfter] != "" && t > fieldstest.Number(f.values[fieldRetryAfter]):
			return fmt.Errorf("limit %q: t=%d is later than Retry-After %s", it.Path, t, f.values[fieldRetryAfter])
		}
	}
	return nil
}

// TestFieldsOfAnyDecision guards that whatever limits decide on whatever
// requests, the fields parse and do not contradict each other.
func TestFieldsOfAnyDecision(t *testing.T) {
	t.Parallel()
	testseed.Check(t, 1, func(t *rapid.T) {
		var now time.Duration
		store := limiter.NewMemoryWithClock(func() time.Duration { return now })
		paths := []string{"default", "a", "a/b", "x.y-z_0"}[:rapid.IntRange(1, 4).Draw(t, "limits")]
		var items []Entry
		var req limiter.Request
		for _, path := range paths {
			l := limiter.Limit{
				Size: rapid.OneOf(rapid.Int64Range(1, 20), rapid.Int64Range(1, mostParsed)).Draw(t, "size"),
				DripInterval: time.Microsecond * time.Duration(rapid.OneOf(rapid.Int64Range(1, 10),
					rapid.Int64Range(1, 1e7), rapid.Int64Range(1, 1<<49)).Draw(t, "drip rate")),
				DripSize: rapid.OneOf(rapid.Int64Range(1, 5), rapid.Int64Range(1, limiter.MaxUnits)).Draw(t, "drip size"),
			}
			if l.Validate() != nil { // it drains too slowly
				l.DripSize = l.Size
			}
			show := Families(rapid.IntRange(0, 3).Draw(t, "families"))
			if show&XRateLimit != 0 && rapid.Bool().Draw(t, "github") {
				show |= GitHub
			}
			items = append(items, Entry{Policy: policyOf(path), Limit: l, Families: show})
			req.Buckets = append(req.Buckets, limiter.Bucket{Name: path, Limit: l, Cost: 1})
		}
		req.Accounting = limiter.Accounting(rapid.IntRange(0, 1).Draw(t, "accounting"))

		for range rapid.IntRange(1, 20).Draw(t, "requests") {
			now += time.Microsecond * time.Duration(rapid.Int64Range(0, 3e6).Draw(t, "passes"))
			for i := range req.Buckets {
				most := req.Buckets[i].Limit.Size
				req.Buckets[i].Cost = rapid.OneOf(rapid.Int64Range(1, most), rapid.Int64Range(1, most+1)).Draw(t, "cost")
			}
			decisions, err := store.Take(context.Background(), req, nil)
			if err != nil {
				t.Fatal(err)
			}
			for i, d := range decisions {
				items[i].Decision, items[i].Cost = d, req.Buckets[i].Cost
				if limiter.Denied(decisions) {
					items[i].extendRetryAfter()
				}
			}
			f := fieldsOf(items)
			if err := checkStructured(items, f); err != nil {
				t.Fatal(err)
			}
			checkTimes(t, items, f)
		}
	})
}

// checkTimes checks the times in the fields: Retry-After against all limits, the
// others against those that show in their family.
func checkTimes(t *rapid.T, items []Entry, f fields) {
	sum, _ := summarize(items, 0)
	shown, _ := summarize(items, XRateLimit)
	if wants := sum.Denied && !sum.Never; wants != (f.values[fieldRetryAfter] != "") {
		t.Fatalf("Retry-After %q of %+v", f.values[fieldRetryAfter], sum)
	}
	if f.values[fieldRetryAfter] != "" {
		after := time.Duration(fieldstest.Number(f.values[fieldRetryAfter])) * time.Second
		if after < sum.RetryAfter || after < time.Second || after >= sum.RetryAfter+time.Second {
			t.Fatalf("Retry-After %v of %v", after, sum.RetryAfter)
		}
	}
	if ofGitHub(items) {
		checkGitHub(t, shown, f)
		return
	}
	for _, i := range []int{fieldClear, fieldReset} {
		whole, millis, _ := strings.Cut(f.values[i], ".")
		if f.values[i] == "" {
			continue
		}
		if whole == "" || len(millis) != 3 || strings.Trim(f.values[i], "0123456789.") != "" {
			t.Fatalf("%s: %q is no number of seconds with three decimals", fieldNames[i], f.values[i])
		}
		exact := map[int]time.Duration{fieldClear: shown.Clear, fieldReset: shown.RetryAfter}[i]
		got, err := time.ParseDuration(f.values[i] + "s")
		if err != nil || got < exact || got >= exact+time.Millisecond {
			t.Fatalf("%s: %s, want %v: %v", fieldNames[i], f.values[i], exact, err)
		}
	}
}

// checkGitHub checks the fields that clients of GitHub's API read: that a denial which a wait
// helps is one to them, and that they then wait neither too short nor a second too long.
func checkGitHub(t *rapid.T, shown limiter.Summary, f fields) {
	limit, remaining, used := fieldstest.Number(f.values[fieldLimit]), fieldstest.Number(f.values[fieldRemaining]), fieldstest.Number(f.values[fieldClear])
	in := time.Duration(fieldstest.Number(f.values[fieldReset]))*time.Second - decidedAt*time.Microsecond
	want := shown.Remaining
	if waits := shown.Denied && !shown.Never; waits {
		want = 0
		if in < shown.RetryAfter || in >= shown.RetryAfter+time.Second {
			t.Fatalf("X-RateLimit-Reset %s, %v from now, of %+v", f.values[fieldReset], in, shown)
		}
	}
	if limit != shown.Size || remaining != want || used != limit-remaining || in < 0 || f.name(fieldClear) != fieldNameUsed {
		t.Fatalf("%q of %+v", f.values, shown)
	}
}

// TestValuesAddedToOurFields guards what becomes of values that others add to
// our fields: those behind ours go, but what replaced or removed ours stays.
func TestValuesAddedToOurFields(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name      string
		ours      string
		now, want []string
	}{
		{"untouched", "5", []string{"5"}, []string{"5"}},
		{"added behind", "5", []string{"5", "100"}, []string{"5"}},
		{"added behind twice", "5", []string{"5", "100", "5"}, []string{"5"}},
		{"the same added behind", "5", []string{"5", "5"}, []string{"5"}},
		{"removed", "5", nil, nil},
		{"replaced", "5", []string{"100"}, []string{"100"}},
		{"replaced by several", "5", []string{"100", "5"}, []string{"100", "5"}},
		{"emptied", "5", []string{}, []string{}},
		{"never ours", "", []string{"100", "101"}, []string{"100", "101"}},
	} {
		for n := range 2 * fieldCount {
			i, f := n/2, fields{github: n%2 == 1}
			f.values[i] = tc.ours
			name := f.name(i)
			h := http.Header{"X-Other": {"1", "2"}}
			if tc.now != nil {
				h[name] = slices.Clone(tc.now)
			}
			if f.values[i] != "" { // the first field of each family tells that it has fields
				f.values[fieldLimit], f.values[fieldPolicy] = cmp.Or(f.values[fieldLimit], "1"), cmp.Or(f.values[fieldPolicy], "1")
			}
			f.dropForeign(h)
			if got := h[name]; !slices.Equal(got, tc.want) || (got == nil) != (tc.want == nil) {
				t.Errorf("%s: %s is %q, want %q", tc.name, name, got, tc.want)
			}
			if len(h["X-Other"]) != 2 {
				t.Errorf("%s: another field became %q", tc.name, h["X-Other"])
			}
		}
	}
}

// TestFieldsReplaceEarlierValues guards that our fields stand alone, whatever was
// there before, that one we do not set any more goes, and that fields which were
// never ours are left as they are.
func TestFieldsReplaceEarlierValues(t *testing.T) {
	t.Parallel()
	h := http.Header{
		"X-Ratelimit-Limit": {"100", "200"},
		"X-Ratelimit-Reset": {"1.000"},
		"Retry-After":       {"120"},
	}
	f, before := fields{values: [fieldCount]string{fieldLimit: "5"}}, fields{values: [fieldCount]string{fieldLimit: "8", fieldReset: "1.000"}}
	before.remove(h)
	f.set(h)
	if got, want := fieldstest.In(h), "limit=5 retry-after=120"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// policyOf returns the policy of a limit.
func policyOf(path string) *Policy { return &Policy{Path: path, Title: path} }

// limitOf returns a limit that drips one unit a second, unless said otherwise.
func limitOf(size int64, more ...any) limiter.Limit {
	l := limiter.Limit{Size: size, DripInterval: time.Second, DripSize: 1}
	for _, m := range more {
		switch m := m.(type) {
		case time.Duration:
			l.DripInterval = m
		case int:
			l.DripSize = int64(m)
		}
	}
	return l
}
