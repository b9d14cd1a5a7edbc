// Package fieldstest reads the header fields of responses, for tests.
package fieldstest

import (
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/dunglas/httpsfv"
)

// In returns the fields in h that rate limits may set, briefly. Where one
// stands more than once its values are separated by "|".
func In(h http.Header) string {
	var text []string
	for _, f := range []struct{ name, brief string }{
		{"X-RateLimit-Limit", "limit"},
		{"X-RateLimit-Remaining", "remaining"},
		{"X-RateLimit-Clear", "clear"},
		{"X-RateLimit-Used", "used"},
		{"X-RateLimit-Reset", "reset"},
		{"Retry-After", "retry-after"},
		{"RateLimit-Policy", "policy"},
		{"RateLimit", "ratelimit"},
	} {
		if values := h.Values(f.name); len(values) > 0 {
			text = append(text, f.brief+"="+strings.Join(values, "|"))
		}
	}
	return strings.Join(text, " ")
}

// Number returns the integer that the value of a field begins with, 0 if that is none.
func Number(value string) (n int64) {
	_, _ = fmt.Sscan(value, &n)
	return n
}

// Member is one member of a structured field list.
type Member struct {
	Name       string
	Names      string // of the parameters, in order
	Parameters map[string]int64
}

// ParseList parses a list of strings, each of them once, with integers as
// parameters.
func ParseList(text string) ([]Member, error) {
	if text == "" {
		return nil, nil
	}
	list, err := httpsfv.UnmarshalList([]string{text})
	if err != nil {
		return nil, err
	}
	members := make([]Member, 0, len(list))
	for _, m := range list {
		it, ok := m.(httpsfv.Item)
		if !ok {
			return nil, fmt.Errorf("%T is no item", m)
		}
		name, ok := it.Value.(string)
		if !ok {
			return nil, fmt.Errorf("%v is no string but a %T", it.Value, it.Value)
		}
		if slices.ContainsFunc(members, func(m Member) bool { return m.Name == name }) {
			return nil, fmt.Errorf("two members are called %q", name)
		}
		parsed := Member{Name: name, Names: strings.Join(it.Params.Names(), " "), Parameters: make(map[string]int64)}
		for _, n := range it.Params.Names() {
			v, _ := it.Params.Get(n)
			integer, ok := v.(int64)
			if !ok {
				return nil, fmt.Errorf("%s=%v is no integer but a %T", n, v, v)
			}
			parsed.Parameters[n] = integer
		}
		members = append(members, parsed)
	}
	return members, nil
}
