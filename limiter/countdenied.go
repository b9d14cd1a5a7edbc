package limiter

// A limit with CountDenied counts denied requests too, so a client that keeps asking
// stays locked out, and one that waits for as long as it is told is admitted.
//
// A bucket without room counts a denied request in the way of its algorithm: a leaky
// bucket is full then, as of that moment, so its drips begin anew; a fixed window is
// full until it ends; a sliding window counts the units in its present window, as far
// as it can count; a log adds them in place of its oldest; and a limit that warms up
// is not free within the time of one unit at its full rate, but no warmer. A bucket
// that had room, but was not charged because another one denied the request, is
// charged as if it had been admitted.

// count returns the level s with a denied request of the given cost, which it had no
// room for beside the given units that are held or in flight. unix is what the clock
// shows at now, in µs since the Unix epoch.
func (l *Limit) count(s state, now, unix, cost, beside int64) state {
	switch l.Algorithm {
	case Sliding, Log:
		return slidingAdd(l.slidingStarted(s, now, unix), cost)
	case WarmUp:
		return l.warmCount(warmStarted(s, now), now)
	case Leaky:
	}
	units := l.Size - beside
	if units < 1 {
		return s
	}
	full := l.leakyAdd(l.started(state{clear: now}, now, unix), units)
	if l.DripSize == MaxUnits && s.clear > now {
		full.clear = s.clear // the window ends when it would
	}
	if s.clear <= now {
		return full
	}
	return l.higher(s, full, 0, false) // a request with a larger size may have filled it further
}

// counting reports whether any of the buckets counts denied requests.
func (req Request) counting() bool {
	for i := range req.Buckets {
		if req.Buckets[i].Limit.CountDenied {
			return true
		}
	}
	return false
}
