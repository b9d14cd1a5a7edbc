package redisscript

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
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

// answerKind is a way in which a server answers an invocation.
type answerKind struct {
	name   string
	reply  func(numbers []int64) string // to a call that gets these numbers
	next   then
	reason string // of the error, or "" if there is none
	empty  bool   // whether the call gets no numbers
	notRun bool   // whether it certainly was not run
	breaks bool   // whether nothing that follows on the connection is read
	drops  bool   // whether the connection is given up after it
	lasts  bool   // whether the server counts as down after it
	lacks  int    // how often the server says first that it does not know the script
}

// answerKinds returns all kinds.
func answerKinds() []answerKind {
	good := func(numbers []int64) string {
		b := fmt.Appendf(nil, "*%d\r\n", len(numbers))
		for _, n := range numbers {
			b = fmt.Appendf(b, ":%d\r\n", n)
		}
		return string(b)
	}
	text := func(s string) func([]int64) string { return func([]int64) string { return s } }
	kinds := []answerKind{
		{name: "good", reply: good},
		{name: "too few", reply: func(n []int64) string { return good(n[1:]) }, empty: true},
		{name: "too many", reply: func(n []int64) string { return good(append(n, n...)) }, empty: true},
		{name: "nil", reply: text("*-1\r\n"), empty: true},
		{name: "pushed before", reply: func(n []int64) string {
			return ">2\r\n+message\r\n*2\r\n:1\r\n$4\r\n*1\r\n\r\n" + good(n)
		}},
		{name: "pushed after", reply: func(n []int64) string { return good(n) + ">3\r\n:1\r\n:2\r\n:3\r\n" }},
		{name: "huge array", reply: text("*400000000\r\n"), reason: "reply", breaks: true},
		{name: "huge push", reply: text(">1\r\n$400000000\r\n"), reason: "reply", breaks: true},
		{name: "huge number", reply: func(n []int64) string {
			return strings.Replace(good(n), ":", ":99999999999999999999", 1)
		}, reason: "reply", breaks: true},
		{name: "status", reply: text("+OK\r\n"), reason: "reply", breaks: true},
		{name: "string in the array", reply: func(n []int64) string {
			return strings.Replace(good(n), ":", "+", 1)
		}, reason: "reply", breaks: true},
		{name: "HTTP", reply: text("HTTP/1.1 400 Bad Request\r\n"), reason: "reply", breaks: true},
		{name: "closes", reply: text(""), next: hangUp, reason: "closed", breaks: true},
		{name: "closes in the middle", reply: func(n []int64) string {
			return good(n)[:len(good(n))-1]
		}, next: hangUp, reason: "closed", breaks: true},
		{name: "silent", reply: text(""), next: beQuiet, reason: "timeout", breaks: true},
		{name: "silent in the middle", reply: func(n []int64) string {
			return good(n)[:len(good(n))-1]
		}, next: beQuiet, reason: "timeout", breaks: true},
		{name: "NOSCRIPT", reply: good, lacks: 1},
		{name: "always NOSCRIPT", reply: text(""), lacks: 1 << 30, reason: "error", notRun: true},
	}
	for reply, reason := range map[string]string{
		"MOVED 1 127.0.0.1:1": "moved", "ASK 1 127.0.0.1:1": "moved", "TRYAGAIN Multiple keys": "tryagain",
		"CLUSTERDOWN Hash slot not served": "clusterdown", "LOADING dataset": "loading", "BUSY Redis is busy": "busy",
		"READONLY You can't write": "readonly", "OOM command not allowed": "oom", "NOPERM no": "noperm",
		"NOAUTH Authentication required.": "noauth", "ERR something else": "error",
	} {
		kinds = append(kinds, answerKind{name: reply, reply: text("-" + reply + "\r\n"), reason: reason,
			notRun: reason != "error", // others stop a script before its first write
			drops:  reason == "readonly", lasts: reason == "noperm" || reason == "noauth"})
	}
	slices.SortFunc(kinds[len(kinds)-11:], func(a, b answerKind) int { return strings.Compare(a.name, b.name) })
	return kinds
}

// TestRepliesInPieces guards replies of each kind after one of each kind, in two pieces
// divided at each byte: they are read as if they came at once. If what follows that
// byte never comes, no call gets what it would not have got.
func TestRepliesInPieces(t *testing.T) {
	kinds := answerKinds()
	for _, a := range kinds {
		for _, b := range kinds {
			all := []*invocation{{calls: []*Call{callTo(4)}}, {calls: []*Call{callTo(5)}}}
			stream := a.reply(numbersOf(all[0].calls[0].Keys)) + b.reply(numbersOf(all[1].calls[0].Keys))
			want := readAll(all, stream)
			for at := range stream {
				if got := readAll(all, stream[:at], stream[at:]); !slices.Equal(got, want) {
					t.Errorf("%s, %s: in pieces at %d: got %q, want %q", a.name, b.name, at, got, want)
				}
				got := readAll(all, stream[:at])
				if n := len(got); n > 0 && strings.HasPrefix(got[n-1], "broken") {
					got = got[:n-1]
				}
				if len(got) > len(want) || !slices.Equal(got, want[:len(got)]) {
					t.Errorf("%s, %s: cut at %d: got %q, want a part of %q", a.name, b.name, at, got, want)
				}
			}
		}
	}
}

// answering is a server that answers the first calls each in its way, and all others
// well. It remembers which calls it may have run.
type answering struct {
	kinds []answerKind

	mu  sync.Mutex
	got map[int]int // how often each call has come
	ran map[int]int // how often it may have been run
}

// callTo returns the i-th call to the server. What it gets depends on its keys.
func callTo(i int) *Call {
	c := &Call{Arg: argOf(counter{add: 1}), Replies: 1 + i%3}
	for n := range c.Replies {
		c.Keys = append(c.Keys, fmt.Sprint("k", 10*i+n))
	}
	return c
}

// numbersOf returns the numbers that belong to some keys.
func numbersOf(keys []string) (all []int64) {
	for _, key := range keys {
		n, _ := strconv.ParseInt(strings.TrimPrefix(key, "k"), 10, 64)
		all = append(all, (n+1)*1_000_003)
	}
	return all
}

// answer answers a command.
func (a *answering) answer(words []string) (string, then) {
	if words[0] != "evalsha" && words[0] != "eval" {
		return "", goOn
	}
	n, _ := strconv.Atoi(words[2])
	if n == 0 { // a check
		return "*0\r\n", goOn
	}
	keys := words[3 : 3+n]
	i, _ := strconv.Atoi(strings.TrimPrefix(keys[0], "k"))
	i /= 10
	a.mu.Lock()
	defer a.mu.Unlock()
	kind := answerKinds()[0]
	if i < len(a.kinds) {
		kind = a.kinds[i]
	}
	if a.got[i]++; a.got[i] <= kind.lacks {
		return "-NOSCRIPT No matching script.\r\n", goOn
	}
	if !kind.notRun {
		a.ran[i]++
	}
	return kind.reply(numbersOf(keys)), kind.next
}

// TestAnswersInSequence guards calls that are answered in each way after each other,
// and in many ways one after the other: at once on one connection, or one by one. Each
// call has one outcome, its own numbers or the error that fits, and is not said to
// have been left out if it was run. Calls after that are answered again.
func TestAnswersInSequence(t *testing.T) {
	if testing.Short() {
		t.Skip(longTest)
	}
	before := runtime.NumGoroutine()
	kinds := answerKinds()
	random := rand.New(rand.NewPCG(1, 2))
	var sequences [][]answerKind
	for _, a := range kinds {
		sequences = append(sequences, []answerKind{a})
		for _, b := range kinds {
			sequences = append(sequences, []answerKind{a, b})
		}
	}
	for range 50 {
		var all []answerKind
		for range 3 + random.IntN(10) {
			all = append(all, pick(random, kinds...))
		}
		sequences = append(sequences, all)
	}
	t.Run("sequence", func(t *testing.T) {
		for _, kinds := range sequences {
			var names []string
			for _, kind := range kinds {
				names = append(names, kind.name)
			}
			for _, atOnce := range []bool{true, false} {
				if !atOnce && len(kinds) >= openAfter {
					continue // the breaker would open
				}
				t.Run(fmt.Sprintf("%s, at once %t", strings.Join(names, ", "), atOnce), func(t *testing.T) {
					t.Parallel()
					checkSequence(t, kinds, atOnce)
				})
			}
		}
	})
	redistest.WaitFor(t, 10*time.Second, func() error {
		if n := runtime.NumGoroutine(); n > before+2 {
			return fmt.Errorf("%d goroutines, were %d", n, before)
		}
		return nil
	})
}

// checkSequence makes calls, as many as there are kinds, to a server that answers each
// in its way.
func checkSequence(t *testing.T, kinds []answerKind, atOnce bool) {
	timeout := time.Second
	silent := slices.ContainsFunc(kinds, func(kind answerKind) bool { return kind.next == beQuiet })
	if silent {
		timeout /= 40
	}
	server := &answering{kinds: kinds, got: make(map[int]int), ran: make(map[int]int)}
	r := newTestClient(t, nil, func(opt *Options) {
		opt.Addresses, opt.Timeout = []string{scriptedServer(t, server.answer)}, timeout
	})
	s := r.server()
	calls, errs := make([]*Call, len(kinds)), make([]error, len(kinds))
	do := func(i int) {
		calls[i] = callTo(i)
		calls[i].alone = true // each has an answer of its own
		errs[i] = s.await(Deadline{At: time.Now().Add(timeout)}, calls[i])
	}
	connected(t, s)
	gathered := atOnce
	if atOnce {
		var all sync.WaitGroup
		release := hold(t, s)
		for i := range kinds {
			all.Go(func() { do(i) })
			// Callers send by themselves if it takes too long until all are there.
			for end := time.Now().Add(timeout); gathered && waitingAt(s) <= i; runtime.Gosched() {
				gathered = time.Now().Before(end)
			}
		}
		release()
		all.Wait()
	} else {
		for i := range kinds {
			do(i)
		}
	}

	// What follows is answered too.
	last := len(kinds) - 1
	redistest.WaitFor(t, 10*time.Second, func() error {
		last++
		c := callTo(last)
		_, err := r.Do(Deadline{At: time.Now().Add(timeout)}, c)
		if err == nil && !slices.Equal(c.Reply, numbersOf(c.Keys)) {
			t.Errorf("a later call got %d, want %d", c.Reply, numbersOf(c.Keys))
		}
		return err
	})
	r.Close()

	breaks := slices.IndexFunc(kinds, func(kind answerKind) bool { return kind.breaks })
	drops := slices.IndexFunc(kinds, func(kind answerKind) bool { return kind.drops })
	lasts := slices.ContainsFunc(kinds, func(kind answerKind) bool { return kind.lasts })
	server.mu.Lock()
	defer server.mu.Unlock()
	for i, c := range calls {
		kind, err := kinds[i], errs[i]
		var f *ServerError
		if err != nil {
			f = failureOf(t, err)
		}
		ran := server.ran[i]
		if ran > 1 || ran > 0 && NotRun(err) {
			t.Errorf("call %d, %s: was run %d times, error %v", i, kind.name, ran, err)
		}
		if err == nil && len(c.Reply) > 0 && !slices.Equal(c.Reply, numbersOf(c.Keys)) {
			t.Errorf("call %d, %s: got %d, want %d", i, kind.name, c.Reply, numbersOf(c.Keys))
		}
		switch {
		case atOnce && !gathered:
			// They were sent in another order.
		case atOnce && breaks >= 0 && i > breaks:
			if err == nil && kind.lacks == 0 {
				t.Errorf("call %d, %s: got %d after the connection broke", i, kind.name, c.Reply)
			}
		case atOnce && breaks >= 0 && kind.lacks > 0:
			// It was sent again, on the connection that breaks or on the next.
		case atOnce && drops >= 0 && (i > drops || kind.lacks > 0) && f != nil && f.reason == "closed":
			// Its answer had not come when the connection was given up.
		case atOnce && lasts && kind.lacks > 0 && f != nil && (f.reason == "noperm" || f.reason == "noauth"):
			// It was to be sent again when the server went down.
		case silent && f != nil && f.reason == "timeout":
			// Its answer waits for those to the other calls, or this process was late.
		case kind.reason != "":
			if f == nil || f.reason != kind.reason || NotRun(err) != kind.notRun {
				t.Errorf("call %d, %s: error %v, not run %t; want %s", i, kind.name, err, NotRun(err), kind.reason)
			}
		case err != nil || kind.empty != (len(c.Reply) == 0):
			t.Errorf("call %d, %s: got %d, error %v", i, kind.name, c.Reply, err)
		}
	}
}
