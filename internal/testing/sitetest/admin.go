package sitetest

import (
	"encoding/json"
	"fmt"
	"net/http"
	"reflect"
	"strings"
	"testing"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/caddytest"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// Admin sends requests to an admin endpoint.
type Admin struct {
	t      testing.TB
	Addr   string
	Scheme string
	Header http.Header // of all requests
	Client *http.Client
}

// NewAdmin returns a client of the admin endpoint at an address.
func NewAdmin(t testing.TB, addr string) *Admin {
	client := &http.Client{Transport: caddytest.FreshConnections(""), Timeout: Patience}
	return &Admin{t: t, Addr: addr, Scheme: "http", Header: http.Header{}, Client: client}
}

// Send sends a request and returns the status and the answer.
func (a *Admin) Send(method, path, body string) (int, string) {
	a.t.Helper()
	req, err := http.NewRequest(method, a.Scheme+"://"+a.Addr+"/rate_limit/"+path, strings.NewReader(body))
	if err != nil {
		a.t.Fatal(err)
	}
	req.Header = a.Header.Clone()
	answer := do(a.t, a.Client, req)
	return answer.StatusCode, answer.Text
}

// Ask sends a request, which is to succeed, and returns its answer.
func (a *Admin) Ask(method, path, body string) map[string]any {
	a.t.Helper()
	status, text := a.Send(method, path, body)
	var answer map[string]any
	if err := json.Unmarshal([]byte(text), &answer); err != nil || status != http.StatusOK {
		a.t.Fatalf("%s %s %s: got %d %s", method, path, body, status, text)
	}
	return answer
}

// WantJSON checks a part of an answer: the fields that want has, as JSON.
func WantJSON(t testing.TB, got any, want string) {
	t.Helper()
	var wanted any
	if err := json.Unmarshal([]byte(want), &wanted); err != nil {
		t.Fatalf("%s: %v", want, err)
	}
	if text, ok := Contains(got, wanted); !ok {
		all, _ := json.Marshal(got)
		t.Errorf("%s:\n got %s\nwant %s", text, all, want)
	}
}

// Contains reports whether got has all that want has, or else where it has not.
func Contains(got, want any) (string, bool) {
	switch want := want.(type) {
	case map[string]any:
		object, ok := got.(map[string]any)
		if !ok {
			return "not an object", false
		}
		for name, value := range want {
			if text, ok := Contains(object[name], value); !ok {
				return name + ": " + text, false
			}
		}
		return "", true
	case []any:
		array, ok := got.([]any)
		if !ok || len(array) != len(want) {
			return "another length", false
		}
		for i := range want {
			if text, ok := Contains(array[i], want[i]); !ok {
				return fmt.Sprint(i, ": ", text), false
			}
		}
		return "", true
	}
	return "another value", reflect.DeepEqual(got, want)
}

// StartWithAdmin runs a Caddy with c and an admin endpoint.
func StartWithAdmin(t testing.TB, c Config) (*Site, *Admin) {
	t.Helper()
	addr := redistest.FreeAddr(t)
	c.Admin = strings.Replace(c.Admin, "{addr}", addr, 1)
	if c.Admin == "" {
		c.Admin = addr
	}
	return StartConfig(t, c), NewAdmin(t, addr)
}
