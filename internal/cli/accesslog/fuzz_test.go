package accesslog

import (
	"bytes"
	"maps"
	"net/url"
	"reflect"
	"slices"
	"testing"
)

// FuzzCaddyLine guards that the scanner reads of a line what encoding/json does,
// or leaves it to that.
func FuzzCaddyLine(f *testing.F) {
	f.Add([]byte(caddyLog))
	f.Add([]byte(`{"ts":1,"request":{"method":"A","uri":"/","headers":{"A":[],"B":["\u00e4","\n"]},"tls":{}},"duration":-1.5,"x":[1,{"y":true}]}`))
	f.Add([]byte(`{"size":5,"size":"x","resp_headers":{"A":["b"]},"resp_headers":[true],"request":{}}`))
	f.Add([]byte(`{"request":{"headers":{"A":["b"],"A":[]}}}`))
	f.Add([]byte(`{"request":{"uri":"/?a\u0026\u003c\u007F","host":"\u00e4","proto":"\u00g0","headers":{}}}`))
	f.Fuzz(func(t *testing.T, line []byte) {
		var fast, slow Entry
		var fastLine, slowLine caddyLine
		if !plainText(line) || !(&scanner{text: string(line)}).line(&fast, &fastLine) {
			return
		}
		if reason := decode(line, &slow, &slowLine); reason != Used {
			t.Fatalf("the scanner read a line that is %v", reason)
		}
		if fastLine != slowLine {
			t.Errorf("got  %+v\nwant %+v", fastLine, slowLine)
		}
		if got, want := headerOf(&fast), headerOf(&slow); !maps.EqualFunc(got, want, slices.Equal) {
			t.Errorf("got  %q\nwant %q", got, want)
		}
		for _, e := range []*Entry{&fast, &slow} {
			e.fields, e.values, e.Redacted = nil, nil, nil
		}
		if !reflect.DeepEqual(fast, slow) {
			t.Errorf("got  %+v\nwant %+v", fast, slow)
		}
	})
}

// FuzzCommonLine guards that no line makes the parser panic, and that what it
// accepts is a request.
func FuzzCommonLine(f *testing.F) {
	f.Add([]byte(commonLog), false)
	f.Add([]byte(combinedLog), true)
	f.Fuzz(func(t *testing.T, line []byte, combined bool) {
		d := dialect{format: Common}
		if combined {
			d.format = Combined
		}
		var e Entry
		if d.parseCLF(line, &e, new(clfClock)) == Used && (e.Method == "" || e.URI == "" || e.End < earliest) {
			t.Errorf("used: %+v", e)
		}
	})
}

// FuzzURI guards that simple URIs are read as net/url reads them.
func FuzzURI(f *testing.F) {
	for _, uri := range []string{"/", "/a/b?c=d", "//host/x?y", "/%41?%zz", "/a?", "/a?b?c", "/a:b", "/..;/"} {
		f.Add(uri)
	}
	f.Fuzz(func(t *testing.T, uri string) {
		e := Entry{URI: uri}
		if !e.setSimpleURI() {
			return
		}
		want, err := url.ParseRequestURI(uri)
		if err != nil || e.URL != *want {
			t.Errorf("got %+v, want %+v, %v", e.URL, want, err)
		}
	})
}

// FuzzUnwrap guards that no lines make the unwrapping panic, and that it adds nothing
// to them but ends of lines.
func FuzzUnwrap(f *testing.F) {
	for w, line := range map[wrapper]string{
		dockerJSON: `{"log":"a\n","stream":"stdout"}`, journalJSON: `{"MESSAGE":[97,10]}`,
		criText: "t stdout P a\nt stdout F b", prefixText: `x {"a":1}`,
	} {
		f.Add(uint8(w), []byte(line))
	}
	f.Fuzz(func(t *testing.T, w uint8, text []byte) {
		u := unwrapper{wrapper: wrapper(w % 5)}
		got := u.unwrap(bytes.Clone(text), true)
		if most := 2*len(text) + 2; len(got) > most { // what is not UTF-8 becomes longer in JSON
			t.Errorf("%d bytes became %d", len(text), len(got))
		}
		wrapperOf(text)
	})
}
