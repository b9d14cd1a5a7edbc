package key

import (
	"net/textproto"
	"slices"
	"strings"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/placeholder"
)

// String returns the template with the full names of all placeholders.
func (k *Key) String() string {
	var text strings.Builder
	for _, p := range k.Parts {
		if p.Placeholder {
			text.WriteString("{" + p.Text + "}")
		} else {
			text.WriteString(p.Text)
		}
	}
	return text.String()
}

// Placeholders returns the parts of the template that are placeholders.
func (k *Key) Placeholders() (found []Part) {
	for _, p := range k.Parts {
		if p.Placeholder {
			found = append(found, p)
		}
	}
	return found
}

// Names returns the names of the placeholders.
func (k *Key) Names() (names []string) {
	for _, p := range k.Placeholders() {
		names = append(names, p.Text)
	}
	return names
}

// Has reports whether a placeholder is part of the key.
func (k *Key) Has(name string) bool { return slices.Contains(k.Names(), name) }

// User returns the first placeholder of the key that only has a value behind
// authentication, or "".
func (k *Key) User() string {
	for _, name := range k.Names() {
		if strings.HasPrefix(name, "http.auth.user.") {
			return name
		}
	}
	return ""
}

// Headers returns the header fields that the key is made from.
func (k *Key) Headers() (names []string) {
	for _, name := range k.Names() {
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
func (k *Key) Fields() (names []string) {
	for _, name := range k.Names() {
		if strings.HasPrefix(name, placeholder.OfField) {
			names = append(names, name)
		}
	}
	return names
}

// headerPrefix is how the placeholders of header fields begin.
const headerPrefix = "http.request.header."
