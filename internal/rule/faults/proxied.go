package faults

import (
	"net/http"
	"net/netip"
	"reflect"
	"strings"
	"sync/atomic"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/key"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/placeholder"
)

// proxyWatch finds out whether the key of a limit is a proxy's address, so that all its
// visitors share one bucket. It stops once it has, or once it knows that this can't be.
type proxyWatch struct{ state atomic.Uint32 }

// What a watch looks for.
const (
	watchNothing    uint32 = iota
	watchClientIP          // not known yet: the server of the requests is not
	watchRemoteHost        // the same
	watchUntrusted         // private peers that forward the requests of others
	watchTrusted           // trusted ones
)

// begin begins the watch if the key is an address.
func (w *proxyWatch) begin(k *key.Key) {
	for _, name := range k.Names() {
		if name != placeholder.ClientIP && name != placeholder.RemoteHost {
			return // which may distinguish visitors
		}
	}
	switch {
	case k.Has(placeholder.ClientIP):
		w.state.Store(watchClientIP)
	case k.Has(placeholder.RemoteHost):
		w.state.Store(watchRemoteHost)
	}
}

// WatchesProxies reports whether it is unknown yet whether the key is the address of a proxy.
func (r *Reporter) WatchesProxies() bool { return r.proxies.state.Load() != watchNothing }

// finds reports whether r shows the fault. If so, the watch ends, and remedy says what to do,
// unless another request has shown it meanwhile.
func (w *proxyWatch) finds(r *http.Request) (found bool, remedy string) {
	state := w.state.Load()
	if state == watchClientIP || state == watchRemoteHost {
		server, _ := r.Context().Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server)
		switch {
		case server == nil:
			return false, ""
		case !TrustsProxies(server):
			state = watchUntrusted
		case state == watchRemoteHost:
			state = watchTrusted
		default: // a peer that is not trusted is a client
			state = watchNothing
		}
		w.state.Store(state)
	}
	switch state {
	case watchUntrusted:
		if found = looksPrivate(r.RemoteAddr) && isForwarded(r.Header) && isPrivate(r.RemoteAddr); found {
			remedy = trustProxy(r)
		}
	case watchTrusted:
		trusted, _ := caddyhttp.GetVar(r.Context(), caddyhttp.TrustedProxyVarKey).(bool)
		found, remedy = trusted && isForwarded(r.Header), "Use {client_ip}, which is the address that the proxy reports."
	}
	if !found || !w.state.CompareAndSwap(state, watchNothing) {
		return found, ""
	}
	return true, remedy
}

// trustProxy returns the remedy for a proxy that is not trusted and sends these fields: to trust the address that the
// request came from, and no other, as clients could be private too. Without the second option, clients could choose
// their address by a field to which proxies add.
func trustProxy(r *http.Request) string {
	h, option, first := r.Header, "trusted_proxies_strict", ""
	switch {
	case len(h["Cf-Connecting-Ip"]) > 0:
		option = "client_ip_headers CF-Connecting-IP"
	case len(h["X-Forwarded-For"]) == 0 && len(h["X-Real-Ip"]) > 0:
		option = "client_ip_headers X-Real-IP"
	case len(h["X-Forwarded-For"]) == 0:
		first = "Have the proxy send X-Forwarded-For, since Caddy does not read Forwarded. "
	}
	peer, _ := netip.ParseAddrPort(r.RemoteAddr)
	address := peer.Addr().Unmap().WithZone("").String()
	return first + "If " + address + " is a proxy and no client, use {client_ip}, and write into the global options:\n" +
		"servers {\n\ttrusted_proxies static " + address + "\n\t" + option + "\n}"
}

// TrustsProxies reports whether a server has trusted proxies, or whether that can't be found
// out: Caddy keeps them in a field that is not exported, and drops their config.
func TrustsProxies(s *caddyhttp.Server) bool {
	field := reflect.ValueOf(s).Elem().FieldByName("trustedProxies")
	return s.TrustedProxiesUnix || !field.IsValid() || field.Kind() != reflect.Interface || !field.IsNil()
}

// looksPrivate reports whether an address begins like a private one. It saves parsing most others.
func looksPrivate(hostport string) bool {
	if hostport == "" {
		return false
	}
	switch hostport[0] {
	case '1':
		return strings.HasPrefix(hostport, "10.") || strings.HasPrefix(hostport, "127.") || strings.HasPrefix(hostport, "172.") || strings.HasPrefix(hostport, "192.168.")
	case '[':
		return strings.HasPrefix(hostport, "[:") || strings.HasPrefix(hostport, "[f")
	}
	return false
}

// isPrivate reports whether the address of a connection is private or of this host.
func isPrivate(hostport string) bool {
	address, err := netip.ParseAddrPort(hostport)
	ip := address.Addr().Unmap()
	return err == nil && (ip.IsPrivate() || ip.IsLoopback())
}

// isForwarded reports whether a proxy says whose request it forwards.
func isForwarded(h http.Header) bool {
	return len(h["X-Forwarded-For"]) > 0 || len(h["X-Real-Ip"]) > 0 || len(h["Cf-Connecting-Ip"]) > 0 || len(h["Forwarded"]) > 0
}

// SharedByProxy logs, once, that visitors of a proxy share buckets. It returns whether a request
// shows this.
func (r *Reporter) SharedByProxy(req *http.Request) bool {
	found, remedy := r.proxies.finds(req)
	if remedy != "" {
		r.Logger.Warn("the key of this limit is probably the address of a proxy, so that all its visitors share one bucket",
			zap.String("limit", r.Limit), zap.Stringer("key", r.Key), zap.String("remedy", remedy))
	}
	return found
}
