package rule

import (
	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
)

// Algorithm is how a limit counts units, by the name that configs have for it.
type Algorithm string

// The algorithms.
const (
	LeakyBucket   Algorithm = "leaky_bucket"
	TokenBucket   Algorithm = "token_bucket" // the mirror image of the former: its tokens are the room that is left
	FixedWindow   Algorithm = "fixed_window"
	SlidingWindow Algorithm = "sliding_window"
	SlidingLog    Algorithm = "sliding_log"
	WarmUp        Algorithm = "warm_up"

	Concurrency Algorithm = "concurrency" // which is an option instead
)

// algorithms has what stores count by.
var algorithms = map[Algorithm]bucket.Algorithm{
	LeakyBucket:   bucket.Leaky,
	TokenBucket:   bucket.Leaky,
	FixedWindow:   bucket.Fixed,
	SlidingWindow: bucket.Sliding,
	SlidingLog:    bucket.Log,
	WarmUp:        bucket.WarmUp,
}

// ParseAlgorithm parses the option algorithm.
var ParseAlgorithm = option.OneOf(LeakyBucket, TokenBucket, FixedWindow, SlidingWindow, SlidingLog, WarmUp)

// InStore returns what stores count by.
func (a Algorithm) InStore() bucket.Algorithm { return algorithms[a] }

// HasWindow reports whether a counts in windows.
func (a Algorithm) HasWindow() bool { return algorithms[a].DripSize() > 0 }

// Slides reports whether a counts in the window that ends with the request.
func (a Algorithm) Slides() bool { return a.HasWindow() && a != FixedWindow }

// HasSize reports whether a admits more if its size is larger.
func (a Algorithm) HasSize() bool { return a != WarmUp }
