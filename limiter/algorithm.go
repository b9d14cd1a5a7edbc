package limiter

import "fmt"

// Algorithm says how a [Limit] counts units.
type Algorithm uint8

const (
	Leaky   Algorithm = iota // a leaky bucket, see Limit; also fixed windows
	Sliding                  // two counters, see SlidingWindow
	Log                      // the time of each admission, see SlidingLog
	WarmUp                   // rates that grow after idleness, see WarmingUp
)

// String returns the algorithm's name.
func (a Algorithm) String() string {
	switch a {
	case Leaky:
		return "leaky"
	case Sliding:
		return "sliding"
	case Log:
		return "log"
	case WarmUp:
		return "warm-up"
	}
	return fmt.Sprintf("Algorithm(%d)", uint8(a))
}

// counts reports whether the state of a's buckets is two counts, see sliding.go.
func (a Algorithm) counts() bool { return a == Sliding || a == Log }
