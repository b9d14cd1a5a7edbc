package accesslog

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// setClient reads the fields before the time of the common log format: the client, its
// identity and the user. The site may precede them, and the client may be a list of
// addresses, as proxies write it:
//
//	192.0.2.1 - alice
//	example.com:443 192.0.2.1 - alice
//	203.0.113.7, 192.0.2.1 - alice
//
// Where another field may be the client's address as well, it returns BadClient.
func (e *Entry) setClient(fields []byte) Reason {
	client, rest := nextField(fields)
	if client == "" || len(rest) == 0 {
		return BadLine
	}
	found := e.setAddress(client)
	if !found {
		after, more := nextField(rest)
		if site := parseSite(client); e.setAddress(after) || site.port != "" {
			found = e.ClientIP != ""
			e.Host, e.TLS = site.host, site.port == "443"
			client, rest = after, more
		}
	}
	identity, rest := nextField(rest)
	if isAddress(identity) {
		return BadClient
	}
	if !found {
		// The user is no address, unless there are more fields than are known here.
		if slices.ContainsFunc(strings.Fields(string(rest)), isAddress) { // with any spaces in between
			return BadClient
		}
		if client != "-" {
			e.ClientIP = client // a name
		}
	}
	e.RemoteIP = e.ClientIP
	if len(rest) > 0 && string(rest) != "-" {
		e.UserID = string(rest)
	}
	return Used
}

// setAddress sets the client if field is its address, or a list that has one.
func (e *Entry) setAddress(field string) bool {
	for address := range strings.SplitSeq(field, ",") {
		if host, port, ok := splitAddress(strings.Trim(address, " ")); ok {
			e.ClientIP, e.RemotePort, e.Forwarded = host, port, strings.Contains(field, ",")
			return true
		}
	}
	return false
}

// isAddress reports whether field is an address, or a list that has one, also in brackets or
// with a name before it, as in xff=192.0.2.1.
func isAddress(field string) bool {
	return new(Entry).setAddress(strings.Trim(field[strings.IndexByte(field, '=')+1:], `()<>"'`))
}

// splitAddress splits an address, which may have a port; ok is false if it is not an address.
func splitAddress(text string) (host, port string, ok bool) {
	if len(text) < len("::") || len(text) > 64 { // a dash, mostly
		return "", "", false
	}
	if _, err := netip.ParseAddr(strings.Trim(text, "[]")); err == nil {
		return strings.Trim(text, "[]"), "", true
	}
	a, err := netip.ParseAddrPort(text)
	if err != nil {
		return "", "", false
	}
	return a.Addr().String(), strconv.Itoa(int(a.Port())), true
}

// site is what a log says of the site that a request was for.
type site struct{ host, port string }

// parseSite reads a field before the client's.
func parseSite(field string) (s site) {
	host, port, err := net.SplitHostPort(field)
	_, isNumber := strconv.ParseUint(port, 10, 16)
	switch {
	case field == "-":
		return site{}
	case err != nil || isNumber != nil:
		return site{host: field}
	case port == "80" || port == "443":
		return site{host, port} // as clients write it
	}
	return site{field, port}
}

// nextField returns the next field and what follows it. One in quotes, and a list with
// spaces after its commas, is one.
func nextField(text []byte) (field string, rest []byte) {
	if len(text) > 0 && text[0] == '"' {
		if end := bytes.IndexByte(text[1:], '"'); end >= 0 {
			return string(text[1 : end+1]), bytes.TrimLeft(text[end+2:], " ")
		}
	}
	end := bytes.IndexByte(text, ' ')
	for end > 0 && text[end-1] == ',' {
		more := bytes.IndexByte(text[end+1:], ' ')
		if more < 0 {
			end = more
			break
		}
		end += 1 + more
	}
	if end < 0 {
		return string(text), nil
	}
	return string(text[:end]), text[end+1:]
}

// refusal returns an error if of most of the lines it is not known which field is the
// client's.
func (d *dialect) refusal(lines []byte, counts *[reasons]int64) error {
	if counts[BadClient] <= counts[Used] {
		return nil
	}
	for line := range bytes.Lines(lines) {
		line = trimLine(line)
		if len(line) > 0 && d.parse(line, new(Entry), new(clfClock)) == BadClient {
			fields, _, _ := bytes.Cut(line, []byte(" ["))
			return fmt.Errorf("lines begin with %.100q, of which several may be the client's address; "+
				`use the address alone before identity and user, as in "192.0.2.1 - alice", or after the site, as in "example.com:443 192.0.2.1 - alice"`, fields)
		}
	}
	return nil
}
