// Package settle is what requests hold of limits until their outcome is known, and how that is settled.
package settle

import (
	"net/http"
	"strings"

	"golang.org/x/net/http/httpguts"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/key"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/faults"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/usage"
)

// What a request is charged may be known only when its response is: whether it counts,
// or how much it cost. And it may be charged nothing, if only requests in progress count.
// Until then it holds its cost, beside which others have to fit, so that no more than the
// limit allows pass at once, however many come in parallel. Or it holds nothing, see HoldOff:
// then a store is asked with a cost of 0.

// What a request may cost in the end, besides placeholders and what its response's body says.
const (
	ActualBytes    = "bytes"    // the length of the response's body
	ActualDuration = "duration" // how long it took, in milliseconds
)

// StatusClientLeft is the status of requests whose clients left before there was a
// response. It is that of Caddy's reverse_proxy, which also writes it for a request that a
// connection was to carry whose last request was canceled: then its client is still there.
const StatusClientLeft = 499

// Terms are how requests are charged that hold units of a limit until their outcome is known.
type Terms struct {
	InProgress bool              // not at all, as only requests in progress count
	Count      *option.Responses // the responses that count; nil if all do
	Clear      *option.Responses // the responses that empty the bucket; nil if none do
	ActualCost string            // as it is configured; empty for the cost
	Usage      *usage.Cost       // the actual cost if the response's body says it, or nil
	HoldOff    bool              // whether nothing is held meanwhile, so that a request is admitted if there is room for any
	CostIsBody bool              // whether the cost is the length of the request's body

	Path     string // of the limit
	Reporter *faults.Reporter
}

// Holds reports whether requests hold units, or nothing in place of them, and are settled.
func (s *Terms) Holds() bool {
	return s.InProgress || s.Count != nil || s.Clear != nil || s.ActualCost != ""
}

// ReadsHeader reports whether it takes header fields of the response.
func (s *Terms) ReadsHeader() bool {
	return readsHeader(s.Count) || readsHeader(s.Clear) || strings.Contains(s.ActualCost, "{")
}

// readsHeader reports whether some responses, if not nil, are told by their fields.
func readsHeader(by *option.Responses) bool { return by != nil && len(by.Headers) > 0 }

// matches reports whether a response is one of some, if not nil, by its status and its fields.
func matches(by *option.Responses, status int, header http.Header) bool {
	return by != nil && by.Match(status, key.TrimFields(header, by.Headers))
}

// awaitsTrailer reports whether a response with that status and header may have a trailer by
// which it is one of some. One of gRPC need not announce it.
func awaitsTrailer(by *option.Responses, status int, header http.Header) bool {
	if !readsHeader(by) || !by.MatchStatus(status) {
		return false
	}
	if strings.HasPrefix(strings.ToLower(header.Get("Content-Type")), "application/grpc") {
		return true
	}
	for name := range by.Headers {
		if httpguts.HeaderValuesContainsToken(header["Trailer"], name) {
			return true
		}
	}
	return false
}

// lacksTrailer reports whether the header of a response, with all trailers that there are,
// lacks any of the fields by which it may count.
func (s *Terms) lacksTrailer(header http.Header) bool {
	return len(key.TrimFields(header, s.Count.Headers)) < len(s.Count.Headers)
}
