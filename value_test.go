package ratelimit

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/big"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap/zapcore"
	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Guards what a Number is in JSON: a number if it can be written as one, else
// a string, and either is read.
func TestNumberJSON(t *testing.T) {
	tests := []struct{ text, want string }{
		{"5", `5`},
		{"0", `0`},
		{"-5", `-5`},
		{"0.5", `0.5`},
		{"562949953421312", `562949953421312`},
		{"{http.vars.size}", `"{http.vars.size}"`},
		{"1{http.vars.size}", `"1{http.vars.size}"`},
		{"007", `"007"`},
		{"+5", `"+5"`},
		{".5", `".5"`},
		{"NaN", `"NaN"`},
		{"true", `"true"`},
		{"null", `"null"`},
		{"[5]", `"[5]"`},
		{" 5", `" 5"`},
		{"5 ", `"5 "`},
		{"-", `"-"`},
		{"5\n", `"5\n"`},
	}
	for _, tc := range tests {
		t.Run(tc.text, func(t *testing.T) {
			got, err := json.Marshal(Number(tc.text))
			if err != nil || string(got) != tc.want {
				t.Errorf("written as %s, %v, want %s", got, err, tc.want)
			}
			var again Number
			if err := json.Unmarshal([]byte(tc.want), &again); err != nil || string(again) != tc.text {
				t.Errorf("read as %q, %v, want %q", again, err, tc.text)
			}
		})
	}
}

// Guards that a number may be written as a string in JSON, and that null is
// none.
func TestNumberFromJSON(t *testing.T) {
	for in, want := range map[string]Number{
		`5`: "5", `"5"`: "5", `0.50`: "0.50", `""`: "", `null`: "", `"{a}"`: "{a}",
	} {
		got := Number("before")
		if err := json.Unmarshal([]byte(in), &got); err != nil || got != want {
			t.Errorf("%s is read as %q, %v, want %q", in, got, err, want)
		}
	}
}

// Guards that no text changes on its way from a Caddyfile through JSON, also
// where Caddy decodes and encodes it in between, as it does with handlers. What
// is refused then is shown as it was written.
func TestNumberKeepsText(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.OneOf(
			rapid.StringMatching(`-?[0-9]{1,25}(\.[0-9]{0,25})?([eE][+-]?[0-9]{1,3})?[ \n]?`),
			rapid.StringMatching(`[-+0-9.eE{}xX_ ]{1,8}`),
			rapid.String(),
		).Draw(t, "text")
		written, err := json.Marshal(Number(text))
		if err != nil {
			t.Fatal(err)
		}
		var between any
		if err := json.Unmarshal(written, &between); err != nil {
			t.Fatalf("%q is written as %s: %v", text, written, err)
		}
		if written, err = json.Marshal(between); err != nil {
			t.Fatal(err)
		}
		var again Number
		if err := json.Unmarshal(written, &again); err != nil || string(again) != text {
			t.Fatalf("%q has become %q, %v", text, again, err)
		}
	})
}

// Guards what a Duration is in JSON: a string as it is written, or read from a
// number of nanoseconds, as Caddy's own durations can be.
func TestDurationJSON(t *testing.T) {
	for _, text := range []string{"1s", "500ms", "1d", "5", "", "{http.vars.rate}", "1 s", "\"", "\n"} {
		written, err := json.Marshal(Duration(text))
		if err != nil {
			t.Fatal(err)
		}
		var again Duration
		if err := json.Unmarshal(written, &again); err != nil || string(again) != text || written[0] != '"' {
			t.Errorf("%q is written as %s and read as %q, %v", text, written, again, err)
		}
	}
	for in, want := range map[string]Duration{
		`1500`: "1500ns", `0`: "0ns", `-5`: "-5ns", `1.5`: "1.5ns", `null`: "",
	} {
		got := Duration("before")
		if err := json.Unmarshal([]byte(in), &got); err != nil || got != want {
			t.Errorf("%s is read as %q, %v, want %q", in, got, err, want)
		}
	}
}

// Guards what numbers of units are read: decimal digits from 1 to 2^49.
func TestParseUnits(t *testing.T) {
	for text, want := range map[string]int64{
		"1": 1, "10": 10, "0010": 10, "562949953421312": 1 << 49,
	} {
		if got, message := parseUnits(text); got != want || message != "" {
			t.Errorf("%q is %d, %q, want %d", text, got, message, want)
		}
	}
}

// Guards what intervals are read: whole microseconds from one, with Caddy's
// unit for days.
func TestParseInterval(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"1us": time.Microsecond, "1µs": time.Microsecond, "1000ns": time.Microsecond,
		"1.5ms": 1500 * time.Microsecond, "1s": time.Second, "+1s": time.Second, "90m": 90 * time.Minute,
		"1h30m": 90 * time.Minute, "1d": 24 * time.Hour, "1.5d": 36 * time.Hour, "1d12h": 36 * time.Hour,
		"9223372036854775us": math.MaxInt64 / 1000 * time.Microsecond,
	} {
		if got, message := parseInterval(text); got != want || message != "" {
			t.Errorf("%q is %v, %q, want %v", text, got, message, want)
		}
	}
}

// Guards what factors are read, and that they are shown in their shortest form.
func TestParseFactor(t *testing.T) {
	tests := []struct {
		text  string
		want  factor
		shown string
	}{
		{"0", 0, "0"},
		{"0.000000", 0, "0"},
		{"0.000001", 1, "0.000001"},
		{"0.5", 500_000, "0.5"},
		{"00.50", 500_000, "0.5"},
		{"1", 1_000_000, "1"},
		{"1.25", 1_250_000, "1.25"},
		{"1.000001", 1_000_001, "1.000001"},
		{"10", 10_000_000, "10"},
		{"100.10", 100_100_000, "100.1"},
		{"18446744073709.551615", math.MaxUint64, "18446744073709.551615"},
	}
	for _, tc := range tests {
		t.Run(tc.text, func(t *testing.T) {
			got, message := parseFactor(tc.text)
			if got != tc.want || message != "" {
				t.Errorf("read as %d, %q, want %d", got, message, tc.want)
			}
			if got.String() != tc.shown {
				t.Errorf("shown as %s, want %s", got, tc.shown)
			}
		})
	}
}

// Guards that every factor is read back from how it is shown, and is the
// decimal that stands there.
func TestFactorTextRoundTrips(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := factor(rapid.OneOf(rapid.Uint64(), rapid.Uint64Range(0, 20_000_000)).Draw(t, "factor"))
		if got, message := parseFactor(f.String()); got != f || message != "" {
			t.Fatalf("%d is shown as %s and read as %d, %q", f, f, got, message)
		}
		shown, ok := new(big.Rat).SetString(f.String())
		exact := new(big.Rat).SetFrac(new(big.Int).SetUint64(uint64(f)), big.NewInt(1_000_000))
		if !ok || shown.Cmp(exact) != 0 {
			t.Fatalf("%d millionths are shown as %s", f, f)
		}
	})
}

// divided is the size divided by a factor as the documentation has it, rounded
// up and at least 1; more than a bucket holds if it would be.
func divided(size int64, f factor) int64 {
	n := new(big.Int).Mul(big.NewInt(size), big.NewInt(1_000_000))
	n, rest := n.QuoRem(n, new(big.Int).SetUint64(uint64(f)), new(big.Int))
	if rest.Sign() > 0 {
		n.Add(n, big.NewInt(1))
	}
	if n.Sign() == 0 {
		return 1
	}
	if n.Cmp(big.NewInt(limiter.MaxUnits)) > 0 {
		return limiter.MaxUnits + 1
	}
	return n.Int64()
}

// Guards the division by a factor against exact arithmetic, on any numbers and
// about the edges of their ranges.
func TestFactorDivides(t *testing.T) {
	sizes := []int64{
		1, 2, 3, 9, 10, 999_999, 1_000_000, 1_000_001, 18_446_744_073_710,
		limiter.MaxUnits - 1, limiter.MaxUnits,
	}
	factors := []factor{
		1, 2, 3, 499_999, 500_000, 500_001, 999_999, 1_000_000, 1_000_001, 1_999_999, 2_000_000, 2_000_001,
		10_000_000,
		limiter.MaxUnits, 1 << 63, 1<<63 + 1, math.MaxUint64 - 1, math.MaxUint64,
	}
	for _, size := range sizes {
		for _, f := range factors {
			if got, want := f.divide(size), divided(size, f); got != want {
				t.Errorf("%d divided by %s is %d, want %d", size, f, got, want)
			}
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.Int64Range(1, limiter.MaxUnits).Draw(t, "size")
		f := factor(rapid.OneOf(rapid.Uint64Min(1), rapid.Uint64Range(1, 20_000_000)).Draw(t, "factor"))
		if got, want := f.divide(size), divided(size, f); got != want {
			t.Fatalf("%d divided by %s is %d, want %d", size, f, got, want)
		}
	})
}

// Guards the examples of what a factor does.
func TestFactorExamples(t *testing.T) {
	tests := []struct {
		size   int64
		factor string
		want   int64
	}{
		{10, "1", 10},
		{10, "2", 5},
		{10, "3", 4},
		{10, "0.5", 20},
		{10, "0.3", 34},
		{10, "100", 1},
		{1, "18446744073709.551615", 1},
		{limiter.MaxUnits, "0.999999", limiter.MaxUnits + 1},
	}
	for _, tc := range tests {
		f, _ := parseFactor(tc.factor)
		if got := f.divide(tc.size); got != tc.want {
			t.Errorf("%d divided by %s is %d, want %d", tc.size, tc.factor, got, tc.want)
		}
	}
}

// Guards what counts as a placeholder: what Caddy would replace, and nothing
// that is escaped or unclosed.
func TestHasPlaceholder(t *testing.T) {
	for text, want := range map[string]bool{
		"": false, "5": false, "{": false, "}": false, "}{": false, "{a": false, "a}": false, `\{a}`: false,
		`\{a\}`: false, `{a\}`: true, "{}": true, "{a}": true, "5{a}": true, "{{a}": true, "{a}{": true,
		`\{{a}`: true, "}{a}": true,
	} {
		if got := hasPlaceholder(text); got != want {
			t.Errorf("%q holds a placeholder = %t, want %t", text, got, want)
		}
	}
}

// Guards that a value with placeholders is read anew for each request, that
// all it expands to counts, and that what is wrong names the option and the
// template, and no more of what a client sent than 64 bytes.
func TestValueAt(t *testing.T) {
	tests := []struct {
		name, template, sent string
		want                 int64
		message              string
	}{
		{"number", "{n}", "5", 5, ""},
		{"most", "{n}", "562949953421312", 1 << 49, ""},
		{"behind a digit", "1{n}", "5", 15, ""},
		{"nothing behind a digit", "1{n}", "", 1, ""},
		{"twice", "{n}{n}", "12", 1212, ""},
		{"unknown beside it", "{n}{nope}", "5", 5, ""},
		{"nothing", "{n}", "", 0, `size: got "", ` + wantUnits + ` from {n}`},
		{"zero", "{n}", "0", 0, `size: got "0", ` + wantUnits + ` from {n}`},
		{"negative", "{n}", "-1", 0, `size: got "-1", ` + wantUnits + ` from {n}`},
		{"too much", "{n}", "562949953421313", 0, `size: got "562949953421313", ` + wantUnits + ` from {n}`},
		{
			"overflow",
			"{n}",
			"18446744073709551617",
			0,
			`size: got "18446744073709551617", ` + wantUnits + ` from {n}`,
		},
		{"exponent", "{n}", "1e3", 0, `size: got "1e3", ` + wantUnits + ` from {n}`},
		{"placeholder", "{n}", "{n}", 0, `size: got "{n}", ` + wantUnits + ` from {n}`},
		{"fraction by two", "{n}.{n}", "1", 0, `size: got "1.1", ` + wantUnits + ` from {n}.{n}`},
		{"line break", "{n}", "1\n2", 0, `size: got "1\n2", ` + wantUnits + ` from {n}`},
		{
			"64 bytes", "{n}", strings.Repeat("x", 64), 0,
			`size: got "` + strings.Repeat("x", 64) + `", ` + wantUnits + ` from {n}`,
		},
		{
			"65 bytes", "{n}", strings.Repeat("x", 65), 0,
			`size: got "` + strings.Repeat("x", 64) + `…", ` + wantUnits + ` from {n}`,
		},
		{
			"a megabyte of digits", "{n}", strings.Repeat("9", 1<<20), 0,
			`size: got "` + strings.Repeat("9", 64) + `…", ` + wantUnits + ` from {n}`,
		},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			v, err := newValue(resolveNumber, "size", tc.template, parseUnits)
			if err != nil {
				t.Fatal(err)
			}
			if !v.isDynamic() || v.String() != tc.template {
				t.Errorf("varies = %t and shown as %s, want true and %s", v.isDynamic(), v.String(), tc.template)
			}
			repl := caddy.NewEmptyReplacer()
			repl.Set("n", "7")
			if _, err := v.at(repl); err != nil && tc.template != "{n}.{n}" {
				t.Errorf("of another request: %v", err)
			}
			repl.Set("n", tc.sent)
			got, err := v.at(repl)
			message := ""
			if err != nil {
				message = err.Error()
			}
			if message != tc.message || err == nil && got != tc.want {
				t.Errorf("got %d, error %q\nwant %d, error %q", got, message, tc.want, tc.message)
			}
		})
	}
}

// Guards that a constant needs no request.
func TestConstantValue(t *testing.T) {
	v, err := newValue(resolveNumber, "drip_rate", "90m", parseInterval)
	if err != nil {
		t.Fatal(err)
	}
	got, err := v.at(nil)
	if got != 90*time.Minute || err != nil || v.isDynamic() || v.String() != "1h30m0s" {
		t.Errorf("got %v, %v, varies = %t, shown as %s", got, err, v.isDynamic(), v.String())
	}
}

// Guards that a value which is no usable number is never a free pass: the
// request is refused, by 400 if the cost may have been the client's doing and
// else by 500, and the buckets of other limits are not asked either.
func TestBadValuesRejectRequests(t *testing.T) {
	good := map[string]string{"size": "10", "drip_rate": "1s", "drip_size": "1", "cost": "1", "factor": "1"}
	tests := []struct {
		option, text string
		status       int
		message      string
	}{
		{"size", "0", 500, `size: got "0", ` + wantUnits + ` from {size}`},
		{"drip_rate", "5", 500, `drip_rate: got "5", ` + wantInterval + ` from {drip_rate}`},
		{"drip_rate", "", 500, `drip_rate: got "", ` + wantInterval + ` from {drip_rate}`},
		{"drip_size", "-1", 500, `drip_size: got "-1", ` + wantUnits + ` from {drip_size}`},
		{"cost", "", 400, `cost: got "", ` + wantUnits + ` from {cost}`},
		{"cost", "0", 400, `cost: got "0", ` + wantUnits + ` from {cost}`},
		{"cost", "-5", 400, `cost: got "-5", ` + wantUnits + ` from {cost}`},
		{"cost", "NaN", 400, `cost: got "NaN", ` + wantUnits + ` from {cost}`},
		{"factor", "-1", 500, `factor: got "-1", ` + wantFactor + ` from {factor}`},
		{
			"drip_rate", "18000d", 500,
			`size 10, drip rate 432000h0m0s, drip size 1: ` + wantDrain,
		},
	}
	for _, tc := range tests {
		t.Run(tc.option+" "+tc.text, func(t *testing.T) {
			l, _ := readyLimit(t, &Limit{Size: "{size}", DripRate: "{drip_rate}", DripSize: "{drip_size}",
				Cost: "{cost}", Factor: "{factor}", Limits: []*Limit{{Name: "child", Size: "1"}}})
			c := newTestEvaluation()
			for option, text := range good {
				c.replacer.Set(option, text)
			}
			c.replacer.Set(tc.option, tc.text)
			err := l.addTo(c)
			ref, ok := errors.AsType[refusal](err)
			want := `limit "default": ` + tc.message
			if !ok || ref.status != tc.status || ref.Error() != want {
				t.Errorf("got %v (status %d)\nwant %s (status %d)", err, ref.status, want, tc.status)
			}
			if len(c.buckets) != 0 {
				t.Errorf("got buckets %+v, want none", c.buckets)
			}
		})
	}
}

// Guards that a limit within refuses a request just as one on its own does.
func TestBadValueOfNestedLimit(t *testing.T) {
	child := &Limit{Name: "a", Size: "10", Cost: "{cost}"}
	l, _ := readyLimit(t, &Limit{Name: "api", Size: "10", Limits: []*Limit{child, {Name: "b", Size: "10"}}})
	err := l.addTo(newTestEvaluation())
	ref, ok := errors.AsType[refusal](err)
	const want = `limit "api/a": cost: got "", ` + wantUnits + ` from {cost}`
	if !ok || ref.status != 400 || ref.Error() != want {
		t.Errorf("got %v (status %d)\nwant %s (status 400)", err, ref.status, want)
	}
}

// Guards that values from placeholders arrive in the bucket.
func TestPlaceholderNumbers(t *testing.T) {
	l, _ := readyLimit(t, &Limit{
		Name: "plan", Size: "{size}", DripRate: "{rate}", DripSize: "{drip}", Cost: "{cost}", Factor: "{factor}",
	})
	c := newTestEvaluation()
	for option, text := range map[string]string{
		"size": "10", "rate": "2m", "drip": "3", "cost": "4", "factor": "0.5",
	} {
		c.replacer.Set(option, text)
	}
	if err := l.addTo(c); err != nil {
		t.Fatal(err)
	}
	want := limiter.Bucket{Name: "plan", Key: "192.0.2.1", Cost: 4,
		Limit: limiter.Limit{Size: 20, DripInterval: 2 * time.Minute, DripSize: 3}}
	if len(c.buckets) != 1 || c.buckets[0] != want {
		t.Errorf("got buckets %+v, want %+v", c.buckets, want)
	}
}

// Guards that a factor of 0 switches off this bucket and no other, also when
// it comes from a placeholder.
func TestFactorZeroSwitchesOff(t *testing.T) {
	for _, factor := range []Number{"0", "0.0", "{factor}"} {
		child := &Limit{Name: "b", Size: "1"}
		l, _ := readyLimit(t, &Limit{Name: "a", Size: "1", Factor: factor, Limits: []*Limit{child}})
		c := newTestEvaluation()
		c.replacer.Set("factor", "0")
		if err := l.addTo(c); err != nil || len(c.buckets) != 1 || c.buckets[0].Name != "a/b" {
			t.Errorf("with factor %s got buckets %+v, %v, want a/b alone", factor, c.buckets, err)
		}
	}
	l, _ := readyLimit(t, &Limit{Name: "old", Max: "5", Duration: "1s", MinInterval: "1s", Factor: "0"})
	c := newTestEvaluation()
	if err := l.addTo(c); err != nil || len(c.buckets) != 1 || c.buckets[0].Name != "old/min_interval" {
		t.Errorf("of a legacy limit got buckets %+v, %v, want old/min_interval alone", c.buckets, err)
	}
}

// Guards what buckets max, duration and min_interval stand for: the interval of
// the first rounded up, so that it never admits more; cost and factor are its
// alone.
func TestLegacyBuckets(t *testing.T) {
	type buckets = []limiter.Bucket
	bucket := func(name string, size int64, rate time.Duration, cost int64) limiter.Bucket {
		return limiter.Bucket{Name: "old" + name, Key: "192.0.2.1", Cost: cost,
			Limit: limiter.Limit{Size: size, DripInterval: rate, DripSize: 1}}
	}
	tests := []struct {
		name  string
		limit *Limit
		want  buckets
	}{
		{"even", &Limit{Max: "60", Duration: "1m"}, buckets{bucket("", 60, time.Second, 1)}},
		{"rounded up", &Limit{Max: "7", Duration: "1s"}, buckets{bucket("", 7, 142_858*time.Microsecond, 1)}},
		{"hardly more", &Limit{Max: "3", Duration: "4us"}, buckets{bucket("", 3, 2*time.Microsecond, 1)}},
		{"fastest", &Limit{Max: "1000", Duration: "1ms"}, buckets{bucket("", 1000, time.Microsecond, 1)}},
		{
			"with an interval",
			&Limit{Max: "60", Duration: "1m", MinInterval: "2s", Cost: "3", Factor: "0.5"},
			buckets{bucket("", 120, time.Second, 3), bucket("/min_interval", 1, 2*time.Second, 1)},
		},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			tc.limit.Name = "old"
			l, _ := readyLimit(t, tc.limit)
			c := newTestEvaluation()
			if err := l.addTo(c); err != nil || !slices.Equal(c.buckets, tc.want) {
				t.Errorf("got buckets %+v, %v\nwant %+v", c.buckets, err, tc.want)
			}
		})
	}
}

// Guards that clients who make values bad do not fill the log: there is one
// line a minute for each limit, of level ERROR.
func TestBadValuesAreReportedOnceAMinute(t *testing.T) {
	l, logs := readyLimit(t, &Limit{Name: "a", Size: "10", Cost: "{cost}"})
	send := func() {
		c := newTestEvaluation()
		c.replacer.Set("cost", "secret"+strings.Repeat("x", 1000))
		if l.addTo(c) == nil {
			t.Error("got no refusal")
		}
	}
	for range 3 {
		send()
	}
	entries := logs.TakeAll()
	if len(entries) != 1 || entries[0].Level != zapcore.ErrorLevel {
		t.Fatalf("got %+v, want one entry of level ERROR", entries)
	}
	fields := entries[0].ContextMap()
	if fields["limit"] != "a" || len(fmt.Sprint(fields["error"])) > 250 {
		t.Errorf("got fields %v, want the limit's name and no more of the value than fits", fields)
	}
	l.valueErrorThrottle.last.Add(-int64(59 * time.Second))
	if send(); logs.Len() != 0 {
		t.Error("reported again after 59 s")
	}
	l.valueErrorThrottle.last.Add(-int64(time.Second))
	if send(); logs.Len() != 1 {
		t.Error("not reported again after 60 s")
	}
}

// TestDynamicNumbers guards that numbers may come from each request, and where
// size, cost and factor do the fields tell those in force.
func TestDynamicNumbers(t *testing.T) {
	s := startSite(t, `
		vars /premium size 20
		vars /free size 2
		rate_limit {
			limit plan {
				match not header X-Factor *
				size {vars.size}
				cost {header.X-Cost}
				drip_rate {header.X-Rate}
				drip_size {header.X-Drip}
			}
			limit tuned {
				match header X-Factor *
				size 7
				factor {header.X-Factor}
				limit within {
					size 100
				}
			}
		}
		respond "admitted"
	`)
	plan := func(cost, rate, drip string) []string {
		return []string{"X-Cost: " + cost, "X-Rate: " + rate, "X-Drip: " + drip}
	}
	factor := func(x string) []string { return []string{"X-Factor: " + x} }
	s.run(
		step{path: "/premium", header: plan("5", "1s", "1"), want: "200 limit=20 remaining=15 clear=5.000"},
		// The size alone is of this moment: it is the same bucket.
		step{path: "/free", header: plan("1", "1s", "1"),
			want: "429 limit=2 remaining=0 clear=5.000 reset=4.000 retry-after=4"},
		step{path: "/premium", header: plan("1", "1s", "1"), want: "200 limit=20 remaining=14 clear=6.000"},
		// Other drips are another bucket.
		step{path: "/premium", header: plan("3", "500ms", "2"), want: "200 limit=20 remaining=17 clear=1.000"},
		step{path: "/premium", header: plan("20", "2m", "20"), want: "200 limit=20 remaining=0 clear=120.000"},
		step{path: "/free", header: plan("3", "1s", "3"), want: "429 limit=2 remaining=2 clear=0.000"},

		step{header: factor("2"), want: "200 limit=4 remaining=3 clear=1.000"},
		step{header: factor("0.5"), want: "200 limit=14 remaining=12 clear=2.000"},
		step{header: factor("100"), want: "429 limit=1 remaining=0 clear=2.000 reset=2.000 retry-after=2"},
		// The bucket is off, those within are not.
		step{header: factor("0"), want: "200 limit=100 remaining=97 clear=3.000"},
		step{header: factor("0.000"), want: "200 limit=100 remaining=96 clear=4.000"},
	)
}

// TestBadDynamicNumbers guards that a request which makes a number unusable is
// never let through, whoever chose it: its own cost is its fault, other numbers
// are not.
func TestBadDynamicNumbers(t *testing.T) {
	s := startSite(t, `
		rate_limit {
			key everyone
			limit cost {
				match /cost
				size 100
				cost {header.X-Number}
			}
			limit size {
				match /size
				size {header.X-Number}
			}
			limit drip-size {
				match /drip-size
				size 100
				drip_size {header.X-Number}
			}
			limit drip-rate {
				match /drip-rate
				size 100
				drip_rate {header.X-Number}
			}
			limit factor {
				match /factor
				size 100
				factor {header.X-Number}
			}
			limit unknown {
				match /unknown
				size {http.no.such.placeholder}
			}
		}
		respond "admitted"
	`)
	numbers := []string{
		"", "0", "-1", "+1", "1.5", "1e3", "0x10", "x", "1_000", "1 000", "1,000", "١", "NaN", "Inf",
		"562949953421313", "9223372036854775808", "18446744073709551617", strings.Repeat("9", 1000),
	}
	for path, tc := range map[string]struct {
		status int
		bad    []string
		good   string
	}{
		"/cost":      {400, numbers, "7"},
		"/size":      {500, numbers, "7"},
		"/drip-size": {500, numbers, "7"},
		"/drip-rate": {500, []string{"", "0", "0s", "-1s", "1", "x", "100ns", "1500ns", "9999999h", "1s 1s"}, "7s"},
		"/factor": {500, []string{
			"", "-1", "+1", "1.", ".5", "1e3", "x", "1.0000001", "0.0000000", "NaN", "99999999999999999",
		}, "0.7"},
		"/unknown": {500, []string{"1"}, ""},
	} {
		for _, number := range tc.bad {
			a := s.get(path, "X-Number: "+number)
			if a.StatusCode != tc.status || a.body != "" {
				t.Errorf("%s with %.40q: got %d %q, want %d and nothing",
					path, number, a.StatusCode, a.body, tc.status)
			}
			if got := fieldsIn(a.Header); got != "" {
				t.Errorf("%s with %.40q: got fields %s", path, number, got)
			}
		}
		if tc.good != "" {
			if a := s.get(path, "X-Number: "+tc.good); a.StatusCode != 200 || a.body != "admitted" {
				t.Errorf("%s with %q: got %d %q", path, tc.good, a.StatusCode, a.body)
			}
		}
	}
}

// TestBadNumbersChargeNothing guards that a request refused for one limit's
// number has used up no other.
func TestBadNumbersChargeNothing(t *testing.T) {
	s := startSite(t, `
		rate_limit all {
			size 3
			accounting each
			limit costly {
				size 100
				cost {header.X-Cost}
			}
		}
		respond "admitted"
	`)
	s.run(times(5, step{want: "400"})...)
	s.run(step{header: []string{"X-Cost: 1"}, want: "200 limit=3 remaining=2 clear=1.000"})
}

// TestBadNumbersAreReported guards that the log says so, clearly, but at most
// once a minute for a limit: clients may send such requests as they like.
func TestBadNumbersAreReported(t *testing.T) {
	for name, errors := range map[string]string{
		"written directly":     "",
		"through error routes": "handle_errors {\nrespond {err.message}\n}",
	} {
		t.Run(name, func(t *testing.T) {
			s := startSite(t, `
				rate_limit {
					limit one {
						match /one
						size {header.X-Size}
					}
					limit two {
						match /two
						size 9
						cost {header.X-Cost}
					}
					limit three {
						match /three
						algorithm sliding_log
						size {header.X-Size}
						window {header.X-Window}
					}
					limit four {
						match /four
						algorithm sliding_window
						size 5
						window {header.X-Window}
					}
				}
				respond "admitted"
				`+errors)
			for range 3 {
				s.get("/one", "X-Size: lots")
				s.get("/two", "X-Cost: 0")
				s.get("/three", "X-Size: 10001", "X-Window: 1m")
				s.get("/four", "X-Window: 5000d")
			}
			var got []string
			for _, e := range s.log("error", ownLogger) {
				got = append(got, fmt.Sprint(e["limit"], ": ", e["error"]))
			}
			want := []string{
				`one: size: got "lots", want a whole number from 1 to 562949953421312 from {http.request.header.X-Size}`,
				`two: cost: got "0", want a whole number from 1 to 562949953421312 from {http.request.header.X-Cost}`,
				`three: size: got "10001", want at most 10000 with algorithm sliding_log from {http.request.header.X-Size}`,
				`four: window: got "5000d", want at most 11 years with algorithm sliding_window from {http.request.header.X-Window}`,
			}
			if !slices.Equal(got, want) {
				t.Errorf("got %q, want %q", got, want)
			}
			if more := s.log("error", errorLogger); len(more) > 0 {
				t.Errorf("Caddy reports it again: %v", more)
			}
		})
	}
}

var (
	decimalDigits = regexp.MustCompile(`^[0-9]+$`)
	decimal       = regexp.MustCompile(`^[0-9]+(\.[0-9]{1,6})?$`)
)

// Guards that whatever a placeholder expands to is either refused or makes
// numbers that a bucket can have; nothing but a plain zero of a factor lets
// the request past the bucket.
func FuzzPlaceholderNumbers(f *testing.F) {
	for _, text := range []string{
		"1", "10", "0", "-1", "-0", "+1", "1e3", "1E400", "0x10", "0b1", "1_0", "NaN", "Inf", "-inf", "", " ",
		" 1", "1 ", "1\n", "\x00", "1\x00", "562949953421312", "562949953421313", "9223372036854775808",
		"18446744073709551615", "18446744073709551616", "18446744073709551617", "0.5", "0.000001",
		"0.0000001", ".5", "5.", "1.1.1", "0.0", "00", "٣", "½", "\xff", "1s", "1us", "999ns", "1500ns",
		"35y", "18000d", "9223372036854775807ns", "9999999h", "1h1m1s", "-1s", "1d", "{n}", "{", "}", "\\{",
	} {
		f.Add(text)
	}
	limits := make(map[string]*Limit)
	for option, l := range map[string]*Limit{
		"size":      {Size: "{n}"},
		"drip_size": {Size: "10", DripSize: "{n}"},
		"drip_rate": {Size: "10", DripRate: "{n}"},
		"cost":      {Size: "10", Cost: "{n}"},
		"factor":    {Size: "10", Factor: "{n}"},
		"all":       {Size: "{n}", DripSize: "{n}", DripRate: "{n}s", Cost: "{n}", Factor: "{n}"},
	} {
		limits[option], _ = readyLimit(f, l)
	}
	f.Fuzz(func(t *testing.T, text string) {
		for option, l := range limits {
			c := newTestEvaluation()
			c.replacer.Set("n", text)
			err := l.addTo(c)
			if err != nil {
				ref, ok := errors.AsType[refusal](err)
				if !ok || ref.status != 500 && (ref.status != 400 || option != "cost") {
					t.Fatalf("%s %q: got %v, want a refusal", option, text, err)
				}
				message := err.Error()
				oneLine := utf8.ValidString(message) && !strings.ContainsAny(message, "\n\r\x00")
				if !oneLine || len(message) > 500 {
					t.Fatalf("%s %q: got %q, want one short line", option, text, message)
				}
				continue
			}
			if len(c.buckets) == 0 {
				zero, ok := new(big.Rat).SetString(text)
				hasFactor := option == "factor" || option == "all"
				if !hasFactor || !decimal.MatchString(text) || !ok || zero.Sign() != 0 {
					t.Fatalf("%s %q is a free pass", option, text)
				}
				continue
			}
			b := c.buckets[0]
			if err := b.Limit.Validate(); err != nil || b.Cost < 1 || b.Cost > limiter.MaxUnits {
				t.Fatalf("%s %q makes %+v: %v", option, text, b, err)
			}
			var got int64
			switch option {
			case "size":
				got = b.Limit.Size
			case "drip_size":
				got = b.Limit.DripSize
			case "cost":
				got = b.Cost
			case "factor":
				if !decimal.MatchString(text) {
					t.Fatalf("%s %q is taken", option, text)
				}
				continue
			default:
				continue
			}
			want, _ := new(big.Int).SetString(text, 10)
			if !decimalDigits.MatchString(text) || !want.IsInt64() || got != want.Int64() {
				t.Fatalf("%s %q is taken for %d", option, text, got)
			}
		}
	})
}
