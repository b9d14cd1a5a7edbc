package advice

import (
	"slices"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
)

// Kind is what is wrong. A test applies the remedy of each, see TestRemedies.
type Kind uint8

// The kinds of advice.
const (
	KeyPerRequest Kind = iota
	KeyUnknown
	KeyShortName
	KeyUnset
	KeyText
	KeyConstant
	KeyPrefix
	KeyChosen
	KeyWithoutUser
	KeyOfProxy
	RateChosen
	SizeChosen
	SetLater
	Unreachable
	Unmatched
	MethodUnknown
	NeverCounts
	PathForm
	Uncounted
	UncountedUser
	MatcherAsName
	SharedBySites
	Unnamed
	ChargedTwice
	ZonesDiffer
	ZoneClosed
	Floodable
	NeverDenies
	AddressChosen
	ProxyUntrusted
	ProxyExempted
	BanOfAll
	OneAtOnce
	DelayUnused
	Unprotected
	ConsistencyUnused
	Unavailable
	RedisOpen
	OfRedis

	Kinds // how many there are
)

// level is how sure it is that advice is on a mistake, and so who gives it.
type level uint8

const (
	certain level = iota // it can't be meant as it is
	perhaps              // it may be meant
	hint                 // it may well be meant, and only check says it
)

// kind is what is known of a Kind.
type kind struct {
	name  string
	level level
}

// kinds has the names of the kinds, as the option ignore_advice takes them, and their levels.
var kinds = [Kinds]kind{
	KeyPerRequest:     {"key_per_request", certain},
	KeyUnknown:        {"key_unknown", certain},
	KeyShortName:      {"key_short_name", certain},
	KeyUnset:          {"key_unset", certain},
	KeyText:           {"key_text", certain},
	KeyConstant:       {"key_constant", perhaps},
	KeyPrefix:         {"key_prefix", certain},
	KeyChosen:         {"key_chosen", hint},
	KeyWithoutUser:    {"key_without_user", hint},
	KeyOfProxy:        {"key_of_proxy", hint},
	RateChosen:        {"rate_chosen", perhaps},
	SizeChosen:        {"size_chosen", hint},
	SetLater:          {"set_later", certain},
	Unreachable:       {"unreachable", certain},
	Unmatched:         {"unmatched", certain},
	MethodUnknown:     {"method_unknown", hint},
	NeverCounts:       {"never_counts", certain},
	PathForm:          {"path_form", hint},
	Uncounted:         {"uncounted", certain},
	UncountedUser:     {"uncounted_user", certain},
	MatcherAsName:     {"matcher_as_name", perhaps},
	SharedBySites:     {"shared_by_sites", perhaps},
	Unnamed:           {"unnamed", perhaps},
	ChargedTwice:      {"charged_twice", perhaps},
	ZonesDiffer:       {"zones_differ", perhaps},
	ZoneClosed:        {"zone_closed", perhaps},
	Floodable:         {"floodable", perhaps},
	NeverDenies:       {"never_denies", hint},
	AddressChosen:     {"address_chosen", perhaps},
	ProxyUntrusted:    {"proxy_untrusted", hint},
	ProxyExempted:     {"proxy_exempted", hint},
	BanOfAll:          {"ban_of_all", hint},
	OneAtOnce:         {"one_at_once", hint},
	DelayUnused:       {"delay_unused", hint},
	Unprotected:       {"unprotected", perhaps},
	ConsistencyUnused: {"consistency_unused", hint},
	Unavailable:       {"unavailable", hint},
	RedisOpen:         {"redis_open", hint},
	OfRedis:           {"redis", certain},
}

// String returns the name of a kind.
func (k Kind) String() string { return kinds[k].name }

// IsCertain reports whether what is of a kind can't be meant as it is.
func (k Kind) IsCertain() bool { return kinds[k].level == certain }

// OnLoad reports whether what is of a kind is reported when a config is loaded too.
func (k Kind) OnLoad() bool { return kinds[k].level != hint }

// ParseIgnored returns an error unless all words are names of kinds.
func ParseIgnored(words []string) error {
	for _, word := range words {
		if !slices.ContainsFunc(kinds[:], func(k kind) bool { return k.name == word }) {
			return option.Bad("ignore_advice", word, "what caddy rate-limit check has in brackets, such as path_form")
		}
	}
	return nil
}
