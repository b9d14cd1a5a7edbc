package advice

import (
	"fmt"
	"net"
	"net/textproto"
	"regexp"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/placeholder"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/routes"
)

// onMatchers returns advice on matchers: values that no request has, and what is only set behind
// their limit.
func onMatchers(sets caddyhttp.MatcherSets, around *routes.Around) (found []Advice) {
	add := func(f Advice) {
		if f.Problem != "" && !slices.Contains(found, f) {
			found = append(found, f)
		}
	}
	for _, set := range sets {
		for _, m := range set {
			if not, ok := m.(*caddyhttp.MatchNot); ok {
				for _, f := range onMatchers(not.MatcherSets, new(routes.Around)) {
					add(f)
				}
				continue
			}
			name, values := matcherValues(m)
			if f := unmatchedLine(name, values); f.Problem != "" {
				add(f) // and each of these values is wrong
				continue
			}
			for _, value := range values {
				add(unmatchedValue(name, value, values, around))
			}
			for _, name := range readBy(m) {
				if f, ok := setLaterThanMatcher(name, around); ok {
					add(f)
				}
			}
		}
	}
	return found
}

// matcherValues returns the name of a matcher whose values are known, and these.
func matcherValues(matcher any) (name string, values []string) {
	switch m := matcher.(type) {
	case *caddyhttp.MatchPath:
		return "path", *m
	case *caddyhttp.MatchHost:
		return "host", *m
	case *caddyhttp.MatchMethod:
		return "method", *m
	case *caddyhttp.MatchProtocol:
		return "protocol", []string{string(*m)}
	case *caddyhttp.MatchHeader:
		name, values = "header", fieldsOf(*m)
	case *caddyhttp.MatchHeaderRE:
		name, values = "header_regexp", fieldsOf(*m)
	case *caddyhttp.MatchQuery:
		name = "query"
		for field, of := range *m {
			for _, value := range of {
				values = append(values, field+"="+value)
			}
		}
	}
	slices.Sort(values)
	return name, values
}

// fieldsOf returns the fields that a matcher has.
func fieldsOf[V any](of map[string]V) (names []string) {
	for name := range of {
		names = append(names, name)
	}
	return names
}

// unmatchedLine returns advice on a matcher whose values are the other matchers of its line:
// those in one line are all values of the first.
func unmatchedLine(name string, values []string) Advice {
	lines := []string{name}
	for _, value := range values {
		word := strings.ToLower(value)
		if _, err := caddy.GetModule("http.matchers." + word); err == nil && (name == "path" || name == "host" || name == "method") {
			lines = append(lines, word)
			continue
		}
		switch line := lines[len(lines)-1]; { // Caddy has written methods in capitals, and paths not
		case strings.HasPrefix(line, "method"):
			value = strings.ToUpper(value)
		case name == "method":
			value = word
		}
		lines[len(lines)-1] += " " + value
	}
	if len(lines) == 1 {
		return Advice{}
	}
	return unmatched(name, strings.Join(values, " "), "in one line, all words after "+name+" are its values",
		"Write a block with a line for each: "+strings.Join(lines, "; ")+".")
}

// unmatchedValue returns why no request has a value of a matcher, if none does. others are all
// values of it.
func unmatchedValue(matcher, value string, others []string, around *routes.Around) Advice {
	switch matcher {
	case "path":
		if f := unmatchedPath(value, others); f.Problem != "" {
			return f
		}
		return unsetInPath(value, around)
	case "host":
		return unmatchedHost(value)
	case "method":
		return unmatchedMethod(value)
	case "protocol":
		if !slices.Contains(protocols, value) {
			return unmatched(matcher, value, "Caddy's matcher does not know that word", "Write one of "+strings.Join(protocols, ", ")+".")
		}
	case "query":
		if name, rest, ok := strings.Cut(strings.TrimPrefix(value, "?"), "&"); ok && strings.Contains(rest, "=") {
			return unmatched(matcher, value, "each value is one parameter", "Write query "+name+" "+strings.ReplaceAll(rest, "&", " ")+", or a query matcher for each if all are needed.")
		}
	case "header", "header_regexp":
		if !isToken(value) {
			return unmatched(matcher, value, "it is not a field name", "Write "+matcher+" "+fieldMeant(value)+".")
		}
	}
	return Advice{}
}

// protocols are the words that Caddy's matcher protocol knows.
var protocols = []string{"http", "https", "grpc", "http/1.0", "http/1.0+", "http/1.1", "http/1.1+", "http/2", "http/2+", "http/3", "http/3+"}

// isToken reports whether a text may be the name of a field, or a method, as RFC 9110 has it.
func isToken(text string) bool {
	return text != "" && !strings.ContainsFunc(text, func(r rune) bool {
		return r <= ' ' || r >= 0x7f || strings.ContainsRune(`"(),/:;<=>?@[\]{}`, r)
	})
}

// fieldMeant returns the name of a field that was probably meant by a text that is not one.
func fieldMeant(text string) string {
	i := strings.IndexFunc(text, func(r rune) bool { return !isToken(string(r)) })
	if i <= 0 {
		return "<field>"
	}
	return text[:i]
}

// methods are those that clients send: those of RFC 9110, of WebDAV and CalDAV, of UPnP, and of
// caches and streams.
var methods = strings.Fields("GET HEAD POST PUT DELETE CONNECT OPTIONS TRACE PATCH QUERY PRI" +
	" ACL BASELINE-CONTROL BIND CHECKIN CHECKOUT COPY LABEL LINK LOCK MERGE MKACTIVITY MKCALENDAR MKCOL MKREDIRECTREF MKWORKSPACE" +
	" MOVE ORDERPATCH PROPFIND PROPPATCH REBIND REPORT SEARCH UNBIND UNCHECKOUT UNLINK UNLOCK UPDATE UPDATEREDIRECTREF VERSION-CONTROL" +
	" M-SEARCH NOTIFY SUBSCRIBE UNSUBSCRIBE PURGE BAN REFRESH SOURCE")

// unmatchedMethod returns why no request has a method, if none does. One that HTTP does not have may
// be an application's own.
func unmatchedMethod(method string) Advice {
	several := strings.FieldsFunc(method, func(r rune) bool { return !isToken(string(r)) || r == '|' })
	switch {
	case slices.Contains(methods, method):
		return Advice{}
	case len(several) == 1 && several[0] == method:
		a := unmatched("method", method, "HTTP has no such method", "Write a method that clients send, such as GET or POST.")
		a.Kind = MethodUnknown
		return a
	case len(several) > 0 && !slices.ContainsFunc(several, func(word string) bool { return !slices.Contains(methods, word) }):
		return unmatched("method", method, "a method is one word", "Write method "+strings.Join(several, " ")+".")
	}
	return unmatched("method", method, "a method is one word of letters", "Write method and the methods to match, such as method POST PUT.")
}

// between matches what people put between two paths.
var between = regexp.MustCompile(`[,;|\s]+/`)

// expressions matches what only regular expressions have.
var expressions = regexp.MustCompile(`^\^|\.\*|\.\+|\$$|\(\?|\\[dwsb.]|\[[a-z0-9]-[a-z0-9]`)

// variables matches parts of paths as web frameworks write those that may be anything.
var variables = regexp.MustCompile(`/:[A-Za-z_]\w*(/|$)`)

// unmatchedPath returns why no path matches a pattern, if none does. A question mark matches any
// character there, which is never meant.
func unmatchedPath(pattern string, others []string) Advice {
	no := func(why, remedy string) Advice { return unmatched("path", pattern, why, remedy) }
	path, query, hasQuery := strings.Cut(pattern, "?")
	trimmed := strings.TrimRight(pattern, ",;|")
	host, isURL := strings.CutPrefix(strings.TrimPrefix(strings.ToLower(pattern), "http://"), "https://")
	isURL = isURL || host != strings.ToLower(pattern)
	switch {
	case hasQuery && strings.Contains(query, "="):
		return no("a path ends before the question mark", fmt.Sprintf("Write path %s, and query %s in addition.", withOtherForm(path), query))
	case isURL:
		host, path, _ := strings.Cut(host, "/")
		return no("all paths begin with a slash", fmt.Sprintf("Write path %s, and host %s in addition.", withOtherForm("/"+path), host))
	case expressions.MatchString(pattern):
		return no("it is a regular expression", fmt.Sprintf("Write path_regexp %s, or a path with * for any characters.", pattern))
	case variables.MatchString(pattern):
		return no("Caddy's paths have no variables", "Write path "+variables.ReplaceAllString(pattern, "/*$1")+".")
	case between.MatchString(pattern):
		return no("it is several paths", "Write path "+strings.TrimSpace(between.ReplaceAllLiteralString(trimmed, " /"))+".")
	case trimmed != pattern && len(others) > 1 && trimmed != "":
		return no("paths are separated only by spaces", "Write "+withOtherForm(trimmed)+".")
	case pattern == "" || strings.ContainsAny(pattern[:1], `/*{%?[\`):
		return Advice{}
	case pattern[0] == '.':
		return no("all paths begin with a slash", fmt.Sprintf("Write *%s.", pattern))
	}
	return no("all paths begin with a slash", fmt.Sprintf("Write %s.", withOtherForm("/"+pattern)))
}

// unsetInPath returns advice on a placeholder in a path that nothing sets, which other servers have
// for any text.
func unsetInPath(pattern string, around *routes.Around) Advice {
	for _, name := range placeholder.In(pattern) {
		if _, unset := neverSet(name, around); unset && !strings.HasPrefix(name, "http.") {
			return advise(Unmatched,
				fmt.Sprintf("Its matcher has the path %s, in which {%s} is a placeholder that nothing sets, so it is empty.", pattern, name),
				"Write "+strings.ReplaceAll(pattern, "{"+name+"}", "*")+".")
		}
	}
	return Advice{}
}

// unmatchedHost returns why no host matches a pattern, if none does.
func unmatchedHost(pattern string) Advice {
	if several := strings.FieldsFunc(pattern, func(r rune) bool { return strings.ContainsRune(",;| \t", r) }); len(several) > 0 && several[0] != pattern {
		return unmatched("host", pattern, "a host is one word", "Write host "+strings.Join(several, " ")+".")
	}
	host := pattern
	if _, rest, ok := strings.Cut(host, "://"); ok {
		host = rest
	}
	host, _, _ = strings.Cut(host, "/")
	if without, _, err := net.SplitHostPort(host); err == nil {
		host = without
	}
	if host = strings.Trim(host, "[]"); host == pattern || host == "" || strings.Contains(pattern, "{") {
		return Advice{}
	}
	return unmatched("host", pattern, "a host has no scheme, port or path", fmt.Sprintf("Write %s.", host))
}

// unmatched returns advice on a value of a matcher that no request has.
func unmatched(matcher, value, why, remedy string) Advice {
	return Advice{Kind: Unmatched, Problem: fmt.Sprintf("Its matcher has the %s %s, which no request has: %s.", matcher, value, why), Remedy: remedy}
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
