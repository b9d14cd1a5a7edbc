package faults

import (
	"context"
	"fmt"
	"io"
	"math"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// The hot limit of the site.
const (
	size = 20
	rate = 100 * time.Millisecond
)

// The slow limit of the site: nothing drips while a test runs, so that a single
// extra request shows.
const (
	slowSize = 10
	slowRate = time.Hour
)

// hotKeys is the number of keys whose load exceeds their limit.
const hotKeys = 8

const (
	// slowEvery is the time between two requests on the slow limit, from any node.
	slowEvery = 25 * time.Millisecond

	// slowKeys is the number of its keys that are used all the time: they are full
	// before a fault begins. In addition there is a new key each second, which
	// fills while others are in use.
	slowKeys = 2
)

// loads numbers the loads, so that each fills slow buckets of its own.
var loads atomic.Int64

// request is the result of one request.
type request struct {
	node      int
	key       string
	slow      bool      // on the slow limit
	path      string    // of a site with other limits
	due       time.Time // when it was scheduled
	sent, got time.Time
	status    int // 0 if there was no answer
}

// wait returns how long the client waited, including for sending.
func (r request) wait() time.Duration { return r.got.Sub(r.due) }

// load sends requests to nodes on a schedule, whatever happens to them: slow
// answers do not slow it down.
type load struct {
	t      testing.TB
	id     int64
	client *http.Client
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu       sync.Mutex
	requests []request
}

// newLoad returns a load without requests, which keeps at most the given number of
// idle connections to each node.
func newLoad(t testing.TB, connections int) *load {
	return &load{t: t, id: loads.Add(1), client: &http.Client{
		Timeout:   patience,
		Transport: &http.Transport{MaxIdleConnsPerHost: connections, DisableCompression: true},
	}}
}

// startLoad starts sending each node the given number of requests a second, for
// the hot keys in turn, and some on the slow limit to all nodes together.
func startLoad(t testing.TB, nodes []*node, perSecond int) *load {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	l := newLoad(t, 256)
	l.cancel = cancel
	for i, n := range nodes {
		l.wg.Go(func() { l.send(ctx, i, n, time.Second/time.Duration(perSecond)) })
		l.wg.Go(func() { l.sendSlow(ctx, i, n, slowEvery*time.Duration(len(nodes))) })
	}
	t.Cleanup(func() { l.stop() })
	return l
}

// stop ends the load and returns all requests in the order in which they were due.
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

// sendSlow sends one node's requests on the slow limit. They are due a little
// after those of send, so that at a low rate calls are not batched.
func (l *load) sendSlow(ctx context.Context, index int, n *node, every time.Duration) {
	url := "http://" + n.addr + slowPath
	began := time.Now()
	due := began.Add(time.Millisecond)
	for i := 0; ctx.Err() == nil; i++ {
		if wait := time.Until(due); wait > 0 {
			time.Sleep(wait)
		}
		key := fmt.Sprintf("slow%d.%d", l.id, i/2%slowKeys)
		if i%2 == 1 {
			key = fmt.Sprintf("new%d.%d", l.id, due.Sub(began)/time.Second)
		}
		r := request{node: index, key: key, slow: true, due: due}
		l.wg.Go(func() { l.do(url, r) })
		due = due.Add(every)
	}
}

// hammer sends requests to nodes as fast as some connections to each can, on each
// connection for what next returns, turn by turn, and returns the results.
func hammer(
	t testing.TB, nodes []*node, connections int, lasts time.Duration, next func(turn int) request,
) []request {
	l := newLoad(t, connections)
	defer l.client.CloseIdleConnections()
	end := time.Now().Add(lasts)
	for i, n := range nodes {
		for range connections {
			l.wg.Go(func() {
				for turn := 0; time.Now().Before(end); turn++ {
					r := next(turn)
					r.node, r.due = i, time.Now()
					url := "http://" + n.addr
					if r.slow {
						url += slowPath
					}
					l.do(url, r)
				}
			})
		}
	}
	l.wg.Wait()
	return l.requests
}

// mixed returns the keys for hammering a site: one key of the hot limit and, one
// time in eight, one of the slow limit, another every quarter of a second.
func mixed() func(turn int) request {
	began := time.Now()
	return func(turn int) request {
		if turn%8 == 7 {
			return request{slow: true, key: fmt.Sprint("new", time.Since(began)/(250*time.Millisecond))}
		}
		return request{key: "one"}
	}
}

// do sends a request and records the result.
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

// bound is the maximum number of requests for one key that the hot limit admits in
// any time of length d.
func bound(d time.Duration) int { return size + int(d/rate) }

// apart returns how many requests for one key nodes may admit beyond the bound of
// the hot limit, and of the slow one, when they do not know of each other for a
// time of length d.
func apart(nodes int, d time.Duration) (hot, slow int) {
	more := func(size int, rate time.Duration) int { return (nodes - 1) * (size + int((d+rate-1)/rate)) }
	return more(size, rate), more(slowSize, slowRate)
}

// excess returns the largest number of requests for one key of the hot limit, or
// of the slow one, that were admitted beyond the bound in any time; 0 if it held.
// A request counts as admitted at any moment between its sending and its answer.
func excess(requests []request, slow bool) int {
	var some []request
	for _, r := range requests {
		if r.slow == slow {
			some = append(some, r)
		}
	}
	if slow {
		return beyond(some, leaky(slowSize, slowRate))
	}
	return beyond(some, leaky(size, rate))
}

// leaky returns how many requests a leaky bucket admits at most from one moment to
// another.
func leaky(size int, rate time.Duration) func(from, to time.Time) int {
	return func(from, to time.Time) int { return size + int(to.Sub(from)/rate) }
}

// beyond does the same as excess for a limit that admits at most as many requests
// from one moment to another.
func beyond(requests []request, most func(from, to time.Time) int) int {
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
				worst = max(worst, j-i+1-most(admitted[i].sent, last))
			}
		}
	}
	return worst
}

// shortfall returns by how many admitted requests any key of the hot limit fell
// short of its bound over the whole time, although it got more requests than that.
func shortfall(requests []request) int {
	if len(requests) == 0 {
		return 0
	}
	admitted := make(map[string]int)
	first := make(map[string]time.Time)
	last := make(map[string]time.Time)
	for _, r := range requests {
		if r.slow {
			continue
		}
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

// between returns the requests that were due in a time span.
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

// strange returns how many requests got an answer other than 200 or 429.
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
