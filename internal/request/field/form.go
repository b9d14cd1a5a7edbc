package field

import (
	"bytes"
	"encoding/hex"
)

// scanForm finds a field in a form that is written like a query, given whether it is one by its type: some
// upstreams take whatever they get for a form. Some take ; for &, so a value that ends with one is unclear,
// and some of Microsoft's take %u0065 for e.
func scanForm(text []byte, w *Wanted, v *value, meant bool) {
	for pairs := range bytes.SplitSeq(text, []byte("&")) {
		for len(pairs) > 0 && !v.unclear {
			pair, rest, cut := bytes.Cut(pairs, []byte(";"))
			pairs = rest
			name, sent, given := bytes.Cut(pair, []byte("="))
			if given {
				scanPair(name, sent, w, v, !cut, meant)
			}
		}
	}
}

// scanPair looks at a name and a value of a form, given whether the value is all that some upstreams read.
func scanPair(name, sent []byte, w *Wanted, v *value, all, meant bool) {
	var space [maxName]byte
	name, valid := unescape(name[:min(len(name), 16*maxName)]) // longer ones are not compared
	switch _, m := w.follow(space[:0], name); {
	case m != other:
		sent, valid = unescape(sent)
		v.addMatched(m, sent, valid && all)
	case meant && !valid && bytes.Contains(bytes.ToLower(name), []byte("%u")):
		v.unclear = true
	}
}

// unescape returns a part of a form without its escapes, and whether all of these are valid. Upstreams leave
// others as they are.
func unescape(part []byte) (text []byte, valid bool) {
	if bytes.IndexByte(part, '%') < 0 && bytes.IndexByte(part, '+') < 0 {
		return part, true
	}
	text, valid = make([]byte, 0, len(part)), true
	for i := 0; i < len(part); i++ {
		c := part[i : i+1]
		if c[0] == '+' {
			c = []byte(" ")
		}
		if c[0] == '%' {
			var decoded [1]byte
			if n, err := hex.Decode(decoded[:], part[i+1:min(i+3, len(part))]); n == 1 && err == nil {
				c, i = decoded[:], i+2
			} else {
				valid = false
			}
		}
		text = append(text, c...)
	}
	return text, valid
}
