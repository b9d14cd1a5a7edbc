package convert_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/convert"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/key/keytext"
)

// deepTree returns a tree of names within each other, the last with a limit.
func deepTree(depth int) string {
	name := strings.Repeat("a", 64)
	return "schema: " + strings.Repeat("{"+name+": {children: ", depth-1) + "{'*': {limits: [1, 1, 1]}}" + strings.Repeat("}}", depth-1)
}

// TestConvertRefusesTrees guards the one line that convert says to a tree that it can't
// convert.
func TestConvertRefusesTrees(t *testing.T) {
	node := func(text string) string { return "schema:\n  a:\n    " + text }
	limit := func(numbers string) string { return node("limits: " + numbers) }
	three := "not valid; use three numbers: the burst, the count and the seconds that it is for"
	for _, tc := range []struct{ text, want string }{
		{"schema:", "schema: no limits given; use at least one"},
		{"schema: {}", "schema: no limits given; use at least one"},
		{"schema: {'*': {children: {'*': {}}}}", "schema: no limits given; use at least one"},
		{limit("null"), "schema: no limits given; use at least one"},
		{"schema: []", "line 1: schema: not valid; use fields with values"},
		{"schema: a", "line 1: schema: not valid; use fields with values"},
		{"schema: {a: b}", `line 1: "a": not valid; use fields with values`},
		{"schema: {'': {limits: [1, 1, 1]}}", "line 1: schema: a name of 0 bytes is not valid; use 1 to 1000"},
		{"schema: {? [a, b] : {limits: [1, 1, 1]}}", "line 1: schema: a name of 0 bytes is not valid; use 1 to 1000"},
		{node("children: {" + strings.Repeat("a", 1001) + ": {}}"), "line 3: children: a name of 1001 bytes is not valid; use 1 to 1000"},
		{node("children: {b: {}, b: {}}"), `line 3: children: "b" is given twice; use it once`},
		{node("children: {'*': {}, '*': {}}"), `line 3: children: "*" is given twice; use it once`},
		{"schema: {a: {}, a: {}}", `line 1: schema: "a" is given twice; use it once`},
		{limit("[1, 1, 1]\n    Limits: [1, 1, 1]"), `line 4: "a": "limits" is given twice; use it once`},
		{node("children: [b]"), "line 3: children: not valid; use fields with values"},
		{node("'*': {limits: [1, 1, 1]}"), `line 3: "a": unknown field "*"; use one of limits, children`},
		{"schema: {}\nlimits: [1, 1, 1]", `line 2: configuration: unknown field "limits"; use schema`},
		{"schema: {}\n---\nschema: {}", "line 3: schema: a second document begins; use one"},
		{"schema: {a: {limits: [1, 1, 1]}}\n---\n{", "yaml: "},
		{limit("15"), "line 3: limits: " + three},
		{limit("[]"), "line 3: limits: " + three},
		{limit("[1, 2]"), "line 3: limits: " + three},
		{limit("[1, 2, 3, 4]"), "line 3: limits: " + three},
		{limit("{burst: 1, count: 2, period: 3}"), "line 3: limits: " + three},
		{limit("\n    - 1\n    - - 2\n    - 3"), `line 5: limits: "" is not valid as the count; use a whole number from 1, below 2^32`},
		{limit("[-1, 1, 1]"), `line 3: limits: "-1" is not valid as the burst; use a whole number from 0, below 2^32`},
		{limit("[1, 0, 1]"), `line 3: limits: "0" is not valid as the count; use a whole number from 1, below 2^32`},
		{limit("[1, 1, 0]"), `line 3: limits: "0" is not valid as the period; use a whole number from 1, below 2^32`},
		{limit("[1, 1, -60]"), `line 3: limits: "-60" is not valid as the period; use a whole number from 1, below 2^32`},
		{limit("[1.5, 1, 1]"), `"1.5" is not valid as the burst`},
		{limit("[1, 1e3, 1]"), `"1e3" is not valid as the count`},
		{limit("[1, .inf, 1]"), `".inf" is not valid as the count`},
		{limit("[1, ~, 1]"), `"~" is not valid as the count`},
		{limit("[1, true, 1]"), `"true" is not valid as the count`},
		{limit("[1, 1, 60s]"), `"60s" is not valid as the period`},
		{limit("[1, ' 1', 1]"), `" 1" is not valid as the count`},
		{limit("[1, !!int x, 1]"), `"x" is not valid as the count`},
		{limit("[4294967296, 1, 1]"), `"4294967296" is not valid as the burst`},
		{limit("[1, 99999999999999999999, 1]"), `"99999999999999999999" is not valid as the count`},
		{limit("[1, '99999999999999999999', 1]"), `"99999999999999999999" is not valid as the count`},
		{limit("[1, 1000001, 1]"), "line 3: limits: 1000001 in 1 s are too many; use at most 1000000 a second"},
		{limit("[1, 1, 4294967295]"), "line 3: limits: a burst of 1 and 1 in 4294967295 s is too large; use a burst that drains within 35 years"},
		{limit("[4294967295, 1, 1]"), "line 3: limits: a burst of 4294967295 and 1 in 1 s is too large; use a burst that drains within 35 years"},
		{deepTree(33), "children: nested too deeply; use at most 32 within each other"},
		{"schema: &a {b: {children: *a}}", "children: nested too deeply; use at most 32 within each other"},
		{"schema: {x: &a {limits: [1, 1, 1], children: {b: *a, c: *a}}}", "use at most"},
		{"schema: &a {<<: [*a, *a]}", "too many fields; use at most 20000 in all"},
	} {
		r, err := convert.Convert([]byte(tc.text), nil)
		if err == nil || !strings.Contains(err.Error(), tc.want) || keytext.Safe(err.Error()) != err.Error() {
			t.Errorf("%.200q: got %v, %v, want an error in one line with %s", tc.text, r, err, tc.want)
		}
	}
	for part, want := range map[string]string{
		"user":   `descriptor: no key has the part "user"; use a part that keys have, a_1 or a_2`,
		"user_1": `descriptor: no key has the part "user_1"; use a part that keys have, a_1 or a_2`,
		"a_3":    `descriptor: no key has the part "a_3"; use a part that keys have, a_1 or a_2`,
	} {
		text := node("children: {'*': {children: {b: {limits: [1, 1, 1]}}}}")
		if r, err := convert.Convert([]byte(text), convert.Mapping{part: "{path}"}); err == nil || err.Error() != want {
			t.Errorf("a placeholder for %s: got %v, %v, want %s", part, r, err, want)
		}
	}
}

// TestConvertCountsAsRedisCell guards what becomes of the numbers of CL.THROTTLE, however
// they are written, and that a limit never admits more for want of parts of a microsecond.
func TestConvertCountsAsRedisCell(t *testing.T) {
	for _, tc := range []struct{ numbers, want string }{
		{"[15, 30, 60]", "size 16 drip_rate 2s"},
		{"[5, 10, 15]", "size 6 drip_rate 1.5s"},
		{"[0, 1, 1]", "size 1 drip_rate 1s"},
		{`["0", "0010", '1']`, "size 1 drip_rate 100ms"},
		{"[0x10, 1_000, +1]", "size 17 drip_rate 1ms"},
		{"[0, 1000000, 1]", "size 1 drip_rate 1µs"},
		{"[0, 1, 604800]", "size 1 drip_rate 7d"},
		{"[4294967295, 4294967295, 100000]", "size 4294967296 drip_rate 24µs"}, // 23.3
		{"[1, 7, 60]", "size 2 drip_rate 8.571429s"},
		{"[1, 60, 1]", "size 2 drip_rate 16.667ms"},
		{"[1, 300, 1]", "size 2 drip_rate 3.334ms"},
		{"[1, 999999, 1]", "size 2 drip_rate 2µs"},
		{"&a [1, &one 1, *one]", "size 2 drip_rate 1s"},
	} {
		r, err := convert.Convert([]byte("schema: {user: {children: {a: {limits: "+tc.numbers+"}}}}"), convert.Mapping{"user_1": "{path}"})
		if err != nil {
			t.Errorf("%s: %v", tc.numbers, err)
			continue
		}
		rounded := slices.ContainsFunc([]string{"3.334ms", "24µs", " 2µs"}, func(drip string) bool { return strings.Contains(tc.want, drip) })
		if compact := strings.Join(strings.Fields(r.Text), " "); !strings.Contains(compact, tc.want+" } }") || (len(r.Notes) == 1) != rounded {
			t.Errorf("%s: got %s, %v, want %s", tc.numbers, compact, r.Notes, tc.want)
		}
		if err := validateConverted(r.Text); err != nil {
			t.Errorf("%s: %v\n%s", tc.numbers, err, r.Text)
		}
	}
}

// TestConvertLargeTrees guards that trees as deep and as wide as they may be are
// converted to what loads.
func TestConvertLargeTrees(t *testing.T) {
	wide := new(strings.Builder)
	wide.WriteString("schema:\n  a.b:\n    children:\n      '*': {limits: [1, 1, 1]}\n")
	for i := range 500 {
		fmt.Fprintf(wide, "      '%d}': {limits: [1, 1, 1]}\n", i)
	}
	for name, text := range map[string]string{
		"deep":            deepTree(32),
		"wide":            wide.String(),
		"only the others": "schema: {'*': {limits: [1, 1, 1], children: {'*': {children: {'*': {limits: [1, 1, 1]}}}}}}",
	} {
		t.Run(name, func(t *testing.T) {
			r, err := convert.Convert([]byte(text), nil)
			if err != nil {
				t.Fatal(err)
			}
			if err := validateConverted(r.Text); err != nil {
				t.Error(err)
			}
		})
	}
}
