package terminal

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/dustin/go-humanize"
)

// Table is what commands print, with a title over each column.
type Table struct {
	rows    [][]string
	numbers map[string]bool // the titles of columns that have numbers
	alerts  map[int]bool    // rows that show something wrong
}

// Number is a cell with a number that is already formatted.
type Number string

// Count returns a number as a cell, with commas.
func Count(n int64) Number { return Number(humanize.Comma(n)) }

// NewTable returns a table with the titles of its columns.
func NewTable(titles ...string) *Table {
	return &Table{rows: [][]string{titles}, numbers: make(map[string]bool), alerts: make(map[int]bool)}
}

// Add adds a row. A column is aligned on its right if any of its cells is a Number, or of a
// type of numbers.
func (t *Table) Add(alert bool, cells ...any) {
	row := make([]string, len(cells))
	for i, c := range cells {
		row[i] = fmt.Sprint(c)
		switch c.(type) {
		case Number, int, int64, uint64:
			t.numbers[t.rows[0][i]] = true
		}
	}
	t.alerts[len(t.rows)] = alert
	t.rows = append(t.rows, row)
}

// DropEmpty removes the columns in which no row has anything.
func (t *Table) DropEmpty() {
	for column := len(t.rows[0]) - 1; column >= 0 && len(t.rows) > 1; column-- {
		if slices.ContainsFunc(t.rows[1:], func(row []string) bool { return row[column] != "" }) {
			continue
		}
		for i := range t.rows {
			t.rows[i] = slices.Delete(t.rows[i], column, column+1)
		}
	}
}

// Print prints the table, in colours if w is a terminal. If it does not fit into the lines of
// w, each row is a block, with a line for each cell.
func (t *Table) Print(w io.Writer) {
	lines, most := t.Lines(false), Width(w)
	if most > 0 && slices.ContainsFunc(lines, func(line string) bool { return utf8.RuneCountInString(line) > most }) {
		t.printBlocks(w, most)
		return
	}
	fmt.Fprintln(w, strings.Join(t.Lines(Coloured(w)), "\n"))
}

// Lines returns the lines of the table, in colours if wanted.
func (t *Table) Lines(colours bool) []string {
	widths := make([]int, len(t.rows[0]))
	for _, row := range t.rows {
		for i, cell := range row {
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}
	lines := make([]string, len(t.rows))
	for i, row := range t.rows {
		var line strings.Builder
		for j, cell := range row {
			space := strings.Repeat(" ", widths[j]-utf8.RuneCountInString(cell))
			if t.numbers[t.rows[0][j]] {
				cell = space + cell
			} else {
				cell += space
			}
			if j > 0 {
				line.WriteString("  ")
			}
			line.WriteString(cell)
		}
		lines[i] = t.coloured(i, strings.TrimRight(line.String(), " "), colours)
	}
	return lines
}

// printBlocks prints a block for each row.
func (t *Table) printBlocks(w io.Writer, most int) {
	width := 0
	for _, title := range t.rows[0] {
		width = max(width, utf8.RuneCountInString(title))
	}
	for i, row := range t.rows[1:] {
		if i > 0 {
			fmt.Fprintln(w)
		}
		for j, cell := range row {
			if cell == "" {
				continue
			}
			line := Wrapped(fmt.Sprintf("%-*s  %s", width, t.rows[0][j], cell), most, width+2)
			fmt.Fprintln(w, t.coloured(i+1, line, Coloured(w)))
		}
	}
}

// coloured returns a line of a row, in colours if wanted.
func (t *Table) coloured(row int, line string, wanted bool) string {
	switch {
	case wanted && row == 0:
		return "\x1b[1m" + line + "\x1b[0m"
	case wanted && t.alerts[row]:
		return "\x1b[31m" + line + "\x1b[0m"
	}
	return line
}
