package behaviour

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"math/rand/v2"
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

	"github.com/andybalholm/brotli"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zlib"
	"github.com/klauspost/compress/zstd"
	"github.com/quic-go/quic-go/http3"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/filetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/racetest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// apiBodies are the bodies of APIs with which the scanner is tested too. Their names end with
// what they cost.
const apiBodies = "internal/rule/usage/testdata/"

// encoder is what compresses a body.
type encoder interface {
	io.WriteCloser
	Flush() error
}

// newEncoder returns an encoder that writes to w, or nil for none.
func newEncoder(encoding string, w io.Writer) encoder {
	switch encoding {
	case "gzip":
		return gzip.NewWriter(w)
	case "deflate":
		return zlib.NewWriter(w)
	case "br":
		return brotli.NewWriterLevel(w, 4)
	case "zstd":
		z, _ := zstd.NewWriter(w, zstd.WithEncoderConcurrency(1))
		return z
	}
	return nil
}

// decodedBody returns a reader of what a response has, whatever its encoding.
func decodedBody(t *testing.T, res *http.Response) io.Reader {
	t.Helper()
	var err error
	r := io.Reader(res.Body)
	switch res.Header.Get("Content-Encoding") {
	case "gzip":
		r, err = gzip.NewReader(res.Body)
	case "deflate":
		r, err = zlib.NewReader(res.Body)
	case "br":
		r = brotli.NewReader(res.Body)
	case "zstd":
		r, err = zstd.NewReader(res.Body, zstd.WithDecoderConcurrency(1))
	}
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// newModels returns an upstream that answers as APIs of language models do: with the file that
// the path ends with, in pieces of ?size, compressed by ?encoding.
func newModels(t *testing.T) string {
	return sitetest.NewUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		body, err := os.ReadFile(apiBodies + filepath.Base(r.URL.Path))
		if err != nil {
			t.Error(err)
		}
		kind := "application/json"
		if strings.HasSuffix(r.URL.Path, ".txt") {
			kind = []string{"text/event-stream", "text/plain; charset=utf-8"}[rand.IntN(2)] // some servers do
		}
		w.Header().Set("Content-Type", kind)
		out, flush := io.Writer(w), http.NewResponseController(w).Flush
		if z := newEncoder(r.URL.Query().Get("encoding"), w); z != nil {
			w.Header().Set("Content-Encoding", r.URL.Query().Get("encoding"))
			defer z.Close()
			out, flush = z, func() error { _ = z.Flush(); return http.NewResponseController(w).Flush() }
		}
		size, _ := strconv.Atoi(r.URL.Query().Get("size"))
		for size = max(size, len(body)/300, 1); len(body) > 0; body = body[min(size, len(body)):] {
			_, _ = out.Write(body[:min(size, len(body))])
			_ = flush()
		}
	})
}

// tokenLimit returns a limit with an actual cost.
func tokenLimit(name, cost string) string {
	return "rate_limit " + name + " {\nlog\nkey {path}\nsize 1000000\ndrip_rate 5m\ncost 50\nactual_cost " + cost + "\n}\n"
}

// TestTokensOfAPIs guards that requests are charged what the bodies of all APIs say, over each
// version of HTTP, however they are cut into pieces and compressed by the upstream or by Caddy
// before or behind the limit, and that clients get them unchanged.
func TestTokensOfAPIs(t *testing.T) {
	upstream := newModels(t)
	addr := redistest.FreeAddr(t)
	authority := redistest.NewAuthority(t)
	cert, key := authority.Issue(t, "localhost")
	limit := tokenLimit("tokens", "tokens")
	s := sitetest.StartConfig(t, sitetest.Config{
		Global: "servers {\nprotocols h1 h2 h3\n}\nauto_https disable_redirects",
		Site:   "respond ok",
		Sites: "https://" + addr + " {\ntls " + cert + " " + key + "\nroute /inside/* {\n" + limit + "encode {\nzstd\ngzip\nminimum_length 1\n}\nreverse_proxy " + upstream + "\n}\n" +
			"route /outside/* {\nencode {\nzstd\ngzip\nminimum_length 1\n}\n" + limit + "reverse_proxy " + upstream + "\n}\n" +
			"route {\n" + limit + "reverse_proxy " + upstream + "\n}\n}",
	})
	trusting := &tls.Config{RootCAs: authority.Pool()}
	h1 := &http.Transport{TLSClientConfig: trusting.Clone(), Protocols: new(http.Protocols), DisableCompression: true}
	h1.Protocols.SetHTTP1(true)
	h2 := &http.Transport{TLSClientConfig: trusting.Clone(), Protocols: new(http.Protocols), DisableCompression: true}
	h2.Protocols.SetHTTP2(true)
	h3 := &http3.Transport{TLSClientConfig: trusting.Clone(), DisableCompression: true}
	t.Cleanup(func() { h3.Close() })
	files, _ := filepath.Glob(apiBodies + "*")
	if len(files) < 20 {
		t.Fatalf("there are %d bodies", len(files))
	}
	for i, transport := range []http.RoundTripper{h1, h2, h3} {
		t.Run(fmt.Sprint("HTTP/", i+1), func(t *testing.T) {
			if transport == http.RoundTripper(h3) {
				sitetest.OverHTTP3(t)
			}
			client := &http.Client{Transport: transport, Timeout: sitetest.Patience}
			defer client.CloseIdleConnections()
			for n, file := range files {
				body := filetest.Read(t, file)
				name := strings.TrimSuffix(filepath.Base(file), filepath.Ext(file))
				want, _ := strconv.ParseInt(name[strings.LastIndexByte(name, '-')+1:], 10, 64)
				for j, where := range []string{"/inside", "/outside", ""} {
					encoding := []string{"", "gzip", "deflate", "br", "zstd"}[(n+i+j)%5]
					path := fmt.Sprintf("%s/%d/%s", where, i, filepath.Base(file))
					query := fmt.Sprintf("?size=%d&encoding=%s", 1+rand.IntN(4096), encoding)
					req, _ := http.NewRequestWithContext(t.Context(), "POST", "https://"+addr+path+query, strings.NewReader("{}"))
					req.Header.Set("Accept-Encoding", []string{"zstd", "gzip"}[n%2])
					res, err := client.Do(req)
					if err != nil {
						t.Fatal(err)
					}
					got, err := io.ReadAll(decodedBody(t, res))
					_, _ = io.Copy(io.Discard, res.Body) // a decoder does not wait for the end, and a client that closes leaves
					res.Body.Close()
					if err != nil || !bytes.Equal(got, body) {
						t.Errorf("%s%s: got %d bytes of %d, %v", path, query, len(got), len(body), err)
					}
					sitetest.Eventually(t, "nothing is held", func() bool { return levelOf(t, s, "tokens", path).Held == 0 })
					if got := levelOf(t, s, "tokens", path).Units; got != want {
						t.Errorf("%s%s, %s: charged %d, want %d", path, query, res.Header.Get("Content-Encoding"), got, want)
					}
				}
			}
		})
	}
}

// TestTokensAreNotBuffered guards that each event reaches the client when it reaches Caddy, also
// compressed: the upstream sends the next only once the client has the last one.
func TestTokensAreNotBuffered(t *testing.T) {
	t.Parallel()
	next := make(chan struct{})
	upstream := sitetest.NewUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		encoding := r.Header.Get("X-Encoding")
		out, flush := io.Writer(w), http.NewResponseController(w).Flush
		if z := newEncoder(encoding, w); z != nil {
			w.Header().Set("Content-Encoding", encoding)
			defer z.Close()
			out, flush = z, func() error { _ = z.Flush(); return http.NewResponseController(w).Flush() }
		}
		for i := range 20 {
			fmt.Fprintf(out, "data: {\"usage\":{\"total_tokens\":%d}}\n\n", i)
			_ = flush()
			select {
			case <-next:
			case <-r.Context().Done():
				return
			}
		}
	})
	limit := tokenLimit("tokens", "tokens")
	s := sitetest.Start(t, "route /inside* {\n"+limit+"encode zstd gzip\nreverse_proxy "+upstream+"\n}\n"+
		"route /outside* {\nencode zstd gzip\n"+limit+"reverse_proxy "+upstream+"\n}\nroute {\n"+limit+"reverse_proxy "+upstream+"\n}")
	for _, path := range []string{"/inside", "/outside", "/"} {
		for _, encoding := range []string{"", "gzip", "zstd", "br"} {
			req, _ := http.NewRequestWithContext(t.Context(), "GET", s.URL(path+encoding), nil)
			req.Header.Set("X-Encoding", encoding)
			req.Header.Set("Accept-Encoding", "gzip")
			client := http.Client{Timeout: sitetest.Patience, Transport: &http.Transport{DisableCompression: true}}
			res, err := client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			events := bufio.NewReader(decodedBody(t, res))
			for i := range 20 {
				line, err := events.ReadString('\n')
				if want := fmt.Sprintf("data: {\"usage\":{\"total_tokens\":%d}}\n", i); err != nil || line != want {
					t.Fatalf("%s, %q: got %q, %v, want %q", path, encoding, line, err, want)
				}
				_, _ = events.ReadString('\n')
				next <- struct{}{}
			}
			_, _ = io.Copy(io.Discard, events)
			res.Body.Close()
			sitetest.Eventually(t, "it is charged", func() bool { l := levelOf(t, s, "tokens", path+encoding); return l.Held == 0 && l.Units == 19 })
		}
	}
}

// TestTokensInParallel guards that of any number of parallel clients no more are passed on than
// there is room for, if all cost what was estimated, on any number of instances.
func TestTokensInParallel(t *testing.T) {
	var running, most, passed atomic.Int64
	upstream := sitetest.NewUpstream(t, func(w http.ResponseWriter, _ *http.Request) {
		n := running.Add(1)
		for last := most.Load(); n > last && !most.CompareAndSwap(last, n); last = most.Load() {
		}
		passed.Add(1)
		time.Sleep(20 * time.Millisecond)
		running.Add(-1)
		fmt.Fprint(w, `{"usage":{"total_tokens":100}}`)
	})
	eachNode(t, "rate_limit tokens {\nkey all\nsize 1000\ndrip_rate 1h\ncost 100\nactual_cost tokens\n}\nreverse_proxy "+upstream, func(t *testing.T, urls []string) {
		passed.Store(0)
		most.Store(0)
		redistest.Together(t, 50, func(i int) {
			for range 3 {
				sitetest.Ask(t.Context(), urls[i%len(urls)])
			}
		})
		if passed.Load() != 10 || most.Load() > 10 {
			t.Errorf("%d were passed on, %d at once, want 10", passed.Load(), most.Load())
		}
	})
}

// TestTokensOfManyStreams guards that a thousand streams at a time are charged exactly, and that
// what is kept of them is little and let go: Caddy has less than 50 kB more for each than without
// a limit, though half are compressed.
func TestTokensOfManyStreams(t *testing.T) {
	const streams, group = 1000, 50
	arrived := make(chan struct{}, streams)
	var proceed atomic.Pointer[chan struct{}]
	upstream := sitetest.NewUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		out, flush := io.Writer(w), http.NewResponseController(w).Flush
		if strings.HasSuffix(r.URL.Path, "z") {
			w.Header().Set("Content-Encoding", "gzip")
			z := newEncoder("gzip", w)
			defer z.Close()
			out, flush = z, func() error { _ = z.Flush(); return http.NewResponseController(w).Flush() }
		}
		fmt.Fprint(out, "data: {\"choices\":[{\"delta\":{\"content\":\"word\"}}],\"usage\":null}\n\ndata: {\"usage\":{\"total")
		_ = flush()
		end := *proceed.Load()
		arrived <- struct{}{}
		<-end
		fmt.Fprint(out, "_tokens\":77}}\n\n")
	})
	s := sitetest.StartConfig(t, sitetest.Config{
		Global: "servers {\nprotocols h1 h2c\n}",
		Site:   "rate_limit /limited* tokens {\nkey all\nsize 1000000\ndrip_rate 5m\ncost 50\nactual_cost tokens\n}\nreverse_proxy " + upstream,
	})
	transport := &http.Transport{Protocols: new(http.Protocols), DisableCompression: true}
	transport.Protocols.SetUnencryptedHTTP2(true)
	defer transport.CloseIdleConnections()
	arrive := func() {
		select {
		case <-arrived:
		case <-time.After(sitetest.Patience):
			t.Fatal("some streams do not arrive")
		}
	}
	heap := func(path string) int64 { // while all are open
		end := make(chan struct{})
		proceed.Store(&end)
		var wg sync.WaitGroup
		defer wg.Wait()
		defer close(end)
		for i := range streams {
			if i >= group { // more at once may wait longer than Caddy gives a dial
				arrive()
			}
			wg.Go(func() {
				req, _ := http.NewRequestWithContext(t.Context(), "GET", s.URL(path+[]string{"", "z"}[i%2]), nil)
				res, err := transport.RoundTrip(req)
				if err != nil {
					t.Error(err)
					return
				}
				_, _ = io.Copy(io.Discard, res.Body)
				res.Body.Close()
			})
		}
		for range group {
			arrive()
		}
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	heap("/none") // what is made once
	goroutines := runtime.NumGoroutine()
	without := heap("/none")
	each := (heap("/limited") - without) / streams
	if t.Logf("%d bytes for each", each); each > 50_000 {
		t.Errorf("each stream takes %d bytes more than without a limit", each)
	}
	sitetest.Eventually(t, "each is charged 77", func() bool { l := level(t, s, "tokens"); return l.Units == 77*streams && l.Held == 0 })
	sitetest.Eventually(t, "no goroutine is left", func() bool { return runtime.NumGoroutine() < goroutines+streams/2 })
}

// TestTokensOfBrokenStreams guards what is charged if the client hangs up or the upstream breaks
// off after any event: the most of the cost, the number so far, and what text and request may
// have been.
func TestTokensOfBrokenStreams(t *testing.T) {
	t.Parallel()
	if racetest.Enabled {
		t.Skip("Caddy's access log reads how much of a body was read while the transport of reverse_proxy still reads it")
	}
	body := filetest.Read(t, apiBodies+"anthropic-stream-1140.txt")
	events := strings.SplitAfter(strings.TrimSuffix(string(body), "\n\n"), "\n\n")
	upstream := sitetest.NewUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		n, _ := strconv.Atoi(filepath.Base(r.URL.Path))
		w.Header().Set("Content-Type", "text/event-stream")
		out, flush := io.Writer(w), http.NewResponseController(w).Flush
		if z := newEncoder(r.Header.Get("X-Encoding"), w); z != nil {
			w.Header().Set("Content-Encoding", r.Header.Get("X-Encoding"))
			out, flush = z, func() error { _ = z.Flush(); return http.NewResponseController(w).Flush() }
		}
		_ = flush()
		for _, e := range events[:n] {
			fmt.Fprint(out, e)
			_ = flush()
		}
		if strings.HasPrefix(r.URL.Path, "/cut") {
			panic(http.ErrAbortHandler)
		}
		<-r.Context().Done()
	})
	s := sitetest.StartConfig(t, sitetest.Config{Global: "servers {\nprotocols h1 h2c\n}", Site: tokenLimit("tokens", "tokens") + "reverse_proxy " + upstream})
	h2 := &http.Transport{Protocols: new(http.Protocols), DisableCompression: true}
	h2.Protocols.SetUnencryptedHTTP2(true)
	for i, transport := range []*http.Transport{{DisableCompression: true, DisableKeepAlives: true}, h2} {
		for n := range len(events) {
			for _, request := range []int{0, 8000} {
				for _, how := range []string{"cut", "left"} {
					for _, encoding := range []string{"", "gzip", "zstd"} {
						path := fmt.Sprintf("/%s/%d/%d/%s%d", how, i, request, encoding, n)
						path = fmt.Sprintf("%s/%d", path, n)
						ctx, cancel := context.WithTimeout(t.Context(), sitetest.Patience)
						req, _ := http.NewRequestWithContext(ctx, "POST", s.URL(path), strings.NewReader(strings.Repeat("x", request)))
						req.Header.Set("X-Encoding", encoding)
						if request > 0 && n%2 == 1 {
							req.ContentLength = -1
						}
						res, err := transport.RoundTrip(req)
						if err == nil {
							sent := strings.Join(events[:n], "")
							if how == "cut" {
								_, _ = io.Copy(io.Discard, res.Body)
							} else if n > 0 {
								_, _ = io.ReadFull(decodedBody(t, res), make([]byte, len(sent)))
							}
							res.Body.Close()
						} else if how != "cut" {
							t.Fatal(err)
						}
						cancel()
						data := 0
						for _, e := range events[:n] {
							_, text, _ := strings.Cut(strings.TrimSpace(e), "data: ")
							data += len(text)
						}
						want := max(50, int64(request+data)/4)
						if n > 0 {
							want = max(want, 1126)
						}
						if n == len(events)-1 { // only message_stop is missing
							want = max(want, 1140)
						}
						sitetest.Eventually(t, "nothing is held", func() bool { return levelOf(t, s, "tokens", path).Held == 0 })
						if got := levelOf(t, s, "tokens", path).Units; got != want && (encoding == "" || got < want) {
							t.Errorf("%s: charged %d, want %d", path, got, want)
						}
					}
				}
			}
		}
	}
}

// TestTokensOfClientsThatLeave guards what is charged if a client leaves a stream which the upstream
// holds open, over each version of HTTP and however it is compressed: what the stream has said once
// it has said that it ends, and until then what was estimated.
func TestTokensOfClientsThatLeave(t *testing.T) {
	t.Parallel()
	upstream := sitetest.NewUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		body, err := os.ReadFile(apiBodies + filepath.Base(r.URL.Path))
		if err != nil {
			t.Error(err)
		}
		w.Header().Set("Content-Type", "text/event-stream")
		if strings.HasSuffix(r.URL.Path, ".ndjson") {
			w.Header().Set("Content-Type", "application/x-ndjson")
		}
		out, flush := io.Writer(w), http.NewResponseController(w).Flush
		if z := newEncoder(r.URL.Query().Get("encoding"), w); z != nil {
			w.Header().Set("Content-Encoding", r.URL.Query().Get("encoding"))
			out, flush = z, func() error { _ = z.Flush(); return http.NewResponseController(w).Flush() }
		}
		n, _ := strconv.Atoi(r.URL.Query().Get("n"))
		for sent := 0; sent < n; sent += 100 {
			_, _ = out.Write(body[sent:min(sent+100, n)])
			_ = flush()
		}
		<-r.Context().Done()
	})
	const estimate = 20_000 // more than any of them
	s := sitetest.StartConfig(t, sitetest.Config{
		Global: "servers {\nprotocols h1 h2c\n}",
		Site:   strings.Replace(tokenLimit("tokens", "tokens"), "cost 50", fmt.Sprint("cost ", estimate), 1) + "reverse_proxy " + upstream,
	})
	h2 := &http.Transport{Protocols: new(http.Protocols), DisableCompression: true}
	h2.Protocols.SetUnencryptedHTTP2(true)
	transports := []*http.Transport{{DisableCompression: true, DisableKeepAlives: true}, h2}
	files, _ := filepath.Glob(apiBodies + "*stream*")
	if len(files) < 15 {
		t.Fatalf("there are %d streams", len(files))
	}
	for _, file := range files {
		body := filetest.Read(t, file)
		name, end := filepath.Base(file), bytes.LastIndexByte(body, '}')+1
		says, _ := strconv.ParseInt(strings.TrimSuffix(name[strings.LastIndexByte(name, '-')+1:], filepath.Ext(name)), 10, 64)
		switch {
		case bytes.HasSuffix(body, []byte("[DONE]\n\n")):
			end = len(body)
		case strings.HasPrefix(name, "gemini"), strings.HasPrefix(name, "code-assist"):
			end = len(body) + 1 // they do not say it
		}
		points := []int{len(body), min(end, len(body)), end - 1, 1 + rand.IntN(end-2), 1 + rand.IntN(end-2)}
		for i, n := range points {
			for j, encoding := range []string{"", "gzip", "zstd", "br"} {
				path := fmt.Sprintf("/%d/%d/%s", i, j, name)
				req, _ := http.NewRequestWithContext(t.Context(), "GET", s.URL(fmt.Sprintf("%s?n=%d&encoding=%s", path, n, encoding)), nil)
				res, err := transports[(i+j)%2].RoundTrip(req)
				if err != nil {
					t.Fatal(err)
				}
				if _, err := io.ReadFull(decodedBody(t, res), make([]byte, n)); err != nil {
					t.Fatal(path, n, err)
				}
				res.Body.Close()
				want := int64(estimate)
				if n >= end {
					want = says
				}
				sitetest.Eventually(t, "nothing is held", func() bool { return levelOf(t, s, "tokens", path).Held == 0 })
				if got := levelOf(t, s, "tokens", path).Units; got != want {
					t.Errorf("%s, %d of %d bytes, %q: charged %d, want %d", path, n, len(body), encoding, got, want)
				}
			}
		}
	}
}

// TestTokensThatAreNotSaid guards what is charged for responses that do not say it, and that
// there is one warning with a remedy.
func TestTokensThatAreNotSaid(t *testing.T) {
	t.Parallel()
	text := strings.Repeat("x", 4000)
	upstream := sitetest.NewUpstream(t, func(w http.ResponseWriter, r *http.Request) {
		name, _ := strings.CutPrefix(r.URL.Path, "/")
		h := w.Header()
		switch name {
		case "error":
			w.WriteHeader(400)
			fmt.Fprint(w, `{"error":{"message":"`+text+`"}}`)
		case "failed":
			w.WriteHeader(500)
			fmt.Fprint(w, `{"usage":{"total_tokens":3}}`)
		case "moved":
			h.Set("Location", "/")
			w.WriteHeader(302)
		case "unmodified":
			w.WriteHeader(304)
		case "nothing":
			w.WriteHeader(204)
		case "short", "chunked":
			_, _ = io.Copy(io.Discard, r.Body)
			fmt.Fprint(w, `{"object":"list"}`)
		case "stream":
			h.Set("Content-Type", "text/event-stream")
			fmt.Fprint(w, "data: "+text+"\n\ndata: [DONE]\n\n")
		case "multipart":
			h.Set("Content-Type", "multipart/byteranges; boundary=x")
			fmt.Fprint(w, text)
		case "binary":
			h.Set("Content-Type", "application/vnd.amazon.eventstream")
			fmt.Fprint(w, text)
		case "encoded":
			h.Set("Content-Encoding", "compress")
			fmt.Fprint(w, text)
		case "lying":
			h.Set("Content-Encoding", "gzip")
			fmt.Fprint(w, text)
		case "upgrade":
			upgrade(t, w, r)
		case "head":
			fmt.Fprint(w, `{"usage":{"total_tokens":3}}`)
		case "gone":
			panic(http.ErrAbortHandler)
		}
	})
	s := sitetest.Start(t, tokenLimit("tokens", "tokens")+"reverse_proxy /unreachable "+redistest.FreeAddr(t)+"\nreverse_proxy "+upstream)
	for _, tc := range []struct {
		method, path, body string
		want               int64
	}{
		{"POST", "/error", "", 0}, {"POST", "/failed", "", 3}, {"GET", "/moved", "", 0}, {"GET", "/unmodified", "", 0}, {"POST", "/nothing", "", 0},
		{"GET", "/short", "", 50}, {"POST", "/stream", "", 1001}, {"POST", "/stream", text, 2001}, {"GET", "/multipart", "", 1000},
		{"GET", "/binary", "", 1000}, {"GET", "/encoded", "", 1000}, {"GET", "/lying", "", 1000}, {"HEAD", "/head", "", 0}, {"OPTIONS", "/short", "", 0},
		{"GET", "/unreachable", "", 0}, {"POST", "/gone", text, 50}, {"POST", "/chunked", text, 1004},
	} {
		before := levelOf(t, s, "tokens", tc.path).Units
		req, _ := http.NewRequestWithContext(t.Context(), tc.method, s.URL(tc.path), strings.NewReader(tc.body))
		if tc.path == "/chunked" {
			req.ContentLength = -1
		}
		req.Header.Set("Accept-Encoding", "br") // or the proxy would decode what it takes for gzip
		if res, err := (&http.Transport{DisableCompression: true, DisableKeepAlives: true}).RoundTrip(req); err == nil {
			_, _ = io.Copy(io.Discard, res.Body)
			res.Body.Close()
		}
		sitetest.Eventually(t, "nothing is held", func() bool { return levelOf(t, s, "tokens", tc.path).Held == 0 })
		if got := levelOf(t, s, "tokens", tc.path).Units - before; got != tc.want {
			t.Errorf("%s %s: charged %d, want %d", tc.method, tc.path, got, tc.want)
		}
	}
	conn := sitetest.Dial(t, s.Addr)
	fmt.Fprintf(conn, "GET /upgrade HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n", s.Addr)
	if res, err := http.ReadResponse(bufio.NewReader(conn), nil); err != nil || res.StatusCode != 101 {
		t.Fatalf("%v, %v", res, err)
	}
	conn.Close()
	sitetest.Eventually(t, "a websocket costs what was estimated", func() bool {
		l := levelOf(t, s, "tokens", "/upgrade")
		return l.Held == 0 && l.Units == 50
	})
	var warnings []string
	for _, e := range s.Log("warn", sitetest.OwnLogger) {
		if strings.Contains(e.Text(), "does not say what its request has cost") {
			warnings = append(warnings, fmt.Sprint(e.Text(), " ", e["why"]))
		}
	}
	if len(warnings) != 1 || !strings.Contains(warnings[0], "json and the path") {
		t.Errorf("got warnings %q", warnings)
	}
}

// TestMoneyAndTime guards limits on other numbers than tokens, beside each other: weights, and how
// long responses take; and that the access log has all that was charged.
func TestMoneyAndTime(t *testing.T) {
	upstream := sitetest.NewUpstream(t, func(w http.ResponseWriter, _ *http.Request) {
		time.Sleep(30 * time.Millisecond)
		fmt.Fprint(w, `{"usage":{"prompt_tokens":100,"completion_tokens":7,"total_tokens":107}}`)
	})
	const rest = "\nkey all\nsize 1000000\ndrip_rate 5m\n"
	s := sitetest.Start(t, "rate_limit {\nlog\nlimit tokens {"+rest+"actual_cost tokens\n}\nlimit money {"+rest+"actual_cost json usage.prompt_tokens*0.15 usage.completion_tokens*0.6\n}\n"+
		"limit time {"+rest+"actual_cost duration\n}\nlimit good {"+rest+"actual_cost json usage.completion_tokens\ncount status 2xx\n}\n}\nreverse_proxy "+upstream)
	began := time.Now()
	s.Get("/")
	units, _ := s.LastAccess()["rate_limit"].(map[string]any)["units"].(map[string]any)
	took, _ := units["time"].(float64)
	delete(units, "time")
	if got := fmt.Sprint(units); got != "map[good:7 money:20 tokens:107]" || took < 30 || took > float64(time.Since(began).Milliseconds()+1) {
		t.Errorf("the access log has %s, and %v ms", got, took)
	}
	for name, want := range map[string]int64{"tokens": 107, "money": 20, "time": int64(took), "good": 7} {
		if got := level(t, s, name); got.Units != want || got.Held != 0 {
			t.Errorf("%s has %+v, want %d", name, got, want)
		}
	}
}
