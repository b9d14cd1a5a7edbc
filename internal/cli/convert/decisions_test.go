package convert_test

import (
	"bytes"
	"fmt"
	"maps"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/convert"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/doctest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/filetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// envoyDescriptor is a descriptor of envoyproxy/ratelimit, as its service reads it.
type envoyDescriptor struct {
	Key, Value     string
	ShareThreshold bool `yaml:"share_threshold"`
	RateLimit      *struct {
		Unit      string
		Requests  int `yaml:"requests_per_unit"`
		Unlimited bool
	} `yaml:"rate_limit"`
	Descriptors []envoyDescriptor
}

// envoyService is a model of envoyproxy/ratelimit, after its documentation: it
// looks up a limit for each descriptor of a request and counts in fixed windows.
type envoyService struct {
	descriptors []envoyDescriptor
	counts      map[string]int
}

// find returns the descriptor for an entry: that of its value, else the first with
// a wildcard for it, else the one without a value.
func (*envoyService) find(list []envoyDescriptor, key, value string) *envoyDescriptor {
	var wild, rest *envoyDescriptor
	for i := range list {
		switch d := &list[i]; {
		case d.Key != key:
		case d.Value == value:
			return d
		case d.Value == "":
			rest = d
		case strings.Contains(d.Value, "*") && wild == nil:
			pattern := strings.ReplaceAll(regexp.QuoteMeta(d.Value), `\*`, ".*")
			if regexp.MustCompile("^" + pattern + "$").MatchString(value) {
				wild = d
			}
		}
	}
	if wild != nil {
		return wild
	}
	return rest
}

// paths returns the keys of all descriptors that have limits: the routes send a
// descriptor for each.
func (e *envoyService) paths(list []envoyDescriptor, before []string) map[string][]string {
	paths := make(map[string][]string)
	for _, d := range list {
		path := append(slices.Clone(before), d.Key)
		if d.RateLimit != nil {
			paths[strings.Join(path, "|")] = path
		}
		maps.Copy(paths, e.paths(d.Descriptors, path))
	}
	return paths
}

// admits counts a request with the given values, and reports whether it is admitted.
func (e *envoyService) admits(values map[string]string, now time.Duration) bool {
	admitted := true
	for _, path := range e.paths(e.descriptors, nil) {
		list, counter := e.descriptors, ""
		for i, key := range path {
			if values[key] == "" {
				break // the route sends no such descriptor
			}
			d := e.find(list, key, values[key])
			if d == nil {
				break
			}
			value := values[key]
			if d.ShareThreshold {
				value = d.Value
			}
			counter += key + "=" + value + "|"
			list = d.Descriptors
			if i < len(path)-1 || d.RateLimit == nil || d.RateLimit.Unlimited {
				continue
			}
			unit := map[string]time.Duration{
				"second": time.Second, "minute": time.Minute, "hour": time.Hour, "day": 24 * time.Hour,
				"week": 7 * 24 * time.Hour, "month": 30 * 24 * time.Hour, "year": 365 * 24 * time.Hour,
			}[d.RateLimit.Unit]
			counter += fmt.Sprint(now / unit)
			e.counts[counter]++
			admitted = admitted && e.counts[counter] <= d.RateLimit.Requests
		}
	}
	return admitted
}

// TestConvertedLimitsDecideAsEnvoy guards that the limits that are made of a
// configuration for Envoy admit and deny as its service does: nested ones, values in
// full and with stars, exceptions, shared counters and windows of every length.
func TestConvertedLimitsDecideAsEnvoy(t *testing.T) {
	const config = `
domain: messaging
descriptors:
  - key: type
    value: marketing
    rate_limit: {unit: second, requests_per_unit: 3}
    descriptors:
      - key: to
        rate_limit: {unit: day, requests_per_unit: 5}
  - key: type
    value: quiet
  - key: type
    rate_limit: {unit: minute, requests_per_unit: 6}
  - key: to
    rate_limit: {unit: week, requests_per_unit: 2}
  - key: to
    value: "206-1"
    rate_limit: {unlimited: true}
  - key: to
    value: "206*"
    rate_limit: {unit: month, requests_per_unit: 6}
  - key: to
    value: "2*7"
    share_threshold: true
    rate_limit: {unit: year, requests_per_unit: 120}
  - key: tenant
    value: "*"
    rate_limit: {unit: hour, requests_per_unit: 3}
  - key: remote_address
    rate_limit: {unit: hour, requests_per_unit: 25}
    descriptors:
      - key: path
        rate_limit: {unit: minute, requests_per_unit: 12}
      - key: path
        value: /{free} "b"
        rate_limit: {unit: minute, requests_per_unit: 2}
`
	var root struct{ Descriptors []envoyDescriptor }
	if err := yaml.Unmarshal([]byte(config), &root); err != nil {
		t.Fatal(err)
	}
	r, err := convert.Envoy([]byte(config), convert.Mapping{"type": "{header.X-Type}", "to": "{query.to}", "tenant": "{header.X-Tenant}"})
	if err != nil || len(r.Notes) > 0 {
		t.Fatal(err, r.Notes)
	}
	s := sitetest.Start(t, r.Text+"respond ok")
	e := &envoyService{descriptors: root.Descriptors, counts: make(map[string]int)}
	random := rand.New(rand.NewPCG(1, 2))
	pick := func(texts ...string) string { return texts[random.IntN(len(texts))] }
	denied := 0
	for i := range 4000 {
		steps := []time.Duration{0, 0, 0, 0, 0, 200 * time.Millisecond, 900 * time.Millisecond, 20 * time.Second, 20 * time.Minute, 20 * time.Hour, 200 * time.Hour}
		s.Clock.Advance(steps[random.IntN(len(steps)-i%5)])
		values := map[string]string{
			"type":           pick("", "marketing", "marketing", "quiet", "news"),
			"to":             pick("", "206-1", "206-2", "206-7", "257", "297", "9"),
			"tenant":         pick("", "a", "b"),
			"remote_address": pick("127.0.0.1", "127.0.0.2"),
			"path":           pick("/a", "/b", `/{free} "b"`),
		}
		s.From(values["remote_address"])
		a := s.Get(strings.ReplaceAll(values["path"], " ", "%20")+"?to="+values["to"], "X-Type: "+values["type"], "X-Tenant: "+values["tenant"])
		status := 429
		if e.admits(values, s.Clock.Now()) {
			status = 200
		} else {
			denied++
		}
		if a.StatusCode != status {
			t.Fatalf("request %d at %v, %v: got %d, want %d", i+1, s.Clock.Now(), values, a.StatusCode, status)
		}
	}
	if denied < 400 || denied > 3600 {
		t.Errorf("%d of 4000 requests were denied; the test says little", denied)
	}
}

// cellTree is a node of a tree of limits that redis-cell counts.
type cellTree struct {
	Limits   []int64
	Children map[string]*cellTree
}

// redisCell is a model of redis-cell, after its documentation: of each key it has
// the time at which the next request would be due if all had come evenly.
type redisCell map[string]time.Duration

// throttle is CL.THROTTLE for one unit. It tells also how long the next one has to wait.
func (r redisCell) throttle(key string, limits []int64, now time.Duration) (admitted bool, wait time.Duration) {
	interval := time.Duration(limits[2]) * time.Second / time.Duration(limits[1])
	earliest := func() time.Duration { return max(r[key], now) + interval - time.Duration(limits[0]+1)*interval }
	if admitted = now >= earliest(); admitted {
		r[key] = max(r[key], now) + interval
	}
	return admitted, max(earliest()-now, 0)
}

// ask counts a request of a key in all limits on the way to it.
func (r redisCell) ask(roots map[string]*cellTree, key []string, now time.Duration) (admitted bool, wait time.Duration) {
	admitted = true
	for i, part := range key {
		n, found := roots[part]
		if !found {
			n = roots["*"]
		}
		if n == nil {
			break
		}
		if n.Limits != nil {
			ok, w := r.throttle(strings.Join(key[:i+1], ":"), n.Limits, now)
			admitted, wait = admitted && ok, max(wait, w)
		}
		roots = n.Children
	}
	return admitted, wait
}

// TestConvertedLimitsDecideAsRedisCell guards that the limits that are made of a tree
// admit and deny as redis-cell does that is asked for each limit on the way, and tell
// the same waits: of names and of any other, of roots, and of parts that are not there.
func TestConvertedLimitsDecideAsRedisCell(t *testing.T) {
	const config = `
schema:
  user:
    limits: [39, 40, 10]
    children:
      "*":
        limits: [15, 30, 60]
        children:
          trade: {limits: [5, 10, 15], children: {"*": {limits: [0, 2, 1]}}}
          "look {up}": {limits: [3, 1, 1]}
          "*": {children: {btc: {limits: [1, 1, 3600]}}}
      bob: {limits: [2, 2, 3], children: {trade: {children: {eth: {limits: [0, 1, 5]}}}}}
      'root" \ {$HOME}':
  ip:
    children:
      "*": {limits: [19, 1000, 100]}
  "*": {limits: [4, 8, 5], children: {"*": {limits: [1, 1, 1]}}}
`
	var tree struct{ Schema map[string]*cellTree }
	if err := yaml.Unmarshal([]byte(config), &tree); err != nil {
		t.Fatal(err)
	}
	mapping := convert.Mapping{
		"user_1": "{header.X-User}", "user_2": "{header.X-Action}", "user_3": "{query.coin}", "ip_1": "{client_ip}",
		"any": "{header.X-Kind}", "any_1": "{header.X-Id}",
	}
	r, err := convert.Convert([]byte(config), mapping)
	if err != nil || len(r.Notes) != 1 || r.Notes[0].Line != 4 {
		t.Fatal(err, r)
	}
	s := sitetest.Start(t, r.Text+"respond ok")
	random := rand.New(rand.NewPCG(1, 2))
	pick := func(texts ...string) string { return texts[random.IntN(len(texts))] }
	cell, denied := make(redisCell), 0
	for i := range 4000 {
		steps := []time.Duration{0, 0, 7 * time.Millisecond, 100 * time.Millisecond, 250 * time.Millisecond, 500 * time.Millisecond, 1500 * time.Millisecond, 10 * time.Second, time.Hour}
		s.Clock.Advance(steps[random.IntN(len(steps)-i/100%len(steps))]) // from calm to a flood
		user, action, coin := pick("", "alex", "alex", "kim", "bob", "*", `root" \ {$HOME}`), pick("", "trade", "look {up}", "sell"), pick("", "btc", "eth")
		kind, id, ip := pick("", "", "", "user", "ip", "job"), pick("", "1", "2"), pick("127.0.0.1", "127.0.0.2")
		s.From(ip)
		a := s.Get("/?coin="+coin, "X-User: "+user, "X-Action: "+action, "X-Kind: "+kind, "X-Id: "+id)
		keys := [][]string{{"user", user, action, coin}, {"ip", ip}}
		if kind == "job" {
			keys = append(keys, []string{kind, id})
		}
		want, after, wait := 200, "", time.Duration(0)
		for _, key := range keys { // until one is denied
			if end := slices.Index(key, ""); end >= 0 {
				key = key[:end]
			}
			admitted, w := cell.ask(tree.Schema, key, s.Clock.Now())
			if wait = max(wait, w); !admitted {
				denied++
				want, after = 429, fmt.Sprint(int64((wait+time.Second-1)/time.Second))
				break
			}
		}
		if a.StatusCode != want || a.Header.Get("Retry-After") != after {
			t.Fatalf("request %d at %v, %q: got %d, Retry-After %q, want %d, %q", i+1, s.Clock.Now(), keys, a.StatusCode, a.Header.Get("Retry-After"), want, after)
		}
	}
	if denied < 1000 || denied > 3000 {
		t.Errorf("%d of 4000 requests were denied; the test says little", denied)
	}
}

// TestConvertCommand guards the command's exit status, what goes to which of its
// outputs, and how the format is found out.
func TestConvertCommand(t *testing.T) {
	t.Parallel()
	dir := sitetest.TempDir(t)
	write := func(name, text string) string { return sitetest.WriteFile(t, dir, name, text) }
	text := filetest.Read(t, "internal/cli/convert/testdata/login.yaml")
	login := write("login.yaml", string(text))
	mapped := "# Domain auth of envoyproxy/ratelimit.\nrate_limit auth {\n\tlimit auth_type-login {\n\t\tmatch vars {vars.auth_type} login\n" +
		"\t\tkey all\n\t\talgorithm fixed_window\n\t\tsize 5\n\t\twindow 1m\n\t}\n}\n"
	sitetest.RunCommand(t, "convert", login, "--descriptor", "auth_type={vars.auth_type}").Want(t, 0, mapped)
	sitetest.RunCommand(t, "convert", write("login", string(text)), "--descriptor", "auth_type={vars.auth_type}").Want(t, 0, mapped)
	r := sitetest.RunCommand(t, "convert", login)
	if want := login + ": line 3: key: {header.Auth-Type} is a guess for auth_type"; r.Status != 2 || !strings.HasPrefix(r.Errors, want) ||
		strings.Count(r.Errors, "\n") != 1 || !strings.HasPrefix(r.Out, "# Domain auth") {
		t.Errorf("a guess: got %+v", r)
	}
	sitetest.RunCommand(t, "convert", write("marked", "\ufeff"+string(text)), "--descriptor", "auth_type={vars.auth_type}").Want(t, 0, mapped)
	seed := filetest.Read(t, "internal/cli/convert/testdata/seedtree.yaml")
	converted := sitetest.RunCommand(t, "convert", write("seedtree.yaml", string(seed)))
	if converted.Status != 2 || strings.Count(converted.Errors, "\n") != 2 {
		t.Errorf("a tree without placeholders: got %+v", converted)
	}
	if r := sitetest.RunCommand(t, "check", "--config", write("seedtree.Caddyfile", ":8080 {\n"+converted.Out+"}\n")); r.Status != 0 {
		t.Errorf("check of a tree: got %+v\n%s", r, converted.Out)
	}
	tree := write("tree.json", "{\n\t\"schema\": {\"rate_limits\": {\"children\": {\"*\": {\"limits\": [0, 2, 1]}}}}\n}")
	sitetest.RunCommand(t, "convert", tree, "--descriptor", "rate_limits_1={client_ip}").Want(t, 0,
		"rate_limit rate_limits {\n\tlimit any {\n\t\tkey {client_ip}\n\t\tipv6_prefix 128\n\t\tsize 1\n\t\tdrip_rate 500ms\n\t}\n}\n")
	zones := write("Caddyfile", "a\nrate_limit {\nzone a {\nevents 1\nwindow 1s\n}\n}\n")
	huge := write("huge.yaml", strings.Repeat("#", 10<<20+1))
	for want, args := range map[string][]string{
		"accepts 1 arg(s), received 0":                                           {},
		"reading the file: open /nonexistent: no such file or directory":         {"/nonexistent"},
		"descriptor: \"a\" is not valid; use a key and a placeholder, such as ":  {"--descriptor", "a", login},
		"empty: domain: none given; use ":                                        {write("empty", "")},
		zones + ": a configuration of mholt/caddy-ratelimit needs no conversion": {zones},
		"zones.json: a configuration of mholt/caddy-ratelimit needs no conv":     {write("zones.json", `{"rate_limits": {}}`)},
		huge + ": too large; use a file of at most 10 MiB":                       {huge},
		login + ": descriptor: no limit has the key \"b\"; use a key that the":   {"--descriptor", "b={c}", login},
	} {
		r := sitetest.RunCommand(t, append([]string{"convert"}, args...)...)
		if r.Status != 1 || r.Out != "" || !strings.HasPrefix(r.Errors, "Error: ") || strings.Count(r.Errors, "\n") != 1 || !strings.Contains(r.Errors, want) {
			t.Errorf("%q: got status %d, %q, %q\nwant 1 and the line %q", args, r.Status, r.Out, r.Errors, want)
		}
	}

	cmd := convert.Command()
	var out bytes.Buffer
	cmd.SetIn(bytes.NewReader(text))
	cmd.SetOut(&out)
	cmd.SetErr(new(bytes.Buffer))
	if err := cmd.RunE(cmd, []string{"-"}); err == nil || !strings.Contains(out.String(), "limit auth_type-login {") {
		t.Errorf("the standard input: got %v\n%s", err, out.String())
	}
}

// TestDocumentedConversions guards the examples of docs/migration.md: each configuration
// of another limiter is converted to the example after it, except for comments and a
// first line that sets a variable.
func TestDocumentedConversions(t *testing.T) {
	t.Parallel()
	const doc = "docs/migration.md"
	text := filetest.Read(t, doc)
	flags := regexp.MustCompile("--descriptor '([^']+)'").FindAllStringSubmatch(string(text), -1)
	comments := regexp.MustCompile(`(?m)^\s*#.*\n+`)
	variable := regexp.MustCompile(`^vars .*\n`)
	examples := 0
	var before doctest.Block
	for _, b := range doctest.Blocks(t, doc) {
		source := before
		if before = b; source.Language != "yaml" {
			continue
		}
		examples++
		mapping := make(convert.Mapping)
		for _, f := range flags {
			key, _, _ := strings.Cut(f[1], "=")
			if kind, isPart := strings.CutSuffix(strings.TrimRight(key, "0123456789"), "_"); strings.Contains(source.Code, "key: "+key+"\n") ||
				isPart && strings.Contains(source.Code, "schema:\n  "+kind+":\n") {
				if err := mapping.Add(f[1]); err != nil {
					t.Fatal(err)
				}
			}
		}
		r, err := convert.Convert([]byte(source.Code), mapping)
		if err != nil || len(r.Notes) > 0 {
			t.Errorf("%s: %v %v", source.Place, err, r)
			continue
		}
		if got, want := comments.ReplaceAllString(r.Text, ""), variable.ReplaceAllString(b.Code, ""); got != want {
			t.Errorf("%s: got\n%s\nwant\n%s", b.Place, got, want)
		}
	}
	if examples != 4 {
		t.Errorf("found %d examples, want 4", examples)
	}
}

// TestSeed004Rules guards the two rules of seed 004 as docs/migration.md has them: 5
// marketing messages a day, and 5 logins a minute, by the clock.
func TestSeed004Rules(t *testing.T) {
	var site strings.Builder
	for _, b := range doctest.Blocks(t, "docs/migration.md") {
		if strings.Contains(b.Code, "rate_limit messaging") || strings.Contains(b.Code, "rate_limit auth") {
			site.WriteString(b.Code)
		}
	}
	s := sitetest.Start(t, site.String()+"respond ok")
	statuses := func(n int, path string, header ...string) (got string) {
		t.Helper()
		for range n {
			got += fmt.Sprint(s.Get(path, header...).StatusCode, " ")
		}
		return got
	}
	const five = "200 200 200 200 200 "
	check := func(got, want string) {
		t.Helper()
		if got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
	check(statuses(6, "/", "X-Message-Type: marketing"), five+"429 ")
	check(statuses(6, "/", "X-Message-Type: receipt"), five+"200 ")
	s.Clock.Advance(23*time.Hour - time.Millisecond) // it was 01:00
	check(statuses(1, "/", "X-Message-Type: marketing"), "429 ")
	s.Clock.Advance(time.Millisecond)
	check(statuses(6, "/", "X-Message-Type: marketing"), five+"429 ")

	s.Clock.Advance(30 * time.Second)
	check(statuses(6, "/login"), five+"429 ")
	check(statuses(1, "/"), "200 ")
	s.Clock.Advance(30*time.Second - time.Millisecond)
	check(statuses(1, "/login"), "429 ")
	s.Clock.Advance(time.Millisecond)
	check(statuses(6, "/login"), five+"429 ")
}
