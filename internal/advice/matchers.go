package advice

import (
	"fmt"
	"net"
	"net/textproto"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/placeholder"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/routes"
)

// onMatchers returns advice on matchers: values that no request has, and what is only set behind
// their limit.
func onMatchers(sets caddyhttp.MatcherSets, around *routes.Around) (found []Advice) {
	add := func(f Advice, ok bool) {
		if ok && !slices.Contains(found, f) {
			found = append(found, f)
		}
	}
	for _, set := range sets {
		for _, m := range set {
			switch m := m.(type) {
			case *caddyhttp.MatchNot:
				for _, f := range onMatchers(m.MatcherSets, nil) {
					add(f, true)
				}
			case *caddyhttp.MatchPath:
				for _, pattern := range *m {
					add(unmatchedPath(pattern))
				}
			case *caddyhttp.MatchHost:
				for _, host := range *m {
					add(unmatchedHost(host))
				}
			}
			for _, name := range readBy(m) {
				add(setLaterThanMatcher(name, around))
			}
		}
	}
	return found
}

// unmatchedPath returns why no path matches a pattern, if none does. A question mark matches any
// character there, which is never meant.
func unmatchedPath(pattern string) (Advice, bool) {
	if path, query, ok := strings.Cut(pattern, "?"); ok && strings.Contains(query, "=") {
		return unmatched(UnmatchedPath, "path", pattern, "a path ends before the question mark", fmt.Sprintf("Write path %s, and query %s with it.", withOtherForm(path), query)), true
	}
	if pattern == "" || strings.ContainsAny(pattern[:1], `/*{%?[\`) {
		return Advice{}, false
	}
	return unmatched(UnmatchedPath, "path", pattern, "all begin with a slash", fmt.Sprintf("Write %s.", withOtherForm("/"+pattern))), true
}

// unmatchedHost returns why no host matches a pattern, if none does.
func unmatchedHost(pattern string) (Advice, bool) {
	host := pattern
	if _, rest, ok := strings.Cut(host, "://"); ok {
		host = rest
	}
	host, _, _ = strings.Cut(host, "/")
	if without, _, err := net.SplitHostPort(host); err == nil {
		host = without
	}
	host = strings.Trim(host, "[]")
	return unmatched(UnmatchedHost, "host", pattern, "a host has no scheme, port or path", fmt.Sprintf("Write %s.", host)),
		host != pattern && host != "" && !strings.Contains(pattern, "{")
}

// unmatched returns advice on a value of a matcher that no request has.
func unmatched(kind Kind, matcher, value, why, remedy string) Advice {
	return Advice{Kind: kind, Problem: fmt.Sprintf("Its matcher has the %s %s, which no request has: %s.", matcher, value, why), Remedy: remedy}
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
