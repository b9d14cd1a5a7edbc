package ratelimit

import (
	"slices"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

func init() {
	httpcaddyfile.RegisterGlobalOption("rate_limit", parseApp)
	httpcaddyfile.RegisterHandlerDirective("rate_limit", parseHandler)
	// Limits see rewritten requests, and come before what is dear to compute,
	// such as a password's hash.
	httpcaddyfile.RegisterDirectiveOrder("rate_limit", httpcaddyfile.Before, "basic_auth")
}

// parseHandler parses the directive:
//
//	rate_limit [<matcher>] [<name>] {
//		key          <template>
//		size         <n>
//		drip_rate    <duration>
//		drip_size    <n>
//		cost         <n>
//		factor       <x>
//		max          <n>
//		duration     <duration>
//		min_interval <duration>
//		ipv4_prefix  <bits>
//		ipv6_prefix  <bits>
//		match        @name | /path | <matcher...> | { ... }
//		limit        <name> { ... }
//
//		accounting   atomic | each
//		headers      x-ratelimit | ratelimit | off ...
//	}
//
// A limit within takes the options above the blank line.
func parseHandler(helper httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
	helper.Next() // the directive's name
	h, l := new(Handler), new(Limit)
	switch args := helper.RemainingArgs(); len(args) {
	case 0:
	case 1:
		l.Name = args[0]
	default:
		if strings.HasPrefix(args[1], "/") || strings.HasPrefix(args[1], "@") {
			return nil, helper.Errf("rate_limit: got %q, want the matcher before the name", strings.Join(args, " "))
		}
		return nil, helper.Errf("rate_limit: got %q, want at most a name; "+
			"limits are written in a block, such as { key %s; size 10; drip_rate 1s } with a line for each",
			strings.Join(args, " "), word(args[0]))
	}
	h.Limits = []*Limit{l}
	return h, parseLimit(helper, l, h)
}

// parseLimit parses the block of a limit. Only the outermost may have options
// of the handler; for the others h is nil.
func parseLimit(helper httpcaddyfile.Helper, l *Limit, h *Handler) error {
	values := map[string]*string{
		"key":          &l.Key,
		"size":         (*string)(&l.Size),
		"drip_rate":    (*string)(&l.DripRate),
		"drip_size":    (*string)(&l.DripSize),
		"cost":         (*string)(&l.Cost),
		"factor":       (*string)(&l.Factor),
		"max":          (*string)(&l.Max),
		"duration":     (*string)(&l.Duration),
		"min_interval": (*string)(&l.MinInterval),
		"ipv4_prefix":  (*string)(&l.IPv4Prefix),
		"ipv6_prefix":  (*string)(&l.IPv6Prefix),
	}
	if h != nil {
		values["accounting"] = &h.Accounting
	}
	seen := make(map[string]bool)
	for nesting := helper.Nesting(); helper.NextBlock(nesting); {
		option := helper.Val()
		if seen[option] && option != "limit" {
			return helper.Errf("%s: got it twice, want it once", option)
		}
		seen[option] = true

		var err error
		switch set := values[option]; {
		case set != nil:
			*set, err = parseArgument(helper.Dispenser)
		case option == "match":
			l.MatcherSetsRaw, err = parseMatch(helper)
		case option == "limit":
			args := helper.RemainingArgs()
			if len(args) != 1 {
				return helper.Errf("limit: got %q, want one name and a block: limit <name> { ... }", strings.Join(args, " "))
			}
			child := &Limit{Name: args[0]}
			l.Limits = append(l.Limits, child)
			err = parseLimit(helper, child, nil)
		case h == nil && (option == "accounting" || option == "headers"):
			return helper.Errf("%s: got it in limit %q, want it in the rate_limit block itself: it is of the whole handler",
				option, l.Name)
		case option == "headers":
			if h.Headers = helper.RemainingArgs(); len(h.Headers) == 0 {
				return helper.Err("headers: got nothing, want x-ratelimit, ratelimit or both, or off")
			}
		case option == "zone":
			return helper.Errf("zone: got an option of another plugin, want limit <name> { ... }, " +
				"with size for events and drip_rate for the window divided by them")
		default:
			return helper.Errf("%s: got an unknown option, want one of key, size, drip_rate, drip_size, cost, factor, "+
				"max, duration, min_interval, ipv4_prefix, ipv6_prefix, match, limit, accounting, headers", word(option))
		}
		if err != nil {
			return err
		}
		if option != "match" && option != "limit" && helper.NextBlock(helper.Nesting()) {
			return helper.Errf("%s: got a block, want it in one line", option)
		}
	}
	return nil
}

// parseArgument parses the one argument of an option. Its errors do not show a
// password.
func parseArgument(d *caddyfile.Dispenser) (string, error) {
	option := d.Val()
	args := d.RemainingArgs()
	switch {
	case len(args) == 1 && args[0] != "":
		return args[0], nil
	case option == "password" && len(args) > 1:
		return "", d.Errf("%s: got %d words, want one, in quotes if there are spaces in it", option, len(args))
	}
	return "", d.Errf("%s: got %q, want one value", option, strings.Join(args, " "))
}

// parseMatch parses the matchers of a limit: a matcher as a directive has it,
// or matchers in a line or a block as a named matcher has them.
func parseMatch(helper httpcaddyfile.Helper) (caddyhttp.RawMatcherSets, error) {
	if helper.CountRemainingArgs() > 0 {
		set, found, err := helper.MatcherToken()
		switch {
		case err != nil:
			return nil, helper.WrapErr(err)
		case found && helper.NextArg():
			return nil, helper.Errf("match: got %q behind a matcher, want one matcher, or several in a block", helper.Val())
		case found && set == nil: // * is all requests
			return nil, nil
		case found:
			return caddyhttp.RawMatcherSets{set}, nil
		}
		helper.Prev() // it was no matcher token
	}
	set, err := caddyhttp.ParseCaddyfileNestedMatcherSet(helper.Dispenser)
	if err != nil {
		return nil, err
	}
	if len(set) == 0 {
		return nil, helper.Err("match: got nothing, want @name, /path or matchers")
	}
	return caddyhttp.RawMatcherSets{set}, nil
}

// parseApp parses the global option:
//
//	rate_limit {
//		redis <address> {
//			username   <user>
//			password   <password>
//			db         <n>
//			key_prefix <prefix>
//			timeout    <duration>
//			pool_size  <n>
//		}
//	}
func parseApp(d *caddyfile.Dispenser, existing any) (any, error) {
	d.Next() // the option's name
	if existing != nil {
		return nil, d.Err("rate_limit: got the global option twice, want it once")
	}
	if d.NextArg() {
		return nil, d.Errf("rate_limit: got %q, want a block", d.Val())
	}
	app := new(App)
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		switch option := d.Val(); option {
		case "redis":
			if app.Redis != nil {
				return nil, d.Err("redis: got it twice, want it once")
			}
			app.Redis = new(Redis)
			if err := parseRedis(d, app.Redis); err != nil {
				return nil, err
			}
		default:
			return nil, d.Errf("%s: got an unknown option, want redis", word(option))
		}
	}
	return httpcaddyfile.App{Name: "rate_limit", Value: caddyconfig.JSON(app, nil)}, nil
}

// parseRedis parses the redis block.
func parseRedis(d *caddyfile.Dispenser, r *Redis) error {
	if r.Addresses = d.RemainingArgs(); len(r.Addresses) == 0 {
		return d.Err("redis: got no address, want redis <address>, such as localhost:6379")
	}
	seen := make(map[string]bool)
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		option := d.Val()
		if seen[option] {
			return d.Errf("%s: got it twice, want it once", option)
		}
		seen[option] = true
		if known := []string{"username", "password", "db", "key_prefix", "timeout", "pool_size"}; !slices.Contains(known, option) {
			return d.Errf("%s: got an unknown option, want one of %s", word(option), strings.Join(known, ", "))
		}
		text, err := parseArgument(d)
		if err != nil {
			return err
		}
		switch option {
		case "username":
			r.Username = text
		case "password":
			r.Password = text
		case "db":
			if r.DB, err = strconv.Atoi(text); err != nil || r.DB < 0 {
				return d.Errf("db: got %q, want the number of a database, from 0", text)
			}
		case "key_prefix":
			r.KeyPrefix = text
		case "timeout":
			timeout, err := caddy.ParseDuration(text)
			if err != nil || timeout <= 0 {
				return d.Errf("timeout: got %q, want a duration such as 50ms", text)
			}
			r.Timeout = caddy.Duration(timeout)
		case "pool_size":
			if r.PoolSize, err = strconv.Atoi(text); err != nil || r.PoolSize < 1 {
				return d.Errf("pool_size: got %q, want a whole number from 1", text)
			}
		}
	}
	return nil
}
