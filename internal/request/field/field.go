// Package field finds the fields of what a client submits, in the body of its request or in its
// query, before the request is passed on.
//
// An upstream may read the same bytes in another way. So a field has a value only if all ways to
// read it agree. Otherwise it is unclear, which is one key for all such requests: however a request
// is spelled, it meets the limit of its value or that of what is unclear.
package field

import (
	"bytes"
	"errors"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/placeholder"
)

// Prefix is how the placeholders of fields begin.
const Prefix = placeholder.OfField

// Unclear is the value in keys of a field that is there, or may be, without a certain value.
const Unclear = "?"

// Wanted is a field that is looked for.
type Wanted struct {
	names []string // that it may have, as they are compared
}

// maxName is the length of the longest name that a field may have.
const maxName = 128

// errName is the error of Parse, without what is wrong.
var errName = errors.New("a name such as email, a path such as user.email, or several with | between them")

// Parse parses what follows Prefix: names with a | between them, each of which may be a path of
// names with dots between them.
func Parse(text string) (*Wanted, error) {
	w, all := new(Wanted), (*Wanted)(nil)
	for name := range strings.SplitSeq(text, "|") {
		if len(name) > maxName || !utf8.ValidString(name) || strings.ContainsAny(name, "[]=&;{}\"\\%") {
			return nil, errName
		}
		var path []byte
		for segment := range strings.SplitSeq(name, ".") {
			before := len(path)
			if path = all.appendName(path, []byte(segment)); len(path) == before || before > 0 && isNumber([]byte(segment)) {
				return nil, errName
			}
		}
		w.names = append(w.names, string(path))
	}
	return w, nil
}

// match is what a path is to a field that is wanted.
type match uint8

const (
	other  match = iota
	same         // it is one of its names
	within       // it leads into the field, as if that were an object
)

// leads reports whether a path is the beginning of a name of w. Of a nil Wanted, all are.
func (w *Wanted) leads(path []byte) bool {
	if w == nil {
		return true
	}
	for _, name := range w.names {
		if strings.HasPrefix(name, string(path)) {
			return true
		}
	}
	return false
}

// follow appends a name to the path that leads to it, as it is compared, until it leads nowhere, and
// returns what both are to w. A name with brackets or dots is a path too, in which numbers are indices
// of arrays.
func (w *Wanted) follow(path, name []byte) ([]byte, match) {
	m := other
	if len(name) > 4*maxName { // to compare all of it might take much memory
		if path, m = w.follow(path, name[:4*maxName]); m == other && !w.leads(path) {
			return path, other
		}
		return path, within
	}
	for len(name) > 0 && w.leads(path) {
		segment := name
		if i := bytes.IndexAny(name, "[]."); i >= 0 {
			segment, name = name[:i], name[i+1:]
		} else {
			name = nil
		}
		before := len(path)
		if before > 0 && isNumber(segment) {
			continue
		}
		path = w.appendName(path, segment)
		switch {
		case slices.Contains(w.names, string(path)):
			m = same
		case m != other && len(path) > before:
			m = within
		}
	}
	return path, m
}

// isNumber reports whether a text has only digits, or nothing.
func isNumber(text []byte) bool {
	return !slices.ContainsFunc(text, func(c byte) bool { return c < '0' || c > '9' })
}

// isASCII reports whether a text is ASCII.
func isASCII(text []byte) bool {
	return !slices.ContainsFunc(text, func(c byte) bool { return c >= utf8.RuneSelf })
}

// value is what is known of the value of a field.
type value struct {
	text    string // as it was sent, decoded; empty if there is none
	key     string // as it is in keys
	several bool   // whether it was sent in several spellings
	unclear bool
}

// add adds a value that was found. An empty one is none.
func (v *value) add(text []byte) {
	if text = bytes.TrimSpace(text); len(text) == 0 || v.unclear || v.text == string(text) {
		return
	}
	sent := string(text)
	key := Canonical(sent)
	switch {
	case key == Unclear, v.text != "" && v.key != key:
		v.unclear = true
	case v.text == "":
		v.text, v.key = sent, key
	default:
		v.several = true
	}
}

// addMatched adds a value that was found at what m is to the field.
func (v *value) addMatched(m match, text []byte, clear bool) {
	switch {
	case m == other:
	case m == within || !clear:
		v.unclear = true
	default:
		v.add(text)
	}
}

// inKey returns the value in keys.
func (v *value) inKey() string {
	if v.unclear {
		return Unclear
	}
	return v.key
}

// certain returns the value as it was sent, or nothing if that is not certain.
func (v *value) certain() string {
	if v.unclear || v.several {
		return ""
	}
	return v.text
}
