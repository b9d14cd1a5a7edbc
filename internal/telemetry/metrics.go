package telemetry

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/adaptive"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Register registers the metrics in the registry of a config, unless they are
// registered already.
//
// The app does so, and so does a module of the admin endpoint: Caddy replaces that
// endpoint before it provisions apps, and does not go back if one of them fails, so
// that what only apps register would be missing until the next config is loaded.
// Therefore the metrics are for the process, whichever config they are
// registered by. A config with metrics off is respected when they are collected.
func (p *Process) Register(registry *prometheus.Registry) error {
	if registry == nil {
		return nil // a context that Caddy did not make has none
	}
	err := registry.Register(p)
	var registered prometheus.AlreadyRegisteredError
	if errors.As(err, &registered) && registered.ExistingCollector == p {
		return nil
	}
	return err
}

// newDesc returns the description of a metric, and adds it to metricDescs.
func newDesc(name, help string, labels ...string) *prometheus.Desc {
	desc := prometheus.NewDesc(metricsPrefix+name, help, labels, nil)
	metricDescs = append(metricDescs, desc)
	return desc
}

var metricDescs []*prometheus.Desc

// metricsPrefix is how the names of all metrics begin.
const metricsPrefix = "caddy_rate_limit_"

// The metrics, other than redisWait. Labels only have values from the config, never
// of requests: their number must not depend on what clients send.
var (
	decisionsDesc = newDesc("decisions_total",
		"Decisions, one for each limit that a request met. result: admitted, denied, spared (it had room, but another limit "+
			"denied), would_deny (a dry run) or banned (denied during a ban). by: who decided.", "limit", "result", "by")
	checkedDesc = newDesc("checked_requests_total",
		"Requests that met a limit, each counted once, at its end: admitted, denied, undecided (on_error allow or deny), refused (a "+
			"number or matcher could not be evaluated) or early_data.", "result")
	nearDesc = newDesc("near_limit_total",
		"Admitted requests that left the bucket at least 80 percent full, unless a single request fills an empty bucket "+
			"that far.", "limit")
	unitsDesc = newDesc("units_total",
		"Units charged; with count and actual_cost, once the outcome is known.", "limit")
	overDesc = newDesc("over_size_total",
		"Requests that soft admitted above the size, or would in a dry run.", "limit")
	delayedDesc = newDesc("delayed_total",
		"Requests that max_delay made wait, or would in a dry run, or whose responses speed made wait.", "limit")
	displacedDesc = newDesc("displaced_total",
		"Waiting requests that were denied in favour of a client with fewer.", "limit")
	waitingDesc = newDesc("waiting",
		"Requests that max_delay makes wait now, or whose responses speed makes wait.", "limit")
	waitingClientsDesc = newDesc("waiting_clients",
		"Clients whose requests or responses wait in a queue now.", "limit")
	bansDesc = newDesc("bans_total",
		"Bans that have begun, or would in a dry run.", "limit")
	borrowedDesc = newDesc("borrowed_total",
		"Requests for which the limit had no room, but its pool did.", "limit")
	unclearDesc = newDesc("unclear_total",
		"Requests whose field in the key was unclear, which share one bucket.", "limit")
	openDesc = newDesc("open_connections",
		"Connections that are open now, at a limit of connections with concurrency.", "limit")
	leasedDesc = newDesc("lease_units_total",
		"Units of consistency lease that Redis granted, and that were used. The rest have expired.",
		"limit", "result")
	loadLimitDesc = newDesc("load_limit",
		"Requests that concurrency auto allows in progress now, for all keys.", "limit")
	loadProgressDesc = newDesc("load_in_progress",
		"Requests in progress that take room.", "limit")
	loadUncountedDesc = newDesc("load_uncounted",
		"Requests in progress that take no room: overdue (for more than twice latency) or body (while their clients send it).", "limit", "why")
	loadMeanDesc = newDesc("load_mean_seconds",
		"The current mean time to the response header; with several keys, the longest.", "limit")
	loadLatencyDesc = newDesc("load_latency_seconds",
		"The option latency.", "limit")
	loadAtMinDesc = newDesc("load_at_min_seconds_total",
		"Time spent at min while there were more requests to serve.", "limit")
	loadShedDesc = newDesc("load_shed_total",
		"Requests turned away, or that would be in a dry run: high, normal or low.", "limit", "class")
	buildDesc = newDesc("build_info",
		"Always 1: the version of this module.", "version")
	infoDesc = newDesc("limit_info",
		"Always 1. A number is dynamic if it depends on the request, mixed if unnamed limits in JSON differ in it, and empty if "+
			"the algorithm has none.",
		"limit", "algorithm", "size", "drip_rate", "drip_size", "window")

	bucketsDesc = newDesc("memory_buckets",
		"Buckets in this process.", "limit")
	bucketsMaxDesc = newDesc("memory_buckets_max",
		"The maximum number of buckets: up to max_keys each for keys, clients without a key, and bans.", "limit")
	sharedDesc = newDesc("memory_shared_decisions_total",
		"Requests decided by shared buckets because the limit was full.", "limit")
	forgottenDesc = newDesc("memory_forgotten_total",
		"Buckets forgotten to make room for others because the limit was full.", "limit")

	savedDesc = newDesc("memory_saved_timestamp_seconds",
		"When the buckets were last written to their file, in seconds since 1970.")

	redisUpDesc = newDesc("redis_up",
		"1 if the server has answered within the last ten seconds, 0 if it is down or has not answered yet.", "server")
	redisCallsDesc = newDesc("redis_calls_total",
		"Calls of the script.", "server")
	redisRequestsDesc = newDesc("redis_called_requests_total",
		"Requests in these calls. Divided by the calls, the size of a batch.", "server")
	redisFailuresDesc = newDesc("redis_failures_total",
		"Failures, by reason.", "server", "reason")
	redisConnectionsDesc = newDesc("redis_connections",
		"Connections that are idle, in_use or connecting.", "server", "state")
)

// newRedisWait returns the histogram of how long requests waited for Redis. All limits
// of a handler are decided at once, so it has no label.
func newRedisWait() prometheus.Histogram {
	return prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: metricsPrefix + "redis_wait_seconds",
		Help: "How long requests waited for Redis, as a classic and as a native histogram.",
		Buckets: []float64{
			.0001, .0002, .0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1,
		},
		NativeHistogramBucketFactor:     1.1,
		NativeHistogramMaxBucketNumber:  100,
		NativeHistogramMinResetDuration: time.Hour,
	})
}

// ObserveRedisWait records how long a request waited for decisions, unless it did
// not: what this process decides locally never uses Redis.
func (p *Process) ObserveRedisWait(waited time.Duration, decisions []limiter.Decision) {
	if len(decisions) > 0 && decidedHere(decisions) {
		return
	}
	p.redisWait.Observe(waited.Seconds())
}

// decidedHere reports whether this process decided the request, and did not mean to query
// Redis.
func decidedHere(decisions []limiter.Decision) bool {
	for i := range decisions {
		switch decisions[i].By {
		case limiter.DecidedByCache, limiter.DecidedByLease, limiter.DecidedByEventual, limiter.DecidedByLoad:
		case limiter.DecidedByMemory, limiter.DecidedByRedis, limiter.DecidedByFallback:
			return false
		}
	}
	return true
}

// Describe implements prometheus.Collector.
func (p *Process) Describe(descs chan<- *prometheus.Desc) {
	for _, desc := range metricDescs {
		descs <- desc
	}
	p.redisWait.Describe(descs)
}

// Collect implements prometheus.Collector. It reports the limits and servers of the
// configs in use: there are two while one replaces the other.
func (p *Process) Collect(collected chan<- prometheus.Metric) {
	p.mu.Lock()
	configs := slices.Clone(p.configs)
	p.mu.Unlock()
	if len(configs) == 0 || !configs[len(configs)-1].Metrics {
		return
	}
	out := metricsWriter(collected)
	out.gauge(buildDesc, 1, Version())
	out.limits(configs)
	if at := configs[len(configs)-1].Saved(); !at.IsZero() {
		out.write(savedDesc, prometheus.GaugeValue, float64(at.UnixMilli())/1000, nil)
	}
	for what, n := range p.Requests() {
		out.counter(checkedDesc, n, what.String())
	}
	if out.servers(configs, p.ServerStats) {
		p.redisWait.Collect(collected)
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
	resultNames = [...]string{"admitted", "denied", "banned", "spared", "would_deny"}
	resultsOf   = [len(resultNames)][]Result{{Admitted, Near}, {Denied, Shed}, {Banned}, {Spared}, {WouldDeny}}
)

var tallyDescs = [tallies]*prometheus.Desc{
	Units: unitsDesc, OverSize: overDesc, Delayed: delayedDesc, Displaced: displacedDesc, BansBegun: bansDesc, Borrowed: borrowedDesc,
	Unclear: unclearDesc,
}

// limits writes the metrics of limits, by path. With many limits most of a scrape is
// the sorting of series by the values of their labels, which takes almost no time if
// they come in that order.
func (out metricsWriter) limits(configs []*running) {
	limits := make(map[string]Limit)
	mayDecide := [deciders]bool{}
	for _, c := range configs { // the newest one's numbers win
		maps.Copy(limits, c.limits)
		for by := range mayDecide {
			mayDecide[by] = mayDecide[by] || limiter.Decider(by) == limiter.DecidedByLoad || (c.Redis != nil) != (limiter.Decider(by) == limiter.DecidedByMemory)
		}
	}
	newest := configs[len(configs)-1]
	usages, leases := make(map[string]limiter.LimitUsage), make(map[string]limiter.LeaseUsage)
	for _, u := range newest.usage() {
		sum := usages[limitPath(u.Name)]
		usages[limitPath(u.Name)] = limiter.LimitUsage{
			Buckets: sum.Buckets + u.Buckets, MaxKeys: sum.MaxKeys + u.MaxKeys, Forgotten: sum.Forgotten + u.Forgotten, Shared: sum.Shared + u.Shared,
			Held: sum.Held + u.Held,
		}
	}
	for _, l := range newest.leases() {
		sum := leases[limitPath(l.Name)]
		leases[limitPath(l.Name)] = limiter.LeaseUsage{Granted: sum.Granted + l.Granted, Used: sum.Used + l.Used}
	}
	paths := slices.Sorted(maps.Keys(limits))
	totalsOf := make([]Totals, len(paths))
	for i, path := range paths {
		totalsOf[i] = limits[path].Counters.Totals()
	}
	out.decisions(paths, limits, totalsOf, mayDecide)
	for i, path := range paths {
		l, totals := limits[path], &totalsOf[i]
		out.counter(nearDesc, totals.Of(Near), path)
		for what, n := range totals.Tallies {
			if Tally(what).Has(l.Policies) {
				out.counter(tallyDescs[what], n, path)
			}
		}
		if l.Policies.Has(Leases) && newest.Redis != nil || leases[path].Granted > 0 {
			out.counter(leasedDesc, uint64(leases[path].Granted), path, "granted") // not negative
			out.counter(leasedDesc, uint64(leases[path].Used), path, "used")       // not negative
		}
		if l.Load != nil {
			out.load(l.Load, path)
		}
		if l.Waiting != nil {
			waiting := l.Waiting()
			out.gauge(waitingDesc, waiting.Requests, path)
			out.gauge(waitingClientsDesc, waiting.Clients, path)
		}
		if l.Policies.Has(Open) {
			out.gauge(openDesc, int(usages[path].Held), path)
		}
		out.gauge(infoDesc, 1, path, l.Algorithm, l.Size, l.DripRate, l.DripSize, l.Window)

		usage := usages[path]
		out.gauge(bucketsDesc, usage.Buckets, path)
		out.gauge(bucketsMaxDesc, usage.MaxKeys, path)
		out.counter(sharedDesc, usage.Shared, path)
		out.counter(forgottenDesc, usage.Forgotten, path)
	}
}

// decisions writes how limits have decided on requests.
func (out metricsWriter) decisions(paths []string, limits map[string]Limit, totalsOf []Totals, mayDecide [deciders]bool) {
	for by := range limiter.Decider(deciders) {
		for i, path := range paths {
			for result, kinds := range resultsOf {
				options := limits[path].Policies
				if kinds[0] == WouldDeny && !options.Has(DryRun) || kinds[0] == Banned && !options.Has(Bans) {
					continue
				}
				if n := totalsOf[i].by(kinds...)[by]; n > 0 || (mayDecide[by] || options.Has(Connections)) && limits[path].mayBeDecidedBy(by) { // from 0 on, so that the first increase is seen
					out.counter(decisionsDesc, n, path, resultNames[result], by.String())
				}
			}
		}
	}
}

// load writes the metrics of a limit that follows the load.
func (out metricsWriter) load(controllers *adaptive.Controllers, path string) {
	s := controllers.State(time.Now())
	out.gauge(loadLimitDesc, s.Limit, path)
	out.gauge(loadProgressDesc, s.InProgress, path)
	out.gauge(loadUncountedDesc, s.Overdue, path, "overdue")
	out.gauge(loadUncountedDesc, s.Waiting, path, "body")
	if s.Mean > 0 {
		out.write(loadMeanDesc, prometheus.GaugeValue, s.Mean.Seconds(), []string{path})
	}
	out.write(loadLatencyDesc, prometheus.GaugeValue, controllers.Options.Latency.Seconds(), []string{path})
	out.write(loadAtMinDesc, prometheus.CounterValue, s.AtMin.Seconds(), []string{path})
	for class, n := range s.Shed {
		out.counter(loadShedDesc, n, path, adaptive.Class(class).String()) // there are few
	}
}

// mayBeDecidedBy reports whether the options of l allow that.
func (l Limit) mayBeDecidedBy(by limiter.Decider) bool {
	if l.Policies.Has(Load) || by == limiter.DecidedByLoad {
		return l.Policies.Has(Load) && by == limiter.DecidedByLoad
	}
	if l.Policies.Has(Connections) {
		return by == limiter.DecidedByMemory
	}
	switch by {
	case limiter.DecidedByLease:
		return l.Policies.Has(Leases)
	case limiter.DecidedByEventual:
		return l.Policies.Has(Eventual)
	case limiter.DecidedByMemory, limiter.DecidedByRedis, limiter.DecidedByCache, limiter.DecidedByFallback, limiter.DecidedByLoad:
	}
	return true
}

// Numbers of limits that are none.
const (
	DynamicNumber = "dynamic" // depends on the request
	mixedNumber   = "mixed"   // limits without a name disagree
)

// byPath returns the limits of each path as one. Those without a name share a path, and
// may have other numbers.
func byPath(limits []Limit) map[string]Limit {
	merged := make(map[string]Limit, len(limits))
	for _, l := range limits {
		if other, ok := merged[l.Counters.Path]; ok {
			l = l.merge(other)
		}
		merged[l.Counters.Path] = l
	}
	return merged
}

// merge returns what metrics say of l and another limit of the path.
func (l Limit) merge(other Limit) Limit {
	merge := func(text *string, other string) {
		if *text != other {
			*text = mixedNumber
		}
	}
	merge(&l.Algorithm, other.Algorithm)
	merge(&l.Size, other.Size)
	merge(&l.DripRate, other.DripRate)
	merge(&l.DripSize, other.DripSize)
	merge(&l.Window, other.Window)
	l.Policies |= other.Policies // their counts are for the path
	return l
}

// servers writes the metrics of the Redis servers of the configs, and reports whether
// there are any. Two configs may use different stores of one server: what happened is
// added up, and the newest store says whether the server is up.
func (out metricsWriter) servers(configs []*running, stats func(*limiter.Redis) []limiter.ServerStats) (any bool) {
	stores := make(map[*limiter.Redis]bool)
	servers := make(map[string]limiter.ServerStats)
	for _, c := range configs {
		store := c.Redis
		if store == nil || stores[store] {
			continue
		}
		stores[store] = true
		for _, s := range stats(store) {
			servers[s.Address] = addStats(s, servers[s.Address])
		}
	}
	for _, s := range servers {
		up := 0
		if s.State == limiter.ServerUp {
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
