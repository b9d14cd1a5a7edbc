package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// benchmark is a part of a document with results of micro-benchmarks.
type benchmark struct {
	mark    string // of the document, as in documents.set
	pattern string // as go test -bench has it
}

var benchmarks = []benchmark{
	{"process", `^BenchmarkProcess$`},
	{"heap", `^BenchmarkProcessHeap$`},
	{"memory", `^BenchmarkMemory$`},
	{"handler", `^BenchmarkHandler$`},
	{"client", `^BenchmarkClient$`},
	{"server", `^BenchmarkServer$`},
	{"server-memory", `^BenchmarkServerMemory$`},
}

// run runs the benchmarks and returns a table of what they report.
func (b benchmark) run(ctx context.Context, benchtime string, count int, progress io.Writer) (string, error) {
	fmt.Fprintf(progress, "micro-benchmarks: %s\n", b.mark)
	cmd := exec.CommandContext(ctx, "go", "test", "-run", "^$", "-bench", b.pattern, //nolint:gosec // all arguments are ours
		"-benchtime", benchtime, "-count", strconv.Itoa(count), "-timeout", "1h", module)
	output, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%s: %w\n%s", strings.Join(cmd.Args, " "), err, output)
	}
	table, ok := reported(output)
	if !ok {
		return "", fmt.Errorf("%s: no results\n%s", strings.Join(cmd.Args, " "), output)
	}
	return table, nil
}

// resultLine matches a benchmark result of go test: the name with the number of
// CPUs appended, the number of runs, and a list of numbers with units.
var resultLine = regexp.MustCompile(`(?m)^Benchmark(\S+?)(?:-\d+)?\s+\d+\s+(\S.*)$`)

// reported returns a table with a line for each benchmark and a column for each
// unit that any of them has, with the median and the spread of all its runs. It
// reports whether there was any.
func reported(output []byte) (table string, ok bool) {
	var names, units []string
	figures := make(map[[2]string][]float64) // by name and unit
	for _, match := range resultLine.FindAllSubmatch(output, -1) {
		name, fields := string(match[1]), bytes.Fields(match[2])
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
		for pair := range slices.Chunk(fields, 2) {
			x, err := strconv.ParseFloat(string(pair[0]), 64)
			if err != nil || len(pair) < 2 {
				break
			}
			unit := string(pair[1])
			if !slices.Contains(units, unit) {
				units = append(units, unit)
			}
			key := [2]string{name, unit}
			figures[key] = append(figures[key], x)
		}
	}
	rows := make([][]string, len(names))
	for i, name := range names {
		rows[i] = []string{name}
		for _, unit := range units {
			cell := ""
			if f := figures[[2]string{name, unit}]; len(f) > 0 {
				cell = spread(f)
			}
			rows[i] = append(rows[i], cell)
		}
	}
	return markdown(append([]string{"benchmark"}, units...), rows), len(names) > 0
}
