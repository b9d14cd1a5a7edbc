package limiter

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/bucket"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// mustTake sends a request that must be decided.
func mustTake(t testing.TB, r *Redis, req Request) []Decision {
	t.Helper()
	d, err := r.Take(t.Context(), req, nil)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// numbered returns the bucket that only the n-th request has.
func numbered(n int64) Bucket {
	b := hourly(100)
	b.Key = fmt.Sprint(n)
	return b
}

// TestCancelledRequestsKeepConnections tests that clients which leave cost no connection.
func TestCancelledRequestsKeepConnections(t *testing.T) {
	server := redistest.Start(t)
	var seen events
	r := newTestRedis(t, server, func(opt *RedisOptions) { opt.Report = seen.report })
	b := hourly(100_000)
	mustTake(t, r, Request{Buckets: []Bucket{b}})
	before := server.InfoNumber(t, "stats", "total_connections_received")
	const requests = 500
	for n := range requests {
		ctx, cancel := context.WithCancel(t.Context())
		if n%2 == 0 {
			cancel()
		} else {
			time.AfterFunc(20*time.Microsecond, cancel)
		}
		if d, err := r.Take(ctx, Request{Buckets: []Bucket{b}}, nil); err != nil || d[0].Denied {
			t.Fatalf("decided %+v, error %v", d, err)
		}
		cancel()
	}
	if made := server.InfoNumber(t, "stats", "total_connections_received") - before; made > 0 {
		t.Errorf("%d connections made", made)
	}
	if got := unitsIn(t, r, b); got != requests+1 {
		t.Errorf("%d units after %d requests", got, requests+1)
	}
	seen.check(t)
}

// TestWarmFallback guards that an outage starts at the server's levels: what it
// admitted before it was killed is not admitted again, and all that was left is
// admitted.
func TestWarmFallback(t *testing.T) {
	t.Parallel()
	for _, accounting := range []Accounting{AccountingAtomic, AccountingEach} {
		for _, drip := range []int64{1, 3} {
			for _, several := range []bool{false, true} {
				name := fmt.Sprintf("%v,drip=%d,several=%t", accounting, drip, several)
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					server := redistest.Start(t)
					var all []*Redis
					for before := range int64(7) {
						r := newTestRedis(t, server, func(opt *RedisOptions) { opt.Fallback = NewMemory() })
						all = append(all, r)
						for range before {
							mustTake(t, r, warmRequest(before, accounting, drip, several))
						}
					}
					server.Kill()
					for before, r := range all {
						req := warmRequest(int64(before), accounting, drip, several)
						admitted := int64(0)
						for n := range int64(20) {
							d := mustTake(t, r, req)
							if d[0].Denied != (int64(before)+n >= 10) {
								t.Fatalf("%d before and %d after: decided %+v", before, n, d)
							}
							if !Denied(d) {
								admitted++
							}
						}
						if want := int64(10 - before); admitted != want {
							t.Errorf("admitted %d after %d, want %d", admitted, before, want)
						}
						if !several {
							continue
						}
						// The other bucket was charged for each admission or, with
						// AccountingEach, for each request.
						want := int64(10)
						if accounting == AccountingEach {
							want = int64(before) + 20
						}
						if got := unitsIn(t, r, req.Buckets[1]); got != want {
							t.Errorf("the other bucket holds %d, want %d", got, want)
						}
					}
				})
			}
		}
	}
}

// warmRequest returns the key-th request, on a bucket of size 10 and, with
// several, one of size 1000.
func warmRequest(key int64, accounting Accounting, drip int64, several bool) Request {
	b := Bucket{Name: "b", Key: fmt.Sprint(key), Limit: Limit{Size: 10, DripInterval: time.Hour, DripSize: drip}, Cost: 1}
	req := Request{Buckets: []Bucket{b}, Accounting: accounting}
	if several {
		b.Name, b.Limit.Size = "other", 1000
		req.Buckets = append(req.Buckets, b)
	}
	return req
}

// TestOutageAdmissionsReachServer guards the end of an outage: what was admitted
// here counts on the server when it is back, and is not admitted again.
func TestOutageAdmissionsReachServer(t *testing.T) {
	t.Parallel()
	for _, drip := range []int64{1, 3} {
		t.Run(fmt.Sprint(drip), func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t)
			r := newTestRedis(t, server, func(opt *RedisOptions) { opt.Fallback = NewMemory() })
			b := Bucket{Name: "b", Key: fmt.Sprint(drip), Limit: Limit{Size: 100, DripInterval: time.Hour, DripSize: drip}, Cost: 1}
			req := Request{Buckets: []Bucket{b}}
			for range 5 {
				mustTake(t, r, req)
			}
			server.Kill()
			for range 20 {
				mustTake(t, r, req)
			}
			server.Restart(t)
			direct := newTestRedis(t, server, nil)
			n := int64(25)
			redistest.WaitFor(t, 5*time.Second, func() error {
				mustTake(t, r, req)
				n++
				if got := unitsIn(t, direct, b); got != n {
					return fmt.Errorf("%d units in Redis, %d requests admitted", got, n)
				}
				return nil
			})
			// It counts once.
			for range 10 {
				mustTake(t, r, req)
				n++
			}
			if got := unitsIn(t, direct, b); got != n {
				t.Errorf("%d units in Redis, %d requests admitted", got, n)
			}
		})
	}
}

// TestNoFallback guards requests with NoFallback: during an outage they get an
// error and change nothing here; but what a server has decided on them counts for
// requests that use the fallback.
func TestNoFallback(t *testing.T) {
	server := redistest.Start(t)
	memory := NewMemory()
	r := newTestRedis(t, server, func(opt *RedisOptions) { opt.Fallback = memory })
	req := Request{Buckets: []Bucket{hourly(5)}, NoFallback: true}
	mustTake(t, r, req)
	server.Kill()
	for range manyFailures {
		d, err := r.Take(t.Context(), req, []Decision{{Size: 1234}})
		checkError(t, err, server.Addr)
		if len(d) != 1 || d[0].Size != 1234 {
			t.Errorf("decided %+v", d)
		}
	}
	req.NoFallback = false
	for n := range 5 {
		if d := mustTake(t, r, req); d[0].Denied != (n == 4) {
			t.Errorf("request %d: decided %+v", n, d)
		}
	}
}

// TestCorruptIsReported guards that keys which something else has written to are
// reported, once, and fail no requests.
func TestCorruptIsReported(t *testing.T) {
	server := redistest.Start(t)
	var seen events
	memory := NewMemory()
	r := newTestRedis(t, server, func(opt *RedisOptions) { opt.Report, opt.Fallback = seen.report, memory })
	b := hourly(5)
	key := r.keys.of(&b)
	admin := server.Client()
	for n, fill := range []func() error{
		func() error { return admin.Set(t.Context(), key, "garbage", 0).Err() },
		func() error { return admin.RPush(t.Context(), key, 1, 2).Err() },
		func() error { return admin.Set(t.Context(), key, serverTime(t, server)+2*bucket.Horizon, 0).Err() },
		func() error { return admin.Set(t.Context(), key, "", 0).Err() },
	} {
		redistest.Done(t, admin.Del(t.Context(), key))
		if err := fill(); err != nil {
			t.Fatal(err)
		}
		r.denyCache = newDenyCache(denySlots)
		for m := range 6 {
			if d := mustTake(t, r, Request{Buckets: []Bucket{b}}); d[0].Denied != (m == 5) {
				t.Errorf("request %d: decided %+v", m, d)
			}
		}
		if s, _ := storedState(t, server, key); s.Rest != 0 {
			t.Errorf("stored %+v", s)
		}
		want := []string(nil)
		if n == 0 {
			want = []string{"error corrupt"}
		}
		seen.check(t, want...)
	}
}

// TestRedisEmptyRequest guards that a request without buckets does not ask a
// server.
func TestRedisEmptyRequest(t *testing.T) {
	server := redistest.Start(t)
	checkDecidesNothing(t, newTestRedis(t, server, nil))
	server.Kill()
	checkDecidesNothing(t, newTestRedis(t, server, nil))
}

// checkDecidesNothing checks that a request without buckets is admitted.
func checkDecidesNothing(t testing.TB, r *Redis) {
	t.Helper()
	defer func() {
		if r := recover(); r != nil {
			t.Errorf("panic: %v", r)
		}
	}()
	kept := Decision{Size: 1234}
	d, err := r.Take(t.Context(), Request{}, []Decision{kept})
	if err != nil || len(d) != 1 || d[0] != kept {
		t.Errorf("decided %+v, error %v", d, err)
	}
}

// TestTLS guards a server that requires TLS: with the right authority and
// certificate it decides, otherwise requests are decided in this process.
func TestTLS(t *testing.T) {
	t.Parallel()
	good, other := redistest.NewAuthority(t), redistest.NewAuthority(t)
	tests := []struct {
		name        string
		clientCerts bool
		config      *tls.Config
		works       bool
	}{
		{"authority", false, &tls.Config{RootCAs: good.Pool()}, true},
		{"name", false, &tls.Config{RootCAs: good.Pool(), ServerName: "localhost"}, true},
		{"certificate", true, good.ClientConfig(t), true},
		{"not verified", false, &tls.Config{InsecureSkipVerify: true}, true},
		{"other authority", false, &tls.Config{RootCAs: other.Pool()}, false},
		{"other name", false, &tls.Config{RootCAs: good.Pool(), ServerName: "redis.test"}, false},
		{"no certificate", true, &tls.Config{RootCAs: good.Pool()}, false},
		{"no TLS", false, nil, false},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			server := redistest.StartTLS(t, good, tc.clientCerts)
			var seen events
			r := newTestRedis(t, server, func(opt *RedisOptions) {
				opt.TLS, opt.Fallback, opt.Report = tc.config, NewMemory(), seen.report
			})
			b := hourly(100)
			for range manyFailures {
				mustTake(t, r, Request{Buckets: []Bucket{b}})
			}
			n, err := server.Client().Exists(t.Context(), r.keys.of(&b)).Result()
			if err != nil || (n == 1) != tc.works {
				t.Errorf("%d buckets in Redis, error %v; works %t", n, err, tc.works)
			}
			if tc.works {
				seen.check(t)
			} else {
				redistest.WaitFor(t, 5*time.Second, func() error {
					if got := seen.take(); len(got) != 1 {
						return fmt.Errorf("reported %q, want one event", got)
					}
					return nil
				})
			}
			if got := unitsIn(t, r, b); got != manyFailures {
				t.Errorf("%d units", got)
			}
		})
	}
}

// TestCredentials guards that each connection logs in with what Credentials returns then, so
// that a password may change while the store is open, and that its error is reported.
func TestCredentials(t *testing.T) {
	t.Parallel()
	single := redistest.Start(t)
	cluster := redistest.StartCluster(t, 1)
	for name, server := range map[string]*redistest.Server{"server": single, "cluster": cluster.Nodes[0]} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			do := func(args ...any) {
				t.Helper()
				redistest.Done(t, server.Client().Do(t.Context(), args...))
			}
			var token atomic.Pointer[string]
			rotate := func(to string) {
				t.Helper()
				do("ACL", "SETUSER", "limiter", "reset", "on", ">"+to, "~*", "+@all")
				token.Store(&to)
			}
			rotate("first")
			var seen events
			r := newTestRedis(t, server, func(opt *RedisOptions) {
				opt.Cluster = name == "cluster"
				opt.Fallback, opt.Report = NewMemory(), seen.report
				opt.Credentials = func(context.Context) (username, password string, err error) {
					if password = *token.Load(); password == "" {
						err = errors.New("the token is not there")
					}
					return "limiter", password, err
				}
			})
			b := hourly(100)
			decidedByRedis := func() error {
				if by := mustTake(t, r, Request{Buckets: []Bucket{b}})[0].By; by != DecidedByRedis {
					return fmt.Errorf("decided by %v", by)
				}
				return nil
			}
			redistest.WaitFor(t, 5*time.Second, decidedByRedis)

			rotate("second")
			do("CLIENT", "KILL", "USER", "limiter")
			redistest.WaitFor(t, 5*time.Second, decidedByRedis)
			for _, e := range seen.take() {
				if strings.Contains(e, "wrongpass") {
					t.Errorf("reported %s", e)
				}
			}

			none := ""
			token.Store(&none)
			do("CLIENT", "KILL", "USER", "limiter")
			redistest.WaitFor(t, 5*time.Second, func() error {
				_ = decidedByRedis()
				if got := seen.take(); !slices.ContainsFunc(got, func(e string) bool { return strings.Contains(e, "credentials") }) {
					return fmt.Errorf("reported %q", got)
				}
				return nil
			})
			rotate("third")
			redistest.WaitFor(t, 5*time.Second, decidedByRedis)
		})
	}
}

// TestLoginExpires guards that a server which wants a login again, in the middle of a
// connection, gets one: on a new connection.
func TestLoginExpires(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	var expired atomic.Bool
	addr := redistest.StartFront(t, server, func(command []string) string {
		switch {
		case command[0] == "hello":
			expired.Store(false)
		case expired.Load():
			return "NOAUTH Authentication required."
		}
		return ""
	})
	r := newTestRedis(t, server, func(opt *RedisOptions) {
		opt.Addresses, opt.Fallback = []string{addr}, NewMemory()
	})
	b := hourly(100)
	for range 3 {
		redistest.WaitFor(t, 5*time.Second, func() error {
			if by := mustTake(t, r, Request{Buckets: []Bucket{b}})[0].By; by != DecidedByRedis {
				return fmt.Errorf("decided by %v", by)
			}
			return nil
		})
		expired.Store(true)
	}
}
