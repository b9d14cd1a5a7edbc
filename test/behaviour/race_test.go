//go:build race

package behaviour

const raceEnabled = true
