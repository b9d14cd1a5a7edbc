package faults

import (
	"strings"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// perServer is the most connections that a node has to a server: one, and one that is
// being made in its place.
const perServer = 2

// outage is a time during which nodes cannot reach Redis, under load.
type outage struct {
	nodes  []*node
	server *redistest.Server
	rate   int // requests a second for each node

	before, lasts, after time.Duration
	cycles               int
	begin, end           func()

	// The reason that must be logged.
	reason string
	// How soon Redis decides again after the end; 0 means 2 s.
	within time.Duration
}

// run performs the outage and judges what all outages have in common.
func (o outage) run(tr *trial) {
	tr.Helper()
	o.cycles = max(o.cycles, 1)
	if o.within == 0 {
		o.within = 2 * time.Second
	}
	before := make([]usage, len(o.nodes))
	for i, n := range o.nodes {
		n.get("first") // connects
		before[i] = n.usage()
	}
	began := time.Now()
	l := startLoad(tr, o.nodes, o.rate)
	time.Sleep(o.before)
	type span struct{ from, to time.Time }
	var down []span
	var recovery time.Duration
	for range o.cycles {
		from := time.Now()
		o.begin()
		time.Sleep(o.lasts)
		to := time.Now()
		o.end()
		down = append(down, span{from, to})
		recovery = max(recovery, eventually(tr, "Redis decides again on all nodes", func() bool {
			for _, n := range o.nodes {
				if count(n.events(to), back) == 0 {
					return false
				}
			}
			return true
		}))
		time.Sleep(o.after)
	}
	requests := l.stop()
	ended := time.Now()

	calm := percentile(between(requests, began.Add(o.before/4), down[0].from), 0.99)
	var added, worst time.Duration
	waited := 0
	longest := time.Duration(0)
	for _, d := range down {
		added = max(added, percentile(between(requests, d.from.Add(time.Second), d.to), 0.99)-calm)
		longest = max(longest, d.to.Sub(d.from)+recovery)
		affected := between(requests, d.from, d.to.Add(recovery))
		worst = max(worst, percentile(affected, 1))
		for i := range o.nodes {
			waited = max(waited, slower(affected, i, timeout-5*time.Millisecond))
		}
	}
	most(tr, "5xx", strange(requests), 0)
	most(tr, "longest wait", worst, timeout+slack)
	most(tr, "p99 from 1 s on: added", added, 5*time.Millisecond)
	most(tr, "requests of a node that waited out the timeout", waited, 5+int(float64(o.rate)*timeout.Seconds())+int(5*longest.Seconds()))
	most(tr, "back after", recovery, o.within)

	hot, slow := apart(len(o.nodes), longest)
	overAdmitted(tr, requests, o.cycles*hot, o.cycles*slow)
	most(tr, "under-admitted", shortfall(requests), size*o.cycles)
	o.lines(tr, began, ended)
	for i, n := range o.nodes {
		eventually(tr, "goroutines and connections are back to where they were", func() bool {
			now := n.usage()
			return now.goroutines <= before[i].goroutines+5 && now.files <= before[i].files+perServer+5
		})
	}
	settled(tr, o.server)
}

// lines judges what the nodes logged.
func (o outage) lines(tr *trial, began, ended time.Time) {
	tr.Helper()
	lines := 0
	for _, n := range o.nodes {
		events := n.events(began)
		lines = max(lines, len(events))
		tr.is("reason "+o.reason, strings.Contains(reasons(events), o.reason))
	}
	most(tr, "lines logged by a node", lines, 2*o.cycles+int(ended.Sub(began).Seconds()/2))
}

// settled judges what is left in Redis: connections, and that every bucket
// expires.
func settled(tr *trial, servers ...*redistest.Server) {
	tr.Helper()
	for _, s := range servers {
		ctx := tr.Context()
		keys, err := s.Client().Keys(ctx, "*").Result()
		if err != nil {
			tr.Fatal(err)
		}
		for _, key := range keys {
			ttl, err := s.Client().PTTL(ctx, key).Result()
			if err != nil {
				tr.Fatal(err)
			}
			drain := size * rate
			if strings.Contains(key, "}:slow") {
				drain = slowSize * slowRate
			}
			if ttl == -1 || ttl > drain+2*time.Second {
				tr.Errorf("a bucket expires in %v, and takes %v to drain", ttl, drain)
			}
		}
	}
}
