package compile

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/value"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/calendar"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/pace"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/settle"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// shape is a way to say what the bucket of a limit is.
type shape struct {
	name          string           // its name in the tags `bucket` of its options in config.Limit
	algorithms    []rule.Algorithm // with which it is used
	requiredAnyOf []string         // the options that show that it is used; nil if none has to
	use           string           // for errors: what to use instead of the options of another
	build         func(*LimitBuilder) error
}

// shapes are all ways. A limit uses the first that its algorithm and its options show.
var shapes = []shape{
	{"concurrency", []rule.Algorithm{rule.Concurrency}, []string{"concurrency"}, "a limit of its own for it", (*LimitBuilder).setConcurrencyBucket},
	{"fixed_window", []rule.Algorithm{rule.FixedWindow}, nil, "only size and window, or size and period", (*LimitBuilder).setWindowBucket},
	{"sliding_window", []rule.Algorithm{rule.SlidingWindow}, nil, "only size and window", (*LimitBuilder).setWindowBucket},
	{"sliding_log", []rule.Algorithm{rule.SlidingLog}, nil, "only size and window", (*LimitBuilder).setWindowBucket},
	{"warm_up", []rule.Algorithm{rule.WarmUp}, nil, "only rate, warm_up and cold_factor", (*LimitBuilder).setWarmUpBucket},
	{
		"rate", leakyOrToken, []string{"rate"},
		"either rate and size, or size, drip_rate and drip_size, or max, duration and min_interval", (*LimitBuilder).setRateBucket,
	},
	{"speed", leakyOrToken, []string{"speed"}, "only speed and size", (*LimitBuilder).setSpeedBucket},
	{
		"max", leakyOrToken, []string{"max", "duration", "min_interval"},
		"either size, drip_rate and drip_size or max, duration and min_interval", (*LimitBuilder).setMaxBuckets,
	},
	{"drip", leakyOrToken, nil, "", (*LimitBuilder).setDripBucket},
}

var leakyOrToken = []rule.Algorithm{rule.LeakyBucket, rule.TokenBucket}

// setBuckets sets up the limit's buckets: one, or two for a limit with
// max and min_interval.
func (l *LimitBuilder) setBuckets() error {
	if err := l.setAlgorithm(); err != nil {
		return err
	}
	i := slices.IndexFunc(shapes, func(f shape) bool {
		return slices.Contains(f.algorithms, l.rule.Algorithm) && (f.requiredAnyOf == nil || l.FirstSet(f.requiredAnyOf...) != nil)
	})
	if err := shapes[i].check(l); err != nil {
		return err
	}
	return shapes[i].build(l)
}

// setAlgorithm sets the algorithm.
func (l *LimitBuilder) setAlgorithm() error {
	if l.Concurrency != "" {
		if l.rule.Algorithm = rule.Concurrency; l.Algorithm != "" {
			return option.Clash("algorithm", l.Algorithm, "concurrency", "use one of them")
		}
		return nil
	}
	l.rule.Algorithm = readConstant(&l.reader, "algorithm", cmp.Or(l.Algorithm, string(rule.LeakyBucket)), rule.ParseAlgorithm)
	return l.err
}

// algorithmsWith returns the algorithms of the shapes that have an option.
func algorithmsWith(o *config.Option) (names []string) {
	for _, f := range shapes {
		if slices.Contains(o.Buckets, f.name) {
			for _, a := range f.algorithms {
				names = append(names, string(a))
			}
		}
	}
	return names
}

// check returns an error if an option is set that makes a bucket, but not this one.
func (f *shape) check(l *LimitBuilder) error {
	for i := range config.Options {
		o := &config.Options[i]
		set, algorithms := l.Setting(o.Name), algorithmsWith(o)
		switch {
		case set == nil || algorithms == nil || slices.Contains(o.Buckets, f.name):
		case l.rule.Algorithm != rule.Concurrency && !slices.Contains(algorithms, string(rule.LeakyBucket)) && !slices.Contains(algorithms, string(l.rule.Algorithm)):
			return option.Needs(o.Name, set.Text, "algorithm "+option.InWords(algorithms, "or"))
		case f.requiredAnyOf != nil:
			return option.Clash(o.Name, set.Text, l.FirstSet(f.requiredAnyOf...).Option, "use "+f.use)
		default:
			return option.Clash(o.Name, set.Text, "algorithm "+string(l.rule.Algorithm), "use "+f.use)
		}
	}
	return nil
}

// setDripBucket sets up a bucket of a size that drips. Without a size the limit only
// groups others.
func (l *LimitBuilder) setDripBucket() error {
	if l.Size == "" {
		return l.setGroup()
	}
	return l.addBucket(&rule.Bucket{
		Path: l.rule.Path,
		Size: readValue(&l.reader, "size", l.Size, l.units()),
		Rate: readValue(&l.reader, "drip_rate", cmp.Or(l.DripRate, "1s"), option.Interval),
		Drip: readValue(&l.reader, "drip_size", cmp.Or(l.DripSize, "1"), l.units()),
	}, l.Cost, l.Factor)
}

// setGroup checks that a limit without a bucket has nested limits, and no options that need
// one.
func (l *LimitBuilder) setGroup() error {
	for _, o := range config.Options {
		if set := l.Setting(o.Name); set != nil && len(o.Buckets) > 0 {
			return option.Needs(o.Name, set.Text, "a size")
		}
	}
	if l.Limits.IsZero() && l.connections {
		return errors.New("it sets no limit; use rate, size, max, min_interval, concurrency, nested limits or banned")
	}
	if l.Limits.IsZero() {
		return errors.New("it sets no limit; use rate, size, speed, max, min_interval, concurrency or nested limits")
	}
	return nil
}

// setRateBucket sets up the bucket of a limit that is defined by its rate. The
// size is the rate's number of units unless it is set.
func (l *LimitBuilder) setRateBucket() error {
	r, err := l.rate()
	if err != nil {
		return err
	}
	return l.addRateBucket("rate", string(l.Rate), r.Units, r.Limit)
}

// setSpeedBucket sets up the bucket of a limit that paces responses. By default it holds what is sent in a
// second.
func (l *LimitBuilder) setSpeedBucket() error {
	text := string(l.Speed)
	r := read(&l.reader, "speed", text, option.ParseByteRate)
	if l.err != nil {
		return l.err
	}
	second := int64(min(float64(r.Units)*float64(time.Second)/float64(r.Each), limiter.MaxUnits))
	err := l.addRateBucket("speed", text, max(second, pace.LeastSize), func(size int64) (bucket.Limit, error) {
		numbers, err := r.Limit(size)
		if err != nil {
			return numbers, err
		}
		return numbers.Smooth(), nil
	})
	if err != nil {
		return err
	}
	b := l.rule.Buckets[0]
	if b.Constant == nil {
		return option.Bad("size", string(l.Size), "one that does not depend on the request, beside speed")
	}
	l.rule.Speed, l.rule.Pace = text, new(pace.Limit)
	l.rule.Pace.Bucket.Limit = b.Constant.Limit
	if !l.rule.Pace.SetPieces(r) {
		return option.Bad("size", string(l.Size), fmt.Sprintf("at least %d bytes beside speed", pace.LeastSize))
	}
	return nil
}

// addRateBucket adds a bucket that drips at the rate of an option, and has a size by default.
func (l *LimitBuilder) addRateBucket(name, text string, defaultSize int64, limit func(size int64) (bucket.Limit, error)) error {
	b := &rule.Bucket{
		Path:   l.rule.Path,
		Size:   readOptional(&l.reader, "size", l.Size, strconv.FormatInt(defaultSize, 10), l.units()),
		Factor: readOptional(&l.reader, "factor", l.Factor, "1", option.ParseFactor),
	}
	if l.err != nil {
		return l.err
	}
	var size int64
	if !b.SizeIsDynamic() {
		var err error
		if size, _, err = b.EffectiveSize(nil); err != nil {
			return err
		}
	}
	numbers, err := limit(size)
	if err != nil {
		return option.Bad(name, text, fmt.Sprintf("another %s or size: %v", name, err))
	}
	b.Rate = value.Value[time.Duration]{Option: "drip_rate", Constant: numbers.DripInterval}
	b.Drip = value.Value[int64]{Option: "drip_size", Constant: numbers.DripSize}
	return l.addBucket(b, l.Cost, l.Factor)
}

// rate parses the rate, which must not depend on the request.
func (l *LimitBuilder) rate() (option.Rate, error) {
	text := string(l.Rate)
	if resolved, err := l.resolve("rate", text); err == nil && option.IsTemplate(resolved) {
		return option.Rate{}, option.Bad("rate", text,
			"one that does not depend on the request, or a size that does, such as size {vars.plan_size} with drip_rate 1s")
	}
	parse := option.ParseRate
	if l.countsBytes() {
		parse = option.ParseByteRate
	}
	return read(&l.reader, "rate", text, parse), l.err
}

// countsBytes reports whether what l limits are bytes.
func (l *LimitBuilder) countsBytes() bool {
	return l.ActualCost == settle.ActualBytes || l.Cost == bodyCost || l.Speed != ""
}

// units returns the parser of the units that l limits.
func (l *LimitBuilder) units() option.Parser[int64] {
	if l.countsBytes() {
		return option.Bytes
	}
	return option.Units
}

// planUnits is units for what depends on the request.
func (l *LimitBuilder) planUnits() option.Parser[int64] {
	if l.countsBytes() {
		return option.PlanBytes
	}
	return option.PlanUnits
}

// setMaxBuckets sets up the buckets of a limit that is defined by max, duration
// and min_interval: one that holds max units and drips one at a time, max of them
// per duration, and one that holds a single unit for the interval. The interval may
// also stand alone.
func (l *LimitBuilder) setMaxBuckets() error {
	switch {
	case l.Max == "" && l.Duration == "" && l.Factor != "":
		return option.Needs("factor", string(l.Factor), "max and duration: a min_interval has no size to divide")
	case l.Max == "" && l.Duration == "":
		return l.addInterval(l.rule.Path)
	case l.Max == "":
		return option.Needs("duration", string(l.Duration), "max")
	case l.Duration == "":
		return option.Needs("max", string(l.Max), "duration")
	}
	most := read(&l.reader, "max", l.Max, l.units())
	micros := read(&l.reader, "duration", l.Duration, option.Interval).Microseconds()
	if l.err != nil {
		return l.err
	}
	if most > micros {
		return option.Bad("max", string(l.Max), fmt.Sprintf("at most %d, one for each microsecond of the duration", micros))
	}
	rate := time.Duration((micros+most-1)/most) * time.Microsecond
	b := constantBucket(l.rule.Path, most, rate)
	b.Source = option.Setting{Option: "duration", Text: string(l.Duration)}
	if err := l.addBucket(b, l.Cost, l.Factor); err != nil {
		return err
	}
	if l.MinInterval == "" {
		return nil
	}
	return l.addInterval(l.rule.Path + "/min_interval")
}

// addInterval adds the bucket of a minimum interval.
func (l *LimitBuilder) addInterval(path string) error {
	b := constantBucket(path, 1, read(&l.reader, "min_interval", l.MinInterval, option.Interval))
	b.Source = option.Setting{Option: "min_interval", Text: string(l.MinInterval)}
	return l.addBucket(b, l.Cost, "")
}

// constantBucket returns a bucket that drips one unit at a time.
func constantBucket(path string, size int64, rate time.Duration) *rule.Bucket {
	return &rule.Bucket{
		Path: path,
		Size: value.Value[int64]{Option: "size", Constant: size},
		Rate: value.Value[time.Duration]{Option: "drip_rate", Constant: rate},
		Drip: value.Value[int64]{Option: "drip_size", Constant: 1},
	}
}

// setConcurrencyBucket sets up the bucket of a limit on requests in progress.
func (l *LimitBuilder) setConcurrencyBucket() error {
	numbers := limiter.Concurrency(1)
	b := &rule.Bucket{
		Path: l.rule.Path, Counts: numbers.Algorithm,
		Rate: value.Value[time.Duration]{Option: "concurrency", Constant: numbers.DripInterval},
		Drip: value.Value[int64]{Option: "concurrency", Constant: numbers.DripSize},
	}
	if l.rule.Load != nil {
		b.Size = value.Value[int64]{Option: "max", Constant: int64(l.rule.Load.Options.Max)}
	} else {
		b.Size = readValue(&l.reader, "concurrency", l.Concurrency, option.Units)
	}
	return l.addBucket(b, l.Cost, l.Factor)
}

// setWindowBucket sets up the bucket of a limit that counts in windows. If they are
// fixed, it loses all that it holds at the end of each.
func (l *LimitBuilder) setWindowBucket() error {
	switch {
	case l.Size == "":
		return option.Needs("algorithm", l.Algorithm, "a size, the most units in a window")
	case l.Window == "" && l.rule.Algorithm.Slides():
		return option.Needs("algorithm", l.Algorithm, "a window")
	case l.Window == "" && l.Period == "":
		return option.Needs("algorithm", l.Algorithm, "a window or a period")
	case l.Window != "" && l.Period != "":
		return option.Clash("period", l.Period, "window", "use one of them")
	case l.WindowStart != "" && l.Period != "":
		return option.Clash("window_start", l.WindowStart, "period", "remove it: periods begin as the calendar says")
	}
	b := &rule.Bucket{Path: l.rule.Path, Counts: l.rule.Algorithm.InStore()}
	b.Drip = value.Value[int64]{Option: "size", Constant: b.Counts.DripSize()}
	b.Size = readValue(&l.reader, "size", l.Size, l.units())
	if l.Period != "" {
		if b.Period = read(&l.reader, "period", l.Period, calendar.Parse); b.Period == nil {
			return l.err
		}
		b.Rate = value.Value[time.Duration]{Option: "period", Constant: b.Period.Longest()}
	} else {
		b.Rate = readValue(&l.reader, "window", l.Window, option.Interval)
		b.Source = option.Setting{Option: "window", Text: string(l.Window)}
		b.Aligned = readConstant(&l.reader, "window_start", l.startOfWindows(), option.Is(windowStartClock, windowStartClock, windowStartFirst))
	}
	return l.addBucket(b, l.Cost, l.Factor)
}

// setWarmUpBucket sets up the bucket of a limit whose rate grows after it was idle.
func (l *LimitBuilder) setWarmUpBucket() error {
	switch {
	case l.Rate == "":
		return option.Needs("algorithm", l.Algorithm, "a rate, such as 10/1s")
	case l.WarmUp == "":
		return option.Needs("algorithm", l.Algorithm, "a warm_up, the time until it admits the whole rate")
	}
	r, err := l.rate()
	if err != nil {
		return err
	}
	b := &rule.Bucket{
		Path: l.rule.Path, Counts: l.rule.Algorithm.InStore(), Aligned: true,
		Size:   value.Value[int64]{Option: "rate", Constant: r.Units},
		Rate:   value.Value[time.Duration]{Option: "rate", Constant: r.Each},
		Drip:   value.Value[int64]{Option: "rate", Constant: r.Units},
		WarmUp: read(&l.reader, "warm_up", l.WarmUp, option.Interval),
		Cold:   read(&l.reader, "cold_factor", cmp.Or(string(l.ColdFactor), strconv.Itoa(bucket.DefaultColdFactor)), parseColdFactor),
	}
	return l.addBucket(b, l.Cost, "")
}

// parseColdFactor parses the cold_factor option.
func parseColdFactor(text string) (option.Factor, string) {
	f, use := option.ParseFactor(text)
	if use != "" || f < 1e6 || f > bucket.MaxColdFactor*1e6 || f%1000 != 0 {
		return 0, fmt.Sprintf("a decimal from 1 to %d with at most 3 digits after the point, such as 3", bucket.MaxColdFactor)
	}
	return f, ""
}

// When windows begin.
const (
	windowStartClock = "clock"
	windowStartFirst = "first"
)

// startOfWindows returns when fixed windows begin.
func (l *LimitBuilder) startOfWindows() string { return cmp.Or(l.WindowStart, windowStartClock) }
