package command

import (
	"fmt"
	"net"
	"testing"
	"time"
)

// TestClientDoesNotHang guards that a server which accepts and says nothing is given up
// on.
func TestClientDoesNotHang(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	client, err := newAdminClient(silent.Addr().String(), 50*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	_, err = client.fetch(t.Context(), "status", nil)
	want := fmt.Sprintf("the admin endpoint at %s did not answer within 50ms", silent.Addr())
	if err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}
