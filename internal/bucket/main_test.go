package bucket

import (
	"testing"

	"pgregory.net/rapid"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testseed"
)

// check checks a property on n hundred traces, which is n times rapid's default number.
func check(t *testing.T, n int, property func(*rapid.T)) {
	t.Helper()
	for i := range n {
		testseed.Check(t, i, property)
	}
}
