package ratelimit

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Whether to report metrics.
const (
	metricsOn  = "on"
	metricsOff = "off"
)

// parseMetrics parses the metrics option.
func parseMetrics(text string) (on bool, want string) {
	switch text {
	case metricsOn, metricsOff:
		return text == metricsOn, ""
	}
	return false, "on or off"
}

// registerMetrics registers the metrics of this process in the registry of a
// config, unless they are registered already.
//
// The app does so, and so does a module of the admin endpoint: Caddy replaces that
// endpoint before it provisions apps, and does not go back if one of them fails, so
// that what only apps register would be missing until the next config is loaded.
// Therefore the metrics are those of the process, whichever config they are
// registered by. A config with metrics off is respected when they are collected.
func registerMetrics(registry *prometheus.Registry) error {
	if registry == nil {
		return nil // a context that Caddy did not make has none
	}
	err := registry.Register(metrics{})
	var registered prometheus.AlreadyRegisteredError
	if errors.As(err, &registered) && registered.ExistingCollector == (metrics{}) {
		return nil
	}
	return err
}

// newDesc returns the description of a metric.
func newDesc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(metricsPrefix+name, help, labels, nil)
}

// metricsPrefix is how the names of all metrics begin.
const metricsPrefix = "caddy_rate_limit_"

// The metrics, other than redisWait. Labels only have values from the config, never
// of requests: their number must not depend on what clients send.
var (
	decisionsDesc = newDesc("decisions_total",
		"Decisions of a limit on requests, by result (admitted, denied, or spared: it had room, but another limit denied) "+
			"and by what decided (redis, memory, remembered, fallback).", "limit", "result", "by")
	checkedDesc = newDesc("checked_requests_total",
		"Requests that met a limit, each once when it ends, by result "+
			"(admitted, denied, undecided: on_error applied, refused: a value or matcher failed, early_data).", "result")
	nearDesc = newDesc("near_limit_total",
		"Requests that a limit admitted and that left its bucket at least 80 percent full. "+
			"None where a single request does so, as with a size of 1 or a warm-up.", "limit")
	unitsDesc = newDesc("units_total",
		"Units charged to the buckets of a limit.", "limit")
	infoDesc = newDesc("limit_info",
		"A limit of the config, with its effective numbers. The value is always 1.",
		"limit", "algorithm", "size", "drip_rate", "drip_size", "window")

	bucketsDesc = newDesc("memory_buckets",
		"Buckets of a limit in this process.", "limit")
	bucketsMaxDesc = newDesc("memory_buckets_max",
		"Maximum number of buckets of a limit in this process.", "limit")
	sharedDesc = newDesc("memory_shared_decisions_total",
		"Decisions on a bucket that keys share because the limit is full in this process.", "limit")
	forgottenDesc = newDesc("memory_forgotten_total",
		"Buckets that were forgotten while they held something, because the limit is full in this process.", "limit")

	redisUpDesc = newDesc("redis_up",
		"Whether requests are sent to a Redis server (1) or its circuit breaker is open (0).", "server")
	redisCallsDesc = newDesc("redis_calls_total",
		"Calls of the script on a Redis server.", "server")
	redisRequestsDesc = newDesc("redis_called_requests_total",
		"Requests in the calls to a Redis server. Divided by the calls, the size of a batch.", "server")
	redisFailuresDesc = newDesc("redis_failures_total",
		"Failures on a Redis server, by reason.", "server", "reason")
	redisConnectionsDesc = newDesc("redis_connections",
		"Connections to a Redis server, by state (idle, in_use, connecting).", "server", "state")

	metricDescs = []*prometheus.Desc{
		decisionsDesc, checkedDesc, nearDesc, unitsDesc, infoDesc,
		bucketsDesc, bucketsMaxDesc, sharedDesc, forgottenDesc,
		redisUpDesc, redisCallsDesc, redisRequestsDesc, redisFailuresDesc, redisConnectionsDesc,
	}
)

// redisWait is how long requests waited for Redis. All limits of a handler are
// decided at once, so it has no label.
var redisWait = prometheus.NewHistogram(prometheus.HistogramOpts{
	Name: metricsPrefix + "redis_wait_seconds",
	Help: "Time that requests waited for decisions of Redis, or for its failure. Remembered denials do not wait.",
	Buckets: []float64{
		.0001, .0002, .0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1,
	},
	NativeHistogramBucketFactor:     1.1,
	NativeHistogramMaxBucketNumber:  100,
	NativeHistogramMinResetDuration: time.Hour,
})

// observeRedisWait records how long a request waited for decisions, unless it did
// not: denials that this process remembers never ask Redis.
func observeRedisWait(waited time.Duration, decisions []limiter.Decision) {
	if len(decisions) > 0 && remembered(decisions) {
		return
	}
	redisWait.Observe(waited.Seconds())
}

// remembered reports whether no decision was made for the request.
func remembered(decisions []limiter.Decision) bool {
	for i := range decisions {
		if decisions[i].By != limiter.DecidedByCache {
			return false
		}
	}
	return true
}

// metrics is the collector of all metrics of this process. It has no state, so that
// all registries have the same one.
type metrics struct{}

// Describe implements prometheus.Collector.
func (metrics) Describe(descs chan<- *prometheus.Desc) {
	for _, desc := range metricDescs {
		descs <- desc
	}
	redisWait.Describe(descs)
}

// Collect implements prometheus.Collector. It reports the limits and servers of the
// configs in use: there are two while one replaces the other.
func (metrics) Collect(collected chan<- prometheus.Metric) {
	running.Lock()
	apps := slices.Clone(running.apps)
	running.Unlock()
	if len(apps) == 0 || !apps[len(apps)-1].reportMetrics {
		return
	}
	out := metricsWriter(collected)
	out.limits(apps)
	if out.servers(apps) {
		redisWait.Collect(collected)
	}
}

// metricsWriter writes metrics while they are collected.
type metricsWriter chan<- prometheus.Metric

// counter writes the value of a counter.
func (out metricsWriter) counter(desc *prometheus.Desc, n uint64, labels ...string) {
	out.write(desc, prometheus.CounterValue, float64(n), labels)
}

// gauge writes the value of a gauge.
func (out metricsWriter) gauge(desc *prometheus.Desc, n int, labels ...string) {
	out.write(desc, prometheus.GaugeValue, float64(n), labels)
}

// write writes a value. An invalid one would fail the scrape of all of Caddy's
// metrics, so it is left out.
func (out metricsWriter) write(desc *prometheus.Desc, kind prometheus.ValueType, v float64, labels []string) {
	for i := range labels {
		labels[i] = strings.ToValidUTF8(labels[i], "\uFFFD") // such as the path of a socket
	}
	if m, err := prometheus.NewConstMetric(desc, kind, v, labels...); err == nil {
		out <- m
	}
}

// The names of results in labels.
var (
	countedNames = [...]string{"admitted", "denied", "spared"}
	countedOf    = [len(countedNames)][]counted{{countedAdmitted, countedNear}, {countedDenied}, {countedSpared}}
)

// limits writes the metrics of limits, by path. With many limits most of a scrape is
// the sorting of series by the values of their labels, which takes almost no time if
// they come in that order.
func (out metricsWriter) limits(apps []*App) {
	limits := make(map[string]reportedLimit)
	mayDecide := [deciders]bool{}
	for _, app := range apps { // the newest one's numbers win
		maps.Copy(limits, app.reportedLimits)
		for by := range mayDecide {
			mayDecide[by] = mayDecide[by] || (app.redis != nil) != (limiter.Decider(by) == limiter.DecidedByMemory)
		}
	}
	usages := usagesByPath(withUnused(limitUsages(apps[len(apps)-1].memory), limits))
	paths := slices.Sorted(maps.Keys(limits))
	totalsOf := make([]limitTotals, len(paths))
	for i, path := range paths {
		totalsOf[i] = limits[path].counters.totals()
	}
	for by := range limiter.Decider(deciders) {
		for i, path := range paths {
			for result, kinds := range countedOf {
				if n := totalsOf[i].by(kinds...)[by]; n > 0 || mayDecide[by] { // from 0 on, so that the first increase is seen
					out.counter(decisionsDesc, n, path, countedNames[result], by.String())
				}
			}
		}
	}
	for i, path := range paths {
		l, totals := limits[path], &totalsOf[i]
		out.counter(nearDesc, totals.of(countedNear), path)
		out.counter(unitsDesc, totals.units, path)
		out.gauge(infoDesc, 1, path, l.algorithm, l.size, l.dripRate, l.dripSize, l.window)

		usage := usages[path]
		out.gauge(bucketsDesc, usage.Buckets, path)
		out.gauge(bucketsMaxDesc, usage.MaxKeys, path)
		out.counter(sharedDesc, usage.Shared, path)
		out.counter(forgottenDesc, usage.Forgotten, path)
	}
	for what := range checkedKinds {
		out.counter(checkedDesc, checkedTotal(what), what.String())
	}
}

// withUnused returns the usages together with those of limits that have not had any
// bucket yet.
func withUnused(usages []limiter.LimitUsage, limits map[string]reportedLimit) []limiter.LimitUsage {
	used := make(map[string]bool, len(usages))
	for _, u := range usages {
		used[u.Name] = true
	}
	for _, l := range limits {
		for name, n := range l.maxKeys {
			if !used[name] {
				usages = append(usages, limiter.LimitUsage{Name: name, MaxKeys: n})
			}
		}
	}
	return usages
}

// usagesByPath returns the usage of the limits of each path together.
func usagesByPath(usages []limiter.LimitUsage) map[string]limiter.LimitUsage {
	byPath := make(map[string]limiter.LimitUsage, len(usages))
	for _, u := range usages {
		path := pathOfBuckets(u.Name)
		sum := byPath[path]
		sum.Buckets += u.Buckets
		sum.MaxKeys += u.MaxKeys
		sum.Forgotten += u.Forgotten
		sum.Shared += u.Shared
		byPath[path] = sum
	}
	return byPath
}

// reportedLimit is what metrics say of the limits of one path: their counters, and
// their algorithm and numbers as text, empty for those that the algorithm does not
// have.
type reportedLimit struct {
	counters                                    *counters
	algorithm, size, dripRate, dripSize, window string
	maxKeys                                     map[string]int // by the name of the buckets in the store
}

// Numbers of limits that are none.
const (
	dynamicNumber = "dynamic" // depends on the request
	mixedNumber   = "mixed"   // limits without a name disagree
)

// setReportedLimits sets reportedLimits, once all handlers are provisioned.
func (a *App) setReportedLimits() {
	a.reportedLimits = make(map[string]reportedLimit)
	var add func([]*Limit)
	add = func(limits []*Limit) {
		for _, l := range limits {
			for _, b := range l.buckets {
				a.reportedLimits[b.path] = b.reported(a.maxKeys).merge(a.reportedLimits[b.path])
			}
			add(l.Limits)
		}
	}
	for _, h := range a.handlers {
		add(h.Limits)
	}
}

// reported returns what metrics say of b, given the maximum number of buckets of all
// limits.
func (b *bucket) reported(maxKeys int) reportedLimit {
	n := b.shown()
	l := reportedLimit{
		maxKeys:  map[string]int{b.name: b.limit.maxKeysOf(maxKeys)},
		counters: b.policy.counters, algorithm: n.Algorithm, size: reportedNumber(n.Size),
		dripRate: reportedNumber(n.DripRate), dripSize: reportedNumber(n.DripSize), window: reportedNumber(n.Window),
	}
	switch {
	case n.Period != "":
		l.window = n.Period
	case n.Rate != "":
		l.dripRate, l.dripSize = shownInterval(jsonSeconds(b.rate.constant)), shownNumber(b.drip.constant)
	}
	return l
}

// reportedNumber returns a number of a limit as text.
func reportedNumber(value any) string {
	switch value.(type) {
	case nil:
		return ""
	case string:
		return dynamicNumber
	}
	return shownInterval(value)
}

// merge returns what metrics say of l and another limit of the path, if there is
// one.
func (l reportedLimit) merge(other reportedLimit) reportedLimit {
	if other.counters == nil {
		return l
	}
	merge := func(text *string, other string) {
		if *text != other {
			*text = mixedNumber
		}
	}
	merge(&l.algorithm, other.algorithm)
	merge(&l.size, other.size)
	merge(&l.dripRate, other.dripRate)
	merge(&l.dripSize, other.dripSize)
	merge(&l.window, other.window)
	maps.Copy(l.maxKeys, other.maxKeys)
	return l
}

// serverStats returns the state of the servers of a store. Tests replace it.
var serverStats = (*limiter.Redis).Stats

// servers writes the metrics of the Redis servers of the apps, and reports whether
// there are any. Two apps may use different stores of one server: what happened is
// added up, and the newest store says whether the server is up.
func (out metricsWriter) servers(apps []*App) (any bool) {
	stores := make(map[*sharedRedis]bool)
	servers := make(map[string]limiter.ServerStats)
	for _, app := range apps {
		if app.redis == nil || stores[app.redis] {
			continue
		}
		stores[app.redis] = true
		for _, s := range serverStats(app.redis.Redis) {
			servers[s.Address] = addStats(s, servers[s.Address])
		}
	}
	for _, s := range servers {
		up := 0
		if s.Up {
			up = 1
		}
		out.gauge(redisUpDesc, up, s.Address)
		out.counter(redisCallsDesc, s.Calls, s.Address)
		out.counter(redisRequestsDesc, s.Requests, s.Address)
		for reason, n := range s.Failures {
			out.counter(redisFailuresDesc, n, s.Address, reason)
		}
		out.gauge(redisConnectionsDesc, s.Idle, s.Address, "idle")
		out.gauge(redisConnectionsDesc, s.InUse, s.Address, "in_use")
		out.gauge(redisConnectionsDesc, s.Connecting, s.Address, "connecting")
	}
	return len(stores) > 0
}

// addStats returns s with what happened on the same server by an older store.
func addStats(s, older limiter.ServerStats) limiter.ServerStats {
	s.Idle += older.Idle
	s.InUse += older.InUse
	s.Connecting += older.Connecting
	s.Calls += older.Calls
	s.Requests += older.Requests
	failures := make(map[string]uint64)
	for _, of := range []limiter.ServerStats{s, older} {
		for reason, n := range of.Failures {
			failures[reason] += n
		}
	}
	s.Failures = failures
	return s
}
