package terminal

import (
	"bytes"
	"strings"
	"testing"
	"unicode/utf8"
)

// TestTable guards that numbers are aligned by their digits, also next to cells
// that are none, and that a table which is wider than a line becomes blocks.
func TestTable(t *testing.T) {
	table := NewTable("LIMIT", "SIZE", "ADMITTED", "UNUSED", "KEY")
	table.Add(false, "api", Number("5"), uint64(12), "", "{client_ip}")
	table.Add(true, "zoë", Number("varies"), Count(123456789), "", strings.Repeat("{http.request.header.X-Key} and ", 3)+"more")
	table.DropEmpty()
	const wide = "" +
		"LIMIT    SIZE     ADMITTED  KEY\n" +
		"api         5           12  {client_ip}\n" +
		"zoë    varies  123,456,789  {http.request.header.X-Key} and {http.request.header.X-Key} and {http.request.header.X-Key} and more\n"
	const narrow = "" +
		"LIMIT     api\n" +
		"SIZE      5\n" +
		"ADMITTED  12\n" +
		"KEY       {client_ip}\n" +
		"\n" +
		"LIMIT     zoë\n" +
		"SIZE      varies\n" +
		"ADMITTED  123,456,789\n" +
		"KEY       {http.request.header.X-Key}\n" +
		"          and\n" +
		"          {http.request.header.X-Key}\n" +
		"          and\n" +
		"          {http.request.header.X-Key}\n" +
		"          and more\n"
	for _, tc := range []struct{ columns, want string }{
		{"", wide}, {"0", wide}, {"-1", wide}, {"wide", wide}, {"200", wide}, {"128", wide}, {"127", ""}, {"38", narrow}, {"37", narrow},
	} {
		t.Setenv("COLUMNS", tc.columns)
		var out bytes.Buffer
		table.Print(&out)
		if got := out.String(); tc.want != "" && got != tc.want || tc.want == "" && !strings.HasPrefix(got, "LIMIT     api\n") {
			t.Errorf("COLUMNS=%q: got\n%s\nwant\n%s", tc.columns, got, tc.want)
		}
	}
}

// TestWrapped guards that lines are broken between words, that no word is lost or broken,
// and that a text without spaces ends.
func TestWrapped(t *testing.T) {
	for _, tc := range []struct {
		text         string
		most, indent int
		want         string
	}{
		{"", 10, 2, ""},
		{"one two three", 0, 2, "one two three"},
		{"one two three", 13, 2, "one two three"},
		{"one two three", 12, 2, "one two\n  three"},
		{"one two three", 3, 2, "one\n  two\n  three"},
		{"one two three", 1, 2, "one\n  two\n  three"},
		{"unbreakable", 3, 2, "unbreakable"},
		{"a unbreakable b", 4, 0, "a\nunbreakable\nb"},
		{"KEY     unbreakable b", 9, 8, "KEY     unbreakable\n        b"},
		{"zoë zoë", 3, 0, "zoë\nzoë"},
	} {
		got := Wrapped(tc.text, tc.most, tc.indent)
		if got != tc.want {
			t.Errorf("%q in %d: got %q, want %q", tc.text, tc.most, got, tc.want)
		}
		if words := strings.Fields(got); strings.Join(words, " ") != strings.Join(strings.Fields(tc.text), " ") || !utf8.ValidString(got) {
			t.Errorf("%q in %d: got %q, with other words", tc.text, tc.most, got)
		}
	}
}
