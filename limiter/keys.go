package limiter

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"hash"
	"strconv"
	"strings"
	"sync"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
)

// keys makes the names of the Redis keys in which buckets are stored.
type keys struct {
	prefix string
	macs   *sync.Pool // of hash.Hash, keyed by the secret; nil if there is none
}

// newKeys returns the keys with a prefix and a secret, which may be empty.
func newKeys(prefix, secret string) keys {
	k := keys{prefix: prefix}
	if secret != "" {
		k.macs = &sync.Pool{New: func() any { return hmac.New(sha256.New, []byte(secret)) }}
	}
	return k
}

// format is how the name of each key ends, to distinguish what is stored there from what another
// version stores in another format: of two versions that share a key, each would take the
// values of the other for foreign, and overwrite them, which switches the limit off. The first
// format has no mark. Let the next one have "~2": no other part of a name has a tilde there.
const format = ""

// of returns the name of b's Redis key: the prefix, a digest of b.Key in braces,
// b's Name, and its drips in base 36. Levels with different drips must not mix;
// levels with different sizes may, see Bucket. The braces put all buckets of one
// key into one cluster slot.
func (k keys) of(b *Bucket) string { return string(b.appendRest(k.appendSlot(nil, b))) }

// appendSlot appends the part of the name that all buckets of b.Key have in
// common. Shared buckets use the other half of the digest, so they never collide
// with those of a key.
func (k keys) appendSlot(name []byte, b *Bucket) []byte {
	var digest [sha256.Size]byte
	start := len(name)
	name = append(name, b.Key...) // as bytes, in memory that there is
	if k.macs == nil {
		digest = sha256.Sum256(name[start:])
	} else {
		mac := k.macs.Get().(hash.Hash)
		mac.Reset()
		mac.Write(name[start:])
		name = mac.Sum(name[:start])
		copy(digest[:], name[start:])
		k.macs.Put(mac)
	}
	name = name[:start]
	if b.shared {
		return k.appendDigest(name, keyDigest(digest[16:]))
	}
	return k.appendDigest(name, keyDigest(digest[:16]))
}

// appendDigest appends the prefix and the digest to name.
func (k keys) appendDigest(name []byte, digest keyDigest) []byte {
	name = append(name, k.prefix...)
	name = append(name, '{')
	name = base64.RawURLEncoding.AppendEncode(name, digest[:])
	return append(name, '}')
}

// digestOf returns the digest in the name of a Redis key.
func digestOf(name string) (digest keyDigest) {
	from := strings.IndexByte(name, '{') + 1
	var text [22]byte
	copy(text[:], name[from:])
	_, _ = base64.RawURLEncoding.Decode(digest[:], text[:]) // names are made here
	return digest
}

// appendRest appends the part of the name that distinguishes b from other buckets of its
// key.
func (b *Bucket) appendRest(name []byte) []byte {
	name = append(name, ':')
	name = append(name, b.Name...)
	name = append(name, ':')
	name = strconv.AppendInt(name, b.Limit.of().Rate(), 36)
	name = append(name, '.')
	name = strconv.AppendInt(name, b.Limit.DripSize, 36)
	if b.Limit.Aligned {
		name = append(name, '.')
		name = strconv.AppendInt(name, b.Limit.Phase.Microseconds(), 36)
	}
	if cold := b.Limit.ColdFactor; cold != 0 {
		name = append(name, '.')
		name = strconv.AppendInt(name, int64(cold), 36)
	}
	if letter := bucket.Algorithms[b.Limit.Algorithm].Letter; letter != 0 {
		name = append(name, '.', letter)
	}
	return append(name, format...)
}
