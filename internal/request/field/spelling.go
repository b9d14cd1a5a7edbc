package field

import (
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

// Upstreams take many spellings of a name or a value for equal: they ignore case, white space,
// accents, invisible characters, punctuation in numbers, or what follows a + in an address. What is
// compared here is coarser than any of them: values that are taken for one share a limit, while two
// spellings of one value would each have a limit.

// maxValue is the length of the longest value that is certain.
const maxValue = 256

// appendName appends what is compared of a part of a name: its letters and digits, in lower case
// and without accents, behind a _ if it begins with any other character: _token is not token. It ends
// where the path leads to no name of w.
func (w *Wanted) appendName(path, part []byte) []byte {
	var space [64]byte
	begun := false
	for len(part) > 0 && part[0] != 0 { // with which C ends a name
		_, size := utf8.DecodeRune(part)
		decomposed := part[:1]
		if size > 1 {
			decomposed = norm.NFKD.Append(space[:0], part[:size]...)
		}
		for _, r := range string(decomposed) {
			text, kind := fold(r)
			switch {
			case kind == letter && text != "":
				path = append(path, text...)
			case kind == letter:
				path = utf8.AppendRune(path, lower(r))
			case begun, kind == ignored, r == utf8.RuneError, r <= ' ', r == '!', r == '?', r == 0x7f:
				continue // !name is the default of name to Spring, and PHP's own server drops a second ?
			default:
				path = append(path, '_')
			}
			if begun = true; !w.leads(path) {
				return path
			}
		}
		part = part[size:]
	}
	return path
}

// Canonical returns a value as it is in keys: its letters and digits, in lower case and without
// accents, without what is between a + and the @ of an address. A value that upstreams may shorten
// in other ways is Unclear, and so is one without letters and digits.
func Canonical(value string) string {
	value = strings.TrimSpace(value)
	switch {
	case value == "":
		return ""
	case len(value) > maxValue, !utf8.ValidString(value):
		return Unclear
	}
	text := norm.NFKD.String(value)
	key, plus := make([]byte, 0, maxValue), -1
	for _, r := range text {
		letters, kind := fold(r)
		switch {
		case kind == letter && letters != "":
			key = append(key, letters...)
		case kind == letter:
			key = utf8.AppendRune(key, lower(r))
		case kind == odd, r < ' ', r == 0x7f, strings.ContainsRune(`<>%&\`, r):
			return Unclear // tags, octets and entities, as WordPress drops them, or a domain before a backslash
		case r == '+' && plus < 0:
			plus = len(key)
		case r == '@' && plus >= 0:
			key, plus = key[:plus], -1
		}
	}
	for len(key) > 1 && key[0] == '0' && isNumber(key) {
		key = key[1:]
	}
	switch {
	case len(key) == 0, len(key) > maxValue:
		return Unclear
	case string(key) == value:
		return value
	}
	return string(key)
}

// kind is what a character is in a name or a value.
type kind uint8

const (
	mark    kind = iota // neither a letter nor a digit
	letter              // or a digit
	ignored             // accents, and what can't be seen
	odd                 // what upstreams may take for something else
)

// fold returns what a character is after decomposition, and what a letter is in keys unless that is
// its lower case.
func fold(r rune) (text string, of kind) {
	switch {
	case r < utf8.RuneSelf:
		if r >= '0' && r <= '9' || r|0x20 >= 'a' && r|0x20 <= 'z' {
			return "", letter
		}
		return "", mark
	case unicode.In(r, unicode.Mn, unicode.Me, unicode.Cf, unicode.Other_Default_Ignorable_Code_Point):
		return "", ignored
	case r == utf8.RuneError, unicode.Is(unicode.Cc, r), unicode.In(r, unicode.S, unicode.Co):
		return "", odd
	case unicode.IsDigit(r):
		return string('0' + digit(r)), letter
	case !unicode.In(r, unicode.L, unicode.Mc, unicode.N):
		return "", mark
	case !unicode.Is(unicode.Latin, r):
		return "", letter
	}
	if text = latin[unicode.ToLower(r)]; text == "" {
		return "", odd
	}
	return text, letter
}

// lower returns the lower case of a letter, one for all that are equal without regard to case.
func lower(r rune) rune {
	if r < utf8.RuneSelf {
		return r | 0x20 // digits have that bit
	}
	return unicode.ToLower(unicode.ToUpper(r))
}

// latin are letters that upstreams and databases take for those without strokes and ligatures. An
// accent is a character of its own after decomposition.
var latin = map[rune]string{
	'ß': "ss", 'æ': "ae", 'œ': "oe", 'ø': "o", 'đ': "d", 'ð': "d", 'ħ': "h", 'ı': "i", 'ĸ': "k", 'ł': "l", 'ŋ': "n", 'þ': "th", 'ŧ': "t", 'ƒ': "f", 'ə': "ə",
}

// digit returns the value of a decimal digit. Each script has ten of them in a row, and some have
// several rows, so it is counted from the beginning of its range.
func digit(r rune) rune {
	n := rune(0)
	for unicode.IsDigit(r - n - 1) {
		n++
	}
	return n % 10
}
