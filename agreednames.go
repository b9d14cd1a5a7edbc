package ratelimit

import (
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
)

// agreedNames are the limits that users named, by their paths: those of one path share their
// buckets, so their options must agree.
type agreedNames map[string]*agreedName

// agreedName is what all limits of one path have in common.
type agreedName struct {
	options []option.Setting
	first   *Limit // of them
	bucket  *rule.Bucket
	place   location
}

// add adds a bucket of d, which is at a place. It returns the first one of its path, which may
// be this, and an error if their options differ.
func (all agreedNames) add(d *draft, b *rule.Bucket, at location) (first *agreedName, differ *option.Error) {
	options := d.sharedOptions(b)
	first = all[b.Path]
	if first == nil {
		first = &agreedName{options, d.Limit, b, at}
		all[b.Path] = first
	}
	for i, o := range options {
		switch earlier := first.options[i]; {
		case o == earlier || !d.knows(o) || !d.knows(earlier):
		case b.Free() != first.bucket.Free() && slices.Contains(chargeOptions, o.Option):
		default:
			return first, disagreement(b.Path, written(d.Limit, b, o), written(first.first, first.bucket, earlier), first.place)
		}
	}
	if first.bucket.Free() && !b.Free() { // it has more to agree with
		b.Policy = first.bucket.Policy
		*first = agreedName{options, d.Limit, b, at}
	}
	return first, nil
}

// chargeOptions say what requests are charged, which does not matter to a limit that charges
// none: it has its name to show what the others have left.
var chargeOptions = []string{"count", "actual_cost", "hold"}

// knows reports whether an option has its value already: while a Caddyfile is adapted, one with
// {env.*} and others has not.
func (c *compiler) knows(o option.Setting) bool {
	_, err := c.resolve(o.Option, o.Text)
	return !errors.Is(err, option.ErrUnresolved)
}

// disagreement returns the error for an option of a limit that differs from that of an earlier
// one, which is at a place.
func disagreement(path string, got, earlier option.Setting, at location) *option.Error {
	other := strconv.Quote(option.Shortened(earlier.Text))
	if earlier.Option != got.Option {
		other = earlier.Option + " " + other
	}
	return option.Errorf(got.Option, "%q differs from %s in another limit named %q%s; use the same, or another name for one of them: limits of one name share their buckets",
		option.Shortened(got.Text), other, path, at(earlier.Option))
}

// written returns an option of l's bucket b as the user wrote it: a size may have come from a
// rate.
func written(l *Limit, b *rule.Bucket, o option.Setting) option.Setting {
	names := []string{o.Option}
	switch {
	case o.Option == "ban" && len(l.Ban) > 0:
		o.Text = l.banText()
	case o.Option == "drip_rate" && b.Source.Option != "":
		return b.Source // max and duration, or min_interval
	case o.Option == "size":
		names = append(names, "rate", "max")
	case o.Option == "drip_rate", o.Option == "drip_size":
		names = append(names, "rate")
	}
	for _, name := range names {
		if text := optionsOf[string](l)[name]; text != nil && *text != "" && !option.HasPlaceholder(*text) {
			return option.Setting{Option: name, Text: *text}
		}
	}
	return o
}

// sharedOptions returns the options in which limits have to agree that have a bucket of the same
// path as b.
func (d *draft) sharedOptions(b *rule.Bucket) []option.Setting {
	l := d.rule
	return append([]option.Setting{
		{Option: "key", Text: l.Key.String()},
		{Option: "ipv4_prefix", Text: fmt.Sprint(l.Key.Prefixes.IPv4)},
		{Option: "ipv6_prefix", Text: fmt.Sprint(l.Key.Prefixes.IPv6)},
		{Option: "algorithm", Text: string(l.Algorithm)},
		{Option: b.Size.Option, Text: b.Size.String()},
		{Option: b.Rate.Option, Text: b.Rate.String()},
		{Option: b.Drip.Option, Text: b.Drip.String()},
		{Option: "factor", Text: b.Factor.String()},
		{Option: "window_start", Text: d.startOfWindows()},
		{Option: "period", Text: d.Period},
		{Option: "warm_up", Text: b.WarmUp.String()},
		{Option: "cold_factor", Text: b.Cold.String()},
	}, l.Settings()...)
}
