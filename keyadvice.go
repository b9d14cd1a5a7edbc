package ratelimit

import (
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"go.uber.org/zap"
)

// keyFlaw is why a key is hardly what was meant, and what would be.
type keyFlaw struct {
	problem, remedy string

	// Whether a client gets other buckets with each request or connection, so that
	// the limit limits nothing.
	unshared bool
}

// keyFlaws are the placeholders that are no use in keys.
var keyFlaws = []struct {
	names []string
	flaw  keyFlaw
}{
	{
		[]string{"http.request.remote", "http.request.remote.port"},
		keyFlaw{"has the port of the client, which is another one for each connection, so each connection has a bucket of its own",
			"Use {client_ip}, or {remote_host} for the address of the connection.", true},
	},
	{
		[]string{"http.request.uuid"},
		keyFlaw{"is another one for each request, so each request has a bucket of its own",
			"Use what the requests of a client have in common, such as {client_ip}.", true},
	},
	{
		[]string{"time.now", "time.now.http", "time.now.rfc3339", "time.now.common_log", "time.now.unix", "time.now.unix_ms",
			"http.request.duration", "http.request.duration_ms", "http.vars.start_time", "http.time_until_shutdown"},
		keyFlaw{"changes all the time, and each value has a bucket of its own",
			"Use {client_ip}, and for windows of time algorithm fixed_window.", true},
	},
	{
		[]string{"remote_ip", "remote.ip", "remote_addr", "client.ip", "http.remote_ip", "http.client_ip",
			"http.request.remote_ip", "http.request.remote.ip", "http.request.remote_addr", "http.request.client_ip", "http.request.client.ip"},
		keyFlaw{"is no placeholder of Caddy, so it is empty",
			"Use {client_ip}, which is {http.vars.client_ip} in JSON, or {http.request.remote.host} for the address of the connection.", false},
	},
}

// flaws returns what is wrong with k, as far as the key alone tells.
func (k *key) flaws() (found []keyFlaw) {
	for i := range k.parts {
		p := &k.parts[i]
		if flaw, ok := flawOf(p.text); ok && p.placeholder {
			flaw.problem = "Its key has {" + p.text + "}, which " + flaw.problem + "."
			found = append(found, flaw)
		}
	}
	if len(k.parts) == 1 && !k.parts[0].placeholder {
		text := k.parts[0].text
		_, flawed := flawOf(text)
		if addresses[text] != "" || flawed || longName(text) != "" || strings.HasPrefix(text, "http.") || strings.HasPrefix(text, "$") {
			found = append(found, keyFlaw{
				problem: fmt.Sprintf("Its key is the text %q, not a placeholder, so all requests share one bucket.", text),
				remedy:  "Write placeholders in braces, such as {client_ip}.",
			})
		}
	}
	return found
}

// flawOf returns what is wrong with a placeholder in a key, by its name, if anything is.
func flawOf(name string) (keyFlaw, bool) {
	for _, f := range keyFlaws {
		if slices.Contains(f.names, name) {
			return f.flaw, true
		}
	}
	if long := longName(name); long != "" && !isGlobal(name) {
		return keyFlaw{
			problem: "is only known in a Caddyfile, so it is empty",
			remedy:  "Use its long name, " + long + ".",
		}, true
	}
	return keyFlaw{}, false
}

// shorthands replaces the short names of placeholders in a Caddyfile.
var shorthands = sync.OnceValue(httpcaddyfile.NewShorthandReplacer)

// longName returns the placeholder that a name is short for in a Caddyfile, or "".
func longName(name string) string {
	short := "{" + name + "}"
	segment := caddyfile.Segment{{Text: short}}
	shorthands().ApplyToSegment(&segment)
	if long := segment[0].Text; long != short {
		return long
	}
	return ""
}

// bounds reports whether a client that asks often always gets the same bucket.
func (k *key) bounds() bool {
	return k.chosen() == "" && !slices.ContainsFunc(k.flaws(), func(f keyFlaw) bool { return f.unshared })
}

// warnFlaws logs what is wrong with the key of l.
func (l *Limit) warnFlaws() {
	if flaws := l.key.flaws(); len(flaws) > 0 {
		l.logger.Warn("the key of this limit is hardly what was meant", zap.String("limit", l.displayPath()),
			zap.String("problem", flaws[0].problem), zap.String("remedy", flaws[0].remedy))
	}
}
