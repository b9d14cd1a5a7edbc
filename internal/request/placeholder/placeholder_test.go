package placeholder

import "testing"

// TestBracesBalance guards which braces of a text are taken: the braces of placeholders,
// and those that are escaped, with the ones that close them.
func TestBracesBalance(t *testing.T) {
	for text, want := range map[string]bool{
		"":              true,
		"a":             true,
		"{a}":           true,
		"a{b}c{d}":      true,
		`\{a\}`:         true,
		`\{a}`:          true,
		`\{"a": "{b}"}`: true,
		`{a\}}`:         true,
		"{":             false,
		"}":             false,
		"{a":            false,
		"a}":            false,
		"{a{b}}":        false,
		`\{a}}`:         false,
	} {
		if got := BracesBalance(text); got != want {
			t.Errorf("%s: got %t, want %t", text, got, want)
		}
	}
}
