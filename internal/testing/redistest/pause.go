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
// even accepts new ones, and answers none. Kill and Restart still work.
func (s *Server) Pause(t testing.TB) {
	t.Helper()
	s.paused.Store(true)
	if err := s.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	// The signal may take effect a moment later. Without such a file there is no
	// way to know.
	WaitFor(t, 5*time.Second, func() error {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", s.Process.Pid))
		if err == nil && !bytes.Contains(stat, []byte(") T ")) {
			return fmt.Errorf("not stopped: %s", stat)
		}
		return nil
	})
}

// Resume continues a paused server.
func (s *Server) Resume(t testing.TB) {
	t.Helper()
	if err := s.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	s.paused.Store(false)
}
