package limiter

import "fmt"

// Algorithm says how a [Limit] counts units.
type Algorithm uint8

const (
	Leaky   Algorithm = iota // a leaky bucket, see Limit; also fixed windows
	Sliding                  // two counters, see SlidingWindow
)

// String returns the algorithm's name.
func (a Algorithm) String() string {
	switch a {
	case Leaky:
		return "leaky"
	case Sliding:
		return "sliding"
	}
	return fmt.Sprintf("Algorithm(%d)", uint8(a))
}
