package advice

import (
	"fmt"
	"slices"
	"sort"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/key"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/placeholder"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/routes"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/faults"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// keys advises on keys that may well be meant: those that clients choose, those that all clients
// share, and those that are empty unless something authenticates clients.
func (c *collector) keys(h *rule.Handler, around *routes.Around) {
	for b := range rule.Buckets(h.Limits) {
		if b.Off {
			continue
		}
		k := b.Limit.Key
		c.chosen(b, k, around)
		if len(k.Names()) == 0 && b.Limit.Bans != nil {
			c.limit(b.Path, advise(BanOfAll,
				"It bans its key, which all requests share: one client that is denied locks everyone out.",
				"Use a key that distinguishes clients, such as {client_ip}, or no ban."))
		}
		server := c.HTTP.Servers[around.Server()]
		if server == nil || !faults.TrustsProxies(server) {
			continue
		}
		if k.Has(placeholder.RemoteHost) {
			c.limit(b.Path, advise(KeyOfProxy,
				"Its key is the address of the connection, and the server has trusted proxies: all clients behind a proxy share one bucket.",
				"Use {client_ip}, which is the address that the proxy reports."))
		}
		if exemptsConnections(b, around) {
			c.limit(b.Path, advise(ProxyExempted,
				"A matcher with not remote_ip exempts requests by the address of the connection, and the server has trusted proxies: if the matcher contains their addresses, no client is limited.",
				"Use not client_ip, which is the address that the proxy reports."))
		}
	}
}

// chosen advises on a key that clients choose, or that is empty without authentication.
func (c *collector) chosen(b rule.LocatedBucket, k *key.Key, around *routes.Around) {
	flawed := func(name string) bool { return name == "" || c.flawed[[2]string{b.Path, name}] }
	if name := k.User(); !flawed(name) && around.Authentication() == "" && !around.Plugins() && !around.Sets(name) {
		c.limit(b.Path, advise(KeyWithoutUser,
			"Its key has {"+name+"}, and no authentication comes before it, so it is empty.",
			"Put both in a route block, with the authentication first."))
	}
	name, source := Chosen(k, around)
	if flawed(name) || c.bounded(around) {
		return
	}
	problem := "which clients can set to anything"
	if source != name {
		problem = "which is made from {" + source + "}, " + problem
	}
	c.limit(b.Path, advise(KeyChosen,
		"Its key has {"+name+"}, "+problem+", so they can get a fresh bucket for each request.",
		"Use a key that they can't choose, such as {client_ip} or, behind authentication, {http.auth.user.id}, or add a limit by {client_ip} to the block, with a rate that several honest clients share."))
}

// bounded reports whether requests always meet a limit whose key and numbers clients can't choose.
func (c *collector) bounded(around *routes.Around) bool {
	return slices.ContainsFunc(c.order, func(m rule.Module) bool {
		other := c.around[m]
		if !around.Shares(other) {
			return false
		}
		for b := range rule.Buckets(m.Compiled().Limits) {
			if !b.Off && !b.Free() && alwaysMet(b) && Bounds(b.Limit.Key, other) && !NumbersChosen(b.Bucket, other) {
				return true
			}
		}
		return false
	})
}

// exemptsConnections reports whether a limit, or the routes to it, leave out requests by
// remote_ip.
func exemptsConnections(b rule.LocatedBucket, around *routes.Around) bool {
	return slices.ContainsFunc(slices.Concat(setsOf(b, around)...), func(m any) bool {
		not, ok := m.(*caddyhttp.MatchNot)
		return ok && slices.ContainsFunc(slices.Concat(not.MatcherSets...), func(m any) bool {
			_, ok := m.(*caddyhttp.MatchRemoteIP)
			return ok
		})
	})
}

// setsOf returns the matchers of a limit, and of the limits and routes around it.
func setsOf(b rule.LocatedBucket, around *routes.Around) caddyhttp.MatcherSets {
	sets := slices.Clone(b.Limit.Matchers)
	for _, outer := range b.Around {
		sets = append(sets, outer.Matchers...)
	}
	for _, rt := range around.Routes() {
		sets = append(sets, rt.MatcherSets...)
	}
	return sets
}

// numbers advises on numbers that may well be meant.
func (c *collector) numbers(h *rule.Handler, around *routes.Around) {
	for b := range rule.Buckets(h.Limits) {
		if b.Off {
			continue
		}
		if b.Consistency != (limiter.Consistency{}) && !c.Redis {
			c.limit(b.Path, advise(ConsistencyUnused,
				"Its consistency, "+b.Consistency.String()+", has no effect without redis: this process decides all requests, exactly.",
				"Remove it, or set redis in the global option."))
		}
		if deniesTwoAtOnce(b.Bucket) && alwaysMet(b) && !around.Selects() {
			c.limit(b.Path, advise(OneAtOnce,
				"It applies to all requests of the site, and its bucket holds a single one: browsers send several at once, for a page with its images and scripts, and all except the first are denied.",
				"Give it a size as large as the number of requests for a page, in place of a min_interval, or a matcher for the requests that it should limit."))
		}
		if longer := longerDelay(b.Bucket); longer > 0 {
			c.limit(b.Path, advise(DelayUnused,
				fmt.Sprintf("Its max_delay, %v, is slightly too short for one more request to wait.", b.Limit.MaxDelay),
				fmt.Sprintf("Write max_delay %v, unless this is intentional.", longer)))
		}
	}
}

// longerDelay returns a max_delay of whole milliseconds with which more requests to b would wait, and
// which is longer than its own by little: 1 %, and a tenth of the time that another request takes. It is
// 0 if there is none.
func longerDelay(b *rule.Bucket) time.Duration {
	l := b.Limit
	if !b.IsMain() || b.Constant == nil || l.MaxDelay == 0 {
		return 0
	}
	numbers, cost := bucket.Limit(b.Constant.Limit), b.UsualCost()
	numbers.Size += l.Soft
	delay := time.Duration(l.MaxDelay)
	waiting := numbers.Delayed(delay, cost)
	first := delay.Milliseconds() + 1
	most := (delay + min(delay/100, numbers.DripTime(cost)/10)).Milliseconds()
	n := int(most - first + 1)
	if waiting == 0 || n < 1 {
		return 0
	}
	longer := func(i int) time.Duration { return time.Duration(first+int64(i)) * time.Millisecond }
	more := sort.Search(n, func(i int) bool { return numbers.Delayed(longer(i), cost) > waiting })
	if more == n {
		return 0
	}
	return longer(more)
}

// deniesTwoAtOnce reports whether of two simultaneous requests one is denied at once.
func deniesTwoAtOnce(b *rule.Bucket) bool {
	l := b.Limit
	if b.SizeIsDynamic() || b.Free() || l.Soft > 0 || l.MaxDelay > 0 || l.Settlement.HoldOff || l.DryRun || l.Lender != nil {
		return false
	}
	size, _, _ := b.EffectiveSize(nil) // it is complete
	return size == 1
}

// unavailable advises on handlers that deny all requests while Redis does.
func (c *collector) unavailable(h *rule.Handler, around *routes.Around) {
	if c.Redis && h.OnError == rule.OnErrorDeny {
		c.server(around.Server(), advise(Unavailable,
			"With on_error deny, clients get status 503 for every limited request while Redis is unavailable.",
			"Unless this is intentional, use on_error fallback: each Caddy instance then limits separately until Redis is back."))
	}
}
