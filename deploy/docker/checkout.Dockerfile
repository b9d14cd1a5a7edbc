# syntax=docker/dockerfile:1

# Caddy with this module, from this checkout:
#
#     docker build -f deploy/docker/Dockerfile -t caddy-ratelimit .
#
# Elsewhere, without a checkout, drop COPY and let xcaddy fetch the module:
# --with github.com/seed-387a6c65/caddy-ratelimit
FROM golang:1.26-alpine AS build
WORKDIR /src
COPY . .
ENV CGO_ENABLED=0
RUN --mount=type=cache,target=/go/pkg/mod --mount=type=cache,target=/root/.cache/go-build \
	go tool -modfile=tools/go.mod xcaddy build v2.11.9 --output /usr/bin/caddy \
	--with github.com/seed-387a6c65/caddy-ratelimit@v0.0.0=.

# The official image, for its layout: another binary in the same place. It may be
# of an older Caddy than the one built above.
FROM caddy:2.11-alpine
COPY --from=build /usr/bin/caddy /usr/bin/caddy
