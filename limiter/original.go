package limiter

import "github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"

// removal is an evicted bucket and its level.
type removal struct {
	partition *partition
	hash      uint64
	digest    keyDigest
	bucket.Level
}
