package peers

import (
	"context"
	"net/http"
	"runtime"
	"sync"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/redis/go-redis/v9"
)

// OneCall has one script call decide all waiting requests, as the limiter does,
// and leaves out everything else: it has no deadlines, breaker or fallback, never
// sends a single request directly, and charges limits that have room even if
// others deny. It is not meant for use. It shows the minimum cost, on this
// machine, of a limiter that works like that.
type OneCall struct {
	peer
	numbers []any // of the limits, as the script has them

	mu      sync.Mutex
	waiting []*question
	asking  bool
}

// question is a request that waits for a decision.
type question struct {
	keys  []string
	reply []int64
	err   error
	done  chan struct{} // receives a value when there is a reply
}

var questions = sync.Pool{New: func() any { return &question{done: make(chan struct{}, 1)} }}

// CaddyModule returns the module's name.
func (*OneCall) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.one_call", New: func() caddy.Module { return new(OneCall) }}
}

// Provision makes the client.
func (h *OneCall) Provision(caddy.Context) error {
	h.connect()
	for _, l := range h.Limits {
		h.numbers = append(h.numbers, l.drip()*int64(l.Size), l.drip())
	}
	return nil
}

// gcraAll is gcra for the keys of any number of requests, which all have the same
// limits.
var gcraAll = redis.NewScript(`
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local numbers, reply = {}, {}
for i, number in ipairs(ARGV) do
	numbers[i] = tonumber(number)
end
for i = 1, #KEYS do
	local at = (2 * i - 2) % #numbers
	local drip = numbers[at + 2]
	local clear = math.max(tonumber(redis.call('GET', KEYS[i]) or now), now)
	local room = numbers[at + 1] - (clear - now) - drip
	if room >= 0 then
		clear = clear + drip
		redis.call('SET', KEYS[i], string.format('%.0f', clear), 'PX', math.ceil((clear - now) / 1000))
	end
	reply[2 * i - 1], reply[2 * i] = clear - now, room
end
return reply
`)

func (h *OneCall) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	return h.serve(w, r, next, h.take)
}

func (h *OneCall) take(_ context.Context, keys []string) ([]decision, error) {
	q := questions.Get().(*question)
	defer questions.Put(q)
	q.keys = keys

	h.mu.Lock()
	h.waiting = append(h.waiting, q)
	if !h.asking {
		h.asking = true
		go h.ask() // for all requests, not for this one
	}
	h.mu.Unlock()

	<-q.done
	if q.err != nil {
		return nil, q.err
	}
	decisions := make([]decision, len(keys))
	for i, l := range h.Limits {
		decisions[i] = l.decision(q.reply[2*i], q.reply[2*i+1])
	}
	return decisions, nil
}

// ask makes calls as long as requests wait.
func (h *OneCall) ask() {
	var batch []*question
	var keys []string
	for {
		runtime.Gosched() // let goroutines that are about to ask do so
		h.mu.Lock()
		batch, h.waiting = h.waiting, batch[:0]
		h.asking = len(batch) > 0
		h.mu.Unlock()
		if len(batch) == 0 {
			return
		}
		keys = keys[:0]
		for _, q := range batch {
			keys = append(keys, q.keys...)
		}
		reply, err := gcraAll.Run(context.Background(), h.client, keys, h.numbers...).Int64Slice()
		for _, q := range batch {
			if q.err = err; err == nil {
				q.reply, reply = reply[:2*len(q.keys)], reply[2*len(q.keys):]
			}
			q.done <- struct{}{}
		}
	}
}

var (
	_ caddyhttp.MiddlewareHandler = (*OneCall)(nil)
	_ caddy.CleanerUpper          = (*OneCall)(nil)
)
