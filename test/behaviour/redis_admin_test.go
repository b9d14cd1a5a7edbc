package behaviour

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// hourly is a site whose limit admits three requests and no more during a test.
const hourly = "rate_limit api {\nkey {header.User}\nsize 3\ndrip_rate 1h\n}\nrespond admitted"

// nodes starts processes of one config.
func nodes(t *testing.T, n int, c sitetest.Config) (all []*reloadable, admins []*sitetest.Admin) {
	t.Helper()
	for range n {
		p := startAdmin(t, c)
		all, admins = append(all, p), append(admins, sitetest.NewAdmin(t, p.admin))
	}
	return all, admins
}

// asks sends a request of a user to a node and returns the status.
func (p *reloadable) asks(user string) int {
	p.t.Helper()
	req, err := http.NewRequest("GET", "http://"+p.addr+"/", nil)
	if err != nil {
		p.t.Fatal(err)
	}
	req.Header.Set("User", user)
	res, err := p.client.Do(req)
	if err != nil {
		p.t.Fatal(err)
	}
	res.Body.Close()
	return res.StatusCode
}

// TestAdminOnSeveralNodes guards that peek shows on each node what all of them
// admitted, that it charges nothing, and that a reset on one lets the client in on
// all others within a second: on one Redis with no rights but the documented ones,
// and in a cluster, where keys are on several servers.
func TestAdminOnSeveralNodes(t *testing.T) {
	for name, global := range map[string]func(t *testing.T) string{
		"documented rights": func(t *testing.T) string {
			server := redistest.Start(t)
			server.SetUser(t, "+evalsha", "+eval", "+get", "+set", "+time")
			return sitetest.RedisGlobal(server.Addr, sitetest.LongTimeout, "username limiter", "password pass")
		},
		"cluster": func(t *testing.T) string {
			cluster := redistest.StartCluster(t, 3)
			return sitetest.RedisGlobal(strings.Join(cluster.Addrs(), " "), sitetest.LongTimeout, "cluster")
		},
	} {
		t.Run(name, func(t *testing.T) {
			all, admins := nodes(t, 3, sitetest.Config{Global: global(t), Site: hourly})
			for _, a := range admins {
				// A node that first meets a server, which does not know its script,
				// takes the server for one that may have lost what the node knows.
				sitetest.Eventually(t, "connections to all servers", func() bool {
					for _, s := range a.Ask("GET", "status", "")["servers"].([]any) {
						if s.(map[string]any)["connections"].(map[string]any)["idle"].(float64) == 0 {
							return false
						}
					}
					return true
				})
			}
			for u := range 4 {
				user := fmt.Sprint("user ", u)
				body := fmt.Sprintf(`{"limit": "api", "key": %q}`, user)
				for _, node := range all {
					if status := node.asks(user); status != 200 {
						t.Fatalf("%s: got %d", user, status)
					}
				}
				for range 2 {
					for _, a := range admins {
						sitetest.WantJSON(t, a.Ask("POST", "peek", body), `{"limit": "api", "from": "redis", "size": 3, "level": 3, "remaining": 0, "held": 0}`)
					}
				}
				for _, node := range all { // each remembers that it is full
					if status := node.asks(user); status != 429 {
						t.Fatalf("%s: got %d", user, status)
					}
				}
				sitetest.WantJSON(t, admins[1].Ask("POST", "peek", body), `{"level": 3, "node": {"level": 3, "remembered": true}}`)
				sitetest.WantJSON(t, admins[0].Ask("POST", "reset", body), `{"level": 3, "node": {"remembered": true}}`)
				if status := all[0].asks(user); status != 200 {
					t.Errorf("%s: after a reset the same node answers %d", user, status)
				}
				start := time.Now()
				for _, node := range all[1:] {
					sitetest.Eventually(t, "a reset to be seen", func() bool { return node.asks(user) == 200 })
				}
				if took := time.Since(start); took > 5*time.Second { // a second, and what a busy machine takes
					t.Errorf("%s: a reset was seen by all after %v", user, took)
				}
				sitetest.WantJSON(t, admins[2].Ask("POST", "peek", body), `{"level": 3}`)
			}
			status := admins[0].Ask("GET", "status", "")
			sitetest.WantJSON(t, status, `{"store": "redis", "limits": [{"path": "api"}]}`)
			servers := status["servers"].([]any)
			for _, s := range servers {
				sitetest.WantJSON(t, s, `{"state": "up", "breaker": "closed", "failures": {}, "down": null}`)
			}
			if len(servers) == 0 {
				t.Error("no server is shown")
			}
		})
	}
}

// TestAdminWithoutRedis guards that peek and reset say so when Redis does not
// answer, with what this node knows, that status shows the state of the server, and
// that all is well again when it is back.
func TestAdminWithoutRedis(t *testing.T) {
	server := redistest.Start(t)
	s, a := sitetest.StartWithAdmin(t, sitetest.Config{Global: sitetest.RedisGlobal(server.Addr), Site: hourly})
	const body = `{"limit": "api", "key": "u"}`
	s.Get("/", "User: u")
	sitetest.WantJSON(t, a.Ask("POST", "peek", body), `{"from": "redis", "level": 1, "node": {"remembered": false}}`)
	server.Kill()
	if status, text := a.Send("POST", "reset", `{"limit": "api", "key": "nobody"}`); status != http.StatusServiceUnavailable {
		t.Errorf("got %d %s", status, text)
	}
	for _, path := range []string{"peek", "reset"} {
		status, text := a.Send("POST", path, body)
		var answer struct {
			Error string
			Node  *struct{ Level int }
		}
		if err := json.Unmarshal([]byte(text), &answer); err != nil {
			t.Fatal(err)
		}
		if status != http.StatusServiceUnavailable || !strings.HasPrefix(answer.Error, "redis unavailable: ") ||
			strings.Contains(answer.Error, "\n") || answer.Node == nil || answer.Node.Level != 1 {
			t.Errorf("%s without Redis: got %d %s", path, status, text)
		}
	}
	sitetest.Eventually(t, "an open breaker", func() bool {
		s.Get("/", "User: another")
		servers := a.Ask("GET", "status", "")["servers"].([]any)
		server := servers[0].(map[string]any)
		return server["state"] == "down" && server["breaker"] != "closed" && server["down"].(float64) > 0 && server["reason"] != ""
	})
	server.Restart(t)
	sitetest.Eventually(t, "Redis to be used again", func() bool {
		s.Get("/", "User: another")
		status, _ := a.Send("POST", "reset", body)
		return status == http.StatusOK
	})
	sitetest.WantJSON(t, a.Ask("POST", "peek", body), `{"from": "redis", "level": 0}`)
	servers := a.Ask("GET", "status", "")["servers"].([]any)
	sitetest.WantJSON(t, servers, `[{"address": "`+server.Addr+`", "state": "up", "breaker": "closed"}]`)
	wantNotLogged(t, s, "nobody")
}
