package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
)

// paced sends requests on schedule, so many a second in all, as clients do that do not know
// of each other: no request waits for the answer to another one, unless its connection does.
// So latencies are those of a server that has time left, and not what follows from its
// throughput, as with wrk.
func paced(ctx context.Context, target string, d draw, connections int, duration time.Duration) (a answers, err error) {
	u, err := url.Parse(target)
	if err != nil {
		return a, err
	}
	requests := int(duration.Seconds() * float64(d.paced))
	interval := duration / time.Duration(requests)
	latencies, statuses := make([]time.Duration, requests), make([]int, requests)
	start := time.Now()
	g, ctx := errgroup.WithContext(ctx)
	for first := range min(connections, requests) {
		g.Go(func() error {
			conn, err := new(net.Dialer).DialContext(ctx, "tcp", u.Host)
			if err != nil {
				return err
			}
			defer conn.Close()
			if err := conn.SetDeadline(start.Add(duration + startWithin)); err != nil {
				return err
			}
			replies := bufio.NewReader(conn)
			for i := first; i < requests && ctx.Err() == nil; i += connections {
				due := start.Add(time.Duration(i) * interval)
				if wait := time.Until(due); wait > 0 {
					time.Sleep(wait)
					due = time.Now() // that the sleep ends late is not the server's doing
				}
				statuses[i], err = d.exchange(conn, replies, u.Host)
				if err != nil {
					return err
				}
				latencies[i] = time.Since(due)
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return a, err
	}
	a.Micros, a.Requests = time.Since(start).Microseconds(), int64(requests)
	for _, status := range statuses {
		if status >= http.StatusBadRequest {
			a.Refused++
		}
	}
	slices.Sort(latencies)
	a.P50, a.P99 = latencies[requests/2].Microseconds(), latencies[requests*99/100].Microseconds()
	return a, nil
}

// exchange sends one request with a key drawn at random, and returns the status of its
// response.
func (d draw) exchange(conn net.Conn, replies *bufio.Reader, host string) (status int, err error) {
	key := 1 + rand.IntN(d.keys) //nolint:gosec // no secret
	if _, err := fmt.Fprintf(conn, "GET / HTTP/1.1\r\nHost: %s\r\nX-Key: key-%d\r\n\r\n", host, key); err != nil {
		return 0, err
	}
	resp, err := http.ReadResponse(replies, nil)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	return resp.StatusCode, err
}
