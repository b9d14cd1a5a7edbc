package rule

import (
	"strings"
	"sync"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// A ban is a bucket of its own, which watches the buckets of its limit: a store counts their
// denials in it, in the same step, and while it is full they deny too. There is one only
// while a store is asked. Everything else sees a limit that denies for longer.

// banSuffix ends the names of the buckets that ban. A limit's name has no "@".
const banSuffix = "@ban"

// Bans is how a limit bans the keys that it denies.
type Bans struct {
	Limit  limiter.Limit // of the bucket that bans
	List   *BanList
	Events *telemetry.Process
}

// BanOf returns the bucket that bans the key of at, which is what was asked about b.
func (b *Bucket) BanOf(at *limiter.Bucket) limiter.Bucket {
	main := b.Limit.Buckets[0]
	name := main.Name
	if at.Name == b.AddressName {
		name = main.AddressName
	}
	return limiter.Bucket{Name: name + banSuffix, Key: at.Key, Limit: b.Limit.Bans.Limit, Cost: 1, MaxKeys: at.MaxKeys, DryRun: at.DryRun}
}

const (
	// maxBanList is the largest number of bans that a process lists for a limit.
	maxBanList = 1000

	// maxListedKey is the length of the longest key in a list, in bytes.
	maxListedKey = 1024

	// bansSampled is how many bans are compared if a list is full, to drop one.
	bansSampled = 16
)

// BanList lists the bans that this process has begun or met, at the limits whose buckets
// have one name. Stores only know digests of keys.
type BanList struct {
	mu   sync.Mutex
	bans map[BannedKey]listedBan
}

// listedBan is a ban in a list: when it ends, and when this process met it last.
type listedBan struct{ end, met time.Time }

// NewBanList returns an empty list.
func NewBanList() *BanList { return &BanList{bans: make(map[BannedKey]listedBan)} }

// BannedKey is a key that is banned, or the address of a client without one.
type BannedKey struct {
	Text    string
	Address bool
}

// Note notes that a key is banned, for how long from now on. If the list is full, the ban
// of a sample is dropped that ends first.
func (l *BanList) Note(k BannedKey, left time.Duration) {
	if len(k.Text) > maxListedKey {
		return
	}
	now := time.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, known := l.bans[k]; !known && len(l.bans) >= maxBanList {
		var first BannedKey
		var sooner time.Time
		sampled := 0
		for other, ban := range l.bans { // from a random one on
			if sooner.IsZero() || ban.end.Before(sooner) {
				first, sooner = other, ban.end
			}
			if sampled++; sampled == bansSampled {
				break
			}
		}
		delete(l.bans, first)
	}
	k.Text = strings.Clone(k.Text)
	l.bans[k] = listedBan{now.Add(left), now}
}

// Forget removes a key whose ban has ended, unless another one has been noted since.
func (l *BanList) Forget(k BannedKey, noted time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.bans[k].end.Equal(noted) {
		delete(l.bans, k)
	}
}

// Lift removes a key whose ban has been lifted.
func (l *BanList) Lift(k BannedKey) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.bans, k)
}

// of returns the ban of a key, or none.
func (l *BanList) of(k BannedKey) listedBan {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.bans[k]
}

// All returns the keys of the list, and when their bans end, as far as it knows.
func (l *BanList) All() map[BannedKey]time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	ends := make(map[BannedKey]time.Time, len(l.bans))
	for k, ban := range l.bans {
		ends[k] = ban.end
	}
	return ends
}
