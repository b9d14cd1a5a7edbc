package directive

import (
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/zone"
)

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

// parseZone parses a zone. Of several of one name in a block, the last counts.
func parseZone(helper httpcaddyfile.Helper, zones *config.Zones) error {
	head, args := helper.Token(), helper.RemainingArgs()
	if len(args) != 1 {
		return helper.WrapErr(option.Bad("zone", strings.Join(args, " "), "one name and a block: zone <name> { ... }"))
	}
	z := new(config.Zone)
	written := readBlock(helper.Dispenser, ZoneScope, head)
	if err := written.parse(helper.Dispenser, zoneOptionParsers(helper, z)); err != nil {
		return err
	}
	switch {
	case len(written.lines) == 0:
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

// zoneOptionParsers returns what parses the options of a zone, by their names.
func zoneOptionParsers(helper httpcaddyfile.Helper, z *config.Zone) map[string]func() error {
	d := helper.Dispenser
	events := numberParser(d, &z.MaxEvents, func(text string) (int64, string) { return zone.ParseEvents(text, 1) }) // 0 means that there is none
	return map[string]func() error{
		"match": func() error {
			set, err := parseZoneMatch(helper)
			z.MatcherSetsRaw = append(z.MatcherSetsRaw, set)
			return err
		},
		"key": func() error {
			args := d.RemainingArgs()
			if len(args) != 1 {
				return d.WrapErr(option.Bad("key", strings.Join(args, " "), "one value"))
			}
			z.Key = args[0]
			return nil
		},
		"events": func() error {
			err := events()
			z.MaxEvents = config.Number(strings.TrimPrefix(string(z.MaxEvents), "+"))
			return err
		},
		"max_concurrent": numberParser(d, &z.MaxConcurrent, option.Units),
		"window":         numberParser(d, &z.Window, zone.ParseWindow),
		"ipv4_prefix":    numberParser(d, &z.IPv4Prefix, option.Integer(0, 32)),
		"ipv6_prefix":    numberParser(d, &z.IPv6Prefix, option.Integer(0, 128)),
	}
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
	return readBlock(helper.Dispenser, DistributedScope, helper.Token()).parse(helper.Dispenser, fieldParsers(helper.Dispenser, d))
}
