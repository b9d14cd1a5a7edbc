package limiter

import "testing"

// Guards that keys are hashed by SipHash-1-3, whatever is left of them after the words of eight
// bytes. The values are those of other implementations, for the text of so many bytes from 0 on
// and the key of bytes from 0 on, or of zeros.
func TestSipHash(t *testing.T) {
	t.Parallel()
	text := make([]byte, 64)
	for i := range text {
		text[i] = byte(i)
	}
	keys := [2]sipKey{{}, sipKeyOf(text)}
	for _, tc := range []struct {
		key, length int
		want        uint64
	}{
		{1, 0, 0xabac0158050fc4dc},
		{1, 1, 0xc9f49bf37d57ca93},
		{1, 2, 0x82cb9b024dc7d44d},
		{1, 3, 0x8bf80ab8e7ddf7fb},
		{1, 4, 0xcf75576088d38328},
		{1, 5, 0xdef9d52f49533b67},
		{1, 6, 0xc50d2b50c59f22a7},
		{1, 7, 0xd3927d989bb11140},
		{1, 8, 0x369095118d299a8e},
		{1, 9, 0x25a48eb36c063de4},
		{1, 15, 0xd320d86d2a519956},
		{1, 16, 0xcc4fdd1a7d908b66},
		{1, 17, 0x9cf2689063dbd80c},
		{1, 63, 0x9d199062b7bbb3a8},
		{0, 1, 0x68a914128e01e473},
		{0, 2, 0x010bac45c41e3669},
		{0, 3, 0x4d4c9a4a8ef6e0ad},
		{0, 8, 0xead411e67ebe2eea},
		{0, 31, 0x169739443111d49b},
	} {
		if got := keys[tc.key].sum(string(text[:tc.length])); got != tc.want {
			t.Errorf("key %d, %d bytes: got %016x, want %016x", tc.key, tc.length, got, tc.want)
		}
	}
}
