package ratelimit

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"github.com/caddyserver/caddy/v2"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"
	"golang.org/x/term"
)

// command returns the command caddy rate-limit.
func command() caddycmd.Command {
	return caddycmd.Command{
		Name:  commandName(ownName),
		Usage: "<command>",
		Short: "Shows and changes what rate limits do",
		Long: `
Shows what the limits of the rate_limit directive do, and empties buckets.

The commands status, limits, peek, reset and top ask a running Caddy by its admin
endpoint. Its address is that of --address, or that in the config file of --config;
by default it is localhost:2019, or that of the environment variable CADDY_ADMIN.
The other commands read config files and need no running Caddy.

The exit status is 0 if all is well, 1 if the command could not do what it was
asked to, and 2 if it did, but found that something is wrong: status that Redis is
unavailable, check that something in the config should be changed, convert that
something has no equivalent, peek and reset that Redis does not answer, so that they
went by what the Caddy that was asked has.`,
		CobraFunc: func(cmd *cobra.Command) {
			cmd.Args = cobra.ArbitraryArgs
			cmd.RunE = func(cmd *cobra.Command, args []string) error {
				if len(args) > 0 {
					return fmt.Errorf("unknown command %q, want one of: %s", args[0], strings.Join(commandNames(cmd), ", "))
				}
				return cmd.Help()
			}
			cmd.AddCommand(commands()...)
		},
	}
}

// commands returns the subcommands of caddy rate-limit.
func commands() []*cobra.Command {
	return []*cobra.Command{
		statusCommand(), limitsCommand(), peekCommand(), resetCommand(), topCommand(),
		explainCommand(), checkCommand(), replayCommand(), convertCommand(),
	}
}

// commandNames returns the names of the subcommands of cmd.
func commandNames(cmd *cobra.Command) (names []string) {
	for _, sub := range cmd.Commands() {
		names = append(names, sub.Name())
	}
	return names
}

// errFound makes a command exit with status 2, without a message.
var errFound = errors.New("something is wrong")

// runs sets what a command does. A command that returns errFound exits with
// status 2; one whose output could not be written fails.
func runs(cmd *cobra.Command, run func(cmd *cobra.Command, args []string) error) *cobra.Command {
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		out := &output{Writer: cmd.OutOrStdout()}
		cmd.SetOut(out)
		err := run(cmd, args)
		if out.err != nil && (err == nil || errors.Is(err, errFound)) {
			return fmt.Errorf("writing the output: %w", out.err)
		}
		if !errors.Is(err, errFound) {
			return err
		}
		cmd.SilenceErrors = true
		// Only Caddy can make the error that carries an exit status.
		return caddycmd.WrapCommandFuncForCobra(func(caddycmd.Flags) (int, error) { return 2, nil })(cmd, args)
	}
	return cmd
}

// output is what a command prints to. It keeps the first error.
type output struct {
	io.Writer
	err error
}

// Write implements io.Writer.
func (o *output) Write(text []byte) (int, error) {
	n, err := o.Writer.Write(text)
	o.err = cmp.Or(o.err, err)
	return n, err
}

// adminTimeout is how long commands wait for an answer of the admin endpoint.
const adminTimeout = 10 * time.Second

// addAdminFlags adds the flags of commands that ask a running Caddy.
func addAdminFlags(cmd *cobra.Command) {
	cmd.Flags().String("address", "", "The address of the admin endpoint, such as localhost:2019 or unix//run/caddy.sock")
	cmd.Flags().StringP("config", "c", "", "The config file that has the address of the admin endpoint")
	cmd.Flags().StringP("adapter", "a", "", "The adapter of the config file, if it is neither JSON nor a Caddyfile")
	cmd.Flags().Bool("json", false, "Print the answer as JSON")
}

// adminClient asks a running Caddy.
type adminClient struct {
	address string // as the user knows it
	origin  string
	http    http.Client
}

// newAdminClient returns a client for the address that the flags of cmd tell.
func newAdminClient(cmd *cobra.Command, timeout time.Duration) (*adminClient, error) {
	address, err := adminAddress(cmd)
	if err != nil {
		return nil, err
	}
	parsed, err := caddy.ParseNetworkAddress(address)
	if err != nil || parsed.PortRangeSize() > 1 || parsed.IsFdNetwork() {
		return nil, fmt.Errorf("address: got %q, want one such as localhost:2019 or unix//run/caddy.sock", address)
	}
	c := &adminClient{address: address, origin: "http://" + parsed.JoinHostPort(0)}
	dialTo := parsed.JoinHostPort(0)
	if parsed.IsUnixNetwork() {
		c.origin = "http://127.0.0.1"
		dialTo, _, _ = strings.Cut(parsed.Host, "|") // permissions of the socket
	}
	if _, err := url.Parse(c.origin); err != nil {
		return nil, fmt.Errorf("address: got %q, want one such as localhost:2019 or unix//run/caddy.sock", address)
	}
	c.http = http.Client{
		Timeout: timeout,
		Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, parsed.Network, dialTo)
		}},
	}
	return c, nil
}

// adminAddress returns the address of the admin endpoint.
func adminAddress(cmd *cobra.Command) (string, error) {
	address, _ := cmd.Flags().GetString("address")
	file, _ := cmd.Flags().GetString("config")
	adapter, _ := cmd.Flags().GetString("adapter")
	if address != "" || file == "" {
		if adapter != "" && file == "" {
			return "", errors.New("adapter: got one without a config file, want --config with it")
		}
		return cmp.Or(address, caddy.DefaultAdminListen), nil
	}
	text, err := readConfig(file, adapter)
	if err != nil {
		return "", err
	}
	var cfg struct {
		Admin caddy.AdminConfig `json:"admin"`
	}
	if err := json.Unmarshal(text, &cfg); err != nil {
		return "", fmt.Errorf("%s: decoding the config: %w", file, err)
	}
	if cfg.Admin.Disabled {
		return "", fmt.Errorf("%s: the admin endpoint is off, and a running Caddy can't be asked without it", file)
	}
	return cmp.Or(caddy.NewReplacer().ReplaceAll(cfg.Admin.Listen, ""), caddy.DefaultAdminListen), nil
}

// ask sends a request to the endpoint of this module and returns the answer. What
// is to be sent is nil for GET.
func (c *adminClient) ask(ctx context.Context, path string, send any) (*http.Response, error) {
	method, body := http.MethodGet, io.Reader(nil)
	if send != nil {
		text, err := json.Marshal(send)
		if err != nil {
			return nil, err
		}
		method, body = http.MethodPost, bytes.NewReader(text)
	}
	r, err := http.NewRequestWithContext(ctx, method, c.origin+"/"+ownName+"/"+path, body)
	if err != nil {
		return nil, err
	}
	if send != nil {
		r.Header.Set("Content-Type", "application/json")
	}
	if c.origin != "http://127.0.0.1" {
		r.Header.Set("Origin", c.origin)
	}
	res, err := c.http.Do(r)
	if err != nil {
		return nil, c.unreachable(err)
	}
	if res.StatusCode == http.StatusOK {
		return res, nil
	}
	defer res.Body.Close()
	return nil, c.refused(res)
}

// unreachable returns the error for a Caddy that did not answer.
func (c *adminClient) unreachable(err error) error {
	if timeout := net.Error(nil); errors.As(err, &timeout) && timeout.Timeout() {
		return fmt.Errorf("the admin endpoint at %s did not answer within %v", c.address, c.http.Timeout)
	}
	for inner := errors.Unwrap(err); inner != nil; inner = errors.Unwrap(err) {
		err = inner
	}
	return fmt.Errorf("no admin endpoint answers at %s: %w; if Caddy runs, name its endpoint with --address or --config", c.address, err)
}

// refused returns the error for an answer that is one.
func (c *adminClient) refused(res *http.Response) error {
	body, _ := io.ReadAll(io.LimitReader(res.Body, 1<<28))
	var answer struct{ Error string }
	switch err := json.Unmarshal(body, &answer); {
	case err == nil && res.StatusCode == http.StatusServiceUnavailable && answer.Error != "":
		return &unavailableError{answer.Error, body}
	case err == nil && answer.Error != "":
		return errors.New(printable(answer.Error))
	case res.StatusCode == http.StatusNotFound:
		return fmt.Errorf("the Caddy at %s has no endpoint for rate limits: it runs without this module, or with an older version", c.address)
	}
	return fmt.Errorf("the admin endpoint at %s answered with status %d", c.address, res.StatusCode)
}

// unavailableError is the error for buckets of which only the Caddy that was asked
// knows something, as Redis does not answer.
type unavailableError struct {
	reason string
	answer answerJSON
}

// Error implements error.
func (e *unavailableError) Error() string { return printable(e.reason) }

// answerJSON is the answer to a command.
type answerJSON []byte

// fetch asks and returns the whole answer.
func (c *adminClient) fetch(ctx context.Context, path string, send any) (answerJSON, error) {
	res, err := c.ask(ctx, path, send)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	body, err := io.ReadAll(io.LimitReader(res.Body, 1<<28))
	if err != nil {
		return nil, c.unreachable(err)
	}
	return body, nil
}

// show prints an answer as JSON if the user wants it so, or decodes it for print,
// which returns the command's error.
func (a answerJSON) show(cmd *cobra.Command, into any, print func(w io.Writer) error) error {
	if err := json.Unmarshal(a, into); err != nil {
		return fmt.Errorf("the admin endpoint's answer can't be read: %w", err)
	}
	w := cmd.OutOrStdout()
	if asJSON, _ := cmd.Flags().GetBool("json"); !asJSON {
		return print(w)
	}
	var text bytes.Buffer
	if err := json.Indent(&text, a, "", "  "); err != nil {
		return err
	}
	_, err := io.WriteString(w, printableJSON(strings.TrimSpace(text.String()))+"\n")
	if err != nil {
		return err
	}
	return print(io.Discard) // for its error
}

// askAndShow asks a running Caddy and shows the answer.
func askAndShow(cmd *cobra.Command, path string, send, into any, print func(w io.Writer) error) error {
	client, err := newAdminClient(cmd, adminTimeout)
	if err != nil {
		return err
	}
	answer, err := client.fetch(cmd.Context(), path, send)
	if err != nil {
		return err
	}
	return answer.show(cmd, into, print)
}

// printable returns text as it is if it is safe to print, quoted otherwise: clients
// choose keys, and could send what changes the terminal or the order of letters.
func printable(text string) string {
	if text == "" || strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) || r == unicode.ReplacementChar }) {
		return strconv.Quote(text)
	}
	return text
}

// printableJSON returns JSON with everything escaped that is not safe to print.
func printableJSON(text string) string {
	var b strings.Builder
	for _, r := range text {
		switch {
		case unicode.IsPrint(r) || r == '\n':
			b.WriteRune(r)
		case r > 0xffff:
			high, low := 0xd800+(r-0x10000)>>10, 0xdc00+(r-0x10000)&0x3ff
			fmt.Fprintf(&b, `\u%04x\u%04x`, high, low)
		default:
			fmt.Fprintf(&b, `\u%04x`, r)
		}
	}
	return b.String()
}

// table is what commands print, with a title over each column.
type table struct {
	rows   [][]string
	alerts map[int]bool // rows that tell of something wrong
}

// newTable returns a table with the titles of its columns.
func newTable(titles ...string) *table {
	return &table{rows: [][]string{titles}, alerts: make(map[int]bool)}
}

// add adds a row.
func (t *table) add(alert bool, cells ...any) {
	row := make([]string, len(cells))
	for i, c := range cells {
		row[i] = fmt.Sprint(c)
	}
	t.alerts[len(t.rows)] = alert
	t.rows = append(t.rows, row)
}

// lines returns the lines of the table, coloured if wanted.
func (t *table) lines(colours bool) []string {
	var text strings.Builder
	w := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	for _, row := range t.rows {
		fmt.Fprintln(w, strings.Join(row, "\t"))
	}
	_ = w.Flush() // to memory
	lines := strings.Split(strings.TrimSuffix(text.String(), "\n"), "\n")
	for i, line := range lines {
		line = strings.TrimRight(line, " ")
		switch {
		case colours && i == 0:
			line = "\x1b[1m" + line + "\x1b[0m"
		case colours && t.alerts[i]:
			line = "\x1b[31m" + line + "\x1b[0m"
		}
		lines[i] = line
	}
	return lines
}

// print prints the table, in colours if w is a terminal.
func (t *table) print(w io.Writer) {
	fmt.Fprintln(w, strings.Join(t.lines(coloured(w)), "\n"))
}

// isTerminal reports whether f is a terminal.
func isTerminal(f any) bool {
	if o, ok := f.(*output); ok {
		f = o.Writer
	}
	file, ok := f.(*os.File)
	return ok && term.IsTerminal(int(file.Fd())) //nolint:gosec // as x/term wants it
}

// coloured reports whether to print colours to w.
func coloured(w io.Writer) bool { return isTerminal(w) && os.Getenv("NO_COLOR") == "" }

// statusCommand returns the command status.
func statusCommand() *cobra.Command {
	cmd := runs(&cobra.Command{
		Use:   "status",
		Short: "Shows whether limits are decided on, and where",
		Long: `
Shows where the buckets are kept, whether each Redis server can be reached, and how
many requests each limit has admitted and denied.

The exit status is 2 if a Redis server is unavailable.`,
		Example: "  caddy rate-limit status\n  caddy rate-limit status --address unix//run/caddy.sock --json",
		Args:    cobra.NoArgs,
	}, func(cmd *cobra.Command, _ []string) error {
		var a statusAnswer
		return askAndShow(cmd, "status", nil, &a, func(w io.Writer) error { return printStatus(w, &a) })
	})
	addAdminFlags(cmd)
	return cmd
}

// limitsCommand returns the command limits.
func limitsCommand() *cobra.Command {
	cmd := runs(&cobra.Command{
		Use:     "limits",
		Short:   "Lists the limits of the running config",
		Long:    "\nLists the limits of the config that Caddy runs, with their numbers and keys.",
		Example: "  caddy rate-limit limits",
		Args:    cobra.NoArgs,
	}, func(cmd *cobra.Command, _ []string) error {
		var a limitsAnswer
		return askAndShow(cmd, "limits", nil, &a, func(w io.Writer) error { return printLimits(w, &a) })
	})
	addAdminFlags(cmd)
	return cmd
}

// aboutKeys is the help on the arguments of peek and reset.
const aboutKeys = `
LIMIT is a limit as the command limits lists it. KEY is what the limit's key is for a
request, such as the client's address. For a key of several placeholders, give the
value of each, in their order. For a request without a key, give the client's address
with --client-ip instead.

Without LIMIT, all limits are asked whose key can be made from --client-ip, --key or
both: those keyed by the client's address, those keyed by what --key says, and the
buckets of requests that have no key. Only buckets that hold something or deny requests
are shown, and which limits could not be asked.

The exit status is 2 if Redis does not answer, so that only the Caddy that is asked
was looked at.`

// peekCommand returns the command peek.
func peekCommand() *cobra.Command {
	return bucketCommand(&cobra.Command{
		Use:   "peek [LIMIT [KEY...]]",
		Short: "Shows how full the buckets of a key or a client are",
		Long:  "\nShows how full the bucket of a key is, or those of a client at all limits, and charges\nnothing.\n" + aboutKeys,
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
Empties the bucket of a key, or those of a client at all limits, in Redis and in the
Caddy that is asked. Other Caddy instances follow within a second. It prints what the
buckets held. While Redis does not answer, only those in the Caddy that is asked are
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
	runs(cmd, func(cmd *cobra.Command, args []string) error {
		asked, err := bucketAsked(cmd, args)
		if err == nil && reset {
			err = confirm(cmd, asked)
		}
		if err != nil {
			return err
		}
		return askBuckets(cmd, asked, reset)
	})
	addAdminFlags(cmd)
	cmd.Flags().String("client-ip", "", "The client's address; with LIMIT, for a request that has no key")
	cmd.Flags().StringArray("key", nil, "The key, at all limits; repeat it for the values of several placeholders")
	return cmd
}

// confirm asks whether buckets are to be emptied, unless the flag says so.
func confirm(cmd *cobra.Command, asked *bucketRequest) error {
	if yes, _ := cmd.Flags().GetBool("yes"); yes {
		return nil
	}
	if !isTerminal(cmd.InOrStdin()) {
		return errors.New("nobody can be asked, as the input is not a terminal: add --yes to empty the bucket")
	}
	what := "the buckets of all limits"
	if asked.limit != "" {
		what = "the bucket of limit " + printable(asked.limit)
	}
	fmt.Fprintf(cmd.ErrOrStderr(), "Empty %s for %s? [y/N] ", what, asked.whose())
	var reply string
	_, _ = fmt.Fscanln(cmd.InOrStdin(), &reply)
	if reply = strings.ToLower(reply); reply != "y" && reply != "yes" {
		return errors.New("nothing was changed")
	}
	return nil
}

// printableList returns texts that are safe to print.
func printableList(texts []string) string {
	shown := make([]string, len(texts))
	for i, text := range texts {
		shown[i] = printable(text)
	}
	return strings.Join(shown, " ")
}

// bucketAsked returns the request for the buckets that the arguments name.
func bucketAsked(cmd *cobra.Command, args []string) (*bucketRequest, error) {
	asked := new(bucketRequest)
	keys, _ := cmd.Flags().GetStringArray("key")
	if cmd.Flags().Changed("key") && len(keys) == 0 {
		keys = []string{""} // which pflag can't tell from none
	}
	if len(args) > 0 {
		asked.limit = args[0]
		if len(args) > 1 && len(keys) > 0 {
			return nil, errors.New("key: got KEY and --key, want one of them")
		}
		if keys = append(keys, args[1:]...); asked.limit == "" {
			return nil, errors.New("LIMIT: got an empty one, want one that the command limits lists, or none for all")
		}
	}
	switch len(keys) {
	case 0:
	case 1:
		asked.key = &keys[0]
	default:
		asked.values = keys
	}
	if address, _ := cmd.Flags().GetString("client-ip"); cmd.Flags().Changed("client-ip") {
		asked.address = &address
	}
	if len(args) == 0 && asked.address == nil && len(keys) == 0 {
		return nil, errors.New("got no LIMIT, want one, or --client-ip or --key to ask all limits")
	}
	return asked, nil
}

// askBuckets asks for buckets, or to empty them, and shows the answer. If Redis does
// not answer, it shows what that Caddy knows.
func askBuckets(cmd *cobra.Command, asked *bucketRequest, reset bool) error {
	path, title := "peek", ""
	if reset {
		path, title = "reset", "The bucket is empty now%s. Before:\n"
	}
	if reset && asked.limit == "" {
		title = "These buckets are empty now%s. Before:\n"
	}
	client, err := newAdminClient(cmd, adminTimeout)
	if err != nil {
		return err
	}
	answer, err := client.fetch(cmd.Context(), path, asked)
	unavailable, where := (*unavailableError)(nil), ""
	if errors.As(err, &unavailable) {
		answer, where = unavailable.answer, " in this Caddy alone"
	} else if err != nil {
		return err
	}
	if asked.limit != "" {
		var one bucketAnswer
		err = answer.show(cmd, &one, func(w io.Writer) error {
			if reset {
				fmt.Fprintf(w, title, where)
			}
			one.print(w)
			return nil
		})
	} else {
		var all bucketsAnswer
		err = answer.show(cmd, &all, func(w io.Writer) error {
			if reset && len(all.Buckets) > 0 {
				fmt.Fprintf(w, title, where)
			}
			return all.print(w, asked.whose())
		})
	}
	if err != nil || unavailable == nil {
		return err
	}
	fmt.Fprintf(cmd.ErrOrStderr(), "Error: %v; this is what the Caddy at %s has\n", unavailable, client.address)
	return errFound
}

// completeLimit completes the path of a limit by asking the running Caddy.
func completeLimit(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return limitPaths(cmd, func(*limitAnswer) bool { return true }), cobra.ShellCompDirectiveNoFileComp
}

// limitPaths returns the names of those limits of the running Caddy that are wanted;
// none if it does not answer at once.
func limitPaths(cmd *cobra.Command, wanted func(*limitAnswer) bool) (paths []string) {
	client, err := newAdminClient(cmd, time.Second)
	if err != nil {
		return nil
	}
	answer, err := client.fetch(context.Background(), "limits", nil)
	var limits limitsAnswer
	if err != nil || json.Unmarshal(answer, &limits) != nil {
		return nil
	}
	for i := range limits.Limits {
		if l := &limits.Limits[i]; wanted(l) && !slices.Contains(paths, l.Name) {
			paths = append(paths, l.Name)
		}
	}
	return paths
}
