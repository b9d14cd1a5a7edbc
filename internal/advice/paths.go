package advice

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/routes"
)

// onPaths returns advice on paths of matchers that have another form, which many applications
// answer as they do this one and no path of theirs matches: one piece for all of them, with the
// first. What is known not to answer the other form, such as an error, is no application.
//
// A matcher of the directive, which may be on its line, is one pattern.
func onPaths(sets caddyhttp.MatcherSets, around *routes.Around, ofDirective bool) []Advice {
	var patterns caddyhttp.MatchPath
	for _, set := range sets {
		for _, m := range set {
			if own, ok := m.(*caddyhttp.MatchPath); ok {
				patterns = append(patterns, *own...)
			}
		}
	}
	var others []string // patterns that have one
	for _, pattern := range patterns {
		form, _ := otherForm(pattern)
		if form != "" && !slices.Contains(others, pattern) && unmatchedPath(pattern, patterns).Problem == "" && !matchesPath(patterns, form) &&
			around.ObstacleTo(caddyhttp.MatcherSets{{&caddyhttp.MatchPath{strings.ToLower(form)}}}) == nil && around.Serves(form) {
			others = append(others, pattern)
		}
	}
	if len(others) == 0 {
		return nil
	}
	pattern := others[0]
	form, write := otherForm(pattern)
	a := advise(PathForm,
		"Its path "+pattern+" does not match "+form+", which many applications answer like "+pattern+", so clients can get around it.",
		"Write path "+pattern+" "+write+".")
	if ofDirective {
		a.Remedy = "Write " + withOtherForm(pattern) + "."
	}
	if n := len(others) - 1; n > 0 {
		a.Remedy = fmt.Sprintf("%s The same applies to %s.", a.Remedy, strings.Join(others[1:], ", "))
	}
	return []Advice{a}
}

// otherForm returns another form of the path that a pattern matches, if it is only one and an
// application may well have that, and a pattern that matches it.
func otherForm(pattern string) (form, write string) {
	switch {
	case !strings.HasPrefix(pattern, "/") || strings.HasSuffix(pattern, "/") || strings.ContainsAny(pattern, `*?[\{%`):
		return "", ""
	case strings.HasSuffix(pattern, ".php"): // what follows is the script's PATH_INFO
		return pattern + "/x", pattern + "/*"
	case strings.Contains(path.Base(pattern), "."): // a file
		return "", ""
	}
	return pattern + "/", pattern + "/"
}

// withOtherForm returns a pattern that has the other form of what this one matches too, if there
// is one.
func withOtherForm(pattern string) string {
	if form, _ := otherForm(pattern); form != "" {
		return pattern + "*"
	}
	return pattern
}

// matchesPath reports whether any of the patterns matches a path.
func matchesPath(patterns caddyhttp.MatchPath, form string) bool {
	r := &http.Request{URL: &url.URL{Path: form}}
	matches, err := patterns.MatchWithError(r.WithContext(context.WithValue(context.Background(), caddy.ReplacerCtxKey, caddy.NewReplacer())))
	return matches && err == nil
}
