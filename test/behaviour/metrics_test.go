package behaviour

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/state"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/caddytest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/configtest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/racetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// gatherer returns a registry that checks all that is collected.
func gatherer(t testing.TB, p *state.Process) *prometheus.Registry {
	t.Helper()
	registry := prometheus.NewPedanticRegistry()
	for range 2 { // registering again is no error
		if err := p.Register(registry); err != nil {
			t.Fatal(err)
		}
	}
	return registry
}

// samples returns the values of our metrics by name and labels, such as
// `near_limit_total{limit="a"}`, that are in text of a scrape.
func samples(text string) map[string]string {
	found := make(map[string]string)
	for line := range strings.Lines(text) {
		if rest, ours := strings.CutPrefix(strings.TrimSpace(line), "caddy_rate_limit_"); ours {
			at := strings.LastIndexByte(rest, ' ')
			found[rest[:at]] = rest[at+1:]
		}
	}
	return found
}

// collected returns the samples that are collected now, and guards that they are
// valid and that promlint finds no fault with them.
func collected(t testing.TB, p *state.Process) map[string]string {
	t.Helper()
	registry := gatherer(t, p)
	problems, err := testutil.GatherAndLint(registry)
	if err != nil || len(problems) > 0 {
		t.Fatalf("problems %v, error %v", problems, err)
	}
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	for _, family := range families {
		if _, err := expfmt.MetricFamilyToText(&text, family); err != nil {
			t.Fatal(err)
		}
	}
	return samples(text.String())
}

// scrape returns the samples that Caddy serves at /metrics of an address, which may
// be that of a unix socket.
func scrape(t testing.TB, addr string) map[string]string {
	t.Helper()
	return samples(string(scrapeAs(t, addr, "")))
}

// scrapeAs returns what scrape does, in the format that is asked for.
func scrapeAs(t testing.TB, addr, format string) []byte {
	t.Helper()
	socket, host := "", addr
	if strings.HasPrefix(addr, "/") {
		socket, host = addr, "localhost"
	}
	client := http.Client{Timeout: sitetest.Patience, Transport: caddytest.FreshConnections(socket)}
	req, err := http.NewRequestWithContext(t.Context(), "GET", "http://"+host+"/metrics", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Accept", format)
	res, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil || res.StatusCode != http.StatusOK || len(body) == 0 {
		t.Fatalf("scraping %s: status %d, error %v: %q", addr, res.StatusCode, err, body)
	}
	return body
}

// servesMetrics is what a site has to be scraped at /metrics.
const servesMetrics = "handle /metrics {\nmetrics\n}\n"

// wantSamples checks some samples. One that should not be there has no value.
func wantSamples(t testing.TB, got map[string]string, want map[string]string) {
	t.Helper()
	for name, value := range want {
		if got[name] != value {
			t.Errorf("%s: got %q, want %q", name, got[name], value)
		}
	}
}

// TestMetricsOfLimits guards the values of all metrics of limits in this process.
// Every request is counted once at each limit that it meets.
func TestMetricsOfLimits(t *testing.T) {
	t.Parallel()
	p := sitetest.NewProcess(telemetry.Options{})
	before := collected(t, p)
	if len(before) != 0 {
		t.Errorf("without a config there are metrics: %v", before)
	}
	s := sitetest.StartConfig(t, sitetest.Config{Unnamed: true, Site: `
		rate_limit metrics-a {
			size 5
			drip_rate 1h
			cost {http.request.header.Cost}
			limit all {
				key all
				rate 4/1h
				size 4
			}
			limit off {
				size 3
				factor 0
			}
		}
		rate_limit /interval metrics-b {
			max 60
			duration 1m
			min_interval 200ms
		}
		rate_limit /dynamic metrics-c {
			size {http.request.header.Cost}
			drip_size {http.request.header.Cost}
			drip_rate {http.request.header.Cost}s
		}
		rate_limit /unnamed {
			size 1
		}
		rate_limit /unnamed/again {
			size 2
		}
		respond "admitted"
	`})
	checkedBefore := s.Process.Requests()[telemetry.CheckedAdmitted]
	refusedBefore := s.Process.Requests()[telemetry.CheckedRefused]
	for _, c := range []struct {
		path, cost string
		status     int
	}{
		{"/", "3", 200},        // a: 3 of 5, all: 1 of 4
		{"/", "3", 429},        // a has no room, all has
		{"/", "1", 200},        // a: 4 of 5, which is near, all: 2 of 4
		{"/", "x", 400},        // the cost can't be used
		{"/unnamed", "1", 200}, // a: 5 of 5, all: 3 of 4, unnamed: 1 of 1
	} {
		if a := s.Get(c.path, "Cost: "+c.cost); a.StatusCode != c.status {
			t.Fatalf("%s with cost %s: got %s, want %d", c.path, c.cost, a, c.status)
		}
	}
	got := collected(t, s.Process)
	wantSamples(t, got, map[string]string{
		`decisions_total{by="memory",limit="metrics-a",result="admitted"}`:     "3",
		`decisions_total{by="memory",limit="metrics-a",result="denied"}`:       "1",
		`decisions_total{by="memory",limit="metrics-a",result="spared"}`:       "0",
		`decisions_total{by="memory",limit="metrics-a/all",result="admitted"}`: "3",
		`decisions_total{by="memory",limit="metrics-a/all",result="denied"}`:   "0",
		`decisions_total{by="memory",limit="metrics-a/all",result="spared"}`:   "1",
		`decisions_total{by="memory",limit="default",result="admitted"}`:       "1",
		`decisions_total{by="redis",limit="default",result="admitted"}`:        "",

		`near_limit_total{limit="metrics-a"}`:     "2",
		`near_limit_total{limit="metrics-a/all"}`: "0",
		`near_limit_total{limit="default"}`:       "0", // a size of 1 is full with each request
		`units_total{limit="metrics-a"}`:          "5",
		`units_total{limit="metrics-a/all"}`:      "3",

		`checked_requests_total{result="admitted"}`: fmt.Sprint(checkedBefore + 3),
		`checked_requests_total{result="refused"}`:  fmt.Sprint(refusedBefore + 1),

		`memory_buckets{limit="metrics-a"}`:                "1",
		`memory_buckets{limit="metrics-b"}`:                "0",
		`memory_buckets_max{limit="metrics-a"}`:            "500000",
		`memory_buckets_max{limit="metrics-b"}`:            "500000", // before the first request, too
		`memory_buckets_max{limit="default"}`:              "1e+06",
		`memory_shared_decisions_total{limit="metrics-a"}`: "0",
		`memory_forgotten_total{limit="metrics-a"}`:        "0",
		`memory_buckets{limit="default"}`:                  "1",

		`limit_info{algorithm="leaky_bucket",drip_rate="1h",drip_size="1",limit="metrics-a",size="5",window=""}`:                  "1",
		`limit_info{algorithm="leaky_bucket",drip_rate="15m",drip_size="1",limit="metrics-a/all",size="4",window=""}`:             "1",
		`limit_info{algorithm="leaky_bucket",drip_rate="1s",drip_size="1",limit="metrics-a/off",size="0",window=""}`:              "1",
		`limit_info{algorithm="leaky_bucket",drip_rate="200ms",drip_size="1",limit="metrics-b/min_interval",size="1",window=""}`:  "1",
		`limit_info{algorithm="leaky_bucket",drip_rate="dynamic",drip_size="dynamic",limit="metrics-c",size="dynamic",window=""}`: "1",
		`limit_info{algorithm="leaky_bucket",drip_rate="1s",drip_size="1",limit="default",size="mixed",window=""}`:                "1",

		`redis_wait_seconds_count`: "", // only with Redis
	})
}

// TestMetricsThroughReloads guards that values go on when the config is replaced by
// another with the same limits, that the series of a limit end with it, that limits
// of two handlers are added up, and that configs which are rejected, wherever that
// happens, leave behind neither series nor counters. All of it as both of Caddy's
// endpoints show it.
func TestMetricsThroughReloads(t *testing.T) {
	admin := filepath.Join(sitetest.TempDir(t), "admin")
	c := func(sites ...string) sitetest.Config {
		c := sitetest.Config{Admin: "unix/" + admin, Site: servesMetrics + sites[0] + "\nrespond admitted"}
		for _, site := range sites[1:] {
			c.Sites += site + "\n"
		}
		return c
	}
	const limited = "rate_limit /limited reload-a {\nsize 100\n}"
	s := sitetest.StartConfig(t, c(limited))
	admitted := func(limit string) string {
		return `decisions_total{by="memory",limit="` + limit + `",result="admitted"}`
	}
	check := func(want map[string]string) {
		t.Helper()
		collected(t, s.Process)
		wantSamples(t, scrape(t, admin), want)
		wantSamples(t, scrape(t, s.Addr), want)
	}
	load := func(c sitetest.Config) {
		t.Helper()
		s.Reload(c)
	}
	s.Get("/limited")
	check(map[string]string{admitted("reload-a"): "1"})

	load(c(limited + "\nrespond /another another"))
	s.Get("/limited")
	check(map[string]string{admitted("reload-a"): "2"})

	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	rejected := strings.ReplaceAll(limited, "-a", "-rejected")
	for name, c := range map[string]sitetest.Config{
		"bad limit":     c(limited + "\n" + rejected + "\nrate_limit {\nsize 1\ncost {env.RATE_LIMIT_TEST_UNSET}\n}"),
		"bad matcher":   c(limited + "\n" + rejected + "\n@bad path_regexp [\nrespond @bad x"),
		"port is taken": c(limited+"\n"+rejected, "http://"+taken.Addr().String()+" {\n}"),
	} {
		if err := s.Load(c); err == nil {
			t.Fatalf("%s: the config was accepted", name)
		}
		check(map[string]string{admitted("reload-a"): "2", admitted("reload-rejected"): ""})
		if n := s.Process.Counters.References("reload-rejected"); n > 0 {
			t.Errorf("%s: counters of the config are in use %d times", name, n)
		}
		if n := s.Process.Counters.References("reload-a"); n != 1 {
			t.Errorf("%s: counters are in use %d times, want by one config", name, n)
		}
	}
	s.Get("/limited")
	check(map[string]string{admitted("reload-a"): "3"})

	// Two handlers, which a request passes one after the other.
	load(c(limited + "\nroute /limited {\n" + limited + "\n}"))
	s.Get("/limited")
	check(map[string]string{admitted("reload-a"): "5"})

	load(c(strings.ReplaceAll(limited, "-a", "-b")))
	s.Get("/limited")
	check(map[string]string{admitted("reload-a"): "", admitted("reload-b"): "1", `near_limit_total{limit="reload-a"}`: "",
		`memory_buckets{limit="reload-a"}`: ""})
	load(c(limited))
	check(map[string]string{admitted("reload-a"): "0", admitted("reload-b"): ""})
	s.Stop()
	for _, path := range []string{"reload-a", "reload-b"} {
		if n := s.Process.Counters.References(path); n > 0 {
			t.Errorf("Caddy stopped, but counters of %s are in use %d times", path, n)
		}
	}
}

// TestMetricsOff guards that a config with metrics off has none, whatever it follows
// and however it ends, and that one that is rejected does not switch them.
func TestMetricsOff(t *testing.T) {
	admin := filepath.Join(sitetest.TempDir(t), "admin")
	c := func(value, more string) sitetest.Config {
		return sitetest.Config{
			Admin:  "unix/" + admin,
			Global: "rate_limit {\nmetrics " + value + "\n}",
			Site:   servesMetrics + "rate_limit /limited {\nsize 9\n" + more + "\n}\nrespond admitted",
		}
	}
	s := sitetest.StartConfig(t, c("off", ""))
	for _, step := range []struct {
		name   string
		config sitetest.Config
		fails  bool
		on     bool
	}{
		{"off, rejected on", c("on", "cost {env.RATE_LIMIT_TEST_UNSET}"), true, false},
		{"on", c("on", ""), false, true},
		{"on, rejected off", c("off", "cost {env.RATE_LIMIT_TEST_UNSET}"), true, true},
		{"off again", c("off", ""), false, false},
		{"off, other numbers", c("off", "cost 2"), false, false},
	} {
		if err := s.Load(step.config); (err != nil) != step.fails {
			t.Fatalf("%s: got error %v", step.name, err)
		}
		s.Get("/limited")
		for _, addr := range []string{admin, s.Addr} {
			if got := scrape(t, addr); (len(got) > 0) != step.on {
				t.Errorf("%s: %s has metrics: %v", step.name, addr, got)
			}
		}
	}
}

// TestMetricsDoNotGrow guards that a hundred thousand keys make no more series than
// one, and that every request is counted, also those that are served at once.
func TestMetricsDoNotGrow(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, `
		rate_limit grow {
			key {http.request.header.X-Key}
			size 1000000000
			max_keys 100
			when_full share
		}
		respond "admitted"
	`)
	s.Get("/", "X-Key: 0")
	before := collected(t, s.Process)

	handler, server := s.Handlers()[0], s.Server()
	next := caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { return nil })
	const callers = 4
	keys := 100_000
	if racetest.Enabled {
		keys /= 10
	}
	redistest.Together(t, callers, func(caller int) {
		w := httptest.NewRecorder()
		request := sitetest.Received(httptest.NewRequest("GET", "/", nil))
		for n := range keys / callers {
			clear(w.Header())
			request.Header["X-Key"] = []string{strconv.Itoa(n*callers + caller)}
			r := caddyhttp.PrepareRequest(request, caddy.NewReplacer(), w, server)
			if err := handler.ServeHTTP(w, r, next); err != nil {
				t.Error(err)
				return
			}
		}
	})
	after := collected(t, s.Process)
	if got, want := slices.Sorted(maps.Keys(after)), slices.Sorted(maps.Keys(before)); !slices.Equal(got, want) {
		t.Errorf("before there were the series\n%v, after %d keys\n%v", want, keys, got)
	}
	wantSamples(t, after, map[string]string{
		`decisions_total{by="memory",limit="grow",result="admitted"}`: strconv.Itoa(keys + 1),
		`units_total{limit="grow"}`:                                   strconv.Itoa(keys + 1),
	})
	if shared := after[`memory_shared_decisions_total{limit="grow"}`]; len(shared) < len(strconv.Itoa(keys*9/10)) {
		t.Errorf("%s decisions were on shared buckets, want nearly all", shared)
	}
}

// TestMetricsOfRedis guards what decides, the time that requests wait for it, and
// the metrics of servers: while one config replaces another, both may have a store
// for one server, which must not make two series.
func TestMetricsOfRedis(t *testing.T) {
	redis := redistest.Start(t)
	var stats sync.Map // by store
	p := sitetest.NewProcess(telemetry.Options{})
	p.ServerStats = func(r *limiter.Redis) []limiter.ServerStats {
		s, _ := stats.Load(r)
		servers, _ := s.([]limiter.ServerStats)
		return servers
	}
	site := servesMetrics + `
		rate_limit /limited/* metrics-redis {
			key {path}
			size 2
			drip_rate 1h
		}
		rate_limit /deny metrics-deny {
			size 2
			on_error deny
		}
		respond "admitted"
	`
	admin := filepath.Join(sitetest.TempDir(t), "admin")
	s := sitetest.StartConfig(t, sitetest.Config{Process: p, Admin: "unix/" + admin, Global: sitetest.RedisGlobal(redis.Addr, sitetest.LongTimeout), Site: site})
	stats.Store(p.Newest().Redis, []limiter.ServerStats{
		{
			Address: "a:1", State: limiter.ServerConnecting, Idle: 1, InUse: 2, Connecting: 3, Calls: 10, Requests: 20,
			Failures: map[string]uint64{"timeout": 1, "oom": 1},
		},
		{Address: "/socket\xff", State: limiter.ServerUp},
	})
	waits := func() int {
		n, _ := strconv.Atoi(collected(t, s.Process)["redis_wait_seconds_count"])
		return n
	}
	before := waits()
	for range 4 {
		s.Get("/limited/a")
	}
	if n := waits() - before; n != 2 {
		t.Errorf("%d requests waited for redis, want 2: that the bucket was full then is remembered", n)
	}
	wantSamples(t, collected(t, s.Process), map[string]string{
		`decisions_total{by="redis",limit="metrics-redis",result="admitted"}`:    "2",
		`decisions_total{by="redis",limit="metrics-redis",result="denied"}`:      "0",
		`decisions_total{by="remembered",limit="metrics-redis",result="denied"}`: "2",
		`decisions_total{by="fallback",limit="metrics-redis",result="denied"}`:   "0",
		`decisions_total{by="memory",limit="metrics-redis",result="denied"}`:     "",
		`redis_up{server="a:1"}`:                              "0",
		"redis_up{server=\"/socket\uFFFD\"}":                  "1",
		`redis_calls_total{server="a:1"}`:                     "10",
		`redis_called_requests_total{server="a:1"}`:           "20",
		`redis_failures_total{reason="timeout",server="a:1"}`: "1",
		`redis_connections{server="a:1",state="idle"}`:        "1",
		`redis_connections{server="a:1",state="in_use"}`:      "2",
		`redis_connections{server="a:1",state="connecting"}`:  "3",
	})

	// Another config with another store of the same servers starts.
	next := provisionApp(t, p, `{"redis":{"addresses":["`+redis.Addr+`"],"timeout":"11s"}}`)
	if err := next.Start(); err != nil {
		t.Fatal(err)
	}
	stats.Store(next.Compiled().Redis, []limiter.ServerStats{{
		Address: "a:1", State: limiter.ServerUp, Idle: 1, Calls: 1, Requests: 2, Failures: map[string]uint64{"timeout": 1},
	}})
	want := map[string]string{
		`redis_up{server="a:1"}`:                              "1",
		"redis_up{server=\"/socket\uFFFD\"}":                  "1",
		`redis_calls_total{server="a:1"}`:                     "11",
		`redis_called_requests_total{server="a:1"}`:           "22",
		`redis_failures_total{reason="timeout",server="a:1"}`: "2",
		`redis_failures_total{reason="oom",server="a:1"}`:     "1",
		`redis_connections{server="a:1",state="idle"}`:        "2",
	}
	for range 2 { // collecting adds nothing
		wantSamples(t, collected(t, s.Process), want)
	}

	// Who asks for it gets a histogram of high resolution, at either endpoint.
	for _, addr := range []string{s.Addr, admin} {
		format := expfmt.NewFormat(expfmt.TypeProtoDelim)
		decoder := expfmt.NewDecoder(bytes.NewReader(scrapeAs(t, addr, string(format))), format)
		var family dto.MetricFamily
		for family.GetName() != "caddy_rate_limit_redis_wait_seconds" {
			family.Reset()
			if err := decoder.Decode(&family); err != nil {
				t.Fatal(err)
			}
		}
		if h := family.Metric[0].Histogram; len(h.PositiveSpan) == 0 || len(h.Bucket) == 0 {
			t.Errorf("%s: the histogram is not both native and classic: %v", addr, h)
		}
	}

	redis.Kill()
	undecided := s.Process.Requests()[telemetry.CheckedUndecided]
	before = waits()
	s.Get("/limited/b")
	s.Get("/deny")
	wantSamples(t, collected(t, s.Process), map[string]string{
		`decisions_total{by="fallback",limit="metrics-redis",result="admitted"}`: "1",
		`decisions_total{by="fallback",limit="metrics-deny",result="denied"}`:    "0",
		`checked_requests_total{result="undecided"}`:                             strconv.FormatUint(undecided+1, 10),
		`redis_wait_seconds_count`:                                               strconv.Itoa(before + 2),
	})
}

// TestMetricsOfProcess guards what a Caddy process that uses Redis serves at both
// endpoints, without Caddy's own option for metrics, until Redis is gone.
func TestMetricsOfProcess(t *testing.T) {
	redis := redistest.Start(t)
	admin := filepath.Join(sitetest.TempDir(t), "admin")
	addr := sitetest.StartProcess(t, sitetest.Config{
		Admin:  "unix/" + admin,
		Global: sitetest.RedisGlobal(redis.Addr, sitetest.LongTimeout),
		Site: servesMetrics + `
			rate_limit /limited/* process {
				key {path}
				size 2
				drip_rate 1h
			}
			respond "admitted"
		`,
	})
	get := func(path string) {
		t.Helper()
		res, err := http.Get("http://" + addr + path)
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
	}
	check := func(want map[string]string) {
		t.Helper()
		for _, addr := range []string{addr, admin} {
			wantSamples(t, scrape(t, addr), want)
		}
	}
	server := `{server="` + redis.Addr + `"}`
	sitetest.Eventually(t, "a connection to redis", func() bool { return scrape(t, admin)["redis_up"+server] == "1" })
	for range 3 {
		get("/limited/a")
	}
	check(map[string]string{
		`decisions_total{by="redis",limit="process",result="admitted"}`:    "2",
		`decisions_total{by="remembered",limit="process",result="denied"}`: "1",
		`near_limit_total{limit="process"}`:                                "1",
		`checked_requests_total{result="denied"}`:                          "1",
		`redis_wait_seconds_count`:                                         "2",
		`redis_called_requests_total` + server:                             "2",
		`redis_up` + server:                                                "1",
	})
	redis.Kill()
	sitetest.Eventually(t, "the breaker to open", func() bool {
		get("/limited/b")
		return scrape(t, admin)["redis_up"+server] == "0"
	})
	got := scrape(t, admin)
	failures := 0
	for name, value := range got {
		if strings.HasPrefix(name, "redis_failures_total{") && value != "0" {
			failures++
		}
	}
	if failures == 0 || got[`decisions_total{by="fallback",limit="process",result="admitted"}`] != "2" {
		t.Errorf("redis is gone, but these are the metrics: %v", got)
	}
}

// TestLimitInfoOfAlgorithms guards the labels of limits with each algorithm.
func TestLimitInfoOfAlgorithms(t *testing.T) {
	t.Parallel()
	s := sitetest.Start(t, "rate_limit {"+configtest.AlgorithmLimits+"\n}\nrespond admitted")
	wantSamples(t, collected(t, s.Process), map[string]string{
		`limit_info{algorithm="leaky_bucket",drip_rate="1h",drip_size="1",limit="leaky",size="3",window=""}`:             "1",
		`limit_info{algorithm="token_bucket",drip_rate="1h",drip_size="1",limit="token",size="3",window=""}`:             "1",
		`limit_info{algorithm="fixed_window",drip_rate="",drip_size="",limit="clock",size="3",window="365d"}`:            "1",
		`limit_info{algorithm="fixed_window",drip_rate="",drip_size="",limit="first",size="3",window="1h"}`:              "1",
		`limit_info{algorithm="fixed_window",drip_rate="",drip_size="",limit="period",size="3",window="day Asia/Tokyo"}`: "1",
		`limit_info{algorithm="sliding_window",drip_rate="",drip_size="",limit="slides",size="3",window="365d"}`:         "1",
	})
}

// TestSeriesInOrder guards that the series of each metric come in the order of their
// labels, as they are sorted then: with ten thousand limits that is half of a scrape.
func TestSeriesInOrder(t *testing.T) {
	t.Parallel()
	var limits strings.Builder
	for i := range 100 {
		fmt.Fprintf(&limits, "limit order-%d {\nsize 1000\n}\n", i)
	}
	s := sitetest.Start(t, "rate_limit {\n"+limits.String()+"}\nrespond admitted")
	s.Get("/")
	ch := make(chan prometheus.Metric, 10_000)
	s.Process.Collect(ch)
	close(ch)
	series, last := map[string]int{}, map[string]string{}
	for m := range ch {
		var out dto.Metric
		if err := m.Write(&out); err != nil {
			t.Fatal(err)
		}
		var labels strings.Builder
		for _, l := range out.Label {
			labels.WriteString(l.GetValue() + "\x00")
		}
		name := m.Desc().String()
		if series[name]++; labels.String() < last[name] && !strings.Contains(name, "checked_requests") {
			t.Errorf("%s: %q after %q", name, labels.String(), last[name])
		}
		last[name] = labels.String()
	}
	for name, n := range series {
		if strings.Contains(name, "decisions_total") && !strings.Contains(name, "shared") && n != 300 {
			t.Errorf("%d series of decisions, want 300", n)
		}
	}
}

// TestMetricsOfBanRoom guards that memory_buckets_max is what max_keys says for each kind of
// bucket that a limit has, also before one of them holds anything: of keys, of clients without
// one, and of the bans of both.
func TestMetricsOfBanRoom(t *testing.T) {
	for _, tc := range []struct {
		options  string
		requests []string
		want     string
	}{
		{"max_keys 1000; ban 1h", nil, "1000"},
		{"max_keys 1000; ban 1h", []string{"/?k=a"}, "2000"},           // with room for bans
		{"max_keys 1000; ban 1h", []string{"/?k=a", "/?k=a"}, "2000"},  // and one of them
		{"max_keys 1000; ban 1h", []string{"/?k=a", "/", "/"}, "4000"}, // and clients without a key
		{"max_keys 1000", []string{"/?k=a", "/"}, "2000"},
		{"ban 1h", []string{"/?k=a"}, "1e+06"}, // half of the default, twice
	} {
		t.Run("", func(t *testing.T) {
			s, a := sitetest.StartWithAdmin(t, sitetest.Config{Site: "rate_limit room {\nkey {query.k}\nsize 1\ndrip_rate 1h\n" + configtest.Lines(tc.options) + "\n}\nrespond ok"})
			for _, path := range tc.requests {
				s.Get(path)
			}
			if got := scrape(t, a.Addr)[`memory_buckets_max{limit="room"}`]; got != tc.want {
				t.Errorf("%s, after %d requests: got %s, want %s", tc.options, len(tc.requests), got, tc.want)
			}
		})
	}
}
