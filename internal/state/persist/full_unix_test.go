//go:build unix

package persist

import (
	"fmt"
	"os/signal"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// Guards that a disk which is full leaves what was written before, with one line, and that all is
// written once there is room. It is not parallel: no file of this process may be larger meanwhile.
func TestDiskThatIsFull(t *testing.T) {
	path, clock := filepath.Join(t.TempDir(), "buckets"), newClock()
	p := start(t, clock)
	p.use(path, false)
	p.take("before", 1)
	p.tick(31 * time.Second)
	for i := range 1000 {
		p.take(fmt.Sprint(i), 2)
	}

	var room syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_FSIZE, &room); err != nil {
		t.Fatal(err)
	}
	signal.Ignore(syscall.SIGXFSZ) // so that writes fail instead
	defer signal.Reset(syscall.SIGXFSZ)
	full := room
	full.Cur = 4096
	if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &full); err != nil {
		t.Fatal(err)
	}
	p.tick(2 * time.Minute)
	p.wantLogged("WARN the file of buckets can't be written; what it had is still there")
	if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &room); err != nil {
		t.Fatal(err)
	}

	other := start(t, clock)
	other.File.opt.Path = path
	if saved, err := other.read(); err != nil || saved.Buckets != 1 {
		t.Errorf("what was written before: %+v, %v", saved, err)
	}
	p.tick(time.Minute)
	p.wantLogged(again)
	p.kill()
	p = start(t, clock)
	p.use(path, false)
	p.wantUnits("999", 2)
}
