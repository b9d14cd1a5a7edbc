package rule

import (
	"context"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/placeholder"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// banKnown is for how long a ban in Redis counts for connections after a request has met it: another Caddy may have
// lifted it since. Then connections pass until a request meets it again.
const banKnown = 10 * time.Second

// addressBans are the bans of a limit of requests whose keys are addresses.
type addressBans struct {
	*Bucket
	memory *limiter.Memory // that has them; nil if Redis has
}

// Link finds the limits of requests whose bans hold for l's connections, among all of its config. memory has their
// bans; it is nil if Redis has.
func (l *Listener) Link(limits []*Limit, memory *limiter.Memory) error {
	l.bans = nil
	for _, name := range l.Banned {
		b := banning(limits, name)
		switch {
		case b == nil:
			return option.Bad("banned", name, "the name of a limit of requests in this config that has ban, such as banned login")
		case b.Limit.Bans == nil || b.Limit.DryRun || !isAddress(b.Limit):
			return option.Bad("banned", name, "the name of a limit with ban, with the key {client_ip} and without dry_run: connections only have an address")
		}
		l.bans = append(l.bans, addressBans{b, memory})
	}
	return nil
}

// banning returns the bucket of a limit of requests by its path, or nil.
func banning(limits []*Limit, path string) *Bucket {
	for b := range Buckets(limits) {
		if b.Path == path && b.IsMain() && !b.Off {
			return b.Bucket
		}
	}
	return nil
}

// isAddress reports whether the keys of l are addresses.
func isAddress(l *Limit) bool {
	return len(l.Key.Parts) == 1 && (l.Key.Has(placeholder.ClientIP) || l.Key.Has(placeholder.RemoteHost))
}

// refusedBy returns the path of the limit of requests that bans an address, or "", and counts that.
func (l *Listener) refusedBy(address string) string {
	for i := range l.bans {
		b := &l.bans[i]
		if address == "" {
			break
		}
		left, by := b.left(b.Limit.Key.Prefixes.Of(address))
		if left > 0 {
			b.Policy.Counters.Count(0, new(limiter.Bucket), &limiter.Decision{Denied: true, RetryAfter: left, By: by}, true, true, false)
			return b.Path
		}
	}
	return ""
}

// left returns for how long a key is banned, as far as this process knows.
func (b *addressBans) left(key string) (left time.Duration, by limiter.Decider) {
	if b.memory == nil {
		now, ban := time.Now(), b.Limit.Bans.List.of(BannedKey{Text: key})
		if now.Sub(ban.met) > banKnown {
			return 0, by
		}
		return ban.end.Sub(now), limiter.DecidedByCache
	}
	level, err := b.memory.Peek(context.Background(), b.BanOf(&limiter.Bucket{Name: b.Name, Key: key, MaxKeys: b.Limit.MaxKeys}))
	if err != nil { // only of a bucket that is malformed
		return 0, by
	}
	return level.RetryAfter, limiter.DecidedByMemory
}
