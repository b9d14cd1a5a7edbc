package limiter

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"strconv"
	"strings"
)

// keys names the buckets in a server.
type keys struct {
	prefix string
	secret []byte
}

// of returns the name under which b is kept: the prefix, in braces a digest of
// whose bucket it is, what it limits, and how it drips, in base 36. Levels of
// other drips must not mix; those of other sizes do, see Bucket. The braces put all
// buckets of one key value into one slot of a cluster.
func (k keys) of(b *Bucket) string { return string(b.appendRest(k.appendSlot(nil, b))) }

// appendSlot appends to name what the names of all buckets of b's key begin with.
// Those that keys share have the other half of the digest, so that no key has the
// same.
func (k keys) appendSlot(name []byte, b *Bucket) []byte {
	var digest [sha256.Size]byte
	if len(k.secret) == 0 {
		digest = sha256.Sum256([]byte(b.Key))
	} else {
		mac := hmac.New(sha256.New, k.secret)
		mac.Write([]byte(b.Key))
		mac.Sum(digest[:0])
	}
	if b.shared {
		return k.appendDigest(name, keyDigest(digest[16:]))
	}
	return k.appendDigest(name, keyDigest(digest[:16]))
}

// appendDigest appends to name what it begins with.
func (k keys) appendDigest(name []byte, digest keyDigest) []byte {
	name = append(name, k.prefix...)
	name = append(name, '{')
	name = base64.RawURLEncoding.AppendEncode(name, digest[:])
	return append(name, '}')
}

// digestOf returns the digest in the name of a bucket.
func digestOf(name string) (digest keyDigest) {
	from := strings.IndexByte(name, '{') + 1
	var text [22]byte
	copy(text[:], name[from:])
	_, _ = base64.RawURLEncoding.Decode(digest[:], text[:]) // names are made here
	return digest
}

// appendRest appends to name what tells b from other buckets of its key.
func (b *Bucket) appendRest(name []byte) []byte {
	name = append(name, ':')
	name = append(name, b.Name...)
	name = append(name, ':')
	name = strconv.AppendInt(name, b.Limit.rate(), 36)
	name = append(name, '.')
	return strconv.AppendInt(name, b.Limit.DripSize, 36)
}
