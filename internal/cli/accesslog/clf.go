package accesslog

import (
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"time"

	"golang.org/x/net/http/httpguts"
)

// clfTime is the layout of times in the common log format.
const clfTime = "02/Jan/2006:15:04:05 -0700"

// clfClock remembers the time that was parsed last: many lines have the same.
type clfClock struct {
	text string
	ns   int64
}

// parse parses a time.
func (c *clfClock) parse(text []byte) (int64, bool) {
	if len(text) > 0 && string(text) == c.text {
		return c.ns, true
	}
	t, err := time.Parse(clfTime, string(text))
	ns := t.UnixNano()
	if err != nil || ns < earliest || ns >= latest {
		return 0, false
	}
	c.text, c.ns = string(text), ns
	return ns, true
}

// clfLine matches a line of the common or combined log format:
//
//	192.0.2.1 - alice [02/Jan/2006:15:04:05 -0700] "GET /x HTTP/1.1" 200 17 "referer" "agent"
//
// Whatever follows is ignored. What may precede the time, setClient says.
var clfLine = regexp.MustCompile(`^(.*?) \[(.*?)\] "((?:[^"\\]|\\.)*)" ?(\d+)(?: (\S*))?(?:[^"]* "((?:[^"\\]|\\.)*)" "((?:[^"\\]|\\.)*)")?`)

// parseCLF parses a line of the common or combined log format.
func (d *dialect) parseCLF(line []byte, e *Entry, clock *clfClock) Reason {
	m := clfLine.FindSubmatch(line)
	if m == nil || d.format == Combined && m[7] == nil {
		return BadLine
	}
	before, when, request, length := m[1], m[2], unquoted(m[3]), string(m[5])
	if e.Headers = NoHeaders; d.format == Combined {
		e.Headers, e.Header = FewHeaders, make(http.Header)
		for name, text := range map[string][]byte{"Referer": m[6], "User-Agent": m[7]} {
			if value := unquoted(text); value != "" && value != "-" {
				e.Header[name] = []string{value}
			}
		}
	}
	var err error
	if e.Status, err = strconv.Atoi(string(m[4])); err != nil {
		return BadLine
	}
	var ok bool
	if e.End, ok = clock.parse(when); !ok {
		return NoTime
	}
	e.Arrival, e.Spread, e.Duration = e.End, e.End, -1
	if e.Bytes = bytesOf(length); length == "-" {
		e.Bytes = 0 // as Apache writes it
	}
	if reason := e.setClient(before); reason != Used {
		return reason
	}
	return e.setRequestLine(request)
}

// setRequestLine parses a request line, such as "GET /x HTTP/1.1".
func (e *Entry) setRequestLine(line string) Reason {
	method, rest, ok := strings.Cut(line, " ")
	i := strings.LastIndexByte(rest, ' ')
	if !ok || i < 0 || !httpguts.ValidHeaderFieldName(method) {
		return BadRequest
	}
	proto := rest[i+1:]
	if proto == "HTTP/2" || proto == "HTTP/3" {
		proto += ".0" // as net/http writes it
	}
	if _, _, ok := http.ParseHTTPVersion(proto); !ok {
		return BadRequest
	}
	e.Method, e.URI, e.Proto = method, rest[:i], proto
	return e.setURI()
}

// escape matches an escape in quotes: Apache's are those of C, and nginx writes \xHH.
var escape = regexp.MustCompile(`\\(x[0-9A-Fa-f]{2}|.)`)

// unquoted returns a quoted text with its escapes resolved.
func unquoted(text []byte) string {
	return string(escape.ReplaceAllFunc(text, func(written []byte) []byte {
		c, _, _, err := strconv.UnquoteChar(string(written), '"')
		if err != nil {
			return written
		}
		return []byte{byte(c)}
	}))
}
