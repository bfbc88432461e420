/* Hosts that join while the others train, as the leader's job sees it: no agent, and no process, plays any of them. */
#include "orchestrator/growth.h"

#include "an_agent.h"
#include "base/alloc.h"
#include "base/fail.h"
#include "fault/generation.h"
#include "orchestrator/elastic.h"
#include "orchestrator/remote.h"
#include "os/calls.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

/* Of five places two ranks begin here, and three are kept. */
enum { PLACES = 5, BEGAN = 2, ROOM = 4 };

typedef struct scene {
  even_job job;
  even_agent_params params;
  even_job_rank ranks[PLACES];
  int snapshots[PLACES];
  size_t order[PLACES];
  even_device each_device[PLACES];
  even_device_list devices;
  even_hosts hosts;
  even_generation *view;
  int joined; /* the first rank of the host of which the job's owner was told; -1: of none */
  char told[512];
} scene;

static scene at;

static void keep_notice(void *context, const char *text) {
  (void)context;
  (void)snprintf(at.told, sizeof at.told, "%s", text);
}

static void keep_joined(void *context, const char *host, int first, const even_device_list *devices) {
  (void)context;
  (void)host;
  assert_int_equal(devices->count, 0);
  at.joined = first;
}

static int hurt_nobody(pid_t pid, int number) {
  (void)pid;
  (void)number;
  return 0;
}

static int set_up(void **state) {
  (void)state;
  memset(&at, 0, sizeof at);
  even_os.kill = hurt_nobody;
  at.joined = -1;
  at.devices = (even_device_list){.items = at.each_device, .count = PLACES};
  at.params = (even_agent_params){.shrink = true,
                                  .grows = true,
                                  .spares = PLACES - BEGAN,
                                  .kept = PLACES - BEGAN,
                                  .least_ranks = 1,
                                  .devices = &at.devices,
                                  .hosts = &at.hosts,
                                  .observer = {.notice = keep_notice, .host_joined = keep_joined}};
  at.hosts = (even_hosts){.count = 1,
                          .room = ROOM,
                          .job = &at.job,
                          .listener = -1,
                          .listen_ns = UINT64_MAX,
                          .listener_watch = {.fd = -1},
                          .params = {.patience_seconds = 600, .most_ranks = PLACES}};
  at.job = (even_job){.params = &at.params,
                      .ranks = at.ranks,
                      .count = PLACES,
                      .order = at.order,
                      .host = "here",
                      .master_address = "10.79.0.1",
                      .hosts = &at.hosts,
                      .snapshots = at.snapshots,
                      .generation_fd = -1,
                      .oom = {.kernel_log = -1}};
  assert_int_equal(even_loop_open(&at.hosts.loop), EVEN_OK);
  assert_int_equal(even_elastic_open(&at.hosts), EVEN_OK);
  assert_int_equal(EVEN_NEW_ARRAY(&at.hosts.agents, ROOM), EVEN_OK);
  assert_int_equal(even_hosts_open_parcels(&at.hosts), EVEN_OK);
  even_job_hosts_count(&at.job);
  for (size_t i = 0; i < PLACES; i++) {
    at.snapshots[i] = -1;
    at.ranks[i].alive = i < BEGAN;
    at.ranks[i].elsewhere = i >= BEGAN;
    at.ranks[i].output =
        (even_rank_output){.rank = (int)i, .log = -1, .streams = {{.watch = {.fd = -1}}, {.watch = {.fd = -1}}}};
  }
  at.job.alive = BEGAN;
  assert_int_equal(even_progress_open(-1, PLACES, &at.job.progress), EVEN_OK);
  assert_int_equal(even_job_generations_open(&at.job), EVEN_OK);
  assert_int_equal(even_job_generations_begin(&at.job), EVEN_OK);
  assert_int_equal(even_generation_open(at.job.generation_fd, &at.view), EVEN_OK);
  return 0;
}

static int tear_down(void **state) {
  (void)state;
  even_os = even_os_real;
  even_generation_close(at.view);
  even_job_generations_close(&at.job);
  even_progress_close(&at.job.progress);
  for (size_t i = 1; i < at.hosts.count; i++) {
    even_free(at.hosts.agents[i].link);
  }
  even_elastic_close(&at.hosts);
  even_free(at.hosts.elastic);
  even_parcels_close(at.hosts.parcels);
  even_free(at.hosts.agents);
  even_free(at.hosts.gone);
  even_loop_close(&at.hosts.loop);
  return 0;
}

/* It has come with so many ranks, and has what the script needs. */
static void comes(size_t ranks) {
  even_host_agent **guest = &at.hosts.elastic->guests[0];
  assert_int_equal(EVEN_NEW(guest), EVEN_OK);
  **guest = (even_host_agent){.hosts = &at.hosts,
                              .name = "u",
                              .count = ranks,
                              .first = 1, /* nobody has said yet which */
                              .came = true,
                              .fits = true,
                              .grows = even_growth_may(&at.job),
                              .shell = {.pid = -1},
                              .input = -1,
                              .watches = {{.fd = -1}, {.fd = -1}}};
  assert_int_equal(EVEN_NEW(&(*guest)->link), EVEN_OK);
  (*guest)->link->fd = -1; /* nothing goes by it */
  assert_true((*guest)->grows);
}

static void all_can(void) {
  for (int i = 0; i < BEGAN; i++) {
    even_generation_say(at.view, i, "");
  }
}

static even_host_agent *let_in(size_t ranks) {
  comes(ranks);
  all_can();
  even_growth_tick(&at.job);
  assert_int_equal(at.hosts.count, 2);
  return &at.hosts.agents[1];
}

/* Its agent has begun, and a process runs in each of its places. */
static void starts(even_host_agent *agent) {
  agent->follows = true;
  even_job_replace_tick(&at.job);
  for (size_t i = agent->first; i < agent->first + agent->count; i++) {
    assert_true(at.ranks[i].alive);
    assert_true(even_job_is_outside(&at.job, i));
  }
}

static even_status speaks(const char *of_itself) {
  json_t *facts = json_loads(of_itself, 0, NULL);
  assert_non_null(facts);
  even_status status = even_growth_check(at.hosts.elastic->guests[0], facts);
  json_decref(facts);
  return status;
}

static void a_host_that_no_network_of_ours_reaches_is_refused(void **state) {
  (void)state;
  static const char without[] = "{\"packages\": {\"ucx\": \"\", \"no_ucx\": \"libucp.so.0 is not there\"}}";
  comes(2);
  at.hosts.facts = json_loads("{\"packages\": {\"ucx\": \"1.13.1\", \"no_ucx\": \"\"}}", 0, NULL);
  assert_int_equal(speaks("{\"packages\": {\"ucx\": \"1.12\"}}"), EVEN_OK);
  assert_int_equal(speaks("{\"packages\": {\"torch\": \"2.0\"}}"), EVEN_OK); /* which wants none */
  assert_int_equal(speaks("{}"), EVEN_OK);
  assert_int_equal(speaks(without), EVEN_ERR_MISMATCH);
  assert_non_null(strstr(even_error_last()->what, "host u has no UCX"));
  assert_non_null(strstr(even_error_last()->what, "libucp.so.0 is not there"));
  at.params.grows = false; /* the job restarts with it, and Gloo */
  assert_int_equal(speaks(without), EVEN_OK);
  at.params.grows = true;
  json_decref(at.hosts.facts);
  at.hosts.facts = json_loads("{\"packages\": {\"ucx\": \"\"}}", 0, NULL);
  assert_int_equal(speaks(without), EVEN_OK); /* nobody has it */
  json_decref(at.hosts.facts);
  at.hosts.facts = NULL;
}

static void places_are_given_in_rows_and_given_again(void **state) {
  (void)state;
  assert_int_equal(at.job.local, BEGAN);
  assert_int_equal(at.job.ended, PLACES - BEGAN); /* nobody misses who is not there */
  assert_int_equal(even_growth_places(&at.job, 3), BEGAN);
  assert_int_equal(even_growth_places(&at.job, 4), PLACES);
  even_host_agent *agent = let_in(2);
  assert_int_equal(agent->first, BEGAN);
  assert_int_equal(agent->count, 2);
  assert_int_equal(at.joined, BEGAN);
  assert_int_equal(even_growth_places(&at.job, 1), BEGAN + 2);
  assert_int_equal(even_growth_places(&at.job, 2), PLACES);
  starts(agent);
  agent->lost = true;
  even_free(agent->link);
  agent->link = NULL;
  assert_int_equal(even_growth_places(&at.job, 2), PLACES); /* its ranks have not ended yet */
  at.ranks[BEGAN].alive = at.ranks[BEGAN + 1].alive = false;
  assert_int_equal(even_growth_places(&at.job, 3), BEGAN);
  comes(3);
  even_growth_tick(&at.job);
  assert_int_equal(at.hosts.count, 3);
  assert_int_equal(at.hosts.agents[2].first, BEGAN);
  assert_int_equal(agent->count, 0);
}

static void it_waits_until_the_ranks_have_said_that_they_can(void **state) {
  (void)state;
  comes(2);
  even_growth_tick(&at.job);
  even_generation_say(at.view, 0, "");
  even_growth_tick(&at.job);
  assert_int_equal(at.hosts.count, 1);
  assert_int_equal(even_growth_waiting(&at.job), 2);
  even_generation_say(at.view, 1, "");
  even_growth_tick(&at.job);
  assert_int_equal(at.hosts.count, 2);
  assert_null(at.hosts.elastic->guests[0]);
  assert_true(at.hosts.elastic->grown && at.hosts.agents[1].late && at.hosts.agents[1].busy);
  assert_non_null(strstr(at.told, "host u joins with 2 ranks: processes start there while the others train"));
  assert_int_equal(even_job_members(&at.job), BEGAN); /* so far */
}

static void it_comes_before_a_witness(void **state) {
  (void)state;
  at.hosts.agents[1] = an_agent(&at.hosts, 1, "w");
  at.hosts.agents[1].count = 0;
  at.hosts.agents[1].witness = at.hosts.agents[1].lost = true;
  at.hosts.count = 2;
  comes(2);
  all_can();
  even_growth_tick(&at.job);
  assert_int_equal(at.hosts.count, 3);
  assert_string_equal(at.hosts.agents[1].name, "u");
  assert_int_equal(at.hosts.agents[1].index, 1);
  assert_true(at.hosts.agents[2].witness);
  assert_int_equal(at.hosts.agents[2].index, 2);
  assert_int_equal(even_hosts_count(&at.hosts), 2);
}

static void where_the_ranks_cannot_the_job_restarts_with_it(void **state) {
  (void)state;
  comes(2);
  even_generation_say(at.view, 0, "");
  even_generation_say(at.view, 1, "it trains in process sets");
  even_growth_tick(&at.job);
  assert_int_equal(at.hosts.count, 1);
  assert_int_equal(even_growth_waiting(&at.job), 0);
  assert_int_equal(even_guests_ranks(&at.hosts), 2);
  assert_non_null(strstr(at.told, "host u cannot join the ranks where they are: rank 1: it trains in process sets"));
}

static void a_generation_has_more_ranks_than_the_job_began_with(void **state) {
  (void)state;
  starts(let_in(2));
  even_generation_offer(at.view, BEGAN);
  even_job_replace_tick(&at.job);
  assert_int_equal(even_generation_wished(at.view), EVEN_WISH_STAND);
  even_generation_offer(at.view, BEGAN + 1);
  even_generation_stand(at.view, 0, 0);
  even_job_replace_tick(&at.job);
  assert_int_equal(even_generation_number(at.view), 0); /* one does not stand yet */
  even_generation_stand(at.view, 1, 0);
  even_job_replace_tick(&at.job);
  assert_int_equal(even_generation_number(at.view), 1);
  for (int i = 0; i < PLACES; i++) {
    assert_int_equal(even_generation_has(at.view, i, 1), i < BEGAN + 2);
  }
  assert_string_equal(at.told, "generation 1: ranks 2, 3 join ranks 0 and 1");
  assert_false(at.job.changing);
}

static void end(size_t rank) {
  at.ranks[rank].alive = false;
  at.ranks[rank].end.signal = SIGKILL;
  at.job.alive--;
  at.order[at.job.ended++] = rank;
}

/* Nor has a lost rank's place another process with --recovery shrink. */
static void a_newcomer_that_ends_harms_nobody_and_is_started_again(void **state) {
  (void)state;
  even_host_agent *agent = let_in(2);
  starts(agent);
  even_generation_offer(at.view, BEGAN);
  even_job_replace_tick(&at.job);
  end(BEGAN);
  assert_true(even_job_outside_ended(&at.job, BEGAN));
  assert_int_equal(even_job_members(&at.job), BEGAN);
  even_job_replace_tick(&at.job);
  assert_true(at.ranks[BEGAN].alive); /* another one */
  assert_int_equal(even_generation_wished(at.view), EVEN_WISH_NOTHING);
  assert_int_equal(even_generation_number(at.view), 0);
  end(1);
  even_job_replace_lost(&at.job, 1);
  even_job_replace_tick(&at.job);
  assert_false(at.ranks[1].alive);
  assert_int_equal(even_job_replace_free(&at.job), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(a_host_that_no_network_of_ours_reaches_is_refused, set_up, tear_down),
      cmocka_unit_test_setup_teardown(places_are_given_in_rows_and_given_again, set_up, tear_down),
      cmocka_unit_test_setup_teardown(it_waits_until_the_ranks_have_said_that_they_can, set_up, tear_down),
      cmocka_unit_test_setup_teardown(it_comes_before_a_witness, set_up, tear_down),
      cmocka_unit_test_setup_teardown(where_the_ranks_cannot_the_job_restarts_with_it, set_up, tear_down),
      cmocka_unit_test_setup_teardown(a_generation_has_more_ranks_than_the_job_began_with, set_up, tear_down),
      cmocka_unit_test_setup_teardown(a_newcomer_that_ends_harms_nobody_and_is_started_again, set_up, tear_down),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
