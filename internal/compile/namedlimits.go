package compile

import (
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
)

// NamedLimits are limits that share something by a name, such as buckets by the path that users gave
// them, so that their options must agree.
type NamedLimits map[string]*namedLimit

// namedLimit is the first limit of a name.
type namedLimit struct {
	limit    *config.Limit
	options  []option.Setting // in which the others must agree
	bucket   *rule.Bucket
	policy   *rule.Policy // of the first, which all have
	location Location
}

// add adds a bucket of l, which is at a location, under a name. It returns the first one of that name, which
// may be this, and an error if their options differ.
func (all NamedLimits) add(name string, l *LimitBuilder, b *rule.Bucket, options []option.Setting, at Location) (first *namedLimit, differ *option.Error) {
	first = all[name]
	if first == nil {
		first = &namedLimit{l.Limit, options, b, b.Policy, at}
		all[name] = first
	}
	if first.bucket.Limit.Connections != b.Limit.Connections {
		return first, option.Errorf("name", "%q is the name of a limit of requests and of one of connections; use another for one of them", b.Path)
	}
	for i, o := range options {
		switch earlier := first.options[i]; {
		case o == earlier || !l.knows(o) || !l.knows(earlier):
		case b.Free() != first.bucket.Free() && slices.Contains(chargeOptions, o.Option):
		default:
			return first, disagreement(b.Path, asWritten(l.Limit, b, o), asWritten(first.limit, first.bucket, earlier), first.location)
		}
	}
	if first.bucket.Free() && !b.Free() { // it has more to agree with
		*first = namedLimit{l.Limit, options, b, first.policy, at}
	}
	return first, nil
}

// Add adds the buckets of l, if it has a name. It returns an error if an earlier limit has the
// same name and other options.
func (all NamedLimits) Add(l *LimitBuilder, at Location) error {
	if !l.rule.Named {
		return nil
	}
	for _, b := range l.rule.Buckets {
		if _, differ := all.add(b.Path, l, b, l.sharedOptions(b), at); differ != nil {
			return l.errorIn(differ)
		}
	}
	return nil
}

// chargeOptions say what requests are charged, which does not matter to a limit that charges
// none: it has its name to show what the others have left.
var chargeOptions = []string{"count", "clear", "actual_cost", "hold"}

// knows reports whether an option has its value already: while a Caddyfile is adapted, one with
// {env.*} and others has not.
func (l *LimitBuilder) knows(o option.Setting) bool {
	_, err := l.resolve(o.Option, o.Text)
	return !errors.Is(err, option.ErrUnresolved)
}

// disagreement returns the error for an option of a limit that differs from the same option of an earlier
// one, which is at a location.
func disagreement(path string, got, earlier option.Setting, at Location) *option.Error {
	other := strconv.Quote(option.Shortened(earlier.Text))
	if earlier.Option != got.Option {
		other = earlier.Option + " " + other
	}
	return option.Errorf(got.Option, "%q differs from %s in another limit named %q%s; use the same, or another name for one of them: limits of one name share their buckets",
		option.Shortened(got.Text), other, path, at(earlier.Option))
}

// asWritten returns an option of l's bucket b as the user wrote it: a size may have come from a
// rate.
func asWritten(l *config.Limit, b *rule.Bucket, o option.Setting) option.Setting {
	names := []string{o.Option}
	switch {
	case o.Option == "ban" && len(l.Ban) > 0:
		o.Text = l.BanText()
	case o.Option == "drip_rate" && b.Source.Option != "":
		return b.Source // max and duration, or min_interval
	case o.Option == "size":
		names = append(names, "rate", "max")
	case o.Option == "drip_rate", o.Option == "drip_size":
		names = append(names, "rate")
	}
	texts := config.OptionsOf[string](l)
	for _, name := range names {
		if text := texts[name]; text != nil && *text != "" && !option.HasPlaceholder(*text) {
			return option.Setting{Option: name, Text: *text}
		}
	}
	return o
}

// sharedOptions returns the options in which limits have to agree that have a bucket of the same
// path as b.
func (l *LimitBuilder) sharedOptions(b *rule.Bucket) []option.Setting {
	options := l.rule.Options
	return append([]option.Setting{
		{Option: "key", Text: l.rule.Key.String()},
		{Option: "ipv4_prefix", Text: fmt.Sprint(l.rule.Key.Prefixes.IPv4)},
		{Option: "ipv6_prefix", Text: fmt.Sprint(l.rule.Key.Prefixes.IPv6)},
		{Option: "algorithm", Text: string(l.rule.Algorithm)},
		{Option: b.Size.Option, Text: b.Size.String()},
		{Option: b.Rate.Option, Text: b.Rate.String()},
		{Option: b.Drip.Option, Text: b.Drip.String()},
		{Option: "factor", Text: b.Factor.String()},
		{Option: "window_start", Text: l.startOfWindows()},
		{Option: "period", Text: l.Period},
		{Option: "warm_up", Text: b.WarmUp.String()},
		{Option: "cold_factor", Text: b.Cold.String()},
	}, options.Settings()...)
}
