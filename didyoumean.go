package ratelimit

import (
	"cmp"
	"slices"
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

	autoScope = &scope{"the block of concurrency auto", []string{"latency", "min", "max", "until", "high", "low"}, limitScope}

	// What mholt/caddy-ratelimit has for a whole block, beside zones.
	zonesScope       = &scope{"the block of the directive itself, beside zones", zonesOptions, nil}
	distributedScope = &scope{"distributed, beside zones", []string{"read_interval", "write_interval", "purge_age"}, wholeScope}

	zonesOptions = []string{"distributed", "storage", "sweep_interval", "log_key", "disable_metrics"}
)

// homes are the scopes where an option may belong that is unknown where it stands, in the
// order in which they are looked through after those above.
var homes = []*scope{limitScope, wholeScope, autoScope, zoneScope, zonesScope, distributedScope, globalScope, redisScope, memoryScope}

// otherWords are words that other rate limiters or other directives have for options, and
// what to write here instead. In limits and zones, they come before any word that is
// spelled like them.
var otherWords = []struct {
	in    []*scope
	words string
	use   string
}{
	{inLimits, "events max_events requests max_requests", "rate 10/1m, or put events and window into a zone"},
	{inLimits, "average rps per_second", "rate 10/s"},
	{inLimits, "rpm per_minute", "rate 10/m"},
	{inLimits, "interval", "rate 10/1m, or max and duration"},
	{inLimits, "burst capacity tokens maxretry max_retry", "size"},
	{inLimits, "findtime find_time window_length", "window, beside algorithm sliding_log and size"},
	{inLimits, "refill_rate", "drip_rate"},
	{inLimits, "refill_size", "drip_size"},
	{inLimits, "delay", "max_delay"},
	{inLimits, "nodelay", "max_delay if requests are to wait, as without it none does"},
	{inLimits, "max_concurrent limit_conn max_connections connections in_flight", "concurrency"},
	{inLimits, "ban_duration ban_time bantime block block_duration", "ban 10m"},
	{inLimits, "methods", "match method <method...>"},
	{inLimits, "allow allowlist exclude except ignore whitelist", "match not client_ip <address...>"},
	{inLimits, "by_header", "key {header.X-Api-Key} with the field"},
	{inLimits, "sourcecriterion source_criterion", "key {client_ip}, or another placeholder"},
	{inLimits, "error_codes status_codes", "count status <code...>"},
	{inLimits, "reject_status rejected_code status_code", "status"},
	{inLimits, "zone_size", "max_keys"},
	{inLimits, "name", "the name beside the directive, or limit <name> { ... }"},
	{inLimits, "trusted_proxies", "it in the global options: servers { trusted_proxies ... }"},
	{inLimits, "rate_limit", "limit <name> { ... }, with match in it for a matcher"},
	{inLimits, "message response respond", `handle_errors 429 beside the directive, see "Denied requests" in docs/directive.md`},
	{[]*scope{limitScope}, "distributed storage", "redis in the global option, for all limits"},
	{[]*scope{globalScope}, "distributed storage", "redis <address>"},
	{inZones, "max max_events requests max_requests limit capacity tokens size", "events"},
	{inZones, "burst nodelay", "events alone, as a zone admits that many at once"},
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
			return d.Errf("%s: unknown option; use %s", got, o.use)
		}
		elsewhere = cmp.Or(elsewhere, "in "+o.in[0].place+" use "+o.use)
	}
	if home := here.homeOf(word); home != nil {
		return d.Errf("%s: not an option of %s; use it in %s, see docs/directive.md", got, here.place, home.place)
	}
	if elsewhere != "" && !slices.Contains(here.options, word) {
		return d.Errf("%s: not an option of %s; %s", got, here.place, elsewhere)
	}
	meant := nearestOption(word, here.options)
	if meant == "" && slices.Contains(here.options, "match") {
		meant = matcherOption(append([]string{d.Val()}, nextArgs(d)...))
	}
	if meant != "" {
		return d.Errf("%s: unknown option; did you mean %s?", got, option.Quote(option.Shortened(option.Redacted(meant))))
	}
	if len(here.options) < 10 {
		return d.Errf("%s: unknown option; use %s", got, option.InWords(here.options, "or"))
	}
	return d.Errf("%s: unknown option; see docs/directive.md", got)
}

// useInstead returns what is written in a scope instead of a word from elsewhere, or "".
func useInstead(word string, here *scope) string {
	for _, o := range otherWords {
		if slices.Contains(o.in, here) && slices.Contains(strings.Fields(o.words), word) {
			return o.use
		}
	}
	return ""
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

// matchersIn returns the matchers in words behind match of which the first would take the others
// for its own: those of paths, methods and hosts take any.
func matchersIn(words []string) (matchers []string) {
	if first := slices.IndexFunc(words, func(word string) bool { return word != "not" }); first < 0 ||
		!slices.Contains([]string{"path", "method", "host"}, words[first]) {
		return nil
	}
	for i, word := range words {
		switch begins := isMatcher(word); {
		case i == 0 || begins && words[i-1] != "not":
			matchers = append(matchers, word)
		default:
			matchers[len(matchers)-1] += " " + word
		}
	}
	return matchers
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

// ownLine is how to write options that stand in one line.
const ownLine = "each option in a line of its own, as well as the } that ends the block"

// inOneLine reports whether words look like several options in one line.
func inOneLine(words []string) bool {
	return slices.ContainsFunc(words, func(word string) bool {
		return strings.HasSuffix(word, ";") || !placeholder.BracesBalance(word)
	})
}
