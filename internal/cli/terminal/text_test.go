package terminal

import (
	"encoding/json"
	"testing"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/key/keytext"
)

// TestSafeJSON guards that JSON has texts that clients choose escaped, and means the same.
func TestSafeJSON(t *testing.T) {
	for _, text := range []string{"\x1b[2J", "\u202eabc", "\u009b", "\U000e0001", "ok"} {
		raw, err := json.Marshal(text)
		if err != nil {
			t.Fatal(err)
		}
		escaped := SafeJSON(string(raw))
		var again string
		if err := json.Unmarshal([]byte(escaped), &again); err != nil || again != text || keytext.Safe(escaped) != escaped {
			t.Errorf("SafeJSON(%s): got %s, which is %q, %v", raw, escaped, again, err)
		}
	}
}
