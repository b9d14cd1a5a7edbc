// Package taken is another plugin for tests: in a process whose environment says so,
// it registers something under the name of the one that is tested. That imports it, so
// it does so first.
package taken

import (
	"os"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// Names is the environment variable that lists, with spaces, what to register: IDs of
// modules, `directive` or `command`.
const Names = "RATELIMIT_TEST_TAKEN"

func init() {
	for name := range strings.FieldsSeq(os.Getenv(Names)) {
		switch name {
		case "directive":
			httpcaddyfile.RegisterHandlerDirective("rate_limit", func(httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
				return caddyhttp.StaticResponse{Body: "other"}, nil
			})
		case "command":
			caddycmd.RegisterCommand(caddycmd.Command{
				Name: "rate-limit", Short: "Is another command", Func: func(caddycmd.Flags) (int, error) { return 0, nil },
			})
		default:
			caddy.RegisterModule(module(name))
		}
	}
}

// module is a module that does nothing, by its ID.
type module string

// CaddyModule returns the Caddy module information.
func (m module) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: caddy.ModuleID(m), New: func() caddy.Module { return new(other) }}
}

// other is an instance of a module.
type other struct{}

// CaddyModule returns the Caddy module information.
func (*other) CaddyModule() caddy.ModuleInfo { return caddy.ModuleInfo{} }

// Routes implements caddy.AdminRouter.
func (*other) Routes() []caddy.AdminRoute { return nil }
