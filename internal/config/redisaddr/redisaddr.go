// Package redisaddr tells addresses of servers from other text, and shows them without
// secrets.
package redisaddr

import (
	"net"
	"net/netip"
	"strconv"
	"strings"
)

// IsHostPort reports whether address is a host and a port to connect to. Characters
// that a host can't have may be from a URL without a scheme, and part of a password.
func IsHostPort(address string) bool {
	const longest = 253 // in DNS
	host, port, err := net.SplitHostPort(address)
	if err != nil || host == "" || len(host) > longest || strings.ContainsAny(host, "{}@/,;\" \t\r\n") {
		return false
	}
	if _, err := netip.ParseAddr(host); strings.Contains(host, ":") && err != nil {
		return false
	}
	n, err := strconv.ParseUint(port, 10, 16)
	return err == nil && n > 0
}

// IsSocket reports whether path can be the path of a unix socket.
func IsSocket(path string) bool {
	const longest = 107 // and a terminating zero
	return len(path) <= longest && !strings.ContainsRune(path, 0) && strings.Trim(path, "/") != ""
}

// WithoutPassword returns an address that is safe to show: without what precedes an
// @, without the query, and, for a URL, without an invalid port, which may be a
// password if the @ is missing.
func WithoutPassword(address string) string {
	scheme, rest, isURL := strings.Cut(address, "://")
	if !isURL {
		scheme, rest = "", address
	} else {
		scheme += "://"
	}
	if i := strings.LastIndexByte(rest, '@'); i > 0 {
		rest = "…" + rest[i:]
	} else if _, port, found := strings.Cut(rest, ":"); found && isURL && strings.Trim(port, "0123456789/") != "" {
		rest = "…"
	}
	if before, _, query := strings.Cut(rest, "?"); query {
		rest = before + "?…"
	}
	return scheme + rest
}
