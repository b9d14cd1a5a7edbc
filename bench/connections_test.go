package bench

import (
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// limitOfConnections is what a server has, without a limit of connections and with one.
var limitOfConnections = []struct{ name, wrappers string }{
	{"none", ""},
	{"limited", "listener_wrappers {\nrate_limit {\nlimit open {\nconcurrency 100\n}\nlimit new {\nrate 20/s\nsize 60\n}\n}\ntls\n}\n"},
}

// attacker is the address of clients that open too many connections.
var attacker = &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}

// tlsSite returns the Caddyfile of a site with TLS that answers ok, behind listener wrappers.
func tlsSite(b *testing.B, authority *redistest.Authority, wrappers string) func(addr string) string {
	cert, key := authority.Issue(b, "localhost")
	return func(addr string) string {
		return "{\n" + quiet + "auto_https disable_redirects\nservers {\nprotocols h1\n" + wrappers + "}\n}\n" +
			"https://" + addr + " {\ntls " + cert + " " + key + "\nrespond ok\n}\n"
	}
}

// clientHello returns what a client sends first.
func clientHello(b *testing.B) []byte {
	client, server := net.Pipe()
	defer server.Close()
	go func() {
		_ = tls.Client(client, &tls.Config{ServerName: "localhost"}).Handshake()
		client.Close()
	}()
	record := make([]byte, 16<<10)
	n, err := server.Read(record)
	if err != nil {
		b.Fatal(err)
	}
	return record[:n]
}

// BenchmarkConnectionFlood has one address open 1 500 connections a second for ten seconds, and send a ClientHello
// on each, beside a client of another address that sends 100 requests a second: cpu-s is for how many seconds
// Caddy has used a processor, and p99-ms within what time 99 of 100 of the other client's requests are answered.
func BenchmarkConnectionFlood(b *testing.B) {
	const every, length = 10 * time.Millisecond, 10 * time.Second
	hello := clientHello(b)
	authority := redistest.NewAuthority(b)
	cpu, slow := make([][]float64, 2), make([][]float64, 2)
	for b.Loop() {
		for i, limit := range limitOfConnections {
			p := startProcess(b, tlsSite(b, authority, limit.wrappers))
			before := p.cpu(b)
			var all sync.WaitGroup
			all.Go(func() { p.flood(hello, 1500, length) })
			client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: authority.Pool()}, MaxConnsPerHost: 20, MaxIdleConnsPerHost: 20}}
			slow[i] = append(slow[i], slowest(b, client, "https://"+p.addr, int(length/every), every).Seconds())
			client.CloseIdleConnections()
			all.Wait()
			cpu[i] = append(cpu[i], p.cpu(b)-before)
			p.Stop()
		}
	}
	for i, limit := range limitOfConnections {
		b.ReportMetric(median(cpu[i]), limit.name+"-cpu-s")
		b.ReportMetric(median(slow[i])*1e3, limit.name+"-p99-ms")
	}
	b.ReportMetric(median(cpu[1])/median(cpu[0]), "x-cpu")
	b.ReportMetric(0, "ns/op") // it says nothing
}

// flood opens so many connections a second, and sends hello on each.
func (p *process) flood(hello []byte, perSecond int, length time.Duration) {
	var all sync.WaitGroup
	every := time.Second / time.Duration(perSecond)
	dialer := net.Dialer{LocalAddr: attacker, Timeout: time.Second}
	for start, due := time.Now(), time.Duration(0); due < length; due += every {
		time.Sleep(time.Until(start.Add(due)))
		all.Go(func() {
			conn, err := dialer.Dial("tcp", p.addr)
			if err != nil {
				return
			}
			defer conn.Close()
			if tcp, ok := conn.(*net.TCPConn); ok {
				_ = tcp.SetLinger(0) // or no port would be left for a minute
			}
			_ = conn.SetDeadline(time.Now().Add(time.Second))
			_, _ = conn.Write(hello)
			_, _ = conn.Read(make([]byte, 4096))
		})
	}
	all.Wait()
}

// BenchmarkHalfHandshakes has one address open 5 000 connections, and send half a ClientHello on each:
// descriptors is how many Caddy has open then.
func BenchmarkHalfHandshakes(b *testing.B) {
	hello := clientHello(b)
	authority := redistest.NewAuthority(b)
	open := make([][]float64, 2)
	for b.Loop() {
		for i, limit := range limitOfConnections {
			p := startProcess(b, tlsSite(b, authority, limit.wrappers))
			dialer := net.Dialer{LocalAddr: attacker}
			conns := make([]net.Conn, 0, 5000)
			for range cap(conns) {
				conn, err := dialer.Dial("tcp", p.addr)
				if errors.Is(err, syscall.ECONNRESET) {
					continue // it was refused at once
				}
				if err != nil {
					b.Fatal(err)
				}
				_, _ = conn.Write(hello[:len(hello)/2])
				conns = append(conns, conn)
			}
			time.Sleep(time.Second)
			open[i] = append(open[i], p.descriptors(b))
			for _, conn := range conns {
				conn.Close()
			}
			p.Stop()
		}
	}
	for i, limit := range limitOfConnections {
		b.ReportMetric(median(open[i]), limit.name+"-descriptors")
	}
	b.ReportMetric(0, "ns/op")
}
