package advice_test

import (
	"testing"

	_ "github.com/seed-387a6c65/caddy-ratelimit"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

func TestMain(m *testing.M) { sitetest.Main(m) }

// basicAuth is a directive that authenticates.
const basicAuth = "basic_auth {\nbob $2a$14$Zkx19XLiW6VYouLHR5NmfOFU0z2GTNmpkT/5qqR7hx4IjWJPDhjvG\n}\n"
