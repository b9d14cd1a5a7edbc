// Package key makes the keys of requests from templates.
package key

import (
	"cmp"
	"errors"
	"fmt"
	"net/http"
	"net/textproto"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/zone"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/clientip"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/field"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/placeholder"
)

// Key is a parsed key template, which determines the bucket of a request.
type Key struct {
	Source     string // the template as it was written
	Parts      []Part
	Prefixes   clientip.Prefixes
	Fixed      bool // whether its value stays the same throughout a request
	mayBeEmpty bool // whether an empty value is a key like others
	several    bool // whether it has several placeholders
	Submitted  bool // whether any of these is a field of what clients submit
}

// Part is a piece of a key's template: literal text or a placeholder.
type Part struct {
	Text        string // the literal, or the placeholder's full name without braces
	Placeholder bool
	Address     bool // whether its value is an address, of which the prefix counts
	unverified  bool // whether its value is not verified in early data
	fixed       bool // whether its value stays the same throughout a request
	submitted   bool // whether it is a field of what clients submit
	spelling         // how its value is read
}

// Parse parses a template. Its error is about the given option.
func Parse(name, template string, prefixes clientip.Prefixes) (*Key, error) {
	const use = "text or placeholders, such as {client_ip}, or a word for one bucket for all"
	if template == "" || strings.ContainsRune(template, 0) {
		return nil, option.Bad(name, template, use)
	}
	// Caddy's own replacer finds the placeholders, as it handles escapes.
	k := &Key{Source: template, Prefixes: prefixes}
	var names []string
	text, err := caddy.NewEmptyReplacer().ReplaceFunc(template, func(name string, _ any) (any, error) {
		names = append(names, name)
		return "\x00", nil
	})
	if err != nil {
		return nil, option.Bad(name, template, fmt.Sprintf("%s: %v", use, err))
	}
	if !placeholder.BracesBalance(template) {
		return nil, option.Bad(name, template, `both braces of each placeholder, and \{ and \} for others`)
	}
	for i, literal := range strings.Split(text, "\x00") {
		if i > 0 {
			p, err := newPlaceholder(names[i-1])
			if err != nil {
				return nil, option.Bad(name, template, "{"+field.Prefix+"X} with "+err.Error())
			}
			k.Parts, k.Submitted = append(k.Parts, p), k.Submitted || p.submitted
		}
		if literal != "" {
			k.Parts = append(k.Parts, Part{Text: literal, fixed: true})
		}
	}
	k.several = len(k.Placeholders()) > 1
	k.Fixed = !slices.ContainsFunc(k.Parts, func(p Part) bool { return !p.fixed })
	return k, nil
}

// ParseZone parses the template of a zone, whose key may be empty. Without one it
// counts as the limit does that it is converted to.
func ParseZone(template string, prefixes clientip.Prefixes) (*Key, error) {
	k, err := Parse("key", cmp.Or(template, zone.NoKey), prefixes)
	if err != nil {
		return nil, err
	}
	k.mayBeEmpty = true
	return k, nil
}

// newPlaceholder returns the part of a key that is a placeholder.
func newPlaceholder(name string) (p Part, err error) {
	p = Part{Text: name, Placeholder: true}
	if full := placeholder.Addresses[name]; full != "" {
		p.Text, p.Address = full, true
	}
	p.unverified = p.Address || strings.HasPrefix(p.Text, "http.request.remote")
	// Values of the request itself do not change. Others may: a matcher can set
	// them, as path_regexp sets its captures, and some change with time.
	p.submitted = strings.HasPrefix(p.Text, field.Prefix)
	p.fixed = p.Text == placeholder.ClientIP || p.Text == placeholder.BasicUser || p.submitted ||
		strings.HasPrefix(p.Text, "http.request.") && !strings.HasPrefix(p.Text, "http.request.duration")
	if p.submitted {
		p.spelling, err = spellingOfField(p.Text)
	} else {
		p.spelling = spellingOf(p.Text)
	}
	return p, err
}

// value returns the value of a placeholder in keys, which is "" if the client has no
// address.
func (p *Part) value(r *http.Request, repl *caddy.Replacer) string {
	if p.Text == placeholder.ClientIP { // faster than the replacer
		if address, ok := caddyhttp.GetVar(r.Context(), caddyhttp.ClientIPVarKey).(string); ok {
			return dropSocketAddress(address)
		}
	}
	if p.read != nil {
		return p.canonical(p.read(r, repl))
	}
	v, _ := repl.GetString(p.Text)
	if p.Address {
		return dropSocketAddress(v)
	}
	return p.canonical(v)
}

// canonical returns a value of p, however it was written, as it is in keys. White space
// around any value does not count, as it may come from a header field by a variable, the
// capture of a matcher, or a cookie.
func (p *Part) canonical(v string) string {
	v = textproto.TrimString(v)
	if p.spelled != nil && v != "" {
		v = p.spelled(v)
	}
	return v
}

// dropSocketAddress returns address, or "" if it is the placeholder address of a
// client on a unix socket.
func dropSocketAddress(address string) string {
	if address == "@" {
		return ""
	}
	return address
}

// IsUnclear reports whether text is the key of requests for which a field of what clients submit is unclear.
func (k *Key) IsUnclear(text string) bool { return k.hasSubmitted(text, field.Unclear) }

// HasFields reports whether text is the key of requests for which each field of what clients submit that
// it has is there, and clear.
func (k *Key) HasFields(text string) bool { return !k.hasSubmitted(text, field.Unclear, "") }

// hasSubmitted reports whether a field of what clients submit is one of those values in the key text.
func (k *Key) hasSubmitted(text string, those ...string) bool {
	if !k.Submitted {
		return false
	}
	values := Split(text)
	if value, ok := k.cut(text); ok && !k.several {
		values = []string{value}
	}
	for i, p := range k.Placeholders() {
		if p.submitted && i < len(values) && slices.Contains(those, values[i]) {
			return true
		}
	}
	return false
}

// ErrEarlyData is the error for a request whose address is not verified yet: until the TLS
// handshake is complete, it may have been replayed by anyone from anywhere.
var ErrEarlyData = errors.New("TLS handshake not complete, the client's address cannot be verified")

// Of returns the key of a request, and whether it has one: it does not if none
// of the placeholders has a value, unless the key may be empty.
//
// If there are several placeholders, the key is their values, joined by commas, and so
// without what is between them in the template.
func (k *Key) Of(r *http.Request, repl *caddy.Replacer) (string, bool, error) {
	if len(k.Parts) == 1 {
		p := &k.Parts[0]
		if !p.Placeholder {
			return k.Prefixes.Of(p.Text), true, nil
		}
		if p.unverified && earlyData(r) {
			return "", false, ErrEarlyData
		}
		v := p.value(r, repl)
		return k.Prefixes.Of(v), v != "" || k.mayBeEmpty, nil
	}
	var text []byte
	placeholders, given := 0, k.mayBeEmpty
	for i := range k.Parts {
		p := &k.Parts[i]
		if !p.Placeholder {
			if !k.several {
				text = append(text, p.Text...)
			}
			continue
		}
		if p.unverified && earlyData(r) {
			return "", false, ErrEarlyData
		}
		v := k.Prefixes.Of(p.value(r, repl))
		if k.several {
			text = appendValue(text, v, placeholders > 0)
		} else {
			text = append(text, v...)
		}
		placeholders, given = placeholders+1, given || v != ""
	}
	switch {
	case placeholders > 0 && !given:
		return "", false, nil
	case k.several:
		return string(text), true, nil
	}
	return k.Prefixes.Of(string(text)), true, nil
}

// appendValue appends a value to a key of several, behind a comma if it is not the
// first. Commas in it are escaped by backslashes, and so are these: no client can choose
// values that make up another client's key.
func appendValue(key []byte, value string, more bool) []byte {
	if more {
		key = append(key, ',')
	}
	for i := range len(value) {
		if c := value[i]; c == ',' || c == '\\' {
			key = append(key, '\\')
		}
		key = append(key, value[i])
	}
	return key
}

// Split returns the values that make up a key of several.
func Split(key string) []string {
	var values []string
	var value []byte
	for i := 0; i < len(key); i++ {
		switch c := key[i]; {
		case c == ',':
			values, value = append(values, string(value)), value[:0]
			continue
		case c == '\\' && i+1 < len(key):
			i++
		}
		value = append(value, key[i])
	}
	return append(values, string(value))
}

// ClientAddress returns the address of the client, which is used if a request has
// no key. It is empty if the client has none.
func (k *Key) ClientAddress(r *http.Request) (string, error) {
	if earlyData(r) {
		return "", ErrEarlyData
	}
	address, _ := caddyhttp.GetVar(r.Context(), caddyhttp.ClientIPVarKey).(string)
	return k.Prefixes.Of(dropSocketAddress(address)), nil
}

// NetworkOfClient returns the network of the client's address. It is not known on a
// unix socket, and not verified in early data.
func NetworkOfClient(r *http.Request) string {
	if earlyData(r) {
		return clientip.NoNetwork
	}
	address, _ := caddyhttp.GetVar(r.Context(), caddyhttp.ClientIPVarKey).(string)
	return clientip.NetworkOf(address)
}

// earlyData reports whether r was received before its TLS handshake was complete.
func earlyData(r *http.Request) bool {
	return r.TLS != nil && !r.TLS.HandshakeComplete
}
