package httplimit

import (
	"net/http"
	"net/netip"
	"strings"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/clientip"
)

// clients are the prefixes of addresses that count as one client: with IPv6 they are what a
// customer usually has.
var clients = clientip.Prefixes{IPv4: 32, IPv6: 64}

// Address returns a [Limit.Key] that is the client's address, or its /64 if that is one of
// IPv6, since a client usually has all of that.
//
// Give the prefixes of all proxies in front of the server, and of nothing else. If a
// request comes from one of them, the client is the right-most address in X-Forwarded-For that
// is none of them: each proxy adds the one that it sees, and what precedes that is up to
// the client. If one of these is no address, or there are no more, the client is the last proxy
// found. Without prefixes X-Forwarded-For is ignored. With any, a request that comes from no
// address, by a unix socket, is one of a proxy's.
func Address(proxies ...netip.Prefix) func(*http.Request) string {
	trusted := func(ip netip.Addr) bool {
		for _, p := range proxies {
			if a := p.Addr(); a.Is4In6() { // as the addresses of requests are not
				p = netip.PrefixFrom(a.Unmap(), p.Bits()-96)
			}
			if p.Contains(ip) {
				return true
			}
		}
		return false
	}
	return func(r *http.Request) string {
		client, ok := parse(r.RemoteAddr)
		if ok && !trusted(client) || len(proxies) == 0 {
			return keyOf(client, r)
		}
		lines := r.Header.Values("X-Forwarded-For")
		for i := len(lines) - 1; i >= 0; i-- {
			for line, more := lines[i], true; more; {
				var hop string
				line, hop, more = cutLast(line)
				ip, ok := parse(hop)
				if !ok {
					return keyOf(client, r)
				}
				if client = ip; !trusted(ip) {
					return keyOf(client, r)
				}
			}
		}
		return keyOf(client, r)
	}
}

// keyOf returns the key of a client, or the peer of r if the client has no address.
func keyOf(client netip.Addr, r *http.Request) string {
	if !client.IsValid() {
		return r.RemoteAddr
	}
	return clients.Of(client.String())
}

// cutLast returns the last member of a list, and what precedes it, if there is more.
func cutLast(list string) (before, last string, more bool) {
	i := strings.LastIndexByte(list, ',')
	return list[:max(i, 0)], strings.TrimSpace(list[i+1:]), i >= 0
}

// parse returns the address in text, which may have a port.
func parse(text string) (ip netip.Addr, ok bool) {
	ip, err := netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(text, "["), "]"))
	if err != nil {
		pair, err := netip.ParseAddrPort(text)
		if err != nil {
			return netip.Addr{}, false
		}
		ip = pair.Addr()
	}
	return ip.Unmap().WithZone(""), true
}
