package limiter

import (
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// unlikeRedis comes before the script, which then meets what other servers do, all at
// once: SET has no PXAT (Redis 6.0, Garnet), TIME has whole milliseconds, and Lua has
// no math.frexp, but a math.type (5.4, in Dragonfly).
const unlikeRedis = `
local redis, real = {pcall = redis.pcall}, redis
redis.call = function(name, ...)
  for _, word in ipairs({...}) do
    if word == 'PXAT' or word == 'EXAT' then
      error('ERR syntax error')
    end
  end
  local reply = real.call(name, ...)
  if name == 'TIME' then
    reply[2] = reply[2] - reply[2] % 1000
  end
  return reply
end
local math = setmetatable({frexp = false, type = true}, {__index = math})
`

// TestServersUnlikeRedis guards that limits hold on servers that lack what Redis has.
func TestServersUnlikeRedis(t *testing.T) {
	server := redistest.Start(t)
	r := newRedis(RedisOptions{Addresses: []string{server.Addr}, KeyPrefix: "rl:", Timeout: 10 * time.Second},
		newScript(unlikeRedis+takeSource))
	defer r.Close()
	for name, limit := range map[string]Limit{
		"bucket":            hourly(20).Limit,
		"many drips":        {Size: 1000, DripInterval: time.Hour, DripSize: 1},
		"slack":             {Size: 20, DripInterval: time.Hour, DripSize: 7},
		"window":            FixedWindow(20, time.Hour),
		"window of a clock": ClockWindow(20, 10000*time.Hour, time.Unix(0, 0)),
		"sliding window":    SlidingWindow(20, 10000*time.Hour),
		"log":               SlidingLog(20, time.Hour),
	} {
		t.Run(name, func(t *testing.T) {
			b := Bucket{Name: "b", Key: name, Limit: limit, Cost: limit.Size / 20}
			var admitted atomic.Int64
			redistest.Together(t, 30, func(int) {
				if d := mustTake(t, r, Request{Buckets: []Bucket{b}})[0]; !d.Denied {
					admitted.Add(b.Cost)
				}
			})
			if units := peek(t, r, b).Units; admitted.Load() != limit.Size || units != limit.Size {
				t.Errorf("admitted %d, holds %d, want %d", admitted.Load(), units, limit.Size)
			}
			reset(t, r, b, limit.Size)
			if d := mustTake(t, r, Request{Buckets: []Bucket{b}})[0]; d.Denied || d.Remaining != limit.Size-b.Cost {
				t.Errorf("after a reset: %+v", d)
			}
		})
	}
	warm := Bucket{Name: "b", Key: "warm", Limit: warmingUp(1, time.Hour, time.Hour, 3), Cost: 1}
	for i := range 2 {
		if d := mustTake(t, r, Request{Buckets: []Bucket{warm}})[0]; d.Denied != (i > 0) {
			t.Errorf("warm up, request %d: %+v", i, d)
		}
	}
}

// TestServersThatRefuseCommands guards servers that lack commands which are not needed:
// requests are decided, and nothing is reported.
func TestServersThatRefuseCommands(t *testing.T) {
	unknown := func(names ...string) func([]string) string {
		return func(command []string) string {
			if slices.Contains(names, command[0]) {
				return fmt.Sprintf("ERR unknown command '%s', with args beginning with: ", command[0])
			}
			return ""
		}
	}
	for name, refuse := range map[string]func([]string) string{
		"HELLO is renamed":             unknown("hello"),
		"Redis 6":                      unknown("evalsha_ro", "eval_ro", "fcall"),
		"older than that":              unknown("hello", "client", "evalsha_ro"),
		"scripts need keys":            withoutKeys("ERR EVAL and EVALSHA need at least one key"),
		"scripts need keys, Envoy's":   withoutKeys("wrong number of arguments for 'eval' command"),
		"nothing but what it needs is": only("auth", "evalsha", "eval"),
	} {
		t.Run(name, func(t *testing.T) {
			server := redistest.Start(t, "--requirepass", "secret")
			addr := redistest.StartFront(t, server, refuse)
			var seen events
			r := newTestRedis(t, server, func(opt *RedisOptions) {
				opt.Addresses, opt.Password, opt.Report, opt.Fallback = []string{addr}, "secret", seen.report, NewMemory()
			})
			first := hourly(20)
			first.Key = "first" // comes with the script
			if d := mustTake(t, r, Request{Buckets: []Bucket{first}})[0]; d.By != DecidedByRedis {
				t.Errorf("decided %+v", d)
			}
			var admitted, elsewhere atomic.Int64
			redistest.Together(t, 60, func(int) {
				d := mustTake(t, r, Request{Buckets: []Bucket{hourly(20)}})[0]
				if !d.Denied {
					admitted.Add(1)
				}
				if d.By == DecidedByFallback {
					elsewhere.Add(1)
				}
			})
			if admitted.Load() != 20 || elsewhere.Load() > 0 || storedUnits(t, r, server, hourly(20)) != 20 {
				t.Errorf("admitted %d, %d decided here, %d stored", admitted.Load(), elsewhere.Load(), storedUnits(t, r, server, hourly(20)))
			}
			seen.check(t)
		})
	}
}

// withoutKeys refuses scripts without keys.
func withoutKeys(refusal string) func([]string) string {
	return func(command []string) string {
		if strings.HasPrefix(command[0], "eval") && len(command) > 2 && command[2] == "0" {
			return refusal
		}
		return ""
	}
}

// only refuses all other commands.
func only(names ...string) func([]string) string {
	return func(command []string) string {
		if slices.Contains(names, command[0]) {
			return ""
		}
		return "ERR unsupported command '" + command[0] + "'"
	}
}
