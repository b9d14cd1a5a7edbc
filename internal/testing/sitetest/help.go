package sitetest

import (
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/racetest"
)

// OverHTTP3 skips a test under the race detector. Caddy v2.11.9 may start its tls app
// after its servers, and the detector, which sees that a read of TCP comes after the write,
// does not see it of UDP.
func OverHTTP3(t *testing.T) {
	t.Helper()
	if racetest.Enabled {
		t.Skip("HTTP/3: a handshake looks like a race with the start of Caddy's tls app")
	}
}

// Eventually waits until ok returns true.
func Eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(Patience); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited %v in vain: %s", Patience, what)
		}
	}
}

// TempDir returns a directory for the length of the test. The name of t.TempDir
// contains the name of the test, which Caddy may take for a placeholder.
func TempDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp(Storage, "test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// NewUpstream starts a server for Caddy to proxy to and returns its host:port.
func NewUpstream(t testing.TB, h http.HandlerFunc) string {
	upstream := httptest.NewServer(h)
	t.Cleanup(upstream.Close)
	return upstream.Listener.Addr().String()
}

// CollectSpans makes Caddy send the spans of its tracing to the test, and returns
// them as they are encoded.
func CollectSpans(t *testing.T) <-chan string {
	t.Helper()
	spans := make(chan string, 100)
	collector := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		spans <- string(body)
	}))
	t.Cleanup(collector.Close)
	t.Setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.URL)
	t.Setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
	return spans
}
