# syntax=docker/dockerfile:1

# Caddy with the module of this checkout, as `make build` builds it: for compose.yml,
# and to try a change. Without a checkout, use the Dockerfile beside this one.
#
#     docker build -f deploy/docker/checkout.Dockerfile -t caddy-ratelimit .
FROM golang:1.26-alpine AS build
WORKDIR /src
COPY . .
ENV CGO_ENABLED=0
RUN --mount=type=cache,target=/go/pkg/mod --mount=type=cache,target=/root/.cache/go-build \
	go tool -modfile=tools/go.mod xcaddy build v2.11.9 --output /usr/bin/caddy \
	--with github.com/seed-387a6c65/caddy-ratelimit@v0.0.0=.

# The official image, for its layout: the binary built above takes the place of its
# own. That one may be of an older Caddy than the built one, as it is not used.
FROM caddy:2.11-alpine
COPY --from=build /usr/bin/caddy /usr/bin/caddy
