package limiter

import (
	"cmp"
	"context"
	"sync"
)

// In a cluster the buckets of a request may lie in several slots. Then it is
// decided in parts, one for each key, or one for each bucket while a slot moves.

// part is some of a request's buckets that are decided together.
type part struct {
	Request
	indexes []int // where its buckets stand in the whole request
}

// severalKeys reports whether the buckets are of more than one key.
func (req Request) severalKeys() bool {
	for i := range req.Buckets {
		if req.Buckets[i].Key != req.Buckets[0].Key {
			return true
		}
	}
	return false
}

// byKey parts the request into one for each key.
func (req Request) byKey() []part {
	var parts []part
next:
	for i, b := range req.Buckets {
		for j := range parts {
			if parts[j].Buckets[0].Key == b.Key {
				parts[j].add(b, i)
				continue next
			}
		}
		parts = append(parts, req.part(b, i))
	}
	return parts
}

// byBucket parts the request into one for each bucket.
func (req Request) byBucket() []part {
	parts := make([]part, len(req.Buckets))
	for i, b := range req.Buckets {
		parts[i] = req.part(b, i)
	}
	return parts
}

// part returns a part of the request that has one bucket.
func (req Request) part(b Bucket, index int) part {
	p := part{Request: req}
	p.Buckets = nil
	p.add(b, index)
	return p
}

// add adds a bucket to the part.
func (p *part) add(b Bucket, index int) {
	p.Buckets = append(p.Buckets, b)
	p.indexes = append(p.indexes, index)
}

// decideApart decides the parts of req side by side. If then the request is
// denied, or undecided, what some of them charged is given back.
func (r *Redis) decideApart(ctx context.Context, req Request, parts []part) ([]outcome, error) {
	outcomes := make([]outcome, len(req.Buckets))
	errs := make([]error, len(parts))
	var wg sync.WaitGroup
	for i, p := range parts {
		wg.Go(func() {
			decided, err := r.decide(ctx, p.Request, false, nil)
			for j, o := range decided {
				outcomes[p.indexes[j]] = o
			}
			errs[i] = err
		})
	}
	wg.Wait()

	err := cmp.Or(errs...)
	denied := false
	for i := range outcomes {
		denied = denied || outcomes[i].denied
	}
	if err == nil && (!denied || req.Accounting == Each) {
		return outcomes, nil
	}
	var charged []int
	for i, p := range parts {
		if errs[i] == nil && !anyDenied(outcomes, p.indexes) {
			charged = append(charged, p.indexes...)
		}
	}
	r.giveBack(ctx, req, outcomes, charged)
	return outcomes, err
}

// anyDenied reports whether one of the outcomes at indexes is a denial.
func anyDenied(outcomes []outcome, indexes []int) bool {
	for _, i := range indexes {
		if outcomes[i].denied {
			return true
		}
	}
	return false
}

// giveBack takes what the buckets at the given indexes were charged out of them
// again. It waits for that until ctx ends; what is still under way then goes on
// for as long again. Units that can't be given back stay charged.
func (r *Redis) giveBack(ctx context.Context, req Request, outcomes []outcome, indexes []int) {
	var wg sync.WaitGroup
	for _, i := range indexes {
		b, o := &req.Buckets[i], &outcomes[i]
		o.state = b.Limit.remove(o.state, 0, b.Cost)
		if r.fallback != nil {
			r.fallback.giveBack(b, o.here)
		}
		if o.here {
			continue
		}
		args := r.keys.giveBackArguments(b)
		wg.Go(func() {
			_, _, _ = r.call(within(r.timeout), giveBackScript, args)
			r.denials.forget(b, r.clock().Microseconds())
		})
	}
	end, cancel := timed(ctx)
	defer cancel()
	done := make(chan struct{})
	go func() {
		wg.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-end.Done():
	}
}
