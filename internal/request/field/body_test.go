package field

import (
	"io"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"
)

// TestStalledBodies guards that a body of unknown length is waited for no longer than five seconds, and that what has
// come of it is passed on then, before there is more, and all of it in the end.
func TestStalledBodies(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		in, client := io.Pipe()
		r := httptest.NewRequest("POST", "/", in)
		r.Header.Set("Content-Type", formType)
		r.ContentLength = -1
		go func() { _, _ = io.WriteString(client, "email=a&x=1") }()
		begun := time.Now()
		if key, text := ask(t, r, "email"); key != Unclear || text != "" {
			t.Errorf("got %q, %q, want what is unclear", key, text)
		}
		if took := time.Since(begun); took != beginTime {
			t.Errorf("it took %v", took)
		}
		buf := make([]byte, 64)
		if n, err := r.Body.Read(buf); string(buf[:n]) != "email=a&x=1" || err != nil {
			t.Errorf("got %q, %v of what has come", buf[:n], err)
		}
		go func() {
			time.Sleep(time.Hour)
			_, _ = io.WriteString(client, "&y=2")
			_, _ = io.WriteString(client, "&z=3")
			_ = client.Close()
		}()
		if rest, err := io.ReadAll(r.Body); string(rest) != "&y=2&z=3" || err != nil {
			t.Errorf("got %q, %v of the rest", rest, err)
		}
	})
}

// TestTrickledBodies guards that bytes that come one by one are read as if they came at once, and that a body that is
// never read by anybody keeps no goroutine once its stream has ended.
func TestTrickledBodies(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for _, each := range []time.Duration{time.Millisecond, time.Second} {
			in, client := io.Pipe()
			r := httptest.NewRequest("POST", "/", in)
			r.Header.Set("Content-Type", formType)
			r.ContentLength = -1
			const body = "email=alice"
			go func() {
				for i := range body {
					time.Sleep(each)
					_, _ = io.WriteString(client, body[i:i+1])
				}
				_ = client.Close()
			}()
			want := map[time.Duration]string{time.Millisecond: "alice", time.Second: Unclear}[each]
			if key, _ := ask(t, r, "email"); key != want {
				t.Errorf("%v for each byte: got %q, want %q", each, key, want)
			}
			if each == time.Second {
				_ = in.CloseWithError(io.ErrUnexpectedEOF) // the client has left; synctest finds what waits on
				time.Sleep(time.Minute)
				continue
			}
			if got, err := io.ReadAll(r.Body); string(got) != body || err != nil {
				t.Errorf("got %q, %v", got, err)
			}
		}
	})
}
