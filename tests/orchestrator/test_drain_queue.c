/* In which order hosts are drained, and in which they stand in the list then. An agent here is what stands of it in
 * that list. */
#include "orchestrator/drain_queue.h"

#include "an_agent.h"
#include "base/alloc.h"
#include "base/fail.h"
#include "orchestrator/elastic.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

typedef struct scene {
  even_hosts hosts;
  even_job job;
  even_agent_params params;
  even_device device; /* without a core: no place is left here */
  even_device_list devices;
  char told[512];
} scene;

static void keep_notice(void *context, const char *text) {
  scene *at = context;
  (void)snprintf(at->told, sizeof at->told, "%s", text);
}

/* A job on `here`, x, y and z. */
static int open_scene(void **state) {
  static const char *const names[] = {"here", "x", "y", "z"};
  scene *at = NULL;
  assert_int_equal(EVEN_NEW(&at), EVEN_OK);
  at->devices = (even_device_list){&at->device, 1};
  at->params = (even_agent_params){.devices = &at->devices, .observer = {.context = at, .notice = keep_notice}};
  at->job = (even_job){.params = &at->params, .hosts = &at->hosts, .local = 1};
  at->hosts = (even_hosts){.count = 4,
                           .room = 4,
                           .job = &at->job,
                           .listener = -1,
                           .listen_ns = UINT64_MAX,
                           .listener_watch = {.fd = -1},
                           .params = {.patience_seconds = 600}};
  assert_int_equal(even_loop_open(&at->hosts.loop), EVEN_OK);
  assert_int_equal(even_elastic_open(&at->hosts), EVEN_OK);
  assert_int_equal(EVEN_NEW_ARRAY(&at->hosts.agents, 4), EVEN_OK);
  for (size_t i = 0; i < 4; i++) {
    at->hosts.agents[i] = an_agent(&at->hosts, i, names[i]);
  }
  assert_int_equal(even_hosts_open_parcels(&at->hosts), EVEN_OK);
  *state = at;
  return 0;
}

static int close_scene(void **state) {
  scene *at = *state;
  even_elastic_close(&at->hosts);
  even_free(at->hosts.elastic);
  even_parcels_close(at->hosts.parcels);
  even_free(at->hosts.agents);
  even_loop_close(&at->hosts.loop);
  even_free(at);
  return 0;
}

static even_status drain(scene *at, size_t host, const char *command) {
  json_t *words = json_loads(command, 0, NULL);
  assert_non_null(words);
  even_status status = even_move_begin(&at->job, &at->hosts.agents[host], words);
  json_decref(words);
  return status;
}

/* In their turn; who cannot leave by then stays, and this is said. Behind the host that
 * leads none waits. */
static void hosts_are_drained_one_after_the_other(void **state) {
  scene *at = *state;
  at->job.progress.reader = (even_telemetry_reader *)at; /* ranks could be asked */
  assert_int_equal(drain(at, 2, "{\"stay\":true}"), EVEN_OK);
  assert_int_equal(drain(at, 3, "{\"to\":[{\"host\":\"y\",\"ranks\":0}]}"), EVEN_OK);
  assert_int_equal(drain(at, 1, "{\"stay\":true}"), EVEN_OK);
  assert_true(even_drain_queue_has(&at->hosts, "z") && even_drain_queue_has(&at->hosts, "x"));
  assert_string_equal(at->hosts.elastic->move.from, "y");
  even_drain_queue_tick(&at->job);
  assert_string_equal(at->hosts.elastic->move.from, "y");
  at->hosts.elastic->move.stage = EVEN_MOVE_ASKED;
  at->hosts.agents[2].leaves = true;
  assert_int_equal(even_elastic_rearrange(&at->job), EVEN_OK);
  at->job.changing = true; /* until the next attempt has begun */
  even_drain_queue_tick(&at->job);
  assert_true(even_drain_queue_has(&at->hosts, "z"));
  at->job.changing = false;
  even_drain_queue_tick(&at->job);
  assert_false(even_drain_queue_has(&at->hosts, "z"));
  assert_non_null(strstr(at->told, "host z is not drained, and the job goes on as it is: the job has no host y"));
  even_drain_queue_tick(&at->job);
  assert_false(even_drain_queue_has(&at->hosts, "x"));
  assert_true(even_move_prepares(&at->job));
  assert_string_equal(at->hosts.elastic->move.from, "x");
  for (int i = 0; i < EVEN_DRAIN_QUEUE_MOST; i++) {
    assert_int_equal(drain(at, 2, "{}"), EVEN_OK);
  }
  assert_int_equal(drain(at, 2, "{}"), EVEN_ERR_STATE);
  even_drain_queue_close(&at->hosts);
  assert_int_equal(drain(at, 2, "{}"), EVEN_OK);
  at->hosts.hands_over = true;
  assert_int_equal(drain(at, 2, "{}"), EVEN_ERR_STATE);
  assert_string_equal(even_error_last()->what, "host x, which leads the job, is being drained");
  even_drain_queue_tick(&at->job); /* nor do those wait that did */
  assert_int_equal(at->hosts.elastic->queue.count, 0);
  assert_non_null(strstr(at->told, "host z is not drained, and the job goes on as it is: host x, which leads"));
  even_error_clear();
  at->job.progress.reader = NULL;
}

/* A host that is reached for those of one that is drained comes before it. Others may be drained, it may not. One that
 * is being started by a number that it has no more is started anew. */
static void a_witness_stays_the_last(void **state) {
  scene *at = *state;
  at->hosts.agents[3].witness = true;
  at->hosts.agents[3].count = 0;
  at->job.progress.reader = (even_telemetry_reader *)at;
  assert_int_equal(even_elastic_may_go(&at->job, &at->hosts.agents[1]), EVEN_OK);
  assert_int_equal(even_elastic_drain(&at->job, "z", NULL), EVEN_ERR_UNSUPPORTED);
  assert_string_equal(even_error_last()->what, "host z only votes (--witness): it has no ranks, and cannot be drained");
  assert_non_null(strstr(even_error_last()->fix, "its machine may go"));
  even_error_clear();
  at->job.progress.reader = NULL;
  at->params.notice_seconds = 60;
  even_elastic_notice(&at->job, &at->hosts.agents[3], &(even_notice){.signal = SIGTERM, .what = ""});
  assert_int_equal(at->hosts.agents[3].notice.signal, 0);
  at->hosts.agents[1].leaves = true;
  even_host_agent **guest = &at->hosts.elastic->guests[0];
  assert_int_equal(EVEN_NEW(guest), EVEN_OK);
  **guest = an_agent(&at->hosts, 4, "u");
  assert_int_equal(even_elastic_rearrange(&at->job), EVEN_OK);
  assert_int_equal(at->hosts.count, 4);
  assert_string_equal(at->hosts.agents[1].name, "y");
  assert_string_equal(at->hosts.agents[2].name, "u");
  assert_string_equal(at->hosts.agents[3].name, "z");
  assert_int_equal(even_hosts_count(&at->hosts), 3);
  for (size_t i = 1; i < 4; i++) {
    assert_int_equal(at->hosts.agents[i].index, i);
  }
  assert_false(at->hosts.agents[3].lost);
  at->hosts.agents[2].leaves = true;
  assert_int_equal(even_elastic_rearrange(&at->job), EVEN_OK);
  assert_int_equal(at->hosts.count, 3);
  assert_true(at->hosts.agents[2].witness && at->hosts.agents[2].lost);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(hosts_are_drained_one_after_the_other, open_scene, close_scene),
      cmocka_unit_test_setup_teardown(a_witness_stays_the_last, open_scene, close_scene),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
