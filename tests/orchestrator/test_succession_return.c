/* The leader's agent is killed, and the next one comes back as the member that it was: members of a group, in this
 * process, and what the agent before has left. */
#include "orchestrator/succession.h"

#include "base/fail.h"
#include "orchestrator/job.h"
#include "orchestrator/outlast.h"
#include "orchestrator/succession_members.h"
#include "os/calls.h"
#include "os/clock.h"
#include "os/listener.h"
#include "os/pipe.h"
#include "os/signals.h"
#include "os/socket.h"
#include "support/clock_ahead.h"
#include "support/descriptors.h"
#include "support/fault.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { COUNT = 3, KEPT = 3 };

/* Far beyond what any of it takes: a machine may be slow. */
static const uint64_t LIMIT_NS = 120000000000u;
static const char KEY[] = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";
static const char STANDING[] = "/folder/on/a/disk/that/hangs";

typedef struct scene {
  char folder[40];
  even_voter_member members[COUNT];
  even_voter *voters[COUNT]; /* the first is that of the agent that is killed */
  even_custody_item kept[KEPT];
  even_custody custody;
  even_legacy legacy;
  even_guardian guardian; /* as the agent before had it */
  even_host_agent agents[COUNT];
  even_hosts hosts; /* of the next one */
} scene;

static scene *current;

static void keep(scene *of, even_outlast_kind kind, int fd) {
  even_custody_item *item = &of->kept[of->custody.count++];
  *item = (even_custody_item){.kind = kind, .fd = fcntl(fd, F_DUPFD_CLOEXEC, 0)};
  assert_true(item->fd >= 0);
}

static void begin(scene *of, size_t i, int listener) {
  even_voter_params params = {.size = sizeof params,
                              .self = of->members[i].id,
                              .listener = listener,
                              .members = of->members,
                              .count = COUNT,
                              .first = 1,
                              .folder = of->folder,
                              .silence_ms = EVEN_SOCKET_SHORTEST_SILENCE_MS};
  assert_int_equal(even_tls_key_read(KEY, params.key), EVEN_OK);
  assert_int_equal(even_voter_open(&params, &of->voters[i]), EVEN_OK);
}

static even_voter_view look(even_voter *voter) {
  even_voter_view view;
  even_voter_look(voter, &view);
  return view;
}

static void await(bool (*done)(scene *), scene *of) {
  const uint64_t until = even_clock_ns() + LIMIT_NS;
  while (!done(of)) {
    assert_true(even_clock_ns() < until);
    even_clock_sleep_ns(5000000);
  }
}

static bool first_acts(scene *of) {
  bool known = true;
  for (size_t i = 0; i < COUNT; i++) {
    known = known && look(of->voters[i]).newest.generation == 1;
  }
  return known && look(of->voters[0]).acts;
}

static bool another_leads(scene *of) {
  return look(of->voters[1]).newest.generation == 2 && look(of->voters[2]).newest.generation == 2;
}

static bool guardian_holds(scene *of) {
  uint64_t held = 0;
  return even_guardian_holds(&of->guardian, &held);
}

static bool guardian_lets_go(scene *of) {
  return !guardian_holds(of);
}

/* What the facts of a host look at first; once. */
static int stand(const char *path, int flags, mode_t mode) {
  if (strcmp(path, STANDING) == 0) {
    clock_slept_add(3600000000000u);
    await(another_leads, current);
  }
  return even_os_real.open(path, flags, mode);
}

static void open_group(scene *of, const int listeners[COUNT]) {
  for (size_t i = 0; i < COUNT; i++) {
    begin(of, i, listeners[i]);
  }
  await(first_acts, of);
}

/* A group in which the first leads, whose agent is killed then, and the ranks there, which are held. */
static int open_some(void **state, bool group) {
  static scene of;
  int listeners[COUNT];
  of = (scene){.legacy = {.memory = {.fd = -1}}, .custody = {.socket = -1, .items = of.kept}};
  current = &of;
  even_socket_silence_set(EVEN_SOCKET_SHORTEST_SILENCE_MS);
  even_link_leaders_change(true);
  assert_true(clock_slept_begin());
  even_os.open = stand;
  (void)snprintf(of.folder, sizeof of.folder, "/tmp/evenstep-return-XXXXXX");
  assert_non_null(mkdtemp(of.folder));
  for (size_t i = 0; i < COUNT; i++) {
    int port = 0;
    assert_int_equal(even_listener_open("127.0.0.1", &port, &listeners[i]), EVEN_OK);
    of.members[i].id = i + 1;
    (void)snprintf(of.members[i].address, sizeof of.members[i].address, "127.0.0.1:%d", port);
  }
  keep(&of, EVEN_OUTLAST_VOTER, listeners[0]);
  if (group) {
    open_group(&of, listeners);
  } else {
    for (size_t i = 0; i < COUNT; i++) {
      even_listener_close(listeners[i]);
    }
  }
  assert_int_equal(even_guardian_start("EVENSTEP_TEST_RETURN=1", &of.guardian), EVEN_OK);
  keep(&of, EVEN_OUTLAST_GUARDIAN, of.guardian.pipe);
  keep(&of, EVEN_OUTLAST_LIMIT, of.guardian.page_fd);
  assert_int_equal(even_guardian_limit(&of.guardian, 1, UINT64_MAX), EVEN_OK);
  await(guardian_holds, &of);
  even_voter_close(of.voters[0], false);
  of.voters[0] = NULL;
  assert_int_equal(even_legacy_open(&of.legacy), EVEN_OK);
  of.legacy.custody = &of.custody;
  even_legacy_votes *votes = &of.legacy.page->votes;
  *votes = (even_legacy_votes){.count = COUNT, .generation = 1, .next_member = 4, .guardian = of.guardian.pid};
  memcpy(votes->members, of.members, sizeof of.members);
  memcpy(votes->folder, of.folder, sizeof of.folder);
  memcpy(of.legacy.page->key, KEY, sizeof KEY);
  of.hosts = (even_hosts){.params = {.before = &of.legacy}, .agents = of.agents, .count = COUNT};
  assert_int_equal(even_tls_key_read(KEY, of.hosts.key), EVEN_OK);
  *state = &of;
  return 0;
}

static int open_scene(void **state) {
  return open_some(state, true);
}

static int open_alone(void **state) {
  return open_some(state, false);
}

static int close_scene(void **state) {
  scene *of = *state;
  char command[80];
  even_succession_close(&of->hosts);
  for (size_t i = 1; i < COUNT; i++) {
    even_voter_close(of->voters[i], true); /* NULL: there is no group */
  }
  fault_reset(); /* they call as long as they run */
  even_guardian_stop(&of->guardian);
  for (size_t i = 0; i < of->custody.count; i++) {
    even_pipe_close(of->kept[i].fd);
  }
  even_legacy_close(&of->legacy);
  even_os.open = even_os_real.open;
  clock_slept_end();
  (void)snprintf(command, sizeof command, "rm -rf %s", of->folder);
  return system(command) == 0 ? 0 : -1;
}

/* However long its own job takes until it goes on with them. */
static void ranks_run_as_long_as_a_majority_hears_the_one_that_returned(void **state) {
  scene *of = *state;
  even_guardian jobs = {.pid = -1, .pipe = -1};
  assert_false(even_succession_give_guardian(NULL, &jobs));
  assert_false(even_succession_give_guardian(&of->hosts, &jobs));
  assert_int_equal(even_succession_return(&of->hosts), EVEN_OK);
  await(guardian_lets_go, of);
  assert_true(even_succession_give_guardian(&of->hosts, &jobs));
  assert_int_equal(jobs.pid, of->guardian.pid);
  assert_int_equal(even_guardian_limit(&jobs, 1, UINT64_MAX), EVEN_OK);
  await(guardian_lets_go, of); /* it is told still, */
  assert_false(even_succession_give_guardian(&of->hosts, &jobs));
  even_voter_guard(of->hosts.voter, NULL);
  assert_int_equal(even_guardian_limit(&jobs, 1, UINT64_MAX), EVEN_OK);
  await(guardian_holds, of); /* and, where the job does not want that, no more */
  even_guardian_leave(&jobs);
}

/* Where it does not go on, it is as if it had not come: they are held, until another one comes, or their time is up. */
static void the_guardian_watches_on_where_it_ends_itself(void **state) {
  scene *of = *state;
  uint64_t held = 0;
  int before = 0;
  assert_int_equal(even_succession_return(&of->hosts), EVEN_OK);
  assert_true(of->hosts.guards);
  before = open_descriptors();
  even_succession_leave_to_others(&of->hosts);
  even_succession_close(&of->hosts);
  assert_true(open_descriptors() < before);
  assert_false(of->hosts.guards);
  assert_int_equal(even_guardian_limit(&of->guardian, 1, UINT64_MAX), EVEN_OK);
  await(guardian_holds, of);
  assert_true(even_guardian_holds(&of->guardian, &held));
}

static void a_guardian_that_cannot_be_taken_is_an_error(void **state) {
  scene *of = *state;
  const int before = open_descriptors();
  fault_os(FAULT_mmap, 1, ENOMEM);
  assert_int_equal(even_succession_return(&of->hosts), EVEN_ERR_MEMORY);
  fault_reset();
  assert_false(of->hosts.guards);
  assert_null(of->hosts.voter);
  assert_int_equal(open_descriptors(), before - KEPT); /* what was left is claimed, and closed */
}

static void without_a_guardian_it_returns_as_well(void **state) {
  scene *of = *state;
  even_guardian jobs = {.pid = -1, .pipe = -1};
  of->legacy.page->votes.guardian = -1;
  assert_int_equal(even_succession_return(&of->hosts), EVEN_OK);
  assert_false(even_succession_give_guardian(&of->hosts, &jobs));
  assert_true(guardian_holds(of));
}

/* A disk hangs under the folder that it looks at first: it is as good as not there, and does not renew its lease. */
static void one_that_stands_before_it_serves_is_replaced(void **state) {
  static const even_host_wish wishes[] = {{.name = "here"}, {.name = "there"}, {.name = "beyond"}};
  scene *of = *state;
  even_hosts *hosts = NULL;
  even_legacy_page *page = of->legacy.page;
  page->jobs[1].host_count = COUNT - 1;
  for (size_t i = 1; i < COUNT; i++) {
    (void)snprintf(page->jobs[1].hosts[i - 1].name, EVEN_HOSTS_NAME, "%s", wishes[i].name);
  }
  page->left = 1;
  even_legacy_whole(&of->legacy, true);
  const even_hosts_params params = {.size = sizeof params,
                                    .hosts = wishes,
                                    .count = COUNT,
                                    .program = "/usr/bin/evenstep",
                                    .folder = STANDING,
                                    .patience_seconds = 100,
                                    .silence_seconds = (int)EVEN_SOCKET_SHORTEST_SILENCE_MS * 1e-3,
                                    .replaces_leader = true,
                                    .before = &of->legacy};
  assert_int_equal(even_hosts_open(&params, &hosts), EVEN_ERR_PEER_LOST);
  assert_non_null(strstr(even_error_last()->what, "another host"));
  assert_null(hosts);
  assert_true(even_legacy_asks_again(&of->legacy));
}

static even_agent_params job_params;
static even_job job;

static bool returned_acts(scene *of) {
  return look(of->hosts.voter).acts;
}

/* The first that the job asks of its disk. */
static int stand_in_mkdir(const char *path, mode_t mode) {
  (void)mode;
  if (strncmp(STANDING, path, strlen(path)) == 0) {
    clock_slept_add(3600000000000u);
    await(another_leads, current);
  }
  errno = EIO;
  return -1;
}

static bool hears_who_leads(scene *of) {
  return look(of->hosts.voter).newest.generation == 2;
}

/* It may act, and tells the guardian so, but the disk hangs before the job's loop turns. */
static void one_whose_job_stands_before_its_loop_is_replaced(void **state) {
  scene *of = *state;
  const even_device_list devices = {NULL, 0};
  const even_agent_params params = {.devices = &devices, .run_folder = STANDING, .legacy = &of->legacy};
  of->hosts.job_watch = (even_loop_watch){.fd = -1};
  job = (even_job){.params = &params,
                   .hosts = &of->hosts,
                   .loop = {.fd = -1},
                   .signals = {.fd = -1},
                   .guardian = {.pid = -1, .pipe = -1, .page_fd = -1},
                   .generation_fd = -1,
                   .oom = {.kernel_log = -1},
                   .adopted = true};
  assert_int_equal(even_succession_return(&of->hosts), EVEN_OK);
  await(returned_acts, of);
  even_os.mkdir = stand_in_mkdir;
  assert_int_equal(even_job_open(&job), EVEN_ERR_SYSTEM);
  even_os.mkdir = even_os_real.mkdir;
  assert_int_equal(look(of->hosts.voter).newest.generation, 1); /* it took no part, */
  even_job_close(&job);
  await(hears_who_leads, of); /* until that was over */
}

static bool is_alone(scene *of) {
  even_succession_check(&job);
  return even_legacy_is_alone(&of->legacy);
}

static bool acts(scene *of) {
  assert_false(is_alone(of)); /* as far as is known three vote */
  return look(of->hosts.voter).acts;
}

/* The others have left the job; and, the moment before one of them may vote again, they have not. */
static void whether_nobody_takes_its_place_is_left(void **state) {
  static even_link links[COUNT];
  scene *of = *state;
  job = (even_job){.params = &job_params, .hosts = &of->hosts, .guardian = {.pid = -1, .pipe = -1, .page_fd = -1}};
  assert_int_equal(even_succession_return(&of->hosts), EVEN_OK);
  even_guardian_leave(&of->hosts.guardian); /* the job has another one */
  of->hosts.guards = false;
  await(acts, of);
  assert_int_equal(even_succession_want(&of->hosts), EVEN_OK); /* none is here */
  await(is_alone, of);
  assert_int_equal(look(of->hosts.voter).voters, 1);
  for (size_t i = 1; i < COUNT; i++) {
    links[i] = (even_link){.fd = -1};
    of->agents[i].link = &links[i];
  }
  assert_int_equal(even_succession_want(&of->hosts), EVEN_OK);
  assert_false(even_legacy_is_alone(&of->legacy));
  even_voter_guard(of->hosts.voter, NULL);
  even_succession_leave_to_others(&of->hosts); /* what votes no more is no obstacle either */
  assert_true(is_alone(of));
}

int main(void) {
  struct sigaction before;
#define SCENE(test) cmocka_unit_test_setup_teardown(test, open_scene, close_scene)
  const struct CMUnitTest tests[] = {
      SCENE(ranks_run_as_long_as_a_majority_hears_the_one_that_returned),
      SCENE(the_guardian_watches_on_where_it_ends_itself),
      cmocka_unit_test_setup_teardown(a_guardian_that_cannot_be_taken_is_an_error, open_alone, close_scene),
      SCENE(without_a_guardian_it_returns_as_well),
      SCENE(one_that_stands_before_it_serves_is_replaced),
      SCENE(one_whose_job_stands_before_its_loop_is_replaced),
      SCENE(whether_nobody_takes_its_place_is_left),
  };
  if (even_signals_pipe_ignore(&before) != EVEN_OK) {
    return 1;
  }
  return cmocka_run_group_tests(tests, NULL, NULL);
}
