// Package directive reads the directive and the global option of a Caddyfile, and says in its errors what
// was probably meant.
package directive

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/advice"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/compile"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/redisaddr"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/usage"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/state/persist"
)

// ParseBlock parses the directive. docs/directive.md has its syntax: a block takes the options
// of a Limit and of the Handler, and nested limits those of a Limit. A block may have zones instead of
// limits, with other options beside them, see parseZoneOption.
func ParseBlock(helper httpcaddyfile.Helper) (*config.Block, error) {
	helper.Next() // the directive's name
	p := &limitParser{Helper: helper, blocks: make(map[*config.Limit]*block)}
	b, l, head := new(config.Block), new(config.Limit), helper.Token()
	args := helper.RemainingArgs()
	if err := missingArgument("rate_limit", args); err != nil {
		return nil, helper.WrapErr(err)
	}
	if got, use := setInline(l, args); use != "" {
		return nil, helper.WrapErr(option.Bad("rate_limit", got, use))
	}
	besideRate := l.Rate != ""
	if err := p.parse(l, b, head); err != nil {
		return nil, err
	}
	written := p.blocks[l]
	if len(b.RateLimits) == 0 {
		if err := b.NeedsZones(); err != nil {
			return nil, errorAt(written.at(config.FirstField(&b.Zones)), err)
		}
		if use := insteadOfName(l, besideRate); use != "" {
			return nil, errorAt(head, fmt.Errorf("rate_limit: %q is only a name, and there is no key; use %s", l.Name, use))
		}
		b.Limits = []*config.Limit{l}
	} else if name := config.FirstField(l); name != "" {
		into := ""
		if slices.Contains(ZoneScope.Options, name) {
			into = name + " into the zone, or "
		}
		return nil, errorAt(written.at("zone"), option.Clash("zone", "", name, "put "+into+"the limits into a block of their own"))
	}
	p.names = namesIn(helper)
	if err := p.names.name(b, l, head); err != nil {
		return nil, written.located(err)
	}
	c, err := compile.New(b, option.Later)
	if err != nil && !errors.Is(err, option.ErrUnresolved) {
		return nil, written.located(err)
	}
	return b, c.Check(p.check)
}

// limitParser parses the block of a directive. It remembers the blocks, so that errors of what is
// checked when all is known have their line.
type limitParser struct {
	httpcaddyfile.Helper
	blocks map[*config.Limit]*block
	names  *blockNames
	nested *Scope // of limits within others; nil for LimitScope
}

// check checks a limit once it is compiled, or has the error.
func (p *limitParser) check(l *config.Limit, d *compile.LimitBuilder, err error) error {
	if err == nil {
		err = p.names.named.Add(d, func(name string) string { return locationOf(p.blocks[l].at(name)) })
	}
	if err != nil && !errors.Is(err, option.ErrUnresolved) {
		return p.blocks[l].located(err)
	}
	return nil
}

// parse parses the block of a limit, which follows head. Only the outermost may have options of the
// handler; b is nil for nested limits.
func (p *limitParser) parse(l *config.Limit, b *config.Block, head caddyfile.Token) error {
	if b != nil {
		return p.parseIn(BlockScope, l, p.blockParsers(b), head)
	}
	return p.parseIn(cmp.Or(p.nested, LimitScope), l, nil, head)
}

// parseIn parses the block of a limit, which follows head, in a scope that may have more options than those of
// limits.
func (p *limitParser) parseIn(here *Scope, l *config.Limit, more map[string]func() error, head caddyfile.Token) error {
	parsers := p.parsers(l)
	maps.Copy(parsers, more)
	var beside []string // the directive
	if l.Key != "" {
		beside = append(beside, "key")
	}
	if l.Rate != "" {
		beside = append(beside, "rate")
	}
	p.blocks[l] = readBlock(p.Dispenser, here, head)
	return p.blocks[l].parse(p.Dispenser, parsers, beside...)
}

// parsers returns what parses the options of l, by their names.
func (p *limitParser) parsers(l *config.Limit) map[string]func() error {
	parsers := fieldParsers(p.Dispenser, l)
	parsers["concurrency"] = func() error { return p.parseConcurrency(l) }
	parsers["count"] = func() (err error) { l.Count, err = parseResponses(p.Dispenser, "count"); return err }
	parsers["clear"] = func() (err error) { l.Clear, err = parseResponses(p.Dispenser, "clear"); return err }
	parsers["match"] = func() (err error) {
		if args := nextArgs(p.Dispenser); p.nested != nil && slices.ContainsFunc(args, func(arg string) bool { return strings.HasPrefix(arg, "@") }) {
			return p.WrapErr(option.Bad("match", strings.Join(args, " "), "what it stands for, such as match remote_ip 10.0.0.0/8: sites have named matchers, not servers"))
		}
		l.MatcherSetsRaw, err = parseMatch(p.Helper)
		return err
	}
	parsers["limit"] = func() error { return p.parseNested(l) }
	return parsers
}

// blockParsers returns what parses the options of b, by their names.
func (p *limitParser) blockParsers(b *config.Block) map[string]func() error {
	parsers := fieldParsers(p.Dispenser, b)
	maps.Copy(parsers, zoneParsers(p.Helper, &b.Zones))
	return parsers
}

// parseNested parses a limit within l.
func (p *limitParser) parseNested(l *config.Limit) error {
	child, head := new(config.Limit), p.Token()
	args := p.RemainingArgs()
	empty := len(readBlock(p.Dispenser, LimitScope, head).lines) == 0
	if len(args) != 1 || isMatcherToken(args[0]) || kinds["units"].pattern.MatchString(args[0]) || empty && kinds["whole"].pattern.MatchString(args[0]) {
		return p.WrapErr(option.Bad("limit", strings.Join(args, " "), "one name and a block: limit <name> { ... }"))
	}
	child.Name = args[0]
	l.Limits.List = append(l.Limits.List, child)
	return p.parse(child, nil, head)
}

// secrets are the options whose values must not be in errors.
var secrets = []string{"username", "password", "sentinel_username", "sentinel_password", "key_secret"}

// parseArgument parses the one argument of an option, or the words of one that takes several.
func parseArgument(d *caddyfile.Dispenser) (string, error) {
	name := d.Val()
	args := d.RemainingArgs()
	switch {
	case len(args) == 1 && args[0] != "":
		return args[0], nil
	case len(args) > 1 && takesWords(name, args):
		return strings.Join(args, " "), nil
	case len(args) > 1 && (slices.Contains(secrets, name) ||
		slices.ContainsFunc(args, func(arg string) bool { return slices.Contains(secrets, arg) })):
		return "", d.Errf("%s: %d words given; use one, in quotes if it has spaces", name, len(args))
	case name == "key" && len(args) > 1 && !slices.ContainsFunc(args, func(arg string) bool { return !strings.HasPrefix(arg, "{") || !strings.HasSuffix(arg, "}") }):
		return "", d.WrapErr(option.Bad(name, strings.Join(args, " "), `"key `+strings.Join(args, ",")+`"`))
	case inOneLine(args):
		return "", d.WrapErr(option.Bad(name, strings.Join(args, " "), "one value, and "+ownLine))
	case strings.Join(args, "") == "":
		return "", d.WrapErr(option.Bad(name, "", cmp.Or(useEmpty[name], "one value, or set the {$VARIABLE} that stands there")))
	}
	return "", d.WrapErr(option.Bad(name, strings.Join(args, " "), "one value"))
}

// takesWords reports whether an option takes so many arguments as one text.
func takesWords(name string, args []string) bool {
	switch name {
	case "period", "consistency":
		return true
	case "rate", "speed": // whose errors have the ways to write one
		return !inOneLine(args)
	case "actual_cost":
		return usage.IsCost(args[0])
	}
	return false
}

// parseMatch parses an option that is a matcher: a matcher token as of a
// directive, or matchers in a line or a block as of a named matcher.
func parseMatch(helper httpcaddyfile.Helper) (caddyhttp.RawMatcherSets, error) {
	name := helper.Val()
	if args := nextArgs(helper.Dispenser); len(args) == 2 && args[0] == "not" && strings.HasPrefix(args[1], "@") {
		helper.NextArg()
		set, _, err := helper.MatcherToken()
		if err != nil {
			return nil, helper.WrapErr(err)
		}
		return caddyhttp.RawMatcherSets{{"not": caddyconfig.JSON([]caddy.ModuleMap{set}, nil)}}, nil
	}
	if helper.CountRemainingArgs() > 0 {
		set, found, err := helper.MatcherToken()
		switch {
		case err != nil:
			return nil, helper.WrapErr(err)
		case found && helper.NextArg():
			return nil, helper.Errf("%s: %q is after a matcher; use one matcher, or several in a block", name, helper.Val())
		case found && set == nil: // * is all requests
			return nil, nil
		case found:
			return caddyhttp.RawMatcherSets{set}, nil
		}
		helper.Prev() // not a matcher token
		got := nextArgs(helper.Dispenser)
		meant := matcherOption(got)
		if meant != "" && meant != "match "+strings.Join(got, " ") {
			return nil, helper.WrapErr(option.Bad(name, strings.Join(got, " "), inQuotes(meant)))
		}
		if strings.HasPrefix(meant, "match path ") && slices.ContainsFunc(got[1:], isNoPath) {
			return nil, helper.WrapErr(option.Bad(name, strings.Join(got, " "), "paths, which begin with a slash"))
		}
	}
	if lines := matchersIn(nextArgs(helper.Dispenser)); len(lines) > 1 {
		return nil, helper.WrapErr(option.Bad(name, strings.Join(nextArgs(helper.Dispenser), " "),
			"a block with a line for each matcher: "+quotedLines(lines)))
	}
	set, err := caddyhttp.ParseCaddyfileNestedMatcherSet(helper.Dispenser)
	if err != nil && strings.Contains(err.Error(), "http.matchers.@") {
		return nil, helper.Errf("%s: a @name can't be combined with other matchers; use %[1]s @name, or %[1]s not @name, and put the others into its definition", name)
	}
	if err != nil {
		return nil, err
	}
	if len(set) == 0 {
		return nil, helper.Errf("%s: nothing given; use @name, /path or matchers", name)
	}
	return caddyhttp.RawMatcherSets{set}, nil
}

// parseResponses parses the responses that an option with the given name has: one criterion in a line,
// or several in a block.
func parseResponses(d *caddyfile.Dispenser, name string) (*option.Responses, error) {
	m := new(option.Responses)
	for nesting := d.Nesting(); d.NextArg() || d.NextBlock(nesting); {
		codes := &m.StatusCode
		if d.Val() == "not" {
			if codes = &m.NotStatusCode; !d.NextArg() || d.Val() != "status" {
				return nil, d.Err(name + ": not is only for a status; use not status <code...>")
			}
		}
		switch what := d.Val(); what {
		case "status":
			for _, text := range d.RemainingArgs() {
				code, use := compile.ParseStatusCode(text)
				if use != "" {
					return nil, d.WrapErr(option.Bad(name, text, use))
				}
				*codes = append(*codes, code)
			}
		case "header":
			fields := caddyhttp.MatchHeader(m.Headers)
			if err := fields.UnmarshalCaddyfile(d.NewFromNextSegment()); err != nil {
				return nil, err
			}
			m.Headers = http.Header(fields)
		default:
			return nil, d.WrapErr(option.Bad(name, what, "status <code...>, not status <code...> or header <field>, or several in a block"))
		}
	}
	if m.IsEmpty() {
		return nil, d.Err(name + ": nothing given; use status <code...> or header <field>, or both in a block")
	}
	return m, nil
}

// ParseApp parses the global option.
func ParseApp(d *caddyfile.Dispenser, existing any) (any, error) {
	d.Next() // the option's name
	if existing != nil {
		return nil, d.Err("duplicate global option: rate_limit")
	}
	if d.NextArg() {
		return nil, d.WrapErr(option.Bad("rate_limit", redisaddr.WithoutPassword(d.Val()), "a block"))
	}
	app := new(config.App)
	parsers := fieldParsers(d, app)
	parsers["redis"] = func() error { app.Redis = new(config.Redis); return parseRedis(d, app.Redis) }
	parsers["memory"] = func() error { app.Memory = new(config.Memory); return parseMemory(d, app.Memory) }
	written := readBlock(d, GlobalScope, d.Token())
	if err := written.parse(d, parsers); err != nil {
		return nil, err
	}
	if _, err := compile.NewAppSettings(app, option.Later, ""); err != nil && !errors.Is(err, option.ErrUnresolved) {
		return nil, written.located(err)
	}
	return httpcaddyfile.App{Name: "rate_limit", Value: caddyconfig.JSON(app, nil)}, nil
}

// parseMemory parses the memory block.
func parseMemory(d *caddyfile.Dispenser, m *config.Memory) error {
	if d.NextArg() {
		return d.WrapErr(option.Bad("memory", redisaddr.WithoutPassword(d.Val()), "a block"))
	}
	return readBlock(d, MemoryScope, d.Token()).parse(d, map[string]func() error{
		"max_keys": numberParser(d, &m.MaxKeys, compile.ParseMaxKeys),
		"persist":  numberParser(d, &m.Persist, persist.ParsePath),
	})
}

// parseRedis parses the redis block.
func parseRedis(d *caddyfile.Dispenser, r *config.Redis) error {
	head := d.Token()
	r.Addresses = d.RemainingArgs()
	// Hosts need no port, so that these would be hosts too, and a password one to look up.
	for _, word := range r.Addresses[min(1, len(r.Addresses)):] {
		if slices.Contains(RedisScope.Options, word) {
			return d.Errf("redis: the option %s is among the addresses; use a block, with a line for it", word)
		}
	}
	parsers := fieldParsers(d, r)
	parsers["db"] = numberParser(d, &r.DB, config.ParseDB)
	parsers["timeout"] = numberParser(d, &r.Timeout, config.ParseTimeout)
	for _, name := range RedisScope.Options {
		if strings.HasPrefix(name, "tls") {
			parsers[name] = func() error {
				if r.TLS == nil {
					r.TLS = new(reverseproxy.TLSConfig)
				}
				return parseTLS(d, r.TLS)
			}
		}
	}
	written := readBlock(d, RedisScope, head)
	if err := written.parse(d, parsers); err != nil {
		return err
	}
	if len(r.Addresses) == 0 {
		return errorAt(head, errors.New("redis: no address given, or a variable that is not set; use redis <address>..., such as localhost:6379"))
	}
	if err := r.Check(); err != nil {
		var wrong *option.Error
		if errors.As(err, &wrong) {
			head = written.at(wrong.Option)
		}
		return errorAt(head, fmt.Errorf("redis: %w", err))
	}
	return nil
}

// parseTLS parses a TLS option. The options are the reverse proxy's
// transport's.
func parseTLS(d *caddyfile.Dispenser, t *reverseproxy.TLSConfig) (err error) {
	switch name := d.Val(); name {
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
			return d.WrapErr(option.Bad(name, strings.Join(args, " "),
				"the files of a certificate and its key, or the name of one to automate"))
		}
	case "tls_trust_pool":
		if !d.NextArg() {
			return d.Err("tls_trust_pool: nothing given; use a module, such as file <path>")
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

// fieldParsers returns what parses those options that are texts, on or off, or lists, of the struct that
// of points to, by their names.
func fieldParsers(d *caddyfile.Dispenser, of any) map[string]func() error {
	parsers := make(map[string]func() error)
	for name, text := range config.OptionsOf[string](of) {
		parsers[name] = func() (err error) { *text, err = parseArgument(d); return err }
	}
	for name, flag := range config.OptionsOf[bool](of) {
		parsers[name] = func() (err error) { *flag, err = parseFlag(d); return err }
	}
	for name, list := range config.OptionsOf[config.List](of) {
		parsers[name] = func() error {
			if *list = d.RemainingArgs(); len(*list) == 0 {
				return d.WrapErr(option.Bad(name, "", useEmpty[name]))
			}
			return nil
		}
	}
	return parsers
}

// useEmpty describes the words of options that take several.
var useEmpty = map[string]string{
	"ban": compile.UseBans, "banned": compile.UseBanned, "consistency": compile.UseConsistency, "headers": compile.UseHeaders, "ignore_advice": advice.UseKinds,
}

// parseFlag parses an option without arguments.
func parseFlag(d *caddyfile.Dispenser) (bool, error) {
	if name := d.Val(); d.NextArg() {
		return false, d.WrapErr(option.Bad(name, d.Val(), name+" alone"))
	}
	return true, nil
}

// numberParser returns what parses a number or duration. It is not validated if it has placeholders, which are
// resolved when the config is loaded.
func numberParser[T any, S ~string](d *caddyfile.Dispenser, into *S, parse option.Parser[T]) func() error {
	return func() error {
		name := d.Val()
		text, err := parseArgument(d)
		if *into = S(text); err != nil || option.IsTemplate(text) {
			return err
		}
		if _, use := parse(text); use != "" {
			return d.WrapErr(option.Bad(name, text, use))
		}
		return nil
	}
}
