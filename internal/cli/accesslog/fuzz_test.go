package accesslog

import (
	"bytes"
	"testing"
)

// FuzzCaddyLine guards that no line makes the parser panic, and that what it accepts is a request.
func FuzzCaddyLine(f *testing.F) {
	f.Add([]byte(caddyLog))
	f.Add([]byte(`{"ts":1,"request":{"method":"A","uri":"/","headers":{"A":[],"B":["\u00e4","\n"]},"tls":{}},"duration":-1.5,"x":[1,{"y":true}]}`))
	f.Fuzz(func(t *testing.T, line []byte) {
		var e Entry
		d := dialect{format: Caddy, exact: true, unit: second}
		if d.parseCaddy(line, &e) == Used && (e.Method == "" || e.URI == "" || e.End < earliest || e.Arrival > e.End) {
			t.Errorf("used: %+v", e)
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
		detectWrapper(text)
	})
}
