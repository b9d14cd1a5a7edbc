package ratelimit

import (
	"cmp"
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

// scope is a place in a Caddyfile where options stand.
type scope struct {
	place   string // for errors
	options []string
	above   *scope // around it, or nil
}

// The scopes of options. Those of a whole block, beside the options of its limit, are one
// of their own.
var (
	globalScope = &scope{"the global option of this module", []string{"redis", "memory", "on_error", "consistency", "metrics"}, nil}
	redisScope  = &scope{"redis of the global option", []string{
		"username", "password", "db", "cluster",
		"master_name", "sentinel_username", "sentinel_password", "tls", "tls_client_auth", "tls_server_name",
		"tls_trust_pool", "tls_insecure_skip_verify", "key_prefix", "key_secret", "timeout",
	}, globalScope}
	memoryScope = &scope{"memory of the global option", []string{"max_keys"}, globalScope}

	wholeScope = &scope{"the block of the directive itself", handlerOptions, nil}
	blockScope = &scope{"the block of the directive", slices.Concat(limitOptions, handlerOptions), nil}
	limitScope = &scope{"a limit", limitOptions, wholeScope}
	zoneScope  = &scope{"a zone", []string{
		"match", "key", "window", "events", "max_concurrent", "ipv4_prefix", "ipv6_prefix",
	}, wholeScope}

	// What mholt/caddy-ratelimit has for a whole block, beside zones.
	zonesScope       = &scope{"the block of the directive itself, beside zones", zonesOptions, nil}
	distributedScope = &scope{"distributed, beside zones", []string{"read_interval", "write_interval", "purge_age"}, wholeScope}

	zonesOptions = []string{"distributed", "storage", "sweep_interval", "log_key", "disable_metrics"}
)

// homes are the scopes where an option may belong that is unknown where it stands, in the
// order in which they are looked through after those above.
var homes = []*scope{limitScope, wholeScope, zoneScope, zonesScope, distributedScope, globalScope, redisScope, memoryScope}

// otherWords are words that other rate limiters or other directives have for options, and
// what to write here instead. In limits and zones, they come before any word that is
// spelled like them.
var otherWords = []struct {
	in    []*scope
	words string
	want  string
}{
	{inLimits, "events max_events requests max_requests", "rate 10/1m, or put events and window into a zone"},
	{inLimits, "average rps", "rate 10/s"},
	{inLimits, "interval", "rate 10/1m, or max and duration"},
	{inLimits, "burst capacity tokens", "size"},
	{inLimits, "refill_rate", "drip_rate"},
	{inLimits, "refill_size", "drip_size"},
	{inLimits, "delay", "max_delay"},
	{inLimits, "max_concurrent", "concurrency"},
	{inLimits, "ban_duration ban_time bantime", "ban 10m"},
	{inLimits, "methods", "match method <method...>"},
	{inLimits, "allow allowlist exclude except ignore whitelist", "match not client_ip <address...>"},
	{inLimits, "message response respond", `handle_errors 429 beside the directive, see "Denied requests" in docs/directive.md`},
	{[]*scope{limitScope}, "distributed storage", "redis in the global option, for all limits"},
	{[]*scope{globalScope}, "distributed storage", "redis <address>"},
	{inZones, "max max_events requests max_requests limit burst capacity tokens size", "events"},
	{inZones, "average rate rps", "events and window, such as events 10 and window 1m"},
	{inZones, "duration interval period", "window"},
	{inZones, "concurrency", "max_concurrent"},
}

var (
	inLimits = []*scope{limitScope, blockScope}
	inZones  = []*scope{zoneScope}
)

// unknownOption returns the error for the current token, which is none of the options of
// its scope.
func unknownOption(d *caddyfile.Dispenser, here *scope) error {
	got := option.Quote(option.Shortened(redisaddr.WithoutPassword(d.Val())))
	word := plainWord(d.Val())
	elsewhere := ""
	for _, o := range otherWords {
		if !slices.Contains(strings.Fields(o.words), word) {
			continue
		}
		if slices.Contains(o.in, here) {
			return d.Errf("%s: got an unknown option, want %s", got, o.want)
		}
		elsewhere = cmp.Or(elsewhere, "want in "+o.in[0].place+": "+o.want)
	}
	if home := here.homeOf(word); home != nil {
		return d.Errf("%s: got it in %s, want it in %s, see docs/directive.md", got, here.place, home.place)
	}
	if elsewhere != "" && !slices.Contains(here.options, word) {
		return d.Errf("%s: got it in %s, %s", got, here.place, elsewhere)
	}
	meant := nearestOption(word, here.options)
	if meant == "" && slices.Contains(here.options, "match") {
		meant = matcherOption(append([]string{d.Val()}, nextArgs(d)...))
	}
	if meant != "" {
		return d.Errf("%s: got an unknown option, did you mean %s?", got, option.Quote(option.Shortened(option.Redacted(meant))))
	}
	return d.Errf("%s: got an unknown option, see docs/directive.md", got)
}

// homeOf returns the scope to which an option belongs that stands in s, or nil if it is
// none or one of s.
func (s *scope) homeOf(name string) *scope {
	if slices.Contains(s.options, name) {
		return nil // but for how it is written
	}
	for home := s.above; home != nil; home = home.above {
		if slices.Contains(home.options, name) {
			return home
		}
	}
	for _, home := range homes {
		if slices.Contains(home.options, name) {
			return home
		}
	}
	return nil
}

// plainWord returns a word as options are spelled, without what other formats have behind
// or within it, as in YAML, or size=10.
func plainWord(word string) string {
	if i := strings.IndexAny(word, ":="); i > 0 {
		word = word[:i]
	}
	return strings.ReplaceAll(strings.ToLower(word), "-", "_")
}

// nearestOption returns the option that is spelled most like a word, or "" if none is.
func nearestOption(word string, known []string) string {
	if len(word) > 32 {
		return ""
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
	const inBlock = "at most a name, a key and a rate, and options in a block with a line for each: "
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
