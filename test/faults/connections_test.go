package faults

import (
	"bufio"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// connectionFaults are what clients do before their first request.
var connectionFaults = []fault{
	{"47", "one address opens connections as fast as 20 dialers can, while Caddy reloads and Redis is killed; one node", dialers},
}

// dialers: how many connections are open at a time, and how many are opened, whatever else happens.
func dialers(tr *trial) {
	const concurrency, size, rate = 10, 50, 50
	server := redistest.Start(tr)
	config := func(version int) func(*node) string {
		write := caddyfile(redisAt(server.Addr), fmt.Sprintf("header X-Version %d\n%s", version, site))
		return func(n *node) string {
			return strings.Replace(write(n), "max_header_size 2MB", fmt.Sprintf(`max_header_size 2MB
				listener_wrappers {
					rate_limit {
						limit open {
							match remote_ip 127.0.0.2
							concurrency %d
						}
						limit new {
							match remote_ip 127.0.0.2
							rate %d/s
							size %d
						}
					}
				}`, concurrency, rate, size), 1)
		}
	}
	n := startNodes(tr, 1, config(0))[0]
	n.get("other")
	var open, atOnce, opened atomic.Int64
	over := make(chan struct{})
	var all sync.WaitGroup
	began := time.Now()
	for range 20 {
		all.Go(func() {
			for {
				select {
				case <-over:
					return
				default:
					n.dial("127.0.0.2", func() {
						opened.Add(1)
						for now, most := open.Add(1), atOnce.Load(); now > most && !atOnce.CompareAndSwap(most, now); most = atOnce.Load() {
						}
						time.Sleep(50 * time.Millisecond)
						open.Add(-1)
					})
				}
			}
		})
	}
	others, refused := 0, 0
	for i := range int(during(6, 60)) {
		if i == 2 {
			server.Kill()
		}
		time.Sleep(500 * time.Millisecond)
		if err := n.reload(config(1 + i)); err != nil {
			tr.Fatal(err)
		}
		if others++; n.get(fmt.Sprint("other", i)).StatusCode != http.StatusOK {
			refused++
		}
	}
	close(over)
	all.Wait()
	took := time.Since(began)
	most(tr, "open at a time", atOnce.Load(), concurrency)
	most(tr, "opened", opened.Load(), size+int64(rate*took.Seconds()))
	least(tr, "opened", opened.Load(), size)
	most(tr, "other clients refused", refused, 0)
	eventually(tr, "no connection counts in the end", func() bool {
		return slices.Equal(n.metric(`open_connections\{limit="[^"]*open"\}`), []int{0})
	})
	tr.note("%d other clients, %s", others, show(took))
}

// dial opens a connection from an address, and calls do while it is open, if a request over it is answered.
func (n *node) dial(from string, do func()) {
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}, Timeout: 5 * time.Second}
	conn, err := dialer.Dial("tcp", n.addr)
	if err != nil {
		return
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
	fmt.Fprintf(conn, "GET /hot HTTP/1.1\r\nHost: %s\r\nX-Key: %s\r\n\r\n", n.addr, from)
	if _, err := bufio.NewReader(conn).ReadByte(); err == nil {
		do()
	}
}
