package accesslog

import (
	"encoding/binary"
	"encoding/json"
	"strconv"
	"strings"
	"unicode/utf8"
)

// caddyLine is what a line of Caddy's log says besides the fields of its Entry.
// Times and the like are kept as they are written.
type caddyLine struct {
	ts, duration, status, size token
	logger, msg                string
	hasLogger, hasMsg          bool
	hasRequest                 bool
	hasHeaders                 bool   // unless a filter has removed them
	remoteAddr                 string // of Caddy before 2.5
}

// token is a JSON number or string. The zero token is no value.
type token struct {
	text   string // a string's value, or a number as it is written
	quoted bool
}

// isZero reports whether t is no value.
func (t token) isZero() bool { return t.text == "" && !t.quoted }

// timeKeys are names that a time may have if it is not ts.
var timeKeys = [...]string{"time", "timestamp", "@timestamp", "date"}

// parseCaddy parses a line of Caddy's JSON. Lines as Caddy writes them are read by
// a scanner that is several times faster than encoding/json, which reads others.
func (d *dialect) parseCaddy(line []byte, e *Entry) Reason {
	var l caddyLine
	if !plainText(line) || !(&scanner{text: string(line)}).line(e, &l) {
		e.reset()
		l = caddyLine{}
		if reason := decode(line, e, &l); reason != Used {
			return reason
		}
	}
	return d.finishCaddy(e, &l)
}

// finishCaddy interprets what a line says.
func (d *dialect) finishCaddy(e *Entry, l *caddyLine) Reason {
	switch {
	case !l.hasRequest || e.Method == "" || e.URI == "":
		return NotAccess
	case l.hasLogger && !strings.HasPrefix(l.logger, "http.log.access"):
		return NotAccess // such as the log of errors, which has requests once more
	case !l.hasLogger && l.hasMsg && l.msg != "handled request" && l.msg != "NOP":
		return NotAccess
	}
	var ok bool
	if e.End, ok = d.time(l.ts); !ok {
		return NoTime
	}
	duration, ok := d.elapsed(l.duration)
	if !ok {
		return NoTime
	}
	e.Arrival = e.End - duration
	if e.Duration = duration; l.duration.isZero() {
		e.Duration = -1
	}
	if e.exact = d.exact; !e.exact {
		e.Arrival -= e.Arrival % int64(second)
	}
	e.Spread = e.Arrival
	if !l.hasHeaders {
		e.Headers = NoHeaders
	}
	e.Status, _ = strconv.Atoi(l.status.text)
	e.Bytes = bytesOf(l.size.text)
	if e.RemoteIP == "" && l.remoteAddr != "" {
		i := max(strings.LastIndexByte(l.remoteAddr, ':'), 0)
		e.RemoteIP, e.RemotePort = strings.Trim(l.remoteAddr[:i], "[]"), strings.TrimPrefix(l.remoteAddr[i:], ":")
	}
	if e.ClientIP == "" {
		e.ClientIP = e.RemoteIP
	}
	if !e.setURI() {
		return BadURI
	}
	return Used
}

// bytesOf returns the length of a body that is logged as text, or -1 if that is none.
func bytesOf(text string) int64 {
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 0 {
		return -1
	}
	return n
}

// plainText reports whether text is valid UTF-8 without control characters.
func plainText(text []byte) bool {
	const ones, tops = 0x0101010101010101, 0x8080808080808080
	i, ascii := 0, true
	for ; i+8 <= len(text); i += 8 {
		v := binary.LittleEndian.Uint64(text[i:])
		if v&tops != 0 {
			ascii = false
			break
		}
		if (v-0x20*ones)&tops != 0 { // some byte is less than 0x20, given that none is above 0x7f
			return false
		}
	}
	for _, c := range text[i:] {
		if c < ' ' {
			return false
		}
		ascii = ascii && c < utf8.RuneSelf
	}
	return ascii || utf8.Valid(text)
}

// scanner reads JSON as zap writes it: without white space, and valid UTF-8
// without control characters. Its methods return false if there is something else,
// for encoding/json to judge.
type scanner struct {
	text string
	pos  int
}

// line reads the whole line.
func (s *scanner) line(e *Entry, l *caddyLine) bool {
	return s.object(func(key string) bool {
		switch key {
		case "ts":
			return s.token(&l.ts)
		case "duration":
			return s.token(&l.duration)
		case "status":
			return s.token(&l.status)
		case "size":
			return s.token(&l.size)
		case "resp_headers":
			return s.raw(&e.responseHeader)
		case "rate_limit":
			return s.raw(&e.rateLimit)
		case "logger":
			l.hasLogger = true
			return s.string(&l.logger)
		case "msg":
			l.hasMsg = true
			return s.string(&l.msg)
		case "user_id":
			return s.string(&e.UserID)
		case "request":
			if l.hasRequest {
				return false
			}
			l.hasRequest = true
			return s.request(e, l)
		case timeKeys[0], timeKeys[1], timeKeys[2], timeKeys[3]:
			return false
		}
		return s.skip(0)
	}) && s.pos == len(s.text)
}

// request reads the object that describes the request.
func (s *scanner) request(e *Entry, l *caddyLine) bool {
	return s.object(func(key string) bool {
		switch key {
		case "remote_ip":
			return s.string(&e.RemoteIP)
		case "remote_port":
			return s.string(&e.RemotePort)
		case "remote_addr":
			return s.string(&l.remoteAddr)
		case "client_ip":
			return s.string(&e.ClientIP)
		case "proto":
			return s.string(&e.Proto)
		case "method":
			return s.string(&e.Method)
		case "host":
			return s.string(&e.Host)
		case "uri":
			return s.string(&e.URI)
		case "headers":
			if l.hasHeaders {
				return false
			}
			l.hasHeaders = true
			return s.headers(e)
		case "tls":
			e.TLS = true
			return s.next('{') && s.back() && s.skip(0)
		}
		return s.skip(0)
	})
}

// headers reads header fields: names with arrays of strings.
func (s *scanner) headers(e *Entry) bool {
	return s.object(func(name string) bool {
		from := len(e.values)
		if !s.next('[') {
			return false
		}
		if s.next(']') {
			e.addField(name, from)
			return true
		}
		for {
			var v string
			if !s.string(&v) {
				return false
			}
			e.values = append(e.values, v)
			if s.next(']') {
				e.addField(name, from)
				return true
			}
			if !s.next(',') {
				return false
			}
		}
	})
}

// object reads an object, whose values member reads.
func (s *scanner) object(member func(key string) bool) bool {
	if !s.next('{') {
		return false
	}
	if s.next('}') {
		return true
	}
	for {
		var key string
		if !s.string(&key) || !s.next(':') || !member(key) {
			return false
		}
		if s.next('}') {
			return true
		}
		if !s.next(',') {
			return false
		}
	}
}

// next reads c, if it is next.
func (s *scanner) next(c byte) bool {
	if s.pos < len(s.text) && s.text[s.pos] == c {
		s.pos++
		return true
	}
	return false
}

// back goes back by one byte.
func (s *scanner) back() bool {
	s.pos--
	return true
}

// string reads a string.
func (s *scanner) string(into *string) bool {
	if !s.next('"') {
		return false
	}
	n := strings.IndexByte(s.text[s.pos:], '"')
	if n < 0 {
		return false
	}
	text := s.text[s.pos : s.pos+n]
	if strings.IndexByte(text, '\\') < 0 {
		*into = text
		s.pos += n + 1
		return true
	}
	return s.escaped(into)
}

// escaped reads the rest of a string that has escapes.
func (s *scanner) escaped(into *string) bool {
	rest := s.text[s.pos:]
	out := make([]byte, 0, 64)
	for i := 0; i < len(rest); i++ {
		switch c := rest[i]; c {
		case '"':
			s.pos += i + 1
			*into = string(out)
			return true
		case '\\':
			i++
			if i == len(rest) {
				return false
			}
			switch rest[i] {
			case '"', '\\', '/':
				out = append(out, rest[i])
			case 'n':
				out = append(out, '\n')
			case 't':
				out = append(out, '\t')
			case 'r':
				out = append(out, '\r')
			case 'u':
				c, ok := asciiEscape(rest[i:])
				if !ok { // rare
					return false
				}
				out = append(out, c)
				i += 4
			default: // rare
				return false
			}
		default:
			out = append(out, c)
		}
	}
	return false
}

// asciiEscape returns the character that text begins with as an escape, such as u0026,
// if it is one of ASCII. Docker writes &, < and > like this.
func asciiEscape(text string) (byte, bool) {
	if len(text) < 5 || text[1] != '0' || text[2] != '0' {
		return 0, false
	}
	c, err := strconv.ParseUint(text[3:5], 16, 8)
	return byte(c), err == nil && c < utf8.RuneSelf
}

// token reads a string or a plain number.
func (s *scanner) token(into *token) bool {
	if s.pos < len(s.text) && s.text[s.pos] == '"' {
		into.quoted = true
		return s.string(&into.text)
	}
	from := s.pos
	ok := s.number()
	*into = token{text: s.text[from:s.pos]}
	return ok
}

// number reads a number without an exponent.
func (s *scanner) number() bool {
	s.next('-')
	if !s.next('0') && !s.digits() {
		return false
	}
	return !s.next('.') || s.digits()
}

// digits reads digits, at least one.
func (s *scanner) digits() bool {
	from := s.pos
	for s.pos < len(s.text) && s.text[s.pos]-'0' <= 9 {
		s.pos++
	}
	return s.pos > from
}

// maxDepth is how deeply values may be nested.
const maxDepth = 32

// raw reads any value as it is written.
func (s *scanner) raw(text *string) bool {
	from := s.pos
	ok := s.skip(0)
	*text = s.text[from:s.pos]
	return ok
}

// skip reads any value.
func (s *scanner) skip(depth int) bool {
	if s.pos == len(s.text) || depth == maxDepth {
		return false
	}
	switch c := s.text[s.pos]; c {
	case '"':
		var text string
		return s.string(&text)
	case '{':
		return s.object(func(string) bool { return s.skip(depth + 1) })
	case '[':
		s.pos++
		if s.next(']') {
			return true
		}
		for {
			if !s.skip(depth + 1) {
				return false
			}
			if s.next(']') {
				return true
			}
			if !s.next(',') {
				return false
			}
		}
	case 't':
		return s.word("true")
	case 'f':
		return s.word("false")
	}
	return s.number()
}

// word reads the given word.
func (s *scanner) word(word string) bool {
	if !strings.HasPrefix(s.text[s.pos:], word) {
		return false
	}
	s.pos += len(word)
	return true
}

// decode reads a line by encoding/json.
func decode(line []byte, e *Entry, l *caddyLine) Reason {
	var top map[string]json.RawMessage
	if json.Unmarshal(line, &top) != nil || top == nil {
		return BadJSON
	}
	var request map[string]json.RawMessage
	if raw, found := top["request"]; found {
		if json.Unmarshal(raw, &request) != nil {
			return NotAccess
		}
		l.hasRequest = request != nil
	}
	var headers map[string][]string
	ok := decodeTo(top, "ts", &l.ts) && decodeTo(top, "duration", &l.duration) && decodeTo(top, "status", &l.status) &&
		decodeTo(top, "size", &l.size) &&
		decodeTo(top, "logger", &l.logger) && decodeTo(top, "msg", &l.msg) && decodeTo(top, "user_id", &e.UserID) &&
		decodeTo(request, "remote_ip", &e.RemoteIP) && decodeTo(request, "remote_port", &e.RemotePort) &&
		decodeTo(request, "remote_addr", &l.remoteAddr) &&
		decodeTo(request, "client_ip", &e.ClientIP) && decodeTo(request, "proto", &e.Proto) &&
		decodeTo(request, "method", &e.Method) && decodeTo(request, "host", &e.Host) &&
		decodeTo(request, "uri", &e.URI) && decodeTo(request, "headers", &headers)
	if !ok {
		return NotAccess
	}
	e.responseHeader, e.rateLimit = string(top["resp_headers"]), string(top["rate_limit"])
	_, l.hasLogger = top["logger"]
	_, l.hasMsg = top["msg"]
	_, l.hasHeaders = request["headers"]
	e.TLS = len(request["tls"]) > 0 && request["tls"][0] == '{'
	for _, key := range timeKeys {
		if !l.ts.isZero() {
			break
		}
		if !decodeTo(top, key, &l.ts) {
			return NotAccess
		}
	}
	for name, values := range headers {
		from := len(e.values)
		e.values = append(e.values, values...)
		e.addField(name, from)
	}
	return Used
}

// decodeTo decodes a member of an object. It returns false if it has the wrong
// type; if there is none, dst stays as it is.
func decodeTo(object map[string]json.RawMessage, key string, dst any) bool {
	raw, found := object[key]
	return !found || json.Unmarshal(raw, dst) == nil
}

// UnmarshalJSON implements json.Unmarshaler.
func (t *token) UnmarshalJSON(b []byte) error {
	if string(b) == "null" {
		return nil
	}
	if b[0] == '"' {
		t.quoted = true
		return json.Unmarshal(b, &t.text)
	}
	var n json.Number
	err := json.Unmarshal(b, &n)
	t.text = n.String()
	return err
}
