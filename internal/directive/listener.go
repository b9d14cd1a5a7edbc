package directive

import (
	"errors"
	"fmt"
	"strings"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/compile"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
)

// ParseListener parses rate_limit in listener_wrappers. Its block takes the options of a Limit, as far as they are
// about connections, and of a whole Listener:
//
//	rate_limit [<name>] [<key>] [<rate>] {
//		<option of a limit>...
//		limit <name> {
//			<option of a limit>...
//		}
//
//		accounting atomic | each
//		banned     <limit...>
//		ignore_advice <kind...>
//	}
func ParseListener(d *caddyfile.Dispenser) (*config.Listener, error) {
	d.Next() // the name of the wrapper
	p := &limitParser{
		Helper: httpcaddyfile.Helper{Dispenser: d}, blocks: make(map[*config.Limit]*block), names: &blockNames{named: make(compile.NamedLimits)},
		nested: listenerLimitScope,
	}
	of, l, head := new(config.Listener), new(config.Limit), d.Token()
	args := d.RemainingArgs()
	if err := missingArgument("rate_limit", args); err != nil {
		return nil, d.WrapErr(err)
	}
	if len(args) > 0 && (isMatcherToken(args[0]) || args[0] == "*") {
		return nil, d.WrapErr(option.Bad("rate_limit", strings.Join(args, " "), "match not remote_ip in a block: only addresses are known before TLS"))
	}
	if got, use := setInline(l, args); use != "" {
		return nil, d.WrapErr(option.Bad("rate_limit", got, use))
	}
	besideRate := l.Rate != ""
	if err := p.parseIn(ListenerScope, l, fieldParsers(p.Dispenser, of), head); err != nil {
		return nil, err
	}
	if use := insteadOfName(l, besideRate); use != "" {
		return nil, errorAt(head, fmt.Errorf("rate_limit: %q is only a name, and there is no key; use %s", l.Name, use))
	}
	if len(of.Banned) == 0 || config.FirstField(l) != "" {
		of.Limits = []*config.Limit{l}
	}
	c, err := compile.NewListener(of, option.Later)
	if err != nil && !errors.Is(err, option.ErrUnresolved) {
		return nil, p.blocks[l].located(err)
	}
	return of, c.Check(p.check)
}
