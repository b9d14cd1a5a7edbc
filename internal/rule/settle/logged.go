package settle

import (
	"net/http"
	"time"
)

// Response is the response to a request, as far as a log shows it.
type Response struct {
	Status  int              // 0 if there is none
	Unknown bool             // there is none since the client has left: the next handlers had the request
	Header  http.Header      // which placeholders show as well
	Bytes   int64            // of its body; -1 if unknown
	Took    time.Duration    // -1 if unknown
	Units   map[string]int64 // what limits charged, by their paths; nil if unknown
}

// Logged is what a request of a log holds of one bucket, or would hold if it had not been denied.
type Logged struct {
	Holding
	Request *http.Request
}

// Clears reports whether the response empties the bucket. Logs have trailers among the fields.
func (h *Logged) Clears(r *Response) bool {
	return h.Own && !r.Unknown && r.Status != 0 && matches(h.Terms.Clear, r.Status, r.Header)
}

// Charge returns what the request is charged by its response, and whether the log shows that: if
// not, the estimated cost is charged.
func (h *Logged) Charge(r *Response) (charge int64, known bool) {
	s, res := h.Terms, response{state: complete, status: r.Status, header: r.Header, bytes: r.Bytes, took: r.Took, length: h.Request.ContentLength}
	switch {
	case r.Unknown:
		res.state = unknown
	case r.Status == 0:
		res.state = unpassed
	default:
		if charge, decided := h.byHeader(r.Status, r.Header); decided || s.Count != nil && !h.counts { // logs have trailers among the fields
			return charge, true
		}
	}
	if res.state != unpassed {
		units, logged := r.Units[h.Terms.Path]
		switch {
		case s.Usage != nil && logged:
			return units, true
		case s.Usage != nil && r.Status >= 400 && !r.Unknown:
			return 0, true
		case s.ActualCost == ActualDuration && r.Took < 0, s.ActualCost == ActualBytes && r.Bytes < 0 && !r.Unknown:
			return h.Cost, false
		}
	}
	charge, _, known = h.atEnd(h.Request, &res)
	return charge, known
}
