package limiter

import "github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"

// A Memory can be the fallback of other stores. This is all that it knows of them: no file
// of the Memory names anything of theirs.

// original is a store whose fallback a Memory is.
type original struct {
	location string        // identifies where its servers keep the buckets
	evicted  func(removal) // is called when the Memory has evicted a bucket that the servers know
}

// inFlight is what all originals of a Memory have in flight. No table may be locked when it is
// called.
type inFlight interface {
	// appendUnits appends how many units of each of the buckets requests hold in servers,
	// or may be charged there.
	appendUnits(locations []location, buckets []Bucket, dst []int64) []int64
}

// removal is a bucket that a Memory has evicted, and its level.
type removal struct {
	partition *partition
	hash      uint64
	digest    keyDigest
	bucket.Level
}
