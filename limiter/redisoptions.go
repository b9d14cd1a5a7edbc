package limiter

import (
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter/internal/redisscript"
)

// RedisOptions says which Redis keeps the buckets, and how to reach it.
type RedisOptions struct {
	// The host:port of servers, or the path of one's unix socket. One is the
	// server itself. Several are servers of a cluster, which know the others.
	// With MasterName they are sentinels.
	Addresses []string

	// Whether a single address is that of a cluster's server.
	Cluster bool

	// The name by which sentinels know the server. They are asked for its
	// address whenever a connection is made.
	MasterName string

	// The user and password to log in to the sentinels with, if any.
	SentinelUsername, SentinelPassword string

	// The user and password to log in with, if any.
	Username, Password string

	// The number of the database. A cluster has only 0.
	DB int

	// How to speak TLS, to sentinels too; nil means not at all.
	TLS *tls.Config

	// What the name of every key begins with. It must not contain braces.
	KeyPrefix string

	// A secret to hash keys with, so that nobody who sees the server's keys can
	// find out whose they are by trying. Empty means a plain digest.
	KeySecret string

	// The most time that Take waits for an answer, everything included, from
	// RedisMinTimeout to RedisMaxTimeout. Connections are made outside of it.
	Timeout time.Duration

	// The most connections for requests to each server, up to RedisMaxPoolSize;
	// 0 means ten for each CPU.
	PoolSize int

	// Decides while a server can't be asked. It follows the levels that the
	// servers report, and so goes on where they stopped; when they are back they
	// go on where it stopped. Servers that keep the buckets instead of others, or
	// of the Memory itself, are told what it holds. With nil, Take returns an error
	// instead.
	//
	// It also bounds what the servers hold: what a Memory forgets is removed from
	// them, unless another process has charged it meanwhile. So they hold no more
	// than the Memories of all processes, what drains within a second and what is
	// on its way. With nil nothing bounds that, and ShareKeys do nothing.
	Fallback *Memory

	// Is told what an operator should know, if not nil: one event after the
	// other, and no request waits for it. While it takes long the latest 64
	// events wait, and the next says how many were dropped before it.
	Report func(Event)
}

// What RedisOptions may hold at most, or at least. It is far beyond what is of
// use, and far below what would not work.
const (
	RedisMaxAddresses = 128
	RedisMaxText      = 1 << 16 // bytes of a name, user, password or secret
	RedisMaxPrefix    = 128     // bytes of KeyPrefix
	RedisMaxDB        = 1<<16 - 1
	RedisMaxPoolSize  = 4096
	RedisMinTimeout   = time.Millisecond
	RedisMaxTimeout   = time.Minute
)

// Validate returns an error that says which option is missing or out of range,
// if one is. It does not show users, passwords and secrets.
func (opt RedisOptions) Validate() error {
	switch n := len(opt.Addresses); {
	case n < 1 || n > RedisMaxAddresses:
		return fmt.Errorf("%d addresses: must be from 1 to %d", n, RedisMaxAddresses)
	case slices.Contains(opt.Addresses, ""):
		return errors.New("addresses: one is empty")
	case len(opt.KeyPrefix) > RedisMaxPrefix || strings.ContainsAny(opt.KeyPrefix, "{}"):
		return fmt.Errorf("key prefix: must have no braces and at most %d bytes", RedisMaxPrefix)
	case opt.DB < 0 || opt.DB > RedisMaxDB:
		return fmt.Errorf("database %d: must be from 0 to %d", opt.DB, RedisMaxDB)
	case opt.DB > 0 && opt.MasterName == "" && (opt.Cluster || n > 1):
		return fmt.Errorf("database %d: a cluster has only 0", opt.DB)
	case opt.Cluster && opt.MasterName != "":
		return errors.New("a cluster and the name of a server that sentinels know: must be one of them")
	case opt.Timeout < RedisMinTimeout || opt.Timeout > RedisMaxTimeout:
		return fmt.Errorf("timeout %v: must be from %v to %v", opt.Timeout, RedisMinTimeout, RedisMaxTimeout)
	case opt.PoolSize < 0 || opt.PoolSize > RedisMaxPoolSize:
		return fmt.Errorf("pool size %d: must be from 1 to %d, or 0 for the default", opt.PoolSize, RedisMaxPoolSize)
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

// forScripts returns the options of the client that runs the scripts.
func (opt *RedisOptions) forScripts() redisscript.Options {
	options := redisscript.Options{
		Addresses:        opt.Addresses,
		Cluster:          opt.Cluster,
		MasterName:       opt.MasterName,
		SentinelUsername: opt.SentinelUsername,
		SentinelPassword: opt.SentinelPassword,
		Username:         opt.Username,
		Password:         opt.Password,
		DB:               opt.DB,
		TLS:              opt.TLS,
		Timeout:          opt.Timeout,
		PoolSize:         opt.PoolSize,
	}
	if report := opt.Report; report != nil {
		options.Report = func(e redisscript.Event) { report(newEvent(e)) }
	}
	return options
}

// place returns what is equal for options with which buckets have the same keys
// in the same servers, and tells nothing else.
func (opt *RedisOptions) place() string {
	digest := sha256.New()
	fmt.Fprintf(digest, "%q %t %q %d %q %q", slices.Sorted(slices.Values(opt.Addresses)),
		opt.Cluster, opt.MasterName, opt.DB, opt.KeyPrefix, opt.KeySecret)
	return string(digest.Sum(nil))
}
