package behaviour

import (
	"regexp"
	"strings"
	"testing"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/doctest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// TestOnCall guards that what docs/on-call.md shows is what commands print,
// except for the numbers in it.
func TestOnCall(t *testing.T) {
	redis := redistest.StartProxy(t, redistest.Start(t).Addr)
	const one = "rate_limit {\nlimit site {\nrate 60/1m\ntrack_top 100\n}\n}\nrespond ok"
	const login = "rate_limit {\nlimit site {\nrate 60/1m\nlimit login {\nmatch path /login\nrate 3/1m\nban 10m\n}\n}\n}\nrespond ok"
	var shown []doctest.Block
	for _, b := range doctest.Blocks(t, "docs/on-call.md") {
		if strings.HasPrefix(b.Code, "$ caddy rate-limit ") {
			shown = append(shown, b)
		}
	}
	cases := []struct {
		sitetest.Config
		path     string // of the requests
		requests int
		then     func() // before the last 20 of them
	}{
		{sitetest.Config{Site: login}, "/login", 6, nil},
		{sitetest.Config{Site: "rate_limit {\nlimit api {\nrate 60/1m\nlimit search {\nmatch path /search\nrate 5/1m\n}\n}\n}\nrespond ok"}, "/search", 8, nil},
		{sitetest.Config{Site: one}, "/", 70, nil},
		{sitetest.Config{Site: one}, "/", 0, nil},
		{sitetest.Config{Site: "rate_limit {\nlimit site {\nmatch path /v1/*\nrate 60/1m\n}\nlimit tenant {\nkey {header.X-Tenant}\nrate 3/1h\ndry_run\n}\n" +
			"limit random {\nkey {http.request.uuid}\nrate 5/1m\n}\n}\nrespond ok"}, "/", 8, nil},
		{sitetest.Config{Global: "order rate_limit after respond", Site: one}, "/", 0, nil},
		{sitetest.Config{Global: "rate_limit {\nredis " + redis.Addr + "\n}", Site: one}, "/", 22, redis.BlackHole},
	}
	if len(shown) != len(cases) {
		t.Fatalf("the page shows %d commands, want %d", len(shown), len(cases))
	}
	numbers, spaces := regexp.MustCompile(`(?:[\d.]+(?:µs|ms|h|m|s)?)+`), regexp.MustCompile(` +`)
	same := func(line string) string {
		return strings.TrimSpace(spaces.ReplaceAllString(numbers.ReplaceAllString(line, "0"), " "))
	}
	for i, b := range shown {
		t.Run(b.Place, func(t *testing.T) {
			s, a := sitetest.StartWithAdmin(t, cases[i].Config)
			for n := range cases[i].requests {
				if cases[i].then != nil && n == cases[i].requests-20 {
					cases[i].then()
				}
				s.Get(cases[i].path)
			}
			command, lines, _ := strings.Cut(b.Code, "\n")
			args := strings.Fields(strings.ReplaceAll(strings.TrimPrefix(command, "$ caddy rate-limit "), "'X-Forwarded-For: ", "'X-Forwarded-For:"))
			for j := range args {
				args[j] = strings.Trim(args[j], "'")
			}
			if args[0] == "check" || args[0] == "explain" {
				text := "{\n" + cases[i].Global + "\n}\nhttp://localhost:8080 {\n" + cases[i].Site + "\n}\n"
				args = append(args, "--config", sitetest.ConfigFile(t, text))
			} else {
				args = append(args, "--address", a.Addr)
			}
			printed := sitetest.RunCommand(t, args...)
			found := make(map[string]bool)
			for line := range strings.Lines(printed.Out) {
				found[same(line)] = true
			}
			for line := range strings.Lines(lines) {
				if line = same(line); !found[line] {
					t.Errorf("%q is not printed:\n%s%s", line, printed.Out, printed.Errors)
				}
			}
		})
	}
}
