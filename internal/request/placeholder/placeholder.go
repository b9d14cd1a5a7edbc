// Package placeholder knows which placeholders Caddy has, who determines their values,
// and which of them are no use in the key of a limit.
package placeholder

import (
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
)

// The placeholders for a client's address and for the address of the connection.
const (
	ClientIP   = "http.vars.client_ip"
	RemoteHost = "http.request.remote.host"
)

// BasicUser is the placeholder of this module for the name in a Basic credential that has
// not been verified.
const BasicUser = "http.rate_limit.basic_user"

// OfCapture is how the placeholders of Caddy begin for what a regular expression has captured.
const OfCapture = "http.regexp."

// OfField is how the placeholders of this module begin for the fields of what clients submit.
const OfField = "http.rate_limit.field."

// Addresses maps the placeholders whose value is a single address to their full names.
// The short names are from the Caddyfile; in JSON they would otherwise be unknown,
// and thus empty.
var Addresses = map[string]string{
	ClientIP:      ClientIP,
	RemoteHost:    RemoteHost,
	"client_ip":   ClientIP,
	"remote_host": RemoteHost,
}

// IsGlobal reports whether a placeholder has the same value in all requests.
func IsGlobal(name string) bool {
	return strings.HasPrefix(name, "env.") || strings.HasPrefix(name, "file.") || strings.HasPrefix(name, "system.")
}

// IsClientControlled reports whether clients can choose the value of a placeholder. Client
// certificates are verified, so clients can't choose their values; captures of matchers are
// taken from what clients send.
func IsClientControlled(name string) bool {
	if rest, ok := strings.CutPrefix(name, "http.request."); ok {
		return !strings.HasPrefix(rest, "local") && !strings.HasPrefix(rest, "tls.client.")
	}
	return name == BasicUser || strings.HasPrefix(name, OfField) || strings.HasPrefix(name, OfCapture) || strings.HasPrefix(name, "http.matchers.")
}

// IsChosen reports whether clients can choose the value of a placeholder from arbitrarily many.
func IsChosen(name string) bool {
	field, ofRequest := strings.CutPrefix(name, "http.request.")
	return name == BasicUser || strings.HasPrefix(name, OfField) || strings.HasPrefix(name, OfCapture) || ofRequest && slices.ContainsFunc(
		[]string{"header.", "cookie.", "uri", "orig_uri", "body", "method", "orig_method", "host"},
		func(prefix string) bool { return strings.HasPrefix(field, prefix) })
}

// In returns the placeholders in a template.
func In(template string) (names []string) {
	_, _ = caddy.NewEmptyReplacer().ReplaceFunc(template, func(found string, _ any) (any, error) {
		names = append(names, found)
		return nil, nil
	})
	return names
}

// AnyChosen reports whether clients can choose the value of a template from arbitrarily many.
func AnyChosen(template string) bool { return slices.ContainsFunc(In(template), IsChosen) }

// BracesBalance reports whether every brace in text is part of a placeholder or
// escaped. A closing brace that matches an escaped one need not be escaped.
func BracesBalance(text string) bool {
	open, literal := false, 0
	for i := range len(text) {
		switch escaped := i > 0 && text[i-1] == '\\'; {
		case open && text[i] == '}' && !escaped:
			open = false
		case open && text[i] == '{' && !escaped:
			return false
		case open:
		case text[i] == '{' && escaped:
			literal++
		case text[i] == '{':
			open = true
		case text[i] == '}' && literal > 0:
			literal--
		case text[i] == '}' && !escaped:
			return false
		}
	}
	return !open
}
