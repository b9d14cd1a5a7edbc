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

	"github.com/seed-387a6c65/caddy-ratelimit/internal/keytext"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/terminal"
)

// Asked is the body of a request about the bucket of a limit or, without a
// limit, about the buckets of all limits whose key is known then. The body has the texts of
// keys, see package keytext.
type Asked struct {
	Limit   string
	Key     *string  // as the limit's template expands to it
	Values  []string // instead of key: of the placeholders in the template
	Address *string  // of a client; with a limit: of one whose requests have no key
}

// MarshalJSON returns the body.
func (asked Asked) MarshalJSON() ([]byte, error) { return json.Marshal(asked.body()) }

// body returns the fields of the body.
func (asked Asked) body() map[string]any {
	body := make(map[string]any)
	if asked.Limit != "" {
		body["limit"] = asked.Limit
	}
	if asked.Key != nil {
		body["key"] = keytext.Of(*asked.Key)
	} else if asked.Values != nil {
		body["key"] = asked.valueTexts()
	}
	if asked.Address != nil {
		body["address"] = asked.Address
	}
	return body
}

// valueTexts returns the texts of the values.
func (asked *Asked) valueTexts() []string {
	texts := make([]string, len(asked.Values))
	for i, value := range asked.Values {
		texts[i] = keytext.Of(value)
	}
	return texts
}

// AskedBan is the body of a request to ban a key.
type AskedBan struct {
	Asked
	Duration string
}

// MarshalJSON returns the body.
func (asked AskedBan) MarshalJSON() ([]byte, error) {
	body := asked.body()
	body["duration"] = asked.Duration
	return json.Marshal(body)
}

// Whose returns whose buckets are meant, in words.
func (asked *Asked) Whose() string {
	var of []string
	switch {
	case asked.Address == nil:
	case *asked.Address == "":
		of = append(of, "clients without an address")
	default:
		of = append(of, "client "+terminal.Safe(*asked.Address))
	}
	if asked.Key != nil {
		of = append(of, "key "+terminal.Safe(keytext.Of(*asked.Key)))
	} else if asked.Values != nil {
		of = append(of, "key "+terminal.SafeList(asked.valueTexts()))
	}
	return cmp.Or(strings.Join(of, " and "), "all requests")
}

// Text returns the text of the key or address.
func (asked *Asked) Text() string {
	switch {
	case asked.Address != nil:
		return *asked.Address
	case asked.Key != nil:
		return *asked.Key
	case len(asked.Values) == 1:
		return asked.Values[0]
	}
	return ""
}

// maxBody is the size of the largest body: keys may be as long as header fields.
const maxBody = 64 << 10

// wantBody says in errors what to send.
const wantBody = `such as {"limit": "api", "key": "203.0.113.7"}, or {"address": "203.0.113.7"} for all limits`

// readAsked reads the body of a request about one bucket. Its errors do not
// show what the body has, which may be a key: Caddy logs them.
func readAsked(w http.ResponseWriter, r *http.Request) (Asked, error) {
	body, err := readBody(w, r, wantBody)
	if err != nil {
		return Asked{}, err
	}
	return ParseAsked(body)
}

// readBody reads a body. want says in errors what to send.
func readBody(w http.ResponseWriter, r *http.Request, want string) ([]byte, error) {
	if r.URL.RawQuery != "" {
		return nil, BadRequest("query: got one, want a body, %s", want)
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		return nil, Error(http.StatusRequestEntityTooLarge, "body: want at most %d bytes", maxBody)
	case err != nil:
		return nil, BadRequest("body: reading it: %v", err)
	case len(body) == 0:
		return nil, BadRequest("body: got none, want %s", want)
	case !utf8.Valid(body):
		return nil, BadRequest("body: got text that is not UTF-8, want %s", want)
	}
	return body, nil
}

// wantBan says in errors what to send to ban a key.
const wantBan = `such as {"limit": "login", "key": "203.0.113.7", "duration": "10m"}`

// errNoBanLimit rejects a request about a ban of no limit.
var errNoBanLimit = BadRequest("limit: got none, want the path of a limit with ban, such as \"login\"")

// ParseBan parses the body of a request to ban a key.
func ParseBan(body []byte) (asked Asked, d time.Duration, err error) {
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
	if d, err = caddy.ParseDuration(text); err != nil || d < time.Second || d > MaxBan {
		return asked, 0, BadRequest(`duration: want a text from "1s" to "%dd", such as "10m"`, MaxBan/(24*time.Hour))
	}
	return asked, d, nil
}

// MaxBan is the longest ban.
const MaxBan = 6000 * 24 * time.Hour

// ParseAsked parses a body.
func ParseAsked(body []byte) (Asked, error) {
	sent, err := readFields(body, wantBody, "limit", "key", "address")
	if err != nil {
		return Asked{}, err
	}
	return askedOf(sent)
}

// readFields returns the fields of a body, which may have each of the known ones once, in
// just this case: encoding/json would take the last of several. want says in errors what to
// send.
func readFields(body []byte, want string, known ...string) (map[string]json.RawMessage, error) {
	switch {
	case !json.Valid(body):
		return nil, BadRequest("body: got malformed JSON, want an object, %s", want)
	case !bytes.HasPrefix(bytes.TrimSpace(body), []byte("{")):
		return nil, BadRequest("body: want an object, %s", want)
	}
	sent := make(map[string]json.RawMessage)
	decoder := json.NewDecoder(bytes.NewReader(body))
	_, _ = decoder.Token() // the brace
	for decoder.More() {
		token, err := decoder.Token()
		name, isName := token.(string)
		var value json.RawMessage
		if err = cmp.Or(err, decoder.Decode(&value)); err != nil || !isName {
			return nil, BadRequest("body: got malformed JSON, want an object, %s", want)
		}
		inCase := slices.IndexFunc(known, func(k string) bool { return strings.EqualFold(k, name) })
		switch {
		case inCase < 0:
			last := len(known) - 1
			return nil, BadRequest("body: got an unknown field, want %s or %s", strings.Join(known[:last], ", "), known[last])
		case known[inCase] != name:
			return nil, BadRequest("%s: got the field in another case, want it in lower case", known[inCase])
		case sent[name] != nil:
			return nil, BadRequest("%s: got the field twice, want it once", name)
		}
		sent[name] = value
	}
	return sent, nil
}

// askedOf returns what the fields of a body ask for.
func askedOf(sent map[string]json.RawMessage) (asked Asked, err error) {
	limit, key, address := sent["limit"], sent["key"], sent["address"]
	switch {
	case limit == nil && key == nil && address == nil:
		return asked, BadRequest("body: got neither limit, key nor address, want some of them, %s", wantBody)
	case limit != nil && key != nil && address != nil:
		return asked, BadRequest("address: cannot be combined with limit and key")
	}
	if limit != nil && (!jsonString(limit, &asked.Limit) || asked.Limit == "") {
		return asked, BadRequest(`limit: want the path of a limit as text, such as "api" or "api/search"`)
	}
	if key != nil {
		if key[0] == '[' {
			err = jsonKeys(key, &asked.Values)
		} else {
			asked.Key = new(string)
			err = jsonKey(key, asked.Key)
		}
		if err != nil {
			return asked, BadRequest("key: %w", err)
		}
	}
	if address != nil {
		asked.Address = new(string)
		if !jsonString(address, asked.Address) {
			return asked, BadRequest(`address: want the address of a client as text, such as "203.0.113.7", or "" for all that have none`)
		}
		if limit == nil && !isAddress(*asked.Address) {
			return asked, BadRequest(`address: want an IP address or a prefix, such as "203.0.113.7", or "" for all that have none`)
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
