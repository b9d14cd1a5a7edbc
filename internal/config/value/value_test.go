package value

import (
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
)

// Guards that a value with placeholders is read anew for each request, that
// all it expands to counts, and that what is wrong names the option and the
// template, and no more of what a client sent than 64 bytes.
func TestValueAt(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name, template, sent string
		want                 int64
		message              string
	}{
		{"number", "{n}", "5", 5, ""},
		{"most", "{n}", "562949953421312", 1 << 49, ""},
		{"behind a digit", "1{n}", "5", 15, ""},
		{"nothing behind a digit", "1{n}", "", 1, ""},
		{"twice", "{n}{n}", "12", 1212, ""},
		{"unknown beside it", "{n}{nope}", "5", 5, ""},
		{"nothing", "{n}", "", 0, `size: "" from {n} is not valid; ` + wantUnits},
		{"zero", "{n}", "0", 0, `size: "0" from {n} is not valid; ` + wantUnits},
		{"negative", "{n}", "-1", 0, `size: "-1" from {n} is not valid; ` + wantUnits},
		{"too much", "{n}", "562949953421313", 0, `size: "562949953421313" from {n} is not valid; ` + wantFewer},
		{
			"overflow",
			"{n}",
			"18446744073709551617",
			0,
			`size: "18446744073709551617" from {n} is not valid; ` + wantFewer,
		},
		{"exponent", "{n}", "1e3", 0, `size: "1e3" from {n} is not valid; ` + wantUnits},
		{"placeholder", "{n}", "{n}", 0, `size: text of 3 bytes from {n} is not valid; ` + wantUnits},
		{"fraction by two", "{n}.{n}", "1", 0, `size: "1.1" from {n}.{n} is not valid; ` + wantUnits},
		{"line break", "{n}", "1\n2", 0, `size: text of 3 bytes from {n} is not valid; ` + wantUnits},
		{
			"24 digits", "{n}", strings.Repeat("9", 24), 0,
			`size: "` + strings.Repeat("9", 24) + `" from {n} is not valid; ` + wantFewer,
		},
		{
			"25 digits", "{n}", strings.Repeat("9", 25), 0,
			`size: text of 25 bytes from {n} is not valid; ` + wantFewer,
		},
		{
			"a megabyte of digits", "{n}", strings.Repeat("9", 1<<20), 0,
			`size: text of 1048576 bytes from {n} is not valid; ` + wantFewer,
		},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			v, err := New(option.OnLoad, "size", tc.template, option.Units)
			if err != nil {
				t.Fatal(err)
			}
			if !v.IsDynamic() || v.String() != tc.template {
				t.Errorf("varies = %t and shown as %s, want true and %s", v.IsDynamic(), v.String(), tc.template)
			}
			repl := caddy.NewEmptyReplacer()
			repl.Set("n", "7")
			if _, err := v.At(repl); err != nil && tc.template != "{n}.{n}" {
				t.Errorf("of another request: %v", err)
			}
			repl.Set("n", tc.sent)
			got, err := v.At(repl)
			message := ""
			if err != nil {
				message = err.Error()
			}
			if message != tc.message || err == nil && got != tc.want {
				t.Errorf("got %d, error %q\nwant %d, error %q", got, message, tc.want, tc.message)
			}
		})
	}
}

// What errors say of numbers that depend on the request.
const (
	wantUnits = "use a whole number of at least 1"
	wantFewer = "use a whole number of at most 562949953421312"
)

// Guards that a constant needs no request, and that the error of one says that a placeholder would do.
func TestConstantValue(t *testing.T) {
	t.Parallel()
	if _, err := New(option.OnLoad, "size", "x", option.Units); err == nil || err.Error() != `size: "x" is not valid; `+wantUnits+", or a placeholder" {
		t.Errorf("got error %v", err)
	}
	v, err := New(option.OnLoad, "drip_rate", "90m", option.Interval)
	if err != nil {
		t.Fatal(err)
	}
	got, err := v.At(nil)
	if got != 90*time.Minute || err != nil || v.IsDynamic() || v.String() != "1h30m0s" {
		t.Errorf("got %v, %v, varies = %t, shown as %s", got, err, v.IsDynamic(), v.String())
	}
}
