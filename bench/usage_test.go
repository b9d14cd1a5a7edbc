package bench

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	_ "github.com/caddyserver/caddy/v2/modules/standard"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// BenchmarkUsage sends a body of 4 MiB in pieces of 64 KiB through a Caddy that reads from it what
// its request has cost, beside one without a limit: of-none is the ratio of their rates. Text is
// what language models write, whole or in events; numbers are embeddings.
func BenchmarkUsage(b *testing.B) {
	const size, piece = 4 << 20, 64 << 10
	fill := func(part, end string) []byte {
		return []byte(strings.Repeat(part, size/len(part)) + end)
	}
	word := `data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}],"usage":null}` + "\n\n"
	bodies := map[string][]byte{
		"text":    fill(`{"choices":[{"message":{"content":"`+strings.Repeat(`some words of a text,\n`, 1000)+`"}}]}`+"\n", `{"usage":{"total_tokens":7}}`),
		"events":  fill(word, "data: {\"usage\":{\"total_tokens\":7}}\n\n"),
		"numbers": append([]byte(`{"data":[{"embedding":[0.1`), fill(",-0.023064255", `]}],"usage":{"total_tokens":7}}`)...),
	}
	upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, name, _ := strings.Cut(r.URL.Path[1:], "/")
		for rest := bodies[name]; len(rest) > 0; rest = rest[min(piece, len(rest)):] {
			_, _ = w.Write(rest[:min(piece, len(rest))])
		}
	}))
	defer upstream.Close()
	addr := startCaddy(b, `
		rate_limit /tokens/* {
			algorithm fixed_window
			size 1000000000000
			period month
			actual_cost tokens
		}
		reverse_proxy `+upstream.Listener.Addr().String())
	for _, name := range []string{"text", "events", "numbers"} {
		b.Run(name, func(b *testing.B) {
			get := func(path string) task {
				return func() func(int) {
					buf := make([]byte, piece)
					return func(int) {
						res, err := http.Get("http://" + addr + path + name)
						if err != nil {
							wrong(b, "%v", err)
							return
						}
						defer res.Body.Close()
						n, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, res.Body, buf)
						if err != nil || n != int64(len(bodies[name])) {
							wrong(b, "%d bytes, %v", n, err)
						}
					}
				}
			}
			b.SetBytes(int64(len(bodies[name])))
			comparison{task: get("/tokens/"), baselines: []baseline{{"none", get("/none/")}}, callers: 1, rates: true}.run(b)
		})
	}
}

// startCaddy runs a Caddy in this process until the benchmark ends, and returns the address of its
// site.
func startCaddy(b *testing.B, site string) (addr string) {
	addr = redistest.FreeAddr(b)
	config, _, err := caddyfile.Adapter{ServerType: httpcaddyfile.ServerType{}}.Adapt([]byte(`{
		admin off
		persist_config off
		log {
			output discard
		}
		rate_limit {
			memory {
				persist off
			}
		}
	}
	http://`+addr+` {
		`+site+`
	}`), nil)
	if err != nil {
		b.Fatal(err)
	}
	if err := caddy.Load(config, true); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = caddy.Stop() })
	return addr
}
