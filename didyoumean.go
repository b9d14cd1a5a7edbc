package ratelimit

import (
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/placeholder"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/redisaddr"
)

// otherNames are names that other rate limiters have for options, and what they are
// called here. Where only some of these are options, the first of those is meant.
var otherNames = map[string][]string{
	"average":      {"rate"},
	"burst":        {"size", "events"},
	"capacity":     {"size", "events"},
	"duration":     {"window"},
	"events":       {"max"},
	"interval":     {"duration", "window"},
	"max":          {"events"},
	"max_events":   {"max", "events"},
	"max_requests": {"max", "events"},
	"period":       {"window"},
	"refill_rate":  {"drip_rate"},
	"refill_size":  {"drip_size"},
	"requests":     {"max", "events"},
	"rps":          {"rate"},
	"size":         {"events"},
	"tokens":       {"size", "events"},
}

// unknownOption returns the error for the current token, which is not one of the
// options that are known here.
func unknownOption(d *caddyfile.Dispenser, known []string) error {
	name := d.Val()
	meant := ""
	also := meantOption(name, known)
	if also == "" && slices.Contains(known, "match") {
		also = matcherOption(append([]string{name}, nextArgs(d)...))
	}
	if also != "" {
		meant = " (did you mean " + option.Quote(also) + "?)"
	}
	want := "one of " + strings.Join(known, ", ")
	if len(known) == 1 {
		want = known[0]
	}
	return d.Errf("%s: got an unknown option%s, want %s", option.Quote(redisaddr.WithoutPassword(name)), meant, want)
}

// meantOption returns the option that was probably meant by another word, or "".
func meantOption(word string, known []string) string {
	if i := strings.IndexAny(word, ":="); i > 0 { // as in YAML, or size=10
		word = word[:i]
	}
	if word = strings.ReplaceAll(strings.ToLower(word), "-", "_"); len(word) > 32 {
		return ""
	}
	if slices.Contains(known, word) {
		return word
	}
	for _, name := range otherNames[word] {
		if slices.Contains(known, name) {
			return name
		}
	}
	best, least := "", 3
	for _, name := range known {
		most := 2
		if min(len(name), len(word)) <= 4 {
			most = 1
		}
		if n := typos(word, name); n <= most && n < least {
			best, least = name, n
		}
	}
	return best
}

// typos returns how many letters have to be inserted, left out, replaced or swapped with
// the next one to make b of a.
func typos(a, b string) int {
	rows := make([][]int, len(a)+1)
	for i := range rows {
		rows[i] = make([]int, len(b)+1)
		for j := range rows[i] {
			switch {
			case i == 0 || j == 0:
				rows[i][j] = i + j
				continue
			case a[i-1] == b[j-1]:
				rows[i][j] = rows[i-1][j-1]
			default:
				rows[i][j] = 1 + min(rows[i-1][j], rows[i][j-1], rows[i-1][j-1])
			}
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				rows[i][j] = min(rows[i][j], rows[i-2][j-2]+1)
			}
		}
	}
	return rows[len(a)][len(b)]
}

// matcherOption returns how matchers are written as an option of a limit, given
// something like them: not /x, path=/x, path /x or /x. It is "" for anything else.
func matcherOption(words []string) string {
	if len(words) == 0 {
		return ""
	}
	if name, value, found := strings.Cut(words[0], "="); found && isMatcher(name) {
		words = append([]string{name, value}, words[1:]...)
	}
	if strings.HasPrefix(words[0], "@") && len(words) > 1 { // the definition of a named matcher
		words = words[1:]
	}
	switch {
	case words[0] == "not" && len(words) > 1 && strings.HasPrefix(words[1], "/"):
		words = append([]string{"not", "path"}, words[1:]...)
	case words[0] != "not" && !isMatcher(words[0]) && !strings.HasPrefix(words[0], "/") && !strings.HasPrefix(words[0], "@"):
		return ""
	}
	return "match " + strings.Join(words, " ")
}

// isMatcher reports whether a matcher has the given name.
func isMatcher(name string) bool {
	_, err := caddy.GetModule("http.matchers." + name)
	return err == nil
}

// nextArgs returns the arguments behind the current token without taking them.
func nextArgs(d *caddyfile.Dispenser) []string {
	args := d.RemainingArgs()
	for range args {
		d.Prev()
	}
	return args
}

// ownLine is what is wanted of options that stand in one line.
const ownLine = "each option in a line of its own, as well as the } that ends the block"

// inOneLine reports whether words look like several options in one line.
func inOneLine(words []string) bool {
	return slices.ContainsFunc(words, func(word string) bool {
		return strings.HasSuffix(word, ";") || !placeholder.BracesBalance(word)
	})
}

// otherRate matches the rate in the one line that RussellLuo/caddy-ext has for a limit:
// rate_limit [<matcher>] <key> <rate> [<zone_size> [<reject_status>]].
var otherRate = regexp.MustCompile(`^([1-9][0-9]*)r/([sm])$`)

// otherKeys are the keys there that are called otherwise here. Both are addresses; the
// first is that of the client, as far as proxies are trusted.
var otherKeys = map[string]string{
	"{remote.ip}":   "{client_ip}",
	"{remote.host}": "{remote_host}",
}

// wantInBlock returns what is wanted instead of the arguments of a directive, or "" if
// they may be a name.
func wantInBlock(args []string) string {
	lines := func(lines ...string) string {
		for i, line := range lines {
			lines[i] = strconv.Quote(option.Redacted(line))
		}
		return option.InWords(lines, "and")
	}
	if len(args) == 0 {
		return ""
	}
	const inBlock = "at most a name, and options in a block with a line for each: "
	matcher := matcherOption(args)
	_, wrong := option.ParseRate(args[0])
	switch options := optionsIn(args); {
	case inOneLine(args):
		return "a block, with " + ownLine
	case len(options) > 0:
		return inBlock + lines(options...)
	case wrong == "":
		return inBlock + lines("rate "+args[0])
	case len(args) == 1:
		if strings.Contains(args[0], "=") && matcher != "" {
			return inBlock + lines(matcher)
		}
		return ""
	}
	if m := otherRate.FindStringSubmatch(args[1]); m != nil {
		key := args[0]
		if name := otherKeys[key]; name != "" {
			key = name
		}
		// It estimates as a sliding window does.
		return inBlock + lines("key "+key, "algorithm sliding_window", "size "+m[1], "window 1"+m[2])
	}
	rate := "rate 10/s"
	if _, wrong := option.ParseRate(args[1]); wrong == "" {
		rate = "rate " + args[1]
	}
	switch {
	case strings.HasPrefix(args[1], "/") && args[0] != "not" && !isMatcher(args[0]) || strings.HasPrefix(args[1], "@"):
		return "the matcher before the name"
	case matcher != "":
		return inBlock + lines(matcher)
	case !strings.Contains(args[0], "{"): // a name: as a key it would be one bucket for all
		return inBlock + lines(rate)
	}
	return inBlock + lines("key "+args[0], rate)
}

// optionsIn returns the lines of a block for words that are options of a limit and their
// values, as in size 10 or size=10, or nil if they begin with none.
func optionsIn(words []string) (lines []string) {
	var split []string
	for _, word := range words {
		if name, value, found := strings.Cut(word, "="); found && slices.Contains(limitOptions, name) {
			split = append(split, name, value)
		} else {
			split = append(split, word)
		}
	}
	if len(split) < 2 || !slices.Contains(limitOptions, split[0]) {
		return nil
	}
	for i, word := range split {
		if i == 0 || slices.Contains(limitOptions, word) {
			lines = append(lines, word)
		} else {
			lines[len(lines)-1] += " " + word
		}
	}
	return lines
}
