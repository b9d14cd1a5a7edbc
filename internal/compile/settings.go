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
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
)

// Settings are the options of a block, without its limits.
type Settings struct {
	Accounting rule.Accounting
	Families   outcome.Families
	OnError    rule.OnError // empty if it is the app's
	NoBody     bool         // whether denials have none
	Jitter     float64
}

// set reads the options of a block.
func (s *Settings) set(b *config.Block, resolve option.Resolver) (err error) {
	charged, fields := rule.Atomic, config.List{}
	if len(b.RateLimits) > 0 {
		charged, fields = rule.InOrder, config.List{"off"}
	}
	if len(b.Headers) > 0 {
		fields = b.Headers
	}
	if s.Accounting, err = option.ParseConstant("accounting", cmp.Or(b.Accounting, string(charged)), rule.ParseAccounting); err != nil {
		return err
	}
	if s.Families, err = NewFamilies(fields); err != nil {
		return err
	}
	if b.OnError != "" {
		if s.OnError, err = option.ParseConstant("on_error", b.OnError, rule.ParseOnError); err != nil {
			return err
		}
	}
	if err := advice.ParseIgnored(b.IgnoreAdvice); err != nil {
		return err
	}
	if s.NoBody, err = option.ParseConstant("body", cmp.Or(b.Body, "on"), option.Is("off", "on", "off")); err != nil {
		return err
	}
	if b.Jitter != "" {
		parse := parseJitter
		if len(b.RateLimits) > 0 {
			parse = zone.ParseJitter
		}
		s.Jitter, err = option.Parse(resolve, "jitter", string(b.Jitter), parse)
	}
	return err
}

// NewFamilies parses the headers option.
func NewFamilies(words []string) (outcome.Families, error) {
	if len(words) == 0 {
		return outcome.XRateLimit, nil
	}
	const use = "x-ratelimit, github, ratelimit-11, fill, or off alone"
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
		case "fill":
			family = outcome.Fill
		case "off":
			if len(words) > 1 {
				return 0, option.Bad("headers", strings.Join(words, " "), use)
			}
		default:
			return 0, option.Bad("headers", word, use)
		}
		switch {
		case slices.Contains(words[:i], word):
			return 0, option.Errorf("headers", "duplicate %q", word)
		case set&family != 0:
			return 0, option.Errorf("headers", "x-ratelimit can't be combined with github; use one of them: both set X-RateLimit-Reset")
		}
		set |= family
	}
	if set == outcome.Fill {
		set |= outcome.XRateLimit
	}
	return set, nil
}

// parseJitter parses the jitter option. Beside limits, more than 1 is a percentage by mistake.
func parseJitter(text string) (share float64, use string) {
	if share, use = zone.ParseJitter(text); use != "" || share > 1 {
		return 0, "a share of the wait from 0 to 1, such as 0.1 for 10 %"
	}
	return share, ""
}
