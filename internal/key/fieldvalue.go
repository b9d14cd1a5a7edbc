package key

import (
	"net/http"
	"net/textproto"
	"strings"
)

// HTTP lets one value be written in several ways. An upstream sees one, so it is one key,
// and a client that goes through all of them has one bucket.

// fieldValue returns the value of a header field that may have been sent several times:
// the first one that is not empty. Most upstreams go by the first.
func fieldValue(sent []string) string {
	for _, v := range sent {
		if v = textproto.TrimString(v); v != "" {
			return v
		}
	}
	return ""
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

// hostLabel returns the n-th label of a host, counted from the end, as it is in keys, or ""
// if there are not so many.
func hostLabel(host string, n int) string {
	labels := strings.Split(canonicalHost(host), ".")
	if n >= len(labels) {
		return ""
	}
	return labels[len(labels)-1-n]
}

// canonicalCredentials returns the value of Authorization with its scheme in lower case,
// and one space behind it (RFC 9110, section 11). A value without a scheme stays as it is.
func canonicalCredentials(v string) string {
	i := strings.IndexAny(v, " \t")
	if i < 0 {
		return v
	}
	return strings.ToLower(v[:i]) + " " + textproto.TrimString(v[i:])
}
