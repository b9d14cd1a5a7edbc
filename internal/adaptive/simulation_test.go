package adaptive

import (
	"container/heap"
	"math"
	"math/rand/v2"
	"sort"
	"strconv"
	"time"
)

// A simulation of clients, controllers, and an upstream, event by event. Its time is in seconds.
type simulation struct {
	now  float64
	todo events
	made int
	rng  *rand.Rand
	row  *row
	up   upstream
	into []tally // of each phase
}

// event is something that happens at some time.
type event struct {
	at     float64
	number int
	happen func()
}

type events []event

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	return e[i].at < e[j].at || e[i].at == e[j].at && e[i].number < e[j].number
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)   { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	last := (*e)[len(*e)-1]
	*e = (*e)[:len(*e)-1]
	return last
}

// after has something happen in so many seconds.
func (s *simulation) after(seconds float64, happen func()) {
	s.made++
	heap.Push(&s.todo, event{s.now + max(0, seconds), s.made, happen})
}

// row is a case of the simulation.
type row struct {
	name     string
	upstream func(end float64) upstream
	kinds    []kind
	rate     func(t float64) float64 // of requests a second
	bursts   func(t float64) int     // requests at once, each tenth of a second
	closed   int                     // clients that send a request when the last one has ended
	think    float64                 // mean time in between
	retries  int
	backoff  float64 // mean; 0 for up to four seconds
	proxies  int     // 0 for 1
	keys     int     // with a controller each
	phases   []phase
}

// phase is a part of a row.
type phase struct {
	until    float64
	capacity float64 // answers a second that are possible
	floor    float64 // least answers in time, as a part of the least of what is offered and possible

	kind             int // also of this kind alone, if its floor is not 0
	kindCapacity     float64
	kindFloor        float64
	shed, p50, p50up float64 // most that is turned away, and where the median is, if not 0
}

// kind is one of requests.
type kind struct {
	share   float64 // of all
	work    func(*rand.Rand) float64
	lock    func(*rand.Rand) float64 // work for which it needs one of few
	upload  float64                  // for which its client sends it
	hold    func(*rand.Rand) float64 // for which it holds no worker, in place of work
	fails   bool                     // as soon as it has come
	patient float64                  // how long its client waits; 0 for 1
	class   Class
	spread  int // over so many routes, in place of one of its own

	clients int     // that each send the next one when the last one has ended, in place of a share
	again   float64 // mean time after which these do if they are turned away; 0 for when they are told to
}

// tally is what became of the requests of a phase.
type tally struct {
	offered, good, shed, attempts int
	kinds                         map[int]*[2]int // offered, good
	took                          []float64
}

// job is a request at an upstream.
type job struct {
	work, lock, due float64
	gone            *bool // whether nobody waits for it
	done            func(answered bool)
}

type upstream interface{ submit(s *simulation, j *job) }

// speed is how fast an upstream works over time.
type speed []float64 // work that is done until each step

const steps = 200 // a second

func newSpeed(end float64, at func(t float64) float64) speed {
	if at == nil {
		return nil
	}
	s := make(speed, int(end*steps)+2)
	for i := range s[1:] {
		s[i+1] = s[i] + at(float64(i)/steps)/steps
	}
	return s
}

// work returns how much is done until t.
func (s speed) work(t float64) float64 {
	if s == nil {
		return t
	}
	i := int(t * steps)
	if i >= len(s)-1 {
		return s[len(s)-1] + t - float64(len(s)-1)/steps
	}
	return s[i] + (s[i+1]-s[i])*(t*steps-float64(i))
}

// when returns when so much is done.
func (s speed) when(work float64) float64 {
	if s == nil {
		return work
	}
	i := sort.SearchFloat64s(s, work)
	switch {
	case i == 0:
		return 0
	case i == len(s):
		return float64(len(s)-1)/steps + work - s[len(s)-1]
	}
	return (float64(i-1) + (work-s[i-1])/(s[i]-s[i-1])) / steps
}

// queued is an upstream with workers, first come, first served, which knows nothing of clients
// that have left. Some jobs need a lock then, for which they wait with their worker.
type queued struct {
	workers, locks int
	drops          bool    // jobs that need a lock, once nobody waits for them
	longest        int     // queue, beyond which it fails at once; 0 for any
	lockWait       float64 // after which a job fails; 0 for never
	speed          speed

	queue, lockQueue []*job
	busy, locked     int
}

func (u *queued) submit(s *simulation, j *job) {
	if u.longest > 0 && len(u.queue) >= u.longest {
		s.after(0.001, func() { j.done(false) })
		return
	}
	u.queue = append(u.queue, j)
	u.fill(s)
}

func (u *queued) fill(s *simulation) {
	for len(u.queue) > 0 && u.busy < u.workers {
		j := u.queue[0]
		u.queue = u.queue[1:]
		u.busy++
		s.after(u.speed.when(u.speed.work(s.now)+j.work)-s.now, func() {
			if j.lock == 0 || u.locks == 0 {
				u.end(s, j, true)
				return
			}
			u.lockQueue = append(u.lockQueue, j)
			if u.lockWait > 0 {
				s.after(u.lockWait, func() {
					for i, other := range u.lockQueue {
						if other == j {
							u.lockQueue = append(u.lockQueue[:i:i], u.lockQueue[i+1:]...)
							u.end(s, j, false)
							return
						}
					}
				})
			}
			u.fillLocks(s)
		})
	}
}

func (u *queued) fillLocks(s *simulation) {
	for len(u.lockQueue) > 0 && u.locked < u.locks {
		j := u.lockQueue[0]
		u.lockQueue = u.lockQueue[1:]
		if u.drops && *j.gone {
			u.end(s, j, false)
			continue
		}
		u.locked++
		s.after(u.speed.when(u.speed.work(s.now)+j.lock)-s.now, func() {
			u.locked--
			u.end(s, j, true)
			u.fillLocks(s)
		})
	}
}

func (u *queued) end(s *simulation, j *job, answered bool) {
	u.busy--
	j.done(answered)
	u.fill(s)
}

// shared is an upstream that works on all jobs at the same time, by so many cores for each number
// of them.
type shared struct {
	cores func(jobs int) float64
	fails func(jobs int, rng *rand.Rand) bool // after the work, if it came as that many

	jobs      []*job
	done, was float64
	version   int
}

func (u *shared) advance(now float64) {
	if n := len(u.jobs); n > 0 {
		u.done += (now - u.was) * u.cores(n) / float64(n)
	}
	u.was = now
}

func (u *shared) submit(s *simulation, j *job) {
	u.advance(s.now)
	if u.fails != nil && u.fails(len(u.jobs)+1, s.rng) {
		done := j.done
		j.done = func(bool) { done(false) }
	}
	j.due = u.done + j.work
	i := sort.Search(len(u.jobs), func(i int) bool { return u.jobs[i].due > j.due })
	u.jobs = append(u.jobs, nil)
	copy(u.jobs[i+1:], u.jobs[i:])
	u.jobs[i] = j
	u.plan(s)
}

func (u *shared) plan(s *simulation) {
	u.version++
	if len(u.jobs) == 0 {
		return
	}
	version, n := u.version, len(u.jobs)
	s.after(max(0, u.jobs[0].due-u.done)*float64(n)/u.cores(n)+1e-9, func() {
		if version != u.version {
			return
		}
		u.advance(s.now)
		j := u.jobs[0]
		u.jobs = u.jobs[1:]
		u.plan(s)
		j.done(true)
	})
}

// epoch is when simulations begin.
var epoch = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// time returns the time.
func (s *simulation) time() time.Time {
	return epoch.Add(time.Duration(s.now * float64(time.Second)))
}

// run simulates a row, and returns what became of the requests of each phase.
func (r *row) run(seed uint64, options Options) []tally {
	end := r.phases[len(r.phases)-1].until
	s := &simulation{rng: rand.New(rand.NewPCG(seed, 1)), row: r, up: r.upstream(end + 30), into: make([]tally, len(r.phases))}
	for i := range r.kinds {
		options.High = options.High || r.kinds[i].class > High
	}
	all := make([]*Controller, max(1, r.proxies, r.keys))
	for i := range all {
		all[i] = New(options, epoch)
	}
	request := func(then func()) { s.try(s.kind(), 0, all[s.rng.IntN(len(all))], then) }
	if r.rate != nil {
		var arrive func()
		arrive = func() {
			gap := s.rng.ExpFloat64() / max(r.rate(s.now), 1e-9)
			if gap > 0.05 {
				s.after(0.05, arrive)
				return
			}
			s.after(gap, func() {
				request(nil)
				arrive()
			})
		}
		s.after(0, arrive)
	}
	if r.bursts != nil {
		tick := 0
		var burst func()
		burst = func() {
			for range r.bursts(float64(tick) / 10) {
				request(nil)
			}
			tick++
			s.after(float64(tick)/10-s.now, burst)
		}
		s.after(0, burst)
	}
	for i, k := range r.kinds {
		for range k.clients {
			var loop func()
			loop = func() { s.try(i, 0, all[s.rng.IntN(len(all))], loop) }
			s.after(0.05*s.rng.Float64(), loop)
		}
	}
	for range r.closed {
		var loop func()
		loop = func() { s.after(s.rng.ExpFloat64()*r.think, func() { request(loop) }) }
		loop()
	}
	for len(s.todo) > 0 {
		next := heap.Pop(&s.todo).(event)
		if next.at >= end {
			break
		}
		s.now = next.at
		next.happen()
	}
	return s.into
}

// kind draws one.
func (s *simulation) kind() int {
	x := s.rng.Float64()
	for i := range s.row.kinds {
		if x -= s.row.kinds[i].share; x < 0 {
			return i
		}
	}
	return len(s.row.kinds) - 1
}

// try has a client send a request to a controller, and then do something else.
func (s *simulation) try(kindOf, tries int, c *Controller, then func()) {
	k, began := &s.row.kinds[kindOf], s.now
	i := sort.Search(len(s.row.phases), func(i int) bool { return s.row.phases[i].until > began })
	t := &s.into[i]
	if t.kinds == nil {
		t.kinds = make(map[int]*[2]int)
	}
	if t.kinds[kindOf] == nil {
		t.kinds[kindOf] = new([2]int)
	}
	t.attempts++
	if tries == 0 {
		t.offered++
		t.kinds[kindOf][0]++
	}
	again := func(wait float64) {
		switch {
		case tries < s.row.retries:
			if s.row.backoff > 0 {
				wait = s.row.backoff * (0.5 + s.rng.Float64())
			}
			s.after(wait, func() { s.try(kindOf, tries+1, c, then) })
		case k.clients > 0:
			if k.again > 0 {
				wait = k.again * (0.75 + s.rng.Float64()/2)
			}
			s.after(wait, then)
		case then != nil:
			then()
		}
	}
	route := Route{Segment: strconv.Itoa(kindOf)}
	for kindOf == 1 && route.number() == (Route{Segment: "0"}).number() { // which has another number
		route.Segment += "1"
	}
	if k.spread > 0 {
		route.Segment = strconv.Itoa(s.rng.IntN(k.spread))
	}
	slot := new(Slot)
	if !c.Acquire(slot, &Request{Class: k.class, Route: route}, s.time()) {
		c.Shed(k.class)
		t.shed++
		again(1 + math.Ceil(3*s.rng.Float64()))
		return
	}
	gone := false
	end := func(answered bool) {
		if gone {
			return
		}
		gone = true
		slot.Release(s.time(), answered)
		t.took = append(t.took, s.now-began)
		if !answered {
			again(0)
			return
		}
		t.good++
		t.kinds[kindOf][1]++
		if then != nil {
			then()
		}
	}
	patient := k.patient
	if patient == 0 {
		patient = 1
	}
	s.after(patient, func() { end(false) })
	j := &job{gone: &gone, done: end}
	if k.work != nil {
		j.work = k.work(s.rng)
	}
	if k.lock != nil {
		j.lock = k.lock(s.rng)
	}
	switch {
	case k.fails:
		s.after(0.001, func() { end(false) })
	case k.upload > 0:
		slot.Wait(s.time())
		s.after(k.upload, func() {
			if !gone {
				slot.Resume(s.time())
				s.up.submit(s, j)
			}
		})
	case k.hold != nil:
		s.after(k.hold(s.rng), func() { end(true) })
	default:
		s.up.submit(s, j)
	}
}
