package ratelimit

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"
)

const (
	defaultName       = "default"
	defaultKey        = "{" + clientIP + "}"
	defaultIPv4Prefix = 32
	defaultIPv6Prefix = 64
)

// setting is one option of a limit as it was written.
type setting struct{ option, text string }

// names are what limits and their paths are made of.
var names = regexp.MustCompile(`^[A-Za-z0-9_.-]{1,64}$`)

// Limit is a leaky bucket for each key, such as each client address. The
// bucket holds at most `size` units. A request adds its `cost` if it fits;
// otherwise it is denied and adds nothing. Every `drip_rate`, `drip_size` units
// drip out.
//
// Instead of `size`, `drip_rate` and `drip_size`, a limit can be told by `max`
// and `duration`: a bucket of size `max` that drips one unit every
// `duration`/`max`. That is a burst of `max` and `max` per duration on average,
// so up to 2·`max` − 1 in one duration.
//
// Limits within a limit apply where it does, as well as it. A limit without
// size only holds others.
//
// `size`, `drip_rate`, `drip_size`, `cost` and `factor` may be strings with
// placeholders, evaluated for each request. A request for which one makes no
// usable value is refused: with status 400 for `cost`, 500 for the others.
// `drip_rate` and `drip_size` are a part of what tells buckets apart, so who can
// influence them gets a fresh bucket with each value: take them from what clients
// can't choose, as variables are that were set by who is logged in. The log has a
// warning where they read what clients send. `{env.*}`, `{file.*}` and `{system.*}` are resolved when the configuration is
// loaded, in any number or duration.
type Limit struct {
	// What the limit is called, in header fields, logs and the names of its
	// buckets: 1 to 64 letters, digits, `_`, `.` or `-`. Limits of one name and
	// equal numbers share their buckets, on all sites and Caddy instances; those
	// without a name do if their keys are equal too.
	// Needed within another limit; otherwise `default` if empty.
	Name string `json:"name,omitempty"`

	// The requests that the limit applies to. All if empty.
	MatcherSetsRaw caddyhttp.RawMatcherSets `json:"match,omitempty" caddy:"namespace=http.matchers"`

	// Whose bucket a request meets: text with placeholders, read after the
	// limit's matchers. An IP address is normalised and shortened to its
	// prefix; one of 6to4 or NAT64 counts as the IPv4 address in it. If none of
	// the placeholders has a value, the client's address is used, apart from
	// other keys. Default: that of the limit this one is in, else
	// `{http.vars.client_ip}`.
	Key string `json:"key,omitempty"`

	// The rate, as `<n>/<duration>`: n units each duration, evenly, such as
	// `60/1s`, `1000/1h` or `5/1d`. It takes the place of `drip_rate` and
	// `drip_size`, and makes the size n unless that is set. Takes no placeholders
	// that depend on the request.
	Rate Rate `json:"rate,omitempty"`

	// The most units the bucket holds, from 1 to 2^49. Default: the `n` of the
	// rate, if there is one.
	Size Number `json:"size,omitempty"`

	// The time from one drip to the next, in whole microseconds. Each value that
	// placeholders make has buckets of its own. Default: `1s`.
	DripRate Duration `json:"drip_rate,omitempty"`

	// The units that leave with each drip, from 1 to 2^49. Each value that
	// placeholders make has buckets of its own. Default: 1.
	DripSize Number `json:"drip_size,omitempty"`

	// The units a request adds, at least 1. Default: 1.
	Cost Number `json:"cost,omitempty"`

	// What the size is divided by, rounding up: a decimal of at most 6 digits
	// after the point. 0 switches the bucket off, but not the limits within
	// this one. Default: 1.
	Factor Number `json:"factor,omitempty"`

	// How many bits of an IPv4 address count, from 1 to 32. Default: 32.
	IPv4Prefix Number `json:"ipv4_prefix,omitempty"`

	// How many bits of an IPv6 address count, from 1 to 128. Default: 64,
	// since a single host may use any address of its /64.
	IPv6Prefix Number `json:"ipv6_prefix,omitempty"`

	// The burst, and the most on average in each duration. Takes no
	// placeholders that depend on the request.
	Max Number `json:"max,omitempty"`

	// The time in which `max` requests are admitted on average. Takes no
	// placeholders that depend on the request.
	Duration Duration `json:"duration,omitempty"`

	// The least time between two requests, kept by a second bucket beside
	// that of `max` and `duration`. Takes no placeholders
	// that depend on the request.
	MinInterval Duration `json:"min_interval,omitempty"`

	// The most keys of this limit that have buckets in this process, from 1 to
	// 1000000000, and no more than the app's `max_keys` of `memory`. It is this
	// limit's alone: limits within it have their own, and so has the interval of
	// `min_interval`. With Redis it also bounds what this instance keeps there, at
	// about 173 bytes a key, so that Redis holds at most so many of each instance.
	//
	// To be never full it has to be the new keys that come in a second times the
	// seconds that a bucket takes to drain. A million keys take about 52 MB of
	// memory (RSS), ten million 514 MB. Default: half of the app's.
	MaxKeys Number `json:"max_keys,omitempty"`

	// What becomes of keys that have no bucket while `max_keys` others have one:
	//
	// - `forget` (default): each gets a bucket, in place of one that is nearly
	//   empty compared with others. Nobody is kept out. Whose bucket is forgotten
	//   has as much room again as it held.
	// - `share`: nothing is ever forgotten. New keys share buckets, one for each
	//   network of the client's address, a /16 of IPv4 or a /32 of IPv6, whatever
	//   the key is. One for all whose clients have no address, as on a unix
	//   socket. It is for limits that must hold whatever happens, such as those of
	//   logins.
	//
	// The log has a line a minute while a limit does either. Limits within have
	// their own.
	WhenFull string `json:"when_full,omitempty"`

	// Limits that apply to the same requests as this one, if they match.
	Limits []*Limit `json:"limits,omitempty"`

	path     string
	key      *key
	maxKeys  int  // 0 for the default
	share    bool // whether new keys share buckets when there is no room
	buckets  []*bucket
	matchers caddyhttp.MatcherSets
	logger   *zap.Logger

	warnNoKey     sync.Once
	warnNoAddress sync.Once
	reported      minutely // bad values
}

// provision makes l and the limits within it ready. It returns an error that
// names the limit and its option, if one is wrong.
func (l *Limit) provision(ctx caddy.Context, parent *Limit, defs *definitions) error {
	if err := l.setPath(parent); err != nil {
		return fmt.Errorf("limit %q: %w", shown(l.Name), err)
	}
	l.logger = ctx.Logger()
	err := l.setKey(parent)
	if err == nil {
		err = l.setRoom(defs.maxKeys)
	}
	if err == nil {
		err = l.setBuckets()
	}
	if err == nil {
		err = defs.add(l)
	}
	if err == nil {
		err = l.setMatchers(ctx)
	}
	if err != nil {
		return fmt.Errorf("limit %q: %w", l.shownPath(), err)
	}
	l.warnOfChoice()
	for i, child := range l.Limits {
		if child == nil {
			return fmt.Errorf("limit %q: limit %d within it is null", l.shownPath(), i)
		}
		if err := child.provision(ctx, l, defs); err != nil {
			return err
		}
	}
	return nil
}

// groups reports whether l has no bucket, only limits within it.
func (l *Limit) groups() bool { return l.Size == "" && l.Rate == "" && l.Max == "" }

// shownPath returns what l is called in messages.
func (l *Limit) shownPath() string {
	if l.path == "" {
		return defaultName
	}
	return l.path
}

// setPath gives l its path: its name behind those of the limits it is in. A
// limit that has no name and only groups others does not show in paths.
func (l *Limit) setPath(parent *Limit) error {
	switch {
	case l.Name != "" && !names.MatchString(l.Name):
		return badOption("name", l.Name, "1 to 64 letters, digits, '_', '.' or '-'")
	case l.Name == "" && parent != nil:
		return errors.New("a limit within another needs a name")
	case l.Name == "" && l.groups():
		return nil
	}
	l.path = l.Name
	if l.path == "" {
		l.path = defaultName
	}
	if parent != nil && parent.path != "" {
		l.path = parent.path + "/" + l.path
	}
	return nil
}

// setKey makes the key ready. Unless l has its own it is the parent's, with its
// prefixes where l sets none.
func (l *Limit) setKey(parent *Limit) error {
	template, ipv4, ipv6 := l.Key, defaultIPv4Prefix, defaultIPv6Prefix
	if template == "" && parent != nil {
		template, ipv4, ipv6 = parent.key.template, parent.key.ipv4, parent.key.ipv6
	}
	var err error
	if l.IPv4Prefix != "" {
		if ipv4, err = newNumber("ipv4_prefix", string(l.IPv4Prefix), parseBits(32)); err != nil {
			return err
		}
	}
	if l.IPv6Prefix != "" {
		if ipv6, err = newNumber("ipv6_prefix", string(l.IPv6Prefix), parseBits(128)); err != nil {
			return err
		}
	}
	if parent != nil && l.Key == "" && ipv4 == parent.key.ipv4 && ipv6 == parent.key.ipv6 {
		l.key = parent.key
		return nil
	}
	if template == "" {
		template = defaultKey
	}
	l.key, err = newKey(template, ipv4, ipv6)
	return err
}

// setRoom reads how many buckets there may be, of most in the process, and what
// becomes of new keys then.
func (l *Limit) setRoom(most int) error {
	if l.MaxKeys != "" {
		var err error
		if l.maxKeys, err = newNumber("max_keys", string(l.MaxKeys), parseMaxKeys); err != nil {
			return err
		}
		if l.maxKeys > most {
			return badOption("max_keys", string(l.MaxKeys),
				fmt.Sprintf("at most that of memory in the global option, %d", most))
		}
	}
	var err error
	l.share, err = newConstant("when_full", or(l.WhenFull, whenFullForget), parseWhenFull)
	return err
}

// What becomes of keys that have no bucket when a limit has no room for more.
const (
	whenFullForget = "forget" // each takes the place of the emptiest bucket
	whenFullShare  = "share"  // they share buckets
)

// parseWhenFull reads what becomes of such keys: whether they share buckets.
func parseWhenFull(text string) (share bool, want string) {
	switch text {
	case whenFullForget, whenFullShare:
		return text == whenFullShare, ""
	}
	return false, "forget or share"
}

// setMatchers makes the matchers ready.
func (l *Limit) setMatchers(ctx caddy.Context) error {
	if l.MatcherSetsRaw == nil {
		return nil
	}
	sets, err := ctx.LoadModule(l, "MatcherSetsRaw")
	if err != nil {
		return fmt.Errorf("match: %w", err)
	}
	return l.matchers.FromInterface(sets)
}

// setBuckets makes the limit's buckets ready: one, or for a legacy limit with
// a min_interval two.
func (l *Limit) setBuckets() error {
	if l.Rate != "" {
		return l.setRateBucket()
	}
	bucketOptions := []setting{
		{"size", string(l.Size)},
		{"drip_rate", string(l.DripRate)}, {"drip_size", string(l.DripSize)},
	}
	legacyOptions := []setting{
		{"max", string(l.Max)},
		{"duration", string(l.Duration)}, {"min_interval", string(l.MinInterval)},
	}
	shared := []setting{
		{"cost", string(l.Cost)}, {"factor", string(l.Factor)},
		{"max_keys", string(l.MaxKeys)}, {"when_full", l.WhenFull},
	}

	if legacy := firstSet(legacyOptions); legacy != nil {
		if o := firstSet(bucketOptions); o != nil {
			return fmt.Errorf("%s: got %q beside %s, want either size, drip_rate and drip_size or max, duration and min_interval",
				o.option, o.text, legacy.option)
		}
		return l.setLegacyBuckets(legacy)
	}
	if l.Size == "" {
		if o := firstSet(append(bucketOptions, shared...)); o != nil {
			return badOption(o.option, o.text, "a size beside it")
		}
		if len(l.Limits) == 0 {
			return errors.New("it limits nothing, want rate, size, max or limits within it")
		}
		return nil
	}

	b := &bucket{path: l.path}
	var err error
	if b.size, err = newValue("size", string(l.Size), parseUnits); err != nil {
		return err
	}
	if b.rate, err = newValue("drip_rate", or(string(l.DripRate), "1s"), parseInterval); err != nil {
		return err
	}
	if b.drip, err = newValue("drip_size", or(string(l.DripSize), "1"), parseUnits); err != nil {
		return err
	}
	return l.addBucket(b, string(l.Cost), string(l.Factor))
}

// setRateBucket makes the bucket of a limit that is told by its rate. Its size
// is the rate's number of units unless it is set.
func (l *Limit) setRateBucket() error {
	if o := firstSet([]setting{
		{"drip_rate", string(l.DripRate)}, {"drip_size", string(l.DripSize)}, {"max", string(l.Max)},
		{"duration", string(l.Duration)}, {"min_interval", string(l.MinInterval)},
	}); o != nil {
		return fmt.Errorf("%s: got %q beside rate, want either rate and size, or size, drip_rate and drip_size, "+
			"or max, duration and min_interval", o.option, o.text)
	}
	r, err := newNumber("rate", string(l.Rate), parseRate)
	if err != nil {
		return err
	}
	b := &bucket{path: l.path}
	if b.size, err = newValue("size", or(string(l.Size), strconv.FormatInt(r.units, 10)), parseUnits); err != nil {
		return err
	}
	if b.factor, err = newValue("factor", or(string(l.Factor), "1"), parseFactor); err != nil {
		return err
	}
	var size int64
	if !b.sizeVaries() {
		if size, _, err = b.sizeInForce(nil); err != nil {
			return err
		}
	}
	numbers, err := r.limit(size)
	if err != nil {
		return fmt.Errorf("rate: got %q, want another rate or size: %w", string(l.Rate), err)
	}
	b.rate = value[time.Duration]{option: "drip_rate", constant: numbers.DripInterval}
	b.drip = value[int64]{option: "drip_size", constant: numbers.DripSize}
	return l.addBucket(b, string(l.Cost), string(l.Factor))
}

// setLegacyBuckets makes the buckets of a limit that is told by max, duration
// and min_interval: one that holds max units and drips one at a time, max of
// them in the duration, and one that holds a single unit for the interval. The
// first of them that is set is given.
func (l *Limit) setLegacyBuckets(first *setting) error {
	missing := ""
	switch {
	case l.Max == "":
		missing = "max"
	case l.Duration == "":
		missing = "duration"
	}
	if missing != "" {
		return fmt.Errorf("%s: got %q without %s, want max and duration; "+
			"for an interval alone write size 1 and drip_rate <interval>", first.option, first.text, missing)
	}
	most, err := newNumber("max", string(l.Max), parseUnits)
	if err != nil {
		return err
	}
	duration, err := newNumber("duration", string(l.Duration), parseInterval)
	if err != nil {
		return err
	}
	micros := duration.Microseconds()
	if most > micros {
		return badOption("max", string(l.Max), fmt.Sprintf("at most one for each microsecond of the duration, %d", micros))
	}
	rate := time.Duration((micros+most-1)/most) * time.Microsecond
	b := constantBucket(l.path, most, rate)
	b.written = setting{"duration", string(l.Duration)}
	if err := l.addBucket(b, string(l.Cost), string(l.Factor)); err != nil {
		return err
	}
	if l.MinInterval == "" {
		return nil
	}
	interval, err := newNumber("min_interval", string(l.MinInterval), parseInterval)
	if err != nil {
		return err
	}
	b = constantBucket(l.path+"/min_interval", 1, interval)
	b.written = setting{"min_interval", string(l.MinInterval)}
	return l.addBucket(b, "", "")
}

// constantBucket returns a bucket that drips one unit at a time.
func constantBucket(path string, size int64, rate time.Duration) *bucket {
	return &bucket{
		path: path,
		size: value[int64]{option: "size", constant: size},
		rate: value[time.Duration]{option: "drip_rate", constant: rate},
		drip: value[int64]{option: "drip_size", constant: 1},
	}
}

// addBucket completes b and adds it to l's.
func (l *Limit) addBucket(b *bucket, cost, factor string) error {
	var err error
	if b.cost, err = newValue("cost", or(cost, "1"), parseUnits); err != nil {
		return err
	}
	if b.factor, err = newValue("factor", or(factor, "1"), parseFactor); err != nil {
		return err
	}
	b.limit = l
	if err := b.check(); err != nil {
		return err
	}
	numbers := "" // limits of one name share their buckets also while their size changes
	if l.Name == "" {
		numbers = b.shownNumbers()
	}
	b.name = b.path + l.key.mark(b.path, numbers)
	b.fallbackName = b.name + "@client_ip"
	l.buckets = append(l.buckets, b)
	return nil
}

// firstSet returns the first of the options that is set, nil if none is.
func firstSet(options []setting) *setting {
	for i := range options {
		if options[i].text != "" {
			return &options[i]
		}
	}
	return nil
}

// or returns text, or def if there is none.
func or(text, def string) string {
	if text == "" {
		return def
	}
	return text
}

// apply adds to c the buckets of l, and of the limits within it, that the
// request has to pass.
func (l *Limit) apply(c *check) error {
	if matches, err := l.matchers.AnyMatchWithError(c.request); err != nil || !matches {
		return err
	}
	for _, b := range l.buckets {
		if err := b.apply(c); err != nil {
			return err
		}
	}
	for _, child := range l.Limits {
		if err := child.apply(c); err != nil {
			return err
		}
	}
	return nil
}

// warnOfChoice logs if clients can choose a fresh bucket for each request, because
// they send what its drips are read from: these tell buckets apart.
func (l *Limit) warnOfChoice() {
	for _, b := range l.buckets {
		for _, o := range []setting{{"drip_rate", b.rate.template}, {"drip_size", b.drip.template}} {
			if name := sentByClients(o.text); name != "" && !b.off {
				l.logger.Warn("an option of this limit reads what clients send, and each of its values has a bucket of its own; "+
					"take it from what they can't choose, or they choose a fresh bucket",
					zap.String("limit", b.path), zap.String("option", o.option), zap.String("placeholder", "{"+name+"}"))
			}
		}
	}
}

// reportNoKey logs, once, that the client's address stands in for the key, or
// that there is none either.
func (l *Limit) reportNoKey(address string) {
	once, message := &l.warnNoKey, "a request has no value for the key of this limit; its client's address is used instead"
	if address == "" {
		once, message = &l.warnNoAddress, "a request has neither a value for the key of this limit nor a client address, "+
			"as on a unix socket without trusted_proxies_unix; all such requests share one bucket"
	}
	once.Do(func() {
		l.logger.Warn(message, zap.String("limit", l.path), zap.Stringer("key", l.key))
	})
}

// reportBadValue logs that a placeholder made no usable value, at most once a
// minute for a limit.
func (l *Limit) reportBadValue(err error) {
	if l.reported.due() {
		l.logger.Error("a placeholder makes no usable value; requests are refused",
			zap.String("limit", l.path), zap.Error(err))
	}
}
