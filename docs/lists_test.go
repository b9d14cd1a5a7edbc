package docs

import (
	"flag"
	"fmt"
	"go/ast"
	goparser "go/parser"
	"go/token"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/state"
)

// write makes tests write what documents have from the code, instead of comparing it.
var write = flag.Bool("write", false, "write what documents have from the code: lists and the session in docs/commands.md")

// TestLists guards the lists that documents have from the code: of options, from the comments
// above their fields, which Caddy's website shows too; of metrics, reasons and others.
func TestLists(t *testing.T) {
	for _, tc := range []struct {
		page, name, list string
	}{
		{"directive", "limit", optionList(t, "internal/config/limit.go", "Limit")},
		{"directive", "block", optionList(t, "internal/config/block.go", "Block")},
		{"directive", "app", optionList(t, "internal/config/app.go", "App", "redis", "memory")},
		{"directive", "memory", optionList(t, "internal/config/app.go", "Memory")},
		{"directive", "redis", optionList(t, "internal/config/redis.go", "Redis")},
		{"concurrency-auto", "auto", optionList(t, "internal/config/auto.go", "Auto")},
		{"connections", "listener", optionList(t, "internal/config/listener.go", "Listener", "limits")},
		{"operation", "metrics", metricList()},
		{"on-call", "reasons", reasonList(t)},
		{"admin-api", "level", jsonList(t, "Level", "Node")},
	} {
		guardPart(t, "docs/"+tc.page+".md", tc.name, tc.list, strings.TrimSpace)
	}
}

// guardPart guards that a part of a page, between two comments with its name, has the same text as
// want, or writes it.
func guardPart(t *testing.T, page, name, want string, same func(string) string) {
	t.Helper()
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, begins := strings.Cut(string(text), "<!-- begin: "+name+" -->\n")
	got, after, ends := strings.Cut(rest, "<!-- end: "+name+" -->")
	switch {
	case !begins || !ends:
		t.Fatalf("%s has no part %q", page, name)
	case same(got) == same(want):
	case !*write:
		t.Errorf("%s: %s is not what the code says; write it by: go test ./docs -run %s -args -write\ngot\n%s\nwant\n%s",
			page, name, t.Name(), got, want)
	default:
		text := before + "<!-- begin: " + name + " -->\n" + want + "<!-- end: " + name + " -->" + after
		if err := os.WriteFile(page, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// field is a field of a struct that JSON has.
type field struct {
	tag  reflect.StructTag
	text string // its comment
}

// name returns the name in JSON.
func (f field) name() string {
	name, _, _ := strings.Cut(f.tag.Get("json"), ",")
	return name
}

// fieldsOf returns the fields of a struct in a file.
func fieldsOf(t *testing.T, file, name string) (fields []field) {
	t.Helper()
	parsed, err := goparser.ParseFile(token.NewFileSet(), file, nil, goparser.ParseComments|goparser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	ast.Inspect(parsed, func(n ast.Node) bool {
		spec, ok := n.(*ast.TypeSpec)
		if !ok || spec.Name.Name != name {
			return true
		}
		for _, f := range spec.Type.(*ast.StructType).Fields.List {
			text := f.Doc.Text() + f.Comment.Text()
			if f.Tag != nil {
				fields = append(fields, field{reflect.StructTag(strings.Trim(f.Tag.Value, "`")), text})
			} else if len(f.Names) > 0 && name == "Event" {
				fields = append(fields, field{reflect.StructTag(`json:"` + f.Names[0].Name + `"`), text})
			}
		}
		return false
	})
	if len(fields) == 0 {
		t.Fatalf("%s has no struct %s", file, name)
	}
	return fields
}

// sections are where the documents say more about an option.
var sections = map[string]string{
	"key": "keys.md", "algorithm": "algorithms.md", "count_denied": "algorithms.md#counting-denied-requests",
	"rate": "#rate", "ipv4_prefix": "keys.md#addresses", "ipv6_prefix": "keys.md#addresses",
	"count": "policies.md#count", "clear": "policies.md#clear", "actual_cost": "policies.md#actual_cost", "hold": "policies.md#hold",
	"concurrency": "policies.md#concurrency", "dry_run": "policies.md#dry_run", "soft": "policies.md#soft",
	"max_delay": "policies.md#max_delay", "ban": "policies.md#ban", "borrow": "policies.md#borrow-and-pool",
	"pool": "policies.md#borrow-and-pool", "status": "policies.md#status-and-body", "body": "policies.md#status-and-body",
	"max_keys": "failure.md#memory", "when_full": "failure.md#memory", "track_top": "commands.md#top",
	"consistency": "far.md", "headers": "#header-fields", "log": "#logs", "on_error": "failure.md#when-redis-fails",
	"ignore_advice": "commands.md#what-check-finds", "metrics": "operation.md#metrics", "persist": "upgrading.md#restarts",
	"key_secret": "redis.md#what-redis-holds",
}

// optionList returns the options of a struct by their names in a Caddyfile, without those given,
// which have lists of their own.
func optionList(t *testing.T, file, name string, without ...string) string {
	t.Helper()
	var list strings.Builder
	for _, f := range fieldsOf(t, file, name) {
		names := []string{f.name()}
		if tagged, ok := f.tag.Lookup("caddyfile"); ok {
			names = strings.Fields(tagged)
		}
		if len(names) == 0 || names[0] == "" || slices.Contains(without, names[0]) {
			continue
		}
		link := sections[names[0]]
		for i, n := range names {
			if names[i] = "`" + n + "`"; link != "" {
				names[i] = "[`" + n + "`](" + link + ")"
			}
		}
		fmt.Fprintf(&list, "- %s: %s\n", strings.Join(names, ", "), inLine(f.text))
	}
	return list.String()
}

// inLine returns a comment in the one line that an item of a list has.
func inLine(comment string) string {
	text := regexp.MustCompile(`\n+- `).ReplaceAllString(strings.TrimSpace(comment), "<br>• ")
	return strings.Join(strings.Fields(strings.ReplaceAll(text, "\n\n", "<br>")), " ")
}

// metricDescription matches what a prometheus.Desc says of itself.
var metricDescription = regexp.MustCompile(`fqName: "caddy_rate_limit_(\w+)", help: ("(?:[^"\\]|\\.)*"),.*variableLabels: {([^}]*)}`)

// metricList returns the metrics, with their labels.
func metricList() string {
	descriptions := make(chan *prometheus.Desc, 100)
	state.Default.Describe(descriptions)
	close(descriptions)
	var list strings.Builder
	for d := range descriptions {
		m := metricDescription.FindStringSubmatch(d.String())
		help, err := strconv.Unquote(m[2])
		if err != nil {
			panic(err) // it was quoted by %q
		}
		labels := ""
		if m[3] != "" {
			labels = " (`" + strings.Join(strings.Split(m[3], ","), "`, `") + "`)"
		}
		fmt.Fprintf(&list, "- `%s`%s: %s\n", m[1], labels, help)
	}
	return list.String()
}

// reasonList returns the reasons for which a Redis server fails, as the comment of an event of
// package limiter lists them. It has those of the code, each once.
func reasonList(t *testing.T) string {
	t.Helper()
	code, err := os.ReadFile("limiter/internal/redisscript/failure.go")
	if err != nil {
		t.Fatal(err)
	}
	known := make(map[string]bool)
	for _, m := range regexp.MustCompile(`reason(?::|(?:, f\.\w+)* =) "(\w+)"`).FindAllStringSubmatch(string(code), -1) {
		known[m[1]] = true
	}
	var list strings.Builder
	for _, f := range fieldsOf(t, "limiter/event.go", "Event") {
		if f.name() != "Reason" {
			continue
		}
		for _, item := range strings.Split(f.text, "\n- ")[1:] {
			names, text, _ := strings.Cut(item, ": ")
			fmt.Fprintf(&list, "- %s: %s\n", names, inLine(text))
			for name := range strings.SplitSeq(names, ", ") {
				if name = strings.Trim(name, "`"); !known[name] {
					t.Errorf("limiter/event.go: there is no reason %s, or it is listed twice", name)
				}
				delete(known, name)
			}
		}
	}
	for name := range known {
		t.Errorf("limiter/event.go: the comment of Reason lacks %s", name)
	}
	return list.String()
}

// jsonList returns the fields of answers of the admin API whose comments say more than their
// names do.
func jsonList(t *testing.T, structs ...string) string {
	t.Helper()
	var list strings.Builder
	for i, name := range structs {
		for _, f := range fieldsOf(t, "internal/admin/adminjson/answer.go", name) {
			if f.text == "" || f.name() == "" {
				continue
			}
			within := ""
			if i > 0 {
				within = strings.ToLower(name) + "."
			}
			fmt.Fprintf(&list, "- `%s%s`: %s\n", within, f.name(), strings.TrimSpace(f.text))
		}
	}
	return list.String()
}
