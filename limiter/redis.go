package limiter

import (
	"context"
	"crypto/sha1"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

//go:embed take.lua
var takeScript string

// RedisOptions says which Redis keeps the buckets, and how to reach it.
type RedisOptions struct {
	// The network of the address, "tcp" (the default) or "unix".
	Network string

	// The server's host:port, or the path of its socket.
	Address string

	// The user and password to log in with, if any.
	Username, Password string

	// The number of the database.
	DB int

	// What the name of every key begins with. It must not contain braces.
	KeyPrefix string

	// The most time that Take waits for an answer, everything included. It must
	// be positive.
	Timeout time.Duration

	// The most connections to the server; 0 means ten for each CPU.
	PoolSize int
}

// Redis is a Store that keeps its buckets in a Redis server, so that any
// number of processes share them. A request is decided by one call of a
// script, on the server's clock.
type Redis struct {
	client  *redis.Client
	prefix  string
	timeout time.Duration
	script  string
	sha     string
}

// NewRedis returns a store in the given Redis. It does not connect yet.
func NewRedis(opt RedisOptions) *Redis {
	client := redis.NewClient(&redis.Options{
		Network:  opt.Network,
		Addr:     opt.Address,
		Username: opt.Username,
		Password: opt.Password,
		DB:       opt.DB,
		PoolSize: opt.PoolSize,

		// A script that charges must run at most once, whatever becomes of
		// its answer.
		MaxRetries: -1,

		// The context of a call bounds whatever it has to wait for.
		ContextTimeoutEnabled: true,
		DialTimeout:           opt.Timeout,
		ReadTimeout:           opt.Timeout,
		DialerRetries:         1,

		// One round trip to greet instead of up to four.
		DisableIdentity:          true,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
	return newRedis(client, opt, takeScript)
}

func newRedis(client *redis.Client, opt RedisOptions, script string) *Redis {
	sum := sha1.Sum([]byte(script))
	return &Redis{
		client:  client,
		prefix:  opt.KeyPrefix,
		timeout: opt.Timeout,
		script:  script,
		sha:     hex.EncodeToString(sum[:]),
	}
}

// Close closes all connections. Calls under way fail.
func (r *Redis) Close() error { return r.client.Close() }

// Take implements Store. It waits at most the store's timeout. When ctx is
// cancelled meanwhile the request is decided all the same: abandoning it would
// cost the connection and leave open whether it was charged.
func (r *Redis) Take(ctx context.Context, req Request, dst []Decision) ([]Decision, error) {
	if err := req.validate(); err != nil {
		return dst, err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.timeout)
	defer cancel()

	args := r.arguments(req)
	reply, err := r.run(ctx, "evalsha", r.sha, args)
	if redis.HasErrorPrefix(err, "NOSCRIPT") {
		reply, err = r.run(ctx, "eval", r.script, args)
	}
	if err != nil {
		return dst, r.explain(err)
	}
	return req.decisions(reply, dst)
}

// run runs the script once.
func (r *Redis) run(ctx context.Context, command, script string, args []any) ([]int64, error) {
	args[0], args[1] = command, script
	cmd := redis.NewIntSliceCmd(ctx, args...)
	cmd.SetFirstKeyPos(3)
	if err := r.client.Process(ctx, cmd); err != nil {
		return nil, err
	}
	return cmd.Val(), nil
}

// arguments returns the call that decides req, see take.lua. The command and
// the script, its first two words, are left to be filled in.
func (r *Redis) arguments(req Request) []any {
	args := make([]any, 3, 5+6*len(req.Buckets))
	args[2] = len(req.Buckets)
	for i := range req.Buckets {
		args = append(args, r.key(&req.Buckets[i]))
	}
	args = append(args, len(req.Buckets), flag(req.Accounting == Each))
	for _, b := range req.Buckets {
		args = append(args, b.Limit.Size, b.Limit.rate(), b.Limit.DripSize, b.Cost, flag(b.SizeVaries))
	}
	return args
}

// flag returns how the script is told a truth.
func flag(b bool) int {
	if b {
		return 1
	}
	return 0
}

// key returns the name under which Redis keeps b: the prefix, in braces a
// digest of whose bucket it is, what it limits, and the numbers that must not
// mix, in base 36. The braces put all buckets of one key value into one slot
// of a cluster.
func (r *Redis) key(b *Bucket) string {
	digest := sha256.Sum256([]byte(b.Key))
	key := make([]byte, 0, len(r.prefix)+len(b.Name)+64)
	key = append(key, r.prefix...)
	key = append(key, '{')
	key = base64.RawURLEncoding.AppendEncode(key, digest[:16])
	key = append(key, '}', ':')
	key = append(key, b.Name...)
	key = append(key, ':')
	if !b.SizeVaries {
		key = strconv.AppendInt(key, b.Limit.Size, 36)
	}
	key = append(key, '.')
	key = strconv.AppendInt(key, b.Limit.rate(), 36)
	key = append(key, '.')
	key = strconv.AppendInt(key, b.Limit.DripSize, 36)
	return string(key)
}

// decisions appends what the script replied about req to dst.
func (req Request) decisions(reply []int64, dst []Decision) ([]Decision, error) {
	if len(reply) != 2*len(req.Buckets) {
		return dst, fmt.Errorf("redis: reply of %d numbers to a request of %d buckets", len(reply), len(req.Buckets))
	}
	before := len(dst)
	for i := range req.Buckets {
		b, ahead, slack := &req.Buckets[i], reply[2*i], reply[2*i+1]
		denied := slack < 0
		if denied {
			slack = -1 - slack
		}
		if ahead < 0 || ahead > horizon || slack >= b.Limit.DripSize || ahead == 0 && slack > 0 {
			return dst[:before], fmt.Errorf("redis: reply of %d, %d is no bucket", ahead, slack)
		}
		dst = append(dst, b.Limit.decision(state{clear: ahead, slack: slack}, 0, b.Cost, denied))
	}
	return dst, nil
}

// explain returns err in words for whoever runs the server.
func (r *Redis) explain(err error) error {
	opt := r.client.Options()
	if timeout := net.Error(nil); errors.Is(err, context.DeadlineExceeded) || errors.As(err, &timeout) && timeout.Timeout() {
		return fmt.Errorf("redis at %s did not answer within %v: %w", opt.Addr, r.timeout, err)
	}
	return fmt.Errorf("redis at %s: %w", opt.Addr, err)
}
