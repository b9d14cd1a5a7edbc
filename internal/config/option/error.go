// Package option parses the options of a configuration: numbers and durations, whose errors name the
// option, what it got and what to write instead. Package value has what depends on the request.
package option

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/redisaddr"
)

// Docs is where the documents are, for errors that name one.
const Docs = "https://github.com/seed-387a6c65/caddy-ratelimit/blob/main/docs/"

// Error is the error for an option: one line that says what is wrong with it.
type Error struct {
	Option  string // its name
	Unclear bool   // whether something else may be meant by it
	problem string
}

// Errorf returns the error for an option.
func Errorf(option, problem string, args ...any) *Error {
	return &Error{Option: option, problem: fmt.Sprintf(problem, args...)}
}

func unclear(option, problem string, args ...any) *Error {
	e := Errorf(option, problem, args...)
	e.Unclear = true
	return e
}

// Error returns the option and what is wrong with it.
func (e *Error) Error() string { return e.Option + ": " + e.problem }

// Bad returns the error for an option whose value is wrong in itself, with what to use instead.
func Bad(option, got, use string) error {
	if got == "" {
		return Errorf(option, "nothing given; use %s", use)
	}
	return unclear(option, "%q is not valid; use %s", Shortened(Redacted(got)), use)
}

// Needs returns the error for an option that is right in itself but needs another option.
func Needs(option, got, needed string) error {
	return unclear(option, "%sneeds %s", shown(got), needed)
}

// Clash returns the error for an option that is right in itself but does not go with something
// else. Its last part is a sentence: what to do about it.
func Clash(option, got, with, instead string) error {
	return Errorf(option, "%scan't be combined with %s; %s", shown(got), with, instead)
}

// shown returns the value of an option that begins a sentence, without the value of a flag.
func shown(got string) string {
	if got == "" || got == "true" {
		return ""
	}
	return strconv.Quote(Shortened(Redacted(got))) + " "
}

// Shortened returns the beginning of a text that is long, for an error message: clients must
// not be able to flood the log.
func Shortened(text string) string {
	const most = 64
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "") + "…"
	}
	return text
}

// Setting is an option as it is written in a config.
type Setting struct{ Option, Text string }

// InWords lists words as a sentence does: "a, b or c".
func InWords(words []string, conjunction string) string {
	last := len(words) - 1
	if last == 0 {
		return words[0]
	}
	return strings.Join(words[:last], ", ") + " " + conjunction + " " + words[last]
}

// Redacted returns text for an error message, without the password of a URL.
func Redacted(text string) string {
	if strings.Contains(text, "://") {
		return redisaddr.WithoutPassword(text)
	}
	return text
}

// Quote returns text for an error message that expected a word: quoted if it
// has special characters, and without the password of a URL.
func Quote(text string) string {
	text = Redacted(text)
	if quoted := strconv.Quote(text); quoted[1:len(quoted)-1] != text {
		return quoted
	}
	return text
}
