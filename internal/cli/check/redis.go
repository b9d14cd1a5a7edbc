package check

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/offline"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// checkRedis connects to Redis, tries what requests need, and advises on how it is set up.
func (c *checker) checkRedis(ctx context.Context) {
	if c.Redis == nil {
		c.Notes = append(c.Notes, "The config has no Redis to check.")
		return
	}
	opt, err := c.RedisOptions()
	if err != nil {
		return // Validate returns the error
	}
	const timeout = 3 * time.Second
	opt.Timeout, opt.Fallback, opt.Report = timeout, nil, nil
	store, err := limiter.NewRedis(opt)
	if err != nil {
		c.advise("redis", "It was not tried: "+err.Error()+".", "Correct this option.")
		return
	}
	defer store.Close()
	// As requests do: an error has the words of the log.
	failed, reason, why := tryBuckets(ctx, store, c.hasLogs()), "", ""
	if failed != nil {
		reason, why = cause(failed)
	}
	if slices.Contains(unreachable, reason) {
		c.advise("redis", "It was not checked: "+why+".", remedy(reason, &opt))
		return
	}

	client := newClient(&opt)
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, 3*timeout)
	defer cancel()
	switch mode := serverMode(ctx, client); {
	case mode == "cluster" && !opt.Cluster: // whatever it has answered: other keys are elsewhere
		c.advise("redis", "It is a server of a cluster, which has only a part of the keys.", remedies["moved"])
		return
	case mode == "sentinel":
		c.advise("redis", "It is a sentinel, and not a server.", "Add master_name, with the name that the sentinels monitor the server by.")
		return
	}
	c.askInfo(ctx, client, opt.MasterName)
	if missing := c.missingRights(ctx, client, opt.KeyPrefix); missing != nil {
		c.advise("redis", "Its user may not call "+strings.ToUpper(strings.Join(missing, ", "))+", which the limits need.",
			"Give the user +"+strings.Join(missing, " +")+".")
		return
	}
	if failed != nil {
		c.advise("redis", "A request could not be decided: "+why+".", remedy(reason, &opt))
	}
}

// newClient returns a client for what the limits do not call.
func newClient(opt *limiter.RedisOptions) redis.UniversalClient {
	return redis.NewUniversalClient(&redis.UniversalOptions{
		Addrs: opt.Addresses, DB: opt.DB, Username: opt.Username, Password: opt.Password,
		MasterName: opt.MasterName, SentinelUsername: opt.SentinelUsername, SentinelPassword: opt.SentinelPassword,
		TLSConfig: opt.TLS, IsClusterMode: opt.Cluster,
		DialTimeout: opt.Timeout, ReadTimeout: opt.Timeout, WriteTimeout: opt.Timeout, MaxRetries: -1,
		DisableIdentity: true, MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
}

// serverMode returns the mode of a server: "standalone", "cluster" or "sentinel", or "" if it does not
// say. HELLO needs no permission.
func serverMode(ctx context.Context, client redis.UniversalClient) string {
	single, ok := client.(*redis.Client)
	if !ok {
		return ""
	}
	reply, err := single.Do(ctx, "HELLO").Result()
	if err != nil {
		return single.InfoMap(ctx, "server").Item("Server", "redis_mode")
	}
	switch reply := reply.(type) {
	case map[any]any:
		mode, _ := reply["mode"].(string)
		return mode
	case []any:
		for i, field := range reply[:max(0, len(reply)-1)] {
			if mode, ok := reply[i+1].(string); ok && field == "mode" {
				return mode
			}
		}
	}
	return ""
}

// askInfo advises on how the servers are set up, which sentinels know by a name unless it is "".
func (c *checker) askInfo(ctx context.Context, client redis.UniversalClient, masterName string) {
	var mu sync.Mutex
	infos := make(map[string]map[string]string) // by server
	collect := func(ctx context.Context, server *redis.Client) error {
		reply := server.InfoMap(ctx)
		err := reply.Err()
		if err == nil {
			info := make(map[string]string)
			for _, section := range reply.Val() {
				maps.Copy(info, section)
			}
			mu.Lock()
			infos[cmp.Or(masterName, server.Options().Addr)] = info
			mu.Unlock()
		}
		return err
	}
	var err error
	switch client := client.(type) {
	case *redis.ClusterClient:
		err = client.ForEachMaster(ctx, collect) // all at once
	case *redis.Client:
		err = collect(ctx, client)
	}
	for _, server := range slices.Sorted(maps.Keys(infos)) {
		c.Notes = append(c.Notes, "The server at "+server+" is "+serverName(infos[server])+".")
		c.checkInfo(server, infos[server])
	}
	switch {
	case err == nil:
	case redis.HasErrorPrefix(err, "NOPERM"):
		c.Notes = append(c.Notes, "How Redis is set up was not checked: its user lacks the permission for INFO (+info), which only this check needs.")
	default: // it may quote anything, and what requests need was tried
		c.Notes = append(c.Notes, "How Redis is set up was not checked: it did not answer INFO.")
	}
}

// tryRights is a script that returns which of the commands ARGV its user may not call. They
// change nothing but a key that is not there.
const tryRights = `
local arguments = {
  time = {}, get = {KEYS[1]}, set = {KEYS[1], '', 'PX', 1}, strlen = {KEYS[1]}, getrange = {KEYS[1], 0, 0},
  setrange = {KEYS[1], 0, ''}, pexpireat = {KEYS[1], 1},
}
local missing = {}
for _, command in ipairs(ARGV) do
  local reply = redis.pcall(command, (table.unpack or unpack)(arguments[command]))
  local err = type(reply) == 'table' and reply.err or ''
  local denied = string.find(err, "can't run", 1, true) or string.find(err, 'permissions to run', 1, true)
  if denied then table.insert(missing, command) end -- any other error is for tryRedis
end
return missing`

// missingRights returns the commands that the limits need and the user may not call. Other
// errors are left to tryRedis.
func (c *checker) missingRights(ctx context.Context, client redis.UniversalClient, prefix string) (missing []string) {
	mayNot := func(command string, err error) bool {
		return redis.HasErrorPrefix(err, "NOPERM") && strings.Contains(err.Error(), "'"+command+"'")
	}
	key, needed := prefix+"{"+rand.Text()+"}", []any{"get", "set", "time"}
	if c.hasLogs() {
		needed = append(needed, "getrange", "setrange", "strlen", "pexpireat")
	}
	if err := client.EvalSha(ctx, strings.Repeat("0", 40), []string{key}).Err(); mayNot("evalsha", err) {
		missing = append(missing, "evalsha")
	}
	rest, err := client.Eval(ctx, tryRights, []string{key}, needed...).StringSlice()
	if mayNot("eval", err) {
		missing = append(missing, "eval")
	}
	return append(missing, rest...)
}

// tryBuckets charges buckets of size 1000 in Redis, and empties them: one that drips, and with
// logs a log, for which the script calls further commands.
func tryBuckets(ctx context.Context, store *limiter.Redis, logs bool) error {
	buckets := []limiter.Bucket{{
		// With more drips than a number holds exactly, and soon empty anyway.
		Name: "check", Limit: limiter.Limit{Size: 1000, DripInterval: 10 * time.Millisecond, DripSize: 1},
	}}
	if logs {
		buckets = append(buckets, limiter.Bucket{Name: "check-log", Limit: limiter.SlidingLog(1000, 10*time.Second)})
	}
	for _, b := range buckets {
		b.Key, b.Cost = rand.Text(), 300
		decisions, err := store.Take(ctx, limiter.Request{Buckets: []limiter.Bucket{b}}, nil)
		if err == nil {
			_, err = store.Reset(ctx, b)
		}
		switch {
		case err != nil:
			return err
		case decisions[0].Denied || decisions[0].Remaining != 700:
			return fmt.Errorf("a bucket of 1000 that was charged 300 has room for %d more", decisions[0].Remaining)
		}
	}
	return nil
}

// hasLogs reports whether the config has limits with sliding logs.
func (c *checker) hasLogs() bool {
	return slices.ContainsFunc(c.Servers, func(s *offline.Server) bool {
		return slices.ContainsFunc(s.Limits(), func(l *offline.Limit) bool { return !l.Off && l.Limit.Algorithm == rule.SlidingLog })
	})
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

// cause returns why a server could not decide: in one word as in the log, or "", and in full.
func cause(err error) (reason, text string) {
	var failure interface {
		error
		Reason() string
	}
	if errors.As(err, &failure) {
		return failure.Reason(), failure.Error()
	}
	return "", err.Error()
}

// unreachable are the reasons for which a server can't be queried at all.
var unreachable = []string{"refused", "timeout", "closed", "reply", "dns", "tls", "noauth", "wrongpass", "credentials", "nomaster", "maxclients"}

// remedies are what to do about each reason.
var remedies = map[string]string{
	"moved":       "Add the option cluster.",
	"noauth":      "Correct username and password.",
	"wrongpass":   "Correct username and password.",
	"credentials": "Correct username and password.",
	"nomaster":    "Correct master_name: it is the name after \"sentinel monitor\" in the sentinels' config.",
	"dns":         "Correct the address.",
	"db":          "Correct db: it is lower than the number of databases in the server's config.",
	"tls":         "Correct the address, which has another port with TLS than without, or the options tls, tls_server_name, tls_trust_pool and tls_client_auth.",
	"reply":       "Correct the address. If the server wants TLS, add tls.",
	"closed":      "Correct the address. If the server wants TLS, add tls.",
	"refused":     "Run this where Redis can be reached, or without --redis.",
	"timeout":     "Run this where Redis can be reached, or without --redis.",
	"maxclients":  "Raise its maxclients.",
}

// remedy returns what to do about a request that a server with opt could not decide.
func remedy(reason string, opt *limiter.RedisOptions) string {
	listed := "Use a server that " + option.Docs + "redis.md lists, and a user with the permissions there."
	switch {
	case reason == "noperm":
		return "Give the user the permissions that " + option.Docs + "redis.md lists, and the keys ~" + opt.KeyPrefix + "*."
	case reason == "unsupported" && opt.Cluster: // it knows nothing of clusters
		return "If it is a single server, give its address alone, without the option cluster. " + listed
	case reason == "unsupported" && opt.MasterName != "":
		return "With master_name, give the addresses of sentinels, whose port is not the port of the server. " + listed
	default:
		return cmp.Or(remedies[reason], listed)
	}
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
		c.advise(about, "When its memory is full (maxmemory), it refuses all writes (maxmemory-policy noeviction), and each Caddy instance limits separately.",
			"Set maxmemory-policy volatile-lru: it then forgets unused buckets.")
	case strings.HasSuffix(policy, "-random"), strings.HasSuffix(policy, "-ttl"):
		c.advise(about, "When its memory is full (maxmemory), it forgets buckets that are in use (maxmemory-policy "+policy+"), and their clients start over.",
			"Set maxmemory-policy volatile-lru: it then forgets unused buckets.")
	}
	if most > 0 && used > most/10*9 {
		c.advise(about, fmt.Sprintf("It uses %d %% of its memory (maxmemory).", used*100/most),
			"Raise maxmemory, or give the limits a Redis of their own.")
	}
	if info["role"] == "slave" {
		c.advise(about, "It is a replica, which refuses writes, so each Caddy instance limits separately.",
			"Use the address of the primary server, or Sentinel with master_name.")
	}
}
