package limiter

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"
)

// manyBuckets returns a request with n buckets and the given number of keys.
func manyBuckets(n, keys int) Request {
	req := Request{}
	for i := range n {
		req.Buckets = append(req.Buckets, Bucket{
			Name: fmt.Sprint("limit", i/keys), Key: fmt.Sprint("key", i%keys), Limit: Limit{Size: 1 << 40, DripInterval: time.Microsecond, DripSize: 1}, Cost: 1,
		})
	}
	return req
}

// TestManyBucketsNamedTwice guards that two buckets with the same name and key are
// found in requests with any number of buckets, wherever the two are, and that
// buckets with only the same name or only the same key are not mistaken for them.
func TestManyBucketsNamedTwice(t *testing.T) {
	for _, n := range []int{2, 3, pairwise, pairwise + 1, 16, 63, 64, 65, 66, 300} {
		for _, keys := range []int{1, 2, n} {
			req := manyBuckets(n, keys)
			if err := req.prepare(); err != nil {
				t.Errorf("%d buckets of %d keys: error %v", n, keys, err)
			}
		}
		for _, pair := range [][2]int{{0, 1}, {0, n - 1}, {n - 2, n - 1}} {
			req := manyBuckets(n, 1)
			req.Buckets[pair[1]].Name = req.Buckets[pair[0]].Name
			if err := req.prepare(); pair[0] != pair[1] && !errors.Is(err, errTwice) {
				t.Errorf("%d buckets, %d is %d: error %v", n, pair[1], pair[0], err)
			}
		}
		req := manyBuckets(n, n)
		req.Buckets[n-1].Cost = -1
		if req.prepare() == nil {
			t.Errorf("%d buckets: the last may cost less than nothing", n)
		}
	}
}

// TestManyKeys guards that requests with any number of buckets are split by key:
// each part has the buckets of one key, in order, and their indexes.
func TestManyKeys(t *testing.T) {
	for _, n := range []int{1, 2, 17, 300} {
		for _, keys := range []int{1, 2, 7, n} {
			keys = min(keys, n)
			req := manyBuckets(n, keys)
			req.Accounting = AccountingEach
			parts := req.byKey()
			if len(parts) != keys {
				t.Fatalf("%d buckets of %d keys: %d parts", n, keys, len(parts))
			}
			for i, p := range parts {
				if len(p.Buckets) != (n-i+keys-1)/keys || p.Accounting != AccountingEach {
					t.Errorf("%d buckets of %d keys: part %d has %d", n, keys, i, len(p.Buckets))
				}
				for j, b := range p.Buckets {
					if at := p.indexes[j]; at != i+j*keys || req.Buckets[at] != b {
						t.Errorf("%d buckets of %d keys: part %d has %+v as %d", n, keys, i, b, at)
					}
				}
			}
		}
	}
}

// TestTimedManyBucketsTakeLinearTime guards that ten times as many buckets do not take
// a hundred times as long.
func TestTimedManyBucketsTakeLinearTime(t *testing.T) {
	m := NewMemory()
	for name, do := range map[string]func(Request) int{
		"prepare": func(req Request) int { _ = req.prepare(); return 0 },
		"parts":   func(req Request) int { return len(req.byKey()) },
		"memory": func(req Request) int {
			d, _ := m.Take(context.Background(), req, nil)
			return len(d)
		},
	} {
		fastest := func(n, rounds int, enough time.Duration) time.Duration {
			req, best := manyBuckets(n, n), time.Hour
			for ; rounds > 0 && best > enough; rounds-- {
				began := time.Now()
				do(req)
				best = min(best, time.Since(began))
			}
			return best
		}
		few := fastest(400, 20, 0)
		// On a busy machine it takes a while until one of them is not interrupted.
		if many := fastest(4000, 400, 40*few); many > 40*few {
			t.Errorf("%s: %v for 400 buckets, %v for 4000", name, few, many)
		}
	}
}

func BenchmarkManyBuckets(b *testing.B) {
	for _, n := range []int{1, 3, 16, 100, 1000} {
		req := manyBuckets(n, n)
		b.Run(fmt.Sprint("prepare/", n), func(b *testing.B) {
			for b.Loop() {
				_ = req.prepare()
			}
		})
		b.Run(fmt.Sprint("parts/", n), func(b *testing.B) {
			for b.Loop() {
				_ = req.byKey()
			}
		})
		b.Run(fmt.Sprint("memory/", n), func(b *testing.B) {
			m := NewMemory()
			for b.Loop() {
				_, _ = m.Take(context.Background(), req, nil)
			}
		})
	}
}

// TestTooManyBuckets tests that a request has no more buckets than the script
// can be given.
func TestTooManyBuckets(t *testing.T) {
	req := Request{Buckets: make([]Bucket, maxBuckets+1)}
	if err := req.prepare(); err == nil {
		t.Error("no error for one bucket too many")
	}
}
