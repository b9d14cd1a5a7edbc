package compile_test

import (
	"flag"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/compile"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/configtest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/filetest"
)

// documentClashes has TestClashesAreDocumented write the table instead of comparing it.
var documentClashes = flag.Bool("clashes", false, "write the table of options that do not go together")

// TestClashesAreDocumented guards that docs/directive.md has all options that do not go
// together.
func TestClashesAreDocumented(t *testing.T) {
	t.Parallel()
	const file, begin, end = "docs/directive.md", "<!-- begin: clashes -->\n", "<!-- end: clashes -->"
	with := make(map[string][]string)
	var options []string
	for _, c := range compile.Conflicts {
		if with[c.Option] == nil {
			options = append(options, c.Option)
		}
		with[c.Option] = append(with[c.Option], "`"+c.With+"`")
	}
	table := "| Option | Not with |\n|---|---|\n"
	for _, option := range options {
		table += fmt.Sprintf("| `%s` | %s |\n", option, strings.Join(with[option], ", "))
	}
	page := filetest.Read(t, file)
	before, rest, found := strings.Cut(string(page), begin)
	documented, after, ended := strings.Cut(rest, end)
	switch {
	case !found || !ended:
		t.Fatalf("%s has no place for the table", file)
	case documented == table:
	case *documentClashes:
		filetest.Write(t, file, []byte(before+begin+table+end+after))
	default:
		t.Errorf("%s is not what the table says, write it by: go test -run %s ./internal/compile -args -clashes", file, t.Name())
	}
}

// TestClashesAreErrors guards that each row of the table is an error of the option that it
// names, with what it says to write instead, whatever the order in the block is.
func TestClashesAreErrors(t *testing.T) {
	t.Parallel()
	blocks := map[string]string{ // how what an option clashes with is written
		"concurrency": "concurrency 5", "count": "count status 401", "actual_cost": "actual_cost bytes", "ban": "ban 1m",
		"count_denied": "count_denied", "max_delay": "max_delay 2s", "soft": "soft 1", "borrow": "borrow other", "pool": "pool",
		"consistency": "consistency eventual 1s", "when_full": "when_full share",
		"when_full share": "when_full share", "min_interval": "max 5; duration 1s; min_interval 1s",
		"concurrency auto": "concurrency auto", "cost": "cost 2", "factor": "factor 2", "max_keys": "max_keys 9", "track_top": "track_top 9",
		"limit": "limit within {; size 1; }", "hold": "count status 401; hold off", "clear": "clear status 2xx", "cost 0": "cost 0", "speed": "speed 1MB/s", "status": "status 503",
		"max_waiting": "max_waiting 9", "fair_by": "fair_by off",
	}
	for _, c := range compile.Conflicts {
		t.Run(c.Option+" with "+c.With, func(t *testing.T) {
			if c.With == "listener_wrappers" {
				block := "{\nservers {\nlistener_wrappers {\nrate_limit {\nlimit a {\nrate 1/s\n" + strings.TrimPrefix(blocks[c.Option], "count status 401; ") + "\n}\n}\n}\n}\n}\n:80\n"
				err := configtest.ValidateCaddyfile(block)
				begins, ends := `"a": `+c.Option+`: `, "can't be combined with "+c.With+"; "+c.Instead
				if err == nil || !strings.Contains(err.Error(), begins) || !strings.Contains(err.Error(), ends) {
					t.Errorf("%s:\n got %v\nwant %s…%s", block, err, begins, ends)
				}
				return
			}
			options := []string{blocks[c.Option]}
			if with := blocks[c.With]; with != "" {
				options = append(options, with)
			}
			if !slices.Contains([]string{"concurrency", "concurrency auto", "min_interval", "speed"}, c.With) {
				options = append(options, "size 5")
			}
			block := "limit a {; " + strings.Join(options, "; ") + "; }; limit other {; size 5; pool; }; limit third {; size 5; borrow other; }; limit fourth {; size 5; borrow a; }"
			err := configtest.ValidateCaddyfile(configtest.InLimit(block))
			begins, ends := `/a": `+c.Option+`: `, "can't be combined with "+c.With+"; "+c.Instead
			if err == nil || !strings.Contains(err.Error(), begins) || !strings.Contains(err.Error(), ends) {
				t.Errorf("%s:\n got %v\nwant %s…%s", block, err, begins, ends)
			}
		})
	}
}
