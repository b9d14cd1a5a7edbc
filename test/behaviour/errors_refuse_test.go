package behaviour

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// TestRejectionsAreNotCached guards that no shared cache may serve what one client was
// told to others, whatever the site says of its pages: where the module writes the
// response, and where an error route does that says nothing else.
func TestRejectionsAreNotCached(t *testing.T) {
	t.Parallel()
	const (
		limit  = "rate_limit {\nsize 1\ndrip_rate 1h\n}\n"
		public = `"public, max-age=600"`
	)
	for _, tc := range []struct {
		name, site string
		admitted   []string
		denied     []string
	}{
		{"no other", limit, nil, []string{"no-store"}},
		{"set before", "header Cache-Control " + public + "\n" + limit, []string{"public, max-age=600"}, []string{"no-store"}},
		{"set deferred", "header >Cache-Control " + public + "\n" + limit, []string{"public, max-age=600"}, []string{"no-store"}},
		{"set in a deferred block", "header {\nCache-Control " + public + "\n-Server\n}\n" + limit, []string{"public, max-age=600"}, []string{"no-store"}},
		{"set by default", "header ?Cache-Control " + public + "\n" + limit, []string{"public, max-age=600"}, []string{"no-store"}},
		{"added deferred", "header {\n+Cache-Control " + public + "\ndefer\n}\n" + limit, []string{"public, max-age=600"}, []string{"no-store"}},
		{"deleted deferred", "header -Cache-Control\n" + limit, nil, []string{"no-store"}},
		{"deferred around another block", "route {\nheader >Cache-Control " + public + "\nrate_limit {\nsize 9\n}\nencode\n" + limit + "respond admitted\n}",
			[]string{"public, max-age=600"}, []string{"no-store"}},
		{"error routes", "header Cache-Control " + public + "\n" + limit + "handle_errors {\nrespond slow\n}",
			[]string{"public, max-age=600"}, []string{"no-store"}},
		{"error routes that say so", limit + "handle_errors {\nheader Cache-Control private\nrespond slow\n}",
			nil, []string{"private"}},
		{"intercept that says so", "route {\nintercept {\n@denied status 429\nhandle_response @denied {\nheader Cache-Control private\nrespond slow 429\n}\n}\n" + limit + "respond admitted\n}",
			nil, []string{"private"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := sitetest.Start(t, tc.site+"\nrespond admitted")
			for i, want := range [][]string{tc.admitted, tc.denied, tc.denied} {
				a := s.Get("/")
				if got := a.Header["Cache-Control"]; !slices.Equal(got, want) {
					t.Errorf("request %d: %d with Cache-Control %q, want %q", i+1, a.StatusCode, got, want)
				}
			}
		})
	}
}

// TestRejectionsWithoutWriteTimeout guards what the documents say of a deferred header
// where Caddy has nothing beneath it: it has its way, and others do not.
func TestRejectionsWithoutWriteTimeout(t *testing.T) {
	t.Parallel()
	for set, want := range map[string]string{"header Cache-Control public": "no-store", "header >Cache-Control public": "public"} {
		s := sitetest.StartConfig(t, sitetest.Config{
			Global: "servers {\ntimeouts {\nwrite_idle -1s\n}\n}",
			Site:   set + "\nrate_limit {\nsize 1\ndrip_rate 1h\n}",
		})
		s.Get("/")
		if a := s.Get("/"); a.StatusCode != 429 || a.Header.Get("Cache-Control") != want {
			t.Errorf("%s: got %d with %q, want 429 with %q", set, a.StatusCode, a.Header["Cache-Control"], want)
		}
	}
}

// TestRejectedUploads guards that a request with a body is rejected at once, whether
// the client sends the body, is slow or waits for permission, and that the connection
// is kept where the body has come and closed where it has not.
func TestRejectedUploads(t *testing.T) {
	t.Parallel()
	const (
		soon   = 10 * time.Second // Caddy waits a minute for bodies
		limit  = "rate_limit {\nsize 1\ndrip_rate 1h\nkey everyone\n}\n"
		errors = "handle_errors {\nrespond slow\n}\n"
	)
	rejections := []struct {
		name   string
		config sitetest.Config
		field  string // of the requests
		want   int
	}{
		{"denied", sitetest.Config{Site: limit}, "", 429},
		{"denied, with error routes", sitetest.Config{Site: limit + errors}, "", 429},
		{"denied behind encode", sitetest.Config{Site: "route {\nencode\n" + limit + "}\n"}, "", 429},
		{"denied, full duplex", sitetest.Config{Global: "servers {\nenable_full_duplex\n}", Site: limit}, "", 429},
		{"denied, no timeouts", sitetest.Config{Global: "servers {\ntimeouts {\nread_body_idle -1s\nwrite_idle -1s\n}\n}", Site: limit}, "", 429},
		{"without Redis", sitetest.Config{
			Global: "rate_limit {\nredis " + redistest.FreeAddr(t) + "\non_error deny\n}", Site: limit}, "", 503},
		{"bad cost", sitetest.Config{Site: "rate_limit {\nsize 1\ncost {header.X-Cost}\n}\n"}, "X-Cost: no\r\n", 400},
	}
	uploads := []struct {
		name, fields, body string
		kept               bool
	}{
		{"no body", "", "", true},
		{"empty", "Content-Length: 0\r\n", "", true},
		{"small", "Content-Length: 5\r\n", "hello", true},
		{"expecting 100", "Content-Length: 5\r\nExpect: 100-continue\r\n", "", false},
		{"large, expecting 100", "Content-Length: 50000000\r\nExpect: 100-continue\r\n", "", false},
		{"chunked, expecting 100", "Transfer-Encoding: chunked\r\nExpect: 100-continue\r\n", "", false},
		{"large that is sent", "Content-Length: 300000\r\n", strings.Repeat("x", 300_000), false},
		{"large that stalls", "Content-Length: 50000000\r\n", "hello", false},
		{"chunked that stalls", "Transfer-Encoding: chunked\r\n", "5\r\nhello\r\n", false},
		{"small that stalls", "Content-Length: 6\r\n", "hello", false},
	}
	for _, rejection := range rejections {
		t.Run(rejection.name, func(t *testing.T) {
			s := sitetest.StartConfig(t, rejection.config)
			if rejection.want == http.StatusTooManyRequests {
				s.Get("/")
			}
			for _, upload := range uploads {
				t.Run(upload.name, func(t *testing.T) {
					t.Parallel()
					errorRoutes := strings.Contains(rejection.config.Site, errors)
					if errorRoutes && upload.name == "small that stalls" {
						t.Skip("error routes may still read it")
					}
					conn, err := net.Dial("tcp", s.Addr)
					if err != nil {
						t.Fatal(err)
					}
					defer conn.Close()
					conn.SetDeadline(time.Now().Add(soon))
					fmt.Fprintf(conn, "POST / HTTP/1.1\r\nHost: %s\r\n%s%s\r\n%s", s.Addr, rejection.field, upload.fields, upload.body)
					in := bufio.NewReader(conn)
					res, err := http.ReadResponse(in, &http.Request{Method: "POST"})
					if err != nil {
						t.Fatalf("no answer: %v", err)
					}
					io.Copy(io.Discard, res.Body)
					if res.StatusCode != rejection.want {
						t.Errorf("got %d, want %d", res.StatusCode, rejection.want)
					}
					kept := upload.kept && (!strings.Contains(rejection.config.Global, "full_duplex") || upload.body == "")
					if res.Close == kept {
						t.Errorf("announces that the connection is closed: %t, want %t", res.Close, !kept)
					}
					switch {
					case !kept && errorRoutes: // closed when Caddy gives up the body, unless the client does
						return
					case !kept:
						if rest, err := in.ReadByte(); err != io.EOF {
							t.Errorf("then got %q, %v, want the connection to be closed", rest, err)
						}
						return
					}
					fmt.Fprintf(conn, "GET / HTTP/1.1\r\nHost: %s\r\n%s\r\n", s.Addr, rejection.field)
					if next, err := http.ReadResponse(in, nil); err != nil || next.StatusCode != rejection.want {
						t.Errorf("then got %v, %v, want the connection to be kept", next, err)
					}
				})
			}
		})
	}
}

// TestUnexpectedStoreErrorIs500 guards that an error which is not the store's fault is a 500 and
// reported, whatever on_error says.
func TestUnexpectedStoreErrorIs500(t *testing.T) {
	t.Parallel()
	for _, onError := range []string{"fallback", "allow", "deny"} {
		t.Run(onError, func(t *testing.T) {
			s := sitetest.Start(t, "rate_limit api {\nrate 5/h\non_error "+onError+"\n}\nrespond admitted")
			s.BucketAt("api").Constant.Cost = -1 // no config makes such a request
			s.Run(sitetest.Times(2, sitetest.Step{Want: "500"})...)
			if logged := s.Log("error", sitetest.OwnLogger); len(logged) != 1 {
				t.Errorf("the log says %v, want one error", logged)
			}
		})
	}
}
