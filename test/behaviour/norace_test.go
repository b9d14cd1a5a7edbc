//go:build !race

package behaviour

const raceEnabled = false
