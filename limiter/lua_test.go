package limiter

import (
	"fmt"
	"strings"
	"testing"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// TestLuaAlgorithmsStandAlone guards that the functions which each call of the script
// makes again use nothing of what is around them: with upvalues they cost up to a sixth
// of a call. By itself, a function that uses any fails: it is a global then, which
// servers refuse.
func TestLuaAlgorithmsStandAlone(t *testing.T) {
	client := redistest.Start(t).Client()
	for _, tc := range []struct {
		name    string
		numbers string // size, rate, drip and phase
	}{
		{"leaky", "10, 1000, 3, -1"},
		{"leaky", "10, 1000, 3, 7"},
		{"window", "10, 1000, 0, -1"},
		{"window", "10, 1000, 0, 7"},
		{"sliding", fmt.Sprintf("10, 1000, %d, 7", int64(bucket.SlidingDrip))},
		{"sliding", fmt.Sprintf("10, %d, %d, 7", int64(1)<<40, int64(bucket.SlidingDrip))},
		{"warm", "10, 1000, 5001, 3"},
		{"bans", "2, 1000, 3000, 2000"},
	} {
		source := compose(tc.name + ".lua")
		asked := 0
		for _, what := range []string{"room", "add", "count", "near", "join", "beside"} {
			for _, level := range []string{"5000, 0", "6000, 2", "7500, 16777218"} {
				for _, other := range []string{"4000, 0, false, 1", "7001, 1, false, 3", "9000, 0, false, 16777219"} {
					call := fmt.Sprintf("%s('%s', %s, 1, 5000, %s, %s)", tc.name, what, level, tc.numbers, other)
					if err := client.Eval(t.Context(), source+"\nlocal a = "+call+"\nreturn tostring(a)", nil).Err(); err != nil {
						t.Errorf("%s: %v", call, err)
					}
					asked++
				}
			}
		}
		if asked == 0 || !strings.Contains(source, "local function "+tc.name+"(") {
			t.Errorf("%s.lua has no function of that name", tc.name)
		}
	}
}
