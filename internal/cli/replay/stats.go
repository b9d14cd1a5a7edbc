package replay

import (
	"cmp"
	"hash/maphash"
	"maps"
	"math"
	"math/bits"
	"slices"
	"strings"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/offline"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/report"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/key/keytext"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/settle"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// replayedLimit is what a limit has done in a replay.
type replayedLimit struct {
	path      string
	bucket    string // the name of its buckets
	key       string
	headers   []string // the header fields of its key
	fields    []string // the fields of bodies in its key
	numbers   string
	size      int64 // in force; 0 if it depends on the request
	written   int64 // the option size, which factor divides; 0 if it has none
	factor    factor
	above     int64 // what the bucket may hold above its size
	algorithm string
	hasSize   bool
	hasWindow bool
	leasable  bool
	exact     bool // its consistency
	dryRun    bool

	// How requests are charged in the end, and of how many the log does not say what that
	// takes, see unknown.
	settlement                                           settle.Terms
	untimed, unanswered, unmatched, uncleared, estimated int64

	factorVaries bool // as it depends on the request: then sizes are those in force

	requests, admitted, denied int64
	spared                     int64         // requests that had room here and were denied by another limit
	bans, banned               int64         // that have begun, and requests that were denied during one
	over, delayed              int64         // requests that passed above the size, and that waited
	longest                    time.Duration // that one waited
	borrowed                   int64         // requests that a pool had room for instead
	redacted, headerless       int64         // requests that were left out, as the log lacks their key
	bodiless                   int64         // requests that were left out, as no log has bodies
	keyless                    int64         // requests that their client's address stood for
	passed, leased             int64         // requests that were not denied, and how many of them a lease would do

	times timeline
	hours hours
	paths pathCounts
	keys  keyStats
}

// newReplayedLimit returns the statistics of a limit.
func newReplayedLimit(of *offline.Limit, opt Options) *replayedLimit {
	numbers, limit := of.Numbers(), of.Limit
	l := &replayedLimit{
		path: of.Path, bucket: of.Name, key: of.Limit.Key.String(), headers: of.Limit.Key.Headers(), fields: of.Limit.Key.Fields(), numbers: numbers.String(),
		algorithm: numbers.Algorithm, hasSize: limit.Algorithm.HasSize(), hasWindow: limit.Algorithm.HasWindow(),
		leasable: of.Leasable, exact: numbers.Consistency == "", dryRun: limit.DryRun, settlement: limit.Settlement,
		factor: factor(of.Factor.Constant),
	}
	l.size, l.written = of.Sizes()
	if !of.Rate.IsDynamic() && !of.Drip.IsDynamic() {
		stored := of.Stored(time.Now())
		l.above = of.ExtraCapacity(&stored, of.UsualCost())
	}
	if l.factorVaries = of.Factor.IsDynamic(); l.factorVaries {
		l.factor = 1e6
	}
	l.hours.location = opt.Location
	l.paths.counts = make(map[string]*report.Count)
	l.keys = keyStats{size: l.size + l.above, keys: make(map[uint64]*keyStat), seed: maphash.MakeSeed(), showKeys: opt.ShowKeys, peaks: make(map[int64]int64)}
	return l
}

// count counts a request at a time, given whether the limit denied it, and whether
// all limits admitted it.
func (l *replayedLimit) count(at int64, path string, denied, admitted bool) {
	l.requests++
	if denied {
		l.denied++
	}
	if admitted {
		l.admitted++
	}
	l.times.count(at, denied, admitted)
	l.hours.count(at, denied)
	l.paths.count(path, denied)
}

// report returns the statistics for a report.
func (l *replayedLimit) report() report.Limit {
	r := report.Limit{
		Path: l.path, Algorithm: l.algorithm, Numbers: l.numbers, Size: l.written, Windows: l.hasWindow, Sizeless: !l.hasSize,
		Requests: l.requests, Admitted: l.admitted, Denied: l.denied, DeniedAtMost: l.denied, Spared: l.spared,
		ByPath: l.paths.top(), ByHour: l.hours.counts, HourIn: l.hours.location.String(),
	}
	if r.HourIn == "Local" {
		r.HourIn, _ = time.Now().Zone()
	}
	r.Slot, r.Times = l.times.report()
	r.Keys, r.KeysDenied, r.Peaks, r.Top = l.keys.report()
	r.KeysLasting = l.keys.lasting()
	for i := range r.Peaks {
		r.Peaks[i].Units = l.beneath(r.Peaks[i].Units)
	}
	r.Peaks = l.factor.sizesFor(r.Peaks)
	for i := range r.Top {
		r.Top[i].Peak = l.factor.sizeFor(l.beneath(r.Top[i].Peak))
	}
	if !l.hasSize {
		r.Size, r.Peaks = 0, nil
	}
	return r
}

// beneath returns the size that holds that many units together with what is above it.
func (l *replayedLimit) beneath(units int64) int64 {
	if units == report.NoSize || l.above == 0 {
		return units
	}
	return max(units-l.above, 1)
}

// factor is the option that divides sizes, in millionths.
type factor uint64

// sizeFor returns the smallest size that leaves that many units when it is divided by f, or
// report.NoSize if none that a limit can have does.
func (f factor) sizeFor(units int64) int64 {
	hi, lo := bits.Mul64(uint64(max(units-1, 0)), uint64(f))
	if units == report.NoSize || hi >= 1e6 {
		return report.NoSize
	}
	size, _ := bits.Div64(hi, lo, 1e6)
	if size >= limiter.MaxUnits {
		return report.NoSize
	}
	return int64(size) + 1
}

// sizesFor returns peaks as sizes that f divides.
func (f factor) sizesFor(peaks []report.Peak) (sizes []report.Peak) {
	for _, p := range peaks {
		size := f.sizeFor(p.Units)
		if n := len(sizes); n > 0 && sizes[n-1].Units == size {
			sizes[n-1].Keys += p.Keys
		} else {
			sizes = append(sizes, report.Peak{Units: size, Keys: p.Keys})
		}
	}
	return sizes
}

// timeline counts requests over time, in slots that widen as time goes on.
type timeline struct {
	width int64         // of a slot, in nanoseconds; 0 before the first request
	first int64         // slot
	slots []report.Slot // without their starts
}

// maxSlots is the most slots of a timeline.
const maxSlots = 300

// slotWidths are the widths of slots, each a multiple of the one before.
var slotWidths = []time.Duration{
	time.Second, 5 * time.Second, 15 * time.Second, time.Minute, 5 * time.Minute, 15 * time.Minute,
	time.Hour, 3 * time.Hour, 6 * time.Hour, 12 * time.Hour, 24 * time.Hour,
}

// count counts a request.
func (t *timeline) count(at int64, denied, admitted bool) {
	if t.width == 0 {
		t.width = int64(slotWidths[0])
		t.first = at / t.width
	}
	i := at/t.width - t.first
	for i >= maxSlots {
		t.widen()
		i = at/t.width - t.first
	}
	for int64(len(t.slots)) <= i {
		t.slots = append(t.slots, report.Slot{})
	}
	if denied {
		t.slots[i].Denied++
	}
	if admitted {
		t.slots[i].Admitted++
	}
}

// widen makes slots of the next width.
func (t *timeline) widen() {
	next := 2 * t.width
	if i := slices.Index(slotWidths, time.Duration(t.width)); i >= 0 && i+1 < len(slotWidths) {
		next = int64(slotWidths[i+1])
	}
	ratio := next / t.width
	first := t.first / ratio
	n := 0
	for i, s := range t.slots {
		j := int((t.first+int64(i))/ratio - first)
		t.slots[i] = report.Slot{}
		t.slots[j].Admitted += s.Admitted
		t.slots[j].Denied += s.Denied
		n = j + 1
	}
	t.slots, t.first, t.width = t.slots[:n], first, next
}

// report returns the slots.
func (t *timeline) report() (width time.Duration, slots []report.Slot) {
	slots = slices.Clone(t.slots)
	for i := range slots {
		slots[i].Start = time.Unix(0, (t.first+int64(i))*t.width)
	}
	return time.Duration(t.width), slots
}

// hours counts requests by the hour of the day.
type hours struct {
	counts   [24]report.Count
	location *time.Location

	hour        int // of the times between these two
	from, until int64
}

// count counts a request.
func (h *hours) count(at int64, denied bool) {
	if at < h.from || at >= h.until {
		t := time.Unix(0, at).In(h.location)
		h.hour = t.Hour()
		// Clocks are changed at quarters of an hour.
		quarter := int64(15 * time.Minute)
		h.from = at - at%quarter
		h.until = h.from + quarter
	}
	h.counts[h.hour].Requests++
	if denied {
		h.counts[h.hour].Denied++
	}
}

// pathCounts counts requests by path. When there are too many paths, those with
// the least requests are added up as others: clients can request any path.
type pathCounts struct {
	counts map[string]*report.Count
	others report.Count
}

const (
	maxPaths   = 4096 // that are counted
	shownPaths = 50
	maxText    = 256 // of a path or a key that is kept
)

// count counts a request.
func (p *pathCounts) count(path string, denied bool) {
	if len(path) > maxText {
		path = path[:maxText]
	}
	c := p.counts[path]
	if c == nil {
		if len(p.counts) == maxPaths {
			p.shrink(maxPaths / 2)
		}
		c = new(report.Count)
		p.counts[strings.Clone(path)] = c
	}
	c.Requests++
	if denied {
		c.Denied++
	}
}

// compareCounts orders counts, those with the most denied first.
func compareCounts(a, b report.Count) int {
	return cmp.Or(cmp.Compare(b.Denied, a.Denied), cmp.Compare(b.Requests, a.Requests))
}

// sorted returns the paths, those with the most denied requests first.
func (p *pathCounts) sorted() []string {
	return slices.SortedFunc(maps.Keys(p.counts), func(a, b string) int {
		return cmp.Or(compareCounts(*p.counts[a], *p.counts[b]), cmp.Compare(a, b))
	})
}

// shrink keeps n paths.
func (p *pathCounts) shrink(n int) {
	for _, path := range p.sorted()[n:] {
		p.others.Requests += p.counts[path].Requests
		p.others.Denied += p.counts[path].Denied
		delete(p.counts, path)
	}
}

// top returns the counts of the paths with the most denied requests, and last
// the ones of all others.
func (p *pathCounts) top() (top []report.Breakdown) {
	others := p.others
	for i, path := range p.sorted() {
		if c := *p.counts[path]; i < shownPaths {
			top = append(top, report.Breakdown{Path: path, Count: c})
		} else {
			others.Requests += c.Requests
			others.Denied += c.Denied
		}
	}
	if others.Requests > 0 {
		top = append(top, report.Breakdown{Path: "(others)", Count: others})
	}
	return top
}

// keyStats has the statistics of the keys of a limit.
type keyStats struct {
	keys map[uint64]*keyStat // by the hash of a key
	most int                 // keys
	size int64               // of their buckets, 0 if it depends on the request

	seed     maphash.Seed
	showKeys bool

	// The keys that were removed to make room for others.
	folded, foldedDenied, foldedLasting int64
	peaks                               map[int64]int64
	top                                 []report.Key
}

// keyStat has the statistics of a key.
type keyStat struct {
	text             string // if it may be shown
	clear            int64  // when its bucket runs empty, in µs, if that could hold anything
	since            int64  // when it was empty last, in µs
	peak             int64  // the highest level of that bucket so far
	period           int64  // of leasePeriod: the period of the last request
	requests, denied uint32
	recent           uint32 // requests in the present period
	lasts            bool   // whether it took long to reach the peak, see lasts
}

// lasts reports whether the time since b's bucket was empty is more than half of that
// in which a full one runs empty. A bucket that became too small in less was filled by a
// burst; otherwise its key sent more than drips out.
func lasts(b *limiter.Bucket, since time.Duration) bool {
	drip := max(b.Limit.DripSize, 1)
	drips := (b.Limit.Size + drip - 1) / drip
	return 2*since > time.Duration(drips)*b.Limit.DripInterval
}

// add counts a request on the bucket b, which is at the given level then if it could
// hold anything. It returns how many requests of the key there were in the present
// leasePeriod.
func (k *keyStats) add(b *limiter.Bucket, now time.Duration, filled level, denied bool) (recent uint32) {
	hash := maphash.String(k.seed, b.Key)
	// A bucket of the client's address has a longer name than the bucket of a key.
	interval := b.Limit.DripInterval
	if b.Limit.Algorithm == bucket.Fixed {
		interval = 0 // a calendar period's varies
	}
	for _, v := range [...]uint64{uint64(interval), uint64(b.Limit.DripSize), uint64(len(b.Name))} {
		hi, lo := bits.Mul64(hash^0x9e3779b97f4a7c15, v^0xd1b54a32d192ed03)
		hash = hi ^ lo
	}
	s, known := k.keys[hash]
	if !known {
		if len(k.keys) == k.most {
			k.fold()
		}
		s = new(keyStat)
		if k.showKeys {
			s.text = strings.Clone(keytext.Of(keytext.Cut(b.Key, maxText)))
		}
		k.keys[hash] = s
	}
	if !known || now.Microseconds() >= s.clear {
		s.since = now.Microseconds()
	}
	s.clear = (now + filled.clear).Microseconds()
	if filled.units > s.peak {
		s.peak = filled.units
		s.lasts = lasts(b, now-time.Duration(s.since)*time.Microsecond)
	}
	if s.requests < math.MaxUint32 {
		s.requests++
		if denied {
			s.denied++
		}
	}
	if period := int64(now / leasePeriod); period != s.period {
		s.period, s.recent = period, 0
	}
	s.recent++
	return s.recent
}

// shownKeys is how many keys a report lists.
const shownKeys = 20

// compareKeys orders keys, those with the most denied requests first.
func compareKeys(a, b report.Key) int {
	return cmp.Or(compareCounts(a.Count, b.Count), cmp.Compare(b.Peak, a.Peak), cmp.Compare(a.Text, b.Text))
}

// fold makes room by removing the quarter of the keys whose buckets run empty
// first: most have by now. What they did stays counted.
func (k *keyStats) fold() {
	clears := make([]int64, 0, len(k.keys))
	for _, s := range k.keys {
		clears = append(clears, s.clear)
	}
	slices.Sort(clears)
	threshold := clears[len(clears)/4]
	for hash, s := range k.keys {
		if s.clear > threshold {
			continue
		}
		delete(k.keys, hash)
		k.folded++
		if s.denied > 0 {
			k.foldedDenied++
		}
		if s.lasts && s.peak > k.size {
			k.foldedLasting++
		}
		k.peaks[roundedPeak(s.peak, k.size)]++
		k.top = addTop(k.top, s.report())
	}
}

// addTop adds a key to the top ones, if it is one of them.
func addTop(top []report.Key, key report.Key) []report.Key {
	if len(top) == shownKeys && compareKeys(top[shownKeys-1], key) <= 0 {
		return top
	}
	i, _ := slices.BinarySearchFunc(top, key, compareKeys)
	top = slices.Insert(top, i, key)
	return top[:min(len(top), shownKeys)]
}

// report returns the statistics of a key.
func (s *keyStat) report() report.Key {
	return report.Key{Text: s.text, Count: report.Count{Requests: int64(s.requests), Denied: int64(s.denied)}, Peak: s.peak}
}

// lasting returns how many keys needed more than the size, and took long to reach it.
func (k *keyStats) lasting() int64 {
	n := k.foldedLasting
	for _, s := range k.keys {
		if s.lasts && s.peak > k.size {
			n++
		}
	}
	return n
}

// report returns the statistics of all keys.
func (k *keyStats) report() (n, denied int64, peaks []report.Peak, top []report.Key) {
	n, denied, top = k.folded+int64(len(k.keys)), k.foldedDenied, slices.Clone(k.top)
	counts := maps.Clone(k.peaks)
	for _, s := range k.keys {
		if s.denied > 0 {
			denied++
		}
		counts[roundedPeak(s.peak, k.size)]++
		top = addTop(top, s.report())
	}
	for _, units := range slices.Sorted(maps.Keys(counts)) {
		peaks = append(peaks, report.Peak{Units: units, Keys: counts[units]})
	}
	return n, denied, peaks, top
}
