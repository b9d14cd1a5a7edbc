package limiter

import (
	"context"
	"math"
	"strings"
	"testing"
	"time"
)

func noCredentials(context.Context) (username, password string, err error) { return "", "", nil }

// TestRedisOptionsValidate guards that each invalid option is rejected by name,
// without secrets, and that valid ones are not.
func TestRedisOptionsValidate(t *testing.T) {
	long := strings.Repeat("canary", 20_000)
	tests := []struct {
		name   string
		change func(*RedisOptions)
		want   string // prefix of the error, empty if none
	}{
		{"least", func(*RedisOptions) {}, ""},
		{"no address", func(o *RedisOptions) { o.Addresses = nil }, "0 addresses: "},
		{"an empty address", func(o *RedisOptions) { o.Addresses = []string{""} }, "addresses: "},
		{"129 addresses", func(o *RedisOptions) { o.Addresses = make([]string, 129) }, "129 addresses: "},
		{"braces", func(o *RedisOptions) { o.KeyPrefix = "a{" }, "key prefix: "},
		{"a long prefix", func(o *RedisOptions) { o.KeyPrefix = strings.Repeat("x", 129) }, "key prefix: "},
		{"a negative database", func(o *RedisOptions) { o.DB = -1 }, "database -1: "},
		{"a large database", func(o *RedisOptions) { o.DB = 65536 }, "database 65536: "},
		{"the largest database", func(o *RedisOptions) { o.DB = 65535 }, ""},
		{"a cluster's database", func(o *RedisOptions) { o.DB, o.Cluster = 1, true }, "database 1: "},
		{"sentinels' database", func(o *RedisOptions) { o.DB, o.MasterName = 1, "m" }, ""},
		{"cluster and sentinels", func(o *RedisOptions) { o.Cluster, o.MasterName = true, "m" }, "a cluster and "},
		{"no timeout", func(o *RedisOptions) { o.Timeout = 0 }, ""},
		{"a short timeout", func(o *RedisOptions) { o.Timeout = 1 }, "timeout 1ns: "},
		{"a negative timeout", func(o *RedisOptions) { o.Timeout = math.MinInt64 }, "timeout -"},
		{"a long timeout", func(o *RedisOptions) { o.Timeout = time.Minute + 1 }, "timeout 1m0.000000001s: "},
		{"the longest timeout", func(o *RedisOptions) { o.Timeout = time.Minute }, ""},
		{"credentials", func(o *RedisOptions) { o.Credentials = noCredentials }, ""},
		{"credentials and a password", func(o *RedisOptions) { o.Credentials, o.Password = noCredentials, "canary" }, "credentials, and "},
		{"a long user", func(o *RedisOptions) { o.Username = long }, "username of 120000 bytes: "},
		{"a long password", func(o *RedisOptions) { o.Password = long }, "password of 120000 bytes: "},
		{"a long secret", func(o *RedisOptions) { o.KeySecret = long }, "key secret of 120000 bytes: "},
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			opt := RedisOptions{Addresses: []string{"a:1"}, Timeout: time.Millisecond}
			tc.change(&opt)
			switch err := opt.Validate(); {
			case tc.want == "" && err != nil:
				t.Errorf("got error %v", err)
			case tc.want != "" && (err == nil || !strings.HasPrefix(err.Error(), tc.want)):
				t.Errorf("got error %v, want %s…", err, tc.want)
			case err != nil && strings.Contains(err.Error(), "canary"):
				t.Errorf("error %v shows a secret", err)
			}
		})
	}
}

// TestNewRedisRejectsInvalidOptions guards that invalid options return an error
// and do not panic.
func TestNewRedisRejectsInvalidOptions(t *testing.T) {
	for name, opt := range map[string]RedisOptions{
		"nothing":            {},
		"nothing, cluster":   {Cluster: true},
		"nothing, sentinels": {MasterName: "m"},
		"no port":            {Addresses: []string{"127.0.0.1:1", "localhost"}, Timeout: time.Second},
		"a URL":              {Addresses: []string{"redis://127.0.0.1:1"}, Timeout: time.Second},
		"a negative timeout": {Addresses: []string{"127.0.0.1:1"}, Timeout: -1},
		"a negative number":  {Addresses: []string{"127.0.0.1:1"}, Timeout: time.Second, DB: -1},
	} {
		t.Run(name, func(t *testing.T) {
			r, err := NewRedis(opt)
			if want := opt.Validate(); r != nil || err == nil || err.Error() != want.Error() {
				t.Errorf("made %v, error %v, want that of Validate: %v", r, err, want)
			}
		})
	}
}
