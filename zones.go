package ratelimit

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/zone"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/key/keytext"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
)

// Zones are the options of mholt/caddy-ratelimit, so that a config for it can be
// loaded as it is. All of them need `rate_limits`.
type Zones struct {
	// The zones by their names, instead of `limits`. A zone becomes a limit of that
	// name. Zones are asked one after the other, those that admit most in a time
	// first, and what one has counted stays counted if a later one denies, unless
	// `accounting` says otherwise. No header fields are set but `Retry-After`, unless
	// `headers` says so. A denied request is logged at INFO.
	RateLimits map[string]*Zone `json:"rate_limits,omitempty"`

	// Whether to log the key of a denied request too. Default: false, since keys may
	// be personal data.
	LogKey bool `json:"log_key,omitempty"`

	// Has no effect: what is out of date leaves by itself.
	SweepInterval Duration `json:"sweep_interval,omitempty"`

	// Has no effect: to share limits between instances, keep them in Redis, see the
	// app's option `redis`.
	Distributed *Distributed `json:"distributed,omitempty"`

	// Has no effect, and is not loaded: to keep or share limits, keep them in Redis.
	StorageRaw json.RawMessage `json:"storage,omitempty"`

	// Has no effect: to turn off metrics, use the app's option `metrics`.
	DisableMetrics bool `json:"disable_metrics,omitempty"`
}

// Zone is a limit as mholt/caddy-ratelimit has it: so many requests of a key in any
// time of one window.
type Zone struct {
	// Matches the requests that the zone applies to. Default: all requests.
	MatcherSetsRaw caddyhttp.RawMatcherSets `json:"match,omitempty" caddy:"namespace=http.matchers"`

	// The key of a request: text with placeholders. All requests whose key is empty
	// are counted together. Default: empty.
	Key string `json:"key,omitempty"`

	// The number of requests that are admitted in a window. With 0, which is the
	// default, none is. Above 10000 it is estimated, as by the algorithm
	// `sliding_window`, and it is at most 16777215.
	MaxEvents Number `json:"max_events,omitempty"`

	// The length of the window, in whole microseconds, at most 11 years. Required, unless
	// there is `max_concurrent`.
	Window Duration `json:"window,omitempty"`

	// The number of requests of a key that may be in progress at once, instead of
	// `max_events` and `window`: `concurrency` of a limit. It was proposed for
	// mholt/caddy-ratelimit in its pull request 98.
	MaxConcurrent Number `json:"max_concurrent,omitempty"`

	// The prefix length to which a key that is an IPv4 address is shortened, from 1
	// to 32. Default: 0, which does not shorten it.
	IPv4Prefix Number `json:"ipv4_prefix,omitempty"`

	// The prefix length to which a key that is an IPv6 address is shortened, from 1
	// to 128. Default: 0, which does not shorten it.
	IPv6Prefix Number `json:"ipv6_prefix,omitempty"`
}

// Distributed are options that have no effect.
type Distributed struct {
	// Has no effect.
	WriteInterval Duration `json:"write_interval,omitempty"`

	// Has no effect.
	ReadInterval Duration `json:"read_interval,omitempty"`

	// Has no effect.
	PurgeAge Duration `json:"purge_age,omitempty"`
}

// parseEvents parses the number of events of a zone.
func parseEvents(text string) (int64, string) { return zone.ParseEvents(text, 0) }

// parseSomeEvents parses the number of events of a zone in a Caddyfile, where 0 means
// that there is none.
func parseSomeEvents(text string) (int64, string) { return zone.ParseEvents(text, 1) }

// needsZones returns an error if there is an option of z that makes no sense without
// zones.
func (z *Zones) needsZones() error {
	if set := firstField(z); set != "" && set != "rate_limits" {
		return fmt.Errorf("%s: only valid with zones, as it is an option of mholt/caddy-ratelimit", set)
	}
	return nil
}

// setZones makes limits of the zones.
func (h *Handler) setZones() error {
	if len(h.RateLimits) == 0 {
		return h.needsZones()
	}
	if len(h.Limits) > 0 {
		return option.Clash("rate_limits", "", "limits", "put the limits into a handler of their own")
	}
	order := make([]zone.Zone, 0, len(h.RateLimits))
	limits := make(map[string]*Limit, len(h.RateLimits))
	for _, name := range slices.Sorted(maps.Keys(h.RateLimits)) {
		z := zone.Zone{Name: name}
		var err error
		if limits[name], err = h.RateLimits[name].limit(&z); err != nil {
			return fmt.Errorf("zone %q: %w", option.Redacted(name), err)
		}
		order = append(order, z)
	}
	slices.SortFunc(order, zone.Compare)
	h.zones = make(map[*Limit]*zone.Zone, len(order))
	for i := range order {
		z := &order[i]
		l := limits[z.Name]
		h.Limits, h.zones[l] = append(h.Limits, l), z
		if !zone.Exact(z.Events) && h.RateLimits[z.Name].MaxConcurrent == "" {
			h.logger.Warn("this zone has more events than are counted one by one, so it is estimated as by sliding_window",
				zap.String("zone", z.Name), zap.Int64("events", z.Events), zap.Int("most", zone.MostLogged))
		}
	}
	return nil
}

// limit returns the limit that z becomes, and completes what decides when it is
// asked.
func (z *Zone) limit(as *zone.Zone) (*Limit, error) {
	if z == nil {
		return nil, errors.New("nothing given; use max_events and window")
	}
	var err error
	if z.MaxConcurrent != "" {
		return z.concurrent(as)
	}
	if as.Events, err = option.Parse(option.OnLoad, "max_events", cmp.Or(string(z.MaxEvents), "0"), parseEvents); err != nil {
		return nil, err
	}
	if as.Window, err = option.Parse(option.OnLoad, "window", string(z.Window), zone.ParseWindow); err != nil {
		return nil, err
	}
	l := &Limit{
		Name:           zone.LimitName(as.Name),
		MatcherSetsRaw: z.MatcherSetsRaw,
		Key:            z.Key,
		Algorithm:      zone.AlgorithmOf(as.Events),
		Size:           Number(strconv.FormatInt(max(as.Events, 1), 10)),
		Window:         z.Window,
	}
	z.setPrefixes(l)
	return l, nil
}

// concurrent is limit for a zone of requests in progress. It is asked as if it admitted
// so many a second.
func (z *Zone) concurrent(as *zone.Zone) (l *Limit, err error) {
	if z.MaxEvents != "" || z.Window != "" {
		return nil, option.Clash("max_concurrent", string(z.MaxConcurrent), "max_events or window", "use either")
	}
	if as.Events, err = option.Parse(option.OnLoad, "max_concurrent", string(z.MaxConcurrent), option.Units); err != nil {
		return nil, err
	}
	as.Window = time.Second
	l = &Limit{
		Name: zone.LimitName(as.Name), MatcherSetsRaw: z.MatcherSetsRaw, Key: z.Key, Concurrency: z.MaxConcurrent,
	}
	z.setPrefixes(l)
	return l, nil
}

// setPrefixes sets to how many bits addresses are shortened in l, which z becomes.
func (z *Zone) setPrefixes(l *Limit) {
	l.IPv4Prefix, l.IPv6Prefix = z.IPv4Prefix, z.IPv6Prefix
	if l.IPv4Prefix == "0" {
		l.IPv4Prefix = ""
	}
	if l.IPv6Prefix == "" || l.IPv6Prefix == "0" {
		l.IPv6Prefix = "128"
	}
}

// warnZones logs, once in a config, which options of zones have no effect and what takes
// their place, unless that is in place, and a jitter that may be meant as a percentage.
func (h *Handler) warnZones(app *App) {
	if h.jitter > 1 && !app.agreement.warned["jitter"] {
		app.agreement.warned["jitter"] = true
		h.logger.Warn("this jitter makes waits several times as long, since it is a fraction and no percentage",
			zap.Float64("jitter", h.jitter), zap.String("instead", zone.Percent(h.jitter)))
	}
	for _, o := range []struct {
		name  string
		given bool
	}{
		{"distributed", h.Distributed != nil && app.Redis == nil},
		{"storage", len(h.StorageRaw) > 0 && app.Redis == nil},
		{"sweep_interval", h.SweepInterval != ""},
		{"disable_metrics", h.DisableMetrics && app.Metrics != "off"},
	} {
		if o.given && !app.agreement.warned[o.name] {
			app.agreement.warned[o.name] = true
			h.logger.Warn("this option of mholt/caddy-ratelimit has no effect",
				zap.String("option", o.name), zap.String("instead", zone.Instead(o.name)))
		}
	}
}

// logExceeded logs that a zone has denied a request, and the wait that its client is
// told.
func (h *Handler) logExceeded(r *http.Request, q *rule.Request, decider *outcome.Entry, wait time.Duration) {
	c := h.logger.Check(zap.InfoLevel, "rate limit exceeded")
	if c == nil {
		return
	}
	address, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		address = r.RemoteAddr
	}
	fields := []zap.Field{zap.String("zone", decider.Title), zap.Duration("wait", wait), zap.String("remote_ip", address)}
	if h.LogKey {
		entries := q.Entries()
		i := slices.IndexFunc(entries, func(e rule.Entry) bool { return e.Ask.Name == decider.Name })
		key, template := entries[i].Ask.Key, h.RateLimits[decider.Title].Key
		if template == "" || strings.Count(template, "{") > 1 { // the text between several placeholders counts too
			key = r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer).ReplaceAll(template, "")
		}
		fields = append(fields, zap.String("key", keytext.Of(key)))
	}
	c.Write(fields...)
}

// parseZoneOption parses an option of mholt/caddy-ratelimit, if that is what the
// current token is:
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
func parseZoneOption(helper httpcaddyfile.Helper, zones *Zones) (found bool, err error) {
	switch name := helper.Val(); name {
	case "zone":
		err = parseZone(helper, zones)
	case "distributed":
		zones.Distributed = new(Distributed)
		err = parseDistributed(helper, zones.Distributed)
	case "storage":
		if !helper.NextArg() {
			return true, helper.Err("storage: nothing given; use a module, such as file_system <path>")
		}
		zones.StorageRaw = caddyconfig.JSON(map[string]string{"module": helper.Val()}, nil)
		helper.NextSegment() // has no effect, and the module need not be in this Caddy
	case "sweep_interval":
		var text string
		if text, err = parseArgument(helper.Dispenser); err == nil {
			zones.SweepInterval, err = Duration(text), parseEnd(helper.Dispenser, name)
		}
	case "log_key":
		if zones.LogKey, err = parseFlag(helper.Dispenser); err == nil {
			err = parseEnd(helper.Dispenser, name)
		}
	case "disable_metrics":
		if zones.DisableMetrics, err = parseFlag(helper.Dispenser); err == nil {
			err = parseEnd(helper.Dispenser, name)
		}
	default:
		return false, nil
	}
	return true, err
}

// repeatable reports whether an option of mholt/caddy-ratelimit may be there twice, as
// snippets may have it too. The last one counts.
func repeatable(name string) bool {
	return slices.Contains([]string{"distributed", "storage", "log_key", "disable_metrics"}, name)
}

// parseZone parses a zone. Of several of one name in a block, the last counts.
func parseZone(helper httpcaddyfile.Helper, zones *Zones) error {
	args := helper.RemainingArgs()
	if len(args) != 1 {
		return helper.WrapErr(option.Bad("zone", strings.Join(args, " "), "one name and a block: zone <name> { ... }"))
	}
	z := new(Zone)
	seen := make(map[string]bool)
	for nesting := helper.Nesting(); helper.NextBlock(nesting); {
		name := helper.Val()
		if seen[name] && name != "match" {
			return helper.Errf("duplicate option: %s", name)
		}
		seen[name] = true
		if err := orInstead(helper.Dispenser, zoneScope, func() error { return z.parseOption(helper) }); err != nil {
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
		zones.RateLimits = make(map[string]*Zone)
	}
	zones.RateLimits[args[0]] = z
	return nil
}

// parseOption parses an option of a zone.
func (z *Zone) parseOption(helper httpcaddyfile.Helper) error {
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
		z.MaxEvents = Number(strings.TrimPrefix(text, "+"))
	case "max_concurrent":
		text, err = parseNumber(helper.Dispenser, option.Units)
		z.MaxConcurrent = Number(text)
	case "window":
		text, err = parseNumber(helper.Dispenser, zone.ParseWindow)
		z.Window = Duration(text)
	case "ipv4_prefix":
		text, err = parseNumber(helper.Dispenser, option.Integer(0, 32))
		z.IPv4Prefix = Number(text)
	case "ipv6_prefix":
		text, err = parseNumber(helper.Dispenser, option.Integer(0, 128))
		z.IPv6Prefix = Number(text)
	default:
		return unknownOption(helper.Dispenser, zoneScope)
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
func parseDistributed(helper httpcaddyfile.Helper, d *Distributed) error {
	if helper.NextArg() {
		return helper.WrapErr(option.Bad("distributed", helper.Val(), "a block or nothing"))
	}
	for nesting := helper.Nesting(); helper.NextBlock(nesting); {
		name := helper.Val()
		into := map[string]*Duration{
			"read_interval": &d.ReadInterval, "write_interval": &d.WriteInterval, "purge_age": &d.PurgeAge,
		}[name]
		if into == nil {
			return unknownOption(helper.Dispenser, distributedScope)
		}
		text, err := parseArgument(helper.Dispenser)
		if err != nil {
			return err
		}
		*into = Duration(text)
	}
	return nil
}
