package ratelimit

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"

	"github.com/spf13/cobra"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/convert"
)

// convertCommand returns the command convert.
func convertCommand() *cobra.Command {
	cmd := runs(&cobra.Command{
		Use:   "convert FILE",
		Short: "Converts the limits of another rate limiter",
		Long: `
Converts the limits of another rate limiter to ones of this module, and prints them.
FILE is - to read the standard input. Its format is found out unless --from names it:

  envoy  the YAML of envoyproxy/ratelimit, also in a ConfigMap of Kubernetes. What is
         printed is a part of a Caddyfile, for the site that is to be limited.
  mholt  a Caddyfile or JSON config of mholt/caddy-ratelimit. Of a Caddyfile, the
         blocks of rate_limit are printed; JSON is printed as a whole.

What has no equivalent, and what had to be guessed, is listed with its line on the
standard error, and in comments in the Caddyfile.

The exit status is 2 if there is any of that, and 0 if there is none.`,
		Example: `  caddy rate-limit convert ratelimit.yaml --descriptor 'message_type={header.X-Message-Type}'
  caddy rate-limit convert --from mholt Caddyfile`,
		Args: cobra.ExactArgs(1),
	}, runConvert)
	cmd.Flags().String("from", "", "The format of the file: envoy or mholt")
	cmd.Flags().StringArray("descriptor", nil, "The placeholder that stands for a descriptor of Envoy, as 'key={placeholder}'; may be repeated")
	return cmd
}

// maxConverted is how large a file may be that is converted.
const maxConverted = 10 << 20

// runConvert runs the command convert.
func runConvert(cmd *cobra.Command, args []string) error {
	from, _ := cmd.Flags().GetString("from")
	descriptors, _ := cmd.Flags().GetStringArray("descriptor")
	mapping := make(convert.Mapping)
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
	switch from {
	case "":
		if from = formatOf(file, text); from == "" {
			return fmt.Errorf("%s: the format can't be told, want --from envoy or --from mholt", file)
		}
	case "envoy", "mholt":
	default:
		return fmt.Errorf("from: got %q, want envoy or mholt", from)
	}
	if from == "mholt" && len(mapping) > 0 {
		return errors.New("descriptor: got one for a config of mholt/caddy-ratelimit, want it only with --from envoy")
	}
	result, err := convertFrom(from, file, text, mapping)
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	for _, note := range result.Notes {
		fmt.Fprintln(cmd.ErrOrStderr(), printable(file+": "+note.String()))
	}
	if _, err := io.WriteString(cmd.OutOrStdout(), result.Text); err != nil {
		return err
	}
	if len(result.Notes) > 0 {
		return errFound
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
		return nil, fmt.Errorf("%s: want a file of at most %d MiB", file, maxConverted>>20)
	}
	return bytes.TrimPrefix(text, []byte("\ufeff")), nil
}

// hasZone matches what only a Caddyfile of mholt/caddy-ratelimit has.
var hasZone = regexp.MustCompile(`(?m)^[ \t]*zone[ \t]`)

// formatOf tells the format of a file, and "" if it can't.
func formatOf(file string, text []byte) string {
	switch ext := filepath.Ext(file); {
	case ext == ".yaml" || ext == ".yml":
		return "envoy"
	case ext == ".json" || json.Valid(text):
		if convert.IsEnvoy(text) {
			return "envoy"
		}
		return "mholt"
	case bytes.Contains(text, []byte("rate_limit")) && hasZone.Match(text):
		return "mholt"
	case convert.IsEnvoy(text):
		return "envoy"
	}
	return ""
}

// convertFrom converts the text of a file.
func convertFrom(format, file string, text []byte, mapping convert.Mapping) (*convert.Result, error) {
	switch {
	case format == "envoy":
		return convert.Envoy(text, mapping)
	case filepath.Ext(file) == ".json" || json.Valid(text):
		return convert.MholtJSON(text)
	}
	return convert.MholtCaddyfile(text)
}
