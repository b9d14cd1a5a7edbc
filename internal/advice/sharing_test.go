package advice_test

import (
	"strings"
	"testing"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// TestUnintendedSharing guards that limits which share buckets though nobody can have meant
// it are reported when the config is loaded, once, and by the command check in the same words;
// and that those which share them by a name of theirs are not.
func TestUnintendedSharing(t *testing.T) {
	const (
		unnamed = "Several limits without a name, or nested in one without a name, have equal keys and numbers"
		twice   = "Some requests pass it twice, in blocks that share its buckets"
		api     = "rate_limit api 10/s\n"
		sites   = "Its block has no name, and neither does one on another site, "
		within  = "rate_limit {\nlimit api {\nrate 10/s\n}\n}\n"
		other   = "http://other.localhost:1 {\n"
	)
	for _, tc := range []struct {
		name string
		sitetest.Config
		want string
	}{
		{"without a name, in a Caddyfile", sitetest.Config{Site: "rate_limit /a 10/s\nrate_limit /b 10/s"}, ""},
		{"without a name, in JSON", sitetest.Config{Unnamed: true, Site: "rate_limit /a 10/s\nrate_limit /b 10/s"}, unnamed},
		{"within limits without a name, in JSON", sitetest.Config{Unnamed: true, Site: "rate_limit /a {\nrate 9/s\nlimit in {\nrate 5/s\n}\n}\nrate_limit /b {\nrate 10/s\nlimit in {\nrate 5/s\n}\n}"}, unnamed},
		{"other numbers, in JSON", sitetest.Config{Unnamed: true, Site: "rate_limit /a 10/s\nrate_limit /b 20/s"}, ""},
		{"one after the other, in JSON", sitetest.Config{Unnamed: true, Site: "route {\nrate_limit 10/s\nrate_limit 10/s\n}"}, unnamed},
		{"paths that share a name", sitetest.Config{Site: "rate_limit /a api 10/s\nrate_limit /b api 10/s"}, ""},
		{"sites that share a name", sitetest.Config{Site: api, Sites: "http://other.localhost:1 {\n" + api + "}"}, ""},
		{"sites whose blocks have no name", sitetest.Config{Site: within, Sites: other + within + "}"}, sites},
		{"sites whose blocks have no name, and said so", sitetest.Config{Site: within, Sites: other + strings.Replace(within, "{\n", "{\nignore_advice shared_by_sites\n", 1) + "}"}, ""},
		{"sites whose blocks have one name", sitetest.Config{Site: strings.Replace(within, "{", "all {", 1), Sites: other + strings.Replace(within, "{", "all {", 1) + "}"}, ""},
		{"sites of one block", sitetest.Config{Site: "respond ok", Sites: "http://a.localhost:1, http://b.localhost:1 {\n" + within + "}"}, ""},
		{"sites whose limits distinguish hosts", sitetest.Config{Site: strings.Replace(within, "rate 10/s", "rate 10/s\nkey {client_ip}{host}", 1), Sites: other + strings.Replace(within, "rate 10/s", "rate 10/s\nkey {client_ip}{host}", 1) + "}"}, ""},
		{"sites whose zones have one name", sitetest.Config{Site: "rate_limit {\nzone a {\nevents 5\nwindow 1m\n}\n}", Sites: other + "rate_limit {\nzone a {\nevents 5\nwindow 1m\n}\n}\n}"}, ""},
		{"handle blocks that share a name", sitetest.Config{Site: "handle /a {\n" + api + "}\nhandle {\n" + api + "}"}, ""},
		{"blocks that share a nested name", sitetest.Config{Site: "handle /a {\n" + within + "}\nhandle {\n" + within + "}"}, ""},
		{"groups in one block", sitetest.Config{Site: "rate_limit {\naccounting each\nlimit a {\nlimit x {\nrate 1/s\n}\n}\nlimit b {\nlimit x {\nrate 1/s\n}\n}\n}"}, ""},
		{"a site and a path in it", sitetest.Config{Site: "route {\n" + api + "handle /a {\n" + api + "}\n}"}, twice},
		{"a site and a path in it, the path first", sitetest.Config{Site: "route {\nroute /a {\n" + api + "}\n" + api + "}"}, ""},
		{"a site and a path in it, nested", sitetest.Config{Site: "route {\n" + within + "handle /a {\n" + within + "}\n}"}, twice},
		{"a site and a path in it, by another name", sitetest.Config{Site: "route {\n" + api + "handle /a {\nrate_limit other 10/s\n}\n}"}, ""},
		{"a path that costs more", sitetest.Config{Site: "route {\n" + api + "handle /a {\nrate_limit api 10/s {\ncost 5\n}\n}\n}"}, ""},
		{"those of some requests and all", sitetest.Config{Site: "route {\nrate_limit api {\nrate 10/s\nmatch path /a\n}\nrate_limit api 10/s\n}"}, ""},
		{"one that is off", sitetest.Config{Site: "route {\nrate_limit api {\nrate 10/s\nfactor 0\n}\nhandle /a {\nrate_limit api {\nrate 10/s\nfactor 0\n}\n}\n}"}, ""},
		{"two zones", sitetest.Config{Site: "route {\nrate_limit {\nzone a {\nkey {client_ip}\nevents 5\nwindow 1m\n}\n}\nrate_limit {\nzone a {\nkey {client_ip}\nevents 5\nwindow 1m\n}\n}\n}"}, twice},
	} {
		t.Run(tc.name, func(t *testing.T) {
			remedy := ""
			if tc.want != "" {
				remedy = map[string]string{sites: "Give each block a name", unnamed: "Unless this is intentional, give each a name.", twice: "Remove one, or give them different names."}[tc.want]
			}
			wantWarning(t, tc.Config, tc.want, remedy)
		})
	}
}
