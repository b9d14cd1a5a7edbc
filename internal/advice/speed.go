package advice

import (
	"fmt"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/routes"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
)

// encoded advises on limits whose speed counts what encode compresses afterwards.
func (c *collector) encoded(h *rule.Handler, around *routes.Around) {
	if !around.Encoded() {
		return
	}
	for b := range rule.Buckets(h.Limits) {
		if b.Limit.Pace != nil {
			c.limit(b.Path, advise(EncodedLater,
				"encode is in front of it, so the speed "+b.Limit.Options.Speed+" counts bytes before they are compressed: fewer are sent.",
				"Put rate_limit in front of encode, as it is in Caddy's order."))
		}
	}
}

// cut advises on limits that pace responses which the server ends at some time.
func (c *collector) cut(h *rule.Handler, around *routes.Around) {
	server := c.HTTP.Servers[around.Server()]
	if server == nil || server.WriteTimeout <= 0 {
		return
	}
	for b := range rule.Buckets(h.Limits) {
		if b.Limit.Pace == nil {
			continue
		}
		c.limit(b.Path, advise(ResponseCut,
			fmt.Sprintf("The server ends each response %v after the request, by write in its timeouts, and so cuts off those that wait for the speed %s.",
				time.Duration(server.WriteTimeout), b.Limit.Options.Speed),
			"Use write_idle in place of write: it only counts the time in which a client does not read."))
	}
}
