// Package redistest runs real Redis servers during a test, and injects faults
// between them and their clients.
package redistest

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

const (
	// startWithin is how long a server may take until it answers.
	startWithin = 10 * time.Second

	// attempts is how many ports are tried: another process may take one between
	// the moment it was found free and the moment the server listens.
	attempts = 5
)

// Server is a redis-server of the test's own: empty, reachable from this host
// only, and writing no data to disk.
type Server struct {
	// Where it listens: 127.0.0.1:port and the path of its unix socket.
	Addr, Socket string

	// The server's process, for faults such as SIGSTOP. Restart replaces it.
	Process *os.Process

	path   string
	args   []string
	client *redis.Client
	exited <-chan struct{} // closed when the process has exited and was reaped
	paused atomic.Bool     // by Pause
}

// Start runs redis-server, or the program that the environment variable REDIS_SERVER
// names, until the test ends and returns when it answers. args are passed to it
// unchanged, such as "--maxmemory", "1mb". If it is not
// installed the test is skipped; with the environment variable CI set it fails,
// because a skipped test would count as passed there.
func Start(t testing.TB, args ...string) *Server {
	t.Helper()
	return start(t, "", redisPassword(args), func(_, port string) []string {
		return append([]string{"--port", port}, args...)
	})
}

// start runs redis-server with the options that the function returns for a
// directory of the server's own and for a port, and with those that all servers
// have in common. A configuration file must come first, and the last value of an
// option counts. The server's own client logs in with the name and password.
func start(t testing.TB, username, password string, options func(dir, port string) []string) *Server {
	t.Helper()
	path, err := exec.LookPath(cmp.Or(os.Getenv("REDIS_SERVER"), "redis-server"))
	if err != nil {
		if os.Getenv("CI") != "" {
			t.Fatalf("CI must not go without this test: %v", err)
		}
		t.Skip(err)
	}
	// Not t.TempDir: its path can be too long for a socket.
	dir, err := os.MkdirTemp("", "redis")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })

	s := &Server{Socket: filepath.Join(dir, "s"), path: path}
	for n := 1; ; n++ {
		port := freePort(t)
		s.Addr = net.JoinHostPort("127.0.0.1", port)
		own, file := options(dir, port), 0
		if !strings.HasPrefix(own[0], "--") {
			file = 1
		}
		s.args = slices.Concat(own[:file], []string{
			"--bind", "127.0.0.1", "--unixsocket", s.Socket,
			"--dir", dir, "--save", "", "--appendonly", "no", "--daemonize", "no", "--loglevel", "warning",
		}, own[file:])
		err := s.launch()
		if err == nil {
			break
		}
		if n == attempts {
			t.Fatal(err)
		}
	}
	t.Cleanup(s.Kill)

	s.client = redis.NewClient(&redis.Options{
		Network:                  "unix",
		Addr:                     s.Socket,
		Username:                 username,
		Password:                 password,
		DisableIdentity:          true,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
	t.Cleanup(func() { _ = s.client.Close() })
	return s
}

// redisPassword returns the password in the args of a server.
func redisPassword(args []string) string {
	if n := slices.Index(args, "--requirepass"); n >= 0 && n+1 < len(args) {
		return args[n+1]
	}
	return ""
}

// Client returns a client of the server that is closed when the test ends. It uses
// the unix socket and the password of "--requirepass".
func (s *Server) Client() *redis.Client { return s.client }

// Kill stops the server at once, as SIGKILL does, and waits until it is gone.
func (s *Server) Kill() {
	_ = s.Process.Kill() // it may have exited already
	<-s.exited
}

// Restart starts the server again at the same addresses, empty, and returns when
// it answers. If it is still running, it is killed first.
func (s *Server) Restart(t testing.TB) {
	t.Helper()
	s.Kill()
	if err := s.launch(); err != nil {
		t.Fatal(err)
	}
}

// CommandStat returns how often the server has run the named command, such as
// "get" or "script|flush", including calls from within scripts.
func (s *Server) CommandStat(t testing.TB, name string) int64 {
	t.Helper()
	return s.stat(t, "commandstats", "cmdstat_"+name+":calls=")
}

// ErrorStat returns how often the server has replied an error with the given prefix,
// such as "TRYAGAIN".
func (s *Server) ErrorStat(t testing.TB, prefix string) int64 {
	t.Helper()
	return s.stat(t, "errorstats", "errorstat_"+prefix+":count=")
}

// stat returns the number that follows the given text in a section of INFO, or
// 0 if it is not there.
func (s *Server) stat(t testing.TB, section, before string) int64 {
	t.Helper()
	info, err := s.client.Info(context.Background(), section).Result()
	if err != nil {
		t.Fatal(err)
	}
	_, stat, found := strings.Cut(info, before)
	if !found {
		return 0
	}
	digits := stat[:len(stat)-len(strings.TrimLeft(stat, "0123456789"))]
	n, err := strconv.ParseInt(digits, 10, 64)
	if err != nil {
		t.Fatalf("%s%s: %v", before, digits, err)
	}
	return n
}

// InfoNumber returns the number of the given name in a section of INFO.
func (s *Server) InfoNumber(t testing.TB, section, name string) int64 {
	t.Helper()
	info, err := s.client.Info(t.Context(), section).Result()
	if err != nil {
		t.Fatal(err)
	}
	_, digits, _ := strings.Cut(info, name+":")
	digits, _, _ = strings.Cut(digits, "\r\n")
	n, err := strconv.ParseInt(digits, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// CommandCounter counts how often a server runs commands.
type CommandCounter struct {
	Server *Server
	before map[string]int64
}

// Since returns how often the server has run the named command since the last call
// for it, or since the server started.
func (c *CommandCounter) Since(t testing.TB, name string) int64 {
	t.Helper()
	if c.before == nil {
		c.before = map[string]int64{}
	}
	n := c.Server.CommandStat(t, name)
	defer func() { c.before[name] = n }()
	return n - c.before[name]
}

// Check checks what Since returns.
func (c *CommandCounter) Check(t testing.TB, name string, want int64) {
	t.Helper()
	if got := c.Since(t, name); got != want {
		t.Errorf("%d calls of %s, want %d", got, name, want)
	}
}

// SetUser makes a user "limiter" with the password "pass" who has only the given
// rights, and those on keys that begin with "rl:".
func (s *Server) SetUser(t testing.TB, rights ...string) {
	t.Helper()
	acl := []any{"ACL", "SETUSER", "limiter", "reset", "on", ">pass", "~rl:*", "resetchannels", "-@all"}
	for _, right := range rights {
		acl = append(acl, right)
	}
	do(t, s, acl...)
}

// launch starts the process and waits until it answers.
func (s *Server) launch() error {
	output := new(bytes.Buffer)
	cmd := exec.Command(s.path, s.args...) //nolint:gosec // what a test chooses
	cmd.Stdout, cmd.Stderr = output, output
	exited, err := Run(cmd)
	if err != nil {
		return err
	}
	s.Process, s.exited = cmd.Process, exited
	s.paused.Store(false)

	for deadline := time.Now().Add(startWithin); !s.answers(); {
		select {
		case <-exited:
			return fmt.Errorf("redis-server exited: %v\n%s", cmd.ProcessState, output)
		case <-time.After(2 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			s.Kill()
			return fmt.Errorf("redis-server did not answer within %v\n%s", startWithin, output)
		}
	}
	return nil
}

// answers reports whether the server accepts commands. It does so even if it requires
// for a password first.
func (s *Server) answers() bool {
	conn, err := net.DialTimeout("unix", s.Socket, time.Second)
	if err != nil {
		return false
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(time.Second)); err != nil {
		return false
	}
	if _, err := conn.Write([]byte("PING\r\n")); err != nil {
		return false
	}
	reply := make([]byte, 64)
	n, _ := conn.Read(reply)
	answer := string(reply[:n])
	return strings.HasPrefix(answer, "+PONG") || strings.HasPrefix(answer, "-NOAUTH")
}

// running reports whether the server can answer: it is neither killed nor paused.
func (s *Server) running() bool {
	select {
	case <-s.exited:
		return false
	default:
		return !s.paused.Load()
	}
}

// FreeAddr returns an address of this host on which nothing listens, see listen.
func FreeAddr(t testing.TB) string {
	t.Helper()
	return net.JoinHostPort("127.0.0.1", freePort(t))
}

// freePort returns a port of 127.0.0.1 on which nothing listens, see listen.
func freePort(t testing.TB) string {
	t.Helper()
	l := listen(t)
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// listen listens on a port of 127.0.0.1 that nothing else takes until the test ends, also
// while the listener, or a server that replaces it, is temporarily closed. It is
// below those that the system uses for outgoing connections. Other tests, in this
// process or another, see that it is taken by a UDP port that is held for it.
func listen(t testing.TB) net.Listener {
	t.Helper()
	const first, count = 20000, 12000
	var err error
	for range 1000 {
		port := first + rand.IntN(count) //nolint:gosec // no secret
		var taken net.PacketConn
		if taken, err = net.ListenPacket("udp", loopback(port+count)); err != nil {
			continue
		}
		var l net.Listener
		if l, err = net.Listen("tcp", loopback(port)); err == nil {
			t.Cleanup(func() { _ = taken.Close() })
			return l
		}
		_ = taken.Close()
	}
	t.Fatal(err)
	return nil
}

// loopback returns the address of a port of 127.0.0.1.
func loopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }
