# Two commands do all set-up: `make run` and `make test`.

CADDY_VERSION = v2.11.9
XCADDY        = go tool -modfile=tools/go.mod xcaddy

.PHONY: run build test bench bench-e2e fuzz

# Build Caddy with this module and serve the example on localhost:8080.
run: build
	./caddy run --config example.Caddyfile

# Build Caddy with this checkout of the module. The version is one that needs
# no published module; the path behind it is what is built.
build:
	$(XCADDY) build $(CADDY_VERSION) --output ./caddy \
		--with github.com/seed-387a6c65/caddy-ratelimit@v0.0.0=.

# Install what the tests need and run them all.
test: redis-server
	go vet ./...
	go test -race ./...
	cd bench && go vet ./... && go test ./...

# The tests start redis-server processes of their own; the distribution's
# package brings the program.
.PHONY: redis-server
redis-server:
	@command -v redis-server >/dev/null || { \
		apt-get update && apt-get install -y --no-install-recommends redis-server; }
