package manifests

import (
	"bytes"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// TestActionsArePinned guards that workflows name actions by commit, since a tag can be
// moved. What else is wrong in a workflow make lint says.
func TestActionsArePinned(t *testing.T) {
	files, err := filepath.Glob(root + "/.github/workflows/*.yml")
	if err != nil || len(files) < 2 {
		t.Fatalf("found workflows %q: %v", files, err)
	}
	action := regexp.MustCompile(`uses: (\S+) # v\d+\.\d+\.\d+`)
	commit := regexp.MustCompile(`^[\w/-]+@[0-9a-f]{40}$`)
	for _, file := range files {
		text := read(t, file)
		found := action.FindAllStringSubmatch(text, -1)
		if len(found) == 0 || len(found) != strings.Count(text, "uses:") {
			t.Errorf("%s: not all actions have a comment with their version", file)
		}
		for _, m := range found {
			if !commit.MatchString(m[1]) {
				t.Errorf("%s: %s is not named by a commit", file, m[1])
			}
		}
	}
}

// TestReleaseIsTheMakefiles guards that the workflow of a release runs what a person can
// run, and that a release checks everything.
func TestReleaseIsTheMakefiles(t *testing.T) {
	if !strings.Contains(read(t, root, ".github/workflows/release.yml"), "- run: make release-check RELEASE=") {
		t.Error("the workflow does not run make release-check")
	}
	if !strings.Contains(read(t, root, "Makefile"), "\nrelease-check: check dist\n") {
		t.Error("make release-check does not check and build")
	}
}

// TestIssueForms guards that GitHub shows the forms: it ignores one with a field that it
// does not know, without a word. A bug report asks for what the commands say.
func TestIssueForms(t *testing.T) {
	type form struct {
		Name, Description string
		Labels            []string
		Body              []struct {
			Type, ID   string
			Attributes struct {
				Label, Description, Value, Render string
			}
			Validations struct{ Required bool }
		}
	}
	asked := map[string][]string{
		"bug.yml": {"caddyfile", "explain", "status", "versions"}, "library.yml": {"code", "versions"},
		"command.yml": {"command", "input", "versions"}, "feature.yml": {"need"},
	}
	files, err := filepath.Glob(root + "/.github/ISSUE_TEMPLATE/*.yml")
	if err != nil || len(files) != len(asked)+1 { // and config.yml
		t.Fatalf("found forms %q: %v", files, err)
	}
	for name, asks := range asked {
		var f form
		text := read(t, root, ".github/ISSUE_TEMPLATE", name)
		decoder := yaml.NewDecoder(bytes.NewReader([]byte(text)))
		decoder.KnownFields(true)
		if err := decoder.Decode(&f); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		ids := make(map[string]bool)
		for _, b := range f.Body {
			switch {
			case b.Type == "markdown" && b.Attributes.Value != "":
			case b.Type != "textarea" || b.Attributes.Label == "" || b.ID == "" || ids[b.ID]:
				t.Errorf("%s: %+v", name, b)
			}
			ids[b.ID] = true
		}
		if f.Name == "" || f.Description == "" {
			t.Errorf("%s: lacks its name or description", name)
		}
		for _, id := range asks {
			if !ids[id] {
				t.Errorf("%s: does not ask for %s", name, id)
			}
		}
	}
	var config struct {
		Blank bool                                `yaml:"blank_issues_enabled"`
		Links []struct{ Name, URL, About string } `yaml:"contact_links"`
	}
	decoder := yaml.NewDecoder(strings.NewReader(read(t, root, ".github/ISSUE_TEMPLATE/config.yml")))
	decoder.KnownFields(true)
	if err := decoder.Decode(&config); err != nil || len(config.Links) != 2 {
		t.Fatalf("config.yml: %v %+v", err, config)
	}
	for _, l := range config.Links {
		if l.Name == "" || l.About == "" || !strings.HasPrefix(l.URL, "https://") {
			t.Errorf("config.yml: GitHub does not show %+v", l)
		}
	}
}

// TestDependabot guards that each module outside the root is kept up to date.
func TestDependabot(t *testing.T) {
	var config struct {
		Updates []struct {
			Ecosystem   string `yaml:"package-ecosystem"`
			Directories []string
		}
	}
	if err := yaml.Unmarshal([]byte(read(t, root, ".github/dependabot.yml")), &config); err != nil {
		t.Fatal(err)
	}
	watched := make(map[string]bool)
	for _, u := range config.Updates {
		for _, directory := range u.Directories {
			watched[u.Ecosystem+directory] = true
		}
	}
	for _, pattern := range []string{"/*/go.mod", "/*/*/go.mod"} {
		modules, err := filepath.Glob(root + pattern)
		if err != nil || len(modules) == 0 {
			t.Fatalf("found no modules by %s: %v", pattern, err)
		}
		for _, path := range modules {
			directory := strings.TrimPrefix(filepath.Dir(path), root)
			if !watched["gomod"+directory] {
				t.Errorf("nothing updates %s", directory)
			}
		}
	}
}
