package redistest

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"testing"
)

// StartFront runs, until the test ends, a server that refuses what another kind or an
// older release would, and passes all else on to a real one. refuse gets each command,
// the name in lower case, and returns the error that is replied, such as "ERR unknown
// command", or "". StartFront returns its address.
func StartFront(t testing.TB, s *Server, refuse func(command []string) string) string {
	t.Helper()
	l := listen(t)
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer client.Close()
				server, err := net.Dial("unix", s.Socket)
				if err != nil {
					return
				}
				defer server.Close()
				t.Cleanup(func() { _ = server.Close() })
				_ = front(client, server, refuse)
			}()
		}
	}()
	return l.Addr().String()
}

// front passes commands on, one at a time, until one side ends.
func front(client, server net.Conn, refuse func(command []string) string) error {
	from, replies := bufio.NewReader(client), bufio.NewReader(server)
	for {
		var text strings.Builder
		command, err := readRESP(from, &text)
		if err != nil {
			return err
		}
		command[0] = strings.ToLower(command[0])
		if refusal := refuse(command); refusal != "" {
			if _, err := fmt.Fprintf(client, "-%s\r\n", refusal); err != nil {
				return err
			}
			continue
		}
		if _, err := io.WriteString(server, text.String()); err != nil {
			return err
		}
		text.Reset()
		if _, err := readRESP(replies, &text); err != nil {
			return err
		}
		if _, err := io.WriteString(client, text.String()); err != nil {
			return err
		}
	}
}

// readRESP reads one value, appends it to text as it is, and returns the
// strings in it.
func readRESP(r *bufio.Reader, text *strings.Builder) ([]string, error) {
	line, err := r.ReadString('\n')
	if err != nil {
		return nil, err
	}
	text.WriteString(line)
	n, err := strconv.Atoi(strings.TrimSpace(line[1:]))
	switch line[0] {
	case '$', '=':
		if err != nil || n < 0 {
			return []string{""}, err
		}
		data := make([]byte, n+2)
		if _, err := io.ReadFull(r, data); err != nil {
			return nil, err
		}
		text.Write(data)
		return []string{string(data[:n])}, nil
	case '*', '%', '~':
		if line[0] == '%' {
			n *= 2
		}
		var all []string
		for range n {
			some, err := readRESP(r, text)
			if err != nil {
				return nil, err
			}
			all = append(all, some...)
		}
		return all, err
	}
	return []string{line}, nil
}
