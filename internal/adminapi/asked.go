package adminapi

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/netip"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/terminal"
)

// Asked is the body of a request about the bucket of a limit or, without a
// limit, about the buckets of all limits whose key is known then.
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
		body["key"] = asked.Key
	} else if asked.Values != nil {
		body["key"] = asked.Values
	}
	if asked.Address != nil {
		body["address"] = asked.Address
	}
	return body
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
		of = append(of, "key "+terminal.Safe(*asked.Key))
	} else if asked.Values != nil {
		of = append(of, "key "+terminal.SafeList(asked.Values))
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
	var sent map[string]json.RawMessage
	if json.Unmarshal(body, &sent) != nil {
		return asked, 0, BadRequest("body: want an object, %s", wantBan)
	}
	var text string
	hasText := json.Unmarshal(sent["duration"], &text) == nil
	delete(sent, "duration")
	rest, err := json.Marshal(sent)
	if err != nil {
		return asked, 0, err
	}
	if asked, err = ParseAsked(rest); err != nil {
		return asked, 0, err
	}
	if asked.Limit == "" {
		return asked, 0, errNoBanLimit
	}
	if d, err = caddy.ParseDuration(text); err != nil || !hasText || d < time.Second || d > MaxBan {
		return asked, 0, BadRequest(`duration: want a text from "1s" to "%dd", such as "10m"`, MaxBan/(24*time.Hour))
	}
	return asked, d, nil
}

// MaxBan is the longest ban.
const MaxBan = 6000 * 24 * time.Hour

// ParseAsked parses a body.
func ParseAsked(body []byte) (asked Asked, err error) {
	var sent struct {
		Limit   json.RawMessage `json:"limit"`
		Key     json.RawMessage `json:"key"`
		Address json.RawMessage `json:"address"`
	}
	decoder := json.NewDecoder(bytes.NewReader(body))
	decoder.DisallowUnknownFields()
	switch err := decoder.Decode(&sent); {
	case !json.Valid(body):
		return asked, BadRequest("body: got malformed JSON, want an object, " + wantBody)
	case !bytes.HasPrefix(bytes.TrimSpace(body), []byte("{")):
		return asked, BadRequest("body: want an object, " + wantBody)
	case err != nil:
		return asked, BadRequest("body: got an unknown field, want limit and key or address")
	case sent.Limit == nil && sent.Key == nil && sent.Address == nil:
		return asked, BadRequest("body: got neither limit, key nor address, want some of them, " + wantBody)
	case sent.Limit != nil && sent.Key != nil && sent.Address != nil:
		return asked, BadRequest("address: cannot be combined with limit and key")
	}
	if sent.Limit != nil {
		if err := jsonString(sent.Limit, &asked.Limit); err != nil || asked.Limit == "" {
			return asked, BadRequest(`limit: want the path of a limit as text, such as "api" or "api/search"`)
		}
	}
	if sent.Key != nil {
		if sent.Key[0] == '[' {
			err = jsonStrings(sent.Key, &asked.Values)
		} else {
			asked.Key = new(string)
			err = jsonString(sent.Key, asked.Key)
		}
		switch {
		case errors.Is(err, errReplaced):
			return asked, BadRequest("key: got U+FFFD, which stands for what is not UTF-8, so it is unknown which key is meant; want a key without it")
		case err != nil:
			return asked, BadRequest("key: want a text, or an array of texts, one for each placeholder in the limit's key")
		}
	}
	if sent.Address != nil {
		asked.Address = new(string)
		if err := jsonString(sent.Address, asked.Address); err != nil {
			return asked, BadRequest(`address: want the address of a client as text, such as "203.0.113.7", or "" for all that have none`)
		}
		if sent.Limit == nil && !isAddress(*asked.Address) {
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
