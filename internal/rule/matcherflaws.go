package rule

import (
	"fmt"
	"net"
	"net/textproto"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/key"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/placeholder"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/routes"
)

// matcherFlaws returns what is wrong with matchers: values that no request has, and what is only
// set behind their limit.
func matcherFlaws(sets caddyhttp.MatcherSets, around *routes.Around) (found []key.Flaw) {
	add := func(f key.Flaw, ok bool) {
		if ok && !slices.Contains(found, f) {
			found = append(found, f)
		}
	}
	for _, set := range sets {
		for _, m := range set {
			switch m := m.(type) {
			case *caddyhttp.MatchNot:
				for _, f := range matcherFlaws(m.MatcherSets, nil) {
					add(f, true)
				}
			case *caddyhttp.MatchPath:
				for _, pattern := range *m {
					add(pathFlaw(pattern))
				}
			case *caddyhttp.MatchHost:
				for _, host := range *m {
					add(hostFlaw(host))
				}
			}
			for _, name := range readBy(m) {
				add(key.MatcherFlaw(name, around))
			}
		}
	}
	return found
}

// pathFlaw returns why no path matches a pattern, if none does. A question mark stands for any
// character there, which nobody means who writes a query.
func pathFlaw(pattern string) (key.Flaw, bool) {
	if path, query, ok := strings.Cut(pattern, "?"); ok && strings.Contains(query, "=") {
		return unmatched("path", pattern, "a path ends before the question mark", fmt.Sprintf("Write path %s, and query %s beside it.", path, query)), true
	}
	if pattern == "" || strings.ContainsAny(pattern[:1], `/*{%?[\`) {
		return key.Flaw{}, false
	}
	return unmatched("path", pattern, "all begin with a slash", fmt.Sprintf("Write /%s.", pattern)), true
}

// hostFlaw returns why no host matches a pattern, if none does.
func hostFlaw(pattern string) (key.Flaw, bool) {
	host := pattern
	if _, rest, ok := strings.Cut(host, "://"); ok {
		host = rest
	}
	host, _, _ = strings.Cut(host, "/")
	if without, _, err := net.SplitHostPort(host); err == nil {
		host = without
	}
	host = strings.Trim(host, "[]")
	return unmatched("host", pattern, "a host has no scheme, port or path", fmt.Sprintf("Write %s.", host)),
		host != pattern && host != "" && !strings.Contains(pattern, "{")
}

// unmatched returns a value of a matcher that no request has as a flaw.
func unmatched(matcher, value, why, remedy string) key.Flaw {
	return key.Flaw{Problem: fmt.Sprintf("Its matcher has the %s %s, which no request has: %s.", matcher, value, why), Remedy: remedy}
}

// readBy returns the placeholders of what a matcher needs to have a value.
func readBy(matcher any) (names []string) {
	field := func(name string) {
		names = append(names, "http.request.header."+textproto.CanonicalMIMEHeaderKey(name))
	}
	variable := func(name string) {
		if in := placeholder.In(name); len(in) > 0 {
			names = append(names, in...)
		} else {
			names = append(names, "http.vars."+name)
		}
	}
	switch m := matcher.(type) {
	case *caddyhttp.MatchHeader:
		for name, values := range *m {
			if values != nil { // otherwise the field must not be there
				field(name)
			}
		}
	case *caddyhttp.MatchHeaderRE:
		for name := range *m {
			field(name)
		}
	case *caddyhttp.VarsMatcher:
		for name := range *m {
			variable(name)
		}
	case *caddyhttp.MatchVarsRE:
		for name := range *m {
			variable(name)
		}
	case *caddyhttp.MatchExpression:
		names = placeholder.In(m.Expr)
	}
	slices.Sort(names)
	return names
}
