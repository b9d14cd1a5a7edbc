// Package adminjson has the requests and the answers of the admin API, in Go and in JSON, and the
// words in which people are shown it.
package adminjson

import (
	"reflect"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
)

// Path is what the paths of the API begin with.
const Path = "/rate_limit/"

// Status is the answer of status.
type Status struct {
	Version    string            `json:"version"`
	Configured bool              `json:"configured"` // whether the running config has limits
	Store      string            `json:"store,omitempty"`
	OnError    string            `json:"on_error,omitempty"`
	Servers    []Server          `json:"servers"`
	Memory     *Memory           `json:"memory,omitempty"`
	Requests   map[string]uint64 `json:"requests"`   // of this process, by outcome
	RatesOver  option.Seconds    `json:"rates_over"` // the time that the rates are of
	Limits     []Counts          `json:"limits"`
	Load       []Load            `json:"load,omitempty"`    // of the limits that follow it
	Waiting    []Waiting         `json:"waiting,omitempty"` // of the limits for which requests wait now
}

// Waiting is how many requests wait for a limit now. Clients are as fair_by tells them apart.
type Waiting struct {
	Path     string `json:"path"`
	Requests int    `json:"requests"`
	Clients  int    `json:"clients"` // that have requests in a queue
	Longest  int    `json:"longest"` // the most requests of a client in a queue
}

// Load is what a limit with concurrency auto does: of several keys, all of them together, and
// the slowest.
type Load struct {
	Path       string            `json:"path"`
	Keys       int               `json:"keys"`
	Limit      int               `json:"limit"` // requests that it allows in progress now
	InProgress int               `json:"in_progress"`
	Uncounted  map[string]int    `json:"uncounted"`        // in progress as well, but taking no room: overdue, or body for those that wait for their client's
	Oldest     option.Seconds    `json:"oldest,omitempty"` // for how long any of these is in progress
	Mean       option.Seconds    `json:"mean,omitempty"`   // time until responses begin, recently; left out without answers
	Latency    option.Seconds    `json:"latency"`          // to which the mean is to keep
	State      string            `json:"state"`            // idle, slow or filling
	Routes     []string          `json:"routes,omitempty"` // methods and first segments that are limited, as they are slower than usual
	Shed       map[string]uint64 `json:"shed"`             // by class
	AtMin      option.Seconds    `json:"at_min"`           // for how long it allowed no more than min, and there was more to do
}

// Server is the state of a Redis server.
type Server struct {
	Address     string            `json:"address"`
	State       string            `json:"state"` // up, connecting or down
	Breaker     string            `json:"breaker"`
	Down        *option.Seconds   `json:"down,omitempty"` // for how long
	Reason      string            `json:"reason,omitempty"`
	Connections map[string]int    `json:"connections"`
	Calls       uint64            `json:"calls"`
	Requests    uint64            `json:"requests"`
	Failures    map[string]uint64 `json:"failures"`
}

// Memory is the use of the buckets in this process.
type Memory struct {
	Buckets int `json:"buckets"`
	MaxKeys int `json:"max_keys"`

	// Since they were last written to their file; nil if they are not.
	SavedAgo *option.Seconds `json:"saved_ago"`
}

// Counts are the outcomes of requests at the limits of a path since the first config that
// had it. By counts the decisions on them by who decided, see limiter.Decider, and Rates
// has the numbers of requests per second, recently.
type Counts struct {
	Path string `json:"path"`

	Results

	Near  uint64             `json:"near"`
	Units uint64             `json:"units"`
	By    map[string]uint64  `json:"by"`
	Rates map[string]float64 `json:"rates"`
}

// Results is how many requests the limits of a path have admitted and denied, all of them
// together.
type Results struct {
	Admitted uint64 `json:"admitted"`
	Denied   uint64 `json:"denied"`
	Spared   uint64 `json:"spared"`

	PolicyCounts
}

// PolicyCounts are counted of limits with certain options, and nil of others.
type PolicyCounts struct {
	WouldDeny *uint64 `json:"would_deny,omitempty"` // requests that a dry run would have denied
	OverSize  *uint64 `json:"over_size,omitempty"`  // requests that soft has let pass
	Delayed   *uint64 `json:"delayed,omitempty"`    // requests that max_delay has had wait
	Displaced *uint64 `json:"displaced,omitempty"`  // requests that lost their places in a queue to those of other clients
	Bans      *uint64 `json:"bans,omitempty"`       // that have begun
	Borrowed  *uint64 `json:"borrowed,omitempty"`   // requests for which a pool had room
}

// Counted is one of the PolicyCounts.
type Counted struct {
	Name string
	N    *uint64
}

// List returns the counts by their names in JSON.
func (c *PolicyCounts) List() (all []Counted) {
	v := reflect.ValueOf(c).Elem()
	for i := range v.NumField() {
		name, _, _ := strings.Cut(v.Type().Field(i).Tag.Get("json"), ",")
		all = append(all, Counted{name, v.Field(i).Interface().(*uint64)})
	}
	return all
}

// Limits is the answer of limits.
type Limits struct {
	Limits []Limit `json:"limits"`
}

// Scope is which requests a limit applies to: all of a server, except as given here.
type Scope struct {
	Server        string                     `json:"server,omitempty"`
	Hosts         []string                   `json:"hosts,omitempty"`
	Match         caddyhttp.RawMatcherSets   `json:"match,omitempty"`
	ParentMatches []caddyhttp.RawMatcherSets `json:"parent_matches,omitempty"` // of the limits around it, the outermost first
	RouteMatches  []caddyhttp.RawMatcherSets `json:"route_matches,omitempty"`  // of the routes around the handler, also the outermost first, without hosts
}

// Limit describes a bucket of a limit.
type Limit struct {
	Path    string `json:"path"`
	Name    string `json:"name"` // the path and, of several limits without a name, the number, as in header fields
	Parent  string `json:"parent,omitempty"`
	Handler int    `json:"handler"` // counted from 0; -1 of limits of connections

	Connections bool `json:"connections,omitempty"` // whether it counts connections, and not requests

	Scope
	Numbers

	Off        bool   `json:"off,omitempty"` // by a factor of 0
	Cost       any    `json:"cost"`          // a number, a template that depends on the request, or "body"
	Key        string `json:"key"`
	IPv4Prefix int    `json:"ipv4_prefix"`
	IPv6Prefix int    `json:"ipv6_prefix"`
	MaxKeys    int    `json:"max_keys"`
	WhenFull   string `json:"when_full"`
	TrackTop   int    `json:"track_top,omitempty"`
	Accounting string `json:"accounting"`
	OnError    string `json:"on_error"`
	Buckets    int    `json:"buckets"` // in this process

	Results // of all limits with this path, of which each shows the same
}

// Level is the answer of peek and reset: what a bucket holds or, of reset, held.
type Level struct {
	Error string `json:"error,omitempty"` // why Redis did not answer; from is node then
	Limit string `json:"limit"`

	Key
	rule.Options

	From       string          `json:"from"`           // memory, redis or node: this process, instead of Redis
	Size       *int64          `json:"size,omitempty"` // unless it depends on the request; so is remaining
	Level      int64           `json:"level"`
	Remaining  *int64          `json:"remaining,omitempty"`
	Held       int64           `json:"held"`                  // units of requests in progress, or whose outcome is not known yet
	Clear      option.Seconds  `json:"empties_in"`            // seconds until the bucket is empty
	RetryAfter *option.Seconds `json:"retry_after,omitempty"` // seconds until it admits a request again, or would without dry_run
	InProgress bool            `json:"in_progress,omitempty"` // in place of retry_after, if requests in progress leave no room
	Never      bool            `json:"never,omitempty"`       // a request costs more than the bucket ever has room for
	Banned     option.Seconds  `json:"banned,omitempty"`      // seconds until a ban of the key ends, or would have
	Node       *Node           `json:"node,omitempty"`        // with Redis: what this process knows
}

// Node is what this process knows of a bucket in Redis.
type Node struct {
	Level      int64 `json:"level"`
	Remembered bool  `json:"remembered"`           // whether it denies without asking Redis
	Leased     int64 `json:"leased,omitempty"`     // units that it may still use, which Redis has charged
	Unreported int64 `json:"unreported,omitempty"` // units that it has admitted, which Redis may not know of
}

// Key is the text of a bucket's key, see package keytext, or what replaces it.
type Key struct {
	Key     *string `json:"key,omitempty"`
	Address *string `json:"address,omitempty"`  // instead of key: of a client without one
	NotUTF8 bool    `json:"not_utf8,omitempty"` // the key is not, so its text is quoted
}

// Notable reports whether the bucket holds something, or denies requests.
func (a *Level) Notable() bool {
	return a.Level > 0 || a.Held > 0 || a.Denies() || a.Node != nil && a.Node.Level+a.Node.Unreported > 0
}

// Denies reports whether a request is denied now, or would be if this were no dry run.
func (a *Level) Denies() bool {
	return a.Never || a.InProgress || a.Banned > 0 || a.RetryAfter != nil && *a.RetryAfter > 0 || a.Node != nil && a.Node.Remembered
}

// Levels is the answer of peek and reset about the buckets of all limits: those
// that hold something, or held it, or that deny requests.
type Levels struct {
	Error   string    `json:"error,omitempty"` // why Redis did not answer for some
	Checked int       `json:"checked"`         // the number of buckets that were looked at
	Buckets []Level   `json:"buckets"`
	Skipped []Skipped `json:"skipped"`
}

// Skipped says why there is a bucket of a limit that was not looked at.
type Skipped struct {
	Limit string `json:"limit"`
	Why   string `json:"why"`
}

// Ban is the answer of ban and unban, and an element of the answer of bans.
type Ban struct {
	Error string `json:"error,omitempty"` // why Redis did not answer, so that this is what this process knows
	Limit string `json:"limit"`

	Key

	Left   option.Seconds `json:"left"` // until the ban ends or, of unban, would have ended; 0 if there was none
	DryRun bool           `json:"dry_run,omitempty"`
	Scopes []Scope        `json:"scopes"` // of the limits whose requests the ban covers: those that share the buckets
}

// Bans is the answer of bans: those that the queried Caddy has begun or met, the
// last to end first.
type Bans struct {
	Error string `json:"error,omitempty"` // as in Ban
	Bans  []Ban  `json:"bans"`
}

// WatchTime is how long the stream of top lasts, at most: reading from it again is cheap, and
// Caddy waits ten seconds for admin requests when it loads a config.
const WatchTime = 8 * time.Second

// Top is the answer of top.
type Top struct {
	Limit    string         `json:"limit"`
	By       string         `json:"by"`
	Window   option.Seconds `json:"window"` // the time that the counts are of
	Requests uint64         `json:"requests"`
	Denied   uint64         `json:"denied"`
	Entries  []TopEntry     `json:"entries"`
}

// TopEntry is a key and its counts. The one that entries are sorted by is at most
// error too high. The other one is never too high.
type TopEntry struct {
	Key

	Truncated bool   `json:"truncated,omitempty"` // the key is too long to be kept: this is its beginning, and a digest
	Requests  uint64 `json:"requests"`
	Denied    uint64 `json:"denied"`
	Error     uint64 `json:"error"`
}
