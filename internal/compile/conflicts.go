package compile

import (
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
)

// conflict is an option that does not go with something else: another option, one of its values,
// or what is in the same block or within the limit.
type conflict struct {
	Option  string // as it is called in a config
	With    string // what it does not go with, see LimitBuilder.has
	Instead string // what to do about it, and why, as in option.Clash
}

// conflicts are all of them. They are looked for in this order.
var conflicts = []conflict{
	{"cost", inListener, "remove it: each connection counts once"},
	{"count", inListener, "use it in a limit of requests: connections have no responses"},
	{"clear", inListener, "use it in a limit of requests: connections have no responses"},
	{"actual_cost", inListener, "use it in a limit of requests: connections have no responses"},
	{"hold", inListener, "remove it: connections have no responses"},
	{"status", inListener, "remove it: a connection that is refused gets no response"},
	{"soft", inListener, "use a larger size: connections can't be marked"},
	{"speed", inListener, "use it in a limit of requests: responses are paced, not connections"},
	{"max_delay", inListener, "remove it: connections do not wait"},
	{"max_waiting", inListener, "remove it: connections do not wait"},
	{"fair_by", inListener, "remove it: connections do not wait"},
	{"borrow", inListener, "use a larger size"},
	{"pool", inListener, "remove it: limits of connections do not borrow"},
	{"consistency", inListener, "remove it: each instance counts its own connections"},

	{"soft", "concurrency", "use a limit of its own for it"},
	{"count_denied", "concurrency", "remove it: denied requests are not in progress"},
	{"hold", "concurrency", "remove it: requests in progress are held in any case"},
	{"count", "concurrency", "use a limit of its own for it: requests in progress count whatever their responses are"},
	{"clear", "concurrency", "use a limit of its own for it: requests in progress count until they end"},
	{"actual_cost", "concurrency", "use a limit of its own for it: requests in progress count whatever they cost"},

	{"cost", "concurrency auto", "remove it: each request counts once"},
	{"factor", "concurrency auto", "use another latency instead"},
	{"max_keys", "concurrency auto", "remove it: there is room for 1000 keys"},
	{"when_full", "concurrency auto", "remove it: keys beyond the first 1000 share"},
	{"track_top", "concurrency auto", "use it in a limit with a rate"},
	{"borrow", "concurrency auto", "remove it: no pool makes the upstream faster"},
	{"pool", "concurrency auto", "use high and low to say which requests come first: what is to spare is unknown"},
	{"limit", "concurrency auto", "put it beside this limit instead of within it"},

	{"cost", "speed", "remove it: a response costs its bytes"},
	{"count", "speed", "use match: responses are paced whatever they are"},
	{"clear", "speed", "use a limit of its own for it: a speed denies no request"},
	{"actual_cost", "speed", "use a limit of its own for it: a response costs its bytes"},
	{"count_denied", "speed", "use a limit of its own for it: a speed denies no request"},
	{"status", "speed", "remove it: a speed denies no request"},
	{"soft", "speed", "use a larger size instead"},
	{"max_delay", "speed", "use a limit of its own for it: a speed has responses wait, not requests"},
	{"ban", "speed", "use a limit of its own for it: a speed denies no request"},
	{"borrow", "speed", "remove it: responses wait for room"},
	{"pool", "speed", "use a second speed with key all, and fair_by"},

	{"count", "cost 0", "remove one of them: what costs 0 is charged nothing, whatever its response is"},
	{"clear", "cost 0", "remove one of them: what costs 0 fills nothing"},
	{"actual_cost", "cost 0", "remove cost, and use hold off to hold nothing: what costs 0 is charged nothing, whatever it has cost"},

	{"hold", "count_denied", "use ban instead of count_denied: denied requests cost nothing where nothing is held"},

	{"clear", "hold", "remove hold: a bucket is cleared by requests that hold units of it"},
	{"clear", "borrow", "use one of them: what was borrowed is in the pool, which others have filled too"},
	{"clear", "pool", "remove clear: others have filled the pool too"},

	{"max_delay", "count", "use a limit of its own for it"},
	{"max_delay", "clear", "use a limit of its own for it"},
	{"max_delay", "actual_cost", "use a limit of its own for it"},

	{"ban", "concurrency", "remove it: a client with too many requests in progress may go on when they end"},
	{"ban", "count_denied", "use one of them: either keeps out clients that keep sending"},
	{"ban", "when_full share", "use when_full forget: otherwise whole networks would be banned"},

	{"borrow", "count_denied", "remove count_denied: only the pool knows what is denied"},
	{"borrow", "ban", "use ban in another limit: only the pool knows what is denied"},
	{"borrow", "max_delay", "use one of them: a request either waits or borrows"},

	{"pool", "borrow", "remove borrow: a pool can't borrow from another"},
	{"pool", "limit", "put the limits beside it instead of within it"},
	{"pool", "count_denied", "remove count_denied: it would count only what is borrowed"},
	{"pool", "ban", "use ban in another limit: a pool denies nothing by itself"},
	{"pool", "soft", "use a larger size instead of soft"},
	{"pool", "max_delay", "remove max_delay: what a pool has no room for is denied"},
	{"pool", "min_interval", "remove min_interval"},

	{"consistency", "concurrency", "use exact: requests in progress are counted by all instances together"},
	{"consistency", "count", "use exact: requests are charged by their responses"},
	{"consistency", "clear", "use exact: a bucket that is cleared is empty for all instances at once"},
	{"consistency", "actual_cost", "use exact: requests are charged by their responses"},
	{"consistency", "ban", "use exact: a ban holds for all instances at once"},
	{"consistency", "borrow", "use exact: a pool has one level for all that borrow from it"},
	{"consistency", "pool", "use exact: a pool has one level for all that borrow from it"},
	{"consistency", "count_denied", "use exact: each denial is counted"},
	{"consistency", "max_delay", "use exact: requests of all instances wait in one order"},
	{"consistency", "speed", "use exact: each process counts its own bytes"},
}

// has reports whether l has what an option may conflict with.
func (l *LimitBuilder) has(with string) bool {
	switch with {
	case "limit":
		return !l.Limits.IsZero()
	case "concurrency auto":
		return l.Concurrency == config.ConcurrencyAuto
	case "cost 0":
		cost, err := l.resolve("cost", string(l.Cost))
		units, use := option.Cost(cost)
		return err == nil && use == "" && units == 0
	case inListener:
		return l.connections
	case "when_full share":
		return l.rule.ShareWhenFull
	}
	return l.Setting(with) != nil
}

// checkTogether returns an error if options of l don't go together. Those that make its
// bucket are checked by shape.check, and consistency by setConsistency.
func (l *LimitBuilder) checkTogether() error {
	for _, c := range conflicts {
		if c.Option == "consistency" || !l.has(c.With) || l.IsGroup() {
			continue
		}
		if o := l.Setting(c.Option); o != nil {
			return option.Clash(o.Option, o.Text, c.With, c.Instead)
		}
	}
	return nil
}

// mustBeExact returns the first reason why Redis has to decide each request on l, or nil.
func (l *LimitBuilder) mustBeExact() *conflict {
	for i, c := range conflicts {
		if c.Option == "consistency" && l.has(c.With) {
			return &conflicts[i]
		}
	}
	return nil
}
