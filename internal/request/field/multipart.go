package field

import (
	"bytes"
	"regexp"
	"strings"
)

// scanMultipart finds a field in the parts of a form. In one that is not written as browsers and
// usual clients do it is unclear: parsers differ in where a part begins and ends, and in what is a
// file.
func scanMultipart(text []byte, boundary string, w *Wanted, v *value) {
	dash := []byte("--" + boundary)
	text, ok := bytes.CutPrefix(text, dash)
	for ok && !v.unclear {
		if rest, last := bytes.CutPrefix(text, []byte("--")); last {
			v.unclear = len(rest) > 0 && string(rest) != "\r\n"
			return
		}
		text, ok = bytes.CutPrefix(text, []byte("\r\n"))
		part, rest, found := bytes.Cut(text, dash)
		part, ends := bytes.CutSuffix(part, []byte("\r\n"))
		ok = ok && found && ends && scanPart(part, w, v)
		text = rest
	}
	v.unclear = true
}

// scanPart looks at a part, and reports whether it is written as clients do.
func scanPart(part []byte, w *Wanted, v *value) bool {
	head, content, ok := bytes.Cut(part, []byte("\r\n\r\n"))
	var name []byte
	file, ascii := false, false
	seen := make(map[string]bool, 2)
	for line := range strings.SplitSeq(string(head), "\r\n") {
		key, of, _ := strings.Cut(line, ":")
		key, of = strings.ToLower(key), strings.TrimSpace(of)
		if !ok || seen[key] || strings.ContainsAny(line, "\r\n\x00") {
			return false
		}
		seen[key] = true
		switch key {
		case "content-disposition":
			name, file, ok = disposition(of)
		case "content-type":
			t := parseType(of)
			ascii, ok = t.ascii, t.valid && !strings.HasPrefix(t.name, "multipart/")
		case "content-transfer-encoding":
			of = strings.ToLower(of)
			ok = of == "7bit" || of == "8bit" || of == "binary"
		default:
			ok = key == "content-length"
		}
	}
	if !ok || !seen["content-disposition"] || strings.EqualFold(string(name), "_charset_") {
		return false
	}
	var space [maxName]byte
	if _, m := w.follow(space[:0], name); m != other {
		v.addMatched(m, content, !file && (!ascii || !mayNotBeASCII(content)))
	}
	return true
}

// clientsDisposition is how clients write the Content-Disposition of a part. With "=" in a name, it may be one of
// RFC 2047, which Tomcat decodes, and in that of a file another parameter to parsers that ignore quotes.
var clientsDisposition = regexp.MustCompile(
	`^form-data; ?name=(?:"([^"\\=]+)"|([\w.-]+))(; ?filename=(?:"[^"\\=]*"|[\w.-]+)(?:; ?filename\*=[^;"\\= ]+)?)?$`)

// disposition returns the name in a Content-Disposition, whether the part is a file, and whether it is
// written as clients do.
func disposition(text string) (name []byte, file, ok bool) {
	found := clientsDisposition.FindStringSubmatch(text)
	if found == nil {
		return nil, false, false
	}
	name = []byte(found[1] + found[2])
	if decoded, valid := unescape(name); valid { // browsers escape quotes
		name = decoded
	}
	return name, found[3] != "", true
}
