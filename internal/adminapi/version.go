package adminapi

import (
	"cmp"
	"runtime/debug"
)

// Version returns the version of this module in the Caddy that runs.
func Version() string {
	const path = "github.com/seed-387a6c65/caddy-ratelimit"
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	for _, m := range append(info.Deps, &info.Main) {
		if m.Path == path {
			return cmp.Or(m.Version, "(devel)")
		}
	}
	return "unknown"
}
