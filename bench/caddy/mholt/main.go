// Command mholt is Caddy as it is released, with mholt/caddy-ratelimit in it,
// which can't share a binary with a handler of the same name.
package main

import (
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	_ "github.com/caddyserver/caddy/v2/modules/standard"
	_ "github.com/mholt/caddy-ratelimit"
)

func main() { caddycmd.Main() }
