package compile_test

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/configtest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// TestChargeInOrder guards what a denied request is charged if the store fails, or if
// a bucket before the one that denies is full by then.
func TestChargeInOrder(t *testing.T) {
	t.Parallel()
	denied, admitted := limiter.Decision{Denied: true}, limiter.Decision{}
	for _, tc := range []struct {
		name  string
		first []limiter.Decision
		takes [][]limiter.Decision // what the store says then; nil is an error
		asked []int                // about how many buckets
		want  []string
	}{
		{"the first denies", []limiter.Decision{denied, denied}, nil, nil, []string{"0 denied"}},
		{"the last denies", []limiter.Decision{admitted, admitted, denied}, [][]limiter.Decision{{admitted, admitted}},
			[]int{2}, []string{"0", "1", "2 denied"}},
		{"one is full by then", []limiter.Decision{admitted, admitted, denied}, [][]limiter.Decision{{admitted, denied}, {admitted}},
			[]int{2, 1}, []string{"0", "1 denied"}},
		{"the first is full by then", []limiter.Decision{admitted, admitted, denied}, [][]limiter.Decision{{denied, denied}},
			[]int{2}, []string{"0 denied"}},
		{"the store fails", []limiter.Decision{admitted, denied, denied}, [][]limiter.Decision{nil}, []int{1}, []string{"1 denied"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var limits []*rule.Limit
			for i := range tc.first {
				l, _ := configtest.ReadyLimit(t, &config.Limit{Name: strconv.Itoa(i), Size: "1"})
				limits = append(limits, l)
			}
			q, err := rule.Evaluate(sitetest.NewRequest().Request, limits, time.Time{})
			if err != nil {
				t.Fatal(err)
			}
			defer q.Release()
			store := &scriptedStore{answers: append([][]limiter.Decision{tc.first}, tc.takes...)}
			if err := q.Decide(store, rule.How{Accounting: rule.InOrder}); err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, e := range q.Entries() {
				if !e.Decided {
					continue
				}
				text := e.Path
				if e.Decision.Denied {
					text += " denied"
				}
				got = append(got, text)
			}
			if asked := store.asked[1:]; !slices.Equal(got, tc.want) || !slices.Equal(asked, tc.asked) {
				t.Errorf("got %q after asking about %v, want %q and %v", got, asked, tc.want, tc.asked)
			}
		})
	}
}

// scriptedStore answers with the decisions it is given, call by call; nil is an error.
type scriptedStore struct {
	answers [][]limiter.Decision
	asked   []int // about how many buckets
}

// Take implements limiter.Store.
func (s *scriptedStore) Take(_ context.Context, req limiter.Request, dst []limiter.Decision) ([]limiter.Decision, error) {
	answer := s.answers[len(s.asked)]
	s.asked = append(s.asked, len(req.Buckets))
	if answer == nil {
		return dst, errors.New("unavailable")
	}
	return append(dst, answer...), nil
}
