// Package racetest reports whether the race detector is on, and skips tests that gain nothing from it.
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
