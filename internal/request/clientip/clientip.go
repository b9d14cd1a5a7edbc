// Package clientip shortens the IP addresses of clients to the prefixes that count as
// one client, or as one network. An IPv4 address in an IPv6 address counts as the IPv4
// address, and a zone does not count.
package clientip

import (
	"errors"
	"net/netip"
	"strings"
)

// Prefixes are the lengths of the prefixes that count as one client, in bits.
type Prefixes struct {
	IPv4 int // from 1 to 32
	IPv6 int // from 1 to 128
}

// Of returns the prefix of an address, such as "192.0.2.7" or "2001:db8:1:2::/64".
// Anything else is returned unchanged.
func (p Prefixes) Of(text string) string {
	if !strings.ContainsAny(text, ".:") {
		return text // not an address; saves the cost of an error
	}
	ip, err := netip.ParseAddr(text)
	if err != nil {
		return text
	}
	if ip.Is4() && p.IPv4 == ip.BitLen() {
		return text // as it is
	}
	ip = plain(ip)
	if bits := p.bits(ip); bits < ip.BitLen() {
		return netip.PrefixFrom(ip, bits).Masked().String()
	}
	return ip.String()
}

// Parse returns the prefix of an address, or of a prefix that Of may have returned. It
// returns an error for anything else.
func (p Prefixes) Parse(text string) (string, error) {
	prefix, err := netip.ParsePrefix(text)
	if err != nil {
		if _, err := netip.ParseAddr(text); err != nil {
			return "", err
		}
		return p.Of(text), nil
	}
	if prefix.Bits() != p.bits(prefix.Addr()) {
		return "", errors.New("another length")
	}
	if prefix.IsSingleIP() {
		return p.Of(prefix.Addr().String()), nil
	}
	return prefix.Masked().String(), nil
}

// bits returns the length of the prefix of an address.
func (p Prefixes) bits(ip netip.Addr) int {
	if ip.Is4() {
		return p.IPv4
	}
	return p.IPv6
}

// networks are much larger than what a provider assigns to a customer, so that it is
// hard to get addresses in many of them.
var networks = Prefixes{IPv4: 16, IPv6: 32}

// NoNetwork is the network of clients whose address is not known.
const NoNetwork = "none"

// NetworkOf returns the network of an address: its /16 of IPv4 or /32 of IPv6. Of
// anything else it returns NoNetwork.
func NetworkOf(address string) string {
	if _, err := netip.ParseAddr(address); err != nil {
		return NoNetwork
	}
	return networks.Of(address)
}

// plain returns an address without its zone, or the IPv4 address in it: of one that is
// mapped to IPv6, of 6to4 (2002::/16, RFC 3056) or of NAT64 (64:ff9b::/96, RFC 6052). A
// single IPv4 host may use any of the 65,536 networks of its 6to4 prefix, and all IPv4
// hosts share one network with NAT64.
func plain(ip netip.Addr) netip.Addr {
	ip = ip.WithZone("").Unmap()
	if ip.Is4() {
		return ip
	}
	b := ip.As16()
	switch {
	case [2]byte(b[:2]) == [2]byte{0x20, 0x02}:
		return netip.AddrFrom4([4]byte(b[2:6]))
	case [12]byte(b[:12]) == [12]byte{0, 0x64, 0xff, 0x9b}:
		return netip.AddrFrom4([4]byte(b[12:16]))
	}
	return ip
}
