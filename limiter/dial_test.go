package limiter

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// TestDial guards that all connections are made by RedisOptions.Dial, to servers of each kind:
// here their names resolve nowhere else, and what it returns is no socket.
func TestDial(t *testing.T) {
	for _, tc := range []struct {
		name  string
		setUp func(t *testing.T, opt *RedisOptions) (servers []string)
	}{
		{"a server", func(t *testing.T, _ *RedisOptions) []string {
			return []string{redistest.Start(t).Addr}
		}},
		{"a server with TLS", func(t *testing.T, opt *RedisOptions) []string {
			authority := redistest.NewAuthority(t)
			server := redistest.StartTLS(t, authority, true)
			opt.TLS = authority.ClientConfig(t)
			opt.TLS.ServerName, _, _ = net.SplitHostPort(server.Addr)
			return []string{server.Addr}
		}},
		{"sentinels", func(t *testing.T, opt *RedisOptions) []string {
			opt.MasterName = redistest.MasterName
			return redistest.StartSentinel(t).SentinelAddrs()
		}},
		{"a cluster", func(t *testing.T, opt *RedisOptions) []string {
			opt.Cluster = true
			return redistest.StartCluster(t, 2).Addrs()[:1]
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			r := newTestRedis(t, &redistest.Server{}, func(opt *RedisOptions) {
				servers := tc.setUp(t, opt)
				opt.Addresses = nil
				for _, addr := range servers {
					opt.Addresses = append(opt.Addresses, strings.Replace(addr, "127.0.0.1", "redis.invalid", 1))
				}
				opt.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
					return tunnel(ctx, network, strings.Replace(addr, "redis.invalid", "127.0.0.1", 1))
				}
			})
			for key := range 20 {
				b := hourly(1)
				b.Key = string(rune('a' + key))
				for i := range 2 {
					if d := mustTake(t, r, Request{Buckets: []Bucket{b}})[0]; d.By == DecidedByFallback || d.Denied != (i == 1) {
						t.Errorf("%+v", d)
					}
				}
			}
		})
	}
}

// tunnel returns a connection to a server that is no socket.
func tunnel(ctx context.Context, network, addr string) (net.Conn, error) {
	server, err := new(net.Dialer).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	here, there := net.Pipe()
	pass := func(to, from net.Conn) {
		_, _ = io.Copy(to, from)
		_ = to.Close()
		_ = from.Close()
	}
	go pass(server, there)
	go pass(there, server)
	return here, nil
}

// TestDialFails guards that no request waits longer than its timeout for a Dial that fails or
// hangs, that the reason is reported, and that a Dial which hangs is canceled.
func TestDialFails(t *testing.T) {
	var gaveUp atomic.Bool
	for name, dial := range map[string]func(ctx context.Context, network, addr string) (net.Conn, error){
		"no way":  func(context.Context, string, string) (net.Conn, error) { return nil, errors.New("no way") },
		"neither": func(context.Context, string, string) (net.Conn, error) { return nil, nil }, // a mistake
		"timeout": func(ctx context.Context, _, _ string) (net.Conn, error) {
			<-ctx.Done()
			gaveUp.Store(true)
			return nil, ctx.Err()
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			reported := make(chan Event, 64)
			r := mustNewRedis(t, RedisOptions{Addresses: []string{"a.invalid:1"}, Dial: dial, Fallback: NewMemory(), Report: func(e Event) { reported <- e }})
			t.Cleanup(func() { _ = r.Close() })
			deadline, sawEvent := time.After(20*time.Second), false
			for !sawEvent || name == "timeout" && !gaveUp.Load() {
				if d := mustTake(t, r, Request{Buckets: []Bucket{hourly(1)}})[0]; d.By != DecidedByFallback {
					t.Fatalf("%+v", d)
				}
				select {
				case e := <-reported:
					if !strings.Contains(e.Reason+e.Err.Error(), name) {
						t.Errorf("reported %+v", e)
					}
					sawEvent = true
				case <-deadline:
					t.Fatal("not reported")
				case <-time.After(time.Millisecond):
				}
			}
		})
	}
}

// TestStuckWhileConnecting guards that a Dial or Credentials that never returns is given up, and
// called again: what it waits for may have been mended.
func TestStuckWhileConnecting(t *testing.T) {
	server := redistest.Start(t)
	for name, stuck := range map[string]func(opt *RedisOptions, wait func()){
		"Dial": func(opt *RedisOptions, wait func()) {
			opt.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
				wait()
				return new(net.Dialer).DialContext(ctx, network, addr)
			}
		},
		"Credentials": func(opt *RedisOptions, wait func()) {
			opt.Credentials = func(context.Context) (username, password string, err error) {
				wait()
				return "", "", nil
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var calls atomic.Int64
			forever := make(chan struct{})
			t.Cleanup(func() { close(forever) })
			opt := RedisOptions{Addresses: []string{server.Addr}, Fallback: NewMemory()}
			stuck(&opt, func() {
				if calls.Add(1) == 1 {
					<-forever
				}
			})
			r := mustNewRedis(t, opt)
			t.Cleanup(func() { _ = r.Close() })
			redistest.WaitFor(t, 20*time.Second, func() error {
				if d := mustTake(t, r, Request{Buckets: []Bucket{hourly(1000)}})[0]; d.By != DecidedByRedis {
					return errors.New("Redis is not asked")
				}
				return nil
			})
		})
	}
}

// TestDefaultTimeout guards what a Redis has whose options say no timeout.
func TestDefaultTimeout(t *testing.T) {
	r := mustNewRedis(t, RedisOptions{Addresses: []string{"127.0.0.1:1"}})
	t.Cleanup(func() { _ = r.Close() })
	if r.timeout != RedisDefaultTimeout || RedisDefaultTimeout != 50*time.Millisecond {
		t.Errorf("waits for %v", r.timeout)
	}
}
