package config

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"github.com/redis/go-redis/v9"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/redisaddr"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/placeholder"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Redis configures the Redis in which to keep the buckets: a single server, a
// cluster, or a server that is found through sentinels. Requires Redis 6.0 or later.
//
// Addresses, names, users, passwords, the secret, numbers and the TLS options may
// contain `{env.*}`, `{file.*}` and `{system.*}` placeholders. They are resolved
// when the config is loaded, and stored unresolved; it is an error if one is empty.
// A `{file.*}` in the user or password of a server is read again for each connection.
// A config loads whether or not Redis can be reached. Configs with equal settings
// share their connections.
type Redis struct {
	// The addresses of the servers, each as `host[:port]`, the path of a unix socket (also `unix//path`),
	// or a URL: `redis://[[user]:password@]host[:port][/db]`, `rediss://` for TLS, or `unix://`. Several
	// addresses are servers of a cluster, or with `master_name` sentinels. The default port is 6379, or
	// 26379 for sentinels.
	Addresses List `json:"addresses,omitempty" caddyfile:""`

	// The user to log in as.
	Username string `json:"username,omitempty"`

	// The password. A `{file.*}` in the password or the user is read again for each connection.
	Password string `json:"password,omitempty"`

	// The number of the database, up to 65535. Default: 0.
	DB Number `json:"db,omitempty"`

	// The single address is a server of a cluster; the others are discovered.
	Cluster bool `json:"cluster,omitempty"`

	// The addresses are sentinels, and this is the name under which they monitor the server.
	MasterName string `json:"master_name,omitempty"`

	// The user for the sentinels.
	SentinelUsername string `json:"sentinel_username,omitempty"`

	// The password for the sentinels.
	SentinelPassword string `json:"sentinel_password,omitempty"`

	// Use TLS, with sentinels too; any of these options of `reverse_proxy`'s transport turns it on.
	// `handshake_timeout` and `except_ports` have no effect.
	TLS *reverseproxy.TLSConfig `json:"tls,omitempty" caddyfile:"tls tls_client_auth tls_server_name tls_trust_pool tls_insecure_skip_verify"`

	// What the names of all keys in Redis begin with: at most 128 bytes, no braces. Give each Caddyfile on
	// one Redis its own prefix, or name the limits. Default: `rl:`.
	KeyPrefix string `json:"key_prefix,omitempty"`

	// A secret for hashing keys, the same on all instances. Default: none.
	KeySecret string `json:"key_secret,omitempty"`

	// How long a request may wait for Redis, in all blocks together, from `1ms` to `1m`. After that,
	// `on_error` applies. Default: `50ms`.
	Timeout Duration `json:"timeout,omitempty"`
}

// Check returns the error for what is wrong whatever the placeholders stand for, which may have
// no values where a Caddyfile is adapted.
func (rd *Redis) Check() error {
	known := *rd
	for _, text := range []*string{&known.Username, &known.Password, &known.MasterName, &known.SentinelUsername, &known.SentinelPassword, &known.KeySecret} {
		if option.IsTemplate(*text) {
			*text = "placeholder"
		}
	}
	for _, number := range []*string{(*string)(&known.DB), (*string)(&known.Timeout)} {
		if option.IsTemplate(*number) {
			*number = ""
		}
	}
	if !slices.ContainsFunc(rd.Addresses, option.IsTemplate) {
		_, _, err := known.withoutTLS(caddy.NewEmptyReplacer())
		return err
	}
	for _, text := range rd.Addresses {
		if !option.IsTemplate(text) {
			if _, err := parseAddress(caddy.NewEmptyReplacer(), text, "6379"); err != nil {
				return err
			}
		}
	}
	return nil
}

// Options returns the options of the store, and the TLS options that opt.TLS was
// made from, with all placeholders resolved. Errors show neither values of
// placeholders nor secrets.
func (rd *Redis) Options(ctx caddy.Context) (opt limiter.RedisOptions, tls *reverseproxy.TLSConfig, err error) {
	repl := caddy.NewReplacer()
	opt, form, err := rd.withoutTLS(repl)
	if err == nil && (rd.TLS != nil || form == formRediss) {
		if tls, err = resolveTLS(repl, cmp.Or(rd.TLS, new(reverseproxy.TLSConfig))); err == nil {
			opt.TLS, err = clientTLS(ctx, tls)
		}
	}
	return opt, tls, err
}

// withoutTLS returns the options of the store, without TLS, and the form of the addresses.
func (rd *Redis) withoutTLS(repl *caddy.Replacer) (opt limiter.RedisOptions, form addressForm, err error) {
	if form, err = rd.resolveAddresses(repl, &opt); err != nil {
		return opt, form, err
	}
	if err := rd.resolveStrings(repl, &opt); err != nil {
		return opt, form, err
	}
	if rd.DB != "" {
		inAddress := opt.DB
		if opt.DB, err = option.Parse(option.OnLoad, "db", string(rd.DB), ParseDB); err != nil {
			return opt, form, err
		}
		if inAddress != 0 && opt.DB != inAddress {
			return opt, form, option.Clash("db", string(rd.DB), fmt.Sprintf("%d in the address", inAddress), "use one of them")
		}
	}
	opt.Cluster = rd.Cluster || len(opt.Addresses) > 1 && rd.MasterName == ""
	if err := rd.checkConflicts(&opt, form); err != nil {
		return opt, form, err
	}
	opt.KeyPrefix = cmp.Or(rd.KeyPrefix, "rl:")
	if strings.ContainsAny(opt.KeyPrefix, "{}") || len(opt.KeyPrefix) > limiter.RedisMaxPrefix {
		return opt, form, option.Bad("key_prefix", rd.KeyPrefix,
			fmt.Sprintf("text without braces of at most %d bytes", limiter.RedisMaxPrefix))
	}
	if opt.Timeout, err = option.Parse(option.OnLoad, "timeout", cmp.Or(string(rd.Timeout), "50ms"), ParseTimeout); err != nil {
		return opt, form, err
	}
	return opt, form, err
}

// ParseDB parses a database number.
func ParseDB(text string) (int, string) {
	n, use := option.Integer(0, limiter.RedisMaxDB)(text)
	if use != "" {
		use = fmt.Sprintf("the number of a database, from 0 to %d", limiter.RedisMaxDB)
	}
	return n, use
}

// ParseTimeout parses how long a request may wait.
func ParseTimeout(text string) (time.Duration, string) {
	d, err := caddy.ParseDuration(text)
	if err != nil || d < limiter.RedisMinTimeout || d > limiter.RedisMaxTimeout {
		return 0, "a duration from 1ms to 1m, such as 50ms"
	}
	return d, ""
}

// resolveStrings sets the names, users, passwords and secrets in opt, with
// placeholders resolved.
func (rd *Redis) resolveStrings(repl *caddy.Replacer, opt *limiter.RedisOptions) error {
	for _, o := range []struct {
		name, text string
		set        *string
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
			return fmt.Errorf("%s: also in the address; use one of them", o.name)
		}
		var err error
		if *o.set, err = resolve(repl, o.text, nil); err != nil {
			return fmt.Errorf("%s: %w", o.name, err)
		}
		if n := len(*o.set); n > limiter.RedisMaxText {
			return fmt.Errorf("%s: %d bytes are too many; use at most %d", o.name, n, limiter.RedisMaxText)
		}
	}
	return nil
}

// errUnknown is the error of an unknown placeholder. It does not show its name,
// which may be part of a password that contains braces.
var errUnknown = errors.New(`a placeholder is unknown here; use {env.*}, {file.*} or {system.*}, or \{ and \} for braces`)

// resolve resolves the placeholders in text, none of which may be empty. The values
// are passed through escape unless it is nil.
func resolve(repl *caddy.Replacer, text string, escape func(string) string) (string, error) {
	return repl.ReplaceFunc(text, func(name string, v any) (any, error) {
		value := caddy.ToString(v)
		switch {
		case value == "" && placeholder.IsGlobal(name):
			return nil, fmt.Errorf("{%s} is empty; give it a value", name)
		case value == "":
			return nil, errUnknown
		case escape != nil:
			value = escape(value)
		}
		return value, nil
	})
}

// Rotates reports whether the user or password is read from a file, which may change. Then
// opt reads it again for each connection, and login identifies it, whatever it is now.
func (rd *Redis) Rotates(opt *limiter.RedisOptions) (login string) {
	texts := []string{rd.Username, rd.Password}
	for _, address := range rd.Addresses {
		if i := strings.LastIndexByte(address, '@'); i >= 0 {
			texts = append(texts, address[:i])
		}
	}
	if !slices.ContainsFunc(texts, readsFile) {
		return ""
	}
	opt.Username, opt.Password = "", ""
	opt.Credentials = func(context.Context) (username, password string, err error) { return rd.login() }
	return fmt.Sprintf("%q", texts)
}

// readsFile reports whether text has a placeholder for the text of a file.
func readsFile(text string) (reads bool) {
	_, _ = caddy.NewEmptyReplacer().ReplaceFunc(text, func(name string, _ any) (any, error) {
		reads = reads || strings.HasPrefix(name, filePrefix)
		return nil, nil
	})
	return reads
}

// filePrefix is how placeholders for the text of a file begin.
const filePrefix = "file."

// login returns the user and password that files have now. Caddy's own placeholder would
// log each attempt to read a file that is missing.
func (rd *Redis) login() (username, password string, err error) {
	var unread error
	repl := caddy.NewReplacer().WithoutFile()
	repl.Map(func(name string) (any, bool) {
		path, ok := strings.CutPrefix(name, filePrefix)
		if !ok {
			return nil, false
		}
		text, err := os.ReadFile(path)
		unread = cmp.Or(unread, err)
		return strings.TrimSuffix(strings.TrimSuffix(string(text), "\n"), "\r"), true
	})
	var opt limiter.RedisOptions
	of := Redis{Addresses: rd.Addresses, Username: rd.Username, Password: rd.Password}
	if _, err = of.resolveAddresses(repl, &opt); err == nil {
		err = of.resolveStrings(repl, &opt)
	}
	return opt.Username, opt.Password, cmp.Or(unread, err)
}

// sentinelPort is the port that sentinels have by default.
const sentinelPort = "26379"

// isNoSentinel reports whether a server has not their port.
func isNoSentinel(address string) bool { return !strings.HasSuffix(address, ":"+sentinelPort) }

// checkConflicts returns an error if options contradict each other.
func (rd *Redis) checkConflicts(opt *limiter.RedisOptions, form addressForm) error {
	const socket, others = "a unix socket", "use host:port, or a redis:// or rediss:// URL"
	switch {
	case form == formUnix && rd.MasterName != "":
		return option.Clash("master_name", "", socket, others)
	case form == formUnix && rd.Cluster:
		return option.Clash("cluster", "", socket, others)
	case form == formUnix && rd.TLS != nil:
		return option.Clash("tls", "", socket, "use host:port, or a rediss:// URL")
	case form == formUnix && len(opt.Addresses) > 1:
		return fmt.Errorf("addresses: %d unix sockets given; use one", len(opt.Addresses))
	case form == formRedis && rd.TLS != nil:
		return option.Clash("tls", "", "a redis:// URL", "use host:port, or a rediss:// URL")
	case rd.MasterName != "" && rd.Cluster:
		return option.Clash("cluster", "", "master_name", "use one of them")
	case len(opt.Addresses) > 1 && rd.MasterName == "" && !slices.ContainsFunc(opt.Addresses, isNoSentinel):
		return option.Errorf("master_name", "nothing given; use the name of the server, as %s is the port of sentinels", sentinelPort)
	case rd.MasterName == "" && rd.SentinelUsername != "":
		return option.Needs("sentinel_username", "", "master_name; for Redis itself use username")
	case rd.MasterName == "" && rd.SentinelPassword != "":
		return option.Needs("sentinel_password", "", "master_name; for Redis itself use password")
	case opt.Cluster && opt.DB != 0:
		return option.Clash("db", strconv.Itoa(opt.DB), "a cluster", "remove it: a cluster has only database 0")
	}
	return nil
}

// resolveTLS returns the TLS options with the placeholders in all strings resolved,
// including those of the CA pool module.
func resolveTLS(repl *caddy.Replacer, options *reverseproxy.TLSConfig) (*reverseproxy.TLSConfig, error) {
	text, err := json.Marshal(options)
	if err != nil {
		return nil, fmt.Errorf("tls: %w", err)
	}
	var tree any
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.UseNumber()
	if err := decoder.Decode(&tree); err != nil {
		return nil, fmt.Errorf("tls: %w", err)
	}
	if tree, err = resolveTree(repl, tree); err != nil {
		return nil, fmt.Errorf("tls: %w", err)
	}
	if text, err = json.Marshal(tree); err != nil {
		return nil, fmt.Errorf("tls: %w", err)
	}
	resolved := new(reverseproxy.TLSConfig)
	if err := json.Unmarshal(text, resolved); err != nil {
		return nil, fmt.Errorf("tls: %w", err)
	}
	return resolved, nil
}

// resolveTree resolves the placeholders in all strings of a JSON value.
func resolveTree(repl *caddy.Replacer, tree any) (_ any, err error) {
	switch value := tree.(type) {
	case string:
		return resolve(repl, value, nil)
	case []any:
		for i := range value {
			if value[i], err = resolveTree(repl, value[i]); err != nil {
				return nil, err
			}
		}
	case map[string]any:
		for name := range value {
			if value[name], err = resolveTree(repl, value[name]); err != nil {
				return nil, fmt.Errorf("%s: %w", name, err)
			}
		}
	}
	return tree, nil
}

// clientTLS returns the TLS config of the client.
func clientTLS(ctx caddy.Context, options *reverseproxy.TLSConfig) (*tls.Config, error) {
	config, err := options.MakeTLSClientConfig(ctx)
	if err != nil {
		return nil, fmt.Errorf("tls: %w", err)
	}
	if config == nil { // no option is set
		config = new(tls.Config)
	}
	config.MinVersion = tls.VersionTLS12
	return config, nil
}

// addressForm is the notation of an address.
type addressForm string

const (
	formHostPort addressForm = "host:port"
	formUnix     addressForm = "a unix socket"
	formRedis    addressForm = "redis://"
	formRediss   addressForm = "rediss://"
)

// address is a parsed address of a server.
type address struct {
	form     addressForm
	server   string // host:port or the path of a socket
	username string
	password string
	db       int
}

// resolveAddresses sets the servers, and the login and database of URLs, in opt. It
// returns the form of the addresses.
func (rd *Redis) resolveAddresses(repl *caddy.Replacer, opt *limiter.RedisOptions) (addressForm, error) {
	switch n := len(rd.Addresses); {
	case n == 0:
		return "", errors.New("addresses: none given; use at least one")
	case n > limiter.RedisMaxAddresses:
		return "", fmt.Errorf("addresses: %d are too many; use at most %d, as the others are discovered", n, limiter.RedisMaxAddresses)
	}
	port := "6379"
	if rd.MasterName != "" {
		port = "26379"
	}
	var first addressForm
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
			return "", fmt.Errorf("addresses: %s can't be combined with %s; use one form", a.form, first)
		case slices.Contains(opt.Addresses, a.server):
			return "", option.Bad("addresses", redisaddr.WithoutPassword(text), "each server once")
		case rd.MasterName != "" && login:
			return "", option.Bad("address", redisaddr.WithoutPassword(text),
				"the address of a sentinel without user, password and database, which are options of their own")
		case a.username != "" && opt.Username != "" && a.username != opt.Username:
			return "", errors.New("username: several in the addresses; use one")
		case a.password != "" && opt.Password != "" && a.password != opt.Password:
			return "", errors.New("password: several in the addresses; use one")
		}
		opt.Addresses = append(opt.Addresses, a.server)
		opt.Username = cmp.Or(a.username, opt.Username)
		opt.Password = cmp.Or(a.password, opt.Password)
		opt.DB = cmp.Or(a.db, opt.DB)
	}
	return first, nil
}

// parseAddress parses the address of a server. port is the default port.
// Errors show neither values of placeholders nor passwords.
func parseAddress(repl *caddy.Replacer, text, port string) (address, error) {
	bad := option.Bad("address", redisaddr.WithoutPassword(text),
		"a host, host:port, the path of a unix socket, or a redis://, rediss:// or unix:// URL")
	resolved, err := resolveAddress(repl, text)
	switch network, path, _, _ := caddy.SplitNetworkAddress(resolved); {
	case errors.Is(err, errUnknown):
		return address{}, option.Bad("address", redisaddr.WithoutPassword(text),
			"an address whose placeholders are {env.*}, {file.*} or {system.*}")
	case err != nil:
		return address{}, fmt.Errorf("address: %w", err)
	case network == "unix": // a Caddy network address: unix//path
		if !strings.HasPrefix(path, "/") {
			path, err = filepath.Abs(path)
		}
		if err != nil || resolved == "unix/" || strings.ContainsAny(path, "@|") || !redisaddr.IsSocket(path) {
			return address{}, bad
		}
		return address{form: formUnix, server: path}, nil
	case strings.HasPrefix(resolved, "/"):
		if !redisaddr.IsSocket(resolved) {
			return address{}, bad
		}
		return address{form: formUnix, server: resolved}, nil
	case !strings.Contains(resolved, "://"):
		// A number alone is a port or a database beside the host, as in localhost 6379.
		if strings.Trim(resolved, "0123456789") != "" && redisaddr.IsHostPort(resolved+":"+port) {
			resolved += ":" + port
		}
		if !redisaddr.IsHostPort(resolved) {
			return address{}, bad
		}
		return address{form: formHostPort, server: resolved}, nil
	}
	a, ok := parseURL(resolved, port)
	if !ok {
		return address{}, bad
	}
	return a, nil
}

// parseURL parses the address of a server that is a URL.
func parseURL(resolved, port string) (a address, ok bool) {
	u, err := url.Parse(resolved)
	if err != nil || u.RawQuery != "" || u.Fragment != "" {
		return a, false
	}
	opt, err := redis.ParseURL(resolved)
	if err != nil || opt.DB < 0 || opt.DB > limiter.RedisMaxDB {
		return a, false
	}
	a = address{server: opt.Addr, username: opt.Username, password: opt.Password, db: opt.DB}
	switch u.Scheme {
	case "unix":
		a.form = formUnix
		return a, u.Host == "" && redisaddr.IsSocket(a.server)
	case "redis":
		a.form = formRedis
	case "rediss":
		a.form = formRediss
	default:
		return a, false
	}
	if host, _, _ := net.SplitHostPort(a.server); u.Port() == "" {
		a.server = net.JoinHostPort(host, port)
	}
	// Without a host, the client would use localhost.
	return a, u.Hostname() != "" && redisaddr.IsHostPort(a.server)
}

// resolveAddress resolves the placeholders in an address. The values of those in a
// URL's user and password may have any characters.
func resolveAddress(repl *caddy.Replacer, address string) (string, error) {
	scheme, rest, isURL := strings.Cut(address, "://")
	i := strings.LastIndexByte(rest, '@')
	if !isURL || i < 0 {
		return resolve(repl, address, nil)
	}
	user, err := resolve(repl, rest[:i], func(text string) string {
		return strings.ReplaceAll(url.QueryEscape(text), "+", "%20")
	})
	if err != nil {
		return "", err
	}
	host, err := resolve(repl, rest[i:], nil)
	return scheme + "://" + user + host, err
}
