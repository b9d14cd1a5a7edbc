// Package testseed says from which seed tests draw what they choose at random: a fixed
// one, so that whether they pass does not depend on luck, unless the environment
// variable SEED has another.
package testseed

import (
	"flag"
	"fmt"
	"os"
	"strconv"
	"sync"
	"testing"

	"pgregory.net/rapid"
)

// Env is the name of the environment variable that has the seed.
const Env = "SEED"

var base uint64 = 1

// Set sets the seed, for TestMain to call. A test binary with -rapid.seed draws from
// that.
func Set() error {
	flag.Parse()
	if text := os.Getenv(Env); text != "" {
		var err error
		if base, err = strconv.ParseUint(text, 10, 62); err != nil {
			return fmt.Errorf("%s is %q: must be a number", Env, text)
		}
		fmt.Printf("drawing from %s=%d\n", Env, base)
	}
	if seed, err := strconv.ParseUint(flag.Lookup("rapid.seed").Value.String(), 10, 64); err == nil && seed != 0 {
		base = seed
	}
	if testing.Short() { // rapid would draw a fifth: too little for tests that count what they cover
		checks, err := strconv.Atoi(flag.Lookup("rapid.checks").Value.String())
		if err != nil {
			return err
		}
		if err := flag.Set("rapid.checks", strconv.Itoa(5*checks)); err != nil {
			return err
		}
	}
	return setRapid(0)
}

// Base returns the seed.
func Base() uint64 { return base }

// rapid reads its seed from a flag, which all tests of a process share.
var rapidSeed sync.Mutex

// Check checks a property with package rapid, on traces that are drawn from the n-th
// seed. Tests that run beside each other may both call it; beside it, none may call
// rapid.Check.
func Check(t *testing.T, n int, property func(*rapid.T)) {
	t.Helper()
	rapidSeed.Lock()
	seedIsRead := sync.OnceFunc(rapidSeed.Unlock)
	defer seedIsRead()
	if err := setRapid(n); err != nil {
		t.Fatal(err)
	}
	rapid.Check(t, func(t *rapid.T) {
		seedIsRead()
		property(t)
	})
}

func setRapid(n int) error {
	seed := max(base+uint64(n)*1_000_003, 1) //nolint:gosec // not negative, and 0 would be any seed
	return flag.Set("rapid.seed", strconv.FormatUint(seed, 10))
}
