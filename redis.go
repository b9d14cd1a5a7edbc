package ratelimit

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
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
func (rd *Redis) options(ctx caddy.Context) (limiter.RedisOptions, error) {
	repl := caddy.NewReplacer()
	var opt limiter.RedisOptions
	form, err := rd.resolveAddresses(repl, &opt)
	if err != nil {
		return opt, err
	}
	for _, o := range []struct {
		option, text string
		set          *string
	}{
		{"username", rd.Username, &opt.Username},
		{"password", rd.Password, &opt.Password},
		{"master_name", rd.MasterName, &opt.MasterName},
		{"sentinel_username", rd.SentinelUsername, &opt.SentinelUsername},
		{"sentinel_password", rd.SentinelPassword, &opt.SentinelPassword},
		{"key_secret", rd.KeySecret, &opt.KeySecret},
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
		return opt, badOption("db", strconv.Itoa(rd.DB), "the number of a database, from 0")
	case rd.DB != 0 && opt.DB != 0 && rd.DB != opt.DB:
		return opt, badOption("db", strconv.Itoa(rd.DB), fmt.Sprintf("none, or %d as in the address", opt.DB))
	case rd.DB != 0:
		opt.DB = rd.DB
	}
	opt.Cluster = rd.Cluster || len(opt.Addresses) > 1 && rd.MasterName == ""
	if err := rd.contradiction(&opt, form); err != nil {
		return opt, err
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
		return opt, badOption("pool_size", strconv.Itoa(rd.PoolSize), "at least 1")
	}
	if rd.TLS != nil || form == formRediss {
		opt.TLS, err = rd.clientTLS(ctx)
	}
	return opt, err
}

// contradiction returns an error if options do not go together.
func (rd *Redis) contradiction(opt *limiter.RedisOptions, form form) error {
	const onSocket = "got it with a unix socket, want it with host:port or a URL of it"
	switch {
	case form == formUnix && rd.MasterName != "":
		return errors.New("master_name: " + onSocket)
	case form == formUnix && rd.Cluster:
		return errors.New("cluster: " + onSocket)
	case form == formUnix && rd.TLS != nil:
		return errors.New("tls: " + onSocket)
	case form == formUnix && len(opt.Addresses) > 1:
		return fmt.Errorf("addresses: got %d unix sockets, want one alone", len(opt.Addresses))
	case form == formRedis && rd.TLS != nil:
		return errors.New("tls: got it with a redis:// URL, want rediss:// or host:port")
	case rd.MasterName != "" && rd.Cluster:
		return errors.New("cluster: got it beside master_name, want one of them")
	case rd.MasterName == "" && rd.SentinelUsername != "":
		return errors.New("sentinel_username: got it without master_name, want both or username")
	case rd.MasterName == "" && rd.SentinelPassword != "":
		return errors.New("sentinel_password: got it without master_name, want both or password")
	case opt.Cluster && opt.DB != 0:
		return badOption("db", strconv.Itoa(opt.DB), "none with a cluster, which has only 0")
	}
	return nil
}

// clientTLS returns how to speak TLS.
func (rd *Redis) clientTLS(ctx caddy.Context) (*tls.Config, error) {
	config, err := cmp.Or(rd.TLS, new(reverseproxy.TLSConfig)).MakeTLSClientConfig(ctx)
	if err != nil {
		return nil, fmt.Errorf("tls: %w", err)
	}
	if config == nil { // all is as usual
		config = new(tls.Config)
	}
	config.MinVersion = tls.VersionTLS12
	if config.InsecureSkipVerify {
		ctx.Logger().Warn("tls_insecure_skip_verify: certificates of redis are not checked, " +
			"anyone on the way can read and change what is sent")
	}
	return config, nil
}

// form is how an address is written.
type form string

const (
	formHostPort form = "host:port"
	formUnix     form = "a unix socket"
	formRedis    form = "redis://"
	formRediss   form = "rediss://"
)

// address is what the address of a server stands for.
type address struct {
	form     form
	server   string // host:port or the path of a socket
	username string
	password string
	db       int
}

// resolveAddresses sets in opt what the addresses stand for, and returns the
// form they all have.
func (rd *Redis) resolveAddresses(repl *caddy.Replacer, opt *limiter.RedisOptions) (form, error) {
	if len(rd.Addresses) == 0 {
		return "", errors.New("addresses: got none, want at least one")
	}
	port := "6379"
	if rd.MasterName != "" {
		port = "26379"
	}
	var first form
	for i, text := range rd.Addresses {
		a, err := parseAddress(repl, text, port)
		if err != nil {
			return "", err
		}
		if i == 0 {
			first = a.form
		}
		login := a.username != "" || a.password != "" || a.db != 0
		switch {
		case a.form != first:
			return "", fmt.Errorf("addresses: got %s beside %s, want one form", a.form, first)
		case slices.Contains(opt.Addresses, a.server):
			return "", badOption("addresses", withoutPassword(text), "each server once")
		case rd.MasterName != "" && login:
			return "", badOption("address", withoutPassword(text),
				"a sentinel's without user, password and database, which are options of their own")
		case a.username != "" && opt.Username != "" && a.username != opt.Username:
			return "", errors.New("username: got several in the addresses, want one")
		case a.password != "" && opt.Password != "" && a.password != opt.Password:
			return "", errors.New("password: got several in the addresses, want one")
		}
		opt.Addresses = append(opt.Addresses, a.server)
		opt.Username = or(a.username, opt.Username)
		opt.Password = or(a.password, opt.Password)
		opt.DB = cmp.Or(a.db, opt.DB)
	}
	return first, nil
}

// parseAddress returns what the address of a server stands for; port is that of
// a URL without one. Its errors show neither what placeholders resolve to nor a
// password.
func parseAddress(repl *caddy.Replacer, text, port string) (address, error) {
	bad := badOption("address", withoutPassword(text),
		"host:port, the path of a unix socket, or a redis://, rediss:// or unix:// URL")
	resolved, err := resolveAddress(repl, text)
	if err != nil {
		return address{}, fmt.Errorf("address: %w", err)
	}
	switch {
	case strings.HasPrefix(resolved, "/"):
		return address{form: formUnix, server: resolved}, nil
	case !strings.Contains(resolved, "://"):
		if !isHostPort(resolved) {
			return address{}, bad
		}
		return address{form: formHostPort, server: resolved}, nil
	}
	u, err := url.Parse(resolved)
	if err != nil || u.RawQuery != "" || u.Fragment != "" {
		return address{}, bad
	}
	opt, err := redis.ParseURL(resolved)
	if err != nil || opt.DB < 0 {
		return address{}, bad
	}
	a := address{server: opt.Addr, username: opt.Username, password: opt.Password, db: opt.DB}
	switch u.Scheme {
	case "unix":
		a.form = formUnix
		if u.Host != "" {
			return address{}, bad
		}
		return a, nil
	case "redis":
		a.form = formRedis
	case "rediss":
		a.form = formRediss
	default:
		return address{}, bad
	}
	if host, _, _ := net.SplitHostPort(a.server); u.Port() == "" {
		a.server = net.JoinHostPort(host, port)
	}
	if !isHostPort(a.server) {
		return address{}, bad
	}
	return a, nil
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
