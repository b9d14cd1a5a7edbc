package ratelimit

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
	"github.com/spf13/cobra"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// checkCommand returns the command check.
func checkCommand() *cobra.Command {
	cmd := runs(&cobra.Command{
		Use:   "check",
		Short: "Advises on the limits of a config",
		Long: `
Looks for limits in a config that are valid, but hardly what was meant: those that
clients can get around, those that deny everybody behind a proxy together, those
that no request reaches, and others. For each it says what to change.

It does not need a running Caddy. With --redis it connects to the Redis of the
config, and also checks how that is set up.

The exit status is 2 if there is advice, and 0 if there is none.`,
		Example: "  caddy rate-limit check\n  caddy rate-limit check --config Caddyfile --redis",
		Args:    cobra.NoArgs,
	}, runCheck)
	addConfigFlags(cmd)
	cmd.Flags().Bool("redis", false, "Connect to Redis and check how it is set up")
	return cmd
}

// runCheck runs the command check.
func runCheck(cmd *cobra.Command, _ []string) error {
	d, err := loadConfigOf(cmd)
	if err != nil {
		return err
	}
	defer d.close()
	c := &checker{dryConfig: d, Advice: []advice{}, Notes: []string{}}
	c.check()
	if ask, _ := cmd.Flags().GetBool("redis"); ask {
		c.askRedis(cmd.Context())
	}
	if asJSON, _ := cmd.Flags().GetBool("json"); asJSON {
		err = printJSON(cmd.OutOrStdout(), c)
	} else {
		c.print(cmd.OutOrStdout())
	}
	if err == nil && len(c.Advice) > 0 {
		err = errFound
	}
	return err
}

// advice is something in a config that should be changed.
type advice struct {
	About   string `json:"about"` // a limit or a server
	Problem string `json:"problem"`
	Remedy  string `json:"remedy"`
}

// checker collects advice on a config.
type checker struct {
	*dryConfig `json:"-"`

	Advice []advice `json:"advice"`
	Notes  []string `json:"notes"` // what could not be checked
}

// advise adds advice, unless it was given before.
func (c *checker) advise(about, problem, remedy string) {
	if a := (advice{about, problem, remedy}); !slices.Contains(c.Advice, a) {
		c.Advice = append(c.Advice, a)
	}
}

// print prints the advice.
func (c *checker) print(w io.Writer) {
	for _, a := range c.Advice {
		fmt.Fprintln(w, wrapped(printable(a.About)+": "+printable(a.Problem)+" "+printable(a.Remedy))+"\n")
	}
	switch n := len(c.Advice); n {
	case 0:
		fmt.Fprintln(w, "No advice.")
	case 1:
		fmt.Fprintln(w, "1 piece of advice.")
	default:
		fmt.Fprintf(w, "%d pieces of advice.\n", n)
	}
	for _, note := range c.Notes {
		fmt.Fprintln(w, "Note: "+printable(note))
	}
}

// wrapped returns text in lines of up to 80 characters, indented but for the first.
func wrapped(text string) string {
	var b strings.Builder
	width := 0
	for i, word := range strings.Fields(text) {
		switch n := len([]rune(word)); {
		case i == 0:
			width = n
		case width+1+n > 80:
			b.WriteString("\n  ")
			width = 2 + n
		default:
			b.WriteByte(' ')
			width += 1 + n
		}
		b.WriteString(word)
	}
	return b.String()
}

// check collects what can be found out from the config alone.
func (c *checker) check() {
	c.Notes = append(c.Notes, c.warnings...)
	for _, s := range c.servers {
		for _, h := range s.handlers {
			for _, b := range h.buckets() {
				c.checkKey(s, h, b)
				c.checkNumbers(h, b)
			}
			if c.redis != nil && h.limits.onError == onErrorDeny {
				c.advise("server "+s.name, "With on_error deny, clients get status 503 for every limited request while Redis is unavailable.",
					"Unless that is meant, use on_error fallback: each Caddy instance then limits on its own until Redis is back.")
			}
		}
	}
	for i := 0; i < len(c.unreachable); i += 2 {
		c.advise("server "+c.unreachable[i], "No request reaches the limits after the handler "+c.unreachable[i+1]+".",
			"Move the "+ownName+" directive before it.")
	}
	limited := slices.ContainsFunc(c.servers, func(s *dryServer) bool { return len(s.handlers) > 0 })
	if !limited && len(c.Notes) == 0 {
		c.Notes = append(c.Notes, "The config has no limits.")
	}
	c.checkShared()
	c.checkRedisOptions()
}

// handlerBucket is a bucket of a handler.
type handlerBucket struct {
	*bucket

	// Whether it is for all requests that reach the handler, as neither its limit nor
	// one around that has matchers.
	always bool

	// Whether its limit or one around that has no name.
	unnamed bool
}

// buckets returns the buckets of the handler's limits that are not off.
func (h *dryHandler) buckets() (found []handlerBucket) {
	at := placedBucket{handler: h.limits}
	eachBucket(h.limits.Limits, at, func(b placedBucket) bool {
		always := len(b.limit.matchers) == 0
		for _, l := range b.around {
			always = always && len(l.matchers) == 0
		}
		if !b.off {
			found = append(found, handlerBucket{b.bucket, always, b.unnamed()})
		}
		return true
	})
	return found
}

// checkKey advises on a limit's key.
func (c *checker) checkKey(s *dryServer, h *dryHandler, b handlerBucket) {
	about := "limit " + b.path
	for _, f := range b.limit.key.flaws() {
		c.advise(about, f.problem, f.remedy)
	}
	if name := b.limit.key.user(); name != "" && !s.authenticated[h.limits] {
		c.advise(about, "Its key has {"+name+"}, and no authentication comes before it, so it is empty.",
			"Put both in a route block, the authentication first.")
	}
	if name := b.limit.key.chosen(); name != "" && !c.bounded(s, h) {
		problem := "which clients send as they like"
		switch {
		case strings.Contains(name, "uri.path"):
			problem += ", and can write in several ways, such as /./a and //a for /a"
		case strings.HasPrefix(name, "http.request.host"):
			problem += ", and can write in several ways, such as Example.com for example.com"
		}
		c.advise(about, "Its key has {"+name+"}, "+problem+", so they get a fresh bucket whenever they want one.",
			"Use a key that they can't choose, such as {client_ip} or {http.auth.user.id}, or add a limit by {client_ip} to the block, with a rate that several honest clients share.")
	}
	proxied := len(s.raw["trusted_proxies"]) > 0 || string(s.raw["trusted_proxies_unix"]) == "true"
	if proxied && b.limit.key.has(remoteHost) {
		c.advise(about, "Its key is the address of the connection, and the server has trusted proxies: all clients of a proxy share one bucket.",
			"Use {client_ip}, which is the address that the proxy reports.")
	}
	if !proxied && b.limit.key.has(clientIP) && len(s.listen) > 0 && !slices.ContainsFunc(s.listen, reachableFromOutside) {
		c.advise("server "+s.name, "It only listens on this host, and has no trusted proxies: if a proxy passes requests on to it, {client_ip} is the proxy's address, and all clients share one bucket.",
			"Set the global option servers > trusted_proxies, such as trusted_proxies static private_ranges, or trusted_proxies_unix for a socket.")
	}
}

// reachableFromOutside reports whether other hosts can connect to an address.
func reachableFromOutside(a caddy.NetworkAddress) bool {
	if a.IsUnixNetwork() {
		return false
	}
	ip, err := netip.ParseAddr(a.Host)
	return a.Host != "localhost" && (err != nil || !ip.IsLoopback())
}

// chosen returns the first placeholder of the key whose value clients can choose
// from arbitrarily many.
func (k *key) chosen() string {
	for i := range k.parts {
		name := k.parts[i].text
		if !k.parts[i].placeholder {
			continue
		}
		for _, prefix := range []string{"header.", "cookie.", "uri", "orig_uri", "body", "method", "orig_method", "host"} {
			if rest, ok := strings.CutPrefix(name, "http.request."); ok && strings.HasPrefix(rest, prefix) {
				return name
			}
		}
		if strings.HasPrefix(name, "http.regexp.") {
			return name
		}
	}
	return ""
}

// user returns the placeholder in the key that only has a value behind
// authentication, or "".
func (k *key) user() string {
	i := slices.IndexFunc(k.parts, func(p part) bool { return p.placeholder && strings.HasPrefix(p.text, "http.auth.user.") })
	if i < 0 {
		return ""
	}
	return k.parts[i].text
}

// has reports whether a placeholder is part of the key.
func (k *key) has(name string) bool {
	return slices.ContainsFunc(k.parts, func(p part) bool { return p.placeholder && p.text == name })
}

// bounded reports whether requests that reach h always meet a limit whose key and
// numbers clients can't choose.
func (c *checker) bounded(s *dryServer, h *dryHandler) bool {
	return slices.ContainsFunc(s.handlers, func(other *dryHandler) bool {
		for _, rt := range other.routes {
			if !slices.Contains(h.routes, rt) && len(rt.MatcherSets) > 0 {
				return false
			}
		}
		return slices.ContainsFunc(other.buckets(), func(b handlerBucket) bool { return b.always && b.limit.key.bounds() && !b.numbersChosen() })
	})
}

// limitNumber is a number of a limit that may depend on the request.
type limitNumber struct {
	option, template string
	identity         bool // each value has its own buckets
}

// numbers returns the numbers of a limit, by the options that set them.
func (b handlerBucket) numbers() []limitNumber {
	return []limitNumber{
		{b.rate.option, b.rate.template, true},
		{b.drip.option, b.drip.template, true},
		{b.size.option, b.size.template, false},
		{"factor", b.factor.template, false},
	}
}

// numbersChosen reports whether clients can choose any number of a limit.
func (b handlerBucket) numbersChosen() bool {
	return slices.ContainsFunc(b.numbers(), func(n limitNumber) bool { return clientControlled(n.template) != "" })
}

// checkNumbers advises on a limit's numbers.
func (c *checker) checkNumbers(h *dryHandler, b handlerBucket) {
	about := "limit " + b.path
	for _, n := range b.numbers() {
		problem := "so they choose their own limit"
		if n.identity {
			problem = "each of its values has its own buckets, so they get a fresh one whenever they want"
		}
		if name := clientControlled(n.template); name != "" {
			c.advise(about, fmt.Sprintf("Its %s has {%s}, which clients send as they like: %s.", n.option, name, problem),
				"Use a value that they can't choose, such as a variable that is set by vars or map for the user who is logged in.")
		}
	}
	if b.sizeIsDynamic() || !b.always || h.selective() {
		return
	}
	if size, _, err := b.effectiveSize(nil); err == nil && size == 1 {
		c.advise(about, "It is for all requests of the site, and its bucket holds a single one: browsers send several at once, for a page with its images and scripts, and all but the first are denied.",
			"Give it a size of what a page needs, or a matcher for the requests that it is meant for.")
	}
}

// selective reports whether routes select requests for the handler by more than
// the host.
func (h *dryHandler) selective() bool {
	for _, rt := range h.routes {
		if rt.Group != "" {
			return true
		}
		for _, set := range rt.MatcherSets {
			for _, m := range set {
				if _, ok := m.(*caddyhttp.MatchHost); !ok {
					return true
				}
			}
		}
	}
	return false
}

// checkShared advises on limits without a name, or within one, that share their buckets.
func (c *checker) checkShared() {
	first := make(map[string]*Limit)
	for _, s := range c.servers {
		for _, h := range s.handlers {
			for _, b := range h.buckets() {
				switch other := first[b.name]; {
				case !b.unnamed || b.limit == other:
				case other == nil:
					first[b.name] = b.limit
				default:
					c.advise("limit "+b.path, "Several limits without a name, or within one, have equal keys and numbers, so they share their buckets: requests to one site or path use up the limit of another.",
						"Unless that is meant, give each a name, as in "+ownName+" login.")
				}
			}
		}
	}
}

// checkRedisOptions advises on how the config uses Redis.
func (c *checker) checkRedisOptions() {
	opt, err := c.redisOptions()
	if err != nil { // it may lack only what the environment has where Caddy runs
		c.Notes = append(c.Notes, "Redis was not checked: "+err.Error()+".")
	}
	if err != nil || c.redis == nil {
		return
	}
	for _, address := range opt.Addresses {
		host, _, err := net.SplitHostPort(address)
		if err != nil || opt.Password != "" || opt.TLS != nil && len(opt.TLS.Certificates) > 0 {
			continue
		}
		if ip, err := netip.ParseAddr(host); host != "localhost" && (err != nil || !ip.IsLoopback()) {
			c.advise("redis", "It is used without a password: whoever can connect to "+address+" can empty and fill all buckets.",
				"Create a user with a password and the permissions that docs/redis.md lists, and set username and password.")
			return
		}
	}
}

// redisOptions returns the options of the configured Redis.
func (c *checker) redisOptions() (limiter.RedisOptions, error) {
	if c.redis == nil {
		return limiter.RedisOptions{}, nil
	}
	ctx, cancel := caddy.NewContext(c.app.ctx)
	defer cancel()
	opt, _, err := c.redis.options(ctx)
	return opt, err
}

// askRedis connects to Redis and advises on how it is set up.
func (c *checker) askRedis(ctx context.Context) {
	if c.redis == nil {
		c.Notes = append(c.Notes, "The config has no Redis to ask.")
		return
	}
	opt, err := c.redisOptions()
	if err != nil {
		return // there is a note on it
	}
	const timeout = 3 * time.Second
	client := redis.NewUniversalClient(&redis.UniversalOptions{
		Addrs: opt.Addresses, DB: opt.DB, Username: opt.Username, Password: opt.Password,
		MasterName: opt.MasterName, SentinelUsername: opt.SentinelUsername, SentinelPassword: opt.SentinelPassword,
		TLSConfig: opt.TLS, IsClusterMode: opt.Cluster,
		DialTimeout: timeout, ReadTimeout: timeout, WriteTimeout: timeout, MaxRetries: -1,
		DisableIdentity: true, MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, 3*timeout)
	defer cancel()
	ask := func(ctx context.Context, server *redis.Client) error {
		text, err := server.Info(ctx).Result()
		if err == nil {
			info := parseInfo(text)
			c.Notes = append(c.Notes, "The server at "+server.Options().Addr+" is "+serverName(info)+".")
			c.checkInfo(server.Options().Addr, info)
		}
		return err
	}
	switch client := client.(type) {
	case *redis.ClusterClient:
		err = client.ForEachMaster(ctx, ask)
	case *redis.Client:
		err = ask(ctx, client)
	}
	if err != nil {
		c.Notes = append(c.Notes, "Redis was not checked: "+redisError(err)+".")
	}
	if opt.Timeout = timeout; err == nil || refused(err) {
		c.tryRedis(ctx, opt)
	}
}

// tryRedis charges buckets of its own in Redis, and empties them: one that drips, and if
// the config has such limits a log, for which the script calls further commands.
func (c *checker) tryRedis(ctx context.Context, opt limiter.RedisOptions) {
	opt.Fallback, opt.Report = nil, nil
	store, err := limiter.NewRedis(opt)
	if err != nil {
		c.Notes = append(c.Notes, "Redis was not tried: "+err.Error()+".")
		return
	}
	defer store.Close()
	// With more drips than a key tells exactly, and soon empty by itself.
	b := limiter.Bucket{
		Name: "check", Key: rand.Text(), Cost: 300,
		Limit: limiter.Limit{Size: 1000, DripInterval: 10 * time.Millisecond, DripSize: 1},
	}
	if !c.tryBucket(ctx, store, b) || !c.hasLogs() {
		return
	}
	b.Name, b.Limit = "check-log", limiter.SlidingLog(1000, 10*time.Second)
	c.tryBucket(ctx, store, b)
}

// tryBucket charges a bucket of size 1000 and empties it. It reports whether that went
// well.
func (c *checker) tryBucket(ctx context.Context, store *limiter.Redis, b limiter.Bucket) bool {
	decisions, err := store.Take(ctx, limiter.Request{Buckets: []limiter.Bucket{b}}, nil)
	if err == nil {
		_, err = store.Reset(ctx, b)
	}
	switch {
	case err != nil:
		c.advise("redis", "A request could not be decided: "+err.Error()+".",
			"Use a server that docs/redis.md lists, and a user with the permissions there.")
	case decisions[0].Denied || decisions[0].Remaining != 700:
		c.advise("redis", fmt.Sprintf("A bucket of 1000 that was charged 300 has room for %d more.", decisions[0].Remaining),
			"Use a server that docs/redis.md lists.")
	default:
		return true
	}
	return false
}

// hasLogs reports whether the config has limits with sliding logs.
func (c *checker) hasLogs() bool {
	for _, s := range c.servers {
		for _, h := range s.handlers {
			if slices.ContainsFunc(h.buckets(), func(b handlerBucket) bool { return b.limit.algorithm == slidingLog }) {
				return true
			}
		}
	}
	return false
}

// serverName returns what a server calls itself in its reply to INFO.
func serverName(info map[string]string) string {
	for _, kind := range []struct{ field, name string }{
		{"valkey_version", "Valkey"}, {"dragonfly_version", "Dragonfly"}, {"garnet_version", "Garnet"}, {"redis_version", "Redis"},
	} {
		if version := info[kind.field]; version != "" {
			return kind.name + " " + version
		}
	}
	return "unknown"
}

// refused reports whether err is a server's reply.
func refused(err error) bool {
	reply := redis.Error(nil)
	return errors.As(err, &reply)
}

// redisError returns an error without what Redis may quote in it.
func redisError(err error) string {
	text := err.Error()
	for _, known := range []struct{ prefix, meaning string }{
		{"NOPERM", "its user may not use INFO, which is not needed otherwise"},
		{"NOAUTH", "it wants a password"},
		{"WRONGPASS", "it does not accept the username and password"},
	} {
		if strings.HasPrefix(text, known.prefix) {
			return known.meaning
		}
	}
	if timeout := net.Error(nil); errors.As(err, &timeout) && timeout.Timeout() {
		return "it did not answer in time"
	}
	return text
}

// parseInfo parses the reply to INFO.
func parseInfo(text string) map[string]string {
	info := make(map[string]string)
	for line := range strings.Lines(text) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), ":"); ok {
			info[name] = value
		}
	}
	return info
}

// checkInfo advises on how a Redis server is set up.
func (c *checker) checkInfo(address string, info map[string]string) {
	about := "redis " + address
	most, _ := strconv.ParseInt(info["maxmemory"], 10, 64)
	used, _ := strconv.ParseInt(info["used_memory"], 10, 64)
	policy := info["maxmemory_policy"]
	switch {
	case most == 0:
	case policy == "noeviction":
		c.advise(about, "When its memory is full (maxmemory), it refuses all writes (maxmemory-policy noeviction), and every Caddy instance limits on its own.",
			"Set maxmemory-policy volatile-lru: it then forgets buckets that nobody uses.")
	case strings.HasSuffix(policy, "-random"), strings.HasSuffix(policy, "-ttl"):
		c.advise(about, "When its memory is full (maxmemory), it forgets buckets that are in use (maxmemory-policy "+policy+"), and their clients start over.",
			"Set maxmemory-policy volatile-lru: it then forgets buckets that nobody uses.")
	}
	if most > 0 && used > most/10*9 {
		c.advise(about, fmt.Sprintf("It uses %d %% of its memory (maxmemory).", used*100/most),
			"Raise maxmemory, or give the limits a Redis of their own.")
	}
	if info["role"] == "slave" {
		c.advise(about, "It is a replica, which refuses writes, so every Caddy instance limits on its own.",
			"Use the address of the primary server, or Sentinel with master_name.")
	}
}
