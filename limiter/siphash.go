package limiter

import (
	"crypto/rand"
	"encoding/binary"
	"math/bits"
)

// sipKey is a secret key of SipHash-1-3, a hash that can't be aimed without the key. Unlike a
// maphash.Seed it can be saved.
type sipKey [2]uint64

// newSipKey returns a random key.
func newSipKey() sipKey {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	return sipKeyOf(b[:])
}

// sipKeyOf returns the key that 16 bytes are.
func sipKeyOf(b []byte) sipKey {
	return sipKey{binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint64(b[8:])}
}

// sum returns the hash of s.
func (k *sipKey) sum(s string) uint64 {
	v0, v1, v2, v3 := k[0]^0x736f6d6570736575, k[1]^0x646f72616e646f6d, k[0]^0x6c7967656e657261, k[1]^0x7465646279746573
	last := uint64(len(s)) << 56
	for ; len(s) >= 8; s = s[8:] {
		word := uint64(word32(s)) | uint64(word32(s[4:]))<<32
		v3 ^= word
		v0, v1, v2, v3 = sipRound(v0, v1, v2, v3)
		v0 ^= word
	}
	switch n := len(s); { // what is left, some bytes of it twice rather than one after the other
	case n >= 4:
		last |= uint64(word32(s)) | uint64(word32(s[n-4:]))<<(8*(n-4))
	case n > 0:
		last |= uint64(s[0]) | uint64(s[n/2])<<(8*(n/2)) | uint64(s[n-1])<<(8*(n-1))
	}
	v3 ^= last
	v0, v1, v2, v3 = sipRound(v0, v1, v2, v3)
	v0 ^= last
	v2 ^= 0xff
	v0, v1, v2, v3 = sipRound(v0, v1, v2, v3)
	v0, v1, v2, v3 = sipRound(v0, v1, v2, v3)
	v0, v1, v2, v3 = sipRound(v0, v1, v2, v3)
	return v0 ^ v1 ^ v2 ^ v3
}

// word32 returns the first four bytes of s. The compiler makes one instruction of it.
func word32(s string) uint32 {
	return uint32(s[0]) | uint32(s[1])<<8 | uint32(s[2])<<16 | uint32(s[3])<<24
}

// sipRound mixes the state once.
func sipRound(v0, v1, v2, v3 uint64) (_, _, _, _ uint64) {
	v0 += v1
	v2 += v3
	v1 = bits.RotateLeft64(v1, 13) ^ v0
	v3 = bits.RotateLeft64(v3, 16) ^ v2
	v0 = bits.RotateLeft64(v0, 32) + v3
	v2 += v1
	v3 = bits.RotateLeft64(v3, 21) ^ v0
	v1 = bits.RotateLeft64(v1, 17) ^ v2
	return v0, v1, bits.RotateLeft64(v2, 32), v3
}

// mix returns a hash of h and v that depends on their order.
func mix(h, v uint64) uint64 {
	hi, lo := bits.Mul64(h^0x9e3779b97f4a7c15, v^0xd1b54a32d192ed03)
	return hi ^ lo
}
