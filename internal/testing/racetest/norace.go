//go:build !race

package racetest

// Enabled tells whether the race detector is on.
const Enabled = false
