// Package command is the command caddy rate-limit: what queries a running Caddy by its admin
// API. The commands that read config files are handed to it.
package command

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/caddyserver/caddy/v2/caddyconfig"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/terminal"
)

// New returns the command with the given subcommands.
func New(subcommands []*cobra.Command) caddycmd.Command {
	return caddycmd.Command{
		Name:  "rate-limit",
		Usage: "<command>",
		Short: "Inspects and resets rate limits",
		Long: `
Shows what the limits of the rate_limit directive do, empties buckets, and bans.

The commands status, limits, peek, reset, ban, unban, bans and top query a running Caddy
through its admin endpoint: the one of --address, or of the config file in --config; by
default the one of the environment variable CADDY_ADMIN, or localhost:2019. The other
commands read config files and need no running Caddy.

The exit status is 0 if all is well, 1 if the command failed, and 2 if it worked but
found a problem: Redis is unavailable (status); the config has a mistake (check, and 3 if
all that it found may be meant);
something has no equivalent (convert); or Redis does not answer, so only the Caddy that
was asked was looked at or changed (peek, reset, ban, unban, bans).`,
		CobraFunc: func(cmd *cobra.Command) {
			cmd.Args, cmd.SuggestionsMinimumDistance = cobra.ArbitraryArgs, 2
			cmd.RunE = func(cmd *cobra.Command, args []string) error {
				if len(args) > 0 && args[0] == "help" { // Caddy's own help is not for commands within others
					about, unknown, err := cmd.Find(args[1:])
					if err == nil && len(unknown) == 0 {
						about.InitDefaultHelpFlag()
						return about.Help()
					}
					args = args[1:]
				}
				if len(args) > 0 {
					if meant := cmd.SuggestionsFor(args[0]); len(meant) > 0 {
						return fmt.Errorf("unknown command %q; did you mean %s?", args[0], strings.Join(meant, " or "))
					}
					return fmt.Errorf("unknown command %q; use one of %s", args[0], strings.Join(commandNames(cmd), ", "))
				}
				return cmd.Help()
			}
			cmd.AddCommand(subcommands...)
		},
	}
}

// AdminCommands returns the commands that query a running Caddy.
func AdminCommands() []*cobra.Command {
	return []*cobra.Command{
		statusCommand(), limitsCommand(), peekCommand(), resetCommand(),
		banCommand(), unbanCommand(), bansCommand(), topCommand(),
	}
}

// commandNames returns the names of the subcommands of cmd.
func commandNames(cmd *cobra.Command) (names []string) {
	for _, sub := range cmd.Commands() {
		names = append(names, sub.Name())
	}
	return names
}

// StatusError is an error that makes a command exit with a status, without a message.
type StatusError int

// ErrProblems is the status of a command that has found a problem.
const ErrProblems = StatusError(2)

// Error implements error.
func (s StatusError) Error() string { return fmt.Sprintf("exit status %d", int(s)) }

// Runs sets what a command does. One whose output could not be written fails, whatever
// its status.
func Runs(cmd *cobra.Command, run func(cmd *cobra.Command, args []string) error) *cobra.Command {
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		out := &terminal.Output{Writer: cmd.OutOrStdout()}
		cmd.SetOut(out)
		err := run(cmd, args)
		var status StatusError
		exits := errors.As(err, &status)
		if out.Err != nil && (err == nil || exits) {
			return fmt.Errorf("writing the output: %w", out.Err)
		}
		if !exits {
			return err
		}
		cmd.SilenceErrors = true
		// Only Caddy can make the error that carries an exit status.
		return caddycmd.WrapCommandFuncForCobra(func(caddycmd.Flags) (int, error) { return int(status), nil })(cmd, args)
	}
	return cmd
}

// ConfigUsage describes the flag config of commands that read config files.
const ConfigUsage = "The config file; by default the Caddyfile in the current directory"

// ConfigFile returns the config file that a command is to read: the one in its flag config or of
// its argument FILE, which may be "", or else the Caddyfile in the current directory.
func ConfigFile(cmd *cobra.Command, argument string) (string, error) {
	file, _ := cmd.Flags().GetString("config")
	if file != "" && argument != "" {
		return "", fmt.Errorf("config: %q can't be combined with --config %q; use one of them", argument, file)
	}
	if file = cmp.Or(file, argument); file != "" {
		return file, nil
	}
	const adjacent = "Caddyfile"
	if _, err := os.Stat(adjacent); err != nil {
		return "", errors.New("config: none given, and there is no Caddyfile in the current directory; use --config with a file")
	}
	return adjacent, nil
}

// ReadConfig returns the JSON of a config file, like caddycmd.LoadConfig does, but
// logs nothing.
func ReadConfig(file, adapter string) (text []byte, err error) {
	if file == "-" {
		text, err = io.ReadAll(os.Stdin)
	} else {
		text, err = os.ReadFile(file)
	}
	if err != nil {
		return nil, fmt.Errorf("reading the config: %w", err)
	}
	if base := strings.ToLower(filepath.Base(file)); adapter == "" && filepath.Ext(base) != ".json" &&
		(strings.HasPrefix(base, "caddyfile") || strings.HasSuffix(base, ".caddyfile")) {
		adapter = "caddyfile"
	}
	if adapter == "" {
		if !json.Valid(text) {
			return nil, fmt.Errorf("%s: not valid JSON; if it is in another format, name it with --adapter, such as --adapter caddyfile", file)
		}
		return text, nil
	}
	adapt := caddyconfig.GetAdapter(adapter)
	if adapt == nil {
		return nil, fmt.Errorf("adapter: %q is not valid; use one that this Caddy has, such as caddyfile", adapter)
	}
	if text, _, err = adapt.Adapt(text, map[string]any{"filename": file}); err != nil {
		return nil, fmt.Errorf("adapting the config: %w", err)
	}
	return text, nil
}
