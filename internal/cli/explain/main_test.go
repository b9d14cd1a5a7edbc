package explain_test

import (
	"testing"

	_ "github.com/seed-387a6c65/caddy-ratelimit"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

func TestMain(m *testing.M) { sitetest.Main(m) }
