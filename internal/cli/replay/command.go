package replay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/signal"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/spf13/cobra"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/accesslog"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/command"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/offline"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/report"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/terminal"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/key/keytext"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/telemetry"
)

// explanation is what help says about the command.
const explanation = `
Shows what the limits of a config would have done with the requests of access logs:
how many requests each limit would have denied, of how many keys, and which size
would deny no more than a few of them.

Logs are in Caddy's JSON, or in the common or combined log format of other servers,
and may be compressed by gzip or zstd. Lines may be wrapped as by Docker, Kubernetes,
journald or syslog. "-" is standard input. Several logs, such as rolled ones or those
of several nodes, are replayed as one, by time.

Requests are decided at the times at which they arrived, by the matchers, keys and
numbers of the config, with buckets in memory and max_keys as configured. No server
is started and nothing is connected to. Other handlers do not run, except those that
prepare requests for limits, such as vars, map and rewrite.

A replay knows only what is in the log:

  - Caddy redacts the headers Cookie and Authorization unless log_credentials is on,
    and a filter may remove all headers. Limits whose key needs them are not replayed
    for such requests.
  - The common and combined formats have no host (see --host) unless lines begin with
    it, as in Apache's vhost_combined. If the address of a client is a list,
    the first counts. A log in which the client could be one of several fields is
    refused.
  - They have no headers besides Referer and User-Agent, and times in whole seconds.
    So the requests of a second are replayed twice, spread evenly and all at once. The
    numbers of denied requests are given for both.
    They also lack durations and the header fields of responses, which limits with
    concurrency, count or actual_cost may need.
  - Requests that were denied in the log are replayed like others. How clients would
    have reacted is unknown, and so is the outcome of a request whose response was a
    429.

Press Ctrl-C for the results so far. The exit status is 0 if requests were replayed,
and 1 if none could be, or for bad input.`

// Command returns the command replay.
func Command() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "replay [--config FILE] [--compare FILE] LOG...",
		Short: "Shows what limits would have done with the requests of access logs",
		Long:  explanation,
		Example: `  caddy rate-limit replay /var/log/caddy/access*.log*
  caddy rate-limit replay --config Caddyfile --compare Caddyfile.new --html report.html access.log
  caddy rate-limit replay --target 0.1% --json access.log.gz`,
		Args: cobra.MinimumNArgs(1),
	}
	f := cmd.Flags()
	f.StringP("config", "c", "", command.ConfigUsage)
	f.String("compare", "", "Another config file to compare it with")
	f.StringP("adapter", "a", "", "The adapter of the config files, if they are neither JSON nor Caddyfiles")
	f.String("format", "auto", "The format of the logs: auto, json, common or combined")
	f.String("host", "", "The host to assume for requests whose log has none; not needed if the config has only one")
	f.String("target", "0.1%", "The share of keys that may be denied at times, for the size to propose")
	f.Bool("utc", false, "Count by the hours of UTC instead of this system's time zone")
	f.Bool("show-keys", false, "Show the keys that were denied most, such as addresses")
	f.Bool("json", false, "Print the results as JSON")
	f.String("html", "", "Write a report with plots to this file, which must be new or a report")
	_ = cmd.RegisterFlagCompletionFunc("format", cobra.FixedCompletions([]string{"auto", "json", "common", "combined"}, cobra.ShellCompDirectiveNoFileComp))
	return command.Runs(cmd, func(cmd *cobra.Command, logs []string) error { return runReplay(cmd, logs) })
}

// replayFlags are the flags of the command.
type replayFlags struct {
	configs       []string
	adapter, html string
	format        accesslog.Format
	target        float64 // as a fraction
	targetText    string
	asJSON        bool
	options       Options
}

// readFlags reads the flags.
func readFlags(cmd *cobra.Command) (f replayFlags, err error) {
	flags := cmd.Flags()
	text := func(name string) string {
		v, _ := flags.GetString(name)
		return v
	}
	file, err := command.ConfigFile(cmd, "")
	if err != nil {
		return f, err
	}
	f.configs = []string{file}
	if other := text("compare"); other != "" {
		f.configs = append(f.configs, other)
	}
	f.adapter, f.html = text("adapter"), text("html")
	if f.format, err = accesslog.ParseFormat(text("format")); err != nil {
		return f, err
	}
	f.targetText = text("target")
	percent, isPercent := strings.CutSuffix(f.targetText, "%")
	f.target, err = strconv.ParseFloat(percent, 64)
	if isPercent {
		f.target /= 100
	}
	if err != nil || !(f.target >= 0 && f.target < 1) {
		return f, fmt.Errorf("target: %q is not valid; use a share from 0 to less than 1, such as 0.1%% or 0.001", f.targetText)
	}
	f.asJSON, _ = flags.GetBool("json")
	f.options = Options{Location: time.Local, Host: text("host")}
	f.options.ShowKeys, _ = flags.GetBool("show-keys")
	if utc, _ := flags.GetBool("utc"); utc {
		f.options.Location = time.UTC
	}
	return f, nil
}

// load loads the configs. closeAll closes those that were loaded.
func (f *replayFlags) load() (configs []*offline.Config, closeAll func(), err error) {
	closeAll = func() {
		for _, c := range configs {
			c.Close()
		}
	}
	for _, file := range f.configs {
		c, err := offline.Load(file, f.adapter)
		if err != nil {
			return configs, closeAll, err
		}
		configs = append(configs, c)
	}
	return configs, closeAll, nil
}

// runReplay runs the command.
func runReplay(cmd *cobra.Command, logs []string) error {
	flags, err := readFlags(cmd)
	if err != nil {
		return err
	}
	configs, closeAll, err := flags.load()
	defer closeAll()
	if err != nil {
		return err
	}
	log, err := accesslog.Open(logs, flags.format)
	if err != nil {
		return err
	}
	defer log.Close()
	var page *os.File
	if flags.html != "" { // find out now whether it can be written, not after an hour
		if page, err = openReport(flags.html, slices.Concat(flags.configs, logs)); err != nil {
			return fmt.Errorf("html: %w", err)
		}
		defer page.Close()
	}

	ctx, stop := signal.NotifyContext(cmp.Or(cmd.Context(), context.Background()), os.Interrupt, syscall.SIGTERM)
	defer stop()
	collectLessOften()
	session := NewSession(log, configs, flags.options)
	ended := session.showProgress(cmd.ErrOrStderr())
	session.Run(ctx)
	ended()
	stop() // from now on, Ctrl-C ends the process

	r := session.Report(logs)
	if page != nil {
		if err := writeHTML(r, page); err != nil {
			return fmt.Errorf("html: %w", err)
		}
	}
	if flags.asJSON {
		err = terminal.PrintJSON(cmd.OutOrStdout(), session.answer(r, &flags))
	} else {
		printReplay(cmd.OutOrStdout(), r, &flags)
	}
	if err == nil && r.Used == 0 {
		err = errors.New("no line of the logs could be replayed")
	}
	return err
}

// collectLessOften makes garbage collections rarer, which cost a fifth of the time,
// as long as there is little to collect. The user's settings count more.
func collectLessOften() {
	if os.Getenv("GOGC") == "" && os.Getenv("GOMEMLIMIT") == "" {
		debug.SetGCPercent(200)
		debug.SetMemoryLimit(1 << 30)
	}
}

// openReport opens the file that a report is to be written to, and creates it if there
// is none. What is in it stays for now. It is an error if that is one of the inputs, or
// anything but a report.
func openReport(file string, inputs []string) (*os.File, error) {
	f, err := os.OpenFile(file, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := replaceable(f, inputs); err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// replaceable returns an error if the content of f must not be replaced by a report.
func replaceable(f *os.File, inputs []string) error {
	info, err := f.Stat()
	if err != nil || !info.Mode().IsRegular() {
		return err
	}
	for _, input := range inputs {
		other, err := os.Stat(input)
		if input == "-" {
			other, err = os.Stdin.Stat()
		}
		if err == nil && os.SameFile(info, other) {
			return fmt.Errorf("%s is read as a config or a log; use another file", f.Name())
		}
	}
	begins := make([]byte, report.Recognized)
	n, err := f.ReadAt(begins, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if n > 0 && !report.IsReport(begins[:n]) {
		return fmt.Errorf("%s is not a report of a replay; use a new file, or a report to replace", f.Name())
	}
	return nil
}

// writeHTML writes the report to a file.
func writeHTML(r *report.Report, f *os.File) error {
	info, err := f.Stat()
	if err == nil && info.Mode().IsRegular() {
		err = f.Truncate(0)
	}
	if err == nil {
		err = r.WriteHTML(f)
	}
	return cmp.Or(err, f.Close())
}

// Session replays logs by the limits of one or two configs.
type Session struct {
	log         *accesslog.Log
	replays     []*replay // of each config
	atOnce      []*replay // the same with all requests of a second at once, if the logs have whole seconds
	first, last int64     // when requests arrived
	clients     clients
	used        atomic.Int64
	interrupted bool
}

// Used returns how many requests were replayed so far. Run may be running.
func (s *Session) Used() int64 { return s.used.Load() }

// Interrupted reports whether Run ended before the logs did.
func (s *Session) Interrupted() bool { return s.interrupted }

// NewSession returns a session.
func NewSession(log *accesslog.Log, configs []*offline.Config, opt Options) *Session {
	s := &Session{log: log}
	for _, d := range configs {
		s.replays = append(s.replays, newReplay(d, opt))
		if !log.Exact() {
			s.atOnce = append(s.atOnce, newReplay(d, opt))
		}
	}
	return s
}

// Run replays requests until there are no more or ctx is done.
func (s *Session) Run(ctx context.Context) {
	defer context.AfterFunc(ctx, s.log.Stop)()
	for n := int64(0); ; n++ {
		if n%1024 == 0 {
			s.used.Store(n)
			if s.interrupted = ctx.Err() != nil; s.interrupted {
				return
			}
		}
		e, err := s.log.Next()
		if err != nil {
			s.used.Store(n)
			s.interrupted = ctx.Err() != nil
			return // there are no more
		}
		if s.first == 0 {
			s.first = e.Arrival
		}
		s.last = e.Arrival
		s.clients.add(e)
		for _, p := range s.replays {
			p.take(e, e.Spread)
		}
		for _, p := range s.atOnce {
			p.take(e, e.Arrival)
		}
	}
}

// showProgress shows the progress on w, if that is a terminal, until the function
// that it returns is called.
func (s *Session) showProgress(w io.Writer) (end func()) {
	if !terminal.Is(w) {
		return func() {}
	}
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		ticker := time.NewTicker(200 * time.Millisecond)
		defer ticker.Stop()
		start := time.Now()
		for {
			select {
			case <-done:
				fmt.Fprint(w, "\r\x1b[K")
				return
			case <-ticker.C:
				fmt.Fprint(w, "\r"+s.progress(time.Since(start))+"\x1b[K")
			}
		}
	}()
	return func() {
		close(done)
		<-ended
	}
}

// progress describes the progress after some time.
func (s *Session) progress(elapsed time.Duration) string {
	used := s.used.Load()
	read, size := s.log.Progress()
	rate := humanize.Comma(int64(float64(used) / elapsed.Seconds()))
	text := fmt.Sprintf("%s requests, %s a second", humanize.Comma(used), rate)
	if size == 0 || read == 0 {
		return text
	}
	left := time.Duration(float64(elapsed) * float64(size-read) / float64(read))
	return fmt.Sprintf("%3d %%, %s, %v left", min(100*read/size, 100), text, left.Round(time.Second))
}

// Report returns what was found.
func (s *Session) Report(logs []string) *report.Report {
	r := &report.Report{Version: telemetry.Version(), Generated: time.Now(), Logs: logs, Warnings: s.clients.warnings()}
	if s.first > 0 {
		r.From, r.To = time.Unix(0, s.first), time.Unix(0, s.last)
	}
	if !s.log.Exact() {
		r.Resolution = time.Second
	}
	var skipped map[accesslog.Reason]int64
	r.Lines, r.Used, skipped = s.log.Counts()
	if s.interrupted {
		r.Lines, r.Used = r.Lines-r.Used+s.used.Load(), s.used.Load() // others were read, but not replayed
		r.Notes = append(r.Notes, fmt.Sprintf("Interrupted: the results cover the first %s requests.", humanize.Comma(s.used.Load())))
	}
	for _, reason := range slices.SortedFunc(maps.Keys(skipped), func(a, b accesslog.Reason) int {
		return cmp.Or(cmp.Compare(skipped[b], skipped[a]), cmp.Compare(a, b))
	}) {
		r.Skipped = append(r.Skipped, report.Skipped{Reason: reason.String(), Lines: skipped[reason]})
	}
	r.Notes = append(r.Notes, s.log.Notes()...)
	for _, problem := range s.log.Problems() {
		r.Notes = append(r.Notes, "A log could not be read to its end: "+problem)
	}
	for i, p := range s.replays {
		c := report.Config{Name: p.config.Name, Requests: p.requests, Admitted: p.admitted, Denied: p.denied}
		if p.config.Redis != nil {
			r.Notes = append(r.Notes, c.Name+": Redis is not used. The buckets are in memory, and empty at first.")
		}
		c.Limits = s.limits(i)
		r.Configs = append(r.Configs, c)
		r.Notes = append(r.Notes, p.notes(len(s.replays) > 1)...)
	}
	return r
}

// limits returns what was found of the limits of a config.
func (s *Session) limits(config int) (limits []report.Limit) {
	p, names := s.replays[config], make(map[string]int)
	for i, l := range p.limits {
		limit := l.report()
		limit.Unusual = p.unusual(l)
		if s.atOnce != nil {
			addUpperBound(&limit, s.atOnce[config].limits[i])
		} else if advice := p.leaseAdvice(l); advice != "" { // which takes exact times
			limit.Unusual = append(limit.Unusual, advice)
		}
		if n := len(limit.Peaks) - 1; n >= 0 && limit.Peaks[n].Units == report.NoSize {
			limit.Unusual = append(limit.Unusual, fmt.Sprintf("No size that a limit can have would have been enough for %s of the keys.",
				humanize.Comma(limit.Peaks[n].Keys)))
		}
		if names[l.path]++; names[l.path] > 1 {
			limit.Path += fmt.Sprintf(" (%d)", names[l.path])
		}
		limits = append(limits, limit)
	}
	return limits
}

// addUpperBound adds to l what the same limit did when all requests of a second
// came at once.
func addUpperBound(l *report.Limit, atOnce *replayedLimit) {
	other := atOnce.report()
	l.DeniedAtMost = max(l.Denied, other.Denied)
	l.Peaks, l.KeysLasting = other.Peaks, other.KeysLasting
	l.Unusual = append(l.Unusual, "The sizes that keys needed are for all requests of a second at once, so they may be too high.")
}

// notes returns what to know about the results of a config, one sentence each.
func (p *replay) notes(several bool) (notes []string) {
	prefix := ""
	if several {
		prefix = p.config.Name + ": "
	}
	for _, w := range p.config.Warnings {
		notes = append(notes, prefix+w)
	}
	add := func(n int64, one, many string) {
		switch {
		case n == 1:
			notes = append(notes, prefix+"1 request "+one)
		case n > 1:
			notes = append(notes, fmt.Sprintf("%s%s requests %s", prefix, humanize.Comma(n), many))
		}
	}
	if p.unserved > 0 && p.unserved == p.taken {
		notes = append(notes, prefix+"No request was for a site of the config.")
	}
	others := keytext.SafeList(p.otherHosts)
	add(p.unserved, "was for a host that no site of the config has: "+others+".", "were for hosts that no site of the config has, such as "+others+".")
	add(p.addressless, "has no address of its client in the log: it counts as one more client.",
		"have no address of their client in the log: they count as one client.")
	if p.readsHeaders {
		const found = " in the log: matchers and numbers of the config that read others found none."
		few, none := " no header fields but Referer and User-Agent"+found, " no header fields"+strings.Replace(found, "others", "them", 1)
		add(p.headers[accesslog.FewHeaders], "has"+few, "have"+few)
		add(p.headers[accesslog.NoHeaders], "has"+none, "have"+none)
	}
	add(p.undecided, "was rejected, because a matcher or a value could not be evaluated.",
		"were rejected, because a matcher or a value could not be evaluated.")
	if p.hostless > 0 && p.host == "" {
		add(p.hostless, "has no host in the log, and the config has several or any: name one with --host.",
			"have no host in the log, and the config has several or any: name one with --host.")
	}
	for _, l := range p.following {
		notes = append(notes, prefix+l.note())
	}
	for _, path := range p.paced {
		notes = append(notes, prefix+"Limit "+path+" paces responses, and denies no request: a log does not tell how fast they were sent.")
	}
	if p.requests == 0 && len(p.limits)+len(p.following)+len(p.paced) == 0 {
		notes = append(notes, prefix+"The config has no limits.")
	}
	return notes
}

// replayAnswer is the result as JSON. Limits has the limits of the only config.
type replayAnswer struct {
	Lines       int64            `json:"lines"`
	Used        int64            `json:"used"`
	Skipped     map[string]int64 `json:"skipped"`
	From        *time.Time       `json:"from,omitempty"`
	To          *time.Time       `json:"to,omitempty"`
	Interrupted bool             `json:"interrupted,omitempty"`
	Notes       []string         `json:"notes,omitempty"`
	Limits      []limitAnswer    `json:"limits,omitempty"`
	Configs     []configAnswer   `json:"configs,omitempty"`
}

// configAnswer is the result of a config, if there are two.
type configAnswer struct {
	Config string        `json:"config"`
	Limits []limitAnswer `json:"limits"`
}

// limitAnswer is the result of a limit.
type limitAnswer struct {
	report.Limit
	DeniedAtMost  *int64 `json:"denied_at_most,omitempty"`  // if times are whole seconds
	SizeForTarget int64  `json:"size_for_target,omitempty"` // none if no size would do
}

// answer returns the result as JSON.
func (s *Session) answer(r *report.Report, f *replayFlags) replayAnswer {
	a := replayAnswer{Lines: r.Lines, Used: r.Used, Skipped: make(map[string]int64), Interrupted: s.interrupted, Notes: slices.Concat(r.Warnings, r.Notes)}
	for _, skipped := range r.Skipped {
		a.Skipped[skipped.Reason] = skipped.Lines
	}
	if !r.From.IsZero() {
		a.From, a.To = &r.From, &r.To
	}
	for i := range r.Configs {
		c := &r.Configs[i]
		limits := make([]limitAnswer, 0, len(c.Limits))
		for _, l := range c.Limits {
			of := limitAnswer{Limit: l}
			if needed := l.SizeFor(f.target); needed < report.NoSize {
				of.SizeForTarget = needed
			}
			if r.Resolution > 0 {
				of.DeniedAtMost = &of.Limit.DeniedAtMost
			}
			if !f.options.ShowKeys {
				of.Top = nil
			}
			limits = append(limits, of)
		}
		if len(r.Configs) == 1 {
			a.Limits = limits
		} else {
			a.Configs = append(a.Configs, configAnswer{c.Name, limits})
		}
	}
	return a
}

// printReplay prints the result as text.
func printReplay(w io.Writer, r *report.Report, f *replayFlags) {
	for _, warning := range r.Warnings {
		fmt.Fprintln(w, warning)
	}
	fmt.Fprintf(w, "%s of %s lines used", humanize.Comma(r.Used), humanize.Comma(r.Lines))
	if !r.From.IsZero() {
		in := f.options.Location
		fmt.Fprintf(w, ", from %s to %s", r.From.In(in).Format(time.DateTime), r.To.In(in).Format(time.DateTime))
	}
	fmt.Fprintln(w)
	for _, skipped := range r.Skipped {
		fmt.Fprintf(w, "%s not used: %s\n", humanize.Comma(skipped.Lines), skipped.Reason)
	}
	for i := range r.Configs {
		c := &r.Configs[i]
		fmt.Fprintln(w)
		if len(r.Configs) > 1 {
			fmt.Fprintf(w, "%s\n", c.Name)
		}
		printReplayedLimits(w, c, r.Resolution > 0, f)
		if f.options.ShowKeys {
			printReplayedKeys(w, c)
		}
		for j := range c.Limits {
			for _, text := range c.Limits[j].Unusual {
				fmt.Fprintf(w, "%s: %s\n", c.Limits[j].Path, text)
			}
		}
	}
	if len(r.Notes) > 0 {
		fmt.Fprintln(w)
	}
	for _, note := range r.Notes {
		fmt.Fprintln(w, note)
	}
}

// printReplayedLimits prints a table of the limits of a config.
func printReplayedLimits(w io.Writer, c *report.Config, bounds bool, f *replayFlags) {
	denied := "DENIED"
	if bounds {
		denied = "DENIED (AT MOST)"
	}
	target := strconv.FormatFloat(100*f.target, 'g', 4, 64)
	t := terminal.NewTable("LIMIT", "SIZE", "REQUESTS", "ADMITTED", denied, "SPARED", "SHARE", "KEYS", "KEYS DENIED", "SIZE FOR "+target+" %")
	for i := range c.Limits {
		l := &c.Limits[i]
		size, wanted := terminal.Number("varies"), terminal.Number("-")
		switch {
		case l.Size > 0:
			size = terminal.Count(l.Size)
		case l.Sizeless:
			size = "-"
		}
		switch needed := l.SizeFor(f.target); needed {
		case 0:
		case report.NoSize:
			wanted = "none"
		default:
			wanted = terminal.Count(needed)
		}
		denied := terminal.Count(l.Denied)
		if bounds {
			denied += " (" + terminal.Count(l.DeniedAtMost) + ")"
		}
		t.Add(false, l.Path, size, terminal.Count(l.Requests), terminal.Count(l.Admitted), denied, terminal.Count(l.Spared),
			percentage(l.Denied, l.Requests), terminal.Count(l.Keys), terminal.Count(l.KeysDenied), wanted)
	}
	t.Print(w)
	if slices.ContainsFunc(c.Limits, func(l report.Limit) bool { return l.Spared > 0 }) {
		terminal.Printf(w, "Spared: the limit had room, but another one denied.")
	}
}

// percentage formats a share of a whole.
func percentage(part, whole int64) terminal.Number {
	if whole == 0 {
		return "-"
	}
	return terminal.Number(strconv.FormatFloat(100*float64(part)/float64(whole), 'g', 3, 64) + " %")
}

// printReplayedKeys prints the keys that were denied most.
func printReplayedKeys(w io.Writer, c *report.Config) {
	t := terminal.NewTable("LIMIT", "DENIED", "REQUESTS", "KEY")
	for i := range c.Limits {
		for _, k := range c.Limits[i].Top {
			t.Add(false, c.Limits[i].Path, terminal.Count(k.Denied), terminal.Count(k.Requests), keytext.Safe(k.Text))
		}
	}
	fmt.Fprintln(w)
	t.Print(w)
}
