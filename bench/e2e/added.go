package main

import (
	"fmt"
	"slices"
)

// addedLatency is the mark of the table of what limiters add to each request on a server
// that has time left.
const addedLatency = "added"

// addedGroups is what is measured, a group for each pace.
func (m *measurement) addedGroups() [][]variant {
	groups := make([][]variant, len(m.paces))
	for i, pace := range m.paces {
		v := manyKeys
		v.paced = pace
		groups[i] = v.by(m.connections[0], inProcess, mholt, onRedis, eventual, redisRate)
	}
	return groups
}

// addedTable has a line for each limiter, and what it adds to the latency of bare Caddy in
// brackets.
func (m *measurement) addedTable() string {
	groups := m.addedGroups()
	head := []string{"limiter"}
	rows := make([][]string, 1+len(groups[0]))
	for i, g := range groups {
		head = append(head, count(m.paces[i])+"/s: p50 ms", "p99 ms")
		for j, v := range slices.Insert(g, 0, g[0].baseline()) {
			if i == 0 {
				rows[j] = []string{v.limiter}
			}
			for _, of := range []func(result) float64{p50, p99} {
				cell := figure(m.median(v, of))
				if v.limiter != bare {
					cell += fmt.Sprintf(" (%+.2f)", median(m.added(v, of)))
				}
				rows[j] = append(rows[j], cell)
			}
		}
	}
	return markdown(head, rows)
}

// addedPanels are those of its plot: the latency of all limiters at each pace.
func (m *measurement) addedPanels() []panel {
	panels := []panel{
		{title: "Median latency", label: "ms", across: "requests a second", log: true},
		{title: "p99", label: "ms", across: "requests a second", log: true},
	}
	for i, g := range m.addedGroups() {
		for j, v := range slices.Insert(g, 0, g[0].baseline()) {
			for k, of := range []func(result) float64{p50, p99} {
				if i == 0 {
					panels[k].lines = append(panels[k].lines, line{name: v.limiter})
				}
				panels[k].lines[j].points = append(panels[k].lines[j].points, point{float64(m.paces[i]), m.median(v, of)})
			}
		}
	}
	return panels
}
