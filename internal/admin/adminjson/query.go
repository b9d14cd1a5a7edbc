package adminjson

import (
	"cmp"
	"encoding/json"
	"strings"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/key/keytext"
)

// BucketQuery is the body of a request about the bucket of a limit or, without a
// limit, about the buckets of all limits whose key is known then. The body has the texts of
// keys, see package keytext.
type BucketQuery struct {
	Limit   string
	Key     *string  // as the limit's template expands to it
	Values  []string // instead of key: of the placeholders in the template
	Address *string  // of a client; with a limit: of one whose requests have no key
}

// MarshalJSON returns the body.
func (query BucketQuery) MarshalJSON() ([]byte, error) { return json.Marshal(query.body()) }

// body returns the fields of the body.
func (query BucketQuery) body() map[string]any {
	body := make(map[string]any)
	if query.Limit != "" {
		body["limit"] = query.Limit
	}
	if query.Key != nil {
		body["key"] = keytext.Of(*query.Key)
	} else if query.Values != nil {
		body["key"] = query.valueTexts()
	}
	if query.Address != nil {
		body["address"] = query.Address
	}
	return body
}

// valueTexts returns the texts of the values.
func (query *BucketQuery) valueTexts() []string {
	texts := make([]string, len(query.Values))
	for i, value := range query.Values {
		texts[i] = keytext.Of(value)
	}
	return texts
}

// BanQuery is the body of a request to ban a key.
type BanQuery struct {
	BucketQuery
	Duration string
}

// MarshalJSON returns the body.
func (query BanQuery) MarshalJSON() ([]byte, error) {
	body := query.body()
	body["duration"] = query.Duration
	return json.Marshal(body)
}

// Whose returns whose buckets are meant, in words.
func (query *BucketQuery) Whose() string {
	var of []string
	switch {
	case query.Address == nil:
	case *query.Address == "":
		of = append(of, "clients without an address")
	default:
		of = append(of, "client "+keytext.Safe(*query.Address))
	}
	if query.Key != nil {
		of = append(of, "key "+keytext.Safe(keytext.Of(*query.Key)))
	} else if query.Values != nil {
		of = append(of, "key "+keytext.SafeList(query.valueTexts()))
	}
	return cmp.Or(strings.Join(of, " and "), "all requests")
}

// Text returns the text of the key or address.
func (query *BucketQuery) Text() string {
	switch {
	case query.Address != nil:
		return *query.Address
	case query.Key != nil:
		return *query.Key
	case len(query.Values) == 1:
		return query.Values[0]
	}
	return ""
}
