package ratelimit

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/adminapi"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/keytext"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// A ban is a bucket of its own, which watches those of its limit: a store counts their
// denials in it, in the same step, and while it is full they deny too. There is one only
// while a store is asked, see evaluation.take. Everything else sees a limit that denies for
// longer.

// banSuffix ends the names of the buckets that ban. A limit's name has no "@".
const banSuffix = "@ban"

// maxBanAfter is the largest number of denials before a ban.
const maxBanAfter = 10_000

// wantBans describes valid durations of bans.
const wantBans = "one to three durations, none shorter than the one before, such as 10m 1h 24h"

// setBan sets how long keys are banned that the limit has denied.
func (l *Limit) setBan() error {
	if len(l.Ban) == 0 {
		if l.BanAfter != "" {
			return badOption("ban_after", string(l.BanAfter), "ban with it, the durations of bans")
		}
		return nil
	}
	text := strings.Join(l.Ban, " ")
	switch {
	case len(l.buckets) == 0:
		return badOption("ban", text, "a size with it")
	case l.Concurrency != "":
		return badOption("ban", text, "no concurrency with it: who has too many requests in progress may go on when they end")
	case l.CountDenied:
		return badOption("ban", text, "no count_denied with it, which keeps those out already who go on asking")
	case l.shareWhenFull:
		return badOption("ban", text, "when_full forget with it, or whole networks would be banned")
	case len(l.Ban) > limiter.MaxBans:
		return badOption("ban", text, wantBans)
	}
	durations := make([]time.Duration, len(l.Ban))
	for i, text := range l.Ban {
		var err error
		if durations[i], err = newNumberBy(l.resolve, "ban", text, parseBan); err != nil {
			return err
		}
	}
	after := 1
	if l.BanAfter != "" {
		var err error
		if after, err = newNumberBy(l.resolve, "ban_after", string(l.BanAfter), parseInteger(1, maxBanAfter)); err != nil {
			return err
		}
	}
	bans := limiter.BansFor(int64(after), durations...)
	if bans.Validate() != nil {
		return badOption("ban", text, wantBans)
	}
	l.bans, l.banDurations = &bans, durations
	return nil
}

// banAfter returns how many denials lead to a ban, or 0 if none do.
func (l *Limit) banAfter() int64 {
	if l.bans == nil {
		return 0
	}
	return l.bans.Size
}

// parseBan parses the duration of a ban.
func parseBan(text string) (d time.Duration, want string) {
	d, err := caddy.ParseDuration(text)
	if err != nil || limiter.BansFor(1, d).Validate() != nil {
		return 0, "a duration from 1s to 17 years in whole microseconds, such as 10m"
	}
	return d, ""
}

// banOf returns the bucket that bans the key of at, which is b's bucket of a request.
func (b *bucket) banOf(at *limiter.Bucket) limiter.Bucket {
	main := b.limit.buckets[0]
	name := main.name
	if at.Name == b.addressName {
		name = main.addressName
	}
	return limiter.Bucket{Name: name + banSuffix, Key: at.Key, Limit: *b.limit.bans, MaxKeys: at.MaxKeys, DryRun: at.DryRun}
}

// addBans adds to e the buckets that ban, each behind those of its limit.
func (e *evaluation) addBans() {
	for i := 0; i < len(e.of); i++ {
		first, l := i, e.of[i].limit
		if l.bans == nil {
			continue
		}
		for i+1 < len(e.of) && e.of[i+1].limit == l {
			i++
		}
		ban := e.of[first].banOf(&e.buckets[first])
		ban.Watches = uint8(i + 1 - first) //nolint:gosec // a limit has at most two
		i++
		e.buckets = slices.Insert(e.buckets, i, ban)
		e.of = slices.Insert(e.of, i, configured{bucket: e.of[first].bucket})
	}
}

// foldBans removes the buckets that ban from e again. What they have decided, if they were
// asked, is what those decide that they watch. The request that begins a ban was denied by
// one of these anyway, and is denied by their limit.
func (e *evaluation) foldBans() {
	for i := len(e.of) - 1; i >= 0; i-- {
		first, next := i-int(e.buckets[i].Watches), i
		if first == i {
			continue
		}
		if len(e.decisions) > 0 {
			d := e.decisions[i]
			if d.Began {
				next = first + 1
			}
			for j := first; j < next && d.Denied; j++ {
				e.of[j].banned, e.of[j].began = d.RetryAfter, d.Began
				e.decisions[j].Denied, e.decisions[j].Remaining = true, 0
				e.decisions[j].Clear = max(e.decisions[j].Clear, d.RetryAfter)
				if !e.decisions[j].Never {
					e.decisions[j].RetryAfter = max(e.decisions[j].RetryAfter, d.RetryAfter)
				}
			}
			e.decisions = slices.Delete(e.decisions, i, i+1)
		}
		e.buckets, e.of = slices.Delete(e.buckets, i, i+1), slices.Delete(e.of, i, i+1)
	}
}

// noteBan notes that the limit of e's i-th bucket bans the request's key.
func (e *evaluation) noteBan(i int) {
	of, b := &e.of[i], &e.buckets[i]
	if of.began || e.decisions[i].By == limiter.DecidedByRedis { // or it is noted already
		of.limit.banList.note(bannedKey{b.Key, b.Name == of.addressName}, of.banned)
	}
	if !of.began {
		return
	}
	of.policy.counters.CountBan(e.stripe)
	if b.DryRun {
		return
	}
	var key *string
	if of.policy.top != nil {
		text := strings.Clone(keytext.Of(b.Key))
		key = &text
	}
	process.Banned(of.limit.path, of.banned, key)
}

const (
	// maxBanList is the largest number of bans that this process lists for a limit.
	maxBanList = 1000

	// maxListedKey is the length of the longest key in a list, in bytes.
	maxListedKey = 1024

	// bansSampled is how many bans compete for their place if a list is full.
	bansSampled = 16
)

// banList lists the bans that this process has begun or met, at the limits whose buckets
// have one name. It is kept across reloads, as long as any config in use has such a limit.
// Stores only know digests of keys.
type banList struct {
	name string
	mu   sync.Mutex
	ends map[bannedKey]time.Time
}

// bannedKey is a key that is banned, or the address of a client without one.
type bannedKey struct {
	text    string
	address bool
}

// banListOf returns the list of buckets of a name. The caller must release it.
func banListOf(name string) *banList {
	l, _, _ := process.bans.LoadOrNew(name, func() (caddy.Destructor, error) {
		return &banList{name: name, ends: make(map[bannedKey]time.Time)}, nil
	})
	return l.(*banList)
}

// release releases the list, which ends with the last config that uses it.
func (l *banList) release() { _, _ = process.bans.Delete(l.name) }

// Destruct implements caddy.Destructor.
func (*banList) Destruct() error { return nil }

// note notes that a key is banned, for how long from now on. If the list is full, the ban
// of a sample is dropped that ends first.
func (l *banList) note(k bannedKey, left time.Duration) {
	if len(k.text) > maxListedKey {
		return
	}
	end := time.Now().Add(left)
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, known := l.ends[k]; !known && len(l.ends) >= maxBanList {
		var first bannedKey
		var sooner time.Time
		sampled := 0
		for other, end := range l.ends { // from a random one on
			if sooner.IsZero() || end.Before(sooner) {
				first, sooner = other, end
			}
			if sampled++; sampled == bansSampled {
				break
			}
		}
		delete(l.ends, first)
	}
	k.text = strings.Clone(k.text)
	l.ends[k] = end
}

// forget removes a key whose ban has ended, unless another one has been noted since.
func (l *banList) forget(k bannedKey, noted time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ends[k].Equal(noted) {
		delete(l.ends, k)
	}
}

// all returns the keys of the list, and when their bans end, as far as it knows.
func (l *banList) all() map[bannedKey]time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return maps.Clone(l.ends)
}

// Ban implements adminapi.Source.
func (s source) Ban(ctx context.Context, asked adminapi.Asked, d time.Duration) (adminapi.Ban, error) {
	b, at, err := s.findBan(asked)
	if err != nil {
		return adminapi.Ban{}, err
	}
	ban := b.banOf(&at)
	if s.redis == nil {
		err = s.memory.Ban(ban, d)
	} else {
		s.redis.requests.Add(1)
		defer s.redis.requests.Add(-1)
		err = s.redis.Ban(ctx, ban, d)
	}
	if err != nil && !errors.Is(err, limiter.ErrUnavailable) {
		return adminapi.Ban{}, err
	}
	found, peekErr := s.look(ctx, ban, false)
	if peekErr != nil {
		return adminapi.Ban{}, peekErr
	}
	if err != nil {
		found.error = unavailable(err)
	}
	answer := b.ban(at, found)
	if answer.Left > 0 {
		b.limit.banList.note(bannedKey{at.Key, at.Name == b.addressName}, found.RetryAfter)
	}
	return answer, nil
}

// Unban implements adminapi.Source.
func (s source) Unban(ctx context.Context, asked adminapi.Asked) (adminapi.Ban, error) {
	b, at, err := s.findBan(asked)
	if err != nil {
		return adminapi.Ban{}, err
	}
	found, err := s.look(ctx, b.banOf(&at), true)
	return b.ban(at, found), err
}

// findBan returns the limit that was asked for, which bans, and a bucket that has the name
// and the key of its.
func (a *App) findBan(asked adminapi.Asked) (*placedBucket, limiter.Bucket, error) {
	b, err := a.findBanning(asked.Limit)
	if err != nil {
		return nil, limiter.Bucket{}, err
	}
	at, err := b.identify(asked)
	return b, at, err
}

// findBanning returns the limit of a path, which bans.
func (a *App) findBanning(path string) (*placedBucket, error) {
	b, err := a.find(path)
	if err == nil && b.limit.bans == nil {
		err = adminapi.BadRequest("limit: it does not ban, want one with ban, such as ban 10m")
	}
	return b, err
}

// ban returns the answer for the ban of the key of at, of which that was found.
func (b *placedBucket) ban(at limiter.Bucket, found found) adminapi.Ban {
	return adminapi.Ban{
		Error: found.error, Limit: b.title, Key: shownKey(at.Key, at.Name == b.addressName),
		Left: adminapi.Seconds(found.RetryAfter), DryRun: b.limit.dryRun,
	}
}

// Bans implements adminapi.Source. It asks the store about each ban in the lists, as other
// Caddy instances may have ended it.
func (s source) Bans(ctx context.Context, path string) (answer adminapi.Bans, err error) {
	var all []placedBucket
	if path != "" {
		b, err := s.findBanning(path)
		if err != nil {
			return answer, err
		}
		all = append(all, *b)
	} else if all = s.numbered(); len(all) == 0 {
		return answer, errNoLimits
	}
	var mu sync.Mutex
	var asking sync.WaitGroup
	answer.Bans = []adminapi.Ban{}
	seen := make(map[*banList]bool)
	for i := range all {
		b := &all[i]
		list := b.limit.banList
		if list == nil || seen[list] {
			continue
		}
		seen[list] = true
		for key, end := range list.all() {
			asking.Go(func() {
				at := limiter.Bucket{Name: b.name, Key: key.text, DryRun: b.limit.dryRun}
				if key.address {
					at.Name = b.addressName
				}
				found, lookErr := s.look(ctx, b.banOf(&at), false)
				if found.error != "" {
					found.RetryAfter = max(time.Until(end), 0)
				}
				mu.Lock()
				defer mu.Unlock()
				switch err = cmp.Or(err, lookErr); {
				case lookErr != nil:
				case found.RetryAfter == 0:
					list.forget(key, end)
				default:
					answer.Error = cmp.Or(answer.Error, found.error)
					answer.Bans = append(answer.Bans, b.ban(at, found))
				}
			})
		}
	}
	asking.Wait()
	slices.SortFunc(answer.Bans, func(a, b adminapi.Ban) int {
		return cmp.Or(cmp.Compare(b.Left, a.Left), strings.Compare(a.Limit, b.Limit))
	})
	return answer, err
}
