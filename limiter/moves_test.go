package limiter

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/testseed"
)

// TestMovesKeepCharges guards a process whose buckets move while requests are in progress, as
// by reloads that change the store: to this process and to two or three other prefixes, with
// old stores closed at any time and servers that answer late. In a third of the histories all
// requests are decided in this process and the buckets move to the same prefix again and
// again, with old stores closed at once. In the end nothing is held in the place where a
// bucket is, and it has each charge once.
func TestMovesKeepCharges(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	for history := range few(90) {
		t.Run(fmt.Sprint(history), func(t *testing.T) {
			t.Parallel()
			random := rand.New(rand.NewPCG(testseed.Base(), uint64(history)))
			proxy, memory := redistest.StartProxy(t, server.Addr), NewMemory()
			var log []string
			said := func(format string, a ...any) { log = append(log, fmt.Sprintf(format, a...)) }
			b := hourly(1000)
			var running []*Held
			var charged int64
			store, old := Store(memory), []*Redis(nil)
			settle := func() {
				i, charge := random.IntN(len(running)), random.Int64N(3)
				running[i].Settle(0, charge)
				running = append(running[:i], running[i+1:]...)
				charged += charge
				said("settle %d", charge)
			}
			maxPlaces, locations := 2+history%3, 0
			back := maxPlaces == 4 // to the same prefix, and requests begin in this process only
			move := func() {
				if locations == maxPlaces {
					return
				}
				if r, ok := store.(*Redis); ok {
					old = append(old, r)
				}
				locations++
				location := locations
				switch {
				case back:
					location = locations % 2
				case random.IntN(4) == 0:
					location = 0
				}
				if said("move to %d", location); location == 0 {
					if store = memory; back {
						_ = old[len(old)-1].Close()
					}
					return
				}
				r := newRedis(RedisOptions{
					Addresses: []string{proxy.Addr}, Timeout: 10 * time.Second, Fallback: memory,
					KeyPrefix: fmt.Sprintf("%d:%d:", history, location),
				}, takeScript)
				t.Cleanup(func() { _ = r.Close() })
				store = r
			}
			for range 30 {
				switch random.IntN(10) {
				case 0, 1:
					move()
				case 2:
					if len(old) > 0 {
						i := random.IntN(len(old))
						_ = old[i].Close()
						old = append(old[:i], old[i+1:]...)
						said("close")
					}
				case 3:
					proxy.Delay(time.Duration(random.IntN(5))*time.Millisecond, time.Duration(random.IntN(5))*time.Millisecond)
				case 4, 5, 6:
					if back && store != memory {
						time.Sleep(time.Duration(random.IntN(100)) * time.Millisecond)
						continue
					}
					d, h := begin(t, store, b)
					if d.Denied {
						t.Fatalf("%v: denied: %+v", log, d)
					}
					running = append(running, h.held)
					said("begin")
				default:
					if len(running) > 0 {
						settle()
					}
				}
			}
			for len(running) > 0 {
				settle()
			}
			proxy.Pass()
			if store == memory {
				if l, err := memory.Peek(t.Context(), b); err != nil || l.Held > 0 {
					t.Errorf("%v: %+v, %v", log, l, err)
				}
			}
			for maxPlaces = 99; store == memory; { // else what is on its way to servers would not be seen
				move()
			}
			redistest.WaitFor(t, 10*time.Second, func() error {
				b.Cost = 1
				_, h := begin(t, store, b) // reports what is known here
				h.held.Settle(0, 0)
				if l, err := store.(Keeper).Peek(t.Context(), b); err != nil || l.Units < charged || l.Held > 0 {
					return fmt.Errorf("%v: %+v, %w, want %d units", log, l, err, charged)
				}
				return nil
			})
			time.Sleep(3 * resendEvery)
			begin(t, store, b)
			if l, err := store.(Keeper).Peek(t.Context(), b); err != nil || l.Units != charged {
				t.Errorf("%v: %+v, %v, want %d units", log, l, err, charged)
			}
		})
	}
}
