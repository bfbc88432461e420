/* Ports at which a process listens; networks of their own. */
#include "os/listener.h"
#include "os/listening.h"
#include "os/net_namespace.h"
#include "support/descriptors.h"
#include "support/fault.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <string.h>
#include <unistd.h>

/* proc(5). The second does not listen, the third is of somebody else, the last one is cut off. */
static const char table[] =
    "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 11 1 0 100 0 0 10 0\n"
    "   1: 0100007F:1F91 0100007F:0050 01 00000000:00000000 00:00000000 00000000     0        0 12 1 0 100 0 0 10 0\n"
    "   2: 0100007F:1F92 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 99 1 0 100 0 0 10 0\n"
    "   3: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 13 1 0 100 0 0 10 0\n"
    "   4: 0200010A:FFFF 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 14 1 0 100 0 0 10 0\n"
    "   5: 00000000000000000000000000000000:0017 00000000000000000000000000000000:0000 0A 0:0 00:0 0 0 0 15 1 0\n"
    "   6: 00000000000000000000000001000000:0018 00000000000000000000000000000000:0000 0A 0:0 00:0 0 0 0 16 1 0\n"
    "   7: 0100007F:1F";

static void a_table_is_read(void **state) {
  static const uint64_t sockets[] = {11, 12, 13, 14, 15, 16};
  even_listening found[8];
  (void)state;
  assert_int_equal(even_listening_parse(table, sockets, 6, found, 8), 4);
  assert_string_equal(found[0].address, "127.0.0.1");
  assert_int_equal(found[0].port, 8080);
  assert_string_equal(found[1].address, "127.0.0.1"); /* any address */
  assert_int_equal(found[1].port, 22);
  assert_string_equal(found[2].address, "10.1.0.2");
  assert_int_equal(found[2].port, 65535);
  assert_int_equal(found[3].port, 23);
  assert_int_equal(even_listening_parse(table, sockets, 6, found, 2), 2);
  assert_int_equal(even_listening_parse("", sockets, 6, found, 8), 0);
}

static bool has_port(const even_listening *found, size_t count, int port) {
  for (size_t i = 0; i < count; i++) {
    if (found[i].port == port) {
      return strcmp(found[i].address, "127.0.0.1") == 0;
    }
  }
  return false;
}

static void own_ports_are_found(void **state) {
  even_listening found[16];
  size_t count = 0;
  int port = 0;
  int fd = -1;
  (void)state;
  assert_int_equal(even_listener_open("127.0.0.1", &port, &fd), EVEN_OK);
  assert_int_equal(even_listening_of(getpid(), found, 16, &count), EVEN_OK);
  assert_true(has_port(found, count, port));
  even_listener_close(fd);
  assert_int_equal(even_listening_of(getpid(), found, 16, &count), EVEN_OK);
  assert_false(has_port(found, count, port));
  assert_int_equal(even_listening_of(0x7ffffff0, found, 16, &count), EVEN_OK); /* no such process */
  assert_int_equal(count, 0);
}

static void a_thread_goes_into_a_network_and_back(void **state) {
  int before = -1;
  int open = open_descriptors();
  (void)state;
  assert_true(even_net_namespace_same(getpid(), getpid()));
  assert_false(even_net_namespace_same(getpid(), 0x7ffffff0));
  even_status status = even_net_namespace_enter(getpid(), &before);
  if (status == EVEN_OK) {
    assert_int_equal(even_net_namespace_leave(before), EVEN_OK);
  } else { /* who is not root may not even stay where it is */
    assert_int_equal(status, EVEN_ERR_PERMISSION);
    assert_int_equal(before, -1);
  }
  assert_int_equal(even_net_namespace_enter(0x7ffffff0, &before), EVEN_ERR_NOT_FOUND);
  fault_os(FAULT_setns, 1, EPERM);
  assert_int_equal(even_net_namespace_enter(getpid(), &before), EVEN_ERR_PERMISSION);
  assert_int_equal(before, -1);
  fault_reset();
  assert_int_equal(open_descriptors(), open);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_table_is_read),
      cmocka_unit_test(own_ports_are_found),
      cmocka_unit_test(a_thread_goes_into_a_network_and_back),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
