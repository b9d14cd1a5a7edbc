package ratelimit

import (
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

func init() {
	httpcaddyfile.RegisterGlobalOption("rate_limit", parseApp)
	httpcaddyfile.RegisterHandlerDirective("rate_limit", parseHandler)
	// Limits see rewritten requests, and come before expensive handlers, such as
	// those that hash passwords.
	httpcaddyfile.RegisterDirectiveOrder("rate_limit", httpcaddyfile.Before, "basic_auth")
}

// parseHandler parses the directive:
//
//	rate_limit [<matcher>] [<name>] {
//		key          <template>
//		algorithm    leaky_bucket | token_bucket | fixed_window | sliding_window | sliding_log | warm_up
//		rate         <n>/<duration>
//		size         <n>
//		drip_rate    <duration>
//		drip_size    <n>
//		window       <duration>
//		window_start clock | first
//		period       minute | hour | day | week | month | year [<zone>]
//		warm_up      <duration>
//		cold_factor  <x>
//		count_denied
//		capacity     <n>
//		refill_rate  <duration>
//		refill_size  <n>
//		cost         <n>
//		factor       <x>
//		max          <n>
//		duration     <duration>
//		min_interval <duration>
//		ipv4_prefix  <bits>
//		ipv6_prefix  <bits>
//		max_keys     <n>
//		when_full    forget | share
//		track_top    <n>
//		match        @name | /path | <matcher...> | { ... }
//		limit        <name> { ... }
//
//		accounting   atomic | each | in_order
//		headers      x-ratelimit | ratelimit | off ...
//		on_error     fallback | allow | deny
//		log
//		jitter       <share>
//		zone         <name> { ... }
//	}
//
// A nested limit takes the options above the blank line. A block may have zones
// instead of these, with other options beside them, see parseZoneOption.
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
			quoteWord(strings.Join(args, " ")), quoteWord(args[0]))
	}
	if err := parseLimit(helper, l, h); err != nil {
		return nil, err
	}
	if len(h.RateLimits) == 0 {
		if err := h.needsZones(); err != nil {
			return nil, helper.WrapErr(err)
		}
		h.Limits = []*Limit{l}
		return h, nil
	}
	if option := firstSetField(l); option != "" {
		return nil, helper.Errf("zone: got it together with %s, want only zones or only limits in a block; "+
			"`caddy rate-limit convert` writes zones as limits", option)
	}
	return h, nil
}

// parseLimit parses the block of a limit. Only the outermost may have options
// of the handler; h is nil for nested limits.
func parseLimit(helper httpcaddyfile.Helper, l *Limit, h *Handler) error {
	values := map[string]*string{
		"key":          &l.Key,
		"algorithm":    &l.Algorithm,
		"rate":         (*string)(&l.Rate),
		"size":         (*string)(&l.Size),
		"drip_rate":    (*string)(&l.DripRate),
		"drip_size":    (*string)(&l.DripSize),
		"window":       (*string)(&l.Window),
		"window_start": &l.WindowStart,
		"warm_up":      (*string)(&l.WarmUp),
		"cold_factor":  (*string)(&l.ColdFactor),
		"capacity":     (*string)(&l.Capacity),
		"refill_rate":  (*string)(&l.RefillRate),
		"refill_size":  (*string)(&l.RefillSize),
		"cost":         (*string)(&l.Cost),
		"factor":       (*string)(&l.Factor),
		"max":          (*string)(&l.Max),
		"duration":     (*string)(&l.Duration),
		"min_interval": (*string)(&l.MinInterval),
		"ipv4_prefix":  (*string)(&l.IPv4Prefix),
		"ipv6_prefix":  (*string)(&l.IPv6Prefix),
		"max_keys":     (*string)(&l.MaxKeys),
		"when_full":    &l.WhenFull,
		"track_top":    (*string)(&l.TrackTop),
	}
	if h != nil {
		values["accounting"] = &h.Accounting
		values["on_error"] = &h.OnError
		values["jitter"] = (*string)(&h.Jitter)
	}
	seen := make(map[string]bool)
	for nesting := helper.Nesting(); helper.NextBlock(nesting); {
		option := helper.Val()
		if seen[option] && option != "limit" && option != "zone" && (h == nil || !repeatable(option)) {
			return helper.Errf("%s: got a duplicate option, want it once", option)
		}
		seen[option] = true

		var err error
		switch set := values[option]; {
		case set != nil:
			*set, err = parseArgument(helper.Dispenser)
		case option == "period":
			if args := helper.RemainingArgs(); len(args) == 1 || len(args) == 2 {
				l.Period = strings.Join(args, " ")
			} else {
				return helper.Errf("period: got %q, want a unit and at most a time zone, such as month Europe/Berlin",
					strings.Join(args, " "))
			}
		case option == "count_denied":
			l.CountDenied, err = parseFlag(helper.Dispenser)
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
		case h == nil && slices.Contains([]string{"accounting", "headers", "on_error", "log", "jitter"}, option):
			return helper.Errf("%s: got it in limit %q, want it in the rate_limit block itself, as it applies to the whole handler",
				option, l.Name)
		case option == "headers":
			if h.Headers = helper.RemainingArgs(); len(h.Headers) == 0 {
				return helper.Err("headers: got nothing, want x-ratelimit, ratelimit or both, or off")
			}
		case option == "log":
			h.Log, err = parseFlag(helper.Dispenser)
		default:
			if h != nil {
				if found, err := parseZoneOption(helper, &h.Zones); err != nil {
					return err
				} else if found {
					continue
				}
			}
			return helper.Errf("%s: got an unknown option, want one of key, algorithm, rate, size, drip_rate, drip_size, window, window_start, "+
				"period, warm_up, cold_factor, count_denied, capacity, refill_rate, refill_size, cost, factor, "+
				"max, duration, min_interval, ipv4_prefix, ipv6_prefix, max_keys, when_full, track_top, match, limit, accounting, headers, on_error, log, jitter, zone",
				quoteWord(option))
		}
		if err == nil && option != "match" && option != "limit" {
			err = parseEnd(helper.Dispenser, option)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// secrets are the options whose values must not be in errors.
var secrets = []string{"username", "password", "sentinel_username", "sentinel_password", "key_secret"}

// parseArgument parses the one argument of an option.
func parseArgument(d *caddyfile.Dispenser) (string, error) {
	option := d.Val()
	args := d.RemainingArgs()
	switch {
	case len(args) == 1 && args[0] != "":
		return args[0], nil
	case len(args) > 1 && (slices.Contains(secrets, option) ||
		slices.ContainsFunc(args, func(arg string) bool { return slices.Contains(secrets, arg) })):
		return "", d.Errf("%s: got %d words, want one, in quotes if there are spaces in it", option, len(args))
	}
	return "", d.Errf("%s: got %q, want one value", option, strings.Join(args, " "))
}

// parseMatch parses the matchers of a limit: a matcher token like that of a
// directive, or matchers in a line or a block like those of a named matcher.
func parseMatch(helper httpcaddyfile.Helper) (caddyhttp.RawMatcherSets, error) {
	if helper.CountRemainingArgs() > 0 {
		set, found, err := helper.MatcherToken()
		switch {
		case err != nil:
			return nil, helper.WrapErr(err)
		case found && helper.NextArg():
			return nil, helper.Errf("match: got %q after a matcher, want one matcher, or several in a block", helper.Val())
		case found && set == nil: // * is all requests
			return nil, nil
		case found:
			return caddyhttp.RawMatcherSets{set}, nil
		}
		helper.Prev() // not a matcher token
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
//			pool_size         <n>
//		}
//		memory {
//			max_keys <n>
//		}
//		on_error fallback | allow | deny
//		metrics  on | off
//	}
func parseApp(d *caddyfile.Dispenser, existing any) (any, error) {
	d.Next() // the option's name
	if existing != nil {
		return nil, d.Err("rate_limit: got a duplicate global option, want it once")
	}
	if d.NextArg() {
		return nil, d.Errf("rate_limit: got %q, want a block", withoutPassword(d.Val()))
	}
	app := new(App)
	seen := make(map[string]bool)
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		option := d.Val()
		if seen[option] {
			return nil, d.Errf("%s: got a duplicate option, want it once", option)
		}
		seen[option] = true
		var err error
		switch option {
		case "redis":
			app.Redis = new(Redis)
			err = parseRedis(d, app.Redis)
		case "memory":
			app.Memory = new(Memory)
			err = parseMemory(d, app.Memory)
		case "on_error":
			if app.OnError, err = parseArgument(d); err == nil {
				err = parseEnd(d, option)
			}
		case "metrics":
			if app.Metrics, err = parseArgument(d); err == nil {
				err = parseEnd(d, option)
			}
		default:
			return nil, d.Errf("%s: got an unknown option, want one of redis, memory, on_error, metrics", quoteWord(withoutPassword(option)))
		}
		if err != nil {
			return nil, err
		}
	}
	return httpcaddyfile.App{Name: "rate_limit", Value: caddyconfig.JSON(app, nil)}, nil
}

// parseMemory parses the memory block.
func parseMemory(d *caddyfile.Dispenser, m *Memory) error {
	if d.NextArg() {
		return d.Errf("memory: got %q, want a block", withoutPassword(d.Val()))
	}
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		switch option := d.Val(); {
		case option != "max_keys":
			return d.Errf("%s: got an unknown option, want max_keys", quoteWord(option))
		case m.MaxKeys != "":
			return d.Errf("%s: got a duplicate option, want it once", option)
		}
		text, err := parseNumber(d, parseMaxKeys)
		if err != nil {
			return err
		}
		m.MaxKeys = Number(text)
		if err := parseEnd(d, "max_keys"); err != nil {
			return err
		}
	}
	return nil
}

// parseRedis parses the redis block.
func parseRedis(d *caddyfile.Dispenser, r *Redis) error {
	if r.Addresses = d.RemainingArgs(); len(r.Addresses) == 0 {
		return d.Err("redis: got no address, want redis <address>..., such as localhost:6379")
	}
	texts := map[string]*string{
		"username":          &r.Username,
		"password":          &r.Password,
		"master_name":       &r.MasterName,
		"sentinel_username": &r.SentinelUsername,
		"sentinel_password": &r.SentinelPassword,
		"key_prefix":        &r.KeyPrefix,
		"key_secret":        &r.KeySecret,
	}
	seen := make(map[string]bool)
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		option := d.Val()
		if seen[option] {
			return d.Errf("%s: got a duplicate option, want it once", option)
		}
		seen[option] = true

		var text string
		var err error
		switch option {
		case "db":
			text, err = parseNumber(d, parseDB)
			r.DB = Number(text)
		case "pool_size":
			text, err = parseNumber(d, parsePoolSize)
			r.PoolSize = Number(text)
		case "timeout":
			text, err = parseNumber(d, parseTimeout)
			r.Timeout = Duration(text)
		case "cluster":
			r.Cluster, err = parseFlag(d)
		case "tls", "tls_client_auth", "tls_server_name", "tls_trust_pool", "tls_insecure_skip_verify":
			if r.TLS == nil {
				r.TLS = new(reverseproxy.TLSConfig)
			}
			err = parseTLS(d, r.TLS)
		default:
			if texts[option] == nil {
				return d.Errf("%s: got an unknown option, want one of username, password, db, cluster, "+
					"master_name, sentinel_username, sentinel_password, tls, tls_client_auth, tls_server_name, "+
					"tls_trust_pool, tls_insecure_skip_verify, key_prefix, key_secret, timeout, pool_size",
					quoteWord(withoutPassword(option)))
			}
			*texts[option], err = parseArgument(d)
		}
		if err == nil && option != "tls_trust_pool" { // its module takes the block
			err = parseEnd(d, option)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// parseTLS parses a TLS option. The options are those of the reverse proxy's
// transport.
func parseTLS(d *caddyfile.Dispenser, t *reverseproxy.TLSConfig) (err error) {
	switch option := d.Val(); option {
	case "tls":
		_, err = parseFlag(d)
	case "tls_insecure_skip_verify":
		t.InsecureSkipVerify, err = parseFlag(d)
	case "tls_server_name":
		t.ServerName, err = parseArgument(d)
	case "tls_client_auth":
		switch args := d.RemainingArgs(); {
		case len(args) == 1 && args[0] != "":
			t.ClientCertificateAutomate = args[0]
		case len(args) == 2 && args[0] != "" && args[1] != "":
			t.ClientCertificateFile, t.ClientCertificateKeyFile = args[0], args[1]
		default:
			return d.Errf("tls_client_auth: got %q, want the files of a certificate and its key, "+
				"or the name of one to automate", strings.Join(args, " "))
		}
	case "tls_trust_pool":
		if !d.NextArg() {
			return d.Err("tls_trust_pool: got nothing, want a module, such as file <path>")
		}
		name := d.Val()
		pool, err := caddyfile.UnmarshalModule(d, "tls.ca_pool.source."+name)
		if err != nil {
			return err
		}
		t.CARaw = caddyconfig.JSONModuleObject(pool, "provider", name, nil)
	}
	return err
}

// parseFlag parses an option without arguments.
func parseFlag(d *caddyfile.Dispenser) (bool, error) {
	if option := d.Val(); d.NextArg() {
		return false, d.Errf("%s: got %q, want no argument", option, d.Val())
	}
	return true, nil
}

// parseNumber parses the argument of an option that is a number or duration. It is
// not validated if it has placeholders, which are resolved when the config is loaded.
func parseNumber[T any](d *caddyfile.Dispenser, parse parser[T]) (string, error) {
	option := d.Val()
	text, err := parseArgument(d)
	if err != nil || isTemplate(text) {
		return text, err
	}
	if _, err := newConstant(option, text, parse); err != nil {
		return "", d.WrapErr(err)
	}
	return text, nil
}

// parseEnd returns an error if a block follows an option.
func parseEnd(d *caddyfile.Dispenser, option string) error {
	if d.NextBlock(d.Nesting()) {
		return d.Errf("%s: got a block, want it in one line", option)
	}
	return nil
}
