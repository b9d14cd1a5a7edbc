// Package adminapi serves the admin API of rate limits. Its requests and answers in JSON
// are in package adminjson.
package adminapi

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/admin/adminjson"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
)

// Routes returns the handlers of the API. counted has what is counted at the limits, and
// newest returns the newest config that runs, or nil if there is none with limits.
func Routes(counted *telemetry.Process, newest func() *Config) []caddy.AdminRoute {
	s := server{counted, newest}
	return []caddy.AdminRoute{
		{Pattern: adminjson.Path + "status", Handler: allow(http.MethodGet, s.status)},
		{Pattern: adminjson.Path + "limits", Handler: allow(http.MethodGet, s.limits)},
		{Pattern: adminjson.Path + "peek", Handler: allow(http.MethodPost, s.peek)},
		{Pattern: adminjson.Path + "reset", Handler: allow(http.MethodPost, s.reset)},
		{Pattern: adminjson.Path + "ban", Handler: allow(http.MethodPost, s.ban)},
		{Pattern: adminjson.Path + "unban", Handler: allow(http.MethodPost, s.unban)},
		{Pattern: adminjson.Path + "bans", Handler: allow(http.MethodGet, s.bans)},
		{Pattern: adminjson.Path + "top", Handler: allow(http.MethodGet, s.top)},
		{Pattern: adminjson.Path, Handler: caddy.AdminHandlerFunc(func(http.ResponseWriter, *http.Request) error {
			return newError(http.StatusNotFound, "unknown endpoint; use %[1]sstatus, %[1]slimits, %[1]speek, %[1]sreset, %[1]sban, %[1]sunban, %[1]sbans or %[1]stop", adminjson.Path)
		})},
	}
}

// server serves the API.
type server struct {
	counted *telemetry.Process
	newest  func() *Config
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
			return newError(http.StatusMethodNotAllowed, "method: %q is not valid; use %s", r.Method, method)
		}
		return serve(w, r)
	})
}

// writeAnswer writes the answer to a request unless there is an error. unavailable says why Redis did not answer.
func writeAnswer(w http.ResponseWriter, answer any, unavailable string, err error) error {
	if err != nil {
		return err
	}
	text, err := json.Marshal(answer)
	if err != nil {
		return err
	}
	status := http.StatusOK
	if unavailable != "" {
		status = http.StatusServiceUnavailable
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_, _ = w.Write(append(text, '\n')) // no client is left to report an error to
	return nil
}

// newError returns an error of the admin API. Caddy logs it, so it must not show
// what may be a key.
func newError(status int, format string, args ...any) error {
	return caddy.APIError{HTTPStatus: status, Err: fmt.Errorf(format, args...)}
}

// badRequest returns the error of a request that has to be written differently.
func badRequest(format string, args ...any) error {
	return newError(http.StatusBadRequest, format, args...)
}
