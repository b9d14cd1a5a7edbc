package ratelimit

import (
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"
)

func init() {
	caddycmd.RegisterCommand(caddycmd.Command{
		Name:  "rate-limit",
		Short: "Shows and changes what rate limits do",
		CobraFunc: func(cmd *cobra.Command) {
			cmd.AddCommand(commands()...)
		},
	})
}

// commands returns the subcommands of caddy rate-limit.
func commands() []*cobra.Command { return []*cobra.Command{replayCommand()} }
