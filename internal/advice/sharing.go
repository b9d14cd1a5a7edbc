package advice

import (
	"fmt"
	"slices"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/routes"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
)

// Limits may share buckets, or be charged twice, though that is hardly meant. Limits that users
// gave one name share their buckets on purpose.
const (
	unnamed       = "Several limits without a name, or nested in one without a name, have equal keys and numbers, so they share their buckets: requests to one site or path use up the limit of another."
	unnamedRemedy = "Unless this is intentional, give each a name."
	twice         = "Some requests pass it twice, in blocks that share its buckets, so each of them is charged twice."
	twiceRemedy   = "Remove one, or give them different names."
)

// sharing advises on limits that share buckets, in the order of the config.
func (c *collector) sharing() {
	earlier := make(map[string][]shared) // by the name of the bucket in stores
	c.each(func(h *rule.Handler, around *routes.Around) {
		for b := range rule.Buckets(h.Limits) {
			if b.Off || b.Limit.Pool { // a pool is charged for those that borrow alone
				continue
			}
			if b.Unnamed() && len(earlier[b.Name]) > 0 {
				c.limit(b.Path, Advice{Kind: Unnamed, Problem: unnamed, Remedy: unnamedRemedy})
			}
			earlier[b.Name] = append(earlier[b.Name], shared{b, around})
		}
	})
	c.each(func(h *rule.Handler, around *routes.Around) {
		for b := range rule.Buckets(h.Limits) {
			for _, first := range earlier[b.Name] {
				if !b.Unnamed() && around.After(first.around) && alwaysMet(first.LocatedBucket) && first.costs(b) {
					c.limit(b.Path, Advice{Kind: ChargedTwice, Problem: twice, Remedy: twiceRemedy})
				}
			}
		}
	})
}

// shared is a bucket of a handler.
type shared struct {
	rule.LocatedBucket
	around *routes.Around
}

// alwaysMet reports whether all requests that reach the handler meet a limit.
func alwaysMet(b rule.LocatedBucket) bool {
	return !slices.ContainsFunc(append(slices.Clip(b.Around), b.Limit), func(l *rule.Limit) bool { return len(l.Matchers) > 0 })
}

// costs reports whether p charges a request as b does. Blocks of one name that charge
// differently may well both be meant, as for a path that costs more.
func (p shared) costs(b rule.LocatedBucket) bool {
	return p.Cost.String() == b.Cost.String() && p.CostIsBody == b.CostIsBody
}

// sites advises on limits in blocks without a name that share buckets with those of another site: a
// block of one name on each says that it is meant. Zones share theirs wherever they are, as in
// mholt/caddy-ratelimit.
func (c *collector) sites() {
	earlier := make(map[string][][]string) // by the path, the hosts of sites that have the limit
	c.each(func(h *rule.Handler, around *routes.Around) {
		hosts := around.Hosts()
		if slices.Contains(h.IgnoredAdvice, SharedBySites.String()) {
			return // whichever of the blocks says that it is meant
		}
		for b := range rule.Buckets(h.Limits) {
			if b.Off || b.Limit.Zone != nil || len(hosts) == 0 || !bareName(b) || b.Limit.Key.Has("http.request.host") {
				continue
			}
			for _, others := range earlier[b.Path] {
				if !slices.ContainsFunc(hosts, func(host string) bool { return slices.Contains(others, host) }) {
					c.limit(b.Path, advise(SharedBySites,
						fmt.Sprintf("Its block has no name, and neither does one on another site, %s, with a limit of this name: both sites share its buckets.", others[0]),
						"Give each block a name, as in rate_limit shop { ... }, or give both the same name if this is intentional."))
					break
				}
			}
			earlier[b.Path] = append(earlier[b.Path], hosts)
		}
	})
}

// bareName reports whether the name of a limit is all that its path has, in a block without a name.
func bareName(b rule.LocatedBucket) bool {
	return b.Limit.Named && len(b.Around) > 0 && !slices.ContainsFunc(b.Around, func(l *rule.Limit) bool { return l.Path != "" })
}
