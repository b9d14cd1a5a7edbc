// Package keytext is the text by which operators see keys, and by which they name them.
// Clients choose keys, so these may hold any bytes, while JSON and terminals only carry
// UTF-8.
//
// A key is its own text, unless that is not UTF-8, has U+FFFD, or begins with a double
// quote. Such a key is quoted as in Go: "\xff". So each key has one text that is not that
// of another key, and a text that begins with a double quote is always a quoted one.
package keytext

import (
	"errors"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Of returns the text of a key. It is UTF-8, and has no U+FFFD: programs put that in
// place of bytes that are not UTF-8.
func Of(key string) string {
	if strings.HasPrefix(key, `"`) || strings.ContainsRune(key, utf8.RuneError) || !utf8.ValidString(key) {
		return Quote(key)
	}
	return key
}

// Quote returns text quoted as in Go, with everything escaped that is not printable, and
// U+FFFD too.
func Quote(text string) string {
	return strings.ReplaceAll(strconv.Quote(text), string(utf8.RuneError), `\ufffd`)
}

// Safe returns text as it is if it is safe to print, quoted otherwise: clients
// choose keys, and could send what changes the terminal or the order of letters. Of the
// text of a key it returns one that means the same key.
func Safe(text string) string {
	if text == "" || strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) || r == unicode.ReplacementChar }) {
		return Quote(text)
	}
	return text
}

// SafeList returns texts that are safe to print.
func SafeList(texts []string) string {
	shown := make([]string, len(texts))
	for i, text := range texts {
		shown[i] = Safe(text)
	}
	return strings.Join(shown, " ")
}

// Cut returns at most n bytes of the beginning of a key, and no part of a character.
func Cut(key string, n int) string {
	if len(key) <= n {
		return key
	}
	for end := n; end >= max(n-utf8.UTFMax+1, 0); end-- {
		if utf8.RuneStart(key[end]) {
			return key[:end]
		}
	}
	return key[:n]
}

// Errors of Parse. They do not show the text, as it may be a secret.
var (
	ErrReplaced = errors.New(`U+FFFD stands for what is not UTF-8, so it is unknown which key is meant; ` +
		`use it quoted as top and bans show it, such as "\xff", or "\ufffd" for U+FFFD itself`)
	ErrQuotes = errors.New(`a double quote begins it, but no quoted text; ` +
		`use a key that begins with one quoted as top and bans show it, such as "\"a\""`)
)

// Parse returns the key that a text means: one that Of has returned, or that is quoted
// without need. Bytes that are not UTF-8 are a key as it is, since Of returns none. The
// error is ErrReplaced or ErrQuotes.
func Parse(text string) (key string, err error) {
	switch {
	case !utf8.ValidString(text):
		return text, nil
	case strings.ContainsRune(text, utf8.RuneError):
		return "", ErrReplaced
	case !strings.HasPrefix(text, `"`):
		return text, nil
	}
	if key, err = strconv.Unquote(text); err != nil {
		return "", ErrQuotes
	}
	return key, nil
}
