package field

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/testseed"
)

// readings returns what parsers of Go make of the field email of a request, whatever its type says.
func readings(kind, target string, body []byte) (values []string) {
	add := func(more ...string) { values = append(values, more...) }
	request := func() *http.Request {
		r := httptest.NewRequest(http.MethodPost, target, bytes.NewReader(body))
		r.Header.Set("Content-Type", kind)
		return r
	}
	r := request()
	if r.ParseMultipartForm(1 << 20); r.Form != nil {
		add(r.Form["email"]...)
	}
	if reader, err := request().MultipartReader(); err == nil {
		for part, err := reader.NextPart(); err == nil; part, err = reader.NextPart() {
			if content, err := io.ReadAll(part); err == nil && part.FormName() == "email" && part.FileName() == "" {
				add(string(content))
			}
		}
	}
	query, _ := url.ParseQuery(string(body))
	add(query["email"]...)
	var folded struct{ Email any }
	_ = json.NewDecoder(bytes.NewReader(body)).Decode(&folded) // the first text, without regard to case
	var exact map[string]any
	_ = json.Unmarshal(body, &exact)
	for _, v := range []any{folded.Email, exact["email"]} {
		switch v := v.(type) {
		case string:
			add(v)
		case []any:
			for _, element := range v {
				add(fmt.Sprint(element))
			}
		}
	}
	return values
}

// mutations are what is put into bodies.
var mutations = []string{
	"&", ";", "=", "%00", "%", "\x00", "\r\n", "\n", "\r", `"`, "'", `\`, "{", "}", "[", "]", ":", ",", " ", "\t", "+", "/**/", "#", "--xx", "--xx--", "xx",
	"email", "EMAIL", "email=decoy", `"email":"decoy"`, "decoy", `name="email"`, `; filename=""`, "\xff", "\ufeff", `\u0065`, "%u0065", "%65", "null", "[]", "{}", "_", ".", "!",
	"<b>", "\u00a0", "\u200b", "victim", `"email":"victim"`, "&email=victim", "email[]=victim", "\r\n--xx\r\nContent-Disposition: form-data; name=\"email\"\r\n\r\nvictim",
}

// TestNoReadingIsMissed guards that, however a request is mutated, an upstream that reads an account meets the limit
// of that account or that of what is unclear. Parsers of Go stand for upstreams.
func TestNoReadingIsMissed(t *testing.T) {
	t.Parallel()
	rng := rand.New(rand.NewPCG(testseed.Base(), 57))
	bodies := []struct{ kind, body string }{
		{formType, "email=victim&password=x"},
		{formType, "a=1&email=decoy&b=2"},
		{jsonType, `{"email":"victim","password":"x"}`},
		{jsonType, `{"a":{"email":"x"},"email":"decoy","b":[1,{"c":null}]}`},
		{partType, part1("email", "victim") + part1("password", "x") + "--xx--\r\n"},
		{partType, part1("a", "b") + part1("email", "decoy") + "--xx--\r\n"},
		{"text/plain", `{"email":"victim"}`},
	}
	found := make(map[string]int)
	for range 30_000 {
		b := bodies[rng.IntN(len(bodies))]
		body := []byte(b.body)
		for range 1 + rng.IntN(4) {
			at := rng.IntN(len(body) + 1)
			to := min(len(body), at+rng.IntN(2)*rng.IntN(8))
			body = slices.Replace(body, at, to, []byte(mutations[rng.IntN(len(mutations))])...)
		}
		kind, target := b.kind, "/"
		if rng.IntN(4) == 0 {
			kind = bodies[rng.IntN(len(bodies))].kind
		}
		if rng.IntN(8) == 0 {
			target += "?" + strings.Trim(url.QueryEscape(mutations[rng.IntN(len(mutations))]), "%") + "&email=victim"
		}
		key, _ := ask(t, submit(kind, target, string(body)), "email")
		found[key]++
		for _, v := range readings(kind, target, body) {
			if want := Canonical(v); want != "" && key != want && key != Unclear {
				t.Fatalf("%s %s %q: the key is %q, but a parser reads %q", kind, target, body, key, v)
			}
		}
	}
	if found["victim"] < 1000 || found["decoy"] < 300 || found[Unclear] < 1000 || found[""] < 50 {
		t.Errorf("got %v", found) // most outcomes have to be there
	}
}
