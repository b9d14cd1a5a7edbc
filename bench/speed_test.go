package bench

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// BenchmarkSpeed sends a file of 4 MiB, and a body of that length from an upstream, through a Caddy: with a
// limit that has no speed beside a Caddy without any (of-bare), and with a speed that never paces beside that
// (of-none). The figures are ratios of their rates.
func BenchmarkSpeed(b *testing.B) {
	const size = 4 << 20
	upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", strconv.Itoa(size))
		for piece := make([]byte, 64<<10); ; {
			if _, err := w.Write(piece); err != nil {
				return
			}
		}
	}))
	defer upstream.Close()
	addr := startCaddy(b, `route {
		rate_limit /none/* {
			rate 1000000/s
		}
		rate_limit /speed/* {
			speed 1TB/s
		}
		reverse_proxy /*/proxied `+upstream.Listener.Addr().String()+`
		root `+bigFile(b, size)+`
		rewrite * /big
		file_server
	}`)
	get := func(path string) task {
		return func() func(int) {
			buf := make([]byte, 64<<10)
			return func(int) {
				res, err := http.Get("http://" + addr + path)
				if err != nil {
					wrong(b, "%v", err)
					return
				}
				defer res.Body.Close()
				if n, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, res.Body, buf); err != nil || n != size {
					wrong(b, "%d bytes, %v", n, err)
				}
			}
		}
	}
	for _, body := range []string{"file", "proxied"} {
		for _, c := range []comparison{
			{task: get("/none/" + body), baselines: []baseline{{"bare", get("/bare/" + body)}}},
			{task: get("/speed/" + body), baselines: []baseline{{"none", get("/none/" + body)}}},
		} {
			c.callers, c.rates = 1, true
			b.Run(body+"/beside="+c.baselines[0].name, func(b *testing.B) {
				b.SetBytes(size)
				c.run(b)
			})
		}
	}
}

// bigFile returns a folder with a file of that many bytes, as big.
func bigFile(b *testing.B, size int64) (dir string) {
	b.Helper()
	dir = b.TempDir()
	name := filepath.Join(dir, "big")
	if err := os.WriteFile(name, nil, 0o600); err != nil {
		b.Fatal(err)
	}
	if err := os.Truncate(name, size); err != nil {
		b.Fatal(err)
	}
	return dir
}

// downloads are responses that a Caddy in a process of its own sends, each over a connection.
type downloads struct {
	*process
	conns []net.Conn
	rest  []*bufio.Reader // behind the headers
}

// begin requests a path for each of n clients, and reads the headers.
func (d *downloads) begin(b *testing.B, n int, path func(i int) string) {
	b.Helper()
	d.conns, d.rest = make([]net.Conn, n), make([]*bufio.Reader, n)
	var next atomic.Int64
	var all sync.WaitGroup
	for range 64 {
		all.Go(func() {
			for i := int(next.Add(1) - 1); i < n; i = int(next.Add(1) - 1) {
				conn, err := net.Dial("tcp", d.addr)
				if err != nil {
					wrong(b, "%v", err)
					return
				}
				d.conns[i], d.rest[i] = conn, bufio.NewReaderSize(conn, 512)
				fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: %s\r\n\r\n", path(i), d.addr)
				for line := "first"; len(line) > 2; {
					if line, err = d.rest[i].ReadString('\n'); err != nil {
						wrong(b, "%v", err)
						return
					}
				}
			}
		})
	}
	all.Wait()
}

// read reads all bodies until they end, and calls got for what it has read.
func (d *downloads) read(got func(n int)) (wait func()) {
	var all sync.WaitGroup
	for _, r := range d.rest {
		all.Go(func() {
			for buffer := make([]byte, 4096); ; {
				n, err := r.Read(buffer)
				if got(n); err != nil {
					return
				}
			}
		})
	}
	return all.Wait
}

// end closes all connections.
func (d *downloads) end() {
	for _, conn := range d.conns {
		if conn != nil {
			conn.Close()
		}
	}
}

// BenchmarkSpeedDownloads has 2 000 and 10 000 clients download at 20 MB/s together, of one key and of 200:
// cores is how many Caddy keeps busy, B/download the memory that it has more than without them, and x-stalled
// its ratio to that of as many downloads without a limit whose clients do not read. Small requests are sent
// beside them, and before and after: x-none is the ratio of the times within which 99 of 100 are answered.
func BenchmarkSpeedDownloads(b *testing.B) {
	for _, keys := range []int{1, 200} {
		for _, n := range []int{2000, 10_000} {
			b.Run(fmt.Sprintf("keys=%d/downloads=%d", keys, n), func(b *testing.B) {
				site := fmt.Sprintf(`route {
					respond /small ok
					rate_limit /paced {
						key {query.key}
						fair_by {query.client}
						speed %d/s
						size 100kB
					}
					root %s
					rewrite * /big
					file_server
				}`, 20_000_000/keys, bigFile(b, 10<<30))
				var cores, kept, ratio, with, without []float64
				for b.Loop() {
					stalled := grown(b, site, n)
					p := startProcess(b, plainSite(site))
					d := &downloads{process: p}
					client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 256}}
					turn := func(times *[]float64) {
						*times = append(*times, slowest(b, client, "http://"+d.addr+"/small", 1000, 2*time.Millisecond).Seconds())
					}
					turn(&without)
					before := d.memory(b)
					d.begin(b, n, func(i int) string { return fmt.Sprintf("/paced?client=%d&key=%d", i, i%keys) })
					wait := d.read(func(int) {})
					time.Sleep(2 * time.Second)
					used, start := d.cpu(b), time.Now()
					time.Sleep(5 * time.Second)
					cores = append(cores, (d.cpu(b)-used)/time.Since(start).Seconds())
					kept = append(kept, (d.memory(b)-before)/float64(n))
					ratio = append(ratio, kept[len(kept)-1]/stalled)
					turn(&with)
					turn(&with)
					d.end()
					wait()
					time.Sleep(time.Second)
					turn(&without)
					p.Stop()
				}
				b.ReportMetric(median(cores), "cores")
				b.ReportMetric(median(kept), "B/download")
				b.ReportMetric(median(ratio), "x-stalled")
				b.ReportMetric(median(with)/median(without), "x-none")
				b.ReportMetric(median(without)*1e3, "none-p99-ms")
				b.ReportMetric(0, "ns/op") // it says nothing
			})
		}
	}
}

// grown returns by how much n downloads without a limit, that stall, have the memory of a Caddy grow, each.
func grown(b *testing.B, site string, n int) float64 {
	b.Helper()
	p := startProcess(b, plainSite(site))
	defer p.Stop()
	d := &downloads{process: p}
	before := d.memory(b)
	d.begin(b, n, func(int) string { return "/free" })
	defer d.end()
	time.Sleep(2 * time.Second)
	return (d.memory(b) - before) / float64(n)
}

// BenchmarkSpeedAccuracy downloads for ten seconds by one client with some connections: of-bound is the part of
// what size and speed allow that has come then. It is an error if more has come at any time.
func BenchmarkSpeedAccuracy(b *testing.B) {
	for _, speed := range []int{100_000, 5_000_000} {
		for _, n := range []int{1, 5, 20} {
			b.Run(fmt.Sprintf("speed=%d/connections=%d", speed, n), func(b *testing.B) {
				p := startProcess(b, plainSite(fmt.Sprintf("rate_limit {\nspeed %d/s\n}\nroot %s\nfile_server", speed, bigFile(b, 1<<30))))
				var of []float64
				for b.Loop() {
					const length = 10 * time.Second
					d := &downloads{process: p}
					start := time.Now()
					d.begin(b, n, func(int) string { return "/big" })
					var sum atomic.Int64
					wait := d.read(func(n int) {
						if got, bound := float64(sum.Add(int64(n))), (1+time.Since(start).Seconds())*float64(speed); got > bound+64 { // less than a drip
							wrong(b, "%.0f bytes after %v, of %.0f", got, time.Since(start), bound)
						}
					})
					time.Sleep(length - time.Since(start))
					of = append(of, float64(sum.Load())/((1+length.Seconds())*float64(speed)))
					d.end()
					wait()
					time.Sleep(2 * time.Second) // until the bucket has room again
				}
				b.ReportMetric(median(of), "of-bound")
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}
