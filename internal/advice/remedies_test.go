package advice_test

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/advice"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// TestRemedies guards that advice helps: once a remedy is applied, there is no advice any more,
// and the limit does to the same requests what it is for. There is a remedy of each kind here.
func TestRemedies(t *testing.T) {
	const (
		end     = "\nrespond ok\n"
		hash    = "$2a$04$en50XSOSRK6koiBfio.FceBm05YZ6/aoY6lwR1hzV41PDo.aHhWyG" // of "secret"
		auth    = "basic_auth {\nalice " + hash + "\nbob " + hash + "\n}\n"
		alice   = "/|Authorization: Basic YWxpY2U6c2VjcmV0"
		bob     = "/|Authorization: Basic Ym9iOnNlY3JldA=="
		guess   = "/|Authorization: Basic YWxpY2U6Z3Vlc3M="
		trusts  = "servers {\ntrusted_proxies static 127.0.0.0/8\n}\n"
		strict  = "servers {\ntrusted_proxies static 127.0.0.0/8\ntrusted_proxies_strict\n}\n"
		one     = "/|X-Forwarded-For: 192.0.2.1"
		two     = "/|X-Forwarded-For: 192.0.2.2"
		address = "limit address {\nsize 4\ndrip_rate 5m\n}\n"
		window  = "algorithm sliding_log\nwindow 1m\n"
		static  = "zone all {\nkey static\nevents 4\nwindow 1m\n}\n"
		each    = "zone one {\nkey {client_ip}\nevents 2\nwindow 1m\n}\n"
	)
	// two units and no more
	limit := func(options string) string { return "rate_limit a {\n" + window + "size 2\n" + options + "\n}\n" }
	within := func(name, options string) string {
		return "limit " + name + " {\n" + window + "size 2\n" + options + "\n}\n"
	}
	cookies := []string{"/|Cookie: id=1", "/|Cookie: id=2", "/|Cookie: id=3", "/|Cookie: id=4", "/|Cookie: id=5"}
	times := func(n int, request string) []string { return slices.Repeat([]string{request}, n) }

	const trusting = "trusted_proxies static 127.0.0.0/8\ntrusted_proxies_strict\n"
	connections := func(server, wrappers string) string {
		return "servers {\n" + server + "listener_wrappers {\n" + wrappers + "\n}\n}\n"
	}
	covered := make(map[advice.Kind]bool)
	for _, tc := range []struct {
		name   string
		kind   advice.Kind
		writes string // what the remedy says and the second config has
		config [2]sitetest.Config
		sends  []string // paths, each with a field behind a bar
		want   [2]string
	}{
		{"responses that are cut", advice.ResponseCut, "write_idle", [2]sitetest.Config{
			{Global: "servers {\ntimeouts {\nwrite 10m\n}\n}\n", Site: "rate_limit a {\nspeed 1MB/s\n}" + end},
			{Global: "servers {\ntimeouts {\nwrite_idle 10m\n}\n}\n", Site: "rate_limit a {\nspeed 1MB/s\n}" + end},
		}, times(3, "/"), [2]string{"200 200 200", "200 200 200"}},
		{"bytes that are compressed later", advice.EncodedLater, "rate_limit", [2]sitetest.Config{
			{Site: "route {\nencode\nrate_limit a {\nspeed 1MB/s\n}" + end + "\n}"},
			{Site: "route {\nrate_limit a {\nspeed 1MB/s\n}\nencode" + end + "\n}"},
		}, times(3, "/"), [2]string{"200 200 200", "200 200 200"}},
		{"capture of another name", advice.KeyUnset, "path_regexp user", [2]sitetest.Config{
			{Site: "@user path_regexp visitor ^/u/(.+)\n" + "rate_limit @user {\n" + within("a", "key {re.user.1}") + address + "}" + end},
			{Site: "@user path_regexp user ^/u/(.+)\n" + "rate_limit @user {\n" + within("a", "key {re.user.1}") + address + "}" + end},
		}, []string{"/u/1", "/u/1", "/u/2", "/u/2"}, [2]string{"200 200 429 429", "200 200 200 200"}},
		{"key for each request", advice.KeyPerRequest, "{client_ip}", [2]sitetest.Config{
			{Site: limit("key {uuid}") + end}, {Site: limit("key {client_ip}") + end},
		}, times(3, "/"), [2]string{"200 200 200", "200 200 429"}},
		{"key that Caddy lacks", advice.KeyUnknown, "{http.request.cookie.id}", [2]sitetest.Config{
			{Site: limit("key {http.request.cookies.id}") + end},
			{Site: "rate_limit {\n" + within("a", "key {http.request.cookie.id}") + address + "}" + end},
		}, append(times(3, cookies[0]), cookies[1:]...), [2]string{"200 200 429 429 429 429 429", "200 200 429 200 200 429 429"}},
		{"short name in JSON", advice.KeyShortName, "{http.request.header.X-Key}", [2]sitetest.Config{
			{Routes: `[{"handle":[{"handler":"rate_limit","limits":[{"name":"a","size":2,"key":"{header.X-Key}"}]},{"handler":"static_response"}]}]`},
			{Routes: `[{"handle":[{"handler":"rate_limit","limits":[{"name":"a","size":2,"key":"{http.request.header.X-Key}"},{"name":"b","size":3}]},{"handler":"static_response"}]}]`},
		}, []string{"/|X-Key: 1", "/|X-Key: 1", "/|X-Key: 2", "/|X-Key: 3"}, [2]string{"200 200 429 429", "200 200 200 429"}},
		{"name that nothing sets", advice.KeyUnset, "map", [2]sitetest.Config{
			{Site: limit("key {tenant}") + end},
			{Site: "map {header.X-Tenant} {tenant} {\nacme acme\ndefault none\n}\n" + limit("key {tenant}") + end},
		}, append(times(3, "/|X-Tenant: acme"), "/"), [2]string{"200 200 429 429", "200 200 429 200"}},
		{"text as a key", advice.KeyText, "{client_ip}", [2]sitetest.Config{
			{Global: strict, Site: limit("key client_ip") + end}, {Global: strict, Site: limit("key {client_ip}") + end},
		}, append(times(3, one), two), [2]string{"200 200 429 429", "200 200 429 200"}},
		{"any text as a key", advice.KeyConstant, "all", [2]sitetest.Config{
			{Global: strict, Site: limit("key per_ip") + end}, {Global: strict, Site: limit("key all") + end},
		}, append(times(3, one), two), [2]string{"200 200 429 429", "200 200 429 429"}},
		{"length of a prefix in a key", advice.KeyPrefix, "ipv4_prefix 24", [2]sitetest.Config{
			{Global: strict, Site: limit("key {client_ip}/24") + end}, {Global: strict, Site: limit("key {client_ip}\nipv4_prefix 24") + end},
		}, []string{one, two, one, two}, [2]string{"200 200 200 200", "200 200 429 429"}},
		{"chosen key", advice.KeyChosen, "limit", [2]sitetest.Config{
			{Site: limit("key {cookie.id}") + end}, {Site: "rate_limit {\n" + within("a", "key {cookie.id}") + address + "}" + end},
		}, cookies, [2]string{"200 200 200 200 200", "200 200 200 200 429"}},
		{"chosen key beside what always passes", advice.KeyChosen, "limit", [2]sitetest.Config{
			{Site: "rate_limit {\n" + within("a", "key {cookie.id}") + strings.Replace(address, "}", "cost 0\n}", 1) + "}" + end},
			{Site: "rate_limit {\n" + within("a", "key {cookie.id}") + address + "}" + end},
		}, cookies, [2]string{"200 200 200 200 200", "200 200 200 200 429"}},
		{"chosen key by map", advice.KeyChosen, "{client_ip}", [2]sitetest.Config{
			{Site: "map {cookie.id} {session} {\n~(.+) $1\ndefault none\n}\n" + limit("key {session}") + end}, {Site: limit("key {client_ip}") + end},
		}, cookies, [2]string{"200 200 200 200 200", "200 200 429 429 429"}},
		{"chosen key by vars", advice.KeyChosen, "{client_ip}", [2]sitetest.Config{
			{Site: "vars session {cookie.id}\n" + limit("key {vars.session}") + end}, {Site: limit("key {client_ip}") + end},
		}, cookies, [2]string{"200 200 200 200 200", "200 200 429 429 429"}},
		{"user without authentication", advice.KeyWithoutUser, "route", [2]sitetest.Config{
			{Site: limit("key {http.auth.user.id}") + end}, {Site: "route {\n" + auth + limit("key {http.auth.user.id}") + "}" + end},
		}, append(times(3, alice), bob), [2]string{"200 200 429 429", "200 200 429 200"}},
		{"user before authentication", advice.SetLater, "route", [2]sitetest.Config{
			{Site: limit("key {http.auth.user.id}") + auth + end}, {Site: "route {\n" + auth + limit("key {http.auth.user.id}") + "}" + end},
		}, append(times(3, alice), bob), [2]string{"200 200 429 429", "200 200 429 200"}},
		{"address of a proxy", advice.KeyOfProxy, "{client_ip}", [2]sitetest.Config{
			{Global: strict, Site: limit("key {remote_host}") + end}, {Global: strict, Site: limit("key {client_ip}") + end},
		}, append(times(3, one), two), [2]string{"200 200 429 429", "200 200 429 200"}},
		{"chosen drips", advice.RateChosen, "map", [2]sitetest.Config{
			{Site: "rate_limit a {\nsize 2\ndrip_rate 5m\ndrip_size {query.n}\n}" + end},
			{Site: "route {\n" + auth + "map {http.auth.user.id} {n} {\nalice 2\ndefault 1\n}\nrate_limit a {\nsize 2\ndrip_rate 5m\ndrip_size {n}\n}\n}" + end},
		}, []string{"/?n=1" + alice[1:], "/?n=2" + alice[1:], "/?n=3" + alice[1:]}, [2]string{"200 200 200", "200 200 429"}},
		{"chosen size by vars", advice.SizeChosen, "vars", [2]sitetest.Config{
			{Site: "vars n {query.n}\nrate_limit a {\nsize {vars.n}\ndrip_rate 5m\n}" + end},
			{Site: "route {\nvars n 2\nrate_limit a {\nsize {vars.n}\ndrip_rate 5m\n}\n}" + end},
		}, times(3, "/?n=9"), [2]string{"200 200 200", "200 200 429"}},
		{"chosen cost", advice.SizeChosen, "map", [2]sitetest.Config{
			{Site: limit("cost {query.n}") + end}, {Site: "map {path} {n} {\n/free 0\ndefault 1\n}\n" + limit("cost {n}") + end},
		}, append(times(3, "/?n=0"), "/free"), [2]string{"200 200 200 400", "200 200 429 200"}},

		{"behind what answers", advice.Unreachable, "rate_limit", [2]sitetest.Config{
			{Site: "route {\nrespond ok\n" + limit("") + "}"}, {Site: "route {\n" + limit("") + "respond ok\n}"},
		}, times(3, "/"), [2]string{"200 200 200", "200 200 429"}},
		{"behind what answers its path", advice.Unreachable, "", [2]sitetest.Config{
			{Global: "order rate_limit before reverse_proxy", Site: limit("match path /a/login*") + "handle /a/* {\nrespond a\n}"},
			{Site: limit("match path /a/login*") + "handle /a/* {\nrespond a\n}"},
		}, times(3, "/a/login"), [2]string{"200 200 200", "200 200 429"}},
		{"behind another block", advice.Unreachable, "", [2]sitetest.Config{
			{Site: "handle /a/* {\nrespond a\n}\nhandle {\n" + limit("match path /a/*") + "respond b\n}"},
			{Site: "handle /a/* {\n" + limit("match path /a/*") + "respond a\n}\nhandle {\nrespond b\n}"},
		}, times(3, "/a/b"), [2]string{"200 200 200", "200 200 429"}},
		{"without a prefix", advice.Unreachable, "/login*", [2]sitetest.Config{
			{Site: "handle_path /api/* {\nrate_limit /api/login 2/m\nrespond a\n}"}, {Site: "handle_path /api/* {\nrate_limit /login* 2/m\nrespond a\n}"},
		}, times(3, "/api/login"), [2]string{"200 200 200", "200 200 429"}},
		{"behind a rewrite", advice.Unreachable, "route", [2]sitetest.Config{
			{Site: "rewrite /old /new\nrate_limit /old 2/m" + end}, {Site: "route {\nrate_limit /old* 2/m\nrewrite /old /new\n}" + end},
		}, times(3, "/old"), [2]string{"200 200 200", "200 200 429"}},
		{"path without a slash", advice.Unmatched, "/search*", [2]sitetest.Config{
			{Site: limit("match path search") + end}, {Site: limit("match path /search*") + end},
		}, times(3, "/search"), [2]string{"200 200 200", "200 200 429"}},
		{"path with a query", advice.Unmatched, "/i.php*", [2]sitetest.Config{
			{Site: limit("match path /i.php?a=b") + end}, {Site: limit("match {\npath /i.php*\nquery a=b\n}") + end},
		}, times(3, "/i.php?a=b"), [2]string{"200 200 200", "200 200 429"}},
		{"host with a scheme", advice.Unmatched, "127.0.0.1", [2]sitetest.Config{
			{Site: limit("match host http://127.0.0.1") + end}, {Site: limit("match host 127.0.0.1") + end},
		}, times(3, "/"), [2]string{"200 200 200", "200 200 429"}},
		{"path without its other form", advice.PathForm, "path /login /login/", [2]sitetest.Config{
			{Site: limit("match path /login") + end}, {Site: limit("match path /login /login/") + end},
		}, times(3, "/login/"), [2]string{"200 200 200", "200 200 429"}},
		{"path without its other form, of the directive", advice.PathForm, "/login*", [2]sitetest.Config{
			{Site: "rate_limit /login 2/m" + end}, {Site: "rate_limit /login* 2/m" + end},
		}, times(3, "/login/"), [2]string{"200 200 200", "200 200 429"}},
		{"path of a script", advice.PathForm, "path /login.php /login.php/*", [2]sitetest.Config{
			{Site: limit("match path /login.php") + end}, {Site: limit("match path /login.php /login.php/*") + end},
		}, times(3, "/login.php/x"), [2]string{"200 200 200", "200 200 429"}},
		{"logins that are not counted", advice.Uncounted, "rate_limit", [2]sitetest.Config{
			{Site: "route {\n" + auth + limit("count status 401") + "}" + end}, {Site: limit("count status 401") + auth + end},
		}, times(3, guess), [2]string{"401 401 401", "401 401 429"}},
		{"logins by user, behind", advice.UncountedUser, "{client_ip}", [2]sitetest.Config{
			{Site: "route {\n" + auth + limit("count status 401\nkey {http.auth.user.id}") + "}" + end}, {Site: limit("count status 401\nkey {client_ip}") + auth + end},
		}, times(3, guess), [2]string{"401 401 401", "401 401 429"}},
		{"logins by user, before", advice.UncountedUser, "{client_ip}", [2]sitetest.Config{
			{Site: limit("count status 401\nkey {http.auth.user.id}") + auth + end}, {Site: limit("count status 401\nkey {client_ip}") + auth + end},
		}, times(3, guess), [2]string{"401 401 429", "401 401 429"}},

		{"limit matched by a field", advice.FieldMatched, "not vars {http.rate_limit.field.grant} x", [2]sitetest.Config{
			{Site: limit("match vars {http.rate_limit.field.grant} password") + end}, {Site: limit("match not vars {http.rate_limit.field.grant} x") + end},
		}, times(3, "/?grant=password&grant=x"), [2]string{"200 200 200", "200 200 429"}},
		{"exemption of what is unclear", advice.UnclearExempt, `not vars {http.rate_limit.field.a} ""`, [2]sitetest.Config{
			{Site: "rate_limit {\nlimit known {\nkey {http.rate_limit.field.a}\nrate 1/h\ndry_run\n}\n}\n" + limit("match not vars {http.rate_limit.dry_run} known") + end},
			{Site: "rate_limit {\nlimit known {\nmatch not vars {http.rate_limit.field.a} \"\"\nkey {http.rate_limit.field.a}\nrate 1/h\ndry_run\n}\n" + address + "}\n" + limit("match not vars {http.rate_limit.dry_run} known") + end},
		}, times(4, "/?a=1&a=2"), [2]string{"200 200 200 200", "200 200 429 429"}},

		{"login of one's own", advice.ClearedByOthers, "{client_ip}", [2]sitetest.Config{
			{Global: strict, Site: limit("count status 401\nclear status 2xx") + "respond /in in\nrespond 401"},
			{Global: strict, Site: "rate_limit {\n" + within("a", "match method GET\nkey {http.rate_limit.field.user}\ncount status 401\nclear header X-In *") + within("b", "key {client_ip}\ncount status 401") + "}\nrespond /in in\nrespond 401"},
		}, []string{"/?user=a|" + one[2:], "/in?user=b|" + one[2:], "/?user=a|" + one[2:], "/?user=a|" + one[2:]}, [2]string{"401 200 401 401", "401 200 401 429"}},
		{"form of a login", advice.ClearedByOthers, "method POST", [2]sitetest.Config{
			{Site: limit("key {http.rate_limit.field.user}\ncount status 401\nclear status 2xx") + "respond /form in\nrespond 401"},
			{Site: "rate_limit {\n" + within("a", "match method POST\nkey {http.rate_limit.field.user}\ncount status 401\nclear status 2xx") + within("b", "count status 401") + "}\nrespond /form in\nrespond 401"},
		}, []string{"/login?user=a", "/form?user=a", "/login?user=a", "/login?user=a"}, [2]string{"401 200 401 401", "401 200 401 429"}},

		{"field that is none", advice.NeverCounts, "count header X-Login", [2]sitetest.Config{
			{Site: limit("count header X-Login: failed") + end}, {Site: "route {\n" + limit("count header X-Login failed") + "header X-Login failed\nrespond ok\n}"},
		}, times(3, "/"), [2]string{"200 200 200", "200 200 429"}},
		{"several paths in one", advice.Unmatched, "path /a* /b*", [2]sitetest.Config{
			{Site: limit("match path /a*,/b*") + end}, {Site: limit("match path /a* /b*") + end},
		}, times(3, "/b"), [2]string{"200 200 200", "200 200 429"}},
		{"several methods in one", advice.Unmatched, "method GET HEAD", [2]sitetest.Config{
			{Site: limit("match method GET|HEAD") + end}, {Site: limit("match method GET HEAD") + end},
		}, times(3, "/"), [2]string{"200 200 200", "200 200 429"}},
		{"matchers in one line", advice.Unmatched, "path /login", [2]sitetest.Config{
			{Site: "@l method GET path /login*\nrate_limit @l a 2/m" + end}, {Site: "@l {\nmethod GET\npath /login*\n}\nrate_limit @l a 2/m" + end},
		}, append(times(3, "/"), times(3, "/login")...), [2]string{"200 200 429 429 429 429", "200 200 200 200 200 429"}},
		{"text of another server in a path", advice.Unmatched, "/users/*", [2]sitetest.Config{
			{Site: limit("match path /users/{id}") + end}, {Site: limit("match path /users/*") + end},
		}, times(3, "/users/1"), [2]string{"200 200 200", "200 200 429"}},
		{"method that is none", advice.MethodUnknown, "GET", [2]sitetest.Config{
			{Site: limit("match method GTE") + end}, {Site: limit("match method GET") + end},
		}, times(3, "/"), [2]string{"200 200 200", "200 200 429"}},
		{"method as a name", advice.MatcherAsName, "match method POST", [2]sitetest.Config{
			{Site: "rate_limit POST 2/m" + end}, {Site: limit("match method POST") + end},
		}, times(3, "/"), [2]string{"200 200 429", "200 200 200"}},
		{"equal without a name", advice.Unnamed, "", [2]sitetest.Config{
			{Unnamed: true, Site: "rate_limit /a* 2/m\nrate_limit /b* 2/m" + end}, {Unnamed: true, Site: "rate_limit /a* a 2/m\nrate_limit /b* b 2/m" + end},
		}, []string{"/a", "/a", "/b", "/a"}, [2]string{"200 200 429 429", "200 200 200 429"}},
		{"charged twice", advice.ChargedTwice, "", [2]sitetest.Config{
			{Site: "route {\nrate_limit b 2/m\nhandle /a* {\nrate_limit b 2/m\n}\n}" + end}, {Site: "route {\nrate_limit b 2/m\n}" + end},
		}, times(3, "/a"), [2]string{"200 429 429", "200 200 429"}},
		{"zones of one name", advice.ZonesDiffer, "", [2]sitetest.Config{
			{Site: "handle /a* {\nrate_limit {\n" + each + "}\nrespond a\n}\nhandle {\nrate_limit {\n" + strings.Replace(each, "events 2", "events 3", 1) + "}\nrespond b\n}"},
			{Site: "handle /a* {\nrate_limit {\n" + each + "}\nrespond a\n}\nhandle {\nrate_limit {\n" + each + "}\nrespond b\n}"},
		}, []string{"/b", "/b", "/b"}, [2]string{"200 200 200", "200 200 429"}},
		{"zone that admits nothing", advice.ZoneClosed, "max_events", [2]sitetest.Config{
			{Routes: `[{"handle":[{"handler":"rate_limit","rate_limits":{"a":{"window":"1m"}}},{"handler":"static_response"}]}]`},
			{Routes: `[{"handle":[{"handler":"rate_limit","rate_limits":{"a":{"window":"1m","max_events":2}}},{"handler":"static_response"}]}]`},
		}, times(3, "/"), [2]string{"429 429 429", "200 200 429"}},
		{"zone for all before a narrow one", advice.Floodable, "accounting atomic", [2]sitetest.Config{
			{Global: strict, Site: "rate_limit {\n" + static + each + "}" + end}, {Global: strict, Site: "rate_limit {\naccounting atomic\n" + static + each + "}" + end},
		}, append(times(5, one), two), [2]string{"200 200 429 429 429 429", "200 200 429 429 429 200"}},
		{"bucket for all beside a narrow one", advice.Floodable, "accounting atomic", [2]sitetest.Config{
			{Global: strict, Site: "rate_limit {\naccounting each\n" + within("a", "") + "limit b {\nkey all\n" + window + "size 4\n}\n" + "}" + end},
			{Global: strict, Site: "rate_limit {\naccounting atomic\n" + within("a", "") + "limit b {\nkey all\n" + window + "size 4\n}\n" + "}" + end},
		}, append(times(5, one), two), [2]string{"200 200 429 429 429 429", "200 200 429 429 429 200"}},
		{"parent that never denies", advice.NeverDenies, "", [2]sitetest.Config{
			{Site: "rate_limit a {\nsize 16\ndrip_rate 1s\nlimit b {\nsize 2\ndrip_rate 90s\n}\n}" + end}, {Site: "rate_limit b {\nsize 2\ndrip_rate 90s\n}" + end},
		}, times(3, "/"), [2]string{"200 200 429", "200 200 429"}},
		{"address that clients choose", advice.AddressChosen, "trusted_proxies_strict", [2]sitetest.Config{
			{Global: trusts, Site: limit("") + end}, {Global: strict, Site: limit("") + end},
		}, []string{"/|X-Forwarded-For: 9.9.9.1, 1.1.1.1", "/|X-Forwarded-For: 9.9.9.2, 1.1.1.1", "/|X-Forwarded-For: 9.9.9.3, 1.1.1.1"}, [2]string{"200 200 200", "200 200 429"}},
		{"proxy that is not trusted", advice.ProxyUntrusted, "trusted_proxies_strict", [2]sitetest.Config{
			{Site: "bind 127.0.0.1\n" + limit("") + end}, {Global: "servers {\ntrusted_proxies static 127.0.0.1 ::1\ntrusted_proxies_strict\n}\n", Site: "bind 127.0.0.1\n" + limit("") + end},
		}, append(times(3, one), two), [2]string{"200 200 429 429", "200 200 429 200"}},
		{"proxies that are exempt", advice.ProxyExempted, "not client_ip", [2]sitetest.Config{
			{Global: strict, Site: limit("match not remote_ip 127.0.0.0/8") + end}, {Global: strict, Site: limit("match not client_ip 127.0.0.0/8") + end},
		}, times(3, one), [2]string{"200 200 200", "200 200 429"}},
		{"ban of all", advice.BanOfAll, "{client_ip}", [2]sitetest.Config{
			{Global: strict, Site: limit("key all\nban 10m") + end}, {Global: strict, Site: limit("key {client_ip}\nban 10m") + end},
		}, append(times(3, one), two), [2]string{"200 200 429 429", "200 200 429 200"}},
		{"one at once", advice.OneAtOnce, "size", [2]sitetest.Config{
			{Site: "rate_limit a {\nsize 1\n}" + end}, {Site: "rate_limit a {\nsize 3\ndrip_rate 5m\n}" + end},
		}, times(4, "/"), [2]string{"200 429 429 429", "200 200 200 429"}},
		{"one in an interval", advice.OneAtOnce, "size", [2]sitetest.Config{
			{Site: "rate_limit a {\nmin_interval 5m\n}" + end}, {Site: "rate_limit a {\nsize 3\ndrip_rate 5m\n}" + end},
		}, times(4, "/"), [2]string{"200 429 429 429", "200 200 200 429"}},
		{"max_delay that is a moment too short", advice.DelayUnused, "max_delay 667ms", [2]sitetest.Config{
			{Site: "rate_limit a {\nrate 3/s\nmax_delay 666ms\n}" + end}, {Site: "rate_limit a {\nrate 3/s\nmax_delay 667ms\n}" + end},
		}, nil, [2]string{}},
		{"many keys with concurrency auto", advice.Unprotected, "concurrency auto", [2]sitetest.Config{
			{Site: "rate_limit {\nlimit a {\nkey {client_ip}\nconcurrency auto\n}\n}" + end}, {Site: "rate_limit {\nlimit a {\nkey {client_ip}\nconcurrency auto\n}\nlimit b {\nconcurrency auto\n}\n}" + end},
		}, nil, [2]string{}},
		{"consistency without redis", advice.ConsistencyUnused, "", [2]sitetest.Config{
			{Site: "rate_limit a {\nsize 3\ndrip_rate 1m\nconsistency eventual 1s\n}" + end}, {Site: "rate_limit a {\nsize 3\ndrip_rate 1m\n}" + end},
		}, times(4, "/"), [2]string{"200 200 200 429", "200 200 200 429"}},
		{"denials while redis is down", advice.Unavailable, "on_error fallback", [2]sitetest.Config{
			{Global: "rate_limit {\nredis 127.0.0.1:1\non_error deny\n}", Site: limit("") + end}, {Global: "rate_limit {\nredis 127.0.0.1:1\non_error fallback\n}", Site: limit("") + end},
		}, times(3, "/"), [2]string{"503 503 503", "200 200 429"}},
		{"connections of proxies", advice.ConnectionsProxy, "match not remote_ip", [2]sitetest.Config{
			{Global: connections(trusting, "rate_limit 1000/s"), Site: "respond ok"}, {Global: connections(trusting, "rate_limit 1000/s {\nmatch not remote_ip 127.0.0.0/8\n}"), Site: "respond ok"},
		}, nil, [2]string{}},
		{"connections before the PROXY protocol", advice.ConnectionsProxy, "between proxy_protocol and tls", [2]sitetest.Config{
			{Global: connections("", "rate_limit 1000/s\nproxy_protocol"), Site: "respond ok"},
			{Global: connections("", "proxy_protocol\nrate_limit 1000/s") + "# between proxy_protocol and tls\n", Site: "respond ok"},
		}, nil, [2]string{}},
		{"connections behind a proxy on this host", advice.ProxyUntrusted, "proxy_protocol", [2]sitetest.Config{
			{Global: connections("", "rate_limit 1000/s"), Site: "bind 127.0.0.1\nrespond ok"},
			{Global: connections("", "proxy_protocol\nrate_limit 1000/s"), Site: "bind 127.0.0.1\nrespond ok"},
		}, nil, [2]string{}},
		{"few connections for all", advice.ConnectionsOfAll, "{client_ip}", [2]sitetest.Config{
			{Global: connections("", "proxy_protocol\nrate_limit {\nkey all\nconcurrency 100\n}"), Site: "respond ok"},
			{Global: connections("", "proxy_protocol\nrate_limit {\nkey {client_ip}\nconcurrency 100\n}"), Site: "respond ok"},
		}, nil, [2]string{}},
		{"many addresses of a host", advice.AddressMany, "ipv6_prefix", [2]sitetest.Config{
			{Global: connections("", "proxy_protocol\nrate_limit {\nipv6_prefix 128\nconcurrency 100\n}"), Site: "respond ok"},
			{Global: connections("", "proxy_protocol\nrate_limit {\nconcurrency 100 # without ipv6_prefix\n}"), Site: "respond ok"},
		}, nil, [2]string{}},
		{"attempts that do not count", advice.AttemptsUncounted, "accounting each", [2]sitetest.Config{
			{Global: connections("", "proxy_protocol\nrate_limit {\nlimit open {\nconcurrency 100\n}\nlimit new {\nrate 1000/s\nban 1m\n}\n}"), Site: "respond ok"},
			{Global: connections("", "proxy_protocol\nrate_limit {\nlimit open {\nconcurrency 100\n}\nlimit new {\nrate 1000/s\nban 1m\n}\naccounting each\n}"), Site: "respond ok"},
		}, nil, [2]string{}},
		{"redis without a password", advice.RedisOpen, "password", [2]sitetest.Config{
			{Global: "rate_limit {\nredis 192.0.2.1\n}", Site: limit("") + end}, {Global: "rate_limit {\nredis 192.0.2.1 {\npassword secret\n}\n}", Site: limit("") + end},
		}, nil, [2]string{}},
	} {
		covered[tc.kind] = true
		t.Run(tc.name, func(t *testing.T) {
			found := adviceOn(t, onAllHosts(t, tc.config[0]))
			i := slices.IndexFunc(found, func(a advice.Advice) bool { return a.Kind == tc.kind })
			if i < 0 || !strings.Contains(found[i].Remedy, tc.writes) || !strings.Contains(fmt.Sprint(tc.config[1]), tc.writes) {
				t.Fatalf("got %+v, want advice of kind %s whose remedy has %q", found, tc.kind, tc.writes)
			}
			if left := adviceOn(t, onAllHosts(t, tc.config[1])); len(left) > 0 {
				t.Errorf("with the remedy: got %+v, want no more advice", left)
			}
			if len(tc.sends) == 0 {
				return
			}
			for i, when := range []string{"before", "with the remedy"} {
				t.Run(when, func(t *testing.T) {
					s := sitetest.StartConfig(t, tc.config[i])
					got := make([]string, len(tc.sends))
					for j, request := range tc.sends {
						path, field, has := strings.Cut(request, "|")
						fields := []string{field}
						if !has {
							fields = nil
						}
						got[j] = fmt.Sprint(s.Get(path, fields...).StatusCode)
					}
					if got := strings.Join(got, " "); got != tc.want[i] {
						t.Errorf("got %s, want %s", got, tc.want[i])
					}
				})
			}
		})
	}
	covered[advice.OfRedis] = true       // found by asking a server, see TestCheckRedis
	covered[advice.SharedBySites] = true // which takes two sites, see TestUnintendedSharing
	for _, kind := range advice.Kinds {
		if !covered[kind] {
			t.Errorf("no remedy of kind %s is applied", kind)
		}
	}
}

// onAllHosts returns the config for a server that listens on all addresses, as others than those
// of tests do.
func onAllHosts(t *testing.T, c sitetest.Config) []byte {
	t.Helper()
	text := string(c.JSON(t, "127.0.0.1:1", filepath.Join(sitetest.TempDir(t), "log")))
	if !strings.Contains(c.Site, "bind ") {
		text = strings.Replace(text, `"listen":["127.0.0.1:1"]`, `"listen":[":1"]`, 1)
	}
	return []byte(strings.Replace(text, `"match":[{"host":["127.0.0.1"]}],`, "", 1))
}
