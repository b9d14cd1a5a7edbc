// Package terminal is what commands print: tables, and texts that are safe to show.
package terminal

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"

	"golang.org/x/term"
)

// Output is what a command prints to. It keeps the first error.
type Output struct {
	io.Writer
	Err error
}

// Write implements io.Writer.
func (o *Output) Write(text []byte) (int, error) {
	n, err := o.Writer.Write(text)
	o.Err = cmp.Or(o.Err, err)
	return n, err
}

// Is reports whether f is a terminal.
func Is(f any) bool {
	if o, ok := f.(*Output); ok {
		f = o.Writer
	}
	file, ok := f.(*os.File)
	return ok && term.IsTerminal(int(file.Fd())) //nolint:gosec // as x/term wants it
}

// Coloured reports whether to print colours to w.
func Coloured(w io.Writer) bool { return Is(w) && os.Getenv("NO_COLOR") == "" }

// Table is what commands print, with a title over each column.
type Table struct {
	rows   [][]string
	alerts map[int]bool // rows that tell of something wrong
}

// NewTable returns a table with the titles of its columns.
func NewTable(titles ...string) *Table {
	return &Table{rows: [][]string{titles}, alerts: make(map[int]bool)}
}

// Add adds a row.
func (t *Table) Add(alert bool, cells ...any) {
	row := make([]string, len(cells))
	for i, c := range cells {
		row[i] = fmt.Sprint(c)
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

// Lines returns the lines of the table, Coloured if wanted.
func (t *Table) Lines(colours bool) []string {
	var text strings.Builder
	w := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	for _, row := range t.rows {
		fmt.Fprintln(w, strings.Join(row, "\t"))
	}
	_ = w.Flush() // to memory
	lines := strings.Split(strings.TrimSuffix(text.String(), "\n"), "\n")
	for i, line := range lines {
		line = strings.TrimRight(line, " ")
		switch {
		case colours && i == 0:
			line = "\x1b[1m" + line + "\x1b[0m"
		case colours && t.alerts[i]:
			line = "\x1b[31m" + line + "\x1b[0m"
		}
		lines[i] = line
	}
	return lines
}

// Print prints the table, in colours if w is a terminal.
func (t *Table) Print(w io.Writer) {
	fmt.Fprintln(w, strings.Join(t.Lines(Coloured(w)), "\n"))
}
