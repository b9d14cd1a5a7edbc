//go:build !race

package sitetest

// RaceEnabled tells whether the race detector is on.
const RaceEnabled = false
