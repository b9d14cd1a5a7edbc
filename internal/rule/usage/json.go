package usage

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"math/bits"
	"slices"
	"strings"
)

// scanner finds numbers in JSON texts that follow one another. It takes them in pieces of any
// size, and keeps only where it is. It does not validate: what it finds in a text that is not
// JSON means nothing, but it goes on with the next one after reset.
type scanner struct {
	plan   *Plan
	values []value // of the plan's counters
	state  state
	open   [maxNames + 1]*node // the open objects that paths lead through
	depth  int                 // how many of open are in use
	array  bool                // whether the text is an array, whose elements are texts
	first  int                 // the number of the first element of the text, which is one if it is no array
	last   int                 // of the last element so far
	skip   int                 // how many objects and arrays are open that no path leads through
	at     *node               // of the value that comes next; nil if no path leads there
	escape bool                // whether the last character of a string was a backslash
	text   [maxText]byte       // of a name, a mark or a word
	length int                 // of it; more than fits if it is too long to matter
	number value               // at at, which counts if JSON goes on behind it
	behind behind              // what was read behind a value
	single bool                // whether there is one text only
	marked bool                // whether the text says that it is the last one
	whole  bool                // whether nothing comes behind the texts that have ended
}

// state is what the next byte belongs to.
type state uint8

const (
	inValue   state = iota // a value, or what is before it
	inObject               // what is before a name or the end of an object
	inName                 // a name of an object that a path leads through
	inMark                 // a string that may say that the text is the last one
	inWord                 // a value that is wanted: a number, if it is one
	inString               // any other string
	inSkipped              // an object or array that no path leads through
)

// behind is what is between a value of an object and what comes next there.
type behind uint8

const (
	nothing behind = iota
	comma
	other // which JSON does not have there
)

const (
	maxNames = 8   // of a path
	maxText  = 128 // the longest name or number that is looked at, as it is written
)

// value is the last number of a counter.
type value struct {
	decimal
	found   bool
	element int     // in which it was
	before  decimal // the sum of those in the elements of the same array before that
}

func newScanner(p *Plan) scanner {
	return scanner{plan: p, values: make([]value, p.size), at: &p.root}
}

// reset prepares for the next text, also if the last one has not ended.
func (s *scanner) reset() {
	s.state, s.depth, s.array, s.skip, s.at, s.escape = inValue, 0, false, 0, &s.plan.root, false
	s.number.found, s.behind = false, nothing
}

// write scans more.
func (s *scanner) write(b []byte) {
	for len(b) > 0 {
		var n int
		switch s.state {
		case inValue:
			n = s.value(b)
		case inObject:
			n = s.object(b)
		case inName, inMark:
			n = s.name(b)
		case inString:
			n = s.string(b)
		case inWord:
			n = s.word(b)
		case inSkipped:
			n = s.skipped(b)
		}
		b = b[n:]
	}
}

// value looks for the beginning of a value. Each of these methods returns how many bytes it
// has used.
func (s *scanner) value(b []byte) int {
	for i, c := range b {
		switch {
		case isSpace(c), c == ':':
			continue
		case c == '"' && s.at != nil && len(s.at.marks) > 0:
			s.length, s.state = 0, inMark
		case c == '"':
			s.state = inString
		case c == '{' && s.at != nil && len(s.at.children) > 0:
			if s.depth == 0 {
				s.begin()
				s.last++
			}
			s.open[s.depth], s.state = s.at, inObject
			s.depth++
		case c == '[' && s.depth == 0 && !s.array:
			s.begin()
			s.array = true
			continue
		case c == ']' && s.depth == 0:
			s.array, s.whole = false, s.whole || s.single
			continue
		case c == '{', c == '[':
			s.skip, s.state = 1, inSkipped
		case s.at != nil && len(s.at.counters)+len(s.at.marks) > 0:
			s.length, s.state = 0, inWord
			return i
		case s.depth == 0:
			continue // between texts, or an element that is no object
		default:
			s.state = inObject // which goes on to the next name
			return i
		}
		return i + 1
	}
	return len(b)
}

// begin begins a text, or an element of one that is an array.
func (s *scanner) begin() {
	if s.single = s.single && !s.whole; !s.array {
		s.first = s.last + 1
	}
	s.marked, s.whole = false, false
}

// ended is called behind each value.
func (s *scanner) ended() {
	if s.depth == 0 {
		s.state, s.at = inValue, &s.plan.root
	} else {
		s.state = inObject
	}
}

// object looks for the next name, or the end of the object.
func (s *scanner) object(b []byte) int {
	for i, c := range b {
		switch {
		case c == '"':
			s.settle(comma)
			s.length, s.state = 0, inName
			return i + 1
		case c == '}':
			s.settle(nothing)
			if s.depth--; s.depth == 0 {
				s.whole = s.marked || s.single && !s.array
			}
			s.ended()
			return i + 1
		case c == ',' && s.behind == nothing:
			s.behind = comma
		case !isSpace(c):
			s.behind = other
		}
	}
	return len(b)
}

// settle counts the number that was read last, if that is followed by what JSON has there:
// 1,000 is none.
func (s *scanner) settle(want behind) {
	if s.number.found && s.behind == want {
		for _, i := range s.at.counters {
			s.values[i].set(s.number.decimal, s.last, s.first)
		}
	}
	s.number.found, s.behind = false, nothing
}

// name goes on to the end of a name or a mark, or of b.
func (s *scanner) name(b []byte) int {
	end := s.endOfString(b)
	if s.keep(b[:end]); end == len(b) {
		return end
	}
	if s.state == inMark {
		s.mark(s.kept())
		s.ended()
		return end + 1
	}
	s.at, s.state = s.open[s.depth-1].child(s.kept()), inValue
	return end + 1
}

// mark notes if a value at its place says that the text is the last one.
func (s *scanner) mark(value []byte) {
	s.marked = s.marked || slices.Contains(s.at.marks, string(value))
}

// string goes on to the end of any other string, or of b.
func (s *scanner) string(b []byte) int {
	end := s.endOfString(b)
	switch {
	case end == len(b):
		return end
	case s.skip > 0:
		s.state = inSkipped
	default:
		s.ended()
	}
	return end + 1
}

// endOfString returns the index of the quote that ends the string that b goes on with, or the
// length of b.
func (s *scanner) endOfString(b []byte) int {
	for i := 0; ; i++ {
		quote := bytes.IndexByte(b[i:], '"')
		if quote < 0 {
			s.escape = s.escapes(b)
			return len(b)
		}
		if i += quote; !s.escapes(b[:i]) {
			s.escape = false
			return i
		}
	}
}

// escapes reports whether a string that goes on with b ends with a backslash which belongs to the
// next character: with an odd number of them.
func (s *scanner) escapes(b []byte) bool {
	n := len(b)
	for n > 0 && b[n-1] == '\\' {
		n--
	}
	odd := (len(b)-n)%2 == 1
	return odd != (n == 0 && s.escape)
}

// word goes on to the end of a value that is no string, object or array, or of b.
func (s *scanner) word(b []byte) int {
	n := bytes.IndexFunc(b, endsWord)
	if n < 0 {
		s.keep(b)
		return len(b)
	}
	if s.keep(b[:n]); s.length <= maxText {
		s.mark(s.text[:s.length])
		s.number.decimal, s.number.found = parseDecimal(string(s.text[:s.length]))
	}
	s.ended()
	return n
}

// set sets the number of an element, whose text has first as the first one.
func (v *value) set(d decimal, element, first int) {
	switch {
	case v.found && d.digits == 0:
		return // APIs that repeat numbers may send 0 for those that they have sent
	case v.element < first:
		v.before = decimal{}
	case v.element < element:
		v.before = v.before.plus(v.decimal)
	}
	v.decimal, v.found, v.element = d, true, element
}

// skipped goes on to the end of an object or array that no path leads through, or of b.
func (s *scanner) skipped(b []byte) int {
	for i := 0; ; i++ {
		if i += structural(b[i:]); i == len(b) {
			return i
		}
		switch b[i] {
		case '"':
			if i += 1 + s.endOfString(b[i+1:]); i == len(b) {
				s.state = inString
				return i
			}
		case '{', '[':
			s.skip++
		case '}', ']':
			if s.skip--; s.skip == 0 {
				s.ended()
				return i + 1
			}
		}
	}
}

// structural returns the index of the first quote, brace or bracket in b, or of a byte that
// looks alike, or the length of b. Eight bytes at a time make it several times faster, and
// most of what embeddings send is numbers that no path leads to.
func structural(b []byte) int {
	const ones, tops = 0x0101010101010101, 0x8080808080808080
	i := 0
	for ; i+8 <= len(b); i += 8 {
		x := binary.LittleEndian.Uint64(b[i:])
		quote := x ^ '"'*ones
		brace := (x | 0x26*ones) ^ 0x7f*ones // what all of {}[] become, and Y _ y
		if found := ((quote-ones)&^quote | (brace-ones)&^brace) & tops; found != 0 {
			return i + bits.TrailingZeros64(found)/8
		}
	}
	for ; i < len(b); i++ {
		if c := b[i]; c == '"' || c|0x26 == 0x7f {
			return i
		}
	}
	return i
}

// keep keeps more of a name, a mark or a word.
func (s *scanner) keep(b []byte) {
	if s.length < maxText {
		copy(s.text[s.length:], b)
	}
	s.length += len(b)
}

// kept returns the name or mark that was kept, or nothing if it is too long.
func (s *scanner) kept() []byte {
	if s.length > maxText {
		return nil
	}
	text := s.text[:s.length]
	if bytes.IndexByte(text, '\\') >= 0 {
		var name string
		if json.Unmarshal([]byte(`"`+string(text)+`"`), &name) != nil {
			return nil
		}
		return []byte(name)
	}
	return text
}

// endsWord reports whether c ends a value that is no string, object or array.
func endsWord(c rune) bool { return strings.ContainsRune(" \t\r\n,:\"{}[]", c) }

// isSpace reports whether c may be between the parts of a text.
func isSpace(c byte) bool { return c == ' ' || c == '\t' || c == '\r' || c == '\n' }
