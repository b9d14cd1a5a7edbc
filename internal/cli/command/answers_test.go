package command

import (
	"bytes"
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"strings"
	"testing"
	"unicode"

	"github.com/spf13/cobra"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/admin/adminjson"
)

// TestCommandsReadAnyAnswer guards that no command panics at an answer that is not quite
// what it expects, as another version of this module, or another program, may give: each
// part of it missing, null, or of another type. A command prints what it can or an error, and
// nothing that drives a terminal.
func TestCommandsReadAnyAnswer(t *testing.T) {
	var answer []byte
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Connection", "close")
		_, _ = w.Write(answer)
	}))
	defer server.Close()
	for _, tc := range []struct {
		args []string
		full any
	}{
		{[]string{"status"}, new(adminjson.Status)},
		{[]string{"limits"}, new(adminjson.Limits)},
		{[]string{"peek", "login", "a"}, new(adminjson.Level)},
		{[]string{"peek", "--key", "a"}, new(adminjson.Levels)},
		{[]string{"reset", "--yes", "login", "a"}, new(adminjson.Level)},
		{[]string{"reset", "--yes", "--key", "a"}, new(adminjson.Levels)},
		{[]string{"ban", "login", "a", "1h"}, new(adminjson.Ban)},
		{[]string{"unban", "login", "a"}, new(adminjson.Ban)},
		{[]string{"bans"}, new(adminjson.Bans)},
		{[]string{"top"}, new(adminjson.Top)},
	} {
		fill(reflect.ValueOf(tc.full).Elem())
		text, err := json.Marshal(tc.full)
		if err != nil {
			t.Fatal(err)
		}
		var full any
		if err := json.Unmarshal(text, &full); err != nil {
			t.Fatal(err)
		}
		answers := [][]byte{nil, []byte("<html>"), []byte(`{"configured": tr`), []byte("{} {}"), bytes.Repeat([]byte("["), 20_000)}
		mutate(full, func(v any) {
			text, err := json.Marshal(v)
			if err != nil {
				t.Fatal(err)
			}
			answers = append(answers, text)
		})
		printed := 0
		for _, answer = range answers {
			out, err := runAdmin(t, append(tc.args, "--address", server.Listener.Addr().String()))
			if err == nil && out != "" {
				printed++
			}
			if strings.ContainsFunc(out, func(r rune) bool { return r != '\n' && !unicode.IsPrint(r) }) {
				t.Errorf("%q: printed %q for %.300s", tc.args, out, answer)
			}
		}
		if 4*printed < len(answers) {
			t.Errorf("%q printed %d of %d answers", tc.args, printed, len(answers))
		}
	}
}

// runAdmin runs a command and returns what it prints.
func runAdmin(t *testing.T, args []string) (string, error) {
	t.Helper()
	commands := AdminCommands()
	cmd := commands[slices.IndexFunc(commands, func(c *cobra.Command) bool { return c.Name() == args[0] })]
	var out bytes.Buffer
	cmd.SetOut(&out)
	cmd.SetErr(io.Discard)
	cmd.SetArgs(args[1:])
	defer func() {
		if p := recover(); p != nil {
			t.Errorf("%q panicked: %v", args, p)
		}
	}()
	err := cmd.Execute()
	return out.String(), err
}

// fill sets everything in a value to something.
func fill(v reflect.Value) {
	switch v.Kind() { //nolint:exhaustive // the others have no parts
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem())
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Field(i).CanSet() {
				fill(v.Field(i))
			}
		}
	case reflect.Slice:
		if v.Type() == reflect.TypeFor[json.RawMessage]() {
			v.SetBytes([]byte(`["/a"]`))
			return
		}
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0))
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		name, element := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fill(name)
		fill(element)
		v.SetMapIndex(name, element)
	case reflect.Interface:
		v.Set(reflect.ValueOf(7))
	case reflect.String:
		if v.SetString("not"); v.Type() == reflect.TypeFor[json.Number]() {
			v.SetString("3")
		}
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int64:
		v.SetInt(3)
	case reflect.Uint64:
		v.SetUint(3)
	case reflect.Float64:
		v.SetFloat(3)
	default:
		panic(v.Kind())
	}
}

// mutate calls with for values of JSON like v: v itself, and those in which one part is
// missing or something else. It must not keep them.
func mutate(v any, with func(any)) {
	with(v)
	for _, other := range []any{nil, -1e300, "\x1b[2J\u202e", []any{nil}, map[string]any{"\x1b": nil}} {
		with(other)
	}
	switch v := v.(type) {
	case map[string]any:
		for _, name := range slices.Sorted(maps.Keys(v)) {
			part := v[name]
			delete(v, name)
			with(v)
			mutate(part, func(other any) {
				v[name] = other
				with(v)
			})
			v[name] = part
		}
	case []any:
		for i, part := range v {
			mutate(part, func(other any) {
				v[i] = other
				with(v)
			})
			v[i] = part
		}
	}
}
