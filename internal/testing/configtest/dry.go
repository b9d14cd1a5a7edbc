package configtest

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/offline"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// AlgorithmLimits are limits with each algorithm.
const AlgorithmLimits = `
	limit leaky {
		size 3
		drip_rate 1h
	}
	limit token {
		algorithm token_bucket
		size 3
		drip_rate 1h
	}
	limit clock {
		algorithm fixed_window
		size 3
		window 8760h
	}
	limit first {
		algorithm fixed_window
		size 3
		window 1h
		window_start first
	}
	limit period {
		algorithm fixed_window
		size 3
		period day Asia/Tokyo
	}
	limit slides {
		algorithm sliding_window
		size 3
		window 8760h
	}`

// LoadDry loads a Caddyfile without starting it, until the test ends.
func LoadDry(t testing.TB, caddyfile string) *offline.Config {
	t.Helper()
	file := filepath.Join(sitetest.TempDir(t), "Caddyfile")
	if err := os.WriteFile(file, []byte(caddyfile), 0o600); err != nil {
		t.Fatal(err)
	}
	var d *offline.Config
	err := sitetest.Alone(func() (err error) {
		d, err = offline.Load(file, "")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = sitetest.Alone(func() error {
			d.Close()
			return nil
		})
	})
	return d
}
