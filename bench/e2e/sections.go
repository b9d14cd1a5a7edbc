package main

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
)

// section is a part of a document about whole requests.
type section struct {
	mark   string      // of the document, as in documents.set
	groups [][]variant // what is measured for it, each group in turns
	text   func() (string, error)
}

// requests are the variants of the first table.
func (m *measurement) requests() []variant {
	c := m.connections[0]
	return withBaselines(slices.Concat(
		oneKey.by(c, header, inProcess, mholt),
		manyKeys.by(c, header),
		manyKeys.by(c, limiters...),
		eight.by(c, onRedis, redisRate, evalsha, oneCall),
		flood.by(c, limiters...),
		routed.by(c, limiters...),
	))
}

func (m *measurement) requestsTable() string {
	return m.table([]column{
		colAsked, colLimiter, colRate, colRatio, colP50, colP99, colCaddyCPU, colCalls, colRedisCPU,
	}, m.requests())
}

// summary is what most readers want of the first table.
func (m *measurement) summary() string {
	c := m.connections[0]
	some := []string{inProcess, mholt, onRedis, redisRate}
	return m.table([]column{
		colAsked, colLimiter, colRate, colRatio, colP99, colCaddyCPU, colCalls, colRedisCPU,
	}, withBaselines(slices.Concat(manyKeys.by(c, some...), flood.by(c, some...))))
}

// swept is the workloads measured at each number of connections, by their names in
// the plot.
var swept = []struct {
	name string
	variant
}{
	{"allowed, 100 000 keys", manyKeys},
	{"denied flood on one key", flood},
}

// write measures everything about whole requests and puts it into the
// documents.
// Each text is made as soon as its figures are measured, because the next section
// may measure the same again.
func (m *measurement) write(ctx context.Context, d *documents) error {
	c := m.connections[0]
	sweep := make([][]variant, len(m.connections)-1)
	for i := range sweep {
		for _, s := range swept {
			sweep[i] = append(sweep[i], s.by(m.connections[i+1], limiters...)...)
		}
	}
	processes := make([]variant, 0, 3*len(m.processes))
	for _, n := range m.processes {
		v := manyKeys
		v.processes = n
		processes = append(processes, v.by(c, onRedis, redisRate, evalsha)...)
	}
	keys := make([]variant, 0, 2*len(m.keys))
	for _, n := range m.keys {
		keys = append(keys, variant{draw: draw{keys: n}, limits: 1, processes: 1}.by(c, inProcess, onRedis)...)
	}
	limits := make([]variant, 0, 2*len(m.limits))
	for _, n := range m.limits {
		limits = append(limits, variant{draw: draw{keys: 10_000}, limits: n, processes: 1}.by(c, inProcess, onRedis)...)
	}
	text := func(text func() string) func() (string, error) {
		return func() (string, error) { return text(), nil }
	}
	table := func(variants []variant, columns ...column) func() (string, error) {
		return text(func() string { return m.table(columns, withBaselines(variants)) })
	}
	sections := []section{
		{"machine", nil, text(func() string { return m.machine(ctx) })},
		{"requests", [][]variant{m.requests()}, text(m.requestsTable)},
		{"summary", nil, text(m.summary)}, // of the same figures
		{"connections", sweep, text(func() string {
			d.plots[""] = plot("Throughput and p99 against connections", m.panels())
			return m.connectionsTables()
		})},
		{"floods", nil, func() (string, error) { return m.floods(ctx) }},
		{"processes", [][]variant{processes}, table(processes, colProcesses, colLimiter, colRate, colRatio, colCalls, colRedisCPU, colRedisBusy)},
		{"keys", [][]variant{keys}, table(keys, colKeys, colLimiter, colRate, colRatio, colP99, colCalls, colRedisCPU)},
		{"limits", [][]variant{limits}, table(limits, colLimits, colLimiter, colRate, colRatio, colP99, colCalls, colRedisCPU)},
		{"fleet", nil, text(m.fleet)},
		{hotKeys, m.hotGroups(), text(func() string { return m.machine(ctx) + "\n\n" + m.hotTables() })},
		{hotKeys + "-summary", nil, text(m.hotSummary)}, // of the same figures
		{addedLatency, m.addedGroups(), text(func() string {
			d.plots["-added"] = plot("Latency against requests a second", m.addedPanels())
			return m.machine(ctx) + "\n\n" + m.addedTable()
		})},
	}
	sections = slices.DeleteFunc(sections, func(s section) bool { return !strings.HasPrefix(s.mark, m.only) })
	for _, s := range sections { // before any measurement is wasted
		if err := d.set(s.mark, ""); err != nil {
			return err
		}
	}
	for _, s := range sections {
		for _, g := range s.groups {
			if err := m.measure(ctx, s.mark, g); err != nil {
				return err
			}
		}
		text, err := s.text()
		if err != nil {
			return err
		}
		if err := d.set(s.mark, text); err != nil {
			return err
		}
		if err := m.afresh(ctx); err != nil {
			return err
		}
	}
	return nil
}

// connectionsTables has what is plotted in numbers.
func (m *measurement) connectionsTables() string {
	connections := slices.Sorted(slices.Values(m.connections))
	head := make([]string, 1, 1+len(connections))
	head[0] = "limiter"
	for _, c := range connections {
		head = append(head, count(c))
	}
	texts := make([]string, 0, len(swept))
	for _, s := range swept {
		rows := make([][]string, 0, 1+len(limiters))
		for _, l := range append([]string{bare}, limiters...) {
			row := make([]string, 1, 1+len(connections))
			row[0] = l
			for _, c := range connections {
				v := s.orBaseline(c, l)
				row = append(row, fmt.Sprintf("%s, %s ms", spread(m.ratios(v)), colP99.cell(m, v)))
			}
			rows = append(rows, row)
		}
		texts = append(texts, strings.ToUpper(s.name[:1])+s.name[1:]+":\n\n"+markdown(head, rows))
	}
	return strings.Join(texts, "\n")
}

// panels are those of the plot: throughput above, latency below.
func (m *measurement) panels() []panel {
	connections := slices.Sorted(slices.Values(m.connections))
	above, below := make([]panel, 0, len(swept)), make([]panel, 0, len(swept))
	for _, s := range swept {
		throughput := panel{title: s.name, label: "throughput, bare Caddy = 1", across: "connections"}
		latency := panel{title: s.name, label: "p99, ms", across: "connections", log: true}
		for _, l := range append([]string{bare}, limiters...) {
			ratio, slowest := line{name: l}, line{name: l}
			for _, c := range connections {
				v := s.orBaseline(c, l)
				ratio.points = append(ratio.points, point{float64(c), median(m.ratios(v))})
				slowest.points = append(slowest.points, point{float64(c), m.median(v, p99)})
			}
			throughput.lines = append(throughput.lines, ratio)
			latency.lines = append(latency.lines, slowest)
		}
		above, below = append(above, throughput), append(below, latency)
	}
	return slices.Concat(above, below)
}

// fleet extrapolates the cost of a decision in Redis to more decisions than one
// machine can make. The numbers are those of the tables above it.
func (m *measurement) fleet() string {
	c := m.connections[0]
	few := slices.Min(m.connections)
	most := slices.Max(m.limits)
	busy := m.median(manyKeys.by(c, onRedis)[0], redisCPU)
	idle := m.median(manyKeys.by(few, onRedis)[0], redisCPU)
	many := m.median(variant{draw: draw{keys: 10_000}, limits: most, processes: 1}.by(c, onRedis)[0], redisCPU)
	denied := flood.by(c, onRedis)[0]
	calls, asked := m.median(denied, redisCalls), m.median(denied, rate)

	const nodes, each, limits = 20, 10_000, 2
	decisions := float64(nodes * each * limits)
	dearest := max(busy, idle)
	primaries := math.Ceil(decisions * dearest / 1e6 / 0.6)

	return fmt.Sprintf(`Redis took %[1]s µs of CPU for a decision where Caddy had %[2]d requests under way at once, %[3]s µs where it had %[4]d, and %[5]s µs where each request had %[6]d limits to pass. It runs commands on one core. So one server like this one has room for 10⁶/%[1]s ≈ %[7]s decisions a second if its nodes are busy, and for 10⁶/%[3]s ≈ %[8]s if none of them ever has two requests at once.

*A cluster* of P primaries has room for P times as many, as far as keys are spread over the slots: a single key is on one primary. A request with limits of k different keys makes up to k calls.

*A fleet* costs Redis the sum of what its nodes cost, since a call never carries decisions of two nodes. On paper, %[9]d nodes that each serve %[10]s allowed requests a second with %[11]d limits make %[12]s decisions a second. At the higher cost, %[13]s µs, that is %[14]s cores; with no primary more than 60 %% busy, %[15]s primaries.

*Denials* of a client that goes on asking made %[16]s calls for each request, so a flood at one node's full speed, %[17]s requests a second here, puts %[18]s calls a second on Redis.`,
		figure(busy), c, figure(idle), few, figure(many), most,
		about(1e6/busy), about(1e6/idle),
		nodes, count(each), limits, count(int(decisions)), figure(dearest),
		figure(decisions*dearest/1e6), count(int(primaries)),
		figure(calls), about(asked), about(calls*asked))
}

// about returns a number of ten or more to two digits.
func about(x float64) string {
	if x < 10 {
		return figure(x)
	}
	unit := math.Pow(10, math.Floor(math.Log10(x))-1)
	return count(int(math.Round(x/unit) * unit))
}
