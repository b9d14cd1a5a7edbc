package adminapi

import (
	"cmp"
	"net/http"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/adaptive"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/admin/adminjson"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/routes"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// status answers with the state of the store and the counts of the limits.
func (s server) status(w http.ResponseWriter, _ *http.Request) error {
	return writeAnswer(w, s.newest().status(s.counted), "", nil)
}

// limits answers with all limits.
func (s server) limits(w http.ResponseWriter, _ *http.Request) error {
	return writeAnswer(w, adminjson.Limits{Limits: s.newest().limits(s.counted)}, "", nil)
}

// status returns the state of the store and the counts of the limits.
func (c *Config) status(counted *telemetry.Process) adminjson.Status {
	now := time.Now()
	status := adminjson.Status{
		Version: telemetry.Version(), Servers: []adminjson.Server{}, Limits: []adminjson.Counts{},
		Requests: make(map[string]uint64),
	}
	for what, n := range counted.Requests() {
		status.Requests[what.String()] = n
	}
	if c == nil {
		return status
	}
	status.Configured, status.Store, status.OnError = true, "memory", string(c.OnError)
	status.Memory = &adminjson.Memory{Buckets: c.Memory.Len(), MaxKeys: c.MaxKeys}
	if !c.Saved.IsZero() {
		age := option.Seconds(now.Sub(c.Saved))
		status.Memory.SavedAgo = &age
	}
	if c.Redis != nil {
		status.Store = "redis"
		for _, s := range counted.ServerStats(c.Redis) {
			status.Servers = append(status.Servers, newServer(&s, now))
		}
	}
	var counters []*telemetry.Counters // of each path, once
	seen := make(map[string]bool)
	for l := range c.buckets() {
		if !seen[l.Path] {
			seen[l.Path] = true
			counters = append(counters, l.Policy.Counters)
			if load := l.Limit.Load; load != nil {
				status.Load = append(status.Load, newLoad(l.Path, load.Controllers, now))
			}
			if waiting := l.WaitingState(); waiting != nil {
				if now := waiting(); now.Requests > 0 {
					status.Waiting = append(status.Waiting, adminjson.Waiting{Path: l.Path, Requests: now.Requests, Clients: now.Clients, Longest: now.Longest})
				}
			}
		}
	}
	counts, over := counted.Counts(counters)
	for i := range counts {
		status.Limits = append(status.Limits, newCounts(&counts[i]))
	}
	status.RatesOver = option.Seconds(over)
	return status
}

// newCounts returns the answer for what limits of a path have counted.
func newCounts(c *telemetry.Counts) adminjson.Counts {
	answer := adminjson.Counts{
		Path: c.Path, Results: newResults(c), Near: c.Of(telemetry.Near), Units: c.Tallies[telemetry.Units], By: make(map[string]uint64), Rates: c.Rates,
	}
	for by, n := range c.All() {
		answer.By[limiter.Decider(by).String()] = n
	}
	return answer
}

// newResults returns how many requests were admitted and denied and, of limits with certain
// options, what else is counted.
func newResults(c *telemetry.Counts) adminjson.Results {
	s, more := c.Summary(), adminjson.PolicyCounts{}
	if c.Policies.Has(telemetry.DryRun) {
		more.WouldDeny = new(c.Of(telemetry.WouldDeny))
	}
	for what, shown := range map[telemetry.Tally]**uint64{
		telemetry.OverSize: &more.OverSize, telemetry.Delayed: &more.Delayed, telemetry.Displaced: &more.Displaced,
		telemetry.BansBegun: &more.Bans, telemetry.Borrowed: &more.Borrowed,
	} {
		if what.Has(c.Policies) {
			*shown = &c.Tallies[what]
		}
	}
	return adminjson.Results{Admitted: s.Admitted, Denied: s.Denied, Spared: s.Spared, PolicyCounts: more}
}

// newServer returns the answer for a Redis server.
func newServer(s *limiter.ServerStats, now time.Time) adminjson.Server {
	answer := adminjson.Server{
		Address: s.Address, State: s.State, Breaker: s.Breaker, Reason: s.Reason,
		Connections: map[string]int{"idle": s.Idle, "in_use": s.InUse, "connecting": s.Connecting},
		Calls:       s.Calls, Requests: s.Requests, Failures: s.Failures,
	}
	if answer.Failures == nil {
		answer.Failures = map[string]uint64{}
	}
	if !s.DownSince.IsZero() {
		down := option.Seconds(now.Sub(s.DownSince))
		answer.Down = &down
	}
	return answer
}

// newLoad returns the answer for a limit that follows the load.
func newLoad(path string, c *adaptive.Controllers, now time.Time) adminjson.Load {
	s := c.State(now)
	answer := adminjson.Load{
		Path: path, Keys: s.Keys, Limit: s.Limit, InProgress: s.InProgress, Oldest: option.Seconds(s.Oldest), Mean: option.Seconds(s.Mean),
		Latency: option.Seconds(c.Options.Latency), State: s.Verdict.String(), Shed: make(map[string]uint64), AtMin: option.Seconds(s.AtMin),
		Routes: s.Routes, Uncounted: map[string]int{"overdue": s.Overdue, "body": s.Waiting},
	}
	for class, n := range s.Shed {
		answer.Shed[adaptive.Class(class).String()] = n // there are few
	}
	return answer
}

// limits returns what there is to say of all limits.
func (c *Config) limits(counted *telemetry.Process) []adminjson.Limit {
	limits := []adminjson.Limit{}
	if c == nil {
		return limits
	}
	_, around := routes.Arounds[rule.Module](c.HTTP)
	held := make(map[string]int)
	for _, usage := range c.Memory.Usage() {
		held[usage.Name] += usage.Buckets
	}
	for _, b := range c.numbered() {
		answer := b.answer(c.MaxKeys)
		answer.Scope = b.scope(around)
		answer.Buckets = held[b.Name] + held[b.AddressName]
		counts := counted.Results(b.Policy.Counters)
		answer.Results = newResults(&counts)
		limits = append(limits, answer)
	}
	return limits
}

// answer returns what b's config says of it, given the maximum number of buckets of all limits.
func (b bucket) answer(maxKeys int) adminjson.Limit {
	l, handler := b.Limit, b.handler
	answer := adminjson.Limit{
		Numbers: Numbers(b.Bucket),
		Path:    b.Path, Name: b.title, Handler: b.index, Off: b.Off, Cost: shownCost(b.Bucket),
		Key: l.Key.String(), IPv4Prefix: l.Key.Prefixes.IPv4, IPv6Prefix: l.Key.Prefixes.IPv6,
		MaxKeys: l.MaxKeysOf(maxKeys), WhenFull: l.WhenFull(), TrackTop: l.TrackTop,
		Accounting: string(handler.Accounting), OnError: string(handler.OnError), Connections: l.Connections,
	}
	for _, outer := range b.Around {
		answer.Parent = cmp.Or(outer.Path, answer.Parent)
	}
	return answer
}

// scope returns which requests or connections b's limit applies to, given the positions of handlers.
func (b bucket) scope(around map[rule.Module]*routes.Around) adminjson.Scope {
	site := routes.Site{Server: b.server}
	if b.module != nil {
		site = around[b.module].Site()
	}
	scope := adminjson.Scope{Server: site.Server, Hosts: site.Hosts, Match: b.Limit.Match, RouteMatches: site.Matches}
	for _, outer := range b.Around {
		if outer.Match != nil {
			scope.ParentMatches = append(scope.ParentMatches, outer.Match)
		}
	}
	return scope
}

// scopes returns the scopes of all limits that share a list of bans.
func (c *Config) scopes(bans *rule.BanList) (scopes []adminjson.Scope) {
	_, around := routes.Arounds[rule.Module](c.HTTP)
	for _, b := range c.numbered() {
		if b.IsMain() && b.Limit.Bans != nil && b.Limit.Bans.List == bans {
			scopes = append(scopes, b.scope(around))
		}
	}
	return scopes
}
