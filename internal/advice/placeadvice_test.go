package advice_test

import (
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/sitetest"
)

// TestPlacesThatLimitNothing guards that a limit which no request reaches, or whose matchers and
// numbers can't be what they are where it is, is reported when the config is loaded and by the
// command check, in the same words; and that one which may limit something is not.
func TestPlacesThatLimitNothing(t *testing.T) {
	limit := func(options string) string { return "rate_limit a {\nsize 5\n" + options + "\n}\n" }
	const (
		early   = "order rate_limit before reverse_proxy"
		proxy   = "reverse_proxy 127.0.0.1:1\n"
		putIt   = "Remove the global option order rate_limit if there is one, or put both in a route block"
		block   = "Put the limit into that block."
		after   = "Write the path as it is after "
		counts  = "count status 401"
		forward = "forward_auth 127.0.0.1:1 {\nuri /\ncopy_headers X-User\n}\n"
		limited = "rate_limit 5/s\n"
		ofRoute = "Put both in a route block, "
	)
	for _, tc := range []struct{ name, global, site, problem, remedy string }{
		{"handle for all", early, limited + "handle {\n" + proxy + "}", "No request reaches it: the reverse_proxy directive before it answers each one.", putIt},
		{"handle for some and all", early, limited + "handle /a* {\nrespond a\n}\nhandle {\n" + proxy + "}", "No request reaches it: ", putIt},
		{"handle for some, in the default order", "", limited + "handle /a* {\nrespond a\n}\nhandle {\n" + proxy + "}", "", ""},
		{"handle for some", early, limited + "handle /a* {\nrespond a\n}\n" + proxy, "", ""},
		{"handle by method and all", early, limited + "@post method POST\nhandle @post {\nrespond a\n}\nhandle {\nrespond b\n}\n", "No request reaches it: the respond directive", putIt},
		{"handle that passes on", early, limited + "handle /a* {\nheader A b\n}\nhandle {\n" + proxy + "}", "", ""},
		{"handle that passes some on", early, limited + "handle {\nrespond /a a\n}\n" + proxy, "", ""},
		{"route for all", early, limited + "route {\nrespond /a a\nrespond b\n}\n" + proxy, "No request reaches it: the respond directive before", putIt},
		{"respond for all", early, limited + "respond ok\n" + proxy, "No request reaches it: the respond directive before", putIt},
		{"respond for some", early, limited + "respond /a ok\n" + proxy, "", ""},
		{"redir for all", "", "redir https://example.com\n" + limited, "No request reaches it: the redir directive before", putIt},
		{"redir for some", "", "redir /a /b\n" + limited + "respond ok", "", ""},
		{"abort", "", "route {\nabort\n" + limited + "}", "No request reaches it: the abort directive before", putIt},
		{"error for all", "", "route {\nerror 404\n" + limited + "}", "No request reaches it: the error directive before", putIt},
		{"in error routes", "", "error 404\nhandle_errors {\n" + limited + "respond no\n}", "", ""},
		{"files", "", "route {\nfile_server\n" + limited + "}", "No request reaches it: the file_server directive before", putIt},
		{"files that pass on", "", "route {\nfile_server {\npass_thru\n}\n" + limited + "}", "", ""},
		{"proxy that passes some on", "", "route {\nreverse_proxy 127.0.0.1:1 {\n@up status 2xx\nhandle_response @up {\nheader A b\n}\n}\n" + limited + "}", "", ""},
		{"behind forward_auth", "", "route {\n" + forward + limited + proxy + "}", "", ""},
		{"behind intercept", "", "route {\nintercept {\n@e status 5xx\nhandle_response @e {\nrespond no\n}\n}\n" + limited + proxy + "}", "", ""},
		{"in intercept", "", "intercept {\n@e status 5xx\nhandle_response @e {\n" + limited + "respond no\n}\n}\nrespond ok", "", ""},
		{"in a named route", "", "handle /a {\ninvoke own\n}\nhandle {\nrespond b\n}", "", ""},
		{"in a named route behind what answers", "", "route {\nrespond a\ninvoke own\n}\nhandle /b {\ninvoke own\n}\n", "", ""},
		{"named route that answers", early, limited + "invoke answer\n" + proxy, "No request reaches it: the respond directive before", putIt},
		{"zone", early, "rate_limit {\nzone a {\nkey {remote_host}\nevents 5\nwindow 1m\n}\n}\nhandle {\n" + proxy + "}", "No request reaches it: ", putIt},
		{"several limits", early, "rate_limit {\nlimit a {\nsize 5\n}\nlimit b {\nsize 50\n}\n}\nhandle {\n" + proxy + "}", "No request reaches it: ", putIt},

		{"path of another handle", early, limit("match path /a/login") + "handle /a/* {\nrespond a\n}\n" + proxy, "No request for its path /a/login reaches it: the respond directive before it answers /a/*.", putIt},
		{"one path of another handle", early, limit("match path /a/login /b") + "handle /a/* {\nrespond a\n}\n" + proxy, "", ""},
		{"path beside another handle", early, limit("match path /a") + "handle /a/* {\nrespond a\n}\n" + proxy, "", ""},
		{"path of another method", early, limit("match path /a") + "@post {\nmethod POST\npath /a\n}\nrespond @post a\n" + proxy, "", ""},
		{"path of another block", "", "handle /a/* {\n" + proxy + "}\nhandle {\nrate_limit /a/* 5/s\n" + proxy + "}", "No request for its path /a/* reaches it: an earlier block takes /a/*.", block},
		{"path of no other block", "", "handle /a/* {\n" + proxy + "}\nhandle {\nrate_limit /* 5/s\n" + proxy + "}", "", ""},
		{"path of another block for a host", "", "@a {\nhost a.com\npath /a\n}\nhandle @a {\n" + proxy + "}\nhandle {\nrate_limit /a 5/s\n" + proxy + "}", "", ""},

		{"handle_path", "", "handle_path /api/* {\nrate_limit /api/login 5/s\n" + proxy + "}", "No request for its path /api/login matches it: the prefix /api has been removed before it.", "Write /login*."},
		{"handle_path, of a limit", "", "handle_path /api/* {\n" + limit("match path /API/* /api") + proxy + "}", "No request for its path /api/* matches it: the prefix /api has", "Write /*."},
		{"handle_path, of a handle within", "", "handle_path /api/* {\nhandle /api/login {\n" + limited + proxy + "}\n}", "No request for its path /api/login matches it", "Write /login*."},
		{"handle_path, of a nested limit", "", "handle_path /api/* {\nrate_limit a {\nsize 9\nlimit in {\nmatch path /api/login\nsize 5\n}\n}\n" + proxy + "}", "No request for its path /api/login matches it", "Write /login*."},
		{"handle_path, with what is left", "", "handle_path /api/* {\nrate_limit /login 5/s\n" + proxy + "}", "", ""},
		{"handle_path, with both", "", "handle_path /api/* {\n" + limit("match path /api/login /login") + proxy + "}", "", ""},
		{"handle_path, in another word", "", "handle_path /api/* {\nrate_limit /apis 5/s\n" + proxy + "}", "", ""},
		{"handle_path, around", "", "rate_limit /api/login 5/s\nhandle_path /api/* {\n" + proxy + "}", "", ""},
		{"strip_prefix", "", "uri strip_prefix /api\nrate_limit /api/login 5/s\n" + proxy, "No request for its path /api/login matches it", "Write /login*."},
		{"strip_prefix for its path", "", "uri /api/* strip_prefix /api\nrate_limit /api/login 5/s\n" + proxy, "No request for its path /api/login matches it", "Write /login*."},
		{"strip_prefix for some", "", "@post method POST\nuri @post strip_prefix /api\nrate_limit /api/login 5/s\n" + proxy, "", ""},
		{"strip_prefix and another rewrite", "", "route {\nuri strip_prefix /api\nrewrite * /api{uri}\nrate_limit /api/login 5/s\n" + proxy + "}", "", ""},
		{"rewrite of its path", "", "rewrite /old /new\nrate_limit /old 5/s\n" + proxy, "No request for its path /old matches it: rewrite before it has rewritten the path to /new.", after + "rewrite,"},
		{"rewrite to its path", "", "rewrite /old /new\nrate_limit /new 5/s\n" + proxy, "", ""},
		{"rewrite of another path", "", "rewrite /old /new\nrate_limit /login 5/s\n" + proxy, "", ""},
		{"rewrite of some", "", "@post {\npath /old\nmethod POST\n}\nrewrite @post /new\nrate_limit /old 5/s\n" + proxy, "", ""},
		{"rewrite of all", "", "rewrite * /app{uri}\nrate_limit /login 5/s\n" + proxy, "No request for its path /login matches it: rewrite before it has rewritten the path to /app.", after},
		{"rewrite of all, by its end", "", "rewrite * /app{uri}\n" + limit("match path *login") + proxy, "", ""},
		{"rewrite of the query", "", "rewrite * ?a=b\nrate_limit /login 5/s\n" + proxy, "", ""},
		{"rewrite behind", "", "route {\nrate_limit /old 5/s\nrewrite /old /new\n" + proxy + "}", "", ""},
		{"try_files", "", "try_files {path} /index.html\nrate_limit /login 5/s\nfile_server", "No request for its path /login matches it: try_files before it has rewritten the path to /index.html.", after + "try_files,"},
		{"try_files, a file", "", "try_files {path} /index.php\nrate_limit /login.php 5/s\nfile_server", "", ""},
		{"try_files, a directory", "", "try_files {path} /index.html\nrate_limit /static/* 5/s\nfile_server", "", ""},
		{"try_files without a last one", "", "try_files {path} {path}.html\nrate_limit /login 5/s\n" + proxy, "", ""},

		{"header that is set behind", "", "@bots header_regexp User-Agent bot\nrequest_header @bots X-Bot 1\n" + limit("match header X-Bot 1") + proxy,
			"Its matcher has {http.request.header.X-Bot}, which request_header sets after this limit, so here it has the client's value.", ofRoute + "request_header first"},
		{"header that is set behind, of the directive", "", "@bots header_regexp User-Agent bot\nrequest_header @bots X-Bot 1\n@x header_regexp X-Bot .\nrate_limit @x 5/s\n" + proxy,
			"Its matcher has {http.request.header.X-Bot}, which request_header", ofRoute},
		{"header that is set before", "", "route {\n@bots header_regexp User-Agent bot\nrequest_header @bots X-Bot 1\n" + limit("match header X-Bot 1") + proxy + "}", "", ""},
		{"header for an upstream", "", "request_header X-Api-Key secret\n" + limit("match header X-Api-Key *") + proxy, "", ""},
		{"header that must not be there", "", "@bots header_regexp User-Agent bot\nrequest_header @bots X-Bot 1\n" + limit("match not header X-Bot *") + proxy, "", ""},
		{"another header", "", "@bots header_regexp User-Agent bot\nrequest_header @bots X-Bot 1\n" + limit("match header X-Other 1") + proxy, "", ""},
		{"variable that is set behind", "order rate_limit first", "vars /a sensitive yes\n" + limit("match vars sensitive yes") + proxy,
			"Its matcher has {http.vars.sensitive}, which vars sets after this limit, so here it is empty.", ofRoute + "vars first."},
		{"variable that is set before", "", "vars /a sensitive yes\n" + limit("match vars sensitive yes") + proxy, "", ""},
		{"expression", "order rate_limit first", "map {host} {plan} {\ndefault free\n}\n" + limit("match expression `{plan} == \"free\"`") + proxy,
			"Its matcher has {plan}, which map sets after this limit", ofRoute + "map first."},
		{"size that is set behind", "order rate_limit first", "map {host} {plan} {\ndefault 3\n}\nrate_limit a {\nsize {plan}\n}\n" + proxy,
			"Its size has {plan}, which map sets after this limit, so here it is empty, and requests get an error.", ofRoute + "map first."},
		{"cost that is set behind", "order rate_limit first", "vars cost 3\n" + limit("cost {vars.cost}") + proxy,
			"Its cost has {http.vars.cost}, which vars sets after this limit, so here it is empty, and", ofRoute + "vars first."},
		{"size that is set before", "", "map {host} {plan} {\ndefault 3\n}\nrate_limit a {\nsize {plan}\n}\n" + proxy, "", ""},

		{"path without a slash", "", limit("match path search*") + proxy, "Its matcher has the path search*, which no request has: all paths begin with a slash.", "Write /search*."},
		{"one path without a slash", "", limit("match path /login admin") + proxy, "Its matcher has the path admin, which", "Write /admin*."},
		{"path without a slash, of the directive", "", "@s path search\nrate_limit @s 5/s\n" + proxy, "Its matcher has the path search, which", "Write /search*."},
		{"path without a slash, excepted", "", limit("match not path health") + proxy, "Its matcher has the path health, which", "Write /health*."},
		{"path with a query", "", limit("match path /index.php?page=login") + proxy, "Its matcher has the path /index.php?page=login, which no request has: a path ends before the question mark.", "Write path /index.php*, and query page=login in addition."},
		{"path by its end", "", limit("match path *.php") + proxy, "", ""},
		{"path by a pattern", "", limit("match path /a?c [/]a %2Fa {vars.a}") + proxy, "", ""},
		{"host with a port", "", limit("match host a.com:8080") + proxy, "Its matcher has the host a.com:8080, which no request has: a host has no scheme, port or path.", "Write a.com."},
		{"host with a scheme", "", limit("match host b.com https://a.com/") + proxy, "Its matcher has the host https://a.com/, which", "Write a.com."},
		{"host in brackets", "", limit("match host [::1]") + proxy, "Its matcher has the host [::1], which", "Write ::1."},
		{"other hosts", "", limit("match host a.com *.b.com ::1 192.0.2.1 {env.HOST}:80") + proxy, "", ""},

		{"paths in quotes", "", limit(`match path "/a* /b*"`) + proxy, "Its matcher has the path /a* /b*, which no request has: it is several paths.", "Write path /a* /b*."},
		{"paths with a comma", "", "rate_limit /a*,/b* 10/s\n" + proxy, "Its matcher has the path /a*,/b*, which no request has: it is several paths.", "Write path /a* /b*."},
		{"paths with commas and spaces", "", "@a path /a*, /b*\nrate_limit @a 5/s\n" + proxy, "Its matcher has the path /a*,, which no request has: paths are separated only by spaces.", "Write /a*."},
		{"path that is a regular expression", "", "@a path ^/api/.*\nrate_limit @a 5/s\n" + proxy, "Its matcher has the path ^/api/.*, which no request has: it is a regular expression.", "Write path_regexp ^/api/.*, or"},
		{"path by an extension", "", "@a path .php\nrate_limit @a 5/s\n" + proxy, "Its matcher has the path .php, which", "Write *.php."},
		{"paths with bars", "", limit("match path /a*|/b*") + proxy, "Its matcher has the path /a*|/b*, which", "Write path /a* /b*."},
		{"path with a space in it", "", limit(`match path "/My Documents/*" "/a, b.pdf"`) + proxy, "", ""},
		{"path of another server", "", limit("match path /users/{id}") + proxy, "Its matcher has the path /users/{id}, in which {id} is a placeholder that nothing sets", "Write /users/*."},
		{"path of another server, of the directive", "", "rate_limit /users/{id}/* 10/s\n" + proxy, "Its matcher has the path /users/{id}/*, in which {id}", "Write /users/*/*."},
		{"path of a framework", "", limit("match path /users/:id/posts") + proxy, "Its matcher has the path /users/:id/posts, which no request has: Caddy's paths have no variables.", "Write path /users/*/posts."},
		{"path with a colon", "", limit("match path /a:b/* /v1/x:verify") + proxy, "", ""},
		{"path by map", "", "map {host} {id} {\ndefault 1\n}\n" + limit("match path /users/{id}*") + proxy, "", ""},
		{"path by a variable", "", limit("match path /users/{vars.id}* /{http.vars.a}* /{env.A}*") + proxy, "", ""},
		{"path that is an expression in a path", "", limit("match path /api/v[0-9]+/.*") + proxy, "Its matcher has the path /api/v[0-9]+/.*, which", "Write path_regexp"},
		{"path with a host", "", "@a path https://example.com/api/*\nrate_limit @a 5/s\n" + proxy, "Its matcher has the path https://example.com/api/*, which", "Write path /api/*, and host example.com in addition."},
		{"methods with a comma", "", limit("match method GET,POST") + proxy, "Its matcher has the method GET,POST, which no request has: a method is one word.", "Write method GET POST."},
		{"methods with a bar", "", limit("match method GET|POST") + proxy, "Its matcher has the method GET|POST, which", "Write method GET POST."},
		{"methods that are excepted", "", limit("match not method GET,HEAD") + proxy, "Its matcher has the method GET,HEAD, which", "Write method GET HEAD."},
		{"methods", "", limit("match method get POST PROPFIND M-SEARCH VERSION-CONTROL OWN") + proxy, "", ""},
		{"matchers in one line, a method first", "", "@login method POST path /login\nrate_limit @login 5/m\n" + proxy, "Its matcher has the method POST PATH /LOGIN, which no request has: in one line, all words after method", "Write a block with a line for each: method POST; path /login."},
		{"matchers in one line, a path first", "", "@login path /login method POST\nrate_limit @login 5/m\n" + proxy, "Its matcher has the path /login method post, which", "Write a block with a line for each: path /login; method POST."},
		{"matchers in one line, a host first", "", "@login host 127.0.0.1 path /login\nrate_limit @login 5/m\n" + proxy, "Its matcher has the host 127.0.0.1 path /login, which", "Write a block"},
		{"matchers in a block", "", "@login {\nmethod POST\npath /login*\n}\nrate_limit @login 5/m\n" + proxy, "", ""},
		{"field with a colon", "", limit("match header X-Plan: free") + proxy, "Its matcher has the header X-Plan:, which no request has: it is not a field name.", "Write header X-Plan."},
		{"field with a colon, by an expression", "", limit("match header_regexp X-Plan: free") + proxy, "Its matcher has the header_regexp X-Plan:, which", "Write header_regexp X-Plan."},
		{"field that must not be there, with a colon", "", limit("match not header X-Plan: *") + proxy, "Its matcher has the header X-Plan:, which", "Write header X-Plan."},
		{"field", "", limit("match header X-Plan free\nkey {header.x_y}") + proxy, "", ""},
		{"parameters in one", "", limit("match query a=b&c=d") + proxy, "Its matcher has the query a=b&c=d, which no request has: each value is one parameter.", "Write query a=b c=d"},
		{"parameters", "", limit("match query a=b c=d e=*") + proxy, "", ""},
		{"protocol", "", limit("match protocol http2") + proxy, "Its matcher has the protocol http2, which no request has: Caddy's matcher does not know that word.", "Write one of http,"},
		{"hosts with a comma", "", limit("match host a.com,b.com") + proxy, "Its matcher has the host a.com,b.com, which no request has: a host is one word.", "Write host a.com b.com."},
		{"host of another site", "", limit("match host b.com") + proxy, "Its matcher has the host b.com, which no request has: its site has a different host.", "Put the limit into the site with that host,"},
		{"host of another site, of the directive", "", "@b host b.com\nrate_limit @b 5/s\n" + proxy, "Its matcher has the host b.com, which", "Put the limit"},
		{"host of another site, excepted", "", limit("match not host b.com") + proxy, "", ""},
		{"host of the site and of another", "", limit("match host b.com 127.0.0.1") + proxy, "", ""},
		{"host of another site, around", "", "@b host b.com\nhandle @b {\nrate_limit 5/s\n" + proxy + "}", "Its matcher has the host b.com, which", "Put the limit"},
		{"methods with a comma, around", "", "@b method GET,POST\nhandle @b {\nrate_limit 5/s\n" + proxy + "}", "Its matcher has the method GET,POST, which", "Write method GET POST."},
		{"host by a pattern", "", limit("match host *.*.*.1") + proxy, "", ""},
		{"method as a name", "", "rate_limit POST 10/s\n" + proxy, "POST is only its name, so it applies to all requests that get here.", "Write match method POST in its block, and give it another name."},
		{"host as a name", "", "rate_limit api.example.com 10/s\n" + proxy, "api.example.com is only its name", "Write match host api.example.com in its block"},
		{"path as a name", "", "rate_limit wp-login.php 10/s\n" + proxy, "wp-login.php is only its name", "Write match path */wp-login.php"},
		{"host of the site as a name", "", "rate_limit 127.0.0.1 10/s\n" + proxy, "", ""},
		{"method as a name of what matches it", "", "rate_limit POST {\nsize 5\nmatch method POST\n}\n" + proxy, "", ""},
		{"method as a name of a path", "", "rate_limit /a* POST 5/s\n" + proxy, "", ""},
		{"names with dots", "", "rate_limit api.v1 {\nsize 5\nlimit post {\nsize 3\n}\n}\n" + proxy, "", ""},

		{"field of responses with a colon", "", limit("count header X-Login: failed") + proxy, "It counts responses with the field X-Login:, which no response has: it is not a field name.", "Write count header X-Login."},
		{"field of responses that the proxy removes", "", limit("count header X-Login failed") + "reverse_proxy 127.0.0.1:1 {\nheader_down -X-Login\n}", "It counts responses with the field X-Login, which reverse_proxy removes before they get here.", "Remove the field with the directive header, before the limit, as in header -X-Login."},
		{"fields that the proxy removes", "", limit("count header X-Login failed") + "reverse_proxy 127.0.0.1:1 {\nheader_down -x-*\n}", "It counts responses with the field X-Login, which reverse_proxy", "Remove"},
		{"field that is removed behind", "", "route {\n" + limit("count header X-Login failed") + "header -X-Login\n" + proxy + "}", "It counts responses with the field X-Login, which header removes", "Remove"},
		{"field that is removed for some", "", "route {\n" + limit("count header X-Login failed") + "header /a -X-Login\n" + proxy + "}", "", ""},
		{"field that is removed before", "", "header -X-Login\n" + limit("count header X-Login failed") + proxy, "", ""},
		{"field that must not be there, and the proxy removes", "", limit("count header !X-Login") + "reverse_proxy 127.0.0.1:1 {\nheader_down -X-Login\n}", "", ""},
		{"field that one of two proxies removes", "", limit("count header X-Login failed") + "reverse_proxy /a 127.0.0.1:1 {\nheader_down -X-Login\n}\n" + proxy, "", ""},
		{"another field that the proxy removes", "", limit("count header X-Login failed") + "reverse_proxy 127.0.0.1:1 {\nheader_down -X-Log\n}", "", ""},
		{"cost by a placeholder that Caddy lacks", "", limit("actual_cost {http.response.headers.X-Cost}") + proxy, "Its actual_cost has {http.response.headers.X-Cost}, which is not one of Caddy's placeholders", "Use {http.response.header.X-Cost}."},
		{"cost by a field with a colon", "", limit("actual_cost {http.response.header.X-Cost:}") + proxy, "Its actual_cost has {http.response.header.X-Cost:}, which", "Use {http.response.header.X-Cost}."},
		{"cost by what the proxy lacks", "", limit("actual_cost {http.reverse_proxy.headers.X-Cost}") + proxy, "Its actual_cost has {http.reverse_proxy.headers.X-Cost}, which", "Use"},
		{"cost by what nothing sets", "", limit("actual_cost {cost}") + proxy, "Its actual_cost has {cost}, which neither Caddy nor a map sets", "Set it with map"},
		{"cost by a field", "", limit("actual_cost {http.response.header.X-Cost}") + proxy, "", ""},
		{"cost by what the proxy sets", "", limit("actual_cost {http.reverse_proxy.header.X-Cost}") + proxy, "", ""},
		{"cost by map behind", "", limit("actual_cost {weight}") + "map {http.reverse_proxy.status_code} {weight} {\n404 5\ndefault 1\n}\n" + proxy, "", ""},

		{"401 behind authentication", "order rate_limit before reverse_proxy", limit(counts) + basicAuth + proxy,
			"It counts the status 401, and the basic_auth directive before it answers wrong passwords, so they do not count.", putIt},
		{"401 behind authentication, of a user", "", "route {\n" + basicAuth + limit(counts+"\nkey {http.auth.user.id}") + proxy + "}",
			"It counts the status 401, and its key has {http.auth.user.id}, which is empty in every failed login, whatever the order", "Use {client_ip}, or {http.rate_limit.basic_user} for the unverified name, and put the limit before the authentication."},
		{"401 before authentication, of a user", "", limit(counts+"\nkey {http.auth.user.id}") + basicAuth + proxy,
			"It counts the status 401, and its key has {http.auth.user.id}, which is empty", "Use {client_ip}, or {http.rate_limit.basic_user}"},
		{"4xx before authentication, of a user", "", limit("count status 4xx\nkey {http.auth.user.id}") + basicAuth + proxy,
			"It counts the status 401, and its key has {http.auth.user.id}, which is empty", "Use {client_ip}, or {http.rate_limit.basic_user}"},
		{"4xx behind authentication, of a user", "", "route {\n" + basicAuth + limit("count status 4xx\nkey {http.auth.user.id}") + proxy + "}", "", ""},
		{"401 before authentication", "", limit(counts) + basicAuth + proxy, "", ""},
		{"401 before the old name of authentication", "", limit(counts) + strings.Replace(basicAuth, "basic_auth", "basicauth", 1) + proxy, "", ""},
		{"X-Forwarded-For of a proxy that adds to it", "servers {\ntrusted_proxies static 192.0.2.1\n}", limit("") + proxy,
			"It takes the leftmost address in X-Forwarded-For", "Set trusted_proxies_strict with trusted_proxies"},
		{"X-Forwarded-For on a socket", "servers {\ntrusted_proxies_unix\n}", limit("") + proxy, "It takes the leftmost address in X-Forwarded-For", "Set trusted_proxies_strict"},
		{"X-Forwarded-For before another field", "servers {\ntrusted_proxies static 192.0.2.1\nclient_ip_headers X-Forwarded-For X-Real-IP\n}", limit("") + proxy,
			"It takes the leftmost address in X-Forwarded-For", "Set trusted_proxies_strict"},
		{"X-Forwarded-For, strictly", "servers {\ntrusted_proxies static 192.0.2.1\ntrusted_proxies_strict\n}", limit("") + proxy, "", ""},
		{"a field that proxies replace", "servers {\ntrusted_proxies static 192.0.2.1\nclient_ip_headers CF-Connecting-IP\n}", limit("") + proxy, "", ""},
		{"a field that proxies replace, first", "servers {\ntrusted_proxies static 192.0.2.1\nclient_ip_headers X-Real-IP X-Forwarded-For\n}", limit("") + proxy, "", ""},
		{"X-Forwarded-For, and no limit by address", "servers {\ntrusted_proxies static 192.0.2.1\n}", limit("key all") + proxy, "", ""},
		{"X-Forwarded-For without proxies", "", limit("") + proxy, "", ""},

		{"zone for all before a narrow one", "", "rate_limit {\nzone all {\nkey static\nevents 100\nwindow 10s\n}\nzone one {\nkey {client_ip}\nevents 5\nwindow 1m\n}\n}\n" + proxy,
			"As zones count in order, it is also charged for requests that limit one denies", "Use accounting atomic:"},
		{"zone for all before a narrow one, atomic", "", "rate_limit {\naccounting atomic\nzone all {\nkey static\nevents 100\nwindow 10s\n}\nzone one {\nkey {client_ip}\nevents 5\nwindow 1m\n}\n}\n" + proxy, "", ""},
		{"zone for all behind a narrow one", "", "rate_limit {\nzone all {\nkey static\nevents 100\nwindow 10m\n}\nzone one {\nkey {client_ip}\nevents 50\nwindow 1m\n}\n}\n" + proxy, "", ""},
		{"zone for all before one for a path", "", "rate_limit {\nzone all {\nkey static\nevents 100\nwindow 10s\n}\nzone one {\nmatch {\npath /a*\n}\nkey {client_ip}\nevents 5\nwindow 1m\n}\n}\n" + proxy,
			"As zones count in order, it is also charged", "Use accounting atomic:"},
		{"zone for another path before a narrow one", "", "rate_limit {\nzone all {\nmatch {\npath /b*\n}\nkey static\nevents 100\nwindow 10s\n}\nzone one {\nmatch {\npath /a*\n}\nkey {client_ip}\nevents 5\nwindow 1m\n}\n}\n" + proxy, "", ""},
		{"bucket for all, each charged", "", "rate_limit {\naccounting each\nlimit one {\nrate 5/m\n}\nlimit all {\nkey all\nrate 100/10s\n}\n}\n" + proxy,
			"With accounting each, it is also charged for requests that limit one denies", "Use accounting atomic:"},
		{"bucket for all that one client may fill", "", "rate_limit {\naccounting each\nlimit one {\nrate 50/s\n}\nlimit all {\nkey all\nrate 40/s\n}\n}\n" + proxy, "", ""},
		{"bucket for all of failures", "", "rate_limit {\naccounting each\nlimit all {\nkey all\nrate 100/10s\ncount status 5xx\n}\nlimit one {\nrate 5/m\n}\n}\n" + proxy, "", ""},
		{"bucket for all that only counts", "", "rate_limit {\naccounting each\nlimit all {\nkey all\nrate 100/10s\ndry_run\n}\nlimit one {\nrate 5/m\n}\n}\n" + proxy, "", ""},
		{"bucket of a user before a narrower one", "", "rate_limit {\naccounting each\nlimit wide {\nrate 100/10s\n}\nlimit one {\nkey {client_ip}{path}\nrate 5/m\n}\n}\n" + proxy, "", ""},

		{"404 behind authentication", "", "route {\n" + basicAuth + limit("count status 404") + proxy + "}", "", ""},
		{"all behind authentication", "", "route {\n" + basicAuth + limit("") + proxy + "}", "", ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := sitetest.Config{Global: tc.global, Site: tc.site}
			if strings.Contains(tc.site, "invoke") {
				c.Sites = "&(own) {\n" + limited + "}\n&(answer) {\nrespond a\n}"
			}
			wantWarning(t, c, tc.problem, tc.remedy)
		})
	}
}

// TestCheckTrustsWhatIsReplaced guards that check does not say that clients choose what a
// handler before the limit removes or replaces, as its own remedies have it, and does where
// that lets some through.
func TestCheckTrustsWhatIsReplaced(t *testing.T) {
	const (
		auth  = "forward_auth 127.0.0.1:1 {\nuri /\ncopy_headers X-User\n}\n"
		limit = "rate_limit {header.X-User} 3/m\n"
		proxy = "reverse_proxy 127.0.0.1:1\n"
	)
	for _, tc := range []struct {
		name, global, site string
		chosen             bool
	}{
		{"forward_auth in a route", "", "route {\n" + auth + limit + proxy + "}", false},
		{"forward_auth by order", "{\norder rate_limit after forward_auth\n}\n", auth + limit + proxy, false},
		{"forward_auth before a handle", "", auth + "handle {\n" + limit + proxy + "}", false},
		{"forward_auth of another field", "", "route {\n" + strings.Replace(auth, "X-User", "X-Role", 1) + limit + proxy + "}", true},
		{"forward_auth for some", "", "route {\nroute /a* {\n" + auth + "}\n" + limit + proxy + "}", true},
		{"removed", "", "route {\nrequest_header -X-User\n" + limit + proxy + "}", false},
		{"replaced", "", "route {\nrequest_header X-User {client_ip}\n" + limit + proxy + "}", false},
		{"replaced by what clients send", "", "route {\nrequest_header X-User {header.X-Other}\n" + limit + proxy + "}", true},
		{"added", "", "route {\nrequest_header +X-User a\n" + limit + proxy + "}", true},
		{"removed for some", "", "route {\nrequest_header /a -X-User\n" + limit + proxy + "}", true},
		{"removed, then sent again", "", "route {\nrequest_header -X-User\nrequest_header X-User {query.user}\n" + limit + proxy + "}", true},
		{"as sent", "", limit + proxy, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			text, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(tc.global+"http://:8080 {\n"+tc.site+"\n}\n"), nil)
			if err != nil {
				t.Fatal(err)
			}
			found := adviceOn(t, text)
			if chosen := len(found) == 1 && strings.Contains(found[0].Problem, "which clients can set to anything"); chosen != tc.chosen || len(found) > 1 {
				t.Errorf("got %+v, want that clients choose the key: %v", found, tc.chosen)
			}
		})
	}
}
