package routes

import (
	"net/http"
	"testing"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// plugin is a handler of a plugin, and limits one that is looked for.
type (
	plugin struct{}
	limits struct{ name string }
)

func (plugin) ServeHTTP(http.ResponseWriter, *http.Request, caddyhttp.Handler) error  { return nil }
func (*limits) ServeHTTP(http.ResponseWriter, *http.Request, caddyhttp.Handler) error { return nil }

// TestAround guards that what a plugin's handler may have set is not said to be unset, and that
// a handler which is not on the way of a request does not count, nor a loop of named routes.
func TestAround(t *testing.T) {
	t.Parallel()
	vars := &caddyhttp.VarsMiddleware{"plan": "free"}
	invoke := &caddyhttp.Invoke{Name: "loop"}
	route := func(group string, terminal bool, handlers ...caddyhttp.MiddlewareHandler) caddyhttp.Route {
		return caddyhttp.Route{Group: group, Terminal: terminal, Handlers: handlers}
	}
	for _, tc := range []struct {
		name       string
		routes     func(l *limits) caddyhttp.RouteList
		sets       bool
		later      string
		hasPlugins bool
	}{
		{"nothing", func(l *limits) caddyhttp.RouteList { return caddyhttp.RouteList{route("", false, l)} }, false, "", false},
		{"before", func(l *limits) caddyhttp.RouteList { return caddyhttp.RouteList{route("", false, vars, l)} }, true, "", false},
		{"behind", func(l *limits) caddyhttp.RouteList {
			return caddyhttp.RouteList{route("", false, l), route("", false, vars)}
		}, false, "vars", false},
		{"behind a plugin", func(l *limits) caddyhttp.RouteList {
			return caddyhttp.RouteList{route("", false, plugin{}, l, vars)}
		}, false, "", true},
		{"behind a terminal route", func(l *limits) caddyhttp.RouteList {
			return caddyhttp.RouteList{route("", true, l), route("", false, vars)}
		}, false, "", false},
		{"before, in a terminal route", func(l *limits) caddyhttp.RouteList {
			return caddyhttp.RouteList{route("", true, vars), route("", false, l)}
		}, false, "", false},
		{"in another route of a group", func(l *limits) caddyhttp.RouteList {
			return caddyhttp.RouteList{route("g", false, vars), route("g", false, l), route("g", false, vars)}
		}, false, "", false},
		{"behind a group", func(l *limits) caddyhttp.RouteList {
			return caddyhttp.RouteList{route("g", false, l), route("g", false), route("", false, vars)}
		}, false, "vars", false},
		{"in a loop", func(l *limits) caddyhttp.RouteList {
			return caddyhttp.RouteList{route("", false, invoke, l)}
		}, true, "", false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			l := &limits{tc.name}
			loop := route("", false, vars, invoke)
			order, around := Arounds[*limits](&caddyhttp.App{Servers: map[string]*caddyhttp.Server{
				"srv": {Routes: tc.routes(l), NamedRoutes: map[string]*caddyhttp.Route{"loop": &loop}},
			}})
			if len(order) != 1 {
				t.Fatalf("found %d handlers, want 1", len(order))
			}
			a := around[l]
			if sets, later, plugins := a.Sets("http.vars.plan"), a.SetLater("http.vars.plan"), a.Plugins(); sets != tc.sets || later != tc.later || plugins != tc.hasPlugins {
				t.Errorf("got %v, %q, %v, want %v, %q, %v", sets, later, plugins, tc.sets, tc.later, tc.hasPlugins)
			}
		})
	}
}
