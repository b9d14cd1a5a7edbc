package adminapi

import (
	"fmt"
	"iter"
	"maps"
	"net/http"
	"slices"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/outcome"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/limiter"
)

// Config is a config that runs, with limits.
type Config struct {
	Handlers  []rule.Module    // in the order in which they were provisioned
	Listeners []*rule.Listener // the same
	OnError   rule.OnError     // unless a handler says otherwise
	HTTP      *caddyhttp.App   // that has the handlers
	Memory    *limiter.Memory  // the store in this process
	MaxKeys   int              // of that store
	Saved     time.Time        // when that store was written to its file, or the zero time

	Redis *limiter.Redis // the store in Redis; nil without
	InUse *atomic.Int64  // how many requests use that store, which stays open for them
}

// bucket is a bucket of a config, and its position there.
type bucket struct {
	rule.LocatedBucket
	handler *rule.Handler
	module  rule.Module // of that; nil of connections
	server  string      // of connections
	index   int         // of the handler; -1 of connections
	title   string      // the name by which header fields list it; set by numbered
}

// buckets returns all buckets of the config, or of none.
func (c *Config) buckets() iter.Seq[bucket] {
	return func(yield func(bucket) bool) {
		if c == nil {
			return
		}
		for i, module := range c.Handlers {
			handler := module.Compiled()
			for b := range rule.Buckets(handler.Limits) {
				if !yield(bucket{LocatedBucket: b, handler: handler, module: module, index: i}) {
					return
				}
			}
		}
		for _, l := range c.Listeners {
			for b := range rule.Buckets(l.Limits) {
				if !yield(bucket{LocatedBucket: b, handler: &l.Handler, server: l.Server, index: -1}) {
					return
				}
			}
		}
	}
}

// numbered returns all buckets of the config, or of none, with the names that a
// response has for them that lists them all.
func (c *Config) numbered() (all []bucket) {
	all = slices.Collect(c.buckets())
	now, listed := time.Now(), make([]outcome.Entry, len(all))
	for i := range all {
		listed[i] = outcome.Entry{Policy: &all[i].Policy.Policy, Name: all[i].Name, Limit: all[i].Stored(now)}
	}
	for i, title := range outcome.Titles(listed) {
		all[i].title = title
	}
	return all
}

// errNoLimits is the error for requests about limits where there are none.
var errNoLimits = newError(http.StatusNotFound, "limit: the running config has no limits")

// find returns the bucket of a path. Of several without a name, default#1 is the first.
func (c *Config) find(path string) (*bucket, error) {
	var found []bucket
	paths, titles := make(map[string]bool), make(map[string]bool)
	all := c.numbered()
	for _, b := range all {
		paths[b.Path] = true
		title := b.title
		if title == b.Path {
			title += "#1"
		}
		if path == title {
			return &b, nil
		}
		if path == b.Path && !titles[title] {
			titles[title] = true
			found = append(found, b)
		}
	}
	switch {
	case len(all) == 0:
		return nil, errNoLimits
	case len(found) == 0:
		return nil, newError(http.StatusNotFound, "limit: the running config has no such limit; use %s", anyOf(paths))
	case len(found) > 1 && !found[0].Limit.Named:
		return nil, newError(http.StatusConflict,
			"limit: several limits without a name have this path, with other keys or numbers; use %s, or give the limits names", anyOf(titles))
	}
	return &found[0], nil
}

// anyOf returns a list of paths for a message, shortened if it is long.
func anyOf(paths map[string]bool) string {
	const most = 20
	list := slices.Sorted(maps.Keys(paths))
	if n := len(list) - most; n > 0 {
		list = append(list[:most], fmt.Sprintf("one of %d more", n))
	}
	return option.InWords(list, "or")
}
