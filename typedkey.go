package ratelimit

import (
	"slices"
	"strings"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/adminapi"
)

// requestsFor returns the requests for the buckets of a limit with key k whose keys can be made
// from what was asked for all limits; and why not others, if so.
func requestsFor(asked *adminapi.Asked, limit string, k *key) (all []adminapi.Asked, why string) {
	placeholders := k.placeholders()
	n, others := len(placeholders), 0
	var missing []string
	for _, p := range placeholders {
		if !p.address || asked.Address == nil {
			others++
			missing = append(missing, "{"+p.text+"}")
		}
	}
	given := asked.Values
	if asked.Key != nil {
		if given = []string{*asked.Key}; others > 1 {
			given = splitValues(*asked.Key)
		}
	}
	switch {
	case n == 0:
		return []adminapi.Asked{{Limit: limit}}, ""
	case asked.Address != nil && (*asked.Address == "" || others == n):
		all = append(all, adminapi.Asked{Limit: limit, Address: asked.Address}) // of requests without a key
	case asked.Address != nil && others > 0 && given != nil:
	case asked.Address != nil:
		all = append(all, adminapi.Asked{Limit: limit, Values: k.values(*asked.Address, make([]string, others))})
	}
	switch {
	case others == 0:
	case len(given) != others:
		why = "it needs a value for each placeholder of its key: " + strings.Join(missing, " ")
	case n == 1 && asked.Key != nil:
		all = append(all, adminapi.Asked{Limit: limit, Key: asked.Key})
	case asked.Address != nil:
		all = append(all, adminapi.Asked{Limit: limit, Values: k.values(*asked.Address, given)})
	default:
		all = append(all, adminapi.Asked{Limit: limit, Values: slices.Clone(given)})
	}
	return all, why
}

// values returns the values of k's placeholders: of addresses the given one, and of
// the others theirs in their order.
func (k *key) values(address string, others []string) (all []string) {
	for _, p := range k.placeholders() {
		if p.address {
			all = append(all, address)
		} else {
			all, others = append(all, others[0]), others[1:]
		}
	}
	return all
}

// typed returns the key of requests, see expand, that an operator has typed: as text,
// or as the values of the placeholders. Neither is needed if the key has no
// placeholders.
func (k *key) typed(text *string, values []string) (string, error) {
	placeholders := k.placeholders()
	n := len(placeholders)
	if k.several && text != nil {
		values = splitValues(*text)
	}
	switch {
	case text == nil && values == nil && n == 0:
		return k.join(nil), nil
	case text == nil && values == nil:
		return "", adminapi.BadRequest("key: got none, want a text that %s can expand to", k)
	case values != nil && len(values) != n:
		return "", adminapi.BadRequest("key: number of values: got %d, want %d, one for each placeholder in %s", len(values), n, k)
	case values == nil && n == 0:
		if k.prefixes.Of(*text) != k.join(nil) {
			return "", adminapi.BadRequest("key: want %s, the only key of this limit, or none", k)
		}
		return k.join(nil), nil
	case values == nil:
		value, ok := k.cut(*text)
		if !ok {
			return "", adminapi.BadRequest("key: want a text that %s can expand to", k)
		}
		values = []string{value}
	}
	given := n == 0
	for i, p := range placeholders {
		if !p.address {
			values[i] = p.canonical(values[i])
		}
		given = given || values[i] != ""
		if !p.address || values[i] == "" {
			continue
		}
		address, err := k.prefixes.Parse(values[i])
		if err != nil {
			return "", adminapi.BadRequest("key: want an IP address for {%s}, or a prefix of %d bits of IPv4 or %d of IPv6", p.text, k.prefixes.IPv4, k.prefixes.IPv6)
		}
		values[i] = address
	}
	if !given {
		return "", adminapi.BadRequest("key: got an empty one; a request without a key has the bucket of its client's address, want address instead")
	}
	return k.join(values), nil
}

// typedAddress returns the key of requests that have no key of their own: their
// client's address, which an operator has typed.
func (k *key) typedAddress(text string) (string, error) {
	placeholders := k.placeholders()
	if len(placeholders) == 0 {
		return "", adminapi.BadRequest("address: all requests have the key %s, want no address", k)
	}
	if text == "" {
		return "", nil
	}
	if len(k.parts) == 1 && placeholders[0].address {
		return "", adminapi.BadRequest("address: the key of this limit is an address, want key")
	}
	address, err := k.prefixes.Parse(text)
	if err != nil {
		return "", adminapi.BadRequest("address: want an IP address, or a prefix of %d bits of IPv4 or %d of IPv6", k.prefixes.IPv4, k.prefixes.IPv6)
	}
	return address, nil
}

// placeholders returns the parts of the template that are placeholders.
func (k *key) placeholders() (found []part) {
	for _, p := range k.parts {
		if p.placeholder {
			found = append(found, p)
		}
	}
	return found
}

// cut returns the value of the only placeholder in text, and whether the template can
// expand to text.
func (k *key) cut(text string) (value string, ok bool) {
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
func (k *key) join(values []string) string {
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
	return k.prefixes.Of(string(text))
}
