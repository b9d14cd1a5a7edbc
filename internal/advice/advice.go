// Package advice finds what is legal in a configuration and probably a mistake, and says what to
// write instead. What is logged when a config is loaded and what the command check prints come
// from one list.
package advice

import (
	"cmp"
	"encoding/json"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/routes"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
)

// Kind is what is wrong. A test applies the remedy of each, see TestRemedies.
type Kind uint8

// The kinds of advice.
const (
	KeyPerRequest Kind = iota
	KeyUnknown
	KeyShortName
	KeyUnset
	KeyText
	KeyChosen
	KeyWithoutUser
	KeyOfProxy
	NumberChosen
	SetLater
	Unreachable
	UnmatchedPath
	UnmatchedHost
	PathForm
	Uncounted
	UncountedUser
	Unnamed
	ChargedTwice
	ZonesDiffer
	ZoneClosed
	Floodable
	NeverDenies
	AddressChosen
	ProxyUntrusted
	ProxyExempted
	BanOfAll
	OneAtOnce
	Unprotected
	ConsistencyUnused
	Unavailable
	OfRedis

	Kinds // how many there are
)

// Advice is something in a config that should be changed.
type Advice struct {
	Kind    Kind
	Of      string // what it is about, such as "limit"
	Name    string // of that, if it has one
	Problem string
	Remedy  string

	Placeholder string // by its full name; empty if it is about something else
	Inherited   bool   // whether the limit around it has it too
	OnCheck     bool   // whether it is no more than a hint, which only check gives
	Note        bool   // whether it may well be meant, so that check only notes it

	// Whether a client gets other buckets with each request or connection, so that the limit
	// limits nothing.
	unshared bool
}

// About returns what the advice is about, such as "limit api".
func (a Advice) About() string { return strings.TrimSpace(a.Of + " " + a.Name) }

// MarshalJSON returns what check prints.
func (a Advice) MarshalJSON() ([]byte, error) {
	return json.Marshal(map[string]string{"about": a.About(), "problem": a.Problem, "remedy": a.Remedy})
}

// Config is what advice is given on.
type Config struct {
	HTTP  *caddyhttp.App // provisioned; nil if there is none
	Redis bool           // whether buckets are kept in Redis
}

// collector collects advice.
type collector struct {
	Config
	found []Advice
}

// add adds advice, unless it was given before.
func (c *collector) add(a Advice) {
	if !slices.Contains(c.found, a) {
		c.found = append(c.found, a)
	}
}

// limit adds advice on a limit, by its path.
func (c *collector) limit(path string, a Advice) {
	a.Of, a.Name = "limit", cmp.Or(path, "default")
	c.add(a)
}

// On returns advice on a config.
func On(config Config) []Advice {
	c := &collector{Config: config}
	order, around := routes.Arounds[rule.Module](config.HTTP)
	for _, m := range order {
		h := m.Compiled()
		c.handler(h.Limits, around[m])
		c.flooded(h)
		c.unprotected(h.Limits)
		c.unused(h)
	}
	c.sharing(order, around)
	c.zones(order)
	c.addresses(order)
	return c.found
}
