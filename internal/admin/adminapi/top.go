package adminapi

import (
	"cmp"
	"encoding/json"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/admin/adminjson"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry/toplist"
)

// top answers with the keys that send the most requests, once or in a stream.
func (s server) top(w http.ResponseWriter, r *http.Request) error {
	q, err := parseTopQuery(r.URL.RawQuery)
	if err != nil {
		return err
	}
	b, err := s.newest().tracked(q.limit)
	if err != nil {
		return err
	}
	if q.watch == 0 {
		return writeAnswer(w, newTop(b, q), "", nil)
	}
	return stream(w, r, b, q)
}

// topQuery is a request to top.
type topQuery struct {
	limit string
	n     int
	by    toplist.By
	watch time.Duration // 0 for a single answer
}

// parseTopQuery parses the query of top.
func parseTopQuery(raw string) (topQuery, error) {
	q := topQuery{n: 20}
	values, err := url.ParseQuery(raw)
	if err != nil {
		return q, badRequest("query: malformed; use limit, n, by and watch")
	}
	for _, name := range slices.Sorted(maps.Keys(values)) {
		text := values[name][0]
		if len(values[name]) > 1 && slices.Contains([]string{"limit", "n", "by", "watch"}, name) {
			return q, badRequest("%s: given %d times; use it once", name, len(values[name]))
		}
		switch name {
		case "limit":
			q.limit = text
		case "n":
			n, err := strconv.ParseUint(text, 10, 31)
			if err != nil || n < 1 || n > toplist.MaxCounters {
				return q, badRequest("n: not valid; use a whole number from 1 to %d", toplist.MaxCounters)
			}
			q.n = int(n)
		case "by":
			switch text {
			case "requests":
			case "denied":
				q.by = toplist.ByDenied
			default:
				return q, badRequest("by: not valid; use requests or denied")
			}
		case "watch":
			if q.watch, err = time.ParseDuration(text); err != nil || q.watch < 100*time.Millisecond || q.watch > adminjson.WatchTime {
				return q, badRequest("watch: not valid; use a duration from 100ms to %v, such as 1s", adminjson.WatchTime)
			}
		default:
			return q, badRequest("query: unknown parameter; use limit, n, by or watch")
		}
	}
	return q, nil
}

// stream writes an answer for each interval, in a line of its own, until the
// client leaves, another config is loaded, or WatchTime is over.
func stream(w http.ResponseWriter, r *http.Request, b *rule.Bucket, q topQuery) error {
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.Header().Set("Cache-Control", "no-store")
	ticker := time.NewTicker(q.watch)
	defer ticker.Stop()
	end := time.NewTimer(adminjson.WatchTime)
	defer end.Stop()
	// Not the context of the API's instance: that one may be of a config that was
	// rejected.
	active := caddy.ActiveContext()
	lines, flush := json.NewEncoder(w), http.NewResponseController(w)
	_ = flush.SetWriteDeadline(time.Now().Add(adminjson.WatchTime + time.Second)) // for clients that do not read
	for {
		if err := cmp.Or(lines.Encode(newTop(b, q)), flush.Flush()); err != nil {
			return nil // the client has left
		}
		if active.Context == nil { // Caddy is stopping
			return nil
		}
		select {
		case <-ticker.C:
		case <-end.C:
			return nil
		case <-active.Done():
			return nil
		case <-r.Context().Done():
			return nil
		}
	}
}

// tracked returns the bucket of a path that tracks its keys. Without a path it is
// the only one that does.
func (c *Config) tracked(path string) (*rule.Bucket, error) {
	if path != "" {
		b, err := c.find(path)
		switch {
		case err != nil:
			return nil, err
		case b.Policy.Top == nil:
			return nil, badRequest("limit: it does not track its keys; use one with track_top, such as track_top 100")
		}
		return b.Bucket, nil
	}
	var found *rule.Bucket
	paths := make(map[string]bool)
	for b := range c.buckets() {
		if b.Policy.Top != nil {
			found, paths[b.Path] = b.Bucket, true
		}
	}
	switch len(paths) {
	case 0:
		return nil, newError(http.StatusNotFound, "limit: no limit of the running config tracks its keys; use one with track_top, such as track_top 100")
	case 1:
		return c.tracked(found.Path)
	}
	return nil, badRequest("limit: several limits track their keys; use %s", anyOf(paths))
}

// newTop returns the keys with the most requests at b.
func newTop(b *rule.Bucket, q topQuery) adminjson.Top {
	top := b.Policy.Top.Top(q.by, q.n)
	answer := adminjson.Top{
		Limit: b.Path, By: "requests", Window: option.Seconds(top.Window),
		Requests: top.Requests, Denied: top.Denied, Entries: []adminjson.TopEntry{},
	}
	if q.by == toplist.ByDenied {
		answer.By = "denied"
	}
	for _, e := range top.Entries {
		entry := adminjson.TopEntry{
			Key:       shownKey(e.Text, e.Address),
			Truncated: e.Cut, Requests: e.Requests, Denied: e.Denied, Error: e.Error,
		}
		answer.Entries = append(answer.Entries, entry)
	}
	return answer
}
