package main

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Hot keys are those that most requests have. A process may decide on them by itself, as
// the option consistency says, and what that saves depends on how far away Redis is.

// hotKeys is the mark of their tables in documents, and what that of their summary begins
// with.
const hotKeys = "hot-keys"

var (
	// local are the limiters that are measured with hot keys. The last is for comparison.
	local = []string{onRedis, leased, eventual, redisRate}

	// floors are what is left without Redis: the header fields, and with them the handler.
	floors = []string{header, inProcess}

	zipfKeys = variant{draw: draw{keys: 100_000, zipf: 1.1}, limits: 1, processes: 1}
	drips    = variant{draw: draw{keys: 1}, limits: 1, perSecond: 1000, processes: 1}
)

// pause leaves time between requests, so that what a limiter adds to them is not mostly the
// time for which they wait for a CPU.
const pause = 40 * time.Millisecond

// pausedTimes is how many times as long as other runs those with pauses last: at the start
// nothing is known of a key, and that is not to be what the slowest requests wait for.
const pausedTimes = 2

// hot returns what is measured of v at so many connections.
func (v variant) hot(connections int) []variant {
	far := v
	far.far = true
	return slices.Concat(v.by(connections, floors...), v.by(connections, local...), far.by(connections, local...))
}

// hotThroughput is measured as fast as wrk can, in groups, and hotFlood with the first.
func (m *measurement) hotThroughput() (groups [][]variant) {
	for _, v := range []variant{oneKey, zipfKeys} {
		for _, c := range m.hotConnections {
			groups = append(groups, v.hot(c))
		}
	}
	return groups
}

// hotFlood is more requests than the limit allows.
func (m *measurement) hotFlood() []variant { return drips.by(m.hotConnections[0], local...) }

// hotLatency is requests with pauses, and Redis far away.
func (m *measurement) hotLatency() (variants []variant) {
	for _, v := range []variant{oneKey, zipfKeys} {
		v.far, v.pause = true, pause
		variants = append(variants, v.by(m.hotConnections[0], local...)...)
	}
	return variants
}

// hotGroups is all that is measured of hot keys.
func (m *measurement) hotGroups() [][]variant {
	groups := m.hotThroughput()
	groups[0] = append(groups[0], m.hotFlood()...) // they have the same baseline
	return append(groups, m.hotLatency())
}

func (m *measurement) hotTables() string {
	var throughput []variant
	for _, g := range m.hotThroughput() {
		throughput = append(throughput, withBaselines(g)...)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "Below the limit:\n\n%s", m.table([]column{
		colAsked, colConnections, colAway, colLimiter, colRate, colRatio, colP50, colP99, colCaddyCPU, colCallsAdmitted,
	}, throughput))
	fmt.Fprintf(&b, "\nA flood on one key with a limit of %s a second, Redis near, %d connections:\n\n%s",
		count(drips.perSecond), m.hotConnections[0], m.table([]column{
			colLimiter, colRate, colRatio, colAdmitted, colP99, colCaddyCPU, colCalls, colCallsAdmitted,
		}, withBaselines(m.hotFlood())))
	fmt.Fprintf(&b, "\nLatency that is added where there is time left: Redis %d ms away, %d connections that wait %d ms on average before each request:\n\n%s",
		away.Milliseconds(), m.hotConnections[0], pause.Milliseconds(), m.table([]column{
			colAsked, colLimiter, colRate, colP50, colP99, addedOf("added p50 ms", p50), addedOf("added p99 ms", p99), colCallsAdmitted,
		}, withBaselines(m.hotLatency())))
	return b.String()
}

// hotSummary is what most readers want of it.
func (m *measurement) hotSummary() string {
	c := m.hotConnections[0]
	each := func(v variant, of func(variant) float64) string {
		figures := make([]string, len(local))
		for i, v := range v.by(c, local...) {
			figures[i] = figure(of(v))
		}
		return strings.Join(figures, ", ")
	}
	ratio := func(v variant) float64 { return median(m.ratios(v)) }
	far, paused := oneKey, oneKey
	far.far, paused.far, paused.pause = true, true, pause
	return fmt.Sprintf("With one hot key below its limit, [`consistency`](../far.md) `exact`, `lease 100ms` and `eventual 100ms`, and redis_rate, serve %s of what bare Caddy does with Redis near, and %s with Redis %d ms away, where they add %s ms at the median. In a flood on one key with a limit of %s a second it is %s. ([More](../../bench/results.md#hot-keys); `cd bench && go run ./e2e -only hot-keys` measures and prints it.)",
		each(oneKey, ratio), each(far, ratio), away.Milliseconds(),
		each(paused, func(v variant) float64 { return median(m.added(v, p50)) }),
		count(drips.perSecond), each(drips, ratio))
}
