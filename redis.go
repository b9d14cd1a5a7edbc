package ratelimit

import (
	"context"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/redis/go-redis/v9"
	"go.uber.org/zap"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

func init() {
	redis.SetLogger(clientLogger{})
}

// clientLogger takes what the Redis client logs into Caddy's log, at level
// DEBUG: what matters to a request is in the error that it gets. There is one
// logger for all clients in the process, those of other modules too.
type clientLogger struct{}

// Printf implements the client's logging interface.
func (clientLogger) Printf(_ context.Context, format string, v ...any) {
	if log := caddy.Log(); log.Core().Enabled(zap.DebugLevel) {
		log.Named("redis").Debug(fmt.Sprintf(format, v...))
	}
}

// options returns the options as the store takes them, placeholders resolved.
// Errors do not show what they resolve to.
func (rd *Redis) options(repl *caddy.Replacer) (limiter.RedisOptions, error) {
	var opt limiter.RedisOptions
	if len(rd.Addresses) != 1 {
		return opt, fmt.Errorf("addresses: got %d, want exactly one", len(rd.Addresses))
	}
	opt, err := parseAddress(repl, rd.Addresses[0])
	if err != nil {
		return opt, err
	}
	for _, o := range []struct {
		option, text string
		set          *string
	}{
		{"username", rd.Username, &opt.Username},
		{"password", rd.Password, &opt.Password},
	} {
		if o.text == "" {
			continue
		}
		if *o.set != "" {
			return opt, fmt.Errorf("%s: got one in the address too, want it in one place", o.option)
		}
		if *o.set, err = repl.ReplaceOrErr(o.text, true, true); err != nil {
			return opt, fmt.Errorf("%s: %w", o.option, err)
		}
	}
	switch {
	case rd.DB < 0:
		return opt, badOption("db", fmt.Sprint(rd.DB), "the number of a database, from 0")
	case rd.DB != 0 && opt.DB != 0 && rd.DB != opt.DB:
		return opt, badOption("db", fmt.Sprint(rd.DB), fmt.Sprintf("none, or %d as in the address", opt.DB))
	case rd.DB != 0:
		opt.DB = rd.DB
	}
	opt.KeyPrefix = or(rd.KeyPrefix, "rl:")
	if strings.ContainsAny(opt.KeyPrefix, "{}") {
		return opt, badOption("key_prefix", rd.KeyPrefix, "text without braces")
	}
	opt.Timeout = time.Duration(rd.Timeout)
	if opt.Timeout == 0 {
		opt.Timeout = 50 * time.Millisecond
	}
	if opt.Timeout < time.Millisecond {
		return opt, badOption("timeout", opt.Timeout.String(), "at least 1ms")
	}
	if opt.PoolSize = rd.PoolSize; opt.PoolSize < 0 {
		return opt, badOption("pool_size", fmt.Sprint(rd.PoolSize), "at least 1")
	}
	return opt, nil
}

// parseAddress returns the options that the address of a server stands for. Its
// errors show neither what placeholders resolve to nor a password.
func parseAddress(repl *caddy.Replacer, address string) (limiter.RedisOptions, error) {
	bad := badOption("address", withoutPassword(address),
		"host:port, the path of a unix socket, or a redis:// or unix:// URL")
	resolved, err := resolveAddress(repl, address)
	if err != nil {
		return limiter.RedisOptions{}, fmt.Errorf("address: %w", err)
	}
	switch {
	case strings.HasPrefix(resolved, "/"):
		return limiter.RedisOptions{Network: "unix", Address: resolved}, nil
	case !strings.Contains(resolved, "://"):
		if !isHostPort(resolved) {
			return limiter.RedisOptions{}, bad
		}
		return limiter.RedisOptions{Network: "tcp", Address: resolved}, nil
	}
	u, err := url.Parse(resolved)
	if err != nil || u.Scheme != "redis" && u.Scheme != "unix" || u.RawQuery != "" || u.Fragment != "" {
		return limiter.RedisOptions{}, bad
	}
	opt, err := redis.ParseURL(resolved)
	if err != nil || opt.DB < 0 || u.Scheme == "unix" && u.Host != "" || opt.Network == "tcp" && !isHostPort(opt.Addr) {
		return limiter.RedisOptions{}, bad
	}
	return limiter.RedisOptions{
		Network:  opt.Network,
		Address:  opt.Addr,
		Username: opt.Username,
		Password: opt.Password,
		DB:       opt.DB,
	}, nil
}

// resolveAddress resolves the placeholders in an address. Those for a URL's
// user and password may stand for any characters.
func resolveAddress(repl *caddy.Replacer, address string) (string, error) {
	scheme, rest, isURL := strings.Cut(address, "://")
	i := strings.LastIndexByte(rest, '@')
	if !isURL || i < 0 {
		return repl.ReplaceOrErr(address, true, true)
	}
	user, err := repl.ReplaceFunc(rest[:i], func(name string, v any) (any, error) {
		text := caddy.ToString(v)
		if text == "" {
			return nil, fmt.Errorf("evaluated placeholder {%s} is empty", name)
		}
		return strings.ReplaceAll(url.QueryEscape(text), "+", "%20"), nil
	})
	if err != nil {
		return "", err
	}
	host, err := repl.ReplaceOrErr(rest[i:], true, true)
	return scheme + "://" + user + host, err
}

// isHostPort reports whether address is a host and a port to connect to.
func isHostPort(address string) bool {
	host, port, err := net.SplitHostPort(address)
	if err != nil || host == "" {
		return false
	}
	n, err := strconv.ParseUint(port, 10, 16)
	return err == nil && n > 0
}

// withoutPassword returns an address as it may be shown: nothing before an @,
// nothing of a query, and of a URL nothing that a forgotten @ makes look like a
// port.
func withoutPassword(address string) string {
	scheme, rest, isURL := strings.Cut(address, "://")
	if !isURL {
		scheme, rest = "", address
	} else {
		scheme += "://"
	}
	if i := strings.LastIndexByte(rest, '@'); i >= 0 {
		rest = "…" + rest[i:]
	} else if _, port, found := strings.Cut(rest, ":"); found && isURL && strings.Trim(port, "0123456789/") != "" {
		rest = "…"
	}
	if before, _, query := strings.Cut(rest, "?"); query {
		rest = before + "?…"
	}
	return scheme + rest
}
