package faults

import (
	"flag"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

var soak = flag.Duration("soak", 0, "how long TestSoak runs; 0 skips it")

const (
	soakRate = 47 // of hot requests a second for each node: with the slow ones, 180 for all

	// What happens during a soak, and how often.
	soakReload = 20 * time.Second
	soakFlush  = 7 * time.Second
	soakKill   = 3 * time.Second

	// disturbed is how long after connections were closed, or Redis's settings
	// changed, requests may be decided by a node alone.
	disturbed = 2 * timeout
)

// span is a time during which a node may decide requests alone.
type span struct {
	node     int // -1: any
	from, to time.Time
}

// TestSoak guards what only shows when nodes run for long under load, while they
// are reloaded and Redis closes their connections and forgets its scripts: at the
// end they hold no more memory, goroutines and connections than at the beginning,
// and have admitted beyond the bound only what a node may have decided alone.
func TestSoak(t *testing.T) {
	if *soak == 0 {
		t.Skip("takes minutes: asked for by -soak")
	}
	tr := &trial{T: t}
	defer func() {
		for _, finding := range tr.wrong {
			t.Errorf("not so: %s", finding)
		}
	}()
	server := redistest.Start(t)
	kinds := []struct {
		name    string
		options string
		extra   string
	}{
		{"as before", "", ""},
		{"another header field", "", "header X-Soak 1"},
		{"another timeout", "timeout 51ms", ""},
		{"another timeout", "timeout 60ms", ""},
	}
	config := func(i int) func(*node) string {
		kind := kinds[i%len(kinds)]
		return caddyfile(redisAt(server.Addr, kind.options), kind.extra+site)
	}
	nodes := startNodes(t, 3, config(0))
	for _, n := range nodes {
		n.get("first") // connects
	}

	var spans []span
	disturb := func(node int, do func()) {
		from := time.Now()
		do()
		spans = append(spans, span{node, from, time.Now().Add(disturbed)})
	}
	began := time.Now()
	l := startLoad(t, nodes, soakRate)
	samples := make([][]held, len(nodes)) // just before reloads, when what the last reload replaced is closed
	var connected []int
	reloads, flushes, kills := 0, 0, 0
	sample := began.Add(soakReload - time.Second)
	reload, flush, kill := began.Add(soakReload), began.Add(soakFlush), began.Add(soakKill)
	for now := began; now.Sub(began) < *soak; now = time.Now() {
		switch {
		case now.After(sample):
			sample = sample.Add(soakReload)
			// Nodes hold a goroutine and a file for each connection of the load.
			l.client.CloseIdleConnections()
			time.Sleep(100 * time.Millisecond)
			for i, n := range nodes {
				samples[i] = append(samples[i], held{n.usage(), n.heap()})
				t.Logf("after %s node %d holds %+v", time.Since(began).Round(time.Second), i+1, samples[i][len(samples[i])-1])
			}
			connected = append(connected, clients(tr, server))
		case now.After(reload):
			reload = reload.Add(soakReload)
			reloads++
			for i, n := range nodes {
				disturb(i, func() {
					if err := n.reload(config(reloads)); err != nil {
						t.Fatal(err)
					}
				})
			}
		case now.After(flush):
			flush = flush.Add(soakFlush)
			flushes++
			redistest.Done(t, server.Client().ScriptFlush(t.Context()))
		case now.After(kill):
			kill = kill.Add(soakKill)
			kills++
			disturb(-1, func() { killClients(tr, server) })
		}
		time.Sleep(10 * time.Millisecond)
	}
	requests := l.stop()
	took := time.Since(began)

	for i, n := range nodes {
		lostAt := time.Time{}
		for _, e := range n.events(began) {
			switch e.Level {
			case lost:
				lostAt = e.at().Add(-timeout)
			case back:
				if !lostAt.IsZero() {
					spans = append(spans, span{i, lostAt, e.at().Add(disturbed)})
				}
				lostAt = time.Time{}
			}
		}
		if !lostAt.IsZero() {
			spans = append(spans, span{i, lostAt, time.Now()})
		}
	}
	var together []request
	for _, r := range requests {
		if !mayBeAlone(r, spans) {
			together = append(together, r)
		}
	}

	// A reload replaces the listeners, and may close a connection just when a
	// request is being sent.
	cut := unanswered(requests)
	tr.note("%s, %d requests (%.0f a second); %d reloads of each node, %d SCRIPT FLUSH, %d CLIENT KILL",
		took.Round(time.Second), len(requests), float64(len(requests))/took.Seconds(), reloads, flushes, kills)
	most(tr, "5xx", strange(requests)-cut, 0)
	most(tr, "connections closed by Caddy", cut, len(nodes)*(reloads+1))
	tr.note("p99 %s, longest wait %s", show(percentile(requests, 0.99)), show(percentile(requests, 1)))
	tr.note("over-admitted %d, by slow limits %d", excess(requests, false), excess(requests, true))
	most(tr, "requests that a node may have decided alone, of 100", 100*(len(requests)-len(together))/len(requests), 25)
	tr.note("without these")
	overAdmitted(tr, together, 0, 0)
	most(tr, "under-admitted", shortfall(requests), 2*size+cut)
	for i := range nodes {
		tr.note("by node %d alone", i+1)
		overAdmitted(tr, ofNode(requests, i), 0, 0)
	}
	steady(tr, samples)
	if len(connected) > 0 {
		most(tr, "connections to Redis", slices.Max(connected), len(nodes)*perServer)
	}
	settled(tr, server)

	row := fmt.Sprintf("%s\n", strings.Join(tr.findings, "; "))
	t.Log(row)
	if *table != "" && len(tr.wrong) == 0 {
		if err := rewrite(*table, "soak", row); err != nil {
			t.Fatal(err)
		}
	}
}

// mayBeAlone reports whether a node may have decided a request without Redis:
// there was a disturbance, or the request took so long that Redis may have timed
// out.
func mayBeAlone(r request, spans []span) bool {
	if r.got.Sub(r.sent) >= timeout/2-5*time.Millisecond {
		return true
	}
	return slices.ContainsFunc(spans, func(s span) bool {
		return (s.node < 0 || s.node == r.node) && r.got.After(s.from) && r.sent.Before(s.to)
	})
}

// clients returns the number of connections to a server, without those of the
// test.
func clients(tr *trial, s *redistest.Server) int {
	tr.Helper()
	list, err := s.Client().Do(tr.Context(), "client", "list", "type", "normal").Text()
	if err != nil {
		tr.Fatal(err)
	}
	return strings.Count(list, "\n") - 1
}

// held is what a process holds, and the part of its memory that is in use, in kB.
type held struct {
	usage
	heap int
}

// heap returns the memory that the node uses, in kB, after a garbage collection.
func (n *node) heap() int {
	n.t.Helper()
	profile, err := n.debug("heap?gc=1&debug=1")
	if err != nil {
		n.t.Fatal(err)
	}
	_, rest, _ := strings.Cut(profile, "# HeapAlloc = ")
	var bytes int
	if _, err := fmt.Sscan(rest, &bytes); err != nil {
		n.t.Fatal(err)
	}
	return bytes >> 10
}

// steady judges what each node held at some times, in the same state except for
// requests in flight: in the last third hardly more than in the first. The minimum
// counts, because leaks never shrink.
func steady(tr *trial, samples [][]held) {
	tr.Helper()
	for i, s := range samples {
		if len(s) < 4 {
			tr.note("node %d: too short to judge what it holds", i+1)
			continue
		}
		third := (len(s) - 1) / 3
		first, last := s[1:1+third], s[len(s)-third:] // without the first, while all is new
		tr.note("node %d", i+1)
		for _, of := range []struct {
			what string
			more int // the largest allowed increase
			get  func(held) int
		}{
			{"resident kB", 12 << 10, func(h held) int { return h.rss }},
			{"used kB", 2 << 10, func(h held) int { return h.heap }},
			{"goroutines", 3, func(h held) int { return h.goroutines }},
			{"files", 5, func(h held) int { return h.files }},
		} {
			floor := func(s []held) int {
				least := of.get(s[0])
				for _, h := range s[1:] {
					least = min(least, of.get(h))
				}
				return least
			}
			before := floor(first)
			most(tr, fmt.Sprintf("%s %d →", of.what, before), floor(last), before+of.more)
		}
	}
}
