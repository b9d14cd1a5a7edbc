package limiter

import (
	"context"
	"crypto/hmac"
	"crypto/sha1"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"strconv"

	"github.com/redis/go-redis/v9"
)

//go:embed take.lua
var takeSource string

//go:embed giveback.lua
var giveBackSource string

// The scripts that run on the servers.
var (
	takeScript     = newScript(takeSource)
	giveBackScript = newScript(giveBackSource)
)

// script is a Lua script, and the name by which servers know it once they have
// run it.
type script struct{ source, sha string }

func newScript(source string) *script {
	sum := sha1.Sum([]byte(source))
	return &script{source, hex.EncodeToString(sum[:])}
}

// firstKey is where among a call's arguments the first key stands, behind the
// command, the script and the number of keys.
const firstKey = 3

// scriptCall is one call of a script. It may charge, so it must never be sent
// twice.
type scriptCall struct{ *redis.IntSliceCmd }

// NoRetry tells the client not to send the call again, whatever happens.
func (scriptCall) NoRetry() bool { return true }

// run runs the script on a server, by its name or, if the server does not know
// that, in full. With asking it is also served for a slot that is only on its
// way to the server.
func (s *script) run(ctx context.Context, conn *redis.Conn, args []any, asking bool) ([]int64, error) {
	reply, err := send(ctx, conn, "evalsha", s.sha, args, asking)
	if redis.HasErrorPrefix(err, "NOSCRIPT") {
		reply, err = send(ctx, conn, "eval", s.source, args, asking)
	}
	return reply, err
}

// send sends a call and returns what it replies.
func send(ctx context.Context, conn *redis.Conn, command, script string, args []any, asking bool) ([]int64, error) {
	args[0], args[1] = command, script
	call := scriptCall{redis.NewIntSliceCmd(ctx, args...)}
	if !asking {
		_ = conn.Process(ctx, call) // the call has the error too
		return call.Result()
	}
	ask := redis.NewStatusCmd(ctx, "asking")
	_, _ = conn.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		_ = pipe.Process(ctx, ask)
		return pipe.Process(ctx, call)
	})
	if err := ask.Err(); err != nil {
		return nil, err // and the call was sent elsewhere for that
	}
	return call.Result()
}

// keys names the buckets in a server.
type keys struct {
	prefix string
	secret []byte
}

// of returns the name under which b is kept: the prefix, in braces a digest of
// whose bucket it is, what it limits, and the numbers that must not mix, in base
// 36. The braces put all buckets of one key value into one slot of a cluster.
func (k keys) of(b *Bucket) string {
	var digest [sha256.Size]byte
	if len(k.secret) == 0 {
		digest = sha256.Sum256([]byte(b.Key))
	} else {
		mac := hmac.New(sha256.New, k.secret)
		mac.Write([]byte(b.Key))
		mac.Sum(digest[:0])
	}
	key := make([]byte, 0, len(k.prefix)+len(b.Name)+64)
	key = append(key, k.prefix...)
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

// takeArguments returns the call that decides req, see take.lua. The command
// and the script, its first two words, are left to be filled in. The buckets
// are at least at the levels that are owed, if any are.
func (k keys) takeArguments(req Request, owed []state) []any {
	args := make([]any, firstKey, firstKey+2+6*len(req.Buckets))
	args[firstKey-1] = len(req.Buckets)
	for i := range req.Buckets {
		args = append(args, k.of(&req.Buckets[i]))
	}
	args = append(args, len(req.Buckets), flag(req.Accounting == Each))
	for i, b := range req.Buckets {
		args = append(args, b.Limit.Size, b.Limit.rate(), b.Limit.DripSize, b.Cost)
		if owed == nil || owed[i] == (state{}) {
			args = append(args, flag(b.SizeVaries))
		} else {
			args = append(args, flag(b.SizeVaries)+2, owed[i].clear, owed[i].slack)
		}
	}
	return args
}

// giveBackArguments returns the call that takes b's cost out of it again, see
// giveback.lua.
func (k keys) giveBackArguments(b *Bucket) []any {
	return []any{nil, nil, 1, k.of(b), b.Limit.rate(), b.Limit.DripSize, b.Cost}
}

// flag returns how a script is told a truth.
func flag(b bool) int {
	if b {
		return 1
	}
	return 0
}

// outcomes appends what take.lua replied about req to dst, and reports whether
// a key held something that was no bucket.
func (req Request) outcomes(reply []int64, dst []outcome) (outcomes []outcome, corrupt bool, err error) {
	if len(reply) != 2*len(req.Buckets) {
		return dst, false, fmt.Errorf("reply of %d numbers to a request of %d buckets", len(reply), len(req.Buckets))
	}
	outcomes = dst
	for i := range req.Buckets {
		ahead, slack := reply[2*i], reply[2*i+1]
		if ahead < 0 {
			ahead, corrupt = -1-ahead, true
		}
		denied := slack < 0
		if denied {
			slack = -1 - slack
		}
		if ahead < 0 || ahead > horizon || slack >= req.Buckets[i].Limit.DripSize || ahead == 0 && slack > 0 {
			return dst, false, fmt.Errorf("reply of %d, %d is no bucket", reply[2*i], reply[2*i+1])
		}
		outcomes = append(outcomes, outcome{state: state{clear: ahead, slack: slack}, denied: denied})
	}
	return outcomes, corrupt, nil
}

// charged reports whether what take.lua replied shows that it has written: then
// no bucket denied.
func charged(reply []int64) bool {
	for i := 1; i < len(reply); i += 2 {
		if reply[i] < 0 {
			return false
		}
	}
	return len(reply) > 0
}
