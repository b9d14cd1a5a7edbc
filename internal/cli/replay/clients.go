package replay

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/dustin/go-humanize"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/accesslog"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/key/keytext"
)

// fewRequests may well be from one client.
const fewRequests = 100

// clients is what the logs say of clients.
type clients struct {
	requests  int64
	forwarded int64  // requests with several addresses
	first     string // client
	several   bool
	addresses bool // whether any client is an address
}

// add adds the client of a request.
func (c *clients) add(e *accesslog.Entry) {
	if c.requests++; c.requests == 1 {
		c.first = strings.Clone(e.ClientIP)
	}
	if e.Forwarded {
		c.forwarded++
	}
	c.several = c.several || e.ClientIP != c.first
	if !c.addresses {
		_, err := netip.ParseAddr(e.ClientIP)
		c.addresses = err == nil
	}
}

// warnings returns what makes all numbers doubtful, one sentence each.
func (c *clients) warnings() (text []string) {
	switch {
	case c.requests == 0:
	case !c.addresses && c.first == "":
		text = append(text, "The log has no address of a client, so limits by address can't be replayed.")
	case !c.addresses:
		text = append(text, fmt.Sprintf("The log has no address of a client, but names such as %s: if these are not the clients', limits by address can't be replayed.",
			keytext.Safe(c.first)))
	case !c.several && c.requests >= fewRequests:
		text = append(text, fmt.Sprintf("All %s requests have the same client in the log, %s: if that is a proxy, limits by address can't be replayed.",
			humanize.Comma(c.requests), keytext.Safe(c.first)))
	}
	if c.forwarded > 0 {
		text = append(text, fmt.Sprintf("%s requests have a list of addresses for their client in the log. The first was taken, as Caddy does without trusted_proxies_strict; clients may have made it up.",
			humanize.Comma(c.forwarded)))
	}
	return text
}
