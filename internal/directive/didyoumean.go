package directive

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/compile"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/redisaddr"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/placeholder"
)

// Scope is a place in a Caddyfile where options are.
type Scope struct {
	Place   string // for errors
	Options []string
	above   *Scope // around it, or nil
}

// The scopes of options. The options of a whole block, beside its limit's, have their own.
var (
	GlobalScope = &Scope{"the global option of this module", config.CaddyfileNames(new(config.App)), nil}
	RedisScope  = &Scope{"redis of the global option", config.CaddyfileNames(new(config.Redis)), GlobalScope}
	MemoryScope = &Scope{"memory of the global option", config.CaddyfileNames(new(config.Memory)), GlobalScope}

	wholeScope = &Scope{"the block of the directive itself", config.BlockOptions, nil}
	BlockScope = &Scope{"the block of the directive", slices.Concat(config.LimitOptions, config.BlockOptions), nil}
	LimitScope = &Scope{"a limit", config.LimitOptions, wholeScope}
	ZoneScope  = &Scope{"a zone", config.CaddyfileNames(new(config.Zone)), wholeScope}

	// Limits of connections, whose block is apart from that of the directive.
	ListenerScope      = &Scope{"rate_limit in listener_wrappers", slices.Concat(compile.ConnectionOptions, config.CaddyfileNames(new(config.Listener))), nil}
	listenerLimitScope = &Scope{"a limit in listener_wrappers", compile.ConnectionOptions, ListenerScope}

	autoScope = &Scope{"the block of concurrency auto", config.CaddyfileNames(new(config.Auto)), LimitScope}

	// What mholt/caddy-ratelimit has for a whole block, beside zones.
	ZonesScope       = &Scope{"the block of the directive itself, beside zones", config.CaddyfileNames(new(config.Zones)), nil}
	DistributedScope = &Scope{"distributed, beside zones", config.CaddyfileNames(new(config.Distributed)), wholeScope}
)

// homes are the scopes where an option may belong that is unknown where it is used, in the
// order in which they are searched after the scopes above.
var homes = []*Scope{LimitScope, wholeScope, autoScope, ZoneScope, ZonesScope, DistributedScope, GlobalScope, RedisScope, MemoryScope}

// unknownOption returns the error for a line that begins with none of the options of the scope.
func (b *block) unknownOption(i int) error {
	here, words := b.scope, splitWords(b.lines[i].words)
	got, word := option.Quote(option.Shortened(redisaddr.WithoutPassword(b.lines[i].words[0]))), plainWord(words[0])
	switch use, _ := b.instead(i); {
	case slices.Contains(here.Options, use):
		return fmt.Errorf("%s: unknown option; did you mean %s?", got, use)
	case strings.HasPrefix(use, "leave "):
		return fmt.Errorf("%s: unknown option; %s", got, use)
	case use != "":
		return fmt.Errorf("%s: unknown option; use %s", got, use)
	}
	if home := here.homeOf(word); home != nil {
		return fmt.Errorf("%s: not an option of %s; use it in %s, see %sdirective.md", got, here.Place, home.placeFrom(here), option.Docs)
	}
	meant := nearestOption(word, here.Options)
	if meant == "" && slices.Contains(here.Options, "match") {
		meant = useMatchers(words)
	}
	if at, use := elsewhere(here, words); meant == "" && use != "" {
		return fmt.Errorf("%s: not an option of %s; in %s use %s", got, here.Place, at.Place, use)
	}
	if what := outside(here, words[0]); what != "" {
		or := ""
		if len(word) > 3 && meant != "" { // map is not max
			or = ", or did you mean " + meant
		}
		return fmt.Errorf("%s is %s: is the } of rate_limit missing before it%s?", got, what, or)
	}
	if meant == "" && slices.Contains(here.Options, "limit") {
		meant = limitMeant(words)
	}
	if meant != "" {
		return fmt.Errorf("%s: unknown option; did you mean %s?", got, meant)
	}
	if len(here.Options) < 10 {
		return fmt.Errorf("%s: unknown option; use %s", got, option.InWords(here.Options, "or"))
	}
	return fmt.Errorf("%s: unknown option; see %sdirective.md", got, option.Docs)
}

// elsewhere returns what a line means in another scope, which is not that of its first word.
func elsewhere(here *Scope, words []string) (at *Scope, use string) {
	if slices.Contains(here.Options, plainWord(words[0])) {
		return nil, ""
	}
	for i := range Hints {
		if at = Hints[i].In[0]; at.Options == nil { // the line of the directive
			continue
		}
		if use, _ = Hints[i].apply([][]string{words}, 0); use != "" && (!here.isOfConnections() || !strings.HasPrefix(use, "leave ")) {
			return at, use
		}
	}
	return nil, ""
}

// useMatchers returns what to use for words that are like matchers, or "".
func useMatchers(words []string) string {
	meant := matcherOption(words)
	if meant == "" {
		return ""
	}
	option := strings.Fields(meant)
	if lines := matchersIn(option[1:]); len(lines) > 1 {
		return "match and a block with a line for each matcher: " + quotedLines(lines)
	}
	use, _ := instead(LimitScope, [][]string{option}, 0)
	return cmp.Or(use, inQuotes(meant))
}

// placeFrom returns what home, which is not here, is called in an error.
func (home *Scope) placeFrom(here *Scope) string {
	if here == ZoneScope && home == LimitScope {
		return home.Place + " instead of the zone"
	}
	return home.Place
}

// outside returns what a word is outside the directive and the global option, or "" if it is nothing
// there.
func outside(here *Scope, word string) string {
	if (here == GlobalScope || here.above == GlobalScope) && slices.Contains(strings.Fields(globalOptions), word) {
		return "a global option"
	}
	_, err := caddy.GetModule("http.handlers." + word)
	if err == nil && word != "rate_limit" || slices.Contains(strings.Fields(directives), word) {
		return "a directive"
	}
	return ""
}

// Caddy's directives, except those with the names of their handlers, and its global options.
const (
	directives = "abort acme_server basic_auth basicauth bind copy_response error forward_auth fs handle handle_errors handle_path " +
		"header import invoke log log_append log_level log_name log_skip method php_fastcgi redir request_header respond root " +
		"route skip_log timeouts tls try_files uri"
	globalOptions = "acme_ca acme_ca_root acme_dns acme_eab admin auto_https cert_issuer cert_lifetime debug default_bind default_sni dns ech " +
		"email events fallback_sni filesystem frankenphp grace_period http_port https_port key_type local_certs log " +
		"ocsp_interval ocsp_stapling on_demand_tls order persist_config pki preferred_chains renew_interval renewal_window_ratio " +
		"servers shutdown_delay skip_install_trust storage storage_check storage_clean_interval"
)

// homeOf returns the scope to which an option in s belongs, or nil if it is not an option or belongs to s.
func (s *Scope) homeOf(name string) *Scope {
	if slices.Contains(s.Options, name) {
		return nil // except for how it is written
	}
	for home := s.above; home != nil; home = home.above {
		if slices.Contains(home.Options, name) {
			return home
		}
	}
	for _, home := range homes {
		if slices.Contains(home.Options, name) {
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

// splitWords splits words such as size=10 and http_req_rate(10s) in two, and leaves out a = alone.
func splitWords(words []string) (all []string) {
	for _, word := range words {
		switch m := assignment.FindStringSubmatch(word); {
		case m != nil:
			all = append(all, m[1], cmp.Or(m[2], m[3]))
		case word != "=":
			all = append(all, word)
		}
	}
	return all
}

var assignment = regexp.MustCompile(`^([A-Za-z_-]+)(?:=(.+)|\(([^()]+)\))$`)

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
	words = append(splitWords(words[:1]), words[1:]...)     // but query a=b is a matcher
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

// useOneMatch returns what to use instead of two lines of the option match, given their matchers.
func useOneMatch(lines ...string) string {
	matchers := make([]string, 0, len(lines))
	for _, line := range lines {
		switch {
		case line == "":
			return "one block, with all matchers"
		case line[0] == '@' || line[0] == '*':
			return "one @name, with all matchers in its definition"
		case line[0] == '/':
			line = "path " + line
		}
		matchers = append(matchers, line)
	}
	return "a block with a line for each matcher: " + quotedLines(matchers)
}

// isNoPath reports whether a word can't be the path of a request: a URL, a regular expression, a suffix alone, or
// one with the comma of a list behind it.
func isNoPath(word string) bool {
	return slices.ContainsFunc([]string{"url", "regexp", "suffix"}, func(kind string) bool { return kinds[kind].pattern.MatchString(word) }) ||
		strings.HasSuffix(word, ",")
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
