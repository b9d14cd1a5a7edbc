package behaviour

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

func init() { caddy.RegisterModule(new(failing)) }

// failing is a matcher that fails.
type failing struct{ How string }

// CaddyModule returns the Caddy module information.
func (*failing) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.matchers.failing", New: func() caddy.Module { return new(failing) }}
}

// UnmarshalCaddyfile implements caddyfile.Unmarshaler.
func (m *failing) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	for d.Next() {
		if !d.AllArgs(&m.How) {
			return d.ArgErr()
		}
	}
	return nil
}

// MatchWithError implements caddyhttp.RequestMatcherWithError.
func (m *failing) MatchWithError(*http.Request) (bool, error) {
	err := caddyhttp.Error(http.StatusTeapot, errors.New("secret"))
	switch m.How {
	case "plain":
		return false, errors.New("secret")
	case "wrapped":
		return false, fmt.Errorf("secret: %w", err)
	}
	return false, err
}

// TestFailedMatchers guards the status of a request for which a matcher of a limit fails: the one
// that its error has, wrapped or not, or 500; and that neither response nor log shows the error.
func TestFailedMatchers(t *testing.T) {
	t.Parallel()
	for how, want := range map[string]int{"plain": http.StatusInternalServerError, "status": http.StatusTeapot, "wrapped": http.StatusTeapot} {
		t.Run(how, func(t *testing.T) {
			s := sitetest.Start(t, "rate_limit {\nsize 1\nmatch failing "+how+"\n}\nrespond admitted\nhandle_errors {\nrespond {err.message} {err.status_code}\n}")
			if a := s.Get("/"); a.StatusCode != want || strings.Contains(a.Text, "secret") {
				t.Errorf("got %d %q, want %d without the error", a.StatusCode, a.Text, want)
			}
			for _, e := range s.Entries() {
				if strings.Contains(e.Text(), "secret") {
					t.Errorf("logged %s", e.Text())
				}
			}
		})
	}
}
