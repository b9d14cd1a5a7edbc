package compile_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"go.uber.org/zap/zapcore"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/configtest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// Guards the prefixes that count unless others are set, and that they are the
// parent's where a limit takes its key.
func TestKeyInheritance(t *testing.T) {
	t.Parallel()
	l, _ := configtest.ReadyLimit(t, &config.Limit{Limits: config.NestedLimits{List: []*config.Limit{
		{Name: "plain", Size: "1"},
		{Name: "prefixed", Size: "1", IPv4Prefix: "24"},
		{Name: "group", Key: "{a}", IPv4Prefix: "16", IPv6Prefix: "48", Limits: config.NestedLimits{List: []*config.Limit{
			{Name: "same", Size: "1", Limits: config.NestedLimits{List: []*config.Limit{
				{Name: "deep", Max: "5", Duration: "1s", MinInterval: "1s"},
				{Name: "other", Key: "{b}", Size: "1"},
				{Name: "finer", IPv6Prefix: "56", Size: "1"},
			}}},
			{Name: "own", Key: "{client_ip}", IPv4Prefix: "8", Size: "1"},
		}}},
	}}})
	var got []string
	var list func(*rule.Limit)
	list = func(l *rule.Limit) {
		for _, b := range l.Buckets {
			got = append(got, fmt.Sprintf("%s %s /%d /%d", b.Path, b.Limit.Key, b.Limit.Key.Prefixes.IPv4, b.Limit.Key.Prefixes.IPv6))
		}
		for _, child := range l.Within {
			list(child)
		}
	}
	list(l)
	want := []string{
		"plain {http.vars.client_ip} /32 /64",
		"prefixed {http.vars.client_ip} /24 /64",
		"group/same {a} /16 /48",
		"group/same/deep {a} /16 /48",
		"group/same/deep/min_interval {a} /16 /48",
		"group/same/other {b} /32 /64",
		"group/same/finer {a} /16 /56",
		"group/own {http.vars.client_ip} /8 /64",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// Guards that the short names of the address placeholders, which a Caddyfile
// replaces, also mean the address in JSON.
func TestKeyShorthandsInJSON(t *testing.T) {
	t.Parallel()
	const text = `{"key":"{client_ip} {remote_host} {http.request.host}","size":1}`
	var l config.Limit
	if err := json.Unmarshal([]byte(text), &l); err != nil {
		t.Fatal(err)
	}
	ready, _ := configtest.ReadyLimit(t, &l)
	want := "{http.vars.client_ip} {http.request.remote.host} {http.request.host}"
	if got := ready.Key.String(); got != want {
		t.Errorf("got key %s, want %s", got, want)
	}
	r := sitetest.NewRequest()
	r.SetClient("203.0.113.9")
	buckets, err := r.Queries(ready)
	if err != nil || len(buckets) != 1 {
		t.Fatalf("got buckets %+v, %v, want one", buckets, err)
	}
	want = "203.0.113.9,192.0.2.1,example.com"
	if got := buckets[0].Key; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// Guards that leaving out what makes the key is neither a bypass nor shares a
// bucket with everyone who does: the client's masked address stands in, apart
// from keys that clients choose, in both buckets of a legacy limit too.
func TestMissingKeyFallsBackToAddress(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name, key string
		values    map[string]string
		wantKey   string
		wantName  string
	}{
		{"none", "{a}", nil, "198.51.100.0/24", "limit@client_ip"},
		{"empty", "{a}", map[string]string{"a": ""}, "198.51.100.0/24", "limit@client_ip"},
		{"none of several", "{a}-{b}", nil, "198.51.100.0/24", "limit@client_ip"},
		{"no name", "{}", nil, "198.51.100.0/24", "limit@client_ip"},
		{
			"an address that is none",
			"{http.request.remote.host}",
			map[string]string{"http.request.remote.host": ""},
			"198.51.100.0/24", "limit@client_ip"},
		{"one of several", "{a}-{b}", map[string]string{"b": "x"}, ",x", "limit"},
		{"white space", "{a}", map[string]string{"a": " \t"}, "198.51.100.0/24", "limit@client_ip"},
		{"white space in text", "x-{a}", map[string]string{"a": "\t"}, "198.51.100.0/24", "limit@client_ip"},
		{"the address as a key", "{a}", map[string]string{"a": "198.51.100.7"}, "198.51.100.0/24", "limit"},
		{"static", "everyone", nil, "everyone", "limit"},
		{"escaped", `\{a\}`, nil, "{a}", "limit"},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			for _, l := range []*config.Limit{
				{Name: "limit", Key: tc.key, IPv4Prefix: "24", Size: "1"},
				{Name: "limit", Key: tc.key, IPv4Prefix: "24", Max: "5", Duration: "1s", MinInterval: "1s"},
			} {
				ready, logs := configtest.ReadyLimit(t, l)
				r := sitetest.NewRequest()
				r.SetClient("::ffff:198.51.100.7")
				for name, v := range tc.values {
					if name == "http.request.remote.host" {
						r.RemoteAddr = v
						continue
					}
					r.Replacer.Set(name, v)
				}
				buckets, err := r.Queries(ready)
				if err != nil {
					t.Fatal(err)
				}
				own, fallback := strings.CutSuffix(tc.wantName, "@client_ip")
				want := []string{tc.wantName + " " + tc.wantKey}
				if l.MinInterval != "" {
					want = append(want, strings.Replace(tc.wantName, own, own+"/min_interval", 1)+" "+tc.wantKey)
				}
				var got []string
				for _, b := range buckets {
					got = append(got, b.Name+" "+b.Key)
				}
				if !slices.Equal(got, want) {
					t.Errorf("got buckets and keys %q, want %q", got, want)
				}
				if got, want := logs.Len(), map[bool]int{true: 1}[fallback]; got != want {
					t.Errorf("got %d log entries, want %d", got, want)
				}
			}
		})
	}
}

// Guards that missing keys are reported to the administrator, by the template and
// not by what anyone sent, once for each limit until the configuration is
// loaded again, and not once for each request.
func TestMissingKeyWarnsOnce(t *testing.T) {
	t.Parallel()
	load := func() (*rule.Limit, func() []string) {
		l, logs := configtest.ReadyLimit(t, &config.Limit{Limits: config.NestedLimits{List: []*config.Limit{
			{Name: "a", Key: "{a}", Size: "1", Limits: config.NestedLimits{List: []*config.Limit{{Name: "within", Size: "1"}}}},
			{Name: "b", Key: "{b} {client_ip}", Size: "1"},
			{Name: "c", Key: "{c}-{a}", Size: "1"},
			{Name: "static", Key: "all", Size: "1"},
		}}})
		return l, func() []string {
			entries := logs.TakeAll()
			warned := make([]string, len(entries))
			for i, e := range entries {
				fields := e.ContextMap()
				warned[i] = fmt.Sprintf("%s %s %s", e.Level, fields["limit"], fields["key"])
			}
			return warned
		}
	}
	want := []string{"warn a {a}", "warn a/within {a}", "warn c {c}-{a}"}
	for range 2 { // two configurations
		l, warned := load()
		r := sitetest.NewRequest()
		r.Replacer.Set("a", "secret")
		if _, err := r.Queries(l); err != nil {
			t.Fatal(err)
		}
		if got := warned(); len(got) > 0 {
			t.Errorf("of a request that has its keys got %q", got)
		}
		var requests sync.WaitGroup
		for range 20 {
			requests.Go(func() {
				if _, err := sitetest.NewRequest().Queries(l); err != nil {
					t.Error(err)
				}
			})
		}
		requests.Wait()
		got := warned()
		slices.Sort(got)
		if !slices.Equal(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

// Guards that a request without a known client address is still limited.
func TestUnknownClientAddress(t *testing.T) {
	t.Parallel()
	l, logs := configtest.ReadyLimit(t, &config.Limit{Name: "a", Size: "1"})
	r := sitetest.NewRequest()
	r.SetClient("")
	buckets, err := r.Queries(l)
	if err != nil || len(buckets) != 1 {
		t.Fatalf("got buckets %+v, %v, want one", buckets, err)
	}
	if b := buckets[0]; b.Name != "a@client_ip" || b.Key != "" {
		t.Errorf("got bucket %q with key %q, want a@client_ip with none", b.Name, b.Key)
	}
	if logs.FilterLevelExact(zapcore.WarnLevel).Len() != 1 {
		t.Errorf("got %d log entries, want a warning", logs.Len())
	}
}

// Guards that limits which have their key in common agree on it within one
// request, and that it is read anew for the next.
func TestKeyOfEachRequest(t *testing.T) {
	t.Parallel()
	l, _ := configtest.ReadyLimit(t, &config.Limit{Name: "a", Key: "{a}", Size: "1", Limits: config.NestedLimits{List: []*config.Limit{
		{Name: "b", Size: "1"},
		{Name: "c", Key: "{c}", Size: "1"},
		{Name: "d", Size: "1"},
	}}})
	for _, v := range []string{"1", "2"} {
		r := sitetest.NewRequest()
		r.Replacer.Set("a", "a"+v)
		r.Replacer.Set("c", "c"+v)
		buckets, err := r.Queries(l)
		if err != nil {
			t.Fatal(err)
		}
		got := make([]string, len(buckets))
		for i, b := range buckets {
			got[i] = b.Name + " " + b.Key
		}
		if want := []string{"a a" + v, "a/b a" + v, "a/c c" + v, "a/d a" + v}; !slices.Equal(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}
