package command

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/admin/adminjson"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/terminal"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/key/keytext"
)

// topCommand returns the command top.
func topCommand() *cobra.Command {
	cmd := Runs(&cobra.Command{
		Use:   "top",
		Short: "Shows the keys with the most requests or denials",
		Long: `
Shows the keys with the most requests or denials at a limit with the option track_top.
On a terminal it shows them every second until q or Ctrl-C is pressed; otherwise it
prints them once.

Counts of rare keys may be too high, by at most the value in the ERROR column.`,
		Example: "  caddy rate-limit top\n  caddy rate-limit top --limit api/search --by requests -n 5",
		Args:    cobra.NoArgs,
	}, runTop)
	addAdminFlags(cmd)
	cmd.Flags().IntP("number", "n", 20, "How many keys to show")
	cmd.Flags().String("by", "denied", "Sort by requests that were denied, or by all requests: denied or requests")
	cmd.Flags().String("limit", "", "The path of the limit; it may be left out if only one has track_top")
	_ = cmd.RegisterFlagCompletionFunc("limit", func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
		return limitPaths(cmd, func(l *adminjson.Limit) bool { return l.TrackTop > 0 }), cobra.ShellCompDirectiveNoFileComp
	})
	_ = cmd.RegisterFlagCompletionFunc("by", cobra.FixedCompletions([]string{"denied", "requests"}, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// runTop runs the command top.
func runTop(cmd *cobra.Command, _ []string) error {
	query := make(url.Values)
	n, _ := cmd.Flags().GetInt("number")
	by, _ := cmd.Flags().GetString("by")
	query.Set("n", strconv.Itoa(n))
	query.Set("by", by)
	if limit, _ := cmd.Flags().GetString("limit"); limit != "" {
		query.Set("limit", limit)
	}
	asJSON, _ := cmd.Flags().GetBool("json")
	if asJSON || !terminal.Is(cmd.OutOrStdout()) {
		return ask(cmd, "top?"+query.Encode(), nil, func(w io.Writer, a *adminjson.Top) error {
			_, err := fmt.Fprintln(w, strings.Join(topLines(a, terminal.Coloured(w)), "\n"))
			return err
		})
	}
	query.Set("watch", "1s")
	client, err := newClient(cmd, adminjson.WatchTime+adminTimeout)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	screen := &topScreen{out: cmd.OutOrStdout().(*terminal.Output).Writer.(*os.File), stop: stop}
	defer screen.close()
	return screen.watch(ctx, client, "top?"+query.Encode())
}

// topLines returns the lines that show an answer.
func topLines(a *adminjson.Top, colours bool) []string {
	title := fmt.Sprintf("Limit %s in the last %s: requests %d, denied %d",
		keytext.Safe(a.Limit), terminal.Briefly(time.Duration(a.Window)), a.Requests, a.Denied)
	switch {
	case len(a.Entries) > 0:
	case a.By == "denied":
		return []string{title, "", "No key was denied."}
	default:
		return []string{title}
	}
	keys := terminal.NewTable("DENIED", "REQUESTS", "ERROR", "KEY")
	for i := range a.Entries {
		e := &a.Entries[i]
		keys.Add(false, e.Denied, e.Requests, e.Error, entryText(e))
	}
	return append([]string{title, ""}, keys.Lines(colours)...)
}

// entryText returns the key as it is shown.
func entryText(e *adminjson.TopEntry) string {
	shown := keyText(&e.Key)
	if e.Truncated {
		shown += "…"
	}
	return shown
}

// topScreen shows answers on a terminal, each in the place of the one before.
type topScreen struct {
	out   *os.File
	stop  func()      // ends the command
	state *term.State // of the terminal's input before; nil if it was not changed
	open  bool
}

// watch shows answers until ctx is done. It returns the error of the first
// connection; later ones are made again.
func (s *topScreen) watch(ctx context.Context, client *adminClient, path string) error {
	for {
		err := s.stream(ctx, client, path)
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil: // the stream has ended, as it does now and then
			continue
		case !s.open:
			return err
		}
		s.draw([]string{"Trying again: " + err.Error()})
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(time.Second):
		}
	}
}

// stream shows the answers of one stream. A stream that ends before its first
// answer is an error.
func (s *topScreen) stream(ctx context.Context, client *adminClient, path string) error {
	res, err := client.send(ctx, path, nil)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	lines := bufio.NewReaderSize(res.Body, 1<<16)
	for shown := false; ; shown = true {
		line, err := lines.ReadBytes('\n')
		var a adminjson.Top
		switch {
		case errors.Is(err, io.EOF) && shown:
			return nil
		case err != nil:
			return client.unreachable(err)
		case json.Unmarshal(line, &a) != nil:
			return errors.New("the admin endpoint's answer can't be read")
		}
		s.begin()
		s.draw(topLines(&a, terminal.Coloured(s.out)))
	}
}

// The terminal's other screen, which keeps what is on the usual one, without cursor
// and without wrapping lines that are too long.
const (
	enterScreen = "\x1b[?1049h\x1b[?25l\x1b[?7l"
	leaveScreen = "\x1b[?7h\x1b[?25h\x1b[?1049l"
)

// begin switches to the other screen and starts reading keys, unless it has.
func (s *topScreen) begin() {
	if s.open {
		return
	}
	s.open = true
	fmt.Fprint(s.out, enterScreen)
	if !terminal.Is(os.Stdin) {
		return
	}
	// The terminal then shows no typed keys, and sends Ctrl-C as a key.
	s.state, _ = term.MakeRaw(int(os.Stdin.Fd()))
	go func() {
		const ctrlC, ctrlD = 3, 4
		for keys := bufio.NewReader(os.Stdin); ; {
			key, err := keys.ReadByte()
			if err != nil {
				return
			}
			if key == 'q' || key == ctrlC || key == ctrlD {
				s.stop()
				return
			}
		}
	}()
}

// close restores the terminal.
func (s *topScreen) close() {
	if !s.open {
		return
	}
	if s.state != nil {
		_ = term.Restore(int(os.Stdin.Fd()), s.state)
	}
	fmt.Fprint(s.out, leaveScreen)
}

// draw shows lines, as many as there is room for.
func (s *topScreen) draw(lines []string) {
	_, height, err := term.GetSize(int(s.out.Fd()))
	if err == nil && height > 0 && len(lines) > height {
		lines = lines[:height]
	}
	var frame bytes.Buffer
	frame.WriteString("\x1b[H" + strings.Join(lines, "\x1b[K\r\n") + "\x1b[K\x1b[J")
	_, _ = s.out.Write(frame.Bytes())
}
