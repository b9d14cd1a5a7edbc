package redistest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// MasterName is the sentinels' name for the master.
const MasterName = "buckets"

// Sentinel is a master and a replica that three sentinels watch. Two of them must
// agree that the master is down, which they notice after a second.
type Sentinel struct {
	// Their roles at the start. A failover swaps the roles but not these fields.
	Master, Replica *Server

	Sentinels []*Server
}

// StartSentinel runs a master, its replica and the sentinels until the test ends
// and returns when all know each other. args are for the master and the replica. A
// password among them is also given to the replica and the sentinels.
func StartSentinel(t testing.TB, args ...string) *Sentinel {
	t.Helper()
	return StartSentinelAuth(t, "", "", args...)
}

// StartSentinelAuth is StartSentinel, with sentinels that require a
// password and, unless it is empty, a username. These are for the sentinels alone:
// the arguments of the master and the replica are in args.
func StartSentinelAuth(t testing.TB, username, password string, args ...string) *Sentinel {
	t.Helper()
	return startSentinel(t, username, password, nil, args)
}

// StartSentinelTLS is StartSentinel, with servers and sentinels that
// accept only TLS and use it among themselves as well. See StartTLS for their
// certificates.
func StartSentinelTLS(t testing.TB, a *Authority, clientCerts bool, args ...string) *Sentinel {
	t.Helper()
	return startSentinel(t, "", "", append(tlsOptions(t, a, clientCerts), "--tls-replication", "yes"), args)
}

// startSentinel runs them all, with TLS if there are options for that.
func startSentinel(t testing.TB, username, password string, tls, args []string) *Sentinel {
	t.Helper()
	listen := "--port"
	if tls != nil {
		listen = "--tls-port"
	}
	secret := redisPassword(args)
	s := new(Sentinel)
	s.Master = startRewritable(t, "", secret, listen, slices.Concat(tls, args))
	host, port := hostPort(t, s.Master)
	s.Replica = startRewritable(t, fmt.Sprintf("replicaof %s %s", host, port), secret, listen, slices.Concat(tls, args))

	config := []string{
		fmt.Sprintf("sentinel monitor %s %s %s 2", MasterName, host, port),
		fmt.Sprintf("sentinel down-after-milliseconds %s 1000", MasterName),
		fmt.Sprintf("sentinel failover-timeout %s 3000", MasterName),
	}
	if secret != "" {
		config = append(config, fmt.Sprintf("sentinel auth-pass %s %q", MasterName, secret))
	}
	switch {
	case username != "":
		config = append(config,
			"user default off",
			fmt.Sprintf("user %s on >%s ~* &* +@all", username, password),
			fmt.Sprintf("sentinel sentinel-user %q", username),
			fmt.Sprintf("sentinel sentinel-pass %q", password))
	case password != "":
		config = append(config, fmt.Sprintf("requirepass %q", password))
	}
	for range 3 {
		s.Sentinels = append(s.Sentinels, start(t, username, password, func(dir, port string) []string {
			return append([]string{configFile(t, dir, config), "--sentinel", listen, port}, tls...)
		}))
	}
	s.WaitStable(t)
	return s
}

// startRewritable runs a server that keeps, over a restart, the configuration that
// the sentinels give it.
func startRewritable(t testing.TB, line, password, listen string, args []string) *Server {
	t.Helper()
	return start(t, "", password, func(dir, port string) []string {
		return append([]string{
			configFile(t, dir, []string{line}), listen, port,
			"--masterauth", password, "--repl-diskless-sync-delay", "0",
			"--repl-diskless-load", "swapdb", // without a file
		}, args...)
	})
}

// SentinelAddrs returns the addresses of the sentinels.
func (s *Sentinel) SentinelAddrs() []string { return addrs(s.Sentinels) }

// MasterAddr returns the address of the master according to the sentinels.
func (s *Sentinel) MasterAddr(t testing.TB) string {
	t.Helper()
	addr, err := masterAddr(running(t, s.Sentinels))
	if err != nil {
		t.Fatal(err)
	}
	return addr
}

// Failover makes the sentinels swap master and replica, both of which must be
// running, and returns when they have.
func (s *Sentinel) Failover(t testing.TB) {
	t.Helper()
	before := s.MasterAddr(t)
	// Sentinels that have not heard of the promotion within four periods undo it,
	// and the one that leads looks only once a second whether it is done.
	s.publishEvery(t, time.Second)
	do(t, running(t, s.Sentinels), "sentinel", "failover", MasterName)
	requested := time.Now()
	WaitFor(t, stableWithin, func() error {
		err := s.masterIsNot(before)
		if err != nil && time.Since(requested) > 8*time.Second {
			// Sentinels may abort a failover, on a busy machine for instance.
			requested = time.Now()
			_ = running(t, s.Sentinels).Client().Do(t.Context(), "sentinel", "failover", MasterName).Err()
		}
		return err
	})
	s.WaitStable(t)
	if s.MasterAddr(t) == before {
		t.Fatal("the sentinels have swapped master and replica back")
	}
}

// publishEvery sets how often the running sentinels report to each other what they
// know.
func (s *Sentinel) publishEvery(t testing.TB, period time.Duration) {
	t.Helper()
	for _, sentinel := range s.Sentinels {
		if sentinel.running() {
			do(t, sentinel, "sentinel", "debug", "publish-period", period.Milliseconds())
		}
	}
}

// WaitMasterNot returns when all running sentinels have a master other than the
// one at the address, as they soon do when that is down.
func (s *Sentinel) WaitMasterNot(t testing.TB, addr string) {
	t.Helper()
	WaitFor(t, stableWithin, func() error { return s.masterIsNot(addr) })
}

// masterIsNot returns an error if a running sentinel has the master at the address.
func (s *Sentinel) masterIsNot(addr string) error {
	for _, sentinel := range s.Sentinels {
		if !sentinel.running() {
			continue
		}
		now, err := masterAddr(sentinel)
		if err != nil {
			return err
		}
		if now == addr {
			return fmt.Errorf("sentinel %s still has the master %s", sentinel.Addr, addr)
		}
	}
	return nil
}

// WaitStable returns when both servers and all sentinels are running, know each
// other and agree on the master, and when its replica has caught up with it. A
// sentinel that was restarted is slow until then.
func (s *Sentinel) WaitStable(t testing.TB) {
	t.Helper()
	// What they do every ten seconds or two need not take that long here.
	s.publishEvery(t, 200*time.Millisecond)
	for _, sentinel := range s.Sentinels {
		if sentinel.running() {
			do(t, sentinel, "sentinel", "debug", "info-period", 200, "ask-period", 200, "tilt-period", 1000)
		}
	}
	WaitFor(t, stableWithin, func() error {
		var agreed string
		for _, sentinel := range s.Sentinels {
			master, err := s.view(sentinel)
			if err != nil {
				return fmt.Errorf("sentinel %s: %w", sentinel.Addr, err)
			}
			if agreed == "" {
				agreed = master
			}
			if master != agreed {
				return fmt.Errorf("sentinel %s has the master %s, not %s", sentinel.Addr, master, agreed)
			}
		}
		master, replica := s.Master, s.Replica
		if agreed == replica.Addr {
			master, replica = replica, master
		}
		_, port := hostPort(t, master)
		if err := replicationHas(master, "role:master", "connected_slaves:1", "state=online"); err != nil {
			return err
		}
		return replicationHas(replica, "role:slave", "master_port:"+port, "master_link_status:up")
	})
}

// view returns the address of a sentinel's master if the sentinel sees no problem.
func (s *Sentinel) view(sentinel *Server) (string, error) {
	if !sentinel.running() {
		return "", errors.New("is not running")
	}
	ctx := context.Background()
	master := redis.NewMapStringStringCmd(ctx, "sentinel", "master", MasterName)
	if err := sentinel.client.Process(ctx, master); err != nil {
		return "", err
	}
	for field, want := range map[string]string{
		"flags": "master", "num-slaves": "1", "num-other-sentinels": "2",
	} {
		if got := master.Val()[field]; got != want {
			return "", fmt.Errorf("%s of the master is %s, not %s", field, got, want)
		}
	}
	for kind, flags := range map[string]string{"replicas": "slave", "sentinels": "sentinel"} {
		others := redis.NewMapStringStringSliceCmd(ctx, "sentinel", kind, MasterName)
		if err := sentinel.client.Process(ctx, others); err != nil {
			return "", err
		}
		for _, other := range others.Val() {
			if got := other["flags"]; got != flags {
				return "", fmt.Errorf("one of the %s is %s", kind, got)
			}
			if status, found := other["master-link-status"]; found && status != "ok" {
				return "", fmt.Errorf("the replica's link is %s", status)
			}
		}
	}
	return net.JoinHostPort(master.Val()["ip"], master.Val()["port"]), nil
}

func masterAddr(sentinel *Server) (string, error) {
	ctx := context.Background()
	cmd := redis.NewStringSliceCmd(ctx, "sentinel", "get-master-addr-by-name", MasterName)
	if err := sentinel.client.Process(ctx, cmd); err != nil {
		return "", err
	}
	if len(cmd.Val()) != 2 {
		return "", fmt.Errorf("address %q", cmd.Val())
	}
	return net.JoinHostPort(cmd.Val()[0], cmd.Val()[1]), nil
}

// replicationHas returns an error if anything wanted is missing from a server's
// replication info.
func replicationHas(s *Server, want ...string) error {
	if !s.running() {
		return fmt.Errorf("%s is not running", s.Addr)
	}
	info, err := s.client.Info(context.Background(), "replication").Result()
	if err != nil {
		return err
	}
	for _, part := range want {
		if !strings.Contains(info, part) {
			return fmt.Errorf("no %s in %q of %s", part, info, s.Addr)
		}
	}
	return nil
}

// configFile writes a file of options to the directory and returns its path.
func configFile(t testing.TB, dir string, lines []string) string {
	t.Helper()
	path := filepath.Join(dir, "conf")
	if err := os.WriteFile(path, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}
