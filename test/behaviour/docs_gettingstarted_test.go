package behaviour

import (
	"bufio"
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// TestGettingStarted guards docs/getting-started.md: each Caddyfile, as it is there, does what
// its text says.
func TestGettingStarted(t *testing.T) {
	t.Parallel()
	testRecipes(t, "docs/getting-started.md", map[string]func(recipe){
		"One site": func(r recipe) {
			s := sitetest.Start(r.t, siteOf(r, 1, "example.com"))
			r.want("a burst", s.Statuses(101, "GET", "/"), "map[200:100 429:1]")
			s.Clock.Advance(time.Second)
			r.want("a second later", s.Statuses(11, "GET", "/"), "map[200:10 429:1]")
			r.want("assets", s.Statuses(200, "GET", "/assets/a.css"), "map[200:200]")
			s.Clock.Advance(10 * time.Second)
			r.want("right passwords", s.Statuses(10, "POST", "/login"), "map[200:10]")
			r.want("wrong ones", s.Statuses(6, "POST", "/login?status=401"), "map[401:5 429:1]")
			r.want("the form", s.Statuses(10, "GET", "/login"), "map[200:10]")
			s.Clock.Advance(10*time.Minute - ms)
			r.want("nearly ten minutes later", s.Statuses(1, "POST", "/login"), "map[429:1]")
			s.Clock.Advance(ms)
			r.want("ten minutes later", s.Statuses(6, "POST", "/login?status=403"), "map[403:5 429:1]")
		},
		"Behind a proxy": func(r recipe) {
			r.sub("field", func(r recipe) { behindProxy(r, "10.0.0.10", "X-Forwarded-For") })
			r.sub("protocol", func(r recipe) { proxyProtocol(r, "127.0.0.1/32", "200") })
			r.sub("protocol of somebody else", func(r recipe) { proxyProtocol(r, "192.0.2.1/32", "429") })
		},
		"Behind Cloudflare": func(r recipe) {
			r.sub("Cloudflare", func(r recipe) { behindProxy(r, "173.245.48.0/20", "CF-Connecting-IP") })
			r.sub("from Cloudflare", func(r recipe) { besideCloudflare(r, "127.0.0.1", "map[200:20]", "200") })
			r.sub("directly", func(r recipe) { besideCloudflare(r, "192.0.2.0/24", "map[200:10 429:10]", "EOF") })
		},
		"Several sites": func(r recipe) {
			c := r.config(1, "localhost:9000", sitetest.NewUpstream(r.t, behind), "localhost:9001", sitetest.NewUpstream(r.t, behind))
			snippet, _, _ := strings.Cut(c.Site, "\n}\n\n")
			names := []string{"import limited shop 100", "import limited api 20"}
			var sites strings.Builder
			for i, name := range names {
				if !strings.Contains(c.Site, name) {
					r.t.Fatalf("there is no site with %s", name)
				}
				fmt.Fprintf(&sites, "@%d header Site %d\nhandle @%d {\n%s\nrespond ok\n}\n", i, i, i, name)
			}
			// The end of the global options, and the beginning of the snippet, whose end is theirs.
			s := sitetest.StartConfig(r.t, sitetest.Config{Global: "}\n" + snippet, Site: sites.String()})
			r.want("the shop", s.Statuses(101, "GET", "/", "Site: 0"), "map[200:100 429:1]")
			r.want("the API", s.Statuses(21, "GET", "/", "Site: 1"), "map[200:20 429:1]")
		},
		"API keys": func(r recipe) {
			s := sitetest.Start(r.t, siteOf(r, 1, "api.example.com"))
			r.want("a key", s.Statuses(101, "GET", "/", "X-Api-Key: a"), "map[200:100 429:1]")
			r.want("another key", s.Statuses(50, "GET", "/", "X-Api-Key: b"), "map[200:50]")
			r.want("no key", s.Statuses(40, "GET", "/"), "map[200:40]")
			passed := 0
			for i := range 20 {
				if s.Get("/", fmt.Sprint("X-Api-Key: invented", i)).StatusCode == 200 {
					passed++
				}
			}
			r.want("invented keys", passed, 10)
		},
		"Uploads": func(r recipe) {
			s := sitetest.Start(r.t, siteOf(r, 1, "example.com"))
			upload := func(body string) int {
				res, err := s.Client.Post(s.URL("/upload/x"), "", strings.NewReader(body))
				if err != nil {
					r.t.Fatal(err)
				}
				res.Body.Close()
				s.Requests.Add(1)
				return res.StatusCode
			}
			r.want("an upload", upload(strings.Repeat("x", 1000)), 200)
			r.want("its cost", collected(r.t, s.Process)[`units_total{limit="uploads/volume"}`], 1000)
			res, err := s.Client.Post(s.URL("/upload/x"), "", struct{ *strings.Reader }{strings.NewReader("x")})
			if err != nil {
				r.t.Fatal(err)
			}
			res.Body.Close()
			s.Requests.Add(1)
			r.want("an upload of unknown length", res.StatusCode, http.StatusLengthRequired)
		},
		"Several servers": func(recipe) {}, // see TestDocumentedCode
	})
}

// siteOf returns what is in the site with the address in the nth block of Caddyfile, in
// front of an upstream.
func siteOf(r recipe, n int, address string) string {
	r.t.Helper()
	code := r.config(n, "localhost:9000", sitetest.NewUpstream(r.t, behind)).Site
	site, found := strings.CutPrefix(code, address+" {\n")
	if !found {
		r.t.Fatalf("the site is not %s:\n%s", address, code)
	}
	return strings.TrimSuffix(site, "}\n")
}

// behindProxy checks that clients behind a proxy, whose address the block of Caddyfile has,
// have a bucket each, by the field that the proxy sets.
func behindProxy(r recipe, address, field string) {
	c := r.config(1, address, "127.0.0.1", "localhost:9000", sitetest.NewUpstream(r.t, behind))
	c.Site = strings.TrimSuffix(strings.TrimPrefix(c.Site, "example.com {\n"), "}\n")
	s := sitetest.StartConfig(r.t, c)
	for _, client := range []string{"203.0.113.7", "203.0.113.8"} {
		r.want("requests of "+client, s.Statuses(11, "GET", "/", field+": "+client), "map[200:10 429:1]")
	}
}

// proxyProtocol checks that clients behind a balancer at an address that is allowed to speak the
// PROXY protocol have a bucket each, whatever their fields say: other is what a second one gets.
func proxyProtocol(r recipe, allowed, other string) {
	c := r.config(2, "10.0.0.10/32", allowed, "localhost:9000", sitetest.NewUpstream(r.t, behind))
	c.Site = strings.TrimSuffix(strings.TrimPrefix(c.Site, "example.com {\n"), "}\n")
	s := sitetest.StartConfig(r.t, c)
	ask := func(client, header string) string {
		conn := sitetest.Dial(r.t, s.Addr)
		defer conn.Close()
		fmt.Fprintf(conn, "PROXY TCP4 %s 127.0.0.1 40000 80\r\nGET / HTTP/1.1\r\nHost: %s\r\n%s\r\n", client, s.Addr, header)
		return answerOn(s, conn)
	}
	for i := range 10 {
		r.want("a client's request", ask("203.0.113.7", fmt.Sprintf("X-Forwarded-For: 198.51.100.%d\r\n", i)), "200")
	}
	r.want("one more", ask("203.0.113.7", ""), "429")
	r.want("another client", ask("203.0.113.8", ""), other)
}

// besideCloudflare checks what happens to addresses that a client claims, if its own address
// is trusted or not, and what a site for Cloudflare alone answers to it.
func besideCloudflare(r recipe, trusted, claimed, closed string) {
	c := r.config(1, "173.245.48.0/20", trusted, "localhost:9000", sitetest.NewUpstream(r.t, behind))
	open := strings.TrimSuffix(strings.TrimPrefix(c.Site, "example.com {\n"), "}\n")
	c.Site = "handle /closed {\n" + r.config(2).Site + "respond ok\n}\n" + open
	s := sitetest.StartConfig(r.t, c)
	conn := sitetest.Dial(r.t, s.Addr)
	defer conn.Close()
	fmt.Fprintf(conn, "GET /closed HTTP/1.1\r\nHost: %s\r\nCF-Connecting-IP: 198.51.100.1\r\n\r\n", s.Addr)
	r.want("a site for Cloudflare alone", answerOn(s, conn), closed)
	s.Clock.Advance(time.Minute)
	got := make(map[int]int)
	for i := range 20 {
		got[s.Get("/", fmt.Sprint("CF-Connecting-IP: 203.0.113.", i)).StatusCode]++
	}
	r.want("addresses that a client claims", got, claimed)
}

// answerOn returns the status of the response on a connection, or why there is none.
func answerOn(s *sitetest.Site, conn net.Conn) string {
	s.Requests.Add(1)
	res, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return strings.TrimPrefix(err.Error(), "unexpected ")
	}
	res.Body.Close()
	return fmt.Sprint(res.StatusCode)
}
