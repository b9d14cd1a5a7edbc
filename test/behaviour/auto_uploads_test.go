package behaviour

import (
	"io"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/adaptive"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// trickle is a body that begins, and goes on when it may.
type trickle struct {
	text string
	next <-chan struct{}
	read int
}

// Read implements io.Reader.
func (b *trickle) Read(p []byte) (int, error) {
	if b.read > 0 {
		<-b.next
	}
	if b.read == len(b.text) {
		return 0, io.EOF
	}
	n := copy(p[:1], b.text[b.read:])
	b.read += n
	return n, nil
}

// TestSlowUploads guards that requests whose clients send them slowly take no room meanwhile, and
// do as soon as the upstream has them, whatever carries them and however Caddy passes them on.
func TestSlowUploads(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name, proxy string
		version     int
		method      string
	}{
		{"HTTP/1.1", "", 1, http.MethodPost},
		{"HTTP/1.1, buffered by Caddy", "request_buffers 1MiB", 1, http.MethodPost},
		{"HTTP/2", "", 2, http.MethodPost},
		{"GET over HTTP/2", "", 2, http.MethodGet},
	} {
		t.Run(tc.name, func(t *testing.T) {
			const uploads = 18 // which may all come at once
			work := make(chan struct{})
			upstream := sitetest.NewUpstream(t, func(w http.ResponseWriter, r *http.Request) {
				if body, err := io.ReadAll(r.Body); err != nil || r.URL.Path == "/upload" && string(body) != "slow" {
					t.Errorf("the upstream has got %q, %v", body, err)
				}
				if r.URL.Path == "/upload" {
					<-work
				}
			})
			s := sitetest.StartConfig(t, sitetest.Config{
				Site:   "rate_limit up {\nconcurrency auto {\nmin 1\nmax 40\nlatency 1m\n}\n}\nreverse_proxy " + upstream + " {\n" + tc.proxy + "\n}",
				Global: "servers {\nprotocols h1 h2c\n}",
			})
			if tc.version == 2 {
				s.UseHTTP2()
			}
			next := make(chan struct{})
			send, answer := sync.OnceFunc(func() { close(next) }), sync.OnceFunc(func() { close(work) })
			defer answer()
			defer send()
			var open sync.WaitGroup
			for range uploads {
				open.Go(func() {
					req, _ := http.NewRequestWithContext(t.Context(), tc.method, s.URL("/upload"), &trickle{text: "slow", next: next})
					res, err := s.Client.Do(req)
					if err != nil {
						t.Error(err)
						return
					}
					res.Body.Close()
					if res.StatusCode != http.StatusOK {
						t.Errorf("an upload got %s", res.Status)
					}
				})
			}
			sitetest.Eventually(t, "all wait for their clients", func() bool {
				state := loadOf(s, "up")
				return state.Waiting == uploads && state.InProgress == 0
			})
			for range 60 {
				if got := s.Get("/"); got.StatusCode != http.StatusOK {
					t.Fatalf("got %s beside slow uploads", got)
				}
			}
			send()
			sitetest.Eventually(t, "all are in progress", func() bool {
				state := loadOf(s, "up")
				return state.Waiting == 0 && state.InProgress == uploads
			})
			answer()
			open.Wait()
			if state := loadOf(s, "up"); state.InProgress+state.Waiting+state.Overdue != 0 {
				t.Errorf("%+v at the end", state)
			}
		})
	}
}

// TestHungRequests guards that requests which hang for longer than twice latency take no room, so
// that others pass, and are shown.
func TestHungRequests(t *testing.T) {
	t.Parallel()
	upstream, arrived, release := blocking(t)
	s := sitetest.Start(t, "rate_limit up {\nconcurrency auto {\nmin 1\nmax 20\nlatency 10ms\n}\n}\nreverse_proxy "+upstream)
	var open sync.WaitGroup
	defer open.Wait()
	defer release()
	const hung = 15
	for range hung {
		open.Go(func() { s.Get("/slow") })
	}
	for range hung {
		<-arrived
	}
	sitetest.Eventually(t, "all are overdue", func() bool {
		state := loadOf(s, "up")
		return state.Overdue == hung && state.InProgress == 0 && state.Oldest > 20*time.Millisecond
	})
	for range 2 * adaptive.Initial {
		if got := s.Get("/"); got.StatusCode != http.StatusOK {
			t.Fatalf("got %s beside requests that hang", got)
		}
	}
}
