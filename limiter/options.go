package limiter

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter/internal/redisscript"
)

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
