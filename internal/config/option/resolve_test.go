package option

import "testing"

// Guards what counts as a placeholder: what Caddy would replace, and nothing
// that is escaped or unclosed.
func TestHasPlaceholder(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]bool{
		"": false, "5": false, "{": false, "}": false, "}{": false, "{a": false, "a}": false, `\{a}`: false,
		`\{a\}`: false, `{a\}`: true, "{}": true, "{a}": true, "5{a}": true, "{{a}": true, "{a}{": true,
		`\{{a}`: true, "}{a}": true,
	} {
		if got := HasPlaceholder(text); got != want {
			t.Errorf("%q holds a placeholder = %t, want %t", text, got, want)
		}
	}
}
