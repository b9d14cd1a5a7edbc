package ratelimit

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"net/http"
	"net/netip"
	"net/textproto"
	"slices"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// key tells whose bucket a request meets: a template, made ready.
type key struct {
	template   string
	parts      []part
	ipv4, ipv6 int  // how many bits of an address count
	fixed      bool // whether it is the same wherever it stands on one request
}

// part is a piece of a key's template: literal text or a placeholder.
type part struct {
	text        string // the literal, or the placeholder's name without braces
	placeholder bool
	address     bool   // whether its value is an address, to be normalised
	unverified  bool   // whether its value can't be relied on in early data
	fixed       bool   // whether nothing can change its value while a request is decided
	header      string // the field that it is the value of, as http.Header has it
}

const (
	clientIP   = "http.vars.client_ip"
	remoteHost = "http.request.remote.host"
)

// addresses are the placeholders that hold one address and are normalised
// wherever they stand, by their names. The short ones are the Caddyfile's; in
// JSON they would otherwise be unknown, and so empty.
var addresses = map[string]string{
	clientIP:      clientIP,
	remoteHost:    remoteHost,
	"client_ip":   clientIP,
	"remote_host": remoteHost,
}

// newKey makes a template ready.
func newKey(template string, ipv4, ipv6 int) (*key, error) {
	const want = "text or placeholders, such as {client_ip}, or a word for one bucket for all"
	if template == "" || strings.ContainsRune(template, 0) {
		return nil, badOption("key", template, want)
	}
	// Caddy's own replacer finds the placeholders: it knows what is escaped.
	k := &key{template: template, ipv4: ipv4, ipv6: ipv6}
	var names []string
	text, err := caddy.NewEmptyReplacer().ReplaceFunc(template, func(name string, _ any) (any, error) {
		names = append(names, name)
		return "\x00", nil
	})
	if err != nil {
		return nil, badOption("key", template, fmt.Sprintf("%s: %v", want, err))
	}
	if !balanced(template) {
		return nil, badOption("key", template, `each placeholder with both of its braces, and others as \{ and \}`)
	}
	for i, literal := range strings.Split(text, "\x00") {
		if i > 0 {
			k.parts = append(k.parts, newPlaceholder(names[i-1]))
		}
		if literal != "" {
			k.parts = append(k.parts, part{text: literal, fixed: true})
		}
	}
	k.fixed = !slices.ContainsFunc(k.parts, func(p part) bool { return !p.fixed })
	return k, nil
}

// newPlaceholder returns the piece of a key that is a placeholder.
func newPlaceholder(name string) part {
	p := part{text: name, placeholder: true}
	if full := addresses[name]; full != "" {
		p.text, p.address = full, true
	}
	p.unverified = p.address || strings.HasPrefix(p.text, "http.request.remote")
	// What the request itself holds stays. Anything else a matcher may set, as
	// path_regexp sets its captures, or time may.
	p.fixed = p.text == clientIP ||
		strings.HasPrefix(p.text, "http.request.") && !strings.HasPrefix(p.text, "http.request.duration")
	if field, ok := strings.CutPrefix(p.text, "http.request.header."); ok {
		p.header = textproto.CanonicalMIMEHeaderKey(field)
	}
	return p
}

// value returns the value of a placeholder: what the replacer has for it, of the
// most common ones without asking it. An address that is none is no value.
func (p *part) value(r *http.Request, repl *caddy.Replacer) string {
	switch {
	case p.text == clientIP:
		if address, ok := caddyhttp.GetVar(r.Context(), caddyhttp.ClientIPVarKey).(string); ok {
			return unlessSocket(address)
		}
	case p.header != "":
		if values := r.Header[p.header]; len(values) == 1 {
			return values[0]
		}
	}
	v, _ := repl.GetString(p.text)
	if p.address {
		return unlessSocket(v)
	}
	return v
}

// unlessSocket returns address, or nothing if it is what stands for one where
// the client is a unix socket.
func unlessSocket(address string) string {
	if address == "@" {
		return ""
	}
	return address
}

// String returns the template, every placeholder by its full name.
func (k *key) String() string {
	var text strings.Builder
	for _, p := range k.parts {
		if p.placeholder {
			text.WriteString("{" + p.text + "}")
		} else {
			text.WriteString(p.text)
		}
	}
	return text.String()
}

// mark returns what tells buckets of a path apart by the key, and by their numbers if
// any are given. Those of limits with a name agree in both. Without one they need
// not: by values of another key, such as a header field, clients could otherwise
// fill each other's buckets, and a small limit of one site would deny what a large
// one of another has admitted. The default key alone has no mark.
func (k *key) mark(path, numbers string) string {
	template := k.String()
	if first, _, _ := strings.Cut(path, "/"); first != defaultName || template == defaultKey && numbers == "" {
		return ""
	}
	digest := fnv.New64a()
	fmt.Fprintf(digest, "%s %d %d", template, k.ipv4, k.ipv6)
	if numbers != "" {
		fmt.Fprintf(digest, "\x00%s", numbers)
	}
	return "@" + strconv.FormatUint(digest.Sum64(), 36)
}

// errEarlyData refuses a request whose address cannot be known yet: while the
// TLS handshake is incomplete anybody could have replayed it from anywhere.
var errEarlyData = refusal{
	status: http.StatusTooEarly,
	err:    errors.New("TLS handshake not complete, the client's address cannot be verified"),
}

// expand returns the key of one request, and whether it has one: if none of
// the key's placeholders has a value it does not.
//
// Where several placeholders make a key the lengths of their values are part of
// it, so that no client can choose values that run together to another's. It is
// then no address as a whole either, even if it looks like one.
func (k *key) expand(r *http.Request, repl *caddy.Replacer) (string, bool, error) {
	if len(k.parts) == 1 {
		p := &k.parts[0]
		if !p.placeholder {
			return k.address(p.text), true, nil
		}
		if p.unverified && earlyData(r) {
			return "", false, errEarlyData
		}
		v := p.value(r, repl)
		return k.address(v), v != "", nil
	}
	var text, lengths []byte
	placeholders, given := 0, false
	for i := range k.parts {
		p := &k.parts[i]
		if !p.placeholder {
			text = append(text, p.text...)
			continue
		}
		if p.unverified && earlyData(r) {
			return "", false, errEarlyData
		}
		v := p.value(r, repl)
		if p.address {
			v = k.address(v)
		}
		text = append(text, v...)
		lengths = binary.AppendUvarint(lengths, uint64(len(v)))
		placeholders, given = placeholders+1, given || v != ""
	}
	switch {
	case placeholders > 0 && !given:
		return "", false, nil
	case placeholders > 1:
		return string(append(append(text, 0), lengths...)), true, nil
	}
	return k.address(string(text)), true, nil
}

// client returns the address of the client, which stands in for a key that a
// request does not have. It is empty if the client has none.
func (k *key) client(r *http.Request) (string, error) {
	if earlyData(r) {
		return "", errEarlyData
	}
	address, _ := caddyhttp.GetVar(r.Context(), caddyhttp.ClientIPVarKey).(string)
	return k.address(unlessSocket(address)), nil
}

// address returns an IP address as far as it counts: an IPv4 address in one of
// IPv6 is the IPv4 address, a zone is dropped, and of the rest the prefix
// remains. Anything else is returned as it is.
func (k *key) address(text string) string {
	if !strings.ContainsAny(text, ".:") {
		return text // no address, and no need to have an error made
	}
	ip, err := netip.ParseAddr(text)
	if err != nil {
		return text
	}
	if ip.Is4() && k.ipv4 == ip.BitLen() {
		return text // which is the only way to write it
	}
	ip = inner(ip.WithZone("").Unmap())
	bits := k.ipv6
	if ip.Is4() {
		bits = k.ipv4
	}
	if bits == ip.BitLen() {
		return ip.String()
	}
	return netip.PrefixFrom(ip, bits).Masked().String()
}

// How many bits of an address are the network that new keys of a full limit share
// a bucket by: many more than a provider hands to one customer, so that it is hard
// to have addresses in many of them.
const (
	networkBits4 = 16
	networkBits6 = 32
)

// noNetwork stands for the network of clients whose address is not known, as on
// a unix socket, or not proven yet, as in early data.
const noNetwork = "none"

// networkOf returns the network that the client's address is in. The address
// counts as it does in keys.
func networkOf(r *http.Request) string {
	if earlyData(r) {
		return noNetwork
	}
	address, _ := caddyhttp.GetVar(r.Context(), caddyhttp.ClientIPVarKey).(string)
	ip, err := netip.ParseAddr(address)
	if err != nil {
		return noNetwork
	}
	ip = inner(ip.WithZone("").Unmap())
	bits := networkBits6
	if ip.Is4() {
		bits = networkBits4
	}
	return netip.PrefixFrom(ip, bits).Masked().String()
}

// inner returns the IPv4 address that an address of 6to4 (2002::/16, RFC 3056) or
// NAT64 (64:ff9b::/96, RFC 6052) holds, or ip if it is none of these. A single
// host of IPv4 may use any of 65536 networks of 6to4, and all of them come from one
// network through NAT64.
func inner(ip netip.Addr) netip.Addr {
	if !ip.Is6() {
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

// earlyData reports whether r came before its TLS handshake was complete.
func earlyData(r *http.Request) bool {
	return r.TLS != nil && !r.TLS.HandshakeComplete
}
