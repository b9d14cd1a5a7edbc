package directive

import (
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/zone"
)

// parseSomeEvents parses the number of events of a zone in a Caddyfile, where 0 means
// that there is none.
func parseSomeEvents(text string) (int64, string) { return zone.ParseEvents(text, 1) }

// zoneParsers returns what parses the options of mholt/caddy-ratelimit, by their names:
//
//	zone <name> {
//		match       @name | /path | <matcher...> | { ... }
//		key         <template>
//		window      <duration>
//		events      <n>
//		max_concurrent <n>
//		ipv4_prefix <bits>
//		ipv6_prefix <bits>
//	}
//	distributed {
//		read_interval  <duration>
//		write_interval <duration>
//		purge_age      <duration>
//	}
//	storage <module...>
//	sweep_interval <duration>
//	log_key
//	disable_metrics
func zoneParsers(helper httpcaddyfile.Helper, zones *config.Zones) map[string]func() error {
	parsers := fieldParsers(helper.Dispenser, zones)
	parsers["zone"] = func() error { return parseZone(helper, zones) }
	parsers["distributed"] = func() error {
		zones.Distributed = new(config.Distributed)
		return parseDistributed(helper, zones.Distributed)
	}
	parsers["storage"] = func() error {
		if !helper.NextArg() {
			return helper.Err("storage: nothing given; use a module, such as file_system <path>")
		}
		zones.StorageRaw = caddyconfig.JSON(map[string]string{"module": helper.Val()}, nil)
		helper.NextSegment() // has no effect, and the module need not be in this Caddy
		return nil
	}
	return parsers
}

// repeatable reports whether an option of mholt/caddy-ratelimit may be there twice, as
// snippets may have it too. The last one counts.
func repeatable(name string) bool {
	return slices.Contains([]string{"distributed", "storage", "log_key", "disable_metrics"}, name)
}

// parseZone parses a zone. Of several of one name in a block, the last counts.
func parseZone(helper httpcaddyfile.Helper, zones *config.Zones) error {
	args := helper.RemainingArgs()
	if len(args) != 1 {
		return helper.WrapErr(option.Bad("zone", strings.Join(args, " "), "one name and a block: zone <name> { ... }"))
	}
	z := new(config.Zone)
	seen := make(map[string]bool)
	for nesting := helper.Nesting(); helper.NextBlock(nesting); {
		name := helper.Val()
		if seen[name] && name != "match" {
			return helper.Errf("duplicate option: %s", name)
		}
		seen[name] = true
		if err := orInstead(helper.Dispenser, ZoneScope, func() error { return parseZoneSetting(helper, z) }); err != nil {
			return err
		}
	}
	switch {
	case len(seen) == 0:
		return helper.Errf("zone %s: no options given; use a block, zone %[1]s { ... }; for several sites, import a snippet that has it",
			option.Quote(args[0]))
	case z.MaxConcurrent != "" && (z.MaxEvents != "" || z.Window != ""):
		return helper.Errf("zone %s: max_concurrent can't be combined with events or window; use either", option.Quote(args[0]))
	case z.MaxConcurrent != "":
	case z.MaxEvents == "":
		return helper.Errf("zone %s: no events given; use how many requests a window admits, such as events 100", option.Quote(args[0]))
	case z.Window == "":
		return helper.Errf("zone %s: no window given; use a duration, such as window 1m", option.Quote(args[0]))
	}
	if zones.RateLimits == nil {
		zones.RateLimits = make(map[string]*config.Zone)
	}
	zones.RateLimits[args[0]] = z
	return nil
}

// parseZoneSetting parses an option of a zone.
func parseZoneSetting(helper httpcaddyfile.Helper, z *config.Zone) error {
	var text string
	var err error
	name := helper.Val()
	switch name {
	case "match":
		set, err := parseZoneMatch(helper)
		z.MatcherSetsRaw = append(z.MatcherSetsRaw, set)
		return err
	case "key":
		args := helper.RemainingArgs()
		if len(args) != 1 {
			return helper.WrapErr(option.Bad(name, strings.Join(args, " "), "one value"))
		}
		z.Key = args[0]
	case "events":
		text, err = parseNumber(helper.Dispenser, parseSomeEvents)
		z.MaxEvents = config.Number(strings.TrimPrefix(text, "+"))
	case "max_concurrent":
		text, err = parseNumber(helper.Dispenser, option.Units)
		z.MaxConcurrent = config.Number(text)
	case "window":
		text, err = parseNumber(helper.Dispenser, zone.ParseWindow)
		z.Window = config.Duration(text)
	case "ipv4_prefix":
		text, err = parseNumber(helper.Dispenser, option.Integer(0, 32))
		z.IPv4Prefix = config.Number(text)
	case "ipv6_prefix":
		text, err = parseNumber(helper.Dispenser, option.Integer(0, 128))
		z.IPv6Prefix = config.Number(text)
	default:
		return unknownOption(helper.Dispenser, ZoneScope)
	}
	if err != nil {
		return err
	}
	return parseEnd(helper.Dispenser, name)
}

// parseZoneMatch parses the matchers of a zone: those of a limit, or a block that may be
// empty.
func parseZoneMatch(helper httpcaddyfile.Helper) (set caddy.ModuleMap, err error) {
	if helper.CountRemainingArgs() == 0 {
		return caddyhttp.ParseCaddyfileNestedMatcherSet(helper.Dispenser)
	}
	sets, err := parseMatch(helper)
	if err != nil || len(sets) == 0 { // an empty set is all requests
		return caddy.ModuleMap{}, err
	}
	return sets[0], nil
}

// parseDistributed parses options that have no effect.
func parseDistributed(helper httpcaddyfile.Helper, d *config.Distributed) error {
	if helper.NextArg() {
		return helper.WrapErr(option.Bad("distributed", helper.Val(), "a block or nothing"))
	}
	for nesting := helper.Nesting(); helper.NextBlock(nesting); {
		name := helper.Val()
		text := config.OptionsOf[string](d)[name]
		if text == nil {
			return unknownOption(helper.Dispenser, DistributedScope)
		}
		var err error
		if *text, err = parseArgument(helper.Dispenser); err != nil {
			return err
		}
	}
	return nil
}
