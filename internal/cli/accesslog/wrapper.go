package accesslog

import (
	"bytes"
	"encoding/json"
	"regexp"
)

// wrapper is what surrounds the lines of a log that something else has collected,
// such as the output of a container.
type wrapper uint8

const (
	noWrapper   wrapper = iota
	dockerJSON          // {"log":"<line>\n","stream":"stdout","time":"…"}
	journalJSON         // {"MESSAGE":"<line>", …}
	criText             // 2006-01-02T15:04:05.999999999Z stdout F <line>
	prefixText          // <anything> {<line in JSON>}
)

// String returns what the lines were in.
func (w wrapper) String() string {
	return [...]string{
		dockerJSON:  "the JSON of Docker's log files",
		journalJSON: "the JSON of journald",
		criText:     "the log format of Kubernetes",
		prefixText:  "lines with a prefix, as syslog and journald write it",
	}[w]
}

// criPrefix matches the prefix of lines in the logs of the Container Runtime Interface.
// The tags after the stream begin with F for the end of a line or P for a part of it.
var criPrefix = regexp.MustCompile(`^\S+ (stdout|stderr) ([FP])\S* `)

// detectWrapper returns what surrounds the lines of a log, as its first lines show.
func detectWrapper(sample []byte) wrapper {
	for n := 0; len(sample) > 0 && n < 100; n++ {
		var line []byte
		line, sample, _ = bytes.Cut(sample, []byte("\n"))
		if line = trimLine(line); len(line) == 0 {
			continue
		}
		var w wrapped
		switch {
		case line[0] == '{' && w.decode(dockerJSON, line) && w.stream != "":
			return dockerJSON
		case line[0] == '{' && (w.decode(journalJSON, line) || withheld.Match(line)):
			return journalJSON
		case criPrefix.Match(line):
			return criText
		case detectFormat(line) != Auto:
			return noWrapper
		}
		if i := endOfPrefix(line); i > 0 && json.Valid(line[i:]) {
			return prefixText
		}
	}
	return noWrapper
}

// endOfPrefix returns where the JSON of a line begins after its prefix, or 0. Tabs
// separate the fields of Caddy's format for the console, whose JSON is not a line of
// the log.
func endOfPrefix(line []byte) int {
	i := bytes.Index(line, []byte(` {"`)) + 1
	if i > 0 && bytes.IndexByte(line[:i], '\t') >= 0 {
		return 0
	}
	return i
}

// withheld matches entries of the journal without their message: journalctl leaves out
// fields of more than 4 KiB unless its options say otherwise.
var withheld = regexp.MustCompile(`"MESSAGE" ?: ?null\b`)

// unwrapper takes the lines of a log out of what surrounds them.
type unwrapper struct {
	wrapper wrapper
	parts   map[string][]byte // of lines that have not ended, by stream
}

// unwrap returns the lines in chunk, which has whole ones. Those that are not wrapped
// stay as they are. With last, there are no more.
func (u *unwrapper) unwrap(chunk []byte, last bool) []byte {
	if u.wrapper == noWrapper {
		return chunk
	}
	out := make([]byte, 0, len(chunk))
	var w wrapped
	for len(chunk) > 0 {
		var line []byte
		line, chunk, _ = bytes.Cut(chunk, []byte("\n"))
		line = bytes.TrimSuffix(line, []byte("\r"))
		if !w.take(u.wrapper, line) {
			out = append(append(out, line...), '\n')
			continue
		}
		begun := u.parts[w.stream]
		if w.ends {
			out = append(append(append(out, begun...), w.line...), '\n')
			delete(u.parts, w.stream)
			continue
		}
		if u.parts == nil {
			u.parts = make(map[string][]byte)
		}
		if len(begun) <= maxLine { // what is longer is not used anyway
			u.parts[w.stream] = append(begun, w.line...)
		}
	}
	if last {
		for _, part := range u.parts {
			out = append(append(out, part...), '\n')
		}
		clear(u.parts)
	}
	return out
}

// wrapped is a line, or a part of one, that something stood around.
type wrapped struct {
	line   []byte
	stream string // that the line was written to, if known
	ends   bool   // whether the line ends with this part
}

// take takes a line out of what surrounds it. It returns false if nothing does.
func (w *wrapped) take(in wrapper, line []byte) bool {
	*w = wrapped{ends: true}
	switch in {
	case dockerJSON, journalJSON:
		return len(line) > 0 && line[0] == '{' && w.decode(in, line)
	case criText:
		m := criPrefix.FindSubmatchIndex(line)
		if m == nil {
			return false
		}
		w.line, w.stream, w.ends = line[m[1]:], string(line[m[2]:m[3]]), line[m[4]] == 'F'
		return true
	case prefixText:
		i := endOfPrefix(line)
		w.line = line[i:]
		return i > 0
	case noWrapper:
	}
	return false
}

// decode decodes an object in JSON that has a line in it.
func (w *wrapped) decode(in wrapper, object []byte) bool {
	var fields map[string]json.RawMessage // not a struct: Caddy may write "message" where journald has "MESSAGE"
	if json.Unmarshal(object, &fields) != nil {
		return false
	}
	if in == journalJSON {
		text, found := messageOf(fields["MESSAGE"])
		w.line, w.ends = []byte(text), true
		return found
	}
	var line *string
	if json.Unmarshal(fields["log"], &line) != nil || line == nil {
		return false
	}
	_ = json.Unmarshal(fields["stream"], &w.stream) // which may not be known
	w.line, w.ends = bytes.CutSuffix([]byte(*line), []byte("\n"))
	return true
}

// messageOf returns the message of an entry of the journal: text, or the numbers of its
// bytes if these are not only text.
func messageOf(raw json.RawMessage) (string, bool) {
	var text *string
	if json.Unmarshal(raw, &text) == nil && text != nil {
		return *text, true
	}
	var numbers []int
	if json.Unmarshal(raw, &numbers) != nil || numbers == nil {
		return "", false
	}
	message := make([]byte, len(numbers))
	for i, n := range numbers {
		message[i] = byte(n)
	}
	return string(message), true
}
