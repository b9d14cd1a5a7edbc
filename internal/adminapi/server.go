// Package adminapi is the admin API of rate limits: its JSON, its HTTP handlers and its
// client. It knows no module of Caddy: the root package gives it a Source.
package adminapi

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/toplist"
)

// Source is what the running config knows, or that there is none with limits.
type Source interface {
	Status() Status
	Limits() []Limit

	// Inspect looks at the bucket that is asked for, or empties it, and returns what it
	// holds, or held.
	Inspect(ctx context.Context, asked Asked, reset bool) (Level, error)

	// InspectAll is Inspect for the buckets of all limits whose keys can be made from
	// what is asked.
	InspectAll(ctx context.Context, asked Asked, reset bool) (Levels, error)

	// Ban bans the key that is asked for, for a time from now on.
	Ban(ctx context.Context, asked Asked, d time.Duration) (Ban, error)

	// Unban ends the ban of the key that is asked for, and returns what it was.
	Unban(ctx context.Context, asked Asked) (Ban, error)

	// Bans lists the bans of the limit with a path; without one, those of all limits.
	Bans(ctx context.Context, path string) (Bans, error)

	// Top returns a function that lists the n keys which send the most requests, or are
	// denied most, at the limit with a path; without one, at the only limit that tracks
	// its keys.
	Top(path string) (func(by toplist.By, n int) Top, error)
}

// MaxTop is the largest number of keys that Top lists.
const MaxTop = 10_000

// Routes returns the handlers of the API, whose paths begin with prefix. current returns
// the Source of the newest config.
func Routes(prefix string, current func() Source) []caddy.AdminRoute {
	s := server{current}
	return []caddy.AdminRoute{
		{Pattern: prefix + "status", Handler: allow(http.MethodGet, s.status)},
		{Pattern: prefix + "limits", Handler: allow(http.MethodGet, s.limits)},
		{Pattern: prefix + "peek", Handler: allow(http.MethodPost, s.peek)},
		{Pattern: prefix + "reset", Handler: allow(http.MethodPost, s.reset)},
		{Pattern: prefix + "ban", Handler: allow(http.MethodPost, s.ban)},
		{Pattern: prefix + "unban", Handler: allow(http.MethodPost, s.unban)},
		{Pattern: prefix + "bans", Handler: allow(http.MethodGet, s.bans)},
		{Pattern: prefix + "top", Handler: allow(http.MethodGet, s.top)},
		{Pattern: prefix, Handler: caddy.AdminHandlerFunc(func(http.ResponseWriter, *http.Request) error {
			return Error(http.StatusNotFound, "unknown endpoint, want %[1]sstatus, %[1]slimits, %[1]speek, %[1]sreset, %[1]sban, %[1]sunban, %[1]sbans or %[1]stop", prefix)
		})},
	}
}

// server serves the API.
type server struct{ current func() Source }

// status answers with the state of the store and the counts of the limits.
func (s server) status(w http.ResponseWriter, _ *http.Request) error {
	return writeJSON(w, http.StatusOK, s.current().Status())
}

// limits answers with all limits.
func (s server) limits(w http.ResponseWriter, _ *http.Request) error {
	return writeJSON(w, http.StatusOK, Limits{s.current().Limits()})
}

// peek answers with what buckets hold.
func (s server) peek(w http.ResponseWriter, r *http.Request) error { return s.inspect(w, r, false) }

// reset empties buckets and answers with what they held.
func (s server) reset(w http.ResponseWriter, r *http.Request) error { return s.inspect(w, r, true) }

// inspect looks at the bucket of a limit or those of all limits, or empties them.
func (s server) inspect(w http.ResponseWriter, r *http.Request, reset bool) error {
	asked, err := readAsked(w, r)
	if err != nil {
		return err
	}
	if asked.Limit == "" {
		answer, err := s.current().InspectAll(r.Context(), asked, reset)
		if err != nil {
			return err
		}
		return writeJSON(w, statusOf(answer.Error), answer)
	}
	answer, err := s.current().Inspect(r.Context(), asked, reset)
	if err != nil {
		return err
	}
	return writeJSON(w, statusOf(answer.Error), answer)
}

// ban bans a key and answers with the ban that it has then.
func (s server) ban(w http.ResponseWriter, r *http.Request) error {
	body, err := readBody(w, r, wantBan)
	if err != nil {
		return err
	}
	asked, d, err := ParseBan(body)
	if err != nil {
		return err
	}
	return writeBan(w, func() (Ban, error) { return s.current().Ban(r.Context(), asked, d) })
}

// unban ends a ban and answers with what it was.
func (s server) unban(w http.ResponseWriter, r *http.Request) error {
	asked, err := readAsked(w, r)
	if err != nil {
		return err
	}
	if asked.Limit == "" {
		return errNoBanLimit
	}
	return writeBan(w, func() (Ban, error) { return s.current().Unban(r.Context(), asked) })
}

// writeBan writes the answer of ban and unban.
func writeBan(w http.ResponseWriter, do func() (Ban, error)) error {
	answer, err := do()
	if err != nil {
		return err
	}
	return writeJSON(w, statusOf(answer.Error), answer)
}

// bans answers with the bans that there are.
func (s server) bans(w http.ResponseWriter, r *http.Request) error {
	values, err := url.ParseQuery(r.URL.RawQuery)
	limit := values["limit"]
	if unknown := len(values) > 1 || len(values) == 1 && limit == nil; err != nil || unknown || len(limit) > 1 {
		return BadRequest("query: want at most a limit, such as ?limit=login")
	}
	answer, err := s.current().Bans(r.Context(), values.Get("limit"))
	if err != nil {
		return err
	}
	return writeJSON(w, statusOf(answer.Error), answer)
}

// top answers with the keys that send the most requests, once or in a stream.
func (s server) top(w http.ResponseWriter, r *http.Request) error {
	q, err := parseTopQuery(r.URL.RawQuery)
	if err != nil {
		return err
	}
	list, err := s.current().Top(q.limit)
	if err != nil {
		return err
	}
	if q.watch == 0 {
		return writeJSON(w, http.StatusOK, list(q.by, q.n))
	}
	return stream(w, r, list, q)
}

// statusOf returns the status of an answer, given why Redis did not answer.
func statusOf(unavailable string) int {
	if unavailable != "" {
		return http.StatusServiceUnavailable
	}
	return http.StatusOK
}

// allow returns a handler for requests of one method, or also HEAD if it is GET.
func allow(method string, serve caddy.AdminHandlerFunc) caddy.AdminHandler {
	allowed := method
	if method == http.MethodGet {
		allowed += ", " + http.MethodHead
	}
	return caddy.AdminHandlerFunc(func(w http.ResponseWriter, r *http.Request) error {
		if !slices.Contains(strings.Split(allowed, ", "), r.Method) {
			w.Header().Set("Allow", allowed)
			return Error(http.StatusMethodNotAllowed, "method: got %q, want %s", r.Method, method)
		}
		return serve(w, r)
	})
}

// writeJSON writes the answer to a request.
func writeJSON(w http.ResponseWriter, status int, answer any) error {
	text, err := json.Marshal(answer)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_, _ = w.Write(append(text, '\n')) // nobody is left to tell of an error
	return nil
}

// Error returns an error of the admin API. Caddy logs it, so it must not show
// what may be a key.
func Error(status int, format string, args ...any) error {
	return caddy.APIError{HTTPStatus: status, Err: fmt.Errorf(format, args...)}
}

// BadRequest returns the error of a request that has to be written differently.
func BadRequest(format string, args ...any) error {
	return Error(http.StatusBadRequest, format, args...)
}

// topQuery is what top is asked for.
type topQuery struct {
	limit string
	n     int
	by    toplist.By
	watch time.Duration // 0 for a single answer
}

// WatchTime is how long the stream of top lasts, at most: reading from it again is cheap, and
// Caddy waits ten seconds for admin requests when it loads a config.
const WatchTime = 8 * time.Second

// parseTopQuery parses the query of top.
func parseTopQuery(raw string) (topQuery, error) {
	q := topQuery{n: 20}
	values, err := url.ParseQuery(raw)
	if err != nil {
		return q, BadRequest("query: got one that is malformed, want limit, n, by and watch")
	}
	for _, name := range slices.Sorted(maps.Keys(values)) {
		text := values[name][0]
		if len(values[name]) > 1 && slices.Contains([]string{"limit", "n", "by", "watch"}, name) {
			return q, BadRequest("%s: got it %d times, want it once", name, len(values[name]))
		}
		switch name {
		case "limit":
			q.limit = text
		case "n":
			n, err := strconv.ParseUint(text, 10, 31)
			if err != nil || n < 1 || n > MaxTop {
				return q, BadRequest("n: want a whole number from 1 to %d", MaxTop)
			}
			q.n = int(n)
		case "by":
			switch text {
			case "requests":
			case "denied":
				q.by = toplist.ByDenied
			default:
				return q, BadRequest("by: want requests or denied")
			}
		case "watch":
			if q.watch, err = time.ParseDuration(text); err != nil || q.watch < 100*time.Millisecond || q.watch > WatchTime {
				return q, BadRequest("watch: want a duration from 100ms to %v, such as 1s", WatchTime)
			}
		default:
			return q, BadRequest("query: got an unknown parameter, want limit, n, by or watch")
		}
	}
	return q, nil
}

// stream writes an answer for each interval, in a line of its own, until the
// client leaves, another config is loaded, or WatchTime is over.
func stream(w http.ResponseWriter, r *http.Request, list func(toplist.By, int) Top, q topQuery) error {
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.Header().Set("Cache-Control", "no-store")
	ticker := time.NewTicker(q.watch)
	defer ticker.Stop()
	end := time.NewTimer(WatchTime)
	defer end.Stop()
	// Not the context of the API's instance: that one may be of a config that was
	// rejected.
	reloaded := caddy.ActiveContext().Done()
	lines, flush := json.NewEncoder(w), http.NewResponseController(w)
	_ = flush.SetWriteDeadline(time.Now().Add(WatchTime + time.Second)) // for clients that do not read
	for {
		if err := cmp.Or(lines.Encode(list(q.by, q.n)), flush.Flush()); err != nil {
			return nil //nolint:nilerr // the client has left
		}
		select {
		case <-ticker.C:
		case <-end.C:
			return nil
		case <-reloaded:
			return nil
		case <-r.Context().Done():
			return nil
		}
	}
}
