package placeholder

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// families are the first words behind "http.request." of which Caddy has all placeholders.
// Plugins add others, such as {http.request.bodyhash}.
var families = []string{
	"duration", "host", "hostport", "local", "method", "orig_method", "orig_uri", "port", "proto", "remote", "scheme", "tls", "uri", "uuid",
}

// IsUnknown reports whether Caddy has no such placeholder, though it has all that begin like
// it.
func IsUnknown(name string) bool {
	field, ofRequest := strings.CutPrefix(name, "http.request.")
	family, _, _ := strings.Cut(field, ".")
	if ofRequest && !slices.Contains(families, family) || !ofRequest && !strings.HasPrefix(name, "time.") && !strings.HasPrefix(name, "system.") {
		return false
	}
	_, known := ofAnyRequest().Get(name)
	return !known
}

// ofAnyRequest returns the replacer of a request, which knows what Caddy knows.
var ofAnyRequest = sync.OnceValue(func() *caddy.Replacer {
	r := httptest.NewRequest(http.MethodGet, "/", nil)
	r = r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, net.Addr(new(net.TCPAddr))))
	replacer := caddy.NewReplacer()
	caddyhttp.PrepareRequest(r, replacer, nil, nil)
	return replacer
})

// ofProxy are the placeholders of reverse_proxy, behind "http.reverse_proxy.", as Caddy 2.11 has
// them. Those that end in a dot have any name behind it.
var ofProxy = []string{
	"active.target_upstream", "duration", "duration_ms", "header.", "is_transport_error", "retries", "status_code", "status_text",
	"trailer.", "upstream.",
}

// IsUnknownOfProxy reports whether a placeholder is named like those of reverse_proxy, and it has
// no such one.
func IsUnknownOfProxy(name string) bool {
	rest, ofIt := strings.CutPrefix(name, "http.reverse_proxy.")
	return ofIt && !slices.ContainsFunc(ofProxy, func(known string) bool {
		return rest == known || strings.HasSuffix(known, ".") && strings.HasPrefix(rest, known) && rest != known
	})
}
