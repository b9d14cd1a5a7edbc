package limiter

// A limit with CountDenied counts denied requests too, so a client that keeps asking
// stays locked out, and one that waits for as long as its RetryAfter is admitted.
//
// A bucket without room counts a denied request in the way of its algorithm: a leaky
// bucket is full then, as of that moment, so its drips start over; a fixed window is
// full until it ends; a sliding window counts the units in its present window, as far
// as it can count; a log adds them in place of its oldest; and a limit that warms up
// is not free within the time of one unit at its full rate, but no warmer. A bucket
// that had room, but was not charged because another one denied the request, is
// charged as if it had been admitted.

// counting reports whether any of the buckets counts denied requests.
func (req Request) counting() bool {
	for i := range req.Buckets {
		if req.Buckets[i].Limit.CountDenied {
			return true
		}
	}
	return false
}
