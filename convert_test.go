package ratelimit

import (
	"bytes"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.yaml.in/yaml/v3"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/convert"
)

// convertedFile is the part of a file that convert's tests compare with.
type convertedFile struct{ source, want string }

// convertedFiles returns the files that convert's tests convert.
func convertedFiles(t testing.TB) (files []convertedFile) {
	t.Helper()
	sources, err := filepath.Glob("testdata/convert/*")
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
	if strings.HasPrefix(text, "{") {
		return validateConfig([]byte(text))
	}
	config, err := adaptCaddyfile(string(caddyfile.Format([]byte(":8080 {\n@get method GET\n" + text + "respond ok\n}\n"))))
	if err != nil {
		return err
	}
	return validateConfig(config)
}

// TestConvert guards what configurations of other limiters become, and what is noted
// on them; that it is valid, and formatted as Caddy formats it. With -record it writes
// the files it compares with.
func TestConvert(t *testing.T) {
	for _, file := range convertedFiles(t) {
		t.Run(filepath.Base(file.source), func(t *testing.T) {
			text, err := os.ReadFile(file.source)
			if err != nil {
				t.Fatal(err)
			}
			r, err := convertFrom(formatOf(file.source, text), file.source, text, nil)
			if err != nil {
				t.Fatal(err)
			}
			got := r.Text + "----------\n"
			for _, note := range r.Notes {
				got += note.String() + "\n"
			}
			if *recordSession {
				if err := os.WriteFile(file.want, []byte(got), 0o644); err != nil { //nolint:gosec // it is no secret
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file.want)
			if err != nil {
				t.Fatal(err)
			}
			if got != string(want) {
				t.Errorf("got\n%s\nwant\n%s", got, want)
			}
			if err := validateConverted(r.Text); err != nil {
				t.Errorf("%v\n%s", err, r.Text)
			}
			if formatted := caddyfile.Format([]byte(r.Text)); !bytes.Equal(formatted, []byte(r.Text)) && filepath.Ext(file.source) != ".json" {
				t.Errorf("got\n%s\nformatted it is\n%s", r.Text, formatted)
			}
		})
	}
}

// envoyDescriptor is a descriptor of envoyproxy/ratelimit, as its service reads it.
type envoyDescriptor struct {
	Key, Value     string
	ShareThreshold bool `yaml:"share_threshold"`
	RateLimit      *struct {
		Unit      string
		Requests  int `yaml:"requests_per_unit"`
		Unlimited bool
	} `yaml:"rate_limit"`
	Descriptors []envoyDescriptor
}

// envoyService is a model of envoyproxy/ratelimit, told from its documentation: it
// looks up a limit for each descriptor of a request and counts in fixed windows.
type envoyService struct {
	descriptors []envoyDescriptor
	counts      map[string]int
}

// find returns the descriptor for an entry: that of its value, else the first with
// a wildcard for it, else the one without a value.
func (*envoyService) find(list []envoyDescriptor, key, value string) *envoyDescriptor {
	var wild, rest *envoyDescriptor
	for i := range list {
		switch d := &list[i]; {
		case d.Key != key:
		case d.Value == value:
			return d
		case d.Value == "":
			rest = d
		case strings.Contains(d.Value, "*") && wild == nil:
			pattern := strings.ReplaceAll(regexp.QuoteMeta(d.Value), `\*`, ".*")
			if regexp.MustCompile("^" + pattern + "$").MatchString(value) {
				wild = d
			}
		}
	}
	if wild != nil {
		return wild
	}
	return rest
}

// paths returns the keys of all descriptors that have limits: the routes send a
// descriptor for each.
func (e *envoyService) paths(list []envoyDescriptor, before []string) map[string][]string {
	paths := make(map[string][]string)
	for _, d := range list {
		path := append(slices.Clone(before), d.Key)
		if d.RateLimit != nil {
			paths[strings.Join(path, "|")] = path
		}
		maps.Copy(paths, e.paths(d.Descriptors, path))
	}
	return paths
}

// admits counts a request with the given values, and reports whether it is admitted.
func (e *envoyService) admits(values map[string]string, now time.Duration) bool {
	admitted := true
	for _, path := range e.paths(e.descriptors, nil) {
		list, counter := e.descriptors, ""
		for i, key := range path {
			if values[key] == "" {
				break // the route sends no such descriptor
			}
			d := e.find(list, key, values[key])
			if d == nil {
				break
			}
			value := values[key]
			if d.ShareThreshold {
				value = d.Value
			}
			counter += key + "=" + value + "|"
			list = d.Descriptors
			if i < len(path)-1 || d.RateLimit == nil || d.RateLimit.Unlimited {
				continue
			}
			unit := map[string]time.Duration{
				"second": time.Second, "minute": time.Minute, "hour": time.Hour, "day": 24 * time.Hour,
				"week": 7 * 24 * time.Hour, "month": 30 * 24 * time.Hour, "year": 365 * 24 * time.Hour,
			}[d.RateLimit.Unit]
			counter += fmt.Sprint(now / unit)
			e.counts[counter]++
			admitted = admitted && e.counts[counter] <= d.RateLimit.Requests
		}
	}
	return admitted
}

// TestConvertedLimitsDecideAsEnvoy guards that the limits that are made of a
// configuration for Envoy admit and deny as its service does: nested ones, values in
// full and with stars, exceptions, shared counters and windows of every length.
func TestConvertedLimitsDecideAsEnvoy(t *testing.T) {
	const config = `
domain: messaging
descriptors:
  - key: type
    value: marketing
    rate_limit: {unit: second, requests_per_unit: 3}
    descriptors:
      - key: to
        rate_limit: {unit: day, requests_per_unit: 5}
  - key: type
    value: quiet
  - key: type
    rate_limit: {unit: minute, requests_per_unit: 6}
  - key: to
    rate_limit: {unit: week, requests_per_unit: 2}
  - key: to
    value: "206-1"
    rate_limit: {unlimited: true}
  - key: to
    value: "206*"
    rate_limit: {unit: month, requests_per_unit: 6}
  - key: to
    value: "2*7"
    share_threshold: true
    rate_limit: {unit: year, requests_per_unit: 120}
  - key: tenant
    value: "*"
    rate_limit: {unit: hour, requests_per_unit: 3}
  - key: remote_address
    rate_limit: {unit: hour, requests_per_unit: 25}
    descriptors:
      - key: path
        rate_limit: {unit: minute, requests_per_unit: 12}
      - key: path
        value: /{free} "b"
        rate_limit: {unit: minute, requests_per_unit: 2}
`
	var root struct{ Descriptors []envoyDescriptor }
	if err := yaml.Unmarshal([]byte(config), &root); err != nil {
		t.Fatal(err)
	}
	r, err := convert.Envoy([]byte(config), convert.Mapping{"type": "{header.X-Type}", "to": "{query.to}", "tenant": "{header.X-Tenant}"})
	if err != nil || len(r.Notes) > 0 {
		t.Fatal(err, r.Notes)
	}
	s := startSite(t, r.Text+"respond ok")
	e := &envoyService{descriptors: root.Descriptors, counts: make(map[string]int)}
	random := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // a test
	pick := func(texts ...string) string { return texts[random.IntN(len(texts))] }
	denied := 0
	for i := range 4000 {
		steps := []time.Duration{0, 0, 0, 0, 0, 200 * ms, 900 * ms, 20 * time.Second, 20 * time.Minute, 20 * time.Hour, 200 * time.Hour}
		s.clock.advance(steps[random.IntN(len(steps)-i%5)])
		values := map[string]string{
			"type":           pick("", "marketing", "marketing", "quiet", "news"),
			"to":             pick("", "206-1", "206-2", "206-7", "257", "297", "9"),
			"tenant":         pick("", "a", "b"),
			"remote_address": pick("127.0.0.1", "127.0.0.2"),
			"path":           pick("/a", "/b", `/{free} "b"`),
		}
		s.from(values["remote_address"])
		a := s.get(strings.ReplaceAll(values["path"], " ", "%20")+"?to="+values["to"], "X-Type: "+values["type"], "X-Tenant: "+values["tenant"])
		status := 429
		if e.admits(values, s.clock.read()) {
			status = 200
		} else {
			denied++
		}
		if a.StatusCode != status {
			t.Fatalf("request %d at %v, %v: got %d, want %d", i+1, s.clock.read(), values, a.StatusCode, status)
		}
	}
	if denied < 400 || denied > 3600 {
		t.Errorf("%d of 4000 requests were denied; the test says little", denied)
	}
}

// TestConvertedZones guards whom the limits made of zones apply to, in which order
// they are asked, and when they deny: any of several matchers, the zone's key, its
// events in a window. The fields of a response are those of a zone.
func TestConvertedZones(t *testing.T) {
	r, err := convert.MholtCaddyfile([]byte(`:8080
rate_limit /limited/* {
	zone login {
		match {
			method POST
			path /limited/in
		}
		match {
			header X-Login *
		}
		key {header.X-User}
		events 2
		window 10s
	}
	zone all {
		events 5
		window 1h
	}
}`))
	if err != nil || len(r.Notes) > 0 {
		t.Fatal(err, r)
	}
	s := startSite(t, r.Text+"respond ok")
	s.run(
		step{path: "/elsewhere", header: []string{"X-Login: 1"}, want: "200"},
		step{path: "/limited/in", header: []string{"X-User: a"}, want: "200"}, // GET
		step{path: "/limited/in", method: "POST", header: []string{"X-User: a"}, want: "200"},
		step{path: "/limited/out", header: []string{"X-User: a", "X-Login: 1"}, want: "200"},
		step{path: "/limited/in", method: "POST", header: []string{"X-User: a"}, want: "429 retry-after=10"},
		step{path: "/limited/in", method: "POST", header: []string{"X-User: b"}, want: "200"},
		step{path: "/limited/in", method: "POST", header: []string{"X-User: a"}, after: 5 * time.Second, want: "429 retry-after=5"},
		step{path: "/limited/x", want: "200"},
		step{path: "/limited/x", want: "429 retry-after=3595"},
	)
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
	tests := []struct{ format, text, want string }{
		{"envoy", "", "domain: got none, want one, and its descriptors"},
		{"envoy", "a: b: c", "yaml: "},
		{"envoy", "\x00", "yaml: "},
		{"envoy", "- a", "line 1: configuration: want fields with values"},
		{"envoy", "descriptors: []", "line 1: domain: got none, want one"},
		{"envoy", "domain: [a]", "line 1: domain: want one value"},
		{"envoy", "domain: a\n---\ndomain: a", `domain: got "a" twice, want each domain once`},
		{"envoy", "domain: a\nDomain: b", `line 2: configuration: got "domain" twice, want it once`},
		{"envoy", "domain: a\nlimits: []", `line 2: configuration: got an unknown field "limits", want one of domain, descriptors`},
		{"envoy", "domain: a\ndescriptors: {}", "line 2: descriptors: want a list"},
		{"envoy", envoy("[]"), "line 3: descriptor: want fields with values"},
		{"envoy", envoy("value: a"), "line 3: key: got none, want one in each descriptor"},
		{"envoy", envoy("ley: a"), `line 3: descriptor: got an unknown field "ley", want one of key, value, `},
		{"envoy", envoy("key: a\n- key: a"), `line 4: descriptors: got key "a" with value "" twice, want it once`},
		{"envoy", envoy("{key: a, shadow_mode: maybe}"), `line 3: shadow_mode: got "maybe", want true or false`},
		{"envoy", limit("unit: day"), "line 4: requests_per_unit: got none, want a number"},
		{"envoy", limit("unit: day, requests_per_unit: -1"), `line 4: requests_per_unit: got "-1", want a whole number below 2^32`},
		{"envoy", limit("unit: day, requests_per_unit: 4294967296"), `requests_per_unit: got "4294967296", want a whole number below 2^32`},
		{"envoy", limit("unit: fortnight, requests_per_unit: 1"), `unit: got "fortnight", want second, minute, hour, day, week, month or year`},
		{"envoy", limit("unlimited: true, unit: day"), "unlimited: got it with unit or requests_per_unit, want it alone"},
		{"envoy", limit("unit: day, requests: 1"), `line 4: rate_limit: got an unknown field "requests", want one of unit, `},
		{"envoy", limit("replaces: a"), "line 4: replaces: want a list of names"},
		{"envoy", limit("replaces: [{id: a}]"), "line 4: replaces: want entries with a name"},
		{"envoy", "domain: d\ndescriptors: [&a {<<: [*a, *a]}]", "want at most 20000 fields in all"},
		{"envoy", limit("<<: 5"), "line 4: rate_limit: want fields with values"},
		{"envoy", "---\n---\n", "domain: got none, want one, and its descriptors"},
		{"envoy", deep.String(), "descriptors: want at most 32 within each other"},
		{"envoy", bomb.String(), "want at most 20000 fields in all"},
		{"envoy", wild.String(), `line 103: descriptors: want at most 100 values with * for key "a"`},
		{"mholt", "", "found no block of rate_limit, want one with zones"},
		{"mholt", "{\nrate_limit {\nzone a {\n}\n}\n}\n", "found no block of rate_limit, want one with zones"},
		{"mholt", "{}", "found no handler rate_limit with rate_limits, want one"},
		{"mholt", "a\nrate_limit {\nsize 10\n}", `line 3: rate_limit: got an unknown option "size", want one of disable_metrics, `},
		{"mholt", "a\nrate_limit {remote.ip} 5r/s", `line 2: rate_limit: got "{remote.ip} 5r/s", want a block with zones`},
		{"mholt", "a\nrate_limit b {\n}", `line 2: rate_limit: got "b", want a matcher such as /path or @name`},
		{"mholt", "a\nrate_limit {\n}", "line 2: rate_limit: got no zone, want one or more"},
		{"mholt", "a\nrate_limit {\nzone a", `line 3: zone: got "a", want a name and a block`},
		{"mholt", "a\nrate_limit {\nzone a {\nevents 1", "line 3: zone: its block is not closed"},
		{"mholt", "a\nrate_limit {\ndistributed {\n", "line 3: distributed: its block is not closed"},
		{"mholt", "a\nrate_limit {\njitter 1\n", "line 2: rate_limit: its block is not closed"},
		{"mholt", zoneOf("events 0\nwindow 1m"), `line 3: zone "a": events: got "0", want a whole number from 1 to 16777215`},
		{"mholt", zoneOf("events 5"), `line 3: zone "a": window: got "", want a duration of whole microseconds, at least 1µs, such as 500ms, 1s or 1h`},
		{"mholt", zoneOf("events 5\nevents 5"), "line 5: events: got it twice, want it once"},
		{"mholt", zoneOf("size 5"), `line 4: zone: got an unknown option "size", want one of events, `},
		{"mholt", zoneOf("key a b"), `line 4: key: got "a b", want one value`},
		{"mholt", zoneOf("match path \\\n/"), `line 4: match: got "path /", want a matcher in the same line, or a block with a line for each`},
		{"mholt", zoneOf("match path `/\nb`"), `line 4: match: got "path /\nb", want a matcher in the same line, or a block with a line for each`},
		{"mholt", zoneOf("`match` path /"), `line 4: match: got "path /", want a matcher in the same line, or a block with a line for each`},
		{"mholt", zoneOf("match not { path / }"), `line 4: match: got "not", want a matcher in the same line, or a block with a line for each`},
		{"mholt", zoneOf("match {\npath / }"), "line 4: match: want a line for each matcher, and one for the brace that closes the block"},
		{"mholt", zoneOf("key <<A\nb`\\\nc\nA\nevents 1\nwindow 1s"), `zone "a": key: got "b` + "`" + `\\\nc", want text that is printable`},
		{"mholt", zoneOf("events 16777216\nwindow 1m"), `zone "a": events: got "16777216", want a whole number from 1 to 16777215`},
		{"mholt", zoneOf("events 5\nwindow 36500d"), `zone "a": window: got "36500d", want a duration of at most 11 years`},
		{"mholt", zoneOf("events 5\nwindow 1m\nipv4_prefix 33"), `zone "a": ipv4_prefix: got "33", want a whole number from 0 to 32`},
		{"mholt", zoneOf("events 5\nwindow 1m\nipv6_prefix a"), `zone "a": ipv6_prefix: got "a", want a whole number from 0 to 128`},
		{"mholt", zoneOf("events 5\nwindow 1m\nkey {a"), `zone "a": key: got "{a", want each placeholder with both of its braces, and others as \{ and \}`},
		{"mholt", zoneOf("import b"), `line 4: zone: got "import", whose lines are not read; convert what caddy adapt prints, in JSON`},
		{"mholt", "a\nrate_limit {\n{block}\n}", `line 3: rate_limit: got "{block}", whose lines are not read; convert what caddy adapt prints, in JSON`},
		{"mholt", "a\nrate_limit {\njitter -1\n}", `line 3: jitter: got "-1", want a share of the wait from 0, such as 0.2`},
		{"mholt", `{"handler": "rate_limit", "rate_limits": {"a": {}}, "jitter": "x"}`, `: jitter: got "x", want a share of the wait from 0, such as 0.2`},
		{"mholt", `{"handler": "rate_limit"}`, ": rate_limits: want an object with zones"},
		{"mholt", `[{"handler": "rate_limit", "rate_limits": {"a": 5}}]`, `/0: rate_limits: "a": want an object`},
		{"mholt", `{"handler": "rate_limit", "rate_limits": {"a": {"window": "1s", "max_events": 0}}}`, `rate_limits: "a": max_events: got "0", want a whole number from 1 to `},
		{"mholt", `{"handler": "rate_limit", "rate_limits": {"a": {"window": 1.5}}}`, `rate_limits: "a": window: got 1.5, want whole nanoseconds`},
		{"mholt", `{"handler": "rate_limit", "rate_limits": {"a": {"window": []}}}`, `rate_limits: "a": window: want text or a number`},
		{"mholt", `{"handler": "rate_limit", "rate_limits": {"a": {"size": 1}}}`, `rate_limits: "a": got an unknown option "size", want one of ipv4_prefix, `},
		{"mholt", `{"handler": "rate_limit", "rate_limits": {"a": {}}, "limits": []}`, `got an unknown option "limits", want one of disable_metrics, `},
	}
	for _, tc := range tests {
		r, err := convertFrom(tc.format, "-", []byte(tc.text), nil)
		if err == nil || !strings.Contains(err.Error(), tc.want) || printable(err.Error()) != err.Error() {
			t.Errorf("%s %.200q: got %v, %v, want an error in one line with %s", tc.format, tc.text, r, err, tc.want)
		}
	}
}

// TestConvertTakes guards what else is converted without a note, and to what: what
// other limiters take too, although it is seldom written that way.
func TestConvertTakes(t *testing.T) {
	limit := func(rateLimit string) string {
		return "domain: d\ndescriptors:\n- key: path\n  value: /a\n  rate_limit: {" + rateLimit + "}\n"
	}
	const log = "\t\tkey all\n\t\talgorithm sliding_log\n\t\tsize 3\n\t\twindow 1m\n"
	inJSON := func(zone, more string) string {
		return string(configOf(`"handler": "rate_limit", "rate_limits": {"a": {` + zone + `}}` + more))
	}
	const inLimits = `"algorithm": "sliding_log", "key": "all", "name": "a", "size": 1000, "window": `
	for _, tc := range []struct{ format, text, want string }{
		{"mholt", zoneOf("events +3\nwindow 1m"), log},
		{"mholt", zoneOf("events 003\nwindow 1m"), log},
		{"mholt", strings.ReplaceAll(zoneOf("events 3\nwindow 1m"), "\n", "\r\n"), log},
		{"mholt", zoneOf("match method GET # b\nevents 3\nwindow 1m"), "\tmatch {\n\t\t\tmethod GET # b\n\t\t}\n" + log},
		{"mholt", zoneOf("match `{method} == 'GET'`\nevents 3\nwindow 1m"), "\tmatch {\n\t\t\texpression `{method} == 'GET'`\n\t\t}\n" + log},
		{"mholt", zoneOf("match {\npath /\n`{method} == 'GET'`\n}\nevents 3\nwindow 1m"), "\tmatch {\n\t\t\tpath /\n\t\t\texpression `{method} == 'GET'`\n\t\t}\n" + log},
		{"mholt", zoneOf("match not `{method} == 'GET'`\nevents 3\nwindow 1m"), "\tmatch {\n\t\t\tnot `{method} == 'GET'`\n\t\t}\n" + log},
		{"mholt", zoneOf("match not {\nmethod GET\npath /\n}\nevents 3\nwindow 1m"), "\tmatch {\n\t\t\tnot {\n\t\t\t\tmethod GET\n\t\t\t\tpath /\n\t\t\t}\n\t\t}\n" + log},
		{"mholt", zoneOf("match\nevents 3\nwindow 1m"), "\tlimit a {\n" + log},
		{"mholt", inJSON(`"window": 6e10, "max_events": 1e3`, ""), inLimits + `"1m0s"`},
		{"mholt", inJSON(`"window": "1m", "max_events": 1000.0, "match": null, "key": null, "ipv4_prefix": null, "ipv6_prefix": 0`, ""), inLimits + `"1m"`},
		{"mholt", inJSON(`"window": "1m", "max_events": 1000`, `, "log_key": false, "disable_metrics": false, "distributed": null, "storage": null, "jitter": null`), inLimits + `"1m"`},
		{"envoy", limit("unit: day, requests_per_unit: 0x10"), "size 16\n"},
		{"envoy", limit("unit: day, requests_per_unit: 020"), "size 16\n"},
		{"envoy", limit("unit: day, requests_per_unit: 1_000"), "size 1000\n"},
		{"envoy", limit(`unit: day, requests_per_unit: "10"`), "size 10\n"},
		{"envoy", "---\n" + limit("unit: day, requests_per_unit: 10") + "---\n---\n", "size 10\n"},
		{"envoy", "domain: d\ndescriptors:\n- key: path\n  value: /a\n  rate_limit: &a {unit: day, requests_per_unit: 10}\n" +
			"- key: path\n  value: /b\n  rate_limit: {<<: *a, requests_per_unit: 11}\n", "size 11\n\t\twindow 1d\n"},
		{"envoy", "domain: d\ndescriptors:\n- key: path\n  value: /a\n  rate_limit: &a {unit: day, requests_per_unit: 10}\n" +
			"- key: path\n  value: /b\n  rate_limit: {<<: [{unit: hour}, *a]}\n", "size 10\n\t\twindow 1h\n"},
	} {
		r, err := convertFrom(tc.format, "-", []byte(tc.text), nil)
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
// list or beside other objects, in YAML and in JSON, and that notes and errors tell the
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
		{"a note", configMapOf(file("true")), "line 6: shadow_mode: the limit of path=/a (5/day) is left out, as limits here always deny.", ""},
		{"an error", configMapOf(file("maybe")), "", `config.yaml: line 8: shadow_mode: got "maybe", want true or false`},
		{"two files of one domain", configMapOf(file("false") + strings.Replace(file("false"), "config", "b", 1)), "", `b.yaml: line 11: domain: got "d" twice, want each domain once`},
		{"no file", configMapOf("  a: b\n"), "", "domain: got none, want one, and its descriptors"},
		{"a list of files", "apiVersion: v1\nkind: ConfigMap\ndata: [a]\n", "", "data: want files by their names"},
		{"a list in a list", "apiVersion: v1\nkind: List\nitems:\n- apiVersion: v1\n  kind: List\n  items: [a]\n", "", "line 4: items: want objects of Kubernetes"},
		{"YAML that is not valid", configMapOf("  a: |\n    domain: b: c\n"), "", "a: yaml: "},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if format := formatOf("-", []byte(tc.text)); format != "envoy" {
				t.Errorf("the format is told to be %q", format)
			}
			r, err := convertFrom("envoy", "-", []byte(tc.text), nil)
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
			if strings.Contains(r.Text, limit) == strings.Contains(tc.notes, "shadow_mode") {
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
	r, err := convertFrom("envoy", "-", []byte(text), nil)
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

// TestConvertLastZone guards that of several zones of one name in a block the last
// becomes a limit of that name, which is what its counts go by, with one note.
func TestConvertLastZone(t *testing.T) {
	r, err := convertFrom("mholt", "-", []byte("a\nrate_limit {\nzone a {\nevents 20000\nwindow 1m\n}\nzone a {\nkey b\nevents 3\nwindow 1m\n}\n}\n"), nil)
	if err != nil || len(r.Notes) != 1 || r.Notes[0].Line != 7 || strings.Count(r.Text, "limit a {") != 1 || strings.Contains(r.Text, "a-2") {
		t.Errorf("got %v, %v", r, err)
	}
}

// TestConvertSnippet guards that a snippet goes on to take its arguments, once its block
// was replaced: names, keys and numbers.
func TestConvertSnippet(t *testing.T) {
	const block = "rate_limit {\nzone {args[0]} {\nkey {args[1]}\nevents {args[2]}\nwindow {args[3]}\n}\n}\n"
	const rest = "respond ok\n}\n:8080 {\nimport limited login {client_ip} 3 1m\n}\n"
	r, err := convertFrom("mholt", "-", []byte("(limited) {\n"+block+rest), nil)
	if err != nil || len(r.Notes) > 0 {
		t.Fatal(r, err)
	}
	config, err := adaptCaddyfile(string(caddyfile.Format([]byte("(limited) {\n" + r.Text + rest))))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`"name":"login"`, `"key":"{http.vars.client_ip}"`, `"size":3`, `"window":"1m"`} {
		if !strings.Contains(string(config), want) {
			t.Errorf("got %s, want %s in it", config, want)
		}
	}
	if err := validateConfig(config); err != nil {
		t.Error(err)
	}
}

// zoneOf returns a Caddyfile with a zone a.
func zoneOf(options string) string { return "a\nrate_limit {\nzone a {\n" + options + "\n}\n}\n" }

// TestConvertMapping guards which mappings of descriptors are taken.
func TestConvertMapping(t *testing.T) {
	for _, text := range []string{"a", "a=", "={b}", "a=b", "a={b", "a={b}{c}", "a={$B}", "a={b c}", "a={`}", "a={}", "a={b\n}"} {
		if err := make(convert.Mapping).Add(text); err == nil || !strings.HasPrefix(err.Error(), "descriptor: got "+strconv.Quote(text)) {
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
	if err == nil || err.Error() != `descriptor: got a placeholder for "a", want a key that the configuration has` {
		t.Errorf("a key that the configuration lacks: got %v", err)
	}
}

// TestConvertCommand guards the command's exit status, what goes to which of its
// outputs, and how the format is told.
func TestConvertCommand(t *testing.T) {
	dir := tempDir(t)
	write := func(name, text string) string {
		t.Helper()
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	text, err := os.ReadFile("testdata/convert/login.yaml")
	if err != nil {
		t.Fatal(err)
	}
	login := write("login.yaml", string(text))
	mapped := "# Domain auth of envoyproxy/ratelimit.\nrate_limit auth {\n\tlimit auth_type-login {\n\t\tmatch vars {vars.auth_type} login\n" +
		"\t\tkey all\n\t\talgorithm fixed_window\n\t\tsize 5\n\t\twindow 1m\n\t}\n}\n"
	runCommand(t, "convert", login, "--descriptor", "auth_type={vars.auth_type}").want(t, 0, mapped)
	runCommand(t, "convert", write("login", string(text)), "--descriptor", "auth_type={vars.auth_type}").want(t, 0, mapped)
	r := runCommand(t, "convert", login)
	if want := login + ": line 3: key: {header.Auth-Type} is a guess for auth_type"; r.status != 2 || !strings.HasPrefix(r.errors, want) ||
		strings.Count(r.errors, "\n") != 1 || !strings.HasPrefix(r.out, "# Domain auth") {
		t.Errorf("a guess: got %+v", r)
	}
	runCommand(t, "convert", write("marked", "\ufeff"+string(text)), "--descriptor", "auth_type={vars.auth_type}").want(t, 0, mapped)
	if r := runCommand(t, "convert", write("tabs", "rate_limit {\n\tzone\ta {\n\tevents 1\n\twindow 1s\n}\n}\n")); r.status != 0 {
		t.Errorf("a tab behind zone: got %+v", r)
	}
	zones := write("Caddyfile", zoneOf("events 1\nwindow 1s"))
	if r := runCommand(t, "convert", zones); r.status != 0 || r.errors != "" || !strings.Contains(r.out, "\n\t\tsize 1\n\t\twindow 1s\n") {
		t.Errorf("zones: got %+v", r)
	}
	huge := write("huge.yaml", strings.Repeat("#", maxConverted+1))
	for want, args := range map[string][]string{
		"accepts 1 arg(s), received 0":                                           {},
		"reading the file: open /nonexistent: no such file or directory":         {"/nonexistent"},
		"from: got \"kong\", want envoy or mholt":                                {"--from", "kong", login},
		"descriptor: got \"a\", want a key and a placeholder, such as ":          {"--descriptor", "a", login},
		"descriptor: got one for a config of mholt/caddy-ratelimit, want it ":    {"--descriptor", "a={b}", zones},
		zones + ": domain: got none, want ":                                      {"--from", "envoy", write("empty", "")},
		"the format can't be told, want --from envoy or --from mholt":            {write("nothing", "nothing")},
		huge + ": want a file of at most 10 MiB":                                 {huge},
		"x.json: decoding JSON: unexpected EOF":                                  {write("x.json", "{")},
		login + ": descriptor: got a placeholder for \"b\", want a key that the": {"--descriptor", "b={c}", login},
	} {
		want = strings.TrimPrefix(want, zones+": ")
		r := runCommand(t, append([]string{"convert"}, args...)...)
		if r.status != 1 || r.out != "" || !strings.HasPrefix(r.errors, "Error: ") || strings.Count(r.errors, "\n") != 1 || !strings.Contains(r.errors, want) {
			t.Errorf("%q: got status %d, %q, %q\nwant 1 and the line %q", args, r.status, r.out, r.errors, want)
		}
	}

	cmd := convertCommand()
	var out bytes.Buffer
	cmd.SetIn(strings.NewReader(zoneOf("events 1\nwindow 1s")))
	cmd.SetOut(&out)
	if err := runConvert(cmd, []string{"-"}); err != nil || !strings.Contains(out.String(), "limit a {") {
		t.Errorf("the standard input: got %v\n%s", err, out.String())
	}
}

// TestDocumentedConversions guards the examples of docs/migration.md: each configuration
// of another limiter is converted to the example after it, but for comments and a
// first line that sets a variable.
func TestDocumentedConversions(t *testing.T) {
	const doc = "docs/migration.md"
	text, err := os.ReadFile(doc)
	if err != nil {
		t.Fatal(err)
	}
	flags := regexp.MustCompile("--descriptor '([^']+)'").FindAllStringSubmatch(string(text), -1)
	comments := regexp.MustCompile(`(?m)^\s*#.*\n+`)
	variable := regexp.MustCompile(`^vars .*\n`)
	examples := 0
	var before codeBlock
	for _, b := range codeBlocks(t, doc) {
		source := before
		if before = b; source.language != "yaml" && !strings.Contains(source.code, "\tzone ") {
			continue
		}
		examples++
		mapping, format := make(convert.Mapping), "mholt"
		if source.language == "yaml" {
			format = "envoy"
			for _, f := range flags {
				if key, _, _ := strings.Cut(f[1], "="); strings.Contains(source.code, "key: "+key+"\n") {
					if err := mapping.Add(f[1]); err != nil {
						t.Fatal(err)
					}
				}
			}
		}
		code := source.code
		if format == "mholt" {
			code = ":8080 {\n" + code + "}\n"
		}
		r, err := convertFrom(format, doc, []byte(code), mapping)
		if err != nil || len(r.Notes) > 0 {
			t.Errorf("%s: %v %v", source.place, err, r)
			continue
		}
		if got, want := comments.ReplaceAllString(r.Text, ""), variable.ReplaceAllString(b.code, ""); got != want {
			t.Errorf("%s: got\n%s\nwant\n%s", b.place, got, want)
		}
	}
	if examples != 4 {
		t.Errorf("found %d examples, want 4", examples)
	}
}

// TestSeed004Rules guards the two rules of seed 004 as docs/migration.md has them: 5
// marketing messages a day, and 5 logins a minute, by the clock.
func TestSeed004Rules(t *testing.T) {
	var site strings.Builder
	for _, b := range codeBlocks(t, "docs/migration.md") {
		if strings.Contains(b.code, "rate_limit messaging") || strings.Contains(b.code, "rate_limit auth") {
			site.WriteString(b.code)
		}
	}
	s := startSite(t, site.String()+"respond ok")
	statuses := func(n int, path string, header ...string) (got string) {
		t.Helper()
		for range n {
			got += fmt.Sprint(s.get(path, header...).StatusCode, " ")
		}
		return got
	}
	const five = "200 200 200 200 200 "
	check := func(got, want string) {
		t.Helper()
		if got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
	check(statuses(6, "/", "X-Message-Type: marketing"), five+"429 ")
	check(statuses(6, "/", "X-Message-Type: receipt"), five+"200 ")
	s.clock.advance(23*time.Hour - ms) // it was 01:00
	check(statuses(1, "/", "X-Message-Type: marketing"), "429 ")
	s.clock.advance(ms)
	check(statuses(6, "/", "X-Message-Type: marketing"), five+"429 ")

	s.clock.advance(30 * time.Second)
	check(statuses(6, "/login"), five+"429 ")
	check(statuses(1, "/"), "200 ")
	s.clock.advance(30*time.Second - ms)
	check(statuses(1, "/login"), "429 ")
	s.clock.advance(ms)
	check(statuses(6, "/login"), five+"429 ")
}

// FuzzConvert feeds convert what its users may have. What it prints is valid: it
// neither fails to load nor brings anything but limits along.
func FuzzConvert(f *testing.F) {
	for _, file := range convertedFiles(f) {
		text, err := os.ReadFile(file.source)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(formatOf(file.source, text) == "envoy", string(text))
	}
	f.Add(true, "domain: a\ndescriptors: [{key: 'a\"`', value: '{$HOME}', rate_limit: {unit: day, requests_per_unit: 1}}]")
	f.Add(true, "domain: a\ndescriptors: &a [{key: b, descriptors: *a}]")
	f.Add(false, zoneOf("key `a\"b`\nevents 7\nwindow 1s\nipv4_prefix 33"))
	f.Add(false, "a {\nrate_limit \"@a b\" {\nzone \"}\" {\nevents 1\nwindow 1s\n}\n}")
	f.Fuzz(func(t *testing.T, envoy bool, text string) {
		format := "mholt"
		if envoy {
			format = "envoy"
		}
		r, err := convertFrom(format, "-", []byte(text), nil)
		if err != nil {
			if strings.ContainsAny(err.Error(), "\r\n") {
				t.Fatalf("the error has several lines: %q", err)
			}
			return
		}
		if !envoy { // it may hold anything that a Caddyfile or JSON may
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
