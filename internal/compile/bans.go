package compile

import (
	"cmp"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// maxBanAfter is the largest number of denials before a ban.
const maxBanAfter = 10_000

// UseBans describes valid durations of bans.
const UseBans = "one to three durations, none shorter than the one before, such as 10m 1h 24h"

// setBans sets how long keys are banned that the limit has denied.
func (l *LimitBuilder) setBans() error {
	if len(l.Ban) == 0 {
		if l.BanAfter != "" {
			return option.Needs("ban_after", string(l.BanAfter), "ban, the durations of bans")
		}
		return nil
	}
	if len(l.Ban) > bucket.MaxBans {
		return option.Bad("ban", l.BanText(), UseBans)
	}
	durations := make([]time.Duration, len(l.Ban))
	for i, text := range l.Ban {
		durations[i] = read(&l.reader, "ban", text, parseBan)
	}
	after := read(&l.reader, "ban_after", cmp.Or(l.BanAfter, "1"), option.Integer(1, maxBanAfter))
	bans := limiter.BanAfter(int64(after), durations...)
	if bans.Validate() != nil {
		return option.Bad("ban", l.BanText(), UseBans)
	}
	l.rule.Bans, l.rule.BanAfter = &rule.Bans{Limit: bans}, int64(after)
	for _, d := range durations {
		l.rule.Ban = append(l.rule.Ban, option.Seconds(d))
	}
	return nil
}

// parseBan parses the duration of a ban.
func parseBan(text string) (d time.Duration, use string) {
	d, err := caddy.ParseDuration(text)
	switch {
	case err == nil && d%time.Microsecond != 0:
		return 0, "a duration of whole microseconds, such as 10m"
	case err != nil || limiter.BanAfter(1, d).Validate() != nil:
		return 0, "a duration from 1s to 17 years, such as 10m"
	}
	return d, ""
}
