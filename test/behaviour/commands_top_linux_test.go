package behaviour

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/caddytest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// pty is a terminal that a command runs on.
type pty struct {
	*os.File // what the user types and sees
	cmd      *exec.Cmd
	exited   chan error

	mu    sync.Mutex
	shown bytes.Buffer
}

// startOnTerminal runs a subcommand of caddy rate-limit on a terminal of a size.
func startOnTerminal(t *testing.T, rows, columns uint16, args ...string) *pty {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { master.Close() })
	fd := int(master.Fd())
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0)
	}
	if err == nil {
		err = unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: columns})
	}
	if err != nil {
		t.Fatal(err)
	}
	slave, err := os.OpenFile(fmt.Sprint("/dev/pts/", n), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer slave.Close()
	term := &pty{File: master, exited: make(chan error, 1)}
	term.cmd = caddytest.Command(context.Background(), append([]string{"rate-limit"}, args...)...)
	term.cmd.Env = append(term.cmd.Env, "NO_COLOR=")
	term.cmd.Stdin, term.cmd.Stdout, term.cmd.Stderr = slave, slave, slave
	term.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := term.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { term.exited <- term.cmd.Wait() }()
	t.Cleanup(func() { _ = term.cmd.Process.Kill() })
	go func() {
		for buffer := make([]byte, 4096); ; {
			n, err := master.Read(buffer)
			term.mu.Lock()
			term.shown.Write(buffer[:n])
			term.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	return term
}

// text returns all that was shown so far.
func (term *pty) text() string {
	term.mu.Lock()
	defer term.mu.Unlock()
	return term.shown.String()
}

// waitFor waits until something is shown.
func (term *pty) waitFor(t *testing.T, text string) {
	t.Helper()
	defer func() {
		if t.Failed() {
			t.Logf("shown: %q", term.text())
		}
	}()
	sitetest.Eventually(t, fmt.Sprintf("%q on the terminal", text), func() bool { return strings.Contains(term.text(), text) })
}

// TestTopOnTerminal guards that top refreshes in place, also when Caddy loads
// another config, and leaves the terminal as it was, however it ends.
func TestTopOnTerminal(t *testing.T) {
	c := sitetest.Config{Site: cliSite}
	s, a := sitetest.StartWithAdmin(t, c)
	c.Admin = a.Addr
	for _, tc := range []struct {
		name string
		end  func(term *pty) error
	}{
		{"q", func(term *pty) error { _, err := term.WriteString("q"); return err }},
		{"Ctrl-C", func(term *pty) error { _, err := term.WriteString("\x03"); return err }},
		{"SIGTERM", func(term *pty) error { return term.cmd.Process.Signal(syscall.SIGTERM) }},
	} {
		name := tc.name
		term := startOnTerminal(t, 4, 30, "top", "--address", a.Addr, "--by", "requests", "--limit", "api")
		term.waitFor(t, "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[HLimit api in ")
		s.Get("/")
		term.waitFor(t, "127.0.0.1\x1b[K\x1b[J")
		if name == "q" {
			s.Reload(c)
			s.From("127.0.0.2")
			s.Get("/")
			s.From("127.0.0.3")
			s.Get("/") // there is no room for its line
			term.waitFor(t, ": requests 3, ")
			s.From("127.0.0.1")
		}
		before, err := unix.IoctlGetTermios(int(term.Fd()), unix.TCGETS)
		if err != nil || before.Lflag&unix.ECHO != 0 {
			t.Errorf("%s: the pty echoes: %v", name, err)
		}
		if err := tc.end(term); err != nil {
			t.Fatal(err)
		}
		if err := <-term.exited; err != nil {
			t.Errorf("%s: %v", name, err)
		}
		term.waitFor(t, "\x1b[?7h\x1b[?25h\x1b[?1049l")
		after, err := unix.IoctlGetTermios(int(term.Fd()), unix.TCGETS)
		if err != nil || after.Lflag&unix.ECHO == 0 {
			t.Errorf("%s: the pty does not echo any more: %v", name, err)
		}
	}
}

// TestResetAsksOnTerminal guards that reset asks first where it can, and does
// nothing unless it has to.
func TestResetAsksOnTerminal(t *testing.T) {
	s, a := sitetest.StartWithAdmin(t, sitetest.Config{Site: cliSite})
	s.Get("/")
	for _, tc := range []struct{ reply, want string }{
		{"n", "Error: nothing was changed\r\n"},
		{"", "Error: nothing was changed\r\n"},
		{"y", "The bucket is empty now. Before:\r\nlimit        api\r\nin           memory\r\nlevel        1 of 5\r\n"},
	} {
		term := startOnTerminal(t, 24, 80, "reset", "--address", a.Addr, "api", "127.0.0.1")
		term.waitFor(t, "Empty the bucket of limit api for key 127.0.0.1? [y/N] ")
		if _, err := term.WriteString(tc.reply + "\n"); err != nil {
			t.Fatal(err)
		}
		term.waitFor(t, tc.want)
		<-term.exited
	}
}
