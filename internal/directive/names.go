package directive

import (
	"encoding/json"
	"fmt"
	"iter"
	"slices"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/compile"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/zone"
)

// blockNames are the names of the limits of a Caddyfile, as far as it is adapted. A limit
// without a name gets one there, which says where it is: two of them never share
// buckets, on whatever sites they are.
type blockNames struct {
	given map[string]string // the places of limits without a name, by the names that they got
	own   []string          // names that limits had

	named compile.NamedLimits
}

// namesState is where Caddy keeps the names while it adapts a Caddyfile.
const namesState = "http.handlers.rate_limit.names"

// namesIn returns the names of the Caddyfile that is being adapted.
func namesIn(helper httpcaddyfile.Helper) *blockNames {
	if n, known := helper.State[namesState].(*blockNames); known {
		return n
	}
	n := &blockNames{given: make(map[string]string), named: make(compile.NamedLimits)}
	// Named routes come first, wherever they stand, and have a State of their own.
	routes, _ := helper.Option("named_routes").(map[string]*caddyhttp.Route)
	for _, route := range routes {
		for _, handler := range route.HandlersRaw {
			n.addWithin(handler)
		}
	}
	if helper.State != nil {
		helper.State[namesState] = n
	}
	return n
}

// addWithin adds the names of the limits in the JSON of a handler, or in routes within it.
func (n *blockNames) addWithin(text json.RawMessage) {
	var list []json.RawMessage
	if json.Unmarshal(text, &list) == nil {
		for _, element := range list {
			n.addWithin(element)
		}
		return
	}
	var fields map[string]json.RawMessage
	if json.Unmarshal(text, &fields) != nil {
		return
	}
	if string(fields["handler"]) == `"rate_limit"` {
		delete(fields, "handler") // which is Caddy's
		b, own := new(config.Block), caddyconfig.JSON(fields, nil)
		if UnmarshalBlock(own, b) != nil {
			return
		}
		for name := range namesOf(b) {
			if isGivenName(name) {
				n.given[name] = " in a named route"
			}
			n.own = append(n.own, name)
		}
		if c, err := compile.New(b, option.Later); err == nil {
			_ = c.Check(func(_ *config.Limit, d *compile.LimitBuilder, err error) error {
				if err == nil {
					_ = n.named.Add(d, func(string) string { return " in a named route" }) // an error is reported when they are loaded
				}
				return nil
			})
		}
		return
	}
	for _, field := range fields {
		n.addWithin(field)
	}
}

// name gives l, the outermost limit of b, a name if it needs one. It returns an error if a
// limit of b has a name that was given before. at is the token that begins b.
func (n *blockNames) name(b *config.Block, l *config.Limit, at caddyfile.Token) error {
	for name := range namesOf(b) {
		if place := n.given[name]; place != "" {
			return option.Errorf("name", "%q is taken by the limit without a name%s; use another, or give that one a name", name, place)
		}
		n.own = append(n.own, name)
	}
	if l.Name != "" || l.IsGroup() || len(b.RateLimits) > 0 {
		return nil
	}
	for i := 1; l.Name == ""; i++ {
		name := givenName(i)
		if n.given[name] == "" && !slices.Contains(n.own, name) {
			l.Name, n.given[name] = name, locationOf(at)
		}
	}
	return nil
}

// givenName returns the name that the i-th limit without one gets.
func givenName(i int) string {
	if i == 1 {
		return config.DefaultName
	}
	return fmt.Sprintf("%s-%d", config.DefaultName, i)
}

// isGivenName reports whether a limit without a name may have got a name.
func isGivenName(name string) bool {
	i, err := strconv.Atoi(strings.TrimPrefix(name, config.DefaultName+"-"))
	return name == config.DefaultName || err == nil && name == givenName(i)
}

// namesOf returns the names of limits of b that are not within one with a name.
func namesOf(b *config.Block) iter.Seq[string] {
	return func(yield func(string) bool) {
		for name := range b.RateLimits {
			if !yield(zone.LimitName(name)) {
				return
			}
		}
		eachName(b.Limits, yield)
	}
}

// eachName yields the names of limits, or of those within limits without one, until yield
// returns false.
func eachName(limits []*config.Limit, yield func(string) bool) bool {
	for _, l := range limits {
		switch {
		case l == nil:
		case l.Name != "":
			if !yield(l.Name) {
				return false
			}
		case !eachName(l.Limits.List, yield):
			return false
		}
	}
	return true
}

// locationOf returns where a token is, as Caddy's errors say it: " at Caddyfile:7", and through
// which imports.
func locationOf(token caddyfile.Token) string {
	d := caddyfile.NewDispenser([]caddyfile.Token{token})
	d.Next()
	return strings.TrimPrefix(d.Err("").Error(), ",")
}
