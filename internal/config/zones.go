package config

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/zone"
)

// Zones are the options of mholt/caddy-ratelimit, so that a config for it can be
// loaded as it is. All of them need `rate_limits`.
type Zones struct {
	// The zones by name, instead of `limits`. A zone becomes a limit with that name. Zones
	// are checked one after the other, beginning with those that admit most in a given
	// time, and a charge by one zone stays if a later one denies, unless `accounting` says
	// otherwise. No header fields are set except `Retry-After`, unless `headers` says so. A
	// denied request is logged at INFO.
	RateLimits map[string]*Zone `json:"rate_limits,omitempty" caddyfile:""`

	// Whether to log the key of a denied request too. Default: false, since keys may
	// be personal data.
	LogKey bool `json:"log_key,omitempty"`

	// Has no effect: outdated entries are removed automatically.
	SweepInterval Duration `json:"sweep_interval,omitempty"`

	// Has no effect: to share limits between instances, keep them in Redis; see the app's
	// option `redis`.
	Distributed *Distributed `json:"distributed,omitempty"`

	// Has no effect, and is not loaded: to keep or share limits, keep them in Redis.
	StorageRaw json.RawMessage `json:"storage,omitempty"`

	// Has no effect: to turn off metrics, use the app's option `metrics`.
	DisableMetrics bool `json:"disable_metrics,omitempty"`
}

// Zone is a limit as in mholt/caddy-ratelimit: a number of requests per key in any
// time of the window's length.
type Zone struct {
	// Matches the requests that the zone applies to. Default: all requests.
	MatcherSetsRaw caddyhttp.RawMatcherSets `json:"match,omitempty" caddy:"namespace=http.matchers"`

	// The key of a request: text with placeholders. All requests whose key is empty
	// are counted together. Default: empty.
	Key string `json:"key,omitempty"`

	// The number of requests that are admitted in a window. With 0, which is the default,
	// none are. Above 10000 it is an estimate, as with the algorithm `sliding_window`, and
	// it is at most 16777215.
	MaxEvents Number `json:"max_events,omitempty" caddyfile:"events"`

	// The length of the window, in whole microseconds, at most 11 years. Required, unless
	// there is `max_concurrent`.
	Window Duration `json:"window,omitempty"`

	// The number of requests of a key that may be in progress at once, instead of
	// `max_events` and `window`, like `concurrency` of a limit. It was proposed for
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
	ReadInterval Duration `json:"read_interval,omitempty"`

	// Has no effect.
	WriteInterval Duration `json:"write_interval,omitempty"`

	// Has no effect.
	PurgeAge Duration `json:"purge_age,omitempty"`
}

// parseEvents parses the number of events of a zone.
func parseEvents(text string) (int64, string) { return zone.ParseEvents(text, 0) }

// NeedsZones returns an error if there is an option of z that makes no sense without
// zones.
func (z *Zones) NeedsZones() error {
	if set := FirstField(z); set != "" && set != "rate_limits" {
		return fmt.Errorf("%s: only valid with zones, as it is an option of mholt/caddy-ratelimit", set)
	}
	return nil
}

// Limit returns the limit that z becomes, and completes what decides when it is
// asked.
func (z *Zone) Limit(as *zone.Zone) (*Limit, error) {
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

// concurrent is limit for a zone of requests in progress. It is checked as if it admitted
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
