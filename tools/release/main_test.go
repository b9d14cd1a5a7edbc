package main

import (
	"archive/tar"
	"errors"
	"io"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/layout"
)

// TestNewest guards that a release has the notes of its own version, and that without a
// version there is none.
func TestNewest(t *testing.T) {
	const begin = "# Changelog\n\nWords.\n\n"
	for _, tt := range []struct{ name, changelog, version, notes string }{
		{"first", begin + "## 0.1.0\n\n### Added\n\n- One.\n", "v0.1.0", "### Added\n\n- One.\n"},
		{"next", begin + "## 0.2.0\n\n- Two.\n\n## 0.1.0\n\n- One.\n", "v0.2.0", "- Two.\n"},
		{"begun", begin + "## Unreleased\n\n- Three.\n\n## 0.2.0\n\n- Two.\n\n## 0.1.0\n\n- One.\n", "v0.2.0", "- Two.\n"},
		{
			"link", begin + "## 0.1.0\n\n- [One](docs/one.md#a-b), and [two](https://example.com/two).\n", "v0.1.0",
			"- [One](https://" + module + "/blob/v0.1.0/docs/one.md#a-b), and [two](https://example.com/two).\n",
		},
		{"none", begin + "## Unreleased\n\n- One.\n", "", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			version, notes, err := newest(tt.changelog)
			if version != tt.version || notes != tt.notes || (err == nil) != (tt.version != "") {
				t.Errorf("version %q, notes %q, error %v", version, notes, err)
			}
		})
	}
}

// TestImage guards what the manifests and Caddy need of the image: Caddy by its name, a
// user that may write where Caddy keeps certificates, and one image for each platform.
func TestImage(t *testing.T) {
	r := release{dist: t.TempDir(), version: "v0.1.0", made: time.Unix(0, 0)}
	err := r.writeImage(map[string][]byte{"linux/amd64": []byte("caddy"), "linux/arm/v7": []byte("caddy")})
	if err != nil {
		t.Fatal(err)
	}
	index, err := layout.ImageIndexFromPath(filepath.Join(r.dist, "image"))
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := index.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	platforms := ""
	for _, m := range manifest.Manifests {
		platforms += " " + m.Platform.String()
	}
	if platforms != " linux/amd64 linux/arm/v7" {
		t.Errorf("platforms%s", platforms)
	}
	image, err := index.Image(manifest.Manifests[1].Digest)
	if err != nil {
		t.Fatal(err)
	}
	config, err := image.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if c := config.Config; config.Variant != "v7" || c.User != "65532:65532" || c.Cmd[0] != "caddy" || c.Env[0] != "PATH=/usr/bin" {
		t.Errorf("config %+v", config)
	}
	layers, err := image.Layers()
	if err != nil {
		t.Fatal(err)
	}
	layer, err := layers[0].Uncompressed()
	if err != nil {
		t.Fatal(err)
	}
	defer layer.Close()
	owners := make(map[string]int)
	for files := tar.NewReader(layer); ; {
		header, err := files.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		owners[header.Name] = header.Uid
	}
	for name, owner := range map[string]int{"usr/bin/caddy": 0, "etc/caddy/Caddyfile": 0, "data/": user, "config/": user} {
		if got, ok := owners[name]; !ok || got != owner {
			t.Errorf("%s: owner %d, want %d", name, got, owner)
		}
	}
}
