package compile

import (
	"cmp"
	"slices"
	"strings"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/advice"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/zone"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/field"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
)

// Settings are the options of a block, without its limits.
type Settings struct {
	Accounting rule.Accounting
	Families   outcome.Families
	OnError    rule.OnError // empty if it is the app's
	NoBody     bool         // whether denials have none
	Jitter     *rule.Jitter // nil without
	ReadBody   int64        // of which fields are read
}

// set reads the options of a block.
func (s *Settings) set(b *config.Block, resolve option.Resolver) (err error) {
	r := reader{resolve: resolve}
	s.Accounting = readConstant(&r, "accounting", cmp.Or(b.Accounting, string(rule.Atomic)), rule.ParseAccounting)
	fields := b.Headers
	if len(b.RateLimits) > 0 {
		if b.Accounting == "" {
			s.Accounting = rule.InOrder
		}
		if len(fields) == 0 {
			fields = config.List{"off"}
		}
	}
	if s.Families, err = NewFamilies(fields); err != nil {
		return cmp.Or(r.err, err)
	}
	s.OnError = readConstant(&r, "on_error", b.OnError, rule.ParseOnError)
	if err := advice.ParseIgnored(b.IgnoreAdvice); err != nil {
		return cmp.Or(r.err, err)
	}
	s.NoBody = readConstant(&r, "body", b.Body, option.Is("off", "on", "off"))
	s.ReadBody = cmp.Or(read(&r, "read_body", b.ReadBody, parseReadBody), field.MaxBody)
	s.Jitter = read(&r, "jitter", b.Jitter, jitterParser(len(b.RateLimits) > 0))
	return r.err
}

// UseHeaders describes the words of the headers option.
const UseHeaders = "x-ratelimit, github, ratelimit-11, or off alone"

// NewFamilies parses the headers option.
func NewFamilies(words []string) (outcome.Families, error) {
	if len(words) == 0 {
		return outcome.XRateLimit, nil
	}
	var set outcome.Families
	for i, word := range words {
		var family outcome.Families
		switch word {
		case "x-ratelimit":
			family = outcome.XRateLimit
		case "github":
			family = outcome.XRateLimit | outcome.GitHub
		case "ratelimit-11":
			family = outcome.IETF
		case "off":
			if len(words) > 1 {
				return 0, option.Bad("headers", strings.Join(words, " "), UseHeaders)
			}
		default:
			return 0, option.Bad("headers", word, UseHeaders)
		}
		switch {
		case slices.Contains(words[:i], word):
			return 0, option.Errorf("headers", "duplicate %q", word)
		case set&family != 0:
			return 0, option.Errorf("headers", "x-ratelimit can't be combined with github; use one of them: both set X-RateLimit-Reset")
		}
		set |= family
	}
	return set, nil
}

// jitterParser returns the parser of the option jitter, which may be a share beside zones.
func jitterParser(zones bool) option.Parser[*rule.Jitter] {
	return func(text string) (*rule.Jitter, string) {
		if text == "slots" {
			return rule.NewJitter(0), ""
		}
		if !zones {
			return nil, "slots, with which each denied client is told a time of its own"
		}
		share, use := zone.ParseJitter(text)
		if use != "" || share == 0 {
			return nil, use
		}
		return rule.NewJitter(share), ""
	}
}
