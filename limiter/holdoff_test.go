package limiter

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter/internal/redisscript"
)

// stuckClient takes calls to charge and sends none of them, as while its server is silent.
type stuckClient struct{ waiting []*redisscript.Call }

func (*stuckClient) Connect() {}
func (*stuckClient) Do(redisscript.Deadline, *redisscript.Call) (*redisscript.Server, error) {
	return nil, errors.New("silent")
}

func (c *stuckClient) Submit(_ redisscript.Deadline, call *redisscript.Call) error {
	c.waiting = append(c.waiting, call)
	return nil
}
func (*stuckClient) OneServer() bool            { return true }
func (*stuckClient) Stats() []redisscript.Stats { return nil }
func (*stuckClient) Close() error               { return nil }

// TestChargesCountBeforeTheyAreSent guards that what a request was charged when it ended, and
// had held nothing, takes room at once, although its server may not hear of it for as long as
// requests wait: others are decided here meanwhile. It takes that room once.
func TestChargesCountBeforeTheyAreSent(t *testing.T) {
	client := new(stuckClient)
	r := newRedisWithoutClient(RedisOptions{KeyPrefix: "rl:", Timeout: time.Second, Fallback: NewMemory()})
	r.client, r.reports.running = client, true // they are sent by hand
	b := hourly(3)
	b.Cost = 0
	remain := func(want int64) {
		t.Helper()
		if d, _ := begin(t, r, b); d.Remaining != want || d.Denied != (want == 0) {
			t.Errorf("%+v, want %d to remain", d, want)
		}
	}
	for n := int64(3); n > 0; n-- {
		remain(n)
		_, h := begin(t, r, b)
		h.held.Settle(0, 1)
	}
	remain(0)
	for calls := 0; r.reports.inProgress(); calls++ {
		if r.reports.sendDue(); calls == 2 {
			t.Fatal("what is charged while a call is in flight takes more than one other")
		}
		for _, call := range client.waiting[calls:] {
			call.Done(context.DeadlineExceeded)
		}
		remain(0)
	}
	if l, _ := r.fallback.memory.Peek(t.Context(), b); l.Units != 3 {
		t.Errorf("%+v, want each charge once", l)
	}
}

// TestGatheredChargesAreBounded guards that the sum of many huge charges, which wait to be sent,
// can be sent, and leaves no room.
func TestGatheredChargesAreBounded(t *testing.T) {
	r, client := withStuckClient(NewMemory())
	b := hourly(3)
	b.Cost = 0
	for range 1 << 15 {
		r.chargeLater(b, MaxUnits)
	}
	client.waiting[0].Done(context.DeadlineExceeded)
	r.reports.sendDue()
	if q := client.waiting[1].Owner.(*query); len(client.waiting) > 2 || q.buckets[0].cost != MaxUnits {
		t.Errorf("%d calls, the second for %d units", len(client.waiting), q.buckets[0].cost)
	}
}
