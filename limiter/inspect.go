package limiter

import (
	"context"
	"time"
)

// Level is what a bucket held when it was looked at.
type Level struct {
	// The units in the bucket. With several Sizes it may exceed one of them.
	Units int64

	// The units that requests which are still being decided have reserved.
	Held int64

	// The units that the bucket has room for, given the Limit's Size.
	Remaining int64

	// The time until the bucket runs empty if nothing more is added.
	Clear time.Duration

	// The time until the bucket has room for Cost units; zero if it has, or if it
	// never will, because Cost exceeds Size.
	RetryAfter time.Duration
}

// Peek returns the level of b's bucket. It changes nothing.
func (m *Memory) Peek(b Bucket) (Level, error) { panic("TODO") }

// Reset empties b's bucket and returns what it held.
func (m *Memory) Reset(b Bucket) (Level, error) { panic("TODO") }

// Peek returns the level of b's bucket in Redis. It changes nothing. The error
// wraps ErrUnavailable if the server does not answer in time.
func (r *Redis) Peek(ctx context.Context, b Bucket) (Level, error) { panic("TODO") }

// Reset empties b's bucket in Redis and in this process, which also forgets that
// it was full, and returns what it held in Redis. Other processes follow within a
// second. The error wraps ErrUnavailable if the server does not answer in time;
// then nothing was reset.
func (r *Redis) Reset(ctx context.Context, b Bucket) (Level, error) { panic("TODO") }

// PeekHere returns what this process knows of b's bucket: its level in the
// Fallback, zero if there is none, and whether this process remembers it as full.
func (r *Redis) PeekHere(b Bucket) (level Level, remembered bool, err error) { panic("TODO") }
