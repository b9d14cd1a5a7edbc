package ratelimit

import (
	"cmp"
	"fmt"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

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
