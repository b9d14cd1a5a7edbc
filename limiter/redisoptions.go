package limiter

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter/internal/redisscript"
)

// RedisOptions describes the Redis that keeps the buckets and how to reach it.
// Only Addresses are required.
type RedisOptions struct {
	// The host:port of each server, or the path of a unix socket. One address is
	// the server's own. Several belong to cluster servers, which know
	// the others. With MasterName they belong to sentinels.
	Addresses []string

	// Whether a single address belongs to a cluster server.
	Cluster bool

	// The name by which the sentinels know the server. They are queried for its
	// address whenever a connection is made.
	MasterName string

	// The user and password for logging in to the sentinels, if any.
	SentinelUsername, SentinelPassword string

	// The user and password for logging in to the servers, if any.
	Username, Password string

	// Returns the user and password for logging in to the servers, instead of Username
	// and Password, for those that change, such as tokens. It is called for each new
	// connection, also concurrently, and must return when ctx is over, after five
	// seconds at most. An error is reported as an [Event], so it must not show secrets.
	// May be nil.
	Credentials func(ctx context.Context) (username, password string, err error)

	// The number of the database, from 0 to RedisMaxDB. A cluster has only 0.
	DB int

	// The TLS configuration, for sentinels too; nil means no TLS.
	TLS *tls.Config

	// The prefix of every key, up to RedisMaxPrefix bytes. It must not contain
	// braces.
	KeyPrefix string

	// A secret for hashing keys, so that a person who sees the server's keys can't
	// find out whose they are by guessing. Empty means a plain digest.
	KeySecret string

	// Makes the connections to servers and sentinels, as [net.Dialer.DialContext] does; nil
	// means by such a Dialer. TLS is added to what it returns. It has some seconds, until
	// its ctx is done, and is called in the background, several times at once too.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)

	// The longest that Take waits for an answer, in total, from RedisMinTimeout to
	// RedisMaxTimeout; 0 means RedisDefaultTimeout. Connections are made in the background
	// and may take longer.
	Timeout time.Duration

	// The Memory that decides while a server is unavailable. It follows the levels
	// that the servers report, so it takes over where they stopped; and when they
	// are back, they take over where it stopped. Servers that replace others, or
	// that replace the Memory itself, are sent what it holds. If Fallback is nil,
	// Take returns an error instead.
	//
	// Fallback also bounds what the servers hold: when a Memory evicts a bucket,
	// it is removed from its server unless another process has charged it
	// meanwhile. So the servers hold no more buckets than the Memories of all
	// processes, plus those that drain within a second and those in flight. If
	// Fallback is nil, nothing bounds that, and ShareKeys have no effect.
	Fallback *Memory

	// Called with each event that an operator should know about, if not nil. Calls
	// are made one at a time, and requests do not wait for them. While a call
	// blocks, the latest 64 events are queued, and the next one says how many
	// before it were dropped.
	Report func(Event)
}

// RedisDefaultTimeout is the Timeout of RedisOptions that say none.
const RedisDefaultTimeout = 50 * time.Millisecond

// Limits of RedisOptions. They are far beyond what is useful, and far below what
// would not work.
const (
	RedisMaxAddresses = 128
	RedisMaxText      = 1 << 16 // bytes of a name, user, password or secret
	RedisMaxPrefix    = 128     // bytes of KeyPrefix
	RedisMaxDB        = 1<<16 - 1
	RedisMinTimeout   = time.Millisecond
	RedisMaxTimeout   = time.Minute
)

// Validate returns an error that names the first option that is missing or out of
// range, or nil. The error does not show users, passwords or secrets.
func (opt RedisOptions) Validate() error {
	switch n := len(opt.Addresses); {
	case n < 1 || n > RedisMaxAddresses:
		return fmt.Errorf("%d addresses: must be from 1 to %d", n, RedisMaxAddresses)
	case slices.ContainsFunc(opt.Addresses, func(a string) bool { return !isAddress(a) }):
		return errors.New("addresses: each must be host:port, or the path of a socket")
	case len(opt.KeyPrefix) > RedisMaxPrefix || strings.ContainsAny(opt.KeyPrefix, "{}"):
		return fmt.Errorf("key prefix: must have no braces and at most %d bytes", RedisMaxPrefix)
	case opt.DB < 0 || opt.DB > RedisMaxDB:
		return fmt.Errorf("database %d: must be from 0 to %d", opt.DB, RedisMaxDB)
	case opt.DB > 0 && opt.MasterName == "" && (opt.Cluster || n > 1):
		return fmt.Errorf("database %d: a cluster has only 0", opt.DB)
	case opt.Cluster && opt.MasterName != "":
		return errors.New("a cluster and the name of a server that sentinels know: must be one of them")
	case opt.Credentials != nil && (opt.Username != "" || opt.Password != ""):
		return errors.New("credentials, and a username or password: must be one of them")
	case opt.Timeout != 0 && (opt.Timeout < RedisMinTimeout || opt.Timeout > RedisMaxTimeout):
		return fmt.Errorf("timeout %v: must be from %v to %v", opt.Timeout, RedisMinTimeout, RedisMaxTimeout)
	}
	for _, text := range []struct{ name, text string }{
		{"master name", opt.MasterName},
		{"sentinel username", opt.SentinelUsername},
		{"sentinel password", opt.SentinelPassword},
		{"username", opt.Username},
		{"password", opt.Password},
		{"key secret", opt.KeySecret},
	} {
		if n := len(text.text); n > RedisMaxText {
			return fmt.Errorf("%s of %d bytes: must have at most %d", text.name, n, RedisMaxText)
		}
	}
	return nil
}

// isAddress reports whether a is a host and a port, or the path of a socket.
func isAddress(a string) bool {
	if strings.Contains(a, "/") {
		return !strings.Contains(a, "://")
	}
	host, port, err := net.SplitHostPort(a)
	return err == nil && host != "" && port != ""
}

// forScripts returns the options for the client that runs the script.
func (opt *RedisOptions) forScripts() redisscript.Options {
	options := redisscript.Options{
		Addresses:        opt.Addresses,
		Cluster:          opt.Cluster,
		MasterName:       opt.MasterName,
		SentinelUsername: opt.SentinelUsername,
		SentinelPassword: opt.SentinelPassword,
		Username:         opt.Username,
		Password:         opt.Password,
		Credentials:      opt.Credentials,
		DB:               opt.DB,
		TLS:              opt.TLS,
		Dial:             opt.Dial,
		Timeout:          opt.Timeout,
	}
	if report := opt.Report; report != nil {
		options.Report = func(e redisscript.Event) { report(newEvent(e)) }
	}
	return options
}

// location returns a digest that is equal for options with which the same buckets
// have the same keys in the same servers. It reveals nothing else.
func (opt *RedisOptions) location() string {
	digest := sha256.New()
	fmt.Fprintf(digest, "%q %t %q %d %q %q", slices.Sorted(slices.Values(opt.Addresses)),
		opt.Cluster, opt.MasterName, opt.DB, opt.KeyPrefix, opt.KeySecret)
	return string(digest.Sum(nil))
}
