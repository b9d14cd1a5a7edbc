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

	"github.com/seed-387a6c65/caddy-ratelimit/internal/adminjson"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/keytext"
)

// maxBody is the size of the largest body: keys may be as long as header fields.
const maxBody = 64 << 10

// wantBody says in errors what to send.
const wantBody = `such as {"limit": "api", "key": "203.0.113.7"}, or {"address": "203.0.113.7"} for all limits`

// readAsked reads the body of a request about one bucket. Its errors do not
// show what the body has, which may be a key: Caddy logs them.
func readAsked(w http.ResponseWriter, r *http.Request) (adminjson.Asked, error) {
	body, err := readBody(w, r, wantBody)
	if err != nil {
		return adminjson.Asked{}, err
	}
	return parseAsked(body)
}

// readBody reads a body. want says in errors what to send.
func readBody(w http.ResponseWriter, r *http.Request, want string) ([]byte, error) {
	if r.URL.RawQuery != "" {
		return nil, badRequest("query: got one, want a body, %s", want)
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		return nil, newError(http.StatusRequestEntityTooLarge, "body: want at most %d bytes", maxBody)
	case err != nil:
		return nil, badRequest("body: reading it: %v", err)
	case len(body) == 0:
		return nil, badRequest("body: none given; use %s", want)
	case !utf8.Valid(body):
		return nil, badRequest("body: got text that is not UTF-8, want %s", want)
	}
	return body, nil
}

// wantBan says in errors what to send to ban a key.
const wantBan = `such as {"limit": "login", "key": "203.0.113.7", "duration": "10m"}`

// errNoBanLimit rejects a request about a ban of no limit.
var errNoBanLimit = badRequest("limit: none given; use the path of a limit with ban, such as \"login\"")

// parseBan parses the body of a request to ban a key.
func parseBan(body []byte) (asked adminjson.Asked, d time.Duration, err error) {
	sent, err := readFields(body, wantBan, "limit", "key", "address", "duration")
	if err != nil {
		return asked, 0, err
	}
	if asked, err = askedOf(sent); err != nil {
		return asked, 0, err
	}
	if asked.Limit == "" {
		return asked, 0, errNoBanLimit
	}
	var text string
	if !jsonString(sent["duration"], &text) {
		text = ""
	}
	if d, err = caddy.ParseDuration(text); err != nil || d < time.Second || d > maxBan {
		return asked, 0, badRequest(`duration: want a text from "1s" to "%dd", such as "10m"`, maxBan/(24*time.Hour))
	}
	return asked, d, nil
}

// maxBan is the longest ban.
const maxBan = 6000 * 24 * time.Hour

// parseAsked parses a body.
func parseAsked(body []byte) (adminjson.Asked, error) {
	sent, err := readFields(body, wantBody, "limit", "key", "address")
	if err != nil {
		return adminjson.Asked{}, err
	}
	return askedOf(sent)
}

// readFields returns the fields of a body, which may have each of the known ones once, in
// just this case: encoding/json would take the last of several. want says in errors what to
// send.
func readFields(body []byte, want string, known ...string) (map[string]json.RawMessage, error) {
	switch {
	case !json.Valid(body):
		return nil, badRequest("body: got malformed JSON, want an object, %s", want)
	case !bytes.HasPrefix(bytes.TrimSpace(body), []byte("{")):
		return nil, badRequest("body: want an object, %s", want)
	}
	sent := make(map[string]json.RawMessage)
	decoder := json.NewDecoder(bytes.NewReader(body))
	_, _ = decoder.Token() // the brace
	for decoder.More() {
		token, err := decoder.Token()
		name, isName := token.(string)
		var value json.RawMessage
		if err = cmp.Or(err, decoder.Decode(&value)); err != nil || !isName {
			return nil, badRequest("body: got malformed JSON, want an object, %s", want)
		}
		inCase := slices.IndexFunc(known, func(k string) bool { return strings.EqualFold(k, name) })
		switch {
		case inCase < 0:
			last := len(known) - 1
			return nil, badRequest("body: unknown field; use %s or %s", strings.Join(known[:last], ", "), known[last])
		case known[inCase] != name:
			return nil, badRequest("%s: got the field in another case, want it in lower case", known[inCase])
		case sent[name] != nil:
			return nil, badRequest("%s: got the field twice, want it once", name)
		}
		sent[name] = value
	}
	return sent, nil
}

// askedOf returns what the fields of a body ask for.
func askedOf(sent map[string]json.RawMessage) (asked adminjson.Asked, err error) {
	limit, key, address := sent["limit"], sent["key"], sent["address"]
	switch {
	case limit == nil && key == nil && address == nil:
		return asked, badRequest("body: got neither limit, key nor address, want some of them, %s", wantBody)
	case limit != nil && key != nil && address != nil:
		return asked, badRequest("address: cannot be combined with limit and key")
	}
	if limit != nil && (!jsonString(limit, &asked.Limit) || asked.Limit == "") {
		return asked, badRequest(`limit: want the path of a limit as text, such as "api" or "api/search"`)
	}
	if key != nil {
		if key[0] == '[' {
			err = jsonKeys(key, &asked.Values)
		} else {
			asked.Key = new(string)
			err = jsonKey(key, asked.Key)
		}
		if err != nil {
			return asked, badRequest("key: %w", err)
		}
	}
	if address != nil {
		asked.Address = new(string)
		if !jsonString(address, asked.Address) {
			return asked, badRequest(`address: want the address of a client as text, such as "203.0.113.7", or "" for all that have none`)
		}
		if limit == nil && !isAddress(*asked.Address) {
			return asked, badRequest(`address: want an IP address or a prefix, such as "203.0.113.7", or "" for all that have none`)
		}
	}
	return asked, nil
}

// isAddress reports whether a text is an address, a prefix, or empty.
func isAddress(text string) bool {
	_, notAddress := netip.ParseAddr(text)
	_, notPrefix := netip.ParsePrefix(text)
	return text == "" || notAddress == nil || notPrefix == nil
}

// jsonString decodes a string, if it is one.
func jsonString(raw json.RawMessage, into *string) bool {
	return len(raw) > 0 && raw[0] == '"' && json.Unmarshal(raw, into) == nil
}

// errNotKey is the error for what can't be a key.
var errNotKey = errors.New("want a text, or an array of texts, one for each placeholder in the limit's key")

// jsonKey decodes the text of a key.
func jsonKey(raw json.RawMessage, into *string) (err error) {
	var text string
	if !jsonString(raw, &text) {
		return errNotKey
	}
	*into, err = keytext.Parse(text)
	return err
}

// jsonKeys decodes an array of them.
func jsonKeys(raw json.RawMessage, into *[]string) error {
	var elements []json.RawMessage
	if err := json.Unmarshal(raw, &elements); err != nil {
		return err
	}
	*into = make([]string, len(elements))
	for i, element := range elements {
		if err := jsonKey(element, &(*into)[i]); err != nil {
			return err
		}
	}
	return nil
}
