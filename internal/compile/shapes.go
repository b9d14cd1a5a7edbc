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
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/calendar"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// shape is a way to say what the bucket of a limit is.
type shape struct {
	algorithms    []rule.Algorithm // with which it is used
	requiredAnyOf []string         // the options that show that it is used; nil if none has to
	options       []string         // its options
	use           string           // for errors: what to use instead of the options of another
	build         func(*LimitBuilder) error
}

// shapes are all ways. A limit uses the first that its algorithm and its options show.
var shapes = []shape{
	{
		[]rule.Algorithm{rule.Concurrency}, []string{"concurrency"}, []string{"concurrency", "factor"},
		"a limit of its own for it", (*LimitBuilder).setConcurrencyBucket,
	},
	{
		[]rule.Algorithm{rule.FixedWindow}, nil, []string{"size", "window", "window_start", "period", "factor"},
		"only size and window, or size and period", (*LimitBuilder).setWindowBucket,
	},
	{
		[]rule.Algorithm{rule.SlidingWindow}, nil, []string{"size", "window", "factor"},
		"only size and window", (*LimitBuilder).setWindowBucket,
	},
	{
		[]rule.Algorithm{rule.SlidingLog}, nil, []string{"size", "window", "factor"},
		"only size and window", (*LimitBuilder).setWindowBucket,
	},
	{
		[]rule.Algorithm{rule.WarmUp}, nil, []string{"rate", "warm_up", "cold_factor"},
		"only rate, warm_up and cold_factor", (*LimitBuilder).setWarmUpBucket,
	},
	{
		[]rule.Algorithm{rule.LeakyBucket, rule.TokenBucket}, []string{"rate"}, []string{"rate", "size", "factor"},
		"either rate and size, or size, drip_rate and drip_size, or max, duration and min_interval", (*LimitBuilder).setRateBucket,
	},
	{
		[]rule.Algorithm{rule.LeakyBucket, rule.TokenBucket}, legacyOptions, append([]string{"factor"}, legacyOptions...),
		"either size, drip_rate and drip_size or max, duration and min_interval", (*LimitBuilder).setLegacyBuckets,
	},
	{
		[]rule.Algorithm{rule.LeakyBucket, rule.TokenBucket}, nil, append([]string{"factor"}, dripOptions...), "",
		(*LimitBuilder).setDripBucket,
	},
}

var (
	dripOptions   = []string{"size", "drip_rate", "drip_size"}
	legacyOptions = []string{"max", "duration", "min_interval"}
)

// setBuckets sets up the limit's buckets: one, or two for a legacy limit with
// min_interval.
func (d *LimitBuilder) setBuckets() error {
	if err := d.setAlgorithm(); err != nil {
		return err
	}
	i := slices.IndexFunc(shapes, func(f shape) bool {
		return slices.Contains(f.algorithms, d.rule.Algorithm) && (f.requiredAnyOf == nil || d.FirstSet(f.requiredAnyOf...) != nil)
	})
	if err := shapes[i].check(d); err != nil {
		return err
	}
	return shapes[i].build(d)
}

// setAlgorithm sets the algorithm.
func (d *LimitBuilder) setAlgorithm() (err error) {
	if d.Concurrency != "" {
		if d.rule.Algorithm = rule.Concurrency; d.Algorithm != "" {
			return option.Clash("algorithm", d.Algorithm, "concurrency", "use one of them")
		}
		return nil
	}
	d.rule.Algorithm, err = option.ParseConstant("algorithm", cmp.Or(d.Algorithm, string(rule.LeakyBucket)), rule.ParseAlgorithm)
	return err
}

// algorithmsWith returns the algorithms of the shapes that take an option.
func algorithmsWith(name string) (of []string) {
	for _, f := range shapes {
		if slices.Contains(f.options, name) {
			for _, a := range f.algorithms {
				of = append(of, string(a))
			}
		}
	}
	return of
}

// check returns an error if an option is set that makes a bucket, but not this one.
func (f *shape) check(d *LimitBuilder) error {
	for _, name := range config.LimitOptions {
		if slices.Contains(f.options, name) {
			continue
		}
		of := algorithmsWith(name)
		if of == nil {
			continue // it makes no bucket
		}
		switch o := d.FirstSet(name); {
		case o == nil:
		case d.rule.Algorithm != rule.Concurrency && !slices.Contains(of, string(rule.LeakyBucket)) && !slices.Contains(of, string(d.rule.Algorithm)):
			return option.Needs(name, o.Text, "algorithm "+option.InWords(of, "or"))
		case f.requiredAnyOf != nil:
			return option.Clash(name, o.Text, d.FirstSet(f.requiredAnyOf...).Option, "use "+f.use)
		default:
			return option.Clash(name, o.Text, "algorithm "+string(d.rule.Algorithm), "use "+f.use)
		}
	}
	return nil
}

// setDripBucket sets up a bucket of a size that drips. Without a size the limit only
// groups others.
func (d *LimitBuilder) setDripBucket() (err error) {
	if d.Size == "" {
		return d.setGroup()
	}
	b := &rule.Bucket{Path: d.rule.Path}
	if b.Size, err = option.NewValue(d.resolve, "size", string(d.Size), d.units()); err != nil {
		return err
	}
	if b.Rate, err = option.NewValue(d.resolve, "drip_rate", cmp.Or(string(d.DripRate), "1s"), option.Interval); err != nil {
		return err
	}
	if b.Drip, err = option.NewValue(d.resolve, "drip_size", cmp.Or(string(d.DripSize), "1"), d.units()); err != nil {
		return err
	}
	return d.addBucket(b, string(d.Cost), string(d.Factor))
}

// setGroup checks that a limit without a bucket has nested limits, and no options that need
// one.
func (d *LimitBuilder) setGroup() error {
	for _, name := range needBucket {
		if o := d.Setting(name); o != nil {
			return option.Needs(o.Option, o.Text, "a size")
		}
	}
	if d.Limits.IsZero() {
		return errors.New("it sets no limit; use rate, size, max, min_interval, concurrency or nested limits")
	}
	return nil
}

// setRateBucket sets up the bucket of a limit that is defined by its rate. The
// size is the rate's number of units unless it is set.
func (d *LimitBuilder) setRateBucket() error {
	r, err := d.rate()
	if err != nil {
		return err
	}
	b := &rule.Bucket{Path: d.rule.Path}
	if b.Size, err = option.NewOptional(d.resolve, "size", string(d.Size), strconv.FormatInt(r.Units, 10), d.units()); err != nil {
		return err
	}
	if b.Factor, err = option.NewOptional(d.resolve, "factor", string(d.Factor), "1", option.ParseFactor); err != nil {
		return err
	}
	var size int64
	if !b.SizeIsDynamic() {
		if size, _, err = b.EffectiveSize(nil); err != nil {
			return err
		}
	}
	numbers, err := r.Limit(size)
	if err != nil {
		return option.Bad("rate", string(d.Rate), fmt.Sprintf("another rate or size: %v", err))
	}
	b.Rate = option.Value[time.Duration]{Option: "drip_rate", Constant: numbers.DripInterval}
	b.Drip = option.Value[int64]{Option: "drip_size", Constant: numbers.DripSize}
	return d.addBucket(b, string(d.Cost), string(d.Factor))
}

// rate parses the rate, which must not depend on the request.
func (d *LimitBuilder) rate() (option.Rate, error) {
	text := string(d.Rate)
	if resolved, err := d.resolve("rate", text); err == nil && option.IsTemplate(resolved) {
		return option.Rate{}, option.Bad("rate", text,
			"one that does not depend on the request, or a size that does, such as size {vars.plan_size} with drip_rate 1s")
	}
	if d.countsBytes() {
		return option.Parse(d.resolve, "rate", text, option.ParseByteRate)
	}
	return option.Parse(d.resolve, "rate", text, option.ParseRate)
}

// countsBytes reports whether what d limits are bytes.
func (d *LimitBuilder) countsBytes() bool {
	return d.ActualCost == rule.ActualBytes || d.Cost == bodyCost
}

// units returns the parser of numbers of what d limits.
func (d *LimitBuilder) units() option.Parser[int64] {
	if d.countsBytes() {
		return option.Bytes
	}
	return option.Units
}

// setLegacyBuckets sets up the buckets of a limit that is defined by max, duration
// and min_interval: one that holds max units and drips one at a time, max of them
// per duration, and one that holds a single unit for the interval. The interval may
// also stand alone.
func (d *LimitBuilder) setLegacyBuckets() error {
	switch {
	case d.Max == "" && d.Duration == "" && d.Factor != "":
		return option.Needs("factor", string(d.Factor), "max and duration: a min_interval has no size to divide")
	case d.Max == "" && d.Duration == "":
		return d.addInterval(d.rule.Path)
	case d.Max == "":
		return option.Needs("duration", string(d.Duration), "max")
	case d.Duration == "":
		return option.Needs("max", string(d.Max), "duration")
	}
	most, err := option.Parse(d.resolve, "max", string(d.Max), d.units())
	if err != nil {
		return err
	}
	duration, err := option.Parse(d.resolve, "duration", string(d.Duration), option.Interval)
	if err != nil {
		return err
	}
	micros := duration.Microseconds()
	if most > micros {
		return option.Bad("max", string(d.Max), fmt.Sprintf("at most %d, one for each microsecond of the duration", micros))
	}
	rate := time.Duration((micros+most-1)/most) * time.Microsecond
	b := constantBucket(d.rule.Path, most, rate)
	b.Source = option.Setting{Option: "duration", Text: string(d.Duration)}
	if err := d.addBucket(b, string(d.Cost), string(d.Factor)); err != nil {
		return err
	}
	if d.MinInterval == "" {
		return nil
	}
	return d.addInterval(d.rule.Path + "/min_interval")
}

// addInterval adds the bucket of a minimum interval.
func (d *LimitBuilder) addInterval(path string) error {
	interval, err := option.Parse(d.resolve, "min_interval", string(d.MinInterval), option.Interval)
	if err != nil {
		return err
	}
	b := constantBucket(path, 1, interval)
	b.Source = option.Setting{Option: "min_interval", Text: string(d.MinInterval)}
	return d.addBucket(b, string(d.Cost), "")
}

// constantBucket returns a bucket that drips one unit at a time.
func constantBucket(path string, size int64, rate time.Duration) *rule.Bucket {
	return &rule.Bucket{
		Path: path,
		Size: option.Value[int64]{Option: "size", Constant: size},
		Rate: option.Value[time.Duration]{Option: "drip_rate", Constant: rate},
		Drip: option.Value[int64]{Option: "drip_size", Constant: 1},
	}
}

// setConcurrencyBucket sets up the bucket of a limit on requests in progress.
func (d *LimitBuilder) setConcurrencyBucket() error {
	numbers := limiter.Concurrency(1)
	b := &rule.Bucket{
		Path: d.rule.Path, Counts: numbers.Algorithm,
		Rate: option.Value[time.Duration]{Option: "concurrency", Constant: numbers.DripInterval},
		Drip: option.Value[int64]{Option: "concurrency", Constant: numbers.DripSize},
	}
	var err error
	if d.rule.Load != nil {
		b.Size = option.Value[int64]{Option: "max", Constant: int64(d.rule.Load.Options.Max)}
	} else if b.Size, err = option.NewValue(d.resolve, "concurrency", string(d.Concurrency), option.Units); err != nil {
		return err
	}
	return d.addBucket(b, string(d.Cost), string(d.Factor))
}

// setWindowBucket sets up the bucket of a limit that counts in windows. If they are
// fixed, it loses all that it holds at the end of each.
func (d *LimitBuilder) setWindowBucket() error {
	switch {
	case d.Size == "":
		return option.Needs("algorithm", d.Algorithm, "a size, the most units in a window")
	case d.Window == "" && d.rule.Algorithm.Slides():
		return option.Needs("algorithm", d.Algorithm, "a window")
	case d.Window == "" && d.Period == "":
		return option.Needs("algorithm", d.Algorithm, "a window or a period")
	case d.Window != "" && d.Period != "":
		return option.Clash("period", d.Period, "window", "use one of them")
	case d.WindowStart != "" && d.Period != "":
		return option.Clash("window_start", d.WindowStart, "period", "remove it: periods begin as the calendar says")
	}
	b := &rule.Bucket{Path: d.rule.Path, Counts: d.rule.Algorithm.InStore()}
	b.Drip = option.Value[int64]{Option: "size", Constant: b.Counts.DripSize()}
	var err error
	if b.Size, err = option.NewValue(d.resolve, "size", string(d.Size), d.units()); err != nil {
		return err
	}
	if d.Period != "" {
		if b.Period, err = option.Parse(d.resolve, "period", d.Period, calendar.Parse); err != nil {
			return err
		}
		b.Rate = option.Value[time.Duration]{Option: "period", Constant: b.Period.Longest()}
	} else {
		if b.Rate, err = option.NewValue(d.resolve, "window", string(d.Window), option.Interval); err != nil {
			return err
		}
		b.Source = option.Setting{Option: "window", Text: string(d.Window)}
		if b.Aligned, err = option.ParseConstant("window_start", d.startOfWindows(), option.Is(windowStartClock, windowStartClock, windowStartFirst)); err != nil {
			return err
		}
	}
	return d.addBucket(b, string(d.Cost), string(d.Factor))
}

// setWarmUpBucket sets up the bucket of a limit whose rate grows after it was idle.
func (d *LimitBuilder) setWarmUpBucket() error {
	switch {
	case d.Rate == "":
		return option.Needs("algorithm", d.Algorithm, "a rate, such as 10/1s")
	case d.WarmUp == "":
		return option.Needs("algorithm", d.Algorithm, "a warm_up, the time until it admits the whole rate")
	}
	r, err := d.rate()
	if err != nil {
		return err
	}
	b := &rule.Bucket{
		Path: d.rule.Path, Counts: d.rule.Algorithm.InStore(), Aligned: true,
		Size: option.Value[int64]{Option: "rate", Constant: r.Units},
		Rate: option.Value[time.Duration]{Option: "rate", Constant: r.Each},
		Drip: option.Value[int64]{Option: "rate", Constant: r.Units},
	}
	if b.WarmUp, err = option.Parse(d.resolve, "warm_up", string(d.WarmUp), option.Interval); err != nil {
		return err
	}
	if b.Cold, err = option.Parse(d.resolve, "cold_factor", cmp.Or(string(d.ColdFactor), strconv.Itoa(bucket.DefaultColdFactor)), parseColdFactor); err != nil {
		return err
	}
	return d.addBucket(b, string(d.Cost), "")
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
func (d *LimitBuilder) startOfWindows() string { return cmp.Or(d.WindowStart, windowStartClock) }
