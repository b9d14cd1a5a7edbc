package ratelimit

import (
	"bytes"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/caddytest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/taken"
)

// TestTakenName guards that a Caddy with another plugin called rate_limit starts, that
// one line says under which name this one is there, that all of it works then, and that
// errors have that name.
func TestTakenName(t *testing.T) {
	for _, names := range []string{
		"http.handlers.rate_limit directive", "http.handlers.rate_limit", "directive", "rate_limit", "admin.api.rate_limit", "command",
	} {
		t.Run(names, func(t *testing.T) {
			t.Setenv(taken.Names, names)
			addr, admin := redistest.FreeAddr(t), redistest.FreeAddr(t)
			file := filepath.Join(tempDir(t), "Caddyfile")
			c := config{
				admin:  admin,
				global: "redis_rate_limit {\nmemory {\nmax_keys 1000\n}\n}",
				site:   "redis_rate_limit /a a {\nsize 1\ndrip_rate 1h\n}\nrespond admitted",
			}
			if names == "directive" {
				c.site = "route /other {\nrate_limit\n}\n" + c.site
			}
			if err := os.WriteFile(file, c.caddyfile(addr, filepath.Join(filepath.Dir(file), "log")), 0o600); err != nil {
				t.Fatal(err)
			}
			output := new(bytes.Buffer)
			p := runCaddy(t, output, file)
			var got []int
			eventually(t, "answers", func() bool {
				if err := p.Running(); err != nil {
					t.Fatalf("%v%s", err, output)
				}
				res, err := http.Get("http://" + addr + "/a")
				if err != nil {
					return false
				}
				res.Body.Close()
				got = append(got, res.StatusCode)
				return len(got) == 2
			})
			if got[0] != http.StatusOK || got[1] != http.StatusTooManyRequests {
				t.Errorf("got %d, want 200 and 429", got)
			}
			if names == "directive" {
				res, err := http.Get("http://" + addr + "/other")
				if err != nil {
					t.Fatal(err)
				}
				body, _ := io.ReadAll(res.Body)
				res.Body.Close()
				if string(body) != "other" {
					t.Errorf("the other plugin responds with %q", body)
				}
			}
			for _, args := range [][]string{
				{"limits", "--address", admin}, {"peek", "--address", admin, "a", "127.0.0.1"},
				{"explain", "--config", file, "http://" + addr + "/a"},
			} {
				stdout, err := caddytest.Command(t.Context(), append([]string{"redis-rate-limit"}, args...)...).Output()
				if err != nil || !slices.Contains(strings.Fields(string(stdout)), "a") {
					t.Errorf("%q: %v\n%s", args, err, stdout)
				}
			}
			if err := os.WriteFile(file, []byte("http://:8080 {\nredis_rate_limit a b\n}\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			adapt := caddytest.Command(t.Context(), "adapt", "--config", file)
			if text, err := adapt.CombinedOutput(); err == nil || !strings.Contains(string(text), `redis_rate_limit: \"a b\" is not valid`) {
				t.Errorf("a wrong directive: %v\n%s", err, text)
			}
			p.Stop()
			if n := strings.Count(output.String(), `"name":"redis_rate_limit"`); n != 1 {
				t.Errorf("%d lines tell the name, want one:\n%s", n, output)
			}
		})
	}
}

// TestPlaceInOrder guards where Caddy puts the directive: behind what rewrites requests, and
// before each name of the directive that checks passwords, so that wrong ones count.
func TestPlaceInOrder(t *testing.T) {
	for _, auth := range []string{"basic_auth", "basicauth"} {
		t.Run(auth, func(t *testing.T) {
			s := startConfig(t, config{site: auth + " {\nadmin " + rightHash + "\n}\nrespond in\n" +
				"rate_limit {\nmatch path /rewritten\nsize 3\ndrip_rate 1h\ncount status 401\n}\n" +
				"rewrite / /rewritten"})
			var got []int
			for range 5 {
				status, _ := ask(t.Context(), withPassword("http://"+s.addr, "wrong"))
				got = append(got, status)
			}
			if want := []int{401, 401, 401, 429, 429}; !slices.Equal(got, want) {
				t.Errorf("got %d, want %d", got, want)
			}
		})
	}
}
