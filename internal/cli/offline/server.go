package offline

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// Server is an HTTP server of a Config.
type Server struct {
	Name   string
	server *caddyhttp.Server

	raw    map[string]json.RawMessage // its config as written
	routes []rawRoute
	named  map[string]rawRoute

	Hosts  []string // of its sites; none if it serves any host
	TLS    bool     // whether it serves HTTPS
	Listen []caddy.NetworkAddress

	Handlers []*Handler // in the order of the config
	context  context.Context
}

// newServer reads a server's config.
func newServer(name string, raw map[string]json.RawMessage, httpPort, httpsPort int) (*Server, error) {
	s := &Server{Name: name, raw: raw}
	local := new(net.TCPAddr)
	var listen []string
	for option, into := range map[string]any{"listen": &listen, "routes": &s.routes, "named_routes": &s.named} {
		if raw[option] == nil {
			continue
		}
		if err := json.Unmarshal(raw[option], into); err != nil {
			return nil, fmt.Errorf("%s: %w", option, err)
		}
	}
	for _, address := range listen {
		a, err := caddy.ParseNetworkAddress(caddy.NewReplacer().ReplaceAll(address, ""))
		if err != nil {
			return nil, fmt.Errorf("listen: %w", err)
		}
		s.Listen = append(s.Listen, a)
		if !a.IsUnixNetwork() && !a.IsFdNetwork() {
			local = &net.TCPAddr{IP: net.ParseIP(a.Host), Port: int(a.StartPort)}
		}
	}
	s.context = context.WithValue(context.Background(), http.LocalAddrContextKey, net.Addr(local))
	s.findHosts()
	s.TLS = s.servesTLS(httpPort, httpsPort)
	return s, nil
}

// findHosts finds the hosts of the server's sites.
func (s *Server) findHosts() {
	for _, route := range s.routes {
		var sets []struct {
			Host []string `json:"host"`
		}
		_ = json.Unmarshal(route["match"], &sets)
		all := len(sets) == 0
		for _, set := range sets {
			s.Hosts = append(s.Hosts, set.Host...)
			all = all || len(set.Host) == 0
		}
		if all {
			s.Hosts = nil
			return
		}
	}
}

// servesTLS reports whether Caddy would serve HTTPS, by its rules for automatic
// HTTPS.
func (s *Server) servesTLS(httpPort, httpsPort int) bool {
	var auto struct {
		Disabled bool     `json:"disable"`
		Skip     []string `json:"skip"`
	}
	_ = json.Unmarshal(s.raw["automatic_https"], &auto)
	var policies []json.RawMessage
	_ = json.Unmarshal(s.raw["tls_connection_policies"], &policies)
	switch {
	case len(policies) > 0:
		return true
	case auto.Disabled || !slices.ContainsFunc(s.Listen, func(a caddy.NetworkAddress) bool { return !listensOn(a, httpPort) }):
		return false
	}
	return slices.ContainsFunc(s.Hosts, func(host string) bool { return !slices.Contains(auto.Skip, host) }) ||
		!slices.ContainsFunc(s.Listen, func(a caddy.NetworkAddress) bool { return !listensOn(a, httpsPort) })
}

// listensOn reports whether an address includes a port.
func listensOn(a caddy.NetworkAddress, port int) bool {
	return !a.IsUnixNetwork() && !a.IsFdNetwork() && int(a.StartPort) <= port && port <= int(a.EndPort)
}

// servesHost reports whether the server has a site for a host. It is false for a
// server without hosts, which serves any.
func (s *Server) servesHost(host string) bool {
	_, domain, _ := strings.Cut(host, ".")
	return slices.ContainsFunc(s.Hosts, func(site string) bool {
		return strings.EqualFold(site, host) || strings.EqualFold(site, "*."+domain)
	})
}

// splitHost returns the host and port that requests for a host go to.
func splitHost(hostport string, tls bool) (host string, port int) {
	host, text, err := net.SplitHostPort(hostport)
	if err != nil {
		host, text = strings.Trim(hostport, "[]"), "80"
		if tls {
			text = "443"
		}
	}
	port, _ = strconv.Atoi(text)
	return host, port
}

// Accepts reports whether the server listens on the port of requests for a host.
func (s *Server) Accepts(hostport string, tls bool) bool {
	_, port := splitHost(hostport, tls)
	return slices.ContainsFunc(s.Listen, func(a caddy.NetworkAddress) bool { return listensOn(a, port) })
}

// ServerOf returns the server that handles requests for a host, which may have a
// port. Several may, behind addresses that are not known here: the one that has a
// site for the host is preferred, then the one that listens on the port, then the
// one that serves TLS or not, as the request has it. exact is false if it differs
// from the request in any of them.
func (d *Config) ServerOf(hostport string, tls bool) (found *Server, exact bool) {
	host, _ := splitHost(hostport, tls)
	most := -1
	for _, s := range d.Servers {
		const forTLS, forPort, forAnyHost, forHost = 1, 2, 4, 8
		points := 0
		switch {
		case s.servesHost(host):
			points = forHost
		case len(s.Hosts) == 0:
			points = forAnyHost
		}
		exactHost := points > 0
		onPort := s.Accepts(hostport, tls)
		if onPort {
			points += forPort
		}
		if s.TLS == tls {
			points += forTLS
		}
		if points > most {
			most, found, exact = points, s, exactHost && onPort && s.TLS == tls
		}
	}
	return found, exact
}

// OnlyHost returns the host of a config that has a single one, or "".
func (d *Config) OnlyHost() string {
	var hosts []string
	for _, s := range d.Servers {
		hosts = append(hosts, s.Hosts...)
	}
	slices.Sort(hosts)
	if hosts = slices.Compact(hosts); len(hosts) != 1 || strings.Contains(hosts[0], "*") {
		return ""
	}
	return hosts[0]
}

// HasSite reports whether a site of s has the host, as its matchers decide.
func (s *Server) HasSite(host string) bool {
	r := &http.Request{Host: host}
	r = r.WithContext(context.WithValue(context.Background(), caddy.ReplacerCtxKey, caddy.NewReplacer()))
	return len(s.Hosts) == 0 || slices.ContainsFunc(s.Hosts, func(site string) bool {
		m := caddyhttp.MatchHost{site}
		if err := m.Provision(caddy.Context{}); err != nil {
			return false // Caddy would not have loaded it
		}
		matches, _ := m.MatchWithError(r) // there are no errors
		return matches
	})
}

// headersRead matches what reads header fields in routes in JSON: the matchers, their
// functions in expressions, and placeholders. keysOfLimits matches the keys of limits.
var (
	headersRead  = regexp.MustCompile(`"header(_regexp)?":|\bheader(_regexp)?\(|\{(http\.request\.)?(header|cookie)\.`)
	keysOfLimits = regexp.MustCompile(`"key":"[^"]*"`)
)

// ReadsHeaders reports whether anything on the way to the limits of s reads header
// fields, besides their keys.
func (s *Server) ReadsHeaders() bool {
	return headersRead.Match(keysOfLimits.ReplaceAll(marshal([]any{s.routes, s.named}), nil))
}

// Limits returns the limits of all handlers of the server, in the order of the config.
func (s *Server) Limits() (limits []*Limit) {
	for _, h := range s.Handlers {
		limits = append(limits, h.Buckets...)
	}
	return limits
}
