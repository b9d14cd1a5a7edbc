package operation

import (
	"errors"
	"fmt"
	"io"
	"maps"
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

	"github.com/seed-387a6c65/caddy-ratelimit/internal/redistest"
)

// compose is what the tests need of compose.yml.
type compose struct {
	Services map[string]struct {
		Image   string
		Build   struct{ Context, Dockerfile string }
		Ports   []string
		Volumes []string
		Command string
		Deploy  struct{ Replicas int }

		Environment map[string]string
		Networks    networks
		DependsOn   []string `yaml:"depends_on"`
	}
	Networks, Volumes map[string]struct{ Internal bool }
}

// networks are those of a service, and its addresses there.
type networks map[string]struct {
	Address string `yaml:"ipv4_address"`
}

// UnmarshalYAML implements yaml.Unmarshaler: a list has names only.
func (n *networks) UnmarshalYAML(node *yaml.Node) error {
	if node.Kind == yaml.MappingNode {
		return node.Decode((*map[string]struct {
			Address string `yaml:"ipv4_address"`
		})(n))
	}
	var names []string
	err := node.Decode(&names)
	*n = make(networks)
	for _, name := range names {
		(*n)[name] = struct {
			Address string `yaml:"ipv4_address"`
		}{}
	}
	return err
}

// readCompose returns compose.yml.
func readCompose(t testing.TB) (c compose) {
	t.Helper()
	if err := yaml.Unmarshal([]byte(read(t, deploy, "docker/compose.yml")), &c); err != nil {
		t.Fatal(err)
	}
	return c
}

// pinned matches an image with a version that is not just the latest.
var pinned = regexp.MustCompile(`^[a-z./-]+:v?\d+\.\d+[\w.-]*$`)

// TestComposeFile guards what no Docker checks here: the services of compose.yml
// use images of fixed versions, files and networks that exist, and ports that
// publish neither Redis nor an admin API.
func TestComposeFile(t *testing.T) {
	c := readCompose(t)
	published := make(map[string]string)
	built := ""
	for name, s := range c.Services {
		if s.Build.Dockerfile != "" {
			built = s.Image
			if _, err := os.Stat(filepath.Join(deploy, "docker", s.Build.Context, s.Build.Dockerfile)); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		for _, port := range s.Ports {
			published[port] = name
		}
		for _, volume := range s.Volumes {
			source, _, _ := strings.Cut(volume, ":")
			if !strings.HasPrefix(source, ".") {
				if _, ok := c.Volumes[source]; !ok {
					t.Errorf("%s: no volume %s", name, source)
				}
				continue
			}
			if !strings.HasSuffix(volume, ":ro") {
				t.Errorf("%s: may write to %s", name, source)
			}
			if _, err := os.Stat(filepath.Join(deploy, "docker", source)); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		for network := range s.Networks {
			if _, ok := c.Networks[network]; !ok {
				t.Errorf("%s: no network %s", name, network)
			}
		}
		for _, other := range s.DependsOn {
			if _, ok := c.Services[other]; !ok {
				t.Errorf("%s: no service %s", name, other)
			}
		}
		for variable, value := range s.Environment {
			if strings.HasSuffix(variable, "PASSWORD") && !strings.HasPrefix(value, "${") {
				t.Errorf("%s: has its password in the file", name)
			}
		}
	}
	for name, s := range c.Services {
		if s.Image != built && !pinned.MatchString(s.Image) {
			t.Errorf("%s: image %q has no fixed version", name, s.Image)
		}
	}
	want := map[string]string{
		"8080:8080": "balancer", "127.0.0.1:9090:9090": "prometheus", "127.0.0.1:3000:3000": "grafana",
	}
	if fmt.Sprint(published) != fmt.Sprint(want) {
		t.Errorf("published are %v, want %v", published, want)
	}
	if s := c.Services["redis"]; !slices.Equal(slices.Sorted(maps.Keys(s.Networks)), []string{"limits"}) || !c.Networks["limits"].Internal {
		t.Errorf("Redis is on networks %v", s.Networks)
	}
}

// TestMonitoringFiles guards what no Grafana and no DNS check here: the files of
// Prometheus and Grafana fit those of Docker, so that the one finds the other.
func TestMonitoringFiles(t *testing.T) {
	c := readCompose(t)
	var config struct {
		Global struct {
			Interval string `yaml:"scrape_interval"`
		}
		Jobs []struct {
			DNS []struct {
				Names []string
				Port  int
			} `yaml:"dns_sd_configs"`
		} `yaml:"scrape_configs"`
	}
	var sources struct {
		Datasources []struct {
			Type, URL string
			JSONData  struct {
				TimeInterval string `yaml:"timeInterval"`
			} `yaml:"jsonData"`
		}
	}
	var dashboards struct {
		Providers []struct {
			Type    string
			Options struct{ Path string }
		}
	}
	for path, v := range map[string]any{
		"prometheus/prometheus.yml":                       &config,
		"grafana/provisioning/datasources/prometheus.yml": &sources,
		"grafana/provisioning/dashboards/rate-limit.yml":  &dashboards,
	} {
		if err := yaml.Unmarshal([]byte(read(t, deploy, path)), v); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
	}
	scraped := config.Jobs[0].DNS[0]
	if _, ok := c.Services[scraped.Names[0]]; !ok {
		t.Errorf("Prometheus scrapes %q, which is no service", scraped.Names)
	}
	if site := fmt.Sprintf("http://:%d {\n\tmetrics /metrics\n", scraped.Port); !strings.Contains(read(t, deploy, "docker/Caddyfile"), site) {
		t.Errorf("Prometheus scrapes port %d, where no metrics are", scraped.Port)
	}
	source := sources.Datasources[0]
	if source.Type != "prometheus" || source.URL != "http://prometheus:9090" || c.Services["prometheus"].Image == "" {
		t.Errorf("Grafana reads %+v", source)
	}
	if got, want := source.JSONData.TimeInterval, config.Global.Interval; got != want {
		t.Errorf("Grafana expects a scrape each %s, and Prometheus does one each %s", got, want)
	}
	provider := dashboards.Providers[0]
	mount := "../grafana/dashboard.json:" + provider.Options.Path + "/rate-limit.json:ro"
	if provider.Type != "file" || !slices.Contains(c.Services["grafana"].Volumes, mount) {
		t.Errorf("Grafana reads %+v, and has %q", provider, c.Services["grafana"].Volumes)
	}
}

// TestDeployedCaddyfiles guards that Caddy accepts the Caddyfiles as they are.
func TestDeployedCaddyfiles(t *testing.T) {
	validate(t, read(t, deploy, "docker/Caddyfile"))
	validate(t, read(t, deploy, "docker/balancer.Caddyfile"))
	validate(t, readManifests(t, "caddy.yaml")["ConfigMap/caddy"].Data["Caddyfile"])
}

// TestComposedSite guards the Caddyfiles and the Redis of compose.yml: three nodes
// that share one limit for each client, whatever node the load balancer chooses and
// whatever address a client claims to have.
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
		return replace(t, file, "http://:8080", "http://"+n.site, sites[0], sites[0])
	})

	for _, n := range nodes {
		if status, body := fetch(t, "http://"+n.metrics+"/healthz"); status != http.StatusOK || body != "ok" {
			t.Errorf("health: %d %s", status, body)
		}
		n.waitForRedis()
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

// TestDockerfile guards that the image is built as `make build` builds Caddy, with
// the same versions, from images of fixed versions.
func TestDockerfile(t *testing.T) {
	file := strings.ReplaceAll(read(t, deploy, "docker/Dockerfile"), "\\\n", " ")
	makefile := strings.ReplaceAll(read(t, root, "Makefile"), "\\\n", " ")
	version := regexp.MustCompile(`(?m)^CADDY_VERSION = (\S+)$`).FindStringSubmatch(makefile)
	if version == nil {
		t.Fatal("the Makefile has no CADDY_VERSION")
	}
	words := func(s string) string { return strings.Join(strings.Fields(s), " ") }
	build := regexp.MustCompile(`(?m)^\t\$\(XCADDY\) (build \$\(CADDY_VERSION\) .*)$`).FindStringSubmatch(makefile)
	if build == nil {
		t.Fatal("the Makefile builds nothing")
	}
	want := words("go tool -modfile=tools/go.mod xcaddy " +
		strings.NewReplacer("$(CADDY_VERSION)", version[1], "./caddy", "/usr/bin/caddy").Replace(build[1]))

	stages, builds := make(map[string]bool), false
	for line := range strings.Lines(file) {
		f := strings.Fields(line)
		if len(f) == 0 || strings.HasPrefix(f[0], "#") {
			continue
		}
		switch f[0] {
		case "FROM":
			if !pinned.MatchString(f[1]) {
				t.Errorf("image %s has no fixed version", f[1])
			}
			if len(f) == 4 && f[2] == "AS" {
				stages[f[3]] = true
			}
		case "RUN":
			builds = builds || strings.HasSuffix(words(line), want)
		case "COPY":
			if from, ok := strings.CutPrefix(f[1], "--from="); ok && !stages[from] {
				t.Errorf("there is no stage %s", from)
			}
		case "ENV", "WORKDIR":
		default:
			t.Errorf("no test knows the instruction %s", f[0])
		}
	}
	if !builds {
		t.Errorf("it does not run %s, as the Makefile does", want)
	}
	for line := range strings.Lines(read(t, deploy, "docker/Dockerfile.dockerignore")) {
		if slices.Contains([]string{"go.mod", "go.sum", "limiter", "internal", "tools"}, strings.TrimSpace(line)) {
			t.Errorf("the build needs %s", line)
		}
	}
}

// TestUnit guards that systemd accepts the unit and finds it little exposed, and that the password of its
// comment is read from where systemd puts it.
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
	if strings.Contains(unit, "--environ") {
		t.Error("the environment, which may have secrets, is written to the log")
	}
}

// manifest is what the tests need of a Kubernetes object.
type manifest struct {
	APIVersion string `yaml:"apiVersion"`
	Kind       string
	Metadata   struct {
		Name   string
		Labels map[string]string
	}
	Data map[string]string
	Spec struct {
		Replicas    int
		ServiceName string `yaml:"serviceName"`
		Selector    any
		Ports       []struct {
			Name       string
			Port       int
			TargetPort string `yaml:"targetPort"`
		}
		Template struct {
			Metadata struct{ Labels, Annotations map[string]string }
			Spec     podSpec
		}
		VolumeClaimTemplates []struct{ Metadata struct{ Name string } } `yaml:"volumeClaimTemplates"`
	}
}

// podSpec is what the tests need of a pod.
type podSpec struct {
	AutomountServiceAccountToken *bool `yaml:"automountServiceAccountToken"`
	SecurityContext              struct {
		RunAsNonRoot bool `yaml:"runAsNonRoot"`
	} `yaml:"securityContext"`
	Containers []struct {
		Name, Image   string
		Args, Command []string
		Ports         []struct {
			Name          string
			ContainerPort int `yaml:"containerPort"`
		}
		ReadinessProbe  probe `yaml:"readinessProbe"`
		LivenessProbe   probe `yaml:"livenessProbe"`
		SecurityContext struct {
			AllowPrivilegeEscalation *bool `yaml:"allowPrivilegeEscalation"`
			ReadOnlyRootFilesystem   bool  `yaml:"readOnlyRootFilesystem"`
		} `yaml:"securityContext"`
		Resources struct{ Limits map[string]string }
		Env       []struct {
			Name      string
			ValueFrom struct {
				SecretKeyRef struct{ Name, Key string } `yaml:"secretKeyRef"`
			} `yaml:"valueFrom"`
		}
		VolumeMounts []struct {
			Name string
		} `yaml:"volumeMounts"`
	}
	Volumes []struct {
		Name      string
		ConfigMap struct{ Name string } `yaml:"configMap"`
	}
}

// probe is how Kubernetes asks whether a container works.
type probe struct {
	HTTPGet   struct{ Path, Port string } `yaml:"httpGet"`
	TCPSocket struct{ Port string }       `yaml:"tcpSocket"`
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
		id := m.Kind + "/" + m.Metadata.Name
		if _, ok := objects[id]; ok || m.APIVersion == "" || m.Metadata.Name == "" || m.Metadata.Labels["app"] == "" {
			t.Errorf("%s: %s is there twice, or lacks its version, name or label", name, id)
		}
		objects[id] = m
	}
}

// TestKubernetesFiles guards what no cluster checks here: what the objects refer to
// exists, containers have few rights and bounded memory, and no Service leads to
// the metrics or an admin API.
func TestKubernetesFiles(t *testing.T) {
	for _, file := range []string{"caddy.yaml", "redis.yaml", "redis-cluster.yaml"} {
		objects := readManifests(t, file)
		for id, m := range objects {
			pod := m.Spec.Template.Spec
			if len(pod.Containers) == 0 {
				continue
			}
			labels := m.Spec.Template.Metadata.Labels
			if m.Kind != "Job" && fmt.Sprint(m.Spec.Selector) != fmt.Sprintf("map[matchLabels:map[app:%s]]", labels["app"]) {
				t.Errorf("%s: selects %v, and its pods are %v", id, m.Spec.Selector, labels)
			}
			if on := pod.AutomountServiceAccountToken; on == nil || *on || !pod.SecurityContext.RunAsNonRoot {
				t.Errorf("%s: its pods have more rights than they need", id)
			}
			volumes := make(map[string]bool)
			for _, v := range pod.Volumes {
				volumes[v.Name] = true
				if _, ok := objects["ConfigMap/"+v.ConfigMap.Name]; v.ConfigMap.Name != "" && !ok {
					t.Errorf("%s: no ConfigMap %s", id, v.ConfigMap.Name)
				}
			}
			for _, v := range m.Spec.VolumeClaimTemplates {
				volumes[v.Metadata.Name] = true
			}
			for _, c := range pod.Containers {
				if !pinned.MatchString(c.Image) {
					t.Errorf("%s: image %s has no fixed version", id, c.Image)
				}
				if e := c.SecurityContext.AllowPrivilegeEscalation; e == nil || *e || !c.SecurityContext.ReadOnlyRootFilesystem {
					t.Errorf("%s: its container has more rights than it needs", id)
				}
				if m.Kind != "Job" && c.Resources.Limits["memory"] == "" {
					t.Errorf("%s: its memory has no limit", id)
				}
				for _, v := range c.VolumeMounts {
					if !volumes[v.Name] {
						t.Errorf("%s: no volume %s", id, v.Name)
					}
				}
				ports := make(map[string]bool)
				for _, p := range c.Ports {
					ports[p.Name] = true
				}
				for _, p := range []probe{c.ReadinessProbe, c.LivenessProbe} {
					if name := p.HTTPGet.Port + p.TCPSocket.Port; m.Kind != "Job" && !ports[name] {
						t.Errorf("%s: probes port %q", id, name)
					}
				}
				for _, s := range objects {
					if s.Kind != "Service" || fmt.Sprint(s.Spec.Selector) != fmt.Sprintf("map[app:%s]", labels["app"]) {
						continue
					}
					for _, p := range s.Spec.Ports {
						if !ports[p.TargetPort] || p.TargetPort == "metrics" {
							t.Errorf("Service %s: leads to port %s", s.Metadata.Name, p.TargetPort)
						}
					}
				}
			}
			if service := m.Spec.ServiceName; service != "" {
				if _, ok := objects["Service/"+service]; !ok {
					t.Errorf("%s: no Service %s", id, service)
				}
			}
		}
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
		//nolint:gosec // the arguments are those of the manifest
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
	if err := os.Chmod(filepath.Join(bin, "getent"), 0o700); err != nil { //nolint:gosec // a program
		return "", err
	}
	command = expand(command, "6379", c.port)
	cmd := exec.Command(command[0], command[1:]...) //nolint:gosec // that of the manifest
	cmd.Env = append(os.Environ(), "REDISCLI_AUTH="+redisPassword,
		"PATH="+bin+":"+filepath.Dir(cli)+":"+os.Getenv("PATH"))
	output, err := cmd.CombinedOutput()
	return string(output), err
}
