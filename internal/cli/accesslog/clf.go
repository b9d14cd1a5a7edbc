package accesslog

import (
	"bytes"
	"net/http"
	"strconv"
	"strings"
	"time"
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

// parseCLF parses a line of the common or combined log format:
//
//	192.0.2.1 - alice [02/Jan/2006:15:04:05 -0700] "GET /x HTTP/1.1" 200 17 "referer" "agent"
//
// Whatever follows is ignored. What may precede the time, setClient says.
func (d *dialect) parseCLF(line []byte, e *Entry, clock *clfClock) Reason {
	before, rest, ok := bytes.Cut(line, []byte(" ["))
	if !ok {
		return BadLine
	}
	when, rest, ok := bytes.Cut(rest, []byte(`] "`))
	if !ok {
		return BadLine
	}
	request, rest, ok := cutQuoted(rest)
	if !ok {
		return BadLine
	}
	numbers := rest
	e.Headers = NoHeaders
	if d.format == Combined {
		e.Headers = FewHeaders
		var referer, agent string
		if numbers, rest, ok = bytes.Cut(rest, []byte(` "`)); !ok {
			return BadLine
		}
		if referer, rest, ok = cutQuoted(rest); !ok {
			return BadLine
		}
		if rest, ok = bytes.CutPrefix(rest, []byte(` "`)); !ok {
			return BadLine
		}
		if agent, _, ok = cutQuoted(rest); !ok {
			return BadLine
		}
		e.addHeader("Referer", referer)
		e.addHeader("User-Agent", agent)
	}
	status, length, _ := bytes.Cut(bytes.TrimPrefix(numbers, []byte(" ")), []byte(" "))
	var err error
	if e.Status, err = strconv.Atoi(string(status)); err != nil {
		return BadLine
	}
	if e.End, ok = clock.parse(when); !ok {
		return NoTime
	}
	e.Arrival, e.Spread, e.Duration = e.End, e.End, -1
	if length, _, _ = bytes.Cut(length, []byte(" ")); string(length) == "-" {
		e.Bytes = 0 // as Apache writes it
	} else {
		e.Bytes = bytesOf(string(length))
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
	if !ok || i < 0 || !isToken(method) {
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
	if !e.setURI() {
		return BadURI
	}
	return Used
}

// isToken reports whether text may be a method.
func isToken(text string) bool {
	for i := range len(text) {
		if !tokenChars[text[i]] {
			return false
		}
	}
	return text != ""
}

// tokenChars are the characters of tokens, see RFC 9110, section 5.6.2.
var tokenChars = charset("!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")

// addHeader adds a header field, unless the log has a dash for it.
func (e *Entry) addHeader(name, value string) {
	if value == "-" || value == "" {
		return
	}
	from := len(e.values)
	e.values = append(e.values, value)
	e.addField(name, from)
}

// cutQuoted returns what precedes the next quote, with its escapes resolved,
// and what is behind it. Apache escapes as C does, nginx writes \xHH.
func cutQuoted(text []byte) (before string, after []byte, ok bool) {
	n := bytes.IndexByte(text, '"')
	if n < 0 {
		return "", nil, false
	}
	if bytes.IndexByte(text[:n], '\\') < 0 {
		return string(text[:n]), text[n+1:], true
	}
	out := make([]byte, 0, n)
	for i := 0; i < len(text); i++ {
		c := text[i]
		if c == '"' {
			return string(out), text[i+1:], true
		}
		if c != '\\' {
			out = append(out, c)
			continue
		}
		if i++; i == len(text) {
			break
		}
		switch c = text[i]; c {
		case 'x':
			if i+2 < len(text) {
				if v, err := strconv.ParseUint(string(text[i+1:i+3]), 16, 8); err == nil {
					out = append(out, byte(v))
					i += 2
					continue
				}
			}
			out = append(out, '\\', 'x')
		case 'n', 't', 'r', 'b', 'f', 'v', 'a':
			out = append(out, "\n\t\r\b\f\v\a"[strings.IndexByte("ntrbfva", c)])
		default:
			out = append(out, c)
		}
	}
	return "", nil, false
}
