package field

import (
	"bytes"
	"encoding/json"
	"strings"
	"unicode/utf8"
)

const (
	// maxDepth is how deep objects and arrays may be within one another.
	maxDepth = 128

	// maxInteger is how many digits a whole number may have: what upstreams make of others differs.
	maxInteger = 15
)

// looksLikeJSON reports whether a text begins like an object or an array.
func looksLikeJSON(text []byte) bool {
	text = bytes.TrimLeft(bytes.TrimPrefix(text, []byte("\ufeff")), " \t\r\n")
	return len(text) > 0 && (text[0] == '{' || text[0] == '[')
}

// scanJSON finds a field in a JSON text. In one that is not valid it is unclear: parsers differ in
// what else they take, such as comments, other quotes or a second text behind the first.
func scanJSON(text []byte, w *Wanted, v *value) {
	text = bytes.TrimPrefix(text, []byte("\ufeff"))
	if !json.Valid(text) {
		v.unclear = true
		return
	}
	s := scanner{text, w, v}
	s.value(make([]byte, 0, maxName), other, 0)
}

// scanner reads a valid JSON text.
type scanner struct {
	text  []byte // what is left of it
	w     *Wanted
	found *value
}

// next returns the next character of the text that is more than what is between values.
func (s *scanner) next() byte {
	for {
		switch c := s.text[0]; c {
		case ' ', '\t', '\r', '\n', ',', ':':
			s.text = s.text[1:]
		default:
			return c
		}
	}
}

// value reads a value, given the path to it and what that is to the field that is wanted.
func (s *scanner) value(path []byte, m match, depth int) {
	c := s.next()
	switch {
	case depth > maxDepth:
		s.found.unclear = true
	case s.found.unclear:
	case c == '{':
		s.found.unclear = m != other // an upstream may take something in it
		for s.text = s.text[1:]; !s.found.unclear && s.next() != '}'; {
			name, _ := s.string()
			next, m := s.w.follow(path, name)
			s.value(next, m, depth+1)
		}
		s.end()
	case c == '[': // whose elements are where it is
		for s.text = s.text[1:]; !s.found.unclear && s.next() != ']'; {
			s.value(path, m, depth+1)
		}
		s.end()
	case c == '"':
		text, valid := s.string()
		s.found.addMatched(m, text, valid)
	default:
		s.word(m)
	}
}

// end goes on behind the end of an object or array, unless it was left before that.
func (s *scanner) end() {
	if !s.found.unclear {
		s.text = s.text[1:]
	}
}

// string reads a string, and reports whether it is text: half of a surrogate pair is none.
func (s *scanner) string() (text []byte, valid bool) {
	end := 1 + bytes.IndexByte(s.text[1:], '"')
	for before := s.text[1:end]; (len(before)-len(bytes.TrimRight(before, `\`)))%2 == 1; before = s.text[1:end] { // escaped
		end += 1 + bytes.IndexByte(s.text[end+1:], '"')
	}
	quoted := s.text[:end+1]
	if s.text = s.text[end+1:]; bytes.IndexByte(quoted, '\\') < 0 {
		return quoted[1:end], true
	}
	var decoded string
	_ = json.Unmarshal(quoted, &decoded) // it is valid
	return []byte(decoded), !strings.ContainsRune(decoded, utf8.RuneError)
}

// word reads a number, true, false or null, which is no value.
func (s *scanner) word(m match) {
	end := bytes.IndexAny(s.text, " \t\r\n,:]}")
	if end < 0 {
		end = len(s.text)
	}
	word := s.text[:end]
	if s.text = s.text[end:]; string(word) == "null" {
		return
	}
	letters := word[0] >= 'a'
	s.found.addMatched(m, word, letters || len(word) <= maxInteger && isNumber(bytes.TrimPrefix(word, []byte("-"))))
}
