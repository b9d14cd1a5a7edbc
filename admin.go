package ratelimit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/adminapi"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/clientip"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/keytext"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/toplist"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// adminAPI adds endpoints to Caddy's admin API that show what rate limits do, and
// empty buckets:
//
// Endpoint | Description
// ---------|------------
// `GET /rate_limit/status` | The store, the state of each Redis server, and the counts and rates of each limit
// `GET /rate_limit/limits` | Every limit of the running config, with its numbers, key and matchers
// `POST /rate_limit/peek` | What is in the bucket of `{"limit": "api", "key": "203.0.113.7"}`; charges nothing
// `POST /rate_limit/reset` | Empties that bucket, on all Caddy instances, and says what was in it; while Redis does not answer, in this process alone
// `POST /rate_limit/ban` | Bans the key of `{"limit": "login", "key": "203.0.113.7", "duration": "1h"}`, on all Caddy instances, at a limit with `ban`
// `POST /rate_limit/unban` | Ends the ban of `{"limit": "login", "key": "203.0.113.7"}`, on all Caddy instances
// `GET /rate_limit/bans` | The bans that this Caddy has begun or met, of all limits or of that of `?limit=login`
// `GET /rate_limit/top` | The keys that ask most, or are denied most, at a limit with `track_top`
//
// Without a limit, peek and reset are about all limits whose keys can be made from what
// is given: `{"address": "203.0.113.7"}`, `{"key": "acme"}`, or both.
//
// Caddy logs the URLs of admin requests, so keys are only sent in bodies.
type adminAPI struct{}

// CaddyModule returns the Caddy module information.
func (*adminAPI) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  caddy.ModuleID("admin.api." + ownName),
		New: func() caddy.Module { return new(adminAPI) },
	}
}

// Provision registers the metrics, so that the admin endpoint keeps them if the
// config is rejected. It sets up nothing else: Caddy makes several instances of the
// API, also for such configs.
func (*adminAPI) Provision(ctx caddy.Context) error {
	return process.Register(ctx.GetMetricsRegistry())
}

// Routes implements caddy.AdminRouter.
func (*adminAPI) Routes() []caddy.AdminRoute {
	return adminapi.Routes(adminPrefix(), func() adminapi.Source { return source{newestApp()} })
}

// adminPrefix is what the paths of the API begin with.
func adminPrefix() string { return "/" + ownName + "/" }

// source is the newest running app with limits; the zero source is that there is none.
type source struct{ *App }

// Status implements adminapi.Source. It returns the state of the store and the counts of the limits.
func (s source) Status() adminapi.Status {
	now := time.Now()
	status := adminapi.Status{
		Version: adminapi.Version(), Servers: []adminapi.Server{}, Limits: []adminapi.Counts{},
		Requests: make(map[string]uint64),
	}
	for what, n := range process.Requests() {
		status.Requests[what.String()] = n
	}
	app := s.App
	if app == nil {
		return status
	}
	status.Configured, status.Store, status.OnError = true, "memory", string(app.onError)
	status.Memory = &adminapi.Memory{Buckets: app.memory.Len(), MaxKeys: app.maxKeys}
	if app.redis != nil {
		status.Store = "redis"
		for _, s := range app.redis.Stats() {
			status.Servers = append(status.Servers, serverAnswerOf(&s, now))
		}
	}
	var counters []*telemetry.Counters // of each path, once
	seen := make(map[string]bool)
	for l := range app.limits() {
		if !seen[l.path] {
			seen[l.path] = true
			counters = append(counters, l.policy.counters)
		}
	}
	var over time.Duration
	status.Limits, over = process.Counts(counters)
	status.RatesOver = adminapi.Seconds(over)
	return status
}

// serverAnswerOf returns the answer for a Redis server.
func serverAnswerOf(s *limiter.ServerStats, now time.Time) adminapi.Server {
	answer := adminapi.Server{
		Address: s.Address, Breaker: s.Breaker, Up: s.Up, Reason: s.Reason,
		Connections: map[string]int{"idle": s.Idle, "in_use": s.InUse, "connecting": s.Connecting},
		Calls:       s.Calls, Requests: s.Requests, Failures: s.Failures,
	}
	if answer.Failures == nil {
		answer.Failures = map[string]uint64{}
	}
	if !s.DownSince.IsZero() {
		down := adminapi.Seconds(now.Sub(s.DownSince))
		answer.Down = &down
	}
	return answer
}

// Limits implements adminapi.Source.
func (s source) Limits() []adminapi.Limit {
	limits, app := []adminapi.Limit{}, s.App
	if app == nil {
		return limits
	}
	stand := app.sites()
	held := make(map[string]int)
	for _, usage := range app.memory.Limits() {
		held[usage.Name] += usage.Buckets
	}
	for _, l := range app.numbered() {
		at := stand[l.handler]
		a := l.answer(app.maxKeys)
		a.Server, a.Hosts, a.RouteMatches = at.server, at.hosts, at.matches
		a.Buckets = held[l.name] + held[l.addressName]
		limits = append(limits, a)
	}
	return limits
}

// sites returns where the handlers of a running app stand.
func (a *App) sites() map[*Handler]site {
	http, err := a.ctx.AppIfConfigured("http")
	if err != nil {
		return nil
	}
	return sitesOf(http.(*caddyhttp.App))
}

// placedBucket is a bucket and where it stands in the config.
type placedBucket struct {
	*bucket
	handler      *Handler
	handlerIndex int
	title        string   // the name by which header fields list it; set by numbered
	around       []*Limit // the outermost first
}

// unnamed reports whether the limit of b or one around it has no name, so that nobody
// has named what its buckets are shared by. A group without buckets needs none.
func (b placedBucket) unnamed() bool {
	return b.limit.Name == "" || slices.ContainsFunc(b.around, func(l *Limit) bool { return l.Name == "" && len(l.buckets) > 0 })
}

// limits returns a sequence of all buckets of a running app.
func (a *App) limits() func(func(placedBucket) bool) {
	return func(yield func(placedBucket) bool) {
		for i, h := range a.handlers {
			if !eachBucket(h.Limits, placedBucket{handler: h, handlerIndex: i}, yield) {
				return
			}
		}
	}
}

// eachBucket yields the buckets of limits and those within them, until yield returns
// false.
func eachBucket(limits []*Limit, at placedBucket, yield func(placedBucket) bool) bool {
	for _, l := range limits {
		for _, at.bucket = range l.buckets {
			if !yield(at) {
				return false
			}
		}
		inner := at
		inner.around = append(slices.Clip(at.around), l)
		if !eachBucket(l.Limits, inner, yield) {
			return false
		}
	}
	return true
}

// answer returns the answer for b, given the maximum number of buckets of all limits.
func (b placedBucket) answer(maxKeys int) adminapi.Limit {
	l := b.limit
	answer := adminapi.Limit{
		Numbers: b.shown(),
		Path:    b.path, Name: b.title, Handler: b.handlerIndex, Off: b.off, Cost: b.shownCost(),
		Key: l.key.String(), IPv4Prefix: l.key.prefixes.IPv4, IPv6Prefix: l.key.prefixes.IPv6,
		Match:   l.matchersRaw,
		MaxKeys: l.maxKeysOf(maxKeys), WhenFull: cmp.Or(l.WhenFull, whenFullForget), TrackTop: l.trackTop,
		Accounting: string(b.handler.accounting), OnError: string(b.handler.onError),
		Results: process.Results(b.policy.counters),
	}
	for _, outer := range b.around {
		answer.Parent = cmp.Or(outer.path, answer.Parent)
		if outer.matchersRaw != nil {
			answer.ParentMatches = append(answer.ParentMatches, outer.matchersRaw)
		}
	}
	return answer
}

// numbered returns all buckets of a running app, or of none, with the names that a
// response has for them that lists them all.
func (a *App) numbered() (all []placedBucket) {
	if a == nil {
		return nil
	}
	all = slices.Collect(a.limits())
	// As numberDuplicates does it, in a time that is linear: there may be many limits.
	type identity struct {
		path, name string
		limit      limiter.Limit
	}
	now, ordinals, next := time.Now(), make(map[identity]int, len(all)), make(map[string]int)
	for i := range all {
		b := &all[i]
		of := identity{b.path, b.name, b.storedLimit(now)}
		ordinal, known := ordinals[of]
		if !known {
			ordinal = next[b.path]
			ordinals[of], next[b.path] = ordinal, ordinal+1
		}
		if b.title = b.path; ordinal > 0 {
			b.title += "#" + strconv.Itoa(ordinal+1)
		}
	}
	return all
}

// errNoLimits is the error for requests about limits where there are none.
var errNoLimits = adminapi.Error(http.StatusNotFound, "limit: the running config has no limits")

// find returns the bucket of a path. Of several without a name, default#1 is the first.
func (a *App) find(path string) (*placedBucket, error) {
	var found []placedBucket
	paths, titles := make(map[string]bool), make(map[string]bool)
	all := a.numbered()
	for _, b := range all {
		paths[b.path] = true
		title := b.title
		if title == b.path {
			title += "#1"
		}
		if path == title {
			return &b, nil
		}
		if path == b.path && !titles[title] {
			titles[title] = true
			found = append(found, b)
		}
	}
	switch {
	case len(all) == 0:
		return nil, errNoLimits
	case len(found) == 0:
		return nil, adminapi.Error(http.StatusNotFound, "limit: the running config has no such limit, want %s", anyOf(paths))
	case len(found) > 1 && found[0].limit.Name == "":
		return nil, adminapi.Error(http.StatusConflict,
			"limit: several limits without a name have this path, with other keys or numbers; want %s, or give the limits names", anyOf(titles))
	}
	return &found[0], nil
}

// anyOf returns a list of paths for a message, shortened if it is long.
func anyOf(paths map[string]bool) string {
	const most = 20
	list := slices.Sorted(maps.Keys(paths))
	if n := len(list) - most; n > 0 {
		list = append(list[:most], fmt.Sprintf("one of %d more", n))
	}
	return inWords(list, "or")
}

// Inspect implements adminapi.Source.
func (s source) Inspect(ctx context.Context, asked adminapi.Asked, reset bool) (adminapi.Level, error) {
	b, err := s.find(asked.Limit)
	if err != nil {
		return adminapi.Level{}, err
	}
	return s.inspect(ctx, b, asked, reset)
}

// InspectAll implements adminapi.Source. It looks at the buckets of all limits whose keys can be made from what was
// asked, or empties them. It empties none that all requests share: one client is to be
// let in, and not the others too.
func (s source) InspectAll(ctx context.Context, asked adminapi.Asked, reset bool) (answer adminapi.Levels, err error) {
	answer.Buckets, answer.NotAsked = []adminapi.Level{}, []adminapi.NotAsked{}
	all := s.numbered()
	if len(all) == 0 {
		return answer, errNoLimits
	}
	not := func(b *placedBucket, why string) {
		answer.NotAsked = append(answer.NotAsked, adminapi.NotAsked{Limit: b.title, Why: why})
	}
	seen := make(map[string]bool)
	for i := range all {
		b := &all[i]
		if seen[b.title] {
			continue // it stands in several places
		}
		seen[b.title] = true
		requests, why := requestsFor(&asked, b.title, b.limit.key)
		if reset && len(b.limit.key.placeholders()) == 0 {
			requests, why = nil, "all requests share its bucket; to empty that, name the limit"
		}
		for _, request := range requests {
			one, err := s.inspect(ctx, b, request, reset)
			var notLocated caddy.APIError
			switch {
			case errors.As(err, &notLocated):
				why = err.Error()
				continue
			case err != nil:
				return answer, err
			}
			answer.Asked++
			answer.Error = cmp.Or(answer.Error, one.Error)
			if one.Notable() {
				answer.Buckets = append(answer.Buckets, one)
			}
		}
		if why != "" {
			not(b, why)
		}
	}
	return answer, nil
}

// inspect looks at a bucket and its ban, or empties both.
func (a *App) inspect(ctx context.Context, b *placedBucket, asked adminapi.Asked, reset bool) (adminapi.Level, error) {
	at, err := b.locate(asked)
	if err != nil {
		return adminapi.Level{}, err
	}
	found, err := a.look(ctx, at, reset)
	if err != nil {
		return adminapi.Level{}, err
	}
	answer := b.level(at, found)
	if b.limit.bans == nil {
		return answer, nil
	}
	ban, err := a.look(ctx, b.banOf(&at), reset)
	if answer.Banned = adminapi.Seconds(ban.RetryAfter); answer.Banned > 0 && answer.Size != nil {
		*answer.Remaining, *answer.RetryAfter = 0, max(*answer.RetryAfter, answer.Banned)
	}
	if answer.Node != nil && ban.node != nil {
		answer.Node.Remembered = answer.Node.Remembered || ban.node.Remembered
	}
	answer.Error = cmp.Or(answer.Error, ban.error)
	return answer, err
}

// found is what was found in a bucket, or what it held before it was emptied.
type found struct {
	limiter.Level
	from  string         // the store
	node  *adminapi.Node // what this process knows of it; nil if it is the store
	error string         // why Redis did not answer, so that Level is from this process
}

// look looks at a bucket, or empties it, in the store that the app uses. If Redis does not
// answer, it does so in this process alone.
func (a *App) look(ctx context.Context, at limiter.Bucket, reset bool) (f found, err error) {
	if a.redis == nil {
		look := a.memory.Peek
		if reset {
			look = a.memory.Reset
		}
		f.from = "memory"
		f.Level, err = look(at)
		return f, err
	}

	// The store must stay open, as for a request that a handler decides.
	a.redis.requests.Add(1)
	defer a.redis.requests.Add(-1)
	here, remembered, err := a.redis.PeekHere(at)
	if err != nil {
		return f, err
	}
	look := a.redis.Peek
	if reset {
		look = a.redis.Reset
	}
	f.from = "redis"
	f.Level, err = look(ctx, at)
	if errors.Is(err, limiter.ErrUnavailable) {
		f.from, f.Level, f.error, err = "node", here, unavailable(err), nil
		if reset {
			err = a.redis.ResetHere(at)
		}
	}
	f.node = &adminapi.Node{Level: here.Units, Remembered: remembered, Leased: here.Leased, Unreported: here.Unreported}
	return f, err
}

// unavailable returns what answers say if Redis did not answer.
func unavailable(err error) string { return "redis unavailable: " + err.Error() }

// locate returns the bucket in stores that was asked for.
func (b *bucket) locate(asked adminapi.Asked) (at limiter.Bucket, err error) {
	switch {
	case b.off:
		return at, adminapi.BadRequest("limit: its factor is 0, so it has no buckets")
	case b.rate.isDynamic():
		return at, adminapi.BadRequest("limit: its %s depends on the request, and each value has its own buckets, so a key does not identify one", b.rate.option)
	case b.drip.isDynamic():
		return at, adminapi.BadRequest("limit: its %s depends on the request, and each value has its own buckets, so a key does not identify one", b.drip.option)
	}
	if at, err = b.identify(asked); err != nil {
		return at, err
	}
	at.Limit = b.storedLimit(time.Now())
	at.Cost = b.usualCost()
	at.Limit.Size += b.above(&at.Limit, at.Cost).units()
	if b.limit.shareWhenFull {
		// Known only if it is the client's address that was typed.
		if network := clientip.NetworkOf(asked.Text()); network != clientip.NoNetwork {
			at.ShareKey = network
		}
	}
	return at, nil
}

// identify returns a bucket with the name and the key of the one that was asked for.
func (b *bucket) identify(asked adminapi.Asked) (at limiter.Bucket, err error) {
	at.Name, at.MaxKeys, at.DryRun, at.Consistency = b.name, b.limit.maxKeys, b.limit.dryRun, b.consistency
	if asked.Address != nil {
		at.Name = b.addressName
		at.Key, err = b.limit.key.typedAddress(*asked.Address)
	} else {
		at.Key, err = b.limit.key.typed(asked.Key, asked.Values)
	}
	return at, err
}

// storedLimit returns the numbers with which b is found in stores at now, if they do
// not depend on the request. The size is no part of them, and is 1 if it does.
func (b *bucket) storedLimit(now time.Time) limiter.Limit {
	size := int64(1)
	if !b.sizeIsDynamic() {
		size, _, _ = b.effectiveSize(nil) // validated before
	}
	if b.period != nil {
		return b.period.Limit(size, now)
	}
	l := limiter.Limit{Size: size, DripInterval: b.rate.constant, DripSize: b.drip.constant}
	b.setAlgorithm(&l)
	return l
}

// level returns the answer for b, of whose bucket at that was found.
func (b *placedBucket) level(at limiter.Bucket, level found) adminapi.Level {
	answer := adminapi.Level{
		Error: level.error, Limit: b.title, From: level.from, Level: level.Units, Held: level.Held, Clear: adminapi.Seconds(level.Clear),
		Key: shownKey(at.Key, at.Name == b.addressName), Policies: b.shownPolicies(), Node: level.node,
	}
	if !b.sizeIsDynamic() {
		wait, above := adminapi.Seconds(level.RetryAfter), b.above(&at.Limit, at.Cost).units()
		size, remaining := at.Limit.Size-above, max(level.Remaining-above, 0)
		answer.Size, answer.Remaining, answer.RetryAfter = &size, &remaining, &wait
		answer.Never = at.Cost > size
	}
	if b.policy.concurrency { // when it is clear is up to the requests in progress
		answer.InProgress = answer.RetryAfter != nil && *answer.RetryAfter > 0
		if answer.Clear = 0; answer.InProgress {
			answer.RetryAfter = nil
		}
	}
	return answer
}

// shownKey returns a key, or a client's address that replaces it, as it is shown.
func shownKey(key string, address bool) adminapi.Key {
	text := keytext.Of(key)
	if address {
		return adminapi.Key{Address: &text}
	}
	return adminapi.Key{Key: &text, NotUTF8: !utf8.ValidString(key)}
}

// Top implements adminapi.Source.
func (s source) Top(path string) (func(toplist.By, int) adminapi.Top, error) {
	b, err := s.tracked(path)
	if err != nil {
		return nil, err
	}
	return b.top, nil
}

// tracked returns the bucket of a path that tracks its keys. Without a path it is
// the only one that does.
func (a *App) tracked(path string) (*bucket, error) {
	if path != "" {
		b, err := a.find(path)
		switch {
		case err != nil:
			return nil, err
		case b.policy.top == nil:
			return nil, adminapi.BadRequest("limit: it does not track its keys, want one with track_top, such as track_top 100")
		}
		return b.bucket, nil
	}
	var found *bucket
	paths := make(map[string]bool)
	if a != nil {
		for l := range a.limits() {
			if l.policy.top != nil {
				found, paths[l.path] = l.bucket, true
			}
		}
	}
	switch len(paths) {
	case 0:
		return nil, adminapi.Error(http.StatusNotFound, "limit: no limit of the running config tracks its keys, want one with track_top, such as track_top 100")
	case 1:
		return a.tracked(found.path)
	}
	return nil, adminapi.BadRequest("limit: several limits track their keys, want %s", anyOf(paths))
}

// top returns the keys that ask most at b.
func (b *bucket) top(by toplist.By, n int) adminapi.Top {
	top := b.policy.top.Top(by, n)
	answer := adminapi.Top{
		Limit: b.path, By: "requests", Window: adminapi.Seconds(top.Window),
		Requests: top.Requests, Denied: top.Denied, Entries: []adminapi.TopEntry{},
	}
	if by == toplist.ByDenied {
		answer.By = "denied"
	}
	for _, e := range top.Entries {
		entry := adminapi.TopEntry{
			Key:       shownKey(e.Text, e.Address),
			Truncated: e.Cut, Requests: e.Requests, Denied: e.Denied, Error: e.Error,
		}
		answer.Entries = append(answer.Entries, entry)
	}
	return answer
}
