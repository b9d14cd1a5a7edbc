//go:build unix

package redistest

import (
	"bytes"
	"fmt"
	"os"
	"syscall"
	"testing"
	"time"
)

// Pause stops the server's process, as SIGSTOP does: it keeps its connections,
// even takes new ones, and answers none. Kill and Restart work nevertheless.
func (s *Server) Pause(t testing.TB) {
	t.Helper()
	s.paused.Store(true)
	if err := s.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	// The signal may come a moment later. Where there is no such file there is
	// no telling.
	waitFor(t, 5*time.Second, func() error {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", s.Process.Pid))
		if err == nil && !bytes.Contains(stat, []byte(") T ")) {
			return fmt.Errorf("not stopped: %s", stat)
		}
		return nil
	})
}

// Resume lets a paused server go on.
func (s *Server) Resume(t testing.TB) {
	t.Helper()
	if err := s.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	s.paused.Store(false)
}
