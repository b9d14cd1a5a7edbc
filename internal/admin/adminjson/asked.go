package adminjson

import (
	"cmp"
	"encoding/json"
	"strings"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/terminal"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/key/keytext"
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
