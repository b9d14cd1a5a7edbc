package command

import (
	"encoding/json"
	"testing"
)

// TestResetSaysWhose guards that the question before a reset is about the buckets that
// are emptied.
func TestResetSaysWhose(t *testing.T) {
	for _, tc := range []struct {
		args []string
		body string
		want string
	}{
		{[]string{"login"}, `{"limit":"login"}`, "all requests"},
		{[]string{"login", "203.0.113.7"}, `{"key":"203.0.113.7","limit":"login"}`, "key 203.0.113.7"},
		{[]string{"login", "a", "b\n"}, `{"key":["a","b\n"],"limit":"login"}`, `key a "b\n"`},
		{[]string{"login", "--client-ip", "203.0.113.7"}, `{"address":"203.0.113.7","limit":"login"}`, "client 203.0.113.7"},
		{[]string{"login", "--client-ip", ""}, `{"address":"","limit":"login"}`, "clients without an address"},
		{[]string{"--client-ip", "203.0.113.7", "--key", "a"}, `{"address":"203.0.113.7","key":"a"}`, "client 203.0.113.7 and key a"},
		{[]string{"--key", ""}, `{"key":""}`, `key ""`},
	} {
		cmd := resetCommand()
		if err := cmd.ParseFlags(tc.args); err != nil {
			t.Fatal(err)
		}
		query, err := bucketQuery(cmd, cmd.Flags().Args())
		if err != nil {
			t.Errorf("%q: %v", tc.args, err)
			continue
		}
		body, err := json.Marshal(query)
		if err != nil || string(body) != tc.body || query.Whose() != tc.want {
			t.Errorf("%q: got %s for %s, %v, want %s for %s", tc.args, body, query.Whose(), err, tc.body, tc.want)
		}
	}
}
