package advice_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// wantTrustedAfter applies the remedy for a proxy that is not trusted: a limit of five requests
// uses the address that the proxy sends, and by none that a client makes up before it.
func wantTrustedAfter(t *testing.T, remedy, block, field string) {
	t.Helper()
	_, global, isGlobal := strings.Cut(remedy, "servers {")
	if !isGlobal {
		return
	}
	name, address, _ := strings.Cut(field, ": ")
	if name == "Forwarded" {
		if !strings.HasPrefix(remedy, "Have the proxy send X-Forwarded-For,") {
			t.Errorf("got %q, want that the proxy sends what Caddy reads", remedy)
		}
		name, address = "X-Forwarded-For", "192.0.2.7"
	}
	c := sitetest.Config{Global: "servers {" + global, Site: strings.ReplaceAll(block, "{remote_host}", "{client_ip}") + "\nrespond ok"}
	if found := adviceOn(t, onAllHosts(t, c)); len(found) > 0 {
		t.Errorf("with the remedy: got %+v, want no advice", found)
	}
	s := sitetest.StartConfig(t, c)
	status := func(address string) int { return s.Get("/", name+": "+address).StatusCode }
	for i := range 6 {
		made := ""
		if name == "X-Forwarded-For" { // to which proxies add
			made = fmt.Sprintf("203.0.113.%d, ", i)
		}
		if got, want := status(made+address), 200+229*(i/5); got != want {
			t.Errorf("request %d: got %d, want %d", i+1, got, want)
		}
	}
	if got := status("192.0.2.8"); got != 200 {
		t.Errorf("another client: got %d, want 200", got)
	}
	if lines := s.Log("warn", sitetest.OwnLogger); len(lines) > 0 {
		t.Errorf("got %v, want no warning", lines)
	}
}

// TestKeysOfProxies guards that a limit by address which counts all visitors of a proxy
// together says so once, with what to write; and that others do not, above all where Caddy
// was told of proxies.
func TestKeysOfProxies(t *testing.T) {
	const (
		trust    = "servers {\ntrusted_proxies static 127.0.0.0/8\n}"
		other    = "servers {\ntrusted_proxies static 192.0.2.1\n}"
		servers  = "servers {\n\ttrusted_proxies static 127.0.0.1\n\ttrusted_proxies_strict\n}"
		byField  = "servers {\n\ttrusted_proxies static 127.0.0.1\n\tclient_ip_headers "
		clientIP = "Use {client_ip}, which is the address that the proxy reports."
	)
	block := func(option string) string { return "rate_limit a {\nsize 5\n" + option + "\n}" }
	for _, tc := range []struct{ name, global, block, field, remedy string }{
		{"default key", "", block(""), "X-Forwarded-For: 192.0.2.7", servers},
		{"remote_host", "", block("key {remote_host}"), "X-Forwarded-For: 192.0.2.7", servers},
		{"Forwarded", "", block(""), "Forwarded: for=192.0.2.7", servers},
		{"CF-Connecting-IP", "", block(""), "CF-Connecting-IP: 192.0.2.7", byField + "CF-Connecting-IP\n}"},
		{"X-Real-IP", "", block(""), "X-Real-IP: 192.0.2.7", byField + "X-Real-IP\n}"},
		{"zone", "", "rate_limit {\nzone a {\nkey {remote_host}\nevents 5\nwindow 1m\n}\n}", "X-Real-IP: 192.0.2.7", byField + "X-Real-IP\n}"},
		{"remote_host of a trusted proxy", trust, block("key {remote_host}"), "X-Forwarded-For: 192.0.2.7", clientIP},
		{"no proxy", "", block(""), "X-Other: 192.0.2.7", ""},
		{"key by header", "", block("key {header.X-Key}{client_ip}"), "X-Forwarded-For: 192.0.2.7", ""},
		{"key for all", "", block("key all"), "X-Forwarded-For: 192.0.2.7", ""},
		{"trusted proxy", trust, block(""), "X-Forwarded-For: 192.0.2.7", ""},
		{"trusted proxy without a client", trust, block("key {remote_host}"), "X-Other: 192.0.2.7", ""},
		{"another proxy is trusted", other, block(""), "X-Forwarded-For: 192.0.2.7", ""},
		{"another proxy is trusted, remote_host", other, block("key {remote_host}"), "X-Forwarded-For: 192.0.2.7", ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := sitetest.StartConfig(t, sitetest.Config{Global: tc.global, Site: tc.block + "\nrespond ok"})
			s.Get("/")
			for range 2 {
				s.Get("/", tc.field)
			}
			lines := s.Log("warn", sitetest.OwnLogger)
			if tc.remedy == "" {
				if len(lines) > 0 {
					t.Errorf("got %v, want no warning", lines)
				}
				return
			}
			if len(lines) != 1 || lines[0]["limit"] != "a" {
				t.Fatalf("got %v, want one warning about the limit", lines)
			}
			if remedy, _ := lines[0]["remedy"].(string); !strings.HasSuffix(remedy, tc.remedy) {
				t.Errorf("got %q, want %q", remedy, tc.remedy)
			} else {
				wantTrustedAfter(t, remedy, tc.block, tc.field)
			}
		})
	}
}
