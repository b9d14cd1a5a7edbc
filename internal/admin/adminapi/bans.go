package adminapi

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/admin/adminjson"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// ban bans a key and answers with the ban that it has then.
func (s server) ban(w http.ResponseWriter, r *http.Request) error {
	query, err := readQuery(w, r, useBan, "duration")
	if err != nil {
		return err
	}
	if query.Limit == "" {
		return errNoBanLimit
	}
	d, err := parseDuration(query.Duration)
	if err != nil {
		return err
	}
	answer, err := s.newest().ban(r.Context(), query.BucketQuery, d)
	return writeAnswer(w, answer, answer.Error, err)
}

// unban ends a ban and answers with what it was.
func (s server) unban(w http.ResponseWriter, r *http.Request) error {
	query, err := readQuery(w, r, useBody)
	if err != nil {
		return err
	}
	if query.Limit == "" {
		return errNoBanLimit
	}
	answer, err := s.newest().unban(r.Context(), query.BucketQuery)
	return writeAnswer(w, answer, answer.Error, err)
}

// bans answers with the bans that there are.
func (s server) bans(w http.ResponseWriter, r *http.Request) error {
	values, err := url.ParseQuery(r.URL.RawQuery)
	limit := values["limit"]
	if unknown := len(values) > 1 || len(values) == 1 && limit == nil; err != nil || unknown || len(limit) > 1 {
		return badRequest("query: not valid; use at most a limit, such as ?limit=login")
	}
	answer, err := s.newest().bans(r.Context(), values.Get("limit"))
	return writeAnswer(w, answer, answer.Error, err)
}

// ban bans the requested key, for a time from now on.
func (c *Config) ban(ctx context.Context, query adminjson.BucketQuery, d time.Duration) (adminjson.Ban, error) {
	b, at, err := c.findBan(query)
	if err != nil {
		return adminjson.Ban{}, err
	}
	ban := b.BanOf(&at)
	if c.keptHere(b) {
		err = c.Memory.Ban(ctx, ban, d)
	} else {
		c.InUse.Add(1)
		defer c.InUse.Add(-1)
		err = c.Redis.Ban(ctx, ban, d)
	}
	if err != nil && !errors.Is(err, limiter.ErrUnavailable) {
		return adminjson.Ban{}, err
	}
	found, peekErr := c.look(ctx, b, ban, false)
	if peekErr != nil {
		return adminjson.Ban{}, peekErr
	}
	if err != nil {
		found.error = unavailable(err)
	}
	answer := b.banAnswer(at, found, c.scopes(b.Limit.Bans.List))
	if answer.Left > 0 {
		b.Limit.Bans.List.Note(rule.BannedKey{Text: at.Key, Address: at.Name == b.AddressName}, found.RetryAfter)
	}
	return answer, nil
}

// unban ends the ban of the requested key, and returns what it was.
func (c *Config) unban(ctx context.Context, query adminjson.BucketQuery) (adminjson.Ban, error) {
	b, at, err := c.findBan(query)
	if err != nil {
		return adminjson.Ban{}, err
	}
	found, err := c.look(ctx, b, b.BanOf(&at), true)
	if err == nil && found.error == "" {
		b.liftBan(&at)
	}
	return b.banAnswer(at, found, c.scopes(b.Limit.Bans.List)), err
}

// liftBan has the limit's list of bans forget that of the key of at, which is lifted.
func (b *bucket) liftBan(at *limiter.Bucket) {
	b.Limit.Bans.List.Lift(rule.BannedKey{Text: at.Key, Address: at.Name == b.AddressName})
}

// findBan returns the requested limit, which bans, and a bucket that has the name
// and the key of its.
func (c *Config) findBan(query adminjson.BucketQuery) (*bucket, limiter.Bucket, error) {
	b, err := c.findBanning(query.Limit)
	if err != nil {
		return nil, limiter.Bucket{}, err
	}
	at, err := identify(b.Bucket, query)
	return b, at, err
}

// findBanning returns the limit of a path, which bans.
func (c *Config) findBanning(path string) (*bucket, error) {
	b, err := c.find(path)
	if err == nil && b.Limit.Bans == nil {
		err = badRequest("limit: it does not ban; use one with ban, such as ban 10m")
	}
	return b, err
}

// banAnswer returns the answer for the ban of the key of at, of which that was found.
func (b *bucket) banAnswer(at limiter.Bucket, found found, scopes []adminjson.Scope) adminjson.Ban {
	return adminjson.Ban{
		Error: found.error, Limit: b.title, Key: shownKey(at.Key, at.Name == b.AddressName),
		Left: option.Seconds(found.RetryAfter), DryRun: b.Limit.DryRun, Scopes: scopes,
	}
}

// bans returns the bans of the limit of a path; without one, the bans of all limits. It queries the
// store about each ban in the lists, as other Caddy instances may have ended it.
func (c *Config) bans(ctx context.Context, path string) (answer adminjson.Bans, err error) {
	var all []bucket
	if path != "" {
		b, err := c.findBanning(path)
		if err != nil {
			return answer, err
		}
		all = append(all, *b)
	} else if all = c.numbered(); len(all) == 0 {
		return answer, errNoLimits
	}
	var mu sync.Mutex
	var queries sync.WaitGroup
	answer.Bans = []adminjson.Ban{}
	seen := make(map[*rule.BanList]bool)
	for i := range all {
		b := &all[i]
		if b.Limit.Bans == nil || seen[b.Limit.Bans.List] {
			continue
		}
		list := b.Limit.Bans.List
		seen[list] = true
		scopes := c.scopes(list)
		for key, end := range list.All() {
			queries.Go(func() {
				at := limiter.Bucket{Name: b.Name, Key: key.Text, DryRun: b.Limit.DryRun}
				if key.Address {
					at.Name = b.AddressName
				}
				found, lookErr := c.look(ctx, b, b.BanOf(&at), false)
				if found.error != "" {
					found.RetryAfter = max(time.Until(end), 0)
				}
				mu.Lock()
				defer mu.Unlock()
				switch err = cmp.Or(err, lookErr); {
				case lookErr != nil:
				case found.RetryAfter == 0:
					list.Forget(key, end)
				default:
					answer.Error = cmp.Or(answer.Error, found.error)
					answer.Bans = append(answer.Bans, b.banAnswer(at, found, scopes))
				}
			})
		}
	}
	queries.Wait()
	slices.SortFunc(answer.Bans, func(a, b adminjson.Ban) int {
		return cmp.Or(cmp.Compare(b.Left, a.Left), strings.Compare(a.Limit, b.Limit))
	})
	return answer, err
}
