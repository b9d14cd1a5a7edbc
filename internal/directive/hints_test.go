package directive_test

import (
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/configtest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/racetest"
)

// refusedValue matches the error for a value of an option: the option, the value, and what to
// use instead.
var refusedValue = regexp.MustCompile(`(?:^|: )([a-z_0-9]+): "([^"]*)" is not valid; use (.*?)(?:, at Caddyfile:\d+)?$`)

// These match values in hints: examples, words of which to use one, and the ends of a range.
var (
	examples  = regexp.MustCompile(`, such as (.*?)(?:: | for |$)`)
	words     = regexp.MustCompile(`^((?:[a-z0-9_-]+, )*[a-z0-9_-]+ or [a-z0-9_-]+)(?:, and |$)`)
	fromTo    = regexp.MustCompile(`^a [a-z ]*from (\S+) to ([^\s,]+)(?:,|$)`)
	leastMost = regexp.MustCompile(`^[a-z ]*\bat (?:least|most) (\d[^\s,]*)(?:,|$)`)
	between   = regexp.MustCompile(`, or |, | or `)
)

// hinted returns the values that a hint names.
func hinted(hint string) (values []string) {
	for _, list := range []*regexp.Regexp{examples, words} {
		if found := list.FindStringSubmatch(hint); found != nil {
			values = append(values, between.Split(found[1], -1)...)
		}
	}
	for _, ends := range []*regexp.Regexp{fromTo, leastMost} {
		if found := ends.FindStringSubmatch(hint); found != nil {
			values = append(values, found[1:]...)
		}
	}
	return slices.DeleteFunc(values, func(v string) bool { return strings.HasPrefix(v, "a ") }) // "a placeholder"
}

// TestHintsAreValid guards that an option which was refused is not refused in the same words with
// what these say to use: the examples, the words and the ends of a range. Another error may say
// more, such as what else the option needs.
func TestHintsAreValid(t *testing.T) {
	racetest.SingleGoroutine(t)
	files, err := filepath.Glob("internal/directive/testdata/options/*.txt")
	if err != nil {
		t.Fatal(err)
	}
	tried := 0
	seen := make(map[string]bool)
	for _, file := range files {
		for _, r := range optionRows(t, file) {
			refused := refusedValue.FindStringSubmatch(r.want)
			if refused == nil {
				continue
			}
			option, got, hint := refused[1], refused[2], refused[3]
			at := regexp.MustCompile(`\b` + option + ` "?` + regexp.QuoteMeta(got) + `"?(;| )`)
			if !at.MatchString(r.config) {
				continue
			}
			for _, value := range hinted(hint) {
				if seen[option+" "+value] {
					continue
				}
				seen[option+" "+value] = true
				tried++
				loc := at.FindStringSubmatchIndex(r.config)
				config := r.config[:loc[0]] + option + " " + value + r.config[loc[2]:]
				err := configtest.ValidateCaddyfile(strings.NewReplacer("; ", "\n", `\n`, "\n", `\t`, "\t").Replace(config) + "\n")
				if err != nil && strings.Contains(err.Error(), "use "+hint) {
					t.Errorf("%s: %s is refused with %q, and so is %s: %v", r.place, got, hint, value, err)
				}
			}
		}
	}
	if tried < 100 {
		t.Errorf("tried only %d values", tried)
	}
}
