package operation

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// redisPassword is that of the Redis servers of the tests.
const redisPassword = "a password"

// monitored is the configuration of the nodes of TestMonitoring: limits that deny,
// that spare, that are full, that are undecided without Redis, and those with policies.
const monitored = `{
	admin %s
	persist_config off
	default_bind 127.0.0.1
	rate_limit {
		redis %s {
			password {env.REDIS_PASSWORD}
			timeout 1s
		}
	}
}
http://%s {
	rate_limit site {
		key {header.X-Key}
		size 20
		drip_rate 100ms
		limit everybody {
			key all
			size 100000
			drip_rate 1ms
		}
	}
	rate_limit /crowd crowd {
		key {header.X-Many}
		size 3
		drip_rate 1m
		max_keys 50
	}
	rate_limit /crowd sharing {
		key {header.X-Many}
		size 3
		drip_rate 1m
		max_keys 50
		when_full share
	}
	rate_limit /paced pace {
		size 1
		drip_rate 1ms
	}
	rate_limit /paced warm {
		algorithm warm_up
		rate 1000/1s
		warm_up 1ms
	}
	rate_limit /open open {
		size 1000000
		drip_rate 1ms
		on_error allow
	}
	rate_limit /policies policies {
		key all
		limit trial {
			size 1
			drip_rate 1s
			dry_run
		}
		limit softly {
			size 1
			drip_rate 1s
			soft 1000000
		}
		limit load {
			concurrency auto
		}
		limit later {
			size 1
			drip_rate 15ms
			max_delay 1s
		}
		limit borrower {
			size 1
			drip_rate 1h
			borrow spare
		}
		limit spare {
			size 1000000
			drip_rate 1ms
			pool
		}
	}
	rate_limit /policies leased {
		size 1000000
		drip_rate 1ms
		consistency lease 1s
	}
	rate_limit /banned banned {
		size 1
		drip_rate 1h
		ban 1s
	}
	respond ok
}
http://%s {
	metrics /metrics
}
`

// TestMonitoring guards what operators see: a Prometheus with the configuration and
// the alerts in deploy scrapes instances under load, every query of the dashboard has
// an answer, and the alerts fire when Redis is killed and stop when it is back.
func TestMonitoring(t *testing.T) {
	promtool := program(t, "promtool")
	redis := redistest.Start(t, "--requirepass", redisPassword)
	nodes := make([]*node, 2)
	var targets []string
	for i := range nodes {
		nodes[i] = startNode(t, func(n *node) string {
			return fmt.Sprintf(monitored, n.admin, redis.Addr, n.site, n.metrics)
		})
		targets = append(targets, nodes[i].metrics)
		nodes[i].waitForRedis()
	}
	p := startPrometheus(t, prometheusConfig(t, targets))
	began := time.Now()
	stop := startLoad(t, nodes)
	defer stop()

	// With Redis, some alerts fire, and some do not: none is close to a limit of size 1.
	firing := func(names ...string) error {
		if got := slices.Sorted(maps.Keys(p.firing())); !slices.Equal(got, names) {
			return fmt.Errorf("%q fire, want %q", got, names)
		}
		return nil
	}
	const denials = `sum(rate(caddy_rate_limit_decisions_total{result="denied"}[4s]))`
	redistest.WaitFor(t, patience, func() error {
		if p.value(denials) == 0 {
			return fmt.Errorf("no denials yet")
		}
		return firing("RateLimitMemoryFull", "RateLimitNearLimit")
	})
	for _, a := range p.firing()["RateLimitNearLimit"] {
		if a["limit"] == "pace" || a["limit"] == "warm" {
			t.Errorf("clients are called close to limit %s, which one request fills", a["limit"])
		}
	}
	for _, a := range p.firing()["RateLimitMemoryFull"] {
		if a["limit"] != "crowd" && a["limit"] != "sharing" {
			t.Errorf("limit %s is called full", a["limit"])
		}
	}

	// Without Redis.
	redis.Kill()
	lost := time.Now()
	redistest.WaitFor(t, patience, func() error {
		if n := len(p.firing()["RateLimitRedisLost"]); n != len(nodes) {
			return fmt.Errorf("%d alerts that Redis is lost, want one for each of %d nodes", n, len(nodes))
		}
		return firing("RateLimitFallback", "RateLimitMemoryFull", "RateLimitNearLimit", "RateLimitRedisLost", "RateLimitUndecided")
	})
	t.Logf("alerts fire %v after Redis was killed", time.Since(lost).Round(100*time.Millisecond))

	redis.Restart(t)
	redistest.WaitFor(t, patience, func() error {
		if len(p.firing()["RateLimitRedisLost"]) > 0 {
			return fmt.Errorf("Redis is still called lost")
		}
		if p.value(`sum(rate(caddy_rate_limit_decisions_total{by="redis"}[4s]))`) == 0 {
			return fmt.Errorf("Redis does not decide again")
		}
		return nil
	})
	stop()

	// Both ways to scrape have the same metrics, and promtool finds nothing wrong.
	_, scraped := fetch(t, "http://"+nodes[0].metrics+"/metrics")
	_, admin := fetch(t, "http://"+nodes[0].admin+"/metrics")
	if got, want := families(admin), families(scraped); !slices.Equal(got, want) || len(got) < 10 {
		t.Errorf("the admin API has metrics %q, the directive %q", got, want)
	}
	check := exec.Command(promtool, "check", "metrics")
	check.Stdin = strings.NewReader(scraped)
	if output, err := check.CombinedOutput(); err != nil {
		t.Errorf("%s: %v\n%s", check, err, output)
	}

	t.Run("dashboard", func(t *testing.T) { askAll(t, p, readDashboard(t), families(scraped), began) })
	t.Run("idle dashboard", func(t *testing.T) {
		redistest.WaitFor(t, patience, func() error {
			if rate := p.value(`sum(rate(caddy_rate_limit_checked_requests_total[4s]))`); rate > 0 {
				return fmt.Errorf("still %v requests a second", rate)
			}
			return nil
		})
		fill, idle := fillDashboard("4s"), time.Now()
		for _, panel := range readDashboard(t).Panels {
			for _, target := range panel.Targets {
				series, err := p.queryRange(fill.Replace(target.Expr), idle)
				for _, s := range series {
					if n := len(s.Values) - s.finite(); n > 0 {
						t.Errorf("%s: %s: %d values are no numbers", panel.Title, target.Expr, n)
					}
				}
				if err != nil {
					t.Errorf("%s: %s: %v", panel.Title, target.Expr, err)
				}
			}
		}
	})
	t.Run("alerts", func(t *testing.T) {
		for _, name := range metricName.FindAllString(read(t, deploy, "prometheus/alerts.yml"), -1) {
			if !slices.Contains(families(scraped), name) {
				t.Errorf("alerts.yml: there is no metric %s", name)
			}
		}
	})
}

// fillDashboard returns what replaces the variables in the queries of the dashboard,
// given the range that it shows.
func fillDashboard(shown string) *strings.Replacer {
	return strings.NewReplacer("$__rate_interval", "4s", "$__range", shown, "$job", ".+", "$instance", ".+", "$limit", ".+")
}

// askAll asks a Prometheus all queries of the dashboard about a time in which
// everything happened that it shows.
func askAll(t *testing.T, p *prometheus, d dashboard, metrics []string, since time.Time) {
	fill := fillDashboard("1h")
	label := regexp.MustCompile(`\{\{(\w+)\}\}`)
	var used []string
	for _, panel := range d.Panels {
		for _, target := range panel.Targets {
			used = append(used, metricName.FindAllString(target.Expr, -1)...)
			series, err := p.queryRange(fill.Replace(target.Expr), since)
			if err != nil {
				t.Errorf("%s: %s: %v", panel.Title, target.Expr, err)
				continue
			}
			values := 0
			for _, s := range series {
				values += s.finite()
				for _, m := range label.FindAllStringSubmatch(target.LegendFormat, -1) {
					if s.Metric[m[1]] == "" {
						t.Errorf("%s: the legend needs label %s, and the series has %v", panel.Title, m[1], s.Metric)
					}
				}
			}
			if values == 0 {
				t.Errorf("%s: no data: %s", panel.Title, target.Expr)
			}
		}
	}
	for _, v := range d.Templating.List {
		query, ok := v.Query.(map[string]any)
		if !ok {
			continue
		}
		args := regexp.MustCompile(`^label_values\((.+), (\w+)\)$`).FindStringSubmatch(fmt.Sprint(query["query"]))
		if args == nil {
			t.Errorf("variable %s: %v", v.Name, query)
			continue
		}
		var values []string
		err := p.api("label/"+args[2]+"/values", url.Values{"match[]": {fill.Replace(args[1])}}, &values)
		if err != nil || len(values) == 0 {
			t.Errorf("variable %s has values %q: %v", v.Name, values, err)
		}
	}
	for _, name := range used {
		if name = strings.TrimSuffix(name, "_bucket"); !slices.Contains(metrics, name) {
			t.Errorf("there is no metric %s", name)
		}
	}
	for _, name := range metrics {
		if !slices.Contains(used, name) && !slices.Contains(used, name+"_bucket") {
			t.Errorf("the dashboard does not show %s", name)
		}
	}
}

// families returns the names of our metrics in what was scraped.
func families(scraped string) (names []string) {
	for line := range strings.Lines(scraped) {
		if words := strings.Fields(line); strings.HasPrefix(line, "# TYPE caddy_rate_limit_") {
			names = append(names, words[2])
		}
	}
	return names
}

// prometheusConfig writes the files in deploy for a Prometheus that scrapes the
// given targets often, and whose alerts wait no longer than a second. It returns
// the path of its configuration.
func prometheusConfig(t testing.TB, targets []string) string {
	t.Helper()
	var config map[string]any
	if err := yaml.Unmarshal([]byte(read(t, deploy, "prometheus/prometheus.yml")), &config); err != nil {
		t.Fatal(err)
	}
	config["global"] = map[string]string{"scrape_interval": "500ms", "evaluation_interval": "500ms"}
	jobs, _ := config["scrape_configs"].([]any)
	if len(jobs) != 1 {
		t.Fatalf("prometheus.yml has %d jobs, want one", len(jobs))
	}
	job, _ := jobs[0].(map[string]any)
	delete(job, "dns_sd_configs")
	job["static_configs"] = []map[string]any{{"targets": targets}}
	text, err := yaml.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	path := write(t, "prometheus.yml", string(text))
	alerts := regexp.MustCompile(`(?m)^( +for:) .*$`).ReplaceAllString(read(t, deploy, "prometheus/alerts.yml"), "$1 1s")
	writeAt(t, filepath.Join(filepath.Dir(path), "alerts.yml"), alerts)
	return path
}

// startLoad sends requests to the nodes until the returned function is called: from
// clients that stay below their limit and from ones that do not, and from many that
// come once.
func startLoad(t testing.TB, nodes []*node) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for _, n := range nodes {
		wg.Go(func() {
			every := time.NewTicker(5 * time.Millisecond)
			defer every.Stop()
			for i := 0; ctx.Err() == nil; i++ {
				path := []string{"/", "/", "/open", "/crowd", "/paced", "/policies", "/banned"}[i%7]
				req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+n.site+path, nil)
				if err != nil {
					t.Error(err)
					return
				}
				req.Header.Set("X-Key", strconv.Itoa(i%3))
				req.Header.Set("X-Many", strconv.Itoa(i))
				if res, err := http.DefaultClient.Do(req); err == nil {
					_ = res.Body.Close()
				} else if ctx.Err() == nil {
					t.Error(err)
				}
				<-every.C
			}
		})
	}
	return sync.OnceFunc(func() {
		cancel()
		wg.Wait()
	})
}

// TestPrometheusFiles guards that Prometheus accepts its files in deploy, and that
// each alert fires on what it is for and on nothing else.
func TestPrometheusFiles(t *testing.T) {
	promtool := program(t, "promtool")
	dir := filepath.Join(deploy, "prometheus")
	run(t, dir, promtool, "check", "config", "prometheus.yml")
	run(t, dir, promtool, "check", "rules", "alerts.yml")
	run(t, dir, promtool, "test", "rules", "alerts_test.yml")

	// Each alert has a test, which it must be found by.
	var alerts struct {
		Groups []struct {
			Rules []struct {
				Alert       string
				Labels      map[string]string
				Annotations map[string]string
			}
		}
	}
	if err := yaml.Unmarshal([]byte(read(t, dir, "alerts.yml")), &alerts); err != nil {
		t.Fatal(err)
	}
	tests := read(t, dir, "alerts_test.yml")
	for _, rule := range alerts.Groups[0].Rules {
		if strings.Count(tests, "alertname: "+rule.Alert+"\n") < 2 {
			t.Errorf("%s: alerts_test.yml does not say when it fires and when not", rule.Alert)
		}
		if rule.Labels["severity"] == "" || rule.Annotations["summary"] == "" || rule.Annotations["description"] == "" {
			t.Errorf("%s: needs a severity, a summary and a description", rule.Alert)
		}
	}
}
