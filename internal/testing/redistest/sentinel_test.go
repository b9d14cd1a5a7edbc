package redistest

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/redis/go-redis/v9"
)

// TestSentinel guards that a requested failover, and one after a crash, make the
// replica the master and the old master its replica, and that restarted servers
// take up their role again.
func TestSentinel(t *testing.T) {
	t.Parallel()
	s := StartSentinel(t)
	s.Sentinels[0].Restart(t)
	s.Replica.Restart(t)
	s.WaitStable(t)
	if got := s.MasterAddr(t); got != s.Master.Addr {
		t.Errorf("the master is %s, not %s", got, s.Master.Addr)
	}
	s.Failover(t)
	if got := s.MasterAddr(t); got != s.Replica.Addr {
		t.Errorf("the master is %s, not %s", got, s.Replica.Addr)
	}
	s.Replica.Pause(t)
	s.WaitMasterNot(t, s.Replica.Addr)
	s.Replica.Resume(t)
	s.WaitStable(t)
	if got := s.MasterAddr(t); got != s.Master.Addr {
		t.Errorf("the master is %s, not %s", got, s.Master.Addr)
	}
	for _, server := range []*Server{s.Master, s.Replica} {
		if _, err := os.Stat(filepath.Join(filepath.Dir(server.Socket), "dump.rdb")); err == nil {
			t.Error("a server would not be empty after a restart")
		}
	}
}

// TestSentinelAuth guards that the sentinels require what they are configured to,
// and that they know the servers' password.
func TestSentinelAuth(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ name, username, password string }{
		{"password", "", "s3cret"},
		{"user", "watcher", "s3cret"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			s := StartSentinelAuth(t, tc.username, tc.password, "--requirepass", "0ther")
			for name, client := range map[string]struct {
				username, password string
				works              bool
			}{
				"right":    {tc.username, tc.password, true},
				"password": {"", tc.password, tc.username == ""},
				"nothing":  {"", "", false},
			} {
				c := redis.NewFailoverClient(&redis.FailoverOptions{
					MasterName: MasterName, SentinelAddrs: s.SentinelAddrs(), Password: "0ther",
					SentinelUsername: client.username, SentinelPassword: client.password,
					MaxRetries: -1,
				})
				err := c.Ping(context.Background()).Err()
				if (err == nil) != client.works {
					t.Errorf("%s: %v", name, err)
				}
				c.Close()
			}
		})
	}
}
