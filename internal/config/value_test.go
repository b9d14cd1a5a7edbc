package config

import (
	"encoding/json"
	"testing"

	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/testseed"
)

// Guards what a Number is in JSON: a number if it can be written as one, else
// a string, and either is read.
func TestNumberJSON(t *testing.T) {
	t.Parallel()
	tests := []struct{ text, want string }{
		{"5", `5`},
		{"0", `0`},
		{"-5", `-5`},
		{"0.5", `0.5`},
		{"562949953421312", `562949953421312`},
		{"{http.vars.size}", `"{http.vars.size}"`},
		{"1{http.vars.size}", `"1{http.vars.size}"`},
		{"007", `"007"`},
		{"+5", `"+5"`},
		{".5", `".5"`},
		{"NaN", `"NaN"`},
		{"true", `"true"`},
		{"null", `"null"`},
		{"[5]", `"[5]"`},
		{" 5", `" 5"`},
		{"5 ", `"5 "`},
		{"-", `"-"`},
		{"5\n", `"5\n"`},
	}
	for _, tc := range tests {
		t.Run(tc.text, func(t *testing.T) {
			got, err := json.Marshal(Number(tc.text))
			if err != nil || string(got) != tc.want {
				t.Errorf("written as %s, %v, want %s", got, err, tc.want)
			}
			var again Number
			if err := json.Unmarshal([]byte(tc.want), &again); err != nil || string(again) != tc.text {
				t.Errorf("read as %q, %v, want %q", again, err, tc.text)
			}
		})
	}
}

// Guards that a number may be written as a string in JSON, and that null is
// none.
func TestNumberFromJSON(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]Number{
		`5`: "5", `"5"`: "5", `0.50`: "0.50", `""`: "", `null`: "", `"{a}"`: "{a}",
	} {
		got := Number("before")
		if err := json.Unmarshal([]byte(in), &got); err != nil || got != want {
			t.Errorf("%s is read as %q, %v, want %q", in, got, err, want)
		}
	}
}

// Guards that no text changes on its way from a Caddyfile through JSON, also
// where Caddy decodes and encodes it in between, as it does with handlers. What
// is refused then is shown as it was written.
func TestNumberKeepsText(t *testing.T) {
	t.Parallel()
	testseed.Check(t, 1, func(t *rapid.T) {
		text := rapid.OneOf(
			rapid.StringMatching(`-?[0-9]{1,25}(\.[0-9]{0,25})?([eE][+-]?[0-9]{1,3})?[ \n]?`),
			rapid.StringMatching(`[-+0-9.eE{}xX_ ]{1,8}`),
			rapid.String(),
		).Draw(t, "text")
		written, err := json.Marshal(Number(text))
		if err != nil {
			t.Fatal(err)
		}
		var between any
		if err := json.Unmarshal(written, &between); err != nil {
			t.Fatalf("%q is written as %s: %v", text, written, err)
		}
		if written, err = json.Marshal(between); err != nil {
			t.Fatal(err)
		}
		var again Number
		if err := json.Unmarshal(written, &again); err != nil || string(again) != text {
			t.Fatalf("%q has become %q, %v", text, again, err)
		}
	})
}

// Guards what a Duration is in JSON: a string as it is written, or read from a
// number of nanoseconds, as Caddy's own durations can be.
func TestDurationJSON(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"1s", "500ms", "1d", "5", "", "{http.vars.rate}", "1 s", "\"", "\n"} {
		written, err := json.Marshal(Duration(text))
		if err != nil {
			t.Fatal(err)
		}
		var again Duration
		if err := json.Unmarshal(written, &again); err != nil || string(again) != text || written[0] != '"' {
			t.Errorf("%q is written as %s and read as %q, %v", text, written, again, err)
		}
	}
	for in, want := range map[string]Duration{
		`1500`: "1500ns", `0`: "0ns", `-5`: "-5ns", `1.5`: "1.5ns", `null`: "",
	} {
		got := Duration("before")
		if err := json.Unmarshal([]byte(in), &got); err != nil || got != want {
			t.Errorf("%s is read as %q, %v, want %q", in, got, err, want)
		}
	}
}

// TestListLeavesItsText guards that the JSON of a list is the same once it is decoded: it may be
// part of a config that is encoded again.
func TestListLeavesItsText(t *testing.T) {
	t.Parallel()
	for _, text := range []string{`["a","b"]`, `"a"`, `[]`, `[1, 2]`} {
		b := []byte(text)
		if err := new(List).UnmarshalJSON(b); err != nil || string(b) != text {
			t.Errorf("%s: got %s, %v", text, b, err)
		}
	}
}
