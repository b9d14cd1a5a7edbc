package option

import (
	"encoding/json"
	"errors"
	"slices"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/placeholder"
)

// Parser parses the text of a value. If that is invalid, use describes what to use
// instead, as written in Bad; otherwise it is empty.
type Parser[T any] func(text string) (v T, use string)

// Parse parses an option that is the same for all requests. resolve resolves its placeholders.
func Parse[T any](resolve Resolver, option, text string, parse Parser[T]) (T, error) {
	resolved, err := resolve(option, text)
	if err != nil {
		var none T
		return none, err
	}
	v, use := parse(resolved)
	if use != "" {
		return v, BadNumber(option, text, resolved, use)
	}
	return v, nil
}

// Resolver resolves the global placeholders in the text of an option.
type Resolver func(option, text string) (string, error)

// ErrUnresolved is the error of Later for a text with global placeholders.
var ErrUnresolved = errors.New("known when the configuration is loaded")

// Later is the Resolver while a Caddyfile is adapted, which may be elsewhere
// than where its placeholders have their values.
func Later(option, text string) (string, error) {
	if !IsTemplate(text) {
		return text, nil
	}
	if !placeholder.BracesBalance(text) {
		return OnLoad(option, text) // which has the error
	}
	_, err := caddy.NewEmptyReplacer().ReplaceFunc(text, func(name string, _ any) (any, error) {
		if placeholder.IsGlobal(name) {
			return nil, ErrUnresolved
		}
		return "", nil
	})
	return text, err
}

// OnLoad is the Resolver when a configuration is loaded. It is an error if a
// placeholder has no value, or a value with braces, which would be a placeholder again.
func OnLoad(option, text string) (string, error) {
	if !IsTemplate(text) {
		return text, nil
	}
	if !placeholder.BracesBalance(text) {
		return text, Bad(option, text, "both braces of each placeholder")
	}
	known := caddy.NewReplacer()
	resolved, err := caddy.NewEmptyReplacer().ReplaceFunc(text, func(name string, _ any) (any, error) {
		if !placeholder.IsGlobal(name) {
			return "{" + name + "}", nil
		}
		v, _ := known.GetString(name)
		switch {
		case v == "":
			return nil, Errorf(option, "{%s} is empty; give it a value", name)
		case strings.ContainsAny(v, "{}"):
			return nil, Errorf(option, "{%s} has braces in its value; use one without", name)
		}
		return v, nil
	})
	if err != nil || resolved == "" {
		return text, err
	}
	return resolved, nil
}

// IsTemplate reports whether text has placeholders. JSON has none, such as an
// object that was given instead of a number.
func IsTemplate(text string) bool { return HasPlaceholder(text) && !json.Valid([]byte(text)) }

// BadNumber returns the error for an option whose resolved text is invalid. It does
// not show the content of files.
func BadNumber(option, text, resolved, use string) error {
	switch {
	case text == resolved:
		return Bad(option, text, use)
	case strings.Contains(text, "{file."):
		return Bad(option, text, "a file that contains "+use)
	}
	return BadFrom(option, strconv.Quote(Shortened(Redacted(resolved))), text, use)
}

// BadFrom is Bad for what placeholders in a text have become.
func BadFrom(option, got, text, use string) error {
	return Errorf(option, "%s from %s is not valid; use %s", got, Quote(text), use)
}

// ParseConstant parses an option that must not have placeholders.
func ParseConstant[T any](option, text string, parse Parser[T]) (T, error) {
	v, use := parse(text)
	if use != "" {
		return v, Bad(option, text, use)
	}
	return v, nil
}

// OneOf returns the parser of an option that is one of some words.
func OneOf[T ~string](words ...T) Parser[T] {
	texts := make([]string, len(words))
	for i, word := range words {
		texts[i] = string(word)
	}
	use := InWords(texts, "or")
	return func(text string) (T, string) {
		if !slices.Contains(words, T(text)) {
			return "", use
		}
		return T(text), ""
	}
}

// Is returns the parser of an option that is one of some words, which reports whether it is want.
func Is(want string, words ...string) Parser[bool] {
	parse := OneOf(words...)
	return func(text string) (bool, string) {
		word, use := parse(text)
		return word == want, use
	}
}

// HasPlaceholder reports whether Caddy would replace anything in text.
func HasPlaceholder(text string) bool {
	found := false
	_, _ = caddy.NewEmptyReplacer().ReplaceFunc(text, func(string, any) (any, error) {
		found = true
		return nil, nil
	})
	return found
}
