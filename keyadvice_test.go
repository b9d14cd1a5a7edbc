package ratelimit

import (
	"strings"
	"testing"
)

// TestKeysThatLimitNothing guards that a key which can't be meant so is told when the
// config is loaded, once for a limit, and that others are not.
func TestKeysThatLimitNothing(t *testing.T) {
	for _, tc := range []struct{ key, problem, remedy string }{
		{"", "", ""},
		{"all", "", ""},
		{"{client_ip}", "", ""},
		{"{remote_host}", "", ""},
		{"{header.X-Key}", "", ""},
		{"{path}", "", ""},
		{"{http.vars.tenant}", "", ""},
		{"{tenant}", "", ""}, // map may set it
		{"{time.now.year}", "", ""},
		{"{remote}", "Its key has {http.request.remote}, which has the port", "Use {client_ip}"},
		{"{remote_port}", "Its key has {http.request.remote.port}, which has the port", "Use {client_ip}"},
		{"{client_ip}-{uuid}", "Its key has {http.request.uuid}, which is another one for each request", "Use what"},
		{"{time.now}", "Its key has {time.now}, which changes all the time", "Use {client_ip}"},
		{"{http.request.duration_ms}{uuid}", "Its key has {http.request.duration_ms}, which changes", "Use {client_ip}"},
		{"{remote_ip}", "Its key has {remote_ip}, which is no placeholder of Caddy", "Use {client_ip}"},
		{"{http.request.remote_ip}", "Its key has {http.request.remote_ip}, which is no placeholder of Caddy", "Use {client_ip}"},
		{"client_ip", `Its key is the text "client_ip", not a placeholder`, "Write placeholders in braces"},
		{"remote_ip", `Its key is the text "remote_ip", not a placeholder`, "Write placeholders in braces"},
		{"http.request.host", `Its key is the text "http.request.host", not`, "Write placeholders in braces"},
		{"header.X-Api-Key", `Its key is the text "header.X-Api-Key", not`, "Write placeholders in braces"},
	} {
		forms := map[string]config{
			"limit": {site: "rate_limit {\nsize 5\nlimit within {\nsize 3\n}\n" + optionLine("key", tc.key) + "}"},
			"zone":  {site: "rate_limit {\nzone a {\nevents 5\nwindow 1m\n" + optionLine("key", tc.key) + "}\n}"},
		}
		for name, c := range forms {
			t.Run(name+" "+tc.key, func(t *testing.T) { wantKeyWarning(t, c, tc.problem, tc.remedy) })
		}
	}
	for key, want := range map[string]string{
		"{http.request.host}": "", "{host}": "{http.request.host}", "{header.X-Key}": "{http.request.header.X-Key}",
		"{client_ip}": "", "{remote_host}": "", "{uuid}": "{http.request.uuid}", "{file.key}": "",
	} {
		t.Run("JSON "+key, func(t *testing.T) {
			c := config{routes: `[{"handle":[{"handler":"rate_limit","limits":[{"size":5,"key":"` + key + `"}]}]}]`}
			if want == "" {
				wantKeyWarning(t, c, "", "")
			} else {
				wantKeyWarning(t, c, "Its key has "+key+", which is only known in a Caddyfile", "Use its long name, "+want)
			}
		})
	}
}

// optionLine returns a line of a Caddyfile, empty without a value.
func optionLine(name, value string) string {
	if value == "" {
		return ""
	}
	return name + " " + value + "\n"
}

// wantKeyWarning checks what is logged of keys when c is loaded: one line with the
// beginnings of what is wrong and what to do, or none.
func wantKeyWarning(t *testing.T, c config, problem, remedy string) {
	t.Helper()
	s := startConfig(t, c)
	lines := s.log("warn", ownLogger)
	switch {
	case problem == "" && len(lines) > 0:
		t.Errorf("got %v, want no warning", lines)
	case problem != "" && len(lines) != 1:
		t.Errorf("got %v, want one warning", lines)
	case problem != "":
		p, _ := lines[0]["problem"].(string)
		r, _ := lines[0]["remedy"].(string)
		if !strings.HasPrefix(p, problem) || !strings.HasPrefix(r, remedy) {
			t.Errorf("got %q, %q, want %q, %q", p, r, problem, remedy)
		}
	}
}
