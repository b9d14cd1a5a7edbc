package faults

import "testing"

// TestPrivatePeers guards which peers may be proxies that Caddy does not know of.
func TestPrivatePeers(t *testing.T) {
	t.Parallel()
	for address, want := range map[string]bool{
		"10.1.2.3:80": true, "127.0.0.1:80": true, "172.16.0.1:80": true, "172.31.255.255:80": true, "192.168.0.1:80": true,
		"[::1]:80": true, "[::ffff:10.0.0.1]:80": true, "[fc00::1]:80": true, "[fd00::1]:80": true,
		"172.15.0.1:80": false, "172.32.0.1:80": false, "192.0.2.1:80": false, "198.51.100.1:80": false, "[2001:db8::1]:80": false,
		"[fe80::1]:80": false, "[::ffff:192.0.2.1]:80": false, "@": false, "": false, "10.": false,
	} {
		if got := looksPrivate(address) && isPrivate(address); got != want {
			t.Errorf("%q: got %v, want %v", address, got, want)
		}
	}
}
