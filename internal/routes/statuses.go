package routes

import (
	"regexp"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// statuses are those for which error routes are; nil if they may be for all.
type statuses [600]bool

// has reports whether a status is among s.
func (s *statuses) has(status int) bool { return s == nil || status < len(s) && s[status] }

// statusCondition matches one part of the expression that `handle_errors 404 5xx` becomes.
var statusCondition = regexp.MustCompile(`^\{http\.error\.status_code\} (?:in \[([0-9, ]+)\]|>= (\d)00 && \{http\.error\.status_code\} <= \d99)$`)

// newStatuses returns the statuses that an error route handles, as far as its matchers, and those
// of routes that are all there is in it, are ones that `handle_errors` becomes.
func newStatuses(route *caddyhttp.Route) *statuses {
	var own *statuses
	for i, set := range route.MatcherSets {
		of := statusesOfSet(set)
		if of == nil {
			own = nil
			break
		}
		if i == 0 {
			own = new(statuses)
		}
		own.add(of)
	}
	if own != nil || len(route.Handlers) != 1 {
		return own
	}
	sub, ok := route.Handlers[0].(*caddyhttp.Subroute)
	if !ok {
		return nil
	}
	within := new(statuses)
	for i := range sub.Routes {
		of := newStatuses(&sub.Routes[i])
		if of == nil {
			return nil
		}
		within.add(of)
	}
	return within
}

// add adds the statuses of other to s.
func (s *statuses) add(other *statuses) {
	for i, has := range other {
		s[i] = s[i] || has
	}
}

// statusesOfSet returns those that matchers which must all match allow.
func statusesOfSet(set caddyhttp.MatcherSet) *statuses {
	for _, m := range set {
		expression, ok := m.(*caddyhttp.MatchExpression)
		if !ok {
			continue
		}
		s, known := new(statuses), true
		for condition := range strings.SplitSeq(expression.Expr, " || ") {
			found := statusCondition.FindStringSubmatch(condition)
			if found == nil {
				known = false
				break
			}
			for code := range strings.SplitSeq(found[1], ", ") {
				if n, err := strconv.Atoi(code); err == nil && n < len(s) {
					s[n] = true
				}
			}
			if class, err := strconv.Atoi(found[2]); err == nil {
				for n := class * 100; n < class*100+100 && n < len(s); n++ {
					s[n] = true
				}
			}
		}
		if known {
			return s
		}
	}
	return nil
}
