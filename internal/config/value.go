package config

import (
	"encoding/json"
	"strings"
)

// Number is a number, or a string with placeholders that is evaluated to one for
// each request.
type Number string

// MarshalJSON returns a number if its text survives decoding and encoding, as Caddy
// does to store its config, and a string otherwise.
func (n Number) MarshalJSON() ([]byte, error) {
	var f float64
	if json.Unmarshal([]byte(n), &f) == nil {
		if text, err := json.Marshal(f); err == nil && string(text) == string(n) {
			return text, nil
		}
	}
	return json.Marshal(string(n))
}

// UnmarshalJSON accepts any JSON value as text. It is validated with the option.
func (n *Number) UnmarshalJSON(b []byte) error {
	text, err := scalar(b)
	*n = Number(text)
	return err
}

// Duration is a duration such as `500ms`, `1s` or `1d` (in JSON also an integer
// of nanoseconds), or a string with placeholders that is evaluated to one for each
// request.
type Duration string

// UnmarshalJSON accepts any JSON value as text, and a number as nanoseconds. It is
// validated with the option.
func (d *Duration) UnmarshalJSON(b []byte) error {
	text, err := scalar(b)
	if strings.IndexByte("-0123456789", b[0]) >= 0 {
		text += "ns"
	}
	*d = Duration(text)
	return err
}

// List is a list of strings. In JSON it may also be a single string.
type List []string

// UnmarshalJSON accepts a list or a single element, each any JSON value as text.
// They are validated with the option.
func (l *List) UnmarshalJSON(b []byte) error {
	raw := []json.RawMessage{b}
	if b[0] == '[' {
		raw = nil // or the first element would be written over b
		if err := json.Unmarshal(b, &raw); err != nil {
			return err
		}
	}
	*l = nil
	for _, element := range raw {
		text, err := scalar(element)
		if err != nil {
			return err
		}
		if string(b) != "null" {
			*l = append(*l, text)
		}
	}
	return nil
}

// scalar returns the text of a JSON string, number or other value.
func scalar(b []byte) (text string, err error) {
	switch {
	case string(b) == "null":
	case b[0] == '"':
		err = json.Unmarshal(b, &text)
	default:
		text = string(b)
	}
	return text, err
}

// Rate is `<n>/<duration>`: n units per duration, evenly, such as `10/s`, `10r/s`,
// `1000/h`, `5/12h` or `10 per minute`.
type Rate string

// UnmarshalJSON accepts any JSON value as text. It is validated with the option.
func (r *Rate) UnmarshalJSON(b []byte) error {
	text, err := scalar(b)
	*r = Rate(text)
	return err
}
