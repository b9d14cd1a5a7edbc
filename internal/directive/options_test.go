package directive_test

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/directive"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/configtest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/doctest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/filetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/racetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// TestOptions guards what is said of options, in a Caddyfile and in JSON: what a row of
// testdata/options/*.txt has is accepted, or refused in one line of fewer than 300
// bytes that names the option, what it got and what would be right. The command check says the same.
//
// A row is "what is written => the error", or without an error if it is accepted. One that
// ends in three dots is the beginning of the error. In a Caddyfile, "; " is the end of a
// line, \n a line break within quotes and \t a tab. The line "in" above rows is the
// configuration around them, which are at its three dots; "env" sets a variable.
func TestOptions(t *testing.T) {
	racetest.SingleGoroutine(t)
	files, err := filepath.Glob("internal/directive/testdata/options/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("found no files: %v", err)
	}
	for _, file := range files {
		rows := optionRows(t, file)
		t.Run(filepath.Base(file), func(t *testing.T) {
			for _, r := range rows {
				r.check(t)
			}
		})
	}
}

// optionRow is a row of TestOptions.
type optionRow struct {
	place  string // file:line
	config string // a Caddyfile or JSON
	want   string // the error
}

// optionRows reads the rows of a file, and sets its variables until the test ends.
func optionRows(t *testing.T, file string) (rows []optionRow) {
	t.Helper()
	text := filetest.Read(t, file)
	in := ""
	for i, line := range strings.Split(string(text), "\n") {
		place := fmt.Sprintf("%s:%d", file, i+1)
		word, rest, _ := strings.Cut(line, " ")
		written, want, isRow := strings.Cut(line, "=>")
		switch {
		case line == "" || word == "#":
		case word == "env":
			name, value, _ := strings.Cut(rest, "=")
			if _, taken := os.LookupEnv(name); taken {
				t.Fatalf("%s: %s is set already", place, name)
			}
			t.Setenv(name, value)
		case word == "in" && strings.Contains(rest, "..."):
			in = rest
		case isRow && in != "":
			config := strings.Replace(in, "...", strings.TrimSpace(written), 1)
			rows = append(rows, optionRow{place, config, strings.TrimSpace(want)})
		default:
			t.Fatalf("%s: got %q, want a row", place, line)
		}
	}
	return rows
}

// check loads the configuration.
func (r *optionRow) check(t *testing.T) {
	t.Helper()
	var err error
	if strings.HasPrefix(r.config, `{"`) {
		err = configtest.Validate([]byte(r.config))
	} else {
		err = configtest.ValidateCaddyfile(strings.NewReplacer("; ", "\n", `\n`, "\n", `\t`, "\t").Replace(r.config) + "\n")
	}
	got := ""
	if err != nil {
		got = configtest.Wrapping.ReplaceAllLiteralString(err.Error(), "")
	}
	begins, open := strings.CutSuffix(r.want, "...")
	if got != r.want && (!open || begins == "" || !strings.HasPrefix(got, begins)) {
		t.Errorf("%s:\n got error %s\nwant error %s", r.place, got, r.want)
	}
	if len(got) >= 300 {
		t.Errorf("%s: error %q has %d bytes, want fewer than 300", r.place, got, len(got))
	}
	if strings.Contains(got, "\n") || strings.Contains(got, "canary") {
		t.Errorf("%s: error %q, want one line without what is secret", r.place, got)
	}
}

// Guards that texts and lists which are longer than anything they could stand
// for are refused, and that a secret is not shown by it.
func TestLongOptions(t *testing.T) {
	long := strings.Repeat("canary", 11_000)
	addresses := make([]string, 129)
	for i := range addresses {
		addresses[i] = fmt.Sprintf("a:%d", i+1)
	}
	for block, want := range map[string]string{
		`redis a:1 {; key_prefix ` + strings.Repeat("x", 129) + `; }`: `redis: key_prefix: "` +
			strings.Repeat("x", 64) + `…" is not valid; use text without braces of at most 128 bytes, at Caddyfile:4`,
		`redis a:1 {; username ` + long + `; }`:    `redis: username: 66000 bytes are too many; use at most 65536, at Caddyfile:3`,
		`redis a:1 {; password ` + long + `; }`:    `redis: password: 66000 bytes are too many; use at most 65536, at Caddyfile:3`,
		`redis a:1 {; key_secret ` + long + `; }`:  `redis: key_secret: 66000 bytes are too many; use at most 65536, at Caddyfile:3`,
		`redis a:1 {; master_name ` + long + `; }`: `redis: master_name: 66000 bytes are too many; use at most 65536, at Caddyfile:3`,
		`redis ` + strings.Join(addresses, " "):    `redis: addresses: 129 are too many; use at most 128, as the others are discovered, at Caddyfile:3`,
		`redis /` + strings.Repeat("x", 108): `redis: address: "/` + strings.Repeat("x", 63) +
			`…" ` + wantAddress + ", at Caddyfile:3",
		`redis ` + strings.Repeat("x", 254) + `:1`: `redis: address: "` + strings.Repeat("x", 64) +
			`…" ` + wantAddress + ", at Caddyfile:3",
		`redis a:1 {; key_secret ` + strings.Repeat("x", 65536) + `; }`: ``,
	} {
		configtest.WantError(t, configtest.ValidateCaddyfile(configtest.InApp(block)), want)
	}
}

// Guards that a running Caddy goes on, and takes the next configuration, after
// it was given numbers that it can't have.
func TestLoadAfterOutOfRangeNumbers(t *testing.T) {
	const site = "rate_limit {\nsize 9\n}\nrespond admitted"
	s := sitetest.StartConfig(t, sitetest.Config{Site: site})
	for _, size := range []string{"2147483647", "3000000000", "1000000000"} {
		bad := sitetest.Config{Site: site, Global: "rate_limit {\nredis 127.0.0.1:1 {\ndb " + size + "\n}\n}"}
		_, err := configtest.Adapt(string(bad.Caddyfile(s.Addr, s.LogPath)))
		if err == nil || !strings.Contains(err.Error(), `db: "`+size+`" is not valid`) {
			t.Errorf("got error %v", err)
		}
		var root map[string]any
		if err := json.Unmarshal(sitetest.Config{Site: site}.JSON(t, s.Addr, s.LogPath), &root); err != nil {
			t.Fatal(err)
		}
		root["apps"].(map[string]any)["rate_limit"] = map[string]any{
			"redis": map[string]any{"addresses": []string{"127.0.0.1:1"}, "db": json.Number(size)},
		}
		text, err := json.Marshal(root)
		if err != nil {
			t.Fatal(err)
		}
		if err := caddy.Load(text, true); err == nil || !strings.Contains(err.Error(), `db: "`+size+`" is not valid`) {
			t.Errorf("got error %v", err)
		}
		if a := s.Get("/"); a.StatusCode != 200 {
			t.Errorf("after a bad configuration got %s", a)
		}
		if err := s.Load(sitetest.Config{Site: site}); err != nil {
			t.Errorf("the next configuration: %v", err)
		}
	}
}

// Guards that what is the same for all requests is resolved when the
// configuration is loaded, in every number.
func TestNumbersFromEnvironment(t *testing.T) {
	t.Setenv("RATE_LIMIT_TEST_N", "3")
	t.Setenv("RATE_LIMIT_TEST_D", "1h")
	env := func(text string) string { return strings.ReplaceAll(text, "$", "env.RATE_LIMIT_TEST_") }

	s := sitetest.StartConfig(t, sitetest.Config{
		Global: env("rate_limit {\nmemory {\nmax_keys {$N}\n}\n}"),
		Site: env("rate_limit /max {\nmax {$N}\nduration {$D}\nmin_interval 1{$N}ms\n}\n" +
			"rate_limit /size {\nsize {$N}\ndrip_rate {$D}\ndrip_size {$N}\ncost {$N}\nfactor 1{query.f}\n" +
			"ipv4_prefix {$N}\nipv6_prefix {$N}\n}\nrespond admitted"),
	})
	s.Run(
		sitetest.Step{Path: "/size", Want: "200 limit=3 remaining=0 clear=3600.000"},
		sitetest.Step{Path: "/size", Want: "429 limit=3 remaining=0 clear=3600.000 reset=3600.000 retry-after=3600"},
		sitetest.Step{Path: "/max", Want: "200 limit=1 remaining=0 clear=1200.000"},
	)
	if n := s.Process.Newest().MaxKeys; n != 3 {
		t.Errorf("max_keys is %d", n)
	}
}

// Guards the lists of options from which errors tell where one belongs: each is known
// where it is listed.
func TestListedOptions(t *testing.T) {
	t.Parallel()
	for at, in := range map[*directive.Scope]string{
		directive.BlockScope:       ":8080 {; rate_limit {; ...; }; }",
		directive.LimitScope:       ":8080 {; rate_limit {; limit a {; ...; }; }; }",
		directive.ZoneScope:        ":8080 {; rate_limit {; zone a {; ...; }; }; }",
		directive.DistributedScope: ":8080 {; rate_limit {; distributed {; ...; }; }; }",
		directive.GlobalScope:      "{; rate_limit {; ...; }; }",
		directive.RedisScope:       "{; rate_limit {; redis a:1 {; ...; }; }; }",
		directive.MemoryScope:      "{; rate_limit {; memory {; ...; }; }; }",
	} {
		for _, option := range at.Options {
			_, err := configtest.Adapt(strings.NewReplacer("; ", "\n", "...", option+" a b c").Replace(in) + "\n")
			if err != nil && (strings.Contains(err.Error(), "unknown option") || strings.Contains(err.Error(), "got it in")) {
				t.Errorf("%s: %v", option, err)
			}
		}
	}
}

// TestHintsAreNoOptions guards that a hint about a word alone is given only where it is no option.
func TestHintsAreNoOptions(t *testing.T) {
	t.Parallel()
	for _, h := range directive.Hints {
		for _, word := range h.FirstWords() {
			for _, at := range h.In {
				if slices.Contains(at.Options, word) && !strings.Contains(h.Written, " ") {
					t.Errorf("%s is an option of %s", word, at.Place)
				}
			}
		}
	}
}

// TestWordsAnywhere guards that every option of this module and of mholt/caddy-ratelimit, and
// every word from elsewhere, has an error with what to write instead wherever it is not an option: in one short
// line with file and line, which does not list the options.
func TestWordsAnywhere(t *testing.T) {
	t.Parallel()
	places := map[*directive.Scope]string{
		directive.BlockScope:       ":8080 {; rate_limit {; WORD; }; }",
		directive.LimitScope:       ":8080 {; rate_limit {; size 5; limit a {; size 5; WORD; }; }; }",
		directive.ZoneScope:        ":8080 {; rate_limit {; zone a {; events 5; window 1m; WORD; }; }; }",
		directive.DistributedScope: ":8080 {; rate_limit {; distributed {; WORD; }; }; }",
		directive.GlobalScope:      "{; rate_limit {; WORD; }; }",
		directive.RedisScope:       "{; rate_limit {; redis a:1 {; WORD; }; }; }",
		directive.MemoryScope:      "{; rate_limit {; memory {; WORD; }; }; }",
	}
	words := make(map[string]bool)
	for _, s := range append(slices.Collect(maps.Keys(places)), directive.ZonesScope) {
		for _, word := range s.Options {
			words[word] = true
		}
	}
	for _, h := range directive.Hints {
		for _, word := range h.FirstWords() {
			words[word] = words[word] || h.In[0].Options != nil && !strings.Contains(h.Written, " ")
		}
	}
	maps.DeleteFunc(words, func(_ string, written bool) bool { return !written }) // those beside the directive
	writeInstead := regexp.MustCompile(`use |did you mean |leave it out: |is a directive: is the } of rate_limit missing before it`)
	told := 0
	for at, in := range places {
		line, _, _ := strings.Cut(in, "WORD")
		where := fmt.Sprintf(", at Caddyfile:%d", 1+strings.Count(line, "; "))
		for word := range words {
			if slices.Contains(at.Options, word) || at == directive.BlockScope && slices.Contains(directive.ZonesScope.Options, word) {
				continue
			}
			for _, written := range []string{word, word + " 5", word + " a b c d", word + " {; size 5; }", strings.ToUpper(word) + ": 5"} {
				_, err := configtest.Adapt(strings.ReplaceAll(strings.Replace(in, "WORD", written, 1), "; ", "\n") + "\n")
				if err == nil {
					t.Errorf("%s in %s: got no error", written, at.Place)
					continue
				}
				got, listed := err.Error(), 0
				for _, name := range config.LimitOptions {
					if slices.Contains(strings.FieldsFunc(got, func(r rune) bool { return r != '_' && (r < 'a' || r > 'z') }), name) {
						listed++
					}
				}
				if !writeInstead.MatchString(got) || !strings.HasSuffix(got, where) || len(got) >= 300 || strings.Contains(got, "\n") || listed > 5 {
					t.Errorf("%s in %s: got %q, want one line of fewer than 300 bytes, with what to write and%s", written, at.Place, got, where)
				}
				told++
			}
		}
	}
	if told < 1000 {
		t.Errorf("tried %d words, want all", told)
	}
}

// TestDocumentsInErrors guards that what errors and hints say to read is there: a document by its
// address, and a heading in it.
func TestDocumentsInErrors(t *testing.T) {
	t.Parallel()
	link := regexp.MustCompile(`(?:Docs *\+\s*"|%s)([a-z-]+\.md)(?:#([a-z-]+))?`)
	local := regexp.MustCompile(`^[^/]*"[^"]*\bdocs/[a-z-]+\.md`)
	found := 0
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() && slices.Contains([]string{"bench", "test", "tools", ".git"}, path) {
			return cmp.Or(err, fs.SkipDir)
		}
		if filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		text, err := os.ReadFile(path)
		for line := range strings.Lines(string(text)) {
			if local.MatchString(line) {
				t.Errorf("%s: %s names a document without its address", path, strings.TrimSpace(line))
			}
		}
		for _, m := range link.FindAllStringSubmatch(string(text), -1) {
			found++
			if m[2] != "" && !slices.Contains(doctest.Anchors(t, filepath.Join("docs", m[1])), m[2]) {
				t.Errorf("%s: docs/%s has no heading %s", path, m[1], m[2])
			} else if _, err := os.Stat(filepath.Join("docs", m[1])); err != nil {
				t.Errorf("%s: %v", path, err)
			}
		}
		return err
	})
	if err != nil || found < 8 {
		t.Errorf("found %d (%v), want all", found, err)
	}
}

// hintSamples are words of the kinds of hints.
var hintSamples = map[string]string{
	"whole": "5", "secs": "60", "ms": "60000", "d": "1m", "unit": "minute", "calendar": "month", "monthly": "1000/month",
	"windowed": "fixed_window", "rated": "5r/s", "all": "x", "durations": "10m,1h", "codes": "401,403", "hostdb": "localhost:6379/1", "families": "github,ratelimit-11", "paths": "/a,", "verb": "POST", "matching": "method POST",
	"regexp": "^/a", "suffix": ".php", "network": "10.0.0.0/8", "text": "slow down", "addresses": "a:1,b:1",
	"n": "5", "rate": "10rps", "status": "401", "denial": "503", "memory": "10m", "byterate": "2MB/s", "kilo": "500k", "w": "X-A", "field": "X-A",
	"host": "localhost", "server": "a:1", "units": "5/m", "negated": "!path", "defined": "@a", "path": "/a", "url": "https://a.com/b?c", "matcher": "/a/b",
}

// TestHints guards that each hint applies: what it says to write loads in place of what was written.
func TestHints(t *testing.T) {
	racetest.SingleGoroutine(t)
	within := map[*directive.Scope][]string{ // a hint may need others beside it
		directive.BlockScope:          {":8080 {; rate_limit {; ...; }; }", ":8080 {; rate_limit {; size 5; ...; }; }", ":8080 {; rate_limit {; window 1m; ...; }; }", ":8080 {; rate_limit {; size 5; window 1m; ...; }; }", ":8080 {; rate_limit {; algorithm sliding_log; size 5; ...; }; }"},
		directive.LimitScope:          {":8080 {; rate_limit {; limit a {; ...; }; }; }", ":8080 {; rate_limit {; limit a {; size 5; ...; }; }; }", ":8080 {; rate_limit {; limit a {; window 1m; ...; }; }; }", ":8080 {; rate_limit {; limit a {; size 5; window 1m; ...; }; }; }", ":8080 {; rate_limit {; limit a {; algorithm sliding_log; size 5; ...; }; }; }"},
		directive.ZoneScope:           {":8080 {; rate_limit {; zone a {; ...; }; }; }", ":8080 {; rate_limit {; zone a {; events 5; ...; }; }; }", ":8080 {; rate_limit {; zone a {; window 1m; ...; }; }; }", ":8080 {; rate_limit {; zone a {; window 1m; events 5; ...; }; }; }"},
		directive.DistributedScope:    {":8080 {; rate_limit {; zone a {; window 1m; events 5; }; distributed {; ...; }; }; }"},
		directive.GlobalScope:         {"{; rate_limit {; ...; }; }; :8080 {; respond ok; }"},
		directive.RedisScope:          {"{; rate_limit {; redis a:1 {; ...; }; }; }; :8080 {; respond ok; }"},
		directive.MemoryScope:         {"{; rate_limit {; memory {; ...; }; }; }; :8080 {; respond ok; }"},
		directive.BesideScope:         {":8080 {; rate_limit ...; }", ":8080 {; rate_limit ... second; }", ":8080 {; rate_limit ... {; size 5; }; }", ":8080 {; rate_limit @a ... {; key static; }; @a path /a; }"},
		directive.BesideRateScope:     {":8080 {; rate_limit 3/m ...; }"},
		directive.BesideRequestsScope: {":8080 {; rate_limit {client_ip} 3r/m ...; }"},
		directive.BesideNameScope:     {":8080 {; rate_limit robots ... 3/m; }"},
	}
	for _, h := range directive.Hints {
		written := writtenLike(t, h.Written)
		for _, at := range h.In {
			for _, line := range written {
				if h.Written == "limit <matcher>" {
					line += " {; size 1; }"
				}
				var problems []string
				applied := 0
				for _, in := range within[at] {
					for _, line := range []string{line, line + " 1m"} { // some need more words
						src := strings.ReplaceAll(strings.Replace(in, "...", line, 1), "; ", "\n") + "\n"
						err := configtest.ValidateCaddyfile(src)
						if err == nil {
							continue // it was right
						}
						all := applications(src, err)
						for _, with := range all {
							if err := configtest.ValidateCaddyfile(with); err != nil && !noFile(err) {
								problems = append(problems, fmt.Sprintf("%v, but with that: %v\n%s", err, err, with))
							} else {
								applied++
							}
						}
					}
				}
				if strings.HasPrefix(h.Use, `"`) && applied == 0 {
					t.Errorf("%s in %s: %s", line, at.Place, strings.Join(problems, "\n"))
				}
			}
		}
	}
}

// writtenLike returns all that a hint may be about, with a sample of each kind of word. Of words that mean the
// same beside other lines, the first is enough.
func writtenLike(t *testing.T, pattern string) []string {
	t.Helper()
	all := []string{""}
	parts := strings.Split(pattern, "; ")
	for i, part := range parts {
		separator := "; "
		for pattern := range strings.FieldsSeq(strings.Trim(part, "()")) {
			words := strings.Split(pattern, "|")
			if i > 0 {
				words = words[:1]
			}
			var longer []string
			for _, word := range words {
				if s := directive.Slot.FindStringSubmatch(word); s != nil {
					if word = hintSamples[s[1]]; word == "" {
						t.Fatalf("no sample of %s", s[0])
					}
				}
				for _, text := range all {
					longer = append(longer, strings.TrimPrefix(text+separator+word, "; "))
				}
			}
			all, separator = longer, " "
		}
	}
	return all
}

// noFile reports whether a config is right except that a file is not there.
func noFile(err error) bool { return strings.HasSuffix(err.Error(), "no such file or directory") }

// TestSuggestionsLoad guards that what an error in testdata/options says to write can be written: if
// it is put into place, the configuration loads.
func TestSuggestionsLoad(t *testing.T) {
	racetest.SingleGoroutine(t)
	files, err := filepath.Glob("internal/directive/testdata/options/*.txt")
	if err != nil {
		t.Fatal(err)
	}
	applied := 0
	for _, file := range files {
		for _, r := range optionRows(t, file) {
			if r.want == "" || strings.HasPrefix(r.config, `{"`) {
				continue
			}
			src := strings.NewReplacer("; ", "\n", `\n`, "\n", `\t`, "\t").Replace(r.config) + "\n"
			err := configtest.ValidateCaddyfile(src)
			if err == nil {
				continue
			}
			for _, with := range applications(src, err) {
				applied++
				if wrong := follow(src, with); wrong != nil {
					t.Errorf("%s: %v\nwith that:\n%s%v", r.place, err, with, wrong)
				}
			}
		}
	}
	if applied < 60 {
		t.Errorf("applied %d, want all", applied)
	}
}

// follow validates a Caddyfile with what an error says to write instead of a line of the original, and follows
// further errors as long as they are about the original: what they say to write must not be wrong itself.
func follow(original, src string) error {
	var err error
	for range 5 {
		if err = validateCompleted(src); err == nil || noFile(err) {
			return nil
		}
		at := errorLine.FindStringSubmatch(err.Error())
		if at == nil {
			return err
		}
		n, _ := strconv.Atoi(at[1])
		wrong, use := strings.Split(src, "\n")[n-1], saysToWrite.FindStringSubmatch(err.Error())
		next := applications(src, err)
		if len(next) == 0 || !strings.Contains(original, "\n"+wrong+"\n") {
			return err
		}
		for _, name := range insteadOf(use[1]) {
			if !strings.Contains(original, "\n"+name) {
				return err
			}
		}
		src = next[0]
	}
	return err
}

// insteadOf returns the options that an error says to replace by one line, if there are several.
func insteadOf(use string) []string {
	_, names, _ := strings.Cut(use, " instead of ")
	return strings.FieldsFunc(strings.ReplaceAll(names, " and ", " "), func(r rune) bool { return r == ' ' || r == ',' })
}

// validateCompleted validates a Caddyfile of testdata/options, of which some lack what is beside the
// point: the size of a limit, the events of a zone, or a block for zones only.
func validateCompleted(src string) (err error) {
	for _, block := range []string{"", "size 5\n", "algorithm sliding_log\nsize 5\n"} {
		for _, zone := range []string{"", "events 5\n", "window 1m\n", "events 5\nwindow 1m\n"} {
			completed := strings.Replace(src, "rate_limit api {\n", "rate_limit api {\n"+block, 1)
			if strings.Contains(src, "zone a {\n") {
				completed = strings.NewReplacer("rate_limit api {\n", "rate_limit {\n", "zone a {\n", "zone a {\n"+zone).Replace(src)
			}
			if wrong := configtest.ValidateCaddyfile(completed); wrong == nil {
				return nil
			} else if err == nil {
				err = wrong
			}
		}
	}
	return err
}

// In errors, where they are and what they say to write.
var (
	errorLine   = regexp.MustCompile(`, at Caddyfile:([0-9]+)$`)
	saysToWrite = regexp.MustCompile(`(?:; use|did you mean) (.*?)\??, at Caddyfile`)
	inText      = regexp.MustCompile(`"((?:[^"\\]|\\.)*)"`)
	valueOnly   = regexp.MustCompile(`: "([^"]*)" is not valid; use ([0-9][^ ,]*), at Caddyfile`)
	optionOnly  = regexp.MustCompile(`did you mean ([a-z_]+)\?, at Caddyfile`)
)

// applications returns a Caddyfile with each of what an error says to write in place of what is
// wrong, if it says that: lines in quotes, an option or a value.
func applications(src string, err error) (all []string) {
	text := configtest.Wrapping.ReplaceAllLiteralString(err.Error(), "")
	at, use := errorLine.FindStringSubmatch(text), saysToWrite.FindStringSubmatch(text)
	if at == nil || use == nil || strings.Contains(text, "not an option of") || strings.Contains(use[1], "…") {
		return nil
	}
	n, _ := strconv.Atoi(at[1])
	lines := strings.Split(src, "\n")
	wrong := lines[n-1]
	with := func(lines []string, replaced string) {
		all = append(all, strings.Join(slices.Concat(lines[:n-1], []string{replaced}, lines[n:]), "\n"))
	}
	if m := valueOnly.FindStringSubmatch(text); m != nil {
		with(lines, strings.Replace(wrong, m[1], m[2], 1))
		return all
	}
	if m := optionOnly.FindStringSubmatch(text); m != nil {
		i := strings.IndexFunc(wrong, func(r rune) bool { return strings.ContainsRune(" :=", r) })
		if i < 0 {
			i = len(wrong)
		}
		with(lines, m[1]+" "+strings.TrimLeft(wrong[i:], " :="))
		return all
	}
	for i := range lines {
		if word, _, _ := strings.Cut(lines[i], " "); i != n-1 && !strings.HasSuffix(lines[i], "{") && slices.Contains(insteadOf(use[1]), strings.TrimRight(word, ":")) {
			lines[i] = ""
		}
	}
	wrong, opens := strings.CutSuffix(wrong, " {")
	for alternative := range strings.SplitSeq(use[1], ", or ") {
		var quotes []string
		for _, m := range inText.FindAllString(alternative, -1) {
			line, err := strconv.Unquote(m)
			if err != nil {
				panic(err)
			}
			quotes = append(quotes, line)
		}
		var first string
		switch {
		case len(quotes) == 0:
			continue
		case strings.HasPrefix(text, "rate_limit: "):
			if strings.HasPrefix(alternative, "a block") {
				quotes = append([]string{""}, quotes...)
			}
			first = "rate_limit " + quotes[0]
			if word := strings.Fields(wrong)[1]; !strings.Contains(quotes[0], word) && strings.HasPrefix(word, "/") || strings.HasPrefix(word, "@") {
				first = "rate_limit " + word + " " + quotes[0]
			}
			if !opens && len(quotes) > 1 {
				first, quotes = first+" {", append(quotes, "}")
			}
		case strings.Contains(alternative, "a block with a line for each matcher"):
			first, quotes = "match {", append(append([]string{""}, quotes...), "}")
			if strings.Contains(text, "can't be combined with another") {
				i := n - 2
				for ; !strings.HasPrefix(lines[i], "match "); i-- {
				}
				lines = slices.Concat(lines[:i], []string{""}, lines[i+1:])
			}
		default:
			first = quotes[0]
		}
		switch {
		case opens:
			first += " {"
		case strings.HasSuffix(alternative, " in it"):
			first, quotes = first+" {", append(quotes, "}")
		}
		with(lines, strings.Join(append([]string{first}, quotes[1:]...), "\n"))
	}
	return all
}
