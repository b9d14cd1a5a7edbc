package key

import (
	"encoding/base64"
	"net/http"
	"net/textproto"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/field"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/placeholder"
)

// One value can be written in several ways, which Caddy, or an upstream, takes for equal. So it
// is one key, and a client that goes through all of them has one bucket.

// spelling is how the value of a placeholder is read. Its zero value is for values which
// can be written in one way.
type spelling struct {
	read    func(*http.Request, *caddy.Replacer) string // in place of the replacer, unless nil
	spelled func(v string) string                       // returns one value for all that are equal, unless nil; v is not empty
}

// The placeholders of a request, some as prefixes of their names.
const (
	ofHost   = "http.request.host"
	ofHeader = "http.request.header."
	ofCookie = "http.request.cookie."
	ofQuery  = "http.request.uri.query."
)

// spellings maps the names of placeholders to how their values are read.
var spellings = map[string]spelling{
	ofHost:                            {spelled: canonicalHost},
	"http.request.hostport":           {spelled: canonicalHostPort},
	"http.request.tls.server_name":    {spelled: canonicalHost},
	ofHeader + "Authorization":        {spelled: canonicalCredentials},
	ofHeader + "Proxy-Authorization":  {spelled: canonicalCredentials},
	"http.request.uri.path":           {spelled: canonicalPath},
	"http.request.uri.path.dir":       {spelled: canonicalPath},
	"http.request.uri.path.file":      {spelled: canonicalPath},
	"http.request.orig_uri.path":      {spelled: canonicalPath},
	"http.request.orig_uri.path.dir":  {spelled: canonicalPath},
	"http.request.orig_uri.path.file": {spelled: canonicalPath},
	placeholder.BasicUser:             {basicUser, strings.ToLower},
}

// spellingOfField returns the spelling of a placeholder of a field of what clients submit.
func spellingOfField(name string) (spelling, error) {
	name = strings.TrimPrefix(name, field.Prefix)
	w, err := field.Parse(name)
	return spelling{func(_ *http.Request, repl *caddy.Replacer) string { return field.InKey(repl, name, w) }, field.Canonical}, err
}

// spellingOf returns the spelling of a placeholder.
func spellingOf(name string) spelling {
	header, isHeader := strings.CutPrefix(name, ofHeader)
	if isHeader {
		header = textproto.CanonicalMIMEHeaderKey(header)
		name = ofHeader + header
	}
	s := spellings[name]
	if isHeader {
		s.read = func(r *http.Request, _ *caddy.Replacer) string { return fieldValue(r.Header[header]) }
	}
	if query, ok := strings.CutPrefix(name, ofQuery); ok {
		s.read = func(r *http.Request, _ *caddy.Replacer) string { return fieldValue(r.URL.Query()[query]) }
	}
	if cookie, ok := strings.CutPrefix(name, ofCookie); ok {
		s.read = func(r *http.Request, _ *caddy.Replacer) string { return cookieValue(r, cookie) }
	}
	if n, ok := cutNumber(name, ofHost+".labels."); ok { // Caddy's own counts from the dot at the end
		s = spelling{
			func(_ *http.Request, repl *caddy.Replacer) string {
				v, _ := repl.GetString(ofHost)
				return hostLabel(v, n)
			},
			canonicalHost,
		}
	}
	if n, ok := cutNumber(name, "http.request.uri.path."); ok { // and from empty segments
		s = spelling{func(r *http.Request, _ *caddy.Replacer) string { return pathSegment(r.URL.Path, n) }, canonicalPath}
	}
	return s
}

// cutNumber returns the number that is all that follows a prefix of a name.
func cutNumber(name, prefix string) (n int, ok bool) {
	text, ok := strings.CutPrefix(name, prefix)
	if !ok {
		return 0, false
	}
	number, err := strconv.ParseUint(text, 10, 16)
	return int(number), err == nil
}

// fieldValue returns the value of a header or query field that may have been sent several
// times: the first one that is not empty. Most upstreams go by the first.
func fieldValue(sent []string) string {
	for _, v := range sent {
		if v = textproto.TrimString(v); v != "" {
			return v
		}
	}
	return ""
}

// cookieValue returns the value of the first cookie with a name. Case counts, as for upstreams,
// unless there is none: Caddy would take any case.
func cookieValue(r *http.Request, name string) (value string) {
	found := false
	for _, c := range r.Cookies() {
		switch {
		case c.Name == name:
			return c.Value
		case !found && strings.EqualFold(c.Name, name):
			value, found = c.Value, true
		}
	}
	return value
}

// TrimFields returns the fields of header that are in names, also those that are trailers
// and were not announced, without white space around their values. That is not part of a
// value (RFC 9110, section 5.5), and HTTP/1 drops it, but what was sent over HTTP/2 and 3
// still has it, and so has what handlers set.
func TrimFields(header, names http.Header) http.Header {
	if len(names) == 0 {
		return nil
	}
	trimmed := make(http.Header, len(names))
	for name := range names {
		name = http.CanonicalHeaderKey(name)
		for _, sent := range [][]string{header[name], header[http.TrailerPrefix+name]} {
			for _, v := range sent {
				trimmed[name] = append(trimmed[name], textproto.TrimString(v))
			}
		}
	}
	return trimmed
}

// canonicalHost returns a host in lower case, without the dot at the end of a full name
// and the brackets of an IPv6 address without a port.
func canonicalHost(host string) string {
	return strings.Trim(strings.TrimRight(strings.ToLower(host), "."), "[]")
}

// canonicalHostPort is canonicalHost for a host with a port, which stays as it is.
func canonicalHostPort(v string) string {
	host, port := strings.ToLower(v), ""
	if i := strings.LastIndexByte(host, ':'); i > strings.LastIndexByte(host, ']') {
		host, port = host[:i], host[i:]
	}
	return strings.TrimRight(host, ".") + strings.TrimSuffix(port, ":")
}

// hostLabel returns the n-th label of a host, counted from the end, as it is in keys, or ""
// if there are not so many.
func hostLabel(host string, n int) string {
	labels := strings.Split(canonicalHost(host), ".")
	if n >= len(labels) {
		return ""
	}
	return labels[len(labels)-1-n]
}

// canonicalPath returns a path, or a part of one, as Caddy's path matchers compare it: in lower
// case, without empty segments and dot segments.
func canonicalPath(v string) string { return caddyhttp.CleanPath(strings.ToLower(v), true) }

// pathSegment returns the n-th segment of a path as it is in keys, or "" if there are not so
// many.
func pathSegment(path string, n int) string {
	segments := strings.Split(strings.Trim(canonicalPath(path), "/"), "/")
	if n >= len(segments) {
		return ""
	}
	return segments[n]
}

// canonicalCredentials returns the value of Authorization with its scheme in lower case,
// and one space behind it (RFC 9110, section 11). What is base64 has several spellings, by its
// unused bits and by what decoders leave out.
func canonicalCredentials(v string) string {
	i := strings.IndexAny(v, " \t")
	if i < 0 {
		return canonicalToken(v)
	}
	scheme, rest := strings.ToLower(v[:i]), textproto.TrimString(v[i:])
	if scheme == "basic" {
		rest = base64.StdEncoding.EncodeToString(decodeBase64(rest))
	} else {
		rest = canonicalToken(rest)
	}
	return strings.TrimSuffix(scheme+" "+rest, " ")
}

// canonicalToken returns a token, as it follows Bearer, DPoP or no scheme at all, as it is,
// and if it is a JWT, with one spelling of the signature, which covers the rest.
func canonicalToken(v string) string {
	if !strings.HasPrefix(v, "ey") || strings.Count(v, ".") != 2 {
		return v
	}
	i := strings.LastIndexByte(v, '.') + 1
	return v[:i] + base64.RawURLEncoding.EncodeToString(decodeBase64(v[i:]))
}

// decodeBase64 returns what lenient decoders make of a text, in either alphabet. What no
// decoder accepts may have any value: no login succeeds with it.
func decodeBase64(text string) []byte {
	text = strings.Map(func(c rune) rune {
		switch {
		case c >= 'A' && c <= 'Z', c >= 'a' && c <= 'z', c >= '0' && c <= '9', c == '+', c == '/':
			return c
		case c == '-':
			return '+'
		case c == '_':
			return '/'
		}
		return -1
	}, text)
	if len(text)%4 == 1 {
		text = text[:len(text)-1]
	}
	decoded, _ := base64.RawStdEncoding.DecodeString(text) // which ignores unused bits
	return decoded
}

// basicUser returns the name in r's Basic credential, or "" if there is none. Nobody has verified
// it. It is set for later handlers too: a placeholder costs nothing where no key has it.
func basicUser(r *http.Request, repl *caddy.Replacer) string {
	credential, basic := strings.CutPrefix(canonicalCredentials(fieldValue(r.Header["Authorization"])), "basic ")
	if !basic {
		return ""
	}
	name, _, complete := strings.Cut(string(decodeBase64(credential)), ":")
	if !complete {
		return ""
	}
	repl.Set(placeholder.BasicUser, name)
	return name
}
