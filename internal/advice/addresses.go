package advice

import (
	"net"
	"net/netip"
	"net/textproto"
	"slices"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/placeholder"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/routes"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/faults"
)

// addresses advises on servers whose clients can choose the address that a limit uses, and on those
// to which all clients of a proxy have one.
func (c *collector) addresses(h *rule.Handler, around *routes.Around) {
	server := c.HTTP.Servers[around.Server()]
	byAddress := false
	for b := range rule.Buckets(h.Limits) {
		byAddress = byAddress || !b.Off && b.Limit.Key.Has(placeholder.ClientIP)
	}
	switch {
	case server == nil || !byAddress:
	case believesClients(server):
		c.server(around.Server(), advise(AddressChosen,
			"It takes the leftmost address in X-Forwarded-For. If a proxy only appends to this field, the client has sent that address: then it can choose one, and get a fresh bucket, for each request.",
			"Set trusted_proxies_strict with trusted_proxies, unless the proxies replace the field."))
	case !faults.TrustsProxies(server) && onlyLocal(server):
		c.server(around.Server(), advise(ProxyUntrusted,
			"It only listens on this host, and has no trusted proxies: if a proxy forwards requests to it, {client_ip} is the proxy's address, and all clients share one bucket.",
			"Set the global options servers > trusted_proxies, such as trusted_proxies static 127.0.0.1 ::1, or trusted_proxies_unix for a socket, and trusted_proxies_strict."))
	}
}

// onlyLocal reports whether no other hosts can connect to a server.
func onlyLocal(s *caddyhttp.Server) bool {
	return len(s.Listen) > 0 && !slices.ContainsFunc(s.Listen, func(address string) bool {
		a, err := caddy.ParseNetworkAddress(address)
		return err != nil || !a.IsUnixNetwork() && !isLocal(a.Host)
	})
}

// believesClients reports whether a server takes the address of a client from a field to which
// proxies usually add, and from that end of it which they leave to clients. Others that are in
// use, such as X-Real-IP, have one address, which proxies replace.
func believesClients(s *caddyhttp.Server) bool {
	return faults.TrustsProxies(s) && s.TrustedProxiesStrict == 0 && len(s.ClientIPHeaders) > 0 &&
		textproto.CanonicalMIMEHeaderKey(s.ClientIPHeaders[0]) == "X-Forwarded-For"
}

// open advises on a Redis that others may use.
func (c *collector) open() {
	opt := c.Servers
	if opt == nil || opt.Password != "" || opt.TLS != nil && len(opt.TLS.Certificates) > 0 {
		return
	}
	for _, address := range opt.Addresses {
		host, _, err := net.SplitHostPort(address)
		if err != nil || isLocal(host) {
			continue
		}
		a := advise(RedisOpen,
			"It is used without a password: anyone who can connect to "+address+" can empty and fill all buckets.",
			"Create a user with a password and the permissions that "+option.Docs+"redis.md lists, and set username and password.")
		a.Of = "redis"
		c.add(a)
		return
	}
}

// isLocal reports whether a host is this one.
func isLocal(host string) bool {
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.IsLoopback()
}
