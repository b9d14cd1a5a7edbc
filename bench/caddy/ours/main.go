// Command ours is Caddy as it is released, with the rate limiter in it and the
// peers that can share a binary with it: what e2e measures.
package main

import (
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	_ "github.com/caddyserver/caddy/v2/modules/standard"

	_ "github.com/seed-387a6c65/caddy-ratelimit"
	_ "github.com/seed-387a6c65/caddy-ratelimit/bench/caddy/peers"
)

func main() { caddycmd.Main() }
