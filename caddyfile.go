package ratelimit

import (
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/directive"
)

func init() {
	httpcaddyfile.RegisterHandlerDirective("rate_limit", parseHandler)
	// Limits see rewritten requests, and come before expensive handlers, such as those
	// that hash passwords: basicauth, as the old name has it, and basic_auth.
	httpcaddyfile.RegisterDirectiveOrder("rate_limit", httpcaddyfile.After, "try_files")
	httpcaddyfile.RegisterGlobalOption("rate_limit", parseGlobalOption)
}

// parseHandler parses the directive. Its block takes the options of a Limit and of a whole Block,
// and nested limits take those of a Limit. docs/directive.md says what they do:
//
//	rate_limit [<matcher>] [<name>] [<key>] [<rate>] {
//		<option of a limit>...
//		limit <name> {
//			<option of a limit>...
//		}
//
//		accounting atomic | each
//		headers    x-ratelimit | github | ratelimit-11 ... | off
//		on_error   fallback | allow | deny
//		body       on | off
//		jitter     slots
//		ignore_advice <kind...>
//		log
//	}
func parseHandler(helper httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
	b, err := directive.ParseBlock(helper)
	if err != nil {
		return nil, err
	}
	return &Handler{Block: *b}, nil
}

// parseGlobalOption parses the global option:
//
//	rate_limit {
//		redis <address>... {
//			username          <user>
//			password          <password>
//			db                <n>
//			cluster
//			master_name       <name>
//			sentinel_username <user>
//			sentinel_password <password>
//			tls
//			tls_client_auth   <cert_file> <key_file> | <automate_name>
//			tls_server_name   <name>
//			tls_trust_pool    <module...>
//			tls_insecure_skip_verify
//			key_prefix        <prefix>
//			key_secret        <secret>
//			timeout           <duration>
//		}
//		memory {
//			max_keys <n>
//			persist  <path> | off
//		}
//		on_error    fallback | allow | deny
//		consistency exact | lease <duration> | eventual <duration>
//		metrics     on | off
//		ignore_advice <kind...>
//	}
func parseGlobalOption(d *caddyfile.Dispenser, existing any) (any, error) {
	return directive.ParseApp(d, existing)
}
