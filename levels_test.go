package ratelimit

import (
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/redistest"
)

// deletions are ways in which an operator deletes buckets.
var deletions = []struct {
	name string
	del  func(t *testing.T, client *redis.Client)
}{
	{"DEL", func(t *testing.T, client *redis.Client) {
		t.Helper()
		keys, err := client.Keys(t.Context(), "rl:*").Result()
		if err == nil {
			err = client.Del(t.Context(), keys...).Err()
		}
		if err != nil {
			t.Fatal(err)
		}
	}},
	{"FLUSHALL", func(t *testing.T, client *redis.Client) {
		t.Helper()
		if err := client.FlushAll(t.Context()).Err(); err != nil {
			t.Fatal(err)
		}
	}},
}

// TestDeletedKeysStayDeleted guards that a bucket which an operator deletes in
// Redis, and which is asked for after that, does not come back with the next
// outage, neither in this process nor in Redis.
func TestDeletedKeysStayDeleted(t *testing.T) {
	for _, limit := range []string{"size 10\ndrip_rate 1h", "size 10\ndrip_rate 1h\ndrip_size 3"} {
		for _, deletion := range deletions {
			t.Run(deletion.name+"/"+limit, func(t *testing.T) {
				server := redistest.Start(t)
				s := startConfig(t, config{
					global: redisGlobal(server.Addr, "timeout 1s"),
					site:   "rate_limit {\n" + limit + "\n}\nrespond admitted",
				})
				for s.get("/").Header.Get("X-RateLimit-Remaining") != "1" {
				}
				deletion.del(t, server.Client())
				if a := s.get("/"); a.Header.Get("X-RateLimit-Remaining") != "9" {
					t.Errorf("after the deletion: %s", a)
				}
				server.Pause(t)
				if a := s.get("/"); a.StatusCode != 200 || number(a.Header.Get("X-RateLimit-Remaining")) < 8 {
					t.Errorf("in the outage: %s", a)
				}
				server.Resume(t)
				// Redis may have been late to charge the request before too.
				if a := s.get("/"); a.StatusCode != 200 || number(a.Header.Get("X-RateLimit-Remaining")) < 6 {
					t.Errorf("after it: %s", a)
				}
			})
		}
	}
}
