package advice

import (
	"fmt"
	"slices"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/placeholder"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/faults"
)

// fewForAll is a number of connections that all clients together easily have, or open at once.
const fewForAll = 500

// connections advises on limits of connections.
func (c *collector) connections(l *rule.Listener) {
	c.proxies(l)
	for b := range rule.Buckets(l.Limits) {
		if b.Off || b.Limit.DryRun {
			continue
		}
		size, _, _ := b.EffectiveSize(nil) // it is complete
		switch k := b.Limit.Key; {
		case k.Has(placeholder.ClientIP):
			if k.Prefixes.IPv6 > 64 {
				c.limit(b.Path, advise(AddressMany,
					fmt.Sprintf("With ipv6_prefix %d a host has many buckets: it may use any address of its /64.", k.Prefixes.IPv6),
					"Remove ipv6_prefix, for /64."))
			}
		case size < fewForAll:
			c.limit(b.Path, advise(ConnectionsOfAll,
				fmt.Sprintf("It has one bucket for all, with room for %d connections: one client that fills it keeps everybody out.", size),
				"Use the key {client_ip}, or a number far above what all clients together have."))
		}
		for _, p := range b.Limit.Key.Parts {
			if p.Placeholder {
				continue
			}
			for _, a := range onConstant(p.Text) {
				a.Remedy = "Write {client_ip} for a bucket for each address, or, if one for all is meant, all."
				c.limit(b.Path, a)
			}
		}
		if b.Limit.Bans != nil && l.Accounting == rule.Atomic {
			c.attempts(b, l)
		}
	}
}

// proxies advises on limits that take a proxy for its clients.
func (c *collector) proxies(l *rule.Listener) {
	all := func(b rule.LocatedBucket) bool {
		return alwaysMet(b) && !b.Off && !b.Limit.DryRun && b.Limit.Key.Has(placeholder.ClientIP)
	}
	server := c.HTTP.Servers[l.Server]
	if server == nil || !slices.ContainsFunc(slices.Collect(rule.Buckets(l.Limits)), all) {
		return
	}
	const shared = "the address of a connection is the proxy's, and all its clients share one bucket."
	switch at := slices.Index(l.Wrappers, "proxy_protocol"); {
	case at > l.Index:
		c.server(l.Server, advise(ConnectionsProxy, "In listener_wrappers, rate_limit comes before proxy_protocol: "+shared,
			"Put rate_limit between proxy_protocol and tls, or leave out the proxies by match not remote_ip."))
	case at >= 0:
	case faults.TrustsProxies(server):
		c.server(l.Server, advise(ConnectionsProxy, "It has trusted_proxies, and no proxy_protocol before rate_limit in listener_wrappers: "+shared,
			"Leave out the proxies by match not remote_ip, or have them send the PROXY protocol, and put proxy_protocol before rate_limit."))
	case onlyLocal(server):
		c.server(l.Server, advise(ProxyUntrusted, "It only listens on this host, and limits connections: if a proxy passes requests on to it, "+shared,
			"Limit connections at the proxy, or have it send the PROXY protocol, and put proxy_protocol before rate_limit."))
	}
}

// attempts advises on a ban for connections, where those count that its own limit refuses, and no others.
func (c *collector) attempts(b rule.LocatedBucket, l *rule.Listener) {
	for other := range rule.Buckets(l.Limits) {
		if other.Limit != b.Limit && !other.Off && !other.Limit.DryRun {
			c.limit(b.Path, advise(AttemptsUncounted,
				"Attempts that the limit "+other.Path+" refuses do not count for its ban: with accounting atomic, they are charged nowhere.",
				"Write accounting each beside the limits."))
			return
		}
	}
}
