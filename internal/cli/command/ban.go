package command

import (
	"fmt"
	"io"
	"net/url"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/spf13/cobra"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/admin/adminjson"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/terminal"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/key/keytext"
)

// aboutBans is the help on the arguments of ban and unban.
const aboutBans = `
LIMIT is a limit with the option ban, as the command limits lists it. KEY is what the
limit's key is for a request, such as the client's address. For a key of several
placeholders, give the value of each, in their order, or all with commas between, as
they are shown. For a request without a key, give the client's address with --client-ip
instead. A key that is shown in double quotes may be typed so: '"\xff"'.

The exit status is 2 if Redis does not answer: then the change applies only to the
Caddy that was asked.`

// banCommand returns the command ban.
func banCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ban LIMIT KEY... DURATION",
		Short: "Bans a key",
		Long: `
Bans a key at a limit for a duration from now on, such as 90s, 10m or 7d, on all Caddy
instances, as if it had been denied too often. A ban that ends later stays.
` + aboutBans,
		Example: "  caddy rate-limit ban login 203.0.113.7 24h\n  caddy rate-limit ban login 1h --client-ip 203.0.113.7",
	}
	return aboutBan(cmd, 2, func(cmd *cobra.Command, args []string) (string, any, error) {
		last := len(args) - 1
		if _, err := caddy.ParseDuration(args[last]); err != nil {
			return "", nil, option.Bad("DURATION", args[last], "a duration behind LIMIT and KEY, such as 10m")
		}
		query, err := bucketQuery(cmd, args[:last])
		if err != nil {
			return "", nil, err
		}
		return "ban", adminjson.BanQuery{BucketQuery: *query, Duration: args[last]}, nil
	})
}

// unbanCommand returns the command unban.
func unbanCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "unban LIMIT KEY...",
		Short: "Ends the ban of a key",
		Long: `
Ends the ban of a key at a limit, and forgets its earlier ones. Other Caddy instances
follow within a second. The bucket keeps its level; the command reset empties it too.
` + aboutBans,
		Example: "  caddy rate-limit unban login 203.0.113.7\n  caddy rate-limit unban login --client-ip 203.0.113.7",
	}
	return aboutBan(cmd, 1, func(cmd *cobra.Command, args []string) (string, any, error) {
		query, err := bucketQuery(cmd, args)
		return "unban", query, err
	})
}

// aboutBan completes a command about one ban, with at least that many arguments. build returns
// the path of the admin API and what to send there.
func aboutBan(cmd *cobra.Command, args int, build func(*cobra.Command, []string) (string, any, error)) *cobra.Command {
	cmd.ValidArgsFunction = completeBan
	cmd.Args = func(cmd *cobra.Command, got []string) error {
		if len(got) < args {
			return fmt.Errorf("too few arguments; use %s", cmd.Use)
		}
		return nil
	}
	Runs(cmd, func(cmd *cobra.Command, args []string) error {
		path, send, err := build(cmd, args)
		if err != nil {
			return err
		}
		return ask(cmd, path, send, func(w io.Writer, a *adminjson.Ban) error { return printBan(w, path, a) })
	})
	addAdminFlags(cmd)
	cmd.Flags().String("client-ip", "", "The address of a client whose requests have no key")
	return cmd
}

// printBan prints what ban and unban answer.
func printBan(w io.Writer, path string, a *adminjson.Ban) (err error) {
	left, where := terminal.Briefly(time.Duration(a.Left)), ""
	if a.DryRun {
		where += ", in a dry run"
	}
	if a.Error != "" {
		where += ", in this Caddy alone"
	}
	of := fmt.Sprintf("%s at limit %s", keyText(&a.Key), keytext.Safe(a.Limit))
	switch {
	case a.Left == 0:
		_, err = fmt.Fprintf(w, "There is no ban of %s%s.\n", of, where)
	case path == "unban":
		_, err = fmt.Fprintf(w, "The ban of %s is lifted%s. It would have lasted for %s. Its bucket stays as it is; reset empties it too.\n", of, where, left)
	default:
		_, err = fmt.Fprintf(w, "Banned %s for %s%s.\n", of, left, where)
	}
	return err
}

// bansCommand returns the command bans.
func bansCommand() *cobra.Command {
	cmd := Runs(&cobra.Command{
		Use:   "bans [LIMIT]",
		Short: "Lists the keys that are banned",
		Long: `
Lists the keys that are banned at a limit, or at all limits, and for how long. These are
the bans that the queried Caddy has begun or met, at most 1000 per limit, longest-lasting
first. A ban covers the requests that the limit matches, which SITE and MATCH show. One that began elsewhere is listed once a request of that key reaches this one.`,
		Example: "  caddy rate-limit bans\n  caddy rate-limit bans login --json",
		Args:    cobra.MaximumNArgs(1),
	}, func(cmd *cobra.Command, args []string) error {
		path := "bans"
		if len(args) > 0 {
			path += "?limit=" + url.QueryEscape(args[0])
		}
		return ask(cmd, path, nil, printBans)
	})
	cmd.ValidArgsFunction = completeBan
	addAdminFlags(cmd)
	return cmd
}

// printBans prints what bans answers.
func printBans(w io.Writer, a *adminjson.Bans) error {
	if len(a.Bans) == 0 {
		_, err := fmt.Fprintln(w, "No key is banned, as far as this Caddy knows.")
		return err
	}
	bans := terminal.NewTable("LIMIT", "KEY", "BANNED FOR", "SITE", "MATCH")
	for i := range a.Bans {
		b := &a.Bans[i]
		left := terminal.Briefly(time.Duration(b.Left))
		if b.DryRun {
			left += " (dry run)"
		}
		for j := range b.Scopes {
			bans.Add(false, keytext.Safe(b.Limit), keyText(&b.Key), left, siteText(&b.Scopes[j]), matches(&b.Scopes[j]))
		}
	}
	bans.Print(w)
	return nil
}

// completeBan completes the path of a limit that bans.
func completeBan(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return limitPaths(cmd, func(l *adminjson.Limit) bool { return len(l.Ban) > 0 }), cobra.ShellCompDirectiveNoFileComp
}
