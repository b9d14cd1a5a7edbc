package routes

import (
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/fileserver"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/rewrite"
)

// paths is what is known of the paths of requests, as matchers see them.
type paths struct {
	gone     []gone
	begin    string // how all begin since a rewrite; "" if that is not known
	fallback string // what try_files makes of a path that is not a file; "" without it
}

// gone is a pattern of a matcher that no path matches, an exact one or one that ends in a *.
type gone struct {
	pattern string
	why     Obstacle
}

// isPlain reports whether it is known which paths a pattern matches.
func isPlain(pattern string) bool {
	return strings.HasPrefix(pattern, "/") && !strings.ContainsAny(pattern, "%{?[\\") && !strings.Contains(pattern, "//")
}

// covers reports whether g has all paths that another pattern matches.
func (g gone) covers(pattern string) bool {
	literal, _, _ := strings.Cut(pattern, "*")
	if prefix, ok := strings.CutSuffix(g.pattern, "*"); ok {
		return strings.HasPrefix(literal, prefix)
	}
	return pattern == g.pattern
}

// never returns why no path matches a pattern, or nil if one may.
func (p paths) never(pattern string) *Obstacle {
	if !isPlain(pattern) {
		return nil
	}
	for _, g := range p.gone {
		if g.covers(pattern) {
			why := g.why
			if why.Path = pattern; why.Kind == Stripped {
				why.To = "/" + strings.TrimPrefix(strings.TrimPrefix(pattern, why.By), "/")
			}
			return &why
		}
	}
	literal, _, wild := strings.Cut(pattern, "*")
	if p.begin != "" && !strings.HasPrefix(literal, p.begin) && (!wild || !strings.HasPrefix(p.begin, literal)) {
		return &Obstacle{Kind: Rewritten, By: "rewrite", Path: pattern, To: p.begin}
	}
	// A path without a dot is hardly a file.
	if p.fallback != "" && !wild && !strings.Contains(pattern, ".") && !strings.HasSuffix(pattern, "/") && pattern != p.fallback {
		return &Obstacle{Kind: Rewritten, By: "try_files", Path: pattern, To: p.fallback}
	}
	return nil
}

// obstacle returns why no request matches matchers by its path, or nil if one may.
func (p paths) obstacle(sets caddyhttp.MatcherSets) (first *Obstacle) {
	for _, set := range sets {
		found := p.obstacleToSet(set)
		if found == nil {
			return nil
		}
		if first == nil {
			first = found
		}
	}
	return first
}

// obstacleToSet is obstacle for matchers that all have to match.
func (p paths) obstacleToSet(set caddyhttp.MatcherSet) *Obstacle {
	for _, m := range set {
		patterns, ok := m.(*caddyhttp.MatchPath)
		if !ok {
			continue
		}
		var first *Obstacle
		for _, pattern := range *patterns {
			found := p.never(pattern)
			if found == nil {
				first = nil
				break
			}
			if first == nil {
				first = found
			}
		}
		if first != nil {
			return first
		}
	}
	return nil
}

// without returns what is known of paths of which those that match patterns are gone.
func (p paths) without(patterns []string, why Obstacle) paths {
	p.gone = slices.Clip(p.gone)
	for _, pattern := range patterns {
		if i := strings.IndexByte(pattern, '*'); isPlain(pattern) && (i < 0 || i == len(pattern)-1) {
			g := gone{pattern, why}
			g.why.To = pattern
			p.gone = append(p.gone, g)
		}
	}
	return p
}

// both returns what is known of requests that did not match a route, and those that did.
func both(others, matched paths) (p paths) {
	for _, g := range others.gone {
		if why := matched.never(g.pattern); why != nil {
			if g.why.Kind == unmatched {
				g.why = *why
			}
			p.gone = append(p.gone, g)
		}
	}
	for _, g := range matched.gone {
		if others.never(g.pattern) != nil && p.never(g.pattern) == nil {
			p.gone = append(p.gone, g)
		}
	}
	if others.begin == matched.begin {
		p.begin = others.begin
	}
	if others.fallback == matched.fallback {
		p.fallback = others.fallback
	}
	return p
}

// behind returns what is known of paths behind a handler.
func (p paths) behind(h caddyhttp.MiddlewareHandler) paths {
	rewr, ok := h.(*rewrite.Rewrite)
	if !ok {
		return p
	}
	to, _, _ := strings.Cut(rewr.URI, "?")
	if to != "" {
		begin, _, _ := strings.Cut(to, "{")
		if p = (paths{}); strings.HasPrefix(begin, "/") && begin != "/" {
			p.begin = strings.ToLower(begin)
		}
	}
	if rewr.StripPathPrefix != "" {
		p = paths{}
		if prefix := "/" + strings.ToLower(strings.Trim(rewr.StripPathPrefix, "/")); isPlain(prefix) && len(prefix) > 1 {
			p = p.without([]string{prefix, prefix + "/*"}, Obstacle{Kind: Stripped, By: prefix})
		}
	}
	if rewr.StripPathSuffix != "" || len(rewr.URISubstring) > 0 || len(rewr.PathRegexp) > 0 {
		p = paths{}
	}
	return p
}

// onlyPaths returns the patterns that matchers match, if they match nothing else.
func onlyPaths(sets caddyhttp.MatcherSets) (patterns []string, ok bool) {
	for _, set := range sets {
		if len(set) != 1 {
			return nil, false
		}
		m, ok := set[0].(*caddyhttp.MatchPath)
		if !ok {
			return nil, false
		}
		patterns = append(patterns, *m...)
	}
	return patterns, len(patterns) > 0
}

// fallbackFor returns the path that a route of try_files gives to requests for what is no file,
// or "".
func fallbackFor(rt *caddyhttp.Route) string {
	if len(rt.MatcherSets) != 1 || len(rt.MatcherSets[0]) != 1 || len(rt.Handlers) != 1 {
		return ""
	}
	files, ok := rt.MatcherSets[0][0].(*fileserver.MatchFile)
	if _, rewrites := rt.Handlers[0].(*rewrite.Rewrite); !ok || !rewrites || len(files.TryFiles) == 0 || files.TryPolicy != "" {
		return ""
	}
	last, _, _ := strings.Cut(files.TryFiles[len(files.TryFiles)-1], "?")
	if !strings.HasPrefix(last, "/") || strings.Contains(last, "{") {
		return ""
	}
	return strings.ToLower(last)
}
