package option

import (
	"encoding/json"
	"net/http"
	"slices"
	"testing"
)

// TestResponses guards which responses count, and how that is written in JSON and in a Caddyfile.
func TestResponses(t *testing.T) {
	t.Parallel()
	failed := http.Header{"X-Failed": {"yes"}}
	for _, tc := range []struct {
		config, want string
		counts       []int // of the statuses 200, 304, 401 and 404, with a field X-Failed
		without      []int // without it
	}{
		{`{}`, "", []int{200, 304, 401, 404}, []int{200, 304, 401, 404}},
		{`{"status_code":[401,2]}`, "status 401 2xx", []int{200, 401}, []int{200, 401}},
		{`{"not_status_code":[304]}`, "not status 304", []int{200, 401, 404}, []int{200, 401, 404}},
		{`{"not_status_code":[4]}`, "not status 4xx", []int{200, 304}, []int{200, 304}},
		{`{"status_code":[4],"not_status_code":[404]}`, "status 4xx not status 404", []int{401}, []int{401}},
		{`{"headers":{"X-Failed":["*"]},"not_status_code":[404]}`, "not status 404 header X-Failed *", []int{200, 304, 401}, nil},
		{`{"headers":{"X-Failed":null}}`, "header !X-Failed", nil, []int{200, 304, 401, 404}},
	} {
		r := new(Responses)
		if err := json.Unmarshal([]byte(tc.config), r); err != nil {
			t.Fatal(err)
		}
		if got := r.String(); got != tc.want {
			t.Errorf("%s: got %q, want %q", tc.config, got, tc.want)
		}
		if text, err := json.Marshal(r); err != nil || string(text) != tc.config {
			t.Errorf("%s is stored as %s (%v)", tc.config, text, err)
		}
		for _, header := range []http.Header{failed, {}} {
			want := tc.counts
			if len(header) == 0 {
				want = tc.without
			}
			var got []int
			for _, status := range []int{200, 304, 401, 404} {
				if r.Match(status, header) {
					got = append(got, status)
				}
			}
			if !slices.Equal(got, want) {
				t.Errorf("%s with %v counts %v, want %v", tc.config, header, got, want)
			}
		}
	}
	if empty := new(Responses); !empty.IsEmpty() || (*Responses)(nil).String() != "" {
		t.Error("nothing says which count, want that told")
	}
}
