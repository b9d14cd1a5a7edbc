package ratelimit

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/textproto"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

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
	} {
		if got := seconds(tc.d); got != tc.millis {
			t.Errorf("seconds(%v) = %q, want %q", tc.d, got, tc.millis)
		}
		if got := wholeSeconds(tc.d); got != tc.whole {
			t.Errorf("wholeSeconds(%v) = %q, want %q", tc.d, got, tc.whole)
		}
		if got := ceilSeconds(tc.d); got != tc.wholeOrZero {
			t.Errorf("ceilSeconds(%v) = %d, want %d", tc.d, got, tc.wholeOrZero)
		}
	}
}

// TestNewFamilies guards what the headers option may say.
func TestNewFamilies(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		words string
		want  families
		err   string // what the error mentions
	}{
		{"", xRateLimit, ""},
		{"x-ratelimit", xRateLimit, ""},
		{"ratelimit-11", ietf, ""},
		{"ratelimit", ietf, ""},
		{"x-ratelimit ratelimit-11", xRateLimit | ietf, ""},
		{"ratelimit x-ratelimit", xRateLimit | ietf, ""},
		{"ratelimit ratelimit", 0, `headers: duplicate "ratelimit"`},
		{"ratelimit-11 x-ratelimit ratelimit", 0, `headers: duplicate "ratelimit"`},
		{"off", 0, ""},
		{"off ratelimit", 0, `headers: got "off ratelimit", want off alone`},
		{"ratelimit off", 0, `headers: got "ratelimit off", want off alone`},
		{"X-RateLimit", 0, `headers: got "X-RateLimit", want x-ratelimit`},
		{"ratelimit draft-7", 0, `headers: got "draft-7", want x-ratelimit`},
	} {
		got, err := newFamilies(strings.Fields(tc.words))
		switch {
		case tc.err == "" && err != nil:
			t.Errorf("headers %s: %v", tc.words, err)
		case tc.err != "" && (err == nil || !strings.Contains(err.Error(), tc.err)):
			t.Errorf("headers %s: got error %v, want one with %q", tc.words, err, tc.err)
		case got != tc.want:
			t.Errorf("headers %s: got %b, want %b", tc.words, got, tc.want)
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
}

// fieldsTests are what the buckets of one request decided and the fields that
// tell of it, as fieldsIn has them.
var fieldsTests = []struct {
	name  string
	items []bucketResult
	want  string
}{
	{
		"admitted with room",
		[]bucketResult{{policy: &policy{path: "a"}, limit: limitOf(10), families: xRateLimit | ietf,
			decision: limiter.Decision{Size: 10, Remaining: 7, Clear: 2500 * time.Millisecond}}},
		`limit=10 remaining=7 clear=2.500 policy="a";q=10;w=10 ratelimit="a";r=7;t=7`,
	},
	{
		"admitted with none left: t is the wait for the next drip",
		[]bucketResult{{policy: &policy{path: "a"}, limit: limitOf(10), families: xRateLimit | ietf,
			decision: limiter.Decision{Size: 10, Remaining: 0, Clear: 9200 * time.Millisecond}}},
		`limit=10 remaining=0 clear=9.200 policy="a";q=10;w=10 ratelimit="a";r=0;t=1`,
	},
	{
		"admitted with none left of slow drips",
		[]bucketResult{{policy: &policy{path: "a"}, limit: limitOf(2, time.Hour), families: xRateLimit | ietf,
			decision: limiter.Decision{Size: 2, Remaining: 0, Clear: 2*time.Hour - time.Minute}}},
		`limit=2 remaining=0 clear=7140.000 policy="a";q=2;w=7200 ratelimit="a";r=0;t=3540`,
	},
	{
		"denied: no room, and one time to wait in three fields",
		[]bucketResult{{policy: &policy{path: "a"}, limit: limitOf(10), families: xRateLimit | ietf, decision: limiter.Decision{
			Denied: true, Size: 10, Clear: 10 * time.Second, RetryAfter: 1000_001 * time.Microsecond}}},
		`limit=10 remaining=0 clear=10.000 reset=1.001 retry-after=2 ` +
			`policy="a";q=10;w=10 ratelimit="a";r=0;t=2`,
	},
	{
		"denied with room for cheaper requests",
		[]bucketResult{{policy: &policy{path: "a"}, limit: limitOf(10), families: xRateLimit | ietf, decision: limiter.Decision{
			Denied: true, Size: 10, Remaining: 4, Clear: 6 * time.Second, RetryAfter: time.Microsecond}}},
		`limit=10 remaining=4 clear=6.000 reset=0.001 retry-after=1 ` +
			`policy="a";q=10;w=10 ratelimit="a";r=4;t=1`,
	},
	{
		"never admitted: nothing tells to wait",
		[]bucketResult{{policy: &policy{path: "a"}, limit: limitOf(3), families: xRateLimit | ietf,
			decision: limiter.Decision{Denied: true, Never: true, Size: 3, Remaining: 3}}},
		`limit=3 remaining=3 clear=0.000 policy="a";q=3;w=3 ratelimit="a";r=3`,
	},
	{
		"several admit: the least room shows, and the longest time to clear",
		[]bucketResult{
			{policy: &policy{path: "a"}, limit: limitOf(100, time.Minute), families: xRateLimit | ietf,
				decision: limiter.Decision{Size: 100, Remaining: 50, Clear: 50 * time.Minute}},
			{policy: &policy{path: "a/b"}, limit: limitOf(5), families: xRateLimit | ietf,
				decision: limiter.Decision{Size: 5, Remaining: 2, Clear: 3 * time.Second}},
		},
		`limit=5 remaining=2 clear=3000.000 ` +
			`policy="a";q=100;w=6000, "a/b";q=5;w=5 ratelimit="a";r=50;t=3000, "a/b";r=2;t=2`,
	},
	{
		"one of several denies: only it tells to wait",
		[]bucketResult{
			{policy: &policy{path: "a"}, limit: limitOf(100, time.Minute), families: xRateLimit | ietf,
				decision: limiter.Decision{Size: 100, Remaining: 50, Clear: 50 * time.Minute}},
			{policy: &policy{path: "a/b"}, limit: limitOf(5), families: xRateLimit | ietf,
				decision: limiter.Decision{
					Denied: true, Size: 5, Clear: 5 * time.Second, RetryAfter: 700 * time.Millisecond}},
		},
		`limit=5 remaining=0 clear=3000.000 reset=0.700 retry-after=1 ` +
			`policy="a";q=100;w=6000, "a/b";q=5;w=5 ratelimit="a";r=50, "a/b";r=0;t=1`,
	},
	{
		"one denies and another is charged its last: both tell to wait, and the longer wait counts",
		[]bucketResult{
			{policy: &policy{path: "a"}, limit: limitOf(100, time.Minute), families: xRateLimit | ietf, decision: limiter.Decision{
				Size: 100, Remaining: 0, Clear: 100 * time.Minute, RetryAfter: time.Minute}},
			{policy: &policy{path: "a/b"}, limit: limitOf(5), families: xRateLimit | ietf,
				decision: limiter.Decision{
					Denied: true, Size: 5, Clear: 5 * time.Second, RetryAfter: 700 * time.Millisecond}},
		},
		`limit=5 remaining=0 clear=6000.000 reset=60.000 retry-after=60 ` +
			`policy="a";q=100;w=6000, "a/b";q=5;w=5 ratelimit="a";r=0;t=60, "a/b";r=0;t=1`,
	},
	{
		"several deny: the longest wait counts",
		[]bucketResult{
			{policy: &policy{path: "a"}, limit: limitOf(8, 3*time.Second), families: xRateLimit | ietf,
				decision: limiter.Decision{
					Denied: true, Size: 8, Clear: 24 * time.Second, RetryAfter: 2100 * time.Millisecond}},
			{policy: &policy{path: "b"}, limit: limitOf(9), families: xRateLimit | ietf,
				decision: limiter.Decision{Denied: true, Size: 9, Clear: 9 * time.Second, RetryAfter: 400 * time.Millisecond}},
		},
		`limit=8 remaining=0 clear=24.000 reset=2.100 retry-after=3 ` +
			`policy="a";q=8;w=24, "b";q=9;w=9 ratelimit="a";r=0;t=3, "b";r=0;t=1`,
	},
	{
		"never admitted by one outranks the wait for another",
		[]bucketResult{
			{policy: &policy{path: "a"}, limit: limitOf(8), families: xRateLimit | ietf,
				decision: limiter.Decision{Denied: true, Size: 8, Clear: 8 * time.Second, RetryAfter: 2 * time.Second}},
			{policy: &policy{path: "b"}, limit: limitOf(3), families: xRateLimit | ietf,
				decision: limiter.Decision{Denied: true, Never: true, Size: 3, Remaining: 3}},
		},
		`limit=8 remaining=0 clear=8.000 ` +
			`policy="a";q=8;w=8, "b";q=3;w=3 ratelimit="a";r=0;t=2, "b";r=3`,
	},
	{
		"equally little room: the smaller size shows",
		[]bucketResult{
			{policy: &policy{path: "a"}, limit: limitOf(9), families: xRateLimit, decision: limiter.Decision{Size: 9, Remaining: 3}},
			{policy: &policy{path: "b"}, limit: limitOf(7), families: xRateLimit, decision: limiter.Decision{Size: 7, Remaining: 3}},
			{policy: &policy{path: "c"}, limit: limitOf(8), families: xRateLimit, decision: limiter.Decision{Size: 8, Remaining: 3}},
		},
		`limit=7 remaining=3 clear=0.000`,
	},
	{
		"drip_size does not divide size: the last drip counts in full",
		[]bucketResult{{policy: &policy{path: "a"}, limit: limitOf(10, 3), families: ietf,
			decision: limiter.Decision{Size: 10, Remaining: 7, Clear: time.Second}}},
		`policy="a";q=10;w=4 ratelimit="a";r=7;t=3`,
	},
	{
		"windows below a second are rounded up: w must not be 0",
		[]bucketResult{{policy: &policy{path: "a"}, limit: limitOf(2, time.Millisecond), families: xRateLimit | ietf,
			decision: limiter.Decision{Size: 2, Remaining: 1, Clear: time.Millisecond}}},
		`limit=2 remaining=1 clear=0.001 policy="a";q=2;w=1 ratelimit="a";r=1;t=1`,
	},
	{
		"the largest numbers",
		[]bucketResult{{policy: &policy{path: "a"}, limit: limitOf(limiter.MaxUnits, time.Microsecond), families: xRateLimit | ietf,
			decision: limiter.Decision{
				Size: limiter.MaxUnits, Remaining: limiter.MaxUnits - 1, Clear: time.Microsecond}}},
		`limit=562949953421312 remaining=562949953421311 clear=0.001 ` +
			`policy="a";q=562949953421312;w=562949954 ratelimit="a";r=562949953421311;t=562949954`,
	},
	{
		"several limits, one of them in both families",
		[]bucketResult{
			{policy: &policy{path: "a"}, limit: limitOf(10), families: xRateLimit | ietf,
				decision: limiter.Decision{Size: 10, Remaining: 7, Clear: 2500 * time.Millisecond}},
			{policy: &policy{path: "b"}, limit: limitOf(9), families: ietf,
				decision: limiter.Decision{Size: 9, Remaining: 8, Clear: time.Second}},
		},
		`limit=10 remaining=7 clear=2.500 policy="a";q=10;w=10, "b";q=9;w=9 ratelimit="a";r=7;t=7, "b";r=8;t=8`,
	},
	{
		"headers off: still a denial tells to wait",
		[]bucketResult{{policy: &policy{path: "a"}, limit: limitOf(1), decision: limiter.Decision{
			Denied: true, Size: 1, Clear: time.Second, RetryAfter: time.Second}}},
		`retry-after=1`,
	},
	{"headers off, admitted", []bucketResult{{policy: &policy{path: "a"}, limit: limitOf(1), decision: limiter.Decision{Size: 1}}}, ``},
	{
		"each limit shows in its own families; all count for the wait",
		[]bucketResult{
			{policy: &policy{path: "x"}, limit: limitOf(4), families: xRateLimit,
				decision: limiter.Decision{Size: 4, Remaining: 3, Clear: time.Second}},
			{policy: &policy{path: "i"}, limit: limitOf(5), families: ietf,
				decision: limiter.Decision{Size: 5, Remaining: 2, Clear: 3 * time.Second}},
			{policy: &policy{path: "o"}, limit: limitOf(1, time.Minute), decision: limiter.Decision{
				Denied: true, Size: 1, Clear: time.Minute, RetryAfter: time.Minute}},
		},
		`limit=4 remaining=3 clear=1.000 retry-after=60 policy="i";q=5;w=5 ratelimit="i";r=2`,
	},
	{
		"one family only shows its own denials",
		[]bucketResult{
			{policy: &policy{path: "i"}, limit: limitOf(1, time.Minute), families: ietf, decision: limiter.Decision{
				Denied: true, Size: 1, Clear: time.Minute, RetryAfter: time.Minute}},
			{policy: &policy{path: "x"}, limit: limitOf(4), families: xRateLimit,
				decision: limiter.Decision{Denied: true, Size: 4, Clear: 4 * time.Second, RetryAfter: time.Second}},
		},
		`limit=4 remaining=0 clear=4.000 reset=1.000 retry-after=60 policy="i";q=1;w=60 ratelimit="i";r=0;t=60`,
	},
}

// fieldsOf returns the fields of a request with the given results.
func fieldsOf(items []bucketResult) fields {
	var f fields
	sum, _ := summarize(items, 0)
	f.render(items, sum, nil)
	return f
}

// TestFields guards every field of every family: when it is set and to what.
func TestFields(t *testing.T) {
	t.Parallel()
	for _, tc := range fieldsTests {
		h := make(http.Header)
		f := fieldsOf(tc.items)
		f.set(h)
		if got := fieldsIn(h); got != tc.want {
			t.Errorf("%s:\n got %s\nwant %s", tc.name, got, tc.want)
		}
		if slices.ContainsFunc(tc.items, func(it bucketResult) bool { return it.limit.Size > mostParsed }) {
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
// of the kind that draft-ietf-httpapi-ratelimit-headers-11 wants, and true.
func checkStructured(items []bucketResult, f fields) error {
	all, _ := summarize(items, 0)
	items = slices.DeleteFunc(slices.Clone(items), func(it bucketResult) bool { return it.families&ietf == 0 })
	policies, err := parseList(f[fieldPolicy])
	if err != nil {
		return fmt.Errorf("RateLimit-Policy: %s: %w", f[fieldPolicy], err)
	}
	limits, err := parseList(f[fieldRateLimit])
	if err != nil {
		return fmt.Errorf("RateLimit: %s: %w", f[fieldRateLimit], err)
	}
	if len(policies) != len(items) || len(limits) != len(items) {
		return fmt.Errorf("%d limits, but %d policies and %d items", len(items), len(policies), len(limits))
	}
	for i, it := range items {
		p, l := policies[i], limits[i]
		q, w, r := p.parameters["q"], p.parameters["w"], l.parameters["r"]
		t, hasT := l.parameters["t"]
		wantsT := !it.decision.Never && (!all.Denied || it.decision.RetryAfter > 0)
		switch {
		case p.name != it.path || l.name != it.path:
			return fmt.Errorf("limit %q is called %q and %q", it.path, p.name, l.name)
		case p.names != "q w" || l.names != "r" && l.names != "r t":
			return fmt.Errorf("limit %q: parameters %q and %q", it.path, p.names, l.names)
		case q != it.limit.Size:
			return fmt.Errorf("limit %q: q=%d, size %d", it.path, q, it.limit.Size)
		case w < 1 || time.Duration(w)*time.Second < it.limit.DrainTime():
			return fmt.Errorf("limit %q: w=%d, drains in %v", it.path, w, it.limit.DrainTime())
		case r < 0 || r > q:
			return fmt.Errorf("limit %q: r=%d, q=%d", it.path, r, q)
		case hasT && (t < 1 || t > w):
			return fmt.Errorf("limit %q: t=%d, w=%d", it.path, t, w)
		case hasT != wantsT:
			return fmt.Errorf("limit %q: whether it has a t is %t, want %t", it.path, hasT, wantsT)
		case f[fieldRetryAfter] != "" && t > number(f[fieldRetryAfter]):
			return fmt.Errorf("limit %q: t=%d is later than Retry-After %s", it.path, t, f[fieldRetryAfter])
		}
	}
	return nil
}

// TestFieldsOfAnyDecision guards that whatever limits decide on whatever
// requests, the fields parse and do not contradict each other.
func TestFieldsOfAnyDecision(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var now clock
		store := limiter.NewMemory(now.read)
		paths := []string{"default", "a", "a/b", "x.y-z_0"}[:rapid.IntRange(1, 4).Draw(t, "limits")]
		var items []bucketResult
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
			show := families(rapid.IntRange(0, 3).Draw(t, "families"))
			items = append(items, bucketResult{policy: &policy{path: path}, limit: l, families: show})
			req.Buckets = append(req.Buckets, limiter.Bucket{Name: path, Limit: l})
		}
		req.Accounting = limiter.Accounting(rapid.IntRange(0, 1).Draw(t, "accounting"))

		for range rapid.IntRange(1, 20).Draw(t, "requests") {
			now.advance(time.Microsecond * time.Duration(rapid.Int64Range(0, 3e6).Draw(t, "passes")))
			for i := range req.Buckets {
				most := req.Buckets[i].Limit.Size
				req.Buckets[i].Cost = rapid.OneOf(rapid.Int64Range(1, most), rapid.Int64Range(1, most+1)).Draw(t, "cost")
			}
			decisions, err := store.Take(context.Background(), req, nil)
			if err != nil {
				t.Fatal(err)
			}
			for i, d := range decisions {
				items[i].decision, items[i].cost = d, req.Buckets[i].Cost
				if limiter.Summarize(decisions).Denied {
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
func checkTimes(t *rapid.T, items []bucketResult, f fields) {
	sum, _ := summarize(items, 0)
	shown, _ := summarize(items, xRateLimit)
	if wants := sum.Denied && !sum.Never; wants != (f[fieldRetryAfter] != "") {
		t.Fatalf("Retry-After %q of %+v", f[fieldRetryAfter], sum)
	}
	if f[fieldRetryAfter] != "" {
		after := time.Duration(number(f[fieldRetryAfter])) * time.Second
		if after < sum.RetryAfter || after < time.Second || after >= sum.RetryAfter+time.Second {
			t.Fatalf("Retry-After %v of %v", after, sum.RetryAfter)
		}
	}
	for _, i := range []int{fieldClear, fieldReset} {
		whole, millis, _ := strings.Cut(f[i], ".")
		if f[i] == "" {
			continue
		}
		if whole == "" || len(millis) != 3 || strings.Trim(f[i], "0123456789.") != "" {
			t.Fatalf("%s: %q is no number of seconds with three decimals", fieldNames[i], f[i])
		}
		exact := map[int]time.Duration{fieldClear: shown.Clear, fieldReset: shown.RetryAfter}[i]
		got, err := time.ParseDuration(f[i] + "s")
		if err != nil || got < exact || got >= exact+time.Millisecond {
			t.Fatalf("%s: %s, want %v: %v", fieldNames[i], f[i], exact, err)
		}
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
		for i, name := range fieldNames {
			var f fields
			f[i] = tc.ours
			h := http.Header{"X-Other": {"1", "2"}}
			if tc.now != nil {
				h[name] = slices.Clone(tc.now)
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
	f, before := fields{fieldLimit: "5"}, fields{fieldLimit: "8", fieldReset: "1.000"}
	before.remove(h)
	f.set(h)
	if got, want := fieldsIn(h), "limit=5 retry-after=120"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// Guards that each limit has one member in the lists, and each member a name of
// its own, however many blocks without a name a request passes, and if it passes
// one block twice.
func TestEachLimitIsListedOnce(t *testing.T) {
	block := func(size int, headers string) string {
		return fmt.Sprintf("rate_limit {\nsize %d\n%s\n}\n", size, headers)
	}
	const one, both = "headers ratelimit", "headers x-ratelimit ratelimit"
	for _, tc := range []struct{ name, site, want string }{
		{
			"blocks without a name", "route {\n" + block(9, one) + block(8, one) + block(8, one+"\nkey all") +
				"respond admitted\n}",
			`200 policy="default";q=9;w=9, "default#2";q=8;w=8, "default#3";q=8;w=8 ` +
				`ratelimit="default";r=8;t=8, "default#2";r=7;t=7, "default#3";r=7;t=7`,
		},
		{
			"blocks without a name that are one limit", "route {\n" + block(9, one) + block(9, both) +
				"respond admitted\n}",
			`200 limit=9 remaining=7 clear=2.000 policy="default";q=9;w=9 ratelimit="default";r=7;t=7`,
		},
		{
			"one of them again behind another",
			"route {\n" + block(9, one) + block(8, one) + block(9, one) + block(7, one) + "respond admitted\n}",
			`200 policy="default#2";q=8;w=8, "default";q=9;w=9, "default#3";q=7;w=7 ` +
				`ratelimit="default#2";r=7;t=7, "default";r=7;t=7, "default#3";r=6;t=6`,
		},
		{
			"one of them without these fields", "route {\n" + block(9, "") + block(9, one) + "respond admitted\n}",
			`200 limit=9 remaining=8 clear=1.000 policy="default";q=9;w=9 ratelimit="default";r=7;t=7`,
		},
		{
			"a limit whose size changes on the way", `route {
				vars size 9
				rate_limit sized {
					size {vars.size}
					headers ratelimit
				}
				vars size 8
				rate_limit sized {
					size {vars.size}
					headers ratelimit
				}
				respond admitted
			}`,
			`200 policy="sized";q=9;w=9, "sized#2";q=8;w=8 ratelimit="sized";r=8;t=8, "sized#2";r=6;t=6`,
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := startSite(t, tc.site)
			s.run(step{want: tc.want})
		})
	}
	t.Run("a named route invoked twice", func(t *testing.T) {
		s := startConfig(t, config{
			site:  "route {\ninvoke limited\ninvoke limited\nrespond admitted\n}",
			sites: "&(limited) {\nrate_limit api {\nsize 9\nheaders ratelimit\n}\n}",
		})
		s.run(
			step{want: `200 policy="api";q=9;w=9 ratelimit="api";r=7;t=7`},
			step{want: `200 policy="api";q=9;w=9 ratelimit="api";r=5;t=5`},
			step{want: `200 policy="api";q=9;w=9 ratelimit="api";r=3;t=3`},
			step{want: `200 policy="api";q=9;w=9 ratelimit="api";r=1;t=1`},
			step{want: `429 retry-after=1 policy="api";q=9;w=9 ratelimit="api";r=0;t=1`},
		)
	})
}

// Guards that a limit's policy is the same in all responses, whatever a request costs,
// and has no quota unit that the draft's registry lacks.
func TestPolicyOfUnits(t *testing.T) {
	s := startSite(t, `
		route /cheap {
			rate_limit api {
				size 9
				headers ratelimit
			}
			rate_limit {
				size 9
				headers ratelimit
			}
			rate_limit each {
				max 9
				duration 9s
				min_interval 1s
				cost {header.X-Cost}
				headers ratelimit
			}
		}
		rate_limit /costly api {
			size 9
			cost 2
			headers ratelimit-11
		}
		respond admitted
	`)
	const policies = `policy="api";q=9;w=9, "default";q=9;w=9, "each";q=9;w=9, "each/min_interval";q=1;w=1 `
	s.run(
		step{path: "/cheap", header: []string{"X-Cost: 1"}, want: `200 ` + policies +
			`ratelimit="api";r=8;t=8, "default";r=8;t=8, "each";r=8;t=8, "each/min_interval";r=0;t=1`},
		step{path: "/costly", want: `200 policy="api";q=9;w=9 ratelimit="api";r=6;t=6`},
		step{path: "/cheap", after: time.Second, header: []string{"X-Cost: 5"}, want: `200 ` + policies +
			`ratelimit="api";r=6;t=6, "default";r=8;t=8, "each";r=4;t=4, "each/min_interval";r=0;t=1`},
	)
}

// upstreamFields are fields of ours as an upstream sends them.
var upstreamFields = map[string]string{
	"X-RateLimit-Limit":     "5000",
	"X-RateLimit-Remaining": "4999",
	"X-RateLimit-Clear":     "1.5",
	"X-RateLimit-Reset":     "1795259336", // on denial ours; else it would not go with the others
	"RateLimit-Policy":      `"up";q=5000;w=60`,
	"RateLimit":             `"up";r=4999;t=1`,
}

// Guards that an upstream's fields do not come behind the body where ours stand
// before it, announced or not: a client would take the last ones it sees. The
// draft forbids its fields there. Other trailers pass.
func TestUpstreamTrailers(t *testing.T) {
	upstream := newUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		prefix := http.TrailerPrefix
		if r.URL.Path == "/announced" {
			prefix = ""
			for name := range upstreamFields {
				w.Header().Add("Trailer", name)
			}
			w.Header().Add("Trailer", "X-Checksum")
		}
		switch r.URL.Path {
		case "/only-ours":
			w.Header().Set("Trailer", "X-RateLimit-Limit")
		case "/partly":
			w.Header().Set("Trailer", "X-Checksum, X-Absent")
		}
		io.WriteString(w, "upstream")
		http.NewResponseController(w).Flush()
		if r.URL.Path == "/only-ours" {
			w.Header().Set("X-RateLimit-Limit", "5000")
			return
		}
		for name, value := range upstreamFields {
			w.Header().Set(prefix+name, value)
		}
		w.Header().Set(prefix+"X-Checksum", "1")
	})
	const all = "limit=5000 remaining=4999 clear=1.5 reset=1795259336 policy=\"up\";q=5000;w=60 ratelimit=\"up\";r=4999;t=1"
	for _, protocol := range []string{"HTTP/1.1", "HTTP/2.0"} {
		for _, tc := range []struct{ name, block, want string }{
			{"both families", "rate_limit {\nsize 9\nheaders x-ratelimit ratelimit\n}", ""},
			{"one family", "rate_limit {\nsize 9\n}", `policy="up";q=5000;w=60 ratelimit="up";r=4999;t=1`},
			{"none", "rate_limit {\nsize 9\nheaders off\n}", all},
			{"two blocks", `
				rate_limit outer {
					size 9
				}
				encode gzip
				rate_limit inner {
					size 8
					headers ratelimit
				}`, ""},
		} {
			t.Run(protocol+" "+tc.name, func(t *testing.T) {
				s := startConfig(t, config{
					global: "servers {\nprotocols h1 h2c\n}",
					site:   "route {\n" + tc.block + "\nreverse_proxy " + upstream + "\n}",
				})
				if protocol == "HTTP/2.0" {
					s.useHTTP2()
				}
				for _, path := range []string{"/announced", "/sudden", "/partly"} {
					a := s.get(path)
					if a.Proto != protocol || a.body != "upstream" {
						t.Errorf("%s: got %s, body %q", path, a.Proto, a.body)
					}
					if got := fieldsIn(a.Trailer); got != tc.want {
						t.Errorf("%s: got %s in trailers, want %s", path, got, tc.want)
					}
					if a.Trailer.Get("X-Checksum") != "1" {
						t.Errorf("%s: another trailer is lost: %v", path, a.Trailer)
					}
				}
				if a := s.get("/only-ours"); tc.want == "" && len(a.Trailer) > 0 {
					t.Errorf("of our fields alone: %v is announced", a.Trailer)
				}
			})
		}
	}
}

// Guards that an informational response has no other rate limit than ours, like
// the final one that it tells of beforehand.
func TestEarlyHintsHaveOneLimit(t *testing.T) {
	upstream := newUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		for name, value := range upstreamFields {
			w.Header().Set(name, value)
		}
		w.Header().Set("Link", "</style.css>; rel=preload")
		w.WriteHeader(http.StatusEarlyHints)
		w.WriteHeader(http.StatusEarlyHints)
		io.WriteString(w, "upstream")
	})
	s := startSite(t, "rate_limit {\nsize 9\nheaders x-ratelimit ratelimit\n}\nreverse_proxy "+upstream)
	const ours = `limit=9 remaining=8 clear=1.000 policy="default";q=9;w=9 ratelimit="default";r=8;t=8`
	hints, final := s.getWithHints("/")
	const hint = "103 </style.css>; rel=preload " + ours
	if want := []string{hint, hint}; !slices.Equal(hints, want) {
		t.Errorf("got hints\n %q\nwant\n %q", hints, want)
	}
	if got, want := final.String(), "200 "+ours; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// Guards the remedy that the documentation gives where an error route proxies:
// of all fields only ours are left.
func TestErrorRouteThatProxies(t *testing.T) {
	upstream := newUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		for name, value := range upstreamFields {
			w.Header().Set(name, value)
		}
		w.Header().Set("Retry-After", "120")
		w.Header().Set("X-Error-Page", "slow down")
		io.WriteString(w, "error page")
	})
	s := startSite(t, `
		rate_limit {
			size 1
			headers x-ratelimit ratelimit
		}
		respond admitted
		handle_errors {
			reverse_proxy `+upstream+` {
				`+remedy(t)+`
			}
		}
	`)
	s.get("/")
	a := s.get("/")
	const want = `200 limit=1 remaining=0 clear=1.000 reset=1.000 retry-after=1 ` +
		`policy="default";q=1;w=1 ratelimit="default";r=0;t=1`
	if a.String() != want || a.body != "error page" || a.Header.Get("X-Error-Page") != "slow down" {
		t.Errorf("got %s, body %q\nwant %s, the upstream's body", a, a.body, want)
	}
}

// remedy returns the lines of the documentation by which a proxy in an error
// route removes an upstream's fields.
func remedy(t *testing.T) string {
	text, err := os.ReadFile("docs/directive.md")
	if err != nil {
		t.Fatal(err)
	}
	lines := regexp.MustCompile(`(?m)^\s*header_down -.*$`).FindAllString(string(text), -1)
	if len(lines) == 0 {
		t.Fatal("the documentation has no lines with header_down")
	}
	return strings.Join(lines, "\n")
}

// TestUpstreamFields guards that fields of ours which an upstream sends too do
// not stand twice in the response, and that nothing else of it is lost.
func TestUpstreamFields(t *testing.T) {
	upstream := newUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		for name, value := range upstreamFields {
			w.Header().Set(name, value)
		}
		w.Header().Set("X-RateLimit-Resource", "core")
		if r.URL.Path == "/busy" {
			w.Header().Set("Retry-After", "120")
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		io.WriteString(w, "upstream")
	})
	site := `
		@limited not path /free
		rate_limit @limited {
			size 9
			headers %s
		}
		reverse_proxy ` + upstream

	t.Run("both families", func(t *testing.T) {
		s := startSite(t, fmt.Sprintf(site, "x-ratelimit ratelimit"))
		s.run(
			step{body: "upstream",
				want: `200 limit=9 remaining=8 clear=1.000 policy="default";q=9;w=9 ratelimit="default";r=8;t=8`},
			// When the upstream wants clients to wait it is not for us to change.
			step{path: "/busy", body: "upstream", want: `503 limit=9 remaining=7 clear=2.000 retry-after=120 ` +
				`policy="default";q=9;w=9 ratelimit="default";r=7;t=7`},
		)
		if got := s.get("/").Header.Values("X-RateLimit-Resource"); !slices.Equal(got, []string{"core"}) {
			t.Errorf("a field of the upstream's own is %q", got)
		}
	})
	t.Run("one family", func(t *testing.T) {
		s := startSite(t, fmt.Sprintf(site, "x-ratelimit"))
		s.run(step{want: `200 limit=9 remaining=8 clear=1.000 ` +
			`policy="up";q=5000;w=60 ratelimit="up";r=4999;t=1`})
	})
	t.Run("no limit applies", func(t *testing.T) {
		s := startSite(t, fmt.Sprintf(site, "x-ratelimit"))
		s.run(step{path: "/free", want: `200 limit=5000 remaining=4999 clear=1.5 reset=1795259336 ` +
			`policy="up";q=5000;w=60 ratelimit="up";r=4999;t=1`})
	})
	t.Run("off", func(t *testing.T) {
		s := startSite(t, fmt.Sprintf(site, "off"))
		s.run(step{want: `200 limit=5000 remaining=4999 clear=1.5 reset=1795259336 ` +
			`policy="up";q=5000;w=60 ratelimit="up";r=4999;t=1`})
	})
}

// TestHeadersOption guards which fields each word brings, and that no setting
// hides from a denied client how long to wait.
func TestHeadersOption(t *testing.T) {
	for _, tc := range []struct{ headers, admitted, denied string }{
		{"", "200 limit=1 remaining=0 clear=1.000",
			"429 limit=1 remaining=0 clear=1.000 reset=1.000 retry-after=1"},
		{"headers x-ratelimit", "200 limit=1 remaining=0 clear=1.000",
			"429 limit=1 remaining=0 clear=1.000 reset=1.000 retry-after=1"},
		{"headers ratelimit", `200 policy="default";q=1;w=1 ratelimit="default";r=0;t=1`,
			`429 retry-after=1 policy="default";q=1;w=1 ratelimit="default";r=0;t=1`},
		{"headers ratelimit x-ratelimit",
			`200 limit=1 remaining=0 clear=1.000 policy="default";q=1;w=1 ratelimit="default";r=0;t=1`,
			`429 limit=1 remaining=0 clear=1.000 reset=1.000 retry-after=1 ` +
				`policy="default";q=1;w=1 ratelimit="default";r=0;t=1`},
		{"headers off", "200", "429 retry-after=1"},
	} {
		t.Run(tc.headers, func(t *testing.T) {
			s := startSite(t, `
				rate_limit {
					size 1
					`+tc.headers+`
				}
				respond "admitted"
			`)
			s.run(step{want: tc.admitted, body: "admitted"}, step{want: tc.denied})
		})
	}
}

// TestHeaderDirective guards that an administrator who configures a header directive has the
// last word on our fields: they are not restored when removed or replaced.
func TestHeaderDirective(t *testing.T) {
	upstream := newUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-RateLimit-Limit", "5000")
	})
	for _, tc := range []struct{ name, routes, want string }{
		{"removed outside", `
			header -X-RateLimit-Limit
			rate_limit {
				size 2
			}
			respond "admitted"`, "200 remaining=1 clear=1.000"},
		{"all removed outside", `
			header -X-RateLimit-*
			rate_limit {
				size 2
			}
			reverse_proxy ` + upstream, "200"},
		{"replaced outside, when the response is written", `
			header >X-RateLimit-Limit mine
			rate_limit {
				size 2
			}
			reverse_proxy ` + upstream, "200 limit=mine remaining=1 clear=1.000"},
		{"removed inside", `
			rate_limit {
				size 2
			}
			header -X-RateLimit-Limit
			respond "admitted"`, "200 remaining=1 clear=1.000"},
		{"replaced inside", `
			rate_limit {
				size 2
			}
			header X-RateLimit-Limit mine
			respond "admitted"`, "200 limit=mine remaining=1 clear=1.000"},
		{"changed inside", `
			rate_limit {
				size 2
			}
			header X-RateLimit-Limit 2 two
			reverse_proxy ` + upstream, "200 limit=two remaining=1 clear=1.000"},
		// What stood there before is as an upstream's.
		{"set outside, at once", `
			header X-RateLimit-Limit mine
			rate_limit {
				size 2
			}
			respond "admitted"`, "200 limit=2 remaining=1 clear=1.000"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := startSite(t, "route {"+tc.routes+"\n}")
			s.run(step{want: tc.want})
		})
	}
}
