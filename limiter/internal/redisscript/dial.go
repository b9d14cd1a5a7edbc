package redisscript

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// plainAfter is how long a TLS handshake may take before it is tried whether the server
// answers without TLS. That takes less time than slowToConnect.
const plainAfter = slowToConnect / 2

// errPlain means that a server answers without TLS where TLS is configured. A plain Redis
// leaves a handshake unanswered, as it waits for the end of a line.
var errPlain = errors.New("tls: the server answers without TLS")

// dialer returns a function that dials within timeout, by TLS unless config is nil.
func dialer(timeout time.Duration, config *tls.Config) func(ctx context.Context, network, addr string) (net.Conn, error) {
	dial := redis.NewDialer(&redis.Options{DialTimeout: timeout})
	if config == nil {
		return dial
	}
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		conn, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		config := config
		if host, _, err := net.SplitHostPort(addr); err == nil && config.ServerName == "" {
			config = config.Clone()
			config.ServerName = host
		}
		var plain atomic.Bool
		silent := time.AfterFunc(plainAfter, func() {
			if answersPlain(ctx, dial, network, addr) {
				plain.Store(true)
				cancel()
			}
		})
		defer silent.Stop()
		secure := tls.Client(conn, config)
		if err := secure.HandshakeContext(ctx); err != nil {
			_ = conn.Close()
			if plain.Load() {
				err = errPlain
			}
			return nil, err
		}
		return secure, nil
	}
}

// answersPlain reports whether the server answers a PING as one without TLS does, whether
// or not it wants a password. It is sent nothing secret.
func answersPlain(ctx context.Context, dial func(ctx context.Context, network, addr string) (net.Conn, error), network, addr string) bool {
	conn, err := dial(ctx, network, addr)
	if err != nil {
		return false
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Now()) })()
	answer := make([]byte, 1)
	if _, err := conn.Write([]byte("PING\r\n")); err != nil {
		return false
	}
	_, err = conn.Read(answer)
	return err == nil && (answer[0] == '+' || answer[0] == '-') //nolint:gosec // it has an element
}
