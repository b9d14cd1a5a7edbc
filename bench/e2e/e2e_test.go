package main

import (
	"bytes"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// TestRun measures for as short as wrk can, to see that all variants are served
// as they should be and that the table has a line for each. It may be skipped
// for want of a program, but not in CI, where that would count as passed.
func TestRun(t *testing.T) {
	for _, program := range []string{"redis-server", "wrk"} {
		if _, err := exec.LookPath(program); err != nil {
			if os.Getenv("CI") != "" {
				t.Fatal(err)
			}
			t.Skip(err)
		}
	}
	var out bytes.Buffer
	o := options{duration: time.Second, rounds: 1, connections: 2, threads: 1}
	if err := run(t.Context(), o, &out, t.Output()); err != nil {
		t.Fatal(err)
	}
	for _, v := range variants {
		if strings.Count(out.String(), "\n| "+v.name+" ") != 1 {
			t.Errorf("no line on %q in\n%s", v.name, out.String())
		}
	}
}
