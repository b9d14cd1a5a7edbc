package adminapi

import (
	"net/http"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/key"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/clientip"
)

// FuzzBucketRequest guards that no body crashes the parser, and that its errors are
// one line that shows nothing of the body.
func FuzzBucketRequest(f *testing.F) {
	for _, body := range []string{`{"limit":"api","key":"k"}`, `{"limit":"api","key":["a","b"]}`, `{"address":""}`, `{`, `[]`, `{"key":null}`} {
		f.Add([]byte(body))
	}
	var keys []*key.Key
	for _, template := range []string{"{client_ip}", "all", "{http.request.header.A}-{client_ip}"} {
		k, err := key.Parse("key", template, clientip.Prefixes{IPv4: 24, IPv6: 64})
		if err != nil {
			f.Fatal(err)
		}
		keys = append(keys, k)
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		query, err := parseQuery(body, useBody)
		if err == nil {
			for _, k := range keys {
				_, err = typedKey(&query.BucketQuery, k)
				checkAdminError(t, err)
			}
			return
		}
		checkAdminError(t, err)
	})
}

// checkAdminError checks that an error, if there is one, is of the client and one
// line.
func checkAdminError(t *testing.T, err error) {
	t.Helper()
	if err == nil {
		return
	}
	api, ok := err.(caddy.APIError)
	if !ok || api.HTTPStatus != http.StatusBadRequest || strings.Contains(err.Error(), "\n") {
		t.Errorf("got %#v", err)
	}
}
