package accesslog

import (
	"cmp"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"strings"
)

// caddyLine is a line of Caddy's log. Times and the like are kept as they are written.
type caddyLine struct {
	Ts       token   `json:"ts"`
	Duration token   `json:"duration"`
	Status   token   `json:"status"`
	Size     token   `json:"size"`
	Logger   *string `json:"logger"`
	Msg      *string `json:"msg"`
	UserID   string  `json:"user_id"`

	// Other names that an encoder may give to ts.
	Time      token `json:"time"`
	Timestamp token `json:"timestamp"`
	At        token `json:"@timestamp"`
	Date      token `json:"date"`

	Request *struct {
		RemoteIP   string          `json:"remote_ip"`
		RemotePort string          `json:"remote_port"`
		RemoteAddr string          `json:"remote_addr"` // of Caddy before 2.5
		ClientIP   string          `json:"client_ip"`
		Proto      string          `json:"proto"`
		Method     string          `json:"method"`
		Host       string          `json:"host"`
		URI        string          `json:"uri"`
		Headers    *http.Header    `json:"headers"` // nil if a filter has removed them
		TLS        json.RawMessage `json:"tls"`
	} `json:"request"`

	ResponseHeader json.RawMessage `json:"resp_headers"`
	RateLimit      json.RawMessage `json:"rate_limit"`
}

// decode reads a line.
func (l *caddyLine) decode(line []byte) Reason {
	err := json.Unmarshal(line, l)
	wrongType := (*json.UnmarshalTypeError)(nil)
	switch {
	case err != nil && !errors.As(err, &wrongType):
		return BadJSON
	case err != nil, l.Request == nil, l.Request.Method == "", l.Request.URI == "":
		return NotAccess
	case l.Logger != nil && !strings.HasPrefix(*l.Logger, "http.log.access"):
		return NotAccess // such as the log of errors, which has requests once more
	case l.Logger == nil && l.Msg != nil && *l.Msg != "handled request" && *l.Msg != "NOP":
		return NotAccess
	}
	l.Ts = cmp.Or(l.Ts, l.Time, l.Timestamp, l.At, l.Date)
	return Used
}

// parseCaddy parses a line of Caddy's JSON.
func (d *dialect) parseCaddy(line []byte, e *Entry) Reason {
	var l caddyLine
	if reason := l.decode(line); reason != Used {
		return reason
	}
	var ok bool
	if e.End, ok = d.time(l.Ts); !ok {
		return NoTime
	}
	duration, ok := d.elapsed(l.Duration)
	if !ok {
		return NoTime
	}
	e.Arrival = e.End - duration
	if e.Duration = duration; l.Duration == (token{}) {
		e.Duration = -1
	}
	if e.exact = d.exact; !e.exact {
		e.Arrival -= e.Arrival % int64(second)
	}
	e.Spread = e.Arrival
	e.Status, _ = strconv.Atoi(l.Status.text)
	e.Bytes = bytesOf(l.Size.text)
	e.UserID, e.responseHeader, e.rateLimit = l.UserID, l.ResponseHeader, l.RateLimit
	r := l.Request
	e.Method, e.URI, e.Proto, e.Host = r.Method, r.URI, r.Proto, r.Host
	if e.TLS = len(r.TLS) > 0 && r.TLS[0] == '{'; r.Headers == nil {
		e.Headers = NoHeaders
	} else {
		e.Header = *r.Headers
	}
	if e.RemoteIP, e.RemotePort = r.RemoteIP, r.RemotePort; e.RemoteIP == "" && r.RemoteAddr != "" {
		i := max(strings.LastIndexByte(r.RemoteAddr, ':'), 0)
		e.RemoteIP, e.RemotePort = strings.Trim(r.RemoteAddr[:i], "[]"), strings.TrimPrefix(r.RemoteAddr[i:], ":")
	}
	e.ClientIP = cmp.Or(r.ClientIP, e.RemoteIP)
	return e.setURI()
}

// bytesOf returns the length of a body that is logged as text, or -1 if it is not a number.
func bytesOf(text string) int64 {
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 0 {
		return -1
	}
	return n
}

// token is a JSON number or string. The zero token is no value.
type token struct {
	text   string // a string's value, or a number as it is written
	quoted bool
}

// UnmarshalJSON implements json.Unmarshaler. A value of another type is no value.
func (t *token) UnmarshalJSON(b []byte) error {
	switch {
	case b[0] == '"':
		t.quoted = true
		return json.Unmarshal(b, &t.text)
	case b[0] == '-', b[0]-'0' <= 9:
		t.text = string(b)
	}
	return nil
}
