package directive_test

import (
	"testing"

	_ "github.com/seed-387a6c65/caddy-ratelimit"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

func TestMain(m *testing.M) { sitetest.Main(m) }

// wantAddress is what errors say of an address.
const wantAddress = `is not valid; use a host, host:port, the path of a unix socket, or a redis://, rediss:// or unix:// URL`
