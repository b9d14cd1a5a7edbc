package behaviour

import (
	"bufio"
	"crypto/sha256"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/quic-go/quic-go/http3"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

const (
	formType = "application/x-www-form-urlencoded"
	jsonType = "application/json"
)

// submit sends a body, and returns the status and the text of the answer.
func submit(t *testing.T, s *sitetest.Site, path, kind, body string, header ...string) (status int, text string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL(path), strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", kind)
	for _, h := range header {
		name, value, _ := strings.Cut(h, ": ")
		req.Header.Add(name, value)
	}
	a := s.Do(req)
	return a.StatusCode, a.Text
}

// TestFieldKey guards that a limit by a field has a bucket for each value, one for all that is unclear, and
// one by address without the field, and that bodies are passed on.
func TestFieldKey(t *testing.T) {
	s := sitetest.Start(t, "rate_limit {\nlimit account {\nkey {http.rate_limit.field.email}\nrate 1/h\n}\n}\nrespond \"{http.request.body}\"")
	for _, c := range []struct {
		name, kind, body string
		want             int
	}{
		{"alice", formType, "email=alice%40example.com", 200},
		{"alice in JSON", jsonType, `{"email":"Alice@Example.com"}`, 429},
		{"alice in a part", "multipart/form-data; boundary=x", "--x\r\nContent-Disposition: form-data; name=\"email\"\r\n\r\nALICE@example.com\r\n--x--\r\n", 429},
		{"bob", formType, "email=bob", 200},
		{"unclear", formType, "email=carol&email=dave", 200},
		{"unclear in JSON", jsonType, `{"email":"erin","email":"frank"}`, 429},
		{"too long", formType, "email=long&x=" + strings.Repeat("y", 100_000), 429},
		{"carol", formType, "email=carol", 200},
		{"without", formType, "name=x", 200},
		{"without again", formType, "name=y", 429},
	} {
		status, text := submit(t, s, "/", c.kind, c.body)
		if status != c.want || status == http.StatusOK && text != c.body {
			t.Errorf("%s: got %d %.80q, want %d", c.name, status, text, c.want)
		}
	}
}

// TestUnclearIsCounted guards that requests of which a field in the key is unclear are counted, and others not, at
// limits of all kinds: those that a store decides, those that follow the load and those that pace the response.
func TestUnclearIsCounted(t *testing.T) {
	const key = "{\nkey {http.rate_limit.field.email}\n"
	s := sitetest.Start(t, "rate_limit {\nlimit rate "+key+"rate 5/h\n}\nlimit auto "+key+"concurrency auto\n}\nlimit speed "+key+"speed 1MB/s\n}\n}\nrespond ok")
	for _, body := range []string{"email=carol", "email=carol&email=dave", "email=erin&email=frank", "name=x"} {
		if status, _ := submit(t, s, "/", formType, body); status != http.StatusOK {
			t.Fatalf("%s: got %d", body, status)
		}
	}
	m := collected(t, s.Process)
	for _, limit := range []string{"rate", "auto", "speed"} {
		if got := m[`unclear_total{limit="`+limit+`"}`]; got != "2" {
			t.Errorf("%s: got %q, want two requests", limit, got)
		}
	}
}

// TestFieldsInSeveralBlocks guards that a block sees the fields behind one without any and behind one that has read
// them, that read_body is the length of its block, and that later handlers see them.
func TestFieldsInSeveralBlocks(t *testing.T) {
	s := sitetest.Start(t, "route {\nrate_limit all {\nkey all\nsize 100\n}\nrate_limit name {\nkey {http.rate_limit.field.name}\nsize 100\n}\n"+
		"rate_limit email {\nread_body 1MiB\nkey {http.rate_limit.field.email}\nrate 1/h\n}\nrespond \"{http.rate_limit.field.email} {http.rate_limit.field.none}\"\n}")
	for i, c := range []struct {
		body string
		want string
	}{
		{"name=a&email=Al", "200 Al "},
		{"name=b&email=al", "429"},
		{"email=long&x=" + strings.Repeat("y", 100_000), "200 long "},
		{"email=long&x=" + strings.Repeat("y", 100_000), "429"},
		{"email=long&x=" + strings.Repeat("y", 1<<20), "200  "},
	} {
		status, text := submit(t, s, "/", formType, c.body)
		if got := fmt.Sprint(status, " ", text); got != c.want && (status != 429 || c.want != "429") {
			t.Errorf("%d: got %q, want %q", i, got, c.want)
		}
	}
}

// passedOn is what an upstream gets of a request.
type passedOn struct {
	Method, Query   string
	Length          int64
	Encoding, Names []string // of transfer, and of the header without what differs with each request
	Body, Trailer   string
}

// echo is an upstream that answers what it gets.
func echo(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	got := passedOn{
		Method: r.Method, Query: r.URL.RawQuery, Length: r.ContentLength, Encoding: r.TransferEncoding,
		Names: slices.Sorted(maps.Keys(r.Header)), Body: fmt.Sprintf("%x", sha256.Sum256(body)), Trailer: fmt.Sprint(r.Trailer, err),
	}
	_ = json.NewEncoder(w).Encode(got)
}

// bodyOf returns a form of a length.
func bodyOf(length int) string {
	return ("email=" + strings.Repeat("0123456789abcdef", length/16+1))[:length]
}

// TestBodiesArePassedOn guards that an upstream gets the same bytes, lengths and trailers of a request whether a
// limit has read its body or not, over all versions of HTTP and behind the handlers of Caddy that read bodies too.
func TestBodiesArePassedOn(t *testing.T) {
	const limit = "rate_limit {\nlimit a {\nkey {http.rate_limit.field.email}\nsize 100000\n}\n}\n"
	upstream := sitetest.NewUpstream(t, echo)
	flaky := sitetest.NewUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		if conn, _, err := http.NewResponseController(w).Hijack(); err == nil {
			_ = conn.Close() // before anything is read
		}
	})
	sites := map[string]string{
		"/plain":   "reverse_proxy " + upstream,
		"/buffers": "reverse_proxy " + upstream + " {\nrequest_buffers 4MiB\n}",
		"/retries": "reverse_proxy " + flaky + " " + upstream + " {\nlb_policy round_robin\nlb_retries 5\nlb_retry_match {\nmethod POST\n}\nrequest_buffers 4MiB\n}",
		"/max":     "request_body {\nmax_size 4MiB\n}\nreverse_proxy " + upstream,
		"/auth":    "forward_auth " + sitetest.NewUpstream(t, func(http.ResponseWriter, *http.Request) {}) + " {\nuri /\n}\nreverse_proxy " + upstream,
	}
	var site strings.Builder
	for path, handlers := range sites {
		fmt.Fprintf(&site, "handle %s {\n%s%s\n}\nhandle /without%s {\n%s\n}\n", path, limit, handlers, path, handlers)
	}
	eachClient(t, site.String(), func(t *testing.T, client *http.Client, base string) {
		for path := range sites {
			for _, size := range []int{0, 1, 200, 4096, 4097, 64 << 10, 64<<10 + 1, 1 << 20} {
				for _, how := range []string{"length", "no length", "trailer", "expect", "slow"} {
					if size > 64<<10 && how == "slow" || size == 0 && how != "length" {
						continue
					}
					name := fmt.Sprint(path, " ", size, " ", how)
					got, want := ask(t, client, base+path, size, how), ask(t, client, base+"/without"+path, size, how)
					if !reflect.DeepEqual(got, want) {
						t.Errorf("%s: got %+v, want %+v", name, got, want)
					}
				}
			}
		}
	})
}

// ask sends a form of a size in some way, and returns what the upstream got.
func ask(t *testing.T, client *http.Client, url string, size int, how string) (got passedOn) {
	t.Helper()
	var body io.Reader = strings.NewReader(bodyOf(size))
	if how == "slow" {
		body = iotest.OneByteReader(io.LimitReader(body, 300))
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"?q=%zz&email=a", body)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", formType)
	switch how {
	case "no length", "slow":
		req.ContentLength = -1
	case "trailer":
		req.ContentLength, req.Trailer = -1, http.Header{"X-Sum": {"abc"}}
	case "expect":
		req.Header.Set("Expect", "100-continue")
	}
	res, err := client.Do(req)
	if err != nil {
		t.Fatal(url, size, how, err)
	}
	defer res.Body.Close()
	if err := json.NewDecoder(res.Body).Decode(&got); err != nil {
		t.Fatal(url, size, how, res.StatusCode, err)
	}
	return got
}

// eachClient calls do with a client of each version of HTTP, each of a Caddy of its own.
func eachClient(t *testing.T, site string, do func(t *testing.T, client *http.Client, base string)) {
	for _, protocol := range []string{"HTTP/1.1", "HTTP/2", "HTTP/3"} {
		t.Run(protocol, func(t *testing.T) {
			if protocol == "HTTP/3" {
				sitetest.OverHTTP3(t)
			}
			s, addr, roots := startAllVersions(t, site)
			switch protocol {
			case "HTTP/3":
				h3 := &http3.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}}
				defer h3.Close()
				do(t, &http.Client{Transport: h3, Timeout: sitetest.Patience}, "https://"+addr)
			case "HTTP/2":
				s.UseHTTP2()
				fallthrough
			default:
				do(t, s.Client, "http://"+s.Addr)
			}
		})
	}
}

// TestBodiesThatDoNotCome guards what becomes of a request whose body breaks off, stalls or is refused: it gets what it
// would get without the limit, or one clear status, it is charged nothing, and nothing is logged as an error.
func TestBodiesThatDoNotCome(t *testing.T) {
	s := sitetest.StartConfig(t, sitetest.Config{
		Global: "servers {\ntimeouts {\nread_body 300ms\n}\n}",
		Site: "request_body /small {\nmax_size 20\n}\nroute {\nrate_limit {\nlimit a {\nkey {http.rate_limit.field.email}\nrate 1/h\n}\n}\n" +
			"request_body {\nmax_size 1MB\n}\nrespond \"{http.request.body}\"\n}",
	})
	const head = "POST /%s HTTP/1.1\r\nHost: %s\r\nContent-Type: " + formType + "\r\n"
	for _, c := range []struct {
		name, path, framing, body string
		leaves                    bool // whether the client closes its side
		want                      string
	}{
		{"breaks off", "", "Content-Length: 100", "email=a&x=", true, "400"},
		{"breaks off between chunks", "", "Transfer-Encoding: chunked", "7\r\nemail=a\r\n", true, "400"},
		{"is no chunk", "", "Transfer-Encoding: chunked", "7\r\nemail=a\r\nzz\r\n", false, "400"},
		{"stalls", "", "Content-Length: 100", "email=a", false, "408"},
		{"stalls between chunks", "", "Transfer-Encoding: chunked", "7\r\nemail=a\r\n", false, "408"},
		{"is too long for another handler", "small", "Transfer-Encoding: chunked", "1e\r\nemail=a&x=01234567890123456789\r\n0\r\n\r\n", false, "413"},
	} {
		conn := sitetest.Dial(t, s.Addr)
		fmt.Fprintf(conn, head+"%s\r\n\r\n%s", c.path, s.Addr, c.framing, c.body)
		if c.leaves {
			_ = conn.(*net.TCPConn).CloseWrite()
		}
		res, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
		} else if got := fmt.Sprint(res.StatusCode); got != c.want {
			t.Errorf("%s: got %s, want %s", c.name, got, c.want)
		}
		_ = conn.Close()
		s.Requests.Add(1)
	}
	for _, want := range []int{200, 429} {
		if got, _ := submit(t, s, "/", formType, "email=a"); got != want {
			t.Errorf("then: got %d, want %d", got, want)
		}
	}
	for _, e := range s.Log("error", sitetest.OwnLogger) {
		t.Errorf("logged %v", e)
	}
}

// TestConnectionsAreKept guards that a connection of HTTP/1 is kept by a denial if all of the body was read, however it
// came, and that the next request on it is a request.
func TestConnectionsAreKept(t *testing.T) {
	s := sitetest.Start(t, "rate_limit {\nlimit a {\nkey {http.rate_limit.field.email}\nrate 1/h\n}\n}\nrespond ok")
	conn := sitetest.Dial(t, s.Addr)
	read := bufio.NewReader(conn)
	for i, framing := range []string{"Content-Length: 7\r\n\r\nemail=a", "Content-Length: 7\r\n\r\nemail=a", "Transfer-Encoding: chunked\r\n\r\n7\r\nemail=a\r\n0\r\n\r\n", "Content-Length: 7\r\n\r\nemail=b"} {
		fmt.Fprintf(conn, "POST / HTTP/1.1\r\nHost: %s\r\nContent-Type: %s\r\n%s", s.Addr, formType, framing)
		res, err := http.ReadResponse(read, nil)
		if err != nil {
			t.Fatal(i, err)
		}
		_, _ = io.Copy(io.Discard, res.Body)
		if want := []int{200, 429, 429, 200}[i]; res.StatusCode != want || res.Close {
			t.Errorf("request %d: got %d, closed %t, want %d", i, res.StatusCode, res.Close, want)
		}
		s.Requests.Add(1)
	}
}
