package advice

import (
	"fmt"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/adaptive"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
)

// upstreams are the placeholders that may well name an upstream, so that each has a limit.
var upstreams = map[string]bool{"http.request.host": true, "http.request.hostport": true}

// unprotected advises on limits that follow the load with a key, where no other is for all
// requests: many keys together are not limited then.
func (c *collector) unprotected(limits []*rule.Limit) {
	keyed := make([]*rule.Limit, 0, len(limits))
	for b := range rule.Buckets(limits) {
		if b.Limit.Load == nil || b.Off {
			continue
		}
		varies := false
		for _, name := range b.Limit.Key.Names() {
			varies = varies || !upstreams[name]
		}
		if !varies {
			return
		}
		keyed = append(keyed, b.Limit)
	}
	for _, l := range keyed {
		c.limit(l.Path, advise(Unprotected,
			fmt.Sprintf("Each key may have %d requests in progress at first, and never less than %d, so nothing limits all keys together.",
				min(max(adaptive.Initial, l.Load.Options.Min), l.Load.Options.Max), l.Load.Options.Min),
			"Put a limit with concurrency auto and without key in addition, for the requests of all keys."))
	}
}
