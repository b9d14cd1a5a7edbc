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

// Base returns the seed. A test binary with -rapid.seed draws from that.
var Base = sync.OnceValue(func() uint64 {
	if seed, err := strconv.ParseUint(flag.Lookup("rapid.seed").Value.String(), 10, 64); err == nil && seed != 0 {
		return seed
	}
	text := os.Getenv(Env)
	if text == "" {
		return 1
	}
	seed, err := strconv.ParseUint(text, 10, 62)
	if err != nil {
		panic(fmt.Sprintf("%s is %q: must be a number", Env, text))
	}
	fmt.Printf("drawing from %s=%d\n", Env, seed)
	return seed
})

// setChecks has rapid draw as much for a short test as for others, and not a fifth: that would
// be too little for tests that count what they cover.
var setChecks = sync.OnceValue(func() error {
	if !testing.Short() {
		return nil
	}
	checks, err := strconv.Atoi(flag.Lookup("rapid.checks").Value.String())
	if err != nil {
		return err
	}
	return flag.Set("rapid.checks", strconv.Itoa(5*checks))
})

// rapid reads its seed from a flag, which all tests of a process share.
var rapidSeed sync.Mutex

// Check checks a property with package rapid on n hundred traces, which is n times rapid's
// default number, each hundred from a seed of its own. Tests that run in parallel may
// both call it; in parallel with it, none may call rapid.Check.
func Check(t *testing.T, n int, property func(*rapid.T)) {
	t.Helper()
	for i := range n {
		checkFrom(t, Base()+uint64(i)*1_000_003, property) // not negative
	}
}

func checkFrom(t *testing.T, seed uint64, property func(*rapid.T)) {
	t.Helper()
	rapidSeed.Lock()
	seedIsRead := sync.OnceFunc(rapidSeed.Unlock)
	defer seedIsRead()
	if err := setChecks(); err != nil {
		t.Fatal(err)
	}
	if err := flag.Set("rapid.seed", strconv.FormatUint(max(seed, 1), 10)); err != nil { // 0 would be any seed
		t.Fatal(err)
	}
	rapid.Check(t, func(t *rapid.T) {
		seedIsRead()
		property(t)
	})
}
