package limiter

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/racetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/testseed"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter/internal/redisscript"
)

// A simulation of many nodes that are far from their Redis. Stores and script are the real
// ones, script and server included; the network is simulated, and so are all clocks, since
// each simulation runs in a bubble of package synctest. What is left to chance is which
// keys share a slot of a table.

// farLoad is what clients send: requests at random times, each at a random node.
type farLoad struct {
	name  string
	about string // in words
	limit Limit
	keys  uint64        // of which the first is requested most, by Zipf
	rate  int           // requests a second, of all nodes and keys together
	lasts time.Duration // of simulated time
	waves time.Duration // if not 0, no requests in every other such time
}

// farNetwork is what lies between nodes and server.
type farNetwork struct {
	rtt     time.Duration // of the farthest node; the nearest has half of it
	loss    float64       // the share of calls whose answer never comes: half of them never run, others run at once or long after
	crashes int           // how many nodes are replaced by new ones that know nothing
}

// farCase is one simulation.
type farCase struct {
	Consistency
	nodes   int
	network farNetwork
	load    farLoad
}

func (c farCase) String() string {
	return fmt.Sprintf("%v, %d nodes, %v, loss %v, %d crashes, %s", c.Consistency, c.nodes, c.network.rtt, c.network.loss, c.network.crashes, c.load.name)
}

// farResult is what came of it.
type farResult struct {
	requests, admitted, ideal int   // ideal is what one bucket for each key admits of the same requests
	calls, waited             int   // calls of the server, and requests that waited for one
	over, mayOver             int64 // how many more than bound(T) were admitted of a key in any time T, and how many may be
	wrong                     int64 // how many more than that
}

// farTimeout is for how long a request waits beyond the round trip, and farLate when calls
// that have been given up arrive after all.
const (
	farTimeout = 50 * time.Millisecond
	farLate    = 100 * time.Millisecond
)

// farAhead is how far the server's clock is ahead of the bubble's, so that no key expires
// on the server's real one. It is a number of whole days.
const farAhead = 40 * 366 * 24 * time.Hour

// farServer is a Redis, on a connection that carries one call at a time.
type farServer struct {
	mu   sync.Mutex
	conn net.Conn
	in   *bufio.Reader
	sha  string
}

// newFarServer connects to server.
func newFarServer(t *testing.T, server *redistest.Server) *farServer {
	t.Helper()
	v := newClockedRedis(t, server, "rl:")
	sha, err := v.admin.ScriptLoad(t.Context(), v.source).Result()
	if err != nil {
		t.Fatal(err)
	}
	conn, err := net.Dial("unix", server.Socket) // it is there
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return &farServer{conn: conn, in: bufio.NewReader(conn), sha: sha}
}

// run has the server run the script for a call, at the present time, and returns its reply.
// The bubble's clock is stopped meanwhile.
func (s *farServer) run(keys []string, arg string) ([]int64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now().Add(farAhead).UnixMicro()
	command := []string{"EVALSHA", s.sha, strconv.Itoa(len(keys))}
	command = append(append(command, keys...), arg)
	out := appendCommand(nil, "HSET", "clock", "s", strconv.FormatInt(now/1e6, 10), "us", strconv.FormatInt(now%1e6, 10))
	if _, err := s.conn.Write(appendCommand(out, command...)); err != nil {
		return nil, err
	}
	if _, err := s.number(':'); err != nil {
		return nil, err
	}
	n, err := s.number('*')
	if err != nil {
		return nil, err
	}
	reply := make([]int64, n)
	for i := range reply {
		if reply[i], err = s.number(':'); err != nil {
			return nil, err
		}
	}
	return reply, nil
}

// flush removes all keys.
func (s *farServer) flush() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, err := s.conn.Write(appendCommand(nil, "FLUSHALL")); err != nil {
		return err
	}
	_, err := s.in.ReadString('\n')
	return err
}

// number reads a line of the given type, which has a number.
func (s *farServer) number(is byte) (int64, error) {
	line, err := s.in.ReadString('\n')
	if err != nil {
		return 0, err
	}
	line = strings.TrimSuffix(line, "\r\n")
	if line == "" || line[0] != is {
		return 0, fmt.Errorf("the server replied %q", line)
	}
	return strconv.ParseInt(line[1:], 10, 64)
}

// appendCommand appends a command in Redis's protocol.
func appendCommand(to []byte, words ...string) []byte {
	to = fmt.Appendf(to, "*%d\r\n", len(words))
	for _, word := range words {
		to = fmt.Appendf(to, "$%d\r\n%s\r\n", len(word), word)
	}
	return to
}

// far is a simulation under way.
type far struct {
	farCase
	t      *testing.T
	server *farServer
	seed   uint64
	random *rand.Rand

	calls  atomic.Int64
	nodes  []*farNode
	failed []*farNode // those that have crashed
	ideal  *Memory    // one for all
	start  time.Time  // of the clocks
	flying atomic.Int64

	mu       sync.Mutex
	result   farResult
	admitted map[uint64][]int64 // when, in µs, by key
}

// farNode is a node, and the client of its store.
type farNode struct {
	sim   *far
	store *Redis
	rtt   time.Duration
	dead  atomic.Bool
}

// newNode returns a node that knows nothing.
func (f *far) newNode() *farNode {
	n := &farNode{sim: f, rtt: f.network.rtt/2 + time.Duration(f.random.Int64N(int64(f.network.rtt/2)))}
	n.store = newRedisWithoutClient(RedisOptions{KeyPrefix: "rl:", Timeout: f.network.rtt + farTimeout})
	n.store.denyCache = newDenyCache(1 << 9)
	n.store.leases.made.Do(func() { n.store.leases.slots = make([]leaseSlot, 1<<9) })
	n.store.fallback = newFallback(NewMemoryWithClock(n.store.clock), n.store.timeout, n.store.location)
	n.store.fallback.removals.send = n.store.remove
	n.store.client = n
	return n
}

var errFar = errors.New("the answer never came")

// send sends a call and waits for its answer.
func (n *farNode) send(q *redisscript.Call) error {
	n.store.sending(nil, []*redisscript.Call{q})
	n.sim.calls.Add(1)
	h := fnv.New64()
	_, _ = io.WriteString(h, q.Keys[0])
	random := rand.New(rand.NewPCG(n.sim.seed^h.Sum64(), uint64(time.Now().UnixNano())))
	lost, runs, late := random.Float64() < n.sim.network.loss, random.IntN(2) == 0, random.IntN(2) == 0
	if lost || n.dead.Load() {
		if runs {
			keys, arg := slices.Clone(q.Keys), strings.Clone(q.Arg)
			after := n.rtt / 2
			if late {
				after += n.store.timeout + time.Duration(random.Int64N(int64(farLate)))
			}
			n.sim.flying.Add(1)
			time.AfterFunc(after, func() {
				if _, err := n.sim.server.run(keys, arg); err != nil {
					n.sim.t.Error(err)
				}
				n.sim.flying.Add(-1)
			})
		}
		time.Sleep(n.store.timeout)
		return errFar
	}
	time.Sleep(n.rtt / 2)
	reply, err := n.sim.server.run(q.Keys, q.Arg)
	if err != nil {
		n.sim.t.Error(err)
		return err
	}
	q.Reply = reply
	time.Sleep(n.rtt / 2)
	return nil
}

// Do implements client.
func (n *farNode) Do(_ redisscript.Deadline, q *redisscript.Call) (*redisscript.Server, error) {
	err := n.send(q)
	if err == nil {
		n.store.heard(q, nil, true)
	}
	return nil, err
}

// Submit implements client.
func (n *farNode) Submit(_ redisscript.Deadline, q *redisscript.Call) error {
	n.sim.flying.Add(1)
	go func() {
		q.Done(n.send(q))
		n.sim.flying.Add(-1)
	}()
	return nil
}

// OneServer implements client.
func (n *farNode) OneServer() bool { return true }

// Connect implements client.
func (n *farNode) Connect() {}

// Stats implements client.
func (n *farNode) Stats() []redisscript.Stats { return nil }

// Close implements client.
func (n *farNode) Close() error { return nil }

// simulate runs a simulation.
func (c farCase) simulate(t *testing.T, server *farServer) (r farResult) {
	t.Helper()
	if err := server.flush(); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		f := &far{farCase: c, t: t, server: server, seed: testseed.Base(), start: time.Now(), admitted: make(map[uint64][]int64)}
		f.random = rand.New(rand.NewPCG(f.seed, 1))
		f.ideal = NewMemoryWithClock(func() time.Duration { return time.Since(f.start) })
		f.run()
		r = f.result
	})
	return r
}

// run lets the load arrive, and counts.
func (f *far) run() {
	for range f.farCase.nodes {
		f.nodes = append(f.nodes, f.newNode())
	}
	zipf := rand.NewZipf(f.random, 1.1, 1, f.load.keys-1)
	crash := f.load.lasts
	if f.network.crashes > 0 {
		crash = f.load.lasts / time.Duration(f.network.crashes+1)
	}
	var requests sync.WaitGroup
	for crashes := 0; ; {
		time.Sleep(time.Duration(f.random.ExpFloat64() * float64(time.Second) / float64(f.load.rate)))
		since := time.Since(f.start)
		if w := f.load.waves; w > 0 && since/w%2 == 1 {
			time.Sleep(w - since%w)
			continue
		}
		if since >= f.load.lasts {
			break
		}
		if crashes < f.network.crashes && since > time.Duration(crashes+1)*crash {
			i := f.random.IntN(len(f.nodes))
			f.nodes[i].dead.Store(true)
			f.failed = append(f.failed, f.nodes[i])
			f.nodes[i] = f.newNode()
			crashes++
		}
		n, key := f.nodes[f.random.IntN(len(f.nodes))], zipf.Uint64()
		requests.Go(func() { f.call(n, key) })
	}
	requests.Wait()
	for _, n := range slices.Concat(f.nodes, f.failed) {
		requests.Go(func() { _ = n.store.Close() })
	}
	requests.Wait()
	for f.flying.Load() > 0 {
		time.Sleep(time.Millisecond)
	}
	time.Sleep(2 * refreshAfter) // until nothing looks for anything to report
	f.check()
}

// call has a node decide a request for a key.
func (f *far) call(n *farNode, key uint64) {
	b := Bucket{Name: "b", Key: strconv.FormatUint(key, 10), Limit: f.load.limit, Cost: 1}
	ideal, err := f.ideal.Take(context.Background(), Request{Buckets: []Bucket{b}}, nil)
	if err != nil {
		f.t.Error(err)
		return
	}
	b.Consistency = f.Consistency
	asked := time.Since(f.start)
	d, err := n.store.Take(context.Background(), Request{Buckets: []Bucket{b}, NoFallback: true}, nil)
	answered := time.Since(f.start)
	if err != nil && !errors.Is(err, errFar) {
		f.t.Error(err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.result.requests++
	if !ideal[0].Denied {
		f.result.ideal++
	}
	if answered > asked {
		f.result.waited++
	}
	if err != nil || d[0].Denied || n.dead.Load() {
		return
	}
	f.result.admitted++
	if answered > asked {
		answered -= n.rtt / 2 // when the server has decided
	}
	f.admitted[key] = append(f.admitted[key], answered.Microseconds())
}

// check compares what was admitted of each key with the bound.
func (f *far) check() {
	r, l, slack := &f.result, f.load.limit, f.lease().Microseconds()
	r.calls = int(f.calls.Load())
	if every := f.reports(); every > 0 {
		others := int64(len(f.nodes) + len(f.failed) - 1)
		r.mayOver = others * (l.Size + l.DripSize*bucket.CeilDiv((every+f.network.rtt).Microseconds(), l.of().Rate()))
	}
	for _, times := range f.admitted {
		slices.Sort(times)
		r.over = max(r.over, exceeds(l, times, 0))
		r.wrong = max(r.wrong, exceeds(l, times, slack)-r.mayOver)
	}
	if slack > 0 {
		r.mayOver = l.DripSize * bucket.CeilDiv(slack, l.of().Rate())
	}
}

// exceeds returns by how much the admissions at the given times, which are in order, exceed
// what l, a leaky bucket, allows in any time and slack more; 0 if they don't.
func exceeds(l Limit, times []int64, slack int64) (over int64) {
	rate, drip := l.of().Rate(), min(l.DripSize, l.Size)
	bound := func(length int64) int64 {
		length += slack
		return max(l.Size+drip*(length/rate), l.Size-1+drip*bucket.CeilDiv(length, rate))
	}
	// The bound is no less than a straight line. So an admission has to be compared with all
	// earlier ones only if it is far enough above that line from one of them.
	line := func(i int) int64 { return int64(i)*rate - drip*times[i] }
	least := int64(math.MaxInt64)
	for j := range times {
		least = min(least, line(j))
		if line(j)-least+rate <= (l.Size-1+over)*rate+drip*slack {
			continue
		}
		for i := range j + 1 {
			over = max(over, int64(j-i+1)-bound(times[j]-times[i]))
		}
	}
	return over
}

// farLimit returns a limit of that many requests a second, at once too.
func farLimit(n int64) Limit {
	return Limit{Size: n, DripInterval: time.Second / time.Duration(n), DripSize: 1}
}

// The loads.
var (
	farSteady = farLoad{name: "steady", about: "one key, 1 000/s and as many at once, asked for at 900/s", limit: farLimit(1000), keys: 1, rate: 900, lasts: 6 * time.Second}
	farBusy   = farLoad{name: "busy", about: "one key, 10 000/s and as many at once, asked for at 9 000/s", limit: farLimit(10_000), keys: 1, rate: 9000, lasts: 2 * time.Second}
	farFlood  = farLoad{name: "flood", about: "one key, 1 000/s and as many at once, asked for at 10 000/s", limit: farLimit(1000), keys: 1, rate: 10_000, lasts: 3 * time.Second}
	farWaves  = farLoad{
		name: "waves", about: "one key, 1 000/s and 100 at once, asked for at 5 000/s for 300 ms, then not for as long, and so on",
		limit: Limit{Size: 100, DripInterval: time.Millisecond, DripSize: 1}, keys: 1, rate: 5000, lasts: 6 * time.Second, waves: 300 * time.Millisecond,
	}
	farZipf = farLoad{
		name: "many keys", about: "a million keys, each 100/s and as many at once, asked for at 10 000/s in all, by Zipf with an exponent of 1.1",
		limit: farLimit(100), keys: 1_000_000, rate: 10_000, lasts: 3 * time.Second,
	}
	farLoads = []farLoad{farSteady, farBusy, farFlood, farWaves, farZipf}

	// Its drips are larger than its size.
	farGusts = farLoad{name: "gusts", limit: Limit{Size: 8, DripInterval: 50 * time.Millisecond, DripSize: 50}, keys: 1, rate: 500, lasts: 4 * time.Second}
)

// TestLeasesSpareWaits guards that hardly a request waits for a server 20 ms away if its key
// is busy and this node has it alone, whether it is below its limit or far above.
func TestLeasesSpareWaits(t *testing.T) {
	server := newFarServer(t, redistest.Start(t))
	for _, load := range []farLoad{farSteady, farFlood} {
		c := farCase{Lease(100 * time.Millisecond), 1, farNetwork{rtt: 20 * time.Millisecond}, load}
		t.Run(c.String(), func(t *testing.T) {
			if r := c.simulate(t, server); r.waited*100 > r.requests*5 || r.admitted*100 < r.ideal*98 {
				t.Errorf("%d of %d requests waited, and %d were admitted of %d", r.waited, r.requests, r.admitted, r.ideal)
			}
		})
	}
}

// TestFar guards the bounds of limits that are decided far from their server, in a
// sample of what make far simulates: leases and reports admit no more than they may,
// whatever is lost and whichever node crashes; reports never have a request wait, and leases have
// fewer wait than exact decisions.
func TestFar(t *testing.T) {
	racetest.SingleGoroutine(t)
	server := newFarServer(t, redistest.Start(t))
	near, away := farNetwork{rtt: time.Millisecond}, farNetwork{rtt: 40 * time.Millisecond}
	faults := farNetwork{rtt: 20 * time.Millisecond, loss: 0.02, crashes: 5}
	for _, c := range []farCase{
		{Lease(100 * time.Millisecond), 3, near, farSteady},
		{Lease(time.Second), 10, away, farFlood},
		{Lease(time.Second), 10, faults, farFlood},
		{Lease(time.Second), 10, faults, farZipf},
		{Lease(time.Second), 10, near, farWaves},
		{Lease(time.Second), 10, near, farGusts},
		{Eventual(100 * time.Millisecond), 10, away, farFlood},
		{Eventual(100 * time.Millisecond), 10, faults, farFlood},
		{Eventual(100 * time.Millisecond), 100, away, farZipf},
	} {
		if c.load.keys > 1 && testing.Short() {
			continue // they take long
		}
		t.Run(c.String(), func(t *testing.T) {
			began := time.Now()
			r := c.simulate(t, server)
			t.Logf("%+v in %v", r, time.Since(began))
			if r.wrong > 0 {
				t.Errorf("%d more than may be", r.wrong)
			}
		})
	}
}
