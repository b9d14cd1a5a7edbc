package behaviour

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// newGRPC starts an upstream that answers as gRPC services do, over HTTP/2 without TLS: with a
// message and then the status in a trailer, which is not announced, or with the status alone
// in the header if there is no message. Both are in the query.
func newGRPC(t testing.TB) string {
	t.Helper()
	upstream := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		status, message := r.URL.Query().Get("grpc"), r.URL.Query().Get("message")
		w.Header().Set("Content-Type", "application/grpc+proto")
		if message == "" {
			w.Header().Set("Grpc-Status", status)
			return
		}
		fmt.Fprint(w, message)
		_ = http.NewResponseController(w).Flush()
		switch message {
		case "stream":
			<-r.Context().Done()
		case "broken":
			panic(http.ErrAbortHandler)
		}
		w.Header().Set(http.TrailerPrefix+"Grpc-Status", status)
	}))
	upstream.Config.Protocols = new(http.Protocols)
	upstream.Config.Protocols.SetUnencryptedHTTP2(true)
	upstream.Start()
	t.Cleanup(upstream.Close)
	return "h2c://" + upstream.Listener.Addr().String()
}

// TestCountByTrailer guards that count sees fields of trailers, announced or of gRPC, and of a
// header without a body. A response counts that breaks off before its trailer, since nobody
// knows what that would have said. Where there is no trailer, it is decided as before, by the
// header: nothing is held while a body is sent.
func TestCountByTrailer(t *testing.T) {
	t.Parallel()
	gate := make(chan struct{})
	announcing := sitetest.NewUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/announced", "/unset":
			w.Header().Set("Trailer", "X-Other, grpc-status")
		case "/other":
			w.Header().Set("Trailer", "X-Other")
		}
		fmt.Fprint(w, "body")
		_ = http.NewResponseController(w).Flush()
		if r.URL.Path == "/plain" || r.URL.Path == "/other" {
			<-gate
		}
		if r.URL.Path == "/announced" {
			w.Header().Set("Grpc-Status", r.URL.Query().Get("grpc"))
		}
	})
	count := "rate_limit {\nlimit %s {\nkey all\nsize 100\ndrip_rate 1h\ncount {\nheader Grpc-Status 8\nheader Grpc-Status 16\n%s\n}\n%s\n}\n}\n"
	s := sitetest.StartConfig(t, sitetest.Config{
		Global: "servers {\nprotocols h1 h2c\n}",
		Site: fmt.Sprintf(count, "held", "", "") + fmt.Sprintf(count, "off", "", "hold off") + fmt.Sprintf(count, "status", "status 5xx", "") +
			fmt.Sprintf(count, "cost", "", "cost 3\nactual_cost bytes") +
			"handle_path /grpc* {\nreverse_proxy " + newGRPC(t) + "\n}\nreverse_proxy " + announcing,
	})
	s.UseHTTP2()
	levels := func() (n [4]int) {
		for i, name := range []string{"held", "off", "status", "cost"} {
			sitetest.Eventually(t, "nothing is held", func() bool { return level(t, s, name).Held == 0 })
			n[i] = int(level(t, s, name).Units)
		}
		return n
	}
	last := levels()
	for _, tc := range []struct {
		path  string
		leave bool // whether the client leaves when the body has begun
		want  [4]int
	}{
		{path: "/grpc?grpc=8&message=m", want: [4]int{1, 1, 0, 1}},
		{path: "/grpc?grpc=16&message=four", want: [4]int{1, 1, 0, 4}},
		{path: "/grpc?grpc=0&message=m"},
		{path: "/grpc?grpc=80&message=m"},
		{path: "/grpc?grpc=8", want: [4]int{1, 1, 0, 0}},
		{path: "/grpc?grpc=0"},
		{path: "/grpc?grpc=0&message=stream", leave: true, want: [4]int{1, 1, 0, 3}},
		{path: "/grpc?grpc=0&message=broken", want: [4]int{1, 1, 0, 3}},
		{path: "/announced?grpc=16", want: [4]int{1, 1, 0, 4}},
		{path: "/announced?grpc=1"},
		{path: "/unset"},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.URL(tc.path), nil)
		if err != nil {
			t.Fatal(err)
		}
		res, err := s.Client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		if tc.leave {
			cancel()
		}
		_, _ = io.ReadAll(res.Body)
		res.Body.Close()
		cancel()
		now := levels()
		var got [4]int
		for i := range got {
			got[i] = now[i] - last[i]
		}
		if got != tc.want {
			t.Errorf("%s: charged %d, want %d", tc.path, got, tc.want)
		}
		last = now
	}
	for _, path := range []string{"/plain", "/other"} {
		res, err := s.Client.Get(s.URL(path))
		if err != nil {
			t.Fatal(err)
		}
		if got := levels(); got != last {
			t.Errorf("%s, while its body is sent: %d are charged or held, want %d", path, got, last)
		}
		gate <- struct{}{}
		_, _ = io.ReadAll(res.Body)
		res.Body.Close()
	}
}
