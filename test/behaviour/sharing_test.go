package behaviour

import "testing"

// TestUnintendedSharing guards that limits which share buckets though nobody can have meant
// it are told when the config is loaded, once, and by the command check in the same words;
// and that those which share them by a name of theirs are not.
func TestUnintendedSharing(t *testing.T) {
	const (
		unnamed = "Several limits without a name, or within one, have equal keys and numbers"
		twice   = "Some requests pass it twice, in blocks that share its buckets"
		api     = "rate_limit api 10/s\n"
		within  = "rate_limit {\nlimit api {\nrate 10/s\n}\n}\n"
	)
	for _, tc := range []struct {
		name string
		setup
		want string
	}{
		{"without a name, in a Caddyfile", setup{site: "rate_limit /a 10/s\nrate_limit /b 10/s"}, ""},
		{"without a name, in JSON", setup{unnamed: true, site: "rate_limit /a 10/s\nrate_limit /b 10/s"}, unnamed},
		{"within limits without a name, in JSON", setup{unnamed: true, site: "rate_limit /a {\nrate 9/s\nlimit in {\nrate 5/s\n}\n}\nrate_limit /b {\nrate 10/s\nlimit in {\nrate 5/s\n}\n}"}, unnamed},
		{"other numbers, in JSON", setup{unnamed: true, site: "rate_limit /a 10/s\nrate_limit /b 20/s"}, ""},
		{"one after the other, in JSON", setup{unnamed: true, site: "route {\nrate_limit 10/s\nrate_limit 10/s\n}"}, unnamed},
		{"paths that share a name", setup{site: "rate_limit /a api 10/s\nrate_limit /b api 10/s"}, ""},
		{"sites that share a name", setup{site: api, sites: "http://other.localhost:1 {\n" + api + "}"}, ""},
		{"handle blocks that share a name", setup{site: "handle /a {\n" + api + "}\nhandle {\n" + api + "}"}, ""},
		{"blocks that share a nested name", setup{site: "handle /a {\n" + within + "}\nhandle {\n" + within + "}"}, ""},
		{"groups in one block", setup{site: "rate_limit {\naccounting in_order\nlimit a {\nlimit x {\nrate 1/s\n}\n}\nlimit b {\nlimit x {\nrate 1/s\n}\n}\n}"}, ""},
		{"a site and a path in it", setup{site: "route {\n" + api + "handle /a {\n" + api + "}\n}"}, twice},
		{"a site and a path in it, the path first", setup{site: "route {\nroute /a {\n" + api + "}\n" + api + "}"}, ""},
		{"a site and a path in it, nested", setup{site: "route {\n" + within + "handle /a {\n" + within + "}\n}"}, twice},
		{"a site and a path in it, by another name", setup{site: "route {\n" + api + "handle /a {\nrate_limit other 10/s\n}\n}"}, ""},
		{"a path that costs more", setup{site: "route {\n" + api + "handle /a {\nrate_limit api 10/s {\ncost 5\n}\n}\n}"}, ""},
		{"those of some requests and all", setup{site: "route {\nrate_limit api {\nrate 10/s\nmatch path /a\n}\nrate_limit api 10/s\n}"}, ""},
		{"one that is off", setup{site: "route {\nrate_limit api {\nrate 10/s\nfactor 0\n}\nhandle /a {\nrate_limit api {\nrate 10/s\nfactor 0\n}\n}\n}"}, ""},
		{"two zones", setup{site: "route {\nrate_limit {\nzone a {\nkey {client_ip}\nevents 5\nwindow 1m\n}\n}\nrate_limit {\nzone a {\nkey {client_ip}\nevents 5\nwindow 1m\n}\n}\n}"}, twice},
	} {
		t.Run(tc.name, func(t *testing.T) {
			remedy := ""
			if tc.want != "" {
				remedy = map[string]string{unnamed: "Unless that is meant, give each a name.", twice: "Remove one, or give them different names."}[tc.want]
			}
			wantWarning(t, tc.setup, tc.want, remedy)
		})
	}
}
