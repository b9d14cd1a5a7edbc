package ratelimit

import (
	"fmt"
	"testing"
)

// TestLevelsSurviveSizeChange guards that what a bucket of a named limit holds
// stays when a reload changes its size, by whatever option, and that it is then
// held against the new size.
func TestLevelsSurviveSizeChange(t *testing.T) {
	redis := redisGlobal(startUsed(t).Addr, slowly)
	for name, global := range map[string]string{"memory": "", "redis": redis} {
		t.Run(name, func(t *testing.T) {
			site := func(numbers string) config {
				return config{global: global, site: "vars size 4\nrate_limit api {\nkey all\n" + numbers + "\n}\nrespond admitted"}
			}
			s := startConfig(t, site("size 2\ndrip_rate 1h"))
			for _, st := range []struct{ numbers, want string }{
				{"size 2\ndrip_rate 1h", "200 2 1"},
				{"size 2\ndrip_rate 1h", "200 2 0"},
				{"size 2\ndrip_rate 1h", "429 2 0"},
				{"size 3\ndrip_rate 1h", "200 3 0"},
				{"size 1\ndrip_rate 1h", "429 1 0"},
				{"size 8\nfactor 2\ndrip_rate 1h", "200 4 0"},
				{"size {vars.size}\ndrip_rate 1h", "429 4 0"},
				{"max 6\nduration 6h", "200 6 1"},
				{"size 2\ndrip_rate 2h", "200 2 1"}, // which is another bucket
				{"size 2\ndrip_rate 1h\ndrip_size 2", "200 2 1"},
			} {
				if err := s.load(site(st.numbers)); err != nil {
					t.Fatal(err)
				}
				a := s.get("/")
				got := fmt.Sprint(a.StatusCode, " ", a.Header.Get("X-RateLimit-Limit"), " ", a.Header.Get("X-RateLimit-Remaining"))
				if got != st.want {
					t.Errorf("with %q: %s, want %s", st.numbers, got, st.want)
				}
			}
		})
	}
}

// TestUnnamedLimitsOfOtherSizesAreApart guards that limits without a name on
// several sites, which have their key and drips in common but not the size, do not
// fill each other's buckets; and that those of the same size in force share one.
func TestUnnamedLimitsOfOtherSizesAreApart(t *testing.T) {
	t.Setenv("RATELIMIT_TEST_SIZE", "3")
	for _, key := range []string{"{client_ip}", "all"} {
		for _, tc := range []struct {
			first, second string // their sizes
			shared        bool
		}{
			{"size 3", "size 4", false},
			{"size 3", "size 3\nfactor 3", false},
			{"size 3", "size {vars.three}", false},
			{"size {vars.three}", "size {vars.four}", false},
			{"size {vars.three}", "size {vars.three}\nfactor 2", false},
			{"size 3", "size 3", true},
			{"size 3", "size 6\nfactor 2", true},
			{"size 3", "max 3\nduration 3s", true},
			{"size 3", "size {env.RATELIMIT_TEST_SIZE}", true},
			{"size {vars.three}", "size {vars.three}", true},
		} {
			t.Run(fmt.Sprintf("%s,%q,%q", key, tc.first, tc.second), func(t *testing.T) {
				site := func(size string) string {
					return "vars three 3\nvars four 4\nrate_limit {\nkey " + key + "\n" + size + "\n}\nrespond admitted"
				}
				s := startConfig(t, config{site: site(tc.first), sites: "http://other.test:{port} {\n" + site(tc.second) + "\n}"})
				for range 3 {
					if a := s.get("/"); a.StatusCode != 200 {
						t.Fatal(a)
					}
				}
				want := 200
				if tc.shared {
					want = 429
				}
				if a := s.get("/", "Host: other.test"); a.StatusCode != want {
					t.Errorf("the other site answers %d, want %d", a.StatusCode, want)
				}
			})
		}
	}
}
