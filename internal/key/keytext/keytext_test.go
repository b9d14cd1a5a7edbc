package keytext

import (
	"encoding/json"
	"errors"
	"testing"
	"unicode/utf8"
)

// TestOf guards the text of keys, and that most keys are their own.
func TestOf(t *testing.T) {
	for key, want := range map[string]string{
		"":                  "",
		"203.0.113.7":       "203.0.113.7",
		"Zoë, \"a\" \\ %ff": "Zoë, \"a\" \\ %ff",
		"a\nb":              "a\nb",
		"\xff":              `"\xff"`,
		"é\xc3":             `"é\xc3"`,
		"\ufffd":            `"\ufffd"`,
		`\` + "\ufffd\xff":  `"\\\ufffd\xff"`,
		`"\xff"`:            `"\"\\xff\""`,
		`"`:                 `"\""`,
		"\xed\xa0\x80":      `"\xed\xa0\x80"`, // half a surrogate pair
	} {
		if got := Of(key); got != want {
			t.Errorf("%q: got %s, want %s", key, got, want)
		}
	}
}

// TestParse guards what is accepted beside the text of a key, and what is not: a text that
// may mean several keys.
func TestParse(t *testing.T) {
	for text, want := range map[string]struct {
		key string
		err error
	}{
		"a":            {"a", nil},
		`"a"`:          {"a", nil},
		`"\u00e9\377"`: {"é\xff", nil},
		"`a`":          {"`a`", nil},
		"'a'":          {"'a'", nil},
		"\xff":         {"\xff", nil},
		"\"\xff\"":     {"\"\xff\"", nil},
		"a\ufffd":      {"", ErrReplaced},
		"\"\ufffd\"":   {"", ErrReplaced},
		`"`:            {"", ErrQuotes},
		`"a`:           {"", ErrQuotes},
		`"a"b`:         {"", ErrQuotes},
		`"\ud800"`:     {"", ErrQuotes},
		"\"a\nb\"":     {"", ErrQuotes},
	} {
		if key, err := Parse(text); key != want.key || !errors.Is(err, want.err) {
			t.Errorf("%q: got %q, %v, want %q, %v", text, key, err, want.key, want.err)
		}
	}
}

// TestCut guards that a key which is UTF-8 still is when it has been cut, and that nothing
// is too long.
func TestCut(t *testing.T) {
	for _, tc := range []struct {
		key  string
		n    int
		want string
	}{
		{"", 0, ""}, {"a", 0, ""}, {"ab", 1, "a"}, {"ab", 2, "ab"}, {"é", 1, ""}, {"aé", 2, "a"}, {"aéb", 3, "aé"},
		{"\U0001f600b", 3, ""}, {"\U0001f600b", 4, "\U0001f600"}, {"\x80\x80\x80\x80\x80\x80", 5, "\x80\x80\x80\x80\x80"},
	} {
		if got := Cut(tc.key, tc.n); got != tc.want {
			t.Errorf("%q, %d: got %q, want %q", tc.key, tc.n, got, tc.want)
		}
	}
}

// FuzzRoundTrip guards that each key has a text, from which it comes back, also through
// JSON: two keys never have the same.
func FuzzRoundTrip(f *testing.F) {
	for _, key := range []string{"", "a", "\xff", "\ufffd", `"\xff"`, "\xc3\xa9\xc3", "\\\xff,\"", "\x00\x1b\u202e", "\xf4\x90\x80\x80"} {
		f.Add(key)
	}
	f.Fuzz(func(t *testing.T, key string) {
		raw, err := json.Marshal(Of(key))
		if err != nil {
			t.Fatal(err)
		}
		var text string
		if err := json.Unmarshal(raw, &text); err != nil || !utf8.ValidString(text) {
			t.Fatalf("%q: got %q, %v", key, text, err)
		}
		if got, err := Parse(text); got != key || err != nil {
			t.Errorf("%q: its text is %s, which means %q, %v", key, text, got, err)
		}
		if got, err := Parse(Quote(key)); got != key || err != nil {
			t.Errorf("%q: quoted it is %s, which means %q, %v", key, Quote(key), got, err)
		}
	})
}

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
}
