package operation

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/testing/redistest"
)

// compose is what the tests need of compose.yml. test/manifests loads it as Docker does.
type compose struct {
	Services map[string]struct {
		Command     string
		Deploy      struct{ Replicas int }
		Networks    networks
		Healthcheck struct{ Test []string }
	}
}

// networks are the addresses of a service, by network.
type networks map[string]struct {
	Address string `yaml:"ipv4_address"`
}

// UnmarshalYAML implements yaml.Unmarshaler: a list has names only.
func (n *networks) UnmarshalYAML(node *yaml.Node) error {
	if node.Kind == yaml.SequenceNode {
		return nil
	}
	return node.Decode((*map[string]struct {
		Address string `yaml:"ipv4_address"`
	})(n))
}

// readCompose returns compose.yml.
func readCompose(t testing.TB) (c compose) {
	t.Helper()
	if err := yaml.Unmarshal([]byte(read(t, deploy, "docker/compose.yml")), &c); err != nil {
		t.Fatal(err)
	}
	return c
}

// TestDeployedCaddyfiles guards that Caddy accepts the Caddyfiles as they are.
func TestDeployedCaddyfiles(t *testing.T) {
	validate(t, read(t, deploy, "docker/Caddyfile"))
	validate(t, read(t, deploy, "docker/balancer.Caddyfile"))
	validate(t, readManifests(t, "caddy.yaml")["ConfigMap/caddy"].Data["Caddyfile"])
}

// TestComposedSite guards the Caddyfiles and the Redis of compose.yml: three nodes
// that share one limit for each client, whatever node the load balancer chooses and
// whatever address a client claims to have. The health checks pass.
func TestComposedSite(t *testing.T) {
	c := readCompose(t)
	command := replace(t, c.Services["redis"].Command, "${REDIS_PASSWORD:?set it to a random text}", "PASSWORD")
	args := expand(strings.Fields(command)[1:], "PASSWORD", redisPassword)
	redis := redistest.Start(t, expand(args, `"`, "")...)

	const trusted = "trusted_proxies static "
	address := c.Services["balancer"].Networks["front"].Address
	nodes := make([]*node, c.Services["caddy"].Deploy.Replicas)
	var sites []string
	for i := range nodes {
		nodes[i] = startNode(t, func(n *node) string {
			// A busy machine may take longer than the default timeout.
			return replace(t, read(t, deploy, "docker/Caddyfile"),
				trusted+address+"\n", trusted+"127.0.0.1\n", "redis:6379", redis.Addr, "password {", "timeout 1s\npassword {",
				"http://:8080", "http://"+n.site, "http://:9180", "http://"+n.metrics)
		})
		sites = append(sites, nodes[i].site)
	}
	balancer := startNode(t, func(n *node) string {
		file := regexp.MustCompile(`dynamic a caddy 8080 \{[^}]*\}`).
			ReplaceAllLiteralString(read(t, deploy, "docker/balancer.Caddyfile"), "to "+strings.Join(sites, " "))
		return replace(t, file, "http://:8080", "http://"+n.site, "http://:9180", "http://"+n.metrics, sites[0], sites[0])
	})

	asked := func(service string, n *node) string {
		test := c.Services[service].Healthcheck.Test
		return replace(t, test[len(test)-1], "http://127.0.0.1:9180/", "http://"+n.metrics+"/")
	}
	for _, n := range nodes {
		if status, body := fetch(t, asked("caddy", n)); status != http.StatusOK || body != "ok" {
			t.Errorf("health: %d %s", status, body)
		}
		n.waitForRedis()
	}
	if status, body := fetch(t, asked("balancer", balancer)); status != http.StatusOK || body != "ok" {
		t.Errorf("health of the balancer: %d %s", status, body)
	}
	for password, healthy := range map[string]bool{redisPassword: true, "another": false} {
		_, port, _ := net.SplitHostPort(redis.Addr)
		check := exec.Command("sh", "-c",
			replace(t, c.Services["redis"].Healthcheck.Test[1], "redis-cli ", program(t, "redis-cli")+" -p "+port+" "))
		check.Env = append(os.Environ(), "REDISCLI_AUTH="+password)
		if output, err := check.CombinedOutput(); (err == nil) != healthy {
			t.Errorf("health of Redis by password %q: %v\n%s", password, err, output)
		}
	}
	admitted := 0
	for i := range 5 {
		if status := balancer.get("/login", "X-Forwarded-For", fmt.Sprint("198.51.100.", i)); status != http.StatusOK {
			t.Errorf("GET /login has status %d", status)
		}
	}
	for i := range 20 {
		res := post(t, "http://"+balancer.site+"/login", fmt.Sprint("203.0.113.", i))
		if res == http.StatusOK {
			admitted++
		}
	}
	if admitted != 5 {
		t.Errorf("admitted %d log-ins of one client, want 5", admitted)
	}

	// From another private address than the balancer's, nothing is believed.
	admitted = 0
	for i := range 20 {
		if postFrom(t, "127.0.0.2", "http://"+sites[0]+"/login", fmt.Sprint("203.0.113.", i)) == http.StatusOK {
			admitted++
		}
	}
	if admitted != 5 {
		t.Errorf("admitted %d log-ins of one neighbour, want 5", admitted)
	}
}

// post sends an empty POST with a forged address, and returns the status of the
// response.
func post(t testing.TB, url, claimed string) int {
	t.Helper()
	return postFrom(t, "127.0.0.1", url, claimed)
}

// postFrom is post from one of this host's addresses.
func postFrom(t testing.TB, from, url, claimed string) int {
	t.Helper()
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	client := http.Client{Transport: &http.Transport{DialContext: dialer.DialContext, DisableKeepAlives: true}}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-Forwarded-For", claimed)
	res, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, res.Body)
	_ = res.Body.Close()
	return res.StatusCode
}

// replace replaces texts in a file by others, and fails the test if one of them is
// not there.
func replace(t testing.TB, text string, pairs ...string) string {
	t.Helper()
	for i := 0; i < len(pairs); i += 2 {
		if !strings.Contains(text, pairs[i]) {
			t.Fatalf("no %q in\n%s", pairs[i], text)
		}
		text = strings.ReplaceAll(text, pairs[i], pairs[i+1])
	}
	return text
}

// TestUnit guards that systemd accepts the unit and finds it little exposed, that the
// password of its comment is read from where systemd puts it, and that Caddy starts
// without the file of the password, for which SetCredential has a default. What the README
// has users prepare is what the unit needs.
func TestUnit(t *testing.T) {
	systemd := program(t, "systemd-analyze")
	unit := read(t, deploy, "systemd/caddy.service")
	// The binary that it names is not installed here. Most mistakes are warnings.
	warnings := run(t, ".", systemd, "verify", "--man=no",
		write(t, "caddy.service", replace(t, unit, "/usr/local/bin/caddy", program(t, "true"))))
	if strings.Contains(warnings, "caddy.service:") {
		t.Error(warnings)
	}
	// The threshold is ten times the level of exposure; exceeding it is an error.
	exposure := run(t, ".", systemd, "security", "--offline=true", "--no-pager", "--threshold=29",
		filepath.Join(deploy, "systemd/caddy.service"))
	t.Log(strings.TrimSpace(exposure[max(strings.LastIndex(exposure, "Overall"), 0):]))

	name := regexp.MustCompile(`LoadCredential=(\w+):`).FindStringSubmatch(unit)
	if name == nil || !strings.Contains(unit, "password {file./run/credentials/caddy.service/"+name[1]+"}") {
		t.Errorf("the comment does not read credential %q", name)
	}
	if name != nil && !regexp.MustCompile(`(?m)^SetCredential=`+name[1]+`:.`).MatchString(unit) {
		t.Error("without a file of the password Caddy does not start")
	}
	value := func(of string) string {
		m := regexp.MustCompile(regexp.QuoteMeta(of) + `(\S+)`).FindStringSubmatch(unit)
		if m == nil {
			t.Fatalf("the unit has no %s", of)
		}
		return m[1]
	}
	steps, home := read(t, deploy, "README.md"), "/var/lib/"+value("StateDirectory=")
	for _, step := range []string{
		"install -m 755 caddy " + value("ExecStart=") + "\n",
		"groupadd --system " + value("Group=") + "\n",
		"--home-dir " + home + " ",
		"\"Caddy web server\" " + value("User=") + "\n",
		"Caddyfile " + value("--config ") + "\n",
		"install -m 600 /dev/stdin " + value("LoadCredential=redis_password:") + " ",
	} {
		if !strings.Contains(steps, step) {
			t.Errorf("the README does not have %q", step)
		}
	}
	if got := value("XDG_DATA_HOME="); got != home+"/.local/share" {
		t.Errorf("certificates are kept in %s, where Caddy's own packages do not have them", got)
	}
	if strings.Contains(unit, "--environ") {
		t.Error("the environment, which may have secrets, is written to the log")
	}
}

// manifest is what the tests need of a Kubernetes object. test/manifests decodes all of
// it as the API server does.
type manifest struct {
	Kind     string
	Metadata struct{ Name string }
	Data     map[string]string
	Spec     struct {
		Replicas int
		Template struct {
			Spec struct {
				Containers []struct {
					Args, Command  []string
					ReadinessProbe struct {
						HTTPGet struct{ Path string } `yaml:"httpGet"`
					} `yaml:"readinessProbe"`
				}
			}
		}
	}
}

// readManifests returns the objects in a file, by kind and name.
func readManifests(t testing.TB, name string) map[string]manifest {
	t.Helper()
	objects := make(map[string]manifest)
	decoder := yaml.NewDecoder(strings.NewReader(read(t, deploy, "kubernetes", name)))
	for {
		var m manifest
		err := decoder.Decode(&m)
		if errors.Is(err, io.EOF) {
			return objects
		}
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		objects[m.Kind+"/"+m.Metadata.Name] = m
	}
}

// TestKubernetesSite guards the Caddyfile and both ways to have a Redis in
// Kubernetes: with the options of the manifests, Redis decides. The job of the
// cluster runs as it is, on servers of this host, twice.
func TestKubernetesSite(t *testing.T) {
	caddy := readManifests(t, "caddy.yaml")
	file := caddy["ConfigMap/caddy"].Data["Caddyfile"]
	decides := func(t *testing.T, file, redis string) {
		n := startNode(t, func(n *node) string {
			return replace(t, file,
				"redis:6379", redis, "http://:8080", "http://"+n.site, "http://:9180", "http://"+n.metrics)
		})
		n.waitForRedis()
		probed := caddy["Deployment/caddy"].Spec.Template.Spec.Containers[0].ReadinessProbe.HTTPGet.Path
		if status, _ := fetch(t, "http://"+n.metrics+probed); status != http.StatusOK {
			t.Errorf("the probe has status %d", status)
		}
	}
	t.Run("single", func(t *testing.T) {
		args := readManifests(t, "redis.yaml")["Deployment/redis"].Spec.Template.Spec.Containers[0].Args[1:]
		args = expand(args, "$(REDIS_PASSWORD)", redisPassword)
		decides(t, file, redistest.Start(t, args...).Addr)
	})
	t.Run("cluster", func(t *testing.T) {
		cli := program(t, "redis-cli")
		objects := readManifests(t, "redis-cluster.yaml")
		set := objects["StatefulSet/redis"]
		nodes := clusterServers(t, set.Spec.Replicas,
			set.Spec.Template.Spec.Containers[0].Args)
		command := objects["Job/redis-cluster"].Spec.Template.Spec.Containers[0].Command
		for _, want := range []string{"[OK] All 16384 slots covered", "there is a cluster already"} {
			redistest.WaitFor(t, patience, func() error {
				output, err := nodes.create(t, cli, command)
				if err == nil && !strings.Contains(output, want) {
					err = errors.New("not " + want)
				}
				if err != nil {
					err = fmt.Errorf("%w\n%s", err, output)
				}
				return err
			})
		}
		cluster := replace(t, file, "# With redis-cluster.yaml, also: cluster", "cluster")
		decides(t, cluster, nodes.addr(0))
	})
}

// expand replaces a text in arguments.
func expand(args []string, old, by string) []string {
	args = slices.Clone(args)
	for i := range args {
		args[i] = strings.ReplaceAll(args[i], old, by)
	}
	return args
}

// clusterNodes are servers that listen at one port of several addresses, as those
// of a StatefulSet do.
type clusterNodes struct{ port string }

// clusterServers starts servers with the arguments of the StatefulSet.
func clusterServers(t testing.TB, count int, args []string) clusterNodes {
	t.Helper()
	_, port, _ := strings.Cut(redistest.FreeAddr(t), ":")
	c := clusterNodes{port}
	for i := range count {
		dir := t.TempDir()
		own := expand(args, "$(REDIS_PASSWORD)", redisPassword)
		own = expand(expand(own, "$(POD_IP)", c.host(i)), "/data/", dir+"/")

		cmd := exec.Command(program(t, own[0]), append(own[1:], "--bind", c.host(i), "--port", port, "--dir", dir)...)
		exited, err := redistest.Run(cmd)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = cmd.Process.Kill()
			<-exited
		})
	}
	return c
}

func (clusterNodes) host(i int) string   { return fmt.Sprint("127.0.0.", 2+i) }
func (c clusterNodes) addr(i int) string { return c.host(i) + ":" + c.port }

// create runs the command of the job, for which the names of pods resolve to the
// servers' addresses, and returns what it prints.
func (c clusterNodes) create(t testing.TB, cli string, command []string) (string, error) {
	t.Helper()
	getent := "#!/bin/sh\nn=${2#redis-}\necho 127.0.0.$((2 + ${n%%.*})) $2\n"
	bin := filepath.Dir(write(t, "getent", getent))
	if err := os.Chmod(filepath.Join(bin, "getent"), 0o700); err != nil {
		return "", err
	}
	command = expand(command, "6379", c.port)
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Env = append(os.Environ(), "REDISCLI_AUTH="+redisPassword,
		"PATH="+bin+":"+filepath.Dir(cli)+":"+os.Getenv("PATH"))
	output, err := cmd.CombinedOutput()
	return string(output), err
}
