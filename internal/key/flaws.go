package key

import (
	"cmp"
	"fmt"
	"net/textproto"
	"slices"
	"strings"
	"sync"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/placeholder"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/routes"
)

// Template is the template of a key, in pieces.
type Template []Part

// Part is a piece of a template: literal text, or a placeholder by its full name.
type Part struct {
	Text        string
	Placeholder bool
}

// String returns the template.
func (k Template) String() string {
	var text strings.Builder
	for _, p := range k {
		if p.Placeholder {
			text.WriteString("{" + p.Text + "}")
		} else {
			text.WriteString(p.Text)
		}
	}
	return text.String()
}

// Has reports whether a placeholder is part of the key.
func (k Template) Has(name string) bool { return slices.Contains(k, Part{name, true}) }

// first returns the first placeholder of the key that meets a condition, or "".
func (k Template) first(meets func(name string) bool) string {
	i := slices.IndexFunc(k, func(p Part) bool { return p.Placeholder && meets(p.Text) })
	if i < 0 {
		return ""
	}
	return k[i].Text
}

// Chosen returns the first placeholder of the key whose value clients can choose from
// arbitrarily many, or "". No client chooses what a handler before the limit replaces; around
// may be nil.
func (k Template) Chosen(around *routes.Around) string {
	return k.first(func(name string) bool { return placeholder.IsChosen(name) && !around.Owns(name) })
}

// User returns the first placeholder of the key that only has a value behind
// authentication, or "".
func (k Template) User() string {
	return k.first(func(name string) bool { return strings.HasPrefix(name, "http.auth.user.") })
}

// Headers returns the header fields that the key is made from.
func (k Template) Headers() (names []string) {
	for _, p := range k {
		if !p.Placeholder {
			continue
		}
		if field, ok := strings.CutPrefix(p.Text, "http.request.header."); ok {
			names = append(names, textproto.CanonicalMIMEHeaderKey(field))
		}
		if strings.HasPrefix(p.Text, "http.request.cookie.") {
			names = append(names, "Cookie")
		}
		if p.Text == placeholder.BasicUser {
			names = append(names, "Authorization")
		}
	}
	return names
}

// Bounds reports whether a client that asks often always gets the same bucket.
func (k Template) Bounds() bool {
	return k.Chosen(nil) == "" && !slices.ContainsFunc(k.Flaws(nil), func(f Flaw) bool { return f.unshared })
}

// Flaw is why a key, or what else a limit has, is probably not what was intended, and what
// would be.
type Flaw struct {
	Placeholder     string // by its full name; empty if it is something else
	Problem, Remedy string

	// Whether a client gets other buckets with each request or connection, so that
	// the limit limits nothing.
	unshared bool
}

// flaws are the placeholders that are no use in keys, by their names or, if these end in
// a dot, by how they begin.
var flaws = []struct {
	names []string
	flaw  Flaw
}{
	{
		[]string{"http.request.remote", "http.request.remote.port"},
		Flaw{
			Problem:  "has the port of the client, which changes with each connection, so each connection has a bucket of its own",
			Remedy:   "Use {client_ip}, or {remote_host} for the address of the connection.",
			unshared: true,
		},
	},
	{
		[]string{"http.request.uuid"},
		Flaw{
			Problem:  "is different for each request, so each request has a bucket of its own",
			Remedy:   "Use what the requests of a client have in common, such as {client_ip}.",
			unshared: true,
		},
	},
	{
		[]string{
			"time.now", "time.now.http", "time.now.rfc3339", "time.now.common_log", "time.now.unix", "time.now.unix_ms",
			"http.request.duration", "http.request.duration_ms", "http.vars.start_time", "http.time_until_shutdown",
		},
		Flaw{
			Problem:  "changes all the time, and each value has a bucket of its own",
			Remedy:   "Use {client_ip}, and for windows of time algorithm fixed_window.",
			unshared: true,
		},
	},
}

// missing are placeholders that people write and Caddy does not have, by their names or, if
// these end in a dot, by how they begin. Those that begin like some of Caddy's need no
// row, but get no remedy without one.
var missing = []struct {
	names   []string
	problem string // unless it is that of all
	remedy  string // with what follows a dot in place of X
	unless  string // the module that sets them
}{
	{
		names: []string{
			"ip", "client.ip", "client_addr", "clientip", "ip_address", "real_ip", "remote_ip", "remote_addr", "remote.ip", "remote.host", "remote.addr",
			"request.ip", "request.remote_ip", "request.remote.host", "request.client_ip",
			"http.client_ip", "http.ip", "http.remote_addr", "http.remote_host", "http.remote_ip", "http.remote.host", "http.remote.ip",
			"http.request.client.ip", "http.request.client_ip", "http.request.ip", "http.request.real_ip", "http.request.remote.addr",
			"http.request.remote.ip", "http.request.remote_addr", "http.request.remote_host", "http.request.remote_ip",
		},
		remedy: "Use {client_ip}, or {remote_host} for the address of the connection.",
	},
	{
		names: []string{
			"user", "user.id", "user_id", "userid", "username", "auth.user", "auth.user.id", "http.user", "http.user.id",
			"http.auth.id", "http.auth.user", "http.auth.user_id", "http.request.user", "http.request.user.id", "http.request.auth.user.id",
		},
		remedy: "Use {http.auth.user.id}, behind the authentication.",
	},
	{
		names:  []string{"headers.", "request.header.", "request.headers.", "http.header.", "http.headers.", "http.request.headers."},
		remedy: "Use {http.request.header.X}.",
	},
	{
		names:  []string{"cookies.", "request.cookie.", "request.cookies.", "http.cookie.", "http.cookies.", "http.request.cookies."},
		remedy: "Use {http.request.cookie.X}.",
	},
	{
		names:  []string{"http.query.", "request.query.", "http.request.query."},
		remedy: "Use {http.request.uri.query.X}.",
	},
	{
		names:  []string{"http.path", "request.path", "request.uri.path", "http.request.path"},
		remedy: "Use {http.request.uri.path}.",
	},
	{
		names:  []string{"path."},
		remedy: "Use {http.request.uri.path}, or {http.request.uri.path.0} for the first part.",
	},
	{
		names:   []string{"args."},
		problem: "is only known in what import reads, so it is empty",
		remedy:  "Move the limit into the snippet, or use one of Caddy's, such as {client_ip}.",
	},
	{
		names:  []string{"http.host", "request.host", "http.request.hostname"},
		remedy: "Use {http.request.host}.",
	},
	{
		names:   []string{"body.", "form.", "post.", "http.body.", "http.form.", "http.request.body.", "http.request.form.", "http.request.post."},
		problem: "would be a field of the body, which Caddy does not parse, so it is empty",
		remedy:  "Use {client_ip}, and count by what the application answers, as in count status 401, or by a field of its response, as actual_cost does.",
		unless:  "http.handlers.request_body_var",
	},
}

// Flaws returns what is wrong with k, as far as the key and the handlers around its limit
// tell. These may be nil.
func (k Template) Flaws(around *routes.Around) (found []Flaw) {
	for _, p := range k {
		if !p.Placeholder {
			continue
		}
		if flaw, ok := flawOf(p.Text, around); ok {
			found = append(found, flaw.of("key", p.Text))
		}
	}
	if len(k) == 1 && !k[0].Placeholder {
		if meant := MeantBy(k[0].Text); meant != "" {
			found = append(found, Flaw{
				Problem: fmt.Sprintf("Its key is the text %q, not a placeholder, so all requests share one bucket.", k[0].Text),
				Remedy:  "Write {" + meant + "}.",
			})
		}
	}
	return found
}

// of returns the flaw of what has a placeholder.
func (f Flaw) of(option, name string) Flaw {
	f.Placeholder, f.Problem = name, "Its "+option+" has {"+name+"}, which "+f.Problem+"."
	return f
}

// MatcherFlaw returns what is wrong with a placeholder that a matcher of a limit reads, if it is
// only set behind the limit.
func MatcherFlaw(name string, around *routes.Around) (Flaw, bool) {
	later := around.MarkedLater(name)
	return setLater(name, later).of("matcher", name), later != ""
}

// NumberFlaw is MatcherFlaw for an option that is a number.
func NumberFlaw(option, name string, around *routes.Around) (Flaw, bool) {
	later := around.SetLater(name)
	flaw := setLater(name, later)
	if !strings.HasPrefix(name, headerPrefix) {
		flaw.Problem += ", and requests get an error"
	}
	return flaw.of(option, name), later != ""
}

// flawOf returns what is wrong with a placeholder in a key, by its name, if anything is.
func flawOf(name string, around *routes.Around) (Flaw, bool) {
	for _, f := range flaws {
		if slices.Contains(f.names, name) {
			return f.flaw, true
		}
	}
	if around.Sets(name) {
		return Flaw{}, false // a handler before the limit does
	}
	if later := around.SetLater(name); later != "" {
		return setLater(name, later), true
	}
	if flaw, ok := missingFlaw(name); ok {
		ofCaddy := flaw.Problem == noPlaceholder && (strings.HasPrefix(name, "http.") || strings.HasPrefix(name, "remote"))
		return flaw, ofCaddy || !around.Plugins()
	}
	if long := longName(name); long != "" && !placeholder.IsGlobal(name) {
		return Flaw{
			Problem: "is only known in a Caddyfile, so it is empty",
			Remedy:  "Use its long name, " + long + ".",
		}, true
	}
	if placeholder.IsUnknown(name) {
		return Flaw{
			Problem: noPlaceholder,
			Remedy:  "Use one of https://caddyserver.com/docs/json/apps/http/#docs, such as {client_ip}.",
		}, true
	}
	if around != nil && !around.Plugins() && !strings.Contains(name, ".") {
		return Flaw{ // those of Caddy have a dot, but for map's
			Problem: "neither Caddy nor a map sets, so it is empty",
			Remedy:  "Set it by map before the limit, or use one of Caddy's, such as {client_ip}.",
		}, true
	}
	return Flaw{}, false
}

// noPlaceholder is the problem of most placeholders that Caddy does not have.
const noPlaceholder = "is not a placeholder of Caddy, so it is empty"

// missingFlaw returns what is wrong with a placeholder if it is one of those that are missing.
func missingFlaw(name string) (Flaw, bool) {
	for _, m := range missing {
		for _, known := range m.names {
			rest, found := strings.CutPrefix(name, known)
			if !found || (rest == "") == strings.HasSuffix(known, ".") {
				continue
			}
			if _, err := caddy.GetModule(m.unless); err == nil {
				return Flaw{}, false
			}
			return Flaw{Problem: cmp.Or(m.problem, noPlaceholder), Remedy: strings.Replace(m.remedy, ".X}", "."+rest+"}", 1)}, true
		}
	}
	return Flaw{}, false
}

// headerPrefix is how the placeholders of header fields begin.
const headerPrefix = "http.request.header."

// setLater returns what is wrong with a placeholder that a directive sets behind the limit.
func setLater(name, directive string) Flaw {
	flaw := Flaw{
		Problem: directive + " sets behind this limit, so here it is empty",
		Remedy:  "Put both in a route block, " + directive + " first",
	}
	if strings.HasPrefix(name, headerPrefix) {
		flaw.Problem = directive + " sets behind this limit, so here it is what the client sent"
	}
	if slices.Contains([]string{"basic_auth", "forward_auth", "request_header"}, directive) {
		flaw.Remedy += ", or set the global option order rate_limit after " + directive
	}
	flaw.Remedy += "."
	return flaw
}

// headerWords are header fields that are no ordinary words, in lower case.
var headerWords = []string{
	"api-key", "apikey", "authorization", "cf-connecting-ip", "forwarded", "fastly-client-ip", "proxy-authorization", "remote-user",
	"true-client-ip", "user-agent", "x-api-key", "x-auth-token", "x-auth-user", "x-forwarded-for", "x-real-ip", "x-tenant-id", "x-user", "x-user-id",
}

// MeantBy returns the placeholder that a key without one was meant to be, or "" if it may well
// be a word for one bucket.
func MeantBy(text string) string {
	lower := strings.ToLower(text)
	switch name := strings.TrimPrefix(lower, "$"); {
	case slices.Contains(headerWords, lower), strings.HasPrefix(text, "X-") && len(text) > len("X-"):
		return "http.request.header." + textproto.CanonicalMIMEHeaderKey(text)
	case slices.Contains([]string{"remote_addr", "binary_remote_addr"}, name):
		return "client_ip"
	case placeholder.Addresses[text] != "":
		return text
	case longName(text) != "":
		return text
	case strings.HasPrefix(text, "$"):
		return "client_ip"
	case slices.Contains(missing[0].names, strings.ReplaceAll(lower, "-", "_")), lower == "client-ip":
		return "client_ip"
	case strings.HasPrefix(text, "http."):
		if flaw, ok := missingFlaw(text); ok {
			_, remedy, _ := strings.Cut(flaw.Remedy, "{")
			meant, _, _ := strings.Cut(remedy, "}")
			return meant
		}
		return text
	}
	return ""
}

// shorthands replaces the short names of placeholders in a Caddyfile.
var shorthands = sync.OnceValue(httpcaddyfile.NewShorthandReplacer)

// longName returns the placeholder that a name is short for in a Caddyfile, or "".
func longName(name string) string {
	short := "{" + name + "}"
	segment := caddyfile.Segment{{Text: short}}
	shorthands().ApplyToSegment(&segment)
	if long := segment[0].Text; long != short {
		return long
	}
	return ""
}
