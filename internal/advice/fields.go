package advice

import (
	"net/http"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/placeholder"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/routes"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
)

// dryRunMarker is the placeholder of the limit with dry_run that would have denied the request.
const dryRunMarker = "{http.rate_limit.dry_run}"

// submitted advises on limits by fields of what clients submit. A client can have any field be unclear, which
// is empty in matchers.
func (c *collector) submitted(h *rule.Handler, _ *routes.Around) {
	for b := range rule.Buckets(h.Limits) {
		for _, m := range slices.Concat(b.Limit.Matchers...) {
			for _, name := range readBy(m) {
				if strings.HasPrefix(name, placeholder.OfField) {
					c.limit(b.Path, advise(FieldMatched,
						"Its matcher has {"+name+"}, which is empty if a client sends the field in an unclear way: then the limit does not apply.",
						"Match the exempt requests, such as not vars {"+name+"} x, or use the field as the key."))
				}
			}
		}
		fields := b.Limit.Key.Fields()
		if len(fields) > 0 && b.Limit.DryRun && c.exempts(b.Path) && !slices.ContainsFunc(fields, func(name string) bool { return leavesOut(b.Limit, "{"+name+"}", "") }) {
			c.limit(b.Path, advise(UnclearExempt,
				"It exempts requests from another limit, and all requests whose {"+fields[0]+"} is unclear have one key: an attacker's login to their own account exempts guesses at other accounts.",
				"Add the matcher not vars {"+fields[0]+`} "".`))
		}
	}
}

// exempts reports whether a limit with dry_run, by its path, exempts requests from another limit.
func (c *collector) exempts(path string) bool {
	return slices.ContainsFunc(c.order, func(m rule.Module) bool {
		for b := range rule.Buckets(m.Compiled().Limits) {
			if leavesOut(b.Limit, dryRunMarker, path) {
				return true
			}
		}
		return false
	})
}

// leavesOut reports whether a limit leaves out all requests for which a variable has a value.
func leavesOut(l *rule.Limit, variable, value string) bool {
	return len(l.Matchers) > 0 && !slices.ContainsFunc(l.Matchers, func(set caddyhttp.MatcherSet) bool {
		return !slices.ContainsFunc(set, func(m any) bool {
			not, ok := m.(*caddyhttp.MatchNot)
			return ok && slices.ContainsFunc(not.MatcherSets, func(set caddyhttp.MatcherSet) bool {
				vars, ok := onlyMatcher(set).(*caddyhttp.VarsMatcher)
				return ok && slices.Contains((*vars)[variable], value)
			})
		})
	})
}

// onlyMatcher returns the matcher of a set that has one, or nil.
func onlyMatcher(set caddyhttp.MatcherSet) any {
	if len(set) != 1 {
		return nil
	}
	return set[0]
}

// cleared advises on limits that a success clears which says nothing of whose guesses these were.
func (c *collector) cleared(h *rule.Handler, around *routes.Around) {
	for b := range rule.Buckets(h.Limits) {
		by, k := b.Limit.Settlement.Clear, b.Limit.Key
		switch {
		case by == nil || !b.IsMain() || b.Off:
		case !slices.ContainsFunc(k.Names(), namesAccount):
			c.limit(b.Path, advise(ClearedByOthers,
				"A success clears it, and its key names no account: whoever has one logs in after each few guesses at others.",
				"Use the account as its key, such as {http.rate_limit.field.user}, and another limit, without clear, by {client_ip}."))
		case len(k.Fields()) > 0 && len(by.Headers) == 0 && by.MatchStatus(http.StatusOK) && !slices.ContainsFunc(slices.Concat(setsOf(b, around)...), isMethod):
			c.limit(b.Path, advise(ClearedByOthers,
				"A success clears it, also of a request that shows the form: with the account in its query, it clears guesses at that account.",
				"Match the requests that have a password, such as method POST, beside their path."))
		}
	}
}

// namesAccount reports whether a placeholder may say which account it is.
func namesAccount(name string) bool {
	return placeholder.Addresses[name] == "" && !placeholder.IsGlobal(name) &&
		!strings.HasPrefix(name, "http.request.host") && !strings.HasPrefix(name, "http.request.uri.path")
}

// isMethod reports whether a matcher has methods, without GET, or may have.
func isMethod(m any) bool {
	switch m := m.(type) {
	case *caddyhttp.MatchMethod:
		return !slices.Contains(*m, http.MethodGet)
	case *caddyhttp.MatchExpression:
		return true
	}
	return false
}
