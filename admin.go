package ratelimit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/adminapi"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/clientip"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/keytext"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/routes"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
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
		if !seen[l.Path] {
			seen[l.Path] = true
			counters = append(counters, l.Policy.Counters)
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
		a.Server, a.Hosts, a.RouteMatches = at.Server, at.Hosts, at.Matches
		a.Buckets = held[l.Name] + held[l.AddressName]
		limits = append(limits, a)
	}
	return limits
}

// sites returns where the handlers of a running app stand.
func (a *App) sites() map[*Handler]routes.Site {
	http, err := a.ctx.AppIfConfigured("http")
	if err != nil {
		return nil
	}
	return routes.Sites[*Handler](http.(*caddyhttp.App))
}

// placedBucket is a bucket and where it stands in the config.
type placedBucket struct {
	*rule.Bucket
	handler      *Handler
	handlerIndex int
	title        string        // the name by which header fields list it; set by numbered
	around       []*rule.Limit // the outermost first
}

// Unnamed reports whether the limit of b or one around it has no name, so that nobody
// has named what its buckets are shared by.
func (b placedBucket) Unnamed() bool {
	return b.Limit.Unnamed() || slices.ContainsFunc(b.around, (*rule.Limit).Unnamed)
}

// limits returns a sequence of all buckets of a running app.
func (a *App) limits() func(func(placedBucket) bool) {
	return func(yield func(placedBucket) bool) {
		for i, h := range a.handlers {
			if !eachBucket(h.limits, placedBucket{handler: h, handlerIndex: i}, yield) {
				return
			}
		}
	}
}

// eachBucket yields the buckets of limits and those within them, until yield returns
// false.
func eachBucket(limits []*rule.Limit, at placedBucket, yield func(placedBucket) bool) bool {
	for _, l := range limits {
		for _, at.Bucket = range l.Buckets {
			if !yield(at) {
				return false
			}
		}
		inner := at
		inner.around = append(slices.Clip(at.around), l)
		if !eachBucket(l.Within, inner, yield) {
			return false
		}
	}
	return true
}

// answer returns the answer for b, given the maximum number of buckets of all limits.
func (b placedBucket) answer(maxKeys int) adminapi.Limit {
	l := b.Limit
	answer := adminapi.Limit{
		Numbers: b.Shown(),
		Path:    b.Path, Name: b.title, Handler: b.handlerIndex, Off: b.Off, Cost: b.ShownCost(),
		Key: l.Key.String(), IPv4Prefix: l.Key.Prefixes.IPv4, IPv6Prefix: l.Key.Prefixes.IPv6,
		Match:   l.Match,
		MaxKeys: l.MaxKeysOf(maxKeys), WhenFull: l.WhenFull(), TrackTop: l.TrackTop,
		Accounting: string(b.handler.accounting), OnError: string(b.handler.onError),
		Results: process.Results(b.Policy.Counters),
	}
	for _, outer := range b.around {
		answer.Parent = cmp.Or(outer.Path, answer.Parent)
		if outer.Match != nil {
			answer.ParentMatches = append(answer.ParentMatches, outer.Match)
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
	now, listed := time.Now(), make([]outcome.Entry, len(all))
	for i := range all {
		listed[i] = outcome.Entry{Policy: &all[i].Policy.Policy, Name: all[i].Name, Limit: all[i].Stored(now)}
	}
	for i, title := range outcome.Titles(listed) {
		all[i].title = title
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
		paths[b.Path] = true
		title := b.title
		if title == b.Path {
			title += "#1"
		}
		if path == title {
			return &b, nil
		}
		if path == b.Path && !titles[title] {
			titles[title] = true
			found = append(found, b)
		}
	}
	switch {
	case len(all) == 0:
		return nil, errNoLimits
	case len(found) == 0:
		return nil, adminapi.Error(http.StatusNotFound, "limit: the running config has no such limit, want %s", anyOf(paths))
	case len(found) > 1 && !found[0].Limit.Named:
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
	return option.InWords(list, "or")
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
		requests, why := adminapi.RequestsFor(&asked, b.title, b.Limit.Key)
		if reset && len(b.Limit.Key.Placeholders()) == 0 {
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
	at, err := locate(b.Bucket, asked)
	if err != nil {
		return adminapi.Level{}, err
	}
	found, err := a.look(ctx, at, reset)
	if err != nil {
		return adminapi.Level{}, err
	}
	answer := b.level(at, found)
	if b.Limit.Bans == nil {
		return answer, nil
	}
	ban, err := a.look(ctx, b.BanOf(&at), reset)
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
func locate(b *rule.Bucket, asked adminapi.Asked) (at limiter.Bucket, err error) {
	switch {
	case b.Off:
		return at, adminapi.BadRequest("limit: its factor is 0, so it has no buckets")
	case b.Rate.IsDynamic():
		return at, adminapi.BadRequest("limit: its %s depends on the request, and each value has its own buckets, so a key does not identify one", b.Rate.Option)
	case b.Drip.IsDynamic():
		return at, adminapi.BadRequest("limit: its %s depends on the request, and each value has its own buckets, so a key does not identify one", b.Drip.Option)
	}
	if at, err = identify(b, asked); err != nil {
		return at, err
	}
	at.Limit = b.Stored(time.Now())
	at.Cost = b.UsualCost()
	at.Limit.Size += b.Headroom(&at.Limit, at.Cost)
	if b.Limit.ShareWhenFull {
		// Known only if it is the client's address that was typed.
		if network := clientip.NetworkOf(asked.Text()); network != clientip.NoNetwork {
			at.ShareKey = network
		}
	}
	return at, nil
}

// identify returns a bucket with the name and the key of the one that was asked for.
func identify(b *rule.Bucket, asked adminapi.Asked) (at limiter.Bucket, err error) {
	at.Name, at.MaxKeys, at.DryRun, at.Consistency = b.Name, b.Limit.MaxKeys, b.Limit.DryRun, b.Consistency
	if asked.Address != nil {
		at.Name = b.AddressName
	}
	at.Key, err = asked.KeyOf(b.Limit.Key)
	return at, err
}

// level returns the answer for b, of whose bucket at that was found.
func (b *placedBucket) level(at limiter.Bucket, level found) adminapi.Level {
	answer := adminapi.Level{
		Error: level.error, Limit: b.title, From: level.from, Level: level.Units, Held: level.Held, Clear: adminapi.Seconds(level.Clear),
		Key: shownKey(at.Key, at.Name == b.AddressName), Policies: b.ShownPolicies(), Node: level.node,
	}
	if !b.SizeIsDynamic() {
		wait, above := adminapi.Seconds(level.RetryAfter), b.Headroom(&at.Limit, at.Cost)
		size, remaining := at.Limit.Size-above, max(level.Remaining-above, 0)
		answer.Size, answer.Remaining, answer.RetryAfter = &size, &remaining, &wait
		answer.Never = at.Cost > size
	}
	if b.Policy.Concurrency { // when it is clear is up to the requests in progress
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
	return func(by toplist.By, n int) adminapi.Top { return topOf(b, by, n) }, nil
}

// tracked returns the bucket of a path that tracks its keys. Without a path it is
// the only one that does.
func (a *App) tracked(path string) (*rule.Bucket, error) {
	if path != "" {
		b, err := a.find(path)
		switch {
		case err != nil:
			return nil, err
		case b.Policy.Top == nil:
			return nil, adminapi.BadRequest("limit: it does not track its keys, want one with track_top, such as track_top 100")
		}
		return b.Bucket, nil
	}
	var found *rule.Bucket
	paths := make(map[string]bool)
	if a != nil {
		for l := range a.limits() {
			if l.Policy.Top != nil {
				found, paths[l.Path] = l.Bucket, true
			}
		}
	}
	switch len(paths) {
	case 0:
		return nil, adminapi.Error(http.StatusNotFound, "limit: no limit of the running config tracks its keys, want one with track_top, such as track_top 100")
	case 1:
		return a.tracked(found.Path)
	}
	return nil, adminapi.BadRequest("limit: several limits track their keys, want %s", anyOf(paths))
}

// topOf returns the keys that ask most at b.
func topOf(b *rule.Bucket, by toplist.By, n int) adminapi.Top {
	top := b.Policy.Top.Top(by, n)
	answer := adminapi.Top{
		Limit: b.Path, By: "requests", Window: adminapi.Seconds(top.Window),
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

// Ban implements adminapi.Source.
func (s source) Ban(ctx context.Context, asked adminapi.Asked, d time.Duration) (adminapi.Ban, error) {
	b, at, err := s.findBan(asked)
	if err != nil {
		return adminapi.Ban{}, err
	}
	ban := b.BanOf(&at)
	if s.redis == nil {
		err = s.memory.Ban(ban, d)
	} else {
		s.redis.requests.Add(1)
		defer s.redis.requests.Add(-1)
		err = s.redis.Ban(ctx, ban, d)
	}
	if err != nil && !errors.Is(err, limiter.ErrUnavailable) {
		return adminapi.Ban{}, err
	}
	found, peekErr := s.look(ctx, ban, false)
	if peekErr != nil {
		return adminapi.Ban{}, peekErr
	}
	if err != nil {
		found.error = unavailable(err)
	}
	answer := b.ban(at, found)
	if answer.Left > 0 {
		b.Limit.Bans.List.Note(rule.BannedKey{Text: at.Key, Address: at.Name == b.AddressName}, found.RetryAfter)
	}
	return answer, nil
}

// Unban implements adminapi.Source.
func (s source) Unban(ctx context.Context, asked adminapi.Asked) (adminapi.Ban, error) {
	b, at, err := s.findBan(asked)
	if err != nil {
		return adminapi.Ban{}, err
	}
	found, err := s.look(ctx, b.BanOf(&at), true)
	return b.ban(at, found), err
}

// findBan returns the limit that was asked for, which bans, and a bucket that has the name
// and the key of its.
func (a *App) findBan(asked adminapi.Asked) (*placedBucket, limiter.Bucket, error) {
	b, err := a.findBanning(asked.Limit)
	if err != nil {
		return nil, limiter.Bucket{}, err
	}
	at, err := identify(b.Bucket, asked)
	return b, at, err
}

// findBanning returns the limit of a path, which bans.
func (a *App) findBanning(path string) (*placedBucket, error) {
	b, err := a.find(path)
	if err == nil && b.Limit.Bans == nil {
		err = adminapi.BadRequest("limit: it does not ban, want one with ban, such as ban 10m")
	}
	return b, err
}

// ban returns the answer for the ban of the key of at, of which that was found.
func (b *placedBucket) ban(at limiter.Bucket, found found) adminapi.Ban {
	return adminapi.Ban{
		Error: found.error, Limit: b.title, Key: shownKey(at.Key, at.Name == b.AddressName),
		Left: adminapi.Seconds(found.RetryAfter), DryRun: b.Limit.DryRun,
	}
}

// Bans implements adminapi.Source. It asks the store about each ban in the lists, as other
// Caddy instances may have ended it.
func (s source) Bans(ctx context.Context, path string) (answer adminapi.Bans, err error) {
	var all []placedBucket
	if path != "" {
		b, err := s.findBanning(path)
		if err != nil {
			return answer, err
		}
		all = append(all, *b)
	} else if all = s.numbered(); len(all) == 0 {
		return answer, errNoLimits
	}
	var mu sync.Mutex
	var asking sync.WaitGroup
	answer.Bans = []adminapi.Ban{}
	seen := make(map[*rule.BanList]bool)
	for i := range all {
		b := &all[i]
		if b.Limit.Bans == nil || seen[b.Limit.Bans.List] {
			continue
		}
		list := b.Limit.Bans.List
		seen[list] = true
		for key, end := range list.All() {
			asking.Go(func() {
				at := limiter.Bucket{Name: b.Name, Key: key.Text, DryRun: b.Limit.DryRun}
				if key.Address {
					at.Name = b.AddressName
				}
				found, lookErr := s.look(ctx, b.BanOf(&at), false)
				if found.error != "" {
					found.RetryAfter = max(time.Until(end), 0)
				}
				mu.Lock()
				defer mu.Unlock()
				switch err = cmp.Or(err, lookErr); {
				case lookErr != nil:
				case found.RetryAfter == 0:
					list.Forget(key, end)
				default:
					answer.Error = cmp.Or(answer.Error, found.error)
					answer.Bans = append(answer.Bans, b.ban(at, found))
				}
			})
		}
	}
	asking.Wait()
	slices.SortFunc(answer.Bans, func(a, b adminapi.Ban) int {
		return cmp.Or(cmp.Compare(b.Left, a.Left), strings.Compare(a.Limit, b.Limit))
	})
	return answer, err
}
