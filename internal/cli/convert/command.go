package convert

import (
	"bytes"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/command"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/key/keytext"
)

// Command returns the command convert.
func Command() *cobra.Command {
	cmd := command.Runs(&cobra.Command{
		Use:   "convert FILE",
		Short: "Converts the limits of another rate limiter",
		Long: `
Converts the YAML of envoyproxy/ratelimit, also in a ConfigMap of Kubernetes, or a tree of
limits that redis-cell counts, in YAML or JSON, to limits of this module. It prints them as
a part of a Caddyfile, for the site that is to be limited. FILE is - to read the standard
input. Configurations of mholt/caddy-ratelimit need no conversion: they load as they are.

Anything without an equivalent, and every guess, is listed with its line on the
standard error and as a comment in the output.

The exit status is 2 if there is any of that, and 0 if there is none.`,
		Example: `  caddy rate-limit convert ratelimit.yaml --descriptor 'message_type={header.X-Message-Type}'`,
		Args:    cobra.ExactArgs(1),
	}, runConvert)
	cmd.Flags().StringArray("descriptor", nil, "The placeholder for a descriptor of Envoy or a part of the keys of redis-cell, as 'key={placeholder}'; may be repeated")
	return cmd
}

// maxConverted is how large a file may be that is converted.
const maxConverted = 10 << 20

// runConvert runs the command convert.
func runConvert(cmd *cobra.Command, args []string) error {
	descriptors, _ := cmd.Flags().GetStringArray("descriptor")
	mapping := make(Mapping)
	for _, d := range descriptors {
		if err := mapping.Add(d); err != nil {
			return err
		}
	}
	file := args[0]
	text, err := readConverted(cmd, file)
	if err != nil {
		return err
	}
	result, err := Convert(text, mapping)
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	for _, note := range result.Notes {
		fmt.Fprintln(cmd.ErrOrStderr(), keytext.Safe(file+": "+note.String()))
	}
	if _, err := io.WriteString(cmd.OutOrStdout(), result.Text); err != nil {
		return err
	}
	if len(result.Notes) > 0 {
		return command.ErrProblems
	}
	return nil
}

// readConverted reads the file that is to be converted, without a byte order mark.
func readConverted(cmd *cobra.Command, file string) ([]byte, error) {
	in := cmd.InOrStdin()
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return nil, fmt.Errorf("reading the file: %w", err)
		}
		defer f.Close()
		in = f
	}
	text, err := io.ReadAll(io.LimitReader(in, maxConverted+1))
	if err != nil {
		return nil, fmt.Errorf("reading the file: %w", err)
	}
	if len(text) > maxConverted {
		return nil, fmt.Errorf("%s: too large; use a file of at most %d MiB", file, maxConverted>>20)
	}
	return bytes.TrimPrefix(text, []byte("\ufeff")), nil
}
