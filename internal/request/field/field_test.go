package field

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/caddyserver/caddy/v2"
)

// ask returns the value of a field of a request in keys, and its text.
func ask(t testing.TB, r *http.Request, name string) (key, text string) {
	t.Helper()
	repl := caddy.NewEmptyReplacer()
	Register(r, repl, MaxBody)
	w, err := Parse(name)
	if err != nil {
		t.Fatal(err)
	}
	key = InKey(repl, name, w)
	text, _ = repl.GetString(Prefix + name)
	if _, err := Err(repl); err != nil {
		t.Fatal(err)
	}
	return key, text
}

func submit(kind, target, body string) *http.Request {
	r := httptest.NewRequest("POST", target, strings.NewReader(body))
	if kind != "" {
		r.Header.Set("Content-Type", kind)
	}
	return r
}

const (
	formType = "application/x-www-form-urlencoded"
	jsonType = "application/json"
	partType = "multipart/form-data; boundary=xx"
)

func part1(name, value string) string {
	return "--xx\r\nContent-Disposition: form-data; name=\"" + name + "\"\r\n\r\n" + value + "\r\n"
}

func TestFields(t *testing.T) {
	t.Parallel()
	const end = "--xx--\r\n"
	for _, c := range []struct{ kind, query, body, key, text string }{
		// forms
		{formType, "", "email=Alice%40Example.com&password=x", "aliceexamplecom", "Alice@Example.com"},
		{formType, "", "email=a&email=b", "?", ""},
		{formType, "", "email=a&email=A", "a", ""},
		{formType, "", "email=a&email=a", "a", "a"},
		{formType, "", "email=&email=a", "a", "a"},
		{formType, "", "email[]=a", "a", "a"},
		{formType, "", "email[0]=a&email[1]=b", "?", ""},
		{formType, "", "email[x]=a", "?", ""},
		{formType, "", "EMAIL=a", "a", "a"},
		{formType, "", "%65mail=a", "a", "a"},
		{formType, "", "e%6dail=a&email=b", "?", ""},
		{formType, "", "+email=a", "a", "a"},
		{formType, "", "email%00x=a", "a", "a"},
		{formType, "", "%uff45mail=a", "?", ""},
		{formType, "", "%u0065mail=a", "?", ""},
		{formType, "", "%ef%bd%85mail=a", "a", "a"},
		{formType, "", "_email=b&email=a", "a", "a"},
		{formType, "", "x=1;email=a", "a", "a"},
		{formType, "", "email=a;x=1", "?", ""},
		{formType, "", "email=a%3bx", "ax", "a;x"},
		{formType, "", "email=%zz", "?", ""},
		{formType, "", "email=%ff", "?", ""},
		{formType, "", "password=x", "", ""},
		{formType, "", "", "", ""},
		{formType, "?email=a", "password=x", "a", "a"},
		{formType, "?email=a", "email=b", "?", ""},
		{formType, "?email=a", "email=a", "a", "a"},
		{formType + "; charset=UTF-8", "", "email=a", "a", "a"},
		{formType + "; charset=utf-16", "", "email=a", "?", ""},
		{formType + "; charset=ibm037", "", "email=a", "?", ""},
		{formType + "; charset=utf-8; charset=ibm037", "", "email=a", "?", ""},
		{formType + "; charset=iso-8859-1", "", "email=a", "a", "a"},
		{formType + "; charset=iso-8859-1", "", "email=%e4", "?", ""},
		{formType, "", `{"email":"a"}`, "a", "a"},
		{formType, "", `/**/{"email":"a"}`, "?", ""},
		{formType, "", `{"email":"a","x":"&email=b&"}`, "?", ""},
		// JSON
		{jsonType, "", `{"email":"a"}`, "a", "a"},
		{jsonType, "", ` { "email" : "a" , "x" : [1,2,{"email":"b"}] } `, "a", "a"},
		{jsonType, "", `{"email":"a","email":"b"}`, "?", ""},
		{jsonType, "", `{"email":"a","Email":"b"}`, "?", ""},
		{jsonType, "", `{"\u0065mail":"a"}`, "a", "a"},
		{jsonType, "", `{"emaIl":"\u0061"}`, "a", "a"},
		{jsonType, "", `{"email":["a"]}`, "a", "a"},
		{jsonType, "", `{"email":["a","b"]}`, "?", ""},
		{jsonType, "", `{"email":{"$ne":""}}`, "?", ""},
		{jsonType, "", `{"email":null}`, "", ""},
		{jsonType, "", `{"email":null,"email":"a"}`, "a", "a"},
		{jsonType, "", `{"email":12}`, "12", "12"},
		{jsonType, "", `{"email":"012"}`, "12", "012"},
		{jsonType, "", `{"email":1.2e1}`, "?", ""},
		{jsonType, "", `{"email":true}`, "true", "true"},
		{jsonType, "", `{"email":"a","x":"&email=b&"}`, "?", ""},
		{jsonType, "", `{"email":"a","x":"&email=a&y=%u"}`, "a", "a"},
		{jsonType, "", `[{"email":"a"},{"email":"b"}]`, "?", ""},
		{jsonType, "", `{"email":"a"}{"email":"b"}`, "?", ""},
		{jsonType, "", `{'email':'a'}`, "?", ""},
		{jsonType, "", `{email:"a"}`, "?", ""},
		{jsonType, "", `{/*x*/"email":"a"}`, "?", ""},
		{jsonType, "", `{"x":"` + "\n" + `","email":"a"}`, "?", ""},
		{jsonType, "", `{"email":"a",}`, "?", ""},
		{jsonType, "", `{"email":"\ud800"}`, "?", ""},
		{jsonType, "", "\ufeff" + `{"email":"a"}`, "a", "a"},
		{jsonType, "", "{\x00\"\x00e", "?", ""},
		{jsonType, "", `email=a`, "?", ""},
		{jsonType, "", `"email"`, "?", ""},
		{jsonType, "", `{"x":{"email":"a"}}`, "", ""},
		{jsonType, "?email=b", `{"email":"a"}`, "?", ""},
		{"application/problem+json", "", `{"email":"a"}`, "a", "a"},
		{"application/json; charset=utf-16le", "", `{"email":"a"}`, "?", ""},
		{"text/plain", "", `{"email":"a"}`, "a", "a"},
		{"", "", `{"email":"a"}`, "a", "a"},
		{"", "", `{"x":"&email=b&"}`, "b", "b"},
		{partType, "", strings.ReplaceAll(part1("email", "a")+end, `name="email"`, `name='email'`), "?", ""},
		{partType, "", strings.ReplaceAll(part1("email", "a")+end, `name="email"`, `name= "email"`), "?", ""},
		{partType, "", strings.ReplaceAll(part1("email", "a")+end, `name="email"`, `name=email`), "a", "a"},
		{"", "", `email=a`, "?", ""},
		{"text/xml", "", `<email>a</email>`, "?", ""},
		{"image/png", "", "\x89PNG", "?", ""},
		// multipart
		{partType, "", part1("email", "a") + end, "a", "a"},
		{partType, "", part1("x", "b") + part1("email", "a") + end, "a", "a"},
		{partType, "", part1("email", "a") + part1("email", "b") + end, "?", ""},
		{partType, "", part1("email", "a") + part1("email[]", "b") + end, "?", ""},
		{partType, "", part1("email", "a"), "?", ""},
		{partType, "", part1("x", "a\n--xx\nb") + end, "?", ""},
		{partType, "", part1("x", "a\r\n--xxy\r\nb") + end, "?", ""},
		{partType, "", "x\r\n" + part1("email", "a") + end, "?", ""},
		{partType, "", part1("email", "a") + end + "x", "?", ""},
		{partType, "", part1("email", "a") + part1("_charset_", "utf-16") + end, "?", ""},
		{partType + "; boundary=yy", "", part1("email", "a") + end, "?", ""},
		{partType, "", strings.ReplaceAll(part1("email", "a")+end, `name="email"`, `name="email"; filename=""`), "?", ""},
		{partType, "", strings.ReplaceAll(part1("email", "a")+end, `name="email"`, `name="x"; name="email"`), "?", ""},
		{partType, "", strings.ReplaceAll(part1("email", "a")+end, `name="email"`, `name*=utf-8''email`), "?", ""},
		{partType, "", strings.ReplaceAll(part1("email", "a")+end, `name="email"`, `name="=?utf-8?Q?email?="`), "?", ""},
		{partType, "", strings.ReplaceAll(part1("email", "a")+end, "\r\n\r\n", "\r\nContent-Transfer-Encoding: base64\r\n\r\n"), "?", ""},
		{partType, "", strings.ReplaceAll(part1("email", "a")+end, "\r\n\r\n", "\r\nContent-Type: text/plain; charset=utf-7\r\n\r\n"), "?", ""},
		{partType, "", strings.ReplaceAll(part1("email", "a")+end, "\r\n", "\n"), "?", ""},
		{partType, "", part1("email", "a") + "--xx\r\nContent-Disposition: form-data; name=\"f\"; filename=\"x.png\"\r\nContent-Type: image/png\r\n\r\n\x00\x01--x\r\n" + end, "a", "a"},
		{partType, "", part1("email", "a") + part1("x", "&email=b&") + end, "?", ""},
		// values
		{formType, "", "email=+a%09", "a", "a"},
		{formType, "", "email=a%00", "?", ""},
		{formType, "", "email=v%C3%ADctim", "victim", "víctim"},
		{formType, "", "email=%EF%BD%96ictim", "victim", "ｖictim"},
		{formType, "", "email=vic%E2%80%8Btim", "victim", "vic\u200btim"},
		{formType, "", "email=vic%C2%ADtim", "victim", "vic\u00adtim"},
		{formType, "", "email=vic<b>tim", "?", ""},
		{formType, "", "email=vic%25aatim", "?", ""},
		{formType, "", "email=vic%26x;tim", "?", ""},
		{formType, "", "email=a%2Bx%40example.com", "aexamplecom", "a+x@example.com"},
		{formType, "", "email=%2B49+171-234", "49171234", "+49 171-234"},
		{formType, "", "email=0049171234", "49171234", "0049171234"},
		{formType, "", `email=CORP\a`, "?", ""},
		{formType, "", "email=%C3%9F", "ss", "ß"},
		{formType, "", "email=%D0%9A%D0%BB%D1%8E%D1%87", "ключ", "Ключ"},
		{formType, "", "email=%E2%82%AC", "?", ""},
		{formType, "", "email=" + strings.Repeat("a", 257), "?", ""},
		{formType, "", "email=" + strings.Repeat("a", 256), strings.Repeat("a", 256), strings.Repeat("a", 256)},
		{formType, "", "email=-", "?", ""},
		// size
		{formType, "", "email=a&x=" + strings.Repeat("y", MaxBody-10), "a", "a"},
		{formType, "", "email=a&x=" + strings.Repeat("y", MaxBody-9), "?", ""},
	} {
		r := submit(c.kind, "/"+c.query, c.body)
		if key, text := ask(t, r, "email"); key != c.key || text != c.text {
			t.Errorf("%s %s %.80q: got %q, %q, want %q, %q", c.kind, c.query, c.body, key, text, c.key, c.text)
		}
		if got, err := io.ReadAll(r.Body); err != nil || string(got) != c.body {
			t.Errorf("%.80q: the body became %.80q, %v", c.body, got, err)
		}
	}
}

func TestPaths(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, kind, body, key string }{
		{"user.email", formType, "user[email]=a", "a"},
		{"user.email", formType, "user.email=a", "a"},
		{"user.email", formType, "user[0][email]=a", "a"},
		{"user.email", jsonType, `{"user":{"email":"a"}}`, "a"},
		{"user.email", jsonType, `{"user":[{"email":"a"}]}`, "a"},
		{"user.email", jsonType, `{"user":{"email":"a"},"User":{"email":"b"}}`, "?"},
		{"user.email", jsonType, `{"user":{"name":"a"},"email":"b"}`, ""},
		{"user.email|email", jsonType, `{"user":{"email":"a"},"email":"b"}`, "?"},
		{"user.email|email", jsonType, `{"email":"b"}`, "b"},
		{"log|email", formType, "log=a", "a"},
		{"log|email", formType, "log=a&email=b", "?"},
		{"user_name", jsonType, `{"userName":"a"}`, "a"},
		{"user_name", formType, "user.name=a", "a"},
		{"user_name", formType, "user name=a", "a"},
		{"_token", formType, "_token=a&token=b", "a"},
		{"token", formType, "_token=a&token=b", "b"},
		{"identifier.user|user", jsonType, `{"type":"m.login.password","identifier":{"type":"m.id.user","user":"@a:example.com"},"password":"x"}`, "aexamplecom"},
	} {
		if key, _ := ask(t, submit(c.kind, "/", c.body), c.name); key != c.key {
			t.Errorf("%s in %s: got %q, want %q", c.name, c.body, key, c.key)
		}
	}
	for _, name := range []string{"", "a|", ".a", "a..b", "a[b]", "a.1", "a b=", "%", `a"`, strings.Repeat("a", 129)} {
		if _, err := Parse(name); err == nil {
			t.Errorf("%q: want an error", name)
		}
	}
}

// Guards that a body is passed on as it came, however its reader reads it.
func TestBodyIsPassedOn(t *testing.T) {
	t.Parallel()
	for _, size := range []int{1, 200, firstRead - 1, firstRead, firstRead + 1, MaxBody - 1, MaxBody, MaxBody + 1, 5 << 20} {
		for _, known := range []bool{true, false} {
			for name, wrap := range map[string]func(io.Reader) io.Reader{"whole": nil, "half": iotest.HalfReader, "data with error": iotest.DataErrReader} {
				t.Run(fmt.Sprint(size, known, name), func(t *testing.T) {
					body := strings.Repeat("0123456789abcdef", size/16+1)[:size]
					var in io.Reader = strings.NewReader(body)
					if wrap != nil {
						in = wrap(in)
					}
					r := httptest.NewRequest("POST", "/", in)
					r.Header.Set("Content-Type", formType)
					if r.ContentLength = -1; known {
						r.ContentLength = int64(size)
					}
					key, _ := ask(t, r, "email")
					if want := map[bool]string{true: "?", false: ""}[size > MaxBody || size == MaxBody && !known]; key != want && size != MaxBody {
						t.Errorf("got %q, want %q", key, want)
					}
					got, err := io.ReadAll(r.Body)
					if err != nil || string(got) != body {
						t.Errorf("got %d bytes, %v", len(got), err)
					}
				})
			}
		}
	}
}

func FuzzFields(f *testing.F) {
	f.Add(formType, "email=a&email=b")
	f.Add(jsonType, `{"email":"a"}`)
	f.Add(partType, part1("email", "a")+"--xx--")
	f.Fuzz(func(t *testing.T, kind, body string) {
		r := httptest.NewRequest("POST", "/", strings.NewReader(body))
		r.Header["Content-Type"] = []string{kind}
		key, text := ask(t, r, "email")
		if Canonical(key) != key && key != "" {
			t.Errorf("key %q is not canonical: %q", key, Canonical(key))
		}
		if text != "" && Canonical(text) != key {
			t.Errorf("text %q, key %q", text, key)
		}
		if got, _ := io.ReadAll(r.Body); string(got) != body {
			t.Errorf("body changed")
		}
	})
}
