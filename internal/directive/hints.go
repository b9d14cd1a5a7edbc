package directive

import (
	"cmp"
	"regexp"
	"slices"
	"strings"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
)

// hint is something that people write where it is no option, or no value of one, and what to
// write instead.
type hint struct {
	In      []*Scope
	Written string // the first words of a line: each is one of those between "|", or of a kind <x>
	Use     string // for an error; what can be written literally is in quotes
}

// Hints are all of them. In use, <x> is the first word of the kind x after the words that are
// written out, or else the example behind "="; without either, the hint is none. <x...> is all
// words of the kind. The first hint that is one counts, before any option that is spelled like a word.
var Hints = []hint{
	{inLimits, "events|max_events|requests|max_requests", `"rate <n=10>/<d=1m>", or events and window in a zone`},
	{inLimits, "average|rps|per_second", `"rate <n=10>/s"`},
	{inLimits, "rpm|per_minute", `"rate <n=10>/m"`},
	{inLimits, "interval", `"rate <n=10>/<d=1m>", or max and duration`},
	{inLimits, "burst|capacity|tokens|maxretry|max_retry", `"size <n=10>"`},
	{inLimits, "findtime|find_time|window_length", `"window <d=1m>" with algorithm sliding_log and a size`},
	{inLimits, "refill_rate", `"drip_rate <d=1s>"`},
	{inLimits, "refill_size", `"drip_size <n=1>"`},
	{inLimits, "delay", `"max_delay <d=1s>"`},
	{inLimits, "nodelay", "max_delay with a duration if requests are to wait, as without it none does"},
	{inLimits, "max_concurrent|limit_conn|max_connections|connections|in_flight", `"concurrency <n=10>"`},
	{inLimits, "ban_duration|ban_time|bantime|block|block_duration", `"ban <d=10m>"`},
	{inLimits, "methods", `"match method <w...=POST>"`},
	{inLimits, "allow|allowlist|bypass|exclude|except|ignore|skip|whitelist <defined>", "match not <defined>"},
	{inLimits, "allow|allowlist|bypass|exclude|except|ignore|skip|whitelist <path>", `"match not path <path...>"`},
	{inLimits, "allow|allowlist|bypass|exclude|except|ignore|skip|whitelist", `"match not client_ip <network...=10.0.0.0/8>"`},
	{inLimits, "by_header", `"key {header.<w=X-Api-Key>}"`},
	{inLimits, "sourcecriterion|source_criterion", `"key {client_ip}", or another placeholder`},
	{inLimits, "error_codes|status_codes", `"count status <status...=401>"`},
	{inLimits, "reject_status|rejected_code|status_code", `"status <status=429>"`},
	{inLimits, "zone_size", `"max_keys <n=10000>"`},
	{inLimits, "name", "the name beside the directive, or limit <name> { ... }"},
	{inLimits, "trusted_proxies", "it in the global options: servers { trusted_proxies ... }"},
	{inLimits, "rate_limit", "limit <name> { ... }, with match in it for a matcher"},
	{inLimits, "message|response", "handle_errors 429 beside the directive, see " + option.Docs + "directive.md#denied-requests"},
	{inLimits, "respond", "it after the } of rate_limit, or for denials in handle_errors 429, see " +
		option.Docs + "directive.md#denied-requests"},
	{inLimits, "count <status>", `"count status <status...>"`},
	{inLimits, "count header <w>", `"count header <w> *"`},
	{inLimits, "count not header <w>", `"count header !<w>" for responses without it`},
	{inLimits, "limit <units>", `"rate <units>"`},
	{inLimits, "limit <w> <units>", `"limit <w>" with "rate <units>" in it`},
	{inLimits, "key header <w>", `"key {header.<w>}"`},
	{inLimits, "key cookie <w>", `"key {cookie.<w>}"`},
	{inLimits, "limit <matcher>", `"limit <name>" with "match <matcher>" in it`},
	{[]*Scope{BlockScope}, "fail_open|failopen", `"on_error allow"`},
	{[]*Scope{BlockScope}, "fail_closed|failclosed|fail_close", `"on_error deny"`},
	{[]*Scope{LimitScope}, "distributed|storage", "redis in the global option, for all limits"},
	{inBlocks, "header <field>", `"match header <field> *" for requests that have it, or "key {header.<field>}" for a bucket for each of its values; the directive belongs after the }`},
	{inBlocks, "match path <url>", `"match path <path...>"`},
	{inBlocks, "match not <path>", `"match not path <path...>"`},
	{inBlocks, "match <negated>", "match not <negated>, and the rest of the line after it"},

	{inZones, "max|max_events|requests|max_requests|limit|capacity|tokens|size", `"events <n=10>"`},
	{inZones, "events <n>", `"events <n>" and "window <window>"`},
	{inZones, "burst|nodelay", "events alone, as a zone admits that many at once"},
	{inZones, "average|rate|rps", `"events <n=10>" and "window <window=1s>"`},
	{inZones, "duration|interval|period", `"window <window=1m>"`},
	{inZones, "concurrency", `"max_concurrent <n=10>"`},

	{[]*Scope{DistributedScope}, "read_timeout", `"read_interval <d=5s>"`},
	{[]*Scope{DistributedScope}, "write_timeout", `"write_interval <d=5s>"`},

	{inGlobal, "distributed|storage", `"redis <server=localhost:6379>"`},
	{inGlobal, "redis <host> <n>", `"redis <host>:<n>"`},

	// Beside the directive, some limiters have a number of keys, a size of memory, the status of denials
	// or a word for all requests.
	{inBeside, "<denial>", `"status <denial>"`},
	{inBeside, "zone <w>", "zone <w> { ... } that has key, events and window"},
	{[]*Scope{BesideScope}, "<n> <n>", `"rate <n>/<d>" and "size <m>"`},
	{[]*Scope{BesideScope}, "<n>", `"rate <n>/<d=s>"`},
	{[]*Scope{BesideScope}, "<rate>", `"rate <rate>"`},
	{[]*Scope{BesideRateScope}, "<n>", `"size <n>"`},
	{[]*Scope{BesideRequestsScope}, "<n>", `"max_keys <n>"`},
	{[]*Scope{BesideRateScope, BesideRequestsScope}, "<memory>", "nothing for memory, which is used as needed"},
	{[]*Scope{BesideNameScope}, "all|everyone|global|static", `"key all"`},
}

// What words on the directive's line mean depends on the others.
var (
	BesideScope         = &Scope{Place: "the line of the directive"}
	BesideRateScope     = &Scope{Place: "the line of the directive, with a rate"}
	BesideRequestsScope = &Scope{Place: "the line of the directive, with a rate such as 10r/s"}
	BesideNameScope     = &Scope{Place: "the line of the directive, after a name"}
)

// The scopes of hints.
var (
	inLimits = []*Scope{LimitScope, BlockScope}
	inZones  = []*Scope{ZoneScope}
	inBlocks = []*Scope{LimitScope, BlockScope, ZoneScope}
	inGlobal = []*Scope{GlobalScope}
	inBeside = []*Scope{BesideScope, BesideRateScope, BesideRequestsScope}
)

// kinds are the kinds of words in hints. What is in the parentheses of a pattern, if it has any, is
// what is written for such a word, as the function has it.
var kinds = map[string]struct {
	pattern *regexp.Regexp
	as      func(string) string
}{
	"n":       {regexp.MustCompile(`^([0-9]+)(?:r?/.*)?$`), nil},
	"m":       {regexp.MustCompile(`^([0-9]+)$`), nil}, // the second number
	"d":       {durationWord, nil},
	"window":  {durationWord, asWindow},
	"rate":    {regexp.MustCompile(`^([0-9].*)$`), option.RateMeant},
	"status":  {regexp.MustCompile(`^([1-5](?:[0-9][0-9]|xx))$`), nil},
	"denial":  {regexp.MustCompile(`^([45][0-9][0-9])$`), nil},
	"memory":  {regexp.MustCompile(`(?i)^([0-9]+[kmg]b?)$`), nil},
	"w":       {regexp.MustCompile(`^([^"{}\s]+)$`), nil},
	"field":   {regexp.MustCompile(`^([A-Z][A-Za-z0-9-]*|[a-z0-9]+(?:-[a-z0-9]+)+)$`), nil},
	"network": {regexp.MustCompile(`^([0-9a-fA-F:.]*[.:][0-9a-fA-F:.]*(?:/[0-9]+)?|private_ranges)$`), nil},
	"host":    {regexp.MustCompile(`^([A-Za-z][A-Za-z0-9.-]*|[0-9]+(?:\.[0-9]+){3})$`), nil},
	"server":  {regexp.MustCompile(`^([A-Za-z0-9.-]+:[0-9]+)$`), nil},
	"units":   {regexp.MustCompile(`^([0-9.]+[a-z]*/.+)$`), nil},
	"defined": {regexp.MustCompile(`^(@.+)$`), nil},
	"negated": {regexp.MustCompile(`^!([a-z_]+)$`), nil},
	"url":     {regexp.MustCompile(`^(https?://.*)$`), nil},
	"path":    {regexp.MustCompile(`^(/.*|https?://.*)$`), asPath},
	"matcher": {regexp.MustCompile(`^([/@].*[A-Za-z0-9].*)$`), asMatcher},
	"name":    {regexp.MustCompile(`^([/@].*[A-Za-z0-9].*)$`), asName},
}

// durationWord matches a duration or its unit, also behind a number as in a rate.
var durationWord = regexp.MustCompile(`^(?:[0-9]+r?/)?([0-9]*(?:ms|[smhd]|(?:sec|second|min|minute|hr|hour|day)s?))$`)

// asWindow returns the duration of a rate as one alone.
func asWindow(word string) string {
	unit := strings.TrimLeft(word, "0123456789")
	n := strings.TrimSuffix(word, unit)
	if unit != "ms" {
		unit = unit[:1]
	}
	return cmp.Or(n, "1") + unit
}

// asPath returns the path of a URL, or a path as it is.
func asPath(word string) string {
	_, rest, isURL := strings.Cut(word, "://")
	if !isURL {
		return word
	}
	_, path, _ := strings.Cut(rest, "/")
	path, _, _ = strings.Cut(path, "?")
	return "/" + path
}

// asMatcher returns a matcher token as the option match has it. Most upstreams take a path and the
// same with a slash behind it for one.
func asMatcher(word string) string {
	if word[0] == '@' || strings.HasSuffix(word, "*") || strings.HasSuffix(word, "/") {
		return word
	}
	return "path " + word + " " + word + "/"
}

// asName returns the name of a limit for a matcher token.
func asName(word string) string { return strings.Trim(notInNames.ReplaceAllString(word, "-"), "-") }

var notInNames = regexp.MustCompile(`[^A-Za-z0-9_.]+`)

// Slot matches <x> and <x...>, with or without an example.
var Slot = regexp.MustCompile(`<([a-z]+)(\.\.\.)?(?:=([^>]*))?>`)

// instead returns what to write in a scope instead of a line that begins with words, and for how
// many of them. It returns "" if that is not known.
func instead(here *Scope, words []string) (use string, taken int) {
	for i := range Hints {
		if slices.Contains(Hints[i].In, here) {
			if use, taken = Hints[i].apply(words); use != "" {
				return use, taken
			}
		}
	}
	return "", 0
}

// FirstWords returns the words with which lines begin that h is about, if they are not of a kind.
func (h *hint) FirstWords() []string {
	if first, _, _ := strings.Cut(h.Written, " "); first[0] != '<' {
		return strings.Split(first, "|")
	}
	return nil
}

// apply is instead for one hint.
func (h *hint) apply(words []string) (use string, taken int) {
	literals := 0
	for i, pattern := range strings.Fields(h.Written) {
		switch s := Slot.FindStringSubmatch(pattern); {
		case i == len(words):
			return "", 0
		case s != nil && !kinds[s[1]].pattern.MatchString(words[i]):
			return "", 0
		case s == nil && !slices.Contains(strings.Split(pattern, "|"), plainWord(words[i])):
			return "", 0
		case s == nil:
			literals++
		}
		taken++
	}
	complete := true
	use = Slot.ReplaceAllStringFunc(h.Use, func(text string) string {
		s := Slot.FindStringSubmatch(text)
		name, all, example := s[1], s[2] != "", s[3]
		if text == "<name>" && h.Written != "limit <matcher>" { // of something that has one
			return text
		}
		found, to := ofKind(name, words[literals:])
		switch {
		case len(found) == 0:
			complete = complete && example != ""
			return example
		case !all:
			found = found[:1]
		}
		taken = max(taken, literals+to)
		return option.Shortened(option.Redacted(strings.Join(found, " ")))
	})
	if !complete {
		return "", 0
	}
	return use, taken
}

// ofKind returns the words that are of a kind, as they are to be written, and how many words there
// are up to the first of them.
func ofKind(name string, words []string) (found []string, to int) {
	for i, word := range words {
		m := kinds[name].pattern.FindStringSubmatch(word)
		if m == nil {
			continue
		}
		if kinds[name].as != nil {
			m[1] = kinds[name].as(m[1])
		}
		if m[1] == "" {
			continue
		}
		if found = append(found, m[1]); len(found) == 1 || name == "m" && len(found) == 2 {
			to = i + 1
		}
	}
	if name == "m" {
		found = found[min(1, len(found)):]
	}
	return found, to
}
