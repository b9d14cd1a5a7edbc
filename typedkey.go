package ratelimit

import (
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"unicode/utf8"
)

// bucketRequest is the body of a request about the bucket of a limit or, without a
// limit, about the buckets of all limits whose key is known then.
type bucketRequest struct {
	limit   string
	key     *string  // as the limit's template expands to it
	values  []string // instead of key: of the placeholders in the template
	address *string  // of a client; with a limit: of one whose requests have no key
}

// MarshalJSON returns the body.
func (asked bucketRequest) MarshalJSON() ([]byte, error) {
	body := make(map[string]any)
	if asked.limit != "" {
		body["limit"] = asked.limit
	}
	if asked.key != nil {
		body["key"] = asked.key
	} else if asked.values != nil {
		body["key"] = asked.values
	}
	if asked.address != nil {
		body["address"] = asked.address
	}
	return json.Marshal(body)
}

// whose returns whose buckets are meant, in words.
func (asked *bucketRequest) whose() string {
	var of []string
	switch {
	case asked.address == nil:
	case *asked.address == "":
		of = append(of, "clients without an address")
	default:
		of = append(of, "client "+printable(*asked.address))
	}
	if asked.key != nil {
		of = append(of, "key "+printable(*asked.key))
	} else if asked.values != nil {
		of = append(of, "key "+printableList(asked.values))
	}
	return cmp.Or(strings.Join(of, " and "), "all requests")
}

// of returns the requests for the buckets of a limit with key k whose keys can be made
// from what was asked for all limits; and why not others, if so.
func (asked *bucketRequest) of(limit string, k *key) (all []bucketRequest, why string) {
	placeholders := k.placeholders()
	n, others := len(placeholders), 0
	var missing []string
	for _, p := range placeholders {
		if !p.address || asked.address == nil {
			others++
			missing = append(missing, "{"+p.text+"}")
		}
	}
	given := asked.values
	if asked.key != nil {
		given = []string{*asked.key}
	}
	switch {
	case n == 0:
		return []bucketRequest{{limit: limit}}, ""
	case asked.address != nil && (*asked.address == "" || others == n):
		all = append(all, bucketRequest{limit: limit, address: asked.address}) // of requests without a key
	case asked.address != nil && others > 0 && given != nil:
	case asked.address != nil:
		all = append(all, bucketRequest{limit: limit, values: k.values(*asked.address, make([]string, others))})
	}
	switch {
	case others == 0:
	case len(given) != others:
		why = "it needs a value for each placeholder of its key: " + strings.Join(missing, " ")
	case n == 1 && asked.key != nil:
		all = append(all, bucketRequest{limit: limit, key: asked.key})
	case asked.address != nil:
		all = append(all, bucketRequest{limit: limit, values: k.values(*asked.address, given)})
	default:
		all = append(all, bucketRequest{limit: limit, values: slices.Clone(given)})
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

// text returns the text of the key or address.
func (asked *bucketRequest) text() string {
	switch {
	case asked.address != nil:
		return *asked.address
	case asked.key != nil:
		return *asked.key
	case len(asked.values) == 1:
		return asked.values[0]
	}
	return ""
}

// maxBody is the size of the largest body: keys may be as long as header fields.
const maxBody = 64 << 10

// wantBody says in errors what to send.
const wantBody = `such as {"limit": "api", "key": "203.0.113.7"}, or {"address": "203.0.113.7"} for all limits`

// readBucketRequest reads the body of a request about one bucket. Its errors do not
// show what the body has, which may be a key: Caddy logs them.
func readBucketRequest(w http.ResponseWriter, r *http.Request) (asked bucketRequest, err error) {
	if r.URL.RawQuery != "" {
		return asked, badRequest("query: got one, want a body, " + wantBody)
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		return asked, adminError(http.StatusRequestEntityTooLarge, "body: want at most %d bytes", maxBody)
	case err != nil:
		return asked, badRequest("body: it did not arrive: %v", err)
	case len(body) == 0:
		return asked, badRequest("body: got none, want " + wantBody)
	case !utf8.Valid(body):
		return asked, badRequest("body: got text that is not UTF-8, want " + wantBody)
	}
	return parseBucketRequest(body)
}

// parseBucketRequest parses a body. Unlike package json, it accepts each field once
// and only in lower case.
func parseBucketRequest(body []byte) (asked bucketRequest, err error) {
	malformed := badRequest("body: got malformed JSON, want an object, " + wantBody)
	if !json.Valid(body) {
		return asked, malformed
	}
	object := json.NewDecoder(strings.NewReader(string(body)))
	if open, err := object.Token(); err != nil || open != json.Delim('{') {
		return asked, badRequest("body: want an object, " + wantBody)
	}
	seen := make(map[string]bool)
	for object.More() {
		name, err := object.Token()
		if err != nil {
			return asked, malformed
		}
		field, _ := name.(string)
		if seen[field] {
			return asked, badRequest("body: got a duplicate field, want limit, key and address once at most")
		}
		seen[field] = true
		var raw json.RawMessage
		if err := object.Decode(&raw); err != nil {
			return asked, malformed
		}
		switch field {
		case "limit":
			if err := jsonString(raw, &asked.limit); err != nil || asked.limit == "" {
				return asked, badRequest(`limit: want the path of a limit as text, such as "api" or "api/search"`)
			}
		case "key":
			if raw[0] == '[' {
				err = jsonStrings(raw, &asked.values)
			} else {
				asked.key = new(string)
				err = jsonString(raw, asked.key)
			}
			switch {
			case errors.Is(err, errReplaced):
				return asked, badRequest("key: got U+FFFD, which stands for what is not UTF-8, so it is unknown which key is meant; want a key without it")
			case err != nil:
				return asked, badRequest("key: want a text, or an array of texts, one for each placeholder in the limit's key")
			}
		case "address":
			asked.address = new(string)
			if err := jsonString(raw, asked.address); err != nil {
				return asked, badRequest(`address: want the address of a client as text, such as "203.0.113.7", or "" for all that have none`)
			}
		default:
			return asked, badRequest("body: got an unknown field, want limit and key or address")
		}
	}
	switch {
	case !seen["limit"] && !seen["key"] && !seen["address"]:
		return asked, badRequest("body: got neither limit, key nor address, want some of them, " + wantBody)
	case seen["limit"] && seen["key"] && seen["address"]:
		return asked, badRequest("address: got it together with limit and key, want one of them")
	case !seen["limit"] && seen["address"] && !isAddress(*asked.address):
		return asked, badRequest(`address: want an IP address or a prefix, such as "203.0.113.7", or "" for all that have none`)
	}
	return asked, nil
}

// isAddress reports whether a text is an address, a prefix, or empty.
func isAddress(text string) bool {
	_, notAddress := netip.ParseAddr(text)
	_, notPrefix := netip.ParsePrefix(text)
	return text == "" || notAddress == nil || notPrefix == nil
}

// Errors of jsonString.
var (
	errNotText  = errors.New("not a text")
	errReplaced = errors.New("a character was replaced")
)

// jsonString decodes a string. It accepts no U+FFFD: what writes JSON puts that in
// place of bytes that are not UTF-8, and what reads it in place of half a surrogate
// pair. A key that a client has sent with U+FFFD looks the same.
func jsonString(raw json.RawMessage, into *string) error {
	if raw[0] != '"' || json.Unmarshal(raw, into) != nil {
		return errNotText
	}
	if strings.ContainsRune(*into, utf8.RuneError) {
		return errReplaced
	}
	return nil
}

// jsonStrings decodes an array of strings.
func jsonStrings(raw json.RawMessage, into *[]string) error {
	var elements []json.RawMessage
	if err := json.Unmarshal(raw, &elements); err != nil {
		return err
	}
	*into = make([]string, len(elements))
	for i, element := range elements {
		if err := jsonString(element, &(*into)[i]); err != nil {
			return err
		}
	}
	return nil
}

// typed returns the key of requests, see expand, that an operator has typed: as text,
// or as the values of the placeholders. Neither is needed if the key has no
// placeholders.
func (k *key) typed(text *string, values []string) (string, error) {
	placeholders := k.placeholders()
	n := len(placeholders)
	switch {
	case text == nil && values == nil && n == 0:
		return k.join(nil), nil
	case text == nil && values == nil:
		return "", badRequest("key: got none, want a text that %s can expand to", k)
	case values != nil && len(values) != n:
		return "", badRequest("key: got an array of %d, want one value for each placeholder in %s, which has %d", len(values), k, n)
	case values == nil && n > 1:
		return "", badRequest("key: got a text, want an array with one value for each placeholder in %s", k)
	case values == nil && n == 0:
		if k.normalize(*text) != k.join(nil) {
			return "", badRequest("key: want %s, the only key of this limit, or none", k)
		}
		return k.join(nil), nil
	case values == nil:
		value, ok := k.cut(*text)
		if !ok {
			return "", badRequest("key: want a text that %s can expand to", k)
		}
		values = []string{value}
	}
	given := n == 0
	for i, p := range placeholders {
		given = given || values[i] != ""
		if !p.address || values[i] == "" {
			continue
		}
		address, err := k.parseAddress(values[i])
		if err != nil {
			return "", badRequest("key: want an IP address for {%s}, or a prefix of %d bits of IPv4 or %d of IPv6", p.text, k.ipv4, k.ipv6)
		}
		values[i] = address
	}
	if !given {
		return "", badRequest("key: got an empty one; a request without a key has the bucket of its client's address, want address instead")
	}
	return k.join(values), nil
}

// typedAddress returns the key of requests that have no key of their own: their
// client's address, which an operator has typed.
func (k *key) typedAddress(text string) (string, error) {
	placeholders := k.placeholders()
	if len(placeholders) == 0 {
		return "", badRequest("address: all requests have the key %s, want no address", k)
	}
	if text == "" {
		return "", nil
	}
	if len(k.parts) == 1 && placeholders[0].address {
		return "", badRequest("address: the key of this limit is an address, want key")
	}
	address, err := k.parseAddress(text)
	if err != nil {
		return "", badRequest("address: want an IP address, or a prefix of %d bits of IPv4 or %d of IPv6", k.ipv4, k.ipv6)
	}
	return address, nil
}

// parseAddress parses an address, or a prefix as keys have it, and returns what keys
// have of it.
func (k *key) parseAddress(text string) (string, error) {
	prefix, err := netip.ParsePrefix(text)
	if err != nil {
		if _, err := netip.ParseAddr(text); err != nil {
			return "", err
		}
		return k.normalize(text), nil
	}
	bits := k.ipv6
	if prefix.Addr().Is4() {
		bits = k.ipv4
	}
	if prefix.Bits() != bits {
		return "", errors.New("another length")
	}
	if prefix.IsSingleIP() {
		return k.normalize(prefix.Addr().String()), nil
	}
	return prefix.Masked().String(), nil
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
// addresses are normalised already.
func (k *key) join(values []string) string {
	var text, lengths []byte
	n := 0
	for _, p := range k.parts {
		if !p.placeholder {
			text = append(text, p.text...)
			continue
		}
		text = append(text, values[n]...)
		lengths = binary.AppendUvarint(lengths, uint64(len(values[n])))
		n++
	}
	if n > 1 {
		return string(append(append(text, 0), lengths...))
	}
	return k.normalize(string(text))
}

// split returns the values that make up a key of several placeholders, see expand. It
// returns false if there are not several, or the key is not complete.
func (k *key) split(text string) ([]string, bool) {
	n := len(k.placeholders())
	if n < 2 {
		return nil, false
	}
	for end := strings.LastIndexByte(text, 0); end >= 0; end = strings.LastIndexByte(text[:end], 0) {
		rest := []byte(text[end+1:])
		var lengths []uint64
		for len(rest) > 0 && len(lengths) < n {
			length, size := binary.Uvarint(rest)
			if size <= 0 || length > uint64(end) {
				break
			}
			lengths, rest = append(lengths, length), rest[size:]
		}
		if len(lengths) < n || len(rest) > 0 {
			continue
		}
		if values, ok := k.splitAt(text[:end], lengths); ok && k.join(values) == text {
			return values, true
		}
	}
	return nil, false
}

// splitAt returns the values of placeholders in text, given their lengths.
func (k *key) splitAt(text string, lengths []uint64) (values []string, ok bool) {
	for _, p := range k.parts {
		if !p.placeholder {
			if text, ok = strings.CutPrefix(text, p.text); !ok {
				return nil, false
			}
			continue
		}
		n := lengths[len(values)]
		if n > uint64(len(text)) {
			return nil, false
		}
		values, text = append(values, text[:n]), text[n:]
	}
	return values, text == ""
}
