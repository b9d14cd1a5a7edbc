package command

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/spf13/cobra"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/admin/adminjson"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/terminal"
)

// adminTimeout is how long commands wait for an answer of the admin endpoint.
const adminTimeout = 10 * time.Second

// addAdminFlags adds the flags of commands that query a running Caddy.
func addAdminFlags(cmd *cobra.Command) {
	cmd.Flags().String("address", "", "The address of the admin endpoint, such as localhost:2019 or unix//run/caddy.sock")
	cmd.Flags().StringP("config", "c", "", "The config file that has the address of the admin endpoint")
	cmd.Flags().StringP("adapter", "a", "", "The adapter of the config file, if it is neither JSON nor a Caddyfile")
	cmd.Flags().Bool("json", false, "Print the answer as JSON")
}

// newClient returns a client for the address that the flags of cmd name.
func newClient(cmd *cobra.Command, timeout time.Duration) (*adminClient, error) {
	address, err := adminAddress(cmd)
	if err != nil {
		return nil, err
	}
	return newAdminClient(address, timeout)
}

// adminAddress returns the address of the admin endpoint.
func adminAddress(cmd *cobra.Command) (string, error) {
	address, _ := cmd.Flags().GetString("address")
	file, _ := cmd.Flags().GetString("config")
	adapter, _ := cmd.Flags().GetString("adapter")
	if address != "" || file == "" {
		if adapter != "" && file == "" {
			return "", errors.New("adapter: needs a config file; use --config")
		}
		return cmp.Or(address, caddy.DefaultAdminListen), nil
	}
	text, err := ReadConfig(file, adapter)
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
		return "", fmt.Errorf("%s: the admin endpoint is off, and commands need it", file)
	}
	return cmp.Or(caddy.NewReplacer().ReplaceAll(cfg.Admin.Listen, ""), caddy.DefaultAdminListen), nil
}

// ask queries a running Caddy, prints its answer as text or, if the user wants it so, as JSON, and
// returns the error that print returns. If Redis does not answer, this is what that Caddy has, and
// the command has found a problem.
func ask[T any](cmd *cobra.Command, path string, send any, print func(w io.Writer, answer *T) error) error {
	client, err := newClient(cmd, adminTimeout)
	if err != nil {
		return err
	}
	text, err := client.fetch(cmd.Context(), path, send)
	unavailable := (*unavailableError)(nil)
	if errors.As(err, &unavailable) {
		text = unavailable.answer
	} else if err != nil {
		return err
	}
	answer := new(T)
	if err := json.Unmarshal(text, answer); err != nil {
		return fmt.Errorf("the admin endpoint's answer can't be read: %w", err)
	}
	w := cmd.OutOrStdout()
	if asJSON, _ := cmd.Flags().GetBool("json"); asJSON {
		var indented bytes.Buffer
		if err := json.Indent(&indented, text, "", "  "); err != nil {
			return err
		}
		if _, err := io.WriteString(w, terminal.SafeJSON(strings.TrimSpace(indented.String()))+"\n"); err != nil {
			return err
		}
		w = io.Discard
	}
	if err := print(w, answer); err != nil || unavailable == nil {
		return err
	}
	fmt.Fprintf(cmd.ErrOrStderr(), "Error: %v; this is what the Caddy at %s has\n", unavailable, client.address)
	return ErrProblems
}

// completeLimit completes the path of a limit from the running Caddy.
func completeLimit(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return limitPaths(cmd, func(*adminjson.Limit) bool { return true }), cobra.ShellCompDirectiveNoFileComp
}

// limitPaths returns the names of those limits of the running Caddy that are wanted;
// none if it does not answer at once.
func limitPaths(cmd *cobra.Command, wanted func(*adminjson.Limit) bool) (paths []string) {
	client, err := newClient(cmd, time.Second)
	if err != nil {
		return nil
	}
	answer, err := client.fetch(context.Background(), "limits", nil)
	var limits adminjson.Limits
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
