package redisscript

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"reflect"
	"regexp"
	"runtime/metrics"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// playedConn is a connection on which a stream arrives in pieces of any size.
type playedConn struct {
	net.Conn
	stream []byte
	random *rand.Rand // nil: all at once
}

func (c *playedConn) Read(b []byte) (int, error) {
	if len(c.stream) == 0 {
		return 0, io.EOF
	}
	n := len(b)
	if c.random != nil {
		n = min(n, 1+c.random.IntN(pick(c.random, 1, 3, 20, 500)))
	}
	n = copy(b[:n], c.stream)
	c.stream = c.stream[n:]
	return n, nil
}

func (*playedConn) Write(b []byte) (int, error)      { return len(b), nil }
func (*playedConn) Close() error                     { return nil }
func (*playedConn) SetDeadline(time.Time) error      { return nil }
func (*playedConn) SetReadDeadline(time.Time) error  { return nil }
func (*playedConn) SetWriteDeadline(time.Time) error { return nil }
func (*playedConn) RemoteAddr() net.Addr             { return &net.TCPAddr{} }

// played is the number of replies that a client reads.
const played = 3

// play returns the replies that the client reads from a stream, and its error if
// it failed.
func play(stream []byte, random *rand.Rand, bounded bool) (replies []any, err error) {
	var conn net.Conn = &playedConn{stream: append([]byte("*0\r\n"), stream...), random: random}
	if bounded {
		conn = &boundedConn{Conn: conn}
	}
	opt := (&Options{Addresses: []string{"x:1"}, Timeout: time.Second}).client().Simple()
	opt.Dialer = func(context.Context, string, string) (net.Conn, error) { return conn, nil }
	client := redis.NewClient(opt)
	defer client.Close()
	cmds, _ := client.Pipelined(context.Background(), func(p redis.Pipeliner) error {
		for range played {
			p.Do(context.Background(), "x")
		}
		return nil
	})
	for _, cmd := range cmds {
		if e := cmd.Err(); e != nil {
			if _, replied := e.(redis.Error); !replied { // a reply within is the client's word
				return nil, e
			}
			replies = append(replies, "error "+e.Error())
			continue
		}
		replies = append(replies, cmd.(*redis.Cmd).Val())
	}
	return replies, nil
}

// writeReply writes a reply of any type that servers may send.
func writeReply(random *rand.Rand, b *bytes.Buffer, depth int) {
	text := func(n int) []byte {
		s := make([]byte, random.IntN(n))
		for i := range s {
			s[i] = "\r\n*$:+-|%09aé"[random.IntN(13)]
		}
		return s
	}
	line := func() string {
		return strings.NewReplacer("\r", "r", "\n", "n").Replace(string(text(30)))
	}
	number := func() int64 { return random.Int64() >> random.IntN(63) * int64(1-2*random.IntN(2)) }
	if depth < 3 && random.IntN(12) == 0 {
		n := random.IntN(3)
		fmt.Fprintf(b, "|%d\r\n", n)
		for range 2 * n {
			writePlain(b, text(20))
		}
	}
	kinds := 13
	if depth >= maxDepth-2 {
		kinds = 9
	}
	switch random.IntN(kinds) {
	case 0:
		fmt.Fprintf(b, "+%s\r\n", line())
	case 1:
		fmt.Fprintf(b, "-ERR %s\r\n", line())
	case 2:
		fmt.Fprintf(b, ":%d\r\n", number())
	case 3:
		writePlain(b, text(300))
	case 4:
		b.WriteString(pick(random, "$-1\r\n", "*-1\r\n", "_\r\n ", "$0\r\n\r\n", "*0\r\n", "%0\r\n", "~0\r\n")[:])
		if bytes.HasSuffix(b.Bytes(), []byte(" ")) {
			b.Truncate(b.Len() - len("_\r\n "))
			b.WriteString("$-1\r\n")
		}
	case 5:
		b.WriteString(pick(random, ",1.5\r\n", ",inf\r\n", ",-inf\r\n", "#t\r\n", "#f\r\n", "(123456789012345678901234567890\r\n"))
	case 6:
		s := text(50)
		fmt.Fprintf(b, "=%d\r\ntxt:%s\r\n", len(s)+4, s)
	case 7:
		s := text(50)
		fmt.Fprintf(b, "!%d\r\n%s\r\n", len(s), s)
	case 8:
		fmt.Fprintf(b, "%s%05d\r\n%s\r\n", "$", 3, "abc")
	case 9, 10, 11:
		n := random.IntN(4)
		fmt.Fprintf(b, "%c%d\r\n", "*~*>"[random.IntN(2)], n)
		for range n {
			writeReply(random, b, depth+1)
		}
	case 12:
		n := random.IntN(3)
		fmt.Fprintf(b, "%%%d\r\n", n)
		for i := range n {
			fmt.Fprintf(b, "+%d\r\n", i)
			writeReply(random, b, depth+1)
		}
	}
}

func writePlain(b *bytes.Buffer, s []byte) { fmt.Fprintf(b, "$%d\r\n%s\r\n", len(s), s) }

// TestValidRepliesPass guards that valid replies pass unchanged, of all types and
// in pieces of any size.
func TestValidRepliesPass(t *testing.T) {
	types := map[byte]int{}
	for seed := range uint64(3000) {
		random := rand.New(rand.NewPCG(seed, 3))
		var b bytes.Buffer
		for range played {
			writeReply(random, &b, 0)
		}
		want, err := play(b.Bytes(), nil, false)
		if err != nil {
			t.Fatalf("the client itself does not accept %q: %v", b.Bytes(), err)
		}
		got, err := play(b.Bytes(), random, true)
		if err != nil || !alike(got, want) {
			t.Fatalf("%q: got %v, error %v, want %v", b.Bytes(), got, err, want)
		}
		types[b.Bytes()[0]]++
	}
	if len(types) < 12 {
		t.Errorf("only %d types of replies", len(types))
	}
}

// alike reports whether two replies are equal, including NaN.
func alike(a, b any) bool { return reflect.DeepEqual(a, b) || fmt.Sprint(a) == fmt.Sprint(b) }

// TestLargestRepliesPass guards that the largest replies to anything sent here
// pass.
func TestLargestRepliesPass(t *testing.T) {
	var slots, groups bytes.Buffer
	fmt.Fprintf(&slots, "*16384\r\n")
	for i := range 16384 {
		fmt.Fprintf(&slots, "*5\r\n:%d\r\n:%d\r\n", i, i)
		for range 3 {
			fmt.Fprintf(&slots, "*4\r\n$15\r\n192.168.100.100\r\n:6379\r\n$40\r\n%040d\r\n*4\r\n+hostname\r\n$30\r\n%030d\r\n+ip\r\n$5\r\n1.1.1\r\n", i, i)
		}
	}
	fmt.Fprintf(&groups, "*%d\r\n", 4*65535)
	for range 4 * 65535 {
		fmt.Fprintf(&groups, ":%d\r\n", int64(1)<<52)
	}
	for name, b := range map[string][]byte{"slots": slots.Bytes(), "buckets": groups.Bytes()} {
		var s replyScanner
		for piece := range slices.Chunk(append(b, b...), 32<<10) {
			if err := s.scan(piece); err != nil {
				t.Fatalf("%s, %d bytes: error %v", name, len(b), err)
			}
		}
		if s != (replyScanner{kind: s.kind, n: s.n, digits: s.digits, left: s.left}) {
			t.Errorf("%s: after the last reply it is at %+v", name, s)
		}
	}
}

// hugeReplies are the beginnings of replies that claim to be larger than the
// bounds.
var hugeReplies = map[string]string{
	"array":                  "*400000000\r\n",
	"array beyond an int":    "*" + strings.Repeat("9", 100) + "\r\n",
	"array just too long":    fmt.Sprintf("*%d\r\n", maxElements+1),
	"set":                    "~400000000\r\n",
	"map":                    "%300000\r\n",
	"push":                   ">400000000\r\n",
	"attribute":              "|400000000\r\n",
	"string":                 "$2000000000\r\n",
	"error":                  "!2000000000\r\n",
	"verbatim":               "=2000000000\r\n",
	"array in an array":      "*3\r\n:1\r\n:2\r\n*400000000\r\n",
	"many arrays":            "*1000\r\n" + strings.Repeat("*1000\r\n"+strings.Repeat(":1\r\n", 1000), 1000),
	"behind an attribute":    "|1\r\n+a\r\n+b\r\n*400000000\r\n",
	"behind a reply":         ":1\r\n*400000000\r\n",
	"deep":                   strings.Repeat("*1\r\n", 100_000),
	"deep attributes":        strings.Repeat("|1\r\n", 100_000),
	"attribute in attribute": "|1\r\n|1\r\n+a\r\n+b\r\n+c\r\n+d\r\n:1\r\n",
	"many attributes":        strings.Repeat("|0\r\n", 100_000),
	"line":                   "+" + strings.Repeat("a", maxReply+100_000),
}

// TestInvalidRepliesAreRejected guards what is rejected: lengths that are too
// large, as soon as they are read and in whatever pieces, and data that is not a
// reply.
func TestInvalidRepliesAreRejected(t *testing.T) {
	check := func(t *testing.T, stream string, want error) {
		t.Helper()
		for _, size := range []int{1, 7, 4096, len(stream)} {
			if size == 1 && len(stream) > 1_000_000 {
				continue
			}
			c := &boundedConn{Conn: &playedConn{}}
			var err error
			for piece := range slices.Chunk([]byte(stream), size) {
				c.Conn.(*playedConn).stream = piece
				if _, err = c.Read(make([]byte, size)); err != nil {
					break
				}
			}
			if !errors.Is(err, want) {
				t.Errorf("pieces of %d: error %v, want %v", size, err, want)
			}
			if _, again := c.Read(make([]byte, size)); err != nil && again != err {
				t.Errorf("then error %v", again)
			}
		}
	}
	for name, stream := range hugeReplies {
		t.Run(name, func(t *testing.T) { check(t, stream, errReplyTooLarge) })
	}
	for _, stream := range []string{
		"\r\n", "\n", "hello\r\n", "*\r\n", "$\r\n", "*-2\r\n", "$-5\r\n", "*1a\r\n", "*+-1\r\n", "*--1\r\n", "*1-\r\n", "$?\r\n", "*?\r\n",
		"*1\n:1\r\n", "*1\r:1\r\n", "\x15\x03\x01\x00\x02\x02\x46",
	} {
		t.Run(fmt.Sprintf("%q", stream), func(t *testing.T) { check(t, stream, errReplyMalformed) })
	}
}

// allocated returns the number of bytes ever allocated.
func allocated() uint64 {
	sample := []metrics.Sample{{Name: "/gc/heap/allocs:bytes"}}
	metrics.Read(sample)
	return sample[0].Value.Uint64()
}

// TestHugeReplies guards against a server, or an impostor, that sends a huge
// reply: to a call, to the handshake, as the slots of a cluster or as a sentinel.
// It costs neither memory nor time, and the log says why.
func TestHugeReplies(t *testing.T) {
	for _, tc := range []struct {
		to     string // the command
		change func(*Options)
	}{
		{"evalsha", nil},
		{"evalsha_ro", nil},
		{"hello", nil},
		{"cluster", func(opt *Options) { opt.Cluster = true }},
		{"sentinel", func(opt *Options) { opt.MasterName = "m" }},
	} {
		for _, what := range []string{"array", "string", "array in an array", "deep"} {
			t.Run(tc.to+","+what, func(t *testing.T) {
				addr := fakeServer(t, func(command string) string {
					if command == tc.to {
						return hugeReplies[what]
					}
					return ""
				})
				if tc.to == "hello" {
					addr = tcpServer(t, func(c *net.TCPConn) {
						defer c.Close()
						if _, err := c.Read(make([]byte, 4096)); err == nil {
							_, _ = io.WriteString(c, hugeReplies[what])
							_, _ = c.Read(make([]byte, 1))
						}
					})
				}
				var seen events
				r := newTestClient(t, nil, func(opt *Options) {
					opt.Addresses, opt.Timeout, opt.Report = []string{addr}, time.Second, seen.report
					if tc.change != nil {
						tc.change(opt)
					}
				})
				before, began := allocated(), time.Now()
				var err error
				for range openAfter {
					_, err = r.count(t.Context(), upTo(10))
				}
				if err == nil {
					t.Error("counted")
				}
				if took := time.Since(began); took > 5*time.Second {
					t.Errorf("it took %v", took)
				}
				if bytes := allocated() - before; bytes > 32<<20 {
					t.Errorf("it took %d MB", bytes>>20)
				}
				redistest.WaitFor(t, 5*time.Second, func() error {
					if got := seen.take(); !slices.Contains(got, "down reply") {
						return fmt.Errorf("reported %q", got)
					}
					return nil
				})
				want := errReplyTooLarge
				if tc.to == "evalsha" && what != "array" {
					want = errReplyMalformed // only lists of integers are replies to the script
				}
				if f := failureOf(t, err); !strings.HasSuffix(f.Error(), want.Error()) {
					t.Errorf("error %q", f)
				}
			})
		}
	}
}

// FuzzReplyScanner guards that whatever the client can read passes, in pieces of
// any size, and that nothing exceeds the bounds: the client allocates little
// memory.
func FuzzReplyScanner(f *testing.F) {
	for _, stream := range hugeReplies {
		if len(stream) < 1000 {
			f.Add([]byte(stream), uint64(1))
		}
	}
	for seed := range uint64(30) {
		var b bytes.Buffer
		for range played {
			writeReply(rand.New(rand.NewPCG(seed, 3)), &b, 0)
		}
		f.Add(b.Bytes(), seed)
	}
	// Lengths large enough to be rejected. Without one, the rejection must be for
	// something that the client does not accept either.
	large := regexp.MustCompile(`[0-9]{5}`)
	f.Fuzz(func(t *testing.T, stream []byte, seed uint64) {
		before := allocated()
		got, err := play(stream, rand.New(rand.NewPCG(seed, 1)), true)
		if bytes := allocated() - before; bytes > 64<<20 {
			t.Fatalf("%d MB for %q", bytes>>20, stream)
		}
		if large.Match(stream) || bytes.Count(stream, []byte("|")) > 1 || len(stream) > 1000 {
			return
		}
		want, wantErr := play(stream, nil, false)
		switch {
		case errors.Is(err, errReplyTooLarge):
			if bytes.Count(stream, []byte("\r\n")) <= maxDepth {
				t.Fatalf("%q is rejected: %v", stream, err)
			}
		case wantErr == nil && errors.Is(err, errReplyMalformed):
			// After the last reply that was requested it may be anything.
		case (err == nil) != (wantErr == nil) || !alike(got, want):
			t.Fatalf("%q: got %v, error %v, want %v, error %v", stream, got, err, want, wantErr)
		}
	})
}

func BenchmarkReplyScanner(b *testing.B) {
	for _, buckets := range []int{1, 8, 256} {
		reply := fmt.Appendf(nil, "*%d\r\n", 2*buckets)
		for range buckets {
			reply = append(reply, ":3599999998\r\n:0\r\n"...)
		}
		b.Run(fmt.Sprint("buckets=", buckets), func(b *testing.B) {
			var s replyScanner
			for b.Loop() {
				if err := s.scan(reply); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
