package faults

import (
	"encoding/json"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"time"
)

// busyFaults are upstreams that get more than they can do, behind concurrency auto.
var busyFaults = []fault{
	{"46", "an upstream gets five times what it can do, without `concurrency auto` and with it; one node", surge},
	{"46 (errors)", "every second request fails at once; one node", fastErrors},
	{"46 (classes)", "an upstream gets five times what it can do, a sixth of it `high`; one node", importance},
}

const (
	workers  = 10
	service  = 50 * time.Millisecond // of a request, on average
	capacity = workers * int(time.Second/service)
	waits    = time.Second // of clients
)

// startBusy starts an upstream that answers requests first come, first served, with a few
// workers, and goes on with those whose clients have left. Those for /fail it fails at once.
func startBusy(tr *trial) (addr string) {
	busy := make(chan struct{}, workers)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/fail" {
			w.WriteHeader(http.StatusInternalServerError)
			return
		}
		busy <- struct{}{}
		time.Sleep(time.Duration(rand.ExpFloat64() * float64(service)))
		<-busy
	}))
	tr.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
	return strings.TrimPrefix(server.URL, "http://")
}

// visit is what became of a request.
type visit struct {
	at, took time.Duration
	path     string
	status   int // 0 if the client left
}

// visits sends requests at random times, so many a second, and returns what became of each.
func visits(n *node, perSecond int, length time.Duration, path func(i int) string) (all []visit) {
	transport := &http.Transport{MaxIdleConnsPerHost: 1000}
	defer transport.CloseIdleConnections()
	client := http.Client{Transport: transport, Timeout: waits}
	var mu sync.Mutex
	var open sync.WaitGroup
	began, due := time.Now(), time.Duration(0)
	for i := 0; due < length; i++ {
		due += time.Duration(rand.ExpFloat64() * float64(time.Second) / float64(perSecond))
		time.Sleep(time.Until(began.Add(due)))
		v := visit{at: due, path: path(i)}
		open.Go(func() {
			start := time.Now()
			if res, err := client.Get("http://" + n.addr + v.path); err == nil {
				_, _ = io.Copy(io.Discard, res.Body)
				res.Body.Close()
				v.status = res.StatusCode
			}
			v.took = time.Since(start)
			mu.Lock()
			defer mu.Unlock()
			all = append(all, v)
		})
	}
	open.Wait()
	return all
}

// answeredOf returns how many were answered with 200 from a time on, and the median of the
// times that those took.
func answeredOf(all []visit, from time.Duration) (n int, median time.Duration) {
	var took []time.Duration
	for _, v := range all {
		if v.status == http.StatusOK && v.at >= from {
			took = append(took, v.took)
		}
	}
	if slices.Sort(took); len(took) > 0 {
		median = took[len(took)/2]
	}
	return len(took), median
}

// everyPath is the path of all requests.
func everyPath(int) string { return "/" }

// busySite returns a site with the upstream.
func busySite(limit, upstream string) string {
	return limit + "\nreverse_proxy " + upstream + " {\ntransport http {\nkeepalive_idle_conns_per_host 1000\n}\n}"
}

// surge: nearly all that the upstream can do is done for clients that still wait.
func surge(tr *trial) {
	const settle = 5 * time.Second
	length := settle + during(8*time.Second, time.Minute)
	for _, limit := range []string{"", "rate_limit up {\nconcurrency auto\n}"} {
		n := startNodes(tr, 1, caddyfile("", busySite(limit, startBusy(tr))))[0]
		visits(n, capacity/2, 2*time.Second, everyPath)
		all := visits(n, 5*capacity, length, everyPath)
		good, median := answeredOf(all, settle)
		share := float64(good) / (length - settle).Seconds() / float64(capacity)
		if limit == "" {
			most(tr, "without it, answered in time of what the upstream can do", share, 0.1)
			continue
		}
		least(tr, "with it", share, 0.9)
		most(tr, "median", median, 600*time.Millisecond)
		least(tr, "median", median, 400*time.Millisecond)
	}
}

// fastErrors: failures are no answers, so the limit grows by the others alone.
func fastErrors(tr *trial) {
	n := startNodes(tr, 1, caddyfile("", busySite("rate_limit up {\nconcurrency auto\n}", startBusy(tr))))[0]
	length := during(10*time.Second, time.Minute)
	visits(n, capacity/2, 2*time.Second, everyPath)
	all := visits(n, 3*capacity, length, func(i int) string { return []string{"/", "/fail"}[i%2] })
	good, median := answeredOf(all, length/2)
	least(tr, "answered in time of what the upstream can do", float64(good)/(length/2).Seconds()/float64(capacity), 0.9)
	most(tr, "median", median, 600*time.Millisecond)
	most(tr, "requests that are allowed", n.load(tr)["limit"].(float64), 2*float64(capacity)/2+2)
	most(tr, "in progress at the end", n.load(tr)["in_progress"].(float64), 0)
}

// importance: those that are more important are turned away last.
func importance(tr *trial) {
	site := busySite("rate_limit up {\nconcurrency auto {\nhigh path /high\nlow path /low\n}\n}", startBusy(tr))
	n := startNodes(tr, 1, caddyfile("", site))[0]
	const settle = 5 * time.Second
	length := settle + during(8*time.Second, time.Minute)
	all := visits(n, 5*capacity, length, func(i int) string { // a sixth of all that is sent is 0.83 of what can be done
		return []string{"/high", "/", "/", "/", "/low", "/low"}[i%6]
	})
	var offered, good int
	for _, v := range all {
		if v.path == "/high" && v.at >= settle {
			offered++
			if v.status == http.StatusOK {
				good++
			}
		}
	}
	least(tr, "of the important ones, answered", float64(good)/float64(offered), 0.9)
}

// load returns what status says of the only limit that follows the load.
func (n *node) load(tr *trial) map[string]any {
	tr.Helper()
	var status struct{ Load []map[string]any }
	res, err := http.Get("http://" + n.admin + "/rate_limit/status")
	if err == nil {
		defer res.Body.Close()
		err = json.NewDecoder(res.Body).Decode(&status)
	}
	if err != nil || len(status.Load) != 1 {
		tr.Fatalf("status: %v, %v", status, err)
	}
	return status.Load[0]
}
