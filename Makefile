# Two commands do all set-up: `make run` and `make test`.

CADDY_VERSION = v2.11.9
XCADDY        = go tool -modfile=tools/go.mod xcaddy

.PHONY: run build test programs bench bench-e2e

# Build Caddy with this module and serve the example on localhost:8080.
run: build
	./caddy run --config example.Caddyfile

# Build Caddy with this checkout. The version is one that xcaddy does not look
# for among the published ones; what is built is the path behind it.
build:
	$(XCADDY) build $(CADDY_VERSION) --output ./caddy \
		--with github.com/seed-387a6c65/caddy-ratelimit@v0.0.0=.

# Install what the tests need and run them all. Those of the benchmarks build a
# Caddy, of which Go's cache of test results does not know.
test: programs
	go vet ./...
	cd bench && go vet ./... && go test -count=1 ./...
	go test -race ./...

# The tests start Redis servers of their own, the benchmarks a load generator,
# and the race detector needs a C compiler. All come from the distribution.
programs:
	@for p in redis-server wrk gcc; do command -v $$p >/dev/null || missing="$$missing $$p"; done; \
		test -z "$$missing" || { apt-get update && \
			apt-get install -y --no-install-recommends $$missing libc6-dev; }

# The micro-benchmarks, and whole requests beside a bare Caddy: five minutes each.
bench: programs
	cd bench && go test -run '^$$' -bench . .

bench-e2e: programs
	cd bench && go run ./e2e
