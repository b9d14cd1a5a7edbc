package behaviour

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/quic-go/quic-go/http3"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// download counts what comes of a response until it ends.
type download struct {
	*http.Response
	got atomic.Int64
	end chan error // nil at the end of the body
}

// begin requests a URL, and reads the response.
func begin(ctx context.Context, t *testing.T, client *http.Client, url string) *download {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	d := &download{end: make(chan error, 1)}
	if d.Response, err = client.Do(req); err != nil {
		t.Fatal(err)
	}
	go func() { d.end <- d.read(d.Body) }()
	return d
}

// read counts what comes of r.
func (d *download) read(r io.Reader) error {
	buffer := make([]byte, 4096)
	for {
		n, err := r.Read(buffer)
		d.got.Add(int64(n))
		switch {
		case err == io.EOF:
			return nil
		case err != nil:
			return err
		}
	}
}

// settled returns what all downloads have got once nothing more comes.
func settled(downloads ...*download) (sum int64) {
	for since := time.Now(); time.Since(since) < 500*time.Millisecond; time.Sleep(10 * time.Millisecond) {
		var now int64
		for _, d := range downloads {
			now += d.got.Load()
		}
		if now != sum {
			sum, since = now, time.Now()
		}
	}
	return sum
}

// bigFile returns a folder with a file of that many bytes, as big.
func bigFile(t *testing.T, n int) (dir string) {
	t.Helper()
	dir = sitetest.TempDir(t)
	if err := os.WriteFile(filepath.Join(dir, "big"), make([]byte, n), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestSpeed guards that all responses of a key together get size and speed, whatever serves them over whatever
// protocol, that no header field tells of it, and that other keys and requests have nothing to do with that.
func TestSpeed(t *testing.T) {
	const length, size, speed = 4_000_000, 100_000, 50_000
	dir := bigFile(t, length)
	upstream := sitetest.NewUpstream(t, func(w http.ResponseWriter, _ *http.Request) {
		for range length / 1000 {
			if _, err := w.Write(make([]byte, 1000)); err != nil {
				return
			}
		}
	})
	site := fmt.Sprintf(`
		rate_limit downloads {
			match not path /free
			key {query.key}
			speed %d/s
			size %d
		}
		root %s
		respond /free free
		reverse_proxy /stream %s
		file_server
	`, speed, size, dir, upstream)
	s, addr, roots := startAllVersions(t, site)
	only := func(set func(*http.Protocols)) *http.Transport {
		transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}, DisableCompression: true, Protocols: new(http.Protocols)}
		set(transport.Protocols)
		return transport
	}
	h3 := &http3.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}}
	t.Cleanup(func() { h3.Close() })
	for i, tc := range []struct {
		name, url string
		transport http.RoundTripper
	}{
		{"HTTP1", s.URL("/big"), only(func(p *http.Protocols) { p.SetHTTP1(true) })},
		{"HTTP1, proxied", s.URL("/stream"), only(func(p *http.Protocols) { p.SetHTTP1(true) })},
		{"HTTP1, TLS", "https://" + addr + "/big", only(func(p *http.Protocols) { p.SetHTTP1(true) })},
		{"HTTP2", s.URL("/big"), only(func(p *http.Protocols) { p.SetUnencryptedHTTP2(true) })},
		{"HTTP2, TLS, proxied", "https://" + addr + "/stream", only(func(p *http.Protocols) { p.SetHTTP2(true) })},
		{"HTTP3", "https://" + addr + "/big", h3},
		{"HTTP3, proxied", "https://" + addr + "/stream", h3},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if tc.transport == h3 {
				sitetest.OverHTTP3(t)
			}
			client := &http.Client{Transport: tc.transport}
			defer client.CloseIdleConnections()
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			url := fmt.Sprint(tc.url, "?key=", i)
			var all []*download
			first := begin(ctx, t, client, url)
			all = append(all, first)
			if fields := (sitetest.Answer{Response: first.Response}).String(); fields != "200" {
				t.Errorf("got %s, want no fields", fields)
			}
			const piece = speed / 10
			want := func(what string, most int64) {
				t.Helper()
				if got := settled(all...); got > most || got < most-piece {
					t.Errorf("%s: got %d bytes, want %d, or up to a piece less", what, got, most)
				}
			}
			want("at once", size)
			var others sync.WaitGroup
			more := make([]*download, 3)
			for i := range more {
				others.Go(func() { more[i] = begin(ctx, t, client, url) }) // its header comes with its first piece
			}
			waiting := s.BucketAt("downloads").WaitingState()
			sitetest.Eventually(t, "all wait", func() bool { return waiting().Requests == 1+len(more) })
			s.Clock.Advance(time.Second)
			others.Wait()
			all = append(all, more...)
			want("after a second, together with others", size+speed)
			s.Clock.Advance(1500 * time.Millisecond)
			want("later", size+speed*5/2)
			other := begin(ctx, t, client, url+"other")
			if got := settled(other); got > size || got < size-piece {
				t.Errorf("another key got %d bytes", got)
			}
			if a := s.Get("/free"); a.Text != "free" {
				t.Errorf("got %q", a.Text)
			}
			cancel()
			for _, d := range append(all, other) {
				<-d.end
			}
			sitetest.Eventually(t, "none waits", func() bool { return waiting().Requests == 0 })
		})
	}
}

// TestSpeedOfUpgrades guards that what is sent over a websocket is paced, by HTTP/1 and 2, and what comes over it
// is not; and that a connection that is closed ends its wait.
func TestSpeedOfUpgrades(t *testing.T) {
	const size, speed = 100_000, 200_000
	ended := make(chan time.Duration, 1)
	upstream := sitetest.NewUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/read" {
			upgrade(t, w, r)
			return
		}
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n")
		start := time.Now()
		if n, _ := io.CopyN(io.Discard, rw, 5_000_000); n == 5_000_000 {
			ended <- time.Since(start)
		}
	})
	t.Setenv("GODEBUG", "http2xconnect=1")
	addr := sitetest.StartProcess(t, sitetest.Config{
		Global: "servers {\nprotocols h1 h2c\n}",
		Site:   fmt.Sprintf("rate_limit {\nkey {path}\nspeed %d/s\nsize %d\n}\nreverse_proxy %s", speed, size, upstream),
	})
	open := func(path string) (net.Conn, *bufio.Reader) {
		t.Helper()
		conn := sitetest.Dial(t, addr)
		fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n", path, addr)
		r := bufio.NewReader(conn)
		if res, err := http.ReadResponse(r, nil); err != nil || res.StatusCode != http.StatusSwitchingProtocols {
			t.Fatalf("got %v, %v", res, err)
		}
		return conn, r
	}
	in := func(name string, n int64, from func() (io.Writer, io.Reader)) {
		t.Helper()
		start := time.Now()
		w, r := from()
		go func() { _, _ = io.CopyN(w, zeros{}, n) }()
		got, err := io.CopyN(io.Discard, r, n)
		most := time.Duration(float64(n-size) / speed * float64(time.Second))
		if took := time.Since(start); err != nil || took < most || took > most*3/2 {
			t.Errorf("%s: %d bytes took %v, %v; want %v", name, got, took, err, most)
		}
	}
	in("HTTP/1", 400_000, func() (io.Writer, io.Reader) {
		conn, r := open("/echo")
		return conn, r
	})
	in("HTTP/2", 400_000, func() (io.Writer, io.Reader) {
		w, res := connect(t, addr)
		return w, res.Body
	})
	conn, _ := open("/read")
	_, _ = io.CopyN(conn, zeros{}, 5_000_000)
	if took := <-ended; took > 5*time.Second {
		t.Errorf("what a client sends took %v", took)
	}
}

// TestSpeedOfClientsThatLeave guards that a response ends its wait soon after its client has left, also while the
// server has not read all that the client has sent.
func TestSpeedOfClientsThatLeave(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("needs Linux")
	}
	t.Parallel()
	dir := bigFile(t, 1_000_000)
	s := sitetest.StartConfig(t, sitetest.Config{Site: "rate_limit downloads {\nspeed 1/s\nsize 20kB\n}\nroot " + dir + "\nfile_server"})
	waiting := s.BucketAt("downloads").WaitingState()
	for name, rest := range map[string]string{
		"nothing": "\r\n", "a request": "\r\nGET / HTTP/1.1\r\nHost: x\r\n\r\n", "a body": "Content-Length: 1000000\r\n\r\n" + strings.Repeat("x", 300_000), // the server reads 256 KiB before it sends a header
	} {
		conn := sitetest.Dial(t, s.Addr)
		fmt.Fprintf(conn, "GET /big HTTP/1.1\r\nHost: %s\r\n%s", s.Addr, rest)
		sitetest.Eventually(t, name+" is unread, and it waits", func() bool { return waiting().Requests == 1 })
		conn.Close()
		sitetest.Eventually(t, name+" is unread, and none waits", func() bool { return waiting().Requests == 0 })
	}
}

// zeros are as many as one reads.
type zeros struct{}

// Read implements io.Reader.
func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

// TestSpeedKeepsResponses guards that responses are as without a speed: their types, lengths and
// statuses, those without a body at once, and errors.
func TestSpeedKeepsResponses(t *testing.T) {
	dir := bigFile(t, 30_000)
	if err := os.WriteFile(filepath.Join(dir, "page"), []byte("<html><title>x</title>"+strings.Repeat("y", 500)), 0o600); err != nil {
		t.Fatal(err)
	}
	upstream := sitetest.NewUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/p/small" {
			for range 100 {
				io.WriteString(w, "<html>"[:3])
			}
			return
		}
		w.WriteHeader(http.StatusNoContent)
	})
	site := "root " + dir + "\nreverse_proxy /p/* " + upstream + "\nrespond /fail 503\nerror /error 418\nhandle_errors {\nrespond failed\n}\nfile_server"
	plain := sitetest.Start(t, site)
	requests := [][]string{
		{"GET", "/page"}, {"HEAD", "/big"}, {"GET", "/big", "Range: bytes=5-9"}, {"GET", "/big", "Range: bytes=5-9,20000-20009"}, {"GET", "/none"},
		{"GET", "/p/small"}, {"GET", "/p/nothing"}, {"GET", "/fail"}, {"GET", "/error"}, {"HEAD", "/page"}, {"GET", "/page", "If-None-Match: *"},
	}
	shown := func(s *sitetest.Site) (all []string) {
		for _, r := range requests {
			a := s.Send(r[0], r[1], r[2:]...)
			boundary := ""
			if _, after, ok := strings.Cut(a.Header.Get("Content-Type"), "boundary="); ok {
				boundary = after
			}
			text := fmt.Sprint(r, a.StatusCode, a.ContentLength, a.Header.Get("Content-Type"), a.TransferEncoding, len(a.Text))
			all = append(all, strings.ReplaceAll(text, boundary+"_", ""))
			if boundary != "" {
				all[len(all)-1] = strings.ReplaceAll(all[len(all)-1], boundary, "")
			}
		}
		return all
	}
	want := shown(plain)
	s := sitetest.Start(t, "rate_limit {\nspeed 100000/s\nsize 20000\n}\n"+site)
	stop := make(chan bool)
	var clock sync.WaitGroup
	clock.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(10 * time.Millisecond):
				s.Clock.Advance(10 * time.Millisecond)
			}
		}
	})
	for i, got := range shown(s) {
		if got != want[i] {
			t.Errorf("got  %s\nwant %s", got, want[i])
		}
	}
	close(stop)
	clock.Wait()
}

// TestSpeedIsNoLatency guards that neither the time for which a response waits counts as one that its
// client reads too slowly, nor as one for which the upstream takes to answer.
func TestSpeedIsNoLatency(t *testing.T) {
	const length = 200_000
	dir := bigFile(t, length)
	addr := sitetest.StartProcess(t, sitetest.Config{
		Global: "servers {\nprotocols h1 h2c\ntimeouts {\nwrite_idle 500ms 1000000\n}\n}",
		Site:   "rate_limit {\nspeed 100000/s\nsize 20000\n}\nroot " + dir + "\nfile_server",
	})
	for _, set := range []func(*http.Protocols){
		func(p *http.Protocols) { p.SetHTTP1(true) }, func(p *http.Protocols) { p.SetUnencryptedHTTP2(true) },
	} {
		transport := &http.Transport{Protocols: new(http.Protocols)}
		set(transport.Protocols)
		start := time.Now()
		d := begin(t.Context(), t, &http.Client{Transport: transport}, "http://"+addr+"/big")
		if err := <-d.end; err != nil || d.got.Load() != length || time.Since(start) < 1500*time.Millisecond {
			t.Errorf("got %d bytes in %v, %v", d.got.Load(), time.Since(start), err)
		}
	}

	s := sitetest.Start(t, "rate_limit {\nlimit upstream {\nconcurrency auto {\nlatency 1m\nmin 1\nmax 2\nuntil body\n}\n}\n"+
		"limit slow {\nspeed 10000/s\nsize 20000\n}\n}\nroot "+dir+"\nfile_server")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var all []*download
	for range 6 {
		d := begin(ctx, t, &http.Client{Transport: new(http.Transport)}, s.URL("/big"))
		if d.StatusCode != http.StatusOK {
			t.Errorf("got %d beside %d downloads that wait", d.StatusCode, len(all))
		}
		all = append(all, d)
		settled(all...)
		s.Clock.Advance(2 * time.Second) // for the next one's first piece
	}
	cancel()
	for _, d := range all {
		<-d.end
	}
}

// TestSpeedDryRun guards that a dry run has nothing wait, and counts what would have.
func TestSpeedDryRun(t *testing.T) {
	dir := bigFile(t, 1_000_000)
	s := sitetest.StartConfig(t, sitetest.Config{
		Site: "rate_limit slow {\nspeed 10000/s\nsize 20000\ndry_run\n}\nroot " + dir + "\nfile_server",
	})
	if a := s.Get("/big"); len(a.Text) != 1_000_000 {
		t.Errorf("got %d bytes", len(a.Text))
	}
	m := collected(t, s.Process)
	units, _ := strconv.Atoi(m[`units_total{limit="slow"}`])
	if got := m[`delayed_total{limit="slow"}`]; got != "1" || units > 20000 || units < 17000 {
		t.Errorf("got %s and %d, want one that would have waited and the bytes that fit", got, units)
	}
}

// TestSpeedOverReloads guards that responses which have begun keep to the numbers of a config that is loaded
// then, and to those before if it is rejected; and that the server of Redis is not asked about any of it.
func TestSpeedOverReloads(t *testing.T) {
	server := redistest.Start(t)
	dir := bigFile(t, 50_000_000)
	config := func(speed string) sitetest.Config {
		return sitetest.Config{
			Global: "rate_limit {\nredis " + server.Addr + "\n}",
			Site:   "rate_limit downloads {\nspeed " + speed + "\nsize 20kB\n}\nroot " + dir + "\nfile_server",
		}
	}
	s := sitetest.StartConfig(t, config("20kB/s"))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	d := begin(ctx, t, &http.Client{Transport: new(http.Transport)}, s.URL("/big"))
	grows := func(what string, advance time.Duration, want int64) {
		t.Helper()
		before := settled(d)
		s.Clock.Advance(advance)
		if got := settled(d) - before; got > want || got < want-10_000 {
			t.Errorf("%s: got %d bytes in %v, want %d", what, got, advance, want)
		}
	}
	grows("at first", time.Second, 20_000)
	calls := func() int64 { return server.CommandStat(t, "evalsha") + server.CommandStat(t, "eval") }
	before := calls() // the script was loaded
	if err := s.Load(config("200kB/s")); err != nil {
		t.Fatal(err)
	}
	s.Clock.Advance(time.Second) // of a bucket with other numbers, which is empty
	grows("faster", 100*time.Millisecond, 20_000)
	if err := s.Load(sitetest.Config{Routes: `[{"handle":[{"handler":"rate_limit","limits":[{"name":"downloads","speed":"nothing"}]}]}]`}); err == nil {
		t.Error("it was loaded")
	}
	grows("as before", 100*time.Millisecond, 20_000)
	if n := calls() - before; n > 0 {
		t.Errorf("Redis was asked %d times", n)
	}
}

// TestSpeedOfStalledClients guards that a client which stops reading does not take its share for as long as the
// system's buffers would: what they keep unsent is bounded once its response has waited.
func TestSpeedOfStalledClients(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("needs Linux")
	}
	t.Parallel()
	dir := bigFile(t, 50_000_000)
	s := sitetest.StartConfig(t, sitetest.Config{Site: "rate_limit downloads {\nspeed 5MB/s\nsize 100kB\n}\nroot " + dir + "\nfile_server"})
	conn := sitetest.Dial(t, s.Addr)
	fmt.Fprintf(conn, "GET /big HTTP/1.1\r\nHost: %s\r\n\r\n", s.Addr)
	charged := func() int {
		return int(s.BucketAt("downloads").Policy.Counters.Totals().Tallies[telemetry.Units])
	}
	sitetest.Eventually(t, "the first bytes are sent", func() bool { return charged() > 0 })
	for before := -1; before != charged(); { // until nothing more can be sent
		before = charged()
		for range 20 {
			s.Clock.Advance(20 * time.Millisecond)
			time.Sleep(20 * time.Millisecond) // for the piece, which waits for so long
		}
	}
	if n := charged(); n > 1_000_000 {
		t.Errorf("%d bytes were sent to a client that does not read", n)
	}
}
