// Command release makes what a release has, in dist: archives of Caddy with this module
// for each system that Caddy is released for, with a bill of materials for each, an
// image of those for Linux, checksums, and notes from the changelog. It uploads nothing.
//
//	make dist                                 from this checkout, for all systems
//	make dist RELEASE="-targets linux/amd64"  for one
package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"time"
)

const (
	module = "github.com/seed-387a6c65/caddy-ratelimit"

	// allTargets are the systems that Caddy is released for.
	allTargets = "darwin/amd64,darwin/arm64,freebsd/amd64,freebsd/arm64," +
		"linux/amd64,linux/arm/v5,linux/arm/v6,linux/arm/v7,linux/arm64,linux/ppc64le,linux/riscv64,linux/s390x," +
		"windows/amd64,windows/arm64"
)

// release is what is being released, and from where.
type release struct {
	root, dist string
	caddy      string // Caddy's version, such as v2.11.9
	version    string // that of the changelog, such as v0.1.0
	source     string // what xcaddy is told to build
	made       time.Time
}

func main() {
	log.SetFlags(0)
	root := flag.String("root", "../..", "the repository")
	caddy := flag.String("caddy", "", "the version of Caddy to build")
	tag := flag.String("tag", "", "the tag of the release, which has to be the changelog's version")
	published := flag.Bool("published", false, "build what the tag has published instead of this checkout, whose path would stand in binaries")
	targets := flag.String("targets", allTargets, "the systems to build for, separated by commas")
	flag.Parse()
	if err := run(*root, *caddy, *tag, *published, strings.Split(*targets, ",")); err != nil {
		log.Fatal(err)
	}
}

func run(root, caddy, tag string, published bool, targets []string) error {
	root, err := filepath.Abs(root)
	if err != nil {
		return err
	}
	changelog, err := os.ReadFile(filepath.Join(root, "CHANGELOG.md"))
	if err != nil {
		return err
	}
	version, notes, err := newest(string(changelog))
	if err != nil {
		return err
	}
	if tag != "" && tag != version {
		return fmt.Errorf("the tag is %s, and the newest version in CHANGELOG.md %s: write a section for it, or tag another", tag, version)
	}
	r := release{root: root, dist: filepath.Join(root, "dist"), caddy: caddy, version: version}
	r.source = module + "@" + version
	if !published {
		r.source += "=" + root
	}
	if r.made, err = r.committed(); err != nil {
		return err
	}
	if err := os.RemoveAll(r.dist); err != nil {
		return err
	}
	if err := os.Mkdir(r.dist, 0o755); err != nil { //nolint:gosec // nothing in it is secret
		return err
	}
	if err := os.WriteFile(filepath.Join(r.dist, "notes.md"), []byte(notes), 0o644); err != nil { //nolint:gosec // as above
		return err
	}
	binaries := make(map[string][]byte)
	for _, target := range targets {
		start := time.Now()
		binary, err := r.build(target)
		if err != nil {
			return fmt.Errorf("%s: %w", target, err)
		}
		if strings.HasPrefix(target, "linux/") {
			binaries[target] = binary
		}
		log.Printf("%s: %d MB in %v", target, len(binary)/1e6, time.Since(start).Round(time.Second))
	}
	if err := r.writeChecksums(); err != nil {
		return err
	}
	return r.writeImage(binaries)
}

// heading matches that of a version in the changelog.
var heading = regexp.MustCompile(`(?m)^## (\d+\.\d+\.\d+)\n`)

// link matches a link to a file of the repository, which release notes are not part of.
var link = regexp.MustCompile(`\]\(([\w./#-]+)\)`)

// newest returns the newest version of a changelog, and what is new in it.
func newest(changelog string) (version, notes string, err error) {
	found := heading.FindAllStringSubmatchIndex(changelog, 2)
	if found == nil {
		return "", "", errors.New("CHANGELOG.md has no heading of a version: write one, such as ## 0.1.0")
	}
	end := len(changelog)
	if len(found) > 1 {
		end = found[1][0]
	}
	version = "v" + changelog[found[0][2]:found[0][3]]
	notes = strings.TrimSpace(changelog[found[0][1]:end]) + "\n"
	return version, link.ReplaceAllString(notes, "](https://"+module+"/blob/"+version+"/$1)"), nil
}

// committed returns the time of the checkout's commit, which all files get: the same
// commit makes the same archives.
func (r release) committed() (time.Time, error) {
	output, err := r.command("git", "log", "-1", "--format=%cI").Output()
	if err != nil {
		return time.Time{}, fmt.Errorf("git log: %w", err)
	}
	return time.Parse(time.RFC3339, strings.TrimSpace(string(output)))
}

// command returns a command that runs in the repository.
func (r release) command(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(name, args...)
	cmd.Dir, cmd.Stderr = r.root, os.Stderr
	return cmd
}

// build builds Caddy for a system, puts it into an archive with its bill of materials
// beside it, and returns it. One for this system also has to work.
func (r release) build(target string) ([]byte, error) {
	system := strings.Split(target, "/")
	dir, err := os.MkdirTemp("", "release")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	name := "caddy"
	if system[0] == "windows" {
		name = "caddy.exe"
	}
	path := filepath.Join(dir, name)
	cmd := r.command("go", "tool", "-modfile="+filepath.Join(r.root, "tools/go.mod"),
		"xcaddy", "build", r.caddy, "--output", path, "--with", r.source)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS="+system[0], "GOARCH="+system[1],
		// xcaddy's own flags, and the time zones, which the image and Windows do not have.
		"XCADDY_GO_BUILD_FLAGS=-ldflags '-w -s' -trimpath -tags nobadger,nomysql,nopgx,timetzdata")
	if len(system) > 2 {
		cmd.Env = append(cmd.Env, "GOARM="+strings.TrimPrefix(system[2], "v"))
	}
	var output bytes.Buffer
	cmd.Stdout, cmd.Stderr = &output, &output
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("xcaddy: %w\n%s", err, output.Bytes())
	}
	base := filepath.Join(r.dist, "caddy-ratelimit_"+strings.TrimPrefix(r.version, "v")+"_"+strings.ReplaceAll(target, "/", "_"))
	err = r.command("go", "tool", "-modfile="+filepath.Join(r.root, "tools/release/go.mod"),
		"cyclonedx-gomod", "bin", "-json", "-std", "-noserial", "-notimestamp", "-version", r.version,
		"-output", base+".cdx.json", path).Run()
	if err != nil {
		return nil, fmt.Errorf("cyclonedx-gomod: %w", err)
	}
	binary, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	if system[0] == runtime.GOOS && system[1] == runtime.GOARCH {
		if err := r.try(path); err != nil {
			return nil, err
		}
	}
	return binary, r.writeArchive(base+".tar.gz", file{name, 0o755, binary})
}

// try sees that a built Caddy is of the right version, has this module and accepts the
// example.
func (r release) try(caddy string) error {
	for _, c := range []struct{ want, command string }{
		{r.caddy, "version"},
		{"http.handlers.rate_limit", "list-modules"},
		{"", "rate-limit check " + filepath.Join(r.root, "example.Caddyfile")},
	} {
		output, err := r.command(caddy, strings.Fields(c.command)...).Output()
		if err != nil {
			return fmt.Errorf("caddy %s: %w\n%s", c.command, err, output)
		}
		if !bytes.Contains(output, []byte(c.want)) {
			return fmt.Errorf("caddy %s: it prints no %q:\n%s", c.command, c.want, output)
		}
	}
	return nil
}

// file is a file in an archive or an image.
type file struct {
	name string
	mode int64
	data []byte
}

// writeArchive writes an archive of a binary, the license and the README.
func (r release) writeArchive(path string, binary file) error {
	files := []file{binary}
	for _, name := range []string{"LICENSE", "README.md"} {
		data, err := os.ReadFile(filepath.Join(r.root, name))
		if err != nil {
			return err
		}
		files = append(files, file{name, 0o644, data})
	}
	var compressed bytes.Buffer
	z := gzip.NewWriter(&compressed)
	archive := tar.NewWriter(z)
	for _, f := range files {
		if err := archive.WriteHeader(&tar.Header{Name: f.name, Mode: f.mode, Size: int64(len(f.data)), ModTime: r.made}); err != nil {
			return err
		}
		if _, err := archive.Write(f.data); err != nil {
			return err
		}
	}
	if err := errors.Join(archive.Close(), z.Close()); err != nil {
		return err
	}
	return os.WriteFile(path, compressed.Bytes(), 0o644) //nolint:gosec // nothing in it is secret
}

// writeChecksums writes the checksums of all archives and bills of materials, for
// sha256sum --check.
func (r release) writeChecksums() error {
	paths, err := filepath.Glob(filepath.Join(r.dist, "caddy-ratelimit_*"))
	if err != nil {
		return err
	}
	slices.Sort(paths)
	var sums bytes.Buffer
	for _, path := range paths {
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		hash := sha256.New()
		_, err = io.Copy(hash, f)
		_ = f.Close()
		if err != nil {
			return err
		}
		fmt.Fprintf(&sums, "%x  %s\n", hash.Sum(nil), filepath.Base(path))
	}
	return os.WriteFile(filepath.Join(r.dist, "checksums.txt"), sums.Bytes(), 0o644) //nolint:gosec // nothing in it is secret
}
