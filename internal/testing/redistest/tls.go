package redistest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"testing"
	"time"
)

// Authority is a certificate authority for a test. Nothing else trusts it.
type Authority struct {
	CAFile string // its certificate, in PEM

	dir         string
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
}

// NewAuthority makes an authority whose files are removed when the test ends.
func NewAuthority(t testing.TB) *Authority {
	t.Helper()
	a := &Authority{dir: t.TempDir()}
	template := certificate(t, "redistest")
	template.IsCA, template.BasicConstraintsValid = true, true
	template.KeyUsage = x509.KeyUsageCertSign

	a.key = newKey(t)
	der, err := x509.CreateCertificate(rand.Reader, template, template, a.key.Public(), a.key)
	if err != nil {
		t.Fatal(err)
	}
	if a.certificate, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	a.CAFile = a.write(t, "ca-*.pem", "CERTIFICATE", der)
	return a
}

// Pool returns a pool that holds the authority and nothing else.
func (a *Authority) Pool() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AddCert(a.certificate)
	return pool
}

// Issue returns the paths of a new certificate and its key, both in PEM. The name
// is a host's, an address's or, for a client, anything; "localhost" includes
// 127.0.0.1. The certificate is valid for servers and for clients. The functions
// change it before it is signed, see Expired.
func (a *Authority) Issue(
	t testing.TB, name string, change ...func(*x509.Certificate),
) (certFile, keyFile string) {
	t.Helper()
	template := certificate(t, name)
	template.KeyUsage = x509.KeyUsageDigitalSignature
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	if ip := net.ParseIP(name); ip != nil {
		template.IPAddresses = []net.IP{ip}
	} else {
		template.DNSNames = []string{name}
	}
	if name == "localhost" {
		template.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1)}
	}
	for _, f := range change {
		f(template)
	}

	key := newKey(t)
	der, err := x509.CreateCertificate(rand.Reader, template, a.certificate, key.Public(), a.key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return a.write(t, "cert-*.pem", "CERTIFICATE", der), a.write(t, "key-*.pem", "PRIVATE KEY", private)
}

// ClientConfig returns the TLS configuration of a client that trusts the servers of
// this authority and has a certificate issued by it.
func (a *Authority) ClientConfig(t testing.TB) *tls.Config {
	t.Helper()
	cert, err := tls.LoadX509KeyPair(a.Issue(t, "client"))
	if err != nil {
		t.Fatal(err)
	}
	return &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: a.Pool(), Certificates: []tls.Certificate{cert}}
}

// Expired makes a certificate that is issued expire an hour ago.
func Expired(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Hour) }

// StartTLS runs a server as Start does whose Addr accepts only TLS. Its
// certificate is for localhost and 127.0.0.1. With clientCerts it requires a
// certificate of the same authority from clients. The unix socket has no TLS.
// Redis uses the last of repeated options, so args such as "--tls-cert-file" and
// "--tls-key-file" replace the defaults.
func StartTLS(t testing.TB, a *Authority, clientCerts bool, args ...string) *Server {
	t.Helper()
	options := tlsOptions(t, a, clientCerts)
	return start(t, "", redisPassword(args), func(_, port string) []string {
		return append(append([]string{"--tls-port", port}, options...), args...)
	})
}

// tlsOptions returns the options of a server with TLS, except for its port.
func tlsOptions(t testing.TB, a *Authority, clientCerts bool) []string {
	t.Helper()
	cert, key := a.Issue(t, "localhost")
	clients := "no"
	if clientCerts {
		clients = "yes"
	}
	return []string{
		"--port", "0", "--tls-cert-file", cert, "--tls-key-file", key,
		"--tls-ca-cert-file", a.CAFile, "--tls-auth-clients", clients,
	}
}

// certificate returns the template that all certificates have in common.
func certificate(t testing.TB, name string) *x509.Certificate {
	t.Helper()
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 64))
	if err != nil {
		t.Fatal(err)
	}
	return &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: name},
		NotBefore:    time.Now().Add(-24 * time.Hour),
		NotAfter:     time.Now().Add(24 * time.Hour),
	}
}

func newKey(t testing.TB) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// write writes one PEM block to a new file and returns its path.
func (a *Authority) write(t testing.TB, pattern, kind string, der []byte) string {
	t.Helper()
	file, err := os.CreateTemp(a.dir, pattern)
	if err != nil {
		t.Fatal(err)
	}
	if err := pem.Encode(file, &pem.Block{Type: kind, Bytes: der}); err != nil {
		t.Fatal(err)
	}
	if err := file.Close(); err != nil {
		t.Fatal(err)
	}
	return file.Name()
}
