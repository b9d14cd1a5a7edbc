package compile

import (
	"fmt"
	"maps"
	"slices"

	"go.uber.org/zap"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/zone"
)

// setZones makes limits of the zones.
func (c *Compiler) setZones() error {
	b := c.block
	if len(b.RateLimits) == 0 {
		return b.NeedsZones()
	}
	if len(b.Limits) > 0 {
		return option.Clash("rate_limits", "", "limits", "put the limits into a handler of their own")
	}
	order := make([]zone.Zone, 0, len(b.RateLimits))
	limits := make(map[string]*config.Limit, len(b.RateLimits))
	for _, name := range slices.Sorted(maps.Keys(b.RateLimits)) {
		z := zone.Zone{Name: name}
		var err error
		if limits[name], err = b.RateLimits[name].Limit(&z); err != nil {
			return fmt.Errorf("zone %q: %w", option.Redacted(name), err)
		}
		order = append(order, z)
	}
	slices.SortFunc(order, zone.Compare)
	c.zones = make(map[*config.Limit]*zone.Zone, len(order))
	for i := range order {
		z := &order[i]
		l := limits[z.Name]
		b.Limits, c.zones[l] = append(b.Limits, l), z
		if !zone.Exact(z.Events) && b.RateLimits[z.Name].MaxConcurrent == "" {
			c.Logger.Warn("this zone has more events than are counted one by one, so it is estimated as by sliding_window",
				zap.String("zone", z.Name), zap.Int64("events", z.Events), zap.Int("most", zone.MostLogged))
		}
	}
	return nil
}

// warnZones logs, once in a config, which options of zones have no effect and what takes
// their place, unless that is in place, and a jitter that may be meant as a percentage.
func (c *Compiler) warnZones(s *Shared) {
	if jitter := c.Settings.Jitter; jitter != nil && jitter.Share > 1 && !s.warned["jitter"] {
		s.warned["jitter"] = true
		c.Logger.Warn("this jitter makes waits several times as long, since it is a fraction and no percentage",
			zap.Float64("jitter", jitter.Share), zap.String("instead", zone.Percent(jitter.Share)))
	}
	for _, o := range []struct {
		name  string
		given bool
	}{
		{"distributed", c.block.Distributed != nil && s.app.Redis == nil},
		{"storage", len(c.block.StorageRaw) > 0 && s.app.Redis == nil},
		{"sweep_interval", c.block.SweepInterval != ""},
		{"disable_metrics", c.block.DisableMetrics && s.app.Metrics != "off"},
	} {
		if o.given && !s.warned[o.name] {
			s.warned[o.name] = true
			c.Logger.Warn("this option of mholt/caddy-ratelimit has no effect",
				zap.String("option", o.name), zap.String("instead", zone.Instead(o.name)))
		}
	}
}
