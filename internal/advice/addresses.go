package advice

import (
	"net/textproto"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/placeholder"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/routes"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/faults"
)

// addresses advises on servers whose clients can choose the address that a limit uses.
func (c *collector) addresses(order []rule.Module) {
	sites := routes.Sites[rule.Module](c.HTTP)
	for _, m := range order {
		name := sites[m].Server
		if server := c.HTTP.Servers[name]; server == nil || !believesClients(server) {
			continue
		}
		for b := range rule.Buckets(m.Compiled().Limits) {
			if !b.Off && b.Limit.Key.Template().Has(placeholder.ClientIP) {
				c.add(Advice{
					Kind: AddressChosen, Of: "server", Name: name,
					Problem: "It takes the leftmost address in X-Forwarded-For, which is what the client has sent if a proxy adds to this field: then it chooses its address, and a fresh bucket for each request.",
					Remedy:  "Set trusted_proxies_strict with trusted_proxies, unless the proxies replace the field.",
				})
				break
			}
		}
	}
}

// believesClients reports whether a server takes the address of a client from a field to which
// proxies usually add, and from that end of it which they leave to clients. Others that are in
// use, such as X-Real-IP, have one address, which proxies replace.
func believesClients(s *caddyhttp.Server) bool {
	return faults.TrustsProxies(s) && s.TrustedProxiesStrict == 0 && len(s.ClientIPHeaders) > 0 &&
		textproto.CanonicalMIMEHeaderKey(s.ClientIPHeaders[0]) == "X-Forwarded-For"
}
