package httplimit_test

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter/httplimit"
)

// Two requests at once for each address, and then one a second.
func Example() {
	limit, err := httplimit.New(httplimit.Options{
		Store: limiter.NewMemory(),
		Limits: []httplimit.Limit{
			{Name: "api", Limit: limiter.Every(time.Second).WithBurst(2)},
			{Name: "day", Limit: limiter.FixedWindow(1000, 24*time.Hour)},
		},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/hello", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "hello") })
	server := httptest.NewServer(limit(mux)) // or http.ListenAndServe(":8080", limit(mux))
	defer server.Close()

	for range 3 {
		res, err := http.Get(server.URL + "/hello")
		if err != nil {
			fmt.Println(err)
			return
		}
		_ = res.Body.Close()
		fmt.Printf("%s, RateLimit: %s, Retry-After: %q\n", res.Status, res.Header.Get("RateLimit"), res.Header.Get("Retry-After"))
	}
	// Output:
	// 200 OK, RateLimit: "api";r=1;t=1, "day";r=999;t=86400, Retry-After: ""
	// 200 OK, RateLimit: "api";r=0;t=1, "day";r=998;t=86400, Retry-After: ""
	// 429 Too Many Requests, RateLimit: "api";r=0;t=1, "day";r=998, Retry-After: "1"
}

// Behind proxies in 10.0.0.0/8, each with the address that it sees.
func ExampleAddress() {
	address := httplimit.Address(netip.MustParsePrefix("10.0.0.0/8"))

	r := httptest.NewRequest(http.MethodGet, "/", nil)
	r.RemoteAddr = "10.0.0.1:4711"
	r.Header.Set("X-Forwarded-For", "192.0.2.1, 203.0.113.7, 10.0.0.2") // the client has made up the first
	fmt.Println(address(r))
	// Output: 203.0.113.7
}

// Requests of an account, five of them at a time.
func ExampleLimit() {
	_, err := httplimit.New(httplimit.Options{
		Store: limiter.NewMemory(),
		Limits: []httplimit.Limit{
			{Name: "address", Limit: limiter.PerMinute(600)},
			{Name: "at-once", Limit: limiter.Concurrency(5), Key: func(r *http.Request) string {
				account, _, _ := r.BasicAuth() // which a handler before this one has checked
				return account
			}},
		},
		Denied: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusTooManyRequests)
			_, _ = io.WriteString(w, `{"error":"too many requests"}`)
		}),
	})
	fmt.Println(err)
	// Output: <nil>
}
