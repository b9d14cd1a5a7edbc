package redisscript

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// failureOf returns the ServerError in err.
func failureOf(t testing.TB, err error) *ServerError {
	t.Helper()
	var f *ServerError
	if !errors.As(err, &f) {
		t.Fatalf("error %v tells of no failure", err)
	}
	return f
}

// TestFailureNamesWhatIsLacking guards that the error about a server which can't be used
// names the command that it lacks, in the words of several servers, and nothing else of
// what it quotes.
func TestFailureNamesWhatIsLacking(t *testing.T) {
	for reply, want := range map[string]string{
		"ERR unknown command 'evalsha', with args beginning with: 'secret' '1'":                     "EVALSHA",
		"ERR unknown command `EVALSHA`, with args beginning with: `secret`":                         "EVALSHA",
		"ERR unknown command 'secret'":                                                              "a command that is needed",
		"ERR unsupported command 'eval'":                                                            "EVAL",
		"ERR Unknown Redis command called from script script: secret, on @user_script:70.":          "a command that the script calls",
		"ERR syntax error script: secret, on @user_script:400.":                                     "an option of a command that the script calls",
		"ERR This instance has Lua scripting support disabled":                                      "scripts (EVAL), or they are disabled",
		"ERR user_script:70: attempt to call local 'frexp' (a nil value) script: secret":            "something that the script uses",
		"ERR Error compiling script (new function): user_script:1: unexpected symbol near 'secret'": "something that the script uses",
		"ERR Error running script (call to f_secret): @user_script:70: secret":                      "something that the script uses",
	} {
		got := newFailure("there", 0, replyError(reply)).Error()
		if want := "redis at there can't be used: it lacks " + want + ": ERR, and more"; !strings.HasPrefix(got, want) || strings.Contains(got, "secret") {
			t.Errorf("%s: %q, want %q", reply, got, want)
		}
	}
}

// TestFailureReasons guards the Failures for errors that no server can be made to
// cause within a test. An operator sees the reason; the breaker uses the rest, except for
// whether a call has certainly not been run, which decides what is held for it.
func TestFailureReasons(t *testing.T) {
	op := func(err error) error { return &net.OpError{Op: "dial", Net: "tcp", Err: err} }
	tests := []struct {
		err    error
		reason string
		is     string
	}{
		{replyError("LOADING Redis is loading"), "loading", "counts unrun"},
		{replyError("MISCONF Redis is configured to save RDB snapshots"), "misconf", "counts writes unrun"},
		{replyError("OOM command not allowed when used memory > 'maxmemory'."), "oom", "counts writes unrun"},
		{replyError("NOPERM No permissions to access a key"), "noperm", "counts writes unrun"},
		{replyError("NOPERM User u has no permissions to run the 'pexpire' command script: f_1, on @user_script:70."), "noperm", "counts writes"},
		{replyError("ERR The user executing the script can't run this command or subcommand"), "noperm", "counts writes"},
		{replyError("NOSCRIPT No matching script."), "error", "counts unrun"},
		{replyError("ASK 1 127.0.0.1:7000"), "moved", "elsewhere unrun"},
		{replyError("CROSSSLOT Keys in request don't hash to the same slot"), "moved", "counts unrun"},
		{replyError("TRYAGAIN Multiple keys request during rehashing of slot"), "tryagain", "elsewhere unrun"},
		{replyError("CLUSTERDOWN The cluster is down"), "clusterdown", "unrun"},
		{replyError("ERR max number of clients + cluster connections reached"), "maxclients", "counts"},
		{replyError("ERR unknown command"), "unsupported", "counts"},
		{replyError("ERR DB index is out of range"), "db", "counts"},
		{replyError("ERR SELECT is not allowed in cluster mode"), "db", "counts"},
		{replyError("OOMS no such word"), "error", "counts"},
		{replyError(""), "error", "counts"},
		{redis.Nil, "nomaster", "counts"},
		{op(&net.DNSError{Err: "no such host", IsNotFound: true}), "dns", "counts"},
		{op(&net.DNSError{Err: "i/o timeout", IsTimeout: true}), "dns", "counts"},
		{op(context.DeadlineExceeded), "timeout", "counts"},
		{op(syscall.ETIMEDOUT), "timeout", "counts"},
		{op(syscall.ECONNREFUSED), "refused", "counts breaks"},
		{op(syscall.ENOENT), "refused", "counts breaks"},
		{op(syscall.ECONNRESET), "closed", "counts breaks"},
		{op(syscall.EPIPE), "closed", "counts breaks"},
		{op(net.ErrClosed), "closed", "counts breaks"},
		{io.EOF, "closed", "counts breaks"},
		{io.ErrUnexpectedEOF, "closed", "counts breaks"},
		{redis.ErrClosed, "unused", ""},
		{op(syscall.EHOSTUNREACH), "error", "counts"},
		{tls.AlertError(42), "tls", "counts"},
		{op(tls.RecordHeaderError{Msg: "does not look like TLS"}), "tls", "counts"},
		{&tls.CertificateVerificationError{Err: x509.UnknownAuthorityError{}}, "tls", "counts"},
		{x509.UnknownAuthorityError{}, "tls", "counts"},
		{op(errors.New("remote error: tls: certificate required")), "tls", "counts"},
		{corrupt{errors.New("a value is not ours")}, "corrupt", ""},
		{credentialsError{errors.New("no token")}, "credentials", "counts"},
		{credentialsError{redis.Nil}, "credentials", "counts"},
		{errBehind, "backlog", "unrun"},
		{errLate, "backlog", ""},
		{errConnecting, "timeout", "counts unrun"},
		{errors.New("something"), "error", "counts"},
	}
	for _, tc := range tests {
		t.Run(tc.err.Error(), func(t *testing.T) {
			for _, err := range []error{tc.err, fmt.Errorf("wrapped: %w", tc.err)} {
				f := newFailure("redis.test:6379", 50*time.Millisecond, err)
				if f.reason != tc.reason {
					t.Errorf("reason %q, want %q", f.reason, tc.reason)
				}
				var is []string
				for word, holds := range map[string]bool{
					"counts": f.counts, "writes": f.writes, "breaks": f.breaks, "elsewhere": f.elsewhere, "unrun": f.notRun,
				} {
					if holds {
						is = append(is, word)
					}
				}
				slices.Sort(is)
				want := strings.Fields(tc.is)
				slices.Sort(want)
				if !slices.Equal(is, want) {
					t.Errorf("it %q, want %q", is, want)
				}
				if !errors.Is(f, tc.err) {
					t.Errorf("%q does not unwrap to its cause", f)
				}
				text := f.Error()
				if !strings.HasPrefix(text, "redis at redis.test:6379") || !strings.HasSuffix(text, shown(tc.err)) {
					t.Errorf("error %q does not end with %q", text, shown(tc.err))
				}
				if tc.reason == "timeout" && !strings.Contains(text, "50ms") {
					t.Errorf("error %q does not say how long", text)
				}
			}
		})
	}
}

// shown returns the text that may be shown for an error of TestFailureReasons: of
// replies the code, and nothing of unknown errors.
func shown(err error) string {
	if err == redis.Nil { // it is given as it is
		return "no server has this master_name"
	}
	if _, reply := err.(redis.Error); reply {
		word, rest, _ := strings.Cut(err.Error(), " ")
		switch {
		case word == "ERR":
			return "ERR, and more that is not shown, as it may name the user or password"
		case rest == "" || word == "OOMS" || word == "redis:":
			return "an error that is not shown, as it may name the user or password"
		}
		return word
	}
	if err.Error() == "something" {
		return "an error that is not shown, as it may quote what was sent"
	}
	return err.Error()
}

// TestFailuresShowNoSecret guards that no error shows anything that was sent to a
// server, whatever the server replies, and that the rest still says what is wrong.
func TestFailuresShowNoSecret(t *testing.T) {
	tests := []struct {
		err  error
		want string // suffix of its text
	}{
		{replyError("NOPERM User canary has no permissions to run the 'evalsha' command"), ": NOPERM on evalsha"},
		{replyError("NOPERM User canary has no permissions to run the 'canary' command"), ": NOPERM"},
		{replyError("NOPERM No permissions to access a key"), ": NOPERM"},
		{replyError("WRONGPASS invalid username-password pair canary"), ": WRONGPASS"},
		{replyError("canary"), "it may name the user or password"},
		{replyError("CANARY canary"), "it may name the user or password"},
		{replyError("ERR canary"), "it may name the user or password"},
		{replyError("ERR DB index is out of range canary"), "it may name the user or password"},
		{fmt.Errorf("failed to authenticate: canary: %w", replyError("NOAUTH canary")), ": NOAUTH"},
		{errors.New(`redis: can't parse "canary"`), "it may quote what was sent"},
		{errors.New(`redis: invalid reply: "tls: canary"`), "it may quote what was sent"},
		{errors.Join(errors.New("canary"), io.EOF), ": EOF"},
		{fmt.Errorf("canary: %w", syscall.ECONNREFUSED), ": connection refused"},
	}
	for _, tc := range tests {
		t.Run(tc.err.Error(), func(t *testing.T) {
			text := newFailure("a:1", time.Second, tc.err).Error()
			if strings.Contains(strings.ToLower(text), "canary") || !strings.HasSuffix(text, tc.want) {
				t.Errorf("got %q, want …%s and nothing else of it", text, tc.want)
			}
		})
	}
}

// tcpServer accepts connections and passes each to do; it returns its address.
func tcpServer(t testing.TB, do func(*net.TCPConn)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var busy sync.WaitGroup
	busy.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			busy.Go(func() { do(conn.(*net.TCPConn)) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		busy.Wait()
	})
	return l.Addr().String()
}

// TestFailuresToConnect guards what operators and callers learn about addresses
// with no server: without waiting if there is nothing to wait for.
func TestFailuresToConnect(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	hangUp := tcpServer(t, func(c *net.TCPConn) {
		c.Read(make([]byte, 1000))
		c.Close()
	})
	reset := tcpServer(t, func(c *net.TCPConn) {
		c.Read(make([]byte, 1000))
		c.SetLinger(0)
		c.Close()
	})
	silent := tcpServer(t, func(c *net.TCPConn) { io.Copy(io.Discard, c) })
	garbage := tcpServer(t, func(c *net.TCPConn) {
		io.WriteString(c, "HTTP/1.1 400 Bad Request\r\n\r\n")
		io.Copy(io.Discard, c)
	})

	good, other := redistest.NewAuthority(t), redistest.NewAuthority(t)
	secure, mutual := redistest.StartTLS(t, good, false), redistest.StartTLS(t, good, true)
	cert, key := good.Issue(t, "localhost", redistest.Expired)
	expired := redistest.StartTLS(t, good, false, "--tls-cert-file", cert, "--tls-key-file", key)
	config := func(a *redistest.Authority, name string) *tls.Config {
		return &tls.Config{RootCAs: a.Pool(), ServerName: name}
	}

	tests := []struct {
		name, address string
		tls           *tls.Config
		reason        string
	}{
		{"nothing listens", closed.Addr().String(), nil, "refused"},
		{"no such socket", filepath.Join(t.TempDir(), "s"), nil, "refused"},
		{"hangs up", hangUp, nil, "closed"},
		{"resets", reset, nil, "closed"},
		{"silent", silent, nil, "timeout"},
		{"not Redis", garbage, nil, "reply"},
		{"TLS to a plain port", server.Addr, config(good, "localhost"), "tls"},
		{"TLS to a server that is silent", silent, config(good, "localhost"), "timeout"},
		{"TLS to what is not Redis", garbage, config(good, "localhost"), "tls"},
		{"plain to a TLS port", secure.Addr, nil, "closed"},
		{"TLS to nothing that speaks it", hangUp, config(good, "localhost"), "closed"},
		{"other authority", secure.Addr, config(other, "localhost"), "tls"},
		{"other name", secure.Addr, config(good, "redis.test"), "tls"},
		{"expired", expired.Addr, config(good, "localhost"), "tls"},
		// The server closes the connection after its alert, which may be lost.
		{"no certificate", mutual.Addr, config(good, "localhost"), "tls or closed"},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			var seen events
			timeout := 2 * time.Second // that a busy machine does not take
			if tc.reason == "timeout" {
				timeout = 250 * time.Millisecond
			}
			r := newTestClient(t, server, func(opt *Options) {
				opt.Addresses, opt.TLS, opt.Timeout, opt.Report = []string{tc.address}, tc.tls, timeout, seen.report
			})
			for n := range 2 * openAfter {
				began := time.Now()
				d, err := r.count(t.Context(), upTo(5))
				took := time.Since(began)
				checkError(t, err, tc.address)
				if f := failureOf(t, err); !strings.Contains(tc.reason, f.reason) || len(d) > 0 {
					t.Errorf("reason %q, want %q: decided %+v, error %v", f.reason, tc.reason, d, err)
				}
				if n >= openAfter && took > timeout/2 {
					t.Errorf("waited %v for a server that is down", took)
				}
			}
			got := seen.take()
			if tc.reason == "timeout" {
				if len(got) > 0 { // it may just be far away
					t.Errorf("reported %q at once", got)
				}
				redistest.WaitFor(t, 5*time.Second, func() error {
					if got = seen.take(); len(got) == 0 {
						return errors.New("not reported")
					}
					return nil
				})
			}
			reason, _ := strings.CutPrefix(strings.Join(got, ", "), "down ")
			if reason == "" || !strings.Contains(tc.reason, reason) {
				t.Errorf("reported %q, want it lost for %q", got, tc.reason)
			}
		})
	}
}

// TestSlowFailuresToConnect guards that a server counts as down too if its connections fail
// only after calls have given up waiting for them.
func TestSlowFailuresToConnect(t *testing.T) {
	t.Parallel()
	authority := redistest.NewAuthority(t)
	hangsUp := tcpServer(t, func(c *net.TCPConn) {
		time.Sleep(300 * time.Millisecond)
		c.Close()
	})
	for _, tc := range []struct {
		name, address string
		tls           *tls.Config
		reason        string
	}{
		{"TLS to a plain port", redistest.Start(t).Addr, &tls.Config{RootCAs: authority.Pool(), ServerName: "localhost"}, "tls"},
		{"hangs up", hangsUp, nil, "closed"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			var seen events
			r := newTestClient(t, nil, func(opt *Options) {
				opt.Addresses, opt.TLS, opt.Timeout, opt.Report = []string{tc.address}, tc.tls, 50*time.Millisecond, seen.report
			})
			var got []string
			redistest.WaitFor(t, 10*time.Second, func() error {
				_, _ = r.count(t.Context(), upTo(5))
				if got = seen.take(); len(got) == 0 {
					return errors.New("not reported")
				}
				return nil
			})
			if want := "down " + tc.reason; got[0] != want {
				t.Errorf("reported %q, want %q", got, want)
			}
		})
	}
}

// TestFailuresOfReplies guards what an operator learns from error replies of
// real servers, and that the connection is used again, unless it is to a replica.
func TestFailuresOfReplies(t *testing.T) {
	t.Parallel()
	config := func(name string, value any) func(t *testing.T, s *redistest.Server) {
		return func(t *testing.T, s *redistest.Server) {
			t.Helper()
			redistest.Done(t, s.Client().Do(t.Context(), "CONFIG", "SET", name, value))
		}
	}
	do := func(args ...any) func(t *testing.T, s *redistest.Server) {
		return func(t *testing.T, s *redistest.Server) {
			t.Helper()
			redistest.Done(t, s.Client().Do(t.Context(), args...))
		}
	}
	tests := []struct {
		reason  string
		args    []string
		begin   func(*testing.T, *redistest.Server)
		end     func(*testing.T, *redistest.Server)
		denials bool // whether reads are still answered
	}{
		{"oom", nil, config("maxmemory", 1), config("maxmemory", 0), true},
		{"noreplicas", nil, config("min-replicas-to-write", 1), config("min-replicas-to-write", 0), true},
		{"readonly", nil, do("REPLICAOF", "127.0.0.1", "1"), do("REPLICAOF", "NO", "ONE"), true},
		{
			"masterdown",
			[]string{"--replica-serve-stale-data", "no"},
			do("REPLICAOF", "127.0.0.1", "1"), do("REPLICAOF", "NO", "ONE"),
			false,
		},
		{
			"noperm", nil,
			do("ACL", "SETUSER", "default", "-evalsha"), do("ACL", "SETUSER", "default", "+evalsha"),
			false,
		},
		{
			"busy", []string{"--busy-reply-threshold", "1"},
			func(t *testing.T, s *redistest.Server) {
				t.Helper()
				go s.Client().Eval(context.Background(), "while true do end", nil)
				for s.Client().Ping(t.Context()).Err() == nil {
					time.Sleep(time.Millisecond)
				}
			},
			func(t *testing.T, s *redistest.Server) {
				t.Helper()
				do("SCRIPT", "KILL")(t, s)
				redistest.WaitFor(t, 5*time.Second, func() error { return s.Client().Ping(t.Context()).Err() })
			},
			false,
		},
		{
			"clusterdown",
			[]string{"--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf"},
			nil, do("CLUSTER", "ADDSLOTSRANGE", 0, 16383),
			false,
		},
	}
	for _, tc := range tests {
		t.Run(tc.reason, func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t, tc.args...)
			var seen events
			r := newTestClient(t, server, func(opt *Options) { opt.Report = seen.report })
			guard := &r.server().breaker
			room, full := upTo(100), upTo(1)
			full.key = "rl:{full}"
			if tc.begin != nil {
				mustCount(t, r, full)
				tc.begin(t, server)
			}
			connections := int64(0)
			if tc.reason != "busy" { // otherwise unknown
				connections = server.InfoNumber(t, "stats", "total_connections_received")
			}
			for n := range openAfter - 1 {
				if n > 0 && tc.denials {
					if d, err := r.count(t.Context(), full); err != nil || !d[0].denied {
						t.Fatalf("decided %+v on a full bucket, error %v", d, err)
					}
				}
				_, err := r.count(t.Context(), room)
				checkError(t, err, server.Addr)
				if f := failureOf(t, err); f.reason != tc.reason {
					t.Fatalf("reason %q, want %q: %v", f.reason, tc.reason, err)
				}
			}
			want := []string(nil)
			if tc.reason == "clusterdown" {
				want = []string{"error clusterdown"}
			}
			if got := seen.take(); !slices.Equal(got, want) {
				t.Errorf("reported %q, want %q", got, want)
			}
			tc.end(t, server)
			redistest.WaitFor(t, 5*time.Second, func() error {
				_, err := r.count(t.Context(), room)
				return err
			})
			more := server.InfoNumber(t, "stats", "total_connections_received") - connections
			if tc.reason != "readonly" && tc.reason != "busy" && more > 1 {
				t.Errorf("%d more connections", more)
			}
			if want = nil; tc.reason != "clusterdown" {
				want = []string{"error " + tc.reason}
			}
			if got := seen.take(); !slices.Equal(got, want) {
				t.Errorf("reported %q, want %q", got, want)
			}
			if n := guard.failures.Load(); n != 0 {
				t.Errorf("%d failures after a success", n)
			}
		})
	}
}

// TestFailuresToLogIn guards what an operator learns when a server rejects the
// login: causes are distinguished, and no error contains a password.
func TestFailuresToLogIn(t *testing.T) {
	t.Parallel()
	const password = "s3cret"
	server := redistest.Start(t, "--requirepass", password)
	tests := []struct {
		name, user, password string
		reason               string
	}{
		{"no password", "", "", "noauth"},
		{"other password", "", password + "x", "wrongpass"},
		{"no such user", "nobody", password, "wrongpass"},
		{"the password", "", password, ""},
		{"the user", "default", password, ""},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			r := newTestClient(t, server, func(opt *Options) {
				opt.Username, opt.Password = tc.user, tc.password
			})
			_, err := r.count(t.Context(), upTo(100))
			if tc.reason == "" {
				if err != nil {
					t.Error(err)
				}
				return
			}
			checkError(t, err, server.Addr)
			if f := failureOf(t, err); f.reason != tc.reason || strings.Contains(err.Error(), password) {
				t.Errorf("reason %q, want %q: %v", f.reason, tc.reason, err)
			}
		})
	}

	t.Run("too many clients", func(t *testing.T) {
		t.Parallel()
		server := redistest.Start(t)
		redistest.Done(t, server.Client().Do(t.Context(), "CONFIG", "SET", "maxclients", 1))
		r := newTestClient(t, server, nil)
		_, err := r.count(t.Context(), upTo(100))
		checkError(t, err, server.Addr)
		// The server closes the connection after its reply, which may be lost.
		if f := failureOf(t, err); f.reason != "maxclients" && f.reason != "closed" {
			t.Errorf("reason %q: %v", f.reason, err)
		}
	})
}

// TestProbeOfAbsentKey guards that a server which rejects writes does not count as
// recovered because the key of the probe did not exist.
func TestProbeOfAbsentKey(t *testing.T) {
	server := redistest.Start(t)
	r := newTestClient(t, server, nil)
	b := upTo(100)
	mustCount(t, r, b)
	for _, tc := range []struct {
		memory string
		key    string
		proves bool
		fails  bool
	}{
		{"0", b.key, true, false},
		{"0", "rl:absent", false, false},
		{"1", b.key, false, true},
		{"1", "rl:absent", false, false},
	} {
		redistest.Done(t, server.Client().ConfigSet(t.Context(), "maxmemory", tc.memory))
		script := r.server().script
		probe := &Call{Keys: []string{tc.key}, Arg: script.ProbeArg, Replies: script.ProbeReplies}
		err := r.server().await(Deadline{At: time.Now().Add(r.timeout)}, probe)
		proves := err == nil && script.Wrote(probe)
		if proves != tc.proves || err != nil != tc.fails {
			t.Errorf("maxmemory %s, %s: proves %t, error %v", tc.memory, tc.key, proves, err)
		}
	}
	redistest.Done(t, server.Client().ConfigSet(t.Context(), "maxmemory", "0"))
	if got := stored(t, server, b.key); got != 1 {
		t.Errorf("the key holds %d after it was probed, want 1", got)
	}
}

// TestRecoveryWhileAllIsDenied guards a server that was down for rejecting writes
// and accepts them again while all calls are to full buckets: denials do not show
// that it accepts writes, but a probe does, and nothing is charged for it.
func TestRecoveryWhileAllIsDenied(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		reason     string
		begin, end []any
	}{
		{"oom", []any{"CONFIG", "SET", "maxmemory", 1}, []any{"CONFIG", "SET", "maxmemory", 0}},
		{"readonly", []any{"REPLICAOF", "127.0.0.1", "1"}, []any{"REPLICAOF", "NO", "ONE"}},
	} {
		t.Run(tc.reason, func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t)
			var seen events
			r := newTestClient(t, server, func(opt *Options) { opt.Report = seen.report })
			room, full := upTo(100), counter{key: "rl:{full}", add: 7, limit: 7}
			mustCount(t, r, full)
			before := stored(t, server, full.key)
			// denied reports whether the server has denied a call on the full
			// bucket.
			denied := func() bool {
				d, err := r.count(t.Context(), full)
				if err == nil && !d[0].denied {
					t.Fatalf("decided %+v", d)
				}
				return err == nil
			}
			do := func(args []any) {
				t.Helper()
				redistest.Done(t, server.Client().Do(t.Context(), args...))
			}

			do(tc.begin)
			for range openAfter {
				_, err := r.count(t.Context(), room)
				checkError(t, err, server.Addr)
			}
			redistest.WaitFor(t, 5*time.Second, func() error {
				if !denied() {
					return errors.New("no probe was denied")
				}
				return nil
			})
			if got, want := seen.take(), []string{"down " + tc.reason}; !slices.Equal(got, want) {
				t.Errorf("reported %q, want %q", got, want)
			}

			do(tc.end)
			redistest.WaitFor(t, 5*time.Second, func() error {
				denied()
				if r.server().breaker.isOpen() {
					return errors.New("still lost")
				}
				return nil
			})
			if got, want := seen.take(), []string{"recovered"}; !slices.Equal(got, want) {
				t.Errorf("reported %q, want %q", got, want)
			}
			if !denied() {
				t.Error("not decided by a server that is back")
			}
			if n := stored(t, server, full.key); n != before {
				t.Errorf("stored %d, want %d as before", n, before)
			}
		})
	}
}

// TestOutOfMemory guards a server that is out of memory and gets a little now and
// then, as keys expire: most writes fail, some succeed, and denials are still
// answered. It does not go down and recover each time, and recovers for good soon
// after there is memory again.
func TestOutOfMemory(t *testing.T) {
	if testing.Short() {
		t.Skip(longTest)
	}
	t.Parallel()
	server := redistest.Start(t, "--maxmemory-policy", "noeviction", "--maxmemory-clients", "0")
	var seen events
	r := newTestClient(t, server, func(opt *Options) {
		opt.Report = seen.report
	})
	full := counter{key: "rl:{full}", add: 1, limit: 1}
	mustCount(t, r, full)
	ctx := context.Background()
	client := server.Client()
	memory := func(spare int64) {
		t.Helper()
		used := server.InfoNumber(t, "memory", "used_memory")
		redistest.Done(t, client.ConfigSet(ctx, "maxmemory", fmt.Sprint(max(used+spare, 1))))
	}
	filler := strings.Repeat("x", 2000)
	fills, call := 0, int64(0)
	began := time.Now()
	for time.Since(began) < 6*time.Second {
		memory(-50_000)
		for range 30 {
			call++
			_, _ = r.count(ctx, numbered(call))
			_, _ = r.count(ctx, full)
		}
		memory(200_000) // drained a little
		for range 30 {
			call++
			_, _ = r.count(ctx, numbered(call))
			if client.Set(ctx, fmt.Sprint("filler", fills), filler, 0).Err() == nil {
				fills++
			}
		}
		time.Sleep(10 * time.Millisecond)
	}
	got := seen.take()
	downs := 0
	for _, what := range got {
		if what == "down oom" {
			downs++
		}
	}
	t.Logf("reported %q, %d fillers", got, fills)
	// First for 0.25 s, then 0.5, 1, 2 and 4, less a fifth.
	if downs < 1 || downs > 5 {
		t.Errorf("down %d times in 6 s", downs)
	}
	if fills == 0 {
		t.Error("there never was any memory")
	}
	redistest.Done(t, client.ConfigSet(ctx, "maxmemory", "0"))
	redistest.WaitFor(t, 12*time.Second, func() error {
		call++
		_, _ = r.count(ctx, numbered(call))
		if r.server().breaker.isOpen() {
			return fmt.Errorf("still down")
		}
		return nil
	})
	if got := seen.take(); len(got) > 0 && !slices.Equal(got, []string{"recovered"}) {
		t.Errorf("reported %q when there was memory again", got)
	}
}

// TestSubmittedCallsFindServerBack guards a client whose calls are all submitted, such as
// reports at intervals: one of them probes a server that is down, also for whether it
// accepts writes again.
func TestSubmittedCallsFindServerBack(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name       string
		begin, end func(testing.TB, *redistest.Server, *redistest.Proxy)
		full       bool // whether the calls write nothing
	}{
		{"killed", func(_ testing.TB, s *redistest.Server, _ *redistest.Proxy) { s.Kill() },
			func(t testing.TB, s *redistest.Server, _ *redistest.Proxy) { s.Restart(t) }, false},
		{"a black hole", func(_ testing.TB, _ *redistest.Server, p *redistest.Proxy) { p.BlackHole() },
			func(_ testing.TB, _ *redistest.Server, p *redistest.Proxy) { p.Pass() }, false},
		{"out of memory", func(t testing.TB, s *redistest.Server, _ *redistest.Proxy) { setMemory(t, s, "1") },
			func(t testing.TB, s *redistest.Server, _ *redistest.Proxy) { setMemory(t, s, "0") }, false},
		{"out of memory, and what is asked is full", func(t testing.TB, s *redistest.Server, _ *redistest.Proxy) { setMemory(t, s, "1") },
			func(t testing.TB, s *redistest.Server, _ *redistest.Proxy) { setMemory(t, s, "0") }, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t)
			proxy := redistest.StartProxy(t, server.Addr)
			r := newTestClient(t, nil, func(opt *Options) {
				opt.Addresses, opt.Timeout = []string{proxy.Addr}, 200*time.Millisecond
			})
			full := counter{key: "rl:{full}", add: 1, limit: 1}
			mustCount(t, r, full)
			// submit submits a call and returns its outcome.
			submit := func(of counter) error {
				done := make(chan error, 1)
				c := callOf(of)
				c.Done = func(err error) { done <- err }
				if err := r.Submit(Deadline{At: time.Now().Add(r.timeout)}, c); err != nil {
					return err
				}
				return <-done
			}
			room := upTo(1 << 30)
			tc.begin(t, server, proxy)
			redistest.WaitFor(t, 20*time.Second, func() error {
				_ = submit(room)
				if !r.server().breaker.isOpen() {
					return errors.New("not down")
				}
				return nil
			})
			tc.end(t, server, proxy)
			asked := room
			if tc.full {
				asked = full
			}
			redistest.WaitFor(t, 20*time.Second, func() error {
				if err := submit(asked); err != nil {
					return err
				}
				if r.server().breaker.isOpen() {
					return errors.New("still down")
				}
				return nil
			})
		})
	}
}

// TestSubmittedCallsDoNotPileUp guards a client whose calls are all submitted, while the
// server answers fewer than come: the others are refused, or all of them would be answered
// later and later.
func TestSubmittedCallsDoNotPileUp(t *testing.T) {
	t.Parallel()
	const timeout = 50 * time.Millisecond
	server := redistest.Start(t)
	proxy := redistest.StartProxy(t, server.Addr)
	r := newTestClient(t, server, func(opt *Options) { opt.Addresses, opt.Timeout = []string{proxy.Addr}, timeout })
	mustCount(t, r, upTo(1<<30))
	proxy.Slice(10, 5*time.Millisecond)
	var waiting atomic.Int64
	refused, most := 0, int64(0)
	for began := time.Now(); time.Since(began) < 3*time.Second; time.Sleep(time.Millisecond) {
		for range 4 {
			c := callOf(upTo(1 << 30))
			c.Done = func(error) { waiting.Add(-1) }
			most = max(most, waiting.Add(1))
			if err := r.Submit(Deadline{At: time.Now().Add(timeout)}, c); err != nil {
				waiting.Add(-1)
				refused++
			}
		}
	}
	if refused == 0 || most > 3000 {
		t.Errorf("%d calls were refused, and %d waited together", refused, most)
	}
	proxy.Pass()
	redistest.WaitFor(t, 20*time.Second, func() error {
		if n := waiting.Load(); n > 0 {
			return fmt.Errorf("%d calls wait", n)
		}
		return nil
	})
	t.Logf("%d calls were refused, and %d waited together", refused, most)
}

// setMemory sets how much memory a server may use, in bytes; 0 is all.
func setMemory(t testing.TB, server *redistest.Server, bytes string) {
	t.Helper()
	redistest.Done(t, server.Client().ConfigSet(t.Context(), "maxmemory", bytes))
}

// TestReasonsThatLast guards that an outage that begins with one reason and goes on with
// another is reported as what it has become: a server that is back with a certificate of
// another authority, or without TLS.
func TestReasonsThatLast(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	good, other := redistest.NewAuthority(t), redistest.NewAuthority(t)
	for name, back := range map[string]*redistest.Server{
		"another authority": redistest.StartTLS(t, other, false),
		"without TLS":       server,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var seen events
			proxy := redistest.StartProxy(t, redistest.StartTLS(t, good, false).Addr)
			r := newTestClient(t, server, func(opt *Options) {
				opt.Addresses, opt.Timeout, opt.Report = []string{proxy.Addr}, 2*time.Second, seen.report
				opt.TLS = &tls.Config{RootCAs: good.Pool(), ServerName: "localhost"}
			})
			if _, err := r.count(t.Context(), upTo(5)); err != nil {
				t.Fatal(err)
			}
			waitFor := func(want string) {
				t.Helper()
				redistest.WaitFor(t, 20*time.Second, func() error {
					_, _ = r.count(t.Context(), upTo(5))
					for _, event := range seen.take() {
						if event == want {
							return nil
						}
						t.Logf("reported %q", event)
					}
					return fmt.Errorf("not reported: %s", want)
				})
			}
			proxy.Refuse()
			proxy.CloseAll()
			waitFor("down refused")
			proxy.Retarget(back.Addr)
			proxy.Pass()
			waitFor("reason tls")
		})
	}
}
