package redisscript

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"
)

// pieces is what is left to read, which comes in pieces.
type pieces struct{ left []string }

func (p *pieces) Read(b []byte) (int, error) {
	for len(p.left) > 0 && p.left[0] == "" {
		p.left = p.left[1:]
	}
	if len(p.left) == 0 {
		return 0, io.EOF
	}
	n := copy(b, p.left[0])
	p.left[0] = p.left[0][n:]
	return n, nil
}

// readAll reads the replies to some invocations, in words.
func readAll(all []*invocation, stream ...string) (words []string) {
	r := newReplyReader(&pieces{left: stream})
	for _, in := range all {
		for _, c := range in.calls {
			c.Reply = nil
		}
		if err := r.await(); err != nil {
			return append(words, "broken: "+err.Error())
		}
		failure, err := r.reply(in)
		switch {
		case err != nil:
			return append(words, "broken: "+err.Error())
		case failure != nil:
			words = append(words, failure.Error())
		default:
			for _, c := range in.calls {
				words = append(words, fmt.Sprint(c.Reply))
			}
		}
	}
	return words
}

// TestReplies guards how replies are read: each call gets its own numbers, or the
// error of its invocation, in whatever pieces the replies come. What is no reply to
// the script breaks the connection.
func TestReplies(t *testing.T) {
	calls := func(asking bool, replies ...int) *invocation {
		in := &invocation{asking: asking}
		for _, n := range replies {
			in.calls = append(in.calls, &Call{Replies: n})
		}
		return in
	}
	two := []*invocation{calls(false, 2)}
	broken := "broken: " + errReplyMalformed.Error()
	large := "broken: " + errReplyTooLarge.Error()
	for _, tc := range []struct {
		name   string
		all    []*invocation
		stream string
		want   []string
	}{
		{"one call", two, "*2\r\n:1\r\n:-20\r\n", []string{"[1 -20]"}},
		{"several calls", []*invocation{calls(false, 1, 2, 0, 1)}, "*4\r\n:1\r\n:2\r\n:3\r\n:4\r\n", []string{"[1]", "[2 3]", "[]", "[4]"}},
		{"several invocations", []*invocation{calls(false, 1), calls(false, 1), calls(false, 1)}, "*1\r\n:1\r\n-OOM no\r\n*1\r\n:3\r\n", []string{"[1]", "OOM no", "[3]"}},
		{"the largest numbers", two, "*2\r\n:9223372036854775807\r\n:-9223372036854775808\r\n", []string{"[9223372036854775807 -9223372036854775808]"}},
		{"too large a number", two, "*2\r\n:9223372036854775808\r\n:1\r\n", []string{broken}},
		{"too small a number", two, "*2\r\n:-9223372036854775809\r\n:1\r\n", []string{broken}},
		{"a number of twenty digits", two, "*2\r\n:10000000000000000000\r\n:1\r\n", []string{broken}},
		{"none for a check", []*invocation{calls(false)}, "*0\r\n", nil},
		{"too few", two, "*1\r\n:1\r\n", []string{"[]"}},
		{"too many", []*invocation{calls(false, 1), calls(false, 1)}, "*3\r\n:1\r\n:2\r\n:3\r\n*1\r\n:4\r\n", []string{"[]", "[4]"}},
		{"a nil array", two, "*-1\r\n", []string{"[]"}},
		{"a negative length", two, "*-5\r\n", []string{broken}},
		{"asking", []*invocation{calls(true, 1)}, "+OK\r\n*1\r\n:1\r\n", []string{"[1]"}},
		{"asking is refused", []*invocation{calls(true, 1), calls(false, 1)}, "-NOPERM no\r\n-MOVED 1 a:1\r\n*1\r\n:2\r\n", []string{"NOPERM no", "[2]"}},
		{"asking is refused, but the script was run", []*invocation{calls(true, 1)}, "-ERR no\r\n*1\r\n:1\r\n", []string{"[1]"}},
		{"asking is not understood", []*invocation{calls(true, 1)}, ":1\r\n*1\r\n:1\r\n", []string{broken}},
		{"pushed while asking", []*invocation{calls(true, 1)}, ">1\r\n+a\r\n+OK\r\n>1\r\n+b\r\n*1\r\n:1\r\n", []string{"[1]"}},
		{"pushed before, between and after", []*invocation{calls(false, 1), calls(false, 1)}, ">2\r\n+a\r\n:1\r\n*1\r\n:1\r\n>1\r\n$3\r\nx\ry\r\n*1\r\n:2\r\n>1\r\n+b\r\n", []string{"[1]", "[2]"}},
		{"an empty error", two, "-\r\n", []string{""}},
		{"a string", two, "$2\r\nab\r\n", []string{broken}},
		{"a status", two, "+OK\r\n", []string{broken}},
		{"a string in the array", two, "*2\r\n:1\r\n$1\r\na\r\n", []string{broken}},
		{"an array in the array", two, "*2\r\n*1\r\n:1\r\n:1\r\n", []string{broken}},
		{"a huge array", two, "*400000000\r\n", []string{large}},
		{"a length that is none", two, "*2x\r\n", []string{broken}},
		{"a number that is none", two, "*2\r\n:\r\n:1\r\n", []string{broken}},
		{"no carriage return", two, "*2\n:1\n:2\n", []string{broken}},
		{"a long line", two, "-" + strings.Repeat("a", maxLine) + "\r\n", []string{large}},
		{"TLS", two, "\x15\x03\x01\x00\x02\x02\x46\r\n", []string{broken}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if got := readAll(tc.all, tc.stream); !slices.Equal(got, tc.want) {
				t.Fatalf("got %q, want %q", got, tc.want)
			}
			for at := range min(len(tc.stream), 100) {
				if got := readAll(tc.all, tc.stream[:at], tc.stream[at:]); !slices.Equal(got, tc.want) {
					t.Errorf("in pieces at %d: got %q, want %q", at, got, tc.want)
				}
				// What is cut short is never taken for whole.
				got := readAll(tc.all, tc.stream[:at])
				if n := len(got); n > 0 && !strings.HasPrefix(got[n-1], "broken") && !slices.Equal(got, tc.want) {
					t.Errorf("cut at %d: got %q", at, got)
				}
			}
		})
	}
}

// TestCommands guards what is sent, byte for byte.
func TestCommands(t *testing.T) {
	s := &Script{source: "return {}", sha: strings.Repeat("a", 40)}
	call := func(arg string, keys ...string) *Call { return &Call{Keys: keys, Arg: "\x00\x01" + arg} }
	const evalsha = "$7\r\nEVALSHA\r\n$40\r\naaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n"
	for _, tc := range []struct {
		name string
		in   invocation
		want string
	}{
		{"a check", invocation{}, "*3\r\n" + evalsha + "$1\r\n0\r\n"},
		{"one call", invocation{calls: []*Call{call("x", "k1", "k2")}}, "*6\r\n" + evalsha + "$1\r\n2\r\n$2\r\nk1\r\n$2\r\nk2\r\n$3\r\n\x00\x01x\r\n"},
		{
			"runs of equal calls", invocation{calls: []*Call{call("x", "a"), call("x", "b"), call("y", "c"), call("x", "d")}},
			"*10\r\n" + evalsha + "$1\r\n4\r\n$1\r\na\r\n$1\r\nb\r\n$1\r\nc\r\n$1\r\nd\r\n$3\r\n\x00\x02x\r\n$3\r\n\x00\x01y\r\n$3\r\n\x00\x01x\r\n",
		},
		{"the whole script", invocation{calls: []*Call{call("x", "a")}, whole: true}, "*5\r\n$4\r\nEVAL\r\n$9\r\nreturn {}\r\n$1\r\n1\r\n$1\r\na\r\n$3\r\n\x00\x01x\r\n"},
		{"asking", invocation{calls: []*Call{call("x", "a")}, asking: true}, "*1\r\n$6\r\nASKING\r\n*5\r\n" + evalsha + "$1\r\n1\r\n$1\r\na\r\n$3\r\n\x00\x01x\r\n"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if got := s.appendTo([]byte("before"), &tc.in); !bytes.Equal(got, []byte("before"+tc.want)) {
				t.Errorf("got %q, want %q", got[len("before"):], tc.want)
			}
		})
	}
}

// TestScriptedServer guards the calls on a connection that ends, or goes wrong, after
// each byte of a reply: each call in flight has one outcome, and the next calls are
// answered on another connection.
func TestScriptedServer(t *testing.T) {
	reply := "*1\r\n:12\r\n"
	for _, rest := range []string{"", "!", "\r\n", ":1\r\n", "*1\r\n:5\r\n"} {
		for at := range len(reply) + 1 {
			t.Run(fmt.Sprintf("%q", reply[:at]+rest), func(t *testing.T) {
				asked := make(chan bool, 100)
				addr := fakeServer(t, func(command string) string {
					if command != "evalsha" {
						return ""
					}
					asked <- true
					if len(asked) > 1 {
						return reply
					}
					return reply[:at] + rest
				})
				r := newTestClient(t, nil, func(opt *Options) {
					opt.Addresses, opt.Timeout = []string{addr}, 100*time.Millisecond
				})
				connected(t, r.server())
				d, err := r.count(context.Background(), upTo(100))
				if at == len(reply) && (err != nil || d[0].n != 12) {
					t.Errorf("counted %+v, error %v", d, err)
				}
				deadline := time.Now().Add(5 * time.Second)
				for {
					d, err := r.count(context.Background(), upTo(100))
					if err == nil && d[0].n == 12 {
						return
					}
					if time.Now().After(deadline) {
						t.Fatalf("then counted %+v, error %v", d, err)
					}
					var f *ServerError
					if err != nil && !errors.As(err, &f) {
						t.Errorf("error %v", err)
					}
					time.Sleep(10 * time.Millisecond)
				}
			})
		}
	}
}
