package compile_test

import (
	"errors"
	"fmt"
	"math/big"
	"net/textproto"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/configtest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// checked returns l as a store gets it, which does not check it again.
func checked(l limiter.Limit) limiter.Limit { return limiter.Limit(bucket.Limit(l).Checked()) }

// Guards what limit each algorithm makes of its options, through the whole
// configuration.
func TestAlgorithms(t *testing.T) {
	t.Setenv("WINDOW", "90s")
	bucket := limiter.Limit{Size: 5, DripInterval: 2 * time.Second, DripSize: 3}
	window := limiter.FixedWindow(5, time.Minute)
	clock := limiter.ClockWindow(5, time.Minute, time.Unix(0, 0))
	now := time.Date(2026, 11, 22, 10, 20, 30, 0, time.UTC)
	midnight := time.Date(2026, 11, 22, 0, 0, 0, 0, time.UTC)
	counting := func(l limiter.Limit) limiter.Limit {
		l.CountDenied = true
		return l
	}
	tests := []struct {
		limit config.Limit
		want  limiter.Limit
	}{
		{config.Limit{Algorithm: "leaky_bucket", Size: "5", DripRate: "2s", DripSize: "3"}, bucket},
		{config.Limit{Algorithm: "token_bucket", Size: "5", DripRate: "2s", DripSize: "3"}, bucket},
		{config.Limit{Algorithm: "token_bucket", Size: "5"}, limiter.Limit{Size: 5, DripInterval: time.Second, DripSize: 1}},
		{config.Limit{Algorithm: "token_bucket", Rate: "5/10s"}, limiter.Limit{Size: 5, DripInterval: 2 * time.Second, DripSize: 1}},
		{config.Limit{Algorithm: "token_bucket", Size: "{n}", DripRate: "{d}"}, limiter.Limit{Size: 4, DripInterval: 3 * time.Second, DripSize: 1}},
		{config.Limit{Algorithm: "fixed_window", Size: "5", Window: "1m"}, clock},
		{config.Limit{Algorithm: "fixed_window", Size: "5", Window: "1m", WindowStart: "clock"}, clock},
		{config.Limit{Algorithm: "fixed_window", Size: "5", Window: "1m", WindowStart: "first"}, window},
		{config.Limit{Algorithm: "fixed_window", Size: "10", Factor: "2", Window: "1m", WindowStart: "first"}, window},
		{config.Limit{Algorithm: "fixed_window", Size: "{n}", Window: "{d}"}, limiter.ClockWindow(4, 3*time.Second, time.Unix(0, 0))},
		{config.Limit{Algorithm: "fixed_window", Size: "5", Window: "{env.WINDOW}"}, limiter.ClockWindow(5, 90*time.Second, time.Unix(0, 0))},
		{config.Limit{Algorithm: "sliding_window", Size: "5", Window: "1m"}, limiter.SlidingWindow(5, time.Minute)},
		{config.Limit{Algorithm: "sliding_window", Size: "10", Factor: "2", Window: "1m"}, limiter.SlidingWindow(5, time.Minute)},
		{config.Limit{Algorithm: "sliding_window", Size: "{n}", Window: "{d}"}, limiter.SlidingWindow(4, 3*time.Second)},
		{config.Limit{Algorithm: "sliding_log", Size: "5", Window: "1m"}, limiter.SlidingLog(5, time.Minute)},
		{config.Limit{Algorithm: "sliding_log", Size: "10", Factor: "2", Window: "1m"}, limiter.SlidingLog(5, time.Minute)},
		{config.Limit{Algorithm: "sliding_log", Size: "{n}", Window: "{d}"}, limiter.SlidingLog(4, 3*time.Second)},
		{config.Limit{Algorithm: "warm_up", Rate: "10/1s", WarmUp: "30s"}, limiter.WarmingUp(10, time.Second, 30*time.Second)},
		{config.Limit{Algorithm: "warm_up", Rate: "10/1s", WarmUp: "{env.WINDOW}", ColdFactor: "2.5"}, limiter.WarmingUp(10, time.Second, 90*time.Second).WithColdFactor(2.5)},
		{config.Limit{Algorithm: "warm_up", Rate: "10/1s", WarmUp: "1m", Cost: "{one}"}, limiter.WarmingUp(10, time.Second, time.Minute)},
		{config.Limit{Rate: "5/1s", CountDenied: true}, counting(limiter.PerSecond(5))},
		{config.Limit{Algorithm: "sliding_window", Size: "5", Window: "1m", CountDenied: true}, counting(limiter.SlidingWindow(5, time.Minute))},
		{config.Limit{Algorithm: "warm_up", Rate: "10/1s", WarmUp: "1m", Cost: "{one}", CountDenied: true}, counting(limiter.WarmingUp(10, time.Second, time.Minute))},
		{config.Limit{Algorithm: "fixed_window", Size: "5", Period: "day", CountDenied: true}, counting(limiter.ClockWindow(5, 24*time.Hour, midnight))},
		{config.Limit{Algorithm: "fixed_window", Size: "5", Period: "day"}, limiter.ClockWindow(5, 24*time.Hour, midnight)},
		{config.Limit{Algorithm: "fixed_window", Size: "{n}", Period: "day Asia/Tokyo"}, limiter.ClockWindow(4, 24*time.Hour, midnight.Add(-9*time.Hour))},
	}
	for i := range tests {
		tc := &tests[i]
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			l, _ := configtest.ReadyLimit(t, &tc.limit)
			r := sitetest.NewRequest()
			r.Replacer.Set("n", 4)
			r.Replacer.Set("d", "3s")
			r.Replacer.Set("one", "1")
			q, err := rule.Evaluate(r.Request, []*rule.Limit{l}, now)
			if err != nil {
				t.Fatal(err)
			}
			defer q.Release()
			got := q.Entries()
			want := checked(tc.want)
			if len(got) != 1 || got[0].Query.Limit != want || got[0].Query.Cost != 1 {
				t.Errorf("got %+v, want %+v", got, want)
			}
		})
	}
}

// Guards what limit a rate makes, through the whole configuration.
func TestRates(t *testing.T) {
	t.Setenv("RATE", "60/1s")
	t.Setenv("UNITS", "60")
	const µs = time.Microsecond
	tests := []struct {
		limit config.Limit
		want  limiter.Limit
	}{
		{config.Limit{Rate: "60/1s"}, limiter.Limit{Size: 60, DripInterval: 50_000 * µs, DripSize: 3}},
		{config.Limit{Rate: "1/1s"}, limiter.Limit{Size: 1, DripInterval: time.Second, DripSize: 1}},
		{config.Limit{Rate: "7/1s"}, limiter.Limit{Size: 7, DripInterval: 142_858 * µs, DripSize: 1}},
		{config.Limit{Rate: "10/1m"}, limiter.Limit{Size: 10, DripInterval: 6 * time.Second, DripSize: 1}},
		{config.Limit{Rate: "1000/1h"}, limiter.Limit{Size: 1000, DripInterval: 3600 * time.Millisecond, DripSize: 1}},
		{config.Limit{Rate: "3/1d"}, limiter.Limit{Size: 3, DripInterval: 8 * time.Hour, DripSize: 1}},
		{config.Limit{Rate: "3/1d12h"}, limiter.Limit{Size: 3, DripInterval: 12 * time.Hour, DripSize: 1}},
		{config.Limit{Rate: "1000000/1s"}, limiter.Limit{Size: 1_000_000, DripInterval: µs, DripSize: 1}},
		{config.Limit{Rate: "5000000/1s"}, limiter.Limit{Size: 5_000_000, DripInterval: µs, DripSize: 5}},
		{config.Limit{Rate: "999/1s"}, limiter.Limit{Size: 999, DripInterval: 10_011 * µs, DripSize: 10}},
		{config.Limit{Rate: "562949953421312/1us"}, limiter.Limit{Size: 1 << 49, DripInterval: µs, DripSize: 1 << 49}},
		{config.Limit{Rate: "{env.RATE}"}, limiter.Limit{Size: 60, DripInterval: 50_000 * µs, DripSize: 3}},
		{config.Limit{Rate: "{env.UNITS}/1m"}, limiter.Limit{Size: 60, DripInterval: time.Second, DripSize: 1}},
		{config.Limit{Rate: "60/1s", Size: "10"}, limiter.Limit{Size: 10, DripInterval: 50_000 * µs, DripSize: 3}},
		{config.Limit{Rate: "60/1s", Size: "2"}, limiter.Limit{Size: 2, DripInterval: 16_667 * µs, DripSize: 1}},
		{config.Limit{Rate: "60/1s", Factor: "0.5"}, limiter.Limit{Size: 120, DripInterval: 50_000 * µs, DripSize: 3}},
		{config.Limit{Rate: "60/1s", Factor: "30"}, limiter.Limit{Size: 2, DripInterval: 16_667 * µs, DripSize: 1}},
		// The drip is determined before the size is known.
		{config.Limit{Rate: "60/1s", Size: "{n}"}, limiter.Limit{Size: 4, DripInterval: 16_667 * µs, DripSize: 1}},
		{config.Limit{Rate: "999/1s", Size: "{n}"}, limiter.Limit{Size: 4, DripInterval: 10_011 * µs, DripSize: 10}},
		{config.Limit{Rate: "60/1s", Factor: "{n}"}, limiter.Limit{Size: 15, DripInterval: 16_667 * µs, DripSize: 1}},
	}
	for i := range tests {
		tc := &tests[i]
		t.Run(fmt.Sprintf("%s size %s factor %s", tc.limit.Rate, tc.limit.Size, tc.limit.Factor), func(t *testing.T) {
			l, _ := configtest.ReadyLimit(t, &tc.limit)
			r := sitetest.NewRequest()
			r.Replacer.Set("n", 4)
			got, err := r.Queries(l)
			if err != nil {
				t.Fatal(err)
			}
			want := checked(tc.want)
			if len(got) != 1 || got[0].Limit != want || !strings.HasPrefix(got[0].Name, "default@") || got[0].Cost != 1 {
				t.Errorf("got %+v, want %+v", got, want)
			}
		})
	}
}

// TestWarmUpDelays guards, on a clock of its own, how long requests to a limit that warms
// up are told to wait, and that those do not wait at all which cost too much for that, or
// come when as many wait as may.
func TestWarmUpDelays(t *testing.T) {
	t.Parallel()
	l, _ := configtest.ReadyLimit(t, &config.Limit{
		Key: "all", Algorithm: "warm_up", Rate: "10/5s", WarmUp: "4s", MaxDelay: "2s", MaxWaiting: "2", Cost: "{cost}",
	})
	now := time.Duration(0)
	memory := limiter.NewMemoryWithClock(func() time.Duration { return now })
	ask := func(at time.Duration, cost string, denied bool, wait time.Duration) *rule.Request {
		t.Helper()
		now = at
		r := sitetest.NewRequest()
		r.Replacer.Set("cost", cost)
		q, err := rule.Evaluate(r.Request, []*rule.Limit{l}, time.Time{})
		if err != nil {
			t.Fatal(err)
		}
		if err := q.Decide(memory, rule.How{}); err != nil {
			t.Fatal(err)
		}
		got, d := q.Entries()[0].Delay, q.Entries()[0].Decision
		if d.Denied {
			got = d.RetryAfter
		}
		if d.Denied != denied || got != wait || d.Size != 10 || d.Remaining != 0 {
			t.Errorf("after %v, cost %s: denied %t, %v, want %t, %v, and no room: %+v", now, cost, d.Denied, got, denied, wait, d)
		}
		return q
	}
	ask(0, "1", false, 0)
	ask(0, "5", true, 1375*ms)
	first := ask(0, "1", false, 1375*ms)
	ask(0, "1", true, 500*ms)
	ask(500*ms, "1", false, 2000*ms)
	ask(1375*ms, "1", true, 2000*ms) // as if none could wait
	first.Release()
	ask(1375*ms, "1", false, 2000*ms)
	ask(4000*ms, "5", false, 0) // free by then
	if n := l.Waiting.Len(); n != 2 {
		t.Errorf("%d requests wait, want 2", n)
	}
}

// Guards the bounds of a limit that are passed to the store: of each of its buckets, not of
// those within, and whatever depends on the request.
func TestBucketsOfFullLimits(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		limit *config.Limit
		want  string // by name, max_keys and share key
	}{
		{&config.Limit{Size: "1"}, "default 0 []"},
		{&config.Limit{Size: "1", MaxKeys: "5"}, "default 5 []"},
		{&config.Limit{Size: "1", WhenFull: "forget"}, "default 0 []"},
		{&config.Limit{Size: "1", WhenFull: "share"}, "default 0 [192.0.0.0/16]"},
		{&config.Limit{Size: "{n}", MaxKeys: "5", WhenFull: "share"}, "default 5 [192.0.0.0/16]"},
		{
			&config.Limit{Max: "1", Duration: "1s", MinInterval: "1s", MaxKeys: "5", WhenFull: "share"},
			"default 5 [192.0.0.0/16], default/min_interval 5 [192.0.0.0/16]",
		},
		{
			&config.Limit{Name: "x", Size: "1", MaxKeys: "5", WhenFull: "share", Limits: config.NestedLimits{List: []*config.Limit{
				{Name: "a", Size: "1"}, {Name: "b", Size: "1", MaxKeys: "7", WhenFull: "share"},
			}}},
			"x 5 [192.0.0.0/16], x/a 0 [], x/b 7 [192.0.0.0/16]",
		},
		{&config.Limit{Name: "x", Key: "all", Size: "1", WhenFull: "share"}, "x 0 [192.0.0.0/16]"},
	} {
		l, _ := configtest.ReadyLimit(t, tc.limit)
		r := sitetest.NewRequest()
		r.SetClient("192.0.2.1")
		r.Replacer.Set("n", "3")
		buckets, err := r.Queries(l)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, b := range buckets {
			name, _, _ := strings.Cut(b.Name, "@") // without the digest of an unnamed limit
			got = append(got, fmt.Sprintf("%s %d [%s]", name, b.MaxKeys, b.ShareKey))
		}
		if got := strings.Join(got, ", "); got != tc.want {
			t.Errorf("got %s, want %s", got, tc.want)
		}
	}
}

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
	limits := make(map[string]*rule.Limit)
	for option, l := range map[string]*config.Limit{
		"size":      {Size: "{n}"},
		"drip_size": {Size: "10", DripSize: "{n}"},
		"drip_rate": {Size: "10", DripRate: "{n}"},
		"cost":      {Size: "10", Cost: "{n}"},
		"factor":    {Size: "10", Factor: "{n}"},
		"all":       {Size: "{n}", DripSize: "{n}", DripRate: "{n}s", Cost: "{n}", Factor: "{n}"},
	} {
		limits[option], _ = configtest.ReadyLimit(f, l)
	}
	decimalDigits, decimal := regexp.MustCompile(`^[0-9]+$`), regexp.MustCompile(`^[0-9]+(\.[0-9]{1,6})?$`)
	f.Fuzz(func(t *testing.T, text string) {
		for option, l := range limits {
			r := sitetest.NewRequest()
			r.Replacer.Set("n", text)
			text := textproto.TrimString(text) // white space around it does not count
			buckets, err := r.Queries(l)
			if err != nil {
				ref, ok := errors.AsType[rule.RefusalError](err)
				if !ok || ref.Status != 500 && (ref.Status != 400 || option != "cost") {
					t.Fatalf("%s %q: got %v, want a refusal", option, text, err)
				}
				message := err.Error()
				oneLine := utf8.ValidString(message) && !strings.ContainsAny(message, "\n\r\x00")
				if !oneLine || len(message) > 500 {
					t.Fatalf("%s %q: got %q, want one short line", option, text, message)
				}
				continue
			}
			if len(buckets) == 0 {
				zero, ok := new(big.Rat).SetString(text)
				hasFactor := option == "factor" || option == "all"
				if !hasFactor || !decimal.MatchString(text) || !ok || zero.Sign() != 0 {
					t.Fatalf("%s %q is a free pass", option, text)
				}
				continue
			}
			b := buckets[0]
			if err := b.Limit.Validate(); err != nil || b.Cost < 0 || b.Cost > limiter.MaxUnits {
				t.Fatalf("%s %q makes %+v: %v", option, text, b, err)
			}
			var got int64
			switch option {
			case "size":
				if got = b.Limit.Size; b.Cost > got { // no quota
					got = 0
				}
			case "drip_size":
				if got = b.Limit.DripSize; b.Cost > b.Limit.Size { // no quota
					got = 0
				}
			case "cost":
				got = b.Cost
			case "factor":
				if text != "" && !decimal.MatchString(text) {
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
