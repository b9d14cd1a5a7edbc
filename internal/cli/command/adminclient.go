package command

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/admin/adminjson"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/key/keytext"
)

// adminClient queries a running Caddy.
type adminClient struct {
	address string // as the user knows it
	origin  string
	http    http.Client
}

// newAdminClient returns a client for an admin endpoint.
func newAdminClient(address string, timeout time.Duration) (*adminClient, error) {
	parsed, err := caddy.ParseNetworkAddress(address)
	if err != nil || parsed.PortRangeSize() > 1 || parsed.IsFdNetwork() {
		return nil, fmt.Errorf("address: %q is not valid; use one such as localhost:2019 or unix//run/caddy.sock", address)
	}
	c := &adminClient{address: address, origin: "http://" + parsed.JoinHostPort(0)}
	dialTo := parsed.JoinHostPort(0)
	if parsed.IsUnixNetwork() {
		c.origin = "http://127.0.0.1"
		dialTo, _, _ = strings.Cut(parsed.Host, "|") // permissions of the socket
	}
	if _, err := url.Parse(c.origin); err != nil {
		return nil, fmt.Errorf("address: %q is not valid; use one such as localhost:2019 or unix//run/caddy.sock", address)
	}
	c.http = http.Client{
		Timeout: timeout,
		Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, parsed.Network, dialTo)
		}},
	}
	return c, nil
}

// send sends a request to the endpoint of this module and returns the answer. What
// is to be sent is nil for GET.
func (c *adminClient) send(ctx context.Context, path string, send any) (*http.Response, error) {
	method, body := http.MethodGet, io.Reader(nil)
	if send != nil {
		text, err := json.Marshal(send)
		if err != nil {
			return nil, err
		}
		method, body = http.MethodPost, bytes.NewReader(text)
	}
	r, err := http.NewRequestWithContext(ctx, method, c.origin+adminjson.Path+path, body)
	if err != nil {
		return nil, err
	}
	if send != nil {
		r.Header.Set("Content-Type", "application/json")
	}
	if c.origin != "http://127.0.0.1" {
		r.Header.Set("Origin", c.origin)
	}
	res, err := c.http.Do(r)
	if err != nil {
		return nil, c.unreachable(err)
	}
	if res.StatusCode == http.StatusOK {
		return res, nil
	}
	defer res.Body.Close()
	return nil, c.refused(res)
}

// unreachable returns the error for a Caddy that did not answer.
func (c *adminClient) unreachable(err error) error {
	if timeout := net.Error(nil); errors.As(err, &timeout) && timeout.Timeout() {
		return fmt.Errorf("the admin endpoint at %s did not answer within %v", c.address, c.http.Timeout)
	}
	for inner := errors.Unwrap(err); inner != nil; inner = errors.Unwrap(err) {
		err = inner
	}
	return fmt.Errorf("cannot reach the admin endpoint at %s: %w; use --address or --config to name another", c.address, err)
}

// refused returns the error for an answer that is one.
func (c *adminClient) refused(res *http.Response) error {
	body, _ := io.ReadAll(io.LimitReader(res.Body, 1<<28))
	var answer struct{ Error string }
	switch err := json.Unmarshal(body, &answer); {
	case err == nil && res.StatusCode == http.StatusServiceUnavailable && answer.Error != "":
		return &unavailableError{answer.Error, body}
	case err == nil && answer.Error != "":
		return errors.New(keytext.Safe(answer.Error))
	case res.StatusCode == http.StatusNotFound:
		return fmt.Errorf("the Caddy at %s has no endpoint for rate limits: it runs without this module, or with an older version", c.address)
	}
	return fmt.Errorf("the admin endpoint at %s answered with status %d", c.address, res.StatusCode)
}

// unavailableError is the error for buckets of which only the queried Caddy
// knows something, as Redis does not answer.
type unavailableError struct {
	reason string
	answer []byte
}

// Error implements error.
func (e *unavailableError) Error() string { return keytext.Safe(e.reason) }

// fetch sends the request and returns the whole answer.
func (c *adminClient) fetch(ctx context.Context, path string, send any) ([]byte, error) {
	res, err := c.send(ctx, path, send)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	body, err := io.ReadAll(io.LimitReader(res.Body, 1<<28))
	if err != nil {
		return nil, c.unreachable(err)
	}
	return body, nil
}
