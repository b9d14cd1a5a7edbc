package key

import (
	"fmt"
	"net/textproto"
	"slices"
	"strings"
	"sync"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/placeholder"
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
// arbitrarily many, or "".
func (k Template) Chosen() string {
	return k.first(func(name string) bool {
		field, ofRequest := strings.CutPrefix(name, "http.request.")
		return strings.HasPrefix(name, "http.regexp.") || ofRequest && slices.ContainsFunc(
			[]string{"header.", "cookie.", "uri", "orig_uri", "body", "method", "orig_method", "host"},
			func(prefix string) bool { return strings.HasPrefix(field, prefix) })
	})
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
	}
	return names
}

// Bounds reports whether a client that asks often always gets the same bucket.
func (k Template) Bounds() bool {
	return k.Chosen() == "" && !slices.ContainsFunc(k.Flaws(), func(f Flaw) bool { return f.unshared })
}

// Flaw is why a key is probably not what was intended, and what would be.
type Flaw struct {
	Problem, Remedy string

	// Whether a client gets other buckets with each request or connection, so that
	// the limit limits nothing.
	unshared bool
}

// flaws are the placeholders that are no use in keys.
var flaws = []struct {
	names []string
	flaw  Flaw
}{
	{
		[]string{"http.request.remote", "http.request.remote.port"},
		Flaw{"has the port of the client, which is another one for each connection, so each connection has a bucket of its own",
			"Use {client_ip}, or {remote_host} for the address of the connection.", true},
	},
	{
		[]string{"http.request.uuid"},
		Flaw{"is another one for each request, so each request has a bucket of its own",
			"Use what the requests of a client have in common, such as {client_ip}.", true},
	},
	{
		[]string{"time.now", "time.now.http", "time.now.rfc3339", "time.now.common_log", "time.now.unix", "time.now.unix_ms",
			"http.request.duration", "http.request.duration_ms", "http.vars.start_time", "http.time_until_shutdown"},
		Flaw{"changes all the time, and each value has a bucket of its own",
			"Use {client_ip}, and for windows of time algorithm fixed_window.", true},
	},
	{
		[]string{"remote_ip", "remote.ip", "remote_addr", "client.ip", "http.remote_ip", "http.client_ip",
			"http.request.remote_ip", "http.request.remote.ip", "http.request.remote_addr", "http.request.client_ip", "http.request.client.ip"},
		Flaw{"is no placeholder of Caddy, so it is empty",
			"Use {client_ip}, which is {http.vars.client_ip} in JSON, or {http.request.remote.host} for the address of the connection.", false},
	},
}

// Flaws returns what is wrong with k, as far as the key alone tells.
func (k Template) Flaws() (found []Flaw) {
	for _, p := range k {
		if flaw, ok := flawOf(p.Text); ok && p.Placeholder {
			flaw.Problem = "Its key has {" + p.Text + "}, which " + flaw.Problem + "."
			found = append(found, flaw)
		}
	}
	if len(k) == 1 && !k[0].Placeholder {
		text := k[0].Text
		_, flawed := flawOf(text)
		if placeholder.Addresses[text] != "" || flawed || longName(text) != "" || strings.HasPrefix(text, "http.") || strings.HasPrefix(text, "$") {
			found = append(found, Flaw{
				Problem: fmt.Sprintf("Its key is the text %q, not a placeholder, so all requests share one bucket.", text),
				Remedy:  "Write placeholders in braces, such as {client_ip}.",
			})
		}
	}
	return found
}

// flawOf returns what is wrong with a placeholder in a key, by its name, if anything is.
func flawOf(name string) (Flaw, bool) {
	for _, f := range flaws {
		if slices.Contains(f.names, name) {
			return f.flaw, true
		}
	}
	if long := longName(name); long != "" && !placeholder.IsGlobal(name) {
		return Flaw{
			Problem: "is only known in a Caddyfile, so it is empty",
			Remedy:  "Use its long name, " + long + ".",
		}, true
	}
	return Flaw{}, false
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
