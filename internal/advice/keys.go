package advice

import (
	"cmp"
	"fmt"
	"net/textproto"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/key"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/placeholder"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/routes"
)

// flaws are the placeholders that are no use in keys, by their names or, if these end in
// a dot, by how they begin.
var flaws = []struct {
	names           []string
	problem, remedy string
}{
	{
		[]string{"http.request.remote", "http.request.remote.port"},
		"has the client's port, which changes with each connection, so each connection has its own bucket",
		"Use {client_ip}, or {remote_host} for the address of the connection.",
	},
	{
		[]string{"http.request.uuid"},
		"is different for each request, so each request has its own bucket",
		"Use a value that a client's requests have in common, such as {client_ip}.",
	},
	{
		[]string{
			"time.now", "time.now.http", "time.now.rfc3339", "time.now.common_log", "time.now.unix", "time.now.unix_ms",
			"http.request.duration", "http.request.duration_ms", "http.vars.start_time", "http.time_until_shutdown",
		},
		"changes all the time, and each value has its own bucket",
		"Use {client_ip}, and algorithm fixed_window for time windows.",
	},
}

// missing are placeholders that people write and Caddy does not have, by their names or, if
// these end in a dot, by how they begin. Those that begin like some of Caddy's need no
// row, but get no remedy without one.
var missing = []struct {
	names   []string
	problem string // unless it is the problem of all
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
		problem: "is only known in a snippet or an imported file, so it is empty",
		remedy:  "Move the limit into the snippet, or use one of Caddy's, such as {client_ip}.",
	},
	{
		names:  []string{"http.host", "request.host", "http.request.hostname"},
		remedy: "Use {http.request.host}.",
	},
	{
		names:   []string{"body.", "form.", "post.", "http.body.", "http.form.", "http.request.body.", "http.request.form.", "http.request.post."},
		problem: "would be a field of the body, which Caddy does not parse, so it is empty",
		remedy:  "Use {http.rate_limit.field.X}.",
		unless:  "http.handlers.request_body_var",
	},
}

// OnKey returns advice on a key, as far as it and the handlers around its limit show.
func OnKey(k *key.Key, around *routes.Around) (found []Advice) {
	for _, name := range k.Names() {
		if a, ok := onPlaceholder(name, around); ok {
			found = append(found, a.of("key", name))
		}
	}
	for i, part := range k.Parts {
		if part.Placeholder || i == 0 || !prefixLength.MatchString(part.Text) {
			continue
		}
		if of := k.Parts[i-1]; of.Placeholder && (placeholder.Addresses[of.Text] != "" || strings.HasPrefix(of.Text, headerPrefix)) {
			found = append(found, onPrefix(of.Text, part.Text))
		}
	}
	if len(k.Parts) == 1 && !k.Parts[0].Placeholder {
		found = append(found, onConstant(k.Parts[0].Text)...)
	}
	return found
}

// prefixLength matches how people write to how many bits an address is shortened.
var prefixLength = regexp.MustCompile(`^/(\d{1,2}|1[01]\d|12[0-8])$`)

// onPrefix returns advice on the length of a prefix behind a placeholder.
func onPrefix(name, text string) Advice {
	bits, option := text[1:], "ipv4_prefix"
	for short, full := range placeholder.Addresses {
		if name == full && short != full {
			name = short
		}
	}
	if n, _ := strconv.Atoi(bits); n > 32 {
		option = "ipv6_prefix"
	}
	return advise(KeyPrefix,
		fmt.Sprintf("Its key has %s behind {%s}, which is only text, so each address has its own bucket.", text, name),
		fmt.Sprintf("Write key {%s}, and %s %s.", name, option, bits))
}

// onConstant returns advice on a key that is a text.
func onConstant(text string) []Advice {
	a := Advice{
		Kind:    KeyText,
		Problem: fmt.Sprintf("Its key is the text %q, not a placeholder, so all requests share one bucket.", text),
	}
	switch meant := MeantBy(text); {
	case meant != "":
		a.Remedy = "Write {" + meant + "}." + bounding(meant)
	case !slices.Contains([]string{"all", "static", "global"}, text):
		a.Kind, a.Remedy = KeyConstant, "Write {client_ip} for a bucket for each address, or all if one bucket for all is intentional."
	default:
		return nil
	}
	return []Advice{a}
}

// Chosen returns the first placeholder of a key whose value clients can choose from arbitrarily
// many, or "", and the one that it is made from, which may be itself. No client chooses what a
// handler before the limit replaces.
func Chosen(k *key.Key, around *routes.Around) (name, source string) {
	for _, name := range k.Names() {
		if source := chosenIn(name, around, placeholder.IsChosen); source != "" {
			return name, source
		}
	}
	return "", ""
}

// Bounds reports whether a client with many requests always gets the same bucket.
func Bounds(k *key.Key, around *routes.Around) bool {
	chosen, _ := Chosen(k, around)
	return chosen == "" && !slices.ContainsFunc(OnKey(k, new(routes.Around)), func(a Advice) bool { return a.unshared })
}

// controlled returns the first placeholder in a template whose value clients can choose, or "".
func controlled(template string, around *routes.Around) string {
	for _, name := range placeholder.In(template) {
		if source := chosenIn(name, around, placeholder.IsClientControlled); source != "" {
			return source
		}
	}
	return ""
}

// chosenIn returns the placeholder of clients' choice that a placeholder is made from by handlers
// before the limit, itself if they do not make it, or "".
func chosenIn(name string, around *routes.Around, byClients func(name string) bool) string {
	seen := []string{name}
	for i := 0; i < len(seen); i++ {
		if byClients(seen[i]) && !around.Owns(seen[i]) {
			return seen[i]
		}
		for _, source := range around.Sources(seen[i]) {
			if !slices.Contains(seen, source) {
				seen = append(seen, source)
			}
		}
	}
	return ""
}

// of returns advice on what has a placeholder.
func (a Advice) of(option, name string) Advice {
	a.Placeholder, a.Problem = name, "Its "+option+" has {"+name+"}, which "+a.Problem+"."
	return a
}

// bounding returns what else to do where a remedy is a placeholder that clients choose.
func bounding(name string) string {
	if full := cmp.Or(longName(name), name); !placeholder.IsChosen(full) {
		return ""
	}
	return " Clients choose its value, so add a limit by {client_ip} to the block."
}

// setLaterThanMatcher returns advice on a placeholder that a matcher of a limit reads, if it is
// only set behind the limit.
func setLaterThanMatcher(name string, around *routes.Around) (Advice, bool) {
	later := around.MarkedLater(name)
	return setLater(name, later).of("matcher", name), later != ""
}

// setLaterThanNumber is setLaterThanMatcher for an option that is a number.
func setLaterThanNumber(option, name string, around *routes.Around) (Advice, bool) {
	later := around.SetLater(name)
	a := setLater(name, later)
	if !strings.HasPrefix(name, headerPrefix) {
		a.Problem += ", and requests get an error"
	}
	return a.of(option, name), later != ""
}

// onPlaceholder returns advice on a placeholder in a key, by its name, if there is any.
func onPlaceholder(name string, around *routes.Around) (Advice, bool) {
	for _, f := range flaws {
		if slices.Contains(f.names, name) {
			return Advice{Kind: KeyPerRequest, Problem: f.problem, Remedy: f.remedy, unshared: true}, true
		}
	}
	if around.Sets(name) {
		return Advice{}, false // a handler before the limit does
	}
	if later := around.SetLater(name); later != "" {
		return setLater(name, later), true
	}
	if strings.HasPrefix(name, "http.response.") {
		return advise(KeyUnknown,
			"is only known once there is a response, so it is empty",
			"Use a value of the request, such as {client_ip}, and count to count by the response."), true
	}
	if capture, ok := strings.CutPrefix(name, placeholder.OfCapture); ok {
		if of, _, named := strings.Cut(capture, "."); named && !around.Captures(of) {
			return advise(KeyUnset,
				"no regular expression of that name sets, so it is empty",
				"Give the matcher that name, as in path_regexp "+of+" <expression>, or use the matcher's name."), true
		}
	}
	return neverSet(name, around)
}

// neverSet returns advice on a placeholder that neither Caddy nor the handlers of a site set, by its
// name, if it is one.
func neverSet(name string, around *routes.Around) (Advice, bool) {
	if around.Sets(name) {
		return Advice{}, false
	}
	if a, ok := missingInCaddy(name); ok {
		ofCaddy := a.Problem == noPlaceholder && (strings.HasPrefix(name, "http.") || strings.HasPrefix(name, "remote"))
		return a, ofCaddy || !around.Plugins()
	}
	if long := longName(name); long != "" && !placeholder.IsGlobal(name) {
		return advise(KeyShortName,
			"is only known in a Caddyfile, so it is empty",
			"Use its long name, "+long+"."+bounding(name)), true
	}
	if placeholder.IsUnknown(name) {
		return advise(KeyUnknown,
			noPlaceholder,
			"Use one of https://caddyserver.com/docs/json/apps/http/#docs, such as {client_ip}."), true
	}
	if !around.Plugins() && !strings.Contains(name, ".") {
		return advise(KeyUnset, // Caddy's have a dot, except map's
			"neither Caddy nor a map sets, so it is empty",
			"Set it with map before the limit, or use one of Caddy's placeholders, such as {client_ip}."), true
	}
	return Advice{}, false
}

// noPlaceholder is the problem of most placeholders that Caddy does not have.
const noPlaceholder = "is not one of Caddy's placeholders, so it is empty"

// missingInCaddy returns advice on a placeholder if it is one of those that are missing.
func missingInCaddy(name string) (Advice, bool) {
	for _, m := range missing {
		for _, known := range m.names {
			rest, found := strings.CutPrefix(name, known)
			if !found || (rest == "") == strings.HasSuffix(known, ".") {
				continue
			}
			if _, err := caddy.GetModule(m.unless); err == nil {
				return Advice{}, false
			}
			remedy := strings.Replace(m.remedy, ".X}", "."+rest+"}", 1)
			return Advice{Kind: KeyUnknown, Problem: cmp.Or(m.problem, noPlaceholder), Remedy: remedy + bounding(firstIn(remedy))}, true
		}
	}
	return Advice{}, false
}

// firstIn returns the first placeholder in a sentence.
func firstIn(text string) string {
	_, text, _ = strings.Cut(text, "{")
	name, _, _ := strings.Cut(text, "}")
	return name
}

// headerPrefix is how the placeholders of header fields begin.
const headerPrefix = "http.request.header."

// setLater returns advice on a placeholder that a directive sets behind the limit.
func setLater(name, directive string) Advice {
	a := advise(SetLater,
		directive+" sets after this limit, so here it is empty",
		"Put both in a route block, "+directive+" first")
	if strings.HasPrefix(name, headerPrefix) {
		a.Problem = directive + " sets after this limit, so here it has the client's value"
	}
	if slices.Contains([]string{"basic_auth", "forward_auth", "request_header"}, directive) {
		a.Remedy += ", or set the global option order rate_limit after " + directive
	}
	a.Remedy += "."
	return a
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
	case longName(strings.Replace(text, ":", ".", 1)) != "":
		return strings.Replace(text, ":", ".", 1)
	case strings.HasPrefix(text, "$"):
		return "client_ip"
	case slices.Contains(missing[0].names, strings.ReplaceAll(lower, "-", "_")), lower == "client-ip":
		return "client_ip"
	case strings.HasPrefix(text, "http."):
		if a, ok := missingInCaddy(text); ok {
			return firstIn(a.Remedy)
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
