package redisscript

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/redistest"
)

// TestIdleConnectionsClosed guards connections that the server closes while they
// are idle, for shorter and longer than the timeout: the next call is still run by
// the server, once, and nothing is reported. From then on connections are checked
// before they have been idle for as long.
func TestIdleConnectionsClosed(t *testing.T) {
	t.Parallel()
	authority := redistest.NewAuthority(t)
	for _, kind := range []struct {
		name   string
		server *redistest.Server
		change func(*Options, *redistest.Server)
	}{
		{"tcp", redistest.Start(t), func(opt *Options, s *redistest.Server) { opt.Addresses = []string{s.Addr} }},
		{"unix socket", redistest.Start(t), func(opt *Options, s *redistest.Server) { opt.Addresses = []string{s.Socket} }},
		{"TLS", redistest.StartTLS(t, authority, false), func(opt *Options, s *redistest.Server) {
			opt.Addresses, opt.TLS = []string{s.Addr}, authority.ClientConfig(t)
		}},
	} {
		for _, connections := range []int{1, 5} {
			t.Run(fmt.Sprintf("%s,connections=%d", kind.name, connections), func(t *testing.T) {
				var seen events
				r := newTestClient(t, kind.server, func(opt *Options) {
					kind.change(opt, kind.server)
					opt.Timeout, opt.Report = 250*time.Millisecond, seen.report
				})
				s := r.server()
				b := upTo(100_000)
				b.key = "rl:{" + t.Name() + "}"
				redistest.WaitFor(t, 5*time.Second, func() error {
					_, err := r.count(context.Background(), b)
					return err
				})
				connectAll(t, s, connections)
				before := stored(t, kind.server, b.key)
				const rounds = 6
				for n := range int64(rounds) {
					redistest.WaitFor(t, 5*time.Second, func() error {
						if held, made := s.pool.held.Load(), s.pool.made.Load(); held != made {
							return fmt.Errorf("%d connections are being made", held-made)
						}
						return nil
					})
					if err := kind.server.Client().Do(t.Context(), "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes").Err(); err != nil {
						t.Fatal(err)
					}
					time.Sleep([]time.Duration{20 * time.Millisecond, 2 * r.timeout}[n%2])
					mustCount(t, r, b)
				}
				if got := stored(t, kind.server, b.key); got != before+rounds {
					t.Errorf("%d requests were charged %d units", rounds, got-before)
				}
				if got := slices.DeleteFunc(seen.take(), func(what string) bool { return what == "error pool" }); len(got) > 0 {
					t.Errorf("reported %q", got)
				}
				if every := time.Duration(s.pool.checks.Load()); every > 2*r.timeout {
					t.Errorf("connections are tried once they have been idle for %v", every)
				}
			})
		}
	}
}
