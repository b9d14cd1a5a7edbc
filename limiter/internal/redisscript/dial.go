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

// dialFunc makes a connection, as [net.Dialer.DialContext] does.
type dialFunc = func(ctx context.Context, network, addr string) (net.Conn, error)

// dialer returns a function that dials within timeout: by dial unless that is nil, and with TLS
// on it unless config is nil.
func dialer(timeout time.Duration, dial dialFunc, config *tls.Config) dialFunc {
	if dial == nil {
		dial = redis.NewDialer(&redis.Options{DialTimeout: timeout})
	} else {
		dial = named(dial)
	}
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		if config == nil {
			return dial(ctx, network, addr)
		}
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

// named has the errors of dial, which is the user's, be errors of making a connection.
func named(dial dialFunc) dialFunc {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		if err == nil && conn == nil {
			err = errors.New("neither a connection nor an error")
		}
		if err != nil {
			err = &net.OpError{Op: "dial", Net: network, Err: err}
		}
		return conn, err
	}
}

// answersPlain reports whether the server answers a PING as one without TLS does, whether
// or not it wants a password. It is sent nothing secret.
func answersPlain(ctx context.Context, dial dialFunc, network, addr string) bool {
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
