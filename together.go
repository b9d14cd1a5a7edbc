package ratelimit

import (
	"cmp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
)

// clash is an option that does not go with something else: another option, one of its values,
// or what stands beside the limit or within it.
type clash struct {
	option string // as it is called in a config
	with   string // what it does not go with, see draft.has
	want   string // what to write instead, and why
}

// clashes are all of them. They are looked for in this order.
var clashes = []clash{
	{"soft", "concurrency", "only concurrency, or a limit of its own for it"},
	{"count_denied", "concurrency", "none with concurrency, as denied requests are not in progress"},
	{"hold", "concurrency", "no concurrency with it, which counts what requests hold"},
	{"count", "concurrency", "no concurrency with it, which counts requests in progress whatever comes of them"},
	{"actual_cost", "concurrency", "no concurrency with it, which counts requests in progress whatever they cost"},

	{"cost", "concurrency auto", "none with concurrency auto, which counts requests"},
	{"factor", "concurrency auto", "none with concurrency auto, but another latency"},
	{"max_keys", "concurrency auto", "none with concurrency auto, which has room for 1000 keys"},
	{"when_full", "concurrency auto", "none with concurrency auto, where keys beyond 1000 share"},
	{"track_top", "concurrency auto", "none with concurrency auto; track those of a limit with a rate"},
	{"borrow", "concurrency auto", "none with concurrency auto, which has nothing to wait for in a pool"},
	{"pool", "concurrency auto", "none with concurrency auto, as nobody knows what is to spare; low and high say who comes first"},
	{"limit", "concurrency auto", "no limits within concurrency auto, put them beside it"},

	{"hold", "count_denied", "no count_denied with it, as denied requests cost nothing where nothing is held; ban keeps those out who go on asking"},

	{"max_delay", "count", "none with count or actual_cost"},
	{"max_delay", "actual_cost", "none with count or actual_cost"},

	{"ban", "concurrency", "no concurrency with it: who has too many requests in progress may go on when they end"},
	{"ban", "count_denied", "no count_denied with it, which keeps those out already who go on asking"},
	{"ban", "when_full share", "when_full forget with it, or whole networks would be banned"},

	{"borrow", "accounting in_order", "accounting atomic or each, as limits that are asked in order do not know what those behind them have"},
	{"borrow", "count_denied", "no count_denied with it, as only the pool knows what is denied"},
	{"borrow", "ban", "no ban with it, as only the pool knows what is denied; ban at another limit"},
	{"borrow", "max_delay", "no max_delay with it: a request either waits or borrows"},

	{"pool", "borrow", "no borrow with it: what is to spare stands in one pool"},
	{"pool", "limit", "no limits within it, put them beside it"},
	{"pool", "count_denied", "no count_denied with it, which counts only what is borrowed"},
	{"pool", "ban", "no ban with it, which denies nothing by itself"},
	{"pool", "soft", "no soft with it, but a larger size"},
	{"pool", "max_delay", "no max_delay with it: what it has no room for is denied"},
	{"pool", "min_interval", "no min_interval with it"},

	{"consistency", "concurrency", "exact, as requests in progress are counted by all instances together"},
	{"consistency", "count", "exact, as with count requests are charged by their responses"},
	{"consistency", "actual_cost", "exact, as with actual_cost requests are charged by their responses"},
	{"consistency", "ban", "exact, as a ban holds for all instances at once"},
	{"consistency", "borrow", "exact, as a pool has one level for all that borrow from it"},
	{"consistency", "pool", "exact, as a pool has one level for all that borrow from it"},
	{"consistency", "count_denied", "exact, as with count_denied each denial is counted"},
	{"consistency", "max_delay", "exact, as with max_delay requests of all instances wait in one order"},
}

// needBucket are the options that a limit can't have which only groups others.
var needBucket = []string{
	"drip_rate", "drip_size", "cost", "factor", "max_keys", "when_full", "track_top", "status", "soft", "max_delay", "max_waiting",
	"actual_cost", "hold", "count_denied", "count", "ban", "ban_after", "borrow", "pool", "algorithm",
}

// has reports whether d has what an option may clash with.
func (d *draft) has(with string) bool {
	switch with {
	case "limit":
		return len(d.Limits) > 0
	case "concurrency auto":
		return d.Concurrency == auto
	case "when_full share":
		return d.rule.ShareWhenFull
	case "accounting in_order":
		return d.accounting == rule.InOrder
	}
	return d.setting(with) != nil
}

// setting returns an option as the config has it, or nil if it is not set.
func (l *Limit) setting(name string) *option.Setting {
	var text string
	switch name {
	case "count":
		text = l.countText()
	case "ban":
		text = l.banText()
	case "limit":
		if len(l.Limits) > 0 && l.Limits[0] != nil {
			text = l.Limits[0].Name
		}
	default:
		return l.firstSet(name)
	}
	if text == "" {
		return nil
	}
	return &option.Setting{Option: name, Text: text}
}

// checkTogether returns an error if options of d don't go together. Those that make its
// bucket are checked by form.check, and consistency by setConsistency.
func (d *draft) checkTogether() error {
	for _, c := range clashes {
		if c.option == "consistency" || !d.has(c.with) || d.isGroup() {
			continue
		}
		if o := d.setting(c.option); o != nil {
			return option.Bad(o.Option, o.Text, c.want)
		}
	}
	return nil
}

// exactReason returns why Redis has to decide each request on d, as errors say it, or "".
func (d *draft) exactReason() (reason string) {
	for _, c := range clashes {
		if c.option == "consistency" && d.has(c.with) {
			reason = cmp.Or(reason, c.want)
		}
	}
	return reason
}
