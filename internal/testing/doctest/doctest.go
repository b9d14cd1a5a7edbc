// Package doctest reads the blocks of code and the headings of documents, for tests.
package doctest

import (
	"bytes"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
)

// Block is a block of code in a document.
type Block struct {
	Place    string // file:line of the first line of code
	Language string // empty if the document names none
	Code     string // without the block's indentation
}

// Fenced matches a block of code: its indentation, its language, and the code.
var Fenced = regexp.MustCompile("(?ms)^( *)```([a-z]*)\n(.*?)^ *```$")

// Blocks returns the blocks of code in a document.
func Blocks(t *testing.T, path string) []Block {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	fenced := Fenced.FindAllSubmatchIndex(text, -1)
	blocks := make([]Block, 0, len(fenced))
	for _, i := range fenced {
		indent := string(text[i[2]:i[3]])
		blocks = append(blocks, Block{
			Place:    fmt.Sprintf("%s:%d", path, 1+bytes.Count(text[:i[6]], []byte("\n"))),
			Language: string(text[i[4]:i[5]]),
			Code:     strings.ReplaceAll("\n"+string(text[i[6]:i[7]]), "\n"+indent, "\n")[1:],
		})
	}
	if fences := bytes.Count(text, []byte("```")); fences != 2*len(blocks) {
		t.Errorf("%s: found %d blocks of code between %d fences", path, len(blocks), fences)
	}
	return blocks
}

// Anchors returns the names by which links refer to the headings of a document.
func Anchors(t *testing.T, path string) []string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	dropped := regexp.MustCompile(`[^a-z0-9 _-]`)
	var names []string
	for line := range strings.Lines(string(text)) {
		if marks, title, ok := strings.Cut(strings.TrimSpace(line), " "); ok && strings.Trim(marks, "#") == "" {
			names = append(names, strings.ReplaceAll(dropped.ReplaceAllString(strings.ToLower(title), ""), " ", "-"))
		}
	}
	return names
}
