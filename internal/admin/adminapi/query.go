package adminapi

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/admin/adminjson"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/key/keytext"
)

// maxBody is the size of the largest body: keys may be as long as header fields.
const maxBody = 64 << 10

// useBody says in errors what to send.
const useBody = `an object such as {"limit": "api", "key": "203.0.113.7"}, or {"address": "203.0.113.7"} for all limits`

// readQuery reads the body of a request about one bucket, which may have more fields. use says in errors what
// to send. Errors do not show what the body has, which may be a key: Caddy logs them.
func readQuery(w http.ResponseWriter, r *http.Request, use string, more ...string) (query adminjson.BanQuery, err error) {
	body, err := readBody(w, r, use)
	if err != nil {
		return query, err
	}
	return parseQuery(body, use, more...)
}

// readBody reads a body.
func readBody(w http.ResponseWriter, r *http.Request, use string) ([]byte, error) {
	if r.URL.RawQuery != "" {
		return nil, badRequest("query: not valid here; use a body with %s", use)
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		return nil, newError(http.StatusRequestEntityTooLarge, "body: too large; use at most %d bytes", maxBody)
	case err != nil:
		return nil, badRequest("body: reading it: %v", err)
	case len(body) == 0:
		return nil, badRequest("body: none given; use %s", use)
	case !utf8.Valid(body):
		return nil, badRequest("body: not UTF-8; use %s", use)
	}
	return body, nil
}

// useBan says in errors what to send to ban a key.
const useBan = `an object such as {"limit": "login", "key": "203.0.113.7", "duration": "10m"}`

// errNoBanLimit rejects a request about a ban of no limit.
var errNoBanLimit = badRequest("limit: none given; use the path of a limit with ban, such as \"login\"")

// parseDuration parses the duration of a ban.
func parseDuration(text string) (time.Duration, error) {
	d, err := caddy.ParseDuration(text)
	if err != nil || d < time.Second || d > maxBan {
		return 0, badRequest(`duration: not valid; use a text from "1s" to "%dd", such as "10m"`, maxBan/(24*time.Hour))
	}
	return d, nil
}

// maxBan is the longest ban.
const maxBan = 6000 * 24 * time.Hour

// readFields returns the fields of a body, which may have each of the known ones once, in
// just this case: encoding/json would take the last of several.
func readFields(body []byte, use string, known ...string) (map[string]json.RawMessage, error) {
	switch {
	case !json.Valid(body):
		return nil, badRequest("body: malformed JSON; use %s", use)
	case !bytes.HasPrefix(bytes.TrimSpace(body), []byte("{")):
		return nil, badRequest("body: not valid; use %s", use)
	}
	sent := make(map[string]json.RawMessage)
	decoder := json.NewDecoder(bytes.NewReader(body))
	_, _ = decoder.Token() // the brace
	for decoder.More() {
		token, err := decoder.Token()
		name, isName := token.(string)
		var value json.RawMessage
		if err = cmp.Or(err, decoder.Decode(&value)); err != nil || !isName {
			return nil, badRequest("body: malformed JSON; use %s", use)
		}
		inCase := slices.IndexFunc(known, func(k string) bool { return strings.EqualFold(k, name) })
		switch {
		case inCase < 0:
			last := len(known) - 1
			return nil, badRequest("body: unknown field; use %s or %s", strings.Join(known[:last], ", "), known[last])
		case known[inCase] != name:
			return nil, badRequest("%s: not in lower case; use lower case", known[inCase])
		case sent[name] != nil:
			return nil, badRequest("%s: given twice; use it once", name)
		}
		sent[name] = value
	}
	return sent, nil
}

// parseQuery parses a body.
func parseQuery(body []byte, use string, more ...string) (query adminjson.BanQuery, err error) {
	sent, err := readFields(body, use, append([]string{"limit", "key", "address"}, more...)...)
	if err != nil {
		return query, err
	}
	limit, key, address := sent["limit"], sent["key"], sent["address"]
	switch {
	case limit == nil && key == nil && address == nil:
		return query, badRequest("body: neither limit, key nor address given; use %s", useBody)
	case limit != nil && key != nil && address != nil:
		return query, badRequest("address: can't be combined with limit and key; use one of key and address")
	}
	query.Duration, _ = jsonString(sent["duration"])
	if query.Limit, _ = jsonString(limit); limit != nil && query.Limit == "" {
		return query, badRequest(`limit: not valid; use the path of a limit as text, such as "api" or "api/search"`)
	}
	if key != nil {
		if err := setKey(&query.BucketQuery, key); err != nil {
			return query, badRequest("key: %w", err)
		}
	}
	if address != nil {
		text, isString := jsonString(address)
		switch query.Address = &text; {
		case !isString:
			return query, badRequest(`address: not valid; use the address of a client as text, such as "203.0.113.7", or "" for all that have none`)
		case limit == nil && !isAddress(text):
			return query, badRequest(`address: not valid; use an IP address or a prefix, such as "203.0.113.7", or "" for all that have none`)
		}
	}
	return query, nil
}

// isAddress reports whether a text is an address, a prefix, or empty.
func isAddress(text string) bool {
	_, notAddress := netip.ParseAddr(text)
	_, notPrefix := netip.ParsePrefix(text)
	return text == "" || notAddress == nil || notPrefix == nil
}

// jsonString returns a string, if that is what raw is.
func jsonString(raw json.RawMessage) (text string, ok bool) {
	ok = len(raw) > 0 && raw[0] == '"' && json.Unmarshal(raw, &text) == nil
	return text, ok
}

// errNotKey is the error for what can't be a key.
var errNotKey = errors.New("not valid; use a text, or an array of texts, one for each placeholder in the limit's key")

// setKey sets the key of a query, or the values that make it up.
func setKey(query *adminjson.BucketQuery, raw json.RawMessage) (err error) {
	texts, several := []json.RawMessage{raw}, raw[0] == '['
	if several {
		texts = nil // or the first would be written over raw
		if err := json.Unmarshal(raw, &texts); err != nil {
			return err
		}
	}
	values := make([]string, len(texts))
	for i := range texts {
		text, isString := jsonString(texts[i])
		if !isString {
			return errNotKey
		}
		if values[i], err = keytext.Parse(text); err != nil {
			return err
		}
	}
	if query.Values = values; !several {
		query.Key, query.Values = &values[0], nil
	}
	return nil
}
