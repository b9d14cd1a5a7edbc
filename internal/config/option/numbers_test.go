package option

import (
	"fmt"
	"math"
	"math/big"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/testseed"
)

// absurd are texts that no number, duration or rate can be, except those that a parser
// of TestRefusedTexts takes.
var absurd = []string{
	"0", "-1", "-0", "+5", "2147483647", "2147483648", "3000000000", "562949953421313", "9223372036854775807",
	"9223372036854775808", "18446744073709551616", "99999999999999999999999999", "1e30", "1e3", "1E3", "1e-3", "5e-1",
	"1e999", "0x1", "0x10", "0b1", "1_000", "1,000", "1/2", "1,5", "5%", "50%", "/24", "5x", "٣",
	"1.0", "1.5", "-0.5", "0.0000001", "0.1234567", "1.0000000", "1.00000000000000000000001", ".5", "1.", ".",
	"1.2.3", "1.-5", "1.+5", "1_0.5", "18446744073709.551616",
	" 5", "5 ", "five", "NaN", "Inf", "true", "{5", "5}", "{1s",
	"0s", "-1s", "-0s", "999ns", "1500ns", "1.0000001s", "9999999h", "100000000h", "9999999999999h",
	"9999999999999999999999h", strings.Repeat("9", 50) + "d", "1h", "1 s", "1e3s", "s", "1y", "1w", "second",

	"60", "0/1s", "-1/1s", "+5/1s", "1.5/1s", "1e3/1s", "562949953421313/1s", "99999999999999999999/1s", "/1s", "1/",
	"/", "1", "10/mins1", "10/se", "r/s", "10rr/s", "10 r/s", "r10/s", "10/S", "10/mss", "10/ms", "10/month", "10/week", "10/1.5hour", "10/-1hour",
	"10 / s", "10/ s", "10/hours1", "10 per", "10 per ", "per hour", " per hour", "10  per hour", "10 per  hour", "10 per /h", "10 Per hour", "10perhour", "10 hour", "10/0s", "10/0day", "10/99999999999day", "5/60", "1/0s", "1/-1s",
	"1/999ns", "1/1500ns", "1/1s/1", "1//1s", "1 / 1s", " 1/1s", "1/1s ", "1/1w", "1/1y", "1/9999999h", "1s/1",
	"ten/1s", "NaN/1s", "1/1s,2/1m", "٣/1s",
}

// Guards every parser against texts that can't be meant: an option that has one is refused
// by an error that has its name, the text as it was written and what would be right.
func TestRefusedTexts(t *testing.T) {
	t.Parallel()
	const units = "1 60 2147483647 2147483648 3000000000"
	refuses(t, Units, wantUnits, units, wantFewer,
		"562949953421313 9223372036854775807 9223372036854775808 18446744073709551616 99999999999999999999999999 "+
			"99999999999999999999/1s 9999999999999999999999h "+strings.Repeat("9", 50)+"d")
	refuses(t, PlanUnits, "use a whole number", "0 "+units, wantFewer,
		"562949953421313 9223372036854775807 9223372036854775808 18446744073709551616 99999999999999999999999999 "+
			"99999999999999999999/1s 9999999999999999999999h "+strings.Repeat("9", 50)+"d")
	refuses(t, Bits(32), "use a whole number of bits from 1 to 32", "1")
	refuses(t, Bits(128), "use a whole number of bits from 1 to 128", "1 60")
	refuses(t, Integer(0, 65535), "use a whole number from 0 to 65535", "0 1 60")
	refuses(t, Integer(1, 1_000_000_000), "use a whole number from 1 to 1000000000", "1 60")
	refuses(t, Integer(1, math.MaxInt32), "use a whole number from 1 to 2147483647", "1 60 2147483647")
	refuses(t, Interval, "use a duration of at least 1µs, such as 500ms, 1s or 1h", "1h",
		"use a duration of whole microseconds, such as 500ms, 1s or 1h", "1.0000001s",
		"use a duration with a unit (a number alone is in nanoseconds), such as 500ms, 1s or 1h", "999ns 1500ns")
	refuses(t, ParseFactor, "use a decimal from 0 with at most 6 digits after the point, such as 0.5 or 2",
		units+" 0 1.0 1.5")
	refuses(t, ParseRate, "use <n>/<duration>, such as 10/s, 600/min, 100/hr, 5/12h or 10 per minute: a whole number, "+
		"and s, sec, second, m, min, minute, h, hr, hour, d, day or a duration", "",
		"use <n>/<duration> with "+strings.TrimPrefix(wantFewer, "use "), "562949953421313/1s 99999999999999999999/1s",
		"use <n>/<duration> with "+strings.TrimPrefix(wantUnits, "use "), "0/1s")
}

// refuses checks the errors of a parser for what is absurd, except the texts that it
// accepts: of a value, which may be a placeholder instead, and of an option that may not.
// Of rare texts, something else is wanted than of all others.
func refuses[T any](t *testing.T, parse Parser[T], usual, accepted string, rareAndTexts ...string) {
	t.Helper()
	for _, text := range absurd {
		if strings.HasPrefix(usual, "use <n>/<duration>") && RateMeant(text) != "" {
			continue // see TestRateMeant
		}
		want := usual
		for rare := range slices.Chunk(rareAndTexts, 2) {
			if slices.Contains(strings.Fields(rare[1]), text) {
				want = rare[0]
			}
		}
		wrong := ""
		if !slices.Contains(strings.Fields(accepted), text) {
			wrong = fmt.Sprintf("name: %q is not valid; %s", text, want)
		}
		_, err := ParseConstant("name", text, parse)
		if got := message(err); got != wrong {
			t.Errorf("got error %q\nwant error %q", got, wrong)
		}
	}
}

// message returns the text of an error, nothing of none.
func message(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// What errors say of units, and of more than there may be.
const (
	wantUnits = "use a whole number of at least 1"
	wantFewer = "use a whole number of at most 562949953421312"
)

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
// decimal.
func TestFactorTextRoundTrips(t *testing.T) {
	t.Parallel()
	testseed.Check(t, 1, func(t *rapid.T) {
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
	if n.Cmp(big.NewInt(bucket.MaxUnits)) > 0 {
		return bucket.MaxUnits + 1
	}
	return n.Int64()
}

// Guards the division by a factor against exact arithmetic, on any numbers and
// about the edges of their ranges.
func TestFactorDivides(t *testing.T) {
	t.Parallel()
	sizes := []int64{
		1, 2, 3, 9, 10, 999_999, 1_000_000, 1_000_001, 18_446_744_073_710,
		bucket.MaxUnits - 1, bucket.MaxUnits,
	}
	factors := []Factor{
		1, 2, 3, 499_999, 500_000, 500_001, 999_999, 1_000_000, 1_000_001, 1_999_999, 2_000_000, 2_000_001,
		10_000_000,
		bucket.MaxUnits, 1 << 63, 1<<63 + 1, math.MaxUint64 - 1, math.MaxUint64,
	}
	for _, size := range sizes {
		for _, f := range factors {
			if got, want := f.Divide(size), divided(size, f); got != want {
				t.Errorf("%d divided by %s is %d, want %d", size, f, got, want)
			}
		}
	}
	testseed.Check(t, 1, func(t *rapid.T) {
		size := rapid.Int64Range(1, bucket.MaxUnits).Draw(t, "size")
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
		{bucket.MaxUnits, "0.999999", bucket.MaxUnits + 1},
	}
	for _, tc := range tests {
		f, _ := ParseFactor(tc.factor)
		if got := f.Divide(tc.size); got != tc.want {
			t.Errorf("%d divided by %s is %d, want %d", tc.size, tc.factor, got, tc.want)
		}
	}
}

// Guards that a unit may stand for one of it and may be written out, that all ways to
// write a duration are the same rate, and that a rate may be written as nginx and people do.
func TestRateUnits(t *testing.T) {
	t.Parallel()
	for duration, texts := range map[time.Duration][]string{
		time.Second:      {"s", "1s", "second", "1second", "1seconds", "1000ms", "sec", "1 second"},
		time.Minute:      {"m", "1m", "minute", "1minute", "60s", "60seconds", "60secs", "min"},
		time.Hour:        {"h", "1h", "hour", "1hour", "60minutes", "60mins", "hr"},
		24 * time.Hour:   {"d", "1d", "day", "1day", "24h", "24hours", "24hrs", "24 hours"},
		30 * time.Minute: {"30m", "30minutes", "0.5h"},
		7 * 24 * 3600e9:  {"7d", "7days", "007day"},
	} {
		for _, text := range texts {
			for _, before := range []string{"10/", "10r/", "10 per "} {
				if got, want := ParseRate(before + text); got != (Rate{10, duration}) || want != "" {
					t.Errorf("%s%s: got %v, %q, want 10/%v", before, text, got, want, duration)
				}
			}
		}
	}
}

// Guards that no text panics, and that one which is read is a limit or an error.
func FuzzRate(f *testing.F) {
	for _, text := range []string{"60/1s", "7/1s", "999/1s", "3/1d", "1/1us", "562949953421312/1us", "1/6000d", "10/s", "10/2hours", "10r/min", "10 per 2 hours"} {
		f.Add(text, int64(1))
		f.Add(text, int64(math.MaxInt64))
	}
	f.Fuzz(func(t *testing.T, text string, size int64) {
		r, want := ParseRate(text)
		if want != "" {
			return
		}
		l, err := r.Limit(size)
		if (err == nil) != (l.Validate() == nil && l != bucket.Limit{}) {
			t.Errorf("%q, size %d: %+v, %v", text, size, l, err)
		}
	})
}

// TestRateMeant guards what is written instead of rates of other programs: it is one, and as fast. What
// may be meant in two ways is not guessed.
func TestRateMeant(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"10rps": "10/s", "10 rpm": "10/m", "10qps": "10/s", "10 r/s": "10/s", "10req/min": "10/m",
		"0.5/s": "1/2s", "1.5/m": "3/2m", "2.25/2h": "9/8h", "0.1/s": "1/10s", "2.0/s": "2/s", "0.000001/d": "",
		"10 / s": "10/s", "10/ s": "10/s", "10/S": "10/s", "10 Per hour": "10/h", "10  per 5 minutes": "",
		"10 requests per minute": "10/m", "5 times in 10 min": "5/10m", "60 1m": "60/m", "60 30s": "60/30s",
		"200mbit": "25MB/s", "200Mbit/s": "25MB/s", "1gbps": "125MB/s", "8kbit": "1.0kB/s", "800bit/s": "100B/s",
		"10s": "", "10": "", "s": "", "0/s": "", "0.0/s": "", "10/s": "", "10/month": "", "10/60": "", "-1/s": "", ".5/s": "", "0.0000001/s": "",
		"9999999999rps": "", "ten/s": "", "1/1s/1": "",
	} {
		got := RateMeant(text)
		if got != want {
			t.Errorf("%q: got %q, want %q", text, got, want)
		}
		if _, use := ParseByteRate(got); got != "" && use != "" {
			t.Errorf("%q: %q is no rate: %s", text, got, use)
		}
		if _, use := ParseRate(text); got != "" && use != got {
			t.Errorf("%q: the error says %q, want %q", text, use, got)
		}
	}
}

// TestBytes guards numbers of bytes with units: the units of Caddy's request_body, of which kB, MB, GB and TB are
// powers of 1000, and KiB, MiB, GiB and TiB of 1024.
func TestBytes(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]int64{
		"1": 1, "1000": 1000, "5B": 5, "1kB": 1000, "1KB": 1000, "1KiB": 1024, "10MB": 10e6, "4gb": 4e9, "1.5GiB": 3 << 29, "1TB": 1e12, "512TiB": 1 << 49,
		"0": 0, "0B": 0, "513TiB": 0, "1PB": 0, "1M": 0, "1G": 0, "-1MB": 0, "1 MB": 0, "MB": 0, "1e3MB": 0, "1Mbit": 0,
	} {
		got, use := Bytes(text)
		if got != want || (use == "") != (want > 0) {
			t.Errorf("%q: got %d (%s), want %d", text, got, use, want)
		}
	}
	for text, want := range map[string]Rate{
		"10MB/s": {10e6, time.Second}, "1GiB/day": {1 << 30, 24 * time.Hour}, "1kB per 5 minutes": {1000, 5 * time.Minute}, "60r/s": {60, time.Second},
	} {
		if got, use := ParseByteRate(text); got != want {
			t.Errorf("%q: got %v (%s), want %v", text, got, use, want)
		}
	}
	for _, text := range []string{"4GB", "10MB/s"} {
		_, ofSize := Units(text)
		_, ofRate := ParseRate(text)
		if use := ofSize + ofRate; !strings.Contains(use, "bytes in a limit with actual_cost bytes or cost body") {
			t.Errorf("%q of what is not in bytes: got %s", text, use)
		}
	}
}
