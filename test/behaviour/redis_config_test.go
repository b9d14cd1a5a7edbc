package behaviour

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"

	ratelimit "github.com/seed-387a6c65/caddy-ratelimit"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/configtest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// Guards that what Caddy keeps of a configuration, shows at its admin endpoint
// and saves has the placeholders and not what they stand for.
func TestSecretsAreNotStored(t *testing.T) {
	t.Setenv("RATE_LIMIT_TEST_SECRET", "canary")
	for _, config := range []string{
		`{"redis":{"addresses":["a:1"],"username":"{env.RATE_LIMIT_TEST_SECRET}"}}`,
		`{"redis":{"addresses":["a:1"],"password":"{env.RATE_LIMIT_TEST_SECRET}"}}`,
		`{"redis":{"addresses":["redis://:{env.RATE_LIMIT_TEST_SECRET}@a:1"]}}`,
		`{"redis":{"addresses":["{env.RATE_LIMIT_TEST_SECRET}:1"]}}`,
		`{"redis":{"addresses":["a:1"],"master_name":"{env.RATE_LIMIT_TEST_SECRET}"}}`,
		`{"redis":{"addresses":["a:1"],"master_name":"m","sentinel_username":"{env.RATE_LIMIT_TEST_SECRET}"}}`,
		`{"redis":{"addresses":["a:1"],"master_name":"m","sentinel_password":"{env.RATE_LIMIT_TEST_SECRET}"}}`,
		`{"redis":{"addresses":["a:1"],"key_secret":"{env.RATE_LIMIT_TEST_SECRET}"}}`,
	} {
		app := new(ratelimit.App)
		if err := caddy.StrictUnmarshalJSON([]byte(config), app); err != nil {
			t.Fatal(err)
		}
		if err := app.Provision(sitetest.NewContext(t)); err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := app.Cleanup(); err != nil {
				t.Error(err)
			}
		}()
		if got, err := json.Marshal(app); err != nil || string(got) != config {
			t.Errorf("got %s, %v\nwant %s", got, err, config)
		}
	}

	const src = `{
	rate_limit {
		redis redis.invalid:6379 {
			password {env.RATE_LIMIT_TEST_SECRET}
		}
	}
}
:8080 {
	respond ok
}
`
	config, err := configtest.Adapt(src)
	if err != nil || strings.Contains(string(config), "canary") ||
		!strings.Contains(string(config), `"password":"{env.RATE_LIMIT_TEST_SECRET}"`) {
		t.Errorf("adapted to %s, %v", config, err)
	}
}

// Guards that a unix socket can be written as Caddy writes it elsewhere, and that
// limits are then kept there.
func TestUnixNetworkAddress(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t)
	s := sitetest.StartConfig(t, sitetest.Config{
		Global: sitetest.RedisGlobal("unix/"+redis.Socket, sitetest.LongTimeout),
		Site:   "rate_limit {\nsize 2\ndrip_rate 1h\n}\nrespond admitted",
	})
	for _, want := range []int{200, 200, 429} {
		if a := s.Get("/"); a.StatusCode != want {
			t.Errorf("got %s, want %d", a, want)
		}
	}
	if keys, err := redis.Client().Keys(t.Context(), "*").Result(); err != nil || len(keys) != 1 {
		t.Errorf("Redis has keys %q, %v, want one", keys, err)
	}
}

// Guards that a URL without a host does not make the client send its password to
// this machine, where a variable is unset.
func TestURLNeedsHost(t *testing.T) {
	s := sitetest.StartConfig(t, sitetest.Config{Site: "respond ok"})
	t.Setenv("RATE_LIMIT_TEST_PW", "canary")
	for _, address := range []string{
		"redis://:{env.RATE_LIMIT_TEST_PW}@{$RATE_LIMIT_TEST_UNSET}:6379", "redis://", "redis:///",
		"redis://:canary@", "rediss://:canary@/1",
	} {
		c := sitetest.Config{Global: sitetest.RedisGlobal(address), Site: "respond ok"}
		_, _, err := caddyconfig.GetAdapter("caddyfile").Adapt(c.Caddyfile(s.Addr, s.LogPath), nil)
		if err == nil { // it depends on a placeholder
			err = s.Load(c)
		}
		if err == nil || !strings.Contains(err.Error(), "is not valid; use a host, host:port, ") || strings.Contains(err.Error(), "canary") {
			t.Errorf("%s: got error %v", address, err)
		}
	}
}
