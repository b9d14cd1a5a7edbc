package ratelimit

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// Guards what clients see of a limit that is full: with forget a new key gets a
// bucket in place of another, with share it shares one with its network, whatever
// the key is. No other limit is touched, and the log tells of each once.
func TestNewKeysOfFullLimits(t *testing.T) {
	original := watchEvery
	t.Cleanup(func() { watchEvery = original })
	watchEvery = time.Millisecond
	limit := func(options string) string { return " {\nsize 2\ndrip_rate 1h\n" + inLines(options) + "\n}\n" }
	s := startConfig(t, config{
		global: "servers {\ntrusted_proxies static 127.0.0.1/32\n}",
		site: "rate_limit /forget forgets" + limit("max_keys 1") +
			"rate_limit /share shares" + limit("max_keys 1; when_full share") +
			"rate_limit /key keys" + limit("key {header.X-Api-Key}; max_keys 1; when_full share") +
			"rate_limit /other" + limit("") + "respond admitted",
	})
	const first, second = "200 limit=2 remaining=1 clear=3600.000", "200 limit=2 remaining=0 clear=7200.000"
	const full = "429 limit=2 remaining=0 clear=7200.000 reset=3600.000 retry-after=3600"
	from := func(path, address, want string, header ...string) step {
		return step{path: path, header: append(header, "X-Forwarded-For: "+address), want: want}
	}
	s.run(
		from("/forget", "203.0.113.1", first),
		from("/forget", "203.0.113.1", second),
		from("/forget", "203.0.113.2", first),
		from("/forget", "203.0.113.1", first),

		from("/share", "203.0.113.1", first),
		from("/share", "203.0.113.2", first),
		from("/share", "203.0.200.3", second),
		from("/share", "203.0.113.2", full),
		from("/share", "2002:cb00:7107::1", full),
		from("/share", "203.1.113.2", first),
		from("/share", "2001:db8:1::1", first),
		from("/share", "2001:db8:ffff::1", second),
		from("/share", "2001:db8:2::1", full),
		from("/share", "2001:db9::1", first),
		from("/share", "203.0.113.1", second),

		from("/key", "203.0.113.1", first, "X-Api-Key: a"),
		from("/key", "203.0.113.1", first, "X-Api-Key: b"),
		from("/key", "203.0.113.2", second, "X-Api-Key: c"),
		from("/key", "203.0.113.2", full, "X-Api-Key: d"),
		from("/key", "203.1.113.2", first, "X-Api-Key: e"),
		from("/key", "203.1.113.2", second, "X-Api-Key: a"),

		from("/other", "203.0.113.1", first),
		from("/other", "203.0.113.2", first),
		from("/other", "203.0.113.1", second),
	)
	told := func() (got []string) {
		for _, e := range s.log("warn", "rate_limit") {
			if strings.HasPrefix(fmt.Sprint(e["msg"]), "limit full: ") {
				got = append(got, fmt.Sprint(e["limit"], " ", e["max_keys"]))
			}
		}
		return got
	}
	eventually(t, "a line of each limit", func() bool { return len(told()) >= 3 })
	got := told()
	slices.Sort(got)
	if got := strings.Join(got, ", "); got != "forgets 1, keys 1, shares 1" {
		t.Errorf("the log tells of %s", got)
	}
}
