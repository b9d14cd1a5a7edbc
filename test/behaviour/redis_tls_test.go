package behaviour

import (
	"context"
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	ratelimit "github.com/seed-387a6c65/caddy-ratelimit"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/configtest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/filetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// Guards what the options on TLS come to, and that there is none without them.
func TestClientTLS(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name, address string
		tls           *reverseproxy.TLSConfig
		on            bool
		server        string
		insecure      bool
	}{
		{name: "host", address: "a:1"},
		{name: "URL", address: "redis://a"},
		{name: "socket", address: "/s"},
		{name: "flag", address: "a:1", tls: new(reverseproxy.TLSConfig), on: true},
		{name: "secure URL", address: "rediss://a", on: true},
		{
			name: "secure URL and options", address: "rediss://a",
			tls: &reverseproxy.TLSConfig{ServerName: "b"}, on: true, server: "b",
		},
		{
			name: "no checks", address: "a:1",
			tls: &reverseproxy.TLSConfig{InsecureSkipVerify: true}, on: true, insecure: true,
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			opt, _, err := (&config.Redis{Addresses: []string{tc.address}, TLS: tc.tls}).Options(caddy.Context{})
			if err != nil {
				t.Fatal(err)
			}
			switch got := opt.TLS; {
			case !tc.on && got != nil:
				t.Errorf("got %+v, want no TLS", got)
			case !tc.on:
			case got == nil:
				t.Error("got no TLS")
			case got.ServerName != tc.server || got.InsecureSkipVerify != tc.insecure || got.RootCAs != nil:
				t.Errorf("got %+v", got)
			}
		})
	}
}

// Guards that each load of a configuration which trusts any certificate says
// so, and no other.
func TestInsecureIsLogged(t *testing.T) {
	t.Parallel()
	with := func(option string) sitetest.Config {
		return sitetest.Config{Global: "rate_limit {\nredis 127.0.0.1:1 {\ntls\n" + option + "\n}\n}", Site: "respond ok"}
	}
	s := sitetest.StartConfig(t, with(""))
	for want, option := range []string{"", "tls_insecure_skip_verify", "tls_insecure_skip_verify"} {
		s.Reload(with(option))
		if lines := s.Log("warn", "rate_limit"); len(lines) != want {
			t.Errorf("after %d loads got warnings %v", want+2, lines)
		}
	}
}

// Guards that files of certificates are taken from a Caddyfile to the store,
// and that one which has changed on disk, and nothing else, makes another
// store.
func TestTLSFiles(t *testing.T) {
	dir := sitetest.TempDir(t)
	one, two := redistest.NewAuthority(t), redistest.NewAuthority(t)
	copyOf := func(file, to string) {
		t.Helper()
		text := filetest.Read(t, file)
		filetest.Write(t, filepath.Join(dir, to), text)
	}
	write := func(a *redistest.Authority, cert, key string) {
		t.Helper()
		copyOf(a.CAFile, "ca.pem")
		copyOf(cert, "cert.pem")
		copyOf(key, "key.pem")
	}
	cert, key := one.Issue(t, "client")
	write(one, cert, key)
	const block = `redis rediss://a {; tls_client_auth DIR/cert.pem DIR/key.pem; ` +
		`tls_trust_pool file DIR/ca.pem {; pem_file DIR/ca.pem; }; tls_server_name n; }`
	src := configtest.InApp(strings.ReplaceAll(block, "DIR", dir))
	if err := configtest.ValidateCaddyfile(src); err != nil {
		t.Fatal(err)
	}
	adapted, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(src), nil)
	if err != nil {
		t.Fatal(err)
	}
	if configtest.CheckStoredAgain(t, adapted) != 1 {
		t.Errorf("got %s", adapted)
	}
	var root struct {
		Apps struct {
			Ours json.RawMessage `json:"rate_limit"`
		}
	}
	if err := json.Unmarshal(adapted, &root); err != nil {
		t.Fatal(err)
	}
	config := string(root.Apps.Ours)

	var app ratelimit.App
	if err := json.Unmarshal([]byte(config), &app); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
	defer cancel()
	opt, _, err := app.Redis.Options(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if len(opt.TLS.Certificates) != 1 || !opt.TLS.RootCAs.Equal(one.Pool()) || opt.TLS.ServerName != "n" {
		t.Errorf("got %+v", opt.TLS)
	}

	p := sitetest.NewProcess(telemetry.Options{})
	old := provisionApp(t, p, config).Compiled().Redis
	if provisionApp(t, p, config).Compiled().Redis != old {
		t.Error("the same files make another store")
	}
	newCert, newKey := one.Issue(t, "client")
	write(one, newCert, newKey)
	renewed := provisionApp(t, p, config).Compiled().Redis
	if renewed == old {
		t.Error("a new client certificate does not make another store")
	}
	write(two, newCert, newKey)
	if moved := provisionApp(t, p, config).Compiled().Redis; moved == renewed || moved == old {
		t.Error("a new authority does not make another store")
	}
	write(one, cert, key)
	if provisionApp(t, p, config).Compiled().Redis != old {
		t.Error("the old files do not share the store that they made")
	}
}

// Guards that a client certificate which Caddy automates is asked for by name.
// It is not validated here: that would begin to obtain one.
func TestAutomatedClientCertificate(t *testing.T) {
	t.Parallel()
	src := configtest.InApp(`redis a:1 {; tls_client_auth client.example; }`)
	adapted, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(src), nil)
	const want = `"tls":{"client_certificate_automate":"client.example"}`
	if err != nil || !strings.Contains(string(adapted), want) {
		t.Errorf("got %s, %v", adapted, err)
	}
	configtest.CheckStoredAgain(t, adapted)
}

// Guards that placeholders in all options on TLS are resolved: otherwise no
// certificate would be found, or one would have a wrong name.
func TestTLSPlaceholders(t *testing.T) {
	authority := redistest.NewAuthority(t)
	cert, key := authority.Issue(t, "redis.test")
	redis := redistest.StartTLS(t, authority, true, "--tls-cert-file", cert, "--tls-key-file", key)
	cert, key = authority.Issue(t, "client")
	for name, value := range map[string]string{
		"NAME": "redis.test", "CERT": cert, "KEY": key, "CA": authority.CAFile,
	} {
		t.Setenv("RATE_LIMIT_TEST_"+name, value)
	}
	s := sitetest.StartConfig(t, sitetest.Config{
		Global: sitetest.RedisGlobal(redis.Addr, sitetest.LongTimeout,
			"tls_server_name {env.RATE_LIMIT_TEST_NAME}",
			"tls_client_auth {env.RATE_LIMIT_TEST_CERT} {env.RATE_LIMIT_TEST_KEY}",
			"tls_trust_pool file {env.RATE_LIMIT_TEST_CA}"),
		Site: "rate_limit {\nsize 2\ndrip_rate 1h\non_error deny\n}\nrespond admitted",
	})
	if a := s.Get("/"); a.StatusCode != 200 {
		t.Errorf("got %s, log %v", a, s.Log("error", "rate_limit"))
	}
	if keys, err := redis.Client().Keys(t.Context(), "*").Result(); err != nil || len(keys) != 1 {
		t.Errorf("Redis has keys %q, %v, want one", keys, err)
	}
}

// Guards that stores are distinguished by the resolved TLS options, not by
// how they are written.
func TestTLSPlaceholdersDistinguishStores(t *testing.T) {
	const app = `{"redis":{"addresses":["a:1"],"tls":{"server_name":"{env.RATE_LIMIT_TEST_NAME}"}}}`
	t.Setenv("RATE_LIMIT_TEST_NAME", "x")
	p := sitetest.NewProcess(telemetry.Options{})
	first := provisionApp(t, p, app)
	if provisionApp(t, p, `{"redis":{"addresses":["a:1"],"tls":{"server_name":"x"}}}`).Compiled().Redis != first.Compiled().Redis {
		t.Error("a name and a placeholder for it make two stores")
	}
	t.Setenv("RATE_LIMIT_TEST_NAME", "y")
	if provisionApp(t, p, app).Compiled().Redis == first.Compiled().Redis {
		t.Error("a placeholder for another name makes the same store")
	}
}
