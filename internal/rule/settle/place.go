package settle

import (
	"io"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/adaptive"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/faults"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/wait"
)

// Load is how a limit follows the load.
type Load struct {
	Options     adaptive.Options
	UntilBody   bool                  // whether a request has its place until its response has ended
	High, Low   caddyhttp.MatcherSets // the requests that are more important than others, or less
	Controllers *adaptive.Controllers // of all limits of its name and options

	Reporter *faults.Reporter

	proxied atomic.Bool // whether an upstream has ever answered a request by reverse_proxy
}

// latencyPlaceholder is set by reverse_proxy once an upstream has answered.
const latencyPlaceholder = "http.reverse_proxy.upstream.latency"

// ClassOf returns how important a request is. Its error is a matcher's.
func (l *Load) ClassOf(r *http.Request) (adaptive.Class, error) {
	for _, of := range [...]struct {
		class adaptive.Class
		sets  caddyhttp.MatcherSets
	}{{adaptive.High, l.High}, {adaptive.Low, l.Low}} {
		if len(of.sets) == 0 { // which would match all
			continue
		}
		if matches, err := of.sets.AnyMatchWithError(r); err != nil || matches {
			return of.class, err
		}
	}
	return adaptive.Normal, nil
}

// Place is the slot of a request at a limit that follows the load.
type Place struct {
	Load *Load
	Slot adaptive.Slot

	answered bool        // whether the header of the response is an answer; of a limit until body
	slots    wait.Slots  // that it takes up, if any may wait for them
	lapse    *time.Timer // until it takes up none any more
}

// TakeUp has the place count as a slot of its client, as long as it takes room.
func (p *Place) TakeUp(slots wait.Slots) {
	p.slots = slots
	p.lapse = time.AfterFunc(p.Load.Options.Counted(), func() {
		p.slots.Count(false)
		p.wake()
	})
	p.slots.Count(true)
}

// Release gives the slot back. answered says whether an upstream has answered.
func (p *Place) Release(answered bool) { p.releaseAt(time.Now(), answered) }

// releaseAt is Release at some time.
func (p *Place) releaseAt(now time.Time, answered bool) {
	if p.Slot.Release(now, answered) {
		p.Load.Reporter.SlowAtMin(&p.Load.Options, p.Slot.State(now))
	}
	if p.lapse != nil {
		p.lapse.Stop()
	}
	p.slots.Count(false)
	p.wake()
}

// wake has the next request that waits for room ask for it.
func (p *Place) wake() {
	for _, class := range [...]adaptive.Class{adaptive.High, adaptive.Normal, adaptive.Low} {
		p.slots.Wake(class)
	}
}

// WatchBody has places take no room while the body of the request is read, and nothing of it is there.
func WatchBody(r *http.Request, places []*Place) {
	if len(places) > 0 && r.ContentLength != 0 && r.Body != nil && r.Body != http.NoBody {
		r.Body = watchedBody{r.Body, places}
	}
}

// watchedBody is the body of a request with slots.
type watchedBody struct {
	io.ReadCloser
	places []*Place
}

// Read implements io.Reader. It is also called while or after slots are released.
func (b watchedBody) Read(buffer []byte) (int, error) {
	pause(b.places)
	n, err := b.ReadCloser.Read(buffer)
	resume(b.places)
	return n, err
}

// pause has a request take no room at its places while its client is waited for.
func pause(places []*Place) {
	now := time.Now()
	for _, p := range places {
		if p.Slot.Wait(now) {
			p.slots.Count(false)
			p.wake()
		}
	}
}

// resume ends a pause.
func resume(places []*Place) {
	now := time.Now()
	for _, p := range places {
		if left := p.Slot.Resume(now); left > 0 && p.lapse != nil {
			p.lapse.Reset(left) // which also ends it if it is released meanwhile
			p.slots.Count(true)
		}
	}
}

// Pauses returns what has a request take no room at the limits that follow the load while its response
// is held back, until what it returns is called.
func Pauses(holdings []Holding) (begin func() (end func())) {
	var places []*Place
	for i := range holdings {
		if p := holdings[i].Place; p != nil && p.Load.UntilBody {
			places = append(places, p)
		}
	}
	end := func() { resume(places) }
	return func() func() {
		pause(places)
		return end
	}
}
