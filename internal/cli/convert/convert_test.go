package convert_test

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	_ "github.com/caddyserver/caddy/v2/modules/standard"

	_ "github.com/seed-387a6c65/caddy-ratelimit" // what is converted must load
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/convert"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/key/keytext"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/configtest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/filetest"
)

var record = flag.Bool("record", false, "write the files that TestConvert compares with")

// convertedFile is the part of a file that convert's tests compare with.
type convertedFile struct{ source, want string }

// convertedFiles returns the files that convert's tests convert.
func convertedFiles(t testing.TB) (files []convertedFile) {
	t.Helper()
	sources, err := filepath.Glob("internal/cli/convert/testdata/*")
	if err != nil || len(sources) == 0 {
		t.Fatalf("found no files: %v", err)
	}
	for _, source := range sources {
		if filepath.Ext(source) != ".want" {
			files = append(files, convertedFile{source, source + ".want"})
		}
	}
	return files
}

// validateConverted validates what convert printed.
func validateConverted(text string) error {
	site := caddyfile.Format([]byte(":8080 {\n@get method GET\n" + text + "respond ok\n}\n"))
	config, warnings, err := caddyconfig.GetAdapter("caddyfile").Adapt(site, map[string]any{"filename": "Caddyfile"})
	if err != nil || len(warnings) > 0 {
		return fmt.Errorf("%w, warnings: %v", err, warnings)
	}
	return configtest.ValidateAsCaddy(config)
}

// TestConvert guards what configurations of other limiters become, and what is noted
// on them; that it is valid, and formatted as Caddy formats it. With -record it writes
// the files it compares with.
func TestConvert(t *testing.T) {
	for _, file := range convertedFiles(t) {
		t.Run(filepath.Base(file.source), func(t *testing.T) {
			text := filetest.Read(t, file.source)
			r, err := convert.Convert(text, nil)
			if err != nil {
				t.Fatal(err)
			}
			got := r.Text + "----------\n"
			for _, note := range r.Notes {
				got += note.String() + "\n"
			}
			if *record {
				filetest.Write(t, file.want, []byte(got))
			}
			want := filetest.Read(t, file.want)
			if got != string(want) {
				t.Errorf("got\n%s\nwant\n%s", got, want)
			}
			if err := validateConverted(r.Text); err != nil {
				t.Errorf("%v\n%s", err, r.Text)
			}
			if formatted := caddyfile.Format([]byte(r.Text)); !bytes.Equal(formatted, []byte(r.Text)) {
				t.Errorf("got\n%s\nformatted it is\n%s", r.Text, formatted)
			}
		})
	}
}

// TestConvertRefuses guards the one line that convert says to what it can't convert.
func TestConvertRefuses(t *testing.T) {
	envoy := func(text string) string { return "domain: a\ndescriptors:\n- " + text }
	limit := func(text string) string { return envoy("key: a\n  rate_limit: {" + text + "}") }
	var bomb, deep, wild strings.Builder
	bomb.WriteString("domain: a\ndescriptors:\n- key: k0\n  descriptors: &d0 [{key: a}, {key: b}, {key: c}, {key: d}]\n")
	for i := range 12 {
		fmt.Fprintf(&bomb, "- key: k%d\n  descriptors: &d%d [", i+1, i+1)
		for _, key := range "abcd" {
			fmt.Fprintf(&bomb, "{key: %c, descriptors: *d%d}, ", key, i)
		}
		bomb.WriteString("]\n")
	}
	deep.WriteString(envoy("key: a\n"))
	for i := range 40 {
		indent := strings.Repeat(" ", 2*i+2)
		deep.WriteString(indent + "descriptors:\n" + indent + "- key: a\n")
	}
	wild.WriteString("domain: a\ndescriptors:\n")
	for i := range 101 {
		fmt.Fprintf(&wild, "- {key: a, value: '%d*'}\n", i)
	}
	tests := []struct{ text, want string }{
		{"", "domain: none given; use one, and its descriptors"},
		{"a: b: c", "yaml: "},
		{"\x00", "yaml: "},
		{"- a", "line 1: configuration: not valid; use fields with values"},
		{"descriptors: []", "line 1: domain: none given; use one"},
		{"domain: [a]", "line 1: domain: not valid; use one value"},
		{"domain: a\n---\ndomain: a", `domain: "a" is given twice; use each domain once`},
		{"domain: a\nDomain: b", `line 2: configuration: "domain" is given twice; use it once`},
		{"domain: a\nlimits: []", `line 2: configuration: unknown field "limits"; use one of domain, descriptors`},
		{"domain: a\ndescriptors: {}", "line 2: descriptors: not valid; use a list"},
		{envoy("[]"), "line 3: descriptor: not valid; use fields with values"},
		{envoy("value: a"), "line 3: key: none given; use one in each descriptor"},
		{envoy("ley: a"), `line 3: descriptor: unknown field "ley"; use one of key, value, `},
		{envoy("key: a\n- key: a"), `line 4: descriptors: key "a" with value "" is given twice; use it once`},
		{envoy("{key: a, shadow_mode: maybe}"), `line 3: shadow_mode: "maybe" is not valid; use true or false`},
		{limit("unit: day"), "line 4: requests_per_unit: none given; use a number"},
		{limit("unit: day, requests_per_unit: -1"), `line 4: requests_per_unit: "-1" is not valid; use a whole number below 2^32`},
		{limit("unit: day, requests_per_unit: 4294967296"), `requests_per_unit: "4294967296" is not valid; use a whole number below 2^32`},
		{limit("unit: fortnight, requests_per_unit: 1"), `unit: "fortnight" is not valid; use second, minute, hour, day, week, month or year`},
		{limit("unlimited: true, unit: day"), "unlimited: can't be combined with unit or requests_per_unit; use it alone"},
		{limit("unit: day, requests: 1"), `line 4: rate_limit: unknown field "requests"; use one of unit, `},
		{limit("replaces: a"), "line 4: replaces: not valid; use a list of names"},
		{limit("replaces: [{id: a}]"), `line 4: replaces: unknown field "id"; use name`},
		{"domain: d\ndescriptors: [&a {<<: [*a, *a]}]", "too many fields; use at most 20000 in all"},
		{limit("<<: 5"), "line 4: rate_limit: not valid; use fields with values"},
		{"---\n---\n", "domain: none given; use one, and its descriptors"},
		{deep.String(), "descriptors: nested too deeply; use at most 32 within each other"},
		{bomb.String(), "too many fields; use at most 20000 in all"},
		{wild.String(), `line 103: descriptors: too many values with *; use at most 100 for key "a"`},
	}
	for _, tc := range tests {
		r, err := convert.Envoy([]byte(tc.text), nil)
		if err == nil || !strings.Contains(err.Error(), tc.want) || keytext.Safe(err.Error()) != err.Error() {
			t.Errorf("%.200q: got %v, %v, want an error in one line with %s", tc.text, r, err, tc.want)
		}
	}
}

// TestConvertTakes guards what else is converted without a note, and to what: what
// other limiters take too, although it is seldom written that way.
func TestConvertTakes(t *testing.T) {
	limit := func(rateLimit string) string {
		return "domain: d\ndescriptors:\n- key: path\n  value: /a\n  rate_limit: {" + rateLimit + "}\n"
	}
	for _, tc := range []struct{ text, want string }{
		{limit("unit: day, requests_per_unit: 0x10"), "size 16\n"},
		{limit("unit: day, requests_per_unit: 020"), "size 16\n"},
		{limit("unit: day, requests_per_unit: 1_000"), "size 1000\n"},
		{limit(`unit: day, requests_per_unit: "10"`), "size 10\n"},
		{"---\n" + limit("unit: day, requests_per_unit: 10") + "---\n---\n", "size 10\n"},
		{"domain: d\ndescriptors:\n- key: path\n  value: /a\n  rate_limit: &a {unit: day, requests_per_unit: 10}\n" +
			"- key: path\n  value: /b\n  rate_limit: {<<: *a, requests_per_unit: 11}\n", "size 11\n\t\twindow 1d\n"},
		{"domain: d\ndescriptors:\n- key: path\n  value: /a\n  rate_limit: &a {unit: day, requests_per_unit: 10}\n" +
			"- key: path\n  value: /b\n  rate_limit: {<<: [{unit: hour}, *a]}\n", "size 10\n\t\twindow 1h\n"},
	} {
		r, err := convert.Envoy([]byte(tc.text), nil)
		if err != nil || len(r.Notes) > 0 {
			t.Errorf("%s\ngot %v, %v", tc.text, r, err)
			continue
		}
		compact := strings.Join(strings.Fields(r.Text), " ")
		if !strings.Contains(r.Text, tc.want) && !strings.Contains(compact, tc.want) {
			t.Errorf("%s\ngot %s\nwant %s in it", tc.text, r.Text, tc.want)
		}
		if err := validateConverted(r.Text); err != nil {
			t.Errorf("%s\ngot %s\n%v", tc.text, r.Text, err)
		}
	}
}

// configMapOf is a ConfigMap with files in it.
func configMapOf(files string) string {
	return "apiVersion: v1\ndata:\n" + files + "kind: ConfigMap\nmetadata:\n  name: ratelimit\n"
}

// TestConvertConfigMap guards that a configuration is found in a ConfigMap, alone, in a
// list or next to other objects, in YAML and in JSON, and that notes and errors tell the
// lines of the whole file.
func TestConvertConfigMap(t *testing.T) {
	const (
		config = "domain: d\ndescriptors:\n- key: path\n  value: /a\n  shadow_mode: %s\n  rate_limit: {unit: day, requests_per_unit: 5}\n"
		limit  = "\t\tmatch vars {path} /a\n\t\tkey all\n\t\talgorithm fixed_window\n\t\tsize 5\n\t\twindow 1d\n"
	)
	indented := func(text, by string) string {
		return by + strings.ReplaceAll(strings.TrimSpace(text), "\n", "\n"+by) + "\n"
	}
	file := func(shadow string) string {
		return "  config.yaml: |\n" + indented(fmt.Sprintf(config, shadow), "    ")
	}
	inJSON := fmt.Sprintf(`{"apiVersion": "v1", "kind": "ConfigMap", "data": {"a": %q}}`, fmt.Sprintf(config, "false"))
	for _, tc := range []struct{ name, text, notes, err string }{
		{"alone", configMapOf(file("false")), "", ""},
		{"JSON", inJSON, "", ""},
		{"folded quotes", configMapOf(fmt.Sprintf("  a: %q\n", fmt.Sprintf(config, "false"))), "", ""},
		{"in a list", "apiVersion: v1\nkind: List\nitems:\n- " + strings.TrimSpace(indented(configMapOf(file("false")), "  ")) + "\n", "", ""},
		{"between other objects", "apiVersion: v1\nkind: Service\n---\n" + configMapOf(file("false")), "line 1: kind: the Service is left out, as only a ConfigMap may hold limits.", ""},
		{"with other files", configMapOf("  a.properties: x=y\n  envoy.yaml: |\n    x:\n      domain: a\n" + file("false")),
			"line 3: a.properties: the file is left out, as it has no domain.\nline 4: envoy.yaml: the file is left out, as it has no domain.", ""},
		{"a dry run", configMapOf(file("true")), "", ""},
		{"a note", configMapOf(strings.Replace(file("true"), "shadow_mode", "quota_mode", 1)),
			"line 6: quota_mode: the limit of path=/a (5/day) is left out, as limits here deny one by one.", ""},
		{"an error", configMapOf(file("maybe")), "", `config.yaml: line 8: shadow_mode: "maybe" is not valid; use true or false`},
		{"two files of one domain", configMapOf(file("false") + strings.Replace(file("false"), "config", "b", 1)), "", `b.yaml: line 11: domain: "d" is given twice; use each domain once`},
		{"no file", configMapOf("  a: b\n"), "", "domain: none given; use one, and its descriptors"},
		{"another object alone", "apiVersion: gateway.envoyproxy.io/v1alpha1\nkind: BackendTrafficPolicy\nspec: {}\n", "",
			"kind: a BackendTrafficPolicy is not valid; use the configuration of envoyproxy/ratelimit, or a ConfigMap with it"},
		{"a list of files", "apiVersion: v1\nkind: ConfigMap\ndata: [a]\n", "", "data: not valid; use files by their names"},
		{"a list in a list", "apiVersion: v1\nkind: List\nitems:\n- apiVersion: v1\n  kind: List\n  items: [a]\n", "", "line 4: items: not valid; use objects of Kubernetes"},
		{"YAML that is not valid", configMapOf("  a: |\n    domain: b: c\n"), "", "a: yaml: "},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r, err := convert.Envoy([]byte(tc.text), nil)
			if tc.err != "" {
				if err == nil || !strings.Contains(err.Error(), tc.err) || strings.Contains(err.Error(), "\n") {
					t.Errorf("got %v, %v, want an error with %s", r, err, tc.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			var notes []string
			for _, n := range r.Notes {
				notes = append(notes, n.String())
			}
			if got := strings.Join(notes, "\n"); got != tc.notes {
				t.Errorf("got notes %s, want %s", got, tc.notes)
			}
			if strings.Contains(r.Text, limit) == strings.Contains(tc.notes, "quota_mode") {
				t.Errorf("got\n%s", r.Text)
			}
			if err := validateConverted(r.Text); err != nil {
				t.Errorf("%v\n%s", err, r.Text)
			}
		})
	}
}

// TestConvertNotes guards that fields which limit nothing are noted with their line, and
// that the limits around them are converted.
func TestConvertNotes(t *testing.T) {
	const text = "name: n\nmetadata: {a: [b]}\ndomain: d\nx-anchor: &a {unit: day, requests_per_unit: 5}\ndescriptors:\n" +
		"- key: path\n  value: /a\n  metadata:\n    owner: team\n  name: b\n  rate_limit:\n    <<: *a\n    shadow_mode: true\n    description: c\n"
	r, err := convert.Envoy([]byte(text), nil)
	if err != nil {
		t.Fatal(err)
	}
	var notes strings.Builder
	for _, n := range r.Notes {
		notes.WriteString(n.String() + "\n")
	}
	const want = `line 1: name: it is left out, as it has no effect in a configuration.
line 2: metadata: it is left out, as it does not limit.
line 4: x-anchor: it is left out, as it does not limit.
line 8: metadata: it is left out, as it does not limit.
line 10: name: it is left out, as it has no effect in a descriptor.
line 13: shadow_mode: it is left out, as it has no effect in a rate_limit.
line 14: description: it is left out, as it does not limit.
`
	if notes.String() != want {
		t.Errorf("got\n%swant\n%s", notes.String(), want)
	}
	if !strings.Contains(r.Text, "\t\tsize 5\n\t\twindow 1d\n") {
		t.Errorf("got\n%s", r.Text)
	}
	if err := validateConverted(r.Text); err != nil {
		t.Errorf("%v\n%s", err, r.Text)
	}
}

// TestConvertMapping guards which mappings of descriptors are taken.
func TestConvertMapping(t *testing.T) {
	for _, text := range []string{"a", "a=", "={b}", "a=b", "a={b", "a={b}{c}", "a={$B}", "a={b c}", "a={`}", "a={}", "a={b\n}"} {
		if err := make(convert.Mapping).Add(text); err == nil || !strings.HasPrefix(err.Error(), "descriptor: "+strconv.Quote(text)) {
			t.Errorf("%q: got %v", text, err)
		}
	}
	m := make(convert.Mapping)
	if err := m.Add("a={b.c}"); err != nil || m["a"] != "{b.c}" {
		t.Errorf("got %v, %v", m, err)
	}
	if err := m.Add("a={d}"); err == nil {
		t.Error("a key is taken twice")
	}
	_, err := convert.Envoy([]byte("domain: d\ndescriptors: [{key: b}]"), m)
	if err == nil || err.Error() != `descriptor: no limit has the key "a"; use a key that the configuration has` {
		t.Errorf("a key that the configuration lacks: got %v", err)
	}
}

// FuzzConvert feeds convert what its users may have. What it prints is valid: it
// neither fails to load nor brings anything but limits along.
func FuzzConvert(f *testing.F) {
	for _, file := range convertedFiles(f) {
		text, err := os.ReadFile(file.source)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(string(text))
	}
	f.Add("domain: a\ndescriptors: [{key: 'a\"`', value: '{$HOME}', rate_limit: {unit: day, requests_per_unit: 1}}]")
	f.Add("domain: a\ndescriptors: &a [{key: b, descriptors: *a}]")
	f.Add("schema: {a: &a {limits: [0, 1000000, 1], children: {b: {limits: [1, 2, 3]}, '*': &b {children: {c: *a}}, \"d\\n}\": *b}}, '*': *b}")
	f.Add("{\n\t\"schema\": {\"`\\\\ {$HOME}\": {\"limits\": [\"4294967295\", 3, 1], \"x-\": 1}}, \"labels\": []}")
	f.Fuzz(func(t *testing.T, text string) {
		r, err := convert.Convert([]byte(text), nil)
		if err != nil {
			if strings.ContainsAny(err.Error(), "\r\n") {
				t.Fatalf("the error has several lines: %q", err)
			}
			return
		}
		tokens, err := caddyfile.Tokenize([]byte(r.Text), "Caddyfile")
		if err != nil {
			t.Fatal(err)
		}
		depth := 0
		for i, token := range tokens {
			switch first := i == 0 || tokens[i-1].Line < token.Line; {
			case !token.Quoted() && token.Text == "{":
				depth++
			case !token.Quoted() && token.Text == "}":
				depth--
			case depth == 0 && first && token.Text != "rate_limit":
				t.Fatalf("got %q outside of a block:\n%s", token.Text, r.Text)
			}
		}
		if err := validateConverted(r.Text); err != nil {
			t.Fatalf("%v\n%s", err, r.Text)
		}
	})
}

// TestConvertKeysWithoutCase guards that common keys of descriptors are known however they
// are written.
func TestConvertKeysWithoutCase(t *testing.T) {
	for key, want := range map[string]string{
		"REMOTE_ADDRESS": "{client_ip}", "Remote_Address": "{client_ip}", "PATH": "{path}", "METHOD": "{method}", "Host": "{host}",
		"USER_AGENT": "{header.User-Agent}",
	} {
		r, err := convert.Envoy([]byte("domain: d\ndescriptors:\n- key: "+key+"\n  rate_limit: {unit: day, requests_per_unit: 5}\n"), nil)
		if err != nil || !strings.Contains(r.Text, "key "+want+"\n") || len(r.Notes) > 0 {
			t.Errorf("%s: got %+v, %v, want the key %s", key, r, err, want)
		}
	}
}
