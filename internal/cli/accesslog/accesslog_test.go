package accesslog

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/filetest"
)

// caddyLog is a line as Caddy 2.11 writes it.
const caddyLog = `{"level":"info","ts":1700000000.1234567,"logger":"http.log.access.log0","msg":"handled request","request":{"remote_ip":"192.0.2.9","remote_port":"40000","client_ip":"192.0.2.1","proto":"HTTP/2.0","method":"GET","host":"example.com","uri":"/search?q=caf%C3%A9","headers":{"User-Agent":["Mozilla/5.0 (X11; Linux x86_64; rv:143.0) Gecko/20100101 Firefox/143.0"],"Accept":["text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"],"Accept-Encoding":["gzip, deflate, br, zstd"],"Sec-Ch-Ua":["\"Chromium\";v=\"140\""],"Cookie":["REDACTED"],"Sec-Fetch-Mode":["navigate"]},"tls":{"resumed":false,"version":772,"cipher_suite":4865,"proto":"h2","server_name":"example.com","ech":false}},"bytes_read":0,"user_id":"alice","duration":0.0234567,"size":1234,"status":200,"resp_headers":{"Server":["Caddy"],"Content-Type":["text/html; charset=utf-8"],"X-Ratelimit-Limit":["10"],"Date":["Tue, 14 Nov 2023 22:13:20 GMT"]}}`

const (
	commonLog   = `192.0.2.1 - alice [14/Nov/2023:22:13:20 +0000] "GET /search?q=x HTTP/1.1" 200 1234`
	combinedLog = commonLog + ` "https://example.com/" "Mozilla/5.0 \"quoted\" \x41"`
)

// readAll returns all requests of logs with the given contents.
func readAll(t testing.TB, format Format, contents ...string) (*Log, []Entry) {
	t.Helper()
	names := make([]string, len(contents))
	for i, text := range contents {
		names[i] = filepath.Join(t.TempDir(), fmt.Sprint(i))
		filetest.Write(t, names[i], []byte(text))
	}
	l, err := Open(names, format)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	var all []Entry
	for {
		e, err := l.Next()
		if err != nil {
			if !errors.Is(err, io.EOF) {
				t.Fatal(err)
			}
			return l, all
		}
		all = append(all, *e)
	}
}

// TestFormats guards what is read of a line in each format.
func TestFormats(t *testing.T) {
	for _, tc := range []struct {
		name, line, want string
		header           http.Header
	}{
		{
			"json", caddyLog,
			"2023-11-14T22:13:20.1Z GET https example.com /search q=caf%C3%A9 HTTP/2.0 192.0.2.1 192.0.2.9:40000 alice 200",
			http.Header{
				"User-Agent":      {"Mozilla/5.0 (X11; Linux x86_64; rv:143.0) Gecko/20100101 Firefox/143.0"},
				"Accept":          {"text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"},
				"Accept-Encoding": {"gzip, deflate, br, zstd"},
				"Sec-Ch-Ua":       {`"Chromium";v="140"`},
				"Cookie":          {"REDACTED"},
				"Sec-Fetch-Mode":  {"navigate"},
			},
		},
		{
			"json with white space", strings.ReplaceAll(caddyLog, `":`, `" : `),
			"2023-11-14T22:13:20.1Z GET https example.com /search q=caf%C3%A9 HTTP/2.0 192.0.2.1 192.0.2.9:40000 alice 200", nil,
		},
		{"common", commonLog, "2023-11-14T22:13:20Z GET http  /search q=x HTTP/1.1 192.0.2.1 192.0.2.1: alice 200", http.Header{}},
		{
			"combined", combinedLog, "2023-11-14T22:13:20Z GET http  /search q=x HTTP/1.1 192.0.2.1 192.0.2.1: alice 200",
			http.Header{"Referer": {"https://example.com/"}, "User-Agent": {`Mozilla/5.0 "quoted" A`}},
		},
		{
			"HTTP/2 without a minor version", strings.Replace(commonLog, "HTTP/1.1", "HTTP/2", 1),
			"2023-11-14T22:13:20Z GET http  /search q=x HTTP/2.0 192.0.2.1 192.0.2.1: alice 200", nil,
		},
		{
			"IPv6 and no user", `2001:db8::1 - - [14/Nov/2023:23:13:20 +0100] "POST / HTTP/2.0" 429 -`,
			"2023-11-14T22:13:20Z POST http  /  HTTP/2.0 2001:db8::1 2001:db8::1: - 429", nil,
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			l, all := readAll(t, Auto, tc.line+"\r\n")
			if len(all) != 1 {
				_, _, skipped := l.Counts()
				t.Fatalf("got %d requests, skipped %v, want one", len(all), skipped)
			}
			e := &all[0]
			scheme, user := "http", e.UserID
			if e.TLS {
				scheme = "https"
			}
			if user == "" {
				user = "-"
			}
			got := fmt.Sprintf("%s %s %s %s %s %s %s %s %s:%s %s %d",
				time.Unix(0, e.Arrival).UTC().Truncate(time.Millisecond).Format(time.RFC3339Nano), e.Method, scheme, e.Host, e.URL.Path, e.URL.RawQuery,
				e.Proto, e.ClientIP, e.RemoteIP, e.RemotePort, user, e.Status)
			if got != tc.want {
				t.Errorf("got  %s\nwant %s", got, tc.want)
			}
			if tc.header != nil && !maps.EqualFunc(e.Header, tc.header, slices.Equal) {
				t.Errorf("header %q, want %q", e.Header, tc.header)
			}
		})
	}
}

// TestClients guards which of the fields before the time is the client, and that a line
// in which that is not known is not used.
func TestClients(t *testing.T) {
	const unclear = "several fields that may be the client's address"
	for _, tc := range []struct{ fields, want string }{
		{"192.0.2.1 - alice", "192.0.2.1 alice"},
		{"192.0.2.1 - alice smith", "192.0.2.1 alice smith"},
		{"192.0.2.1 - 203.0.113.7", "192.0.2.1 203.0.113.7"},
		{"192.0.2.1 example.com -", "192.0.2.1 "},
		{"192.0.2.1:5000 - -", "192.0.2.1 port 5000 "},
		{"2001:db8::1 - -", "2001:db8::1 "},
		{"[2001:db8::1] - -", "2001:db8::1 "},
		{"[2001:db8::1]:5000 - -", "2001:db8::1 port 5000 "},
		{"client.example.net - alice", "client.example.net alice"},
		{"- - -", " "},
		{"@ - -", "@ "},

		{"example.com:443 192.0.2.1 - alice", "https://example.com 192.0.2.1 alice"},
		{"example.com:80 192.0.2.1 - -", "http://example.com 192.0.2.1 "},
		{"example.com:8080 2001:db8::1 - -", "http://example.com:8080 2001:db8::1 "},
		{"example.com 192.0.2.1 - -", "http://example.com 192.0.2.1 "},
		{"example.com:443 client.example.net - -", "https://example.com client.example.net "},
		{"example.com:443 - - -", "https://example.com  "},
		{"example.com:443 203.0.113.7, 192.0.2.1 - -", "https://example.com 203.0.113.7 of several "},
		{"- 192.0.2.1 - -", "192.0.2.1 "},

		{"203.0.113.7, 192.0.2.1 - alice", "203.0.113.7 of several alice"},
		{"203.0.113.7,192.0.2.1 - alice", "203.0.113.7 of several alice"},
		{"unknown, 192.0.2.1, 192.0.2.2 - -", "192.0.2.1 of several "},
		{`"203.0.113.7, 192.0.2.1" - alice`, "203.0.113.7 of several alice"},

		{"203.0.113.7 192.0.2.1 - -", unclear},
		{"203.0.113.7, 192.0.2.2 192.0.2.1 - -", unclear},
		{`"203.0.113.7" 192.0.2.1 - -`, unclear},
		{"192.0.2.80:80 192.0.2.1 - -", unclear},
		{"example.com 203.0.113.7 192.0.2.1 - -", unclear},
		{"a b 192.0.2.1 - -", unclear},
		{"web_1   | 192.0.2.1 - -", unclear},
		{"192.0.2.1 (203.0.113.7) - -", unclear},
		{"192.0.2.1 xff=203.0.113.7 - -", unclear},
		{"192.0.2.1", "not in the format of the log"},
		{"192.0.2.1,", "not in the format of the log"},
	} {
		_, rest, _ := strings.Cut(combinedLog, " alice")
		var e Entry
		reason := (&dialect{format: Combined}).parseCLF([]byte(tc.fields+rest), &e, new(clfClock))
		got := e.ClientIP
		if e.Host != "" {
			got = map[bool]string{false: "http://", true: "https://"}[e.TLS] + e.Host + " " + got
		}
		if e.RemotePort != "" {
			got += " port " + e.RemotePort
		}
		if e.Forwarded {
			got += " of several"
		}
		if got += " " + e.UserID; reason != Used {
			got = reason.String()
		}
		if got != tc.want {
			t.Errorf("%s: got %q, want %q", tc.fields, got, tc.want)
		}
	}
}

// TestClientsUnknown guards that a log is refused by one line if of most of its lines it
// is not known which field is the client's, and read if it is of few.
func TestClientsUnknown(t *testing.T) {
	const other = "192.0.2.9 " + combinedLog + "\n"
	for _, tc := range []struct {
		name, text string
		refused    bool
	}{
		{"one line", other, true},
		{"many", strings.Repeat(other, 5000), true},
		{"most", combinedLog + "\n" + other + other, true},
		{"few", combinedLog + "\n" + combinedLog + "\n" + other, false},
		{"none", combinedLog + "\n", false},
	} {
		name := filepath.Join(t.TempDir(), "log")
		filetest.Write(t, name, []byte(tc.text))
		l, err := Open([]string{name}, Auto)
		if err == nil {
			l.Close()
		}
		if (err != nil) != tc.refused || err != nil && (strings.Contains(err.Error(), "\n") ||
			!strings.HasPrefix(err.Error(), name+`: lines begin with "192.0.2.9 192.0.2.1 - alice", of which`)) {
			t.Errorf("%s: got error %v, refused=%t", tc.name, err, tc.refused)
		}
	}
}

// TestResponses guards what is read of the response in each format, or that the log does
// not tell.
func TestResponses(t *testing.T) {
	const header = `map[Content-Type:[text/html; charset=utf-8] Date:[Tue, 14 Nov 2023 22:13:20 GMT] Server:[Caddy] X-Ratelimit-Limit:[10]]`
	without := func(member string) string {
		return strings.Replace(caddyLog, fmt.Sprintf("%q:", member), `"other":`, 1)
	}
	for _, tc := range []struct{ name, line, want string }{
		{"json", caddyLog, "200, 1234 bytes in 23.4567ms, " + header},
		{"json with white space", strings.ReplaceAll(caddyLog, `":`, `" : `), "200, 1234 bytes in 23.4567ms, " + header},
		{"json without a size", without("size"), "200, -1 bytes in 23.4567ms, " + header},
		{"json with a size that is none", strings.Replace(caddyLog, "1234,", `"REDACTED",`, 1), "200, -1 bytes in 23.4567ms, " + header},
		{"json with a negative size", strings.Replace(caddyLog, "1234,", `-1,`, 1), "200, -1 bytes in 23.4567ms, " + header},
		{"json without a duration", without("duration"), "200, 1234 bytes in -1ns, " + header},
		{"json without a status", without("status"), "0, 1234 bytes in 23.4567ms, " + header},
		{"json without a header", without("resp_headers"), "200, 1234 bytes in 23.4567ms, no header"},
		{"json with a header that is none", strings.Replace(caddyLog, `"resp_headers":{`, `"resp_headers":5,"x":{`, 1), "200, 1234 bytes in 23.4567ms, no header"},
		{"common", commonLog, "200, 1234 bytes in -1ns, no header"},
		{"common without a body", strings.Replace(commonLog, "1234", "-", 1), "200, 0 bytes in -1ns, no header"},
		{"common without a length", strings.TrimSuffix(commonLog, " 1234"), "200, -1 bytes in -1ns, no header"},
		{"common with something behind", commonLog + " x", "200, 1234 bytes in -1ns, no header"},
		{"combined", combinedLog, "200, 1234 bytes in -1ns, no header"},
	} {
		_, all := readAll(t, Auto, tc.line+"\n")
		if len(all) != 1 {
			t.Errorf("%s: got %d requests", tc.name, len(all))
			continue
		}
		e := &all[0]
		header := "no header"
		if h := e.ResponseHeader(); h != nil {
			header = fmt.Sprint(h)
		}
		if got := fmt.Sprintf("%d, %d bytes in %v, %s", e.Status, e.Bytes, time.Duration(e.Duration), header); got != tc.want {
			t.Errorf("%s:\ngot  %s\nwant %s", tc.name, got, tc.want)
		}
	}
}

// TestTimes guards that the time at which requests arrived is read with each
// time_format and duration_format of Caddy.
func TestTimes(t *testing.T) {
	const want = "2023-11-14T22:13:20.1Z"
	for _, tc := range []struct{ ts, duration, want string }{
		{`1700000000.123`, `0.023`, want},
		{`1700000000123`, `"23ms"`, want},
		{`1700000000123.0`, `23`, want},
		{`1700000000123456789`, `23456789`, want},
		{`1.700000000123e9`, `0.023`, "2023-11-14T22:13:19Z"}, // an exponent: whole seconds
		{`"2023-11-14T22:13:20.123Z"`, `23`, want},
		{`"2023-11-14T23:13:20.123+0100"`, `23`, want},
		{`"2023/11/14 22:13:20.123"`, `0.023`, want},
		{`"2023-11-14T22:13:20.123456789Z"`, `23456789`, want},
		{`"2023-11-14T22:13:20Z"`, `0.023`, "2023-11-14T22:13:19Z"}, // whole seconds
		{`"14/Nov/2023:22:13:20 +0000"`, `0`, "2023-11-14T22:13:20Z"},
		{`"yesterday"`, `0.023`, ""},
		{`-5`, `0.023`, ""},
		{`17`, `0.023`, ""},
		{`null`, `0.023`, ""},
		{`1700000000.123`, `"soon"`, ""},
	} {
		line := strings.Replace(strings.Replace(caddyLog, `1700000000.1234567`, tc.ts, 1), `0.0234567`, tc.duration, 1)
		l, all := readAll(t, Auto, line)
		got := ""
		if len(all) == 1 {
			got = time.Unix(0, all[0].Arrival).UTC().Truncate(time.Millisecond).Format(time.RFC3339Nano)
		}
		if got != tc.want {
			t.Errorf("ts %s, duration %s: got %q, want %q", tc.ts, tc.duration, got, tc.want)
		}
		if _, _, skipped := l.Counts(); tc.want == "" && !maps.Equal(skipped, map[Reason]int64{NoTime: 1}) {
			t.Errorf("ts %s, duration %s: skipped %v", tc.ts, tc.duration, skipped)
		}
	}
}

// TestReasons guards that each line that can't be used is counted by its reason,
// and that the lines around it are used.
func TestReasons(t *testing.T) {
	for _, tc := range []struct {
		name, good, line string
		want             Reason
	}{
		{"not JSON", caddyLog, `{"level":"info"`, BadJSON},
		{"text in JSON", caddyLog, commonLog, BadJSON},
		{"other log", caddyLog, `{"level":"info","ts":1700000000.1,"msg":"serving initial configuration"}`, NotAccess},
		{"error log", caddyLog, strings.Replace(caddyLog, "http.log.access.log0", "http.log.error.log0", 1), NotAccess},
		{"wrong type", caddyLog, strings.Replace(caddyLog, `"GET"`, `5`, 1), NotAccess},
		{"no time", caddyLog, strings.Replace(caddyLog, `"ts":`, `"x":`, 1), NoTime},
		{"bad URI", caddyLog, strings.Replace(caddyLog, `/search?q=caf%C3%A9`, `/%zz`, 1), BadURI},
		{"relative URI", caddyLog, strings.Replace(caddyLog, `/search?q=caf%C3%A9`, `search`, 1), BadURI},
		{"too long", caddyLog, strings.Replace(caddyLog, "alice", strings.Repeat("x", maxLine), 1), TooLong},
		{"much too long", caddyLog, strings.Replace(caddyLog, "alice", strings.Repeat("x", 3*maxLine), 1), TooLong},
		{"too early", caddyLog, strings.Replace(caddyLog, "0.0234567", "1e3", 1), Used},
		{"no format", combinedLog, `what is this`, BadLine},
		{"no status", combinedLog, strings.Replace(combinedLog, `200`, `x`, 1), BadLine},
		{"bad time", combinedLog, strings.Replace(combinedLog, `14/Nov`, `34/Nov`, 1), NoTime},
		{"empty time", combinedLog, strings.Replace(combinedLog, `14/Nov/2023:22:13:20 +0000`, ``, 1), NoTime},
		{"no request", combinedLog, strings.Replace(combinedLog, `GET /search?q=x HTTP/1.1`, `-`, 1), BadRequest},
		{"TLS to an HTTP port", combinedLog, strings.Replace(combinedLog, `GET /search?q=x HTTP/1.1`, `\x16\x03\x01 \x00 x`, 1), BadRequest},
		{"HTTP/0.9", combinedLog, strings.Replace(combinedLog, ` HTTP/1.1`, ``, 1), BadRequest},
	} {
		t.Run(tc.name, func(t *testing.T) {
			l, all := readAll(t, Auto, tc.good+"\n"+tc.line+"\n\n"+tc.good+"\n")
			want := map[Reason]int64{tc.want: 1}
			if tc.want == Used {
				want = map[Reason]int64{}
			}
			lines, used, skipped := l.Counts()
			if !maps.Equal(skipped, want) || lines != 3 || used != int64(3-len(want)) || len(all) != int(used) {
				t.Errorf("got %d requests of %d lines, used %d, skipped %v, want %v", len(all), lines, used, skipped, want)
			}
		})
	}
}

// at is a line of a request that ended at a time after taking a while, both in
// seconds.
func at(uri string, end, duration float64) string {
	line := strings.Replace(caddyLog, "1700000000.1234567", fmt.Sprintf("%.6f", 1.7e9+end), 1)
	line = strings.Replace(line, "0.0234567", fmt.Sprintf("%.6f", duration), 1)
	return strings.Replace(line, "/search?q=caf%C3%A9", "/"+uri, 1) + "\n"
}

// uris returns the URIs of entries.
func uris(all []Entry) string {
	var text strings.Builder
	for i := range all {
		text.WriteString(strings.TrimPrefix(all[i].URI, "/"))
	}
	return text.String()
}

// TestOrder guards that requests are returned in the order in which they arrived,
// over all logs and however these are named, although logs have them in the order
// in which they ended.
func TestOrder(t *testing.T) {
	for _, tc := range []struct {
		name string
		logs []string
		want string
		late int64
	}{
		{"by arrival", []string{at("b", 10, 1) + at("c", 11, 1.5) + at("a", 12, 11.9)}, "abc", 0},
		{"equal", []string{at("a", 10, 1) + at("b", 10, 1) + at("c", 10, 1)}, "abc", 0},
		{"rolled, newest first", []string{at("c", 400, 0) + at("d", 500, 0), at("a", 1, 0) + at("b", 2, 0)}, "abcd", 0},
		{"at the same time", []string{at("a", 1, 0) + at("c", 3, 0), at("b", 2, 0) + at("d", 4, 0)}, "abcd", 0},
		{"an empty log", []string{"", at("a", 1, 0)}, "a", 0},
		{"a websocket of an hour", []string{at("a", 1, 0) + at("b", 2, 0) + at("c", 3000, 0) + at("d", 3400, 0) + at("x", 3600, 3600)}, "abcd", 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			l, all := readAll(t, Auto, tc.logs...)
			_, _, skipped := l.Counts()
			if got := uris(all); got != tc.want || skipped[Late] != tc.late {
				t.Errorf("got %s, %v, want %s, %d late", got, skipped, tc.want, tc.late)
			}
		})
	}
}

// TestWholeSeconds guards that requests of a log with whole seconds arrive at the
// start of their second and are spread over it.
func TestWholeSeconds(t *testing.T) {
	next := strings.Replace(commonLog, ":20 +", ":21 +", 1)
	l, all := readAll(t, Auto, strings.Repeat(commonLog+"\n", 4)+next+"\n")
	if l.Exact() {
		t.Error("the log is exact")
	}
	var got []string
	for _, e := range all {
		got = append(got, time.Unix(0, e.Arrival).UTC().Format(".00 5")+" "+time.Unix(0, e.Spread).UTC().Format("5.00"))
	}
	if want := ".00 20 20.00,.00 20 20.25,.00 20 20.50,.00 20 20.75,.00 21 21.00"; strings.Join(got, ",") != want {
		t.Errorf("got  %s\nwant %s", strings.Join(got, ","), want)
	}
}

// TestCompressed guards that compressed logs are read, also to where one that was
// cut off ends, which is reported.
func TestCompressed(t *testing.T) {
	var lines strings.Builder
	for i := range 5000 {
		lines.WriteString(at(fmt.Sprintf("%d", i), float64(i), 0))
	}
	var gz, zs bytes.Buffer
	z := gzip.NewWriter(&gz)
	io.WriteString(z, lines.String())
	z.Close()
	zw, _ := zstd.NewWriter(&zs)
	io.WriteString(zw, lines.String())
	zw.Close()
	for _, tc := range []struct {
		name, content string
		least, most   int
		problem       string
	}{
		{"plain", lines.String(), 5000, 5000, ""},
		{"gzip", gz.String(), 5000, 5000, ""},
		{"two members", gz.String() + gz.String(), 5001, 5400, ""}, // most of the second is late
		{"zstd", zs.String(), 5000, 5000, ""},
		{"gzip cut off", gz.String()[:gz.Len()/2], 500, 4999, "unexpected EOF"},
		{"zstd cut off", zs.String()[:zs.Len()-20], 0, 4999, "unexpected EOF"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			l, all := readAll(t, Auto, tc.content)
			problems := strings.Join(l.Problems(), ",")
			if n := len(all); n < tc.least || n > tc.most || (problems != "") != (tc.problem != "") || !strings.Contains(problems, tc.problem) {
				t.Errorf("got %d requests, problems %q", n, problems)
			}
			if read, size := l.Progress(); tc.problem == "" && (read != size || size != int64(len(tc.content))) {
				t.Errorf("read %d of %d bytes, want %d", read, size, len(tc.content))
			}
		})
	}
	if _, err := Open([]string{filepath.Join(t.TempDir(), "missing")}, Auto); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a missing log: got error %v", err)
	}
	if _, err := Open([]string{t.TempDir()}, Auto); err == nil || !strings.Contains(err.Error(), "directory") {
		t.Errorf("a directory: got error %v", err)
	}
}

// TestPipes guards that what can be read only once, as a shell's <(command), is read
// from its beginning.
func TestPipes(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("pipes have no names here")
	}
	var lines strings.Builder
	const n = 5000
	for i := range n {
		lines.WriteString(at(fmt.Sprintf("%d", i), float64(i), 0))
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	go func() {
		io.WriteString(w, lines.String())
		w.Close()
	}()
	l, err := Open([]string{fmt.Sprintf("/dev/fd/%d", r.Fd())}, Auto)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for ; err == nil; _, err = l.Next() {
	}
	if lines, used, _ := l.Counts(); lines != n || used != n || len(l.Problems()) > 0 {
		t.Errorf("used %d of %d lines, problems %q, want %d", used, lines, l.Problems(), n)
	}
	if read, size := l.Progress(); read != 0 || size != 0 {
		t.Errorf("read %d of %d bytes, want neither to be known", read, size)
	}
}

// BenchmarkCaddy measures reading lines as Caddy writes them, 1 kB each.
func BenchmarkCaddy(b *testing.B) {
	benchmark(b, func(i int) string { return at("search?q=caf%C3%A9", float64(i)/1000, 0.02) })
}

// BenchmarkCombined measures reading lines of the combined log format.
func BenchmarkCombined(b *testing.B) {
	benchmark(b, func(int) string { return combinedLog + "\n" })
}

func benchmark(b *testing.B, line func(i int) string) {
	name := filepath.Join(b.TempDir(), "log")
	var text bytes.Buffer
	for i := range b.N {
		text.WriteString(line(i))
	}
	filetest.Write(b, name, text.Bytes())
	b.SetBytes(int64(text.Len() / b.N))
	b.ReportAllocs()
	b.ResetTimer()
	l, err := Open([]string{name}, Auto)
	if err != nil {
		b.Fatal(err)
	}
	n := 0
	for {
		if _, err := l.Next(); err != nil {
			break
		}
		n++
	}
	if n != b.N {
		b.Fatalf("got %d requests, want %d", n, b.N)
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "lines/s")
}

// TestUnits guards that what limits have charged is read from the line of a request, as Caddy
// writes it and otherwise.
func TestUnits(t *testing.T) {
	with := func(logged string) string { return strings.TrimSuffix(caddyLog, "}") + `,"rate_limit":` + logged + "}" }
	for _, tc := range []struct{ line, want string }{
		{caddyLog, "map[]"},
		{with(`{"result":"admitted","limit":"a","remaining":4,"units":{"a":3,"a/b":120}}`), "map[a:3 a/b:120]"},
		{with(`{ "units" : {"a": 3} }`), "map[a:3]"},
		{with(`{"result":"denied"}`), "map[]"},
		{with(`{"units":{"a":"x"}}`), "map[]"},
		{with(`5`), "map[]"},
	} {
		_, all := readAll(t, Auto, tc.line+"\n")
		if len(all) != 1 || fmt.Sprint(all[0].Units()) != tc.want {
			t.Errorf("%s: got %d lines, want one with %s", tc.line, len(all), tc.want)
		}
	}
}
