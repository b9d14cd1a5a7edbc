package state

import (
	"crypto/tls"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/state/persist"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Guards that a store's key distinguishes all of its options, also those of a
// later day, and keeps no secret.
func TestStoreKeyCoversAllOptions(t *testing.T) {
	t.Parallel()
	var plain limiter.RedisOptions
	keys := map[redisStoreKey]string{newRedisStoreKey(plain, nil, ""): "no option"}
	fields := reflect.TypeFor[limiter.RedisOptions]()
	for i := range fields.NumField() {
		name := fields.Field(i).Name
		if name == "Fallback" || name == "Report" || name == "Credentials" || name == "Dial" {
			continue // they are the same for all, or not used, or identified by login
		}
		opt := plain
		switch field := reflect.ValueOf(&opt).Elem().Field(i).Addr().Interface().(type) {
		case *string:
			*field = "canary"
		case *bool:
			*field = true
		case *int:
			*field = 1
		case *time.Duration:
			*field = 1
		case *[]string:
			*field = []string{"canary"}
		case **tls.Config:
			*field = new(tls.Config)
		default:
			t.Fatalf("%s: no value for a %T", name, field)
		}
		key := newRedisStoreKey(opt, nil, "")
		if other, found := keys[key]; found {
			t.Errorf("%s and %s make the same key", name, other)
		}
		keys[key] = name
		if text := fmt.Sprintf("%+v %q", key, key.digest[:]); strings.Contains(text, "canary") {
			t.Errorf("%s: the key is %s", name, text)
		}
	}

	// Where one text ends and the next begins counts, and bytes that are no
	// characters.
	for name, opt := range map[string]limiter.RedisOptions{
		"ab, c": {Username: "ab", Password: "c"}, "a, bc": {Username: "a", Password: "bc"},
		"quoted": {Username: `a" "b`}, "a, b": {Username: "a", Password: "b"},
		"ff": {Password: "\xff"}, "fe": {Password: "\xfe"},
		"one address": {Addresses: []string{"a b"}}, "two": {Addresses: []string{"a", "b"}},
	} {
		key := newRedisStoreKey(opt, nil, "")
		if other, found := keys[key]; found {
			t.Errorf("%s and %s make the same key", name, other)
		}
		keys[key] = name
	}
}

// Guards that a store which can't be made, even by a panic, leaves the pool of
// stores as it was: the next configuration gets what it asks for.
func TestFailedStoreLeavesPool(t *testing.T) {
	t.Parallel()
	for name, open := range map[string]func() (SharedMemory, error){
		"panic": func() (SharedMemory, error) { panic("as the test wants it") },
		"error": func() (SharedMemory, error) {
			return SharedMemory{}, errors.New("as the test wants it")
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := &Stores{Process: New(telemetry.Options{})}
			if _, err := openStore(a, "test", open); err == nil || !strings.Contains(err.Error(), "as the test wants it") {
				t.Errorf("got error %v", err)
			}
			if len(a.keys) > 0 {
				t.Errorf("the config has taken %v", a.keys)
			}
			done := make(chan struct{})
			go func() {
				defer close(done)
				store, err := openStore(a, "test", func() (SharedMemory, error) {
					m := a.Process.MakeMemory()
					return a.Process.sweep(m, persist.New(m, caddy.Exiting)), nil
				})
				if err != nil || store.Memory == nil {
					t.Errorf("afterwards got %v, %v", store, err)
				}
				a.Process.Stores.Range(func(any, any) bool { return true })
				if err := a.Release(); err != nil {
					t.Error(err)
				}
			}()
			select {
			case <-done:
			case <-time.After(30 * time.Second):
				t.Fatal("the pool is locked")
			}
		})
	}
}
