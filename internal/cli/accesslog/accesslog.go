// Package accesslog reads the access logs of Caddy and of other web servers, and
// returns their requests in the order in which these arrived.
//
// Logs may have millions of lines: they are read in chunks, parsed on all cores,
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

	Header  http.Header
	Headers Headers

	responseHeader json.RawMessage
	rateLimit      json.RawMessage // what a rate_limit handler has added

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
	value := e.Header[name]
	return len(value) == 1 && value[0] == "REDACTED" // which Caddy logs instead of credentials
}

// ResponseHeader returns the header fields of the response, or nil if the log does not
// have them. They are decoded only here, as few limits need them.
func (e *Entry) ResponseHeader() (h http.Header) {
	if json.Unmarshal(e.responseHeader, &h) != nil {
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
	if json.Unmarshal(e.rateLimit, &logged) != nil {
		return nil
	}
	return logged.Units
}

// setURI sets URL from URI, as net/http does for requests that it receives.
func (e *Entry) setURI() Reason {
	raw := e.URI
	connect := e.Method == http.MethodConnect && raw != "" && raw[0] != '/'
	if connect {
		raw = "http://" + raw
	}
	u, err := url.ParseRequestURI(raw)
	if err != nil {
		return BadURI
	}
	if e.URL = *u; connect {
		e.URL.Scheme = ""
	}
	return Used
}
