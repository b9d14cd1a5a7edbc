package adaptive

import (
	"math"
	"time"
)

const (
	// Initial is the limit of a new controller, and what it allows at least while all is well.
	Initial = 20

	// A window ends after shortWindow if it has manyAnswers, after longWindow if it has
	// fewAnswers, or so many slow failures besides, and after lastWindow in any case; the last
	// two are at least twice the latency. In a shorter window a pause of the upstream, such as one
	// of its garbage collector, would look like an overload. One that only raises the limit, since
	// requests are turned away and the mean is below half of the latency, may end after quickWindow.
	quickWindow = 100 * time.Millisecond
	shortWindow = time.Second
	longWindow  = 2 * time.Second
	lastWindow  = 10 * time.Second
	manyAnswers = 30
	fewAnswers  = 10

	fade       = 10 * time.Minute // in which the recent peak falls to 1/e
	losingFade = 30 * time.Second // the same of losing
	manyLost   = 5                // by which clients leave rather than get late answers
	useless    = 10 * time.Second // that all windows are slow at the least limit, after which that is reported

	spans = 32 // parts of the longest time for which a request counts, by which starts are kept

	cut      = 0.7  // by which the shares of less important classes shrink in a second
	recovery = 0.05 // of the limit that they grow in a second
)

// shares are the parts of the limit that classes may fill while nothing is turned away.
var shares = [Classes]float64{1, 0.9, 0.75}

// meter measures requests in progress, and limits them. By Little's law, the mean time until they
// are answered is the mean number in progress divided by the answers a second. Both are counted,
// so a cut is seen at once and not one latency later.
//
// Requests count for no longer than some latencies. Those that take longer are slow by themselves,
// or hang, and would keep the others out. Nor do they lower the limit while others are answered
// quickly.
type meter struct {
	options *Options
	span    time.Duration // the longest time that a request counts for is spans of these

	limit      float64
	inProgress int // that count
	share      [Classes]float64
	most       [Classes]float64 // of these
	shared     time.Duration    // when the shares were set
	peak       float64          // in progress, recently
	mean       time.Duration    // of the last window; 0 without answers
	rate       float64          // of answers per second in it
	verdict    Verdict          // on it
	losing     float64          // slow failures, less answers to requests that counted no more, recently

	started [spans + 1]int // requests that count, by the span in which they have started
	expired int64          // the last span whose requests count no more

	// The present window.
	began, last time.Duration
	area        time.Duration // sum of the times for which requests were in progress
	answers     int
	quick       int           // of these, to requests that still counted
	quickTook   time.Duration // sum of the times of those
	slow        int           // failures that took longer than the latency, and requests that count no more
	top         int
	turnedAway  [Classes]int
}

// init has m begin at now. Requests are to count for so many latencies.
func (m *meter) init(o *Options, latencies int, now time.Duration) {
	*m = meter{
		options: o, span: time.Duration(latencies) * o.Latency / spans, limit: min(max(Initial, float64(o.Min)), float64(o.Max)),
		most: shares, shared: now, began: now, last: now,
	}
	if !o.High {
		m.most[Normal] = 1
	}
	m.share = m.most
	m.expired = max(-1, m.spanAt(now)-spans-1)
}

// spanAt returns the span that t is in.
func (m *meter) spanAt(t time.Duration) int64 { return int64(t / m.span) }

// room reports whether there is room for a request of a class up to a part of the limit.
func (m *meter) room(class Class, part float64) bool {
	return m.inProgress < int(math.Round(min(part*m.limit, float64(m.options.Max))*m.shareOf(class)))
}

// shareOf returns the part of the limit that a class may fill. It grows while nothing that is more
// important is turned away.
func (m *meter) shareOf(class Class) float64 {
	if m.share[class] == m.most[class] || m.turnedAwayAbove(class) {
		return m.share[class]
	}
	return min(m.share[class]+recovery*(m.last-m.shared).Seconds(), m.most[class])
}

// turnedAwayAbove reports whether any request was turned away that is more important than a class.
func (m *meter) turnedAwayAbove(class Class) bool {
	for _, n := range m.turnedAway[:class] {
		if n > 0 {
			return true
		}
	}
	return false
}

// start counts a request that has started at some time, not long ago.
func (m *meter) start(at time.Duration) {
	if span := m.spanAt(at); span > m.expired {
		m.inProgress++
		m.started[span%(spans+1)]++
		m.top = max(m.top, m.inProgress)
	}
}

// stop counts a request no more that has started at some time, and reports whether it has until then.
func (m *meter) stop(started time.Duration) bool {
	span := m.spanAt(started)
	if span <= m.expired {
		return false
	}
	m.inProgress--
	m.started[span%(spans+1)]--
	return true
}

// finish notes the outcome of a request that has stopped, having counted until then or not.
func (m *meter) finish(started time.Duration, counted, answered bool) {
	took := m.last - started
	switch {
	case answered && counted:
		m.answers++
		m.quick++
		m.quickTook += took
	case answered:
		m.answers++
		m.losing--
	case took < m.options.Latency:
		m.area = max(0, m.area-(m.last-max(started, m.began))) // what was before is in an earlier window
	default:
		m.losing++
		if counted { // else slow already
			m.slow++
		}
	}
}

// advance adds the time until now to the window. If that is due, it returns how long it was.
func (m *meter) advance(now time.Duration) (ended time.Duration) {
	if to := m.spanAt(now) - spans - 1; to > m.expired {
		for span := max(m.expired+1, to-spans); span <= to; span++ {
			if n := m.started[span%(spans+1)]; n > 0 {
				m.pass(time.Duration(span+spans+1) * m.span)
				m.started[span%(spans+1)] = 0
				m.inProgress -= n
				m.slow += n
			}
		}
		m.expired = to
	}
	m.pass(now)
	switch length := m.last - m.began; {
	case length < quickWindow:
		return 0
	case length < shortWindow:
		if m.quick >= manyAnswers && m.filling() && m.area/time.Duration(m.quick) < m.options.Latency/2 {
			return length
		}
		return 0
	case m.answers >= manyAnswers, length >= max(lastWindow, 2*m.options.Latency),
		m.answers+m.slow >= fewAnswers && length >= max(longWindow, 2*m.options.Latency):
		return length
	}
	return 0
}

// pass adds the time until now.
func (m *meter) pass(now time.Duration) {
	if passed := now - m.last; passed > 0 {
		m.area += time.Duration(m.inProgress) * passed
		m.last = now
	}
}

// filling reports whether any request was turned away.
func (m *meter) filling() bool { return m.turnedAway != [Classes]int{} }

// hasNoQueue reports whether requests that take long wait for something else than those before them,
// such as news. In a queue all of them wait, so quick answers show that there is none. But if the
// clients of those that take long leave unanswered, something is overloaded that not all of them need.
func (m *meter) hasNoQueue() bool {
	return m.quick > 0 && m.quickTook/time.Duration(m.quick) < m.options.Latency/4 && m.losing < manyLost
}

// end judges the window, which was so long, sets the limit for the next one, and begins that.
func (m *meter) end(length time.Duration) {
	latency := m.options.Latency
	m.peak = max(float64(m.top), m.peak*math.Exp(-length.Seconds()/fade.Seconds()))
	mean := m.area / time.Duration(max(m.answers, 1))
	if mean > latency && m.hasNoQueue() {
		mean = m.quickTook / time.Duration(m.quick)
	}
	m.losing *= math.Exp(-length.Seconds() / losingFade.Seconds())
	m.rate = float64(m.answers) / length.Seconds()
	good := m.rate*latency.Seconds() + 1 // in progress at that latency
	switch room := max(Initial, 2*m.peak); {
	case mean > latency && m.top > m.options.Min: // a few that hang are no overload
		m.verdict, m.limit = Slow, min(m.limit, max(good, m.limit/4))
	case m.filling():
		if m.answers+m.slow >= fewAnswers && m.answers > 0 { // in a burst, most of the window may have been idle
			good = max(good, float64(m.top)*float64(latency)/float64(max(mean, 1)))
		}
		m.verdict, m.limit = Filling, min(max(good, m.limit), 2*m.limit)
	case room > m.limit:
		m.verdict, m.limit = Idle, room
	default:
		m.verdict, m.limit = Idle, m.limit+(room-m.limit)/10
	}
	if mean > latency && m.verdict == Filling { // also with no more than the least
		m.verdict = Slow
	}
	m.limit = min(max(m.limit, float64(m.options.Min)), float64(m.options.Max))

	for class := High; int(class) < Classes; class++ {
		if m.share[class] = m.shareOf(class); m.turnedAwayAbove(class) {
			m.share[class] *= math.Pow(cut, min(1, length.Seconds()))
		}
	}
	if m.mean = mean; m.answers == 0 {
		m.mean = 0
	}
	m.shared, m.began, m.area, m.answers, m.quick, m.quickTook, m.slow, m.top = m.last, m.last, 0, 0, 0, 0, 0, m.inProgress
	m.turnedAway = [Classes]int{}
}
