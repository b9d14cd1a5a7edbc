package socket

import (
	"crypto/tls"
	"io"
	"net"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// wrapped is a connection that exposes the one beneath, as connections of the PROXY protocol do.
type wrapped struct{ net.Conn }

func (w wrapped) Raw() net.Conn { return w.Conn }

// opaque is a connection that hides the one beneath.
type opaque struct{ net.Conn }

// TestHungUp guards that a connection is open until its client closes it, only its sending
// side or with a reset, whether or not there is unread data.
func TestHungUp(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("needs Linux")
	}
	authority := redistest.NewAuthority(t)
	certFile, keyFile := authority.Issue(t, "localhost")
	cert, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		t.Fatal(err)
	}
	plain := func(c net.Conn) net.Conn { return c }
	halfClose := func(c net.Conn) { _ = c.(interface{ CloseWrite() error }).CloseWrite() }
	reset := func(c net.Conn) { _ = c.(*net.TCPConn).SetLinger(0); c.Close() }
	hangUp := func(c net.Conn) { c.Close() }
	for _, tc := range []struct {
		name, network  string
		client, server func(net.Conn) net.Conn
		sends          int
		hangUp         func(net.Conn)
		want           bool
	}{
		{"TCP", "tcp", plain, plain, 0, hangUp, true},
		{"unread data", "tcp", plain, plain, 10_000, hangUp, true},
		{"half-closed", "tcp", plain, plain, 10_000, halfClose, true},
		{"reset", "tcp", plain, plain, 10_000, reset, true},
		{"a Unix socket", "unix", plain, plain, 10_000, hangUp, true},
		{"the PROXY protocol", "tcp", plain, func(c net.Conn) net.Conn { return wrapped{c} }, 10_000, hangUp, true},
		{"an unknown wrapper", "tcp", plain, func(c net.Conn) net.Conn { return opaque{c} }, 10_000, hangUp, false},
		{
			"TLS", "tcp", func(c net.Conn) net.Conn {
				return tls.Client(c, &tls.Config{RootCAs: authority.Pool(), ServerName: "localhost"})
			},
			func(c net.Conn) net.Conn { return tls.Server(c, &tls.Config{Certificates: []tls.Certificate{cert}}) },
			10_000, hangUp, true,
		},
		{"closed by this side", "tcp", plain, func(c net.Conn) net.Conn { c.Close(); return c }, 0, func(net.Conn) {}, true},
		{"open", "tcp", plain, plain, 10_000, func(net.Conn) {}, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			address := "127.0.0.1:0"
			if tc.network == "unix" {
				address = filepath.Join(t.TempDir(), "s")
			}
			l, err := net.Listen(tc.network, address)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			dialed, err := net.Dial(tc.network, l.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer dialed.Close()
			accepted, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer accepted.Close()
			client, server := tc.client(dialed), tc.server(accepted)
			if tc.sends > 0 {
				sent := make(chan error, 1)
				go func() { _, err := client.Write(make([]byte, tc.sends)); sent <- err }()
				if _, err := io.ReadFull(server, make([]byte, 1)); err != nil {
					t.Fatal(err)
				}
				if err := <-sent; err != nil {
					t.Fatal(err)
				}
				if hungUp(server) {
					t.Fatal("an open connection is closed")
				}
			}
			tc.hangUp(client)
			got := hungUp(server)
			for end := time.Now().Add(5 * time.Second); !got && tc.want && time.Now().Before(end); got = hungUp(server) {
				time.Sleep(time.Millisecond)
			}
			if got != tc.want {
				t.Errorf("got %t, want %t", got, tc.want)
			}
		})
	}
}
