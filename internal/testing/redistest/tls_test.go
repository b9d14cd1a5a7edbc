package redistest

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"
)

// tlsConfig trusts the pool and presents the certificate in the two files, if
// given.
func tlsConfig(t *testing.T, pool *x509.CertPool, files ...string) *tls.Config {
	t.Helper()
	config := &tls.Config{RootCAs: pool}
	if len(files) > 0 {
		pair, err := tls.LoadX509KeyPair(files[0], files[1])
		if err != nil {
			t.Fatal(err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return config
}

// TestTLS guards that client and server accept each other's certificates, and that
// the intended ones are rejected.
func TestTLS(t *testing.T) {
	t.Parallel()
	a, other := NewAuthority(t), NewAuthority(t)
	issue := func(a *Authority, name string, change ...func(*x509.Certificate)) []string {
		cert, key := a.Issue(t, name, change...)
		return []string{cert, key}
	}
	with := func(files []string) []string {
		return []string{"--tls-cert-file", files[0], "--tls-key-file", files[1]}
	}

	const late, unknown = "expired certificate", "unknown certificate authority"

	for _, tc := range []struct {
		name           string
		clientCerts    bool
		server, client []string
		err            string // none when empty
	}{
		{name: "server's"},
		{name: "client's", clientCerts: true, client: issue(a, "client")},
		{name: "no client's", clientCerts: true, err: "certificate required"},
		{name: "client's of another", clientCerts: true, client: issue(other, "client"), err: unknown},
		{name: "client's expired", clientCerts: true, client: issue(a, "client", Expired), err: late},
		{name: "server's of another", server: with(issue(other, "localhost")), err: "unknown authority"},
		{name: "server's expired", server: with(issue(a, "localhost", Expired)), err: "has expired"},
		{name: "of another host", server: with(issue(a, "redis.example")), err: "cannot validate"},
		{name: "of an address", server: with(issue(a, "127.0.0.1"))},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := StartTLS(t, a, tc.clientCerts, tc.server...)
			err := ping(s.Addr, tlsConfig(t, a.Pool(), tc.client...))
			if got := fmt.Sprint(err); !strings.Contains(got, tc.err) || (err == nil) != (tc.err == "") {
				t.Errorf("got %s, want %q", got, tc.err)
			}
		})
	}
}

// ping expects one PONG. It reads even if it cannot write any more: a server that
// rejects a certificate says why and closes the connection, and a write may meet
// either.
func ping(addr string, config *tls.Config) error {
	conn, err := tls.Dial("tcp", addr, config)
	if err != nil {
		return err
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(5 * time.Second))
	_, written := io.WriteString(conn, "PING\r\n")
	answer, err := bufio.NewReader(conn).ReadString('\n')
	if err == nil && answer != "+PONG\r\n" {
		err = fmt.Errorf("answered %q to PING", answer)
	}
	return errors.Join(err, written)
}

// TestTLSPlainSocket guards that the server's own client needs no TLS, and that
// its port accepts nothing else.
func TestTLSPlainSocket(t *testing.T) {
	t.Parallel()
	s := StartTLS(t, NewAuthority(t), true, "--requirepass", "s3cret")
	if err := s.Client().Ping(context.Background()).Err(); err != nil {
		t.Error(err)
	}
	conn := dial(t, s.Addr)
	send(t, conn, "PING")
	expectClosed(t, conn)
}
