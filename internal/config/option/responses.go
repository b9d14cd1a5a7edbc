package option

import (
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// Responses are some of all, such as those that count.
type Responses struct {
	caddyhttp.ResponseMatcher

	// The status codes, such as 304, and classes (in JSON 3) of other responses.
	NotStatusCode []int `json:"not_status_code,omitempty"`
}

// IsEmpty reports whether nothing says which responses they are.
func (r *Responses) IsEmpty() bool {
	return len(r.StatusCode) == 0 && len(r.NotStatusCode) == 0 && len(r.Headers) == 0
}

// MatchStatus reports whether a response with that status can be one of them.
func (r *Responses) MatchStatus(status int) bool {
	only, not := caddyhttp.ResponseMatcher{StatusCode: r.StatusCode}, caddyhttp.ResponseMatcher{StatusCode: r.NotStatusCode}
	return only.Match(status, nil) && (len(r.NotStatusCode) == 0 || !not.Match(status, nil))
}

// Match reports whether a response is one of them.
func (r *Responses) Match(status int, header http.Header) bool {
	return r.MatchStatus(status) && r.ResponseMatcher.Match(status, header)
}

// String returns them as they are written in a Caddyfile.
func (r *Responses) String() string {
	if r == nil {
		return ""
	}
	var words []string
	status := func(codes []int, written ...string) {
		for i, code := range codes {
			if i == 0 {
				words = append(words, written...)
			}
			text := strconv.Itoa(code)
			if code < 10 {
				text += "xx"
			}
			words = append(words, text)
		}
	}
	status(r.StatusCode, "status")
	status(r.NotStatusCode, "not", "status")
	for _, name := range slices.Sorted(maps.Keys(r.Headers)) {
		field := name
		if r.Headers[name] == nil {
			field = "!" + name // no response that has it
		}
		words = append(append(words, "header", field), r.Headers[name]...)
	}
	return strings.Join(words, " ")
}
