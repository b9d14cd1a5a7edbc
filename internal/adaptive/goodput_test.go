package adaptive

import (
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"sort"
	"testing"
)

var seeds = flag.Int("seeds", 1, "simulate each row with so many seeds")

func exponential(mean float64) func(*rand.Rand) float64 {
	return func(rng *rand.Rand) float64 { return rng.ExpFloat64() * mean }
}

func fixed(x float64) func(*rand.Rand) float64 { return func(*rand.Rand) float64 { return x } }

func always(x float64) func(float64) float64 { return func(float64) float64 { return x } }

// from returns a function of time that is x, from one time on y, and from another one on z.
func from(x, first, y, second, z float64) func(float64) float64 {
	return func(t float64) float64 {
		switch {
		case t < first:
			return x
		case t < second:
			return y
		}
		return z
	}
}

func workers(n int, speed func(t float64) float64) func(end float64) upstream {
	return func(end float64) upstream { return &queued{workers: n, speed: newSpeed(end, speed)} }
}

// locked returns an upstream with as many workers as there are jobs, and few locks.
func locked(n int) func(end float64) upstream {
	return func(float64) upstream { return &queued{workers: math.MaxInt, locks: n} }
}

// crowded returns an upstream with ten cores that does less the more jobs it has beyond ten.
func crowded(less float64) func(end float64) upstream {
	return func(float64) upstream {
		return &shared{cores: func(n int) float64 {
			return min(float64(n), 10) / (1 + less*max(0, float64(n)-10))
		}}
	}
}

// every returns how many requests come at once each so many seconds.
func every(seconds, requests int) func(t float64) int {
	return func(t float64) int {
		if int(math.Round(t*10))%(10*seconds) == 0 {
			return requests
		}
		return 0
	}
}

// pauses returns a speed of 1 with pauses of some length.
func pauses(every, length float64) func(t float64) float64 {
	return func(t float64) float64 {
		if t > every/2 && math.Mod(t+every/2, every) < length {
			return 1e-6
		}
		return 1
	}
}

// knee is half of 200 a second, five times that much, and half of it again.
var knee = from(100, 30, 1000, 60, 100)

var usual = []kind{{share: 1, work: exponential(0.05)}}

var classes = []kind{{share: 0.2, work: exponential(0.05), class: High}, {share: 0.6, work: exponential(0.05), class: Normal}, {share: 0.2, work: exponential(0.05), class: Low}}

func beside(share float64, other kind) []kind {
	other.share = share
	return []kind{{share: 1 - share, work: exponential(0.02)}, other}
}

func rows() []row {
	kneePhases := func(within float64) []phase {
		return []phase{{until: 30, capacity: 200, floor: 0.97}, {until: 60, capacity: 200, floor: within}, {until: 90, capacity: 200, floor: 0.97}}
	}
	return []row{
		{name: "five times the load", upstream: workers(10, nil), kinds: usual, rate: knee, phases: []phase{
			{until: 30, capacity: 200, floor: 0.97}, {until: 60, capacity: 200, floor: 0.97, p50: 0.3, p50up: 0.6}, {until: 90, capacity: 200, floor: 0.97},
		}},
		{name: "five times the load, 3 proxies", upstream: workers(10, nil), kinds: usual, rate: knee, proxies: 3, phases: kneePhases(0.97)},
		{name: "five times the load, 10 proxies", upstream: workers(10, nil), kinds: usual, rate: knee, proxies: 10, phases: kneePhases(0.97)},
		{name: "0.8 of the load", upstream: workers(10, nil), kinds: usual, rate: always(160), phases: []phase{{until: 120, capacity: 200, floor: 0.97, shed: 0.001}}},
		{name: "0.95 of the load", upstream: workers(10, nil), kinds: usual, rate: always(190), phases: []phase{{until: 120, capacity: 200, floor: 0.97}}},
		{name: "ramp from 0.2 to 3", upstream: workers(10, nil), kinds: usual, rate: func(t float64) float64 { return 40 + t*560/120 }, phases: []phase{{until: 40, capacity: 200, floor: 0.97}, {until: 80, capacity: 200, floor: 0.97}, {until: 120, capacity: 200, floor: 0.97}}},
		{name: "one a second", upstream: workers(2, nil), kinds: []kind{{share: 1, work: exponential(0.3), patient: 5}}, rate: always(1), phases: []phase{{until: 600, capacity: 6, floor: 0.97, shed: 0.001}}},
		{name: "one a second that take one", upstream: workers(4, nil), kinds: []kind{{share: 1, work: exponential(1), patient: 10}}, rate: always(1), phases: []phase{{until: 600, capacity: 4, floor: 0.97}}},
		{name: "clients retry at once", upstream: workers(10, nil), kinds: usual, rate: from(100, 30, 400, 60, 100), retries: 3, backoff: 0.001, phases: kneePhases(0.97)},
		{name: "clients retry for ever", upstream: workers(10, nil), kinds: usual, rate: from(160, 30, 300, 60, 160), retries: 20, backoff: 0.1, phases: kneePhases(0.97)},
		{name: "clients retry when told", upstream: workers(10, nil), kinds: usual, rate: from(160, 30, 300, 60, 160), retries: 3, phases: kneePhases(0.97)},
		{name: "500 users", upstream: workers(10, nil), kinds: usual, closed: 500, think: 1, phases: []phase{{until: 20, capacity: 200}, {until: 80, capacity: 200, floor: 0.97}}},
		{name: "100 at once each second", upstream: workers(10, nil), kinds: usual, bursts: every(1, 100), phases: []phase{{until: 10, capacity: 200}, {until: 60, capacity: 200, floor: 0.97}}},
		{name: "60 at once each second", upstream: workers(10, nil), kinds: usual, bursts: every(1, 60), phases: []phase{{until: 10, capacity: 200}, {until: 60, capacity: 200, floor: 0.97}}},
		{name: "15 at once each three seconds", upstream: workers(10, nil), kinds: usual, bursts: every(3, 15), phases: []phase{{until: 60, capacity: 200, floor: 0.999}}},
		{name: "100 at once each second, after an overload", upstream: workers(10, nil), kinds: usual, rate: from(100, 5, 1000, 35, 0), bursts: func(t float64) int {
			if t > 36 {
				return every(1, 100)(t)
			}
			return 0
		}, phases: []phase{{until: 36, capacity: 200, floor: 0.9}, {until: 46, capacity: 200}, {until: 80, capacity: 200, floor: 0.97}}},
		{name: "150 at once each minute", upstream: workers(200, nil), kinds: []kind{{share: 1, work: exponential(0.1)}}, rate: always(5), bursts: every(60, 150), phases: []phase{{until: 600, capacity: 2000, floor: 0.85}}},
		{name: "cold start", upstream: workers(400, nil), kinds: []kind{{share: 1, work: exponential(0.1)}}, rate: always(3000), phases: []phase{{until: 2, capacity: 4000, floor: 0.8}, {until: 10, capacity: 4000, floor: 0.97}}},
		{name: "1 s on, 1 s off", upstream: workers(10, nil), kinds: usual, rate: func(t float64) float64 { return 1000 * float64((int(t)+1)%2) }, phases: []phase{{until: 80, capacity: 200, floor: 0.3}}},

		{name: "slow uploads", upstream: workers(10, nil), kinds: beside(0.03, kind{work: exponential(0.02), upload: 30, patient: 60}), rate: always(103), phases: []phase{{until: 60, capacity: 103, floor: 0.97}, {until: 120, capacity: 103, floor: 0.97}}},
		{name: "many slow uploads", upstream: workers(10, nil), kinds: beside(0.5, kind{work: exponential(0.02), upload: 10, patient: 60}), rate: always(200), phases: []phase{{until: 20, capacity: 200, kindCapacity: 200, kindFloor: 0.97}, {until: 60, capacity: 200, kindCapacity: 200, kindFloor: 0.97}}},
		{name: "long polls", upstream: workers(10, nil), kinds: beside(0.03, kind{hold: fixed(25), patient: 60}), rate: always(103), phases: []phase{{until: 60, capacity: 103, floor: 0.97}, {until: 120, capacity: 103, floor: 0.95}}},
		polls("60 long polls of 2 s", kind{clients: 60, hold: fixed(2)}, 30, 80, 0.88, 0.97),
		polls("60 long polls of 10 s", kind{clients: 60, hold: fixed(10)}, 6, 80, 0.9, 0.97),
		polls("200 long polls of 10 s", kind{clients: 200, hold: fixed(10)}, 20, 80, 0.8, 0.95),
		polls("200 long polls of 2 s, five times the load", kind{clients: 200, hold: fixed(2)}, 100, 1000, 0.85, 0.93),
		polls("200 long polls of any length", kind{clients: 200, hold: exponential(10)}, 20, 80, 0.5, 0.95),
		polls("60 long polls of 2 s on the route of others", kind{clients: 60, hold: fixed(2), spread: 1}, 30, 80, 0.8, 0.97),
		polls("200 long polls of 10 s on the route of others", kind{clients: 200, hold: fixed(10), spread: 1}, 20, 80, 0.5, 0.95),
		polls("60 long polls of any length on the route of others", kind{clients: 60, hold: exponential(10), spread: 1}, 6, 80, 0.4, 0.8),
		{name: "one of two routes hangs", upstream: workers(10, nil), kinds: beside(0.5, kind{hold: fixed(60), patient: 2}), rate: always(50), phases: []phase{{until: 10, capacity: 25, floor: 0.65}, {until: 60, capacity: 25, floor: 0.68}}},
		{name: "reports", upstream: workers(100, nil), kinds: []kind{{share: 0.8, work: fixed(0.002)}, {share: 0.2, work: exponential(3), patient: 20}}, rate: always(100), phases: []phase{{until: 20, capacity: 166, floor: 0.95}, {until: 80, capacity: 166, floor: 0.95}}},
		{name: "rare reports", upstream: workers(100, nil), kinds: []kind{{share: 0.95, work: fixed(0.002)}, {share: 0.05, work: exponential(3), patient: 10}}, rate: always(526), phases: []phase{{until: 20, capacity: 657, floor: 0.97}, {until: 60, capacity: 657, floor: 0.97}}},
		{name: "one of four hangs", upstream: workers(10, nil), kinds: beside(0.25, kind{hold: fixed(60), patient: 2}), rate: always(100), phases: []phase{{until: 10, capacity: 75, floor: 0.95}, {until: 60, capacity: 75, floor: 0.95}}},

		{name: "pauses of 1 s", upstream: workers(10, pauses(15, 1)), kinds: []kind{{share: 1, work: exponential(0.05), patient: 5}}, rate: always(150), phases: []phase{{until: 120, capacity: 187, floor: 0.94}}},
		{name: "pauses of 0.3 s", upstream: workers(10, pauses(5, 0.3)), kinds: usual, rate: always(160), phases: []phase{{until: 120, capacity: 187, floor: 0.97, shed: 0.002}}},
		{name: "slow for 20 s", upstream: workers(10, from(0.2, 20, 1, 999, 1)), kinds: usual, rate: always(160), phases: []phase{{until: 20, capacity: 40, floor: 0.93}, {until: 30, capacity: 200, floor: 0.95}, {until: 60, capacity: 200, floor: 0.97}}},
		{name: "half of the workers for 30 s", upstream: workers(10, from(1, 30, 0.5, 60, 1)), kinds: usual, rate: always(400), phases: []phase{{until: 30, capacity: 200, floor: 0.95}, {until: 60, capacity: 100, floor: 0.95}, {until: 90, capacity: 200, floor: 0.95}}},
		{name: "three times slower", upstream: workers(10, from(1, 30, 1./3, 999, 1)), kinds: usual, rate: always(100), phases: []phase{{until: 30, capacity: 200, floor: 0.97}, {until: 60, capacity: 67, floor: 0.93}}},
		{name: "three times slower, but no less able", upstream: workers(1000, from(1, 30, 1./3, 999, 1)), kinds: usual, rate: always(400), phases: []phase{{until: 30, capacity: 999, floor: 0.97}, {until: 60, capacity: 999, floor: 0.97}}},
		{name: "three times faster", upstream: workers(10, from(1, 30, 3, 999, 3)), kinds: usual, rate: always(1000), phases: []phase{{until: 30, capacity: 200, floor: 0.97}, {until: 40, capacity: 600, floor: 0.97}, {until: 60, capacity: 600, floor: 0.97}}},
		{name: "hangs for a minute", upstream: workers(10, from(1, 30, 1e-6, 90, 1)), kinds: usual, rate: always(400), phases: []phase{{until: 30, capacity: 200, floor: 0.95}, {until: 90, capacity: 999}, {until: 100, capacity: 200}, {until: 120, capacity: 200, floor: 0.9}}},
		{name: "patient clients", upstream: workers(10, nil), kinds: []kind{{share: 1, work: exponential(0.05), patient: 30}}, rate: knee, phases: kneePhases(0.97)},
		{name: "503 beyond 50 queued", upstream: func(float64) upstream { return &queued{workers: 10, longest: 50} }, kinds: usual, rate: knee, phases: kneePhases(0.97)},
		{name: "500 after 300 ms without a connection", upstream: func(float64) upstream { return &queued{workers: 60, locks: 4, lockWait: 0.3} }, kinds: []kind{{share: 1, work: exponential(0.005), lock: exponential(0.04)}}, rate: from(50, 30, 300, 60, 50),
			phases: []phase{{until: 30, capacity: 100, floor: 0.97}, {until: 60, capacity: 100, floor: 0.97}, {until: 90, capacity: 100, floor: 0.97}}},
		{name: "half fail at once", upstream: workers(10, nil), kinds: beside(0.5, kind{fails: true}), rate: always(1000), phases: []phase{{until: 10, capacity: 500}, {until: 40, capacity: 500, floor: 0.95}}},
		{name: "classes at twice the load", upstream: workers(10, nil), kinds: classes, rate: always(400), phases: []phase{{until: 20, capacity: 200}, {until: 60, capacity: 200, floor: 0.97, kindCapacity: 200, kindFloor: 0.97}}},
		{name: "classes at four times the load", upstream: workers(10, nil), kinds: classes, rate: always(800), phases: []phase{{until: 20, capacity: 200}, {until: 60, capacity: 200, floor: 0.95, kindCapacity: 200, kindFloor: 0.9}}},
		{name: "low alone", upstream: workers(10, nil), kinds: []kind{{share: 1, work: exponential(0.05), class: Low}}, rate: always(180), phases: []phase{{until: 20, capacity: 200}, {until: 60, capacity: 200, floor: 0.97}}},
		{name: "low after an overload of few", upstream: workers(1, nil), kinds: classes, rate: from(10, 30, 100, 60, 10), phases: []phase{{until: 60, capacity: 20, floor: 0.65}, {until: 65, capacity: 20}, {until: 80, capacity: 20, floor: 0.95, kind: 2, kindCapacity: 20, kindFloor: 0.8}}},
		hiding("one worker of 100 ms", 1, 0.1, 2, 1, 30, 0.8, 0.97),
		hiding("four workers of 400 ms", 4, 0.4, 2, 1, 30, 0.55, 0.97),
		hiding("one worker of 100 ms, 3 proxies", 1, 0.1, 2, 3, 30, 0.55, 0.95),
		hiding("one worker of 100 ms, patience of 10 s", 1, 0.1, 10, 1, 30, 0.9, 0.95),
		hiding("one worker of 100 ms, from the first second", 1, 0.1, 2, 1, 0, 0.4, 0.95),
		{name: "costly ones that wait as they are told, cheap ones that do not", upstream: workers(10, nil), kinds: []kind{{clients: 500, again: 0.1, work: exponential(0.05)}, {clients: 30, work: fixed(1), patient: 10}},
			phases: []phase{{until: 20, capacity: 200, floor: 0.9, kind: 1, kindCapacity: 1, kindFloor: 0.6}, {until: 60, capacity: 200, floor: 0.9, kind: 1, kindCapacity: 1, kindFloor: 0.6}}},
		{name: "dead jobs fill the threads", upstream: func(float64) upstream { return &queued{workers: 500, locks: 2} }, kinds: []kind{{share: 0.95, work: fixed(0.002)}, {share: 0.05, work: fixed(0.002), lock: exponential(0.1)}}, rate: always(1000),
			phases: []phase{{until: 20, capacity: 970, floor: 0.95}, {until: 60, capacity: 970, floor: 0.97}}},
		{name: "half need a lock", upstream: func(float64) upstream { return &queued{workers: 40, locks: 1} }, kinds: []kind{{share: 0.5, work: exponential(0.005)}, {share: 0.5, work: exponential(0.005), lock: exponential(0.01)}}, rate: from(100, 30, 600, 60, 100),
			phases: []phase{{until: 30, capacity: 200, floor: 0.97}, {until: 60, capacity: 200, floor: 0.97}, {until: 90, capacity: 200, floor: 0.97}}},
		{name: "five times the load over 50 routes", upstream: workers(10, nil), kinds: []kind{{share: 1, work: exponential(0.05), spread: 50}}, rate: knee, phases: kneePhases(0.97)},
		// What it can't, as documents say.
		{name: "does less when crowded", upstream: crowded(0.01), kinds: usual, rate: knee, phases: kneePhases(0.45)},
		{name: "does much less when crowded", upstream: crowded(0.03), kinds: usual, rate: knee, phases: kneePhases(0.3)},
		{name: "one of two hangs", upstream: workers(10, nil), kinds: beside(0.5, kind{hold: fixed(60), patient: 2, spread: 1}), rate: always(50), phases: []phase{{until: 10, capacity: 25}, {until: 60, capacity: 25, floor: 0.1}}},
		{name: "five times 20 a second, 10 proxies", upstream: workers(2, nil), kinds: []kind{{share: 1, work: exponential(0.1)}}, rate: from(10, 30, 100, 60, 10), proxies: 10, phases: []phase{{until: 30, capacity: 20, floor: 0.95}, {until: 60, capacity: 20}}},
		{name: "five times the load, 1000 keys", upstream: workers(10, nil), kinds: usual, rate: knee, keys: 1000, phases: []phase{{until: 30, capacity: 200, floor: 0.97}, {until: 60, capacity: 200}}},
		{name: "shares its cores", upstream: func(float64) upstream {
			return &shared{cores: func(n int) float64 { return min(float64(n), 10) }}
		}, kinds: usual, rate: knee, phases: kneePhases(0.85)},
	}
}

// hiding is a row of 300 cheap requests a second and 25 costly ones, of which an upstream can do
// 10, calm for some time.
func hiding(name string, locks int, work, patient float64, proxies int, calm, soon, later float64) row {
	r := row{
		name: "cheap beside costly: " + name, upstream: locked(locks), proxies: proxies, rate: from(65, calm, 325, 999, 0),
		kinds: []kind{{share: 300. / 325, work: fixed(0.001), patient: patient}, {share: 25. / 325, work: fixed(0.0001), lock: fixed(work), patient: patient}},
	}
	if calm > 0 {
		r.phases = append(r.phases, phase{until: calm, capacity: 310, floor: 0.97})
	}
	r.phases = append(r.phases,
		phase{until: calm + 20, capacity: 310, floor: 0.97, kind: 1, kindCapacity: 10, kindFloor: soon},
		phase{until: calm + 80, capacity: 310, floor: 0.97, kind: 1, kindCapacity: 10, kindFloor: later})
	return r
}

// polls is a row of clients that each have a request in progress which is answered late, so many a
// second, and ask again soon, beside others, of which an upstream can do 200 a second.
func polls(name string, late kind, each, rate, soon, later float64) row {
	late.patient, late.again = 60, 0.1
	did := min(rate, 200)
	return row{
		name: name, upstream: workers(10, nil), rate: always(rate), kinds: []kind{{share: 1, work: exponential(0.05)}, late},
		phases: []phase{
			{until: 20, capacity: 200, kindCapacity: did, kindFloor: soon},
			{until: 40, capacity: did + each, floor: later, kindCapacity: did, kindFloor: later},
			{until: 80, capacity: did + each, floor: later, kindCapacity: did, kindFloor: later},
		},
	}
}

// TestGoodput guards what an upstream answers in time, as a part of what it gets and can do,
// before upstreams and loads of many kinds.
func TestGoodput(t *testing.T) {
	t.Parallel()
	slack := 0.02 // of a single seed
	if *seeds > 1 {
		slack = 0
	}
	for _, r := range rows() {
		t.Run(r.name, func(t *testing.T) {
			t.Parallel()
			var runs [][]tally
			for seed := range *seeds {
				runs = append(runs, r.run(uint64(seed), options))
			}
			began := 0.0
			for i, p := range r.phases {
				all, alone, shed, worst := 0.0, 0.0, 0.0, math.Inf(1)
				var took []float64
				for _, run := range runs {
					part := func(good, offered int, capacity float64) float64 {
						return float64(good) / max(1, min(float64(offered), capacity*(p.until-began)))
					}
					of := run[i]
					one := part(of.good, of.offered, p.capacity)
					all += one / float64(len(runs))
					worst = min(worst, one)
					if k := of.kinds[p.kind]; k != nil && p.kindFloor > 0 {
						alone += part(k[1], k[0], p.kindCapacity) / float64(len(runs))
					}
					shed += float64(of.shed) / float64(max(1, of.attempts)) / float64(len(runs))
					took = append(took, of.took...)
				}
				began = p.until
				got := fmt.Sprintf("until %v s: %.3f (%.3f), of kind %d %.3f, turned away %.3f", p.until, all, worst, p.kind, alone, shed)
				t.Log(got)
				if all < p.floor-slack || alone < p.kindFloor-slack || p.shed > 0 && shed > p.shed {
					t.Errorf("%s, want %v, %v, %v", got, p.floor, p.kindFloor, p.shed)
				}
				sort.Float64s(took)
				if p50 := took[len(took)/2]; p.p50 > 0 && (p50 < p.p50 || p50 > p.p50up) {
					t.Errorf("median %.3f s, want one from %v to %v", p50, p.p50, p.p50up)
				}
			}
		})
	}
}
