package ratelimit

import (
	"cmp"
	"errors"
	"fmt"
	"regexp"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
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

// definitions holds what the limits of a configuration are, to find those that
// share a path by mistake.
type definitions struct {
	named map[string]definition // of the whole configuration, by path
	rooms map[string][2]setting // the same, by the name of the buckets in stores
	paths map[string]bool       // of one handler

	maxKeys int // of all limits together
}

// definition is what limits of one path have in common.
type definition struct {
	options []setting
	policy  *policy
}

// newDefinitions returns the definitions of a configuration without limits.
func newDefinitions() *definitions {
	return &definitions{
		named:   make(map[string]definition),
		rooms:   make(map[string][2]setting),
		maxKeys: limiter.DefaultMaxKeys,
	}
}

// inHandler returns the definitions as the limits of one more handler add to
// them.
func (d *definitions) inHandler() *definitions {
	return &definitions{named: d.named, rooms: d.rooms, paths: make(map[string]bool), maxKeys: d.maxKeys}
}

// add adds the buckets of l. In one handler every path may stand once: a
// request could not be charged twice in one step. Limits of one name share
// their buckets wherever they stand, so they have to agree in what makes a
// bucket. Those without a name need not: they share if key and numbers are equal.
func (d *definitions) add(l *Limit) error {
	for _, b := range l.buckets {
		if d.paths[b.path] {
			return fmt.Errorf("path %q: got two limits of one handler, want a name for each", b.path)
		}
		d.paths[b.path] = true
		b.policy = &policy{path: b.path, units: b.cost.varies() || b.cost.constant != 1}
		if err := d.addRoom(b); err != nil {
			return err
		}
		if l.Name == "" {
			continue
		}
		options := []setting{
			{"key", l.key.String()},
			{"ipv4_prefix", fmt.Sprint(l.key.ipv4)}, {"ipv6_prefix", fmt.Sprint(l.key.ipv6)},
			{"size", b.size.String()}, {"drip_rate", b.rate.String()}, {"drip_size", b.drip.String()},
			{"factor", b.factor.String()},
		}
		earlier, found := d.named[b.path]
		if !found {
			d.named[b.path] = definition{options, b.policy}
			continue
		}
		for i, o := range options {
			if o != earlier.options[i] {
				return disagreement(b, o, earlier.options[i])
			}
		}
		earlier.policy.units = earlier.policy.units || b.policy.units
		b.policy = earlier.policy
	}
	return nil
}

// addRoom adds how many buckets b's limit may have. Stores bound all buckets of
// one name together, so that limits which come to one have to agree in it, even
// where they have no name themselves.
func (d *definitions) addRoom(b *bucket) error {
	options := [2]setting{
		{"max_keys", fmt.Sprint(cmp.Or(b.limit.maxKeys, max(d.maxKeys/2, 1)))},
		{"when_full", or(b.limit.WhenFull, whenFullForget)},
	}
	earlier, found := d.rooms[b.name]
	if !found {
		d.rooms[b.name] = options
		return nil
	}
	for i, o := range options {
		if o != earlier[i] {
			return disagreement(b, o, earlier[i])
		}
	}
	return nil
}

// disagreement returns the error for an option of b's limit that is another in
// an earlier one.
func disagreement(b *bucket, got, earlier setting) error {
	return fmt.Errorf("%s: got %q here and %q in another limit of path %q, want them equal, since limits of one path share their buckets, or another name",
		got.option, got.text, earlier.text, b.path)
}
