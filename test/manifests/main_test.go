// Package manifests reads the files in deploy, and those that GitHub reads, with the
// types and loaders of the programs that they are for: Kubernetes, the Prometheus
// operator and Docker Compose. They know each field and refuse others.
// What a loader does not see, such as a reference from one object to another, is
// checked beside it. What can run without these programs runs in test/operation.
package manifests

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"
)

const (
	// root is the repository's directory, and deploy that of the files to deploy.
	root   = "../.."
	deploy = root + "/deploy"
)

// pinned matches an image with a version that is not just the latest.
var pinned = regexp.MustCompile(`^[a-z./-]+:v?\d+\.\d+[\w.-]*$`)

// read returns the text of a file.
func read(t testing.TB, elements ...string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(elements...))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
