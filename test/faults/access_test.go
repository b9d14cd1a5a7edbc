package faults

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/filetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// accessFaults are faults in gaining access to Redis.
var accessFaults = []fault{
	{"12a", "the password is changed and all connections are closed; later the nodes learn it by a reload", rotated},
	{"12b", "the user has the rights that docs/redis.md names; then each is taken away in turn", rights},
	{"12b (sentinels)", "the users of sentinels and server have the rights that docs/redis.md names", sentinelRights},
	{"12b (cluster)", "the same in a cluster; then without +cluster|slots", clusterRights},
	{"13", "TLS: as it should be; another authority; another name; expired; a plain port; no client certificate", tlsKinds},
	{"13 (sentinels)", "TLS with client certificates, through a failover", sentinelTLS},
	{"13 (cluster)", "TLS with client certificates in a cluster", clusterTLS},
	{"14", "Redis is not there when Caddy starts; a black hole is", absent},
}

// minimal are the permissions that docs/redis.md lists.
var minimal = []string{"+evalsha", "+eval", "+get", "+set", "+time"}

// setUser makes the user rl as given, and closes its connections.
func setUser(tr *trial, s *redistest.Server, rules ...string) {
	tr.Helper()
	args := []any{"acl", "setuser", "rl"}
	for _, r := range rules {
		args = append(args, r)
	}
	redistest.Done(tr, s.Client().Do(tr.Context(), args...))
	if err := s.Client().Do(tr.Context(), "client", "kill", "user", "rl").Err(); err != nil &&
		!strings.Contains(err.Error(), "No such client") {
		tr.Fatal(err)
	}
}

func rotated(tr *trial) {
	const first, second = "canary-first-password", "canary-second-password"
	server := redistest.Start(tr)
	all := slices.Concat([]string{"reset", "on", "~rl:*", ">" + first}, minimal)
	setUser(tr, server, all...)
	dir, err := os.MkdirTemp("", "secret")
	if err != nil {
		tr.Fatal(err)
	}
	tr.Cleanup(func() { _ = os.RemoveAll(dir) })
	file := filepath.Join(dir, "password")
	write := func(text string) {
		filetest.Write(tr, file, []byte(text+"\n"))
	}
	write(first)
	nodes := startNodes(tr, 1, caddyfile(redisAt(server.Addr, "username rl", "password {file."+file+"}"), site))
	began := time.Now()
	l := startLoad(tr, nodes, 200)
	time.Sleep(time.Second)
	tr.is("nodes log in", len(nodes[0].events(began)) == 0 && decisions(tr, server) > 100)

	setUser(tr, server, "resetpass", ">"+second)
	from := time.Now()
	greetings := int(server.CommandStat(tr, "hello"))
	lasts := during(3*time.Second, 10*time.Second)
	time.Sleep(lasts)
	greetings = int(server.CommandStat(tr, "hello")) - greetings
	write(second)
	at := time.Now()
	before := decisions(tr, server)
	if err := nodes[0].reload(nodes[0].write); err != nil {
		tr.Fatal(err)
	}
	recovery := time.Since(at) + eventually(tr, "Redis decides again", func() bool {
		return decisions(tr, server) > before+5
	})
	time.Sleep(time.Second)
	requests := l.stop()
	cut := unanswered(requests) // by Caddy, when its listener is replaced
	most(tr, "5xx", strange(requests)-cut, 0)
	most(tr, "connections closed by Caddy", cut, 1)
	most(tr, "longest wait", percentile(requests, 1), timeout+slack)
	// Each attempt sends HELLO, and then tries the older way to log in.
	most(tr, "attempts to log in, a second", float64(greetings)/lasts.Seconds(), 10+perServer/lasts.Seconds())
	most(tr, "back after the reload", recovery, 2*time.Second)
	overAdmitted(tr, requests, 0, 0)
	found := reasons(nodes[0].events(from))
	tr.is("reason "+found, strings.Contains(found, "wrongpass"))
	log := nodes[0].log()
	tr.is("no password in the log", !strings.Contains(log, "canary"))
}

func rights(tr *trial) {
	server := redistest.Start(tr)
	base := []string{"reset", "on", "~rl:*", ">pw"}
	setUser(tr, server, slices.Concat(base, minimal)...)
	nodes := startNodes(tr, 1, caddyfile(redisAt(server.Addr, "username rl", "password pw"), site))
	l := startLoad(tr, nodes, 100)
	began := time.Now()
	time.Sleep(time.Second)
	tr.is("works as documented", len(nodes[0].events(began)) == 0 && decisions(tr, server) > 50)
	for _, right := range append(slices.Clone(minimal), "~rl:*") {
		rules := slices.DeleteFunc(slices.Concat(base, minimal), func(r string) bool { return r == right })
		at := time.Now()
		setUser(tr, server, rules...)
		if right == "+eval" {
			// Without it, everything works until the server has forgotten the
			// script.
			redistest.Done(tr, server.Client().ScriptFlush(tr.Context()))
		}
		eventually(tr, "noperm without "+right, func() bool {
			events := nodes[0].events(at)
			return count(events, lost) == 1 && reasons(events) == "noperm"
		})
		at = time.Now()
		setUser(tr, server, slices.Concat(base, minimal)...)
		eventually(tr, "back with "+right, func() bool { return count(nodes[0].events(at), back) == 1 })
	}
	requests := l.stop()
	most(tr, "5xx", strange(requests), 0)
	most(tr, "longest wait", percentile(requests, 1), timeout+slack)
	overAdmitted(tr, requests, 0, 0)
	tr.note("noperm without each of %s and ~rl:*", strings.Join(minimal, " "))
}

// works judges that all requests of a short load are decided by Redis.
func works(tr *trial, nodes []*node, servers ...*redistest.Server) {
	tr.Helper()
	nodes[0].get("first") // connects
	before := decisions(tr, servers...)
	l := startLoad(tr, nodes, 100)
	time.Sleep(500 * time.Millisecond)
	requests := l.stop()
	most(tr, "5xx", strange(requests), 0)
	decidedOnce(tr, "not decided by Redis", len(requests), decisions(tr, servers...)-before, 0, 4) // two of each limit, for a new connection
	overAdmitted(tr, requests, 0, 0)
}

func sentinelRights(tr *trial) {
	s := redistest.StartSentinelAuth(tr, "rl", "sentinel-pw")
	setUser(tr, s.Master, slices.Concat([]string{"reset", "on", "~rl:*", ">pw"}, minimal)...)
	for _, sentinel := range s.Sentinels {
		err := sentinel.Client().Do(tr.Context(), "acl", "setuser", "rl", "reset", "on", ">sentinel-pw", "&*",
			"+sentinel|get-master-addr-by-name", "+sentinel|sentinels", "+sentinel|replicas", "+subscribe", "+ping").Err()
		if err != nil {
			tr.Fatal(err)
		}
	}
	nodes := startNodes(tr, 1, caddyfile(redisAt(strings.Join(s.SentinelAddrs(), " "), "master_name "+redistest.MasterName,
		"sentinel_username rl", "sentinel_password sentinel-pw", "username rl", "password pw"), counted))
	works(tr, nodes, s.Master)
}

func clusterRights(tr *trial) {
	c := redistest.StartCluster(tr, 3)
	rules := slices.Concat([]string{"reset", "on", "~rl:*", ">pw", "+cluster|slots", "+asking"}, minimal)
	for _, s := range c.Nodes {
		setUser(tr, s, rules...)
	}
	config := caddyfile(redisAt(strings.Join(c.Addrs(), " "), "username rl", "password pw"), counted)
	nodes := startNodes(tr, 1, config)
	for i := range hotKeys {
		nodes[0].get(fmt.Sprintf("hot%d", i)) // connects to each
	}
	works(tr, nodes, c.Nodes...)

	for _, s := range c.Nodes {
		setUser(tr, s, "-cluster|slots")
	}
	began := time.Now()
	nodes = startNodes(tr, 1, config)
	l := startLoad(tr, nodes, 100)
	eventually(tr, "noperm", func() bool { return reasons(nodes[0].events(began)) == "noperm" })
	requests := l.stop()
	most(tr, "without: 5xx", strange(requests), 0)
	overAdmitted(tr, requests, 0, 0)
	tr.is("reason noperm", true)
}

func tlsKinds(tr *trial) {
	authority, other := redistest.NewAuthority(tr), redistest.NewAuthority(tr)
	trust := func(a *redistest.Authority) string { return "tls_trust_pool file " + a.CAFile }
	cert, key := authority.Issue(tr, "client")
	wrongName, wrongNameKey := authority.Issue(tr, "elsewhere.example")
	expired, expiredKey := authority.Issue(tr, "localhost", redistest.Expired)
	client := "tls_client_auth " + cert + " " + key
	for _, kind := range []struct {
		name    string
		server  *redistest.Server
		options []string
		works   bool
	}{
		{"as it should be", redistest.StartTLS(tr, authority, true), []string{"tls", trust(authority), client}, true},
		{
			"by another name", redistest.StartTLS(tr, authority, false, "--tls-cert-file", wrongName, "--tls-key-file", wrongNameKey),
			[]string{trust(authority), "tls_server_name elsewhere.example"}, true,
		},
		{"another authority", redistest.StartTLS(tr, authority, true), []string{trust(other), client}, false},
		{
			"another name", redistest.StartTLS(tr, authority, false, "--tls-cert-file", wrongName, "--tls-key-file", wrongNameKey),
			[]string{trust(authority)}, false,
		},
		{
			"expired", redistest.StartTLS(tr, authority, false, "--tls-cert-file", expired, "--tls-key-file", expiredKey),
			[]string{trust(authority)}, false,
		},
		{"a plain port", redistest.Start(tr), []string{trust(authority)}, false},
		{"no client certificate", redistest.StartTLS(tr, authority, true), []string{trust(authority)}, false},
	} {
		began := time.Now()
		nodes := startNodes(tr, 1, caddyfile(redisAt(kind.server.Addr, kind.options...), counted))
		started := time.Since(began)
		l := startLoad(tr, nodes, 100)
		time.Sleep(500 * time.Millisecond)
		if !kind.works {
			// A server that does not answer may for a while just be far away.
			eventually(tr, "the log says so", func() bool { return len(nodes[0].events(began)) > 0 })
		}
		requests := l.stop()
		events := nodes[0].events(began)
		most(tr, kind.name+": start", started, 5*time.Second)
		if strange(requests) > 0 {
			tr.Errorf("%s: %d of %d requests failed", kind.name, strange(requests), len(requests))
		}
		overAdmitted(tr, requests, 0, 0)
		if kind.works {
			least(tr, "decided by Redis", decisions(tr, kind.server), len(requests)-2)
		} else {
			most(tr, "decided by Redis", decisions(tr, kind.server), 0)
			tr.is("reason "+reasons(events), reasons(events) != "" && count(events, lost) == 1)
		}
	}
}

// tlsOptions are the options for servers of an authority that ask for
// certificates.
func tlsOptions(tr *trial, a *redistest.Authority) []string {
	tr.Helper()
	cert, key := a.Issue(tr, "client")
	return []string{"tls", "tls_trust_pool file " + a.CAFile, "tls_client_auth " + cert + " " + key}
}

func sentinelTLS(tr *trial) {
	a := redistest.NewAuthority(tr)
	s := redistest.StartSentinelTLS(tr, a, true)
	options := append(tlsOptions(tr, a), "master_name "+redistest.MasterName)
	nodes := startNodes(tr, 1, caddyfile(redisAt(strings.Join(s.SentinelAddrs(), " "), options...), counted))
	works(tr, nodes, s.Master)
	s.Failover(tr)
	before := decisions(tr, s.Replica)
	eventually(tr, "the new master decides", func() bool {
		nodes[0].get("other")
		return decisions(tr, s.Replica) > before
	})
	works(tr, nodes, s.Replica)
}

func clusterTLS(tr *trial) {
	a := redistest.NewAuthority(tr)
	c := redistest.StartClusterTLS(tr, a, true, 3)
	nodes := startNodes(tr, 1, caddyfile(redisAt(c.Addrs()[0], append(tlsOptions(tr, a), "cluster")...), counted))
	for i := range hotKeys {
		nodes[0].get(fmt.Sprintf("hot%d", i)) // connects to each
	}
	works(tr, nodes, c.Nodes...)
}

func absent(tr *trial) {
	// The time that a start takes with a reachable server.
	server := redistest.Start(tr)
	began := time.Now()
	startNodes(tr, 1, caddyfile(redisAt(server.Addr), site))
	usual := time.Since(began)

	proxy := redistest.StartProxy(tr, server.Addr)
	for _, kind := range []struct {
		name  string
		begin func()
	}{
		{"refused", proxy.Refuse},
		{"a black hole", proxy.BlackHole},
	} {
		kind.begin()
		began := time.Now()
		nodes := startNodes(tr, 1, caddyfile(redisAt(proxy.Addr), site))
		most(tr, kind.name+": start takes longer by", time.Since(began)-usual, time.Second)
		res := nodes[0].get("k")
		tr.is(fmt.Sprint("status ", res.StatusCode), res.StatusCode == http.StatusOK)
		l := startLoad(tr, nodes, 200)
		time.Sleep(during(time.Second, 5*time.Second))
		at := time.Now()
		proxy.Pass()
		recovery := eventually(tr, "Redis decides", func() bool { return count(nodes[0].events(at), back) > 0 })
		requests := l.stop()
		most(tr, "5xx", strange(requests), 0)
		most(tr, "longest wait", percentile(requests, 1), timeout+slack)
		most(tr, "Redis decides after", recovery, 2*time.Second)
		overAdmitted(tr, requests, 0, 0)
	}
}
