package main

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
)

// column is one of a table's.
type column struct {
	head string
	cell func(*measurement, variant) string
}

// table has a line for each variant, in Markdown.
func (m *measurement) table(columns []column, variants []variant) string {
	rows := make([][]string, len(variants))
	for i, v := range variants {
		for _, c := range columns {
			rows[i] = append(rows[i], c.cell(m, v))
		}
	}
	head := make([]string, len(columns))
	for i, c := range columns {
		head[i] = c.head
	}
	return markdown(head, rows)
}

// markdown returns a table. Columns that begin with a digit in any row are
// numbers.
func markdown(head []string, rows [][]string) string {
	rules := make([]string, len(head))
	for i := range rules {
		rules[i] = "---"
		for _, row := range rows {
			if row[i] != "" && row[i][0] >= '0' && row[i][0] <= '9' {
				rules[i] = "---:"
			}
		}
	}
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 1, ' ', 0)
	for _, row := range slices.Concat([][]string{head, rules}, rows) {
		fmt.Fprintf(w, "| %s\t|\n", strings.Join(row, "\t| "))
	}
	_ = w.Flush()
	return b.String()
}

// The columns that tables choose from.
var (
	colAsked     = column{"requests", func(_ *measurement, v variant) string { return v.asked() }}
	colLimiter   = column{"limiter", func(_ *measurement, v variant) string { return v.limiter }}
	colProcesses = column{"processes", func(_ *measurement, v variant) string { return count(v.processes) }}
	colAway      = column{"Redis", func(_ *measurement, v variant) string {
		switch {
		case !usesRedis(v.limiter):
			return ""
		case v.far:
			return fmt.Sprintf("%d ms away", away.Milliseconds())
		}
		return "near"
	}}
	colConnections   = column{"connections", func(_ *measurement, v variant) string { return count(v.connections) }}
	colKeys          = column{"keys", func(_ *measurement, v variant) string { return count(v.keys) }}
	colLimits        = column{"limits", func(_ *measurement, v variant) string { return count(v.limits) }}
	colRate          = column{"requests/s", func(m *measurement, v variant) string { return spread(m.figures(v, rate)) }}
	colRatio         = column{"ratio", func(m *measurement, v variant) string { return spread(m.ratios(v)) }}
	colP50           = medianOf("p50 ms", p50)
	colP99           = medianOf("p99 ms", p99)
	colCaddyCPU      = medianOf("Caddy µs", func(r result) float64 { return r.caddyCPU })
	colCalls         = redisOnly(medianOf("Redis calls", redisCalls))
	colCallsAdmitted = redisOnly(medianOf("calls/admitted", func(r result) float64 { return r.callsAdmitted }))
	colRedisCPU      = redisOnly(medianOf("Redis µs", redisCPU))
	colAdmitted      = medianOf("admitted/s", func(r result) float64 { return r.admitted })
	colRedisBusy     = redisOnly(column{"Redis busy", func(m *measurement, v variant) string {
		return fmt.Sprintf("%.0f %%", m.median(v, func(r result) float64 { return r.redisCPUPerSecond })/1e4)
	}})
)

func medianOf(head string, f func(result) float64) column {
	return column{head, func(m *measurement, v variant) string { return figure(m.median(v, f)) }}
}

// addedOf is how much more a figure is than that of the baseline.
func addedOf(head string, f func(result) float64) column {
	return column{head, func(m *measurement, v variant) string {
		if v.limiter == bare {
			return ""
		}
		return figure(median(m.added(v, f)))
	}}
}

// redisOnly leaves a column empty where there is no Redis.
func redisOnly(c column) column {
	cell := c.cell
	c.cell = func(m *measurement, v variant) string {
		if !usesRedis(v.limiter) {
			return ""
		}
		return cell(m, v)
	}
	return c
}

// spread returns the median of figures, and the least and the greatest if these
// are not the same.
func spread(figures []float64) string {
	least, greatest := figure(slices.Min(figures)), figure(slices.Max(figures))
	if least == greatest {
		return least
	}
	return fmt.Sprintf("%s (%s–%s)", figure(median(figures)), least, greatest)
}

// figure returns a number to three digits, or to the next integer if that has
// more; below 1 to two, and never more than four behind the point. What is an
// integer stays one.
func figure(x float64) string {
	switch {
	case x < 0:
		return "-" + figure(-x)
	case x == math.Trunc(x):
		return count(int(x))
	case x < 0.01:
		return strconv.FormatFloat(x, 'f', 4, 64)
	case x < 0.1:
		return strconv.FormatFloat(x, 'f', 3, 64)
	case x < 10:
		return strconv.FormatFloat(x, 'f', 2, 64)
	case x < 100:
		return strconv.FormatFloat(x, 'f', 1, 64)
	}
	return count(int(x + 0.5))
}

// count returns an integer with spaces between each three digits, if there are
// five or more of them.
func count(n int) string {
	s := strconv.Itoa(n)
	if len(s) < 5 {
		return s
	}
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + " " + s[i:]
	}
	return s
}
