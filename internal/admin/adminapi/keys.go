package adminapi

import (
	"slices"
	"strings"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/admin/adminjson"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/key"
)

// requestsFor returns the requests for the buckets of a limit with key k whose keys can be made
// from what was requested for all limits; and why not others, if so.
func requestsFor(query *adminjson.BucketQuery, limit string, k *key.Key) (all []adminjson.BucketQuery, why string) {
	placeholders := k.Placeholders()
	n, others := len(placeholders), 0
	var missing []string
	for _, p := range placeholders {
		if !p.Address || query.Address == nil {
			others++
			missing = append(missing, "{"+p.Text+"}")
		}
	}
	given := query.Values
	if query.Key != nil {
		if given = []string{*query.Key}; others > 1 {
			given = key.Split(*query.Key)
		}
	}
	switch {
	case n == 0:
		return []adminjson.BucketQuery{{Limit: limit}}, ""
	case query.Address != nil && (*query.Address == "" || others == n):
		all = append(all, adminjson.BucketQuery{Limit: limit, Address: query.Address}) // of requests without a key
	case query.Address != nil && others > 0 && given != nil:
	case query.Address != nil:
		all = append(all, adminjson.BucketQuery{Limit: limit, Values: k.Values(*query.Address, make([]string, others))})
	}
	switch {
	case others == 0:
	case len(given) != others:
		why = "it needs a value for each placeholder of its key: " + strings.Join(missing, " ")
	case n == 1 && query.Key != nil:
		all = append(all, adminjson.BucketQuery{Limit: limit, Key: query.Key})
	case query.Address != nil:
		all = append(all, adminjson.BucketQuery{Limit: limit, Values: k.Values(*query.Address, given)})
	default:
		all = append(all, adminjson.BucketQuery{Limit: limit, Values: slices.Clone(given)})
	}
	return all, why
}

// typedKey returns the requested key, as requests have it at a limit with key k, or the
// address of clients without one.
func typedKey(a *adminjson.BucketQuery, k *key.Key) (text string, err error) {
	if a.Address != nil {
		text, err = k.TypedAddress(*a.Address)
	} else {
		text, err = k.Typed(a.Key, slices.Clone(a.Values))
	}
	if err != nil {
		err = badRequest("%v", err)
	}
	return text, err
}
