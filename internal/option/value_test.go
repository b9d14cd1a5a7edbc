package option

import (
	"math"
	"math/big"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// wantUnits is what errors say of units.
const wantUnits = "want a whole number from 1 to 562949953421312"

// Guards what numbers of units are read: decimal digits from 1 to 2^49.
func TestParseUnits(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]int64{
		"1": 1, "10": 10, "0010": 10, "562949953421312": 1 << 49,
	} {
		if got, message := Units(text); got != want || message != "" {
			t.Errorf("%q is %d, %q, want %d", text, got, message, want)
		}
	}
}

// Guards what intervals are read: whole microseconds from one, with Caddy's
// unit for days.
func TestParseInterval(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]time.Duration{
		"1us": time.Microsecond, "1µs": time.Microsecond, "1000ns": time.Microsecond,
		"1.5ms": 1500 * time.Microsecond, "1s": time.Second, "+1s": time.Second, "90m": 90 * time.Minute,
		"1h30m": 90 * time.Minute, "1d": 24 * time.Hour, "1.5d": 36 * time.Hour, "1d12h": 36 * time.Hour,
		"9223372036854775us": math.MaxInt64 / 1000 * time.Microsecond,
	} {
		if got, message := Interval(text); got != want || message != "" {
			t.Errorf("%q is %v, %q, want %v", text, got, message, want)
		}
	}
}

// Guards what factors are read, and that they are shown in their shortest form.
func TestParseFactor(t *testing.T) {
	t.Parallel()
	tests := []struct {
		text  string
		want  Factor
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
			got, message := ParseFactor(tc.text)
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
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		f := Factor(rapid.OneOf(rapid.Uint64(), rapid.Uint64Range(0, 20_000_000)).Draw(t, "factor"))
		if got, message := ParseFactor(f.String()); got != f || message != "" {
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
func divided(size int64, f Factor) int64 {
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
	t.Parallel()
	sizes := []int64{
		1, 2, 3, 9, 10, 999_999, 1_000_000, 1_000_001, 18_446_744_073_710,
		limiter.MaxUnits - 1, limiter.MaxUnits,
	}
	factors := []Factor{
		1, 2, 3, 499_999, 500_000, 500_001, 999_999, 1_000_000, 1_000_001, 1_999_999, 2_000_000, 2_000_001,
		10_000_000,
		limiter.MaxUnits, 1 << 63, 1<<63 + 1, math.MaxUint64 - 1, math.MaxUint64,
	}
	for _, size := range sizes {
		for _, f := range factors {
			if got, want := f.Divide(size), divided(size, f); got != want {
				t.Errorf("%d divided by %s is %d, want %d", size, f, got, want)
			}
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.Int64Range(1, limiter.MaxUnits).Draw(t, "size")
		f := Factor(rapid.OneOf(rapid.Uint64Min(1), rapid.Uint64Range(1, 20_000_000)).Draw(t, "factor"))
		if got, want := f.Divide(size), divided(size, f); got != want {
			t.Fatalf("%d divided by %s is %d, want %d", size, f, got, want)
		}
	})
}

// Guards the examples of what a factor does.
func TestFactorExamples(t *testing.T) {
	t.Parallel()
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
		f, _ := ParseFactor(tc.factor)
		if got := f.Divide(tc.size); got != tc.want {
			t.Errorf("%d divided by %s is %d, want %d", tc.size, tc.factor, got, tc.want)
		}
	}
}

// Guards what counts as a placeholder: what Caddy would replace, and nothing
// that is escaped or unclosed.
func TestHasPlaceholder(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]bool{
		"": false, "5": false, "{": false, "}": false, "}{": false, "{a": false, "a}": false, `\{a}`: false,
		`\{a\}`: false, `{a\}`: true, "{}": true, "{a}": true, "5{a}": true, "{{a}": true, "{a}{": true,
		`\{{a}`: true, "}{a}": true,
	} {
		if got := HasPlaceholder(text); got != want {
			t.Errorf("%q holds a placeholder = %t, want %t", text, got, want)
		}
	}
}

// Guards that a value with placeholders is read anew for each request, that
// all it expands to counts, and that what is wrong names the option and the
// template, and no more of what a client sent than 64 bytes.
func TestValueAt(t *testing.T) {
	t.Parallel()
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
		{"placeholder", "{n}", "{n}", 0, `size: got 3 bytes that are not shown, ` + wantUnits + ` from {n}`},
		{"fraction by two", "{n}.{n}", "1", 0, `size: got "1.1", ` + wantUnits + ` from {n}.{n}`},
		{"line break", "{n}", "1\n2", 0, `size: got 3 bytes that are not shown, ` + wantUnits + ` from {n}`},
		{
			"24 digits", "{n}", strings.Repeat("9", 24), 0,
			`size: got "` + strings.Repeat("9", 24) + `", ` + wantUnits + ` from {n}`,
		},
		{
			"25 digits", "{n}", strings.Repeat("9", 25), 0,
			`size: got 25 bytes that are not shown, ` + wantUnits + ` from {n}`,
		},
		{
			"a megabyte of digits", "{n}", strings.Repeat("9", 1<<20), 0,
			`size: got 1048576 bytes that are not shown, ` + wantUnits + ` from {n}`,
		},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			v, err := NewValue(OnLoad, "size", tc.template, Units)
			if err != nil {
				t.Fatal(err)
			}
			if !v.IsDynamic() || v.String() != tc.template {
				t.Errorf("varies = %t and shown as %s, want true and %s", v.IsDynamic(), v.String(), tc.template)
			}
			repl := caddy.NewEmptyReplacer()
			repl.Set("n", "7")
			if _, err := v.At(repl); err != nil && tc.template != "{n}.{n}" {
				t.Errorf("of another request: %v", err)
			}
			repl.Set("n", tc.sent)
			got, err := v.At(repl)
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
	t.Parallel()
	v, err := NewValue(OnLoad, "drip_rate", "90m", Interval)
	if err != nil {
		t.Fatal(err)
	}
	got, err := v.At(nil)
	if got != 90*time.Minute || err != nil || v.IsDynamic() || v.String() != "1h30m0s" {
		t.Errorf("got %v, %v, varies = %t, shown as %s", got, err, v.IsDynamic(), v.String())
	}
}

// Guards that no text panics, and that one which is read is a limit or an error.
func FuzzRate(f *testing.F) {
	for _, text := range []string{"60/1s", "7/1s", "999/1s", "3/1d", "1/1us", "562949953421312/1us", "1/6000d", "10/s", "10/2hours"} {
		f.Add(text, int64(1))
		f.Add(text, int64(math.MaxInt64))
	}
	f.Fuzz(func(t *testing.T, text string, size int64) {
		r, want := ParseRate(text)
		if want != "" {
			return
		}
		l, err := r.Limit(size)
		if (err == nil) != (l.Validate() == nil && l != limiter.Limit{}) {
			t.Errorf("%q, size %d: %+v, %v", text, size, l, err)
		}
	})
}
