package adminapi

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"time"
	"unicode/utf8"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/admin/adminjson"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/key/keytext"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/clientip"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// peek answers with what buckets hold.
func (s server) peek(w http.ResponseWriter, r *http.Request) error { return s.inspect(w, r, false) }

// reset empties buckets and answers with what they held.
func (s server) reset(w http.ResponseWriter, r *http.Request) error { return s.inspect(w, r, true) }

// inspect looks at the bucket of a limit or the buckets of all limits, or empties them.
func (s server) inspect(w http.ResponseWriter, r *http.Request, reset bool) error {
	query, err := readQuery(w, r, useBody)
	if err != nil {
		return err
	}
	if query.Limit == "" {
		answer, err := s.newest().inspectAll(r.Context(), query.BucketQuery, reset)
		return writeAnswer(w, answer, answer.Error, err)
	}
	answer, err := s.newest().inspect(r.Context(), query.BucketQuery, reset)
	return writeAnswer(w, answer, answer.Error, err)
}

// inspect looks at the requested bucket, or empties it, and returns what it holds, or
// held.
func (c *Config) inspect(ctx context.Context, query adminjson.BucketQuery, reset bool) (adminjson.Level, error) {
	b, err := c.find(query.Limit)
	if err != nil {
		return adminjson.Level{}, err
	}
	return c.inspectBucket(ctx, b, query, reset)
}

// inspectAll is inspect for the buckets of all limits whose keys can be made from what is
// asked. It empties none that all requests share: one client is to be let in, and not the
// others too.
func (c *Config) inspectAll(ctx context.Context, query adminjson.BucketQuery, reset bool) (answer adminjson.Levels, err error) {
	answer.Buckets, answer.Skipped = []adminjson.Level{}, []adminjson.Skipped{}
	all := c.numbered()
	if len(all) == 0 {
		return answer, errNoLimits
	}
	not := func(b *bucket, why string) {
		answer.Skipped = append(answer.Skipped, adminjson.Skipped{Limit: b.title, Why: why})
	}
	seen := make(map[string]bool)
	for i := range all {
		b := &all[i]
		if seen[b.title] {
			continue // it is in several handlers
		}
		seen[b.title] = true
		requests, why := requestsFor(&query, b.title, b.Limit.Key)
		if reset && len(b.Limit.Key.Placeholders()) == 0 {
			requests, why = nil, "all requests share its bucket; to empty that, name the limit"
		}
		for _, request := range requests {
			one, err := c.inspectBucket(ctx, b, request, reset)
			var notLocated caddy.APIError
			switch {
			case errors.As(err, &notLocated):
				why = err.Error()
				continue
			case err != nil:
				return answer, err
			}
			answer.Checked++
			answer.Error = cmp.Or(answer.Error, one.Error)
			if one.Notable() {
				answer.Buckets = append(answer.Buckets, one)
			}
		}
		if why != "" {
			not(b, why)
		}
	}
	return answer, nil
}

// inspectBucket looks at a bucket and its ban, or empties both.
func (c *Config) inspectBucket(ctx context.Context, b *bucket, query adminjson.BucketQuery, reset bool) (adminjson.Level, error) {
	at, err := locate(b.Bucket, query)
	if err != nil {
		return adminjson.Level{}, err
	}
	if b.Limit.Load != nil {
		if reset {
			return adminjson.Level{}, badRequest("limit: it follows the load, and has nothing to empty")
		}
		return b.loadLevel(at), nil
	}
	found, err := c.look(ctx, b, at, reset)
	if err != nil {
		return adminjson.Level{}, err
	}
	answer := b.level(at, found)
	if b.Limit.Bans == nil {
		return answer, nil
	}
	ban, err := c.look(ctx, b, b.BanOf(&at), reset)
	if reset && err == nil && ban.error == "" {
		b.liftBan(&at)
	}
	if answer.Banned = option.Seconds(ban.RetryAfter); answer.Banned > 0 && answer.Size != nil {
		*answer.Remaining, *answer.RetryAfter = 0, max(*answer.RetryAfter, answer.Banned)
	}
	if answer.Node != nil && ban.node != nil {
		answer.Node.Remembered = answer.Node.Remembered || ban.node.Remembered
	}
	answer.Error = cmp.Or(answer.Error, ban.error)
	return answer, err
}

// loadLevel returns the answer for a limit that follows the load: its size is what it allows
// now, and its level what is in progress.
func (b *bucket) loadLevel(at limiter.Bucket) adminjson.Level {
	s := b.Limit.Load.Controllers.Peek(at.Key, time.Now())
	size, left := int64(s.Limit), int64(max(s.Limit-s.InProgress, 0))
	return adminjson.Level{
		Limit: b.title, Key: shownKey(at.Key, at.Name == b.AddressName), Options: b.Options(), From: "memory",
		Size: &size, Level: int64(s.InProgress), Remaining: &left, InProgress: left == 0,
	}
}

// found is what was found in a bucket, or what it held before it was emptied.
type found struct {
	limiter.Level
	from  string          // the store
	node  *adminjson.Node // what this process knows of it; nil if it is the store
	error string          // why Redis did not answer, so that Level is from this process
}

// keptHere reports whether the buckets of b are kept in this process.
func (c *Config) keptHere(b *bucket) bool {
	return c.Redis == nil || b.Limit.Pace != nil || b.Limit.Connections
}

// look looks at a bucket of b or its ban, or empties it, in the store that has it. If Redis does not
// answer, it does so in this process alone.
func (c *Config) look(ctx context.Context, b *bucket, at limiter.Bucket, reset bool) (f found, err error) {
	if c.keptHere(b) {
		return c.lookHere(ctx, at, reset)
	}

	// The store must stay open, as for a request that a handler decides.
	c.InUse.Add(1)
	defer c.InUse.Add(-1)
	here, remembered, err := c.Redis.PeekHere(at)
	if err != nil {
		return f, err
	}
	look := c.Redis.Peek
	if reset {
		look = c.Redis.Reset
	}
	f.from = "redis"
	f.Level, err = look(ctx, at)
	if errors.Is(err, limiter.ErrUnavailable) {
		f.from, f.Level, f.error, err = "node", here, unavailable(err), nil
		if reset {
			err = c.Redis.ResetHere(at)
		}
	}
	f.node = &adminjson.Node{Level: here.Units, Remembered: remembered, Leased: here.Leased, Unreported: here.Unreported}
	return f, err
}

// lookHere is look in this process, with or without Redis.
func (c *Config) lookHere(ctx context.Context, at limiter.Bucket, reset bool) (f found, err error) {
	look := c.Memory.Peek
	if reset {
		look = c.Memory.Reset
	}
	f.from = "memory"
	f.Level, err = look(ctx, at)
	return f, err
}

// unavailable returns what answers say if Redis did not answer.
func unavailable(err error) string { return "redis unavailable: " + err.Error() }

// locate returns the requested bucket in stores.
func locate(b *rule.Bucket, query adminjson.BucketQuery) (at limiter.Bucket, err error) {
	switch {
	case b.Off:
		return at, badRequest("limit: its factor is 0, so it has no buckets")
	case b.Rate.IsDynamic():
		return at, badRequest("limit: its %s depends on the request, and each value has its own buckets, so a key does not identify one", b.Rate.Option)
	case b.Drip.IsDynamic():
		return at, badRequest("limit: its %s depends on the request, and each value has its own buckets, so a key does not identify one", b.Drip.Option)
	}
	if at, err = identify(b, query); err != nil {
		return at, err
	}
	at.Limit = b.Stored(time.Now())
	at.Cost = b.UsualCost()
	at.Limit.Size += b.ExtraCapacity(&at.Limit, at.Cost)
	if b.Limit.ShareWhenFull {
		// Known only if it is the client's address that was typed.
		if network := clientip.NetworkOf(query.Text()); network != clientip.NoNetwork {
			at.ShareKey = network
		}
	}
	return at, nil
}

// identify returns a bucket with the name and the key of the requested one.
func identify(b *rule.Bucket, query adminjson.BucketQuery) (at limiter.Bucket, err error) {
	at.Name, at.MaxKeys, at.DryRun, at.Consistency = b.Name, b.Limit.MaxKeys, b.Limit.DryRun, b.Consistency
	if query.Address != nil {
		at.Name = b.AddressName
	}
	at.Key, err = typedKey(&query, b.Limit.Key)
	return at, err
}

// level returns the answer for b, of whose bucket at that was found.
func (b *bucket) level(at limiter.Bucket, level found) adminjson.Level {
	answer := adminjson.Level{
		Error: level.error, Limit: b.title, From: level.from, Level: level.Units, Held: level.Held, Clear: option.Seconds(level.Clear),
		Key: shownKey(at.Key, at.Name == b.AddressName), Options: b.Options(), Node: level.node,
	}
	if !b.SizeIsDynamic() {
		wait, above := option.Seconds(level.RetryAfter), b.ExtraCapacity(&at.Limit, at.Cost)
		size, remaining := at.Limit.Size-above, max(level.Remaining-above, 0)
		answer.Size, answer.Remaining, answer.RetryAfter = &size, &remaining, &wait
		answer.Never = at.Cost > size
	}
	if b.Policy.Concurrency { // when it is clear is up to the requests in progress
		answer.InProgress = answer.RetryAfter != nil && *answer.RetryAfter > 0
		if answer.Clear = 0; answer.InProgress {
			answer.RetryAfter = nil
		}
	}
	return answer
}

// shownKey returns a key, or a client's address that replaces it, as it is shown.
func shownKey(key string, address bool) adminjson.Key {
	text := keytext.Of(key)
	if address {
		return adminjson.Key{Address: &text}
	}
	return adminjson.Key{Key: &text, NotUTF8: !utf8.ValidString(key)}
}
