package terminal

import (
	"encoding/json"
	"testing"
)

// TestSafe guards that texts which clients choose are escaped: they could drive the
// operator's terminal.
func TestSafe(t *testing.T) {
	for text, want := range map[string]string{
		"plain":           "plain",
		"Zoë":             "Zoë",
		"\x1b[2J":         `"\x1b[2J"`,
		"a\nb":            `"a\nb"`,
		"\u202eabc":       `"\u202eabc"`,
		"\u009b31m":       `"\u009b31m"`,
		"\xff":            `"\xff"`,
		"":                `""`,
		"tab\there":       `"tab\there"`,
		"\U000e0001":      `"\U000e0001"`,
		"with \"quotes\"": `with "quotes"`,
	} {
		if got := Safe(text); got != want {
			t.Errorf("Safe(%q): got %s, want %s", text, got, want)
		}
	}
	for _, text := range []string{"\x1b[2J", "\u202eabc", "\u009b", "\U000e0001", "ok"} {
		raw, err := json.Marshal(text)
		if err != nil {
			t.Fatal(err)
		}
		escaped := SafeJSON(string(raw))
		var again string
		if err := json.Unmarshal([]byte(escaped), &again); err != nil || again != text || Safe(escaped) != escaped {
			t.Errorf("SafeJSON(%s): got %s, which is %q, %v", raw, escaped, again, err)
		}
	}
}
