package advice_test

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/advice"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/check"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/cli/offline"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// TestKeysThatLimitNothing guards that a key which can't be meant so is reported when the
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
		{"{tenant}", "Its key has {tenant}, which neither Caddy nor a map sets, so it is empty.", "Set it with map"},
		{"{path.*}", "Its key has {path.*}, which is not one of Caddy's placeholders", "Use {http.request.uri.path}"},
		{"{args.0}", "Its key has {args.0}, which is only known in a snippet or an imported file", "Move the limit"},
		{"{time.now.year}", "", ""},
		{"{remote}", "Its key has {http.request.remote}, which has the client's port", "Use {client_ip}"},
		{"{remote_port}", "Its key has {http.request.remote.port}, which has the client's port", "Use {client_ip}"},
		{"{client_ip}-{uuid}", "Its key has {http.request.uuid}, which is different for each request", "Use a value"},
		{"{time.now}", "Its key has {time.now}, which changes all the time", "Use {client_ip}"},
		{"{http.request.duration_ms}{uuid}", "Its key has {http.request.duration_ms}, which changes", "Use {client_ip}"},
		{"{remote_ip}", "Its key has {remote_ip}, which is not one of Caddy's placeholders", "Use {client_ip}"},
		{"{http.request.remote_ip}", "Its key has {http.request.remote_ip}, which is not one of Caddy's placeholders", "Use {client_ip}"},
		{"client_ip", `Its key is the text "client_ip", not a placeholder`, "Write {client_ip}."},
		{"remote_ip", `Its key is the text "remote_ip", not a placeholder`, "Write {client_ip}."},
		{"http.request.host", `Its key is the text "http.request.host", not`, "Write {http.request.host}."},
		{"ip", `Its key is the text "ip", not`, "Write {client_ip}."},
		{"remote_host", `Its key is the text "remote_host", not`, "Write {remote_host}."},
		{"X-Api-Key", `Its key is the text "X-Api-Key", not`, "Write {http.request.header.X-Api-Key}."},
		{"authorization", `Its key is the text "authorization", not`, "Write {http.request.header.Authorization}."},
		{"http.request.headers.X-A", `Its key is the text "http.request.headers.X-A", not`, "Write {http.request.header.X-A}."},
		{"$binary_remote_addr", `Its key is the text "$binary_remote_addr", not`, "Write {client_ip}."},
		{"static", "", ""},
		{"global", "", ""},
		{"{ip}", "Its key has {ip}, which is not one of Caddy's placeholders, so it is empty.", "Use {client_ip}"},
		{"{remote.host}", "Its key has {remote.host}, which is not one of Caddy's placeholders", "Use {client_ip}"},
		{"{http.request.ip}", "Its key has {http.request.ip}, which is not one of Caddy's placeholders", "Use {client_ip}"},
		{"{user}", "Its key has {user}, which is not one of Caddy's placeholders", "Use {http.auth.user.id}"},
		{"{http.auth.user}", "Its key has {http.auth.user}, which is not one of Caddy's placeholders", "Use {http.auth.user.id}"},
		{"{http.request.headers.X-Key}", "Its key has {http.request.headers.X-Key}, which is not one of Caddy's placeholders", "Use {http.request.header.X-Key}."},
		{"{http.request.cookies.id}", "Its key has {http.request.cookies.id}, which is not one of Caddy's placeholders", "Use {http.request.cookie.id}."},
		{"{http.request.query.q}", "Its key has {http.request.query.q}, which is not one of Caddy's placeholders", "Use {http.request.uri.query.q}."},
		{"{http.request.remote.address}", "Its key has {http.request.remote.address}, which is not one of Caddy's placeholders", "Use one of"},
		{"{http.request.tls.client.name}", "Its key has {http.request.tls.client.name}, which is not one of Caddy's placeholders", "Use one of"},
		{"{time.hour}", "Its key has {time.hour}, which is not one of Caddy's placeholders", "Use one of"},
		{"{form.email}", "Its key has {form.email}, which would be a field of the body", "Use {http.rate_limit.field.email}. Clients choose its value, so add a limit by {client_ip}"},
		{"{http.request.body.model}", "Its key has {http.request.body.model}, which would be a field of the body", "Use {http.rate_limit.field.model}."},
		{"{http.request.body}", "", ""},
		{"{http.request.bodyhash}", "", ""}, // a plugin sets it
		{"{http.request.tls.client.san.dns_names.0}", "", ""},
		{"{http.request.tls.client.subject}", "", ""},
		{"{http.request.orig_uri.path.0}", "", ""},
		{"{http.request.remote.host/24}", "", ""},
		{"{http.request.local.port}", "", ""},
		{"{http.request.uri.path.1}", "", ""},
		{"{http.auth.user.id}", "", ""},
		{"{http.auth.user.role}", "", ""},
		{"{http.matchers.file.type}", "", ""},
		{"{http.vars.ip}", "", ""},
		{"{env.KEY}", "", ""},
		{"{system.hostname}", "", ""},
		{"{geoip2.country_code}", "", ""},
		{"{http.vars.user}", "", ""},
		{"{json.user}", "", ""},
		{"cookie:sid", `Its key is the text "cookie:sid", not`, "Write {cookie.sid}."},
		{"{client_ip}/24", "Its key has /24 behind {client_ip}, which is only text", "Write key {client_ip}, and ipv4_prefix 24."},
		{"{remote_host}/64", "Its key has /64 behind {remote_host}, which", "Write key {remote_host}, and ipv6_prefix 64."},
		{"{header.X-Real-IP}/24", "Its key has /24 behind {http.request.header.X-Real-IP}, which", "Write key"},
		{"{client_ip}/a", "", ""},
		{"{client_ip}/240", "", ""},
		{"{path}/24", "", ""},
		{"{client_ip}/{path}", "", ""},
		{"{http.response.header.X-User}", "Its key has {http.response.header.X-User}, which is only known once there is a response", "Use a value"},
		{"header.X-Api-Key", `Its key is the text "header.X-Api-Key", not`, "Write {header.X-Api-Key}."},
	} {
		forms := map[string]sitetest.Config{
			"limit": {Site: "rate_limit {\nsize 5\nlimit within {\nsize 3\n}\n" + optionLine("key", tc.key) + "}"},
			"zone":  {Site: "rate_limit {\nzone a {\nevents 5\nwindow 1m\n" + optionLine("key", tc.key) + "}\n}"},
		}
		for name, c := range forms {
			t.Run(name+" "+tc.key, func(t *testing.T) { wantWarning(t, c, tc.problem, tc.remedy) })
		}
	}
	for _, key := range []string{"login", "address", "none", "per_ip", "x-large", "a:b"} {
		wantWarning(t, sitetest.Config{Site: "rate_limit a {\nsize 5\nkey " + key + "\n}"}, fmt.Sprintf("Its key is the text %q, not a placeholder", key), "Write {client_ip} for a bucket for each address, or")
		wantWarning(t, sitetest.Config{Site: "rate_limit {\nzone a {\nevents 5\nwindow 1m\nkey " + key + "\n}\n}"}, "", "") // as in mholt/caddy-ratelimit
	}
	for key, want := range map[string]string{
		"{http.request.host}": "", "{host}": "{http.request.host}", "{header.X-Key}": "{http.request.header.X-Key}",
		"{client_ip}": "", "{remote_host}": "", "{uuid}": "{http.request.uuid}", "{file.key}": "",
	} {
		t.Run("JSON "+key, func(t *testing.T) {
			c := sitetest.Config{Routes: `[{"handle":[{"handler":"rate_limit","limits":[{"size":5,"key":"` + key + `"}]}]}]`}
			if want == "" {
				wantWarning(t, c, "", "")
			} else {
				wantWarning(t, c, "Its key has "+key+", which is only known in a Caddyfile", "Use its long name, "+want)
			}
		})
	}
}

// TestKeysSetAround guards that a key which is set behind its limit only is reported, with what to
// do about it, when the config is loaded and by the command check, in the same words; and
// that one which a handler before the limit sets is not.
func TestKeysSetAround(t *testing.T) {
	limit := func(key string) string { return "rate_limit a {\nsize 5\nkey " + key + "\n}\n" }
	const (
		auth    = "forward_auth 127.0.0.1:1 {\nuri /\ncopy_headers X-User Authorization\n}\n"
		empty   = "so here it is empty."
		sent    = "so here it has the client's value."
		ofRoute = "Put both in a route block, "
	)
	for _, tc := range []struct {
		name, site           string
		placeholder, problem string // what follows the placeholder
		remedy               string
	}{
		{"forward_auth", auth + limit("{header.X-User}"), "http.request.header.X-User", "forward_auth sets after this limit, " + sent,
			ofRoute + "forward_auth first, or set the global option order rate_limit after forward_auth."},
		{"forward_auth before", "route {\n" + auth + limit("{header.X-User}") + "}", "", "", ""},
		{"forward_auth, another field", auth + limit("{header.X-Other}"), "", "", ""},
		{"forward_auth, the client's own field", auth + limit("{header.Authorization}"), "", "", ""},
		{"basic_auth", basicAuth + limit("{http.auth.user.id}"), "http.auth.user.id", "basic_auth sets after this limit, " + empty,
			ofRoute + "basic_auth first, or set the global option order rate_limit after basic_auth."},
		{"basic_auth before", "route {\n" + basicAuth + limit("{http.auth.user.id}") + "}", "", "", ""},
		{"basic_auth in another handle block", "handle /x {\n" + limit("{http.auth.user.id}") + "}\nhandle {\n" + basicAuth + "}", "", "", ""},
		{"basic_auth within", "route {\n" + limit("{http.auth.user.id}") + "handle {\n" + basicAuth + "}\n}", "http.auth.user.id", "basic_auth sets after this limit, " + empty,
			ofRoute + "basic_auth first"},
		{"request_header", "request_header X-User {vars.user}\n" + limit("{header.X-User}"), "http.request.header.X-User", "request_header sets after this limit, " + sent,
			ofRoute + "request_header first, or set the global option order rate_limit after request_header."},
		{"request_header for an upstream", "request_header X-Api-Key secret\n" + limit("{header.X-Api-Key}"), "", "", ""},
		{"request_header that removes", "request_header -X-Api-Key\n" + limit("{header.X-Api-Key}"), "", "", ""},
		{"request_header before", "route {\nrequest_header X-User {client_ip}\n" + limit("{header.X-User}") + "}", "", "", ""},
		{"vars", "route {\n" + limit("{vars.plan}") + "vars plan free\n}", "http.vars.plan", "vars sets after this limit, " + empty, ofRoute + "vars first."},
		{"vars before", "vars plan free\n" + limit("{vars.plan}"), "", "", ""},
		{"map", "route {\n" + limit("{plan}") + "map {host} {plan} {\ndefault free\n}\n}", "plan", "map sets after this limit, " + empty, ofRoute + "map first."},
		{"map before", "map {host} {ip} {user} {\ndefault a b\n}\n" + limit("{ip}{user}"), "", "", ""},
		{"named route", "invoke both", "http.auth.user.id", "basic_auth sets after this limit, " + empty, ofRoute + "basic_auth first"},
		{"zone", "rate_limit {\nzone a {\nkey {header.X-User}\nevents 5\nwindow 1m\n}\n}\n" + auth, "http.request.header.X-User", "forward_auth sets after this limit, " + sent,
			ofRoute + "forward_auth first"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := sitetest.Config{Site: tc.site}
			if strings.Contains(tc.site, "invoke") {
				c.Sites = "&(both) {\nroute {\n" + limit("{http.auth.user.id}") + basicAuth + "}\n}"
			}
			problem := tc.problem
			if problem != "" {
				problem = "Its key has {" + tc.placeholder + "}, which " + problem
			}
			wantWarning(t, c, problem, tc.remedy)
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

// adviceOn returns what the command check says of a config.
func adviceOn(t *testing.T, text []byte) []advice.Advice {
	t.Helper()
	d, err := offline.New(text)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if err := d.Validate(); err != nil {
		t.Fatal(err)
	}
	return check.Advice(d)
}

// wantWarning checks what is logged of limits when c is loaded: one line with the
// beginnings of what is wrong and what to do, or none. The command check says the same.
func wantWarning(t *testing.T, c sitetest.Config, problem, remedy string) {
	t.Helper()
	onCheck := adviceOn(t, c.JSON(t, "127.0.0.1:1", filepath.Join(sitetest.TempDir(t), "log")))
	s := sitetest.StartConfig(t, c)
	lines := append(s.Log("warn", sitetest.OwnLogger), s.Log("warn", "rate_limit")...)
	for _, line := range lines {
		if !slices.ContainsFunc(onCheck, func(a advice.Advice) bool { return a.Problem == line["problem"] && a.Remedy == line["remedy"] }) {
			t.Errorf("got %+v of check, want what is logged: %v", onCheck, line)
		}
		if said := fmt.Sprint(line["problem"], " ", line["remedy"]); len(said) >= 300 || strings.Contains(said, "\n") {
			t.Errorf("got %q, want one line of less than 300 characters", said)
		}
	}
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
