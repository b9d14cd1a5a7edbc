package redistest

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestPause guards that a paused server accepts connections and does not answer,
// that it continues afterwards, and that Kill and Restart do not wait for it.
func TestPause(t *testing.T) {
	t.Parallel()
	s := Start(t)
	s.Pause(t)
	conn := dial(t, s.Addr)
	send(t, conn, "PING")
	expectSilence(t, conn)

	s.Resume(t)
	expect(t, conn, "+PONG\r\n")

	s.Pause(t)
	s.Restart(t)
	conn = dial(t, s.Addr)
	send(t, conn, "PING")
	expect(t, conn, "+PONG\r\n")

	s.Pause(t)
	s.Kill()
	expectRefused(t, s.Addr)
}

// TestPassword guards that a server's own client knows the password.
func TestPassword(t *testing.T) {
	t.Parallel()
	s := Start(t, "--requirepass", "s3cret")
	if err := s.Client().Ping(context.Background()).Err(); err != nil {
		t.Fatal(err)
	}
}

// TestOrphans guards that a server, even a paused one, is gone soon after the test
// binary, however that ended.
func TestOrphans(t *testing.T) {
	const marker = "REDISTEST_ORPHAN"
	if os.Getenv(marker) != "" {
		s := Start(t)
		s.Pause(t)
		fmt.Println(marker, s.Addr)
		select {}
	}
	t.Parallel()
	Start(t) // skips where there is none

	for name, kill := range map[string]func(pid int) error{
		"killed":          func(pid int) error { return syscall.Kill(pid, syscall.SIGKILL) },
		"all interrupted": func(pid int) error { return syscall.Kill(-pid, syscall.SIGINT) },
	} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.Command(os.Args[0], "-test.run=^TestOrphans$", "-test.timeout=1m")
			dir, err := os.MkdirTemp("", "orphan") // what it leaves behind
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { os.RemoveAll(dir) })
			cmd.Env = append(os.Environ(), marker+"=1", "TMPDIR="+dir)
			cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			var addr string
			for lines := bufio.NewScanner(out); addr == "" && lines.Scan(); {
				_, addr, _ = strings.Cut(lines.Text(), marker+" ")
			}
			if err := kill(cmd.Process.Pid); err != nil {
				t.Fatal(err)
			}
			cmd.Wait()
			if addr == "" {
				t.Fatal("no server was started")
			}
			WaitFor(t, 5*time.Second, func() error {
				conn, err := net.Dial("tcp", addr)
				if err != nil {
					return nil
				}
				conn.Close()
				return fmt.Errorf("%s still listens", addr)
			})
		})
	}
}

// TestFreeAddr guards servers that a test stops and starts again: no one else is given
// their address meanwhile.
func TestFreeAddr(t *testing.T) {
	seen := make(map[string]bool)
	for range 500 {
		addr := FreeAddr(t)
		if seen[addr] {
			t.Fatalf("%s was given twice", addr)
		}
		seen[addr] = true
	}
}
