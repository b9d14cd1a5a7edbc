package redisscript

import (
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// topology knows which server has which keys.
type topology interface {
	// one reports whether all keys are on one server.
	one() bool
	// of returns the server that has a key.
	of(end Deadline, key string) (*Server, error)
	// redirected returns the server that err, returned by from, redirects to, and
	// whether to send ASKING first because it does not have the slot yet. It
	// returns nil if err is not a redirection.
	redirected(from *Server, err error) (next *Server, asking bool)
	// connect starts connecting in the background.
	connect()
	// stats returns the state of each server.
	stats() []Stats
	close() error
}

// client returns the options for go-redis, which has one client for each kind of
// deployment.
func (opt *Options) client() *redis.UniversalOptions {
	dialTimeout := connectWithin / time.Duration(len(opt.Addresses)+1)
	return &redis.UniversalOptions{
		Addrs:            opt.Addresses,
		MasterName:       opt.MasterName,
		SentinelUsername: opt.SentinelUsername,
		SentinelPassword: opt.SentinelPassword,
		Username:         opt.Username,
		Password:         opt.Password,
		DB:               opt.DB,
		Dialer:           dialer(dialTimeout, opt.Dial, opt.TLS),

		CredentialsProviderContext: credentials(opt.Credentials),

		// More than are ever needed: only when that many dials have failed in a row
		// does the client itself stop dialing for a while.
		PoolSize: 64,

		// A script that changes something must run at most once, whether or not
		// its answer arrives.
		MaxRetries: -1,

		// The context of a call bounds everything that it waits for. These
		// timeouts are for work outside of calls, such as asking one sentinel, or
		// one cluster server, after the other.
		ContextTimeoutEnabled: true,
		DialTimeout:           dialTimeout,
		ReadTimeout:           max(time.Second, opt.Timeout),
		DialerRetries:         1,

		// One round trip for the handshake instead of up to four, and no pool
		// besides ours.
		Protocol:                 2,
		DisableIdentity:          true,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
		PipelinePoolSize:         -1,
	}
}

// single is one server, found by its address or by asking sentinels.
type single struct{ server *Server }

func newSingle(opt Options, script *Script, hooks Hooks) *single {
	name := strings.Join(opt.Addresses, ", ")
	var client *redis.Client
	if opt.MasterName == "" {
		client = redis.NewClient(opt.client().Simple())
	} else {
		name = opt.MasterName + " of the sentinels at " + name
		failover := opt.client().Failover()
		// Nothing else makes connections to sentinels.
		failover.Dialer = boundedDialer(failover.Dialer)
		client = redis.NewFailoverClient(failover)
	}
	s := newServer(name, client, &opt, script, hooks, false, func() {})
	s.master.Store(true)
	return &single{s}
}

func (s *single) one() bool                                 { return true }
func (s *single) of(Deadline, string) (*Server, error)      { return s.server, nil }
func (s *single) redirected(*Server, error) (*Server, bool) { return nil, false }
func (s *single) connect()                                  { s.server.connect(false) }
func (s *single) stats() []Stats                            { return []Stats{s.server.stats()} }
func (s *single) close() error                              { return s.server.close() }
