package limiter

import (
	"io/fs"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestScriptIsComposed guards that the script which servers get has all parts of all Lua files,
// and nothing of how they are put together.
func TestScriptIsComposed(t *testing.T) {
	files, err := fs.Glob(luaFiles, "*.lua")
	if err != nil {
		t.Fatal(err)
	}
	parts, named := []string{"core.lua"}, []string{"core.lua"}
	for _, file := range files {
		text, err := luaFiles.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		headings := heading.FindAllStringSubmatch(string(text), -1)
		for _, m := range headings {
			parts = append(parts, file+": "+m[1])
		}
		if len(headings) == 0 && file != "core.lua" {
			parts = append(parts, file)
		}
		for _, m := range insertion.FindAllString(string(text), -1) {
			named = append(named, strings.TrimPrefix(strings.TrimSpace(m), "--@ "))
		}
	}
	for _, part := range parts {
		if !slices.Contains(named, part) {
			t.Errorf("%s is inserted nowhere", part)
		}
	}
	if len(parts) < len(files) {
		t.Errorf("%d parts of %d files, so the test proves nothing", len(parts), len(files))
	}
	if left := regexp.MustCompile(`(?m)^ *--[@#].*|\brow\.\w+|\brows\[\w+\]\.\w+`).FindAllString(takeSource, -1); len(left) > 0 {
		t.Errorf("left in the script: %q", left)
	}
}

// TestRowsAreLists guards that a field of a row which is written as a name is its place in the
// list.
func TestRowsAreLists(t *testing.T) {
	const source = `
if several then
  rows[i] = {
    size = size, told = now + told,
    fits = false
  }
end
local row = rows[i]
row.fits, size = room >= 0, row.size
rows[j].fits, narrow.fits = false, true`
	const want = `
if several then
  rows[i] = {
    size, now + told,
    false
  }
end
local row = rows[i]
row[3], size = room >= 0, row[1]
rows[j][3], narrow.fits = false, true`
	if got := listed(source); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	defer func() {
		if recover() == nil {
			t.Error("a field that no row has is no error")
		}
	}()
	listed(source + "\nrow.fitz = true")
}

// TestRowsKeepWhatTheyName guards the long lists in row.lua: a field is made of the variable of
// its name, or of nothing yet, and becomes that again.
func TestRowsKeepWhatTheyName(t *testing.T) {
	file, err := luaFiles.ReadFile("row.lua")
	if err != nil {
		t.Fatal(err)
	}
	text := string(file)
	for _, m := range regexp.MustCompile(`(\w+) = ([^,\n]+)`).FindAllStringSubmatch(rowMade.FindString(text), -1) {
		if m[2] != m[1] && m[2] != "0" && m[2] != "false" {
			t.Errorf("%s is made of %s", m[1], m[2])
		}
	}
	lists := regexp.MustCompile(`(?s)local row = rows\[i\]\n(.+?) =(\s.+?)\nend`).FindAllStringSubmatch(text, -1)
	for _, m := range lists {
		to, from := strings.Fields(strings.ReplaceAll(m[1], "row.", "")), strings.Fields(strings.ReplaceAll(m[2], "row.", ""))
		if !slices.Equal(to, from) {
			t.Errorf("%v become %v", from, to)
		}
	}
	if len(lists) != 3 {
		t.Errorf("%d lists, so the test has to change", len(lists))
	}
}
