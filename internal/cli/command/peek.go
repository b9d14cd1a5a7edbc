package command

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/admin/adminjson"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/terminal"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/key/keytext"
)

// aboutKeys is the help on the arguments of peek and reset.
const aboutKeys = `
LIMIT is a limit as the command limits lists it. KEY is what the limit's key is for a
request, such as the client's address. For a key of several placeholders, give the
value of each, in their order, or all with commas between, as they are shown. For a
request without a key, give the client's address with --client-ip instead. A key that is
shown in double quotes may be typed so: '"\xff"'.

Without LIMIT, it covers all limits whose key can be made from --client-ip, --key or both:
those by the client's address, those by what --key says, and the buckets of requests that
have no key. It shows buckets that hold something or deny requests, and the limits that
could not be queried.

The exit status is 2 if Redis does not answer: then only the buckets of the Caddy that
was asked are shown or emptied.`

// peekCommand returns the command peek.
func peekCommand() *cobra.Command {
	return bucketCommand(&cobra.Command{
		Use:   "peek [LIMIT [KEY...]]",
		Short: "Shows how full the buckets of a key or a client are",
		Long:  "\nShows how full the bucket of a key is, or the buckets of a client at all limits, and charges\nnothing.\n" + aboutKeys,
		Example: "  caddy rate-limit peek api/search 203.0.113.7\n  caddy rate-limit peek tenant acme --json\n" +
			"  caddy rate-limit peek --client-ip 203.0.113.7",
	}, false)
}

// resetCommand returns the command reset.
func resetCommand() *cobra.Command {
	cmd := bucketCommand(&cobra.Command{
		Use:   "reset [LIMIT [KEY...]]",
		Short: "Empties the buckets of a key or a client",
		Long: `
Empties the bucket of a key, or the buckets of a client at all limits, in Redis and in the
queried Caddy. Other Caddy instances follow within a second. It prints what the
buckets held. While Redis does not answer, only the buckets in the queried Caddy are
emptied. Without LIMIT, a bucket that all requests share is left as it is.
` + aboutKeys,
		Example: "  caddy rate-limit reset login 203.0.113.7\n  caddy rate-limit reset tenant acme --yes\n" +
			"  caddy rate-limit reset --client-ip 203.0.113.7",
	}, true)
	cmd.Flags().BoolP("yes", "y", false, "Do not ask for confirmation")
	return cmd
}

// bucketCommand completes a command that looks at buckets, or empties them.
func bucketCommand(cmd *cobra.Command, reset bool) *cobra.Command {
	cmd.Args, cmd.ValidArgsFunction = cobra.ArbitraryArgs, completeLimit
	Runs(cmd, func(cmd *cobra.Command, args []string) error {
		query, err := bucketQuery(cmd, args)
		if err == nil && reset {
			err = confirm(cmd, query)
		}
		if err != nil {
			return err
		}
		return fetchBuckets(cmd, query, reset)
	})
	addAdminFlags(cmd)
	cmd.Flags().String("client-ip", "", "The client's address; with LIMIT, for a request that has no key")
	cmd.Flags().StringArray("key", nil, "The key, at all limits; repeat it for the values of several placeholders")
	return cmd
}

// confirm asks whether buckets are to be emptied, unless the flag says so.
func confirm(cmd *cobra.Command, query *adminjson.BucketQuery) error {
	if yes, _ := cmd.Flags().GetBool("yes"); yes {
		return nil
	}
	if !terminal.Is(cmd.InOrStdin()) {
		return errors.New("the input is not a terminal: add --yes to skip the confirmation")
	}
	what := "the buckets of all limits"
	if query.Limit != "" {
		what = "the bucket of limit " + keytext.Safe(query.Limit)
	}
	fmt.Fprintf(cmd.ErrOrStderr(), "Empty %s for %s? [y/N] ", what, query.Whose())
	var reply string
	_, _ = fmt.Fscanln(cmd.InOrStdin(), &reply)
	if reply = strings.ToLower(reply); reply != "y" && reply != "yes" {
		return errors.New("nothing was changed")
	}
	return nil
}

// bucketQuery returns the request for the buckets that the arguments name.
func bucketQuery(cmd *cobra.Command, args []string) (*adminjson.BucketQuery, error) {
	query := new(adminjson.BucketQuery)
	keys, _ := cmd.Flags().GetStringArray("key")
	if cmd.Flags().Changed("key") && len(keys) == 0 {
		keys = []string{""} // which pflag takes for none
	}
	if len(args) > 0 {
		query.Limit = args[0]
		if len(args) > 1 && len(keys) > 0 {
			return nil, errors.New("key: KEY can't be combined with --key; use one of them")
		}
		if keys = append(keys, args[1:]...); query.Limit == "" {
			return nil, errors.New("LIMIT: empty; use one that the command limits lists, or none for all")
		}
	}
	for i, text := range keys {
		var err error
		if keys[i], err = keytext.Parse(text); err != nil {
			return nil, fmt.Errorf("key: %w", err)
		}
	}
	switch len(keys) {
	case 0:
	case 1:
		query.Key = &keys[0]
	default:
		query.Values = keys
	}
	if address, _ := cmd.Flags().GetString("client-ip"); cmd.Flags().Changed("client-ip") {
		query.Address = &address
	}
	if len(args) == 0 && query.Address == nil && len(keys) == 0 {
		return nil, errors.New("LIMIT: none given; use one, or --client-ip or --key for all limits")
	}
	return query, nil
}

// fetchBuckets requests buckets, or empties them, and shows the answer.
func fetchBuckets(cmd *cobra.Command, query *adminjson.BucketQuery, reset bool) error {
	path, now := "peek", func(io.Writer, string, string) {}
	if reset {
		path, now = "reset", func(w io.Writer, emptied, failure string) {
			where := ""
			if failure != "" {
				where = " in this Caddy alone"
			}
			fmt.Fprintf(w, "%s empty now%s. Before:\n", emptied, where)
		}
	}
	if query.Limit != "" {
		return ask(cmd, path, query, func(w io.Writer, one *adminjson.Level) error {
			now(w, "The bucket is", one.Error)
			printLevel(w, one)
			return printLeased(w, reset, *one)
		})
	}
	return ask(cmd, path, query, func(w io.Writer, all *adminjson.Levels) error {
		if len(all.Buckets) > 0 {
			now(w, "These buckets are", all.Error)
		}
		err := printLevels(w, all, query.Whose())
		return cmp.Or(err, printLeased(w, reset, all.Buckets...))
	})
}

// printLeased says, after a reset, for how long other nodes may use what they have leased of buckets
// that are empty now: for the time of the lease from when there would have been room, and they
// lease up to that time before.
func printLeased(w io.Writer, reset bool, buckets ...adminjson.Level) error {
	var longest time.Duration
	for i := range buckets {
		if text, ok := strings.CutPrefix(buckets[i].Consistency, "lease "); ok && buckets[i].Node != nil {
			d, _ := time.ParseDuration(text)
			longest = max(longest, d)
		}
	}
	if !reset || longest == 0 {
		return nil
	}
	_, err := fmt.Fprintf(w, "Other instances may still use units that they have leased, for at most %v.\n", 2*longest)
	return err
}

// printLevel prints what peek and reset answer.
func printLevel(w io.Writer, a *adminjson.Level) {
	from := keytext.Safe(a.From)
	if a.Error != "" {
		from = "this Caddy, as Redis does not answer"
	}
	row := func(title, text string) { fmt.Fprintf(w, "%-11s  %s\n", title, text) }
	row("limit", keytext.Safe(a.Limit))
	if options := a.NonDefault(); len(options) > 0 {
		row("options", strings.Join(options, ", "))
	}
	row("in", from)
	row("level", levelText(a))
	if a.Remaining != nil {
		row("remaining", strconv.FormatInt(*a.Remaining, 10))
	}
	if a.Banned > 0 {
		row("banned for", terminal.Briefly(time.Duration(a.Banned)))
	}
	if a.Denies() {
		row("retry after", retryText(a))
	}
	row("empties in", terminal.Briefly(time.Duration(a.Clear)))
	if a.Node != nil {
		row("local", nodeText(a.Node))
	}
}

// levelText returns the level as it is shown.
func levelText(a *adminjson.Level) string {
	level := strconv.FormatInt(a.Level, 10)
	if a.Size != nil {
		level += fmt.Sprintf(" of %d", *a.Size)
	}
	if a.Held > 0 {
		level += fmt.Sprintf(", %d of them held", a.Held)
	}
	return level
}

// retryText returns how long it takes until a request is admitted, as it is shown. A dry run
// admits it at once.
func retryText(a *adminjson.Level) string {
	wait, text := a.Banned, ""
	if a.RetryAfter != nil {
		wait = *a.RetryAfter
	}
	switch {
	case a.Never:
		text = "never"
	case a.InProgress:
		text = "a request in progress ends"
	case wait > 0 || a.RetryAfter != nil:
		text = terminal.Briefly(time.Duration(wait))
	}
	if a.DryRun && (a.Never || a.InProgress || wait > 0) {
		text += ", if enforced"
	}
	return text
}

// printLevels prints what peek and reset answer about the buckets of all limits. It returns
// an error if there is no bucket to request.
func printLevels(w io.Writer, a *adminjson.Levels, whose string) error {
	held := terminal.NewTable("LIMIT", adminjson.OptionsTitle, "KEY", "LEVEL", "REMAINING", "RETRY AFTER", "EMPTIES IN", "LOCAL")
	for i := range a.Buckets {
		b := &a.Buckets[i]
		remaining := ""
		if b.Remaining != nil {
			remaining = strconv.FormatInt(*b.Remaining, 10)
		}
		held.Add(b.Denies() && !b.DryRun, keytext.Safe(b.Limit), strings.Join(b.NonDefault(), ", "), keyText(&b.Key), levelText(b), terminal.Number(remaining),
			retryText(b), terminal.Briefly(time.Duration(b.Clear)), nodeText(b.Node))
	}
	held.DropEmpty()
	if len(a.Buckets) > 0 {
		held.Print(w)
	} else if a.Checked > 0 {
		fmt.Fprintf(w, "None of the %[2]d buckets of %[1]s holds anything.\n", whose, a.Checked)
	}
	if len(a.Skipped) > 0 {
		not := terminal.NewTable("SKIPPED", "WHY")
		for _, n := range a.Skipped {
			not.Add(false, keytext.Safe(n.Limit), keytext.Safe(n.Why))
		}
		if a.Checked > 0 {
			fmt.Fprintln(w)
		}
		not.Print(w)
	}
	if a.Checked == 0 {
		return errors.New("no limit has a bucket for what was given")
	}
	return nil
}

// nodeText returns what this process knows, as it is shown.
func nodeText(n *adminjson.Node) string {
	if n == nil {
		return ""
	}
	known := strconv.FormatInt(n.Level, 10)
	if n.Leased > 0 {
		known += fmt.Sprintf(", %d leased", n.Leased)
	}
	if n.Unreported > 0 {
		known += fmt.Sprintf(", %d not reported yet", n.Unreported)
	}
	if n.Remembered {
		known += ", and denies without asking Redis"
	}
	return known
}

// keyText returns the key as it is shown.
func keyText(k *adminjson.Key) string {
	switch {
	case k.Address != nil:
		return keytext.Safe(*k.Address) + " (no key)"
	case k.Key == nil:
		return ""
	case k.NotUTF8:
		return keytext.Safe(*k.Key) + " (not UTF-8)"
	}
	return keytext.Safe(*k.Key)
}
