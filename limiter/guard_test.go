package limiter

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
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

	"github.com/seed-387a6c65/caddy-ratelimit/internal/redistest"
)

// reporters are the reporters of the stores that tests use.
var reporters sync.Map

// allReported waits until nothing waits to be reported.
func allReported() {
	reporters.Range(func(r, _ any) bool {
		for telling := true; telling; time.Sleep(time.Microsecond) {
			r := r.(*reporter)
			r.mu.Lock()
			telling = r.telling
			r.mu.Unlock()
		}
		return true
	})
}

// events collects what is reported.
type events struct {
	mu  sync.Mutex
	all []Event
}

func (e *events) report(ev Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.all = append(e.all, ev)
}

// take returns what was reported since it was called last, in words such as
// "lost oom", "back" and "lapse pool".
func (e *events) take() []string {
	allReported()
	e.mu.Lock()
	defer e.mu.Unlock()
	var words []string
	for _, ev := range e.all {
		words = append(words, eventWords(ev))
	}
	e.all = nil
	return words
}

func eventWords(ev Event) string {
	kind := map[EventKind]string{Lost: "lost", Back: "back", Lapse: "lapse", Replaced: "replaced"}[ev.Kind]
	return strings.TrimSpace(kind + " " + ev.Reason)
}

// failureOf returns the failure of a server that err tells of.
func failureOf(t testing.TB, err error) *failure {
	t.Helper()
	var f *failure
	if !errors.As(err, &f) {
		t.Fatalf("error %v tells of no failure", err)
	}
	return f
}

// replyError is an error that a server replied.
type replyError string

func (e replyError) Error() string { return string(e) }
func (replyError) RedisError()     {}

var _ redis.Error = replyError("")

// TestFailureReasons tests what is made of errors that no server can be made to
// cause within a test. An operator is told the reason, the breaker goes by the
// rest.
func TestFailureReasons(t *testing.T) {
	op := func(err error) error { return &net.OpError{Op: "dial", Net: "tcp", Err: err} }
	tests := []struct {
		err    error
		reason string
		is     string
	}{
		{replyError("LOADING Redis is loading"), "loading", "counts"},
		{replyError("MISCONF Redis is configured to save RDB snapshots"), "misconf", "counts writes"},
		{replyError("OOM command not allowed when used memory > 'maxmemory'."), "oom", "counts writes"},
		{replyError("ASK 1 127.0.0.1:7000"), "moved", "elsewhere"},
		{replyError("TRYAGAIN Multiple keys request during rehashing of slot"), "tryagain", "elsewhere"},
		{replyError("CLUSTERDOWN The cluster is down"), "clusterdown", ""},
		{replyError("ERR max number of clients + cluster connections reached"), "maxclients", "counts"},
		{replyError("ERR unknown command"), "error", "counts"},
		{replyError("OOMS no such word"), "error", "counts"},
		{replyError(""), "error", "counts"},
		{redis.Nil, "error", "counts"},
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
		{errCorrupt, "corrupt", ""},
		{errNoConnection, "pool", ""},
		{errConnecting, "timeout", "counts"},
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
					"counts": f.counts, "writes": f.writes, "breaks": f.breaks, "elsewhere": f.elsewhere,
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

// shown returns what may be shown of an error of TestFailureReasons: of replies
// the code, and nothing of what is not known.
func shown(err error) string {
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

// TestFailuresShowNoSecret tests that no error tells anything of what a server
// was sent, whatever it replies, and that the rest still says what is wrong.
func TestFailuresShowNoSecret(t *testing.T) {
	tests := []struct {
		err  error
		want string // what its text ends with
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
		{fmt.Errorf("%w: %w", errCorrupt, errors.New("canary")), ": the value of a key is no bucket's"},
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

// tcpServer accepts connections and lets do have each; it returns its address.
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

// TestFailuresToConnect tests what an operator is told of addresses where no
// server is found, and that Take says so too: without waiting where there is
// nothing to wait for.
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
		{"not Redis", garbage, nil, "error"},
		{"TLS to a plain port", server.Addr, config(good, "localhost"), "timeout"}, // which waits for a line's end
		{"TLS to what is not Redis", garbage, config(good, "localhost"), "tls"},
		{"plain to a TLS port", secure.Addr, nil, "closed"},
		{"TLS to nothing that speaks it", hangUp, config(good, "localhost"), "closed"},
		{"other authority", secure.Addr, config(other, "localhost"), "tls"},
		{"other name", secure.Addr, config(good, "redis.test"), "tls"},
		{"expired", expired.Addr, config(good, "localhost"), "tls"},
		// The server closes behind its alert, which may get lost by that.
		{"no certificate", mutual.Addr, config(good, "localhost"), "tls or closed"},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			var seen events
			const timeout = 250 * time.Millisecond
			r := newTestRedis(t, server, func(opt *RedisOptions) {
				opt.Addresses, opt.TLS, opt.Timeout, opt.Report = []string{tc.address}, tc.tls, timeout, seen.report
			})
			for n := range 2 * lostAfter {
				began := time.Now()
				d, err := r.Take(t.Context(), Request{Buckets: []Bucket{hourly(5)}}, nil)
				took := time.Since(began)
				checkError(t, err, tc.address)
				if f := failureOf(t, err); !strings.Contains(tc.reason, f.reason) || len(d) > 0 {
					t.Errorf("reason %q, want %q: decided %+v, error %v", f.reason, tc.reason, d, err)
				}
				if n >= lostAfter && took > timeout/2 {
					t.Errorf("waited %v for a lost server", took)
				}
			}
			got := seen.take()
			if tc.reason == "timeout" {
				if len(got) > 0 { // it may only be far away
					t.Errorf("reported %q at once", got)
				}
				waitFor(t, 5*time.Second, func() error {
					if got = seen.take(); len(got) == 0 {
						return errors.New("not reported")
					}
					return nil
				})
			}
			reason, _ := strings.CutPrefix(strings.Join(got, ", "), "lost ")
			if reason == "" || !strings.Contains(tc.reason, reason) {
				t.Errorf("reported %q, want it lost for %q", got, tc.reason)
			}
		})
	}
}

// TestFailuresOfReplies tests what an operator is told of what real servers
// reply, and what becomes of the connection: it serves again, but for one to a
// replica.
func TestFailuresOfReplies(t *testing.T) {
	t.Parallel()
	config := func(name string, value any) func(t *testing.T, s *redistest.Server) {
		return func(t *testing.T, s *redistest.Server) {
			t.Helper()
			if err := s.Client().Do(t.Context(), "CONFIG", "SET", name, value).Err(); err != nil {
				t.Fatal(err)
			}
		}
	}
	do := func(args ...any) func(t *testing.T, s *redistest.Server) {
		return func(t *testing.T, s *redistest.Server) {
			t.Helper()
			if err := s.Client().Do(t.Context(), args...).Err(); err != nil {
				t.Fatal(err)
			}
		}
	}
	tests := []struct {
		reason  string
		args    []string
		begin   func(*testing.T, *redistest.Server)
		end     func(*testing.T, *redistest.Server)
		denials bool // whether what only reads is still answered
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
				waitFor(t, 5*time.Second, func() error { return s.Client().Ping(t.Context()).Err() })
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
			r := newTestRedis(t, server, func(opt *RedisOptions) { opt.PoolSize, opt.Report = 1, seen.report })
			guard := &r.servers.(*single).server.guard
			room, full := hourly(100), hourly(1)
			full.Name = "full"
			if tc.begin != nil {
				decide(t, r, Atomic, full)
				tc.begin(t, server)
			}
			connections := int64(0)
			if tc.reason != "busy" { // else it does not tell
				connections = infoNumber(t, server, "stats", "total_connections_received")
			}
			for n := range lostAfter - 1 {
				if n > 0 && tc.denials {
					if d, err := r.Take(t.Context(), Request{Buckets: []Bucket{full}}, nil); err != nil || !d[0].Denied {
						t.Fatalf("decided %+v on a full bucket, error %v", d, err)
					}
				}
				_, err := r.Take(t.Context(), Request{Buckets: []Bucket{room}}, nil)
				checkError(t, err, server.Addr)
				if f := failureOf(t, err); f.reason != tc.reason {
					t.Fatalf("reason %q, want %q: %v", f.reason, tc.reason, err)
				}
			}
			want := []string(nil)
			if tc.reason == "clusterdown" {
				want = []string{"lapse clusterdown"}
			}
			if got := seen.take(); !slices.Equal(got, want) {
				t.Errorf("reported %q, want %q", got, want)
			}
			tc.end(t, server)
			waitFor(t, 5*time.Second, func() error {
				_, err := r.Take(t.Context(), Request{Buckets: []Bucket{room}}, nil)
				return err
			})
			more := infoNumber(t, server, "stats", "total_connections_received") - connections
			if tc.reason != "readonly" && tc.reason != "busy" && more > 1 {
				t.Errorf("%d more connections", more)
			}
			if want = nil; tc.reason != "clusterdown" {
				want = []string{"lapse " + tc.reason}
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

// TestFailuresToLogIn tests what an operator is told where a server does not
// let this process in: each is told apart, and no password is in any error.
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
			r := newTestRedis(t, server, func(opt *RedisOptions) {
				opt.Username, opt.Password = tc.user, tc.password
			})
			_, err := r.Take(t.Context(), Request{Buckets: []Bucket{hourly(100)}}, nil)
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
		if err := server.Client().Do(t.Context(), "CONFIG", "SET", "maxclients", 1).Err(); err != nil {
			t.Fatal(err)
		}
		r := newTestRedis(t, server, nil)
		_, err := r.Take(t.Context(), Request{Buckets: []Bucket{hourly(100)}}, nil)
		checkError(t, err, server.Addr)
		// The server closes behind its reply, which may get lost by that.
		if f := failureOf(t, err); f.reason != "maxclients" && f.reason != "closed" {
			t.Errorf("reason %q: %v", f.reason, err)
		}
	})
}

// guarded is a guard on a clock that the test moves.
type guarded struct {
	guard
	events
	t   testing.TB
	now time.Time
}

func newGuarded(t testing.TB) *guarded {
	g := &guarded{t: t, now: time.Unix(1_790_000_000, 0)}
	g.guard = newGuard("redis.test:6379", g.events.report)
	g.guard.now = func() time.Time { return g.now }
	return g
}

// fail lets n requests fail for the given reason.
func (g *guarded) fail(n int, reason string) (lost bool) {
	for range n {
		known, ok := replies[strings.ToUpper(reason)]
		if !ok {
			known = failure{reason: reason, counts: reason != "pool"}
		}
		lost = g.failure(&known)
	}
	return lost
}

// check checks whether requests are let through, and what was reported since it
// was called last.
func (g *guarded) check(open bool, events ...string) {
	g.t.Helper()
	probe, err := g.enter()
	if probe {
		g.leave()
		g.t.Error("a probe is let through")
	} else if open != (err == nil) {
		g.t.Errorf("let through: %t, error %v", err == nil, err)
	}
	if got := g.take(); !slices.Equal(got, events) {
		g.t.Errorf("reported %q, want %q", got, events)
	}
}

// probe lets the time of the next probe come and checks that there is one.
func (g *guarded) probe() {
	g.t.Helper()
	g.now = g.now.Add(probeEvery * 6 / 5)
	if probe, err := g.enter(); !probe || err != nil {
		g.t.Fatalf("probe %t, error %v", probe, err)
	}
}

// TestGuardOpens tests what makes a server count as lost: so many failures in a
// row, one more than come by chance, and no failure that tells nothing of the
// next request.
func TestGuardOpens(t *testing.T) {
	t.Run("five in a row", func(t *testing.T) {
		g := newGuarded(t)
		if g.fail(4, "timeout") {
			t.Error("lost by the fourth failure")
		}
		g.check(true)
		if !g.fail(1, "refused") {
			t.Error("not lost by the fifth failure")
		}
		if g.fail(3, "timeout") {
			t.Error("lost again while it is")
		}
		g.check(false, "lost refused")
		if _, err := g.enter(); failureOf(t, err).reason != "timeout" {
			t.Errorf("error %v, want the last", err)
		}
	})
	t.Run("a success between", func(t *testing.T) {
		g := newGuarded(t)
		for n := range 10 {
			g.fail(4, "timeout")
			g.success(false)
			want := []string{"lapse timeout"}
			if n > 0 {
				want = nil
			}
			g.check(true, want...)
		}
	})
	t.Run("uncounted", func(t *testing.T) {
		g := newGuarded(t)
		g.fail(4, "timeout")
		g.fail(100, "clusterdown")
		g.fail(100, "pool")
		g.fail(100, "moved")
		g.check(true, "lapse clusterdown", "lapse pool", "lapse moved")
		if !g.fail(1, "timeout") {
			t.Error("not lost by the fifth failure that counts")
		}
		g.check(false, "lost timeout")
	})
}

// TestGuardProbes tests how a lost server is asked again: by one request at a
// time, not more often than is told, and not in step with other processes.
func TestGuardProbes(t *testing.T) {
	g := newGuarded(t)
	g.fail(5, "timeout")
	var gaps []time.Duration
	last := g.now
	for range 40_000 {
		g.now = g.now.Add(time.Millisecond)
		probe, err := g.enter()
		if probe != (err == nil) {
			t.Fatalf("probe %t, error %v", probe, err)
		}
		if !probe {
			continue
		}
		if again, err := g.enter(); again || err == nil {
			t.Fatalf("two probes at once: probe %t, error %v", again, err)
		}
		gaps = append(gaps, g.now.Sub(last))
		last = g.now
		g.fail(1, "timeout")
		g.leave()
	}
	slices.Sort(gaps)
	least, most := gaps[0], gaps[len(gaps)-1]
	if least < probeEvery*4/5 || most > probeEvery*6/5+time.Millisecond {
		t.Errorf("%v to %v between probes", least, most)
	}
	if most-least < probeEvery/5 {
		t.Errorf("%v to %v between probes: in step", least, most)
	}

	// However long a probe takes it is the only one.
	g.probe()
	g.take()
	for range 100 {
		g.now = g.now.Add(time.Second)
		g.check(false)
	}
	g.leave()
	g.probe()
	g.leave()

	// There is a new connection: no need to wait.
	g.soon()
	if probe, err := g.enter(); !probe || err != nil {
		t.Errorf("with a new connection: probe %t, error %v", probe, err)
	}
	g.soon()
	if probe, err := g.enter(); probe || err == nil {
		t.Errorf("two probes at once: probe %t, error %v", probe, err)
	}
	g.leave()
}

// TestGuardCloses tests that the first success ends an outage, whoever had it,
// and that each outage is reported once when it begins and once when it ends.
func TestGuardCloses(t *testing.T) {
	g := newGuarded(t)
	for n := range 3 {
		g.fail(5, "timeout")
		g.fail(20, "refused")
		g.check(false, "lost timeout")
		g.now = g.now.Add(7 * time.Second)
		if n < 2 {
			g.probe()
			g.success(false)
			g.leave()
		} else {
			g.success(false) // one that was under way when the server was lost
		}
		back := g.all[0]
		want := 7 * time.Second
		if n < 2 {
			want += probeEvery * 6 / 5
		}
		if back.Lost != want || back.Server != "redis.test:6379" || back.Reason != "" || back.Err != nil {
			t.Errorf("reported %+v, want %v", back, want)
		}
		g.check(true, "back")
		if g.fail(4, "timeout") {
			t.Error("lost by the fourth failure after an outage")
		}
		g.check(true)
		g.success(false)
		g.take()
		g.check(true)
	}
}

// TestGuardOutageOfWrites tests failures of a server that still answers what
// only reads: a reply which has written nothing does not end such an outage, nor
// does a single one that has.
func TestGuardOutageOfWrites(t *testing.T) {
	for _, reason := range []string{"oom", "misconf", "noreplicas", "readonly"} {
		t.Run(reason, func(t *testing.T) {
			g := newGuarded(t)
			for range 4 {
				g.fail(1, reason)
				g.success(false)
			}
			g.check(true)
			g.fail(1, reason)
			g.check(false, "lost "+reason)
			g.success(false)
			g.check(false)
			g.probe()
			g.success(false)
			g.leave()
			g.check(false)
			g.success(true) // one that was under way when the server was lost
			g.check(false)
			g.probe()
			for n := range provenBy {
				if n > 0 { // the next need not wait
					if probe, err := g.enter(); !probe || err != nil {
						t.Fatalf("probe %t, error %v", probe, err)
					}
				}
				g.success(true)
				g.leave()
			}
			g.check(true, "back")

			g.fail(4, reason)
			g.success(true)
			g.check(true, "lapse "+reason)
		})
	}
}

// TestProbeOfNothing tests that a server which takes no writes is not taken for
// well because a key to prove it by was absent.
func TestProbeOfNothing(t *testing.T) {
	server := redistest.Start(t)
	r := newTestRedis(t, server, nil)
	b := hourly(100)
	mustTake(t, r, Request{Buckets: []Bucket{b}})
	for _, tc := range []struct {
		memory string
		key    string
		proves bool
		fails  bool
	}{
		{"0", r.keys.of(&b), true, false},
		{"0", "rl:absent", false, false},
		{"1", r.keys.of(&b), false, true},
		{"1", "rl:absent", false, false},
	} {
		if err := server.Client().ConfigSet(t.Context(), "maxmemory", tc.memory).Err(); err != nil {
			t.Fatal(err)
		}
		conn := hold(t, r.servers.(*single).server)
		reply, err := takeScript.probe(t.Context(), conn.Conn, tc.key, false)
		r.servers.(*single).server.put(conn)
		if proves := err == nil && reply[0] > 0; proves != tc.proves || err != nil != tc.fails {
			t.Errorf("maxmemory %s, %s: replied %v, error %v", tc.memory, tc.key, reply, err)
		}
	}
	if err := server.Client().ConfigSet(t.Context(), "maxmemory", "0").Err(); err != nil {
		t.Fatal(err)
	}
	if got := level(t, r, b); got != 1 {
		t.Errorf("the bucket holds %d after it was probed, want 1", got)
	}
}

// TestBackByDenials tests a server that was lost for not taking writes and takes
// them again, when all requests are to full buckets: that it denies them does
// not show that, but it is found out and nothing is charged for it.
func TestBackByDenials(t *testing.T) {
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
			r := newTestRedis(t, server, func(opt *RedisOptions) { opt.Report = seen.report })
			room, full := hourly(100), Bucket{Name: "full", Key: "k", Limit: Limit{7, time.Hour, 3}, Cost: 7}
			mustTake(t, r, Request{Buckets: []Bucket{full}})
			before, _ := storedState(t, server, r.keys.of(&full))
			// denied reports whether the server has denied a request to the full bucket.
			denied := func() bool {
				d, err := r.Take(t.Context(), Request{Buckets: []Bucket{full}}, nil)
				if err == nil && !d[0].Denied {
					t.Fatalf("decided %+v", d)
				}
				return err == nil
			}
			do := func(args []any) {
				t.Helper()
				if err := server.Client().Do(t.Context(), args...).Err(); err != nil {
					t.Fatal(err)
				}
			}

			do(tc.begin)
			for range lostAfter {
				_, err := r.Take(t.Context(), Request{Buckets: []Bucket{room}}, nil)
				checkError(t, err, server.Addr)
			}
			waitFor(t, 5*time.Second, func() error {
				if !denied() {
					return errors.New("no probe was denied")
				}
				return nil
			})
			if got, want := seen.take(), []string{"lost " + tc.reason}; !slices.Equal(got, want) {
				t.Errorf("reported %q, want %q", got, want)
			}

			do(tc.end)
			waitFor(t, 5*time.Second, func() error {
				denied()
				if guardOf(r).isLost() {
					return errors.New("still lost")
				}
				return nil
			})
			if got, want := seen.take(), []string{"back"}; !slices.Equal(got, want) {
				t.Errorf("reported %q, want %q", got, want)
			}
			if !denied() {
				t.Error("not decided by a server that is back")
			}
			if s, _ := storedState(t, server, r.keys.of(&full)); s != before {
				t.Errorf("stored %+v, want %+v as before", s, before)
			}
		})
	}
}

// TestGuardLapses tests that single failures are reported at most once a minute
// for each reason, however many there are.
func TestGuardLapses(t *testing.T) {
	g := newGuarded(t)
	began := g.now
	reported := map[string][]time.Duration{}
	for range 4 * 60 {
		g.fail(50, "pool")
		g.fail(4, "timeout")
		g.success(true)
		for _, event := range g.take() {
			reported[event] = append(reported[event], g.now.Sub(began))
		}
		g.now = g.now.Add(time.Second)
	}
	want := []time.Duration{0, time.Minute, 2 * time.Minute, 3 * time.Minute}
	for _, event := range []string{"lapse pool", "lapse timeout"} {
		if !slices.Equal(reported[event], want) {
			t.Errorf("%s reported at %v, want %v", event, reported[event], want)
		}
	}
	if len(reported) != 2 {
		t.Errorf("reported %v", reported)
	}
}

// TestGuardConcurrently puts a guard through random failures and successes of
// many requests at once: what it reports is one outage after the other.
func TestGuardConcurrently(t *testing.T) {
	var seen events
	var ms atomic.Int64
	g := newGuard("redis.test:6379", seen.report)
	g.now = func() time.Time { return time.UnixMilli(ms.Add(1)) }
	together(t, 16, func(i int) {
		random := rand.New(rand.NewPCG(7, uint64(i)))
		timeout, oom := failure{reason: "timeout", counts: true}, replies["OOM"]
		for range 3000 {
			probe, err := g.enter()
			switch n := random.IntN(20); {
			case err != nil && n < 19:
			case n < 12:
				g.failure(&timeout)
			case n < 14:
				g.failure(&oom)
			case n < 15:
				g.soon()
			default:
				g.success(n%2 == 0)
			}
			if probe {
				g.leave()
			}
		}
	})
	for range provenBy {
		ms.Add(2 * longestHold.Milliseconds())
		probe, _ := g.enter()
		g.success(true)
		if probe {
			g.leave()
		}
	}
	if probe, err := g.enter(); probe || err != nil {
		t.Errorf("after successes: probe %t, error %v", probe, err)
	}
	lost, outages := false, 0
	for _, ev := range seen.all {
		if ev.Kind == Lapse {
			continue
		}
		if (ev.Kind == Lost) == lost {
			t.Fatalf("reported %s, lost %t", eventWords(ev), lost)
		}
		if lost = ev.Kind == Lost; lost {
			outages++
		}
	}
	if lost || outages < 10 {
		t.Errorf("%d outages, lost %t in the end", outages, lost)
	}
}

// waitFor calls try until it returns no error.
func waitFor(t testing.TB, within time.Duration, try func() error) {
	t.Helper()
	for deadline := time.Now().Add(within); ; time.Sleep(5 * time.Millisecond) {
		err := try()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("after %v: %v", within, err)
		}
	}
}
