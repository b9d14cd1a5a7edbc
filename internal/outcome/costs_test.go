package outcome

import (
	"testing"
	"unsafe"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/costtest"
)

// TestSizes guards the sizes of what is kept for each request. An outcome has room for
// one limit, and is all that the handler allocates for most requests.
func TestSizes(t *testing.T) {
	costtest.Sizes(t, []costtest.Size{
		{Of: "Outcome", Size: unsafe.Sizeof(Outcome{}), Ceiling: 384, Why: "one is allocated for each request"},
		{Of: "Entry", Size: unsafe.Sizeof(Entry{}), Ceiling: 136, Why: "one is kept for each bucket of a request"},
		{Of: "fields", Size: unsafe.Sizeof(fields{}), Ceiling: 120, Why: "it is part of an outcome"},
	})
}
