package manifests

import (
	"regexp"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/seed-387a6c65/caddy-ratelimit"

// TestDockerfiles guards that both images are built of images of fixed versions, with
// the Caddy that the Makefile builds: the checkout's by its command, except for the commit,
// which an image does not know; the other one
// with the version of this module that the changelog has, and without a file capability, with
// which no container could run it that has dropped all.
func TestDockerfiles(t *testing.T) {
	words := func(s string) string { return strings.Join(strings.Fields(s), " ") }
	submatch := func(text, expr string) string {
		m := regexp.MustCompile(expr).FindStringSubmatch(text)
		if m == nil {
			t.Fatalf("nothing matches %s", expr)
		}
		return m[1]
	}
	makefile := strings.ReplaceAll(read(t, root, "Makefile"), "\\\n", " ")
	caddy := submatch(makefile, `(?m)^CADDY_VERSION = (\S+)$`)
	build := submatch(makefile, `(?m)^\t\$\(XCADDY\) (build \$\(CADDY_VERSION\) .*)$`)
	released := submatch(read(t, root, "CHANGELOG.md"), `(?m)^## (\d+\.\d+\.\d+)`)

	for name, want := range map[string]string{
		"Dockerfile": "RUN XCADDY_SETCAP=0 xcaddy build " + caddy + " $PLUGINS --with " + module + "@v" + released,
		"checkout.Dockerfile": "go tool -modfile=tools/go.mod xcaddy " +
			strings.NewReplacer("$(CADDY_VERSION)", caddy, "$(COMMIT)", "v0.0.0", "./caddy", "/usr/bin/caddy").Replace(build),
	} {
		stages, builds := make(map[string]bool), false
		for line := range strings.Lines(strings.ReplaceAll(read(t, deploy, "docker", name), "\\\n", " ")) {
			f := strings.Fields(line)
			if len(f) == 0 || strings.HasPrefix(f[0], "#") {
				continue
			}
			switch f[0] {
			case "FROM":
				if !pinned.MatchString(f[1]) {
					t.Errorf("%s: image %s has no fixed version", name, f[1])
				}
				if len(f) == 4 && f[2] == "AS" {
					stages[f[3]] = true
				}
			case "RUN":
				builds = builds || strings.HasSuffix(words(line), words(want))
			case "COPY":
				if from, ok := strings.CutPrefix(f[1], "--from="); ok && !stages[from] {
					t.Errorf("%s: there is no stage %s", name, from)
				}
			case "ARG", "ENV", "WORKDIR":
			default:
				t.Errorf("%s: no test knows the instruction %s", name, f[0])
			}
		}
		if !builds {
			t.Errorf("%s: it does not run %s", name, words(want))
		}
	}
	for line := range strings.Lines(read(t, deploy, "docker/checkout.Dockerfile.dockerignore")) {
		if slices.Contains([]string{"go.mod", "go.sum", "limiter", "internal", "tools"}, strings.TrimSpace(line)) {
			t.Errorf("the build needs %s", line)
		}
	}
}
