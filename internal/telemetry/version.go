package telemetry

import (
	"runtime/debug"
	"strings"
)

// Version returns the version of this module in the Caddy that runs.
func Version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return unknownVersion
	}
	return versionIn(info)
}

// What there is to say of a version that is not known, and of one that has no number.
const (
	unknownVersion = "unknown"
	develVersion   = "(devel)" // as Go calls it
)

// versionIn returns the version of this module in what is known of a build: the version of the
// module or the commit, and of one that was replaced by what.
func versionIn(info *debug.BuildInfo) string {
	const path = "github.com/seed-387a6c65/caddy-ratelimit"
	for _, m := range append(info.Deps, &info.Main) {
		if m.Path != path {
			continue
		}
		version := m.Version
		if version == "" || version == "v0.0.0" || strings.HasPrefix(version, "v0.0.0-00010101000000-") {
			version = develVersion
		}
		switch r := m.Replace; {
		case r == nil:
			return version
		case r.Version == "" || r.Version == develVersion: // a checkout; Go does not record its commit
			return version + " from " + r.Path
		default:
			return r.Version + " of " + r.Path
		}
	}
	return unknownVersion
}
