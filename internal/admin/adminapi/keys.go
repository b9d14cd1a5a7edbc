package adminapi

import (
	"slices"
	"strings"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/admin/adminjson"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/key"
)

// requestsFor returns the requests for the buckets of a limit with key k whose keys can be made
// from what was asked for all limits; and why not others, if so.
func requestsFor(asked *adminjson.Asked, limit string, k *key.Key) (all []adminjson.Asked, why string) {
	placeholders := k.Placeholders()
	n, others := len(placeholders), 0
	var missing []string
	for _, p := range placeholders {
		if !p.Address || asked.Address == nil {
			others++
			missing = append(missing, "{"+p.Name+"}")
		}
	}
	given := asked.Values
	if asked.Key != nil {
		if given = []string{*asked.Key}; others > 1 {
			given = key.Split(*asked.Key)
		}
	}
	switch {
	case n == 0:
		return []adminjson.Asked{{Limit: limit}}, ""
	case asked.Address != nil && (*asked.Address == "" || others == n):
		all = append(all, adminjson.Asked{Limit: limit, Address: asked.Address}) // of requests without a key
	case asked.Address != nil && others > 0 && given != nil:
	case asked.Address != nil:
		all = append(all, adminjson.Asked{Limit: limit, Values: k.Values(*asked.Address, make([]string, others))})
	}
	switch {
	case others == 0:
	case len(given) != others:
		why = "it needs a value for each placeholder of its key: " + strings.Join(missing, " ")
	case n == 1 && asked.Key != nil:
		all = append(all, adminjson.Asked{Limit: limit, Key: asked.Key})
	case asked.Address != nil:
		all = append(all, adminjson.Asked{Limit: limit, Values: k.Values(*asked.Address, given)})
	default:
		all = append(all, adminjson.Asked{Limit: limit, Values: slices.Clone(given)})
	}
	return all, why
}

// keyOf returns the key that was asked for, as requests have it at a limit with key k, or the
// address of clients without one.
func keyOf(a *adminjson.Asked, k *key.Key) (text string, err error) {
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
