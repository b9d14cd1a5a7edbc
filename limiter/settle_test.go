package limiter

import (
	"errors"
	"strconv"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/redistest"
)

// TestSettleIsTriedAgain tests that units which are held are settled soon, though
// the connection on which that should be done was closed while it was idle, and
// there is no other at that time: nothing was sent, and so it is sent again. They
// are not left for the server to charge ten seconds later.
func TestSettleIsTriedAgain(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name        string
		connections int
		fault       func(*redistest.Proxy) // once the connection is closed
	}{
		{"all others are in use", 2, (*redistest.Proxy).BlackHole},
		{"no other, the next takes long", 1, (*redistest.Proxy).BlackHole},
		{"no other, the next is refused", 1, (*redistest.Proxy).Refuse},
	} {
		for what, want := range map[byte]int64{whatCommit: 3, whatRelease: 0} {
			t.Run(tc.name+","+strconv.Itoa(int(what)), func(t *testing.T) {
				t.Parallel()
				server := redistest.Start(t)
				p := redistest.StartProxy(t, server.Addr)
				r := newTestRedis(t, server, func(opt *RedisOptions) {
					opt.Addresses, opt.PoolSize = []string{p.Addr}, tc.connections
					opt.Timeout = 200 * time.Millisecond
				})
				b := hourly(10)
				mustTake(t, r, Request{Buckets: []Bucket{numbered(0)}})
				s := r.servers.(*single).server
				connectAll(t, s, tc.connections)

				b.Cost = 3
				req := Request{Buckets: []Bucket{b}}
				q := r.question(req, whatHold)
				_, held, err := r.ask(within(5*time.Second), req, q, nil)
				if err != nil || held[0].denied {
					t.Fatalf("decided %+v, error %v", held, err)
				}
				conn := hold(t, s)
				if tc.connections > 1 {
					other := hold(t, s) // as if a request used it
					defer s.put(other)
				}
				id, err := conn.ClientID(t.Context()).Result()
				if err != nil {
					t.Fatal(err)
				}
				if err := server.Client().Do(t.Context(), "CLIENT", "KILL", "ID", id).Err(); err != nil {
					t.Fatal(err)
				}
				waitFor(t, 5*time.Second, func() error {
					if n := p.Open(); n >= tc.connections {
						return errors.New("the connection is still open")
					}
					return nil
				})
				time.Sleep(5 * idleFor)
				tc.fault(p)
				s.put(conn)
				began := time.Now()
				r.settleOn(s, q, what, held)
				time.Sleep(r.timeout)
				p.Pass()
				key := r.keys.of(&b)
				waitFor(t, 6*time.Second, func() error { return unsettled(t, server, key) })
				if took := time.Since(began); took > heldFor-time.Second {
					t.Errorf("settled after %v", took)
				}
				if got := storedUnits(t, r, server, b); got != want {
					t.Errorf("%d units are charged, want %d", got, want)
				}
			})
		}
	}
}
