package routes

import (
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// captures are the names of the regular expressions whose matchers may have captured something.
type captures struct {
	names   map[string]bool
	unknown bool // whether there may be others: of an expression, or of a matcher that is not Caddy's
}

// note adds those of matchers.
func (c *captures) note(sets caddyhttp.MatcherSets) {
	for _, set := range sets {
		for _, m := range set {
			c.noteOne(m)
		}
	}
}

// noteOne adds those of one matcher.
func (c *captures) noteOne(m any) {
	switch m := m.(type) {
	case *caddyhttp.MatchPathRE:
		c.names[m.Name] = true
	case *caddyhttp.MatchHeaderRE:
		for _, re := range *m {
			c.names[re.Name] = true
		}
	case *caddyhttp.MatchVarsRE:
		for _, re := range *m {
			c.names[re.Name] = true
		}
	case *caddyhttp.MatchNot:
		c.note(m.MatcherSets)
	case *caddyhttp.MatchPath, *caddyhttp.MatchHost, *caddyhttp.MatchMethod, *caddyhttp.MatchQuery, *caddyhttp.MatchHeader,
		*caddyhttp.MatchProtocol, *caddyhttp.MatchRemoteIP, *caddyhttp.MatchClientIP, *caddyhttp.VarsMatcher:
	default:
		c.unknown = true
	}
}

// NoteMatchers adds matchers that requests may meet in the handler to those of the routes.
func (a *Around) NoteMatchers(sets caddyhttp.MatcherSets) { a.captures.note(sets) }

// Captures reports whether a regular expression of that name may have captured something, in whatever
// route of the config.
func (a *Around) Captures(name string) bool {
	return a.captures == nil || a.captures.unknown || a.captures.names[name] || a.Plugins()
}
