package accesslog

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/filetest"
)

// quoted returns text as Docker writes it in JSON.
func quoted(text string) string {
	b, _ := json.Marshal(text)
	return string(b)
}

// inDocker is a line as Docker's json-file driver writes it.
func inDocker(text, stream string) string {
	return `{"log":` + quoted(text) + `,"stream":"` + stream + `","time":"2023-11-14T22:13:20.123456789Z"}` + "\n"
}

// inCRI is a line as the runtimes of Kubernetes write it.
func inCRI(text, stream, tag string) string {
	return "2023-11-14T22:13:20.123456789Z " + stream + " " + tag + " " + text + "\n"
}

// TestWrapped guards that lines are taken out of what collectors of logs put around
// them, also those that these have split, that this is said, and that other lines
// around them do no harm.
func TestWrapped(t *testing.T) {
	line := strings.Replace(caddyLog, "caf%C3%A9", "a&b=<ä>", 1)
	half := len(line) / 2
	space := strings.Index(line, "(X11; ") + 6 // a space that is at the end of a part
	const started = `{"level":"info","ts":1700000000.1,"msg":"serving initial configuration"}`
	bytesOf := func(text string) string {
		numbers := make([]int, len(text))
		for i := range len(text) {
			numbers[i] = int(text[i])
		}
		b, _ := json.Marshal(numbers)
		return string(b)
	}
	const (
		docker     = "the JSON of Docker's log files"
		journal    = "the JSON of journald"
		kubernetes = "the log format of Kubernetes"
		prefix     = "lines with a prefix"
	)
	for _, tc := range []struct {
		name, text string
		wrapper    string
		used       int
		skipped    map[Reason]int64
	}{
		{"plain", line + "\n", "", 1, nil},
		{"Docker", inDocker(started+"\n", "stderr") + inDocker(line+"\n", "stdout"), docker, 1, map[Reason]int64{NotAccess: 1}},
		{"Docker with labels", `{"log":` + quoted(line+"\n") + `,"stream":"stdout","attrs":{"a":"b"},"time":"t"}`, docker, 1, nil},
		{
			"Docker, split over two streams",
			inDocker(line[:half], "stdout") + inDocker("panic\n", "stderr") + inDocker(line[half:]+"\n", "stdout"), docker, 1, map[Reason]int64{BadJSON: 1},
		},
		{"Docker, split without an end", inDocker(line+"\n", "stdout") + inDocker(line[:half], "stdout"), docker, 1, map[Reason]int64{BadJSON: 1}},
		{"Docker, a line that is cut off", inDocker(line+"\n", "stdout") + `{"log":"{`, docker, 1, map[Reason]int64{BadJSON: 1}},
		{"Docker with the combined format", inDocker(combinedLog+"\n", "stdout"), docker, 1, nil},
		{"Kubernetes", inCRI("starting", "stderr", "F") + inCRI(line, "stdout", "F"), kubernetes, 1, map[Reason]int64{BadJSON: 1}},
		{
			"Kubernetes, split over two streams",
			inCRI(line[:space], "stdout", "P") + inCRI("", "stderr", "F") + inCRI(line[space:space+9], "stdout", "P") + inCRI(line[space+9:], "stdout", "F"),
			kubernetes, 1, nil,
		},
		{"Kubernetes with more tags", inCRI(line, "stdout", "F:a:b"), kubernetes, 1, nil},
		{"Kubernetes with ends of lines as on Windows", strings.ReplaceAll(inCRI(line, "stdout", "F"), "\n", "\r\n"), kubernetes, 1, nil},
		{"Kubernetes with the common format", inCRI(commonLog, "stdout", "F"), kubernetes, 1, nil},
		{
			"journald", "-- Boot 1234 --\nNov 14 22:13:20 host systemd[1]: Started Caddy.\nNov 14 22:13:20 host caddy[123]: " + line + "\n",
			prefix, 1, map[Reason]int64{BadJSON: 2},
		},
		{"journald with years", "2023-11-14T22:13:20+0000 host caddy[123]: " + line + "\n", prefix, 1, nil},
		{"syslog", "<134>1 2023-11-14T22:13:20.123Z host caddy 123 - - " + line + "\n", prefix, 1, nil},
		{"Docker Compose", "caddy-1  | " + line + "\n", prefix, 1, nil},
		{"kubectl", "[pod/caddy-7d9/caddy] " + line + "\n", prefix, 1, nil},
		{
			"journald in JSON",
			`{"_HOSTNAME":"a","MESSAGE":"Started Caddy."}` + "\n" + `{"PRIORITY":"6","MESSAGE":` + quoted(line) + `,"_PID":"123"}` + "\n" + `{"MESSAGE":` + bytesOf(line) + "}\n",
			journal, 2, map[Reason]int64{BadJSON: 1},
		},
		{"journald without --all", `{"MESSAGE":null,"_PID":"123"}` + "\n" + `{"MESSAGE":` + quoted(line) + "}\n", journal, 1, map[Reason]int64{Withheld: 1}},
		{"combined with JSON behind it", combinedLog + ` {"a":1}` + "\n", "", 1, nil},
		{"for the console", "2023/11/14 22:13:20.123\tINFO\thttp.log.access\thandled request\t{\"request\": {}}\n", "", 0, map[Reason]int64{Console: 1}},
		{"a byte order mark", "\ufeff" + line + "\n" + line + "\n", "", 2, nil},
		{"a byte order mark before Docker's JSON", "\ufeff" + inDocker(line+"\n", "stdout"), docker, 1, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			l, all := readAll(t, Auto, tc.text)
			_, _, skipped := l.Counts()
			if len(all) != tc.used || !maps.Equal(skipped, tc.skipped) {
				t.Errorf("got %d requests, skipped %v, want %d and %v", len(all), skipped, tc.used, tc.skipped)
			}
			if notes := strings.Join(l.Notes(), " "); (notes != "") != (tc.wrapper != "") || !strings.Contains(notes, tc.wrapper) {
				t.Errorf("got notes %q, want %q", notes, tc.wrapper)
			}
			for _, e := range all {
				if strings.Contains(tc.text, "ä") && (e.URI != "/search?q=a&b=<ä>" || !strings.Contains(e.Header.Get("User-Agent"), "(X11; Linux")) {
					t.Errorf("got %s, %q", e.URI, e.Header)
				}
			}
		})
	}
}

// TestWrappedChunks guards that a line which is split at the end of a chunk of the log
// is put together, and that what never ends takes bounded memory.
func TestWrappedChunks(t *testing.T) {
	var lines, endless strings.Builder
	const n = 2000
	for i := range n {
		line := strings.TrimSuffix(at(fmt.Sprint(i), float64(i), 0), "\n")
		lines.WriteString(inCRI(line[:len(line)/2], "stdout", "P") + inCRI(line[len(line)/2:], "stdout", "F"))
	}
	if l, all := readAll(t, Auto, lines.String()); len(all) != n {
		_, _, skipped := l.Counts()
		t.Errorf("got %d requests, skipped %v, want %d", len(all), skipped, n)
	}
	endless.WriteString(inCRI(caddyLog, "stdout", "F"))
	for range 64 {
		endless.WriteString(inCRI(strings.Repeat("x", maxLine/16), "stdout", "P"))
	}
	endless.WriteString(inCRI("", "stdout", "F") + inCRI(caddyLog, "stdout", "F"))
	l, all := readAll(t, Auto, endless.String())
	if _, _, skipped := l.Counts(); len(all) != 2 || !maps.Equal(skipped, map[Reason]int64{TooLong: 1}) {
		t.Errorf("got %d requests, skipped %v, want two, and one line too long", len(all), skipped)
	}
	u := unwrapper{wrapper: criText}
	for range 64 {
		u.unwrap([]byte(inCRI(strings.Repeat("x", maxLine/4), "stdout", "P")), false)
	}
	if size := len(u.parts["stdout"]); size > 2*maxLine {
		t.Errorf("a line without end takes %d bytes", size)
	}
}

// TestCopies guards that a log which is given twice, as it is and compressed, or by two
// names, is read once, and that logs of several nodes are not taken for copies.
func TestCopies(t *testing.T) {
	compressed := func(text string) string {
		var b bytes.Buffer
		z := gzip.NewWriter(&b)
		io.WriteString(z, text)
		z.Close()
		return b.String()
	}
	one, two := at("a", 1.5, 0)+at("b", 2, 0), at("c", 1.5, 0)+at("d", 2, 0)
	for _, tc := range []struct {
		name   string
		files  map[string]string
		links  map[string]string
		names  []string
		used   int64
		leaves string // that is left out
	}{
		{"compressed", map[string]string{"a": one, "a.gz": compressed(one)}, nil, []string{"a.gz", "a"}, 2, "a.gz"},
		{"compressed by another name", map[string]string{"a.1": one, "a-1.gz": compressed(one)}, nil, []string{"a.1", "a-1.gz"}, 2, "a-1.gz"},
		{"half compressed", map[string]string{"a": one, "a.gz": compressed(at("a", 1.5, 0))}, nil, []string{"a", "a.gz"}, 2, "a.gz"},
		{"a shorter copy", map[string]string{"a": at("a", 1.5, 0), "b": one}, nil, []string{"a", "b"}, 2, "a"},
		{"the same name", map[string]string{"a": one}, nil, []string{"a", "a"}, 2, "a"},
		{"a link", map[string]string{"a": commonLog + "\n"}, map[string]string{"b": "a"}, []string{"a", "b"}, 1, "b"},
		{"whole seconds, compressed", map[string]string{"a": commonLog, "a.gz": compressed(commonLog)}, nil, []string{"a", "a.gz"}, 1, "a.gz"},
		{"several nodes", map[string]string{"a": one, "b": two}, nil, []string{"a", "b"}, 4, ""},
		{"several nodes with whole seconds", map[string]string{"a": commonLog, "b": commonLog}, nil, []string{"a", "b"}, 2, ""},
		{"empty", map[string]string{"a": "", "b": ""}, nil, []string{"a", "b"}, 0, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			dir := t.TempDir()
			for name, text := range tc.files {
				filetest.Write(t, filepath.Join(dir, name), []byte(text))
			}
			for name, to := range tc.links {
				if err := os.Symlink(to, filepath.Join(dir, name)); err != nil {
					t.Skip(err)
				}
			}
			names := make([]string, len(tc.names))
			for i, name := range tc.names {
				names[i] = filepath.Join(dir, name)
			}
			l, err := Open(names, Auto)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			for ; err == nil; _, err = l.Next() {
			}
			if _, used, _ := l.Counts(); used != tc.used {
				t.Errorf("used %d lines, want %d", used, tc.used)
			}
			notes := l.Notes()
			if tc.leaves == "" && len(notes) > 0 || tc.leaves != "" && (len(notes) != 1 || !strings.HasPrefix(notes[0], filepath.Join(dir, tc.leaves)+" was left out")) {
				t.Errorf("got notes %q, want %q to be left out", notes, tc.leaves)
			}
			if read, size := l.Progress(); read != size {
				t.Errorf("read %d of %d bytes", read, size)
			}
		})
	}
}

// TestHeadersOfLogs guards that it is known which header fields a log does not have.
func TestHeadersOfLogs(t *testing.T) {
	const headers = `"headers":{`
	from := strings.Index(caddyLog, headers)
	to := from + strings.Index(caddyLog[from:], `},`) + 2
	for name, tc := range map[string]struct{ line, withheld string }{
		"all":                {caddyLog, "Cookie"},
		"none":               {caddyLog[:from] + caddyLog[to:], "Cookie User-Agent X-Key"},
		"none, decoded":      {strings.ReplaceAll(caddyLog[:from]+caddyLog[to:], `":`, `" :`), "Cookie User-Agent X-Key"},
		"a client with none": {caddyLog[:from] + `"headers":{},` + caddyLog[to:], ""},
		"common":             {commonLog, "Cookie User-Agent X-Key"},
		"combined":           {combinedLog, "Cookie X-Key"},
	} {
		_, all := readAll(t, Auto, tc.line)
		if len(all) != 1 {
			t.Fatalf("%s: got %d requests", name, len(all))
		}
		var got []string
		for _, field := range []string{"Cookie", "User-Agent", "X-Key"} {
			if all[0].Withholds(field) {
				got = append(got, field)
			}
		}
		if strings.Join(got, " ") != tc.withheld {
			t.Errorf("%s: got %q, want %q", name, got, tc.withheld)
		}
	}
}
