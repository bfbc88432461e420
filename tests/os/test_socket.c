/* Connections of this machine with itself: what goes well, and each call to the kernel that fails. */
#include "os/socket.h"

#include "base/fail.h"
#include "os/calls.h"
#include "os/listener.h"
#include "os/pipe.h"
#include "os/signals.h"
#include "support/descriptors.h"
#include "support/fault.h"

#include <errno.h>
#include <limits.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

enum { BYTES = 300000, CONNECT_MS = 60000, WAIT_MS = 10, MOST_ROUNDS = 30000 };

static unsigned char sent[BYTES];
static unsigned char came[BYTES];

typedef struct ends {
  int listener;
  int port;
  int near; /* of who called */
  int far;
} ends;

static even_status open_ends(ends *at) {
  *at = (ends){.listener = -1, .near = -1, .far = -1};
  EVEN_TRY(even_listener_open("127.0.0.1", &at->port, &at->listener));
  EVEN_TRY(even_socket_connect("127.0.0.1", at->port, CONNECT_MS, &at->near));
  for (int rounds = 0; rounds < MOST_ROUNDS && at->far < 0; rounds++) { /* a poll that failed says that nobody came */
    EVEN_TRY(even_socket_accept(at->listener, &at->far));
  }
  return at->far >= 0 ? EVEN_OK : even_fail(EVEN_ERR_TIMEOUT, "nobody came");
}

static void close_ends(ends *at) {
  const int all[] = {at->near, at->far, at->listener};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
    if (all[i] >= 0) {
      even_pipe_close(all[i]);
    }
  }
}

/* As much as the kernel takes, and what came of it, until all of it has. */
static even_status carry(const ends *at) {
  size_t out = 0;
  size_t in = 0;
  for (int rounds = 0; rounds < MOST_ROUNDS && in < BYTES; rounds++) {
    bool broken = false;
    int reason = 0;
    size_t got = 0;
    if (out < BYTES) {
      out += even_socket_write(at->near, sent + out, BYTES - out, &broken, &reason);
      even_socket_wait(at->near, broken ? 0 : WAIT_MS);
    }
    if (broken) {
      return even_fail_errno(reason, "the connection broke");
    }
    even_pipe_state state = even_socket_read(at->far, came + in, BYTES - in, &got, &reason);
    if (state == EVEN_PIPE_ENDED) {
      return even_fail_errno(reason, "the connection ended");
    }
    in += got;
  }
  return in == BYTES ? EVEN_OK : even_fail(EVEN_ERR_TIMEOUT, "%zu of %d bytes came", in, (int)BYTES);
}

static even_status meet(void *context) {
  ends *at = context;
  memset(came, 0, sizeof came);
  even_status status = open_ends(at);
  if (status == EVEN_OK) {
    status = carry(at);
  }
  if (status == EVEN_OK) {
    assert_memory_equal(came, sent, sizeof sent);
  }
  close_ends(at);
  return status;
}

static int setup(void **state) {
  (void)state;
  for (size_t i = 0; i < sizeof sent; i++) {
    sent[i] = (unsigned char)(i * 13 + i / 256);
  }
  return 0;
}

static int teardown(void **state) {
  (void)state;
  fault_reset();
  return 0;
}

static void what_is_sent_comes_whole(void **state) {
  ends at;
  (void)state;
  assert_int_equal(meet(&at), EVEN_OK);
  fault_os_short(10007);
  assert_int_equal(meet(&at), EVEN_OK);
}

static void each_end_knows_both_addresses(void **state) {
  ends at;
  char text[64];
  (void)state;
  assert_int_equal(open_ends(&at), EVEN_OK);
  even_socket_local(at.near, text, sizeof text);
  assert_string_equal(text, "127.0.0.1");
  even_socket_peer(at.far, text, sizeof text);
  assert_string_equal(text, "127.0.0.1");
  fault_os(FAULT_getsockname, 1, EIO);
  even_socket_local(at.near, text, sizeof text);
  assert_string_equal(text, "");
  fault_os(FAULT_getpeername, 1, ENOTCONN);
  even_socket_peer(at.near, text, sizeof text);
  assert_string_equal(text, "");
  close_ends(&at);
}

static void each_call_that_fails_is_an_error_and_leaves_nothing_open(void **state) {
  static const int errors[] = {EIO, EINTR, ENOMEM};
  ends at;
  (void)state;
  int before = open_descriptors();
  for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++) {
    assert_true(fault_each_os(meet, &at, errors[i]) > 15);
    assert_int_equal(open_descriptors(), before);
  }
}

/* Each of the options by which the kernel looks after a connection: one that has not all of them is none. */
static void a_connection_without_its_options_is_none(void **state) {
  ends at;
  long options = 0;
  (void)state;
  fault_os(FAULT_setsockopt, 0, 0);
  assert_int_equal(open_ends(&at), EVEN_OK);
  options = fault_os_calls(FAULT_setsockopt);
  close_ends(&at);
  assert_true(options >= 11); /* of the listener 1, of each end five and more */
  int before = open_descriptors();
  for (long nth = 1; nth <= options; nth++) {
    fault_os(FAULT_setsockopt, nth, ENOBUFS);
    assert_int_equal(open_ends(&at), EVEN_ERR_SYSTEM);
    close_ends(&at);
    assert_int_equal(open_descriptors(), before);
  }
}

static int connects_slowly(int fd, const struct sockaddr *address, socklen_t bytes) {
  int code = even_os_real.connect(fd, address, bytes);
  if (code == 0) {
    errno = EINPROGRESS;
  }
  return -1;
}

static int polls;

static int interrupted_once(struct pollfd *descriptors, nfds_t count, int timeout_ms) {
  if (polls++ == 0) {
    errno = EINTR;
    return -1;
  }
  return even_os_real.poll(descriptors, count, timeout_ms);
}

static int no_answer(struct pollfd *descriptors, nfds_t count, int timeout_ms) {
  (void)descriptors;
  (void)count;
  assert_int_equal(timeout_ms, 77);
  return 0;
}

static int refused(int fd, int level, int option, void *value, socklen_t *bytes) {
  (void)fd;
  (void)level;
  (void)option;
  (void)bytes;
  memcpy(value, &(int){ECONNREFUSED}, sizeof(int));
  return 0;
}

/* Over a network connect(2) only begins. */
static void a_connection_that_takes_its_time_is_waited_for(void **state) {
  ends at;
  int fd = 7;
  (void)state;
  assert_int_equal(open_ends(&at), EVEN_OK);
  even_os.connect = connects_slowly;
  even_os.poll = interrupted_once;
  polls = 0;
  assert_int_equal(even_socket_connect("127.0.0.1", at.port, CONNECT_MS, &fd), EVEN_OK);
  assert_int_equal(polls, 2);
  even_pipe_close(fd);
  even_os.poll = even_os_real.poll;
  even_os.getsockopt = refused;
  int before = open_descriptors();
  assert_int_equal(even_socket_connect("127.0.0.1", at.port, CONNECT_MS, &fd), EVEN_ERR_SYSTEM);
  assert_int_equal(fd, -1);
  assert_non_null(strstr(even_error_last()->what, "refused"));
  even_os.poll = no_answer;
  assert_int_equal(even_socket_connect("127.0.0.1", at.port, 77, &fd), EVEN_ERR_TIMEOUT);
  assert_int_equal(fd, -1);
  assert_int_equal(open_descriptors(), before);
  fault_reset();
  close_ends(&at);
}

static int option_of(int fd, int level, int option) {
  int value = -1;
  socklen_t bytes = sizeof value;
  assert_int_equal(getsockopt(fd, level, option, &value, &bytes), 0);
  return value;
}

/* The probes, all of them, take no longer than the silence that is borne. */
static void assert_borne(int fd, int silence_ms) {
  int between = option_of(fd, IPPROTO_TCP, TCP_KEEPINTVL);
  int probes = option_of(fd, IPPROTO_TCP, TCP_KEEPCNT);
  assert_int_equal(option_of(fd, IPPROTO_TCP, TCP_USER_TIMEOUT), silence_ms);
  assert_in_range(1000 * (1 + between * probes), silence_ms * 3 / 4, silence_ms + 1000);
}

static void silence_is_borne_for_as_long_as_is_said(void **state) {
  static const int said[][2] = {{0, EVEN_SOCKET_SILENCE_MS},
                                {1, EVEN_SOCKET_SHORTEST_SILENCE_MS},
                                {2500, 2500},
                                {9500, 9500},
                                {60000, 60000},
                                {1 << 30, EVEN_SOCKET_LONGEST_SILENCE_MS}};
  (void)state;
  for (size_t i = 0; i < sizeof said / sizeof said[0]; i++) {
    ends at;
    even_socket_silence_set(said[i][0]);
    assert_int_equal(even_socket_silence(), said[i][1]);
    assert_int_equal(open_ends(&at), EVEN_OK);
    assert_borne(at.near, said[i][1]);
    assert_borne(at.far, said[i][1]);
    even_socket_silence_set(8000);
    assert_int_equal(even_socket_watch(at.near), EVEN_OK); /* one that is there */
    assert_borne(at.near, 8000);
    close_ends(&at);
  }
  even_socket_silence_set(0);
}

static uint32_t acknowledged_ms;
static uint32_t data_ms;

static int say_last(int fd, int level, int option, void *value, socklen_t *bytes) {
  int result = even_os_real.getsockopt(fd, level, option, value, bytes);
  ((struct tcp_info *)value)->tcpi_last_ack_recv = acknowledged_ms;
  ((struct tcp_info *)value)->tcpi_last_data_recv = data_ms;
  return result;
}

/* In milliseconds, and as far as the kernel says it. */
static void how_long_the_other_host_is_silent_is_known(void **state) {
  ends at;
  (void)state;
  assert_int_equal(open_ends(&at), EVEN_OK);
  assert_int_equal(carry(&at), EVEN_OK);
  assert_true(even_socket_silent(at.near) < CONNECT_MS); /* it has acknowledged all of it */
  even_os.getsockopt = say_last;
  acknowledged_ms = 4711;
  data_ms = 9000; /* it had nothing to say */
  assert_int_equal(even_socket_silent(at.near), 4711);
  data_ms = 500; /* it went on while this process stood still, and had nothing new to acknowledge */
  assert_int_equal(even_socket_silent(at.near), 500);
  acknowledged_ms = data_ms = UINT32_MAX;
  assert_int_equal(even_socket_silent(at.near), INT_MAX);
  fault_reset();
  fault_os(FAULT_getsockopt, 1, EINVAL);
  assert_int_equal(even_socket_silent(at.near), 0);
  close_ends(&at);
}

/* What waits here because the other end's buffers are full, or its host is not reached, it has not got. */
static void whether_all_was_delivered_is_known(void **state) {
  ends at;
  bool broken = false;
  int reason = 0;
  size_t out = 0;
  size_t got = 0;
  (void)state;
  assert_int_equal(open_ends(&at), EVEN_OK);
  assert_true(even_socket_delivered(at.near));
  for (size_t more = 1; more > 0; out += more) {
    more = even_socket_write(at.near, sent, sizeof sent, &broken, &reason);
    assert_false(broken);
  }
  assert_false(even_socket_delivered(at.near));
  fault_os(FAULT_ioctl, 1, EINVAL);
  assert_true(even_socket_delivered(at.near)); /* the kernel does not say */
  for (size_t in = 0; in < out; in += got) {
    if (even_socket_read(at.far, came, sizeof came, &got, &reason) == EVEN_PIPE_EMPTY) {
      even_socket_wait(at.near, WAIT_MS);
    }
  }
  for (int rounds = 0; !even_socket_delivered(at.near); rounds++) { /* its kernel says so a moment later */
    assert_true(rounds < MOST_ROUNDS);
    even_socket_wait(-1, 1);
  }
  close_ends(&at);
}

static void what_is_no_address_is_refused(void **state) {
  int fd = 7;
  (void)state;
  assert_int_equal(even_socket_connect("localhost", 80, 10, &fd), EVEN_ERR_ARGUMENT);
  assert_int_equal(even_socket_connect("127.0.0.1", 0, 10, &fd), EVEN_ERR_ARGUMENT);
  assert_int_equal(even_socket_connect("127.0.0.1", 65536, 10, &fd), EVEN_ERR_ARGUMENT);
  assert_int_equal(fd, -1);
}

static void who_went_away_before_he_was_taken_is_no_error(void **state) {
  static const int gone[] = {ECONNABORTED, EINTR, EAGAIN};
  ends at;
  int fd = 7;
  (void)state;
  assert_int_equal(open_ends(&at), EVEN_OK);
  assert_int_equal(even_socket_accept(at.listener, &fd), EVEN_OK); /* nobody waits */
  assert_int_equal(fd, -1);
  int other = -1;
  assert_int_equal(even_socket_connect("127.0.0.1", at.port, CONNECT_MS, &other), EVEN_OK);
  for (size_t i = 0; i < sizeof gone / sizeof gone[0]; i++) {
    fault_os(FAULT_accept4, 1, gone[i]);
    assert_int_equal(even_socket_accept(at.listener, &fd), EVEN_OK);
    assert_int_equal(fd, -1);
  }
  fault_os(FAULT_accept4, 1, EMFILE);
  assert_int_equal(even_socket_accept(at.listener, &fd), EVEN_ERR_SYSTEM);
  assert_int_equal(even_socket_accept(at.listener, &fd), EVEN_OK);
  assert_true(fd >= 0);
  even_pipe_close(fd);
  even_pipe_close(other);
  close_ends(&at);
}

static void a_broken_connection_says_why(void **state) {
  ends at;
  bool broken = true;
  int reason = 7;
  size_t got = 7;
  unsigned char byte = 0;
  (void)state;
  assert_int_equal(open_ends(&at), EVEN_OK);
  fault_os(FAULT_write, 1, EAGAIN);
  assert_int_equal(even_socket_write(at.near, "abc", 3, &broken, &reason), 0);
  assert_false(broken);
  assert_int_equal(reason, 0);
  fault_os(FAULT_write, 1, EINTR);
  assert_int_equal(even_socket_write(at.near, "abc", 3, &broken, &reason), 3);
  assert_false(broken);
  fault_os(FAULT_write, 1, EPIPE);
  assert_int_equal(even_socket_write(at.near, "abc", 3, &broken, &reason), 0);
  assert_true(broken);
  assert_int_equal(reason, EPIPE);
  fault_os(FAULT_read, 1, ECONNRESET);
  assert_int_equal(even_socket_read(at.far, &byte, 1, &got, &reason), EVEN_PIPE_ENDED);
  assert_int_equal(reason, ECONNRESET);
  fault_reset();
  even_pipe_close(at.near);
  at.near = -1;
  unsigned char rest[8];
  assert_int_equal(even_socket_read(at.far, rest, sizeof rest, &got, &reason), EVEN_PIPE_DATA);
  assert_int_equal(got, 3);
  assert_int_equal(even_socket_read(at.far, rest, sizeof rest, &got, &reason), EVEN_PIPE_ENDED);
  assert_int_equal(reason, 0); /* closed, in order */
  close_ends(&at);
}

static void an_address_has_an_interface_or_none(void **state) {
  char name[32] = "?";
  (void)state;
  even_socket_interface("127.0.0.1", name, sizeof name);
  assert_string_equal(name, "lo");
  even_socket_interface("127.0.0.", name, sizeof name);
  assert_string_equal(name, "");
  (void)even_fail(EVEN_ERR_STATE, "what was said before");
  fault_os(FAULT_getifaddrs, 1, ENOMEM);
  even_socket_interface("127.0.0.1", name, sizeof name);
  assert_string_equal(name, "");
  assert_string_equal(even_error_last()->what, "what was said before");
}

int main(void) {
  struct sigaction pipe_before;
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_teardown(what_is_sent_comes_whole, teardown),
      cmocka_unit_test_teardown(each_end_knows_both_addresses, teardown),
      cmocka_unit_test_teardown(each_call_that_fails_is_an_error_and_leaves_nothing_open, teardown),
      cmocka_unit_test_teardown(a_connection_without_its_options_is_none, teardown),
      cmocka_unit_test_teardown(a_connection_that_takes_its_time_is_waited_for, teardown),
      cmocka_unit_test_teardown(silence_is_borne_for_as_long_as_is_said, teardown),
      cmocka_unit_test_teardown(how_long_the_other_host_is_silent_is_known, teardown),
      cmocka_unit_test_teardown(whether_all_was_delivered_is_known, teardown),
      cmocka_unit_test_teardown(what_is_no_address_is_refused, teardown),
      cmocka_unit_test_teardown(who_went_away_before_he_was_taken_is_no_error, teardown),
      cmocka_unit_test_teardown(a_broken_connection_says_why, teardown),
      cmocka_unit_test_teardown(an_address_has_an_interface_or_none, teardown),
  };
  if (even_signals_pipe_ignore(&pipe_before) != EVEN_OK) {
    return 1;
  }
  return cmocka_run_group_tests(tests, setup, NULL);
}
