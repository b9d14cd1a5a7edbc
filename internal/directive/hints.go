package directive

import (
	"cmp"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
)

// hint is something that people write where it is no option, or no value of one, and what to
// write instead.
type hint struct {
	In      []*Scope
	Written string // how lines begin: each word is one of those between "|", or of a kind <x>
	Use     string // an option of the same value, or for an error; what can be written literally is in quotes
}

// Hints are all of them. Those with several lines, between which is a semicolon, are about a block that has all of
// these, in any order; a line in parentheses stays. In use, <x> is the first word of the kind x after the words that are
// written out, or else the example behind "="; without either, the hint does not apply. <x...> is all
// words of the kind. The first hint that is one counts, before any option that is spelled like a word.
var Hints = []hint{
	{inLimits, amounts + "|limit <n>; (algorithm <windowed>)", `"size <n>"`},
	{inLimits, "interval|per|ttl|time_window|timeframe <d>; (algorithm <windowed>)", `"window <d>"`},
	{inLimits, amounts + "|limit <n>; window|period|interval|per|duration|ttl|time_window|timeframe|unit|every <d>", `"rate <n>/<d>"`},
	{inLimits, "max|rate <whole>; window|period|interval|per|ttl|time_window|timeframe|unit|every <d>", `"rate <whole>/<d>"`},
	{inLimits, "window|period|interval|per|duration|ttl|time_window|timeframe|every <secs>; " + amounts + "|limit <n>", `"rate <m>/<secs>"`},
	{inLimits, "window|period|interval|per|ttl|time_window|timeframe|every <secs>; max <n>", `"rate <m>/<secs>"`},
	{inLimits, "windowms|window_ms|interval_ms|durationms <ms>; " + amounts + "|max|limit <n>", `"rate <m>/<ms>"`},
	{inLimits, "tokens_per_fill <n>; fill_interval <d>", `"rate <n>/<d>"`},
	{inLimits, amounts + "|limit <n>; <unit>", `"rate <n>/<unit>"`},
	{inLimits, "window|period|interval|per|time_window <secs>; count <whole>", `"rate <m>/<secs>"`},
	{inLimits, "count <whole>; time_window|window|period|interval|per <d>", `"rate <whole>/<d>"`},
	{inLimits, amounts + " <n>; (period <calendar>)", `"algorithm fixed_window" and "size <n>"`},
	{inLimits, "<unit> <n>; (rate <rated>)", `"limit <unit>" with "rate <n>/<unit>" in it`},
	{inLimits, "<unit> <n>", `"rate <n>/<unit>"`},
	{inLimits, "<windowed>", `"algorithm <windowed>"`},
	{inLimits, "<calendar> <n>", `"algorithm fixed_window", "size <n>" and "period <calendar>"`},
	{inLimits, "rate <monthly>", `"algorithm fixed_window", "size <n>" and "period <calendar>"`},
	{inLimits, "rate <byterate>", `"speed <byterate>" for bandwidth, or with it "actual_cost bytes" for traffic`},
	{inLimits, "bandwidth|bandwidth_limit|bwlimit|limit_rate|max_speed|throttle|throughput|download_rate <byterate>", `"speed <byterate>"`},
	{inLimits, "bandwidth|bandwidth_limit|bwlimit|limit_rate|max_speed|throttle|throughput|download_rate <kilo>", `"speed <kilo>/s"`},
	{inLimits, "bandwidth|bandwidth_limit|bwlimit|limit_rate|max_speed|throttle|throughput|download_rate", `speed with bytes and a time, such as speed 2MB/s`},
	{inLimits, "rate <n> per <calendar>", `"algorithm fixed_window", "size <n>" and "period <calendar>"`},
	{inLimits, "average|rps|per_second|requests_per_second|replenishrate|replenish_rate", `"rate <n=10>/s"`},
	{inLimits, "rpm|per_minute|requests_per_minute", `"rate <n=10>/m"`},
	{inLimits, "rph|per_hour|requests_per_hour", `"rate <n=10>/h"`},
	{inLimits, "rpd|per_day|requests_per_day", `"rate <n=10>/d"`},
	{inLimits, amounts, `"rate <n=10>/<d=1m>", or events and window in a zone`},
	{inLimits, "interval|fill_interval", `"rate <n=10>/<d=1m>", or max and duration`},
	{inLimits, "burst|burstcapacity|burst_capacity|capacity|tokens|max_tokens|maxretry|max_retry", `"size <n=10>"`},
	{inLimits, "limit_req", `"size <n=10>" for its burst, beside a rate`},
	{inLimits, "limit_req_zone", `"rate <rated=10/s>" and "key {client_ip}"`},
	{inLimits, "http_req_rate", `"rate <n=10>/<d=10s>"`},
	{inLimits, "stick_table", "a rate, such as rate 20/10s"},
	{inLimits, "skipsuccessfulrequests|skip_successful_requests", `"count status 4xx 5xx"`},
	{inLimits, "skipfailedrequests|skip_failed_requests", `"count not status 4xx 5xx"`},
	{inLimits, "cleanup_interval|cleanup|gc_interval|purge_interval|sweep", "leave it out: buckets that are empty go by themselves"},
	{inLimits, "retry_after", "leave it out: denials always have Retry-After, the time until there is room"},
	{inLimits, "enabled|enable|active false|off|no|0", `"factor 0", which turns a limit off`},
	{inLimits, "disabled|disable", `"factor 0", which turns a limit off`},
	{inLimits, "shadow|shadow_mode|report_only|dry|log_only", `"dry_run"`},
	{everywhere, "enabled|enable|active", "leave it out: what is written is in force"},
	{inLimits, "by|per|group_by|identifier|characteristics|keygenerator|key_generator ip|client_ip|address|remote_ip|remote_addr|ip.src|ipaddress", `"key {client_ip}"`},
	{inLimits, "standardheaders|legacyheaders|standard_headers|legacy_headers", "headers with x-ratelimit or ratelimit-11 in the block of the directive"},
	{inLimits, "mitigation_timeout|blockduration|block_duration|ban_time|bantime|ban_duration <secs>", `"ban <secs>"`},
	{inLimits, "findtime|find_time|window_length", `"window <d=1m>" with algorithm sliding_log and a size`},
	{inLimits, "refill|refill_rate|leak_rate", `"drip_rate <d=1s>"`},
	{inLimits, "refill_size", `"drip_size <n=1>"`},
	{inLimits, "delay|max_wait|wait|queue_timeout", `"max_delay <d=1s>"`},
	{inLimits, "nodelay", "max_delay with a duration if requests are to wait, as without it none does"},
	{inLimits, inProgress + " <n>; (size|rate|max <n>)", `"limit in_progress" with "concurrency <n=10>" in it`},
	{inLimits, inProgress, `"concurrency <n=10>"`},
	{inLimits, "ban_duration|ban_time|bantime|block|block_duration|blockduration|mitigation_timeout|block_for", `"ban <d=10m>"`},
	{inLimits, "ban <durations...>", `"ban <all...>"`},
	{inLimits, "count status <codes...>", `"count status <all...>"`},
	{inLimits, "count not status <codes...>", `"count not status <all...>"`},
	{inLimits, "clear status <codes...>", `"clear status <all...>"`},
	{inLimits, "count <codes...>", `"count status <all...>"`},
	{[]*Scope{BlockScope}, "headers <families...>", `"headers <all...>"`},
	{inBlocks, "match path <regexp>", `"match path_regexp <regexp>"`},
	{inBlocks, "match path <suffix>", `"match path *<suffix>"`},
	{inBlocks, "match path <paths...>", `"match path <all...>"`},
	{inLimits, "methods", `"match method <all...=POST>"`},
	{inLimits, "paths|routes|endpoint|endpoints <path>", `"match path <all...>"`},
	{inLimits, "only|for|on|when|where <path>", `"match path <all...>"`},
	{inLimits, "only|for|on|when|where <defined>", "match <defined>"},
	{inLimits, "only|for|on|when|where|if <matching>", `"match <all...>"`},
	{inLimits, "only|for|on|when|where <verb>", `"match method <verb...>"`},
	{inLimits, exempting + " <matching>", `"match not <all...>"`},
	{inLimits, exempting + " <defined>", "match not <defined>"},
	{inLimits, exempting + " <path>", `"match not path <path...>"`},
	{inLimits, exempting, `"match not client_ip <network...=10.0.0.0/8>"`},
	{inLimits, "by_header", `"key {header.<w=X-Api-Key>}"`},
	{inLimits, "sourcecriterion|source_criterion", `"key {client_ip}", or another placeholder`},
	{inLimits, "error_codes|status_codes", `"count status <status...=401>"`},
	{inLimits, "reject_status|rejected_code|status_code|statuscode|deny_status", `"status <status=429>"`},
	{inLimits, "zone_size", `"max_keys <n=10000>"`},
	{inLimits, "name", "the name beside the directive, or limit <name> { ... }"},
	{everywhere, "trusted_proxies|trusted_proxies_strict|client_ip_headers", "it in servers { ... }, a global option beside rate_limit"},
	{inLimits, "rate_limit", "limit <name> { ... }, with match in it for a matcher"},
	{inLimits, "message|response", "handle_errors 429 beside the directive, see " + option.Docs + "directive.md#denied-requests"},
	{inLimits, "respond", "it after the } of rate_limit, or for denials in handle_errors 429, see " +
		option.Docs + "directive.md#denied-requests"},
	{inLimits, "count <status>", `"count status <status...>"`},
	{inLimits, "count header <w>", `"count header <w> *"`},
	{inLimits, "count not header <w>", `"count header !<w>" for responses without it`},
	{inLimits, "limit <whole>", `"rate <whole>/1m" with the time that is meant, or limit <name> { ... }`},
	{inLimits, "limit <units>", `"rate <units>"`},
	{inLimits, "<rated>", `"rate <rated>"`},
	{inLimits, "limit <w> <units>", `"limit <w>" with "rate <units>" in it`},
	{inLimits, "key header <w>", `"key {header.<w>}"`},
	{inLimits, "key cookie <w>", `"key {cookie.<w>}"`},
	{inLimits, "limit <matcher>", `"limit <name>" with "match <matcher>" in it`},
	{[]*Scope{BlockScope, GlobalScope}, "fail_open|failopen", `"on_error allow"`},
	{[]*Scope{BlockScope, GlobalScope}, "fail_closed|failclosed|fail_close", `"on_error deny"`},
	{[]*Scope{BlockScope}, "body <text>", "on or off, and for a text of yours handle_errors 429 beside the directive, see " + option.Docs + "directive.md#denied-requests"},
	{[]*Scope{LimitScope}, "distributed|storage", "redis in the global option, for all limits"},
	{inBlocks, "header <field>", `"match header <field> *" for requests that have it, or "key {header.<field>}" for a bucket for each of its values; the directive belongs after the }`},
	{inBlocks, "match path <url>", `"match path <path...>"`},
	{inBlocks, "match header <field>", `"match header <field> *"`},
	{inBlocks, "match not <path>", `"match not path <path...>"`},
	{inBlocks, "match <negated>", "match not <negated>, and the rest of the line after it"},

	{inZones, "max|max_events|requests|max_requests|limit|capacity|tokens|size", `"events <n=10>"`},
	{inZones, "events <n>", `"events <n>" and "window <window>"`},
	{inZones, "burst|nodelay", "leave it out: a zone admits as many events at once"},
	{inZones, "average|rate|rps; (events)", "leave it out: events and window say how many a zone admits"},
	{inZones, "average|rate|rps", `"events <n=10>" and "window <window=1s>"`},
	{inZones, "duration|interval|period", `"window <window=1m>"`},
	{inZones, "concurrency", `"max_concurrent <n=10>"`},

	{[]*Scope{DistributedScope}, "read_timeout", `"read_interval <d=5s>"`},
	{[]*Scope{DistributedScope}, "write_timeout", `"write_interval <d=5s>"`},

	{inGlobal, "distributed|storage", `"redis <server=localhost:6379>"`},
	{inGlobal, "redis <host> <n>", `"redis <host>:<n>"`},
	{inGlobal, "redis <addresses...>", `"redis <all...>"`},
	{inGlobal, "redis <hostdb>", `"redis redis://<hostdb>"`},
	{inGlobal, "redis_address|redis_addr|redis_host|redis_url <server>", `"redis <server>"`},
	{inGlobal, "backend|driver|store redis", `"redis <server=localhost:6379>"`},
	{inGlobal, "memory <whole>", `"memory" with "max_keys <whole>" in it`},
	{inGlobal, "max_keys|max_entries|max_buckets", `"memory" with "max_keys <n=100000>" in it`},
	{inGlobal, "persist|persist_file <path>", `"memory" with "persist <path>" in it`},

	{inRedis, "user|acl_user", "username"},
	{inRedis, "auth|requirepass|pass|passwd|auth_token", "password"},
	{inRedis, "prefix|namespace", "key_prefix"},
	{inRedis, "master|master_set|sentinel_master|service_name", "master_name"},
	{inRedis, "sentinel|sentinels", "the addresses of sentinels beside redis, and master_name"},
	{inRedis, "database|db_number|database_number|index", "db"},
	{inRedis, "host|hosts|port|address|addr|addresses|server|servers|url|endpoint|nodes", "it beside redis, as in redis localhost:6379 { ... }"},
	{inRedis, "tls_trust_pool|tls_ca|ca|ca_file|ca_cert|cacert|tls_ca_cert|tls_cacert|tls_ca_file <path>", `"tls_trust_pool file <path>"`},
	{inRedis, "tls_cert|tls_key|cert|key|tls_cert_file|tls_key_file", "tls_client_auth with the files of the certificate and its key"},
	{inRedis, "ssl|tls_enabled|enable_tls|use_tls|use_ssl", `"tls"`},
	{inRedis, "cluster_mode|cluster_enabled|use_cluster", `"cluster"`},
	{inRedis, "max_retries|retries", "leave it out: a request that Redis does not answer in time is not sent again"},
	{inRedis, "insecure|insecure_skip_verify|tls_skip_verify|tls_insecure", `"tls_insecure_skip_verify"`},
	{inRedis, "read_timeout|write_timeout|dial_timeout|connect_timeout|command_timeout", `"timeout <d=50ms>"`},
	{inRedis, "pool_size|min_idle_conns|max_idle|max_connections|pool", "leave it out: connections are made as they are needed"},
	{inRedis, "ttl|expire|expiry|key_ttl", "leave it out: keys expire when their buckets are empty"},

	{inMemory, "size|limit|capacity|max_entries|max_buckets", `"max_keys <n=100000>"`},
	{inMemory, "file|persist_file <path>", `"persist <path>"`},

	// Beside the directive, some limiters have a number of keys, a size of memory, the status of denials
	// or a word for all requests.
	{inBeside, "<denial>", `"status <denial>"`},
	{inBeside, "zone <w>", "zone <w> { ... } that has key, events and window"},
	{[]*Scope{BesideScope}, amounts + "|limit|max <n> window|period|interval|every|in <d>", `"rate <n>/<d>"`},
	{[]*Scope{BesideScope}, "<n> <n>", `"rate <n>/<d>" and "size <m>"`},
	{[]*Scope{BesideScope}, "<n>", `"rate <n>/<d=s>"`},
	{[]*Scope{BesideScope}, "<rate>", `"rate <rate>"`},
	{[]*Scope{BesideRateScope}, "<n>", `"size <n>"`},
	{[]*Scope{BesideRequestsScope}, "<n>", `"max_keys <n>"`},
	{[]*Scope{BesideRateScope, BesideRequestsScope}, "<memory>", "nothing for memory, which is used as needed"},
	{[]*Scope{BesideNameScope}, "all|everyone|global|static", `"key all"`},
}

// What people call how many requests there may be, or at once, and whom not to limit.
const (
	amounts = "events|max_events|requests|max_requests|average|amount|num_requests|points|quota|requests_per_period|requests_per_unit|threshold"

	inProgress = "max_concurrent|limit_conn|max_connections|connections|in_flight|inflightreq|in_flight_req|maxconn"

	exempting = "allow|allow_list|allowlist|bypass|exclude|except|exempt|ignore|skip|unless|whitelist|whitelist_ips"
)

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
	inRedis  = []*Scope{RedisScope}
	inMemory = []*Scope{MemoryScope}
	inBeside = []*Scope{BesideScope, BesideRateScope, BesideRequestsScope}

	everywhere = []*Scope{LimitScope, BlockScope, ZoneScope, GlobalScope, RedisScope, MemoryScope}
)

// kinds are the kinds of words in hints. What is in the parentheses of a pattern, if it has any, is
// what is written for such a word, as the function has it.
var kinds = map[string]struct {
	pattern *regexp.Regexp
	as      func(string) string
}{
	"n":        {regexp.MustCompile(`^([0-9]+)(?:r?/.*)?$`), nil},
	"whole":    {regexp.MustCompile(`^([0-9]+)$`), nil},
	"m":        {regexp.MustCompile(`^([0-9]+(?:\*[0-9]+)*)$`), nil}, // the second number
	"d":        {durationWord, strings.ToLower},
	"secs":     {regexp.MustCompile(`^([0-9]{1,8})$`), asSeconds},
	"ms":       {regexp.MustCompile(`^([0-9]{1,10}(?:\*[0-9]{1,6}){0,4})$`), asMilliseconds},
	"window":   {durationWord, asWindow},
	"unit":     {regexp.MustCompile(`(?i)^((?:second|minute|hour|day)s?)$`), strings.ToLower},
	"calendar": {regexp.MustCompile(`^(?:[0-9]+/)?(week|month|year)s?$`), nil},
	"monthly":  {regexp.MustCompile(`^([0-9]+/(?:week|month|year)s?)$`), nil},
	"windowed": {regexp.MustCompile(`^(fixed_window|sliding_window|sliding_log)$`), nil},
	"rate":     {regexp.MustCompile(`^([0-9].*)$`), option.RateMeant},
	"rated":    {regexp.MustCompile(`^([0-9]+r?/[0-9]*[a-z]+)$`), nil},
	"byterate": {regexp.MustCompile(`^([0-9.]+[kKMGT]i?B/[0-9]*[a-z]+)$`), nil},
	"kilo": {regexp.MustCompile(`(?i)^([0-9]+[kmg]b?)$`), func(word string) string {
		return strings.Replace(strings.ToUpper(strings.TrimRight(word, "bB")), "K", "k", 1) + "B"
	}},
	"status":    {regexp.MustCompile(`^([1-5](?:[0-9][0-9]|xx))$`), nil},
	"denial":    {regexp.MustCompile(`^(4[0-9][0-9]|503)$`), nil},
	"memory":    {regexp.MustCompile(`(?i)^([0-9]+[kmg]b?)$`), nil},
	"w":         {regexp.MustCompile(`^([^"{}\s]+)$`), nil},
	"all":       {regexp.MustCompile(`^(.+)$`), asList},
	"durations": {regexp.MustCompile(`^([0-9]+[a-z]+,.*)$`), nil},
	"codes":     {regexp.MustCompile(`^([1-5][0-9x]{2},.*)$`), nil},
	"families":  {regexp.MustCompile(`^([a-z0-9-]+,.*)$`), nil},
	"paths":     {regexp.MustCompile(`^(/.*,.*)$`), nil},
	"text":      {regexp.MustCompile(`^(.*[^a-z].*)$`), nil},
	"addresses": {regexp.MustCompile(`^([^@]*,[^@]*)$`), nil},
	"field":     {regexp.MustCompile(`^([A-Z][A-Za-z0-9-]*|[a-z0-9]+(?:-[a-z0-9]+)+)$`), nil},
	"network":   {regexp.MustCompile(`^([0-9a-fA-F:.]*[.:][0-9a-fA-F:.]*(?:/[0-9]+)?|private_ranges)$`), nil},
	"host":      {regexp.MustCompile(`^([A-Za-z][A-Za-z0-9.-]*|[0-9]+(?:\.[0-9]+){3})$`), nil},
	"hostdb":    {regexp.MustCompile(`^([A-Za-z0-9.-]+(?::[0-9]+)?/[0-9]+)$`), nil},
	"server":    {regexp.MustCompile(`^([A-Za-z0-9.-]+:[0-9]+)$`), nil},
	"units":     {regexp.MustCompile(`^([0-9.]+[a-z]*/.+)$`), nil},
	"defined":   {regexp.MustCompile(`^(@.+)$`), nil},
	"negated":   {regexp.MustCompile(`^!([a-z_]+)$`), nil},
	"verb":      {regexp.MustCompile(`^(GET|HEAD|POST|PUT|PATCH|DELETE|OPTIONS)$`), nil},
	"matching":  {regexp.MustCompile(`^((?:client_ip|expression|header|host|method|path|path_regexp|protocol|query|remote_ip))$`), nil},
	"url":       {regexp.MustCompile(`^(https?://.*)$`), nil},
	"regexp":    {regexp.MustCompile(`^(\^.*)$`), nil},
	"suffix":    {regexp.MustCompile(`^(\.[A-Za-z0-9]+)$`), nil},
	"path":      {regexp.MustCompile(`^(/.*|https?://.*)$`), asPath},
	"matcher":   {regexp.MustCompile(`^([/@].*[A-Za-z0-9].*)$`), asMatcher},
	"name":      {regexp.MustCompile(`^([/@].*[A-Za-z0-9].*)$`), asName},
}

// durationWord matches a duration or its unit, also behind a number as in a rate.
var durationWord = regexp.MustCompile(`(?i)^(?:[0-9]+r?/)?([0-9]*(?:ms|[smhd]|(?:sec|second|min|minute|hr|hour|day)s?))$`)

// asWindow returns the duration of a rate as one alone.
func asWindow(word string) string {
	unit := strings.TrimLeft(word, "0123456789")
	n := strings.TrimSuffix(word, unit)
	if unit != "ms" {
		unit = unit[:1]
	}
	return cmp.Or(n, "1") + unit
}

// asSeconds and asMilliseconds return a number of these as a duration.
func asSeconds(word string) string {
	n, _ := strconv.Atoi(word)
	return option.DurationText(time.Duration(n) * time.Second)
}

func asMilliseconds(word string) string {
	product := 1
	for factor := range strings.SplitSeq(word, "*") { // as in 15*60*1000
		n, _ := strconv.Atoi(factor)
		product *= n
	}
	return option.DurationText(time.Duration(product) * time.Millisecond)
}

// asList returns words that have commas between them as they are written here.
func asList(word string) string {
	return strings.Join(strings.FieldsFunc(word, func(r rune) bool { return r == ',' }), " ")
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
	word = strings.TrimRight(word, ",")
	return "path " + word + " " + word + "/"
}

// asName returns the name of a limit for a matcher token.
func asName(word string) string { return strings.Trim(notInNames.ReplaceAllString(word, "-"), "-") }

var notInNames = regexp.MustCompile(`[^A-Za-z0-9_.]+`)

// Slot matches <x> and <x...>, with or without an example.
var Slot = regexp.MustCompile(`<([a-z]+)(\.\.\.)?(?:=([^>]*))?>`)

// instead returns what to write in a scope instead of one of the lines of a block, or of this and others, and
// how many words that takes. It returns "" if that is not known.
func instead(here *Scope, lines [][]string, i int) (use string, taken int) {
	of := here
	if here.isOfConnections() {
		of = LimitScope
	}
	for j := range Hints {
		if slices.Contains(Hints[j].In, of) {
			if use, taken = Hints[j].apply(lines, i); use != "" && here.knows(use) {
				return use, taken
			}
		}
	}
	return "", 0
}

// isOfConnections reports whether the limits in a scope are of connections.
func (s *Scope) isOfConnections() bool { return s == ListenerScope || s == listenerLimitScope }

// knows reports whether what to use can be used in a scope: nothing of requests where there are connections.
func (s *Scope) knows(use string) bool {
	if !s.isOfConnections() {
		return true
	}
	for _, line := range quotedLine.FindAllString(use, -1) {
		name, value, _ := strings.Cut(strings.Trim(line, `"`), " ")
		if !slices.Contains(s.Options, name) || name == "match" && !strings.Contains(value, "_ip ") || name == "key" && value != "{client_ip}" {
			return false
		}
	}
	return strings.HasPrefix(use, `"`)
}

// FirstWords returns the words with which lines begin that h is about, if they are not of a kind.
func (h *hint) FirstWords() []string {
	if first, _, _ := strings.Cut(h.Written, " "); first[0] != '<' {
		return strings.Split(strings.TrimSuffix(first, ";"), "|")
	}
	return nil
}

// apply is instead for one hint.
func (h *hint) apply(lines [][]string, i int) (use string, taken int) {
	parts := strings.Split(h.Written, "; ")
	found := make([]int, 0, len(parts))
	var words, names []string // that are not written out, and what lines begin with
	for _, part := range parts {
		part, stays := strings.CutPrefix(strings.TrimSuffix(part, ")"), "(")
		matches := func(words []string) bool { return begins(words, part) }
		at := i
		if len(parts) > 1 && !matches(lines[at]) { //nolint:gosec // i is the index of a line
			at = slices.IndexFunc(lines, matches)
		}
		if at < 0 || !matches(lines[at]) || slices.Contains(found, at) || stays && at == i {
			return "", 0
		}
		found = append(found, at)
		rest, literals := notWrittenOut(lines[at], part)
		words, taken = append(words, rest...), taken+literals
		if !stays {
			names = append(names, strings.TrimRight(lines[at][0], ":"))
		}
	}
	if !slices.Contains(found, i) {
		return "", 0
	}
	use, to := h.filledIn(words)
	if use != "" && len(names) > 1 {
		use += " instead of " + option.InWords(names, "and")
	}
	return use, max(taken+to, strings.Count(" "+h.Written, " "))
}

// begins reports whether words begin as a line of a hint does.
func begins(words []string, line string) bool {
	for i, pattern := range strings.Fields(line) {
		if i == len(words) {
			return false
		}
		kind := Slot.FindStringSubmatch(pattern)
		if kind == nil {
			if !slices.Contains(strings.Split(pattern, "|"), plainWord(words[i])) {
				return false
			}
			continue
		}
		some := words[i : i+1]
		if kind[2] != "" {
			some = words[i:]
		}
		if !slices.ContainsFunc(some, kinds[kind[1]].pattern.MatchString) {
			return false
		}
	}
	return true
}

// notWrittenOut returns those of words that a line of a hint, as they begin, does not write out, and how many it does.
func notWrittenOut(words []string, line string) (rest []string, literals int) {
	patterns := strings.Fields(line)
	for i, word := range words {
		if i < len(patterns) && patterns[i][0] != '<' {
			literals++
		} else {
			rest = append(rest, word)
		}
	}
	return rest, literals
}

// filledIn returns what to use, with words in it, and how many there are up to the last one of these. It
// returns "" if one is missing.
func (h *hint) filledIn(words []string) (use string, to int) {
	complete := true
	use = Slot.ReplaceAllStringFunc(h.Use, func(text string) string {
		s := Slot.FindStringSubmatch(text)
		name, all, example := s[1], s[2] != "", s[3]
		if text == "<name>" && h.Written != "limit <matcher>" { // of something that has one
			return text
		}
		found, n := ofKind(name, words)
		switch {
		case len(found) == 0:
			complete = complete && example != ""
			return example
		case !all:
			found = found[:1]
		}
		to = max(to, n)
		return option.Shortened(option.Redacted(strings.Join(found, " ")))
	})
	if !complete {
		return "", 0
	}
	return use, to
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
