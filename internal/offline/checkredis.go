package offline

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/option"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// askRedis connects to Redis and advises on how it is set up.
func (c *checker) askRedis(ctx context.Context) {
	if c.Redis == nil {
		c.Notes = append(c.Notes, "The config has no Redis to ask.")
		return
	}
	opt, err := c.redisOptions()
	if err != nil {
		return // an error is that of Validate
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
		reply := server.InfoMap(ctx)
		err := reply.Err()
		if err == nil {
			info := make(map[string]string)
			for _, section := range reply.Val() {
				maps.Copy(info, section)
			}
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
	switch {
	case err == nil:
	case refused(err): // INFO, and perhaps what requests need too, which is tried
		c.Notes = append(c.Notes, "How Redis is set up was not checked: "+redisError(err)+".")
	default:
		c.advise("redis", "It was not checked: "+redisError(err)+".", "Run this where Redis can be reached, or without --redis.")
		return
	}
	if missing := c.missingRights(ctx, client, opt.KeyPrefix); missing != nil {
		c.advise("redis", "Its user may not call "+strings.ToUpper(strings.Join(missing, ", "))+", which the limits need.",
			"Give the user +"+strings.Join(missing, " +")+".")
		return
	}
	opt.Timeout = timeout
	c.tryRedis(ctx, opt)
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

// tryRedis charges buckets of its own in Redis, and empties them: one that drips, and if
// the config has such limits a log, for which the script calls further commands.
func (c *checker) tryRedis(ctx context.Context, opt limiter.RedisOptions) {
	opt.Fallback, opt.Report = nil, nil
	store, err := limiter.NewRedis(opt)
	if err != nil {
		c.advise("redis", "It was not tried: "+err.Error()+".", "Correct this option.")
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
		c.advise("redis", "A request could not be decided: "+err.Error()+".", remedy(err))
	case decisions[0].Denied || decisions[0].Remaining != 700:
		c.advise("redis", fmt.Sprintf("A bucket of 1000 that was charged 300 has room for %d more.", decisions[0].Remaining),
			"Use a server that "+option.Docs+"redis.md lists.")
	default:
		return true
	}
	return false
}

// hasLogs reports whether the config has limits with sliding logs.
func (c *checker) hasLogs() bool {
	for _, s := range c.Servers {
		for _, h := range s.handlers {
			if slices.ContainsFunc(h.inForce(), func(l *Limit) bool { return string(l.Limit.Algorithm) == "sliding_log" }) {
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

// remedy returns what to do about a request that a server could not decide.
func remedy(err error) string {
	var failed interface {
		error
		Reason() string
	}
	if errors.As(err, &failed) {
		switch failed.Reason() {
		case "moved":
			return "Add the option cluster."
		case "noauth", "wrongpass":
			return "Correct username and password."
		}
	}
	return "Use a server that " + option.Docs + "redis.md lists, and a user with the permissions there."
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
		{"NOPERM", "its user lacks the permission for INFO, which only this check needs"},
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
		c.advise(about, "It is a replica, which refuses writes, so each Caddy instance limits separately.",
			"Use the address of the primary server, or Sentinel with master_name.")
	}
}
