package advice

import (
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
)

// longMemory is how long what a bucket holds has to last for its loss to matter.
const longMemory = time.Hour

// forgotten notes quotas and bans that are kept in this process alone.
func (c *collector) forgotten(limits []*rule.Limit) {
	if c.Redis {
		return
	}
	for b := range rule.Buckets(limits) {
		if b.Off || b.Limit.DryRun || b.Limit.Settlement.InProgress || b.Limit.Load != nil {
			continue
		}
		what, lasts := "What it has counted", lastsFor(b.Bucket)
		for _, d := range b.Limit.Ban {
			if banned := time.Duration(d); b.IsMain() && banned > lasts {
				what, lasts = "A ban", banned
			}
		}
		if lasts >= longMemory {
			c.limit(b.Path, Advice{
				Kind: Forgotten, OnCheck: true, Note: true,
				Problem: what + " lasts up to " + option.DurationText(lasts) + ", and is kept in this process alone: a restart of Caddy ends it.",
				Remedy:  "To keep it, set redis in the global option.",
			})
		}
	}
}

// lastsFor returns how long what a bucket has counted lasts, or 0 if that depends on the request.
func lastsFor(b *rule.Bucket) time.Duration {
	switch {
	case b.Period != nil:
		return b.Period.Longest()
	case b.SizeIsDynamic() || b.Rate.IsDynamic() || b.Drip.IsDynamic():
		return 0
	case b.Limit.Algorithm.HasWindow():
		return b.Rate.Constant
	}
	return bucket.Limit(b.Stored(time.Time{})).DrainTime()
}
