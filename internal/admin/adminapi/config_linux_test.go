package adminapi

import (
	"fmt"
	"net/http"
	"runtime"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"golang.org/x/sys/unix"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
)

// handler is a handler that has been compiled to limits.
type handler rule.Handler

// Compiled implements rule.Module.
func (h *handler) Compiled() *rule.Handler { return (*rule.Handler)(h) }

// ServeHTTP implements caddyhttp.MiddlewareHandler.
func (*handler) ServeHTTP(http.ResponseWriter, *http.Request, caddyhttp.Handler) error { return nil }

// TestManyLimitsAreListedInLinearTime guards that what the admin API does for each request
// does not take a time that is quadratic in the number of limits. It is the time of the
// processor, since others run on it too.
func TestManyLimitsAreListedInLinearTime(t *testing.T) {
	const times, n = 16, 2000
	few, many := configOf(n), configOf(times*n)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	list := func(c *Config, n, times int) time.Duration {
		start := threadTime(t)
		for range times {
			all := c.numbered()
			if len(all) != n || all[0].title != "default" || all[n-1].title != fmt.Sprint("default#", n) {
				t.Fatalf("%d limits: the last one is %s", n, all[n-1].title)
			}
		}
		return threadTime(t) - start
	}
	apart, together := time.Hour, time.Hour
	for range 5 {
		apart, together = min(apart, list(few, n, times)), min(together, list(many, times*n, 1))
	}
	if together > 6*apart { // quadratic would be 16 times
		t.Errorf("%d times %d limits take %v, and as many together %v", times, n, apart, together)
	}
}

// configOf returns a config with n limits without a name.
func configOf(n int) *Config {
	h := new(handler)
	for i := range n {
		b := &rule.Bucket{Limit: new(rule.Limit), Path: "default", Name: fmt.Sprint("default@", i)}
		b.Policy = &rule.Policy{Policy: outcome.Policy{Path: "default"}}
		b.Size.Constant, b.Rate.Constant, b.Drip.Constant, b.Factor.Constant = 1, time.Second, 1, 1
		b.Limit.Buckets = []*rule.Bucket{b}
		h.Limits = append(h.Limits, b.Limit)
	}
	return &Config{Handlers: []rule.Module{h}}
}

// threadTime returns for how long the processor has run this thread.
func threadTime(t *testing.T) time.Duration {
	t.Helper()
	var usage unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_THREAD, &usage); err != nil {
		t.Fatal(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}
