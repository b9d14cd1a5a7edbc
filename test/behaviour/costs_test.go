package behaviour

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/costtest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/racetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// The tests in this file guard what a request costs, as limiter/costs_test.go does.
// Each ceiling is the present figure: lower it when the code gets better, and if it
// must get worse, raise it in the commit that says why.

// TestRequestBytes guards how much garbage the handler makes of each request, beside
// what Caddy makes: most of it are the values of header fields.
func TestRequestBytes(t *testing.T) {
	racetest.SingleGoroutine(t)
	for _, c := range handlerCosts(t) {
		n := costtest.Bytes(c.with, c.without)
		if n > c.bytes {
			t.Errorf("%s: a request allocates %d bytes, the ceiling is %d", c.name, n, c.bytes)
		}
	}
}

// TestRequestTime guards that the handler does not become slower.
func TestRequestTime(t *testing.T) {
	racetest.SingleGoroutine(t)
	var tasks []costtest.Task
	for _, c := range handlerCosts(t) {
		tasks = append(tasks, costtest.Task{Name: c.name, Run: c.with, Without: c.without, Ceiling: c.hashes})
	}
	costtest.Check(t, tasks)
}

// handlerCost is a request, with the handler and without, and its ceilings.
type handlerCost struct {
	name          string
	with, without func()
	bytes         int
	hashes        float64 // see costtest
}

// handlerCosts returns requests that limits of this process admit, and one that they
// deny, and its response is written by the handler.
func handlerCosts(t *testing.T) []handlerCost {
	costs := []handlerCost{
		{name: "1 limit", bytes: 400, hashes: 36},
		{name: "8 limits", bytes: 1552, hashes: 106},
		{name: "32 limits", bytes: 5264, hashes: 312},
		{name: "denied", bytes: 496, hashes: 39.5},
	}
	var blocks strings.Builder
	for i, limits := range []int{1, 8, 32, 1} {
		fmt.Fprintf(&blocks, "rate_limit /%d {\n", i)
		for j := range limits {
			numbers := "size 1000000000\ndrip_rate 1ms"
			if costs[i].name == "denied" {
				numbers = "size 1\ndrip_rate 1h"
			}
			fmt.Fprintf(&blocks, "limit costs-%d-%d {\n%s\n}\n", i, j, numbers)
		}
		blocks.WriteString("}\n")
	}
	s := sitetest.StartConfig(t, sitetest.Config{Level: "INFO", Site: blocks.String() + "respond admitted"}) // or each denial is logged

	server := s.Server()
	next := caddyhttp.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) error {
		w.WriteHeader(http.StatusOK)
		return nil
	})
	request := sitetest.Received(httptest.NewRequest(http.MethodGet, "/", nil))
	serve := func(handle func(http.ResponseWriter, *http.Request, caddyhttp.Handler) error, want int) func() {
		w := &discarded{header: make(http.Header)}
		do := func() {
			clear(w.header)
			if err := handle(w, caddyhttp.PrepareRequest(request, caddy.NewReplacer(), w, server), next); err != nil {
				t.Error(err)
			}
		}
		do()
		if do(); w.status != want {
			t.Fatalf("status %d, want %d", w.status, want)
		}
		return do
	}
	inOrder := func(a, b rule.Module) int {
		return strings.Compare(a.Compiled().Limits[0].Within[0].Path, b.Compiled().Limits[0].Within[0].Path)
	}
	for i, h := range slices.SortedFunc(slices.Values(s.Handlers()), inOrder) {
		want := http.StatusOK
		if costs[i].name == "denied" {
			want = http.StatusTooManyRequests
		}
		costs[i].with = serve(h.ServeHTTP, want)
		costs[i].without = serve(func(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
			return next.ServeHTTP(w, r)
		}, http.StatusOK)
	}
	return costs
}

// discarded is a response of which only the status is kept.
type discarded struct {
	header http.Header
	status int
}

func (d *discarded) Header() http.Header       { return d.header }
func (*discarded) Write(p []byte) (int, error) { return len(p), nil }
func (d *discarded) WriteHeader(status int)    { d.status = status }
