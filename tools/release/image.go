package main

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/google/go-containerregistry/pkg/v1/validate"
)

// user is who Caddy runs as in the image, and the owner of what it writes.
const user = 65532

// writeImage writes an image for several platforms to dist/image, in the OCI layout. It
// has nothing but Caddy, which brings its own root certificates, and no shell; its paths
// are those of Caddy's own image.
func (r release) writeImage(binaries map[string][]byte) error {
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, target := range slices.Sorted(maps.Keys(binaries)) {
		platform, err := v1.ParsePlatform(target)
		if err != nil {
			return err
		}
		image, err := r.image(*platform, binaries[target])
		if err != nil {
			return fmt.Errorf("image for %s: %w", target, err)
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: image, Descriptor: v1.Descriptor{Platform: platform}})
	}
	if _, err := layout.Write(filepath.Join(r.dist, "image"), index); err != nil {
		return err
	}
	// What has been written, as whoever pushes it reads it.
	written, err := layout.ImageIndexFromPath(filepath.Join(r.dist, "image"))
	if err != nil {
		return err
	}
	return validate.Index(written)
}

// image returns the image for one platform.
func (r release) image(platform v1.Platform, caddy []byte) (v1.Image, error) {
	contents, err := r.files(caddy)
	if err != nil {
		return nil, err
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(contents)), nil
	}, tarball.WithMediaType(types.OCILayer))
	if err != nil {
		return nil, err
	}
	image := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	if image, err = mutate.Append(image, mutate.Addendum{
		Layer: layer, MediaType: types.OCILayer,
		History: v1.History{Created: v1.Time{Time: r.made}, CreatedBy: "make dist"},
	}); err != nil {
		return nil, err
	}
	config, err := image.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture, config.Variant = platform.OS, platform.Architecture, platform.Variant
	config.Created = v1.Time{Time: r.made}
	config.Config = v1.Config{
		User:         fmt.Sprintf("%d:%[1]d", user),
		WorkingDir:   "/srv",
		Env:          []string{"PATH=/usr/bin", "XDG_CONFIG_HOME=/config", "XDG_DATA_HOME=/data"},
		Cmd:          []string{"caddy", "run", "--config", "/etc/caddy/Caddyfile", "--adapter", "caddyfile"},
		ExposedPorts: map[string]struct{}{"80/tcp": {}, "443/tcp": {}, "443/udp": {}},
		Volumes:      map[string]struct{}{"/config": {}, "/data": {}},
		Labels: map[string]string{
			"org.opencontainers.image.source":   "https://" + module,
			"org.opencontainers.image.version":  r.version,
			"org.opencontainers.image.licenses": "Apache-2.0",
		},
	}
	return mutate.ConfigFile(image, config)
}

// files returns the image's files, as a layer.
func (r release) files(caddy []byte) ([]byte, error) {
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	for _, f := range []struct {
		file

		owner int
	}{
		{file{"usr/", 0o755, nil}, 0},
		{file{"usr/bin/", 0o755, nil}, 0},
		{file{"usr/bin/caddy", 0o755, caddy}, 0},
		{file{"etc/", 0o755, nil}, 0},
		{file{"etc/caddy/", 0o755, nil}, 0},
		// Until there is a Caddyfile of the user's own.
		{file{"etc/caddy/Caddyfile", 0o644, []byte(":80 {\n\trespond \"Caddy works. Mount a Caddyfile at /etc/caddy/Caddyfile.\"\n}\n")}, 0},
		{file{"srv/", 0o755, nil}, 0},
		{file{"tmp/", 0o1777, nil}, 0},
		{file{"config/", 0o755, nil}, user},
		{file{"data/", 0o755, nil}, user},
	} {
		header := &tar.Header{
			Typeflag: tar.TypeReg, Name: f.name, Mode: f.mode, Size: int64(len(f.data)),
			Uid: f.owner, Gid: f.owner, ModTime: r.made,
		}
		if strings.HasSuffix(f.name, "/") {
			header.Typeflag = tar.TypeDir
		}
		if err := w.WriteHeader(header); err != nil {
			return nil, err
		}
		if _, err := w.Write(f.data); err != nil {
			return nil, err
		}
	}
	err := w.Close()
	return layer.Bytes(), err
}
