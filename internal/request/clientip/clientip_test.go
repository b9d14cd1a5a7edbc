package clientip

import "testing"

// Guards that one client is one prefix, however its address is written: an IPv4 address
// in IPv6 is the IPv4 address, and a zone does not count. What a prefix looks like can
// be parsed again.
func TestPrefixOfAddress(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		address    string
		ipv4, ipv6 int
		want       string
	}{
		{"192.0.2.77", 32, 64, "192.0.2.77"},
		{"::ffff:192.0.2.77", 32, 64, "192.0.2.77"},
		{"::ffff:c000:24d", 32, 64, "192.0.2.77"},
		{"0:0:0:0:0:ffff:192.0.2.77", 32, 64, "192.0.2.77"},
		{"::ffff:192.0.2.77%eth0", 32, 64, "192.0.2.77"},
		{"192.0.2.77", 24, 64, "192.0.2.0/24"},
		{"::ffff:192.0.2.77", 24, 64, "192.0.2.0/24"},
		{"192.0.2.77", 31, 64, "192.0.2.76/31"},
		{"192.0.2.77", 1, 64, "128.0.0.0/1"},
		{"2001:db8:1:2:3:4:5:6", 32, 64, "2001:db8:1:2::/64"},
		{"2001:DB8:1:2:3:4:5:6", 32, 64, "2001:db8:1:2::/64"},
		{"2001:db8:1:2::", 32, 64, "2001:db8:1:2::/64"},
		{"2001:db8:1:2:3:4:5:6", 32, 48, "2001:db8:1::/48"},
		{"2001:db8:1:2:3:4:5:6", 32, 57, "2001:db8:1::/57"},
		{"2001:db8:1:2:3:4:5:6", 32, 127, "2001:db8:1:2:3:4:5:6/127"},
		{"2001:db8:1:2:3:4:5:7", 32, 127, "2001:db8:1:2:3:4:5:6/127"},
		{"2001:db8:1:2:3:4:5:7", 32, 128, "2001:db8:1:2:3:4:5:7"},
		{"2001:db8:1:2:3:4:5:6", 32, 1, "::/1"},
		{"fe80::1%eth0", 32, 64, "fe80::/64"},
		{"fe80::1%eth0", 32, 128, "fe80::1"},
		{"::1", 32, 64, "::/64"},
		{"::192.0.2.77", 32, 128, "::c000:24d"}, // an IPv6 address, not one of IPv4

		// One host of IPv4 has 65536 networks of 6to4.
		{"2002:c000:24d::1", 32, 64, "192.0.2.77"},
		{"2002:c000:24d:ffff:1:2:3:4", 32, 128, "192.0.2.77"},
		{"2002:c000:24d::1%eth0", 24, 64, "192.0.2.0/24"},
		{"2002:c000:24e:1::", 32, 64, "192.0.2.78"},
		{"2003:c000:24d::1", 32, 64, "2003:c000:24d::/64"},
		// All hosts of IPv4 come from one network through NAT64.
		{"64:ff9b::192.0.2.77", 32, 64, "192.0.2.77"},
		{"64:ff9b::192.0.2.78", 32, 64, "192.0.2.78"},
		{"64:ff9b::c000:24d", 24, 64, "192.0.2.0/24"},
		{"64:ff9b::1:c000:24d", 32, 64, "64:ff9b::/64"}, // beyond the prefix of NAT64
		{"64:ff9b:1::c000:24d", 32, 64, "64:ff9b:1::/64"},
		// Of Teredo and link-local addresses the prefix counts as of any.
		{"2001:0:cb00:7101:8000:63bf:3fff:fdb2", 32, 64, "2001:0:cb00:7101::/64"},
		{"fe80::2%eth1", 32, 64, "fe80::/64"},

		{"", 24, 64, ""},
		{"@", 24, 64, "@"},
		{"alice", 24, 64, "alice"},
		{"192.0.2.77:80", 24, 64, "192.0.2.77:80"},
		{"192.0.2.300", 24, 64, "192.0.2.300"},
	} {
		p := Prefixes{tc.ipv4, tc.ipv6}
		got := p.Of(tc.address)
		if got != tc.want {
			t.Errorf("%q /%d /%d: got %q, want %q", tc.address, tc.ipv4, tc.ipv6, got, tc.want)
		}
		again, err := p.Parse(got)
		if isAddress := got != tc.address || err == nil; isAddress && (err != nil || again != got) {
			t.Errorf("%q /%d /%d, parsed again: got %q, %v, want %q", tc.address, tc.ipv4, tc.ipv6, again, err, got)
		}
	}
}

// Guards what is parsed: addresses, and prefixes of the lengths that count.
func TestParsePrefix(t *testing.T) {
	t.Parallel()
	p := Prefixes{IPv4: 24, IPv6: 64}
	for text, want := range map[string]string{
		"192.0.2.77":          "192.0.2.0/24",
		"192.0.2.77/24":       "192.0.2.0/24",
		"::ffff:192.0.2.77":   "192.0.2.0/24",
		"2001:db8:1:2::3/64":  "2001:db8:1:2::/64",
		"192.0.2.0/25":        "",
		"192.0.2.0/32":        "",
		"2001:db8::/48":       "",
		"2001:db8::/129":      "",
		"alice":               "",
		"":                    "",
		"192.0.2.77, 1.2.3.4": "",
	} {
		if got, err := p.Parse(text); got != want || (err == nil) != (want != "") {
			t.Errorf("%q: got %q, error %v, want %q", text, got, err, want)
		}
	}
}

// Guards that a network counts as one however an address in it is written, so that
// no client has more of them.
func TestNetworkOf(t *testing.T) {
	t.Parallel()
	for address, want := range map[string]string{
		"203.0.113.7":          "203.0.0.0/16",
		"203.0.255.255":        "203.0.0.0/16",
		"203.1.0.0":            "203.1.0.0/16",
		"::ffff:203.0.113.7":   "203.0.0.0/16",
		"2002:cb00:7107::1":    "203.0.0.0/16",
		"64:ff9b::203.0.113.7": "203.0.0.0/16",
		"2001:db8:1:2::3":      "2001:db8::/32",
		"2001:db8:ffff::":      "2001:db8::/32",
		"2001:db9::":           "2001:db9::/32",
		"fe80::1%eth0":         "fe80::/32",
		"fe80::2%eth1":         "fe80::/32",
		"@":                    NoNetwork,
		"":                     NoNetwork,
		"203.0.113.7:80":       NoNetwork,
	} {
		if got := NetworkOf(address); got != want {
			t.Errorf("%q: got %q, want %q", address, got, want)
		}
	}
}
