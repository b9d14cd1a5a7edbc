package key

import (
	"fmt"
	"strings"
)

// Values returns the values of k's placeholders: of addresses the given one, and of
// the others theirs in their order.
func (k *Key) Values(address string, others []string) (all []string) {
	for _, p := range k.Placeholders() {
		if p.Address {
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
	placeholders := k.Placeholders()
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
		if !p.Address {
			values[i] = k.Prefixes.Of(p.canonical(values[i]))
		}
		given = given || values[i] != ""
		if !p.Address || values[i] == "" {
			continue
		}
		address, err := k.Prefixes.Parse(values[i])
		if err != nil {
			return "", fmt.Errorf("key: not valid; use an IP address for {%s}, or a prefix of %d bits of IPv4 or %d of IPv6", p.Text, k.Prefixes.IPv4, k.Prefixes.IPv6)
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
	placeholders := k.Placeholders()
	if len(placeholders) == 0 {
		return "", fmt.Errorf("address: not valid here; use none, as all requests have the key %s", k)
	}
	if text == "" {
		return "", nil
	}
	if len(k.Parts) == 1 && placeholders[0].Address {
		return "", fmt.Errorf("address: not valid here; use key, which is an address in this limit")
	}
	address, err := k.Prefixes.Parse(text)
	if err != nil {
		return "", fmt.Errorf("address: not valid; use an IP address, or a prefix of %d bits of IPv4 or %d of IPv6", k.Prefixes.IPv4, k.Prefixes.IPv6)
	}
	return address, nil
}

// cut returns the value of the only placeholder in text, and whether the template can
// expand to text.
func (k *Key) cut(text string) (value string, ok bool) {
	before := true
	for _, p := range k.Parts {
		switch {
		case p.Placeholder:
			before = false
		case before:
			if text, ok = strings.CutPrefix(text, p.Text); !ok {
				return "", false
			}
		default:
			if text, ok = strings.CutSuffix(text, p.Text); !ok {
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
	for _, p := range k.Parts {
		if p.Placeholder {
			text = append(text, values[0]...)
		} else {
			text = append(text, p.Text...)
		}
	}
	return k.Prefixes.Of(string(text))
}
