package field

import (
	"errors"
	"mime"
	"net/http"
	"os"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// MaxBody is the length of the longest body that is read, unless a config says otherwise. What is behind
// that may have a field once more, so in a longer one all fields are unclear.
const MaxBody = 64 << 10

// Fields are the fields of one request, whose body is read when the first of them is asked for.
type Fields struct {
	request *http.Request
	most    int64 // of a body to read
	body    *Body // nil until it is read
	err     error // of a body that breaks off
	found   []found
}

// found is what was found of a field.
type found struct {
	name string // behind Prefix
	value
}

// Register has the placeholders of fields show those of r, whose Body is replaced when one of them is first
// looked up and r has a body of at most the given length.
func Register(r *http.Request, repl *caddy.Replacer, most int64) {
	if f := of(repl); f != nil {
		f.request, f.most = r, max(f.most, most) // another handler may have a copy
		return
	}
	repl.Map((&Fields{request: r, most: most}).lookUp)
}

// of returns the fields that are registered with repl, or nil.
func of(repl *caddy.Replacer) *Fields {
	f, _ := repl.Get(Prefix)
	fields, _ := f.(*Fields)
	return fields
}

// lookUp implements caddy.ReplacerFunc. A field that is unclear is empty.
func (f *Fields) lookUp(name string) (any, bool) {
	name, ours := strings.CutPrefix(name, Prefix)
	if !ours {
		return nil, false
	}
	if name == "" {
		return f, true
	}
	w, err := Parse(name)
	if err != nil {
		return "", true
	}
	return f.value(name, w).certain(), true
}

// InKey returns what keys have of a field, given its name behind Prefix: nothing if the request does not
// have it, and Unclear if it has no certain value.
func InKey(repl *caddy.Replacer, name string, w *Wanted) string {
	f := of(repl)
	if f == nil {
		return ""
	}
	return f.value(name, w).inKey()
}

// Err returns why the body of the request could not be read, of which fields were looked up by repl, and the
// status of the response to that, or nil.
func Err(repl *caddy.Replacer) (status int, err error) {
	f := of(repl)
	if f == nil || f.err == nil {
		return 0, nil
	}
	var refused caddyhttp.HandlerError
	switch {
	case errors.As(f.err, &refused) && refused.StatusCode != 0:
		return refused.StatusCode, f.err
	case errors.Is(f.err, os.ErrDeadlineExceeded):
		return http.StatusRequestTimeout, f.err
	}
	return http.StatusBadRequest, f.err
}

// value returns what is known of a field.
func (f *Fields) value(name string, w *Wanted) *value {
	for i := range f.found {
		if f.found[i].name == name {
			return &f.found[i].value
		}
	}
	f.found = append(f.found, found{name: name})
	v := &f.found[len(f.found)-1].value
	scanForm([]byte(f.request.URL.RawQuery), w, v, true) // some upstreams take both
	f.scanBody(w, v)
	return v
}

// scanBody finds a field in the body.
func (f *Fields) scanBody(w *Wanted, v *value) {
	r := f.request
	if r.Body == nil || r.Body == http.NoBody || r.ContentLength == 0 {
		return
	}
	t := typeOf(r.Header)
	if !t.readable() || r.ContentLength > f.most || r.Method == http.MethodConnect {
		v.unclear = true
		return
	}
	if f.body == nil {
		f.body = begin(r, f.most)
	}
	text, whole, err := f.body.all()
	if f.err = err; !whole {
		v.unclear = true
		return
	}
	t.scan(text, w, v)
}

// contentType is what a Content-Type says.
type contentType struct {
	valid    bool   // whether all parsers read it alike
	name     string // in lower case; empty without one
	boundary string // of a multipart type
	ascii    bool   // whether only the ASCII of a text is certain, by its charset
}

// The types of bodies that are read. Of others, and without one, some upstreams read JSON.
const (
	typeForm      = "application/x-www-form-urlencoded"
	typeMultipart = "multipart/form-data"
	typeText      = "text/plain"
)

// typeOf returns what the header of a request says of its body.
func typeOf(h http.Header) contentType {
	for i, encoding := range h["Content-Encoding"] {
		if encoding = strings.TrimSpace(encoding); i > 0 || encoding != "" && !strings.EqualFold(encoding, "identity") {
			return contentType{} // some upstreams decompress it
		}
	}
	switch types := h["Content-Type"]; len(types) {
	case 0:
		return contentType{valid: true}
	case 1:
		return parseType(types[0])
	}
	return contentType{}
}

// parseType parses a Content-Type. Text in UTF-7, UTF-16 or EBCDIC, which some upstreams know, has other
// bytes even for ASCII.
func parseType(text string) (t contentType) {
	if text = strings.TrimSpace(text); text == "" || strings.IndexByte(text, ';') < 0 {
		return contentType{valid: true, name: strings.ToLower(text)}
	}
	name, params, err := mime.ParseMediaType(text)
	text = strings.ToLower(text)
	if err != nil || strings.ContainsAny(text, `*\`) || strings.Count(text, "charset") > 1 || strings.Count(text, "boundary") > 1 {
		return t
	}
	t = contentType{valid: true, name: name, boundary: params["boundary"]}
	switch charset, declared := params["charset"]; strings.ToLower(charset) {
	case "utf-8", "utf8", "us-ascii", "ascii":
	case "iso-8859-1", "latin1", "windows-1252":
		t.ascii = true
	default:
		t.valid = !declared && !strings.Contains(text, "charset")
	}
	return t
}

// isJSON reports whether the type is one of JSON.
func (t *contentType) isJSON() bool {
	return t.name == "application/json" || t.name == "text/json" || strings.HasSuffix(t.name, "+json")
}

// readable reports whether bodies of the type are read.
func (t *contentType) readable() bool {
	switch t.name {
	case typeForm, typeText, "":
		return t.valid
	case typeMultipart:
		return t.valid && t.boundary != "" && !strings.ContainsFunc(t.boundary, notInBoundary)
	}
	return t.valid && t.isJSON()
}

// notInBoundary reports whether c is in no boundary that clients make. RFC 2046 has more, with and without quotes.
func notInBoundary(c rune) bool {
	return (c < '0' || c > '9') && (c|0x20 < 'a' || c|0x20 > 'z') && !strings.ContainsRune("-_.+", c)
}

// scan finds a field in a whole body.
func (t *contentType) scan(body []byte, w *Wanted, v *value) {
	switch {
	case len(body) == 0:
	case t.ascii && mayNotBeASCII(body):
		v.unclear = true
	case t.name == typeMultipart:
		scanMultipart(body, t.boundary, w, v)
		scanForm(body, w, v, false)
	case looksLikeJSON(body):
		scanJSON(body, w, v)
		scanForm(body, w, v, false)
	case t.name == typeForm && !hides(body):
		scanForm(body, w, v, true)
	default:
		v.unclear = true
	}
}

// hides reports whether a form begins as none does that is encoded, but as JSON may behind a comment, or
// behind what only some parsers take for white space.
func hides(body []byte) bool { return body[0] == '/' || body[0] == '#' || body[0] <= ' ' }

// mayNotBeASCII reports whether a text is not ASCII, or has escapes of what is not.
func mayNotBeASCII(text []byte) bool {
	for i, c := range text {
		if c == '%' && i+1 < len(text) && text[i+1] >= '8' {
			return true
		}
	}
	return !isASCII(text)
}
