/* Three members over loopback: the disk of the one that leads takes nothing any more, not even that its log is gone;
 * another one leads, and that one is a member again once its disk is well. */
#include "orchestrator/voter.h"
#include "os/calls.h"
#include "os/clock.h"
#include "os/listener.h"
#include "os/signals.h"
#include "os/socket.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { COUNT = 3 };

/* Far beyond what any of it takes: a machine may be slow. */
static const uint64_t LIMIT_NS = 120000000000u;

static atomic_bool disk_is_lost; /* of the first member */
static even_voter *voters[COUNT];

static bool is_lost(const char *path) {
  return atomic_load(&disk_is_lost) && strstr(path, "/1/log") != NULL;
}

static int rename_some(const char *from, const char *to) {
  if (is_lost(to)) {
    errno = EROFS;
    return -1;
  }
  return even_os_real.rename(from, to);
}

static int unlink_some(const char *path) {
  if (is_lost(path)) {
    errno = EROFS;
    return -1;
  }
  return even_os_real.unlink(path);
}

static void open_group(const char *folder) {
  even_voter_member members[COUNT];
  int listeners[COUNT];
  for (size_t i = 0; i < COUNT; i++) {
    int port = 0;
    assert_int_equal(even_listener_open("127.0.0.1", &port, &listeners[i]), EVEN_OK);
    members[i].id = i + 1;
    (void)snprintf(members[i].address, sizeof members[i].address, "127.0.0.1:%d", port);
  }
  for (size_t i = 0; i < COUNT; i++) {
    even_voter_params params = {.size = sizeof params,
                                .key = "a key that all of them have.....",
                                .self = i + 1,
                                .listener = listeners[i],
                                .members = members,
                                .count = COUNT,
                                .first = 1,
                                .folder = folder,
                                .silence_ms = EVEN_SOCKET_SHORTEST_SILENCE_MS};
    assert_int_equal(even_voter_open(&params, &voters[i]), EVEN_OK);
  }
}

static even_voter_view look(size_t i) {
  even_voter_view view;
  even_voter_look(voters[i], &view);
  return view;
}

/* One of those from `first` on acts in `generation` or a newer one: its place. */
static size_t await_leader(size_t first, uint64_t generation) {
  for (uint64_t until = even_clock_ns() + LIMIT_NS; even_clock_ns() < until; even_clock_sleep_ns(5000000)) {
    for (size_t i = first; i < COUNT; i++) {
      even_voter_view view = look(i);
      if (view.acts && view.newest.generation >= generation) {
        return i;
      }
    }
  }
  fail_msg("nobody leads generation %llu", (unsigned long long)generation);
  return COUNT;
}

static void one_whose_disk_takes_nothing_leads_no_more(void **state) {
  char folder[] = "/tmp/evenstep-gives-up-XXXXXX"; /* it goes with the last of them */
  char why[EVEN_VOTER_WHY];
  uint64_t until = even_clock_ns() + LIMIT_NS;
  (void)state;
  assert_non_null(mkdtemp(folder));
  open_group(folder);
  assert_int_equal(await_leader(0, 1), 0);
  assert_false(even_voter_gave_up(voters[0], why));
  atomic_store(&disk_is_lost, true);
  even_voter_finish(voters[0]); /* it is to write that nobody leads after it */
  size_t next = await_leader(1, 2);
  assert_int_equal(look(next).newest.generation, 2);
  assert_true(even_voter_gave_up(voters[0], why));
  assert_non_null(strstr(why, "/1/log"));
  atomic_store(&disk_is_lost, false);
  while (look(0).newest.generation < 2 || !look(0).quorum) {
    assert_true(even_clock_ns() < until);
    even_clock_sleep_ns(5000000);
  }
  (void)even_voter_gave_up(voters[0], why); /* it may have come back before its disk was well */
  /* what it said last was heard by nobody; and the two that are left are a majority with it */
  size_t third = 3 - next;
  even_voter_close(voters[third], true);
  voters[third] = NULL;
  uint64_t asked = even_clock_boot_ns();
  while (look(next).answered_ns <= asked) {
    assert_true(even_clock_ns() < until);
    even_clock_sleep_ns(5000000);
  }
  assert_false(even_voter_gave_up(voters[0], why));
  for (size_t i = 0; i < COUNT; i++) {
    even_voter_close(voters[i], true);
  }
}

int main(void) {
  struct sigaction before;
  const struct CMUnitTest tests[] = {cmocka_unit_test(one_whose_disk_takes_nothing_leads_no_more)};
  if (even_signals_pipe_ignore(&before) != EVEN_OK) {
    return 1;
  }
  even_os.rename = rename_some;
  even_os.unlink = unlink_some;
  int failed = cmocka_run_group_tests(tests, NULL, NULL);
  even_os = even_os_real;
  return failed;
}
