package rule

import (
	"context"
	"net/http"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Limits of connections are asked about a request that has the address of a connection and nothing else, so that
// matchers, keys, bans and counters are those of limits of requests.

// Listener is a listener wrapper that has limits: what the connections of a server have to pass.
type Listener struct {
	Handler
	Server   string        // its name
	Wrappers []string      // all of the server, in their order
	Index    int           // its own among them
	Banned   []string      // limits of requests, whose bans hold for connections
	bans     []addressBans // of these
}

// Units are what a connection holds of limits.
type Units struct {
	held    *limiter.Held
	buckets int
}

// Release releases what is held.
func (u Units) Release() {
	for i := range u.buckets {
		u.held.Settle(i, 0)
	}
}

// Connect decides on a connection from an address, which is empty if it has none, as on a unix socket. It returns
// what the connection holds until it is closed, or the path of the limit that refuses it.
func (l *Listener) Connect(address string) (units Units, refused string) {
	if refused = l.refusedBy(address); refused != "" {
		return units, refused
	}
	c := connections.Get().(*connection)
	defer connections.Put(c)
	c.from(address)
	q, err := Evaluate(c.request, l.Limits, time.Time{})
	defer q.Release()
	if err == nil {
		err = q.Decide(l.Store, How{Accounting: l.Accounting})
	}
	if err != nil {
		l.logError("limits of connections can't be checked, accepting connections", err)
		return units, ""
	}
	q.count()
	if i := q.firstDenied(); i >= 0 {
		return units, q.entries[i].Path
	}
	if len(q.holdings) > 0 { // all of one request to the store
		units = Units{q.holdings[0].Held, len(q.asked)}
	}
	return units, ""
}

// ConnectionFrom returns what limits of connections see of one from an address.
func ConnectionFrom(address string) *http.Request {
	c := newConnection()
	c.from(address)
	return c.request
}

// connection is a request that has an address and nothing else, and its context.
type connection struct {
	context.Context
	request *http.Request
	vars    map[string]any
}

// connections pools them.
var connections = sync.Pool{New: func() any { return newConnection() }}

// newConnection returns one without an address.
func newConnection() *connection {
	c := &connection{Context: context.Background(), vars: make(map[string]any, 1)}
	c.request = new(http.Request).WithContext(c)
	return c
}

// from sets the address.
func (c *connection) from(address string) {
	c.request.RemoteAddr, c.vars[caddyhttp.ClientIPVarKey] = address, address
}

// noPlaceholders is the replacer of all of them.
var noPlaceholders = caddy.NewEmptyReplacer()

// Value implements context.Context.
func (c *connection) Value(key any) any {
	switch key {
	case caddy.ReplacerCtxKey:
		return noPlaceholders
	case caddyhttp.VarsCtxKey:
		return c.vars
	}
	return nil
}
