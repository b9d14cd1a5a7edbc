package rule

import (
	"os"
	"strings"
	"testing"
)

// TestDocumentedPlaces guards that docs/directive.md has what is said of the places of limits,
// word for word, and nothing else.
func TestDocumentedPlaces(t *testing.T) {
	t.Parallel()
	doc, err := os.ReadFile("../../docs/directive.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(doc), "| Place | What is said | Remedy |\n|---|---|---|\n")
	table, _, _ = strings.Cut(table, "\n\n")
	rows := strings.Split(table, "\n")
	want := append(obstacles[:], behindAuthentication)
	if len(rows) != len(want) {
		t.Fatalf("got %d rows, want %d", len(rows), len(want))
	}
	for i, row := range rows {
		if said := "| " + want[i].problem + " | " + want[i].remedy + " |"; !strings.HasSuffix(row, said) {
			t.Errorf("got %q, want the end %q", row, said)
		}
	}
}
