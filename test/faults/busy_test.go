package faults

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// busyFaults are upstreams that get more than they can do, behind concurrency auto.
var busyFaults = []fault{
	{"46", "an upstream gets five times what it can do, without `concurrency auto` and with it; one node", surge},
	{"46 (errors)", "every second request fails at once; one node", fastErrors},
	{"46 (classes)", "an upstream gets five times what it can do, a sixth of it `high`; one node", importance},
	{"46 (pauses)", "an upstream gets 0.8 of what it can do, and stands still for 300 ms every 5 s; 15 requests at once every 3 s; one node", enoughRoom},
	{"46 (bursts)", "60 requests at once each second, which is 0.3 of what an upstream can do; one node", bursts},
	{"46 (costly)", "one worker gets 2.5 times what it can do, beside 300 answers a second that need none; one node", costlyRoute},
	{"46 (polls)", "60 or 200 clients that wait 2 or 10 s for each answer, which needs no worker, beside short requests, with `concurrency auto` and without it; one node each", longPolls},
	{"46 (workers)", "five of ten workers leave and return, and clients try up to three times; one node", lostWorkers},
	{"46 (3 nodes)", "an upstream gets three times what it can do by one node, which two more join", joined},
	{"46 (mixed)", "requests that take 5 and 500 ms: five times what the upstream can do, then half; one node", mixedWork},
	{"46 (open)", "100 websockets and streams of events stay open; upstreams and clients abort; one node", openEnds},
	{"46 (hung)", "an upstream hangs while it gets twice what it can do; one node", hung},
	{"46 (reloads)", "reloads while an upstream gets three times what it can do; one node", reloadsBusy},
}

const (
	workers  = 10
	service  = 50 * time.Millisecond // of a request, on average
	capacity = workers * int(time.Second/service)
	waits    = time.Second // of clients
)

// upstream answers requests first come, first served, with a few workers, and goes on with those
// whose clients have left. Its workers are a schedule instead of goroutines, so that it can do
// the same on a machine that has no time for them.
type upstream struct {
	closed chan struct{} // when the trial ends

	mu    sync.Mutex
	free  []time.Time   // when each worker will be, by the upstream's clock
	jobs  []job         // all so far, by the same
	stood time.Duration // for which that clock has stood still, once it is past until
	until time.Time
	held  int // requests that wait, and need no worker
}

// job is when a worker is at a request.
type job struct{ from, to time.Time }

// startBusy starts an upstream, and nodes that pass requests on to it by a limit.
func startBusy(tr *trial, count int, limit string) (*upstream, []*node) {
	u := &upstream{closed: make(chan struct{}), free: make([]time.Time, workers)}
	server := httptest.NewServer(u)
	tr.Cleanup(func() {
		close(u.closed)
		server.CloseClientConnections()
		server.Close()
	})
	return u, startNodes(tr, count, caddyfile("", limit+"\nreverse_proxy "+strings.TrimPrefix(server.URL, "http://")+
		" {\ntransport http {\nkeepalive_idle_conns_per_host 1000\n}\n}"))
}

// following is the limit of most nodes.
const following = "rate_limit up {\nconcurrency auto\n}"

// ServeHTTP answers what needs no worker as its path says. Other paths say how long a worker
// takes; without a duration that is random.
func (u *upstream) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch r.URL.Path {
	case "/cheap":
	case "/fail":
		w.WriteHeader(http.StatusInternalServerError)
	case "/abort":
		panic(http.ErrAbortHandler)
	case "/break":
		_, _ = io.WriteString(w, "some")
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	case "/never":
		<-r.Context().Done()
	case "/events":
		w.Header().Set("Content-Type", "text/event-stream")
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	case "/upgrade":
		upgrade(w)
	default:
		if hold, err := time.ParseDuration(strings.TrimPrefix(r.URL.Path, "/news/")); err == nil {
			u.hold(r.Context(), hold)
			return
		}
		took, err := time.ParseDuration(r.URL.Path[1:])
		if err != nil {
			took = time.Duration(rand.ExpFloat64() * float64(service))
		}
		u.work(took)
	}
}

// hold returns after some time, or when the client has left.
func (u *upstream) hold(ctx context.Context, d time.Duration) {
	add := func(n int) {
		u.mu.Lock()
		defer u.mu.Unlock()
		u.held += n
	}
	add(1)
	defer add(-1)
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// work returns when a worker has done something that takes some time.
func (u *upstream) work(took time.Duration) {
	u.mu.Lock()
	first := &u.free[0]
	for i := range u.free {
		if u.free[i].Before(*first) {
			first = &u.free[i]
		}
	}
	j := job{from: later(*first, u.clock())}
	j.to = j.from.Add(took)
	*first, u.jobs = j.to, append(u.jobs, j)
	for left := took; left > 0; {
		left = time.Until(j.to.Add(u.stood))
		u.mu.Unlock()
		select {
		case <-time.After(left):
		case <-u.closed:
			return
		}
		u.mu.Lock()
	}
	u.mu.Unlock()
}

// clock returns the time of the upstream's clock.
func (u *upstream) clock() time.Time { return later(time.Now(), u.until).Add(-u.stood) }

// later returns the later of two times.
func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// pause has the upstream stand still for some time.
func (u *upstream) pause(d time.Duration) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.until, u.stood = time.Now().Add(d), u.stood+d
}

// employ sets how many workers there are. Those who leave first do what waits for them.
func (u *upstream) employ(workers int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.free = append(u.free, make([]time.Time, workers)...)[:workers]
}

// could returns how many requests the upstream could have done since some time, of the kind
// that it did, if its workers had never been without work. It must not have stood still.
func (u *upstream) could(since time.Time) float64 {
	u.mu.Lock()
	defer u.mu.Unlock()
	now := u.clock()
	since = since.Add(-u.stood)
	var done, worked float64
	for _, j := range u.jobs {
		to := now
		if j.to.Before(to) {
			to = j.to
		}
		if part := to.Sub(later(j.from, since)); part > 0 {
			done += part.Seconds() / j.to.Sub(j.from).Seconds()
			worked += part.Seconds()
		}
	}
	return done / worked * float64(len(u.free)) * now.Sub(since).Seconds()
}

// visit is what became of a request.
type visit struct {
	node      int // its index
	path      string
	sent, got time.Time
	status    int // 0 if the client left
}

// visitors send requests, whatever becomes of earlier ones, and wait a second for each answer.
type visitors struct {
	nodes []*node // in turn
	path  func(i int) string
	tries int // of each request that is not answered with 200
	http  http.Client

	asked int
	open  sync.WaitGroup
	mu    sync.Mutex
	all   []visit
}

// newVisitors returns visitors that send all requests to /.
func newVisitors(tr *trial, nodes ...*node) *visitors {
	transport := &http.Transport{MaxIdleConnsPerHost: 1000}
	c := &visitors{nodes: nodes, path: func(int) string { return "/" }, tries: 1, http: http.Client{Transport: transport, Timeout: waits}}
	tr.Cleanup(func() {
		c.open.Wait()
		transport.CloseIdleConnections()
	})
	return c
}

// send sends requests at random times, so many a second.
func (c *visitors) send(perSecond int, length time.Duration) {
	began := time.Now()
	for due := time.Duration(0); ; c.ask() {
		due += time.Duration(rand.ExpFloat64() * float64(time.Second) / float64(perSecond))
		time.Sleep(min(due, length) - time.Since(began))
		if due > length {
			return
		}
	}
}

// ask sends a request.
func (c *visitors) ask() {
	v := visit{node: c.asked % len(c.nodes), path: c.path(c.asked)}
	c.asked++
	url := "http://" + c.nodes[v.node].addr + v.path
	c.open.Go(func() {
		for try := 0; try < c.tries && v.status != http.StatusOK; try++ {
			if try > 0 {
				time.Sleep(rand.N(time.Second))
			}
			v.sent, v.status = time.Now(), 0
			if res, err := c.http.Get(url); err == nil {
				_, _ = io.Copy(io.Discard, res.Body)
				res.Body.Close()
				v.status = res.StatusCode
			}
			v.got = time.Now()
			c.mu.Lock()
			c.all = append(c.all, v)
			c.mu.Unlock()
		}
	})
}

// visits returns all visits that are over, and of which ok is true.
func (c *visitors) visits(ok func(visit) bool) (some []visit) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, v := range c.all {
		if ok(v) {
			some = append(some, v)
		}
	}
	return some
}

// answered returns the visits that were answered with 200 since some time, and how many they
// are of those that the upstream could have done since then.
func (c *visitors) answered(u *upstream, since time.Time) (good []visit, share float64) {
	good = c.visits(func(v visit) bool { return v.status == http.StatusOK && v.got.After(since) })
	return good, float64(len(good)) / u.could(since)
}

// shed returns the share of the visits since some time that were turned away.
func (c *visitors) shed(since time.Time) float64 {
	c.open.Wait()
	all := c.visits(func(v visit) bool { return v.sent.After(since) })
	shed := c.visits(func(v visit) bool { return v.sent.After(since) && v.status == http.StatusServiceUnavailable })
	return float64(len(shed)) / float64(len(all))
}

// median returns the median of the times that visits took.
func median(all []visit) time.Duration {
	took := []time.Duration{0}
	for _, v := range all {
		took = append(took, v.got.Sub(v.sent))
	}
	slices.Sort(took)
	return took[len(took)/2]
}

// load returns what the only limit of a node that follows the load allows, and what is in
// progress there.
func (n *node) load(tr *trial) (limit, inProgress int) {
	tr.Helper()
	var status struct {
		Load []struct {
			Limit      int
			InProgress int `json:"in_progress"`
		}
	}
	res, err := admin.Get("http://" + n.admin + "/rate_limit/status")
	if err == nil {
		defer res.Body.Close()
		err = json.NewDecoder(res.Body).Decode(&status)
	}
	if err != nil || len(status.Load) != 1 {
		tr.Fatalf("status: %v, %v", status, err)
	}
	return status.Load[0].Limit, status.Load[0].InProgress
}

// noneLeft waits until nothing is in progress at the nodes.
func (c *visitors) noneLeft(tr *trial, when string) {
	tr.Helper()
	c.open.Wait()
	for _, n := range c.nodes {
		eventually(tr, "nothing in progress "+when, func() bool { _, left := n.load(tr); return left == 0 })
	}
	tr.note("nothing in progress %s", when)
}

// surge: nearly all that the upstream can do is done for clients that still wait.
func surge(tr *trial) {
	for _, limit := range []string{"", following} {
		length := 2 * time.Second // as what waits in the upstream has a connection each
		if limit != "" {
			length = during(5*time.Second, time.Minute)
		}
		u, nodes := startBusy(tr, 1, limit)
		c := newVisitors(tr, nodes...)
		c.send(capacity/2, time.Second)
		c.send(5*capacity, 5*time.Second)
		since := time.Now()
		c.send(5*capacity, length)
		good, share := c.answered(u, since)
		if limit == "" {
			most(tr, "without it, answered in time of what the upstream can do", share, 0.1)
			continue
		}
		least(tr, "with it", share, 0.9)
		most(tr, "median", median(good), 600*time.Millisecond)
		least(tr, "median", median(good), 400*time.Millisecond)
		c.noneLeft(tr, "at the end")
	}
}

// fastErrors: failures are no answers, so the limit grows by the others alone.
func fastErrors(tr *trial) {
	u, nodes := startBusy(tr, 1, following)
	c := newVisitors(tr, nodes...)
	c.send(capacity/2, time.Second)
	c.path = func(i int) string { return []string{"/", "/fail"}[i%2] }
	c.send(3*capacity, 5*time.Second)
	since := time.Now()
	c.send(3*capacity, during(5*time.Second, time.Minute))
	good, share := c.answered(u, since)
	limit, _ := nodes[0].load(tr)
	least(tr, "answered in time of what the upstream can do", share, 0.9)
	most(tr, "median", median(good), 600*time.Millisecond)
	most(tr, "requests that are allowed", limit, capacity+2)
	c.noneLeft(tr, "at the end")
}

// importance: those that are more important are turned away last.
func importance(tr *trial) {
	_, nodes := startBusy(tr, 1, "rate_limit up {\nconcurrency auto {\nhigh path /high\nlow path /low\n}\n}")
	c := newVisitors(tr, nodes...)
	c.path = func(i int) string { // a sixth of all that is sent is 0.83 of what can be done
		return []string{"/high", "/", "/", "/", "/low", "/low"}[i%6]
	}
	c.send(5*capacity, 5*time.Second)
	since := time.Now()
	c.send(5*capacity, during(5*time.Second, time.Minute))
	c.open.Wait()
	high := c.visits(func(v visit) bool { return v.path == "/high" && v.sent.After(since) })
	good := slices.DeleteFunc(slices.Clone(high), func(v visit) bool { return v.status != http.StatusOK })
	least(tr, "of the important ones, answered", float64(len(good))/float64(len(high)), 0.9)
}

// enoughRoom: nearly nothing is turned away while the upstream keeps up.
func enoughRoom(tr *trial) {
	u, nodes := startBusy(tr, 1, following)
	c := newVisitors(tr, nodes...)
	for range 2 { // pauses show how much may be in progress
		c.send(capacity*8/10, 2*time.Second)
		u.pause(300 * time.Millisecond)
	}
	since := time.Now().Add(time.Second)
	for range int(during(2, 60)) {
		c.send(capacity*8/10, 5*time.Second)
		u.pause(300 * time.Millisecond)
	}
	c.send(capacity*8/10, time.Second)
	most(tr, "with pauses, turned away", c.shed(since), 0.01)
	since = time.Now()
	for i := range int(during(2, 20)) {
		if i > 0 {
			time.Sleep(3 * time.Second)
		}
		for range 15 {
			c.ask()
		}
	}
	most(tr, "in bursts", c.shed(since), 0)
}

// bursts: what the upstream has time for is not turned away because it comes at once.
func bursts(tr *trial) {
	_, nodes := startBusy(tr, 1, following)
	c := newVisitors(tr, nodes...)
	burst := func(n int) {
		for range n {
			next := time.Now().Add(time.Second)
			for range 60 {
				c.ask()
			}
			time.Sleep(time.Until(next))
		}
	}
	since := time.Now()
	burst(1)
	tr.note("of the first, turned away %.2f", c.shed(since))
	burst(4)
	since = time.Now()
	burst(int(during(5, 60)))
	most(tr, "from the sixth on", c.shed(since), 0.03)
}

// costlyRoute: a route that gets more than its worker can do is limited alone, though the mean of
// all answers is good. It is calm before.
func costlyRoute(tr *trial) {
	u, nodes := startBusy(tr, 1, following)
	u.employ(1)
	c := newVisitors(tr, nodes...)
	const costly = "/100ms" // of which the worker can do ten a second
	send := func(each int, length time.Duration) {
		c.path = func(i int) string {
			if i%each == 0 {
				return costly
			}
			return "/cheap"
		}
		c.send(325, length)
	}
	send(65, 5*time.Second)
	send(13, 10*time.Second)
	since := time.Now()
	send(13, during(10*time.Second, time.Minute))
	c.open.Wait()
	good := func(want bool) int {
		return len(c.visits(func(v visit) bool {
			return v.got.After(since) && v.status == http.StatusOK && (v.path == costly) == want
		}))
	}
	least(tr, "costly ones answered in time of what the worker can do", float64(good(true))/u.could(since), 0.8)
	cheap := c.visits(func(v visit) bool { return v.got.After(since) && v.path != costly })
	least(tr, "cheap ones answered", float64(good(false))/float64(len(cheap)), 0.97)
}

// polls are clients that wait so long for each answer, and then ask again.
type polls struct {
	clients int
	hold    time.Duration
	obey    bool          // whether they wait as Retry-After says once they are turned away
	quiet   time.Duration // for which there are others only, before they come
}

func (p polls) String() string {
	text := fmt.Sprintf("%d × %v", p.clients, p.hold)
	if p.clients == 0 {
		text = "no polls"
	}
	if p.obey {
		text += ", obeying Retry-After"
	}
	if p.quiet > 0 {
		text += fmt.Sprintf(", after %v of others only", p.quiet)
	}
	return text
}

// start starts the clients. They end with ctx.
func (p polls) start(ctx context.Context, n *node) (wait func()) {
	var all sync.WaitGroup
	transport := &http.Transport{MaxIdleConnsPerHost: p.clients}
	client := http.Client{Transport: transport}
	ask := func() (again time.Duration) {
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("http://%s/news/%v", n.addr, p.hold), http.NoBody)
		if err != nil {
			return time.Second
		}
		res, err := client.Do(r)
		if err != nil {
			return time.Second
		}
		res.Body.Close()
		if after, err := strconv.Atoi(res.Header.Get("Retry-After")); err == nil && p.obey {
			return time.Duration(after) * time.Second
		}
		return 75*time.Millisecond + rand.N(50*time.Millisecond)
	}
	for range p.clients {
		all.Go(func() {
			for again := rand.N(50 * time.Millisecond); ; again = ask() {
				select {
				case <-time.After(again):
				case <-ctx.Done():
					return
				}
			}
		})
	}
	return func() {
		all.Wait()
		transport.CloseIdleConnections()
	}
}

// beside sends short requests, so many a second, beside polls. It returns those that were sent from
// settled after the first poll on, and how many polls are in progress at the end.
func (p polls) beside(c *visitors, u *upstream, perSecond int, settled, length time.Duration) (since time.Time, held int) {
	c.send(perSecond, p.quiet)
	ctx, stop := context.WithCancel(context.Background())
	wait := p.start(ctx, c.nodes[0])
	c.send(perSecond, settled)
	since = time.Now()
	c.send(perSecond, length)
	u.mu.Lock()
	held = u.held
	u.mu.Unlock()
	stop()
	wait()
	c.open.Wait()
	return since, held
}

// longPolls: requests that wait for something else than a worker do not turn others away, nor does the
// limit then hold less of an overload.
func longPolls(tr *trial) {
	rows := []polls{{60, 2 * time.Second, false, 0}}
	if *long {
		rows = nil
		for _, quiet := range []time.Duration{0, 20 * time.Second} {
			for _, obey := range []bool{false, true} {
				rows = append(rows, polls{60, 2 * time.Second, obey, quiet}, polls{60, 10 * time.Second, obey, quiet}, polls{200, 10 * time.Second, obey, quiet})
			}
		}
	}
	for _, p := range rows {
		p.compare(tr)
	}
	if !*long {
		return
	}
	for _, p := range []polls{{}, {60, 2 * time.Second, false, 0}, {60, 10 * time.Second, false, 0}} {
		u, nodes := startBusy(tr, 1, following)
		c := newVisitors(tr, nodes...)
		since, _ := p.beside(c, u, 5*capacity, 20*time.Second, 20*time.Second)
		_, share := c.answered(u, since)
		least(tr, fmt.Sprintf("%v, and five times what the upstream can do: answered in time of that", p), share, 0.93)
	}
}

// compare judges the answers to short requests beside polls, as a part of those without a limit.
func (p polls) compare(tr *trial) {
	const perSecond = 76
	var shares [2]float64
	var held [2]int
	var all sync.WaitGroup
	for i, limit := range []string{"", following} {
		u, nodes := startBusy(tr, 1, limit)
		c := newVisitors(tr, nodes...)
		all.Go(func() {
			var since time.Time
			since, held[i] = p.beside(c, u, perSecond, during(12*time.Second, 20*time.Second), during(5*time.Second, 20*time.Second))
			sent := c.visits(func(v visit) bool { return v.sent.After(since) })
			good := c.visits(func(v visit) bool { return v.sent.After(since) && v.status == http.StatusOK })
			shares[i] = float64(len(good)) / float64(len(sent))
		})
	}
	all.Wait()
	least(tr, fmt.Sprintf("%v: short ones answered, of those without a limit", p), shares[1]/shares[0], 0.95)
	least(tr, "polls in progress at the end", float64(held[1])/float64(held[0]), 0.7)
}

// lostWorkers: the limit follows what the upstream can do, also with clients that try again.
func lostWorkers(tr *trial) {
	u, nodes := startBusy(tr, 1, following)
	c := newVisitors(tr, nodes...)
	c.tries = 3
	c.send(3*capacity/2, 2*time.Second)
	for _, n := range []int{workers / 2, workers} {
		u.employ(n)
		c.send(3*capacity/2, 4*time.Second)
		since := time.Now()
		c.send(3*capacity/2, during(3*time.Second, time.Minute))
		_, share := c.answered(u, since)
		least(tr, fmt.Sprintf("with %d workers, answered in time of what they can do", n), share, 0.9)
	}
}

// joined: nodes that share an upstream share what it can do.
func joined(tr *trial) {
	u, nodes := startBusy(tr, 3, following)
	c := newVisitors(tr, nodes[0])
	c.send(3*capacity, 3*time.Second)
	c.nodes = nodes
	c.send(3*capacity, 16*time.Second) // each window brings them closer by one place
	since := time.Now()
	c.send(3*capacity, during(4*time.Second, time.Minute))
	good, share := c.answered(u, since)
	least(tr, "answered in time of what the upstream can do", share, 0.95)
	var by [3]float64
	for _, v := range good {
		by[v.node]++
	}
	sum, squares := by[0]+by[1]+by[2], by[0]*by[0]+by[1]*by[1]+by[2]*by[2]
	least(tr, fmt.Sprintf("by node %v: Jain's index", by), sum*sum/squares/3, 0.65)
}

// mixedWork: what an overload by slow requests has taught is no reason to turn any away after it.
func mixedWork(tr *trial) {
	_, nodes := startBusy(tr, 1, following)
	c := newVisitors(tr, nodes...)
	c.path = func(i int) string { // 55 ms on average
		if i%10 == 0 {
			return "/500ms"
		}
		return "/5ms"
	}
	c.send(5*capacity, 4*time.Second)
	c.send(capacity/2, time.Second) // what still waits is done meanwhile
	since := time.Now()
	c.send(capacity/2, during(5*time.Second, time.Minute))
	most(tr, "after the surge, turned away", c.shed(since), 0.01)
	c.noneLeft(tr, "at the end")
}

// openEnds: what stays open takes no place, and what breaks leaves its place.
func openEnds(tr *trial) {
	_, nodes := startBusy(tr, 1, following)
	n := nodes[0]
	before, _ := n.load(tr)
	for range 50 {
		conn, err := openUpgrade(n)
		if err != nil {
			tr.Fatal(err)
		}
		defer conn.Close()
		events, err := client.Get("http://" + n.addr + "/events")
		if err != nil {
			tr.Fatal(err)
		}
		defer events.Body.Close()
	}
	c := newVisitors(tr, n)
	c.noneLeft(tr, "while they are open")
	limit, _ := n.load(tr)
	tr.is(fmt.Sprintf("the limit is %d as before", limit), limit == before)
	c.path = func(i int) string { return []string{"/", "/abort", "/break", "/fail", "/never"}[i%5] }
	c.send(capacity, during(2*time.Second, time.Minute))
	c.noneLeft(tr, "after those that broke")
}

// hung: an upstream that comes back gets what it can do soon.
func hung(tr *trial) {
	u, nodes := startBusy(tr, 1, following)
	c := newVisitors(tr, nodes...)
	c.send(2*capacity, 2*time.Second)
	u.pause(during(7*time.Second, time.Minute))
	c.send(2*capacity, time.Until(u.until))
	limit, _ := nodes[0].load(tr)
	most(tr, "requests that are allowed at last", limit, 4)
	c.send(2*capacity, 5*time.Second)
	since := time.Now()
	c.send(2*capacity, 4*time.Second)
	_, share := c.answered(u, since)
	least(tr, "answered in time of what the upstream can do, 5 to 9 s after it is back", share, 0.9)
	c.noneLeft(tr, "at the end")
}

// reloadsBusy: what is known of the upstream stays.
func reloadsBusy(tr *trial) {
	u, nodes := startBusy(tr, 1, following)
	n, c := nodes[0], newVisitors(tr, nodes...)
	c.send(3*capacity, 3*time.Second)
	since, length := time.Now(), during(4*time.Second, time.Minute)
	var load sync.WaitGroup
	load.Go(func() { c.send(3*capacity, length) })
	lowest := capacity
	for time.Since(since) < length-time.Second {
		if err := n.reload(n.write); err != nil {
			tr.Fatal(err)
		}
		limit, _ := n.load(tr)
		lowest = min(lowest, limit)
		time.Sleep(500 * time.Millisecond)
	}
	load.Wait()
	_, share := c.answered(u, since)
	least(tr, "answered in time of what the upstream can do", share, 0.9)
	least(tr, "requests that are allowed right after a reload", lowest, 50)
	c.noneLeft(tr, "at the end")
}
