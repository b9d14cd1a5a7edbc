package limiter_test

import (
	"context"
	"fmt"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// A bucket that holds two and drips once a second: two requests may come at
// once, and then one a second.
func Example() {
	var now time.Duration // a clock to play with; give nil for the real one
	store := limiter.NewMemory(func() time.Duration { return now })

	req := limiter.Request{Buckets: []limiter.Bucket{{
		Name:  "login",
		Key:   "203.0.113.7",
		Limit: limiter.Limit{Size: 2, DripRate: time.Second, DripSize: 1},
		Cost:  1,
	}}}
	for range 3 {
		d, err := store.Take(context.Background(), req, nil)
		if err != nil {
			fmt.Println(err)
			return
		}
		if d[0].Denied {
			fmt.Println("denied, retry in", d[0].Retry)
		} else {
			fmt.Println("admitted, room for", d[0].Remaining)
		}
		now += 100 * time.Millisecond
	}
	// Output:
	// admitted, room for 1
	// admitted, room for 0
	// denied, retry in 800ms
}

// A request that has to pass several buckets is charged to all of them or to
// none, and Summarize makes one answer of theirs.
func ExampleSummarize() {
	store := limiter.NewMemory(func() time.Duration { return 0 })
	user := limiter.Bucket{
		Name:  "user",
		Key:   "alex",
		Limit: limiter.Limit{Size: 16, DripRate: 2 * time.Second, DripSize: 1},
		Cost:  1,
	}
	trade := limiter.Bucket{
		Name:  "user/trade",
		Key:   "alex",
		Limit: limiter.Limit{Size: 6, DripRate: 1500 * time.Millisecond, DripSize: 1},
		Cost:  5,
	}
	buckets := []limiter.Bucket{user, trade}

	for range 2 {
		decisions, err := store.Take(context.Background(), limiter.Request{Buckets: buckets}, nil)
		if err != nil {
			fmt.Println(err)
			return
		}
		sum := limiter.Summarize(decisions)
		fmt.Printf("denied %t: %s has room for %d of %d, retry in %v, empty in %v; user has room for %d\n",
			sum.Denied, buckets[sum.Deciding].Name, sum.Remaining, sum.Size, sum.Retry, sum.Clear,
			decisions[0].Remaining)
	}
	// Output:
	// denied false: user/trade has room for 1 of 6, retry in 0s, empty in 7.5s; user has room for 15
	// denied true: user/trade has room for 1 of 6, retry in 6s, empty in 7.5s; user has room for 15
}

// Processes that use one Redis server share their buckets. Where it does not
// answer in time, as here where there is none, the caller has to decide.
func ExampleRedis() {
	store, err := limiter.NewRedis(limiter.RedisOptions{
		Addresses: []string{"127.0.0.1:1"},
		KeyPrefix: "rl:",
		Timeout:   50 * time.Millisecond,
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer store.Close()

	decisions, err := store.Take(context.Background(), limiter.Request{Buckets: []limiter.Bucket{{
		Name:  "api",
		Key:   "203.0.113.7",
		Limit: limiter.Limit{Size: 100, DripRate: time.Minute, DripSize: 60},
		Cost:  1,
	}}}, nil)
	switch {
	case err != nil:
		fmt.Println("no answer from Redis")
	case limiter.Summarize(decisions).Denied:
		fmt.Println("too many requests")
	default:
		fmt.Println("welcome")
	}
	// Output: no answer from Redis
}
