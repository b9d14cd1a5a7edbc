package main

import (
	"fmt"
	"strings"
)

// variant is one configuration of Caddy and what is asked of it.
type variant struct {
	name string

	// The variant whose speed this one's is compared with, in the same round:
	// it does the same without the limiter.
	baseline string

	// What the site does before it responds.
	site string

	// Whether the buckets are kept in Redis.
	redis bool

	// How many different values of X-Key the requests have; 0 means none.
	keys int

	// Whether all requests are answered with status 429; otherwise with 200.
	denied bool
}

const (
	bare         = "bare Caddy"
	bareKeys     = "bare Caddy, 100 000 keys"
	bareErrors   = "bare Caddy, `error 429` and `handle_errors`"
	manyKeys     = 100_000
	handleErrors = "\thandle_errors {\n\t\trespond \"{err.status_code} {err.status_text}\"\n\t}\n"

	// Never full, and never drained between two rounds.
	oneOpen  = "\trate_limit {\n\t\tsize 500000000\n\t}\n"
	keysOpen = "\trate_limit {\n\t\tkey {header.X-Key}\n\t\tsize 1000000\n\t\tdrip_rate 10m\n\t}\n"

	// Full after one request. It is the one that finds Caddy ready.
	shut = "\trate_limit {\n\t\tsize 1\n\t\tdrip_rate 24h\n\t}\n"
)

var variants = []variant{
	{name: bare},
	{name: "in process, allowed, one key", baseline: bare, site: oneOpen},
	{name: bareKeys, baseline: bare, keys: manyKeys},
	{name: "in process, allowed, 100 000 keys", baseline: bareKeys, site: keysOpen, keys: manyKeys},
	{name: "Redis, allowed, 100 000 keys", baseline: bareKeys, site: keysOpen, redis: true, keys: manyKeys},
	{name: "in process, denied", baseline: bare, site: shut, denied: true},
	{name: "Redis, denied", baseline: bare, site: shut, redis: true, denied: true},
	{name: bareErrors, baseline: bare, site: "\terror 429\n" + handleErrors, denied: true},
	{name: "in process, denied, `handle_errors`", baseline: bareErrors, site: shut + handleErrors, denied: true},
}

// limited reports whether the limiter is in the variant's site.
func (v variant) limited() bool { return strings.Contains(v.site, "rate_limit") }

// caddyfile returns the configuration that serves the variant at a port of
// this host. Redis may take its time: a request that is not decided by it, but
// for lack of an answer, would measure something else.
func (v variant) caddyfile(port, redis string) string {
	global := ""
	if v.redis {
		global = fmt.Sprintf("\trate_limit {\n\t\tredis %s {\n\t\t\ttimeout 5s\n\t\t}\n\t}\n", redis)
	}
	return fmt.Sprintf(`{
	admin off
	auto_https off
	persist_config off
	log {
		format json
		level ERROR
	}
%s}

http://127.0.0.1:%s {
	bind 127.0.0.1
%s	respond "Hello"
}
`, global, port, v.site)
}
