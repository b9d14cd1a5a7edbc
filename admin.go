package ratelimit

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

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
func (*adminAPI) Provision(ctx caddy.Context) error { return registerMetrics(ctx.GetMetricsRegistry()) }

// Routes implements caddy.AdminRouter.
func (*adminAPI) Routes() []caddy.AdminRoute {
	prefix := "/" + ownName + "/"
	return []caddy.AdminRoute{
		{Pattern: prefix + "status", Handler: allow(http.MethodGet, serveStatus)},
		{Pattern: prefix + "limits", Handler: allow(http.MethodGet, serveLimits)},
		{Pattern: prefix + "peek", Handler: allow(http.MethodPost, servePeek)},
		{Pattern: prefix + "reset", Handler: allow(http.MethodPost, serveReset)},
		{Pattern: prefix + "top", Handler: allow(http.MethodGet, serveTop)},
		{Pattern: prefix, Handler: caddy.AdminHandlerFunc(func(http.ResponseWriter, *http.Request) error {
			return adminError(http.StatusNotFound, "unknown endpoint, want %[1]sstatus, %[1]slimits, %[1]speek, %[1]sreset or %[1]stop", prefix)
		})},
	}
}

// adminError returns an error of the admin API. Caddy logs it, so it must not show
// what may be a key.
func adminError(status int, format string, args ...any) error {
	return caddy.APIError{HTTPStatus: status, Err: fmt.Errorf(format, args...)}
}

// badRequest returns the error of a request that has to be written differently.
func badRequest(format string, args ...any) error {
	return adminError(http.StatusBadRequest, format, args...)
}

// allow returns a handler for requests of one method, or also HEAD if it is GET.
func allow(method string, serve caddy.AdminHandlerFunc) caddy.AdminHandler {
	allowed := method
	if method == http.MethodGet {
		allowed += ", " + http.MethodHead
	}
	return caddy.AdminHandlerFunc(func(w http.ResponseWriter, r *http.Request) error {
		if !slices.Contains(strings.Split(allowed, ", "), r.Method) {
			w.Header().Set("Allow", allowed)
			return adminError(http.StatusMethodNotAllowed, "method: got %q, want %s", r.Method, method)
		}
		return serve(w, r)
	})
}

// writeJSON writes the answer to a request.
func writeJSON(w http.ResponseWriter, status int, answer any) error {
	text, err := json.Marshal(answer)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_, _ = w.Write(append(text, '\n')) // nobody is left to tell of an error
	return nil
}

// jsonSeconds is a duration that JSON shows in seconds.
type jsonSeconds time.Duration

// MarshalJSON returns the number of seconds with microseconds.
func (s jsonSeconds) MarshalJSON() ([]byte, error) {
	return strconv.AppendFloat(nil, time.Duration(s).Seconds(), 'f', 6, 64), nil
}

// UnmarshalJSON reads a number of seconds.
func (s *jsonSeconds) UnmarshalJSON(b []byte) error {
	seconds, err := strconv.ParseFloat(string(b), 64)
	*s = jsonSeconds(seconds * float64(time.Second))
	return err
}

// statusAnswer is the answer of status.
type statusAnswer struct {
	Version    string            `json:"version"`
	Configured bool              `json:"configured"` // whether the running config has limits
	Store      string            `json:"store,omitempty"`
	OnError    onError           `json:"on_error,omitempty"`
	Servers    []serverAnswer    `json:"servers"`
	Memory     *memoryAnswer     `json:"memory,omitempty"`
	Requests   map[string]uint64 `json:"requests"`   // of this process, by what became of them
	RatesOver  jsonSeconds       `json:"rates_over"` // the time that the rates are of
	Limits     []countsAnswer    `json:"limits"`
}

// serverAnswer is the state of a Redis server.
type serverAnswer struct {
	Address     string            `json:"address"`
	Breaker     string            `json:"breaker"`
	Up          bool              `json:"up"`
	Down        *jsonSeconds      `json:"down,omitempty"` // for how long
	Reason      string            `json:"reason,omitempty"`
	Connections map[string]int    `json:"connections"`
	Calls       uint64            `json:"calls"`
	Requests    uint64            `json:"requests"`
	Failures    map[string]uint64 `json:"failures"`
}

// memoryAnswer is the use of the buckets in this process.
type memoryAnswer struct {
	Buckets int `json:"buckets"`
	MaxKeys int `json:"max_keys"`
}

// countsAnswer is what became of requests at the limits of a path since the first
// config that had it, and each second of late.
type countsAnswer struct {
	Path     string             `json:"path"`
	Admitted uint64             `json:"admitted"`
	Denied   uint64             `json:"denied"`
	Spared   uint64             `json:"spared"`
	Near     uint64             `json:"near"`
	Units    uint64             `json:"units"`
	By       map[string]uint64  `json:"by"`
	Rates    map[string]float64 `json:"rates"`
}

// serveStatus answers with the state of the store and the counts of the limits.
func serveStatus(w http.ResponseWriter, _ *http.Request) error {
	now := time.Now()
	status := statusAnswer{
		Version: moduleVersion(), Servers: []serverAnswer{}, Limits: []countsAnswer{},
		Requests: make(map[string]uint64, checkedKinds),
	}
	for what := range checkedKinds {
		status.Requests[what.String()] = checkedTotal(what)
	}
	app := newestApp()
	if app == nil {
		return writeJSON(w, http.StatusOK, status)
	}
	status.Configured, status.Store, status.OnError = true, "memory", app.onError
	status.Memory = &memoryAnswer{app.memory.Len(), app.maxKeys}
	if app.redis != nil {
		status.Store = "redis"
		for _, s := range app.redis.Stats() {
			status.Servers = append(status.Servers, serverAnswerOf(&s, now))
		}
	}
	before, age := recentCounts.since(now)
	status.RatesOver = jsonSeconds(age)
	seen := make(map[string]bool)
	for l := range app.limits() {
		if !seen[l.path] {
			seen[l.path] = true
			status.Limits = append(status.Limits, countsAnswerOf(l.policy.counters, before, age))
		}
	}
	return writeJSON(w, http.StatusOK, status)
}

// moduleVersion returns the version of this module in the Caddy that runs.
func moduleVersion() string {
	const path = "github.com/seed-387a6c65/caddy-ratelimit"
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	for _, m := range append(info.Deps, &info.Main) {
		if m.Path == path {
			return cmp.Or(m.Version, "(devel)")
		}
	}
	return "unknown"
}

// serverAnswerOf returns the answer for a Redis server.
func serverAnswerOf(s *limiter.ServerStats, now time.Time) serverAnswer {
	answer := serverAnswer{
		Address: s.Address, Breaker: s.Breaker, Up: s.Up, Reason: s.Reason,
		Connections: map[string]int{"idle": s.Idle, "in_use": s.InUse, "connecting": s.Connecting},
		Calls:       s.Calls, Requests: s.Requests, Failures: s.Failures,
	}
	if answer.Failures == nil {
		answer.Failures = map[string]uint64{}
	}
	if !s.DownSince.IsZero() {
		down := jsonSeconds(now.Sub(s.DownSince))
		answer.Down = &down
	}
	return answer
}

// countsAnswerOf returns the answer for the limits of a path, given a sample of the
// counts and its age.
func countsAnswerOf(c *counters, before countSample, age time.Duration) countsAnswer {
	totals := c.totals()
	counts := countsOf(&totals)
	answer := countsAnswer{
		Path: c.path, Admitted: counts.admitted, Denied: counts.denied, Spared: counts.spared,
		Near: totals.of(countedNear), Units: totals.units,
		By: make(map[string]uint64, deciders), Rates: make(map[string]float64),
	}
	for by, n := range totals.by(countedAdmitted, countedNear, countedDenied, countedSpared) {
		answer.By[limiter.Decider(by).String()] = n
	}
	grown, per := counts.minus(before.counts[c.path]), age.Seconds()
	for name, n := range map[string]uint64{
		"admitted": grown.admitted, "denied": grown.denied, "spared": grown.spared, "fallback": grown.fallback,
	} {
		if answer.Rates[name] = 0; per > 0 {
			answer.Rates[name] = float64(int64(float64(n)/per*1000)) / 1000
		}
	}
	return answer
}

// limitsAnswer is the answer of limits.
type limitsAnswer struct {
	Limits []limitAnswer `json:"limits"`
}

// limitAnswer describes a bucket of a limit, see Limit.
type limitAnswer struct {
	Path    string   `json:"path"`
	Name    string   `json:"name"` // the path and, of several limits without a name, the number, as in header fields
	Parent  string   `json:"parent,omitempty"`
	Handler int      `json:"handler"` // counted from 0
	Server  string   `json:"server,omitempty"`
	Hosts   []string `json:"hosts,omitempty"`

	shownNumbers

	Off           bool                       `json:"off,omitempty"` // by a factor of 0
	CountDenied   bool                       `json:"count_denied,omitempty"`
	Cost          any                        `json:"cost"` // a number, or a template that depends on the request
	Key           string                     `json:"key"`
	IPv4Prefix    int                        `json:"ipv4_prefix"`
	IPv6Prefix    int                        `json:"ipv6_prefix"`
	Match         caddyhttp.RawMatcherSets   `json:"match,omitempty"`
	ParentMatches []caddyhttp.RawMatcherSets `json:"parent_matches,omitempty"` // of the limits around it, the outermost first
	RouteMatches  []caddyhttp.RawMatcherSets `json:"route_matches,omitempty"`  // of the routes around the handler, likewise, without hosts
	MaxKeys       int                        `json:"max_keys"`
	WhenFull      string                     `json:"when_full"`
	TrackTop      int                        `json:"track_top,omitempty"`
	Accounting    string                     `json:"accounting"`
	OnError       onError                    `json:"on_error"`
	Buckets       int                        `json:"buckets"`  // in this process
	Admitted      uint64                     `json:"admitted"` // by all limits with this path, of which each shows the same counts; likewise:
	Denied        uint64                     `json:"denied"`
	Spared        uint64                     `json:"spared"`
}

// serveLimits answers with all limits.
func serveLimits(w http.ResponseWriter, _ *http.Request) error {
	answer := limitsAnswer{Limits: []limitAnswer{}}
	app := newestApp()
	if app == nil {
		return writeJSON(w, http.StatusOK, answer)
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
		answer.Limits = append(answer.Limits, a)
	}
	return writeJSON(w, http.StatusOK, answer)
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
func (b placedBucket) answer(maxKeys int) limitAnswer {
	l, totals := b.limit, b.policy.counters.totals()
	counts := countsOf(&totals)
	answer := limitAnswer{
		shownNumbers: b.shown(),
		Path:         b.path, Name: b.title, Handler: b.handlerIndex, Off: b.off, Cost: jsonValue(&b.cost, asIs),
		Key: l.key.String(), IPv4Prefix: l.key.ipv4, IPv6Prefix: l.key.ipv6,
		Match:   l.matchersRaw,
		MaxKeys: l.maxKeysOf(maxKeys), WhenFull: cmp.Or(l.WhenFull, whenFullForget), TrackTop: l.trackTop,
		CountDenied: l.CountDenied,
		Accounting:  string(b.handler.accounting), OnError: b.handler.onError,
		Admitted: counts.admitted, Denied: counts.denied, Spared: counts.spared,
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
	now, listed := time.Now(), result{buckets: make([]bucketResult, len(all))}
	for i := range all {
		listed.buckets[i] = bucketResult{policy: all[i].policy, name: all[i].name, limit: all[i].storedLimit(now), families: ietf}
	}
	listed.numberDuplicates(0)
	for i := range all {
		all[i].title = string(listed.buckets[i].appendTo(nil))
	}
	return all
}

// errNoLimits is the error for requests about limits where there are none.
var errNoLimits = adminError(http.StatusNotFound, "limit: the running config has no limits")

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
		return nil, adminError(http.StatusNotFound, "limit: the running config has no such limit, want %s", anyOf(paths))
	case len(found) > 1 && found[0].limit.Name == "":
		return nil, adminError(http.StatusConflict,
			"limit: several limits without a name have this path, with other keys or numbers; want %s, or limits with names", anyOf(titles))
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
	if n := len(list) - 1; n > 0 {
		return strings.Join(list[:n], ", ") + " or " + list[n]
	}
	return list[0]
}

// bucketAnswer is the answer of peek and reset: what a bucket holds or, of reset, held.
type bucketAnswer struct {
	Error string `json:"error,omitempty"` // why Redis did not answer; From is node then
	Limit string `json:"limit"`

	shownKey

	From       string       `json:"from"`           // memory, redis or node: this process, instead of Redis
	Size       *int64       `json:"size,omitempty"` // unless it depends on the request; likewise:
	Level      int64        `json:"level"`
	Remaining  *int64       `json:"remaining,omitempty"`
	Held       int64        `json:"held"`
	Clear      jsonSeconds  `json:"clear"`
	RetryAfter *jsonSeconds `json:"retry_after,omitempty"`
	Never      bool         `json:"never,omitempty"` // a request costs more than the bucket ever has room for
	Node       *nodeAnswer  `json:"node,omitempty"`  // with Redis
}

// nodeAnswer is what this process knows of a bucket in Redis.
type nodeAnswer struct {
	Level      int64 `json:"level"`
	Remembered bool  `json:"remembered"` // whether it denies without asking Redis
}

// shownKey is the key of a bucket, in one of three forms.
type shownKey struct {
	Key     *string  `json:"key,omitempty"`
	Values  []string `json:"values,omitempty"`  // instead of key: of several placeholders
	Address *string  `json:"address,omitempty"` // instead of key: of a client without one
}

// show returns a key, or a client's address that replaces it, as it is shown.
func (k *key) show(text string, address bool) shownKey {
	values, several := k.split(text)
	switch {
	case address:
		return shownKey{Address: &text}
	case several: // the text ends in lengths, which may be any bytes
		return shownKey{Values: values}
	}
	return shownKey{Key: &text}
}

// notable reports whether the bucket holds something, or denies requests.
func (a *bucketAnswer) notable() bool {
	return a.Level > 0 || a.Held > 0 || a.denies() || a.Node != nil && a.Node.Level > 0
}

// denies reports whether a request is denied now.
func (a *bucketAnswer) denies() bool {
	return a.Never || a.RetryAfter != nil && *a.RetryAfter > 0 || a.Node != nil && a.Node.Remembered
}

// bucketsAnswer is the answer of peek and reset about the buckets of all limits: those
// that hold something, or held it, or that deny requests.
type bucketsAnswer struct {
	Error    string           `json:"error,omitempty"` // why Redis did not answer for some
	Asked    int              `json:"asked"`           // the number of buckets that were looked at
	Buckets  []bucketAnswer   `json:"buckets"`
	NotAsked []notAskedAnswer `json:"not_asked"`
}

// notAskedAnswer says why there is a bucket of a limit that was not looked at.
type notAskedAnswer struct {
	Limit string `json:"limit"`
	Why   string `json:"why"`
}

// servePeek answers with what buckets hold.
func servePeek(w http.ResponseWriter, r *http.Request) error { return serveBuckets(w, r, false) }

// serveReset empties buckets and answers with what they held.
func serveReset(w http.ResponseWriter, r *http.Request) error { return serveBuckets(w, r, true) }

// serveBuckets looks at the bucket of a limit or those of all limits, or empties them.
func serveBuckets(w http.ResponseWriter, r *http.Request, reset bool) error {
	asked, err := readBucketRequest(w, r)
	if err != nil {
		return err
	}
	app := newestApp()
	if asked.limit == "" {
		answer, err := app.inspectAll(r.Context(), asked, reset)
		if err != nil {
			return err
		}
		return writeJSON(w, statusOf(answer.Error), answer)
	}
	b, err := app.find(asked.limit)
	if err != nil {
		return err
	}
	answer, err := app.inspect(r.Context(), b, asked, reset)
	if err != nil {
		return err
	}
	return writeJSON(w, statusOf(answer.Error), answer)
}

// statusOf returns the status of an answer, given why Redis did not answer.
func statusOf(unavailable string) int {
	if unavailable != "" {
		return http.StatusServiceUnavailable
	}
	return http.StatusOK
}

// inspectAll looks at the buckets of all limits whose keys can be made from what was
// asked, or empties them. It empties none that all requests share: one client is to be
// let in, and not the others too.
func (a *App) inspectAll(ctx context.Context, asked bucketRequest, reset bool) (answer bucketsAnswer, err error) {
	answer.Buckets, answer.NotAsked = []bucketAnswer{}, []notAskedAnswer{}
	all := a.numbered()
	if len(all) == 0 {
		return answer, errNoLimits
	}
	not := func(b *placedBucket, why string) {
		answer.NotAsked = append(answer.NotAsked, notAskedAnswer{b.title, why})
	}
	seen := make(map[string]bool)
	for i := range all {
		b := &all[i]
		if seen[b.title] {
			continue // it stands in several places
		}
		seen[b.title] = true
		requests, why := asked.of(b.title, b.limit.key)
		if reset && len(b.limit.key.placeholders()) == 0 {
			requests, why = nil, "all requests share its bucket; to empty that, name the limit"
		}
		for _, request := range requests {
			one, err := a.inspect(ctx, b, request, reset)
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
			if one.notable() {
				answer.Buckets = append(answer.Buckets, one)
			}
		}
		if why != "" {
			not(b, why)
		}
	}
	return answer, nil
}

// inspect looks at a bucket, or empties it, in the store that the app uses. If Redis
// does not answer, it does so in this process alone.
func (a *App) inspect(ctx context.Context, b *placedBucket, asked bucketRequest, reset bool) (bucketAnswer, error) {
	at, err := b.locate(asked)
	if err != nil {
		return bucketAnswer{}, err
	}
	if a.redis == nil {
		look := a.memory.Peek
		if reset {
			look = a.memory.Reset
		}
		level, err := look(at)
		return b.bucketAnswer("memory", at, level), err
	}

	// The store must stay open, as for a request that a handler decides.
	a.redis.requests.Add(1)
	defer a.redis.requests.Add(-1)
	here, remembered, err := a.redis.PeekHere(at)
	if err != nil {
		return bucketAnswer{}, err
	}
	look := a.redis.Peek
	if reset {
		look = a.redis.Reset
	}
	level, err := look(ctx, at)
	answer := b.bucketAnswer("redis", at, level)
	if errors.Is(err, limiter.ErrUnavailable) {
		answer = b.bucketAnswer("node", at, here)
		answer.Error, err = "redis unavailable: "+err.Error(), nil
		if reset {
			err = a.redis.ResetHere(at)
		}
	}
	answer.Node = &nodeAnswer{here.Units, remembered}
	return answer, err
}

// locate returns the bucket in stores that was asked for.
func (b *bucket) locate(asked bucketRequest) (at limiter.Bucket, err error) {
	switch {
	case b.off:
		return at, badRequest("limit: its factor is 0, so it has no buckets")
	case b.rate.isDynamic():
		return at, badRequest("limit: its %s depends on the request, and each value has its own buckets; no key alone tells which", b.rate.option)
	case b.drip.isDynamic():
		return at, badRequest("limit: its %s depends on the request, and each value has its own buckets; no key alone tells which", b.drip.option)
	}
	at.Limit = b.storedLimit(time.Now())
	switch at.Cost = 1; {
	case b.constant != nil:
		at.Cost = b.constant.Cost
	case !b.cost.isDynamic():
		at.Cost = b.cost.constant
	}
	at.Name, at.MaxKeys = b.name, b.limit.maxKeys
	if b.limit.shareWhenFull {
		// Known only if it is the client's address that was typed.
		if network := networkOf(asked.text()); network != noNetwork {
			at.ShareKey = network
		}
	}
	if asked.address != nil {
		at.Name = b.addressName
		at.Key, err = b.limit.key.typedAddress(*asked.address)
	} else {
		at.Key, err = b.limit.key.typed(asked.key, asked.values)
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
		return b.period.limit(size, now)
	}
	l := limiter.Limit{Size: size, DripInterval: b.rate.constant, DripSize: b.drip.constant}
	b.setAlgorithm(&l)
	return l
}

// bucketAnswer returns the answer for b, of which at is the bucket that was asked for.
func (b *placedBucket) bucketAnswer(from string, at limiter.Bucket, level limiter.Level) bucketAnswer {
	answer := bucketAnswer{
		Limit: b.title, From: from, Level: level.Units, Held: level.Held, Clear: jsonSeconds(level.Clear),
		shownKey: b.limit.key.show(at.Key, at.Name == b.addressName),
	}
	if !b.sizeIsDynamic() {
		wait := jsonSeconds(level.RetryAfter)
		answer.Size, answer.Remaining, answer.RetryAfter = &at.Limit.Size, &level.Remaining, &wait
		answer.Never = at.Cost > at.Limit.Size
	}
	return answer
}

// topAnswer is the answer of top.
type topAnswer struct {
	Limit    string      `json:"limit"`
	By       string      `json:"by"`
	Window   jsonSeconds `json:"window"` // the time that the counts are of
	Requests uint64      `json:"requests"`
	Denied   uint64      `json:"denied"`
	Entries  []topEntry  `json:"entries"`
}

// topEntry is a key and its counts. The one that entries are sorted by is at most
// error too high. The other one is never too high.
//
// JSON can't represent a key that is not UTF-8: it has U+FFFD in place of the bytes
// that are not. Several entries may then look alike, and peek and reset accept none
// of them.
type topEntry struct {
	shownKey

	Truncated bool   `json:"truncated,omitempty"`
	NotUTF8   bool   `json:"not_utf8,omitempty"`
	Requests  uint64 `json:"requests"`
	Denied    uint64 `json:"denied"`
	Error     uint64 `json:"error"`
}

// topQuery is what top is asked for.
type topQuery struct {
	limit string
	n     int
	by    toplist.By
	watch time.Duration // 0 for a single answer
}

// How long the stream of top lasts, at most: reading from it again is cheap, and
// Caddy waits ten seconds for admin requests when it loads a config.
const watchTime = 8 * time.Second

// parseTopQuery parses the query of top.
func parseTopQuery(raw string) (topQuery, error) {
	q := topQuery{n: 20}
	values, err := url.ParseQuery(raw)
	if err != nil {
		return q, badRequest("query: got one that is malformed, want limit, n, by and watch")
	}
	for _, name := range slices.Sorted(maps.Keys(values)) {
		text := values[name][0]
		if len(values[name]) > 1 && slices.Contains([]string{"limit", "n", "by", "watch"}, name) {
			return q, badRequest("%s: got it %d times, want it once", name, len(values[name]))
		}
		switch name {
		case "limit":
			q.limit = text
		case "n":
			var want string
			if q.n, want = parseTrackTop(text); want != "" {
				return q, badRequest("n: want %s", want)
			}
		case "by":
			switch text {
			case "requests":
			case "denied":
				q.by = toplist.ByDenied
			default:
				return q, badRequest("by: want requests or denied")
			}
		case "watch":
			if q.watch, err = time.ParseDuration(text); err != nil || q.watch < 100*time.Millisecond || q.watch > watchTime {
				return q, badRequest("watch: want a duration from 100ms to %v, such as 1s", watchTime)
			}
		default:
			return q, badRequest("query: got an unknown parameter, want limit, n, by or watch")
		}
	}
	return q, nil
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
			return nil, badRequest("limit: it does not track its keys, want one with track_top, such as track_top 100")
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
		return nil, adminError(http.StatusNotFound, "limit: no limit of the running config tracks its keys, want one with track_top, such as track_top 100")
	case 1:
		return a.tracked(found.path)
	}
	return nil, badRequest("limit: several limits track their keys, want %s", anyOf(paths))
}

// serveTop answers with the keys that ask most, once or in a stream.
func serveTop(w http.ResponseWriter, r *http.Request) error {
	q, err := parseTopQuery(r.URL.RawQuery)
	if err != nil {
		return err
	}
	b, err := newestApp().tracked(q.limit)
	if err != nil {
		return err
	}
	if q.watch == 0 {
		return writeJSON(w, http.StatusOK, b.topAnswer(q))
	}
	return streamTop(w, r, b, q)
}

// streamTop writes an answer for each interval, in a line of its own, until the
// client leaves, another config is loaded, or watchTime is over.
func streamTop(w http.ResponseWriter, r *http.Request, b *bucket, q topQuery) error {
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.Header().Set("Cache-Control", "no-store")
	ticker := time.NewTicker(q.watch)
	defer ticker.Stop()
	end := time.NewTimer(watchTime)
	defer end.Stop()
	// Not the context of the API's instance: that one may be of a config that was
	// rejected.
	reloaded := caddy.ActiveContext().Done()
	lines, flush := json.NewEncoder(w), http.NewResponseController(w)
	_ = flush.SetWriteDeadline(time.Now().Add(watchTime + time.Second)) // for clients that do not read
	for {
		if err := cmp.Or(lines.Encode(b.topAnswer(q)), flush.Flush()); err != nil {
			return nil //nolint:nilerr // the client has left
		}
		select {
		case <-ticker.C:
		case <-end.C:
			return nil
		case <-reloaded:
			return nil
		case <-r.Context().Done():
			return nil
		}
	}
}

// topAnswer returns the keys that ask most at b.
func (b *bucket) topAnswer(q topQuery) topAnswer {
	top := b.policy.top.Top(q.by, q.n)
	answer := topAnswer{
		Limit: b.path, By: "requests", Window: jsonSeconds(top.Window),
		Requests: top.Requests, Denied: top.Denied, Entries: []topEntry{},
	}
	if q.by == toplist.ByDenied {
		answer.By = "denied"
	}
	for _, e := range top.Entries {
		entry := topEntry{
			shownKey:  b.limit.key.show(e.Text, e.Address),
			Truncated: e.Cut, NotUTF8: !e.Cut && !utf8.ValidString(e.Text), Requests: e.Requests, Denied: e.Denied, Error: e.Error,
		}
		if entry.Values != nil {
			entry.NotUTF8 = slices.ContainsFunc(entry.Values, func(v string) bool { return !utf8.ValidString(v) })
		}
		answer.Entries = append(answer.Entries, entry)
	}
	return answer
}
