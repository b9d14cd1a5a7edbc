// Package accesslog reads the access logs of Caddy and of other web servers, and
// returns their requests in the order in which these arrived.
//
// It is made for millions of lines: they are read in chunks, parsed on all cores,
// and put in order within a bounded window, as a log has them in the order in
// which they ended.
package accesslog

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"slices"
)

// Format is the format of a log.
type Format uint8

const (
	Auto     Format = iota // found out from the first lines
	Caddy                  // JSON as Caddy writes it
	Common                 // the common log format of Apache and others
	Combined               // Common with Referer and User-Agent
)

// formats has the names of formats.
var formats = [...]string{Auto: "auto", Caddy: "json", Common: "common", Combined: "combined"}

// ParseFormat returns the format of the given name: "auto", "json", "common" or
// "combined".
func ParseFormat(name string) (Format, error) {
	if i := slices.Index(formats[:], name); i >= 0 {
		return Format(i), nil
	}
	return 0, fmt.Errorf("format: %q is not valid; use auto, json, common or combined", name)
}

// Reason says why a line was not used.
type Reason uint8

const (
	Used Reason = iota
	BadJSON
	NotAccess
	NoTime
	BadLine
	Console
	BadClient
	BadRequest
	BadURI
	TooLong
	Late
	Withheld
	reasons
)

// String returns r as it is shown to users.
func (r Reason) String() string {
	return [...]string{
		Used:       "used",
		BadJSON:    "not valid JSON",
		NotAccess:  "not a line of an access log",
		NoTime:     "no time that can be read",
		BadLine:    "not in the format of the log",
		Console:    "in Caddy's format for the console; log with format json",
		BadClient:  "several fields that may be the client's address",
		BadRequest: "not an HTTP request",
		BadURI:     "not a valid URI",
		TooLong:    "line too long",
		Late:       "began too long before the lines around it",
		Withheld:   "left out by journalctl; give it the option --all",
	}[r]
}

// Entry is one request.
type Entry struct {
	// When the request arrived and when it ended, in nanoseconds since 1970. If
	// the log's times are whole seconds, Arrival is the start of the second, and
	// Spread differs from it: the requests of each second are spread evenly.
	Arrival, End, Spread int64

	// How long it took, in nanoseconds, and the length of the response's body. Each is
	// -1 if the log does not say.
	Duration, Bytes int64

	Method, URI, Proto string
	URL                url.URL
	Host               string // empty if the log does not say
	TLS                bool   // whether the request came over TLS, if the log says
	ClientIP           string
	RemoteIP           string
	RemotePort         string
	Forwarded          bool // whether ClientIP is the first of several addresses
	UserID             string
	Status             int // 0 if the log does not say

	// The header fields that the log redacts, such as cookies, and those that it has at
	// all.
	Redacted []string
	Headers  Headers

	fields []field
	values []string

	responseHeader string // in JSON
	rateLimit      string // what a rate_limit handler has added, in JSON

	exact  bool  // whether its times are
	number int64 // of the entry, in the order in which they were read
}

// Headers says which header fields of requests a log has.
type Headers uint8

const (
	AllHeaders Headers = iota
	FewHeaders         // Referer and User-Agent
	NoHeaders
)

// Withholds reports whether the log does not say which value a header field had.
func (e *Entry) Withholds(name string) bool {
	switch e.Headers {
	case FewHeaders:
		return name != "Referer" && name != "User-Agent"
	case NoHeaders:
		return true
	case AllHeaders:
	}
	return slices.Contains(e.Redacted, name)
}

// field is a header field, whose values are values[from:to] of its entry.
type field struct {
	name     string
	from, to int
}

// reset empties e and keeps the memory of its slices.
func (e *Entry) reset() {
	clear(e.fields)
	clear(e.values)
	*e = Entry{Redacted: e.Redacted[:0], fields: e.fields[:0], values: e.values[:0]}
}

// HeaderTo replaces h by the header fields of e. Values are kept in the given
// slice, which is returned for use with the next entry.
func (e *Entry) HeaderTo(h http.Header, values []string) []string {
	clear(h)
	values = append(values[:0], e.values...)
	for i := range e.fields {
		f := &e.fields[i]
		h[f.name] = values[f.from:f.to:f.to]
	}
	return values
}

// ResponseHeader returns the header fields of the response, or nil if the log does not
// have them. They are decoded only here, as few limits need them.
func (e *Entry) ResponseHeader() (h http.Header) {
	if e.responseHeader == "" || json.Unmarshal([]byte(e.responseHeader), &h) != nil {
		return nil
	}
	return h
}

// Units returns what the limits charged at that time, by their paths, or nil if the log does not
// tell.
func (e *Entry) Units() map[string]int64 {
	var logged struct {
		Units map[string]int64 `json:"units"`
	}
	if e.rateLimit == "" || json.Unmarshal([]byte(e.rateLimit), &logged) != nil {
		return nil
	}
	return logged.Units
}

// addField adds a header field whose values were appended to e.values before.
func (e *Entry) addField(name string, from int) {
	e.fields = append(e.fields, field{name, from, len(e.values)})
	if len(e.values) == from+1 && e.values[from] == redacted {
		e.Redacted = append(e.Redacted, name)
	}
}

// redacted is what Caddy logs instead of credentials.
const redacted = "REDACTED"

// setURI sets URL from URI, as net/http does for requests that it receives.
func (e *Entry) setURI() bool {
	if e.setSimpleURI() {
		return true
	}
	raw := e.URI
	connect := e.Method == http.MethodConnect && raw != "" && raw[0] != '/'
	if connect {
		raw = "http://" + raw
	}
	u, err := url.ParseRequestURI(raw)
	if err != nil {
		return false
	}
	if connect {
		u.Scheme = ""
	}
	e.URL = *u
	return true
}

// setSimpleURI sets URL if URI is one that needs no decoding, as most are.
func (e *Entry) setSimpleURI() bool {
	uri := e.URI
	if uri == "" || uri[0] != '/' {
		return false
	}
	for i := range len(uri) {
		switch c := uri[i]; {
		case plainInPath[c]:
		case c == '?' && i+1 < len(uri):
			for j := i + 1; j < len(uri); j++ {
				if !plainInQuery[uri[j]] {
					return false
				}
			}
			e.URL = url.URL{Path: uri[:i], RawQuery: uri[i+1:]}
			return true
		default:
			return false
		}
	}
	e.URL = url.URL{Path: uri}
	return true
}

// The characters that are literal in a path and in a query.
var (
	plainInPath  = charset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789/-_.~")
	plainInQuery = charset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789/-_.~=&%+:@,;!*()'?")
)

// charset returns the set of the given characters.
func charset(chars string) (set [256]bool) {
	for _, c := range []byte(chars) {
		set[c] = true
	}
	return set
}
