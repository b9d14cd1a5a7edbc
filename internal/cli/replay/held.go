package replay

import (
	"container/heap"
	"context"
	"net/http"
	"slices"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/offline"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/settle"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// What a request is charged may depend on its response, or it counts only while it is in
// progress. As in a Caddy, it then holds units from its arrival to its end, and is settled
// by its response. The log has both, or says that it has not.

// heldUnits is what a request holds of one bucket, in both stores.
type heldUnits struct {
	limit  *replayedLimit
	held   *settle.Logged
	roomy  *limiter.Held
	index  int // of the bucket in roomy
	end    time.Duration
	charge int64
	clears bool // whether its response empties the bucket instead
}

// inProgress is a heap of what requests hold, by their end.
type inProgress []heldUnits

func (h inProgress) Len() int           { return len(h) }
func (h inProgress) Less(i, j int) bool { return h[i].end < h[j].end }
func (h inProgress) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *inProgress) Push(x any)        { *h = append(*h, x.(heldUnits)) }

func (h *inProgress) Pop() any {
	last := len(*h) - 1
	x := (*h)[last]
	(*h)[last] = heldUnits{}
	*h = (*h)[:last]
	return x
}

// goTo sets the clock. Requests that end until then are settled on the way.
func (p *replay) goTo(now time.Duration) {
	for len(p.inProgress) > 0 && p.inProgress[0].end <= now {
		p.now = p.inProgress[0].end
		h := heap.Pop(&p.inProgress).(heldUnits)
		if h.clears {
			h.held.Clear(context.Background())
			_ = h.roomy.Clear(context.Background(), h.index) // which is in memory
			continue
		}
		h.held.Settle(h.charge)
		h.roomy.Settle(h.index, h.charge)
	}
	p.now = now
}

// keep notes when what the request holds is settled, and what it is charged then.
func (p *replay) keep(run *offline.Run) {
	for i := range p.held[:p.rejected] {
		p.settleAfter(0, &p.held[i], &p.rejection)
	}
	held, e := p.held[p.rejected:], p.entry
	logged, answered := settle.Response{Status: e.Status, Bytes: e.Bytes, Took: time.Duration(e.Duration)}, true
	switch {
	case e.Status == 0, e.Status == http.StatusTooManyRequests:
		logged, answered = settle.Response{}, false // a limit may have denied it at that time
	case e.Status == statusClientLeft:
		logged.Status, logged.Unknown = 0, true
	case slices.ContainsFunc(held, func(h heldUnits) bool { return h.limit.settlement.ReadsHeader() }):
		if logged.Header = e.ResponseHeader(); logged.Header != nil {
			run.SetResponse(logged.Header)
		}
	}
	if answered && slices.ContainsFunc(held, func(h heldUnits) bool { return h.limit.settlement.Usage != nil }) {
		logged.Units = e.Units()
	}
	rejected := p.refused || p.isDenied()
	for i := range held {
		l := held[i].limit
		known := p.settleAfter(time.Duration(max(e.Duration, 0)), &held[i], &logged)
		if rejected {
			continue // only a larger size would have admitted it
		}
		if e.Duration < 0 {
			l.untimed++
		}
		switch {
		case !answered:
			l.unanswered++
		case l.settlement.Count != nil && len(l.settlement.Count.Headers) > 0 && logged.Header == nil && logged.Status != 0:
			l.unmatched++
		case !known:
			l.estimated++
		}
		if by := l.settlement.Clear; by != nil && len(by.Headers) > 0 && logged.Header == nil && logged.Status != 0 && by.MatchStatus(logged.Status) {
			l.uncleared++
		}
	}
}

// statusClientLeft is the status of requests whose client left before the response.
const statusClientLeft = 499

// settleAfter settles h after a time, by the response. It returns whether that shows what
// to charge.
func (p *replay) settleAfter(d time.Duration, h *heldUnits, r *settle.Response) (known bool) {
	h.charge, known = h.held.Charge(r)
	h.clears = h.held.Clears(r)
	h.end = p.now + d
	heap.Push(&p.inProgress, *h)
	return known
}

// reject notes that a handler has rejected the request, with which response if that is
// known. What the request holds of limits before is settled by that.
func (p *replay) reject(with settle.Response) {
	p.rejected, p.rejection = len(p.held), with
}

// unknown returns what the log did not say of the requests that l admitted, and what was
// assumed instead, one sentence each.
func (l *replayedLimit) unknown() (text sentences) {
	text.add(l.untimed, "%s requests ended at once, because the log does not say how long they took.")
	instead := "did not count"
	switch {
	case l.settlement.InProgress:
		instead = "ended when they did in the log"
	case l.settlement.Count == nil:
		instead = "cost what was estimated"
	}
	text.add(l.unanswered, "%s requests passed that were denied with 429 in the log, or have no status there: their outcome is unknown, and they %s.", instead)
	text.add(l.unmatched, "%s requests did not count, because the log does not have the header fields of their responses.")
	text.add(l.uncleared, "%s requests may have cleared it, and the log does not have the header fields of their responses.")
	text.add(l.estimated, "%s requests cost what was estimated, because the log does not say what they cost.")
	return text
}
