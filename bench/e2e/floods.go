package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"time"
)

// A flood is thousands of clients on one Caddy, whose limit admits all and has the
// default timeout: what matters is how many requests Redis decides although the
// process is busy.

// floods measures floods of each size, and returns the table.
func (m *measurement) floods(ctx context.Context) (string, error) {
	var rows [][]string
	for _, limiter := range []struct{ name, redis string }{
		{bare, ""},
		{"this module, Redis near", m.redis.address},
		{fmt.Sprintf("this module, Redis %d ms away", away.Milliseconds()), m.farRedis},
	} {
		for _, connections := range m.floodSizes {
			var rates, slowest, alone []float64
			for round := range min(m.rounds, floodRounds) {
				fmt.Fprintf(m.progress, "floods: %s, %d clients, round %d\n", limiter.name, connections, round+1)
				sent, share, err := m.flood(ctx, limiter.redis, connections)
				if err != nil {
					return "", err
				}
				rates = append(rates, float64(sent.Requests)/float64(sent.Micros)*1e6)
				slowest = append(slowest, float64(sent.P99)/1e3)
				alone = append(alone, 100*share)
			}
			row := []string{limiter.name, count(connections), spread(rates), figure(median(slowest)), spread(alone)}
			if limiter.redis == "" {
				row[len(row)-1] = ""
			}
			rows = append(rows, row)
		}
	}
	return markdown([]string{"limiter", "clients", "requests/s", "p99 ms", "decided without Redis, %"}, rows), nil
}

// flood starts a Caddy, floods it, and returns what wrk counted and the share of
// requests that Caddy has decided without Redis. Without an address of Redis there is
// no limit.
func (m *measurement) flood(ctx context.Context, redis string, connections int) (a answers, share float64, err error) {
	var ports [2]string
	for i := range ports {
		if ports[i], err = freePort(); err != nil {
			return a, 0, err
		}
	}
	global, limit := "", ""
	if redis != "" {
		global = "\trate_limit {\n\t\tredis " + redis + "\n\t}\n"
		limit = "\trate_limit {\n\t\tkey {header.X-Key}\n\t\tsize 1000000\n\t\tdrip_rate 10m\n\t}\n"
	}
	config := filepath.Join(m.dir, "flood.Caddyfile")
	if err := os.WriteFile(config, fmt.Appendf(nil, `{
	admin 127.0.0.1:%s
	auto_https off
	persist_config off
	metrics
%s}

http://127.0.0.1:%s {
	bind 127.0.0.1
%s	respond "Hello"
}
`, ports[0], global, ports[1], limit), 0o600); err != nil {
		return a, 0, err
	}
	url := "http://127.0.0.1:" + ports[1] + "/"
	p, err := m.launch(ctx, func() error {
		_, err := get(ctx, url)
		return err
	}, filepath.Join(m.dir, "ours"), "run", "--config", config, "--adapter", "caddyfile")
	if err != nil {
		return a, 0, err
	}
	defer p.stop()
	time.Sleep(time.Second) // for its connection to Redis
	metrics := "http://127.0.0.1:" + ports[0] + "/metrics"
	beforeAlone, before, err := decided(ctx, metrics)
	if err != nil {
		return a, 0, err
	}
	if a, err = m.wrk(ctx, url, draw{keys: 100_000}, connections, 1, floodTimes*m.duration); err != nil {
		return a, 0, err
	}
	alone, all, err := decided(ctx, metrics)
	if redis == "" || err != nil {
		return a, 0, err
	}
	if all == before {
		return a, 0, fmt.Errorf("%d clients: nothing was decided", connections)
	}
	return a, (alone - beforeAlone) / (all - before), nil
}

const (
	// floodTimes is how many times as long as other runs a flood lasts: it takes a
	// second until all clients are connected.
	floodTimes = 5

	// floodRounds is the most rounds: what matters varies little.
	floodRounds = 3
)

var decisions = regexp.MustCompile(`(?m)^caddy_rate_limit_decisions_total\{by="(\w+)".*\} ([\d.e+]+)$`)

// decided returns the number of decisions of a Caddy without Redis, and in all.
func decided(ctx context.Context, metrics string) (alone, all float64, err error) {
	page, err := get(ctx, metrics)
	if err != nil {
		return 0, 0, err
	}
	for _, match := range decisions.FindAllSubmatch(page, -1) {
		n, err := strconv.ParseFloat(string(match[2]), 64)
		if err != nil {
			return 0, 0, err
		}
		if all += n; !bytes.Equal(match[1], []byte("redis")) {
			alone += n
		}
	}
	return alone, all, nil
}

// get returns a page.
func get(ctx context.Context, url string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return io.ReadAll(resp.Body)
}

// away is how long it takes to a Redis that is far away, and back.
const away = 20 * time.Millisecond

// relay passes connections on to a server until ctx is done, what comes either way
// after a delay, and returns its address.
func relay(ctx context.Context, server string, delay time.Duration) (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	context.AfterFunc(ctx, func() { _ = l.Close() })
	go func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			conn, err := net.Dial("tcp", server)
			if err != nil {
				_ = client.Close()
				continue
			}
			go pass(client, conn, delay)
			go pass(conn, client, delay)
		}
	}()
	return l.Addr().String(), nil
}

// pass passes on what comes from one connection to another after a delay, and closes
// both at the end.
func pass(from, to net.Conn, delay time.Duration) {
	type piece struct {
		due  time.Time
		data []byte
	}
	pieces := make(chan piece, 1<<12)
	go func() {
		defer from.Close()
		defer to.Close()
		for p := range pieces {
			time.Sleep(time.Until(p.due))
			if _, err := to.Write(p.data); err != nil {
				break
			}
		}
		for range pieces {
		}
	}()
	defer close(pieces)
	for {
		data := make([]byte, 64<<10)
		n, err := from.Read(data)
		if n > 0 {
			pieces <- piece{time.Now().Add(delay), data[:n]}
		}
		if err != nil {
			return
		}
	}
}
