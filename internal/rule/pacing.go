package rule

import (
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/pace"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// A limit with a speed denies nothing and asks no server: it paces the responses to requests that are
// passed on. At each of them the request counts as admitted.

// pace returns what paces the response, or nil if nothing does. It goes on after Release.
func (q *Request) pace(s limiter.Store) *pace.Response {
	if len(q.paced) == 0 {
		return nil
	}
	p := pace.New(q.http.Context(), s)
	for i := range q.paced {
		e := &q.paced[i]
		p.Add(e.Limit.Pace, e.Query, q.fairBy(e))
		size := e.Query.Limit.Size
		e.Decision = limiter.Decision{Size: size, Remaining: size}
		q.countEntry(e, false, false)
	}
	return p
}
