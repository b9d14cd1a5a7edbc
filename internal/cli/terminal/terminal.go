// Package terminal is what commands print: tables, lines, and texts that are safe to show.
package terminal

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"strconv"

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
	file := fileOf(f)
	return file != nil && term.IsTerminal(int(file.Fd()))
}

// fileOf returns the file that f is or prints to, or nil.
func fileOf(f any) *os.File {
	if o, ok := f.(*Output); ok {
		f = o.Writer
	}
	file, _ := f.(*os.File)
	return file
}

// Width returns how many characters fit into a line of w: what the environment variable
// COLUMNS says, or else the terminal. Without either it is 0, and lines may have any length.
func Width(w io.Writer) int {
	if n, err := strconv.Atoi(os.Getenv("COLUMNS")); err == nil && n > 0 {
		return n
	}
	if !Is(w) {
		return 0
	}
	n, _, _ := term.GetSize(int(fileOf(w).Fd()))
	return n
}

// Printf prints a line, broken between words where it does not fit.
func Printf(w io.Writer, format string, args ...any) {
	fmt.Fprintln(w, Wrapped(fmt.Sprintf(format, args...), Width(w), 2))
}

// Coloured reports whether to print colours to w.
func Coloured(w io.Writer) bool { return Is(w) && os.Getenv("NO_COLOR") == "" }
