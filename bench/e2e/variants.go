package main

import (
	"fmt"
	"strings"
	"time"
)

// The limiters that are measured, by the names they have in tables.
const (
	bare      = "bare Caddy"
	inProcess = "this module, in process"
	onRedis   = "this module, Redis"
	leased    = "this module, lease 100ms"
	eventual  = "this module, eventual 100ms"
	mholt     = "mholt/caddy-ratelimit"
	redisRate = "redis_rate"
	evalsha   = "EVALSHA each"
	oneCall   = "one EVALSHA for all"
	header    = "three header fields" // set by Caddy
)

var limiters = []string{inProcess, mholt, onRedis, redisRate, evalsha, oneCall}

// directives are those of package peers.
var directives = map[string]string{redisRate: "redis_rate", evalsha: "evalsha", oneCall: "one_call"}

// consistencies are those of this module, on Redis.
var consistencies = map[string]string{onRedis: "exact", leased: "lease 100ms", eventual: "eventual 100ms"}

// usesRedis reports whether a limiter keeps its buckets in Redis.
func usesRedis(limiter string) bool { return consistencies[limiter] != "" || directives[limiter] != "" }

// variant is what is measured: a limiter, its task, and the load.
type variant struct {
	limiter string

	draw
	limits int // number of limits that each request has to pass

	// Whether all requests are answered with status 429; otherwise with 200, or with
	// either where the limit is one of so many a second.
	denied    bool
	perSecond int

	far bool // whether it takes a while to Redis and back, see away

	// Whether the site has an error route.
	errorRoute bool

	connections int // of wrk, to all processes together
	processes   int // of Caddy
}

// draw is how requests are drawn, and when they are sent.
type draw struct {
	keys  int           // number of clients; a single one is identified by its address
	zipf  float64       // the exponent of Zipf's law that keys follow; 0 if all are equally frequent
	pause time.Duration // how long a connection waits on average before each request
	paced int           // requests a second, sent on schedule by paced instead of wrk; 0 if not
}

// baseline returns the same variant without a limiter. Bare Caddy has no requests
// to deny; but its error routes are expensive, so it uses one too.
func (v variant) baseline() variant {
	v.limiter, v.limits, v.perSecond, v.far = bare, 0, 0, false
	v.denied = v.errorRoute
	return v
}

// asked describes the limiter's task in words.
func (v variant) asked() string {
	words := "allowed"
	if v.denied {
		words = "denied"
	}
	if v.keys == 1 {
		words += ", one key"
	} else {
		words += ", " + count(v.keys) + " keys"
	}
	if v.zipf > 0 {
		words += fmt.Sprintf(" by Zipf %g", v.zipf)
	}
	if v.limits > 1 {
		words += fmt.Sprintf(", %d limits", v.limits)
	}
	if v.errorRoute {
		words += ", `handle_errors`"
	}
	return words
}

func (v variant) String() string {
	return fmt.Sprintf("%s: %s (connections: %d, processes: %d, far: %t, paced: %d)", v.limiter, v.asked(), v.connections, v.processes, v.far, v.paced)
}

// Of each request, what the table at the head of the document has.
var (
	oneKey   = variant{draw: draw{keys: 1}, limits: 1, processes: 1}
	manyKeys = variant{draw: draw{keys: 100_000}, limits: 1, processes: 1}
	eight    = variant{draw: draw{keys: 100_000}, limits: 8, processes: 1}
	flood    = variant{draw: draw{keys: 1}, limits: 1, denied: true, processes: 1}
	routed   = variant{draw: draw{keys: 1}, limits: 1, denied: true, errorRoute: true, processes: 1}
)

// by returns the variant by each of the limiters, at so many connections.
func (v variant) by(connections int, limiters ...string) []variant {
	v.connections = connections
	variants := make([]variant, len(limiters))
	for i, l := range limiters {
		v.limiter = l
		variants[i] = v
	}
	return variants
}

// orBaseline returns the variant by one limiter, or its baseline if that is bare
// Caddy.
func (v variant) orBaseline(connections int, limiter string) variant {
	v = v.by(connections, limiter)[0]
	if limiter == bare {
		return v.baseline()
	}
	return v
}

// site returns what the site does before it responds.
func (v variant) site(redis string) string {
	key := "{header.X-Key}"
	if v.keys == 1 {
		key = "{client_ip}"
	}
	// Never full, and never drained between two rounds.
	size, dripRate := 1_000_000, "10m"
	events, window := 100, "2m" // of a sliding window, which takes memory for each
	switch {
	case v.denied: // Full after one request. It is the one that finds Caddy ready.
		size, dripRate = 1, "24h"
		events, window = 1, "24h"
	case v.perSecond > 0:
		size, dripRate = v.perSecond, (time.Second / time.Duration(v.perSecond)).String()
	case v.keys == 1:
		size, dripRate = 500_000_000, "1s"
		events, window = 1_000_000, "1s"
	}

	var b strings.Builder
	block := func(directive string, limit func(i int)) {
		fmt.Fprintf(&b, "\t%s {\n", directive)
		for i := range v.limits {
			limit(i)
		}
		b.WriteString("\t}\n")
	}
	switch v.limiter {
	case inProcess, onRedis, leased, eventual:
		block("rate_limit", func(i int) {
			if i == 0 {
				fmt.Fprintf(&b, "\t\tkey %s\n\t\tsize %d\n\t\tdrip_rate %s\n", key, size, dripRate)
			} else {
				fmt.Fprintf(&b, "\t\tlimit l%d {\n\t\t\tsize %d\n\t\t\tdrip_rate %s\n\t\t}\n", i, size, dripRate)
			}
		})
	case mholt:
		block("rate_limit", func(i int) {
			fmt.Fprintf(&b, "\t\tzone z%d {\n\t\t\tkey %s\n\t\t\tevents %d\n\t\t\twindow %s\n\t\t}\n", i, key, events, window)
		})
	case redisRate, evalsha, oneCall:
		directive := directives[v.limiter]
		if v.perSecond > 0 { // their names of buckets don't tell numbers apart
			key = "/s" + key
		}
		block(directive+" "+redis, func(i int) {
			fmt.Fprintf(&b, "\t\tlimit %s:%d%s %d %s\n", directive, i, key, size, dripRate)
		})
	case header:
		b.WriteString("\theader X-RateLimit-Limit 1000000\n\theader X-RateLimit-Remaining 999999\n\theader X-RateLimit-Clear 600.000\n")
	default:
		if v.denied {
			b.WriteString("\terror 429\n")
		}
	}
	if v.errorRoute {
		b.WriteString("\thandle_errors {\n\t\trespond \"{err.status_code} {err.status_text}\"\n\t}\n")
	}
	return b.String()
}

// caddyfile returns the configuration that serves the variant at a port of this
// host. Redis has plenty of time: a request that is not decided by Redis because
// an answer is late would measure something else.
func (v variant) caddyfile(port, redis string) string {
	global := ""
	if c := consistencies[v.limiter]; c != "" {
		global = fmt.Sprintf("\trate_limit {\n\t\tredis %s {\n\t\t\ttimeout 5s\n\t\t}\n\t\tconsistency %s\n\t}\n", redis, c)
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
`, global, port, v.site(redis))
}
