package faults

import (
	"context"
	"fmt"
	"io"
	"math"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"
)

// The hot limit of the site.
const (
	size = 20
	rate = 100 * time.Millisecond
)

// hotKeys are the keys that the load asks for more of than they get.
const hotKeys = 8

// request is what became of one request.
type request struct {
	node      int
	key       string
	due       time.Time // when the load's schedule had it
	sent, got time.Time
	status    int // 0 if there was no answer
}

// wait returns how long the client waited, also for being sent.
func (r request) wait() time.Duration { return r.got.Sub(r.due) }

// load sends requests to nodes by a schedule, whatever becomes of them: slow
// answers do not slow it down.
type load struct {
	t      testing.TB
	client *http.Client
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu       sync.Mutex
	requests []request
}

// newLoad returns a load of no requests yet, which keeps so many connections to
// each node at most when they are idle.
func newLoad(t testing.TB, connections int) *load {
	return &load{t: t, client: &http.Client{
		Timeout:   patience,
		Transport: &http.Transport{MaxIdleConnsPerHost: connections, DisableCompression: true},
	}}
}

// startLoad begins to send each node the given number of requests a second,
// for the hot keys in turn.
func startLoad(t testing.TB, nodes []*node, perSecond int) *load {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	l := newLoad(t, 256)
	l.cancel = cancel
	for i, n := range nodes {
		l.wg.Go(func() { l.send(ctx, i, n, time.Second/time.Duration(perSecond)) })
	}
	t.Cleanup(func() { l.stop() })
	return l
}

// stop ends the load and returns all requests in the order they were due.
func (l *load) stop() []request {
	l.cancel()
	l.wg.Wait()
	l.client.CloseIdleConnections()
	slices.SortFunc(l.requests, func(a, b request) int { return a.due.Compare(b.due) })
	return l.requests
}

// send sends one node's requests.
func (l *load) send(ctx context.Context, index int, n *node, every time.Duration) {
	url := "http://" + n.addr + "/"
	due := time.Now()
	for i := index; ctx.Err() == nil; i++ {
		if wait := time.Until(due); wait > 0 {
			time.Sleep(wait)
		}
		r := request{node: index, key: fmt.Sprintf("hot%d", i%hotKeys), due: due}
		l.wg.Go(func() { l.do(url, r) })
		due = due.Add(every)
	}
}

// do sends a request and keeps what becomes of it.
func (l *load) do(url string, r request) {
	req, err := http.NewRequest(http.MethodGet, url, nil)
	if err != nil {
		l.t.Error(err)
		return
	}
	req.Header.Set("X-Key", r.key)
	r.sent = time.Now()
	if res, err := l.client.Do(req); err == nil {
		_, _ = io.Copy(io.Discard, res.Body)
		_ = res.Body.Close()
		r.status = res.StatusCode
	}
	r.got = time.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.requests = append(l.requests, r)
}

// bound is the most requests for one key that the hot limit admits in any time
// of length d.
func bound(d time.Duration) int { return size + int(d/rate) }

// excess returns the most requests for one key that were admitted in any time
// beyond the bound; 0 if it held. A request counts as admitted at any moment
// between its sending and its answer.
func excess(requests []request) int {
	byKey := make(map[string][]request)
	for _, r := range requests {
		if r.status == http.StatusOK {
			byKey[r.key] = append(byKey[r.key], r)
		}
	}
	worst := 0
	for _, admitted := range byKey {
		slices.SortFunc(admitted, func(a, b request) int { return a.sent.Compare(b.sent) })
		for i := range admitted {
			last := admitted[i].got
			for j := i; j < len(admitted); j++ {
				if admitted[j].got.After(last) {
					last = admitted[j].got
				}
				worst = max(worst, j-i+1-bound(last.Sub(admitted[i].sent)))
			}
		}
	}
	return worst
}

// shortfall returns the most requests for one key that were admitted too few,
// over the whole time: every key is asked for more than it gets.
func shortfall(requests []request) int {
	if len(requests) == 0 {
		return 0
	}
	admitted := make(map[string]int)
	first := make(map[string]time.Time)
	last := make(map[string]time.Time)
	for _, r := range requests {
		if first[r.key].IsZero() {
			first[r.key] = r.got
		}
		if last[r.key] = r.sent; r.status == http.StatusOK {
			admitted[r.key]++
		}
	}
	worst := 0
	for key := range first {
		worst = max(worst, bound(last[key].Sub(first[key]))-1-admitted[key])
	}
	return worst
}

// between returns the requests that were due in a time.
func between(requests []request, from, to time.Time) []request {
	var some []request
	for _, r := range requests {
		if !r.due.Before(from) && r.due.Before(to) {
			some = append(some, r)
		}
	}
	return some
}

// unanswered returns how many requests got no answer at all.
func unanswered(requests []request) int {
	n := 0
	for _, r := range requests {
		if r.status == 0 {
			n++
		}
	}
	return n
}

// strange returns how many requests got another answer than 200 or 429.
func strange(requests []request) int {
	n := 0
	for _, r := range requests {
		if r.status != http.StatusOK && r.status != http.StatusTooManyRequests {
			n++
		}
	}
	return n
}

// percentile returns the wait that the given share of the requests did not
// exceed.
func percentile(requests []request, share float64) time.Duration {
	if len(requests) == 0 {
		return 0
	}
	waits := make([]time.Duration, len(requests))
	for i, r := range requests {
		waits[i] = r.wait()
	}
	slices.Sort(waits)
	return waits[int(math.Ceil(share*float64(len(waits))))-1]
}

// slower returns how many requests of a node waited longer than d.
func slower(requests []request, node int, d time.Duration) int {
	n := 0
	for _, r := range requests {
		if r.node == node && r.wait() > d {
			n++
		}
	}
	return n
}
