package advice

import (
	"slices"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
)

// Kind is what is wrong. A test applies the remedy of each, see TestRemedies.
type Kind struct {
	name  string
	level level
}

// The kinds of advice, with the names that the option ignore_advice takes.
var (
	KeyPerRequest     = newKind("key_per_request", certain)
	KeyUnknown        = newKind("key_unknown", certain)
	KeyShortName      = newKind("key_short_name", certain)
	KeyUnset          = newKind("key_unset", certain)
	KeyText           = newKind("key_text", certain)
	KeyConstant       = newKind("key_constant", perhaps)
	KeyPrefix         = newKind("key_prefix", certain)
	KeyChosen         = newKind("key_chosen", hint)
	KeyWithoutUser    = newKind("key_without_user", hint)
	KeyOfProxy        = newKind("key_of_proxy", hint)
	RateChosen        = newKind("rate_chosen", perhaps)
	SizeChosen        = newKind("size_chosen", hint)
	SetLater          = newKind("set_later", certain)
	Unreachable       = newKind("unreachable", certain)
	Unmatched         = newKind("unmatched", certain)
	MethodUnknown     = newKind("method_unknown", hint)
	FieldMatched      = newKind("field_matched", hint)
	UnclearExempt     = newKind("unclear_exempt", hint)
	ClearedByOthers   = newKind("cleared_by_others", perhaps)
	NeverCounts       = newKind("never_counts", certain)
	PathForm          = newKind("path_form", hint)
	Uncounted         = newKind("uncounted", certain)
	UncountedUser     = newKind("uncounted_user", certain)
	MatcherAsName     = newKind("matcher_as_name", perhaps)
	SharedBySites     = newKind("shared_by_sites", perhaps)
	Unnamed           = newKind("unnamed", perhaps)
	ChargedTwice      = newKind("charged_twice", perhaps)
	ZonesDiffer       = newKind("zones_differ", perhaps)
	ZoneClosed        = newKind("zone_closed", perhaps)
	Floodable         = newKind("floodable", perhaps)
	NeverDenies       = newKind("never_denies", hint)
	AddressChosen     = newKind("address_chosen", perhaps)
	ProxyUntrusted    = newKind("proxy_untrusted", hint)
	ProxyExempted     = newKind("proxy_exempted", hint)
	BanOfAll          = newKind("ban_of_all", hint)
	OneAtOnce         = newKind("one_at_once", hint)
	DelayUnused       = newKind("delay_unused", hint)
	ResponseCut       = newKind("response_cut", perhaps)
	EncodedLater      = newKind("encoded_later", perhaps)
	Unprotected       = newKind("unprotected", perhaps)
	ConsistencyUnused = newKind("consistency_unused", hint)
	Unavailable       = newKind("unavailable", hint)
	ConnectionsProxy  = newKind("connections_of_proxy", perhaps)
	ConnectionsOfAll  = newKind("connections_of_all", perhaps)
	AddressMany       = newKind("address_many", perhaps)
	AttemptsUncounted = newKind("attempts_uncounted", perhaps)
	RedisOpen         = newKind("redis_open", hint)
	OfRedis           = newKind("redis", certain)
)

// Kinds are all kinds.
var Kinds []Kind

// newKind returns a new kind.
func newKind(name string, level level) Kind {
	kind := Kind{name, level}
	Kinds = append(Kinds, kind)
	return kind
}

// level is how sure it is that advice is on a mistake, and so who gives it.
type level uint8

const (
	certain level = iota // it can't be meant as it is
	perhaps              // it may be meant
	hint                 // it may well be meant, and only check says it
)

// String returns the name of a kind.
func (k Kind) String() string { return k.name }

// IsCertain reports whether what is of a kind can't be meant as it is.
func (k Kind) IsCertain() bool { return k.level == certain }

// OnLoad reports whether what is of a kind is reported when a config is loaded too.
func (k Kind) OnLoad() bool { return k.level != hint }

// UseKinds describes names of kinds.
const UseKinds = "what caddy rate-limit check has in brackets, such as path_form"

// ParseIgnored returns an error unless all words are names of kinds.
func ParseIgnored(words []string) error {
	for _, word := range words {
		if !slices.ContainsFunc(Kinds, func(k Kind) bool { return k.name == word }) {
			return option.Bad("ignore_advice", word, UseKinds)
		}
	}
	return nil
}
