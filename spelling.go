package ratelimit

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/option"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// spelling is a way to say what the bucket of a limit is.
type spelling struct {
	algorithms []algorithm // with which it is used
	marks      []string    // the options that show that it is used; nil if none has to
	takes      []string    // its options
	want       string      // for errors: what is right instead of the options of another
	makes      func(*Limit) error
}

// spellings are all ways. A limit uses the first that its algorithm and its options show.
var spellings = []spelling{
	{
		[]algorithm{concurrency}, nil, []string{"concurrency", "factor"},
		"only concurrency, or a limit of its own for it", (*Limit).setConcurrencyBucket,
	},
	{
		[]algorithm{fixedWindow}, nil, []string{"size", "window", "window_start", "period", "factor"},
		"only size and window, or size and period, with algorithm fixed_window", (*Limit).setWindowBucket,
	},
	{
		[]algorithm{slidingWindow}, nil, []string{"size", "window", "factor"},
		"only size and window with algorithm sliding_window", (*Limit).setWindowBucket,
	},
	{
		[]algorithm{slidingLog}, nil, []string{"size", "window", "factor"},
		"only size and window with algorithm sliding_log", (*Limit).setWindowBucket,
	},
	{
		[]algorithm{warmUp}, nil, []string{"rate", "warm_up", "cold_factor"},
		"only rate, warm_up and cold_factor with algorithm warm_up", (*Limit).setWarmUpBucket,
	},
	{
		[]algorithm{leakyBucket, tokenBucket}, []string{"rate"}, []string{"rate", "size", "factor"},
		"either rate and size, or size, drip_rate and drip_size, or max, duration and min_interval", (*Limit).setRateBucket,
	},
	{
		[]algorithm{leakyBucket, tokenBucket}, legacyOptions, append([]string{"factor"}, legacyOptions...),
		"either size, drip_rate and drip_size or max, duration and min_interval", (*Limit).setLegacyBuckets,
	},
	{
		[]algorithm{leakyBucket, tokenBucket}, nil, append([]string{"factor"}, dripOptions...), "",
		(*Limit).setDripBucket,
	},
}

var (
	dripOptions   = []string{"size", "drip_rate", "drip_size"}
	legacyOptions = []string{"max", "duration", "min_interval"}
)

// setBuckets sets up the limit's buckets: one, or two for a legacy limit with
// min_interval.
func (l *Limit) setBuckets() error {
	if err := l.setAlgorithm(); err != nil {
		return err
	}
	i := slices.IndexFunc(spellings, func(s spelling) bool {
		return slices.Contains(s.algorithms, l.algorithm) && (s.marks == nil || l.firstSet(s.marks...) != nil)
	})
	if err := spellings[i].check(l); err != nil {
		return err
	}
	return spellings[i].makes(l)
}

// setAlgorithm sets the algorithm.
func (l *Limit) setAlgorithm() (err error) {
	if l.Concurrency != "" {
		if l.algorithm = concurrency; l.Algorithm != "" {
			return option.Bad("algorithm", l.Algorithm, "none with concurrency")
		}
		return nil
	}
	l.algorithm, err = option.ParseConstant("algorithm", cmp.Or(l.Algorithm, string(leakyBucket)), parseAlgorithm)
	return err
}

// algorithmsWith returns the algorithms of the spellings that take an option.
func algorithmsWith(name string) (of []string) {
	for _, s := range spellings {
		if slices.Contains(s.takes, name) {
			for _, a := range s.algorithms {
				of = append(of, string(a))
			}
		}
	}
	return of
}

// check returns an error if an option is set that makes a bucket, but not this one.
func (s *spelling) check(l *Limit) error {
	for _, name := range limitOptions {
		if slices.Contains(s.takes, name) {
			continue
		}
		of := algorithmsWith(name)
		if of == nil {
			continue // it makes no bucket
		}
		switch o := l.firstSet(name); {
		case o == nil:
		case l.algorithm != concurrency && !slices.Contains(of, string(leakyBucket)) && !slices.Contains(of, string(l.algorithm)):
			return option.Bad(name, o.text, "algorithm "+option.InWords(of, "or")+" with it")
		case s.marks != nil:
			return option.Errorf(name, "got %q together with %s, want %s", o.text, l.firstSet(s.marks...).option, s.want)
		default:
			return option.Bad(name, o.text, s.want)
		}
	}
	return nil
}

// setDripBucket sets up a bucket of a size that drips. Without a size the limit only
// groups others.
func (l *Limit) setDripBucket() (err error) {
	if l.Size == "" {
		return l.setGroup()
	}
	b := &bucket{path: l.path}
	if b.size, err = option.NewValue(l.resolve, "size", string(l.Size), option.Units); err != nil {
		return err
	}
	if b.rate, err = option.NewValue(l.resolve, "drip_rate", cmp.Or(string(l.DripRate), "1s"), option.Interval); err != nil {
		return err
	}
	if b.drip, err = option.NewValue(l.resolve, "drip_size", cmp.Or(string(l.DripSize), "1"), option.Units); err != nil {
		return err
	}
	return l.addBucket(b, string(l.Cost), string(l.Factor))
}

// setGroup checks that a limit without a bucket has nested limits, and no options that
// need a bucket.
func (l *Limit) setGroup() error {
	o := l.firstSet("drip_rate", "drip_size", "cost", "factor", "max_keys", "when_full", "track_top", "status",
		"soft", "max_delay", "max_waiting", "actual_cost", "algorithm")
	switch {
	case o != nil && o.option != "algorithm":
	case l.CountDenied:
		o = &setting{"count_denied", "true"}
	case l.Count != nil:
		o = &setting{"count", l.countText()}
	}
	switch {
	case o != nil:
		return option.Bad(o.option, o.text, "a size with it")
	case len(l.Limits) == 0:
		return errors.New("it sets no limit, want rate, size, max or nested limits")
	}
	return nil
}

// setRateBucket sets up the bucket of a limit that is defined by its rate. The
// size is the rate's number of units unless it is set.
func (l *Limit) setRateBucket() error {
	r, err := option.Parse(l.resolve, "rate", string(l.Rate), option.ParseRate)
	if err != nil {
		return err
	}
	b := &bucket{path: l.path}
	if b.size, err = option.NewValue(l.resolve, "size", cmp.Or(string(l.Size), strconv.FormatInt(r.Units, 10)), option.Units); err != nil {
		return err
	}
	if b.factor, err = option.NewValue(l.resolve, "factor", cmp.Or(string(l.Factor), "1"), option.ParseFactor); err != nil {
		return err
	}
	var size int64
	if !b.sizeIsDynamic() {
		if size, _, err = b.effectiveSize(nil); err != nil {
			return err
		}
	}
	numbers, err := r.Limit(size)
	if err != nil {
		return option.Errorf("rate", "got %q, want another rate or size: %v", string(l.Rate), err)
	}
	b.rate = option.Value[time.Duration]{Option: "drip_rate", Constant: numbers.DripInterval}
	b.drip = option.Value[int64]{Option: "drip_size", Constant: numbers.DripSize}
	return l.addBucket(b, string(l.Cost), string(l.Factor))
}

// setLegacyBuckets sets up the buckets of a limit that is defined by max, duration
// and min_interval: one that holds max units and drips one at a time, max of them
// per duration, and one that holds a single unit for the interval.
func (l *Limit) setLegacyBuckets() error {
	first := l.firstSet("max", "duration", "min_interval")
	missing := ""
	switch {
	case l.Max == "":
		missing = "max"
	case l.Duration == "":
		missing = "duration"
	}
	if missing != "" {
		return option.Errorf(first.option, "got %q without %s, want max and duration; "+
			"for an interval alone write size 1 and drip_rate <interval>", first.text, missing)
	}
	most, err := option.Parse(l.resolve, "max", string(l.Max), option.Units)
	if err != nil {
		return err
	}
	duration, err := option.Parse(l.resolve, "duration", string(l.Duration), option.Interval)
	if err != nil {
		return err
	}
	micros := duration.Microseconds()
	if most > micros {
		return option.Bad("max", string(l.Max), fmt.Sprintf("at most one for each microsecond of the duration, %d", micros))
	}
	rate := time.Duration((micros+most-1)/most) * time.Microsecond
	b := constantBucket(l.path, most, rate)
	b.source = setting{"duration", string(l.Duration)}
	if err := l.addBucket(b, string(l.Cost), string(l.Factor)); err != nil {
		return err
	}
	if l.MinInterval == "" {
		return nil
	}
	interval, err := option.Parse(l.resolve, "min_interval", string(l.MinInterval), option.Interval)
	if err != nil {
		return err
	}
	b = constantBucket(l.path+"/min_interval", 1, interval)
	b.source = setting{"min_interval", string(l.MinInterval)}
	return l.addBucket(b, "", "")
}

// constantBucket returns a bucket that drips one unit at a time.
func constantBucket(path string, size int64, rate time.Duration) *bucket {
	return &bucket{
		path: path,
		size: option.Value[int64]{Option: "size", Constant: size},
		rate: option.Value[time.Duration]{Option: "drip_rate", Constant: rate},
		drip: option.Value[int64]{Option: "drip_size", Constant: 1},
	}
}

// setConcurrencyBucket sets up the bucket of a limit on requests in progress.
func (l *Limit) setConcurrencyBucket() error {
	if o := l.firstSet("soft"); o != nil {
		return option.Bad(o.option, o.text, "only concurrency, or a limit of its own for it")
	}
	if l.CountDenied {
		return option.Bad("count_denied", "true", "none with concurrency, as denied requests are not in progress")
	}
	numbers := limiter.Concurrency(1)
	b := &bucket{
		path: l.path, counts: numbers.Algorithm,
		rate: option.Value[time.Duration]{Option: "concurrency", Constant: numbers.DripInterval},
		drip: option.Value[int64]{Option: "concurrency", Constant: numbers.DripSize},
	}
	var err error
	if b.size, err = option.NewValue(l.resolve, "concurrency", string(l.Concurrency), option.Units); err != nil {
		return err
	}
	return l.addBucket(b, string(l.Cost), string(l.Factor))
}
