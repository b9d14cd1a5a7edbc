package key

import (
	"fmt"
	"strings"
)

// Values returns the values of k's placeholders: of addresses the given one, and of
// the others theirs in their order.
func (k *Key) Values(address string, others []string) (all []string) {
	for _, p := range k.placeholders() {
		if p.address {
			all = append(all, address)
		} else {
			all, others = append(all, others[0]), others[1:]
		}
	}
	return all
}

// Typed returns the key of requests, see Of, that an operator has typed: as text,
// or as the values of the placeholders. Neither is needed if the key has no
// placeholders.
func (k *Key) Typed(text *string, values []string) (string, error) {
	placeholders := k.placeholders()
	n := len(placeholders)
	if k.several && text != nil {
		values = Split(*text)
	}
	switch {
	case text == nil && values == nil && n == 0:
		return k.join(nil), nil
	case text == nil && values == nil:
		return "", fmt.Errorf("key: none given; use a text that %s can expand to", k)
	case values != nil && len(values) != n:
		return "", fmt.Errorf("key: %d values given; use %d, one for each placeholder in %s", len(values), n, k)
	case values == nil && n == 0:
		if k.Prefixes.Of(*text) != k.join(nil) {
			return "", fmt.Errorf("key: not valid; use %s, the only key of this limit, or none", k)
		}
		return k.join(nil), nil
	case values == nil:
		value, ok := k.cut(*text)
		if !ok {
			return "", fmt.Errorf("key: not valid; use a text that %s can expand to", k)
		}
		values = []string{value}
	}
	given := n == 0
	for i, p := range placeholders {
		if !p.address {
			values[i] = k.Prefixes.Of(p.canonical(values[i]))
		}
		given = given || values[i] != ""
		if !p.address || values[i] == "" {
			continue
		}
		address, err := k.Prefixes.Parse(values[i])
		if err != nil {
			return "", fmt.Errorf("key: not valid; use an IP address for {%s}, or a prefix of %d bits of IPv4 or %d of IPv6", p.text, k.Prefixes.IPv4, k.Prefixes.IPv6)
		}
		values[i] = address
	}
	if !given {
		return "", fmt.Errorf("key: empty; use address instead, as a request without a key has the bucket of its client's address")
	}
	return k.join(values), nil
}

// TypedAddress returns the key of requests that have no key of their own: their
// client's address, which an operator has typed.
func (k *Key) TypedAddress(text string) (string, error) {
	placeholders := k.placeholders()
	if len(placeholders) == 0 {
		return "", fmt.Errorf("address: not valid here; use none, as all requests have the key %s", k)
	}
	if text == "" {
		return "", nil
	}
	if len(k.parts) == 1 && placeholders[0].address {
		return "", fmt.Errorf("address: not valid here; use key, which is an address in this limit")
	}
	address, err := k.Prefixes.Parse(text)
	if err != nil {
		return "", fmt.Errorf("address: not valid; use an IP address, or a prefix of %d bits of IPv4 or %d of IPv6", k.Prefixes.IPv4, k.Prefixes.IPv6)
	}
	return address, nil
}

// placeholders returns the parts of the template that are placeholders.
func (k *Key) placeholders() (found []part) {
	for _, p := range k.parts {
		if p.placeholder {
			found = append(found, p)
		}
	}
	return found
}

// Placeholder is a placeholder in the template of a key.
type Placeholder struct {
	Name    string // its full name, without braces
	Address bool   // whether its value is an address, of which the prefix counts
}

// Placeholders returns the placeholders in the template.
func (k *Key) Placeholders() (all []Placeholder) {
	for _, p := range k.placeholders() {
		all = append(all, Placeholder{p.text, p.address})
	}
	return all
}

// cut returns the value of the only placeholder in text, and whether the template can
// expand to text.
func (k *Key) cut(text string) (value string, ok bool) {
	before := true
	for _, p := range k.parts {
		switch {
		case p.placeholder:
			before = false
		case before:
			if text, ok = strings.CutPrefix(text, p.text); !ok {
				return "", false
			}
		default:
			if text, ok = strings.CutSuffix(text, p.text); !ok {
				return "", false
			}
		}
	}
	return text, true
}

// join returns what expand returns for a request with these values, of which
// addresses are prefixes already.
func (k *Key) join(values []string) string {
	var text []byte
	if k.several {
		for i, v := range values {
			text = appendValue(text, v, i > 0)
		}
		return string(text)
	}
	for _, p := range k.parts {
		if p.placeholder {
			text = append(text, values[0]...)
		} else {
			text = append(text, p.text...)
		}
	}
	return k.Prefixes.Of(string(text))
}
