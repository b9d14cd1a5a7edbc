package outcome

import (
	"testing"
	"unsafe"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/costtest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// TestFieldsMakeNoGarbage guards that the fields of an allowed request are written without garbage,
// except text that an outcome has no room for.
func TestFieldsMakeNoGarbage(t *testing.T) {
	items := []Entry{{
		Policy: policyOf("default"), Limit: limitOf(1_000_000_000), Families: XRateLimit | IETF,
		Decision: limiter.Decision{Size: 1_000_000_000, Remaining: 999_999_999},
	}}
	sum, _ := summarize(items, 0)
	var f fields
	text := make([]byte, 0, 256)
	if n := testing.AllocsPerRun(100, func() { f.render(items, sum, 0, text) }); n > 0 {
		t.Errorf("%v allocations, want none", n)
	}
}

// TestSizes guards the sizes of what is kept for each request. An outcome has room for
// one limit, and is all that the handler allocates for most requests.
func TestSizes(t *testing.T) {
	costtest.Sizes(t, []costtest.Size{
		{Of: "Outcome", Size: unsafe.Sizeof(Outcome{}), Ceiling: 384, Why: "one is allocated for each request"},
		{Of: "Entry", Size: unsafe.Sizeof(Entry{}), Ceiling: 136, Why: "one is kept for each bucket of a request"},
		{Of: "fields", Size: unsafe.Sizeof(fields{}), Ceiling: 120, Why: "it is part of an outcome"},
	})
}
