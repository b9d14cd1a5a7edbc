package telemetry

import (
	"runtime/debug"
	"testing"
)

// TestVersion guards that the version says which code runs, however Caddy was built with it.
func TestVersion(t *testing.T) {
	const path = "github.com/seed-387a6c65/caddy-ratelimit"
	for name, tc := range map[string]struct {
		module debug.Module
		want   string
	}{
		"a release":          {debug.Module{Path: path, Version: "v0.1.0"}, "v0.1.0"},
		"a commit":           {debug.Module{Path: path, Version: "v0.0.0-20261127204704-0123456789ab"}, "v0.0.0-20261127204704-0123456789ab"},
		"this module itself": {debug.Module{Path: path}, "(devel)"},
		"xcaddy --with =.":   {debug.Module{Path: path, Version: "v0.0.0-00010101000000-000000000000", Replace: &debug.Module{Path: "/src", Version: "(devel)"}}, "(devel) from /src"},
		"no number":          {debug.Module{Path: path, Version: "v0.0.0", Replace: &debug.Module{Path: "/src", Version: "(devel)"}}, "(devel) from /src"},
		"make build":         {debug.Module{Path: path, Version: "v0.0.0-20261127204704-0123456789ab", Replace: &debug.Module{Path: "/src", Version: "(devel)"}}, "v0.0.0-20261127204704-0123456789ab from /src"},
		"a fork":             {debug.Module{Path: path, Version: "v0.1.0", Replace: &debug.Module{Path: "example.com/fork", Version: "v0.1.1"}}, "v0.1.1 of example.com/fork"},
		"another module":     {debug.Module{Path: path + "er", Version: "v0.1.0"}, "unknown"},
	} {
		t.Run(name, func(t *testing.T) {
			for _, info := range []debug.BuildInfo{{Deps: []*debug.Module{{Path: "a"}, &tc.module}}, {Main: tc.module}} {
				if got := versionIn(&info); got != tc.want {
					t.Errorf("got %q, want %q", got, tc.want)
				}
			}
		})
	}
}
