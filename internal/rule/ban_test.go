package rule

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// TestBanListIsBounded guards that a flood of bans makes the list no longer, whatever the
// keys, and mostly keeps those in it that end last.
func TestBanListIsBounded(t *testing.T) {
	t.Parallel()
	l := NewBanList()
	for i := range 3 * maxBanList {
		l.Note(BannedKey{Text: fmt.Sprint(i)}, time.Hour+time.Duration(i)*time.Second)
		l.Note(BannedKey{Text: fmt.Sprint(i)}, time.Hour+time.Duration(i)*time.Second)
	}
	all := l.All()
	if _, kept := all[BannedKey{Text: fmt.Sprint(3*maxBanList - 1)}]; len(all) != maxBanList || !kept {
		t.Errorf("%d are listed, the longest: %t", len(all), kept)
	}
	l.Note(BannedKey{Text: strings.Repeat("k", maxListedKey+1)}, time.Hour)
	for i := range maxBanList {
		l.Note(BannedKey{Text: fmt.Sprint("short ", i)}, time.Second)
	}
	long := 0
	for key := range l.All() {
		if len(key.Text) > maxListedKey {
			t.Error("a huge key is listed")
		}
		if !strings.HasPrefix(key.Text, "short") {
			long++
		}
	}
	if long < maxBanList*3/4 {
		t.Errorf("%d long bans are left after a flood of short ones", long)
	}
	all = l.All()
	for key, end := range all {
		l.Note(key, 2*time.Hour)
		l.Forget(key, end) // it has been banned again
	}
	if n := len(l.All()); n != maxBanList {
		t.Errorf("%d are left", n)
	}
	for key, end := range l.All() {
		l.Forget(key, end)
	}
	if n := len(l.All()); n != 0 {
		t.Errorf("%d are left that have ended", n)
	}
}
