package bench

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/usage"
)

// BenchmarkUsage sends a body of 4 MiB in pieces of 64 KiB over HTTP, from a handler that has what
// the response costs read from it, beside one that does not: of-none is the ratio of their
// rates. Text is what language models write, in events or whole; numbers are embeddings, which
// are the most to read.
func BenchmarkUsage(b *testing.B) {
	const size, piece = 4 << 20, 64 << 10
	fill := func(part, end string) []byte {
		return []byte(strings.Repeat(part, size/len(part)) + end)
	}
	cost, err := new(usage.Plan).Parse(usage.Tokens)
	if err != nil {
		b.Fatal(err)
	}
	word := `data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}],"usage":null}` + "\n\n"
	for _, c := range []struct {
		name string
		body []byte
	}{
		{"text", fill(`{"choices":[{"message":{"content":"`+strings.Repeat(`some words of a text,\n`, 1000)+`"}}]}`+"\n", `{"usage":{"total_tokens":7}}`)},
		{"events", fill(word, "data: {\"usage\":{\"total_tokens\":7}}\n\n")},
		{"numbers", append([]byte(`{"data":[{"embedding":[0.1`), fill(",-0.023064255", `]}],"usage":{"total_tokens":7}}`)...)},
	} {
		b.Run(c.name, func(b *testing.B) {
			send := func(read bool) task {
				server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
					body := cost.Plan().NewBody(w.Header())
					for rest := c.body; len(rest) > 0; rest = rest[min(piece, len(rest)):] {
						part := rest[:min(piece, len(rest))]
						_, _ = w.Write(part)
						if read {
							body.Write(part)
						}
					}
					body.End()
					if n, found := cost.In(body); read && (!found || n != 7) {
						wrong(b, "read %d, %t", n, found)
					}
				}))
				b.Cleanup(server.Close)
				return func() func(int) {
					buf := make([]byte, piece)
					return func(int) {
						res, err := http.Get(server.URL)
						if err != nil {
							wrong(b, "%v", err)
							return
						}
						_, _ = io.CopyBuffer(struct{ io.Writer }{io.Discard}, res.Body, buf)
						res.Body.Close()
					}
				}
			}
			b.SetBytes(int64(len(c.body)))
			comparison{task: send(true), baselines: []baseline{{"none", send(false)}}, callers: 1, rates: true}.run(b)
		})
	}
}
