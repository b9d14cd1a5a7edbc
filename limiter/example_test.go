package limiter_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Ten requests a second for each client, with bursts of up to ten.
func Example() {
	api := limiter.Limiter{Store: limiter.NewMemory(), Limit: limiter.PerSecond(10)}

	d, err := api.Allow(context.Background(), "203.0.113.7")
	switch {
	case err != nil:
		fmt.Println(err)
	case d.Denied:
		fmt.Println("too many requests, retry in", d.RetryAfter)
	default:
		fmt.Println("welcome, room for", d.Remaining)
	}
	// Output: welcome, room for 9
}

// Bursts of two requests, and then one a second.
func ExampleLimiter_Allow() {
	var now time.Duration // a clock for the example; use nil for the real one
	store := limiter.NewMemoryWithClock(func() time.Duration { return now })

	login := limiter.Limiter{Store: store, Name: "login", Limit: limiter.Every(time.Second).WithBurst(2)}
	for range 3 {
		d, err := login.Allow(context.Background(), "203.0.113.7")
		if err != nil {
			fmt.Println(err)
			return
		}
		if d.Denied {
			fmt.Println("denied, retry in", d.RetryAfter)
		} else {
			fmt.Println("admitted, room for", d.Remaining)
		}
		now += 100 * time.Millisecond
	}
	// Output:
	// admitted, room for 1
	// admitted, room for 0
	// denied, retry in 800ms
}

// An expensive request costs more: all of its units, or none.
func ExampleLimiter_AllowN() {
	store := limiter.NewMemoryWithClock(func() time.Duration { return 0 })
	export := limiter.Limiter{Store: store, Name: "export", Limit: limiter.PerMinute(60)}
	for _, rows := range []int64{50, 20, 10, 61} {
		d, err := export.AllowN(context.Background(), "alex", rows)
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Printf("%d rows: denied %t, never %t, retry in %v, room for %d\n", rows, d.Denied, d.Never, d.RetryAfter, d.Remaining)
	}
	// Output:
	// 50 rows: denied false, never false, retry in 0s, room for 10
	// 20 rows: denied true, never false, retry in 10s, room for 10
	// 10 rows: denied false, never false, retry in 0s, room for 0
	// 61 rows: denied true, never true, retry in 0s, room for 0
}

// A thousand a day, in bursts of at most 50.
func ExamplePer() {
	limit := limiter.Per(1000, 24*time.Hour).WithBurst(50)
	backup := limiter.Limiter{Store: limiter.NewMemory(), Name: "backup", Limit: limit}

	for _, files := range []int64{50, 1} {
		d, err := backup.AllowN(context.Background(), "alex", files)
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Printf("denied %t, retry in %v\n", d.Denied, d.RetryAfter.Round(100*time.Millisecond))
	}
	// Output:
	// denied false, retry in 0s
	// denied true, retry in 1m26.4s
}

// Requests that wait for up to four seconds, at two a second, and slower at first.
func ExampleLimit_WithDelay() {
	store := limiter.NewMemoryWithClock(func() time.Duration { return 0 }) // the time of the example
	limit, delayed := limiter.WarmingUp(2, time.Second, 4*time.Second).WithDelay(4*time.Second, 1)
	bucket := limiter.Bucket{Name: "search", Key: "203.0.113.7", Limit: limit, Cost: 1}
	for {
		d, err := store.Take(context.Background(), limiter.Request{Buckets: []limiter.Bucket{bucket}}, nil)
		if err != nil || d[0].Denied {
			fmt.Println("denied, retry in", d[0].RetryAfter)
			return
		}
		fmt.Println("wait", bucket.Delay(&d[0], delayed))
	}
	// Output:
	// wait 0s
	// wait 1.375s
	// wait 2.5s
	// wait 3.375s
	// wait 4s
	// denied, retry in 500ms
}

// A request that has to pass several buckets is charged to all of them or to none.
// Summarize combines their decisions.
func ExampleSummarize() {
	store := limiter.NewMemoryWithClock(func() time.Duration { return 0 })
	user := limiter.Bucket{
		Name:  "user",
		Key:   "alex",
		Limit: limiter.Every(2 * time.Second).WithBurst(16),
		Cost:  1,
	}
	trade := limiter.Bucket{
		Name:  "user/trade",
		Key:   "alex",
		Limit: limiter.Every(1500 * time.Millisecond).WithBurst(6),
		Cost:  5,
	}
	buckets := []limiter.Bucket{user, trade}

	for range 2 {
		decisions, err := store.Take(context.Background(), limiter.Request{Buckets: buckets}, nil)
		if err != nil {
			fmt.Println(err)
			return
		}
		sum := limiter.Summarize(buckets, decisions)
		fmt.Printf("denied %t: %s has room for %d of %d, retry in %v, empty in %v; user has room for %d\n",
			sum.Denied, buckets[sum.Deciding].Name, sum.Remaining, sum.Size, sum.RetryAfter, sum.Clear,
			decisions[0].Remaining)
	}
	// Output:
	// denied false: user/trade has room for 1 of 6, retry in 0s, empty in 7.5s; user has room for 15
	// denied true: user/trade has room for 1 of 6, retry in 6s, empty in 7.5s; user has room for 15
}

// Processes that use one Redis server share their buckets. While it is
// unavailable, as here where there is none, each process continues on its own with
// its Fallback.
func ExampleRedis() {
	store, err := limiter.NewRedis(limiter.RedisOptions{
		Addresses: []string{"127.0.0.1:1"}, // no server answers there, so the Memory decides
		KeyPrefix: "rl:",
		Fallback:  limiter.NewMemory(),
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer store.Close()

	api := limiter.Limiter{Store: store, Name: "api", Limit: limiter.PerSecond(100)}
	d, err := api.Allow(context.Background(), "203.0.113.7")
	switch {
	case err != nil:
		fmt.Println(err)
	case d.Denied:
		fmt.Println("too many requests")
	default:
		fmt.Println("welcome")
	}
	// Output: welcome
}

// Without a Fallback, the caller has to decide when Redis does not answer in time.
func ExampleErrUnavailable() {
	store, err := limiter.NewRedis(limiter.RedisOptions{
		Addresses: []string{"127.0.0.1:1"}, // no server answers there
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer store.Close()

	api := limiter.Limiter{Store: store, Name: "api", Limit: limiter.PerSecond(100)}
	_, err = api.Allow(context.Background(), "203.0.113.7")
	fmt.Println(errors.Is(err, limiter.ErrUnavailable))
	// Output: true
}

// Two downloads at a time.
func ExampleLimiter_Hold() {
	downloads := limiter.Limiter{Store: limiter.NewMemory(), Name: "downloads", Limit: limiter.Concurrency(2)}
	download := func() {
		hold, err := downloads.Hold(context.Background(), "alex")
		if err != nil || hold.Denied {
			fmt.Println("denied", err)
			return
		}
		defer hold.Done(0)
		// ... send the file
		fmt.Println("sent")
	}
	for range 3 { // one after the other
		download()
	}
	// Output:
	// sent
	// sent
	// sent
}

// Five wrong passwords in an hour. Right ones do not count.
func ExampleHold_Done() {
	logins := limiter.Limiter{Store: limiter.NewMemory(), Name: "login", Limit: limiter.FixedWindow(5, time.Hour)}
	login := func(user, password string) {
		hold, err := logins.Hold(context.Background(), user)
		if err != nil || hold.Denied {
			fmt.Println("denied", err)
			return
		}
		if password == "right" {
			hold.Done(0)
			fmt.Println("welcome")
		} else {
			hold.Done(1)
			fmt.Println("wrong")
		}
	}
	for _, password := range []string{"right", "1", "2", "3", "right", "4", "5", "right"} {
		login("alex", password)
	}
	// Output:
	// welcome
	// wrong
	// wrong
	// wrong
	// welcome
	// wrong
	// wrong
	// denied <nil>
}

// Wait blocks until there is room, and fails at once if there will be none in time.
func ExampleLimiter_Wait() {
	mail := limiter.Limiter{Store: limiter.NewMemory(), Name: "mail", Limit: limiter.Every(time.Hour)}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()

	fmt.Println(mail.Wait(ctx, "alex"))
	fmt.Println(errors.Is(mail.Wait(ctx, "alex"), limiter.ErrTooLong))
	// Output:
	// <nil>
	// true
}

// Two downloads at a time, and as many bytes in a minute as they turn out to have: what a
// request costs is charged when it is over.
func ExampleHeld() {
	store := limiter.NewMemory()
	buckets := []limiter.Bucket{
		{Name: "at once", Key: "alex", Limit: limiter.Concurrency(2), Cost: 1, Hold: true},
		{Name: "bytes", Key: "alex", Limit: limiter.FixedWindow(1000, time.Minute), Hold: true},
	}
	download := func(bytes int64) {
		var held limiter.Held
		decisions, err := store.Take(context.Background(), limiter.Request{Buckets: buckets, Held: &held}, nil)
		if err != nil || limiter.Denied(decisions) {
			fmt.Println("denied", err)
			return
		}
		// ... send the file
		held.Settle(0, 0)
		held.Settle(1, bytes)
		fmt.Println("sent", bytes, "bytes")
	}
	for range 3 {
		download(700)
	}
	// Output:
	// sent 700 bytes
	// sent 700 bytes
	// denied <nil>
}

// A Keeper looks at a bucket without charging it, empties it, and bans its key.
func ExampleKeeper() {
	var store limiter.Keeper = limiter.NewMemoryWithClock(func() time.Duration { return 0 })
	ctx := context.Background()
	login := limiter.Bucket{Name: "login", Key: "alex", Limit: limiter.PerMinute(5), Cost: 1}
	// A key that the bucket above denies twice is banned: for a minute, and then for an hour.
	ban := limiter.Bucket{Name: "ban", Key: "alex", Limit: limiter.BanAfter(2, time.Minute, time.Hour), Cost: 1, Watches: 1}
	take := func() {
		buckets := []limiter.Bucket{login, ban}
		decisions, err := store.Take(ctx, limiter.Request{Buckets: buckets}, nil)
		if err != nil {
			fmt.Println(err)
			return
		}
		sum := limiter.Summarize(buckets, decisions)
		fmt.Println("denied", sum.Denied, "retry in", sum.RetryAfter)
	}
	take()
	level, err := store.Peek(ctx, login)
	fmt.Println(level.Units, "used, room for", level.Remaining, err)

	fmt.Println(store.Ban(ctx, ban, time.Hour))
	take()

	for _, b := range []limiter.Bucket{ban, login} {
		if _, err := store.Reset(ctx, b); err != nil {
			fmt.Println(err)
		}
	}
	take()
	// Output:
	// denied false retry in 0s
	// 1 used, room for 4 <nil>
	// <nil>
	// denied true retry in 1h0m0s
	// denied false retry in 0s
}

// TestInBubble guards what docs/library.md says of tests with package synctest: a Memory and Wait
// take the bubble's clock, and a Redis leaves no goroutine behind, which would make Test panic.
func TestInBubble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mail := limiter.Limiter{Store: limiter.NewMemory(), Limit: limiter.Every(time.Hour)}
		start := time.Now()
		for range 3 {
			if err := mail.Wait(t.Context(), "alex"); err != nil {
				t.Fatal(err)
			}
		}
		if waited := time.Since(start); waited != 2*time.Hour {
			t.Errorf("three mails took %v", waited)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		store, err := limiter.NewRedis(limiter.RedisOptions{Addresses: []string{"127.0.0.1:1"}, Fallback: limiter.NewMemory()})
		if err != nil {
			t.Fatal(err)
		}
		api := limiter.Limiter{Store: store, Limit: limiter.PerMinute(1)}
		for _, denied := range []bool{false, true} {
			if d, err := api.Allow(t.Context(), "alex"); err != nil || d.Denied != denied {
				t.Errorf("got %v, %v, want %t", d.Denied, err, denied)
			}
		}
		if err := store.Close(); err != nil {
			t.Error(err)
		}
	})
}
