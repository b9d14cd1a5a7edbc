package sitetest

import (
	"bufio"
	"bytes"
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"
)

// Entry is a line of Caddy's log.
type Entry map[string]any

// Is reports whether the entry was logged at the given level by a logger whose
// name begins so.
func (e Entry) Is(level, logger string) bool {
	name, _ := e["logger"].(string)
	return e["level"] == level && strings.HasPrefix(name, logger)
}

// Text returns the entry without Caddy's own copy of the request, which holds
// what the client sent.
func (e Entry) Text() string {
	rest := make(Entry, len(e))
	for k, v := range e {
		if k != "request" {
			rest[k] = v
		}
	}
	text, _ := json.Marshal(rest)
	return string(text)
}

// Loggers, by how their names begin.
const (
	OwnLogger   = "http.handlers.rate_limit"
	ErrorLogger = "http.log.error"
)

// Entries returns the log as of when all requests sent so far were handled.
func (s *Site) Entries() []Entry {
	s.t.Helper()
	var entries []Entry
	Eventually(s.t, "access log of all requests", func() bool {
		if app := s.Process.Newest(); app != nil && app.Logger.Sync() != nil {
			return false
		}
		entries = ReadEntries(s.t, s.LogPath)
		handled := int64(0)
		for _, e := range entries {
			if e["msg"] == "handled request" {
				handled++
			}
		}
		return handled >= s.Requests.Load()
	})
	return entries
}

// Log returns the entries of the given level and logger.
func (s *Site) Log(level, logger string) []Entry {
	s.t.Helper()
	var found []Entry
	for _, e := range s.Entries() {
		if e.Is(level, logger) {
			found = append(found, e)
		}
	}
	return found
}

// LastAccess returns what the access log says of the last request.
func (s *Site) LastAccess() Entry {
	s.t.Helper()
	for _, e := range slices.Backward(s.Entries()) {
		if e["msg"] == "handled request" {
			return e
		}
	}
	s.t.Fatal("the access log is empty")
	return nil
}

// ReadEntries reads a log file, except a line that is still being written.
func ReadEntries(t testing.TB, path string) []Entry {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	text = text[:bytes.LastIndexByte(text, '\n')+1]
	var entries []Entry
	for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
		var e Entry
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			t.Fatalf("log line %q: %v", lines.Text(), err)
		}
		entries = append(entries, e)
	}
	return entries
}
