package usage

import (
	"bytes"
	"encoding/json"
	"math/big"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/filetest"
)

// costOf returns the cost of a text, and fails without one.
func costOf(t testing.TB, text string) *Cost {
	t.Helper()
	cost, err := new(Plan).Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	return cost
}

// read returns what a body says, in pieces of some size.
func read(c *Cost, header http.Header, body []byte, size int) (units int64, found bool, b *Body) {
	b = c.Plan().NewBody(header)
	for len(body) > 0 {
		n := min(size, len(body))
		b.Write(body[:n])
		body = body[n:]
	}
	b.End()
	units, found = c.In(b)
	return units, found, b
}

// TestAPIs guards that the bodies of all APIs, whole and streamed, cost what they say, whatever
// the pieces in which they come. A file's name ends with its cost.
func TestAPIs(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("testdata/*")
	if err != nil || len(files) < 2*len(apis) {
		t.Fatalf("%d files, %v", len(files), err)
	}
	tokens, seen := costOf(t, Tokens), make([]bool, len(apis))
	for _, file := range files {
		body := filetest.Read(t, file)
		name := strings.TrimSuffix(filepath.Base(file), filepath.Ext(file))
		want, err := strconv.ParseInt(name[strings.LastIndexByte(name, '-')+1:], 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		for _, size := range []int{1, 2, 3, 5, 7, 16, 61, 250, 1024, 4096} {
			got, found, b := read(tokens, nil, body, size)
			if got != want || !found || !b.Whole() {
				t.Errorf("%s in pieces of %d: got %d, %t", file, size, got, found)
			}
			for i, way := range tokens.ways {
				if b.json.values[way.terms[0].counter].found {
					seen[i] = true
					break
				}
			}
		}
	}
	for i, seen := range seen {
		if !seen {
			t.Errorf("no body of %s", apis[i].name)
		}
	}
}

// TestCost guards how numbers make a cost.
func TestCost(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		says, body string
		want       int64 // -1 if there is no number
	}{
		{"json a", `{"a": 3}`, 3},
		{"json a", ` [{"a": 3}, {"b": 1}] `, 3},
		{"json a", `[{"a":300},{"a":2}]`, 302},
		{"json a", `[{"a":1,"a":3},{"a":0},{"b":9},{},7,[{"a":9}],{"a":null},{"a":2,"a":0},{"a":0.5}]`, 6},
		{"json a", `[{"a":0},{"a":5},{"a":0},{"a":0}]`, 5},
		{"json a|b c*2", `[{"a":1,"c":1},{"b":2,"c":1},{"a":3,"b":4}]`, 11},
		{"json a", `[{"a":1},{"a":2}]` + "\n" + `[{"a":4},{"a":5}]` + "\n", 9}, // lines, of which the last one counts
		{"json a", `[{"a":1},{"a":2}]{"a":4}`, 4},
		{"json a", `{"a":1}[{"a":2},{"a":4}`, 6},
		{"json a", "data: [{\"a\":1},{\"a\":2}]\n\ndata: [{\"a\":4},\ndata: {\"a\":5}]\n\n", 9},
		{"json a*0.1", `[` + strings.Repeat(`{"a":0.1},`, 1000) + `{"a":1}]`, 11}, // 10.1
		{"json a", `[{"a":1e99},{"a":1}]`, 1<<63 - 1},
		{Tokens, `[{"tokens_evaluated":1,"tokens_predicted":10},{"tokens_evaluated":2,"tokens_predicted":20}]`, 33},
		{Tokens, `[{"usageMetadata":{"totalTokenCount":5}},{"usageMetadata":{"totalTokenCount":9}}]`, 9},
		{"json a", `{"a":1}` + "\n" + `{"a":2}` + "\n\n" + `{"b":{"a":9}}`, 2},
		{"json a", "\xef\xbb\xbf{\"a\": 3}", 3},
		{"json a", `{"x":{"a":1},"y":[{"a":1}],"s":"{\"a\":1}"}`, -1},
		{"json a", `{"\u0061":4}`, 4},
		{"json a", `{"a":null}`, -1},
		{"json a", `{"a":0}`, 0},
		{"json a", `{"a":7}{"a":0}{"a":null}{"a":"9"}{"a":[9]}{"a":{"a":9}}{"a":-9}{"a":1.}{"a":01}{"a":true}`, 7},
		{"json a.b", `{"a":[{"b":1}],"a":{"c":{"b":2},"b":3}}`, 3},
		{"json a a.b*2", `{"a":5}{"a":{"b":4}}`, 13},
		{"json a|b", `{"a":1}{"b":2}`, 2},
		{"json a|b c", `{"a":1,"c":10}{"b":2}`, 12},
		{"json a*0.07", `{"a":100}`, 7},
		{"json a*0.1 b*0.2", `{"a":1,"b":1}`, 1},
		{"json a*0.1 b*0.2", `{"a":3,"b":3.500001}`, 2},
		{"json a*1000000", `{"a":0.000123}`, 123},
		{"json a*1000000", `{"a":1.23E-4}`, 123},
		{"json a", `{"a":1e400}`, 1<<63 - 1},
		{"json a", `{"a":1e-99999999999999999999}`, 1},
		{"json a", `{"a":1e}`, -1},
		{"json a", `{"a":0x10}`, -1},
		{"json a", `{"a":1,000}`, -1},
		{"json a", `{"a":7}{"a":1,}{"a":1 "b":2}{"a":`, 7},
		{"json a", `{"a":1,"b":{"c":2},"b":[],"b":"", "a": 3 , "c":true}`, 3},
		{"json a", `{"a":` + strings.Repeat("9", 100) + `}`, 1<<63 - 1},
		{"json a", `{"a":` + strings.Repeat("9", maxText+1) + `}`, -1},
		{"json a", `{"` + strings.Repeat("x", 5000) + `":1,"a":2}`, 2},
		{"json a", strings.Repeat(`{"b":[`, 100_000), -1},
		{"json a", `{"b":` + strings.Repeat(`[`, 1000) + strings.Repeat(`]`, 1000) + `,"a":2}`, 2},
		{"json a", "data: {\"a\":1}\n\ndata: [DONE]\n\n", 1},
		{"json a", "data:{\"a\":1}\r\rdata: {\"b\":\r\ndata: 2,\r\ndata: \"a\": 5}\r\n\r\n", 5},
		{"json a", ": comment\nevent: x\ndata: {\"a\":1\n\ndata: {\"a\":2}\n\n", 2}, // what was cut off
		{"json a", "data: {\"x\":\"never closed\n\ndata: {\"a\":3}", 3},
		{"json a", "date: {\"a\":1}\nda\ndata\nxdata: {\"a\":1}\n\n", -1},
		{"json a", "id: 1\ndata:  {\"a\":2}", 2},
		{"json a", "<p>{\"a\":1}</p>", -1},
		{"json a", "", -1},
		{"json a", "data: {\"\\u0061\":4}\n\ndata: {\"b\":1}\n\n", 4},
		{"json a/b", "data: {\"a\\/b\":4}\n\ndata: {\"c\":1}\n\n", 4},
		{"json a", "data: {\"b\":\ndata: 1}\n\nid: a\ndata: {\"a\":\n\ndata: {\"c\":1}\n\n", -1},
		{"json a", "data: {\"b\":1}\r\n\r\ndata: {\"c\":\ndata: 1,\"a\":6}\n\ndata: {\"c\":1}\n\n", 6},
		{"json a", `{"b":"` + strings.Repeat(`\\`, 99) + `\"","a":3}`, 3},
		{"json a", `{"b":"` + strings.Repeat(`\\`, 99) + `","a":3}`, 3},
		{"json usage.total", `{"usage":{"total":5}}`, 5},
		{Tokens, `{"usage":{"input_tokens":3,"output_tokens":4,"total_tokens":8}}`, 8}, // and not 7
	} {
		cost := costOf(t, tc.says)
		for _, size := range []int{1, 2, 3, 64, 1 << 20} {
			got, found, _ := read(cost, nil, []byte(tc.body), size)
			if found != (tc.want >= 0) || found && got != tc.want {
				t.Errorf("%s of %.60q in pieces of %d: got %d, %t, want %d", tc.says, tc.body, size, got, found, tc.want)
			}
		}
	}
}

// TestSaysEnd guards which bodies say that nothing comes behind what has come: what a client knows
// too, which then may leave. What comes nevertheless counts.
func TestSaysEnd(t *testing.T) {
	t.Parallel()
	const sse, lines, whole = "text/event-stream", "application/x-ndjson", "application/json; charset=utf-8"
	for _, tc := range []struct {
		kind, body string
		want       bool
	}{
		{sse, "data: {\"a\":1}\n\n", false},
		{sse, "data: {\"a\":1}\n\ndata: [DONE]\n\n", true},
		{"text/plain", "data:{\"a\":1}\r\n\r\ndata:[DONE]\r\n\r\n: bye\r\n\r\n", true},
		{sse, "data: {\"a\":1}\n\ndata: [DONE]\n\nevent: x\n\n: x\n\n", true},
		{sse, "data: {\"a\":1}\n\ndata: [DONE]\n\ndata: 1\n\n", false},
		{sse, "data: {\"a\":1}\n\ndata: [DONE]\n\ndata:", false},
		{sse, "data: {\"a\":1}\n\ndata: [DONE]\n\n: x", true},
		{sse, "data: [DONE]\n\nx\rdata: 1\n\n", false},
		{sse, "data: 1\r\n\r\nx\rdata: [DONE]\n\n", true},
		{sse, "data: {\"x\":\"" + strings.Repeat("x", maxKept) + "\",\"type\":\"message_stop\"}\n\n", true},
		{sse, "data: {\"a\":1}\n\ndata: [DONE]\n\ndata: {\"a\":2}\n\n", false},
		{sse, "data: {\"a\":1}\n\ndata: [DONE]\n\ndata: {", false},
		{sse, "data: [DONE]", false},
		{sse, "data: [DONE]\n", false},
		{sse, "data: [DON]\n\n", false},
		{sse, "data:  [DONE]\n\n", false},
		{sse, "event: [DONE]\n\n", false},
		{sse, "data: {\"text\":\"data: [DONE]\"}\n\n", false},
		{sse, "event: message_stop\ndata: {\"type\":\"message_stop\"}", true},
		{sse, "data: {\"type\": \"message\\u005fstop\"", false},
		{sse, "data: {\"type\": \"message\\u005fstop\"}\n\n", true},
		{sse, "data: {\"type\":\"content_block_stop\"}\n\n", false},
		{sse, "data: {\"x\":{\"type\":\"message_stop\"},\"y\":[{\"type\":\"message_stop\"}],\"z\":\"\\\"type\\\":\\\"message_stop\\\"\"}\n\n", false},
		{sse, "data: {\"type\":\"message_stop\"}\n\ndata: {\"type\":\"ping\"}\n\n", false},
		{sse, "data: {\"type\":\"response.completed\",\"response\":{\"a\":1}", false},
		{sse, "data: {\"type\":\"response.completed\",\"response\":{\"a\":1}}", true},
		{sse, "data: {\"index\":0,\"stop\":false}\n\n", false},
		{sse, "data: {\"index\":0,\"stop\":true}\n\n", true},
		{lines, "{\"done\":false}\n{\"done\":true", false},
		{lines, "{\"done\":false}\n{\"done\":true}", true},
		{lines, "{\"done\":true,\"a\":1}\n{\"done\":false}\n", false},
		{lines, "{\"done\":trueish}\n{\"done\":[true]}\n{\"done\":{\"done\":true}}", false},
		{lines, "{\"a\":1}", false},
		{whole, "{\"a\":1", false},
		{whole, "{\"a\":{\"b\":[]}}", true},
		{whole, "{\"a\":1}\n{\"a\":2}\n", false}, // no such text after all
		{whole, "[{\"a\":1},{\"a\":2}", false},
		{whole, "[{\"a\":1},{\"a\":2}]", true},
		{whole, "data: {\"a\":1}\n\n", false},
		{whole, "", false},
	} {
		for _, says := range []string{Tokens, "json a", "json done stop type"} {
			for _, size := range []int{1, 2, 7, len("data: [DONE]\n\n"), 1 << 20} {
				_, _, b := read(costOf(t, says), http.Header{"Content-Type": {tc.kind}}, []byte(tc.body), size)
				if b.SaysEnd() != tc.want {
					t.Errorf("%s of %s %q in pieces of %d: got %t", says, tc.kind, tc.body, size, b.SaysEnd())
				}
			}
		}
	}
}

// TestEventsOfAnyFields guards that an event stream is read whatever its first line, if its type says
// what it is, and that other text is not taken for one.
func TestEventsOfAnyFields(t *testing.T) {
	t.Parallel()
	for _, first := range []string{"x: 1", "x", "Data: 1", "<p>", "\"", "1", "\x01", "é", "=", " : ", "\r\n\r\nx", "\xef\xbb\xbfx: 1", "data", "event: x", "id", "retry: 1", ":"} {
		for _, kind := range []string{"text/event-stream", "Text/Event-Stream; charset=utf-8", "text/plain"} {
			for _, size := range []int{1, 5, 1000} {
				body := first + "\ndata: {\"usage\":{\"total_tokens\":77}}\n\n"
				units, found, b := read(costOf(t, Tokens), http.Header{"Content-Type": {kind}}, []byte(body), size)
				want := kind != "text/plain" || strings.Contains("deir:", strings.TrimSpace(first)[:1])
				if found != want || found && units != 77 || !b.Whole() {
					t.Errorf("%q as %s in pieces of %d: got %d, %t", body, kind, size, units, found)
				}
			}
		}
	}
}

// TestStreamsSayTheirEnd guards behind which byte the streams of all APIs are known to have ended,
// also compressed, if that breaks off there.
func TestStreamsSayTheirEnd(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("testdata/*stream*")
	if err != nil || len(files) < 15 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	cost := costOf(t, Tokens)
	for _, file := range files {
		body := filetest.Read(t, file)
		end := bytes.LastIndexByte(body, '}') + 1
		switch {
		case bytes.HasSuffix(body, []byte("[DONE]\n\n")):
			end = len(body)
		case strings.Contains(file, "gemini"), strings.Contains(file, "code-assist"):
			end = len(body) + 1
		}
		for n := range len(body) + 1 {
			for _, encoding := range []string{"", "gzip", "zstd"} {
				if far := n < end-20 && n%37 > 0; far || encoding != "" && n != end-1 && n != end && n != len(body) {
					continue
				}
				h := http.Header{"Content-Encoding": {encoding}}
				sent := body[:n]
				if encoding != "" {
					sent = encodeAndFlush(t, encoding, sent)
				}
				if _, _, b := read(cost, h, sent, 16); b.SaysEnd() != (n >= end) {
					t.Errorf("%s: %d of %d bytes, %q: it says its end: %t", file, n, len(body), encoding, b.SaysEnd())
				}
			}
		}
	}
}

// TestNumbersAreThoseOfJSON guards that what JSON does not take for a number is none, rather than
// the part of it that is: 0x10, 1_000, 1,000, +1 and whatever else there is of a few characters.
func TestNumbersAreThoseOfJSON(t *testing.T) {
	t.Parallel()
	const characters = "019+-.eExn_', \t\\\x01"
	cost := costOf(t, "json a")
	valid := 0
	var form func(text string)
	form = func(text string) {
		for _, body := range []string{`{"a":` + text + `}`, `{"a":` + text + `,"b":1}`} {
			b := cost.Plan().NewBody(nil)
			b.Write([]byte(body))
			_, found := cost.In(b)
			if want := json.Valid([]byte(body)) && !strings.HasPrefix(strings.TrimLeft(text, " \t"), "-"); found != want {
				t.Errorf("%q: found %t, want %t", body, found, want)
			} else if want {
				valid++
			}
		}
		for i := 0; i < len(characters) && len(text) < 4; i++ {
			form(text + characters[i:i+1])
		}
	}
	for i := range len(characters) {
		form(characters[i : i+1])
	}
	for _, text := range []string{"0x10", "1_000", "1'000", "1 000", "1,000", "1, 000", "NaN", "Infinity", "1e5.5", "1.2.3", "10 tokens", "1/*x*/", "１", "1\u00a0", "1;"} {
		form("  " + text)
	}
	if valid == 0 {
		t.Error("there is no number")
	}
}

// TestParseErrors guards what is told of a cost that is none.
func TestParseErrors(t *testing.T) {
	t.Parallel()
	const path, weight = "at most 8 names with dots between them, such as usage.total_tokens: it can't be in an array, nor below $",
		"a path and a weight that is a decimal above 0, such as usage.total_tokens*0.25"
	for text, want := range map[string]string{
		"json":                   `"json" is not valid; use json and at least one path, such as json usage.total_tokens`,
		"tokens x":               `"tokens x" is not valid; use tokens alone, or json and paths, such as json usage.output_tokens*4`,
		"json usage..total":      `"usage..total" is not valid; use ` + path,
		"json .total":            `".total" is not valid; use ` + path,
		"json total.":            `"total." is not valid; use ` + path,
		"json a|":                `nothing given; use ` + path,
		"json $.usage":           `"$.usage" is not valid; use ` + path,
		"json data[0].usage":     `"data[0].usage" is not valid; use ` + path,
		"json {a}":               `"{a}" is not valid; use ` + path,
		`json "a"`:               `"\"a\"" is not valid; use ` + path,
		"json a.b.c.d.e.f.g.h.i": `"a.b.c.d.e.f.g.h.i" is not valid; use ` + path,
		"json *2":                `nothing given; use ` + path,
		"json a*":                `"a*" is not valid; use ` + weight,
		"json a*x":               `"a*x" is not valid; use ` + weight,
		"json a*-1":              `"a*-1" is not valid; use ` + weight,
		"json a*0.0":             `"a*0.0" is not valid; use ` + weight,
		"json a*1e3":             `"a*1e3" is not valid; use ` + weight,
		"json a*1*2":             `"a*1*2" is not valid; use ` + weight,
		"json a*1,5":             `"a*1,5" is not valid; use ` + weight,
		"json a a*2":             `"a*2" is not valid; use each path once, with the sum of the weights`,
	} {
		if _, err := new(Plan).Parse(text); err == nil || err.Error() != "actual_cost: "+want {
			t.Errorf("%s:\n got %v\nwant actual_cost: %s", text, err, want)
		}
	}
}

// TestSharedPlan guards that the costs of several limits of a handler are read in one scan.
func TestSharedPlan(t *testing.T) {
	t.Parallel()
	p := new(Plan)
	var costs []*Cost
	for _, text := range []string{Tokens, "json usage.total_tokens*2", Tokens, "json usage.prompt_tokens|usage.x usage.total_tokens"} {
		c, err := p.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		costs = append(costs, c)
	}
	b := p.NewBody(nil)
	b.Write([]byte(`{"usage":{"prompt_tokens":3,"total_tokens":10}}`))
	b.End()
	for i, want := range []int64{10, 20, 10, 13} {
		if got, found := costs[i].In(b); got != want || !found {
			t.Errorf("cost %d is %d, %t, want %d", i, got, found, want)
		}
	}
}

// TestEstimate guards what is assumed of a body that does not say its cost.
func TestEstimate(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		kind, body string
		request    int64
		want       int64
		remedy     string
	}{
		{"application/json", `{"x":"` + strings.Repeat("y", 393) + `"}`, -1, 100, "the body has no such number"},
		{"application/json", `{"x":"` + strings.Repeat("y", 393) + `"}`, 400, 200, "the body has no such number"},
		{"text/event-stream", strings.Repeat(": keep\ndata: 1234\n\n", 10), 0, 10, "stream_options"},
		{"text/plain", "data: no event" + strings.Repeat("\ntext", 77) + "\n", 0, 100, "no event has the number"},
		{"text/event-stream", "x: 1\n" + strings.Repeat("data: 1234\n\n", 10), 0, 10, "stream_options"},
		{"text/html", "<" + strings.Repeat("y", 399), 0, 100, "the body is no JSON"},
		{"image/png", strings.Repeat("{", 400), 0, 100, "bodies of type image/png"},
		{"multipart/byteranges; boundary=x", strings.Repeat("{", 400), 0, 100, "bodies of type multipart"},
	} {
		for _, size := range []int{1, 100, 1 << 20} {
			_, found, b := read(costOf(t, Tokens), http.Header{"Content-Type": {tc.kind}}, []byte(tc.body), size)
			if got := b.Estimate(tc.request); got != tc.want || found || !strings.Contains(b.Remedy(), tc.remedy) {
				t.Errorf("%s in pieces of %d: got %d, %t, %s; want %d", tc.kind, size, got, found, b.Remedy(), tc.want)
			}
		}
	}
}

// reference returns the sum of the last numbers of paths in valid JSON texts, or the sums of those
// of the elements of arrays, by a parser that reads them whole.
func reference(texts []byte, paths ...string) (units int64, found bool) {
	sums := make([]*big.Rat, len(paths))
	d := json.NewDecoder(bytes.NewReader(texts))
	d.UseNumber()
	for {
		var v any
		if d.Decode(&v) != nil {
			break
		}
		all, ok := v.([]any)
		if !ok {
			all = []any{v}
		}
		for i, path := range paths {
			var sum *big.Rat // nil without any number, or any but 0 if there was one before
			for _, v := range all {
				if n := numberAt(v, strings.Split(path, ".")); n != nil && (n.Sign() > 0 || sums[i] == nil && sum == nil) {
					if sum == nil {
						sum = new(big.Rat)
					}
					sum.Add(sum, n)
				}
			}
			if sum != nil {
				sums[i] = sum
			}
		}
	}
	sum := new(big.Rat)
	for _, n := range sums {
		if n != nil {
			found = true
			sum.Add(sum, n)
		}
	}
	return roundUp(sum), found
}

// numberAt returns the number at a path in a value, or nil.
func numberAt(v any, path []string) *big.Rat {
	for _, name := range path {
		object, _ := v.(map[string]any)
		v = object[name]
	}
	if n, ok := v.(json.Number); ok && len(n) <= maxText {
		if d, ok := parseDecimal(n.String()); ok {
			return d.rat()
		}
	}
	return nil
}

// TestDecimalSums guards that sums of numbers are exact, and those of more digits than are kept
// hardly more.
func TestDecimalSums(t *testing.T) {
	t.Parallel()
	for _, terms := range []string{
		"1 2 3", "0 0", "0 7", "7 0", "0.1 0.2", "1e17 1", "999999999999999999 1", "1e100 1e-100", "1e-100 1e100", "5 1e-100", "0.07 100 0.001",
		strings.Repeat("0.1 ", 1000), strings.Repeat("999999999999999999 ", 100), strings.Repeat("123456789e-9 1 ", 50),
	} {
		var sum decimal
		want := new(big.Rat)
		for text := range strings.FieldsSeq(terms) {
			n, ok := parseDecimal(text)
			if !ok {
				t.Fatal(text)
			}
			sum = sum.plus(n)
			want.Add(want, n.rat())
		}
		most := new(big.Rat).Mul(want, big.NewRat(1e15+1, 1e15))
		exact := want.Sign() == 0 || len(want.Num().String())+len(want.Denom().String()) < 18
		if got := sum.rat(); got.Cmp(want) < 0 || got.Cmp(most) > 0 || exact && got.Cmp(want) != 0 {
			t.Errorf("%.40s: got %s, want %s", terms, got, want)
		}
	}
}

// FuzzJSON guards that the numbers of a body are those that encoding/json finds in it, whatever
// the pieces in which it comes, and that nothing else does harm.
func FuzzJSON(f *testing.F) {
	files, _ := filepath.Glob("testdata/*")
	for _, file := range files {
		if body, err := os.ReadFile(file); err == nil && len(body) < 1000 {
			f.Add(body, uint8(7))
		}
	}
	for _, text := range []string{
		"data: {\"a\":1}\n\ndata: [DONE]\n\n: x\n\n", "x\rdata: [DONE]\n\ndata: {\"type\":\"message_stop\"}\n\nevent: a\n\n",
		`{"a":1,"b":{"c":2.5e1,"a":[1,{"a":3}]},"a":4}`, `[{"a":1},[{"a":9}],"x\"",{"b":{"c":0}}]`, `{"a":"\\","b":{"c":7}} {"a":1}`, `{"a":{"a":1},"b":{"b":{"c":3}}}`,
	} {
		f.Add([]byte(text), uint8(1))
	}
	cost := costOf(f, "json a b.c usage.total_tokens")
	f.Fuzz(func(t *testing.T, body []byte, size uint8) {
		h := http.Header{"Content-Type": {[]string{"", "text/event-stream", "application/json"}[size%3]}}
		whole, foundWhole, atOnce := read(cost, h, body, len(body)+1)
		got, found, pieces := read(cost, h, body, int(size)+1)
		if got != whole || found != foundWhole || pieces.SaysEnd() != atOnce.SaysEnd() || pieces.Estimate(0) != atOnce.Estimate(0) {
			t.Fatalf("in pieces of %d: got %d, %t, and %d, %t whole; they say that they end: %t, %t; the estimates are %d, %d",
				int(size)+1, got, found, whole, foundWhole, pieces.SaysEnd(), atOnce.SaysEnd(), pieces.Estimate(0), atOnce.Estimate(0))
		}
		text := bytes.TrimLeft(body, " \t\r\n")
		if len(text) == 0 || text[0] != '{' && text[0] != '[' || !json.Valid(body) || repeats(body) {
			return
		}
		if want, wantFound := reference(body, "a", "b.c", "usage.total_tokens"); got != want || found != wantFound {
			t.Errorf("%q: got %d, %t, want %d, %t", body, got, found, want, wantFound)
		}
	})
}

// repeats reports whether an object has a name twice. encoding/json keeps the last value
// then, and the scanner the last number.
func repeats(body []byte) bool {
	d := json.NewDecoder(bytes.NewReader(body))
	d.UseNumber()
	var value func() bool
	value = func() bool {
		token, err := d.Token()
		if err != nil {
			return false
		}
		open, _ := token.(json.Delim)
		names := make(map[string]bool)
		for (open == '{' || open == '[') && d.More() {
			if open == '{' {
				name, _ := d.Token()
				if text, _ := name.(string); names[text] {
					return true
				} else {
					names[text] = true
				}
			}
			if value() {
				return true
			}
		}
		if open == '{' || open == '[' {
			_, _ = d.Token()
		}
		return false
	}
	return value()
}
