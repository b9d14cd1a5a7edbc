package limiter

import (
	"embed"
	"fmt"
	"regexp"
	"strings"
)

//go:embed *.lua
var luaFiles embed.FS

var (
	// takeSource is the source of the script that decides requests on the servers.
	takeSource = compose("core.lua")
	takeScript = newScript(takeSource)
)

var (
	insertion = regexp.MustCompile(`(?m)^ *--@ (\w+\.lua)(?:: (.+))?$`)
	heading   = regexp.MustCompile(`(?m)^--# (.+)\n`)
	rowMade   = regexp.MustCompile(`(?s)rows\[i\] = \{(.*?)\}`)
	rowField  = regexp.MustCompile(`(\w+) = `)
	rowUse    = regexp.MustCompile(`\b(row|rows\[\w+\])\.(\w+)`)
)

// compose returns a script, of which a Lua file is the beginning: with all that this inserts,
// and with rows as lists.
func compose(name string) string { return listed(inserted(name, "")) }

// inserted returns a Lua file, or a part of one, with all that it inserts. It is there as
// text, and not as a function, since one that uses what is around it costs time in each call.
func inserted(name, part string) string {
	file, err := luaFiles.ReadFile(name)
	if err != nil {
		panic(err)
	}
	text := string(file)
	if part != "" {
		text = partOf(text, part)
	}
	return insertion.ReplaceAllStringFunc(text, func(line string) string {
		m := insertion.FindStringSubmatch(line)
		return strings.TrimRight(inserted(m[1], m[2]), "\n")
	})
}

// partOf returns what is below a heading in a text, up to the next heading.
func partOf(text, part string) string {
	for _, at := range heading.FindAllStringSubmatchIndex(text, -1) {
		if text[at[2]:at[3]] != part {
			continue
		}
		text = text[at[1]:]
		if next := heading.FindStringIndex(text); next != nil {
			text = text[:next[0]]
		}
		return text
	}
	panic(fmt.Sprintf("no part %q", part))
}

// listed returns a script in which rows, which are written as tables with named fields, are
// lists in the order in which row.lua makes them: a name costs time wherever it is used.
func listed(source string) string {
	locations := map[string]int{}
	source = rowMade.ReplaceAllStringFunc(source, func(row string) string {
		begin := strings.Index(row, "{")
		return row[:begin] + rowField.ReplaceAllStringFunc(row[begin:], func(field string) string {
			locations[strings.TrimSuffix(field, " = ")] = len(locations) + 1
			return ""
		})
	})
	return rowUse.ReplaceAllStringFunc(source, func(use string) string {
		m := rowUse.FindStringSubmatch(use)
		location, ok := locations[m[2]]
		if !ok {
			panic(fmt.Sprintf("a row has no %s", m[2]))
		}
		return fmt.Sprintf("%s[%d]", m[1], location)
	})
}
