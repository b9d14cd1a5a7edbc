// Package racetest tells tests whether the race detector is on.
package racetest

import "testing"

// SingleGoroutine skips a test of one goroutine if the race detector is on: that has
// nothing to find there, and makes it many times slower.
func SingleGoroutine(t testing.TB) {
	t.Helper()
	if Enabled {
		t.Skip("one goroutine: nothing for the race detector")
	}
}
