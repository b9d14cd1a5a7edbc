package key

import (
	"net/textproto"
	"slices"
	"strings"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/placeholder"
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

// Placeholders returns the placeholders of the key.
func (k Template) Placeholders() (names []string) {
	for _, p := range k {
		if p.Placeholder {
			names = append(names, p.Text)
		}
	}
	return names
}

// User returns the first placeholder of the key that only has a value behind
// authentication, or "".
func (k Template) User() string {
	for _, name := range k.Placeholders() {
		if strings.HasPrefix(name, "http.auth.user.") {
			return name
		}
	}
	return ""
}

// Headers returns the header fields that the key is made from.
func (k Template) Headers() (names []string) {
	for _, name := range k.Placeholders() {
		if header, ok := strings.CutPrefix(name, headerPrefix); ok {
			names = append(names, textproto.CanonicalMIMEHeaderKey(header))
		}
		if strings.HasPrefix(name, "http.request.cookie.") {
			names = append(names, "Cookie")
		}
		if name == placeholder.BasicUser {
			names = append(names, "Authorization")
		}
	}
	return names
}

// Fields returns the placeholders of the key that are fields of what clients submit, which no log has.
func (k Template) Fields() (names []string) {
	for _, name := range k.Placeholders() {
		if strings.HasPrefix(name, placeholder.OfField) {
			names = append(names, name)
		}
	}
	return names
}

// headerPrefix is how the placeholders of header fields begin.
const headerPrefix = "http.request.header."
